"""A program as a tape: all that its time depends on, small enough to be kept as JSON.

A tape is a list of records, one for each instruction that may take time, in the order of the
schedule. It's stored as nested lists, each with the record's kind in front.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tpu_time.hlo import (
    JAX_NAME, PRODUCTS, Instruction, Place, Program, bytes_of, written)
from tpu_time.links import read_groups

# Operations that take no time.
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "domain",
        "partition-id", "replica-id", "opt-barrier", "add-dependency", "get-dimension-size"}
# Operations that convert, copy or rearrange numbers, and compute nothing.
MOVES = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "convert", "copy",
         "transpose", "reshape", "broadcast", "slice", "concatenate", "pad", "dynamic-slice",
         "dynamic-update-slice", "reverse", "fusion", "iota", "reduce-precision"}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
               "collective-permute", "collective-broadcast")
# A collective's groups, in the notations that `links.read_groups` reads.
GROUPS = (r"replica_groups=(mesh\[[^\]]*\](?:, device_ids=\([^ ]*\))? \{[^}]*\}|"
          r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|"
          r"\{.*?\}\}|\{\})")
TARGET = r'custom_call_target="([^"]+)"'
DIRECTIONS = ("forward", "recomputed", "backward", "rest")
LIBRARY = re.compile(r"/(jax|jaxlib|flax|qwix|optax)/")
ROOMS = {"helpers", "appendix", "tpu_time"}
# Functions that only hand a call on: the line of source that a reader looks for is their caller's.
WRAPPER = re.compile(r"\w*Lora\.|SharedInputs\.|_OfTheInput\.|Einsum\.__call__|shard$")

# (stack, op_name, product, moves) -> the part of the model that an instruction belongs to: its
# calls, innermost first; JAX's name of the operation; whether it contains a product, or moves what
# one needs or made over the links; whether it only converts, copies or rearranges.
PartOf = Callable[[list[Place], str, bool, bool], str]


class About(NamedTuple):
    """What an instruction belongs to, and how much it computes and moves."""

    part: str = "other"
    direction: str = "rest"
    line: str = ""  # of source
    flops: int = 0
    int8: int = 0
    bytes: float = 0  # of HBM


class Job(NamedTuple):
    """One collective."""

    kind: str
    bytes: int  # the gathered result, or what one chip puts in
    groups: list[list[int]]  # of a collective-permute: (source, target) pairs


class Compute(NamedTuple):
    """An instruction that keeps the chip busy."""

    name: str
    what: str  # its opcode, or the target of a custom call
    cycles: int | None
    priced: bool  # the back end has a cost model for it
    moves: bool  # it only moves bytes
    anywhere: float  # bytes from and to any memory
    about: About


class Send(NamedTuple):
    """A collective, or one end of it; a start and its done have the same key."""

    name: str
    opcode: str
    role: str  # whole, start or done
    key: str
    jobs: list[Job]  # they run one after the other
    about: About


class Copy(NamedTuple):
    """The start of an asynchronous copy, or of a scatter on the SparseCore."""

    name: str
    opcode: str
    bytes: int  # that it writes
    direction: str


class Wait(NamedTuple):
    """The end of something asynchronous."""

    name: str
    opcode: str
    key: str


class Loop(NamedTuple):
    """A while loop."""

    trips: int | None
    body: "Tape"


class Branches(NamedTuple):
    """A conditional."""

    tapes: "list[Tape]"


Record = Compute | Send | Copy | Wait | Loop | Branches
Tape = list[Record]

# ── as JSON ──


KINDS: dict[str, Any] = {  # by the word that a record's list begins with
    "compute": Compute,
    "transfer": Send,
    "copy": Copy,
    "wait": Wait,
    "loop": Loop,
    "branches": Branches,
}
WORDS = {kind: word for word, kind in KINDS.items()}


def to_json(tape: Tape) -> list:
    """A tape as JSON holds it: ["compute", name, what, ...] and so on."""
    rows = []
    for record in tape:
        fields: tuple[Any, ...] = record
        if isinstance(record, Loop):
            fields = (record.trips, to_json(record.body))
        elif isinstance(record, Branches):
            branches = [to_json(branch) for branch in record.tapes]
            fields = (branches,)
        word = WORDS[type(record)]
        rows.append([word, *fields])
    return rows


def from_json(rows: list) -> Tape:
    """The tape that `to_json` wrote."""
    tape: Tape = []
    for word, *fields in rows:
        if word in ("compute", "transfer"):
            fields[-1] = About._make(fields[-1])
        if word == "transfer":
            fields[-2] = [Job._make(job) for job in fields[-2]]
        elif word == "loop":
            fields[1] = from_json(fields[1])
        elif word == "branches":
            fields[0] = [from_json(branch) for branch in fields[0]]
        tape.append(KINDS[word]._make(fields))
    return tape


# ── what an instruction is ──


def direction_of(op_name: str) -> str:
    """The pass, one of `DIRECTIONS`, from the name that JAX gives an operation.

    `rest` is the optimizer, and what only brings arguments in or results out.
    """
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    if "jvp(" in op_name:
        return "forward"
    return "rest"


def source_line(stack: list[Place]) -> str:
    """`file:line, function` of the innermost call that isn't a library's or a wrapper's, or ""."""
    if not stack:
        return ""
    place = stack[0]
    for candidate in stack:
        is_library = LIBRARY.search(candidate.file)
        is_wrapper = WRAPPER.match(candidate.function)
        if not is_library and not is_wrapper:
            place = candidate
            break
    shown = _shown_path(place.file)
    return f"{shown}:{place.line}, {place.function}"


def _shown_path(file: str) -> Path:
    """A library's file from its package on; of ours the room's name, too; else the file alone."""
    _, packages, inside = file.rpartition("site-packages/")
    if packages:
        return Path(inside)
    parts = Path(file).parts
    if ROOMS.intersection(parts):
        return Path(*parts[-2:])
    return Path(*parts[-1:])


def only_moves(lines: list[Instruction]) -> bool:
    """Do these instructions convert, copy and rearrange, and nothing else?"""
    return all(line.opcode in MOVES for line in lines)


def _job(line: Instruction, shapes: dict[str, str], fusion: str, chips: int) -> Job:
    """One collective.

    Args:
      line: the instruction.
      shapes: {instruction: its shape's text}, in the same computation.
      fusion: the name of the computation that was fused around it, or "".
      chips: of the program.
    """
    kind = kind_of(line)
    size = 0
    for name in line.operands:
        shape = shapes.get(name, "")
        size += bytes_of(shape)
    if kind == "collective-permute":
        return Job(kind, size, _pairs(line))

    text = line.attribute(GROUPS)
    if text is None and "replica_groups=" in line.rest:
        raise ValueError(f"groups in a notation that we don't know: {line.rest[:200]}")
    groups = read_groups(text or "{}", chips)
    if kind == "all-reduce" and "all-reduce-scatter" in fusion:
        kind = "reduce-scatter"
    if kind == "all-gather":
        size *= len(groups[0])
    return Job(kind.removeprefix("ragged-"), size, groups)


def kind_of(line: Instruction) -> str:
    """The opcode, the same for a start that runs beside others: all-gather, also as -start."""
    return line.opcode.removesuffix("-start")


def _pairs(line: Instruction) -> list[list[int]]:
    """(source, target) partitions of a collective-permute."""
    text = line.attribute(r"source_target_pairs=\{(.*?\})\}") or ""
    pairs = []
    for source, target in re.findall(r"\{(\d+),(\d+)\}", text):
        pairs.append([int(source), int(target)])
    return pairs


def _role(lines: list[Instruction]) -> str | None:
    """"start" or "done" if a fusion of these is one end of a transfer beside others, or None."""
    targets = {line.attribute(TARGET) for line in lines}
    if "AsyncCollectiveDone" in targets:
        return "done"
    if "AsyncCollectiveStart" in targets:
        return "start"
    return None


class Ends(NamedTuple):
    """What `transfer_of` finds; the fields are those of a `Send`."""

    role: str  # whole, start or done
    key: str  # the same for a start and its done
    jobs: list[Job]


def transfer_of(program: Program, line: Instruction, computation: str) -> Ends | None:
    """A collective, or one end of it; None if an instruction is neither.

    XLA for TPUs writes collectives in five ways:

    - an operation of its own, which stops the chip;
    - a pair of `-start` and `-done`;
    - the same pair around a call that the SparseCore executes (`call-start`,
      `async_execution_thread="sparsecore"`);
    - a fusion around `%all-reduce-scatter`, which stops the chip as well;
    - a chain of fusions. The first calls `AsyncCollectiveStart` and the last
      `AsyncCollectiveDone`. In between are products that carry the transfer along
      (`%async_collective_fusion`). Those have cycles and are products like any other.

    Raises:
      ValueError: it runs beside the program on a unit that we don't know, or its groups are in a
        notation that we don't know.
    """
    thread = line.attribute(r'async_execution_thread="([^"]+)"')
    if thread not in (None, "main", "sparsecore"):
        raise ValueError(f"{line.name} runs beside the program on {thread!r}, and we don't know "
                         "how fast that is")
    role = "whole"
    if line.opcode.endswith("-start"):
        role = "start"
    key = line.name
    name = line.called
    if name is None:
        if kind_of(line) not in COLLECTIVES:
            return None
        job = _job(line, program.shapes[computation], "", program.chips)
        return Ends(role, key, [job])

    lines = program.computations.get(name, [])
    collectives = [inner for inner in lines if kind_of(inner) in COLLECTIVES]
    if not collectives or name.startswith("async_collective_fusion"):
        return None
    role_of_fusion = _role(lines)
    if role_of_fusion:
        role = role_of_fusion
        channel = collectives[0].attribute(r"channel_id=([0-9]+)")
        key = f"channel {channel}"
    shapes = program.shapes[name]
    jobs = [_job(inner, shapes, name, program.chips) for inner in collectives]
    return Ends(role, key, jobs)


# ── the reader ──


class Reader:
    """Walks through a program in schedule order and writes down what a clock must know."""

    def __init__(self, program: Program, part_of: PartOf) -> None:
        self.program = program
        self.part_of = part_of
        self.same: dict[str, str] = {}  # {the update of something asynchronous: its start}

    def run(self, name: str) -> Tape:
        """The tape of a computation."""
        tape: Tape = []
        for line in self.program.computations[name]:
            tape += self.step(line, name)
        return tape

    def about(self, line: Instruction, computation: str, transfer: bool = False) -> About:
        """Part, direction, source, FLOPs and bytes of an instruction."""
        inner = self._inside(line)
        products = [other for other in inner if other.opcode in PRODUCTS]
        source = line
        if products and line.called:  # a fusion is named after its root; its product says more
            source = max(products, key=lambda product: bytes_of(product.shape))
        elif not JAX_NAME.match(line.op_name):  # none, or one that XLA made up: reshape.46
            source = self.program.named(line, computation)

        stack = self.program.stack(source)
        serves_a_product = bool(products) or transfer
        moves = not transfer and only_moves(inner)
        part = self.part_of(stack, source.op_name, serves_a_product, moves)
        work = self.program.work(line, computation)
        moved = self.program.moved_bytes(line, computation)
        return About(
            part=part,
            direction=direction_of(source.op_name),
            line=source_line(stack),
            flops=work.flops,
            int8=work.int8,
            bytes=moved,
        )

    def _inside(self, line: Instruction) -> list[Instruction]:
        """All instructions that a fusion calls; the instruction itself if it calls nothing."""
        if not line.called:
            return [line]
        return list(self.program.inner(line.called))

    def step(self, line: Instruction, computation: str) -> Tape:
        """What an instruction adds to a tape."""
        opcode = line.opcode
        if opcode in FREE:
            return []
        if opcode == "while":
            trips = self.program.trips(line)
            body = line.reference("body") or ""
            return [Loop(trips, self.run(body))]
        if opcode == "conditional":
            tapes = [self.run(name) for name in _branches(line)]
            return [Branches(tapes)]
        if opcode == "call":
            name = line.reference("to_apply") or ""
            return self.run(name)
        if opcode.endswith("-done"):
            start = self._start_of(line)
            return [Wait(line.name, opcode, start)]
        if opcode.endswith("-update") and "async" in opcode:
            self.same[line.name] = self._start_of(line)
            return []

        transfer = transfer_of(self.program, line, computation)
        if transfer:
            about = self.about(line, computation, transfer=True)
            send = Send(
                name=line.name,
                opcode=opcode,
                role=transfer.role,
                key=transfer.key,
                jobs=transfer.jobs,
                about=about,
            )
            return [send]
        if opcode.endswith("-start"):
            size = bytes_of(written(line.shape))
            direction = direction_of(line.op_name)
            return [Copy(line.name, opcode, size, direction)]
        return [self._compute(line, computation)]

    def _start_of(self, line: Instruction) -> str:
        """The name of the start that a done or an update belongs to."""
        operand = line.operands[0]
        return self.same.get(operand, operand)

    def _compute(self, line: Instruction, computation: str) -> Compute:
        return Compute(
            name=line.name,
            what=line.attribute(TARGET) or line.opcode,
            cycles=line.cycles,
            priced="COST_MODEL_TYPE_INVALID" not in line.rest,
            moves=only_moves(self._inside(line)),
            anywhere=self.program.moved_bytes(line, computation, hbm_only=False),
            about=self.about(line, computation),
        )


def _branches(line: Instruction) -> list[str]:
    """The computations of a conditional."""
    listed = line.attribute(r"branch_computations=\{([^}]*)\}") or ""
    names = re.findall(r"%([\w.\-]+)", listed)
    for word in ("true_computation", "false_computation"):
        name = line.reference(word)
        if name:
            names.append(name)
    return names


def everything_is_other(stack: list[Place], op_name: str, product: bool, moves: bool) -> str:
    """The `PartOf` of whoever doesn't ask for parts."""
    return "other"


def read(program: Program | str, part_of: PartOf = everything_is_other) -> Tape:
    """The tape of a program.

    Args:
      program: a `Program`, or the text of one.
      part_of: which part of the model an instruction belongs to (`PartOf`).

    Raises:
      ValueError: the text isn't a scheduled program, or has something that we can't read.
    """
    if isinstance(program, str):
        program = Program(program)
    return Reader(program, part_of).run(program.entry)
