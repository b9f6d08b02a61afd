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
# How many people can use the server of notebook 05 before they notice each other? We time one request, then
# many, and find the rate at which a queue begins. Next to what we measure we put what physics allows, and
# what it costs.
#
# | | |
# |---|---|
# | **Needs** | the server of 05; if it has ended, it's started again. No JAX, no accelerator of its own |
# | **Reads** | `serve/`, `merge.json` of 04, the model's `config.json` |
# | **Writes** | `bench/*.json` (every measurement, raw), `bench/results.csv` (one row each), figures |
# | **Time and cost** | tiny: two to four minutes. 31b: about 2.3 hours of a v6e-8, 50 USD at 21.52 USD/h (section 4 computes it) |
#
# You see the outputs of the tiny run on a CPU. For the 31B you'd use the same method and the same client.

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · **06 benchmark** · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb) · [14 JAX](14_jax.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
from pathlib import Path
near = [Path(place).absolute() for place in (
    sys.path[0], ".", "gemma4-on-tpu", os.environ.get("JPY_SESSION_NAME", "."), sys.prefix)]
found = [path for start in near for path in (start, *start.parents) if (path / "tpu_time").is_dir()]
if not found and {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"} & os.environ.keys():  # alone
    subprocess.check_call("git clone -q --depth=1 https://github.com/OWNER/gemma4-on-tpu".split())
    found = [Path("gemma4-on-tpu").absolute()]
if not found:
    sys.exit("Error: no repository is here or above. Start this kernel inside it, or make one:\n"
             "git clone https://github.com/OWNER/gemma4-on-tpu && gemma4-on-tpu/setup.sh train")
sys.path.insert(0, str(found[0]))
import helpers
helpers.machine()

# %% [markdown]
# ## 1. What exactly do we measure?
# "How fast is the server?" has no single answer. It depends on how long the prompts and the answers are,
# and on how many people ask.
#
# - A **regime** is a prompt length and an answer length, in tokens: 128/16 means 128 in and 16 out.
# - A **rate** is how many requests arrive per second. A regime at one rate is a **point**.
# - The **objective** (you'll also see SLO, service-level objective) is what you'd promise a user: at most
#   so many milliseconds to the first token, and so many for each further one.
#
# Requests arrive at random moments, whether or not the server is ready, because strangers don't know about
# each other. Such a test is an **open loop**.
#
# <details><summary><b>Why not simulate 30 users who each ask again as soon as they have an answer?</b></summary>
#
# Because then a slow server is asked less often. Its queue can't grow, so you never see it. Such a *closed
# loop* makes slow servers look good.
# </details>

# %%
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd

from helpers import chat, records, style
from serving import asking, draw, limits, load, results, server
from serving import options as serve
from serving.load import Client, Load, sweep
from tables import architecture, hardware, physics, texts

INF = math.inf
FULL = Load(regimes=((1024, 256), (4096, 512), (15360, 512)), warmups=4)
E2B = Load(regimes=((512, 256), (2048, 256)), warmups=4, slo=(1000, 40))
TINY = Load(regimes=((128, 16),), rates=6, seconds=2.0, min_requests=8, long=5.0, slo=(1000, 60))
V5E = Load(regimes=((1024, 256), (2048, 256)), rates=3, repeats=2, seconds=45.0, long=180.0,
           warmups=4)  # half an hour of a free session; fits every try of serving/v5e.py
LARGE = V5E if hardware.here().slice == "v5e-8" else FULL
cfg = helpers.choose({"31b": LARGE, "e2b": E2B, "tiny": TINY})
PRICE = 0.0  # dollars an hour, of all chips; 0: the published price, if there is one
names = ", ".join(f"{inputs}/{outputs}" for inputs, outputs in cfg.regimes)
print(f"regimes: {names}; rates: {cfg.rates} and all at once, {cfg.repeats} times each; objective: "
      f"{cfg.slo[0]} ms to the first token, {cfg.slo[1]} ms for each further one")

# %% [markdown]
# **A speed means nothing without a regime and a rate.**
#
# ## 2. Where does the time of one request go?
# Let's first see what a single user gets. We connect to the server of 05 and prepare a request that you
# know, the up-down counter.

# %%
folder, results_in = helpers.run_dir("serve"), helpers.run_dir("bench")
options = serve.read(folder)
record = server.start(options, folder)
openai = asking.openai_client(record)
recipe = records.Merge.load().recipe
system, thinking = recipe.system, recipe.thinking  # how training asked
counter = Path("data/tiny_eval/Prob031_updown_prompt.txt").read_text()
request = asking.chat_request(counter, system, thinking, model=record.name, stream=True,
                              max_tokens=record.max_model_len // 2)

# %% [markdown]
# We send it five times, note when each piece of the answer arrives, and draw the run in the middle. One run
# before them doesn't count, because there the client still loads code and opens its connection. **Does most
# of the time pass before the first token, or after it?**

# %%
def timed():
    """Seconds from sending to each piece of the answer, and those the server took per token."""
    before = asking.counters(record)
    start, arrivals = time.perf_counter(), []
    for piece in openai.chat.completions.create(**request):
        if piece.choices and piece.choices[0].delta.content:
            arrivals.append(time.perf_counter() - start)
    return arrivals, asking.seconds_per_token(before, asking.counters(record))


timed()
runs = sorted((timed() for _ in range(5)), key=lambda run: run[0][-1])
arrivals, made = runs[2]
gap, doubt = limits.pace(arrivals, made)
fig, ax = style.figure(9, 1.9)
draw.timeline(ax, arrivals, gap)
ax.set_title(f"One request alone: {1e3 * arrivals[-1]:.0f} ms, "
             f"{arrivals[0] / arrivals[-1]:.0%} of it before the first token")
style.finish(fig, "06_timeline", f"measured, {options.engine}")
if doubt:
    print(doubt)

# %% [markdown]
# Orange is the **time to first token** (TTFT). The server reads the whole prompt then, which is called
# *prefill*. Blue is the rest of the answer: each *decode* step makes one token, and a step's mean duration
# is the **time per output token** (TPOT). Each white line is a piece of the answer that arrived. When
# others use the server, both times grow, but for different reasons, so we keep them apart.
#
# **A user waits twice: once for the first token, then a little for each further one.**
#
# ## 3. How do you measure a server that many people use?
# You need a client that behaves like many people, and vLLM brings one. `vllm bench serve` sends random
# prompts of a given length at a given rate, and notes the times of every request. This is the command for
# one point:

# %%
client = Client(folder)  # one process for all points; importing vLLM takes ten seconds
regime = cfg.regimes[0]
print("vllm", " ".join(load.arguments(record, cfg, regime, 4, 2 * cfg.min_requests, seed=7))
      .replace(" --", " \\\n    --"))

# %% [markdown]
# Three things make points comparable. `--ignore-eos` makes all answers equally long. The client stretches
# its random gaps so that n requests take n / rate seconds. And before each point we wait until the server
# is idle, or we'd measure requests that somebody else left behind.
#
# **A prefix cache keeps what a server has computed for earlier prompts. You measure two points with the
# same seed. What does the second one measure?**
#
# <details><summary>Answer</summary>
#
# The cache, because the same seed makes the same prompts. So each of our measurements has a seed of its
# own, the cache is off, and after each point we read what the server itself counted as cached.
# </details>
#
# **Every measurement gets an idle server, fresh prompts, and no cache.**
#
# ## 4. Which rates are worth measuring?
# We let the server tell us. First come two **bursts**, where all requests arrive at once, first a few and
# then many. They tell us roughly how many requests it can finish per second. *Bisection* then narrows down
# the rate where it stops keeping up: one rate below, one above, then one in between, until two neighbours
# are at most 25 % apart. A few more rates fill in the curve. We go through all rates three times, so if the
# machine slowly gets busier, you'll see it as spread. How long will that take?

# %%
config = architecture.read_config(options.model)
machine = limits.machine_of(options, config, PRICE)
regimes = len(cfg.regimes)
count = regimes * (cfg.repeats * (cfg.rates + 1) + 2)
hours = (count * 1.4 * cfg.seconds + regimes * cfg.long) / 3600
print(f"{count} short measurements, then a long one per regime: "
      f"at least {60 * hours:.0f} min, and longer where a request takes long")
if options.chip:
    print(f"that is {hours * machine.dollars_per_hour:.0f} USD")

# %% [markdown]
# Some results can't be true on a machine that does nothing else: a wait that gets much shorter while the
# load grows, repeats that lie more than a fifth apart, or less delivered than at another rate. Then
# something disturbed us, and we measure that rate again, up to twice. If its results still contradict each
# other, we call it *noisy*. Each measurement is a file, so if you interrupt the sweep, it continues where
# it was.

# %%
measured = sweep(client, options, cfg, results_in)

# %% [markdown]
# Every measurement becomes one row of `results.csv`. Beside each latency stands its floor, the least time
# that's physically possible (section 7).

# %%
table = results.rows(measured, cfg.slo, machine.dollars_per_hour)
floors = [limits.floors(measurement, machine, config) for measurement in measured]
table = table.join(pd.DataFrame(floors))
helpers.write_text(results_in / "results.csv", table.to_csv(index=False))

# %% [markdown]
# In this summary each rate is one row, the median of its repeats. `state` says whether the server kept up
# (section 5 explains how we tell). `delivered` is how many requests per second were answered, and `goodput`
# is how many of them kept the objective. `p50` is the median request; `p90` is the time that nine requests
# in ten stayed below. Times are in milliseconds, and `inf` is all at once.

# %%
REGIME = ["input_len", "output_len"]
middle = table.groupby([*REGIME, "rate"]).median(numeric_only=True)
middle.insert(0, "state", "")
for (inputs, outputs), part in table.groupby(REGIME):
    for rate, state in results.states(part).items():
        middle.loc[(inputs, outputs, rate), "state"] = state
names = {"state": "state", "requests": "requests", "failed": "failed",
         "delivered_rps": "delivered /s", "goodput_rps": "goodput /s",
         "ttft_p50_ms": "TTFT p50", "ttft_p90_ms": "TTFT p90",
         "tpot_p50_ms": "TPOT p50", "tpot_p90_ms": "TPOT p90"}
view = middle[list(names)].rename(columns=names).style.format(precision=1)
view.format(precision=2, subset=["delivered /s", "goodput /s"])

# %% [markdown]
# <details><summary><b>How exactly are these computed?</b></summary>
#
# Latencies include every completed request, even while the load builds up or drains. `delivered` leaves out
# the time that the last request would need alone, because nothing new arrives then. `goodput` is
# `delivered` times the share that kept the objective; vLLM's own divides by the whole run.
# </details>
#
# More load can't make a server deliver less or answer sooner. The table may say so all the same, because a
# point of the tiny run is only a handful of requests. Is that real? If the repeats of two neighbouring
# rates overlap, you can't tell it from noise:

# %%
for (inputs, outputs), part in table.groupby(REGIME):
    for line in results.dips(part) or ["nothing falls while the load grows"]:
        print(f"{inputs}/{outputs}: {line}")

# %% [markdown]
# **Believe a difference only if it's larger than the spread of the repeats.**
#
# ## 5. Up to which rate would you promise anything?
# Look at `delivered` and TTFT before you open the answer.
#
# <details><summary>Answer</summary>
#
# While the server keeps up, it delivers what's offered, and TTFT grows slowly. Then `delivered` levels off,
# and every further request only makes the queue longer. The last rate that it kept up with is the **knee**:
# at least 90 % of it was delivered (in the median), and of every smaller rate too. Beyond the knee, a rate
# is *overloaded*.
# </details>

# %%
fig, ax = style.figure(8, 4.2)
draw.curves(ax, table, "delivered_rps", "rate", "delivered, requests/s")
knees = {regime: results.kept_up(part) for regime, part in table.groupby(REGIME)}
kept = [f"{low:.3g}/s of {inputs}/{outputs}" for (inputs, outputs), (low, _) in knees.items()]
ax.set_title("It keeps up with " + ", ".join(kept))
style.finish(fig, "06_throughput", f"measured, {machine.system}; median, bars: smallest and "
             f"largest of {cfg.repeats} or more; hollow: beyond the knee")
whole_rounds = table[table["repeat"] < cfg.repeats]  # further ones saw only the noisy rates
for (inputs, outputs), part in whole_rounds.groupby(REGIME):
    last, above = knees[inputs, outputs]
    most = part.groupby("repeat").delivered_rps.max()
    print(f"{inputs}/{outputs}: knee between {last:.3g} and {above:.3g}/s; at most "
          f"{most.median():.3g}/s ({most.min():.3g} to {most.max():.3g}) delivered")

# %% [markdown]
# The dashed line is what was offered. Up to the knee the curve follows it, so there every server looks
# equally fast: any server that keeps up delivers what's offered.
#
# **The knee is the most you can promise. Compare throughput beyond it, and latency below it.**
#
# ## 6. Why can't we compare latencies beyond the knee?
# Here's every request of the largest rate, orange while it waits for its first token, blue while it's being
# answered:

# %%
finite = [measurement for measurement in measured if measurement.rate < INF]
fastest = max(finite, key=lambda measurement: measurement.rate)
fig, ax = style.figure(9, 3.6)
draw.requests(ax, fastest)
ax.set_title(f"At {fastest.rate:.3g}/s the slowest takes {max(fastest.latencies):.1f} s")
style.finish(fig, "06_requests", f"measured, {machine.system}, one repeat")

# %% [markdown]
# In one step the server computes at most 2,048 tokens (05): one for each answer that has begun, the rest
# for new prompts. A step with prompts in it takes longer. So while newcomers' prompts are read, everybody
# else waits.
#
# Right of the dotted line nothing new arrives. With twice as many requests the queue would grow for twice
# as long, and the last request would wait about twice as long, on the very same server.
#
# **Beyond the knee, TTFT and TPOT measure the length of the test, not the server.**
#
# ## 7. How fast could it be?
# Is 200 ms to the first token good? You can't tell until you know what's possible. The **floor** is the
# least time that this work takes on this machine, whatever the software.
#
# - **TTFT.** The whole prompt has to go through every layer. That's a number of operations, which follows
#   from `config.json`. Divide it by the machine's **peak**, its operations per second.
# - **TPOT.** Every decode step has to read all weights and the request's cache. That's a number of bytes.
#   Divide it by the memory's **bandwidth**.
# - **A queue** has a higher floor. If 30 prompts arrive at once, the median one waits for half of them,
#   even on a perfect machine.
#
# Peak and bandwidth of an accelerator are in its data sheet. For a CPU we measure one core and multiply by
# the number of cores. That's a little too fast, so the floors are a little too low, and no measurement is
# accused wrongly.

# %%
print(f"{machine.system}: {machine.peak / 1e12:.3g} TFLOP/s, {machine.bandwidth / 1e9:.3g} GB/s; "
      f"a prompt of {regime[0]} takes {physics.prefill_flops(config, regime[0]) / 1e9:.3g} GFLOP")
fig, (left, right) = style.figure(9.5, 4, columns=2)


def two_digits(value):
    """A number to read, such as 13,000."""
    return f"{float(f'{value:.2g}'):,g}"


for ax, kind, floor in ((left, "ttft", "ttft_queue_floor_ms"), (right, "tpot", "tpot_floor_ms")):
    draw.curves(ax, table, f"{kind}_p50_ms", floor, "milliseconds (log scale)")
    times = middle[f"{kind}_p50_ms"] / middle[floor]
    least, most = two_digits(times.min()), two_digits(times.max())
    ax.set_title(f"{kind.upper()}: {least} to {most} times its floor")
style.finish(fig, "06_latency", f"measured, {machine.system}; medians, range of the repeats; "
             "dashed: floors")
flags = sorted(set(table.flag) - {""})
print("\n".join(flags) or "nothing is below its floor")
print("tokens per step, with a drafter:", measured[0].series.speculation or "no drafter here")

# %% [markdown]
# The tiny model stays far above its floors, because its arithmetic takes almost no time beside the Python
# around it. Two busy H100s read the 31B's prompts in 2.5 times their floor (computed in
# [10](10_published.ipynb) from published numbers).
#
# ### Can anybody be faster than the hardware?
# Floors are most useful for other people's numbers. Here's a published sweep over the 31B, on eight v6e
# chips and on two H100s, with 30 prompts per point. (Where the prompts are longest, the published times look as
# if there had been only 7 of them; [10](10_published.ipynb), section 6, says why.) The more prompts wait in line,
# the higher the floor under their median, so each point has its own:

# %%
published = pd.read_csv("data/published/qps_sweep_digitized.csv").query("metric == 'ttft'")
big = architecture.read_config("data/configs/gemma4_31b.json")
peaks = {"tpu": 8 * hardware.chip("v6e").flops, "gpu": 2 * hardware.chip("h100").flops}
least_ms = []
for point in published.itertuples():
    is_longest = point.input_tokens == "~16k"
    tokens, prompts = (15_360, 7) if is_longest else (int(point.input_tokens), 30)
    seconds = physics.prefill_flops(big, tokens) / peaks[point.device]
    least_ms.append(1e3 * physics.median_ttft_floor_fcfs(prompts, point.qps, seconds))
published = published.assign(floor_ms=least_ms, too_fast=least_ms > 1.2 * published.value,
                             machine=published.device.map({"tpu": "v6e-8", "gpu": "2 x H100"}))

# %% [markdown]
# Let's put each published time against its floor. A point on the dashed line would use the machine
# perfectly.

# %%
fig, ax = style.figure(6.5, 4.2)
draw.against_floors(ax, published)
ax.set_title(f"{published.too_fast.sum()} of {len(published)} published points are impossible")
style.finish(fig, "06_published", "read off the figure on p. 15 of the paper's draft, about 1 % "
             "error; hollow: 1.2 times below the floor or more")

# %% [markdown]
# The hollow points lie below the line. No machine with these chips can read those prompts in that time.
# **So what was measured there?**
#
# <details><summary>Answer</summary>
#
# Most likely the prefix cache of section 3: the same seed sends the same prompts at every rate. The times
# fall just where the prompts fit into the cache ([10](10_published.ipynb), section 5). In general a point
# below its floor means cached prompts, shorter prompts than the label says, a wrong peak, or a client so
# short of CPU that it read several tokens at once.
# </details>
#
# **Compute the floor before you believe a latency, above all your own.**
#
# ## 8. What does a token cost?
# A machine costs the same whether it works or not. So tokens are cheapest when it's full, and then users
# queue. Here's the wait against the price. Each point is one rate, the bars are the range of its repeats,
# and the line joins the rates that the server keeps up with. Overloaded ones stand apart, because their
# wait measures our test (section 6).

# %%
unit = "hours of the machine" if math.isnan(machine.dollars_per_hour) else "USD"
fig, ax = style.figure(8, 4.2)
draw.cost(ax, table, cfg.slo[0], unit)
ax.set_title("The fuller the machine, the cheaper the token")
style.finish(fig, "06_cost", f"measured, {machine.system}; medians, range of the repeats; "
             "hollow: beyond the knee")

# %% [markdown]
# Read it from right to left: the rate rises, the price falls. A dip whose bars overlap with its neighbours'
# is within the noise (section 4).
#
# Which rate can you promise? The largest one up to the knee at which nine requests in ten kept the
# objective. But a run of seconds can't show a queue that grows slowly. So the rate first has to survive
# **one long run**, at least twenty times as long as a request takes. If it doesn't hold, we try the next
# lower one. If the long run delivers far less than the sweep has shown, that's noise, and we make it once
# more.

# %%
confirmed = load.confirm(client, options, cfg, results_in, table)
for (inputs, outputs), (rate, measurement) in confirmed.items():
    row = results.rows([measurement], cfg.slo, machine.dollars_per_hour).iloc[0]
    price = row.usd_per_million_output if unit == "USD" else row.hours_per_million_output
    print(f"{inputs}/{outputs}: {rate:.3g}/s holds; {price:.3g} {unit} per million output tokens, "
          f"{price * outputs / 1e3:.3g} per 1,000 requests; at 30 % use {price / 0.3:.3g} "
          "a million")
if not confirmed:
    print("no rate held: nothing can be promised at this objective, so there is no price")

# %% [markdown]
# Nobody's service is busy all day. So the number for your budget is the last one, where the machine is used 30 %
# of the time.
#
# **A price per token counts only at a rate that holds, and only for a machine that's busy.**
#
# ## 9. What changes with your own traffic?
# Real prompts often share a beginning, and real answers end by themselves. The random ones so far did
# neither. With `--dataset-name custom` the client reads one `{"prompt": ...}` per line. Here they're the
# eight longest requests of 07, each asked twice, because 07 draws several answers too.

# %%
tokenizer = chat.load_tokenizer(options.model)
own = helpers.run_dir("bench", "own.jsonl")  # ← your file: set its path, drop the rest
ids = []
for path in sorted(Path("data/tiny_eval").glob("*_prompt.txt")):
    messages = asking.chat_request(path.read_text(), system, thinking)["messages"]
    ids.append(chat.prompt_ids(tokenizer, messages, thinking))
ids = sorted(ids, key=len)[-8:]


def tokens_of(prompt):
    """The ids that the server makes of a text."""
    return asking.post(record, "/tokenize", {"model": record.name, "prompt": prompt})["tokens"]


if tokens_of(tokenizer.decode(ids[0])) != ids[0]:  # the server adds <bos> itself
    ids = [prompt[1:] for prompt in ids]
lines = [json.dumps({"prompt": tokenizer.decode(prompt)}) + "\n" for prompt in ids]
helpers.write_text(own, "".join(2 * lines))

# %% [markdown]
# We send them at a quarter of what the server can take, so that no queue gets in the way.

# %%
lengths = []
for line in texts.json_lines(own.read_bytes()):
    lengths.append(len(tokens_of(line.value["prompt"])))
own_regime = (max(lengths), 128)  # the most tokens of a prompt and of an answer
quarter = float(f"{table.delivered_rps.max() / 4:.2g}")  # of what it can take, per second
traffic = {"requests": load.check_prompts(own), "rate": quarter, "prompts": own}

# %% [markdown]
# First they go to the server of 05, then to one with a prefix cache. **Each prompt comes twice. How much
# should the cache save?**

# %%
warm = replace(options, prefix_caching=True, port=0)
# Chips have room for one server.
place = folder if options.chip else helpers.run_dir("serve", "warm")
cold_run = load.measure(client, options, cfg, results_in, own_regime, repeat="own-cold", **traffic)
with server.running(warm, place):
    client.record = server.current(place)
    warm_run = load.measure(client, warm, cfg, results_in, own_regime, repeat="own-warm", **traffic)
    block = asking.counters(client.record)["cache"]["block_size"]
client.close()
assert cold_run.raw["total_input_tokens"] == sum(lengths), "other prompts were sent"
columns = {}
for name, run in (("cache off", cold_run), ("cache on", warm_run)):
    columns[name] = {
        "prompt tokens": run.raw["total_input_tokens"],
        "of them cached": run.series.cached_tokens,
        "answer tokens, mean": run.raw["total_output_tokens"] / run.completed,
        "TTFT p50, ms": run.percentile("ttft", 50),
        "TPOT p50, ms": run.percentile("tpot", 50)}
print(f"the cache keeps blocks of {block} tokens; prompts have {min(lengths)} to {max(lengths)}")
pd.DataFrame(columns).style.format(precision=1)

# %% [markdown]
# Half of all prompt tokens had been sent before, but fewer came from the cache, because it keeps whole
# blocks only. A prompt that's shorter than a block never profits. And the waits didn't get shorter. By section 7
# the arithmetic of such a short prompt takes only a few of these milliseconds, so there's next to nothing to save.
# With long prompts and a large model there is.
#
# If your users share a long system message, turn the cache on in 05 (`prefix_caching=True`). But its
# numbers say how repetitive the traffic was. Give them beside the cold ones, never instead.
#
# **Measure with the traffic you'll really have, and say whether the cache was on.**
#
# ## Recap
# - A user waits for the first token (prefill), and for each further one (decode).
# - The knee is the last rate that the server keeps up with. Beyond it, latencies measure the test's length.
# - You can trust a point because of how it was made: no cache, fresh prompts, three repeats. A price needs
#   a long run, too.
# - The floor beside a latency says what's possible, and what can't be true.
#
# If something goes wrong, look up the symptom in
# [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. When the server is at its knee, which share of the machine's peak does it use to read prompts?
#
# <details><summary>Solution</summary>
#
# ```python
# for (inputs, outputs), (last, _) in knees.items():
#     print(inputs, f"{last * physics.prefill_flops(config, inputs) / machine.peak:.1%}")
# ```
#
# In our run about 2 %: 3 prompts a second of 0.994 GFLOP each, of some 190 GFLOP/s. The rest of the time goes to
# decoding and to Python.
# </details>
#
# 2. One request has a prompt 30 times as long as the others. Whose TTFT grows? And why doesn't the server
#    answer the short ones first?
#
# <details><summary>Solution</summary>
#
# The TTFT of everybody who came after it. The server reads prompts in the order in which they arrive, in
# pieces of 2,048 tokens (section 6).
# </details>
#
# 3. A drafter (05) proposes four tokens, and the model checks them in one step. If it accepts two, the step
#    makes three tokens, but it costs the arithmetic of five. Up to how many requests at once is that free
#    for the 31B on a v6e-8?
#
# <details><summary>Solution</summary>
#
# ```python
# v6e8 = limits.machine_of(serve.Options(engine="tpu-docker", chip="v6e", tensor_parallel=8), big)
# for batch in (1, 16, 64, 91):
#     plain = limits.tpot_floor(big, 2048, v6e8, batch)
#     drafted = limits.tpot_floor(big, 2048, v6e8, batch, tokens=3, checked=5)
#     print(f"{batch:3} requests at once: {plain / drafted:.1f} times faster")
# ```
#
# As many as fit into 05's cache, which is 91: even then every step waits for memory, not for arithmetic. So
# the drafter could at best triple the speed, before its own cost.
# </details>
#
# Next: [07 · pass@k that can be believed](07_eval.ipynb)
