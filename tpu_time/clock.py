"""A tape played on a slice: a timeline, and how long the program takes."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tables.errors import UserError
from tpu_time.hlo import Program
from tpu_time.links import COPY, Box, Transfer, box_of, collective_time, send_time
from tpu_time.tape import (
    About, Branches, Compute, Copy, Job, Loop, PartOf, Send, Tape, Wait, everything_is_other, read)

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
      compute: the chip works.
      exposed: it waits for the links.
      copies: it waits for its own asynchronous copies.
      clock: the sum of the three, also where it is not to be trusted.
      unknown: of what has no known cost, the most bytes first.
      moved: the same of what has no cycles but only moves bytes: it takes them at the HBM's speed.
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
        return 1.0 if self.opaque else max(self.unknown_flops, self.unknown_bytes)

    @property
    def trusted(self) -> bool:
        """Is so little unknown that the time means something?"""
        return self.unknown_share <= TRUSTED

    @property
    def seconds(self) -> float | None:
        """The whole, or None where it isn't to be trusted."""
        return self.clock if self.trusted else None


@dataclass
class Pending:
    """Something asynchronous that has been started."""

    end: float
    opcode: str
    about: dict[str, Any]  # of its events


def _about(about: About) -> dict[str, Any]:
    """An event's fields, from a record's."""
    return about._asdict()


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
        """One execution of a tape that is executed `count` times."""
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
            seconds = min(seconds, record.anywhere / (COPY * spec.bandwidth))
        costs_something = about.flops or about.bytes  # no scalar, and not on the chip alone
        if record.cycles is None and costs_something:
            self._count_unpriced(record, count)
            seconds = about.bytes / spec.bandwidth if record.moves else 0.0
        if record.cycles is None and record.what == "tpu_custom_call":
            self.opaque += 1
        if seconds:
            self.events.append(Event(record.name, record.what, "compute", self.now, seconds, count,
                                     **_about(about)))
            self.now += seconds

    def _count_unpriced(self, record: Compute, count: int) -> None:
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
        start = max([self.now, *(self.busy[way] for way in ways)])
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
        start = self.take_links(seconds, axes)
        about = _about(record.about) | {"bytes": size, "axes": axes}
        kind = record.jobs[0].kind
        self.events.append(Event(record.name, kind, "links", start, seconds, count, **about))
        self.pending[record.key] = Pending(start + seconds, kind, about)
        if record.role == "whole":
            self.wait(record.name, record.key, count)

    def copy(self, record: Copy, count: int) -> None:
        """An asynchronous copy, or a scatter on the SparseCore: what it writes, at HBM's speed."""
        seconds = record.bytes / self.where.spec.bandwidth
        start = self.take_links(seconds, ("HBM",))
        about: dict[str, Any] = {
            "part": "conversions", "direction": record.direction, "bytes": record.bytes}
        self.events.append(Event(record.name, "copy", "copies", start, seconds, count, **about))
        self.pending[record.name] = Pending(start + seconds, "copy", about)

    def wait(self, name: str, key: str, count: int) -> None:
        """Stand still until what was started under a key is done."""
        started = self.pending.pop(key, None)
        if started is None or started.end <= self.now:
            return
        self.events.append(Event(name, started.opcode, "wait", self.now, started.end - self.now,
                                 count, **started.about))
        self.now = started.end

    def loop(self, record: Loop, count: int) -> None:
        """The body once, times its trips: what runs beside it doesn't reach over a turn's end."""
        trips = record.trips
        if trips is None:
            self.unknown.setdefault("while", Totals("while")).count += count
            self.opaque += 1  # nothing can be said about its time
            trips = 1
        start = self.now
        self.run(record.body, count * trips)
        self.now += (self.now - start) * (trips - 1)

    def branches(self, record: Branches, count: int) -> None:
        """A conditional takes as long as its longest branch."""
        start, before = self.now, self.events
        longest: float = start
        kept: list[Event] = []
        for tape in record.tapes:
            self.now, self.events = start, []
            self.run(tape, count)
            if self.now > longest:
                longest, kept = self.now, self.events
        self.now, self.events = longest, before + kept


def _share(part: float, whole: float) -> float:
    return part / max(whole, 1)


def play(tape: Tape, where: Box) -> Prediction:
    """What a tape takes on a slice."""
    clock = Clock(where)
    clock.run(tape)
    unknown = sorted(clock.unknown.values(), key=lambda totals: -totals.bytes)
    moved = sorted(clock.moved.values(), key=lambda totals: -totals.bytes)
    sums: dict[str, float] = defaultdict(float)
    for event in clock.events:
        if event.track == "wait" and event.opcode == "copy":
            sums["copies"] += event.seconds * event.count
        elif event.track in ("compute", "wait"):
            sums[event.track] += event.seconds * event.count
    return Prediction(
        clock=clock.now, compute=sums["compute"], exposed=sums["wait"], copies=sums["copies"],
        unknown=unknown, moved=moved,
        unknown_flops=_share(sum(totals.flops for totals in unknown), clock.flops),
        unknown_bytes=_share(sum(totals.bytes for totals in unknown), clock.bytes),
        flops=clock.flops, bytes=clock.bytes, opaque=clock.opaque, events=clock.events)


def predict(program: Program | str, where: Box | str,
            part_of: PartOf = everything_is_other) -> Prediction:
    """Say how long a program takes on a slice.

    Args:
      program: a `Program`, or the text of one.
      where: a `Box`, or Google's name of one that is in the table: "v5p-8".
      part_of: as for `read`.

    Raises:
      UserError: the program is not for so many chips, or there's no such slice.
      ValueError: the text is no scheduled program.
    """
    if isinstance(program, str):
        program = Program(program)
    if isinstance(where, str):
        where = box_of(where)
    chips = math.prod(where.shape)
    if program.chips != chips:
        raise UserError(f"the program is for {program.chips} chips, the slice has {chips}")
    return play(read(program, part_of), where)
