"""Neural cellular automata as training data, and the runs that ask whether they help. For 12.

Dynamics, tokens and filter follow arXiv 2603.10055 and its published code, at our size.
Letters in shape comments: R rules, F frames, H cells a side, D states, B rows, T tokens.

    python -m appendix.nca --out FOLDER     the gate, then the comparison; say it again to go on
"""

import argparse
import dataclasses
import functools
import gzip
import importlib.metadata
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import scipy.stats
from flax import nnx
from tunix.models.gemma4.model import Gemma4

from appendix import pretrain
from helpers import gemma
from helpers.run import UserError, digest, write_text

ROOT = Path(__file__).resolve().parent.parent
CHANNELS, HIDDEN = 4, 16               # of the network that is a rule
PATCH = 2                              # cells a side
FRAME_START, FRAME_END, FIRST = 1, 2, 3  # ids; 0 is padding, patch p is FIRST + p


@dataclasses.dataclass(frozen=True)
class World:
    """Everything that a film depends on, besides its seed and its number."""

    states: int = 4
    side: int = 8
    burn_in: int = 10         # frames that are computed and thrown away
    frames: int = 10
    band: tuple = (40, 70)    # percentiles of compressibility that are kept

    @property
    def frame_tokens(self):
        """Tokens of one frame: its patches and two marks."""
        return (self.side // PATCH) ** 2 + 2

    @property
    def film_tokens(self):
        """Tokens of one film: a row."""
        return self.frames * self.frame_tokens

    @property
    def vocabulary(self):
        """Ids in use, padding and marks included."""
        return FIRST + self.states ** (PATCH * PATCH)


# -- Automata -------------------------------------------------------------------------------------

class Rule(NamedTuple):
    """The weights of one update rule; Flax's default biases are zero and left out."""

    kernel: jax.Array  # [3, 3, D, CHANNELS]
    hidden: jax.Array  # [CHANNELS, HIDDEN]
    out: jax.Array     # [HIDDEN, D]


def draw_rule(key, states):
    """A random rule, each matrix from Flax's default initialiser."""
    draw, keys = jax.nn.initializers.lecun_normal(), jax.random.split(key, 3)
    return Rule(draw(keys[0], (3, 3, states, CHANNELS)), draw(keys[1], (CHANNELS, HIDDEN)),
                draw(keys[2], (HIDDEN, states)))


def next_frame(rule, cells):
    """One step of all cells at once. [H, H] int -> [H, H] int

    A one-hot 3 x 3 convolution is a sum of nine rows of the kernel, one for each neighbour's state.
    `jnp.roll` joins the edges: the cells live on a torus. The likeliest state wins.
    """
    total = jnp.zeros((*cells.shape, CHANNELS))
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            neighbour = jnp.roll(cells, (-down, -right), (0, 1))
            total += rule.kernel[down + 1, right + 1][neighbour]
    return jnp.argmax(jax.nn.relu(total @ rule.hidden) @ rule.out, -1).astype(cells.dtype)


def first_frame(key, world):
    """Independent cells; how likely each state is, is drawn first. [H, H] int32"""
    odds, cells = jax.random.split(key)
    logits = jax.random.normal(odds, (world.states,))
    return jax.random.categorical(cells, logits, shape=(world.side, world.side)).astype(jnp.int32)


def film(rule, cells, world):
    """The frames after the burn-in. [F, H, H]"""
    def advance(cells, _):
        return next_frame(rule, cells), cells
    return jax.lax.scan(advance, cells, None, world.burn_in + world.frames)[1][world.burn_in:]


@functools.partial(jax.jit, static_argnames=("count", "world"))
def openings(seed, first, count, world):
    """Rules and first frames of the films numbered `first` to `first + count - 1` of a seed."""
    def one(number):
        rule, cells = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        return draw_rule(rule, world.states), first_frame(cells, world)
    return jax.vmap(one)(first + jnp.arange(count))


@functools.partial(jax.jit, static_argnames="world")
def films(rules, cells, world):
    """One film for every rule, all at once. [R, F, H, H] uint8"""
    return jax.vmap(lambda rule, start: film(rule, start, world))(rules, cells).astype(jnp.uint8)


# -- Tokens ---------------------------------------------------------------------------------------

def patches(frames, states):
    """2 x 2 patches as numbers in base `states`, row by row. [..., H, H] -> [..., (H/2)²] int32"""
    *outer, height, width = frames.shape
    cut = frames.reshape(*outer, height // PATCH, PATCH, width // PATCH, PATCH).astype(np.int32)
    cells = np.moveaxis(cut, -2, -3).reshape(*outer, -1, PATCH * PATCH)
    return cells @ (states ** np.arange(PATCH * PATCH)[::-1]).astype(np.int32)


def cells_of(ids, world):
    """The films of token rows: what `rows` was given. [R, T] -> [R, F, H, H]"""
    patch = ids.reshape(len(ids), -1, world.frame_tokens)[:, :, 1:-1] - FIRST
    digits = patch[..., None] // world.states ** np.arange(PATCH ** 2)[::-1] % world.states
    half = world.side // PATCH
    cells = digits.reshape(*patch.shape[:2], half, half, PATCH, PATCH)
    return np.moveaxis(cells, -2, -3).reshape(*patch.shape[:2], world.side, world.side)


def rows(frames, states):
    """Films as token rows: every frame between its two marks. [R, F, H, H] -> [R, T] int32"""
    ids = np.pad(FIRST + patches(frames, states), ((0, 0), (0, 0), (1, 1)))
    ids[..., 0], ids[..., -1] = FRAME_START, FRAME_END
    return ids.reshape(len(ids), -1)


def complexity(frames, world):
    """Compressed over raw size of every film, as the paper measures it: gzip, level 9, of int32. [R]"""
    raw = [ids.tobytes() for ids in patches(frames, world.states)]
    return np.array([len(gzip.compress(film, 9, mtime=0)) / len(film) for film in raw])


def kept(scores, band):
    """Which films lie in a band of percentiles, and the two scores that bound it."""
    low, high = np.percentile(scores, band)
    return (scores >= low) & (scores <= high), (float(low), float(high))


def shuffled(frames, seed):
    """The same frames of every film in another order: the statistics stay, the dynamics go."""
    numbers = np.tile(np.arange(frames.shape[1]), (len(frames), 1))
    order = np.random.default_rng(seed).permuted(numbers, axis=1)
    return np.take_along_axis(frames, order[:, :, None, None], axis=1)


@functools.lru_cache(4)
def kept_films(seed, count, world, chunk=2048):
    """`count` films inside the band of the first chunk's percentiles. [count, F, H, H] uint8"""
    found, band, first = [], None, 0
    while sum(map(len, found)) < count:
        frames = np.asarray(films(*openings(seed, first, chunk, world), world))
        scores = complexity(frames, world)
        band = band or kept(scores, world.band)[1]
        found.append(frames[(scores >= band[0]) & (scores <= band[1])])
        first += chunk
    return np.concatenate(found)[:count]


def brackets(count, length, kinds, seed, opening=0.5):
    """Rows of a Dyck language: balanced brackets of several kinds, closed in order. [count, length]

    Wherever both are allowed a bracket opens with probability `opening`; a row ends balanced.
    Opening bracket k is id FIRST + k, its closing one FIRST + kinds + k.
    """
    draw, ids = np.random.default_rng(seed), np.empty((count, length), np.int32)
    for row in ids:
        stack = []
        for place in range(length):
            may_open, must_open = len(stack) < length - place, not stack
            if must_open or may_open and draw.random() < opening:
                stack.append(int(draw.integers(kinds)))
                row[place] = FIRST + stack[-1]
            else:
                row[place] = FIRST + kinds + stack.pop()
    return ids


# -- Two guessers, neither of them trained: the scale of the gate ----------------------------------

def counting(ids, world, weight=8):
    """Nats per token of a guesser that counts a film's patches and has no idea of time. ids [R, T]

    After n patches, of which c were p, it gives p the odds (c + `weight` · share of p in all these
    films) / (n + `weight`). It knows the marks; the first frame is counted and not guessed.
    """
    patch = patches(cells_of(ids, world), world.states)
    flat, numbers = patch.reshape(len(ids), -1), np.arange(len(ids))
    share = np.bincount(flat.ravel(), minlength=world.vocabulary) / flat.size
    counts, cost = np.zeros((len(ids), world.vocabulary)), 0.0
    for place, seen in enumerate(flat.T):
        if place >= patch.shape[-1]:
            odds = (counts[numbers, seen] + weight * share[seen]) / (place + weight)
            cost -= np.log(odds).sum()
        counts[numbers, seen] += 1
    return float(cost / ids[:, world.frame_tokens:].size)


def looking_up(ids, world, sharp=2.5, weight=0.03):
    """Nats per token of a guesser that looks up what like neighbourhoods became. ids [R, T]

    For each cell it compares the 3 x 3 neighbourhood of a frame before with all those of the film
    so far. One of which m of the nine cells are equal counts e^(`sharp` · (m - 9)) for the state
    that its middle cell took; `weight` times the share of each state so far is added. The two
    constants were chosen on 15 films of a seed that is not used otherwise.
    """
    frames = cells_of(ids, world)
    near = np.stack([np.roll(frames, (-down, -right), (2, 3))
                     for down in (-1, 0, 1) for right in (-1, 0, 1)], -1)  # [R, F, H, H, 9]
    seen = (near[..., None] == np.arange(world.states)).astype(np.float32)
    seen, cost = seen.reshape(*frames.shape[:2], world.side ** 2, -1), 0.0
    for film_, states in zip(seen, frames.reshape(*frames.shape[:2], -1), strict=True):
        for now in range(1, len(states)):
            share = np.bincount(states[:now].ravel(), minlength=world.states) + 1.0
            odds = np.tile(weight * share / share.sum(), (states.shape[1], 1))
            past, became = film_[:now - 1].reshape(-1, film_.shape[-1]), states[1:now].ravel()
            odds += np.exp(sharp * (film_[now - 1] @ past.T - 9)) @ (
                became[:, None] == np.arange(world.states))
            odds /= odds.sum(1, keepdims=True)
            cost -= np.log(odds[np.arange(states.shape[1]), states[now]]).sum()
    return float(cost / ids[:, world.frame_tokens:].size)


# -- Arms -----------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Plan:
    """What every run shares; a hash of it stands in every stored row."""

    world: World = World()
    first_steps: int = 2_000        # at most; a stage on films ends when it has passed the gate
    first_rate: float = 1e-3        # constant, no decay: never annealed, as in the authors' code
    gate: float = 0.5               # share of the gap between counting and looking up
    rows_per_step: int = 11
    kinds: int = 64                 # of brackets
    text_steps: int = 400
    text_rate: float = 4e-3         # 09's peak, with 09's schedule and decay
    alone: int = 50                 # first text steps in which only embedder and norms learn
    moved: float = 0.3              # rate of attention and MLPs over that of the rest
    tokens_per_step: int = 2_048    # of text, padding included, as in 09
    documents: int = 42_000
    every: int = 50                 # steps between two points of a validation curve
    validation: int = 6             # batches
    seeds: int = 5
    model: tuple = ()               # changes of the tiny config, for tests


# arm: (first stage, parts that are moved). `whole` is the positive control.
BLOCKS = ("attention", "mlp", "norms")
ARMS = {"scratch": ("", ()), "automata": ("automata", BLOCKS), "shuffled": ("shuffled", BLOCKS),
        "text": ("text", BLOCKS), "dyck": ("dyck", BLOCKS),
        "whole": ("text", (*BLOCKS, "embedder"))}
COMPARISONS = (("automata", "text"), ("automata", "shuffled"), ("automata", "dyck"),
               *((arm, "scratch") for arm in ARMS if arm != "scratch"))


def part_of(name):
    """Which part of the model a weight belongs to, by its dotted name.

    Query and key norms set the scale of the attention scores and count as attention; `norms` are
    those around the blocks, the final one, and the layers' output scales.
    """
    if name.startswith("embedder."):
        return "embedder"
    return "attention" if ".attn." in name else "mlp" if ".mlp." in name else "norms"


def named_parts(params):
    """A tree like `params` that names each leaf's part."""
    def name(path, _):
        return part_of(".".join(str(getattr(key, "key", getattr(key, "name", key)))
                                for key in path))
    return jax.tree_util.tree_map_with_path(name, params)


def transfer(fresh, learned, parts):
    """`fresh` weights with those of the named parts from `learned`; the others stay fresh."""
    return jax.tree.map(lambda part, new, old: jnp.array(old if part in parts else new),
                        named_parts(fresh), fresh, learned)


def fresh_model(plan, seed, window=None):
    """(graph, weights) of a new tiny Gemma 4; `window` widens its sliding layers."""
    changes = dict(plan.model) | ({"sliding_window_size": window} if window else {})
    config = gemma.config_from_hf(ROOT / "assets" / "tiny_gemma4", dtype="float32", **changes)
    model = pretrain.initialise(Gemma4(config, rngs=nnx.Rngs(0)), seed)
    gemma.use_block_attention(model, 64)  # a third less time on a CPU than all queries at once
    return nnx.split(model)


@functools.lru_cache(2)
def documents(count, seed=None):
    """Token ids of 09's corpus, or of the documents that another seed makes."""
    from tokenizers import Tokenizer
    sys.path.insert(0, str(ROOT / "data" / "generate"))
    import make
    tokenizer = Tokenizer.from_file(str(ROOT / "assets" / "tiny_gemma4" / "tokenizer.json"))
    texts = list(make.documents(count, **({} if seed is None else {"seed": seed})))
    return pretrain.encode(tokenizer, texts)


def text_batches(plan, seed):
    """(batches of the text stage, other documents for a first stage, validation).

    Validation is the same for all: documents of another seed that the corpus does not contain.
    """
    corpus = documents(plan.documents)
    batches = pretrain.make_batches(corpus, plan.tokens_per_step, np.random.default_rng(seed))
    known = set(map(tuple, corpus))
    others = [ids for ids in documents(300, 77) if tuple(ids) not in known]
    validation = pretrain.make_batches(others, plan.tokens_per_step, np.random.default_rng(0))
    text, rest = batches[:plan.text_steps], batches[plan.text_steps:]
    if not rest:
        raise UserError(f"{plan.documents:,} documents are too few for {plan.text_steps} steps.")
    return text, rest, validation[:plan.validation]


def first_batches(plan, kind, seed):
    """(batches, validation, tokens given before the first guess, ids in use) of a first stage."""
    size, world = plan.rows_per_step, plan.world
    count = (min(plan.first_steps, 1_000) + plan.validation) * size  # four epochs at most
    if kind == "text":
        _, batches, validation = text_batches(plan, seed)
        return batches, validation, 0, None
    if kind == "dyck":
        ids, given = brackets(count, world.film_tokens, plan.kinds, seed), 0
    else:
        frames = kept_films(seed, count, world)
        frames = shuffled(frames, seed) if kind == "shuffled" else frames
        ids, given = rows(frames, world.states), world.frame_tokens
    parts = [ids[i:i + size] for i in range(0, len(ids), size)]
    cut = len(parts) - plan.validation
    order = np.random.default_rng(seed).permutation(cut)
    return [parts[i] for i in order], parts[cut:], given, np.unique(ids)


# -- Runs -----------------------------------------------------------------------------------------

def _train(plan, graph, params, optimizer, batches, validation, given, ids, state, until=None):
    """Train to `until(step, validation loss)`; returns (weights, history). Resumes from `state`."""
    vocabulary = params["embedder"]["input_embedding"].get_value().shape[0]
    known = [*batches, *validation] if ids is None else [ids]  # a masked id costs 1e9 nats
    seen = pretrain.tokens_seen(known, vocabulary)
    step, evaluate = pretrain.make_steps(graph, optimizer, seen, given)
    moments, history = optimizer.init(params), []
    while not history or not until(history[-1]):
        steps = (len(history) // plan.every + 1) * plan.every
        params, history = pretrain.pretrain(params, moments, step, evaluate, batches, validation,
                                            steps, state, every=plan.every)
        (params, moments), history = pretrain.load_state(state, (params, optimizer.init(params)))
    return params, history


def text_optimizer(plan, params):
    """09's optimizer; blocks wait for `alone` steps and then learn at `moved` of its rate."""
    base = pretrain.make_optimizer(params, plan.text_steps, plan.text_rate,
                                   max(1, plan.text_steps // 10), 0.05)
    blocks = jax.tree.map(lambda part: part in ("attention", "mlp"), named_parts(params))
    held = optax.scale_by_schedule(lambda count: plan.moved * (count >= plan.alone))
    return optax.chain(base, optax.masked(held, blocks))


def first_stage(plan, kind, seed, out):
    """(weights, share of the gap closed) of a seed's first stage, made once and kept in `out`.

    Full attention, constant rate, no decay. A stage on films is over when it has closed
    `plan.gate` of the gap between the two guessers; the others are as long as the films' of the
    same seed, so all arms have read as much. It starts from the weights that the *next* seed draws:
    otherwise its blocks would meet the embedder beside which they were trained, hardly changed.
    """
    name = f"first-{kind}-{seed}-{digest(dataclasses.asdict(plan))[:12]}"
    batches, validation, given, ids = first_batches(plan, kind, seed)
    graph, params = fresh_model(plan, seed + 1, window=256)
    goal, limit = -np.inf, plan.first_steps
    if kind == "automata":
        films_ = np.concatenate(validation)
        high, low = counting(films_, plan.world), looking_up(films_, plan.world)
        goal = high - plan.gate * (high - low)
    else:
        path = Path(out) / f"automata-{seed}.csv"
        limit = int(pd.read_csv(path).query("stage == 'first'").step.max())
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(
        optax.linear_schedule(0.0, plan.first_rate, 100)))
    params, history = _train(plan, graph, params, optimizer, batches, validation, given, ids,
                             Path(out) / f"{name}.npz",
                             lambda last: last["step"] >= limit or last["val_loss"] <= goal)
    closed = (high - history[-1]["val_loss"]) / (high - low) if kind == "automata" else np.nan
    return params, points(history, batches, "first").assign(closed=closed)


def points(history, batches, stage):
    """The points of a validation curve with the tokens read so far; padding counts for nothing."""
    read = np.cumsum([int((batches[i % len(batches)] > 0).sum()) for i in range(len(history))])
    return pd.DataFrame([{"stage": stage, "step": one["step"], "tokens": int(total),
                          "train_loss": one["loss"], "val_loss": one["val_loss"]}
                         for one, total in zip(history, read, strict=True) if "val_loss" in one])


def run(plan, arm, seed, out):
    """One run: its first stage if it has one, its text stage, and `<arm>-<seed>.csv` in `out`.

    A run whose films did not pass the gate has a first stage only: nothing is moved.
    """
    kind, parts = ARMS[arm]
    text, _, validation = text_batches(plan, seed)
    graph, params = fresh_model(plan, seed)
    tables = []
    if kind:
        learned, table = first_stage(plan, kind, seed, out)
        tables.append(table)
        params = transfer(params, learned, parts)
    if not (tables and (tables[0].closed < plan.gate).any()):
        state = Path(out) / f"state-{arm}-{seed}-{digest(dataclasses.asdict(plan))[:12]}.npz"
        _, history = _train(plan, graph, params, text_optimizer(plan, params), text, validation, 0,
                            None, state, lambda last: last["step"] >= plan.text_steps)
        tables.append(points(history, text, "text"))
        state.unlink()
    table = pd.concat(tables).assign(
        arm=arm, seed=seed, plan=digest(dataclasses.asdict(plan))[:12], jax=jax.__version__,
        tunix=importlib.metadata.version("google-tunix"))
    write_text(Path(out) / f"{arm}-{seed}.csv", table.to_csv(index=False, float_format="%.6f"))


def compare(plan, out):
    """All runs that `out` does not have yet, seed by seed; one that was cut off goes on.

    Returns whether the gate was passed: if a seed's films fail it, no further run is made.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    for seed in range(plan.seeds):
        for arm in sorted(ARMS, key=lambda arm: arm != "automata"):  # it sets the others' length
            path = Path(out) / f"{arm}-{seed}.csv"
            if not path.exists():
                print(f"── {arm}-{seed}", flush=True)
                run(plan, arm, seed, out)
                jax.clear_caches()
            if arm == "automata" and "text" not in set(pd.read_csv(path).stage):
                print(f"{path} did not pass the gate: make the films easier (World)")
                return False
    return True


# -- Results --------------------------------------------------------------------------------------

def stored(folder):
    """All stored points as one table, empty where nothing is stored."""
    found = [pd.read_csv(path) for path in sorted(Path(folder).glob("*.csv"))]
    if len({name for table in found for name in table.plan}) > 1:
        raise UserError(f"{folder} mixes runs of different plans: delete those of the older one.")
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def final(table):
    """Validation loss at the end of the text stage. [seeds x arms]"""
    text = table[table.stage == "text"].sort_values("step")
    return text.groupby(["seed", "arm"]).val_loss.last().unstack()


def difference(values, base, comparisons=1):
    """Mean of `values - base`, paired by seed, with a t interval: (mean, low, high, pairs).

    With `comparisons` on a page, the interval is widened for all of them (Bonferroni): 95 % that
    none of them leaves out its true value.
    """
    gaps = (values - base).dropna()
    if len(gaps) < 2:
        return gaps.mean(), np.nan, np.nan, len(gaps)
    low, high = scipy.stats.ttest_1samp(gaps, 0).confidence_interval(1 - 0.05 / comparisons)
    return gaps.mean(), low, high, len(gaps)


def differences(ends, pairs=COMPARISONS):
    """One row a comparison: nats per token that the first arm ends above the second."""
    pairs = [pair for pair in pairs if set(pair) <= set(ends)]
    return pd.DataFrame([[*pair, *difference(ends[pair[0]], ends[pair[1]], len(pairs))]
                         for pair in pairs],
                        columns=["arm", "against", "difference", "low", "high", "pairs"])


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m appendix.nca", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of results and states")
    parser.add_argument("--states", type=int, default=4, help="of a cell; 2 makes the films easier")
    chosen = parser.parse_args()
    compare(Plan(world=World(states=chosen.states)), chosen.out)


if __name__ == "__main__":
    main()
