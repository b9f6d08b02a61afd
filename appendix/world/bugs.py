"""Bugs as people write them: one change in a module's body and none in its specification.

Public code is often wrong, and a model that reads it learns right and wrong alike. `bug` makes a
`Design`'s body wrong in one place: another operator, edge, constant, condition, branch, range or
operand. Header, specification and everything else stay as they are. Most of these changes fail the
design's testbench, not all: adding 1 to a constant that the width cuts off again changes nothing.
"""

import random
import re
from dataclasses import replace
from typing import NamedTuple

from appendix.world.families import Design

# What a tired author writes instead. A comparison in an `assign` and the nonblocking assignment
# share the sign `<=`, so that neither is in the table.
OPERATORS = {"&": "|", "|": "&", "^": "|", "+": "-", "-": "+", "==": "!=", "!=": "==", "<": ">",
             ">": "<", ">=": ">", "<<": ">>", ">>": "<<", ">>>": "<<", "~": "", "!": ""}
OPERATOR = re.compile(r">>>|<<|>>|==|!=|<=|>=|[&|^+\-<>~!]")
EDGE = re.compile(r"\b(posedge|negedge) (?=cl)")
CONSTANT = re.compile(r"(?<![\w'\[:])\d+(?![\w'\]:])")
BINARY = re.compile(r"(?<='b)[01]+")
CONDITION = re.compile(r"\bif \((!?)([^()]+)\)")
CHOICE = re.compile(r"\? ([^?:]+) : ([^?:;]+)")
RANGE = re.compile(r"\[(\d+):(\d+)\]")
INDEX = re.compile(r"\[(\d+)\]")
ASSIGNED = re.compile(r"^(.*?(?:<=|=) )([^=<>?]+);$")
WORD = re.compile(r"[A-Za-z_]\w*")


def replaced(line: str, match: re.Match, text: str) -> str:
    """The line with the match replaced by `text`."""
    return line[:match.start()] + text + line[match.end():]


def other_operators(line: str) -> list[str]:
    """One operator swapped or dropped, or a whole right side inverted."""
    lines = []
    for match in OPERATOR.finditer(line):
        if match[0] in OPERATORS:
            lines.append(replaced(line, match, OPERATORS[match[0]]))
    plain = ASSIGNED.match(line)
    if plain and WORD.fullmatch(plain[2]):
        lines.append(f"{plain[1]}~{plain[2]};")
    return lines


def other_edges(line: str) -> list[str]:
    """The clock's other edge."""
    lines = []
    for match in EDGE.finditer(line):
        other = {"posedge": "negedge ", "negedge": "posedge "}[match[1]]
        lines.append(replaced(line, match, other))
    return lines


def other_constants(line: str) -> list[str]:
    """A number one too large or too small, or one bit of a binary literal inverted."""
    lines = []
    for match in CONSTANT.finditer(line):
        number = int(match[0])
        too_large = str(number + 1)
        lines.append(replaced(line, match, too_large))
        if number > 1:
            too_small = str(number - 1)
            lines.append(replaced(line, match, too_small))
    for match in BINARY.finditer(line):
        first_bits, last_bit = match[0][:-1], match[0][-1]
        inverted = {"0": "1", "1": "0"}[last_bit]
        lines.append(replaced(line, match, first_bits + inverted))
    return lines


def other_conditions(line: str) -> list[str]:
    """An `if` that asks for the opposite."""
    lines = []
    for match in CONDITION.finditer(line):
        asked = match[2]
        if " " in asked:  # a comparison; its operator is swapped elsewhere
            continue
        opposite = asked if match[1] else f"!{asked}"
        lines.append(replaced(line, match, f"if ({opposite})"))
    return lines


def other_branches(line: str) -> list[str]:
    """The two sides of `? :` in the wrong order."""
    lines = []
    for match in CHOICE.finditer(line):
        lines.append(replaced(line, match, f"? {match[2]} : {match[1]}"))
    return lines


def other_ranges(line: str) -> list[str]:
    """A range one bit too short, or the neighboring bit."""
    lines = []
    for match in RANGE.finditer(line):
        high, low = int(match[1]), int(match[2])
        if high > low:
            lines.append(replaced(line, match, f"[{high - 1}:{low}]"))
    for match in INDEX.finditer(line):
        bit = int(match[1])
        neighbor = bit - 1 if bit else 1
        lines.append(replaced(line, match, f"[{neighbor}]"))
    return lines


def other_operands(line: str, design: Design) -> list[str]:
    """An input taken for another one of the same width, right of the assignment."""
    widths = {}
    for port in design.ports:
        if port.direction == "input":
            widths[port.name] = port.width
    if "= " not in line:
        return []
    right_side = line.index("= ") + 2

    lines = []
    for match in WORD.finditer(line, right_side):
        operand = match[0]
        if operand not in widths:
            continue
        for name, width in widths.items():
            if name != operand and width == widths[operand]:
                lines.append(replaced(line, match, name))
    return lines


def wrong_lines(line: str, design: Design) -> dict[str, list[str]]:
    """{kind of bug: what the line may become}."""
    if line.lstrip().startswith("reg "):  # a declaration
        return {"range": other_ranges(line)}
    return {
        "operator": other_operators(line),
        "edge": other_edges(line),
        "constant": other_constants(line),
        "condition": other_conditions(line),
        "branch": other_branches(line),
        "range": other_ranges(line),
        "operand": other_operands(line, design),
    }


class Bug(NamedTuple):
    """One way in which a module can be wrong."""

    kind: str    # a key of `wrong_lines`
    number: int  # of the line of the body, from 0
    line: str    # what it becomes


def bugs(design: Design) -> list[Bug]:
    """Every bug this module can have."""
    candidates = []
    for number, line in enumerate(design.body):
        for kind, lines in wrong_lines(line, design).items():
            for wrong in lines:
                if wrong != line:
                    candidates.append(Bug(kind, number, wrong))
    return candidates


def bug(r: random.Random, design: Design) -> Design:
    """The design with one bug in its body, first a kind drawn and then a place.

    Raises:
      IndexError: if nothing in the body can go wrong (no family draws such a body).
    """
    by_kind: dict[str, list[Bug]] = {}
    for candidate in bugs(design):
        by_kind.setdefault(candidate.kind, []).append(candidate)
    kind = r.choice(sorted(by_kind))
    drawn = r.choice(by_kind[kind])

    body = list(design.body)
    body[drawn.number] = drawn.line
    return replace(design, body=tuple(body))
