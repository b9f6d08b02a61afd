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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/03_train.ipynb)
#
# # 03 · LoRA on Gemma 4: every matrix, every token, every bit
#
# We fine-tune Gemma 4 with low-rank adapters on the packed rows of notebook 02, sharded over four
# devices, and leave checkpoints from which a killed run continues as if nothing had happened.
#
# | | |
# |---|---|
# | **Needs** | 31b: a v5p-8 (4 chips, 95 GiB each). e2b: one v6e or v5e chip. tiny: any laptop, 4 simulated devices |
# | **Takes** | `data/` from notebook 02; the base model's safetensors (local, Hugging Face hub or `gs://`) |
# | **Makes** | `train/checkpoints/<step>/` (Orbax), `train/log.jsonl`, `train/recipe.json`, TensorBoard events, figures |
# | **Costs** | tiny: about two minutes on two CPU cores (129 s measured). 31b: published 3.34 h and 56 USD; ours about an hour, of which the steps are less than half (its parts, and where each number comes from: 01, section 5). e2b: steps of no less than 0.15 h on a v6e and 0.31 h on a v5e (roofline, 08), and the rest below |
#
# The outputs shown are those of the tiny run on two CPU cores. `HF_TOKEN` is read from the
# environment if the hub asks for a licence.
#
# **E2B on a Colab chip.** Choose a v5e-1 or v6e-1 runtime, open this page, Run All. What the first
# hour then looks like, with the times that are known:
#
# | step | time | where from |
# |---|---|---|
# | the opening installs the packages | 3 to 5 minutes | measured here, for the CPU build |
# | section 1 stops: the data is missing; run the cell that its message offers (`helpers.catch_up`), then the rest | 02 renders and packs 10,000 examples | not measured at this size |
# | section 1 fetches 10.2 GB | 1 minute | assumed: 0.2 GB/s |
# | section 9 compiles the step | 3 to 8 minutes | published, for the 31B; E2B has 35 layers of its 60 |
# | section 10 trains | no less than 9 minutes (v6e), 19 (v5e) | roofline, 08 |
#
# A cell of section 10 that Colab cut off goes on from its newest checkpoint if `RUN_DIR` is on a
# disk that stays, such as a mounted Drive. On a real slice, `./first_hour.sh` measures all this for
# thirty steps, ends by itself within an hour, and prints a report beside the predictions.

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
helpers.machine(devices=4)

# %% [markdown]
# The libraries: JAX and Flax NNX hold the model, Optax is the optimizer, Grain the data pipeline,
# Orbax the checkpoints. Tunix (the model) and Qwix (LoRA) appear where they first matter. What
# trains, from the batch to the loop, is in `helpers/train.py`, so that notebook 08 compiles and the
# tests examine the same functions; each is printed here where it is explained.

# %%
import html
import shutil
import time
from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import pandas as pd
from etils import epath
from flax import nnx
from IPython.display import HTML, display

from helpers import architecture, chat, gemma, hardware, quantized, remote, style, train, weights
from helpers.data import check_data
from helpers.machine import published

# %% [markdown]
# ## 1. Settings
# Rank, alpha, peak learning rate, warm-up, weight decay and the checkpoint interval of the full
# size are those of the published recipe (h2loop, arXiv 2605.25645). What we change on purpose:
# packed rows, no dropout (section 5), clipping, a bfloat16 model with float32 adapters.
#
# `remat` (rematerialisation) says what the backward pass computes again instead of keeping it from
# the forward pass: nothing (`NONE`), the inside of attention and MLP (`BLOCK`) or of whole layers
# (`DECODER`). E2B takes it from the chip: on a v6e nothing is recomputed (20.2 of 31.25 GiB), on a
# v5e, as Colab has it, whole layers are (13.2 of 15.75 GiB; both compiled in 08, for rows of 2,048
# tokens). Section 9 asks the compiler again for the data at hand.

# %%
@dataclass(frozen=True)
class Settings:
    # ── LoRA ──
    rank: int = 64
    alpha: float = 64.0                # the adapter counts alpha / rank times
    targets: str = gemma.TARGETS       # published: without k_einsum
    partial: bool = False              # True: some matrices are left out on purpose
    base_dtype: str = os.environ.get("BASE_DTYPE", "bfloat16")  # of the frozen base; int8, nf4: 11
    tile_size: int = int(os.environ.get("TILE_SIZE", "0"))      # its input weights per scale
    int8_products: bool = False        # multiply in int8, too (11)
    a_init: str = "he"                 # A's first values; "peft" is PEFT's scale (see below)
    # ── Optimizer ──
    learning_rate: float = 1e-4        # at its peak
    warmup_steps: int = 100
    weight_decay: float = 0.001
    max_grad_norm: float = 1.0         # published: no clipping
    # ── One optimizer step ──
    rows_per_step: int = 2             # packed rows of 4,096 tokens, about 8.4 examples
    rows_per_device: int = 2           # of a micro-batch, on each part of the fsdp axis
    epochs: float = 1.0
    max_steps: int = int(os.environ.get("MAX_STEPS", "0"))  # 0: all; else the schedule is shorter
    dtype: str = "bfloat16"            # of the arithmetic; adapters are float32
    remat: str = "NONE"                # or BLOCK, DECODER
    attention_block: int = 1_024       # queries at a time (section 4)
    # ── Watching and saving ──
    log_every: int = 10
    validate_every: int = 100
    validation_rows: int = 64
    checkpoint_every: int = 100
    checkpoints: str = os.environ.get("CHECKPOINTS", "")  # gs://...; empty: below RUN_DIR
    answer_tokens: int = 512           # of the answers shown before and after
    fresh: bool = False                # True throws this run's checkpoints and log away
    seed: int = 42


FULL = Settings(remat=hardware.remat_here("31b"))
E2B = replace(FULL, rows_per_step=4, rows_per_device=1, remat=hardware.remat_here("e2b"))
TINY = replace(FULL, rank=16, alpha=32.0, learning_rate=5e-3, warmup_steps=10, rows_per_step=4,
               rows_per_device=2, epochs=0.25, attention_block=128, log_every=10,
               validate_every=20, validation_rows=8, checkpoint_every=20, answer_tokens=160)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# ### What the published run used
# Every value in the middle column is from the paper or from its code, read from
# `data/published/hyperparameters.csv`; *effective* is what the code computes in by the defaults of
# the libraries it calls. `ours` is this run; at size 31b the first six rows agree.
#
# Mind the scale when you carry a learning rate over from PyTorch. Qwix, here and in the published
# run, draws A uniformly within sqrt(6 / inputs) (Kaiming He); PEFT calls the same function with
# a = sqrt(5), which gives 1 / sqrt(inputs), 2.45 times less. B's gradient is proportional to A, and
# so is what a step of B changes: at equal rates PEFT's first steps are smaller. `a_init="peft"`
# draws A at PEFT's scale.

# %%
theirs = published("hyperparameters", "name", "tpu")
rows = {"lora_rank": cfg.rank, "lora_alpha": cfg.alpha, "learning_rate_peak": cfg.learning_rate,
        "warmup_steps": cfg.warmup_steps, "weight_decay": cfg.weight_decay,
        "save_steps": cfg.checkpoint_every, "max_grad_norm": cfg.max_grad_norm,
        "lora_dropout": 0.0, "compute_dtype_effective": cfg.dtype,
        "lora_dtype_effective": "float32", "save_total_limit": 3}
table = pd.DataFrame({"published": {name: theirs[name] for name in rows}, "ours": rows})
table.map(lambda value: f"{value:g}" if isinstance(value, (int, float)) else value)

# %% [markdown]
# ### What notebook 02 left, and which base it is for
# The base model is not a setting of this notebook: the ids in `data/` belong to one tokenizer and
# one chat template, so the artifact says which model they are for, and we check that it still is
# that one. JAX's compilation cache goes to disk (or to a `gs://` address in
# `JAX_COMPILATION_CACHE_DIR`, which outlives the machine), so that a restart need not compile.
# Checkpoints may live in a bucket, too (`CHECKPOINTS=gs://...`). An address that refuses us is said
# here, before 62 GB are read.

# %%
data = helpers.require(helpers.run_dir("data"), "02_data.py")
meta = helpers.read_json(helpers.require(data / "meta.json", "02_data.py"))
check_data(data, meta)  # every byte is what 02 wrote
with helpers.phase(f"base model {meta['base_path']}"):
    base = remote.stage(meta["base_path"])
tokenizer = chat.load_tokenizer(base)
if chat.template_sha256(tokenizer) != meta["template_sha256"]:
    raise helpers.UserError("The base model's chat template changed. Run 02_data.py again.")
cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(helpers.run_dir("jax_cache").resolve())
jax.config.update("jax_compilation_cache_dir", cache)
for address in (cfg.checkpoints, cache):
    if address.startswith("gs://"):
        remote.check_writable(address)  # now, not when hours of work are to be saved
if jax.process_count() > 1 and not cfg.checkpoints:
    raise helpers.UserError("several hosts write one checkpoint: set CHECKPOINTS to a place that "
                            "all of them reach, such as gs://bucket/run/checkpoints.")
print(f"from 02: {meta['train_rows']:,} rows of {meta['sequence_length']:,} tokens, "
      f"{meta['examples_per_row']:.1f} examples a row, {meta['fill']:.1%} of it real tokens, "
      f"{meta['val_rows']} rows held out, reasoning {meta['reasoning']}")

# %% [markdown]
# ## 2. If you come from PyTorch
#
# | there | here |
# |---|---|
# | TRL `SFTTrainer`, `Trainer` | a loop of our own in `helpers/train.py`, printed in section 10; Tunix has a `PeftTrainer`, with which section 8 compares it |
# | FSDP, tensor parallelism, `accelerate launch` | one *mesh*: names for the axes of the device grid, and for every array which axis splits which dimension |
# | `torch.optim.AdamW` and a scheduler | Optax: a chain of pure functions, gradient in, update out |
# | `DataLoader` with workers | Grain: an index-based pipeline, whose position is one integer that a checkpoint can hold |
# | PEFT's `LoraConfig` | Qwix's `LoraProvider`: a pattern over module paths |
# | `nn.Module` that holds its parameters | a Flax NNX module; `nnx.split` takes it apart into a structure and a *state* (nested dictionaries of arrays), because compiled functions take arrays and return arrays; `nnx.merge` puts it together again |
# | `loss.backward()`, `p.grad` | `jax.value_and_grad(f)`: a function that returns the value of `f` and the gradient for its first argument; `jax.tree.map` applies a function to every array of a state |
# | `model.to("cuda")`, eager by default | `jax.jit`: the whole optimizer step is compiled once, as one program for all devices |
#
# *Eager* code runs operation by operation as Python reaches it. *Compiled* code is traced once
# with placeholders for the arrays; the compiler sees the whole step, fuses it and plans its
# memory. The price: a program is made for fixed shapes, and another shape is another compilation
# (minutes for the 31B). Packed rows of one length are therefore not only efficient, they are what
# keeps it one program. More words are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).
#
# ## 3. Four devices, one mesh
# `fsdp` splits the batch and the weights' storage, `tp` (tensor parallelism) splits attention
# heads and MLP columns. Tensor parallelism gives each device whole heads, so `tp` must divide
# every head count of the model. Gemma 4 31B has 32 query heads and 16 KV heads (of keys and values,
# each shared by several query heads), but only **4** KV heads in its ten *full-attention* layers;
# the other fifty, the *sliding* ones, look back 1,024 tokens. So tp=4 is the most. (A server may go
# on by keeping a copy of each KV head on two chips, as vLLM does; Tunix cuts and never copies.) The
# tiny model has 4 such heads, too, and the same limit. First this run's mesh; then the mesh (2, 8),
# which the published script asks for on 16 chips, although its paper says that tp=8 fails; then
# every choice for the 31B:

# %%
config = gemma.config_from_hf(base, dtype=cfg.dtype)
mesh = gemma.make_mesh(config)
quantized.check_run(
    cfg, config, mesh, cfg.checkpoints or helpers.run_dir("train", "checkpoints"))
fsdp, tp = mesh.devices.shape
print(f"{mesh.size} devices: fsdp={fsdp} x tp={tp}, the largest tp that divides "
      f"{config.num_heads} query heads, {config.num_kv_heads} KV heads and "
      f"{config.num_global_kv_heads or config.num_kv_heads} KV heads of the full-attention layers")


def mesh_table(config, sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256), widths=(1, 2, 4, 8, 16)):
    """Which (fsdp, tp) meshes can hold a model, for every number of devices."""
    def cell(devices, tp):
        fits = devices % tp == 0 and not gemma.mesh_problem(config, devices // tp, tp)
        best = fits and gemma.choose_mesh(config, devices)[1] == tp
        return f"({devices // tp}, {tp})" + " ←" * best if fits else "-"
    table = {f"tp={tp}": [cell(devices, tp) for devices in sizes] for tp in widths}
    return pd.DataFrame(table, index=pd.Index(sizes, name="devices"))


big = gemma.config_from_hf("data/configs/gemma4_31b.json")
try:
    gemma.make_mesh(big, shape=(2, 8), devices=jax.devices()[:1] * 16)
except helpers.UserError as error:
    print(f"31B, refused: {error}")
mesh_table(big)

# %% [markdown]
# The refusal names the head count that forbids the mesh, before 62 GB are read. In the table a dash
# is a mesh that cannot be, and the arrow is what `make_mesh` chooses: (1, 4) on a v5p-8, which is
# 4 chips, (4, 4) on the 16 chips of a v5p-32, (1, 1) on a single chip. This is about divisibility;
# whether the memory suffices is the next section's question.
#
# ### Outgrow one slice
# The same code goes on where four chips end. 08 has compiled a v5p-32, four hosts with 16 chips and
# the mesh (4, 4); a v5p-64 gets (8, 4) and a v5p-128 (16, 4), which nobody has compiled. `tp` stays
# 4, so all growth is in `fsdp`, which must divide the model's width (5,376 for the 31B: any power
# of two up to 256). A step has `rows_per_device` rows for each part of `fsdp`, 8 on a v5p-32 and 16
# on a v5p-64: an epoch has fewer, larger steps, and the learning rate is yours to find again. Every
# host runs this notebook as a script, all at once (01, section 4): `join_hosts` of
# `helpers/machine.py`, called by the opening, connects them, and from then on `jax.devices()` are
# those of the whole slice. Each host reads the whole batch and `to_mesh` keeps its devices' rows: a
# few hundred kilobytes a step, which sets no limit soon; that every host loads the base model does,
# because each downloads its own 62.5 GB. Data and settings must be the same everywhere, and
# `same_on_all_hosts` compares them before the first step. All hosts write one checkpoint together,
# so `CHECKPOINTS` has to be a bucket.

# %% [markdown]
# ## 4. Will it fit? First on paper, then loaded
# We build the model without memory (`nnx.eval_shape` gives shapes, types and shardings, no arrays)
# and add up what each device has to hold. Adapters and Adam's two moments are float32, the base
# bfloat16. The second column is the 31B on a v5p-8, whose 60 layers are ten times the same six;
# nothing is computed, so one device can stand in for its four chips.

# %%
from tunix.models.gemma4.model import RematConfig

config.remat_config = RematConfig[cfg.remat]


device_gib = quantized.gib  # GiB that one device holds of a tree of arrays, real or abstract


def adapt(model, mesh, cfg):
    """A base, quantised or not, with its adapters."""
    return gemma.inject_lora(
        model, cfg.rank, cfg.alpha, mesh, cfg.targets, cfg.seed, cfg.a_init, cfg.partial,
        quantized.provider(cfg.base_dtype, cfg.rank, cfg.alpha, cfg.targets, cfg.tile_size,
                           cfg.int8_products))


def budget_of(model, mesh, cfg, repeats=1):
    """(GiB per device, the model with adapters); its layers count `repeats` times."""
    embedder = device_gib(nnx.state(model.embedder))
    layers = device_gib(nnx.state(model)) - embedder
    model = adapt(model, mesh, cfg)
    adapters = repeats * device_gib(nnx.state(model, nnx.LoRAParam))
    return pd.Series({"base weights": embedder + repeats * layers, "adapters": adapters,
                      "Adam's moments": 2 * adapters, "gradients": adapters}), model


four = jax.sharding.Mesh(np.array(jax.devices()[:1] * 4).reshape(1, 4), ("fsdp", "tp"))
six_layers = gemma.config_from_hf("data/configs/gemma4_31b.json", num_layers=6)
with helpers.phase("shapes of base and adapters, this run's and the 31B's"):
    shapes = quantized.abstract_base(config, mesh, cfg.base_dtype, cfg.tile_size)
    base_parameters = quantized.count(shapes)
    budget, _ = budget_of(shapes, mesh, cfg)
    six = quantized.abstract_base(six_layers, four, FULL.base_dtype, FULL.tile_size)
    budget_31b, six_adapted = budget_of(six, four, FULL, repeats=10)
table = pd.DataFrame({"this run": budget, "31B on a v5p-8": budget_31b})
print(f"{base_parameters:,} parameters in the base of this run")
table.rename_axis("GiB per device").style.format("{:.4g}")

# %% [markdown]
# What 08's compiler says about whole steps, on the slices that a size can meet:

# %%
for name, size in (("v5p-8", "31b"), ("v6e-8", "31b"), ("v6e-1", "e2b"), ("v5e-1", "e2b")):
    print(hardware.what_fits(name, size))

# %% [markdown]
# A v6e-8 is the slice that serves. It trains the 31B as well, but only by computing whole layers
# again in the backward pass (`remat="DECODER"`, which the settings take by themselves there): eight
# chips of 31 GiB hold less than four of 96. If you can choose, train on the v5p-8.
#
# A v5p chip offers 95.7 GiB. The first three lines of the 31B's column are what the compiled step
# takes as arguments: 08 reads 16.65 GiB off the compiler. What the step needs on top of this, the
# activations, is the compiler's business: section 9 asks it.
#
# Now the weights. Tunix reads the Hugging Face files, and the config says `dtype=bfloat16` for the
# arithmetic, too: its default is float32, and casting only the weights (as published) leaves every
# matrix multiplication in float32. A hub or `gs://` source was copied to `TMPDIR` in section 1, its
# size checked first.
#
# A *partition spec* such as `P('tp', 'fsdp')` reads: the first dimension is cut over `tp`,
# the second over `fsdp`, all others stay whole.

# %%
began = time.perf_counter()
with helpers.phase(f"loading {base_parameters / 1e6:,.1f} M parameters"):
    model = quantized.load_base(base, config, mesh, cfg.base_dtype, cfg.tile_size)
    jax.block_until_ready(nnx.state(model))
load_seconds = time.perf_counter() - began
first = model.layers[0]
for name, weight in (("q_einsum", first.attn.q_einsum.w),
                     ("gate_proj", first.mlp.gate_proj.kernel)):
    weight = quantized.stored(weight)
    shape, sharding = weight.shape, weight.sharding
    print(f"{name}: {shape} {weight.dtype}, {sharding.spec}, "
          f"on each device {sharding.shard_shape(shape)}")
print(f"base on one device: {device_gib(nnx.state(model)):.4g} GiB, "
      f"budget {budget['base weights']:.4g} GiB")

# %% [markdown]
# ### The one part of the model that we replace
# Tunix's attention computes all T x T scores of a row of T tokens and then masks most of them away.
# In a row of 4,096 tokens the sliding layers, 50 of the 31B's 60, need at most 1,024 keys per
# query, and no query needs a later key. `attend` takes 1,024 queries at a time and multiplies them
# with the keys that at least one of them may see; the rest is never computed and never stored. The
# blocks have fixed borders, so all this is a plain program of matrix products, without a kernel of
# its own, and the mask inside a block does the rest. Notebook 08 shows what it saves: two rows at
# once fit a v5p-8 only with it.
#
# `use_block_attention` exchanges every layer's attention object for one with the same weights under
# the same names, which calls `attend`. That is a replacement, and we say so: a subclass, set where
# anyone can see it, no library function rewritten while it runs. Section 7 proves that the model
# stays the same function.

# %%
helpers.show_source(gemma.attend, gemma.use_block_attention)
gemma.use_block_attention(model, cfg.attention_block)

# %% [markdown]
# ## 5. LoRA: W + (α/r) · A · B
# Each weight matrix W stays frozen. Beside it we train A, which reads the same input into `rank`
# numbers, and B, which turns these into a correction of the output. Qwix finds the matrices by a
# pattern over Tunix's module paths. Two things are ours: the adapters are float32 (in bfloat16,
# beta2 = 0.999 rounds to 1, so Adam's second moment would never decay), and dropout is 0: Qwix's
# dropout cannot be switched off for validation (published: 0.05).

# %%
helpers.show_source(gemma.Float32Lora, gemma.lora_provider, gemma.lora_a, gemma.lora_b)
before_lora = model
model = adapt(model, mesh, cfg)
modules = gemma.adapted_modules(model)
everything = gemma.expected_modules(config)
print(f"{len(modules)} modules adapted of {len(everything)}",
      f"({len(everything) - len(modules)} left out on purpose)" if cfg.partial else "")
assert cfg.partial or sorted(modules) == sorted(everything)

# %% [markdown]
# `k_einsum` is the lone key projection of the full-attention layers, where Gemma 4 uses K as V,
# too. The published pattern names only `kv_einsum` and silently misses it: 350 of the 31B's 360
# modules. Here a pattern that misses a module is refused, unless `partial=True` says that this is
# meant (attention alone: `targets=".*_einsum", partial=True`); 04 then merges what there is and
# names what it leaves alone. The table is computed from the model: a Hugging Face matrix has shape (out, in), Tunix
# keeps heads as dimensions of their own and stacks K and V into one `kv_einsum`.

# %%
def lora_table(model):
    """One line per kind of adapted matrix: names, shapes, count, trainable parameters."""
    table = {}
    for path, pair in gemma.adapted_modules(model).items():
        kind, a, b = path.rsplit(".", 1)[1], pair["a"].get_value(), pair["b"].get_value()
        line = table.setdefault((kind, a.shape, b.shape), {
            "Tunix": kind, "Hugging Face": " + ".join(architecture.HF_NAMES[kind]), "modules": 0,
            "A": a.shape, "B": b.shape, "A split": a.sharding.spec, "B split": b.sharding.spec,
            "parameters": 0})
        line["modules"] += 1
        line["parameters"] += a.size + b.size
    return pd.DataFrame(table.values()).sort_values(["Tunix", "modules"], ignore_index=True)


table = lora_table(model)
trainable = int(table.parameters.sum())
print(f"{trainable:,} trainable parameters, {trainable / base_parameters:.2%} of the base")
table

# %% [markdown]
# ### One matrix on four chips
# What the partition specs in the columns *split* do is best seen on the 31B itself, whose shapes
# section 4 has made. We take layer 5, the first with full attention, and ask each array for the
# part that one chip holds.

# %%
cut = {}
for name in ("q_einsum", "k_einsum"):
    module = getattr(six_adapted.layers[5].attn, name)
    for part, variable in (("W", module.w), ("A", module.w_lora_a), ("B", module.w_lora_b)):
        array = quantized.stored(variable)
        shard = array.sharding.shard_shape(array.shape)
        cut[name, part] = {"shape": array.shape, "split": array.sharding.spec, "on a chip": shard,
                           "MiB on a chip": np.prod(shard) * array.dtype.itemsize / 2**20}
pd.DataFrame(cut).T

# %%
from matplotlib.patches import FancyBboxPatch, Rectangle


def draw_pair(ax, shapes, left, bottom, unit, thick, colors):
    """W to scale, A at its left, B above it, one colour per chip. Returns where the cuts are."""
    heads, depth, size = shapes["W"]
    start, height = left + 1.4 * thick, unit * depth
    cuts = np.linspace(start, start + unit * heads * size, len(colors) + 1)
    ax.add_patch(Rectangle((left, bottom), thick, height, color="#BDBDBD", lw=0))
    for band, color in enumerate(colors):
        lines = np.linspace(*cuts[band:band + 2], heads // len(colors) + 1)
        for y, tall in ((bottom, height), (bottom + height + 0.4 * thick, thick)):
            ax.add_patch(Rectangle((lines[0], y), lines[-1] - lines[0], tall, color=color, lw=0))
            ax.vlines(lines, y, y + tall, color="white", lw=0.6)
    for y, letter in ((bottom + height / 2, "A"), (bottom + height + 0.9 * thick, "B")):
        ax.text(left + thick / 2, y, letter, ha="center", va="center", fontsize=8)
    return cuts

# %% [markdown]
# Drawn like a multiplication on paper: A stands left of W, B above it, and A times B covers W.
# Widths and heights of W are to scale, the 64 columns of A and rows of B are drawn thicker than
# they are.

# %%
chips, held = style.CYCLE[:4], ["", "", "", ""]
unit = 6 / np.prod(cut["q_einsum", "W"]["shape"][::2])  # inches per column
fig, ax = style.figure(10, 5.8)
ax.set_title("A full-attention layer of Gemma 4 31B on a v5p-8: mesh (fsdp=1, tp=4)")
for name, what, left, inside in (("q_einsum", "query head", 0, 0.12),
                                 ("k_einsum", "KV head", 7.1, 1.6)):
    whole, shard = ({part: cut[name, part][column] for part in "WAB"}
                    for column in ("shape", "on a chip"))
    each = shard["W"][0]  # heads
    assert shard["A"] == whole["A"] and whole["W"][0] == 4 * each == 4 * shard["B"][1]
    cuts = draw_pair(ax, whole, left, 2.55, unit, 0.24, chips)
    ax.text(left, 5.33, f"{name}: {4 * each} {what}s", weight="bold")
    ax.text(left, 5.1, "W {W}, A {A}, B {B}".format(**whole), fontsize=8)
    for chip, color in enumerate(chips):
        heads = f"{chip * each}-{(chip + 1) * each - 1}" if each > 1 else str(chip)
        held[chip] += f"{what}{'s' * (each > 1)} {heads}\n"
        ax.text(cuts[chip:chip + 2].mean(), 3.5, heads, color="white", ha="center",
                bbox={"color": color, "pad": 1})
        draw_pair(ax, shard, 2.5 * chip + inside, 0.12, 0.55 * unit, 0.15, [color])
for chip, color in enumerate(chips):
    ax.add_patch(FancyBboxPatch((2.5 * chip + 0.05, 0.05), 2.15, 2.05, "round,pad=0.05",
                                ec=color, fc="none", lw=1.5))
    ax.text(2.5 * chip + 0.12, 1.93, f"chip {chip}", color=color, weight="bold")
    ax.text(2.5 * chip + 0.9, 1.72, held[chip].strip(), fontsize=8)
ax.text(8.3, 2.7, "grey: A, whole\non every chip.\n\ntp=8 would need\n8 KV heads,\nthere are "
        f"{six_layers.num_global_kv_heads}.", fontsize=8)
ax.set(xlim=(-0.05, 9.8), ylim=(-0.05, 5.6), aspect="equal")
ax.axis("off")
style.finish(fig, "03_mesh", "shapes and partition specs of the 31B, computed above")

# %% [markdown]
# Every chip computes its own heads with its own part of W and B. A is small, and each keeps all of
# it: `P('fsdp',)` cuts nothing where `fsdp` is 1. Within the attention nothing is exchanged.
# Between layers Tunix leaves each chip a quarter of every token's 5,376 numbers, so they are
# gathered before the projections, and after `attn_vec_einsum` the chips' results are summed and
# scattered again: the bytes of one all-reduce.
#
# ### Two proofs before we train
# B is zero and A is finite, so A times B is zero and the adapters have not changed anything yet.
# The logits of the tiny model, in float32 on the CPU at every size, show it, too, up to rounding:
# with and without adapters are two programs, and XLA promises equal bits only within one. (For the
# 31B these would be two more compilations of 60 layers, for what B says already.) Second, each adapter's partition spec must not name more
# dimensions than the adapter has, and must divide them. The published recipe repairs both by
# patching Qwix and Tunix; at these versions there is nothing to repair.

# %%
def logits_of(model, tokens):
    """All logits of a few ids, compiled for the CPU. [B, T, V]"""
    graph, state = nnx.split(model)
    mask = np.tril(np.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    with gemma.use_mesh(cpu):
        return jax.jit(lambda state: nnx.merge(graph, state)(tokens, attention_mask=mask)[0])(state)


for path, pair in modules.items():
    a, b = pair["a"].get_value(), pair["b"].get_value()
    assert jnp.isfinite(a).all() and not b.any(), path
    for array in (a, b):
        assert array.dtype == jnp.float32 and len(array.sharding.spec) <= array.ndim, path
        array.sharding.shard_shape(array.shape)  # raises if an axis does not divide
exact = gemma.config_from_hf("assets/tiny_gemma4", dtype="float32")
cpu = gemma.make_mesh(exact, (1, 1), jax.local_devices(backend="cpu")[:1])
witness = gemma.load_base("assets/tiny_gemma4", exact, cpu)
probe = np.load(data / "val" / "tokens.npy")[:1, :64] % exact.num_embed  # others have more ids
plain, adapted = (np.asarray(logits_of(one, probe))
                  for one in (witness, gemma.inject_lora(witness, 4, 8.0, cpu)))
apart, spread = np.abs(plain - adapted).max(), np.abs(plain).max()
print(f"every A finite, every B zero, both float32 and evenly split; the tiny model's logits up "
      f"to {spread:.1f}, with and without adapters at most {apart:.2g} apart")
assert apart <= 1e-5 * spread, "more than the rounding of float32"

# %% [markdown]
# ## 6. What it says before training
# Three specifications from the validation set, answered greedily (always the likeliest token).
# Since B is zero, this is the base model speaking. The prompt ids come from the function that
# rendered the rows of notebook 02; 05 checks that the server computes the same ones. The tiny base
# has read Verilog but was never taught to answer: expect a fragment.

# %%
def answers(model, samples, limit):
    """Greedy answers of a model to the three held-out specifications, as text."""
    stops = {tokenizer.eos_token_id, chat.special_ids(tokenizer)[chat.TURN_END]}
    thinking = meta["reasoning"] == "kept"
    prompts = [chat.prompt_ids(tokenizer, sample["messages"], thinking) for sample in samples]
    ids = gemma.greedy(model, prompts, limit, stops, mesh)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]


samples = helpers.read_json(data / "samples.json")
with helpers.phase("three answers of the base model"):
    before = answers(model, samples, cfg.answer_tokens)
print(f"asked:\n{samples[0]['messages'][-1]['content'][:600]}\n\nanswered:\n{before[0][:600]}")

# %% [markdown]
# ## 7. Batches and the loss
# A row of notebook 02 holds several examples. Three arrays travel with its tokens: which tokens
# are to be predicted, which example each belongs to, and positions that restart with every
# example. Grain shuffles, repeats and stacks micro-batches: a step sees arrays of shape [M, B, T] (M micro-batches of B rows of T
# tokens; D, K and V below are the embedding, the trained positions of a row and the vocabulary).
# A `flax.struct.dataclass` is a dataclass that JAX takes apart and puts together like a state.

# %%
helpers.show_source(train.Batch, train.PackedRows, train.make_dataset)

# %% [markdown]
# The published step held 8 sequences, one example each. Packing changes what a row is, so we keep
# the number of *examples* per step about the same: two rows of 4,096 tokens hold 8.4 of CodeV-R1's
# examples of 922 tokens on average (published lengths, 95 % fill: 2 x 4,096 x 0.95 / 922). With
# more devices on `fsdp`, a step has at least `rows_per_device` rows for each.

# %%
micro_rows = cfg.rows_per_device * fsdp
micro_batches = max(1, cfg.rows_per_step // micro_rows)
rows_per_step = micro_batches * micro_rows
train_rows = train.PackedRows(data / "train")
steps = max(1, round(cfg.epochs * len(train_rows) / rows_per_step))
steps = min(steps, cfg.max_steps or steps)
dataset = train.make_dataset(train_rows, micro_batches, micro_rows, cfg.seed)
batch = next(iter(dataset))
print(f"a step: {micro_batches} micro-batches x {micro_rows} rows x {meta['sequence_length']} "
      f"tokens, {rows_per_step * meta['examples_per_row']:.1f} examples; {steps} steps, "
      f"{cfg.epochs:g} epochs")
print(f"this one: {(batch.segment_ids > 0).mean():.1%} real tokens, {batch.loss_mask.mean():.1%} "
      f"trained, {batch.segment_ids.max(-1).sum()} examples")

# %% [markdown]
# One row, drawn. On the left a token (row of the picture) may look at the coloured ones (columns):
# a triangle per example, strong where its answer is trained. Without the blocks, the third example
# would read the answers of the first two. On the right the positions, which restart with each:
# rotary embeddings see only distances, so this matters less than the mask does, but it keeps the
# numbers those that the server will compute.

# %%
helpers.show_source(train.packed_mask)
first = jax.tree.map(lambda array: array[0, 0], batch)
palette = np.array([[1, 1, 1], *matplotlib.colors.to_rgba_array(
    style.CYCLE * (first.segment_ids.max() // len(style.CYCLE) + 1))[:, :3]])
strength = np.where(first.loss_mask, 1.0, 0.4)[:, None, None]
picture = 1 - strength * (1 - palette[first.segment_ids])[:, None]  # each row of pixels one colour
allowed = np.asarray(train.packed_mask(first.segment_ids[None])[0])[..., None]
fig, (left, right) = style.figure(10, 4.2, columns=2, width_ratios=[1, 1.4])
left.imshow(np.where(allowed, picture, 1.0), interpolation="nearest")
left.grid(False)
left.set(title="Who may look at whom", xlabel="token looked at", ylabel="token")
for segment in range(1, first.segment_ids.max() + 1):
    at = np.flatnonzero(first.segment_ids == segment)
    right.plot(at, first.positions[at], color=palette[segment], alpha=0.4)
    at = at[first.loss_mask[at]]
    right.plot(at, first.positions[at], color=palette[segment], lw=5)
    style.label_line(right, at[-1], first.positions[at[-1]], f"example {segment}",
                     palette[segment], ha="right", xytext=(-8, 0))
right.set(title="Positions restart; only answers (thick) are trained", xlabel="token",
          ylabel="position", xlim=(0, len(first.tokens)))
style.finish(fig, "03_packed_row", f"the first packed row of step 1, {first.tokens.size} tokens")

# %% [markdown]
# The loss is the *sum* over trained tokens and their number; the mean is taken once, over the
# whole optimizer step. (Averaging each micro-batch first, as Tunix's own accumulation does, lets a
# row with few trained tokens weigh as much as a full one.) Only trained positions meet the output
# matrix, which has a column for every id of the vocabulary (262,144 in the 31B): the model hands us
# hidden states. Tunix's model has no switch for that, so this is the second thing we exchange, for
# the length of one call: the embedder gets a wrapper whose `decode` does nothing.

# %%
helpers.show_source(train.Headless, train.hidden_states, train.make_loss)
most = max(int(np.load(data / part / "loss_mask.npy").sum(-1).max()) for part in ("train", "val"))
capacity = min(-(-most // 128) * 128, meta["sequence_length"] - 1)
loss_fn = train.make_loss(capacity)
print(f"at most {most} trained tokens in a row; the output matrix meets {capacity} of its "
      f"{meta['sequence_length']} positions")

# %% [markdown]
# `capacity` is the largest number of trained tokens in any row of the data, rounded up to a
# multiple of 128: nothing is ever cut off.
#
# ### Packing changes nothing: the proof
# The loss and the adapters' gradients of a packed row must be those of its examples one by one.
# For that we compute them a second time without the loss code above: every example in a row of its
# own, positions from 0, a plain causal mask, Tunix's own attention, all logits, and a cross-entropy
# as textbooks write it. The witness is the tiny model in float32 on the CPU, at every size: in
# bfloat16 rounding would hide errors of one per cent. B is random here, because with B = 0 the
# gradient of A is zero. The row is the one with the most examples, at most 2,048 tokens of it, cut
# so that the second example is in it.

# %%
def alone(rows):
    """(tokens, loss mask) [1, T] of each example of packed rows, padded on the right."""
    for row, segments in enumerate(rows.segment_ids):
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            yield tuple(np.pad(array[row, at], (0, len(segments) - len(at)))[None]
                        for array in (rows.tokens, rows.loss_mask))


def textbook_loss(model, tokens, loss_mask):
    """Summed cross-entropy over the trained tokens of one example."""
    causal = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    logits, _ = model(tokens, attention_mask=causal)
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -jnp.sum(scores[..., 0] * loss_mask[:, 1:])

# %%
textbook = nnx.graphdef(gemma.inject_lora(witness, 4, 8.0, cpu))
gemma.use_block_attention(witness, cfg.attention_block)
witness = gemma.inject_lora(witness, 4, 8.0, cpu)
draw = np.random.default_rng(cfg.seed)
for pair in gemma.adapted_modules(witness).values():
    pair["b"].set_value(jnp.asarray(draw.normal(0, 0.05, pair["b"].shape), jnp.float32))
graph, small, witness_base = nnx.split(witness, nnx.LoRAParam, ...)
examples = train_rows.arrays["segment_ids"].max(-1)
row = train_rows[int(examples.argmax())]
start = max(0, int(np.argmax(row.segment_ids == 2)) - 1_024)
row = jax.tree.map(lambda array: array[None, start:start + 2_048], row)
row = row.replace(tokens=row.tokens % exact.num_embed)  # a larger model has more ids
packed_loss = train.make_loss(row.tokens.shape[1] - 1)
together = jax.jit(jax.value_and_grad(
    lambda adapters: packed_loss(nnx.merge(graph, adapters, witness_base), row)[0]))
by_itself = jax.jit(jax.value_and_grad(
    lambda adapters, *one: textbook_loss(nnx.merge(textbook, adapters, witness_base), *one)))
trained = row.loss_mask.sum()
with gemma.use_mesh(cpu):
    packed = jax.tree.map(lambda a: np.asarray(a) / trained, together(small))
    parts = [by_itself(small, *example) for example in alone(row)]
single = jax.tree.map(lambda *arrays: np.sum(arrays, axis=0) / trained, *parts)
off = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (packed, single)))]
largest = max(np.abs(gradient).max() for gradient in jax.tree.leaves(single[1]))
assert len(parts) >= min(2, examples.max()), "one example alone proves nothing"
print(f"{len(parts)} examples: loss packed {packed[0]:.7f}, one by one {single[0]:.7f}; "
      f"gradients up to {largest:.3f}, largest difference {max(off[1:]):.1e}")
assert off[0] < 1e-5 and max(off[1:]) < 1e-5 * largest

# %% [markdown]
# ## 8. Optimizer and step
# AdamW, warm-up, then a cosine down to zero, as published, and clipping: the published run has
# gradient norms up to 507 (read off its figure) and no clipping.

# %%
helpers.show_source(train.make_optimizer)
schedule = optax.warmup_cosine_decay_schedule(
    0.0, cfg.learning_rate, min(cfg.warmup_steps, steps // 2), steps)
optimizer = train.make_optimizer(schedule, cfg.weight_decay, cfg.max_grad_norm)

# %% [markdown]
# The step is one function for the whole optimizer step. `jax.lax.scan`, a compiled loop, goes over
# the micro-batches, so their number costs no memory; the summed gradients are divided once; and the
# frozen weights go in and do not come out. `jit_train_step` compiles it: adapters and optimizer
# state are donated, so the new ones take their place, and the outputs are pinned to the inputs'
# shardings, so that step two is the same program as step one. Notebook 08 compiles this very
# function for a TPU.

# %%
helpers.show_source(train.make_micro_loss, train.make_train_step, train.make_eval_step,
                    train.jit_train_step)

# %% [markdown]
# ### Beside Tunix's own trainer
# Tunix brings a `PeftTrainer`: loop, loss, accumulation, checkpoints. It packs nothing, so we give
# it what it is made for, rows of equal length with one text each: four rows cut to 128 tokens, two
# micro-batches of two, the witness model of section 7. First all rows train the same number of
# tokens, then the first two train only their last 32.

# %%
from tunix.sft import peft_trainer


def tunix_step(rows):
    """Loss and adapters after one SGD step of rate 1 by Tunix's trainer as it comes."""
    model = nnx.merge(graph, jax.tree.map(jnp.copy, small), witness_base)
    trainer = peft_trainer.PeftTrainer(model, optax.sgd(1.0), peft_trainer.TrainingConfig(
        eval_every_n_steps=1, gradient_accumulation_steps=len(rows.tokens)))
    trainer.with_gen_model_input_fn(lambda rows: {
        "input_tokens": rows.tokens, "input_mask": rows.loss_mask, "positions": rows.positions,
        "attention_mask": train.packed_mask(rows.segment_ids)})
    trainer.train([jax.tree.map(lambda array: array[i], rows) for i in range(len(rows.tokens))])
    return trainer.metrics_logger.get_metric("", "loss", "train"), nnx.state(model, nnx.LoRAParam)


four_rows = [train_rows[i].tokens[:128] % exact.num_embed for i in range(4)]
equal = np.zeros((2, 2, 128), np.int32)
equal = train.Batch(np.stack(four_rows).reshape(equal.shape), equal == 0, equal + 1,
                    equal + np.arange(128, dtype=np.int32))
late = (equal.positions >= 96) | [[[False]], [[True]]]  # in the first micro-batch
uneven = equal.replace(loss_mask=equal.loss_mask & late)
sgd = optax.sgd(1.0)
our_step = jax.jit(train.make_train_step(witness, sgd, train.make_loss(127)))
for name, rows in (("equal", equal), ("uneven", uneven)):
    with gemma.use_mesh(cpu), jax.default_device(cpu.devices.item()):
        tunix_loss, tunix_adapters = tunix_step(rows)
        our_adapters, _, metrics = our_step(small, sgd.init(small), witness_base, rows)
    gap = optax.global_norm(jax.tree.map(jnp.subtract, our_adapters, tunix_adapters))
    gap = float(gap / metrics["grad_norm"])
    print(f"{name}: loss {tunix_loss:.6f} by Tunix, {metrics['loss']:.6f} by ours; "
          f"steps {gap:.1e} of their length apart")
    agree = abs(tunix_loss - metrics["loss"]) < 1e-5 and gap < 1e-4
    assert agree == (name == "equal")

# %% [markdown]
# The same loss and the same step where every micro-batch trains as many tokens. With uneven ones
# they part: Tunix averages each micro-batch first, so a token counts more where few are trained.
# That is one reason for a loop of our own. Two more: Tunix's compiled step returns the whole model,
# for the 31B a second copy of the 14 GiB per chip (2 bytes x 30.7 billion / 4) that never changed;
# and after a restart it reads all batches of the finished steps again to skip them, because what it
# restores of the data's position stays in a private attribute. The model, its loader and its
# shardings are Tunix's throughout.

# %% [markdown]
# ## 9. Checkpoints: continue, start fresh, or refuse
# `State` is what changes: adapters, Adam's moments, the position of the data. A checkpoint holds it
# as three Orbax items, and the *recipe* beside them: everything that decides what is being trained.
# `restore` puts every array back where the fresh state has it, so a run may go on with another
# number of devices. Orbax writes beside and renames: a step is there or it is not.

# %%
helpers.show_source(train.State, train.start, train.open_checkpoints, train.save, train.restore)

# %% [markdown]
# Run this notebook again after a crash and it continues. If the newest checkpoint belongs to
# another recipe it is refused, and the difference is named. Starting over is never silent: it takes
# another `RUN_DIR`, or `fresh=True` in section 1, to be set back before the next restart.

# %%
recipe = {key: asdict(cfg)[key] for key in (
    "rank", "alpha", "targets", "a_init", "learning_rate", "warmup_steps", "weight_decay",
    "max_grad_norm", "dtype", "seed", *gemma.UNQUANTISED)}
recipe |= {"base_model": meta["base_model"], "base_sha256": weights.fingerprint(base),
           "steps": steps, "rows_per_step": rows_per_step, "data_sha256": meta["data_sha256"],
           "template_sha256": meta["template_sha256"]}
checkpoints = epath.Path(cfg.checkpoints or helpers.run_dir("train", "checkpoints").resolve())
if cfg.fresh and checkpoints.exists():
    checkpoints.rmtree()
manager = train.open_checkpoints(checkpoints, cfg.checkpoint_every, last=steps)
step = train.refuse_another_recipe(manager, recipe)
found = f"resuming from step {step} of {steps}" if step else f"starting at step 0 of {steps}"
print(f"{found}{', nothing left to train' * (step == steps)}; "
      f"checkpoints in {cfg.checkpoints or 'train/checkpoints'}")

# %% [markdown]
# Now everything is put together. The first compilation takes seconds here and minutes for the 31B;
# with the cache of section 1 on disk, a restart skips it. Compiling also tells what the step needs
# beside its arguments. Validation is one call over all held-out rows, so its loss is a mean over
# tokens, too.

# %%
state, frozen = train.start(model, optimizer, mesh)
state = train.restore(manager, state)
began = time.perf_counter()
with gemma.use_mesh(mesh), helpers.phase("compiling the optimizer step"):
    jitted = train.jit_train_step(model, optimizer, loss_fn, state)
    compiled = jitted.lower(
        state.adapters, state.opt_state, frozen, train.to_mesh(batch, mesh)).compile()
train_step = quantized.callable_step(jitted, compiled, frozen)
compile_seconds = time.perf_counter() - began
held_out = train.validation_batch(
    train.PackedRows(data / "val"), cfg.validation_rows, micro_rows)
held_out = train.to_mesh(held_out, mesh)
evaluate = jax.jit(train.make_eval_step(model, loss_fn))

# %% [markdown]
# The budget of section 4 beside what is there. The first three lines are counted on the arrays that
# one device holds. The last two are the compiler's: temporaries (activations of one micro-batch and
# gradients), and outputs that take no donated array's place, which are the few numbers for the log.

# %%
memory = compiled.memory_analysis()
held = {"base weights": device_gib(frozen), "adapters": device_gib(state.adapters),
        "Adam's moments": device_gib(state.opt_state)}
beyond = {"temporaries of the step (compiled)": memory.temp_size_in_bytes / 2**30,
          "fresh outputs (compiled)": (memory.output_size_in_bytes
                                       - memory.alias_size_in_bytes) / 2**30}
fit = pd.DataFrame({"budget": budget, "held": pd.Series(held | beyond)})
fit = fit.rename_axis("GiB per device")
limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0) / 2**30
print(f"sum {fit.held.sum():.4g} GiB per device,",
      f"of {limit:.4g} GiB" if limit else "without a limit of its own (a CPU)")
assert not limit or fit.held.sum() <= limit, "this does not fit: lower rows_per_device or set remat"
fit.reindex([*budget.index, *beyond]).style.format("{:.4g}", na_rep="-")

# %% [markdown]
# ## 10. Train
# The loop, whole: next batch, step, log, validate, save. `to_mesh` lays a batch onto the mesh; on
# a slice of several hosts each runs this same program, reads the same rows and keeps its devices'
# part. A gradient that is not finite stops the run before anything of that step is written. The log
# has one rule: a line is written before the checkpoint that contains its step. A restart goes back
# to the newest whole checkpoint and `rewind` cuts the log there, so the steps after it are computed
# and written again, the same to the last bit (a test kills a run on simulated devices and
# compares).

# %%
helpers.show_source(train.to_mesh, train.train)

# %% [markdown]
# One line per log interval. Seconds include waiting for data, and tokens are real ones, never
# padding. The warm-up starts at a rate of 0, so the first step changes nothing yet. Interrupt it or
# kill it: run the notebook again and it goes on from the newest checkpoint. (With `checkpoints` on
# `gs://` it does so even on another machine, where its log then begins.) The same numbers go to
# `train/tensorboard` (`tensorboard --logdir`).

# %%
log_file = helpers.run_dir("train", "log.jsonl")
with gemma.use_mesh(mesh):
    state = train.train(
        state, frozen, train_step, lambda adapters: float(evaluate(adapters, frozen, held_out)),
        dataset, mesh, train.StepLog(log_file, steps, cfg.log_every), manager, recipe,
        cfg.validate_every)
nnx.update(model, state.adapters)

# %% [markdown]
# ## 11. Did it learn?
# Everything below is read from `log.jsonl`, not from this kernel. The loss is in *nats*, its unit
# with natural logarithms: guessing among n tokens costs ln n. Raw values are faint, the bold
# line is a mean of the ten steps around each, dots are the held-out rows, and nothing is
# rescaled.

# %%
log = pd.read_json(log_file, lines=True)
run, val = log.dropna(subset="loss"), log.dropna(subset="val_loss")
smooth = run.loss.rolling(10, min_periods=1, center=True).mean()
fig, (left, middle, right) = style.figure(10, 3.4, columns=3)
left.plot(run.step, run.loss, color=style.BLUE, alpha=0.3)
left.plot(run.step, smooth, color=style.BLUE, lw=2, label="training")
left.plot(val.step, val.val_loss, "o-", color=style.GREEN, ms=5, label="validation")
left.set(title="Loss", xlabel="step", ylabel="nats per trained token", yscale="log")
planned = [float(schedule(step)) for step in run.step - 1]
middle.plot(run.step, planned, color=style.GREY, lw=5, alpha=0.5, label="planned")
middle.plot(run.step, run.learning_rate, color=style.ORANGE, label="used")
middle.set(title="Learning rate", xlabel="step", ylim=(0, None))
right.plot(run.step, run.grad_norm, color=style.PURPLE)
right.axhline(cfg.max_grad_norm, color=style.GREY, ls="--")
right.text(steps, cfg.max_grad_norm, "clipped above this", color=style.GREY, ha="right",
           va="bottom")
right.set(title="Gradient norm of the whole step", xlabel="step", yscale="log")
for ax in (left, middle):
    ax.legend()
style.finish(fig, "03_loss", f"log.jsonl of this run, size {helpers.size()}, measured on "
             f"{mesh.size} devices ({jax.devices()[0].device_kind})")

# %% [markdown]
# The validation loss is the one that counts: it is on specifications the model has not seen. When
# it turns up while the training loss still falls, the model memorises; the log says after every
# validation how long ago the best one was.
#
# ### Before and after
# The same three specifications, with the base's answer on the left, the tuned model's in the middle
# and the dataset's on the right.

# %%
with helpers.phase("three answers of the tuned model"):
    after = answers(model, samples, cfg.answer_tokens)
for sample, *texts in zip(samples, before, after, [sample["answer"] for sample in samples]):
    columns = "".join(f"<td style='width:33%;vertical-align:top;text-align:left'><b>{name}</b>"
                      f"<pre style='white-space:pre-wrap;word-break:normal;"
                      f"font:85%/1.5 monospace'>{html.escape(text[:700])}</pre></td>"
                      for name, text in zip(("base", "tuned", "dataset"), texts))
    asked = html.escape(sample["messages"][-1]["content"][:400])
    display(HTML(f"<p style='white-space:pre-wrap;line-height:1.3'><i>{asked}</i></p>"
                 f"<table style='width:100%;table-layout:fixed'><tr>{columns}</tr></table>"))
same = sum(text.strip() == sample["answer"].strip() for text, sample in zip(after, samples))
ended = sum(text.rstrip().endswith("```") for text in after)
print(f"of {len(samples)} tuned answers {same} equal the dataset's to the letter, "
      f"{ended} end with their fence closed")

# %% [markdown]
# ## 12. The published run beside ours
# 4N counts the arithmetic that LoRA needs per token of a model with N parameters (2N forward, 2N
# for the gradients of the activations; frozen weights need no gradient). Against the chips' peak
# this is what each run used. The published rows are recomputed from its tables; ours is this run.
# A CPU has no official peak, so the tiny run shows none. E2B's would read about twice too high:
# half of its 4.6 billion parameters are per-layer embeddings (35 layers x 256 x 262,144), which are
# looked up and not multiplied.

# %%
def run_line(model, parameters, hours, tokens_per_second, chip, count):
    """One line of the table; peak and price are those of the chip, if it is one we know."""
    return {"model": model, "hours": hours, "real tokens/s": tokens_per_second,
            "USD": hours * count * chip.dollars_per_hour if chip else np.nan,
            "utilisation at 4N": (4 * parameters * tokens_per_second / count / chip.flops
                                  if chip else np.nan)}


n_31b = published("spec_sheet_reference", "item")["gemma4_31b_text_params"]
lines = {}
for side, name, count in (("tpu", "v5p", 4), ("gpu", "h100", 2)):
    result = published("training_results", "metric", side)
    lines[f"published, {count} x {name}"] = run_line(
        "31B", n_31b, result["wall_clock"], result["throughput"], helpers.chip(name), count)
steady = run.iloc[3:]  # the first steps warm caches up
lines["this run, measured"] = run_line(
    meta["base_model"], base_parameters, run.seconds.sum() / 3600,
    steady.real_tokens.sum() / steady.seconds.sum(),
    hardware.chip_of(jax.devices()[0].device_kind), mesh.size)
runs = pd.DataFrame(lines).T
assert not (runs["utilisation at 4N"] > 1).any(), "above the peak: a number is wrong"
runs.style.format({"hours": "{:.3g}", "real tokens/s": "{:,.0f}", "USD": "{:.2f}",
                   "utilisation at 4N": "{:.1%}"}, na_rep="-")

# %% [markdown]
# 5.1 % and 3.0 % of the peak went to real tokens, the rest to padding, recomputation and waiting:
# the ratio of two such runs says little about the chips. The paper gives reasons why the TPU run
# was 1.61 times faster (5.39 h against 3.34 h). Each can be checked with the paper's own numbers.
# For the first we count three readings of the weights per sample: forward, recomputation, backward.

# %%
tpu, gpu = (published("hardware_training", "spec", side) for side in ("tpu", "gpu"))
sample_seconds = [published("training_results", "metric", side)["time_per_sample"]
                  for side in ("tpu", "gpu")]
passes = 3  # over the weights per micro-batch: forward, recomputation, backward
reading = [passes * 2 * n_31b / 1e12 / side["hbm_bandwidth_total"] for side in (tpu, gpu)]
explained = (reading[1] - reading[0]) / (sample_seconds[1] - sample_seconds[0])
their_steps = [published("hyperparameters", "name", side)["optimizer_steps_plot"]
               for side in ("tpu", "gpu")]
fill = published("data_stats", "name")["token_len_mean"] / theirs["seq_len_code"]
reasons = pd.DataFrame([
    ("HBM bandwidth, 11.1 against 6.7 TB/s",
     f"reading the weights takes {reading[0]:.3f} and {reading[1]:.3f} s of the "
     f"{sample_seconds[0]} and {sample_seconds[1]} s per sample", f"{explained:.1%} of the gap"),
    ("a faster interconnect", f"{tpu['interconnect_bandwidth_claimed']:.0f} against "
     f"{gpu['interconnect_bandwidth_claimed']:.0f} GB/s", "the same number twice"),
    ("FSDP's all-reduce on the GPUs", "FSDP gathers weights; it is tp=4 on the TPU that "
     "sums activations over the chips, twice a layer", "the wrong way round"),
    ("enforce_eager on the GPUs", "an option of vLLM, which serves models", "not about training"),
    ("the same work on both", f"{their_steps[0]:.0f} against {their_steps[1]:.0f} steps, batch 8 "
     "against 16", "not the same"),
    ("(not mentioned) padding", f"{fill:.0%} of each TPU row is real tokens",
     f"costs up to {1 / fill:.1f}x"),
], columns=["reason given", "its own numbers", "verdict"])
reasons.style.hide(axis="index").set_properties(**{"text-align": "left"}).set_table_styles(
    [{"selector": "th", "props": "text-align: left"}])

# %% [markdown]
# The last figure shows the published loss beside ours. The GPU curve is dashed because it is not
# data as measured: the authors' plotting code maps it linearly onto the TPU curve's first and last
# value, so that both start and end together by construction. (What it then draws are running means
# of 20 and of 5 points, which is why the drawn ends differ.) Different model, data and scale: two
# axes.

# %%
curves = pd.read_csv("data/published/loss_curve_digitized.csv").groupby("series")
fig, (left, right) = style.figure(10, 3.4, columns=2)
for name, color, look, label in (
        ("tpu_smooth20", style.BLUE, "-", "TPU, mean of 20 steps"),
        ("gpu_norm_smooth5", style.ORANGE, "--", "GPU, RESCALED by its authors")):
    curve = curves.get_group(name)
    left.plot(curve.progress, curve.value, look, color=color, label=label)
left.set(title="Published, 31B", ylabel="training loss")
right.plot(run.step / steps, smooth, color=style.BLUE, label="training, mean of 10 steps")
right.plot(val.step / steps, val.val_loss, "o-", color=style.GREEN, ms=5, label="validation")
right.set(title=f"This run, {meta['base_model']}", ylabel="nats per trained token")
for ax in (left, right):
    ax.set(xlabel="share of the run", ylim=(0, None))
    ax.legend()
style.finish(fig, "03_published", "left: arXiv 2605.25645, read off its figure, about 1 % error; "
             "right: log.jsonl of this run, measured")

# %% [markdown]
# The published loss is flat from a tenth of the run on, and there was no held-out loss to tell
# whether that is the end of learning. In bfloat16 Adam's second moment never decays after an early
# spike, and small updates are rounded away, which would look just like this.
#
# ## 13. Where the time goes on this machine
# A step is one number in the log. JAX's profiler writes down what every device does meanwhile. We
# give it three steps more, on copies of adapters and optimizer state, because the compiled step
# uses up what it is given: the trained ones stay as they are. The parts of the step carry names
# (`jax.named_scope` in `helpers/train.py`: hidden states, output matrix and loss, optimizer).

# %%
trace = helpers.run_dir("train", "trace")
shutil.rmtree(trace, ignore_errors=True)
options = jax.profiler.ProfileOptions()
options.python_tracer_level, options.host_tracer_level = 0, 1  # the devices' work, not Python's
options.enable_hlo_proto = False  # nor a copy of every program of this kernel, most of the file
spare = jax.tree.map(jnp.copy, (state.adapters, state.opt_state))
rows = train.to_mesh(batch, mesh)
with gemma.use_mesh(mesh), jax.profiler.trace(trace, profiler_options=options):
    for number in range(3):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            *spare, metrics = train_step(*spare, frozen, rows)
            jax.block_until_ready(metrics)
files = [path for path in trace.rglob("*") if path.is_file()]
print(f"train/trace: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
del spare

# %% [markdown]
# To look at it, drag the `.trace.json.gz` into [Perfetto](https://ui.perfetto.dev), which runs in
# the browser, or start `tensorboard --logdir train/trace` where the package `xprof` is installed.
# On a TPU each chip is a line of operations: look for gaps, for all-gathers and all-reduces that
# nothing overlaps, and for what 08 did not predict. On a CPU it is a demonstration: the simulated
# devices share the same cores.
#
# ## 14. Hand over to notebook 04
# What 04 must know travels in `recipe.json`, so that no later notebook repeats a setting of this
# one, and what this machine took in `machine.json`. Below, the checkpoints that are kept: the
# newest three.

# %%
helpers.write_json(helpers.run_dir("train", "recipe.json"), recipe | {
    "size": helpers.size(), "base_path": meta["base_path"],
    "adapter_dtype": "float32", "n_modules": len(modules), "trainable_parameters": trainable,
    "partial": cfg.partial, "mesh": {"fsdp": fsdp, "tp": tp},
    "checkpoints": cfg.checkpoints or "train/checkpoints",
    "final_step": state.step, "epochs": cfg.epochs, "system": meta["system"],
    "reasoning": meta["reasoning"],
    "val_loss_before": float(val.val_loss.iloc[0]), "val_loss_after": float(val.val_loss.iloc[-1]),
    "examples_per_step": rows_per_step * meta["examples_per_row"]})
stats = jax.local_devices()[0].memory_stats() or {}
helpers.write_json(helpers.run_dir("train", "machine.json"), {
    "device_kind": jax.devices()[0].device_kind, "devices": jax.device_count(),
    "hosts": jax.process_count(), "mesh": [fsdp, tp], "load_seconds": load_seconds,
    "compile_seconds": compile_seconds, "held_gib_per_device": float(fit.held.sum()),
    **{key: stats.get(key) for key in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")},
    "steps": steps, "micro_batches": micro_batches, "micro_rows": micro_rows,
    "sequence_length": meta["sequence_length"], "remat": cfg.remat})
manager.close()
for path in sorted(checkpoints.iterdir(), key=lambda path: int(path.name)):
    print(f"{path.name}: {', '.join(sorted(item.name for item in path.iterdir()))}")

# %% [markdown]
# ## Recap
# - A mesh is a promise about head counts; the wrong one is refused before anything is loaded.
# - All modules have float32 adapters, shown to change nothing before the first step.
# - One compiled step per optimizer step: token-weighted, clipped, with the norm of the whole step.
# - The run can be killed at any moment; it continues from its newest checkpoint to the same bits.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `tp=8 does not divide the 4 KV heads` | the model, not the software | more `fsdp`: (2, 4), (4, 4) |
# | `RESOURCE_EXHAUSTED` while compiling, or section 9's "this does not fit" | activations do not fit | `rows_per_device=1`, `remat="DECODER"`, or shorter rows in 02; section 9's `memory_analysis` says how much |
# | `the weights of ... need 62.5 GB` | the boot disk is too small for the 31B | `TMPDIR=/dev/shm`, the memory disk of a TPU VM |
# | every restart compiles for minutes | the compilation cache went away with the machine | `JAX_COMPILATION_CACHE_DIR=gs://...` |
# | `another recipe` | a setting, the data or the base changed | `fresh=True`, or a new `RUN_DIR` |
# | `rendezvous ... may be stuck` on a CPU | simulated devices wait for each other | the opening cell sets `NPROC=16` and turns asynchronous dispatch off |
# | loss is `nan` | learning rate | lower it and start over: another rate is another recipe |
# | validation rises, training falls | memorising | fewer `epochs`, which is another recipe, too |
#
# ### Exercises
# 1. Leave `k_einsum` out of `targets`, as the published pattern does. What does section 5 say?
#
# <details><summary>Solution</summary>
#
# ```python
# try:
#     gemma.inject_lora(before_lora, cfg.rank, cfg.alpha, mesh,
#                       cfg.targets.replace("|k_einsum", ""))
# except helpers.UserError as error:
#     print(error)
# ```
#
# One module of the tiny model (10 of the 31B) got no adapter, and it names
# `layers.5.attn.k_einsum`. With `partial=True` beside the pattern it would be accepted.
#
# </details>
#
# 2. Kill the kernel in the middle of section 10 (`kill -9`), copy `log.jsonl` to `copy.jsonl`, and
#    run the notebook again. Which steps are computed twice, and how do their lines differ?
#
# <details><summary>Solution</summary>
#
# ```python
# old, new = (pd.read_json(helpers.run_dir("train", name), lines=True).dropna(subset="loss")
#             .set_index("step") for name in ("copy.jsonl", "log.jsonl"))
# both = old.index.intersection(new.index)
# print((old.loc[both] != new.loc[both]).drop(columns="val_loss", errors="ignore").sum())
# ```
#
# The steps after the newest checkpoint are computed twice. Their lines differ in `seconds` and in
# nothing else.
#
# </details>
#
# Next: [04 · From the checkpoint to a model every engine agrees on](04_merge.ipynb)
