"""What a server cannot beat: least times from its options, its model's config and its machine."""

import dataclasses
import json
import math
import os
import statistics
import subprocess
from pathlib import Path

from tables.errors import UserError
from serving import physics
from serving.load import answered
from serving.options import SHARE, VENV, Options
from tables import hardware

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


@dataclasses.dataclass(frozen=True)
class Machine:
    """What serves: its name, peak FLOP/s and bytes/s of one copy of the model, dollars an hour.

    `dollars_per_hour` is nan where no price is published for it.
    """

    system: str
    peak: float
    bandwidth: float
    dollars_per_hour: float
    options: Options


def machine_of(options, config=None, dollars_per_hour=0.0):
    """The `Machine` that the server's options describe.

    An accelerator's peak and bandwidth are its data sheet's. For a CPU: the fastest matrix product and
    the fastest read of a model-sized array that one core manages in many attempts, times the cores, which
    errs on the high side.

    Args:
      config: the model's config.json; None reads it from the options' folder.
      dollars_per_hour: of all chips; 0: the published price, if there is one.
    """
    config = config or json.loads((Path(options.model) / "config.json").read_text())
    if not options.chip:
        probe = PROBE.replace("BYTES", str(int(step_bytes(config, options))))
        done = subprocess.run([VENV / "python", "-c", probe], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"calibrating failed: {done.stderr.strip().splitlines()[-1]}")
        peak, bandwidth = (float(number) / options.data_parallel for number in done.stdout.split())
        return Machine(f"{os.cpu_count()} CPU cores", peak, bandwidth, dollars_per_hour or math.nan, options)
    chip = hardware.chip(options.chip)
    name = (f"{options.chips} x {options.chip}" if options.engine == "gpu-docker" else
            hardware.slice_name(options.chip, options.chips))
    fast = ("int8", "fp8") if options.chip == "h100" else ("int8",)  # fp8 is as fast there
    peak = chip.int8 if options.quantization in fast else chip.flops
    return Machine(name, peak * options.tensor_parallel,
                   chip.bandwidth * options.tensor_parallel,
                   dollars_per_hour or (chip.dollars_per_hour or math.nan) * options.chips, options)


def step_bytes(config, options, batch=0, context=0):
    """Bytes that one decode step of one copy must read: of each number one if it is quantised, else two."""
    return physics.decode_bytes(config, batch, context, 1 if options.quantization else 2,
                                1 if "8" in options.kv_cache_dtype else 2, options.tensor_parallel)


def ttft_floors(config, input_len, starts, machine):
    """Least possible TTFT in seconds: (one request alone, median of arrivals at `starts`)."""
    work = physics.prefill_flops(config, input_len) / machine.peak
    alone = max(work, step_bytes(config, machine.options) / machine.bandwidth)
    copies, starts = machine.options.data_parallel, sorted(starts)  # equal work: they take turns
    waits = [wait for k in range(copies) if starts[k::copies]
             for wait in physics.fcfs_ttft(starts[k::copies], work)]
    return alone, max(alone, statistics.median(waits))


def tpot_floor(config, input_len, machine, batch=1, tokens=1.0, checked=1):
    """Least possible time per output token in seconds: of one request alone, or of a full batch.

    Args:
      tokens: per step and request: more than one with speculative decoding (`server.acceptance`).
      checked: tokens that a step computes for each request: with a drafter, its proposals and one.
    """
    return physics.tpot_floor(
        step_bytes(config, machine.options, batch, input_len), machine.bandwidth,
        checked * physics.decode_flops(config, batch, input_len), machine.peak) / tokens


def floors(result, machine, config=None):
    """The floors of one measurement, in milliseconds, and what is impossible about it, if anything.

    Only requests that were answered count, among the arrivals as well: a refused one costs no work.

    Args:
      config: as for `machine_of`.
    """
    config = config or json.loads((Path(machine.options.model) / "config.json").read_text())
    series, done = result["series"], answered(result)
    alone, queued = ttft_floors(config, series["input_len"], done.start, machine)
    tokens = (series.get("speculation") or {}).get("tokens per step", 1.0)
    step = tpot_floor(config, series["input_len"], machine, tokens=tokens)
    found = (("TTFT, the fastest request,", 1e3 * done.ttft.min(), 1e3 * alone),
             ("TTFT, first come first served,", 1e3 * done.ttft.median(), 1e3 * queued),
             ("TPOT", result["p50_tpot_ms"], 1e3 * step))
    flags = [f"impossible: {what} {measured:.4g} ms is below the floor of {floor:.4g} ms"
             for what, measured, floor in found if measured < floor]
    if series["cached_tokens"] > 0:
        flags.append(f"{series['cached_tokens']:.0f} prompt tokens came from the prefix cache")
    return {"ttft_floor_ms": 1e3 * alone, "ttft_queue_floor_ms": 1e3 * queued, "tpot_floor_ms": 1e3 * step,
            "flag": flags[0] if flags else ""}


def memory_plan(config, chip_bytes, tp, dp, kv_dtype_bytes, stored):
    """HBM per chip and the requests that fit, for one layout; sizes are per chip, in GiB.

    Every layer keeps all tokens: vLLM's TPU package 0.32.0 sets `sliding_window = None` in its cache
    (`runner/kv_cache_manager.py`).

    Args:
      stored: bytes of the weights of one copy.
    """
    gib = 2.0**30
    left = SHARE * chip_bytes - stored / tp
    per_token = physics.kv_bytes_per_token(config, kv_dtype_bytes, tp)
    if kv_dtype_bytes == 1 and tp >= 4:  # one global head per chip: its K and V fill half of a
        per_token["full"] *= 2           # 32-bit word, which holds four fp8 numbers
    each = sum(per_token.values()) / tp
    return {"dp": dp, "weights, GiB/chip": stored / tp / gib, "tokens": dp * int(left / each),
            "one of 16,384, GiB/chip": 16_384 * each / gib, "requests of 16,384": dp * int(left / (16_384 * each))}
