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
# | **Time and cost** | tiny: eight to twelve minutes on two CPU cores (measured). 31b: about an hour on a v5p-8 (predicted and assumed, [08](08_dryrun.ipynb)); on a v5e-8 the steps alone take 48 to 99 minutes (predicted, [MACHINES](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md)) |

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
# They all stay frozen, and so does everything else. Beside each W you train two thin matrices, which together are an
# *adapter*. A narrows the input of W to r numbers (r is the `rank`), and B turns these into a correction of W's
# output, which is scaled by α/r (α is `alpha`):
#
# ```python
# y = x @ W + alpha / r * (x @ A) @ B
# ```
#
# Drawn to scale for one matrix of the 31B, A and B are just two thin lines.
#
# ![W, 5,376 by 8,192, with A as a thin line at its left and B as a thin line above it; a token goes through W and beside it through A and B, and both results are added](../assets/figures/lora.svg)
#
# Seven libraries share the work. JAX computes, Flax NNX holds the model, and Tunix knows Gemma 4. Qwix adds LoRA,
# Optax is the optimizer, Grain feeds the data, and Orbax writes checkpoints.

# %%
import time
from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from helpers import (
    answers, gemma, pictures, programs, quantized, records, style, train)
from tables import architecture
from tables.stored import settings_here

# %% [markdown]
# ### Settings
# **What do you have to choose?** You don't choose the model, because the data was made with one model's tokenizer, so
# the data already decided. The other settings have defaults. The 31B's mostly come from a published recipe
# ([10](10_published.ipynb) asks how much of it holds). The table shows the ones of your size, and two need an
# explanation:
#
# - `mesh` arranges the devices along two axes, `fsdp` and `tp`. Section 6 shows what they cut. If it's empty, the page
#   chooses.
# - `base_dtype` says how the frozen weights are stored. If it's empty, they're stored as `dtype` says, usually in
#   bfloat16, which takes two bytes a number. int8 takes one byte, but it has to round the weights.
#
# <details><summary>Where do the defaults for your slice come from?</summary>
#
# [08](08_dryrun.ipynb) has compiled this page's step for several *slices* (groups of TPU chips) and row lengths. Of
# the compiled steps that fit and are long enough for your rows, `settings_here` picks the one with the most predicted
# tokens a second, and it takes int8 only if bfloat16 doesn't fit. From that step come the mesh, `base_dtype`, how many
# rows are computed at once, and `remat`, which says what the backward pass computes again to save memory. If your rows
# are longer than in any compiled step, section 4 tells you whether yours fits.
#
# For example, it stores the 31B in int8 on a v5e-8, such as Kaggle's free one ([11](11_qlora.ipynb)). In bfloat16 the
# compiler plans 17.3 GiB for rows of 2,048 tokens, and a chip has 15.75. So you train beside rounded weights, and
# [04](04_merge.ipynb) merges your adapters into those same weights.
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
# Qwix finds modules by their paths, such as `layers.5.attn.q_einsum`, and gives adapters to every module that a pattern
# matches. (Tunix computes attention with einsum, as in `torch.einsum`, and names the modules after it.)
#
# Most layers, five of six in the 31B, are *sliding*: their tokens look back at the most recent tokens only. The others
# are *full*: their tokens look back at all of them. The two kinds have different attention heads, so some modules take
# up two lines of the table.

# %%
train.keep_compilations(cfg.checkpoints)
config = gemma.config_from_hf(base, dtype=cfg.dtype)
config.remat_config = gemma.RematConfig[cfg.remat]
mesh = gemma.make_mesh(config, cfg.mesh)
fsdp, tp = mesh.devices.shape
shapes = quantized.abstract_base(config, mesh, cfg.base_dtype)
base_parameters = quantized.parameters_of(shapes)
shapes = programs.adapted(shapes, cfg, mesh)

modules = gemma.adapted_modules(shapes)
trainable = sum(pair["a"].size + pair["b"].size for pair in modules.values())
share = pictures.adapter_share(architecture.read_config("data/configs/gemma4_31b.json"), 64)
print(f"{len(modules)} modules of {len(gemma.expected_modules(config))} have adapters\n"
      f"{trainable:,} numbers to train, {trainable / base_parameters:.1%} of this base; "
      f"in the 31B with rank 64 it's {share:.1%}")
pictures.adapter_table(modules).style.hide(axis="index")

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
# **Only A and B are trained. The larger the matrices, the smaller their share.**
#
# ## 2. One batch
# **What goes into one step?** Rows of notebook 02, with their `loss_mask`, `segment_ids` (which example a token belongs
# to) and `positions`. All the rows of a step may not fit into memory together, so we cut them into *micro-batches* and
# add up the gradients. The arrays have the shape [M micro-batches, B rows, T tokens].

# %%
helpers.show_source(train.packed_mask)
train_rows, val_rows = (train.PackedRows(data / part) for part in ("train", "val"))
micro_batches, micro_rows = train.micro_batches_of(cfg, fsdp)
dataset = train.make_dataset(train_rows, micro_batches, micro_rows, cfg.seed)  # shuffled by Grain
batch = next(iter(dataset))
print(f"micro-batches, rows, tokens: {batch.tokens.shape}; {batch.segment_ids.max(-1).sum()} "
      f"examples, {(batch.segment_ids == 0).mean():.0%} padding, "
      f"{batch.loss_mask.mean():.0%} trained")
first = jax.tree.map(lambda array: array[0, 0], batch)
pictures.packed_row(first, np.asarray(train.packed_mask(first.segment_ids[None])[0]))

# %% [markdown]
# In the upper picture each line is a token, and the colored columns are the tokens that it may look at. So each
# example is a triangle of its own.
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
# `hidden_states` stops before the output matrix, and `token_losses` multiplies it with the trained positions alone. If
# those are too many, it works on half a row at a time.
#
# </details>

# %%
rows_per_step = micro_batches * micro_rows
steps = train.steps_of(cfg, len(train_rows), rows_per_step)
optimizer = train.make_optimizer(train.make_schedule(cfg, steps), cfg.weight_decay,
                                 cfg.max_grad_norm)
capacity = train.capacity_of(train_rows, val_rows)
loss_fn = train.make_loss(capacity)
helpers.show_source(train.make_train_step)
style.fold_source("token_losses: the loss of the trained tokens", train.token_losses)
print(f"{steps} steps, {cfg.epochs:g} epochs; at most {capacity} of a row's {length} tokens are "
      "trained (rounded up to a multiple of 128)")
if steps < 20 and not cfg.max_steps:
    print(f"{steps} steps teach next to nothing: set epochs higher in section 1.")

# %% [markdown]
# `train_step` is a whole optimizer step in one function. `jax.value_and_grad` gives loss and gradient, and
# `jax.lax.scan`, a compiled loop, goes over the micro-batches, so two hundred of them should need about as much memory
# as two. If the base is in bfloat16, the loss uses a bfloat16 copy of the adapters, like autocast in PyTorch, but
# AdamW (Adam with weight decay) updates the float32 originals. The step reads the frozen weights and doesn't
# return them. ([14](14_jax.ipynb), section 6, says what that saves, and why we don't use Tunix's trainer.)
#
# We replaced one part of Tunix's model. Its attention computes all T x T scores of a row and then masks most of
# them away. Ours multiplies a block of queries only with the keys that at least one of them may see.
#
# Compiling the step takes minutes for the 31B. But it needs no weights, so it starts now, in the background.

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
# If you've changed the recipe, we refuse to go on from the old checkpoint.

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
# *Temporaries* are the gradients, the logits, weights that a chip has just gathered, and the *activations* of one
# micro-batch: what its forward pass keeps for the backward pass. *Fresh outputs* are returned arrays that don't take
# an old one's place. If a step doesn't fit, `remat` (rematerialization) helps: we keep fewer activations, and compute
# the others again.
#
# Now train. In the first steps, the *warm-up*, the learning rate rises from 0, so the very first step changes
# nothing yet. If the run is interrupted, restart the kernel and choose *Run All*: it goes on from its last checkpoint.

# %%
log_file = helpers.run_dir("train", "log.jsonl")
held_out = train.to_mesh(train.validation_batch(val_rows, cfg.validation_rows, micro_rows), mesh)
evaluate = train.jit_eval_step(model, loss_fn)
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
# **Can the held-out loss lie below the training loss?** Yes, and that's not a leak. In the first epoch every training
# row is still new to the model when its loss is measured, so both curves are about unseen rows. And the few held-out
# rows may happen to be easier. So compare each curve with itself, not with the other one.
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
# ### Would it come back?
# **What if the machine had died just before the end?** Everything in memory would be gone, and a new process would
# have only the disk. We do what that process would do: restore the last checkpoint before the final one, and train on
# from there (at most ten steps, so it stays short). **Do you expect the same losses, or nearly the same?**

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
# goes on at the same row, and the same program makes the same numbers. (If these steps reach the end of the run, you
# also see the hashes of both adapters.)
#
# **The held-out loss tells you when to stop, and an interrupted run loses nothing but time.**
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
# ## 6. How do four chips share a step?
# **Who holds which part of a matrix?** That's what the two axes of `mesh` decide. `fsdp` (fully sharded data
# parallelism) cuts the batch, and the weights only for storage: when a matrix is used, an *all-gather* brings all its
# pieces to every chip. With `tp` (tensor parallelism) each chip keeps its piece, and computes some of the attention
# heads and MLP columns. Then a *reduce-scatter* adds up the chips' results, and leaves each chip a part of the sum.
#
# ![A 4 by 4 matrix on four chips: with fsdp each stores a row, and an all-gather brings the whole matrix to every chip; with tp each keeps a column, and the next matrix needs a reduce-scatter and an all-gather of activations](../assets/figures/shards.svg)
#
# You choose the mesh, and the compiler writes this communication. [14](14_jax.ipynb), section 4, shows how, and why
# the heads of the 31B allow a `tp` of 4 at most. **With `fsdp` the weights travel, and with `tp` the activations do.**
#
# ## 7. What was checked
# **Why should you believe any of this?** Because tests in `tests/` check it against something independent:
#
# - The loss and all gradients of a packed row equal those of its examples one by one, computed with a textbook loss.
# - One optimizer step equals PyTorch's with PEFT (Hugging Face's adapter library), from the same A and B.
# - A run that `kill -9` ended continues to the same bits, even if its newest checkpoint is only half written.
#
# **If one of these claims stops being true, a test fails.**
#
# ## Recap
# - Every matrix of attention and MLP has float32 adapters, and they change nothing before the first step.
# - The step weighs every trained token equally and returns only what changed.
# - You can kill a run, and it continues to the same bits.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. How many numbers are trained at half the rank? Write your answer down, then count.
#
# <details><summary>Solution</summary>
#
# ```python
# fewer = replace(cfg, rank=cfg.rank // 2)
# smaller = programs.adapted(quantized.abstract_base(config, mesh, cfg.base_dtype), fewer, mesh)
# pairs = gemma.adapted_modules(smaller).values()
# print(sum(pair["a"].size + pair["b"].size for pair in pairs), trainable // 2)
# ```
#
# Half as many, because A and B both have one axis of length r. So it prints the same number twice.
#
# </details>
#
# 2. Kill the kernel in the middle of training (`kill -9`), copy `log.jsonl` to `copy.jsonl`, run the notebook
#    again, and compare both files (`diff`). Which steps are computed twice, and what differs?
#
# <details><summary>Solution</summary>
#
# The steps after the newest checkpoint are computed twice. Of their lines in `copy.jsonl` only `seconds` differs.
#
# </details>
#
# Next: [04 · From the checkpoint to a model every engine agrees on](04_merge.ipynb)
