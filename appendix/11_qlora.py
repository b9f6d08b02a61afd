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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/11_qlora.ipynb)
#
# # 11 · I have four v5e chips. Can I train the 31B?
#
# Not with a base in bfloat16, because it doesn't fit. But the base model is frozen: every step reads it, and none
# changes it. So why keep it in 16 bits? We store it in 8 bits or in 4 ([QLoRA](https://arxiv.org/abs/2305.14314)),
# train the same float32 adapters beside it, and look at what that costs.
#
# | | |
# |---|---|
# | **Needs** | any machine with two CPU cores; no accelerator, no network |
# | **Takes** | the tiny base, `runs/tiny/data` of notebook 02 (made here if it is missing), stored runs in `data/qlora/`, compiled steps in `data/dryrun/` |
# | **Makes** | `figures/11_*.png` |
# | **Costs** | three to four minutes on two cores |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · **11 QLoRA** · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb) · [14 JAX](14_jax.ipynb)

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
helpers.machine(always="tiny")


# %% [markdown]
# ## 1. The answer
# **Which storage of the 31B's 31 billion weights fits four v5e chips of 16 GiB: two bytes a weight, one byte, or
# half a byte?** `tpu_time/fit.py` adds up what a chip has to hold during a training step of notebook 03. Where
# [08](08_dryrun.ipynb) has compiled exactly that step, it takes the compiler's numbers.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU on this machine stays free for others
import jax.numpy as jnp
import numpy as np
import pandas as pd
import qwix
from flax import nnx

from appendix import qlora_figures as figures, qlora_runs as lab
from helpers import gemma, quantized, style, train
from verilog import stats
from tpu_time import fit

# %%
held, fitting, compiled = {}, [], False
four_v5e = (fit.best_fit("v5e", 4, "31b", dtype) for dtype in quantized.BASE_DTYPES)
for found in four_v5e:
    print(found)
    held[found.base_dtype] = found.parts
    compiled = compiled or found.compiled
    if found.fits:
        fitting.append(found.base_dtype)
    else:
        print(f"   missing: {found.total - found.limit:.1f} GiB on each chip")
print(f"A v5e-4 costs {fit.price('v5e', 4):.2f} USD an hour, a v5p-8 {fit.price('v5p', 4):.2f}")

# %%
fig, ax = style.figure(9, 2.4)
left = np.zeros(len(held))
names = dict.fromkeys(part for parts in held.values() for part, gib in parts.items() if gib)
for part, color in zip(names, style.CYCLE):  # a compiled row knows its temporaries as one sum
    width = np.array([parts.get(part, 0.0) for parts in held.values()])
    ax.barh(list(held), width, left=left, color=color, label=part)
    left += width
ax.axvline(found.limit, color=style.BLACK)
ax.invert_yaxis()
ax.text(found.limit, 1.5, f" a program may use\n {found.limit:.2f} GiB of a chip", va="center",
        fontsize=9)
fig.legend(loc="outside right center", fontsize=8)
ax.set(title=f"The 31B on four v5e chips: {' and '.join(fitting) or 'nothing'} would fit",
       xlabel="GiB of one chip")
how = "estimated; 08 hasn't compiled these steps yet"
if compiled:
    how = "compiled where 08 has the step (temporaries: the other three), else estimated"
style.finish(fig, "11_answer", how)

# %% [markdown]
# What shrinks is the base. Adapters, moments and gradients take the same room with each storage. (Activations and
# logits may differ in the picture, because each bar is the best step that we know of, and the steps differ.)
#
# How sure is this? The compiler surprised us. With a single row in a step, the int8 step takes 13.0 GiB and the NF4
# step 10.0 (compiled). But 03 takes two rows a step. On four v5e chips these are two micro-batches in a loop, and with
# the loop the int8 step takes 16.5 GiB (compiled): it no longer fits. So on these chips you'd set `rows_per_step=1`.
# Half a byte should have room for the loop, but that's an estimate, and nobody has run any of these steps.
#
# **One byte a weight is enough for one row a step, and the chips cost less than a third of what a v5p-8 costs.**
#
# ## 2. One seed is no result
# **So it fits. But should you?** We wanted to know what a storage costs in quality, and the first thing we learned
# was how easily you're fooled. We trained a tiny base with each storage and with three seeds, and judged each tuned
# model on 38 problems, as in [07](07_eval.ipynb). Here are our first runs, made on a tiny base whose corpus had no bugs:
# pass@1 with NF4 minus pass@1 with bfloat16, with the same seed on both sides.

# %%
FIRST_BASE = "814107fdbaa3"  # an earlier one; section 6 has today's
_, _, first_answers = lab.stored(FIRST_BASE)
for seed, gap in lab.gaps(first_answers, "nf4").items():
    mean, low, high = stats.interval(gap)
    print(f"seed {seed}: {mean:+.3f} ({low:+.3f} to {high:+.3f} over problems), "
          f"p = {stats.sign_flip_p(gap):.3f}")

# %% [markdown]
# **If you had only seed 42, what would you have published?**
#
# <details><summary>Answer</summary>
#
# "Four bits cost ten points, p = 0.002." But with the same storage, the other two seeds are on the other side of
# zero. There's nothing wrong with that p: it says that these *two models* would differ on other problems of this
# kind, too. It just says nothing about models that you'd train again.
# </details>
#
# **A difference between storages needs two intervals: one over problems, and one over seeds.** Section 6 has both, for
# new runs on today's base.
#
# ## 3. One matrix, quantized
# **How do you store a number in 8 bits, or in 4?** You round every weight to one of a few levels, and you remember
# a *scale* that stretches the levels back. That's quantizing. **int8** has 255 levels at even distances, and each
# output of the matrix has a scale of its own. Take the first query projection of the tiny base:

# %%
config, mesh = lab.world()
plain = gemma.place(gemma.load_base(lab.BASE, config, mesh), mesh)
weight = plain.layers[0].attn.q_einsum.w.get_value()  # [heads, inputs, head size]
eight = qwix.quantize(weight, "int8", channelwise_axes=(0, 2), scale_dtype=jnp.bfloat16)
print("weights  ", weight[0, :4, 0])
print("int8     ", eight.qvalue[0, :4, 0], "times", eight.scale[0, 0, 0])
print("again    ", qwix.dequantize(eight)[0, :4, 0])

# %% [markdown]
# **NF4** has 16 levels, so two weights share a byte. Its levels are quantiles of a normal distribution, so they're
# dense where most weights are. With so few levels, one large weight would spoil a whole column. That's why every 32
# inputs, a *tile*, get a scale of their own. These scales cost half a bit per weight.

# %%
four = qwix.quantize(weight, "nf4", channelwise_axes=(0, 2), tiled_axes={1: 32},
                     scale_dtype=jnp.bfloat16)
rows = {}
for name, stored, bits in (("int8", eight, 8), ("nf4, tiles of 32", four, 4)):
    lost = weight.astype(jnp.float32) - qwix.dequantize(stored).astype(jnp.float32)
    rows[name] = {"bits a weight": bits + 16 * stored.scale.size / weight.size,
                  "relative error": jnp.linalg.norm(lost) / jnp.linalg.norm(weight)}
pd.DataFrame(rows, dtype=float).T.round(4)

# %% [markdown]
# So int8 is off by less than a hundredth, and NF4 by nearly a tenth. All 36 matrices of the tiny base look like
# this one, but that says little about the 31B. Large language models are known for a few inputs and weights that
# are far larger than the rest ([LLM.int8()](https://arxiv.org/abs/2208.07339)), and a model of 3.65 million weights
# doesn't have any.
#
# **Quantizing is rounding with a scale. The fewer levels there are, the fewer weights may share a scale.**
#
# ## 4. What breaks, and how to fix it
# **Can't Qwix, our LoRA library, do all this by itself?** It promises to: `LoraProvider(…, weight_qtype="int8")`
# quantizes and adds adapters in one go. But with Tunix's Gemma 4, the model that comes out doesn't run:

# %%
stock = qwix.LoraProvider(module_path=gemma.TARGETS, rank=4, alpha=8.0, weight_qtype="int8")
two = jnp.ones((1, 2), jnp.int32)
inputs = {"positions": jnp.arange(2)[None], "attention_mask": jnp.ones((1, 2, 2), bool)}
with mesh:
    broken = qwix.apply_lora_to_model(plain, stock, two, **inputs, rngs=nnx.Rngs(0))
    try:
        broken(two, **inputs)
    except TypeError as error:
        print("TypeError:", str(error).splitlines()[0][:150])

# %% [markdown]
# Tunix calls `jnp.astype` on its weight. A quantized weight isn't an array, though: it's a pair of values and
# scales. Normally Qwix handles that by *interception*. While the model runs, calls of `jnp.einsum`, `jnp.asarray`
# and others go to the *provider* instead, an object that knows about scales. `jnp.astype` isn't on its list, so we
# add it.

# %%
helpers.show_source(quantized.Casts, quantized.Dequantized)

# %% [markdown]
# The second class saves time and memory. Without it, Qwix would look up NF4 weights in a table, and on a mesh that
# gathers whole matrices on every chip.
#
# In 03 all this is one setting, `base_dtype="int8"` or `"nf4"`, and on a v5e-8 the 31B gets int8 by itself. 03 then
# loads the base on the host and sends one quantized matrix at a time to the chips. (If you try this in 03 on a CPU,
# take int8, because JAX 0.10.2 refuses 4-bit arguments there if a step was compiled ahead.) Here's what 03 calls, and
# what the base then takes:

# %%
model = quantized.load_base(lab.BASE, config, mesh, "nf4")
model = gemma.inject_lora(model, 16, 32.0, mesh, provider=quantized.provider("nf4", 16, 32.0))
frozen = nnx.split(model, nnx.LoRAParam, ...)[2]
for name, state in (("bfloat16", nnx.state(plain)), ("nf4", frozen)):
    print(f"{name}: {1024 * gemma.gib(state):.2f} MiB")

# %% [markdown]
# Norms, the embedder and E2B's per-layer inputs stay in bfloat16 on purpose. They're small, or they're looked up
# and not multiplied.
#
# **One more intercepted call, and Tunix's model runs on a quantized base.**
#
# ## 5. Is it right?
# **How do we know that the quantized model computes what it should?** Quantizing changes the weights, and it must
# change nothing else. So we write the *dequantized* weights (levels times scales) into a plain model, and both models
# have to compute the same:

# %%
tokens = np.random.default_rng(0).integers(120, 1_200, (2, 64))
mask = np.tril(np.ones((2, 64, 64), bool))
written_out = gemma.place(gemma.load_base(lab.BASE, config, mesh), mesh)
written_out = quantized.dequantize_into(written_out, model)
with mesh:
    run = nnx.jit(lambda one: one(tokens, attention_mask=mask)[0].astype(jnp.float32))
    logits = [np.asarray(run(one)) for one in (model, written_out, plain)]
apart = [np.abs(logits[0] - other).max() / np.abs(logits[0]).max() for other in logits[1:]]
print(f"largest difference of logits: {apart[0]:.1%} to the dequantized model, "
      f"{apart[1]:.1%} to the base")
assert apart[0] < 0.05

# %% [markdown]
# The first number is the test. The second shows how far NF4 itself moves the base.
#
# Training follows gradients, so they matter more. We compare the adapters' gradients with those of the unquantized
# model. For each kind of matrix, the table says whether they point the same way: 1 is the same direction. (We do it
# at a random B, because at B = 0 the gradient of A is zero.) The column *int8 arithmetic* goes one step further:
# there the weights are also multiplied as int8, forward and backward, which a TPU does up to twice as fast.
# ([08](08_dryrun.ipynb) predicts how long such a step takes.)

# %%
if not helpers.run_dir("data", "train").is_dir():
    helpers.catch_up("02")  # half a minute
rows = train.PackedRows(helpers.require(helpers.run_dir("data", "train"), "02_data.py"))
batch = train.Batch(**{name: array[:2] for name, array in rows.arrays.items()})
with helpers.phase("gradients of four models"):
    found = {name: lab.gradients(lab.build(name)[0], mesh, batch) for name in lab.VARIANTS}
pd.DataFrame({name: lab.cosines(kinds, found["bfloat16"])
              for name, kinds in found.items()}).round(3)

# %% [markdown]
# int8 storage costs next to nothing. NF4 turns the gradient visibly, and section 6 shows whether it still *learns*.
#
# ### A trap: rounding has no gradient
# Qwix can round activations, too, with `act_qtype="int8"`. That looks like the switch for int8 arithmetic. But in the
# LoRA provider it silently ruins the gradient, because the derivative of rounding is zero almost everywhere, and
# nothing there lets the gradient pass anyway:

# %%
rule = qwix.LoraRule(module_path=gemma.TARGETS, rank=16, alpha=32.0, weight_qtype="int8",
                     act_qtype="int8", lora_a_initializer=gemma.lora_a,
                     lora_b_initializer=gemma.lora_b)
trapped = quantized.load_base(lab.BASE, config, mesh, "int8")
trapped = gemma.inject_lora(trapped, 16, 32.0, mesh, provider=quantized.QuantizedLora([rule]))
cosines = lab.cosines(lab.gradients(trapped, mesh, batch), found["bfloat16"])
print(", ".join(f"{kind} {value:.2f}" for kind, value in cosines.items()))
assert min(cosines.values()) < 0.9

# %% [markdown]
# In the backward pass, our int8 arithmetic (`int8_products=True`) acts as if the rounding weren't there. That's
# called the *straight-through* estimate.
#
# **Right logits don't prove right gradients, so compare both.**
#
# ## 6. What it costs in quality
# **Does the tuned model get worse?** The gradients are a promise, and here's the test. We train today's tiny base
# ([09](09_tiny_base.ipynb)) with each storage, on 02's rows and with 03's step, but for only 38 steps of four rows. Then we
# judge it as in 07. First a short run, live:

# %%
_, _, losses, validation = lab.fit("nf4", 42, steps=8)
print(f"validation loss {validation:.3f}")

# %% [markdown]
# And now the stored runs, three seeds each:

# %%
runs, loss, answers = lab.stored(lab.base_id())
print(f"{len(runs)} runs, made on base {lab.base_id()}")
figures.draw_losses(runs, loss)

# %% [markdown]
# The losses hardly differ, but what counts is whether the answers pass. For each problem we sampled three answers
# (temperature 0.8) and took a greedy one. Every run has a twin in bfloat16 with the same seed, so we compare in pairs,
# problem by problem.

# %%
table = lab.differences(answers)
style.folded("the differences as numbers", lab.in_points(table))

# %%
figures.draw_quality(answers, table)

# %%
for (plan, name), row in table.iterrows():
    ends = row[["problems from", "problems to", "seeds from", "seeds to"]]
    clear = ends.min() > 0 or ends.max() < 0
    said = "both intervals leave out zero" if clear else "no difference shown"
    reach = f"up to {ends.min():+.3f} or {ends.max():+.3f}"
    print(f"{name}, {plan}: {row.difference:+.3f}, {said}; not excluded: "
          + (reach if ends.notna().all()
             else f"unknown, the seeds show no spread ({reach} by problems)"))

# %% [markdown]
# *No difference shown* isn't the same as *equal*, so read how far the intervals reach. And with six comparisons,
# it's no surprise if one of them leaves out zero.
#
# **To decide for your own task, train several seeds with both storages, and ask more problems.**
#
# ## 7. Merging: into which base?
# **You trained beside a rounded base. Do you merge the adapter into that one, or into the original?** The adapter
# has only ever seen the rounded weights, and it may have learned to make up for their errors. So we merge it into
# those, and then you ship what training has validated. 04 does that by itself: 03's recipe tells it how the base was
# stored, and `quantized.as_trained` rounds the base's weights again.
#
# Does it matter? In our first runs, those of section 2, neither base gave the better merged model (no p below 0.4). The result is in
# bfloat16, and you serve it like any other.
#
# **Merge into the base that you trained on.**
#
# ## 8. What it buys
# **On which slices does this decide anything?** For every slice and storage, the table shows the best step that
# fits. That's a compiled step if there is one. Otherwise it's the estimated step that recomputes least, with the
# longest rows. (An estimate has to leave a tenth of the chip free, and three tenths if the step has several
# micro-batches, because no estimate knows what the loop over them costs.) Hours and dollars are for the published 10,000 examples of 922
# tokens, with loading, compiling and saving. They stand only where we could predict the time from a compiled program
# ([08](08_dryrun.ipynb)).

# %%
rows = []
for model, kind, chips in (("31b", "v5e", 4), ("31b", "v6e", 4), ("31b", "v5e", 8),
                           ("31b", "v6e", 8), ("31b", "v5p", 4), ("e2b", "v5e", 1),
                           ("e4b", "v5e", 1)):
    for dtype in quantized.BASE_DTYPES:
        found = fit.best_fit(kind, chips, model, dtype)
        cost = fit.run_cost(found, 10_000 * 922, fit.price(kind, chips))
        needed, how = fit.needed(found)
        rows.append({"slice": found.slice, "model": model, "base": dtype,
                     "fits": "yes" if found.fits else "no",
                     "rows": f"{found.rows} x {found.row_length:,}", "GiB": needed,
                     "of GiB": found.limit, "how we know": how,
                     "hours": cost["hours_text"] if found.fits and found.speed else None,
                     "USD": cost["dollars_text"] if found.fits and found.speed else None})
table = pd.DataFrame(rows).set_index(["model", "slice", "base"])
table.style.format({"GiB": "{:.1f}", "of GiB": "{:.2f}"}, na_rep="-")

# %% [markdown]
# - **v5e-4, v5e-8**: quantizing decides whether the 31B trains at all. On a v5e-8, which
#   [Kaggle lends for nothing](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md#free-kaggles-tpu-v5e-8),
#   03 takes int8 by itself. Its step is compiled whole there; nobody has run it.
# - **v6e-4** (estimated), **v6e-8, v5p-8**: the 31B fits in bfloat16, and storage alone saves no time. With int8
#   *products* and no tensor parallelism, a v5p-8 may be faster ([08](08_dryrun.ipynb), section 7).
# - **v5e-1**: the E2B doesn't need quantizing. 03's step takes 14.7 of 15.75 GiB there (compiled), so it fits, but
#   it doesn't leave the tenth free that we'd like to see. The E4B (the next larger one) doesn't fit with any
#   storage, by our estimate. A v6e-1 has twice the memory.
#
# **Quantize if the base doesn't fit. If it fits, storage alone saves no time.**
#
# <details><summary><b>How do you train the 31B on a v5e-4?</b></summary>
#
# - In 02, set `max_tokens` and `sequence_length` to 2,048.
# - In 03, set `base_dtype="int8"`, `remat="DECODER"`, `rows_per_device=1` and `rows_per_step=1`: exactly that step is
#   compiled and fits. Its batch is half of 03's, so the recipe is another one.
# - Loading takes 62 GB of the host's memory, and about 10 more while it stacks queries, keys and values. So keep
#   the files on a disk and not in `/dev/shm`, which is memory, too.
# - 04 doesn't need a TPU, but it needs 125 GB of disk. Run it on another machine.
#
# </details>
#
# ## 9. Serving a quantized base
# **Does the server have to know about any of this?** No, because section 7 makes a bfloat16 model. You *can*
# quantize for serving as well, in two ways, but neither of them has run on a TPU here.
#
# - **int8 on a TPU**: vLLM's JAX models load bfloat16 and then quantize through Qwix (`quantization="int8"` in 05).
#   They don't round as we do, so evaluate again.
# - **fp8 on a v6e** saves memory. It can't speed up reading the prompt, because that chip has no fp8 arithmetic.
#   Decoding could gain, since each token reads half the bytes of the weights; nobody has measured it for Gemma 4.
#
# **How you stored the base while training doesn't decide how you serve it.**
#
# ## Recap
# - A frozen base can be stored in 8 or 4 bits, while the adapters stay float32.
# - Qwix has to intercept one more call, and then Tunix's model runs on it.
# - int8 keeps the gradient, and NF4 turns it.
# - Judge a storage by several seeds, and merge into the base that you trained on.
#
# ### Exercises
# 1. NF4 with tiles of 16 costs a full bit for scales. What does it buy in section 3's table?
#
# <details><summary>Solution</summary>
#
# `tiled_axes={1: 16}`: about 7% less error, for half a bit more per weight.
# </details>
#
# 2. Train only the attention on an NF4 base (`targets=".*_einsum", partial=True`). Is the MLP
#    still quantized?
#
# <details><summary>Solution</summary>
#
# ```python
# targets = ".*_einsum"
# part = gemma.inject_lora(
#     quantized.load_base(lab.BASE, config, mesh, "nf4"), 16, 32.0, mesh, targets, partial=True,
#     provider=quantized.provider("nf4", 16, 32.0, targets))
# print(part.layers[0].mlp.gate_proj.kernel.array.qvalue.get_value().dtype)
# ```
#
# Yes, it's `uint4`: the provider has a second rule for matrices that get no adapter.
# </details>
#
# Back to the [series](https://github.com/OWNER/gemma4-on-tpu#readme).
