"""A compiled program's text: its instructions, what they compute and move, and what made them.

`compiled.as_text()` is XLA's *scheduled* program. It lists the instructions in the order in which a
chip runs them. Most have the back end's own count of cycles, and collectives have their sizes and
groups. This file reads that text and knows nothing about time.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# Bits of a number, by its type's name; any other type has them in its name (f32, s8, f8e4m3fn).
BITS = {
    "pred": 8,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "f4e2m1fn": 4,
    "token": 0,
    "opaque": 0,
    "bf16": 16,
    "f16": 16,
    "c64": 64,
    "c128": 128,
}
INT8 = ("s8", "u8", "s4", "u4")  # what the matrix units multiply at the int8 rate
ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
MEMORY = re.compile(r"S\((\d+)\)")  # of an array, in its layout
NAMES = re.compile(r"%([\w.\-]+)")
JAX_NAME = re.compile(r"jit\(|pjit\(")
PARENTHESES = re.compile(r"[()]")
CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
LOOKUPS = ("gather", "dynamic-slice", "slice")
PRODUCTS = ("convolution", "dot")  # XLA writes most products on a TPU as convolutions
NEAR = 16  # instructions to look at for a JAX name
DEEP = 200  # calls in a stack, at most
Pattern = str | re.Pattern


def match_of(pattern: Pattern, text: str) -> re.Match:
    """The match of a pattern in a text that must hold it.

    Raises:
      ValueError: it doesn't, so the text is in a notation that we don't know.
    """
    match = re.search(pattern, text)
    if match is None:
        shown = getattr(pattern, "pattern", pattern)
        raise ValueError(f"no {shown} in {text[:80]!r}")
    return match


def number_in(text: str, pattern: Pattern) -> int | None:
    """The number that a pattern's first group finds in a text; None if it finds nothing."""
    match = re.search(pattern, text)
    if match is None:
        return None
    return int(match[1])


class Array(NamedTuple):
    """One array in a shape's text."""

    dtype: str
    sizes: tuple[int, ...]
    memory: int  # 0 is HBM, others are on the chip

    @property
    def bytes(self) -> int:
        """What the array's numbers take, without the padding of its layout."""
        if self.dtype in BITS:
            bits = BITS[self.dtype]
        else:
            bits = int(match_of(r"\d+", self.dtype)[0])
        return math.prod(self.sizes) * bits // 8


def arrays(shape: str) -> list[Array]:
    """The arrays of a shape's text, in order."""
    listed = []
    for dtype, sizes, layout in ARRAY.findall(shape):
        memory = number_in(layout, MEMORY) or 0
        array = Array(dtype, _extents(sizes), memory)
        listed.append(array)
    return listed


def _extents(sizes: str) -> tuple[int, ...]:
    """(2, 3) of the text `2,3`; `<=2` is a size that may be smaller. () of ""."""
    extents = []
    for size in sizes.split(","):
        if size:
            extents.append(int(size.strip("<= ")))
    return tuple(extents)


def each_bytes(shape: str, hbm_only: bool = False) -> list[int]:
    """Bytes of each array in a shape's text; on request 0 for those that aren't in HBM."""
    listed = []
    for array in arrays(shape):
        if hbm_only and array.memory != 0:
            listed.append(0)
        else:
            listed.append(array.bytes)
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
    end_of_operands = _closing(shape, 1) + 1
    result = shape[end_of_operands:].lstrip(", ")
    if result.startswith("("):  # several arrays
        end = _closing(result, 0) + 1
        return result[:end]
    return match_of(ARRAY, result)[0]


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` is closed."""
    depth = 0
    for parenthesis in PARENTHESES.finditer(text, start):
        if parenthesis[0] == "(":
            depth += 1
        else:
            depth -= 1
        if depth == 0:
            return parenthesis.start()
    rest = text[start:]
    raise ValueError(f"no end of the parenthesis in {rest[:80]!r}")


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
        if match is None:
            return None
        return match[1]

    def reference(self, word: str) -> str | None:
        """The computation that an attribute names: "sum" for the word `calls` in `calls=%sum`."""
        return self.attribute(word + r"=%([\w.\-]+)")

    @property
    def cycles(self) -> int | None:
        """The back end's own count, or None."""
        return number_in(self.rest, CYCLES)

    @property
    def called(self) -> str | None:
        """The computation that a fusion or an asynchronous start calls, or None."""
        # (An all-reduce has a to_apply, too: how two numbers are added.)
        if self.opcode == "call-start":
            return self.reference("to_apply")
        return self.reference("calls")

    @property
    def op_name(self) -> str:
        """JAX's name of the operation, with its scopes; "" if it has none."""
        return self.attribute(r'op_name="([^"]*)"') or ""


def read_instruction(line: str) -> Instruction:
    """An instruction from its line of text."""
    plain = line.strip().removeprefix("ROOT ")
    name, _, text = plain.partition(" = ")
    if text.startswith("("):  # several arrays
        end_of_shape = _closing(text, 0) + 1
    else:
        end_of_shape = text.index(" ")
    opening = text.index("(", end_of_shape)
    closing = _closing(text, opening)

    opcode = text[end_of_shape:opening]
    return Instruction(
        name=name.removeprefix("%"),
        shape=text[:end_of_shape],
        opcode=opcode.strip(),
        inside=text[opening + 1:closing],
        rest=text[closing + 1:],
    )


class Place(NamedTuple):
    """One call in a stack."""

    file: str
    function: str
    line: int


class Work(NamedTuple):
    """Operations of the products in an instruction, 2 for multiply and add."""

    flops: int
    int8: int  # those of them that multiply int8 or int4 numbers


class Frame(NamedTuple):
    """One frame of XLA's table of stacks."""

    place: Place
    caller: int  # number of the caller's frame


Tables = dict[str, dict[int, str]]  # XLA's tables of source lines: {title: {number: its text}}
Neighbors = dict[str, list[Instruction]]  # {an instruction's name: those beside it}
UNKNOWN = -1  # a number that no row of XLA's tables has


class Program:
    """A compiled program: its computations, and where in the source each instruction comes from.

    Attributes:
      computations: {name: its instructions, in the order in which a chip runs them}.
      entry: the name of the computation that runs first.
      shapes: {computation: {instruction: its shape's text}}.
      chips: how many chips the program is for.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: the text isn't a scheduled program.
    """

    def __init__(self, text: str) -> None:
        header, _, _ = text.partition("\n")
        if "is_scheduled=true" not in header:
            raise ValueError("the text isn't a scheduled program: compiled.as_text() gives one")
        self.chips = number_in(header, r"num_partitions=(\d+)") or 1
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        tables = self._read_lines(text.split("\n"))
        if not self.entry:
            raise ValueError("the text has no ENTRY computation")

        self.shapes: dict[str, dict[str, str]] = {}
        for name, lines in self.computations.items():
            self.shapes[name] = {line.name: line.shape for line in lines}
        self._frames = _read_frames(tables)

        # Filled when they're first asked for, both by the name of a computation.
        self._work: dict[str, Work] = {}
        self._neighbors: dict[str, tuple[Neighbors, Neighbors]] = {}

    def _read_lines(self, text: list[str]) -> Tables:
        """Fill `computations` and `entry`; returns the tables of source lines behind them."""
        tables: Tables = {
            "FileNames": {},
            "FunctionNames": {},
            "FileLocations": {},
            "StackFrames": {},
        }
        lines: list[Instruction] | None = None
        table: dict[int, str] | None = None
        whole = ""  # the line of the last instruction
        for line in text:
            if line.startswith("  "):
                if lines is not None and " = " in line:
                    whole = line
                    lines.append(read_instruction(whole))
            elif lines and line.startswith(('"', "}}")):  # a kernel's attributes go on
                whole += line
                lines[-1] = read_instruction(whole)
            elif line.endswith("{") and line.startswith(("%", "ENTRY ")):
                name = match_of(NAMES, line)[1]
                lines = []
                self.computations[name] = lines
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
        number = number_in(instruction.rest, r"stack_frame_id=(\d+)") or 0
        places: list[Place] = []
        while number in self._frames and len(places) < DEEP:
            frame = self._frames[number]
            places.append(frame.place)
            number = frame.caller
        return places

    def named(self, line: Instruction, computation: str) -> Instruction:
        """The instruction itself, one inside it, or the nearest user or maker, with a JAX name."""
        for neighbors in self._users_and_makers(computation):
            nearest = self._nearest_named(line, neighbors)
            if nearest is not None:
                return nearest
        return line

    def _nearest_named(self, line: Instruction, neighbors: Neighbors) -> Instruction | None:
        """The instruction with a JAX name to which the way over neighbors is shortest, or None."""
        queue = [line]
        for candidate in queue:  # it grows meanwhile; the nearest come first
            named = self._named_inside(candidate)
            if named is not None:
                return named
            if len(queue) < NEAR and candidate.opcode != "tuple":
                queue += neighbors.get(candidate.name, [])
        return None

    def _named_inside(self, line: Instruction) -> Instruction | None:
        """An instruction that has a JAX name, else the last with one inside it, or None."""
        if JAX_NAME.match(line.op_name):
            return line
        last = None
        for inner in self.inner(line.called):
            if JAX_NAME.match(inner.op_name):
                last = inner
        return last

    def _users_and_makers(self, computation: str) -> tuple[Neighbors, Neighbors]:
        """Who uses an instruction's result, and who makes its operands."""
        if computation in self._neighbors:
            return self._neighbors[computation]
        lines = self.computations[computation]
        by_name = {line.name: line for line in lines}
        users: Neighbors = defaultdict(list)
        makers: Neighbors = defaultdict(list)
        for line in lines:
            for name in line.operands:
                users[name].append(line)
                if name in by_name:
                    makers[line.name].append(by_name[name])
        self._neighbors[computation] = users, makers
        return users, makers

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
            return _product_work(line, self.shapes[computation])
        name = line.called
        if not name:
            return Work(flops=0, int8=0)
        if name not in self._work:
            flops = int8 = 0
            for inner in self.computations.get(name, ()):
                part = self.work(inner, name)
                flops += part.flops
                int8 += part.int8
            self._work[name] = Work(flops, int8)
        return self._work[name]

    def moved_bytes(self, line: Instruction, computation: str, hbm_only: bool = True) -> float:
        """Bytes that an instruction reads from HBM and writes to it, or from and to any memory.

        Where an operand is only looked up or sliced, what's read of it counts. Where an array is
        updated in place, what's written into it counts.
        """
        shapes = self.shapes[computation]
        read: list[float] = []  # operand by operand
        for name in line.operands:
            read.append(bytes_of(shapes.get(name, ""), hbm_only))
        called = line.called or ""
        if called.startswith("async_collective_fusion"):
            return self._own_bytes(line, read)

        result: float = bytes_of(line.shape, hbm_only)
        if line.opcode in LOOKUPS:
            read[0] = min(read[0], bytes_of(line.shape))
        elif line.opcode == "dynamic-update-slice":
            result = min(result, read[1])
            read[0] = 0
        elif called and any(read):
            self._lower_to_what_is_read(called, read)
            update = self._updated_inside(called)
            if update:
                place, size = update
                read[place] = 0
                result = min(result, size)
        return sum(read) + result

    def _lower_to_what_is_read(self, name: str, sizes: list[float]) -> None:
        """Lower the operands' bytes, in place, to what a fused computation reads of each."""
        for place, size in enumerate(sizes):
            if size:
                sizes[place] = min(size, self._read_inside(name, place))

    def _updated_inside(self, name: str) -> tuple[int, int] | None:
        """(number of the parameter that a fusion updates in place, bytes it writes), or None."""
        lines = self.computations.get(name)
        if not lines:
            return None
        root = lines[-1]
        if root.opcode != "dynamic-update-slice":
            return None
        target, update = root.operands[:2]
        for line in lines:
            if line.opcode == "parameter" and line.name == target:
                size = bytes_of(self.shapes[name][update])
                return int(line.inside), size
        return None

    def _own_bytes(self, line: Instruction, read: list[float]) -> float:
        """Bytes of a product that is fused with a transfer: the transfer's buffers pass through it.

        XLA hands them in and out as the same memory (`output_to_operand_aliasing`).
        """
        aliases = line.attribute(r"output_to_operand_aliasing=\{(.*?\))\}") or ""
        handed_in = set()
        handed_out = set()
        for out, place in re.findall(r"\{(\d*)\}: \((\d+),", aliases):
            handed_out.add(int(out or 0))
            handed_in.add(int(place))

        total: float = 0
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
        number = str(place)
        parameter = None
        for line in lines:
            if line.opcode == "parameter" and line.inside == number:
                parameter = line.name
                break

        total = 0
        for line in lines:
            if parameter not in line.operands:
                continue
            is_lookup = line.opcode in LOOKUPS
            if not is_lookup or line.operands[0] != parameter:
                return math.inf
            total += bytes_of(line.shape)
        return total

    def trips(self, line: Instruction) -> int | None:
        """How often the body of a while loop runs, or None if the text doesn't say."""
        known = number_in(line.rest, r'"known_trip_count":\{"n":"?(\d+)')
        if known is not None:
            return known
        counts_up = False
        limits = []
        condition = line.reference("condition")
        for inner in self.inner(condition):
            is_one_integer = inner.shape.startswith(("s32[]", "u32[]"))
            if inner.opcode == "compare" and "direction=LT" in inner.rest:
                counts_up = True
            if inner.opcode == "constant" and is_one_integer:
                limits.append(inner.inside)
        if counts_up and len(limits) == 1:
            return int(limits[0])
        return None


# ── XLA's tables of source lines ──


def _numbers(text: str) -> dict[str, int]:
    """`a=1 b=2` as a dict."""
    pairs = re.findall(r"(\w+)=(\d+)", text)
    return {name: int(value) for name, value in pairs}


def _read_places(tables: Tables) -> dict[int, Place]:
    """{number of a file location: its place}."""
    places = {}
    for key, text in tables["FileLocations"].items():
        entry = _numbers(text)
        file_number = entry.get("file_name_id", UNKNOWN)
        function_number = entry.get("function_name_id", UNKNOWN)
        file = tables["FileNames"].get(file_number, "")
        function = tables["FunctionNames"].get(function_number, "")
        places[key] = Place(
            file=file.strip('"'),
            function=function.strip('"'),
            line=entry.get("line", 0),
        )
    return places


def _read_frames(tables: Tables) -> dict[int, Frame]:
    """{number of a stack frame: the frame}."""
    places = _read_places(tables)
    nowhere = Place("", "", 0)
    entries = {}
    for key, text in tables["StackFrames"].items():
        entries[key] = _numbers(text)

    # Frame 1 has no parent. XLA prints "parent 1" for it: one more than the parent's number.
    first = entries.get(1, {})
    shift = 0
    if first.get("parent_frame_id", 0) == 1:
        shift = 1

    frames = {}
    for key, entry in entries.items():
        location = entry.get("file_location_id", UNKNOWN)
        place = places.get(location, nowhere)
        caller = entry.get("parent_frame_id", 0) - shift
        frames[key] = Frame(place, caller)
    return frames


# ── products ──


class Tap(NamedTuple):
    """One dimension of a convolution's window."""

    size: int
    stride: int
    padding: int  # before the first number
    left_dilation: int  # places from one number of the left operand to the next
    right_dilation: int  # places from one number of the window to the next


def _window(line: Instruction, count: int) -> list[Tap]:
    """The window of a convolution, dimension by dimension."""
    text = line.attribute(r"window=\{([^}]*)\}") or ""
    sizes = _by_dimension(text, "size", 1, count)
    strides = _by_dimension(text, "stride", 1, count)
    paddings = _by_dimension(text, "pad", 0, count)
    left_dilations = _by_dimension(text, "lhs_dilate", 1, count)
    right_dilations = _by_dimension(text, "rhs_dilate", 1, count)

    window = []
    for dimension in range(count):
        tap = Tap(
            size=sizes[dimension],
            stride=strides[dimension],
            padding=paddings[dimension],
            left_dilation=left_dilations[dimension],
            right_dilation=right_dilations[dimension],
        )
        window.append(tap)
    return window


def _by_dimension(window: str, name: str, default: int, count: int) -> list[int]:
    """What a window's text says of each dimension: [3, 5] for the size in `size=3x5 stride=1x2`.

    Padding stands there as before_after, and we take what's before.
    """
    given = re.search(rf"\b{name}=(\S+)", window)
    if given is None:
        return [default] * count
    numbers = []
    for value in given[1].split("x"):
        before, _, _ = value.partition("_")
        numbers.append(int(before))
    return numbers


def _product_work(line: Instruction, shapes: dict[str, str]) -> Work:
    """Operations of a dot or a convolution. XLA writes most products on a TPU as convolutions.

    Args:
      line: the product.
      shapes: {instruction: its shape's text}, in the same computation.
    """
    left = shapes.get(line.operands[0], "")
    if line.opcode == "dot":
        flops = _dot_flops(line, left)
    else:
        right = shapes.get(line.operands[1], "")
        flops = _convolution_flops(line, left, right)
    factors = arrays(left)
    if factors and factors[0].dtype in INT8:
        return Work(flops, int8=flops)
    return Work(flops, int8=0)


def _dot_flops(line: Instruction, left: str) -> int:
    """Operations of a dot whose left operand has this shape."""
    out = arrays(line.shape)[0].sizes
    sizes = arrays(left)[0].sizes
    inner = line.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    flops = 2 * math.prod(out)
    for dimension in inner.split(","):
        if dimension:
            flops *= sizes[int(dimension)]
    return flops


def _convolution_flops(line: Instruction, left: str, right: str) -> int:
    """Operations of a convolution of two operands of these shapes.

    A position of the window counts only where it meets a real number, not padding or a hole between
    dilated ones: XLA's own rule (HloCostAnalysis::HandleConvolution).
    """
    out_sizes = arrays(line.shape)[0].sizes
    left_sizes = arrays(left)[0].sizes
    right_sizes = arrays(right)[0].sizes
    labels = match_of(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest)
    left_label, right_label, out_label = labels.groups()

    count = left_sizes[left_label.index("b")]
    count *= right_sizes[right_label.index("i")]
    count *= right_sizes[right_label.index("o")]
    count //= number_in(line.rest, r"batch_group_count=(\d+)") or 1

    spatial = sum(label.isdigit() for label in right_label)
    window = _window(line, spatial)
    for dimension, tap in enumerate(window):
        label = str(dimension)
        size = left_sizes[left_label.index(label)]
        results = out_sizes[out_label.index(label)]
        count *= _meetings(tap, size, results)
    return 2 * count


def _meetings(tap: Tap, size: int, results: int) -> int:
    """How often a window meets a real number on its way along one dimension.

    Args:
      tap: the window in this dimension.
      size: numbers that the left operand has in it.
      results: numbers that the convolution gives in it.
    """
    end = (size - 1) * tap.left_dilation + 1
    starts = tap.stride * np.arange(results) - tap.padding
    met = 0
    for place in range(tap.size):
        reached = starts + place * tap.right_dilation
        is_inside = (reached >= 0) & (reached < end)
        is_number = reached % tap.left_dilation == 0
        is_real = is_inside & is_number
        met += int(is_real.sum())
    return met
