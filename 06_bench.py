# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/06_bench.ipynb)
#
# # 06 · How fast is it, and could it be?
#
# Load the server of notebook 05 with `vllm bench serve` at rising request rates, put the physical
# floor beside every latency, find the rate it can sustain, and turn that into dollars.
#
# | | |
# |---|---|
# | **Needs** | the server of 05, running; no JAX, no accelerator of its own |
# | **Takes** | `serve/server.json` of 05; the model's `config.json` |
# | **Makes** | `bench/*.json` (one per point, raw), `bench/results.csv` (one row per point and repeat), four figures |
# | **Costs** | tiny: two minutes. 31b: at least 96 minutes of load on a v6e-8, 34 USD at 21.52 USD/h (section 5 computes it); with warm-ups and queues about two hours, 43 USD (our estimate) |
#
# The outputs shown are those of the tiny run on two CPU cores: a **rehearsal**. The method is the
# real one and so is the client; the numbers describe two busy CPU cores and nothing else. Terms are
# in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# Three cells that open every notebook: find the repository, install what is missing, and say what
# this machine is.

# %%
# Find the repository. Colab opens a notebook without it, so there we clone it.
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY_URL = os.environ.get("REPOSITORY_URL") or "https://github.com/OWNER/gemma4-on-tpu"
here = Path.cwd()
places = (here, here.parent, here / "gemma4-on-tpu")
root = next((place for place in places if (place / "helpers").is_dir()), None)
if root is None and "COLAB_RELEASE_TAG" not in os.environ:
    raise SystemExit(f"Run this inside the repository: git clone {REPOSITORY_URL}")
if root is None:
    subprocess.run(["git", "clone", "-q", "--depth=1", REPOSITORY_URL, "gemma4-on-tpu"], check=True)
    root = here / "gemma4-on-tpu"
os.chdir(root)
sys.path.insert(0, str(root))

# %%
# Install what is missing, on Colab or in the repository's own .venv; other Pythons stay untouched.
import helpers

helpers.install()

# %%
# What this machine is. Every result below was made with these versions.
helpers.machine()

# %% [markdown]
# ## 1. Settings
# A **regime** is a prompt length and an answer length; a **point** is a regime at one request
# rate, measured `repeats` times. The rate is *offered*: requests are sent at random times (a
# Poisson process: each moment is as likely as any other) whether or not the server keeps up, as
# strangers would send them. `inf` sends all at once. Two latencies count: the **time to first
# token** (TTFT), during which the prompt is read, and the **time per output token** after it
# (TPOT). The service-level objective (**SLO**) is what we would promise a user about the two, and
# **goodput** counts the requests that keep it. Prices are inputs, and yours will differ.

# %%
import json
import math
import statistics
import zlib
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from helpers import physics, server, style
from helpers.machine import published

INF = math.inf


@dataclass(frozen=True)
class Settings:
    # ── Load ──
    regimes: tuple = ((512, 256), (1024, 512), (2048, 512), (4096, 512), (8192, 512), (15360, 512))
    rates: tuple = (1, 2, 4, 8, 16, 32, 64, INF)  # requests/s, ascending
    repeats: int = 2
    seconds: float = 60.0     # of load per point
    min_requests: int = 60    # per point, however slow
    warmups: int = 4          # requests before each point, not counted
    slo: tuple = (2000, 60)   # time to first token, time per output token; ms
    # ── Machine and prices ──
    system: str = "v6e-8"
    chip: str = "v6e"         # "" measures this CPU
    chips: int = 8
    dollars_per_hour: float = 21.52   # v6e-8, published on-demand rate, May 2026
    train_dollars: float = 56.11      # published cost of the training run, v5p-8


FULL = Settings()
E2B = replace(FULL, regimes=((512, 256), (2048, 256)), rates=(1, 2, 4, 8, 16, INF), slo=(1000, 40),
              system="v6e-1", chips=1, dollars_per_hour=2.69,  # an eighth of the v6e-8
              train_dollars=2.0)                               # assumed: under an hour of it
TINY = replace(FULL, regimes=((256, 64), (768, 64)), rates=(4, 8, 16, INF), seconds=4.0,
               min_requests=30, warmups=1, slo=(500, 30), system="2 CPU cores", chip="", chips=1,
               dollars_per_hour=0.07, train_dollars=0.01)  # assumed: a small cloud machine
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# ## 2. What we are about to measure
# Three questions before any load: does the server live and serve the model we think, do prompt and
# answer fit into its context, and is its **prefix cache** off? With the cache on, a prompt that was
# seen before costs no prefill (reading the prompt), and `vllm bench serve` sends the *same* random
# prompts in each run unless the seed changes. That mistake put published latencies below what
# physics allows. The server itself says what is on: in `/metrics`, a page of counters in the text
# format of the monitoring system Prometheus.

# %%
def check_plan(cfg, record):
    """Raise unless the points make sense and fit into the server's context."""
    if any(rate <= 0 for rate in cfg.rates):
        raise helpers.UserError("a request rate of 0 or less sends nothing: give rates above 0, "
                                "or inf for all at once.")
    if all(rate == INF for rate in cfg.rates):
        raise helpers.UserError("give at least one finite rate: a burst alone has no curve.")
    if list(cfg.rates) != sorted(cfg.rates):
        raise helpers.UserError("give the rates in ascending order.")
    long = [f"{i}/{o}" for i, o in cfg.regimes if i + o + 8 > record["max_model_len"]]
    if long:
        raise helpers.UserError(f"regimes {long} exceed the server's max-model-len of "
                                f"{record['max_model_len']}. Raise it in 05, or drop them.")
    models = [model["id"] for model in json.loads(server.request(record, "/v1/models"))["data"]]
    if record["model"] not in models:
        raise helpers.UserError(f"the server serves {models}, not {record['model']}. "
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
    except helpers.UserError as error:
        if "HTTP" not in str(error):
            raise
        print(f"{error}\nThis server has no /metrics: prefix-cache hits cannot be checked.")
        return ""


# %%
record = server.current()
check_plan(cfg, record)
text = metrics(record)
facts = next((line for line in text.splitlines() if line.startswith("vllm:cache_config_info")), "")
for key in ("enable_prefix_caching", "cache_dtype", "kv_cache_size_tokens"):
    value = facts.partition(f'{key}="')[2].partition('"')[0]
    print(f"{key}: {value or 'unknown'}")
print(f"{record['model']} at {record['base_url']}, context {record['max_model_len']}")

# %% [markdown]
# What this means: the prefix cache must be `False`; `auto` keeps the KV cache in the model's own
# dtype; the last number is how many tokens of all running requests it can hold.
#
# ## 3. The floor: how fast could it be?
# The first token needs the whole prompt to go through every layer, a number of floating-point
# operations that follows from `config.json`: two per weight and token, plus attention, which is
# causal and in the sliding layers sees a window. No machine can do them faster than its peak. Every
# step, the first as well, needs the weights to be read once, and every further one the cache too,
# which takes bytes divided by bandwidth. The larger time of the two is the floor.
# `helpers/physics.py` counts both from the shapes. (E2B: leave vLLM's `kv_sharing_fast_prefill`
# off, as it is by default. It skips layers that this count includes.)
#
# For an accelerator peak and bandwidth come from the data sheet. For a CPU there is none worth the
# name, so we measure: the fastest matrix product and the fastest read of a model-sized array that
# one core manages in many attempts, times the number of cores. The fastest attempt on a single
# core is hardly disturbed by what else runs, and cores together are never faster than their sum,
# so this *calibrated* peak is rather too high than too low. (The tiny model's 7 MB fit into the
# processor's caches: its bandwidth is theirs, not the memory's.)

# %%
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


def roof(cfg, weight_bytes):
    """Peak FLOP/s and bytes/s of the serving machine: from the data sheet, or measured here."""
    if cfg.chip:
        chip = helpers.chip(cfg.chip)
        return chip.flops * cfg.chips, chip.bandwidth * cfg.chips
    probe = PROBE.replace("BYTES", str(int(weight_bytes)))
    done = subprocess.run([server.PYTHON, "-c", probe], capture_output=True, text=True)
    if done.returncode:
        raise helpers.UserError(f"calibrating failed: {done.stderr.strip().splitlines()[-1]}")
    return tuple(float(number) for number in done.stdout.split())


# %%
config = helpers.read_json(Path(record["model_path"]) / "config.json")
weights = physics.decode_bytes(config, 0, 0)  # all that a step must read, without any KV cache
peak, bandwidth = roof(cfg, weights)
print(f"{cfg.system}: {peak / 1e12:.3g} TFLOP/s, {bandwidth / 1e9:.3g} GB/s, weights to read "
      f"{weights / 1e9:.3g} GB -> at least {1e3 * weights / bandwidth:.3g} ms per step")
floors = []
for input_len, output_len in cfg.regimes:
    flops = physics.prefill_flops(config, input_len)
    floors.append((f"{input_len}/{output_len}", flops,
                   1e3 * physics.ttft_floor(flops, peak, weights, bandwidth),
                   1e3 * physics.decode_bytes(config, 1, input_len) / bandwidth))
display(pd.DataFrame(floors, columns=["regime", "prefill FLOP", "TTFT floor, ms",
                                      "TPOT floor, ms"]).set_index("regime")
        .style.format({"prefill FLOP": "{:.3g}", "TTFT floor, ms": "{:.3g}",
                       "TPOT floor, ms": "{:.3g}"}))

# %% [markdown]
# What this means: a TTFT or TPOT below these is not a fast server, it is a measurement of
# something else.
#
# One request alone is the easy case. If 30 prompts arrive at once, the last one waits for all; so
# there is a second, higher floor: the median TTFT when the prompts are computed one after the
# other in the order they came, each at full peak. vLLM serves first come, first served, and
# computing several at once does not make the sum of the work smaller.

# %%
def ttft_floors(config, input_len, starts, peak, bandwidth):
    """Least possible TTFT in seconds: (one request alone, median of arrivals at `starts`)."""
    work = physics.prefill_flops(config, input_len) / peak
    alone = physics.ttft_floor(work * peak, peak, physics.decode_bytes(config, 0, 0), bandwidth)
    queued = statistics.median(physics.fcfs_ttft(sorted(starts), work))
    return alone, max(alone, queued)


for rate in cfg.rates:
    evenly = [0.0 if rate == INF else i / rate for i in range(30)]
    alone, queued = ttft_floors(config, cfg.regimes[-1][0], evenly, peak, bandwidth)
    print(f"30 prompts of {cfg.regimes[-1][0]:,} tokens at {rate}/s: one alone "
          f"{1e3 * alone:.3g} ms, median of 30 {1e3 * queued:.3g} ms")

# %% [markdown]
# What this means: as long as one prompt is done before the next one comes, nobody waits. At `inf`
# the median of 30 waits for about half of them: 15.5 times one prompt.
#
# ## 4. One point
# The client is vLLM's own. Each argument has a reason: `random` prompts of exactly the length we
# say; `--ignore-eos`, so that answers have exactly the length we say; temperature 0; a **fresh
# seed per point and repeat**, so that no point meets the prompts of another; percentiles 50, 90 and
# 99 (p99: 99 of 100 requests were at least as fast); warm-up requests that are not counted (they
# repeat the point's own first prompt); every single request's times (`--save-detailed`), because
# floors and distributions need them.

# %%
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
    """One finished point; raises if the file was cut short or nothing completed."""
    try:
        result = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise helpers.UserError(f"{path} was cut short. Delete it and run this again.") from error
    if not result.get("completed"):
        first = next((error for error in result.get("errors", []) if error), "no error text")
        raise helpers.UserError(f"{path}: none of {result.get('num_prompts')} requests completed: "
                                f"{first.strip().splitlines()[-1][:200]}")
    return result


# %% [markdown]
# Around the client we add what it does not know: how many prompt tokens came from the server's
# prefix cache during the point, how many requests the scheduler had to preempt for lack of cache
# space, and on which server it was measured. The result takes its final name only when it is
# complete, so a point that has its file is never measured twice, and half a file is never taken
# for a point.

# %%
COUNTERS = {"cached_tokens": "vllm:prefix_cache_hits_total",
            "preemptions": "vllm:num_preemptions_total"}


def requests_for(cfg, rate, limit):
    """How many requests a point sends; `limit` is what the server was seen to sustain, or inf."""
    fastest = max(rate for rate in cfg.rates if rate < INF)  # a burst: at least as many as there
    known = min(rate, limit) if min(rate, limit) < INF else fastest
    return max(cfg.min_requests, math.ceil(cfg.seconds * known))


def point_name(regime, rate, repeat):
    """Name and seed of one measurement."""
    name = f"{regime[0]}-{regime[1]}_{rate}_{repeat}"
    return f"{name}.json", zlib.crc32(name.encode())


def measure(client, record, cfg, regime, rate, requests, repeat, folder):
    """Run one point and write its JSON; the server must be alive before and after."""
    name, seed = point_name(regime, rate, repeat)
    before = metrics(record)
    client.run(bench_arguments(client, record, cfg, regime, rate, requests, seed, name))
    server.current()
    result = load_result(folder / "partial" / name)
    after = metrics(record)
    result["series"] = {
        "server": record["wanted"], "input_len": regime[0], "output_len": regime[1],
        "repeat": repeat, "seed": seed, "requests": requests,
        **{key: metric(after, long) - metric(before, long) for key, long in COUNTERS.items()}}
    helpers.write_text(folder / name, json.dumps(result))
    (folder / "partial" / name).unlink()
    return result


def finished(record, regime, rate, repeat, folder):
    """The result of an earlier run if it is whole and of this very server command, else None."""
    path = folder / point_name(regime, rate, repeat)[0]
    if not path.exists():
        return None
    try:
        result = load_result(path)
    except helpers.UserError as error:
        print(f"{error} Measuring it again.")
        return None
    same = result.get("series", {}).get("server") == record["wanted"]
    return result if same else None


# %%
folder = helpers.run_dir("bench")
(folder / "partial").mkdir(parents=True, exist_ok=True)
first = (cfg.regimes[0], cfg.rates[0], requests_for(cfg, cfg.rates[0], INF))
with server.Client(record, folder, folder / "client.log") as client:
    shown = bench_arguments(client, record, cfg, *first, *point_name(*first[:2], 0)[::-1])
    print("vllm", " ".join(shown).replace(" --", " \\\n    --"))
    one = finished(record, *first[:2], 0, folder) or measure(client, record, cfg, *first, 0, folder)
print(f"\n{one['completed']} of {one['num_prompts']} requests in {one['duration']:.1f} s, "
      f"{one['failed']} failed; "
      f"TTFT p50 {one['p50_ttft_ms']:.0f} ms, p99 {one['p99_ttft_ms']:.0f} ms; "
      f"TPOT p50 {one['p50_tpot_ms']:.1f} ms; prompt tokens from a cache: "
      f"{one['series']['cached_tokens']:.0f}")

# %% [markdown]
# ## 5. The sweep
# How many requests does a point need? With too few, the run is over before a queue can form, and
# the **drain** at the end, when nothing new arrives, weighs heavily. We take `seconds` of load:
# that many seconds times the rate. Above saturation the server is busy for that long with fewer
# requests, so once a rate has not been kept up with, higher rates get as many as the server could
# do in that time. At 31b that is at least a minute of load everywhere, where the published points
# were 30 requests each.

# %%
def lone_latency(results):
    """The shortest end-to-end latency of a completed request, in seconds."""
    return min(latency for result in results
               for latency, error in zip(result["latencies"], result["errors"], strict=True)
               if not error)


def delivered_rate(result, lone):
    """Completed requests per second, corrected for the drain at the end.

    A server that keeps up idles away the end of a run: its last request still takes `lone` seconds,
    a request's latency on an idle server, while nothing arrives any more. Those seconds are no time
    of load. A server with a queue is busy to the end, and the more so the less of the run saw
    arrivals: `lone` counts by that share, and for a burst not at all.
    """
    rest = max(result["duration"] - lone, 1e-9)
    sending = max(result["start_times"]) - min(result["start_times"])
    return result["completed"] / (result["duration"] - lone * min(1.0, sending / rest))


# %% [markdown]
# The sweep goes through all points once per repeat, so that slow changes of the machine (a
# neighbour, heat) show up as spread instead of favouring one rate. Interrupt it and run the cell
# again: finished points are read from their files. If the server dies, one line says after how
# many points and why. The progress line gives points per second.

# %%
def sweep(client, record, cfg, folder):
    """Measure what has no file yet; return all results. A dead server ends it with a clear line."""
    points = [(repeat, regime, rate) for repeat in range(cfg.repeats) for regime in cfg.regimes
              for rate in cfg.rates]
    progress = helpers.Progress(len(points), "points", every=10.0)
    results, limits, planned, lone = [], {}, {}, {}
    for done, (repeat, regime, rate) in enumerate(points):
        limit = limits.get(regime, INF)
        requests = planned.setdefault((regime, rate), requests_for(cfg, rate, limit))
        result = finished(record, regime, rate, repeat, folder)
        try:
            result = result or measure(client, record, cfg, regime, rate, requests, repeat, folder)
        except helpers.UserError as error:
            raise helpers.UserError(f"stopped after {done} of {len(points)} points, which are kept "
                                    f"in {folder}: {error}") from error
        lone[regime] = min(lone.get(regime, INF), lone_latency([result]))
        delivered = delivered_rate(result, lone[regime])
        if delivered < 0.9 * rate < INF:
            limits[regime] = min(limit, delivered)
        progress.update(note=f"{regime[0]}/{regime[1]} at {rate}/s: {delivered:.2f} requests/s")
        results.append(result)
    return results


at_least = cfg.repeats * len(cfg.regimes) * len(cfg.rates) * cfg.seconds
print(f"{cfg.repeats} x {len(cfg.regimes)} regimes x {len(cfg.rates)} rates x {cfg.seconds:.0f} s: "
      f"at least {at_least / 60:.0f} min of load, {at_least / 3600 * cfg.dollars_per_hour:.2f} USD")

# %%
with server.Client(record, folder, folder / "client.log") as client:
    results = sweep(client, record, cfg, folder)
print(f"{len(results)} measurements, {sum(r['duration'] for r in results):.0f} s of load, "
      f"{sum(r['completed'] for r in results):,} requests completed, "
      f"{sum(r['failed'] for r in results)} failed")

# %% [markdown]
# ## 6. The table, with its floors
# One row per point and repeat. Failed requests stay in it: `completed` and `failed` are columns,
# and a latency is a latency of completed requests only. `delivered` is the rate the server
# sustained, corrected for the drain (`drain_s` says how long that was), and `goodput` is
# `delivered` times the share of requests that kept the SLO. Each median stands beside its floor,
# and `flag` says so where it lies below it. The table shows sums of `sent` and `failed` over the
# repeats and means of the rest; `in flight` is how many requests were at the server on average.

# %%
def latencies(result):
    """The percentiles of one point, in milliseconds."""
    return {f"{kind}_p{p}_ms": result[f"p{p}_{kind}_ms"]
            for kind in ("ttft", "tpot", "itl", "e2el") for p in (50, 90, 99)}


def floors_of(result, config, peak, bandwidth):
    """The floors of one point, in milliseconds, and what is impossible about it, if anything."""
    series = result["series"]
    alone, queued = ttft_floors(config, series["input_len"], result["start_times"], peak, bandwidth)
    step = physics.tpot_floor(
        physics.decode_bytes(config, 1, series["input_len"]), bandwidth,
        physics.decode_flops(config, 1, series["input_len"]), peak)
    flags = [physics.flag(result["p50_ttft_ms"] / 1e3, alone, "TTFT, one request alone,"),
             physics.flag(result["p50_ttft_ms"] / 1e3, queued, "TTFT, first come first served,"),
             physics.flag(result["p50_tpot_ms"] / 1e3, step, "TPOT"),
             f"{series['cached_tokens']:.0f} prompt tokens came from the prefix cache"
             if series["cached_tokens"] > 0 else ""]
    return {"ttft_floor_ms": 1e3 * alone, "ttft_queue_floor_ms": 1e3 * queued,
            "tpot_floor_ms": 1e3 * step, "flag": next((flag for flag in flags if flag), "")}


def row(result, lone, config, peak, bandwidth, cfg):
    """One row of results.csv."""
    series, delivered = result["series"], delivered_rate(result, lone)
    ends = [a + b for a, b in zip(result["start_times"], result["latencies"], strict=True)]
    tokens = delivered * result["total_output_tokens"] / result["completed"]
    good = result["request_goodput"] * result["duration"] / result["completed"]  # share in the SLO
    return {
        "system": cfg.system, "input_len": series["input_len"], "output_len": series["output_len"],
        "rate": float(result["request_rate"]), "repeat": series["repeat"],
        "requests": result["num_prompts"], "completed": result["completed"],
        "failed": result["failed"], "duration_s": result["duration"],
        "drain_s": max(ends) - max(result["start_times"]),
        "raw_rps": result["request_throughput"], "delivered_rps": delivered,
        "goodput_rps": good * delivered, "output_tok_s": tokens,
        "mean_in_flight": sum(result["latencies"]) / result["duration"],
        **latencies(result), "cached_tokens": series["cached_tokens"],
        "cache_hit_rate": series["cached_tokens"] / result["total_input_tokens"],
        "preemptions": series["preemptions"], **floors_of(result, config, peak, bandwidth),
        "dollars_per_hour": cfg.dollars_per_hour,
        "usd_per_million_output": cfg.dollars_per_hour / 3600 / tokens * 1e6,
        "usd_per_thousand_requests": cfg.dollars_per_hour / 3600 / delivered * 1e3,
    }


# %%
lone = {regime: lone_latency([r for r in results if r["series"]["input_len"] == regime[0]])
        for regime in cfg.regimes}
table = pd.DataFrame([
    row(r, lone[r["series"]["input_len"], r["series"]["output_len"]], config, peak, bandwidth, cfg)
    for r in results])
helpers.write_text(folder / "results.csv", table.to_csv(index=False))
keys = ["input_len", "rate"]
means = table.groupby(keys).mean(numeric_only=True)
load = pd.DataFrame({
    "sent": table.groupby(keys)["requests"].sum(), "failed": table.groupby(keys)["failed"].sum(),
    "in flight": means.mean_in_flight, "drain, s": means.drain_s, "uncorrected /s": means.raw_rps,
    "delivered /s": means.delivered_rps, "goodput /s": means.goodput_rps,
    "cache hits": means.cache_hit_rate, "preempted": means.preemptions})


def short(number):
    """Three digits, without exponents."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def labelled(frame):
    """The frame with `prompt at rate` as its index."""
    return frame.set_axis([f"{prompt} at {rate:g}/s" for prompt, rate in frame.index])


display(labelled(load).style.format(short))

# %% [markdown]
# Latencies in milliseconds. **ITL**, inter-token latency, is the gap between two pieces of the
# stream, whose tail shows the hiccups that an average over an answer (TPOT) hides; **E2EL**, end to
# end, is the whole request.

# %%
view = pd.DataFrame({f"{kind.upper()} {p}": means[f"{kind}_{p}_ms"]
                     for kind in ("ttft", "tpot", "itl", "e2el") for p in ("p50", "p90", "p99")})
view.insert(3, "TTFT p50 / floor", means.ttft_p50_ms / means.ttft_queue_floor_ms)
view.insert(7, "TPOT p50 / floor", means.tpot_p50_ms / means.tpot_floor_ms)
display(labelled(view).style.format(short))
print("flags:", *(sorted(set(table.flag) - {""}) or ["none: every median lies above its floors"]),
      sep="\n  ")

# %% [markdown]
# What this means (milliseconds, means of the repeats): read down one prompt length. While the
# server keeps up, `delivered` is near the rate and TTFT grows little. Beyond that, `delivered`
# stays and TTFT grows, and **how far it grows depends on how long we loaded it**, not on the
# server: the queue never stops growing. A TTFT above saturation compares two test lengths.
#
# The `/ floor` columns say how far from the physical limit we are. The published 31B runs, where
# they were cold and busy, stood at 2.5 to 4 times their floors (25 to 40 % of peak:
# [10_published](10_published.ipynb), section 6). The tiny model is far above, because its
# arithmetic is nothing beside the Python around it (and vLLM computes on one of two cores, keeping
# the other for its scheduler: `reserved_cpus` in its log); here the factor teaches only that it is
# above 1.
#
# How far apart are the repeats? The largest value over the smallest, minus 1:

# %%
spread = table.groupby(keys)[["delivered_rps", "ttft_p50_ms", "tpot_p50_ms"]].agg(
    lambda values: values.max() / values.min() - 1)
spread.columns = ["delivered", "TTFT p50", "TPOT p50"]
display(labelled(spread).style.format("{:.0%}"))

# %% [markdown]
# A difference between two systems or two settings that is smaller than this is no difference. More
# than about 20 % says that something else ran on the machine, as it may on two shared cores:
# measure again on an idle one before you compare. The published tables have one run per point, and
# so no such column.
#
# ## 7. The knee: what rate can it sustain?
# **Saturation**, as a definition that needs no eye: the capacity is the largest rate the server
# delivered at any point of the regime. It is saturated if less than 90 % of some offered rate was
# delivered (all at once, `inf`, always is such a rate); the saturation rate is then the capacity,
# that is, where the diagonal "delivered = offered" meets the plateau. If every rate was kept up
# with, we only know that it is higher.

# %%
def saturation(rates, delivered):
    """(capacity, True if it was reached) from offered and delivered rates of one regime."""
    points = pd.Series(list(delivered), index=list(rates)).groupby(level=0).mean()
    capacity = float(points.max())
    reached = any(value < 0.9 * rate for rate, value in points.items())
    return capacity, reached


def systems(folder):
    """All tables in the folder: ours, and any results.csv of another machine under another name."""
    needed = {"system", "input_len", "output_len", "rate", "delivered_rps", "goodput_rps",
              "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
              "usd_per_million_output", "dollars_per_hour"}
    tables = []
    for path in sorted(folder.glob("*.csv")):
        found = pd.read_csv(path)
        if missing := needed - set(found.columns):
            raise helpers.UserError(f"{path} lacks the columns {sorted(missing)}: it must be a "
                                    "results.csv that this notebook wrote on another machine.")
        tables.append(found)
    return pd.concat(tables, ignore_index=True)


# %%
everything = systems(folder)
curves = dict(list(everything.groupby(["system", "input_len", "output_len"])))
for (system, input_len, output_len), part in curves.items():
    capacity, reached = saturation(part.rate, part.delivered_rps)
    good = part.groupby("rate").goodput_rps.mean()
    print(f"{system}, {input_len}/{output_len}: "
          + (f"saturates at {capacity:.3g} requests/s" if reached else f"above {capacity:.3g}/s")
          + f" = {capacity * output_len:,.0f} output tokens/s; most goodput {good.max():.3g}/s, "
          f"at an offered {good.idxmax():g}/s")

# %% [markdown]
# Every CSV in `bench/` is a system in the figures up to the cost: put the `results.csv` of a TPU or
# GPU there under another name, and it is drawn beside ours. Colour *and* marker tell the curves
# apart, so a print in grey is readable.

# %%
LOOKS = list(zip(style.CYCLE, "osD^vP", strict=True)) * 4


def rate_axis(ax, rates):
    """A logarithmic axis of offered rates; inf stands beyond the largest. Returns its places."""
    finite = sorted({rate for rate in rates if rate < INF})
    place = {**{rate: rate for rate in finite}, INF: 2 * finite[-1]}
    ax.set_xscale("log", base=2)
    shown = sorted(set(rates))
    ax.set_xticks([place[rate] for rate in shown],
                  [f"{rate:g}" if rate < INF else "all\nat once" for rate in shown])
    ax.minorticks_off()
    ax.set_xlabel("offered rate, requests/s")
    return place


def plain_log(ax):
    """A logarithmic vertical axis with a few ticks and plain numbers; call it last."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    subs = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
    ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def title_of(key, curves):
    """`prompt/answer` of a curve, with its system where there are several."""
    several = len({system for system, *_ in curves}) > 1
    return f"{key[1]}/{key[2]}" + (f", {key[0]}" if several else "")


def series_of(part, column, place):
    """x, mean, smallest and largest of a column over the repeats of each rate."""
    stats = part.groupby("rate")[column].agg(["mean", "min", "max"])
    return [place[rate] for rate in stats.index], stats["mean"], stats["min"], stats["max"]


# %%
fig, ax = style.figure(8.0, 4.4)
place, ends = rate_axis(ax, everything.rate), []
measured = ", ".join(dict.fromkeys(everything.system))
finite = sorted(rate for rate in set(everything.rate) if rate < INF)
stars = {key: saturation(part.rate, part.delivered_rps) for key, part in curves.items()}
line = [finite[0], max(finite[-1], *(capacity for capacity, _ in stars.values()))]
ax.plot(line, line, "--", color=style.GREY, lw=1)
style.label_line(ax, line[-1], line[-1], "delivered = offered", style.GREY, ha="right",
                 xytext=(-12, 4))
for (key, part), (color, marker) in zip(curves.items(), LOOKS):
    x, mean, low, high = series_of(part, "delivered_rps", place)
    ax.errorbar(x, mean, [mean - low, high - mean], marker=marker, color=color, capsize=3)
    capacity, reached = stars[key]
    if reached:
        ax.plot(capacity, capacity, "*", ms=16, color=color, mec=style.BLACK, zorder=5)
    ends.append((x[-1], mean.iloc[-1], title_of(key, curves), color))
ax.set(ylabel="delivered, requests/s", title="Where the server stops keeping up (stars)")
plain_log(ax)
ax.margins(x=0.16)
style.label_ends(ax, ends)
style.finish(fig, "06_throughput", f"measured, {measured}; bars: smallest and largest repeat")

# %% [markdown]
# The star is the saturation rate. Well to its left the curve lies on the diagonal, and the server's
# speed cannot be seen at all: every server that keeps up delivers what is offered. Latency shows
# it:

# %%
def latency_panel(ax, curves, kind, floor, place):
    """Median over the rates, a band up to the 99th percentile, and the floor as a dashed line."""
    low, ends = INF, []
    for (key, part), (color, marker) in zip(curves.items(), LOOKS):
        x, median, _, _ = series_of(part, f"{kind}_p50_ms", place)
        _, worst, _, _ = series_of(part, f"{kind}_p99_ms", place)
        ax.fill_between(x, median, worst, color=color, alpha=0.15, lw=0)
        ax.plot(x, median, marker=marker, color=color)
        if floor in part:
            least = series_of(part, floor, place)[1]
            ax.plot(x, least, "--", color=color, lw=1.2)
            low = min(low, least.iloc[0])
        ends.append((x[-1], median.iloc[-1], title_of(key, curves), color))
    if low < INF:
        style.label_line(ax, x[0], low, "floors, dashed", style.BLACK, xytext=(0, -9))
    plain_log(ax)
    ax.margins(x=0.16, y=0.1)
    style.label_ends(ax, ends)


fig, axes = style.figure(9.5, 4.2, columns=2)
for ax, kind, floor, title in (
        (axes[0], "ttft", "ttft_queue_floor_ms", "Time to first token"),
        (axes[1], "tpot", "tpot_floor_ms", "Time per output token")):
    latency_panel(ax, curves, kind, floor, rate_axis(ax, everything.rate))
    ax.set(title=title, ylabel="milliseconds (log scale)")
style.finish(fig, "06_latency",
             f"measured, {measured}; line: median, band: up to p99 (means of the repeats)")

# %% [markdown]
# What this means: the dashed TTFT floor rises where the prompts alone, computed at full peak,
# would fill the machine. A measured line may never fall below its dashed one.
# [10_published](10_published.ipynb) draws the same floors under the published sweep, and there
# several points lie below.
#
# ## 8. One point, request by request
# Percentiles hide what happened. The raw file has every request, so we draw one point of the
# heaviest regime, at the largest finite rate: when each request was sent, waited for its first
# token, and received its answer.

# %%
def heaviest(results, rate):
    """The first repeat of the last regime at `rate`."""
    return next(result for result in reversed(results)
                if float(result["request_rate"]) == rate and result["series"]["repeat"] == 0)


one = heaviest(results, max(rate for rate in cfg.rates if rate < INF))
sent = np.array(one["start_times"]) - min(one["start_times"])
first, total = np.array(one["ttfts"]), np.array(one["latencies"])
fig, (left, right) = style.figure(9.5, 4.0, columns=2, width_ratios=[1.3, 1])
rows = np.arange(len(sent))
left.barh(rows, first, left=sent, color=style.ORANGE, height=0.8)
left.barh(rows, total - first, left=sent + first, color=style.SKY, height=0.8)
left.axvline(sent.max(), color=style.BLACK, lw=1, ls=":")
left.set_ylim(1.08 * len(rows), -1)
left.text(sent.max(), 1.045 * len(rows), " last one sent", fontsize=9, va="center")
left.grid(axis="y", visible=False)
left.set(xlabel="seconds", ylabel="request", title="Waiting (orange), answering (blue)")
for values, label, color, line in ((first, "first token", style.ORANGE, "-"),
                                   (total, "whole answer", style.BLUE, "--")):
    right.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), line, color=color)
    style.label_line(right, np.median(values), 0.5, label, color)
right.set(xlabel="seconds since it was sent", ylabel="share of requests", ylim=(0, 1.02),
          xlim=(0, total.max() * 1.25), title="Distribution of the latencies")
label = f"{one['series']['input_len']}/{one['series']['output_len']} at {one['request_rate']:g}/s"
style.finish(fig, "06_requests", f"measured, {cfg.system}, {label}, one repeat")

# %% [markdown]
# What this means: vLLM fits prompts and answers into the same steps, so while prompts are still
# being computed the answers that have begun crawl, and then end almost together. Everything to the
# right of the dotted line is **drain**, in which no request arrives. A rate computed as requests
# over total duration (`uncorrected /s` in section 6) counts it as time of load, the more so the
# shorter the run. With 30 requests per point, as published, it is most of the run from 8
# requests/s on: sending takes 3.75 s, making 30 x 512 tokens at the published 1,404/s takes 11 s.
#
# ## 9. What a token costs
# A machine costs the same whether it works or not, so a token is cheapest at saturation, where
# users wait longest. `usd_per_million_output` is the price of the hour divided by the output
# tokens of an hour at that rate. It charges nothing for the prompt; per request is fairer between
# regimes.

# %%
fig, ax = style.figure(8.0, 3.8)
place, ends = rate_axis(ax, everything.rate), []
for (key, part), (color, marker) in zip(curves.items(), LOOKS):
    x, mean, low, high = series_of(part, "usd_per_million_output", place)
    ax.errorbar(x, mean, [mean - low, high - mean], marker=marker, color=color, capsize=3)
    ends.append((x[-1], mean.iloc[-1], title_of(key, curves), color))
prices = everything.drop_duplicates("system")
prices = [f"{row.system} at {row.dollars_per_hour:g} USD/h" for row in prices.itertuples()]
ax.set(ylabel="USD per million output tokens", title="What a token costs")
plain_log(ax)
ax.margins(x=0.16)
style.label_ends(ax, ends)
style.finish(fig, "06_cost", f"measured, {', '.join(prices)}; the price is an input")
cost = means[["output_tok_s", "usd_per_million_output", "usd_per_thousand_requests"]]
display(labelled(cost).style.format(short))

# %% [markdown]
# ## 10. Training and serving together
# The published comparison adds the cost of training to that of serving for some hours. We do the
# same with prices as inputs: the published ones here (TPU: v5p-8 and v6e-8; GPU: two H100), then
# yours. **Break-even** asks after how many output tokens a dearer training is paid back by cheaper
# tokens.

# %%
def totals(train, hourly, hours=(1, 8, 24)):
    """Dollars for training and then serving for some hours."""
    return {f"{h} h": train + h * hourly for h in hours}


def break_even(train_a, per_million_a, train_b, per_million_b):
    """Million output tokens at which a and b have cost the same; nan if they never do."""
    slope = per_million_b - per_million_a
    tokens = (train_a - train_b) / slope if slope else math.nan
    return tokens if tokens > 0 else math.nan


training = {kind: published("training_cost", "metric", kind)["total_cost"]
            for kind in ("tpu", "gpu")}
hourly = {kind: published("hardware_inference", "spec", kind)["hourly_rate_on_demand"]
          for kind in ("tpu", "gpu")}
rows = {f"{kind}, published": totals(training[kind], hourly[kind]) for kind in ("tpu", "gpu")}
rows["gpu / tpu"] = {h: rows["gpu, published"][h] / v for h, v in rows["tpu, published"].items()}
rows[f"{cfg.system}, these settings"] = totals(cfg.train_dollars, cfg.dollars_per_hour)
display(pd.DataFrame(rows).T.style.format("{:,.2f}"))

# %%
for workload in ("short (<=2048)", "long (4096)"):
    per_million = {kind: published("inference_cost", "workload", f"{kind}_usd_per_1M")[workload]
                   for kind in ("tpu", "gpu")}
    tokens = break_even(training["tpu"], per_million["tpu"], training["gpu"], per_million["gpu"])
    print(f"{workload}: TPU {per_million['tpu']} USD per million, GPU {per_million['gpu']}: "
          + ("the TPU is cheaper from the first token" if math.isnan(tokens)
             else f"level after {tokens:,.0f} million tokens"))
best = means.usd_per_million_output.min()
print(f"{cfg.system}: training is {cfg.train_dollars / best:.3g} million output tokens' worth of "
      f"serving at its cheapest point ({best:.3g} USD per million)")

# %% [markdown]
# What this means: from published prices alone, training plus a day of serving costs 1.14 times as
# much on the GPUs, not the 1.82 times the paper's text says; 1.82 belongs to one hour. In the short
# workload the GPU's tokens are a little cheaper, so its dearer training is paid back after 451
# million tokens. The long workload's token prices rest on the warm cache;
# [10_published](10_published.ipynb) takes them apart.
#
# ## Recap
# - A point is trusted because of how it was made: cold cache, fresh seed, enough load, warm-up
#   excluded, repeats, failures kept.
# - A floor stands beside each TTFT (alone and in the queue) and each TPOT, and a median below its
#   floor is flagged as impossible.
# - Saturation is computed: the plateau where it meets the diagonal. TTFT beyond it measures the
#   length of the test.
# - A token is cheapest where users wait longest; goodput says which rate you can promise.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `no server is recorded`, `has died` | 05 did not run, or the server was killed | run 05; finished points stay, then run this again |
# | `stopped after 7 of 16 points` | the server died under load; its reason is in the line | lower the load or the memory share; run again to continue |
# | `exceed the server's max-model-len` | prompt + answer is longer than 05 allowed | raise `max_model_len` in 05, or drop the regime |
# | `none of 30 requests completed` | every request was refused; the server's words follow | usually a wrong model name or a prompt that is too long |
# | `was cut short` | a disk was full, or a file was copied half | delete the file and run this again |
# | a flag `impossible: TTFT ...` | a warm prefix cache, shorter prompts than the label, or a wrong peak | the causes are in `physics.LIKELY_CAUSES`; check `cache_hit_rate` first |
# | repeats differ by more than 20 % | something else ran on this machine | measure again on an idle one; do not average it away |
#
# ### Exercises
# 1. How many prefill FLOP/s did the server do at its capacity, as a share of the peak?
#
# <details><summary>Solution</summary>
#
# ```python
# for inputs, outputs in cfg.regimes:
#     part = table[table.input_len == inputs]
#     capacity, _ = saturation(part.rate, part.delivered_rps)
#     print(inputs, f"{capacity * physics.prefill_flops(config, inputs) / peak:.1%}")
# ```
# </details>
#
# 2. Show that a warm prefix cache gets flagged: start a second server without
#    `--no-enable-prefix-caching`, run one point twice with the same seed, and look at
#    `cached_tokens` and the flag.
#
# <details><summary>Solution</summary>
#
# On a CPU, where a second server has room:
#
# ```python
# import time
#
# command = [part for part in record["command"] if part != "--no-enable-prefix-caching"]
# command[command.index("--port") + 1] = "8099"
# other, warm = {**record, "base_url": "http://127.0.0.1:8099"}, helpers.run_dir("bench_warm")
# (warm / "partial").mkdir(parents=True, exist_ok=True)
# process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
# while not server.healthy(other):
#     time.sleep(1)
# with server.Client(other, warm, warm / "client.log") as client:
#     for attempt in (1, 2):  # the same name, and so the same seed
#         result = measure(client, other, cfg, cfg.regimes[1], cfg.rates[0], 30, 0, warm)
#         print(attempt, f"{result['p50_ttft_ms']:.0f} ms", result["series"]["cached_tokens"],
#               row(result, 0.0, config, peak, bandwidth, cfg)["flag"] or "no flag")
# process.terminate()
# ```
#
# The first run already finds its own warm-up in the cache and is flagged for it. In the second
# nearly all prompt tokens come from there (it holds whole blocks only), and the TTFT falls.
# </details>
#
# Next: [07 · pass@k that can be believed](07_eval.ipynb)
