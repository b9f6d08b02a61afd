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
# You have questions and answers, and you'd like a Gemma 4 that answers the same way. Bring one file. You'll see what
# the model learns from your file, train the model, measure whether it got better, and take it home. You can do all that
# without reading any of the other pages.
#
# | | |
# |---|---|
# | **Needs** | to rehearse with a tiny model: any CPU. For Gemma 4 E2B: a TPU (Colab's v5e-1 or v6e-1, or Kaggle's v5e-8) |
# | **Reads** | your `.jsonl` file, or `data/ports` as an example; the base model |
# | **Writes** | a folder below `own/` in the run directory: checkpoints, `adapter/`, `merged/` (10.2 GB for E2B) |
# | **Time and cost** | tiny: one and a half to five minutes on two CPU cores (measured); installing 3 to 5 more, once (measured); for E2B add the download of 10.2 GB and some minutes of compiling (assumed) |
#
# Choose *Run all* first, without changing anything: it runs with the example. Then name your file.
#
# <details><summary>Colab, Kaggle, and the 31B</summary>
#
# When a session ends, its disk is wiped, so section 7 downloads the adapter. On Colab you can keep everything: add a cell
# before the first one that mounts your Drive (`from google.colab import drive; drive.mount("/content/drive")`) and sets
# the environment variable `RUN_DIR` to a folder below `/content/drive/MyDrive`. On Kaggle set `RUN_DIR` to a folder below
# `/tmp`, because `/kaggle/working` holds 20 GB only.
#
# (A v5e-1 or v6e-1 is one TPU chip, a v5e-8 eight of them, and a v5p-8 four larger ones.)
#
# This page keeps the base in bfloat16 (two bytes a number). For the 31B that doesn't fit a v5e-8: by our estimate this
# page's rows need 17.4 GiB a chip, and there are 15.75. So take a v5p-8, or [03](03_train.ipynb), which trains the 31B
# on a v5e-8 with a base rounded to int8 (one byte a number). `merged/` takes 62.5 GB.
#
# </details>
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
# **What does a file have to look like?** It has one chat per line, for example `{"prompt": "...", "completion":
# "..."}`, or a list of messages. ([All the
# forms](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/OWN_DATA.md#the-file), also with tools and reasoning.)
#
# Three lines are yours to change. `FILE` names your file. `SYSTEM` is a sentence that says what the model is for. It
# opens every chat that has no such sentence of its own, both in training and whenever you ask. `HELD_OUT` is the share of
# the questions that we don't train on, so that we can test the model with them. If you leave `FILE` empty, you get our
# example. It asks for the *ports* of a Verilog module: its inputs and outputs, and how many bits each has.

# %%
FILE = ""        # "chats.jsonl", a dataset on Hugging Face, "upload" on Colab; "": the example
SYSTEM = ""      # for example "You answer questions about our products."
HELD_OUT = 0.1   # share of the questions

# %% [markdown]
# How do we train? The base model stays as it is. Beside each matrix of its layers we train two thin ones, and we add
# their product to the matrix. That's *LoRA*. The settings for it are the *recipe*, and there's one for each size of the
# model. **Start with the recipe as it stands, and change one number at a time.**

# %%
RECIPES = {"tiny": {
    "model": "assets/tiny_gemma4",  # a folder, or a name on the hub
    "rank": 16,                # columns of the thin matrices: more can learn more, and cost memory
    "alpha": 32.0,             # their product counts alpha / rank times
    "learning_rate": 5e-3,     # how far a step goes, at most
    "warmup_steps": 10,        # up to that rate; from there it falls to zero until the end
    "epochs": 2.5,             # how often all rows are read
    "sequence_length": 384,    # tokens of a row; longer chats aren't trained
    "rows_per_step": 1,        # a step learns from so many rows; several chats share a row
    "every": 30,               # steps between two tests on held-out rows, and two saved states
    "reasoning": "stripped",   # or "kept": an answer's reasoning is trained as its thought
    "dtype": "float32"}}       # of the base: four bytes a number; "bfloat16": two
RECIPES["e2b"] = RECIPES["tiny"] | {
    "model": "google/gemma-4-E2B-it", "learning_rate": 2e-4, "warmup_steps": 20, "epochs": 3.0,
    "sequence_length": 1024, "rows_per_step": 8, "every": 25, "dtype": "bfloat16"}
RECIPES["31b"] = RECIPES["e2b"] | {"model": "google/gemma-4-31B-it"}
options = helpers.choose(RECIPES) | {"validation": HELD_OUT}

# %% [markdown]
# ## 2. What does the model get to see?
# **Is the whole file used?** Files have surprises: a cut line, a chat without an answer, a column that nobody reads.
# We count the rows that can't be trained and name the reason. We also name the columns that nobody uses.

# %%
from helpers import chat, own, remote, style

rows = own.look(own.file_of(FILE, "data/ports/train.jsonl"), SYSTEM, options["reasoning"])
tokenizer = chat.load_tokenizer(options["model"])
lengths = [len(ids) for ids, _ in chat.render_chats(tokenizer, rows.chats)]
own.draw_rows(rows, lengths, options["sequence_length"])

# %% [markdown]
# A model reads *tokens*: pieces of words, and a few control tokens such as `<|turn>`, which opens somebody's turn to
# speak. **Which of these tokens would you train?** Here's one of your chats, of average length.

# %%
example = rows.chats[own.typical(lengths, options["sequence_length"])]
ids, mask = chat.render(tokenizer, example)
style.show_tokens([tokenizer.decode([number]) for number in ids], mask, "own_tokens",
                  f"{len(ids)} tokens are read, {sum(mask)} of them are trained")

# %% [markdown]
# Blue is trained: what the model should write, and the `<turn|>` with which it stops. Gray is only read. So the model
# learns to answer, and doesn't learn to ask. (· is a space, ↵ a line break. If you see the word `thought`, that's an
# empty thinking block. It tells some Gemma 4 models to answer right away.)
#
# **If you see anything blue that your model should never say, fix your file now.**
#
# ## 3. Train
# **How does it learn?** Only the thin matrices change. Together they're the *adapter*. The whole program that trains them
# is [`recipe.py`](https://github.com/OWNER/gemma4-on-tpu/blob/main/recipe.py), one file that you can copy into a project
# of your own. ([03](03_train.ipynb) explains how such training works.) If the kernel stops, run the page again, and
# training goes on from its newest *checkpoint*, the last state that was saved.

# %%
import recipe

out = helpers.run_dir("own", own.mark(options, rows.chats))
own.write_chats(rows.chats, out / "rows.jsonl")
base_folder = remote.stage(options["model"])  # downloads what is not here
own.train(recipe.main, options | {"model": base_folder}, out)
own.draw_losses(out / "log.txt", blind=len(tokenizer))

# %% [markdown]
# The *loss* says how surprised the model is by the right answer; lower is better. (It's in *nats*: at 0.7 the right
# token typically gets half of the probability.) The dotted line shows the loss of a blind guess among all tokens. The
# tiny model starts near that line, most likely because it has never read a sentence like these answers.
#
# The blue curve can go on falling, because the model can learn its rows by heart. The green curve is the one that
# counts, because the model hasn't trained on those questions. (At the end both flatten, because the learning rate falls
# to zero.)
#
# **Once the green curve rises, you've trained too long: take fewer `epochs`, or a smaller `learning_rate`. If its last
# point is the lowest, try more `epochs`.**
#
# ## 4. Before and after
# **Did anything change?** We load the base once, with two adapters: yours is *tuned*, and one that does nothing is
# *base*.

# %%
from helpers import gemma

config = gemma.config_from_hf(base_folder, dtype=options["dtype"])
mesh = gemma.make_mesh(config)  # all the devices of this machine
base = gemma.load_base(base_folder, config, mesh)
model = gemma.inject_lora(base, options["rank"], options["alpha"], mesh)
adapters = own.before_and_after(model, out / "checkpoints", recipe.restore)

# %% [markdown]
# Both get the same questions, the first 40 that were held out. We ask *greedily*: a model always writes its likeliest
# token, so if you ask again, you get the same answers.

# %%
exam = own.questions(tokenizer, rows.chats, HELD_OUT, options["sequence_length"], most=40)
asker = own.Asker(model, adapters, tokenizer, mesh, exam)
said = {name: asker.ask(name, [question.asked for question in exam]) for name in adapters}
for place, question in enumerate(exam[:3]):
    shown = {name: said[name][place] for name in said}
    style.side_by_side(shown | {"your file": question.wanted}, question.asked[-1]["content"])

# %% [markdown]
# **How many of the three tuned answers are right, down to each name and number?** Count them, and compare your count
# with the scores of section 5.
#
# Now ask something yourself. The question below has nothing to do with your data: if the base can answer it and the
# tuned model can't, the tuned model has forgotten it. (The tiny base never knew.) Then ask about your data.

# %%
MINE = "What is the capital of France?"  # ← your own question
opening = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
messages = [*opening, {"role": "user", "content": MINE}]
style.side_by_side({name: asker.ask(name, [messages])[0] for name in adapters}, MINE)

# %% [markdown]
# **Ask it about what it learned, and about what it should still know.**
#
# ## 5. Is it better?
# **How do you tell a good answer from a bad one?** Three examples can fool you, so we score the answers to all the
# questions that we asked, in three ways:
#
# - `overlap` is the share of words that an answer and your file's answer have in common (F1, as in the SQuAD benchmark).
# - `details` is the share of the details in your file's answer that the model's answer has, too. In the example, the
#   details are ports with their widths. This score expects answers that end in a list. If yours don't, write a score of
#   your own (exercise 3).
# - `exact` is 1 if the two answers are equal, and otherwise 0.
#
# We also give each question *the right answer to another question*, and score that. It has the form of a good answer,
# and hardly any of the facts. **Guess: which of the three scores gives it the most points?**

# %%
import verilog


def details(answer, wanted):
    """The share of the wanted details that an answer has, 0 to 1. Yours may want another score."""
    due, given = own.listed(wanted), own.listed(answer)
    return sum(detail in given for detail in due) / len(due)


def exact(answer, wanted):
    """Are they equal?"""
    return float(answer.strip() == wanted.strip())


# %%
marks, compared, form_alone = {}, {}, {}
for score in (own.overlap, details, exact):  # from the loosest to the strictest
    name = score.__name__
    marks[name] = {model: [score(text, question.wanted) for text, question in zip(texts, exam)]
                   for model, texts in said.items()}
    compared[name] = verilog.compare(marks[name]["base"], marks[name]["tuned"])
    form_alone[name] = own.other_answers(exam, score)
own.draw_scores(compared, form_alone)
print(*own.meaning(compared, form_alone), sep="\n")

# %% [markdown]
# **Words in common are cheap.** In the example every answer has the frame "… has … ports: input … and output …". A
# model that has learned only this frame gets a high overlap, even if every name and number in it is wrong. The dashed
# line shows how high, because it's the score of a right answer to another question. So compare your model with that line
# before you're proud of its score.
#
# `details` gives nothing for the frame. If your answers have one right form, as in the example, and almost none is
# `exact`, the model isn't done. (For free text, where a good answer can be worded in many ways, `exact` is too strict.)
#
# In the lower panel you see the mean difference per question, with its 95% interval ([07](07_eval.ipynb), section 9).
# If the interval includes zero, the difference may be luck, and you need more questions. Decide beforehand how many you
# can get, collect them all, and look only once more.
#
# (If you choose `epochs` or rates by the green curve, the scores favor you a little, because both use the same held-out
# questions. So keep a few rows in a second file, for a last test.)
#
# **Before you believe a score, try it on answers that you know to be wrong.**
#
# ## 6. Does it call tools?
# **Can it learn to call your functions?** Yes. A row then lists your functions under `tools`, and the
# assistant's message has `tool_calls` instead of text. `data/tools` holds thirty such chats. **What should
# be trained in them: the call, the result, or both?**
#
# <details><summary>Answer, and how to serve such a model</summary>
#
# The call and the answer are trained. The result is only read, because your program writes it: the model stops at
# `<|tool_response>` and waits. To try it, set `FILE = "data/tools/train.jsonl"` and run the page again. Section 4 then
# shows calls.
#
# The model writes a call in Gemma 4's own form. vLLM, the server of [05](05_serve_vllm.ipynb), turns it back into JSON if
# you set `tools=True` in 05's settings. If you start vLLM yourself, you need [these
# flags](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/OWN_DATA.md#use-it).
#
# </details>
#
# **The model writes the call, so the call is trained. It only reads the result.**
#
# ## 7. Take it home
# **How do you keep it?** The adapter is small: about two megabytes here, and about a hundred for E2B. Its card says what
# it is: base, data, recipe, scores, and how to ask. `merged/` holds the whole tuned model, and [OWN_DATA.md says how to
# load or serve it](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/OWN_DATA.md#use-it).
#
# To put the adapter on the Hugging Face hub, write a name into `HUB` and run the cell again. That needs your token
# (`HF_TOKEN`). Nobody else can see the adapter until you change that on its page.

# %%
HUB = ""  # "your-name/my-gemma4-adapter", if you want it on the Hugging Face hub
card = own.card("my-gemma4-adapter", options, out, compared, form_alone, SYSTEM)
own.label(out / "adapter", options["model"], card)
own.show_card(card)
own.download(out / "adapter")
if HUB:
    print(own.push_to_hub(out / "adapter", HUB))

# %% [markdown]
# **Give away an adapter only with its card, and with a score that you'd believe yourself.**
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
# How it works inside: [02](02_data.ipynb) for tokens and masks, [03](03_train.ipynb) for training,
# [04](04_merge.ipynb) for merging, [05](05_serve_vllm.ipynb) for serving.
#
# ### Exercises
# 1. **Cheat your own score.** Find *one* sentence that you'd give as the answer to every question, without reading any.
#    How much `overlap` can it get, and how much of `details`? Guess first.
#
# <details><summary>Solution</summary>
#
# ```python
# def fooled(text, score):
#     return sum(score(text, question.wanted) for question in exam) / len(exam)
#
#
# sentences = [messages[-1]["content"] for messages in rows.chats]
# best = max(sentences, key=lambda text: fooled(text, own.overlap))
# print(best)
# print(f"overlap {fooled(best, own.overlap):.0%}, details {fooled(best, details):.0%}")
# ```
#
# The sentence is one of your file's own answers, given to everybody. (We picked the one with the best `overlap`, so it
# beats the dashed line.) A score that you want to believe should give it next to nothing.
# </details>
#
# 2. **`epochs` from 2.5 to 6.** Guess `exact` first, and `overlap`. Then change the recipe and run the page again.
#
# <details><summary>What to look at</summary>
#
# First the green curve: is its last point still the lowest? Then the number of right answers. `overlap` has little room
# left once the frame is learned, so compare how far each of the two scores moves. The new recipe gets a folder of its
# own, so nothing of the first run is lost.
# </details>
#
# 3. **Write a score of your own**: does the price match, does the JSON parse, does the code run? For the example, ask
#    whether the model gets the numbers wrong, or the names. To find out, score only the numbers of an answer. What should
#    a right answer score, and what should an answer to another question score?
#
# <details><summary>Solution</summary>
#
# ```python
# import re
#
#
# def numbers(answer, wanted):
#     """The share of the wanted numbers that are in the right place."""
#     due, given = re.findall(r"\d+", wanted), re.findall(r"\d+", answer)
#     return sum(one == other for one, other in zip(due, given)) / max(1, len(due))
#
#
# assert numbers("32 bits", "32 bits") == 1
# for name, texts in said.items():
#     found = [numbers(text, question.wanted) for text, question in zip(texts, exam)]
#     print(f"{name}: {sum(found) / len(found):.0%} of the numbers")
# print(f"an answer to another question: {own.other_answers(exam, numbers):.0%}")
# ```
#
# A right answer gets 1. Put `numbers` right after `details` in section 5's loop, and it's drawn with its interval and
# with what a wrong answer gets.
# </details>
