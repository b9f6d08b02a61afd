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
# How many people can use the server of notebook 05 before they notice each other? First we time one request
# on its own. Then we send many, until we find the rate at which a queue begins to grow. And next to what we
# measure we put two more numbers: what physics allows, and what it costs.
#
# | | |
# |---|---|
# | **Needs** | the server of 05; if it has ended, it's started again. No JAX, no accelerator of its own |
# | **Reads** | `serve/`, `merge.json` of 04, the model's `config.json` |
# | **Writes** | `bench/*.json` (every measurement, raw), `bench/results.csv` (one row each), figures |
# | **Time and cost** | tiny: two to four minutes. 31b: about 2.3 hours of a v6e-8, 50 USD at 21.52 USD/h (section 4 computes it) |
#
# The outputs you see were made with the tiny model on a CPU, but the method and the client are those you'd
# use for the 31B.

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · **06 benchmark** · [07 evaluate](07_eval.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
from pathlib import Path
near = [Path(place).absolute() for place in (
    sys.path[0], ".", "gemma4-on-tpu", os.environ.get("JPY_SESSION_NAME", "."), sys.prefix)]
found = [path for start in near for path in (start, *start.parents) if (path / "tpu_time").is_dir()]
if not found and "COLAB_RELEASE_TAG" in os.environ:  # a notebook that was opened alone
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
# and on how many people ask. So let's pin both down.
#
# - A **regime** is a prompt length and an answer length, in tokens: 128/16 means 128 in and 16 out.
# - A **rate** is how many requests arrive per second. A regime at one rate is a **point** of our
#   measurement.
# - The **objective** is what you'd promise a user: at most so many milliseconds until the first token, and
#   at most so many for each further one. You'll often see it called SLO, service-level objective.
#
# Requests arrive at random moments, whether or not the server is ready for them. That's how strangers
# behave, because none of them knows about the others. Such a test is called **open loop**.
#
# <details><summary><b>Why not simulate 30 users who each ask again as soon as they have an answer?</b></summary>
#
# Because then a slow server is asked less often: everybody waits for an answer before asking again. The
# queue can't grow, so you never see it. That's a *closed loop*, and it makes slow servers look good.
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
from tables import hardware, physics, texts

INF = math.inf
FULL = Load(regimes=((1024, 256), (4096, 512), (15360, 512)), warmups=4)
E2B = Load(regimes=((512, 256), (2048, 256)), warmups=4, slo=(1000, 40))
TINY = Load(regimes=((128, 16),), rates=6, seconds=2.0, min_requests=8, long=5.0, slo=(1000, 60))
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})
PRICE = 0.0  # dollars an hour, of all chips; 0: the published price, if there is one
names = ", ".join(f"{inputs}/{outputs}" for inputs, outputs in cfg.regimes)
print(f"regimes: {names}; rates: {cfg.rates} and all at once, {cfg.repeats} times each; objective: "
      f"{cfg.slo[0]} ms to the first token, {cfg.slo[1]} ms for each further one")

# %% [markdown]
# **A speed means something only together with a regime and a rate.**
#
# ## 2. Where does the time of one request go?
# Before we add any load, let's see what a single user gets. We connect to the server of 05 (if it has
# ended, it's started again) and prepare a request that you know: the up-down counter.

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
# We send it five times and note when each piece of the answer arrives. Then we draw the run in the middle,
# the third fastest. Before those five there's one that we don't count, because in it the client still has
# to load code and open its connection. **What do you expect: does most of the time pass before the first
# token, or after it?**

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
# The orange part is the **time to first token** (TTFT). During that time the server reads the whole prompt,
# and that's called *prefill*. The blue part is the rest of the answer: one *decode* step makes one token,
# and how long that takes on average is the **time per output token** (TPOT). Each white line is a piece of
# the answer that arrived.
#
# When other people use the server too, both times grow, but for different reasons. So we always keep them
# apart.
#
# **A user waits twice: once for the first token, then a little for each further one.**
#
# ## 3. How do you measure a server that many people use?
# You need a client that behaves like many people, and vLLM brings one: `vllm bench serve`. It makes up
# random prompts of the length we ask for, sends them at the rate we ask for, and notes the times of every
# request. This is the command for one point:

# %%
client = Client(folder)  # one process for all points; importing vLLM takes ten seconds
regime = cfg.regimes[0]
print("vllm", " ".join(load.arguments(record, cfg, regime, 4, 2 * cfg.min_requests, seed=7))
      .replace(" --", " \\\n    --"))

# %% [markdown]
# Three things make points comparable. With `--ignore-eos` the model can't end an answer early, so all
# answers are equally long. The client stretches its random gaps so that n requests take n / rate seconds in
# total, no more and no less. And before each point we wait until the server is idle. Otherwise we'd measure
# the requests that somebody else left behind.
#
# There's a trap, though. **A server can have a prefix cache: it keeps what it computed for earlier prompts.
# You measure two points with the same seed. What does the second one measure?**
#
# <details><summary>Answer</summary>
#
# The cache. The same seed makes the same prompts, so the server has seen them all before. That's why each
# of our measurements has a seed of its own, and why the cache is off here. To be sure, we also ask the
# server after each point how many tokens came from its cache.
# </details>
#
# **Every measurement gets an idle server, fresh prompts, and no cache.**
#
# ## 4. Which rates are worth measuring?
# We don't know yet what this server can take, so we let it tell us. We send two **bursts**, where all
# requests come at once, first a few and then many. How quickly they're done says roughly how many requests
# per second it can finish.
#
# Then we look for the rate at which it stops keeping up. We try one below and one above, then one in
# between, and so on, until two neighbours are at most 25 % apart (that's *bisection*). A few more rates
# fill in the curve. Each rate is measured three times, but not three times in a row: we go through all
# rates once, then again, then a third time. If the machine slowly gets hotter or busier, you'll see that as
# spread instead of mistaking it for an effect of the rate.
#
# How long will that take?

# %%
config = helpers.read_json(Path(options.model) / "config.json")
machine = limits.machine_of(options, config, PRICE)
regimes = len(cfg.regimes)
count = regimes * (cfg.repeats * (cfg.rates + 1) + 2)
hours = (count * 1.4 * cfg.seconds + regimes * cfg.long) / 3600
print(f"{count} short measurements, then a long one per regime: about {60 * hours:.0f} min")
if options.chip:
    print(f"that is {hours * machine.dollars_per_hour:.0f} USD")

# %% [markdown]
# Some results can't be true on a machine that does nothing else: a wait that gets much shorter while the
# load grows, three repeats that lie more than a fifth apart, or a server that delivers less than it just
# did at another rate. If we see one of these, something disturbed us. We measure that rate again, up to
# twice, and if it still contradicts itself, we call it *noisy*.
#
# Every finished measurement is a file, so you can interrupt the next cell and run it again: it continues
# where it was.

# %%
measured = sweep(client, options, cfg, results_in)

# %% [markdown]
# From the raw times we make one row per measurement, and keep all of them in `results.csv`. Beside each
# latency we put its floor, the least time that's physically possible; section 7 explains that one.

# %%
table = results.rows(measured, cfg.slo, machine.dollars_per_hour)
floors = [limits.floors(measurement, machine, config) for measurement in measured]
table = table.join(pd.DataFrame(floors))
helpers.write_text(results_in / "results.csv", table.to_csv(index=False))

# %% [markdown]
# Here's the summary, one row per rate, with the median of the repeats. `delivered` is how many requests per
# second got an answer. `goodput` counts only those that kept the objective. `p50` is the median request,
# and `p90` is the time that nine requests in ten stayed below, in milliseconds. And `state` says whether
# the server *kept up* or was *overloaded*; section 5 explains how we tell.

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
# Latencies include every completed request, even those from the beginning and the end of the run, when the
# load was still building up or already draining. For `delivered` we leave out the time that the last
# request would need on its own, because nothing new arrives then. `goodput` is `delivered` times the share
# of requests that kept the objective. vLLM's own goodput divides by the whole run instead, so it's a little
# lower.
# </details>
#
# More load can't make a server deliver less or answer sooner. And yet you may find such a place in the
# table, because a point of the tiny run has only a handful of requests. Is it an effect, or noise? The
# repeats can tell: if those of two neighbouring rates overlap, you couldn't say which of the two is really
# lower.

# %%
for (inputs, outputs), part in table.groupby(REGIME):
    for line in results.dips(part) or ["nothing falls while the load grows"]:
        print(f"{inputs}/{outputs}: {line}")

# %% [markdown]
# **One measurement is an anecdote. Believe a difference only if it's larger than what the repeats differ
# by.**
#
# ## 5. Up to which rate would you promise anything?
# Look at `delivered` and at TTFT in the table, and decide before you open the answer.
#
# <details><summary>Answer</summary>
#
# While the server keeps up, it delivers what's offered, and TTFT grows slowly. Then `delivered` levels off.
# From there on every further request only makes the queue longer, so TTFT keeps growing. The place where
# that begins is the **knee**: the last rate that the server kept up with. We say that a server keeps up
# with a rate if it delivers at least 90 % of it (in the median of three repeats), and if that's also true
# of every smaller rate.
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
# The dashed line is what was offered. Up to the knee the curve follows it, and that part tells you nothing
# about speed: any server that keeps up delivers exactly what's offered. So below the knee, every server
# looks equally fast. If somebody shows you equal throughput of two servers, ask whether either was full.
#
# **The knee is the most you can promise. Compare throughput only beyond it, and latency only below it.**
#
# ## 6. Why can't we compare latencies beyond the knee?
# That last half sentence needs a reason. Here's every single request of the largest rate we tried: orange
# while it waits for its first token, blue while it's being answered.

# %%
finite = [measurement for measurement in measured if measurement.rate < INF]
fastest = max(finite, key=lambda measurement: measurement.rate)
fig, ax = style.figure(9, 3.6)
draw.requests(ax, fastest)
ax.set_title(f"At {fastest.rate:.3g}/s the slowest takes {max(fastest.latencies):.1f} s")
style.finish(fig, "06_requests", f"measured, {machine.system}, one repeat")

# %% [markdown]
# Why do requests get in each other's way? In one step the server computes at most 2,048 tokens (a setting
# of 05). Each answer that has begun gets one of them, and new prompts get the rest. A step with prompts in
# it takes longer. So while newcomers' prompts are read, everybody who's in the middle of an answer waits.
#
# At the dotted line the last request is sent, and after it the queue only gets shorter. Now imagine the
# same test with twice as many requests. The queue would grow for twice as long, and the last request would
# wait about twice as long. Nothing about the server has changed, though.
#
# **Beyond the knee, TTFT and TPOT measure the length of the test, not the server.**
#
# ## 7. How fast could it be?
# Is 200 ms to the first token good? You can't tell without knowing what's possible. So we compute a
# **floor**: the least time that this work takes on this machine, whatever the software.
#
# - **TTFT.** Before the first token, the whole prompt has to go through every layer. How many operations
#   that takes follows from the model's `config.json`. Divide it by the machine's **peak**, the most
#   operations that it can do per second.
# - **TPOT.** Every decode step has to read all the weights from memory, and the cache of the request.
#   Divide these bytes by the memory's **bandwidth**, in bytes per second.
# - **A queue** has a higher floor of its own. If 30 prompts arrive at once, even a perfect machine reads
#   them one after the other, so the median one waits for half of them.
#
# Peak and bandwidth of an accelerator are in its data sheet. For a CPU we measure one core and multiply by
# the number of cores. That makes the machine look a little too fast and the floors a little too low, which
# is the harmless direction: we won't call a measurement impossible that isn't.

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
# The tiny model stays far above its floors. Its arithmetic is so small that the Python around it takes
# nearly all of the time. For a big model it's different: two H100s that were kept busy read the 31B's
# prompts in 2.5 times their floor (computed in [10](10_published.ipynb) from published numbers).
#
# ### Can anybody be faster than the hardware?
# A floor is most useful for numbers that somebody else has measured. Here are all the TTFTs of a published
# sweep over this very model, on eight v6e chips and on two H100s. A point had 30 prompts. (Only the series
# with the longest prompts doesn't fit that: its numbers look like 7 prompts, and [10](10_published.ipynb),
# section 6, says why.) The more prompts wait in line, the higher the floor under the median, so we compute
# the floor for each point:

# %%
published = pd.read_csv("data/published/qps_sweep_digitized.csv").query("metric == 'ttft'")
big = helpers.read_json("data/configs/gemma4_31b.json")
peaks = {"tpu": 8 * hardware.chip("v6e").flops, "gpu": 2 * hardware.chip("h100").flops}
least_ms = []
for point in published.itertuples():
    is_longest = point.input_tokens == "~16k"
    tokens, prompts = (15_360, 7) if is_longest else (int(point.input_tokens), 30)
    seconds = physics.prefill_flops(big, tokens) / peaks[point.device]
    least_ms.append(1e3 * physics.median_ttft_floor_fcfs(prompts, point.qps, seconds))
published = published.assign(floor_ms=least_ms, too_fast=least_ms > 1.2 * published.value,
                             machine=published.device.map({"tpu": "v6e-8", "gpu": "2 x H100"}))

# %%
fig, ax = style.figure(6.5, 4.2)
draw.against_floors(ax, published)
ax.set_title(f"{published.too_fast.sum()} of {len(published)} published points are impossible")
style.finish(fig, "06_published", "read off the figure on p. 15 of the paper's draft, about 1 % "
             "error; hollow: 1.2 times below the floor or more")

# %% [markdown]
# The hollow points lie below the line, so no machine with these chips can have read those prompts in that
# time. That doesn't mean that anybody cheated. **What do you think was measured there instead?**
#
# <details><summary>Answer</summary>
#
# Most likely the prefix cache of section 3. The same client with the same seed sends the same prompts at
# every rate, so all but the first rate find them in the cache. [10](10_published.ipynb), section 5, checks
# this: the times fall just where the prompts fit into the cache. In general a point below its floor means
# that other work was measured than the label says: cached prompts, shorter prompts, a wrong peak, or a
# client so short of CPU that it read several tokens at once.
# </details>
#
# **Compute the floor before you believe a latency, and start with your own.**
#
# ## 8. What does a token cost?
# The machine costs the same whether it works or not. So tokens are cheapest when it's full, and when it's
# full, users queue. How do you choose? Let's draw the wait against the price. Each point is one rate, the
# bars are the range of its repeats, and the line joins the rates that the server keeps up with. The
# overloaded ones stand apart, because we know from section 6 that their wait measures our test.

# %%
unit = "hours of the machine" if math.isnan(machine.dollars_per_hour) else "USD"
fig, ax = style.figure(8, 4.2)
draw.cost(ax, table, cfg.slo[0], unit)
ax.set_title("The fuller the machine, the cheaper the token")
style.finish(fig, "06_cost", f"measured, {machine.system}; medians, range of the repeats; "
             "hollow: beyond the knee")

# %% [markdown]
# Read it from right to left: the rate rises, the price falls. Where the line dips and the bars overlap,
# that's the noise of section 4.
#
# So which rate would you promise? We take the largest one up to the knee at which nine requests in ten kept
# the objective. But be careful: a run of a few seconds can't show a queue that grows slowly. So the rate
# first has to survive **one long run**, at least twenty times as long as a request takes. If it doesn't
# hold, we try the next lower one. And if the long run delivers far less than the server has already shown
# it can, something disturbed it, so we make it once more.

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
# The last number is the one for your budget. Nobody's service is busy all day, and at 30 % use each token
# costs more than three times as much.
#
# **A price per token is true only at a rate that holds, and only for a machine that's busy.**
#
# ## 9. What changes with your own traffic?
# So far all prompts were random. They never begin alike, and their answers never end by themselves. Yours
# do both. With `--dataset-name custom` the client reads your prompts from a file, one `{"prompt": ...}` per
# line.
#
# As an example we take the eight longest requests of 07. Each is asked twice, since 07 also asks each
# problem more than once.

# %%
tokenizer = chat.load_tokenizer(options.model)
own = helpers.run_dir("bench", "own.jsonl")  # ← your file: set the path, drop the rest of the cell
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
# We send them at a quarter of the rate that the server can take, so that no queue gets in the way.

# %%
lengths = []
for line in texts.json_lines(own.read_bytes()):
    lengths.append(len(tokens_of(line.value["prompt"])))
own_regime = (max(lengths), 128)  # the most tokens of a prompt and of an answer
quarter = float(f"{table.delivered_rps.max() / 4:.2g}")  # of what it can take, per second
traffic = {"requests": load.check_prompts(own), "rate": quarter, "prompts": own}

# %% [markdown]
# And we send them to two servers: the one of 05, which has no prefix cache, and one that has it. **Each
# prompt comes twice. What would you expect of the second time?**

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
# Half of all prompt tokens had been sent before, but fewer than half came from the cache. That's because it
# keeps whole blocks only: a prompt that's shorter than a block never profits, and of a longer one only the
# full blocks count.
#
# If your users share a long system message, turn the cache on in 05 (`prefix_caching=True`). But remember
# what its numbers say: how repetitive the traffic was. Give them beside the cold ones, never instead.
#
# **Measure with the traffic you'll really have, and say whether the cache was on.**
#
# ## Recap
# - A user waits for the first token (prefill), and then for each further one (decode).
# - The knee is the last rate that the server keeps up with. Beyond it, latencies measure the test's length.
# - You can trust a point because of how it was made: no cache, fresh prompts, three repeats. A price needs
#   a long run as well.
# - A floor beside each latency shows what's possible, and what can't be true.
# - Tokens are cheapest on a full machine, where users queue.
#
# If something goes wrong, look for the symptom in
# [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. At its knee, which share of the machine's peak does the server use to read prompts?
#
# <details><summary>Solution</summary>
#
# ```python
# for (inputs, outputs), (last, _) in knees.items():
#     print(inputs, f"{last * physics.prefill_flops(config, inputs) / machine.peak:.1%}")
# ```
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
# 3. A drafter (05) proposes four tokens, and the model checks them in one step. Say it accepts two, so a
#    step makes three tokens. But each request now costs the arithmetic of five tokens per step instead of
#    one. Up to how many requests at once is that free for the 31B on a v6e-8?
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
# 91 requests are as many as fit into the cache of 05, and even then every step still waits for memory, not
# for arithmetic. So by these floors the drafter could at best triple the speed, before its own cost.
# </details>
#
# Next: [07 · pass@k that can be believed](07_eval.ipynb)
