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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/14_jax.ipynb)
#
# # 14 · JAX in a quarter of an hour
#
# **You know PyTorch, and [03](03_train.ipynb) trains in JAX. What do you have to know before you read it?** Six
# ideas. You'll try each of them in a cell or two, on random matrices and four simulated devices. At the end you'll
# know why 03's training step looks the way it does, and why we wrote it ourselves.
#
# | | |
# |---|---|
# | **Needs** | any CPU, which then shows four simulated devices |
# | **Reads** | nothing but the 31B's `config.json`, which is in this repository |
# | **Writes** | nothing |
# | **Time and cost** | 15 to 25 seconds |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb) · **14 JAX**

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
helpers.machine(devices=4, always="tiny")

# %% [markdown]
# <details><summary>A small dictionary from PyTorch to JAX, to look things up later</summary>
#
# | PyTorch | here |
# |---|---|
# | `x[0] = 1` | arrays never change: `x.at[0].set(1)` is a new array |
# | `torch.manual_seed` | randomness needs a key: `jax.random.normal(jax.random.key(0), (2, 3))` |
# | `torch.cuda.synchronize()` | calls return before they finish: `jax.block_until_ready(x)` waits |
# | `loss.backward()`, `p.grad` | `jax.value_and_grad(f)` (section 2) |
# | FSDP, tensor parallelism, `accelerate launch` | one mesh, and a partition spec for every array (section 4) |
# | `nn.Module` with its parameters | a Flax NNX module: `nnx.split`, `nnx.merge` (section 5) |
# | `torch.optim.AdamW` and a scheduler | Optax: pure functions, gradient in, update out |
# | `DataLoader` with workers | Grain: a pipeline whose position is one integer, which a checkpoint can hold |
# | PEFT's `LoraConfig` | Qwix's `LoraProvider`: a pattern over module paths |
#
# </details>
#
# ## 1. Functions are compiled, for one shape
# **When does Python run your function?** Not at every call. `jax.jit` *traces* a function: it runs it once, with
# placeholders that have a shape but no values, and records every operation. Then the compiler, XLA, turns that
# record into one program. **The loop below calls `lengths` three times. How often does it print "traced"?**

# %%
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from tables import architecture

key_x, key_w, key_a, key_noise = jax.random.split(jax.random.key(0), 4)
x = jax.random.normal(key_x, (32, 16))  # [T tokens, D numbers each]


@jax.jit
def lengths(x):
    print("  traced for", x.shape)  # Python: runs while JAX traces, and only then
    return jnp.linalg.norm(x, axis=-1)


for tokens in (16, 16, 32):
    print(f"{tokens} tokens, the first one's vector has length {lengths(x[:tokens])[0]:.2f}")

# %% [markdown]
# Twice, because the second call found a program for its shape. For the 31B (Gemma 4 with 31 billion weights) compiling
# takes minutes, so all our rows have the same length, and 02 packs them full. And because tracing needs only shapes, 03
# can start compiling its step before it has loaded a single weight.
#
# **A compiled function belongs to one shape, so keep your shapes the same.**
#
# ## 2. Gradients come from functions
# **Where's `.backward()`?** There isn't one, and no array has a `.grad`. Instead, `jax.value_and_grad(f)` makes a new
# function. It returns the value of `f`, and its gradient with respect to the first argument. That argument can be a
# *tree*: nested dictionaries and lists of arrays. Below, `pair` is a small LoRA adapter: two thin matrices whose
# product is added to a large one, `W`. Nobody asks for the gradient of `W`, so `W` stays frozen.

# %%
W = jax.random.normal(key_w, (16, 24))
pair = {"a": jax.random.normal(key_a, (16, 4)) / 4, "b": jnp.zeros((4, 24))}


def loss_of(pair, x):
    return jnp.mean((x @ W + x @ pair["a"] @ pair["b"] - 1.0) ** 2)


value, gradients = jax.value_and_grad(loss_of)(pair, x)
norms = jax.tree.map(lambda gradient: float(jnp.linalg.norm(gradient)), gradients)
stepped = jax.tree.map(lambda weight, gradient: weight - gradient, pair, gradients)
print("gradient norms:", {name: round(norm, 3) for name, norm in norms.items()})
print(f"loss {value:.3f}, after one small step {loss_of(stepped, x):.3f}")

# %% [markdown]
# <details><summary><b>Why is <code>a</code>'s gradient zero?</b></summary>
#
# `a` is multiplied by a `b` of zeros, so for now nothing depends on it. LoRA starts like this on purpose, because then
# the model with fresh adapters is still the base. After one step `b` isn't zero anymore, so `a` learns, too.
#
# </details>
#
# `jax.tree.map` calls a function on every array of a tree, or on matching arrays of two trees.
#
# **You differentiate a function, and whatever isn't its first argument is frozen.**
#
# ## 3. A loop in the program, and a mean that isn't one
# **How do you add up the gradients of several micro-batches** (the pieces that a large batch is cut into)? A Python
# loop would be unrolled, so its body would be in the program once for each micro-batch. `jax.lax.scan` is a loop
# *inside* the program. It takes its last argument apart along the first axis, so each round gets one micro-batch. And it
# carries a value from each round to the next, here the sums so far. (The loop's body also returns a second value. We
# need none, so it's `None`.)
#
# The mask below says which tokens count: 30 of the first micro-batch's 32, and only 2 of the second's. **Does it matter
# whether you average once over all the tokens that count, or average each micro-batch and then the two means?**

# %%
mask = jnp.zeros((2, 32)).at[0, :30].set(1).at[1, :2].set(1)
noise = jnp.array([0.1, 3.0])[:, None, None]  # the second micro-batch is the harder one
batch = x + noise * jax.random.normal(key_noise, (2, 32, 16))


def summed_loss(pair, x, mask):
    losses = jnp.mean((x @ W + x @ pair["a"] @ pair["b"] - 1.0) ** 2, axis=-1)  # of each token
    return jnp.sum(losses * mask)


# %% [markdown]
# The loop below carries three sums: of losses, of tokens and of gradients. Only to compare, it also adds up the means.


# %%
@jax.jit
def both_ways(pair, batch, mask):
    def add_micro_batch(total, rows):
        loss, gradient = jax.value_and_grad(summed_loss)(pair, *rows)
        tokens = jnp.sum(rows[1])
        part = loss, tokens, gradient, loss / tokens
        return jax.tree.map(jnp.add, total, part), None

    nothing = 0.0, 0.0, jax.tree.map(jnp.zeros_like, pair), 0.0
    total, _ = jax.lax.scan(add_micro_batch, nothing, (batch, mask))
    loss, tokens, gradient, means = total
    # 03's step goes on with gradient / tokens. To compare the two ways, the losses are enough.
    return loss / tokens, means / len(batch)


over_all, of_means = both_ways(pair, batch, mask)
print(f"mean over the {mask.sum():.0f} tokens that count: {over_all:.2f}; "
      f"mean of both means: {of_means:.2f}")

# %% [markdown]
# It does. In the mean of means, the second micro-batch's two tokens weigh as much as the first micro-batch's thirty.
# That's why 03's micro-batches return *sums*, and why its step divides only once.
#
# **Sum over the micro-batches, and divide once.**
#
# ## 4. One array, several devices
# **How can one array lie on four chips?** A *mesh* arranges the devices as a grid and names its axes. Ours are
# called `fsdp` (fully sharded data parallelism) and `tp` (tensor parallelism). A *partition spec* says which axis cuts
# which dimension: `P("fsdp", "tp")` cuts the rows of a matrix along `fsdp` and its columns along `tp`. Mesh and spec
# together are a *sharding*. In your program it's still one array.

# %%
mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), devices=jax.devices()[:4])
kernel = jax.device_put(W, NamedSharding(mesh, P("fsdp", "tp")))
print(f"{kernel.shape}; a device holds {kernel.sharding.shard_shape(kernel.shape)}")
jax.debug.visualize_array_sharding(kernel, use_color=False, scale=0.5)

# %% [markdown]
# **And if you multiply two such arrays, how is the result cut?** The rows of `x` are cut along `fsdp`:

# %%
rows = jax.device_put(x, NamedSharding(mesh, P("fsdp")))
product = jax.jit(jnp.dot)(rows, kernel)
print(f"rows @ kernel: {product.shape}, {product.sharding.spec}, and nobody asked for that")

# %% [markdown]
# The compiler looks at how the inputs are cut, and works out how to cut the results. Where a device needs data that
# another one holds, the compiler inserts the communication. You choose the cuts, and you never write a send. Here's what
# travels with each of the two axes:
#
# ![A 4 by 4 matrix on four chips: with fsdp each stores a row, and an all-gather brings the whole matrix to every chip; with tp each keeps a column, and the next matrix needs a reduce-scatter and an all-gather of activations](../assets/figures/shards.svg)
#
# **You choose how arrays are cut; the compiler writes the communication.**
#
# ### Which mesh? Heads limit it
# **How would you cut the 31B for sixteen chips?** With `tp` each chip gets whole attention heads, so `tp` has to
# divide every head count. A layer of the 31B has 32 query heads. Fifty layers have 16 *KV heads*, the heads of keys
# and values, each of which serves several query heads (that's grouped-query attention, GQA). These layers are
# *sliding*: their tokens look back at the last 1,024. But the other ten, the *full* layers whose tokens look back at
# everything, have just **4** KV heads. **What happens with `tp=8`?**

# %%
big = architecture.read_config("data/configs/gemma4_31b.json")
for fsdp, tp in ((16, 1), (8, 2), (4, 4), (2, 8), (1, 16)):
    problem = architecture.mesh_problem(big, fsdp, tp)
    print(f"fsdp {fsdp:2}, tp {tp:2}: {problem or 'divides everything'}")
for chips in (4, 8, 16):
    print(f"on {chips} chips, as much tp as possible: {architecture.choose_mesh(big, chips)}")

# %% [markdown]
# You get this refusal before 62 GB are read. (A server can store heads twice, and that's how 05 serves with `tp=8`.) So
# beyond four chips only `fsdp` grows. If that gives a step more rows, tune the learning rate again.
#
# <details><summary><b>Can you do without <code>tp</code>?</b></summary>
#
# Yes, with a mesh such as (4, 1). Then a chip keeps whole rows of the batch and gathers the *weights*, which can travel
# while the chip multiplies. With `tp` the sum over chips has to wait until the product is done. Which one is faster
# depends on the slice (the group of chips that you rent). With rows of 2,048 tokens we predict that a v5p-8 is faster
# with (4, 1), but that a v6e-8 is slower with (8, 1) ([08](08_dryrun.ipynb), section 6).
#
# </details>
#
# **Heads limit `tp`, and `fsdp` grows.**
#
# ## 5. A model is a structure and a tree
# **How does a module get into a compiled function?** Such a function takes arrays and returns arrays, but a module is
# an object with methods. So `nnx.split` takes a module apart, into a *graph*, which says how it's built, and into trees
# of arrays. You can say which arrays go into which tree. Inside the compiled function, `nnx.merge` puts the module back
# together. Here's a layer with LoRA, split as 03 splits a whole Gemma 4: adapters in one tree, everything else in
# another.

# %%
layer = nnx.LoRALinear(16, 24, lora_rank=4, rngs=nnx.Rngs(0))
graph, adapters, frozen = nnx.split(layer, nnx.LoRAParam, ...)
for name, tree in (("adapters", adapters), ("frozen", frozen)):
    shapes = {".".join(path): leaf.get_value().shape for path, leaf in nnx.to_flat_state(tree)}
    print(f"{name}: {shapes}")
apart = jax.jit(lambda adapters, frozen, x: nnx.merge(graph, adapters, frozen)(x))
difference = jnp.abs(apart(adapters, frozen, x) - layer(x)).max()
print(f"called as a function of its trees, and as it is: at most {difference:.1g} apart")

# %% [markdown]
# **A model is a graph and trees of arrays, and you decide which tree is trained.**
#
# ## 6. What does a step return?
# **A step reads the frozen weights. What happens if it returns them, too?** Outputs are new arrays, so the device
# holds the weights twice. That doesn't happen to the adapters, because `donate_argnums` lets the new ones take over the
# old ones' memory. Here's a step, and one that returns the frozen weights, too:

# %%
rule = optax.adamw(1e-3)


def train_step(adapters, opt_state, frozen, x):
    def loss_fn(adapters):
        return jnp.mean((nnx.merge(graph, adapters, frozen)(x) - 1.0) ** 2)

    loss, gradient = jax.value_and_grad(loss_fn)(adapters)
    updates, opt_state = rule.update(gradient, opt_state, adapters)
    return optax.apply_updates(adapters, updates), opt_state, loss


def whole_step(adapters, opt_state, frozen, x):
    return *train_step(adapters, opt_state, frozen, x), frozen


# %% [markdown]
# The compiler knows the difference before anything runs:

# %%
opt_state = rule.init(adapters)
for name, step in (("returns what changed", train_step), ("returns the whole model", whole_step)):
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(adapters, opt_state, frozen, x).compile()
    memory = compiled.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    print(f"{name}: {fresh:,} bytes of fresh outputs")

# %% [markdown]
# The difference is the matrix and its bias, at four bytes a number (and a few bytes of bookkeeping). For the 31B the
# difference is roughly the whole base, 14.3 GiB on each of four chips ([03](03_train.ipynb)). The published recipe's step
# does return it: its fresh outputs take 14.6 GiB (compiled, [08](08_dryrun.ipynb)).
#
# ### Why not Tunix's trainer?
# Tunix, the library that brings Gemma 4, also has a trainer, `PeftTrainer`, with a loop, a loss, accumulation and
# checkpoints. It's the shortest way to a tuned model. We still wrote a loop of our own, for two reasons that you've
# seen. Tunix 0.1.7 takes the mean of each micro-batch and then the mean of those means, as in section 3.
# (Since July 2026 its main branch has [weighted
# them](https://github.com/google/tunix/commit/59deac395565e05f48d008f6f3b1894e6c5b1fb7).) And its compiled step returns
# the whole model. (A test takes the same step with both trainers. They agree only if all micro-batches have equally many
# trained tokens.)
#
# **In our loop every trained token counts the same, and a step returns only what changed.**
#
# ## Recap
# - `jax.jit` traces a function once for each shape, `jax.value_and_grad` differentiates it, and `jax.lax.scan` is a loop
#   inside the compiled program.
# - A mesh and partition specs say who holds what. The compiler adds the communication.
# - `nnx.split` takes a model apart into a tree to train and a tree that stays frozen. A step doesn't return the frozen
#   one.
#
# ### Exercises
# 1. What does this print, and why?
#
# ```python
# factor = 2.0
# scaled = jax.jit(lambda x: factor * x)
# print(scaled(1.0))
# factor = 3.0
# print(scaled(1.0), scaled(jnp.ones(2)))
# ```
#
# <details><summary>Solution</summary>
#
# `2.0`, then `2.0 [3. 3.]`. While JAX traces, it reads `factor` and writes its value into the program. So the program
# for one number keeps the 2. A new shape is traced again, and finds the 3. That's why everything that changes has to be
# an argument, as the adapters are in 03.
#
# </details>
#
# 2. On the mesh of section 4, how much of `kernel` does a device hold with `P("tp")`, and how much with
#    `P(("fsdp", "tp"))`? Write down both shapes before you ask.
#
# <details><summary>Solution</summary>
#
# ```python
# for spec in (P("tp"), P(("fsdp", "tp"))):
#     print(spec, NamedSharding(mesh, spec).shard_shape(kernel.shape))
# ```
#
# `(8, 24)` and `(4, 24)`. With `P("tp")` the rows are cut in two, and each half is stored twice, once for each
# part of `fsdp`. With both axes on the rows there are four quarters, and nothing is stored twice.
#
# </details>
#
# Next: [03 · Fine-tuning Gemma 4 with LoRA on several chips](03_train.ipynb)
