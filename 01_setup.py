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
# What do I rent, and is it all right? We check the machine you sit at, see what each TPU slice can
# hold, and write the commands that create one with a limit on what it can cost.
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
# [table](https://github.com/OWNER/gemma4-on-tpu/blob/main/CONTRIBUTING.md#what-stands-in-for-what)
# lists what stood in for each, and what that leaves unproved. Words that are new to you are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# Three cells that open every notebook: find the repository, install what is missing, and say what
# this machine is.

# %% cellView="form"
# @title Find the repository. Colab opens a notebook without it, so there we clone it.
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY_URL = os.environ.get("REPOSITORY_URL") or "https://github.com/OWNER/gemma4-on-tpu"
if os.environ.get("RUN_DIR"):  # relative to where you stand, not to the repository
    os.environ["RUN_DIR"] = os.path.abspath(os.environ["RUN_DIR"])
here = Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()
places = (here, here.parent, Path.cwd(), here / "gemma4-on-tpu")
root = next((place for place in places if (place / "helpers").is_dir()), None)
if root is None and "COLAB_RELEASE_TAG" not in os.environ:
    raise SystemExit(f"Run this inside the repository: git clone {REPOSITORY_URL}")
if root is None:
    subprocess.run(["git", "clone", "-q", "--depth=1", REPOSITORY_URL, "gemma4-on-tpu"], check=True)
    root = here / "gemma4-on-tpu"
os.chdir(root)
sys.path.insert(0, str(root))

# %%
# Install what is missing, on Colab or in the repository's own .venv; other Pythons stay untouched.
import helpers

helpers.install()

# %%
# What this machine is. Every result below was made with these versions.
helpers.machine()

# %%
# Where this notebook stands.
helpers.you_are_here("01")

# %% [markdown]
# ## 1. Is this machine all right?
# Which machines, where, and for how long at the most. Nothing in this notebook creates anything: it
# checks the machine that it runs on, and prints commands. Both zones are in one region on purpose,
# so that one bucket is near both machines.

# %%
import platform
import textwrap
from dataclasses import asdict, dataclass, replace

import pandas as pd
from IPython.display import display

from helpers import checks, fit, gcloud, hardware, style
from helpers.machine import published

pd.set_option("display.max_colwidth", None)


@dataclass(frozen=True)
class Settings:
    train_slice: str = "v5p-8"           # notebooks 01 to 04
    serve_slice: str = "v6e-8"           # notebooks 05 to 07
    vm_size: str = "31b"                 # SIZE on those machines, whatever runs here
    train_zone: str = "us-central1-a"
    serve_zone: str = "us-central1-b"
    spot: bool = True                    # cheaper, and may be taken away at any time
    max_hours: int = 6                   # the machine deletes itself after this long
    bucket: str = "my-gemma4-bucket"     # must be free in all of Google Cloud: choose your own
    # ── What this machine must have ──
    checkpoint_gb: float = 62.5          # google/gemma-4-31B-it, published: arXiv 2605.25645, S2.3
    slices: tuple = ("v5p-8", "v5p-32", "v6e-8")  # what it may be; (): needs no TPU


FULL = Settings()
E2B = replace(FULL, train_slice="v6e-1", serve_slice="v6e-1", vm_size="e2b",
              train_zone="us-central1-b", slices=("v6e-1", "v5e-1"),
              checkpoint_gb=10.2)  # 5.1 B parameters with both towers, bfloat16
TINY = replace(FULL, checkpoint_gb=0.01, slices=())  # a CPU; 03 simulates four devices on it
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# Six things stop a run after an hour and could have stopped it now: the wrong Python, no room for
# the checkpoint, the wrong slice, chips that JAX does not see or another process holds, a TPU that
# starts slowly, no Verilog simulator (Icarus, which judges in 07).

# %%
def words(frame):
    """A table of words: left-aligned, without row numbers."""
    left = [{"selector": name, "props": "text-align: left"} for name in ("th", "td")]
    return frame.style.hide(axis="index").set_table_styles(left)


found, facts = checks.look(cfg.checkpoint_gb, cfg.slices)
words(pd.DataFrame([(name, "✓" if fine else "✗", text) for name, (fine, text) in found.items()],
                   columns=["check", "fine", "found"]))

# %% [markdown]
# With a tick in every row the machine can run its part of the series. Huge pages only cost time,
# and in a container you may not be able to change them. The version of Icarus matters for scores:
# with 11, 153 of the 156 reference solutions of verilog-eval, the benchmark of 07, show no mismatch.
#
# A check that cannot fail checks nothing. These are the lines you would see on a machine with every
# fault:

# %%
for fine, message in (checks.check_python((3, 10, 12)), checks.check_space("/tmp", 12, 62.5),
                      checks.check_slice(hardware.Hardware("tpu", "v5e", 8), ("v5p-8", "v6e-8")),
                      checks.check_devices(1, "cpu", 4), checks.check_huge_pages("madvise", 4),
                      checks.check_icarus("")):
    assert not fine
    print(textwrap.fill(f"✗ {message}", 100, subsequent_indent="  "))

# %% [markdown]
# ## 2. What fits where
# What do you have to rent? Training needs room for the weights, for the adapters with their
# optimizer state, and for what a step computes in between. Change the words of this question.
# *Compiled* answers are what the TPU's own compiler asked for (08). Others are *estimated*: added up
# from the model's shapes, within a tenth of the compiler, so a tenth of the chip must stay free.

# %%
answer = fit.will_it_fit("v5p", 4, model="31b", base_dtype="bfloat16", remat="NONE",
                         rows=2, row_length=4096)
print(answer)
pd.Series(answer.parts).round(1).rename("GiB per chip").to_frame()

# %% [markdown]
# `base_dtype` is how the frozen weights are stored (bfloat16, int8, nf4; 11). `remat` is what the
# backward pass computes again to save memory: NONE, BLOCK or DECODER. Then every slice, each with
# the least recomputation that fits, for a whole run at the prices of 08. Put your own price and
# number of tokens there, or into the site's page
# [What will it cost me?](https://github.com/OWNER/gemma4-on-tpu/blob/main/tools/site/cost.md).

# %%
def slice_row(found, price, tokens=10_000 * 922):
    """One line of the table: what fits on a slice, hours and dollars of a whole training run."""
    cost, least = fit.run_cost(found, tokens, price), "≥ " * (found.speed is None)
    return {"slice": found.slice, "model": found.model, "base": found.base_dtype,
            "GiB a chip": f"{found.total:.0f} of {found.limit:.0f}",
            "fits": f"yes, remat={found.remat}" if found.fits else "no",
            "hours": f"{least}{cost['hours']:.1f}" if found.fits else "",
            "USD": f"{least}{cost['dollars']:.0f}" if found.fits else ""}


chosen = [row for row in fit.renters_rows() if row[0].base_dtype != "nf4"]
chosen += [row for row in fit.renters_rows(("e2b",), fit.ONE_CHIP) if row[0].compiled]
words(pd.DataFrame([slice_row(*row) for row in chosen]))

# %% [markdown]
# A v5p-8 holds all of the 31B's step without recomputation, in bfloat16, for about an hour. *≥*
# means that no time is predicted there: so long it takes if the chips ran at their peak, which no
# program does. For E2B one chip is enough.
#
# ### The machines behind the names
# A *chip* is what you pay for. A *slice* is a set of chips, driven by one virtual machine (VM), the
# *host*, or by several. *Peak* is arithmetic in bfloat16, the 16-bit format that training and
# serving compute in. *HBM* is the memory on the chip. The numbers come from the vendors' sheets in
# `data/published/`, the prices from the recipe that this series re-does (h2loop, arXiv 2605.25645,
# May 2026), which compared both slices with two H100 GPUs.

# %%
spec = published("spec_sheet_reference", "item")
HOST_RAM = {"v5p-8": spec["v5p_host_ram_4chip"], "v6e-8": 1440.0,  # Google's page of the v6e
            "2 × H100": published("hardware_training", "spec", "gpu")["host_ram"]}


def machine_row(kind, chips):
    """One machine of the table from its chip's sheet; totals over its chips."""
    one = helpers.chip(kind)
    peak, bandwidth = chips * one.flops / 1e15, chips * one.bandwidth / 1e12
    price = chips * one.dollars_per_hour
    return {"chips": chips, "peak bf16, PFLOP/s": peak, "HBM, GB": chips * one.hbm / 1e9,
            "HBM bandwidth, TB/s": bandwidth, "USD/h (published)": price,
            "USD per PFLOP/s-h": price / peak, "USD per TB/s-h": price / bandwidth}


machines = pd.DataFrame({"v5p-8": machine_row("v5p", 4), "v6e-8": machine_row("v6e", 8),
                         "2 × H100": machine_row("h100", 2)})
machines.loc["host RAM, GB"] = HOST_RAM
machines.map("{:,.4g}".format)

# %% [markdown]
# A v6e-8 has 3.7 times the arithmetic and twice the memory bandwidth of two H100s at nearly their
# price. A v5p-8 has 0.93 times their arithmetic for 0.76 times their price. That is on paper, at the
# peaks; software decides how much of either a program gets.
#
# One name misleads. The 8 in `v5p-8` counts TensorCores, two per chip, and JAX treats the two as one
# device: it sees 4. The 8 in `v6e-8` counts chips: JAX sees 8. Some layers of the 31B have only 4
# heads of keys and values, so Tunix cannot split them eight ways. 03 uses 4 chips; vLLM on the
# v6e-8 stores each such head twice.
#
# ### 62.5 GB have to fit somewhere
# The 31B checkpoint is downloaded before it is loaded. Where is there room for it? On a classic TPU
# VM 85 of the boot disk's 97 GB are taken when you arrive (published: arXiv 2605.25645, S2.3).

# %%
train = published("hardware_training", "spec", "tpu")
places = {"boot disk, free": train["boot_disk"] - train["boot_disk_used"],
          "boot disk, whole": train["boot_disk"],
          "/dev/shm (half of host RAM)": HOST_RAM["v5p-8"] / 2,
          "HBM of one chip": train["hbm_per_chip"], "HBM of four chips": train["hbm_total"]}
need = train["model_download"]
fig, ax = style.figure(height=2.8)
ax.barh(list(places), list(places.values()), height=0.6,
        color=[style.RED if size < need else style.BLUE for size in places.values()])
ax.axvline(need, color=style.BLACK, linewidth=1.2)
ax.text(need + 4, -0.85, f"the 31B checkpoint, {need:g} GB", fontsize=9)
for row, size in enumerate(places.values()):
    ax.text(size + 4, row, f"{size:.0f}", va="center", fontsize=9)
ax.set(xlabel="GB", title="A v5p-8's classic boot disk is too small for the checkpoint",
       ylim=(4.6, -1.3), xlim=(0, 450))
ax.grid(axis="y", visible=False)
style.finish(fig, "01_space", "published (arXiv 2605.25645, S2) and v5p data sheet")

# %% [markdown]
# So set `TMPDIR=/dev/shm`, a disk in RAM, before you start Python, or create the VM with a larger
# boot disk, as below. (The paper plans with 355 GB of host RAM. That is half of another machine's;
# a v5p-8 has 448 GB.)
#
# ## 3. Create the machine
# You need a Google Cloud project with billing, `gcloud` on your laptop, and quota for the slice
# (*IAM & Admin, Quotas*; *spot*, spare capacity that may be taken back at any time, has a quota of
# its own). The names are those of Google's documentation as read in 2026.

# %%
display(pd.DataFrame(gcloud.SLICES))
for name, slice_name, zone in (("gemma4-train", cfg.train_slice, cfg.train_zone),
                               ("gemma4-serve", cfg.serve_slice, cfg.serve_zone)):
    print(gcloud.shell(gcloud.create_command(name, slice_name, zone, cfg.max_hours, cfg.spot)))

# %% [markdown]
# Two machines, used one after the other. A TPU is a machine type of Compute Engine, like any other.
# Two options matter for your money. `--max-run-duration` deletes the machine after that long,
# whatever happens. `--provisioning-model=SPOT` takes spare capacity at a lower price. If there is
# none, `FLEX_START` with `--request-valid-for-duration=2h` waits in line for it. The cloud-platform
# scope lets the VM read and write your bucket.
#
# Most guides on the web still show **the classic way**, the Cloud TPU API, which Google no longer
# develops. It wants an *accelerator type* and a *runtime version* that fit each other: with the
# wrong one the chips do not appear. It has no guard on run time, and a boot disk of 97 GB. The last
# form waits in a queue.

# %%
for queued in (False, True):
    print(gcloud.shell(gcloud.classic_command(
        "gemma4-train", cfg.train_slice, cfg.train_zone, cfg.spot, queued)))

# %% [markdown]
# ## 4. A bucket near the machine, and what runs on it
# A spot machine takes its disk with it when it goes. So checkpoints live in a bucket, and so does a
# copy of the base model that you do not want to download twice. Put the bucket into the machines'
# region: reading 62.5 GB across an ocean costs time and egress charges.

# %%
for command in (*gcloud.bucket_commands(cfg.bucket, cfg.train_zone),
                gcloud.connect_command("gemma4-train", cfg.train_zone),
                gcloud.connect_command("gemma4-train", cfg.train_zone, classic=True)):
    print(gcloud.shell(command))

# %% [markdown]
# Then, on the machine, save this as `vm.sh` and run `bash vm.sh`.

# %%
print(gcloud.vm_script(REPOSITORY_URL, cfg.bucket, cfg.vm_size, "01", "04"))

# %% [markdown]
# What it does, in order:
#
# - The image has Python 3.10 and Tunix needs 3.11, so that comes first, from deadsnakes, Ubuntu's
#   usual archive of other Pythons.
# - `setup.sh` sees the chips and installs JAX for TPU, with its driver and compiler (libtpu) pinned.
# - This notebook runs first, and stops the script if a check of section 1 fails.
# - Checkpoints and compiled programs go straight into the bucket. The rest of the run is copied
#   there every five minutes and fetched at the start, so the same script resumes on a new VM.
#
# A spot machine has thirty seconds between the warning and the end; nothing that is cut off then
# comes back as if it were whole. The serving VM needs Docker instead of JAX and the same fetch
# (05, section 5).
#
# ### More than one host
# A v5p-8 is one VM with four chips. A v5p-32 is four such VMs. A program has to start on all of them
# at once, because JAX waits until every host has joined. `--worker=all` does that.

# %%
for command in gcloud.all_hosts_commands("gemma4-large", "v5p-32", cfg.train_zone, cfg.spot):
    print(gcloud.shell(command))

# %% [markdown]
# We cannot run `gcloud` here. Tests make sure that every command, as printed, is valid shell and
# arrives word for word; whether Google still knows an option they cannot say.
#
# ## 5. What it costs, and how to stop it
# A forgotten v6e-8 costs 516 dollars a day (24 × 21.52, the published rate). Three habits prevent
# it: the run-time guard above, listing what runs before you close the laptop, and deleting what you
# listed. Spot is cheaper than these on-demand rates.

# %%
budget = pd.DataFrame([
    {"VM": name, "slice": slice_name, "USD/h": gcloud.worst_case(slice_name, 1),
     f"USD at most, guard of {cfg.max_hours} h": gcloud.worst_case(slice_name, cfg.max_hours),
     "USD if forgotten for a week": gcloud.worst_case(slice_name, 7 * 24)}
    for name, slice_name in (("gemma4-train", cfg.train_slice), ("gemma4-serve", cfg.serve_slice))])
display(budget.style.hide(axis="index").format(precision=2, thousands=","))
for command in (*gcloud.list_commands((cfg.train_zone, cfg.serve_zone), cfg.bucket),
                *gcloud.delete_commands("gemma4-train", cfg.train_zone),
                gcloud.zones_command(cfg.train_slice)):
    print(gcloud.shell(command))

# %% [markdown]
# The guard turns a four-figure mistake into a three-figure one, with a bucket left to pay for. The
# `list` commands show what runs or is stored, the two `delete` commands end a VM made the current or
# the classic way, and the last command says which zones offer the machine today.
#
# ### What one training run takes
# The steps are not even half of it. A run also downloads, loads, compiles, validates and saves. No
# TPU was at hand to time these parts, so each says where its number comes from.

# %%
wanted = fit.will_it_fit("v5p", 4)
cost = fit.run_cost(wanted, 10_000 * 922, fit.price("v5p", 4))
display(words(pd.DataFrame([(part, f"{minutes:.1f}", fit.WHERE_FROM[part])
                            for part, minutes in cost["minutes"].items()],
                           columns=["part", "minutes", "where from"])))
print(f"31B, 10,000 examples on a v5p-8: {cost['hours']:.1f} h, {cost['dollars']:.0f} USD")

# %% [markdown]
# Plan about an hour for the training machine. The published run took 3.34 hours and 56 dollars,
# loading and compiling included. To replace assumptions by your slice's own numbers before the long
# run, start `./first_hour.sh` there: load, compile, thirty steps and a trace, at most an hour, and a
# report at the end that others can use, too.
#
# **A Hugging Face token?** Gemma 4 is under Apache-2.0 and, as far as we know, downloads without a
# login. If the hub answers 401 or 403 all the same, accept the terms on the model's page and set
# `HF_TOKEN` in the environment; the libraries look there by themselves. Do not write a token into a
# notebook.
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
# | `No space left on device` while the model loads, sometimes in the middle of another traceback | the checkpoint is staged on the boot disk | `export TMPDIR=/dev/shm`, remove what is left under `/tmp/models` |
# | `TPU is already in use` | an earlier Python still holds the chips, perhaps another notebook's kernel | shut that kernel down; `sudo lsof /dev/accel* /dev/vfio/*` names the process |
# | JAX sees a CPU, or 0 devices | JAX without libtpu, or a runtime version of another generation | `./setup.sh train` on the VM itself; compare with section 3's table |
# | you expected 8 devices on a v5p-8 and see 4 | the 8 counts TensorCores, two per chip | nothing: 03 arranges four |
# | the log file stays empty for minutes | Python buffers what goes to a file | `PYTHONUNBUFFERED=1`; `run_all.sh` sets it |
# | the first step takes minutes and prints nothing | XLA compiles the step | wait: 3 to 8 minutes (published); 03 keeps the compilation on disk |
# | the VM is gone | spot capacity was taken back, or the guard ended it | create it again and run the same script: it fetches the bucket and 03 resumes from its last checkpoint |
# | a spot VM cannot be stopped | only deleting frees it | keep everything in the bucket, then delete |
# | `does not have storage.objects.list access` | the bucket is in another project than the VM's service account | `gcloud storage buckets add-iam-policy-binding gs://BUCKET --member=serviceAccount:... --role=roles/storage.objectUser` |
# | your connection closes when you kill a process with `pkill -f` | the pattern matches your own shell's command line | kill by process id |
# | 401 or 403 from the hub | the page wants its terms accepted, or the token is wrong | accept them while logged in; set `HF_TOKEN` |
#
# ### Exercises
# 1. A friend has quota for a v6e-4 only: four chips of 32 GB. Do the 31B's weights fit for serving,
#    and how much is left for the KV cache?
# 2. The guard is 6 hours and training is estimated at one hour. What is the most that a crash
#    right at the start can cost if you go to lunch for two hours? How would you lower it?
#
# <details><summary>Solutions</summary>
#
# 1. `4 * helpers.chip("v6e").hbm / 1e9` is 134 GB and the weights take 62.5, so they fit with 72 GB
#    left before activations and vLLM's own reserve. 05 turns that into requests.
# 2. `gcloud.worst_case("v5p-8", 2)`: 33.60 dollars at the published rate. A shorter `--max-run-duration`
#    lowers it; so does letting the VM delete itself when the run ends, well or badly:
#    `./run_all.sh 01 04; gcloud compute instances delete "$(hostname)" --zone=... --quiet`. Copy to
#    the bucket first.
#
# </details>
#
# Next: [02 · From a Verilog dataset to packed, masked rows](02_data.ipynb)
