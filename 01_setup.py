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
# Choose the machines, create them with a limit on what they can cost, and check that the one you
# sit at has what its part of the series needs.
#
# | | |
# |---|---|
# | **Needs** | any machine with Python 3.11; for the 31B a Google Cloud project with quota for a v5p-8 and a v6e-8 |
# | **Takes** | nothing |
# | **Makes** | `setup.json` |
# | **Costs** | ten seconds here; on Google Cloud 16.80 USD/h (v5p-8) and 21.52 USD/h (v6e-8), published on-demand rates of May 2026 |
#
# The outputs shown here are those of the tiny run on two CPU cores. We have run neither these
# commands on Google Cloud nor the 31B on a TPU: a
# [table](https://github.com/OWNER/gemma4-on-tpu/blob/main/CONTRIBUTING.md#what-stands-in-for-what)
# lists the nearest real thing that each path was tested with, and what that leaves unproved.
# Terms are explained where they first appear, and again in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# Three cells that open every notebook: find the repository, install what is missing, and say what
# this machine is.

# %%
# Find the repository. Colab opens a notebook without it, so there we clone it.
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

# %% [markdown]
# ## 1. Settings
# Which machines, where, and for how long at the most. Nothing in this notebook creates anything: it
# prints the commands, checks their syntax, and checks the machine that it runs on. Both zones are
# in one region on purpose, so that one bucket is near both machines.

# %%
import json
import platform
import re
import shlex
import shutil
import textwrap
from dataclasses import asdict, dataclass, replace

import pandas as pd
from IPython.display import display

from helpers import hardware, style
from helpers.machine import published

pd.set_option("display.max_colwidth", None)


@dataclass(frozen=True)
class Settings:
    # ── Machines ──
    train_slice: str = "v5p-8"           # notebooks 01 to 04
    serve_slice: str = "v6e-8"           # notebooks 05 to 07
    vm_size: str = "31b"                 # SIZE on those machines, whatever runs here
    train_zone: str = "us-central1-a"
    serve_zone: str = "us-central1-b"
    spot: bool = True                    # cheaper, and may be taken away at any time
    max_hours: int = 6                   # the machine deletes itself after this long
    bucket: str = "my-gemma4-bucket"     # must be free in all of Google Cloud: choose your own
    # ── What the checks in section 6 ask for ──
    checkpoint_gb: float = 62.5          # google/gemma-4-31B-it, published: arXiv 2605.25645, S2.3
    slices: tuple = ("v5p-8", "v5p-32", "v6e-8")  # what this machine may be; (): needs no TPU


FULL = Settings()
E2B = replace(FULL, train_slice="v6e-1", serve_slice="v6e-1", vm_size="e2b",
              train_zone="us-central1-b", slices=("v6e-1", "v5e-1"),
              checkpoint_gb=10.2)  # 5.1 B parameters with both towers, bfloat16
TINY = replace(FULL, checkpoint_gb=0.01, slices=())  # a CPU; 03 simulates four devices on it
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# ## 2. The machines
# The published recipe that this series re-does (h2loop, arXiv 2605.25645, May 2026) trained on a
# v5p-8, served on a v6e-8, and compared both with two H100 GPUs; the table puts the three side by
# side. A *chip* is what you pay for; a *slice* is the set of chips that one virtual machine (VM),
# the *host*, drives. *Peak* is arithmetic in bfloat16 (bf16), the 16-bit format that training and
# serving compute in; a PFLOP/s is 10¹⁵ operations per second. *HBM* is the memory on the chip, the
# *link* joins chips (ICI, inter-chip interconnect, on TPU; NVLink on GPU). The numbers come from
# the vendors' sheets in `data/published/`, the prices from the recipe.

# %%
spec = published("spec_sheet_reference", "item")
MORE = {  # not in the CSV: docs.cloud.google.com/tpu/docs/v6e, and NVIDIA's H100 SXM data sheet
    "v6e_host_ram_gb": 1440.0, "nvlink_gb_per_s": 900.0}  # RAM of a ct6e-standard-8t


def machine_row(kind, chips, host_ram, link):
    """One machine of the table from its chip's sheet; totals over its chips."""
    one = helpers.chip(kind)
    peak, bandwidth = chips * one.flops / 1e15, chips * one.bandwidth / 1e12
    price = chips * one.dollars_per_hour
    return {"chips": chips, "peak bf16, PFLOP/s": peak, "HBM, GB": chips * one.hbm / 1e9,
            "HBM bandwidth, TB/s": bandwidth, "link per chip, both ways, GB/s": link,
            "host RAM, GB": host_ram, "USD/h (published)": price,
            "USD per PFLOP/s-h": price / peak, "USD per TB/s-h": price / bandwidth}


machines = pd.DataFrame({
    "v5p-8": machine_row("v5p", 4, spec["v5p_host_ram_4chip"], spec["v5p_ici_bidir"]),
    "v6e-8": machine_row("v6e", 8, MORE["v6e_host_ram_gb"], spec["v6e_ici_bidir"]),
    "2 × H100": machine_row("h100", 2, published("hardware_training", "spec", "gpu")["host_ram"],
                            MORE["nvlink_gb_per_s"])})
display(machines.map("{:,.4g}".format))

# %% [markdown]
# What this means: a v6e-8 has 3.7 times the arithmetic and twice the memory bandwidth of two H100s
# at nearly their price, and a v5p-8 has 0.93 times their arithmetic for 0.76 times their price. The
# last two rows are the price of arithmetic and of bandwidth on paper, at the peaks. Software
# decides how much of either a program gets.
#
# One name misleads: the 8 in `v5p-8` counts TensorCores, two per chip. JAX treats the two as one
# device, so it sees 4. The 8 in `v6e-8` counts chips, so JAX sees 8. Check the count before you
# lay out a mesh, the grid of devices that 03 explains.
#
# ### Where the published numbers differ
# Five statements of the recipe's hardware section, each set against the vendor's sheet, against
# what XLA's allocator reports (the HBM), or against the recipe itself. Three do not hold.

# %%
def words(frame):
    """A table of words: left-aligned, without row numbers."""
    left = [{"selector": name, "props": "text-align: left"} for name in ("th", "td")]
    return frame.style.hide(axis="index").set_table_styles(left)


train = published("hardware_training", "spec", "tpu")
mesh = published("mesh_validity", "item", "tp8")
claims = pd.DataFrame([
    ("v5p-8 host RAM, GB", train["host_ram"], spec["v5p_host_ram_4chip"],
     "355 GB is half the RAM of another machine, a v6e-4: its /dev/shm"),
    ("v5p interconnect per chip, GB/s", train["interconnect_bandwidth_claimed"],
     spec["v5p_ici_bidir"], "called significantly faster than NVLink, with the same number, 900"),
    ("v5p HBM per chip, GB", train["hbm_per_chip"], round(helpers.chip("v5p").hbm / 1e9, 1),
     "95.74 GiB in both; the sheet rounds to 95"),
    ("v5p HBM bandwidth per chip, GB/s", 1e3 * train["hbm_bandwidth_per_chip"],
     spec["v5p_hbm_bw"], "the same"),
    ("tensor parallel 8 for this model", mesh["global_kv_heads_full"],
     mesh["serving_tp_v6e8"], "serving runs at 8: vLLM replicates the 4 global KV heads"),
], columns=["what", "published", "set against", "remark"])
agree = claims["published"] == claims["set against"]
claims.insert(3, "agrees", agree.map({True: "yes", False: "no"}))
claims = claims.map(lambda value: f"{value:,.5g}" if isinstance(value, float) else value)
display(words(claims))

# %% [markdown]
# What this means: plan with 448 GB of host RAM. *Tensor parallelism* of 8 cuts every matrix into
# eight parts, attention by whole heads. That is awkward here, not impossible: ten of the 60 layers
# (the full-attention ones) have only 4 heads of keys and values (KV), so Tunix, the training
# library, cannot split them eight ways and 03 uses 4 chips, while vLLM, the server, stores each
# head twice.
#
# ### 62.5 GB have to fit somewhere
# The 31B checkpoint is downloaded before it is loaded. On the classic TPU VM the boot disk is the
# problem, because 85 of its 97 GB are taken when you arrive (published: arXiv 2605.25645, S2.3, and
# the recipe's notes). `/dev/shm`, a disk in RAM that may take half of it, is the way out. In the
# figure, red is too small.

# %%
places = {
    "boot disk, free": train["boot_disk"] - train["boot_disk_used"],
    "boot disk, whole": train["boot_disk"],
    "/dev/shm (half of host RAM)": spec["v5p_host_ram_4chip"] / 2,
    "HBM of one chip": train["hbm_per_chip"],
    "HBM of four chips": train["hbm_total"],
}
fig, ax = style.figure(height=2.8)
colors = [style.RED if size < train["model_download"] else style.BLUE for size in places.values()]
ax.barh(list(places), list(places.values()), color=colors, height=0.6)
ax.axvline(train["model_download"], color=style.BLACK, linewidth=1.2)
ax.text(train["model_download"] + 4, -0.85, "the 31B checkpoint, 62.5 GB", fontsize=9)
for row, size in enumerate(places.values()):
    ax.text(size + 4, row, f"{size:.0f}", va="center", fontsize=9)
ax.set(xlabel="GB", title="Where the checkpoint fits on a v5p-8", ylim=(4.6, -1.3),
       xlim=(0, 450))
ax.grid(axis="y", visible=False)
style.finish(fig, "01_space", "published (arXiv 2605.25645, S2) and v5p data sheet")

# %% [markdown]
# What this means: set `TMPDIR=/dev/shm` before you start Python, or create the VM with a larger
# boot disk, which the current way of creating one allows. On a v6e-8 there is more room: 1,440 GB
# of RAM, half of it for `/dev/shm`. One chip's HBM would hold the weights; 03 spreads them over
# four, for speed and for the room that training takes.
#
# ## 3. Create the virtual machine
# You need a Google Cloud project with billing, `gcloud` on your laptop, and quota for the slice
# (*IAM & Admin, Quotas*; *spot*, spare capacity that may be taken back at any time, has a quota of
# its own). The names below are those of Google's documentation as read in 2026. Zones move: the
# last command in section 5 asks what is there today.

# %%
SLICES = pd.DataFrame({  # docs.cloud.google.com/tpu/docs: regions-zones, runtimes, v5p, v6e
    "v5p-8": ("ct5p-hightpu-4t", "v2-alpha-tpuv5", "us-central1-a, us-east5-a"),
    "v6e-8": ("ct6e-standard-8t", "v2-alpha-tpuv6e", "us-central1-b, us-east5-a, us-east1-d"),
    "v6e-1": ("ct6e-standard-1t", "v2-alpha-tpuv6e", "us-central1-b, us-east5-a, us-east1-d"),
}, index=["machine type", "classic runtime", "zones, 2026"])


def shell(command):
    """A command as one would type it: quoted where needed, one option per line."""
    words = [shlex.quote(word) for word in command]
    return " ".join(f"\\\n    {word}" if word.startswith(("--", "'--")) and len(word) > 2 else word
                    for word in words)


display(SLICES)

# %% [markdown]
# **The current way** is the Compute Engine API: a TPU is a machine type, like any other. Two
# options matter for your money: `--max-run-duration` deletes the machine after that long whatever
# happens, and `--provisioning-model=SPOT` takes spare capacity at a lower price. The cloud-platform
# scope lets the VM read and write your bucket.

# %%
def create_command(name, slice_name, zone, hours, spot):
    """`gcloud` command for a TPU VM by the Compute Engine API, deleted after `hours`."""
    return ["gcloud", "compute", "instances", "create", name, f"--zone={zone}",
            f"--machine-type={SLICES[slice_name]['machine type']}",
            "--image-project=ubuntu-os-accelerator-images",
            "--image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
            "--maintenance-policy=TERMINATE", "--scopes=cloud-platform", "--boot-disk-size=300GB",
            f"--provisioning-model={'SPOT' if spot else 'STANDARD'}",
            f"--max-run-duration={hours}h", "--instance-termination-action=DELETE"]


for name, slice_name, zone in (("gemma4-train", cfg.train_slice, cfg.train_zone),
                               ("gemma4-serve", cfg.serve_slice, cfg.serve_zone)):
    print(shell(create_command(name, slice_name, zone, cfg.max_hours, cfg.spot)))

# %% [markdown]
# What this means: two machines, used one after the other, each of which ends by itself. If spot has
# no capacity, `--provisioning-model=FLEX_START` with `--request-valid-for-duration=2h` waits in
# line for it (up to seven days of run time; fewer zones have it).
#
# **The classic way** is the Cloud TPU API, which most guides on the web still show. Google says it
# is no longer under active development. It wants an *accelerator type* and a *runtime version* that
# must fit each other: with the wrong one the chips do not appear. As written below it has no guard
# on run time (only its flex-start requests, in `gcloud alpha`, take `--max-run-duration`), and a
# boot disk of 97 GB that cannot be enlarged. The last form waits in a queue.

# %%
def classic_command(name, slice_name, zone, spot, queued=False):
    """`gcloud` command for the same slice by the Cloud TPU API, at once or through a queue."""
    kind = slice_name.split("-")[0]  # all slices of a kind have the same runtime
    runtime = next(SLICES[name]["classic runtime"] for name in SLICES if name.startswith(kind))
    if queued:
        words = ["queued-resources", "create", f"{name}-request", f"--node-id={name}",
                 f"--runtime-version={runtime}"]
    else:
        words = ["tpu-vm", "create", name, f"--version={runtime}"]
    return ["gcloud", "compute", "tpus", *words, f"--zone={zone}",
            f"--accelerator-type={slice_name}", *(["--spot"] if spot else [])]


print(shell(classic_command("gemma4-train", cfg.train_slice, cfg.train_zone, cfg.spot)))
print(shell(classic_command("gemma4-serve", cfg.serve_slice, cfg.serve_zone, cfg.spot)))
print(shell(classic_command("gemma4-train", cfg.train_slice, cfg.train_zone, cfg.spot,
                            queued=True)))

# %% [markdown]
# ## 4. A bucket near the machine, and what runs on it
# A spot machine takes its disk with it when it goes, so checkpoints live in a bucket, and so does a
# copy of the base model that you do not want to download twice. Put the bucket into the region of
# the machines: reading 62.5 GB across an ocean costs time and egress charges. The published runs
# trained in us-central1 and served in asia-northeast1.

# %%
def bucket_commands(bucket, zone):
    """Make the bucket in the zone's region, and see where an existing one is."""
    region = zone.rsplit("-", 1)[0]
    return [["gcloud", "storage", "buckets", "create", f"gs://{bucket}", f"--location={region}",
             "--uniform-bucket-level-access"],
            ["gcloud", "storage", "buckets", "describe", f"gs://{bucket}",
             "--format=value(location)"]]


def connect_command(name, zone, classic=False):
    """Open a shell on the VM, with notebook port 8888 forwarded to this laptop."""
    words = ["compute", "tpus", "tpu-vm", "ssh"] if classic else ["compute", "ssh"]
    return ["gcloud", *words, name, f"--zone={zone}", "--", "-L", "8888:localhost:8888"]


for command in bucket_commands(cfg.bucket, cfg.train_zone):
    print(shell(command))
print(shell(connect_command("gemma4-train", cfg.train_zone)))
print(shell(connect_command("gemma4-train", cfg.train_zone, classic=True)))

# %% [markdown]
# Then, on the machine: the image is Ubuntu 22.04 with Python 3.10 and Tunix needs 3.11, so that
# comes first, from deadsnakes, Ubuntu's usual archive of other Pythons. `setup.sh` then makes the
# environment: it sees the chips and installs `requirements/tpu.txt`, JAX for TPU with its libtpu
# (the TPU's driver and compiler) pinned, and Icarus Verilog. The script names its `SIZE`, so that
# nothing has to be guessed, and runs this notebook first, which stops it if a check of section 6
# fails. Checkpoints and compiled programs go straight into the bucket, the rest of the run is copied
# there every five minutes and fetched at the start, so the same script resumes on a new VM: a spot
# machine has thirty seconds between the warning and the end, and nothing that is cut off then comes
# back as if it were whole. An empty bucket is a new run, a bucket that refuses us stops the script.
# Save it there as `vm.sh` and run `bash vm.sh`.
# (The serving VM needs Docker instead of JAX and the same fetch: 05, section 5.)

# %%
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


def vm_script(repository, bucket, size, first, last):
    """The shell commands for a fresh TPU VM: Python, the repository, this series' notebooks."""
    return f"""set -euo pipefail
sudo add-apt-repository -y ppa:deadsnakes/ppa
sudo apt-get update -q
sudo apt-get install -y -q python3.11 python3.11-venv python3.11-dev git iverilog
git clone {shlex.quote(repository)} gemma4-on-tpu
cd gemma4-on-tpu
export SIZE={size}
export TMPDIR=/dev/shm HF_HOME=/dev/shm/huggingface RUN_DIR=/dev/shm/run  # not the boot disk
export CHECKPOINTS=gs://{bucket}/checkpoints JAX_COMPILATION_CACHE_DIR=gs://{bucket}/jax_cache
sudo sh -c 'echo always > {HUGE_PAGES}'  # the TPU starts faster
./setup.sh train                 # .venv with requirements/tpu.txt, since there are chips here
.venv/bin/python 01_setup.py     # the checks; stops here if one fails
.venv/bin/python -m helpers.remote pull gs://{bucket}/run $RUN_DIR  # of an earlier machine, if any
nohup .venv/bin/python -m helpers.remote push $RUN_DIR gs://{bucket}/run --every 300 \\
    > sync.log 2>&1 &            # every five minutes: a spot machine may go at any time
nohup ./run_all.sh {first} {last} > run.log 2>&1 &   # goes on when the connection drops
tail -f run.log                  # Ctrl-C stops the watching, not the run
"""


script = vm_script(REPOSITORY_URL, cfg.bucket, cfg.vm_size, "01", "04")
print(script)

# %% [markdown]
# ### More than one host
# A v5p-8 is one VM with four chips. A v5p-32 is four such VMs, and each of them looks like a v5p-8
# until one asks the metadata server. A program has to start on all of them at once, because JAX
# waits until every host has joined. The classic API makes the VMs together, copies the script to
# all and starts it on all: `--worker=all`.

# %%
def all_hosts_commands(name, slice_name, zone, spot):
    """Make a slice of several hosts, hand `vm.sh` to each of them and start it on all at once."""
    words = ["gcloud", "compute", "tpus", "tpu-vm"]
    everywhere = [f"--zone={zone}", "--worker=all"]
    return [classic_command(name, slice_name, zone, spot),
            [*words, "scp", "vm.sh", f"{name}:", *everywhere],
            [*words, "ssh", name, *everywhere, "--command=bash vm.sh"]]


for command in all_hosts_commands("gemma4-large", "v5p-32", cfg.train_zone, cfg.spot):
    print(shell(command))

# %% [markdown]
# We cannot run `gcloud` here, but we can make sure that every command, as printed, is valid shell
# and arrives word for word: `bash -n` parses without executing, and `shlex` splits as a shell does.
# Neither knows whether an option exists. The list `teardown` is for section 5.

# %%
def parses(text):
    """True if bash accepts the text; nothing is executed."""
    run = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    return run.returncode == 0


tpus, zones = ["gcloud", "compute", "tpus"], dict.fromkeys((cfg.train_zone, cfg.serve_zone))
teardown = [
    ["gcloud", "compute", "instances", "list", "--filter=machineType~ct[56]"],
    *([*tpus, what, "list", f"--zone={zone}"] for what in ("tpu-vm", "queued-resources")
      for zone in zones),
    ["gcloud", "compute", "disks", "list"],
    ["gcloud", "compute", "instances", "delete", "gemma4-train", f"--zone={cfg.train_zone}"],
    [*tpus, "tpu-vm", "delete", "gemma4-train", f"--zone={cfg.train_zone}"],
    ["gcloud", "storage", "du", "--summarize", f"gs://{cfg.bucket}"],
    ["gcloud", "compute", "machine-types", "list", "--filter=name=ct5p-hightpu-4t",
     "--format=value(zone)"]]
offers = [(name, zone, spot) for name in SLICES
          for zone in SLICES[name]["zones, 2026"].split(", ") for spot in (True, False)]
every = [*(create_command("a", name, zone, cfg.max_hours, spot) for name, zone, spot in offers),
         *(classic_command("a", *offer, queued) for offer in offers for queued in (True, False)),
         *bucket_commands(cfg.bucket, cfg.train_zone), *teardown,
         *all_hosts_commands("a", "v5p-32", cfg.train_zone, cfg.spot),
         *(connect_command("a", cfg.train_zone, classic) for classic in (True, False))]
for command in every:
    assert parses(shell(command)) and shlex.split(shell(command).replace("\\\n", "")) == command
assert parses(script) and not parses("echo 'not closed")
print(f"{len(every)} commands and one script parse")

# %% [markdown]
# ## 5. What it may cost, and how to stop it
# A forgotten v6e-8 costs 516 dollars a day (24 × 21.52, the published rate). Three habits prevent
# it: the run-time guard above, listing what runs before you close the laptop, and deleting what you
# listed. Spot and flex-start are cheaper than these on-demand rates; the prices are inputs, taken
# from the recipe (May 2026), so put your own beside them.

# %%
def worst_case(slice_name, hours):
    """Dollars if a slice runs until its guard ends it, at the published on-demand rate."""
    kind, count = slice_name.split("-")
    chips = int(count) // 2 if kind == "v5p" else int(count)
    return chips * helpers.chip(kind).dollars_per_hour * hours


budget = pd.DataFrame([
    {"VM": name, "slice": name_of, "USD/h": worst_case(name_of, 1),
     f"USD at most, guard of {cfg.max_hours} h": worst_case(name_of, cfg.max_hours),
     "USD if forgotten for a week": worst_case(name_of, 7 * 24)}
    for name, name_of in (("gemma4-train", cfg.train_slice), ("gemma4-serve", cfg.serve_slice))])
display(budget.style.hide(axis="index").format(precision=2, thousands=","))
for command in teardown:
    print(shell(command))

# %% [markdown]
# What this means: the guard turns a four-figure mistake into a three-figure one, with a bucket left
# to pay for. The `list` commands show what is running or stored (the classic API is asked zone by
# zone), the two `delete` commands end a VM made the current or the classic way, then come the size
# of the bucket and the zones that offer a machine today.
#
# ### What one training run takes
# The steps are not even half of it: a run also downloads, loads, compiles, validates and saves. No
# TPU was at hand to time these parts, so each says where its number comes from.

# %%
GB_PER_S = 0.2                          # assumed: of the hub, the disk and the bucket alike
steps, step_s = 10_000 * 922 / 7_782, 1.37  # tokens of the data by tokens of a step; predicted
rounds = steps // 100 + 1               # 03 validates 64 rows and saves every 100 steps
saved_gb = 472.5e6 * 3 * 4 / 1e9        # adapters and Adam's two moments, in float32
parts = pd.DataFrame([
    ("download the base", FULL.checkpoint_gb / GB_PER_S / 60, "assumed: 0.2 GB/s"),
    ("load it onto the chips", FULL.checkpoint_gb / GB_PER_S / 60, "assumed: 0.2 GB/s"),
    ("compile", 3 * 5, "three programs; published: 3 to 8 minutes for one"),
    ("optimizer steps", steps * step_s / 60, "predicted from the compiled program (08)"),
    ("validate", rounds * 64 / 2 * step_s / 3 / 60, "a forward pass taken as a third of a step"),
    ("save", rounds * saved_gb / GB_PER_S / 60, "assumed: 0.2 GB/s, nothing overlaps"),
], columns=["part", "minutes", "where from"])
hours = parts.minutes.sum() / 60
display(words(parts.round({"minutes": 1})).format(precision=1))
print(f"31B, 10,000 examples on a v5p-8: {hours:.1f} h, {worst_case('v5p-8', hours):.0f} USD")

# %% [markdown]
# What this means: plan about an hour for the training machine. The published run took 3.34 hours
# and 56 dollars, loading and compiling included. To replace assumptions by your slice's own
# numbers before the long run, start `./first_hour.sh` there: load, compile, thirty steps and a
# trace (on the v6e-8 also a server and one point of load), at most an hour, and a report at the end
# that others can use, too.
#
# ### A Hugging Face token, only if needed
# Gemma 4 is under Apache-2.0 and, as far as we know, downloads without a login. If the hub answers
# 401 or 403 all the same, accept the terms on the model's page and set `HF_TOKEN` in the
# environment; the libraries look there by themselves. Do not write a token into a notebook.

# %%
print("HF_TOKEN is", "set" if os.environ.get("HF_TOKEN") else "not set, and not needed at this size"
      if cfg.checkpoint_gb < 1 else "not set (fine unless the hub answers 401 or 403)")

# %% [markdown]
# ## 6. Checks that fail early
# These things stop a run after an hour and could have stopped it now: the wrong Python, no room for
# the checkpoint, the wrong slice, chips that JAX does not see or another process holds, a TPU that
# starts slowly, no Verilog simulator (Icarus, which judges in 07). Each check returns whether it is
# fine and one line that says what to do if it is not.

# %%
def check_python(version):
    """Tunix needs 3.11; Colab's 3.12 works too."""
    name = ".".join(str(part) for part in version[:3])
    fine = (3, 11) <= tuple(version[:2]) <= (3, 12)
    return fine, f"Python {name}" if fine else (
        f"Python {name}: 3.11 is needed. Run: sudo add-apt-repository -y ppa:deadsnakes/ppa && "
        "sudo apt-get install -y python3.11 python3.11-venv")


def check_space(folder, free_gb, need_gb):
    """The checkpoint is staged in TMPDIR before it is loaded."""
    fine = free_gb >= need_gb
    return fine, f"{free_gb:.0f} GB free for {need_gb:g} GB" if fine else (
        f"{folder} has {free_gb:.0f} GB free and the checkpoint needs {need_gb:g} GB. Start again "
        "with TMPDIR=/dev/shm, or make the VM with a larger boot disk")


def check_slice(found, slices):
    """The machine is one of the slices that this size is for, and its chips are free."""
    if not slices:
        return True, f"{found}; none is needed"
    fine = found.slice in slices and not found.trouble
    return fine, f"{found}" if fine else (
        f"{found}: {found.trouble or 'a ' + ' or '.join(slices) + ' is needed'}")


def check_devices(count, kind, chips):
    """JAX must see every TPU chip of this machine; without one, a CPU will do."""
    fine = count == chips and kind.startswith("TPU") if chips else count > 0
    seen = f"{count} x {kind}"
    return fine, seen if fine else (
        f"JAX sees {seen}, not the {chips} chips of this machine. Run ./setup.sh train, which "
        "installs JAX for TPU where there are chips")


def check_huge_pages(setting, chips):
    """A TPU starts and stops much faster with transparent huge pages (JAX warns without)."""
    fine = not chips or setting == "always"
    return fine, setting or "unknown" if fine else (
        f"transparent huge pages are {setting or 'unknown'}, which makes a TPU start slowly. "
        f"Run: sudo sh -c 'echo always > {HUGE_PAGES}'")


def check_icarus(first_line):
    """Icarus 11 and 12 judge the answers; verilog-eval's benches do not support 13."""
    found = re.search(r"version (\d+)", first_line)
    fine = found is not None and int(found.group(1)) in (11, 12)
    return fine, first_line.split(" (")[0] if fine else (
        f"Icarus Verilog 11 or 12 is needed, found: {first_line or 'none'}. "
        "Run: sudo apt-get install -y iverilog")


# %% [markdown]
# A check that cannot fail checks nothing, so we first show each of them something wrong. These are
# the messages you would see.

# %%
for fine, message in (check_python((3, 10, 12)), check_space("/tmp", 12, 62.5),
                      check_slice(hardware.Hardware("tpu", "v5e", 8), ("v5p-8", "v6e-8")),
                      check_devices(1, "cpu", 4), check_huge_pages("madvise", 4),
                      check_icarus("")):
    assert not fine
    print(textwrap.fill(f"✗ {message}", 100, subsequent_indent="  "))

# %% [markdown]
# Now this machine. `helpers/hardware.py` looks for chips without starting anything: it reads their
# PCI ids and device files, and asks the metadata server how many hosts the slice has. `setup.sh`
# and the size follow it. Whether JAX sees the same is another question, and asking it starts JAX.
# On a TPU only one process at a time may hold the chips, so a child process counts and lets go.

# %%
def count_devices():
    """Devices that JAX sees, and their kind, asked in a child process that then ends."""
    code = ("import json, jax; d = jax.local_devices(); "
            "print(json.dumps([len(d), d[0].device_kind, jax.__version__]))")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else [0, "none", "none"]


tmpdir = os.environ.get("TMPDIR", "/tmp")
free_gb = shutil.disk_usage(tmpdir).free / 1e9
machine = hardware.here()
chips = machine.chips if machine.accelerator == "tpu" else 0
devices, device_kind, jax_version = count_devices()
iverilog = shutil.which("iverilog")
icarus = subprocess.run([iverilog, "-V"], capture_output=True, text=True).stdout if iverilog else ""
icarus = icarus.partition("\n")[0]
checks = {"Python": check_python(sys.version_info),
          "room in TMPDIR": check_space(tmpdir, free_gb, cfg.checkpoint_gb),
          "accelerator": check_slice(machine, cfg.slices),
          "JAX": check_devices(devices, device_kind, chips),
          "huge pages": check_huge_pages(hardware.huge_pages(), chips),
          "Icarus Verilog": check_icarus(icarus)}
found = pd.DataFrame([(name, "✓" if fine else "✗", text) for name, (fine, text) in checks.items()],
                     columns=["check", "fine", "found"])
display(words(found))

# %% [markdown]
# What this means: with a tick in every row the machine can run its part of the series. Huge pages
# only cost time, and in a container you may not be able to change them. The version of Icarus
# matters for scores: with 11, 153 of the 156 reference solutions of verilog-eval, the benchmark of
# 07, show no mismatch, and 07 prints the ceiling that follows beside every score.
#
# ## 7. Write it down
# `setup.json` says on what this run was made. Then, and only then, we stop if something is wrong:
# the file is there to send to whoever helps you.

# %%
helpers.write_json(helpers.run_dir("setup.json"), {
    "size": helpers.size(), "settings": asdict(cfg), "python": platform.python_version(),
    "machine": asdict(machine) | {"slice": machine.slice},
    "jax": jax_version, "devices": devices, "device_kind": device_kind, "icarus": icarus,
    "cores": os.cpu_count(), "tmpdir_free_gb": round(free_gb, 1),
    "checks": {name: {"fine": fine, "text": text} for name, (fine, text) in checks.items()}})
wrong = [text for name, (fine, text) in checks.items() if not fine and name != "huge pages"]
if wrong:
    raise helpers.UserError("this machine is not ready.\n- " + "\n- ".join(wrong))
print(f"ready; wrote {helpers.run_dir('setup.json')}")

# %% [markdown]
# ## Recap
# We know what the machines are, where the published description of them is wrong, how to create one
# that deletes itself, how to reach and prepare it, what it can cost at the worst, and that this
# machine can run the notebooks of its size.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `No module named jax`, or Tunix refuses to install | the image's own Python 3.10 | Python 3.11 from deadsnakes, then `./setup.sh train` |
# | `No space left on device` while the model loads, sometimes in the middle of another traceback | the checkpoint is staged on the boot disk | `export TMPDIR=/dev/shm`, remove what is left under `/tmp/models` |
# | `TPU is already in use` | an earlier Python still holds the chips, perhaps another notebook's kernel | shut that kernel down; `sudo lsof /dev/accel* /dev/vfio/*` names the process |
# | JAX sees a CPU, or 0 devices | JAX without libtpu, or a runtime version of another generation | `./setup.sh train` on the VM itself; compare with the table in section 3 |
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
# 2. `worst_case("v5p-8", 2)`: 33.60 dollars at the published rate. A shorter `--max-run-duration`
#    lowers it; so does letting the VM delete itself when the run ends, well or badly:
#    `./run_all.sh 01 04; gcloud compute instances delete "$(hostname)" --zone=... --quiet`. Copy to
#    the bucket first.
#
# </details>
#
# Next: [02 · From a Verilog dataset to packed, masked rows](02_data.ipynb)
