"""Neural cellular automata as training data, and the runs that ask whether they help. For 12.

Dynamics, tokens and filter follow arXiv 2603.10055 and its published code, at our size.
Letters in shape comments: R rules, F frames, H cells a side, D states, B rows, T tokens.

    python -m appendix.nca --out FOLDER     every arm; again to go on where it was stopped

An arm ends with FOLDER/ARM.csv; the states beside it are what an interrupted run goes on from.
"""

import argparse
import dataclasses
import functools
import gzip
import sys
import time
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
from helpers.run import Progress, UserError, digest, write_text

ROOT = Path(__file__).resolve().parent.parent
CHANNELS, HIDDEN = 4, 16               # of the network that is a rule
PATCH = 2                              # cells a side
FRAME_START, FRAME_END, FIRST = 1, 2, 3  # ids; 0 is padding, patch p is FIRST + p
VOCABULARY = 1280                      # of text: the tiny model's tokenizer
SAVE = 60                              # seconds between two saves of a stage


@dataclasses.dataclass(frozen=True)
class World:
    """Everything that a film depends on, besides its seed and its number."""

    states: int = 2
    side: int = 6
    burn_in: int = 10         # frames that are computed and thrown away
    frames: int = 11
    band: tuple = (60, 90)    # percentiles of compressibility that are kept

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


@functools.lru_cache(16)
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

    Wherever both are allowed a bracket opens with probability `opening`. A row of even length ends
    balanced.
    Opening bracket k is id FIRST + k, its closing one FIRST + kinds + k.
    """
    draw, numbers = np.random.default_rng(seed), np.arange(count)
    ids, stack = np.empty((2, count, length), np.int32)
    depth = np.zeros(count, int)
    for place in range(length):
        opens = (depth == 0) | (depth < length - place) & (draw.random(count) < opening)
        depth -= ~opens  # a closing bracket is of the kind on top of its stack
        kind = np.where(opens, draw.integers(kinds, size=count), stack[numbers, depth])
        stack[numbers, depth] = kind
        ids[:, place] = FIRST + kind + kinds * ~opens
        depth += opens
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
    gate: float = 0.5               # share of the gap between counting and looking up
    rows: int = 12                  # of a step, as long as a film: 121 tokens
    first_steps: int = 400
    first_rate: float = 3e-3        # constant, no decay: never annealed, as in the authors' code
    kinds: int = 64                 # of brackets
    text_steps: int = 300
    text_rate: float = 4e-3         # 09's peak, with 09's schedule and decay
    alone: int = 50                 # first text steps in which only embedder and norms learn
    moved: float = 0.3              # rate of attention and MLPs over that of the rest
    documents: int = 14_000
    every: int = 100                # steps between two points of a validation curve
    validation: int = 96            # rows
    seeds: int = 5
    # Half of the tiny model's layers, a quarter of its heads, half of its MLPs; full attention.
    model: tuple = (("num_layers", 3), ("num_heads", 4), ("num_kv_heads", 2), ("hidden_dim", 320),
                    ("sliding_window_size", 256))


# arm: (first stage, parts that are moved). `whole` is the positive control.
BLOCKS = ("attention", "mlp", "norms")
ARMS = {"scratch": ("", ()), "automata": ("automata", BLOCKS), "text": ("text", BLOCKS),
        "whole": ("text", (*BLOCKS, "embedder")), "dyck": ("dyck", BLOCKS),
        "shuffled": ("shuffled", BLOCKS)}
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


def fresh_model(plan, seed, vocabulary=VOCABULARY):
    """(graph, weights) of a new model; a first stage without text needs a smaller vocabulary."""
    config = gemma.config_from_hf(ROOT / "assets" / "tiny_gemma4", dtype="float32",
                                  **dict(plan.model), num_embed=vocabulary)
    return nnx.split(pretrain.initialise(Gemma4(config, rngs=nnx.Rngs(0)), seed))


def stacked(trees):
    """One tree of many like it: their arrays get a first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


# -- Data of the five seeds, side by side: [S, N, T] -----------------------------------------------

@functools.lru_cache(1)
def text_rows(count, length):
    """(09's corpus of `count` documents, others for validation), each joined and cut. [N, T]"""
    from tokenizers import Tokenizer
    sys.path.insert(0, str(ROOT / "data" / "generate"))
    import make
    tokenizer = Tokenizer.from_file(str(ROOT / "assets" / "tiny_gemma4" / "tokenizer.json"))

    def cut(documents):
        ids = np.concatenate(pretrain.encode(tokenizer, list(documents))).astype(np.int32)
        return ids[:len(ids) // length * length].reshape(-1, length)
    corpus = list(make.documents(count))
    return cut(corpus), cut(sorted(set(make.documents(600, 77)) - set(corpus)))


def text_data(plan):
    """(rows of the text stage, rows of other documents for a first stage, validation rows).

    Which documents are read in which stage differs from seed to seed; validation is the same.

    Raises:
      UserError: there are too few documents for the plan.
    """
    rows_, validation = text_rows(plan.documents, plan.world.film_tokens)
    text, first = plan.text_steps * plan.rows, plan.first_steps * plan.rows
    if len(rows_) < text + first or len(validation) < plan.validation:
        raise UserError(f"{plan.documents:,} documents are too few for this plan.")
    order = [np.random.default_rng(seed).permutation(len(rows_)) for seed in range(plan.seeds)]
    drawn = np.stack([rows_[numbers] for numbers in order])
    same = np.stack([validation[:plan.validation]] * plan.seeds)
    return drawn[:, :text], drawn[:, text:text + first], same


def first_data(plan, kind):
    """(rows, validation rows, vocabulary, tokens given before the first guess) of a first stage."""
    if kind == "text":
        return *text_data(plan)[1:], VOCABULARY, 0
    world, cut, drawn = plan.world, plan.first_steps * plan.rows, []
    for seed in range(plan.seeds):
        if kind == "dyck":
            drawn.append(brackets(cut + plan.validation, world.film_tokens, plan.kinds, seed))
        else:
            frames = kept_films(seed, cut + plan.validation, world)
            frames = shuffled(frames, seed) if kind == "shuffled" else frames
            drawn.append(rows(frames, world.states))
    shape = (FIRST + 2 * plan.kinds, 0) if kind == "dyck" else (world.vocabulary, world.frame_tokens)
    return np.stack(drawn)[:, :cut], np.stack(drawn)[:, cut:], *shape


# -- Training: all seeds at once, `plan.every` steps a call ----------------------------------------

def optimizer_of(plan, stage, params):
    """First stage: Adam at a constant rate. Text: 09's; blocks wait, then learn more slowly."""
    if stage == "first":
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(
            optax.linear_schedule(0.0, plan.first_rate, 100)))
    base = pretrain.make_optimizer(params, plan.text_steps, plan.text_rate,
                                   max(1, plan.text_steps // 10), 0.05)
    blocks = jax.tree.map(lambda part: part in ("attention", "mlp"), named_parts(params))
    held = optax.scale_by_schedule(lambda count: plan.moved * (count >= plan.alone))
    return optax.chain(base, optax.masked(held, blocks))


@functools.lru_cache(4)
def programs(plan, stage, vocabulary):
    """(init, advance, evaluate) of a stage, compiled once for all arms. S seeds, K steps, B rows.

    init: (params [S, ...]) -> (params, moments).
    advance: (state, rows [S, K, B, T], seen [V], given) -> (state, losses [S, K]).
    evaluate: (params, rows [S, N, B, T], seen, given) -> losses [S]. Losses are mean nats a token.
    """
    graph, params = fresh_model(plan, 0, vocabulary)
    optimizer = optimizer_of(plan, stage, params)

    def loss(params, tokens, seen, given):
        total, count = pretrain.token_loss(nnx.merge(graph, params), tokens, seen, given)
        return total / count

    def run_seed(state, tokens, seen, given):
        def step(state, batch):
            value, gradients = jax.value_and_grad(loss)(state[0], batch, seen, given)
            updates, moments = optimizer.update(gradients, state[1], state[0])
            return (optax.apply_updates(state[0], updates), moments), value
        return jax.lax.scan(step, state, tokens)

    def judge_seed(params, tokens, seen, given):
        return jax.lax.map(lambda batch: loss(params, batch, seen, given), tokens).mean()

    over_seeds = functools.partial(jax.vmap, in_axes=(0, 0, None, None))
    return (jax.jit(lambda params: (params, jax.vmap(optimizer.init)(params))),
            jax.jit(over_seeds(run_seed), donate_argnums=0), jax.jit(over_seeds(judge_seed)))


def train(plan, stage, params, data, validation, given, path):
    """Train every seed from its weights in `params` [S, ...]; goes on from `path` if it is there.

    Rows are read in order. Returns (weights [S, ...], points), where a point is step, and train_loss
    and val_loss of each seed.
    """
    size, steps = plan.rows, plan.first_steps if stage == "first" else plan.text_steps
    seen = np.zeros(params["embedder"]["input_embedding"].get_value().shape[1], bool)
    seen[data] = seen[validation] = True  # a masked id would cost 1e9 nats
    initial, advance, evaluate = programs(plan, stage, len(seen))
    held = jnp.asarray(validation.reshape(plan.seeds, -1, size, validation.shape[-1]))
    state, points_, saved = initial(params), [], time.monotonic()
    if found := pretrain.load_state(path, state):
        state, points_ = found
    progress = Progress(steps - len(points_) * plan.every, f"{Path(path).stem}: step", every=10)
    for start in range(len(points_) * plan.every, steps, plan.every):
        batch = data[:, start * size:(start + plan.every) * size]
        batch = batch.reshape(plan.seeds, plan.every, size, -1)
        state, losses = advance(state, batch, seen, given)
        value = evaluate(state[0], held, seen, given)
        points_.append({"step": start + plan.every, "train_loss": losses.mean(1).tolist(),
                        "val_loss": value.tolist()})
        if start + plan.every == steps or time.monotonic() - saved > SAVE:
            pretrain.save_state(path, state, points_)
            saved = time.monotonic()
        progress.update(plan.every, f"loss {np.mean(points_[-1]['val_loss']):.3f}")
    return state[0], points_


def table_of(points_, stage, tokens_per_step):
    """The points of all seeds, one row a point and seed."""
    return pd.DataFrame([
        {"seed": seed, "stage": stage, "step": point["step"],
         "tokens": point["step"] * tokens_per_step,
         "train_loss": point["train_loss"][seed], "val_loss": point["val_loss"][seed]}
        for point in points_ for seed in range(len(point["val_loss"]))])


# -- Runs -----------------------------------------------------------------------------------------

def first_stage(plan, kind, out):
    """(weights [S, ...], points) of a first stage, made once and kept in `out`.

    On films the points hold what the two guessers pay, too. Seed s starts from the weights that the
    *next* seed draws: otherwise its blocks would meet the embedder beside which they were trained,
    hardly changed.
    """
    path = Path(out) / f"first-{kind}-{digest(dataclasses.asdict(plan))[:12]}.npz"
    data, validation, vocabulary, given = first_data(plan, kind)
    params = stacked([fresh_model(plan, seed + 1, vocabulary)[1] for seed in range(plan.seeds)])
    params, points_ = train(plan, "first", params, data, validation, given, path)
    table = table_of(points_, "first", plan.rows * plan.world.film_tokens)
    if given:
        for name, guesser in (("counting", counting), ("looking_up", looking_up)):
            table[name] = table.seed.map({seed: guesser(films_, plan.world)
                                          for seed, films_ in enumerate(validation)})
    return params, table


def closed(table):
    """Share of the gap between counting and looking up that a first stage closed. [seeds]"""
    last = table[table.step == table.step.max()].set_index("seed")
    return (last.counting - last.val_loss) / (last.counting - last.looking_up)


def run(plan, arm, out):
    """One arm with all its seeds: first stage if it has one, text stage, `<arm>.csv` in `out`.

    Raises:
      UserError: a seed learned too little of the automata for its blocks to be moved.
    """
    kind, parts = ARMS[arm]
    name = digest(dataclasses.asdict(plan))[:12]
    params, tables = stacked([fresh_model(plan, seed)[1] for seed in range(plan.seeds)]), []
    if kind:
        learned, table = first_stage(plan, kind, out)
        tables.append(table)
        if kind == "automata" and closed(table).min() < plan.gate:
            raise UserError(f"the gate: of the gap {closed(table).min():.0%} closed, "
                            f"{plan.gate:.0%} needed. Make the films easier (Plan.world).")
        params = transfer(params, learned, parts)
    text, _, validation = text_data(plan)
    state = Path(out) / f"text-{arm}-{name}.npz"
    _, points_ = train(plan, "text", params, text, validation, 0, state)
    tables.append(table_of(points_, "text", plan.rows * text.shape[-1]))
    table = pd.concat(tables).assign(arm=arm, plan=name, jax=jax.__version__,
                                     device=jax.devices()[0].device_kind)
    write_text(Path(out) / f"{arm}.csv", table.to_csv(index=False, float_format="%.6f"))
    state.unlink()


def compare(plan, out):
    """The arms that `out` does not have yet; one that was cut off goes on."""
    Path(out).mkdir(parents=True, exist_ok=True)
    for arm in ARMS:
        if not (Path(out) / f"{arm}.csv").exists():
            print(f"── {arm}", flush=True)
            run(plan, arm, out)


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


def differences(ends):
    """One row a comparison of stored arms: nats per token that the first ends above the second.

    Pairs of one seed, t intervals. They are widened for the number of `COMPARISONS` (Bonferroni):
    with 95 % none of them misses.
    """
    table = []
    for arm, base in COMPARISONS:
        if {arm, base} <= set(ends):
            test = scipy.stats.ttest_rel(ends[arm], ends[base])
            interval = test.confidence_interval(1 - 0.05 / len(COMPARISONS))
            table.append([arm, base, (ends[arm] - ends[base]).mean(), *interval])
    return pd.DataFrame(table, columns=["arm", "against", "difference", "low", "high"])


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m appendix.nca", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of results and states")
    try:
        compare(Plan(), parser.parse_args().out)
    except UserError as error:
        parser.exit(1, f"Error: {error}\n")


if __name__ == "__main__":
    main()
