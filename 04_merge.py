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
# How do a few small matrices become part of a model of 62 GB, and how do you know that nothing got lost on the way?
# You'll merge one matrix by hand, learn what's different about the others, and write a folder that *engines* (programs
# that run a model, such as vLLM and transformers) load as it is. We also save the adapters by themselves, for PEFT,
# Hugging Face's adapter library.
#
# | | |
# |---|---|
# | **Needs** | A CPU. Merging never holds a whole model in memory. On the disk the 31B needs 125 GB, for the base and the result |
# | **Reads** | `train/checkpoints/<step>/` and `train/recipe.json` from 03, `data/meta.json` from 02, the base's safetensors |
# | **Writes** | `merged/` (a model folder), `adapter/` (PEFT), `merge.json` (hashes of both); `merged-w4a16/` (weights in four bits, arithmetic in 16) if asked |
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
# **How do two thin matrices become part of a large one?** For each large matrix W notebook 03 left a pair of small ones.
# While it trained, it computed `y = x W + (alpha / r) · x A B` (r is the rank). Hugging Face stores W transposed, as
# `torch.nn.Linear` does. So on this page W is `[out, in]`, and the layer computes `x Wᵀ`. Merging then adds
# `(alpha / r) · (A B)ᵀ` to W, once and for all.
#
# You have nothing to decide: 03 wrote rank, alpha and base into `train/recipe.json`, and the settings below can stay as
# they are.

# %%
import os
from dataclasses import dataclass, replace

os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU on this machine stays free for others
import numpy as np
import pandas as pd
from IPython.display import display

import verilog
from helpers import four_bits, merge, pictures, records, style, weights
from tables import architecture

# %%

@dataclass(frozen=True)
class Settings:
    step: int = 0            # checkpoint to merge; 0: the one 03 finished with
    base: str = ""           # another copy of the base; empty: where 03 found it
    ask: bool = False        # load merged/ on this CPU and ask it; 05 does so with a server
    four_bits: bool = False  # write the merged model a second time, in four bits (section 7)


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
print(f"{recipe.base_model}, rank {recipe.rank}, alpha {recipe.alpha:g}, step {step}: "
      f"{len(adapters)} pairs")
for path, (a, b) in list(adapters.items())[:6]:
    print(f"  {path:32} A {str(a.shape):16} B {b.shape}")

# %% [markdown]
# Those are the six pairs of the first layer. Now the base. `base_of` compares a fingerprint to make sure that it's the
# one that 03 trained on. `open_model` only reads where each tensor is stored. It loads nothing yet.

# %%
base = merge.base_of(recipe, cfg.base)
tensors = weights.open_model(base)
prefix = weights.language_prefix(base, tensors, architecture.read_config(base))
print(f"{len(tensors)} tensors; names start with {prefix!r}")

# %% [markdown]
# Here's the whole merge for one matrix, the MLP's `down_proj`:

# %%
path = next(path for path in adapters if path.endswith("down_proj"))
a, b = adapters[path]                                        # [in, r], [r, out]
W = np.array(tensors[f"{prefix}{path}.weight"].array())      # [out, in]
delta = scale * (a @ b).T                                    # [out, in]
unrounded = W.astype(np.float32) + delta
merged = unrounded.astype(W.dtype)                           # the merge

# %% [markdown]
# **How do we know that it's right?** We send random inputs through both forms. The merged matrix has to give what base
# and adapter give together, except that its numbers are rounded. By how much may the outputs differ? (We measure by
# *norms*. The norm of a matrix is its length: the root of the sum of all squared numbers.)

# %%
x = np.random.default_rng(0).normal(size=(100, len(a)))
together = x @ W.astype(np.float64).T + scale * (x @ a) @ b  # base and adapter, unrounded
by_itself = x @ merged.astype(np.float64).T                  # what a server will compute
apart = np.linalg.norm(by_itself - together) / np.linalg.norm(together)

rounding = np.linalg.norm(merged.astype(np.float32) - unrounded) / np.linalg.norm(unrounded)
print(f"rounding moved the matrix by {rounding:.3%} of its norm; the outputs differ by {apart:.3%}")
np.testing.assert_allclose(apart, rounding, rtol=0.05, atol=1e-6)

# %% [markdown]
# The outputs may differ by the same percentage by which rounding moved the matrix. Why? Each output is a sum of many
# products, and each product has a rounding error. With random inputs these errors add up in the same way as the products
# themselves, so the relative error stays the same. That makes it a sharp test: a wrong scale would be far off.
#
# Two problems are left. Attention's adapters don't have the plain shapes `[in, r]` and `[r, out]` (section 2). And 62 GB
# have to be merged on a small machine, without forgetting a matrix (section 3).
#
# **Merging a matrix is one addition, and random inputs show whether it's right.**
#
# ## 2. Two names for every matrix
# **Why can't we do the same for every matrix?** Because two libraries store the same network differently: Tunix, which
# trained it, and Hugging Face (HF), whose files everybody reads. HF has flat `[out, in]` matrices, but Tunix keeps
# attention heads as an axis of their own. In *sliding* layers (they attend to a window of recent tokens) Tunix also
# stores the projections to keys and values as one array. *Full* layers attend to all tokens. There one projection gives
# both keys and values, so there's a `k_proj` and no `v_proj`.
#
# Here are three kinds of matrices, each as it is in the first layer that has one. The column *in training* shows the
# *einsum* that training runs, a product whose axes have letters: `t` tokens, `r` rank, `D` model width, `N` query heads,
# `K` key/value heads, `H` head size, `F` MLP width, `c` keys or values. Letters that are missing after the arrow are
# summed over. (In the tiny model `r` and `N` both happen to be 16.)

# %%
targets = merge.targets_of(base, adapters, recipe)
kinds = {}  # the first of each kind
for target in targets:
    kinds.setdefault(target.kind, target)
table = pictures.kinds_table(kinds.values(), recipe.rank)
is_shown = table.Tunix.isin(["down_proj", "q_einsum", "kv_einsum"])
display(style.words(table[is_shown]))
style.folded("the other kinds", table[~is_shown])

# %% [markdown]
# Here's how `kv_einsum` comes apart, and its adapter with it. **Which of A and B do keys and values share?**
#
# ![One Tunix array of shape 2, K, D, H becomes k_proj and v_proj of shape K times H, D: each head is turned, and the heads are stacked; of its adapter A is shared and B comes apart](../assets/figures/kv_einsum.svg)
#
# They share `A`, which narrows the input for both. `B` has an axis `c` of length 2: one half is the keys' `B`, and the
# other half is the values' `B`. For every HF matrix, of any kind, one function finds the plain pair `A [in, r]` and
# `B [r, out]`:

# %%
helpers.show_source(architecture.Module.factors)

# %% [markdown]
# **Do the plain pairs compute what training computed?** We send random inputs through `kv_einsum`'s adapter both ways:

# %%
pair = kinds["kv_einsum"]
(key_a, key_b), (value_a, value_b) = pair.factors(*adapters[pair.path]).values()
x = np.random.default_rng(0).normal(size=(3, len(key_a)))
ours = np.stack([x @ key_a @ key_b, x @ value_a @ value_b], axis=1)
theirs = np.einsum(pair.how.equation, x, *map(np.float64, adapters[pair.path]))
np.testing.assert_allclose(ours, theirs.reshape(ours.shape), rtol=1e-9, atol=1e-12)
print(f"{pair.path}: k_proj and v_proj give what {pair.how.equation} gives")

# %% [markdown]
# **One function knows how every kind comes apart, so nothing else has to.**
#
# ## 3. Merge
# **A merge forgets one matrix. Who notices?** Nobody: the folder loads, the text looks fine, and a part of the training
# is gone. So before we write a byte, we compare three lists of matrices: what the model's config says, what the
# checkpoint holds, and what the base holds. Any difference is an error that names the matrix. (More tensors will change
# than there are modules, because each `kv_einsum` is two tensors in the files.)

# %%
merge.check(targets, adapters, tensors, prefix, recipe, notes)
plan = merge.plan_merge(targets, adapters, prefix)
print(f"{len(targets)} modules, {len(plan)} of {len(tensors)} tensors will change: all fit")

# %% [markdown]
# **How much memory does it take to merge 62 GB?**
#
# <details><summary>Answer</summary>
#
# Next to none. We copy the base file by file. Then we read 1,024 rows of a matrix at a time, change them, and write
# them back in place. Whatever has no adapter stays as it was in the base, byte for byte.
#
# </details>

# %%
with helpers.phase(f"merging {len(plan)} of {len(tensors)} tensors"):
    record = merge.run(base, targets, adapters, step, recipe, prefix)
for folder, files in (("merged", record.files), ("adapter", record.adapter_files)):
    size = sum(helpers.run_dir(folder, name).stat().st_size for name in files)
    print(f"{folder}/: {len(files)} files, {size:,} bytes")

# %% [markdown]
# `merge.json` has the hash of every file, and 05 checks these hashes before it serves.
#
# (One case is different. With the 31B on a v5e-8, for example, 03 stores the base as int8. Then we add the adapters to
# the rounded weights that they were trained with. And if you left some matrices without adapters on purpose, these are
# written rounded, too.)
#
# **Does the folder know what the adapters knew?** We load it like any base model, without adapters, and ask it what
# notebook 03 asked. (We do that with the tiny model only. For a larger one, [05](05_serve_vllm.ipynb) does it.)

# %%
if cfg.ask and helpers.run_dir("train", "answers.json").exists():
    from helpers import answers  # loads Tunix, which merging doesn't need
    told, folder = records.Answers.load(), helpers.run_dir("merged")
    answer, = answers.ask_folder(folder, [told.asked], told.limit, recipe.thinking)
    before = "the same to the letter" if answer == told.after else told.after
    print(f"{answer}\n\nthe answer in 03 was {before}")

# %% [markdown]
# `adapter/` holds the same fine-tune in two gigabytes (at 31B), in the format of
# [PEFT](https://github.com/huggingface/peft). (If 03 stored the base as int8, serve the merged model instead. An engine
# that loads the adapter beside the downloaded base uses *unrounded* weights, and the adapter wasn't trained with those.)
#
# **Some layers have no `v_proj`. Why do we save an adapter for one anyway?**
#
# <details><summary>Answer</summary>
#
# Because of vLLM, which keeps q, k and v in one matrix. For a layer without `v_proj`, vLLM loads the `k_proj` *weight*
# into both the K part and the V part. But it loads a `k_proj` *adapter* into the K part only. So we save a copy of the
# adapter for the V part. PEFT ignores that copy.
#
# </details>
#
# **Three lists have to match before a byte is written, and what has no adapter stays as it was.**
#
# ## 4. What the fine-tune touched
# **How much did the fine-tune change?** The table compares the norm of each matrix's change with the matrix's own norm.
# The line above the table says how much of the change we lost when the sum was rounded.

# %%
norms = merge.norms_table(record)
lost = 100 * norms.rounding / norms.delta
print(f"rounding took {lost.min():.2g}% to {lost.max():.2g}% of a matrix's change")
pictures.heat_map(norms)

# %% [markdown]
# Our tiny run changes its matrices a lot, because the tiny base had never seen an instruction, and we trained it at a
# high learning rate. So rounding hardly matters here. **What would happen to a change of a tenth of a percent?**
#
# <details><summary>Answer</summary>
#
# Much of it could vanish. bfloat16 keeps 8 significant bits, so a change of less than half a step of a weight's last
# bit is rounded away. If the change is below one percent in your run, compare the merged model with base + adapter
# ([05](05_serve_vllm.ipynb) does) before you serve it.
#
# </details>
#
# **What if the adapters counted for half as much, or for one and a half times as much?** We trained adapters for 100
# steps on 02's rows. Then we multiplied their scale by 0 to 1.5, and asked 07's 38 problems each time.

# %%
runs = pictures.read_scales()
style.finish(pictures.draw_scales(runs), "04_scale",
             "data/scales: another run, of 100 steps; tiny, greedy answers, measured")

# %% [markdown]
# The gray band is a rough yardstick for luck: if every scale had the same chance to pass as scale 1, two scores in three
# would lie inside the band. Without the adapters nothing passes, and around the trained strength little changes. At half
# and at one and a half the score lies just below the band, but in a single run even that may be luck.
#
# **Leave the scale as it was trained, unless a judge has shown you something better.**
#
# ## 5. Do all engines agree?
# **Is it the same model everywhere?** `tests/test_merge.py` sends ten prompts of 100 tokens through five paths: Tunix
# with the adapters, and the four in the table's first row. The base is tiny, `A` and `B` are random, and everything is in
# float32. At every position we compare the *log-probability* (the logarithm of the probability) of every token of the
# vocabulary. These are the largest differences (measured):
#
# | against Tunix with adapters | at most |
# |---|---|
# | HF merged, HF with PEFT's adapter, vLLM merged, vLLM with the adapter | 3e-5 |
# | vLLM with the adapter, but without the copied `v_proj` | **1.4** |
# | HF, base alone | 13 |
#
# The middle row shows why such a test pays off. Without the copy the adapter still loads and the model still answers, but
# one layer in six computes its values as if it had never been tuned.
#
# **All five paths are one model, up to the rounding of the arithmetic.**
#
# ## 6. Give it to others
# **What would a stranger need to know to use your model?** What it was made from and how to ask it. A model card
# says both.

# %%
card = merge.model_card(recipe, records.DataMeta.load(), step, len(targets))
helpers.write_text(helpers.run_dir("model_card.md"), card)
print(card)

# %% [markdown]
# <details><summary><b>How do you publish it?</b></summary>
#
# Add your license and 07's scores to the card, then run this. (`HF_TOKEN` needs write access.)
#
# ```python
# from huggingface_hub import HfApi
# hub, name = HfApi(), "you/your-model"
# hub.create_repo(name, private=True)
# hub.upload_folder(repo_id=name, folder_path=helpers.run_dir("merged"))
# hub.upload_file(repo_id=name, path_in_repo="README.md", path_or_fileobj=card.encode())
# ```
#
# </details>
#
# **When you publish a model, say how to ask it.**
#
# ## 7. Extra: four bits
# **Could one chip serve the tuned 31B?** Its bfloat16 weights take up nearly twice a v6e chip's memory. With four bits a
# weight they'd leave room (05, section 5, does the arithmetic). Four bits give only sixteen values, so every 32 neighbors
# in a row get a step size of their own, and each of the 32 is rounded to a whole number of steps, from -8 to 7. Which
# step? We try five, and keep the one that loses least. With the first, the number farthest from zero becomes -8 steps.
# (If that number is positive, the step is negative.) With the others it becomes -7, -6, -5 or -4. (They're for a base
# that was trained to lie on four-bit steps: there, the farthest number isn't always at 8.)

# %%
if cfg.four_bits:
    errors = four_bits.export(helpers.run_dir("merged"), helpers.run_dir("merged-w4a16")).error
    print(f"{len(errors)} matrices in four bits; rounding moved each by {errors.min():.1%} to "
          f"{errors.max():.1%} of its norm")

# %% [markdown]
# **Will it give worse answers?** For a tiny model we've asked 07's judge
# ([stored](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/rounded/README.md)), with the weights as merged and in
# four bits:

# %%
stored = pd.read_csv("data/rounded/answers.csv").pivot(index="problem", columns="weights")
found = verilog.compare(stored.sampled["bfloat16"] / 5, stored.sampled["four bits"] / 5)
mean, low, high = (round(100 * value, 1) + 0.0 for value in found["difference"])  # no -0.0
print(stored.greedy.sum().to_string())
print(f"of {len(stored)} problems pass, asked greedily. Five sampled answers, four bits minus "
      f"bfloat16: {mean:+.1f} points ({low:+.1f} to {high:+.1f})")

# %% [markdown]
# A minus means that fewer answers pass in four bits. In parentheses is a 95% interval, which says where the difference
# could plausibly lie with other problems of this kind (07, section 8). If the interval includes zero, these problems
# don't show a loss. But a small loss could still hide in it, and a larger model may behave differently.
# ([SERVING](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#in-four-bits) says how to serve the folder.)
#
# **Four bits round far more coarsely than bfloat16 does, so judge before you serve.**
#
# ## Recap
# - `merged/` is base + `(alpha / r) · (A B)ᵀ`: a float32 sum, rounded once. Every other byte is the base's. (After
#   training on int8, the base is the rounded one.)
# - `adapter/` loads in PEFT and in vLLM, with the same log-probabilities up to rounding.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. Break it on purpose: swap keys and values in section 2's last cell. Which check on this page notices? Would the
#    three lists of section 3?
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
# The shapes are the same, so the lists would let it pass, and the model would load.
#
# </details>
#
# 2. *Unmerge* section 1's matrix: subtract `delta` from `merged` in float32, and round to W's dtype again. Which share of
#    W's entries comes back exactly? Guess first, and then count.
#
# <details><summary>Solution</summary>
#
# ```python
# back = (merged.astype(np.float32) - delta).astype(W.dtype)
# off = np.linalg.norm(back.astype(float) - W.astype(float)) / np.linalg.norm(W.astype(float))
# print(f"{(back == W).mean():.0%} of the entries are W's; the rest makes {off:.3%} of its norm")
# ```
#
# Most of them, but not all. Where adding the delta pushed a number past a power of two, its last bit became coarser,
# and the merge rounded away what you'd need to get W back. So keep the base.
#
# </details>
#
# Next: [05 · Serving the fine-tuned model with vLLM](05_serve_vllm.ipynb)
