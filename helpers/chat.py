"""One renderer for the whole series: chat messages to token ids and loss mask, built together.

Training (02) and every request (05, 07) go through `prompt_ids`, so a model is trained on
exactly the ids it is served. The checkpoint's own chat template writes the prompt; what a user
wrote can never become a control token, because contents are encoded with special tokens off.
"""

import copy
import functools
import hashlib
import itertools
import re

import numpy as np

from helpers import remote
from helpers.run import Progress, UserError

TURN, TURN_END = "<|turn>", "<turn|>"
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
MARKERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode's noncharacters: never real text


def load_tokenizer(path):
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
def special_ids(tokenizer):
    """The control tokens of a tokenizer: their text and their id."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: number for number, token in added if token.special}


def template_sha256(tokenizer):
    """SHA-256 of the chat template: another template is another training set."""
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def _text_encoder(tokenizer):
    encoder = copy.deepcopy(tokenizer.backend_tokenizer)
    encoder.encode_special_tokens = True  # text that spells a control token stays text
    return encoder


def encode_texts(tokenizer, texts):
    """Ids of plain texts, in one parallel call; no text becomes a control token."""
    encoded = _text_encoder(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    return [row.ids for row in encoded]


def prompt_ids(tokenizer, messages, thinking=False):
    """Ids of a prompt: what the server computes for the same messages, `<bos>` included.

    Args:
      tokenizer: from `load_tokenizer`.
      messages: a list of {"role": "system"|"user"|"assistant", "content": str}.
      thinking: ask the template for a prompt after which the model may fill its thought channel.
    """
    return render_prompts(tokenizer, [messages], [thinking])[0]


def render_prompts(tokenizer, chats, thinking):
    """`prompt_ids` for many chats, each with its `thinking`: much faster than one by one."""
    special = special_ids(tokenizer)
    longest_first = sorted(special, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
    pieces = []  # per chat: the template's control tokens and, between them, plain text
    for chat, thinks in zip(chats, thinking, strict=True):
        marker, marked = _mark_control_text(pattern, chat)
        text = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True,
                                             enable_thinking=thinks)
        pieces.append([piece.replace(marker, "") for piece in pattern.split(text)])
    rows, texts = [], list(dict.fromkeys(itertools.chain(*(row[::2] for row in pieces))))
    plain = dict(zip(texts, encode_texts(tokenizer, texts), strict=True))  # each text once
    for row, thinks in zip(pieces, thinking, strict=True):  # the odd pieces are control tokens
        ids = []
        for place, piece in enumerate(row):
            ids += [special[piece]] if place % 2 else plain[piece]
        rows.append(ids)
        _check_prompt(tokenizer, ids, thinks)
    return rows


def _mark_control_text(pattern, chat):
    """Break up what looks like a control token in the contents: only the template's stay."""
    contents = [message["content"] for message in chat]
    if not all(isinstance(content, str) for content in contents):
        raise UserError("Every message needs a `content` that is a string.")
    marker = next(mark for mark in MARKERS if not any(mark in text for text in contents))
    marked = []
    for message, content in zip(chat, contents, strict=True):
        while pattern.search(content):
            content = pattern.sub(lambda match: match[0][0] + marker + match[0][1:], content)
        marked.append({"role": message["role"], "content": content})
    return marker, marked


def _check_prompt(tokenizer, ids, thinking):
    special, bos = special_ids(tokenizer), tokenizer.bos_token_id
    if ids[:1] != [bos] or ids.count(bos) != 1:
        raise UserError(f"The chat template gives {ids.count(bos)} {tokenizer.bos_token} instead "
                        "of one at the start. Use the template that came with the checkpoint.")
    if thinking and ids[-1] == special.get(CHANNEL_END):
        raise UserError("This chat template closes the thought channel even with "
                        "enable_thinking=True, so reasoning cannot be trained with it.")


def render(tokenizer, messages):
    """Token ids of a chat that ends with the model's turn, and the mask of what is trained.

    ids = prompt ids + answer ids + `<turn|>`. The mask is True on every model turn and the
    `<turn|>` that ends it, False elsewhere. Earlier model turns stand as the server will send them
    back, that is without reasoning and, on the larger models, without the empty thought channel.
    The last message may carry its `reasoning`, which goes into the thought channel. Then it alone
    is trained: earlier turns, without their thoughts, would teach not to think.
    """
    return render_chats(tokenizer, [messages])[0]


def render_chats(tokenizer, chats):
    """`render` for many chats at once: a list of (ids, mask)."""
    for chat in chats:
        if len(chat) < 2 or chat[-1]["role"] != "assistant":
            raise UserError("A training chat must end with an `assistant` message after a prompt.")
    thinking = [bool(chat[-1].get("reasoning")) for chat in chats]
    prompts = render_prompts(tokenizer, [chat[:-1] for chat in chats], thinking)
    answers = encode_texts(tokenizer, [chat[-1]["content"] for chat in chats])
    special, rows = special_ids(tokenizer), []
    for chat, prompt, answer, thinks in zip(chats, prompts, answers, thinking, strict=True):
        target = [*answer, special[TURN_END]]
        earlier = [False] * len(prompt) if thinks else _stored_answers(tokenizer, prompt, chat[:-1])
        if thinks:
            inside, = encode_texts(tokenizer, [f"thought\n{chat[-1]['reasoning']}\n"])
            target = [special[CHANNEL], *inside, special[CHANNEL_END], *target]
        rows.append((prompt + target, earlier + [True] * len(target)))
    return rows


def render_all(tokenizer, chats):
    """Token ids and masks of all chats, two lists with an array for each, with its progress."""
    progress, rendered = Progress(len(chats), "rendering"), []
    for place in range(0, len(chats), 500):
        part = render_chats(tokenizer, chats[place:place + 500])
        rendered += [(np.array(ids, np.int32), np.array(mask)) for ids, mask in part]
        progress.update(len(part))
    return [list(column) for column in zip(*rendered)]


def _stored_answers(tokenizer, ids, messages):
    """True on the model's earlier turns. Control ids only come from the template: they are bounds.

    Should an id span the end of "model\\n" and the answer's first letters, it counts as context.
    """
    mask, answers = [False] * len(ids), sum(m["role"] == "assistant" for m in messages)
    if not answers:
        return mask
    special, header = special_ids(tokenizer), "model\n"
    for start in (place for place, number in enumerate(ids) if number == special[TURN]):
        first = start + 2
        while len(tokenizer.decode(ids[start + 1:first])) < len(header) and first < len(ids):
            first += 1
        opening = tokenizer.decode(ids[start + 1:first])
        if opening.startswith(header) and special[TURN_END] in ids[first:]:
            last = ids.index(special[TURN_END], first)
            mask[first:last + 1] = [True] * (last + 1 - first)
            answers -= 1
    if answers:
        raise UserError("The chat template does not render every model message as a turn of its "
                        "own, so what to train cannot be told apart.")
    return mask
