"""A compiled program's text: its instructions, what they compute and move, and what made them.

`compiled.as_text()` is XLA's *scheduled* program: instructions in the order in which a chip runs
them, most with the back end's own count of cycles, collectives with their sizes and groups. This
file reads that text and knows nothing of time.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "token": 0, "opaque": 0,
        "bf16": 16, "f16": 16, "c64": 64, "c128": 128}
INT8 = ("s8", "u8", "s4", "u4")  # what the matrix units multiply at the int8 rate
ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
NAMES = re.compile(r"%([\w.\-]+)")
JAX_NAME = re.compile(r"jit\(|pjit\(")
PARENTHESES = re.compile(r"[()]")
CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
LOOKUPS = ("gather", "dynamic-slice", "slice")
PRODUCTS = ("convolution", "dot")  # XLA writes most products on a TPU as convolutions
NEAR = 16  # instructions to look at for a JAX name
DEEP = 200  # calls in a stack, at most


def match_of(pattern: str | re.Pattern, text: str) -> re.Match:
    """Where a pattern stands in a text that must hold it.

    Raises:
      ValueError: it doesn't, so the text is in a notation that isn't known here.
    """
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {getattr(pattern, 'pattern', pattern)} in {text[:80]!r}")
    return match


class Array(NamedTuple):
    """One array in a shape's text."""

    dtype: str
    sizes: tuple[int, ...]
    memory: int  # 0 is HBM, others are on the chip

    @property
    def bytes(self) -> int:
        """Without padding."""
        if self.dtype in BITS:
            bits = BITS[self.dtype]
        else:
            bits = int(match_of(r"\d+", self.dtype)[0])
        return math.prod(self.sizes) * bits // 8


def arrays(shape: str) -> list[Array]:
    """The arrays of a shape's text, in order."""
    listed = []
    for dtype, sizes, layout in ARRAY.findall(shape):
        memory = re.search(r"S\((\d+)\)", layout)
        extents = [int(size.strip("<= ")) for size in sizes.split(",") if size]
        listed.append(Array(dtype, tuple(extents), int(memory[1]) if memory else 0))
    return listed


def each_bytes(shape: str, hbm_only: bool = False) -> list[int]:
    """Bytes array by array; on request 0 for those that aren't in HBM."""
    listed = []
    for array in arrays(shape):
        elsewhere = hbm_only and array.memory != 0
        listed.append(0 if elsewhere else array.bytes)
    return listed


def bytes_of(shape: str, hbm_only: bool = False) -> int:
    """Bytes of all arrays in a shape's text, without padding; on request only those in HBM."""
    return sum(each_bytes(shape, hbm_only))


def written(shape: str) -> str:
    """The part of an asynchronous start's shape that it writes.

    A copy has (what it writes, what it reads, a context), all others ((operands), result, context).
    """
    if not shape.startswith("(("):
        return match_of(ARRAY, shape)[0]
    rest = shape[_closing(shape, 1) + 1:].lstrip(", ")
    if rest.startswith("("):
        return rest[:_closing(rest, 0) + 1]
    return match_of(ARRAY, rest)[0]


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` is closed."""
    depth = 0
    for parenthesis in PARENTHESES.finditer(text, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.start()
    raise ValueError(f"no end of the parenthesis in {text[start:start + 80]!r}")


@dataclass
class Instruction:
    """One line of the program: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    inside: str  # the text between the parentheses
    rest: str  # the attributes
    operands: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.operands = NAMES.findall(self.inside)

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression in the attributes, or None."""
        match = re.search(pattern, self.rest)
        return match[1] if match else None

    @property
    def cycles(self) -> int | None:
        """The back end's own count, or None."""
        match = CYCLES.search(self.rest)
        return int(match[1]) if match else None

    @property
    def called(self) -> str | None:
        """The computation that a fusion or an asynchronous start calls, or None."""
        # (An all-reduce has a to_apply, too: how two numbers are added.)
        word = "to_apply" if self.opcode == "call-start" else "calls"
        return self.attribute(word + r"=%([\w.\-]+)")

    @property
    def op_name(self) -> str:
        """JAX's name of the operation, with its scopes; "" if it has none."""
        return self.attribute(r'op_name="([^"]*)"') or ""


def read_instruction(line: str) -> Instruction:
    """An instruction from its line of text."""
    name, _, text = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opening = text.index("(", end)
    closing = _closing(text, opening)
    return Instruction(name.removeprefix("%"), text[:end], text[end:opening].strip(),
                       text[opening + 1:closing], text[closing + 1:])


class Place(NamedTuple):
    """One call in a stack."""

    file: str
    function: str
    line: int


class Work(NamedTuple):
    """Operations of the products in an instruction, 2 for multiply and add."""

    flops: int
    int8: int  # those of them that multiply int8 or int4 numbers


Tables = dict[str, dict[int, str]]


class Program:
    """A compiled program: its computations, and where in the source each instruction comes from.

    Attributes:
      computations: {name: its instructions, in the order in which a chip runs them}.
      entry: the name of the one that runs first.
      shapes: {computation: {instruction: its shape's text}}.
      chips: that the program is for.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: the text holds no scheduled program.
    """

    def __init__(self, text: str) -> None:
        header = text.split("\n", 1)[0]
        if "is_scheduled=true" not in header:
            raise ValueError("the text is no scheduled program: compiled.as_text() gives one")
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        tables = self._read_lines(text.split("\n"))
        if not self.entry:
            raise ValueError("the text has no ENTRY computation")
        chips = re.search(r"num_partitions=(\d+)", header)
        self.chips = int(chips[1]) if chips else 1
        self.shapes: dict[str, dict[str, str]] = {}
        for name, lines in self.computations.items():
            self.shapes[name] = {line.name: line.shape for line in lines}
        self._frames = _read_frames(tables)
        self._work: dict[str, Work] = {}
        self._neighbours: dict[str, tuple[dict, dict]] = {}

    def _read_lines(self, text: list[str]) -> Tables:
        """Fill `computations` and `entry`; returns the tables of source lines behind them."""
        tables: Tables = {"FileNames": {}, "FunctionNames": {}, "FileLocations": {},
                          "StackFrames": {}}
        lines: list[Instruction] | None = None
        table: dict[int, str] | None = None
        for line in text:
            if line.startswith("  "):
                if lines is not None and " = " in line:
                    lines.append(read_instruction(line))
            elif line.endswith("{") and line.startswith(("%", "ENTRY ")):
                name = match_of(NAMES, line)[1]
                lines = self.computations[name] = []
                if line.startswith("ENTRY "):
                    self.entry = name
            elif line.startswith("}"):
                lines = None
            elif line in tables:
                table = tables[line]
            elif table is not None and line[:1].isdigit():
                number, _, value = line.partition(" ")
                table[int(number)] = value
        return tables

    # ── where it comes from ──

    def stack(self, instruction: Instruction) -> list[Place]:
        """The calls that made an instruction, innermost first."""
        number = int(instruction.attribute(r"stack_frame_id=(\d+)") or 0)
        places: list[Place] = []
        while number in self._frames and len(places) < DEEP:
            place, number = self._frames[number]
            places.append(place)
        return places

    def named(self, line: Instruction, computation: str) -> Instruction:
        """The instruction itself, one inside it, or the nearest user or maker, with a JAX name."""
        users, makers = self._users_and_makers(computation)
        for neighbours in (users, makers):
            queue = [line]
            for candidate in queue:  # the nearest first; a few steps are enough
                inner = list(self.inner(candidate.called)) if candidate.called else []
                known = [named for named in (*inner, candidate) if JAX_NAME.match(named.op_name)]
                if known:
                    return known[-1]
                if len(queue) < NEAR and candidate.opcode != "tuple":
                    queue += neighbours.get(candidate.name, [])
        return line

    def _users_and_makers(self, computation: str) -> tuple[dict, dict]:
        """Two tables {instruction: instructions}: who uses its result, who makes its operands."""
        if computation not in self._neighbours:
            lines = self.computations[computation]
            by_name = {line.name: line for line in lines}
            users: dict[str, list[Instruction]] = defaultdict(list)
            makers: dict[str, list[Instruction]] = {}
            for line in lines:
                makers[line.name] = [by_name[name] for name in line.operands if name in by_name]
                for name in line.operands:
                    users[name].append(line)
            self._neighbours[computation] = users, makers
        return self._neighbours[computation]

    def inner(self, name: str | None) -> Iterator[Instruction]:
        """All instructions of a computation and of what it calls."""
        for line in self.computations.get(name or "", ()):
            yield line
            if line.called:
                yield from self.inner(line.called)

    # ── what it computes and moves ──

    def work(self, line: Instruction, computation: str) -> Work:
        """Operations of the products in an instruction and in what it calls."""
        if line.opcode in PRODUCTS:
            shapes = self.shapes[computation]
            left, right = (shapes.get(name, "") for name in line.operands[:2])
            flops = _product_flops(line, left, right)
            operand = arrays(left)
            is_int8 = bool(operand) and operand[0].dtype in INT8
            return Work(flops, flops if is_int8 else 0)
        if not line.called:
            return Work(0, 0)
        if line.called not in self._work:
            flops = int8 = 0
            for inner in self.computations.get(line.called, ()):
                part = self.work(inner, line.called)
                flops += part.flops
                int8 += part.int8
            self._work[line.called] = Work(flops, int8)
        return self._work[line.called]

    def moved_bytes(self, line: Instruction, computation: str, hbm_only: bool = True) -> float:
        """Bytes that an instruction reads from HBM and writes to it, or from and to any memory.

        Of an operand that is only looked up or sliced counts what is read, of an array that is
        updated in place what is written.
        """
        shapes = self.shapes[computation]
        read: list[float] = [bytes_of(shapes.get(name, ""), hbm_only) for name in line.operands]
        result: float = bytes_of(line.shape, hbm_only)
        if (line.called or "").startswith("async_collective_fusion"):
            return self._own_bytes(line, read)
        if line.opcode in LOOKUPS:
            read[0] = min(read[0], bytes_of(line.shape))
        elif line.opcode == "dynamic-update-slice":
            result = min(result, read[1])
            read[0] = 0
        elif line.called and any(read):
            for place, size in enumerate(read):
                if size:
                    read[place] = min(size, self._read_inside(line.called, place))
            update = self._updated_inside(line.called)
            if update:
                place, size = update
                read[place] = 0
                result = min(result, size)
        return sum(read) + result

    def _updated_inside(self, name: str) -> tuple[int, int] | None:
        """(number of the parameter that a fusion updates in place, bytes it writes), or None."""
        lines = self.computations.get(name)
        if not lines or lines[-1].opcode != "dynamic-update-slice":
            return None
        target, update = lines[-1].operands[:2]
        for line in lines:
            if line.opcode == "parameter" and line.name == target:
                return int(line.inside), bytes_of(self.shapes[name][update])
        return None

    def _own_bytes(self, line: Instruction, read: list[float]) -> float:
        """Bytes of a product that is fused with a transfer: the transfer's buffers pass through it.

        XLA hands them in and out as the same memory (`output_to_operand_aliasing`).
        """
        aliases = line.attribute(r"output_to_operand_aliasing=\{(.*?\))\}") or ""
        total: float = 0
        handed_in, handed_out = set(), set()
        for out, place in re.findall(r"\{(\d*)\}: \((\d+),", aliases):
            handed_out.add(int(out or 0))
            handed_in.add(int(place))
        for place, size in enumerate(read):
            if place not in handed_in:
                total += size
        for place, size in enumerate(each_bytes(line.shape, True)):
            if place not in handed_out:
                total += size
        return total

    def _read_inside(self, name: str, place: int) -> float:
        """Bytes that a fused computation reads of its parameter number `place`, at most."""
        if name not in self.computations:
            return math.inf
        lines = self.computations[name]
        parameter = None
        for line in lines:
            if line.opcode == "parameter" and line.inside == str(place):
                parameter = line.name
                break
        total = 0
        for line in lines:
            if parameter not in line.operands:
                continue
            if line.opcode not in LOOKUPS or line.operands[0] != parameter:
                return math.inf
            total += bytes_of(line.shape)
        return total

    def trips(self, line: Instruction) -> int | None:
        """How often the body of a while loop runs, or None if the text doesn't say."""
        known = line.attribute(r'"known_trip_count":\{"n":"?(\d+)')
        if known:
            return int(known)
        counts_up = False
        limits = []
        for inner in self.inner(line.attribute(r"condition=%([\w.\-]+)")):
            if inner.opcode == "compare" and "direction=LT" in inner.rest:
                counts_up = True
            if inner.opcode == "constant" and inner.shape.startswith(("s32[]", "u32[]")):
                limits.append(inner.inside)
        return int(limits[0]) if counts_up and len(limits) == 1 else None


def _numbers(text: str) -> dict[str, int]:
    """`a=1 b=2` as a dict."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}


def _read_frames(tables: Tables) -> dict[int, tuple[Place, int]]:
    """{number of a stack frame: (its place, the number of its caller's frame)}."""
    places = {}
    for key, text in tables["FileLocations"].items():
        entry = _numbers(text)
        file = tables["FileNames"].get(entry.get("file_name_id", -1), "")
        function = tables["FunctionNames"].get(entry.get("function_name_id", -1), "")
        places[key] = Place(file.strip('"'), function.strip('"'), entry.get("line", 0))
    entries = {key: _numbers(text) for key, text in tables["StackFrames"].items()}
    # Frame 1 has no parent. XLA prints "parent 1" for it: one more than the parent's number.
    shift = 1 if entries.get(1, {}).get("parent_frame_id", 0) == 1 else 0
    frames = {}
    for key, entry in entries.items():
        place = places.get(entry.get("file_location_id", -1), Place("", "", 0))
        frames[key] = place, entry.get("parent_frame_id", 0) - shift
    return frames


# ── products ──


class Tap(NamedTuple):
    """One dimension of a convolution's window."""

    size: int
    stride: int
    before: int  # padding
    wide: int  # dilation of the left operand
    far: int  # dilation of the right operand


def _window(line: Instruction, count: int) -> list[Tap]:
    """The window of a convolution, dimension by dimension."""
    text = line.attribute(r"window=\{([^}]*)\}") or ""
    given = dict(part.split("=") for part in text.split())

    def values(name: str, default: str) -> list[str]:
        return given[name].split("x") if name in given else [default] * count

    sizes, strides, pads = values("size", "1"), values("stride", "1"), values("pad", "0_0")
    wide, far = values("lhs_dilate", "1"), values("rhs_dilate", "1")
    window = []
    for place in range(count):
        before = pads[place].split("_")[0]
        window.append(Tap(int(sizes[place]), int(strides[place]), int(before), int(wide[place]),
                          int(far[place])))
    return window


def _product_flops(line: Instruction, lhs: str, rhs: str) -> int:
    """Operations of a dot, or of a convolution: XLA writes products on a TPU as convolutions.

    A position of the window counts only where it meets a real number, not padding or a hole between
    dilated ones: XLA's own rule (HloCostAnalysis::HandleConvolution).
    """
    out = arrays(line.shape)[0].sizes
    left, right = arrays(lhs)[0].sizes, arrays(rhs)[0].sizes
    if line.opcode == "dot":
        inner = line.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        contracted = [left[int(dimension)] for dimension in inner.split(",") if dimension]
        return 2 * math.prod(out) * math.prod(contracted)
    labels = match_of(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest)
    lhs_label, rhs_label, out_label = labels.groups()
    spatial = sum(label.isdigit() for label in rhs_label)
    count = left[lhs_label.index("b")] * right[rhs_label.index("i")] * right[rhs_label.index("o")]
    count //= int(line.attribute(r"batch_group_count=(\d+)") or 1)
    for dimension, tap in enumerate(_window(line, spatial)):
        label = str(dimension)
        end = (left[lhs_label.index(label)] - 1) * tap.wide + 1
        starts = np.arange(out[out_label.index(label)]) * tap.stride - tap.before
        met = 0
        for place in range(tap.size):
            at = starts + place * tap.far
            met += int(((at >= 0) & (at < end) & (at % tap.wide == 0)).sum())
        count *= met
    return 2 * count
