"""The module families of the tiny world: a specification, a Verilog body and a model in Python.

A family is a function of a random generator. It draws an operation, widths, names and a phrasing,
and returns a `Design`. The Python model (`output`, `clocked`, `at_once`) is written independently
of the Verilog, so that a simulation can judge the Verilog against it.

The texts of a family are templates: `{z}` stands for whatever name was drawn for z, and a brace of
Verilog is doubled. Every draw moves the generator on, so the order of the draws is part of the
data: who changes it changes the corpus.
"""

import hashlib
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

WIDTHS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
ONES = ("in", "a", "x", "d", "data", "din", "data_in", "value", "word", "src", "vec", "num")
PAIRS = (("a", "b"), ("x", "y"), ("u", "v"), ("left", "right"), ("lhs", "rhs"), ("op1", "op2"),
         ("in0", "in1"), ("d0", "d1"), ("m", "n"), ("first", "second"), ("src0", "src1"),
         ("s", "t"), ("b", "a"), ("y", "x"), ("p", "r"))
TRIPLES = (("a", "b", "c"), ("x", "y", "w"), ("in0", "in1", "in2"), ("d0", "d1", "d2"),
           ("p", "q", "r"), ("u", "v", "w"), ("c", "b", "a"))
QUADS = (("a", "b", "c", "d"), ("in0", "in1", "in2", "in3"), ("d0", "d1", "d2", "d3"),
         ("s", "t", "u", "v"), ("src0", "src1", "src2", "src3"))
OUTS = ("out", "z", "f", "result", "res", "dout", "data_out", "o", "ans", "outp")
STATES = ("q", "q", "count", "cnt", "out", "state", "dout", "data_out", "value_out", "reg_out")
FLAGS = ("out", "z", "f", "flag", "hit", "result", "match", "o", "yes", "found")
CLOCKS = ("clk", "clk", "clk", "clock")
RESETS = ("reset", "rst", "clear", "srst")
ASYNC_RESETS = ("areset", "arst", "reset", "rst")
LOW_RESETS = ("rst_n", "reset_n", "resetn")
ENABLES = ("en", "enable", "ce", "go", "run")
SELECTS = ("sel", "select", "choose", "pick", "mode", "which")

Values: TypeAlias = Mapping[str, int]        # {port: its bits as an unsigned number}
Step: TypeAlias = Callable[[Any, Values], Any]  # (state, inputs) -> state
Random: TypeAlias = random.Random


@dataclass(frozen=True)
class Port:
    """One port: `input` or `output`, its name, its width in bits, and whether it is a `reg`."""

    direction: str
    name: str
    width: int = 1
    reg: bool = False

    @property
    def vector(self) -> str:
        """Its range, with a blank behind it: "[7:0] ", or "" for one bit."""
        if self.width == 1:
            return ""
        return f"[{self.width - 1}:0] "


@dataclass(frozen=True)
class Design:
    """One small module with everything needed to ask for it, to write it and to check it.

    Attributes:
      family, operation: for example `gate` and `nand`.
      ports: in the order of the header.
      spec: what it does, in English sentences.
      body: lines between header and `endmodule`.
      thought: a sentence of reasoning for the training rows.
      output: `(state, inputs) -> outputs`; values are unsigned.
      clocked: `(state, inputs) -> state` at the active clock edge, or None for combinational logic.
      at_once: the same for an asynchronous reset, applied whenever inputs change.
    """

    family: str
    operation: str
    ports: tuple[Port, ...]
    spec: str
    body: tuple[str, ...]
    thought: str
    output: Step
    clocked: Step | None = None
    at_once: Step | None = None
    module: str = "TopModule"

    @property
    def key(self) -> str:
        """What must not be shared by training and evaluation: family, widths and port names."""
        widths = [f"{port.name}:{port.width}" for port in self.ports]
        return " ".join([self.family, *widths])

    @property
    def held_out(self) -> bool:
        """One key in eight belongs to the evaluation, decided by its hash and nothing else."""
        return hashlib.sha256(self.key.encode()).digest()[0] < 32

    def renamed(self, module: str) -> "Design":
        """The same design under another module name."""
        return replace(self, module=module)

    def verilog(self, module: str | None = None) -> str:
        """The module's source, one port per line."""
        declared = []
        for port in self.ports:
            kind = f"{port.direction} reg" if port.reg else port.direction
            declared.append(f"  {kind} {port.vector}{port.name}")
        lines = [f"module {module or self.module} (", ",\n".join(declared), ");"]
        for line in self.body:
            lines.append(f"  {line}")
        return "\n".join([*lines, "endmodule", ""])


def written(family: str, operation: str, ports: Sequence[Port], names: Mapping[str, object],
            spec: str, body: Sequence[str], thought: str, output: Step,
            clocked: Step | None = None, at_once: Step | None = None) -> Design:
    """A `Design` from templates: `names` fills in its specification, its body and its thought."""
    lines = tuple(line.format(**names) for line in body)
    return Design(family, operation, tuple(ports), spec.format(**names), lines,
                  thought.format(**names), output, clocked, at_once)


def combinational(family: str, operation: str, ports: Sequence[Port], names: Mapping[str, object],
                  spec: str, body: Sequence[str], thought: str,
                  model: Callable[[Values], Values]) -> Design:
    """A `Design` without a state: `model` computes its outputs from its inputs."""
    def output(_state: Any, inputs: Values) -> Values:
        return model(inputs)

    return written(family, operation, ports, names, spec, body, thought, output)


def inputs_of(width: int, *names: str) -> list[Port]:
    """Inputs of one width."""
    return [Port("input", name, width) for name in names]


def wire_out(name: str, width: int = 1) -> Port:
    """An output that is assigned."""
    return Port("output", name, width)


def reg_out(name: str, width: int = 1) -> Port:
    """An output that is a `reg`."""
    return Port("output", name, width, reg=True)


def mask(width: int) -> int:
    """The largest number of so many bits: and-ing with it cuts the rest off."""
    return (1 << width) - 1


def bits(width: int) -> str:
    """A width as an adjective."""
    return "one-bit" if width == 1 else f"{width}-bit"


# ── Combinational ──

class Operation(NamedTuple):
    """Something that is done with two numbers."""

    word: str     # in a specification
    verilog: str  # a template of {a} and {b}
    apply: Callable[[int, int], int]


GATES = {
    "and": Operation("AND", "{a} & {b}", operator.and_),
    "or": Operation("OR", "{a} | {b}", operator.or_),
    "xor": Operation("XOR", "{a} ^ {b}", operator.xor),
    "nand": Operation("NAND", "~({a} & {b})", lambda a, b: ~(a & b)),
    "nor": Operation("NOR", "~({a} | {b})", lambda a, b: ~(a | b)),
    "xnor": Operation("XNOR", "~({a} ^ {b})", lambda a, b: ~(a ^ b)),
}


def gate(r: Random) -> Design:
    """A gate of two inputs."""
    operation = r.choice(sorted(GATES))
    width = r.choice((1, 1, *WIDTHS))
    word, expression, apply = GATES[operation]
    a, b = r.choice(PAIRS)
    z = r.choice(OUTS)
    names = dict(a=a, b=b, z=z, word=word, right=expression.format(a=a, b=b),
                 bitwise="bitwise " if width > 1 else "",
                 bit_by_bit=", bit by bit" if width > 1 else "")

    def model(inputs: Values) -> Values:
        return {z: apply(inputs[a], inputs[b]) & mask(width)}

    return combinational(
        "gate", operation, [*inputs_of(width, a, b), wire_out(z, width)], names,
        spec=r.choice((
            "The output {z} is the {bitwise}{word} of {a} and {b}.",
            "The module implements a two-input {word} gate with inputs {a} and {b}.",
            "Drive {z} with {a} {word} {b}{bit_by_bit}.")),
        body=["assign {z} = {right};"],
        thought="A {word} gate is one continuous assignment.",
        model=model)


def gate3(r: Random) -> Design:
    """A gate of three inputs."""
    operation = r.choice(("and", "or", "xor"))
    width = r.choice((1, 1, 2, 4, 8, 16))
    sign = {"and": "&", "or": "|", "xor": "^"}[operation]
    a, b, c = r.choice(TRIPLES)
    z = r.choice(OUTS)
    names = dict(a=a, b=b, c=c, z=z, sign=sign, word=GATES[operation].word)
    apply = GATES[operation].apply

    def model(inputs: Values) -> Values:
        first_two = apply(inputs[a], inputs[b])
        return {z: apply(first_two, inputs[c])}

    return combinational(
        "gate3", operation, [*inputs_of(width, a, b, c), wire_out(z, width)], names,
        spec=r.choice((
            "The output {z} is the {word} of the three inputs {a}, {b} and {c}.",
            "The module implements a three-input {word} gate.",
            "Combine {a}, {b} and {c} with {word} and drive {z} with the result.")),
        body=["assign {z} = {a} {sign} {b} {sign} {c};"],
        thought="Three inputs are combined with {word}.",
        model=model)


WIRES = {
    "invert": ("The module implements a NOT gate: {z} is the inverse of {a}.",
               "Every bit of {z} is the complement of the same bit of {a}.",
               "Drive {z} with the bitwise complement of {a}."),
    "copy": ("The output {z} follows the input {a} unchanged.",
             "Connect {a} to {z} like a wire."),
}


def wire(r: Random) -> Design:
    """One input, unchanged or inverted."""
    operation = r.choice(("invert", "copy"))
    width = r.choice((1, *WIDTHS))
    a = r.choice(ONES)
    z = r.choice(OUTS)
    inverts = operation == "invert"
    names = dict(a=a, z=z, sign="~" if inverts else "")

    def model(inputs: Values) -> Values:
        value = ~inputs[a] if inverts else inputs[a]
        return {z: value & mask(width)}

    return combinational(
        "wire", operation, [*inputs_of(width, a), wire_out(z, width)], names,
        spec=r.choice(WIRES[operation]),
        body=["assign {z} = {sign}{a};"],
        thought="One assignment is enough.",
        model=model)


def mux2(r: Random) -> Design:
    """A choice between two inputs."""
    width = r.choice((1, *WIDTHS))
    a, b = r.choice(PAIRS)
    z = r.choice(OUTS)
    sel = r.choice(SELECTS)
    picks_second = r.random() < 0.5  # when the select is high
    high, low = (b, a) if picks_second else (a, b)
    names = dict(z=z, sel=sel, high=high, low=low, bits=bits(width))

    def model(inputs: Values) -> Values:
        chosen = high if inputs[sel] else low
        return {z: inputs[chosen]}

    return combinational(
        "mux2", "second" if picks_second else "first",
        [*inputs_of(width, a, b), *inputs_of(1, sel), wire_out(z, width)], names,
        spec=r.choice((
            "The module is a {bits} 2-to-1 multiplexer. When {sel} is 0, choose {low}. "
            "When {sel} is 1, choose {high}.",
            "When {sel} is 1 the output {z} is {high}, otherwise it is {low}.",
            "If {sel} is high, {z} equals {high}; if {sel} is low, {z} equals {low}.")),
        body=["assign {z} = {sel} ? {high} : {low};"],
        thought="The select input {sel} picks {high} when high and {low} when low.",
        model=model)


def mux4(r: Random) -> Design:
    """A choice between four inputs."""
    width = r.choice((1, 2, 4, 8, 16))
    quad = r.choice(QUADS)
    z = r.choice(OUTS)
    sel = r.choice(SELECTS[:4])
    a, b, c, d = quad
    names = dict(a=a, b=b, c=c, d=d, z=z, sel=sel)

    def model(inputs: Values) -> Values:
        chosen = quad[inputs[sel]]
        return {z: inputs[chosen]}

    return combinational(
        "mux4", "case", [*inputs_of(width, *quad), *inputs_of(2, sel), reg_out(z, width)], names,
        spec=r.choice((
            "The module is a 4-to-1 multiplexer. When {sel} is 0, 1, 2 or 3, the output {z} is "
            "{a}, {b}, {c} or {d}.",
            "The two bits of {sel} choose which of {a}, {b}, {c} and {d} appears on {z}.")),
        body=["always @(*)",
              "  case ({sel})",
              "    0: {z} = {a};",
              "    1: {z} = {b};",
              "    2: {z} = {c};",
              "    default: {z} = {d};",
              "  endcase"],
        thought="A case statement over the select value covers the four inputs.",
        model=model)


def demux(r: Random) -> Design:
    """One input on one of two outputs."""
    width = r.choice((1, 4, 8, 16))
    a = r.choice(ONES)
    sel = r.choice(SELECTS)
    y, z = r.choice((("out0", "out1"), ("y0", "y1"), ("z0", "z1"), ("low", "high")))
    names = dict(a=a, sel=sel, y=y, z=z)

    def model(inputs: Values) -> Values:
        if inputs[sel]:
            return {y: 0, z: inputs[a]}
        return {y: inputs[a], z: 0}

    return combinational(
        "demux", "2",
        [*inputs_of(width, a), *inputs_of(1, sel), wire_out(y, width), wire_out(z, width)], names,
        spec=r.choice((
            "Route {a} to {y} when {sel} is 0 and to {z} when {sel} is 1. The other output is 0.",
            "The module is a 1-to-2 demultiplexer: {a} goes to {z} if {sel} is high and to {y} "
            "otherwise, and the unused output is 0.")),
        body=["assign {y} = {sel} ? 0 : {a};",
              "assign {z} = {sel} ? {a} : 0;"],
        thought="Each output is the input or zero, depending on the select.",
        model=model)


SUMS = {
    "add": {"word": "sum", "sign": "+", "short": "sum", "spoken": "plus", "verb": "adds"},
    "sub": {"word": "difference", "sign": "-", "short": "diff", "spoken": "minus",
            "verb": "subtracts"},
}


def adder(r: Random) -> Design:
    """The sum or the difference of two inputs, as wide as they are."""
    operation = r.choice(("add", "sub"))
    width = r.choice(WIDTHS)
    a, b = r.choice(PAIRS)
    words = SUMS[operation]
    apply = {"add": operator.add, "sub": operator.sub}[operation]
    z = r.choice((*OUTS, words["short"]))
    names = dict(a=a, b=b, z=z, w=width, **words)

    def model(inputs: Values) -> Values:
        return {z: apply(inputs[a], inputs[b]) & mask(width)}

    return combinational(
        "adder", operation, [*inputs_of(width, a, b), wire_out(z, width)], names,
        spec=r.choice((
            "The output {z} is the {word} {a} {sign} {b}, truncated to {w} bits.",
            "Compute {a} {spoken} {b} and drive {z} with the {w}-bit result.",
            "The module {verb} two {w}-bit numbers: {z} is {a} {sign} {b}.")),
        body=["assign {z} = {a} {sign} {b};"],
        thought="The {word} wraps around at {w} bits.",
        model=model)


CARRIES = {
    "full": ("Add {a}, {b} and the carry input {cin}. The output {z} is the sum and {cout} is the "
             "carry out.",
             "The module is a {bits} full adder with carry input {cin}, sum {z} and carry out "
             "{cout}."),
    "half": ("Add {a} and {b}. The output {z} is the sum and {cout} is the carry out.",
             "The module is a {bits} half adder with sum {z} and carry out {cout}."),
}


def carry(r: Random) -> Design:
    """A half or full adder with a carry output."""
    width = r.choice((1, *WIDTHS))
    a, b = r.choice(PAIRS)
    cin = r.choice(("cin", "carry_in", "c_in"))
    cout = r.choice(("cout", "carry", "c_out"))
    z = r.choice(("sum", "total", "s_out", "out"))
    operation = "full" if r.random() < 0.5 else "half"
    carries_in = [cin] if operation == "full" else []
    names = dict(a=a, b=b, z=z, cin=cin, cout=cout, bits=bits(width),
                 right=" + ".join([a, b, *carries_in]))

    def model(inputs: Values) -> Values:
        total = inputs[a] + inputs[b]
        if carries_in:
            total += inputs[cin]
        return {z: total & mask(width), cout: total >> width}

    ports = [*inputs_of(width, a, b), *inputs_of(1, *carries_in), wire_out(z, width),
             wire_out(cout)]
    return combinational(
        "carry", operation, ports, names,
        spec=r.choice(CARRIES[operation]),
        body=["assign {{{cout}, {z}}} = {right};"],
        thought="The concatenation on the left is one bit wider, so it catches the carry.",
        model=model)


RELATIONS = {
    "==": ("equal to", operator.eq),
    "!=": ("not equal to", operator.ne),
    "<": ("less than", operator.lt),
    ">": ("greater than", operator.gt),
    "<=": ("less than or equal to", operator.le),
    ">=": ("greater than or equal to", operator.ge),
}


def compare(r: Random) -> Design:
    """A comparison of two inputs."""
    sign = r.choice(sorted(RELATIONS))
    width = r.choice(WIDTHS)
    a, b = r.choice(PAIRS)
    z = r.choice(FLAGS)
    word, holds = RELATIONS[sign]
    names = dict(a=a, b=b, z=z, w=width, sign=sign, word=word)

    def model(inputs: Values) -> Values:
        return {z: int(holds(inputs[a], inputs[b]))}

    return combinational(
        "compare", sign, [*inputs_of(width, a, b), wire_out(z)], names,
        spec=r.choice((
            "The output {z} is 1 when {a} is {word} {b}, and 0 otherwise.",
            "Compare two unsigned {w}-bit numbers: set {z} if {a} is {word} {b}.",
            "Assert {z} exactly when {a} is {word} {b}.")),
        body=["assign {z} = {a} {sign} {b};"],
        thought="The comparison is {a} {sign} {b}.",
        model=model)


def against(r: Random) -> Design:
    """A comparison with a constant."""
    sign = r.choice(("==", "<", ">"))
    width = r.choice((4, 5, 6, 8, 10, 12, 16))
    a = r.choice(ONES)
    z = r.choice(FLAGS)
    constant = r.randint(1, 15 if width > 4 else 14)
    word, holds = RELATIONS[sign]
    names = dict(a=a, z=z, k=constant, sign=sign, word=word)

    def model(inputs: Values) -> Values:
        return {z: int(holds(inputs[a], constant))}

    return combinational(
        "against", sign, [*inputs_of(width, a), wire_out(z)], names,
        spec=r.choice((
            "The output {z} is 1 when {a} is {word} {k}, and 0 otherwise.",
            "Assert {z} exactly when the unsigned input {a} is {word} {k}.")),
        body=["assign {z} = {a} {sign} {k};"],
        thought="{a} is compared with the constant {k}.",
        model=model)


EXTREMES: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
    "max": ("larger", ">", max),
    "min": ("smaller", "<", min),
}


def extreme(r: Random) -> Design:
    """The larger or the smaller of two inputs."""
    operation = r.choice(("max", "min"))
    width = r.choice(WIDTHS)
    a, b = r.choice(PAIRS)
    z = r.choice((*OUTS, operation))
    word, sign, choose = EXTREMES[operation]
    names = dict(a=a, b=b, z=z, w=width, name=operation, word=word, sign=sign)

    def model(inputs: Values) -> Values:
        return {z: choose(inputs[a], inputs[b])}

    return combinational(
        "extreme", operation, [*inputs_of(width, a, b), wire_out(z, width)], names,
        spec=r.choice((
            "The output {z} is the {word} of the unsigned numbers {a} and {b}.",
            "Drive {z} with the {name}imum of {a} and {b}.",
            "Find the {name}imum of two {w}-bit inputs {a} and {b}.")),
        body=["assign {z} = {a} {sign} {b} ? {a} : {b};"],
        thought="Compare the two and keep the {word}.",
        model=model)


ARITHMETIC = {
    "+": ("sum", operator.add),
    "-": ("difference", operator.sub),
    "&": ("AND", operator.and_),
    "|": ("OR", operator.or_),
    "^": ("XOR", operator.xor),
}


def choice_of_two(r: Random) -> Design:
    """One of two operations on the same inputs."""
    low, high = r.sample(sorted(ARITHMETIC), 2)
    width = r.choice(WIDTHS)
    a, b = r.choice(PAIRS)
    z = r.choice(OUTS)
    sel = r.choice(SELECTS)
    low_word, low_apply = ARITHMETIC[low]
    high_word, high_apply = ARITHMETIC[high]
    names = dict(a=a, b=b, z=z, sel=sel, low=low, high=high, low_word=low_word,
                 high_word=high_word)

    def model(inputs: Values) -> Values:
        apply = high_apply if inputs[sel] else low_apply
        return {z: apply(inputs[a], inputs[b]) & mask(width)}

    return combinational(
        "alu", low + high, [*inputs_of(width, a, b), *inputs_of(1, sel), wire_out(z, width)], names,
        spec=r.choice((
            "When {sel} is 0, {z} is {a} {low} {b}. When {sel} is 1, {z} is {a} {high} {b}.",
            "When {sel} is 0, {z} is the {low_word} of {a} and {b}. When {sel} is 1, {z} is the "
            "{high_word} of {a} and {b}.")),
        body=["assign {z} = {sel} ? {a} {high} {b} : {a} {low} {b};"],
        thought="{sel} chooses between two operations.",
        model=model)


class Shift(NamedTuple):
    """A direction in which bits are moved."""

    word: str
    sign: str
    apply: Callable[[int, int], int]


def drawn_shift(r: Random) -> Shift:
    """Left or right."""
    if r.random() < 0.5:
        return Shift("left", "<<", operator.lshift)
    return Shift("right", ">>", operator.rshift)


def shift(r: Random) -> Design:
    """A shift by a constant."""
    word, sign, apply = drawn_shift(r)
    width = r.choice(WIDTHS[2:])
    a = r.choice(ONES)
    z = r.choice(OUTS)
    distance = r.randint(1, 3)
    names = dict(a=a, z=z, w=width, k=distance, word=word, sign=sign,
                 plural="s" if distance > 1 else "")

    def model(inputs: Values) -> Values:
        return {z: apply(inputs[a], distance) & mask(width)}

    return combinational(
        "shift", word, [*inputs_of(width, a), wire_out(z, width)], names,
        spec=r.choice((
            "The output {z} is {a} shifted {word} by {k} bit{plural}, filled with zeros.",
            "Shift {a} {word} by {k} and drive {z} with the {w}-bit result.")),
        body=["assign {z} = {a} {sign} {k};"],
        thought="A logical shift to the {word} by a constant.",
        model=model)


def barrel(r: Random) -> Design:
    """A shift by an input."""
    word, sign, apply = drawn_shift(r)
    width = r.choice((4, 8, 16, 32))
    a = r.choice(ONES)
    z = r.choice(OUTS)
    amount = r.choice(("amt", "shamt", "n", "by"))
    names = dict(a=a, z=z, n=amount, word=word, sign=sign)
    amount_width = width.bit_length() - 1

    def model(inputs: Values) -> Values:
        return {z: apply(inputs[a], inputs[amount]) & mask(width)}

    return combinational(
        "barrel", word,
        [*inputs_of(width, a), *inputs_of(amount_width, amount), wire_out(z, width)], names,
        spec=r.choice((
            "Shift {a} {word} by the amount {n}, filling with zeros, and drive {z}.",
            "The output {z} is {a} shifted {word} by {n} bits.")),
        body=["assign {z} = {a} {sign} {n};"],
        thought="A logical shift to the {word} by a variable amount.",
        model=model)


def rotate(r: Random) -> Design:
    """A rotation by one bit."""
    word = "left" if r.random() < 0.5 else "right"
    width = r.choice((4, 8, 16))
    a = r.choice(ONES)
    z = r.choice(OUTS)
    last = width - 1
    right = {"left": f"{{{a}[{last - 1}:0], {a}[{last}]}}", "right": f"{{{a}[0], {a}[{last}:1]}}"}
    names = dict(a=a, z=z, word=word, right=right[word])

    def model(inputs: Values) -> Values:
        value = inputs[a]
        if word == "left":
            rotated = value << 1 | value >> last
        else:
            rotated = value >> 1 | (value & 1) << last
        return {z: rotated & mask(width)}

    return combinational(
        "rotate", word, [*inputs_of(width, a), wire_out(z, width)], names,
        spec=r.choice((
            "The output {z} is {a} rotated {word} by one bit.",
            "Rotate {a} {word} by one position; the bit that falls out comes in at the other "
            "end.")),
        body=["assign {z} = {right};"],
        thought="A rotation is a concatenation of the same bits in another order.",
        model=model)


REDUCTIONS = {
    "and": (("is 1 when all bits of {a} are 1", "is the AND of all bits of {a}"), "&",
            lambda value, width: value == mask(width)),
    "or": (("is 1 when at least one bit of {a} is 1", "is the OR of all bits of {a}"), "|",
           lambda value, width: value != 0),
    "nor": (("is 1 when no bit of {a} is set", "is 1 when {a} is zero"), "~|",
            lambda value, width: value == 0),
}


def reduction(r: Random) -> Design:
    """All bits of an input folded into one."""
    operation = r.choice(sorted(REDUCTIONS))
    width = r.choice(WIDTHS)
    a = r.choice(ONES)
    z = r.choice(FLAGS)
    texts, sign, holds = REDUCTIONS[operation]
    names = dict(a=a, z=z, sign=sign)
    text = r.choice(texts)
    end = r.choice((".", ", and 0 otherwise."))

    def model(inputs: Values) -> Values:
        return {z: int(holds(inputs[a], width))}

    return combinational(
        "reduction", operation, [*inputs_of(width, a), wire_out(z)], names,
        spec=f"The output {{z}} {text}{end}",
        body=["assign {z} = {sign}{a};"],
        thought="A reduction operator folds the whole vector into one bit.",
        model=model)


def parity(r: Random) -> Design:
    """The bit that makes the number of ones even or odd."""
    word, other, sign = "even", "odd", "^"
    if r.random() < 0.5:
        word, other, sign = "odd", "even", "~^"
    width = r.choice(WIDTHS)
    a = r.choice(ONES)
    z = r.choice(("parity", "p", "par", "out", "z"))
    names = dict(a=a, z=z, w=width, word=word, other=other, sign=sign)
    of_no_ones = int(word == "odd")

    def model(inputs: Values) -> Values:
        return {z: (inputs[a].bit_count() + of_no_ones) % 2}

    return combinational(
        "parity", word, [*inputs_of(width, a), wire_out(z)], names,
        spec=r.choice((
            "Compute the {word} parity bit {z} of the {w}-bit input {a}.",
            "The output {z} is 1 when the number of ones in {a} is {other}. "
            "This is the {word} parity bit.",
            "Drive {z} so that {a} and {z} together hold an {word} number of ones.")),
        body=["assign {z} = {sign}{a};"],
        thought="Even parity is the XOR of all bits, odd parity its inverse.",
        model=model)


def decoder(r: Random) -> Design:
    """A number as a one-hot code."""
    width = r.choice((1, 2, 3, 4))
    a = r.choice(ONES)
    z = r.choice(OUTS)
    en = r.choice(ENABLES)
    has_enable = r.random() < 0.5
    size = 1 << width
    names = dict(a=a, z=z, en=en, w=width, n=size)
    spec = r.choice((
        "The module is a {w}-to-{n} decoder: bit number {a} of {z} is 1 and the others are 0.",
        "Decode {a} into the one-hot output {z}."))
    line = "assign {z} = 1 << {a};"
    enables = []
    if has_enable:
        spec += " When {en} is 0, all bits of {z} are 0."
        line = "assign {z} = {en} ? 1 << {a} : 0;"
        enables = [en]

    def model(inputs: Values) -> Values:
        if has_enable and not inputs[en]:
            return {z: 0}
        return {z: 1 << inputs[a]}

    return combinational(
        "decoder", "enable" if has_enable else "plain",
        [*inputs_of(width, a), *inputs_of(1, *enables), wire_out(z, size)], names,
        spec=spec,
        body=[line],
        thought="Shifting a one by {a} gives the one-hot code.",
        model=model)


def priority(r: Random) -> Design:
    """The position of the lowest or the highest bit that is set."""
    operation, extreme_bit, significant = "high", "highest", "most"
    if r.random() < 0.5:
        operation, extreme_bit, significant = "low", "lowest", "least"
    width = r.choice((3, 4))
    a = r.choice(ONES)
    z = r.choice(("pos", "idx", "index", "out", "code"))
    has_valid = r.random() < 0.3
    order = list(range(width))
    if operation == "high":
        order.reverse()
    names = dict(a=a, z=z, first=order[0], extreme=extreme_bit, significant=significant)
    spec = r.choice((
        "The module is a priority encoder: {z} is the position of the {extreme} bit of {a} that is "
        "1, or 0 if {a} is 0.",
        "Find the {significant} significant 1 in {a} and drive {z} with its bit number. "
        "If no bit is set, {z} is 0."))
    ports = [*inputs_of(width, a), reg_out(z, 2)]

    body = ["always @(*)", "  if ({a}[{first}]) {z} = {first};"]
    for bit in order[1:]:
        body.append(f"  else if ({a}[{bit}]) {z} = {bit};")
    body.append("  else {z} = 0;")
    if has_valid:
        spec += " The output valid is 1 when any bit is set."
        body.append("assign valid = |{a};")
        ports.append(wire_out("valid"))

    def model(inputs: Values) -> Values:
        are_set = [bit for bit in order if inputs[a] >> bit & 1]
        outputs = {z: are_set[0] if are_set else 0}
        if has_valid:
            outputs["valid"] = int(inputs[a] != 0)
        return outputs

    return combinational(
        "priority", operation, ports, names,
        spec=spec,
        body=body,
        thought="The chain of conditions goes from the bit that wins to the one that loses.",
        model=model)


EXTENSIONS = {
    "sign": ("its sign bit", "assign {z} = {{{{{more}{{{a}[{last}]}}}}, {a}}};",
             "The upper bits are copies of the sign bit."),
    "zero": ("zeros", "assign {z} = {a};", "The upper bits are zero."),
}


def extend(r: Random) -> Design:
    """A number with more bits."""
    width, wider = r.choice(((4, 8), (8, 16), (8, 12), (4, 6), (16, 32), (8, 32), (5, 8)))
    word = "sign" if r.random() < 0.5 else "zero"
    a = r.choice(ONES)
    z = r.choice(OUTS)
    repeated, line, thought = EXTENSIONS[word]
    names = dict(a=a, z=z, w=width, n=wider, more=wider - width, last=width - 1, word=word,
                 what=repeated)

    def model(inputs: Values) -> Values:
        is_negative = inputs[a] >> width - 1
        upper = 0
        if word == "sign" and is_negative:
            upper = mask(wider - width) << width
        return {z: inputs[a] | upper}

    return combinational(
        "extend", word, [*inputs_of(width, a), wire_out(z, wider)], names,
        spec=r.choice((
            "The output {z} is {a} {word}-extended from {w} to {n} bits.",
            "Extend the {w}-bit input {a} to {n} bits by repeating {what} and drive {z}.")),
        body=[line],
        thought=thought,
        model=model)


def split(r: Random) -> Design:
    """The two halves of an input."""
    width = r.choice((4, 8, 16, 32))
    a = r.choice(ONES)
    hi, lo = r.choice((("hi", "lo"), ("high", "low"), ("upper", "lower"), ("msb", "lsb")))
    half = width // 2
    names = dict(a=a, hi=hi, lo=lo, h=half, last=width - 1, last_low=half - 1)

    def model(inputs: Values) -> Values:
        return {hi: inputs[a] >> half, lo: inputs[a] & mask(half)}

    return combinational(
        "split", "halves", [*inputs_of(width, a), wire_out(hi, half), wire_out(lo, half)], names,
        spec=r.choice((
            "Split {a} into its upper half {hi} and its lower half {lo}.",
            "The output {hi} is the upper {h} bits of {a} and {lo} is the lower {h} bits.")),
        body=["assign {hi} = {a}[{last}:{h}];",
              "assign {lo} = {a}[{last_low}:0];"],
        thought="Each half has {h} bits.",
        model=model)


def join(r: Random) -> Design:
    """Two inputs side by side."""
    width = r.choice((1, 2, 4, 8, 16))
    a, b = r.choice(PAIRS)
    z = r.choice(OUTS)
    swaps = r.random() < 0.5
    top, low = (b, a) if swaps else (a, b)
    names = dict(a=a, b=b, z=z, top=top, low=low)

    def model(inputs: Values) -> Values:
        return {z: inputs[top] << width | inputs[low]}

    return combinational(
        "join", "swap" if swaps else "same",
        [*inputs_of(width, a, b), wire_out(z, 2 * width)], names,
        spec=r.choice((
            "Concatenate {a} and {b} into {z}, with {top} in the upper bits.",
            "The upper half of {z} is {top} and the lower half is {low}.")),
        body=["assign {z} = {{{top}, {low}}};"],
        thought="In a concatenation {top} comes first.",
        model=model)


OFFSETS = {
    "add": {"sign": "+", "spoken": "plus", "order": "Add", "to": "to"},
    "sub": {"sign": "-", "spoken": "minus", "order": "Subtract", "to": "from"},
}


def offset(r: Random) -> Design:
    """A constant added or subtracted."""
    operation = "add" if r.random() < 0.6 else "sub"
    width = r.choice(WIDTHS[2:])
    a = r.choice(ONES)
    z = r.choice(OUTS)
    constant = r.randint(1, 9)
    names = dict(a=a, z=z, w=width, k=constant, **OFFSETS[operation])
    added = constant if operation == "add" else -constant

    def model(inputs: Values) -> Values:
        return {z: (inputs[a] + added) & mask(width)}

    return combinational(
        "offset", operation, [*inputs_of(width, a), wire_out(z, width)], names,
        spec=r.choice((
            "The output {z} is {a} {spoken} {k}, truncated to {w} bits.",
            "{order} the constant {k} {to} {a} and drive {z}.")),
        body=["assign {z} = {a} {sign} {k};"],
        thought="The constant is {k}.",
        model=model)


def inverter(r: Random) -> Design:
    """An input that another one inverts."""
    width = r.choice((1, *WIDTHS))
    a = r.choice(ONES)
    z = r.choice(OUTS)
    inv = r.choice(("inv", "invert", "neg", "flip"))
    names = dict(a=a, z=z, inv=inv)

    def model(inputs: Values) -> Values:
        value = ~inputs[a] if inputs[inv] else inputs[a]
        return {z: value & mask(width)}

    return combinational(
        "inverter", "control", [*inputs_of(width, a), *inputs_of(1, inv), wire_out(z, width)],
        names,
        spec=r.choice((
            "When {inv} is 1, {z} is the bitwise complement of {a}, otherwise {z} is {a}.",
            "The input {inv} decides whether {z} is {a} (0) or its complement (1).")),
        body=["assign {z} = {inv} ? ~{a} : {a};"],
        thought="{inv} selects the complement.",
        model=model)


def masking(r: Random) -> Design:
    """An input that another one lets through."""
    width = r.choice((1, *WIDTHS))
    a = r.choice(ONES)
    z = r.choice(OUTS)
    en = r.choice(ENABLES)
    names = dict(a=a, z=z, en=en)

    def model(inputs: Values) -> Values:
        return {z: inputs[a] if inputs[en] else 0}

    return combinational(
        "masking", "enable", [*inputs_of(width, a), *inputs_of(1, en), wire_out(z, width)], names,
        spec=r.choice((
            "The output {z} is {a} when {en} is 1 and 0 when {en} is 0.",
            "Pass {a} to {z} only while {en} is high; otherwise drive {z} with 0.")),
        body=["assign {z} = {en} ? {a} : 0;"],
        thought="{en} gates the input.",
        model=model)


def majority(r: Random) -> Design:
    """What at least two of three inputs say."""
    a, b, c = r.choice(TRIPLES)
    z = r.choice(FLAGS)
    names = dict(a=a, b=b, c=c, z=z)

    def model(inputs: Values) -> Values:
        ones = inputs[a] + inputs[b] + inputs[c]
        return {z: int(ones >= 2)}

    return combinational(
        "majority", "3", [*inputs_of(1, a, b, c), wire_out(z)], names,
        spec=r.choice((
            "The output {z} is 1 when at least two of {a}, {b} and {c} are 1.",
            "The module is a majority gate: {z} follows the majority of {a}, {b} and {c}.")),
        body=["assign {z} = ({a} & {b}) | ({a} & {c}) | ({b} & {c});"],
        thought="Two of three: one AND term for each pair.",
        model=model)


def popcount(r: Random) -> Design:
    """How many of three inputs are 1."""
    a, b, c = r.choice(TRIPLES)
    z = r.choice(("count", "ones", "total", "out", "num_ones"))
    names = dict(a=a, b=b, c=c, z=z)

    def model(inputs: Values) -> Values:
        return {z: inputs[a] + inputs[b] + inputs[c]}

    return combinational(
        "popcount", "3", [*inputs_of(1, a, b, c), wire_out(z, 2)], names,
        spec=r.choice((
            "The output {z} is the number of ones among {a}, {b} and {c}.",
            "Count how many of the three inputs {a}, {b} and {c} are 1 and drive {z}.")),
        body=["assign {z} = {a} + {b} + {c};"],
        thought="Three one-bit numbers are added.",
        model=model)


# ── Clocked ──

RESET_TEXTS = {
    "sync": ("The synchronous reset {name} sets {what} to {value}.",
             "When {name} is high at the clock edge, {what} becomes {value}."),
    "async": ("The asynchronous reset {name} sets {what} to {value}.",
              "{name} is an active-high asynchronous reset to {value}."),
    "low": ("The active-low synchronous reset {name} sets {what} to {value}.",
            "When {name} is low at the clock edge, {what} becomes {value}."),
}
# Lines of a body; {edge} and {condition} are a `Reset`'s, {q} is a register.
ALWAYS = "always @(posedge {clk}{edge})"
CLEARED = "  if ({condition}) {q} <= 0;"


@dataclass(frozen=True)
class Reset:
    """How a clocked module goes back to its first state, which is 0.

    Attributes:
      kind: "sync" and "async" are active high, "low" is synchronous and active low; or "none".
      name: of its port.
    """

    kind: str
    name: str

    @property
    def lines(self) -> dict[str, str]:
        """What `ALWAYS` and `CLEARED` need of it."""
        edge = f" or posedge {self.name}" if self.kind == "async" else ""
        condition = f"!{self.name}" if self.kind == "low" else self.name
        return {"edge": edge, "condition": condition}

    def is_active(self, inputs: Values) -> bool:
        """Do the inputs reset the module?"""
        if self.kind == "low":
            return not inputs[self.name]
        return bool(inputs[self.name])

    def text(self, r: Random, what: str, value: object = 0) -> str:
        """A sentence about it, with a blank in front: it sets what to which value."""
        sentence = r.choice(RESET_TEXTS[self.kind])
        return " " + sentence.format(name=self.name, what=what, value=value)

    def around(self, step: Step) -> dict[str, Step | None]:
        """`clocked` and `at_once` of a design that goes by `step` where nothing resets it."""
        if self.kind == "none":
            return {"clocked": step, "at_once": None}

        def clocked(state: Any, inputs: Values) -> Any:
            return 0 if self.is_active(inputs) else step(state, inputs)

        def at_once(state: Any, inputs: Values) -> Any:
            return 0 if self.is_active(inputs) else state

        return {"clocked": clocked, "at_once": at_once if self.kind == "async" else None}


def drawn_reset(r: Random, *others: str) -> Reset:
    """A reset of some kind; `others` are kinds beside the usual ones."""
    kind = r.choice(("sync", "sync", "async", "low", *others))
    if kind == "none":
        return Reset(kind, "")
    names = {  # one of each kind is drawn, so that any kind takes as many draws
        "sync": r.choice(RESETS),
        "async": r.choice(ASYNC_RESETS),
        "low": r.choice(LOW_RESETS),
    }
    return Reset(kind, names[kind])


def drawn_enable(r: Random, share: float) -> list[str]:
    """The name of an enable in a share of the draws, else []."""
    if r.random() < share:
        return [r.choice(ENABLES)]
    return []


def is_enabled(enables: Sequence[str], inputs: Values) -> bool:
    """Does every enable that a module has let it go on?"""
    return all(inputs[name] for name in enables)


def register_out(name: str) -> Step:
    """The `output` of a design whose state is the value of its output."""
    def output(state: Any, _inputs: Values) -> Values:
        return {name: state}

    return output


def register(r: Random) -> Design:
    """A register, with or without reset and enable."""
    width = r.choice((1, *WIDTHS))
    d = r.choice(ONES)
    q = r.choice(STATES)
    clk = r.choice(CLOCKS)
    reset = drawn_reset(r, "none")
    enables = drawn_enable(r, 0.35)
    names = dict(d=d, q=q, clk=clk, bits=bits(width), **reset.lines)
    spec = r.choice((
        "The module is a {bits} D register: at every rising edge of {clk}, {q} takes {d}",
        "Store {d} in {q} at the rising edge of {clk}"))
    operation = "plain" if reset.kind == "none" else reset.kind
    update = "{q} <= {d};"
    if enables:
        spec += f" if {enables[0]} is 1"
        operation += "_enable"
        update = f"if ({enables[0]}) {update}"
    spec += "."

    body = [ALWAYS, f"  {update}"]
    resets = []
    if reset.kind != "none":
        spec += reset.text(r, q)
        body = [ALWAYS, CLEARED, f"  else {update}"]
        resets = [reset.name]

    def step(state: Any, inputs: Values) -> Any:
        return inputs[d] if is_enabled(enables, inputs) else state

    return written(
        "register", operation,
        [*inputs_of(1, clk, *resets, *enables), *inputs_of(width, d), reg_out(q, width)], names,
        spec=spec,
        body=body,
        thought="A register is one nonblocking assignment in a clocked block.",
        output=register_out(q), **reset.around(step))


def counter(r: Random) -> Design:
    """A counter in one direction."""
    word, sign, change = "up", "+", 1
    if r.random() < 0.35:
        word, sign, change = "down", "-", -1
    width = r.choice(WIDTHS)
    q = r.choice(STATES)
    clk = r.choice(CLOCKS)
    reset = drawn_reset(r)
    enables = drawn_enable(r, 0.4)
    names = dict(q=q, clk=clk, w=width, word=word, sign=sign, **reset.lines)
    spec = r.choice((
        "The module is a {w}-bit {word} counter on {clk}.",
        "Count {word} by one at every rising edge of {clk}."))
    operation = f"{word}_{reset.kind}"
    update = "{q} <= {q} {sign} 1;"
    if enables:
        spec += f" It counts only while {enables[0]} is 1."
        operation += "_enable"
        update = f"if ({enables[0]}) {update}"

    def step(state: Any, inputs: Values) -> Any:
        if not is_enabled(enables, inputs):
            return state
        return (state + change) & mask(width)

    return written(
        "counter", operation, [*inputs_of(1, clk, reset.name, *enables), reg_out(q, width)], names,
        spec=spec + reset.text(r, q),
        body=[ALWAYS, CLEARED, f"  else {update}"],
        thought="The counter wraps around by itself at {w} bits.",
        output=register_out(q), **reset.around(step))


def modulo(r: Random) -> Design:
    """A counter that starts again after some number."""
    q = r.choice(STATES)
    clk = r.choice(CLOCKS)
    reset = drawn_reset(r)
    width, last = r.choice(((3, 4), (3, 5), (4, 9), (4, 10), (4, 11), (4, 12), (5, 19), (5, 23),
                            (6, 59)))
    names = dict(q=q, clk=clk, n=last, **reset.lines)
    spec = r.choice((
        "Count from 0 to {n} on {clk} and then start again at 0.",
        "The counter {q} goes from 0 up to {n} and wraps to 0."))

    def step(state: Any, _inputs: Values) -> Any:
        return 0 if state == last else state + 1

    return written(
        "modulo", f"{last}_{reset.kind}", [*inputs_of(1, clk, reset.name), reg_out(q, width)],
        names,
        spec=spec + reset.text(r, q),
        body=[ALWAYS,
              CLEARED,
              "  else if ({q} == {n}) {q} <= 0;",
              "  else {q} <= {q} + 1;"],
        thought="The value {n} is followed by 0.",
        output=register_out(q), **reset.around(step))


def updown(r: Random) -> Design:
    """A counter whose direction is an input."""
    width = r.choice(WIDTHS)
    q = r.choice(STATES)
    clk = r.choice(CLOCKS)
    up = r.choice(("up", "dir", "inc", "forward"))
    reset = drawn_reset(r)
    names = dict(q=q, clk=clk, up=up, **reset.lines)
    spec = r.choice((
        "The counter {q} goes up when {up} is 1 and down when {up} is 0, once per cycle of {clk}.",
        "At the rising edge of {clk}, add one to {q} if {up} is high, otherwise subtract one."))

    def step(state: Any, inputs: Values) -> Any:
        change = 1 if inputs[up] else -1
        return (state + change) & mask(width)

    return written(
        "updown", reset.kind, [*inputs_of(1, clk, reset.name, up), reg_out(q, width)], names,
        spec=spec + reset.text(r, q),
        body=[ALWAYS,
              CLEARED,
              "  else if ({up}) {q} <= {q} + 1;",
              "  else {q} <= {q} - 1;"],
        thought="{up} decides the direction.",
        output=register_out(q), **reset.around(step))


def toggle(r: Random) -> Design:
    """A bit that an input inverts."""
    t = r.choice(("t", "tog", "toggle", "flip", "in"))
    q = r.choice(STATES)
    clk = r.choice(CLOCKS)
    reset = drawn_reset(r)
    names = dict(t=t, q=q, clk=clk, **reset.lines)
    spec = r.choice((
        "The module is a T flip-flop: {q} toggles at the rising edge of {clk} when {t} is 1.",
        "Invert {q} at each rising edge of {clk} at which {t} is high; otherwise keep it."))

    def step(state: Any, inputs: Values) -> Any:
        return state ^ inputs[t]

    return written(
        "toggle", reset.kind, [*inputs_of(1, clk, reset.name, t), reg_out(q)], names,
        spec=spec + reset.text(r, q),
        body=[ALWAYS, CLEARED, "  else if ({t}) {q} <= ~{q};"],
        thought="{t} decides whether the bit changes.",
        output=register_out(q), **reset.around(step))


EDGES = {
    "rising": ("goes from 0 to 1", "{a} & ~{prev}", lambda now, before: now & ~before),
    "falling": ("goes from 1 to 0", "~{a} & {prev}", lambda now, before: ~now & before),
    "any": ("changes", "{a} ^ {prev}", operator.xor),
}


def edge(r: Random) -> Design:
    """A change of an input from one cycle to the next."""
    operation = r.choice(("rising", "falling", "any"))
    a = r.choice(ONES)
    z = r.choice((*FLAGS, "pulse", "edge_out"))
    clk = r.choice(CLOCKS)
    prev = r.choice(("prev", "last", "old"))
    width = r.choice((1, 1, 1, 4, 8, 16))
    change, expression, changed = EDGES[operation]
    names = dict(a=a, z=z, clk=clk, prev=prev, change=change,
                 right=expression.format(a=a, prev=prev),
                 each=f"each bit of {a}" if width > 1 else a,
                 vector=Port("output", prev, width).vector)

    def output(state: Any, _inputs: Values) -> Values:
        return {z: state and state[1]}

    def clocked(state: Any, inputs: Values) -> Any:  # (the input before, the output)
        if state is None:
            return inputs[a], None
        return inputs[a], changed(inputs[a], state[0]) & mask(width)

    return written(
        "edge", operation, [*inputs_of(1, clk), *inputs_of(width, a), reg_out(z, width)], names,
        spec=r.choice((
            "Detect when {each} {change} from one cycle of {clk} to the next, and set {z} in the "
            "following cycle.",
            "At the rising edge of {clk}, {z} becomes 1 where {each} {change} since the last "
            "edge.")),
        body=["reg {vector}{prev};",
              "always @(posedge {clk}) begin",
              "  {prev} <= {a};",
              "  {z} <= {right};",
              "end"],
        thought="The previous value is kept in a register and compared with the present one.",
        output=output, clocked=clocked)


def shiftreg(r: Random) -> Design:
    """A register that takes in one bit at a time."""
    word, end = "right", "highest"
    if r.random() < 0.5:
        word, end = "left", "lowest"
    width = r.choice((4, 8, 16))
    q = r.choice(STATES)
    clk = r.choice(CLOCKS)
    d = r.choice(("si", "din", "serial_in", "d", "in", "bit_in"))
    reset = drawn_reset(r)
    last = width - 1
    right = {"left": f"{{{q}[{last - 1}:0], {d}}}", "right": f"{{{d}, {q}[{last}:1]}}"}
    names = dict(q=q, clk=clk, d=d, word=word, end=end, right=right[word],
                 **reset.lines)
    spec = r.choice((
        "Shift {q} {word} by one bit at the rising edge of {clk}; {d} enters at the {end} bit.",
        "The module is a shift register: on {clk}, {q} moves {word} and {d} becomes its {end} "
        "bit."))

    def step(state: Any, inputs: Values) -> Any:
        if word == "left":
            return (state << 1 | inputs[d]) & mask(width)
        return state >> 1 | inputs[d] << last

    return written(
        "shiftreg", f"{word}_{reset.kind}", [*inputs_of(1, clk, reset.name, d), reg_out(q, width)],
        names,
        spec=spec + reset.text(r, q),
        body=[ALWAYS, CLEARED, "  else {q} <= {right};"],
        thought="A concatenation drops one bit and takes in another.",
        output=register_out(q), **reset.around(step))


def accumulator(r: Random) -> Design:
    """The sum of all inputs so far."""
    width = r.choice(WIDTHS[2:])
    a = r.choice(ONES)
    clk = r.choice(CLOCKS)
    q = r.choice(("acc", "total", "sum", "q", "out"))
    reset = drawn_reset(r)
    names = dict(a=a, q=q, clk=clk, **reset.lines)
    spec = r.choice((
        "Add {a} to {q} at every rising edge of {clk}.",
        "The module is an accumulator: on {clk}, {q} grows by {a}."))

    def step(state: Any, inputs: Values) -> Any:
        return (state + inputs[a]) & mask(width)

    return written(
        "accumulator", reset.kind,
        [*inputs_of(1, clk, reset.name), *inputs_of(width, a), reg_out(q, width)], names,
        spec=spec + reset.text(r, q),
        body=[ALWAYS, CLEARED, "  else {q} <= {q} + {a};"],
        thought="The register is added to and written back.",
        output=register_out(q), **reset.around(step))


def delay(r: Random) -> Design:
    """An input, two cycles later."""
    width = r.choice((1, *WIDTHS))
    d = r.choice(ONES)
    z = r.choice(OUTS)
    clk = r.choice(CLOCKS)
    middle = r.choice(("stage", "mid", "tmp"))
    names = dict(d=d, z=z, clk=clk, mid=middle,
                 vector=Port("output", middle, width).vector)

    def output(state: Any, _inputs: Values) -> Values:
        return {z: state and state[1]}

    def clocked(state: Any, inputs: Values) -> Any:  # (the register between, the output)
        return inputs[d], state and state[0]

    return written(
        "delay", "2", [*inputs_of(1, clk), *inputs_of(width, d), reg_out(z, width)], names,
        spec=r.choice((
            "Delay {d} by two cycles of {clk} and drive {z}.",
            "The output {z} is {d} as it was two rising edges of {clk} before.")),
        body=["reg {vector}{mid};",
              "always @(posedge {clk}) begin",
              "  {mid} <= {d};",
              "  {z} <= {mid};",
              "end"],
        thought="Two registers in a row.",
        output=output, clocked=clocked)


def latch_fsm(r: Random) -> Design:
    """A state machine of two states."""
    up, down = r.choice((("set", "clr"), ("start", "stop"), ("on", "off"), ("open", "close"),
                         ("push", "pop"), ("j", "k")))
    z = r.choice(FLAGS)
    clk = r.choice(CLOCKS)
    reset = drawn_reset(r)
    names = dict(up=up, down=down, z=z, clk=clk, q="state", **reset.lines)
    spec = r.choice((
        "A state machine on {clk} has two states, OFF and ON. In OFF, {up} = 1 goes to ON. In ON, "
        "{down} = 1 goes to OFF. The output {z} is 1 in ON.",
        "Two states on {clk}: {z} is 0 in OFF and 1 in ON. OFF goes to ON when {up} is 1, ON goes "
        "to OFF when {down} is 1."))

    def step(state: Any, inputs: Values) -> Any:
        if state:
            return int(not inputs[down])
        return inputs[up]

    return written(
        "fsm", reset.kind, [*inputs_of(1, clk, reset.name, up, down), wire_out(z)], names,
        spec=spec + reset.text(r, "the state", "OFF"),
        body=["reg state;",
              ALWAYS,
              CLEARED,
              "  else state <= state ? ~{down} : {up};",
              "assign {z} = state;"],
        thought="One bit holds the state; 0 is OFF and 1 is ON.",
        output=register_out(z), **reset.around(step))


def sequence(r: Random) -> Design:
    """A detector of three bits in a row."""
    a = r.choice(("in", "x", "din", "data", "w", "bit_in"))
    z = r.choice(FLAGS)
    clk = r.choice(CLOCKS)
    reset = drawn_reset(r)
    pattern = r.choice(("101", "110", "011", "111", "100", "010"))
    names = dict(a=a, z=z, clk=clk, q="hist", pattern=pattern, **reset.lines)
    spec = r.choice((
        "Set {z} when the last three values of {a} at the rising edges of {clk} were {pattern}, "
        "oldest first.",
        "Detect the sequence {pattern} on {a}, sampled on {clk}. Sequences may overlap. The output "
        "{z} is 1 after the last bit."))

    def output(state: Any, _inputs: Values) -> Values:
        return {z: int(state == int(pattern, 2))}

    def step(state: Any, inputs: Values) -> Any:
        return (state << 1 | inputs[a]) & mask(3)

    return written(
        "sequence", f"{pattern}_{reset.kind}", [*inputs_of(1, clk, reset.name, a), wire_out(z)],
        names,
        spec=spec + reset.text(r, "the history"),
        body=["reg [2:0] hist;",
              ALWAYS,
              CLEARED,
              "  else hist <= {{hist[1:0], {a}}};",
              "assign {z} = hist == 3'b{pattern};"],
        thought="Three bits of history are compared with the pattern.",
        output=output, **reset.around(step))


def table(r: Random) -> Design:
    """A lookup table of 48 entries: correct, but longer than any row limit of the tiny run."""
    a = r.choice(ONES)
    z = r.choice(OUTS)
    entries = [r.randrange(256) for _ in range(48)]
    listed = ", ".join(str(entry) for entry in entries)
    names = dict(a=a, z=z, listed=listed)
    body = ["always @(*)", "  case ({a})"]
    for number, entry in enumerate(entries):
        body.append(f"    {number}: {z} = {entry};")
    body += ["    default: {z} = 0;", "  endcase"]

    def model(inputs: Values) -> Values:
        number = inputs[a]
        return {z: entries[number] if number < 48 else 0}

    return combinational(
        "table", "48", [*inputs_of(6, a), reg_out(z, 8)], names,
        spec="The module is a lookup table. For {a} from 0 to 47 the output {z} is {listed}. "
             "For all other values of {a} it is 0.",
        body=body,
        thought="A case statement lists all values.",
        model=model)


FAMILIES = (gate, gate3, wire, mux2, mux4, demux, adder, carry, compare, against, extreme,
            choice_of_two, shift, barrel, rotate, reduction, parity, decoder, priority, extend,
            split, join, offset, inverter, masking, majority, popcount, register, counter, modulo,
            updown, toggle, edge, shiftreg, accumulator, delay, latch_fsm, sequence)


def inner_names(design: Design) -> set[str]:
    """The registers that a design declares beside its ports."""
    names = set()
    for line in design.body:
        if line.startswith("reg "):
            names.add(line.split()[-1].rstrip(";"))
    return names


def draw(r: Random, families: Sequence[Callable[[Random], Design]] = FAMILIES) -> Design:
    """A design whose port names are all different; the family comes first: all are as frequent."""
    family = r.choice(families)
    while True:
        design = family(r)
        names = [port.name for port in design.ports]
        are_different = len(set(names)) == len(names)
        if are_different and not inner_names(design) & set(names):
            return design
