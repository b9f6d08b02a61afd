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
# | **Reads** | `serve/server.json`, `serve/options.json`, `merge.json` of 04, the model's `config.json`, 03's log |
# | **Writes** | `bench/*.json` (every measurement, raw), `bench/results.csv` (one row each), figures |
# | **Time and cost** | tiny: about four minutes. 31b: about 100 minutes of load on a v6e-8 at the published throughputs; with warm-ups about two hours, 43 USD at 21.52 USD/h (our estimate; section 4 has the sum without a limit) |
#
# The outputs shown are a rehearsal on two CPU cores. Method and client are the real ones; the
# numbers describe two busy CPU cores and nothing else. Terms are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · **06 benchmark** · [07 evaluate](07_eval.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
found = [p for p in (sys.path[0], ".", "..", "gemma4-on-tpu") if os.path.isdir(f"{p}/tpu_time")]
if not found:  # a notebook that was opened alone, as Colab opens it
    subprocess.check_call("git clone -q --depth=1 https://github.com/OWNER/gemma4-on-tpu".split())
sys.path.insert(0, os.path.abspath((found or ["gemma4-on-tpu"])[0]))
import helpers
helpers.machine()

# %% [markdown]
# ## 1. Settings
# A **regime** is a prompt length and an answer length. A **point** is a regime at one **rate**, the
# requests that arrive per second. They arrive at random moments, as strangers would send them,
# whether or not the server keeps up: an **open loop**. (In a closed loop each user waits for an
# answer before asking again, so a slow server is asked less, and its queue stays hidden.) `inf`
# sends all of them at once. Each point is measured several times: its **repeats**. The
# **objective** (SLO, service-level objective) is what you would promise a user.

# %%
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from IPython.display import display
from openai import OpenAI

from helpers import charts
from serving import bench, physics, server

INF = math.inf


# %%
@dataclass(frozen=True)
class Settings:
    # ── Load ──
    regimes: tuple = ((512, 256), (1024, 512), (2048, 512), (4096, 512), (8192, 512), (15360, 512))
    rates: tuple = (1, 2, 4, 8, 16, 32, 64, INF)  # requests/s, ascending
    repeats: int = 3          # section 7 needs three to say how sure it is
    at_most: int = bench.ENOUGH  # repeats of a point whose first ones disagree (section 6)
    seconds: float = 60.0     # of load per point
    min_requests: int = 60    # per point, however slow
    warmups: int = 4          # requests before each point, not counted
    slo: tuple = (2000, 60)   # 9 requests in 10 keep both: ms to first token, per output token
    # ── Price ──
    dollars_per_hour: float = 0.0  # of all chips; 0: the published price, if there is one


FULL = Settings()
E2B = replace(FULL, regimes=((512, 256), (2048, 256)), rates=(1, 2, 4, 8, 16, INF), slo=(1000, 40))
TINY = replace(FULL, regimes=((256, 64), (768, 64)), rates=(4, 8, 16, INF), seconds=4.0,
               min_requests=30, warmups=1, slo=(500, 30))
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# ## 2. One request
# Before any load, one user. We ask for the counter of notebook 02 and note when each piece of the
# answer arrives. If 05's server has ended, `bring_up` starts it as 05 left it.

# %%
record, options = server.bring_up(owner=os.getpid()), server.options()
ours = (record["owner"] or {}).get("pid") == os.getpid()  # then the last cell stops it again
print(f"{record['model']} at {record['base_url']}, context {record['max_model_len']}")

# %%
client = OpenAI(base_url=record["base_url"] + "/v1", api_key="unused", max_retries=0)
recipe = helpers.read_json(helpers.require(helpers.run_dir("merge.json"), "04_merge.py"))["recipe"]
counter = Path("data/tiny_eval/Prob031_updown_prompt.txt").read_text()
request = server.chat_request(counter, recipe, model=record["model"], stream=True,
                              stream_options={"include_usage": True},
                              max_tokens=record["max_model_len"] // 2)


def timed():
    """Seconds from sending the request to each piece of its answer, and the tokens used."""
    start, arrivals = time.perf_counter(), []
    for piece in client.chat.completions.create(**request):
        if piece.choices and piece.choices[0].delta.content:
            arrivals.append(time.perf_counter() - start)
    return arrivals, piece.usage  # the last piece counts the tokens


five = sorted((timed() for _ in range(5)), key=lambda run: run[0][-1])
arrivals, used = five[2]  # the median; the first one of all warms the server up
print(f"{used.prompt_tokens} prompt tokens, {used.completion_tokens} answer tokens; five requests "
      f"took {1e3 * five[0][0][-1]:.0f} to {1e3 * five[-1][0][-1]:.0f} ms")

# %%
charts.draw_timeline(arrivals, (used.prompt_tokens, used.completion_tokens),
                     f"measured, {options.engine}, one request alone, the median of five")

# %% [markdown]
# What this means: a user waits twice. The **time to first token** (TTFT, orange) is the prefill:
# the whole prompt goes through the model. The **time per output token** (TPOT, blue) is one decode
# step, repeated. Each white line is one piece of the answer; where none is seen, several arrived
# together, because here server, client and model share two cores. Both times grow when others use
# the server, for different reasons, so we keep them apart.
#
# ## 3. One point
# vLLM brings its own client, `vllm bench serve`. It sends random prompts of a given length at a
# given rate and notes the times of every request. This is our first point:

# %%
bench.check_plan(cfg, record)  # do the points fit into the server's context?
folder = helpers.run_dir("bench")
(folder / "partial").mkdir(parents=True, exist_ok=True)
first = (cfg.regimes[0], cfg.rates[0], bench.requests_for(cfg, cfg.rates[0]))
with server.Client(record, folder, folder / "client.log") as load:
    name, seed = bench.point_name(*first[:2], 0)
    typed = bench.bench_arguments(load, record, cfg, *first, seed, name)
    one = (bench.finished(options, cfg, *first[:2], 0, folder)
           or bench.measure(load, record, options, cfg, *first, 0, folder))
print("vllm", " ".join(typed).replace(" --", " \\\n    --"))

# %%
print(f"{one['completed']} of {one['num_prompts']} requests in {one['duration']:.1f} s, "
      f"{one['failed']} failed\nTTFT: median {one['p50_ttft_ms']:.0f} ms, "
      f"9 of 10 within {one['p90_ttft_ms']:.0f} ms\nTPOT: median {one['p50_tpot_ms']:.1f} ms\n"
      f"prompt tokens from the prefix cache: {one['series']['cached_tokens']:.0f}")

# %% [markdown]
# Every argument has a reason. `--ignore-eos` makes all answers equally long, so that points can be
# compared; real ones differ, and do not end together as these do. Warm-up requests are not counted.
# The **seed** is another one for each repeat of each point, and that matters most. The client sends
# the *same* prompts whenever the seed is the same. A server with a **prefix cache** remembers
# prompts that it has read, and has nothing to compute when they come again. So the cache is off,
# and the last line checks it: the server counts cached tokens itself.

# %%
display(pd.Series(bench.cache_facts(bench.metrics(record)), name="the server says").to_frame())

# %% [markdown]
# `measure` does three more things around the client. It waits until the server is **idle**, since
# requests of an earlier client would be measured as ours. It counts what else kept the processor
# busy. And it writes down what the point was **made by** (server, model, load), so that a later run
# reuses it only for the same:

# %%
helpers.show_source(bench.measure)

# %% [markdown]
# ## 4. A few rates
# How many requests does a point need? With too few the run is over before a queue can form. We load
# the server for `seconds` at every rate. After the first rate that was too much, all points send as
# many requests as that one, since there latencies grow with their number, and rates above twice that
# one are left out.
#
# The sweep visits all points once per repeat, so that a slow change of the machine shows as spread
# instead of favouring one rate. (The rates of a visit always ascend, so what one leaves to the next
# is not seen.) You may interrupt it: finished points are read from their files.

# %%
kept_up = cfg.repeats * len(cfg.regimes) * len(cfg.rates) * cfg.seconds
config = helpers.read_json(Path(record["model_path"]) / "config.json")
machine = bench.machine_of(options, config, cfg.dollars_per_hour)
price = kept_up / 3600 * machine.dollars_per_hour
print(f"{cfg.repeats} x {len(cfg.regimes)} regimes x {len(cfg.rates)} rates x {cfg.seconds:g} s: "
      f"{kept_up / 60:.0f} min of load if the server keeps up"
      + (f", {price:.2f} USD" if price == price else " (no price is published for this machine)"))

# %%
with server.Client(record, folder, folder / "client.log") as load:
    planned = bench.sweep(load, record, options, cfg, folder)
    results = bench.repeat_further(load, record, options, cfg, folder, planned)
print(f"{len(planned)} measurements, {len(results) - len(planned)} further repeats (section 6), "
      f"{sum(r['duration'] for r in results):.0f} s of load, "
      f"{sum(r['failed'] for r in results)} requests failed")

# %% [markdown]
# One row per point, medians of its repeats. `delivered` is what the server finished per second,
# `goodput` the part of it that kept the objective, and `done early` the share that was finished
# when the last request was sent. `in flight` is how many requests were at the server on average.
# Latencies are those of completed requests.

# %%
table = bench.rows(results, config, machine, cfg.slo)
helpers.write_text(folder / "results.csv", table.to_csv(index=False))
keys = ["input_len", "rate"]
middle = table.groupby(keys).median(numeric_only=True)
view = pd.DataFrame({
    "sent, each": middle.requests, "failed": table.groupby(keys).failed.sum(),
    "in flight": middle.mean_in_flight, "delivered /s": middle.delivered_rps,
    "done early": middle.done_under_load, "goodput /s": middle.goodput_rps,
    "TTFT p50": middle.ttft_p50_ms, "TTFT p90": middle.ttft_p90_ms,
    "TPOT p50": middle.tpot_p50_ms, "TPOT p90": middle.tpot_p90_ms})
display(bench.labelled(view).style.format(bench.short))

# %% [markdown]
# What this means (latencies in milliseconds): read down one prompt length. First `delivered`
# follows the rate and TTFT hardly moves. Then `delivered` stays where it is and TTFT jumps. That
# place is what we are after. Where nothing is done early, `delivered` was not sustained, only
# finished when the load was over.
#
# One correction is in `delivered`. At the end of a run nothing new arrives and the server empties:
# the **drain**. Requests over total time would count it as load, the more so the shorter the run.
# `bench.delivered_rate` takes out what an idle server would need for one request. A loaded one needs
# longer, so near its limit `delivered` is a little low.
#
# ## 5. Inside one point
# Percentiles hide what happened. We draw every request of the largest finite rate, at the longest
# prompts.

# %%
one = next(r for r in planned[::-1]
           if float(r["request_rate"]) < INF and r["series"]["repeat"] == 0)
label = f"{'/'.join(map(str, bench.regime_of(one)))} at {one['request_rate']}/s"
charts.draw_requests(one, f"measured, {machine.system}, {label}, one repeat")
due, after = bench.gaps(one)
print(f"between two tokens of an answer: {1e3 * due:.0f} ms (median) while first tokens were due, "
      f"{1e3 * after:.0f} ms after the last of them")

# %% [markdown]
# What this means: a step has room for 2,048 tokens (05): one for each answer that has begun, the
# rest for prompts. With prompts in it, it takes many times as long. So what an answer waits for is
# the prompts that came after its own. Right of the dotted line nothing new arrives: first the queue
# is worked off, then the last answers. Twice the requests would give about twice the TTFT and twice
# the TPOT. **Beyond the limit both measure the length of the test**, not the server.
#
# ## 6. Do the repeats agree?
# A number without its spread cannot be compared with anything. For each point: how much larger is
# the largest repeat than the smallest? Our rule: where that is more than 20 %, the point must say
# why. Of 30 requests the p90 is the fourth slowest; a single one may be off by half. So we show its
# range over the repeats.

# %%
points = table.groupby([*bench.REGIME, "rate"])
spread = points[list(bench.COMPARED)].agg(lambda values: values.max() / values.min() - 1)
spread.columns = list(bench.COMPARED.values())
spread.insert(0, "repeats", points.size())
for kind in ("ttft", "tpot"):
    spread[f"{kind.upper()} p90, ms"] = points[f"{kind}_p90_ms"].agg(bench.from_to)
spread["remarks"] = pd.Series(bench.reasons(table, results))
display(bench.labelled(spread.droplevel("output_len"))
        .style.format("{:.0%}", subset=list(spread.columns[1:4])))

# %% [markdown]
# - `beyond the knee`: at least one repeat, of this or of a smaller rate, delivered less than 90 %
#   (next section).
# - `other programs used …`: we counted them.
# - `too few requests …`: the 95 % bootstrap intervals of the repeats' medians overlap. (They take
#   requests as independent, which those of a queue are not, so they are too narrow.)
#
# Where it is none of these, it is the arrivals or the machine. Every repeat has its own seed, so its
# own arrival times, and near the knee these alone move a median by tens of per cent. Such a point
# was measured again, until it had six repeats; none is ever dropped. With six we ask whether the
# middle half (from the first quartile to the third) lies within 20 %. If so, the point has
# `outliers`, and its median is good. If not, it is `unstable`, and no difference that rests on it is
# a result. (To look at how far apart repeats are, never at which way, favours no outcome.)
#
# ## 7. The knee
# The **knee** is the last rate that every repeat kept up with: at least 90 % of it was delivered,
# and of all smaller rates. From above it is bounded by the first rate of which the server never
# delivered 90 %, at any load. The **capacity** is the largest rate that it delivered at all, one
# value per repeat.

# %%
helpers.show_source(bench.kept_up)

# %%
everything = bench.systems(folder)
curves = charts.curves_of(everything)
for (system, *regime), part in curves.items():
    (last, above), each = bench.kept_up(part), bench.capacities(part)
    good = part.groupby("rate").goodput_rps.median()
    bound = f"{above:g}/s" if above < INF else "all at once"
    print(f"{system}, {regime[0]}/{regime[1]}: knee between {last:g}/s and {bound}, delivers up "
          f"to {min(each):.3g} to {max(each):.3g}/s; most goodput {good.max():.3g}/s, at "
          f"{good.idxmax():g}/s offered")

# %%
charts.draw_throughput(everything, f"measured, {machine.system}")

# %% [markdown]
# What this means: left of its star a curve lies on the diagonal, and there you cannot see how fast
# a server is, because every server that keeps up delivers what is offered. Promise a rate left of the
# star, and only where goodput is what was delivered: at the star a queue may be growing too slowly for
# a run of this length to show. (Put the `results.csv` of another machine into `bench/` under another
# name, and it is drawn beside ours.)
#
# When is a difference a difference? We ask that the ranges of the repeats do not touch. With three
# against three, chance alone does that once in ten times, and oftener in one of several such lines,
# so it is a hint; more repeats make it a result. All repeats met the same server process: to compare
# two servers, start each anew for every repeat. Beyond the knee, never compare points that sent
# different numbers of requests.

# %%
each = {f"{system}, {i}/{o}": bench.capacities(part) for (system, i, o), part in curves.items()}
print("capacity of", " and ".join(list(each)[:2]) + ":", bench.apart(*list(each.values())[:2]))
for (system, i, o), part in curves.items():
    calm = bench.up_to_the_knee(part).groupby("rate").ttft_p50_ms.agg(list)[:2]
    if len(calm) == 2:
        print(f"{system}, {i}/{o}, median TTFT in ms at {calm.index[0]:g} and {calm.index[1]:g}/s: "
              f"{bench.apart(*calm)}")

# %% [markdown]
# ## 8. The floor: how fast could it be?
# The first token needs the whole prompt to go through every layer. How many floating-point
# operations that takes follows from `config.json`: two per weight and token, plus attention. No
# machine does them faster than its **peak**. Every decode step must read all weights and the
# request's cache, which takes bytes divided by **bandwidth**. These times are floors.
#
# For an accelerator, peak and bandwidth come from the data sheet, and what a step must read from
# the server's options: an fp8 cache has half the bytes. For a CPU we measure the fastest matrix
# product of one core and multiply by the cores, which errs on the high side. A full machine has a
# second, higher floor: prompts are computed in the order they came, so if 30 arrive at once, the
# last one waits for all of them, the median one for half.

# %%
helpers.show_source(bench.ttft_floors)

# %%
print(f"{machine.system}, copies of the model: {options.data_parallel}; for one copy "
      f"{machine.peak / 1e12:.3g} TFLOP/s and {machine.bandwidth / 1e9:.3g} GB/s")
floors = {f"{i}/{o}": {
    "prefill, GFLOP": physics.prefill_flops(config, i) / 1e9,
    "TTFT floor, ms": 1e3 * bench.ttft_floors(config, i, [0.0], machine)[0],
    "median of 30 at once, ms": 1e3 * bench.ttft_floors(config, i, [0.0] * 30, machine)[1],
    "TPOT floor, ms": 1e3 * bench.tpot_floor(config, i, machine)} for i, o in cfg.regimes}
display(pd.DataFrame(floors).T.style.format(bench.short))

# %%
charts.draw_latency(everything, f"measured, {machine.system}")

# %%
factor = pd.DataFrame({"TTFT p50 / floor": middle.ttft_p50_ms / middle.ttft_queue_floor_ms,
                       "TPOT p50 / floor": middle.tpot_p50_ms / middle.tpot_floor_ms,
                       "TPOT p50 / estimate": middle.tpot_p50_ms / middle.tpot_in_flight_ms})
display(bench.labelled(factor).style.format(bench.short))
print("flags:", *(sorted(set(table.flag) - {""}) or ["none: all is above its floors"]), sep="\n  ")

# %% [markdown]
# What this means: as long as prompts are served in order, no measurement falls below its floor. If
# one does, something else was measured: cached prompts, shorter prompts than the label says, a wrong
# peak. `flag` says so for every row, and [10](10_published.ipynb) finds such points in a published
# sweep. A factor near 1 leaves nothing to gain. A large one does not say how much could be gained:
# the TPOT floor counts one request, and the work of others is real work. (`estimate` adds the caches
# of all that were being answered, but no prompts.) The published 31B runs, where they were cold and
# busy, stood at 2.5 to 4 times their floors. The tiny model is far above, because its arithmetic is
# nothing beside the Python around it.
#
# ## 9. What a token costs
# A machine costs the same whether it works or not. So a token is cheapest when the machine is full,
# and there users queue. The figure shows this trade: each point is one rate, and the dotted line is
# the TTFT of the objective.

# %%
charts.draw_cost(everything, cfg.slo[0], f"measured, {machine.system}; medians of the repeats")

# %%
cheapest = bench.cheapest(table)  # where every repeat kept both times for 9 in 10, if any
display(bench.labelled(cheapest[["within the objective", "hours_per_million_output"]]).round(3))
near = min(cheapest.index, key=lambda point: abs(point[0] - used.prompt_tokens))
answer = used.completion_tokens / cheapest.loc[near].output_tok_s
print(f"our counter's answer, after {used.prompt_tokens} tokens, priced as one after {near[0]}: "
      f"{1e3 * answer:.0f} ms of the machine; alone it took {1e3 * arrivals[-1]:.0f} ms")

# %% [markdown]
# What this means: sharing is what makes serving affordable. Right of the dotted line a token gets
# cheaper by less than half here, and the wait many times longer.
#
# Training is paid once, serving every hour. After how many tokens has serving cost as much as 03?

# %%
if cost := bench.training_cost():
    print(f"training (load, compile, steps): {cost[0]:.2f} hours"
          + (f", {cost[1]:.2f} USD" if cost[1] == cost[1] else " of a machine without a price"))
    priced = cost[1] == cost[1] and machine.dollars_per_hour == machine.dollars_per_hour
    each = cheapest.usd_per_million_output if priced else cheapest.hours_per_million_output
    for (inputs, _), tokens in (cost[priced] / each).items():
        print(f"as much as {tokens:.3g} million output tokens, served after prompts of {inputs}")
else:
    print("03's log is not in this run directory, so the cost of training is unknown here")

# %% [markdown]
# [10](10_published.ipynb) does the same with published prices of two machines. A server that this
# notebook brought up is stopped again; that of notebook 05 stays for 07.

# %%
if ours:
    server.stop()
print("server stopped" if ours else f"{record['model']} stays at {record['base_url']}")

# %% [markdown]
# ## Recap
# - A user waits for the first token (prefill) and for each further one (decode).
# - The knee is the last rate that was kept up with. Beyond it, latencies measure the test's length.
# - A point is trusted because of how it was made: cold cache, fresh seed, enough load, repeats, all
#   of them kept.
# - A floor stands beside each latency. A token is cheapest on a full machine, where users queue.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `no server was ever started` | 05 did not run | run 05 |
# | `is no longer what 05_serve_vllm checked` | 04 ran again, or the files were copied | run 05 again; it verifies them and starts the server |
# | `the server is not idle` | another client, or one interrupted in a container | end it; `docker top` with the container's name shows it |
# | `was made from something else (… was … and is …): measuring it anew` | a setting or the model changed since | nothing; put the setting back if you did not mean it |
# | `stopped after 7 of 24 points` | the server died under load; its reason is in the line | lower the load or the memory share; run again to continue |
# | `none of 30 requests completed` | every request was refused; the server's words follow | usually a wrong model name or a prompt that is too long |
# | a flag `impossible: TTFT …` | a warm prefix cache, shorter prompts than the label, or a wrong peak | the causes are in `physics.LIKELY_CAUSES`; check `cache_hit_rate` first |
# | `unstable` beside a point | other arrival times near the knee, or a neighbour | raise `seconds`; to compare, use a new folder; delete nothing |
#
# ### Exercises
# 1. How many prefill FLOP/s did the server do at its capacity, as a share of the peak?
#
# <details><summary>Solution</summary>
#
# ```python
# for inputs, outputs in cfg.regimes:
#     part = table[table.input_len == inputs]
#     work = max(bench.capacities(part)) * physics.prefill_flops(config, inputs)
#     print(inputs, f"{work / machine.peak / options.data_parallel:.1%}")
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
# with server.Client(other, warm, warm / "client.log") as load:
#     for attempt in (1, 2):  # the same name, and so the same seed
#         result = bench.measure(load, other, options, cfg, cfg.regimes[1], cfg.rates[0], 30, 0,
#                                warm)
#         print(attempt, f"{result['p50_ttft_ms']:.0f} ms", result["series"]["cached_tokens"],
#               bench.row(result, 0.0, config, machine, cfg.slo)["flag"] or "no flag")
# process.terminate()
# ```
#
# The first run already finds its own warm-up in the cache and is flagged for it. In the second
# nearly all prompt tokens come from there (it holds whole blocks only), and the TTFT falls.
# </details>
#
# Next: [07 · pass@k that can be believed](07_eval.ipynb)
