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
# | **Time and cost** | tiny: two to four minutes. 31b: about 2.3 hours of a v6e-8, 50 USD at 21.52 USD/h (section 4 works it out for your server); a v5e-8 has a shorter plan, about half an hour |
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
# "How fast is the server?" has no single answer, because it depends on how long the prompts and the answers
# are, and on how many people ask. So we need three words:
#
# - A **regime** is a prompt length and an answer length, in tokens: 64/16 means 64 in and 16 out.
# - A **rate** is how many requests arrive per second. A regime at one rate is a **point**.
# - The **objective** (you'll also see SLO, service-level objective) is what you'd promise a user: how many
#   milliseconds the first token may take at most, and how many each further one.
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
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
from IPython.display import display

from helpers import chat, records, style
from serving import asking, draw, limits, load, results, server, traffic
from serving import options as serve
from serving.load import Client, Load, sweep
from tables import architecture, hardware, physics

# %%
INF = math.inf
FULL = Load(regimes=((1024, 256), (4096, 512), (15360, 512)), warmups=4)
E2B = Load(regimes=((512, 256), (2048, 256)), warmups=4, slo=(1000, 40))
TINY = Load(regimes=((64, 16),), rates=6, seconds=2.2, min_requests=10, long=5.0, slo=(1000, 100))
V5E = Load(regimes=((1024, 256), (2048, 256)), rates=3, repeats=2, seconds=45.0, long=180.0,
           warmups=4)  # half an hour of a free session; fits every try of serving/v5e.py
LARGE = V5E if hardware.here().slice == "v5e-8" else FULL
cfg = helpers.choose({"31b": LARGE, "e2b": E2B, "tiny": TINY})
PRICE = 0.0  # dollars an hour, of all chips; 0: the published price, if there is one
names = ", ".join(f"{inputs}/{outputs}" for inputs, outputs in cfg.regimes)
print(f"regimes: {names}; objective: {cfg.slo[0]} ms to the first token, {cfg.slo[1]} ms for each "
      "further one")

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
request = asking.chat_request(counter, system, thinking, model=record.name,
                              max_tokens=record.max_model_len // 2)

# %% [markdown]
# We send it once to warm up the client, then five times, and draw the run in the middle. **Does most of the
# time pass before the first token, or after it?**

# %%
asking.streamed(openai, record, request)
runs = sorted((asking.streamed(openai, record, request) for _ in range(5)),
              key=lambda run: run[0][-1])
arrivals, _, made = runs[2]
gap, doubt = limits.pace(arrivals, made)
fig, ax = style.figure(7, 1.9)
draw.timeline(ax, arrivals, gap)
ax.set_title(f"One request alone: {1e3 * arrivals[-1]:,.0f} ms, "
             f"{arrivals[0] / arrivals[-1]:.0%} of it before the first token")
style.finish(fig, "06_timeline", f"measured, {options.engine}")
if doubt:
    print(doubt)

# %% [markdown]
# Orange is the **time to first token** (TTFT, as in 05): prefill. Blue is the rest of the answer, with a white line for
# each piece that arrived. Its mean step is the **time per output token** (TPOT): decode. When others use the server,
# both times grow, but for different reasons, so we keep them apart.
#
# **A user waits twice: once for the first token, then a little for each further one.**
#
# ## 3. How do you measure a server that many people use?
# You need a client that behaves like many people, and vLLM brings one. `vllm bench serve` sends random
# prompts of a given length at a given rate, and notes the times of every request. Here's the command for
# one point, without its end, which only says what to save:

# %%
client = Client(folder)  # one process for all points; importing vLLM takes ten seconds
regime = cfg.regimes[0]
words = load.arguments(record, cfg, load.Point(regime, 4, 2 * cfg.min_requests), seed=7)
what, _, saved = " ".join(words).partition(" --temperature")
print("vllm", what.replace(" --", " \\\n    --"), "...")

# %% [markdown]
# Three things make points comparable:
#
# - `--ignore-eos` makes all answers equally long.
# - The gaps between requests are random, but scaled so that n requests arrive in n / rate seconds.
# - Before each point we wait until the server is idle, or we'd measure what somebody else left behind.
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
# Those around which the server stops keeping up. We don't know them beforehand, so we search:
#
# - A few requests, one after the other, show how long one takes **alone**.
# - Two **bursts**, where all requests arrive at once, show roughly how many the server can finish per second. (They
#   only steer the search. The bursts in the table and the figures come later, with more requests.)
# - From there the search goes up until one rate is clearly too much, and down until one is clearly fine.
# - *Bisection* narrows down the rest: it tries the rate in the middle until the next rate above the largest one that
#   the server keeps up with is at most 25% higher.
# - A rate that leaves a doubt is repeated right away. The others are measured once or twice more, in later rounds. So
#   if the machine slowly gets busier, their repeats drift apart.
# - If results contradict each other, we measure that rate again, up to twice. An example is a rate below the first
#   overloaded one whose repeats lie more than a fifth apart. If that doesn't help, the table calls it *noisy*.
#   (`results.noisy` has the four rules.)
#
# How long will that take?

# %%
config = architecture.read_config(options.model)
machine = limits.machine_of(options, config, PRICE)
regimes = len(cfg.regimes)
count = regimes * (cfg.repeats * (cfg.rates + 1) + 2)
hours = (count * 1.4 * cfg.seconds + regimes * cfg.long) / 3600
print(f"about {count} short measurements, then a long one per regime: "
      f"at least {60 * hours:.0f} min, and longer where a request takes long")
if options.chip:
    print(f"that is {hours * machine.dollars_per_hour:.0f} USD")

# %% [markdown]
# Now we search. Behind each rate you'll see which share of it was delivered. (Each measurement is a file, so if you
# interrupt the sweep, it continues where it was.)

# %%
measured = sweep(client, options, cfg, results_in)

# %% [markdown]
# Every measurement becomes one row of `results.csv`. Each latency has its *floor* beside it: the least time
# that's physically possible (section 7).

# %%
table = results.rows(measured, cfg.slo, machine.dollars_per_hour)
floors = [limits.floors(measurement, machine, config) for measurement in measured]
table = table.join(pd.DataFrame(floors))
helpers.write_text(results_in / "results.csv", table.to_csv(index=False))

# %% [markdown]
# In this summary each rate is one row, the median of its repeats. `delivered` says how many requests per
# second were answered, and `in time` which share of them kept the objective. **p90** is the time that nine
# requests in ten stayed below. A rate of `inf` means all at once. Section 5 explains `state`.

# %%
REGIME = ["input_len", "output_len"]
style.words(results.summary(table))

# %% [markdown]
# <details><summary><b>How exactly are these computed?</b></summary>
#
# Latencies include every completed request, even those that arrive while the load builds up. `delivered`
# divides the answered requests by the length of the run without its idle end: when nothing arrives any more, the last
# request still takes as long as one alone (`results.delivered_rate` has the exact rule). `results.csv` also has the
# median request (p50), the time that 99 in 100 stayed below (p99), and *goodput*: `delivered` times `in time`.
# </details>
#
# More load shouldn't make a server deliver less or answer sooner. If the table says so all the same, look at the
# bars in the figures below, from the smallest repeat to the largest. Where two overlap, the dip may be noise.
#
# **Believe a difference only if it's larger than the spread of the repeats.**
#
# ## 5. Up to which rate would you promise anything?
# Look at `delivered` and TTFT in the table above before you open the answer.
#
# <details><summary>Answer</summary>
#
# While the server keeps up, it delivers what's offered, and TTFT grows slowly. Then `delivered` levels off,
# and every further request only makes the queue longer.
# </details>
#
# The repeats of a rate say which of three states it's in:
#
# - A server has *kept up* with a rate if **every** repeat delivered at least 90% of it.
# - A rate is *overloaded* if **no** repeat delivered 90% of it. A rate more than 2% above anything that was ever
#   delivered is overloaded as well, even if a short run answers 92% of it: in a longer one the queue would keep
#   growing.
# - In between, the repeats disagree. Such a rate is *at the limit*.
#
# The **knee** is the largest rate that was kept up with, below the first overloaded one. Below the knee every rate
# counts as kept up, and above an overloaded one every rate as overloaded, because more load can't be easier. (A repeat
# that delivered less than four fifths of the median repeat was disturbed and doesn't count.)

# %%
fig, ax = style.figure(7, 3.8)
draw.curves(ax, table, "delivered_rps", "delivered, requests/s", "rate", "offered")
knees = {regime: results.kept_up(part) for regime, part in table.groupby(REGIME)}
kept = [f"{low:g}/s of {inputs}/{outputs}" for (inputs, outputs), (low, _) in knees.items()]
ax.set_title("It keeps up with " + ", ".join(kept))
style.finish(fig, "06_throughput", f"measured, {machine.system}; medians, bars: smallest and "
             "largest; gray: at the limit; hollow: overloaded")
for (inputs, outputs), (last, above) in knees.items():
    print(f"{inputs}/{outputs}: it keeps up with {last:g}/s, and {above:g}/s is too much")

# %% [markdown]
# Up to the knee the curve stays close to the dashed line, because any server that keeps up delivers what's
# offered. So below the knee, throughput can't tell a fast server from a slow one. The burst can lie higher than all
# rates, because a server that has many prompts at hand reads several of them in one step.
#
# How exact is the knee? If a run lasts only a few times as long as one request, `delivered` comes out too low, by up to
# a fifth (simulated). So the true knee may lie a little higher. But a longer run may also show a queue that this one
# was too short for. That's why section 8 decides what you can promise.
#
# **Compare throughput beyond the knee, and latency below it.**
#
# ## 6. Why can't we compare latencies beyond the knee?
# Here's every request at an overloaded rate, and below it at one that the server keeps up with. (Right of the
# dotted line nothing new arrives.) **What would the upper picture look like with twice as many requests?**

# %%
part = table[(table.input_len == regime[0]) & (table.output_len == regime[1])]
overloaded, calm = results.overloaded_rate(part), results.calm_rate(part)
shown = {rate: results.first_of(measured, regime, rate) for rate in (overloaded, calm)}
names = {rate: "all at once" if rate == INF else f"{rate:g}/s" for rate in shown}
fig, panels = style.figure(7, 5.4, rows=2, sharex=True)
for ax, (rate, run) in zip(panels, shown.items(), strict=True):
    draw.requests(ax, run)
    ax.set_title(f"{names[rate]}: the slowest request takes {max(run.latencies):.1f} s")
panels[0].legend(fontsize=9, loc="best")
panels[0].set_xlabel("")
style.finish(fig, "06_requests", f"measured, {machine.system}, one repeat of each")
if overloaded == INF:
    print("no rate of this run was overloaded, so the upper picture shows a burst")

# %% [markdown]
# Let's count how many requests have no whole answer yet, at three moments of each run:

# %%
for rate, run in shown.items():
    quarter, half, end = results.under_way(run)
    print(f"{names[rate]:11}: {quarter} under way when a quarter was sent, {half} at half, {end} "
          "when all were")
first, further = results.slower_by(shown[overloaded], shown[calm])
print(f"{names[overloaded]} against {names[calm]}, by medians: {first:+,.0f} ms until the first "
      f"token, {further:+,.0f} ms from there to the last")

# %% [markdown]
# <details><summary>Answer</summary>
#
# An overloaded server falls further behind as long as requests arrive. So with twice as many, more would be under way
# at the end, and they'd take longer still, on the very same server. In the lower picture next to nothing would change.
# </details>
#
# Where do they wait? A step computes at most 2,048 tokens (05): one for each answer that has begun, the rest for new
# prompts. As long as those fit in, newcomers are let in at once. But everybody shares the steps, and steps with prompts
# take longer, so **TPOT** grows. If prompts are long, or the server already answers as many as it may, newcomers stand
# in line, and **TTFT** grows. The last line above says how much of each this run shows.
#
# **Beyond the knee, latencies measure the length of the test, not the server.**
#
# ## 7. How fast could it be?
# Is the TTFT that you see above good? You can't tell until you know what's possible. The **floor** is the
# least time that this work takes on this machine, whatever the software.
#
# - **TTFT.** The whole prompt has to go through every layer. `config.json` tells us how many operations that
#   takes. Divide them by the machine's **peak**, its operations per second.
# - **TPOT.** Every decode step has to read all weights and the request's cache. Divide those bytes by the
#   memory's **bandwidth**, its bytes per second.
# - **A queue** has a higher floor. If 30 prompts arrive at once, the median one waits for half of them,
#   even on a perfect machine.
#
# Peak and bandwidth of an accelerator are in its data sheet. For a CPU we measure one core and multiply by
# the number of cores. Two cores are a little less than twice as fast as one, so our floor is slightly too low.
# That's the safe side: we'll never call a possible time impossible. (A GFLOP is a billion operations.)

# %%
work = physics.prefill_flops(config, regime[0])
print(f"{machine.system}: {machine.peak / 1e9:,.3g} GFLOP/s, {machine.bandwidth / 1e9:.3g} GB/s; "
      f"a prompt of {regime[0]} tokens takes {work / 1e9:.3g} GFLOP")

# %%
busy = results.while_it_keeps_up(table)
times = (busy.ttft_p50_ms / busy.ttft_queue_floor_ms).groupby(busy.rate).median()
fig, ax = style.figure(7, 3.8)
draw.curves(ax, table, "ttft_p50_ms", "median TTFT, ms (log scale)", "ttft_queue_floor_ms",
            "the floor")
ax.set_title(f"While it keeps up, TTFT is {results.two_digits(times.min())} to "
             f"{results.two_digits(times.max())} times its floor")
style.finish(fig, "06_latency", f"measured, {machine.system}; medians, range of the repeats")

# %%
print("\n".join(sorted(set(table.flag) - {""})) or "nothing is below its floor")
if measured[0].series.speculation:
    print("tokens per step, with the drafter:", measured[0].series.speculation)

# %% [markdown]
# A tiny model stays far above its floor, because the arithmetic is the smallest part of what happens. For the
# 31B it isn't: by published numbers (the last figure of this section), two busy H100s read its prompts in about three
# times their floor. What does the floor of a decode step look like there?

# %%
big = architecture.read_config("data/configs/gemma4_31b.json")
v6e8 = limits.machine_of(serve.Options(engine="tpu-docker", chip="v6e", tensor_parallel=8), big)
reading = limits.step_bytes(big, v6e8.options) / v6e8.bandwidth
computing = physics.decode_flops(big, 1, 1024) / v6e8.peak
print(f"the 31B on a {v6e8.system}, one decode step: reading all weights takes "
      f"{1e3 * reading:.2f} ms, the arithmetic for one request {1e3 * computing:.4f} ms")

# %% [markdown]
# So a step waits for memory, not for arithmetic, as long as few requests share it. That's why the 31B's server could
# answer many at once and be hardly slower for each. (The tiny one can't. Its steps hardly wait for memory.)
#
# ### Can anybody be faster than the hardware?
# Floors are most useful for other people's numbers. Here's a published sweep over the 31B, on eight v6e
# chips and on two H100s, with 30 prompts per point. (For the longest prompts we count 7 instead of 30;
# [10](10_published.ipynb), section 6, says why.) The more prompts wait in line, the higher the floor under
# their median, so each point has its own:

# %%
published = limits.published_floors(pd.read_csv("data/published/qps_sweep_digitized.csv"), big)
fig, ax = style.figure(6.5, 4.2)
draw.against_floors(ax, published)
ax.set_title(f"{published.too_fast.sum()} of {len(published)} published points are impossible")
style.finish(fig, "06_published", "read off the figure on p. 15 of the paper's draft, about 1% "
             "error;\nhollow: less than 1/1.2 of the floor; longest prompts counted as 7")

# %% [markdown]
# A point on the dashed line would use the machine perfectly. The hollow points lie in the shade, well below it, and no
# machine with these chips can read those prompts in that time.
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
# ## 8. What can you promise, and what does it cost?
# Could you promise the largest rate that the server keeps up with, and at which nine requests in ten kept the
# objective? Not yet, because a run of seconds can't show a queue that grows slowly. So the rate first has to survive
# **one long run**, at least twenty times as long as a request takes. If the rate doesn't hold, we try the next lower
# one. (If a long run delivers far less than the sweep did, we assume that something disturbed it, and repeat it once.)

# %%
runs = load.confirm(client, options, cfg, results_in, table)
held = [run for run in runs if run.held]
fig, ax = style.figure(7, 3.4)
draw.promise(ax, table, runs)
names = ", ".join(f"{run.rate:g}/s of {load.name_of(run.regime)}" for run in held)
ax.set_title(f"Promise {names}" if held else "No rate held: nothing can be promised")
style.finish(fig, "06_promise", f"measured, {machine.system}; medians, range of the repeats")

# %% [markdown]
# **Promise the largest rate whose long run held the objective.**
#
# ### What does a token cost?
# A machine costs the same whether it works or not. So a token gets cheaper as long as the server delivers
# more of them. (Beyond the knee it may deliver no more, or fewer. Then a token gets no cheaper, or dearer.)

# %%
unit = "hours" if math.isnan(machine.dollars_per_hour) else "USD"
fig, ax = style.figure(7, 3.4)
draw.price(ax, table, unit, held)
ax.set_title("More tokens an hour, cheaper tokens")
style.finish(fig, "06_cost", f"measured, {machine.system}; medians, range of the repeats; "
             "gray: at the limit; hollow: overloaded")

# %% [markdown]
# What's that at the rate that held? Nobody's service is busy all day, so the second number is the first one divided by
# 0.3. (Where a machine has no price, we count its hours.)

# %%
for run in held:
    row = results.rows([run.measurement], cfg.slo, machine.dollars_per_hour).iloc[0]
    price = row.usd_per_million_output if unit == "USD" else row.hours_per_million_output
    print(f"{load.name_of(run.regime)} at {run.rate:g}/s: a million output tokens cost {price:.2g} "
          f"{unit} on a machine that's always this busy, {price / 0.3:.2g} {unit} if it's busy "
          "30% of the time")
if not held:
    print("no rate held, so there's no price that anybody could count on")

# %% [markdown]
# Budget with the last number.
#
# **A price per token counts only at a rate that holds, and only for a machine that's busy.**
#
# ## 9. What changes with your own traffic?
# Real prompts often share a beginning, and real answers end by themselves. The random ones so far did
# neither. With `--dataset-name custom` the client reads prompts from a file, one `{"prompt": ...}` per line.
# We take the six longest requests of 07 and ask each of them twice, because 07 asks for several answers, too.
# And we send them about as fast as one user would who asks again right after each answer.

# %%
tokenizer = chat.load_tokenizer(options.model)
own = helpers.run_dir("bench", "own.jsonl")  # ← your file: set its path, and drop the rest
prompts = []
for path in sorted(Path("data/tiny_eval").glob("*_prompt.txt")):
    messages = asking.chat_request(path.read_text(), system, thinking)["messages"]
    prompts.append(chat.prompt_ids(tokenizer, messages, thinking))
longest = sorted(prompts, key=len)[-6:]
traffic.write(own, record, 2 * longest, tokenizer.decode)

# %% [markdown]
# Every prompt comes twice, so at least half of the tokens have been there before. But a prefix cache keeps
# only whole blocks of tokens, and the last token of a prompt is always computed, because something has to say what
# follows it. **How many of the tokens can it save?**

# %%
sent = traffic.read(own, record)
block = int(asking.counters(record)["cache"]["block_size"])
hits = traffic.reusable(sent, block)
tokens = sum(len(ids) for ids in sent)
print(f"{tokens:,} prompt tokens; in whole blocks of {block} a cache has {sum(hits):,} of them, "
      f"{sum(hits) / tokens:.0%}, for {sum(hit > 0 for hit in hits)} of {len(hits)} requests")

# %% [markdown]
# Six requests are second ones. If that line counts fewer, some prompt is no longer than one block. Without its last
# token the block isn't whole, so it isn't kept.
#
# Now we measure two servers in turn, twice each: the one of 05, whose cache is off, and a second one with the cache on.
# A salt hides from the cache what was sent in an earlier run. (On chips we leave the second server out. They have room
# for one only, so it would cost two starts.)

# %%
own_regime = (max(len(ids) for ids in sent), 128)  # the most tokens of a prompt and of an answer
own_point = load.Point(own_regime, float(f"{1 / arrivals[-1]:.2g}"), load.check_prompts(own), own)


def own_run(options, record, name):
    """One run of our own requests at this server, after one that doesn't count."""
    asking.post(record, "/v1/completions",
                {"model": record.name, "prompt": prompts[0], "max_tokens": 8})
    client.record = record
    run = load.Bench(client, options, cfg, results_in).measure(own_point, name)
    assert run.raw["total_input_tokens"] == tokens, "other prompts were sent"
    print(f"{name}: TTFT {run.percentile('ttft', 50):,.0f} ms, "
          f"{run.series.cached_tokens:,.0f} tokens came from the cache")
    return run


# %%
if options.chip:
    own_run(options, record, "own-off-1")
else:
    warm = replace(options, prefix_caching=True, port=0)
    place = helpers.run_dir("serve", "warm")
    off, on = [], []
    with server.running(warm, place):
        for turn in (1, 2):
            off.append(own_run(options, record, f"own-off-{turn}"))
            on.append(own_run(warm, server.current(place), f"own-on-{turn}"))
    display(style.words(traffic.compare(off, on, hits)))
client.close()

# %% [markdown]
# Each entry is the median request of both runs, with the fastest and the slowest in brackets. We speak of a difference
# only if the median with the cache lies outside everything that was seen without it, on the same side in both runs. The
# first row is what the cache is for. The other requests compute as much as before, and decoding doesn't use this cache,
# so there we expect *within the spread*. If a row surprises you, in either direction, don't explain it away: two runs
# of a dozen requests can't tell a cause from an accident, so measure again with more.
#
# If your users share a long system message, turn the cache on in 05 (`prefix_caching=True`). But a number
# with a warm cache also measures how repetitive your prompts are. Report it next to the cold number, not in
# its place.
#
# **Measure with the traffic you'll really have, and say whether the cache was on.**
#
# ## Recap
# - The knee is the largest rate that the server keeps up with in every repeat. Beyond it, latencies measure
#   the test's length.
# - You can trust a point because of how it was made: without a cache, with fresh prompts, in several repeats. A
#   promise and a price need a long run, too.
# - The floor beside a latency says what's possible, and what can't be true.
#
# If something goes wrong, look up the symptom in
# [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. How many requests are under way at the knee, on average? Guess it from two columns of `results.csv`:
#    `print(table[["rate", "delivered_rps", "e2el_p50_ms"]])` shows how many requests per second are answered, and how
#    many milliseconds one takes from start to end. Then look at the column `in_flight`, the mean number under way. What
#    did you have to know about the server?
#
# <details><summary>Solution</summary>
#
# Requests per second, times the seconds that each of them stays: that's *Little's law*. You needn't know anything
# about the server, because it's only counting. (The cell below takes the median latency, and the law is about the
# mean, so the two numbers differ.)
# </details>
#
# 2. One request has a prompt 100 times as long as the others. Whose TTFT grows? And why doesn't the server
#    answer the short ones first?
#
# <details><summary>Solution</summary>
#
# The TTFT of everybody who came after it. The server reads prompts in the order in which they arrive, in
# pieces of 2,048 tokens (section 6). And while it reads these pieces, everybody's TPOT grows.
#
# Shortest first would be quicker on average. But as long as short prompts keep coming, the long one would never be
# read. And nobody knows beforehand how long an answer will be, so "short" can only mean the prompt.
# </details>
#
# 3. A drafter (05) proposes four tokens, and the model checks them in one step. If it accepts two, the step
#    makes three tokens, but it costs the arithmetic of five. Take the 31B's numbers from section 7. Up to
#    how many requests at once does such a step still wait for memory?
#
# <details><summary>Solution</summary>
#
# As long as five times the arithmetic of all requests takes less than the reading, so divide the reading by
# five times the arithmetic. (The requests' own cache has to be read, too, so it's even more.) The cache of the
# v6e-8 holds 187,643 tokens (05, section 5), or 91 requests of 2,048, so it's full before the arithmetic
# counts. With such requests the drafter could at best triple the speed, before its own cost.
# </details>

# %%
last = knees[regime][0]
at_knee = table[(table.rate == last) & (table.input_len == regime[0])].median(numeric_only=True)
counted = at_knee.delivered_rps * at_knee.e2el_p50_ms / 1e3
answers = [("1", "under way: by the law, in_flight", f"{counted:.2g}, {at_knee.in_flight:.2g}"),
           ("3", "requests at once", f"{reading / (5 * computing):.0f}")]
style.folded("The numbers for exercises 1 and 3",
             pd.DataFrame(answers, columns=["exercise", "what", "number"]))

# %% [markdown]
# Next: [07 · pass@k that can be believed](07_eval.ipynb)
