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
# **This model has read Verilog but cannot be asked for it. Can it learn to answer?** You watch it
# learn, on two CPU cores. The model is a tiny Gemma 4; the loss, the step and the optimizer are the
# ones written for the 31B. *Verilog* is a language that describes digital circuits, and *Icarus
# Verilog* simulates them.
#
# | | |
# |---|---|
# | **Needs** | a free Colab CPU; or Linux with Icarus Verilog (`sudo apt-get install iverilog`), Python 3.11 and `./setup.sh train`. No TPU, no GPU |
# | **Reads** | `assets/tiny_gemma4` (3.65 million parameters), `data/tiny`, `data/tiny_eval` |
# | **Writes** | nothing that another notebook needs |
# | **Time and cost** | 3 to 5 minutes to install, once; then under three minutes; free |
#
# Choose *Run All* and read along. On Colab the first run stops after installing and asks for one
# restart of the session.

# %% [markdown]
# ## Before we start
# **00 quickstart** · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
from pathlib import Path
near = [Path(place).absolute() for place in (
    sys.path[0], ".", "gemma4-on-tpu", os.environ.get("JPY_SESSION_NAME", "."), sys.prefix)]
found = [path for start in near for path in (start, *start.parents) if (path / "tpu_time").is_dir()]
if not found and "COLAB_RELEASE_TAG" in os.environ:  # a notebook that was opened alone
    subprocess.check_call("git clone -q --depth=1 https://github.com/OWNER/gemma4-on-tpu".split())
    found = [Path("gemma4-on-tpu").absolute()]
if not found:
    sys.exit("Error: no repository is here or above. Start this kernel inside it, or make one:\n"
             "git clone https://github.com/OWNER/gemma4-on-tpu && gemma4-on-tpu/setup.sh train")
sys.path.insert(0, str(found[0]))
import helpers
helpers.machine(devices=1, always="tiny")

# %% [markdown]
# ## 1. Ask the base model
# The tiny Gemma 4 has the same kinds of layers as the 31B's language model, and its files have the
# same form. It has read some Verilog, but nobody has taught it to answer. A *mesh* says which devices
# hold a model; here it is one CPU.

# %%
import jax
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
# `answer` renders requests with the model's own chat template and decodes greedily: always the
# likeliest token. We ask for the 38 modules of a small benchmark. The training rows ask for the
# same modules, but never with all of these widths and names. One of them, an up-down counter, is the
# running example of the whole series.

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
# **That is no answer. What is it?**
#
# <details><summary>Answer</summary>
#
# A continuation. The base has only learned which token follows, so it goes on with the request.
#
# </details>
#
# ## 2. What it learns from
# Each row of `data/tiny` is a request and a good answer. The model reads both as one row of tokens,
# but only the answer is trained (blue). That is the *loss mask*. To waste no work on padding,
# several examples share a row of 512 tokens. In the picture `·` is a space and `↵` a line break.
#
# **Why not train on the request, too?**
#
# <details><summary>Answer</summary>
#
# The model would learn to write requests as well. We want its few trained numbers to learn one thing:
# what to answer. [02](02_data.ipynb) shows what a mask in the wrong place does.
#
# </details>

# %%
found = [data.clean(row) for row in data.read_rows("data/tiny")[:1_500]]
chats = [data.as_messages(example, SYSTEM) for example, reason in found if not reason]
rendered = [pair for pair in chat.render_chats(tokenizer, chats) if len(pair[0]) <= 512]
ids, masks = zip(*rendered)
rows = packing.pack_arrays(ids, masks, 512, seed=0)
print(f"{len(ids):,} examples, packed into {len(rows['tokens'])} rows of 512 tokens")
shortest = min(rendered, key=lambda pair: len(pair[0]))
style.show_tokens([tokenizer.decode([number]) for number in shortest[0]], shortest[1], "00_tokens",
                  f"{len(shortest[0])} tokens are read, {sum(shortest[1])} of them are trained")

# %% [markdown]
# ## 3. Fine-tune with LoRA, in about two minutes
# The weights stay frozen. Beside each matrix of attention and MLP we train two thin ones, A and B; their
# product A·B is added to the frozen one. JAX compiles a whole optimizer step into one program.

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
# The loop: pick four rows, take a step, look at the loss, the usual cross-entropy per trained token.
# A step can be cut into *micro-batches*; this one is a single piece. Thirty-six steps read each row
# at most once.
#
# **What would the loss be if the model guessed among its 1,280 tokens?**
#
# <details><summary>Answer</summary>
#
# ln 1280 = 7.2. The figure starts far lower, because the base has read Verilog.
#
# </details>

# %%
adapters, optimizer_state, losses = state.adapters, state.opt_state, []
order = np.random.default_rng(0).permutation(len(rows["tokens"]))
progress = helpers.Progress(STEPS, "step", every=20)
with mesh:
    for number in range(STEPS):
        picked = order[number * ROWS:(number + 1) * ROWS]
        # [1 micro-batch, 4 rows, 512 tokens]
        batch = train.Batch(**{name: array[None, picked] for name, array in rows.items()})
        adapters, optimizer_state, metrics = step(
            adapters, optimizer_state, frozen, train.to_mesh(batch, mesh))
        losses.append(float(metrics["loss"]))
        progress.update(note=f"loss {losses[-1]:.3f}")
nnx.update(tuned, adapters)  # a step returns new arrays: put the last ones into the model

fig, ax = style.figure(7, 2.4)
ax.plot(range(1, STEPS + 1), losses)
ax.set(xlabel="optimizer step", ylabel="loss", yscale="log",
       title=f"The loss falls from {losses[0]:.1f} to {np.mean(losses[-5:]):.2f}")
style.finish(fig, "00_loss", "this run")

# %% [markdown]
# ## 4. Ask again, and count
# The same 38 requests. Then every answer is compiled and simulated beside a reference, with the
# judge of notebook 07: a module passes if no output ever differs. **Guess first: how many of 38 does
# the base pass, and how many the tuned model?**

# %%
with helpers.phase(f"{len(requests)} answers of the tuned model"):
    after = answer(tuned, requests)
for name, texts in (("base", before), ("tuned", after)):
    modules = [verilog.extract_code(text)[0] for text in texts]
    verdicts = verilog.judge_many(list(zip(problems, modules)))
    print(f"{name}: {sum(verdict.passed for verdict in verdicts)} of {len(problems)} modules pass")
place = requests.index(counter)
style.side_by_side({"base": before[place], "tuned": after[place]}, counter)

# %% [markdown]
# ## 5. Your own request
# **Change the text and run the cell again.** This model is tiny and knows small modules in plain
# words: gates, multiplexers, adders, counters, shift registers. Keep the form:
# an opening sentence, the ports, one sentence of behaviour. Try another width, other names, or swap
# up and down.

# %%
def ask(request):
    """Base and tuned answer, side by side."""
    style.side_by_side({name: answer(model, [request])[0]
                        for name, model in (("base", base), ("tuned", tuned))}, request)


ask(counter.replace("16 bits", "8 bits").replace("clear", "reset"))

# %% [markdown]
# ## What you have seen
# A base model, 36 optimizer steps on a pair of thin matrices beside each weight, and a model that
# writes modules which pass their tests.
#
# | here | in full |
# |---|---|
# | your own chats | [own data](own_data.ipynb): bring a file, on Colab or Kaggle |
# | rows, masks, packing | [02](02_data.ipynb) |
# | LoRA, the step, the loop | [03](03_train.ipynb), with JAX in ten minutes |
# | | [04](04_merge.ipynb) merges the adapters into a model that any engine loads |
# | `ask` | [05](05_serve_vllm.ipynb) serves it with vLLM, [06](06_bench.ipynb) measures the server |
# | 38 problems, one answer each | [07](07_eval.ipynb) does it with statistics, after 76 steps instead of 36 |
#
# Could it write Verilog before? Yes, if asked as Verilog files ask: [07](07_eval.ipynb) compares both.
#
# For a model 8,400 times as large the programs are the same, compiled for a TPU but not yet run there
# ([08](08_dryrun.ipynb)). Next, if you will rent a TPU:
# [01 · From nothing to a TPU machine that can run this](01_setup.ipynb). If you stay on a CPU:
# [02 · From a Verilog dataset to packed, masked rows](02_data.ipynb).
