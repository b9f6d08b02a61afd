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
# with a tiny model. But do read section 2. It needs no TPU, and it shows the best trick of the series.
#
# | | |
# |---|---|
# | **Needs** | any machine with Python 3.11; for the 31B a TPU: Kaggle's free one, or one that you rent from Google Cloud |
# | **Reads** | nothing |
# | **Writes** | `setup.json` |
# | **Time and cost** | up to half a minute here. On Google Cloud the machine that trains costs 16.80 USD/h, and the one that serves (answers requests) costs 21.52 USD/h. These are published rates of May 2026, *on demand*: you pay by the hour, and nobody takes the machine away. (Section 4 shows other ways to rent.) |

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
# **What can stop you before you've begun?** The disk may have no room for the model. There may be no TPU (Google's chip
# for neural networks), or JAX (Google's array library, which trains the model) may not see its chips. And Icarus Verilog,
# the simulator that grades the answers in 07, may be missing.
#
# What counts as enough depends on the size of the model: `31b` is the model that this series is about, `e2b` (Gemma 4
# E2B) is its small sister, and `tiny` is a toy that a laptop trains in minutes. `helpers.choose` follows the
# environment variable `SIZE`, or else the hardware.

# %%
from dataclasses import asdict, dataclass, replace

import pandas as pd

from helpers import checks, style
from tpu_time import compiler, fit


# %%
@dataclass(frozen=True)
class Settings:
    train_slice: str = "v5p-8"        # a group of TPU chips (section 2), for 01 to 04
    checkpoint_gb: float = 62.5       # google/gemma-4-31B-it (published: arXiv 2605.25645, S2.3)
    needs_tpu: bool = True
    base_dtype: str = os.environ.get("BASE_DTYPE") or "bfloat16"  # of a frozen weight


FULL = Settings()
E2B = replace(FULL, train_slice="v6e-1", checkpoint_gb=10.2)
TINY = replace(FULL, checkpoint_gb=0.01, needs_tpu=False)  # a CPU; 03 simulates four devices on it
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# A TPU passes if we know that 03's training step fits on it. The tiny model doesn't need a TPU.

# %%
slices = checks.slices_for(helpers.size(), cfg.base_dtype, cfg.needs_tpu)
results, facts = checks.look(cfg.checkpoint_gb, slices)
rows = [(name, "✓" if fine else "✗", text) for name, (fine, text) in results.items()]
style.words(pd.DataFrame(rows, columns=["check", "fine", "found"]))

# %% [markdown]
# **If every row has a ✓, this machine will do. A row with a ✗ tells you how to fix it.**
#
# ## 2. What would fit on a TPU that you don't have?
# You pay for a TPU by the **chip**. A **slice** is a group of chips that are wired together, so that they can share one
# model. A **host** is the virtual machine that your program runs on; it drives up to eight chips. Each chip has its own
# memory, **HBM**, and whatever a training step touches has to fit there.
#
# **How can you know what fits before you rent?** Here's the trick: Google's library `libtpu` contains the TPU's compiler,
# and the compiler runs on any x86-64 Linux machine. It doesn't need a chip, only a description of one. Let's ask it about
# a product of two matrices on the four chips of a v5p-8.
#
# - A *topology* describes chips that nobody has to own; `v5p:2x2x1` is two by two of them.
# - A *mesh* arranges the chips, here in a line of four. A *sharding* says which chip holds what.

# %%
can_compile = compiler.start_here()  # before JAX is imported; it says what's missing

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

if can_compile:
    os.environ["JAX_PLATFORMS"] = "cpu"  # so section 1 still works if you run it again
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    mesh = jax.make_mesh((4,), ("chips",), devices=chips)
    print(f"{len(chips)} chips that nobody has to own: {chips[0].device_kind}")

# %% [markdown]
# (JAX calls a v5p chip `TPU v5`.) Then the product. `ShapeDtypeStruct` describes a matrix without storing it, like a
# tensor on PyTorch's `meta` device, and `PartitionSpec("chips")` cuts the matrix's first dimension, the rows, into one
# part for each chip. `jit` asks for a function to be compiled, like `torch.compile`. Then `lower` turns the function
# into a graph without running it, and `compile` turns the graph into a program.


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
if can_compile:
    multiply(8_192, by_rows, by_rows)

# %% [markdown]
# That's a real TPU program; it just has no TPU to run on. Each matrix takes up 134 MB, so a chip holds a quarter of both
# inputs (67 MB) and makes a quarter of the output (34 MB). But why another 134 MB in between? To multiply its rows, a
# chip needs *all* of the second matrix, so it gathers the other three quarters from the other chips.
#
# What happens if we ask for too much?

# %%
if can_compile:
    try:
        multiply(200_000, by_rows, by_rows)
    except jax.errors.JaxRuntimeError as refusal:
        print(refusal)

# %% [markdown]
# **Each of these matrices takes up 200,000² · 2 bytes, which is 74.5 GiB. Which three pieces add up to the compiler's
# number?** (*HLO* is its language for graphs. The message says temporaries, but it counts inputs and output, too.)
#
# <details><summary>Answer</summary>
#
# The same three as above: one whole matrix, gathered (74.5 GiB); a quarter of both inputs (37.3); and a quarter of the
# output (18.6). Together that's 130.4 GiB.
#
# </details>
#
# Try a function of your own, or another slice (`v6e:2x4` is a v6e-8). [08](08_dryrun.ipynb) does this with the whole
# training step of 03, and also predicts how long it takes.
#
# **A TPU's compiler tells you what fits, and you don't need the TPU. So compile first, and rent later.**
#
# ## 3. Which machine does the 31B need?
# **The 31B's weights take up 62.5 GB. A program can use 95.7 GiB of a v5p chip's HBM, and 31.25 GiB of a v6e chip's. How
# many chips of each kind hold the weights? And does that leave room to train?** (A GB is 10⁹ bytes, a GiB 2³⁰.)
#
# <details><summary>Answer</summary>
#
# 62.5 GB is 58 GiB, so one v5p chip holds the weights, or two v6e chips. But training needs more. It needs *adapters*,
# the small matrices that we train on top of the frozen weights. The optimizer, which changes the numbers in the adapters,
# remembers two more for each of them. And above all there are the *activations*: the results of each layer, which the
# forward pass (from tokens to loss) keeps for the backward pass (from loss to gradients).
#
# </details>
#
# So what fills the memory of a slice while it trains the 31B? Here are two slices. (*Rows at once* 4 × 2,048 means that
# the slice works on four rows of 2,048 tokens at a time. 03 explains the two lines below it. On the v5p-8 the weights
# add up to 57 GiB instead of 58, because the part that reads images isn't loaded.)
#
# ![A v5e-8 has eight chips of 15.75 GiB in two rows of four, a v5p-8 four chips of 95.74 GiB in a square; bars to scale show frozen weights, adapters, activations and free memory](../assets/figures/slice.svg)
#
# And which slices will do? We list a slice if section 2's compiler has built a whole training step that fits into its
# memory. Weights are in *bfloat16*, two bytes each, unless the table says *int8*, one byte. The dollars cover all of 03
# and its download, on demand, for 10,000 examples that average 922 tokens, as in the *published recipe* that this
# series follows (arXiv 2605.25645).

# %%
TOKENS = 10_000 * 922  # of the published recipe: examples, and their mean length
choices = fit.renters_rows() + fit.renters_rows(("e2b",), fit.ONE_CHIP)
style.words(pd.DataFrame(fit.what_fits(choices, TOKENS)))

# %% [markdown]
# So a training step of the 31B fits on four v5p chips, or on eight v6e chips. On eight v5e chips it fits in int8
# ([11](11_qlora.ipynb)), and there 03 chooses int8 by itself. For the E2B a single chip is enough.
#
# To *serve* the trained model you may rent less. With four bits a weight, the whole 31B fits on one v6e chip, for 2.69
# dollars an hour on demand instead of 21.52 ([05](05_serve_vllm.ipynb), section 5, row 6). Others have served a 31B that
# way.
#
# How far can you trust the dollars? The training steps are *predicted* from the compiled program, as a range. (There's
# none for a v5e-1, because too many of the E2B's operations have no known cost there.) The rest is mostly *assumed*,
# and partly measured by others: nobody has timed downloading, loading, compiling and saving with our code.
# ([08](08_dryrun.ipynb), section 8, has the speed and hours of every slice.) We'd train the 31B on a v5p-8 and serve it
# on a v6e-8, as the published recipe did, so that you can compare our numbers with the paper's.
#
# **JAX shows four devices on a v5p-8, and eight on a v6e-8. Why?**
#
# <details><summary>Answer</summary>
#
# Google's names count TensorCores, a TPU's cores for matrix products. A v5p chip has two, and JAX treats the pair as one
# device, so a v5p-8 is four chips and four devices. A v6e chip has one, so a v6e-8 is eight of each.
#
# </details>
#
# **A slice has to hold the weights and everything that a training step keeps beside them.**
#
# ## 4. How do you get such a machine, and how do you get rid of it?
# **Do you have to pay at all?** Maybe not. Kaggle lends everybody a v5e-8 for nothing, 20 hours a week and 9 hours at a
# time (Kaggle's rules in November 2026). You only have to wait for your turn: others waited between 20 minutes and 11
# hours. By the compiler, the 31B fits there in int8, but nobody has run our code there yet. `scripts/kaggle.sh smoke`
# tries the machine with the small E2B in about twenty minutes (assumed).
#
# If you rent from Google Cloud, `scripts/vm.sh` does the work for you. It runs on your laptop and needs `gcloud`
# (Google's command-line tool), a project with billing, and *quota*, Google's permission to rent such chips.
# ([MACHINES.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md) has both roads, step by step.) The
# script has four steps: `check`, `create`, `run` and `delete`. Here nothing is rented, and you only see how the first
# command of each step begins:

# %%
checks.show_rental(cfg.train_slice)

# %% [markdown]
# - `check` asks the Hugging Face hub, where the model's files are, whether you've accepted the license, before anything
#   costs money.
# - `create` first tries *flex-start*: it waits in line, two hours at most, for a machine that costs less than on demand.
#   Then it tries *spot*: spare capacity that Google can take back at any moment. Either machine deletes itself after
#   three hours (the `3` above). If neither is available, it falls back to Google's older API, which we call *classic*. A
#   classic machine is spot capacity, too. **But it has no time limit: you pay until you delete it.**
# - `run` copies a script to the machine and starts it. The script installs everything and runs 01 to 04. Checkpoints go
#   to a *bucket*, a folder in Google Cloud Storage. So if the machine disappears, the same command on a new one continues.
# - `delete` deletes the machine and its disk. The bucket stays.
#
# **You rent a v6e-8 on demand on a Friday, without a time limit, and forget it. What has it cost by Monday morning?**
#
# <details><summary>Answer</summary>
#
# From Friday at 17:00 to Monday at 9:00 it's 64 hours, and 64 times 21.52 dollars is 1,377 dollars.
#
# </details>
#
# Three habits prevent that: create with a limit, run `scripts/vm.sh list ZONE` before you close the laptop, and `delete`
# whatever it lists.
#
# **Chips cost the same busy or idle, so decide when a machine ends before you start it.**
#
# Last, we keep section 1's table in `setup.json`. It's written even if a check failed, so you can send it to whoever
# helps you.

# %%
checks.save(helpers.run_dir("setup.json"), results,
            {"size": helpers.size(), "settings": asdict(cfg), **facts})

# %% [markdown]
# **`ready` means you can go on; an error lists what to fix.** If something goes wrong later, look up the symptom in
# [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ## Exercises
# **Exercise 1: 30 dollars.** On which slices does 30 USD buy all of 03 for the 31B on demand, even at the upper end of
# section 3's table? Why isn't the fastest one, a v5p-32, among them?
#
# <details><summary>Solution</summary>
#
# A v5p-8 (22.5 USD at most), a v6e-8 (24.0) and a v5e-8 (22.6). On a v5p-32, downloading and compiling take as long as on
# a v5p-8, and every hour costs four times as much. But the table leaves out installing, merging and copying, so 30
# dollars may not buy a whole run. Start with a short one (`max_steps` in 03).
#
# </details>
#
# **Exercise 2: another sharding.** In section 2 the inputs take 67 MB of a chip, the output 34 and what's in between 134.
# Guess the three numbers before you compile: (a) `b` is whole on every chip, `multiply(8_192, by_rows, PartitionSpec())`;
# (b) both are cut by columns, so `cut_a` and `cut_b` are `PartitionSpec(None, "chips")`.
#
# <details><summary>Solution</summary>
#
# (a) 168, 34 and 0. Each chip has a quarter of `a` (34 MB) and all of `b` (134), so nothing has to be gathered. The price
# is memory: the copy of `b` is now there all the time.
#
# (b) 67, 34 and 134, as before. A chip now makes a quarter of the output's *columns*. For these it needs its own columns
# of `b`, but all of `a`, so this time `a` is gathered. ([03](03_train.ipynb) has the same choice for a whole model.)
#
# </details>
#
# Next: [02 · From a Verilog dataset to packed, masked rows](02_data.ipynb)
