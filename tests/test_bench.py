"""06: points, floors, saturation, cost, and what goes wrong in a sweep.

The client and the server are small stand-ins here; vLLM's own client measures in the series.
"""

import csv
import http.server
import itertools
import json
import math
import os
import random
import re
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, load

import helpers
from serving import bench as bench_module
from helpers import charts
from serving import physics, server
from tables.hardware import chip

NOTEBOOK = dict(zip(("Settings", "FULL", "E2B", "TINY"), load(
    "06_bench.py", "Settings", "FULL", "E2B", "TINY", "INF")[:4], strict=True))
CONFIG = json.loads((ROOT / "data/configs/gemma4_31b.json").read_text())
TINY = NOTEBOOK["TINY"]
V6E = server.Options("tpu-docker", "m", "n", tensor_parallel=8, chip="v6e")
CPU = server.Options("cpu", "m", "n")


def machine(peak, bandwidth, options=V6E):
    return bench_module.Machine("here", peak, bandwidth, 0.07, options)


MACHINE = {"tpu": machine(8 * 918e12, 8 * 1.638e12),  # FLOP/s, bytes/s
           "gpu": machine(2 * 989e12, 2 * 3.35e12, replace(V6E, tensor_parallel=2))}
ENDLESS = {kind: replace(one, bandwidth=math.inf) for kind, one in MACHINE.items()}
INF = math.inf


def use(name):
    return NOTEBOOK[name] if name in NOTEBOOK else getattr(bench_module, name)


def published(name):
    with open(ROOT / "data" / "published" / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def point(inputs=256, outputs=64, rate=4.0, requests=30, ttft=0.1, tpot=0.01, cached=0.0, failed=0,
          starts=None):
    """A result as vLLM writes it, with our additions, of requests that all look alike."""
    starts = starts or [0.0 if rate == INF else i / rate for i in range(requests)]
    latency = ttft + tpot * (outputs - 1)
    done = requests - failed
    result = {
        "request_rate": "inf" if rate == INF else rate, "num_prompts": requests,
        "completed": done, "failed": failed, "duration": max(starts) + latency,
        "total_input_tokens": inputs * done, "total_output_tokens": outputs * done,
        "request_throughput": done / (max(starts) + latency), "request_goodput": 1.0,
        "start_times": starts, "latencies": [latency] * done + [0.0] * failed,
        "ttfts": [ttft] * done + [0.0] * failed,
        "output_lens": [outputs] * done + [0] * failed,
        "errors": [""] * done + ["refused"] * failed,
        "series": {"made_by": {}, "input_len": inputs, "output_len": outputs, "repeat": 0,
                   "seed": 1, "requests": requests, "cached_tokens": cached, "preemptions": 0.0,
                   "others_cores": 0.0}}
    for kind, value in (("ttft", ttft), ("tpot", tpot), ("itl", tpot), ("e2el", latency)):
        result |= {f"p{p}_{kind}_ms": 1e3 * value for p in (50, 90, 99)}
    return result


# -- Floors --------------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens, tpu, gpu", [
    (512, 4.1, 15.3), (1024, 8.3, 30.9), (2048, 16.9, 62.6), (4096, 34.2, 127.1),
    (8192, 70.1, 260.2), (15360, 136.4, 506.5)])
def test_floor_of_one_request_is_the_published_audit_table(tokens, tpu, gpu):
    for device, wanted in (("tpu", tpu), ("gpu", gpu)):
        alone, queued = use("ttft_floors")(CONFIG, tokens, [0.0], ENDLESS[device])
        assert 1e3 * alone == pytest.approx(wanted, abs=0.06) and queued == alone


def test_the_floor_of_e2b_does_not_read_what_is_only_looked_up():
    """Its per-layer table holds half of the parameters; a step reads 512 rows of it."""
    config = helpers.read_json(ROOT / "data/configs/gemma4_e2b.json")
    alone, _ = use("ttft_floors")(config, 1, [0.0], machine(1e30, 1e12))
    assert alone == pytest.approx(physics.decode_bytes(config, 0, 0) / 1e12)
    assert alone < 0.6 * physics.weight_bytes(config) / 1e12


def test_queue_floor_against_a_simulation_event_by_event():
    rng = random.Random(1)
    work = use("ttft_floors")(CONFIG, 4096, [0.0], ENDLESS["tpu"])[0]
    for rate in (1, 20, 40, 200):
        starts = [rng.uniform(0, 50 / rate) for _ in range(50)]
        free, waits = 0.0, []
        for start in sorted(starts):
            free = max(free, start) + work
            waits.append(free - start)
        floor = use("ttft_floors")(CONFIG, 4096, starts, ENDLESS["tpu"])[1]
        assert floor == pytest.approx(float(np.median(waits)))
    burst = use("ttft_floors")(CONFIG, 4096, [0.0] * 31, ENDLESS["tpu"])[1]
    assert burst == pytest.approx(16 * work)


def flagged(device, tokens, ttft_ms, rate, requests=30):
    result = point(tokens, 512, rate, requests, ttft_ms / 1e3, 1.0)
    return use("floors_of")(result, CONFIG, ENDLESS[device])["flag"]


def test_published_tables_are_flagged_as_the_audit_says():
    """AUDIT 5.1: of the table, 16k on both machines, and the 512 burst as labelled on both."""
    found = set()
    for entry in published("inference_results"):
        if entry["metric"] == "median_ttft":
            rate = INF if "inf" in entry["load"] else 4.0
            for device in ("tpu", "gpu"):
                if flagged(device, int(entry["input_tokens"]), float(entry[device]), rate):
                    found.add((int(entry["input_tokens"]), device))
    assert found == {(15360, "tpu"), (15360, "gpu"), (512, "tpu"), (512, "gpu")}


def test_published_sweep_is_flagged_as_the_audit_says():
    """AUDIT 5.2, last column: no more and no fewer."""
    found, points = set(), 0
    for entry in published("qps_sweep_digitized"):
        if entry["metric"] == "ttft" and entry["value"]:
            tokens = 15360 if entry["input_tokens"] == "~16k" else int(entry["input_tokens"])
            rate, points = float(entry["qps"]), points + 1
            if flagged(entry["device"], tokens, float(entry["value"]), rate):
                found.add((tokens, entry["device"], int(rate)))
    wanted = {(1024, "gpu", 64)} | {(2048, "gpu", q) for q in (4, 8, 16, 32, 64)} \
        | {(4096, "tpu", q) for q in (32, 64)} \
        | {(15360, d, q) for d in ("tpu", "gpu") for q in (2, 4, 8, 16, 32, 64)}
    assert points >= 80 and found == wanted


def test_no_request_may_beat_the_floor_of_one_alone():
    result = point(4096, 512, 1.0, failed=2)  # failures have a time of 0, and are not fast
    floors = lambda: use("floors_of")(result, CONFIG, MACHINE["tpu"])
    assert floors()["flag"] == ""
    result["ttfts"][3] = 0.030
    assert floors()["flag"].startswith("impossible: TTFT, the fastest request, 30 ms")


def test_a_step_reads_the_caches_of_the_requests_in_flight():
    """31B on a v6e-8, bfloat16, prompts of 15,360: 4.9 ms with one request, 17.5 with fifty."""
    result = point(15360, 512, INF, 50, ttft=0.0, tpot=0.05)
    floors = use("floors_of")(result, CONFIG, MACHINE["tpu"])
    assert floors["tpot_floor_ms"] == pytest.approx(4.94, abs=0.01)
    assert floors["tpot_in_flight_ms"] == pytest.approx(17.5, abs=0.1)
    quiet = use("floors_of")(point(15360, 512, 0.01, 50, tpot=0.05), CONFIG, MACHINE["tpu"])
    assert quiet["tpot_in_flight_ms"] == quiet["tpot_floor_ms"], "at least the request itself"
    two = replace(MACHINE["tpu"], options=replace(V6E, data_parallel=2))
    assert use("floors_of")(result, CONFIG, two)["tpot_in_flight_ms"] == pytest.approx(
        1e3 * use("tpot_floor")(CONFIG, 15360, two, 25)), "each copy has half of them"


def test_row_flags_a_warm_cache_and_a_token_faster_than_memory():
    row = lambda **k: use("row")(point(4096, 512, 1.0, **k), 1.0, CONFIG, MACHINE["tpu"], TINY.slo)
    assert row()["flag"] == ""
    assert "prefix cache" in row(cached=4096.0)["flag"]
    assert row(cached=4096.0)["cache_hit_rate"] == pytest.approx(1 / 30)
    assert row(ttft=0.030)["flag"].startswith("impossible: TTFT")
    assert row(tpot=0.004)["flag"].startswith("impossible: TPOT")


# -- Points --------------------------------------------------------------------------------------

def test_every_point_has_enough_load_and_its_own_seed():
    FULL, requests_for = use("FULL"), use("requests_for")
    for rate in FULL.rates:
        assert requests_for(FULL, rate) >= 60 * min(rate, 64)
    assert requests_for(FULL, INF) == requests_for(FULL, 64) == 60 * 64, "a burst is no shorter"
    assert all(requests_for(TINY, rate) >= TINY.min_requests >= 20 for rate in TINY.rates)
    seeds = {use("point_name")(regime, rate, repeat)[1] for regime in FULL.regimes
             for rate in FULL.rates for repeat in range(3)}
    assert len(seeds) == len(FULL.regimes) * len(FULL.rates) * 3


def queue(rate, service, requests, seed):
    """Poisson arrivals, rescaled as vLLM does, at one server with a fixed service time.

    As in vLLM's client, the run begins at 0, a gap before its first request.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, requests)
    starts = np.cumsum(gaps) * (requests / rate / gaps.sum())
    free, latencies = 0.0, []
    for start in starts:
        free = max(free, start) + service
        latencies.append(free - start)
    return {"completed": requests, "duration": float(starts[-1] + latencies[-1]),
            "latencies": latencies, "errors": [""] * requests, "start_times": starts.tolist()}


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
    return {"completed": requests, "duration": float(clock), "errors": [""] * requests,
            "start_times": starts.tolist(), "latencies": (ends - starts).tolist()}


def test_a_batching_server_is_never_said_to_deliver_more_than_it_can():
    capacity = 64 / (64 * (0.010 + 64 * 0.0005) + 64 * 0.004)  # all 64 slots full, 64 tokens each
    lone = batching(1.0, 1, 0)["latencies"][0]
    best = 0.0
    for rate in (4, 8, 16, 32, 128, math.inf):
        requests = int(15 * min(rate, capacity))
        given = [use("delivered_rate")(batching(rate, requests, seed), lone) for seed in range(3)]
        assert max(given) < 1.02 * min(rate, capacity), rate
        if rate < 0.9 * capacity:
            assert min(given) > 0.9 * rate, rate
        best = max(best, *given)
    assert best == pytest.approx(capacity, rel=0.04)
    for seconds in (2.5, 5.0):  # a short run: too little, never too much, and the knee says so
        rows = []
        for rate, repeat in itertools.product((4, 8, 16, 32, INF), range(3)):
            result = batching(rate, max(10, int(seconds * min(rate, capacity))), repeat)
            rows.append({"rate": rate, "repeat": repeat,
                         "delivered_rps": use("delivered_rate")(result, lone)})
        table = pd.DataFrame(rows)
        share = (table.delivered_rps / table.rate.clip(upper=capacity)).groupby(table.rate).min()
        assert share.min() > 0.8 and table.delivered_rps.max() < 1.02 * capacity
        last, first = use("kept_up")(table)
        assert 8 <= last < capacity < first, "16/s is below the limit, and may not be called too much"
    short = batching(math.inf, int(5 * capacity), 0)
    assert use("delivered_rate")(short, lone) < capacity < short["completed"] / (
        short["duration"] - lone), "without the share a short burst would beat the server"


def test_the_gap_before_the_first_request_is_no_time_of_load_for_a_queue():
    """Of 30 requests at twice the capacity, seed by seed: the capacity, however long the gap."""
    runs = [queue(20, 0.1, 30, seed) for seed in range(40)]
    leads = [run["start_times"][0] for run in runs]
    given = [use("delivered_rate")(run, 0.1) for run in runs]
    assert max(leads) > 0.1 and np.corrcoef(leads, [r["duration"] for r in runs])[0, 1] > 0.9
    assert min(given) > 9.85 and max(given) < 10.2 and np.std(given) < 0.08
    kept = [use("delivered_rate")(queue(2, 0.1, 30, seed), 0.1) for seed in range(40)]
    assert min(kept) > 1.98 and max(kept) <= 2.001, "who keeps up needs the gap: n gaps, n requests"


@pytest.mark.parametrize("requests", [30, 600])
def test_saturation_of_a_queue_of_known_capacity(requests):
    service, rates = 0.1, (2, 4, 8, 16, 32)
    delivered, given = [], []
    for rate in rates:
        for repeat in range(3):
            result = queue(rate, service, requests, repeat)
            delivered.append(use("delivered_rate")(result, service))
            given.append(rate)
    capacity, reached = use("saturation")(given, delivered)
    assert reached and capacity == pytest.approx(1 / service, rel=0.06)
    few = [i for i, rate in enumerate(given) if rate <= 8]
    capacity, reached = use("saturation")([given[i] for i in few], [delivered[i] for i in few])
    assert not reached and capacity == pytest.approx(8, rel=0.1)


def test_published_sustainable_rates_are_level_and_not_32_against_8():
    """1024/512: 2.71 requests/s on the GPU; on the TPU 2.53 up to the last that is not hidden."""
    for device, wanted in (("tpu", 2.53), ("gpu", 2.71)):
        rows = [(float(e["qps"]), float(e["value"]) / 512) for e in published("qps_sweep_digitized")
                if e["metric"] == "output_throughput" and e["device"] == device
                and e["input_tokens"] == "1024" and e["value"]]
        capacity, reached = use("saturation")(*zip(*rows))
        assert reached and capacity == pytest.approx(wanted, rel=0.01)


def test_failed_requests_stay_and_do_not_count_as_fast():
    result = point(failed=3)
    assert use("lone_latency")([result]) == pytest.approx(0.1 + 0.63), "not the zero of a failure"
    row = use("row")(result, 0.73, CONFIG, MACHINE["tpu"], TINY.slo)
    assert (row["completed"], row["failed"], row["requests"]) == (27, 3, 30)
    sending = max(result["start_times"]) - min(result["start_times"])
    rest = result["duration"] - 0.73
    assert row["delivered_rps"] == pytest.approx(
        27 / (result["duration"] - 0.73 * min(1, sending / rest)))
    assert row["goodput_rps"] == pytest.approx(row["delivered_rps"]), "a share of the completed"
    assert row["usd_per_million_output"] == pytest.approx(
        0.07 / 3600 / (row["delivered_rps"] * 64) * 1e6)


# -- A sweep that goes wrong -----------------------------------------------------------------------

class FakeClient:
    """Writes what vLLM's client would write, or fails from the nth call on."""

    def __init__(self, folder, fail_at=10**9, **options):
        self.model, self.results, self.calls = "m", str(folder), 0
        self.fail_at, self.options = fail_at, options

    def run(self, arguments):
        self.calls += 1
        if self.calls >= self.fail_at:
            raise helpers.UserError("vllm bench serve failed: ConnectionRefusedError")
        given = dict(zip(arguments, arguments[1:]))
        rate, n = float(given["--request-rate"]), int(given["--num-prompts"])
        result = point(int(given["--random-input-len"]), int(given["--random-output-len"]), rate, n,
                       **self.options)
        del result["series"]
        path = Path(given["--result-dir"]) / given["--result-filename"]
        path.write_text(json.dumps(result))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A results folder and a server that lives and has metrics."""
    (tmp_path / "partial").mkdir()
    record = {"model": "name", "base_url": "http://127.0.0.1:9", "max_model_len": 1024}
    monkeypatch.setattr(server, "current", lambda: record)
    monkeypatch.setattr(server, "members", lambda _: [])
    text = ('vllm:prefix_cache_hits_total{a="b"} 5.0\nvllm:num_preemptions_total{a="b"} 1.0\n'
            'vllm:num_requests_running{e="0"} 0.0\nvllm:num_requests_waiting{e="0"} 0.0\n')
    monkeypatch.setattr(server, "request", lambda *_: text)
    return tmp_path, record


def sweep(client, bench, cfg=TINY, options=CPU):
    folder, record = bench
    return use("sweep")(client, record, options, cfg, folder)


def test_a_sweep_measures_once_and_resumes(bench, capsys):
    folder, _ = bench
    first = FakeClient(folder)
    results = sweep(first, bench)
    total = TINY.repeats * len(TINY.regimes) * len(TINY.rates)
    assert first.calls == len(results) == total
    assert not list((folder / "partial").iterdir())
    again = FakeClient(folder)
    assert sweep(again, bench) == results and again.calls == 0
    assert sweep(again, bench, replace(TINY, slo=(1, 1))) == results and again.calls == 0, \
        "the objective is no part of what was measured"

    cut, binary, empty, other = sorted(folder.glob("*.json"))[3:7]
    cut.write_text(cut.read_text()[:200])
    binary.write_bytes(bytes(range(256)))
    empty.write_text("[]")
    other.write_text('{"completed": 3}')
    capsys.readouterr()
    assert len(sweep(again, bench)) == total and again.calls == 4
    said = capsys.readouterr().out
    assert said.count("was cut short") == said.count("is no result of vLLM") == 2, said


def test_points_of_another_server_model_or_load_are_made_anew_and_that_is_said(bench, capsys):
    folder, _ = bench
    cfg = replace(TINY, regimes=((256, 64),), rates=(4, INF), repeats=1)
    sweep(FakeClient(folder), bench, cfg)
    for options, settings, what, calls in (
            (replace(CPU, tensor_parallel=2), cfg, "tensor_parallel", 2),
            (replace(CPU, model_hash="of another merge"), cfg, "model_hash", 2),
            (replace(CPU, kv_cache_dtype="fp8", quantization="fp8"), cfg,
             "kv_cache_dtype was auto and is fp8; quantization", 2),
            (CPU, replace(cfg, seconds=40.0), f"seconds was {cfg.seconds} and is 40.0", 2),
            (CPU, replace(cfg, warmups=2), "warmups", 2),
            (CPU, replace(cfg, rates=(4, 8, INF)), "burst_of", 2)):  # 8/s is new, inf another burst
        sweep(FakeClient(folder), bench, cfg)  # as it was
        capsys.readouterr()
        client = FakeClient(folder)
        sweep(client, bench, settings, options)
        assert client.calls == calls, what
        said = capsys.readouterr().out
        assert re.search(rf"was made from something else \({what}[^;]*\): measuring it anew", said)
    first = sweep(FakeClient(folder), bench, cfg)
    for path in folder.glob("*.json"):  # as the series wrote them before they said what made them
        found = json.loads(path.read_text())
        del found["series"]["made_by"]
        path.write_text(json.dumps(found))
    old = FakeClient(folder)
    assert len(sweep(old, bench, cfg)) == len(first) == old.calls
    assert "nothing says what it was made from" in capsys.readouterr().out


def test_a_server_that_dies_leaves_the_finished_points_and_one_line(bench):
    folder, _ = bench
    with pytest.raises(ValueError, match="stopped after 5 of 24 points, which are kept"):
        sweep(FakeClient(folder, fail_at=6), bench)
    assert len(list(folder.glob("*.json"))) == 5
    rest = FakeClient(folder)
    sweep(rest, bench)
    assert rest.calls == 19


def test_a_point_waits_until_the_server_is_idle(bench, monkeypatch):
    """What an interrupted client still has running is not measured as ours."""
    folder, record = bench
    pages = iter([(3, 2), (1, 0), (0, 0)])
    counts = {}

    def page(*_):
        counts["now"] = next(pages, (0, 0))
        running, waiting = counts["now"]
        return (f'vllm:num_requests_running{{e="0"}} {running}.0\n'
                f'vllm:num_requests_waiting{{e="0"}} {waiting}.0\n')

    class Watching(FakeClient):
        def run(self, arguments):
            counts["at the start"] = counts["now"]
            super().run(arguments)
    monkeypatch.setattr(server, "request", page)
    cfg = replace(TINY, regimes=((256, 64),), rates=(4,), repeats=1)
    sweep(Watching(folder), bench, cfg)
    assert counts["at the start"] == (0, 0) and next(pages, None) is None
    monkeypatch.setattr(server, "request", lambda *_: 'vllm:num_requests_running{e="0"} 1.0\n'
                        'vllm:num_requests_running{e="1"} 2.0\nvllm:num_requests_waiting 4.0\n')
    with pytest.raises(ValueError, match="not idle: 3 requests run and 4 wait"):
        use("wait_idle")(record, patience=0.1)


class Slow(FakeClient):
    """A server that needs 1 s per request, whatever is offered."""

    def run(self, arguments):
        super().run(arguments)
        path = Path(arguments[arguments.index("--result-dir") + 1]) / arguments[-1]
        result = json.loads(path.read_text())
        free = 0.0
        for place, start in enumerate(result["start_times"]):
            free = max(free, start) + 1.0
            result["latencies"][place] = free - start
        result["duration"] = free
        path.write_text(json.dumps(result))


SLOW = replace(TINY, regimes=((256, 64),), rates=(0.5, 2, 64, INF), repeats=2, at_most=2,
               seconds=60.0, min_requests=10)


def test_all_rates_that_are_too_much_send_the_same_number_of_requests(bench):
    """Else a shorter burst has lower latencies, and looks faster than a rate."""
    folder, _ = bench
    sent = [r["num_prompts"] for r in sweep(Slow(folder), bench, SLOW)]
    assert sent == 2 * [30, 120, 120], f"{sent}: 64/s is more than twice what was too much"
    assert [r["num_prompts"] for r in sweep(FakeClient(folder / "none", fail_at=1), bench, SLOW)] \
        == sent, "and a later run reads them"
    (folder / "256-64_2_0.json").unlink()
    once = Slow(folder)
    sweep(once, bench, SLOW)
    assert once.calls == 1, "a point that is gone is made again, and those after it are kept"
    quick = replace(SLOW, rates=(0.25, 0.5, INF), seconds=100.0)  # kept up with: the largest rate's
    assert [r["num_prompts"] for r in sweep(Slow(folder), bench, quick)] == 2 * [25, 50, 50]
    wide = replace(SLOW, rates=(0.5, 2, 4, INF))  # twice what was too much is measured
    assert [r["num_prompts"] for r in sweep(Slow(folder), bench, wide)] == 2 * [30, 120, 120, 120]


def test_stored_points_of_another_number_of_requests_are_not_mixed_with_ours(bench, capsys):
    folder, record = bench
    results = sweep(Slow(folder), bench, SLOW)
    burst = folder / "256-64_inf_0.json"
    other = json.loads(burst.read_text())
    other["series"]["requests"] = 60  # as earlier versions sent
    burst.write_text(json.dumps(other))
    (folder / "256-64_inf_2.json").write_text(json.dumps(
        other | {"series": other["series"] | {"repeat": 2}}))
    capsys.readouterr()
    again = Slow(folder)
    assert len(sweep(again, bench, SLOW)) == len(results) and again.calls == 1
    assert "requests was 60 and is 120): measuring it anew" in capsys.readouterr().out
    more = replace(SLOW, at_most=3)
    assert len(use("repeat_further")(again, record, CPU, more, folder, results)) == len(results)
    assert "256-64_inf_2.json was made from something else (requests was 60 and is 120): left out" \
        in capsys.readouterr().out


def test_results_that_are_no_results(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"completed": 3')
    with pytest.raises(ValueError, match="x.json was cut short. Delete it"):
        use("load_result")(path)
    path.write_text(json.dumps({"completed": 0, "num_prompts": 30,
                                "errors": ["", "Traceback ...\nNot Found: no model named x"]}))
    with pytest.raises(ValueError, match="none of 30 requests completed: Not Found"):
        use("load_result")(path)


# -- Repeats, the knee, evidence -------------------------------------------------------------------

def repeats_of(delivered, others=0.0, ttft=100.0, tpot=10.0):
    """A table as results.csv has it, from {rate: delivered of each repeat}."""
    rows = [{"rate": rate, "repeat": k, "delivered_rps": value, "others_cores": others,
             "ttft_p50_ms": ttft, "tpot_p50_ms": tpot}
            for rate, values in delivered.items() for k, value in enumerate(values)]
    return pd.DataFrame(rows)


@pytest.mark.parametrize("delivered, last, first", [
    ({4: [4, 4, 4], 8: [7.9, 7.8, 7.9], 16: [10, 11, 10], INF: [11, 11, 11]}, 8, 16),
    ({4: [4, 4, 4], 8: [7.9, 7.1, 7.9], 16: [10, 11, 10], INF: [11, 11, 11]}, 4, 16),  # one did not
    ({4: [4, 4, 4], 8: [6, 7, 6], 16: [15, 15, 15], INF: [16, 16, 16]}, 4, INF),  # nobody knows of 8
    ({0.5: [0.5], 1: [0.92], 2: [0.92], INF: [0.92]}, 0.5, 2),  # 92 % of 1/s, and a queue for ever
    ({4: [4, 4, 4], 8: [8, 8, 8]}, 8, INF),
    ({4: [3, 3, 3], 8: [3, 3, 3], INF: [3, 3, 3]}, 0, 4)])
def test_the_knee_is_the_last_rate_that_all_repeats_kept_up_with(delivered, last, first):
    table = repeats_of(delivered)
    assert use("kept_up")(table) == (last, first)
    assert use("kept_up")(table.sample(frac=1, random_state=1)) == (last, first), "in any order"


def test_latencies_are_compared_only_up_to_the_knee():
    table = repeats_of({4: [4, 4, 4], 8: [7.9, 7.8, 7.9], 16: [10, 11, 10], INF: [9, 9, 9]})
    assert set(use("up_to_the_knee")(table).rate) == {4, 8}
    assert not len(use("up_to_the_knee")(repeats_of({4: [3, 3, 3], INF: [3, 3, 3]})))


def test_the_bracket_holds_the_capacity_of_a_queue_that_is_known():
    service, table = 0.1, []
    for rate in (2, 4, 8, 16, 32):
        for repeat in range(3):
            result = queue(rate, service, 600, 10 * rate + repeat)
            table.append({"rate": rate, "repeat": repeat,
                          "delivered_rps": use("delivered_rate")(result, service)})
    table = pd.DataFrame(table)
    last, first = use("kept_up")(table)
    assert last <= 1 / service <= first and (last, first) == (8, 16)
    assert all(value == pytest.approx(10, rel=0.06) for value in use("capacities")(table))


def test_repeats_too_far_apart_say_why():
    why = lambda part, raw=(), last=8: use("why_apart")(part, raw, last)
    steady = repeats_of({4: [4, 4, 4]})
    assert why(steady) == ""
    shaky = steady.assign(ttft_p50_ms=[50.0, 60.0, 70.0])
    many = [point(requests=200, ttft=t) for t in (0.05, 0.06, 0.07)]  # no scatter: no overlap
    assert why(shaky, many) == "TTFT p50: other arrivals, or the machine: measure again"
    assert why(shaky, many, last=2) == "beyond the knee"
    assert why(shaky.assign(others_cores=[0.0, 1.3, 0.0]), many) == \
        "other programs used up to 1.3 cores"
    rng, wide = np.random.default_rng(0), [point(requests=20) for _ in range(3)]
    for result in wide:
        result["ttfts"] = rng.exponential(0.06, 20).tolist()
    assert why(shaky, wide) == "too few requests to say it better"
    assert why(steady.assign(delivered_rps=[3, 4, 4]), wide, last=0) == \
        "delivered: other arrivals, or the machine: measure again"
    many[1]["series"]["preemptions"] = 7.0
    assert why(shaky, many) == "cache full: 7 times a request was put off"


def test_a_point_none_of_whose_answers_came_under_load_is_not_called_sustained():
    """As 768/64 at 16/s did: the last request is sent at 4 s, the first answer ends at 5."""
    why = lambda rate, raw: use("why_apart")(repeats_of({rate: [4, 4, 4]}), raw, 2)
    late, early = ([point(rate=16.0, requests=64, ttft=t) for _ in range(3)] for t in (4.4, 0.1))
    assert use("done_under_load")(late[0]) == 0
    assert use("done_under_load")(early[0]) == pytest.approx(1 - 12 / 64)  # 0.73 s before the end
    assert why(16.0, late) == why(16.0, [*early[:2], late[0]]) == \
        "no answer finished while requests still came: not sustained, only finished"
    assert why(16.0, early) == "" and why(INF, late) == "", "a burst has no time of load at all"
    row = use("row")(late[0], 0.7, CONFIG, MACHINE["tpu"], TINY.slo)
    assert row["done_under_load"] == 0
    assert use("done_under_load")(point(rate=4.0, requests=30, failed=3)) == pytest.approx(1)


def test_a_point_is_within_the_objective_only_if_every_repeat_keeps_both_times():
    kept = lambda shares, rate=4.0, delivered=4.0: pd.DataFrame([
        {"input_len": 256, "output_len": 64, "rate": rate, "repeat": k,
         "delivered_rps": delivered, "goodput_rps": share * delivered}
        for k, share in enumerate(shares)])
    table = pd.concat([kept([1.0, 27 / 30, 0.95]), kept([1.0, 1.0, 26 / 30], 8.0, 8.0),
                       kept([1.0, 1.0, 1.0], 16.0, 10.0), kept([1.0, 1.0, 1.0], INF, 10.0)])
    assert use("within")(table).to_dict() == {
        (256, 4.0): True, (256, 8.0): False, (256, 16.0): False, (256, INF): False}
    marginal = point(requests=100, ttft=0.1, tpot=0.01)  # 9 % wait too long, 9 % are too slow
    marginal["ttfts"][:9], marginal["latencies"][:9] = [0.6] * 9, [1.2] * 9
    marginal["latencies"][9:18] = [4.0] * 9
    tpot = [(a - b) / 63 for a, b in zip(marginal["latencies"], marginal["ttfts"], strict=True)]
    assert np.percentile(marginal["ttfts"], 90) <= 0.5 and np.percentile(tpot, 90) <= 0.03
    row = use("row")(marginal, 0.7, CONFIG, MACHINE["tpu"], (500, 30))
    assert not use("within")(pd.DataFrame([row])).any(), "each p90 is within it, 18 % are not"


def test_gaps_are_longer_while_prompts_are_read():
    """Two answers; the second's first token comes at 1.0 s, until when a step takes 0.2 s."""
    result = point(rate=INF, requests=3, failed=1)
    result["ttfts"], result["itls"] = [0.5, 1.0, 0.0], [[0.2, 0.2, 0.02, 0.02], [0.02, 0.02], []]
    result["itls"][0][2:2] = [0.2]  # that step began under load and ended after it
    assert use("gaps")(result) == (0.2, 0.02)  # medians of .2 .2 and of .2 .02 .02 .02 .02
    result["start_times"] = [10.0, 10.0, 10.0]
    assert use("gaps")(result) == (0.2, 0.02), "by whatever clock"


def test_the_cheapest_rate_is_that_of_each_prompt_length_and_within_the_objective():
    """Longer prompts cost more everywhere: that is no reason to be left out."""
    rows = [{"input_len": prompt, "output_len": 64, "rate": rate, "repeat": k, "delivered_rps": rate,
             "goodput_rps": share * rate, "hours_per_million_output": cost}
            for prompt, rate, share, cost in ((256, 4.0, 1, 1.0), (256, 8.0, 1, 0.5),
                                              (256, 16.0, 0.5, 0.25), (768, 4.0, 1, 2.0),
                                              (768, 8.0, 0.8, 1.5), (900, 4.0, 0, 9.0),
                                              (900, 8.0, 0, 8.0)) for k in range(3)]
    found = use("cheapest")(pd.DataFrame(rows))
    assert found["within the objective"].to_dict() == {
        (256, 8.0): True, (768, 4.0): True, (900, 8.0): False}
    assert found.hours_per_million_output.tolist() == [0.5, 2.0, 8.0]


def test_a_range_is_the_smallest_and_the_largest_repeat():
    assert use("from_to")(pd.Series([158.2, 389.4, 136.0])) == "136 to 389"


def test_intervals_of_medians_overlap_where_the_medians_are_the_same_and_else_not():
    rng = np.random.default_rng(3)
    draws = lambda scale, n: [rng.exponential(scale, n) for _ in range(3)]
    assert sum(use("overlap")(draws(1.0, 40)) for _ in range(20)) >= 17
    assert not use("overlap")([*draws(1.0, 400)[:2], rng.exponential(1.5, 400)])


def test_a_difference_within_the_spread_is_no_evidence_and_chance_is_counted():
    apart = use("apart")
    assert "within the spread, no evidence" in apart([10, 11, 12], [11.5, 12.5, 13])
    assert "apart (by chance alone: 0.1)" in apart([10, 11, 12], [12.5, 13, 14])
    rng, false = np.random.default_rng(0), 0
    for _ in range(4000):  # two systems that are the same
        false += "apart" in apart(rng.normal(size=3), rng.normal(size=3)).split(":")[1]
    assert false / 4000 == pytest.approx(0.1, abs=0.02)


# -- Points that disagree with themselves ----------------------------------------------------------

ONE = replace(TINY, regimes=((256, 64),), rates=(4, 8, INF))


class Moody(FakeClient):
    """The TTFT of 4/s, in seconds, comes from a list: one per repeat."""

    def __init__(self, folder, moods, **options):
        super().__init__(folder, **options)
        self.moods, self.names = moods, []

    def run(self, arguments):
        name = arguments[-1]
        self.names.append(name.removesuffix(".json"))
        self.options["ttft"] = self.moods[int(name[-6])] if "_4_" in name else 0.1
        super().run(arguments)


def settle(client, bench, cfg=ONE):
    folder, record = bench
    planned = sweep(client, bench, cfg)
    return use("repeat_further")(client, record, CPU, cfg, folder, planned)


def at_four(results):
    return sorted(r["p50_ttft_ms"] for r in results if r["request_rate"] == 4)


@pytest.fixture
def quiet(bench, monkeypatch):
    monkeypatch.setattr(server, "others_cores", lambda *_: 0.0)
    return bench


@pytest.mark.parametrize("moods, why", [
    ((0.1, 0.11, 0.2, 0.1, 0.1, 0.11), "TTFT p50: outliers, the middle half of 6 is 10% apart"),
    ((0.1, 0.2, 0.1, 0.2, 0.1, 0.2), "TTFT p50: unstable, even the middle half of 6 is 100% apart")])
def test_a_point_that_disagrees_is_measured_again_and_nothing_is_dropped(quiet, capsys, moods, why):
    client = Moody(quiet[0], moods)
    results = settle(client, quiet)
    assert at_four(results) == sorted(1e3 * mood for mood in moods), "the first ones stay"
    assert client.names[9:] == ["256-64_4_3", "256-64_4_4", "256-64_4_5"], "this point and no other"
    assert len(results) == 12 and len({r["series"]["seed"] for r in results}) == 12
    said = capsys.readouterr().out
    assert said.count("by the machine: 1, measured again, up to 3 times each") == 1, \
        "one line, not one for each"
    table = use("compared")(results)
    assert use("reasons")(table, results)[256, 64, 4.0] == why
    assert use("AGAIN") not in "".join(use("reasons")(table, results).values())
    assert len(use("capacities")(table)) == 3, "a repeat without the other rates has no capacity"

    again = Moody(quiet[0], moods)
    assert settle(again, quiet) == results and not again.names, "a second run measures nothing"
    assert "measured again" not in capsys.readouterr().out


def test_points_that_agree_or_have_a_reason_are_left_alone(quiet, monkeypatch):
    steady = Moody(quiet[0], [0.1, 0.11, 0.105])
    assert len(settle(steady, quiet)) == 9
    for path in quiet[0].glob("*.json"):
        path.unlink()
    monkeypatch.setattr(server, "others_cores", lambda *_: 1.3)  # a busy machine: more of the same
    busy = Moody(quiet[0], [0.1, 0.2, 0.3])
    assert len(settle(busy, quiet)) == 9


def test_further_repeats_survive_an_end_in_the_middle_and_a_change_of_mind(quiet):
    folder, moods = quiet[0], (0.1, 0.11, 0.2, 0.1, 0.1, 0.11)
    with pytest.raises(ValueError, match="ConnectionRefused"):
        settle(Moody(folder, moods, fail_at=11), quiet)
    assert (folder / "256-64_4_3.json").exists() and not (folder / "256-64_4_4.json").exists()
    rest = Moody(folder, moods)
    results = settle(rest, quiet)
    assert rest.names == ["256-64_4_4", "256-64_4_5"] and len(at_four(results)) == 6
    (folder / "256-64_4_2.json").unlink()  # the one that disagreed: made anew, it may agree
    calm = Moody(folder, (0, 0, 0.1))
    assert at_four(settle(calm, quiet)) == pytest.approx([100, 100, 100, 100, 110, 110])
    assert calm.names == ["256-64_4_2"], "and what was measured beyond it still counts"
    third = folder / "256-64_4_5.json"
    other = json.loads(third.read_text())
    other["series"]["made_by"]["model_hash"] = "of another merge"
    third.write_text(json.dumps(other))
    assert len(at_four(settle(Moody(folder, moods), quiet))) == 5, "but not that of another model"


# -- What training cost ---------------------------------------------------------------------------

def test_the_cost_of_training_is_what_its_own_files_say(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    assert use("training_cost")() is None
    (tmp_path / "train").mkdir()
    steps = [{"step": 0, "val_loss": 2.0}, *({"step": k, "seconds": 1.2} for k in (1, 2, 3))]
    (tmp_path / "train/log.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    made = {"device_kind": "TPU v5", "devices": 4, "load_seconds": 1800, "compile_seconds": 1796.4}
    helpers.write_json(tmp_path / "train/machine.json", made)
    hours, dollars = use("training_cost")()
    assert hours == pytest.approx(1) and dollars == pytest.approx(16.8, abs=0.1)
    helpers.write_json(tmp_path / "train/machine.json", made | {"device_kind": "cpu"})
    assert math.isnan(use("training_cost")()[1])


# -- Goodput, and floors that follow the server's options ------------------------------------------

def test_goodput_follows_the_objective_without_measuring_again():
    result = point(requests=4, ttft=0.1, tpot=0.01)
    result["ttfts"], result["latencies"] = [0.1, 0.4, 0.6, 0.1], [0.73, 1.03, 1.23, 3.0]
    assert use("share_kept")(result, (500, 30)) == 0.5, "one waited too long, one was too slow"
    assert use("share_kept")(result, (1000, 30)) == 0.75
    assert use("share_kept")(result, (1, 1)) == 0
    rows = [use("row")(result, 0.7, CONFIG, MACHINE["tpu"], slo) for slo in ((500, 30), (1, 1))]
    assert rows[0]["goodput_rps"] == pytest.approx(rows[0]["delivered_rps"] / 2)
    assert rows[1]["goodput_rps"] == 0
    failed = point(requests=4, failed=1)
    assert use("share_kept")(failed, (500, 30)) == 1, "a failed request is not a fast one"


def test_floors_chips_and_price_follow_the_servers_options(monkeypatch):
    """05's settings with another layout and cache, through the file that it leaves."""
    options_for, FULL05 = load("05_serve_vllm.py", "options_for", "FULL", "Settings")[:2]
    v6e, plain = chip("v6e"), options_for(FULL05, "m")
    eight = use("machine_of")(plain, CONFIG)
    assert (eight.system, eight.peak) == ("v6e-8", 8 * v6e.flops)
    assert eight.dollars_per_hour == pytest.approx(21.52, abs=0.01)
    other = options_for(replace(FULL05, tensor_parallel=4, data_parallel=2,
                                kv_cache_dtype="fp8"), "m")
    two = use("machine_of")(other, CONFIG)
    assert (two.system, two.peak, two.bandwidth) == ("v6e-8", 4 * v6e.flops, 4 * v6e.bandwidth)
    sliding, full = 50 * 2 * 16 * 256, 10 * 2 * 4 * 512  # K and V, heads, size; 4 heads on 4 chips
    cache = use("step_bytes")(CONFIG, other, 1, 4096) - use("step_bytes")(CONFIG, other)
    assert cache == sliding * 1024 + full * 4096
    assert use("step_bytes")(CONFIG, plain, 1, 4096) - use("step_bytes")(CONFIG, plain) \
        == 2 * (sliding * 1024 + 2 * full * 4096), "bfloat16, and 4 heads stored for 8 chips"
    alone, burst = use("ttft_floors")(CONFIG, 4096, [0.0] * 30, replace(two, bandwidth=math.inf))
    assert alone == pytest.approx(2 * 34.2e-3, rel=0.01), "half of the chips work on one request"
    assert burst == pytest.approx(8 * alone), "two copies: 15 each, the median of 1, 1, 2, 2 ..."
    int8 = replace(plain, quantization="int8", tensor_parallel=4)
    assert use("machine_of")(int8, CONFIG).peak == 2 * 4 * v6e.flops
    assert use("machine_of")(int8, CONFIG).dollars_per_hour == pytest.approx(10.76)
    assert use("machine_of")(replace(int8, quantization="fp8"), CONFIG).peak == 4 * v6e.flops, \
        "a v6e has no fp8 arithmetic"
    assert use("step_bytes")(CONFIG, int8) == use("step_bytes")(CONFIG, plain) / 2
    assert use("machine_of")(plain, CONFIG, 16.0).dollars_per_hour == 16, "yours may differ"
    monkeypatch.setattr(bench_module, "roof", lambda *_: (1.0, 1.0))
    assert math.isnan(use("machine_of")(CPU, CONFIG).dollars_per_hour), "no price is invented"


class Endpoint(http.server.BaseHTTPRequestHandler):
    """A server with a model list and without /metrics."""

    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "served"}]}')

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint():
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield {"base_url": f"http://127.0.0.1:{web.server_port}", "model": "served",
           "max_model_len": 1024}
    web.shutdown()
    web.server_close()


def test_plans_that_cannot_work_are_refused_in_one_line(endpoint):
    check = use("check_plan")
    check(TINY, endpoint)
    with pytest.raises(ValueError, match=r"serves \['served'\], not other"):
        check(TINY, {**endpoint, "model": "other"})
    with pytest.raises(ValueError, match="rate of 0"):
        check(replace(TINY, rates=(0, 4)), endpoint)
    with pytest.raises(ValueError, match="one finite rate"):
        check(replace(TINY, rates=(INF,)), endpoint)
    with pytest.raises(ValueError, match="ascending"):
        check(replace(TINY, rates=(8, 4)), endpoint)
    with pytest.raises(ValueError, match=r"\['1000/64'\] exceed .* max-model-len of 1024"):
        check(replace(TINY, regimes=((256, 64), (1000, 64))), endpoint)
    with pytest.raises(ValueError, match="no server answers at"):
        check(TINY, {**endpoint, "base_url": "http://127.0.0.1:9"})


def test_a_server_without_metrics_is_said_and_gives_unknown(endpoint, capsys):
    text = use("metrics")(endpoint)
    assert "no /metrics: prefix-cache hits cannot be checked" in capsys.readouterr().out
    assert math.isnan(use("metric")(text, "vllm:prefix_cache_hits_total"))
    with pytest.raises(ValueError, match="no server answers"):
        use("metrics")({**endpoint, "base_url": "http://127.0.0.1:9"})


def test_metric_adds_labels_and_ignores_longer_names():
    text = ('# HELP vllm:hits_total help\nvllm:hits_total{engine="0"} 3.0\n'
            'vllm:hits_total{engine="1"} 4.5\nvllm:hits_total_created{engine="0"} 1.7e+09\n'
            "plain 2\n")
    assert use("metric")(text, "vllm:hits_total") == 7.5
    assert use("metric")(text, "plain") == 2
    prometheus = pytest.importorskip("prometheus_client.parser", reason="only in .venv-serve")
    samples = [s.value for f in prometheus.text_string_to_metric_families(text) for s in f.samples
               if s.name == "vllm:hits_total"]
    assert sum(samples) == 7.5


def test_a_readers_own_table_is_drawn_beside_ours(tmp_path, capsys):
    rows = [use("row")(point(rate=r), 0.7, CONFIG, MACHINE["tpu"], TINY.slo) for r in (4.0, INF)]
    pd.DataFrame(rows).to_csv(tmp_path / "results.csv", index=False)
    pd.DataFrame(rows).assign(system="mine").to_csv(tmp_path / "mine.csv", index=False)
    table = use("systems")(tmp_path)
    assert set(table.system) == {"mine", "here"} and len(table) == 4
    assert math.inf in set(table.rate)
    curves = dict(list(table.groupby(["system", "input_len", "output_len"])))
    titles = [charts.title_of(key, curves) for key in curves]
    assert len(set(titles)) == 2 and any(title.endswith(", mine") for title in titles)
    alone = {key: part for key, part in curves.items() if key[0] == "mine"}
    assert [charts.title_of(key, alone) for key in alone] == ["256/64"]
    good = (tmp_path / "results.csv").read_bytes()
    for number, broken in enumerate((b"a,b\n1,2\n", b"", b'"', bytes(range(256)), good[:-150],
                                     b"a,b\n1,2,3,4\n1\n")):
        (tmp_path / f"bad{number}.csv").write_bytes(broken)
    assert len(use("systems")(tmp_path)) == 4
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6 and all(f"bad{n}.csv is left out" in line for n, line in enumerate(said))


# -- Cost ----------------------------------------------------------------------------------------

def test_totals_are_the_published_sums_and_a_day_is_not_1_82():
    totals = {kind: use("totals")(train, hourly) for kind, train, hourly in
              (("tpu", 56.11, 21.52), ("gpu", 119.23, 22.12))}
    for entry in published("tco"):
        if entry["component"].startswith("train_plus"):
            hours = entry["component"].rsplit("_", 1)[1].replace("h", " h")
            for kind in ("tpu", "gpu"):
                assert totals[kind][hours] == pytest.approx(float(entry[f"{kind}_usd"]), abs=0.02)
    assert totals["gpu"]["1 h"] / totals["tpu"]["1 h"] == pytest.approx(1.82, abs=0.005)
    assert totals["gpu"]["24 h"] / totals["tpu"]["24 h"] == pytest.approx(1.135, abs=0.005)


def test_break_even():
    tokens = use("break_even")(56.11, 4.27, 119.23, 4.13)
    assert 56.11 + tokens * 4.27 == pytest.approx(119.23 + tokens * 4.13)
    assert math.isnan(use("break_even")(56.11, 4.95, 119.23, 8.44)), "cheaper from the start"
    assert math.isnan(use("break_even")(1, 2, 3, 2))


# -- A finished run ------------------------------------------------------------------------------

RUN = Path(os.environ.get("RUN_DIR") or ROOT / "runs" / "tiny")


@pytest.mark.series
@pytest.mark.skipif(not (RUN / "notebooks").is_dir(),
                    reason=f"no run in {RUN}: ./run_all.sh makes one")
def test_the_series_measured_every_point_above_its_floor():
    table = pd.read_csv(RUN / "bench" / "results.csv", keep_default_na=False, na_values=["nan"])
    planned = TINY.repeats * len(TINY.regimes) * len(TINY.rates)
    assert (table.repeat < TINY.repeats).sum() == planned
    extra = sum(len(list((RUN / "bench").glob(f"*-*_{rate}_[3-9].json"))) for rate in TINY.rates)
    assert len(table) == planned + extra, "every repeat is used"
    assert (table.flag == "").all(), table.flag.unique()
    assert (table.cached_tokens == 0).all() and (table.failed == 0).all()
    assert (table.completed >= TINY.min_requests).all()
    for (inputs, outputs, rate), part in table.groupby(["input_len", "output_len", "rate"]):
        raw = [json.loads((RUN / "bench" / f"{inputs}-{outputs}_{rate:g}_{k}.json").read_text())
               for k in part.repeat]
        for entry, result in zip(part.itertuples(), raw, strict=True):
            ours = use("share_kept")(result, TINY.slo)
            assert ours == pytest.approx(
                result["request_goodput"] * result["duration"] / result["completed"])
            assert entry.goodput_rps == pytest.approx(ours * entry.delivered_rps)
    for entry in table.itertuples():
        raw = json.loads((RUN / "bench" / f"{entry.input_len}-{entry.output_len}_"
                          f"{'inf' if entry.rate == INF else int(entry.rate)}_{entry.repeat}.json"
                          ).read_text())
        assert raw["request_throughput"] == pytest.approx(raw["completed"] / raw["duration"])
        assert entry.ttft_p50_ms == pytest.approx(1e3 * np.median(raw["ttfts"]))
        assert np.median(raw["input_lens"]) == pytest.approx(entry.input_len, abs=4)
        assert set(raw["output_lens"]) == {entry.output_len}
        assert entry.ttft_p50_ms <= entry.ttft_p90_ms <= entry.ttft_p99_ms
    for name in ("throughput", "latency", "requests", "cost"):
        assert (RUN / "figures" / f"06_{name}.png").stat().st_size > 10_000


@pytest.mark.series
@pytest.mark.skipif(not (RUN / "notebooks").is_dir(),
                    reason=f"no run in {RUN}: ./run_all.sh makes one")
def test_every_spread_of_the_series_has_its_reason():
    """Repeats lie within 20 %, or the point says why not: 06 has measured until it could."""
    table = pd.read_csv(RUN / "bench" / "results.csv", keep_default_na=False, na_values=["nan"])
    raw = [json.loads((RUN / "bench" / f"{one.input_len}-{one.output_len}_{one.rate:g}_{one.repeat}"
                       ".json").read_text()) for one in table.itertuples()]
    for point, why in use("reasons")(table, raw).items():
        assert use("AGAIN") not in why, (point, why)
