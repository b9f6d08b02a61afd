"""Make data/tools, thirty chats in which a model calls two tools, for the page about own data.

`python -m appendix.world.calls` writes them, the same bytes anywhere. The tools count bits, which a
language model does badly. Four chats need no tool, three call twice at once, and ten say what the
model thought before it called.
"""

import json
import random
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent.parent / "data" / "tools" / "train.jsonl"
SEED = 11
NAMES = ("a", "b", "sum", "data_in", "data_out", "count", "value", "state", "addr", "result")
THINGS = ("counter", "state machine", "address", "shift register")
THANKS = (("Thank you.", "You are welcome."), ("Good morning.", "Good morning."),
          ("What can you do?", "I count the bits of a range, and the bits that hold a number."),
          ("Which tools are there?", "width and clog2."))

Row = dict[str, Any]


def _tool(name: str, description: str, arguments: tuple[str, ...]) -> Row:
    """A function of whole numbers, as the OpenAI API declares it."""
    properties = {argument: {"type": "integer"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [_tool("width", "Counts the bits of [high:low].", ("high", "low")),
         _tool("clog2", "Counts the bits that hold n states.", ("n",))]


def width(high: int, low: int) -> int:
    """The bits of the range [high:low]."""
    return high - low + 1


def clog2(n: int) -> int:
    """The bits that tell n states apart."""
    return (n - 1).bit_length()


def _call(number: int, name: str, **arguments: int) -> Row:
    """A call as the OpenAI API sends it: its arguments are a JSON text."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _chat(question: str, calls: list[Row], results: list[int], answer: str, thought: str) -> Row:
    """A row: the question, the calls with their results, the answer."""
    calling = {"role": "assistant", "content": None, "tool_calls": calls}
    if thought:
        calling["reasoning_content"] = thought
    messages = [{"role": "user", "content": question}, calling]
    for call, result in zip(calls, results, strict=True):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    messages.append({"role": "assistant", "content": answer})
    return {"tools": TOOLS, "messages": messages}


def _of_a_range(r: random.Random, thought: str = "") -> Row:
    """A question about a range, which starts at 0 in three of four chats."""
    low = r.choice((0, 0, 0, r.randint(1, 8)))
    high = low + r.randint(1, 15)
    name = r.choice(NAMES)
    bits = width(high, low)
    call = _call(1, "width", high=high, low=low)
    question = f"How many bits has [{high}:{low}] {name}?"
    return _chat(question, [call], [bits], f"{name} has {bits} bits.", thought)


def _of_states(r: random.Random, thought: str = "") -> Row:
    """A question about a number of values."""
    n = r.randint(3, 200)
    thing = r.choice(THINGS)
    bits = clog2(n)
    call = _call(1, "clog2", n=n)
    question = f"How many bits does a {thing} with {n} values need?"
    return _chat(question, [call], [bits], f"It needs {bits} bits.", thought)


def _of_two_ranges(r: random.Random) -> Row:
    """A question that takes two calls at once."""
    first, second = r.sample(NAMES, 2)
    first_high = r.randint(1, 15)
    second_high = r.randint(1, 15)
    calls = [_call(1, "width", high=first_high, low=0),
             _call(2, "width", high=second_high, low=0)]
    bits = [width(first_high, 0), width(second_high, 0)]
    question = f"How many bits have [{first_high}:0] {first} and [{second_high}:0] {second}?"
    answer = f"{first} has {bits[0]} bits and {second} has {bits[1]} bits."
    return _chat(question, calls, bits, answer, "")


def rows() -> list[Row]:
    """The thirty rows, shuffled."""
    r = random.Random(SEED)
    chats = []
    for _ in range(6):
        chats.append(_of_a_range(r, "A range, so width."))
    for _ in range(8):
        chats.append(_of_a_range(r))
    for _ in range(4):
        chats.append(_of_states(r, "A number of values, so clog2."))
    for _ in range(5):
        chats.append(_of_states(r))
    for _ in range(3):
        chats.append(_of_two_ranges(r))
    for question, answer in THANKS:
        messages = [{"role": "user", "content": question},
                    {"role": "assistant", "content": answer}]
        chats.append({"tools": TOOLS, "messages": messages})
    r.shuffle(chats)
    return chats


def main() -> None:
    """Write the file."""
    FILE.parent.mkdir(exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows()]
    FILE.write_text("".join(lines))


if __name__ == "__main__":
    main()
