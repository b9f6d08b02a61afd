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
from pathlib import Path
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
        why = str(error).splitlines()[0]
        raise UserError(f"No tokenizer could be loaded from {path}: {why}") from error
    knows_turns = {TURN, TURN_END} <= special_ids(tokenizer).keys()
    if not knows_turns or tokenizer.bos_token is None:
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
    """Ids after which nobody wants more of an answer.

    They're `<eos>`, `<turn|>` and `<|tool_response>`, where a model that called a tool waits for
    the result.
    """
    special = special_ids(tokenizer)
    stops = {tokenizer.eos_token_id, special[TURN_END]}
    if RESULT in special:
        stops.add(special[RESULT])
    return stops


def template_sha256(tokenizer: Any) -> str:
    """SHA-256 of the chat template: another template is another training set."""
    template = tokenizer.get_chat_template()
    return hashlib.sha256(template.encode()).hexdigest()


def identity(tokenizer: Any, base: str) -> dict[str, str]:
    """What `meta.json` says of the model that rows are made for.

    Args:
      tokenizer: from `load_tokenizer`.
      base: a directory, a name on the Hugging Face hub, or a gs:// address.
    """
    folder = Path(base)
    return {
        "template_sha256": template_sha256(tokenizer),
        "tokenizer": base,
        "base_model": folder.name if folder.is_dir() else base,
        "base_path": base,
    }


# ── Text to ids ──


@functools.lru_cache(maxsize=8)
def _text_encoder(tokenizer: Any) -> Any:
    """A copy of a tokenizer's encoder that knows no control tokens."""
    encoder = copy.deepcopy(tokenizer.backend_tokenizer)
    encoder.encode_special_tokens = True  # text that spells a control token stays text
    return encoder


@functools.lru_cache(maxsize=8)
def _control_pattern(tokenizer: Any) -> re.Pattern[str]:
    """What finds every control token in a text; in a group, so that `split` keeps the tokens."""
    longest_first = sorted(special_ids(tokenizer), key=len, reverse=True)
    any_token = "|".join(re.escape(token) for token in longest_first)
    return re.compile(f"({any_token})")


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of plain texts, in one parallel call; no text becomes a control token."""
    encoded = _text_encoder(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    return [row.ids for row in encoded]


def _encode_pieces(tokenizer: Any, rows: list[list[Piece]]) -> list[list[int]]:
    """Ids of each row of pieces; a text that several rows share is encoded once."""
    texts = []
    for row in rows:
        for piece in row:
            if not piece.control:
                texts.append(piece.text)
    unique = list(dict.fromkeys(texts))
    ids_of_text = dict(zip(unique, encode_texts(tokenizer, unique), strict=True))
    special = special_ids(tokenizer)

    encoded = []
    for row in rows:
        ids: list[int] = []
        for piece in row:
            if piece.control:
                ids.append(special[piece.text])
            else:
                ids += ids_of_text[piece.text]
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
    tools = None
    if chat:
        tools = chat[0].get("tools")
    messages = []
    for message in chat:
        if not isinstance(message["content"], str):
            raise UserError("Every message needs a `content` that is a string.")
        seen = {key: message[key] for key in FOR_THE_TEMPLATE if key in message}
        messages.append(seen)

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
    letters: set[str] = set()
    for text in _strings(written):
        letters.update(text)
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
        return _break_up_text(value, pattern, marker)
    if isinstance(value, dict):
        broken = {}
        for key, inner in value.items():
            broken_key = _break_up(key, pattern, marker)
            broken[broken_key] = _break_up(inner, pattern, marker)
        return broken
    if isinstance(value, list):
        return [_break_up(inner, pattern, marker) for inner in value]
    return value


def _break_up_text(text: str, pattern: re.Pattern[str], marker: str) -> str:
    """A text with the marker after the first letter of each control token that's spelled in it."""
    def broken(match: re.Match[str]) -> str:
        token = match[0]
        return token[0] + marker + token[1:]

    while pattern.search(text):  # a second time where two tokens overlap
        text = pattern.sub(broken, text)
    return text


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
    """Refuse a template whose prompts we can't train with.

    Raises:
      UserError: `<bos>` isn't there once, at the start, or there's no room for a thought.
    """
    bos = tokenizer.bos_token_id
    count = ids.count(bos)
    if count != 1 or ids[0] != bos:
        raise UserError(f"The chat template gives {count} {tokenizer.bos_token} instead "
                        "of one at the start. Use the template that came with the checkpoint.")
    closes_thought = ids[-1] == special_ids(tokenizer).get(CHANNEL_END)
    if thinking and closes_thought:
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
    - if the model thinks in the last turn (`last_turn_thinks`), what it says before that turn's
      first thought: that would teach it not to think. Answers to earlier questions belong to it,
      because they stand without their thoughts. Calls since the last question keep theirs.

    Raises:
      UserError: as for `render_chats`.
    """
    return render_chats(tokenizer, [messages])[0]


def render_chats(
    tokenizer: Any, chats: Sequence[Chat]
) -> list[tuple[list[int], list[bool]]]:
    """`render` for many chats at once: a list of (ids, mask).

    Raises:
      UserError: a chat doesn't end with an answer, or the chat template can't be trained with.
    """
    asked = []
    thinking = []
    for messages in chats:
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise UserError("A training chat must end with an `assistant` message after a prompt.")
        asked.append(messages[:-1])
        thinking.append(last_turn_thinks(messages))
    prompts = render_prompts(tokenizer, asked, thinking)

    answers = []
    for messages, prompt in zip(chats, prompts, strict=True):
        is_open = _thought_is_open(tokenizer, prompt)
        pieces = _answer_pieces(tokenizer, messages[-1], is_open)
        answers.append(pieces)
    targets = _encode_pieces(tokenizer, answers)

    rows = []
    for before, thinks, prompt, target in zip(asked, thinking, prompts, targets, strict=True):
        mask = _stored_answers(tokenizer, prompt, before, thinks)
        mask += [True] * len(target)
        rows.append((prompt + target, mask))
    return rows


def render_all(tokenizer: Any, chats: Sequence[Chat]) -> list[list[np.ndarray]]:
    """`render_chats` in parts, with its progress.

    Returns:
      Two lists with an array for each chat: its token ids (int32), and its mask (bool).
    """
    progress = Progress(len(chats), "rendering")
    all_ids = []
    all_masks = []
    for first in range(0, len(chats), 500):
        rows = render_chats(tokenizer, chats[first:first + 500])
        for ids, mask in rows:
            all_ids.append(np.array(ids, np.int32))
            all_masks.append(np.array(mask))
        progress.update(len(rows))
    return [all_ids, all_masks]


def last_turn_thinks(messages: Chat) -> bool:
    """Has a message that is trained, after a chat's last question, its `reasoning`?

    Then a server is asked to let the model think (`<|think|>`). Gemma 4's template leaves the
    thoughts of earlier turns out of the prompt, so they don't count.
    """
    thinks = False
    for message in messages:
        if message["role"] == "user":
            thinks = False
        elif message.get("reasoning") and message.get("train", True):
            thinks = True
    return thinks


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
    reasoning = message.get("reasoning")
    if reasoning:
        thought = f"{reasoning}\n"
        if not thought_is_open:
            pieces.append(Piece(CHANNEL, control=True))
            thought = f"thought\n{reasoning}\n"
        pieces.append(Piece(thought, control=False))
        pieces.append(Piece(CHANNEL_END, control=True))
    elif thought_is_open:  # and nothing is thought
        pieces.append(Piece(CHANNEL_END, control=True))

    pieces.append(Piece(message["content"], control=False))
    end = TURN_END
    if message.get("tool_calls"):
        pieces += _call_pieces(tokenizer, message)
        end = RESULT
    pieces.append(Piece(end, control=True))
    return pieces


def _call_pieces(tokenizer: Any, message: Message) -> list[Piece]:
    """The calls of a message as the template writes them, in a chat with nothing else in it."""
    asked = {"role": "user", "content": "x"}
    calling = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
    pieces = _template_pieces(tokenizer, [asked, calling], thinking=False, generation_prompt=False)
    first = pieces.index(Piece(CALL, control=True))
    last = len(pieces) - 1
    call_end = Piece(CALL_END, control=True)
    while pieces[last] != call_end:
        last -= 1
    return pieces[first:last + 1]


def _stored_answers(
    tokenizer: Any, ids: list[int], messages: Chat, thinking: bool
) -> list[bool]:
    """True on the model's earlier messages, as far as they are trained; `render` says which."""
    mask = [False] * len(ids)
    trained = trained_messages(messages, thinking)
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


def trained_messages(messages: Chat, thinking: bool) -> list[bool]:
    """For each of the model's messages: is it trained? An empty list where none is.

    Args:
      messages: of a training chat, all but the last one.
      thinking: does its last turn think? (`last_turn_thinks`)
    """
    last_question = 0
    for place, message in enumerate(messages):
        if message["role"] == "user":
            last_question = place
    trained = []
    has_thought = False  # has the last turn, so far?
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if message["content"] and message.get("tool_calls"):
            return []
        learned = message.get("train", True)
        if learned and place > last_question and message.get("reasoning"):
            has_thought = True
        if thinking and not has_thought:
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
        header = ""  # says whose turn it is
        while len(header) < len(MODEL_HEADER) and first < len(ids):
            first += 1
            header = tokenizer.decode(ids[start + 1:first])
        if header.startswith(MODEL_HEADER):
            yield from _messages_of_a_turn(ids, first, special)


def _messages_of_a_turn(
    ids: list[int], first: int, special: dict[str, int]
) -> Iterator[tuple[int, int]]:
    """(first, end) of the model's messages in one turn, which goes on after each tool's result."""
    turn_end = special[TURN_END]
    result = special.get(RESULT)
    place = first
    while place < len(ids):
        number = ids[place]
        if number == turn_end:
            yield first, place + 1
            return
        if number == result:
            yield first, place + 1
            first = _after_results(ids, place, special)
            place = first
        else:
            place += 1


def _after_results(ids: list[int], place: int, special: dict[str, int]) -> int:
    """Where the model goes on: after the tool's result at `place` and those right behind it."""
    while place < len(ids) and ids[place] == special[RESULT]:
        place = ids.index(special[RESULT_END], place) + 1
    return place
