"""What a server can't beat: least times from its options, its model's config and its machine."""

import math
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from serving import environment
from serving.commands import VENV
from serving.options import SHARE, Options
from serving.results import Measurement
from tables import hardware, physics
from tables.architecture import (
    Config, layers, parameters, quantization_of, quantized_groups, read_config, text_config,
    unquantized)
from tables.errors import UserError

GIB = 2.0**30
LONG = 16_384  # tokens of the long request that a memory plan counts


class Logged(NamedTuple):
    """How many tokens the cache of somebody's server of the 31B holds, by its own log."""

    server: str
    chips: int          # v6e; all share one copy
    tokens: int
    weights: float = 0  # bytes, as logged; 0: the checkpoint in bfloat16


# github.com/xbill9/gemma4-dev. The first two: gce-vllm-v6e8-31b/benchmarks/runs, August 2026. Its
# report of 2026-08-25 quotes the third from a preprint, Zimbres 2026. The last two:
# gce-vllm-v6e1-31b-q4w4a16 and -w4a16, runs of 2026-09-29. Caches are in bfloat16.
LOGGED = (
    Logged("vLLM 0.26.1rc1", 4, 67_392),
    Logged("image v0.26.0", 4, 67_328),
    Logged("Zimbres 2026, a preprint", 8, 187_136),
    Logged("four bits, in 04's format", 1, 11_520, weights=19.04 * GIB),
    Logged("four bits, Google's own file", 1, 8_320, weights=21.67 * GIB))

PROBE = """
import os, time, torch
torch.set_num_threads(1)
def best(work, seconds=0.7):
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 20:
        start = time.perf_counter(); work(); times.append(time.perf_counter() - start)
    return min(times)
flops = max(2 * 512**3 / best(lambda: torch.mm(a, b, out=c))
            for a, b, c in [[torch.ones(512, 512, dtype=t) for _ in range(3)]
                            for t in (torch.bfloat16, torch.float32)])
array = torch.ones(BYTES // 4)
speed = array.numel() * 4 / best(lambda: array.sum())
print(flops * os.cpu_count(), speed * os.cpu_count())
"""


@dataclass(frozen=True)
class Machine:
    """What serves: its name, peak FLOP/s and bytes/s of one copy of the model, dollars an hour.

    `dollars_per_hour` is nan where no price is published for it.
    """

    system: str
    peak: float
    bandwidth: float
    dollars_per_hour: float
    options: Options


def machine_of(options: Options, config: dict | None = None,
               dollars_per_hour: float = 0.0) -> Machine:
    """The `Machine` that the server's options describe.

    An accelerator's peak and bandwidth are its data sheet's. If the sheet has no peak of int8, it's
    twice that of bfloat16. For a CPU: the fastest matrix product and the fastest read of a
    model-sized array that one core manages in many attempts, times the cores. Both err on the high
    side, so that no measurement is called impossible wrongly.

    Args:
      config: the model's config.json; None reads it from the options' folder.
      dollars_per_hour: of all chips; 0: the published price, if there is one.

    Raises:
      UserError: the CPU can't be calibrated; or an accelerator serves, and the options name none.
    """
    if not options.chip and options.engine != "cpu":
        chips = ", ".join(hardware.CHIPS)
        raise UserError(
            f"engine={options.engine!r} needs a chip in 05's settings, because the floors come "
            f"from its data sheet. There are {chips}. Write another one's into _CHIPS of "
            "tables/hardware.py.")
    if not options.chip:
        return _this_cpu(options, config or read_config(options.model), dollars_per_hour)
    chip = hardware.chip(options.chip)
    if options.engine == "gpu-docker":
        name = f"{options.chips} x {options.chip}"
    else:
        name = hardware.slice_name(options.chip, options.chips)
    fast = ["int8"]
    if options.chip == "h100" or not chip.int8:  # fp8 is as fast there, or it may be
        fast.append("fp8")
    peak = chip.flops
    if options.quantization in fast or _multiplies_in_eight_bits(config or {}):
        peak = chip.int8 or 2 * chip.flops  # no chip of the table gains more by smaller numbers
    of_a_chip = chip.dollars_per_hour or math.nan
    price = of_a_chip * options.chips
    return Machine(
        system=name,
        peak=peak * options.tensor_parallel,
        bandwidth=chip.bandwidth * options.tensor_parallel,
        dollars_per_hour=dollars_per_hour or price,
        options=options)


def _this_cpu(options: Options, config: dict, dollars_per_hour: float) -> Machine:
    """The machine that we run on, measured for a second and a half.

    Raises:
      UserError: it can't be measured.
    """
    size = step_bytes(config, options)
    probe = PROBE.replace("BYTES", str(size))
    words = [str(VENV / "python"), "-c", probe]
    done = subprocess.run(words, capture_output=True, text=True, env=environment.for_child())
    if done.returncode:
        why = f"its process ended with {done.returncode}"  # out of memory, it's killed and silent
        lines = done.stderr.strip().splitlines()
        if lines:
            why = environment.without_secrets(lines[-1])
        raise UserError(f"calibrating failed: {why}")

    peak, bandwidth = map(float, done.stdout.split())
    copies = options.data_parallel
    return Machine(
        system=f"{os.cpu_count()} CPU cores",
        peak=peak / copies,
        bandwidth=bandwidth / copies,
        dollars_per_hour=dollars_per_hour or math.nan,
        options=options)


def step_bytes(config: dict, options: Options, batch: int = 0, context: int = 0) -> int:
    """Bytes that one decode step of one copy must read, at the least.

    That's two for each number, or one if the server quantizes weights or cache. If the checkpoint
    has its matrices in fewer bits (`_stored_bits`), those count, without their step sizes.
    """
    weight = 2
    if options.quantization:
        weight = 1
    cached = 2
    if "8" in options.kv_cache_dtype:
        cached = 1
    plain = unquantized(config)
    read = physics.decode_bytes(plain, batch, context, weight, cached, options.tensor_parallel)
    fewer_bits = 8 * weight - _stored_bits(config)
    if fewer_bits > 0:
        read -= parameters(plain)["matmul"] * fewer_bits // 8
    return read


def _stored_bits(config: Config) -> int:
    """Bits of a stored weight of a layer's matrix: 16 in bfloat16.

    compressed-tensors says it for each group of matrices, and the fewest count. Of what we can't
    read we say four, so that no measurement is called impossible wrongly.
    """
    quantized = quantization_of(config)
    if not quantized:
        return 16
    fewest = 16
    for group in quantized_groups(quantized):
        weights = group.get("weights") or {}
        bits = weights.get("num_bits")
        if type(bits) is not int:
            return 4
        fewest = min(fewest, bits)
    return fewest


def _multiplies_in_eight_bits(config: Config) -> bool:
    """Whether a stored model may be multiplied with numbers of eight bits, twice as fast."""
    quantized = quantization_of(config)
    if not quantized:
        return False
    for group in quantized_groups(quantized):
        if not group or group.get("input_activations"):
            return True
    return False


def _first_token_flops(config: Config, tokens: int) -> int:
    """FLOP from a prompt to the first token of its answer, at the least.

    Layers that use an earlier layer's keys and values (E2B, E4B) leave nothing that a later token
    needs. So only the prompt's last token has to go through them, and vLLM can do it like that
    (`--kv-sharing-fast-prefill`).
    """
    plain = unquantized(config)
    text = text_config(plain)
    per_layer_input = 3 * text["hidden_size"] * (text["hidden_size_per_layer_input"] or 0)
    spared = 0  # multiplications
    for layer in layers(plain):
        if layer.owns_kv:
            continue
        matrices = per_layer_input + sum(module.size for module in layer.modules())
        pairs = layer.pairs(tokens) - layer.keys(tokens)
        spared += matrices * (tokens - 1) + 2 * layer.heads * layer.head_dim * pairs
    return physics.prefill_flops(plain, tokens) - 2 * spared


def ttft_floors(config: dict, input_len: int, starts: Sequence[float],
                machine: Machine) -> tuple[float, float]:
    """Least possible TTFT in seconds: (one request alone, median of arrivals at `starts`)."""
    work = _first_token_flops(config, input_len) / machine.peak
    reading = step_bytes(config, machine.options) / machine.bandwidth
    alone = max(work, reading)

    copies = machine.options.data_parallel
    in_order = sorted(starts)
    waits: list[float] = []
    for first in range(copies):  # equal work: they take turns
        arrivals = in_order[first::copies]
        waits += physics.fcfs_ttft(arrivals, work)
    queued = statistics.median(waits)
    return alone, max(alone, queued)


def tpot_floor(
        config: dict,
        input_len: int,
        machine: Machine,
        batch: int = 1,
        tokens: float = 1.0,
        checked: int = 1) -> float:
    """Least possible time per output token in seconds: of one request alone, or of a full batch.

    Args:
      tokens: per step and request: more than one with speculative decoding (`asking.acceptance`).
      checked: tokens that a step computes for each request: with a drafter, its proposals and one.
    """
    moved = step_bytes(config, machine.options, batch, input_len)
    flops = checked * physics.decode_flops(unquantized(config), batch, input_len)
    step = physics.tpot_floor(moved, machine.bandwidth, flops, machine.peak)
    return step / tokens


def floors(measurement: Measurement, machine: Machine, config: dict | None = None) -> dict:
    """The floors of one measurement, in milliseconds, and what is impossible about it, if anything.

    Only requests that were answered count, among the arrivals as well: a refused one costs no work.

    Args:
      config: as for `machine_of`.
    """
    config = config or read_config(machine.options.model)
    series = measurement.series
    answered = measurement.answered()
    starts = list(answered.start)
    inputs = series.input_len
    alone, queued = ttft_floors(config, inputs, starts, machine)
    tokens = 1.0
    if series.speculation:
        tokens = series.speculation["tokens per step"]
    step = tpot_floor(config, inputs, machine, tokens=tokens)

    floor = {
        "ttft_floor_ms": 1e3 * alone,
        "ttft_queue_floor_ms": 1e3 * queued,
        "tpot_floor_ms": 1e3 * step}
    flag = _first_doubt(measurement, answered, floor)
    return floor | {"flag": flag}


def _first_doubt(
        measurement: Measurement, answered: pd.DataFrame, floor: dict[str, float]) -> str:
    """What is wrong with a measurement, by its floors in milliseconds; "" if nothing is.

    Args:
      answered: of `Measurement.answered`.
    """
    ttft = 1e3 * answered.ttft
    measured = [
        ("TTFT, the fastest request,", ttft.min(), floor["ttft_floor_ms"]),
        ("TTFT, first come first served,", ttft.median(), floor["ttft_queue_floor_ms"])]
    longer = answered[answered.tokens > 1]  # one token has no gap, and vLLM then says 0 ms
    if len(longer):
        tpot = measurement.percentile("tpot", 50)
        if measurement.series.speculation:  # steps of all, so the mean of all: some guess better
            gaps = (longer.latency - longer.ttft) / (longer.tokens - 1)
            tpot = 1e3 * gaps.mean()
        measured.append(("TPOT", tpot, floor["tpot_floor_ms"]))
    for what, time, least in measured:
        if time >= least:
            continue
        return f"impossible: {what} {time:.4g} ms is below the floor of {least:.4g} ms"
    cached = measurement.series.cached_tokens
    if cached > 0:
        return f"{cached:.0f} prompt tokens came from the prefix cache"
    return ""


def published_floors(points: pd.DataFrame, config: dict) -> pd.DataFrame:
    """The published times to the first token of a sweep over the 31B, beside their floors.

    Each point is the median of 30 prompts, on a v6e-8 or on two H100s. For the longest prompts,
    called ~16k, we count 15,360 tokens and 7 prompts, because so many explain their times (10,
    section 6).

    Args:
      points: of data/published/qps_sweep_digitized.csv.
      config: of the 31B.

    Returns:
      the rows of TTFT, with `machine`, `floor_ms`, and `too_fast`: less than 1/1.2 of the floor.
    """
    v6e = hardware.chip("v6e")
    h100 = hardware.chip("h100")
    peaks = {"tpu": 8 * v6e.flops, "gpu": 2 * h100.flops}
    published = points[points.metric == "ttft"]
    least = []
    for point in published.itertuples():
        if point.input_tokens == "~16k":
            tokens = 15_360
            prompts = 7
        else:
            tokens = int(point.input_tokens)
            prompts = 30
        flops = physics.prefill_flops(config, tokens)
        seconds = flops / peaks[point.device]
        floor = physics.median_ttft_floor_fcfs(prompts, point.qps, seconds)
        least.append(1e3 * floor)
    machines = published.device.map({"tpu": "v6e-8", "gpu": "2 × H100"})
    floors_ms = pd.Series(least, published.index)
    too_fast = floors_ms > 1.2 * published.value
    return published.assign(floor_ms=least, too_fast=too_fast, machine=machines)


def pace(arrivals: Sequence[float], made: float) -> tuple[float, str]:
    """The time between two pieces of a streamed answer, and why it can't be believed, if it can't.

    Nobody can receive tokens faster than they are made. Where that seems so, this client was late:
    it was still starting, or short of CPU, and read many pieces at once that had waited for it.

    Args:
      arrivals: seconds from sending the request to each piece.
      made: seconds in which the server made a token, on its own clock (`asking.seconds_per_token`),
        or its floor (`tpot_floor`).

    Returns:
      (seconds, ""), or (nan, why).
    """
    gaps = len(arrivals) - 1
    if gaps < 1:
        return math.nan, "one piece has no gap"
    took = arrivals[-1] - arrivals[0]
    gap = took / gaps
    if gap < 0.8 * made:
        why = (f"one piece every {1e3 * gap:.2g} ms can't be: making a token takes "
               f"{1e3 * made:.2g} ms here. This client read late, and many at once")
        return math.nan, why
    return gap, ""


def layouts(config: dict, stored: float) -> dict[str, dict]:
    """Six ways to place a model on up to eight v6e chips, by name: arguments for `memory_plan`.

    Only the weights that are multiplied with get fewer bits. In fp8 each of them takes one byte
    less than in bfloat16. In four bits every 32 of them share a step size of 16 bits.

    Args:
      stored: bytes of the weights of one copy, in bfloat16.
    """
    matmul = physics.parameters(config)["matmul"]
    in_fp8 = stored - matmul
    four_bits = (4 + 16 / 32) / 8  # bytes of a weight, with its part of the step size
    in_four_bits = stored - 2 * matmul + four_bits * matmul
    eight = {
        "tp": 8,
        "dp": 1,
        "kv_dtype_bytes": 2,
        "stored": stored,
    }
    two_copies = {**eight, "tp": 4, "dp": 2}
    return {
        "1. eight chips share it": eight,
        "2. two copies, four chips each": two_copies,
        "3. as 1, cache in fp8": {**eight, "kv_dtype_bytes": 1},
        "4. as 2, cache in fp8": {**two_copies, "kv_dtype_bytes": 1},
        "5. as 2, all in fp8": {**two_copies, "kv_dtype_bytes": 1, "stored": in_fp8},
        "6. one chip, four bits": {**eight, "tp": 1, "stored": in_four_bits},
    }


def memory_plan(
        config: dict,
        chip_bytes: float,
        tp: int,
        dp: int,
        kv_dtype_bytes: int,
        stored: float,
        share: float = SHARE) -> dict[str, float]:
    """HBM per chip and the requests that fit, for one layout; sizes are per chip, in GiB.

    Every layer keeps all tokens: vLLM's TPU package 0.32.0 sets `sliding_window = None` in its
    cache (`runner/kv_cache_manager.py`).

    Args:
      stored: bytes of the weights of one copy.
      share: of a chip's memory that vLLM takes.
    """
    left = share * chip_bytes - stored / tp
    per_token = physics.kv_bytes_per_token(config, kv_dtype_bytes, tp)
    if kv_dtype_bytes == 1 and tp >= 4:  # one global head per chip: its K and V fill half of a
        per_token["full"] *= 2           # 32-bit word, which holds four fp8 numbers
    token = sum(per_token.values()) / tp
    request = LONG * token
    return {
        "dp": dp,
        "weights, GiB/chip": stored / tp / GIB,
        "tokens": dp * int(left / token),
        "one of 16,384, GiB/chip": request / GIB,
        "requests of 16,384": dp * int(left / request),
    }


def against_logs(config: dict, stored: float) -> pd.DataFrame:
    """The tokens that `memory_plan` predicts for the servers of `LOGGED`, beside what they said.

    Args:
      config: of the 31B.
      stored: bytes of its weights in bfloat16.
    """
    chip = hardware.chip("v6e")
    rows = []
    for log in LOGGED:
        plan = memory_plan(
            config,
            chip_bytes=chip.hbm,
            tp=log.chips,
            dp=1,
            kv_dtype_bytes=2,
            stored=log.weights or stored)
        predicted = plan["tokens"]
        miss = predicted / log.tokens - 1
        rows.append({
            "server": log.server,
            "chips": log.chips,
            "predicted": f"{predicted:,}",
            "measured by others": f"{log.tokens:,}",
            "off by": f"{miss:+.1%}"})
    return pd.DataFrame(rows)
