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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/own_data.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/OWNER/gemma4-on-tpu/blob/main/notebooks/own_data.ipynb)
#
# # Your own chats: a file in, a tuned Gemma 4 out
#
# You have questions and answers, and you'd like a Gemma 4 that answers like them. Bring one file.
# You'll see what the model learns from it, train, talk to the model before and after, measure
# whether it's better, and take it home. This page needs none of the others.
#
# | | |
# |---|---|
# | **Needs** | Colab with a TPU (v5e-1 or v6e-1) or Kaggle's TPU v5e-8 for Gemma 4 E2B; or any CPU, for a rehearsal with a tiny model. For the 31B a larger slice, such as a v5p-8: this page keeps the base in bfloat16, which most likely doesn't fit a v5e-8 (by our estimate 15.6 of 15.75 GiB a chip). There [03](03_train.ipynb) trains it, with an int8 base |
# | **Reads** | your `.jsonl` file, or `data/ports` as an example; the base model |
# | **Writes** | a folder below `own/` in the run directory: checkpoints, `adapter/`, `merged/` (10.2 GB for E2B, 62.5 for the 31B). It's on the machine's disk; set `RUN_DIR` in a cell before the first to have it on your Drive, or below `/tmp` on Kaggle, whose `/kaggle/working` holds 20 GB |
# | **Time and cost** | tiny: four minutes on two busy CPU cores (measured); installing 3 to 5 more, once (measured); for E2B add the download of 10.2 GB and some minutes of compiling (assumed) |
#
# Choose *Run all* first, without changing anything: it runs with the example. Then name your file.
#
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · **own data**
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
helpers.machine(devices=1)
# %% [markdown]
# ## 1. Your file
# One chat per line, for example `{"prompt": "...", "completion": "..."}`, or a list of messages.
# ([All the forms](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/OWN_DATA.md#the-file), also
# with tools and reasoning.) Three lines are yours to change. `SYSTEM` is a sentence that opens every
# chat, in training and whenever you ask; say in it what the model is for. `HELD_OUT` is the share of
# questions that we don't train on, so that we can measure with them later.
#
# The recipes below are starting points, one for each size. **Start with them, and change one number
# at a time.**

# %%
FILE = ""        # "chats.jsonl", a dataset's name on the hub, or "upload" on Colab; "": the example
SYSTEM = ""      # for example "You answer questions about our products."
HELD_OUT = 0.1   # share of the questions

RECIPES = {
    "tiny": {"model": "assets/tiny_gemma4", "rank": 16, "alpha": 32.0, "learning_rate": 5e-3,
             "warmup_steps": 10, "epochs": 2.0, "sequence_length": 384, "rows_per_step": 3,
             "every": 20, "reasoning": "stripped", "dtype": "float32"},
    "e2b": {"model": "google/gemma-4-E2B-it", "rank": 16, "alpha": 32.0, "learning_rate": 2e-4,
            "warmup_steps": 20, "epochs": 3.0, "sequence_length": 1024, "rows_per_step": 8,
            "every": 25, "reasoning": "stripped", "dtype": "bfloat16"}}
RECIPES["31b"] = RECIPES["e2b"] | {"model": "google/gemma-4-31B-it"}
options = helpers.choose(RECIPES) | {"validation": HELD_OUT}

# %% [markdown]
# ## 2. What does the model get to see?
# Files have surprises: a cut line, a chat without an answer, a column that nobody reads. We drop what
# can't be trained and count why. If a row is kept but a part of it isn't used, the line below says
# so, so that nothing disappears without a word.

# %%
from helpers import chat, own, remote, style

rows = own.look(own.file_of(FILE, "data/ports/train.jsonl"), SYSTEM, options["reasoning"])
tokenizer = chat.load_tokenizer(options["model"])
lengths = [len(ids) for ids, _ in chat.render_chats(tokenizer, rows.chats)]
own.draw_rows(rows, lengths, options["sequence_length"])

# %% [markdown]
# A model reads tokens, not letters: pieces of words, and a few control tokens such as `<|turn>`.
# **Which of these tokens would you train?** Here is one of your chats, of middling length.

# %%
example = rows.chats[own.typical(lengths, options["sequence_length"])]
ids, mask = chat.render(tokenizer, example)
style.show_tokens([tokenizer.decode([number]) for number in ids], mask, "own_tokens",
                  f"{len(ids)} tokens are read, {sum(mask)} of them are trained")

# %% [markdown]
# Blue is trained: what the model is to write, and the `<turn|>` with which it stops. Grey is only
# read. So the model learns to answer, and doesn't learn to ask. If something is blue that the model
# should never say, mend your file now.
#
# ## 3. Train
# The base model stays as it is. Beside each of its matrices we train two thin ones, whose product is
# added: that's LoRA, and the thin matrices are the *adapter*. All of it is in
# [`recipe.py`](https://github.com/OWNER/gemma4-on-tpu/blob/main/recipe.py), one file that you can copy
# into a project of your own. If the kernel stops, run the page again: training goes on from its newest
# checkpoint.

# %%
import recipe

out = helpers.run_dir("own", own.mark(options, rows.chats))
own.write_chats(rows.chats, out / "rows.jsonl")
base_folder = remote.stage(options["model"])  # downloads what is not here
own.train(recipe.main, options | {"model": base_folder}, out)
own.draw_losses(out / "log.txt")

# %% [markdown]
# The *loss* says how surprised the model is by the right answer; lower is better. Blue may fall
# forever, because the model can learn its rows by heart. Green counts: those questions it hasn't
# read. **Once the green curve rises, you've trained too long**: fewer `epochs`, or a smaller
# `learning_rate`.
#
# ## 4. Before and after
# We load the base once more and put the adapter beside it. Both models share the weights, so two
# models take hardly more memory than one.

# %%
from flax import nnx

from helpers import answers, gemma

config = gemma.config_from_hf(base_folder, dtype=options["dtype"])
mesh = gemma.make_mesh(config)  # all the devices of this machine
base = gemma.load_base(base_folder, config, mesh)
tuned = gemma.inject_lora(base, options["rank"], options["alpha"], mesh)
step, adapter = recipe.restore(out / "checkpoints", nnx.state(tuned, nnx.LoRAParam))
nnx.update(tuned, adapter)
models = {"base": base, "tuned": tuned}
print(f"base, and the adapter of step {step} beside it")

# %% [markdown]
# Both get the same questions, none of which they have read. A model is asked *greedily*: it always
# writes its likeliest token, so that you'd get the same answers again.

# %%
exam = own.questions(tokenizer, rows.chats, HELD_OUT, options["sequence_length"])
asked = [question.asked for question in exam]
limit = own.longest(tokenizer, exam)  # tokens: no answer has to be longer than your file's


def ask(name, chats):
    """Answers of "base" or "tuned" to chats, which are lists of messages."""
    with helpers.phase(f"{name}: {len(chats)} answers of at most {limit} tokens"):
        texts = answers.ask(models[name], tokenizer, chats, limit, mesh, control=True)
    return [own.without_end(text) for text in texts]


said = {name: ask(name, asked) for name in models}
for place in range(min(3, len(exam))):
    shown = {name: said[name][place] for name in models}
    style.side_by_side(shown | {"your file": exam[place].wanted}, asked[place][-1]["content"])

# %% [markdown]
# **Now ask something yourself.** Change the text and run the cell again. Ask about your data first,
# then something that has nothing to do with it: whatever only the base can answer was forgotten.

# %%
MINE = asked[0][-1]["content"]  # or your own question in quotes
opening = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
messages = [*opening, {"role": "user", "content": MINE}]
style.side_by_side({name: ask(name, [messages])[0] for name in models}, MINE)

# %% [markdown]
# ## 5. Is it better?
# Three examples can fool you, so we score all the held-out questions. How would you tell a good
# answer from a bad one? The score here is the share of words that an answer and your file's answer
# have in common, 1 if all are the same (F1, as in the SQuAD benchmark). **Write your own in its
# place**: does the price in it match, does the JSON parse, does the code run?

# %%
from collections import Counter

import verilog
from helpers import data


def score(answer, wanted):
    """How far the words of two texts agree: 0 to 1."""
    words, due = Counter(data.words_of(answer)), Counter(data.words_of(wanted))
    return 2 * (words & due).total() / max(1, words.total() + due.total())


marks = {name: [score(text, question.wanted) for text, question in zip(said[name], exam)]
         for name in models}
compared = verilog.compare(marks["base"], marks["tuned"])
own.draw_scores(marks, compared)

# %% [markdown]
# The black bars are 95 % intervals: with other questions of this kind, the mean would most likely
# have come out somewhere inside. Few questions make long bars. On the right, every dot above the line
# is a question that the tuned model answers better. **If the bars overlap widely, collect more
# questions before you believe in a difference.**
#
# ## 6. Does it call tools?
# A model can also learn to call your functions. Then a row has the functions under `tools`, and the
# assistant's message has `tool_calls`. `data/tools` holds thirty such chats. What should be trained
# in them: the call, the result, or both?

# %%
with_tools = own.look("data/tools/train.jsonl", SYSTEM)
small = chat.load_tokenizer("assets/tiny_gemma4")
calling = next(messages for messages in with_tools.chats if messages[-2]["role"] == "tool")
ids, mask = chat.render(small, calling)
style.show_tokens([small.decode([number]) for number in ids], mask, "own_tools",
                  f"A call and an answer: {sum(mask)} of {len(ids)} tokens are trained")

# %% [markdown]
# <details><summary>Answer, and how to serve such a model</summary>
#
# The call and the answer are trained. The result is only read, because somebody else writes it: the
# model stops at `<|tool_response>` and waits. To try it, set `FILE = "data/tools/train.jsonl"` and
# run the page again; section 4 then shows calls.
#
# vLLM turns a call back into JSON, if you ask it to. Either set `tools=True` in 05's
# settings, or start it with `--enable-auto-tool-choice --tool-call-parser gemma4
# --reasoning-parser gemma4`.
#
# If your answers have a `reasoning`, it's left out, and the model learns to answer at once. With
# `"reasoning": "kept"` in section 1 the model learns to think first.
#
# </details>
#
# ## 7. Take it home
# The adapter is small: a few megabytes here, some hundred for E2B. Its card says what it is: base,
# data, recipe and scores. `merged/` beside it holds the whole tuned model.

# %%
card = own.card("my-gemma4-adapter", options, out / "rows.jsonl", compared, SYSTEM)
own.label(out / "adapter", options["model"], card)
print(card)
own.download(out / "adapter")

# %% [markdown]
# Would you like to have it on the Hugging Face hub? Write its name below and run the cell. It
# needs your token (`HF_TOKEN`), and nobody else can see the model until you change that on its page.
# To load the adapter or serve the merged model elsewhere, see
# [the commands](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/OWN_DATA.md#use-it).

# %%
HUB = ""  # "your-name/my-gemma4-adapter"
if HUB:
    print(own.push_to_hub(out / "adapter", HUB))
else:
    print("not pushed: HUB is empty")

# %% [markdown]
# ## What you have done
# You looked at what the model reads, trained an adapter, and measured it on questions that it hadn't
# seen. If it isn't good enough yet, better rows usually help more than another learning rate.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
# How it works inside: [02](02_data.ipynb) for tokens and masks, [03](03_train.ipynb) for training,
# [04](04_merge.ipynb) for merging, [05](05_serve_vllm.ipynb) for serving.
