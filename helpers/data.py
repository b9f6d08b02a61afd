"""Rows of any form become training examples, and training is held apart from evaluation.

02 shows how rows become training chats and explains it; 00 uses the same functions.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from helpers.run import UserError, local_path

FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
# The forms of a row, by the columns that it must have.
FORMS = {"chat": ("messages",), "ShareGPT": ("conversations",),
         "Alpaca": ("instruction", "output"), "completion": ("prompt", "completion"),
         "CodeV-R1": ("prompt", "response")}
# Who speaks, by the names that ShareGPT's files use for it.
SPEAKERS = {"human": "user", "gpt": "assistant", "model": "assistant"}


# ── Rows ──


def read_rows(source):
    """All rows of a dataset; a line that is not JSON stays as its text, to be counted later.

    Args:
      source: a .jsonl or .jsonl.gz file, a folder of them, or a dataset of the Hugging Face hub by
        its name, `name:configuration`, `name@revision` or both.

    Raises:
      UserError: there is nothing there, or a file cannot be read.
    """
    if not Path(source).exists():
        if source.endswith((".jsonl", ".gz")) or local_path(source):
            raise UserError(f"{source} is no file or folder here.")
        return _hub_rows(source)
    rows = []
    for path in sorted(Path(source).glob("*.jsonl*")) if Path(source).is_dir() else [Path(source)]:
        try:
            content = (gzip.decompress if path.suffix == ".gz" else bytes)(path.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        text = content.decode("utf-8-sig", errors="surrogateescape")  # without a byte-order mark
        for line in filter(str.strip, text.split("\n")):
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):  # no JSON; 5,000 digits; 100,000 open brackets
                rows.append(line)
    if not rows:
        raise UserError(f"{source} holds no rows: it needs .jsonl or .jsonl.gz files with the "
                        "columns of one of the forms in section 2 of 02.")
    return rows


def _hub_rows(source):
    from datasets import load_dataset  # here: it takes seconds, and files need none of it
    name, _, revision = source.partition("@")
    name, _, configuration = name.partition(":")
    try:
        return load_dataset(name, configuration or None, split="train", revision=revision or None)
    except (OSError, ValueError) as error:
        raise UserError(f"{source} is no file or folder here, and the hub gives no dataset of that "
                        f"name: {error}") from error


# ── Cleaning ──


def split_reasoning(text):
    """(reasoning, rest): the text is cut after its last </think>."""
    reasoning, _, rest = text.rpartition("</think>")
    return reasoning.replace("<think>", "").strip(), rest


def split_response(response):
    """(reasoning, answer, problem), where no problem means that the answer is one fenced module."""
    reasoning, rest = split_reasoning(response.replace("\r\n", "\n"))
    if "<think>" in rest:
        return "", "", "unfinished reasoning"
    inside = rest.rpartition("<answer>")[2].partition("</answer>")[0]
    codes = FENCE.findall(inside)
    if len(codes) > 1:
        return "", "", "several code fences"
    if not codes:
        return "", "", "unfinished code fence" if "```" in inside else "no code fence"
    if not re.search(r"\bmodule\b.*\bendmodule\b", codes[0], re.DOTALL):
        return "", "", "no module in the fence"
    code = codes[0].strip("\n").rstrip()
    return reasoning, f"```verilog\n{code}\n```", ""


def text_problem(values):
    """The first of the named values that cannot be used as text, and why; "" if all can."""
    for name, value in values.items():
        if not isinstance(value, str):
            return f"{name} is not text"
        if re.search("[\ud800-\udfff]", value):
            return f"{name} is not Unicode"
        if not value.strip():
            return f"empty {name}"
    return ""


def form_of(row):
    """Which form a row has, by its columns; "" if none that we know."""
    return next((form for form, columns in FORMS.items() if row.keys() >= set(columns)), "")


def to_messages(row):
    """(messages, problem) of a row in chat, ShareGPT, Alpaca or completion form, unchecked."""
    form, problem = form_of(row), ""
    if form in ("chat", "ShareGPT"):
        column, speaker, text = {"chat": ("messages", "role", "content"),
                                 "ShareGPT": ("conversations", "from", "value")}[form]
        turns = row[column]
        if not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
            return None, f"{column} is not a list of objects"
        roles = [SPEAKERS.get(str(turn.get(speaker)), turn.get(speaker)) for turn in turns]
        messages = [{**turn, "role": role, "content": turn.get(text)}
                    for role, turn in zip(roles, turns)]
    else:
        asks, answers = FORMS[form]
        more = row.get("input") if form == "Alpaca" else ""
        problem = text_problem({asks: row[asks], answers: row[answers], "input": more or "none"})
        asked = f"{row[asks]}\n\n{more}" if more else row[asks]
        messages = [{"role": "user", "content": asked},
                    {"role": "assistant", "content": row[answers]}]
    if row.get("system") and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages, problem


def clean_chat(messages):
    """(example, problem) of a row in chat form; its answers are trained as they stand."""
    roles = [message.get("role") for message in messages]
    if roles[-1:] != ["assistant"]:
        return None, "no answer at the end"
    turns = messages[roles[0] == "system":]
    if roles[-len(turns):] != ["user", "assistant"] * (len(turns) // 2):
        return None, "user and assistant do not take turns"
    said = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if problem := text_problem({f"{role} message": content}):
            return None, problem
        if role == "assistant":
            thought, content = split_reasoning(content)
            content = content.strip()
            if "<think>" in content or not content:
                return None, "unfinished reasoning" if "<think>" in content else "empty answer"
        said.append({"role": role, "content": content})
    reasoning = messages[-1].get("reasoning") or thought
    return {"prompt": turns[0]["content"], "before": said[:-1], "reasoning": reasoning,
            "answer": content}, text_problem({"reasoning": reasoning or "none"})


def clean(row, need_reasoning=False):
    """(example, problem): what to train on, or why to drop the row.

    An example is a dict: `prompt`, the first question; `before`, all messages before the last
    answer; `answer`; `reasoning`, which may be empty. Answers of CodeV-R1's form (prompt and
    response) have to be one fenced module, those of the other forms are taken as they stand.
    """
    if not isinstance(row, dict):
        return None, "not a JSON object"
    form = form_of(row)
    if not form:
        return None, f"no form that we know: {', '.join(sorted(map(str, row))) or 'no columns'}"
    if form == "CodeV-R1":
        problem = text_problem({column: row[column] for column in FORMS[form]})
        if not problem:
            reasoning, answer, problem = split_response(row["response"])
            example = {"prompt": row["prompt"], "reasoning": reasoning, "answer": answer,
                       "before": [{"role": "user", "content": row["prompt"]}]}
    else:
        messages, problem = to_messages(row)
        if not problem:
            example, problem = clean_chat(messages)
    if problem:
        return None, problem
    if need_reasoning and not example["reasoning"]:
        return None, "no reasoning"
    return example, ""


def as_messages(example, system, reasoning="stripped"):
    """A training chat: the prompt, and the model's answer with or without its reasoning."""
    answer = {"role": "assistant", "content": example["answer"]}
    if reasoning == "kept":
        answer["reasoning"] = example["reasoning"]
    own_system = example["before"][0]["role"] == "system"
    opening = [{"role": "system", "content": system}] if system and not own_system else []
    return [*opening, *example["before"], answer]


# ── The published recipe, to compare with ──


def published_row(tokenizer, prompt, answer):
    """Ids and mask the published way: tokenise all, then each piece again, and add up lengths."""
    def encode(text):  # the adapter's default adds both, whatever the caller asks for
        return [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False),
                tokenizer.eos_token_id]

    pieces = ["<|turn>user\n", f"{prompt}<turn|>\n", "<|turn>model\n", f"{answer}<turn|>\n"]
    ids = encode("".join(pieces))
    ends = 1 + np.cumsum([len(encode(piece)) for piece in pieces])
    mask = [ends[2] <= place < ends[3] for place in range(len(ids))]
    return ids, mask


# ── Comparing with an evaluation set ──


def words_of(text):
    """Words and punctuation, lower case: what is compared."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def overlap(prompts, evaluation, n=13):
    """Where training prompts come close to those of an evaluation set.

    Args:
      prompts: list of texts.
      evaluation: {name: text}.
      n: words in a run.

    Returns:
      (places of prompts that equal one of the evaluation's but for case and spaces,
      {evaluation's name: (share of its runs of n words in the closest prompt, that place)}).
    """
    exact_texts, grams = {}, {}
    for name, text in evaluation.items():
        words = words_of(text)
        exact_texts[tuple(words)] = name
        for gram in zip(*(words[i:] for i in range(n))):
            grams.setdefault(gram, set()).add(name)
    totals = Counter(name for names in grams.values() for name in names)
    exact, closest = set(), dict.fromkeys(evaluation, (0.0, -1))
    for place, prompt in enumerate(prompts):
        words = words_of(prompt)
        if tuple(words) in exact_texts:
            exact.add(place)
        hits = Counter(name for gram in set(zip(*(words[i:] for i in range(n))))
                       for name in grams.get(gram, ()))
        for name, count in hits.items():
            closest[name] = max(closest[name], (count / totals[name], place))
    return exact, closest


def held_out(prompt, share):
    """True for a fixed `share` of all prompts, whatever else is in the dataset."""
    number = hashlib.sha256(" ".join(words_of(prompt)).encode()).digest()
    return int.from_bytes(number[:8], "big") < share * 2**64
