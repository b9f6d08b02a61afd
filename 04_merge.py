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
# How do a few small matrices become part of a model of 62 GB, and how do you know that nothing got lost on the
# way? You'll merge one matrix by hand, learn what's different about the others, and write a folder that vLLM (the
# server of notebook 05) can serve as it is. The adapters alone are saved, too, in the format of PEFT, Hugging Face's
# adapter library.
#
# | | |
# |---|---|
# | **Needs** | A CPU. No model is held in memory; the 31B wants room for 125 GB of files, base and result |
# | **Reads** | `train/checkpoints/<step>/` and `train/recipe.json` from 03, `data/meta.json` from 02, the base's safetensors |
# | **Writes** | `merged/` (a model folder), `adapter/` (PEFT), `merge.json` (hashes of both); `merged-w4a16/` (four bits a weight) if asked |
# | **Time and cost** | tiny: seconds. 31B: about eight minutes (extrapolated from 5 GB), or fifteen and more if 03 stored the base as int8; no chip is used, so the TPU may already be given back |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · **04 merge** · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
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
# ## 1. One matrix, by hand
# **How do two thin matrices become part of a large one?** For each large matrix W notebook 03 left a pair of small
# ones. `A` narrows the layer's input to `r` numbers (r is the rank), and `B` widens them to the output. 03 wrote
# `y = x W + (alpha / r) · x A B`. Hugging Face stores W transposed, as `torch.nn.Linear` does. So from here on W is
# `[out, in]`, the layer computes `x Wᵀ`, and `A B` is transposed before it's added. Merging adds
# `(alpha / r) · (A B)ᵀ` to W, once and for all.
#
# Let's do that for one matrix. You have nothing to decide, because `train/recipe.json` brings rank, alpha and base
# along, and the four settings below can stay as they are.

# %%
import json
import os
from dataclasses import dataclass, replace

os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU on this machine stays free for others
import ml_dtypes
import numpy as np
import pandas as pd
from IPython.display import display

from helpers import four_bits, merge, pictures, records, remote, style, weights
from tables import architecture

# %%

@dataclass(frozen=True)
class Settings:
    step: int = 0            # checkpoint to merge; 0: the one 03 finished with
    base: str = ""           # another copy of the base; empty: where 03 found it
    ask: bool = False        # load merged/ on this CPU and ask it; 05 does so with a server
    four_bits: bool = False  # write the merged model a second time, in four bits (section 8)


FULL = Settings()
E2B = FULL
TINY = replace(FULL, ask=True, four_bits=True)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# First the adapters. We restore them as plain NumPy arrays, without building a model.

# %%
recipe = records.Recipe.load()
helpers.same_size(recipe.size, "03_train.py")
scale = recipe.scale
step, adapters, notes = merge.adapters_of(recipe, cfg.step)
size = sum(a.nbytes + b.nbytes for a, b in adapters.values())
print(f"{recipe.base_model}, rank {recipe.rank}, alpha {recipe.alpha:g}, step {step}: "
      f"{len(adapters)} pairs, {size:,} bytes")
for path, (a, b) in list(adapters.items())[:6]:
    print(f"  {path:32} A {str(a.shape):16} B {b.shape}")

# %% [markdown]
# Those are the six pairs of the first layer. Now the base. A fingerprint tells us whether it's the one that 03 trained
# on. `open_model` reads where each tensor is stored, but it loads nothing. And `language_prefix` finds out what the
# language model's tensors are called, and checks that they're all there.

# %%
base = remote.stage(cfg.base or recipe.base_path)
if weights.fingerprint(base) != recipe.base_sha256:
    raise helpers.UserError(f"{base} is not the model that notebook 03 trained on. Set "
                            "Settings.base to that one, or run 03_train.py with this one.")
tensors = weights.open_model(base)
prefix = weights.language_prefix(base, tensors, architecture.read_config(base))
total = sum(tensor.stop - tensor.start for tensor in tensors.values())
print(f"{len(tensors)} tensors, {total / 2**20:,.1f} MiB; names start with {prefix!r}")

# %% [markdown]
# Here's the whole merge for one matrix, the MLP's `down_proj`. (The *norm* of a matrix is its length: the root of the
# sum of all its squared numbers.)

# %%
path = next(path for path in adapters if path.endswith("down_proj"))
a, b = adapters[path]                                        # [in, r], [r, out]
W = np.array(tensors[f"{prefix}{path}.weight"].array())      # [out, in]
delta = scale * (a @ b).T                                    # [out, in]
unrounded = W.astype(np.float32) + delta
merged = unrounded.astype(W.dtype)                           # the merge
norm, change = np.linalg.norm(W.astype(np.float32)), np.linalg.norm(delta)
print(f"{path}: W {W.shape} {W.dtype} has the norm {norm:.1f}, the change {change:.1f}")

# %% [markdown]
# How do we know that it's right? We send random inputs through. The merged matrix has to give what base and adapter
# give together, up to the rounding of its numbers. **By how much may the outputs differ?**

# %%
x = np.random.default_rng(0).normal(size=(100, len(a)))
together = x @ W.astype(np.float64).T + scale * (x @ a) @ b  # base and adapter, unrounded
by_itself = x @ merged.astype(np.float64).T                  # what a server will compute
apart = np.linalg.norm(by_itself - together) / np.linalg.norm(together)

most = float(ml_dtypes.finfo(W.dtype).eps) / 2  # by which rounding can move a number
rounding = np.linalg.norm(merged.astype(np.float32) - unrounded) / np.linalg.norm(unrounded)
print(f"rounding moved a number by up to {most:.2%}, and the matrix by {rounding:.3%} of its norm")
print(f"the outputs differ by {apart:.3%}")
np.testing.assert_allclose(apart, rounding, rtol=0.05, atol=1e-6)

# %% [markdown]
# By as much as the matrix did, measured by norms. A single number moves by 0.39% at most, but a typical one by less, so
# the matrix as a whole moved by less than half of that. An output sums up many products. With random inputs the errors
# in that sum grow just as fast as the sum, so their share stays the same. That's a sharp test: a wrong scale or a
# forgotten transpose would be far off.
#
# **That's a complete merge, and it's right.** But three problems are left. Attention's adapters don't have the plain
# shapes `[in, r]` and `[r, out]` (section 2). A merge that skips a matrix fails silently (section 3). And 62 GB don't
# fit into the memory of a small machine (section 4).
#
# ## 2. Two names for every matrix
# **Why can't we do the same for every matrix?** Because two libraries store the same network differently: Tunix, which
# trained it, and Hugging Face (HF), whose files everybody reads. HF has flat `[out, in]` matrices, but Tunix keeps
# attention heads as an axis of their own. There are also two kinds of layers. In *sliding* layers, which attend to a
# window of recent tokens, Tunix stores the projections to keys and values as one array. *Full* layers attend to all
# tokens. In those of the 31B and of the tiny model, one projection gives both keys and values, so there's a `k_proj`
# and no `v_proj`.
#
# Here are three kinds of matrices, with the einsum (a product whose axes have letters) that training runs: `t`
# tokens, `r` rank, `D` model width, `N` query heads, `K` key/value heads, `H` head size, `F` MLP width, `c` keys or
# values. Letters missing on the right are summed over.

# %%
targets = merge.targets_of(base, adapters, recipe)
kinds = {target.kind: target for target in targets}  # the last of each kind
rows = []
for kind, target in kinds.items():
    a_shape, b_shape = target.adapter(recipe.rank)
    theirs = [f"{name.rpartition('.')[2]} {shape}" for name, shape in target.names.items()]
    rows.append({"Tunix": kind, "A": a_shape, "B": b_shape, "in training": target.how.equation,
                 "Hugging Face [out, in]": ", ".join(theirs)})
table = pd.DataFrame(rows)
is_shown = table.Tunix.isin(["down_proj", "q_einsum", "kv_einsum"])
display(style.words(table[is_shown]))
style.folded("the other kinds", table[~is_shown])

# %% [markdown]
# <details><summary><b>How do two HF matrices come out of one <code>kv_einsum</code>?</b></summary>
#
# `A` narrows the input for both, so both share it. `B` has an axis `c` of length 2, first keys and then values, so each
# half is the `B` of one matrix. (PEFT would have trained two `A`s.)
#
# </details>
#
# Here's how `kv_einsum` comes apart, and its adapter with it.
#
# ![One Tunix array of shape 2, K, D, H becomes k_proj and v_proj of shape K times H, D: each head is turned, and the heads are stacked; of its adapter A is shared and B comes apart](../assets/figures/kv_einsum.svg)
#
# To merge, we need a plain pair for each HF matrix, `A [in, r]` and `B [r, out]`. So we fold the heads into one
# axis, and split what Tunix has stacked. One function does it for every kind:

# %%
helpers.show_source(architecture.Module.factors)
pair = kinds["kv_einsum"]
(key_a, key_b), (value_a, value_b) = pair.factors(*adapters[pair.path]).values()
x = np.random.default_rng(0).normal(size=(3, len(key_a)))
ours = np.stack([x @ key_a @ key_b, x @ value_a @ value_b], axis=1)
theirs = np.einsum(pair.how.equation, x, *map(np.float64, adapters[pair.path]))
np.testing.assert_allclose(ours, theirs.reshape(ours.shape), rtol=1e-9, atol=1e-12)
print(f"{pair.path}: k_proj and v_proj give what {pair.how.equation} gives")

# %% [markdown]
# Tests do this for every kind, and section 6 shows that Hugging Face concatenates heads in the same order.
#
# **One function knows how every kind comes apart, so nothing else has to.**
#
# ## 3. Nothing missing, nothing left over
# **A merge forgets one matrix. Who notices?**
#
# <details><summary>Answer</summary>
#
# Nobody: the folder loads, the text looks fine, and a part of the training is gone.
#
# </details>
#
# So before we write a byte, we compare three lists: what the config says, what the checkpoint holds, and what
# the base holds. Any difference is an error that names the matrix. (More tensors will change than there are modules,
# because each `kv_einsum` is two tensors in the files.)

# %%
merge.check(targets, adapters, tensors, prefix, recipe, notes)
plan = merge.plan_merge(targets, adapters, prefix)
print(f"{len(targets)} modules, {len(plan)} of {len(tensors)} tensors will change: all fit")

# %% [markdown]
# **A list that doesn't match stops the merge before it begins.**
#
# ## 4. Merge
# **How much memory does it take to merge 62 GB?**
#
# <details><summary>Answer</summary>
#
# Next to none. We copy the base file by file. Then we read 1,024 rows of a matrix at a time, change them, and write
# them back in place. Everything without an adapter (the embedding, the normalization layers, the part that reads
# images) stays the base's, byte for byte.
#
# </details>
#
# Each piece is merged as in section 1. If the merged folder is already there and nothing has changed, this takes no
# time.

# %%
with helpers.phase(f"merging {len(plan)} of {len(tensors)} tensors"):
    record = merge.run(base, targets, adapters, step, recipe, prefix)
for folder, files in (("merged", record.files), ("adapter", record.adapter_files)):
    size = sum(helpers.run_dir(folder, name).stat().st_size for name in files)
    print(f"{folder}/: {len(files)} files, {size:,} bytes")

# %% [markdown]
# `merge.json` has the hash of every file and of everything that the files were made from. 05 checks it before it
# serves.
#
# Did 03 store the base as int8, as it does with the 31B on a v5e-8? Then we add the adapters to the rounded weights
# that they were trained with. If you serve the adapter alone, it runs on top of the unrounded base, so its answers can
# differ from the merged model's. Nobody has measured by how much at 31B.
#
# ### Ask the merged weights
# **Does the folder know what the adapters knew?** We load it like any base model, without adapters, and ask it what
# notebook 03 asked. (For a larger model [05](05_serve_vllm.ipynb) does that.)

# %%
if cfg.ask and helpers.run_dir("train", "answers.json").exists():
    from helpers import answers  # loads Tunix, which merging doesn't need
    told, folder = records.Answers.load(), helpers.run_dir("merged")
    answer, = answers.ask_folder(folder, [told.asked], told.limit, recipe.thinking)
    before = "the same to the letter" if answer == told.after else told.after
    print(f"{answer}\n\nthe answer in 03 was {before}")

# %% [markdown]
# ### The adapter alone
# `adapter/` holds the same fine-tune in two gigabytes (at 31B), in the format of
# [PEFT](https://github.com/huggingface/peft): `lora_A [r, in]` and `lora_B [out, r]` for each HF
# matrix.
#
# **Some layers have no `v_proj`. Why do we save an adapter for one anyway?**
#
# <details><summary>Answer</summary>
#
# For vLLM. It keeps q, k and v in one matrix. It loads such a `k_proj` *weight* into both the K and the V part, but an
# *adapter* for `k_proj` reaches the K part only. So we save a copy for the V part. PEFT finds no such module and
# ignores the copy.
#
# </details>
#
# **A merge copies every byte that it doesn't change.**
#
# ## 5. What the fine-tune touched
# **How much did the fine-tune change?** Norms tell us two things about each matrix: how large the change is compared
# with the matrix (its norm divided by the matrix's, in the table), and how much of the change we lost by rounding the
# sum (the line above it).

# %%
norms = merge.norms_table(record)
lost = 100 * norms.rounding / norms.delta
print(f"rounding took {lost.min():.2g}% to {lost.max():.2g}% of a matrix's change")
pictures.heat_map(norms)

# %% [markdown]
# Our tiny run changes its matrices a lot, because the tiny base had never seen an instruction and learned at a high
# rate. So rounding hardly matters here. **What would happen to a change of a tenth of a percent?**
#
# <details><summary>Answer</summary>
#
# Much of it could vanish. bfloat16 keeps 8 significant bits, so a change of less than half a step of a weight's last
# bit is rounded away. If the change is below one percent in your run, compare the merged model with base + adapter
# ([05](05_serve_vllm.ipynb) does) before you serve it.
#
# </details>
#
# ### How strongly should the adapters be applied?
# Merging adds `alpha / r` times `A B`, as strongly as in training. **What if it were half or one and a half times as
# much?** We trained adapters for 100 steps on 02's rows, applied them 0 to 1.5 times as strongly, and asked 07's 38
# problems each time.

# %%
runs = pictures.read_scales()
style.finish(pictures.draw_scales(runs), "04_scale", "data/scales: tiny, greedy answers, measured")

# %% [markdown]
# Without its adapters the model passes nothing, but well below their full strength it already passes most of what it
# will. The gray band is a rough yardstick for luck: if each problem were a coin flip with this chance of passing, two
# counts in three would land in it. Rough, because all these points answer the *same* 38 problems, so neighbors have
# more in common than coin flips do. (07 compares two models problem by problem, which is sharper.) And it's a single
# training run; `python -m appendix.scales` adds two seeds.
#
# **Leave the scale as it was trained: we see nothing to win.**
#
# ## 6. Do all engines agree?
# **Is it the same model everywhere?** Ten prompts of 100 tokens go through five paths, the first five rows below.
# `tests/test_merge.py` compares the log-probability (the logarithm of a token's probability) of every token of the
# vocabulary at every position, with the tiny base and random `A` and `B`. Each entry is the largest difference, with
# the mean in brackets. The last two rows show what a real difference looks like:
#
# | log-probabilities differ by | all in float32, against Tunix with adapters | all in bfloat16, against HF merged |
# |---|---|---|
# | Tunix with adapters | 0 | 0.44 (0.040) |
# | HF, merged | 2.2e-5 (2.2e-6) | 0 |
# | HF, base + PEFT adapter | 2.7e-5 (2.1e-6) | 0.47 (0.033) |
# | vLLM, merged | 2.3e-5 (2.3e-6) | 0.41 (0.034) |
# | vLLM, base + adapter | 2.4e-5 (2.3e-6) | 0.39 (0.037) |
# | vLLM, base + adapter without the copied `v_proj` | **1.4** (0.074) | **1.3** (0.086) |
# | HF, base alone | 13 (1.5) | 13 (1.5) |
#
# In float32 the five paths agree up to rounding. In bfloat16 they differ by 0.033 to 0.040 in the mean. Is that the
# merge's fault? No: the same test asks HF and vLLM for the untouched base, too, and they differ by 0.034 there.
#
# <details><summary><b>Which row would you have missed without this test?</b></summary>
#
# The sixth. The adapter loads and the model answers, but one layer in six uses its old values. The copied `v_proj`
# prevents that.
#
# </details>
#
# **All five paths are one model, up to the rounding of the arithmetic.**
#
# ## 7. Give it to others
# **What would a stranger need to know to use your model?** What it was made from and how to ask it. A model card
# says both.

# %%
data = records.DataMeta.load()
card = f"""---
base_model: {recipe.base_model}
base_model_relation: finetune
---
# {recipe.base_model}, tuned
- **Data**: {data.source}, {data.train_examples:,} examples,
  {data.trained_tokens:,} trained tokens.
- **Ask it as it was trained**: system message {json.dumps(data.system)},
  reasoning {data.reasoning}.
- **Training**: LoRA rank {recipe.rank}, alpha {recipe.alpha:g} on {len(targets)} modules,
  {step} steps, learning rate {recipe.learning_rate:g}; added in float32, rounded once.
"""
helpers.write_text(helpers.run_dir("model_card.md"), card)
print(card)

# %% [markdown]
# To publish (`HF_TOKEN` needs write access; add your license and 07's scores to the card first):
#
# ```python
# from huggingface_hub import HfApi
# hub, name = HfApi(), "you/your-model"
# hub.create_repo(name, private=True)
# hub.upload_folder(repo_id=name, folder_path=helpers.run_dir("merged"))
# hub.upload_file(repo_id=name, path_in_repo="README.md", path_or_fileobj=card.encode())
# ```
#
# If you train on one machine and serve on another,
# [MACHINES.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md) says how the result
# gets there.
#
# **Publish how to ask the model, and not only what it is.**
#
# ## 8. Extra: four bits
# **Could one chip serve the tuned 31B?** Its bfloat16 weights take up nearly twice a v6e chip's memory. With four bits
# a weight they'd leave room (05, section 5, does the arithmetic). vLLM on a TPU accepts a format for that, W4A16: four
# bits for weights, sixteen for the numbers that they're multiplied with. Four bits give only sixteen values, so every
# 32 neighbors in a row get a step size of their own. The step size (which may be negative) is chosen so that the number
# farthest from zero becomes -8, and the others are rounded to whole numbers from -8 to 7.

# %%
if cfg.four_bits:
    errors = four_bits.export(helpers.run_dir("merged"), helpers.run_dir("merged-w4a16")).error
    print(f"{len(errors)} matrices in four bits; rounding moved each by {errors.min():.1%} to "
          f"{errors.max():.1%} of its norm")

# %% [markdown]
# **Will it give worse answers?** Only a judge can say. Few machines multiply four-bit numbers, but any machine can
# compute with them once they're unpacked to bfloat16, rounding included. `four_bits.dequantize(folder, out)` writes
# such a folder, and [07](07_eval.ipynb) can judge it alongside the tuned model. For the tiny model of
# an earlier run we did that ([measured](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/rounded/README.md)).
# Greedily, 32 of 38 problems pass in four bits and 31 without rounding. Of the sampled answers half a point fewer pass
# (95% interval: 3.7 fewer to 2.1 more). So on these 38 problems we see no loss from four bits, but a small one could
# hide. A larger model may behave otherwise.
#
# <details><summary><b>How would I serve the packed folder, and what was checked?</b></summary>
#
# [05](05_serve_vllm.ipynb) would take
# `Options(engine="tpu", model="merged-w4a16", chip="v6e", max_model_len=8_192, timeout=3600.0)`, but we haven't
# run that. We did check that compressed-tensors, the library that defines the format, unpacks exactly these
# weights, that transformers computes with the folder, and that vLLM reads its settings.
#
# </details>
#
# <details><summary><b>Can I tune a model that doesn't mind four bits?</b></summary>
#
# Google publishes one: `google/gemma-4-31B-it-qat-q4_0-unquantized` has the 31B's layers and is stored in
# bfloat16, but it was trained so that its weights lie on four-bit steps (*quantization-aware training*).
# Choose it as `base` in 02 and nothing else changes. Our rounding gives weights on such steps back as
# they were (`tests/test_four_bits.py`). The merge moves them off their steps a little, and nobody has measured
# yet how much that costs.
#
# </details>
#
# **Four bits round far more coarsely than bfloat16 does, so judge before you serve.**
#
# ## Recap
#
# - `merged/` is base + `(alpha / r) · (A B)ᵀ`: a float32 sum, rounded once. Every other byte is the base's.
# - `adapter/` loads in PEFT and in vLLM, with the same log-probabilities up to rounding.
# - `merge.json` has the hashes, so a copy can be checked.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. Swap keys and values in section 2's last cell: `(value_a, value_b), (key_a, key_b) = pair.factors(…).values()`.
#    Which check on this page notices? Would the three lists of section 3?
#
# <details><summary>Solution</summary>
#
# Only the comparison with the einsum, because it looks at numbers:
#
# ```python
# swapped = np.stack([x @ value_a @ value_b, x @ key_a @ key_b], axis=1)
# print(np.allclose(swapped, theirs.reshape(ours.shape)))  # False
# print(key_a.shape == value_a.shape, key_b.shape == value_b.shape)  # True True
# ```
#
# Keys and values have the same shapes, so every name and every shape still fits, and the lists of section 3 would let
# it pass. The model would load, and add to its keys what was trained for its values.
#
# </details>
#
# 2. *Unmerge* section 1's matrix: subtract `delta` from `merged` in float32, and round to W's dtype again. Do you get
# W back? Guess what share of its entries comes back exactly, and then count.
#
# <details><summary>Solution</summary>
#
# ```python
# back = (merged.astype(np.float32) - delta).astype(W.dtype)
# off = np.linalg.norm(back.astype(np.float32) - W.astype(np.float32)) / norm
# print(f"{(back == W).mean():.0%} of the entries are W's; the rest makes {off:.3%} of its norm")
# assert 0 < off < most
# ```
#
# Most of them, but not all. A larger number has a coarser last bit. Where adding the delta pushed a number past a power
# of two, the merge rounded away what you'd need to get W back. As the last line checks, the distance from W is still
# less than one rounding can move a number. So keep the base, because you can't get it back from the merged folder.
#
# </details>
#
# Next: [05 · Serving the fine-tuned model with vLLM](05_serve_vllm.ipynb)
