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
# exactly the tokens that the served model will see, mark the ones to train, and pack several examples into each row, so
# that little of it is padding.
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
# **What do you have to decide before you look at any data?** Five things:
#
# - `source` is the dataset.
# - `rows` says how much of it you use. The published recipe that this series follows (h2loop, arXiv 2605.25645) used
#   10,000 of 87,321.
# - `system` is the one sentence that opens every prompt, here and in every request later in the series.
# - `base` is the model, a name on the hub or a folder. It can be Gemma 4 31B, 12B, E4B or E2B.
# - `max_tokens` says which examples are too long. On Kaggle's v5e-8 the limit is 2,048 tokens, because its chips are
#   small. So you lose the longest examples, which hold 8% of the published data's tokens.

# %%
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

import verilog
from helpers import chat, data, late_mask, packing, remote, style
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
# on that very problem. Here's its sibling in the training set:

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
# A row can have any of these forms. **Which of them mean the same chat?**

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
# tokenizer knows little but Verilog and needs many tokens for anything else. So look at your rows here with the tiny
# model, and then train Gemma 4 E2B on them.
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
cleaned = [data.clean(row, cfg.reasoning == "kept") for row in rows]
examples = [example for example, problem in cleaned if not problem]
dropped = Counter(problem for _, problem in cleaned if problem)
row_ends = {problem: repr(row)[-100:] for row, (_, problem) in zip(rows, cleaned) if problem}
print(f"{len(examples):,} of {len(rows):,} rows are usable")
if not examples:
    raise helpers.UserError(f"No row of {cfg.source} is usable: {dict(dropped)}. Section 2 of 02 "
                            "shows the forms that a row can have.")
print(*data.remarks(examples), sep="\n")
pd.DataFrame([(problem, count, row_ends[problem]) for problem, count in dropped.items()],
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
# and 07 send prompts that come from the same function. It encodes what people wrote with control tokens switched
# off: a user who types `<turn|>` gets those seven characters, not the end of a turn.
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
# ### Several answers, and tools
# **What should a model learn from a chat with tools?** It writes the call to a function, but somebody else writes the
# function's result.

# %%
add = {"name": "add", "description": "Adds two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}
calls = [{"id": "1", "function": {"name": "add", "arguments": {"a": 4, "b": 8}}}]
with_tools = {"tools": [add], "messages": [
    {"role": "user", "content": "How wide is the bus?"},
    {"role": "assistant", "content": None, "tool_calls": calls},
    {"role": "tool", "tool_call_id": "1", "content": "12"},
    {"role": "assistant", "content": "The bus is 12 bits wide."}]}
example, _ = data.clean(with_tools)
ids, mask = chat.render(tokenizer, data.as_messages(example, None))
style.show_tokens([tokenizer.decode([number]) for number in ids], mask, "02_tools",
                  f"A call and an answer: {sum(mask)} of {len(ids)} tokens are trained")

# %% [markdown]
# The call is trained, and so is the `<|tool_response>` after it, because that's where the model has to stop
# and wait. The result is only read. Then the same turn goes on with the answer.
#
# In the same way a chat with two answers becomes one example, and both are trained. But there's a price: only the last
# answer follows an empty thought. Before the earlier answer the template leaves it out, as the server will when it
# sends that answer again as part of a longer chat. The exercise makes one example of each answer instead.
#
# **Everything the model writes is trained, and nothing else.**
#
# ### A trap: counting pieces
# **What if you build the tokens first, and then count where the answer begins?** The published recipe tokenized the
# whole chat, and then every piece of it again to count lengths. Its tokenizer adds two tokens, `<bos>` and `<eos>`
# (begin and end of a sequence), to each piece. Three pieces come before the answer, so its mask starts 3 × 2 = 6
# tokens late, and it also trains tokens after the end of the turn. ([10](10_published.ipynb) has the rest.)
#
# In the picture only the orange and red tokens are the mask's fault. (The prompts differ, too, because that recipe has
# neither our system message nor the thought channel.)

# %%
compared = running
if len(running) > 3 or "tools" in running[0]:  # the published recipe knows no such chat
    compared = understood[0]
style.finish(late_mask.draw_both(tokenizer, compared), "02_tokens",
             "one row of this dataset, both ways, computed above")
style.fold_source("published_row: how the recipe counts", late_mask.published_row)

# %% [markdown]
# ### What does a mask in the wrong place do?
# We trained the tiny base three times, with the same rows, steps and seed. One mask trains the answer, one trains the
# prompt as well, and one starts six tokens late. Then 07's judge, a simulator, counted how many answers pass. **Which
# mask fails completely, and does its loss give it away?**

# %%
runs = late_mask.read_runs()
style.finish(late_mask.draw_runs(runs), "02_masks",
             f"data/masks: tiny, {runs.steps.iloc[0]} steps each, measured")
for name, of_mask in runs.groupby("mask"):
    print(f"{late_mask.NAMES[name]:27} loss {of_mask.loss.mean():.4f}, greedily "
          f"{of_mask.greedy.mean():.0f} of {of_mask.problems.iloc[0]} problems")

# %% [markdown]
# The loss won't tell you, because the run that passes nothing ends with a loss as low as the right one. (The middle
# loss is higher because it's over other tokens: prompts are hard to guess.)
#
# <details><summary><b>Why does the late mask fail?</b></summary>
#
# The first six tokens of an answer, the opening fence and the start of the module's header, are never trained. So
# most likely the model never learns to begin an answer, and without the beginning the rest is useless.
#
# </details>
#
# If the prompt is trained, too, the same steps teach less of what you wanted: in these runs far fewer answers pass when
# they're *sampled* (each token is drawn by its probability), and a few fewer when they're greedy.
# (`python -m appendix.masks` adds two seeds.)
#
# **A wrong mask raises no error, and the loss doesn't show it. Look at the tokens.**
#
# ## 5. Is the test in the training set?
# **Could a model have seen the exam?** If it has, passing proves nothing. So `data.overlap` compares every
# training prompt with every exam prompt, in two ways. Prompts that are equal except for case, spaces
# and line breaks get dropped in section 6. For the others we use a common yardstick, runs of 13 consecutive words: what
# share of an exam prompt's runs also occurs in one training prompt?

# %%
def exam_prompts(evaluation):
    """{name: prompt} of a folder of Verilog problems, or of a .jsonl file of questions."""
    if evaluation.endswith(".jsonl"):
        problems = verilog.questions(evaluation).problems
        return {question.name: question.prompt for question in problems}
    if Path(evaluation).is_file():
        raise helpers.UserError(f"evaluation={evaluation!r} is a file. Name a folder of problems, "
                                "or a .jsonl file with a question and its answer on each line.")
    return data.read_exams(remote.checkout(evaluation))


exams = exam_prompts(cfg.evaluation) if cfg.evaluation else {}
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
# or a name, it's nearly a leak. In the tiny data that can't be avoided, because the program that wrote it has just one
# set of phrases. In real data it would be an alarm, and CodeV-R1's authors did remove rows close to verilog-eval.
#
# </details>
#
# **Compare before you train. Afterward nobody can tell.**
#
# ## 6. How long are they, and what do we drop?
# **Why drop a long example instead of cutting it?** Because a cut one would teach the model to stop in the middle of a
# module. But where should the limit be? If it's low, we lose examples. If it's high and each example gets a row of its
# own, rows have to be as long as the limit, so most of a row is padding. Packing changes that, because several whole
# examples share a row (section 7). As the last two columns show, a high limit then wastes little.

# %%
all_ids, all_masks = chat.render_all(tokenizer, chats)
lengths = np.array([len(ids) for ids in all_ids])
if not lengths.min() <= cfg.max_tokens <= cfg.sequence_length:
    raise helpers.UserError(f"max_tokens={cfg.max_tokens} is shorter than every example (the "
                            f"shortest has {lengths.min()} tokens), or does not fit into rows of "
                            f"{cfg.sequence_length} (sequence_length).")
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
parts = {"train": [], "val": []}
for place in kept:
    side = "val" if data.held_out(examples[place]["prompt"], cfg.validation) else "train"
    parts[side].append(place)
if not all(parts.values()):
    raise helpers.UserError(f"{len(kept)} rows with validation={cfg.validation} leave one side "
                            "empty: use more rows or another share.")
table = {"rows read": len(rows), **{f"dropped: {why}": -count for why, count in dropped.items()},
         "train": len(parts["train"]), "validation": len(parts["val"])}
pd.Series(table, name="rows").to_frame()

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
arrays = {}
for name, part in parts.items():
    ids, masks = [all_ids[i] for i in part], [all_masks[i] for i in part]
    arrays[name] = packing.pack_arrays(ids, masks, cfg.sequence_length, cfg.seed)
facts = packing.facts_of(arrays, {name: len(part) for name, part in parts.items()})
print(f"{facts['train_examples']:,} examples in {facts['train_rows']:,} rows of "
      f"{cfg.sequence_length:,}: {facts['examples_per_row']:.1f} per row, {facts['fill']:.1%} of "
      "the tokens are real")

# %% [markdown]
# **With one example in each row, how much of a row is padding?**

# %%
train = arrays["train"]
single_rows = [packing.pack_arrays([all_ids[i]], [all_masks[i]], cfg.sequence_length, 0)
               for i in parts["train"][:10]]
alone = {name: np.concatenate([row[name] for row in single_rows]) for name in train}
real = (alone["segment_ids"] > 0).mean()
packed = (train["segment_ids"][:10] > 0).mean()
fig, axes = style.figure(7.74, 4.6, rows=2)
style.draw_rows(axes[0], alone, f"One example per row: these ten are {real:.0%} full")
style.draw_rows(axes[1], train, f"Packed: these ten are {packed:.0%} full, all {facts['fill']:.0%}")
axes[1].set(xlabel="token of the row (white: padding; light: context; dark: trained)")
style.finish(fig, "02_packed", "ten rows of this dataset, computed above")

# %% [markdown]
# Within a row each color is an example. A padding token costs a step almost as much as a real one, so the packed rows
# train about three times as much text for the same arithmetic. With CodeV-R1's published lengths, packed rows of 4,096
# are at least 95% full (`tests/test_data.py`), but with one example in each row of 3,072 it would be 30%.
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
# ### Exercise
# A chat with two answers becomes one example here, and its first answer doesn't follow the empty thought channel
# that the server would put there. The same goes for a tool call that comes before an answer. Can you make one
# example for each answer instead, exactly as it would be served? `chat.prompt_ids(tokenizer, messages, thinking)` gives
# the ids of a served prompt, and `chat.render` those of a whole chat. You're right if the trained ids of each example,
# decoded, are exactly one answer and `<turn|>`.
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
