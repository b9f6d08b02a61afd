"""06: points, floors, saturation, cost, and what goes wrong in a sweep.

The client and the server are small stand-ins here; vLLM's own client measures in the series.
"""

import csv
import http.server
import json
import math
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, load

import helpers
from helpers import physics, server

NAMES = ("Settings", "INF", "FULL", "E2B", "TINY", "COUNTERS", "check_plan", "metric", "metrics",
         "ttft_floors", "bench_arguments", "load_result", "point_name", "measure", "finished",
         "lone_latency", "delivered_rate", "requests_for", "sweep", "latencies", "floors_of", "row",
         "saturation", "systems", "totals", "break_even")
NOTEBOOK = dict(zip(NAMES, load("06_bench.py", *NAMES), strict=True))
CONFIG = json.loads((ROOT / "data/configs/gemma4_31b.json").read_text())
MACHINE = {"tpu": (8 * 918e12, 8 * 1.638e12), "gpu": (2 * 989e12, 2 * 3.35e12)}  # FLOP/s, bytes/s
TINY = NOTEBOOK["TINY"]
INF = math.inf


def use(name):
    return NOTEBOOK[name]


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
        "ttfts": [ttft] * requests, "errors": [""] * done + ["refused"] * failed,
        "series": {"server": ["x"], "input_len": inputs, "output_len": outputs, "repeat": 0,
                   "seed": 1, "requests": requests, "cached_tokens": cached, "preemptions": 0.0}}
    for kind, value in (("ttft", ttft), ("tpot", tpot), ("itl", tpot), ("e2el", latency)):
        result |= {f"p{p}_{kind}_ms": 1e3 * value for p in (50, 90, 99)}
    return result


# -- Floors --------------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens, tpu, gpu", [
    (512, 4.1, 15.3), (1024, 8.3, 30.9), (2048, 16.9, 62.6), (4096, 34.2, 127.1),
    (8192, 70.1, 260.2), (15360, 136.4, 506.5)])
def test_floor_of_one_request_is_the_published_audit_table(tokens, tpu, gpu):
    for device, wanted in (("tpu", tpu), ("gpu", gpu)):
        alone, queued = use("ttft_floors")(CONFIG, tokens, [0.0], MACHINE[device][0], math.inf)
        assert 1e3 * alone == pytest.approx(wanted, abs=0.06) and queued == alone


def test_the_floor_of_e2b_does_not_read_what_is_only_looked_up():
    """Its per-layer table holds half of the parameters; a step reads 512 rows of it."""
    config = helpers.read_json(ROOT / "data/configs/gemma4_e2b.json")
    alone, _ = use("ttft_floors")(config, 1, [0.0], 1e30, 1e12)
    assert alone == pytest.approx(physics.decode_bytes(config, 0, 0) / 1e12)
    assert alone < 0.6 * physics.weight_bytes(config) / 1e12


def test_queue_floor_against_a_simulation_event_by_event():
    rng = random.Random(1)
    peak = MACHINE["tpu"][0]
    work = use("ttft_floors")(CONFIG, 4096, [0.0], peak, math.inf)[0]
    for rate in (1, 20, 40, 200):
        starts = [rng.uniform(0, 50 / rate) for _ in range(50)]
        free, waits = 0.0, []
        for start in sorted(starts):
            free = max(free, start) + work
            waits.append(free - start)
        floor = use("ttft_floors")(CONFIG, 4096, starts, peak, math.inf)[1]
        assert floor == pytest.approx(float(np.median(waits)))
    burst = use("ttft_floors")(CONFIG, 4096, [0.0] * 31, peak, math.inf)[1]
    assert burst == pytest.approx(16 * work)


def flagged(device, tokens, ttft_ms, rate, requests=30):
    result = point(tokens, 512, rate, requests, ttft_ms / 1e3, 1.0)
    return use("floors_of")(result, CONFIG, MACHINE[device][0], math.inf)["flag"]


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


def test_row_flags_a_warm_cache_and_a_token_faster_than_memory():
    peak, bandwidth = MACHINE["tpu"]
    row = lambda **k: use("row")(point(4096, 512, 1.0, **k), 1.0, CONFIG, peak, bandwidth, TINY)
    assert row()["flag"] == ""
    assert "prefix cache" in row(cached=4096.0)["flag"]
    assert row(cached=4096.0)["cache_hit_rate"] == pytest.approx(1 / 30)
    assert row(ttft=0.030)["flag"].startswith("impossible: TTFT")
    assert row(tpot=0.004)["flag"].startswith("impossible: TPOT")


# -- Points --------------------------------------------------------------------------------------

def test_every_point_has_enough_load_and_its_own_seed():
    FULL, requests_for = use("FULL"), use("requests_for")
    for rate in FULL.rates:
        n = requests_for(FULL, rate, INF)
        assert n >= 60 * min(rate, 64)
    assert requests_for(FULL, 64, 2.7) == 162, "a minute of what the server can do"
    assert requests_for(FULL, INF, 2.7) == 162
    assert requests_for(FULL, INF, INF) == 60 * 64, "kept up with all: a burst of the largest rate"
    assert all(requests_for(TINY, rate, INF) >= 30 for rate in TINY.rates)
    seeds = {use("point_name")(regime, rate, repeat)[1] for regime in FULL.regimes
             for rate in FULL.rates for repeat in range(3)}
    assert len(seeds) == len(FULL.regimes) * len(FULL.rates) * 3


def queue(rate, service, requests, seed):
    """Poisson arrivals, rescaled as vLLM does, at one server with a fixed service time."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, requests)
    starts = np.cumsum(gaps) * (requests / rate / gaps.sum())
    free, latencies = 0.0, []
    for start in starts:
        free = max(free, start) + service
        latencies.append(free - start)
    return {"completed": requests, "duration": float(starts[-1] - starts[0] + latencies[-1]),
            "latencies": latencies, "errors": [""] * requests, "start_times": starts.tolist()}


def batching(rate, requests, seed, tokens=64, slots=64):
    """The same for continuous batching: a step is 10 ms, 0.5 ms per running request, 4 per new one."""
    gaps = np.random.default_rng(seed).exponential(1, requests)
    starts = np.cumsum(gaps) * (requests / gaps.sum()) / rate
    clock, admitted, running = 0.0, 0, {}
    while admitted < requests or running:
        clock = clock if running else max(clock, starts[admitted])
        step = 0.010
        while admitted < requests and starts[admitted] <= clock and len(running) < slots:
            running[admitted], admitted, step = tokens, admitted + 1, step + 0.004
        clock += step + 0.0005 * len(running)
        running = {number: left - 1 for number, left in running.items()}
        running = {number: left for number, left in running.items() if left}
    return {"completed": requests, "duration": float(clock - starts[0]),
            "start_times": (starts - starts[0]).tolist()}


def test_a_batching_server_is_never_said_to_deliver_more_than_it_can():
    capacity = 64 / (64 * (0.010 + 64 * 0.0005) + 64 * 0.004)  # all 64 slots full, 64 tokens each
    lone = batching(1.0, 1, 0)["duration"]
    best = 0.0
    for rate in (4, 8, 16, 32, 128, math.inf):
        requests = int(15 * min(rate, capacity))
        given = [use("delivered_rate")(batching(rate, requests, seed), lone) for seed in range(3)]
        assert max(given) < 1.02 * min(rate, capacity), rate
        if rate < 0.9 * capacity:
            assert min(given) > 0.9 * rate, rate
        best = max(best, *given)
    assert best == pytest.approx(capacity, rel=0.04)
    short = batching(math.inf, int(5 * capacity), 0)
    assert use("delivered_rate")(short, lone) < capacity < short["completed"] / (
        short["duration"] - lone), "without the share a short burst would beat the server"


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
    """1024/512: 2.71 requests/s on the GPU; on the TPU 2.53 up to the last point that is not hidden."""
    for device, wanted in (("tpu", 2.53), ("gpu", 2.71)):
        rows = [(float(e["qps"]), float(e["value"]) / 512) for e in published("qps_sweep_digitized")
                if e["metric"] == "output_throughput" and e["device"] == device
                and e["input_tokens"] == "1024" and e["value"]]
        capacity, reached = use("saturation")(*zip(*rows))
        assert reached and capacity == pytest.approx(wanted, rel=0.01)


def test_failed_requests_stay_and_do_not_count_as_fast():
    result = point(failed=3)
    assert use("lone_latency")([result]) == pytest.approx(0.1 + 0.63), "not the zero of a failure"
    row = use("row")(result, 0.73, CONFIG, *MACHINE["tpu"], TINY)
    assert (row["completed"], row["failed"], row["requests"]) == (27, 3, 30)
    rest, sending = result["duration"] - 0.73, max(result["start_times"]) - min(result["start_times"])
    assert row["delivered_rps"] == pytest.approx(
        27 / (result["duration"] - 0.73 * min(1, sending / rest)))
    assert row["goodput_rps"] == pytest.approx(row["delivered_rps"] * result["duration"] / 27), \
        "one good request per second of the whole run, that is a share of the completed ones"
    assert row["usd_per_million_output"] == pytest.approx(
        TINY.dollars_per_hour / 3600 / (row["delivered_rps"] * 64) * 1e6)


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
    record = {"wanted": ["vllm"], "model": "name", "base_url": "http://127.0.0.1:9",
              "max_model_len": 1024}
    monkeypatch.setattr(server, "current", lambda: record)
    text = 'vllm:prefix_cache_hits_total{a="b"} 5.0\nvllm:num_preemptions_total{a="b"} 1.0\n'
    monkeypatch.setattr(server, "request", lambda *_: text)
    return tmp_path, record


def test_a_sweep_measures_once_and_resumes(bench, capsys):
    folder, record = bench
    cfg = TINY
    first = FakeClient(folder)
    results = use("sweep")(first, record, cfg, folder)
    total = cfg.repeats * len(cfg.regimes) * len(cfg.rates)
    assert first.calls == len(results) == total
    assert not list((folder / "partial").iterdir())
    again = FakeClient(folder)
    assert use("sweep")(again, record, cfg, folder) == results and again.calls == 0

    cut = sorted(folder.glob("*.json"))[3]
    cut.write_text(cut.read_text()[:200])
    assert len(use("sweep")(again, record, cfg, folder)) == total and again.calls == 1
    assert "was cut short" in capsys.readouterr().out
    other = {**record, "wanted": ["vllm", "--tensor-parallel-size", "4"]}
    use("sweep")(again, other, cfg, folder)
    assert again.calls == 1 + total, "points of another server are not taken for this one's"


def test_a_server_that_dies_leaves_the_finished_points_and_one_line(bench):
    folder, record = bench
    with pytest.raises(helpers.UserError, match="stopped after 5 of 16 points, which are kept"):
        use("sweep")(FakeClient(folder, fail_at=6), record, TINY, folder)
    assert len(list(folder.glob("*.json"))) == 5
    rest = FakeClient(folder)
    use("sweep")(rest, record, TINY, folder)
    assert rest.calls == 11


def test_saturated_rates_get_a_minute_of_the_servers_own_rate(bench):
    """A server that needs 1 s per request, whatever is offered: later points are not longer."""
    folder, record = bench
    cfg = replace(TINY, regimes=((256, 64),), rates=(0.5, 2, 64, INF), repeats=1, seconds=60.0,
                  min_requests=10)

    class Slow(FakeClient):
        def run(self, arguments):
            super().run(arguments)
            path = Path(arguments[arguments.index("--result-dir") + 1]) / arguments[-1]
            result = json.loads(path.read_text())
            n, rate = result["num_prompts"], float(result["request_rate"])
            result["duration"] = max(n / min(rate, 1.0), 1.0)
            path.write_text(json.dumps(result))
    results = use("sweep")(Slow(folder), record, cfg, folder)
    sent = [r["num_prompts"] for r in results]
    assert sent[:2] == [30, 120] and all(55 <= n <= 66 for n in sent[2:]), sent


def test_results_that_are_no_results(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"completed": 3')
    with pytest.raises(helpers.UserError, match="x.json was cut short. Delete it"):
        use("load_result")(path)
    path.write_text(json.dumps({"completed": 0, "num_prompts": 30,
                                "errors": ["", "Traceback ...\nNot Found: no model named x"]}))
    with pytest.raises(helpers.UserError, match="none of 30 requests completed: Not Found"):
        use("load_result")(path)


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
    yield {"base_url": f"http://127.0.0.1:{web.server_port}", "model": "served", "max_model_len": 1024}
    web.shutdown()
    web.server_close()


def test_plans_that_cannot_work_are_refused_in_one_line(endpoint):
    check = use("check_plan")
    check(TINY, endpoint)
    with pytest.raises(helpers.UserError, match=r"serves \['served'\], not other"):
        check(TINY, {**endpoint, "model": "other"})
    with pytest.raises(helpers.UserError, match="rate of 0"):
        check(replace(TINY, rates=(0, 4)), endpoint)
    with pytest.raises(helpers.UserError, match="one finite rate"):
        check(replace(TINY, rates=(INF,)), endpoint)
    with pytest.raises(helpers.UserError, match="ascending"):
        check(replace(TINY, rates=(8, 4)), endpoint)
    with pytest.raises(helpers.UserError, match=r"\['1000/64'\] exceed .* max-model-len of 1024"):
        check(replace(TINY, regimes=((256, 64), (1000, 64))), endpoint)
    with pytest.raises(helpers.UserError, match="no server answers at"):
        check(TINY, {**endpoint, "base_url": "http://127.0.0.1:9"})


def test_a_server_without_metrics_is_said_and_gives_unknown(endpoint, capsys):
    text = use("metrics")(endpoint)
    assert "no /metrics: prefix-cache hits cannot be checked" in capsys.readouterr().out
    assert math.isnan(use("metric")(text, "vllm:prefix_cache_hits_total"))
    with pytest.raises(helpers.UserError, match="no server answers"):
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


def test_a_readers_own_table_is_drawn_beside_ours(tmp_path):
    rows = [use("row")(point(rate=r), 0.7, CONFIG, *MACHINE["tpu"], TINY) for r in (4.0, INF)]
    pd.DataFrame(rows).to_csv(tmp_path / "results.csv", index=False)
    pd.DataFrame(rows).assign(system="mine").to_csv(tmp_path / "mine.csv", index=False)
    table = use("systems")(tmp_path)
    assert set(table.system) == {"mine", TINY.system} and len(table) == 4
    assert math.inf in set(table.rate)
    curves = dict(list(table.groupby(["system", "input_len", "output_len"])))
    titles = [load("06_bench.py", "title_of")(key, curves) for key in curves]
    assert len(set(titles)) == 2 and any(title.endswith(", mine") for title in titles)
    alone = {key: part for key, part in curves.items() if key[0] == "mine"}
    assert [load("06_bench.py", "title_of")(key, alone) for key in alone] == ["256/64"]
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(helpers.UserError, match="bad.csv lacks the columns"):
        use("systems")(tmp_path)


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
@pytest.mark.skipif(not (RUN / "notebooks").is_dir(), reason=f"no run in {RUN}: ./run_all.sh makes one")
def test_the_series_measured_every_point_above_its_floor():
    table = pd.read_csv(RUN / "bench" / "results.csv", keep_default_na=False, na_values=["nan"])
    assert len(table) == TINY.repeats * len(TINY.regimes) * len(TINY.rates)
    assert (table.flag == "").all(), table.flag.unique()
    assert (table.cached_tokens == 0).all() and (table.failed == 0).all()
    assert (table.completed >= 30).all()
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
