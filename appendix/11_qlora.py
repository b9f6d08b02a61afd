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
# With a base in bfloat16 you can't, because it doesn't fit. But the base model is frozen: every step reads it, and none
# changes it. So why keep 16 bits of each weight? Let's store it in 8 bits or in 4
# ([QLoRA](https://arxiv.org/abs/2305.14314)), train the same float32 adapters beside it, and see what that costs. The two
# formats are called *int8* and *NF4*.
#
# | | |
# |---|---|
# | **Needs** | any machine with two CPU cores; no accelerator, no network |
# | **Reads** | the tiny base, `runs/tiny/data` of notebook 02 (made here if it is missing), stored runs in `data/qlora/`, compiled steps in `data/dryrun/` |
# | **Writes** | `figures/11_*.png` |
# | **Time and cost** | two and a half to four minutes on two cores |

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
# **In which format do the 31B's 31 billion weights fit four v5e chips of 16 GiB: two bytes a weight, one byte, or half a
# byte?** `tpu_time/fit.py` adds up what a chip has to hold during a training step of notebook 03. Where
# [08](08_dryrun.ipynb) has compiled exactly that step, it takes the compiler's numbers.
#
# 03's step has two rows, which these chips compute one after the other, in a loop. The last line shows a step with a
# single row, and so without a loop.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU on this machine stays free for others
import jax.numpy as jnp
import numpy as np
import pandas as pd
import qwix
from flax import nnx
from IPython.display import display

from appendix import qlora_figures as figures, qlora_runs as lab
from helpers import gemma, quantized, style, train
from verilog import stats
from tpu_time import fit

# %%
steps = {}
for dtype in quantized.BASE_DTYPES:
    steps[dtype] = fit.best_fit("v5e", 4, "31b", dtype)
steps["int8 with one row a step"] = lab.one_row()
for name, step in steps.items():
    print(f"{name}: {'fits' if step.fits else 'does not fit'}, {step.total:.1f} of "
          f"{step.limit:.2f} GiB per chip, rows of {step.row_length:,} tokens ({step.how})")
print(f"A v5e-4 costs {fit.price('v5e', 4):.2f} USD an hour, a v5p-8 {fit.price('v5p', 4):.2f}")

# %%
figures.draw_answer(steps)

# %% [markdown]
# Only the base shrinks. Adapters, moments and gradients take the same room in each format. (Each bar is the best step
# that we know of, so the bars also differ in rows and recomputing.) NF4 is the format of half a byte. With it you pay in
# time, because each weight has to be unpacked before it's multiplied.
#
# The loop surprised us. The compiler does accept the int8 step with the loop: it plans 15.0 of the 15.75 GiB. But what it
# reports after the whole compilation can be up to 15% more than its plan ([08](08_dryrun.ipynb), section 9), and here it
# adds up to 16.5. So we don't count on that step: with int8, set `rows_per_step=1`. NF4 leaves room for the loop, by our
# estimate. Nobody has run any of these steps.
#
# **Half a byte a weight fits, with 03's two rows (estimated) or with one (compiled). One byte a weight fits with one row
# (compiled). Per token you'd pay about as much as on a v5p-8, and wait about four times as long (predicted).**
#
# ## 2. One seed is no result
# **So it fits. But should you?** We wanted to know what a format costs in quality, and first we learned how easily you
# can fool yourself. We trained a tiny base in each format and with three seeds, and judged each tuned model on 38
# problems, as in [07](07_eval.ipynb). Here are our first runs, made on a tiny base whose corpus had no bugs: pass@1
# with NF4 minus pass@1 with bfloat16, with the same seed on both sides.

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
# "Four bits cost ten points, p = 0.002." But in the same format, the other two seeds are on the other side of zero.
# That p isn't wrong: it says that these *two models* would differ on other problems of this kind. It just says nothing
# about models that you'd train again.
#
# </details>
#
# Section 6 has new runs, on today's base.
#
# **A difference between formats needs two intervals: one over problems, and one over seeds.**
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
# So int8 is off by less than a hundredth, and NF4 by nearly a tenth. All 36 matrices of the tiny base look like this
# one. But don't count on that for the 31B: large language models are known for a few inputs and weights that are far
# larger than the rest ([LLM.int8()](https://arxiv.org/abs/2208.07339)), and a model of 3.65 million weights doesn't
# have any.
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
# Why? Tunix calls `jnp.astype` on its weight, and a quantized weight isn't an array: it's a pair of values and scales.
# Normally Qwix handles that by *interception*. While the model runs, calls of `jnp.einsum`, `jnp.asarray` and others go
# to the *provider* instead, an object that knows about scales. `jnp.astype` isn't on its list, so let's add it.

# %%
helpers.show_source(quantized.Casts)

# %% [markdown]
# A second class, `quantized.Dequantized`, saves time and memory: it turns a stored matrix back into bfloat16 right before
# the product. Left alone, Qwix would look up every NF4 weight in a table, and on a mesh that look-up would bring whole
# matrices to every chip.
#
# In 03 all this is one setting, `base_dtype="int8"` or `"nf4"`, and on a v5e-8 the 31B gets int8 by itself. 03 then
# loads the base on the host and sends one quantized matrix at a time to the chips. (To try this in 03 on a CPU, take
# int8. 03 compiles its step ahead of time, and on a CPU JAX 0.10.2 can't hand 4-bit arrays to such a step.) Here's what
# 03 calls, and what the base then takes:

# %%
model = quantized.load_base(lab.BASE, config, mesh, "nf4")
model = gemma.inject_lora(model, 16, 32.0, mesh, provider=quantized.provider("nf4", 16, 32.0))
frozen = nnx.split(model, nnx.LoRAParam, ...)[2]
for name, state in (("bfloat16", nnx.state(plain)), ("nf4", frozen)):
    print(f"{name}: {1024 * gemma.gib(state):.2f} MiB")

# %% [markdown]
# Four bits are a quarter of sixteen, but the base takes nearly a third. That's because of the scales, and because the
# embeddings stay in bfloat16.
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
# The first number is the test, and the second shows how far NF4 itself moves the base.
#
# Training follows gradients, so let's compare the adapters' gradients on each quantized base with those on the bfloat16
# base. For each kind of matrix, the table says whether they point the same way: 1 is the same direction. (We do it at a
# random B, because at B = 0 the gradient of A is zero.) The column *int8 arithmetic* goes one step further: there the
# products are computed in int8, too, forward and backward, which a TPU does up to twice as fast.
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
# int8 costs the gradient next to nothing. NF4 turns it by about 20 degrees (0.94 is the cosine of 20 degrees). Section 6
# shows whether a model still *learns* with such a gradient.
#
# ### A trap: rounding has no gradient
# Qwix can round activations, too, with `act_qtype="int8"`. That looks like the switch for int8 arithmetic, and it
# raises no error. But in the LoRA provider it ruins the gradient: the derivative of rounding is zero almost everywhere,
# and the provider has nothing that would let the gradient pass anyway.

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
# These cosines are near 0, so hardly anything is left of the right direction. Our int8 arithmetic (`int8_products=True`)
# avoids that: in the backward pass, it acts as if the rounding weren't there. That's called the *straight-through*
# estimator.
#
# **Right logits don't prove right gradients, so compare both.**
#
# ## 6. What it costs in quality
# **Does the tuned model get worse?** The gradients are a promise, and here's the test. We train today's tiny base
# ([09](09_tiny_base.ipynb)) in each format, on 02's rows and with 03's step, but for only 38 steps of four rows. Then we
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
# The losses hardly differ. (On the right, two of NF4's three seeds lie on each other.) But what counts is whether the
# answers pass. For each problem we sampled three answers (temperature 0.8) and took a greedy one. Every run has a twin in
# bfloat16 with the same seed, so we compare in pairs, problem by problem.

# %%
table = lab.differences(answers)
style.folded("the differences as numbers", lab.in_points(table))

# %%
figures.draw_quality(answers, table)

# %% [markdown]
# How do you read this? Where an interval contains zero, we've shown no difference. That isn't the same as *equal*, so
# look how far it reaches. In sampled answers, no interval reaches further than four points from zero. With greedy answers
# NF4 may have lost fifteen points or won twelve: three seeds can't tell. (Where every seed gave the same verdicts as
# bfloat16, there's no spread to make an interval from, so those runs can't say how large a difference could be.)
#
# Here all six comparisons contain zero. If one of six didn't, that alone would be no surprise.
#
# **At the tiny size, no format costs anything that these runs can show. To decide for your own task, train several seeds
# in both formats, and ask more problems.**
#
# ## 7. Merging: into which base?
# **You trained beside a rounded base. Do you merge the adapter into that one, or into the original?** The adapter
# has only ever seen the rounded weights, and it may have learned to make up for their errors. So we merge it into
# those, and then you ship what training has validated. 04 does that by itself: 03's recipe tells it how the base was
# stored, and `quantized.as_trained` rounds the base's weights again.
#
# Does it matter? In our first runs, those of section 2, neither base gave the better merged model (no p below 0.4). The
# result is in bfloat16, and you serve it like any other.
#
# **Merge into the base that you trained on.**
#
# ## 8. What it buys
# **On which slices does this decide anything?** For every slice and format, the table shows the step that 03 would
# take, or the smallest one if none fits. The numbers are the compiler's where [08](08_dryrun.ipynb) has compiled that
# step; elsewhere they're estimated (08, section 8). (So an estimate of 15.3 of 15.75 GiB doesn't count as fitting.)
# Hours and dollars are for the published 10,000 examples of 922 tokens, with loading, compiling and saving. They stand
# only where we could predict the time from a compiled program.

# %%
here = [("31b", "v5e", 4), ("31b", "v5e", 8), ("31b", "v5p", 4), ("e2b", "v5e", 1)]
display(style.words(lab.best_steps(here)))
others = [("31b", "v6e", 4), ("31b", "v6e", 8), ("e4b", "v5e", 1)]
style.folded("v6e, and the E4B", lab.best_steps(others))

# %% [markdown]
# - **v5e-4, v5e-8**: 03's step of the 31B fits only with a quantized base. On a v5e-8, which
#   [Kaggle lends for nothing](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md#free-kaggles-tpu-v5e-8),
#   03 takes int8 by itself. Its step is compiled whole there; nobody has run it. (Others trained there beside a bfloat16
#   base, with adapters on the upper 30 layers only.)
# - **v6e-4** (estimated), **v6e-8, v5p-8**: the 31B fits in bfloat16, and a smaller format alone saves no time. With
#   int8 *products* and no tensor parallelism, a v5p-8 may be faster ([08](08_dryrun.ipynb), section 7).
# - **v5e-1**: the E2B doesn't need quantizing. 03's step takes 14.7 of 15.75 GiB there (compiled), so it fits, but
#   it doesn't leave the tenth free that we'd like to see. 03's step of the E4B, the next larger model, doesn't fit in any
#   format: even with NF4, its four rows of 2,048 tokens take 16.4 GiB (compiled). With one row a step it's 14.7. A v6e-1
#   has twice the memory.
#
# **Quantize if the base doesn't fit. If it fits, a smaller format saves time only where a chip waits for gathered weights,
# because then half the bytes travel.**
#
# <details><summary><b>How do you train the 31B on a v5e-4?</b></summary>
#
# - In 02, set `max_tokens` and `sequence_length` to 2,048.
# - In 03, set `base_dtype="int8"`, `remat="DECODER"`, `rows_per_device=1` and `rows_per_step=1`: exactly that step is
#   compiled and fits. It has one row where 03's step has two, so it's a different recipe. (03's other programs are
#   compiled for it, too, and fit: validation is the largest, with 14.4 of 15.75 GiB.)
# - Loading takes 62 GB of the host's memory, and about 10 more while it stacks queries, keys and values. So keep
#   the files on a disk and not in `/dev/shm`, which is memory, too.
# - 04 doesn't need a TPU, but it needs 125 GB of disk. Run it on another machine.
#
# </details>
#
# ## 9. Serving a quantized base
# **Does the server have to know about any of this?** No, because section 7 makes a bfloat16 model. You *can* quantize
# for serving as well: vLLM's JAX models load bfloat16 and then quantize through Qwix (`quantization="int8"` in 05).
# They don't round as we do, so evaluate again. We haven't run that on a TPU, but
# [SERVING](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#what-is-known-to-start) says what's known of
# it.
#
# **The format in which you train doesn't decide the one in which you serve.**
#
# ## Recap
# - A frozen base can be stored in 8 or 4 bits, while the adapters stay float32.
# - Qwix has to intercept one more call, and then Tunix's model runs on it.
# - int8 keeps the gradient's direction, and NF4 turns it a little.
# - Judge a format by several seeds, and merge into the base that you trained on.
#
# ### Exercises
# **Exercise 1: more seeds.** Section 6's intervals over seeds come from three seeds. With six that are spread as widely,
# how much narrower would the intervals be? Guess, then run this:
#
# ```python
# from scipy.stats import t
# for seeds in (3, 6):
#     print(seeds, t.ppf(0.975, seeds - 1) / seeds**0.5)  # half an interval, in standard deviations
# ```
#
# <details><summary>Solution</summary>
#
# 2.48 and 1.05, so they'd be less than half as wide. Twice as many seeds make a mean √2 times as sure, and that's the
# smaller part. The larger part is that three values hardly tell how wide the spread is, so the interval has to allow for
# a wide one.
#
# </details>
#
# **Exercise 2: adapters for a part of the model.** Train only the attention on an NF4 base (`targets=".*_einsum"`,
# `partial=True`). Is the MLP still stored in four bits? Guess, then look at one of its matrices:
#
# ```python
# targets = ".*_einsum"
# part = gemma.inject_lora(
#     quantized.load_base(lab.BASE, config, mesh, "nf4"), 16, 32.0, mesh, targets, partial=True,
#     provider=quantized.provider("nf4", 16, 32.0, targets))
# print(part.layers[0].mlp.gate_proj.kernel.array.qvalue.get_value().dtype)
# ```
#
# <details><summary>Solution</summary>
#
# Yes, it's `uint4`. Otherwise the MLP, which holds most of the weights, would take four times the memory. That's why the
# provider has a second rule, for matrices that get no adapter.
#
# </details>
#
# Back to the [series](https://github.com/OWNER/gemma4-on-tpu#readme).
