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
# How does a model that answers in fragments learn to write the module you asked for? In this
# notebook you load Gemma 4 onto four devices, ask it for an up-down counter, train small adapters
# beside its frozen weights, and ask again. On the way you learn as much JAX as that takes.
#
# | | |
# |---|---|
# | **Needs** | 31b: a v5p-8 (4 chips, 95.7 GiB each). e2b: one v6e or v5e chip. tiny: any laptop, 4 simulated devices |
# | **Reads** | `data/` from notebook 02; the base model's safetensors (local, Hugging Face hub or `gs://`) |
# | **Writes** | `train/checkpoints/<step>/`, `train/log.jsonl`, `train/recipe.json`, TensorBoard events, figures |
# | **Time and cost** | tiny: about four minutes on two idle CPU cores (measured). 31b: about an hour, 16 USD, of which the steps are 0.39 h and 6.5 USD (predicted, [08](08_dryrun.ipynb); the rest is assumed, [01](01_setup.ipynb) section 5). e2b: 0.09 h of steps on a v6e (predicted), no less than 0.20 h on a v5e (the arithmetic at its peak, 08) |
#
# The outputs shown are those of the tiny run on two CPU cores. `HF_TOKEN` is read from the
# environment if the hub asks for a licence.

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · **03 train** · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
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
helpers.machine(devices=4)

# %%
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from etils import epath
from flax import nnx
from tunix.sft import peft_trainer

from appendix import quantized
from helpers import chat, gemma, pictures, remote, style, train, weights
from tpu_time import stored
from tpu_time.fit import settings_here

# %% [markdown]
# The libraries: JAX computes, Flax NNX holds the model, Tunix knows Gemma 4, Qwix adds LoRA, Optax
# is the optimizer, Grain feeds data, Orbax writes checkpoints. What two notebooks use is in
# `helpers/`, and its core functions are printed here where they are explained.
#
# ## 1. Load the model and ask it
# First the settings. Rank, alpha, learning rate, warm-up and weight decay of the full size are those
# of a published recipe for this model ([10](10_published.ipynb) asks what holds of it). You
# need not understand every field now: each is explained where it is used. For your own data,
# set `epochs` to 3 or so: the tiny recipe reads only a quarter of its rows, because that is enough.

# %%
@dataclass(frozen=True)
class Settings:
    # ── LoRA ──
    rank: int = 64
    alpha: float = 64.0                # the adapter counts alpha / rank times
    targets: str = gemma.TARGETS       # which matrices get adapters
    partial: bool = False              # True: some matrices are left out on purpose
    base_dtype: str = helpers.env("BASE_DTYPE", "bfloat16")  # of the frozen base; int8, nf4: 11
    tile_size: int = helpers.env("TILE_SIZE", 0)  # its input weights per scale
    int8_products: bool = False        # multiply in int8, too (11)
    a_init: str = "he"                 # A's first values; "peft" is PEFT's scale
    # ── Optimizer ──
    learning_rate: float = 1e-4        # at its peak
    warmup_steps: int = 100
    weight_decay: float = 0.001
    max_grad_norm: float = 1.0
    # ── One optimizer step ──
    rows_per_step: int = 2             # packed rows of 4,096 tokens, about 8.4 examples; never
    # less than a micro-batch
    rows_per_device: int = 2           # of a micro-batch, on each part of the fsdp axis
    epochs: float = 1.0
    max_steps: int = helpers.env("MAX_STEPS", 0)  # 0: all; else the schedule is shorter
    dtype: str = "bfloat16"            # of the arithmetic; adapters are float32
    remat: str = "NONE"                # or BLOCK, DECODER: what the backward pass computes again
    attention_block: int = 1_024       # queries at a time
    # ── Watching and saving ──
    log_every: int = 10
    validate_every: int = 100
    validation_rows: int = 64
    checkpoint_every: int = 100
    checkpoints_kept: int = 3
    checkpoints: str = os.environ.get("CHECKPOINTS", "")  # gs://...; empty: below RUN_DIR
    answer_tokens: int = 512           # of the answers shown before and after
    fresh: bool = False                # True throws this run's checkpoints and log away
    seed: int = 42


FULL = Settings(**settings_here("31b", Settings.base_dtype))
E2B = Settings(rows_per_step=4, checkpoint_every=300, checkpoints_kept=2,  # of 1.14 GB each
               **{"rows_per_device": 1} | settings_here("e2b", Settings.base_dtype))
TINY = Settings(rank=16, alpha=32.0, learning_rate=5e-3, warmup_steps=10, rows_per_step=4,
                rows_per_device=2, epochs=0.25, attention_block=128, log_every=10,
                validate_every=20, validation_rows=8, checkpoint_every=20, answer_tokens=160)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# The base model is not among them: the tokens of notebook 02 belong to one tokenizer and one chat
# template, so the data says which model it is for, and this cell checks that it still is.

# %%
data, meta, base, tokenizer = train.what_02_left()
train.keep_compilations(cfg.checkpoints)
print(f"from 02: {meta['train_rows']:,} rows of {meta['sequence_length']:,} tokens, "
      f"{meta['examples_per_row']:.1f} examples a row, {meta['fill']:.1%} of it no padding, "
      f"{meta['val_rows']} rows held out, reasoning {meta['reasoning']}")

# %% [markdown]
# Now load. The config comes from the model's `config.json`, a *mesh* arranges the devices (section
# 3), and `load_base` calls Tunix's loader, which reads the Hugging Face files and puts each weight
# onto its devices. We ask for bfloat16 by name: Tunix's default is float32 arrays, even over
# bfloat16 weights, which a TPU reads at twice the bytes and still multiplies in bfloat16.
# (`base_dtype` can store the frozen weights in fewer bits, the subject of notebook 11. Calls to
# `quantized` serve that; in bfloat16, read past them.)

# %%
config = gemma.config_from_hf(base, dtype=cfg.dtype)
config.remat_config = gemma.RematConfig[cfg.remat]
mesh = gemma.make_mesh(config)
fsdp, tp = mesh.devices.shape
quantized.check_run(cfg, config, mesh, cfg.checkpoints or helpers.run_dir("train", "checkpoints"))
began = time.perf_counter()
with helpers.phase(f"loading {meta['base_model']} onto {mesh.size} devices, fsdp={fsdp} x tp={tp}"):
    model = quantized.load_base(base, config, mesh, cfg.base_dtype, cfg.tile_size)
    jax.block_until_ready(nnx.state(model))
load_seconds = time.perf_counter() - began
base_parameters = quantized.count(model)
print(f"{base_parameters:,} parameters, {gemma.gib(nnx.state(model)):.4g} GiB per device")

# %% [markdown]
# And ask. The request is the up-down counter that goes through all notebooks (with your own data it
# is your first held-out question); three held-out requests of notebook 02 are asked along with it. `train.ask` renders each chat with the
# functions that rendered the training rows, and takes the likeliest token again and again.

# %%
samples = helpers.read_json(data / "samples.json")
counter = train.running_example(meta, samples)
system = [{"role": "system", "content": meta["system"]}] if meta["system"] else []
chats = [[*system, {"role": "user", "content": counter}],
         *(sample["messages"] for sample in samples)]
thinking = meta["reasoning"] == "kept"
with helpers.phase("four answers of the base model"):
    before = train.ask(model, tokenizer, chats, cfg.answer_tokens, mesh, thinking)
print(f"asked:\n{counter}\n\nanswered:\n{before[0][:500]}")

# %% [markdown]
# That is no counter. The tiny base has read Verilog but was never taught to answer. (The 31B can
# answer from the start; there the question is how much better it gets.) In section 9 you ask again.
#
# ## 2. JAX in fifteen minutes
# Four ideas, one cell each, on the model that is now in memory.
#
# ### Functions are compiled, for one shape
# `jax.jit` runs your Python function once with placeholders that have a shape and no values. It
# records the operations (this is *tracing*), and the compiler XLA makes one program of them. Later
# calls with the same shapes skip your Python. A new shape is a new compilation. Here `x` holds the
# request's tokens as vectors: [rows, T tokens, D numbers each].

# %%
request = chat.prompt_ids(tokenizer, chats[0], thinking)
rows = jnp.array([request] * mesh.shape["fsdp"])  # one, or as many as a larger mesh cuts rows into
with gemma.use_mesh(mesh):
    x = model.embedder.encode(rows).astype(jnp.float32)


@jax.jit
def sizes(x):
    print("  traced for", x.shape)  # Python: runs while JAX traces, and only then
    return jnp.linalg.norm(x, axis=-1)


for tokens in (16, 16, 32):
    print(f"{tokens} tokens, the last one's vector has length {sizes(x[:, :tokens])[0, -1]:.2f}")

# %% [markdown]
# The second call printed no "traced". For the 31B a compilation takes minutes, so everything we
# train on has one shape: rows of one length. Packing then fills them.
#
# ### Gradients come from functions, and parameters are trees
# JAX has no `.backward()` and no `.grad`. `jax.value_and_grad(f)` is a new function, which returns
# the value of `f` and its gradient for the first argument. That argument may be a *tree*: nested
# dictionaries and lists of arrays. `jax.tree.map` applies a function to every array in it. Below,
# `pair` is a small LoRA adapter beside a real weight `W`. Only `pair` is differentiated, so `W` is
# frozen without being told so.

# %%
weight = model.layers[0].mlp.gate_proj.kernel
W = quantized.dequantized(weight).astype(jnp.float32)  # [D, F]; the model's dtype is smaller
pair = {"a": jax.random.normal(jax.random.key(0), (W.shape[0], 4)) / W.shape[0] ** 0.5,
        "b": jnp.zeros((4, W.shape[1]))}


def toy_loss(pair, x):
    return jnp.mean((x @ W + x @ pair["a"] @ pair["b"] - 1.0) ** 2)


value, gradients = jax.value_and_grad(toy_loss)(pair, x)
changed = jax.tree.map(lambda p, g: p - 0.1 * g / optax.global_norm(gradients), pair, gradients)
print("gradient norms:", jax.tree.map(lambda g: float(jnp.linalg.norm(g)), gradients))
print(f"loss {value:.4f}, after one small step {toy_loss(changed, x):.4f}")

# %% [markdown]
# `a` has no gradient yet, because it is multiplied by a `b` of zeros. Section 4 comes back to that.
#
# ### One array, several devices
# A *mesh* gives names to the axes of a grid of devices: ours are `fsdp` and `tp`. A *partition
# spec* says which axis cuts which dimension: `P('fsdp', 'tp')` cuts the first dimension of a matrix
# over `fsdp` and the second over `tp`. The array stays one array in your program.

# %%
kernel = quantized.stored(weight)  # [D, F], as the model keeps it
print(f"{kernel.shape}, {kernel.sharding.spec}; a device holds "
      f"{kernel.sharding.shard_shape(kernel.shape)}")
jax.debug.visualize_array_sharding(kernel, use_color=False, scale=0.5)
product = jax.jit(jnp.dot)(x[0], kernel.astype(x.dtype))  # 4 bits are not promoted
print(f"x times it: {product.shape}, {product.sharding.spec}, and nobody asked for that")

# %% [markdown]
# The compiler derives how results are cut from how the inputs are, makes one program for all
# devices, and puts communication in where a device needs what another one holds. You choose the
# cuts; you never write a send.
#
# ### A model is a structure and a tree
# Compiled functions take arrays and return arrays, and a module is neither. `nnx.split` takes a
# module apart into a *graph* (what it is) and a *state* (a tree of arrays); `nnx.merge` puts it
# together again, inside the compiled function.

# %%
graph, state = nnx.split(model.layers[0].mlp)
for path, variable in nnx.to_flat_state(state):
    print(".".join(map(str, path)), variable.get_value().shape)
mlp = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
with gemma.use_mesh(mesh):
    apart = jnp.abs(mlp(state, x) - model.layers[0].mlp(x)).max()
print(f"compiled and called as it is: at most {apart:.2g} apart")

# %% [markdown]
# That is all of it: functions of trees, compiled once per shape, over arrays that know where they
# lie. If you know PyTorch:
#
# | there | here |
# |---|---|
# | `x[0] = 1`, `torch.manual_seed` | arrays never change: `x.at[0].set(1)` is a new one; randomness needs a key, `jax.random.key(0)` |
# | `torch.cuda.synchronize()` | calls return before they finish: `jax.block_until_ready(x)` waits |
# | eager code, `model.to("cuda")` | `jax.jit`: a whole optimizer step is one program for all devices |
# | `loss.backward()`, `p.grad` | `jax.value_and_grad(f)`, `jax.tree.map` |
# | `nn.Module` with its parameters | a Flax NNX module: `nnx.split`, `nnx.merge` |
# | FSDP, tensor parallelism, `accelerate launch` | one mesh, and a partition spec for every array |
# | `torch.optim.AdamW` and a scheduler | Optax: pure functions, gradient in, update out |
# | `DataLoader` with workers | Grain: a pipeline whose position is one integer, which a checkpoint can hold |
# | PEFT's `LoraConfig` | Qwix's `LoraProvider`: a pattern over module paths |
# | TRL's `SFTTrainer` | Tunix's `PeftTrainer` (section 6), or a loop of your own (section 7) |
#
# More words are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).
#
# ## 3. Which mesh? The heads decide
# `fsdp` splits the batch and the storage of the weights; `tp`, tensor parallelism, splits attention
# heads and MLP columns. Each device gets whole heads, so `tp` must divide every head count. Gemma 4
# 31B has 32 query heads and 16 KV heads (each serves several query heads). But its ten
# *full-attention* layers, the ones that see all tokens and not only the last 1,024, have just
# **4** KV heads. So `tp=4` is the most. Ask for `tp=8` on sixteen chips:

# %%
big = gemma.config_from_hf("data/configs/gemma4_31b.json")
try:
    gemma.make_mesh(big, shape=(2, 8), devices=jax.devices()[:1] * 16)
except helpers.UserError as error:
    print(f"31B, refused: {error}")

train.mesh_table(big)

# %% [markdown]
# A dash is an impossible mesh, and the arrow is what `make_mesh` chooses: (1, 4) on a v5p-8, which
# is 4 chips. The refusal comes before 62 GB are read. This is about divisibility only; section 13
# asks about memory.
#
# ## 4. LoRA: W + (α/r) · A · B
# Each weight matrix W stays frozen. Beside it you train A, which reads the same input into `rank`
# numbers, and B, which turns these into a correction of the output. Qwix finds the matrices by a
# pattern over module paths, printed below, and wraps them; one call does it:
#
# ```python
# model = qwix.apply_lora_to_model(model, provider, dummy_tokens, ...)  # in gemma.inject_lora
# ```
#
# The adapters are float32, because in bfloat16 Adam's beta2 = 0.999 rounds to 1 and its second
# moment would never decay. Dropout is 0, because Qwix's cannot be switched off for validation.

# %%
print(f"targets: {cfg.targets}")
helpers.show_source(gemma.lora_provider, gemma.lora_a, gemma.lora_b)
gemma.use_block_attention(model, cfg.attention_block)  # section 7
before_lora = model
model = gemma.inject_lora(
    model, cfg.rank, cfg.alpha, mesh, cfg.targets, cfg.seed, cfg.a_init, cfg.partial,
    quantized.provider(cfg.base_dtype, cfg.rank, cfg.alpha, cfg.targets, cfg.tile_size,
                       cfg.int8_products))
modules = gemma.adapted_modules(model)
everything = gemma.expected_modules(config)
print(f"{len(modules)} modules adapted of {len(everything)}",
      f"({len(everything) - len(modules)} left out on purpose)" if cfg.partial else "")
assert cfg.partial or sorted(modules) == sorted(everything)

# %% [markdown]
# The count matters. `k_einsum`, the lone key projection of the full-attention layers, is easily
# forgotten in the pattern, and then ten modules of the 31B silently train nothing. Here a pattern
# that misses a module is refused, unless `partial=True` says that it is meant. What was made:

# %%
table = train.lora_table(model)
trainable = int(table.parameters.sum())
print(f"{trainable:,} trainable parameters, {trainable / base_parameters:.2%} of the base")
table

# %% [markdown]
# A Hugging Face matrix has shape (out, in); Tunix keeps heads as dimensions of their own and stacks
# K and V into one `kv_einsum`. A starts random and B starts at zero, so A times B is zero: the model
# with adapters is still the base. On the tiny model in float32 you see it, whatever `SIZE`:

# %%
exact = gemma.config_from_hf("assets/tiny_gemma4", dtype="float32")
cpu = gemma.make_mesh(exact, (1, 1), jax.local_devices(backend="cpu")[:1])
plain = gemma.load_base("assets/tiny_gemma4", exact, cpu)
witness = gemma.inject_lora(plain, 4, 8.0, cpu)
probe = np.load(data / "val" / "tokens.npy")[:1, :64] % exact.num_embed  # others have more tokens


@nnx.jit
def logits_of(model):
    return model(probe, attention_mask=jnp.tril(jnp.ones((1, 64, 64), bool)))[0]


with gemma.use_mesh(cpu), jax.default_device(cpu.devices.item()):
    without, adapted = logits_of(plain), logits_of(witness)
apart, spread = jnp.abs(without - adapted).max(), jnp.abs(without).max()
print(f"logits up to {spread:.1f}, with and without adapters at most {apart:.2g} apart")
assert apart <= 1e-5 * spread, "more than the rounding of float32"
for path, pair in modules.items():  # and of the model that we train
    a, b = pair["a"].get_value(), pair["b"].get_value()
    assert a.dtype == b.dtype == jnp.float32 and jnp.isfinite(a).all() and not b.any(), path
    for array in (a, b):
        array.sharding.shard_shape(array.shape)  # raises if an axis does not divide

# %% [markdown]
# If you carry a learning rate over from PyTorch, mind A's scale. Qwix draws A uniformly within
# sqrt(6 / inputs), PEFT within 1 / sqrt(inputs), which is 2.45 times less, and B's gradient is
# proportional to A. `a_init="peft"` draws at PEFT's scale.
#
# ### One matrix on four chips
# How does this look for the 31B? `nnx.eval_shape` builds a model without memory: shapes, types and
# shardings, no arrays. We take layer 5, the first with full attention, and ask what one chip holds.

# %%
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
pictures.layer_on_chips(cut)
pd.DataFrame(cut).T

# %% [markdown]
# Every chip computes its own heads with its own part of W and B. A is small, and each chip keeps
# all of it. Within attention the chips exchange nothing. Then comes `attn_vec_einsum`, and each chip
# holds a sum over its own heads only: the four have to be added. That is an *all-reduce*, and it is
# done in two steps:

# %%
pictures.collectives()

# %% [markdown]
# *Reduce-scatter* leaves each chip the sum for a quarter of the numbers. *All-gather* hands the
# quarters round when the next projection needs them whole. Between the two, Tunix keeps only the
# quarter, which saves memory; the bytes on the wire are the same.
#
# ## 5. One batch
# A row of notebook 02 holds several examples. Three arrays travel with its tokens: `loss_mask` says
# which tokens are to be predicted, `segment_ids` which example each belongs to, and `positions`
# count from 0 in every example. A step sees arrays of shape [M, B, T]: M micro-batches of B rows of
# T tokens. Grain shuffles and stacks them.

# %%
helpers.show_source(train.Batch, train.micro_batches_of, train.make_dataset)
micro_batches, micro_rows = train.micro_batches_of(cfg, fsdp)
rows_per_step = micro_batches * micro_rows
train_rows = train.PackedRows(data / "train")
dataset = train.make_dataset(train_rows, micro_batches, micro_rows, cfg.seed)
batch = next(iter(dataset))
print(f"a step: {micro_batches} micro-batches x {micro_rows} rows x {meta['sequence_length']} "
      f"tokens, {batch.segment_ids.max(-1).sum()} examples, "
      f"{(batch.segment_ids > 0).mean():.1%} no padding, {batch.loss_mask.mean():.1%} trained")

# %%
helpers.show_source(train.packed_mask)
first = jax.tree.map(lambda array: array[0, 0], batch)
pictures.packed_row(first, np.asarray(train.packed_mask(first.segment_ids[None])[0]))

# %% [markdown]
# A token (row of the picture) may look at the coloured ones (columns): a triangle per example.
# Without these blocks the third example would read the answers of the first two.
#
# ## 6. Tunix's own trainer in twenty lines
# Tunix has a trainer, `PeftTrainer`: loop, loss, accumulation, checkpoints. It is the shortest way
# to a tuned model, and this is all of it. The published run feeds it one example a row; so does
# `alone`, which takes packed rows apart. We train the tiny float32 model of section 4, at every size.

# %%
def alone(rows):
    """(tokens, loss mask) [1, T] of each example of packed rows, padded on the right."""
    for row, segments in enumerate(rows.segment_ids):
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            yield tuple(np.pad(array[row, at], (0, len(segments) - len(at)))[None]
                        for array in (rows.tokens, rows.loss_mask))


def by_tunix(batches, optimizer, accumulate=1):
    """(losses, adapters) after training the witness on (tokens, loss mask) pairs of [B, T]."""
    student = nnx.clone(witness)
    trainer = peft_trainer.PeftTrainer(student, optimizer, peft_trainer.TrainingConfig(
        eval_every_n_steps=1_000, gradient_accumulation_steps=accumulate))
    trainer.with_gen_model_input_fn(lambda pair: {
        "input_tokens": pair[0], "input_mask": pair[1],
        "positions": jnp.tile(jnp.arange(pair[0].shape[1]), (len(pair[0]), 1)),
        "attention_mask": jnp.tile(jnp.tril(jnp.ones((pair[0].shape[1],) * 2, bool)),
                                   (len(pair[0]), 1, 1))})
    trainer.train(batches)
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    return losses, nnx.state(student, nnx.LoRAParam)

# %%
flat = jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]), batch)
singles = []
for tokens, mask in alone(flat.replace(tokens=flat.tokens % exact.num_embed)):
    at = max(0, min(int(mask.argmax()) - 256, mask.shape[1] - 512))  # 512 tokens of a long row
    singles.append((tokens[:, at:at + 512], mask[:, at:at + 512]))
singles = (2 * singles)[:8]  # in pairs, even if there is but one
pairs = [tuple(map(np.concatenate, zip(*singles[i:i + 2]))) for i in range(0, len(singles) - 1, 2)]
with gemma.use_mesh(cpu), jax.default_device(cpu.devices.item()), helpers.phase("Tunix's trainer"):
    losses, _ = by_tunix(pairs * 3, optax.adamw(5e-3))
print("loss per step:", " ".join(f"{loss:.2f}" for loss in losses))

# %% [markdown]
# It learns. Why write a loop of our own? For two reasons: one is measured below, the other is the
# compiler's number. (Padding is no third: the lambda above could pass `packed_mask`.)
#
# **Weighting.** With accumulation, Tunix averages each micro-batch and then the averages, so a token
# counts more where few tokens are trained. We take one plain step of gradient descent both ways: on
# four rows that train equally many tokens (`equal`), then with two of them training only their last
# 32 (`uneven`).
#
# **Outputs.** Its compiled step returns the whole model, frozen weights included.

# %%
sgd, step_loss = optax.sgd(1.0), train.make_loss(127)
our_step = jax.jit(train.make_train_step(witness, sgd, step_loss))
_, start, frozen = nnx.split(witness, nnx.LoRAParam, ...)  # adapters, then "...": all the rest
four_rows = np.stack([train_rows[i % len(train_rows)].tokens[:128] % exact.num_embed
                      for i in range(4)])
equal = np.zeros((2, 2, 128), np.int32)
equal = train.Batch(four_rows.reshape(equal.shape), equal == 0, equal + 1,
                    equal + np.arange(128, dtype=np.int32))
late = (equal.positions >= 96) | [[[False]], [[True]]]  # in the first micro-batch
for name, rows in (("equal", equal), ("uneven", equal.replace(loss_mask=equal.loss_mask & late))):
    with gemma.use_mesh(cpu), jax.default_device(cpu.devices.item()):
        (loss, *_), theirs = by_tunix(list(zip(rows.tokens, rows.loss_mask)), sgd, accumulate=2)
        ours, _, metrics = our_step(start, sgd.init(start), frozen, rows)
    gap = optax.global_norm(jax.tree.map(jnp.subtract, ours, theirs)) / metrics["grad_norm"]
    print(f"{name}: loss {loss:.5f} by Tunix, {metrics['loss']:.5f} by ours; steps {gap:.1e} of "
          "their length apart")
    assert (abs(loss - metrics["loss"]) < 1e-5 and gap < 1e-4) == (name == "equal")

# %%
compiled_rows = pd.read_csv("data/dryrun/v5p-8_31b.csv").set_index("recipe")
theirs, ours = compiled_rows.out_gib[["published", "ours, faster"]]  # "published": Tunix's trainer
print(f"fresh outputs of a step of the 31B, per chip (compiled, 08): {theirs:.1f} GiB by Tunix's "
      f"trainer, {ours:.1g} GiB by ours")

# %% [markdown]
# With equal counts the two agree, so our step is right where Tunix's is; with uneven ones they
# part. Tunix's fresh outputs are a second copy of weights that never changed. The model, its loader
# and its shardings stay Tunix's.
#
# ## 7. Our step and our loop
# First a part of the model that we replaced before the adapters went in. Tunix's **attention**
# computes all T x T scores of a row and then masks most of them away. `attend` takes a block of
# queries at a time and multiplies it only with keys that one of them may see. In a row of 4,096
# tokens, 50 of the 31B's 60 layers look back 1,023 tokens at most, so this saves a good half of the
# scores.

# %%
helpers.show_source(gemma.attend)

# %% [markdown]
# Three functions replace the trainer. The **loss** comes first. It is a *sum* over trained tokens,
# with their number; the mean is taken once, for the whole step. Only trained positions meet the
# output matrix, which has a column for each of the 31B's 262,144 tokens. Tunix's model has no
# switch for that, so for the length of one call its embedder gets a wrapper, `Headless`, whose
# `decode` returns what it is given. That is the second and last object that we replace.

# %%
helpers.show_source(train.hidden_states, train.token_losses, train.make_loss)
most = max(int(np.load(data / part / "loss_mask.npy").sum(-1).max()) for part in ("train", "val"))
capacity = min(-(-most // 128) * 128, meta["sequence_length"] - 1)
loss_fn = train.make_loss(capacity)
print(f"at most {most} trained tokens in a row; the output matrix meets {capacity} of its "
      f"{meta['sequence_length']} positions")

# %% [markdown]
# `capacity` is the largest number of trained tokens in any row of the data, rounded up to a
# multiple of 128: nothing is ever cut off. Inside the loss the adapters are rounded to bfloat16, like
# everything that multiplies; float32 is what Adam updates, so that small updates are not lost.
#
# The **step** is one function for a whole optimizer step. `jax.lax.scan`, a compiled loop, goes
# over the micro-batches, so their number costs no memory. The summed gradients are divided once.
# Frozen weights go in and do not come out. `jit_train_step` *donates* adapters and optimizer state,
# so that the new ones take the old ones' memory. [08](08_dryrun.ipynb) compiles this very function
# for a TPU.

# %%
helpers.show_source(train.make_micro_loss, train.make_train_step)

# %% [markdown]
# The **loop**: next batch, step, log, validate, save. A gradient that is not finite stops the run
# before anything of that step is written.

# %%
helpers.show_source(train.train)

# %% [markdown]
# ## 8. Train
# AdamW with warm-up, then a cosine down to zero, after clipping by the norm of the whole step. One
# row holds about four examples of this data at full size, so two rows are a batch of about eight.

# %%
helpers.show_source(train.steps_of, train.make_schedule)
steps = train.steps_of(cfg, len(train_rows), rows_per_step)
schedule = train.make_schedule(cfg, steps)
optimizer = train.make_optimizer(schedule, cfg.weight_decay, cfg.max_grad_norm)
print(f"{steps} steps, {cfg.epochs:g} epochs, about "
      f"{rows_per_step * meta['examples_per_row']:.1f} examples a step")
if steps < 20 and not cfg.max_steps:
    print(f"{steps} steps teach next to nothing: set epochs higher in section 1.")

# %% [markdown]
# A checkpoint holds what changes (adapters, Adam's moments, the position in the data) and the
# *recipe*: everything that decides what is being trained. Run this notebook again after a crash and
# it continues. If the newest checkpoint belongs to another recipe it is refused, and the difference
# is named. Starting over is never silent: it takes `fresh=True` or another `RUN_DIR`, and another
# `CHECKPOINTS` where that is set.

# %%
helpers.show_source(train.recipe_of)
recipe = train.recipe_of(cfg) | {
    "base_model": meta["base_model"], "base_sha256": weights.fingerprint(base), "steps": steps,
    "rows_per_step": rows_per_step, "data_sha256": meta["data_sha256"],
    "template_sha256": meta["template_sha256"]}
checkpoints = epath.Path(cfg.checkpoints or helpers.run_dir("train", "checkpoints").resolve())
if cfg.fresh:
    train.forget(checkpoints)
manager = train.open_checkpoints(checkpoints, cfg.checkpoint_every, steps, cfg.checkpoints_kept)
train.refuse_another_recipe(manager, recipe)
print(f"checkpoints in {cfg.checkpoints or 'train/checkpoints'}")

# %% [markdown]
# Compile the step ahead of its first call, which also tells what it needs in memory: a step that
# does not fit is refused here. This takes seconds now and minutes for the 31B. (On a v5p the
# compiler is asked for larger tiles: [08](08_dryrun.ipynb), section 5.)

# %%
state, frozen = train.start(model, optimizer, mesh)
state = train.restore(manager, state)  # of the newest checkpoint that is whole
found = f"resuming from step {state.step}" if state.step else "starting at step 0"
print(f"{found} of {steps}{', nothing left to train' * (state.step == steps)}")
began = time.perf_counter()
with (gemma.use_mesh(mesh), train.within_memory(),
      helpers.phase("compiling the optimizer step")):
    jitted = train.jit_train_step(model, optimizer, loss_fn, state,
                                  train.compiler_options(jax.devices()[0].device_kind))
    compiled = jitted.lower(state.adapters, state.opt_state, frozen,
                            train.to_mesh(batch, mesh)).compile()
compile_seconds = time.perf_counter() - began
held = train.memory_of(compiled, state, frozen)
compiled = quantized.callable_step(jitted, compiled, frozen)  # another way for 4-bit weights
held_out = train.to_mesh(train.validation_batch(
    train.PackedRows(data / "val"), cfg.validation_rows, micro_rows), mesh)
evaluate = jax.jit(train.make_eval_step(model, loss_fn))
print(f"{sum(held.values()):.4g} GiB per device")

# %% [markdown]
# Now train. Seconds include waiting for data, and tokens are those that are no padding. The first
# step changes nothing yet: the warm-up starts at a rate of 0. After a minute a picture of the loss
# appears below the lines, and is drawn again every minute. Stop it whenever you like: restart the
# kernel, run the notebook again, and it goes on from the newest checkpoint. (In the same kernel it
# could not: an interrupted step has used up its arrays, and a second model beside the first may not
# fit. A machine that is taken away says so with SIGTERM; a checkpoint on its way then gets twenty
# seconds to arrive.)

# %%
log_file = helpers.run_dir("train", "log.jsonl")
log = train.StepLog(log_file, steps, cfg.log_every, pictures.LiveLoss(steps, cfg.max_grad_norm))
with (gemma.use_mesh(mesh), train.within_memory(),
      remote.finishing(manager.wait_until_finished)):
    state = train.train(
        state, frozen, compiled, lambda adapters: float(evaluate(adapters, frozen, held_out)),
        dataset, mesh, log, manager, recipe, cfg.validate_every)
nnx.update(model, state.adapters)

# %% [markdown]
# The whole run, read from `log.jsonl` and not from this kernel. Loss is in *nats*, its unit with
# natural logarithms: guessing among n tokens costs ln n.

# %%
style.finish(pictures.draw_loss(log_file, steps, cfg.max_grad_norm), "03_loss",
             f"log.jsonl of this run, size {helpers.size()}, measured on {mesh.size} devices "
             f"({jax.devices()[0].device_kind})")

# %% [markdown]
# The held-out loss is the one that counts: it is on specifications the model has not seen. When it
# turns up while the training loss still falls, the model memorises.
#
# ### Watch it from elsewhere
# The same numbers go to `train/tensorboard` while you train. To see them in a browser:
# `.venv/bin/pip install tensorboard`, then `.venv/bin/tensorboard --logdir runs/tiny/train`. If you use Weights & Biases, three lines after the run send the log there:
#
# ```python
# import json, wandb
# with wandb.init(project="gemma4-verilog", config=recipe, mode="online") as there:
#     for line in open(log_file): there.log(json.loads(line))
# ```
#
# ## 9. Ask again
# The same request, the base on the left, the tuned model on the right.

# %%
with helpers.phase("four answers of the tuned model"):
    after = train.ask(model, tokenizer, chats, cfg.answer_tokens, mesh, thinking)
style.side_by_side({"base": before[0], "tuned": after[0]}, counter)

# %% [markdown]
# Is it right? It looks like a counter; [07](07_eval.ipynb) lets a simulator decide. Now the
# three held-out specifications, beside the dataset's own answers. (Most tiny modules have only one
# natural form.)

# %%
for sample, old, new in zip(samples, before[1:], after[1:]):
    style.side_by_side({"base": old, "tuned": new, "dataset": sample["answer"]},
                       sample["messages"][-1]["content"][:400])
same = sum(new.strip() == sample["answer"].strip() for new, sample in zip(after[1:], samples))
ended = sum(text.rstrip().endswith("```") for text in after)
print(f"{ended} of {len(after)} tuned answers end with their fence closed; of {len(samples)} with "
      f"a dataset answer, {same} equal it to the letter")

# %% [markdown]
# ## 10. Hand over to notebook 04
# What 04 must know travels in `recipe.json`, so that no later notebook repeats a setting of this
# one. The counter's answers go along, and what this machine took.

# %%
val = pd.read_json(log_file, lines=True).dropna(subset="val_loss").set_index("step").val_loss
helpers.write_json(helpers.run_dir("train", "recipe.json"), recipe | {
    "size": helpers.size(), "base_path": meta["base_path"], "adapter_dtype": "float32",
    "n_modules": len(modules), "trainable_parameters": trainable,
    "partial": cfg.partial, "mesh": {"fsdp": fsdp, "tp": tp},
    "checkpoints": cfg.checkpoints or "train/checkpoints",
    "final_step": state.step, "epochs": cfg.epochs, "system": meta["system"],
    "reasoning": meta["reasoning"],
    "val_loss_before": float(val[0]) if 0 in val else None, "val_loss_after": float(val.iloc[-1]),
    "examples_per_step": rows_per_step * meta["examples_per_row"]})
helpers.write_json(helpers.run_dir("train", "answers.json"), {
    "asked": chats[0], "limit": cfg.answer_tokens, "before": before[0], "after": after[0]})
helpers.write_json(helpers.run_dir("train", "machine.json"), {
    **train.machine_facts(mesh, held), "load_seconds": load_seconds,
    "compile_seconds": compile_seconds, "steps": steps, "micro_batches": micro_batches,
    "micro_rows": micro_rows, "sequence_length": meta["sequence_length"], "remat": cfg.remat})
print(", ".join(sorted(path.name for path in helpers.run_dir("train").iterdir())))

# %% [markdown]
# You can go on to [04](04_merge.ipynb) now. Sections 11 to 14 check packing, restarts, memory and
# time.
#
# ## 11. Packing changes nothing: the proof
# The loss and the adapters' gradients of a packed row must be those of its examples one by one. So
# we compute them a second time without any of the loss code above. Each example gets a row of its
# own, positions from 0, a plain causal mask, Tunix's own attention, all logits, and a cross-entropy
# as in a textbook. The witness is the tiny model in float32 on the CPU, at every size: in bfloat16,
# rounding would hide errors of one per cent. B is random here, because with B = 0 the gradient of A
# is zero.

# %%
def textbook_loss(model, tokens, loss_mask):
    """Summed cross-entropy over the trained tokens of one example."""
    causal = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    logits, _ = model(tokens, attention_mask=causal)
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -jnp.sum(scores[..., 0] * loss_mask[:, 1:])


def with_random_b(model):
    """(graph, adapters, base weights) of the tiny model with adapters that do change it."""
    model, draw = gemma.inject_lora(model, 4, 8.0, cpu), np.random.default_rng(cfg.seed)
    for pair in gemma.adapted_modules(model).values():
        pair["b"].set_value(jnp.asarray(draw.normal(0, 0.05, pair["b"].shape), jnp.float32))
    return nnx.split(model, nnx.LoRAParam, ...)

# %% [markdown]
# The row is the one with the most examples, at most 2,048 tokens of it, cut so that its second
# example is inside.

# %%
textbook, *_ = with_random_b(plain)
gemma.use_block_attention(plain, cfg.attention_block)
graph, small, witness_base = with_random_b(plain)
examples = train_rows.arrays["segment_ids"].max(-1)
row = train_rows[int(examples.argmax())]
begin = max(0, int(np.argmax(row.segment_ids == 2)) - 1_024)
row = jax.tree.map(lambda array: array[None, begin:begin + 2_048], row)
row = row.replace(tokens=row.tokens % exact.num_embed)  # a larger model has more tokens
packed_loss = train.make_loss(row.tokens.shape[1] - 1)
together = jax.jit(jax.value_and_grad(
    lambda adapters: packed_loss(nnx.merge(graph, adapters, witness_base), row)[0]))
by_itself = jax.jit(jax.value_and_grad(
    lambda adapters, *one: textbook_loss(nnx.merge(textbook, adapters, witness_base), *one)))
with gemma.use_mesh(cpu):
    packed, parts = together(small), [by_itself(small, *example) for example in alone(row)]

# %%
trained = row.loss_mask.sum()
packed = jax.tree.map(lambda array: np.asarray(array) / trained, packed)
single = jax.tree.map(lambda *arrays: np.sum(arrays, axis=0) / trained, *parts)
off = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (packed, single)))]
largest = max(np.abs(gradient).max() for gradient in jax.tree.leaves(single[1]))
print(f"{len(parts)} examples: loss packed {packed[0]:.7f}, one by one {single[0]:.7f}; "
      f"gradients up to {largest:.3f}, largest difference {max(off[1:]):.1e}")
assert len(parts) >= min(2, examples.max()), "one example alone proves nothing"
assert off[0] < 1e-5 and max(off[1:]) < 1e-5 * largest

# %% [markdown]
# ## 12. A restart changes no bit
# On a disk Orbax writes a checkpoint beside its place and renames it; in a bucket it marks a finished
# one with a file. `restore` names and skips a checkpoint that a cut-off copy left incomplete, and it
# places each array as in the fresh state, on any number of devices. The log has one
# rule: a line is written before the checkpoint that contains its step. A restart cuts the log back
# to the newest whole checkpoint and computes the later steps again. Do they come out the same? Go
# back to an earlier checkpoint and compute its next two steps.

# %%
again = sorted(set(manager.all_steps()) - {steps})[-1:]
lines = pd.read_json(log_file, lines=True, precise_float=True).set_index("step").loss.dropna()
for earlier in again:
    replay = train.restore(manager, state, at=earlier)
    spare, stream = (replay.adapters, replay.opt_state), iter(dataset)
    stream.set_state(replay.data)
    for number in range(earlier + 1, min(earlier + 3, steps + 1)):
        with gemma.use_mesh(mesh):
            *spare, metrics = compiled(*spare, frozen, train.to_mesh(next(stream), mesh))
        print(f"step {number}: loss {lines[number]} in the log, "
              f"{float(metrics['loss'])} from checkpoint {earlier}")
        assert float(metrics["loss"]) == lines[number]
if not again:
    print("only one checkpoint: nothing to go back to")

# %% [markdown]
# All digits agree. A test kills a run with `kill -9` at three points and compares everything it
# leaves.
#
# ## 13. Memory: on paper, held, compiled
# The first three lines can be computed before anything is loaded. The last two are the compiler's:
# *temporaries* are the activations of one micro-batch and the gradients, *fresh outputs* take no
# donated array's place. The second column is the 31B on a v5p-8, whose 60 layers are ten times the
# six of section 4.

# %%
embedder = gemma.gib(nnx.state(shapes_31b.embedder))
adapters_31b = 10 * gemma.gib(nnx.state(shapes_31b, nnx.LoRAParam))
all_31b = gemma.gib(nnx.state(shapes_31b)) - embedder
ours_31b = compiled_rows.loc["ours, faster"]
on_paper = {"base weights": embedder + 10 * all_31b - adapters_31b, "adapters": adapters_31b,
            "Adam's moments": 2 * adapters_31b, "temporaries of the step": ours_31b.temp_gib,
            "fresh outputs": ours_31b.out_gib}
fit = pd.DataFrame({"this run": held, "31B on a v5p-8": on_paper}).rename_axis("GiB per device")
print(f"31B: arguments {fit.iloc[:3, 1].sum():.2f} GiB on paper, {ours_31b.args_gib:.2f} compiled; "
      f"{ours_31b.hbm_gib:.1f} of {ours_31b.limit_gib:.1f} GiB in all")
fit.style.format("{:.4g}")

# %% [markdown]
# If a step does not fit, `remat` (rematerialisation) trades time for memory. The backward pass then
# computes again what it would have kept: the inside of attention and MLP (`BLOCK`) or whole layers
# (`DECODER`). The settings take the least that 08 has compiled for the slice:

# %%
for name, size in (("v5p-8", "31b"), ("v6e-8", "31b"), ("v6e-1", "e2b"), ("v5e-1", "e2b")):
    print(stored.what_fits(name, size))

# %% [markdown]
# ## 14. Where the time goes
# JAX's profiler writes down what every device does. We give it three more steps, on copies of
# adapters and optimizer state, because the compiled step uses up what it is given.

# %%
trace = helpers.run_dir("train", "trace")
spare = jax.tree.map(jnp.copy, (state.adapters, state.opt_state))
with train.tracing(trace), gemma.use_mesh(mesh):
    for number in range(3):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            *spare, metrics = compiled(*spare, frozen, train.to_mesh(batch, mesh))
            jax.block_until_ready(metrics)
files = [path for path in trace.rglob("*") if path.is_file()]
print(f"train/trace: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
del spare
manager.close()

# %% [markdown]
# Drag the `.trace.json.gz` into [Perfetto](https://ui.perfetto.dev), which runs in the browser. On a
# TPU use XProf, which also has time by operation, roofline and memory (`pip install xprof`, `xprof
# --logdir` with this folder). Each chip is a line of operations: look for gaps, and for all-gathers
# and all-reduces that nothing overlaps. Our parts carry names (`hidden_states`, in it `attention`, then
# `output_matrix`, `loss`, `optimizer`); Tunix's MLP, projections and norms are found by their line of
# source. Then compare the time by operation with the table of
# [08](08_dryrun.ipynb) §5: nobody has published that yet. On a CPU this is a demonstration: the
# simulated devices share the same cores.
#
# ## 15. On a real slice
# **E2B on one Colab chip.** Choose a v5e-1 or v6e-1 runtime, open this page, Run All. Section 1 stops
# where the data is missing and offers a cell that makes it. [My own
# data](https://github.com/OWNER/gemma4-on-tpu/blob/main/OWN_DATA.md) has the times and what to keep
# on a Drive. On a TPU VM, `./first_hour.sh` runs thirty steps, measures all of it and ends by itself.
#
# **Beyond four chips.** All growth is in `fsdp`: a v5p-32 (four hosts, 16 chips) gets the mesh
# (4, 4), which 08 has compiled; a v5p-64 would get (8, 4). A step has `rows_per_device` rows for
# each part of `fsdp`, so an epoch has fewer, larger steps, and the learning rate is yours to find
# again. Every host runs this notebook as a script, all at once ([01](01_setup.ipynb) §4 has the
# commands, and what of them is tested). Each reads the whole batch and keeps its devices' rows, and
# all write one checkpoint together, so `CHECKPOINTS` has to be a bucket. The first host's log is
# copied to the others when training ends.

# %% [markdown]
# ## Recap
# - JAX compiles functions of trees, once per shape, for a whole mesh; head counts limit the mesh.
# - All modules have float32 adapters, which change nothing before the first step.
# - Tunix's trainer works in twenty lines; ours weighs every token equally and returns only what
#   changed.
# - A run can be killed at any moment, and continues to the same bits.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `tp=8 does not divide the 4 KV heads` | the model, not the software | more `fsdp`: (2, 4), (4, 4) |
# | `this does not fit`, or `RESOURCE_EXHAUSTED` | activations | `rows_per_device=1`, `remat="DECODER"`, or shorter rows in 02 |
# | `the weights of ... need 62.5 GB` | the boot disk is too small for the 31B | `TMPDIR=/dev/shm`, the memory disk of a TPU VM |
# | every restart compiles for minutes | the compilation cache went away with the machine | `JAX_COMPILATION_CACHE_DIR=gs://...` |
# | `another recipe` | a setting, the data or the base changed | `fresh=True`, or a new `RUN_DIR` and, where it is set, `CHECKPOINTS` |
# | `rendezvous ... may be stuck` on a CPU | simulated devices wait for each other | the opening sets `NPROC=16` and turns asynchronous dispatch off |
# | loss is `nan` | learning rate | lower it and start over: another rate is another recipe |
# | validation rises, training falls | memorising | fewer `epochs`, which is another recipe, too |
#
# ### Exercises
# 1. Leave `k_einsum` out of `targets`. What does section 4 say?
#
# <details><summary>Solution</summary>
#
# ```python
# try:
#     gemma.inject_lora(before_lora, cfg.rank, cfg.alpha, mesh,
#                       cfg.targets.replace("|k_einsum", ""))
# except helpers.UserError as error:
#     print(error)
# ```
#
# One module of the tiny model (10 of the 31B) got no adapter, and it names
# `layers.5.attn.k_einsum`. With `partial=True` beside the pattern it would be accepted.
#
# </details>
#
# 2. Kill the kernel in the middle of section 8 (`kill -9`), copy `log.jsonl` to `copy.jsonl`, and
#    run the notebook again. Which steps are computed twice, and how do their lines differ?
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
