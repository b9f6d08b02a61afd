"""A tape played on a slice: a timeline, and how long the program takes."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tables.errors import UserError
from tpu_time.hlo import Program
from tpu_time.links import COPY, Box, Transfer, box_of, collective_time, send_time
from tpu_time.tape import (
    Branches,
    Compute,
    Copy,
    Job,
    Loop,
    PartOf,
    Send,
    Tape,
    Wait,
    everything_is_other,
    read,
)

VERSION = 4  # of these rules; a stored prediction names the one that made it
TRUSTED = 0.02  # no time is given where more than this share of FLOPs or bytes has no known cost


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
    bytes: float = 0
    axes: tuple[str, ...] = ()


@dataclass
class Totals:
    """Instructions of one opcode, added up."""

    opcode: str
    count: int = 0
    flops: int = 0
    bytes: float = 0


@dataclass
class Prediction:
    """What the model says about one program. Times in seconds, of one execution of the program.

    Attributes:
      seconds: the whole, or None where too much has no known cost.
      compute: while the chip works.
      exposed: while it waits for the links.
      copies: while it waits for its own asynchronous copies.
      clock: the sum of the three, also where you shouldn't trust it.
      unknown: what has no known cost, the most bytes first; sorts also where they stay in the
        chip's own memory, which adds nothing to the shares.
      moved: the same for what has no cycles but only moves bytes: we take the HBM's speed for it.
      unknown_flops, unknown_bytes: their share of the program's.
      flops, bytes: of the whole program.
      opaque: kernels and loops that say nothing about their time.
      events: in the order of the schedule.
    """

    clock: float
    compute: float
    exposed: float
    copies: float
    unknown: list[Totals]
    moved: list[Totals]
    unknown_flops: float
    unknown_bytes: float
    flops: float
    bytes: float
    opaque: int
    events: list[Event]

    @property
    def unknown_share(self) -> float:
        """The share of FLOPs or bytes, whichever is more, of which no cost is known."""
        if self.opaque:
            return 1.0
        return max(self.unknown_flops, self.unknown_bytes)

    @property
    def trusted(self) -> bool:
        """Is so little of the program unknown that its time means something?"""
        return self.unknown_share <= TRUSTED

    @property
    def seconds(self) -> float | None:
        """The whole, or None where you shouldn't trust it."""
        return self.clock if self.trusted else None


@dataclass
class Pending:
    """Something asynchronous that has been started."""

    end: float  # seconds since the program's start
    opcode: str
    about: dict[str, Any]  # fields of its events


def _job_time(job: Job, where: Box) -> Transfer:
    if job.kind == "collective-permute":
        return send_time(job.bytes, job.groups, where)
    return collective_time(job.kind, job.bytes, job.groups, where)


@dataclass
class Clock:
    """Plays a tape on a slice and adds up time.

    Attributes:
      where: the slice.
      now: seconds since the program's start.
      events: so far.
      pending: {key: what was started and not waited for}.
      busy: {a link in one direction, or "HBM": until when it's taken}.
      unknown, moved: {opcode: its totals}; see `Prediction`.
      flops, bytes: of everything.
      opaque: kernels that say nothing about themselves.
    """

    where: Box
    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    pending: dict[str, Pending] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unknown: dict[str, Totals] = field(default_factory=dict)
    moved: dict[str, Totals] = field(default_factory=dict)
    flops: int = 0
    bytes: float = 0
    opaque: int = 0

    def run(self, tape: Tape, count: int = 1) -> None:
        """Play a tape once. It's executed `count` times, because it stands in loops."""
        for record in tape:
            match record:
                case Compute():
                    self.compute(record, count)
                case Send():
                    self.send(record, count)
                case Copy():
                    self.copy(record, count)
                case Wait():
                    self.wait(record.name, record.key, count)
                case Loop():
                    self.loop(record, count)
                case Branches():
                    self.branches(record, count)

    def compute(self, record: Compute, count: int) -> None:
        """An instruction takes its cycles, or its bytes at the HBM's speed."""
        about = record.about
        spec = self.where.spec
        self.flops += about.flops * count
        self.bytes += about.bytes * count

        seconds = (record.cycles or 0) / self.where.clock
        if not record.priced and not about.flops:
            at_copying_speed = record.anywhere / (COPY * spec.bandwidth)
            seconds = min(seconds, at_copying_speed)
        if record.cycles is None:
            # A scalar costs nothing, nor does what stays in the chip's own memory, but for a sort.
            costs_something = about.flops or about.bytes or record.what == "sort"
            if costs_something:
                self._count_unpriced(record, count)
                seconds = about.bytes / spec.bandwidth if record.moves else 0.0
            if record.what == "tpu_custom_call":
                self.opaque += 1

        if seconds:
            event = Event(
                name=record.name,
                opcode=record.what,
                track="compute",
                start=self.now,
                seconds=seconds,
                count=count,
                **about._asdict(),
            )
            self.events.append(event)
            self.now += seconds

    def _count_unpriced(self, record: Compute, count: int) -> None:
        """Add up an instruction without cycles: it moves bytes, or nothing is known of it."""
        table = self.moved if record.moves else self.unknown
        totals = table.setdefault(record.what, Totals(record.what))
        totals.count += count
        totals.flops += record.about.flops * count
        totals.bytes += record.about.bytes * count

    def take_links(self, seconds: float, axes: tuple[str, ...]) -> float:
        """When a transfer starts: after those before it that use one of its links.

        "x" are the links along x in both directions, "x+" those in one: a link carries both at
        once.
        """
        ways = []
        for axis in axes:
            if len(axis) == 1:
                ways += [axis + "+", axis + "-"]
            else:
                ways.append(axis)

        start = self.now
        for way in ways:
            start = max(start, self.busy[way])
        for way in ways:
            self.busy[way] = start + seconds
        return start

    def send(self, record: Send, count: int) -> None:
        """A collective, or one end of it; several jobs run one after the other."""
        if record.role == "done":
            self.wait(record.name, record.key, count)
            return
        seconds = 0.0
        links: set[str] = set()
        size = 0
        for job in record.jobs:
            transfer = _job_time(job, self.where)
            seconds += transfer.seconds
            links.update(transfer.links)
            size += job.bytes

        axes = tuple(sorted(links))
        about = record.about._asdict() | {"bytes": size, "axes": axes}
        kind = record.jobs[0].kind
        start = self.take_links(seconds, axes)
        end = start + seconds
        event = Event(record.name, kind, "links", start, seconds, count, **about)
        self.events.append(event)
        self.pending[record.key] = Pending(end, kind, about)
        if record.role == "whole":
            self.wait(record.name, record.key, count)

    def copy(self, record: Copy, count: int) -> None:
        """An asynchronous copy, or a scatter on the SparseCore: what it writes, at HBM's speed."""
        seconds = record.bytes / self.where.spec.bandwidth
        start = self.take_links(seconds, ("HBM",))
        about: dict[str, Any] = {
            "part": "conversions",
            "direction": record.direction,
            "bytes": record.bytes,
        }
        end = start + seconds
        event = Event(record.name, "copy", "copies", start, seconds, count, **about)
        self.events.append(event)
        self.pending[record.name] = Pending(end, "copy", about)

    def wait(self, name: str, key: str, count: int) -> None:
        """Stand still until what was started under a key is done."""
        started = self.pending.pop(key, None)
        if started is None or started.end <= self.now:
            return
        seconds = started.end - self.now
        event = Event(name, started.opcode, "wait", self.now, seconds, count, **started.about)
        self.events.append(event)
        self.now = started.end

    def loop(self, record: Loop, count: int) -> None:
        """The body once, times its trips. What runs beside it ends with its turn, we assume."""
        trips = record.trips
        if trips is None:
            totals = self.unknown.setdefault("while", Totals("while"))
            totals.count += count
            self.opaque += 1  # nothing can be said about its time
            trips = 1
        start = self.now
        self.run(record.body, count * trips)
        turn = self.now - start
        self.now += turn * (trips - 1)

    def branches(self, record: Branches, count: int) -> None:
        """A conditional takes as long as its longest branch."""
        start = self.now
        before = self.events
        longest: float = start
        kept: list[Event] = []
        for tape in record.tapes:
            self.now = start
            self.events = []
            self.run(tape, count)
            if self.now > longest:
                longest = self.now
                kept = self.events
        self.now = longest
        self.events = before + kept


def _most_bytes_first(table: dict[str, Totals]) -> list[Totals]:
    return sorted(table.values(), key=lambda totals: -totals.bytes)


def _share(part: float, whole: float) -> float:
    return part / max(whole, 1)


def play(tape: Tape, where: Box) -> Prediction:
    """What a tape takes on a slice."""
    clock = Clock(where)
    clock.run(tape)
    compute = exposed = copies = 0.0
    for event in clock.events:
        seconds = event.seconds * event.count
        if event.track == "compute":
            compute += seconds
        elif event.track == "wait" and event.opcode == "copy":
            copies += seconds
        elif event.track == "wait":
            exposed += seconds

    unknown = _most_bytes_first(clock.unknown)
    unknown_flops = sum(totals.flops for totals in unknown)
    unknown_bytes = sum(totals.bytes for totals in unknown)
    return Prediction(
        clock=clock.now,
        compute=compute,
        exposed=exposed,
        copies=copies,
        unknown=unknown,
        moved=_most_bytes_first(clock.moved),
        unknown_flops=_share(unknown_flops, clock.flops),
        unknown_bytes=_share(unknown_bytes, clock.bytes),
        flops=clock.flops,
        bytes=clock.bytes,
        opaque=clock.opaque,
        events=clock.events,
    )


def predict(program: Program | str, where: Box | str,
            part_of: PartOf = everything_is_other) -> Prediction:
    """How long a program takes on a slice.

    Args:
      program: a `Program`, or the text of one.
      where: a `Box`, or Google's name of a slice in our table, such as "v5p-8".
      part_of: as for `read`.

    Raises:
      UserError: the program is for another number of chips, or there's no such slice.
      ValueError: the text isn't a scheduled program.
    """
    if isinstance(program, str):
        program = Program(program)
    if isinstance(where, str):
        where = box_of(where)
    chips = math.prod(where.shape)
    if program.chips != chips:
        raise UserError(f"the program is for {program.chips} chips, the slice has {chips}")
    return play(read(program, part_of), where)
