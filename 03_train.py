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
# How does a model that only continues texts learn to write the module you asked for? You'll plan small adapters
# for Gemma 4, load it onto four devices, ask it for an up-down counter, train the adapters, and ask again.
# **If you've never used JAX, read [14 · JAX in ten minutes](14_jax.ipynb) first.**
#
# | | |
# |---|---|
# | **Needs** | 31b: a v5p-8 (4 chips, 95.7 GiB each), or a v5e-8 (8 chips, 15.75 GiB each). e2b (Gemma 4 E2B, the smallest): one v6e or v5e chip. tiny: any laptop, 4 simulated devices |
# | **Reads** | `data/` from notebook 02; the base model as safetensors (files of named weights), on a disk, on the Hugging Face hub or in `gs://` |
# | **Writes** | `train/checkpoints/<step>/`, `train/log.jsonl`, `train/recipe.json` |
# | **Time and cost** | tiny: eight to twelve minutes on two CPU cores (measured). 31b: 0.54 to 1.34 hours on a v5p-8, 1.07 to 2.85 on a v5e-8, with the download; of these the training steps take 19 to 24 and 48 to 99 minutes (predicted, the rest assumed; the v5e-8's upper end counts slow links, [01](01_setup.ipynb), section 2) |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · **03 train** · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
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
helpers.machine(devices=4)

# %% [markdown]
# ## 1. LoRA: W + (α/r) · A · B
# In [00](00_quickstart.ipynb) the base model answered our request for an up-down counter with a single period. **How can
# you teach a model of 31 billion weights without touching any of them?**
#
# With *LoRA* (low-rank adaptation). A layer has two halves, attention and MLP, and each half has several matrices W.
# They all stay frozen, and so does everything else. For each W you train two thin matrices, which together are an
# *adapter*. A narrows the input of W to r numbers (r is the `rank`), and B turns these into a correction of W's
# output, which is scaled by α/r (α is `alpha`):
#
# ```python
# y = x @ W + alpha / r * (x @ A) @ B
# ```
#
# **B starts at zero, so at first the adapter changes nothing**, and training begins at exactly the base model. Drawn to
# scale for one matrix of the 31B, A and B are just two thin lines.
#
# ![W, 5,376 by 8,192, with A as a thin line at its left and B as a thin line above it; a token goes through W and beside it through A and B, and both results are added](../assets/figures/lora.svg)
#
# ### Which chip holds which part of a matrix?
# The 31B's weights take 62 GB (58 GiB), and a v5e chip has 15.75 GiB, so several chips have to share each W. They're
# arranged in a grid, the *mesh*, which has two axes. (JAX calls a chip a *device*. A CPU plays four of them.)
#
# - Along `fsdp` (fully sharded data parallelism) each chip computes different rows of the batch. It only *stores* a
#   piece of W. When W is used, an *all-gather* brings all its pieces to every chip.
# - Along `tp` (tensor parallelism) each chip keeps its piece of W and computes with it alone: some of the attention heads
#   (attention runs several times side by side, and each run is a *head*), and some columns of the MLP. Then a
#   *reduce-scatter* adds up the chips' results, and leaves each chip a part of the sum.
#
# ![A 4 by 4 matrix on four chips: with fsdp each stores a row, and an all-gather brings the whole matrix to every chip; with tp each keeps a column, and the next matrix needs a reduce-scatter and an all-gather of activations](../assets/figures/shards.svg)
#
# You choose the mesh, and the compiler writes this communication. ([14](14_jax.ipynb), section 4, tries it on a small
# matrix, and shows why the heads of the 31B allow a `tp` of 4 at most.) (*Activations* are the numbers that one layer
# hands to the next.) **With `fsdp` the weights travel, and with `tp` the activations.**
#
# Seven libraries share the work. JAX computes, Flax NNX holds the model, and Tunix knows Gemma 4. Qwix adds LoRA,
# Optax is the optimizer, Grain feeds the data, and Orbax writes checkpoints.

# %%
import time
from dataclasses import replace

import jax
import numpy as np
import pandas as pd
from flax import nnx

from helpers import (
    answers, gemma, pictures, programs, quantized, records, style, train)
from tables import architecture
from tables.stored import settings_here

# %% [markdown]
# ### Settings
# **What do you have to choose?** Not the model: 02 tokenized the data for one model. Everything else has a default. The
# 31B's mostly come from a published recipe ([10](10_published.ipynb) asks how much of it holds). The table shows the
# values of your size. Two of them need more words:
#
# - `mesh` is how many devices there are along `fsdp` and along `tp`. If it's empty, the page takes as much `tp` as the
#   heads allow.
# - `base_dtype` says how the frozen weights are stored. If it's empty, they're stored as `dtype` says, usually in
#   bfloat16, which takes two bytes a number. int8 takes one and nf4 (a format of four bits) half a byte, but they have
#   to round the weights.
#
# <details><summary>Where do the defaults for your slice come from?</summary>
#
# [08](08_dryrun.ipynb) has compiled many variants of this page's step, for several *slices* (groups of TPU chips).
# `settings_here` drops the variants that don't fit, or whose rows are too short, and takes the fastest of the rest by
# prediction. Variants with int8 count only if none in bfloat16 is left. The mesh, `base_dtype`, the rows at once and
# `remat` (section 4) come from that variant.
#
# For example, it stores the 31B in int8 on a v5e-8, such as Kaggle's free one ([11](11_qlora.ipynb)). In bfloat16 the
# compiler plans 17.3 GiB for rows of 2,048 tokens, and a chip has 15.75. So your adapters learn on top of rounded
# weights, and [04](04_merge.ipynb) merges them into those same weights.
#
# </details>

# %%
data, meta, base, tokenizer = train.what_02_left()
length = meta.sequence_length
FULL = train.Settings(**settings_here("31b", length))
E2B = train.Settings(rows_per_step=4, rows_per_device=1, remat="DECODER", checkpoint_every=300,
                     checkpoints_kept=2)  # of 1.14 GB each
E2B = replace(E2B, **settings_here("e2b", length))
TINY = train.Settings(rank=16, alpha=32.0, learning_rate=3e-3, warmup_steps=10, rows_per_step=2,
                      epochs=0.6, dtype="float32", attention_block=128, validate_every=60,
                      validation_rows=8, checkpoint_every=60, answer_tokens=160, log_every=60)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})
cfg = replace(cfg, **train.from_environment())  # MAX_STEPS, CHECKPOINTS: where a script sets them
style.show_settings(cfg, ["rank", "alpha", "learning_rate", "epochs", "rows_per_step", "mesh",
                          "base_dtype"])

# %% [markdown]
# ### Where do the adapters go?
# You can see that before you read 62 GB of weights, because JAX can build a model of shapes only, without any numbers.

# %%
train.keep_compilations(cfg.checkpoints)  # a restart then compiles nothing
config = gemma.config_from_hf(base, dtype=cfg.dtype)
config.remat_config = gemma.RematConfig[cfg.remat]
mesh = gemma.make_mesh(config, cfg.mesh)
fsdp, tp = mesh.devices.shape
shapes = quantized.abstract_base(config, mesh, cfg.base_dtype)
base_parameters = quantized.parameters_of(shapes)
shapes = programs.adapted(shapes, cfg, mesh)
print(f"{base_parameters:,} frozen weights on a mesh with fsdp={fsdp}, tp={tp}")

# %% [markdown]
# Qwix finds modules by their paths, such as `layers.5.attn.q_einsum`, and gives adapters to every module that a pattern
# matches. (Tunix computes attention with einsum, as in `torch.einsum`, and names the modules after it.) Most layers,
# five of six in the 31B, are *sliding*: their tokens look back at the most recent tokens only. The others are *full*:
# their tokens look back at all of them. The two kinds have different heads, so their matrices have different shapes.

# %%
modules = gemma.adapted_modules(shapes)
trainable = sum(pair["a"].size + pair["b"].size for pair in modules.values())
share = pictures.adapter_share(architecture.read_config("data/configs/gemma4_31b.json"), 64)
print(f"{len(modules)} modules of {len(gemma.expected_modules(config))} have adapters\n"
      f"{trainable:,} numbers to train, {trainable / base_parameters:.1%} of this base; "
      f"in the 31B with rank 64 it's {share:.1%}")
pictures.adapter_table(modules, gemma.layer_kinds(config)).style.hide(axis="index")

# %% [markdown]
# A and B are always float32, and here's why. The optimizer, Adam, keeps two running averages for every trained
# number, its *moments*. Each step multiplies the second moment by 0.999. In bfloat16 that factor rounds to 1,
# so the moment would never shrink.
#
# **Suppose the pattern misses `k_einsum`, the key projection of the full layers. What does such a run look like?**
#
# <details><summary>Answer</summary>
#
# Like any other, except that ten modules of the 31B learn nothing. That's why we refuse a pattern that misses a
# module, unless `partial=True` says that you mean it.
#
# </details>
#
# ### What does one device hold?
# Shapes are enough to answer that for any mesh, too. **Which mesh needs the most memory for the base, and which for the
# adapters?** Guess first. Here's the tiny model with rank 16, on every mesh that your devices allow:

# %%
tiny = gemma.config_from_hf("assets/tiny_gemma4", dtype="float32")
rank_16 = train.Settings(rank=16)
held_by = {}
for shape in gemma.possible_meshes(tiny):
    cut = programs.abstract(tiny, rank_16, gemma.make_mesh(tiny, shape))
    held_by[f"(fsdp, tp) = {shape}"] = programs.per_device(cut)
for name, variable in gemma.adapted_modules(cut)["layers.0.attn.q_einsum"].items():
    array = variable.get_value()
    print(f"q_einsum's {name.upper()} {array.shape} is cut by {array.sharding.spec}")
pd.DataFrame(held_by).map(pictures.memory).T

# %% [markdown]
# The base is cut along both axes, so a device holds the same share of it on any mesh. Of an adapter, one matrix is cut
# along `fsdp` and the other one along `tp`, as the printed *partition specs* say: one name or `None` for each axis,
# from the left. Axes that aren't listed aren't cut, either. So with `tp=1` every device has all of q_einsum's B. (The
# same sum for the 31B on four chips: 14.3 GiB of base with each mesh, and with rank 64 the adapters take 805 MiB with
# (1, 4), 901 MiB with (2, 2) and 1.41 GiB with (4, 1).)
#
# **Only A and B are trained. The larger the matrices, the smaller their share.**
#
# ## 2. One batch
# **What goes into one step?** Rows of notebook 02, with their `loss_mask`, `segment_ids` (which example a token belongs
# to) and `positions`. All the rows of a step may not fit into memory together, so we cut them into *micro-batches* and
# add up the gradients. The arrays have the shape [M micro-batches, B rows, T tokens].

# %%
train_rows, val_rows = (train.PackedRows(data / part) for part in ("train", "val"))
micro_batches, micro_rows = train.micro_batches_of(cfg, fsdp)
dataset = train.make_dataset(train_rows, micro_batches, micro_rows, cfg.seed)  # shuffled by Grain
batch = next(iter(dataset))
print(f"micro-batches, rows, tokens: {batch.tokens.shape}; {batch.segment_ids.max(-1).sum()} "
      f"examples, {(batch.segment_ids == 0).mean():.0%} padding, "
      f"{batch.loss_mask.mean():.0%} trained")

# %% [markdown]
# Which tokens may look at which? This function decides it, from the segment ids alone:

# %%
helpers.show_source(train.packed_mask)
first = jax.tree.map(lambda array: array[0, 0], batch)
pictures.packed_row(first, np.asarray(train.packed_mask(first.segment_ids[None])[0]))

# %% [markdown]
# In the upper picture each line is a token, and the colored columns are the tokens that it may look at in a full layer.
# So each example is a triangle of its own. (In a sliding layer the triangle is a band along its long side.)
#
# <details><summary><b>What would go wrong if the whole row were one triangle?</b></summary>
#
# The last example would see the examples before it as part of its own prompt. But when the model is served, nothing
# stands before the prompt.
#
# </details>
#
# **A packed row is several examples that can't see each other.**
#
# ## 3. One step, compiled
# **What exactly is the loss?** At every position the model predicts the *next* token. Take the four tokens
# `assign`, `y`, `=`, `a`. After `assign` it should say `y`, after `assign y` it should say `=`, and after
# `assign y =` it should say `a`. So four tokens make three predictions, and the loss of each is −ln p, where p is the
# probability that the model gave to the token that's really there. Only tokens that `loss_mask` marks are counted.
#
# Each micro-batch returns the *sum* of its losses and the number of its trained tokens. We divide only once, for the
# whole step, so that every token counts the same ([14](14_jax.ipynb), section 3, shows what happens otherwise).
#
# **Only some of the tokens are trained. Which part of the model can we skip for the rest?**
#
# <details><summary>Answer</summary>
#
# The output matrix. It has a column for each of the 31B's 262,144 tokens, and it computes the *logits*, a score for
# each of them. These would be the largest arrays of a step, but we need them only at the trained positions. So
# `hidden_states` stops before the output matrix, and `token_losses` multiplies it with the trained positions alone.
# (With more than 1,024 of them, and more than half a row, it works in pieces.)
#
# </details>

# %%
capacity = train.capacity_of(train_rows, val_rows)
loss_fn = train.make_loss(capacity)
print(f"at most {capacity} (a multiple of 128) of a row's {length} tokens are trained")
style.fold_source("token_losses: the loss of the trained tokens", train.token_losses)

# %% [markdown]
# **How do you pick the trained positions?** In PyTorch you'd write `hidden[loss_mask]`. But that gives as many positions
# as the mask has Trues, a number that's known only when the program runs, and a compiled program has fixed shapes. So
# `token_losses` calls `top_k` on the mask's 0s and 1s. It always lists K positions, those of the 1s first, and the
# loss of the others is multiplied by 0. K is the `capacity`: no row has more.
#
# The step itself is one function:

# %%
rows_per_step = micro_batches * micro_rows
steps = train.steps_of(cfg, len(train_rows), rows_per_step)
optimizer = train.make_optimizer(train.make_schedule(cfg, steps), cfg.weight_decay,
                                 cfg.max_grad_norm)
print(train.steps_in_words(cfg, steps))
helpers.show_source(train.make_train_step)

# %% [markdown]
# `jax.value_and_grad` gives loss and gradient. `jax.lax.scan`, a compiled loop, goes over the micro-batches, so the memory hardly depends on their number. At the end
# AdamW (Adam with weight decay, which pulls the adapters toward zero a little) changes the adapters. The step reads the
# frozen weights and doesn't return them. ([14](14_jax.ipynb), section 6, says what that saves, and why we don't use
# Tunix's trainer.)
#
# <details><summary>Two details: bfloat16 copies, and attention in blocks</summary>
#
# If the base is in bfloat16, the loss uses a bfloat16 copy of the adapters, as PyTorch's autocast would, but AdamW
# updates the float32 originals.
#
# We replaced one part of Tunix's model. Its attention computes all T x T scores of a row and then masks most of them
# away. Ours takes the queries in blocks of `attention_block`, and computes scores only for keys that some query of the
# block may see.
#
# </details>
#
# Compiling the step takes minutes for the 31B. But it needs no weights, so it starts now, in the background. (*Tracing*
# comes first: JAX runs the Python function once, on shapes, and writes down every operation.)

# %%
with helpers.phase("tracing the optimizer step"):
    lowered = train.lower_step(shapes, optimizer, loss_fn, mesh,
                               (micro_batches, micro_rows, length))
ahead = train.compile_ahead(lowered)

# %% [markdown]
# **A step is one compiled program. It needs shapes to be compiled, and weights only to run.**
#
# ## 4. Load, ask, train
# **What does the model say before it's trained?** To ask it, we need its weights. `load_base` calls Tunix's loader,
# which puts each weight of the Hugging Face files onto its devices, usually in bfloat16. (The tiny model is trained in
# float32, because a CPU without bfloat16 units is faster with it.)

# %%
began = time.perf_counter()
with helpers.phase(f"loading {meta.base_model} onto {mesh.size} devices, fsdp={fsdp} x tp={tp}"):
    model = quantized.load_base(base, config, mesh, cfg.base_dtype)
    jax.block_until_ready(nnx.state(model))
load_seconds = time.perf_counter() - began
print(f"{base_parameters:,} parameters, {pictures.memory(gemma.gib(nnx.state(model)))} per device")

# %% [markdown]
# Now ask it for the up-down counter, together with the three held-out requests of notebook 02. (If you
# brought your own data, your first held-out question takes the counter's place.)

# %%
samples = records.load_samples()
chats = answers.requests_of(meta, samples)
with helpers.phase(f"{len(chats)} answers of the base model"):
    before = answers.ask(model, tokenizer, chats, cfg.answer_tokens, mesh, meta.thinking)
counter = chats[0][-1]["content"]
print(f"asked:\n{counter}\n\nanswered:\n{before[0][:500]}")

# %% [markdown]
# That's where we start from. You'll ask again in section 5. Now the model gets its real adapters, and `start` takes it
# apart into what changes and what's frozen.
#
# **What if the run is interrupted?** A *checkpoint* on the disk holds what changes: the adapters, Adam's moments,
# and the position in the data. It also holds the *recipe*, which is everything that decides what's being trained.
# If you've changed the recipe, we refuse to go on from the old checkpoint. (Section 6 tries it.)

# %%
with helpers.phase("adding the adapters", every=60):
    model = programs.adapted(model, cfg, mesh)
    state, frozen = train.start(model, optimizer, mesh)
recipe = train.recipe_of_run(cfg, meta, base, steps, rows_per_step)
manager, state = train.begin_or_resume(cfg, state, recipe, steps)

# %% [markdown]
# The compiled step says how much memory it needs. If it won't fit, you'll find out here.

# %%
with train.within_memory(), helpers.phase("waiting for the compiled optimizer step"):
    compiled, compile_seconds = ahead.result()
print(f"compiled in {compile_seconds:.3g} s, in the background")
held = train.memory_of(compiled, state, frozen)
pictures.memory_table(held)

# %% [markdown]
# *Temporaries* are the gradients, the logits, weights that a chip has just gathered, and the activations that one
# micro-batch's forward pass keeps for its backward pass. *Fresh outputs* are results that need memory of their own. (New
# adapters are written over the old ones.) If a step doesn't fit, `remat` (rematerialization) helps: we keep fewer
# activations, and compute the others again.
#
# How will we know that it learns, and doesn't only memorize its rows? By rows that it never trains on:

# %%
held_out = train.to_mesh(train.validation_batch(val_rows, cfg.validation_rows, micro_rows), mesh)
evaluate = train.jit_eval_step(model, loss_fn)

# %% [markdown]
# Now train. In the first steps, the *warm-up*, the learning rate (`lr`) rises from 0, so the very first step changes
# nothing yet. `grad norm` is the length of the gradient, all its numbers taken as one vector. If the run is interrupted,
# restart the kernel and choose *Run All*: it goes on from its last checkpoint.

# %%
log_file = helpers.run_dir("train", "log.jsonl")
run = train.Run(
    train_step=compiled, frozen=frozen, dataset=dataset, mesh=mesh,
    validate=lambda adapters: float(evaluate(adapters, frozen, held_out)),
    validate_every=cfg.validate_every, log=train.StepLog(log_file, steps, cfg.log_every),
    manager=manager, recipe=recipe)
with mesh, train.within_memory():
    state = train.train(run, state)
nnx.update(model, state.adapters)
manager.close()  # after the last checkpoint is written

# %% [markdown]
# What does 04 need to know? It's all in `recipe.json`, so no later notebook repeats a setting of this one. We
# write it right away: whatever happens in the cells below, your training is saved.

# %%
history = train.read_log(log_file)
train.write_recipe(recipe, cfg, meta, mesh, model, state, history)
train.write_machine(
    mesh, held, load_seconds=load_seconds, compile_seconds=compile_seconds, steps=steps,
    micro_batches=micro_batches, micro_rows=micro_rows, sequence_length=length, remat=cfg.remat)

# %% [markdown]
# Here's the whole run, read from `log.jsonl`. The loss is in *nats*, the unit that comes with natural logarithms. A
# model that guesses blindly among n tokens has a loss of ln n nats.

# %% tags=["raises-exception"]
style.finish(pictures.draw_loss(history, steps, cfg.max_grad_norm), "03_loss",
             f"log.jsonl of this run, size {helpers.size()}, measured on {mesh.size} devices "
             f"({jax.devices()[0].device_kind})")

# %% [markdown]
# **Can the held-out loss lie below the training loss?** Yes, and that's no leak. In the first epoch the training rows are
# unseen, too, when their loss is measured, and the few held-out rows may just be easier. So the heights of the two
# curves mean little, but their directions do. (That both flatten at the end says little, too: the learning rate has
# fallen to zero by then.)
#
# **And what does it mean if the held-out loss rises while the training loss still falls?**
#
# <details><summary>Answer</summary>
#
# The model has begun to memorize its rows. The held-out loss is the one that counts, because it's on requests
# that the model hasn't seen. Once it rises, you've trained too long.
#
# </details>
#
# **The held-out loss tells you when to stop.**
#
# ## 5. Ask again
# **Did it learn?** Here's the same request: the base on the left, the tuned model on the right.

# %% tags=["raises-exception"]
with helpers.phase(f"{len(chats)} answers of the tuned model"):
    after = answers.ask(model, tokenizer, chats, cfg.answer_tokens, mesh, meta.thinking)
style.side_by_side({"base": before[0], "tuned": after[0]}, counter)
records.Answers(chats[0], cfg.answer_tokens, before[0], after[0]).save()  # 04 asks it again

# %% [markdown]
# Is it a counter? In [07](07_eval.ipynb) a simulator decides that. Here's one of the held-out requests, with the
# dataset's own answer on the right. Most of the tiny modules have only one natural form, so the texts may well be the
# same.

# %% tags=["raises-exception"]
style.side_by_side({"base": before[1], "tuned": after[1], "dataset": samples[0].answer},
                   chats[1][-1]["content"][:400])
same = sum(new.strip() == sample.answer.strip() for new, sample in zip(after[1:], samples))
print(f"{same} of {len(samples)} held-out answers match the dataset's to the letter")

# %% [markdown]
# **Your model is trained, and `recipe.json` says how. You can go on to [04](04_merge.ipynb) now.**
#
# ## 6. Would it come back?
# **What if the machine had died just before the end?** Everything in memory would be gone, and a new process would
# have only the disk. We do what that process would do: restore the next-to-last checkpoint, and train on from there (at
# most ten steps, so it stays short). **Do you expect the same losses, or nearly the same?**

# %% tags=["raises-exception"]
with train.open_checkpoints(train.checkpoints_of(cfg), cfg.checkpoint_every, steps,
                            cfg.checkpoints_kept) as on_disk:
    earlier = train.restore(on_disk, state, recipe, before=state.step)
print(f"back to step {earlier.step} of {state.step}")
with mesh:
    again = train.train_again(run, earlier, history, most=10)
if again.step == state.step:
    print("adapters from the disk:", train.adapters_sha256(again.adapters)[:16])
    print("adapters in memory:    ", train.adapters_sha256(state.adapters)[:16])
again = earlier = None  # frees their arrays

# %% [markdown]
# "As before" means the same number, to the last bit. It works because the checkpoint has everything that changes, Grain
# goes on at the same row, and the same program makes the same numbers. (We've tried this on CPUs. On a TPU, nobody has.)
#
# A test really kills a run, and tears its newest checkpoint, too. Other tests in
# [test_train.py](https://github.com/OWNER/gemma4-on-tpu/blob/main/tests/test_train.py) compare a packed row's gradients
# with those of its examples one by one, and an optimizer step with PyTorch's.
#
# **An interrupted run loses nothing but time.**
#
# ## Recap
# - Every matrix of attention and MLP has float32 adapters, and they change nothing before the first step.
# - The mesh says what a chip holds and what travels. The compiler does the rest.
# - The step weighs every trained token equally and returns only what changed.
# - You can kill a run, and it continues to the same bits.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. Do the weights travel with `fsdp`, and the activations with `tp`? A compiled program says so. Compile this page's
#    step for `(1, 4)` and for `(4, 1)`, with four rows, and list the shapes that its all-gathers bring together. Which
#    shapes do you expect in which program?
#
# <details><summary>Solution</summary>
#
# ```python
# import re
# from collections import Counter
#
# for shape in ((1, 4), (4, 1)):
#     other = gemma.make_mesh(config, shape)
#     cut = programs.abstract(config, cfg, other)
#     step = train.lower_step(cut, optimizer, loss_fn, other, (1, 4, length))
#     text = step.compile().as_text()
#     gathered = Counter(re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text))
#     print(shape, gathered.most_common(8))
# ```
#
# (The tiny model on four simulated devices, in about a minute. A TPU's program spells its all-gathers differently.) With
# (4, 1) you find weights: (160, 640) is the W of a gate_proj or an up_proj, and (16, 160, 32) that of a q_einsum. With (1, 4)
# there's none of them. Instead there's (4, 512, 160), the activations: rows, tokens, and a token's 160 numbers. The
# adapters' thin matrices, such as (160, 16), travel in both.
#
# There's no reduce-scatter: the CPU's compiler adds up with *all-reduce*, which leaves the whole sum on every device.
#
# </details>
#
# 2. Which half of the layers learned more, attention or MLP? Switch off one half's adapters at a time, and look at the
#    held-out loss. Guess first which loss will be the lower one. (Where B is zero, an adapter does nothing.)
#
# <details><summary>Solution</summary>
#
# ```python
# def without(half):
#     def switched(path, array):
#         return array * 0 if half in jax.tree_util.keystr(path) else array
#     return jax.tree_util.tree_map_with_path(switched, state.adapters)
#
#
# with mesh:
#     for half in ("none", "attn", "mlp"):
#         print(f"without {half}: {evaluate(without(half), frozen, held_out):.4f}")
# ```
#
# The half whose absence costs more does more of the work. The two losses don't add up to anything, because both
# halves were trained together, and each relies on the other.
#
# </details>
#
# 3. Kill a training for real. In a terminal, start a short run in a new run directory, on the same data. (They're in
#    `runs/tiny`, if you didn't set `RUN_DIR`.)
#
# ```bash
# mkdir -p runs/killed && cp -r runs/tiny/data runs/killed/
# SIZE=tiny MAX_STEPS=20 RUN_DIR=runs/killed .venv/bin/python 03_train.py & echo "process $!"
# ```
#
#    About ten seconds after the line `step 1/20`, kill it: `kill -9` with the number of the process. Copy
#    `runs/killed/train/log.jsonl` to `copy.jsonl`, run the second line again, and compare both files with `diff`. Which
#    steps are computed twice, and what differs?
#
# <details><summary>Solution</summary>
#
# The steps after the newest checkpoint. Here the newest checkpoint is that of step 1, because Orbax always saves the
# first step. So every step from the second on is computed twice. Of their lines in `copy.jsonl` only `seconds` differs.
#
# </details>
#
# Next: [04 · From the checkpoint to a model every engine agrees on](04_merge.ipynb)
