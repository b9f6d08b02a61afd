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
# **Here's a model that has read a lot of Verilog and still can't answer a single request in a chat. Can it learn to?**
# You'll watch it learn, on two CPU cores. The model is a tiny Gemma 4, but the code of a training step is the same as for
# Gemma 4 31B, the model that this series is about. *Verilog* is a language that describes digital circuits, and *Icarus
# Verilog* is a program that simulates them, so nobody has to guess whether an answer is right.
#
# | | |
# |---|---|
# | **Needs** | a free Colab CPU; or Linux with Icarus Verilog (`sudo apt-get install iverilog`), Python 3.11 and `./setup.sh train`. No TPU, no GPU |
# | **Reads** | `assets/tiny_gemma4` (3.65 million parameters), `data/tiny`, `data/tiny_eval` |
# | **Writes** | nothing that another notebook needs |
# | **Time and cost** | 3 to 5 minutes to install, once; then one and a half to four minutes, depending on how busy the two cores are; free |
#
# Choose *Run All* and read along. On Colab the first run stops after installing and asks you to restart the session once.

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
# The tiny Gemma 4 has read Verilog files that a program of ours wrote. (We put a bug into many of them, because public
# code has bugs, too; see [09](09_tiny_base.ipynb).) Such a file describes *modules*, which are circuits with named ports.
# So the model has learned to continue Verilog, but nobody has taught it to answer a request. A model in this state is
# called a *base model*.
#
# The code is in JAX, Google's array library: NumPy with a compiler, for CPUs, GPUs and TPUs. (`optax` is its `torch.optim`,
# and `nnx` its `torch.nn`.) You don't have to follow every line yet: [14 · JAX in a quarter of an hour](14_jax.ipynb) and
# [03](03_train.ipynb) explain them.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from helpers import answers, chat, data, gemma, packing, style, train
import verilog
from verilog.extraction import port_names

# %% [markdown]
# Now we load the model, and the *tokenizer*, which cuts text into *tokens* (pieces of words). A *mesh* is JAX's grid of the
# devices that hold a model; here it's a single CPU.

# %%
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
# `answer` puts each request into the model's *chat template*, the form in which it expects a conversation, and decodes
# *greedily*: it always takes the likeliest next token.


# %%
def answer(model, requests):
    """The model's answers to a list of requests, decoded together."""
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]
             for request in requests]
    return answers.ask(model, tokenizer, chats, 160, mesh)  # at most 160 tokens each


# %% [markdown]
# We ask for the 38 modules of a small benchmark. One of them is an up-down counter, which will follow you through the
# series. No request that we train on equals one of the 38, but some come close: one wants the same counter with another
# width and other names ([02](02_data.ipynb), section 4).

# %%
problems = verilog.load_problems("data/tiny_eval")  # each with a request and a correct module
requests = [problem.prompt for problem in problems]
counter = next(request for request in requests if "counter state goes up" in request)
with helpers.phase(f"{len(requests)} answers of the base"):
    before = answer(base, requests)
style.side_by_side({"base": before[requests.index(counter)]}, counter)

# %% [markdown]
# That isn't an answer. It's a continuation: the base has only ever learned which token comes next, so it goes on with
# the request as if it were a file. (This request looks finished, so a single period may be all that it adds.) What
# should it have written?
#
# ```verilog
# module TopModule (                     // a circuit with this name and these ports:
#   input clk, input clear, input inc,   //   three wires that come in, one bit each,
#   output reg [15:0] state              //   and 16 bits that go out; a reg remembers its value
# );
#   always @(posedge clk)                // whenever the clock goes from 0 to 1 (a clock edge):
#     if (clear) state <= 0;             //   <= stores a new value
#     else if (inc) state <= state + 1;
#     else state <= state - 1;
# endmodule
# ```
#
# Circuits without a clock often use `assign y = …` instead, which connects `y` for good. `&`, `|` and `~` are AND, OR and
# NOT, bit by bit, and `s ? a : b` is `a` if `s` is 1 and `b` if it isn't.
#
# **A base model doesn't answer. It continues.**
#
# ## 2. What does it learn from?
# **Which tokens should it learn?** Each example in `data/tiny` is a request and a good answer. The model reads both, but
# if we trained on the request, too, it would learn to write requests. So a *loss mask* marks the answer's tokens. The
# *loss* is a number that says how wrong the model is, and only the marked tokens count in it.
#
# Training takes the tokens in *rows*, a few rows at a time (a *batch*). All rows have to be equally long, here 512
# tokens, and most examples are much shorter. The rest of a row would be *padding*, which costs work and teaches nothing.
# So we *pack* several examples into each row.

# %%
examples = data.clean_all(data.read_rows("data/tiny")[:1_500], "data/tiny").examples
chats = [data.as_messages(example, SYSTEM) for example in examples]
rendered = chat.render_chats(tokenizer, chats)  # of each chat: its token ids and its loss mask
fitting = [(ids, mask) for ids, mask in rendered if len(ids) <= 512]
all_ids, all_masks = zip(*fitting)
rows = packing.pack_arrays(all_ids, all_masks, 512, seed=0)
print(f"{len(all_ids):,} examples, packed into {len(rows['tokens'])} rows of 512 tokens")

# %% [markdown]
# What does the model see of an example? Here's the shortest one. (`·` is a space, `↵` a line break, and `thought` belongs to
# an empty thinking block that [02](02_data.ipynb) explains.)

# %%
ids, mask = min(fitting, key=lambda pair: len(pair[0]))
pieces = [tokenizer.decode([number]) for number in ids]
style.show_tokens(pieces, mask, "00_tokens")

# %% [markdown]
# **Everything is read; only the answer is trained.**
#
# ## 3. How does it learn? LoRA, in 36 steps
# The model's own weights stay *frozen*. Next to each matrix of attention and MLP (the two halves of each layer) we put
# two thin ones, A and B, and add their product A·B to it. Only A and B, the *adapters*, are trained, and that's LoRA
# (*low-rank adaptation*). `rank` says how thin they are, and the product is multiplied by `alpha / rank` before it's
# added.
#
# **What happens in one training step?** The model reads a batch, and we compute the loss. For each number in A and B, the
# *gradient* says how much the loss would change if we changed that number a little. Then the *optimizer* moves every
# number a little way, so that the loss falls. The *learning rate* sets how far.

# %%
STEPS, ROWS = 36, 4  # optimizer steps, packed rows in each
tuned = gemma.inject_lora(base, rank=16, alpha=32.0, mesh=mesh)  # a new model; base stays
# The learning rate rises for ten steps and then falls. A gradient longer than 1 is cut to 1, so
# that a single one can't undo the others.
rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, warmup_steps=10, decay_steps=STEPS)
optimizer = train.make_optimizer(rate, weight_decay=0.001, max_grad_norm=1.0)

# %% [markdown]
# The whole step becomes one compiled program. It computes the loss for the trained tokens only, and each row has a
# different number of them. But the arrays of a compiled program can't change their size. So we make them large enough for
# the row with the most trained tokens.

# %%
state, frozen = train.start(tuned, optimizer, mesh)  # state: A, B and what the optimizer remembers
most_trained = int(rows["loss_mask"][:, 1:].sum(-1).max())  # nothing predicts a row's first token
loss = train.make_loss(capacity=most_trained)
step = train.jit_train_step(tuned, optimizer, loss, state)
trainable = sum(array.size for array in jax.tree.leaves(state.adapters))
print(f"{trainable:,} numbers to train, in {len(gemma.adapted_modules(tuned))} pairs of A and B")

# %% [markdown]
# We'd like to see it happen, so we ask for the counter at four stops.

# %%
SNAPSHOTS = (5, 10, 20, STEPS)
counters = {0: before[requests.index(counter)]}  # steps done: the model's answer


def snapshot(steps_done, adapters):
    """Ask the model, as it is after so many steps, for the counter."""
    # The compiled step reuses the memory of the arrays that it gets, so we copy them first.
    nnx.update(tuned, jax.tree.map(jnp.copy, adapters))
    counters[steps_done] = answer(tuned, [counter])[0]


# %% [markdown]
# Now the loop. Each step picks four new rows, computes the gradient and changes A and B a little. Watch the loss
# fall. For one trained token it's −ln p, where p is the probability that the model gave to that token, and we average it
# over all trained tokens. (The name for this is *cross-entropy*. Its unit is the *nat*, because the logarithm is
# natural.) **What would the loss be if the model guessed blindly among its 1,280 tokens?**
#
# <details><summary>Answer</summary>
#
# Each p would be 1/1280, and −ln(1/1280) = ln 1280 = 7.2. The first step starts lower, because the base already knows
# what Verilog looks like.
#
# </details>

# %%
adapters, optimizer_state, losses = state.adapters, state.opt_state, []
order = np.random.default_rng(0).permutation(len(rows["tokens"]))
progress = helpers.Progress(STEPS, "step", every=20)  # a line every 20 seconds
with mesh:  # on these devices
    for number in range(1, STEPS + 1):
        picked = order[(number - 1) * ROWS:number * ROWS]
        batch = train.batch_of(rows, picked, mesh)
        adapters, optimizer_state, metrics = step(adapters, optimizer_state, frozen, batch)
        losses.append(float(metrics["loss"]))
        progress.update(note=f"loss {losses[-1]:.2f} nats a token")
        if number in SNAPSHOTS:
            snapshot(number, adapters)

# %% [markdown]
# A falling loss doesn't tell you much by itself. So at each stop the judge from 07, which simulates circuits, says
# whether the counter is right.

# %%
exam = problems[requests.index(counter)]
codes = [verilog.extract_code(text)[0] for text in counters.values()]  # None: no module
verdicts = dict(zip(counters, verilog.judge_many([(exam, code) for code in codes])))
style.loss_with_verdicts(losses, verdicts, config.num_embed, "00_loss",
                         "tiny, two CPU cores, seed 0")

# %% [markdown]
# And what did the model say at each stop? Equal answers are shown once, and port names that nobody asked for are underlined
# in red.

# %%
named = {name for text in counters.values() for name in port_names(text)}
style.show_stops(counters, verdicts, wrong=named - {*port_names(exam.reference)})

# %% [markdown]
# Usually the form of an answer comes early: a code fence (the three backticks), a module, a list of ports. But a single
# wrong name is enough to fail.
#
# **The form comes easily. What takes longest is getting every detail right.**
#
# ## 4. Is it right? Count
# One counter could be luck, so we ask for all 38 modules again. The judge simulates each answer next to a correct module,
# and the answer passes if no output ever differs. **Guess first: how many of the 38 does the base pass, and how many does
# the tuned model pass?**

# %%
with helpers.phase(f"{len(requests)} answers of the tuned model"):
    after = answer(tuned, requests)
judged = {}
for name, texts in (("base", before), ("tuned", after)):
    modules = [verilog.extract_code(text)[0] for text in texts]
    judged[name] = verilog.judge_many(list(zip(problems, modules)))
passed = {name: [verdict.passed for verdict in judged[name]] for name in judged}
score = f"{sum(passed['base'])} of 38 before, {sum(passed['tuned'])} of 38 after"
print(score)
style.squares(passed, "00_squares", f"{score}: a filled square is a problem that passes")

# %% [markdown]
# What about the problems that don't pass? Here's one that the tuned model fails, next to a correct module. **Can you see
# what's wrong?** (The key to Verilog is at the end of section 1.)

# %%
readable = ("mismatch", "timeout", "runtime")  # these answers ran, so they're worth reading
failed = [number for number, verdict in enumerate(judged["tuned"]) if not verdict.passed]
failed.sort(key=lambda number: judged["tuned"][number].category not in readable)
for number in failed[:1]:
    style.side_by_side({f"tuned: {judged['tuned'][number].detail}": after[number],
                        "a correct module": problems[number].reference}, requests[number])

# %% [markdown]
# **Plausible isn't right. That's why [07](07_eval.ipynb) simulates answers instead of reading them.**
#
# ## 5. What happens with your own request?
# **Does it do what you ask?** Change the last line and run the cell again: another width, other names, up and down swapped.
# Keep the form of the request, because this model only knows small modules described like that. The judge has no correct
# module to compare yours with, so read the answer: does it have your ports and your width?

# %%
def ask(request):
    """Base and tuned answer, side by side."""
    style.side_by_side({name: answer(model, [request])[0]
                        for name, model in (("base", base), ("tuned", tuned))}, request)


ask(counter.replace("16 bits", "8 bits").replace("clear", "reset"))

# %% [markdown]
# **Expect good answers only to requests like the ones that it was trained on.**
#
# ## 6. Your turn: two experiments
# **Which choices mattered?** Note how many of the 38 pass now, and guess the next number: more or fewer? Then change the
# line, and run its cell and all below it down to section 4 (one to three minutes).
#
# 1. Thinner matrices: `rank=2, alpha=4.0` in section 3. That's an eighth of the numbers to train.
# 2. The wrong mask, which trains the requests, too. Undo the first change, and in section 2 replace the line `fitting = …`
#    with this one. (The `False` is for an example's first token: nothing stands before it to predict it from.)
#
#    ```python
#    fitting = [(ids, [False] + [True] * (len(ids) - 1)) for ids, _ in rendered if len(ids) <= 512]
#    ```
#
# <details><summary>What to expect, and why</summary>
#
# 1. Probably fewer. A lower rank usually learns more slowly, so it gets less far in 36 steps.
# 2. Probably a few fewer, because the model now spends its few numbers on writing requests, too. The picture of the tokens
#    is nearly all blue. [02](02_data.ipynb), section 3, makes this comparison with three runs of each kind.
#
# A difference of two or three problems can be luck. [07](07_eval.ipynb) shows how to tell.
#
# </details>
#
# ## Where next?
# Could the base have written Verilog all along? Yes, if you phrase the request as a comment above the module. But then it
# makes the mistakes of the files that it has read. [07](07_eval.ipynb) measures what the tuning added to that.
#
# Here's the whole series. This page went to the stations with a blue border: up to the adapters, then straight to the
# judge.
#
# ![A chat becomes token ids with a mask, then part of a packed row; LoRA trains A and B, a merge adds them to the weights, a server answers, and a judge simulates](../assets/figures/road.svg)
#
# - With your own chats: [own data](own_data.ipynb) needs only a file, on Colab or Kaggle.
# - With a TPU: [01 · From nothing to a TPU machine that can run this](01_setup.ipynb).
# - On a CPU: [02 · From a Verilog dataset to packed, masked rows](02_data.ipynb).
