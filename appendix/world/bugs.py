"""Bugs as people write them: one change in a module's body, which its specification doesn't know of.

Public code is often wrong, and a model that reads it learns right and wrong alike. `bug` makes a
`Design`'s body wrong in one place: another operator, edge, constant, condition, branch, range or
operand. Header, specification and everything else stay as they are. Most of these changes fail the
design's testbench, not all: adding 1 to a constant that the width cuts off again changes nothing.
"""

import random
import re
from dataclasses import replace

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
        edge = "negedge " if match[1] == "posedge" else "posedge "
        lines.append(replaced(line, match, edge))
    return lines


def other_constants(line: str) -> list[str]:
    """A number one too large or too small, or one bit of a binary literal inverted."""
    lines = []
    for match in CONSTANT.finditer(line):
        number = int(match[0])
        lines.append(replaced(line, match, str(number + 1)))
        if number > 1:
            lines.append(replaced(line, match, str(number - 1)))
    for match in BINARY.finditer(line):
        last = "1" if match[0][-1] == "0" else "0"
        lines.append(replaced(line, match, match[0][:-1] + last))
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
    """A range one bit too short, or the neighbouring bit."""
    lines = []
    for match in RANGE.finditer(line):
        high, low = int(match[1]), int(match[2])
        if high > low:
            lines.append(replaced(line, match, f"[{high - 1}:{low}]"))
    for match in INDEX.finditer(line):
        bit = int(match[1])
        lines.append(replaced(line, match, f"[{bit - 1 if bit else 1}]"))
    return lines


def other_operands(line: str, design: Design) -> list[str]:
    """An input taken for another one of the same width, right of the assignment."""
    widths = {port.name: port.width for port in design.ports if port.direction == "input"}
    if "= " not in line:
        return []
    lines = []
    for match in WORD.finditer(line, line.index("= ") + 2):
        for name, width in widths.items():
            if match[0] in widths and name != match[0] and width == widths[match[0]]:
                lines.append(replaced(line, match, name))
    return lines


def wrong_lines(line: str, design: Design) -> dict[str, list[str]]:
    """{kind of bug: what the line may become}."""
    if line.lstrip().startswith("reg "):  # a declaration
        return {"range": other_ranges(line)}
    return {"operator": other_operators(line), "edge": other_edges(line),
            "constant": other_constants(line), "condition": other_conditions(line),
            "branch": other_branches(line), "range": other_ranges(line),
            "operand": other_operands(line, design)}


def bugs(design: Design) -> list[tuple[str, int, str]]:
    """Every bug this module can have: (kind, which line of the body, what it becomes)."""
    candidates = []
    for number, line in enumerate(design.body):
        for kind, lines in wrong_lines(line, design).items():
            for wrong in lines:
                if wrong != line:
                    candidates.append((kind, number, wrong))
    return candidates


def bug(r: random.Random, design: Design) -> Design:
    """The design with one bug in its body, first a kind drawn and then a place.

    Raises:
      IndexError: if nothing in the body can go wrong (no family draws such a body).
    """
    candidates = bugs(design)
    kinds = sorted({kind for kind, _, _ in candidates})
    drawn = r.choice(kinds)
    _, number, wrong = r.choice([candidate for candidate in candidates if candidate[0] == drawn])
    body = [*design.body[:number], wrong, *design.body[number + 1:]]
    return replace(design, body=tuple(body))
