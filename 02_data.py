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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/02_data.ipynb)
#
# # 02 · From a Verilog dataset to packed, masked rows
#
# Which tokens does the model read, and which of them does it learn? You'll turn questions and answers into
# exactly the tokens that the served model will see (a *token* is a word, or a piece of one), mark the ones to train, and
# pack several examples into each row, so that little of it is padding.
#
# | | |
# |---|---|
# | **Needs** | a CPU; for the real data 4 GB of memory and the network (`HF_TOKEN` only if the hub asks for one) |
# | **Reads** | CodeV-R1 and the model's tokenizer from the Hugging Face hub, the prompts of verilog-eval (NVIDIA's benchmark of 156 problems) by git; tiny: `data/tiny`, `assets/tiny_gemma4` and `data/tiny_eval`; or your own data (section 2) |
# | **Writes** | `data/train`, `data/val`, `data/meta.json`, `data/samples.json` under the run directory |
# | **Time and cost** | tiny: about 15 seconds; 10,000 rows of CodeV-R1: about a minute after the download; two cores, no accelerator |
#
# The outputs shown are those of the tiny run. New words are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · **02 data** · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
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
helpers.machine()

# %% [markdown]
# ## 1. Settings, and one row
# **What do you have to decide before you look at any data?** Everything in `Settings` below. Four of its fields need more
# words than the comment beside them:
#
# - `rows`: the published recipe that this series follows (h2loop, arXiv 2605.25645) used 10,000 of 87,321.
# - `system`: this sentence opens every prompt, here and in every request later in the series.
# - `base`: a folder, or a name on the Hugging Face hub. It can be Gemma 4 31B, 12B, E4B or E2B.
# - `max_tokens`: 3,072 by default, but 2,048 on Kaggle's v5e-8, because its chips are small. That drops the longest
#   examples, about 3% of the published ones, and with them 8% of the tokens. (`tests/test_data.py` computes both from
#   the published mean and 99th percentile of the lengths.)

# %%
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

import verilog
from helpers import chat, data, late_mask, packing, pictures, records, style
from tables import hardware

pd.set_option("display.max_colwidth", 160, "display.width", 200)


# %%
@dataclass(frozen=True)
class Settings:
    source: str = "zhuyaoyu/CodeV-R1-dataset:sft"  # a hub name, a .jsonl file or a folder of them
    system: str | None = "Write the Verilog module that is asked for, as one code block."
    base: str = "google/gemma-4-31B-it"            # whose tokenizer and chat template
    rows: int = 10_000                             # as in the published recipe
    max_tokens: int = 3_072                        # longer examples are dropped
    sequence_length: int = 4_096                   # of a packed row
    reasoning: str = "stripped"                    # or "kept": inside Gemma's thought channel
    validation: float = 0.02                       # share of the prompts that is held out
    # Its prompts mustn't be in the data. A folder of problems, a .jsonl of questions, or "": none
    evaluation: str = "{checkout}/dataset_spec-to-rtl"
    seed: int = 42


FULL = (Settings(max_tokens=2_048, sequence_length=2_048) if hardware.here().slice == "v5e-8"
        else Settings())
E2B = replace(FULL, base="google/gemma-4-E2B-it", max_tokens=2_048, sequence_length=2_048)
TINY = replace(FULL, base="assets/tiny_gemma4", source="data/tiny", rows=4_000, validation=0.05,
               evaluation="data/tiny_eval", max_tokens=384, sequence_length=512)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})
# Your own data (section 2):
# cfg = replace(cfg, source="../yours.jsonl", system="One sentence that opens every prompt.",
#               validation=0.1, evaluation="")

# %% [markdown]
# CodeV-R1 (Zhu et al. 2025, license CC BY-SA 4.0) pairs specifications of hardware modules with the answers
# of a reasoning model. Its authors kept an answer only if its Verilog can be turned into a circuit. The
# tiny set has the same columns, but a program wrote it, and broke a few rows on purpose.
#
# Our running example is an up-down counter. Notebook 07's benchmark asks for one, so we can't train
# on that very problem. Here's one of its siblings in the training set (section 5 finds the closest one):

# %%
everything = data.read_rows(cfg.source)
order = np.random.default_rng(cfg.seed).permutation(len(everything))[:cfg.rows]
rows = [everything[int(place)] for place in order]
print(f"{len(rows):,} of {len(everything):,} rows. One of them:\n")
counter = next((row for row in rows if "goes up when" in str(row)), rows[0])
print(json.dumps(counter, indent=2, default=str)[:1_500].replace("\\n", "\n"))

# %% [markdown]
# **One dataset, one sentence, one model: the later pages take them from here.**
#
# ## 2. Your own data
# **Can you bring your own chats?** Yes, because nothing here but the dataset is about hardware. If all you want is a
# model tuned on your file, [own data](own_data.ipynb) does it on one page. To take your file through this whole series,
# set `source` to a file, a folder or a dataset on the hub (`name`, `name:configuration`, `name@revision`), `system` to
# your own sentence, and `RUN_DIR` to a new folder, so that you don't overwrite the Verilog run.
#
# A row can have any of these five forms. (ShareGPT and Alpaca are older datasets whose column names many others took
# over.) **Which of them mean the same chat?**

# %%
ask, reply = "An inverter, please.", "assign y = ~a;"
FORMS = [
    {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": reply}]},
    {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": reply}]},
    {"instruction": ask, "input": "", "output": reply},
    {"prompt": ask, "completion": reply},
    {"prompt": ask, "response": f"```verilog\nmodule m;\n{reply}\nendmodule\n```"}]
understood = [data.as_messages(data.clean(row)[0], None) for row in FORMS]
style.words(pd.DataFrame({
    "form": [data.form_of(row) for row in FORMS],
    "a row of it": [json.dumps(row) for row in FORMS],
    "understood as": [data.in_short(messages) for messages in understood]}))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The first four, as the last column shows. The fifth has CodeV-R1's columns, `prompt` and `response`, whose answer has
# to hold one fenced Verilog module (a *fence* is a line of three backticks, before and after it). If your answers are
# plain text, rename `response` to `completion`.
#
# </details>
#
# Here's a file with ten chats. **Which of them become training examples, and which are dropped?**

# %%
own_rows = data.read_rows("data/own_example.jsonl")
style.words(pd.DataFrame({"chat": [data.in_short(row["messages"]) for row in own_rows]}))

# %%
own_cleaned = [data.clean(row) for row in own_rows]
own_chats = [data.as_messages(example, cfg.system) for example, problem in own_cleaned
             if not problem]
own_dropped = Counter(problem for _, problem in own_cleaned if problem)
print(f"{len(own_chats)} of {len(own_rows)} become examples; dropped: {dict(own_dropped)}")

# %% [markdown]
# A chat that brings its own system message keeps it, and all others get `cfg.system`. A message with `"weight": 0`
# or `"train": false` is read but not learned. At size tiny a chat has to stay below some 600 letters, because the tiny
# tokenizer knows little but Verilog and needs many tokens for anything else. So use size tiny only to look at your rows
# (most will be too long to train), and train Gemma 4 E2B on them.
#
# **Any chat that ends with an answer can be trained on.**
#
# ## 3. Keep only the answer
# **How much of a CodeV-R1 answer do we want?** It opens with reasoning inside `<think>`, and the module
# follows inside `<answer>`. We make two decisions, and each has a price.
#
# - **We strip the reasoning.** The model learns to answer at once, which is how notebooks 05 to 07 serve it.
#   The price: these answers came out of that reasoning, and our model has to learn them without it.
#   (`reasoning="kept"` puts it into Gemma 4's *thought channel* instead, the part of an answer where it thinks.)
# - **We replace CodeV-R1's system text**, which asks for `<think>` and `<answer>` tags. The price: the model
#   knows only our sentence, so every later request has to bring it.
#
# **Which of these answers would you train on?** One with two code fences? One that was cut in the middle of
# a module? Decide before you run the cell.

# %%
code = "module m;\nendmodule"
fence = f"```verilog\n{code}\n```"
cases = {"closed answer": f"<think>why</think>\n<answer>\n{fence}\n</answer>",
         "fence only": f"Here it is.\n{fence}\nDone.",
         "fences in the reasoning": f"<think>try\n{fence}\n</think><answer>\n{fence}\n</answer>",
         "several fences": f"<answer>\n{fence}\nor\n{fence}\n</answer>",
         "fence not closed": f"<answer>\n```verilog\n{code}",
         "reasoning not closed": f"<think>so\n{fence}"}
pd.Series({name: data.split_response(response)[2] or "kept" for name, response in cases.items()})

# %% [markdown]
# <details><summary><b>Why not keep them all?</b></summary>
#
# With two fences we'd have to guess, and a module cut in the middle teaches broken Verilog.
#
# </details>
#
# Now all the rows. Malformed JSON drops a row too, and so does a missing column or a value that isn't text.
# Every reason is counted and shown with one example. In the rows that we keep, some columns aren't used, such as
# CodeV-R1's own system text. The line above the table names them, so nothing disappears silently.

# %%
cleaned = data.clean_all(rows, cfg.source, need_reasoning=records.thinks(cfg.reasoning))
examples, dropped = cleaned.examples, cleaned.dropped
print(f"{len(examples):,} of {len(rows):,} rows are usable")
print(*data.remarks(examples), sep="\n")
pd.DataFrame([(why, count, cleaned.ends[why]) for why, count in dropped.items()],
             columns=["dropped because", "rows", "the end of one of them"])

# %% [markdown]
# **A dropped row costs one row, but a wrong row gets learned.**
#
# ## 4. From text to tokens: the model's own chat template
# **What does a model see of a chat?** It doesn't see text, only token ids. A few of those are control tokens:
# a turn opens with `<|turn>` and closes with `<turn|>`. The *chat template* that comes with the model writes
# them, and the server applies that same template to every request. So the prompts that we train on have to be exactly
# what the server's template writes, token by token.

# %%
tokenizer = chat.load_tokenizer(cfg.base)
question = [{"role": "user", "content": ask}]
stored = [*question, {"role": "assistant", "content": reply}]
print("a stored chat:     ", repr(tokenizer.apply_chat_template(stored, tokenize=False)))
print("a question to serve:", repr(tokenizer.apply_chat_template(question, tokenize=False,
                                                                 add_generation_prompt=True)))

# %% [markdown]
# **Two prompts for one answer. What does the second one have that the first doesn't?**
#
# <details><summary>The trap</summary>
#
# An *empty thought channel*: `<|channel>thought`, a newline, `<channel|>`. The larger Gemma 4 models (12B,
# 26B, 31B) end a question with it, as if to say: thinking is over, answer now. A stored chat doesn't have
# it. So if you train on the stored form, you train on a prompt that the server never sends, and the
# fine-tuned model can end up worse than its base (reported for the 31B in discussion 77 on its hub page). The template
# of the small models (E2B, E4B) doesn't write an empty thought, and then we don't either.
#
# </details>
#
# So a training row is the *served* prompt, then the answer, then `<turn|>`:
#
# ```
# <bos><|turn>system … <turn|>
# <|turn>user … <turn|>
# <|turn>model
# <|channel>thought
# <channel|>answer<turn|>
#           └── trained from here on; in a longer chat the earlier answers are trained, too
# ```
#
# `chat.render` builds the tokens and the mask together, so there's nothing to align later, and notebooks 05
# and 07 send prompts that come from the same function. Text from people can't become a control token: if a user types
# `<turn|>`, the model reads seven ordinary characters, not the end of a turn.
#
# Here's the picture to remember, our counter as the model sees it:

# %%
chats = [data.as_messages(example, cfg.system, cfg.reasoning) for example in examples]
running = data.running_example(chats)
ids, mask = chat.render(tokenizer, running)
style.show_tokens([tokenizer.decode([number]) for number in ids], mask, "02_counter",
                  f"{len(ids)} tokens are read, {sum(mask)} of them are trained")

# %% [markdown]
# Blue tokens are trained, and gray ones are only read. How do we know that these ids are right? 05 compares them with
# the ids that the server computes, and a test compares them with those that transformers computes.
#
# <details><summary>And in a chat with several answers, or with tools?</summary>
#
# A chat with two answers becomes one example, and both are trained. There's one flaw. When the server wrote the earlier
# answer, an empty thought stood before it. In our row there's none, because the template writes an empty thought only
# before the last answer. So the earlier answer is trained in the form that it has as *history*. Exercise 3 makes
# one example of each answer instead.
#
# If the model calls a function, it writes the call, and somebody else writes the result. A question that needs
# `add(4, 8)` ends in one turn of the model's with three parts:
#
# | tokens | who writes them | trained? |
# |---|---|---|
# | <code>&lt;&#124;tool_call&gt;call:add{a:4,b:8}&lt;tool_call&#124;&gt;&lt;&#124;tool_response&gt;</code> | the model, which then has to stop and wait | yes |
# | <code>response:add{value:&lt;&#124;"&#124;&gt;12&lt;&#124;"&#124;&gt;}&lt;tool_response&#124;&gt;</code> | your program | no |
# | <code>The bus is 12 bits wide.&lt;turn&#124;&gt;</code> | the model | yes |
#
# [own data](own_data.ipynb), section 6, trains such chats.
#
# </details>
#
# **What the model should write is trained, and nothing else.**
#
# ### A trap: counting pieces
# **What if you build the tokens first, and then count where the answer begins?** The published recipe tokenized the
# whole chat, and then every piece of it again to count lengths. Its tokenizer adds two tokens, `<bos>` and `<eos>`
# (begin and end of a sequence), to each piece. Three pieces come before the answer, so its mask starts 3 × 2 = 6
# tokens late, and it also trains tokens after the end of the turn. ([10](10_published.ipynb) has the rest.)
#
# In the picture, the mask misses what's orange, and trains what's red by mistake. (The prompts differ, too, because that
# recipe has neither our system message nor the thought channel.)

# %%
compared = late_mask.one_question(running, otherwise=understood[0])
style.finish(late_mask.draw_both(tokenizer, compared), "02_tokens",
             "one row of this dataset, both ways, computed above")
style.fold_source("published_row: how the recipe counts", late_mask.published_row)

# %% [markdown]
# ### What does a mask in the wrong place do?
# We trained the tiny base three times, with the same rows, steps and seed. One mask trains the answer, one trains the
# prompt as well, and one starts six tokens late. Then 07's judge, a simulator, counted how many answers pass. (An
# answer is *greedy* if each token is the likeliest one, and *sampled* if each is drawn by its probability.) **Which
# mask fails completely, and does its loss give it away?** (The *loss* says how surprised the model is by the right
# tokens. Lower is better.)

# %%
runs = late_mask.read_runs()
style.finish(late_mask.draw_runs(runs), "02_masks",
             f"data/masks: tiny, {runs.steps.iloc[0]} steps each, measured")
for name, of_mask in runs.groupby("mask"):
    print(f"{late_mask.NAMES[name]:27} loss {of_mask.loss.mean():.4f}, greedily "
          f"{of_mask.greedy.mean():.0f} of {of_mask.problems.iloc[0]} problems")

# %% [markdown]
# The loss won't tell you, because the run that passes nothing ends with a loss as low as the right one. (The middle
# run's loss is higher because it also counts the tokens of prompts, which are hard to guess.)
#
# <details><summary><b>Why does the late mask fail?</b></summary>
#
# The first six tokens of an answer, the opening fence and the start of the module's header, are never trained. So
# most likely the model never learns to begin an answer, and without the beginning the rest is useless.
#
# </details>
#
# If the prompt is trained, too, the same steps teach less of what you wanted: in these runs far fewer sampled answers
# pass, and a few fewer greedy ones. (`python -m appendix.masks` adds two seeds.)
#
# **A wrong mask raises no error, and the loss doesn't show it. Look at the tokens.**
#
# ## 5. Is the test in the training set?
# **Could a model have seen the exam?** If it has, passing proves nothing. So `data.overlap` compares every
# training prompt with every exam prompt, in two ways. Prompts that are equal except for case, spaces
# and line breaks get dropped in section 6. For the others we use a common yardstick, runs of 13 consecutive words. We
# cut each exam prompt into all such runs, look for the training prompt that contains most of them, and report that
# share.

# %%
exams = data.exam_prompts(cfg.evaluation, verilog.questions)
questions, example_of = data.questions_of(examples)
exact_questions, closest = data.overlap(questions, exams)
exact = {example_of[question] for question in exact_questions}
print(f"{len(exact)} training examples ask one of {len(exams)} evaluation prompts")
style.words(pd.DataFrame(data.closest_rows(closest, exams, questions, 4)))

# %% [markdown]
# **Suppose much of an exam prompt also occurs in a training row. Is that a leak?**
#
# <details><summary>Answer</summary>
#
# Look at the last two columns, with the words that only one of the two prompts has. If they're little more than a width
# or a name, it's nearly a leak, as with the tiny set's counter. If they name another task, the two share only phrases:
# an opening, a list of ports. At size tiny there's a lot of both, because one program with one set of phrases wrote the
# rows and the exam, and the exam's 38 problems are of the 38 kinds that are trained. So a tiny model that passes has
# learned these kinds of modules, and we can't say more. In real data it would be an alarm, and CodeV-R1's authors did
# remove rows close to verilog-eval.
#
# </details>
#
# **Compare before you train. Afterward nobody can tell.**
#
# ## 6. How long are they, and what do we drop?
# **Why drop a long example instead of cutting it?** Because a cut one would teach the model to stop in the middle of a
# module. But where should the limit be? If it's low, we lose examples. If it's high, there's padding: all rows have the
# same length, so with one example per row they have to be as long as the limit. Packing changes that, because several
# whole examples share a row (section 7). In the table below, compare the two columns of real tokens: with packing, a
# high limit wastes little.

# %%
all_ids, all_masks = chat.render_all(tokenizer, chats)
lengths = np.array([len(ids) for ids in all_ids])
packing.check_limits(lengths, cfg.max_tokens, cfg.sequence_length)
print(f"{len(lengths):,} examples, {lengths.sum():,} tokens")
limits = np.percentile(lengths, [50, 90, 99, 100]).astype(int)
limits = sorted({*limits.tolist(), cfg.max_tokens})
study = packing.length_study(lengths, limits, cfg.sequence_length, cfg.seed)
study.style.format("{:.1%}").format("{:,}", subset=["packed: row length"])

# %% [markdown]
# We hold out a few percent for validation. **Why not simply take the last hundred rows?**
#
# <details><summary>Answer</summary>
#
# Because the same question may be there twice, once on either side, and then the held-out loss measures
# memory. So we choose by a hash of the prompt, and the same prompt always falls on the same side, in this run
# and in the next.
#
# </details>

# %%
fits = np.flatnonzero(lengths <= cfg.max_tokens).tolist()
kept = [place for place in fits if place not in exact]
dropped["too long"] = len(examples) - len(fits)
dropped["in the evaluation set"] = len(fits) - len(kept)
parts = data.split(examples, kept, cfg.validation)
table = {"rows read": len(rows), **{f"dropped: {why}": -count for why, count in dropped.items()},
         "train": len(parts["train"]), "validation": len(parts["val"])}
pd.Series(table, name="rows").map("{:,}".format).to_frame()

# %% [markdown]
# **Drop what's too long, never cut it, and hold out by prompt.**
#
# ## 7. Packing
# **How do several examples share a row without seeing each other?** Besides `tokens` and `loss_mask`, a row has two
# more arrays. `segment_ids` number its examples 1, 2, 3 …, with 0 for padding, and `positions` start again at 0 in each
# example. Notebook 03 makes the attention mask from the segment ids, so no example sees its neighbor.
#
# Which example goes into which row? `fill_rows` takes them in random order and puts each one into the
# fullest row that still has room for it, which is called *best fit*.

# %%
helpers.show_source(packing.fill_rows)

# %%
arrays = {}
for name, part in parts.items():
    ids, masks = [all_ids[i] for i in part], [all_masks[i] for i in part]
    arrays[name] = packing.pack_arrays(ids, masks, cfg.sequence_length, cfg.seed)
facts = packing.facts_of(arrays, {name: len(part) for name, part in parts.items()})
print(f"{facts['train_examples']:,} examples in {facts['train_rows']:,} rows of "
      f"{cfg.sequence_length:,}: {facts['examples_per_row']:.1f} per row, {facts['fill']:.1%} of "
      "the tokens are real")

# %% [markdown]
# **With one example in each row, how full is a row?**

# %%
first_ten = parts["train"][:10]
ten_ids, ten_masks = [all_ids[i] for i in first_ten], [all_masks[i] for i in first_ten]
style.finish(pictures.draw_packing(arrays["train"], ten_ids, ten_masks), "02_packed",
             "ten rows of this dataset, computed above")

# %% [markdown]
# Within a row each color is an example. A padding token costs a step almost as much as a real one, so a row that's twice
# as full trains twice as much text for nearly the same work. With CodeV-R1's published lengths, packed rows of 4,096 are
# at least 95% full (`tests/test_data.py`). With one example in each, rows of 3,072 would be 30% full.
#
# **Packing is the cheapest speed-up in this series.**
#
# ## 8. Save for notebook 03
# **What does 03 need?** The four arrays as plain `.npy` files, for training and for validation. `samples.json` holds
# three held-out examples that 03 asks before and after training. `meta.json` records the settings that later notebooks
# have to agree with, and a hash of each file.

# %%
meta = asdict(cfg) | facts | {
    "size": helpers.size(), "rows_in": len(rows), "rows_kept": len(kept), "dropped": dict(dropped),
    "template_sha256": chat.template_sha256(tokenizer), "tokenizer": cfg.base,
    "base_model": Path(cfg.base).name if Path(cfg.base).is_dir() else cfg.base,
    "base_path": cfg.base}
samples = data.pick_samples(examples, chats, lengths, parts["val"])
packing.save_data(helpers.run_dir("data"), arrays, samples, meta)
for path in sorted(helpers.run_dir("data").rglob("*.*")):
    print(f"{path.stat().st_size / 1e3:10,.1f} kB  {path.relative_to(helpers.run_dir())}")

# %% [markdown]
# **03 checks these hashes before it trains on a single row.**
#
# ## Recap
# - An example is the *served* prompt, the answer and `<turn|>`, built once, together with its mask.
# - Examples are dropped for a reason and never cut, and prompts that equal an exam's are out.
# - Packing puts several examples into a row. Segment ids and restarted positions keep them apart.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. Your chat holds a bad answer that somebody corrected. You'd like the model to read it, but not to learn it. Give that
#    message a `"weight": 0`, and guess which tokens turn blue. Then draw the chat.
#
# <details><summary>Solution</summary>
#
# ```python
# mended = {"messages": [
#     {"role": "user", "content": "Write an inverter."},
#     {"role": "assistant", "content": "assign y = a;", "weight": 0},
#     {"role": "user", "content": "It doesn't invert."},
#     {"role": "assistant", "content": "assign y = ~a;"}]}
# example, _ = data.clean(mended)
# ids, mask = chat.render(tokenizer, data.as_messages(example, None))
# style.show_tokens([tokenizer.decode([number]) for number in ids], mask, "02_mended")
# ```
#
# Only `assign y = ~a;` and the `<turn|>` behind it are blue. Without the `weight` both answers would be.
#
# </details>
#
# 2. *Best fit* puts an example into the fullest row that has room. Would *worst fit*, the emptiest row, be better,
#    because it leaves no small gaps? Guess how full the rows get, then try it.
#
# <details><summary>Solution</summary>
#
# ```python
# def worst_fit(lengths, length, seed):
#     free = []  # places left in each row
#     for example in np.random.default_rng(seed).permutation(len(lengths)):
#         if not free or max(free) < lengths[example]:
#             free.append(length)
#         free[free.index(max(free))] -= lengths[example]
#     return free
#
#
# kept_lengths = lengths[parts["train"]]
# free = worst_fit(kept_lengths, cfg.sequence_length, cfg.seed)
# print(f"worst fit: {1 - sum(free) / len(free) / cfg.sequence_length:.1%} full")
# print(f"best fit:  {facts['fill']:.1%} full")
# ```
#
# Worst fit is worse. It spreads the free places over all rows, until no gap is large enough for a long example. Best
# fit wastes small gaps and keeps the large ones, and a long example needs a large one. The tiny examples are too much
# alike to show more than a small difference. With lengths like CodeV-R1's (drawn as in `tests/test_data.py`) in rows of
# 2,048 tokens, worst fit fills 88%, and best fit 96%.
#
# </details>
#
# 3. A chat with two answers becomes one example here, and its first answer doesn't follow the empty thought channel
#    that the server would put there. Can you make one example for each answer instead, exactly as it would be served?
#    `chat.prompt_ids(tokenizer, messages, thinking)` gives the ids of a served prompt, and `chat.render` those of a whole
#    chat. To check, decode the trained ids of each example: you should get one answer and `<turn|>`, and nothing else.
#
# <details><summary>Solution</summary>
#
# ```python
# def one_row_per_answer(tokenizer, messages):
#     for place, message in enumerate(messages):
#         if message["role"] == "assistant":
#             thinking = bool(message.get("reasoning"))
#             prompt = chat.prompt_ids(tokenizer, messages[:place], thinking)
#             ids, _ = chat.render(tokenizer, messages[:place + 1])
#             yield ids, [position >= len(prompt) for position in range(len(ids))]
#
#
# for ids, mask in one_row_per_answer(tokenizer, max(own_chats, key=len)):
#     print(repr(tokenizer.decode([number for number, trained in zip(ids, mask) if trained])))
# ```
#
# It prints each answer once. The earlier ones are rendered again as context in each row. That costs more tokens, but
# now every trained token follows exactly what the server will send.
#
# </details>
#
# Next: [03 · LoRA on Gemma 4: every matrix, every token, every bit](03_train.ipynb), on these rows.
