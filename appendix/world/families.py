"""The module families of the tiny world: for each, a specification, a Verilog body and a model in Python.

A family is a function of a random generator. It draws an operation, widths, names and a phrasing, and
returns a `Design`. The Python model (`output`, `clocked`, `at_once`) is written independently of the
Verilog, so that a simulation can judge the Verilog against it.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Callable

WIDTHS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
ONES = ("in", "a", "x", "d", "data", "din", "data_in", "value", "word", "src", "vec", "num")
PAIRS = (("a", "b"), ("x", "y"), ("u", "v"), ("left", "right"), ("lhs", "rhs"), ("op1", "op2"),
         ("in0", "in1"), ("d0", "d1"), ("m", "n"), ("first", "second"), ("src0", "src1"), ("s", "t"),
         ("b", "a"), ("y", "x"), ("p", "r"))
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


@dataclass(frozen=True)
class Port:
    """One port: `input` or `output`, its name, its width in bits, and whether it is a `reg`."""

    direction: str
    name: str
    width: int = 1
    reg: bool = False


@dataclass(frozen=True)
class Design:
    """One small module with everything needed to ask for it, to write it and to check it.

    Attributes:
      family, operation: for example `gate` and `nand`.
      ports: in the order of the header.
      spec: what it does, in English sentences.
      body: lines between header and `endmodule`.
      thought: a sentence of reasoning for the training rows.
      output: `(state, inputs) -> outputs`, all dicts or ints of unsigned values.
      clocked: `(state, inputs) -> state` at the active clock edge, or None for combinational logic.
      at_once: the same for an asynchronous reset, applied whenever inputs change.
    """

    family: str
    operation: str
    ports: tuple
    spec: str
    body: tuple
    thought: str
    output: Callable
    clocked: Callable | None = None
    at_once: Callable | None = None
    module: str = "TopModule"

    @property
    def key(self):
        """What must not be shared by training and evaluation: family, widths and port names."""
        return f"{self.family} " + " ".join(f"{p.name}:{p.width}" for p in self.ports)

    @property
    def held_out(self):
        """One key in eight belongs to the evaluation, decided by its hash and nothing else."""
        return hashlib.sha256(self.key.encode()).digest()[0] < 32

    def renamed(self, module):
        """The same design under another module name."""
        return replace(self, module=module)

    def verilog(self, module=None):
        """The module's source, one port per line."""
        lines = [f"module {module or self.module} ("]
        for number, port in enumerate(self.ports):
            kind = port.direction + (" reg" if port.reg else "")
            vector = f"[{port.width - 1}:0] " if port.width > 1 else ""
            lines.append(f"  {kind} {vector}{port.name}" + ("," if number + 1 < len(self.ports) else ""))
        return "\n".join([*lines, ");", *(f"  {line}" for line in self.body), "endmodule", ""])


def i(name, width=1):
    return Port("input", name, width)


def o(name, width=1, reg=False):
    return Port("output", name, width, reg)


def mask(width):
    return (1 << width) - 1


def bits(width):
    return "one-bit" if width == 1 else f"{width}-bit"


# ── Combinational ──

GATES = {
    "and": ("AND", "{a} & {b}", lambda a, b: a & b),
    "or": ("OR", "{a} | {b}", lambda a, b: a | b),
    "xor": ("XOR", "{a} ^ {b}", lambda a, b: a ^ b),
    "nand": ("NAND", "~({a} & {b})", lambda a, b: ~(a & b)),
    "nor": ("NOR", "~({a} | {b})", lambda a, b: ~(a | b)),
    "xnor": ("XNOR", "~({a} ^ {b})", lambda a, b: ~(a ^ b)),
}


def gate(r):
    name, w = r.choice(sorted(GATES)), r.choice((1, 1, *WIDTHS))
    word, text, model = GATES[name]
    (a, b), z = r.choice(PAIRS), r.choice(OUTS)
    spec = r.choice((f"The output {z} is the {'bitwise ' if w > 1 else ''}{word} of {a} and {b}.",
                     f"The module implements a two-input {word} gate with inputs {a} and {b}.",
                     f"Drive {z} with {a} {word} {b}{', bit by bit' if w > 1 else ''}."))
    return Design("gate", name, (i(a, w), i(b, w), o(z, w)), spec,
                  (f"assign {z} = {text.format(a=a, b=b)};",),
                  f"A {word} gate is one continuous assignment.",
                  lambda s, v: {z: model(v[a], v[b]) & mask(w)})


def gate3(r):
    name, w = r.choice(("and", "or", "xor")), r.choice((1, 1, 2, 4, 8, 16))
    word, sign = GATES[name][0], {"and": "&", "or": "|", "xor": "^"}[name]
    (a, b, c), z, model = r.choice(TRIPLES), r.choice(OUTS), GATES[name][2]
    spec = r.choice((f"The output {z} is the {word} of the three inputs {a}, {b} and {c}.",
                     f"The module implements a three-input {word} gate.",
                     f"Combine {a}, {b} and {c} with {word} and drive {z} with the result."))
    return Design("gate3", name, (i(a, w), i(b, w), i(c, w), o(z, w)), spec,
                  (f"assign {z} = {a} {sign} {b} {sign} {c};",),
                  f"Three inputs are combined with {word}.",
                  lambda s, v: {z: model(model(v[a], v[b]), v[c])})


def wire(r):
    name, w = r.choice(("invert", "copy")), r.choice((1, *WIDTHS))
    a, z = r.choice(ONES), r.choice(OUTS)
    spec = {"invert": (f"The module implements a NOT gate: {z} is the inverse of {a}.",
                       f"Every bit of {z} is the complement of the same bit of {a}.",
                       f"Drive {z} with the bitwise complement of {a}."),
            "copy": (f"The output {z} follows the input {a} unchanged.",
                     f"Connect {a} to {z} like a wire.")}[name]
    sign = "~" if name == "invert" else ""
    return Design("wire", name, (i(a, w), o(z, w)), r.choice(spec), (f"assign {z} = {sign}{a};",),
                  "One assignment is enough.",
                  lambda s, v: {z: (~v[a] if sign else v[a]) & mask(w)})


def mux2(r):
    w, (a, b), z, sel = r.choice((1, *WIDTHS)), r.choice(PAIRS), r.choice(OUTS), r.choice(SELECTS)
    one = r.random() < 0.5  # which input a high select picks
    high, low = (b, a) if one else (a, b)
    spec = r.choice((f"The module is a {bits(w)} 2-to-1 multiplexer. When {sel} is 0, choose {low}. "
                     f"When {sel} is 1, choose {high}.",
                     f"When {sel} is 1 the output {z} is {high}, otherwise it is {low}.",
                     f"If {sel} is high, {z} equals {high}; if {sel} is low, {z} equals {low}."))
    return Design("mux2", "second" if one else "first", (i(a, w), i(b, w), i(sel), o(z, w)), spec,
                  (f"assign {z} = {sel} ? {high} : {low};",),
                  f"The select input {sel} picks {high} when high and {low} when low.",
                  lambda s, v: {z: v[high] if v[sel] else v[low]})


def mux4(r):
    w, names, z, sel = r.choice((1, 2, 4, 8, 16)), r.choice(QUADS), r.choice(OUTS), r.choice(SELECTS[:4])
    a, b, c, d = names
    spec = r.choice((f"The module is a 4-to-1 multiplexer. When {sel} is 0, 1, 2 or 3, the output {z} is "
                     f"{a}, {b}, {c} or {d}.",
                     f"The two bits of {sel} choose which of {a}, {b}, {c} and {d} appears on {z}."))
    body = ("always @(*)", f"  case ({sel})", f"    0: {z} = {a};", f"    1: {z} = {b};",
            f"    2: {z} = {c};", f"    default: {z} = {d};", "  endcase")
    return Design("mux4", "case", (*(i(n, w) for n in names), i(sel, 2), o(z, w, True)), spec, body,
                  "A case statement over the select value covers the four inputs.",
                  lambda s, v: {z: v[names[v[sel]]]})


def demux(r):
    w, a, sel, (y, z) = r.choice((1, 4, 8, 16)), r.choice(ONES), r.choice(SELECTS), r.choice(
        (("out0", "out1"), ("y0", "y1"), ("z0", "z1"), ("low", "high")))
    spec = r.choice((f"Route {a} to {y} when {sel} is 0 and to {z} when {sel} is 1. The other output is 0.",
                     f"The module is a 1-to-2 demultiplexer: {a} goes to {z} if {sel} is high and to {y} "
                     f"otherwise, and the unused output is 0."))
    return Design("demux", "2", (i(a, w), i(sel), o(y, w), o(z, w)), spec,
                  (f"assign {y} = {sel} ? 0 : {a};", f"assign {z} = {sel} ? {a} : 0;"),
                  "Each output is the input or zero, depending on the select.",
                  lambda s, v: {y: 0 if v[sel] else v[a], z: v[a] if v[sel] else 0})


SUMS = {"add": ("sum", "+", lambda a, b: a + b), "sub": ("difference", "-", lambda a, b: a - b)}


def adder(r):
    name, w, (a, b) = r.choice(("add", "sub")), r.choice(WIDTHS), r.choice(PAIRS)
    word, sign, model = SUMS[name]
    z = r.choice((*OUTS, "sum" if name == "add" else "diff"))
    spec = r.choice((f"The output {z} is the {word} {a} {sign} {b}, truncated to {w} bits.",
                     f"Compute {a} {'plus' if name == 'add' else 'minus'} {b} and drive {z} with the "
                     f"{w}-bit result.",
                     f"The module {'adds' if name == 'add' else 'subtracts'} two {w}-bit numbers: "
                     f"{z} is {a} {sign} {b}."))
    return Design("adder", name, (i(a, w), i(b, w), o(z, w)), spec, (f"assign {z} = {a} {sign} {b};",),
                  f"The {word} wraps around at {w} bits.", lambda s, v: {z: model(v[a], v[b]) & mask(w)})


def carry(r):
    w, (a, b) = r.choice((1, *WIDTHS)), r.choice(PAIRS)
    cin, cout, z = r.choice(("cin", "carry_in", "c_in")), r.choice(("cout", "carry", "c_out")), r.choice(
        ("sum", "total", "s_out", "out"))
    with_in = r.random() < 0.5
    spec = {True: (f"Add {a}, {b} and the carry input {cin}. The output {z} is the sum and {cout} is the "
                   f"carry out.",
                   f"The module is a {bits(w)} full adder with carry input {cin}, sum {z} and carry out "
                   f"{cout}."),
            False: (f"Add {a} and {b}. The output {z} is the sum and {cout} is the carry out.",
                    f"The module is a {bits(w)} half adder with sum {z} and carry out {cout}.")}[with_in]
    ports = (i(a, w), i(b, w), *((i(cin),) if with_in else ()), o(z, w), o(cout))
    right = f"{a} + {b}" + (f" + {cin}" if with_in else "")

    def model(s, v):
        total = v[a] + v[b] + (v[cin] if with_in else 0)
        return {z: total & mask(w), cout: total >> w}
    return Design("carry", "full" if with_in else "half", ports, r.choice(spec),
                  (f"assign {{{cout}, {z}}} = {right};",),
                  "The concatenation on the left is one bit wider, so it catches the carry.", model)


RELATIONS = {
    "==": ("equal to", lambda a, b: a == b), "!=": ("not equal to", lambda a, b: a != b),
    "<": ("less than", lambda a, b: a < b), ">": ("greater than", lambda a, b: a > b),
    "<=": ("less than or equal to", lambda a, b: a <= b),
    ">=": ("greater than or equal to", lambda a, b: a >= b),
}


def compare(r):
    sign, w, (a, b), z = r.choice(sorted(RELATIONS)), r.choice(WIDTHS), r.choice(PAIRS), r.choice(FLAGS)
    word, model = RELATIONS[sign]
    spec = r.choice((f"The output {z} is 1 when {a} is {word} {b}, and 0 otherwise.",
                     f"Compare two unsigned {w}-bit numbers: set {z} if {a} is {word} {b}.",
                     f"Assert {z} exactly when {a} is {word} {b}."))
    return Design("compare", sign, (i(a, w), i(b, w), o(z)), spec, (f"assign {z} = {a} {sign} {b};",),
                  f"The comparison is {a} {sign} {b}.", lambda s, v: {z: int(model(v[a], v[b]))})


def against(r):
    sign, w, a, z = r.choice(("==", "<", ">")), r.choice((4, 5, 6, 8, 10, 12, 16)), r.choice(ONES), \
        r.choice(FLAGS)
    k, (word, model) = r.randint(1, 15 if w > 4 else 14), RELATIONS[sign]
    spec = r.choice((f"The output {z} is 1 when {a} is {word} {k}, and 0 otherwise.",
                     f"Assert {z} exactly when the unsigned input {a} is {word} {k}."))
    return Design("against", sign, (i(a, w), o(z)), spec, (f"assign {z} = {a} {sign} {k};",),
                  f"{a} is compared with the constant {k}.", lambda s, v: {z: int(model(v[a], k))})


def extreme(r):
    name, w, (a, b) = r.choice(("max", "min")), r.choice(WIDTHS), r.choice(PAIRS)
    z, word = r.choice((*OUTS, name)), {"max": "larger", "min": "smaller"}[name]
    spec = r.choice((f"The output {z} is the {word} of the unsigned numbers {a} and {b}.",
                     f"Drive {z} with the {name}imum of {a} and {b}.",
                     f"Find the {name}imum of two {w}-bit inputs {a} and {b}."))
    sign = ">" if name == "max" else "<"
    return Design("extreme", name, (i(a, w), i(b, w), o(z, w)), spec,
                  (f"assign {z} = {a} {sign} {b} ? {a} : {b};",), f"Compare the two and keep the {word}.",
                  lambda s, v: {z: (max if name == "max" else min)(v[a], v[b])})


def choice_of_two(r):
    table = {"+": ("sum", lambda a, b: a + b), "-": ("difference", lambda a, b: a - b),
             "&": ("AND", lambda a, b: a & b), "|": ("OR", lambda a, b: a | b),
             "^": ("XOR", lambda a, b: a ^ b)}
    low, high = r.sample(sorted(table), 2)
    w, (a, b), z, sel = r.choice(WIDTHS), r.choice(PAIRS), r.choice(OUTS), r.choice(SELECTS)
    spec = r.choice((f"When {sel} is 0, {z} is {a} {low} {b}. When {sel} is 1, {z} is {a} {high} {b}.",
                     f"When {sel} is 0, {z} is the {table[low][0]} of {a} and {b}. When {sel} is 1, {z} "
                     f"is the {table[high][0]} of {a} and {b}."))
    return Design("alu", low + high, (i(a, w), i(b, w), i(sel), o(z, w)), spec,
                  (f"assign {z} = {sel} ? {a} {high} {b} : {a} {low} {b};",),
                  f"{sel} chooses between two operations.",
                  lambda s, v: {z: table[high if v[sel] else low][1](v[a], v[b]) & mask(w)})


def shift(r):
    left, w, a, z = r.random() < 0.5, r.choice(WIDTHS[2:]), r.choice(ONES), r.choice(OUTS)
    k = r.randint(1, 3)
    word, sign = ("left", "<<") if left else ("right", ">>")
    spec = r.choice((f"The output {z} is {a} shifted {word} by {k} bit{'s' * (k > 1)}, filled with zeros.",
                     f"Shift {a} {word} by {k} and drive {z} with the {w}-bit result."))
    return Design("shift", word, (i(a, w), o(z, w)), spec, (f"assign {z} = {a} {sign} {k};",),
                  f"A logical shift to the {word} by a constant.",
                  lambda s, v: {z: (v[a] << k if left else v[a] >> k) & mask(w)})


def barrel(r):
    left, w, a, z = r.random() < 0.5, r.choice((4, 8, 16, 32)), r.choice(ONES), r.choice(OUTS)
    n, word, sign = r.choice(("amt", "shamt", "n", "by")), *(("left", "<<") if left else ("right", ">>"))
    m = w.bit_length() - 1
    spec = r.choice((f"Shift {a} {word} by the amount {n}, filling with zeros, and drive {z}.",
                     f"The output {z} is {a} shifted {word} by {n} bits."))
    return Design("barrel", word, (i(a, w), i(n, m), o(z, w)), spec, (f"assign {z} = {a} {sign} {n};",),
                  f"A logical shift to the {word} by a variable amount.",
                  lambda s, v: {z: (v[a] << v[n] if left else v[a] >> v[n]) & mask(w)})


def rotate(r):
    left, w, a, z = r.random() < 0.5, r.choice((4, 8, 16)), r.choice(ONES), r.choice(OUTS)
    word = "left" if left else "right"
    spec = r.choice((f"The output {z} is {a} rotated {word} by one bit.",
                     f"Rotate {a} {word} by one position; the bit that falls out comes in at the other end."))
    right = f"{{{a}[{w - 2}:0], {a}[{w - 1}]}}" if left else f"{{{a}[0], {a}[{w - 1}:1]}}"
    return Design("rotate", word, (i(a, w), o(z, w)), spec, (f"assign {z} = {right};",),
                  "A rotation is a concatenation of the same bits in another order.",
                  lambda s, v: {z: ((v[a] << 1 | v[a] >> w - 1) if left else
                                    (v[a] >> 1 | (v[a] & 1) << w - 1)) & mask(w)})


REDUCTIONS = {
    "and": (("is 1 when all bits of {a} are 1", "is the AND of all bits of {a}"), "&",
            lambda x, w: x == mask(w)),
    "or": (("is 1 when at least one bit of {a} is 1", "is the OR of all bits of {a}"), "|",
           lambda x, w: x != 0),
    "nor": (("is 1 when no bit of {a} is set", "is 1 when {a} is zero"), "~|", lambda x, w: x == 0),
}


def reduction(r):
    name, w, a, z = r.choice(sorted(REDUCTIONS)), r.choice(WIDTHS), r.choice(ONES), r.choice(FLAGS)
    texts, sign, model = REDUCTIONS[name]
    spec = f"The output {z} {r.choice(texts).format(a=a)}" + r.choice((".", ", and 0 otherwise."))
    return Design("reduction", name, (i(a, w), o(z)), spec, (f"assign {z} = {sign}{a};",),
                  "A reduction operator folds the whole vector into one bit.",
                  lambda s, v: {z: int(model(v[a], w))})


def parity(r):
    odd, w, a, z = r.random() < 0.5, r.choice(WIDTHS), r.choice(ONES), r.choice(
        ("parity", "p", "par", "out", "z"))
    word = "odd" if odd else "even"
    spec = r.choice((f"Compute the {word} parity bit {z} of the {w}-bit input {a}.",
                     f"The output {z} is 1 when the number of ones in {a} is {'even' if odd else 'odd'}. "
                     f"This is the {word} parity bit.",
                     f"Drive {z} so that {a} and {z} together hold an {word} number of ones."))
    return Design("parity", word, (i(a, w), o(z)), spec, (f"assign {z} = {'~^' if odd else '^'}{a};",),
                  "Even parity is the XOR of all bits, odd parity its inverse.",
                  lambda s, v: {z: (v[a].bit_count() + odd) % 2})


def decoder(r):
    w, a, z, en = r.choice((1, 2, 3, 4)), r.choice(ONES), r.choice(OUTS), r.choice(ENABLES)
    enabled, n = r.random() < 0.5, 1 << w
    first = r.choice((f"The module is a {w}-to-{n} decoder: bit number {a} of {z} is 1 and the others are 0.",
                      f"Decode {a} into the one-hot output {z}."))
    spec = first + (f" When {en} is 0, all bits of {z} are 0." if enabled else "")
    return Design("decoder", "enable" if enabled else "plain",
                  (i(a, w), *((i(en),) if enabled else ()), o(z, n)), spec,
                  (f"assign {z} = {f'{en} ? ' if enabled else ''}1 << {a}{' : 0' if enabled else ''};",),
                  f"Shifting a one by {a} gives the one-hot code.",
                  lambda s, v: {z: 1 << v[a] if not enabled or v[en] else 0})


def priority(r):
    low, w, a = r.random() < 0.5, r.choice((3, 4)), r.choice(ONES)
    z, valid = r.choice(("pos", "idx", "index", "out", "code")), r.random() < 0.3
    order = range(w) if low else range(w - 1, -1, -1)
    spec = r.choice((f"The module is a priority encoder: {z} is the position of the "
                     f"{'lowest' if low else 'highest'} bit of {a} that is 1, or 0 if {a} is 0.",
                     f"Find the {'least' if low else 'most'} significant 1 in {a} and drive {z} with its "
                     f"bit number. If no bit is set, {z} is 0."))
    if valid:
        spec += " The output valid is 1 when any bit is set."
    first, *others = order
    body = ["always @(*)", f"  if ({a}[{first}]) {z} = {first};",
            *(f"  else if ({a}[{k}]) {z} = {k};" for k in others), f"  else {z} = 0;"]
    if valid:
        body.append(f"assign valid = |{a};")

    def model(s, v):
        found = next((k for k in order if v[a] >> k & 1), 0)
        return {z: found, **({"valid": int(v[a] != 0)} if valid else {})}
    return Design("priority", "low" if low else "high",
                  (i(a, w), o(z, 2, True), *((o("valid"),) if valid else ())), spec, tuple(body),
                  "The chain of conditions goes from the bit that wins to the one that loses.", model)


def extend(r):
    (w, n), signed, a, z = r.choice(((4, 8), (8, 16), (8, 12), (4, 6), (16, 32), (8, 32), (5, 8))), \
        r.random() < 0.5, r.choice(ONES), r.choice(OUTS)
    word = "sign" if signed else "zero"
    spec = r.choice((f"The output {z} is {a} {word}-extended from {w} to {n} bits.",
                     f"Extend the {w}-bit input {a} to {n} bits by repeating "
                     f"{'its sign bit' if signed else 'zeros'} and drive {z}."))
    text = f"{{{{{n - w}{{{a}[{w - 1}]}}}}, {a}}}" if signed else a
    return Design("extend", word, (i(a, w), o(z, n)), spec, (f"assign {z} = {text};",),
                  "The upper bits are copies of the sign bit." if signed else "The upper bits are zero.",
                  lambda s, v: {z: v[a] | (mask(n - w) << w if signed and v[a] >> w - 1 else 0)})


def split(r):
    w, a, (hi, lo) = r.choice((4, 8, 16, 32)), r.choice(ONES), r.choice(
        (("hi", "lo"), ("high", "low"), ("upper", "lower"), ("msb", "lsb")))
    h = w // 2
    spec = r.choice((f"Split {a} into its upper half {hi} and its lower half {lo}.",
                     f"The output {hi} is the upper {h} bits of {a} and {lo} is the lower {h} bits."))
    return Design("split", "halves", (i(a, w), o(hi, h), o(lo, h)), spec,
                  (f"assign {hi} = {a}[{w - 1}:{h}];", f"assign {lo} = {a}[{h - 1}:0];"),
                  f"Each half has {h} bits.", lambda s, v: {hi: v[a] >> h, lo: v[a] & mask(h)})


def join(r):
    w, (a, b), z, swap = r.choice((1, 2, 4, 8, 16)), r.choice(PAIRS), r.choice(OUTS), r.random() < 0.5
    top, low = (b, a) if swap else (a, b)
    spec = r.choice((f"Concatenate {a} and {b} into {z}, with {top} in the upper bits.",
                     f"The upper half of {z} is {top} and the lower half is {low}."))
    return Design("join", "swap" if swap else "same", (i(a, w), i(b, w), o(z, 2 * w)), spec,
                  (f"assign {z} = {{{top}, {low}}};",), f"In a concatenation {top} comes first.",
                  lambda s, v: {z: v[top] << w | v[low]})


def offset(r):
    plus, w, a, z, k = r.random() < 0.6, r.choice(WIDTHS[2:]), r.choice(ONES), r.choice(OUTS), r.randint(1, 9)
    sign = "+" if plus else "-"
    spec = r.choice((f"The output {z} is {a} {'plus' if plus else 'minus'} {k}, truncated to {w} bits.",
                     f"{'Add' if plus else 'Subtract'} the constant {k} {'to' if plus else 'from'} {a} and "
                     f"drive {z}."))
    return Design("offset", "add" if plus else "sub", (i(a, w), o(z, w)), spec,
                  (f"assign {z} = {a} {sign} {k};",), f"The constant is {k}.",
                  lambda s, v: {z: (v[a] + (k if plus else -k)) & mask(w)})


def inverter(r):
    w, a, z, inv = r.choice((1, *WIDTHS)), r.choice(ONES), r.choice(OUTS), r.choice(
        ("inv", "invert", "neg", "flip"))
    spec = r.choice((f"When {inv} is 1, {z} is the bitwise complement of {a}, otherwise {z} is {a}.",
                     f"The input {inv} decides whether {z} is {a} (0) or its complement (1)."))
    return Design("inverter", "control", (i(a, w), i(inv), o(z, w)), spec,
                  (f"assign {z} = {inv} ? ~{a} : {a};",), f"{inv} selects the complement.",
                  lambda s, v: {z: (~v[a] if v[inv] else v[a]) & mask(w)})


def masking(r):
    w, a, z, en = r.choice((1, *WIDTHS)), r.choice(ONES), r.choice(OUTS), r.choice(ENABLES)
    spec = r.choice((f"The output {z} is {a} when {en} is 1 and 0 when {en} is 0.",
                     f"Pass {a} to {z} only while {en} is high; otherwise drive {z} with 0."))
    return Design("masking", "enable", (i(a, w), i(en), o(z, w)), spec, (f"assign {z} = {en} ? {a} : 0;",),
                  f"{en} gates the input.", lambda s, v: {z: v[a] if v[en] else 0})


def majority(r):
    (a, b, c), z, w = r.choice(TRIPLES), r.choice(FLAGS), 1
    spec = r.choice((f"The output {z} is 1 when at least two of {a}, {b} and {c} are 1.",
                     f"The module is a majority gate: {z} follows the majority of {a}, {b} and {c}."))
    return Design("majority", "3", (i(a, w), i(b, w), i(c, w), o(z)), spec,
                  (f"assign {z} = ({a} & {b}) | ({a} & {c}) | ({b} & {c});",),
                  "Two of three: one AND term for each pair.",
                  lambda s, v: {z: int(v[a] + v[b] + v[c] >= 2)})


def popcount(r):
    (a, b, c), z = r.choice(TRIPLES), r.choice(("count", "ones", "total", "out", "num_ones"))
    spec = r.choice((f"The output {z} is the number of ones among {a}, {b} and {c}.",
                     f"Count how many of the three inputs {a}, {b} and {c} are 1 and drive {z}."))
    return Design("popcount", "3", (i(a), i(b), i(c), o(z, 2)), spec, (f"assign {z} = {a} + {b} + {c};",),
                  "Three one-bit numbers are added.", lambda s, v: {z: v[a] + v[b] + v[c]})


# ── Clocked ──

def resetting(r, extra=()):
    """Draw a reset style: (port, phrases, sensitivity, condition, kind)."""
    kind = r.choice(("sync", "sync", "async", "low", *extra))
    if kind == "none":
        return None, "", "", "", kind
    name = {"sync": r.choice(RESETS), "async": r.choice(ASYNC_RESETS),
            "low": r.choice(LOW_RESETS)}[kind]
    edge = f" or posedge {name}" if kind == "async" else ""
    return name, kind, edge, f"!{name}" if kind == "low" else name, kind


def reset_text(r, name, kind, z, value=0):
    return r.choice({
        "sync": (f"The synchronous reset {name} sets {z} to {value}.",
                 f"When {name} is high at the clock edge, {z} becomes {value}."),
        "async": (f"The asynchronous reset {name} sets {z} to {value}.",
                  f"{name} is an active-high asynchronous reset to {value}."),
        "low": (f"The active-low synchronous reset {name} sets {z} to {value}.",
                f"When {name} is low at the clock edge, {z} becomes {value}."),
    }[kind])


def under_reset(name, kind, value, step):
    """Wrap a next-state function with the reset; returns (clocked, at_once)."""
    active = (lambda v: not v[name]) if kind == "low" else (lambda v: v[name])
    if kind == "none":
        return step, None
    return (lambda s, v: value if active(v) else step(s, v),
            (lambda s, v: value if active(v) else s) if kind == "async" else None)


def register(r):
    w, d, q, clk = r.choice((1, *WIDTHS)), r.choice(ONES), r.choice(STATES), r.choice(CLOCKS)
    name, kind, edge, condition, _ = resetting(r, ("none",))
    en = r.choice(ENABLES) if r.random() < 0.35 else None
    first = r.choice((f"The module is a {bits(w)} D register: at every rising edge of {clk}, {q} takes {d}",
                      f"Store {d} in {q} at the rising edge of {clk}"))
    spec = first + (f" if {en} is 1." if en else ".")
    if kind:
        spec += " " + reset_text(r, name, kind, q)
    update = f"{f'if ({en}) ' if en else ''}{q} <= {d};"
    body = (f"always @(posedge {clk}{edge})", *((f"  if ({condition}) {q} <= 0;", f"  else {update}")
                                                if kind else (f"  {update}",)))
    ports = (i(clk), *((i(name),) if kind else ()), *((i(en),) if en else ()), i(d, w), o(q, w, True))
    clocked, at_once = under_reset(name, kind or "none", 0,
                                   lambda s, v: v[d] if not en or v[en] else s)
    return Design("register", (kind or "plain") + ("_enable" if en else ""), ports, spec, body,
                  "A register is one nonblocking assignment in a clocked block.",
                  lambda s, v: {q: s}, clocked, at_once)


def counter(r):
    down, w, q, clk = r.random() < 0.35, r.choice(WIDTHS), r.choice(STATES), r.choice(CLOCKS)
    name, kind, edge, condition, _ = resetting(r)
    en = r.choice(ENABLES) if r.random() < 0.4 else None
    word, sign = ("down", "-") if down else ("up", "+")
    spec = r.choice((f"The module is a {w}-bit {word} counter on {clk}.",
                     f"Count {word} by one at every rising edge of {clk}."))
    spec += (f" It counts only while {en} is 1." if en else "") + " " + reset_text(r, name, kind, q)
    body = (f"always @(posedge {clk}{edge})", f"  if ({condition}) {q} <= 0;",
            f"  else {f'if ({en}) ' if en else ''}{q} <= {q} {sign} 1;")
    clocked, at_once = under_reset(name, kind, 0, lambda s, v: s if en and not v[en] else
                                   (s - 1 if down else s + 1) & mask(w))
    return Design("counter", f"{word}_{kind}" + ("_enable" if en else ""),
                  (i(clk), i(name), *((i(en),) if en else ()), o(q, w, True)), spec, body,
                  f"The counter wraps around by itself at {w} bits.", lambda s, v: {q: s}, clocked, at_once)


def modulo(r):
    q, clk = r.choice(STATES), r.choice(CLOCKS)
    name, kind, edge, condition, _ = resetting(r)
    w, n = r.choice(((3, 4), (3, 5), (4, 9), (4, 10), (4, 11), (4, 12), (5, 19), (5, 23), (6, 59)))
    spec = r.choice((f"Count from 0 to {n} on {clk} and then start again at 0.",
                     f"The counter {q} goes from 0 up to {n} and wraps to 0."))
    spec += " " + reset_text(r, name, kind, q)
    body = (f"always @(posedge {clk}{edge})", f"  if ({condition}) {q} <= 0;",
            f"  else if ({q} == {n}) {q} <= 0;", f"  else {q} <= {q} + 1;")
    clocked, at_once = under_reset(name, kind, 0, lambda s, v: 0 if s == n else s + 1)
    return Design("modulo", f"{n}_{kind}", (i(clk), i(name), o(q, w, True)), spec, body,
                  f"The value {n} is followed by 0.", lambda s, v: {q: s}, clocked, at_once)


def updown(r):
    w, q, clk, up = r.choice(WIDTHS), r.choice(STATES), r.choice(CLOCKS), r.choice(
        ("up", "dir", "inc", "forward"))
    name, kind, edge, condition, _ = resetting(r)
    spec = r.choice((f"The counter {q} goes up when {up} is 1 and down when {up} is 0, once per cycle of {clk}.",
                     f"At the rising edge of {clk}, add one to {q} if {up} is high, otherwise subtract one."))
    spec += " " + reset_text(r, name, kind, q)
    body = (f"always @(posedge {clk}{edge})", f"  if ({condition}) {q} <= 0;",
            f"  else if ({up}) {q} <= {q} + 1;", f"  else {q} <= {q} - 1;")
    clocked, at_once = under_reset(name, kind, 0, lambda s, v: (s + (1 if v[up] else -1)) & mask(w))
    return Design("updown", kind, (i(clk), i(name), i(up), o(q, w, True)), spec, body,
                  f"{up} decides the direction.", lambda s, v: {q: s}, clocked, at_once)


def toggle(r):
    t, q, clk = r.choice(("t", "tog", "toggle", "flip", "in")), r.choice(STATES), r.choice(CLOCKS)
    name, kind, edge, condition, _ = resetting(r)
    spec = r.choice((f"The module is a T flip-flop: {q} toggles at the rising edge of {clk} when {t} is 1.",
                     f"Invert {q} at each rising edge of {clk} at which {t} is high; otherwise keep it."))
    spec += " " + reset_text(r, name, kind, q)
    body = (f"always @(posedge {clk}{edge})", f"  if ({condition}) {q} <= 0;",
            f"  else if ({t}) {q} <= ~{q};")
    clocked, at_once = under_reset(name, kind, 0, lambda s, v: s ^ v[t])
    return Design("toggle", kind, (i(clk), i(name), i(t), o(q, 1, True)), spec, body,
                  f"{t} decides whether the bit changes.", lambda s, v: {q: s}, clocked, at_once)


def edge(r):
    name = r.choice(("rising", "falling", "any"))
    a, z, clk, prev = r.choice(ONES), r.choice((*FLAGS, "pulse", "edge_out")), r.choice(CLOCKS), r.choice(
        ("prev", "last", "old"))
    w = r.choice((1, 1, 1, 4, 8, 16))
    text = {"rising": f"{a} & ~{prev}", "falling": f"~{a} & {prev}", "any": f"{a} ^ {prev}"}[name]
    change = {"rising": "goes from 0 to 1", "falling": "goes from 1 to 0", "any": "changes"}[name]
    each = f"each bit of {a}" if w > 1 else a
    spec = r.choice((f"Detect when {each} {change} from one cycle of {clk} to the next, and set {z} in the "
                     f"following cycle.",
                     f"At the rising edge of {clk}, {z} becomes 1 where {each} {change} since the last edge."))
    body = (f"reg [{w - 1}:0] {prev};" if w > 1 else f"reg {prev};", f"always @(posedge {clk}) begin",
            f"  {prev} <= {a};", f"  {z} <= {text};", "end")
    model = {"rising": lambda x, p: x & ~p, "falling": lambda x, p: ~x & p, "any": lambda x, p: x ^ p}[name]
    return Design("edge", name, (i(clk), i(a, w), o(z, w, True)), spec, body,
                  "The previous value is kept in a register and compared with the present one.",
                  lambda s, v: {z: s and s[1]},
                  lambda s, v: (v[a], None if s is None else model(v[a], s[0]) & mask(w)))


def shiftreg(r):
    left, w, q, clk = r.random() < 0.5, r.choice((4, 8, 16)), r.choice(STATES), r.choice(CLOCKS)
    d = r.choice(("si", "din", "serial_in", "d", "in", "bit_in"))
    name, kind, edge, condition, _ = resetting(r)
    word, end = ("left", "lowest") if left else ("right", "highest")
    spec = r.choice((f"Shift {q} {word} by one bit at the rising edge of {clk}; {d} enters at the {end} bit.",
                     f"The module is a shift register: on {clk}, {q} moves {word} and {d} becomes its {end} bit."))
    spec += " " + reset_text(r, name, kind, q)
    text = f"{{{q}[{w - 2}:0], {d}}}" if left else f"{{{d}, {q}[{w - 1}:1]}}"
    body = (f"always @(posedge {clk}{edge})", f"  if ({condition}) {q} <= 0;", f"  else {q} <= {text};")
    clocked, at_once = under_reset(name, kind, 0, lambda s, v: ((s << 1 | v[d]) & mask(w)) if left
                                   else (s >> 1 | v[d] << w - 1))
    return Design("shiftreg", f"{word}_{kind}", (i(clk), i(name), i(d), o(q, w, True)), spec, body,
                  "A concatenation drops one bit and takes in another.", lambda s, v: {q: s}, clocked, at_once)


def accumulator(r):
    w, a, clk, q = r.choice(WIDTHS[2:]), r.choice(ONES), r.choice(CLOCKS), r.choice(
        ("acc", "total", "sum", "q", "out"))
    name, kind, edge, condition, _ = resetting(r)
    spec = r.choice((f"Add {a} to {q} at every rising edge of {clk}.",
                     f"The module is an accumulator: on {clk}, {q} grows by {a}."))
    spec += " " + reset_text(r, name, kind, q)
    body = (f"always @(posedge {clk}{edge})", f"  if ({condition}) {q} <= 0;", f"  else {q} <= {q} + {a};")
    clocked, at_once = under_reset(name, kind, 0, lambda s, v: (s + v[a]) & mask(w))
    return Design("accumulator", kind, (i(clk), i(name), i(a, w), o(q, w, True)), spec, body,
                  "The register is added to and written back.", lambda s, v: {q: s}, clocked, at_once)


def delay(r):
    w, d, z, clk, mid = r.choice((1, *WIDTHS)), r.choice(ONES), r.choice(OUTS), r.choice(CLOCKS), r.choice(
        ("stage", "mid", "tmp"))
    spec = r.choice((f"Delay {d} by two cycles of {clk} and drive {z}.",
                     f"The output {z} is {d} as it was two rising edges of {clk} before."))
    body = (f"reg [{w - 1}:0] {mid};" if w > 1 else f"reg {mid};", f"always @(posedge {clk}) begin",
            f"  {mid} <= {d};", f"  {z} <= {mid};", "end")
    return Design("delay", "2", (i(clk), i(d, w), o(z, w, True)), spec, body,
                  "Two registers in a row.", lambda s, v: {z: s and s[1]},
                  lambda s, v: (v[d], s and s[0]))


def latch_fsm(r):
    (up, down), z, clk = r.choice((("set", "clr"), ("start", "stop"), ("on", "off"), ("open", "close"),
                                   ("push", "pop"), ("j", "k"))), r.choice(FLAGS), r.choice(CLOCKS)
    name, kind, edge, condition, _ = resetting(r)
    spec = r.choice((f"A state machine on {clk} has two states, OFF and ON. In OFF, {up} = 1 goes to ON. In "
                     f"ON, {down} = 1 goes to OFF. The output {z} is 1 in ON.",
                     f"Two states on {clk}: {z} is 0 in OFF and 1 in ON. OFF goes to ON when {up} is 1, ON goes "
                     f"to OFF when {down} is 1."))
    spec += " " + reset_text(r, name, kind, "the state", "OFF")
    body = ("reg state;", f"always @(posedge {clk}{edge})", f"  if ({condition}) state <= 0;",
            f"  else state <= state ? ~{down} : {up};", f"assign {z} = state;")
    clocked, at_once = under_reset(name, kind, 0, lambda s, v: int(not v[down]) if s else v[up])
    return Design("fsm", kind, (i(clk), i(name), i(up), i(down), o(z)), spec, body,
                  "One bit holds the state; 0 is OFF and 1 is ON.", lambda s, v: {z: s}, clocked, at_once)


def sequence(r):
    a, z, clk = r.choice(("in", "x", "din", "data", "w", "bit_in")), r.choice(FLAGS), r.choice(CLOCKS)
    name, kind, edge, condition, _ = resetting(r)
    pattern = r.choice(("101", "110", "011", "111", "100", "010"))
    spec = r.choice((f"Set {z} when the last three values of {a} at the rising edges of {clk} were {pattern}, "
                     f"oldest first.",
                     f"Detect the sequence {pattern} on {a}, sampled on {clk}. Sequences may overlap. The output "
                     f"{z} is 1 after the last bit."))
    spec += " " + reset_text(r, name, kind, "the history", 0)
    body = ("reg [2:0] hist;", f"always @(posedge {clk}{edge})", f"  if ({condition}) hist <= 0;",
            f"  else hist <= {{hist[1:0], {a}}};", f"assign {z} = hist == 3'b{pattern};")
    clocked, at_once = under_reset(name, kind, 0, lambda s, v: (s << 1 | v[a]) & 7)
    return Design("sequence", f"{pattern}_{kind}", (i(clk), i(name), i(a), o(z)), spec, body,
                  "Three bits of history are compared with the pattern.",
                  lambda s, v: {z: int(s == int(pattern, 2))}, clocked, at_once)


def table(r):
    """A lookup table of 48 entries: correct, but longer than any row limit of the tiny run."""
    a, z = r.choice(ONES), r.choice(OUTS)
    values = [r.randrange(256) for _ in range(48)]
    spec = (f"The module is a lookup table. For {a} from 0 to 47 the output {z} is "
            + ", ".join(map(str, values)) + f". For all other values of {a} it is 0.")
    body = ("always @(*)", f"  case ({a})", *(f"    {k}: {z} = {v};" for k, v in enumerate(values)),
            f"    default: {z} = 0;", "  endcase")
    return Design("table", "48", (i(a, 6), o(z, 8, True)), spec, body, "A case statement lists all values.",
                  lambda s, v: {z: values[v[a]] if v[a] < 48 else 0})


FAMILIES = (gate, gate3, wire, mux2, mux4, demux, adder, carry, compare, against, extreme, choice_of_two,
            shift, barrel, rotate, reduction, parity, decoder, priority, extend, split, join, offset,
            inverter, masking, majority, popcount, register, counter, modulo, updown, toggle, edge,
            shiftreg, accumulator, delay, latch_fsm, sequence)


def draw(r, families=FAMILIES):
    """Draw a design whose port names are all different; the family comes first, so all are as frequent."""
    family = r.choice(families)
    while True:
        design = family(r)
        names = [port.name for port in design.ports]
        inner = {line.split()[-1].rstrip(";") for line in design.body if line.startswith("reg ")}
        if len(set(names)) == len(names) and not inner & set(names):
            return design
