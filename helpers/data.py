"""Rows of any form become training examples, and training is held apart from evaluation.

02 shows how rows become training chats and explains it; 00 uses the same functions.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from helpers.run import UserError, local_path
from tables.texts import fences, json_lines, places_outside, split_thought

FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
# The forms of a row, by the columns that it must have.
FORMS = {"chat": ("messages",), "ShareGPT": ("conversations",),
         "Alpaca": ("instruction", "output"), "completion": ("prompt", "completion"),
         "CodeV-R1": ("prompt", "response")}
# What else is used of a row of that form.
MORE_COLUMNS = {"chat": ("system", "tools"), "ShareGPT": ("system", "tools"),
                "Alpaca": ("input", "system", "tools"), "completion": ("system", "tools"),
                "CodeV-R1": ()}
# What is used of a message, by who speaks; beside the keys for its role and its content.
WEIGHTS = ("weight", "train")
REASONING = ("reasoning", "reasoning_content", "thinking")
MORE_KEYS = {"assistant": (*WEIGHTS, *REASONING, "tool_calls"), "tool": ("tool_call_id", "name")}
# Who speaks, by the names that ShareGPT's files use for it.
SPEAKERS = {"human": "user", "gpt": "assistant", "model": "assistant"}
# What chats end with, or hold, that were rendered for a model before: here it's plain letters.
AN_END = re.compile(r"(<eos>|</s>|<end_of_turn>|<turn\|>|<\|im_end\|>|<\|eot_id\|>"
                    r"|<\|end_of_text\|>|<\|endoftext\|>)\s*$")
RENDERED = re.compile(r"<start_of_turn>|<\|turn>|\[INST\]|<\|im_start\|>|<\|start_header_id\|>")

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
            raise UserError(f"{source} is no file or folder here.")
        return _hub_rows(source)
    files = [place]
    if place.is_dir():
        files = [path for path in sorted(place.iterdir()) if _is_data(path)]
    rows = []
    for path in files:
        rows += _rows_of(_content(path))
    if not rows:
        raise UserError(f"{source} holds no rows: it needs .jsonl or .jsonl.gz files with the "
                        "columns of one of the forms in section 2 of 02.")
    return rows


def _is_data(path: Path) -> bool:
    """Is this a data file? Editors' backups and hidden files hold the same rows once more."""
    return (path.is_file() and not path.name.startswith(".")
            and path.name.endswith((".jsonl", ".jsonl.gz")))


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
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
    return [line.text if line.problem else line.value for line in json_lines(content)]


def _hub_rows(source: str) -> Any:
    from datasets import load_dataset  # here: it takes seconds, and files need none of it
    name, _, revision = source.partition("@")
    name, _, configuration = name.partition(":")
    try:
        return load_dataset(name, configuration or None, split="train", revision=revision or None)
    except (OSError, ValueError) as error:
        raise UserError(f"{source} is no file or folder here, and the hub gives no dataset of that "
                        f"name: {error}") from error


# ── Which form is it? ──


def form_of(row: Row) -> str:
    """Which form a row has, by the columns that it fills; "" if none that we know."""
    def has(columns: Sequence[str]) -> bool:
        return row.keys() >= set(columns)

    for form, columns in FORMS.items():
        if has(columns) and all(row[column] not in (None, []) for column in columns):
            return form
    for form, columns in FORMS.items():  # an empty one: its reason names the column
        if has(columns):
            return form
    return ""


def text_problem(values: dict[str, Any]) -> str:
    """The first of the named values that cannot be used as text, and why; "" if all can."""
    for name, value in values.items():
        if not isinstance(value, str):
            return f"{name} is not text"
        if re.search("[\ud800-\udfff]", value):
            return f"{name} is not Unicode"
        if not value.strip():
            return f"empty {name}"
    return ""


def to_messages(row: Row) -> tuple[list[Row] | None, str]:
    """(messages, problem) of a row in chat, ShareGPT, Alpaca or completion form, unchecked."""
    form = form_of(row)
    problem = ""
    if form in ("chat", "ShareGPT"):
        column, = FORMS[form]
        turns = row[column]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            return None, f"{column} is not a list of objects"
        messages = [_message(turn) for turn in turns]
    else:
        asks, answers = FORMS[form]
        more = row.get("input") if form == "Alpaca" else None
        if isinstance(more, str) and not more.strip():
            more = None
        problem = text_problem({asks: row[asks], answers: row[answers], "input": more or "none"})
        asked = f"{row[asks]}\n\n{more}" if more else row[asks]
        messages = [{"role": "user", "content": asked},
                    {"role": "assistant", "content": row[answers]}]
    if messages and messages[0]["role"] == "system" and _blank(messages[0]["content"]):
        del messages[0]
    has_system = bool(messages) and messages[0]["role"] == "system"
    if not _blank(row.get("system")) and not has_system:
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages, problem


def _message(turn: Row) -> Row:
    """A turn with `role` and `content`, whichever names the file has for them."""
    speaker = turn.get("from") if turn.get("role") is None else turn["role"]
    text = turn.get("value") if turn.get("content") is None else turn["content"]
    known = {key: turn[key] for key in turn if key not in ("role", "from", "content", "value")}
    return {"role": SPEAKERS.get(str(speaker), speaker), "content": text, **known}


def _blank(value: Any) -> bool:
    return value is None or isinstance(value, str) and not value.strip()


# ── Tools ──


def tools_of(row: Row) -> tuple[list[Row], str]:
    """(tools, problem) of a row's column `tools`, each as {"type": "function", "function": ...}.

    Files also hold them as one JSON text, or without the outer object.
    """
    tools = _from_json(row.get("tools")) or []
    if not isinstance(tools, list):
        return [], "tools are not a list"
    known = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or text_problem({"": function.get("name")}):
            return [], "a tool without a name"
        known.append({"type": "function", "function": _without_nulls(function)})
    return known, _unicode_problem("tools", known)


def _calls_of(message: Row) -> tuple[list[Row], str]:
    """(calls, problem) of a message, with arguments as an object and an `id` for each."""
    if message.get("function_call"):
        return [], "function_call, the old form of tool_calls"
    calls = _from_json(message.get("tool_calls")) or []
    if not isinstance(calls, list):
        return [], "tool_calls are not a list"
    known = []
    for place, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or text_problem({"": function.get("name")}):
            return [], "a call without a name"
        arguments = _from_json(function.get("arguments")) or {}
        if not isinstance(arguments, dict):
            return [], "a call's arguments are not an object"
        known.append({"type": "function", "id": call.get("id") or f"call {place}",
                      "function": {"name": function["name"], "arguments": arguments}})
    return known, _unicode_problem("tool_calls", known)


def _from_json(value: Any) -> Any:
    """What a JSON text says; any other value, and a text that isn't JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value.strip()


def _without_nulls(value: Any) -> Any:
    """A schema without its nulls: tables of the hub fill in the keys that another row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _unicode_problem(name: str, value: Any) -> str:
    return text_problem({name: json.dumps(value, ensure_ascii=False, default=str)})


# ── Cleaning ──


def split_response(response: str) -> tuple[str, str, str]:
    """(reasoning, answer, problem), where no problem means that the answer is one fenced module."""
    reasoning, rest, closed = split_thought(response.replace("\r\n", "\n"))
    if not closed:
        return "", "", "unfinished reasoning"
    inside = _inside_answer_tags(rest)
    codes = FENCE.findall(inside)
    if len(codes) > 1:
        return "", "", "several code fences"
    if not codes:
        return "", "", "unfinished code fence" if "```" in inside else "no code fence"
    if not re.search(r"\bmodule\b.*\bendmodule\b", codes[0], re.DOTALL):
        return "", "", "no module in the fence"
    code = codes[0].strip("\n").rstrip()
    return reasoning, f"```verilog\n{code}\n```", ""


def _inside_answer_tags(text: str) -> str:
    """What the last <answer> holds, or the whole text; in code the tags are a comment's letters."""
    spans = fences(text)
    openings = places_outside(text, "<answer>", spans)
    first = openings[-1] + len("<answer>") if openings else 0
    for closing in places_outside(text, "</answer>", spans):
        if closing >= first:
            return text[first:closing]
    return text[first:]


def _order_problem(messages: list[Row]) -> str:
    """Do question and answer take turns, and does each call have its result?"""
    roles = [message.get("role") for message in messages]
    if roles[-1:] != ["assistant"]:
        return "no answer at the end"
    turns = messages[1:] if roles[0] == "system" else messages
    expected, results = "user", 0
    for turn in turns:
        if turn["role"] != expected:
            if "tool" in (turn["role"], expected):
                return "calls and results do not belong together"
            return "user and assistant do not take turns"
        if expected == "user":
            expected = "assistant"
        elif expected == "assistant":
            results = len(turn["tool_calls"])
            expected = "tool" if results else "user"
        else:
            results -= 1
            expected = "tool" if results else "assistant"
    return ""


def _name_results(messages: list[Row]) -> str:
    """Give every result the `tool_call_id` and the name of its call; the problem, if there is one."""
    waiting: dict[str, str] = {}
    for message in messages:
        if message["role"] == "assistant":
            waiting = {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
            if len(waiting) != len(message["tool_calls"]):
                return "two calls with one id"
        elif message["role"] == "tool":
            wanted = message.get("tool_call_id") or next(iter(waiting))
            if wanted not in waiting:
                return "calls and results do not belong together"
            message["tool_call_id"], message["name"] = wanted, waiting.pop(wanted)
    return ""


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


def _clean_message(message: Row) -> tuple[Row, str]:
    """(message, problem): what is used of it, its thought apart from its answer."""
    role, content = message["role"], message["content"]
    if role == "tool":
        problem = "" if content == "" else text_problem({"tool message": content})
        return {"role": role, "content": content, "tool_call_id": message["tool_call_id"],
                "name": message["name"]}, problem
    if role != "assistant":
        return {"role": role, "content": content}, text_problem({f"{role} message": content})
    calls = message["tool_calls"]
    if calls and _blank(content):
        content = ""
    elif problem := text_problem({"assistant message": content}):
        return {}, problem
    thought, answer, closed = split_thought(content)
    answer = answer.strip()
    if not closed or not (answer or calls):
        return {}, "empty answer" if closed else "unfinished reasoning"
    named = [message[key] for key in REASONING if message.get(key)]
    reasoning = named[0] if named else thought
    trained, problem = _is_trained(message)
    cleaned: Row = {"role": role, "content": answer, "reasoning": reasoning, "train": trained}
    if calls:
        cleaned["tool_calls"] = calls
    return cleaned, problem or text_problem({"reasoning": reasoning or "none"})


def clean_chat(messages: list[Row], tools: Sequence[Row] = ()) -> tuple[Row | None, str]:
    """(example, problem) of a row in chat form; its answers are trained as they stand."""
    messages = [dict(message) for message in messages]
    for message in messages:
        message["tool_calls"], problem = _calls_of(message)
        if problem:
            return None, problem
        if message["tool_calls"] and message["role"] != "assistant":
            return None, "calls and results do not belong together"
    if problem := _order_problem(messages) or _name_results(messages):
        return None, problem
    cleaned = []
    for message in messages:
        kept, problem = _clean_message(message)
        if problem:
            return None, problem
        cleaned.append(kept)
    while cleaned and not cleaned[-1].get("train"):  # what follows the last trained answer
        cleaned.pop()
    if not cleaned:
        return None, "nothing to train: weight 0"
    return _example(cleaned, tools), ""


def _example(messages: list[Row], tools: Sequence[Row]) -> Row:
    """The example of a chat that ends with a trained answer; see `clean`."""
    *before, last = messages
    questions = [place for place, message in enumerate(before) if message["role"] == "user"]
    example = {"prompt": before[questions[0]]["content"], "before": before,
               "reasoning": last["reasoning"], "answer": last["content"]}
    if last.get("tool_calls"):
        example["tool_calls"] = last["tool_calls"]
    if tools:
        example["tools"] = list(tools)
    for place, message in enumerate(before):
        if message["role"] != "assistant":
            continue
        if message["train"]:
            del message["train"]  # only what isn't trained says so
        reasoning = message.pop("reasoning")
        if reasoning and message.get("tool_calls") and place > questions[-1]:
            message["reasoning"] = reasoning  # the template writes it into the turn that goes on
    return example


def clean(row: Any, need_reasoning: bool = False) -> tuple[Row | None, str]:
    """(example, problem): what to train on, or why to drop the row.

    An example is a dict: `prompt`, the first question; `before`, all messages before the last
    answer; `answer`; `reasoning`, which may be empty; `unused` and `odd`, lists of texts for
    `remarks`; and, in a chat with tools, `tools` and the last answer's `tool_calls`. Answers of
    CodeV-R1's form (prompt and response) have to be one fenced module, those of the other forms are
    taken as they stand.
    """
    if not isinstance(row, dict):
        return None, "not a JSON object"
    form = form_of(row)
    if not form:
        if row.keys() >= {"chosen", "rejected"}:
            return None, "a preference (chosen and rejected), not an answer to learn"
        return None, f"no form that we know: {', '.join(sorted(map(str, row))) or 'no columns'}"
    example, problem = (_clean_codev if form == "CodeV-R1" else _clean_of_any_form)(row)
    if example is None or problem:
        return None, problem
    if need_reasoning and not example["reasoning"]:
        return None, "no reasoning"
    example["unused"] = _unused(row, form)
    example["odd"] = _odd(example)
    return example, ""


def _clean_codev(row: Row) -> tuple[Row | None, str]:
    problem = text_problem({column: row[column] for column in FORMS["CodeV-R1"]})
    if problem:
        return None, problem
    reasoning, answer, problem = split_response(row["response"])
    return {"prompt": row["prompt"], "reasoning": reasoning, "answer": answer,
            "before": [{"role": "user", "content": row["prompt"]}]}, problem


def _clean_of_any_form(row: Row) -> tuple[Row | None, str]:
    messages, problem = to_messages(row)
    if messages is None or problem:
        return None, problem
    tools, problem = tools_of(row)
    if problem:
        return None, problem
    return clean_chat(messages, tools)


def as_messages(example: Row, system: str | None, reasoning: str = "stripped") -> list[Row]:
    """A training chat: the prompt, and the model's answer with or without its reasoning.

    Its first message carries the `tools` of a chat with tools.
    """
    messages = [dict(message) for message in example["before"]]
    answer = {"role": "assistant", "content": example["answer"]}
    if "tool_calls" in example:
        answer["tool_calls"] = example["tool_calls"]
    if reasoning == "kept":
        answer["reasoning"] = example["reasoning"]
    else:
        for message in messages:
            message.pop("reasoning", None)
    tools = example.get("tools")
    if messages[0]["role"] != "system" and (system or tools):
        messages.insert(0, {"role": "system", "content": system or ""})
    if tools:
        messages[0]["tools"] = tools
    return [*messages, answer]


# ── What isn't used of the rows that are kept ──


def _unused(row: Row, form: str) -> list[str]:
    """Columns and keys of a row that say something and that we don't use."""
    used = {*FORMS[form], *MORE_COLUMNS[form]}
    unused = [f"column {name}" for name in row if name not in used and _says(row[name])]
    if form not in ("chat", "ShareGPT"):
        return unused
    column, = FORMS[form]
    for turn in row[column]:
        message = _message(turn)
        known = {"role", "content", *MORE_KEYS.get(str(message["role"]), ())}
        for key, value in message.items():
            says_untrained = key in WEIGHTS and not value  # which questions are in any case
            if key not in known and _says(value) and not says_untrained:
                unused.append(f"{key} of {message['role']} messages")
    return unused


def _says(value: Any) -> bool:
    return value is not None and value not in ("", [], {})


def _odd(example: Row) -> list[str]:
    """What a reader may not expect of an example that is kept."""
    odd = []
    for message in example["before"]:
        if message.get("tool_calls") and message["content"]:
            odd.append("text beside an earlier call, so only the last answer is trained")
    answers = [message["content"] for message in example["before"]
               if message["role"] == "assistant"]
    for answer in [*answers, example["answer"]]:
        if end := AN_END.search(answer):
            odd.append(f"an answer ends in {end[1]}, which is trained as letters")
        if "<think>" in answer or "</think>" in answer:
            odd.append("an answer holds a <think> tag, which is trained as letters")
    for message in example["before"]:
        rendered = RENDERED.search(message["content"])
        if rendered and message["role"] in ("system", "user"):
            odd.append(f"a prompt holds {rendered[0]}: it was rendered before, for some model")
    return odd


def remarks(examples: Iterable[Row]) -> list[str]:
    """At most two lines: what isn't used of the examples that are kept, and what is odd in them.

    Each remark is counted once per example.
    """
    lines = []
    examples = list(examples)
    for kind, opening in (("unused", "not used of the rows that are kept"),
                          ("odd", "kept, but look at these rows")):
        counts = Counter(remark for example in examples for remark in set(example[kind]))
        if counts:
            counted = (f"{remark} ({count:,})" for remark, count in sorted(counts.items()))
            lines.append(f"{opening}: {'; '.join(counted)}")
    return lines


# ── Comparing with an evaluation set ──


def words_of(text: str) -> list[str]:
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


def held_out(prompt: str, share: float) -> bool:
    """True for a fixed `share` of all prompts, whatever else is in the dataset."""
    number = hashlib.sha256(" ".join(words_of(prompt)).encode()).digest()
    return int.from_bytes(number[:8], "big") < share * 2**64
