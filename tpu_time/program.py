"""How long a compiled TPU program takes, from its text alone: cycles, links, a timeline, a profile.

`compiled.as_text()` is XLA's *scheduled* program: instructions in the order in which a chip runs
them, most with the back end's own count of cycles, collectives with their sizes and groups. This
file reads that text. Clock, peak and bandwidth are the vendor's, the shape of the links is the
scaling book's (Austin et al., "How to Scale Your Model", https://jax-ml.github.io/scaling-book/tpus).
Two shares of them are measured, `COPY` and `LINK`. Standard library and NumPy only: a text can be
read on any machine, without JAX and without libtpu.
"""

import functools
import gzip
import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tables.errors import UserError
from tables.hardware import chip, slice_of

# ── what a chip and a slice can do ──────────────────────────────────────────────────────────────


# Operations a cycle, two for multiply and add: cores x matrix units x cells x 2. v5p has 2 cores
# with 4 units of 128 x 128 (459e12 of them a second make 1.75 GHz), v5e one such core. v6e has two
# units of 256 x 256, and the compiler counts two products a cell and cycle: it gives a product of
# two 8192 x 8192 matrices 369,000 operations a cycle, more than one product a cell would allow.
PER_CYCLE = {"v5p": 2 * 4 * 128 * 128 * 2, "v5e": 4 * 128 * 128 * 2, "v6e": 2 * 256 * 256 * 4}
HOP = 1e-6  # seconds that a hop over a link takes at least (scaling book, "A note on ICI latency")
VERSION = 3     # of these rules; a stored prediction names the one that made it
TRUSTED = 0.02  # no time is given where more than this share of FLOPs or bytes has no known cost
# What a plain copy reaches of the HBM's speed: 33.5 MB copied on a v6e in 0.04936 ms by the trace
# (AI-Hypercomputer/tpu-recipes, microbenchmarks/README.md). An instruction that the back end gives
# no cost model is charged two to three times its bytes in cycles; it gets this speed at least.
COPY = 0.83
# What a collective reaches of its links: psum over two and four chips of a v5e-4, in loops with and
# without it, 64 times 67 MB and 2,048 times 2 MB: 0.89, 0.91, 0.89 (deep-diver/tunix-accel,
# 01-CCE/data/mesh_pathology_tpu_v5e_synthetic/results.csv, rows projection_collective_loop and
# chunked_matmul_loop; medians of ten).
LINK = 0.90


@dataclass(frozen=True)
class Box:
    """Chips of one kind in a box.

    Attributes:
      chip: v5p, v5e or v6e.
      shape: chips along x, y and z, as in a topology's name: (2, 2, 1).
      coordinates: (x, y, z) of every partition of the program, in the mesh's order. Empty: x counts
        fastest, then y, then z, which is how JAX numbers the devices of a slice.
    """

    chip: str
    shape: tuple
    coordinates: tuple = ()

    @property
    def spec(self):
        """The `Chip` with peaks, HBM and links, of `tables.hardware`."""
        return chip(self.chip)

    @property
    def clock(self):
        """Cycles a second: the vendor's, or peak over operations a cycle."""
        return self.spec.clock or self.spec.flops / PER_CYCLE[self.chip]

    @functools.cached_property
    def places(self):
        """[chips, dimensions] coordinates by partition."""
        if self.coordinates:
            return np.array(self.coordinates)[:, :len(self.shape)]
        grid = np.indices(self.shape[::-1]).reshape(len(self.shape), -1)
        return grid[::-1].T

    def ring(self, dimension):
        """Whether the chips along a dimension are closed to a ring (scaling book, part 2)."""
        if self.chip == "v5p":                  # by optical switches between full cubes
            return all(size % 4 == 0 for size in self.shape)
        return self.shape[dimension] == 16      # v5e and v6e: where it is the whole pod's

    def reach(self, group):
        """(names of the dimensions, bytes a second into the worst placed chip, hops) of a group.

        A chip has one link to each neighbour: at the corner of a box one along each of the box's
        dimensions, in a ring two. None if the chips do not fill a box of neighbours.
        """
        values = [np.unique(column) for column in self.places[list(group)].T]
        extents = [len(value) for value in values]
        if math.prod(extents) != len(group) or any(np.diff(value).max(initial=1) > 1
                                                   for value in values):
            return None
        used = [d for d, extent in enumerate(extents) if extent > 1]
        closed = {d for d in used if extents[d] == self.shape[d] and self.ring(d)}
        count = sum(2 if d in closed and extents[d] > 2 else 1 for d in used)
        hops = sum(extents[d] // 2 if d in closed else extents[d] - 1 for d in used)
        return tuple("xyz"[d] for d in used), count * self.link, hops

    @property
    def link(self):
        """Bytes a second over one link in one direction, as far as collectives reach it."""
        return LINK * self.spec.link_bandwidth


def read_groups(text, chips):
    """Groups of partitions, as lists, from either of XLA's notations.

    `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[4,2]<=[2,4]T(1,0)`, `mesh['a'=2,'b'=2] {'b'}`, where
    `, device_ids=([2,2]T(1,0))` may stand before the last brace; `{}` means all.
    """
    if text.startswith("mesh["):
        head, _, tail = text.partition("]")
        axes = re.findall(r"'([^']+)'=(\d+)", head)
        wanted = re.findall(r"'([^']+)'", tail[tail.index("{"):])
        grid = np.arange(chips)
        if ids := re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", tail):
            grid = grid.reshape([int(size) for size in ids[1].split(",")])
            grid = grid.transpose([int(place) for place in ids[2].split(",")]) if ids[2] else grid
        grid = grid.reshape([int(size) for _, size in axes])
        last = [place for place, (name, _) in enumerate(axes) if name in wanted]
        first = [place for place in range(len(axes)) if place not in last]
        size = math.prod(int(axes[place][1]) for place in last)
        return grid.transpose(first + last).reshape(-1, size).tolist()
    if text.startswith("["):
        shape, source, order = re.match(
            r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
        grid = np.arange(chips).reshape([int(size) for size in source.split(",")])
        if order:
            grid = grid.transpose([int(place) for place in order.split(",")])
        return grid.reshape([int(size) for size in shape.split(",")]).tolist()
    groups = re.findall(r"\{([\d,]+)\}", text)
    return [[int(chip) for chip in group.split(",")] for group in groups] or [list(range(chips))]


def send_time(size, pairs, where):
    """Seconds and links ("x+", "y-") of a collective-permute: each pair's bytes on the shortest way.

    Every pair goes along x, then y, then z; the fullest link decides.
    """
    load, names, far = defaultdict(int), set(), 0
    for source, target in pairs:
        here, goal, hops = list(where.places[source]), where.places[target], 0
        for dimension, extent in enumerate(where.shape):
            way = int(goal[dimension]) - int(here[dimension])
            if where.ring(dimension) and abs(way) > extent / 2:
                way -= math.copysign(extent, way)
            for _ in range(abs(int(way))):
                step = int(math.copysign(1, way))
                load[(*here, dimension, step)] += 1
                here[dimension] = (here[dimension] + step) % extent
                names.add("xyz"[dimension] + "+-"[step < 0])
                hops += 1
        far = max(far, hops)
    worst = max(load.values(), default=0)
    return max(size * worst / where.link, far * HOP), tuple(sorted(names))


def collective_time(kind, size, groups, where):
    """Seconds that a collective needs the links, and the dimensions whose links it uses.

    Gathering V bytes over n chips brings (n - 1) / n V into each of them; a reduce-scatter sends as
    much, an all-reduce is both. An all-to-all is limited by the cut through the longest dimension.
    Scaling book, https://jax-ml.github.io/scaling-book/sharding. Groups that fill no box of
    neighbours pass their pieces around, all groups at once over the links that lie in between.

    Args:
      kind: all-gather, reduce-scatter, all-reduce, all-to-all.
      size: bytes: the gathered result, or what one chip puts in.
      groups: lists of partitions.
      where: a `Box`.
    """
    n, double = len(groups[0]), 2 if kind == "all-reduce" else 1
    if n < 2:
        return 0.0, ()
    boxes = [where.reach(group) for group in groups]
    if None in boxes:
        pairs = [(group[i - 1], group[i]) for group in groups for i in range(n)]
        seconds, names = send_time(size / n, pairs, where)
        return double * (n - 1) * seconds, names
    names, speed, hops = min(boxes, key=lambda box: box[1])
    if kind == "all-to-all":
        longest = max(len(np.unique(column)) for column in where.places[list(groups[0])].T)
        seconds = size * n / 4 / (n / longest * speed / len(names))
    else:
        seconds = (n - 1) / n * size / speed
    return double * max(seconds, hops * HOP), names


# ── the program's text ──────────────────────────────────────────────────────────────────────────

BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "token": 0, "opaque": 0,
        "bf16": 16, "f16": 16, "c64": 64, "c128": 128}
ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
NAMES = re.compile(r"%([\w.\-]+)")
JAX_NAME = re.compile(r"jit\(|pjit\(")
PARENTHESES = re.compile(r"[()]")
CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "domain",
        "partition-id", "replica-id", "opt-barrier", "add-dependency", "get-dimension-size"}
MOVES = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "convert", "copy",
         "transpose", "reshape", "broadcast", "slice", "concatenate", "pad", "dynamic-slice",
         "dynamic-update-slice", "reverse", "fusion", "iota", "reduce-precision"}
GROUPS = (r"replica_groups=(mesh\[[^\]]*\](?:, device_ids=\([^ ]*\))? \{[^}]*\}|"
          r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|"
          r"\{.*?\}\}|\{\})")
LOOKUPS = ("gather", "dynamic-slice", "slice")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
               "collective-permute", "collective-broadcast")


def arrays(shape):
    """[(dtype, dimensions, memory)] of a shape's text; memory 0 is HBM, others are on the chip."""
    found = []
    for dtype, sizes, layout in ARRAY.findall(shape):
        memory = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(size.strip("<= ")) for size in sizes.split(",") if size)
        found.append((dtype, sizes, int(memory[1]) if memory else 0))
    return found


def bytes_of(shape, hbm_only=False):
    """Bytes of all arrays in a shape's text, without padding; on request only those in HBM."""
    return sum(each_bytes(shape, hbm_only))


def each_bytes(shape, hbm_only=False):
    """The same array by array, in order."""
    found = []
    for dtype, sizes, memory in arrays(shape):
        bits = BITS.get(dtype) if dtype in BITS else int(re.search(r"\d+", dtype)[0])
        found.append(0 if hbm_only and memory else math.prod(sizes) * bits // 8)
    return found


def written(shape):
    """The part of an asynchronous start's shape that it writes.

    A copy has (what it writes, what it reads, a context), all others ((operands), result, context).
    """
    if not shape.startswith("(("):
        return ARRAY.search(shape)[0]
    rest = shape[_closing(shape, 1) + 1:].lstrip(", ")
    return rest[:_closing(rest, 0) + 1] if rest.startswith("(") else ARRAY.search(rest)[0]


@dataclass
class Instruction:
    """One line of the program: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    inside: str                    # the text between the parentheses
    rest: str                      # the attributes
    operands: list = field(init=False)

    def __post_init__(self):
        self.operands = NAMES.findall(self.inside)

    def attribute(self, pattern):
        """The first group of a regular expression in the attributes, or None."""
        found = re.search(pattern, self.rest)
        return found[1] if found else None

    @property
    def cycles(self):
        found = CYCLES.search(self.rest)
        return int(found[1]) if found else None

    @property
    def called(self):
        """The computation that a fusion or an asynchronous start calls, or None."""
        # (An all-reduce has a to_apply, too: how two numbers are added.)
        word = "to_apply" if self.opcode == "call-start" else "calls"
        return self.attribute(word + r"=%([\w.\-]+)")

    @property
    def op_name(self):
        return self.attribute(r'op_name="([^"]*)"') or ""


def _closing(text, start):
    """Where the parenthesis that opens at `start` is closed."""
    depth = 0
    for found in PARENTHESES.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    raise UserError(f"no end of the parenthesis in {text[start:start + 80]!r}")


def _instruction(line):
    name, _, text = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opening = text.index("(", end)
    closing = _closing(text, opening)
    return Instruction(name.removeprefix("%"), text[:end], text[end:opening].strip(),
                       text[opening + 1:closing], text[closing + 1:])


class Program:
    """A compiled program: its computations, and where in the source each instruction comes from.

    Args:
      text: `compiled.as_text()`.

    Raises:
      UserError: the text holds no scheduled program.
    """

    def __init__(self, text):
        header = text.split("\n", 1)[0]
        if "is_scheduled=true" not in header:
            raise UserError("the text is no scheduled program: compiled.as_text() gives one")
        self.computations, self.entry, lines = {}, "", None
        tables = {"FileNames": {}, "FunctionNames": {}, "FileLocations": {}, "StackFrames": {}}
        table = None
        for line in text.split("\n"):
            if line.startswith("  "):
                if lines is not None and " = " in line:
                    lines.append(_instruction(line))
            elif line.endswith("{") and line.startswith(("%", "ENTRY ")):
                name = NAMES.search(line)[1]
                lines = self.computations[name] = []
                self.entry = name if line.startswith("ENTRY ") else self.entry
            elif line.startswith("}"):
                lines = None
            elif line in tables:
                table = tables[line]
            elif table is not None and line[:1].isdigit():
                number, _, value = line.partition(" ")
                table[int(number)] = value
        if not self.entry:
            raise UserError("the text has no ENTRY computation")
        chips = re.search(r"num_partitions=(\d+)", header)
        self.chips = int(chips[1]) if chips else 1
        self.shapes = {name: {line.name: line.shape for line in lines}
                       for name, lines in self.computations.items()}
        self._frames = self._read_frames(tables)
        self._flops, self._users = {}, {}

    @staticmethod
    def _read_frames(tables):
        def numbers(text):
            return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
        places = {}
        for key, text in tables["FileLocations"].items():
            entry = numbers(text)
            file = tables["FileNames"].get(entry.get("file_name_id"), "")
            function = tables["FunctionNames"].get(entry.get("function_name_id"), "")
            places[key] = (file.strip('"'), function.strip('"'), entry.get("line", 0))
        frames = {key: numbers(text) for key, text in tables["StackFrames"].items()}
        # Frame 1 has no parent. XLA prints "parent 1" for it: one more than the parent's number.
        shift = int(frames.get(1, {}).get("parent_frame_id", 0) == 1)
        return {key: (places.get(entry.get("file_location_id"), ("", "", 0)),
                      entry.get("parent_frame_id", 0) - shift) for key, entry in frames.items()}

    def stack(self, instruction):
        """[(file, function, line)] of the calls that made an instruction, innermost first."""
        number, found = instruction.attribute(r"stack_frame_id=(\d+)"), []
        number = int(number) if number else 0
        while number in self._frames and len(found) < 200:
            place, number = self._frames[number]
            found.append(place)
        return found

    def named(self, line, computation):
        """The instruction itself, one inside it, or the nearest user or maker, with a JAX name."""
        if computation not in self._users:
            self._users[computation] = defaultdict(list), {}
            users, makers = self._users[computation]
            for one in self.computations[computation]:
                makers[one.name] = one
                for name in one.operands:
                    users[name].append(one)
        users, makers = self._users[computation]
        for neighbours in (lambda one: users[one.name],
                           lambda one: [makers[name] for name in one.operands]):
            queue = [line]
            for one in queue:                   # the nearest first; a few steps are enough
                inner = self.inner(one.called) if one.called else ()
                known = [two for two in (*inner, one) if JAX_NAME.match(two.op_name)]
                if known:
                    return known[-1]
                if len(queue) < 16 and one.opcode != "tuple":
                    queue += neighbours(one)
        return line

    def inner(self, name):
        """All instructions of a computation and of what it calls."""
        for line in self.computations.get(name, ()):
            yield line
            if line.called:
                yield from self.inner(line.called)

    def flops(self, line, computation):
        """(all, int8) operations of the products in an instruction: 2 for multiply and add."""
        if line.opcode in ("convolution", "dot"):
            shapes = self.shapes[computation]
            count = _product_flops(line, *(shapes.get(name, "") for name in line.operands[:2]))
            dtype = arrays(shapes.get(line.operands[0], ""))
            return count, count if dtype and dtype[0][0] in ("s8", "u8", "s4", "u4") else 0
        if not line.called:
            return 0, 0
        if line.called not in self._flops:
            parts = [self.flops(inner, line.called)
                     for inner in self.computations.get(line.called, ())]
            self._flops[line.called] = tuple(map(sum, zip(*parts))) if parts else (0, 0)
        return self._flops[line.called]

    def moved_bytes(self, line, computation, hbm_only=True):
        """Bytes that an instruction reads from HBM and writes to it, or from and to any memory.

        Of an operand that is only looked up or sliced counts what is read, of an array that is
        updated in place what is written.
        """
        shapes = self.shapes[computation]
        read = [bytes_of(shapes.get(name, ""), hbm_only) for name in line.operands]
        written = bytes_of(line.shape, hbm_only)
        if (line.called or "").startswith("async_collective_fusion"):
            return self._own_bytes(line, read)
        if line.opcode in LOOKUPS:
            read[0] = min(read[0], bytes_of(line.shape))
        elif line.opcode == "dynamic-update-slice":
            read[0], written = 0, min(written, read[1])
        elif line.called and any(read):
            read = [min(size, self._read_inside(line.called, place)) if size else 0
                    for place, size in enumerate(read)]
            if update := self._updated_inside(line.called):
                place, size = update
                read[place], written = 0, min(written, size)
        return sum(read) + written

    def _updated_inside(self, name):
        """(number of the parameter that a fusion updates in place, bytes it writes), or None."""
        lines = self.computations.get(name)
        if not lines or lines[-1].opcode != "dynamic-update-slice":
            return None
        target, update = lines[-1].operands[:2]
        places = {one.name: int(one.inside) for one in lines if one.opcode == "parameter"}
        return (places[target], bytes_of(self.shapes[name][update])) if target in places else None

    def _own_bytes(self, line, read):
        """Bytes of a product that is fused with a transfer: the transfer's buffers pass through it.

        XLA hands them in and out as the same memory (`output_to_operand_aliasing`).
        """
        aliases = line.attribute(r"output_to_operand_aliasing=\{(.*?\))\}") or ""
        pairs = re.findall(r"\{(\d*)\}: \((\d+),", aliases)
        through = {int(place) for _, place in pairs}
        kept = sum(size for place, size in enumerate(read) if place not in through)
        written = each_bytes(line.shape, True)
        same = {int(place or 0) for place, _ in pairs}
        return kept + sum(size for place, size in enumerate(written) if place not in same)

    def _read_inside(self, name, place):
        """Bytes that a fused computation reads of its parameter number `place`, at most."""
        if name not in self.computations:
            return math.inf
        lines = self.computations[name]
        parameter = next((one.name for one in lines
                          if one.opcode == "parameter" and one.inside == str(place)), None)
        total = 0
        for one in lines:
            if parameter in one.operands:
                if one.opcode not in LOOKUPS or one.operands[0] != parameter:
                    return math.inf
                total += bytes_of(one.shape)
        return total

    def trips(self, line):
        """How often the body of a while loop runs, or None if the text does not say."""
        known = line.attribute(r'"known_trip_count":\{"n":"?(\d+)')
        if known:
            return int(known)
        condition = line.attribute(r"condition=%([\w.\-]+)")
        lines = list(self.inner(condition))
        if not any(inner.opcode == "compare" and "direction=LT" in inner.rest for inner in lines):
            return None
        limits = [inner.inside for inner in lines
                  if inner.opcode == "constant" and inner.shape.startswith(("s32[]", "u32[]"))]
        return int(limits[0]) if len(limits) == 1 else None


def _window(line, count):
    """[(size, stride, pad before, pad after, lhs dilation, rhs dilation)] of a convolution."""
    text = line.attribute(r"window=\{([^}]*)\}") or ""
    found = dict(part.split("=") for part in text.split())

    def each(name, default):
        return (found[name].split("x") if name in found else [default] * count)
    pads = [pad.split("_") for pad in each("pad", "0_0")]
    return [(int(size), int(stride), int(pad[0]), int(pad[1]), int(wide), int(far))
            for size, stride, pad, wide, far in zip(
                each("size", "1"), each("stride", "1"), pads, each("lhs_dilate", "1"),
                each("rhs_dilate", "1"))]


def _product_flops(line, lhs, rhs):
    """Operations of a dot, or of a convolution: XLA writes products on a TPU as convolutions.

    A position of the window counts only where it meets a real number, not padding or a hole between
    dilated ones: XLA's own rule (HloCostAnalysis::HandleConvolution).
    """
    out = arrays(line.shape)[0][1]
    (_, left, _), (_, right, _) = (arrays(shape)[0] for shape in (lhs, rhs))
    if line.opcode == "dot":
        inner = line.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return 2 * math.prod(out) * math.prod(left[int(d)] for d in inner.split(",") if d)
    lhs_label, rhs_label, out_label = re.search(
        r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest).groups()
    spatial = sum(label.isdigit() for label in rhs_label)
    count = left[lhs_label.index("b")] * right[rhs_label.index("i")] * right[rhs_label.index("o")]
    count //= int(line.attribute(r"batch_group_count=(\d+)") or 1)
    for d, (size, stride, before, _, wide, far) in enumerate(_window(line, spatial)):
        there = (left[lhs_label.index(str(d))] - 1) * wide + 1
        met = 0
        for tap in range(size):
            at = np.arange(out[out_label.index(str(d))]) * stride - before + tap * far
            met += int(((at >= 0) & (at < there) & (at % wide == 0)).sum())
        count *= met
    return 2 * count


# ── what an instruction is ──────────────────────────────────────────────────────────────────────

DIRECTIONS = ("forward", "recomputed", "backward", "rest")
def direction_of(op_name):
    """The pass, one of `DIRECTIONS`, from the name that JAX gives an operation.

    `rest` is the optimizer, and what only brings arguments in or results out.
    """
    if "rematted_computation" in op_name:
        return "recomputed"
    return ("backward" if "transpose(" in op_name else
            "forward" if "jvp(" in op_name else "rest")


# ── the timeline ────────────────────────────────────────────────────────────────────────────────

@dataclass
class Event:
    """Something that takes time: an instruction, a wait, or bytes on the links.

    Attributes:
      name, opcode: of the instruction.
      track: compute (the chip works), wait (it stands still for the links or a copy), links, copies
        (what runs beside).
      start, seconds: of one execution, from the program's start.
      count: executions (more than one in a loop).
      part, direction, line: the part of the model, the pass, the line of source.
      flops, int8, bytes: of one execution.
      axes: dimensions of the slice whose links are used.
    """

    name: str
    opcode: str
    track: str
    start: float
    seconds: float
    count: int = 1
    part: str = "other"
    direction: str = "rest"
    line: str = ""
    flops: int = 0
    int8: int = 0
    bytes: int = 0
    axes: tuple = ()


@dataclass
class Prediction:
    """What the model says about one program. Times in seconds, of one execution of the program.

    Attributes:
      seconds: the whole, or None where too much has no known cost.
      compute: the chip works.
      exposed: it waits for the links.
      copies: it waits for its own asynchronous copies.
      clock: the sum of the three, also where it is not to be trusted.
      unknown: [{"opcode", "count", "flops", "bytes"}] of what has no known cost.
      moved: the same of what has no cycles but only moves bytes: it takes them at the HBM's speed.
      unknown_flops, unknown_bytes: their share of the program's.
      events: in the order of the schedule.
    """

    clock: float
    compute: float
    exposed: float
    copies: float
    unknown: list
    moved: list
    unknown_flops: float
    unknown_bytes: float
    flops: float
    bytes: float
    opaque: int
    events: list

    @property
    def unknown_share(self):
        """The share of FLOPs or bytes, whichever is more, of which no cost is known."""
        return 1.0 if self.opaque else max(self.unknown_flops, self.unknown_bytes)

    @property
    def trusted(self):
        return self.unknown_share <= TRUSTED

    @property
    def seconds(self):
        return self.clock if self.trusted else None


class _Reader:
    """Walks through a program in schedule order and writes down what a clock must know: a tape.

    A tape is a list of lists that JSON can hold, one for each instruction that may take time:

        ["compute", name, what, cycles, priced, moves, bytes anywhere, about]
        ["transfer", name, opcode, role, key, [[kind, bytes, groups or pairs], ...], about]
        ["copy", name, opcode, bytes, direction]      ["wait", name, opcode, key]
        ["loop", trips or None, tape]                 ["branches", [tape, ...]]

    `priced`: the back end has a cost model for it. `moves`: it only moves bytes. `about`: part,
    direction, line, FLOPs, int8 FLOPs, bytes of HBM.
    """

    def __init__(self, program, part_of):
        self.program, self.part_of, self.same = program, part_of, {}

    def about(self, line, computation, transfer=False):
        """Part, direction, source, FLOPs and bytes of an instruction."""
        program = self.program
        flops, int8 = program.flops(line, computation)
        inner = list(program.inner(line.called)) if line.called else [line]
        products = [one for one in inner if one.opcode in ("convolution", "dot")]
        source = line
        if products and line.called:  # a fusion is named after its root; its product says more
            source = max(products, key=lambda one: bytes_of(one.shape))
        elif not JAX_NAME.match(line.op_name):  # none, or one that XLA made up: reshape.46
            source = program.named(line, computation)
        stack = program.stack(source)
        moves = not transfer and all(one.opcode in MOVES for one in inner)
        part = self.part_of(stack, source.op_name, bool(products) or transfer, moves)
        return [part, direction_of(source.op_name), source_line(stack), flops, int8,
                program.moved_bytes(line, computation)]

    def run(self, name):
        """The tape of a computation."""
        tape = []
        for line in self.program.computations[name]:
            tape += self.step(line, name)
        return tape

    def step(self, line, computation):
        """What an instruction adds to a tape."""
        opcode = line.opcode
        if opcode in FREE:
            return []
        if opcode == "while":
            return [["loop", self.program.trips(line),
                     self.run(line.attribute(r"body=%([\w.\-]+)"))]]
        if opcode == "conditional":
            names = re.findall(r"%([\w.\-]+)",
                               line.attribute(r"branch_computations=\{([^}]*)\}") or "")
            names += [name for name in (line.attribute(r"true_computation=%([\w.\-]+)"),
                                        line.attribute(r"false_computation=%([\w.\-]+)")) if name]
            return [["branches", [self.run(name) for name in names]]]
        if opcode == "call":
            return self.run(line.attribute(r"to_apply=%([\w.\-]+)"))
        if opcode.endswith("-done"):
            return [["wait", line.name, opcode, self.same.get(line.operands[0], line.operands[0])]]
        if opcode.endswith("-update") and "async" in opcode:
            self.same[line.name] = self.same.get(line.operands[0], line.operands[0])
            return []
        transfer = transfer_of(self.program, line, computation)
        if transfer:
            return [["transfer", line.name, opcode, *transfer, self.about(line, computation, True)]]
        if opcode.endswith("-start"):
            return [["copy", line.name, opcode, bytes_of(written(line.shape)),
                     direction_of(line.op_name)]]
        inner = self.program.inner(line.called) if line.called else [line]
        what = line.attribute(r'custom_call_target="([^"]+)"') or opcode
        return [["compute", line.name, what, line.cycles,
                 "COST_MODEL_TYPE_INVALID" not in line.rest,
                 all(one.opcode in MOVES for one in inner),
                 self.program.moved_bytes(line, computation, hbm_only=False),
                 self.about(line, computation)]]


class _Clock:
    """Plays a tape on a slice and adds up time."""

    def __init__(self, where):
        self.where, self.spec = where, where.spec
        self.now, self.events, self.pending = 0.0, [], {}
        self.busy = defaultdict(float)          # until when a link is taken, in one direction
        self.unknown = defaultdict(lambda: [0, 0, 0])   # without cycles: count, FLOPs, bytes
        self.moved = defaultdict(lambda: [0, 0, 0])     # the same, but at the HBM's speed
        self.totals = [0, 0]                    # FLOPs and bytes of everything
        self.opaque = 0                         # kernels that say nothing about themselves

    def run(self, tape, count=1):
        """One execution of a tape that is executed `count` times."""
        for kind, *record in tape:
            getattr(self, kind)(count, *record)

    def add(self, name, opcode, track, start, seconds, count, **about):
        self.events.append(Event(name, opcode, track, start, seconds, count, **about))

    def compute(self, count, name, what, cycles, priced, moves, anywhere, about):
        about = dict(zip(("part", "direction", "line", "flops", "int8", "bytes"), about, strict=True))
        self.totals[0] += about["flops"] * count
        self.totals[1] += about["bytes"] * count
        seconds = (cycles or 0) / self.where.clock
        if not priced and not about["flops"]:
            seconds = min(seconds, anywhere / (COPY * self.spec.bandwidth))
        if cycles is None and (about["flops"] or about["bytes"]):  # not scalars, not on the chip
            entry = (self.moved if moves else self.unknown)[what]
            for place, value in enumerate((1, about["flops"], about["bytes"])):
                entry[place] += value * count
            seconds = about["bytes"] / self.spec.bandwidth if moves else 0.0
        self.opaque += cycles is None and what == "tpu_custom_call"
        if seconds:
            self.add(name, what, "compute", self.now, seconds, count, **about)
            self.now += seconds

    def take_links(self, seconds, axes):
        """The transfer's start and end: after those before it that use one of its links.

        "x" are the links along x in both directions, "x+" those in one: a link carries both at once.
        """
        ways = [axis + way for axis in axes for way in ("+-" if len(axis) == 1 else ("",))]
        start = max([self.now, *(self.busy[way] for way in ways)])
        for way in ways:
            self.busy[way] = start + seconds
        return start, start + seconds

    def transfer(self, count, name, opcode, role, key, jobs, about):
        """A collective, or one end of it; several jobs run one after the other."""
        if role == "done":
            self.wait(count, name, opcode, key)
            return
        found = [send_time(size, groups, self.where) if kind == "collective-permute"
                 else collective_time(kind, size, groups, self.where) for kind, size, groups in jobs]
        seconds = sum(one for one, _ in found)
        axes = tuple(sorted({axis for _, axes in found for axis in axes}))
        about = dict(zip(("part", "direction", "line", "flops", "int8"), about, strict=False))
        about |= {"bytes": sum(size for _, size, _ in jobs), "axes": axes}
        start, end = self.take_links(seconds, axes)
        self.add(name, jobs[0][0], "links", start, seconds, count, **about)
        self.pending[key] = (end, jobs[0][0], about)
        if role == "whole":
            self.wait(count, name, opcode, key)

    def copy(self, count, name, opcode, size, direction):
        """An asynchronous copy, or a scatter on the SparseCore: what it writes, at HBM's speed."""
        start, end = self.take_links(size / self.spec.bandwidth, ("HBM",))
        about = {"part": "conversions", "direction": direction, "bytes": size}
        self.add(name, "copy", "copies", start, end - start, count, **about)
        self.pending[name] = (end, "copy", about)

    def wait(self, count, name, opcode, key):
        """Stand still until what was started under a key is done."""
        end, kind, about = self.pending.pop(key, None) or (0.0, "", {})
        if end > self.now:
            self.add(name, kind, "wait", self.now, end - self.now, count, **about)
            self.now = end

    def loop(self, count, trips, body):
        """The body once, times its trips: what runs beside it does not reach over a turn's end."""
        if trips is None:
            self.unknown["while"][0] += count
            self.opaque += 1                    # nothing can be said about its time
            trips = 1
        start = self.now
        self.run(body, count * trips)
        self.now += (self.now - start) * (trips - 1)

    def branches(self, count, tapes):
        """A conditional takes as long as its longest branch."""
        start, kept, before = self.now, (self.now, []), self.events
        for tape in tapes:
            self.now, self.events = start, []
            self.run(tape, count)
            if self.now > kept[0]:
                kept = (self.now, self.events)
        self.now, self.events = kept[0], before + kept[1]


def transfer_of(program, line, computation):
    """[role, key, [[kind, bytes, groups or pairs], ...]] of a collective, or one end of it; or None.

    The role is whole, start or done; a start and its done have the same key.

    XLA for TPUs writes collectives in five ways: an operation of its own, which stops the chip; a
    pair of `-start` and `-done`; the same pair around a call that the SparseCore executes
    (`call-start`, `async_execution_thread="sparsecore"`); a fusion around `%all-reduce-scatter`,
    which stops the chip, too; and a chain of fusions: one that calls `AsyncCollectiveStart`, products
    that carry the transfer along (`%async_collective_fusion`; they have cycles and are products like
    others), and one that calls `AsyncCollectiveDone`.
    """
    found, inside, role, key = [line], computation, "whole", line.name
    if line.opcode.endswith("-start"):
        role = "start"
    thread = line.attribute(r'async_execution_thread="([^"]+)"')
    if thread not in (None, "main", "sparsecore"):
        raise UserError(f"{line.name} runs beside the program on {thread!r}: no time is known")
    if line.called:
        lines = program.computations.get(line.called, ())
        inner = [one for one in lines if one.opcode.removesuffix("-start") in COLLECTIVES]
        if not inner or line.called.startswith("async_collective_fusion"):
            return None
        found, inside = inner, line.called
        targets = {one.attribute(r'custom_call_target="([^"]+)"') for one in lines}
        for name, end in (("AsyncCollectiveStart", "start"), ("AsyncCollectiveDone", "done")):
            if name in targets:
                role, key = end, f"channel {found[0].attribute(r'channel_id=([0-9]+)')}"
    if found[0].opcode.removesuffix("-start") not in COLLECTIVES:
        return None
    return [role, key, [_job(one, program.shapes[inside], line.called or "", program.chips)
                        for one in found]]


def _job(found, shapes, fusion, chips):
    """[kind, bytes, groups or pairs] of one collective; `fusion` is what contains it, or ""."""
    kind = found.opcode.removesuffix("-start")
    size = sum(bytes_of(shapes.get(name, "")) for name in found.operands)
    if kind == "collective-permute":
        text = found.attribute(r"source_target_pairs=\{(.*?\})\}") or ""
        return [kind, size, [list(map(int, pair))
                             for pair in re.findall(r"\{(\d+),(\d+)\}", text + "}")]]
    text = found.attribute(GROUPS)
    if text is None and "replica_groups=" in found.rest:
        raise UserError(f"groups in a notation that is not known: {found.rest[:200]}")
    groups = read_groups(text or "{}", chips)
    if kind == "all-reduce" and "all-reduce-scatter" in fusion:
        kind = "reduce-scatter"
    size *= len(groups[0]) if kind == "all-gather" else 1
    return [kind.removeprefix("ragged-"), size, groups]


LIBRARY = re.compile(r"/(jax|jaxlib|flax|qwix|optax)/")
ROOMS = {"helpers", "appendix", "tpu_time"}
WRAPPER = re.compile(r"\w*Lora\.|SharedInputs\.|_OfTheInput\.|Einsum\.__call__|shard$")


def source_line(stack):
    """`file:line, function` of the innermost call that is no library's and no wrapper's, or ""."""
    if not stack:
        return ""
    file, function, line = next((place for place in stack if not LIBRARY.search(place[0])
                          and not WRAPPER.match(place[1])), stack[0])
    path = Path(file.rsplit("site-packages/", 1)[-1])
    short = path if "site-packages/" in file else Path(*path.parts[-1 - bool(ROOMS & set(path.parts)):])
    return f"{short}:{line}, {function}"


def read(program, part_of=lambda *_: "other"):
    """The tape of a program: all that its time depends on, small enough to be kept as JSON.

    Args:
      program: a `Program`, or the text of one.
      part_of: (stack, op_name, product, moves) -> the part of the model that an instruction belongs
        to: its calls as (file, function, line), innermost first; JAX's name of the operation;
        whether it contains a product, or moves what one needs or made over the links; whether it
        only converts, copies or rearranges.
    """
    program = program if isinstance(program, Program) else Program(program)
    return _Reader(program, part_of).run(program.entry)


def predict(program, where, part_of=lambda *_: "other"):
    """Say how long a program takes on a slice.

    Args:
      program: a `Program`, or the text of one.
      where: a `Box`, or Google's name of one that is in the table: "v5p-8".
      part_of: as for `read`.

    Returns:
      A `Prediction`.

    Raises:
      UserError: the program is not for so many chips.
    """
    program = program if isinstance(program, Program) else Program(program)
    if isinstance(where, str):
        named = slice_of(where)
        sizes = tuple(int(size) for size in named.topology.split("x"))
        where = Box(named.kind, (*sizes, 1)[:3])
    if program.chips != math.prod(where.shape):
        raise UserError(f"the program is for {program.chips} chips, the slice has "
                         f"{math.prod(where.shape)}")
    return play(read(program, part_of), where)


def play(tape, where):
    """The `Prediction` of a tape on a `Box`."""
    clock = _Clock(where)
    clock.run(tape)

    def listed(found):
        rows = [{"opcode": name, "count": count, "flops": flops, "bytes": size}
                for name, (count, flops, size) in found.items()]
        return sorted(rows, key=lambda entry: -entry["bytes"])
    unknown, moved = listed(clock.unknown), listed(clock.moved)
    flops, size = clock.totals
    sums = defaultdict(float)
    for event in clock.events:
        track = "copies" if event.track == "wait" and event.opcode == "copy" else event.track
        sums[track] += event.seconds * event.count * (event.track in ("compute", "wait"))
    return Prediction(
        clock=clock.now, compute=sums["compute"], exposed=sums["wait"], copies=sums["copies"],
        unknown=unknown, moved=moved,
        unknown_flops=sum(entry["flops"] for entry in unknown) / max(flops, 1),
        unknown_bytes=sum(entry["bytes"] for entry in unknown) / max(size, 1),
        flops=flops, bytes=size, opaque=clock.opaque, events=clock.events)


# ── tables ──────────────────────────────────────────────────────────────────────────────────────

def at_peak(event, spec):
    """Seconds of an event if it ran at its own limit: products at the peak, bytes at HBM speed."""
    return max((event.flops - event.int8) / spec.flops + event.int8 / spec.int8,
               event.bytes / spec.bandwidth)


def what_of(event):
    """compute, or for a wait what was waited for: all-gather, reduce-scatter, copy, ..."""
    return "compute" if event.track == "compute" else event.opcode


def profile(prediction, spec):
    """The time by what, part of the model and pass.

    Returns:
      [{"what", "part", "direction", "seconds", "at_peak", "count", "flops"}], the longest first.
      `at_peak`: seconds at the peak of the matrix units or of the HBM, whichever is more, summed
      over the instructions; None for waits.
    """
    rows = defaultdict(lambda: [0.0, 0.0, 0, 0.0])
    for event in prediction.events:
        if event.track in ("compute", "wait"):
            row = rows[what_of(event), event.part, event.direction]
            bound = at_peak(event, spec) if event.track == "compute" else 0.0
            for place, value in enumerate((event.seconds, bound, 1, event.flops)):
                row[place] += value * event.count
    table = [{"what": what, "part": part, "direction": direction, "seconds": seconds,
              "at_peak": bound if what == "compute" else None, "count": count, "flops": flops}
             for (what, part, direction), (seconds, bound, count, flops) in rows.items()]
    return sorted(table, key=lambda row: -row["seconds"])


# ── a trace that Perfetto opens ─────────────────────────────────────────────────────────────────

TRACKS = {"compute": (1, "chip: computes"), "wait": (1, "chip: computes"),
          "links": (2, "links: collectives"), "copies": (3, "HBM: copies beside")}


def write_trace(prediction, path, title="one chip"):
    """Write a prediction as a Chrome trace, gzipped JSON, for https://ui.perfetto.dev.

    The format is Google's Trace Event Format: complete events ("ph": "X") with microseconds, named
    threads. A loop's body is drawn once; `executions` among an event's arguments says how often it
    runs.

    Args:
      prediction: from `predict`.
      path: the file to write, `*.json.gz`.
      title: the process's name in the viewer.
    """
    events = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": title}}]
    events += [{"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
               for tid, name in sorted(set(TRACKS.values()))]
    for event in prediction.events:
        label = event.part if event.track == "compute" else f"{event.track}: {event.opcode}"
        events.append({
            "ph": "X", "name": label, "cat": event.direction, "pid": 1,
            "tid": TRACKS[event.track][0], "ts": event.start * 1e6, "dur": event.seconds * 1e6,
            "args": {"instruction": event.name, "source": event.line, "FLOP": event.flops,
                     "bytes": event.bytes, "executions": event.count}})
    beside = Path(f"{path}.part")
    with open(beside, "wb") as file, gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed:
        packed.write(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
    beside.rename(path)
