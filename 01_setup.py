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
# On a CPU you can skip this notebook and go to [02](02_data.ipynb): 01 is for renting a TPU. What do
# you rent, and is it all right? We check the machine you sit at, see what each TPU slice can hold,
# and write the commands that create one with a limit on what it can cost.
#
# | | |
# |---|---|
# | **Needs** | any machine with Python 3.11; for the 31B a Google Cloud project with quota for a v5p-8 and a v6e-8 |
# | **Reads** | nothing |
# | **Writes** | `setup.json` |
# | **Time and cost** | ten seconds here; on Google Cloud 16.80 USD/h (v5p-8) and 21.52 USD/h (v6e-8), published on-demand rates of May 2026 |
#
# The outputs shown here are those of the tiny run on two CPU cores. We have run neither these
# commands on Google Cloud nor the 31B on a TPU: a
# [table](https://github.com/OWNER/gemma4-on-tpu/blob/main/STATUS.md#what-stands-in-for-what)
# lists what stood in for each, and what that leaves unproved. Words that are new to you are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · **01 set up** · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
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
# ## 1. Is this machine all right?
# First the settings: what to rent, where, and for how long at the most. Nothing in this notebook creates anything: it
# checks the machine that it runs on, and prints commands. Both zones are in one region on purpose,
# so that one bucket is near both machines.

# %%
import itertools
import platform
from dataclasses import asdict, dataclass, replace

import pandas as pd
from IPython.display import display

from helpers import checks, gcloud, style
from tpu_time import fit
from tables import published

pd.set_option("display.max_colwidth", None)


@dataclass(frozen=True)
class Settings:
    train_slice: str = "v5p-8"           # notebooks 01 to 04
    serve_slice: str = "v6e-8"           # notebooks 05 to 07
    vm_size: str = "31b"                 # SIZE on those machines, whatever runs here
    train_zone: str = "us-east5-a"       # has both slices, and flex-start for a v6e
    serve_zone: str = "us-east5-a"
    train_model: str = "SPOT"            # or FLEX_START or STANDARD: section 3
    serve_model: str = "FLEX_START"
    train_hours: int = 3                 # the training machine deletes itself after this long
    serve_hours: int = 8                 # the serving machine, too
    bucket: str = "my-gemma4-bucket"     # must be free in all of Google Cloud: choose your own
    # ── What this machine must have ──
    checkpoint_gb: float = 62.5          # google/gemma-4-31B-it, published: arXiv 2605.25645, S2.3
    slices: tuple = ("v5p-8", "v5p-32", "v6e-8")  # what it may be; (): needs no TPU
    base_dtype: str = helpers.env("BASE_DTYPE", "bfloat16")  # int8, nf4 (11): more slices will do


FULL = Settings()
E2B = replace(FULL, train_slice="v6e-1", serve_slice="v6e-1", vm_size="e2b",
              slices=("v6e-1", "v5e-1"),
              checkpoint_gb=10.2)  # 5.1 B parameters with both towers, bfloat16
TINY = replace(FULL, checkpoint_gb=0.01, slices=())  # a CPU; 03 simulates four devices on it
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# Six things can stop or slow a run, and can be seen now: the wrong Python, no room for the
# checkpoint, the wrong slice, chips that JAX does not see or another process holds, small memory
# pages (a TPU then starts slowly), no Verilog simulator (Icarus, which judges in 07).

# %%
slices = cfg.slices and checks.slices_for(helpers.size(), cfg.base_dtype, cfg.slices)
found, facts = checks.look(cfg.checkpoint_gb, slices)
rows = [(name, "✓" if fine else "✗", text) for name, (fine, text) in found.items()]
style.words(pd.DataFrame(rows, columns=["check", "fine", "found"]))

# %% [markdown]
# With a tick in every row the machine can run its part of the series. A cross says what to do about
# it. The version of Icarus matters for scores: with 11, 153 of the 156 reference solutions of
# verilog-eval, the benchmark of 07, show no mismatch.

# %% [markdown]
# ## 2. What fits where
# What do you have to rent? A *chip* is what you pay for. A *slice* is a set of chips, driven by one
# virtual machine (VM), the *host*, or by several. *HBM* is the memory on a chip: a training step has
# to fit in there. Each line below is a slice, a dtype for the frozen base, and the least recomputation
# with which the step fits (`remat`: what the backward pass computes again to save memory: NONE, BLOCK
# for attention and MLP, or DECODER for whole layers), compiled or estimated. Hours and dollars are for a whole run on 10,000 examples of 922 tokens;
# *real* tokens are those that are no padding.

# %%
def slice_row(found, price, tokens=10_000 * 922):
    """One line of the table: what fits on a slice, hours and dollars of a whole training run."""
    cost = fit.run_cost(found, tokens, price)
    timed = found.speed is not None
    how = "compiled" if found.compiled else "estimated"
    return {"slice": found.slice, "model": found.model, "base": found.base_dtype,
            "GiB a chip": f"{found.total:.0f} of {found.limit:.0f}",
            "fits": f"yes ({how}), remat={found.remat}" if found.fits else f"no ({how})",
            "real tokens/s": found.pace if timed else "",
            "hours": f"{cost['hours']:.1f}" if timed else "",
            "USD": f"{cost['dollars']:.0f}" if timed else ""}


chosen = [row for row in fit.renters_rows() if row[0].base_dtype != "nf4"]
chosen += [row for row in fit.renters_rows(("e2b",), fit.ONE_CHIP) if row[0].compiled]
style.words(pd.DataFrame([slice_row(*row) for row in chosen]))

# %% [markdown]
# On a v5p-8 the 31B's step fits in bfloat16 without recomputation, and a run takes about an hour; for
# E2B one chip is enough. By these predictions a v6e-8, on which we serve later, would train as well.
# We train on the v5p-8: there the prediction misses the measured step by 12 % at most, on a v6e by at
# least 17 % ([08](08_dryrun.ipynb) §9), and its chips have three times the memory. *Compiled*: the TPU's own compiler said so. *Estimated*: added up from the
# model's shapes, a tenth of the chip left free. Where the last columns are empty, no time is predicted.
#
# For your own tokens and prices, change two lines in [08](08_dryrun.ipynb) §8, or build the site's
# calculator (`./build_site.sh`); [11](11_qlora.ipynb) explains a base in int8. The 922 tokens
# are those of the published recipe: counted with Gemma 3's tokenizer, without our system sentence
# and the empty thought before an answer. 02 counts yours.
#
# One name misleads. The 8 in `v5p-8` counts TensorCores, two per chip, and JAX treats the two as one
# device: it sees 4. The 8 in `v6e-8` counts chips: JAX sees 8. Some layers of the 31B have only 4
# heads of keys and values, so Tunix cannot split them eight ways. 03 uses 4 chips; vLLM on the
# v6e-8 stores each such head twice.
#
# ### 62.5 GB have to fit somewhere
# The 31B checkpoint is downloaded before it is loaded. Where is there room for it? On a classic TPU
# VM 85 of the boot disk's 97 GB are taken when you arrive (published: arXiv 2605.25645, S2.3, and its
# authors' setup notes).

# %%
train = published("hardware_training", "spec", "tpu")
spec = published("spec_sheet_reference", "item")  # the vendors' own sheets
places = {"boot disk, free": train["boot_disk"] - train["boot_disk_used"],
          "boot disk, whole": train["boot_disk"],
          "/dev/shm (half of host RAM)": spec["v5p_host_ram_4chip"] / 2,
          "HBM of one chip": train["hbm_per_chip"], "HBM of four chips": train["hbm_total"]}
need = train["model_download"]
fig, ax = style.figure(height=2.8)
ax.barh(list(places), list(places.values()), height=0.6,
        color=[style.RED if size < need else style.BLUE for size in places.values()])
ax.axvline(need, color=style.BLACK, linewidth=1.2)
ax.text(need + 4, -0.85, f"the 31B checkpoint, {need:g} GB", fontsize=9)
for row, size in enumerate(places.values()):
    ax.text(size + 4, row, f"{size:.0f}", va="center", fontsize=9)
ax.set(xlabel="GB", title="The checkpoint needs more than a v5p-8's classic boot disk has free",
       ylim=(4.6, -1.3), xlim=(0, 450))
ax.grid(axis="y", visible=False)
style.finish(fig, "01_space", "published (arXiv 2605.25645, S2) and v5p data sheet")

# %% [markdown]
# So set `TMPDIR=/dev/shm`, a disk in RAM, before you start Python, or create the VM with a larger
# boot disk, as below. (The paper plans with 355 GB of host RAM. That is half of another machine's;
# a v5p-8 has 448 GB.)
#
# ## 3. Create the machine
# You need a Google Cloud project with billing, `gcloud` on your laptop (once: `gcloud auth login`,
# `gcloud config set project PROJECT`, `gcloud services enable compute.googleapis.com
# tpu.googleapis.com`), and quota for the slice (*IAM & Admin, Quotas*). *Spot*, spare capacity that may be taken back at any time, has a quota of
# its own, from which flex-start is taken first, and each of the two APIs below counts for itself. The
# Cloud TPU API may count a v5p in TensorCores, eight for a v5p-8
# ([Google's page](https://cloud.google.com/tpu/docs/quota)). The names are those of Google's
# documentation as read in 2026.

# %%
display(pd.DataFrame(gcloud.SLICES))
vms = (("gemma4-train", cfg.train_slice, cfg.train_zone, cfg.train_hours, cfg.train_model),
       ("gemma4-serve", cfg.serve_slice, cfg.serve_zone, cfg.serve_hours, cfg.serve_model))
for vm in vms:
    print(gcloud.shell(gcloud.create_command(*vm)))

# %% [markdown]
# Two machines, used one after the other. `--max-run-duration` deletes each after that long, whatever
# happens. `--provisioning-model` is `SPOT`, now or not at all; `FLEX_START`, which waits in line
# ([in some zones](https://cloud.google.com/tpu/docs/request-using-flex-start)) and then keeps the
# machine until the guard; or `STANDARD` at the full price. Eight v6e chips are hard to get: in August
# 2026 another author lost spot ones after six minutes, and flex-start in europe-west4 expired for eight
# and gave four at once, for 1.35 USD a chip-hour (spot: 1.78)
# ([gce-vllm-v6e8-31b](https://github.com/xbill9/gemma4-dev)). Four hold the weights, too (exercise 1).
# The cloud-platform scope lets the VM ask for your bucket; section 4 gives it the right to. A v6e
# boots only from Hyperdisk, a v5p from balanced persistent disks
# ([Google's table](https://cloud.google.com/tpu/docs/setup-persistent-disk)).
#
# Most guides on the web still show **the classic way**, the Cloud TPU API, which Google no longer
# develops (a v5e comes no other way). It wants an *accelerator type* and a *runtime version* that fit
# each other: with the wrong one the chips do not appear. It has no guard on run time, a boot disk of 97
# GB, and spot in place of flex-start. The last form waits in a queue for two hours at most. If the first form brings no
# machine, try these.

# %%
for queued, (name, slice_name, zone, _, model) in itertools.product((False, True), vms):
    print(gcloud.shell(gcloud.classic_command(name, slice_name, zone, model, queued)))

# %% [markdown]
# ## 4. A bucket near the machine, and what runs on it
# A spot machine takes its disk with it when it goes. So checkpoints live in a bucket. Put it into the
# machines' region: reading 62.5 GB across an ocean costs time and egress charges. The name
# `my-gemma4-bucket` is surely taken: set `bucket` in section 1 and run this page again, which writes
# yours into every script below. The second command lets the machines write to it: they act as the
# project's default service account, whose number
# `gcloud projects describe PROJECT --format='value(projectNumber)'` knows. The third says in which
# region the bucket is. The fourth connects you to the machine, or the fifth, if you made it the classic
# way. Their `-L` is for notebooks: a `.venv/bin/jupyter lab --no-browser` over there (it comes with
# `.venv/bin/pip install -r requirements/browser.txt`) is `localhost:8888` over here.
#
# The base model is downloaded from the hub by each new machine. A copy in the bucket works as well:
# name it as the `base` of 02, `gs://…`.

# %%
for command in (*gcloud.bucket_commands(cfg.bucket, cfg.train_zone),
                gcloud.connect_command("gemma4-train", cfg.train_zone),
                gcloud.connect_command("gemma4-train", cfg.train_zone, classic=True)):
    print(gcloud.shell(command))

# %% [markdown]
# This cell writes what the machines run, a script for each kind, and prints the training machine's.
# Copy it over by the first line (classic: `gcloud compute tpus tpu-vm scp`), then run `bash vm.sh`
# there.

# %%
here = "https://github.com/OWNER/gemma4-on-tpu", cfg.bucket, cfg.vm_size
scripts = {"vm.sh": gcloud.vm_script(*here, "01", "04"), "serve.sh": gcloud.serving_script(*here),
           "vm_hosts.sh": gcloud.hosts_script(*here)}
folder = helpers.run_dir("scripts")
for name, text in scripts.items():
    helpers.write_text(folder / name, text)
print(gcloud.shell(gcloud.copy_command(folder / "vm.sh", "gemma4-train", cfg.train_zone)))
print(f"\n{scripts['vm.sh']}")

# %% [markdown]
# What it does, in order:
#
# - The image has Python 3.10 and Tunix needs 3.11, so that comes first, from deadsnakes, Ubuntu's
#   usual archive of other Pythons.
# - `setup.sh` sees the chips and installs JAX for TPU, with its driver and compiler (libtpu) pinned.
# - This notebook runs first, and stops the script if a check of section 1 fails (huge pages
#   only warn).
# - `enable-linger`: without it Ubuntu deletes your files in `/dev/shm` when you log out.
# - Checkpoints and compiled programs go straight into the bucket. The rest of the run is copied
#   there every five minutes and fetched at the start, so the same script resumes on a new VM. When
#   `run.log` ends with `all is in the bucket`, delete the machine.
#
# (If your copy is on no public server, send it first, and the script skips the clone:
# `git archive --prefix=gemma4-on-tpu/ HEAD | gcloud compute ssh gemma4-train --zone=us-east5-a
# --command='tar x'`.)
#
# A spot machine has thirty seconds between the warning and the end; nothing that is cut off then
# comes back as if it were whole. The serving VM gets `serve.sh`, which adds Docker, pulls the image
# before the 62 GB, and leaves out what only training needs ([05](05_serve_vllm.ipynb), section 6):

# %%
print(gcloud.shell(gcloud.copy_command(folder / "serve.sh", "gemma4-serve", cfg.serve_zone)))
print(f"\n{scripts['serve.sh']}")

# %% [markdown]
# ### More than one host
# A v5p-8 is one VM with four chips. A v5p-32 is four such VMs. A program has to start on all of them
# at once, because JAX waits until every host has joined. `--worker=all` does that. The script is
# another one, `vm_hosts.sh`: on every host 02 makes the same data and 03 trains, as scripts. Only
# the first one merges, and copies its run to the bucket.

# %%
large = ("gemma4-large", "v5p-32", FULL.train_zone)
for command in gcloud.all_hosts_commands(*large, cfg.train_model, folder / "vm_hosts.sh"):
    print(gcloud.shell(command))
print("\nvm_hosts.sh is vm.sh, with these in place of its last six lines:\n")
print(gcloud.last_lines_of_hosts())

# %% [markdown]
# Tested on one CPU machine: 03 as a script in two processes, and who merges and copies. A real
# slice's network and `--worker=all` are not: be ready to finish by hand from the bucket.
#
# We cannot run `gcloud` here. Tests check that every command is valid shell and arrives word for
# word, not whether Google still knows an option.
#
# ## 5. What it costs, and how to stop it
# A forgotten v6e-8 costs 516 dollars a day (24 × 21.52, the published rate). Three habits prevent
# it: the run-time guard above, listing what runs before you close the laptop, and deleting what you
# listed. The commands above ask for spot and flex-start, which are cheaper than these on-demand rates.
# Only you end a machine of the classic API, such as the v5p-32.

# %%
budget = pd.DataFrame([
    {"VM": name, "slice": slice_name, "USD/h, on demand": gcloud.worst_case(slice_name, 1),
     "guard, h": hours, "USD at most": gcloud.worst_case(slice_name, hours or float("nan")),
     "USD if forgotten for a week": gcloud.worst_case(slice_name, 7 * 24)}
    for name, slice_name, zone, hours, *_ in (*vms, (*large, None))])
display(budget.style.hide(axis="index").format(precision=2, thousands=",", na_rep="no limit"))
for command in (*gcloud.list_commands((cfg.train_zone, cfg.serve_zone), cfg.bucket),
                *(end for name, _, zone, *_ in (*vms, large)
                  for end in gcloud.delete_commands(name, zone)),
                gcloud.zones_command(cfg.train_slice)):
    print(gcloud.shell(command))

# %% [markdown]
# The guard turns a four-figure mistake into a two- or three-figure one, with a bucket left to pay for. The
# `list` commands show what runs or is stored, the `delete` commands end each VM, however it was made,
# and the last one says which zones offer the machine today.
#
# ### What one training run takes
# The steps are not even half of it. 03 also downloads, loads, compiles, validates and saves, and the
# machine's clock runs before and after 03. No TPU was at hand to time these parts, so each says
# where its number comes from.

# %%
wanted = fit.will_it_fit("v5p", 4)
cost = fit.run_cost(wanted, 10_000 * 922, fit.price("v5p", 4))  # 922: see section 2
rows = [("03", part, minutes, fit.WHERE_FROM[part]) for part, minutes in cost["minutes"].items()]
rows += [("beside it", *row) for row in fit.around_03("31b")]
parts = pd.DataFrame(rows, columns=["when", "part", "minutes", "where from"])
display(style.words(parts.assign(minutes=parts.minutes.map("{:.1f}".format))))
whole = parts.minutes.sum() / 60
print(f"31B, 10,000 examples on a v5p-8: 03 {cost['hours']:.1f} h, {cost['dollars']:.0f} USD; from "
      f"create to delete {whole:.1f} h, {whole * fit.price('v5p', 4):.0f} USD")

# %% [markdown]
# Plan about an hour for 03, and an hour and three quarters from create to delete, half of it assumed. The
# published run took 3.34 hours and 56 dollars, loading and compiling included. To replace assumptions
# by your slice's own numbers before the long run, start `./first_hour.sh` there: load, compile,
# thirty steps and a trace, at most an hour, and a report at the end that others can use, too.
#
# **A Hugging Face token?** Gemma 4 is under Apache-2.0 and, as far as we know, downloads without a
# login. If you need one all the same, it belongs in the environment, never into a notebook.
#
# ## 6. Write it down
# `setup.json` says on what this run was made. Then, and only then, we stop if something is wrong:
# the file is there to send to whoever helps you.

# %%
helpers.write_json(helpers.run_dir("setup.json"), {
    "size": helpers.size(), "settings": asdict(cfg), "python": platform.python_version(), **facts,
    "checks": {name: {"fine": fine, "text": text} for name, (fine, text) in found.items()}})
wrong = [text for name, (fine, text) in found.items() if not fine and name != "huge pages"]
if wrong:
    raise helpers.UserError("this machine is not ready.\n- " + "\n- ".join(wrong))
print(f"ready; wrote {helpers.run_dir('setup.json')}")

# %% [markdown]
# ## Recap
# You know what the slices hold, how to create one that deletes itself, how to reach and prepare it,
# what it can cost at the worst, and that this machine can run the notebooks of its size.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `No module named jax`, or Tunix refuses to install | the image's own Python 3.10 | Python 3.11 from deadsnakes, then `./setup.sh train` |
# | `No space left on device` while the model loads, sometimes in the middle of another traceback | the checkpoint is staged on the boot disk | `export TMPDIR=/dev/shm`, remove what is left under `/tmp/base` |
# | `TPU is already in use` | an earlier Python still holds the chips, perhaps another notebook's kernel | shut that kernel down; `sudo lsof /dev/accel* /dev/vfio/*` names the process |
# | JAX sees a CPU, or 0 devices | JAX without libtpu, or an image or runtime version of another generation | `./setup.sh train` on the VM itself; compare with section 3's table |
# | no VM comes, or one comes whose chips do not start | no capacity, or one of the two APIs has trouble with this slice (users report both) | the same slice by the other API, section 3 |
# | you expected 8 devices on a v5p-8 and see 4 | the 8 counts TensorCores, two per chip | nothing: 03 arranges four |
# | the log file stays empty for minutes | Python buffers what goes to a file | `PYTHONUNBUFFERED=1`; `run_all.sh` sets it |
# | the first step takes minutes and prints nothing | XLA compiles the step | wait: 3 to 8 minutes (published); 03 keeps the compilation on disk |
# | the VM is gone | spot capacity was taken back, or the guard ended it | create it again and run the same script: it fetches the bucket and 03 resumes from its last checkpoint |
# | a spot VM cannot be stopped | only deleting frees it | keep everything in the bucket, then delete |
# | `does not have storage.objects.list access` | the VM's service account has no role on the bucket: it is of another project, or of an organisation that gives it none | the second command of section 4 |
# | your connection closes when you kill a process with `pkill -f` | the pattern matches your own shell's command line | kill by process id |
# | 401 or 403 from the hub | the page wants its terms accepted, or the token is wrong | accept them while logged in; `export HF_TOKEN=hf_...` |
#
# ### Exercises
# 1. A friend has quota for a v6e-4 only: four chips of 31.25 GiB, or 33.6 GB. Do the 31B's weights
#    fit for serving, and how much is left for the KV cache?
# 2. The guard is 3 hours and training is estimated at one hour. What is the most that a crash
#    right at the start can cost if you go to lunch for two hours? How would you lower it?
#
# <details><summary>Solutions</summary>
#
# 1. `4 * chip("v6e").hbm / 1e9` is 134 GB and the weights take 62.5, so they fit with 72 GB
#    left before activations and vLLM's own reserve. 05 turns that into requests.
# 2. `gcloud.worst_case("v5p-8", 2)`: 33.60 dollars at the published rate. A shorter `--max-run-duration`
#    lowers it; so does letting the VM delete itself when the run ends, well or badly:
#    `./run_all.sh 01 04; gcloud compute instances delete "$(hostname)" --zone=... --quiet`. Copy to
#    the bucket first.
#
# </details>
#
# Next: [02 · From a Verilog dataset to packed, masked rows](02_data.ipynb)
