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
# # 03 · Fine-tuning Gemma 4 with LoRA on several chips
#
# How does a model that only continues texts learn to write the module you asked for? Ask the tiny base for an up-down
# counter, and it answers with a single period. Train it for a few minutes, ask again, and it answers (measured, in
# section 8):
#
# ```verilog
# module TopModule (
#   input clk,
#   input clear,
#   input inc,
#   output reg [15:0] state
# );
#   always @(posedge clk)
#     if (clear) state <= 0;
#     else if (inc) state <= state + 1;
#     else state <= state - 1;
# endmodule
# ```
#
# This page is about what happens in between: you plan *adapters* (small matrices beside Gemma 4's own) and train them,
# and you leave the model itself alone.
#
# **If you've never used JAX, read [14 · JAX in a quarter of an hour](14_jax.ipynb) first.**
#
# | | |
# |---|---|
# | **Needs** | 31b: a v5p-8 (4 chips, 95.7 GiB each), a v6e-8 (8 chips, 31.25 GiB each) or a v5e-8 (8 chips, 15.75 GiB each). e2b (Gemma 4 E2B, the smallest): one v6e or v5e chip. tiny: any laptop, 4 simulated devices |
# | **Reads** | `data/` from notebook 02; the base model as safetensors (files of named weights), on a disk, on the Hugging Face hub or in a bucket (`gs://…`) |
# | **Writes** | `train/checkpoints/<step>/`, `train/log.jsonl`, `train/recipe.json` |
# | **Time and cost** | tiny: four to twelve minutes on two CPU cores, depending on how fast and how busy they are (measured). 31b, with the download: 0.54 to 1.34 hours on a v5p-8, 0.83 to 2.35 on a v5e-8 (steps and validation are predicted, the rest is assumed or measured by others; [08](08_dryrun.ipynb), section 8) |

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
# **How can you teach a model of 31 billion weights without touching any of them?**
#
# With *LoRA* (low-rank adaptation). A layer has two halves: *attention*, where each token takes in something from the
# tokens before it, and the *MLP*, which works on each token by itself. Each half has several matrices W, which all stay
# frozen. For each W you train two thin matrices, its *adapter*. A narrows the input of W to r numbers (r is the `rank`),
# and B turns these into a correction of W's output, scaled by α/r (α is `alpha`):
#
# ```python
# y = x @ W + alpha / r * (x @ A) @ B
# ```
#
# B starts at zero, so training begins at exactly the base model. (If you know PEFT: `rank` is its `r`, and `alpha` is its
# `lora_alpha`.) Here's one matrix of the 31B, drawn to scale.
#
# ![W, 5,376 by 8,192, with A as a thin line at its left and B as a thin line above it; a token goes through W and beside it through A and B, and both results are added](../assets/figures/lora.svg)

# %%
from dataclasses import replace

import jax
import numpy as np
import pandas as pd
from flax import nnx

from helpers import (
    answers, gemma, pictures, programs, quantized, records, style, train)
from tables.stored import settings_here

# %% [markdown]
# You don't choose the model here, because 02 tokenized the data for one particular model. So we begin with what 02 left:

# %%
data, meta, base, tokenizer = train.what_02_left()
length = meta.sequence_length

# %% [markdown]
# ### Settings
# **What do you have to choose?** Nothing, since everything has a default. The 31B's defaults mostly come from the
# published recipe ([10](10_published.ipynb) checks its claims). A few of them depend on your *slice*, the group of TPU
# chips that you train on. [08](08_dryrun.ipynb) has compiled many variants of this page's step for several slices. Of
# those that fit on yours, `settings_here` takes the one that we predict to be fastest.

# %%
FULL = train.Settings(**settings_here("31b", length, base))
E2B = train.Settings(rows_per_step=4, rows_per_device=1, remat="DECODER", checkpoint_every=300,
                     checkpoints_kept=2)  # of 1.14 GB each
E2B = replace(E2B, **settings_here("e2b", length, base))
TINY = train.Settings(rank=16, alpha=32.0, learning_rate=3e-3, warmup_steps=10, rows_per_step=2,
                      epochs=0.6, dtype="float32", attention_block=128, validate_every=60,
                      validation_rows=8, checkpoint_every=60, answer_tokens=160, log_every=60)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})
cfg = replace(cfg, **train.from_environment())  # MAX_STEPS, CHECKPOINTS: where a script sets them
train.keep_compilations(cfg.checkpoints)  # a restart then compiles nothing
style.show_settings(cfg, ["rank", "alpha", "learning_rate", "epochs", "rows_per_step"])

# %% [markdown]
# ### Where do the adapters go?
# You can see that before you read 62 GB of weights, because JAX can build a model of shapes only, without any numbers.
# (Three JAX libraries work together here. Tunix has Gemma 4's layers, and Qwix adds LoRA to them. Both build on Flax NNX,
# JAX's `torch.nn`.)
#
# But JAX wants to know right away where the arrays will be. It calls a chip a *device*, and it arranges devices in a
# grid, the *mesh*. Section 4 says what that's good for. Without a TPU, your CPU plays four devices.

# %%
config = gemma.config_from_hf(base, dtype=cfg.dtype)
config.remat_config = gemma.RematConfig[cfg.remat]
mesh = gemma.make_mesh(config, cfg.mesh)
shapes = programs.abstract(config, cfg, mesh)

# %% [markdown]
# Now count. Attention runs several times side by side, and each run is a *head*. Most layers, five in six in the 31B, are
# *sliding*: their tokens look back at the most recent tokens only. In *full* layers tokens look back at all earlier ones,
# and the heads have other sizes.

# %%
modules = gemma.adapted_modules(shapes)
trainable = sum(pair["a"].size + pair["b"].size for pair in modules.values())
frozen_numbers = quantized.parameters_of(shapes) - trainable
print(f"{trainable:,} numbers to train, {trainable / frozen_numbers:.1%} of this base's "
      f"{frozen_numbers:,}")
pictures.adapter_table(modules, gemma.layer_kinds(config)).style.hide(axis="index")

# %% [markdown]
# (Tunix names attention's modules after the einsum that they compute, as in `torch.einsum`.)
#
# **Suppose the adapters miss one matrix, the key projection of the full layers. What does such a run look like?**
#
# <details><summary>Answer</summary>
#
# Like any other, except that ten modules of the 31B learn nothing. That's why we refuse `targets` that miss a
# module, unless `partial=True` says that you mean it.
#
# </details>
#
# **Only A and B are trained. The larger the matrices, the smaller their share: in the 31B it's 1.5% with rank 64.**
#
# ## 2. One batch
# **What goes into one step?** Rows of notebook 02, with their `loss_mask`, `segment_ids` (which example a token belongs
# to) and `positions`. A step's rows may not all fit into memory at once. So we cut them into *micro-batches* and add up
# their gradients.
#
# A mesh has two axes, `fsdp` and `tp` (section 4): there are `fsdp` groups of `tp` chips each. The chips of one group
# work on the same rows, and different groups on different rows. `rows_per_device` counts the rows of one group, so a
# micro-batch has `fsdp` times as many. (Grain, a data loader for JAX, shuffles the rows and delivers them.)

# %%
fsdp, tp = mesh.devices.shape
train_rows, val_rows = (train.PackedRows(data / part) for part in ("train", "val"))
micro_batches, micro_rows = train.micro_batches_of(cfg, fsdp)
dataset = train.make_dataset(train_rows, micro_batches, micro_rows, cfg.seed)
batch = next(iter(dataset))
print(f"micro-batches, rows, tokens: {batch.tokens.shape}; {batch.segment_ids.max(-1).sum()} "
      f"examples, {(batch.segment_ids == 0).mean():.0%} padding, "
      f"{batch.loss_mask.mean():.0%} trained")

# %% [markdown]
# **Which tokens may look at which?** This function decides it, from the segment ids alone:

# %%
helpers.show_source(train.packed_mask)

# %% [markdown]
# Here's what it says of the batch's first row. In the upper picture each line is a token, and the colored columns are the
# tokens that it may look at in a full layer. (In a sliding layer only a band of the triangle is left, along the diagonal.
# Padding looks at padding, which harms nobody, and the picture leaves it white.)

# %%
first = jax.tree.map(lambda array: array[0, 0], batch)
pictures.packed_row(first, np.asarray(train.packed_mask(first.segment_ids[None])[0]))

# %% [markdown]
# If the whole row were one triangle, the last example would see the others as part of its own prompt. But a served prompt
# has nothing before it.
#
# **A packed row is several examples that can't see each other.**
#
# ## 3. One step, compiled
# **What exactly is the loss?** At every position the model predicts the *next* token: after `assign` it should say `y`,
# and after `assign y` it should say `=`. The loss of each prediction is −ln p, where p is the probability that the model
# gave to the token that's really there. Only the tokens that `loss_mask` marks count. We add up their losses over the
# whole step, and divide by their number once, at the end. So every token weighs the same ([14](14_jax.ipynb), section 3,
# shows what happens otherwise).
#
# **Only some tokens are trained. Which part of the model can we skip for the rest?**
#
# <details><summary>Answer</summary>
#
# The output matrix. It computes the *logits*: for each position, a score for every one of the 262,144 tokens that the 31B
# knows. They'd be the largest arrays of a step. So `token_losses` computes them for the trained positions alone.
#
# </details>
#
# In PyTorch you'd pick those positions with `hidden[loss_mask]`. But you only know how many there are once the program
# runs, and a compiled program has fixed shapes. So `token_losses` calls `top_k` on the mask's 0s and 1s. `top_k` always
# lists K positions, and it puts the 1s first. If a row has fewer than K trained tokens, the loss of the remaining
# positions is multiplied by 0. K, the `capacity`, is enough for the row with the most trained tokens.

# %%
capacity = train.capacity_of(train_rows, val_rows)
loss_fn = train.make_loss(capacity)
print(f"at most {capacity} of a row's {length} tokens are trained")
style.fold_source("token_losses: the loss of the trained tokens", train.token_losses)

# %% [markdown]
# **What does a gradient do to the adapters?** That's up to the optimizer. We use AdamW from Optax. For every trained
# number Adam keeps two running averages, its *moments*: one of the gradient and one of the gradient's square. Together
# with the learning rate, they decide which way the number moves, and how far. The W stands for weight decay, which pulls
# the adapters toward zero a little.
#
# <details><summary><b>Why are A and B float32, whatever the base is?</b></summary>
#
# Because Optax keeps the moments in the type of the numbers that they belong to, and bfloat16 is too coarse for the
# second moment. Each step multiplies it by 0.999. In bfloat16 that factor rounds to 1, so the moment would never shrink.
#
# </details>

# %%
rows_per_step = micro_batches * micro_rows
steps = train.steps_of(cfg, len(train_rows), rows_per_step)
schedule = train.make_schedule(cfg, steps)
optimizer = train.make_optimizer(schedule, cfg.weight_decay, cfg.max_grad_norm)
print(train.steps_in_words(cfg, steps))

# %% [markdown]
# The step itself is one function:

# %%
helpers.show_source(train.make_train_step)

# %% [markdown]
# `jax.value_and_grad` gives loss and gradient. `jax.lax.scan`, a compiled loop, takes the micro-batches one by one, so
# only one micro-batch's activations are in memory at a time. At the end AdamW changes the adapters. The step reads the
# frozen weights and doesn't return them ([14](14_jax.ipynb), section 6, says what that saves).
#
# <details><summary>And the attention over long rows?</summary>
#
# A score for every pair of tokens in a long row takes a lot of memory. So in rows longer than `attention_block` we use
# attention of our own. It lets at most that many tokens look back at a time. It computes no scores for what comes after
# them or, in sliding layers, for what lies too far back.
# </details>
#
# Compiling takes minutes for the 31B. But it needs no weights, so it starts now, in the background. (*Tracing* comes
# first: JAX runs the Python function once, on shapes, and writes down every operation.)

# %%
with helpers.phase("tracing the optimizer step"):
    lowered = train.lower_step(shapes, optimizer, loss_fn, mesh,
                               (micro_batches, micro_rows, length))
ahead = train.compile_ahead(lowered)

# %% [markdown]
# **A step is one compiled program. It needs shapes to be compiled, and weights only to run.**
#
# ## 4. Which chip holds which part?
# While the compiler works: **what does it have to know about your chips?** The 31B's weights take 57 GiB without the part
# that reads images, and a v5e chip has 15.75 GiB, so several chips share each W. How they do that depends on the mesh
# and its two axes:
#
# - Along `fsdp` (fully sharded data parallelism) each chip computes different rows of the batch. It only *stores* a
#   piece of W, and an *all-gather* brings it the other pieces when W is needed.
# - Along `tp` (tensor parallelism) each chip computes with its own attention heads, and with its own columns of the MLP.
#   So far nothing travels. But each half of a layer ends with a matrix that's cut by rows, and there every chip gets only
#   a partial sum. A *reduce-scatter* adds up these sums, and leaves each chip one piece of the total. Before the next
#   matrix, an all-gather puts the pieces together again.
#
# ![A 4 by 4 matrix on four chips: with fsdp each stores a row, and an all-gather brings the whole matrix to every chip; with tp each keeps a column, and the next matrix needs a reduce-scatter and an all-gather of activations](../assets/figures/shards.svg)
#
# You choose the mesh, and the compiler writes this communication. ([14](14_jax.ipynb), section 4, tries it on a small
# matrix.) If you leave the setting `mesh` alone, you get the mesh of the variant that `settings_here` took in section 1.
# If there's no such variant for your machine, you get as much `tp` as the heads allow.
#
# **Which mesh needs the most memory for the base, and which for the adapters?** Guess first. Here's the tiny model with
# rank 16, on every mesh that your devices allow:

# %%
tiny = gemma.config_from_hf("assets/tiny_gemma4", dtype="float32")
held_by = programs.by_mesh(tiny, train.Settings(rank=16))
pd.DataFrame(held_by).map(pictures.memory).T

# %% [markdown]
# The base is cut along both axes, so a device holds the same share of it on any mesh. The adapters take the most memory
# with `tp=1`. Why? An adapter has two matrices, and each is cut along one axis only. One of them touches the heads or the
# MLP's columns, and it's cut along `tp`. (In `q_einsum` that's B, because the heads come out. In `down_proj` it's A,
# because the columns go in.) The other one is cut along `fsdp`. The matrix that's cut along `tp` is nearly always the
# larger one, and with `tp=1` nothing cuts it.
#
# **With `fsdp` the weights travel. With `tp` it's the *activations*, the numbers that one layer hands to the next.**
#
# ## 5. Load and ask
# **What does the model say before it's trained?** To ask it, we need its weights. Tunix's loader puts each weight of the
# Hugging Face files onto its devices. On some slices, such as Kaggle's free v5e-8, the 31B only fits with one byte a
# weight. There the setting `base_dtype` is `int8`, and the frozen weights are rounded while they're loaded.
# ([11](11_qlora.ipynb) explains that, and also tries four bits.)

# %%
model, load_seconds = quantized.load_onto(meta.base_model, base, config, mesh, cfg.base_dtype)
print(f"{frozen_numbers:,} parameters, {pictures.memory(gemma.gib(nnx.state(model)))} per device")

# %% [markdown]
# Now ask it for the up-down counter and for three held-out modules. (With data of your own, the first held-out question
# takes the counter's place.)

# %%
samples = records.load_samples()
chats = answers.requests_of(meta, samples)
with helpers.phase(f"{len(chats)} answers of the base model"):
    before = answers.ask(model, tokenizer, chats, cfg.answer_tokens, mesh, meta.thinking)
counter = chats[0][-1]["content"]
print(f"asked:\n{counter}\n\nanswered:\n{before[0][:500]}")

# %% [markdown]
# **Ask before you train: without the base's answers you couldn't see what training changed.**
#
# ## 6. Get ready to train
# **What changes from now on, and what doesn't?** So far the adapters were only shapes. Now the model gets real ones. Then
# `start` takes the model apart, into what changes (the adapters, with Adam's moments) and what's frozen.

# %%
with helpers.phase("adding the adapters", every=60):
    model = programs.adapted(model, cfg, mesh)
    state, frozen = train.start(model, optimizer, mesh)

# %% [markdown]
# **What if the run is interrupted?** Then you restart the kernel and choose *Run All*, and it goes on from the newest
# *checkpoint*. Orbax writes one to the disk every `checkpoint_every` steps. It holds what changes: the adapters, Adam's
# moments, and the position in the data. It also holds the run's *recipe*: base, data, rank, learning rate and whatever
# else decides what's being trained.

# %%
recipe = train.recipe_of_run(cfg, meta, base, steps, rows_per_step)
manager, state = train.begin_or_resume(cfg, state, recipe, steps)

# %% [markdown]
# The compiled step says how much memory it needs. If it won't fit, you'll find out here. (*Temporaries* exist only during
# a step: the gradients, the logits, gathered weights, and the activations that the forward pass keeps for the backward
# pass. *Fresh outputs* are results that don't take the place of an old array.)

# %%
with train.within_memory(), helpers.phase("waiting for the compiled optimizer step"):
    compiled, compile_seconds = ahead.result()
held = train.memory_of(compiled, state, frozen)
pictures.memory_table(held)

# %% [markdown]
# If a step doesn't fit, the temporaries are what you can shrink. There are two ways. Take fewer `rows_per_device`, or set
# `remat` (rematerialization, which PyTorch calls *activation checkpointing*): it keeps fewer activations and recomputes
# the rest.
#
# **You know that a step fits before you've trained one, and a checkpoint keeps whatever changes.**
#
# ## 7. Train
# **How will you know whether training helps?** Every `validate_every` steps, `validate` computes the loss of rows that
# are never trained. The log gets a line for each step. You see the first one, the last one, and one every `log_every`
# steps.

# %%
held_out = train.to_mesh(train.validation_batch(val_rows, cfg.validation_rows, micro_rows), mesh)
evaluate = train.jit_eval_step(model, loss_fn, mesh)
log_file = helpers.run_dir("train", "log.jsonl")
run = train.Run(
    train_step=compiled, frozen=frozen, dataset=dataset, mesh=mesh,
    validate=lambda adapters: float(evaluate(adapters, frozen, held_out)),
    validate_every=cfg.validate_every, log=train.StepLog(log_file, steps, cfg.log_every),
    manager=manager, recipe=recipe)

# %% [markdown]
# Now train. In the first steps, the *warm-up*, the learning rate (`lr`) rises from 0. `grad norm` is the length of the
# gradient, taken as one vector. A gradient longer than `max_grad_norm` is *clipped* to that length. `real tok/s` says how
# many tokens the run gets through per second, not counting the padding.
#
# <details><summary>And in TensorBoard, or in Weights & Biases?</summary>
#
# Set `TRACK=tensorboard` or `TRACK=wandb` before the notebook starts. It's off if you set nothing. Both show what
# `log.jsonl` holds, and a run that resumes draws its curves again from that file. So `log.jsonl` stays what counts.
#
# - `tensorboard` writes to `train/tensorboard/`. To look at it, `pip install tensorboard`, and then
#   `tensorboard --logdir runs/31b/train/tensorboard`.
# - `wandb` needs its package (`.venv/bin/python -m pip install wandb`) and a key, from `.venv/bin/wandb login` or in
#   `WANDB_API_KEY`. `WANDB_PROJECT` names the project (otherwise it's `gemma4-on-tpu`), and `WANDB_NAME` names the run.
#   With `WANDB_MODE=offline` you need no key: the run stays in `train/wandb/`, and `wandb sync` sends it later.
#
# If you rent, `scripts/vm.sh run` hands these variables on to the machine, with the key. `scripts/kaggle.sh` takes no key,
# and brings only `log.jsonl` back.
#
# </details>

# %%
with mesh, train.within_memory():
    state = train.train(run, state)
nnx.update(model, state.adapters)
manager.close()  # after the last checkpoint is written

# %% [markdown]
# What does 04 need to know? The recipe and a few results, such as the last step. We write them to `recipe.json` right
# away, so whatever happens in the cells below, your training is saved.

# %%
history = train.read_log(log_file)
train.write_recipe(recipe, cfg, meta, mesh, model, state, history)
train.write_machine(
    mesh, held, load_seconds=load_seconds, compile_seconds=compile_seconds, steps=steps,
    micro_batches=micro_batches, micro_rows=micro_rows, sequence_length=length, remat=cfg.remat)

# %% [markdown]
# Here's the whole run. The loss is in *nats*, the unit that comes with natural logarithms.

# %% tags=["raises-exception"]
style.finish(pictures.draw_loss(history, steps, cfg.max_grad_norm), "03_loss",
             f"log.jsonl of this run, size {helpers.size()}, measured on {mesh.size} devices "
             f"({jax.devices()[0].device_kind})")

# %% [markdown]
# A gap between the two curves tells you little. In the first *epoch* (the first pass over all rows) it can't come from
# memorizing, because the model sees each training row for the first time when that row's loss is measured. And the few
# held-out rows may simply be easier. What counts is where each curve is heading. **What does it mean if the held-out loss
# rises while the training loss still falls?**
#
# <details><summary>Answer</summary>
#
# The model has begun to memorize its rows, so you've trained too long. (If both flatten at the end, that says little,
# because the learning rate has fallen to zero by then.)
#
# </details>
#
# **The held-out loss tells you when to stop.**
#
# ## 8. Ask again
# **Did it learn?** Here's the same request: the base on the left, the tuned model on the right.

# %% tags=["raises-exception"]
with helpers.phase(f"{len(chats)} answers of the tuned model"):
    after = answers.ask(model, tokenizer, chats, cfg.answer_tokens, mesh, meta.thinking)
style.side_by_side({"base": before[0], "tuned": after[0]}, counter)

# %% [markdown]
# Is it a counter? In [07](07_eval.ipynb) a simulator decides that. We keep both answers, because 04 asks the merged
# model for the same counter and compares.

# %% tags=["raises-exception"]
records.Answers(chats[0], cfg.answer_tokens, before[0], after[0]).save()

# %% [markdown]
# **Your model is trained, and `recipe.json` says how. You can go on to [04](04_merge.ipynb) now.**
#
# ## 9. Would it come back?
# **What if the machine had died just before the end?** A new process would have only the disk. We do what that process
# would do: restore the next-to-last checkpoint, and train on from there, at most ten steps. **Do you expect the same
# losses, or nearly the same?**

# %% tags=["raises-exception"]
with train.open_checkpoints(train.checkpoints_of(cfg), cfg.checkpoint_every, steps,
                            cfg.checkpoints_kept) as on_disk:
    earlier = train.restore(on_disk, state, recipe, before=state.step)
print(f"back to step {earlier.step} of {state.step}")
with mesh:
    again = train.train_again(run, earlier, history, most=10)
again = earlier = None  # frees their arrays

# %% [markdown]
# "As before" means the same number, to the last bit. That's possible because the checkpoint has everything that changes,
# and the same program makes the same numbers from it. (We've tried this on CPUs. On a TPU, nobody has.) This cell
# compares losses only. Our [tests](https://github.com/OWNER/gemma4-on-tpu/blob/main/tests/test_train.py) kill a run for
# real and compare the matrices, too. Another test compares an optimizer step with PyTorch's.
#
# **An interrupted run loses nothing but time.**
#
# ## Recap
# - Every matrix of attention and MLP has an adapter, which changes nothing before the first step.
# - The mesh says what a chip holds and what travels, and the compiler does the rest.
# - The step weighs every trained token equally, and a killed run continues to the same bits (on CPUs).
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. What travels, weights or activations? This program compiles a step for two meshes, and lists the shapes that are
#    gathered with each. With which mesh do you expect (160, 640) in the list, the W of a `gate_proj`? And with which mesh
#    do you expect (4, 512, 160), the activations of four rows? (It takes about a minute.)
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
# <details><summary>Solution</summary>
#
# With (4, 1) weights are gathered, and with (1, 4) activations instead. Thin matrices of the adapters, such as (160, 16),
# travel with both meshes. (That's the tiny model on four simulated devices.)
#
# </details>
#
# 2. Which half of the layers learned more, attention or MLP? Guess, then switch off one half's adapters at a time, and
#    look at the held-out loss.
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
# The half whose absence costs more does more of the work. In our tiny run it's the MLP, by far. (You can't add up the two
# increases, because each half was trained to rely on the other.)
#
# </details>
#
# 3. Break it on purpose: suppose that you've changed the learning rate, and now you go back to the newest checkpoint.
#    What do you expect?
#
# ```python
# with train.open_checkpoints(train.checkpoints_of(cfg), cfg.checkpoint_every, steps) as on_disk:
#     train.restore(on_disk, state, recipe | {"learning_rate": 0.1})
# ```
#
# <details><summary>Solution</summary>
#
# An error that names the setting, with both values. Adam's moments and the schedule belong to the old rate, so neither
# recipe would describe the run that goes on.
#
# </details>
#
# Next: [04 · From the checkpoint to a model every engine agrees on](04_merge.ipynb)
