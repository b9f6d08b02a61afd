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
# How do a few small matrices become part of a model of 62 GB, and how do you know that nothing was
# lost on the way? You merge one matrix by hand in fifteen lines, learn what is different about the
# others, and then write a folder that vLLM serves as it is. The same adapters also go into the
# format of PEFT, Hugging Face's adapter library.
#
# | | |
# |---|---|
# | **Needs** | A CPU. No TPU, no GPU, and no model in memory: the 31B wants room for 125 GB of files (base and result) and about 2.5 GB of memory (computed; 1.9 of it adapters) |
# | **Reads** | `train/checkpoints/<step>/` and `train/recipe.json` from notebook 03, `data/meta.json` from 02, the base model's safetensors |
# | **Writes** | `merged/` (a model folder), `adapter/` (PEFT), `merged_text/` (optional), `merge.json` (hashes of every tensor and file), `model_card.md` |
# | **Time and cost** | tiny: under a minute. 31B: one write and two reads of 62 GB, about 8 minutes (extrapolated, section 7); no chip is used, so the TPU may already be given back |
#
# The outputs shown are those of the tiny run on two CPU cores.

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · **04 merge** · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
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

# %%
import hashlib
import math
import shutil
from dataclasses import dataclass, replace

os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU on this machine stays free for others
import jax
import ml_dtypes
import numpy as np
import pandas as pd

from helpers import pictures, remote, weights
from tables import architecture
from helpers.merge import (FACTORS, add_delta, card_sources, check, check_hub_name, check_room,
                           export_text, if_smaller, k_factors, kv_factors, merge_model,
                           mlp_factors, model_card, no_change, norm_table, o_factors, plan_merge,
                           q_factors, recompute, restore_adapters, split_targets, to_make,
                           write_adapter)
from helpers.run import differences, digest, read_leftover, stamp

# %% [markdown]
# ## 1. One matrix, by hand
# Almost everything that matters here (rank, alpha, which matrices, which base) was decided in
# notebook 03 and travels in `train/recipe.json`. These settings are what is left.

# %%
@dataclass(frozen=True)
class Settings:
    step: int = 0            # checkpoint to merge; 0: the one 03 finished with
    base: str = ""           # another copy of the base model; empty: where 03 found it
    block_mib: int = 8       # float32 working block: memory does not grow with the model
    samples: int = 24        # tensors that are re-read and recomputed at the end
    into: str = "dequantized"  # of a quantised run: the base it multiplied with, or "bfloat16"
    write_base: bool = False   # and write that base, dequantized/: the one the adapter belongs to
    text_only: bool = False  # also write merged_text/, for transformers' Gemma4ForCausalLM
    ask: bool = False        # load merged/ on the CPU and ask it; 05 does so with a server
    upload: str = ""         # a hub repository, "you/name", to publish merged/ to; empty: none
    hub_base: str = ""       # the base's name there, if 02's was a copy: "google/gemma-4-31B-it"


FULL = Settings()
E2B = FULL
TINY = replace(FULL, text_only=True, write_base=True, ask=True)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# Notebook 03 left, for each large matrix, a pair of small ones: `A`, which narrows the layer's input
# to `r` numbers (`r` is the rank), and `B`, which widens them to the output. The checkpoint is
# written by Orbax, a folder per step, with metadata that says what is inside. So we restore plain
# NumPy arrays: no model is built, and it does not matter over how many chips they were split.

# %%
recipe = helpers.read_json(helpers.require(helpers.run_dir("train", "recipe.json"), "03_train.py"))
helpers.same_size(recipe["size"], "03_train.py")
if cfg.upload:
    check_hub_name(cfg.hub_base or recipe["base_model"])
scale = recipe["alpha"] / recipe["rank"]
folder = recipe.get("checkpoints", "train/checkpoints")  # gs://..., or below RUN_DIR
folder = folder if "://" in folder else helpers.run_dir(folder).resolve()
step, adapters, notes = restore_adapters(folder, cfg.step or recipe["final_step"])
print(f"{recipe['base_model']}, rank {recipe['rank']}, alpha {recipe['alpha']:g}, step {step}: "
      f"{len(adapters)} pairs, {sum(a.nbytes + b.nbytes for a, b in adapters.values()):,} bytes")
for path, (a, b) in list(adapters.items())[:6]:
    print(f"  {path:32} A {str(a.shape):16} B {b.shape}")

# %% [markdown]
# These are the six pairs of the first layer. Now the base: `open_model` reads the headers of the
# safetensors files and knows where each tensor lies; nothing is loaded. A fingerprint says in a
# second whether it is the base that 03 trained on.

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
storage, as_trained = weights.storage_of(recipe, cfg.into)  # "" and rows as they are: bfloat16
print(f"{len(tensors)} tensors, {total / 2**20:,.1f} MiB in "
      f"{len({tensor.file for tensor in tensors.values()})} file(s); names start with {prefix!r}"
      + f"; trained on a base in {storage}, merged into {cfg.into}" * bool(storage))

# %% [markdown]
# Training computed `x Wᵀ` and beside it `(alpha / r) · x A B`. Merging adds the second matrix to the
# first, once and for all. Here is the whole merge, for the MLP's `down_proj` of the first layer. The
# proof: a random input must give what the base and its adapter give together, up to the one
# rounding of the sum to bfloat16. (Training rounded A and B to bfloat16 in each product; the merge
# takes them as they are, in float32.)

# %%
for path in [path for path in adapters if path.endswith("down_proj")][:1]:
    a, b = adapters[path]                                        # [in, r], [r, out]
    W = as_trained(tensors[f"{prefix}{path}.weight"].array())    # [out, in]
    delta = scale * (a @ b).T                                    # [out, in]
    merged = (W.astype(np.float32) + delta).astype(W.dtype)      # the merge

    x = np.random.default_rng(0).normal(size=(100, len(a)))
    together = x @ W.astype(np.float64).T + scale * (x @ a) @ b  # base and adapter, unrounded
    by_itself = x @ merged.astype(np.float64).T                  # what a server will compute
    apart = np.linalg.norm(by_itself - together) / np.linalg.norm(together)
    print(f"{path}: W {W.shape} {W.dtype} is {np.linalg.norm(W.astype(np.float32)):.1f} long, the "
          f"change {np.linalg.norm(delta):.1f}; the outputs are {apart:.3%} apart")
    assert apart < ml_dtypes.finfo(W.dtype).eps

# %% [markdown]
# That is a complete merge, and it is right. The rest of this page answers three questions it leaves
# open. Attention has no plain `[in, r]` and `[r, out]` (sections 2 to 4). 62 GB do not fit into the
# memory of a small machine (section 5). And a merge that skips a matrix fails silently (sections 3
# and 8).
#
# ## 2. Two names for every matrix
# Tunix, which trained, and Hugging Face (HF), whose files everybody reads, cut the same network
# differently. HF has flat `[out, in]` matrices, like `torch.nn.Linear`. Tunix keeps heads as an
# axis of their own, and in *sliding* layers, which attend to a window of recent tokens, it stores
# the projections to keys and values as one array. In the 31B and the tiny model the *full* layers,
# which attend to all tokens, take their values from the keys' projection (before its norm and
# rotation), so there is only one matrix to change; E2B and E4B have both everywhere.

# %%
targets = architecture.modules(config)
kinds = [layer.kind for layer in architecture.layers(config)]
pictures.key_value_map(targets, recipe["rank"], {kinds.index(kind): kind for kind in
                       dict.fromkeys(kinds)}, f"config.json of {recipe['base_model']}")

# %% [markdown]
# The map is drawn from `tables/architecture.py`, which lists the modules of any `config.json` with
# the HF matrices that each changes. So we can count before renting anything:

# %%
rows = []
sizes = {name: f"data/configs/gemma4_{name}.json" for name in ("31b", "e2b", "e4b", "26b_a4b")}
for name, source in {**sizes, "this base": base}.items():
    listed = architecture.modules(architecture.read_config(source))
    found = pd.Series([target.kind for target in listed]).value_counts().to_dict()
    shapes = [shape for target in listed for shape in target.adapter(recipe["rank"])]
    rows.append({"model": name, **found, "modules": len(listed),
                 "HF matrices": sum(len(target.names) for target in listed),
                 f"adapter numbers, rank {recipe['rank']}": sum(map(math.prod, shapes))})
pd.DataFrame(rows).set_index("model").fillna(0).astype(int).map("{:,}".format).T

# %% [markdown]
# The **31B** has ten full layers with a `k_einsum` and no `v_proj`; forget it, and 350 of 360
# modules are adapted. In the **E2B** the last 20 layers reuse earlier keys and values, and its
# per-layer inputs are not trained. Nor are the experts of the **26B-A4B**, which notebook 03
# refuses, because Tunix 0.1.7 computes it wrongly.
#
# ## 3. Nothing missing, nothing left over
# A merge that skips a module fails silently: the folder loads, the text looks fine, and a part of
# the training is gone. So we compare three lists before writing a byte: what the config says, what
# the checkpoint holds, what the base holds. Any difference stops us, with its name. (If 03 left
# matrices out on purpose, with `partial=True`, they are named and stay as the base has them.)

# %%
targets, left_alone = split_targets(targets, adapters, recipe)
if left_alone:
    print(f"left alone on purpose: {len(left_alone)} modules "
          f"({', '.join(sorted({target.kind for target in left_alone}))})")
check(targets, adapters, tensors, prefix, recipe, notes)
if all(not b.any() for _, b in adapters.values()):
    raise helpers.UserError("every B is zero: this checkpoint was saved before the first step.")
print(f"{len(targets)} modules, {sum(len(t.names) for t in targets)} matrices: all fit")

# %% [markdown]
# ## 4. The algebra, kind by kind
# Whatever the kind, we want two plain matrices, `A [in, r]` and `B [r, out]`, because then the
# change is always `ΔW = (alpha / r) · (A B)ᵀ`. Only the way to those two differs. For each kind we
# write it down and prove it on random input `x`: the two plain matrices must give what the einsum
# gives that Qwix runs in training. (`td,dr,rnh->tnh` reads: axes with the same letter run together,
# letters missing on the right are summed over.) Letters: `D` model width, `N` query heads, `K`
# key/value heads, `H` head size, `F` MLP width.

# %%
def proof(kind, factors, einsum, adapters, width):
    """Our ΔW x against Qwix's einsum (or dot product) on the first module of a kind."""
    path = next((path for path in adapters if path.endswith(kind)), None)
    if path is None:  # left out on purpose, or section 3 would have stopped
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

# %% [markdown]
# ### 4.1 Query: `q_einsum`
# `A (D, r)`, `B (r, N, H)`. HF lists the rows of `q_proj` head by head, so `N` and `H` fold into
# one axis, in that order.

# %%
helpers.show_source(q_factors)
proof("q_einsum", q_factors, "td,dr,rnh->tnh", adapters, lambda a, b: a.shape[0])

# %% [markdown]
# ### 4.2 Key and value, fused: `kv_einsum`
# `A (D, r)`, `B (r, 2, K, H)`. One `A` serves both; `B` holds the keys' half at index 0 of its
# second axis, the values' at index 1. So `k_proj` and `v_proj` share `A` and differ in `B`. (A
# PEFT run would have trained two independent `A`s.)

# %%
helpers.show_source(kv_factors)
proof("kv_einsum", kv_factors, "td,dr,rckh->tckh", adapters, lambda a, b: a.shape[0])

# %% [markdown]
# ### 4.3 Key alone: `k_einsum`
# In the full layers of the 31B (and of the tiny model) the values *are* the keys' projection: there
# is no `v_proj` in the base, and one matrix to change. `A (D, r)`, `B (r, K, H)`, with fewer key
# heads and a larger head size.

# %%
helpers.show_source(k_factors)
if any(target.kind == "k_einsum" for target in targets):
    proof("k_einsum", k_factors, "td,dr,rkh->tkh", adapters, lambda a, b: a.shape[0])

# %% [markdown]
# ### 4.4 Output: `attn_vec_einsum`
# The mirror image: here the *input* has heads. `A (N, H, r)`, `B (r, D)`; `N` and `H` of `A` fold
# into the input axis of `o_proj`.

# %%
helpers.show_source(o_factors)
proof("attn_vec_einsum", o_factors, "tnh,nhr,rd->td", adapters, lambda a, b: math.prod(a.shape[:2]))

# %% [markdown]
# ### 4.5 MLP: `gate_proj`, `up_proj`, `down_proj`
# Plain matrices on both sides, and the same names, as in section 1. `FACTORS` is the table of these
# functions by kind.

# %%
helpers.show_source(mlp_factors, plan_merge)
proof("down_proj", FACTORS["down_proj"], "tf,fr,rd->td", adapters, lambda a, b: a.shape[0])
plan = plan_merge(targets, adapters, prefix)
print(f"{len(plan)} of {len(tensors)} tensors will change")

# %% [markdown]
# This proves the folding. It cannot prove HF's conventions, rows head by head and keys before
# values; section 10 does, with the engines themselves.
#
# ## 5. Add, a block at a time, and round once
# `add_delta` is section 1's merge as one compiled program, on some rows of a matrix. It also sums up
# how large base, delta and rounding error are. `precision="highest"` asks for true float32
# products; a TPU would round their inputs to bfloat16. bfloat16 has 8 significant bits, so rounding
# once moves a value by at most 2⁻⁸ = 0.39 % of itself.

# %%
helpers.show_source(add_delta)
name = next(iter(plan))
a, b = plan[name][0], plan[name][1][:, :64]  # its first 64 rows, on a random base
rows = np.random.default_rng(0).normal(size=(64, len(a))).astype(ml_dtypes.bfloat16)
merged, _ = add_delta(rows, a, b, scale)
exact = rows.astype(np.float64) + scale * (a.astype(np.float64) @ b.astype(np.float64)).T
error = np.abs(np.asarray(merged, np.float64) - exact) / np.maximum(np.abs(exact), 0.01)
print(f"{name}: largest relative error {error.max():.5f}, at most {2**-8:.5f}")
assert error.max() < 2**-8 * 1.01

# %% [markdown]
# Around it goes `weights.rewrite`, which copies a model folder from its first byte to its last,
# shard by shard, and lets `change` replace some rows at a time. Tensors without an adapter (the
# embedding, norms, the vision tower that reads images), config, tokenizer and chat template pass
# through untouched.

# %%
helpers.show_source(merge_model)

# %% [markdown]
# A second run must not repeat this, and must not trust what it finds either. So a result carries a
# **stamp**, all that it was made from, and whoever finds it compares. (06 does so with each measurement.)

# %%
helpers.show_source(stamp, differences)

# %% [markdown]
# The stamp in `merge.json` has step, scale, and hashes of adapters, base and recipe; beside it is a
# hash of every file. What was made from something else, or has other bytes now, is made again.
#
# (A run on a quantised base, notebook 11, multiplied with rounded weights, and those belong to its
# adapters: `as_trained` turns the rows of the files into them. For a bfloat16 base it does nothing.)

# %%
record_path, out = helpers.run_dir("merge.json"), helpers.run_dir("merged")
adapter_hashes = {path: hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest()
                  for path, (a, b) in adapters.items()}
inputs = stamp(step=step, scale=scale, adapters=digest(adapter_hashes), base=base_sha256,
               recipe=digest(recipe), **({"into": cfg.into} if storage else {}),
               **({"hub_base": cfg.hub_base} if cfg.hub_base else {}))
wanted = {"merged": "files", "adapter": "adapter_files"}
if storage and cfg.into == "dequantized":
    plan |= no_change(left_alone, prefix)  # without adapters, but quantised like the others
    wanted |= {"dequantized": "base_files"} if cfg.write_base else {}
wanted |= {"merged_text": "text_files"} if cfg.text_only else {}
record = read_leftover(record_path, {})
todo = to_make(record, inputs, wanted)
if not todo:
    print(f"{out} is current (same checkpoint, base and recipe, every file whole): nothing to do")
for name, why in todo.items():
    print(f"making {name}/: {why}")

# %% [markdown]
# An old `merge.json` goes before anything is touched, and the new one comes when all is done: what
# it describes is finished. That all of it has room is asked first.

# %%
adapter_bytes = sum(a.nbytes + b.nbytes for a, b in adapters.values())
check_room(helpers.run_dir(),
           {name: adapter_bytes if name == "adapter" else total for name in todo})
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
            base, helpers.run_dir("dequantized"), no_change(targets + left_alone, prefix), scale,
            cfg.block_mib << 20, as_trained)
pd.DataFrame([(path.name, f"{path.stat().st_size:,}") for path in sorted(out.iterdir())],
             columns=["file in merged/", "bytes"]).set_index("file in merged/")

# %% [markdown]
# ### Ask the merged weights
# Does the folder know what the adapters knew? Load it as any base model, without adapters, and ask
# it for the up-down counter that notebook 03 asked for. (For the larger models `ask` is off: a CPU
# takes long, and [05](05_serve_vllm.ipynb) asks them through a server.)

# %%
told = read_leftover(helpers.run_dir("train", "answers.json"), {})
if cfg.ask and told:
    from helpers import chat, gemma, train
    served = gemma.config_from_hf(out)
    mesh = gemma.make_mesh(served, (1, 1), jax.devices()[:1])
    with helpers.phase("one answer of merged/"):
        answer, = train.ask(
            gemma.load_base(out, served, mesh), chat.load_tokenizer(out), [told["asked"]],
            told.get("limit", 512), mesh, recipe["reasoning"] == "kept")
    print(f"{answer}\n\nthe answer with adapters in 03 was "
          f"{'the same to the letter' if answer == told['after'] else told['after']}")

# %% [markdown]
# ## 6. The adapter alone, in PEFT's format
# Two gigabytes at 31B instead of a second model of 62: the
# [PEFT](https://github.com/huggingface/peft) format is two matrices per HF module, `lora_A [r, in]`
# and `lora_B [out, r]`, with a small config. `k_proj` and `v_proj` get the shared `A` each.
#
# One line is special. Where there is no `v_proj`, we store the `k_proj` adapter a second time under
# that name. vLLM loads such a layer's `k_proj` *weight* into the K and the V part of one fused
# matrix, but an *adapter* for `k_proj` reaches the K part only; the copy supplies the V part. PEFT
# finds no such module and ignores it. A test fails on the day vLLM no longer needs this.

# %%
helpers.show_source(write_adapter)

# %%
adapter_out = helpers.run_dir("adapter")
if "adapter" in todo:
    record["adapter_files"] = write_adapter(
        adapter_out, targets, adapters, recipe, prefix,
        record["adapter_base"] if "dequantized" in wanted else cfg.hub_base)
stored = weights.read_header(adapter_out / "adapter_model.safetensors")
target = ([target for target in targets if target.kind[0] == "k"] or targets)[-1]
block = next(iter(target.names)).rpartition(".")[0]
plain = FACTORS[target.kind](*adapters[target.path])
own = {*plain, "v_proj"} if "k_proj" in plain else {*plain}
pictures.adapter_path(
    target, dict(zip("AB", (array.shape for array in adapters[target.path]))),
    {f"{module}: {letter}": matrix.shape for module, both in plain.items()
     for letter, matrix in zip("AB", both)},
    {f"{name.rpartition('.')[2]} ({tensors[f'{prefix}{name}.weight'].dtype})": shape
     for name, shape in target.names.items()},
    {name.partition(f"{block}.")[2].removesuffix(".weight"): tensor.shape for name, tensor in
     stored.items() if f"{block}." in name and name.split(".")[-3] in own}, scale,
    f"computed from the checkpoint, {recipe['base_model']} and adapter/")

# %% [markdown]
# The picture follows the pair that needs the most care. Above, it ends in the weights; below, it
# stays a pair of its own, and a server adds its product for every token.
#
# For transformers there may be a third folder. `AutoModelForCausalLM` reads a real model's `merged/`
# as it is. But if you ask for the text class by name, `Gemma4ForCausalLM`, you get random weights and only
# a warning: it does not know the checkpoint's names, `model.language_model.…`. `merged_text/` holds
# the same bytes under the names that class expects, without the vision tower. Then the record of it
# all is written.

# %%
if "merged_text" in todo:
    record["text_files"] = export_text(out, helpers.run_dir("merged_text"), prefix)
if todo:
    helpers.write_json(record_path, record)
changed = sum("merged" in entry for entry in record["tensors"].values())
print("merged_text/:", ", ".join(record["text_files"]) or "not asked for")
print(f"{record_path}: {len(record['tensors'])} tensors, {changed} merged, "
      f"{len(record['tensors']) - changed} untouched, {len(record['files'])} files")

# %% [markdown]
# ## 7. 62 GB through a small machine
# Everything goes into a hidden neighbour, `.merged.partial`, is forced to disk and renamed at the
# very end: a folder called `merged/` is a finished one, whatever happens. While one block is
# computed, other threads hash and write the previous one, and never more than one waits: that
# bounds the memory. A safetensors file makes this easy: 8 bytes with the length of a header, a JSON
# header (name, dtype, shape and byte range of every tensor), then the bytes
# ([format](https://github.com/huggingface/safetensors#format)).

# %%
largest = max(tensors, key=lambda name: tensors[name].stop - tensors[name].start)
print(f"the largest tensor is {largest} {tensors[largest].shape}, a block {cfg.block_mib} MiB")

# %% [markdown]
# What this costs on a checkpoint five layers deep and as wide as the 31B (5.1 GB, three shards,
# rank 64), measured with `tests/benchmarks/bench_merge.py`: one run, side by side, on two CPU cores
# with nothing else running, 21 November 2026. Memory is what the program itself holds, without file
# pages, adapters not counted:
#
# | | time | time / copy | peak memory |
# |---|---|---|---|
# | copy the same files with fsync | 17.9 s | 1 | 0.04 GB |
# | this notebook | 37.5 s | 2.1 | 0.35 GB |
# | load everything, add, save one file | 83.5 s | 4.7 | 10.4 GB |
# | PEFT `merge_and_unload` | 91.6 s | 5.1 | 6.6 GB |
#
# The notebook's peak does not depend on the number of layers; that of the last two grows with the
# model. By bytes, the 31B's 62.5 GB take 12 times as long: about 8 minutes (extrapolated).
#
# ## 8. Read it back
# Trust nothing that was only written. Every file of `merged/` must hash to what `merge.json` says.
# (`cache/hashes.json` remembers the hash of a large file with its size, times and inode, so that 05
# and 07 need not read 62 GB again.) Then a sample of tensors: an untouched one must have the bytes
# of the base; a merged one must be the rounded sum, up to float32's error, recomputed in float64, by
# another library.

# %%
if bad := weights.verify(out, record["files"]):
    raise helpers.UserError(f"{out} does not hold what was written ({bad}): a failing disk, or "
                            "something else writes there.")
merged_count, same_count, worst = recompute(base, out, plan, scale, cfg.samples, as_trained)
assert worst <= 0.5, worst
print(f"{len(record['files'])} files: every byte as written\n"
      f"{merged_count} merged tensors: at most {worst:.4f} steps from the exact sum\n"
      f"{same_count} untouched tensors: every byte as in the base")

# %% [markdown]
# ## 9. What the fine-tune touched
# The norms that `add_delta` summed up give two numbers per matrix. `delta %` is the size of the
# change relative to its matrix, `‖ΔW‖ / ‖W‖`. `rounding %` is what rounding the sum has cost,
# relative to the change.

# %%
changes = norm_table(record)
pictures.change_map(changes, f"measured, {recipe['base_model']}, step {record['step']}, rank "
                             f"{recipe['rank']}, alpha {recipe['alpha']:g}; grey: no such matrix")
changes.groupby("kind", sort=False)[["delta %", "rounding %"]].agg(["min", "mean", "max"]).round(2)

# %% [markdown]
# Changes of 20 to 50 % are large: the tiny base has never seen an instruction and is trained at a
# high rate. A gentler fine-tune fares worse in the rounding, because the base's weights are bfloat16
# numbers already: whatever moves one by less than half a step is rounded back, and lost. So shrink
# the delta of one matrix and look at what arrives.

# %%
name = next(iter(plan))
(a, b), rows = plan[name], tensors[name].array()
delta = scale * (a.astype(np.float64) @ b[:, :512].astype(np.float64)).T  # its first 512 rows
if_smaller(rows[:512], delta, (1, 1 / 30, 1 / 100, 1 / 300))

# %% [markdown]
# `arrives %` is the part of the change that points where it should. At a delta of one percent
# rounding adds noise, but all of the change arrives; at a tenth of a percent about half of it is
# gone. If `delta %` is below one percent in your run, compare the merged model with base + adapter
# ([05](05_serve_vllm.ipynb) does) before you serve it.
#
# ## 10. Do all engines agree?
# The proof that counts lives in the tests: `./run_tests.sh --all` runs `tests/test_merge.py`. Ten
# prompts of 100 tokens go through five paths, and we compare the log-probability of every token of
# the vocabulary at every position. Measured by that test on 21 November 2026 (tiny base, random `A`
# and `B`, 990 positions × 1,280 tokens, two CPU cores; natural logarithms):
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
# In float32 the five paths are one model. In bfloat16 they differ by about as much as two engines
# differ on the untouched base: the noise of the arithmetic, not of the merge. vLLM is its CPU build
# here; on a TPU it runs a JAX model of its own, which this test does not reach.
#
# ## 11. From machine to machine, and to others
# For the 31B, base and `merged/` live in `/dev/shm`, which holds 224 GB on a v5p-8. Training and
# serving are two machines, so the result travels through a bucket in their region. The script of
# [01](01_setup.ipynb) copies the run there every five minutes; by hand it is:
#
# ```bash
# # on the v5p-8, after notebook 03
# TMPDIR=/dev/shm RUN_DIR=/dev/shm/run SIZE=31b ./run_all.sh 04
# .venv/bin/python -m helpers.remote push /dev/shm/run gs://BUCKET/run
# ```
#
# A model without its history is of little use to others. The card says what it was made from and,
# once notebook 07 has run, how well it does; run this cell again then. Nothing leaves this machine
# unless `Settings.upload` names a repository on the Hugging Face hub (it is made private; `HF_TOKEN`
# needs write access).

# %%
card = model_card(record, *card_sources(record), cfg.hub_base)
helpers.write_text(helpers.run_dir("model_card.md"), card)
print(card)
if cfg.upload:
    from huggingface_hub import HfApi
    hub = HfApi()
    hub.create_repo(cfg.upload, private=True, exist_ok=True)
    hub.upload_file(repo_id=cfg.upload, path_in_repo="README.md", path_or_fileobj=card.encode())
    hub.upload_folder(repo_id=cfg.upload, folder_path=out, ignore_patterns=["README.md", ".*"])

# %% [markdown]
# ## Recap
#
# | We made | from | with the guarantee |
# |---|---|---|
# | `merged/` | base + `(alpha / r) · (A B)ᵀ` | float32 sum, one rounding; every other byte is the base's |
# | `adapter/` | the adapters alone, float32 | loads in PEFT and in vLLM, same log-probabilities up to rounding |
# | `merged_text/` | `merged/`, renamed | loads in the text class `Gemma4ForCausalLM` without a warning |
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
# | `GB free, for merged/ … it takes` | the disk is too small for a second copy | `RUN_DIR=/dev/shm/run` |
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
# _ = merge_model(base, half, plan, scale / 2, cfg.block_mib << 20, as_trained)
# print(sorted(path.name for path in half.iterdir()))
# ```
#
# In 07, name this folder as another model: `models["half"] = helpers.run_dir("merged_half")`, before
# it is run. LoRA is linear in `scale`, the network is not: expect something between base and tuned,
# rarely the middle.
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
