"""Turns rows of any form into training examples, and keeps training apart from evaluation.

02 shows how rows become training chats and explains it; 00 uses the same functions. Most functions
here give a pair of a value and a problem. The problem is the reason why a row is dropped, or "".
"""

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helpers import chat, remote, tools
from helpers.records import thinks
from helpers.run import UserError, local_path
from tables.texts import fences, json_lines, places_outside, split_thought, text_problem

FENCE_OPENS = re.compile(r"^[ \t]*```[^\n`]*\n", re.MULTILINE)
FENCE_CLOSES = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
MODULE = re.compile(r"\bmodule\b.*\bendmodule\b", re.DOTALL)
# The forms of a row, by the columns that it must have.
FORMS = {
    "chat": ("messages",),
    "ShareGPT": ("conversations",),
    "Alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "CodeV-R1": ("prompt", "response"),
}
# What else is used of a row of that form.
MORE_COLUMNS = {
    "chat": ("system", "tools"),
    "ShareGPT": ("system", "tools"),
    "Alpaca": ("input", "system", "tools"),
    "completion": ("system", "tools"),
    "CodeV-R1": (),
}
# The keys of a message that are used, by who speaks.
ROLE, TEXT = ("role", "from"), ("content", "value")
WEIGHTS = ("weight", "train")
REASONING = ("reasoning", "reasoning_content", "thinking")
MORE_KEYS = {
    "assistant": (*WEIGHTS, *REASONING, "tool_calls"),
    "tool": ("tool_call_id", "name"),
}
NOTHING: tuple = (None, "", [], {})
# What is said of thoughts.
STRIPPED = "thoughts of assistant messages"
NONE_TO_TRAIN = "no reasoning to train after the last question"
BEFORE_A_THOUGHT = ("what the model says before the last turn's first thought isn't trained, "
                    "because reasoning is kept")
# Who speaks, by the names that ShareGPT's files use for it.
SPEAKERS = {"human": "user", "gpt": "assistant", "model": "assistant"}
# What answers end with, and prompts hold, that were rendered before: here it's plain letters.
ENDS = re.compile(
    r"(<eos>|</s>|<end_of_turn>|<turn\|>|<\|im_end\|>|<\|eot_id\|>|<\|end_of_text\|>"
    r"|<\|endoftext\|>)\s*$")
RENDERED = re.compile(
    r"<start_of_turn>|<\|turn>|\[INST\]|<\|im_start\|>|<\|start_header_id\|>")
# Calls as files write them into a text (Hermes, When2Call, Glaive), and as Gemma 4 writes them.
CALL_TAGS = re.compile(r"<\|?/?(tool|function)_?call\|?>", re.IGNORECASE)

Row = dict[str, Any]


# ── Rows ──


def read_rows(source: str) -> Any:
    """All rows of a dataset; a line that is not JSON stays as its text, to be counted later.

    Args:
      source: a file of JSON lines (packed if it ends in .gz), a folder of .jsonl and .jsonl.gz
        files, or a dataset of the Hugging Face hub by its name, `name:configuration`,
        `name@revision` or both.

    Raises:
      UserError: there is nothing there, or a file cannot be read.
    """
    place = Path(source).expanduser()
    if not place.exists():
        if source.endswith((".jsonl", ".gz")) or local_path(source):
            raise UserError(f"{source} isn't a file or folder here.")
        return _hub_rows(source)
    files = [place]
    if place.is_dir():
        files = [path for path in sorted(place.iterdir()) if _is_data(path)]
    rows = []
    for path in files:
        rows += _rows_of(_content(path))
    if not rows:
        raise UserError(f"{source} holds no rows: it needs .jsonl or .jsonl.gz files with the "
                        "columns of one of the forms in docs/OWN_DATA.md.")
    return rows


def _is_data(path: Path) -> bool:
    """Is this a data file? Editors' backups and hidden files hold the same rows once more."""
    if path.name.startswith(".") or not path.is_file():
        return False
    return path.name.endswith((".jsonl", ".jsonl.gz"))


def _content(path: Path) -> bytes:
    """The bytes of a file, unpacked if they're packed."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _rows_of(content: bytes) -> list[Any]:
    """The rows of a file of JSON lines, or of a file that is one JSON array."""
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        try:
            whole = json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            whole = None
        if isinstance(whole, list):
            return whole
    rows = []
    for line in json_lines(content):
        rows.append(line.text if line.problem else line.value)
    return rows


def _hub_rows(source: str) -> Any:
    """The training split of a dataset on the hub, by `name:configuration@revision`."""
    from datasets import load_dataset  # here: it takes seconds, and files need none of it
    name, _, revision = source.partition("@")
    name, _, configuration = name.partition(":")
    try:
        return load_dataset(name, configuration or None, split="train", revision=revision or None)
    except (OSError, ValueError) as error:
        raise UserError(f"{source} isn't a file or folder here, and the hub has no dataset of that "
                        f"name: {error}") from error


# ── Which form is it? ──


def form_of(row: Row) -> str:
    """Which form a row has, by the columns that it fills; "" if none that we know.

    A row without a filled form gets the first one whose columns it has at all, so that the reason
    for dropping it can name the column that's empty.
    """
    empty_form = ""
    for form, columns in FORMS.items():
        if not row.keys() >= set(columns):
            continue
        values = [row[column] for column in columns]
        if None not in values and [] not in values:
            return form
        if not empty_form:
            empty_form = form
    return empty_form


def to_messages(row: Row) -> tuple[list[Row], str]:
    """(messages, problem) of a row in chat, ShareGPT, Alpaca or completion form, unchecked."""
    form = form_of(row)
    if form in ("chat", "ShareGPT"):
        [column] = FORMS[form]
        messages, problem = _messages_of_turns(row, column)
    else:
        messages, problem = _question_and_answer(row, form)
    if problem:
        return [], problem

    if _opens_with_system(messages) and _blank(messages[0]["content"]):
        del messages[0]
    system = row.get("system")
    if not _blank(system) and not _opens_with_system(messages):
        opening = {"role": "system", "content": system}
        messages.insert(0, opening)
    return messages, ""


def _messages_of_turns(row: Row, column: str) -> tuple[list[Row], str]:
    """(messages, problem) of a row that has its chat as a list in one column."""
    turns = row[column]
    if not isinstance(turns, list):
        return [], f"{column} is not a list of objects"
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            return [], f"{column} is not a list of objects"
        messages.append(_message(turn))
    return messages, ""


def _question_and_answer(row: Row, form: str) -> tuple[list[Row], str]:
    """(messages, problem) of a row that has a question in one column, and its answer in another."""
    question_column, answer_column = FORMS[form]
    question = row[question_column]
    answer = row[answer_column]
    texts = {question_column: question, answer_column: answer}

    more = row.get("input")
    if form == "Alpaca" and not _blank(more):
        texts["input"] = more
        question = f"{question}\n\n{more}"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return messages, text_problem(texts)


def _message(turn: Row) -> Row:
    """A turn with `role` and `content`, whichever names the file has for them."""
    speaker = _first_of(turn, ROLE)
    message = {
        "role": SPEAKERS.get(str(speaker), speaker),
        "content": _first_of(turn, TEXT),
    }
    for key, value in turn.items():
        if key not in ROLE + TEXT:
            message[key] = value
    return message


def _first_of(turn: Row, names: Sequence[str]) -> Any:
    """The value under the first of several names that has one."""
    for name in names:
        if turn.get(name) is not None:
            return turn[name]
    return None


def _blank(value: Any) -> bool:
    """Is it nothing, or a text of spaces alone?"""
    if isinstance(value, str):
        value = value.strip()
    return not value


def _opens_with_system(messages: Sequence[Row]) -> bool:
    return bool(messages) and messages[0]["role"] == "system"


# ── Cleaning ──


def split_response(response: str) -> tuple[str, str, str]:
    """(reasoning, answer, problem), where no problem means that the answer is one fenced module."""
    reasoning, rest, closed = split_thought(response.replace("\r\n", "\n"))
    if not closed:
        return "", "", "unfinished reasoning"
    inside = _inside_answer_tags(rest)
    codes = _fenced_codes(inside)
    if len(codes) > 1:
        return "", "", "several code fences"
    if not codes and "```" in inside:
        return "", "", "unfinished code fence"
    if not codes:
        return "", "", "no code fence"

    [code] = codes
    if not MODULE.search(code):
        return "", "", "no module in the fence"
    code = code.strip("\n").rstrip()
    return reasoning, f"```verilog\n{code}\n```", ""


def _fenced_codes(text: str) -> list[str]:
    """What stands in the closed code fences of a text. The time grows with its length alone."""
    codes = []
    place = 0
    while opening := FENCE_OPENS.search(text, place):
        closing = FENCE_CLOSES.search(text, opening.end())
        if not closing:  # nor is there one for any later opening
            break
        codes.append(text[opening.end():closing.start()])
        place = closing.end()
    return codes


def _inside_answer_tags(text: str) -> str:
    """What the last <answer> holds, or the whole text; in code the tags are a comment's letters."""
    spans = fences(text)
    first = 0
    openings = places_outside(text, "<answer>", spans)
    if openings:
        first = openings[-1] + len("<answer>")
    for closing in places_outside(text, "</answer>", spans):
        if closing >= first:
            return text[first:closing]
    return text[first:]


def clean_chat(messages: Sequence[Row], functions: Sequence[Row] = ()) -> tuple[Row | None, str]:
    """(example, problem) of a chat; its answers are trained as they stand.

    Args:
      messages: from `to_messages`.
      functions: from `tools.tools_of`: what the chat may call.
    """
    complete = []
    nulls = False
    for given in messages:
        message = tools.without_filled_nulls(given, functions)
        if message != given:
            nulls = True
        calls, problem = tools.calls_of(message)
        if problem:
            return None, problem
        complete.append({**message, "tool_calls": calls})
    problem = tools.order_problem(complete) or tools.name_results(complete)
    if problem:
        return None, problem

    cleaned = []
    for message in complete:
        kept, problem = _clean_message(message)
        if problem:
            return None, problem
        cleaned.append(kept)
    while cleaned and not cleaned[-1].get("train"):  # what follows the last trained answer
        cleaned.pop()
    if not cleaned:
        return None, "nothing to train: weight 0"
    example = _example(cleaned, functions)
    if nulls:
        example["unused"] = [tools.NULLS]
    return example, ""


def _clean_message(message: Row) -> tuple[Row, str]:
    """(message, problem): what is used of it."""
    role = message["role"]
    content = message["content"]
    if role == "assistant":
        return _clean_answer(message)
    if role == "tool":
        return _clean_result(message)
    return {"role": role, "content": content}, text_problem({f"{role} message": content})


def _clean_result(message: Row) -> tuple[Row, str]:
    """(message, problem) of a tool's, which may return nothing."""
    content = message["content"]
    if content in (None, []):
        content = ""
    kept = {
        "role": "tool",
        "content": content,
        "tool_call_id": message["tool_call_id"],
        "name": message["name"],
    }
    if isinstance(content, str) and not content.strip():
        return kept, ""
    return kept, text_problem({"tool message": content})


def _clean_answer(message: Row) -> tuple[Row, str]:
    """(message, problem) of the assistant's, with its thought apart and `train`, True or False."""
    content = message["content"]
    calls = message["tool_calls"]
    if calls and _blank(content):
        content = ""
    else:
        problem = text_problem({"assistant message": content})
        if problem:
            return {}, problem

    thought, answer, closed = split_thought(content)
    answer = answer.strip()
    if not closed:
        return {}, "unfinished reasoning"
    if not answer and not calls:
        return {}, "empty answer"
    reasoning, problem = _reasoning_of(message, thought)
    if problem:
        return {}, problem

    trained, problem = _is_trained(message)
    kept = {"role": "assistant", "content": answer, "reasoning": reasoning, "train": trained}
    if calls:
        kept["tool_calls"] = calls
    return kept, problem


def _reasoning_of(message: Row, thought: str) -> tuple[Any, str]:
    """(reasoning, problem) of an answer: from a key of its own, else the thought in its text."""
    reasoning: Any = thought
    for key in REASONING:
        if not _blank(message.get(key)):
            reasoning = message[key]
            break
    if not reasoning:
        return reasoning, ""
    return reasoning, text_problem({"reasoning": reasoning})


def _is_trained(message: Row) -> tuple[bool, str]:
    """(trained, problem) by the keys `weight` and `train` of a message of the assistant's."""
    trained = True
    for key in WEIGHTS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            return False, f"{key} is neither 0 nor 1"
        trained = trained and bool(value)
    return trained, ""


def _example(messages: Sequence[Row], functions: Sequence[Row]) -> Row:
    """The example of a chat that ends with a trained answer; see `clean`."""
    *before, last = messages
    questions = []
    for message in before:
        if message["role"] == "user":
            questions.append(message["content"])
        if message["role"] != "assistant":
            continue
        if message["train"]:
            del message["train"]  # only what isn't trained says so
        if not message["reasoning"]:
            del message["reasoning"]

    example = {
        "prompt": questions[0],
        "before": before,
        "reasoning": last["reasoning"],
        "answer": last["content"],
    }
    if "tool_calls" in last:
        example["tool_calls"] = last["tool_calls"]
    if functions:
        example["tools"] = list(functions)
    return example


def clean(row: Any, need_reasoning: bool = False,
          keep_reasoning: bool = False) -> tuple[Row | None, str]:
    """(example, problem): what to train on, or why to drop the row.

    An example is a dict: `prompt`, the first question; `before`, all messages before the last
    answer; `answer`; `reasoning`, which may be empty; `unused` and `odd`, lists of texts for
    `remarks`; and, in a chat with tools, `tools` and the last answer's `tool_calls`. Answers of
    CodeV-R1's form (prompt and response) have to be one fenced module, those of the other forms are
    taken as they stand.

    Args:
      row: from `read_rows`.
      need_reasoning: drop a chat whose last turn has no thought to train, neither before a call nor
        before the answer.
      keep_reasoning: thoughts are used where there are any. If neither is set, they're `unused`.
    """
    if not isinstance(row, dict):
        return None, "not a JSON object"
    form = form_of(row)
    if not form:
        return None, _no_form(row)
    if form == "CodeV-R1":
        example, problem = _clean_codev(row)
    else:
        example, problem = _clean_any(row)
    if example is None or problem:
        return None, problem

    if need_reasoning:
        problem = _thought_problem(example)
        if problem:
            return None, problem
    example["unused"] = [*example.get("unused", []), *_unused(row, form)]
    example["odd"] = _odd(example)
    if need_reasoning:
        example["odd"] += _odd_where_it_thinks(example)
    elif not keep_reasoning and _has_thoughts(example):
        example["unused"].append(STRIPPED)
    return example, ""


def _thought_problem(example: Row) -> str:
    """Why an example has no thought to train, or ""."""
    if chat.last_turn_thinks(as_messages(example, None, "kept")):
        return ""
    if _has_thoughts(example):
        return NONE_TO_TRAIN
    return "no reasoning"


class Cleaned(NamedTuple):
    """Rows that became examples, and rows that didn't."""

    examples: list[Row]
    dropped: Counter[str]  # {why: rows}
    ends: dict[str, str]   # {why: how one such row ends}


def _end_of(row: Any) -> str:
    """How a row's last text ends, or the row itself if it has none: 60 characters on one line."""
    texts = [repr(row)]
    if isinstance(row, Mapping):
        texts += [value for value in row.values() if isinstance(value, str)]
    return " ".join(texts[-1].split())[-60:]


def clean_all(rows: Sequence[Any], source: str, need_reasoning: bool = False,
              forms: str = "Section 2 of 02", keep_reasoning: bool = False) -> Cleaned:
    """`clean` for all rows of a dataset.

    Args:
      rows: from `read_rows`.
      source: where they come from, for the message.
      need_reasoning, keep_reasoning: as for `clean`.
      forms: where a reader sees what forms a row can have, for the message.

    Raises:
      UserError: no row is usable. The message counts the reasons.
    """
    examples = []
    dropped: Counter[str] = Counter()
    ends = {}
    for row in rows:
        example, problem = clean(row, need_reasoning, keep_reasoning)
        if example is not None:
            examples.append(example)
            continue
        dropped[problem] += 1
        ends[problem] = _end_of(row)
    if not examples:
        raise UserError(f"No row of {source} is usable: {dict(dropped)}. {forms} shows the "
                        "forms that a row can have.")
    return Cleaned(examples, dropped, ends)


def _no_form(row: Row) -> str:
    """Why a row without a known form can't be used, with its columns."""
    if row.keys() >= {"chosen", "rejected"}:
        return "a preference (chosen and rejected), not an answer to learn"
    columns = ", ".join(sorted(str(name) for name in row))
    return f"no form that we know: {columns or 'no columns'}"


def _clean_codev(row: Row) -> tuple[Row | None, str]:
    """(example, problem) of a row in CodeV-R1's form."""
    prompt = row["prompt"]
    response = row["response"]
    problem = text_problem({"prompt": prompt, "response": response})
    if problem:
        return None, problem
    reasoning, answer, problem = split_response(response)
    example = {
        "prompt": prompt,
        "before": [{"role": "user", "content": prompt}],
        "reasoning": reasoning,
        "answer": answer,
    }
    return example, problem


def _clean_any(row: Row) -> tuple[Row | None, str]:
    """(example, problem) of a row in any other form."""
    messages, problem = to_messages(row)
    if problem:
        return None, problem
    functions, problem = tools.tools_of(row)
    if problem:
        return None, problem
    return clean_chat(messages, functions)


def as_messages(example: Row, system: str | None, reasoning: str = "stripped") -> list[Row]:
    """A training chat: the prompt, and the model's answer with or without its reasoning.

    Its first message carries the `tools` of a chat with tools.

    Args:
      example: from `clean`.
      system: a sentence that opens a chat without a system message of its own; None or "": none.
      reasoning: "stripped", or "kept".
    """
    messages = [dict(message) for message in example["before"]]
    answer = {"role": "assistant", "content": example["answer"]}
    if "tool_calls" in example:
        answer["tool_calls"] = example["tool_calls"]
    if thinks(reasoning):
        answer["reasoning"] = example["reasoning"]
    else:
        for message in messages:
            message.pop("reasoning", None)

    functions = example.get("tools")
    needs_opening = bool(system or functions)  # tools stand in the system message
    if needs_opening and not _opens_with_system(messages):
        opening = {"role": "system", "content": system or ""}
        messages.insert(0, opening)
    if functions:
        messages[0]["tools"] = functions
    return [*messages, answer]


# ── What a reader should know of the rows that are kept ──


def _unused(row: Row, form: str) -> list[str]:
    """Columns and keys of a row that say something and that we don't use."""
    used = FORMS[form] + MORE_COLUMNS[form]
    unused = []
    for name, value in row.items():
        if name not in used and value not in NOTHING:
            unused.append(f"column {name}")
    if "tools" in used:
        unused += tools.unused_keys(row)
    if form in ("chat", "ShareGPT"):
        [column] = FORMS[form]
        messages, _ = _messages_of_turns(row, column)
        for message in messages:
            unused += _unused_keys(message)
    return unused


def _unused_keys(message: Row) -> list[str]:
    """Keys of one message that say something and that we don't use."""
    role = message["role"]
    used = ("role", "content", *MORE_KEYS.get(role, ()))
    unused = []
    for key, value in message.items():
        if key in WEIGHTS and not value:
            continue  # an answer's is used; and nothing else is trained in any case
        if key not in used and value not in NOTHING:
            unused.append(f"{key} of {role} messages")
    return unused


def _odd(example: Row) -> list[str]:
    """What a reader may not expect of an example that is kept."""
    odd = []
    answers = []
    for message in example["before"]:
        content = message["content"]
        if message["role"] == "assistant":
            answers.append(content)
            if content and "tool_calls" in message:
                odd.append("text beside an earlier call: of such a chat 02 trains only the "
                           "last answer")
        elif message["role"] != "tool":
            rendered = RENDERED.search(content)
            if rendered:
                odd.append(f"a prompt holds {rendered[0]}: it was rendered before, for some model")
    answers.append(example["answer"])
    for message in [*example["before"], example]:
        if tools.calls_another(message.get("tool_calls", []), example.get("tools", [])):
            odd.append(tools.UNDECLARED)
    for answer in answers:
        odd += _odd_in_answer(answer)
    return odd


def _has_thoughts(example: Row) -> bool:
    """Does the model think anywhere in it?"""
    for message in [*example["before"], example]:
        if message.get("reasoning"):
            return True
    return False


def _odd_where_it_thinks(example: Row) -> list[str]:
    """What a reader may not expect of an example whose last turn thinks."""
    wanted = []
    for message in example["before"]:
        if message["role"] == "assistant":
            wanted.append(message.get("train", True))
    trained = chat.trained_messages(example["before"], thinking=True)
    if trained and trained != wanted:
        return [BEFORE_A_THOUGHT]
    return []


def _odd_in_answer(answer: str) -> list[str]:
    """What looks like a control token in an answer, and isn't one."""
    odd = []
    end = ENDS.search(answer)
    if end:
        odd.append(f"an answer ends in {end[1]}, which is trained as letters")
    if "<think>" in answer or "</think>" in answer:
        odd.append("an answer holds a <think> tag, which is trained as letters")
    call = CALL_TAGS.search(answer)
    if call:
        odd.append(f"an answer holds {call[0]}, which is trained as letters")
    return odd


def remarks(examples: Sequence[Row]) -> list[str]:
    """At most two lines: what isn't used of the examples that are kept, and what is odd in them.

    Each remark is counted once per example.
    """
    lines = []
    openings = {
        "unused": "not used of the rows that are kept",
        "odd": "kept, but look at these rows",
    }
    for kind, opening in openings.items():
        counts: Counter[str] = Counter()
        for example in examples:
            counts.update(set(example[kind]))
        if counts:
            counted = [f"{remark} ({count:,})" for remark, count in sorted(counts.items())]
            lines.append(f"{opening}: {'; '.join(counted)}")
    return lines


# ── Comparing with an evaluation set ──


def words_of(text: str) -> list[str]:
    """Words and punctuation, lower case: what is compared."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _runs(words: Sequence[str], n: int) -> set[tuple[str, ...]]:
    """Every run of n words."""
    runs = set()
    for first in range(len(words) - n + 1):
        run = tuple(words[first:first + n])
        runs.add(run)
    return runs


def overlap(
    prompts: Sequence[str], evaluation: dict[str, str], n: int = 13
) -> tuple[set[int], dict[str, tuple[float, int]]]:
    """Where training prompts come close to those of an evaluation set.

    Args:
      prompts: list of texts.
      evaluation: {name: text}.
      n: words in a run. A text of the evaluation that has fewer is a single run.

    Returns:
      (places of prompts that equal one of the evaluation's but for case and spaces,
      {evaluation's name: (share of its runs of n words in the closest prompt, that place)}).
    """
    exam_texts = set()
    runs_in_all = {}
    names_of_run: dict[tuple[str, ...], list[str]] = {}
    lengths = set()  # of a run, in words
    for name, text in evaluation.items():
        words = words_of(text)
        exam_texts.add(tuple(words))
        if not words:
            continue
        length = min(n, len(words))
        lengths.add(length)
        runs = _runs(words, length)
        runs_in_all[name] = len(runs)
        for run in runs:
            names_of_run.setdefault(run, []).append(name)

    exact = set()
    closest = dict.fromkeys(evaluation, (0.0, -1))
    for place, prompt in enumerate(prompts):
        words = words_of(prompt)
        if tuple(words) in exam_texts:
            exact.add(place)
        shared: Counter[str] = Counter()
        for length in lengths:
            for run in _runs(words, length):
                shared.update(names_of_run.get(run, ()))
        for name, count in shared.items():
            share = count / runs_in_all[name]
            closest[name] = max(closest[name], (share, place))
    return exact, closest


def read_exams(folder: Path) -> dict[str, str]:
    """{name: text} of the prompts of an evaluation set, such as verilog-eval's.

    Args:
      folder: that holds a `<name>_prompt.txt` for each problem.

    Raises:
      UserError: it holds none.
    """
    exams = {}
    for path in sorted(folder.glob("*_prompt.txt")):
        name = path.name.removesuffix("_prompt.txt")
        exams[name] = path.read_text(encoding="utf-8")
    if not exams:
        raise UserError(f"evaluation={str(folder)!r} holds no *_prompt.txt, so there is nothing to "
                        "compare with. Name another folder, or set it to \"\".")
    return exams


def exam_prompts(evaluation: str, questions: Callable[[str], Any]) -> dict[str, str]:
    """{name: prompt} of the exam that 02 compares its rows with; nothing for "".

    Args:
      evaluation: a folder of Verilog problems, or a .jsonl file of questions.
      questions: `verilog.questions`, which reads such a file (helpers don't import `verilog`).

    Raises:
      UserError: it's another file, or it holds no problems.
    """
    if not evaluation:
        return {}
    if evaluation.endswith(".jsonl"):
        problems = questions(evaluation).problems
        return {question.name: question.prompt for question in problems}
    if Path(evaluation).is_file():
        raise UserError(f"evaluation={evaluation!r} is a file. Name a folder of problems, or a "
                        ".jsonl file with a question and its answer on each line.")
    return read_exams(remote.checkout(evaluation))


def questions_of(examples: Sequence[Row]) -> tuple[list[str], list[int]]:
    """All questions that examples ask, and for each the place of its example; a chat asks several.
    """
    questions, places = [], []
    for place, example in enumerate(examples):
        for message in example["before"]:
            if message["role"] == "user":
                questions.append(message["content"])
                places.append(place)
    return questions, places


def only_in(text: str, other: str) -> str:
    """The words of a text that another one lacks, in order and once each."""
    others = set(words_of(other))
    words = dict.fromkeys(word for word in words_of(text) if word not in others)
    return " ".join(words)


def closest_rows(
    closest: dict[str, tuple[float, int]],
    exams: dict[str, str],
    questions: Sequence[str],
    count: int,
) -> list[dict[str, str]]:
    """A table of the evaluation prompts that training questions come closest to.

    Args:
      closest: from `overlap`.
      exams: from `read_exams`.
      questions: from `questions_of`.
      count: rows of the table, at most; prompts that share nothing are left out.
    """
    by_share = sorted(closest.items(), key=lambda item: -item[1][0])
    rows = []
    for name, (share, place) in by_share[:count]:
        if share:
            rows.append({
                "evaluation prompt": name,
                "shared runs": f"{share:.0%}",
                "only in the exam": only_in(exams[name], questions[place]),
                "only in the closest training row": only_in(questions[place], exams[name]),
            })
    return rows


def held_out(prompt: str, share: float) -> bool:
    """True for a fixed `share` of all prompts, whatever else is in the dataset."""
    words = " ".join(words_of(prompt))
    digest = hashlib.sha256(words.encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    return number < share * 2**64


def split(examples: Sequence[Row], places: Sequence[int], share: float) -> dict[str, list[int]]:
    """{"train" | "val": places}: which examples are trained, and which are held out.

    Args:
      examples: all of them.
      places: of those that are kept.
      share: of the prompts that is held out; see `held_out`.

    Raises:
      UserError: one of the two sides is empty.
    """
    parts: dict[str, list[int]] = {"train": [], "val": []}
    for place in places:
        side = "val" if held_out(examples[place]["prompt"], share) else "train"
        parts[side].append(place)
    if not all(parts.values()):
        raise UserError(f"{len(places)} rows with validation={share} leave one side empty: use "
                        "more rows or another share.")
    return parts


# ── What 02 shows and leaves ──


def running_example(chats: Sequence[list[Row]]) -> list[Row]:
    """The up-down counter among the chats; the shortest chat where there is none."""
    for messages in chats:
        if "goes up when" in messages[-2]["content"]:
            return messages
    return min(chats, key=lambda messages: sum(len(message["content"]) for message in messages))


def pick_samples(
    examples: Sequence[Row], chats: Sequence[list[Row]], lengths: Sequence[int], places: list[int]
) -> list[Row]:
    """Three held-out examples for `samples.json`: a short one, a middle one and a long one.

    Args:
      examples, chats, lengths: of all examples.
      places: those of the held-out ones.
    """
    by_length = sorted(places, key=lambda place: (lengths[place], place))
    samples = []
    for share in (1, 2, 3):
        place = by_length[len(by_length) * share // 4]
        example = examples[place]
        answer = example["answer"] or json.dumps(example["tool_calls"])
        samples.append({"messages": chats[place][:-1], "answer": answer})
    return samples
