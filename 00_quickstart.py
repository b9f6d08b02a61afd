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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/00_quickstart.ipynb)
#
# # 00 · Three minutes: ask, fine-tune, ask again
#
# **Here's a model that has read a lot of Verilog and can't be asked for any. Can it learn to answer?**
# You'll watch it learn, on two CPU cores. The model is a tiny Gemma 4, but the loss, the optimizer and
# the training step are exactly what the 31B uses. *Verilog* is a language that describes digital
# circuits, and *Icarus Verilog* is a program that simulates them, so nobody has to guess whether an
# answer is right.
#
# | | |
# |---|---|
# | **Needs** | a free Colab CPU; or Linux with Icarus Verilog (`sudo apt-get install iverilog`), Python 3.11 and `./setup.sh train`. No TPU, no GPU |
# | **Reads** | `assets/tiny_gemma4` (3.65 million parameters), `data/tiny`, `data/tiny_eval` |
# | **Writes** | nothing that another notebook needs |
# | **Time and cost** | 3 to 5 minutes to install, once; then about three minutes; free |
#
# Choose *Run All* and read along. On Colab the first run stops after installing and asks you to restart
# the session once.
#
# This is the road of the whole series, with what travels on it. You'll walk it once, quickly, as far as the
# *adapters*, which are the small matrices that get trained, and then judge the answers.
#
# ![A chat becomes token ids with a mask, several of them a packed row; LoRA trains A and B on a mesh, a merge adds them to the weights, a server answers, and a judge simulates the answers](../assets/figures/road.svg)

# %% [markdown]
# ## Before we start
# **00 quickstart** · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
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
helpers.machine(devices=1, always="tiny")

# %% [markdown]
# ## 1. What does the base model say?
# The tiny Gemma 4 has the same kinds of layers as the 31B's language model, and its files have the same
# form. It has read Verilog files the way they're found in the wild, bugs included
# ([09](09_tiny_base.ipynb) shows how it was made). Nobody has taught it to answer. A *mesh* says which
# devices hold a model; here it's one CPU.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from helpers import answers, chat, data, gemma, packing, style, train
import verilog

BASE = "assets/tiny_gemma4"
SYSTEM = "Write the Verilog module that is asked for, as one code block."
train.keep_compilations()
verilog.sandbox.icarus_version()  # is it there? Section 4 simulates
tokenizer = chat.load_tokenizer(BASE)
config = gemma.config_from_hf(BASE, dtype="float32")
mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
base = gemma.load_base(BASE, config, mesh)
print(f"{sum(array.size for array in jax.tree.leaves(nnx.state(base))):,} parameters")

# %% [markdown]
# `answer` puts each request into the model's *chat template*, the form in which it expects a
# conversation, and decodes *greedily*, which means that it always takes the likeliest next token. We ask
# for the 38 modules of a small benchmark. The training rows ask for the same kinds of modules, but never
# with these widths and names. One of the 38 is an up-down counter, and it'll follow you through the whole
# series.

# %%
def answer(model, requests):
    """The model's answers to a list of requests, decoded together."""
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]
             for request in requests]
    return answers.ask(model, tokenizer, chats, 160, mesh)  # at most 160 tokens each


problems = verilog.load_problems("data/tiny_eval")
requests = [problem.prompt for problem in problems]
counter = next(request for request in requests if "counter state goes up" in request)
with helpers.phase(f"{len(requests)} answers of the base"):
    before = answer(base, requests)
style.side_by_side({"base": before[requests.index(counter)]}, counter)

# %% [markdown]
# **A single full stop. That isn't an answer, so what is it?**
#
# <details><summary>Answer</summary>
#
# A continuation. The base has only ever learned which token comes next, so it goes on with the request
# as if it were a file, and here the likeliest next token is a full stop.
#
# </details>
#
# **A base model doesn't answer. It continues.**
#
# ## 2. What does it learn from?
# From examples: each row of `data/tiny` is a request and a good answer. The model reads both as one row
# of tokens, but it's trained only on the answer (blue in the picture). That choice is called the *loss
# mask*. Padding costs work and teaches nothing, so several examples share a row of 512 tokens. In the
# picture `·` is a space and `↵` is a line break.
#
# **Why don't we train on the request, too?**
#
# <details><summary>Answer</summary>
#
# Because the model would also learn to write requests. It has few numbers to learn with, and we want
# them to learn one thing: what to answer. [02](02_data.ipynb) shows what a mask in the wrong place does.
#
# </details>

# %%
cleaned = [data.clean(row) for row in data.read_rows("data/tiny")[:1_500]]
chats = [data.as_messages(example, SYSTEM) for example, reason in cleaned if not reason]
rendered = [pair for pair in chat.render_chats(tokenizer, chats) if len(pair[0]) <= 512]
ids, masks = zip(*rendered)
rows = packing.pack_arrays(ids, masks, 512, seed=0)
print(f"{len(ids):,} examples, packed into {len(rows['tokens'])} rows of 512 tokens")
shortest = min(rendered, key=lambda pair: len(pair[0]))
style.show_tokens([tokenizer.decode([number]) for number in shortest[0]], shortest[1], "00_tokens",
                  f"{len(shortest[0])} tokens are read, {sum(shortest[1])} of them are trained")

# %% [markdown]
# **Everything is read; only the answer is trained.**
#
# ## 3. How does it learn? LoRA, in about two minutes
# We leave the model's weights alone. Beside each matrix of attention and MLP we put two thin ones, A and
# B, and add their product A·B to the frozen matrix. Only A and B are trained: that's LoRA. `rank` says how
# thin they are, and the product counts `alpha / rank` times. JAX compiles a whole optimizer step into one
# program.

# %%
STEPS, ROWS = 36, 4  # optimizer steps, packed rows in each
tuned = gemma.inject_lora(base, rank=16, alpha=32.0, mesh=mesh)  # a new model; base stays
rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, warmup_steps=10, decay_steps=STEPS)
optimizer = train.make_optimizer(rate, weight_decay=0.001, max_grad_norm=1.0)
state, frozen = train.start(tuned, optimizer, mesh)
loss = train.make_loss(capacity=int(rows["loss_mask"].sum(-1).max()))  # answer tokens at most
step = train.jit_train_step(tuned, optimizer, loss, state)
trainable = sum(array.size for array in jax.tree.leaves(state.adapters))
print(f"{trainable:,} numbers to train, in {len(gemma.adapted_modules(tuned))} pairs of A and B")

# %% [markdown]
# We'd like to see it happen, so we stop four times on the way and ask for the counter.

# %%
SNAPSHOTS = (5, 10, 20, STEPS)
counters = {0: before[requests.index(counter)]}  # steps done: the model's answer


def snapshot(steps_done, adapters):
    """Ask the model, as it is after so many steps, for the counter."""
    nnx.update(tuned, jax.tree.map(jnp.copy, adapters))  # a step uses up the arrays that it gets
    counters[steps_done], = answer(tuned, [counter])


# %% [markdown]
# Now the loop. Each step picks four rows, computes the gradient and changes A and B a little. What falls
# is the *loss*, the usual cross-entropy per trained token. (A large step can be cut into
# *micro-batches*; this one is a single piece.) We read each row at most once.
#
# **What would the loss be if the model guessed blindly among its 1,280 tokens?**
#
# <details><summary>Answer</summary>
#
# ln 1280 = 7.2. The figure starts far lower, because the base already knows what Verilog looks like.
#
# </details>

# %%
adapters, optimizer_state, losses = state.adapters, state.opt_state, []
order = np.random.default_rng(0).permutation(len(rows["tokens"]))
progress = helpers.Progress(STEPS, "step", every=20)
with mesh:
    for number in range(1, STEPS + 1):
        picked = order[(number - 1) * ROWS:number * ROWS]
        # [1 micro-batch, 4 rows, 512 tokens]
        batch = train.Batch(**{name: array[None, picked] for name, array in rows.items()})
        adapters, optimizer_state, metrics = step(
            adapters, optimizer_state, frozen, train.to_mesh(batch, mesh))
        losses.append(float(metrics["loss"]))
        progress.update(note=f"loss {losses[-1]:.3f}")
        if number in SNAPSHOTS:
            snapshot(number, adapters)

fig, ax = style.figure(7, 2.4)
ax.plot(range(1, STEPS + 1), losses)
ax.set(xlabel="optimizer step", ylabel="loss", yscale="log",
       title=f"The loss falls from {losses[0]:.1f} to {np.mean(losses[-5:]):.2f}")
style.finish(fig, "00_loss", "this run")

# %% [markdown]
# A falling loss is hard to feel. Here's the same run, seen through the counter:

# %%
exam = problems[requests.index(counter)]
verdicts = verilog.judge_many([(exam, verilog.extract_code(text)[0]) for text in counters.values()])
style.side_by_side({f"{number} steps: {'passes' if verdict.passed else 'fails'}": text
                    for (number, text), verdict in zip(counters.items(), verdicts)})

# %% [markdown]
# First it learns what an answer looks like: a code fence (the three backticks), a module, a list of ports.
# The details that a simulator cares about come last. In our run only the clock has the wrong name after ten
# steps, and that's enough to fail.
#
# ## 4. Is it right? Count
# We ask for all 38 modules again. Each answer is compiled and simulated beside a correct module by the
# judge of notebook 07, and it passes if no output ever differs. **Guess first: how many of 38 does the
# base pass, and how many the tuned model?**

# %%
with helpers.phase(f"{len(requests)} answers of the tuned model"):
    after = answer(tuned, requests)
passed = {}
for name, texts in (("base", before), ("tuned", after)):
    modules = [verilog.extract_code(text)[0] for text in texts]
    verdicts = verilog.judge_many(list(zip(problems, modules)))
    passed[name] = sum(verdict.passed for verdict in verdicts)
print(f"{passed['base']} of {len(problems)} before, {passed['tuned']} of {len(problems)} after")
place = requests.index(counter)
style.side_by_side({"base": before[place], "tuned": after[place]}, counter)

# %% [markdown]
# **Two minutes on a CPU took it from passing none of the problems to passing most of them.**
#
# ## 5. What happens with your own request?
# Change the text and run the cell again. This model is tiny, and it only knows small modules that you
# describe in plain words: gates, multiplexers, adders, counters, shift registers. Keep the form: an opening
# sentence, the ports, and one sentence of behaviour. Try another width or other names, or swap up and down.

# %%
def ask(request):
    """Base and tuned answer, side by side."""
    style.side_by_side({name: answer(model, [request])[0]
                        for name, model in (("base", base), ("tuned", tuned))}, request)


ask(counter.replace("16 bits", "8 bits").replace("clear", "reset"))

# %% [markdown]
# ## What you have seen
# You started with a base model and took a few dozen optimizer steps on two thin matrices beside each frozen
# one. Now it writes modules that pass their tests.
#
# | here | in full |
# |---|---|
# | your own chats | [own data](own_data.ipynb): bring a file, on Colab or Kaggle |
# | rows, masks, packing | [02](02_data.ipynb) |
# | LoRA, the step, the loop | [03](03_train.ipynb), after [14](14_jax.ipynb), JAX in ten minutes |
# | the trained A and B | [04](04_merge.ipynb) merges them into a model that any engine loads |
# | `ask` | [05](05_serve_vllm.ipynb) serves it with vLLM, [06](06_bench.ipynb) measures the server |
# | 38 problems, one answer each | [07](07_eval.ipynb) does it with statistics, after a longer training |
#
# Could the base write Verilog before? Yes, if you ask as a Verilog file would, in a comment above the
# module. But then it also makes the mistakes of the files that it has read. [07](07_eval.ipynb) measures
# what the tuning added to that.
#
# For the 31B, which is 8,400 times as large, the programs are the same. They've been compiled for a TPU but
# haven't run on one yet ([08](08_dryrun.ipynb)). If you'd like to use a TPU, go on with
# [01 · From nothing to a TPU machine that can run this](01_setup.ipynb). If you stay on a CPU, go on with
# [02 · From a Verilog dataset to packed, masked rows](02_data.ipynb).
