"""What a chip and a slice can do: cycles, links, and the time of one collective.

Clock, peak and bandwidth are the vendor's. The shape of the links is the scaling book's (Austin et
al., "How to Scale Your Model", https://jax-ml.github.io/scaling-book/tpus). What's measured is how
much of them a program reaches: `COPY` of the memory's bandwidth, `LINK` of the links, and `SNAKE`
of the links of one shape of slice.
"""

import functools
import math
import re
from collections import Counter
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
PER_CYCLE = {
    "v5p": 2 * 4 * 128 * 128 * 2,
    "v5e": 4 * 128 * 128 * 2,
    "v6e": 2 * 256 * 256 * 4,
}
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
# and 54 GB/s. A ring with wrap-around reaches 95% of both directions (the scaling book's 8 x 16),
# so this is what the missing links cost. On a v5p of 2 x 2 x 1 the text names
# "2DAllGatherOnMajorDim", along both dimensions.
SNAKE = {
    "all-gather": 0.67,
    "reduce-scatter": 1.25,
    "all-reduce": 1.25,
}

AXES = "xyz"  # the names of a slice's dimensions
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
      chip: a name of `tables.hardware.CHIPS`.
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
            raise UserError(
                f"nothing here knows the clock of a {self.chip}, so no program can be "
                "timed on it. Give its row in tables/hardware.py a clock, or add its "
                "operations a cycle to PER_CYCLE in tpu_time/links.py."
            )
        return self.spec.flops / PER_CYCLE[self.chip]

    @functools.cached_property
    def places(self) -> np.ndarray:
        """[chips, dimensions] coordinates by partition."""
        dimensions = len(self.shape)
        if self.coordinates:
            return np.array(self.coordinates)[:, :dimensions]
        slowest_first = self.shape[::-1]
        grid = np.indices(slowest_first).reshape(dimensions, -1)
        return grid[::-1].T

    def columns(self, group: Group) -> list[np.ndarray]:
        """The different coordinates that a group's chips have, sorted, dimension by dimension."""
        places = self.places[list(group)]
        return [np.unique(column) for column in places.T]

    def extents(self, group: Group) -> list[int]:
        """How many different coordinates a group's chips have, dimension by dimension."""
        return [len(column) for column in self.columns(group)]

    def ring(self, dimension: int) -> bool:
        """Whether the chips along a dimension are closed to a ring (scaling book, part 2).

        Raises:
          UserError: nothing here knows how chips of this kind are wired.
        """
        if self.torus == 3:  # by optical switches between full cubes
            return all(size % 4 == 0 for size in self.shape)
        whole_pod = 16  # chips along a side, in two dimensions
        return self.shape[dimension] == whole_pod

    @property
    def torus(self) -> int:
        """Dimensions of the torus that chips of this kind are wired to: 2 or 3.

        Raises:
          UserError: nothing here knows it.
        """
        if not self.spec.torus:
            raise UserError(
                f"nothing here knows how {self.chip} chips are wired, so no transfer between them "
                "can be timed. Give their row in tables/hardware.py a torus: 2 or 3 dimensions."
            )
        return self.spec.torus

    def snakes(self, group: Group) -> bool:
        """Whether collectives of a group go through its 2 x 4 chips one by one (`SNAKE`)."""
        if self.torus != 2 or len(group) != 8:
            return False
        extents = sorted(self.extents(group))
        return extents[-2:] == [2, 4]

    def reach(self, group: Group) -> Reach | None:
        """What the links bring to a group's worst placed chip.

        A chip has one link to each neighbor: at the corner of a box one along each of the box's
        dimensions, in a ring two. None if the chips don't fill a box of neighbors.
        """
        extents = []
        for column in self.columns(group):
            steps = np.diff(column)
            if steps.max(initial=1) > 1:  # there's a gap
                return None
            extents.append(len(column))
        if math.prod(extents) != len(group):
            return None

        names = []
        links = 0
        hops = 0
        for dimension, extent in enumerate(extents):
            if extent == 1:
                continue
            names.append(AXES[dimension])
            is_whole = extent == self.shape[dimension]
            if is_whole and self.ring(dimension):
                hops += extent // 2
                links += 2 if extent > 2 else 1
            else:
                hops += extent - 1
                links += 1
        speed = links * self.link
        return Reach(tuple(names), speed, hops)

    @property
    def link(self) -> float:
        """Bytes a second over one link in one direction, as far as collectives reach it."""
        return LINK * self.spec.link_bandwidth


def box_of(name: str) -> Box:
    """The `Box` of a slice by Google's name, such as "v5p-8".

    Raises:
      UserError: it's no slice, or the table of slices doesn't say how its chips stand.
    """
    named = slice_of(name)
    if not named.topology:
        raise UserError(
            f"nothing here knows how the chips of a {name} stand, so no program can be timed on "
            "it. Give it a row with a topology in SLICES in tables/hardware.py, or pass a Box."
        )
    sizes = [int(size) for size in named.topology.split("x")]
    sizes.append(1)  # a slice of a two-dimensional torus has no z
    shape = tuple(sizes[:3])
    return Box(named.kind, shape)


# ── groups, as XLA writes them ──


def _sizes(text: str) -> list[int]:
    """The numbers of `4,2`."""
    return [int(size) for size in text.split(",")]


def _grid(sizes: str, order: str | None) -> np.ndarray:
    """XLA's `[2,4]T(1,0)`: count up from 0 in these sizes, then put the axes into this order."""
    extents = _sizes(sizes)
    count = math.prod(extents)
    grid = np.arange(count).reshape(extents)
    if order:
        grid = grid.transpose(_sizes(order))
    return grid


def _groups_of_mesh(text: str, chips: int) -> list[list[int]]:
    """`mesh['a'=2,'b'=2] {'b'}`, where `, device_ids=([2,2]T(1,0))` may stand before the brace.

    The partitions of one group have the same place along all axes that the brace doesn't name.
    """
    mesh, _, rest = text.partition("]")
    axes = re.findall(r"'([^']+)'=(\d+)", mesh)  # name and extent of each
    start = rest.index("{")
    named = re.findall(r"'([^']+)'", rest[start:])
    ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", rest)
    grid = np.arange(chips)
    if ids:
        grid = _grid(ids[1], ids[2])

    extents = []
    inside = []
    outside = []
    members = 1
    for axis, (name, size) in enumerate(axes):
        extent = int(size)
        extents.append(extent)
        if name in named:
            inside.append(axis)
            members *= extent
        else:
            outside.append(axis)
    grid = grid.reshape(extents).transpose(outside + inside)
    return grid.reshape(-1, members).tolist()


def _groups_of_iota(text: str) -> list[list[int]]:
    """`[4,2]<=[2,4]T(1,0)`: count up, reshape, transpose, reshape."""
    match = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        raise ValueError(f"groups in a notation that we don't know: {text[:80]!r}")
    text_of_shape, sizes, order = match.groups()
    shape = _sizes(text_of_shape)
    grid = _grid(sizes, order)
    return grid.reshape(shape).tolist()


def read_groups(text: str, chips: int) -> list[list[int]]:
    """Groups of partitions from any of XLA's notations.

    There are three: `{{0,1},{2,3}}`, where `{}` means one group of all; `[2,2]<=[4]` or
    `[4,2]<=[2,4]T(1,0)`; and `mesh['a'=2,'b'=2] {'b'}`, where `, device_ids=([2,2]T(1,0))` may
    stand before the last brace.

    Args:
      text: what stands behind `replica_groups=`.
      chips: of the program.

    Raises:
      ValueError: the text is in none of them.
    """
    if text.startswith("mesh["):
        return _groups_of_mesh(text, chips)
    if text.startswith("["):
        return _groups_of_iota(text)
    listed = re.findall(r"\{([\d,]+)\}", text)
    if not listed:
        everybody = list(range(chips))
        return [everybody]
    return [_sizes(group) for group in listed]


# ── the time of one collective ──


class Link(NamedTuple):
    """A chip's link to one of its neighbors, in the direction that leads there."""

    chip: tuple[int, ...]  # coordinates
    dimension: int
    step: int  # 1, or -1

    @property
    def way(self) -> str:
        """The direction's name, such as "x+"."""
        sign = "+" if self.step > 0 else "-"
        return AXES[self.dimension] + sign


def _steps(start: int, goal: int, extent: int, is_ring: bool) -> int:
    """Steps from start to goal along one dimension, with a sign; the short way round a ring."""
    steps = goal - start
    if is_ring and abs(steps) > extent / 2:
        steps -= int(math.copysign(extent, steps))
    return steps


def _route(source: int, target: int, where: Box) -> list[Link]:
    """The links from one partition's chip to another's: along x, then y, then z."""
    here: list[int] = where.places[source].tolist()
    goal: list[int] = where.places[target].tolist()
    route = []
    for dimension, extent in enumerate(where.shape):
        is_ring = where.ring(dimension)
        steps = _steps(here[dimension], goal[dimension], extent, is_ring)
        step = 1 if steps > 0 else -1
        for _ in range(abs(steps)):
            link = Link(tuple(here), dimension, step)
            route.append(link)
            reached = here[dimension] + step
            here[dimension] = reached % extent
    return route


def send_time(size: float, pairs: Sequence[Sequence[int]], where: Box) -> Transfer:
    """The time of a collective-permute: each pair's bytes take the shortest way.

    Every pair goes along x, then y, then z; the fullest link decides.

    Args:
      size: bytes that each pair sends.
      pairs: (source, target) partitions.
      where: the slice.
    """
    messages: Counter[Link] = Counter()  # that each link carries
    farthest = 0
    for source, target in pairs:
        route = _route(source, target, where)
        messages.update(route)
        farthest = max(farthest, len(route))

    fullest = max(messages.values(), default=0)
    sending = size * fullest / where.link
    traveling = farthest * HOP
    ways = {link.way for link in messages}
    in_order = tuple(sorted(ways))
    return Transfer(max(sending, traveling), in_order)


def collective_time(kind: str, size: float, groups: Sequence[Group], where: Box) -> Transfer:
    """Seconds that a collective needs the links, and the dimensions whose links it uses.

    Gathering V bytes over n chips brings (n - 1) / n V into each of them; a reduce-scatter sends as
    much, an all-reduce is both. An all-to-all is limited by the cut through the longest dimension.
    Scaling book, https://jax-ml.github.io/scaling-book/sharding. Groups that don't fill a box of
    neighbors pass their pieces around, all groups at once over the links that lie in between.

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
        if reach is None:
            once = _pass_around(size, groups, where)
            times = rounds * (members - 1)
            return Transfer(times * once.seconds, once.links)
        reaches.append(reach)

    slowest = min(reaches, key=lambda reach: reach.speed)
    speed = slowest.speed
    if kind in SNAKE and where.snakes(groups[0]):
        speed = SNAKE[kind] * where.spec.link_bandwidth
    if kind == "all-to-all":
        longest = max(where.extents(groups[0]))
        links_of_the_cut = members / longest
        speed_of_the_cut = links_of_the_cut * speed / len(slowest.dimensions)
        seconds = size * members / 4 / speed_of_the_cut
    else:
        arriving = (members - 1) / members * size
        seconds = arriving / speed
    seconds = max(seconds, slowest.hops * HOP)
    return Transfer(rounds * seconds, slowest.dimensions)


def _pass_around(size: float, groups: Sequence[Group], where: Box) -> Transfer:
    """Each chip hands one piece to the next of its group, all groups at once."""
    pairs = []
    for group in groups:
        before = group[-1]
        for partition in group:
            pairs.append((before, partition))
            before = partition
    piece = size / len(groups[0])
    return send_time(piece, pairs, where)
