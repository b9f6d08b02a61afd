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
# How does a model that answers in fragments learn to write the module you asked for? You'll plan small adapters
# for Gemma 4, load it onto four devices, ask it for an up-down counter, train the adapters, and ask again. Then
# you'll learn the JAX behind it, in ten minutes.
#
# | | |
# |---|---|
# | **Needs** | 31b: a v5p-8 (4 chips, 95.7 GiB each), or a v5e-8 (8 chips, 15.75 GiB each; section 1 says how). e2b (Gemma 4 E2B, about two billion effective parameters): one v6e or v5e chip. tiny: any laptop, 4 simulated devices |
# | **Reads** | `data/` from notebook 02; the base model's safetensors (local, Hugging Face hub or `gs://`) |
# | **Writes** | `train/checkpoints/<step>/`, `train/log.jsonl`, `train/recipe.json` |
# | **Time and cost** | tiny: about eight minutes on two CPU cores without AVX-512 (measured). 31b: about an hour on a v5p-8 (predicted and assumed, [08](08_dryrun.ipynb)) |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · **03 train** · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb)

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
# In [00](00_quickstart.ipynb) the base model answered our up-down counter with a full stop. **How can you teach a
# model of 31 billion weights without touching any of them?**
#
# With *LoRA* (low-rank adaptation). Every layer has matrices W in each of its two halves, attention and MLP. All of
# them stay frozen, and so does everything else. Beside each W you train two thin matrices, which together are an
# *adapter*. A narrows the input of W to r numbers (r is the `rank`), and B turns these into a correction of W's
# output. The correction counts α/r times (α is `alpha`).
#
# Drawn to scale, for one matrix of the 31B, A and B are no more than two thin lines.
#
# ![W, 5,376 by 8,192, with A as a thin line at its left and B as a thin line above it; a token goes through W and beside it through A and B, and both results are added](../assets/figures/lora.svg)
#
# **Who does what here?** JAX computes, Flax NNX holds the model, and Tunix knows Gemma 4. Qwix adds LoRA,
# Optax is the optimizer, Grain feeds the data, and Orbax writes checkpoints.
#
# <details><summary>If you know PyTorch</summary>
#
# | there | here |
# |---|---|
# | `x[0] = 1`, `torch.manual_seed` | arrays never change: `x.at[0].set(1)` is a new one; randomness needs a key, `jax.random.key(0)` |
# | `torch.cuda.synchronize()` | calls return before they finish: `jax.block_until_ready(x)` waits |
# | `loss.backward()`, `p.grad` | `jax.value_and_grad(f)`, `jax.tree.map` |
# | `nn.Module` with its parameters | a Flax NNX module: `nnx.split`, `nnx.merge` |
# | FSDP, tensor parallelism, `accelerate launch` | one mesh, and a partition spec for every array |
# | `torch.optim.AdamW` and a scheduler | Optax: pure functions, gradient in, update out |
# | `DataLoader` with workers | Grain: a pipeline whose position is one integer, which a checkpoint can hold |
# | PEFT's `LoraConfig` | Qwix's `LoraProvider`: a pattern over module paths |
#
# </details>

# %%
import itertools
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from etils import epath
from flax import nnx

from helpers import (
    answers, chat, gemma, pictures, programs, quantized, records, style, train, weights)
from tables import architecture
from tables.stored import settings_here

# %% [markdown]
# ### Settings
# You don't choose the model here: the data already did. It was made with one model's tokenizer, and its rows
# have one length. The settings below say how to train. Their defaults are mostly a published recipe for the 31B
# ([10](10_published.ipynb) asks how much of it holds). Two of them need a word:
#
# - `mesh` arranges the devices along two axes. `fsdp` (fully sharded data parallelism) cuts the batch and the
#   storage of the weights. `tp` (tensor parallelism) cuts attention heads and the columns of matrices. Section 6
#   shows both.
# - `base_dtype` says how the frozen weights are stored. Usually that's bfloat16, a number in two bytes. int8 takes
#   one byte, and rounds the weights to do so.
#
# If [08](08_dryrun.ipynb) has compiled this page's training step for your slice, `settings_here` takes four
# settings from there: the mesh, what the backward pass computes again to save memory (`remat`), how many rows a
# device computes at once, and `base_dtype`. (If several row lengths were compiled, the nearest to yours counts.)
#
# On a v5e-8, such as Kaggle's free one, `settings_here` stores the 31B in int8. In bfloat16 it doesn't fit: for rows
# of 2,048 tokens the TPU's compiler plans 17.3 GiB on a chip that has 15.75. [11](11_qlora.ipynb) explains int8, and
# [04](04_merge.ipynb) will merge your adapters into the rounded weights, because you trained beside those.

# %%
data, meta, base, tokenizer = train.what_02_left()
length = meta.sequence_length
FULL = train.Settings(**settings_here("31b", length))
E2B = train.Settings(rows_per_step=4, checkpoint_every=300, checkpoints_kept=2,  # of 1.14 GB each
                     **{"rows_per_device": 1, "remat": "DECODER"} | settings_here("e2b", length))
TINY = train.Settings(rank=16, alpha=32.0, learning_rate=3e-3, warmup_steps=10, rows_per_step=2,
                      epochs=0.6, dtype="float32", attention_block=128, validate_every=60,
                      validation_rows=8, checkpoint_every=60, answer_tokens=160)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})
cfg = replace(cfg, **train.from_environment())  # MAX_STEPS, CHECKPOINTS: where a script sets them
style.show_settings(cfg, ["rank", "alpha", "learning_rate", "epochs", "rows_per_step", "mesh",
                          "base_dtype"])

# %% [markdown]
# ### Where do the adapters go?
# You can see that before you read 62 GB of weights. JAX can build a model of shapes: it knows how large every
# array is, and which device will hold it. Only the numbers are missing. The next cell builds such a model and adds
# the adapters to it.
#
# Qwix goes by the modules' paths, such as `layers.5.attn.q_einsum`: it wraps each module whose path matches a
# pattern. (An *einsum* is a product whose axes have letters, and Tunix names its attention matrices after it.)
#
# The adapters are float32, and here's why. The optimizer, Adam, keeps two running averages for every trained
# number, its *moments*. The second moment shrinks by the factor 0.999 a step. In bfloat16 that factor rounds to 1,
# so the moment would never shrink.

# %%
train.keep_compilations(cfg.checkpoints)
config = gemma.config_from_hf(base, dtype=cfg.dtype)
config.remat_config = gemma.RematConfig[cfg.remat]
mesh = gemma.make_mesh(config, cfg.mesh)
fsdp, tp = mesh.devices.shape
shapes = quantized.abstract_base(config, mesh, cfg.base_dtype)
base_parameters = quantized.parameters_of(shapes)
shapes = programs.adapted(shapes, cfg, mesh)

# %%
helpers.show_source(gemma.lora_provider, gemma.lora_b)
modules = gemma.adapted_modules(shapes)
made = pd.DataFrame([(path.rpartition(".")[2], pair["a"].shape, pair["b"].shape,
                      pair["a"].size + pair["b"].size) for path, pair in modules.items()],
                    columns=["module", "A", "B", "numbers"])
trainable = int(made.numbers.sum())
print(f"{len(modules)} modules adapted of {len(gemma.expected_modules(config))}: "
      f"{trainable:,} trainable parameters, {trainable / base_parameters:.2%} of the base")
made.groupby(["module", "A", "B"], sort=False).numbers.agg(["size", "sum"])

# %% [markdown]
# **Suppose the pattern forgets `k_einsum`, the key projection of the layers that attend to all tokens.
# What does such a run look like?**
#
# <details><summary>Answer</summary>
#
# Like any other, except that ten modules of the 31B train nothing. That's why we refuse a pattern that misses a
# module, unless `partial=True` says that you mean it.
#
# </details>
#
# **Only A and B are trained, and they're a small fraction of the model.**
#
# ## 2. One batch
# **What goes into one step?** A row of notebook 02 brings its `loss_mask`, `segment_ids` and `positions` along.
# A whole step may be too large for the memory, so it's cut into *micro-batches*, whose gradients are added. The
# arrays have the shape [M micro-batches, B rows, T tokens].

# %%
helpers.show_source(train.make_dataset, train.packed_mask)
train_rows, val_rows = (train.PackedRows(data / part) for part in ("train", "val"))
micro_batches, micro_rows = train.micro_batches_of(cfg, fsdp)
dataset = train.make_dataset(train_rows, micro_batches, micro_rows, cfg.seed)
batch = next(iter(dataset))
print(f"a step: {micro_batches} micro-batches x {micro_rows} rows x {length} "
      f"tokens, {batch.segment_ids.max(-1).sum()} examples, "
      f"{(batch.segment_ids > 0).mean():.1%} no padding, {batch.loss_mask.mean():.1%} trained")
first = jax.tree.map(lambda array: array[0, 0], batch)
pictures.packed_row(first, np.asarray(train.packed_mask(first.segment_ids[None])[0]))

# %% [markdown]
# In the left picture a row is a token, and it may look at the coloured columns. So each example is a triangle
# of its own.
#
# <details><summary><b>What would the third example learn from without these blocks?</b></summary>
#
# From the answers of the first two, which no served request will have before it.
#
# </details>
#
# **A packed row is several examples that can't see each other.**
#
# ## 3. One step, compiled
# **What happens in one optimizer step?** Each micro-batch returns the *sum* of its losses and the number of its
# trained tokens. We divide only once, for the whole step, so that every token counts the same.
#
# **Here only a quarter of the tokens is trained. Which part of the model can we skip for the rest?**
#
# <details><summary>Answer</summary>
#
# The output matrix. It has a column for each of the 31B's 262,144 tokens, and what comes out are the *logits*, a
# score for each of these tokens. We need logits only at the trained positions. So `hidden_states` stops before the
# output matrix, and `token_losses` multiplies it with the trained positions alone. Logits are the largest arrays of
# a step. If your answers fill most of a row, `token_losses` therefore takes half a row at a time, and drops the
# logits of one half before it computes the other's.
#
# </details>

# %%
rows_per_step = micro_batches * micro_rows
steps = train.steps_of(cfg, len(train_rows), rows_per_step)
optimizer = train.make_optimizer(train.make_schedule(cfg, steps), cfg.weight_decay,
                                 cfg.max_grad_norm)
capacity = train.capacity_of(train_rows, val_rows)
loss_fn = train.make_loss(capacity)
helpers.show_source(train.token_losses, train.make_train_step)
print(f"{steps} steps, {cfg.epochs:g} epochs; a row of {length} has at most {capacity} "
      "trained tokens, rounded up to 128")
if steps < 20 and not cfg.max_steps:
    print(f"{steps} steps teach next to nothing: set epochs higher in section 1.")

# %% [markdown]
# `train_step` is a whole optimizer step in one function. `jax.value_and_grad` gives loss and gradient; JAX has no
# `.backward()`. `jax.lax.scan`, a compiled loop, goes over the micro-batches, so their number costs no
# memory. With a base in bfloat16 the adapters are rounded to bfloat16 inside the loss, like everything that
# multiplies, and AdamW (Adam with weight decay) updates the float32 originals. The step reads the frozen weights,
# but it doesn't return them.
#
# Python doesn't run this function at every step. JAX *traces* it: it calls the function once, with shapes in place
# of numbers, and records every operation. Then the compiler, XLA, makes one program of that record (section 6 has
# more). For the 31B compiling takes minutes, but it needs no weights. So it starts now, in a thread of its
# own, and the weights can be loaded meanwhile.

# %%
with helpers.phase("tracing the optimizer step"):
    lowered = train.lower_step(shapes, optimizer, loss_fn, mesh,
                               (micro_batches, micro_rows, length))
ahead = train.compile_ahead(lowered)

# %% [markdown]
# **A step is one compiled program. It needs shapes to be compiled, and weights only to run.**
#
# ## 4. Load, ask, train
# **What does the model say before it's trained?** First we need its weights. `load_base` calls Tunix's loader,
# which puts each weight of the Hugging Face files onto its devices. We ask for bfloat16 by name, because Tunix's
# default is float32, at twice the bytes. (Only the tiny model is trained in float32: a CPU without bfloat16 units
# is faster with it.)

# %%
began = time.perf_counter()
with helpers.phase(f"loading {meta.base_model} onto {mesh.size} devices, fsdp={fsdp} x tp={tp}"):
    model = quantized.load_base(base, config, mesh, cfg.base_dtype)
    jax.block_until_ready(nnx.state(model))
load_seconds = time.perf_counter() - began
print(f"{base_parameters:,} parameters, {gemma.gib(nnx.state(model)):.4g} GiB per device")

# %% [markdown]
# Now ask it for the up-down counter, together with the three held-out requests of notebook 02. (If you
# brought your own data, your first held-out question takes the counter's place.)

# %%
samples = helpers.read_json(data / "samples.json")
counter = samples[0]["messages"][-1]["content"]
if meta.asks_verilog:  # the series' own data
    counter = open("data/tiny_eval/Prob031_updown_prompt.txt").read().strip()
chats = [[*meta.system_messages, {"role": "user", "content": counter}],
         *(sample["messages"] for sample in samples)]
thinking = meta.thinking
with helpers.phase("four answers of the base model"):
    before = answers.ask(model, tokenizer, chats, cfg.answer_tokens, mesh, thinking)
print(f"asked:\n{counter}\n\nanswered:\n{before[0][:500]}")

# %% [markdown]
# A full stop isn't a counter. You'll ask again in section 5.
#
# The model gets its real adapters now. `start` then takes it apart into what changes and what's frozen.
#
# **What if the run is interrupted?** A *checkpoint* on the disk holds what changes: the adapters, Adam's moments,
# and the position in the data. It also holds the *recipe*, which is everything that decides what's being trained.
# If you change the recipe, we refuse to go on from the old checkpoint.

# %%
model = programs.adapted(model, cfg, mesh)
state, frozen = train.start(model, optimizer, mesh)
recipe = train.recipe_of(cfg) | {
    "base_model": meta.base_model, "base_sha256": weights.fingerprint(base), "steps": steps,
    "rows_per_step": rows_per_step, "data_sha256": meta.data_sha256,
    "template_sha256": meta.template_sha256}
checkpoints = epath.Path(cfg.checkpoints or helpers.run_dir("train", "checkpoints").resolve())
if cfg.fresh:
    train.throw_away(checkpoints)
manager = train.open_checkpoints(checkpoints, cfg.checkpoint_every, steps, cfg.checkpoints_kept)
state = train.restore(manager, state, recipe)  # of the newest checkpoint that is whole
found = f"resuming from step {state.step}" if state.step else "starting at step 0"
print(f"{found} of {steps}{', nothing left to train' * (state.step == steps)}")

# %% [markdown]
# The compiled step says how much memory it needs. If it won't fit, you'll find out here.

# %%
with train.within_memory(), helpers.phase("waiting for the compiled optimizer step"):
    compiled, compile_seconds = ahead.result()
print(f"compiled in {compile_seconds:.3g} s, beside all that was done meanwhile")
held = train.memory_of(compiled, state, frozen)
pd.Series(held, name="GiB per device").to_frame()

# %% [markdown]
# *Temporaries* are the gradients, and the *activations* of one micro-batch: what its forward pass keeps for the
# backward pass. If a step doesn't fit, `remat` (rematerialisation) trades time for memory: the backward pass
# computes again what it would otherwise have kept. [08](08_dryrun.ipynb) has the numbers for every slice.
#
# Now train. In the first steps, the *warm-up*, the learning rate rises from 0, so the very first step changes
# nothing yet. If you're interrupted, restart and choose *Run All*: it goes on where it was.

# %%
log_file = helpers.run_dir("train", "log.jsonl")
log = train.StepLog(log_file, steps, cfg.log_every)
held_out = train.to_mesh(train.validation_batch(val_rows, cfg.validation_rows, micro_rows), mesh)
evaluate = train.jit_eval_step(model, loss_fn)
run = train.Run(
    train_step=compiled, frozen=frozen, dataset=dataset, mesh=mesh,
    validate=lambda adapters: float(evaluate(adapters, frozen, held_out)),
    validate_every=cfg.validate_every, log=log, manager=manager, recipe=recipe)
with mesh, train.within_memory():
    state = train.train(run, state)
nnx.update(model, state.adapters)
manager.close()  # after the last checkpoint is written

# %% [markdown]
# What does 04 need to know? It's all in `recipe.json`, so no later notebook repeats a setting of this one. We
# write it right away: whatever happens in the cells below, your training is saved and 04 can run. The hash of
# the adapters goes with it, so that 04 will notice if a disk has flipped a bit.

# %%
history = train.read_log(log_file)
val = history.dropna(subset="val_loss").set_index("step").val_loss
records.Recipe(
    **recipe, size=helpers.size(), base_path=meta.base_path, adapter_dtype="float32",
    n_modules=len(modules), trainable_parameters=trainable, partial=cfg.partial,
    mesh={"fsdp": fsdp, "tp": tp}, checkpoints=cfg.checkpoints or "train/checkpoints",
    final_step=state.step, epochs=cfg.epochs, system=meta.system, reasoning=meta.reasoning,
    val_loss_before=float(val.get(0, np.nan)), val_loss_after=float(val.iloc[-1]),
    examples_per_step=rows_per_step * meta.examples_per_row,
    adapter_sha256=train.adapters_sha256(state.adapters)).save()
helpers.write_json(helpers.run_dir("train", "machine.json"), {
    **train.machine_facts(mesh, held), "load_seconds": load_seconds,
    "compile_seconds": compile_seconds, "steps": steps, "micro_batches": micro_batches,
    "micro_rows": micro_rows, "sequence_length": length, "remat": cfg.remat})

# %% [markdown]
# Here's the whole run, read from `log.jsonl`. The loss is in *nats*, the unit that comes with natural logarithms: a
# model that guesses blindly among n tokens pays ln n for each.

# %% tags=["raises-exception"]
style.finish(pictures.draw_loss(history, steps, cfg.max_grad_norm), "03_loss",
             f"log.jsonl of this run, size {helpers.size()}, measured on {mesh.size} devices "
             f"({jax.devices()[0].device_kind})")

# %% [markdown]
# **What does it mean if the held-out loss turns up while the training loss still falls?**
#
# <details><summary>Answer</summary>
#
# The model has begun to memorise its rows. The held-out loss is the one that counts, because it's on requests
# that the model hasn't seen. Once it rises, you've trained too long.
#
# </details>
#
# ### Would it come back?
# **What if the machine had died just before the end?** Everything in memory would be gone, and a new process would
# have only the disk. We do what that process would do: read the newest checkpoint before the last one, and train on
# from there (at most ten steps, so it stays short). **Do you expect the same losses, or nearly the same?**

# %% tags=["raises-exception"]
with train.open_checkpoints(checkpoints, cfg.checkpoint_every, steps,
                            cfg.checkpoints_kept) as on_disk:
    earlier = train.restore(on_disk, state, recipe, before=state.step)
print(f"back to step {earlier.step} of {state.step}")
logged = history.dropna(subset="loss").set_index("step")
with mesh:
    for again, record in itertools.islice(train.steps_from(run, earlier), 10):
        loss, then = record["loss"], logged.loss.get(again.step)
        print(f"step {again.step}: loss {loss}, {'as before' if loss == then else f'not {then}'}")
        if again.step == state.step:
            print("adapters from the disk:", train.adapters_sha256(again.adapters)[:16])
            print("adapters in memory:    ", train.adapters_sha256(state.adapters)[:16])
again = earlier = None  # frees their arrays

# %% [markdown]
# In our run they're the same, to the last bit. The checkpoint had everything that changes, Grain went on at the
# same row, and the same program makes the same numbers. (If the run's end is among these steps, you also see two
# hashes of the adapters: one of those that came from the disk, one of those in memory.) In the exercise you'll kill
# the kernel for real.
#
# **The held-out loss tells you when to stop, and a run that's interrupted loses nothing but time.**
#
# ## 5. Ask again
# **Did it learn?** Here's the same request: the base on the left, the tuned model on the right.

# %% tags=["raises-exception"]
with helpers.phase("four answers of the tuned model"):
    after = answers.ask(model, tokenizer, chats, cfg.answer_tokens, mesh, thinking)
style.side_by_side({"base": before[0], "tuned": after[0]}, counter)

# %% [markdown]
# It looks like a counter, and in [07](07_eval.ipynb) a simulator decides whether it is one. Now the three
# held-out requests, beside the dataset's own answers. Most of the tiny modules have only one natural form, so
# you can expect the same text.

# %% tags=["raises-exception"]
for sample, old, new in zip(samples, before[1:], after[1:]):
    style.side_by_side({"base": old, "tuned": new, "dataset": sample["answer"]},
                       sample["messages"][-1]["content"][:400])
same = sum(new.strip() == sample["answer"].strip() for new, sample in zip(after[1:], samples))
ended = sum(text.rstrip().endswith("```") for text in after)
print(f"{ended} of {len(after)} tuned answers end with their fence closed; of {len(samples)} with "
      f"a dataset answer, {same} equal it to the letter")

# %% tags=["raises-exception"]
helpers.write_json(helpers.run_dir("train", "answers.json"), {
    "asked": chats[0], "limit": cfg.answer_tokens, "before": before[0], "after": after[0]})
print(", ".join(sorted(path.name for path in helpers.run_dir("train").iterdir())))

# %% [markdown]
# **Your model is trained, so you can go on to [04](04_merge.ipynb) now.** What follows is for the curious: the
# JAX behind all this, how a step is spread over several chips, and why we wrote our own loop.
#
# ## 6. JAX in ten minutes
# What ran above rests on four ideas. Each gets one cell, on the model that's in memory.
#
# ### Functions are compiled, for one shape
# `jax.jit` traces your Python function, as in section 3: it runs it once with placeholders that have a shape and
# no values, and the compiler makes one program of the operations. Here `x` holds the request's tokens as vectors:
# [rows, T tokens, D numbers each]. **The loop calls `sizes` three times. How often does it print "traced"?**

# %% tags=["raises-exception"]
request = chat.prompt_ids(tokenizer, chats[0], thinking)
rows = jnp.array([request] * mesh.shape["fsdp"])  # one, or as many as a larger mesh cuts rows into
with mesh:
    x = model.embedder.encode(rows).astype(jnp.float32)


@jax.jit
def sizes(x):
    print("  traced for", x.shape)  # Python: runs while JAX traces, and only then
    return jnp.linalg.norm(x, axis=-1)


for tokens in (16, 16, 32):
    print(f"{tokens} tokens, the last one's vector has length {sizes(x[:, :tokens])[0, -1]:.2f}")

# %% [markdown]
# Twice, because the second call found a program for its shape. For the 31B a compilation takes minutes. That's
# why everything we train on has one shape, rows of one length, and why packing fills them.
#
# ### Gradients come from functions, and parameters are trees
# `jax.value_and_grad(f)` is a new function, which returns the value of `f` and its gradient for the
# first argument; no array has a `.grad`. That argument may be a *tree*: nested
# dictionaries and lists of arrays. Below, `pair` is a small LoRA adapter beside a real weight `W`.
# Only `pair` is differentiated, so `W` is frozen without being told so.

# %% tags=["raises-exception"]
kernel = quantized.weight_of(model.layers[0].mlp.gate_proj)  # [D, F]
W = kernel.astype(jnp.float32)
pair = {"a": jax.random.normal(jax.random.key(0), (W.shape[0], 4)) / W.shape[0] ** 0.5,
        "b": jnp.zeros((4, W.shape[1]))}


def toy_loss(pair, x):
    return jnp.mean((x @ W + x @ pair["a"] @ pair["b"] - 1.0) ** 2)


value, gradients = jax.value_and_grad(toy_loss)(pair, x)
changed = jax.tree.map(lambda p, g: p - 0.1 * g / optax.global_norm(gradients), pair, gradients)
print("gradient norms:", jax.tree.map(lambda g: float(jnp.linalg.norm(g)), gradients))
print(f"loss {value:.4f}, after one small step {toy_loss(changed, x):.4f}")

# %% [markdown]
# <details><summary><b>Why has <code>a</code> no gradient?</b></summary>
#
# It's multiplied by a `b` of zeros, so for now nothing depends on it. LoRA starts like this on purpose: the
# model with fresh adapters is still the base. After one step `b` is no longer zero.
#
# </details>
#
# ### One array, several devices
# The mesh gives the axes of a grid of devices their names, `fsdp` and `tp` (tensor parallelism). A
# *partition spec* says which axis cuts which dimension: `P('fsdp', 'tp')` cuts the first dimension
# of a matrix over `fsdp` and the second over `tp`. It stays one array in your program.

# %% tags=["raises-exception"]
print(f"{kernel.shape}, {kernel.sharding.spec}; a device holds "
      f"{kernel.sharding.shard_shape(kernel.shape)}")
jax.debug.visualize_array_sharding(kernel, use_color=False, scale=0.5)
product = jax.jit(jnp.dot)(x[0], kernel)
print(f"x times it: {product.shape}, {product.sharding.spec}, and nobody asked for that")

# %% [markdown]
# The compiler derives how results are cut from how the inputs are, and puts communication in where
# a device needs what another one holds. You choose the cuts; you never write a send.
#
# Here's one matrix under either cut. *All-gather* gives every chip what each of them holds.
# *Reduce-scatter* adds up what they hold, and leaves each chip a part of the sum.
#
# ![A 4 by 4 matrix on four chips: with fsdp each stores a row, and an all-gather brings the whole matrix to every chip; with tp each keeps a column, and the next matrix needs a reduce-scatter and an all-gather of activations](../assets/figures/shards.svg)
#
# ### A model is a structure and a tree
# Compiled functions take arrays and return arrays, but a module isn't an array. So `nnx.split` takes a
# module apart into a *graph* (what it is) and a *state* (a tree of arrays), and `nnx.merge` puts it
# together again inside the compiled function.

# %% tags=["raises-exception"]
part = quantized.by_itself(model.layers[0].mlp)  # the layer's MLP, without its adapters
graph, arrays = nnx.split(part)
for path, variable in nnx.to_flat_state(arrays):
    print(".".join(map(str, path)), variable.get_value().shape)
mlp = jax.jit(lambda arrays, x: nnx.merge(graph, arrays)(x))
with mesh:
    apart = jnp.abs(mlp(arrays, x) - part(x)).max()
print(f"compiled and called as it is: at most {apart:.2g} apart")

# %% [markdown]
# **That's all of it: functions of trees, compiled once for each shape, over arrays that know which device holds
# which part.**
#
# ## 7. Which mesh? Heads limit it
# With `tp` each device gets whole attention heads, so `tp` must divide every head count. Gemma 4 31B
# has 32 query heads and 16 *KV heads*, the heads of keys and values, each of which serves several
# query heads. But its ten full-attention layers have just **4** KV heads. **What happens with
# `tp=8` on sixteen chips?**

# %% tags=["raises-exception"]
big = architecture.read_config("data/configs/gemma4_31b.json")
for tensor_parallel in (1, 2, 4, 8, 16):
    shape = 16 // tensor_parallel, tensor_parallel
    print(shape, architecture.mesh_problem(big, *shape) or "divides everything")
print("chosen:", {chips: architecture.choose_mesh(big, chips) for chips in (4, 8, 16)})

# %% [markdown]
# You get this refusal before 62 GB are read. And what would each chip hold? We build a model of shapes again, as in
# section 1, this time six layers of the 31B. Then we can ask what one of four chips holds of layer 5, the first with
# full attention.

# %% tags=["raises-exception"]
four = jax.sharding.Mesh(np.array(jax.devices()[:1] * 4).reshape(1, 4), ("fsdp", "tp"))
six_layers = gemma.config_from_hf("data/configs/gemma4_31b.json", num_layers=6)
shapes_31b = gemma.inject_lora(gemma.abstract_base(six_layers, four), 64, 64.0, four)
cut = {}
for name in ("q_einsum", "k_einsum"):
    module = getattr(shapes_31b.layers[5].attn, name)
    for part, variable in (("W", module.w), ("A", module.w_lora_a), ("B", module.w_lora_b)):
        array = variable.get_value()
        cut[name, part] = {"shape": array.shape, "split": array.sharding.spec,
                           "on a chip": array.sharding.shard_shape(array.shape)}
pd.DataFrame(cut).T

# %% [markdown]
# Every chip computes its own heads with its own part of W and B. A is small, and each chip keeps
# all of it. Within attention the chips exchange nothing. Then comes `attn_vec_einsum`, and each
# chip holds a sum over its own heads only, so the four sums have to be added. That's an *all-reduce*, in
# two steps. *Reduce-scatter* leaves each chip the sum for a quarter of the numbers; *all-gather*
# hands the quarters round when the next projection needs them whole.
#
# Heads limit only `tp`, so you can also do without it. On a v5p we predict that a mesh such as `(4, 1)`
# is faster. There a chip keeps whole rows and gathers the *weights*, and they can travel while it
# multiplies. A sum over chips has to wait for the product. This page takes such a mesh if you set
# `max_tokens` and `sequence_length` to 2,048 in 02 ([08](08_dryrun.ipynb), section 6).
#
# <details><summary><b>What about more than four chips?</b></summary>
#
# Then only `fsdp` grows: a v5p-32 (four hosts, 16 chips) gets the mesh (4, 4) or (16, 1), and every host runs
# this page as a script ([MACHINES.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md)).
# A step has more rows then, so you'll have to look for the learning rate again.
#
# </details>
#
# **Heads limit `tp`. With more chips, `fsdp` grows.**
#
# ## 8. Why not Tunix's trainer?
# Tunix has a trainer, `PeftTrainer`, with a loop, a loss, accumulation and checkpoints. It's the shortest way
# to a tuned model. Here it learns one example by heart, with the tiny model in float32:

# %% tags=["raises-exception"]
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

exact = gemma.config_from_hf("assets/tiny_gemma4", dtype="float32")
cpu = gemma.make_mesh(exact, (1, 1), train.one_cpu())
student = gemma.inject_lora(gemma.load_base("assets/tiny_gemma4", exact, cpu), 4, 8.0, cpu)
ids, mask = chat.render(chat.load_tokenizer("assets/tiny_gemma4"), [
    *samples[0]["messages"], {"role": "assistant", "content": samples[0]["answer"]}])
trainer = PeftTrainer(student, optax.adamw(5e-3), TrainingConfig(eval_every_n_steps=1_000))
trainer.with_gen_model_input_fn(lambda pair: {
    "input_tokens": pair[0], "input_mask": pair[1], "positions": jnp.arange(len(ids))[None],
    "attention_mask": jnp.tril(jnp.ones((1, len(ids), len(ids)), bool))})
with cpu, jax.default_device(cpu.devices.item()):
    trainer.train([(np.array([ids]), np.array([mask]))] * 8)
losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
print("loss per step:", " ".join(f"{loss:.2f}" for loss in losses))

# %% [markdown]
# It works. So why did we write a loop of our own? Because Tunix weights tokens unevenly, and because its step
# copies the frozen weights.
#
# <details><summary><b>How can two trainers disagree about a mean?</b></summary>
#
# Tunix (0.1.7) averages each micro-batch, and then it averages those averages. So a token counts more where few
# tokens are trained. (Its main branch has weighted them since July 2026, 59deac39.) One of our tests takes one
# plain step of gradient descent both ways. With equally many trained tokens in both micro-batches the two steps
# agree to 1e-4 of their length; with uneven ones they don't. And Tunix's compiled step returns the whole model.
# For the 31B that's 14.6 GiB of fresh outputs on each of four chips, where our step returns no weights (compiled,
# [08](08_dryrun.ipynb)).
#
# </details>
#
# We replaced one part of the model, too. Tunix's attention computes all T x T scores of a row and then masks
# most of them away. Our attention (`helpers.show_source(gemma.attend)`) takes a block of queries at a time and
# multiplies it only with the keys that one of them may see. That saves a lot, because 50 of the 31B's 60 layers
# look back 1,023 tokens at most.
#
# **In our loop every trained token counts the same, and a step returns only what changed.**
#
# ## 9. What was checked
# **Why should you believe any of this?** Three proofs are in `tests/`, and not on this page. The loss and all
# gradients of a packed row equal those of its examples one by one, computed with an independent textbook loss.
# One optimizer step equals PyTorch's with PEFT, from the same A and B. And a run that's ended by `kill -9` at
# any point continues to the same bits, even if its newest checkpoint is only half written.
#
# ## Recap
# - JAX compiles functions of trees, once for each shape, for a whole mesh. Heads limit `tp`; rows and weights
#   can be cut without it.
# - Every matrix of attention and MLP has float32 adapters, and they change nothing before the first step.
# - The step weighs every token equally and returns only what changed.
# - You can kill a run at any moment, and it continues to the same bits.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercise
# Kill the kernel in the middle of training (`kill -9`), copy `log.jsonl` to `copy.jsonl`, and run the
# notebook again. Which steps are computed twice, and how do their lines differ?
#
# <details><summary>Solution</summary>
#
# ```python
# old, new = (pd.read_json(helpers.run_dir("train", name), lines=True).dropna(subset="loss")
#             .set_index("step") for name in ("copy.jsonl", "log.jsonl"))
# both = old.index.intersection(new.index)
# print((old.loc[both] != new.loc[both]).drop(columns="val_loss", errors="ignore").sum())
# ```
#
# The steps after the newest checkpoint are computed twice. Their lines differ in `seconds` and in
# nothing else.
#
# </details>
#
# Next: [04 · From the checkpoint to a model every engine agrees on](04_merge.ipynb)
