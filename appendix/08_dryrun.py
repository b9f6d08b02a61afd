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
# # 08 · Appendix: compile the 31B training step for a TPU you don't have
#
# **Will your training step fit, how long will it take, and what will it cost?** You'd like to know before you rent
# anything. The TPU's own compiler can tell you, because it runs on any x86-64 Linux machine, with no TPU in it. Here it
# compiles two layers of notebook 03's step, and the tables show what it said about all 60, and about a recipe that
# others published ([10](10_published.ipynb)). Read 03 first.
#
# | | |
# |---|---|
# | **Needs** | Linux on x86-64 and `./setup.sh dryrun` (libtpu, 0.7 GB) for the live part; without it, you see stored results |
# | **Reads** | `data/configs/` (shapes of the models) and `data/dryrun/` (stored rows); no weights |
# | **Writes** | figures under `RUN_DIR/figures/`; `data/dryrun/*.csv` with `DRYRUN=full` (compiles what's missing) or `DRYRUN=again` (predicts times again) |
# | **Time and cost** | one to five minutes on two cores and 2 GB. `DRYRUN=full`: 4 to 30 CPU minutes and 8 to 25 GB of memory per row of a whole model (36 GB for rows of 16,384 tokens). No TPU |
#
# Memory is *compiled*, times are *predicted*, and we've measured neither on a TPU. (Section 9 compares them with what
# others measured.) The [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/GLOSSARY.md) has the terms.

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: **08 dry run** · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb) · [14 JAX](14_jax.ipynb)

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
# ## 1. The trick, and what it says about time
# **How can a compiler answer for a chip that you don't have?** `libtpu`, the library that drives a TPU, contains the
# compiler ([01](01_setup.ipynb), section 2). All it wants is a *topology*, a description of devices. You lay a mesh
# over them, *lower* a function (JAX writes its operations down in the compiler's language), compile it, and ask. First
# the four chips of a v5p-8:

# %%
from tpu_time import compiler, predict

libtpu = compiler.start_here()  # before JAX, which looks for the library when it starts
if libtpu:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices

# %% [markdown]
# And 01's product of two matrices:

# %%
if libtpu:
    rows = NamedSharding(jax.make_mesh((4,), ("rows",), devices=chips), PartitionSpec("rows"))
    matrix = jax.ShapeDtypeStruct((8_192, 8_192), jnp.bfloat16, sharding=rows)
    product = jax.jit(lambda a, b: a @ b).lower(matrix, matrix).compile()
    plan = product.memory_analysis()
    print(f"each chip: {plan.argument_size_in_bytes / 1e6:.0f} MB of inputs, "
          f"{plan.output_size_in_bytes / 1e6:.0f} MB of output, "
          f"{plan.temp_size_in_bytes / 1e6:.0f} MB in between")

# %% [markdown]
# Put your own function in place of the product, and you know whether it fits. If it doesn't, the compiler (its name is
# XLA) raises `RESOURCE_EXHAUSTED`. What's new here is that the compiled program, printed as text, also tells how long
# it takes. (The *links* are the wires between chips.)

# %%
if libtpu:
    found = predict(product.as_text(), "v5p-8")
    print(f"{1e3 * found.seconds:.2f} ms, {1e3 * found.exposed:.2f} of them waiting for the links")

# %% [markdown]
# It waits for the second matrix: each chip has only a quarter of that, and needs all of it.
#
# **A topology, a mesh, and `lower().compile()`: with these you can ask a TPU's compiler without a TPU.**
#
# ## 2. The answers first
# **Will the 31B's training step fit a v5p-8, how long does a run take, and what does it cost?** Here are the answers.
# The rest of the page shows where they come from. (`remat=NONE` says that the backward pass computes nothing a second
# time.)

# %%
from tpu_time import fit

answer = fit.will_it_fit("v5p", 4)
print(answer)

# %% [markdown]
# And here's a whole run, over as many samples and tokens as the published one had. (Section 9 says where
# the range of the steps comes from. The shortest total adds up all the short ends, and the longest all the long ones.)

# %%
cost = fit.run_cost(answer, 10_000 * 922, fit.price("v5p", 4))
for part, (least, most) in cost["ranges"].items():
    print(f"{least:4.1f} to {most:4.1f} minutes: {part} ({fit.WHERE_FROM[part]})")
print(f"{cost['hours_text']} hours and {cost['dollars_text']} dollars for 10,000 published samples")

# %% [markdown]
# **The step fits. A run's length is uncertain mostly because of loading, compiling and saving, which nobody has timed
# here.**
#
# ## 3. What is compiled
# **Are the stored numbers those of the real step?** We didn't write our step a second time: it's 03's own code. And we
# never allocate an array, because shapes, types and shardings are enough to lower a step. Let's compile two of its
# layers (one sliding, one full-attention) at the 31B's width, with one row of 2,048 tokens. All 60 layers take eight
# CPU minutes (`compile_cpu_seconds` in their row), so for those we'll show stored rows.

# %%
import numpy as np
import pandas as pd
from IPython.display import display

import tables
from appendix import parts
from appendix import step_figures as figures
from appendix import steps
from helpers import style
from tpu_time import bands

# %%
steps.remake(libtpu)  # nothing, unless DRYRUN=full or DRYRUN=again says what to make anew
if libtpu:
    with helpers.phase("compiling two layers of the 31B for a v5p-8", every=60.0):
        program, refusal, seconds = steps.compile_recipe(steps.LIVE)

# %% [markdown]
# Do they still come out as stored? Here's the memory of one chip. *Arguments* are what the step is given, *fresh
# outputs* don't overwrite an argument, and *temporaries* come and go while the step runs.

# %%
found = steps.predicted(steps.LIVE)  # as it's stored
TIMED = {"seconds_predicted": "s, predicted"}
if libtpu:
    found = predict(program.as_text(), steps.slice_of(steps.LIVE), parts.part_of)
    live = steps.beside_stored(program, refusal, seconds, found)
    display(steps.show(live, {"made": "made"} | steps.COUNTED | TIMED))
    print("the same as stored" if steps.all_equal(live) else "not as stored: try DRYRUN=full")
else:
    display(steps.show(steps.stored(steps.table_name(steps.LIVE)), steps.COUNTED | TIMED))

# %% [markdown]
# 03 compiles four more programs: one makes the optimizer's state, one evaluates, and two write answers. Each of them
# fits next to whatever else is on the chip. Nearly all of them need less than the step. (The exceptions are the
# evaluation on a v5e-8, which needs 11.9 GiB against the step's 11.2, and two programs beside [11](11_qlora.ipynb)'s step
# of one row on a v5e-4: the evaluation needs 14.4, and the answers after training need 13.2, against 13.0.)

# %%
style.folded("03's other programs, slice by slice", steps.other_programs())

# %% [markdown]
# **Is a step with one micro-batch a fair stand-in for a step with four?** No, the loop over them can cost gigabytes
# ([how we found out](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/dryrun/README.md#why-do-micro-batches-count)).
# So a row counts as *compiled* for 03 only if it has as many micro-batches as 03's step. All others are *estimated*.
#
# **A compiled row is exactly 03's step, or it doesn't count for 03.**
#
# ## 4. From a text to seconds
# **How does a compiled text turn into a time?** The text is the *schedule* of one chip: its instructions, in order. Nearly
# all of them carry a count of cycles from the part of the compiler that knows the chip. *Collectives*, with which chips
# exchange data, carry their sizes. `tpu_time/clock.py` walks through this text with a clock. An instruction moves it
# forward by its cycles, and a collective only by the time that the chip has to stand still
# ([all the rules](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/dryrun/README.md#how-does-a-text-become-seconds)).
# So we can draw when each of them starts:

# %%
figures.draw_trace(found, "08_trace", "two layers of our step on a v5p")

# %% [markdown]
# In each dark red piece the chip waits, nearly always for a collective. That gathers activations before a block (attention
# or MLP), or adds up the chips' results after it. The wide pink stretch in the middle is the output matrix, first forward
# and then backward. (In the middle of it, the chip waits for a copy of its own.) With only two layers beside it, the
# output matrix looks larger than it is in the whole model.
#
# (To zoom in, write `tpu_time`'s `write_trace(found, "trace.json.gz")` and open the file in
# [ui.perfetto.dev](https://ui.perfetto.dev).)
#
# **The compiled text is a timetable. It shows where a chip will wait, before you've rented one.**
#
# ## 5. Where the time goes
# **What would a better program save?** Two *recipes* (configurations of a training step) run through the rest of this
# page. `ours` is notebook 03's, on mesh (1, 4), so with tensor parallelism over all four chips. `published` is that of
# the published script (without its dropout). Each instruction knows its line of Python, so we can split their time by
# part of the model. (A *micro-step* is the work for one micro-batch.)

# %%
sixty = steps.predicted(steps.OURS)
print(f"with all 60 layers, the chip computes {sixty.compute / sixty.clock:.0%} of the time")
figures.draw_parts({steps.PUBLISHED: steps.predicted(steps.PUBLISHED), steps.OURS: sixty})

# %% [markdown]
# The published step computes whole layers again in the backward pass. It also keeps its numbers in float32. What does
# that buy it? In the products, nothing: the chip still multiplies in bfloat16, but first it has to read twice the bytes
# and round them.
#
# What about our step? Every part has a shortest possible time: its products at the chip's peak, or its bytes at the full
# speed of the HBM (the chip's memory). The column *at its limit* divides that shortest time by the time that we predict.
# Near 100% there's little to gain.

# %%
steps.show_parts(steps.OURS, sixty)

# %% [markdown]
# The MLP and the projections run near their limit. Attention and LoRA take about twice as long as they'd have to, but
# what they lose together is less than what the waits cost.
#
# **The published step loses time because it computes twice and reads float32. Our step loses most by waiting.**
#
# ## 6. Gather weights instead of adding sums
# **Can we get rid of the waits?** On mesh (1, 4) every block ends in a sum over the chips, and nothing can go on
# without that sum. On mesh (4, 1) each chip has whole rows and gathers the *weights* instead. They don't depend on
# what was just computed, so they can travel ahead, while the chip multiplies. The step has as many tokens as before, in
# four rows of 2,048.
#
# To read the table: where a recipe's name has no mesh, the step has as much tensor parallelism as the heads allow. That's
# mesh (1, 4) on a v5p-8, (4, 4) on a v5p-32 and (2, 4) on a v6e-8. *Remat* says what the backward pass
# computes again (`DECODER`: whole layers; `BLOCK`: the insides of attention and MLP). *int8* comes in section 7 and in
# [11](11_qlora.ipynb).

# %%
table = steps.stored("v5p-8_31b")
ours = steps.in_order(table, [steps.OURS, steps.ROWS])
ours = pd.concat([ours, steps.stored("v5p-32_31b"), steps.stored("v6e-8_31b")])
ours = ours[ours.sequence_length <= 4096]  # docs/MACHINES.md has longer rows
SHOWN = {"recipe": "recipe", "hbm_gib": "sum GiB", "fits": "fits",
         "real_tokens_per_step": "real tokens a step", "seconds_predicted": "s, predicted",
         "seconds_exposed": "of these waiting", "tokens_per_second_predicted": "real tokens/s"}
steps.show(ours, {"topology": "slice"} | SHOWN)

# %% [markdown]
# On a v5p the gathering mesh wins. That's less sure than the rest, because we know of nobody who has timed XLA's
# gathers on 2 x 2 chips while the chips multiply. (Exercise 2 shows how much hangs on it.) On a v6e-8, mesh (8, 1)
# loses, because there a gather goes round all 2 x 4 chips in one direction only. (Others measured that on a v5e-8, and a
# v6e's program names the same ring.)
#
# <details><summary><b>How do you train this way on a v5p?</b></summary>
#
# Set `max_tokens` and `sequence_length` to 2,048 in 02, and 03 takes such a mesh by itself. With examples as long as
# those of CodeV-R1 (the data set that 02 packs), that leaves out 8% of all tokens.
#
# </details>
#
# **On a v5p, gather weights rather than add up activations, if the links keep their promise: weights can travel ahead,
# and sums can't.**
#
# ## 7. The table
# **How much faster than the published step is ours, and what makes the difference?** Here's the road from one to the
# other, change by change:

# %%
table = steps.in_order(table, [*steps.ROAD, steps.DENSE])
steps.show(table, SHOWN)

# %% [markdown]
# <details><summary><b>What do the changes mean?</b></summary>
#
# - *bfloat16, no remat*: `published` keeps its numbers in float32 and computes whole layers again (`DECODER`). `ours`
#   computes in bfloat16, and nothing a second time (`NONE`).
# - *Packed rows*: only 30% of the published tokens are real (922 a row, by the authors' count). We take 95% of ours for
#   real, because [02](02_data.ipynb) packs examples of these lengths at least that full.
# - *Our step* has float32 adapters on 360 modules, attention by blocks (*dense attention*, all scores of a row at once,
#   doesn't fit), two rows at once, outputs that all overwrite an argument, and logits only for the trained tokens.
# - *int8 products*: the chip multiplies in int8 ([11](11_qlora.ipynb)).
#
# </details>
#
# So how many times as fast is our step, and how sure is that? One *sigma* is our typical miss in section 9. If we miss
# here as we do there, a range of one sigma contains the true value two times in three, and one of two sigmas nineteen
# times in twenty. And what you wait for is a whole run, not a step. (The published run took 3.34 hours.)

# %%
speed = table.set_index("recipe").tokens_per_second_predicted
for recipe in (steps.OURS, steps.ROWS):
    times = speed[recipe.recipe] / speed["published"]
    print(f"{recipe.recipe}: a step {times:.1f} times as fast, {bands.between(times, 2)} with one "
          f"sigma, {bands.between(times, 2, sigmas=2)} with two")
    whole = fit.run_cost(answer, 10_000 * 922, fit.price("v5p", 4), speed[recipe.recipe])
    print(f"   a run takes {whole['hours_text']} hours; in the middle, it's "
          f"{3.34 / whole['hours']:.1f} times as fast end to end")

# %% [markdown]
# Packing alone gives 0.95 / 0.30 = 3.2 times, and any trainer can pack. The next figure has the other factors:

# %%
told = float(tables.published("training_results", "metric", "tpu")["throughput"])
figures.draw_road(steps.road(table), told)

# %% [markdown]
# **Why is the bar of int8 hatched?** Because nobody has timed such a step on a TPU ([what others
# gained](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/dryrun/README.md#how-far-may-a-time-be-off) with other
# models), and nobody knows what int8 costs in quality at 31B.
#
# **Take the bfloat16 number as the result. No measurement on a TPU backs our step with int8 products.**
#
# ## 8. What can you rent?
# **Which slice should it be?** Here are section 2's answers for every slice, each on the mesh that 03 takes for rows of
# the length in the table. How do we know whether a step fits?
#
# - *Compiled*: the compiler has built it. It fits if what the compiler reports adds up to no more than the chip has.
# - *Estimated*: nobody has compiled this step, so we add up its parts. It counts as fitting if it leaves a tenth of the
#   chip free, or three tenths with several micro-batches, because of their loop (section 3).
# - *Planned*: the step doesn't fit, and this is how much memory the compiler asked for.
#
# An int8 *base* saves memory, and time only where a chip waits for gathered weights. So we list it only where bfloat16
# doesn't fit. In the table, `rows x length` says how many rows the chips compute at once, and how many tokens a row has.
# `mesh` is `fsdp` by `tp`. (If you list the E2B, too, you'll see *yes, tight*: it fits, but no setting
# leaves a tenth of the chip free. On a v5e-4, 03's step computes one row at a time but has two, and that loop is why it
# doesn't fit. Section 3's step there has a single row.)

# %%
MY_TOKENS = 10_000 * 922  # the published run's samples, and its mean of tokens in one
MY_PRICES = {}  # dollars per hour of a slice, for example {"v5p-8": 7.5}
choices = fit.renters_rows(prices=MY_PRICES)
pd.DataFrame(fit.full_table(choices, MY_TOKENS)).style.hide(axis="index")

# %% [markdown]
# By these ranges, 03 costs about the same on a v5p-8, a v6e-8 and a v5e-8. So take the one that you can get, or the
# fastest of them. (On a v5e-8 the base is rounded to int8.) A v5p-32 is faster still, but it costs twice as much or more,
# because downloading and compiling don't get shorter with more chips.
#
# The v5e-8's range is wider because its slow end also counts slow links
# ([why](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md#the-nine-hours-minute-by-minute)).
# [What will it cost me?](https://github.com/OWNER/gemma4-on-tpu/blob/main/tools/site/cost.md) has fields for your own
# numbers.
#
# **Is it the same step on every slice?** No, the batch differs: 8,192 tokens on a v5p-8 or v5e-8 (about as many real
# ones as in the published batch), but 16,384 on a v6e-8 and 32,768 on a v5p-32. No run has shown what that does to the
# 31B.
#
# **Compare slices by hours and dollars where both are predicted. Elsewhere the cell says that nobody knows yet.**
#
# ## 9. Against what others measured
# **Why should you believe these times?** Because you can try the same rules on programs that others have timed on real
# chips (*anchors*), and see by how much we miss. `python -m tpu_time.anchors` compiles these programs in the same
# shapes. First the whole training steps (*MaxText* is Google's training code for large models in JAX):

# %%
anchors = pd.DataFrame(bands.anchors())
timed = anchors[anchors.name.str.match("maxtext|tunix")]
steps.show_timed(timed)

# %% [markdown]
# **How large is a typical miss?** Here are all programs. Hollow points don't count: in some the host takes as long as the
# chip, some have set a constant of our model, and some hold an operation whose time we can't predict. The *typical
# miss* is the root mean square of log(predicted / measured) over those that count. That's one sigma. The range of a
# ratio is √2 times as wide.

# %%
figures.draw_anchors(anchors)
misses = np.log(timed.predicted_ms.astype(float) / timed.measured_ms.astype(float))
print(f"typical miss: {100 * bands.typical_miss():.0f}% (one sigma); of the {len(timed)} whole "
      f"steps alone: {100 * np.sqrt(np.mean(misses**2)):.0f}%")

# %% [markdown]
# **Where should you be careful?**
#
# - Only five of the programs are whole training steps, and four of these come from one author. Four of the five took 11
#   to 19% less time than we predict (that's the table's +13 to +23%, seen from the other side). The fifth, an E2B, took
#   as long as we predict. Misses of one author's programs seem to go together, so with so few authors a sigma is only a
#   rule of thumb.
# - The published run is the only one of *this* model on *this* slice. Nobody timed its steps, but by the hours of the
#   whole run they took longer than we predict ([the
#   sum](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/STATUS.md#what-does-a-range-mean)). If ours do,
#   too, expect the lower end of our tokens per second, or a little less. (The ratio of the two wouldn't suffer.)
# - The test [isn't blind](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/dryrun/README.md#how-far-may-a-time-be-off),
#   and the programs were measured with earlier compilers than ours.
#
# <details><summary><b>And what about memory, and about writing text instead of training?</b></summary>
#
# - Memory: before XLA generates code, it plans its buffers, and others' reports of such plans agree with ours within
#   0.2% (`python -m appendix.memory`), and within 2% for three steps that the chips refused and that use another
#   attention kernel (`python -m appendix.splash`). Our tables have what XLA reports after a whole compilation. If the
#   program fits, that's up to 15% more than the plan (`tpu_time/compiler.py`). (If it doesn't, it may be far more: once
#   the plan said 15.4 GiB, and the compiler then asked for 25.1.) Others have published one number for a finished program,
#   but for a step that our compiler refuses, so we can't compare the two.
# - Writing: somebody timed the 31B on a v5e-8 in plain JAX. A token took 19.9 ms, and our clock says 18.9. A prompt of 256
#   tokens took 56 to 81 ms, and our clock says 55. For the same author's mixture of experts (the 26B-A4B) we predict 15 to
#   38% too little (`python -m appendix.decode`). If all these counted, the typical miss would be 19% ([why they
#   don't](https://github.com/OWNER/gemma4-on-tpu/blob/main/LOG.md)).
#
# </details>
#
# And has anybody run *this* repository on a TPU? (On a GPU [we've timed single
# steps](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/measured/README.md#on-a-gpu).)

# %%
from tables import measured

reported = pd.DataFrame(measured.beside_predictions())
if reported.empty:
    print("No report has come back yet: yours would be the first.")
else:
    display(reported)

# %% [markdown]
# **Other people's measurements say how far to trust a prediction. So wherever you decide by one, use its range.**
#
# ## Recap
# - With a topology, a mesh and `lower().compile()`, the TPU's compiler answers on a machine without a TPU.
# - Its text is a schedule, and a time follows from it. What others measured says how far to trust that time.
# - By our prediction, the fastest mesh on a v5p has no tensor parallelism.
#
# ### Exercises
# **Exercise 1: longer rows.** How long may a single row be if a v5p-8 recomputes nothing? Guess, then ask
# `fit.will_it_fit("v5p", 4, rows=1, row_length=8_192)` and its neighbors. (They need no compiler.)
#
# <details><summary>Solution</summary>
#
# 8,192 tokens take 77.8 of the 95.7 GiB, so they fit (estimated). 9,216 take 86.4. That leaves less than a tenth of the
# chip, which is too little for an estimate. (There's no loop: if rows have more than 4,096 tokens, 03's step is one row.)
#
# </details>
#
# **Exercise 2: slow links.** A prediction takes 0.90 of the links' speed for granted. At what speed would mesh (4, 1)
# lose its lead over mesh (1, 4)? Guess, then run this for 0.5, 0.4 and 0.25. (It needs no compiler, because the programs
# are kept.)
#
# ```python
# from tpu_time import links
# links.LINK = 0.5
# for recipe in (steps.PUBLISHED, steps.OURS, steps.ROWS):
#     print(recipe.recipe, steps.real_tokens(recipe) / steps.predicted(recipe).seconds)
# ```
#
# <details><summary>Solution</summary>
#
# At half of the links' speed, mesh (4, 1) would be 8.4 times as fast as the published step, against 8.1 for mesh (1, 4),
# so most of its lead is gone. At 0.4 it has lost it: 7.8 against 8.2. At a quarter it's 6.6 against 8.4. Once the weights
# take longer to travel than the chip multiplies, gathering ahead doesn't help anymore. (Mesh (1, 4) seems to gain only
# because the published step suffers more.) Set `links.LINK` back to 0.90 afterward.
#
# </details>
#
# Next appendix:
# [09 · A Gemma 4 small enough for a laptop, pretrained from scratch](09_tiny_base.ipynb).
