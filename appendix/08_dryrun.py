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
# **Will your training step fit, how long will it take, and what will it cost?** You'd like to know before you
# rent anything. The TPU's own compiler can tell you, because it runs on any x86-64 Linux machine, with no TPU in
# it. On this page we hand it the step that notebook 03 trains with, and the step of the recipe that others
# published ([10](10_published.ipynb) is about that recipe). Read notebook 03 first, because this page builds on it.
#
# | | |
# |---|---|
# | **Needs** | Linux on x86-64 and `./setup.sh dryrun` (libtpu, 0.7 GB) for the live part; without it, you see stored results |
# | **Takes** | `data/configs/` (shapes of the models); no weights, no data |
# | **Makes** | `data/dryrun/*.csv` with `DRYRUN=full`; figures under `RUN_DIR/figures/` |
# | **Costs** | two to five minutes on two cores and 2 GB. `DRYRUN=full`: 4 to 19 CPU minutes and 8 to 22 GB of memory per row of all 60 layers. No TPU |
#
# The outputs below come from the tiny run on two CPU cores, but their numbers are about the 31B and the E2B on
# real TPU slices (groups of chips that are rented together). Memory is *compiled*, and times are *predicted*. We
# measured none of them.
# The [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/GLOSSARY.md) has the terms.

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
# ## 1. The trick in five lines
# **How can a compiler answer for a chip that you don't have?** `libtpu` is the library that drives a TPU. The
# compiler inside it works without one: all it wants is a *topology*, a description of devices that nobody has to
# own. You lay a mesh over these devices, *lower* a function (JAX writes its operations down in the compiler's
# language), compile it, and ask. Here we multiply two matrices on the four chips of a v5p-8. `compiler.start` has
# to come before JAX, because JAX looks for the library when it starts.

# %%
from tables import hardware
from tpu_time import compiler

has_chips = hardware.here().accelerator == "tpu"
libtpu = "" if has_chips else compiler.start()  # it would take the real chips' library
if libtpu:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    rows = NamedSharding(jax.make_mesh((4,), ("rows",), devices=chips), PartitionSpec("rows"))
    matrix = jax.ShapeDtypeStruct((8_192, 8_192), jnp.bfloat16, sharding=rows)
    product = jax.jit(lambda a, b: a @ b).lower(matrix, matrix).compile()
    print(product.memory_analysis())
elif has_chips:
    print("This machine has real chips, so this page leaves them alone: what follows is stored. "
          "To compile, run it on a machine without a TPU.")
else:
    print("libtpu is not on this machine (./setup.sh dryrun): what follows is stored")

# %% [markdown]
# These are bytes on one chip. A quarter of each matrix comes in, and a quarter of their product goes out.
#
# Put your own function in place of the product, and `v5e:2x4` or `v6e:1x1` in place of the topology. Then you
# know whether it fits before you rent anything. If it doesn't, the compiler raises `RESOURCE_EXHAUSTED` and says
# how much memory it asked for. (The compiler's name is XLA; its flags go into `compile(compiler_options={…})`.)
#
# The compiled text also tells how long it takes:

# %%
from tpu_time import predict

if libtpu:
    found = predict(product.as_text(), "v5p-8")
    print(f"{1e3 * found.seconds:.2f} ms, {1e3 * found.exposed:.2f} of them waiting for the links")

# %% [markdown]
# <details><summary><b>What does the product wait for?</b></summary>
#
# Each chip has a quarter of the rows of both matrices, but it needs all the rows of the second one. That's
# 134 MB, and three quarters of them have to come from the other chips.
#
# </details>
#
# **A topology, a mesh, and `lower().compile()`: with these you can ask a TPU's compiler without a TPU.**
#
# ## 2. The answers first
# **Will the 31B's training step fit a v5p-8, how long does a run take, and what does it cost?** Let's begin with
# the answers; the rest of the page shows where they come from. The memory is *compiled*. The time of the steps is
# *predicted*, and section 9 says how wide its range has to be. Everything else is assumed, or others measured it
# somewhere else, so each of these parts has a range, too. Add up all the short ends and you get the fewest hours; add
# up all the long ends and you get the most. Section 8 has the same answers for every slice.

# %%
import pandas as pd

from tpu_time import bands, fit

answer = fit.will_it_fit("v5p", 4)
cost = fit.run_cost(answer, 10_000 * 922, fit.price("v5p", 4))
print(answer)
for part, (least, most) in cost["ranges"].items():
    print(f"{least:4.1f} to {most:4.1f} minutes: {part} ({fit.WHERE_FROM[part]})")
print(f"{cost['hours_text']} hours and {cost['dollars_text']} dollars for 10,000 published samples")

# %% [markdown]
# **The step fits. How long a run takes depends less on its steps than on what happens around them: loading,
# compiling and saving, which nobody has timed here.**
#
# ## 3. What is compiled
# **Which steps do we compare, and are they the real ones?** A *recipe* is one configuration of a training step.
# There are three on this page:
#
# - `published` does what the published script does, without its dropout. Only 30% of its tokens are real, and the
#   rest is padding. (A row has 922 real ones on average, counted by the authors.)
# - `ours` is notebook 03 on mesh (1, 4), which means tensor parallelism over all four chips. Its rows are packed,
#   and we count 95% of their tokens as real.
# - `ours, mesh (4, 1), int8 products` gives each chip whole rows and multiplies in int8. Sections 6 and 7 come
#   back to it.
#
# They differ in these fields. (`fill` is the share of real tokens. `loss` says how many positions of a row are
# multiplied by the output matrix. With *one-hot* that's all of them; a number is the most that a row may train.)

# %%
import dataclasses

import numpy as np
from IPython.display import display

from appendix import parts
from appendix import step_figures as figures
from appendix import steps
from tpu_time import predict, write_trace

if libtpu:
    compiler.register()  # Tunix shards for a TPU only if JAX's first device is one
recipes = (steps.PUBLISHED, steps.OURS, steps.ROWS_INT8)
fields = pd.DataFrame({recipe.recipe: dataclasses.asdict(recipe) for recipe in recipes})
fields[fields.astype(str).nunique(axis=1) > 1].drop("recipe")

# %% [markdown]
# We didn't write our step a second time for this page. Model, loss, optimizer and step are 03's own, and so are the
# shapes: `helpers/programs.py` traces them for 03 and for this page. And we never allocate an array, because shapes,
# types and shardings are enough to lower a step.

# %%
helpers.show_source(steps.lower_ours)

# %% [markdown]
# **Is a step with one micro-batch a fair stand-in for a step with four?** We thought so. For the E2B this page once
# compiled a step with one, and it fit on a v5e. Then the compiler refused the real step with four: it asked for 17.9
# GiB, and a chip has 15.75.
#
# <details><summary>Why?</summary>
#
# The four micro-batches run in a loop. A TPU stores E2B's second embedding (262,144 tokens, 35 layers, 256 numbers)
# with the layers outermost, but the loop wants the tokens outermost. So XLA made a copy of 5 GiB, moved the copy
# out of the loop, and kept both. Now `gemma.place` stores that table token by token from the start,
# and the step with four takes 14.7 GiB (compiled).
#
# </details>
#
# So a row of our tables counts as *compiled* for 03 only if its program has as many micro-batches as 03's step. On
# this page, every other step counts as *estimated*.
#
# Besides its step, a run needs four more programs: one makes the optimizer's state, one evaluates, and two answer,
# before training and after it. Here's how many of them we've compiled for the slices that 03 is meant for, and how
# much memory the largest one needs, with whatever else lies on the chip while it runs. *ms a token* is predicted: how
# long it takes until each of the four answers has grown by one token.

# %%
import os

others = pd.DataFrame(steps.stored_rows(steps.OTHERS))
waiting = steps.missing_programs()
if libtpu and os.environ.get("DRYRUN") == "full":
    steps.run_programs(waiting)
if len(others):
    others["gib"] = pd.to_numeric(others.hbm_gib)
    others["ms"] = 1e3 * pd.to_numeric(others.seconds_a_token)
    others["fits"] = others.fits == "True"
    programs = others.groupby(["topology", "size", "recipe"], sort=False).agg(
        compiled=("program", "size"), gib=("gib", "max"), limit=("limit_gib", "first"),
        fits=("fits", "all"), ms=("ms", "max")).reset_index()
    names = {"gib": "GiB of the largest", "fits": "all fit", "ms": "ms a token"}
    forms = {"gib": "{:.1f}", "fits": steps.yes_or_no, "ms": "{:.0f}"}
    display(programs.style.hide(axis="index").format(forms, na_rep="").relabel_index(
        [names.get(column, column) for column in programs], axis="columns"))
print(f"{len(others)} compiled, {len(waiting)} not yet")

# %% [markdown]
# All 60 layers take ten CPU minutes, which is too long for a page. So we compile two of them live: one sliding and one
# full-attention layer at the 31B's width, with one row of 2,048 tokens.

# %%
found = steps.predicted(steps.LIVE)  # as it is stored
if libtpu:
    with helpers.phase("compiling two layers of the 31B for a v5p-8", every=30.0):
        program, refusal, seconds = steps.compile_recipe(steps.LIVE)
    found = predict(program.as_text(), steps.slice_of(steps.LIVE), parts.part_of)
    live = pd.DataFrame([steps.measure(steps.LIVE, program, refusal, seconds)
                         | steps.columns_of(steps.LIVE, found)])
    display(steps.show(live, steps.COUNTED | {"seconds_predicted": "s, predicted"}))
    sizes, before = list(steps.COUNTED), steps.stored("v5p-8_31b_2layers")
    same = np.allclose(live[sizes], before[sizes], rtol=1e-4)
    print("the same as stored" if same else "not as stored: DRYRUN=full makes the table anew")

# %% [markdown]
# The table shows the memory of one chip. *Arguments* are what the step is given. *Fresh outputs* are only those
# outputs that need memory of their own: the others take the place of an argument that the step may overwrite (JAX
# calls such an argument *donated*). *Temporaries* come and go while the step runs. The program's own code needs some
# memory, too, which isn't counted here.
#
# **A compiled row is exactly 03's step, or it doesn't count for 03.**
#
# ## 4. From a text to seconds
# **How does a compiled text turn into a time?** The text is the *schedule* of one chip: its instructions, in
# order. Nearly all of them carry a count of cycles from the back end, the part of the compiler that knows the
# chip. *Collectives*, the instructions with which chips exchange data, carry their sizes. `tpu_time/clock.py`
# walks through this text with a clock in its hand. An instruction moves the clock on by its cycles. A collective
# moves it on only as long as the chip has to stand still for it.
#
# <details><summary><b>The rules in full</b></summary>
#
# - **Instructions.** For some of them the back end says that it has no cost model (`COST_MODEL_TYPE_INVALID`), and
#   then it counts far too many cycles. We let such an instruction take at most as long as copying its bytes would,
#   and a measured copy reaches 0.83 of the speed of the HBM, the chip's memory.
# - **Collectives.** The bytes travel over the links that the group of chips can use, at 0.90 of the links' speed.
#   Loops on a v5e-4 reached that, and we assume it for v5p and v6e, too. If a collective stops the chip, the clock
#   waits for all of it. If it runs beside other work, it costs only the time that it still needs when its result is
#   asked for.
# - **The rest.** Instructions without a known cost may hold at most 2% of the FLOPs and bytes. Otherwise we give
#   no time. (What only moves data has a known cost: its bytes at the HBM's speed.)
#
# Peak and bandwidth are the vendor's. The clock rate, and the shape of the links, are the
# [scaling book's](https://jax-ml.github.io/scaling-book/tpus).
#
# </details>
#
# So a prediction knows when each instruction starts. The next cell writes that down as the trace that a profiler
# would have recorded (drop the file on [ui.perfetto.dev](https://ui.perfetto.dev) to look around in it), and draws
# it:

# %%
trace = helpers.run_dir("dryrun", "trace_2layers.json.gz")
trace.parent.mkdir(parents=True, exist_ok=True)
write_trace(found, trace, "two layers of our step, predicted for one chip of a v5p-8")
figures.draw_trace(found, "08_trace", "two layers of our step on a v5p")
sixty = steps.predicted(steps.OURS)
print(f"with all 60 layers, the chip computes {sixty.compute / sixty.clock:.0%} of the time")

# %% [markdown]
# Each dark red piece is a collective that stops the chip. It gathers activations before a block, or scatters the
# block's sum after it. (The whole step waits for a larger share of its time than these two layers do, because a third
# of their time goes into the output matrix, which has little to wait for.)
#
# **The compiled text is a timetable. It shows where a chip will wait, before you've rented one.**
#
# ## 5. Where the time goes
# **What would a better program save?** Each instruction knows the line of Python that it came from, so we can
# split the time by part of the model. Then look at the column *at its limit*. Imagine that the products of a part
# ran at the chip's peak, or that its bytes moved at full speed through the HBM, the chip's memory. What share of its
# time would the part still need? Near 100% there's little to gain, and a better program could save whatever is
# missing. (The tables leave out what takes less than 2% of the time.)

# %%
walked = {steps.PUBLISHED: steps.predicted(steps.PUBLISHED), steps.OURS: sixty}
figures.draw_parts(walked)

# %%
for recipe, found in walked.items():
    display(steps.show_parts(recipe, found))

# %% [markdown]
# The published step computes its layers a second time in the backward pass. And its operands are float32, which buys
# nothing: the matrix unit multiplies in bfloat16 all the same, but it has to read twice the bytes and round them.
#
# Our step recomputes nothing. What it still loses is mostly waits; then come attention and LoRA.
#
# ### Two changes that cost only compile time
# - **One sum where there were two.** In the MLP, gate and up read the same input. Its gradient is a sum of two
#   products, and each of these is itself a sum over chips. XLA merges two such sums if they stand next to each
#   other, but LoRA's gradient stood between them. So now LoRA reads a copy of the input. XLA optimizes the copy away,
#   and the second sum with it.
# - **Larger tiles.** By default the compiler lets one product use 16 MiB of on-chip memory. On a v5p, 03 asks for 32.
#
# **The published step loses time because it computes twice and reads float32. Our step mostly loses it waiting.**
#
# ## 6. Gather weights instead of adding sums
# **Can we get rid of the waits?** On mesh (1, 4) every block ends in a sum over the chips, and nothing can go on
# without that sum. On mesh (4, 1) each chip has whole rows and gathers the *weights* instead. They don't depend on
# what was just computed, so they can travel ahead, while the chip multiplies. We give this mesh four rows of 2,048
# tokens at once, which are as many tokens as before. On the larger slices we compare it with the most tensor
# parallelism that the heads allow: mesh (4, 4) on a v5p-32, and (2, 4) on a v6e-8.
#
# <details><summary><b>Heads forbid tp = 8 for the 31B. Which number forbids fsdp = 4?</b></summary>
#
# None, because fsdp divides rows and widths, not heads.
#
# </details>
#
# The mesh suits int8 products ([11](11_qlora.ipynb)), too. They round a token's activations, and for that they
# need a scale: the token's largest number. A chip that has whole rows finds it without asking the other chips.
# And in int8 the weights travel in half the bytes. What does it cost in quality? At the tiny size we saw no loss
# in three pairs of runs, and at 31B nobody has looked (11, section 6). Here are all sixty layers, compiled and
# predicted. (BLOCK and DECODER say what the backward pass computes again: the insides of attention and MLP, or
# whole layers.)

# %%
table = steps.stored("v5p-8_31b")
ours = steps.in_order(table, [steps.OURS, steps.ROWS, steps.ROWS_INT8])
ours = pd.concat([ours, steps.stored("v5p-32_31b"), steps.stored("v6e-8_31b")])
steps.show(ours, {"topology": "slice", "recipe": "recipe", "hbm_gib": "sum GiB", "fits": "fits",
                  "real_tokens_per_step": "real tokens a step",
                  "seconds_predicted": "s, predicted", "seconds_exposed": "of these waiting",
                  "tokens_per_second_predicted": "real tokens/s"})

# %% [markdown]
# The output matrix, with its 2.8 GB, is the one that isn't gathered. Each chip keeps a part of the vocabulary and
# multiplies all rows by it, so only 44 MB of hidden states have to travel. On a v5p the chip still waits for three
# things: the MLP's weights, the sum of the adapters' gradients, and its own copies.
#
# **How sure is that?** Less sure than the rest. On a v5p of 2 x 2 chips nobody has timed gathers that travel beside
# products. If the links reached only half of their speed, mesh (4, 1) would be 8.4 times as fast as the published
# step, against 8.1 for mesh (1, 4), so most of its lead would be gone (predicted in the same way).
#
# **On a v6e-8 mesh (8, 1) loses**, as far as we know. Gathers over its 2 x 4 chips go one way round a single
# ring. Others measured that on a v5e-8 (section 9). A v6e's program names the same ring, but nobody has timed it
# there.
#
# **Would you like to train this way?** On a v5p, set `max_tokens` and `sequence_length` to 2,048 in 02, and 03 takes
# mesh (4, 1), or (16, 1) on a v5p-32, by itself. It follows a rule: of the compiled rows that fit and are long enough
# for yours, it takes the one with the most predicted tokens a second. On a v6e-8 that's mesh (2, 4), even for rows of
# 2,048, although its step is compiled for rows of 4,096. You lose nothing by that, because 02 packs to your length, and
# 03 takes four rows at once instead of two, so a step keeps its tokens. (The compiler hasn't confirmed that four short
# rows fit. We conclude it, because they have as many tokens and less attention.)
#
# On a v5p you can also try int8 products: set `base_dtype="int8"` and `int8_products=True` in 03
# ([11](11_qlora.ipynb) explains them). On a v6e-8, mesh (8, 1) stays the slower one even then, as the table shows.
#
# Rows of 2,048 have a price, and your data pay it. If your examples are as long as CodeV-R1's, you drop the longest
# 3%. And because they're the longest, 8% of all tokens go with them.
#
# <details><summary><b>What does this mesh do to the answers before and after training?</b></summary>
#
# An answer grows by one token at a time. Gathering all the weights for each of them would take 290 ms on mesh (4, 1)
# (predicted from six compiled layers). So `gemma.greedy` leaves the weights where they are: each chip multiplies
# its part of them, and only the tokens' sums travel. That takes 12 ms (all 60 layers compiled, predicted; section 3
# has the table).
#
# </details>
#
# **On a v5p, gather weights rather than add up activations: weights can travel ahead, and sums can't.**
#
# ## 7. The table
# **How much faster than the published step is ours, and what makes the difference?** You don't have to compile
# anything to see it, because all rows are stored. (If you change a step, `DRYRUN=full` compiles what's missing. If
# you change the rules of section 4, `DRYRUN=again` predicts all times again and compiles nothing.)

# %%
if libtpu and os.environ.get("DRYRUN") == "full":
    steps.run_table(steps.RECIPES)
if os.environ.get("DRYRUN") == "again":
    steps.predict_again(steps.RECIPES)
table = steps.in_order(steps.stored("v5p-8_31b"), [*steps.ROAD, steps.ONE_ROW, steps.DENSE])
figures.draw_memory(table)

# %% [markdown]
# Recomputing buys memory, not speed. *One row* means micro-batches of a single row. They need about half the memory
# and 2% more time per token, so 03 takes two rows where they fit.

# %%
steps.show(table, {"recipe": "recipe", "hbm_gib": "sum GiB", "fits": "fits",
                   "real_tokens_per_step": "real tokens a step",
                   "seconds_predicted": "s, predicted", "seconds_exposed": "of these waiting",
                   "tokens_per_second_predicted": "real tokens/s"})

# %% [markdown]
# How many times the published speed is that, in real tokens per second? It's a ratio of two predictions, so we
# print it with a range. *One sigma* means: if we miss as we did in section 9, two of three such ranges hold. With two
# sigmas, nineteen of twenty do. But you don't wait for a step. You wait for a whole run, with its downloads,
# compilations, evaluations and answers, so we print the hours of one, too. (The published run took 3.34.)

# %%
import tables

speed = table.set_index("recipe").tokens_per_second_predicted
for recipe in (steps.OURS, steps.ROWS):
    times = speed[recipe.recipe] / speed["published"]
    whole = fit.run_cost(answer, 10_000 * 922, fit.price("v5p", 4), speed[recipe.recipe])
    print(f"{recipe.recipe}: a step {times:.1f} times as fast, {bands.between(times, 2)} with one "
          f"sigma, {bands.between(times, 2, sigmas=2)} with two;\n   a run takes "
          f"{whole['hours_text']} hours; in the middle, it's {3.34 / whole['hours']:.1f} times as "
          "fast end to end")
told = float(tables.published("training_results", "metric", "tpu")["throughput"])
figures.draw_road(steps.road(table), told)

# %% [markdown]
# Packing alone gives 0.95 / 0.30 = 3.2 times, since so much more of a row is real, and any trainer can pack. *Our
# step* in the figure is what 03 adds to that: float32 adapters on 360 modules, attention by blocks, two rows at once,
# and outputs that all take a donated argument's place.
#
# **And int8?** Section 9 compares our predictions with programs that others timed. We call these programs
# *anchors*, and none of them is a training step with int8 products. By the compiler's cycles, our products reach
# 94% of the chip's 918 TOPS (10¹² operations per second). Plain int8 products reached 96% on a v5e (section 9)
# and 61% on a v6e ([yangwhale/gpu-tpu-pedia](https://github.com/yangwhale/gpu-tpu-pedia), tpu/v7_perf). We don't
# know which of these a whole step would reach. So here's what would be left if it reached less than 94%:

# %%
peak, found = hardware.SLICES["v5p-8"].chip.int8, steps.predicted(steps.ROWS_INT8)
tokens = steps.real_tokens(steps.ROWS_INT8)
plain = speed[steps.ROWS.recipe] / speed["published"]
for share in (0.94, 0.8, 0.7, 0.6):
    seconds = steps.int8_at(found, share, peak)
    times = tokens / seconds / speed["published"]
    print(f"int8 products at {share:.0%} of the peak: {seconds:.3f} s a step, {times:.1f} times "
          f"the published speed, {times / plain:.2f} times the same mesh in bfloat16")
print(f"with the factors of others, 1.2 to 1.4: {1.2 * plain:.0f} to {1.4 * plain:.0f} times the "
      f"published speed; in bfloat16 it's {plain:.1f}")

# %% [markdown]
# Others have measured whole steps with int8 products. They gained a factor of 1.2 to 1.4: an 8B on v5e went from
# 58 to 70% of the peak ([marin 620](https://github.com/marin-community/marin/issues/620)), and the training of a
# mixture of experts on a v5p-8 became 21% faster at one width, and 37% faster at a larger one
# ([marin 2710](https://github.com/marin-community/marin/issues/2710)). They quantize their weights in each step,
# which a base that's frozen and stored in int8 doesn't need. So ours may gain more, but no measurement says so.
#
# **No measurement anchors a step with int8 products, so take the bfloat16 number as the result.**
#
# ## 8. What can you rent?
# **Which slice should it be?** Here are the answers of section 2 for every slice, on the mesh with the most tensor
# parallelism. There a base in fewer bits saves memory and no time, so the table shows it only where bfloat16 doesn't
# fit. Where no row is compiled, we estimate the memory by adding up the parts. Such a sum can be far off: one was 8
# GiB too low (int8, BLOCK, v6e-8). So a step counts as fitting only if it leaves a tenth of the chip free.
#
# One slice costs nothing: Kaggle lends everybody a v5e-8 (the dollars in its rows are what Google asks for one).
# A bfloat16 base doesn't fit there, and an int8 base does (compiled). So on a v5e-8 03 stores the base as int8 by
# itself. [MACHINES](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md#free-kaggles-tpu-v5e-8) adds
# up what a session there takes.
#
# **Is a step the same on every slice?** No, its batch isn't. 03's step has at least two rows, and more if the mesh
# computes more at once. So a v5p-8 has 8,192 tokens a step, which is close to the published batch, a v6e-8 has
# 16,384, a v5p-32 has 32,768, and a v5e-8 only 4,096 (its rows are half as long). The learning rate and the warm-up
# stay as they are. So on any slice but a v5p-8 it's a different recipe, and no run has shown what that does to the
# 31B.

# %%
MY_TOKENS = 10_000 * 922  # the published run's samples, and its mean of tokens in one
MY_PRICES = {}  # dollars per hour of a slice, for example {"v5p-8": 7.5}
choices = fit.renters_rows(prices=MY_PRICES)
display(pd.DataFrame(fit.full_table(choices, MY_TOKENS)).style.hide(axis="index"))
for recipe in (steps.OURS, steps.ROWS):
    cost = fit.run_cost(answer, MY_TOKENS, fit.price("v5p", 4), speed[recipe.recipe])
    print(f"v5p-8, {recipe.recipe}: {cost['hours_text']} hours, {cost['dollars_text']} dollars")

# %% [markdown]
# The hours are those of a whole run: it downloads, loads, compiles, validates and saves, too. `fit.WHERE_FROM`
# states what we assume about each of these. The same table with fields to fill in, for small models as well, is
# [What will it cost me?](https://github.com/OWNER/gemma4-on-tpu/blob/main/tools/site/cost.md).
#
# **Compare slices by hours and dollars where both are predicted. Elsewhere the cell says that nobody knows yet.**
#
# ## 9. Against what others measured
# **Why should you believe these times?** Because you can try the same rules on programs that others have timed on
# real chips, and see by how much we miss. For all of them but two collectives, we compiled the program here again, in
# the same shapes (`python -m tpu_time.anchors`; for memory `python -m appendix.memory`). Tunix's steps are LoRA, like
# ours. In MaxText's step we assume that attention, 2% of it, runs at half the peak. The table shows the whole
# training steps and the collectives; the figure has all programs.

# %%
anchors = pd.DataFrame(bands.anchors())
is_step = anchors.name.str.match("maxtext|tunix")
is_collective = anchors.name.str.contains("gather|psum")
shown = anchors[is_step | is_collective]
shown = shown.sort_values("measured_ms", key=pd.to_numeric, ascending=False)
display(shown[["program", "slice", "measured_ms", "predicted_ms", "miss", "source"]]
        .assign(source=shown.source.str.split(":").str[0]).style.hide(axis="index"))
figures.draw_anchors(anchors)

# %% [markdown]
# Has anybody run *this* repository on a chip? Whoever does gets a `report.json`. Each report that came back is in
# `data/measured/`, and here you see it beside what we had predicted.

# %%
from tables import measured

reported = pd.DataFrame(measured.beside_predictions())
if reported.empty:
    print("No report has come back yet: yours would be the first.")
else:
    display(reported)

# %% [markdown]
# <details><summary><b>Which clock makes a measurement longer, the device's trace or the host's?</b></summary>
#
# The host's, because it includes the time to send the program off (*dispatch*). Google's own pair for one product
# is 1.33 ms by the trace and 1.46 by the host.
#
# </details>
#
# Memory needs no clock. Others kept the reports that XLA itself wrote about Tunix's LoRA step, even for runs that
# didn't fit. `compiler.planned` asks for the same report here, in a tenth of the time of a whole compilation, and the
# table shows how far it's off. But such a report is only XLA's *plan*. The tables above come from whole compilations,
# which say up to a tenth more, and for those we have no check.

# %%
plans = pd.read_csv("data/anchors/memory.csv").rename(columns={"theirs_gib": "GiB a chip"})
plans["largest miss"] = plans.miss.abs()
plans.groupby(["model", "slice"], sort=False).agg(
    {"GiB a chip": ["size", "min", "max"], "largest miss": "max"}).style.format(precision=4)

# %% [markdown]
# And the published step of the 31B? All we know is the whole run: 3.34 hours for 9,952 micro-steps. That's 1.21 s
# for each, or 1.12 s if a quarter of an hour went into loading and compiling.
#
# All the ranges in this series follow one rule, which stands in `tpu_time/bands.py`. The *typical miss* is the root
# mean square of log(predicted / measured) over the programs of the figure. A ratio of two predictions has √2 of
# it. That's one sigma. Two kinds of rows are shown (hollow in the figure) but don't count:
#
# - **Single calls of a few milliseconds.** There the host takes as long as the chip, which isn't so for a training
#   step of a second. (AdamW's row alone would be half of the squared miss.)
# - **The gathers and sums of a v5e-8.** They set one of the model's constants, so they can't test it.

# %%
published = table.set_index("recipe").seconds_predicted["published"]
timed = anchors[is_step].astype({"predicted_ms": float, "measured_ms": float})
misses = np.log(timed.predicted_ms / timed.measured_ms)
print(f"typical miss: {100 * bands.typical_miss():.0f}% (one sigma); of the {len(timed)} whole "
      f"steps alone: {100 * np.sqrt(np.mean(misses**2)):.0f}%")
print(f"published micro-step: {bands.between(published, form='{:.2f}')} s (one sigma; "
      f"{bands.between(published, form='{:.2f}', sigmas=2)} with two; middle {published:.2f}, "
      f"{published / 1.21 - 1:.0%} to {published / 1.12 - 1:.0%} off)")

# %% [markdown]
# The constant that the gathers of a v5e-8 set is our newest one. On its 2 x 4 chips a gather took 2.3 times what we had
# predicted, and the compiled text itself says why. A line of four chips has no link from its end back to its
# beginning. So the program names one ring through all eight chips, and sends one way round ("1DAllGather…"). With such
# a link (a *wrap-around*) it's different: the scaling book's ring of 16 reaches 95% of both directions. And on a v5p
# of 2 x 2 the text names a gather along both dimensions at once. So this slows down only a v5e-8 and a v6e-8, and the
# rows of both now count it.
#
# **Where should you be careful?**
#
# - Half of the programs that count are single products. Only five are whole training steps, and four of the five come
#   from one author. With the published step that's six, and we predict one of them right (Tunix's of Gemma 4). The
#   published step takes longer than we predict, the other four less. So a step's range rests on few programs, and it
#   could well be a little wider than we print.
# - The published step is the only one of *this* model on *this* slice. If our prediction of our own step misses in the
#   same way, expect the lower end of the tokens a second. The ratio between the two wouldn't suffer then.
# - The programs were measured with earlier compilers than ours.
# - For the all-reduce over 256 chips the prediction misses, and there's no second measurement that could say why.
# - The test isn't blind. We corrected two rules while looking at MaxText's row, and the links' 0.90 comes from twins of
#   two of these programs (the loops).
#
# **Other people's measurements say how far to trust a prediction, so it's a range and never a single number.**
#
# ## Recap
# - With a topology, a mesh and `lower().compile()`, the TPU's compiler answers on a machine without a TPU.
# - Its text is a schedule, and a time follows from it. What others measured says how far to trust that time.
# - On a v5p the fastest mesh has no tensor parallelism, because weights can be gathered ahead and sums can't.
#
# ### Exercise
# Two square bfloat16 matrices, and their product, have to fit on one v5e chip. How large may they be? Reckon
# first, then ask the compiler with the lines of section 1 (`compiler.devices_of("v5e-1")` gives you the chip).
#
# <details><summary>Solution</summary>
#
# Three matrices of 2 n² bytes in 15.75 GiB: n = 53,090. The compiler takes 52,992 and refuses 53,248.
#
# </details>
#
# Next appendix:
# [09 · A Gemma 4 small enough for a laptop, pretrained from scratch](09_tiny_base.ipynb).
