"""Make data/ports, an example that asks for no Verilog: a sentence about a list of ports.

`python -m appendix.world.ports` writes 400 chats and 40 held-out questions, the same bytes
anywhere.
"""

import json
import random
from pathlib import Path
from typing import Any

from appendix.world.families import Port, Random

FOLDER = Path(__file__).resolve().parent.parent.parent / "data" / "ports"
SEED, CHATS, HELD_OUT = 5, 400, 40
MODULES = ("TopModule", "top", "unit", "core", "block", "part", "stage1", "cell1")
INPUTS = ("a", "b", "c", "x", "y", "sel", "en", "clk", "reset", "data_in", "value", "shift",
          "count")
OUTPUTS = ("out", "sum", "result", "z", "q", "data_out", "valid", "state")
WIDTHS = (1, 1, 2, 3, 4, 5, 6, 8, 16)


def drawn_ports(r: Random) -> list[Port]:
    """One to four inputs and one or two outputs, all names before all widths."""
    inputs = r.sample(INPUTS, r.randint(1, 4))
    outputs = r.sample(OUTPUTS, r.randint(1, 2))
    ports = [Port("input", name, r.choice(WIDTHS)) for name in inputs]
    ports += [Port("output", name, r.choice(WIDTHS)) for name in outputs]
    return ports


def row(r: Random) -> tuple[str, str]:
    """(question, answer) about a module."""
    ports = drawn_ports(r)
    module = r.choice(MODULES)
    declared, described = [], []
    for port in ports:
        declared.append(f"{port.direction} {port.vector}{port.name}")
        description = f"{port.direction} {port.name}"
        if port.width > 1:
            description += f" ({port.width} bits)"
        described.append(description)

    question = f"Describe the ports of module {module}({', '.join(declared)});"
    *others, last = described
    answer = f"{module} has {len(ports)} ports: {', '.join(others)} and {last}."
    return question, answer


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(chats, held-out questions): no question is in both, none comes twice."""
    r = random.Random(SEED)
    answers: dict[str, str] = {}  # by question
    while len(answers) < CHATS + HELD_OUT:
        question, answer = row(r)
        answers[question] = answer

    held_out: list[dict[str, Any]] = []
    chats: list[dict[str, Any]] = []
    for question, answer in answers.items():
        if len(held_out) < HELD_OUT:
            held_out.append({"question": question, "answer": answer})
            continue
        messages = [{"role": "user", "content": question},
                    {"role": "assistant", "content": answer}]
        chats.append({"messages": messages})
    return chats, held_out


def main() -> None:
    """Write both files."""
    FOLDER.mkdir(exist_ok=True)
    chats, held_out = rows()
    for name, entries in (("train.jsonl", chats), ("held_out.jsonl", held_out)):
        lines = [json.dumps(entry) + "\n" for entry in entries]
        (FOLDER / name).write_text("".join(lines))


if __name__ == "__main__":
    main()
