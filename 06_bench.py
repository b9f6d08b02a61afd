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
# # 06 · How fast is it, and how fast could it be?
#
# How many people can use the server of notebook 05 before they notice each other? In our stored run the tiny model's
# server, on two CPU cores, answered in time at 120 requests a second: the first token came within a second, and each
# further one within 100 ms. We time one request, then many, and find the rate at which a queue begins. We also show what
# physics would allow, and what a token costs.
#
# | | |
# |---|---|
# | **Needs** | the server of 05; if it has ended, it's started again. No JAX, no accelerator of its own |
# | **Reads** | `serve/`, `merge.json` of 04, the model's `config.json` |
# | **Writes** | `bench/*.json` (every measurement, raw), `bench/results.csv` (one row each), figures |
# | **Time and cost** | tiny: one and a half to four minutes. 31b: about 2.3 hours of a v6e-8, 50 USD at 21.52 USD/h (section 4 works it out for your server); a v5e-8 has a shorter plan, about half an hour |
#
# You see the outputs of the tiny run on a CPU.

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
# **How fast is the server?** That depends on how long the prompts and the answers are, and on how many people ask. So
# we need a few words:
#
# - A **regime** is a prompt length and an answer length, in tokens: 64/16 means 64 in and 16 out.
# - A **rate** is how many requests arrive per second. A regime at one rate is a **point**.
# - The **objective** (SLO, service-level objective) is what you'd promise a user: how many milliseconds the first token
#   may take at most, and how many each further one.
#
# Requests arrive at random moments (as a Poisson process), whether or not the server is ready. Such a test is an **open
# loop**.
#
# <details><summary><b>Why not simulate 30 users who each ask again as soon as they have an answer?</b></summary>
#
# Because then a slow server is asked less often, and its queue can't grow. Such a *closed loop* makes slow servers look
# good.
# </details>

# %%
import math
from pathlib import Path

import pandas as pd

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
# Before we send many requests, let's see what a single user gets. We ask the server of 05 for the up-down counter.

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
# We send it once to warm up the client, then five times, and draw the run that takes the median time. **Does most of the
# time pass before the first token, or after it?**

# %%
asking.streamed(openai, record, request)
runs = sorted((asking.streamed(openai, record, request) for _ in range(5)),
              key=lambda run: run[0][-1])
arrivals, _, made = runs[2]
gap, doubt = limits.pace(arrivals, made)
fig, ax = style.figure(7, 1.9)
draw.timeline(ax, arrivals, gap)
title = f"One request alone: {1e3 * arrivals[-1]:,.0f} ms"
if not doubt:
    title += f", {arrivals[0] / arrivals[-1]:.0%} of it before the first token"
ax.set_title(title)
style.finish(fig, "06_timeline", f"measured, {options.engine}")
if doubt:
    print(doubt)

# %% [markdown]
# Orange is the **time to first token** (TTFT, as in 05): prefill. Blue is the rest of the answer, with a white line for
# each piece that arrived. Divide the blue part by the tokens in it, and you have the **time per output token** (TPOT):
# decode. (If a line below the figure says that this client read late, then the orange part is too long and the blue one
# too short. So run the cell again.)
#
# **A user waits twice: once for the first token, then a little for each further one.**
#
# ## 3. How do you measure a server that many people use?
# You need a client that behaves like many people, and vLLM brings one. `vllm bench serve` sends random prompts of a
# given length at a given rate, and notes the times of every request. Here's the command for one point:

# %%
client = Client(folder)  # one process for all points; importing vLLM takes ten seconds
regime = cfg.regimes[0]
words = load.arguments(record, cfg, load.Point(regime, 4, 2 * cfg.min_requests), seed=7)
what, _, saved = " ".join(words).partition(" --temperature")
print("vllm", what.replace(" --", " \\\n    --"), "...")

# %% [markdown]
# `--ignore-eos` makes all answers equally long. And before each point we wait until the server is idle.
#
# <details><summary><b>A prefix cache keeps what a server has computed for earlier prompts. You measure two points with
# the same seed. What does the second one measure?</b></summary>
#
# The cache, because the same seed makes the same prompts. So each of our measurements has a seed of its own, and the
# cache is off. To be sure, we also read how many tokens the server itself counted as cached.
# </details>
#
# **Every measurement gets an idle server, fresh prompts, and no cache.**
#
# ## 4. Which rates are worth measuring?
# **Where does the server stop keeping up?** Only rates near that limit are interesting, so we search for it. A few
# requests, each **alone**, and two **bursts**, where all requests arrive at once, give a first guess. From there we close
# in on two rates that are at most 25% apart: the server keeps up with one of them, and not always with the other. We
# measure a rate two or three times, as a rule, so you also see how much the machine itself varies.
#
# <details><summary>How does the search choose its rates?</summary>
#
# It goes up until a rate is clearly too much, and down until one is clearly fine. Then it tries rates in between. Some
# of the repeats come much later. If the results for a rate contradict each other, it's measured again, up to twice. If
# they still do, the table calls that rate *noisy*.
# </details>
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
# Now we search. Next to each rate you'll see what share of it was delivered, and next to a burst how many requests per
# second. (Each measurement is a file, so if you interrupt the search, it continues where it was.)

# %%
measured = sweep(client, options, cfg, results_in)

# %% [markdown]
# Below, each rate is one row, the median of its repeats. `delivered` says how many requests per second were answered.
# `in time` is the share of them that kept the objective, both for the first token and for the further ones. **p90** is
# the time that nine requests in ten stayed below.

# %%
table = results.rows(measured, cfg.slo, machine.dollars_per_hour)
floors = [limits.floors(measurement, machine, config) for measurement in measured]
table = table.join(pd.DataFrame(floors))
helpers.write_text(results_in / "results.csv", table.to_csv(index=False))
style.words(results.summary(table))

# %% [markdown]
# More load shouldn't make a server deliver less or answer sooner. If the table says so all the same, look at the
# figures below. A bar runs from the smallest repeat to the largest, so if two bars overlap, the dip may be noise. (On a
# CPU there's another possible reason: the client works on the server's own cores, and many requests keep it busy, too.)
#
# **Believe a difference only if it's larger than the spread of the repeats.**
#
# ## 5. Up to which rate would you promise anything?
# **In the table above, where does `delivered` stop following the rate, and what does TTFT do there?** The column
# `state` says it in words:
#
# - The server *kept up* with a rate if **every** repeat delivered at least 90% of it.
# - A rate is *overloaded* if **no** repeat did.
# - Where the repeats disagree, it's *at the limit*.
#
# Look only at rates below the first overloaded one. The largest of them that the server kept up with is the **knee**.
#
# <details><summary>Which three exceptions are there?</summary>
#
# A rate that's more than 2% above the most that the server ever delivered is overloaded, too: in a longer run its queue
# would keep growing. A repeat that delivered less than four fifths of the median isn't counted: something else took
# the machine. And a rate below the knee counts as *kept up* even where its repeats disagree. A smaller rate is easier, so
# that's noise, and `state` says *kept up, noisy*.
# </details>

# %%
fig, ax = style.figure(7, 3.8)
draw.curves(ax, table, "delivered_rps", "delivered, requests/s", "rate", "offered")
knees = {lengths: results.kept_up(part)
         for lengths, part in table.groupby(["input_len", "output_len"])}
kept = [f"{low:g} requests/s ({load.in_words(regime)})" for regime, (low, _) in knees.items()]
ax.set_title("It keeps up with " + ",\n".join(kept))
style.finish(fig, "06_throughput", f"measured, {machine.system}; medians, bars: smallest and "
             "largest")
for lengths, (last, above) in knees.items():
    print(f"{load.in_words(lengths)}: it keeps up with {last:g} requests/s, and {above:g} are too "
          "many")

# %% [markdown]
# Up to the knee the curve stays close to the dashed line, because any server that keeps up delivers what's offered. So
# there, throughput can't tell a fast server from a slow one. Any rate between the two that are printed above is at
# the limit: short runs disagree about it. So in section 8 a long run decides what you can promise.
#
# **Compare throughput beyond the knee, and latency below it.**
#
# ## 6. Why can't we compare latencies beyond the knee?
# The upper picture shows every request at an overloaded rate (or all at once), the lower one a rate that the server
# keeps up with. To the right of the dotted line nothing new arrives. **What would the upper picture look like with
# twice as many requests?**

# %%
part = table[(table.input_len == regime[0]) & (table.output_len == regime[1])]
shown = {"all at once" if rate == INF else f"{rate:g}/s": results.first_of(measured, regime, rate)
         for rate in (results.overloaded_rate(part), results.calm_rate(part))}
fig, panels = style.figure(7, 5.4, rows=2, sharex=True)
for ax, (name, run) in zip(panels, shown.items(), strict=True):
    draw.requests(ax, run)
    ax.set_title(f"{name}: the slowest request takes {max(run.latencies):.1f} s")
panels[0].legend(fontsize=9, loc="best")
panels[0].set_xlabel("")
style.finish(fig, "06_requests", f"measured, {machine.system}, one repeat of each")

# %% [markdown]
# <details><summary>Answer</summary>
#
# An overloaded server falls further behind as long as requests arrive. So with twice as many, the last ones would take
# longer still, on the very same server. In the lower picture no request would wait longer.
# </details>
#
# Let's count the requests that aren't answered yet, at three moments of each run:

# %%
for name, run in shown.items():
    quarter, half, end = results.under_way(run)
    print(f"{name:11}: {quarter} unanswered when a quarter of the requests was sent, "
          f"{half} when half of them was, {end} when all were")

# %% [markdown]
# At an overloaded rate the number grows as long as requests arrive. At the other rate it goes up and down.
#
# What do requests wait for? The more answers share a step, the longer each further token takes: **TPOT** grows (blue).
# Once a step has no room for another prompt, or the cache none for another request (05), newcomers stand in line:
# **TTFT** grows (orange).
#
# **Beyond the knee, latencies measure the length of the test, not the server.**
#
# ## 7. How fast could it be?
# **Is the TTFT in section 4's table good?** You can't tell until you know what's possible. The **floor** is the
# least time that this work takes on this machine, whatever the software.
#
# - **TTFT.** `config.json` tells us how many operations the whole prompt takes. Divide them by the machine's **peak**,
#   its operations per second.
# - **TPOT.** Every decode step reads all weights and the request's cache. Divide those bytes by the memory's
#   **bandwidth**, its bytes per second.
# - **A queue** has a higher floor. If 30 prompts arrive at once, the median one waits for half of them,
#   even on a perfect machine.
#
# Peak and bandwidth of an accelerator are in its data sheet. For a CPU we measure one core and multiply by the number of
# cores. That overstates the CPU a little, so we never call a possible time impossible.

# %%
busy = results.while_it_keeps_up(table)
times = (busy.ttft_p50_ms / busy.ttft_queue_floor_ms).groupby(busy.rate).median()
fig, ax = style.figure(7, 3.8)
draw.curves(ax, table, "ttft_p50_ms", "median TTFT, ms", "ttft_queue_floor_ms", "the floor")
ax.set_title(f"While it keeps up, TTFT is {results.two_digits(times.min())} to "
             f"{results.two_digits(times.max())} times its floor")
style.finish(fig, "06_latency", f"measured, {machine.system}; medians, range of the repeats; "
             "each floor is of the prompts that were drawn")

# %% [markdown]
# This floor includes the queue that the same arrivals would cause on a perfect machine. Where such a machine would have no
# queue, the floor is flat. At the last point, where all requests come at once, it jumps. **Is anything faster than its
# floor?** That would be a mistake in our measurement.

# %%
flagged = table[table.flag != ""]
for row in flagged.itertuples():
    point = load.at_rate((row.input_len, row.output_len), row.rate)
    print(f"{point}, repeat {row.repeat}: {row.flag}")
if flagged.empty:
    print("nothing is below its floor")
if measured[0].series.speculation:  # a server with a drafter (docs/SERVING.md)
    print("tokens per step, with the drafter:", measured[0].series.speculation)

# %% [markdown]
# (If a TPOT is *impossible* on a CPU, it's most likely a late client again, as in section 2.
# [TROUBLE](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md#measuring-and-judging-06-07) has the other
# causes.)
#
# Measured rightly, a tiny model stays far above its floor, because arithmetic is the smallest part of what its server
# does. **What takes longer in the 31B's decode step, reading the weights or the arithmetic?**

# %%
big = architecture.read_config("data/configs/gemma4_31b.json")
v6e8 = limits.machine_of(serve.Options(engine="tpu-docker", chip="v6e", tensor_parallel=8), big)
reading = limits.step_bytes(big, v6e8.options) / v6e8.bandwidth
computing = physics.decode_flops(big, 1, 1024) / v6e8.peak
print(f"the 31B on a {v6e8.system}, one decode step: reading all weights takes "
      f"{1e3 * reading:.2f} ms, the arithmetic for one request {1e3 * computing:.4f} ms")

# %% [markdown]
# So a step waits for memory, not for arithmetic. All requests share one reading of the weights, so the 31B's server
# could answer several at once and be hardly slower for each.
#
# ### Can anybody be faster than the hardware?
# Floors are most useful for other people's numbers. The authors of the published recipe measured the 31B at many rates,
# on eight v6e chips and on two H100s. Each of their points has 30 prompts. (Where the prompts are longest, we count 7:
# [10](10_published.ipynb), section 6, shows why.)

# %%
published = limits.published_floors(pd.read_csv("data/published/qps_sweep_digitized.csv"), big)
fig, ax = style.figure(6.5, 4.2)
draw.against_floors(ax, published)
ax.set_title(f"{published.too_fast.sum()} of {len(published)} published points are impossible")
style.finish(fig, "06_published", "read off the figure on p. 15 of the paper's draft, about 1% "
             "error;\nhollow: more than 1.2 times too fast; of the longest prompts, 7 a point, "
             "not 30 (10, section 6)")

# %% [markdown]
# A point on the dashed line would use the machine perfectly. The hollow points lie below it: no machine with these
# chips can read those prompts in that time. **So what was measured there?**
#
# <details><summary>Answer</summary>
#
# Most likely the prefix cache of section 3: the times get short just where the prompts fit into it
# ([10](10_published.ipynb), section 5).
# </details>
#
# **Compute the floor before you believe a latency, above all your own.**
#
# ## 8. What can you promise, and what does it cost?
# **The server keeps up with a rate, and nine requests in ten keep the objective. Can you promise that rate?** Not yet,
# because a short run can't show a queue that grows slowly. So the largest such rate first has to survive one long run
# (a star below), at least twenty times as long as a request. For the 31B that's ten minutes or more (three or more on a
# v5e-8). If the rate doesn't hold, we try the next lower one. (The dashed line shows how many would have kept half the
# objective, so you see how much room is left.)

# %%
runs = load.confirm(client, options, cfg, results_in, table)
held = [run for run in runs if run.held]
fig, ax = style.figure(7, 3.4)
half = results.rows(measured, [milliseconds / 2 for milliseconds in cfg.slo])
draw.promise(ax, table, runs, half)
ax.set_title("\n".join(results.promises(held, table)) or "No rate held: nothing can be promised")
style.finish(fig, "06_promise", f"measured, {machine.system}; medians, range of the repeats")

# %% [markdown]
# Rates above the knee are out (they're shaded if there's only one regime), even where every request was in time: in a
# longer run the queue may keep growing.
#
# **Promise the largest rate whose long run held the objective.**
#
# ### What does a token cost?
# A machine costs the same whether it works or not. So the more tokens it delivers in an hour, the cheaper each one is.

# %%
unit = "machine-hours" if math.isnan(machine.dollars_per_hour) else "USD"
fig, ax = style.figure(7, 3.4)
draw.price(ax, table, unit, held)
ax.set_title("More tokens an hour, cheaper tokens")
style.finish(fig, "06_cost", f"measured, {machine.system}; medians, range of the repeats")
print(*results.prices(held, unit, machine.dollars_per_hour), sep="\n")

# %% [markdown]
# Nobody's service is busy all day, so budget with the second price. (The share of the day is our assumption, `BUSY` in
# `serving/results.py`. Put in yours.)
#
# **A price per token counts only at a rate that holds, and only for a machine that's busy.**
#
# ## 9. What changes with your own traffic?
# **Random prompts are fair, but are they yours?** Give the client a file with one `{"prompt": ...}` per line, and it sends
# those. Our example takes the six longest requests of 07 and asks each of them twice.

# %%
OWN = ""  # ← your file; "": this example
tokenizer = chat.load_tokenizer(options.model)
own = Path(OWN or helpers.run_dir("bench", "own.jsonl"))
if not OWN:
    prompts = []
    for path in sorted(Path("data/tiny_eval").glob("*_prompt.txt")):
        messages = asking.chat_request(path.read_text(), system, thinking)["messages"]
        prompts.append(chat.prompt_ids(tokenizer, messages, thinking))
    longest = sorted(prompts, key=len)[-6:]
    traffic.write(own, record, 2 * longest, tokenizer.decode)

# %% [markdown]
# We send them about as fast as one user who asks again after each answer:

# %%
sent = traffic.read(own, record)
own_regime = (max(len(ids) for ids in sent), 128)  # the most tokens of a prompt and of an answer
own_point = load.Point(own_regime, float(f"{1 / arrivals[-1]:.2g}"), load.check_prompts(own), own)
run = load.Bench(client, options, cfg, results_in).measure(own_point, "own-off-1")
print(f"median TTFT {run.percentile('ttft', 50):,.0f} ms, TPOT {run.percentile('tpot', 50):,.1f} "
      f"ms; {run.series.cached_tokens:,.0f} tokens came from the cache")
client.close()

# %% [markdown]
# Half of these prompts have been there before, so a prefix cache could save work. [Is it worth
# it?](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#is-a-prefix-cache-worth-it) measures that with a
# second server. If your users share a long system message, turn it on in 05 (`prefix_caching=True`). But report a number
# with a warm cache next to the cold one, not in its place.
#
# **Measure with the traffic you'll really have, and say whether the cache was on.**
#
# ## Recap
# - The knee is the largest rate that the server keeps up with. Beyond it, latencies measure the test's length.
# - A point needs fresh prompts, no cache, and several repeats. A promise and a price need a long run, too.
# - The floor tells you what's possible, and which latencies can't be true.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. **Be stricter.** Allow a quarter of the objective's time to the first token, and half of its time for each further
#    one. Guess from section 4's table: at which rates are nine requests in ten still in time?
#
# <details><summary>Solution</summary>
#
# ```python
# strict = cfg.slo[0] / 4, cfg.slo[1] / 2
# style.words(results.summary(results.rows(measured, strict)))
# ```
#
# The knee stays where it is: it doesn't depend on the objective. What you can promise does.
# </details>
#
# 2. **How many requests are under way at the knee, on average?** Guess it from two numbers: how many are answered per
#    second, and how long each takes. Then compare with `in_flight`, which was counted.
#
# <details><summary>Solution</summary>
#
# ```python
# knee, _ = knees[regime]
# columns = ["delivered_rps", "e2el_p50_ms", "in_flight"]  # e2el: a whole request, end to end
# delivered, latency, in_flight = part[part.rate == knee][columns].median()
# print(f"{delivered * latency / 1e3:.2g} by the law, {in_flight:.2g} counted")
# ```
#
# Requests per second, times the seconds that each of them stays: that's *Little's law*. (It's about the mean latency,
# and here's the median, so the two numbers differ.)
# </details>
#
# 3. **When does a drafter stop paying?** A
#    [drafter](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#a-drafter) proposes four tokens, say, and
#    the model checks them in one step. If the model accepts two of them, the step yields three tokens (the third is the
#    model's own), but it costs the arithmetic of five. Up to how many requests at once, each with 1,024 tokens in its
#    cache, does the 31B's step of section 7 still wait for memory?
#
# <details><summary>Solution</summary>
#
# ```python
# caches = limits.step_bytes(big, v6e8.options, 1, 1024) - limits.step_bytes(big, v6e8.options)
# print(f"each further request: {1e3 * caches / v6e8.bandwidth:.3f} ms to read its cache, "
#       f"{1e3 * 5 * computing:.3f} ms to compute five tokens")
# ```
#
# However many there are. Reading each further request's cache takes 0.077 ms, while the arithmetic of its five tokens
# takes 0.043. So with such requests the drafter could at best triple the speed, before its own cost. (With short
# prompts and very many requests the arithmetic does win.)
# </details>
#
# Next: [07 · pass@k that can be believed](07_eval.ipynb)
