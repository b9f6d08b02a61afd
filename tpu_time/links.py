"""What a chip and a slice can do: cycles, links, and the time of one collective.

Clock, peak and bandwidth are the vendor's. The shape of the links is the scaling book's (Austin et
al., "How to Scale Your Model", https://jax-ml.github.io/scaling-book/tpus). Two shares of them are
measured, `COPY` and `LINK`; `SNAKE` is for one shape of slice.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tables.errors import UserError
from tables.hardware import Chip, chip, slice_of

# Operations a cycle, two for multiply and add: cores x matrix units x cells x 2. v5p has 2 cores
# with 4 units of 128 x 128 (459e12 of them a second make 1.75 GHz), v5e one such core. v6e has two
# units of 256 x 256, and the compiler counts two products a cell and cycle: it gives a product of
# two 8192 x 8192 matrices 369,000 operations a cycle, more than one product a cell would allow.
PER_CYCLE = {"v5p": 2 * 4 * 128 * 128 * 2, "v5e": 4 * 128 * 128 * 2, "v6e": 2 * 256 * 256 * 4}
HOP = 1e-6  # seconds that a hop over a link takes at least (scaling book, "A note on ICI latency")
# What a plain copy reaches of the HBM's speed: 33.5 MB copied on a v6e in 0.04936 ms by the trace
# (AI-Hypercomputer/tpu-recipes, microbenchmarks/README.md). An instruction that the back end gives
# no cost model is charged two to three times its bytes in cycles; it gets this speed at least.
COPY = 0.83
# What a collective reaches of its links: psum over two and four chips of a v5e-4, in loops with and
# without it, 64 times 67 MB and 2,048 times 2 MB: 0.89, 0.91, 0.89 (deep-diver/tunix-accel,
# 01-CCE/data/mesh_pathology_tpu_v5e_synthetic/results.csv, rows projection_collective_loop and
# chunked_matmul_loop; medians of ten).
LINK = 0.90
# What all eight chips of a v5e or v6e of 2 x 4 reach, in links of one chip. A line of four has no
# link from its end to its beginning, so a collective can't send along both dimensions as on 2 x 2,
# or both ways round as in a ring of 16. The compiler says so: its text names one ring through the
# eight chips ("1DAllGatherNonMajorDim"; for sums "UniDirection1DRingStrategy", "colors:2").
# Measured on a v5litepod-8 (AI-Hypercomputer/jetstream-pytorch, pull request 168): gathers of 2 and
# 1 GiB took 68.3 and 34.5 ms, less a copy of the result 30 of 45 GB/s; sums of 256 and 128 MiB 57
# and 54 GB/s. A ring with wrap-around reaches 95 % of both directions (the scaling book's 8 x 16),
# so this is what the missing links cost. On a v5p of 2 x 2 x 1 the text names
# "2DAllGatherOnMajorDim", along both dimensions.
SNAKE = {"all-gather": 0.67, "reduce-scatter": 1.25, "all-reduce": 1.25}

Group = Sequence[int]  # partitions of the program that talk to each other


class Reach(NamedTuple):
    """What the links bring to the worst placed chip of a group."""

    dimensions: tuple[str, ...]  # whose links are used: ("x", "y")
    speed: float  # bytes a second into that chip
    hops: int  # that the farthest piece travels


class Transfer(NamedTuple):
    """How long a collective needs the links, and which."""

    seconds: float
    links: tuple[str, ...]  # "x": both directions along x; "x+", "y-": one direction


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
    shape: tuple[int, ...]
    coordinates: tuple[tuple[int, ...], ...] = ()

    @property
    def spec(self) -> Chip:
        """The `Chip` with peaks, HBM and links, of `tables.hardware`."""
        return chip(self.chip)

    @property
    def clock(self) -> float:
        """Cycles a second: the vendor's, or peak over operations a cycle.

        Raises:
          UserError: neither is known of this kind of chip, so no program can be timed on it.
        """
        if self.spec.clock:
            return self.spec.clock
        if self.chip not in PER_CYCLE:
            raise UserError(f"nothing here knows the clock of a {self.chip}, so no program can be "
                            "timed on it. Give its row in tables/hardware.py a clock, or add its "
                            "operations a cycle to PER_CYCLE in tpu_time/links.py.")
        return self.spec.flops / PER_CYCLE[self.chip]

    @functools.cached_property
    def places(self) -> np.ndarray:
        """[chips, dimensions] coordinates by partition."""
        if self.coordinates:
            return np.array(self.coordinates)[:, :len(self.shape)]
        grid = np.indices(self.shape[::-1]).reshape(len(self.shape), -1)
        return grid[::-1].T

    def ring(self, dimension: int) -> bool:
        """Whether the chips along a dimension are closed to a ring (scaling book, part 2)."""
        if self.chip == "v5p":  # by optical switches between full cubes
            return all(size % 4 == 0 for size in self.shape)
        return self.shape[dimension] == 16  # v5e and v6e: where it is the whole pod's

    def snakes(self, group: Group) -> bool:
        """Whether collectives of a group go through its 2 x 4 chips one by one (`SNAKE`)."""
        extents = [len(np.unique(column)) for column in self.places[list(group)].T]
        return self.chip in ("v5e", "v6e") and sorted(extents)[-2:] == [2, 4] and len(group) == 8

    def reach(self, group: Group) -> Reach | None:
        """What the links bring to a group's worst placed chip.

        A chip has one link to each neighbour: at the corner of a box one along each of the box's
        dimensions, in a ring two. None if the chips don't fill a box of neighbours.
        """
        extents = []
        for column in self.places[list(group)].T:
            values = np.unique(column)
            if np.diff(values).max(initial=1) > 1:
                return None
            extents.append(len(values))
        if math.prod(extents) != len(group):
            return None
        names, links, hops = [], 0, 0
        for dimension, extent in enumerate(extents):
            if extent == 1:
                continue
            names.append("xyz"[dimension])
            closed = extent == self.shape[dimension] and self.ring(dimension)
            links += 2 if closed and extent > 2 else 1
            hops += extent // 2 if closed else extent - 1
        return Reach(tuple(names), links * self.link, hops)

    @property
    def link(self) -> float:
        """Bytes a second over one link in one direction, as far as collectives reach it."""
        return LINK * self.spec.link_bandwidth


def box_of(name: str) -> Box:
    """The `Box` of a slice by Google's name, such as "v5p-8".

    Raises:
      UserError: the table of slices has no such name.
    """
    named = slice_of(name)
    sizes = [int(size) for size in named.topology.split("x")]
    return Box(named.kind, (*sizes, 1)[:3])


# ── groups, as XLA writes them ──


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _groups_of_mesh(text: str, chips: int) -> list[list[int]]:
    """`mesh['a'=2,'b'=2] {'b'}`, where `, device_ids=([2,2]T(1,0))` may stand before the brace."""
    head, _, tail = text.partition("]")
    axes = re.findall(r"'([^']+)'=(\d+)", head)
    wanted = re.findall(r"'([^']+)'", tail[tail.index("{"):])
    grid = np.arange(chips)
    ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", tail)
    if ids:
        grid = grid.reshape(_sizes(ids[1]))
        if ids[2]:
            grid = grid.transpose(_sizes(ids[2]))
    extents = [int(size) for _, size in axes]
    inside = [place for place, (name, _) in enumerate(axes) if name in wanted]
    outside = [place for place in range(len(axes)) if place not in inside]
    members = math.prod(extents[place] for place in inside)
    return grid.reshape(extents).transpose(outside + inside).reshape(-1, members).tolist()


def _groups_of_iota(text: str) -> list[list[int]]:
    """`[4,2]<=[2,4]T(1,0)`: count up, reshape, transpose, reshape."""
    match = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        raise ValueError(f"groups in a notation that is not known: {text[:80]!r}")
    shape, source, order = match.groups()
    source_sizes = _sizes(source)
    grid = np.arange(math.prod(source_sizes)).reshape(source_sizes)
    if order:
        grid = grid.transpose(_sizes(order))
    return grid.reshape(_sizes(shape)).tolist()


def read_groups(text: str, chips: int) -> list[list[int]]:
    """Groups of partitions from any of XLA's notations.

    `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[4,2]<=[2,4]T(1,0)`, `mesh['a'=2,'b'=2] {'b'}`, where
    `, device_ids=([2,2]T(1,0))` may stand before the last brace; `{}` means all.

    Args:
      text: what stands behind `replica_groups=`.
      chips: of the program.
    """
    if text.startswith("mesh["):
        return _groups_of_mesh(text, chips)
    if text.startswith("["):
        return _groups_of_iota(text)
    listed = [_sizes(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    return listed or [list(range(chips))]


# ── the time of one collective ──


def _way(start: int, goal: int, extent: int, ring: bool) -> int:
    """Steps from start to goal along one dimension, with a sign; the short way round a ring."""
    way = goal - start
    if ring and abs(way) > extent / 2:
        way -= int(math.copysign(extent, way))
    return way


def send_time(size: float, pairs: Sequence[Sequence[int]], where: Box) -> Transfer:
    """The time of a collective-permute: each pair's bytes take the shortest way.

    Every pair goes along x, then y, then z; the fullest link decides.

    Args:
      size: bytes that each pair sends.
      pairs: (source, target) partitions.
      where: the slice.
    """
    load: dict[tuple, int] = defaultdict(int)  # (a chip's coordinates, dimension, step): messages
    names = set()
    farthest = 0
    for source, target in pairs:
        here = [int(place) for place in where.places[source]]
        goal = [int(place) for place in where.places[target]]
        hops = 0
        for dimension, extent in enumerate(where.shape):
            way = _way(here[dimension], goal[dimension], extent, where.ring(dimension))
            step = 1 if way > 0 else -1
            for _ in range(abs(way)):
                load[(*here, dimension, step)] += 1
                here[dimension] = (here[dimension] + step) % extent
                names.add("xyz"[dimension] + ("+" if step > 0 else "-"))
                hops += 1
        farthest = max(farthest, hops)
    fullest = max(load.values(), default=0)
    seconds = max(size * fullest / where.link, farthest * HOP)
    return Transfer(seconds, tuple(sorted(names)))


def collective_time(kind: str, size: float, groups: Sequence[Group], where: Box) -> Transfer:
    """Seconds that a collective needs the links, and the dimensions whose links it uses.

    Gathering V bytes over n chips brings (n - 1) / n V into each of them; a reduce-scatter sends as
    much, an all-reduce is both. An all-to-all is limited by the cut through the longest dimension.
    Scaling book, https://jax-ml.github.io/scaling-book/sharding. Groups that fill no box of
    neighbours pass their pieces around, all groups at once over the links that lie in between.

    Args:
      kind: all-gather, reduce-scatter, all-reduce, all-to-all.
      size: bytes: the gathered result, or what one chip puts in.
      groups: lists of partitions.
      where: the slice.
    """
    members = len(groups[0])
    if members < 2:
        return Transfer(0.0, ())
    rounds = 2 if kind == "all-reduce" else 1
    reaches = []
    for group in groups:
        reach = where.reach(group)
        if reach is not None:
            reaches.append(reach)
    if len(reaches) < len(groups):
        pairs = []
        for group in groups:
            for place in range(members):
                pairs.append((group[place - 1], group[place]))
        once = send_time(size / members, pairs, where)
        return Transfer(rounds * (members - 1) * once.seconds, once.links)
    names, speed, hops = min(reaches, key=lambda reach: reach.speed)
    if kind in SNAKE and where.snakes(groups[0]):
        speed = SNAKE[kind] * where.spec.link_bandwidth
    if kind == "all-to-all":
        columns = where.places[list(groups[0])].T
        longest = max(len(np.unique(column)) for column in columns)
        seconds = size * members / 4 / (members / longest * speed / len(names))
    else:
        seconds = (members - 1) / members * size / speed
    return Transfer(rounds * max(seconds, hops * HOP), names)
