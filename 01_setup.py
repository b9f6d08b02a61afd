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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/01_setup.ipynb)
#
# # 01 · From nothing to a TPU machine that can run this
#
# Can your machine run this series? And if you want to train Gemma 4 31B, what do you have to rent, and what
# will it cost? **On a CPU you can go straight on to [02](02_data.ipynb)**, because the whole series runs there
# with a tiny model. But do read section 3. It needs no TPU, and it shows the best trick of the series.
#
# | | |
# |---|---|
# | **Needs** | any machine with Python 3.11; for the 31B a TPU: Kaggle's free one, or one that you rent from Google Cloud |
# | **Reads** | nothing |
# | **Writes** | `setup.json` |
# | **Time and cost** | half a minute here. On Google Cloud the machine that trains costs 16.80 USD/h and the one that serves (answers requests) 21.52 USD/h (published rates of May 2026, *on demand*: paid by the hour, and nobody takes the machine away) |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · **01 set up** · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
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
# ## 1. Can your machine run this?
# Four things can stop you before you've begun, and it's better to find out now than after an hour of downloading:
#
# - The disk has no room for the model.
# - There's no TPU (Google's chip for neural networks) of the kind that the model needs.
# - JAX (Google's array library, which trains the model) can't see the chips.
# - Icarus Verilog is missing, the simulator that grades the answers in 07.
#
# What counts as enough depends on the model. `31b` is the one that this series is about, `e2b` (Gemma 4
# E2B) is its small sister, and `tiny` is a toy that a laptop trains in minutes. `helpers.choose` follows
# the environment variable `SIZE`, or else the hardware. (Section 2 explains names such as `v5p-8`.) Two units look
# alike: files are in GB (10⁹ bytes), but a chip's memory is in GiB (2³⁰ bytes), and 1 GiB is 1.074 GB.

# %%
import platform
from dataclasses import asdict, dataclass, replace

import pandas as pd

from helpers import checks, style
from tables import hardware
from tpu_time import compiler, fit

# %% [markdown]
# These are the page's settings: the machines that each size is meant for, and how much it downloads.


# %%
@dataclass(frozen=True)
class Settings:
    train_slice: str = "v5p-8"        # for 01 to 04
    serve_slice: str = "v6e-8"        # for 05 to 07
    checkpoint_gb: float = 62.5       # google/gemma-4-31B-it (published: arXiv 2605.25645, S2.3)
    needs_tpu: bool = True
    base_dtype: str = os.environ.get("BASE_DTYPE") or "bfloat16"  # of a weight


FULL = Settings()
E2B = replace(FULL, train_slice="v6e-1", serve_slice="v6e-1", checkpoint_gb=10.2)
TINY = replace(FULL, checkpoint_gb=0.01, needs_tpu=False)  # a CPU; 03 simulates four devices on it
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# Which machines are good enough? The ones meant for this model size, and any other on which 03's training step is known
# to fit. (The tiny model needs no accelerator, so its row *accelerator* always has a ✓.)

# %%
slices = checks.slices_for(helpers.size(), cfg.base_dtype, cfg.needs_tpu)
results, facts = checks.look(cfg.checkpoint_gb, slices)
rows = [(name, "✓" if fine else "✗", text) for name, (fine, text) in results.items()]
style.words(pd.DataFrame(rows, columns=["check", "fine", "found"]))

# %% [markdown]
# **If every row has a ✓, this machine will do. A row with a ✗ tells you how to fix it.**
#
# ## 2. Which machine does the 31B need?
# Four words first. You pay by the **chip**. A **slice** is a group of chips that are wired together, so
# that they can share one model. A **host** is the virtual machine that your program runs on; it drives up
# to eight chips. Each chip has its own memory, called **HBM**, and whatever a training step touches has to
# fit there.
#
# **The 31B's weights take up 62.5 GB. A program can use 95.7 GiB of a v5p chip's HBM, and 31.25 GiB of a v6e chip's.
# How many chips of each kind do you need to hold the weights? And does that leave room to train?**
#
# <details><summary>Answer</summary>
#
# 62.5 GB is 58 GiB, so one v5p chip holds the weights, or two v6e chips. But that leaves too little room to train,
# because training needs more: *adapters*, the small matrices that we train on top of the frozen weights; two more
# numbers that the optimizer remembers for each number in them; and above all the *activations*. Those are the results
# of each layer, which the forward pass (from tokens to loss) keeps for the backward pass (from loss to gradients).
#
# </details>
#
# So what fills the memory of a slice while it trains the 31B? Here are two of them.
#
# ![A v5e-8 has eight chips of 15.75 GiB in two rows of four, a v5p-8 four chips of 95.74 GiB in a square; bars to scale show frozen weights, adapters, activations and free memory](../assets/figures/slice.svg)
#
# The table lists the slices for which a whole training step was compiled and fits. Weights are in *bfloat16*, two bytes
# each, unless the table says *int8*, one byte. The dollars cover all of notebook 03 and its download, for 10,000 examples
# that average 922 tokens. Those two numbers come from the paper whose *published recipe* this series follows (arXiv
# 2605.25645).

# %%
TOKENS = 10_000 * 922  # of the published recipe: examples, and their mean length
choices = fit.renters_rows() + fit.renters_rows(("e2b",), fit.ONE_CHIP)
style.words(pd.DataFrame(fit.what_fits(choices, TOKENS)))

# %% [markdown]
# So the compiler says that the 31B fits on four v5p chips, or on eight v6e chips. (For four v6e chips we have only an
# estimate, which says that it fits.) On eight v5e chips it fits in int8 ([11](11_qlora.ipynb)). Notebook 03 stores it
# that way by itself on a v5e-8, so you don't have to set anything. For the E2B one chip is enough: its step fits a
# v6e-1 with room to spare, and a v5e-1 just about (both compiled).
#
# How long does it take, and what else do we know? That's in the next table; click to open it.

# %%
style.folded("every slice: rows, mesh, memory, speed, hours", pd.DataFrame(
    fit.full_table(choices, TOKENS)))

# %% [markdown]
# Where do the times come from? Training steps and validation are *predicted* from the compiled program, as a range. On
# a v5e-8 the upper end also counts slow links: between those chips, others have waited longer than our model said. The
# rest is *assumed*: downloading, loading, compiling, saving, answering. Nobody has timed these with our code, so don't
# trust the hours and dollars more than that.
# [MACHINES.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md) adds up Kaggle's session minute
# by minute, with the same minutes for 03.
#
# <details><summary>What do the columns of the long table mean?</summary>
#
# - `rows x length`: how many rows the chips compute at once, and the tokens of a row. (A *row* holds several examples,
#   one after the other: [02](02_data.ipynb).)
# - `mesh`: the rows are split into as many groups as the first number says, and each matrix into as many pieces as the
#   second ([03](03_train.ipynb)). Compare the GiB of two slices only with these columns in view. A v6e-8 has half as many
#   weights on a chip as a v6e-4, and still takes as much memory, because it computes four rows at once, and because it
#   keeps weights that its two groups have gathered from each other.
# - `remat` says which activations the backward pass computes again because they don't fit into memory (PyTorch calls
#   this activation checkpointing): none (`NONE`), those of attention and MLP (`BLOCK`), or those of whole layers
#   (`DECODER`). We recompute as little as possible while a tenth of the chip stays free.
# - `fits`: *tight* means that no setting leaves a tenth of the memory free, but the compiler says that this one fits.
#   Where we only estimate, a tenth has to stay free, because the estimate may be off by that much.
# - `how we know`: *compiled* is what the TPU's own compiler says. *Planned*: the compiler has added up the memory and
#   refused, so there's no program. *Estimated* is our own sum over the model's shapes.
# - `training steps` is predicted. `hours` and `USD` are for all of 03 and its download, and so partly assumed.
#
# Where bfloat16 fits we don't list int8: it would save memory that you don't need, and no time.
#
# </details>
#
# Why two machines? We'd train the 31B on a v5p-8 and serve it on a v6e-8, as the published recipe did, so that our
# numbers can stand beside the paper's. By the table a v6e-8 alone would do for both, but nobody has tried it with
# this code.
#
# **JAX shows four devices on a v5p-8, and eight on a v6e-8. Why?**
#
# <details><summary>Answer</summary>
#
# Google's names count TensorCores, a TPU's cores for matrix products (NVIDIA uses the same word for something
# else). A v5p chip has two, and JAX treats the pair as one device, so a v5p-8 is four chips and four devices.
# A v6e chip has one, so a v6e-8 is eight of each.
#
# </details>
#
# **A slice has to hold the weights and everything that a training step keeps beside them.**
#
# ## 3. How can anybody know that without a TPU?
# We filled that table without a TPU. Here's the trick: Google's library `libtpu` contains the TPU's
# compiler, and the compiler runs on any x86-64 Linux machine. It doesn't need a chip, only a description of
# one. Let's ask it about a product of two matrices, 8,192 by 8,192, on the four chips of a v5p-8. These words of JAX
# are all you need to read the cell:
#
# - A *topology* describes chips that nobody has to own; `v5p:2x2x1` is two by two of them.
# - A *mesh* arranges the chips, here in a line of four. A *sharding* says which chip holds what: here each chip
#   holds a quarter of the rows. A `PartitionSpec` says which dimensions get cut.
# - `ShapeDtypeStruct` is a matrix without memory, like a tensor on PyTorch's `meta` device.
# - `lower` turns the function into a graph without running it, and `compile` turns the graph into a
#   program.

# %%
has_chips = hardware.here().accelerator == "tpu"
library = "" if has_chips else compiler.start()  # its path
if has_chips:
    print("this machine has real chips, so we leave them alone: run this section on a CPU machine")
elif not library:
    print("no compiler here: ./setup.sh dryrun installs it (0.7 GB, Linux on x86-64, no TPU)")

# %% [markdown]
# First the four chips, and a mesh of them.

# %%
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

if library:
    os.environ["JAX_PLATFORMS"] = "cpu"  # so section 1 still works if you run it again
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    mesh = jax.make_mesh((4,), ("chips",), devices=chips)
    print(f"{len(chips)} chips that nobody has to own: {chips[0].device_kind}")

# %% [markdown]
# Then the product. `PartitionSpec("chips")` cuts the first dimension of a matrix, its rows, over the chips.


# %%
def multiply(size, cut_a, cut_b):
    """Compile the product of two matrices [size, size] of bfloat16; print what a chip needs."""
    a, b = [jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=NamedSharding(mesh, cut))
            for cut in (cut_a, cut_b)]
    plan = jax.jit(lambda a, b: a @ b).lower(a, b).compile().memory_analysis()
    print(f"each chip: {plan.argument_size_in_bytes / 1e6:.0f} MB of inputs, "
          f"{plan.output_size_in_bytes / 1e6:.0f} MB of output, "
          f"{plan.temp_size_in_bytes / 1e6:.0f} MB in between")


by_rows = PartitionSpec("chips")
if library:
    multiply(8_192, by_rows, by_rows)

# %% [markdown]
# That's a real TPU program; it just has no TPU to run on. Each matrix takes up 134 MB, so a chip holds a quarter
# of both inputs (67 MB) and makes a quarter of the output (34 MB). But why another 134 MB in between? To multiply its
# rows, a chip needs *all* of the second matrix, so it gathers the other three quarters from the other chips.
#
# What happens if we ask for too much?

# %%
if library:
    try:
        multiply(200_000, by_rows, by_rows)
    except jax.errors.JaxRuntimeError as refusal:
        print(refusal)

# %% [markdown]
# The compiler refuses, and says how much memory the product would need (*HLO* is the compiler's own language for
# graphs).
#
# **Each of these matrices takes up 200,000² · 2 bytes, which is 74.5 GiB. Which three pieces add up to the
# compiler's number?**
#
# <details><summary>Answer</summary>
#
# The same three as above: one whole matrix, gathered (74.5 GiB); a quarter of both inputs (37.3); and a quarter
# of the output (18.6). Together that's 130.4 GiB. So the message counts inputs and output as well, whatever it
# calls them.
#
# </details>
#
# Try your own function here, or another slice (`v6e:2x4` is a v6e-8 with its eight chips). [08](08_dryrun.ipynb) does this with the
# whole training step of 03, and also predicts how long it takes.
#
# **A TPU's compiler tells you what fits, and you don't need the TPU. So compile first, and rent later.**
#
# ## 4. How do you get such a machine, and how do you get rid of it?
# Maybe you don't have to pay at all. Kaggle lends everybody a v5e-8 for nothing, 20 hours a week and 9
# hours at a time (Kaggle's rules in November 2026). By section 2 the 31B fits there in int8, although nobody
# has run it yet. From your own machine, `scripts/kaggle.sh smoke` tries it in about twenty minutes, and
# `scripts/kaggle.sh push` starts the whole series there.
#
# If you rent from Google Cloud, `scripts/vm.sh` does it for you. It runs on your laptop and needs `gcloud` (Google's
# command-line tool), a project with billing, and *quota*, which is Google's permission to rent such chips
# ([MACHINES.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md) has both roads, step by
# step). Here it only prints what it would run, and we show how the first command of each step begins:

# %%
checks.show_first_command("check")
piece = hardware.slice_of(cfg.train_slice)
if piece.zones and piece.runtime:
    zone = piece.zones.split()[0]
    script = "scripts/train.sh"
    checks.show_first_command("create", "gemma4-train", piece.name, zone, "3")
    checks.show_first_command("run", "gemma4-train", zone, script, "my-bucket", "31b")
    checks.show_first_command("delete", "gemma4-train", zone)
else:
    print(f"tables/hardware.py doesn't say where and how a {piece.name} is rented")

# %% [markdown]
# - `check` asks the model hub whether you've accepted the license and whether your token works, before
#   anything costs money.
# - `create` first tries *flex-start*: you wait in line, two hours at most, and pay less than on demand.
#   Then it tries *spot*: spare capacity that Google can take back at any moment. Both kinds delete
#   themselves after three hours (the `3` above). If neither has a machine, it falls back to Google's older API, which
#   we call *classic*. **A classic machine has no time limit: you pay until you delete it.**
# - `run` copies a script to the machine and starts it. The script installs everything, repeats the checks
#   from section 1, and runs 02 to 04. Checkpoints go to a *bucket*, a folder in Google Cloud Storage. So if
#   the machine disappears, the same command on a new one continues.
# - `delete` deletes the machine and its disk. The bucket stays.
#
# The model's 62.5 GB have to be on a disk before they go to the chips. But on a classic machine 85 of the boot
# disk's 97 GB are already used (published: arXiv 2605.25645, S2.3, and its repository). That's why our
# scripts set `TMPDIR=/dev/shm`, a disk in the host's memory. If you work by hand, set it before you start Python.
#
# **You create a v6e-8 on a Friday without a limit on its run time, and forget it. What has it cost by
# Monday morning?**

# %%
WEEKEND = 64  # hours from Friday 17:00 to Monday 9:00
for name in (cfg.train_slice, cfg.serve_slice):
    price = hardware.slice_of(name).dollars_per_hour
    if price is None:
        print(f"{name}: tables/hardware.py has no price")
        continue
    print(f"{name}: {price:.2f} USD/h, three hours {3 * price:.0f}, a forgotten weekend "
          f"{WEEKEND * price:,.0f} (on demand, published rates)")

# %% [markdown]
# Three habits prevent that: create with a limit, run `scripts/vm.sh list ZONE` before you close the laptop,
# and `delete` whatever it lists.
#
# **Chips cost the same busy or idle, so decide when a machine ends before you start it.**
#
# ## 5. What will you want to know in a month?
# When a result looks odd, the first question is which machine it was made on. `setup.json` says so. It's written
# even if a check failed, so you can send it to whoever helps you.

# %%
kept = {name: {"fine": fine, "text": text} for name, (fine, text) in results.items()}
helpers.write_json(helpers.run_dir("setup.json"), {
    "size": helpers.size(), "settings": asdict(cfg), "python": platform.python_version(), **facts,
    "checks": kept})
wrong = [text for fine, text in results.values() if not fine]
if wrong:
    raise helpers.UserError("this machine is not ready.\n- " + "\n- ".join(wrong))
print(f"ready; wrote {helpers.run_dir('setup.json')}")

# %% [markdown]
# **`ready` means you can go on; an error lists what to fix.**
#
# ## Recap
# You know whether this machine will do, what each slice holds and costs, how to ask a TPU's compiler, and
# how to create a machine and delete it. If something goes wrong, look up the symptom in
# [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# **Exercise 1: 30 dollars.** You have 30 USD. On which slices can you run all of 03, even if it takes as long as the upper
# end of section 2's table? Then add three quarters of an hour for installing, merging and copying (assumed; prices per
# hour: v5p-8 16.80, v6e-8 21.52, v5e-8 9.60). Is any of them still safe?
#
# <details><summary>Solution</summary>
#
# By the table alone: a v5p-8 (22.5 USD at most), a v6e-8 (24.0) and a v5e-8 (27.3). A v5p-32 isn't one of them. It's
# the fastest, but downloading and compiling take as long there, at four times the price. The three quarters of an hour
# add 12.6, 16.1 and 7.2 dollars. So at their upper ends all three pass 30 dollars, and 30 is enough only if things go
# well. That's why the first run should be a short one.
#
# </details>
#
# **Exercise 2: another sharding.** In section 3 the inputs take 67 MB of a chip, the output 34 and what's in between
# 134. Guess the three numbers before you compile: (a) `b` is whole on every chip, `multiply(8_192, by_rows,
# PartitionSpec())`; (b) both are cut by columns, so `cut_a` and `cut_b` are `PartitionSpec(None, "chips")`.
#
# <details><summary>Solution</summary>
#
# (a) 168, 34 and 0. Each chip has a quarter of `a` (34 MB) and all of `b` (134), so nothing has to be gathered. We've
# bought that with memory: the copy of `b` is now there all the time.
#
# (b) 67, 34 and 134, as before. A chip now makes a quarter of the output's *columns*. For these it needs its own
# columns of `b`, but all of `a`, so this time `a` is gathered. ([03](03_train.ipynb) has the same choice for a whole model.)
#
# </details>
#
# **Exercise 3: how large?** On the same four chips, how large can the two matrices get before the product no longer
# fits? (A program can use 95.74 GiB of a v5p chip.) Find the largest multiple of 1,024 on paper. Then let the compiler
# check it and the next one: put them in place of 200,000.
#
# <details><summary>Solution</summary>
#
# With n rows and n columns of two bytes each, a chip needs one whole matrix, half a matrix of inputs and a
# quarter of output: 1.75 · 2 · n² bytes. That's 95.74 · 2³⁰ bytes at n = 171,381. So 167 · 1,024 = 171,008
# compiles, but 168 · 1,024 = 172,032 is refused, with 96.47 GiB. (For other numbers the compiler may add padding or
# another copy.)
#
# </details>
#
# Next: [02 · From a Verilog dataset to packed, masked rows](02_data.ipynb)
