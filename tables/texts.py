"""How texts are read, decided once for all rooms: JSON lines, and where a model's thought ends."""

import bisect
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

# What opens and closes a thought: Gemma 4's own tokens, and the tags that most datasets use.
THOUGHT_TAGS = (("<|channel>", "<channel|>"), ("<think>", "</think>"))
# A closing tag that no opening tag belongs to, because the prompt opened the thought.
LONE_CLOSING = re.compile(r"^[ \t]*</think>[ \t]*$|</think>(?=\s*<answer>)", re.MULTILINE)


class JsonLine(NamedTuple):
    """One line of a JSON-lines file."""

    number: int  # counted from 1, blank lines included, as an editor shows it
    text: str
    value: Any  # None where `problem` is set
    problem: str  # "" if the line is JSON


def json_lines(content: bytes) -> Iterator[JsonLine]:
    """The lines of a JSON-lines file; a damaged line is reported, not skipped.

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


def fences(text: str) -> list[tuple[int, int]]:
    """(first, end) of every closed code fence of a text, the lines with the backticks included.

    A fence closes at the next line of backticks alone. If another fence opens before that, the
    first one was never closed, and isn't counted.
    """
    spans = []
    opened = None
    place = 0
    for line in text.split("\n"):
        mark = line.strip()
        is_fence = mark.startswith("```") and "`" not in mark[3:]
        if is_fence:
            if mark == "```" and opened is not None:
                spans.append((opened, place + len(line)))
                opened = None
            else:
                opened = place
        place += len(line) + 1
    return spans


def places_outside(text: str, tag: str, spans: list[tuple[int, int]]) -> list[int]:
    """Where a tag stands in a text, leaving out the places inside one of the `spans`."""
    places = []
    for match in re.finditer(re.escape(tag), text):
        place = match.start()
        if not _inside(place, spans):
            places.append(place)
    return places


def text_problem(values: dict[str, Any]) -> str:
    """Which of the named values can't be used as text, and why: the first; "" if all can."""
    for name, value in values.items():
        if not isinstance(value, str):
            return f"{name} is not text"
        if re.search("[\ud800-\udfff]", value):
            return f"{name} is not Unicode"
        if not value.strip():
            return f"empty {name}"
    return ""


class Thought(NamedTuple):
    """A model's text, taken apart."""

    thought: str  # "" if the text doesn't begin with one
    rest: str
    closed: bool  # False: the text begins a thought that never ends, so `rest` is ""


def split_thought(text: str) -> Thought:
    """Cut the thought off that a text begins with.

    A thought stands at the beginning of a text and nowhere else: a tag in the middle of prose, in a
    comment or in a code fence is a letter like any other. In detail:

    - A thought ends at its first closing tag outside its own code fences. If all of them stand in
      fences, it ends at the first: a fence that the thought left open may seem to hide it.
    - Several thoughts in a row count as one.
    - If the prompt has already opened the thought, the text has a closing tag and no opening one.
      That tag counts where it stands alone on its line or right before `<answer>`, outside of
      fences and with no opening tag before it.
    """
    thoughts = []
    rest = text
    while True:
        tags = _opening_tags(rest)
        if tags is None:
            break
        opening, closing = tags
        inside = rest.lstrip().removeprefix(opening)
        if opening == "<|channel>":
            inside = inside.removeprefix("thought\n")  # the channel's name
        end = _end_of_thought(inside, closing)
        if end < 0:
            thoughts.append(inside.strip())
            return Thought("\n".join(thoughts), "", closed=False)
        thoughts.append(inside[:end].strip())
        rest = inside[end + len(closing):]
    if not thoughts and "</think>" in text:
        return _opened_by_the_prompt(text)
    thought = "\n".join(filter(None, thoughts))
    return Thought(thought, rest, closed=True)


def _opening_tags(text: str) -> tuple[str, str] | None:
    """The pair of tags whose first one opens this text, or None."""
    stripped = text.lstrip()
    for opening, closing in THOUGHT_TAGS:
        if stripped.startswith(opening):
            return opening, closing
    return None


def _end_of_thought(inside: str, closing: str) -> int:
    """Where the closing tag of an opened thought stands; -1 if there's none."""
    first = inside.find(closing)
    if first < 0 or "```" not in inside[:first]:
        return first
    outside = places_outside(inside, closing, fences(inside))
    if not outside:
        return first
    return outside[0]


def _opened_by_the_prompt(text: str) -> Thought:
    """A text that has a closing tag and no opening one, taken apart."""
    spans = fences(text)
    for match in LONE_CLOSING.finditer(text):
        start = match.start()
        before = text[:start]
        if "<think>" in before:
            break
        if not _inside(start, spans):
            rest = text[match.end():]
            return Thought(before.strip(), rest, closed=True)
    return Thought("", text, closed=True)


def _inside(place: int, spans: list[tuple[int, int]]) -> bool:
    """Does a place lie in one of these spans, which are sorted and don't overlap?"""
    number = bisect.bisect_right(spans, place, key=_first)  # of the spans that have begun
    if number == 0:
        return False
    _, end = spans[number - 1]
    return place < end


def _first(span: tuple[int, int]) -> int:
    return span[0]
