"""Load a server with vLLM's own client, point by point, and say what the numbers are worth.

06 is the notebook of this file. A *regime* is a prompt length and an answer length, a *point* a
regime at one request rate. Every measurement of a point, a *repeat*, is one JSON file that is kept.
No JAX here: this runs beside a server.
"""

import collections
import dataclasses
import json
import math
import os
import statistics
import subprocess
import time
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.stats

from serving import physics, server
from tables import hardware
from helpers.run import Progress, differences, read_json, run_dir, stamp, write_text

INF = math.inf
LIMIT = 0.2  # repeats further apart than this need a reason
ENOUGH = 6   # repeats whose middle half is a result, whatever the others are
AGAIN = "measure again"
COUNTERS = {"cached_tokens": "vllm:prefix_cache_hits_total",
            "preemptions": "vllm:num_preemptions_total"}
NEEDED = {"duration", "start_times", "latencies", "ttfts", "output_lens", "errors", "num_prompts",
          "request_rate", "p50_ttft_ms", "p50_tpot_ms", "total_input_tokens", "total_output_tokens"}


# -- The server, before and after ----------------------------------------------------------------

def check_plan(cfg, record):
    """Raise unless the points make sense and fit into the server's context.

    Raises:
      ValueError: rates or lengths that cannot work, or a server of another model.
    """
    if any(rate <= 0 for rate in cfg.rates):
        raise ValueError("a request rate of 0 or less sends nothing: give rates above 0, "
                        "or inf for all at once.")
    if all(rate == INF for rate in cfg.rates):
        raise ValueError("give at least one finite rate: a burst alone has no curve.")
    if list(cfg.rates) != sorted(cfg.rates):
        raise ValueError("give the rates in ascending order.")
    long = [f"{i}/{o}" for i, o in cfg.regimes if i + o + 8 > record["max_model_len"]]
    if long:
        raise ValueError(f"regimes {long} exceed the server's max-model-len of "
                        f"{record['max_model_len']}. Raise it in 05, or drop them.")
    models = [model["id"] for model in json.loads(server.request(record, "/v1/models"))["data"]]
    if record["model"] not in models:
        raise ValueError(f"the server serves {models}, not {record['model']}. "
                        "Run 05_serve_vllm again.")


def metric(text, name):
    """The sum of a Prometheus metric over its labels; nan if the server does not have it."""
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
              if line.startswith((name + "{", name + " "))]
    return sum(values) if values else math.nan


def metrics(record):
    """The server's metrics as text; empty, with a warning, where it has none."""
    try:
        return server.request(record, "/metrics")
    except ValueError as error:
        if "HTTP" not in str(error):
            raise
        print(f"{error}\nThis server has no /metrics: prefix-cache hits cannot be checked.")
        return ""


def cache_facts(text):
    """What the server's metrics say about its caches: prefix caching, dtype, size in tokens."""
    line = next((line for line in text.splitlines() if line.startswith("vllm:cache_config_info")),
                "")
    return {key: line.partition(f'{key}="')[2].partition('"')[0] or "unknown"
            for key in ("enable_prefix_caching", "cache_dtype", "kv_cache_size_tokens")}


def wait_idle(record, patience=60.0):
    """Return the metrics of the server once no request runs or waits there; raise if some stay."""
    end = time.monotonic() + patience
    while True:
        text = metrics(record)
        running, waiting = (metric(text, f"vllm:num_requests_{what}")
                            for what in ("running", "waiting"))
        if not (running > 0 or waiting > 0):  # nan, where there are no metrics, is neither
            return text
        if time.monotonic() > end:
            raise ValueError(f"the server is not idle: {running:.0f} requests run and "
                            f"{waiting:.0f} wait after {patience:.0f} s. Another client "
                            "uses it: end that, then run this again.")
        time.sleep(0.2)


# -- One measurement -----------------------------------------------------------------------------

def bench_arguments(client, record, cfg, regime, rate, requests, seed, name):
    """The arguments of `vllm` for one point; its result goes to <results>/partial/<name>."""
    return ["bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
            "--base-url", record["base_url"], "--model", record["model"],
            "--tokenizer", client.model, "--dataset-name", "random",
            "--random-input-len", str(regime[0]), "--random-output-len", str(regime[1]),
            "--request-rate", str(rate), "--num-prompts", str(requests), "--seed", str(seed),
            "--num-warmups", str(cfg.warmups), "--temperature", "0", "--ignore-eos",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99",
            "--goodput", f"ttft:{cfg.slo[0]}", f"tpot:{cfg.slo[1]}", "--disable-tqdm",
            "--save-result", "--save-detailed", "--result-dir", f"{client.results}/partial",
            "--result-filename", name]


def load_result(path):
    """One finished measurement.

    Raises:
      ValueError: the file was cut short, is no result, or nothing completed.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{path} was cut short. Delete it and run this again.") from error
    if not isinstance(result, dict) or (result.get("completed") and NEEDED - result.keys()):
        raise ValueError(f"{path} is no result of vLLM. Delete it and run this again.")
    if not result.get("completed"):
        first = next((error for error in result.get("errors", []) if error), "no error text")
        raise ValueError(f"{path}: none of {result.get('num_prompts')} requests completed: "
                        f"{first.strip().splitlines()[-1][:200]}")
    return result


def requests_for(cfg, rate):
    """How many requests a point sends: `seconds` of its rate; a burst those of the largest rate."""
    fastest = max(rate for rate in cfg.rates if rate < INF)
    return max(cfg.min_requests, math.ceil(cfg.seconds * min(rate, fastest)))


def point_name(regime, rate, repeat):
    """Name and seed of one measurement."""
    name = f"{regime[0]}-{regime[1]}_{rate}_{repeat}"
    return f"{name}.json", zlib.crc32(name.encode())


def made_by(options, cfg, rate):
    """What shaped a point, beside its name: the server, the model, the load and the CPU, if any."""
    fastest = max(rate for rate in cfg.rates if rate < INF)
    return stamp(**options.measured(), seconds=cfg.seconds, min_requests=cfg.min_requests,
                 warmups=cfg.warmups, burst_of=fastest if rate == INF else 0,
                 cores=0 if options.chip else os.cpu_count())


def finished(options, cfg, regime, rate, repeat, folder, otherwise="measuring it anew",
             requests=None):
    """The result of an earlier run if it is whole and was made by the same, else None (and why).

    `requests`, if given, is how many it must have sent: beyond the knee that follows from an
    earlier point, and latencies of different numbers are no repeats of each other.
    """
    path = folder / point_name(regime, rate, repeat)[0]
    if not path.exists():
        return None
    try:
        result = load_result(path)
    except ValueError as error:
        print(f"{error} ({otherwise})")
        return None
    series = result.get("series", {})
    apart = differences(series.get("made_by"), made_by(options, cfg, rate))
    if requests and not apart:
        apart = differences({"requests": series.get("requests")}, {"requests": requests})
    if apart:
        print(f"{path.name} was made from something else ({'; '.join(apart)}): {otherwise}")
    return None if apart else result


def measure(client, record, options, cfg, regime, rate, requests, repeat, folder):
    """Run one point on an idle server and write its JSON; the server must live before and after."""
    name, seed = point_name(regime, rate, repeat)
    before, used = wait_idle(record), server.cpu_seconds(record)
    client.run(bench_arguments(client, record, cfg, regime, rate, requests, seed, name))
    others = server.others_cores(used, server.cpu_seconds(record))
    server.current()
    result = load_result(folder / "partial" / name)
    after = metrics(record)
    result["series"] = {
        "made_by": made_by(options, cfg, rate), "input_len": regime[0], "output_len": regime[1],
        "repeat": repeat, "seed": seed, "requests": requests,
        "others_cores": 0.0 if options.chip else others,
        **{key: metric(after, long) - metric(before, long) for key, long in COUNTERS.items()}}
    write_text(folder / name, json.dumps(result))
    (folder / "partial" / name).unlink()
    return result


# -- All of them -----------------------------------------------------------------------------------

def sweep(client, record, options, cfg, folder):
    """Measure what has no file yet, all points once per repeat; return all results.

    Beyond the first rate of a regime that was too much, all points send as many requests as that
    one: there, latencies grow with the number of requests, and could not be compared otherwise.
    Twice that rate is still measured, and a burst; further rates would only say the same again.

    Raises:
      ValueError: the server died; says after how many points. Those are kept.
    """
    points = [(repeat, regime, rate) for repeat in range(cfg.repeats) for regime in cfg.regimes
              for rate in cfg.rates]
    progress = Progress(len(points), "points", every=10.0)
    results, too_much, planned, lone = [], {}, {}, {}
    for done, (repeat, regime, rate) in enumerate(points):
        limit, most = too_much.get(regime, (INF, 0))
        if 2 * limit < rate < INF:
            progress.update(note=f"{rate}/s is left out, {limit}/s was too much")
            continue
        wanted = most or requests_for(cfg, rate)
        requests = planned.setdefault((regime, rate), wanted)  # decided by the first repeat
        result = finished(options, cfg, regime, rate, repeat, folder, requests=requests)
        try:
            result = result or measure(client, record, options, cfg, regime, rate, requests, repeat,
                                       folder)
        except ValueError as error:
            raise ValueError(f"stopped after {done} of {len(points)} points, which are kept "
                            f"in {folder}: {error}") from error
        lone[regime] = min(lone.get(regime, INF), lone_latency([result]))
        delivered = delivered_rate(result, lone[regime])
        if delivered < 0.9 * rate < INF:
            too_much.setdefault(regime, (rate, requests))
        progress.update(note=f"{regime[0]}/{regime[1]} at {rate}/s: {delivered:.2f} requests/s")
        results.append(result)
    return results


def repeat_further(client, record, options, cfg, folder, results):
    """Measure again what disagrees with itself by more than its requests explain; return all.

    A point whose repeats are more than LIMIT apart, without a reason of `why_apart`, gets further
    repeats until it has `cfg.at_most`, at least ENOUGH of them to settle it. None is dropped: the
    first ones stay, and so does whatever an earlier run measured beyond them.
    """
    sent = {(regime_of(r), float(r["request_rate"])): r["series"]["requests"] for r in results}
    for regime in cfg.regimes:
        for rate in cfg.rates:
            for repeat in range(cfg.repeats, cfg.at_most):
                requests = sent.get((regime, rate))  # None: left out
                if requests and (kept := finished(options, cfg, regime, rate, repeat, folder,
                                                  "left out", requests)):
                    results = [*results, kept]
    more, progress = collections.Counter(), None
    while again := _unsettled(results, cfg.at_most):
        most = sum(cfg.at_most - repeat for _, _, repeat, _ in again)
        progress = progress or Progress(most, "further repeats, at most", every=20.0)
        for regime, rate, repeat, requests in again:
            more[regime, rate] += 1
            rate = next(known for known in cfg.rates if known == rate)  # 4, not 4.0, in its name
            results = [*results, measure(client, record, options, cfg, regime, rate, requests,
                                         repeat, folder)]
            progress.update()
    if more:
        print(f"points whose repeats were more than {LIMIT:.0%} apart, by their arrivals or by the "
              f"machine: {len(more)}, measured again, up to {max(more.values())} times each")
    return results


def _unsettled(results, at_most):
    """(regime, rate, next repeat, requests) of every point that is to be measured again."""
    table, again = compared(results), []
    for (inputs, outputs, rate), why in reasons(table, results).items():
        part = table[(table.input_len == inputs) & (table.output_len == outputs)
                     & (table.rate == rate)]
        if AGAIN in why and len(part) < at_most:
            missing = next(k for k in range(at_most) if k not in set(part.repeat))
            requests = results[part.index[0]]["series"]["requests"]
            again.append(((inputs, outputs), rate, missing, requests))
    return again


# -- What a measurement delivered ------------------------------------------------------------------

def lone_latency(results):
    """The shortest end-to-end latency of a completed request, in seconds."""
    return min(latency for result in results
               for latency, error in zip(result["latencies"], result["errors"], strict=True)
               if not error)


def delivered_rate(result, lone):
    """Completed requests per second, corrected for both ends of the run.

    A server that keeps up idles away the end of a run: its last request still takes `lone` seconds,
    a request's latency on an idle server, while nothing arrives any more. Those seconds are no time
    of load. A server with a queue is busy to the end, and the more so the less of the run saw
    arrivals: `lone` counts by that share, and for a burst not at all.

    At the start it is the other way round. The client waits one random gap before its first
    request too, so n requests take n gaps, and who keeps up needs all of them. A server with a
    queue was only kept from its work: the first gap, the `lead`, is taken out for it.

    It errs on the low side, because the last requests of a loaded server take longer than `lone`:
    near the limit by up to a fifth of the rate where a run is only a few latencies long (simulated
    in the tests). It never says more than the server can do.
    """
    starts = result["start_times"]
    sending = max(starts) - min(starts)
    lead = max(0.0, result["duration"] - (max(ends(result)) - min(starts)))
    share = min(1.0, sending / max(result["duration"] - lead - lone, 1e-9))
    return result["completed"] / (result["duration"] - lone * share - lead * (1 - share))


def ends(result):
    """When each request ended, by the clock of `start_times`."""
    return [start + took for start, took in zip(result["start_times"], result["latencies"],
                                                strict=True)]


def done_under_load(result):
    """Share of the completed requests that had ended when the last one was sent."""
    last = max(result["start_times"])
    return sum(end < last and not error for end, error in zip(
        ends(result), result["errors"], strict=True)) / result["completed"]


def share_kept(result, slo):
    """Share of the completed requests whose times kept the objective (TTFT and TPOT, in ms)."""
    good = 0
    for ttft, latency, tokens, error in zip(result["ttfts"], result["latencies"],
                                            result["output_lens"], result["errors"], strict=True):
        tpot = (latency - ttft) / (tokens - 1) if tokens > 1 else 0.0
        good += not error and 1e3 * ttft <= slo[0] and 1e3 * tpot <= slo[1]
    return good / result["completed"]


def latencies(result):
    """The percentiles of one point, in milliseconds."""
    return {f"{kind}_p{p}_ms": result[f"p{p}_{kind}_ms"]
            for kind in ("ttft", "tpot", "itl", "e2el") for p in (50, 90, 99)}


def samples(result):
    """The times behind the medians of a point: TTFT and TPOT of each completed request."""
    done = [(ttft, (latency - ttft) / max(tokens - 1, 1)) for ttft, latency, tokens, error in zip(
        result["ttfts"], result["latencies"], result["output_lens"], result["errors"],
        strict=True) if not error]
    return dict(zip(("ttft_p50_ms", "tpot_p50_ms"), np.array(done).T, strict=True))


def gaps(result):
    """Median seconds between two tokens of an answer: while first tokens were due, and afterwards.

    A step that also reads prompts takes longer; after the last first token there are none to read.
    """
    firsts = [start + ttft for start, ttft, error in zip(
        result["start_times"], result["ttfts"], result["errors"], strict=True) if not error]
    due, after = [], []
    for start, ttft, each in zip(result["start_times"], result["ttfts"], result["itls"],
                                 strict=True):
        for gap, came in zip(each, start + ttft + np.cumsum(each), strict=True):
            (due if came <= max(firsts) else after).append(gap)
    return tuple(statistics.median(found) if found else math.nan for found in (due, after))


def regime_of(result):
    """(prompt length, answer length) of a measurement."""
    return result["series"]["input_len"], result["series"]["output_len"]


def lone_latencies(results):
    """{regime: the shortest latency of a request, in seconds}."""
    return {regime: lone_latency([r for r in results if regime_of(r) == regime])
            for regime in dict.fromkeys(map(regime_of, results))}


# -- The machine, and what it cannot beat ----------------------------------------------------------

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
    options: server.Options


def roof(options, weight_bytes):
    """Peak FLOP/s and bytes/s of one copy's share of the machine: data sheet, or measured here.

    For a CPU: the fastest matrix product and the fastest read of a model-sized array that one core
    manages in many attempts, times the cores. Cores together are never faster than their sum, so
    this errs on the high side.
    """
    if options.chip:
        chip = hardware.chip(options.chip)
        fast = ("int8", "fp8") if options.chip == "h100" else ("int8",)  # fp8 is as fast there
        peak = chip.int8 if options.quantization in fast else chip.flops
        return peak * options.tensor_parallel, chip.bandwidth * options.tensor_parallel
    probe = PROBE.replace("BYTES", str(int(weight_bytes)))
    done = subprocess.run([server.PYTHON, "-c", probe], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"calibrating failed: {done.stderr.strip().splitlines()[-1]}")
    return tuple(float(number) / options.data_parallel for number in done.stdout.split())


def machine_of(options, config, dollars_per_hour=0.0):
    """The `Machine` that the server's options describe; 0 dollars: the published price, if any."""
    published = hardware.chip(options.chip).dollars_per_hour * options.chips if options.chip \
        else math.nan
    kind = "gpu" if options.engine == "gpu-docker" else "tpu"
    chips = hardware.Hardware(kind, options.chip, options.chips)
    name = (chips.slice or str(chips)) if options.chip else f"{os.cpu_count()} CPU cores"
    return Machine(name, *roof(options, step_bytes(config, options)),
                   dollars_per_hour or published, options)


def step_bytes(config, options, batch=0, context=0):
    """Bytes that one decode step of one copy must read, by the dtypes of the server's options."""
    return physics.decode_bytes(config, batch, context, options.weight_bytes, options.kv_bytes,
                                options.tensor_parallel)


def ttft_floors(config, input_len, starts, machine):
    """Least possible TTFT in seconds: (one request alone, median of arrivals at `starts`)."""
    work = physics.prefill_flops(config, input_len) / machine.peak
    alone = max(work, step_bytes(config, machine.options) / machine.bandwidth)
    copies, starts = machine.options.data_parallel, sorted(starts)  # equal work: they take turns
    waits = [wait for k in range(copies) if starts[k::copies]
             for wait in physics.fcfs_ttft(starts[k::copies], work)]
    return alone, max(alone, statistics.median(waits))


def tpot_floor(config, input_len, machine, batch=1):
    """Least possible time per output token in seconds: of one request alone, or of a full batch."""
    return physics.tpot_floor(
        step_bytes(config, machine.options, batch, input_len), machine.bandwidth,
        physics.decode_flops(config, batch, input_len), machine.peak)


def decoding(result):
    """How many requests were past their first token at once, on average over the run."""
    return sum(latency - ttft for ttft, latency in zip(
        result["ttfts"], result["latencies"], strict=True)) / result["duration"]


def floors_of(result, config, machine):
    """The floors of one point, in milliseconds, and what is impossible about it, if anything.

    `tpot_in_flight_ms` is an estimate and no floor: a step that reads the caches of as many
    requests as were being answered on average.
    """
    series = result["series"]
    alone, queued = ttft_floors(config, series["input_len"], result["start_times"], machine)
    step = tpot_floor(config, series["input_len"], machine)
    batch = max(1.0, decoding(result) / machine.options.data_parallel)
    fastest = min(ttft for ttft, error in zip(result["ttfts"], result["errors"], strict=True)
                  if not error)
    flags = [physics.flag(fastest, alone, "TTFT, the fastest request,"),
             physics.flag(result["p50_ttft_ms"] / 1e3, queued, "TTFT, first come first served,"),
             physics.flag(result["p50_tpot_ms"] / 1e3, step, "TPOT"),
             f"{series['cached_tokens']:.0f} prompt tokens came from the prefix cache"
             if series["cached_tokens"] > 0 else ""]
    return {"ttft_floor_ms": 1e3 * alone, "ttft_queue_floor_ms": 1e3 * queued,
            "tpot_floor_ms": 1e3 * step,
            "tpot_in_flight_ms": 1e3 * tpot_floor(config, series["input_len"], machine, batch),
            "flag": next((flag for flag in flags if flag), "")}


def row(result, lone, config, machine, slo):
    """One row of results.csv: one measurement with its floors and its cost."""
    series, delivered = result["series"], delivered_rate(result, lone)
    tokens = delivered * result["total_output_tokens"] / result["completed"]
    return {
        "system": machine.system, "input_len": series["input_len"],
        "output_len": series["output_len"],
        "rate": float(result["request_rate"]), "repeat": series["repeat"],
        "requests": result["num_prompts"], "completed": result["completed"],
        "failed": result["failed"], "duration_s": result["duration"],
        "drain_s": max(ends(result)) - max(result["start_times"]),
        "done_under_load": done_under_load(result),
        "raw_rps": result["request_throughput"], "delivered_rps": delivered,
        "goodput_rps": share_kept(result, slo) * delivered, "output_tok_s": tokens,
        "mean_in_flight": sum(result["latencies"]) / result["duration"],
        **latencies(result), "cached_tokens": series["cached_tokens"],
        "cache_hit_rate": series["cached_tokens"] / result["total_input_tokens"],
        "preemptions": series["preemptions"], "others_cores": series["others_cores"],
        **floors_of(result, config, machine),
        "dollars_per_hour": machine.dollars_per_hour,
        "usd_per_million_output": machine.dollars_per_hour / 3600 / tokens * 1e6,
        "usd_per_thousand_requests": machine.dollars_per_hour / 3600 / delivered * 1e3,
        "hours_per_million_output": 1e6 / tokens / 3600,  # last: a row cut short lacks it
    }


def rows(results, config, machine, slo):
    """results.csv: a row per measurement."""
    lone = lone_latencies(results)
    return pd.DataFrame([row(r, lone[regime_of(r)], config, machine, slo) for r in results])


def short(number):
    """Three digits, without exponents."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def from_to(values):
    """The smallest and the largest value as text."""
    return f"{short(min(values))} to {short(max(values))}"


def within(table):
    """{(prompt, rate): True} where every repeat kept the objective for nine requests in ten.

    A request counts in the goodput only if its TTFT *and* its TPOT were within it: two p90s that
    are each within it may leave out 20 % of the requests. Beyond the knee nothing can be promised.
    """
    knees = {prompt: kept_up(part)[0] for prompt, part in table.groupby("input_len")}
    kept = ((table.goodput_rps >= 0.9 * table.delivered_rps)
            & (table.rate <= table.input_len.map(knees)))
    return kept.groupby([table.input_len, table.rate]).all()


def cheapest(table):
    """Medians of the rate with the cheapest tokens, of each prompt length: {(prompt, rate): ...}.

    Among its rates that are `within` the objective; where none is, among all, and that is said.
    """
    middle = table.groupby(["input_len", "rate"]).median(numeric_only=True)
    middle = middle.assign(**{"within the objective": within(table)})
    kept = middle["within the objective"]
    pool = middle[kept | ~kept.groupby("input_len").transform("any")]
    return pool.loc[pool.hours_per_million_output.groupby("input_len").idxmin()]


def labelled(frame):
    """The frame with `prompt at rate` as its index."""
    return frame.set_axis([f"{prompt} at {rate:g}/s" for prompt, rate in frame.index])


# -- Repeats ---------------------------------------------------------------------------------------

COMPARED = {"delivered_rps": "delivered", "ttft_p50_ms": "TTFT p50", "tpot_p50_ms": "TPOT p50"}
REGIME = ["input_len", "output_len"]


def compared(results):
    """What the repeats of a point are compared by: those columns of `rows` that need no machine."""
    lone = lone_latencies(results)
    return pd.DataFrame([{
        "input_len": regime_of(r)[0], "output_len": regime_of(r)[1],
        "rate": float(r["request_rate"]), "repeat": r["series"]["repeat"],
        "others_cores": r["series"]["others_cores"],
        "delivered_rps": delivered_rate(r, lone[regime_of(r)]),
        "ttft_p50_ms": r["p50_ttft_ms"], "tpot_p50_ms": r["p50_tpot_ms"]} for r in results])


def kept_up(part):
    """The knee of one regime: (last rate that every repeat kept up with, first that is too much).

    Kept up with: at least 90 % of the rate, and of every smaller one, was delivered, and it is no
    more than the most that was ever delivered: a rate 8 % above the limit is delivered to 92 %,
    and its queue grows for ever. Too much: 90 % of it is more than that most. A rate between the
    two may be either, `delivered_rate` says rather too little.

    The last is 0 if even the smallest was too much; the first is at most inf, all at once.
    """
    most = part.delivered_rps.max()
    limit = 1.02 * most if most < 0.9 * part.rate.max() else INF  # else the limit was not reached
    fine = (part.delivered_rps >= 0.9 * part.rate) & (part.rate <= limit)
    below = part.assign(ok=fine).groupby("rate").ok.all().cummin()
    last = max(below.index[below], default=0.0)
    return last, min((rate for rate in set(part.rate) if rate > last and 0.9 * rate > most),
                     default=INF)


def up_to_the_knee(part):
    """The rows of one regime whose latencies can be compared: no queue grew with the test."""
    return part[part.rate <= kept_up(part)[0]]


def overlap(repeats):
    """True if the 95 % bootstrap intervals of the repeats' medians have a value in common.

    The intervals take requests as independent. In a queue they are not, so the intervals are too
    narrow: an overlap means much, its absence little.
    """
    found = [scipy.stats.bootstrap((np.asarray(values),), np.median, n_resamples=999,
                                   method="percentile", rng=0).confidence_interval
             for values in repeats]
    return max(low for low, _ in found) <= min(high for _, high in found)


def middle_half(values):
    """How far apart the quartiles are: the third over the first, minus 1."""
    low, high = np.percentile(list(values), [25, 75])
    return high / low - 1


def why_apart(part, raw, last):
    """Why the repeats of one point differ by more than LIMIT, and what else to know of it, or "".

    Args:
      part: their rows, all that there are.
      raw: their results, in the same order.
      last: the knee of the regime.
    """
    found, others = [], part.others_cores.max()
    preempted = max((result["series"]["preemptions"] for result in raw), default=0.0)
    if preempted > 0:
        found.append(f"cache full: {preempted:.0f} times a request was put off")
    if part.rate.iloc[0] < INF and not all(map(done_under_load, raw)):
        found.append("no answer finished while requests still came: not sustained, only finished")
    for column, name in COMPARED.items():
        if part[column].max() <= (1 + LIMIT) * part[column].min():
            continue
        half = middle_half(part[column])
        if column != "delivered_rps" and part.rate.iloc[0] > last:
            found.append("beyond the knee")
        elif others > 0.2:
            found.append(f"other programs used up to {others:.1f} cores")
        elif preempted > 0:
            continue
        elif column != "delivered_rps" and overlap([samples(result)[column] for result in raw]):
            found.append("too few requests to say it better")
        elif len(part) < ENOUGH:
            found.append(f"{name}: other arrivals, or the machine: {AGAIN}")
        elif half <= LIMIT:
            found.append(f"{name}: outliers, the middle half of {len(part)} is {half:.0%} apart")
        else:
            found.append(f"{name}: unstable, even the middle half of {len(part)} is {half:.0%} "
                         "apart")
    return "; ".join(dict.fromkeys(found))


def reasons(table, results):
    """{(prompt, answer, rate): `why_apart`} of every point of `rows` or `compared`."""
    knees = {key: kept_up(part)[0] for key, part in table.groupby(REGIME)}
    return {key: why_apart(part, [results[index] for index in part.index], knees[key[:2]])
            for key, part in table.groupby([*REGIME, "rate"])}


def saturation(rates, delivered):
    """(capacity, True if it was reached) from offered and delivered rates of one regime."""
    points = pd.Series(list(delivered), index=list(rates)).groupby(level=0).median()
    capacity = float(points.max())
    reached = any(value < 0.9 * rate for rate, value in points.items())
    return capacity, reached


def capacities(part):
    """The largest rate delivered in each repeat of one regime that measured all of its rates."""
    whole = part.groupby("repeat").filter(lambda one: set(one.rate) == set(part.rate))
    return whole.groupby("repeat").delivered_rps.max().tolist()


def apart(first, second):
    """A sentence on whether two sets of repeats differ: their ranges, and what chance would do."""
    shown = " and ".join(f"{np.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
                         for values in (first, second))
    if min(first) <= max(second) and min(second) <= max(first):
        return f"{shown}: within the spread, no evidence of a difference"
    chance = 2 / math.comb(len(first) + len(second), len(first))
    return f"{shown}: apart (by chance alone: {chance:.2g})"


def systems(folder):
    """All tables in the folder: ours, and any results.csv of another machine under another name."""
    needed = {"system", "input_len", "output_len", "rate", "repeat", "delivered_rps",
              "goodput_rps", "ttft_p50_ms", "ttft_p90_ms", "tpot_p50_ms", "tpot_p90_ms",
              "hours_per_million_output"}
    tables = []
    for path in sorted(Path(folder).glob("*.csv")):
        try:
            found = pd.read_csv(path)
        except ValueError:  # pandas' errors for a broken, empty or binary file are of this kind
            found = pd.DataFrame()
        if (needed | {"dollars_per_hour"}) - set(found.columns) \
                or found[sorted(needed)].isna().any(axis=None):
            print(f"{path} is left out: it is broken, or no results.csv of this notebook.")
            continue
        tables.append(found)
    return pd.concat(tables, ignore_index=True)


# -- Cost ------------------------------------------------------------------------------------------

def training_cost():
    """(hours, dollars) of 03's run as its own files say: load, compile, steps. None without them.

    Dollars are hours times the published price of its chips, nan where there is none (a CPU).
    """
    log, machine = run_dir("train", "log.jsonl"), run_dir("train", "machine.json")
    if not (log.exists() and machine.exists()):
        return None
    made, text = read_json(machine), log.read_text(encoding="utf-8")
    steps = [json.loads(line).get("seconds", 0.0) for line in text.splitlines()]
    hours = (sum(steps) + made["load_seconds"] + made["compile_seconds"]) / 3600
    name = hardware.chip_of(made["device_kind"])
    price = hardware.chip(name).dollars_per_hour if name else math.nan
    return hours, hours * price * made["devices"]


def totals(train, hourly, hours=(1, 8, 24)):
    """Dollars for training and then serving for some hours: {"1 h": dollars, ...}."""
    return {f"{h} h": train + h * hourly for h in hours}


def break_even(train_a, per_million_a, train_b, per_million_b):
    """Million output tokens at which a and b have cost the same; nan if they never do."""
    slope = per_million_b - per_million_a
    tokens = (train_a - train_b) / slope if slope else math.nan
    return tokens if tokens > 0 else math.nan
