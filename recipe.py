"""Fine-tune Gemma 4 with LoRA and merge the result: notebooks 02 to 04 in one file, to copy.

    pip install google-tunix==0.1.7 "jax[tpu]==0.10.2"
    python recipe.py --model MODEL --data chats.jsonl --out OUT

MODEL is a Gemma 4 (31B, 12B, E4B or E2B): a folder, or a name on the hub. A line of chats.jsonl is
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]},
with "tools" and "tool_calls", where there are any, as the OpenAI API writes them.

OUT gets checkpoints/, adapter/ (for PEFT) and merged/ (for vLLM and transformers). If the program
is killed and started again, it goes on from its newest whole checkpoint. It runs on a CPU, on one
TPU chip, or on all chips of a host.

Read it from top to bottom: settings, rows, ids and masks, packing, model, step, loop, merge, main.
In shapes, M is the micro-batches of a step, B the rows of a micro-batch, T the tokens of a row,
r the adapters' rank, K the heads of keys and values, and H the numbers of a head.
"""

import argparse
import functools
import glob
import gzip
import hashlib
import json
import math
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from filelock import FileLock
from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer
from tunix.models.gemma4 import model as gemma4
from tunix.models.gemma4.params_safetensors import create_model_from_safe_tensors

# ── Settings ──


@dataclass(frozen=True)
class Settings:
    """What you can choose. Each field is an option of the command, too: --rank 16."""

    model: Path = Path("google/gemma-4-E2B-it")  # a folder, or a name on the hub
    data: Path = Path("chats.jsonl")             # .jsonl or .jsonl.gz
    out: Path = Path("out")

    rank: int = 64
    alpha: float = 64.0            # the adapters' product is multiplied by alpha / rank
    learning_rate: float = 1e-4    # the highest; it falls along a cosine to zero
    warmup_steps: int = 100        # up to that rate, but at most half of all steps
    weight_decay: float = 0.001    # of AdamW
    max_grad_norm: float = 1.0     # a longer gradient is cut to this length
    epochs: float = 1.0            # how often the data is read
    seed: int = 42                 # of the adapters, and of the order of the rows
    sequence_length: int = 2048    # tokens of a packed row; longer examples are left out
    rows_per_step: int = 8         # of an optimizer step; one chip computes one row at a time
    validation: float = 0.02       # the share of first questions whose chats are held out
    every: int = 100               # steps between two held-out losses, and two checkpoints
    reasoning: str = "stripped"    # or "kept": an answer's reasoning is trained as its thought
    dtype: str = "bfloat16"        # of weights and arithmetic; adapters and Adam are float32


def check(holds: object, message: str) -> None:
    """Stop with one line for what you can mend; whatever else goes wrong keeps its traceback."""
    if not holds:
        raise SystemExit(f"Error: {message}")


def check_settings(cfg: Settings) -> None:
    """Refuse what can't work, before anything is downloaded."""
    check(cfg.data.is_file(), f"{cfg.data} is no file")
    for name in ("rank", "sequence_length", "rows_per_step", "every"):
        number = getattr(cfg, name)
        check(number > 0, f"--{name} {number} is not a number from 1 on")

    is_dtype = cfg.dtype in ("bfloat16", "float32")
    check(is_dtype, f"--dtype {cfg.dtype}: bfloat16 or float32")
    is_choice = cfg.reasoning in ("stripped", "kept")
    check(is_choice, f"--reasoning {cfg.reasoning}: stripped or kept")


# ── Rows: a line of the data becomes a chat, or a reason why it can't be one ──

Json = dict[str, Any]  # an object: a row, a message, a tool
Chat = list[Json]      # messages; the first one holds the row's tools, if there are any

# A chat as letters, and the orders of speakers that can be trained: after a call's results the
# assistant's turn goes on, and an answer or a call is last.
LETTERS = {"system": "s", "user": "u", "assistant": "a", "calling assistant": "c", "tool": "t"}
TURNS = re.compile("s?(u(ct+)*a)*u(ct+)*[ac]")
SEEN = ("role", "content", "tool_calls", "tool_call_id", "name")  # what the chat template reads
THOUGHTS = ("reasoning", "reasoning_content", "thinking")  # three names for the same
# Control tokens as people write them, of several models: worth a remark, if they're in the data
FOREIGN = re.compile(
    r"<eos>|</s>|<\w+_of_turn>|<\|?turn\|?>|<\|im_\w+\|>|\[INST\]|<think>"
    r"|(?i:<\|?(?:tool|function)_?call\|?>)"
)
ROLES = ("system", "user", "assistant", "tool")
NO_TOOL = "a tool is not {type: function, function: {name: ..., parameters: JSON schema}}"
# By these words a schema may allow keys that its own properties don't name
ELSEWHERE = ("$ref", "anyOf", "oneOf", "allOf", "additionalProperties", "patternProperties")
# Under these words parameters hold an object that isn't a parameter
NOT_PARAMETERS = (
    "$defs", "definitions", "additionalProperties", "patternProperties", "default", "example"
)
# JSON Schema's types of which no value is null
NOT_NULL = ("string", "number", "integer", "boolean", "array", "object")


def from_json(value: object) -> object:
    """What a JSON text says. Any other value, and a text that isn't JSON, stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def without_nulls(value: Any) -> Any:
    """The same structure without its nulls: tables fill in the keys that another row has."""
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, inner in value.items():
        if inner is not None:
            kept[key] = without_nulls(inner)
    return kept


def is_texts(value: object) -> bool:
    """Is it a list of texts, which may be empty?"""
    return isinstance(value, list) and all(isinstance(inner, str) for inner in value)


def schema_problem(schema: object, is_property: bool = False) -> str:
    """Why a chat template can't write a JSON schema, or one of those in it; or "".

    Gemma 4's template writes a property's type as it is. It reads `required` only if the property
    is an object, so others may have true or false there, as in JSON Schema until 2012. And if an
    object has no properties, the template takes every other key of it for one.

    Args:
      schema: of a tool's parameters, of an array's items, or of a property.
      is_property: is it a property's?
    """
    if not isinstance(schema, dict):
        return NO_TOOL
    kind = schema.get("type", "")
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    is_object = str(kind).upper() == "OBJECT"

    reads_required = not is_property or (is_object and required)
    if reads_required and not is_texts(required):
        return "required, in a tool, is not a list of names"
    if not is_property and not isinstance(kind, (str, list)):
        return "type, in a tool, is neither text nor a list"
    if not isinstance(properties, dict):
        return NO_TOOL

    inner_properties = list(properties.values())
    if is_property and is_object and "properties" not in schema:
        inner_properties = [inner for inner in schema.values() if isinstance(inner, dict)]
    for inner in inner_properties:
        problem = schema_problem(inner, is_property=True)
        if problem:
            return problem
    items = schema.get("items")
    if isinstance(items, dict):
        return schema_problem(items)
    return ""


def parameters_problem(schema: Json) -> str:
    """Why a chat template can't write these parameters of a tool, or ""."""
    if "properties" not in schema:
        for key, inner in schema.items():
            if isinstance(inner, dict) and key not in NOT_PARAMETERS:
                return "parameters of a tool that are not under properties, as in xLAM"
    return schema_problem(schema)


def read_tool(tool: Any) -> Json:
    """A tool as vLLM (0.32) hands it to the chat template: {} if it isn't one.

    vLLM knows three keys of a function. Where there's no description, it hands over null.
    """
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return {}
    function = tool["function"]
    name = function.get("name")
    schema = without_nulls(from_json(function.get("parameters", {})))
    has_name = isinstance(name, str) and len(name) > 0
    if not has_name or not isinstance(schema, dict):
        return {}
    used = {"name": name, "description": function.get("description"), "parameters": schema}
    return {"type": "function", "function": used}


def read_tools(row: Json) -> tuple[list[Json], str]:
    """(a row's tools, why nobody could call them, or "").

    What isn't used of a function gets a column, under whose name it's printed as unused.
    """
    given = without_nulls(from_json(row.get("tools")) or [])
    if not isinstance(given, list):
        return [], "tools are not a list, or not JSON"
    tools = []
    for each in given:
        tool = read_tool(each)
        if not tool:
            return [], NO_TOOL
        problem = parameters_problem(tool["function"]["parameters"])
        if problem:
            return [], problem
        tools.append(tool)
        for key in each["function"].keys() - tool["function"].keys():
            row[f"{key} of tools"] = each["function"][key]
    return tools, ""


def is_call(call: Json) -> bool:
    """Does a call have a name, and an object, if anything, as arguments? A text is read."""
    function = call.get("function") or {}
    arguments = from_json(function.get("arguments")) or {}
    function["arguments"] = arguments
    name = function.get("name")
    has_name = isinstance(name, str) and len(name) > 0
    return has_name and isinstance(arguments, dict)


def give_ids(calls: list[Json], results: list[Json]) -> None:
    """Give ids to calls that have none, and to results the id of the call that they answer.

    That's the first one that waits under the result's name. If there's none, it's the first one
    that still waits in the end.
    """
    for place, call in enumerate(calls):
        call["id"] = call.get("id") or f"call {place}"
    answered = [result.get("tool_call_id") for result in results]
    waiting = [call for call in calls if call["id"] not in answered]
    unnamed = []
    for result in results:
        if result.get("tool_call_id"):
            continue
        named = [call for call in waiting if call["function"]["name"] == result.get("name")]
        if named:
            result["tool_call_id"] = named[0]["id"]
            waiting.remove(named[0])
        else:
            unnamed.append(result)
    for result, call in zip(unnamed, waiting, strict=False):
        result["tool_call_id"] = call["id"]


def calls_problem(chat: Chat) -> str:
    """Why a chat's calls and their results don't belong together, or "". Ids are filled in."""
    waiting: list[object] = []  # ids of calls that have no result yet
    for place, turn in enumerate(chat):
        if turn.get("tool_responses"):
            return "tool_responses, which we take as messages of role tool"
        if turn["role"] == "tool":
            answered = turn.get("tool_call_id")
            if answered not in waiting:
                return "a result without its call"
            waiting.remove(answered)
        elif waiting:
            return "a call without its result"

        calls = turn.get("tool_calls") or []
        for call in calls:
            if not is_call(call):
                return "a call is not {id: ..., function: {name: ..., arguments: JSON}}"
        behind = chat[place + 1:place + 1 + len(calls)]
        results = [message for message in behind if message["role"] == "tool"]
        give_ids(calls, results)
        for call in calls:
            if call["id"] in waiting:
                return "two calls with one id"
            waiting.append(call["id"])
    return ""


def may_be_null(schema: Json | None) -> bool:
    """May an argument be null, by its schema? None is that of an argument that the tool lacks."""
    if schema is None:
        return False
    return bool(schema.get("nullable")) or schema.get("type") not in NOT_NULL


def kept_arguments(value: Any, schema: Any) -> Any:
    """Arguments, or a part of them, without nulls but those that their schema may allow."""
    if not isinstance(schema, dict):
        schema = {}
    if any(schema.get(word) for word in ELSEWHERE):
        return value
    if isinstance(value, list):
        items = schema.get("items")
        return [kept_arguments(inner, items) for inner in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    kept = {}
    for key, inner in value.items():
        if inner is not None or may_be_null(properties.get(key)):
            kept[key] = kept_arguments(inner, properties.get(key))
    return kept


def drop_nulls(chat: Chat, tools: list[Json]) -> None:
    """Drop null arguments that a tool doesn't take: tables fill them in from another row.

    They can't fill them into arguments that are a JSON text, so those stay as they are. The message
    gets one more key, under which the nulls are printed as unused.
    """
    schemas = {}
    for tool in tools:
        function = tool["function"]
        schemas[function["name"]] = function["parameters"]
    for turn in chat:
        for call in turn.get("tool_calls") or []:
            function = call.get("function") or {}
            arguments = function.get("arguments")
            schema = schemas.get(function.get("name"))
            kept = kept_arguments(arguments, schema)
            if kept != arguments:
                function["arguments"] = kept
                turn["null arguments that the tool does not take"] = True


def calls_another(chat: Chat) -> bool:
    """Does a chat call a function that isn't among its tools?"""
    tools = chat[0].get("tools") or []
    declared = [tool["function"]["name"] for tool in tools]
    for turn in chat:
        for call in turn.get("tool_calls") or []:
            if call["function"]["name"] not in declared:
                return True
    return False


def letter_of(turn: Json) -> str:
    """Who speaks, as a letter of `TURNS`."""
    speaker = turn["role"]
    if turn.get("tool_calls"):
        speaker = f"calling {speaker}"
    return LETTERS[speaker]


def turn_problem(turn: Json, letter: str) -> str:
    """Why one message can't be trained on, or "". A content that is missing becomes "".

    Only the row's tools are used. A message's own get a name under which they're printed as unused.
    """
    if "tools" in turn:
        turn["tools of a message"] = turn.pop("tools")

    content = turn.get("content")
    if content in (None, []):
        content = ""
    turn["content"] = content
    is_empty = not content.strip()
    if is_empty and letter not in "sct":  # a call needs no text, and a tool may return nothing
        return "an empty text"

    weights = {turn.get("weight"), turn.get("train")}
    if not weights <= {None, 0, 1}:  # to Python, true is 1
        return "a weight that is not 0 or 1"

    for key in THOUGHTS:
        thought = turn.get(key) or ""
        if not isinstance(thought, str):
            return "a thought that is not text"
    return ""


def row_problem(row: Json) -> str:
    """Why a row's chat can't be trained on, or "". The first message gets the row's tools."""
    chat = row["messages"]
    for turn in chat:
        role = turn["role"]
        if role not in ROLES:
            return f"role {role!r:.40} is none of system, user, assistant and tool"
    tools, problem = read_tools(row)
    if problem:
        return problem
    drop_nulls(chat, tools)
    problem = calls_problem(chat)
    if problem:
        return problem

    letters = "".join(map(letter_of, chat))
    if "s" in letters[1:]:
        return "a system message that is not the first"
    if not TURNS.fullmatch(letters):
        return "user and assistant do not take turns, up to an answer"
    for turn, letter in zip(chat, letters, strict=True):
        problem = turn_problem(turn, letter)
        if problem:
            return problem

    json.dumps(row, ensure_ascii=False).encode()  # half a character raises an error here
    if tools:
        chat[0]["tools"] = tools
    return ""


def parse(line: str) -> tuple[Json, str]:
    """(row, why its chat can't be trained on, or "") of a line."""
    try:
        row = json.loads(line)
        return row, row_problem(row)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}, "no object with messages that hold text"


def unused_keys(row: Json, kept: bool) -> list[str]:
    """Columns of a row, and keys of its messages, that hold something that nobody uses, sorted."""
    used = {"tools", "weight", "train", *SEEN}
    if kept:
        used.update(THOUGHTS)

    unused = set()
    for column, value in row.items():
        if value and column not in ("messages", "tools"):
            unused.add(column)
    for turn in row["messages"]:
        for key, value in turn.items():
            if value and key not in used:
                unused.add(key)
    return sorted(unused)


def is_held_out(chat: Chat, share: float) -> bool:
    """Is a chat held out? Its first question's words decide, by the same rule as in notebook 02."""
    questions = [turn["content"] for turn in chat if turn["role"] == "user"]
    first = questions[0].lower()
    words = re.findall(r"\w+|[^\w\s]", first)
    text = " ".join(words)
    digest = hashlib.sha256(text.encode()).hexdigest()
    number = int(digest[:16], 16)  # as good as drawn from 0 to 2**64
    return number < share * 2**64


class Rows(NamedTuple):
    """The chats of a file, in its order, and what there is to say of its rows."""

    trained: list[Chat]
    held_out: list[Chat]
    counts: Counter[str]  # {what there is to say: of how many rows}


def read_rows(path: Path, share: float, kept: bool = False) -> Rows:
    """Read the data. Arguments as for `read_chats`."""
    trained: list[Chat] = []
    held_out: list[Chat] = []
    counts: Counter[str] = Counter()
    opener: Callable[..., Any] = open
    if path.suffix == ".gz":
        opener = gzip.open
    with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as lines:
        for line in lines:
            if not line.strip():
                continue
            row, problem = parse(line)
            if problem:
                counts[f"left out: {problem}"] += 1
                continue

            for key in unused_keys(row, kept):
                counts[f"kept, but not used: {key}"] += 1
            if calls_another(row["messages"]):
                counts["kept, with a call of a function that is not among the tools"] += 1
            tags = set(FOREIGN.findall(line))
            for tag in sorted(tags):
                counts[f"kept, read as letters: {tag}"] += 1
            chat = row["messages"]
            if is_held_out(chat, share):
                held_out.append(chat)
            else:
                trained.append(chat)
    return Rows(trained, held_out, counts)


def read_chats(path: Path, share: float, kept: bool = False) -> tuple[list[Chat], list[Chat]]:
    """Read the data, and print what is left out of it and what isn't used of it.

    Args:
      path: a .jsonl or .jsonl.gz file.
      share: of the first questions, whose chats are held out.
      kept: are answers' thoughts trained, too?

    Returns:
      (trained chats, held-out chats), in the file's order.
    """
    trained, held_out, counts = read_rows(path, share, kept)
    for what, count in counts.items():
        print(f"{count} rows {what!a}", flush=True)
    return trained, held_out


# ── Ids and masks: each answer is an example, behind the prompt that a server would send ──

CALLS = re.compile(r"<\|tool_call>.*<tool_call\|>", re.S)
MARK = "\ufdd0"  # one of Unicode's noncharacters: never in a text


class Example(NamedTuple):
    """A prompt and its answer."""

    ids: list[int]
    mask: list[int]  # 1 where an id is trained, which is the answer's; 0 in the prompt


class ControlTokens(NamedTuple):
    """The tokens that only a chat template may write, such as <turn|>."""

    ids: dict[str, int]        # {spelling: id}
    pattern: re.Pattern[str]   # finds their spellings in a text, as its group 1


def control_tokens(tokenizer: Tokenizer) -> ControlTokens:
    """The control tokens of a tokenizer."""
    ids = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            ids[token.content] = number
    alternatives = "|".join(map(re.escape, ids))
    pattern = re.compile(f"({alternatives})")
    return ControlTokens(ids, pattern)


def with_mark(match: re.Match[str]) -> str:
    """A control token's spelling with a mark in it: letters that are no control token."""
    spelling = match[0]
    return spelling[0] + MARK + spelling[1:]


def marked(value: Any, pattern: re.Pattern[str]) -> Any:
    """The same structure, with a mark in every text that spells a control token.

    The chat template adds the real ones afterward, so `encode` can tell them apart.
    """
    if isinstance(value, str):
        return pattern.sub(with_mark, value)
    if isinstance(value, list):
        return [marked(inner, pattern) for inner in value]
    if not isinstance(value, dict):
        return value
    copy = {}
    for key, inner in value.items():
        marked_key = marked(key, pattern)
        copy[marked_key] = marked(inner, pattern)
    return copy


def encode(tokenizer: Tokenizer, control: ControlTokens, text: str) -> list[int]:
    """The ids of a text that a template wrote. What people wrote in it stays letters."""
    ids: list[int] = []
    for piece in control.pattern.split(text):
        if piece in control.ids:
            ids.append(control.ids[piece])
            continue
        letters = piece.replace(MARK, "")
        ids += tokenizer.encode(letters, add_special_tokens=False, split_special_tokens=True)
    return ids


def for_template(turn: Json, kept: bool) -> Json:
    """What the chat template is to see of a message, with its thought as `reasoning` if kept."""
    seen = {}
    for key in SEEN:
        value = turn.get(key)
        if value is not None:
            seen[key] = value
    thoughts = [turn[key] for key in THOUGHTS if (turn.get(key) or "").strip()]
    if kept and thoughts:
        seen["reasoning"] = thoughts[0]
    return seen


def answer_of(turn: Json, prompt: str, template: Callable[..., str]) -> str:
    """What the model writes after the prompt: thought, text, calls, and the token that ends it.

    Args:
      turn: the answer, from `for_template`.
      prompt: as the template wrote it. It may have opened the thought.
      template: messages -> text.
    """
    text = turn["content"]
    is_open = prompt.rfind("<|channel>") > prompt.rfind("<channel|>")
    if "reasoning" in turn:
        thought = turn["reasoning"]
        if not is_open:
            thought = f"<|channel>thought\n{thought}"
        text = f"{thought}\n<channel|>{text}"
    elif is_open:  # and nothing is thought
        text = f"<channel|>{text}"
    if not turn.get("tool_calls"):  # many files have an empty list in every answer
        return f"{text}<turn|>"

    question = {"role": "user", "content": "x"}
    calls_alone = turn | {"content": ""}
    written = template([question, calls_alone])
    calls = CALLS.findall(written)
    check(calls, "this chat template writes no calls of tools: take those rows out of your data")
    return f"{text}{calls[0]}<|tool_response>"  # here the model stops, and waits for the result


def is_trained(turn: Json) -> bool:
    """Is a message an answer, and not one that is only read?"""
    if turn["role"] != "assistant":
        return False
    weights = (turn.get("weight"), turn.get("train"))
    return 0 not in weights  # to Python, false is 0


def example_of(
    tokenizer: Tokenizer,
    control: ControlTokens,
    turns: Chat,
    tools: list[Json] | None,
    thinks: bool,
) -> Example:
    """The last message as an answer, behind the prompt that a server makes of those before it.

    Args:
      tokenizer: of the base, with its chat template.
      control: from `control_tokens`.
      turns: from `for_template`.
      tools: that the chat may call.
      thinks: is the server asked to let the model think?
    """
    *before, answer = turns
    if not before[0]["content"].strip():  # a system message that says nothing
        del before[0]
    template = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    prompt = template(
        before,
        tools=tools,
        add_generation_prompt=True,
        enable_thinking=thinks,
    )
    written = answer_of(answer, prompt, template)

    prompt_ids = encode(tokenizer, control, prompt)
    answer_ids = encode(tokenizer, control, written)
    mask = [0] * len(prompt_ids)
    mask += [1] * len(answer_ids)
    return Example(prompt_ids + answer_ids, mask)


def render(
    tokenizer: Tokenizer, chats: list[Chat], length: int, kept: bool = False
) -> list[Example]:
    """Make an example of every trained answer. Prints how many have more than `length` tokens.

    From the first trained thought of a turn on, the server is asked to let the model think. A turn
    goes on after a tool's result, and ends before the next question. Gemma 4's template leaves the
    thoughts of earlier turns out of a prompt.

    Args:
      tokenizer: of the base, with its chat template.
      chats: from `read_chats`.
      length: the most tokens of an example.
      kept: are answers' thoughts trained, too?
    """
    control = control_tokens(tokenizer)
    examples = []
    too_long = 0
    for chat in chats:
        marked_chat = marked(chat, control.pattern)
        tools = marked_chat[0].get("tools")
        turns = [for_template(turn, kept) for turn in marked_chat]
        thinks = False
        for end, turn in enumerate(chat, 1):
            if turn["role"] == "user":
                thinks = False
            if not is_trained(turn):
                continue
            if "reasoning" in turns[end - 1]:
                thinks = True
            example = example_of(tokenizer, control, turns[:end], tools, thinks)
            if len(example.ids) <= length:
                examples.append(example)
            else:
                too_long += 1
    print(f"{len(examples)} answers; {too_long} more are too long", flush=True)
    return examples


# ── Packing: a row holds several examples, and none of them sees another ──

OPEN_ROWS = 64  # so many rows are looked through for room


def row_with_room(rows: list[np.ndarray], size: int) -> np.ndarray | None:
    """The first of the last rows that has room for `size` more tokens, or None."""
    for row in rows[-OPEN_ROWS:]:
        used = np.count_nonzero(row[2])
        if used + size <= row.shape[1]:
            return row
    return None


def pack(examples: list[Example], length: int, multiple: int) -> np.ndarray:
    """Put examples into rows.

    Args:
      examples: none longer than `length`.
      length: T, the tokens of a row.
      multiple: empty rows are added until this divides their number.

    Returns:
      int32 [rows, 4, T]: tokens, mask, segment (1, 2, ...; 0 is padding), position in the segment.
    """
    rows: list[np.ndarray] = []
    for ids, mask in examples:
        size = len(ids)
        row = row_with_room(rows, size)
        if row is None:
            row = np.zeros((4, length), np.int32)
            rows.append(row)
        tokens, masks, segments, positions = row  # parts of it: what they get, it gets
        start = np.count_nonzero(segments)
        end = start + size
        segment = segments.max() + 1
        tokens[start:end] = ids
        masks[start:end] = mask
        segments[start:end] = segment
        positions[start:end] = range(size)

    while len(rows) % multiple:
        rows.append(np.zeros((4, length), np.int32))
    packed = np.array(rows, np.int32)
    return packed.reshape(-1, 4, length)  # of no rows, too


# ── Model: Tunix's Gemma 4, cut over the mesh, an adapter beside every matrix of a layer ──

# What Tunix 0.1.7 computes, whatever a config.json asks for: {key: the values that mean that}
COMPUTED: dict[str, list[Any]] = {
    "model_type": ["gemma4_text", "gemma4_unified_text"],
    "hidden_activation": ["gelu_pytorch_tanh"],
    "rms_norm_eps": [1e-6],
    "tie_word_embeddings": [True],
    "per_layer_config": [None],
    "use_bidirectional_attention": [None, "vision"],
    "sliding_attention": [{
        "rope_type": "default",
        "rope_theta": 1e4,
    }],
    "full_attention": [{
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }],
}
EXPERTS = (
    "a mixture of experts (26B-A4B): Tunix 0.1.7 computes it wrongly (what its router reads, and "
    "an approximate top-k). Both are fixed after 0.1.7, by github.com/google/tunix/commit/e31e280e "
    "of 12 June 2026, in no release yet. Take the 31B, 12B, E4B or E2B"
)
# {field of Tunix's ModelConfig: the key of a config.json that holds the same}
RENAMED = {
    "num_embed": "vocab_size",
    "embed_dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_global_kv_heads": "num_global_key_value_heads",
    "head_dim": "head_dim",
    "global_key_size": "global_head_dim",
    "sliding_window_size": "sliding_window",
    "final_logit_softcap": "final_logit_softcapping",
    "k_eq_v_global": "attention_k_eq_v",
}
TOWERS = (  # what tensors of images and sound begin with; nobody loads those
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "model.vision_embedder.",  # of the 12B
)
FULL = gemma4.AttentionType.GLOBAL
SLIDING = gemma4.AttentionType.LOCAL_SLIDING


def files_of(folder: Path) -> list[Path]:
    """The base's files, decided once: what is loaded, copied and merged is one set of weights.

    Stops if tensor files that the index names are missing, or if others stand beside them.
    """
    names = {"model.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = from_json(index.read_text("utf-8", "replace"))
        places = None
        if isinstance(shards, dict):
            places = shards.get("weight_map")
        if not isinstance(places, dict):
            places = {}
        check(places, f"{index} has no weight_map: download it again")
        names = set(map(str, places.values()))

    present = {path.name for path in folder.glob("*.safetensors")}
    odd = sorted(names ^ present)
    own = sorted(names)
    check(not odd, f"{folder}: {odd} missing, or beside the model's own {own}")

    files = []
    for path in folder.iterdir():
        is_small = path.suffix in (".json", ".jinja", ".model", ".txt")
        if is_small or path.name in names:
            files.append(path)
    return sorted(files)


def read_config(folder: Path) -> Json:
    """What the base's config.json says of the language model.

    Stops if it's another model's or a mixture of experts, if it says nothing of layers, or if it
    asks for something that Tunix doesn't compute.
    """
    path = folder / "config.json"
    text = from_json(path.read_text("utf-8", "replace"))
    if isinstance(text, dict):
        text = text.get("text_config", text)
    if not isinstance(text, dict):
        text = {}
    kind = text.get("model_type")
    is_known = kind is None or kind in COMPUTED["model_type"]
    check(is_known, f"{path} is not a Gemma 4's: model_type {kind}. Take the 31B, 12B, E4B or E2B")
    check(not text.get("enable_moe_block"), f"{path} describes {EXPERTS}")

    rope = text.get("rope_parameters") or {}
    layers = text.get("layer_types")
    has_layers = isinstance(layers, list) and len(layers) > 0
    described = has_layers and isinstance(rope, dict)
    check(described, f"{path} describes no layers of a Gemma 4 (layer_types): download it again")

    asked = text | rope
    odd = {}
    for key, values in COMPUTED.items():
        if key not in asked:
            continue
        value = asked[key]
        if value not in values:
            odd[key] = value
    check(not odd, f"{path} asks for {odd}, and Tunix computes something else")
    return text


def model_config(folder: Path, text: Json, dtype: str) -> gemma4.ModelConfig:
    """A config.json in Tunix's words.

    Args:
      folder: the base's, to name it in a message.
      text: from `read_config`.
      dtype: of weights and arithmetic.
    """
    kinds = []
    for name in text["layer_types"]:
        kind = FULL if name == "full_attention" else SLIDING
        kinds.append(kind)

    # The last layers of E2B and E4B share the keys and values of the two layers before them.
    shared = text.get("num_kv_shared_layers") or 0
    wide = None
    if shared:
        before = kinds[:-shared]
        fits = before[-2:] == [SLIDING, FULL]  # the two whose keys and values Tunix shares
        check(fits, f"{folder}: the layers before those that share K and V are not sliding, full")
        if text.get("use_double_wide_mlp"):
            wide = 2 * text["intermediate_size"]

    renamed = {}
    for field, key in RENAMED.items():
        renamed[field] = text.get(key)
    depth = len(kinds)
    return gemma4.ModelConfig(
        **renamed,
        num_layers=depth,
        attention_pattern=tuple(kinds),
        frac_shared_layers=max(0, shared - 0.25) / depth,  # Tunix rounds the others' number
        per_layer_input_dim=text.get("hidden_size_per_layer_input") or 0,
        override_kv_shared_ffw_hidden=wide,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(dtype),
    )


def make_mesh(config: gemma4.ModelConfig) -> Mesh:
    """All chips, as [fsdp, tp]: tp cuts heads and MLPs, fsdp cuts rows and weights."""
    chips = jax.device_count()
    global_kv_heads = config.num_global_kv_heads or 0
    tp = math.gcd(config.num_kv_heads, global_kv_heads, chips)
    shape = (chips // tp, tp)
    kinds = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("fsdp", "tp"), axis_types=kinds)


def held_numbers(folder: Path) -> tuple[int, set[str]]:
    """(how many numbers of the language model its files hold, the dtypes of all their tensors)."""
    count = 0
    dtypes = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.keys():
                tensor = file.get_slice(name)
                dtypes.add(tensor.get_dtype())
                if name.startswith(TOWERS):
                    continue
                named = name.startswith("model.language_model.")
                check(named, f"{path} has numbers under {name}, not model.language_model.*: "
                      "take google's own files")
                shape = tensor.get_shape()
                count += math.prod(shape)
    return count, dtypes


def described_numbers(config: gemma4.ModelConfig) -> int:
    """How many numbers a model of this config has. None of them is made."""
    def make() -> nnx.Module:
        return gemma4.Gemma4(config, rngs=nnx.Rngs(0))

    empty = nnx.eval_shape(make)
    arrays = jax.tree.leaves(nnx.state(empty))
    return sum(array.size for array in arrays)


def load_model(folder: Path, dtype: str) -> tuple[nnx.Module, Mesh]:
    """Load the language model of a Hugging Face folder onto all chips.

    Args:
      folder: the base's.
      dtype: of weights and arithmetic, "bfloat16" or "float32".

    Stops if config.json doesn't fit Tunix, or if the files don't hold what it describes.
    """
    text = read_config(folder)
    config = model_config(folder, text, dtype)
    mesh = make_mesh(config)

    held, dtypes = held_numbers(folder)
    wanted = described_numbers(config)
    check(held == wanted, f"{folder} holds {held:,} numbers of the language model, and its "
          f"config.json describes {wanted:,}: a part of it would go unused, or is missing")

    mode = "original"
    if len(dtypes) == 1:  # which the fast reader takes for granted
        mode = "auto"
    pattern = glob.escape(str(folder))  # Tunix makes a pattern of it, in which [ isn't a letter
    kind = jnp.dtype(dtype)
    model = create_model_from_safe_tensors(pattern, config, mesh, kind, mode)
    if config.per_layer_input_dim:  # E2B, E4B: a TPU would lay this table out so that loops copy it
        table = model.embedder.per_layer_input_embedding
        array = table.get_value()
        by_rows = Format(Layout((0, 1, 2)), array.sharding)
        table.set_value(jax.device_put(array, by_rows))
    return model, mesh


class Lora(NamedTuple):
    """A model with adapters, and its arrays by what becomes of them."""

    model: nnx.Module
    adapters: nnx.State  # trained
    frozen: nnx.State    # the base's weights


def add_lora(model: nnx.Module, mesh: Mesh, rank: int, alpha: float, seed: int) -> Lora:
    """Put adapters A and B, in float32, beside every matrix of a layer.

    A is drawn uniformly (Kaiming He) and B is zero, so at first nothing changes.
    """
    draw = jax.nn.initializers.he_uniform()
    provider = qwix.LoraProvider(
        module_path=".*(_einsum|gate_proj|up_proj|down_proj)",
        rank=rank,
        alpha=alpha,
        dropout=0.0,
        lora_a_initializer=lambda key, shape, dtype: draw(key, shape, "float32"),
        lora_b_initializer=lambda key, shape, dtype: jnp.zeros(shape, "float32"),
    )
    rows = mesh.shape["fsdp"]
    tokens = jnp.ones((rows, 2), jnp.int32)
    positions = jnp.tile(jnp.arange(2), (rows, 1))
    sees = jnp.ones((rows, 2, 2), bool)
    with mesh:  # Qwix finds the matrices by running the model, here on two tokens a row
        model = qwix.apply_lora_to_model(
            model,
            provider,
            tokens,
            positions,
            attention_mask=sees,
            rngs=nnx.Rngs(seed),
        )
    model.config.remat_config = gemma4.RematConfig.BLOCK  # compute again instead of storing
    _, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    return Lora(model, adapters, frozen)


# ── Step: every trained token counts the same, whatever row it stands in ──

Array: TypeAlias = jax.Array
CHUNK = 1024  # so many tokens of a row get their logits at once


def cross_entropies(
    model: nnx.Module, hidden: Array, tokens: Array, picked: Array, cap: float | None
) -> Array:
    """The losses at some places of each row.

    Args:
      model: knows the embedding, which makes logits of hidden states.
      hidden: [B, T, width], the last layer's.
      tokens: int [B, T].
      picked: int [B, some]: at place t, the token at t + 1 is due.
      cap: of the logits; None if they have none.

    Returns:
      float32 [B, some], in nats.
    """
    near = jnp.take_along_axis(hidden, picked[..., None], axis=1)
    logits = gemma4.Embedder.decode(model.embedder, near)
    logits = logits.astype(jnp.float32)
    if cap:
        logits = jnp.tanh(logits / cap) * cap
    due = jnp.take_along_axis(tokens, picked + 1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, due)


def make_loss(model: nnx.Module, places: int) -> Callable[..., tuple[Array, Array]]:
    """Make (adapters, frozen weights, rows [B, 4, T]) -> (summed loss in nats, trained tokens).

    Args:
      model: from `add_lora`. From here on it caps no logits: the loss does, where it needs them.
      places: so many tokens of a row get a loss, at least as many as are trained in any row.
    """
    dtype = model.config.dtype
    cap = model.config.final_logit_softcap
    model.config.final_logit_softcap = None
    graph = nnx.graphdef(model)

    def loss_of(adapters: nnx.State, frozen: nnx.State, rows: Array) -> tuple[Array, Array]:
        tokens, mask, segments, positions = jnp.moveaxis(rows, 1, 0)  # each [B, T]
        rounded = jax.tree.map(lambda array: array.astype(dtype), adapters)
        model = nnx.merge(graph, rounded, frozen)
        model.embedder.decode = lambda hidden: hidden  # no logits: of all places they'd be huge
        same_example = segments[:, :, None] == segments[:, None, :]
        sees = jnp.tril(same_example)  # [B, T, T]: its own example's past
        hidden, _ = model(tokens, positions, None, sees)

        @jax.checkpoint  # logits are forgotten, and computed again on the way back
        def losses_at(picked: Array) -> Array:
            return cross_entropies(model, hidden.astype(dtype), tokens, picked, cap)

        weight, due_next = jax.lax.top_k(mask[:, 1:], places)  # at t the token at t + 1 is due
        parts = []
        for start in range(0, places, CHUNK):
            end = start + CHUNK
            part = losses_at(due_next[:, start:end])
            parts.append(part)
        losses = jnp.concatenate(parts, axis=1)
        return jnp.sum(losses * weight), jnp.sum(weight)

    return loss_of


def make_steps(
    model: nnx.Module, optimizer: optax.GradientTransformation, places: int
) -> tuple[Callable, Callable]:
    """Make the two compiled programs of a run, for rows of at most `places` trained tokens.

    Returns:
      train: (adapters, Adam's moments, frozen weights, batch [M, B, 4, T]) -> (adapters, moments,
        mean loss in nats a trained token, norm of the gradient). The first two are consumed.
      evaluate: (adapters, frozen weights, rows [B, 4, T]) -> (summed loss, trained tokens).
    """
    evaluate = make_loss(model, places)
    with_gradient = jax.value_and_grad(evaluate, has_aux=True)

    def train(adapters: nnx.State, moments: Any, frozen: nnx.State, batch: Array) -> tuple:
        def add(total: Any, rows: Array) -> tuple[Any, None]:
            more = with_gradient(adapters, frozen, rows)
            return jax.tree.map(jnp.add, total, more), None

        no_gradient = jax.tree.map(jnp.zeros_like, adapters)
        nothing = ((0.0, 0), no_gradient)  # ((loss, tokens), gradient)
        total, _ = jax.lax.scan(add, nothing, batch)
        (loss, tokens), gradient = total
        gradient = jax.tree.map(lambda array: array / tokens, gradient)
        updates, moments = optimizer.update(gradient, moments, adapters)
        adapters = optax.apply_updates(adapters, updates)
        mean_loss = loss / tokens
        norm = optax.global_norm(gradient)
        return adapters, moments, mean_loss, norm

    compiled_train = jax.jit(train, donate_argnums=(0, 1))
    compiled_evaluate = jax.jit(evaluate)
    return compiled_train, compiled_evaluate


# ── Loop: steps in a drawn order, and checkpoints to go on from ──

OURS = "[0-9]*.*.safetensors"  # checkpoints, as `save` names them


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(folder: Path, step: int, state: Any) -> None:
    """Write STEP.SHA256.safetensors, whole or not at all. The newest two are kept."""
    arrays = {}
    for number, array in enumerate(jax.tree.leaves(state)):
        arrays[str(number)] = np.asarray(array)
    partial = folder / "partial"
    save_file(arrays, partial)
    digest = sha256_of(partial)
    name = f"{step:07}.{digest}.safetensors"
    partial.rename(folder / name)

    checkpoints = sorted(folder.glob(OURS))
    for old in checkpoints[:-2]:
        old.unlink()


def restore(folder: Path, state: Any) -> tuple[int, Any]:
    """(step, state) of the newest whole checkpoint; (0, state) if there's none.

    Args:
      folder: of the checkpoints. Damaged ones are renamed and left aside.
      state: arrays of the same shapes; they're placed on the same chips.
    """
    for path in sorted(folder.glob(OURS), reverse=True):
        step, digest, _ = path.name.split(".")
        if digest != sha256_of(path):
            print(f"checkpoint {step} is left aside: its bytes have changed", flush=True)
            path.rename(path.with_suffix(".damaged"))
            continue

        arrays = load_file(path)
        old, tree = jax.tree.flatten(state)
        new = []
        for number, leaf in enumerate(old):
            array = arrays[str(number)]
            new.append(jax.device_put(array, leaf.sharding))
        return int(step), jax.tree.unflatten(tree, new)
    return 0, state


class Plan(NamedTuple):
    """What a run trains on and is measured by."""

    answers: int          # that are trained
    rows: np.ndarray      # int32 [rows, 4, T], from `pack`
    order: np.ndarray     # int [steps, M, B]: which rows make a step
    held_out: np.ndarray  # int32 [micro-batches, B, 4, T]; there may be none
    most_trained: int     # tokens in a row; of those held out, too


def make_plan(
    cfg: Settings, trained: list[Example], held_out: list[Example], at_once: int
) -> Plan:
    """Pack the examples, after shuffling the trained ones, and draw the order of the rows.

    Args:
      cfg: the settings.
      trained, held_out: from `read_examples`.
      at_once: B, the rows of a micro-batch.
    """
    generator = np.random.default_rng(cfg.seed)
    generator.shuffle(trained)
    length = cfg.sequence_length
    rows = pack(trained, length, at_once)
    held_out_rows = pack(held_out, length, at_once)
    mask = rows[:, 1]
    held_out_mask = held_out_rows[:, 1]
    trained_tokens = np.concatenate([mask, held_out_mask]).sum(axis=-1)  # of each row

    count = len(rows)
    micro_batches = max(1, cfg.rows_per_step // at_once)
    per_step = micro_batches * at_once
    steps = max(1, round(cfg.epochs * count / per_step))
    needed = steps * per_step
    passes = math.ceil(needed / count)
    drawn = []
    for _ in range(passes):
        drawn.append(generator.permutation(count))
    order = np.concatenate(drawn)[:needed]
    return Plan(
        answers=len(trained),
        rows=rows,
        order=order.reshape(steps, micro_batches, at_once),
        held_out=held_out_rows.reshape(-1, at_once, 4, length),
        most_trained=int(trained_tokens.max()),
    )


def make_optimizer(cfg: Settings, steps: int) -> optax.GradientTransformation:
    """AdamW behind a limit on the gradient's length. The rate warms up, then falls to zero."""
    warmup = min(cfg.warmup_steps, steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, cfg.learning_rate, warmup, steps)
    clip = optax.clip_by_global_norm(cfg.max_grad_norm)
    adam = optax.adamw(schedule, weight_decay=cfg.weight_decay)
    return optax.chain(clip, adam)


def start(
    cfg: Settings, adapters: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[int, Any]:
    """(steps that are done, (adapters, Adam's moments)), new or of the newest whole checkpoint."""
    folder = cfg.out / "checkpoints"
    folder.mkdir(exist_ok=True)
    state = (adapters, optimizer.init(adapters))
    sharding = nnx.get_named_sharding(state, mesh)
    state = jax.device_put(state, sharding)  # all chips hold Adam's counter, too
    return restore(folder, state)


def held_out_loss(
    evaluate: Callable, adapters: nnx.State, frozen: nnx.State, exam: Array
) -> float:
    """In nats a trained token, over all micro-batches of `exam` [micro-batches, B, 4, T]."""
    total = 0.0
    tokens = 0
    for rows in exam:
        loss, count = evaluate(adapters, frozen, rows)
        total += float(loss)
        tokens += int(count)
    return total / tokens


def train_adapters(cfg: Settings, plan: Plan, lora: Lora, mesh: Mesh) -> nnx.State:
    """The adapters after all steps. Goes on from a checkpoint, prints losses, writes checkpoints.

    Stops if a gradient isn't finite.
    """
    steps = len(plan.order)
    folder = cfg.out / "checkpoints"
    optimizer = make_optimizer(cfg, steps)
    train, evaluate = make_steps(lora.model, optimizer, plan.most_trained)
    over_chips = PartitionSpec(None, "fsdp")  # of batches [M, B, 4, T]
    split = NamedSharding(mesh, over_chips)
    exam = jax.device_put(plan.held_out, split)
    done, (adapters, moments) = start(cfg, lora.adapters, optimizer, mesh)

    first = done + 1
    count = len(plan.rows)
    print(f"{plan.answers} answers in {count} rows, steps {first} to {steps}", flush=True)
    with mesh:
        for step in range(first, steps + 1):
            drawn = plan.order[step - 1]
            rows = plan.rows[drawn]
            batch = jax.device_put(rows, split)
            adapters, moments, loss, norm = train(adapters, moments, lora.frozen, batch)
            losses = {"loss": float(loss)}
            is_finite = jnp.isfinite(norm)
            check(is_finite, f"step {step}: {losses}, gradient {norm}: lower the rate")

            is_last = step == steps
            pause = is_last or step % cfg.every == 0
            if pause and exam.size:
                exam_loss = held_out_loss(evaluate, adapters, lora.frozen, exam)
                losses["held-out loss"] = exam_loss
            print(f"step {step}/{steps}", losses, flush=True)
            if pause:
                save(folder, step, (adapters, moments))
    return adapters


# ── Merge: W + alpha / rank · (A B)ᵀ, in float32, rounded once ──

Pairs = dict[str, Sequence[np.ndarray]]  # {name: (A, B)}


def pairs_of(adapters: nnx.State) -> Pairs:
    """A and B by the paths of Tunix's modules, in the shapes that Tunix gives them."""
    pairs: dict[str, list[np.ndarray]] = {}
    for path, variable in nnx.to_flat_state(adapters):  # of each module lora_a, then lora_b
        *module, _ = map(str, path)
        array = np.array(variable.get_value())
        pair = pairs.setdefault(".".join(module), [])
        pair.append(array)
    return dict(pairs)


def factors(path: str, a: np.ndarray, b: np.ndarray) -> Pairs:
    """{Hugging Face's name of a matrix: (A [in, r], B [r, out])} of one Tunix module."""
    renamed = path.replace(".attn.", ".self_attn.")
    block, _, kind = renamed.rpartition(".")
    if kind == "kv_einsum":  # B [r, 2, K, H]: keys, then values
        keys = b[:, 0]
        values = b[:, 1]
        parts = {"k_proj": keys, "v_proj": values}
    elif kind == "k_einsum":  # B [r, K, H]: the values are the keys
        parts = {"k_proj": b, "v_proj": b}
    elif kind == "attn_vec_einsum":
        parts = {"o_proj": b}
    else:
        name = kind.replace("_einsum", "_proj")
        parts = {name: b}

    rank = len(b)
    flat_a = a.reshape(-1, rank)
    matrices: Pairs = {}
    for name, part in parts.items():
        flat_b = part.reshape(rank, -1)
        matrices[f"{block}.{name}"] = (flat_a, flat_b)
    return matrices


def write_adapter(folder: Path, plan: Pairs, cfg: Settings) -> None:
    """Write the adapters as PEFT stores them. `plan` is by Hugging Face's names, see `factors`."""
    tensors = {}
    for name, (a, b) in plan.items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = a.T.copy()
        tensors[f"{prefix}.lora_B.weight"] = b.T.copy()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "base_model_name_or_path": str(cfg.model),
        "target_modules": r"model\.(language_model\.)?layers\.\d+\."
                          r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)",
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    text = json.dumps(config)
    (folder / "adapter_config.json").write_text(text)


def write_merged(folder: Path, files: list[Path], plan: Pairs, scale: float) -> None:
    """Write the base's files with `scale` times the adapters added. Each tensor keeps its dtype."""
    folder.mkdir(parents=True)
    placed = set()
    for file in files:
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
            continue

        tensors = load_file(file)
        for name, (a, b) in plan.items():
            weight = f"{name}.weight"
            if weight not in tensors:
                continue
            old = tensors[weight]
            product = jnp.einsum("ir,ro->oi", a, b, precision="highest")
            new = jnp.asarray(old) + scale * product
            rounded = new.astype(old.dtype)
            tensors[weight] = np.asarray(rounded)
            placed.add(name)
        save_file(tensors, folder / file.name, {"format": "pt"})

    lost = sorted(plan.keys() - placed)
    for name in lost:  # where the values are the keys, a base has no v_proj
        assert name.endswith("v_proj"), f"no place for {name}"


def export(folder: Path, files: list[Path], pairs: Pairs, cfg: Settings) -> None:
    """Make folder/adapter, for PEFT, and folder/merged, for vLLM and transformers.

    Args:
      folder: holds neither of the two yet.
      files: of the base, from `files_of`.
      pairs: from `pairs_of`.
      cfg: its rank, alpha and model are used.
    """
    plan: Pairs = {}
    for path, (a, b) in pairs.items():
        full_path = f"model.language_model.{path}"
        plan |= factors(full_path, a, b)
    scale = cfg.alpha / cfg.rank
    write_adapter(folder / "adapter", plan, cfg)
    write_merged(folder / "merged", files, plan, scale)


def write_results(cfg: Settings, files: list[Path], adapters: nnx.State) -> None:
    """Write OUT/adapter and OUT/merged: each is there as a whole, or not at all."""
    partial = cfg.out / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    export(partial, files, pairs_of(adapters), cfg)
    for name in ("adapter", "merged"):
        result = cfg.out / name
        shutil.rmtree(result, ignore_errors=True)
        (partial / name).rename(result)
    partial.rmdir()


# ── Main: one run, the only one that writes to its OUT ──


def claim(cfg: Settings, files: list[Path]) -> str:
    """What decides the result: the settings, and the hashes of the data and of the base's files.

    Stops if OUT holds something else: of another recipe, or your own.
    """
    lines = []
    for name, value in vars(cfg).items():
        if not isinstance(value, Path):
            lines.append(f"{name}: {value}")
    digest = sha256_of(cfg.data)
    lines.append(f"data: {digest}")
    for path in files:
        digest = sha256_of(path)
        lines.append(f"{path.name}: {digest}")

    note = cfg.out / "recipe.txt"
    if note.exists():
        noted = note.read_text("utf-8").splitlines()
        odd = sorted(set(lines) ^ set(noted))
        check(not odd, f"{note} is of another recipe, data or base ({odd}): choose another --out")
    else:
        folders = []
        for path in cfg.out.iterdir():
            if path.is_dir():
                folders.append(path.name)
        check(not folders, f"{cfg.out} has {folders}, and no recipe.txt: choose another --out")
    return "\n".join(lines)


def no_answer(cfg: Settings) -> str:
    """Why there's no answer to train: what became of the rows."""
    trained, held_out, counts = read_rows(cfg.data, cfg.validation)
    answers = 0
    for chat in trained:
        answers += sum(map(is_trained, chat))
    told = "no answer to train"
    if answers:
        told += f" within --sequence_length {cfg.sequence_length}"

    reasons = []
    for what, count in counts.items():
        if what.startswith("left out"):
            reasons.append(f"{count} rows {what}")
    if held_out:
        reasons.append(f"{len(held_out)} rows held out")
    if trained and not answers:
        reasons.append(f"{len(trained)} rows without an answer of weight 1")
    if reasons:
        told += f" ({'; '.join(reasons)})"
    return told


def read_examples(cfg: Settings, base: Path) -> tuple[list[Example], list[Example]]:
    """(trained examples, held-out examples).

    Stops if the base has no chat template, or if there's no answer to train.
    """
    tokenizer = AutoTokenizer.from_pretrained(base)
    check(tokenizer.chat_template, f"{base} has no chat template: take its -it model")

    kept = cfg.reasoning == "kept"
    length = cfg.sequence_length
    chats, held_out_chats = read_chats(cfg.data, cfg.validation, kept)
    trained = render(tokenizer, chats, length, kept)
    held_out = render(tokenizer, held_out_chats, length, kept)
    if not trained:
        raise SystemExit(f"Error: {cfg.data}: {no_answer(cfg)}")
    return trained, held_out


def run(cfg: Settings) -> None:
    """Train from where OUT stands, and write what OUT is to get, while nobody else writes there."""
    check_settings(cfg)
    base = cfg.model
    if not base.is_dir():
        base = Path(snapshot_download(str(cfg.model)))
    files = files_of(base)
    recipe = claim(cfg, files)
    trained, held_out = read_examples(cfg, base)

    model, mesh = load_model(base, cfg.dtype)
    lora = add_lora(model, mesh, cfg.rank, cfg.alpha, cfg.seed)
    plan = make_plan(cfg, trained, held_out, mesh.shape["fsdp"])

    partial = cfg.out / "recipe.part"
    partial.write_text(recipe, "utf-8")
    partial.rename(cfg.out / "recipe.txt")
    adapters = train_adapters(cfg, plan, lora, mesh)
    write_results(cfg, files, adapters)


def main(argv: list[str] | None = None) -> None:
    """Read the options, and run with them as the only writer of OUT."""
    parser = argparse.ArgumentParser()
    for field in fields(Settings):
        default = field.default
        parser.add_argument(
            f"--{field.name}",
            type=type(default),
            default=default,
            help=f"default: {default}",
        )
    options = parser.parse_args(argv)
    cfg = Settings(**vars(options))
    try:
        cfg.out.mkdir(parents=True, exist_ok=True)
        with FileLock(cfg.out / "one_run_at_a_time.lock", timeout=0):
            run(cfg)
    except (OSError, EOFError, zlib.error, HFValidationError, SafetensorError) as error:
        raise SystemExit(f"Error: {error}") from None  # a folder, a lock, room, the network, a .gz


if __name__ == "__main__":
    main()
