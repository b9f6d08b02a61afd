"""Make data/ports, an example that asks for no Verilog: a sentence about a list of ports.

`python -m appendix.world.ports` writes 400 chats and 40 held-out questions, the same bytes anywhere.
"""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "data" / "ports"
SEED, CHATS, HELD_OUT = 5, 400, 40
MODULES = ("TopModule", "top", "unit", "core", "block", "part", "stage1", "cell1")
INPUTS = ("a", "b", "c", "x", "y", "sel", "en", "clk", "reset", "data_in", "value", "shift", "count")
OUTPUTS = ("out", "sum", "result", "z", "q", "data_out", "valid", "state")


def row(r):
    """(question, answer) about a module with one to four inputs and one or two outputs."""
    ports = [("input", name) for name in r.sample(INPUTS, r.randint(1, 4))]
    ports += [("output", name) for name in r.sample(OUTPUTS, r.randint(1, 2))]
    ports = [(kind, name, r.choice((1, 1, 2, 3, 4, 5, 6, 8, 16))) for kind, name in ports]
    module = r.choice(MODULES)
    listed = ", ".join(f"{kind} {f'[{width - 1}:0] ' * (width > 1)}{name}"
                       for kind, name, width in ports)
    told = [f"{kind} {name}" + f" ({width} bits)" * (width > 1) for kind, name, width in ports]
    return (f"Describe the ports of module {module}({listed});",
            f"{module} has {len(ports)} ports: {', '.join(told[:-1])} and {told[-1]}.")


def rows():
    """(chats, held-out questions): no question is in both, none comes twice."""
    r, found = random.Random(SEED), {}
    while len(found) < CHATS + HELD_OUT:
        found |= [row(r)]
    pairs = list(found.items())
    return ([{"messages": [{"role": "user", "content": question},
                           {"role": "assistant", "content": answer}]}
             for question, answer in pairs[HELD_OUT:]],
            [{"question": question, "answer": answer} for question, answer in pairs[:HELD_OUT]])


def main():
    """Write both files."""
    FOLDER.mkdir(exist_ok=True)
    for name, lines in zip(("train.jsonl", "held_out.jsonl"), rows()):
        (FOLDER / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
