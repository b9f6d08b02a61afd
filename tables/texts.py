"""How texts are read, decided once for all rooms: JSON lines, and where a model's thought ends."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

# What opens and closes a thought: Gemma 4's own tokens, and the tags that most datasets use.
THOUGHT_TAGS = (("<|channel>", "<channel|>"), ("<think>", "</think>"))


class JsonLine(NamedTuple):
    """One line of a JSON-lines file."""

    number: int  # counted from 1, blank lines included, as an editor shows it
    text: str
    value: Any  # None where `problem` is set
    problem: str  # "" if the line is JSON


def json_lines(content: bytes) -> Iterator[JsonLine]:
    """The lines of a JSON-lines file; a damaged line is told, not skipped.

    Lines end with a line feed and nothing else: JSON strings may hold U+2028, U+0085 and others
    that `str.splitlines` would cut at. A byte-order mark and blank lines are allowed.

    Args:
      content: the bytes of the file.
    """
    text = content.decode("utf-8-sig", errors="surrogateescape")
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON; 5,000 digits; 100,000 brackets
            yield JsonLine(number, line, None, str(error))
        else:
            yield JsonLine(number, line, value, "")


class Thought(NamedTuple):
    """A model's text, taken apart."""

    thought: str  # "" if the text doesn't begin with one
    rest: str
    closed: bool  # False: the text begins a thought that never ends, so `rest` is ""


def split_thought(text: str) -> Thought:
    """Cut the thought off that a text begins with.

    A thought stands at the beginning of a text and nowhere else: a tag in the middle of prose, in a
    comment or in a code fence is a letter like any other.
    """
    stripped = text.lstrip()
    for opening, closing in THOUGHT_TAGS:
        if not stripped.startswith(opening):
            continue
        thought, found, rest = stripped.removeprefix(opening).partition(closing)
        if not found:
            return Thought(thought.strip(), "", closed=False)
        return Thought(thought.strip(), rest, closed=True)
    return Thought("", text, closed=True)
