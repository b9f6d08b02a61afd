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
# | **Costs** | one to three minutes on two cores and 2 GB. `DRYRUN=full`: 4 to 19 CPU minutes and 8 to 22 GB of memory per row of all 60 layers. No TPU |
#
# The outputs shown are those of the tiny run on two CPU cores; the numbers in them are about the
# 31B and E2B on real TPU slices: *compiled* (counts) or *predicted* (times), not measured. Terms
# are in the [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: **08 dry run** · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb)

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
# `libtpu` drives a TPU, and the compiler inside it works without one. A *topology* describes devices
# that nobody has to own: lay a mesh over them, lower a function, compile it, and ask. `compiler.start`
# comes before JAX, because JAX reads where the library is when it starts.

# %%
from tpu_time import compiler

libtpu = compiler.start()
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
else:
    print("libtpu is not on this machine (./setup.sh dryrun): what follows is stored")

# %% [markdown]
# Sizes are those of one chip. Replace the product by your own function, the topology by `v5e:2x4` or
# `v6e:1x1`, and you know whether it fits before you rent anything: what does not fit raises
# `RESOURCE_EXHAUSTED` and says what it asked for. XLA's flags go into `compile(compiler_options={…})`.
# The compiled text says how long it takes:

# %%
from tpu_time import predict

if libtpu:
    found = predict(product.as_text(), "v5p-8")
    print(f"{1e3 * found.seconds:.2f} ms, {1e3 * found.exposed:.2f} of them waiting for the links")

# %% [markdown]
# <details><summary><b>What does the product wait for?</b></summary>
#
# Each chip has a quarter of the rows of both matrices, and needs all rows of the second: 134 MB, of
# which three quarters come from the others.
#
# </details>
#
# ## 2. The answers first
# Will the 31B's training step fit a v5p-8, how long does a run take, what does it cost? Memory is
# *compiled*, the steps' time *predicted* (its range is section 9's), the rest assumed. Section 8 has it
# for every slice.

# %%
import pandas as pd

from tpu_time import bands, fit

answer = fit.will_it_fit("v5p", 4)
cost = fit.run_cost(answer, 10_000 * 922, fit.price("v5p", 4))
print(answer)
print("\n".join(f"{minutes:5.1f} minutes: {part}" for part, minutes in cost["minutes"].items()))
print(f"{cost['hours_text']} hours and {cost['dollars_text']} dollars for 10,000 published samples")

# %% [markdown]
# ## 3. What is compiled
# A *recipe* is one configuration. `published` is what the published script does, without its dropout;
# 30 % of its tokens are real (922 on average, counted by the authors). `ours` is notebook 03 on mesh
# (1, 4); packed rows count as 95 % real tokens. What differs:

# %%
import dataclasses

import numpy as np
from IPython.display import display

from appendix import parts
from appendix import step_figures as figures
from appendix import steps
from tables import hardware
from tpu_time import predict, write_trace

if libtpu:
    compiler.register()  # Tunix shards for a TPU only if JAX's first device is one
recipes = (steps.PUBLISHED, steps.OURS, steps.ROWS_INT8)
fields = pd.DataFrame({recipe.recipe: dataclasses.asdict(recipe) for recipe in recipes})
fields[fields.astype(str).nunique(axis=1) > 1].drop("recipe")

# %% [markdown]
# Nothing is retold: model, loss, optimizer and step are 03's, and so are the shapes. `helpers/programs.py`
# traces them for 03 and for this page. Nothing gets memory either: shapes, types and shardings are enough to
# lower a step.

# %%
helpers.show_source(steps.lower_ours)

# %% [markdown]
# **Is a step of one micro-batch a fair stand-in for a step of four?** That's what this page once compiled for
# E2B, and on a v5e it fitted. The real step of four micro-batches was refused: 17.9 of 15.75 GiB.
#
# <details><summary>Why?</summary>
#
# Four micro-batches stand in a loop. A TPU stores E2B's second embedding (262,144 tokens, 35 layers, 256 numbers)
# with the layers outermost, and the loop wants the tokens there. So XLA copied it, 5 GiB, moved the copy out of
# the loop and kept both. Now `gemma.place` stores that table token by token from the start.
#
# </details>
#
# So a row counts for 03 only if it has 03's own number of micro-batches. A run has other programs beside its step,
# too: it makes the optimizer's state, evaluates, and answers. These of them are compiled for the slices that 03 is
# meant for, each with what lies beside it in the chip's memory:

# %%
import os

others = pd.DataFrame(steps.stored_rows(steps.OTHERS))
waiting = steps.missing_programs()
if libtpu and os.environ.get("DRYRUN") == "full":
    steps.run_programs(waiting)
if len(others):
    columns = ["topology", "size", "recipe", "program", "hbm_gib", "limit_gib", "fits"]
    display(others[columns].style.hide(axis="index"))
print(f"{len(others)} compiled, {len(waiting)} not yet")

# %% [markdown]
# All 60 layers take ten CPU minutes. Here are two, one sliding and one full-attention layer at the
# 31B's width, with one row of 2,048 tokens.

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
# The memory is that of one chip: arguments, outputs that take the place of no donated argument, and
# temporaries. The program's own code comes on top and is not counted.
#
# ## 4. From a text to seconds
# The compiled text is the *schedule* of one chip: instructions in order, nearly all with the back
# end's own count of cycles, and collectives with their sizes. `tpu_time/clock.py` walks through it
# with a clock:
#
# - an instruction moves the clock on by its cycles. If the back end says that it has no cost model for
#   it (`COST_MODEL_TYPE_INVALID`) it counts far too many, so such an instruction takes at most what a
#   measured copy takes for its bytes: 0.83 of the HBM's speed;
# - a collective takes its bytes over the links that its group can use, at 0.90 of their speed, which
#   loops on a v5e-4 reached. If it stops the chip, the clock waits; if it runs beside, only what is not
#   covered when it is needed costs time;
# - what has no known cost must hold at most 2 % of the FLOPs and bytes, or no time is given (what only
#   moves data is charged at the HBM's speed).
#
# Peak and bandwidth are the vendor's, clock and shape of the links the
# [scaling book's](https://jax-ml.github.io/scaling-book/tpus). A prediction knows when each instruction
# starts, so it can be written as the trace that a profiler would have recorded: drop the file on
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
trace = helpers.run_dir("dryrun", "trace_2layers.json.gz")
trace.parent.mkdir(parents=True, exist_ok=True)
write_trace(found, trace, "two layers of our step, predicted for one chip of a v5p-8")
figures.draw_trace(found, "08_trace", "two layers of our step on a v5p")

# %% [markdown]
# Each dark red piece is a collective that stops the chip: it gathers activations before a block and
# scatters its sum after it.
#
# ## 5. Where the time goes
# Each instruction knows the line of Python it came from, so the sum splits by part of the model. *At
# its limit* is the share of its time that a part would need if its products ran at the peak, or its
# bytes at the HBM's speed. What is left is what a better program could save.

# %%
walked = {recipe: steps.predicted(recipe) for recipe in (steps.PUBLISHED, steps.OURS)}
figures.draw_parts(walked)

# %%
for recipe, found in walked.items():
    display(steps.show_parts(recipe, found))

# %% [markdown]
# The published step computes its layers a second time. Its operands are float32: the matrix unit
# multiplies in bfloat16 all the same, but reads twice the bytes and rounds on the way. Ours recomputes
# nothing; what it loses is mostly waits, then attention and LoRA.
#
# ### Two changes that cost only compile time
# - **Two sums where one would do.** Gate and up read the same input. Its gradient is a sum of two
#   products, each of them a sum over chips. XLA merges two such sums if they stand next to each other,
#   and LoRA's gradient stood between them. Now LoRA reads a copy of the input. The copy is gone once
#   the program is compiled.
# - **Larger tiles.** The compiler lets one product use 16 MiB of on-chip memory. On a v5p 03 asks for 32.
#
# ## 6. Gather weights instead of adding sums
# On mesh (1, 4) every block ends in a sum over the chips. On mesh (4, 1) each chip has whole rows and
# gathers the *weights*, which do not depend on what was just computed: they can travel ahead, while the
# chip multiplies. Rows of 2,048 tokens, four at once, hold as many tokens as before. The heads allow
# at most (4, 4) on a v5p-32, (2, 4) on a v6e-8.
#
# <details><summary><b>Heads forbid tp = 8 for the 31B. Which number forbids fsdp = 4?</b></summary>
#
# None: fsdp divides rows and widths, not heads.
#
# </details>
#
# int8 products (11) need a token's largest number for its scale. With whole rows on a chip that asks no
# other chip, and the weights travel in half the bytes. (Their cost in quality: none was seen at tiny in
# three pairs, at 31B nobody has looked; [11](11_qlora.ipynb), section 6.) All sixty layers, compiled and
# predicted:

# %%
table = steps.stored("v5p-8_31b")
ours = steps.in_order(table, [steps.OURS, steps.ROWS, steps.ROWS_INT8])
ours = pd.concat([ours, steps.stored("v5p-32_31b"), steps.stored("v6e-8_31b")])
steps.show(ours, {"topology": "slice", "recipe": "recipe", "hbm_gib": "sum GiB", "fits": "fits",
                  "seconds_predicted": "s, predicted", "seconds_exposed": "of these waiting",
                  "tokens_per_second_predicted": "real tokens/s"})

# %% [markdown]
# One matrix is not gathered: the output matrix, 2.8 GB. A chip keeps its slice of the vocabulary and
# multiplies all rows by it, so 44 MB of hidden states travel instead. On a v5p the waits left are for the
# MLP's weights, for the sum of the adapters' gradients, and for the chip's own copies. **On a v6e-8 the same mesh
# loses**, as far as we know: gathers over its 2 x 4 chips go one way round a single ring. That was measured on a
# v5e-8 (section 9); a v6e's program names the same ring, and nobody has timed it there.
#
# To train so, set `max_tokens` and `sequence_length` to 2,048 in 02: 03 then takes these meshes by itself.
# int8 adds the three calls of 11, and on a v6e-8 `remat="BLOCK"`. The price: of examples as long as
# CodeV-R1's the longest 3 % are dropped, and because they are the longest, 8 % of all tokens go with them.
#
# **What does this mesh do to the answers before and after training?** An answer grows by one token at a time. If
# a chip gathered all weights for each, a token would take 290 ms on mesh (4, 1) and 15 on mesh (1, 4) (predicted
# from six compiled layers), where reading a chip's weights takes 6. So `gemma.greedy` turns the rule around: the
# weights stay where they are, each chip multiplies its part of them, and only the tokens' sums travel. Hours below
# assume 17 ms a token on any mesh; this program isn't compiled yet.
#
# ## 7. The table
# `DRYRUN=full python appendix/08_dryrun.py` compiles what is not stored and writes after each row: stop it
# whenever you like. What every time depends on is kept, so
# `DRYRUN=again` predicts all of them by new rules without compiling.

# %%
if libtpu and os.environ.get("DRYRUN") == "full":
    steps.run_table(steps.RECIPES)
if os.environ.get("DRYRUN") == "again":
    steps.predict_again(steps.RECIPES)
table = steps.in_order(steps.stored("v5p-8_31b"), [*steps.ROAD, steps.ONE_ROW, steps.DENSE])
figures.draw_memory(table)

# %% [markdown]
# Recomputing buys memory, not speed. *One row* is one micro-batch of one row. It needs about half of what two
# rows at once need, and 2 % more time for its tokens, so 03 takes two rows where they fit. (With one row a device
# 03 would run two micro-batches of it, a program that isn't compiled yet.)

# %%
steps.show(table, {"recipe": "recipe", "hbm_gib": "sum GiB", "fits": "fits",
                   "seconds_predicted": "s, predicted", "seconds_exposed": "of these waiting",
                   "tokens_per_second_predicted": "real tokens/s"})

# %% [markdown]
# How many times the published real tokens per second? A ratio of two predictions, with the range that
# section 9 gives it. *One sigma* means: if our misses are like those of section 9, two of three such ranges hold.
# Two sigmas hold in nineteen of twenty. But you wait for a whole run, with its downloads, compilations, evaluations
# and answers, so that stands beside it. The published run took 3.34 hours.

# %%
speed = table.set_index("recipe").tokens_per_second_predicted
for recipe in (steps.OURS, steps.ROWS):
    times = speed[recipe.recipe] / speed["published"]
    whole = fit.run_cost(answer, 10_000 * 922, fit.price("v5p", 4), speed[recipe.recipe])
    print(f"{recipe.recipe}: a step {times:.1f} times as fast, {bands.between(times, 2)} with one "
          f"sigma, {bands.between(times, 2, sigmas=2)} with two;\n   a run takes "
          f"{whole['hours_text']} hours, {3.34 / whole['hours']:.1f} times as fast end to end")
figures.draw_road(steps.road(table))

# %% [markdown]
# Packing alone gives 0.95 / 0.30 = 3.2 times. *Our step* is 03's: float32 adapters on 360 modules,
# attention by blocks, two rows at once, nothing returned that was not donated.
#
# **And int8?** No anchor of section 9 is a step with int8 products. The compiler's cycles say that ours reach 94 %
# of the chip's 918 TOPS. Plain int8 products reached 96 % on a v5e (section 9) and 61 % on a v6e
# ([yangwhale/gpu-tpu-pedia](https://github.com/yangwhale/gpu-tpu-pedia), tpu/v7_perf), so which it is for a step we
# don't know. Here is what would be left at less:

# %%
peak, found = hardware.SLICES["v5p-8"].chip.int8, steps.predicted(steps.ROWS_INT8)
tokens = steps.real_tokens(steps.ROWS_INT8)
for share in (0.94, 0.8, 0.7, 0.6):
    seconds = steps.int8_at(found, share, peak)
    print(f"int8 products at {share:.0%} of the peak: {seconds:.3f} s a step, "
          f"{tokens / seconds / speed['published']:.1f} times the published speed, "
          f"{tokens / seconds / speed[steps.ROWS.recipe]:.2f} times the same mesh in bfloat16")

# %% [markdown]
# Others who measured whole steps gained 1.2 to 1.4 times by int8 products (an 8B on v5e, from 58 to 70 % of the
# peak: [marin 620](https://github.com/marin-community/marin/issues/620); experts on a v5p-8, +21 and +37 %:
# [marin 2710](https://github.com/marin-community/marin/issues/2710)). They quantise weights in each step, which a
# frozen, stored int8 base doesn't need. **So read it as somewhere from 9 to 14.5 times, unanchored, and take the
# bfloat16 number as the result.**
#
# ## 8. What can you rent?
# The same question for every slice, on the mesh with most tensor parallelism. There a base in fewer bits
# saves memory, not time. What has no compiled row is estimated by adding up the parts, and one such sum was
# 8 GiB too low (int8, BLOCK, v6e-8). Either must leave a tenth of the chip free. The steps on a v5e-4 and the
# int8 step on a v6e-4 were compiled with one micro-batch, where 03 runs two, so they count as estimated until
# that is done.

# %%
MY_TOKENS = 10_000 * 922  # the published run's samples, and its mean of tokens in one
MY_PRICES = {}  # dollars per hour of a slice, for example {"v5p-8": 7.5}
display(steps.renters_table(MY_TOKENS, MY_PRICES).style.hide(axis="index"))
for recipe in (steps.OURS, steps.ROWS):
    cost = fit.run_cost(answer, MY_TOKENS, fit.price("v5p", 4), speed[recipe.recipe])
    print(f"v5p-8, {recipe.recipe}: {cost['hours_text']} hours, {cost['dollars_text']} dollars")

# %% [markdown]
# A run downloads, loads, compiles, validates and saves, too; `fit.WHERE_FROM` states what is assumed. A range is
# predicted from a compiled program, a ≥ only a lower bound: never rank the one against the
# other. The same table with fields to fill in, small models included, is
# [What will it cost me?](https://github.com/OWNER/gemma4-on-tpu/blob/main/tools/site/cost.md).
#
# ## 9. Against what others measured
# These programs were timed on real chips by others. All but two collectives are compiled here again, in
# the same shapes, and predicted (`python -m tpu_time.anchors`, `python -m appendix.memory`). Attention is
# 2 % of MaxText's step and assumed at half the peak. Tunix's steps are LoRA, like ours.

# %%
anchors = pd.DataFrame(bands.anchors())
display(anchors[["program", "slice", "clock", "measured_ms", "predicted_ms", "miss", "source"]]
        .assign(source=anchors.source.str.split(":").str[0]).style.hide(axis="index"))
figures.draw_anchors(anchors)

# %% [markdown]
# <details><summary><b>Which clock makes a measurement longer, the device's trace or the host's?</b></summary>
#
# The host's: it includes dispatch. Google's own pair for one product is 1.33 ms by the trace and 1.46 by
# the host.
#
# </details>
#
# Memory needs no clock. XLA's own reports of Tunix's LoRA step were kept by others, also of runs that
# did not fit. `compiler.planned` asks for the same report here, in a process of its own and ten times sooner
# than a whole compilation. The other tables hold what whole compilations say, up to a tenth more memory,
# which no report checks.

# %%
plans = pd.read_csv("data/anchors/memory.csv").rename(columns={"theirs_gib": "GiB a chip"})
plans["largest miss"] = plans.miss.abs()
plans.groupby(["model", "slice"], sort=False).agg(
    {"GiB a chip": ["size", "min", "max"], "largest miss": "max"}).style.format(precision=4)

# %% [markdown]
# The published 31B step is known only as a whole run: 3.34 hours for 9,952 micro-steps, which is 1.21 s,
# or 1.12 s if a quarter of an hour went into loading and compiling.
#
# The rule for every range in this series stands in `tpu_time/bands.py`: the typical miss is the root mean
# square of log(predicted / measured) over the table above, and a ratio of two predictions has √2 of it. That is
# one sigma. Some rows are shown and do not count. A single call of a few milliseconds takes the host as long as
# the chip, and a training step of a second doesn't (AdamW's row alone would be half of the squared miss). And the
# gathers and sums of a v5e-8 set one of the model's constants, so they can't test it.

# %%
published = table.set_index("recipe").seconds_predicted["published"]
print(f"typical miss: {100 * bands.typical_miss():.0f} % (one sigma)")
print(f"published micro-step: {bands.between(published, form='{:.2f}')} s (one sigma; "
      f"{bands.between(published, form='{:.2f}', sigmas=2)} with two; middle {published:.2f}, "
      f"{published / 1.21 - 1:.0%} to {published / 1.12 - 1:.0%} off)")

# %% [markdown]
# That constant is the newest: on 2 x 4 chips a gather took 2.3 times what we predicted. Why, the compiled text
# says itself. A line of four has no link from its end to its beginning, so the program names one ring through all
# eight chips and sends one way round ("1DAllGather…"). With wrap-around the scaling book's ring of 16 reaches 95 %
# of both directions. On a v5p of 2 x 2 the text names a gather along both dimensions at once, so the doubt is
# about v5e-8 and v6e-8, and their rows now count it.
#
# Cautions. These programs had earlier compilers. Of six whole steps one is hit, Tunix's of Gemma 4. The
# published one is predicted too short, MaxText's and those of Gemma 3 too long. Tpuchat's single calls take
# longer than their programs, the more so the more arrays go in and out: about 0.13 ms with three (a norm
# and seven products, LOG.md), 0.9 with 116 (its mean of gradients), 1.2 with 233 (its AdamW). Why the
# all-reduce over 256 chips misses, no second measurement says. Two of the model's rules were mended on
# MaxText's row, and the links' 0.90 comes from twins of the two loops.
#
# ## Recap
# - A topology, a mesh, `lower().compile()`: the TPU's compiler answers on a machine without a TPU.
# - Its text is a schedule, from which a time follows; what others measured says how far to trust it.
# - On a v5p the fastest mesh has no tensor parallelism: weights can be gathered ahead, sums cannot.
#
# ### Exercise
# How large may two square bfloat16 matrices be whose product one v5e chip can make? Reckon first, then
# ask the compiler with the lines of section 1 (`compiler.devices_of("v5e-1")` gives the chip).
#
# <details><summary>Solution</summary>
#
# Three matrices of 2 n² bytes in 15.75 GiB: n = 53,090. The compiler takes 52,992 and refuses 53,248.
#
# </details>
#
# Next appendix:
# [09 · A Gemma 4 small enough for a laptop, pretrained from scratch](09_tiny_base.ipynb).
