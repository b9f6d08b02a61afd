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
# Is the machine you sit at all right, and what would you have to rent for the 31B? We check the
# one and look up the other. **On a CPU you can go straight on to [02](02_data.ipynb).**
#
# | | |
# |---|---|
# | **Needs** | any machine with Python 3.11; for the 31B a Google Cloud project with quota for a v5p-8 and a v6e-8 |
# | **Reads** | nothing |
# | **Writes** | `setup.json` |
# | **Time and cost** | ten seconds here; on Google Cloud 16.80 USD/h (v5p-8) and 21.52 USD/h (v6e-8), published on-demand rates of May 2026 |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · **01 set up** · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
from pathlib import Path
near = [Path(place).absolute() for place in (
    sys.path[0], ".", "gemma4-on-tpu", os.environ.get("JPY_SESSION_NAME", "."), sys.prefix)]
found = [path for start in near for path in (start, *start.parents) if (path / "tpu_time").is_dir()]
if not found and "COLAB_RELEASE_TAG" in os.environ:  # a notebook that was opened alone
    subprocess.check_call("git clone -q --depth=1 https://github.com/OWNER/gemma4-on-tpu".split())
    found = [Path("gemma4-on-tpu").absolute()]
if not found:
    sys.exit("Error: no repository is here or above. Start this kernel inside it, or make one:\n"
             "git clone https://github.com/OWNER/gemma4-on-tpu && gemma4-on-tpu/setup.sh train")
sys.path.insert(0, str(found[0]))
import helpers
helpers.machine()

# %% [markdown]
# ## 1. Is this machine all right?
# Four things can stop a run: no room for the model, the wrong TPU, chips that JAX does not see, and no
# Icarus Verilog, the simulator that judges answers in 07.

# %%
import platform
from dataclasses import asdict, dataclass, replace

import pandas as pd

from helpers import checks, style
from tables import hardware, stored
from tpu_time import fit


@dataclass(frozen=True)
class Settings:
    train_slice: str = "v5p-8"        # for 01 to 04
    serve_slice: str = "v6e-8"        # for 05 to 07
    checkpoint_gb: float = 62.5       # google/gemma-4-31B-it (published: arXiv 2605.25645, S2.3)
    needs_tpu: bool = True
    base_dtype: str = os.environ.get("BASE_DTYPE") or "bfloat16"  # int8, nf4 (11): more slices


FULL = Settings()
E2B = replace(FULL, train_slice="v6e-1", serve_slice="v6e-1", checkpoint_gb=10.2)
TINY = replace(FULL, checkpoint_gb=0.01, needs_tpu=False)  # a CPU; 03 simulates four devices on it
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %%
def may_be(piece):
    """Is this slice meant for the size at hand, or does a compiled step of it fit there?"""
    if not cfg.needs_tpu:
        return False
    fit_there = stored.compiled_fit(piece.name, helpers.size(), cfg.base_dtype)
    return piece.size == helpers.size() or fit_there is not None


slices = [name for name, piece in hardware.SLICES.items() if may_be(piece)]
results, facts = checks.look(cfg.checkpoint_gb, slices)
rows = [(name, "✓" if fine else "✗", text) for name, (fine, text) in results.items()]
style.words(pd.DataFrame(rows, columns=["check", "fine", "found"]))

# %% [markdown]
# With a tick in every row this machine will do. A cross says what to do about it.
#
# ## 2. What fits where
# A *chip* is what you pay for. A *slice* is a set of chips that work together; one virtual machine,
# the *host*, drives up to eight. *HBM* is the memory on a chip, and a training step has to fit there.
#
# **The 31B has 31 billion weights of two bytes. A v5p chip has 96 GiB of HBM, a v6e chip 31. How many
# of each does it take to hold the weights, and does that leave room to train?**
#
# <details><summary>Answer</summary>
#
# 62.5 GB are 58 GiB: one v5p chip, or two v6e chips. But a step also needs adapters, their optimizer,
# and above all what the forward pass keeps for the backward pass: *activations*.
#
# </details>
#
# If activations do not fit, the backward pass computes them again. `remat` says how much: NONE, BLOCK
# (attention and MLP) or DECODER (whole layers). Each line recomputes as little as leaves a tenth of the chip
# free: *compiled* by the TPU's own compiler if 08 has such a step, else *estimated* from the model's shapes.
# *Real* tokens are not padding. Hours and dollars, where a time is predicted, are for
# all of 03 on 10,000 examples of 922 tokens, as in the published recipe; downloading, loading, compiling,
# answering and saving are assumed (for the 31B about half an hour). `e2b` is Gemma 4 E2B, the 31B's small sister.

# %%
def slice_row(step, price, tokens=10_000 * 922):
    """One line of the table: what fits on a slice, hours and dollars of a whole training run."""
    how = "compiled" if step.compiled else "estimated"
    row = {"slice": step.slice, "model": step.model, "base": step.base_dtype,
           "GiB a chip": f"{step.total:.0f} of {step.limit:.0f}",
           "fits": f"yes ({how}), remat={step.remat}" if step.fits else f"no ({how})",
           "real tokens/s": "", "hours": "", "USD": ""}
    if step.speed is not None:
        cost = fit.run_cost(step, tokens, price)
        row |= {"real tokens/s": step.pace, "hours": cost["hours_text"],
                "USD": cost["dollars_text"]}
    return row


chosen = [row for row in fit.renters_rows() if row[0].base_dtype != "nf4"]
chosen += [row for row in fit.renters_rows(("e2b",), fit.ONE_CHIP) if row[0].base_dtype != "nf4"]
style.words(pd.DataFrame([slice_row(*row) for row in chosen]))

# %% [markdown]
# Like the published recipe, the series trains the 31B on a v5p-8 and serves it on a v6e-8. For E2B one
# chip should be enough, a v6e-1 with room to spare and a v5e-1 barely. [08](08_dryrun.ipynb) explains the
# predicted times, [11](11_qlora.ipynb) the base in int8.
#
# **JAX on a v5p-8 shows four devices, on a v6e-8 eight. Why?**
#
# <details><summary>Answer</summary>
#
# Google's names count TensorCores. A v5p chip has two, and JAX treats both as one device; a v6e chip
# has one.
#
# </details>
#
# ### 62.5 GB have to go somewhere first
# The checkpoint goes to a disk before it goes to the chips. Of a classic machine's boot disk of 97 GB 85
# are taken when you arrive (published: arXiv 2605.25645, S2.3, and its repository). Hence
# `TMPDIR=/dev/shm`, a disk in RAM: set it before you start Python. The scripts below do.
#
# ## 3. Create a machine, and delete it
# `scripts/vm.sh` runs on your laptop, with `gcloud` logged in to a project with billing and quota
# ([RENTING.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/RENTING.md)). Here we print the first
# command of each step and run none.

# %%
def dry(*words):
    """The commands that scripts/vm.sh would run."""
    done = subprocess.run(["scripts/vm.sh", *words], capture_output=True, text=True, check=True,
                          env={**os.environ, "DRY_RUN": "1"})
    print("\n".join([f"$ scripts/vm.sh {' '.join(words)}", *done.stdout.splitlines()[:1], ""]))


zone = hardware.slice_of(cfg.train_slice).zones.split()[0]
dry("check")
dry("create", "gemma4-train", cfg.train_slice, zone, "3")
dry("run", "gemma4-train", zone, "scripts/train.sh", "my-bucket", "31b")
dry("delete", "gemma4-train", zone)

# %% [markdown]
# - `check` asks the hub whether the licence is accepted and the token works, before anything is rented.
# - `create` waits in line for two hours at most: *flex-start* is cheaper than on demand, and yours until
#   its time is up. Then it tries *spot*, spare capacity that can be taken back at any moment.
#   `--max-run-duration` deletes both after three hours. Last comes the *classic* TPU API, which has no such
#   limit: only you end that machine.
# - `run` copies a script there and starts it: install, checks, 02 to 04, checkpoints in a *bucket* (a
#   folder in Google Cloud Storage). Run it again on a new machine, and it goes on.
# - `delete` ends it. The disk goes with the machine, the bucket stays.
#
# **You create a v6e-8 on a Friday without a limit on its run time and forget it. What does Monday
# morning say?**

# %%
WEEKEND = 64  # hours from Friday 17:00 to Monday 9:00
for name in (cfg.train_slice, cfg.serve_slice):
    price = hardware.slice_of(name).dollars_per_hour
    print(f"{name}: {price:.2f} USD/h, three hours {3 * price:.0f}, a forgotten weekend "
          f"{WEEKEND * price:,.0f} (on demand, published rates)")

# %% [markdown]
# Three habits prevent it: the limit above, `scripts/vm.sh list ZONE` before you close the laptop,
# `delete` for what it lists.
#
# ## 4. Write it down
# `setup.json` says on what this run was made. It is written even if a check failed: send it to
# whoever helps you.

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
# ## Recap
# You know whether this machine will do, what each slice holds, and how to create one and delete it. When
# something goes wrong, look up the symptom in
# [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# **Exercise.** A friend has quota for a v6e-4 only. Do the 31B's weights fit for serving, and how much
# is left for everything else?
#
# <details><summary>Solution</summary>
#
# `4 * hardware.chip("v6e").hbm / 1e9` is 134 GB, the weights take 62.5: they fit. 05 turns the 72 GB
# that are left into requests.
#
# </details>
#
# Next: [02 · From a Verilog dataset to packed, masked rows](02_data.ipynb)
