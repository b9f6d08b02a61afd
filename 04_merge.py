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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/04_merge.ipynb)
#
# # 04 · From the checkpoint to a model every engine agrees on
#
# We add the trained adapters to the base weights, one tensor at a time, and write a folder that
# vLLM serves as it is. Beside it go the same adapters in the format of PEFT, Hugging Face's adapter
# library, and, if asked for, a text-only copy for transformers.
#
# | | |
# |---|---|
# | **Needs** | A CPU. No TPU, no GPU, and no model in memory: 31B wants room for 125 GB of files (base and result) and about 2.5 GB of memory (computed; 1.9 of it adapters) |
# | **Takes** | `train/checkpoints/<step>/` and `train/recipe.json` from notebook 03, `data/meta.json` from 02, the base model's safetensors |
# | **Makes** | `merged/` (a model folder), `adapter/` (PEFT), `merged_text/` (optional), `merge.json` (hashes of every tensor and file), `model_card.md` |
# | **Costs** | tiny: under 30 seconds. 31B: one write and two reads of 62 GB (the second checks what was written); no chip is used, so the TPU may already be given back |
#
# The outputs shown are those of the tiny run on two CPU cores. Every term is explained where it
# first appears, and again in the
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
# Almost everything that matters here (rank, alpha, which matrices, which base) was decided in
# notebook 03 and travels in `train/recipe.json`; asking for it again would only invite a mismatch.
# What is left is which checkpoint to take, how much to hold in memory at once, and what to write.

# %%
import contextlib
import hashlib
import json
import math
import re
import shutil
from dataclasses import dataclass, replace

os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU on this machine stays free for others
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pandas as pd
from IPython.display import display

from helpers import architecture, remote, style, weights
from helpers.run import read_leftover


@dataclass(frozen=True)
class Settings:
    step: int = 0            # checkpoint to merge; 0: the one 03 finished with
    base: str = ""           # another copy of the base model; empty: where 03 found it
    block_mib: int = 8       # float32 working block: memory does not grow with the model
    samples: int = 24        # tensors that are re-read and recomputed at the end
    into: str = "dequantized"  # the base as a quantised run multiplied with it, or "bfloat16" (11)
    write_base: bool = False  # also write that base, dequantized/: the one the adapter belongs to
    text_only: bool = False  # also write merged_text/, for transformers' AutoModelForCausalLM
    upload: str = ""         # a hub repository, "you/name", to publish merged/ to; empty: none


FULL = Settings()
E2B = replace(FULL, text_only=True)
TINY = replace(FULL, text_only=True, write_base=True)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# ## 2. What notebook 03 left
# An **adapter** is a pair of small matrices, `A` and `B`, that notebook 03 trained beside each
# large one, which stayed as it was. The recipe says how. Two numbers decide the merge: the **rank**
# `r`, the inner size of every pair, and **alpha**. LoRA (low-rank adaptation) adds `(alpha / r) ·
# x A B` to what a frozen weight makes of its input `x`, so `alpha / r` scales every change.

# %%
recipe = helpers.read_json(helpers.require(helpers.run_dir("train", "recipe.json"), "03_train.py"))
scale = recipe["alpha"] / recipe["rank"]
keys = ("base_model", "base_path", "rank", "alpha", "n_modules", "final_step", "adapter_dtype")
known = [f"{key} {recipe.get(key)}" for key in keys] + [f"scale {scale:g}"]
print(" | ".join(known[:4]), " | ".join(known[4:]), sep="\n")
storage, as_trained = weights.storage_of(recipe, cfg.into)
if storage:
    print(f"trained on a base in {storage}; merged into {cfg.into}")

# %% [markdown]
# The checkpoint is written by Orbax, JAX's checkpoint library: a folder per step, every array in
# small chunks, and metadata that says what is inside. That metadata is all we need. We ask it for
# names and shapes and restore plain NumPy arrays, so no model is built, no base weights are loaded,
# and it does not matter that the arrays were split over four chips when they were saved.

# %%
def read_step(manager, step):
    """The arrays of one step, as a tree of NumPy arrays, and the recipe saved with them."""
    try:
        shapes = manager.item_metadata(step)["model_params"].tree
        plan = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        tree = manager.restore(step, args=ocp.args.Composite(
            model_params=ocp.args.PyTreeRestore(restore_args=plan)))["model_params"]
        return tree, (manager.metadata(step).custom_metadata or {}).get("recipe", {})
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        why = str(error) or type(error).__name__
        raise helpers.UserError(why.splitlines()[0][:150]) from error


def another_step(manager, steps, damaged):
    """What to do about a damaged step: the newest other one that is whole, if there is one."""
    for step in sorted(set(steps) - {damaged}, reverse=True):
        with contextlib.suppress(helpers.UserError):
            read_step(manager, step)
            return f"Step {step} is whole: set Settings.step to it, or run 03_train.py again."
    return "No other step is whole. Run 03_train.py again."


# %%
def restore_adapters(folder, step):
    """Return (step, {module path: (A, B)} in float32, the recipe saved with the checkpoint)."""
    handlers = {"model_params": ocp.PyTreeCheckpointHandler()}
    if "://" not in str(folder) and not Path(folder).is_dir():
        raise helpers.UserError(f"{folder} is missing. Run 03_train.py first.")
    with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
        steps = sorted(manager.all_steps())
        step = step or (steps[-1] if steps else 0)
        if step not in steps:
            raise helpers.UserError(f"{folder} has no finished step {step}; it has {steps}. "
                                    "Set Settings.step to one of them, or run 03_train.py.")
        try:
            tree, notes = read_step(manager, step)
        except helpers.UserError as error:
            raise helpers.UserError(f"step {step} in {folder} cannot be read: {error}\n"
                                    + another_step(manager, steps, step)) from error
    adapters = {}
    for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [str(key.key) for key in keys if str(key.key) != "value"]
        path, which = ".".join(parts[:-1]), parts[-1].rpartition("_lora_")[2]
        adapters.setdefault(path, {})[which] = np.asarray(array, np.float32)
    return step, {path: (pair.get("a"), pair.get("b")) for path, pair in adapters.items()}, notes


# %%
folder = recipe.get("checkpoints", "train/checkpoints")  # gs://..., or below RUN_DIR
folder = folder if "://" in folder else helpers.run_dir(folder).resolve()
step, adapters, notes = restore_adapters(folder, cfg.step or recipe["final_step"])
count = sum(a.size + b.size for a, b in adapters.values())
print(f"step {step}: {len(adapters)} adapter pairs, {count:,} numbers, {count * 4 / 2**20:.1f} MiB")
for path, (a, b) in list(adapters.items())[:6]:
    print(f"  {path:32} A {str(a.shape):16} B {b.shape}")

# %% [markdown]
# The six pairs of the first layer are printed. `A` narrows the layer's input to `r` numbers, `B`
# widens them again to the output, and both keep the axes of the weight they belong to: the
# `(16, 2, 8, 32)` of `kv_einsum` is rank, key or value, head, number within the head. Those axes
# are what the next sections are about.
#
# ## 3. The base model, without loading it
# A safetensors file is 8 bytes with the length of a header, a JSON header (name, dtype, shape and
# byte range of every tensor), then the bytes, back to back
# ([format](https://github.com/huggingface/safetensors#format)). So we know where every
# tensor lies after reading a few kilobytes, and can tell a truncated or missing file before we
# start. (A flipped byte inside a tensor is beyond this check.) A large model comes in several such
# files (shards) and an index that says which tensor is in which. We believe neither alone.

# %%
helpers.show_source(weights.read_header, weights.open_model)

# %% [markdown]
# Is it the base that notebook 03 trained on? A fingerprint of its files tells in a second.

# %%
base = remote.stage(cfg.base or recipe["base_path"])
base_sha256 = weights.fingerprint(base)
if base_sha256 != recipe.get("base_sha256", base_sha256):
    raise helpers.UserError(f"{base} is not the model that notebook 03 trained on. Set "
                            "Settings.base to that one, or run 03_train.py with this one.")
tensors = weights.open_model(base)
config = architecture.read_config(base)
prefix = next(name for name in tensors if name.endswith("embed_tokens.weight"))
prefix = prefix.removesuffix("embed_tokens.weight")
total = sum(tensor.stop - tensor.start for tensor in tensors.values())
largest = max(tensors, key=lambda name: tensors[name].stop - tensors[name].start)
print(f"{recipe['base_model']}: {len(tensors)} tensors, {total / 2**20:,.1f} MiB in "
      f"{len({tensor.file for tensor in tensors.values()})} file(s)")
print(f"names start with {prefix!r}; the largest tensor is {largest} {tensors[largest].shape}")

# %% [markdown]
# ## 4. Two names for every matrix
# Tunix, which trained, and Hugging Face (HF), whose files everybody reads, cut the same network
# differently. Gemma 4 has two kinds of layers: **sliding** ones attend to a window of recent
# tokens, **full** ones to all. Tunix stores the projections to keys and values of a sliding layer
# as one array, and keeps heads as an axis of their own; HF has flat `[out, in]` matrices, as
# `torch.nn.Linear` has. `helpers/architecture.py` lists the modules of a `config.json`, each with
# the axes of its adapter and the HF matrices that it changes; training and the floors of notebook
# 06 count on the same list. Letters: `D` model width, `N` query heads, `K` key/value heads, `H`
# head size, `F` MLP width, `r` rank.

# %%
helpers.show_source(architecture.Module, architecture.Layer.modules)

# %% [markdown]
# The same list describes the other sizes, so we can count before renting anything. The **31B**
# has ten full-attention layers where `V = K`: one `k_einsum`, no `v_proj`. A recipe that forgets
# `k_einsum` adapts 350 of its 360 modules. In the **E2B** the last 20 layers reuse earlier keys and
# values (no `k`/`v` to adapt) and have an MLP twice as wide; its per-layer inputs, which the 31B
# lacks, are not trained, and neither are the experts of the **26B-A4B**, a mixture of experts.
# (`data/configs/` holds these configs. Notebook 03 refuses the 26B-A4B, which Tunix 0.1.7 computes
# wrongly.)

# %%
rows = []
sizes = {name: f"data/configs/gemma4_{name}.json" for name in ("31b", "e2b", "e4b", "26b_a4b")}
for name, source in {**sizes, "this base": base}.items():
    listed = architecture.modules(architecture.read_config(source))
    kinds = pd.Series([target.kind for target in listed]).value_counts().to_dict()
    shapes = [shape for target in listed for shape in target.adapter(recipe["rank"])]
    rows.append({"model": name, **kinds, "modules": len(listed),
                 "HF matrices": sum(len(target.names) for target in listed),
                 f"adapter numbers, rank {recipe['rank']}": sum(map(math.prod, shapes))})
pd.DataFrame(rows).set_index("model").fillna(0).astype(int).map("{:,}".format).T

# %% [markdown]
# And the map itself, drawn from that list for one sliding and one full layer of this base: left
# what is in the checkpoint, right the matrices in the safetensors files that it changes. Blue is
# one to one; orange are the keys and values, where the two kinds of layers differ.

# %%
def draw_map(targets, rank, layers, name, source):
    """Boxes and lines: Tunix modules on the left, the HF matrices they change on the right."""
    fig, axes = style.figure(10, 4.4, columns=len(layers), sharey=True)
    for ax, (layer, caption) in zip(np.atleast_1d(axes), layers):
        line = 0
        for target in [target for target in targets if target.layer == layer]:
            colour = style.ORANGE if target.kind[0] == "k" else style.BLUE
            box = dict(boxstyle="round,pad=0.35", facecolor="white", edgecolor=colour)
            look = dict(fontsize=8, va="center", bbox=box)
            middle = line + (len(target.names) - 1) / 2
            shapes = ["×".join(map(str, shape)) for shape in target.adapter(rank)]
            ax.text(0.56, middle, f"{target.kind}\nA {shapes[0]}   B {shapes[1]}", ha="right",
                    **look)
            for module, (rows, columns) in target.names.items():
                ax.plot([0.56, 0.74], [middle, line], color=colour, lw=1.2)
                ax.text(0.75, line, f"{module.rpartition('.')[2]}\n{rows}×{columns}", **look)
                line += 1
        ax.text(0.56, -0.75, "Tunix: adapter pair", ha="right", color=style.GREY, fontsize=8)
        ax.text(0.75, -0.75, "HF: matrix", color=style.GREY, fontsize=8)
        ax.set(xlim=(0, 1), ylim=(6.5, -0.9), title=caption)
        ax.axis("off")
    style.finish(fig, name, source)


targets = architecture.modules(config)
kinds = [layer.kind for layer in architecture.layers(config)]
shown = [(kinds.index(kind), f"layer {kinds.index(kind)}: {kind} attention")
         for kind in dict.fromkeys(kinds)]
draw_map(targets, recipe["rank"], shown, "04_map",
         f"config.json of {recipe['base_model']}, rank {recipe['rank']}")

# %% [markdown]
# ## 5. Nothing missing, nothing left over
# A merge that skips a module fails silently: the folder loads, the text looks fine, and a part of
# the training is gone. So we compare three lists before writing a byte: what the config says, what
# the checkpoint holds, what the base holds. Any difference stops us, with its name.

# %%
FLOATS = ("BF16", "F16", "F32")  # what the sum of section 7 can be rounded to


def check(targets, adapters, tensors, prefix, recipe, notes):
    """Refuse unless every adapter has its place, every place its adapter, and all shapes agree."""
    wanted = {target.path: target for target in targets}
    problems = [f"{path} has no adapter" for path in sorted(set(wanted) - set(adapters))]
    problems += [f"adapter {path} has no place" for path in sorted(set(adapters) - set(wanted))]
    problems += [f"recipe says n_modules {recipe['n_modules']}, the base has {len(wanted)}"
                 ] * (recipe["n_modules"] != len(wanted))
    problems += [f"recipe says {key} {recipe[key]}, the checkpoint {notes[key]}"
                 for key in ("rank", "alpha") if notes.get(key, recipe[key]) != recipe[key]]
    for path in sorted(set(wanted) & set(adapters)):
        needed = wanted[path].adapter(recipe["rank"])
        for letter, array, shape in zip("AB", adapters[path], needed):
            if array is None or array.shape != shape:
                problems.append(f"{path} {letter} is {getattr(array, 'shape', 'missing')}, "
                                f"rank {recipe['rank']} needs {shape}")
            elif not np.isfinite(array).all():
                problems.append(f"{path} {letter} has NaN or Inf")
        for name, shape in wanted[path].names.items():
            tensor = tensors.get(f"{prefix}{name}.weight")
            if tensor is None or tensor.shape != shape or tensor.dtype not in FLOATS:
                problems.append(f"base {name} is {tensor and (tensor.dtype, tensor.shape)}, "
                                f"expected {shape} in {', '.join(FLOATS)}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise helpers.UserError("checkpoint and base do not fit: " + "; ".join(problems[:3]) + more
                                + ". Check Settings.base and Settings.step, or run 03_train.py.")


# %% [markdown]
# If 03 left matrices out on purpose (`partial=True`), only those with adapters are merged; the rest
# is named here and stays as the base has it.

# %%
def split_targets(targets, adapters, recipe):
    """(modules to merge, modules left alone); all are to be merged unless 03 said otherwise."""
    def wanted(target):
        return not recipe.get("partial") or target.path in adapters
    return [t for t in targets if wanted(t)], [t for t in targets if not wanted(t)]


targets, alone = split_targets(targets, adapters, recipe)
if alone:
    print(f"left alone on purpose: {len(alone)} modules "
          f"({', '.join(sorted({target.kind for target in alone}))})")
check(targets, adapters, tensors, prefix, recipe, notes)
if all(not b.any() for _, b in adapters.values()):
    raise helpers.UserError("every B is zero: this checkpoint was saved before the first step.")
print(f"{len(targets)} modules, {sum(len(t.names) for t in targets)} matrices: all fit")

# %% [markdown]
# ## 6. The algebra, kind by kind
# HF computes `y = W x` with `W` of shape `[out, in]`. Whatever the kind, we want two plain
# matrices, `A [in, r]` and `B [r, out]`, because then the change is always
# `ΔW = (alpha / r) · (A B)ᵀ`. Only the way to those two differs. For each kind we write it down and
# prove it on random input `x`: the two plain matrices must give what the einsum gives that Qwix,
# the library that puts LoRA into a Tunix model, runs in training (both without `alpha / r`).
# (`td,dr,rnh->tnh` reads: axes with the same letter run together, letters missing on the right are
# summed over, as in `torch.einsum`.) This proves the folding. It cannot prove HF's conventions,
# rows head by head and keys before values; section 13 does, with the engines themselves.
#
# ### 6.1 Query: `q_einsum`
# `A (D, r)`, `B (r, N, H)`. HF lists the rows of `q_proj` head by head, so `N` and `H` fold into
# one axis, in that order.

# %%
def q_factors(a, b):
    return {"q_proj": (a, b.reshape(b.shape[0], -1))}


def proof(kind, factors, einsum, adapters, width):
    """Our ΔW x against Qwix's einsum (or dot product) on the first module of a kind."""
    path = next((path for path in adapters if path.endswith(kind)), None)
    if path is None:  # left out on purpose, or section 5 would have stopped
        print(f"{kind}: no adapter")
        return
    x = np.random.default_rng(0).normal(size=(3, width(*adapters[path])))
    parts = [x @ np.float64(a) @ np.float64(b) for a, b in factors(*adapters[path]).values()]
    (a, b), ours = adapters[path], np.concatenate(parts, axis=-1)
    theirs = np.einsum(einsum, x.reshape(3, *a.shape[:-1]), np.float64(a), np.float64(b))
    np.testing.assert_allclose(ours, theirs.reshape(3, -1), rtol=1e-9, atol=1e-12)
    print(f"{path}: A {a.shape}, B {b.shape} -> "
          + ", ".join(f"{name} {second.shape[1], first.shape[0]}"
                      for name, (first, second) in factors(a, b).items()) + ", proved")


proof("q_einsum", q_factors, "td,dr,rnh->tnh", adapters, lambda a, b: a.shape[0])

# %% [markdown]
# ### 6.2 Key and value, fused: `kv_einsum`
# `A (D, r)`, `B (r, 2, K, H)`. One `A` serves both; `B` holds the keys' half at index 0 of its
# second axis, the values' at index 1. So `k_proj` and `v_proj` share `A` and differ in `B`. (A
# PEFT run would have trained two independent `A`s: Tunix's adapter has `D·r` fewer numbers per
# layer.)

# %%
def kv_factors(a, b):
    rank = b.shape[0]
    return {"k_proj": (a, b[:, 0].reshape(rank, -1)), "v_proj": (a, b[:, 1].reshape(rank, -1))}


proof("kv_einsum", kv_factors, "td,dr,rckh->tckh", adapters, lambda a, b: a.shape[0])

# %% [markdown]
# ### 6.3 Key alone: `k_einsum`
# In the full-attention layers of the 31B (and of the tiny model) the values *are* the keys'
# projection: there is no `v_proj` in the base, and one matrix to change. `A (D, r)`, `B (r, K, H)`
# with the smaller number of key heads and the larger head size of these layers.

# %%
def k_factors(a, b):
    return {"k_proj": (a, b.reshape(b.shape[0], -1))}


if any(target.kind == "k_einsum" for target in targets):
    proof("k_einsum", k_factors, "td,dr,rkh->tkh", adapters, lambda a, b: a.shape[0])

# %% [markdown]
# ### 6.4 Output: `attn_vec_einsum`
# The mirror image: here the *input* has heads. `A (N, H, r)`, `B (r, D)`; `N` and `H` of `A` fold
# into the input axis of `o_proj`.

# %%
def o_factors(a, b):
    return {"o_proj": (a.reshape(-1, a.shape[-1]), b)}


proof("attn_vec_einsum", o_factors, "tnh,nhr,rd->td", adapters, lambda a, b: math.prod(a.shape[:2]))

# %% [markdown]
# ### 6.5 MLP: `gate_proj`, `up_proj`, `down_proj`
# Plain matrices on both sides, and the same names.

# %%
def mlp_factors(kind):
    return lambda a, b: {kind: (a, b)}


FACTORS = {"q_einsum": q_factors, "kv_einsum": kv_factors, "k_einsum": k_factors,
           "attn_vec_einsum": o_factors,
           **{kind: mlp_factors(kind) for kind in ("gate_proj", "up_proj", "down_proj")}}
proof("down_proj", FACTORS["down_proj"], "tf,fr,rd->td", adapters, lambda a, b: a.shape[0])


def no_change(targets, prefix):
    """A plan that adds nothing: for matrices that are only to be dequantised."""
    return {f"{prefix}{name}.weight": (np.zeros((inputs, 1), np.float32),
                                       np.zeros((1, outputs), np.float32))
            for target in targets for name, (outputs, inputs) in target.names.items()}


def plan_merge(targets, adapters, prefix):
    """{name of a tensor in the base: (A [in, r], B [r, out])}, every adapter exactly once."""
    plan = {}
    for target in targets:
        factors = FACTORS[target.kind](*adapters[target.path])
        for name in target.names:
            plan[f"{prefix}{name}.weight"] = factors[name.rpartition(".")[2]]
    return plan

# %% [markdown]
# ## 7. Add, and round once
# The delta is computed and added in float32, and the sum is rounded to the base's type a single
# time. We never hold a whole matrix in float32: `add_delta` takes a block of rows. `jax.jit` makes
# one compiled program of its lines when it is first called with arrays of some shape (the product,
# the addition, the rounding, and three sums: how large are base, delta and rounding error?).
# `precision="highest"` asks for true float32 products; a TPU would round their inputs to bfloat16.
# bfloat16 has 8 significant bits, so rounding once moves a value by at most 2⁻⁸ = 0.39 % of itself.

# %%
@jax.jit
def add_delta(rows, a, b, scale):
    """rows [m, in] + scale · (a [in, r] b [r, m])ᵀ; also the squared norms of what went in."""
    base = rows.astype(jnp.float32)
    delta = scale * jnp.einsum("ir,rm->mi", a, b, precision="highest")
    merged = (base + delta).astype(rows.dtype)
    lost = merged.astype(jnp.float32) - (base + delta)
    return merged, jnp.stack([jnp.vdot(part, part) for part in (base, delta, lost)])


plan = plan_merge(targets, adapters, prefix)
name = f"{prefix}layers.0.self_attn.k_proj.weight"
a, b = plan[name][0], plan[name][1][:, :64]  # its first 64 rows, on a random base
rows = np.random.default_rng(0).normal(size=(64, len(a))).astype(ml_dtypes.bfloat16)
merged, _ = add_delta(rows, a, b, scale)
exact = rows.astype(np.float64) + scale * (a.astype(np.float64) @ b.astype(np.float64)).T
error = np.abs(np.asarray(merged, np.float64) - exact) / np.maximum(np.abs(exact), 0.01)
print(f"{name}: largest relative error {error.max():.5f}, at most {2**-8:.5f}")
assert error.max() < 2**-8 * 1.01

# %% [markdown]
# What is left is handling files, `weights.rewrite`. Every shard is copied from its first byte to
# its last, tensor by tensor. Header, order and layout stay as they are; tensors without an adapter
# (embedding, norms, the whole vision tower, which reads images) pass through untouched, and so do
# config, tokenizer, chat template and index. Of the others, `change` gets a few rows at a time.
# While one block is computed, other threads hash and write the previous one, and never more than
# one waits: that bounds the memory. Everything goes into a hidden neighbour, `.merged.partial`, is
# forced to disk and renamed at the very end: a folder called `merged/` is a finished one, whatever
# happens.

# %%
def merge_model(base, out, plan, scale, block_bytes, as_trained=lambda rows: rows):
    """Write base + delta as a complete model folder; returns (files, tensors, norms)."""
    norms = {name: np.zeros(3) for name in plan}

    def change(name, rows, first):
        a, b = plan[name]
        merged, sums = add_delta(as_trained(rows), a, b[:, first:first + len(rows)], scale)
        norms[name] += sums
        if not np.isfinite(norms[name]).all():
            raise helpers.UserError(f"{base}: {name} has NaN or Inf. Download it again.")
        return np.asarray(merged)

    files, hashes = weights.rewrite(base, out, plan, change, block_bytes)
    return files, hashes, {name: np.sqrt(sums).tolist() for name, sums in norms.items()}

# %% [markdown]
# Merging takes minutes at 31B, so a second run must not repeat it, and must not trust what it finds
# either. `merge.json` says what the result was made from (step, scale, and hashes of adapters, base
# and recipe) and holds a hash of every file. If it was made from something else, all is made again;
# if a file is missing or has other bytes, its folder is. (A large file is hashed once
# per state: `cache/hashes.json` remembers hash, size, times and inode, also for 05 and 07.)

# %%
def digest(value):
    """SHA-256 of anything that JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def to_make(record, inputs, wanted):
    """{folder: why it must be made}. `wanted`: {folder: name of its hashes in the record}."""
    old = record.get("inputs", {})
    if old != inputs:
        changed = [key for key in {**old, **inputs} if old.get(key) != inputs.get(key)]
        return dict.fromkeys(wanted, f"other {', '.join(changed)}" if record else "not there yet")
    found = {}
    for folder, key in wanted.items():
        bad = weights.verify(helpers.run_dir(folder), record[key])
        if bad or not record[key]:
            what = ", ".join(f"{name} {what}" for name, what in bad.items())
            found[folder] = what or "not asked for before"
    return found


# %%
record_path = helpers.run_dir("merge.json")
out = helpers.run_dir("merged")
adapter_hashes = {path: hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest()
                  for path, (a, b) in adapters.items()}
inputs = {"step": step, "scale": scale, "adapters": digest(adapter_hashes), "base": base_sha256,
          "recipe": digest(recipe)} | ({"into": cfg.into} if storage else {})
wanted = {"merged": "files", "adapter": "adapter_files"}
if storage and cfg.into == "dequantized":
    plan |= no_change(alone, prefix)  # without adapters, but quantised like the others
    wanted |= {"dequantized": "base_files"} if cfg.write_base else {}
wanted |= {"merged_text": "text_files"} if cfg.text_only else {}
record = read_leftover(record_path, {})
todo = to_make(record, inputs, wanted)
if not todo:
    print(f"{out} is current (same checkpoint, base and recipe, every file whole): nothing to do")
for name, why in todo.items():
    print(f"making {name}/: {why}")

# %% [markdown]
# If the result was made from something else, `merge.json` goes before anything is touched: it comes
# back when all is done, so what it describes is finished.

# %%
if record.get("inputs") != inputs:
    record_path.unlink(missing_ok=True)
    shutil.rmtree(helpers.run_dir("merged_text"), ignore_errors=True)
    record = {"inputs": inputs, "step": step, "scale": scale, "base": str(base), "prefix": prefix,
              "recipe": recipe, "bytes": total, "adapters": adapter_hashes, "text_files": {},
              "base_files": {}, "adapter_base": recipe["base_path"]}
if "merged" in todo:
    with helpers.phase(f"merging {len(plan)} of {len(tensors)} tensors into {out}"):
        record["files"], record["tensors"], norms = merge_model(
            base, out, plan, scale, cfg.block_mib << 20, as_trained)
    record["norms"] = [dict(zip(("tensor", "base", "delta", "rounding"), (name, *norm)))
                       for name, norm in norms.items()]
if "dequantized" in todo:
    record["adapter_base"] = str(helpers.run_dir("dequantized"))
    with helpers.phase("writing dequantized/, the base that was trained on"):
        record["base_files"], *_ = merge_model(
            base, helpers.run_dir("dequantized"), no_change(targets + alone, prefix), scale,
            cfg.block_mib << 20, as_trained)
pd.DataFrame([(path.name, f"{path.stat().st_size:,}") for path in sorted(out.iterdir())],
             columns=["file in merged/", "bytes"]).set_index("file in merged/")

# %% [markdown]
# What this costs on a checkpoint five layers deep and as wide as the 31B (5.1 GB, three shards,
# largest tensor 231 MB, rank 64), measured with `tests/benchmarks/bench_merge.py`: one run, side by
# side, on two CPU cores with nothing else running, 21 November 2026. Memory is anonymous memory
# (what the program itself holds, without file pages), adapters not counted:
#
# | | time | time / copy | peak memory |
# |---|---|---|---|
# | copy the same files with fsync | 17.9 s | 1 | 0.04 GB |
# | this notebook | 37.5 s | 2.1 | 0.35 GB |
# | load everything, add, save one file (as the published script) | 83.5 s | 4.7 | 10.4 GB |
# | PEFT `merge_and_unload` | 91.6 s | 5.1 | 6.6 GB |
#
# The notebook's peak does not depend on the number of layers; that of the last two grows with the
# model. By bytes, the 31B's 62.5 GB take 12 times as long: about 8 minutes (extrapolated).
#
# ## 8. The adapter alone, in PEFT's format
# Two gigabytes at 31B (rank 64, float32) instead of a second model of 62.5: the
# [PEFT](https://github.com/huggingface/peft) format is two matrices per HF module, `lora_A [r, in]`
# and `lora_B [out, r]`, with a small config. `k_proj` and `v_proj` get the shared `A` each. The
# pattern of `target_modules` names the language model's layers only: the vision tower has a
# `q_proj`, too, of a class that PEFT refuses.
#
# One line is special. Where `V = K`, there is no `v_proj`, yet we store the `k_proj` adapter a
# second time under that name. vLLM loads such a layer's `k_proj` weight into the K and the V part
# of one fused matrix, but an adapter for `k_proj` reaches the K part only; the copy supplies the V
# part. PEFT finds no such module and ignores it. `tests/test_merge.py` fails on the day vLLM no
# longer needs this.

# %%
def write_adapter(out, targets, adapters, recipe, prefix, base_name=""):
    """The adapters as PEFT stores them; returns {file: sha256}."""
    entries, outer = {}, f"base_model.model.{prefix}"
    for target in targets:
        factors = FACTORS[target.kind](*adapters[target.path])
        if target.kind == "k_einsum":
            factors["v_proj"] = factors["k_proj"]  # for vLLM, see above
        block = next(iter(target.names)).rpartition(".")[0]
        for module, (a, b) in factors.items():
            for letter, matrix in (("A", a.T), ("B", b.T)):
                entries[f"{outer}{block}.{module}.lora_{letter}.weight"] = (
                    "F32", matrix.shape, [matrix])
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": recipe["rank"],
              "lora_alpha": recipe["alpha"], "lora_dropout": 0.0, "bias": "none",
              "base_model_name_or_path": base_name or recipe["base_model"], "inference_mode": True,
              "target_modules": architecture.PEFT_TARGETS}
    if recipe.get("base_dtype", "bfloat16") != "bfloat16":  # PEFT names what it does not know
        config["quantized_base"] = {key: recipe[key] for key in ("base_dtype", "tile_size")}
    if recipe.get("partial"):  # else PEFT would make random adapters for what was left out
        names = sorted(re.escape(name) for target in targets for name in target.names)
        config["target_modules"] = rf"model\.(language_model\.)?({'|'.join(names)})"
    with helpers.atomic_dir(out) as folder:
        weights.write_tensors(folder / "adapter_model.safetensors", entries)
        helpers.write_json(folder / "adapter_config.json", config)
    return {file.name: helpers.sha256_file(file) for file in sorted(out.iterdir())}


# %%
adapter_out = helpers.run_dir("adapter")
if "adapter" in todo:
    record["adapter_files"] = write_adapter(
        adapter_out, targets, adapters, recipe, prefix,
        record["adapter_base"] if "dequantized" in wanted else "")
names = list(weights.read_header(adapter_out / "adapter_model.safetensors").items())
print(f"{len(names)} matrices; those of the last layer's attention:")
for name, tensor in [item for item in names if f"layers.{targets[-1].layer}.self" in item[0]]:
    print(f"  {name.removeprefix('base_model.model.'):58} {tensor.shape}")

# %% [markdown]
# The way of one adapter, drawn from what was just planned and written: the pair of the last layer
# with an adapter for its keys, which needs the most care. Above, it ends in the weights; below, it
# stays a pair of its own, and a server adds its product for every token.

# %%
def draw_path(target, pair, steps, scale, name, source):
    """One adapter's way: checkpoint, plain matrices, then merged weights or PEFT pairs, vLLM."""
    def lines(title, shapes):
        return "\n".join([title, *(f"{what}   {'×'.join(map(str, shape))}"
                                   for what, shape in shapes.items())])
    plain, matrices, peft = steps
    folded = {f"{module}: {letter}": matrix.shape for module, both in plain.items()
              for letter, matrix in zip("AB", both)}
    stored = {letter: matrix.shape for letter, matrix in zip("AB", pair)}
    boxes = {  # text, place of its middle, colour
        "orbax": (lines(f"train/checkpoints/\n{target.path}", stored), (0.10, 0.5), style.ORANGE),
        "plain": (lines("plain matrices", folded), (0.36, 0.5), style.ORANGE),
        "merged": (lines("merged/", matrices), (0.645, 0.82), style.BLUE),
        "peft": (lines("adapter/", peft), (0.645, 0.22), style.GREEN),
        "serve": ("vLLM, every engine:\nplain weights", (0.91, 0.82), style.BLUE),
        "lora": (f"vLLM on CPU or GPU,\n--enable-lora:\nbase + {scale:g} · x A B", (0.91, 0.22),
                 style.GREEN)}
    copied = ",\nk stored as v, too" if set(peft) - {f"{m}.lora_{x}" for m in plain for x in "AB"} \
        else ""
    arrows = {("orbax", "plain"): "restore,\nfold axes", ("merged", "serve"): "",
              ("plain", "merged"): f"W + {scale:g} · (A B)ᵀ,\nrounded once",
              ("plain", "peft"): f"transpose{copied}", ("peft", "lora"): ""}
    fig, ax = style.figure(10, 3.8)
    drawn = {key: ax.text(*place, text, ha="center", va="center", fontsize=8.5, linespacing=1.5,
                          bbox=dict(boxstyle="round,pad=0.5", facecolor="white", edgecolor=colour))
             for key, (text, place, colour) in boxes.items()}
    for (start, end), note in arrows.items():
        (x0, y0), (x1, y1) = boxes[start][1], boxes[end][1]
        ax.annotate("", (x1, y1), (x0, y0), arrowprops=dict(
            arrowstyle="-|>", color=style.GREY, patchA=drawn[start].get_bbox_patch(),
            patchB=drawn[end].get_bbox_patch(), shrinkA=2, shrinkB=2))
        ax.text((x0 + x1) / 2 - 0.02 * (y0 != y1), (y0 + y1) / 2 + (0.1 if y1 >= y0 else -0.13),
                note, fontsize=8, color=style.GREY, ha="center", va="center")
    ax.set(xlim=(0, 1), ylim=(0, 1), title=f"The way of one adapter: {target.path}")
    ax.axis("off")
    style.finish(fig, name, source)

# %%
target = ([target for target in targets if target.kind[0] == "k"] or targets)[-1]
plain = FACTORS[target.kind](*adapters[target.path])
block = next(iter(target.names)).rpartition(".")[0]
matrices = {f"{name.rpartition('.')[2]} ({tensors[f'{prefix}{name}.weight'].dtype})": shape
            for name, shape in target.names.items()}
stored = {*plain, "v_proj"} if "k_proj" in plain else {*plain}
peft = {name.partition(f"{block}.")[2].removesuffix(".weight"): tensor.shape
        for name, tensor in names if f"{block}." in name and name.split(".")[-3] in stored}
draw_path(target, adapters[target.path], (plain, matrices, peft), scale, "04_path",
          f"computed from the checkpoint, {recipe['base_model']} and adapter/")

# %% [markdown]
# ## 9. A text-only copy for transformers
# The tensor names of the real checkpoint start with `model.language_model.`, and so do ours. vLLM
# knows this form; transformers' text class, `Gemma4ForCausalLM`, does not: it fills the model with
# random weights and only warns. `merged_text/` holds the same bytes under the names that class
# expects, without vision tower, so that `AutoModelForCausalLM` loads it without a warning.

# %%
def export_text(merged, out, prefix):
    """The language model of `merged` under transformers' own names; returns {file: sha256}."""
    config, files, index, size = architecture.read_config(merged), {}, {}, 0
    text = {**config.get("text_config", config), "architectures": ["Gemma4ForCausalLM"]}
    text["dtype"] = config.get("dtype") or text.get("dtype")
    for name, tensor in weights.open_model(merged).items():
        if name.startswith(prefix):
            new = "model." + name.removeprefix(prefix)
            entries = files.setdefault(tensor.file.name, {})
            entries[new] = (tensor.dtype, tensor.shape, [tensor.data()])
            index[new], size = tensor.file.name, size + tensor.stop - tensor.start
    with helpers.atomic_dir(out) as folder:
        for file, entries in files.items():
            weights.write_tensors(folder / file, entries)
        helpers.write_json(folder / "config.json", text)
        if (merged / "model.safetensors.index.json").exists():
            helpers.write_json(folder / "model.safetensors.index.json",
                               {"metadata": {"total_size": size}, "weight_map": index})
        for side in ("generation_config.json", "tokenizer.json", "tokenizer_config.json",
                     "chat_template.jinja"):
            if (merged / side).exists():
                shutil.copyfile(merged / side, folder / side)
    return {file.name: helpers.sha256_file(file) for file in sorted(out.iterdir())}


if "merged_text" in todo:
    record["text_files"] = export_text(out, helpers.run_dir("merged_text"), prefix)
print("merged_text/:", ", ".join(record["text_files"]) or "not asked for")

# %% [markdown]
# ## 10. `merge.json`: what was added to what
# The record names the base, the step and the recipe, and holds a SHA-256 of every file, of every
# base tensor, every adapter pair and every merged tensor. Notebook 05 compares the files against
# it before it serves them, which matters when they have travelled through a bucket.

# %%
if todo:
    helpers.write_json(record_path, record)
changed = sum("merged" in entry for entry in record["tensors"].values())
print(f"{record_path}: {len(record['tensors'])} tensors, {changed} merged, "
      f"{len(record['tensors']) - changed} untouched, {len(record['files'])} files")

# %% [markdown]
# ## 11. Read it back
# Trust nothing that was only written. Every file of `merged/` is read back and must hash to what
# `merge.json` says. Then we take a sample of tensors. An untouched one must have the bytes of the
# base. A merged one must be the correctly rounded sum, recomputed here in float64, by another
# library: at most half a step of its type away (beyond float32's own error in the sum).

# %%
if bad := weights.verify(out, record["files"]):
    raise helpers.UserError(f"{out} does not hold what was written ({bad}): a failing disk, or "
                            "something else writes there.")
print(f"{len(record['files'])} files: every byte as written")

# %%
def recompute(base, merged, plan, scale, samples, as_trained=lambda rows: rows):
    """Check a sample of tensors of `merged`; returns the largest error in steps of the dtype."""
    before, after = weights.open_model(base), weights.open_model(merged)
    assert list(before) == list(after), "names or order changed"
    touched = sorted(plan, key=digest)[:samples]
    others = [name for name in before if name not in plan][:samples]
    assert all(np.array_equal(before[name].data(), after[name].data()) for name in others)
    worst = 0.0
    for name in touched:
        old, new = before[name].array(), after[name].array()
        a, b = plan[name]
        for start in range(0, len(old), 1024):  # in slices, to stay small
            part = slice(start, start + 1024)
            wide = b[:, part].T.astype(np.float64)
            ours = as_trained(old[part]).astype(np.float64)
            exact = ours + scale * (wide @ a.T)
            step = np.spacing(np.abs(exact).astype(np.float32)) * 2.0 ** (
                23 - ml_dtypes.finfo(new.dtype).nmant)
            bound = np.abs(ours) + scale * np.abs(wide) @ np.abs(a.T)
            in_float32 = (len(b) + 2) * 2.0**-24 * bound
            error = np.abs(new[part].astype(np.float64) - exact) - in_float32
            worst = max(worst, float((error / step).max()))
    return len(touched), len(others), worst


merged_count, same_count, worst = recompute(base, out, plan, scale, cfg.samples, as_trained)
assert worst <= 0.5, worst
print(f"{merged_count} merged tensors: at most {worst:.4f} steps from the exact sum\n"
      f"{same_count} untouched tensors: every byte as in the base")

# %% [markdown]
# ## 12. What the fine-tune touched
# The norms that `add_delta` summed up on the way give two numbers per matrix. `delta %` is the size
# of the change relative to its matrix, `‖ΔW‖ / ‖W‖`. `rounding %` is what rounding the sum to the
# base's type has cost, relative to the change.

# %%
def norm_table(record):
    """One row per merged tensor: layer, kind, delta/base and rounding/delta in percent."""
    table = pd.DataFrame(record["norms"])
    parts = table["tensor"].str.extract(r"layers\.(?P<layer>\d+)\.\w+\.(?P<kind>\w+)_proj")
    table["layer"], table["kind"] = parts["layer"].astype(int), parts["kind"]
    table["delta %"] = 100 * table["delta"] / table["base"]
    table["rounding %"] = 100 * table["rounding"] / table["delta"].clip(lower=1e-30)
    return table


changes = norm_table(record)
display(changes.groupby("kind", sort=False)[["delta %", "rounding %"]].agg(["min", "mean", "max"])
        .round(2))

# %% [markdown]
# Changes of 20 to 50 % are large: the tiny base has never seen an instruction and is trained at a
# high rate. Rounding then costs 0.17 % of a matrix's norm, little beside the delta. A gentler
# fine-tune fares worse, because the base's weights are bfloat16 numbers already: whatever moves one
# by less than half a step is rounded back, and lost. So we shrink the delta of one matrix and look
# at what arrives.

# %%
def if_smaller(old, delta, shares):
    """What would arrive of a delta in the base's type, had the fine-tune been smaller."""
    before, rows = old.astype(np.float64), []
    for wanted in (share * delta for share in shares):
        arrived = (before + wanted).astype(old.dtype).astype(np.float64) - before
        rows.append({"delta %": np.linalg.norm(wanted) / np.linalg.norm(before),
                     "rounding %": np.linalg.norm(arrived - wanted) / np.linalg.norm(wanted),
                     "arrives %": np.vdot(arrived, wanted) / np.vdot(wanted, wanted),
                     "weights unchanged %": (arrived == 0).mean()})
    return (100 * pd.DataFrame(rows)).style.hide(axis="index").format(precision=2)


name = f"{prefix}layers.0.self_attn.q_proj.weight"
(a, b), rows = plan[name], tensors[name].array()
delta = scale * (a.astype(np.float64) @ b[:, :512].astype(np.float64)).T  # its first 512 rows
display(if_smaller(rows[:512], delta, (1, 1 / 30, 1 / 100, 1 / 300)))

# %% [markdown]
# `arrives %` is the part of the change that points where it should. At a delta of one percent
# rounding adds noise, but all of the change arrives; at a tenth of a percent about half of it is
# gone. We add once, in float32, which gives the nearest bfloat16 weights there are, and keep the
# float32 adapter beside them. If `delta %` is below one percent in your run, compare the merged
# model with base + adapter (05, section 11) before you serve it.
#
# The same sizes as a map: one row per kind, one column per layer, grey where a layer has no such
# matrix.

# %%
def draw_changes(changes, name, source):
    """Heat map of the relative size of the delta, kind by layer."""
    kinds = [kind for kind in ("q", "k", "v", "o", "gate", "up", "down")
             if kind in set(changes["kind"])]
    grid = changes.pivot(index="kind", columns="layer", values="delta %").reindex(kinds)
    fig, ax = style.figure(max(6.0, 1.5 + 0.16 * grid.shape[1]), 3.4)
    ax.set_facecolor("#D9D9D9")
    image = ax.imshow(grid, aspect="auto", cmap="viridis", vmin=0)
    if grid.shape[1] <= 12:
        for (row, column), value in np.ndenumerate(grid.to_numpy()):
            if np.isfinite(value):
                light = value > 0.6 * np.nanmax(grid)
                ax.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=9,
                        color=style.BLACK if light else "white")
    ticks = range(0, grid.shape[1], 1 if grid.shape[1] <= 12 else 6)
    ax.set(yticks=range(len(kinds)), yticklabels=[f"{kind}_proj" for kind in kinds], xticks=ticks,
           xticklabels=[grid.columns[tick] for tick in ticks], xlabel="layer",
           title="Size of the change relative to its matrix")
    ax.grid(False)
    fig.colorbar(image, ax=ax, label="‖ΔW‖ / ‖W‖, %")
    style.finish(fig, name, source)


draw_changes(changes, "04_delta", f"measured, {recipe['base_model']}, step {record['step']}, "
                                  f"rank {recipe['rank']}, alpha {recipe['alpha']:g}")

# %% [markdown]
# ## 13. Do all engines agree?
# This notebook loads no model, so the proof that counts lives in the tests: `./run_tests.sh --all`
# runs `tests/test_merge.py`. Ten prompts of 100 tokens go through five paths, and we compare the
# log-probability of every token of the vocabulary at every position: Tunix with adapters, HF with
# the merged folder, HF with base and PEFT adapter, vLLM with the merged folder, vLLM with base and
# adapter (`--enable-lora`).
#
# Measured by that test on 21 November 2026 (tiny base, random `A` and `B`, 990 positions × 1,280
# tokens, two CPU cores; natural logarithms):
#
# | max (mean) of \|Δ log-probability\| | all in float32, against Tunix with adapters | all in bfloat16, against HF merged |
# |---|---|---|
# | Tunix with adapters | 0 | 0.44 (0.040) |
# | HF, merged | 2.2e-5 (2.2e-6) | 0 |
# | HF, base + PEFT adapter | 2.7e-5 (2.1e-6) | 0.47 (0.033) |
# | vLLM, merged | 2.3e-5 (2.3e-6) | 0.41 (0.034) |
# | vLLM, base + adapter | 2.4e-5 (2.3e-6) | 0.39 (0.037) |
# | vLLM, base + adapter without the copied `v_proj` | **1.4** (0.074) | **1.3** (0.086) |
# | HF, base alone | 13 (1.5) | 13 (1.5) |
# | the base alone, HF against vLLM | | (0.034) |
#
# In float32 the five paths are one model. In bfloat16 their means differ by about as much as two
# engines differ on the untouched base: the noise of the arithmetic, not of the merge. vLLM is its
# CPU build here, whose models are PyTorch; on a TPU it runs a JAX model of its own, which this test
# does not reach.
#
# ## 14. On the TPU machines
# For the 31B, base (62.5 GB) and `merged/` (as much again) live in `/dev/shm`, which holds 224 GB
# on a v5p-8 (01, section 2). The merge itself holds the adapters, 1.9 GB at rank 64, and the
# 0.35 GB of section 7. Training and serving are two machines, so the result travels through a
# bucket in their region (the script of notebook 01 copies the run there every five minutes; this is
# the same by hand):
#
# ```bash
# # on the v5p-8, after notebook 03
# RUN_DIR=/dev/shm/run SIZE=31b ./run_all.sh 04
# gcloud storage rsync --recursive /dev/shm/run gs://BUCKET/run
# ```
#
# Section 5 of notebook 05 fetches it on the v6e-8, where vLLM serves `merged/`, with the base's own
# nested config and vision tower; serving an adapter without merging is for CPU and GPU.
#
# ## 15. Sharing it
# A model without its history is of little use to others. The card says what it was made from and
# how, and, once notebook 07 has run, how well it does; run this cell again then. It is written to
# `model_card.md`. Nothing leaves this machine unless `Settings.upload` names a repository on the
# Hugging Face hub (it is made private; `HF_TOKEN` needs write access).

# %%
def model_card(record, data, evaluation):
    """The README.md of the published model; `evaluation` is 07's comparison, or None."""
    recipe = record["recipe"]
    licence = " (CC BY-SA 4.0)" if "CodeV" in data["source"] else ""
    lines = ["---", f"base_model: {recipe['base_model']}", "license: apache-2.0",
             "tags: [verilog, lora]", "---", "", f"# {recipe['base_model']}, tuned for Verilog", "",
             f"- **Base**: {recipe['base_model']}, Apache-2.0, and so are these weights.",
             f"- **Data**: {data['source']}{licence}, {data['train_examples']:,} examples, "
             f"{data['trained_tokens']:,} trained tokens, reasoning {data['reasoning']}.",
             f"- **Training**: LoRA rank {recipe['rank']}, alpha {recipe['alpha']:g} on "
             f"{recipe['n_modules']} modules, {record['step']} steps, learning rate "
             f"{recipe['learning_rate']:g}; added to the weights in float32, rounded once."]
    for label in ("base", "tuned") if evaluation else ():
        scores, plan = evaluation[label], evaluation["plan"]
        low, high = scores["pass@1_interval"]
        lines.append(f"- **Evaluation**, {label}: pass@1 {scores['pass@1']:.3f} [{low:.3f}, "
                     f"{high:.3f}] on {scores['n_problems']} problems, {plan['n']} answers each, "
                     f"temperature {plan['temperature']:g}.")
    return "\n".join(lines if evaluation else [*lines, "- **Evaluation**: not run yet."]) + "\n"


# %%
evaluation = helpers.run_dir("eval", "comparison.json")
data = helpers.read_json(helpers.require(helpers.run_dir("data", "meta.json"), "02_data.py"))
card = model_card(record, data, helpers.read_json(evaluation) if evaluation.exists() else None)
helpers.write_text(helpers.run_dir("model_card.md"), card)
print(card)
if cfg.upload:
    from huggingface_hub import HfApi
    hub = HfApi()
    hub.create_repo(cfg.upload, private=True, exist_ok=True)
    hub.upload_folder(repo_id=cfg.upload, folder_path=out)
    hub.upload_file(repo_id=cfg.upload, path_in_repo="README.md", path_or_fileobj=card.encode())

# %% [markdown]
# ## Recap
#
# | We made | from | with the guarantee |
# |---|---|---|
# | `merged/` | base + `(alpha / r) · (A B)ᵀ` | float32 sum, one rounding; every other byte is the base's |
# | `adapter/` | the adapters alone, float32 | loads in PEFT and in vLLM, same log-probabilities up to rounding |
# | `merged_text/` | `merged/`, renamed | loads in `AutoModelForCausalLM` without a warning |
# | `merge.json` | hashes of all of it | a copy can be checked; a second run is free |
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `has no finished step` | a step that was never saved, or removed by `max_to_keep` | set `Settings.step` to one of the steps the message lists |
# | `... has no adapter` | the LoRA pattern in 03 missed a module, as the published one misses `k_einsum` | correct the pattern, train again; a merge would lose it silently |
# | `A is (...), rank 64 needs (...)` | checkpoint and recipe come from two runs | use the `train/` folder of one run |
# | `is damaged or cut short` | an interrupted download | download the named file again |
# | `GB free, the merged model needs` | the disk is too small for a second copy | `RUN_DIR=/dev/shm/run` |
# | HF answers nonsense from `merged/`, with a warning that weights were `newly initialized` | the text class wants other tensor names | load `merged_text/`, or pass `key_mapping={"^model.language_model.": "model."}` |
# | vLLM with `--enable-lora` differs from the merged model | an adapter without the copied `v_proj` | use `adapter/` as written here |
#
# ### Exercises
# 1. Half a fine-tune: merge with `scale` times 0.5 into another folder. Which pass rate does
#    notebook 07 give it?
#
# <details><summary>Solution</summary>
#
# ```python
# half = helpers.run_dir("merged_half")
# _ = merge_model(base, half, plan, scale / 2, cfg.block_mib << 20)
# print(sorted(path.name for path in half.iterdir()))
# ```
#
# In 07, name this folder as another model: `models["half"] = helpers.run_dir("merged_half")`,
# before section 9. LoRA is linear in `scale`, the network is not: expect something between base and
# tuned, rarely the middle.
# </details>
#
# 2. How much of `ΔW` is lost if `A B` is rounded to bfloat16 before it is added?
#
# <details><summary>Solution</summary>
#
# ```python
# exact = rows[:512].astype(np.float64) + delta
# for label, change in (("once", delta), ("twice", delta.astype(ml_dtypes.bfloat16))):
#     found = (rows[:512] + change.astype(np.float32)).astype(ml_dtypes.bfloat16)
#     error = found.astype(np.float64) - exact
#     print(label, f"{np.linalg.norm(error) / np.linalg.norm(delta):.3%} of the delta")
# ```
#
# Little more: the sum is rounded either way, and the delta's own rounding (0.17 % of it) adds to
# that. What hurts is many such additions in a row.
# </details>
#
# Next: [05 · Serving the fine-tuned model with vLLM](05_serve_vllm.ipynb)
