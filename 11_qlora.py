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
# The base model is frozen. It is read in every step and never written, so why keep it in 16 bits?
# We store it in 8 or in 4, train the same float32 adapters beside it, and look at what that costs.
#
# | | |
# |---|---|
# | **Needs** | any machine with two CPU cores; no accelerator, no network |
# | **Takes** | the tiny base, `runs/tiny/data` of notebook 02 (made here if it is missing), stored runs in `data/qlora/` and `data/dryrun/` |
# | **Makes** | `figures/11_*.png` |
# | **Costs** | about five minutes |
#
# The outputs shown are those of two CPU cores. Terms are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · **11 QLoRA** · [12 automata](12_nca.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
found = [p for p in (sys.path[0], ".", "..", "gemma4-on-tpu") if os.path.isdir(f"{p}/tpu_time")]
if not found:  # a notebook that was opened alone, as Colab opens it
    subprocess.check_call("git clone -q --depth=1 https://github.com/OWNER/gemma4-on-tpu".split())
sys.path.insert(0, os.path.abspath((found or ["gemma4-on-tpu"])[0]))
import helpers
helpers.machine(always="tiny")


# %% [markdown]
# ## 1. The answer
# `tpu_time/fit.py` adds up what a chip has to hold in a training step of notebook 03. Where 08 has
# compiled exactly that step it takes the compiler's numbers, and says so.

# %%
os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU on this machine stays free for others
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import qwix
from flax import nnx
from IPython.display import display

from appendix import quantized
from helpers import gemma, stats, style, train
from tpu_time import fit
from appendix import qlora_runs as lab

# %%
held, four_v5e = {}, (fit.best_fit("v5e", 4, "31b", dtype) for dtype in quantized.BASE_DTYPES)
for found in four_v5e:
    print(found)
    held[found.base_dtype] = found.parts
    if not found.fits:
        print(f"   missing: {found.total - found.limit:.1f} GiB on each chip")
dollars, other = fit.price("v5e", 4), fit.price("v5p", 4)
print(f"A v5e-4 costs {dollars:.2f} USD an hour, a v5p-8 {other:.2f}")

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
style.label_line(ax, found.limit, 1.5, f"a program may use\n{found.limit:.2f} GiB of a chip",
                 style.BLACK)
fig.legend(loc="outside right center", fontsize=8)
ax.set(title="The 31B on four v5e chips: only a quantised base fits", xlabel="GiB of one chip")
style.finish(fig, "11_answer",
             "compiled where 08 has the step (temporaries: the other three), else estimated")

# %% [markdown]
# **Yes**, at less than a third of a v5p-8's price per hour, with int8 already: the TPU's compiler
# made both quantised steps for a v5e-4. Nobody has run them. The base's weights are what shrinks;
# adapters, their moments and the activations stay. The line is what a program may use of a chip.
# NF4 leaves three GiB more, and pays for it in time: 1.36 s a step where int8 takes 1.08 (predicted,
# [08](08_dryrun.ipynb)), because each weight has to be unpacked before it is multiplied.
#
# The rest of this notebook is about whether one *should*: what quantising does to a weight, to a
# gradient, to a trained model, and what has to be right for it.

# %% [markdown]
# ## 2. One matrix, quantised
# Quantising means: round every weight to one of a few levels, and remember a scale that stretches
# the levels back. With **int8** there are 255 levels, evenly spaced, and each output of the matrix
# has a scale of its own. Take the first query projection of the tiny base:

# %%
config, mesh = lab.world()
plain = gemma.place(gemma.load_base(lab.BASE, config, mesh), mesh)
weight = plain.layers[0].attn.q_einsum.w.get_value()  # [heads, inputs, head size]
eight = qwix.quantize(weight, "int8", channelwise_axes=(0, 2), scale_dtype=jnp.bfloat16)
print("weights  ", weight[0, :4, 0])
print("int8     ", eight.qvalue[0, :4, 0], "times", eight.scale[0, 0, 0])
print("again    ", qwix.dequantize(eight)[0, :4, 0])

# %% [markdown]
# **NF4** has 16 levels, so two weights share a byte. The levels are the quantiles of a normal
# distribution ([QLoRA](https://arxiv.org/abs/2305.14314)): dense where weights are. With so few,
# one large weight would spoil a whole column, so every 32 inputs get a scale of their own: a
# *tile*. The scales cost half a bit per weight.

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
# Drawn for one column: dots are the weights, bars are where they end up.

# %%
column = np.asarray(weight[0, :32, 0], np.float32)
fig, ax = style.figure(9, 2.6)
for place, stored, color in ((1, eight, style.BLUE), (0, four, style.ORANGE)):
    level = np.asarray(qwix.dequantize(stored), np.float32)[0, :32, 0]
    ax.hlines(place, column.min(), column.max(), color="#DDDDDD", zorder=0)
    ax.plot(level, np.full(32, place), "|", color=color, ms=16, mew=2)
    ax.plot(column, np.full(32, place + 0.28), ".", color=style.GREY)
ax.set(yticks=[0, 1], yticklabels=["nf4", "int8"], ylim=(-0.4, 1.6), xlabel="weight",
       title="int8 hardly moves 32 weights, NF4 puts them on a few levels")
style.finish(fig, "11_levels", "the tiny base, layer 0, q_proj, first head")

# %% [markdown]
# The same for every matrix of the model. If one kind or one layer stood out, we would leave it in
# bfloat16.

# %%
errors = lab.weight_errors([("int8", 0), ("nf4", 32), ("nf4", 16)])
table = errors.pivot_table(index="kind", columns="storage", values="error", sort=False)
table.style.format("{:.2%}")

# %%
fig, axes = style.figure(9, 2.8, columns=2, sharex=True)
for ax, storage, color in zip(axes, ("int8", "nf4, tiles of 32"), (style.BLUE, style.ORANGE)):
    for kind, each in errors[errors.storage == storage].groupby("kind"):
        ax.plot(each.layer, 100 * each.error, "o-", color=color, alpha=0.5, ms=4)
    ax.set(title=f"{storage}: no layer stands out", xlabel="layer",
           ylim=(0, 120 * errors[errors.storage == storage].error.max()))
axes[0].set(ylabel="relative error, %")
style.finish(fig, "11_errors", "the tiny base, every stored matrix, one line per kind")

# %% [markdown]
# ## 3. What breaks, and how to mend it
# Qwix promises both in one: `LoraProvider(…, weight_qtype="int8")` quantises and adds adapters. On
# Tunix's Gemma 4 the first one works and the model that comes out of it does not run:

# %%
stock = qwix.LoraProvider(module_path=gemma.TARGETS, rank=4, alpha=8.0, weight_qtype="int8")
two = jnp.ones((1, 2), jnp.int32)
inputs = {"positions": jnp.arange(2)[None], "attention_mask": jnp.ones((1, 2, 2), bool)}
with gemma.use_mesh(mesh):
    broken = qwix.apply_lora_to_model(plain, stock, two, **inputs, rngs=nnx.Rngs(0))
    try:
        broken(two, **inputs)
    except TypeError as error:
        print("TypeError:", str(error).splitlines()[0][:150])

# %% [markdown]
# Tunix's `Einsum` casts its weight with `jnp.astype` before it multiplies, and a quantised weight
# is no array: it is a pair, values and scales. Qwix works by *interception*: while the model runs,
# calls of `jnp.einsum`, `jnp.asarray` and others go to its provider. `jnp.astype` is not on its
# list. A provider may add to that list, so nothing has to be patched: `Casts` adds it in one line. The
# second class is there for speed and memory: without it Qwix would gather whole NF4 matrices on every chip.

# %%
helpers.show_source(quantized.Casts, quantized.Dequantized, quantized.QuantizedLora)

# %% [markdown]
# ## 4. Loading it without ever holding the whole
# The 31B in bfloat16 takes 57 GiB, 14.3 of each chip's 15.75 on a v5e-4, which leaves no room to quantise
# it there. So its files are mapped into the host's memory, and one matrix at a time is quantised there
# and sent to the chips. Everything else in training stays as notebook 03 has it.

# %%
model = quantized.load_base(lab.BASE, config, mesh, "nf4", 32)
model = gemma.inject_lora(model, 16, 32.0, mesh, provider=quantized.provider(
    "nf4", 16, 32.0, tile_size=32))
for name, one in (("bfloat16", plain), ("nf4", nnx.split(model, nnx.LoRAParam, ...)[2])):
    state = nnx.state(one) if isinstance(one, nnx.Module) else one
    print(f"{name}: {1024 * gemma.gib(state):.2f} MiB")

# %% [markdown]
# In 03 this is one setting, `base_dtype` (and `tile_size`), and the recipe remembers it: a
# checkpoint trained on another storage is refused before anything is loaded. What is left in
# bfloat16 is left on purpose. For the 31B, from its shapes alone:

# %%
big = gemma.config_from_hf("data/configs/gemma4_31b.json")
four_chips = jax.sharding.Mesh(np.array(jax.devices()[:1] * 4).reshape(1, 4), ("fsdp", "tp"))
with helpers.phase("shapes of the 31B"):
    shapes = quantized.abstract_base(big, four_chips, "nf4", 32)
kept, stored = [], []
for path, leaf in nnx.to_flat_state(nnx.state(shapes)):
    (stored if path[-2:] == ("array", "qvalue") else kept).append((path, leaf.size))
kept = [(path, size) for path, size in kept if path[-2:] != ("array", "scale")]
print(f"{len(stored)} matrices quantised, {sum(size for _, size in stored):,} weights")
names = {path[0] if path[0] != "layers" else path[2] if len(path) == 3 else path[-2]
         for path, _ in kept}
print(f"{len(kept)} arrays kept, {sum(size for _, size in kept):,} numbers: "
      + ", ".join(sorted(map(str, names))))
assert len(stored) == len(gemma.expected_modules(big))
print(f"base on one of four chips: {gemma.gib(nnx.state(shapes)):.2f} GiB")

# %% [markdown]
# ## 5. Is it right?
# Storage in 8 or 4 bits changes the weights. It must change nothing else. So the quantised model
# has to compute exactly what a plain model computes with the dequantised weights written out:

# %%
tokens = np.random.default_rng(0).integers(120, 1_200, (2, 64))
mask = np.tril(np.ones((2, 64, 64), bool))
written_out = gemma.place(gemma.load_base(lab.BASE, config, mesh), mesh)
written_out = quantized.dequantize_into(written_out, model)
with gemma.use_mesh(mesh):
    run = nnx.jit(lambda one: one(tokens, attention_mask=mask)[0].astype(jnp.float32))
    logits = [np.asarray(run(one))
              for one in (model, written_out, plain)]
apart = [np.abs(logits[0] - other).max() / np.abs(logits[0]).max() for other in logits[1:]]
print(f"largest difference of logits: {apart[0]:.1%} to the dequantised model, "
      f"{apart[1]:.1%} to the base")
assert apart[0] < 0.05

# %% [markdown]
# The first number is the test: stored values compute what written-out values compute. The second is
# what NF4 itself does to an untrained model; it is the single largest change among all logits. Whether it
# matters is what section 7 measures.
#
# Training follows gradients, so these count more. We compare the adapters' gradients with those of
# the unquantised model, kind by kind: 1 is the same direction, 0 is none of it. The column *int8
# arithmetic* is what section 6 explains.

# %%
if not helpers.run_dir("data", "train").is_dir():
    helpers.catch_up("02")  # half a minute
rows = train.PackedRows(helpers.require(helpers.run_dir("data", "train"), "02_data.py"))
batch = train.Batch(**{name: array[:2] for name, array in rows.arrays.items()})
with helpers.phase("gradients of four models"):
    found = {name: lab.gradients(lab.with_random_b(lab.build(name)[0]), mesh, batch)
             for name in lab.VARIANTS}
table = pd.DataFrame({name: {kind: lab.cosine(part, found["bfloat16"][kind])
                             for kind, part in kinds.items()} for name, kinds in found.items()})
table.style.format("{:.3f}")

# %% [markdown]
# int8 storage costs next to nothing. NF4 turns the gradient visibly: with the base's own weights
# rounded to 16 levels, the model itself is another one. Whether it still *learns* is section 7.
#
# ### Trap 1: rounding has no gradient
# Qwix can round activations, too: `act_qtype="int8"`. It looks like the switch for int8 arithmetic.
# In the LoRA provider it ruins the gradient without a word: the derivative of rounding is zero
# almost everywhere, and nothing lets the gradient pass straight through.

# %%
rule = qwix.LoraRule(module_path=gemma.TARGETS, rank=16, alpha=32.0, weight_qtype="int8",
                     act_qtype="int8", lora_a_initializer=gemma.lora_a,
                     lora_b_initializer=gemma.lora_b)
trapped = quantized.load_base(lab.BASE, config, mesh, "int8")
trapped = gemma.inject_lora(trapped, 16, 32.0, mesh, provider=quantized.QuantizedLora([rule]))
wrong = lab.gradients(lab.with_random_b(trapped), mesh, batch)
cosines = {kind: lab.cosine(part, found["bfloat16"][kind]) for kind, part in wrong.items()}
print(", ".join(f"{kind} {value:.2f}" for kind, value in cosines.items()))
assert min(cosines.values()) < 0.9

# %% [markdown]
# ### Trap 2: a provider that drops the adapters
# Qwix has a provider that does let gradients through, `QtProvider`. A model has one provider at a
# time. Put it on a model with adapters, and these are still there, listed, trainable, and used by
# nothing:

# %%
both = lab.with_random_b(lab.build("bfloat16")[0])
qt = qwix.QtProvider([qwix.QtRule(module_path=gemma.TARGETS, weight_qtype="int8",
                                  act_qtype="int8")])
dropped = qwix.quantize_model(both, qt, tokens, attention_mask=mask)
sizes = [np.linalg.norm(np.concatenate(list(lab.gradients(one, mesh, batch).values())))
         for one in (both, dropped)]
print(f"{len(gemma.adapted_modules(dropped))} adapters; size of their gradient {sizes[0]:.3g} "
      f"before, {sizes[1]:.3g} after")
assert sizes[1] == 0

# %% [markdown]
# ## 6. Arithmetic in int8
# So far int8 saves memory: weights are dequantised and multiplied in bfloat16. A v5e multiplies
# int8 twice as fast as bfloat16, a v5p and v6e as well. To use that, both factors have to be int8,
# forward and backward. `int8_dot` gives each token and each output a scale. These do not depend on
# what is summed over, so they come out of the sum:

# %%
helpers.show_source(quantized.int8_dot, quantized._int8_backward)

# %% [markdown]
# The gradient for the input is a product with the same weight, so it is int8 as well. Rounding is
# treated as if it were not there, which is the *straight-through* estimate that trap 1 lacks.
# How close it comes is the column `int8 arithmetic` of the table above. The class stands between LoRA and
# Qwix's own provider, so the adapters' own products stay in bfloat16:

# %%
helpers.show_source(quantized.Int8Products, quantized.Int8Lora)
print(" → ".join(kind.__name__ for kind in quantized.Int8Lora.__mro__[:9]))

# %% [markdown]
# ## 7. What it costs in quality
# The table of gradients is a promise; here is the test. The tiny base, trained with each storage as
# notebook 03 trains it (half as many steps: 38), judged as in 07. Three seeds each make twelve
# runs, which `data/qlora/` holds. A short one runs live:

# %%
live, live_mesh, path = lab.fit(
    "nf4", 42, helpers.run_dir("qlora", "live"), steps=8, validate_every=8)

# %% [markdown]
# The stored ones, loss first.

# %%
runs, loss = lab.stored("runs.csv"), lab.stored("loss.csv")
wanted = len(lab.VARIANTS) * len(lab.SEEDS)
print(f"{len(runs)} of {wanted} runs are stored; python -m appendix.qlora_runs makes the others")
fig, (left, right) = style.figure(10, 3.4, columns=2, width_ratios=[2, 1])
looks = zip(style.CYCLE, ("-", "--", ":", "-."))  # curves that lie on each other stay visible
for (color, line), (name, each) in zip(looks, loss.groupby("variant", sort=False)):
    for number, (seed, one) in enumerate(each.dropna(subset="loss").groupby("seed")):
        smooth = one.loss.rolling(6, min_periods=1, center=True).mean()
        left.plot(one.step, smooth, line, color=color, label="" if number else name)
    last = runs[runs.variant == name].val_loss
    right.plot([name] * len(last), last, "o", color=color)
left.set(title="Quantised bases learn as bfloat16 does", xlabel="step", ylabel="nats per token",
         yscale="log")
left.legend()
right.set(title="Validation loss at the end", ylim=(0, 1.25 * runs.val_loss.max()))
right.margins(x=0.2)
right.tick_params(axis="x", rotation=20)
style.finish(fig, "11_loss", "data/qlora/loss.csv: the tiny base on one CPU device, measured")

# %% [markdown]
# Then what counts: 38 problems, judged by simulation; for each three drawn answers (temperature
# 0.8) and a greedy one. Drawn answers first, seeds averaged. The interval is over problems.

# %%
answers = lab.stored("answers.csv")
levels = ["seeds", "pass@1", "from", "to", "lowest seed", "highest seed"]
lab.scores(answers, "as trained").reindex(columns=levels).style.format(precision=3)

# %% [markdown]
# The four means are close, and the seeds of one storage lie further apart than they. So compare in
# pairs: each quantised run has a twin in bfloat16 with the same seed, asked the same problems.
# First seed by seed, with interval over problems and sign flips as in 07:

# %%
whole = ("as trained", "bfloat16")
rows = {(name, seed): [*stats.interval(gap), stats.sign_flip_p(gap)]
        for name in lab.VARIANTS if name != "bfloat16"
        for seed, gap in lab.gaps(answers, ("as trained", name), whole).items()}
by_seed = pd.DataFrame(rows, index=["against bfloat16", "from", "to", "p"]).T
by_seed.style.format("{:+.3f}").format("{:.3f}", subset=["p"])

# %% [markdown]
# Look at NF4 with seed 42: *ten points worse* than bfloat16, p = 0.002. One run each, and that would
# be published as the price of four bits. Seeds 43 and 44, with the same storage, are on the other
# side of zero. Nothing is wrong with that p: it says that these two models would differ on other
# problems of this kind, too. It says nothing of two models trained again.
#
# So a difference between storages needs two intervals. One is over problems and keeps the trained
# models; one is over seeds (a t interval, as in 12) and keeps the problems. Neither contains the
# spread of the other. And there are the greedy answers of the same models:

# %%
pairs = {(plan, name): (("as trained", name), whole, plan)
         for plan in ("drawn", "greedy") for name in lab.VARIANTS if name != "bfloat16"}
both = lab.differences(answers, pairs)
formats = {"seeds": "{:.0f}", "differ": "{:.0f}", "p": "{:.3f}"}
both.style.format({name: formats.get(name, "{:+.3f}") for name in both}, na_rep="-")

# %%
fig, axes = style.figure(10, 2.8, columns=2, sharex=True, sharey=True)
for (plan, name), row in both.iterrows():
    ax = axes[int(plan == "greedy")]
    dots = lab.gaps(answers, *pairs[plan, name]).mean()
    ax.plot(dots, [name] * len(dots), "o", color=style.BLUE, alpha=0.6)
    ax.hlines(name, row["problems from"], row["problems to"], style.GREY, lw=9, alpha=0.4, zorder=1)
    ax.hlines(name, row["seeds from"], row["seeds to"], style.BLACK, lw=1, zorder=1)
titles = ("Drawn answers: three seeds leave NF4 open", "Greedy answers: NF4 leans the other way")
for ax, title in zip(axes, titles):
    ax.axvline(0, color=style.BLACK, lw=1, ls=":")
    ax.set(title=title, xlabel="pass@1 minus that of bfloat16, paired")
axes[0].margins(y=0.2)
axes[0].invert_yaxis()
style.finish(fig, "11_quality", "data/qlora/answers.csv, measured; dot: a seed; 95 % over problems "
             "(grey), over seeds (line; none where all seeds agree)")

# %% [markdown]
# What this means. **int8: no loss shown.** Both intervals of its drawn answers stay within three points
# of zero. **NF4: undecided.** Its drawn answers are 1.5 points lower, its greedy ones six points higher.
# With three seeds the first may be anything from 22 below to 19 above. The second leaves out zero over
# seeds, but it is two or three problems per seed, p over problems is 0.09, and one row of six easily looks
# real by chance. To decide, train more seeds and ask more problems; on your task, measure both. (A dash
# is not certainty: three seeds that differ from their twins by the same problem show no spread to compute
# with.)
#
# The whole path works with either, 03, 04, 05 and 07, which a slow test of `tests/test_quantized.py`
# repeats.
#
# ## 8. Merging: into which base?
# The adapter was trained beside the *dequantised* weights and may have learned to make up for their
# errors. Merged into the bfloat16 base, it would make up for errors that are not there. On the other
# hand that base is not rounded. So 04 can do both (`into`). What they score:

# %%
display(lab.merge_scores(answers).style.format(precision=3))

# %% [markdown]
# Two intervals that overlap settle nothing (07). Here is the paired difference of the two merges of
# the same adapter, `bfloat16` minus `dequantized`:

# %%
pairs = {(name, plan): (("merged into bfloat16", name), ("merged into dequantized", name), plan)
         for name in lab.VARIANTS if name != "bfloat16" for plan in ("drawn", "greedy")}
merges = lab.differences(answers, pairs)
merges.style.format({name: formats.get(name, "{:+.3f}") for name in merges}, na_rep="-")

# %% [markdown]
# Not resolved: drawn answers of NF4 lean towards `bfloat16`, greedy ones towards `dequantized`, and
# no p is below 0.4. To ship whichever scored higher would be to choose by chance. `dequantized` is
# the default for another reason: it is the base that the adapter was trained beside, so what is
# shipped is what training has validated, rounded once. Take `bfloat16` if a paired difference over
# several seeds of your own shows that it is better.
#
# Either way `merged/` is bfloat16 and is served like any other. The PEFT adapter says what it
# belongs to: `base_model_name_or_path` is the folder `dequantized/` where 04 wrote it, and
# `quantized_base` names storage and tile, which PEFT prints as a key that it does not know.
#
# ## 9. What it buys
# For every slice and storage, the best step that fits: a compiled one if there is any that leaves a
# tenth of the chip free, then the one with the least recomputation and the longest rows. Hours and dollars are for the published 10,000
# examples of 922 tokens, with loading, compiling and saving. A plain number is predicted from a compiled
# program, a *≥* is only a lower bound, not to be ranked beside one
# ([08](08_dryrun.ipynb), section 8). int8 arithmetic is not in these numbers.

# %%
rows = []
for model, kind, chips in (("31b", "v5e", 4), ("31b", "v6e", 4), ("31b", "v5e", 8),
                           ("31b", "v6e", 8), ("31b", "v5p", 4), ("e2b", "v5e", 1),
                           ("e4b", "v5e", 1)):
    for dtype in quantized.BASE_DTYPES:
        found = fit.best_fit(kind, chips, model, dtype)
        cost = fit.run_cost(found, 10_000 * 922, fit.price(kind, chips))
        rows.append({"slice": found.slice, "model": model, "base": dtype, "fits": found.fits,
                     "remat": found.remat, "rows": f"{found.rows} x {found.row_length:,}",
                     "GiB": found.total,
                     "of": found.limit, "known": "compiled" if found.compiled else "estimated",
                     **{name: f"{'≥ ' * cost['at_least']}{cost[of]:.1f}" if found.fits else None
                        for name, of in (("hours", "hours"), ("USD", "dollars"))}})
table = pd.DataFrame(rows).set_index(["model", "slice", "base"])
forms = {"GiB": "{:.1f}", "of": "{:.2f}"}
table.style.format(forms, na_rep="-")

# %% [markdown]
# Read it by slice:
#
# - **v5e-4, v5e-8**: quantising decides whether the 31B trains at all. Four chips are the cheapest
#   way that has a predicted time, 11 dollars. On eight chips the steps run 1.5 times as fast, not twice
#   (08, section 8): each chip holds half of the weights and waits for the other half. The whole run takes
#   1.7 hours instead of 2.2.
# - **v6e-4**: int8 takes half as long as on a v5e-4 for about the same money, with rows of 4,096.
# - **v6e-8, v5p-8**: everything fits in bfloat16, so take that. On a v6e-8 its four rows at a time
#   wait less per token than the two rows that were compiled with int8.
# - **v5e-1**: E2B needs no quantising; with int8 its rows may be twice as long, 14.3 of 15.75 GiB
#   (compiled, next cell). E4B trains there with NF4, 14.6 GiB (compiled), not in bfloat16 (by the
#   estimate). Both compiled programs have 3 to 4 % of their work in instructions without a known
#   cost, so neither gets a time.

# %%
print(fit.will_it_fit("v5e", 1, "e2b", "int8", "DECODER", row_length=4096))

# %% [markdown]
# To train the 31B on a v5e-4, set `max_tokens` and `sequence_length` to 2,048 in 02 and say what
# neither notebook guesses:
#
# ```bash
# SIZE=31b BASE_DTYPE=int8 ./run_all.sh 01 03    # or BASE_DTYPE=nf4 TILE_SIZE=32
# ```
#
# 03 takes `remat` and `rows_per_device` from the compiled row of the slice it finds. 04 needs no TPU
# but room for base and merged model, 125 GB, and this host's `/dev/shm` has 96. So run 04 on another
# machine with the same run, or here with `TMPDIR` and `RUN_DIR` on a disk.
#
# ## 10. Serving a quantised base
# Section 8 makes a bfloat16 model, so nothing changes for the server. Three things are possible
# beside that; none has run on a TPU here, so all are **unverified**:
#
# - **int8 on a TPU**: vLLM's JAX models quantise through Qwix after loading bfloat16
#   (`quantization="int8"` in 05; its section 5 prints such a command for fp8). Their rounding is not ours:
#   weights and activations, per channel. Evaluate it again.
# - **fp8 on a v6e** saves memory and no time: that chip has no fp8 arithmetic.
# - **Base + adapter on a TPU** only with vLLM's PyTorch models: `MODEL_IMPL_TYPE=vllm` and one
#   copy. 05 has it as `implementation="vllm"`; upstream has no test of Gemma 4
#   with LoRA. The base must then be `dequantized/`.
#
# ## Recap
# - A frozen base can be stored in 8 or 4 bits; adapters and Adam's moments stay float32.
# - One more intercepted call makes Qwix's quantised weights work in Tunix's Gemma 4.
# - int8 storage keeps the gradient; NF4 turns it.
# - int8 arithmetic needs its own product, with a straight-through gradient.
# - One seed can show ten points, p = 0.002, that the next two do not: judge a storage by several.
# - Merge into the dequantised base: not shown to score higher, but it is the model you validated.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `astype requires ndarray` | Qwix's provider as it comes | `quantized.provider` |
# | `tile_size=48 does not divide` | a tile must cut every matrix evenly | a size that the message lists |
# | `trained on another base` | `base_dtype` changed between runs | `fresh=True`, or another `RUN_DIR` |
# | the loss falls slowly, without an error | `act_qtype` in `LoraProvider` (trap 1) | `int8_products=True` |
# | adapters that never change | another provider on top (trap 2) | one provider for both |
#
# ### Exercises
# 1. NF4 with tiles of 16 costs a full bit for scales. What does it buy in section 2's table?
#
# <details><summary>Solution</summary>
#
# The column is there: about 7 % less error, for half a bit more per weight.
# </details>
#
# 2. Train only the attention on an NF4 base (`targets=".*_einsum", partial=True`). Is the MLP
#    still quantised?
#
# <details><summary>Solution</summary>
#
# ```python
# targets = ".*_einsum"
# part = gemma.inject_lora(
#     quantized.load_base(lab.BASE, config, mesh, "nf4", 32), 16, 32.0, mesh, targets, partial=True,
#     provider=quantized.provider("nf4", 16, 32.0, targets, tile_size=32))
# print(quantized.stored(part.layers[0].mlp.gate_proj.kernel).dtype)
# ```
#
# Yes, `uint4`: the provider has a second rule for what gets no adapter.
# </details>
#
# Back to the [series](https://github.com/OWNER/gemma4-on-tpu#readme).
