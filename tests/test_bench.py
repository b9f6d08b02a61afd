"""06 and its room: points, the knee, noise, floors, cost, and what goes wrong in a sweep.

The client and the server are small stand-ins here; vLLM's own client measures in the series.
"""

import contextlib
import csv
import json
import math
import os
import re
import signal
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import a_server_record, ROOT, RUN, load

from helpers import four_bits
from serving import Options, asking, commands, limits, results, server, traffic
from serving import load as bench
from serving.load import Load
from serving.results import Measurement
from tables import physics
from tables.errors import UserError
from tables.hardware import chip

INF = math.inf
CONFIG = json.loads((ROOT / "data/configs/gemma4_31b.json").read_text())
V6E = Options(engine="tpu-docker", model="m", tensor_parallel=8, chip="v6e")
CPU = Options(model="m")
TINY = Load(regimes=((256, 64),), seconds=4.0, min_requests=10, slo=(500, 30))


def machine(peak, bandwidth, options=V6E):
    return limits.Machine("here", peak, bandwidth, 0.07, options)


MACHINE = {
    "tpu": machine(8 * 918e12, 8 * 1.638e12),  # FLOP/s, bytes/s
    "gpu": machine(2 * 989e12, 2 * 3.35e12, replace(V6E, tensor_parallel=2)),
}
RECORD = a_server_record("http://127.0.0.1:9")
ENDLESS = {kind: replace(one, bandwidth=math.inf) for kind, one in MACHINE.items()}


def published(name):
    with open(ROOT / "data" / "published" / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def finish(result, starts, ttfts, latencies, outputs, errors):
    """A result as vLLM writes it, from its requests."""
    done = [k for k, error in enumerate(errors) if not error]
    tpots = [(latencies[k] - ttfts[k]) / max(outputs - 1, 1) for k in done]
    result |= {
        "completed": len(done),
        "failed": len(errors) - len(done),
        "start_times": list(starts),
        "duration": max(s + t for s, t in zip(starts, latencies)),
        "ttfts": list(ttfts),
        "latencies": list(latencies),
        "errors": errors,
        "output_lens": [0 if error else outputs for error in errors],
        "itls": [
            [] if error else [tpot] * (outputs - 1) for error, tpot in zip(errors, [0.01] * 10**6)
        ],
        "total_output_tokens": outputs * len(done),
    }
    for kind, values in (
        ("ttft", [ttfts[k] for k in done]),
        ("tpot", tpots),
        ("itl", tpots),
        ("e2el", [latencies[k] for k in done]),
    ):
        result |= {f"p{p}_{kind}_ms": 1e3 * float(np.percentile(values, p)) for p in (50, 90, 99)}
    return result


def point(inputs=256, outputs=64, rate=4.0, requests=30, ttft=0.1, tpot=0.01, cached=0.0, failed=0):
    """A result as vLLM writes it, with our additions, of requests that all look alike."""
    starts = [0.0 if rate == INF else i / rate for i in range(requests)]
    latency, done = ttft + tpot * (outputs - 1), requests - failed
    result = {
        "request_rate": "inf" if rate == INF else rate,
        "num_prompts": requests,
        "total_input_tokens": inputs * done,
        "series": {
            "made_by": {},
            "input_len": inputs,
            "output_len": outputs,
            "repeat": 0,
            "cached_tokens": cached,
            "speculation": None,
        },
    }
    return finish(
        result,
        starts,
        [ttft] * done + [0.0] * failed,
        [latency] * done + [0.0] * failed,
        outputs,
        [""] * done + ["refused"] * failed,
    )


# -- Floors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, tpu, gpu",
    [
        (512, 4.1, 15.3),
        (1024, 8.3, 30.9),
        (2048, 16.9, 62.6),
        (4096, 34.2, 127.1),
        (8192, 70.1, 260.2),
        (15360, 136.4, 506.5),
    ],
)
def test_floor_of_one_request_is_the_published_audit_table(tokens, tpu, gpu):
    for device, wanted in (("tpu", tpu), ("gpu", gpu)):
        alone, queued = limits.ttft_floors(CONFIG, tokens, [0.0], ENDLESS[device])
        assert 1e3 * alone == pytest.approx(wanted, abs=0.06) and queued == alone


def of(**given):
    """The `Measurement` of a `point`."""
    return Measurement.of(point(**given))


def flagged(device, tokens, ttft_ms, rate, requests=30):
    return limits.floors(
        of(inputs=tokens, outputs=512, rate=rate, requests=requests, ttft=ttft_ms / 1e3, tpot=1.0),
        ENDLESS[device],
        CONFIG,
    )["flag"]


def test_published_tables_are_flagged_as_the_audit_says():
    """AUDIT 5.1 and 5.2: no more and no fewer."""
    found = set()
    for entry in published("inference_results"):
        if entry["metric"] == "median_ttft":
            for device in ("tpu", "gpu"):
                if flagged(
                    device,
                    int(entry["input_tokens"]),
                    float(entry[device]),
                    INF if "inf" in entry["load"] else 4.0,
                ):
                    found.add((int(entry["input_tokens"]), device))
    assert found == {(15360, "tpu"), (15360, "gpu"), (512, "tpu"), (512, "gpu")}
    found = set()
    for entry in published("qps_sweep_digitized"):
        if entry["metric"] == "ttft" and entry["value"]:
            tokens = 15360 if entry["input_tokens"] == "~16k" else int(entry["input_tokens"])
            if flagged(entry["device"], tokens, float(entry["value"]), float(entry["qps"])):
                found.add((tokens, entry["device"], int(float(entry["qps"]))))
    assert found == {(1024, "gpu", 64)} | {(2048, "gpu", q) for q in (4, 8, 16, 32, 64)} | {
        (4096, "tpu", q) for q in (32, 64)
    } | {(15360, d, q) for d in ("tpu", "gpu") for q in (2, 4, 8, 16, 32, 64)}


def test_refused_requests_cost_no_work_and_are_not_fast():
    """A burst of which half is refused: the floor must not count arrivals that cost no work."""
    work = limits.ttft_floors(CONFIG, 4096, [0.0], ENDLESS["tpu"])[0]
    waits = [work * (k + 1) for k in range(15)]
    result = point(4096, 64, INF, 30, failed=15)
    finish(
        result,
        [0.0] * 30,
        waits + [0.0] * 15,
        [w + 2 for w in waits] + [0.0] * 15,
        64,
        [""] * 15 + ["refused"] * 15,
    )
    found = limits.floors(Measurement.of(result), ENDLESS["tpu"], CONFIG)
    assert found["flag"] == "" and found["ttft_queue_floor_ms"] == pytest.approx(8e3 * work)
    result["ttfts"][3] = work / 2
    flag = limits.floors(Measurement.of(result), ENDLESS["tpu"], CONFIG)["flag"]
    assert flag.startswith("impossible: TTFT, the fastest")


def test_a_warm_cache_and_a_token_faster_than_memory_are_flagged():
    flag = lambda **k: limits.floors(
        of(inputs=4096, outputs=512, rate=1.0, **k), MACHINE["tpu"], CONFIG
    )["flag"]
    assert flag() == "" and "prefix cache" in flag(cached=4096.0)
    assert flag(ttft=0.030).startswith("impossible: TTFT") and flag(tpot=0.004).startswith(
        "impossible: TPOT"
    )
    drafted = point(4096, 512, 1.0, tpot=0.004)
    drafted["series"]["speculation"] = {"tokens per step": 2.3}
    assert limits.floors(Measurement.of(drafted), MACHINE["tpu"], CONFIG)["flag"] == "", (
        "a drafter's tokens share a step"
    )


def test_a_checkpoint_in_four_bits_has_floors_of_its_own():
    """Others got 36 tokens/s from a 31B in four bits on one v6e, of 80 by all that it stores."""
    config = CONFIG | {"quantization_config": four_bits.METHOD}
    v6e = limits.machine_of(Options(engine="tpu", model="m", chip="v6e"), config)
    plain = limits.floors(of(inputs=1024, ttft=1.0, tpot=1 / 36), v6e, CONFIG)
    assert plain["flag"].startswith("impossible: TPOT")
    found = limits.floors(of(inputs=1024, ttft=1.0, tpot=1 / 36), v6e, config)
    assert found["flag"] == "" and 10 < found["tpot_floor_ms"] < 1000 / 80
    assert found["ttft_floor_ms"] == plain["ttft_floor_ms"], "as many operations"
    unknown = CONFIG | {"quantization_config": {"quant_method": "another"}}
    assert limits.step_bytes(unknown, v6e.options) == limits.step_bytes(config, v6e.options)
    assert limits.machine_of(v6e.options, config).peak == v6e.peak == chip("v6e").flops
    eight = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}
    both = CONFIG | {"quantization_config": {"config_groups": {"group_0": eight}}}
    assert limits.machine_of(v6e.options, both).peak == chip("v6e").int8
    assert limits.step_bytes(config, v6e.options) < limits.step_bytes(both, v6e.options)
    trained = CONFIG | {"quantization_config": {"quant_type": "q4_0"}}  # Google's, in bfloat16
    assert limits.step_bytes(trained, v6e.options) == limits.step_bytes(CONFIG, v6e.options)


def test_only_the_last_token_has_to_go_through_layers_that_share_keys_and_values():
    """`fast_prefill_forward` of vLLM's Gemma 4 does just that: the E2B's last 20 of 35 layers."""
    e2b = json.loads((ROOT / "data/configs/gemma4_e2b.json").read_text())
    text = e2b.get("text_config") or e2b
    first = text | {"num_hidden_layers": 15, "num_kv_shared_layers": 0,
                    "layer_types": text["layer_types"][:15]}
    for tokens in (1, 600, 4096):
        last = physics.decode_flops(text, 1, tokens) - physics.decode_flops(first, 1, tokens)
        least = (physics.prefill_flops(first, tokens) + last) / MACHINE["tpu"].peak
        alone, _ = limits.ttft_floors(e2b, tokens, [0.0], ENDLESS["tpu"])
        assert alone == pytest.approx(least, rel=1e-12)
    assert least < 0.6 * physics.prefill_flops(e2b, tokens) / MACHINE["tpu"].peak


def test_an_accelerator_without_a_name_does_not_get_the_floors_of_this_cpu():
    gpu = Options(engine="gpu-docker", model="m", tensor_parallel=2)
    with pytest.raises(UserError, match="'gpu-docker' needs a chip.*h100") as caught:
        limits.machine_of(gpu, CONFIG)
    assert "\n" not in str(caught.value)


def test_a_calibration_that_is_killed_is_one_line(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(limits, "VENV", tmp_path)
    with pytest.raises(UserError, match="calibrating failed: its process ended with -9"):
        limits.machine_of(CPU, CONFIG)


def test_an_answer_of_one_token_has_no_pace_that_could_be_impossible():
    one = of(inputs=1024, outputs=1, rate=1.0, ttft=1.0)
    assert one.percentile("tpot", 50) == 0, "as vLLM says it"
    assert limits.floors(one, MACHINE["tpu"], CONFIG)["flag"] == ""


def test_a_drafter_that_guesses_well_for_most_requests_is_not_impossible():
    """Three of five get five tokens a step, the others one; a step takes twice its floor."""
    slow = 2 * limits.tpot_floor(CONFIG, 1024, MACHINE["tpu"])
    result = point(1024, 101, 1.0, requests=5, ttft=1.0)
    gaps = [slow / 5] * 3 + [slow] * 2
    latencies = [1.0 + 100 * gap for gap in gaps]
    finish(result, result["start_times"], [1.0] * 5, latencies, 101, [""] * 5)
    result["p50_tpot_ms"] = 1e3 * slow / 5
    tokens = 5 * 100 / (3 * 20 + 2 * 100)  # of all, by all steps
    result["series"]["speculation"] = {"tokens per step": tokens}
    assert limits.floors(Measurement.of(result), MACHINE["tpu"], CONFIG)["flag"] == ""
    result["series"]["speculation"] = {"tokens per step": tokens / 2.1}
    flag = limits.floors(Measurement.of(result), MACHINE["tpu"], CONFIG)["flag"]
    assert flag.startswith("impossible: TPOT")


def test_floors_chips_and_price_follow_the_servers_options():
    full, second = load("05_serve_vllm.py", "FULL", "SECOND")
    v6e, eight = chip("v6e"), limits.machine_of(full, CONFIG)
    assert (eight.system, eight.peak) == ("v6e-8", 8 * v6e.flops)
    assert eight.dollars_per_hour == pytest.approx(21.52, abs=0.01)
    other = replace(second, quantization="")
    two = limits.machine_of(other, CONFIG)
    assert (two.system, two.peak, two.bandwidth) == ("v6e-8", 4 * v6e.flops, 4 * v6e.bandwidth)
    sliding, full_kv = (
        50 * 2 * 16 * 256,
        10 * 2 * 4 * 512,
    )  # K and V, heads, size; 4 heads on 4 chips
    cache = lambda options: (
        limits.step_bytes(CONFIG, options, 1, 4096) - limits.step_bytes(CONFIG, options)
    )
    assert cache(other) == sliding * 1024 + full_kv * 4096 and limits.step_bytes(
        CONFIG, other
    ) == 2 * limits.step_bytes(CONFIG, second)
    assert cache(full) == 2 * (sliding * 1024 + 2 * full_kv * 4096), (
        "bfloat16, 4 heads stored for 8 chips"
    )
    alone, burst = limits.ttft_floors(CONFIG, 4096, [0.0] * 30, replace(two, bandwidth=math.inf))
    assert alone == pytest.approx(2 * 34.2e-3, rel=0.01), "half of the chips work on one request"
    assert burst == pytest.approx(8 * alone), "two copies: 15 each, the median of 1, 1, 2, 2 ..."
    int8 = limits.machine_of(replace(full, quantization="int8", tensor_parallel=4), CONFIG)
    assert int8.peak == 2 * 4 * v6e.flops and int8.dollars_per_hour == pytest.approx(10.76)
    h100 = limits.machine_of(
        replace(full, engine="gpu-docker", chip="h100", tensor_parallel=2), CONFIG
    )
    assert h100.system == "2 x h100"


def test_the_six_layouts_of_05_hold_what_its_figure_shows():
    """Redone by hand: 8 v6e chips, 62.5 GB, a token of 983,040 bytes on eight chips."""
    held = []
    for layout in limits.layouts(CONFIG, 62.5e9).values():
        held.append(limits.memory_plan(CONFIG, chip("v6e").hbm, **layout)["requests of 16,384"])
    left = 8 * 0.92 * chip("v6e").hbm - 62.5e9
    assert held[0] == int(left / (16_384 * 983_040)) == 11
    assert held[1] == 2 * 4 and held[3] == 2 * 7, "two copies: the solutions of 05 once had these"
    assert held[1] < held[0] < held[2] and held[3] < held[4] and held[5] == 0


def test_the_memory_plan_is_that_of_servers_that_others_logged():
    """31B in bfloat16 on v6e chips: within half a per cent of 67,392, 67,328 and 187,136 tokens."""
    for chips, measured in ((4, 67_392), (4, 67_328), (8, 187_136)):
        fit = limits.memory_plan(CONFIG, chip("v6e").hbm, chips, 1, 2, 62.5e9)["tokens"]
        assert fit == pytest.approx(measured, rel=0.006)
    table = limits.against_logs(CONFIG, 62.5e9)
    assert list(table["measured by others"]) == [
        "67,392", "67,328", "187,136", "11,520", "8,320"]
    assert list(table["predicted"]) == ["67,671", "67,671", "187,643", "11,570", "8,436"]
    assert (
        limits.memory_plan(CONFIG, chip("v6e").hbm, 8, 1, 2, 62.5e9)["requests of 16,384"]
        == 187_643 // 16_384
    )


def test_four_bits_take_what_others_logged_on_one_v6e_chip():
    """A 31B in 04's format, with its towers: 19.04 GiB of weights, 90 blocks of 128 tokens."""
    layout = limits.layouts(CONFIG, 62.5e9)["6. one chip, four bits"]
    fit = limits.memory_plan(CONFIG, chip("v6e").hbm, **layout)
    assert fit["weights, GiB/chip"] == pytest.approx(19.04, abs=0.05)
    assert fit["tokens"] // 128 * 128 == 11_520


# -- What a server delivered, against servers whose capacity is known ------------------------------


def queue(rate, service, requests, seed):
    """Poisson arrivals, rescaled as vLLM does, at one server with a fixed service time.

    As in vLLM's client, the run begins at 0, a gap before its first request.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / min(rate, 1e9), requests)
    starts = np.cumsum(gaps) * (requests / min(rate, 1e9) / gaps.sum())
    free, latencies = 0.0, []
    for start in starts:
        free = max(free, start) + service
        latencies.append(free - start)
    return finish(
        {
            "request_rate": "inf" if rate == INF else rate,
            "num_prompts": requests,
            "total_input_tokens": 256 * requests,
        },
        starts.tolist(),
        [lat * 0.9 for lat in latencies],
        latencies,
        64,
        [""] * requests,
    )


def batching(rate, requests, seed, tokens=64, slots=64):
    """The same for continuous batching: a step is 10 ms, 0.5 per running request, 4 per new one."""
    gaps = np.random.default_rng(seed).exponential(1, requests)
    starts = np.cumsum(gaps) * (requests / gaps.sum()) / rate
    clock, admitted, running, ends = 0.0, 0, {}, np.zeros(requests)
    while admitted < requests or running:
        clock = clock if running else max(clock, starts[admitted])
        step = 0.010
        while admitted < requests and starts[admitted] <= clock and len(running) < slots:
            running[admitted], admitted, step = tokens, admitted + 1, step + 0.004
        clock += step + 0.0005 * len(running)
        running = {number: left - 1 for number, left in running.items()}
        ends[[number for number, left in running.items() if not left]] = clock
        running = {number: left for number, left in running.items() if left}
    latencies = (ends - starts).tolist()
    result = finish(
        point(rate=rate, requests=requests),
        starts.tolist(),
        latencies,
        latencies,
        tokens,
        [""] * requests,
    )
    return Measurement.of(result | {"duration": float(clock)})


def test_a_batching_server_is_never_said_to_deliver_more_than_it_can():
    capacity = 64 / (64 * (0.010 + 64 * 0.0005) + 64 * 0.004)  # all 64 slots full, 64 tokens each
    lone, best = batching(1.0, 1, 0).latencies[0], 0.0
    for rate in (4, 8, 16, 32, 128, INF):
        requests = int(15 * min(rate, capacity))
        given = [results.delivered_rate(batching(rate, requests, seed), lone) for seed in range(3)]
        assert max(given) < 1.02 * min(rate, capacity), rate
        if rate < 0.9 * capacity:
            assert min(given) > 0.9 * rate, rate
        best = max(best, *given)
    assert best == pytest.approx(capacity, rel=0.04)
    burst = finish(
        point(rate=INF, requests=16),
        np.linspace(0, 0.07, 16),
        [0.1] * 16,
        [0.284] * 16,
        64,
        [""] * 16,
    )
    assert results.rows([Measurement.of(burst)], (500, 30)).delivered_rps[0] == pytest.approx(
        16 / 0.354
    ), "its least latency is no idle one"


def measured_queue(rate, seed):
    """30 requests at a server that takes 0.1 s for each."""
    return Measurement.of(queue(rate, 0.1, 30, seed) | {"series": point()["series"]})


def test_the_gap_before_the_first_request_is_no_time_of_load_for_a_queue():
    """Of 30 requests at twice the capacity, seed by seed: the capacity, however long the gap."""
    given = [results.delivered_rate(measured_queue(20, seed), 0.1) for seed in range(40)]
    assert min(given) > 9.85 and max(given) < 10.2 and np.std(given) < 0.08
    kept = [results.delivered_rate(measured_queue(2, seed), 0.1) for seed in range(40)]
    assert min(kept) > 1.98 and max(kept) <= 2.001, "who keeps up needs the gap: n gaps, n requests"


def test_no_run_delivers_less_than_nothing_because_a_request_alone_was_slow():
    """Noise made the five requests alone slow; a whole run is shorter than one of them."""
    run = of(rate=100.0, requests=10, ttft=0.1, tpot=0.001)
    assert run.duration == pytest.approx(0.253)
    for lone in (0.2, 0.26, 0.3, 10.0):
        assert 39 < results.delivered_rate(run, lone) < 112


# -- The sweep -------------------------------------------------------------------------------------


class Queue:
    """A client whose server needs `service` seconds per request, one after the other."""

    def __init__(self, service, fail_at=10**9):
        self.service, self.fail_at, self.calls = service, fail_at, []
        self.record = RECORD

    def run(self, arguments):
        if len(self.calls) + 1 >= self.fail_at:
            raise ValueError("vllm bench serve failed: ConnectionRefusedError")
        given = dict(zip(arguments, arguments[1:]))
        self.calls.append(
            (float(given["--request-rate"]), int(given["--num-prompts"]), given["--seed"])
        )
        return queue(*self.calls[-1][:1], self.service, self.calls[-1][1], int(given["--seed"]))


@pytest.fixture
def idle(monkeypatch):
    """A server that is idle and has counters."""
    monkeypatch.setattr(asking, "counters", lambda record: asking.collections.defaultdict(float))


@pytest.mark.parametrize("capacity", [2.7, 16.0, 90.0])
def test_the_knee_of_a_known_queue_is_enclosed_within_a_quarter(idle, tmp_path, capacity):
    """Whatever the machine: rates follow from it, at least seven and all at once."""
    client, load = Queue(1 / capacity), replace(TINY, seconds=20.0)
    measured = bench.sweep(client, CPU, load, tmp_path)
    table = results.rows(measured, load.slo)
    assert set(table.groupby("rate").size()) <= {2, 3, 4, 5} and 8 <= table.rate.nunique() <= 10
    last, above = results.kept_up(table)
    assert last <= 1.02 * capacity <= 1.12 * above and above <= 1.7 * last
    assert table[table.rate.between(last / 1.5, above)].groupby("rate").size().min() >= 3
    crowded = results.overloaded_rate(table)
    shares = table[table.rate == crowded].delivered_rps / crowded
    assert crowded < INF and shares.median() < 0.75, "its queue is plain to see"
    sent = {requests for rate, requests, _ in client.calls[3:] if rate > above}
    assert len(sent) == 1, "beyond the knee, latencies of different numbers cannot be compared"
    assert len({seed for *_, seed in client.calls}) == len(client.calls)
    again = Queue(1 / capacity, fail_at=1)
    assert len(bench.sweep(again, CPU, load, tmp_path)) == len(measured), "all from files"


def shares_in(log):
    """[(rate, share)] that a sweep prints, such as (7.2, "93%"), in order."""
    return [(float(rate), share) for rate, share in re.findall(r"  ([\d.]+)/s (\d+%)", log)]


def test_the_shares_printed_during_a_sweep_are_those_of_the_table(idle, tmp_path, capsys):
    """Latencies that get shorter while it runs once changed what earlier runs had delivered."""
    load = replace(TINY, seconds=4.0)
    client = Disturbed(1 / 16, lambda number, rate: number < 5)
    measured = bench.sweep(client, CPU, load, tmp_path)
    told = shares_in(capsys.readouterr().out)
    table = results.rows(measured, load.slo)
    finite = table[table.rate < INF]
    shares = [f"{share:.0%}" for share in finite.delivered_rps / finite.rate]
    assert len(told) > 8 and told == list(zip(finite.rate, shares, strict=True))
    assert table.lone_ms.nunique() == 1 and table.lone_ms[0] == pytest.approx(3e3 / 16)
    later = min(measurement.shortest_latency() for measurement in measured)
    assert later < 0.9 * 3 / 16, "or this proves nothing"


def test_a_sweep_that_an_older_version_began_goes_on_from_its_files(idle, tmp_path, capsys):
    """They lack the request alone: that's measured, and nothing else."""
    first = bench.sweep(Queue(0.1), CPU, TINY, tmp_path)
    (tmp_path / "256-64_inf_alone.json").unlink()
    client = Queue(0.1)
    capsys.readouterr()
    again = bench.sweep(client, CPU, TINY, tmp_path)
    assert [call[:2] for call in client.calls] == [(INF, bench.ALONE)] and again == first
    assert "256/64: one request alone takes 100 ms" in capsys.readouterr().out


def test_one_request_alone_is_sent_after_the_other(tmp_path):
    alone = bench.Point((256, 64), INF, bench.ALONE, together=1)
    more = bench.arguments(RECORD, TINY, alone, 1)
    assert more[more.index("--max-concurrency") + 1] == "1"
    assert "--max-concurrency" not in bench.arguments(
        RECORD, TINY, bench.Point((256, 64), 4, 9), 1)
    salts = []
    prompted = bench.Point((256, 64), 4, 9, prompts=tmp_path)
    for seed in (1, 2):
        own = bench.arguments(RECORD, TINY, prompted, seed)
        salts.append(json.loads(own[own.index("--extra-body") + 1])["cache_salt"])
    assert len(set(salts)) == 2 and all(salts), "a cache must not know an earlier run's prompts"


@pytest.mark.parametrize("guess", [0.1, 0.6, 1.0, 1.7, 12.0])
@pytest.mark.parametrize("knee", [0.37, 5.0, 333.0])
def test_the_search_adds_rates_until_the_knee_is_enclosed(knee, guess):
    """The server delivers what is offered up to the knee, and never more than the knee."""
    delivered = {INF: [knee]}
    while rate := bench.next_rate(repeats_of(delivered), knee * guess):
        assert rate not in delivered
        delivered[rate] = [min(rate, knee)] * 3
    tried = sorted(set(delivered) - {INF})
    last, above = results.kept_up(repeats_of(delivered))
    following = min(rate for rate in tried if rate > last)
    assert last <= 1.02 * knee < above < INF and knee <= 0.7 * max(tried)
    assert following / last <= bench.WITHIN and len(tried) <= 12
    rates = bench.spread(tried, 7)
    assert set(tried) <= set(rates) and len(rates) == max(7, len(tried)) and rates == sorted(rates)


def test_the_search_of_a_server_that_keeps_up_with_nothing_ends():
    """Halving goes on to a fiftieth of the guess: a slower rate would take hours."""
    delivered = {INF: [10.0]}
    while rate := bench.next_rate(repeats_of(delivered), 10.0):
        delivered[rate] = [rate / 2] * 3
    assert 0.2 < min(delivered) < 0.5 and len(delivered) < 9


def test_the_run_that_found_no_knee_now_asks_for_a_higher_rate():
    """2.72/s delivered 90.07% in the median; one repeat said overloaded, and no rate above it."""
    table = repeats_of({1.36: [1.28, 1.31, 1.34], 1.93: [1.81, 1.9, 1.9], 2.29: [2.17, 2.23, 2.23],
                        2.72: [2.44, 2.68, 2.45], INF: [4.75, 5.33, 4.68]})
    assert results.kept_up(table) == (2.29, INF)
    assert results.states(table)[2.72] == "at the limit" and results.overloaded_rate(table) == INF
    assert bench.next_rate(table, 4.54) == 3.7


def test_a_point_is_measured_once_and_again_only_for_another_server_or_load(idle, tmp_path):
    client, own = Queue(0.1), tmp_path / "own.jsonl"
    def measure(options=CPU, load=TINY, requests=30, prompts=None):
        point = bench.Point((256, 64), 4, requests, prompts)
        return bench.Bench(client, options, load, tmp_path).measure(point, 0)

    first = measure()
    assert measure() == first and len(client.calls) == 1
    assert measure(load=replace(TINY, slo=(1, 1))) == first, (
        "the objective is no part of what was measured"
    )
    for changed in (
        lambda: measure(replace(CPU, kv_cache_dtype="fp8")),
        lambda: measure(requests=31),
        lambda: measure(replace(CPU, model_hash="another")),
        lambda: measure(replace(CPU, model="another")),
        lambda: measure(load=replace(TINY, warmups=2)),
        *(lambda text=text: own.write_text(text) and measure(prompts=own) for text in "ab"),
    ):
        before = len(client.calls)
        changed()
        assert len(client.calls) == before + 1
    for content in ('{"completed": 3', "[]", '{"completed": 3}', "\0"):
        (tmp_path / "256-64_4_0.json").write_text(content)
        before = len(client.calls)
        measure()
        assert len(client.calls) == before + 1, content


def test_a_server_that_dies_leaves_the_finished_points(idle, tmp_path):
    with pytest.raises(ValueError, match="ConnectionRefused"):
        bench.sweep(Queue(0.1, fail_at=6), CPU, TINY, tmp_path)
    kept = len(list(tmp_path.glob("*.json")))
    rest = Queue(0.1)
    measured = bench.sweep(rest, CPU, TINY, tmp_path)
    assert kept == 5 and len(rest.calls) == len(measured) + 3 - kept, "a request alone, two bursts"


CLIENT = """
import json, sys, time
from pathlib import Path
for line in sys.stdin:
    words = json.loads(line)
    if words[0] == "long":
        time.sleep(2)
    place = Path(words[words.index("--result-dir") + 1])
    (place / "result.json").write_text(json.dumps({"run": words[0]}))
    print("vllm-cpu: done", flush=True)
"""


def test_a_run_that_was_interrupted_is_not_taken_for_the_next_one(tmp_path, monkeypatch):
    """06 says: if you interrupt the search, it continues where it was."""
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    monkeypatch.setattr(commands, "LAUNCHER", script)
    monkeypatch.setattr(commands, "VENV", Path(sys.executable).parent)
    monkeypatch.setattr(server, "prepare", lambda *words: None)
    monkeypatch.setattr(server, "current", lambda folder: RECORD)
    with bench.Client(tmp_path) as client:
        assert client.run(["first"]) == {"run": "first"}
        interrupt = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            client.run(["long"])
        assert client.run(["second"]) == {"run": "second"}


def test_a_point_waits_until_the_server_is_idle(monkeypatch):
    """What an interrupted client still has running is not measured as ours."""
    pages = iter([(3, 2), (1, 0), (0, 0)])

    def metrics(*_):
        running, waiting = next(pages, (3, 4))
        return (
            f'vllm:num_requests_running{{e="0"}} {running}.0\n'
            f'vllm:num_requests_waiting{{e="0"}} {waiting}.0\n'
        )

    monkeypatch.setattr(asking, "request", metrics)
    asking.wait_idle(RECORD)
    with pytest.raises(UserError, match="not idle: 3 requests run and 4 wait"):
        asking.wait_idle(RECORD, patience=0.1)


# -- The knee, the objective, the price ------------------------------------------------------------


def repeats_of(delivered, **more):
    """A table as `rows` makes it, from {rate: delivered of each repeat}."""
    return pd.DataFrame(
        [
            {
                "input_len": 256,
                "output_len": 64,
                "rate": rate,
                "repeat": k,
                "delivered_rps": value,
                "lone_ms": 100.0,
                "goodput_rps": value,
                "ttft_p50_ms": 50.0,
                "ttft_p90_ms": 90.0,
                "tpot_p50_ms": 9.0,
                "e2el_p50_ms": 500.0,
                "hours_per_million_output": 1 / value,
                "usd_per_million_output": math.nan,
                **more,
            }
            for rate, values in delivered.items()
            for k, value in enumerate(values)
        ]
    )


@pytest.mark.parametrize(
    "delivered, last, above",
    [
        ({4: [4, 4, 4], 8: [7.9, 7.8, 7.9], 16: [10, 11, 10], INF: [11, 11, 11]}, 8, 16),
        (
            {4: [4, 4, 1], 8: [7.1, 7.1, 7.9], 16: [10, 11, 10], INF: [11, 11, 11]},
            4,
            16,
        ),  # a repeat was disturbed; at 8 they disagree
        ({4: [4, 4, 3.5], 8: [8, 8, 8], 16: [11, 11, 11]}, 8, 16),  # noise: 8 is harder than 4
        (
            {0.5: [0.5], 1: [0.92], 2: [0.92], INF: [0.92]},
            0.5,
            1,
        ),  # 92% of 1/s, and a queue forever
        ({4: [4, 4, 4], 8: [8, 8, 8]}, 8, INF),
        ({4: [3, 3, 3], 8: [3, 3, 3], INF: [3, 3, 3]}, 0, 4),
    ],
)
def test_the_knee_is_the_last_rate_that_every_repeat_kept_up_with(
    delivered, last, above
):
    table = repeats_of(delivered)
    assert (
        results.kept_up(table)
        == results.kept_up(table.sample(frac=1, random_state=1))
        == (last, above)
    )


def test_a_rate_is_within_the_objective_only_if_requests_keep_both_times():
    table = repeats_of({4.0: [4.0] * 3, 8.0: [8.0] * 3, 16.0: [10.0] * 3})
    table["goodput_rps"] = [4.0, 3.6, 3.0, 8.0, 6.8, 6.9, 10.0, 10.0, 10.0]
    assert results.within(table).to_dict() == {4.0: True, 8.0: False, 16.0: False}
    marginal = of(requests=100, ttft=0.1, tpot=0.01)  # 9% wait too long, 9% are too slow
    marginal.ttfts[:9], marginal.latencies[:9] = [0.6] * 9, [1.2] * 9
    marginal.latencies[9:18] = [4.0] * 9
    assert results.share_kept(marginal, (500, 30)) == pytest.approx(0.82), "each p90 is within it"
    failed = of(requests=4, failed=1)
    assert results.share_kept(failed, (500, 30)) == 1, "a failed request is not a fast one"


class Slowly:
    """A server that keeps up for a minute: at 95% of its limit and more its queue grows slowly."""

    record = RECORD

    def run(self, arguments):
        given = dict(zip(arguments, arguments[1:]))
        rate, n = float(given["--request-rate"]), int(given["--num-prompts"])
        starts = [k / rate for k in range(n)]
        waits = [0.05 + max(0.0, rate - 7.6) * start * 0.01 for start in starts]
        return finish(
            {"request_rate": rate, "num_prompts": n, "total_input_tokens": 1},
            starts,
            waits,
            [w + 0.3 for w in waits],
            64,
            [""] * n,
        )


def test_a_price_is_confirmed_by_a_long_run_or_the_next_lower_rate_is_taken(idle, tmp_path, capsys):
    """At 8/s the objective holds for a minute and not for ten; 7/s holds."""
    table = repeats_of({4.0: [4.0] * 3, 7.0: [7.0] * 3, 8.0: [8.0] * 3, 12.0: [9.0] * 3})
    load = replace(TINY, slo=(500, 30), long=600.0)
    short = bench.Bench(Slowly(), CPU, load, tmp_path).measure(
        bench.Point((256, 64), 8.0, 480), 0)
    assert results.share_kept(short, load.slo) == 1
    runs = bench.confirm(Slowly(), CPU, load, tmp_path, table)
    assert [(run.regime, run.rate, run.held) for run in runs] == [
        ((256, 64), 8.0, False), ((256, 64), 7.0, True)]
    assert runs[0].share < 0.9 <= runs[1].share
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert runs[1].measurement.raw["num_prompts"] == 4200, "600 s"
    brief, = bench.confirm(Slowly(), CPU, replace(load, long=1.0), tmp_path / "b", table)
    assert brief.measurement.raw["num_prompts"] == 80, "20 latencies of half a second, at 8/s"


class Refusing(Slowly):
    """The same server, which refuses one request in twelve."""

    def run(self, arguments):
        result = super().run(arguments)
        n = result["num_prompts"]
        errors = ["Bad Request" if k % 12 == 6 else "" for k in range(n)]
        return finish(result, result["start_times"], result["ttfts"], result["latencies"], 64,
                      errors)


def test_a_request_that_failed_in_a_long_run_did_not_keep_the_objective(idle, tmp_path, capsys):
    table = repeats_of({4.0: [4.0] * 3, 7.0: [7.0] * 3, 12.0: [9.0] * 3})
    load = replace(TINY, slo=(500, 30), long=60.0)
    run, = bench.confirm(Refusing(), CPU, load, tmp_path, table)
    assert run.share == pytest.approx(11 / 12) and run.held
    told = capsys.readouterr().out
    assert "92% within the objective" in told and "(35 of 420 requests failed)" in told


def test_requests_pile_up_only_beyond_what_the_server_can_do():
    crowded, calm = (Measurement.of(queue(rate, 0.1, 40, 3) | {"series": point()["series"]})
                     for rate in (40, 2))
    first, middle, last = results.under_way(crowded)
    assert 5 < first < middle < last and last >= 25
    assert max(results.under_way(calm)) <= 3
    burst = of(rate=INF, requests=8)
    assert results.under_way(burst, [1.0]) == [8]


def test_the_floor_of_a_curve_is_named_where_it_is_and_lanes_have_no_number_too_many():
    from matplotlib.figure import Figure

    from serving import draw

    table = repeats_of({4.0: [4.0] * 2, 8.0: [7.0] * 2, INF: [9.0] * 2})
    ax = Figure().add_subplot()
    draw.curves(ax, table, "delivered_rps", "delivered", "rate", "offered")
    named, = (text for text in ax.texts if text.get_text() == "offered")
    assert named.xy == (8.0, 8.0) and named.xyann[1] > 0, "above the measured curve"
    lanes = Figure().add_subplot()
    draw.requests(lanes, of(requests=20))
    assert lanes.get_yticks().max() <= 20 and lanes.get_yticks().min() >= 1


def test_a_row_has_goodput_and_price_by_the_same_delivered_rate():
    result = point(requests=4, ttft=0.1, tpot=0.01)
    result["ttfts"], result["latencies"] = [0.1, 0.4, 0.6, 0.1], [0.73, 1.03, 1.23, 3.0]
    result = Measurement.of(result)
    row = results.rows([result], (500, 30), 0.07).iloc[0]
    assert row.goodput_rps == pytest.approx(row.delivered_rps / 2), (
        "one waited too long, one was too slow"
    )
    assert row.usd_per_million_output == pytest.approx(0.07 / 3600 / (row.delivered_rps * 64) * 1e6)
    assert math.isnan(results.rows([result], (500, 30)).usd_per_million_output[0])


# -- Noise and overload ----------------------------------------------------------------------------

STORED = {  # the sweep and the long run that printed "54.8/s ... 31.6/s delivered"
    27.4: [27.3, 27.2, 27.3],
    38.7: [38.2, 38.5, 36.7],
    54.8: [54.8, 54.4, 51.3],
    83.8: [76.6, 77.1, 75.9],
    104: [77.0, 74.4, 85.3],
    128: [90.4, 87.5, 85.0],
    INF: [91.1, 86.0, 85.1],
}


def test_what_contradicts_itself_is_noise_and_what_is_too_much_is_overloaded():
    table = repeats_of(STORED)
    assert results.noisy(table) == []
    assert set(results.states(table).values()) == {"kept up", "overloaded"}
    assert results.states(table)[83.8] == "kept up" and results.states(table)[104] == "overloaded"
    assert results.overloaded_rate(table) == 128
    assert results.is_contradicted(54.8, 31.6, table) and not results.is_contradicted(
        54.8, 51.3, table
    )
    assert not results.is_contradicted(104, 76.7, table), (
        "near its limit a short run errs by a fifth"
    )
    folded = repeats_of(STORED)
    folded.loc[folded.rate == 27.4, "ttft_p90_ms"] = 149.0
    assert results.noisy(folded) == [27.4] and results.states(folded)[27.4] == "kept up, noisy"
    regime = folded.assign(input_len=64, output_len=16)
    assert set(results.while_it_keeps_up(regime).rate) == {38.7, 54.8, 83.8}
    assert results.noisy(repeats_of({4: [4, 4, 3], 8: [8, 8, 8], INF: [9, 9, 9]})) == [4]
    assert results.noisy(repeats_of({4: [4, 4, 4], 8: [5, 5, 5], 12: [9, 9, 9]})) == [8]
    assert results.noisy(repeats_of({4: [4, 4, 4], 8: [5, 5, 5], INF: [9, 9, 9]})) == [], (
        "a burst may be easier than a rate: many prompts are read in one step"
    )
    assert results.noisy(repeats_of({4: [4, 4, 3.5], 8: [8, 8, 8], 16: [11, 11, 11]})) == [4]


class Disturbed(Queue):
    """A server to which, in some runs, something else leaves a third of the machine."""

    def __init__(self, service, disturbed):
        super().__init__(service)
        self.disturbed, self.usual = disturbed, service

    def run(self, arguments):
        rate = float(arguments[arguments.index("--request-rate") + 1])
        slow = self.disturbed(len(self.calls), rate)
        self.service = 3 * self.usual if slow else self.usual
        return super().run(arguments)


def test_a_disturbed_point_of_a_sweep_is_measured_again(idle, tmp_path, capsys):
    load = replace(TINY, seconds=20.0)
    plain = bench.sweep(Queue(1 / 16), CPU, load, tmp_path / "plain")
    rates = sorted({measurement.rate for measurement in plain})
    hit = rates[2]
    seen = []

    def disturbed(_, rate):
        seen.append(rate)
        return rate == hit and seen.count(hit) == 2

    measured = bench.sweep(Disturbed(1 / 16, disturbed), CPU, load, tmp_path / "hit")
    table = results.rows(measured, load.slo)
    assert f"at {hit:.3g}/s is noisy, so once more" in capsys.readouterr().out
    assert 3 <= (table.rate == hit).sum() <= 5 and results.kept_up(table)[0] >= hit
    assert "noisy" in results.states(table)[hit], "and it is told as such"


def test_noise_while_the_knee_is_looked_for_does_not_move_it(idle, tmp_path):
    """The fourth run, the first rate of the bisection, has a third of the machine."""
    load = replace(TINY, seconds=20.0)
    client = Disturbed(1 / 16, lambda number, rate: number == 3)
    table = results.rows(bench.sweep(client, CPU, load, tmp_path), load.slo)
    last, above = results.kept_up(table)
    assert 13 < last <= 1.02 * 16 and 16 <= 1.12 * above


def test_a_long_run_that_noise_disturbed_is_made_again_before_it_counts(idle, tmp_path, capsys):
    table = repeats_of({4.0: [4.0] * 3, 7.0: [7.0] * 3, INF: [9.0] * 3})
    load = replace(TINY, slo=(5000, 300), long=60.0)
    client = Disturbed(1 / 9, lambda number, rate: number == 0)
    run, = bench.confirm(client, CPU, load, tmp_path, table)
    assert run.rate == 7.0 and run.held and len(client.calls) == 2
    told = capsys.readouterr().out.splitlines()
    assert "less than it has shown that it can: something else took the machine" in told[0]
    always = Disturbed(1 / 9, lambda number, rate: rate > 5)
    runs = bench.confirm(always, CPU, load, tmp_path / "b", table)
    assert [(run.rate, run.held) for run in runs] == [(7.0, False), (4.0, True)]
    assert len(always.calls) == 3, "twice at 7/s, then the next lower rate"


def test_the_price_falls_with_the_rate_and_points_say_what_the_rate_is():
    from matplotlib.figure import Figure

    from serving import draw

    table = repeats_of(STORED | {90.0: [78.0, 84.0, 77.0]}).sort_values("rate")
    table["dollars_per_hour"] = math.nan
    ax = Figure().add_subplot()
    draw.price(ax, table, "machine-hours", [])
    rate, price = ax.lines[0].get_xydata().T
    assert rate.tolist() == sorted(set(STORED) - {INF} | {90.0}), "all at once is no rate"
    kept = price[rate <= 83.8]
    assert (np.diff(kept) < 0).all()
    fills = {line.get_xdata()[0]: line.get_markerfacecolor() for line in ax.lines[1:]
             if len(line.get_xdata()) == 1 and line.get_marker() in ("o", "D")}
    assert fills[54.8] == draw.BLUE and fills[90.0] == draw.LIGHT and fills[104] == "white"


def test_a_price_is_said_only_at_a_rate_that_held():
    run = of(rate=4.0, outputs=64)
    held = results.LongRun((256, 64), 4.0, run, 1.0, True)
    assert results.prices([], "USD", 7.2) == [
        "no rate held, so there's no price that anybody could count on"]
    row = results.rows([run], (INF, INF), 7.2).iloc[0]
    dollars, = results.prices([held], "USD", 7.2)
    hours, = results.prices([held], "machine-hours", math.nan)
    busy, seldom = re.findall(r"([0-9.]+) USD", dollars)
    assert float(busy) == pytest.approx(row.usd_per_million_output, rel=0.06)
    assert float(seldom) == pytest.approx(row.usd_per_million_output / 0.3, rel=0.06)
    assert "256/64 at 4/s" in dollars
    assert f"{row.hours_per_million_output:.2g} machine-hours" in hours


def test_a_promise_is_drawn_beside_the_short_runs():
    from matplotlib.figure import Figure

    from serving import draw

    table = repeats_of(STORED)
    run = results.LongRun((256, 64), 54.8, of(rate=54.8), 0.74, False)
    ax = Figure().add_subplot()
    draw.promise(ax, table, [run])
    stars = [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "*"]
    assert stars == [[[54.8, 74.0]]]


def test_the_summary_has_five_columns_beside_the_rate_and_two_digits():
    table = repeats_of({2.72: [2.44, 2.68, 2.45], INF: [4.75] * 3})
    table = table.assign(tpot_p90_ms=1661.7)
    table["goodput_rps"] = table.delivered_rps / 2
    lines = results.summary(table).to_dict("records")
    assert lines[0] == {"rate, /s": "2.72", "state": "at the limit", "delivered, /s": "2.5",
                        "in time": "50%", "TTFT p90, ms": "90", "TPOT p90, ms": "1,700"}
    two = pd.concat([table, table.assign(input_len=64)])
    assert results.summary(two).regime.tolist() == ["64/64"] * 2 + ["256/64"] * 2


# -- Your own requests -----------------------------------------------------------------------------


def test_a_prefix_cache_keeps_whole_blocks_and_never_the_last_token():
    ids = list(range(300))
    assert traffic.reusable([ids, ids, ids[:256], ids[:257], ids[:100], ids[1:]], 128) == [
        0, 256, 128, 256, 0, 0]
    assert traffic.reusable([ids[:200], ids], 128) == [0, 128]


def test_a_difference_counts_only_outside_of_everything_that_was_seen_without_the_cache():
    off, on = of(requests=4), of(requests=4)
    off.ttfts[:], on.ttfts[:] = [0.2, 0.22, 0.17, 0.24], [0.3, 0.23, 0.045, 0.071]
    for measurement in (off, on):
        measurement.latencies[:] = [ttft + 0.63 for ttft in measurement.ttfts]
    table = traffic.compare([off], [on], [0, 0, 128, 128])
    assert table["with the cache"].tolist() == ["shorter", "longer", "within the spread"]
    assert table["cache off"].tolist() == ["200 (170 to 240)", "210 (200 to 220)", "10 (10 to 10)"]
    assert len(traffic.compare([off], [on], [0] * 4)) == 2, "nobody finds a beginning"
    again = traffic.compare([off, off], [on, off], [0, 0, 128, 128])
    assert again["with the cache"].tolist() == ["within the spread"] * 3, "only one of two runs"
    assert again["cache on"][0] == "120 (45 to 240)", "of both runs"


def test_a_request_that_failed_waited_for_nothing_and_is_no_fast_one(idle, tmp_path, capsys):
    off, on = of(requests=4, ttft=0.2), of(requests=4, ttft=0.3, failed=1)
    table = traffic.compare([off], [on], [0, 0, 128, 128])
    assert table["cache on"].tolist() == ["300 (300 to 300)", "300 (300 to 300)", "10 (10 to 10)"]
    assert table["with the cache"][:2].tolist() == ["longer", "longer"]
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "a"}\n')
    client = types.SimpleNamespace(record=RECORD, run=lambda words: point(requests=4, failed=1))
    here = bench.Bench(client, CPU, TINY, tmp_path)
    here.measure(bench.Point((256, 64), 4, 4, prompts=own), "own")
    assert capsys.readouterr().out == "1 of 4 requests failed: refused\n"


def test_the_lines_of_the_guide_ask_both_servers_in_turn(monkeypatch, tmp_path, capsys):
    """As they stand there, with two servers of which the one with the cache is quicker."""
    guide = (ROOT / "docs/SERVING.md").read_text()
    printed = guide.split("## Is a prefix cache worth it?")[1]
    count, lines = (block.split("```")[0] for block in printed.split("```python")[1:3])
    asked = []

    record = a_server_record("here")
    server = types.SimpleNamespace(
        running=lambda options, place: contextlib.nullcontext(), current=lambda place: record)
    client = types.SimpleNamespace(record=None, close=lambda: asked.append("closed"))

    def measure(self, point, name):
        asked.append((self.client.record, self.options.prefix_caching, point, name))
        return of(ttft=0.05 if self.options.prefix_caching else 0.2, requests=2)
    monkeypatch.setattr(bench.Bench, "measure", measure)
    monkeypatch.setattr(asking, "post", lambda *given: None)
    space = {"asking": asking, "load": bench, "client": client, "options": CPU, "cfg": TINY,
             "results_in": tmp_path, "own_point": "point", "record": record, "server": server,
             "helpers": types.SimpleNamespace(run_dir=tmp_path.joinpath),
             "sent": [[1]], "traffic": traffic, "hits": [128, 0]}
    counts = {"cache": {"block_size": "16"}}
    monkeypatch.setattr(asking, "counters", lambda record: counts)
    exec(count, space | {"sent": [list(range(40))] * 2})
    assert capsys.readouterr().out == ("80 prompt tokens; in whole blocks of 16 a cache has 32 of "
                                       "them, 40%, for 1 of 2 requests\n")
    exec(lines, space)
    assert asked == [(record, cached, "point", f"warm-{'on' if cached else 'off'}-{turn}")
                     for turn in (1, 2) for cached in (False, True)] + ["closed"]
    _, finds, other, _ = capsys.readouterr().out.splitlines()
    for said in (finds, other):
        assert "TTFT" in said and "200 (200 to 200)" in said and "50 (50 to 50)" in said
        assert said.endswith("shorter")


def test_own_prompts_are_written_without_the_token_that_the_server_adds(monkeypatch, tmp_path):
    decode = lambda ids: "".join(map(chr, ids))
    answer = lambda record, path, payload: {"tokens": [2, *map(ord, payload["prompt"])]}
    monkeypatch.setattr(asking, "post", answer)
    prompts = [[2, *b"ab"], [2, *b"c"]]
    traffic.write(tmp_path / "own.jsonl", RECORD, prompts, decode)
    assert bench.check_prompts(tmp_path / "own.jsonl") == 2
    assert traffic.read(tmp_path / "own.jsonl", RECORD) == prompts


def test_published_points_below_the_floor_are_hollow_and_below_the_line():
    from matplotlib.figure import Figure

    from serving import draw

    points = pd.DataFrame({"machine": ["a", "a", "b"], "floor_ms": [10.0, 100.0, 50.0],
                           "value": [20.0, 30.0, 60.0], "too_fast": [False, True, False]})
    ax = Figure().add_subplot()
    draw.against_floors(ax, points)
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    shown = np.concatenate([line.get_xydata() for line in hollow])
    assert shown.tolist() == [[100.0, 30.0]]


@pytest.mark.parametrize(
    "arrivals, made, doubt",
    [
        (
            [0.232, 0.2321, 0.2322, 0.2323],
            0.004,
            "one piece every 0.1 ms can't be: making a token takes 4 ms",
        ),
        ([0.03, 0.034, 0.038], 0.0042, ""),
        ([0.03], 0.004, "one piece has no gap"),
    ],
)
def test_a_pace_faster_than_the_server_makes_tokens_is_refused(arrivals, made, doubt):
    gap, told = limits.pace(arrivals, made)
    assert told.startswith(doubt) and bool(told) == bool(doubt) == math.isnan(gap)
    assert doubt or gap == pytest.approx(0.004)


def test_the_servers_own_time_of_a_token_is_what_its_histogram_says(monkeypatch):
    def page(count, total):
        text = (
            f'vllm:inter_token_latency_seconds_bucket{{le="+Inf"}} {count}\n'
            f"vllm:inter_token_latency_seconds_count {count}\n"
            f"vllm:inter_token_latency_seconds_sum {total}\n"
        )
        monkeypatch.setattr(asking, "request", lambda *_: text)
        return asking.counters(RECORD)

    assert asking.seconds_per_token(page(10, 1.0), page(20, 1.05)) == pytest.approx(0.005)
    assert math.isnan(asking.seconds_per_token(page(10, 1.0), page(10, 1.0)))


def test_a_kept_measurement_of_another_shape_is_measured_again(idle, tmp_path, capsys):
    client = Queue(0.1)
    here = bench.Bench(client, CPU, TINY, tmp_path)
    measure = lambda: here.measure(bench.Point((256, 64), 4, 30), 0)
    path = tmp_path / "256-64_4_0.json"
    measure()
    good = json.loads(path.read_text())
    assert measure().raw == good and len(client.calls) == 1
    broken = [
        {key: value for key, value in good.items() if key != name}
        for name in good
        if name in ("series", "ttfts", "errors", "p90_e2el_ms", "total_output_tokens")
    ]
    broken += [good | {"ttfts": good["ttfts"][1:]}, good | {"series": []}, 3, [], None]
    for value in (None, math.nan, "0.1", [], True):
        broken += [good | {"ttfts": [value, *good["ttfts"][1:]]}, good | {"duration": value}]
    series = good["series"]
    broken += [good | {"errors": None}, good | {"errors": {}}, good | {"completed": INF},
               good | {"duration": 0.0}, good | {"series": series | {"input_len": "256"}},
               good | {"series": series | {"cached_tokens": None}}]
    for content in broken:
        path.write_text(json.dumps(content))
        before = len(client.calls)
        measure()
        assert len(client.calls) == before + 1
        assert "256-64_4_0.json is damaged, so it's measured again" in capsys.readouterr().out


def test_a_file_of_prompts_is_read_as_json_lines_are(tmp_path):
    """By pandas, too, which vLLM's client reads it with."""
    own = tmp_path / "own.jsonl"
    content = b'{"prompt": "a\xe2\x80\xa8b\xc2\x85"}\r\n\n{"prompt": "c"}\n\n'
    own.write_bytes(content)
    assert bench.check_prompts(own) == 2
    assert pd.read_json(own, lines=True).prompt.tolist() == ["a\u2028b\x85", "c"]
    own.write_bytes(b"\xef\xbb\xbf" + content)
    with pytest.raises(ValueError):
        pd.read_json(own, lines=True)
    with pytest.raises(UserError, match="byte order mark.*Remove it: sed") as caught:
        bench.check_prompts(own)
    fixed = str(caught.value).split("Remove it: ")[1]
    assert os.system(fixed) == 0 and bench.check_prompts(own) == 2
    text = own.rename(tmp_path / "own.txt")
    with pytest.raises(UserError, match="own.txt: vLLM's client only reads .* .jsonl"):
        bench.check_prompts(text)
    with pytest.raises(ValueError, match="none.jsonl cannot be read"):
        bench.check_prompts(tmp_path / "none.jsonl")


def test_a_file_without_prompts_is_one_line(tmp_path):
    own = tmp_path / "own.jsonl"
    for text, place in (
        ("", 1),
        ("{}", 1),
        ('{"prompt": "a"}\n{"prompt": ""}', 2),
        ('{"prompt": "a"}\nb', 2),
        ("[1]", 1),
    ):
        own.write_text(text)
        with pytest.raises(
            ValueError, match=f"own.jsonl, line {place}: no prompt. Each line is"
        ) as caught:
            bench.check_prompts(own)
        assert "\n" not in str(caught.value)
    own.write_text('{"prompt": "a"}\n' * 3)
    assert bench.check_prompts(own) == 3


# -- What a run of the series left -----------------------------------------------------------------


@pytest.mark.series
@pytest.mark.skipif(
    not (RUN / "bench" / "results.csv").exists(), reason=f"no run in {RUN}: ./run_all.sh makes one"
)
def test_the_table_of_the_series_is_what_vllm_measured():
    table = pd.read_csv(RUN / "bench" / "results.csv")
    slo = load("06_bench.py", "FULL", "E2B", "TINY", "INF")[2].slo
    for regime, part in table.groupby(["input_len", "output_len"]):
        last, above = results.kept_up(part)
        assert last < above and part.rate.nunique() >= 5
        assert set(part.groupby("rate").size()) <= {2, 3, 4, 5}
        assert above < INF, "some rate is overloaded"
        longs = [
            json.loads(path.read_text())
            for path in (RUN / "bench").glob("{}-{}_*_long.json".format(*regime))
        ]
        assert bool(longs) == results.within(part).any(), (
            "a price is tried where a rate kept the objective"
        )
        assert all(raw["completed"] >= 10 for raw in longs)
    assert table.flag.isna().mean() > 0.5, (
        "a client short of CPU reads some answers at once, not most"
    )
    for entry in table.itertuples():
        name = f"{entry.input_len}-{entry.output_len}_{entry.rate:g}_{entry.repeat}.json"
        raw = json.loads((RUN / "bench" / name).read_text())
        assert raw["failed"] == 0, set(raw["errors"])
        assert raw["request_throughput"] == pytest.approx(raw["completed"] / raw["duration"])
        assert entry.ttft_p50_ms == pytest.approx(1e3 * np.median(raw["ttfts"]))
        assert np.median(raw["input_lens"]) == pytest.approx(entry.input_len, abs=4)
        assert set(raw["output_lens"]) == {entry.output_len}
        assert results.share_kept(Measurement.of(raw), slo) == pytest.approx(
            raw["request_goodput"] * raw["duration"] / raw["completed"]
        ), "vLLM's own count of good requests"
    for name in ("throughput", "latency", "requests", "promise", "cost", "timeline"):
        assert (RUN / "figures" / f"06_{name}.png").stat().st_size > 10_000
