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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/08_dryrun.ipynb)
#
# # 08 · Appendix: compile the 31B training step for a TPU you do not have
#
# The TPU's own compiler runs on any x86-64 Linux machine. We hand it the step that notebook 03
# trains with, and the published one, and learn what fits, how long it takes and what it costs.
# Notebook 03 comes first: what it explains is used here.
#
# | | |
# |---|---|
# | **Needs** | Linux on x86-64 and `./setup.sh dryrun` (libtpu, 0.7 GB) for the live part; otherwise nothing: stored results are shown |
# | **Takes** | `data/configs/` (shapes of the models); no weights, no data |
# | **Makes** | `data/dryrun/*.csv` with `DRYRUN=full`; figures under `RUN_DIR/figures/` |
# | **Costs** | default: one to three minutes on two cores and 2 GB. `DRYRUN=full`: 5 to 20 minutes and 8 to 13 GB of memory per full-depth row. No TPU |
#
# The outputs shown are those of the tiny run on two CPU cores; the numbers in them are about the
# 31B and E2B on real TPU slices: *compiled* (counts) or *predicted* (times), not measured. Terms
# are in the [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
#
# Appendices: **08 dry run** · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb)

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
# ## The answers first
# Will the 31B's training step fit a v5p-8, how long does a run take, and what does it cost? These
# are the stored answers: memory is *compiled*, the steps' time *predicted*, the rest assumed. The
# rest of the notebook explains them; section 8 has them for every slice.

# %%
from tpu_time import fit

answer = fit.will_it_fit("v5p", 4)
cost = fit.run_cost(answer, 10_000 * 922, fit.price("v5p", 4))
print(answer)
print("\n".join(f"{minutes:5.1f} minutes: {part}" for part, minutes in cost["minutes"].items()))
print(f"{cost['hours']:.1f} hours and {cost['dollars']:.0f} dollars for 10,000 published samples")

# %% [markdown]
# ## 1. Find the compiler
# `libtpu` is the library that drives a TPU, and the compiler inside it works without one. Where it
# is missing, `./setup.sh dryrun` puts it into `.libtpu/`, beside the notebooks and outside their
# environment. JAX reads where it is when it starts, so this cell comes before JAX.

# %%
from tpu_time import compiler

libtpu = compiler.start()
print("libtpu found: section 3 compiles" if libtpu else
      "libtpu is not on this machine: nothing is compiled, the tables are the stored ones")

# %%
import dataclasses
import os
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from IPython.display import display

from helpers import gemma, train
from tpu_time import dryrun
from tpu_time import dryrun_figures as figures
from tpu_time import program as timing

# %% [markdown]
# A slice is what one rents. A v5p-8 is *four* chips: Google counts its eight TensorCores, and XLA
# sees the two of a chip as one device. HBM is what XLA can use of one chip. Peak (bfloat16) and
# bandwidth are the vendor's and, like the price, those of the whole slice: a v5p-8's 1,836 TFLOP/s are
# four chips of 459. Prices are the published recipe's (v5e: the list price).

# %%
compiler.slice_table().style.format("{:,.4g}")

# %% [markdown]
# A *topology* describes devices that nobody has to own: one can compile for them, not compute on
# them. We make them JAX's first backend, because Tunix asks `jax.devices()` for its platform and
# leaves its sharding constraints out on a CPU. JAX's names for the chips differ from Google's: a
# v5p is "TPU v5", a v5e "TPU v5 lite".

# %%
if libtpu:
    compiler.register()
    for name in ("v5p-8", "v5e-8", "v6e-8"):
        devices = compiler.devices_of(name)
        print(f"{name}: {len(devices)} x {devices[0].device_kind}")

# %% [markdown]
# ## 2. What is compiled
# What is trained comes from notebook 03. The settings here only say how much is compiled now.

# %%
@dataclass(frozen=True)
class Settings:
    live_layers: int = 2             # of the 60, in the compile that runs here
    live_length: int = 2_048         # tokens of its rows
    full_table: bool = os.environ.get("DRYRUN", "") == "full"  # compile what is not stored yet
    again: bool = os.environ.get("DRYRUN", "") == "kept"  # predict again from the texts kept
    keep: str = os.environ.get("DRYRUN_KEEP", "")  # a folder for the texts of compiled programs
    spare: float = 0.10              # of the HBM stays free in what we recommend


cfg = Settings()
cfg

# %% [markdown]
# A *recipe* is one configuration to compile. `published` is what the published script does: arrays
# in float32, bfloat16 adapters on 350 modules, every decoder layer recomputed, one example per row
# of 3,072 tokens. 30 % of that is real: a sample has 922 tokens on average, as the authors counted
# with Gemma 3's tokenizer. Its dropout of 0.05 is left out, which can only make it look better.
#
# `ours` is notebook 03 at size 31b. Its packed rows count as 95 % real tokens; notebook 02 projects
# 98 % for lengths like CodeV-R1's. Only trained positions meet the output matrix there. We assume at
# most 2,048 of a row's 4,096; in the published data 15 % of all positions are trained, on average.
# `ours, faster` is the same step with two changes that suit the compiler better, which section 5
# explains. 03 trains with it.

# %%
pd.DataFrame({recipe.recipe: dataclasses.asdict(recipe)
              for recipe in (dryrun.PUBLISHED, dryrun.OURS, dryrun.FASTER)})

# %% [markdown]
# Nothing is retold: loss, optimizer and step are those of `helpers/train.py`, which 03 explains.
# Nor does anything get memory. Model, adapters and optimizer are shapes, types and shardings, and
# that is enough to *lower* the step: to trace it into the program that XLA compiles. On a v5p-8 03
# computes two rows at once and then updates, so this program is its whole optimizer step.

# %%
helpers.show_source(dryrun.lower_ours)

# %% [markdown]
# `dryrun.lower_published` does the same with Tunix's trainer as it comes: stock LoRA, the one-hot
# loss, gradients averaged by `optax.MultiSteps`. That is a *micro-step*, an eighth of its optimizer
# step.
#
# ## 3. Live: two layers of the 31B
# The whole model takes the compiler ten CPU minutes. Here are one sliding and one full-attention
# layer at the 31B's width, one row of 2,048 tokens, for the four chips of a v5p-8.

# %%
LIVE = replace(dryrun.OURS, layers=cfg.live_layers, sequence_length=cfg.live_length,
               micro_batch=1, loss=str(cfg.live_length // 2))
if libtpu:
    with helpers.phase(f"compiling {cfg.live_layers} layers of the 31B for a v5p-8", every=30.0):
        program, refusal, seconds = dryrun.compile_recipe(LIVE)
    for name in ("argument", "output", "alias", "temp", "generated_code"):
        size = getattr(program.memory_analysis(), f"{name}_size_in_bytes")
        print(f"{name:>14}: {size / 2**20:7,.1f} MiB")

# %% [markdown]
# The memory is that of one chip: arguments (weights, adapters, optimizer state, batch), outputs,
# and temporaries. An output that takes the place of a donated argument counts as *alias*. The
# others are *fresh*, and all must fit at once. The program's own code comes on top, 53 MiB for
# these two layers and more for 60, and our tables do not count it. Beside it stands the published
# step, from the stored table.

# %%
stored = dryrun.stored("v5p-8_31b_2layers")
stored = stored[~stored.flag.astype(bool)]
columns = dryrun.COUNTED | {"flops_per_chip": "TFLOP per chip", "seconds_predicted": "s, predicted"}
if libtpu:
    found = timing.predict(program.as_text(), dryrun.slice_of(LIVE))
    live = pd.DataFrame([dryrun.measure(LIVE, program, refusal, seconds)
                         | dryrun.columns_of(LIVE, found)])
    print(dryrun.compared(live, stored[stored.recipe == "ours"], columns))
    stored = pd.concat([stored[stored.recipe != "ours"], live.assign(date="now")])
dryrun.show(stored, {"recipe": "recipe", "date": "compiled"} | columns)

# %% [markdown]
# The fresh outputs are the difference to look at. The published step hands back every frozen weight
# as a new copy; ours hands back nothing that was not donated. At 60 layers that copy takes a sixth
# of the chip's HBM (section 7).
#
# ## 4. How long does it take? Three answers
# The compiler gives counts, and from them come two times. The *roofline* is the larger of FLOPs
# over peak and bytes over bandwidth. (The FLOPs are a true limit. The bytes are not quite: XLA counts
# those of on-chip memory as well.) Its own *estimate* adds up a cost for each operation, but leaves
# out the links between the chips.
#
# What both miss stands in the compiled text. It is the *schedule* of one chip: instructions in
# order, nearly all with the back end's own count of cycles, and collectives with their sizes.
# `tpu_time/program.py` walks through it with a clock:
#
# - an instruction moves the clock on by its cycles;
# - a collective takes its bytes over the links that its group can use. If it stops the chip, the
#   clock waits. If it runs beside, only what is not covered when it is needed costs time;
# - collectives that use the same links wait for each other.
#
# This is our third time, the *prediction*. Peak and bandwidth are the vendor's, and the clock
# follows from the peak: 459 TFLOP/s over 2 cores x 4 units x 128 x 128 cells x 2 are 1.75 GHz.
# Speed and shape of the links are the
# [scaling book's](https://jax-ml.github.io/scaling-book/tpus): 90 GB/s each way, and in a 2 x 2
# slice each chip has two. Nothing is fitted to a measurement. The live program's eight longest
# entries, in the order in which they start:

# %%
if libtpu:
    longest = sorted(found.events, key=lambda event: -event.seconds)[:8]
    look = pd.DataFrame(sorted(longest, key=lambda event: event.start))
    look = look.assign(start_ms=1e3 * look.start, ms=1e3 * look.seconds)
    look = look[["start_ms", "ms", "track", "part", "direction", "line"]]
    display(look.style.hide(axis="index").format(precision=3))

# %% [markdown]
# Here is a collective by hand: two rows of 4,096 tokens, each of 5,376 numbers of two bytes, gathered
# by four chips. Each chip has a quarter already, so three quarters of the 88 MB must arrive, over two
# links of 90 GB/s.

# %%
where = timing.Slice("v5p", (2, 2, 1))
size = 2 * 4_096 * 5_376 * 2
seconds, dimensions = timing.collective_time("all-gather", size, [[0, 1, 2, 3]], where)
by_hand = 3 / 4 * size / (2 * 90e9)
print(f"{size / 1e6:.0f} MB over the links {' and '.join(dimensions)}: {seconds * 1e3:.3f} ms, "
      f"by hand {by_hand * 1e3:.3f} ms")

# %% [markdown]
# Every layer has several of these. A few instructions have no cycles: those that only move bytes
# get the time that the HBM needs (in the published step 0.3 % of it), the others cost nothing here. So
# they must not matter: where they hold more than 2 % of the program's FLOPs or bytes, no time is
# predicted. In four of the stored programs at full depth:

# %%
dryrun.without_cycles([dryrun.PUBLISHED, dryrun.FASTER, dryrun.INT8, dryrun.E2B_V6E]).style.hide(
    axis="index").format(precision=2).format("{:.2%}", subset=["of the step"])

# %% [markdown]
# ### The program as a trace
# A prediction knows when each instruction starts, so it can be written as the trace that a profiler
# would have recorded: drop the file on [ui.perfetto.dev](https://ui.perfetto.dev). Its picture is
# from the live compile or, without one, from the stored trace of the same program. The step that 03
# trains with, all 60 layers of it, is `data/dryrun/trace_step.json.gz`.

# %%
trace = Path("data/dryrun/trace_2layers.json.gz")
if libtpu:
    trace = helpers.run_dir("dryrun", "trace_2layers.json.gz")
    trace.parent.mkdir(parents=True, exist_ok=True)
    timing.write_trace(found, trace, "two layers of our step, predicted for one chip of a v5p-8")
figures.draw_trace(trace, "08_trace")
print(f"trace for ui.perfetto.dev: {trace}")

# %% [markdown]
# Each dark red piece is a collective that stops the chip: the compiler gathers activations before a block and
# scatters its sum after it, and nothing is computed meanwhile. The output matrix takes more than a
# quarter of these two layers. In all 60 it is 1 %: 14 of 1,179 ms.
#
# ## 5. Where the time goes
# Each instruction knows the line of Python it came from, so the sum splits by part of the model and
# by pass. Above, each recipe's parts added up, at full depth. Below, 40 ms of it in the order in which
# a chip goes through them, with the pass as a thin line.

# %%
recipes = {recipe.recipe: recipe for recipe in (dryrun.PUBLISHED, dryrun.FASTER)}
real = {name: dryrun.real_tokens(recipe) for name, recipe in recipes.items()}
profiles = {name: dryrun.stored_profile(recipe) for name, recipe in recipes.items()}
figures.draw_parts(profiles, real)

# %% [markdown]
# The numbers, in milliseconds. *At its limit* is the share of its time that a part would need if
# its products ran at the peak, or its bytes at the HBM's speed, whichever takes longer. What is
# left is what a better program could still save. Collectives have no such limit here.

# %%
for name, profile in profiles.items():
    display(dryrun.show_parts(name, profile, real[name]))

# %% [markdown]
# What this means for the published step: more than a quarter of its time goes into computing the
# layers a second time, more than a sixth into waiting for the links, and an eighth into conversions
# of type and layout, which take ten times what their bytes need. Its MLP runs at half of its limit.
# Its arrays are float32: the matrix unit still multiplies in bfloat16, but every operand is read at
# twice the bytes and rounded on the way, and that costs half of the speed.
#
# Ours recomputes nothing, hardly converts, and multiplies at more than nine tenths of the limit.
# Attention is at 44 % of its limit, norms at 35 %, and every collective stops the chip. LoRA's
# products in ours are at 47 % because they are thin: rank 64 fills half of the 128-wide matrix unit
# of a v5p and a quarter of a v6e's 256. So rank 128 should cost hardly more (not compiled).
#
# These ten lines take longest in our step, all layers together. What the wrappers of Qwix and Flax
# do inside counts for the line that called them. (Lines are counted as on the day the program was
# compiled.)

# %%
longest = pd.DataFrame(profiles["ours, faster"]["longest"])
longest["ms"] = 1e3 * longest.seconds
longest = longest[["ms", "count", "what", "part", "direction", "line"]]
display(longest.style.hide(axis="index").format({"ms": "{:,.1f}"}))

# %% [markdown]
# ### Two changes that cost nothing
# This is `ours, faster`. Before, with `ours`, it was slower, and the program's text said why:
#
# - **Two sums where one would do.** Gate and up read the same input. Its gradient is a sum of two
#   products, and each product is itself a sum over the chips. XLA merges two such sums if they
#   stand next to each other. JAX had put LoRA's gradient between them. Now LoRA reads a copy of the
#   input, so its gradient comes last. The copy is gone once the program is compiled.
# - **Small tiles.** A product works on tiles in the chip's on-chip memory. The compiler lets one
#   product use 16 MiB of it; a v5p has 64 a core. Notebook 03 asks for 32.
#
# The mathematics stays the same, and so do the results, up to the order of a sum.

# %%
helpers.show_source(gemma.SharedInputs, train.compiler_options)

# %% [markdown]
# A program of six layers compiles in minutes. Here they are before and after both changes, and with
# int8 products: first as a whole, then by part, in milliseconds.

# %%
display(dryrun.show(dryrun.stored("v5p-8_31b_6layers"), {
    "recipe": "recipe", "seconds_predicted": "s, predicted", "seconds_exposed": "of these waiting",
    "temp_gib": "temporaries GiB", "compile_cpu_seconds": "CPU s to compile"}))
display(dryrun.parts_beside(dryrun.SIX).style.format("{:.1f}"))

# %% [markdown]
# Six layers say what sixty take: what every layer has counts ten times, output matrix and loss
# once. Where all layers are compiled as well, the rule can be tested.

# %%
for recipe in (dryrun.OURS, dryrun.FASTER):
    full = dryrun.stored_profile(recipe)
    few = dryrun.stored_profile(replace(recipe, layers=6))["profile"]
    reckoned = dryrun.milliseconds(timing.deeper(few, 10))
    print(f"{recipe.recipe}: {reckoned:,.0f} ms reckoned from six layers, with all compiled "
          + (f"{1e3 * full['seconds']:,.0f} ms" if full else "not stored yet"))

# %% [markdown]
# For `ours` the rule comes out 2 to 3 % too slow: layers share some work, such as masks, that it
# multiplies. So it flatters nobody.
#
# ### What each part of this step still loses
# Take from each part what it loses against its own limit, and see what the step would gain. Waits
# have the limit zero: in principle the links can carry while the chip computes.

# %%
rows, origin = dryrun.whole(dryrun.FASTER)
tokens, total = dryrun.real_tokens(dryrun.FASTER), dryrun.milliseconds(rows)
base = real["published"] / profiles["published"]["seconds"]
print(f"{total:,.0f} ms ({origin}): {1e3 * tokens / total / base:.2f} times the published speed; "
      + ", ".join(f"{n} times is {1e3 * tokens / base / n:,.0f} ms" for n in (8, 10)))
display(dryrun.losses(rows, tokens, base).style.format("{:,.1f}").format(
    "{:.2f}", subset=["times published without"]))

# %% [markdown]
# From the largest loss to the smallest:
#
# - **Waits.** Each block gathers its input and scatters its sum, forward and backward, and the chip
#   stands still meanwhile. Options that let them run beside products exist (*async* below). Six layers
#   of this step compile with them for 64 CPU seconds a layer, and are as slow as before: 133.0 instead
#   of 132.8 ms, the waits 18.4 instead of 19.4.
# - **Attention.** Scores go to HBM and come back for the maximum, the sum and the weights. A kernel
#   that keeps them on the chip would save most of it (section 6).
# - **LoRA.** A rank of 64 fills half of a matrix unit. Each product also reads or writes whole
#   activations for little work.
# - **Norms, conversions, optimizer.** Many short passes over memory.
# - **MLP, projections, output matrix.** They run at more than nine tenths of the peak. In bfloat16
#   nothing is left here; int8 halves the limit itself.
#
# So eight times is reached. Ten times in bfloat16 would need all waits gone and a part
# of attention's loss as well. A v5p multiplies int8 twice as fast, but only products with frozen
# weights gain: MLP and projections. If they kept their share of the peak and rounding cost nothing,
# int8 would give at most this:

# %%
best = dryrun.with_int8(rows)
print(f"int8, at best: {best:,.0f} ms, {1e3 * tokens / best / base:.2f} times the published speed")

# %% [markdown]
# "At best" is far from what the compiler makes. The tables above have six layers with 11's int8
# products and the first of the two changes (one sum, not more on-chip memory). MLP and projections
# are shorter, but not by half, and the chips wait more than twice as long: sums over the chips travel
# in 32 bits, as all-reduces of 51 ms, and rounding needs a token's largest number, which may lie on
# another chip. In all they are slower than `ours`, by a little, and than `ours, faster` by a lot. So
# ten times is not reached, and int8 stays an option that is off.
#
# ### What else was tried
# Variants on parts of the program, where a compilation takes seconds to minutes. Most change nothing.
# Here are one layer's MLP with its adapters, forward and backward, and the three variants that made it
# clearly faster. (All of them are in `data/dryrun/search.csv`; its README says what nobody has tried.)

# %%
search = dryrun.stored("search").set_index("program")
faster = {"as it is": "stream cut by width",
          "more on-chip memory": "stream cut by width, 32 MiB of VMEM",
          "weights gathered beside the products":
              "stream cut by tokens, weights gathered, async, one step",
          "int8 weights, gathered": "stream cut by tokens, weights gathered, int8"}
look = search.loc[[f"MLP, mesh (1, 4), {program}" for program in faster.values()],
                  ["milliseconds", "compute", "waits", "temp_gib"]]
look = look.set_axis(["ms", "ms computing", "ms waiting", "temporaries GiB"], axis="columns")
look.set_axis([*faster], axis="index").style.format(precision=2)

# %% [markdown]
# More on-chip memory is the second of the two changes. Gathering weights takes the memory that a second
# row would need. The last row is int8 (11). A (2, 2) mesh loses: 72.6 against 64.5 ms for two layers,
# since there the compiler merges LoRA's small sums with the large ones, which then move twice the
# bytes.
#
# Such options go to `lowered.compile(compiler_options={...})` or into the variable
# `LIBTPU_INIT_ARGS`, not into `XLA_FLAGS`; `tools/step_search.py` lists what each row sets.
#
# ## 6. Attention by blocks
# For a row of T tokens Tunix computes all T x T scores and masks at least half of them away. Ours
# takes 1,024 queries at a time. In a sliding layer none of them may look further back than 1,023
# tokens: at most 2,048 keys are enough. In a full-attention layer it is those up to the block's
# end. What is never computed needs neither time nor memory.

# %%
helpers.show_source(gemma.attend)

# %% [markdown]
# `gemma.use_block_attention` puts it into the model. It is plain JAX: the compiler counts all of
# it, and it runs on a CPU. The proof, in float32, with a packed mask and a small random model that
# has the 31B's five sliding layers and one full one with V = K: same logits, same gradients, up to
# the rounding of sums taken in another order.

# %%
rng = np.random.default_rng(0)
tokens = jnp.asarray(rng.integers(0, 96, (1, 256)))
segment_ids = jnp.asarray(np.sort(rng.integers(1, 5, (1, 256)), axis=1))
model = dryrun.small_model()
dense = dryrun.logits_and_gradient(model, tokens, segment_ids)
gemma.use_block_attention(model, 64)
blocks = dryrun.logits_and_gradient(model, tokens, segment_ids)
worst = max(abs(a - b).max() / max(abs(a).max(), 1e-6) for a, b in zip(dense, blocks, strict=True))
print(f"{len(dense) - 1} gradients and the logits agree to {worst:.1e} of their largest entry")
assert worst < 1e-4

# %% [markdown]
# ### What the compiler cannot judge: splash attention
# JAX ships a hand-written TPU kernel, splash attention, that skips masked blocks, too, and takes
# segment ids. (Tunix's use of it drops them, so packed examples would read each other.) On the CPU,
# interpreted, it computes what `attend` computes.

# %%
keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (1, 256, heads, 128)) * 0.3
           for key, heads in zip(keys, (4, 2, 2)))
mask = jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :])
one_cpu = gemma.make_mesh(model.config, (1, 1), jax.devices("cpu")[:1])
attend = dryrun.splash_on(one_cpu, block=128, interpret=True)
for window in (None, 64):
    off = abs(attend(q, k, v, mask, window, 128) - gemma.attend(q, k, v, mask, window, 128)).max()
    print(f"window {window}: largest difference {off:.1e}")
    assert off < 1e-4

# %% [markdown]
# But what does the compiler think it costs? Here is the attention of one layer of the 31B alone,
# forward and backward, T = 4,096, heads over four chips, in three ways.

# %%
attention = dryrun.attention_table(cfg.full_table and bool(libtpu))
display(dryrun.show(attention, {
    "kind": "layer", "attention": "attention", "flops_per_chip": "TFLOP per chip",
    "bytes_per_chip": "GB per chip", "seconds_predicted": "s, predicted",
    "seconds_estimate": "s, estimate", "temp_gib": "temporaries GiB"}))
print(f"the kernel's products in 60 layers, one row: {dryrun.splash_floor() * 1e3:.0f} ms at peak")

# %% [markdown]
# Of the splash rows the compiler counts only what surrounds the kernel: the kernel is a black box
# to its cost model, and its text says no cycles. A step with it would look faster than it can be, so
# it stays out of the table until someone measures it. Its FLOPs can be counted by hand: for our two
# rows its products take 75 ms at the peak, where attention by blocks takes 245 ms. At half of the peak
# the kernel would still save 95 of 1,179 ms.
#
# If you have a chip, two lines before section 5 of 03 switch it on:
# `from tpu_time import dryrun`, then `gemma.attend = dryrun.splash_on(mesh, block=512)`. Two layers
# of our step compile with it. Blocks of 1,024 need 20.9 MiB of on-chip memory in the full-attention
# layers: the compiler's own limit of 16 MiB refuses them, 32 MiB (section 5) take them.
#
# ## 7. The table
# Every idea is a row at full depth. `DRYRUN=full python 08_dryrun.py` compiles what is not stored or
# not predicted yet, one row at a time, and writes after each: stop it whenever you like. A row is
# compiled again if its recipe or a library's version changed. A change of notebook 03's step it
# does not see; "the same as stored" in section 3 is the check for that, as far as `ours` goes: the
# two changes of section 5 are not in it. `data/dryrun/README.md` explains columns and switches, and
# which tool makes the table of section 5's search.

# %%
if (cfg.full_table or cfg.again) and libtpu:
    dryrun.run_table(dryrun.RECIPES, keep=cfg.keep, again=cfg.again)

# %% [markdown]
# First the memory of one chip. What the published step returns is nearly as large as what it is
# given. Refused means that the compiler itself said no.

# %%
table = dryrun.in_order(dryrun.stored("v5p-8_31b"), [*dryrun.ROAD, dryrun.OURS, *dryrun.SEARCH])
figures.draw_memory(table)

# %% [markdown]
# Recomputing buys memory, not speed: with `BLOCK` four rows at once need less than half of the HBM,
# and a fifth of the speed is lost, as the next table predicts. Letting all positions meet the output
# matrix costs 1.6 GiB and 1 % of the time. Three rows leave 0.3 GiB, which code and fragmentation
# would take: treat them as not fitting.
#
# Then the time of one micro-step: *predicted* by the time model, with what the chip waits in it,
# and beside it the compiler's estimate and the roofline. None is measured. Hours and dollars follow
# the prediction, for the steps alone and the published 9.2 million tokens.

# %%
dryrun.show(table, {"recipe": "recipe", "hbm_gib": "sum GiB", "fits": "fits",
                    "seconds_predicted": "s, predicted", "seconds_exposed": "of these waiting",
                    "tokens_per_second_predicted": "real tokens/s", "hours_predicted": "hours",
                    "dollars_predicted": "USD", "seconds_estimate": "s, estimate",
                    "seconds_roofline": "s, roofline"})

# %% [markdown]
# ### How many times?
# Five times the published real tokens per second is what this series set out for. `published` and
# `ours, faster`, which 03 runs, come from the same code and the same compiler. All three times see
# the same programs, each with its own blind spots.

# %%
for how, column in dryrun.SPEEDS.items():
    print(f"ours, faster: {dryrun.ratio(table, 'ours, faster', column=column):.2f} times the "
          f"published real tokens per second {how}")
best = dryrun.recommend(table, cfg.spare)
ours = table[(table.trainer == "03") & table.fits.astype(bool)]
print(f"recommended: {best.recipe} ({best.hbm_gib:.1f} of {best.limit_gib:.1f} GiB), the fastest "
      f"that is a whole optimizer step ({ours.seconds_predicted.notna().sum()} of our {len(ours)} "
      "rows that fit are predicted)")

# %% [markdown]
# The prediction's ratio is the largest, and the tokens per second behind it are the fewest: the
# estimate flatters both steps, the published one more.
#
# **One row or two?** A single row, compiled with the same two changes, is predicted 1 % faster per
# token than two at once, in half of the memory: less has to leave the chip between two products. We
# keep two, because 03's optimizer step has two rows, and two micro-steps would have to add up their
# gradients, a program that is not compiled. Where memory is short, set `rows_per_device=1` in 03 and
# lose nothing that this model can see.
#
# The road from the published recipe to ours is a product of factors. The axis is logarithmic and
# starts at the published speed, so a factor has the same length wherever it stands.

# %%
figures.draw_road(dryrun.road(table))

# %% [markdown]
# Packing alone gives 0.95 / 0.30 = 3.2 times as many real tokens. "Our step" is notebook 03's:
# float32 adapters on 360 modules, and nothing is returned that was not donated. Its rows are longer,
# which costs dense attention more than the rest gains; blocks make up for it. "One sum, on-chip
# memory" are the two changes of section 5.
#
# One change is missing, because it changes nothing. The published recipe praises
# `--xla_llvm_disable_expensive_passes`, but LLVM is XLA's back end for CPUs and GPUs. Two layers of
# either step, compiled with it, have the same FLOPs, bytes, memory and estimate
# (`v5p-8_31b_2layers.csv`), no sooner. What shortens a restart is JAX's compilation cache, which 03
# switches on.
#
# ## 8. What can you rent?
# The same question for every slice: which base dtype, which recomputation, how many hours and
# dollars for *your* tokens at *your* price. Change the two lines below. `will_it_fit` answers with
# a compiled row where there is one. Else it adds up the parts: what the step is handed, what the
# backward pass reads again, logits, gradients, weights gathered from other chips. For all compiled
# rows of 03's step but one the sum is within 10 % of the compiler's (`tests/test_fit.py`; two of its
# terms were fitted to these rows). The exception is int8 with `BLOCK` on a v6e-8, where the compiler
# keeps products of several layers at once and takes half as much memory again. So an estimated row has
# to leave a tenth of the chip free.

# %%
MY_TOKENS = dryrun.SAMPLES * dryrun.TOKENS_PER_SAMPLE
MY_PRICES = {}  # dollars per hour of a slice, for example {"v5p-8": 7.5}; else those of section 1
print(fit.will_it_fit("v6e", 4, base_dtype="int8", remat="DECODER"))
print(fit.will_it_fit("v6e", 8, remat="BLOCK", rows=4))

# %% [markdown]
# A run is more than its steps: it downloads, loads, compiles, validates and saves. `run_cost` adds
# these from assumptions that it states: 0.2 GB/s for every byte that moves, a quarter of an hour
# for three compilations. A plain number is predicted from a compiled program. A ≥ is only a lower
# bound: nothing was compiled, or part of its cost is unknown, so the chips' peak or bfloat16's time
# stands in (and tokens per second get a ≤). Never rank a ≥ against a plain number.

# %%
rented = dryrun.renters_table(fit.renters_rows(), MY_TOKENS, MY_PRICES)
display(rented.style.hide(axis="index"))
one_chip = dryrun.renters_table(fit.renters_rows(fit.SMALL, fit.ONE_CHIP), MY_TOKENS, MY_PRICES)
display(one_chip.style.hide(axis="index"))

# %% [markdown]
# What this means: for 9.2 million tokens the fixed part of a v5p-8's hour is longer than its steps,
# so a faster step buys little, and a second epoch costs only its steps, validations and saves. *At least* can rule a slice
# out, and no more: the same slice may need three times that. A v5e-8 or v5e-4 holds the 31B only
# with a quantised base (11). On a v6e-8 the four rows that 03 would run fit with `BLOCK`, at two fifths
# more tokens a second than on a v5p-8 (predicted; section 9 says why times of a v6e are the less certain
# ones).
#
# The table with fields to fill in is the page
# [What will it cost me?](https://github.com/OWNER/gemma4-on-tpu/blob/main/tools/site/cost.md) of
# the site. These are the compiled rows behind it, beside the v5p-8's of section 7. (One is predicted
# *below* its roofline, E2B on a v6e-1. XLA also counts bytes that never leave the chip, so its bound by
# bytes can be too high.)

# %%
NAMES = ("v6e-1_e2b", "v5e-1_e2b", "v5e-1_e4b", "v5p-32_31b", "v6e-8_31b", "v6e-4_31b", "v5e-8_31b",
         "v5e-4_31b")
others = pd.concat(map(dryrun.stored, NAMES)).fillna({"base_dtype": "bfloat16"})
dryrun.show(others, {"topology": "slice", "size": "model", "base_dtype": "base",
                     "micro_batch": "rows", "sequence_length": "tokens a row", "remat": "remat",
                     "hbm_gib": "sum GiB", "limit_gib": "limit GiB", "fits": "fits",
                     "seconds_predicted": "s, predicted", "seconds_roofline": "s, roofline"})

# %% [markdown]
# ## 9. How far from the truth, how far from the peak
# One time is known: the published run took 3.34 h for 1,244 steps of eight micro-steps (published).
# That clock also holds loading, compiling and saving, and nobody published how long these took. By
# 01's assumptions it is 0.4 to 0.5 h. A ratio of 1 would be a perfect prediction.

# %%
dryrun.validation(table).style.format("{:.3f}")

# %% [markdown]
# So the prediction is between 4 % under and about 12 % over, depending on how much of the 3.34 h
# was not steps. The estimate is 30 to 40 % short, the roofline more than 60 %.
# And the published run (May 2026) had another libtpu and another JAX than the ones that compiled
# here (0.0.42.1 and 0.10.2): its program was not exactly this one.
#
# One number is consistency, not proof: a model that is wrong twice can hit it, too. What else
# speaks for it: nothing in it was fitted, and products and collectives of known size come out at
# the data sheet's times (`tests/test_program.py`).
#
# ### What others measured
# The author of [tpuchat](https://github.com/vorushin/tpuchat) published 275 ms for a step of a model
# of 163.6 M parameters on one v6e chip, and times of some parts. `tools/anchors.py` states these
# programs again, in the same shapes. The step contains splash attention, a kernel of which the text
# says no cycles, so it gets two bounds. *Upper*: attention in plain JAX, which a kernel is there to
# beat. *Lower*: no attention, and the kernel's products at the chip's peak added by hand.

# %%
dryrun.show_anchors(table)

# %% [markdown]
# The model misses here, and to the slow side. The measured step is faster than its *lower* bound,
# so on a v6e the prediction is at least 17 % too long. A bare product comes out 4 % short. The loss,
# which has no kernel, is predicted to take 1.7 times what it took. It was measured for 4 rows, and the
# step has 64: sixteen times that miss is 44 ms, nearly all of the 47 by which the step misses its lower
# bound. So we suspect the back end's cycles where much
# arithmetic for each number is fused to a product, as in softmax and soft cap. The update errs to
# the other side: that was one call from the host, which a program's text does not know.
#
# Three cautions. The measured programs had an earlier compiler, ours are restated, and their clocks
# include the host. What follows for this notebook: section 8's times of v6e slices are likely too
# long, while a v5p, whose chip has other units, keeps its single anchor. MaxText's published step
# times stay unjudged: we found none without kernels. Nothing was fitted to any of these numbers.
#
# Useful work is 4N FLOPs per real token (N parameters; a frozen base needs 2N forward and 2N
# backward). Its share of the four chips' peak says how much could still be gained.

# %%
forms = {"real tokens/s": "{:,.0f}", "waits": "{:.0%}", "share of peak": "{:.0%}"}
dryrun.shares(table, ["published", "ours", "ours, faster"]).style.format(forms, precision=2)

# %% [markdown]
# ## Recap
# - The TPU's compiler answers on a machine without a TPU: what fits, FLOPs, bytes, and a schedule
#   from which the time can be predicted.
# - Packing is the largest factor, 3.2 times: 70 % of the published positions were padding.
# - XLA's own estimate leaves out the links between the chips: 30 to 40 % short of the published run,
#   where the prediction is between 4 % short and 12 % long.
# - A step must not return what it does not change.
# - A kernel that the cost model cannot see into makes any estimate look good. We left it out.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `libtpu is not on this machine` | macOS, Windows, ARM, or not installed | stored results are shown; on Linux x86-64 see section 1 |
# | `Unable to initialize backend 'tpu_compiler'` | JAX started before section 1 | restart the kernel, run from the top |
# | killed while compiling | a full-depth compile needs up to 13 GB | close other programs; stored rows are kept |
# | a row with nothing but a sum | refused: more HBM than the chip has | fewer rows at once, shorter rows, or recompute (`remat`) |
# | a row is compiled again | a library's version changed | intended: the numbers belong to versions |
#
# ### Exercises
# 1. What is the longest row that fits a v5p-8 with block attention and no recomputation? Section 7's
#    table has one row of 4,096 tokens and one of 8,192.
#
# <details><summary>Solution</summary>
#
# 16.7 of the 95.7 GiB are arguments. What remains of the sums, 42.2 and 72.6 GiB, grows from 25.5 to
# 55.9, by 30.4 for 4,096 more tokens, and may take 79: about 3,100 tokens more than 8,192, so some
# 11,000 (extrapolated; scores grow faster than the length). To check, add
# `replace(ONE_ROW, recipe="one row of 11,264", sequence_length=11_264)` to `SEARCH` in
# `tpu_time/dryrun.py` and run with `DRYRUN=full`.
#
# </details>
#
# 2. Why does the one-hot loss over 262,144 classes not cost more memory than integer labels?
#
# <details><summary>Solution</summary>
#
# XLA fuses the comparison into the sum: the one-hot array never exists. Fewer *positions* do help:
# the recipe `all positions in the loss` says how much.
#
# </details>
#
# Next appendix:
# [09 · A Gemma 4 small enough for a laptop, pretrained from scratch](09_tiny_base.ipynb).
