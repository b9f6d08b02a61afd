"""One renderer for the whole series: chat messages to token ids and loss mask, built together.

Training (02) and every request (05, 07) go through `prompt_ids`, so a model is trained on
exactly the ids it is served. The checkpoint's own chat template writes the prompt; what a user
wrote can never become a control token, because contents are encoded with special tokens off.

A message is a dict with `role` (system, user, assistant or tool) and `content`, a string. An
assistant's may have `tool_calls`, `reasoning`, and `train`, which is False where its tokens are
read and not learned. The first message may have `tools`, the functions that the chat may call.
"""

import copy
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from helpers import remote
from helpers.run import Progress, UserError

TURN, TURN_END = "<|turn>", "<turn|>"
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
TOOL, CALL, CALL_END = "<|tool>", "<|tool_call>", "<tool_call|>"
RESULT, RESULT_END = "<|tool_response>", "<tool_response|>"
MODEL_HEADER = "model\n"
MARKERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode's noncharacters: never real text
# What of a message the template sees; the rest is for `render`.
FOR_THE_TEMPLATE = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name")

Message = dict[str, Any]
Chat = Sequence[Message]


class Piece(NamedTuple):
    """A part of a rendered chat: plain text, or one control token of the template's."""

    text: str
    control: bool


def load_tokenizer(path: Any) -> Any:
    """Load a checkpoint's tokenizer, and make sure that it can render Gemma 4 chats.

    Args:
      path: a directory, a name on the Hugging Face hub, or a gs:// address.

    Raises:
      UserError: nothing can be loaded there, or it lacks the turn tokens or a chat template.
    """
    from transformers import AutoTokenizer
    folder = remote.stage(path, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"No tokenizer could be loaded from {path}: {str(error).splitlines()[0]}"
                        ) from error
    if not {TURN, TURN_END} <= special_ids(tokenizer).keys() or tokenizer.bos_token is None:
        raise UserError(f"The tokenizer at {path} lacks {TURN}, {TURN_END} or <bos>: it is not "
                        "Gemma 4's. Gemma 3 and older have other turn tokens.")
    if not tokenizer.chat_template:
        raise UserError(f"The tokenizer at {path} has no chat template. Copy chat_template.jinja "
                        "of the instruction-tuned checkpoint (-it) into that directory.")
    return tokenizer


@functools.lru_cache(maxsize=8)
def special_ids(tokenizer: Any) -> dict[str, int]:
    """The control tokens of a tokenizer: their text and their id."""
    special = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special[token.content] = number
    return special


def stop_ids(tokenizer: Any) -> set[int]:
    """Ids after which nobody wants more of an answer: `<eos>`, `<turn|>` and, where a model that
    called a tool waits for the result, `<|tool_response>`."""
    special = special_ids(tokenizer)
    stops = {tokenizer.eos_token_id, special[TURN_END]}
    if RESULT in special:
        stops.add(special[RESULT])
    return stops


def template_sha256(tokenizer: Any) -> str:
    """SHA-256 of the chat template: another template is another training set."""
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()


# ── Text to ids ──


@functools.lru_cache(maxsize=8)
def _text_encoder(tokenizer: Any) -> Any:
    encoder = copy.deepcopy(tokenizer.backend_tokenizer)
    encoder.encode_special_tokens = True  # text that spells a control token stays text
    return encoder


@functools.lru_cache(maxsize=8)
def _control_pattern(tokenizer: Any) -> re.Pattern[str]:
    longest_first = sorted(special_ids(tokenizer), key=len, reverse=True)
    any_token = "|".join(map(re.escape, longest_first))
    return re.compile(f"({any_token})")


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of plain texts, in one parallel call; no text becomes a control token."""
    encoded = _text_encoder(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    return [row.ids for row in encoded]


def _encode_pieces(tokenizer: Any, rows: list[list[Piece]]) -> list[list[int]]:
    """Ids of each row of pieces; a text that several rows share is encoded once."""
    places: dict[str, int] = {}
    for row in rows:
        for piece in row:
            if not piece.control:
                places.setdefault(piece.text, len(places))
    plain = encode_texts(tokenizer, list(places))
    special = special_ids(tokenizer)
    encoded = []
    for row in rows:
        ids: list[int] = []
        for piece in row:
            if piece.control:
                ids.append(special[piece.text])
            else:
                ids += plain[places[piece.text]]
        encoded.append(ids)
    return encoded


# ── Prompts ──


def prompt_ids(tokenizer: Any, messages: Chat, thinking: bool = False) -> list[int]:
    """Ids of a prompt: what the server computes for the same messages, `<bos>` included.

    Args:
      tokenizer: from `load_tokenizer`.
      messages: a chat, as the module's docstring says; its last message asks for an answer.
      thinking: ask the template for a prompt after which the model may fill its thought channel.
    """
    return render_prompts(tokenizer, [messages], [thinking])[0]


def render_prompts(
    tokenizer: Any, chats: Sequence[Chat], thinking: Sequence[bool]
) -> list[list[int]]:
    """`prompt_ids` for many chats, each with its `thinking`: much faster than one by one.

    Raises:
      UserError: the chat template isn't one that we can train with; says why.
    """
    rows = []
    for chat, thinks in zip(chats, thinking, strict=True):
        pieces = _template_pieces(tokenizer, chat, thinks, generation_prompt=True)
        rows.append(pieces)
    prompts = _encode_pieces(tokenizer, rows)
    for ids, thinks in zip(prompts, thinking, strict=True):
        _check_prompt(tokenizer, ids, thinks)
    return prompts


def _template_pieces(
    tokenizer: Any, chat: Chat, thinking: bool, generation_prompt: bool
) -> list[Piece]:
    """What the chat template writes: its control tokens and, between them, plain text."""
    pattern = _control_pattern(tokenizer)
    tools = chat[0].get("tools") if chat else None
    messages = []
    for message in chat:
        if not isinstance(message["content"], str):
            raise UserError("Every message needs a `content` that is a string.")
        messages.append({key: message[key] for key in FOR_THE_TEMPLATE if key in message})
    marker = _unused_marker([messages, tools])
    text = tokenizer.apply_chat_template(
        _break_up(messages, pattern, marker),
        tools=_break_up(tools, pattern, marker),
        tokenize=False,
        add_generation_prompt=generation_prompt,
        enable_thinking=thinking,
    )
    pieces = []
    control = False
    for part in pattern.split(text):  # plain text and control tokens by turns
        pieces.append(Piece(part.replace(marker, ""), control))
        control = not control
    _check_tools(pieces, messages, tools)
    return pieces


def _unused_marker(written: Any) -> str:
    """A character that stands nowhere in a structure of dicts and lists."""
    letters = set().union(*_strings(written))
    return next(marker for marker in MARKERS if marker not in letters)


def _strings(value: Any) -> Iterator[str]:
    """Every text in a structure of dicts and lists, the keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _break_up(value: Any, pattern: re.Pattern[str], marker: str) -> Any:
    """The same structure, where nothing that somebody wrote looks like a control token."""
    if isinstance(value, str):
        while pattern.search(value):  # a second time where two tokens overlap
            value = pattern.sub(lambda match: match[0][0] + marker + match[0][1:], value)
        return value
    if isinstance(value, dict):
        broken = {}
        for key, inner in value.items():
            broken[_break_up(key, pattern, marker)] = _break_up(inner, pattern, marker)
        return broken
    if isinstance(value, list):
        return [_break_up(inner, pattern, marker) for inner in value]
    return value


def _check_tools(pieces: list[Piece], messages: list[Message], tools: list[Any] | None) -> None:
    """Refuse a template that leaves tools, calls or results out: that chat never happened."""
    calls = results = 0
    for message in messages:
        calls += len(message.get("tool_calls") or [])
        if message["role"] == "tool":
            results += 1
    expected = {TOOL: len(tools or []), CALL: calls, RESULT_END: results}
    for token, count in expected.items():
        if pieces.count(Piece(token, control=True)) != count:
            raise UserError(
                f"This chat template doesn't write {token} for every tool, call and result of a "
                "chat with tools. Use the chat_template.jinja of the instruction-tuned checkpoint "
                "(-it), or take the rows with tools out of your data.")


def _check_prompt(tokenizer: Any, ids: list[int], thinking: bool) -> None:
    bos = tokenizer.bos_token_id
    if ids[:1] != [bos] or ids.count(bos) != 1:
        raise UserError(f"The chat template gives {ids.count(bos)} {tokenizer.bos_token} instead "
                        "of one at the start. Use the template that came with the checkpoint.")
    if thinking and ids[-1] == special_ids(tokenizer).get(CHANNEL_END):
        raise UserError("This chat template closes the thought channel even with "
                        "enable_thinking=True, so reasoning cannot be trained with it.")


# ── Training rows ──


def render(tokenizer: Any, messages: Chat) -> tuple[list[int], list[bool]]:
    """Token ids of a chat that ends with the model's message, and the mask of what is trained.

    ids = prompt ids + answer ids + `<turn|>`. The mask is True on every message of the model's and
    the `<turn|>` that ends it, False elsewhere. A message that calls tools ends with
    `<|tool_response>` instead: there the model stops, and the turn goes on after the result, which
    is read and not learned.

    Earlier messages of the model's stand as the server will send them back, that is without
    reasoning and, on the larger models, without the empty thought channel. These are not trained:

    - those with `train` False;
    - all of them if one has both a text and calls: Gemma 4's template writes such a text after the
      result, where the model never wrote it;
    - if the last message has its `reasoning`, which goes into the thought channel, those that stand
      without theirs: they would teach not to think. Calls since the last question keep theirs.
    """
    return render_chats(tokenizer, [messages])[0]


def render_chats(
    tokenizer: Any, chats: Sequence[Chat]
) -> list[tuple[list[int], list[bool]]]:
    """`render` for many chats at once: a list of (ids, mask)."""
    for chat in chats:
        if len(chat) < 2 or chat[-1]["role"] != "assistant":
            raise UserError("A training chat must end with an `assistant` message after a prompt.")
    asked = [chat[:-1] for chat in chats]
    thinking = [bool(chat[-1].get("reasoning")) for chat in chats]
    prompts = render_prompts(tokenizer, asked, thinking)
    answers = []
    for chat, prompt in zip(chats, prompts, strict=True):
        is_open = _thought_is_open(tokenizer, prompt)
        answers.append(_answer_pieces(tokenizer, chat[-1], is_open))
    targets = _encode_pieces(tokenizer, answers)
    rows = []
    for messages, thinks, prompt, target in zip(asked, thinking, prompts, targets, strict=True):
        mask = _stored_answers(tokenizer, prompt, messages, thinks)
        mask += [True] * len(target)
        rows.append((prompt + target, mask))
    return rows


def render_all(tokenizer: Any, chats: Sequence[Chat]) -> list[list[np.ndarray]]:
    """Token ids and masks of all chats, two lists with an array for each, with its progress."""
    progress = Progress(len(chats), "rendering")
    all_ids, all_masks = [], []
    for place in range(0, len(chats), 500):
        part = render_chats(tokenizer, chats[place:place + 500])
        for ids, mask in part:
            all_ids.append(np.array(ids, np.int32))
            all_masks.append(np.array(mask))
        progress.update(len(part))
    return [all_ids, all_masks]


def _thought_is_open(tokenizer: Any, prompt: list[int]) -> bool:
    """True if a prompt ends inside of a thought, as some templates do after a tool's result."""
    special = special_ids(tokenizer)
    for number in reversed(prompt):
        if number == special.get(CHANNEL):
            return True
        if number in special.values():
            return False
    return False


def _answer_pieces(tokenizer: Any, message: Message, thought_is_open: bool) -> list[Piece]:
    """What the model writes after the prompt: thought, text, calls, and the token that ends it."""
    pieces = []
    if reasoning := message.get("reasoning"):
        if thought_is_open:
            pieces.append(Piece(f"{reasoning}\n", control=False))
        else:
            pieces.append(Piece(CHANNEL, control=True))
            pieces.append(Piece(f"thought\n{reasoning}\n", control=False))
        pieces.append(Piece(CHANNEL_END, control=True))
    pieces.append(Piece(message["content"], control=False))
    if not message.get("tool_calls"):
        return [*pieces, Piece(TURN_END, control=True)]
    return [*pieces, *_call_pieces(tokenizer, message), Piece(RESULT, control=True)]


def _call_pieces(tokenizer: Any, message: Message) -> list[Piece]:
    """The calls of a message as the template writes them."""
    asked = {"role": "user", "content": "x"}
    calling = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
    pieces = _template_pieces(tokenizer, [asked, calling], thinking=False, generation_prompt=False)
    first = pieces.index(Piece(CALL, control=True))
    last = len(pieces) - 1
    while pieces[last] != Piece(CALL_END, control=True):
        last -= 1
    return pieces[first:last + 1]


def _stored_answers(
    tokenizer: Any, ids: list[int], messages: Chat, thinking: bool
) -> list[bool]:
    """True on the model's earlier messages, as far as they are trained; `render` says which."""
    mask = [False] * len(ids)
    trained = _trained_messages(messages, thinking)
    if not any(trained):
        return mask
    spans = list(_written_by_the_model(tokenizer, ids))
    if len(spans) != len(trained):
        raise UserError("The chat template does not render every model message as a turn of its "
                        "own, so what to train cannot be told apart.")
    for (first, end), learned in zip(spans, trained, strict=True):
        if learned:
            mask[first:end] = [True] * (end - first)
    return mask


def _trained_messages(messages: Chat, thinking: bool) -> list[bool]:
    """For each of the model's messages: is it trained?"""
    last_question = 0
    for place, message in enumerate(messages):
        if message["role"] == "user":
            last_question = place
    trained = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if message["content"] and message.get("tool_calls"):
            return []
        learned = message.get("train", True)
        if thinking and (place < last_question or not message.get("reasoning")):
            learned = False
        trained.append(learned)
    return trained


def _written_by_the_model(tokenizer: Any, ids: list[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of each message of the model's. Control ids only come from the template.

    A message ends with `<turn|>`, or with `<|tool_response>` where the model stopped for a result.
    Should an id span the end of "model\\n" and the message's first letters, it counts as context.
    """
    special = special_ids(tokenizer)
    for start, number in enumerate(ids):
        if number != special[TURN]:
            continue
        first = start + 1
        header = ""
        while len(header) < len(MODEL_HEADER) and first < len(ids):
            first += 1
            header = tokenizer.decode(ids[start + 1:first])
        if header.startswith(MODEL_HEADER):
            yield from _messages_of_a_turn(ids, first, special)


def _messages_of_a_turn(
    ids: list[int], first: int, special: dict[str, int]
) -> Iterator[tuple[int, int]]:
    """The model's messages in one turn of its own, which goes on after each tool's result."""
    place = first
    while place < len(ids):
        if ids[place] == special[TURN_END]:
            yield first, place + 1
            return
        if ids[place] != special.get(RESULT):
            place += 1
            continue
        yield first, place + 1
        while place < len(ids) and ids[place] == special[RESULT]:  # one result after the other
            place = ids.index(special[RESULT_END], place) + 1
        first = place
