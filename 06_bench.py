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
# How many users can the server of notebook 05 take before they notice each other? We time one
# request, then many, find the rate where the queue begins, and put the physical limit and the price
# beside what we measured.
#
# | | |
# |---|---|
# | **Needs** | the server of 05; one that has ended is started again. No JAX, no accelerator of its own |
# | **Reads** | `serve/`, `merge.json` of 04, the model's `config.json`, 03's log |
# | **Writes** | `bench/*.json` (every measurement, raw), `bench/results.csv` (one row each), figures |
# | **Time and cost** | tiny: two to four minutes. 31b: about 2.3 hours of a v6e-8, 50 USD at 21.52 USD/h (section 4 computes it) |
#
# The outputs shown are those of the tiny run; method and client are the real ones.

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · **06 benchmark** · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb)

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
# ## 1. Settings
# A **regime** is a prompt length and an answer length. A **point** is a regime at one **rate**, the
# requests that arrive per second. They arrive at random moments, as strangers would send them,
# whether or not the server keeps up: an **open loop**. The **objective** (SLO, service-level objective)
# is what you would promise a user.
#
# <details><summary><b>Why not let each of 30 users ask again as soon as they are answered?</b></summary>
#
# In such a closed loop a slow server is asked less, and its queue stays hidden.
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
V5E = Load(regimes=((1024, 256), (2048, 256)), rates=3, repeats=2, seconds=45.0, long=180.0,
           warmups=4)  # half an hour of a free session; fits every try of serving/v5e.py
LARGE = V5E if hardware.here().slice == "v5e-8" else FULL
cfg = helpers.choose({"31b": LARGE, "e2b": E2B, "tiny": TINY})
PRICE = 0.0  # dollars an hour, of all chips; 0: the published price, if there is one
print(cfg)

# %% [markdown]
# ## 2. One request
# Before any load, one user. The server of 05, and a request for our counter:

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
# We note when each piece of the answer arrives, five times, and draw the median run. A first run isn't
# counted, because there the client still loads code and opens its connection. **Where does the time go:
# before the first token, or after it?**

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
# Orange is the time to first token (TTFT), the prefill; blue the time per output token (TPOT), one decode
# step, repeated. Each white line is one piece of the answer. Both grow when others use the server, for
# different reasons, so we keep them apart.
#
# ## 3. One point
# vLLM brings its own client, `vllm bench serve`. It sends random prompts of a given length at a given rate
# and notes the times of every request:

# %%
client = Client(folder)  # one process for all points; importing vLLM takes ten seconds
regime = cfg.regimes[0]
print("vllm", " ".join(load.arguments(record, cfg, regime, 4, 2 * cfg.min_requests, seed=7))
      .replace(" --", " \\\n    --"))

# %% [markdown]
# The client stretches its random gaps so that n requests take n / rate seconds. `--ignore-eos` makes all
# answers equally long, so that points can be compared. Before each point we wait until the server is idle,
# since requests of an earlier client would be measured as ours.
#
# **A server with a prefix cache keeps what it computed for prompts. Two points have the same seed. What
# does the second measure?**
#
# <details><summary>Answer</summary>
#
# The cache: the same seed sends the same prompts. So each measurement has a seed of its own, the cache is
# off, and after each point we read what the server itself counted as cached.
# </details>
#
# ## 4. A sweep
# Which rates? We let the server say. Two **bursts**, all requests at once, first a few and then many, tell
# roughly how many it can finish per second. **Bisection** then encloses the rate where it stops keeping up,
# until two neighbours are at most 25 % apart. More rates fill in the curve. Each is measured three times,
# in three rounds, so that a slow change of the machine shows as spread.
#
# Some results can't be, on a machine that does nothing else: a wait that gets shorter while the load grows,
# a rate whose repeats lie a fifth apart, less delivered than at another rate. Then something disturbed us.
# Such a rate is measured again, up to twice, and if its results still contradict each other, the table
# calls it *noisy*. Finished points are files: interrupt the sweep, and it goes on where it was.

# %%
config = helpers.read_json(Path(options.model) / "config.json")
machine = limits.machine_of(options, config, PRICE)
regimes = len(cfg.regimes)
count = regimes * (cfg.repeats * (cfg.rates + 1) + 2)
hours = (count * 1.4 * cfg.seconds + regimes * cfg.long) / 3600
print(f"{count} measurements and {regimes} long runs: about {60 * hours:.0f} min")
if options.chip:
    print(f"that is {hours * machine.dollars_per_hour:.0f} USD")

# %%
measured = sweep(client, options, cfg, results_in)

# %%
table = results.rows(measured, cfg.slo, machine.dollars_per_hour)
floors = [limits.floors(measurement, machine, config) for measurement in measured]
table = table.join(pd.DataFrame(floors))
helpers.write_text(results_in / "results.csv", table.to_csv(index=False))

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
# Beyond the knee (section 5) a rate is *overloaded*. All numbers are medians of the repeats, latencies in
# milliseconds, of all completed requests, so also of those while the load builds up and drains. `delivered`
# is requests per second; the time that the last one would need alone is left out, since nothing new arrives
# then. `goodput` is `delivered` times the share of requests that kept the objective; vLLM's own divides by
# the whole run.
#
# ## 5. The knee
# **Up to which rate would you promise anything?** Look at `delivered` and TTFT before you open the answer.
#
# <details><summary>Answer</summary>
#
# While the server keeps up, `delivered` follows the rate and TTFT grows slowly. Then `delivered` levels off,
# and TTFT grows with every further request. The **knee** is the last rate that it kept up with: in the
# median of three repeats at least 90 % of it was delivered, and of all smaller rates.
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
# Up to the knee a curve follows the dashed line, delivered = offered, and there you cannot see how fast a
# server is: every server that keeps up delivers what is offered. Where the bars of two points overlap, three
# repeats do not tell them apart.
#
# ## 6. Inside one point
# **Compare no latencies beyond the knee. Why?** We draw every request of the largest rate:

# %%
finite = [measurement for measurement in measured if measurement.rate < INF]
fastest = max(finite, key=lambda measurement: measurement.rate)
fig, ax = style.figure(9, 3.6)
draw.requests(ax, fastest)
ax.set_title(f"At {fastest.rate:.3g}/s the slowest waits {max(fastest.latencies):.1f} s")
style.finish(fig, "06_requests", f"measured, {machine.system}, one repeat")

# %% [markdown]
# A step has room for 2,048 tokens (05): one for each answer that has begun, the rest for prompts. With
# prompts in it, it takes longer; so an answer waits for the prompts that came after its own. Right of
# the dotted line nothing new arrives. With twice the requests the times would be about twice as long:
# **beyond the knee TTFT and TPOT measure the length of the test**, not the server.
#
# ## 7. The floor: how fast could it be?
# The first token needs the whole prompt to go through every layer: operations that follow from
# `config.json`, divided by the machine's **peak**. Every decode step must read all weights and the
# request's cache: bytes divided by **bandwidth**. These times are floors. A queue has a second, higher one:
# if 30 prompts arrive at once, the median one waits for half of them. For an accelerator the data sheet says
# how fast; for a CPU we measure one core and multiply by the cores: that machine is a little too fast, so
# the floors are a little too low.

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

# %% [markdown]
# The tiny model is far above: its arithmetic is nothing beside the Python around it. The published GPU, cold
# and busy, read prompts at 2.5 times its floor ([10](10_published.ipynb)).
#
# <details><summary><b>A measurement lies below its floor. What was measured?</b></summary>
#
# Something else: cached prompts, shorter prompts than the label says, a wrong peak; or a client so short of
# CPU that it read an answer's tokens all at once, with no time between them.
# [10](10_published.ipynb) finds such points in a published sweep.
# </details>
#
# ## 8. What a token costs
# A machine costs the same whether it works or not, so a token is cheapest when the machine is full, and there
# users queue. Each point is one rate, the bars are the range of its repeats. The line joins the rates that
# the server keeps up with. Overloaded ones stand apart, because there the wait measures our test:

# %%
unit = "hours of the machine" if math.isnan(machine.dollars_per_hour) else "USD"
fig, ax = style.figure(8, 4.2)
draw.cost(ax, table, cfg.slo[0], unit)
ax.set_title("A full machine makes cheap tokens, and queues")
style.finish(fig, "06_cost", f"measured, {machine.system}; medians; hollow: beyond the knee")

# %% [markdown]
# Which of them may be promised? The largest rate up to the knee at which nine requests in ten kept the
# objective. But a run of seconds cannot see a queue that grows slowly. So the price of a rate counts only
# after **one long run**, at least twenty times as long as a request takes. If the rate doesn't hold, we try
# the next lower one. A run that delivers far less than the sweep has shown is noise, so it's made once more.

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
# Training is paid once, serving every hour. After how many tokens has serving cost as much as 03?

# %%
log, trainer = helpers.run_dir("train", "log.jsonl"), helpers.run_dir("train", "machine.json")
if confirmed and log.exists() and trainer.exists():
    trainer = helpers.read_json(trainer)
    seconds = max(trainer["load_seconds"], trainer["compile_seconds"])
    for line in texts.json_lines(log.read_bytes()):
        if isinstance(line.value, dict):  # a line that a crash cut off is no step
            seconds += line.value.get("seconds", 0.0)
    cost = seconds / 3600
    if unit == "USD":
        name = hardware.chip_of(trainer["device_kind"])
        per_hour = hardware.chip(name).dollars_per_hour if name else math.nan
        cost *= trainer["devices"] * per_hour
    print(f"training: {cost:.3g} {unit}, as much as {cost / price:.3g} million output tokens")

# %% [markdown]
# ## 9. Your own traffic
# Random prompts never share a beginning, and their answers never end by themselves. Yours do. `--dataset-name
# custom` reads one `{"prompt": ...}` per line; here they are the eight longest of 07's requests, each asked
# twice, as 07 draws several answers. On the server as 05 left it, then on one with the prefix cache:

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

# %%
lengths = []
for line in texts.json_lines(own.read_bytes()):
    lengths.append(len(tokens_of(line.value["prompt"])))
own_regime = (max(lengths), 128)  # the most tokens of a prompt and of an answer
quarter = float(f"{table.delivered_rps.max() / 4:.2g}")  # of what it can take, per second
traffic = {"requests": load.check_prompts(own), "rate": quarter, "prompts": own}

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
print(f"one block is {block} tokens")
columns = {}
for name, run in (("cache off", cold_run), ("cache on", warm_run)):
    columns[name] = {
        "prompt tokens": run.raw["total_input_tokens"],
        "of them cached": run.series.cached_tokens,
        "answer tokens, mean": run.raw["total_output_tokens"] / run.completed,
        "TTFT p50, ms": run.percentile("ttft", 50),
        "TPOT p50, ms": run.percentile("tpot", 50)}
pd.DataFrame(columns).style.format(precision=1)

# %% [markdown]
# A cache keeps whole blocks only, and only what was asked before. For users who share a long system message,
# turn it on in 05 (`prefix_caching=True`). Its numbers say how repetitive the traffic was, so give them beside
# the cold ones, never instead.
#
# ## 10. What could a drafter gain?
# A drafter (05) makes several tokens of one step, and checking k proposals costs the arithmetic of k more
# tokens. **Up to how many requests at once does that arithmetic cost nothing?** By the floors of the 31B on a
# v6e-8, if two of four proposals are accepted, three tokens a step:

# %%
big = helpers.read_json("data/configs/gemma4_31b.json")
v6e8 = limits.machine_of(serve.Options(engine="tpu-docker", chip="v6e", tensor_parallel=8), big)
for batch in (1, 16, 64, 91):
    plain = 1e3 * limits.tpot_floor(big, 2048, v6e8, batch)
    drafted = 1e3 * limits.tpot_floor(big, 2048, v6e8, batch, tokens=3, checked=5)
    print(f"{batch:3} requests at once: {plain:5.1f} ms a token, with a drafter {drafted:5.1f}: "
          f"{plain / drafted:.1f} times")
print("this server:", measured[0].series.speculation or "has no drafter")

# %% [markdown]
# As many as fit (91, by 05's cache): each step still waits for memory, so the gain is all three tokens. It is
# the most that is possible: the drafter's own time is left out.
#
# ## Recap
# - A user waits for the first token (prefill) and for each further one (decode).
# - The knee is the last rate that was kept up with. Beyond it, latencies measure the test's length.
# - A point is trusted because of how it was made: cold cache, fresh seed, three repeats; a price only after a
#   long run.
# - A floor stands beside each latency. A token is cheapest on a full machine, where users queue.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. How many prefill FLOP/s did the server do at its knee, as a share of the peak?
#
# <details><summary>Solution</summary>
#
# ```python
# for (inputs, outputs), (last, _) in knees.items():
#     print(inputs, f"{last * physics.prefill_flops(config, inputs) / machine.peak:.1%}")
# ```
# </details>
#
# 2. Give one request 30 times the prompt of the others. Whose TTFT grows, and why does the server not
#    answer the short ones first?
#
# <details><summary>Solution</summary>
#
# Everybody's who came after it: prompts are read in the order they came, in pieces of 2,048 tokens
# (section 6).
# </details>
#
# Next: [07 · pass@k that can be believed](07_eval.ipynb)
