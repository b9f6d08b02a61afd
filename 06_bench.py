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
# | **Needs** | the server of 05; one that has ended is brought up as 05 left it. No JAX, no accelerator of its own |
# | **Takes** | `serve/server.json` and `serve/options.json` of 05; the model's `config.json` |
# | **Makes** | `bench/*.json` (one per point, raw), `bench/results.csv` (one row per point and repeat), four figures |
# | **Costs** | tiny: under three minutes. 31b: at least 144 minutes of load on a v6e-8, 52 USD at 21.52 USD/h (section 5 computes it); with warm-ups and queues about three hours, 65 USD (our estimate) |
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
if os.environ.get("RUN_DIR"):  # relative to where you stand, not to the repository
    os.environ["RUN_DIR"] = os.path.abspath(os.environ["RUN_DIR"])
here = Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()
places = (here, here.parent, Path.cwd(), here / "gemma4-on-tpu")
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
# **goodput** counts the requests that keep it. Prices are inputs, and yours will differ. Which
# chips, how many and with which options is not said here: the server's own `serve/options.json`
# knows.

# %%
import json
import math
import statistics
import time
import zlib
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from scipy.stats import bootstrap

from helpers import hardware, physics, server, style
from helpers.machine import published

INF = math.inf


@dataclass(frozen=True)
class Settings:
    # ── Load ──
    regimes: tuple = ((512, 256), (1024, 512), (2048, 512), (4096, 512), (8192, 512), (15360, 512))
    rates: tuple = (1, 2, 4, 8, 16, 32, 64, INF)  # requests/s, ascending
    repeats: int = 3          # section 7 needs three to say how sure it is
    seconds: float = 60.0     # of load per point
    min_requests: int = 60    # per point, however slow
    warmups: int = 4          # requests before each point, not counted
    slo: tuple = (2000, 60)   # time to first token, time per output token; ms
    # ── Prices ──
    dollars_per_hour: float = 0.0     # of all chips; 0: the published price of the server's chips
    train_dollars: float = 56.11      # published cost of the training run, v5p-8


FULL = Settings()
E2B = replace(FULL, regimes=((512, 256), (2048, 256)), rates=(1, 2, 4, 8, 16, INF), slo=(1000, 40),
              train_dollars=2.0)      # assumed: under an hour of one chip
TINY = replace(FULL, regimes=((256, 64), (768, 64)), rates=(4, 12, 24, INF), seconds=2.5,
               min_requests=20, warmups=1, slo=(500, 30),
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
record, options = server.bring_up(owner=os.getpid()), server.options()
ours = (record["owner"] or {}).get("pid") == os.getpid()  # then the last cell stops it again
check_plan(cfg, record)
text = metrics(record)
facts = next((line for line in text.splitlines() if line.startswith("vllm:cache_config_info")), "")
for key in ("enable_prefix_caching", "cache_dtype", "kv_cache_size_tokens"):
    value = facts.partition(f'{key}="')[2].partition('"')[0]
    print(f"{key}: {value or 'unknown'}")
print(f"{record['model']} at {record['base_url']}, context {record['max_model_len']}")

# %% [markdown]
# What this means: the prefix cache must be `False`; `auto` keeps the KV cache in the model's own
# dtype; the last number is how many tokens of all running requests it can hold. (Had 05's server
# ended, `bring_up` would have started it again from `serve/options.json`.)
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

# %%
@dataclass(frozen=True)
class Machine:
    """What serves: its name, peak FLOP/s and bytes/s of one copy of the model, dollars an hour."""
    system: str
    peak: float
    bandwidth: float
    dollars_per_hour: float
    options: server.Options


def roof(options, weight_bytes):
    """Peak FLOP/s and bytes/s of one copy's share of the machine: data sheet, or measured here."""
    if options.chip:
        chip = helpers.chip(options.chip)
        fast = ("int8", "fp8") if options.chip == "h100" else ("int8",)  # fp8 is as fast there
        peak = chip.int8 if options.quantization in fast else chip.flops
        return peak * options.tensor_parallel, chip.bandwidth * options.tensor_parallel
    probe = PROBE.replace("BYTES", str(int(weight_bytes)))
    done = subprocess.run([server.PYTHON, "-c", probe], capture_output=True, text=True)
    if done.returncode:
        raise helpers.UserError(f"calibrating failed: {done.stderr.strip().splitlines()[-1]}")
    return tuple(float(number) / options.data_parallel for number in done.stdout.split())


def machine_of(options, config, dollars_per_hour=0.0):
    """The `Machine` that the server's options describe."""
    if not (options.chip or dollars_per_hour):
        raise helpers.UserError("set dollars_per_hour: no price is published for this machine.")
    price = dollars_per_hour or helpers.chip(options.chip).dollars_per_hour * options.chips
    kind = "gpu" if options.engine == "gpu-docker" else "tpu"
    chips = hardware.Hardware(kind, options.chip, options.chips)
    name = (chips.slice or str(chips)) if options.chip else f"{os.cpu_count()} CPU cores"
    return Machine(name, *roof(options, step_bytes(config, options)), price, options)


# %% [markdown]
# What the floors are made of follows from the server's options: an fp8 cache has half the bytes,
# int8 or fp8 weights as well, and int8 arithmetic has a peak of its own. With two copies of the
# model, each has half of the chips, and prompts queue for two.

# %%
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


config = helpers.read_json(Path(record["model_path"]) / "config.json")
machine = machine_of(options, config, cfg.dollars_per_hour)
weights = step_bytes(config, options)  # all that a step must read, without any KV cache
print(f"{machine.system}, copies of the model: {options.data_parallel}; for one "
      f"{machine.peak / 1e12:.3g} TFLOP/s, {machine.bandwidth / 1e9:.3g} GB/s, weights to read "
      f"{weights / 1e9:.3g} GB -> at least {1e3 * weights / machine.bandwidth:.3g} ms per step")

# %%
floors = []
for input_len, output_len in cfg.regimes:
    alone, _ = ttft_floors(config, input_len, [0.0], machine)
    step = step_bytes(config, options, 1, input_len) / machine.bandwidth
    floors.append((f"{input_len}/{output_len}", physics.prefill_flops(config, input_len),
                   1e3 * alone, 1e3 * step))
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
for rate in cfg.rates:
    evenly = [0.0 if rate == INF else i / rate for i in range(30)]
    alone, queued = ttft_floors(config, cfg.regimes[-1][0], evenly, machine)
    print(f"30 prompts of {cfg.regimes[-1][0]:,} tokens at {rate}/s: one alone "
          f"{1e3 * alone:.3g} ms, median of 30 {1e3 * queued:.3g} ms")

# %% [markdown]
# What this means: as long as one prompt is done before the next one comes, nobody waits. At `inf`
# the median of 30 waits for about half of them: 15.5 times one prompt (8
# times with two copies of the model, each computing with half of the chips).
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


NEEDED = {"duration", "start_times", "latencies", "ttfts", "output_lens", "errors", "num_prompts",
          "request_rate", "p50_ttft_ms", "p50_tpot_ms", "total_input_tokens", "total_output_tokens"}


def load_result(path):
    """One finished point; raises if the file was cut short or nothing completed."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even text
        raise helpers.UserError(f"{path} was cut short. Delete it and run this again.") from error
    if not isinstance(result, dict) or (result.get("completed") and NEEDED - result.keys()):
        raise helpers.UserError(f"{path} is no result of vLLM. Delete it and run this again.")
    if not result.get("completed"):
        first = next((error for error in result.get("errors", []) if error), "no error text")
        raise helpers.UserError(f"{path}: none of {result.get('num_prompts')} requests completed: "
                                f"{first.strip().splitlines()[-1][:200]}")
    return result


# %% [markdown]
# Around the client we add what it does not know. Before a point the server must be **idle**: what
# an interrupted client still has running there would be measured as ours. (In a container that
# happens easily: `docker exec` passes no interrupt on, so its client goes on sending; `Client`
# finds and ends such a one.) The server says how many requests run and wait, and we wait for two
# zeros.

# %%
COUNTERS = {"cached_tokens": "vllm:prefix_cache_hits_total",
            "preemptions": "vllm:num_preemptions_total"}


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
            raise helpers.UserError(f"the server is not idle: {running:.0f} requests run and "
                                    f"{waiting:.0f} wait after {patience:.0f} s. Another client "
                                    "uses it: end that, then run this again.")
        time.sleep(0.2)

# %% [markdown]
# After it we note how many prompt tokens came from the server's prefix cache, how many requests the
# scheduler had to preempt for lack of cache space, what else kept the processor busy (where that is
# what serves), and what the point was **made by**: server, model and load. A point that has its
# file is never measured twice, but only if it was made by the same; if not, a line says what
# differs, and it is measured anew. The SLO is no part of it: goodput is computed from the saved
# times of the requests, so another SLO needs no new measurement. The result takes its final name
# only when it is complete, so half a file is never taken for a point.

# %%
def requests_for(cfg, rate, limit):
    """How many requests a point sends; `limit` is what the server was seen to sustain, or inf."""
    fastest = max(rate for rate in cfg.rates if rate < INF)  # a burst: at least as many as there
    known = min(rate, limit) if min(rate, limit) < INF else fastest
    return max(cfg.min_requests, math.ceil(cfg.seconds * known))


def point_name(regime, rate, repeat):
    """Name and seed of one measurement."""
    name = f"{regime[0]}-{regime[1]}_{rate}_{repeat}"
    return f"{name}.json", zlib.crc32(name.encode())


def made_by(options, cfg, rate):
    """What shaped a point, beside its name: the server, the model, the load and the CPU, if any."""
    fastest = max(rate for rate in cfg.rates if rate < INF)
    return {**options.measured(), "seconds": cfg.seconds, "min_requests": cfg.min_requests,
            "warmups": cfg.warmups, "burst_of": fastest if rate == INF else 0,
            "cores": 0 if options.chip else os.cpu_count()}


def finished(options, cfg, regime, rate, repeat, folder):
    """The result of an earlier run if it is whole and was made by the same, else None."""
    path = folder / point_name(regime, rate, repeat)[0]
    if not path.exists():
        return None
    try:
        result = load_result(path)
    except helpers.UserError as error:
        print(f"{error} Measuring it again.")
        return None
    found, wanted = result.get("series", {}).get("made_by", {}), made_by(options, cfg, rate)
    other = [key for key in wanted if found.get(key, "unknown") != wanted[key]]
    other = other if found else ["version of this notebook"]
    if other:
        print(f"{path.name} was made with another {', '.join(other)}: measuring it anew")
    return None if other else result

# %%
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
    helpers.write_text(folder / name, json.dumps(result))
    (folder / "partial" / name).unlink()
    return result

# %% [markdown]
# The first point, as the command that one could type and with its result:

# %%
folder = helpers.run_dir("bench")
(folder / "partial").mkdir(parents=True, exist_ok=True)
first = (cfg.regimes[0], cfg.rates[0], requests_for(cfg, cfg.rates[0], INF))
with server.Client(record, folder, folder / "client.log") as client:
    shown = bench_arguments(client, record, cfg, *first, *point_name(*first[:2], 0)[::-1])
    print("vllm", " ".join(shown).replace(" --", " \\\n    --"))
    one = finished(options, cfg, *first[:2], 0, folder) or measure(client, record, options, cfg,
                                                                   *first, 0, folder)
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
def sweep(client, record, options, cfg, folder):
    """Measure what has no file yet; return all results. A dead server ends it with a clear line."""
    points = [(repeat, regime, rate) for repeat in range(cfg.repeats) for regime in cfg.regimes
              for rate in cfg.rates]
    progress = helpers.Progress(len(points), "points", every=10.0)
    results, limits, planned, lone = [], {}, {}, {}
    for done, (repeat, regime, rate) in enumerate(points):
        limit = limits.get(regime, INF)
        result = finished(options, cfg, regime, rate, repeat, folder)
        wanted = result["series"]["requests"] if result else requests_for(cfg, rate, limit)
        requests = planned.setdefault((regime, rate), wanted)
        try:
            result = result or measure(client, record, options, cfg, regime, rate, requests, repeat,
                                       folder)
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
      f"at least {at_least / 60:.0f} min of load, "
      f"{at_least / 3600 * machine.dollars_per_hour:.2f} USD")

# %%
with server.Client(record, folder, folder / "client.log") as client:
    results = sweep(client, record, options, cfg, folder)
print(f"{len(results)} measurements, {sum(r['duration'] for r in results):.0f} s of load, "
      f"{sum(r['completed'] for r in results):,} requests completed, "
      f"{sum(r['failed'] for r in results)} failed; other programs kept "
      f"{statistics.mean(r['series']['others_cores'] for r in results):.2f} cores busy")

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


def floors_of(result, config, machine):
    """The floors of one point, in milliseconds, and what is impossible about it, if anything."""
    series, options = result["series"], machine.options
    alone, queued = ttft_floors(config, series["input_len"], result["start_times"], machine)
    step = physics.tpot_floor(
        step_bytes(config, options, 1, series["input_len"]), machine.bandwidth,
        physics.decode_flops(config, 1, series["input_len"]), machine.peak)
    flags = [physics.flag(result["p50_ttft_ms"] / 1e3, alone, "TTFT, one request alone,"),
             physics.flag(result["p50_ttft_ms"] / 1e3, queued, "TTFT, first come first served,"),
             physics.flag(result["p50_tpot_ms"] / 1e3, step, "TPOT"),
             f"{series['cached_tokens']:.0f} prompt tokens came from the prefix cache"
             if series["cached_tokens"] > 0 else ""]
    return {"ttft_floor_ms": 1e3 * alone, "ttft_queue_floor_ms": 1e3 * queued,
            "tpot_floor_ms": 1e3 * step, "flag": next((flag for flag in flags if flag), "")}


def share_kept(result, slo):
    """Share of the completed requests whose times kept the objective (TTFT and TPOT, in ms)."""
    good = 0
    for ttft, latency, tokens, error in zip(result["ttfts"], result["latencies"],
                                            result["output_lens"], result["errors"], strict=True):
        tpot = (latency - ttft) / (tokens - 1) if tokens > 1 else 0.0
        good += not error and 1e3 * ttft <= slo[0] and 1e3 * tpot <= slo[1]
    return good / result["completed"]

# %%
def row(result, lone, config, machine, slo):
    """One row of results.csv."""
    series, delivered = result["series"], delivered_rate(result, lone)
    ends = [a + b for a, b in zip(result["start_times"], result["latencies"], strict=True)]
    tokens = delivered * result["total_output_tokens"] / result["completed"]
    return {
        "system": machine.system, "input_len": series["input_len"],
        "output_len": series["output_len"],
        "rate": float(result["request_rate"]), "repeat": series["repeat"],
        "requests": result["num_prompts"], "completed": result["completed"],
        "failed": result["failed"], "duration_s": result["duration"],
        "drain_s": max(ends) - max(result["start_times"]),
        "raw_rps": result["request_throughput"], "delivered_rps": delivered,
        "goodput_rps": share_kept(result, slo) * delivered, "output_tok_s": tokens,
        "mean_in_flight": sum(result["latencies"]) / result["duration"],
        **latencies(result), "cached_tokens": series["cached_tokens"],
        "cache_hit_rate": series["cached_tokens"] / result["total_input_tokens"],
        "preemptions": series["preemptions"], "others_cores": series["others_cores"],
        **floors_of(result, config, machine), "dollars_per_hour": machine.dollars_per_hour,
        "usd_per_million_output": machine.dollars_per_hour / 3600 / tokens * 1e6,
        "usd_per_thousand_requests": machine.dollars_per_hour / 3600 / delivered * 1e3,
    }


# %% [markdown]
# `results.csv` has a row per point and repeat, the table below one per point.

# %%
lone = {regime: lone_latency([r for r in results if r["series"]["input_len"] == regime[0]])
        for regime in cfg.regimes}
table = pd.DataFrame([
    row(r, lone[r["series"]["input_len"], r["series"]["output_len"]], config, machine, cfg.slo)
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
# How far apart are the repeats? The largest value over the smallest, minus 1. Our rule: where that
# is more than 20 %, the point must say why. It may lie beyond the **knee**, the last rate that was
# kept up with, where latency is the length of the queue. Something else may have kept the processor
# busy (we counted). Or so few requests do not say it better: the 95 % bootstrap intervals of the
# repeats' medians still overlap. If it is none of these, measure again before you compare; do not
# average it away.

# %%
LIMIT = 0.2  # repeats further apart than this need a reason


def kept_up(part):
    """The knee of one regime: (last rate that every repeat kept up with, first that none did).

    Kept up with: at least 90 % of the rate, and of every smaller one, was delivered. The last is 0
    if even the smallest was too much; the first is at most inf, all at once.
    """
    good = part.assign(ok=part.delivered_rps >= 0.9 * part.rate).groupby("rate").ok
    below = good.all().cummin()
    last = max(below.index[below], default=0.0)
    none = good.any()[lambda some: ~some].index
    return last, min((rate for rate in none if rate > last), default=INF)


def samples(result):
    """The times behind the medians of a point: TTFT and TPOT of each completed request."""
    done = [(ttft, (latency - ttft) / max(tokens - 1, 1)) for ttft, latency, tokens, error in zip(
        result["ttfts"], result["latencies"], result["output_lens"], result["errors"],
        strict=True) if not error]
    return dict(zip(("ttft_p50_ms", "tpot_p50_ms"), np.array(done).T, strict=True))


def overlap(repeats):
    """True if the 95 % bootstrap intervals of the repeats' medians have a value in common."""
    found = [bootstrap((np.asarray(values),), np.median, n_resamples=999, method="percentile",
                       rng=0).confidence_interval for values in repeats]
    return max(low for low, _ in found) <= min(high for _, high in found)

# %%
def why_apart(part, raw, last):
    """Why the repeats of one point differ by more than LIMIT; "" where they do not."""
    reasons, others = [], part.others_cores.max()
    for column in ("delivered_rps", "ttft_p50_ms", "tpot_p50_ms"):
        if part[column].max() <= (1 + LIMIT) * part[column].min():
            continue
        if column != "delivered_rps" and part.rate.iloc[0] > last:
            reasons.append("beyond the knee")
        elif others > 0.2:
            reasons.append(f"other programs used up to {others:.1f} cores")
        elif column != "delivered_rps" and overlap([samples(result)[column] for result in raw]):
            reasons.append("too few requests to say it better")
        else:
            reasons.append(f"unknown ({column}): measure again")
    return "; ".join(dict.fromkeys(reasons))


judged = {}
for key, part in table.groupby(keys):
    raw = [results[index] for index in part.index]
    judged[key] = why_apart(part, raw, kept_up(table[table.input_len == key[0]])[0])
spread = table.groupby(keys)[["delivered_rps", "ttft_p50_ms", "tpot_p50_ms"]].agg(
    lambda values: values.max() / values.min() - 1)
spread.columns = ["delivered", "TTFT p50", "TPOT p50"]
spread["why more than 20 %"] = pd.Series(judged)
display(labelled(spread).style.format("{:.0%}", subset=list(spread.columns[:3])))

# %% [markdown]
# The published tables have one run per point, and so no such column.
#
# ## 7. The knee: what rate can it sustain?
# The knee lies between two rates: the last that every repeat kept up with (90 % of it delivered,
# and of all smaller ones), and the first that none did. The rates of the sweep decide how narrow
# that is, so a finer answer is the **capacity**: the largest rate the server delivered at any point
# of the regime, one value per repeat. If some rate was not kept up with (all at once, `inf`, never
# is), the capacity is where the diagonal "delivered = offered" meets the plateau, and we call it
# the saturation rate; else we only know that it is higher.

# %%
def saturation(rates, delivered):
    """(capacity, True if it was reached) from offered and delivered rates of one regime."""
    points = pd.Series(list(delivered), index=list(rates)).groupby(level=0).mean()
    capacity = float(points.max())
    reached = any(value < 0.9 * rate for rate, value in points.items())
    return capacity, reached


def capacities(part):
    """The largest rate delivered in each repeat of one regime."""
    return part.groupby("repeat").delivered_rps.max().tolist()


def systems(folder):
    """All tables in the folder: ours, and any results.csv of another machine under another name."""
    needed = {"system", "input_len", "output_len", "rate", "repeat", "delivered_rps",
              "goodput_rps", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
              "usd_per_million_output", "dollars_per_hour"}
    tables = []
    for path in sorted(folder.glob("*.csv")):
        try:
            found = pd.read_csv(path)
        except ValueError:  # pandas' errors for a broken, empty or binary file are of this kind
            found = pd.DataFrame()
        if needed - set(found.columns) or found[sorted(needed)].isna().any(axis=None):
            print(f"{path} is left out: it is broken, or no results.csv of this notebook.")
            continue
        tables.append(found)
    return pd.concat(tables, ignore_index=True)


# %%
everything = systems(folder)
curves = dict(list(everything.groupby(["system", "input_len", "output_len"])))
for (system, input_len, output_len), part in curves.items():
    capacity, reached = saturation(part.rate, part.delivered_rps)
    (last, first), each = kept_up(part), capacities(part)
    good = part.groupby("rate").goodput_rps.mean()
    print(f"{system}, {input_len}/{output_len}: knee between {last:g} and {first:g}/s; "
          + (f"saturates at {capacity:.3g} requests/s" if reached else f"above {capacity:.3g}/s")
          + f" ({min(each):.3g} to {max(each):.3g} in {len(each)} repeats) = "
          f"{capacity * output_len:,.0f} output tokens/s; most goodput {good.max():.3g}/s, at an "
          f"offered {good.idxmax():g}/s")

# %% [markdown]
# When is a difference a difference? One that lies within the spread of the repeats is no evidence
# of anything. We ask for more: that the ranges do not even touch. With three repeats against three,
# if nothing but chance told them apart, that still happens once in ten times (2 of the 20 ways to
# divide six values), so it is a hint, and more repeats make it a result. First the capacities of
# all curves, then two points of one curve that both are beyond the knee:

# %%
def apart(first, second):
    """A sentence on whether two sets of repeats differ: their ranges, and what chance would do."""
    shown = " and ".join(f"{np.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"
                         for values in (first, second))
    if min(first) <= max(second) and min(second) <= max(first):
        return f"{shown}: within the spread, no evidence of a difference"
    chance = 2 / math.comb(len(first) + len(second), len(first))
    return f"{shown}: apart (by chance alone: {chance:.2g})"


names = {key: f"{key[0]}, {key[1]}/{key[2]}" for key in curves}
for one_key, other_key in combinations(curves, 2):
    print(f"capacity of {names[one_key]} and {names[other_key]}: "
          + apart(capacities(curves[one_key]), capacities(curves[other_key])))
for key, part in curves.items():
    high = [list(values.delivered_rps) for _, values in part.groupby("rate")][-2:]
    print(f"{names[key]}, delivered at the two largest rates: {apart(*high)}")

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
line = sorted([finite[0], finite[-1], *(capacity for capacity, _ in stars.values())])
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
knees = " and ".join(f"{kept_up(part)[0]:g}/s of {title_of(key, curves)}"
                     for key, part in list(curves.items())[:3])
ax.set(ylabel="delivered, requests/s", title=f"It keeps up with {knees} (stars: capacity)")
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
        (axes[0], "ttft", "ttft_queue_floor_ms", "First token"),
        (axes[1], "tpot", "tpot_floor_ms", "Each further token")):
    latency_panel(ax, curves, kind, floor, rate_axis(ax, everything.rate))
    medians = means[f"{kind}_p50_ms"]
    ax.set(title=f"{title}: {short(medians.min())} to {short(medians.max())} ms, by load",
           ylabel="milliseconds (log scale)")
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
left.set(xlabel="seconds", ylabel="request",
         title=f"Waiting (orange), answering (blue): {total.max():.1f} s for the slowest")
for values, label, color, line in ((first, "first token", style.ORANGE, "-"),
                                   (total, "whole answer", style.BLUE, "--")):
    right.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), line, color=color)
    style.label_line(right, np.median(values), 0.5, label, color)
right.set(xlabel="seconds since it was sent", ylabel="share of requests", ylim=(0, 1.02),
          xlim=(0, total.max() * 1.25), title=f"Half wait over {np.median(first):.2g} s to begin")
label = f"{one['series']['input_len']}/{one['series']['output_len']} at {one['request_rate']:g}/s"
style.finish(fig, "06_requests", f"measured, {machine.system}, {label}, one repeat")

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
per_rate = everything.groupby(["input_len", "rate"]).usd_per_million_output.mean()
ax.set(ylabel="USD per million output tokens",
       title=f"A million tokens cost {per_rate.min():.2g} to {per_rate.max():.2g} USD, by load")
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
rows[f"{machine.system}, these settings"] = totals(cfg.train_dollars, machine.dollars_per_hour)
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
print(f"{machine.system}: training is {cfg.train_dollars / best:.3g} million output tokens' worth "
      f"of serving at its cheapest point ({best:.3g} USD per million)")

# %% [markdown]
# What this means: from published prices alone, training plus a day of serving costs 1.14 times as
# much on the GPUs, not the 1.82 times the paper's text says; 1.82 belongs to one hour. In the short
# workload the GPU's tokens are a little cheaper, so its dearer training is paid back after 451
# million tokens. The long workload's token prices rest on the warm cache;
# [10_published](10_published.ipynb) takes them apart.
#
# A server that this notebook brought up is stopped again; that of notebook 05 stays for 07.

# %%
if ours:
    server.stop()
print("server stopped" if ours else f"{record['model']} stays at {record['base_url']}")

# %% [markdown]
# ## Recap
# - A point is trusted because of how it was made: cold cache, fresh seed, enough load, warm-up
#   excluded, repeats, failures kept.
# - A floor stands beside each TTFT (alone and in the queue) and each TPOT, and a median below its
#   floor is flagged as impossible.
# - The knee is bracketed by two rates, the capacity has a spread, and a difference within the
#   spread is none. TTFT beyond the knee measures the length of the test.
# - A token is cheapest where users wait longest; goodput says which rate you can promise.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `no server was ever started` | 05 did not run | run 05 |
# | `is no longer what 05_serve_vllm checked` | 04 ran again, or the files were copied | run 05 again; it verifies them and starts the server |
# | `the server is not idle` | another client, or one that was interrupted in a container | end it; `docker top` and the container's name show it |
# | `was made with another ...: measuring it anew` | a setting or the model changed since | nothing; put the setting back if you did not mean it |
# | `stopped after 7 of 24 points` | the server died under load; its reason is in the line | lower the load or the memory share; run again to continue |
# | `exceed the server's max-model-len` | prompt + answer is longer than 05 allowed | raise `max_model_len` in 05, or drop the regime |
# | `none of 30 requests completed` | every request was refused; the server's words follow | usually a wrong model name or a prompt that is too long |
# | `was cut short` | a disk was full, or a file was copied half | delete the file and run this again |
# | a flag `impossible: TTFT ...` | a warm prefix cache, shorter prompts than the label, or a wrong peak | the causes are in `physics.LIKELY_CAUSES`; check `cache_hit_rate` first |
# | `unknown: measure again` beside repeats more than 20 % apart | something that we do not count | delete the files of that point, measure again on an idle machine |
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
#     share = capacity * physics.prefill_flops(config, inputs) / machine.peak
#     print(inputs, f"{share / options.data_parallel:.1%}")
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
#         result = measure(client, other, options, cfg, cfg.regimes[1], cfg.rates[0], 30, 0, warm)
#         print(attempt, f"{result['p50_ttft_ms']:.0f} ms", result["series"]["cached_tokens"],
#               row(result, 0.0, config, machine, cfg.slo)["flag"] or "no flag")
# process.terminate()
# ```
#
# The first run already finds its own warm-up in the cache and is flagged for it. In the second
# nearly all prompt tokens come from there (it holds whole blocks only), and the TTFT falls.
# </details>
#
# Next: [07 · pass@k that can be believed](07_eval.ipynb)
