"""Neural cellular automata as training data: films, their tokens, and two guessers to compare with.

Dynamics, tokens and filter follow arXiv 2603.10055 and its published code, at our size (12).
Letters in shape comments: R rules, F frames, H cells a side, D states, T tokens.
"""

import functools
import gzip
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CHANNELS, HIDDEN = 4, 16               # of the network that is a rule
PATCH = 2                              # cells a side
FRAME_START, FRAME_END, FIRST = 1, 2, 3  # ids; 0 is padding, patch p is FIRST + p


@dataclass(frozen=True)
class World:
    """Everything that a film depends on, besides its seed and its number."""

    states: int = 2
    side: int = 6
    burn_in: int = 10         # frames that are computed and thrown away
    frames: int = 11
    band: tuple[int, int] = (60, 90)  # percentiles of compressibility that are kept

    @property
    def frame_tokens(self) -> int:
        """Tokens of one frame: its patches and two marks."""
        return (self.side // PATCH) ** 2 + 2

    @property
    def film_tokens(self) -> int:
        """Tokens of one film: a row."""
        return self.frames * self.frame_tokens

    @property
    def vocabulary(self) -> int:
        """Ids in use, padding and marks included."""
        return FIRST + self.states ** (PATCH * PATCH)


# -- Automata -------------------------------------------------------------------------------------

class Rule(NamedTuple):
    """The weights of one update rule; Flax's default biases are zero and left out."""

    kernel: jax.Array  # [3, 3, D, CHANNELS]
    hidden: jax.Array  # [CHANNELS, HIDDEN]
    out: jax.Array     # [HIDDEN, D]


def draw_rule(key: jax.Array, states: int) -> Rule:
    """A random rule, each matrix from Flax's default initializer."""
    draw = jax.nn.initializers.lecun_normal()
    kernel_key, hidden_key, out_key = jax.random.split(key, 3)
    kernel = draw(kernel_key, (3, 3, states, CHANNELS))
    hidden = draw(hidden_key, (CHANNELS, HIDDEN))
    out = draw(out_key, (HIDDEN, states))
    return Rule(kernel, hidden, out)


def next_frame(rule: Rule, cells: jax.Array) -> jax.Array:
    """One step of all cells at once. [H, H] int -> [H, H] int

    A one-hot 3 x 3 convolution is a sum of nine rows of the kernel, one for each neighbor's state.
    `jnp.roll` joins the edges: the cells live on a torus. The likeliest state wins.
    """
    total = jnp.zeros((*cells.shape, CHANNELS))
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            neighbor = jnp.roll(cells, (-down, -right), (0, 1))
            total += rule.kernel[down + 1, right + 1][neighbor]
    hidden = jax.nn.relu(total @ rule.hidden)
    likeliest = jnp.argmax(hidden @ rule.out, -1)
    return likeliest.astype(cells.dtype)


def first_frame(key: jax.Array, world: World) -> jax.Array:
    """Independent cells; how likely each state is, is drawn first. [H, H] int32"""
    odds_key, cells_key = jax.random.split(key)
    logits = jax.random.normal(odds_key, (world.states,))
    shape = (world.side, world.side)
    return jax.random.categorical(cells_key, logits, shape=shape).astype(jnp.int32)


def film(rule: Rule, cells: jax.Array, world: World) -> jax.Array:
    """The frames after the burn-in. [F, H, H]"""
    def advance(cells, _):
        return next_frame(rule, cells), cells

    _, frames = jax.lax.scan(advance, cells, None, world.burn_in + world.frames)
    return frames[world.burn_in:]


@functools.partial(jax.jit, static_argnames=("count", "world"))
def openings(seed: int, first: int, count: int, world: World) -> tuple[Rule, jax.Array]:
    """Rules and first frames of the films numbered `first` to `first + count - 1` of a seed."""
    def opening(number):
        key = jax.random.fold_in(jax.random.key(seed), number)
        rule_key, cells_key = jax.random.split(key)
        return draw_rule(rule_key, world.states), first_frame(cells_key, world)

    return jax.vmap(opening)(first + jnp.arange(count))


@functools.partial(jax.jit, static_argnames="world")
def films(rules: Rule, cells: jax.Array, world: World) -> jax.Array:
    """One film for every rule, all at once. [R, F, H, H] uint8"""
    film_of = functools.partial(film, world=world)
    return jax.vmap(film_of)(rules, cells).astype(jnp.uint8)


# -- Tokens ---------------------------------------------------------------------------------------

def patches(frames: np.ndarray, states: int) -> np.ndarray:
    """2 x 2 patches as numbers in base `states`, row by row. [..., H, H] -> [..., (H/2)²] int32"""
    *outer, height, width = frames.shape
    down, right = height // PATCH, width // PATCH
    cut = frames.reshape(*outer, down, PATCH, right, PATCH).astype(np.int32)
    cells = np.moveaxis(cut, -2, -3).reshape(*outer, down * right, PATCH * PATCH)
    powers = np.arange(PATCH * PATCH)[::-1]
    place_values = states ** powers
    return cells @ place_values.astype(np.int32)


def rows(frames: np.ndarray, states: int) -> np.ndarray:
    """Films as token rows: every frame between its two marks. [R, F, H, H] -> [R, T] int32"""
    of_patches = FIRST + patches(frames, states)
    ids = np.pad(of_patches, ((0, 0), (0, 0), (1, 1)))
    ids[..., 0] = FRAME_START
    ids[..., -1] = FRAME_END
    return ids.reshape(len(ids), -1)


def complexity(frames: np.ndarray, world: World) -> np.ndarray:
    """Compressed over raw size of every film, as the paper measures it. [R]

    That is gzip, level 9, of its patches as int32.
    """
    scores = []
    for ids in patches(frames, world.states):
        raw = ids.tobytes()
        compressed = gzip.compress(raw, 9, mtime=0)
        scores.append(len(compressed) / len(raw))
    return np.array(scores)


def shuffled(frames: np.ndarray, seed: int) -> np.ndarray:
    """The same frames of every film in another order: the statistics stay, the dynamics go."""
    numbers = np.tile(np.arange(frames.shape[1]), (len(frames), 1))
    order = np.random.default_rng(seed).permuted(numbers, axis=1)
    return np.take_along_axis(frames, order[:, :, None, None], axis=1)


@functools.lru_cache(16)
def kept_films(seed: int, count: int, world: World, chunk: int = 2048) -> np.ndarray:
    """`count` films inside the band of the first chunk's percentiles. [count, F, H, H] uint8"""
    parts = []
    band = None
    first = kept = 0
    while kept < count:
        rules, cells = openings(seed, first, chunk, world)
        frames = np.asarray(films(rules, cells, world))
        scores = complexity(frames, world)
        if band is None:
            band = np.percentile(scores, world.band)
        low, high = band
        is_inside = (scores >= low) & (scores <= high)
        parts.append(frames[is_inside])
        kept += is_inside.sum()
        first += chunk
    return np.concatenate(parts)[:count]


def brackets(count: int, length: int, kinds: int, seed: int) -> np.ndarray:
    """Rows of a Dyck language: balanced brackets of several kinds, closed in order. [count, length]

    Wherever both are allowed, half of the brackets open. A row of even length ends balanced.
    Opening bracket k is id FIRST + k, its closing one FIRST + kinds + k.
    """
    draw = np.random.default_rng(seed)
    numbers = np.arange(count)
    ids, stack = np.empty((2, count, length), np.int32)
    depth = np.zeros(count, int)
    for place in range(length):
        can_still_close = depth < length - place
        may_open = draw.random(count) < 0.5
        opens = (depth == 0) | can_still_close & may_open
        depth -= ~opens
        on_top = stack[numbers, depth]  # a closing bracket is of this kind
        kind = np.where(opens, draw.integers(kinds, size=count), on_top)
        stack[numbers, depth] = kind
        ids[:, place] = FIRST + kind + kinds * ~opens
        depth += opens
    return ids


# -- Two guessers, neither of them trained: the scale of the gate ----------------------------------

def counting(frames: np.ndarray, world: World) -> float:
    """Nats per token of a guesser that counts a film's patches and has no idea of time.

    After n patches, of which c were p, it gives p the odds (c + 8 · s) / (n + 8), where s is the
    share of p in all these films. It knows the marks; the first frame is counted and not guessed.
    frames [R, F, H, H]
    """
    patch = patches(frames, world.states)
    numbers = np.arange(len(frames))
    flat = patch.reshape(len(frames), -1)
    share = np.bincount(flat.ravel()) / flat.size
    counts = np.zeros((len(frames), len(share)))
    cost = 0.0
    for place, seen in enumerate(flat.T):
        in_first_frame = place < patch.shape[-1]
        if not in_first_frame:
            times_seen = counts[numbers, seen]
            odds = (times_seen + 8 * share[seen]) / (place + 8)
            cost -= np.log(odds).sum()
        counts[numbers, seen] += 1
    return float(cost / guessed(frames, world))


def looking_up(frames: np.ndarray, world: World) -> float:
    """Nats per token of a guesser that looks up what like neighborhoods became.

    frames [R, F, H, H]

    For each cell it compares the 3 x 3 neighborhood of a frame before with all those of the film
    so far. One of which m of the nine cells are equal counts e^(2.5 · (m - 9)) for the state that
    its middle cell took; 0.03 times the share of each state so far is added. The two constants
    were chosen on 15 films of a seed that is not used otherwise.
    """
    cost = 0.0
    cells = np.arange(world.side ** 2)
    for neighbors, film_ in zip(_neighborhoods(frames, world), frames, strict=True):
        states = film_.reshape(len(film_), -1)  # [F, H²]
        for now in range(1, len(states)):
            odds = _odds_by_likeness(neighbors, states, now, world)
            of_what_came = odds[cells, states[now]]
            cost -= np.log(of_what_came).sum()
    return float(cost / guessed(frames, world))


def _neighborhoods(frames: np.ndarray, world: World) -> np.ndarray:
    """The one-hot states of each cell's 3 x 3 neighborhood. [R, F, H, H] -> [R, F, H², 9 · D]"""
    shifted = []
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            shifted.append(np.roll(frames, (-down, -right), (2, 3)))
    near = np.stack(shifted, -1)  # [R, F, H, H, 9]
    seen = (near[..., None] == np.arange(world.states)).astype(np.float32)
    return seen.reshape(*frames.shape[:2], world.side ** 2, -1)


def _odds_by_likeness(neighbors: np.ndarray, states: np.ndarray, now: int,
                      world: World) -> np.ndarray:
    """What `looking_up` gives each state of each cell of frame `now` of a film. [H², D]"""
    share = np.bincount(states[:now].ravel(), minlength=world.states) + 1.0
    odds = np.tile(0.03 * share / share.sum(), (states.shape[1], 1))

    past = neighbors[:now - 1].reshape(-1, neighbors.shape[-1])
    equal_cells = neighbors[now - 1] @ past.T
    likeness = np.exp(2.5 * (equal_cells - 9))
    became = states[1:now].ravel()
    is_state = became[:, None] == np.arange(world.states)
    odds += likeness @ is_state
    return odds / odds.sum(1, keepdims=True)


def guessed(frames: np.ndarray, world: World) -> int:
    """Tokens of films without their first frames."""
    return len(frames) * (world.frames - 1) * world.frame_tokens
