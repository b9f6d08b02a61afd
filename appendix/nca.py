"""Neural cellular automata as training data, and the runs that ask whether they help. For 12.

Dynamics, tokens, filter and transfer follow arXiv 2603.10055 and its published code, at our size.
Letters in shape comments: R rules, F frames, H cells a side, D states, B rows, T tokens.

    python -m appendix.nca --out FOLDER     the whole comparison; say it again to go on
"""

import argparse
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx
from tunix.models.gemma4.model import Gemma4

from appendix import pretrain
from helpers import gemma, stats, style
from helpers.run import (
    Taken,
    UserError,
    alone,
    digest,
    one_line_errors,
    read_table,
    write_text,
)

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
    judged: int = 10          # frames whose compressibility counts
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


def rows(frames, states):
    """Films as token rows: every frame between its two marks. [R, F, H, H] -> [R, T] int32"""
    ids = np.pad(FIRST + patches(frames, states), ((0, 0), (0, 0), (1, 1)))
    ids[..., 0], ids[..., -1] = FRAME_START, FRAME_END
    return ids.reshape(len(ids), -1)


def complexity(frames, world):
    """Compressed over raw size of every film's first frames, as the paper measures it. [R]

    gzip, level 9, of the int32 bytes of the patch numbers, without marks.
    """
    raw = [ids.tobytes() for ids in patches(frames[:, :world.judged], world.states)]
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


@functools.cache
def kept_films(seed, count, world, chunk=2048):
    """`count` films inside the band, from as many rules as that takes. [count, F, H, H] uint8

    The band is that of the first chunk's percentiles, so that a film stays in or out however many
    are asked for.
    """
    found, band, first = [], None, 0
    while sum(map(len, found)) < count:
        frames = np.asarray(films(*openings(seed, first, chunk, world), world))
        scores = complexity(frames, world)
        band = band or kept(scores, world.band)[1]
        found.append(frames[(scores >= band[0]) & (scores <= band[1])])
        first += chunk
    return np.concatenate(found)[:count]


def stream(token_rows, batch, seed):
    """Shuffled batches through Grain: has a length, and any item can be asked for. [B, T] each

    A film fills its row to the last token, so no position is padding.
    """
    dataset = grain.MapDataset.source(token_rows).shuffle(seed=seed)
    return dataset.batch(batch, drop_remainder=True)


# -- Transfer -------------------------------------------------------------------------------------

PARTS = ("attention", "mlp", "norms")


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
        keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        return part_of(".".join(keys))
    return jax.tree_util.tree_map_with_path(name, params)


def transfer(fresh, learned, parts=PARTS):
    """`fresh` weights with those of the named parts from `learned`; the others stay fresh."""
    return jax.tree.map(lambda part, new, old: jnp.array(old if part in parts else new),
                        named_parts(fresh), fresh, learned)


# -- The comparison -------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Plan:
    """What every run shares; one hash of it stands in every stored row."""

    text_steps: int = 400
    first_steps: int = 500          # of `rows_per_step` films: 0.99 million automaton tokens
    rows_per_step: int = 11
    tokens_per_step: int = 2_048    # of text, padding included, as in 09
    documents: int = 42_000
    learning_rate: float = 4e-3     # 09's peak, in both stages
    warmup: float = 0.1             # share of the steps
    weight_decay: float = 0.05
    every: int = 25                 # steps between two points of the validation curve
    validation: int = 6             # batches
    slow: float = 0.1               # factor of the arm with a lower rate
    main_seeds: int = 5
    other_seeds: int = 3
    sources: tuple = (1, 2, 0, 4, 3)  # whose weights and films a seed's first stage has
    world: World = World()
    block: int = 64                 # queries at a time: a third less time on a CPU than all at once
    model: tuple = ()               # changes of the tiny config, for tests

    @property
    def first_tokens(self):
        """Tokens of a first stage on films; one on text is made as long."""
        return self.first_steps * self.rows_per_step * self.world.film_tokens


@dataclasses.dataclass(frozen=True)
class Arm:
    """What comes before the text stage, and what of it is kept."""

    label: str
    first: str = ""         # "nca", "shuffled", "text" or nothing
    parts: tuple = PARTS
    slow: bool = False
    longer: bool = False    # no first stage, but as many more steps of text


MAIN = {
    "scratch": Arm("scratch"),
    "nca": Arm("automata", "nca"),
    "shuffled": Arm("shuffled frames", "shuffled"),
    "text": Arm("as many tokens of text", "text"),
}
OTHERS = {
    "attention": Arm("automata, attention only", "nca", ("attention",)),
    "slow": Arm("automata, a tenth of the rate", "nca", slow=True),
    "mlp": Arm("automata, MLP only", "nca", ("mlp",)),
    "norms": Arm("automata, norms only", "nca", ("norms",)),
    "longer": Arm("scratch, one longer run", longer=True),
    "whole": Arm("as much text, embedder too", "text", (*PARTS, "embedder")),
}
ARMS = {**MAIN, **OTHERS}
COLOURS = dict(zip(ARMS, (style.BLACK, style.BLUE, style.SKY, style.ORANGE, style.GREEN,
                          style.PURPLE, style.RED, style.GREY, "#B8860B", "#7A5230"), strict=True))
COLUMNS = ["arm", "seed", "stage", "step", "text_tokens", "all_tokens", "train_loss", "val_loss",
           "seconds", "recipe", "jax", "flax", "tunix", "made"]


def order(plan):
    """All (arm, seed), those first whose answer is wanted first."""
    def block(arms, seed, seeds):
        return [(arm, seed) for arm in arms] if seed < seeds else []
    runs = block(MAIN, 0, plan.main_seeds) + block(MAIN, 1, plan.main_seeds)
    runs += block(OTHERS, 0, plan.other_seeds) + block(MAIN, 2, plan.main_seeds)
    for seed in range(1, max(plan.other_seeds, 1)):
        runs += block(OTHERS, seed, plan.other_seeds)
    return runs + [run for seed in range(3, plan.main_seeds)
                   for run in block(MAIN, seed, plan.main_seeds)]


def recipe(plan):
    """Twelve letters that tell one plan, on one corpus, from another."""
    corpus = hashlib.sha256("\0".join(_corpus(plan.documents)).encode()).hexdigest()
    return digest({**dataclasses.asdict(plan), "corpus": corpus})[:12]


@functools.cache
def _corpus(count, seed=None):
    folder = str(ROOT / "data" / "generate")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import make
    return tuple(make.documents(count, **({} if seed is None else {"seed": seed})))


@functools.cache
def _tokens(count, seed=None, without=0):
    """Ids of the corpus, or of other documents that its first `without` do not contain."""
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(ROOT / "assets" / "tiny_gemma4" / "tokenizer.json"))
    known = set(_corpus(without)) if without else ()
    return pretrain.encode(tokenizer, [text for text in _corpus(count, seed) if text not in known])


def text_batches(plan, seed):
    """(batches of the text stage, those of the first stage on text, validation, seen ids).

    The order is drawn from `seed`. A document is in one of the two stages, but one in a hundred is
    twice in the corpus; together they are the longer run's. The first stage on text has as many
    tokens as that on automata, padding left out. Validation is the same for all: documents of
    another seed that the corpus does not contain.
    """
    batches = pretrain.make_batches(
        _tokens(plan.documents), plan.tokens_per_step, np.random.default_rng(seed))
    seen = pretrain.tokens_seen(batches, _config(plan).num_embed)
    text, rest = batches[:plan.text_steps], batches[plan.text_steps:]
    enough = int(np.searchsorted(np.cumsum([(batch > 0).sum() for batch in rest]),
                                 plan.first_tokens)) + 1
    if len(text) < plan.text_steps or enough > len(rest):
        raise UserError(f"{plan.documents:,} documents are too few for this plan.")
    others = pretrain.make_batches(
        _tokens(300, 77, plan.documents), plan.tokens_per_step, np.random.default_rng(0))
    return text, rest[:enough], others[:plan.validation], seen


def automaton_batches(plan, seed, kind):
    """(batches of the first stage on automata, validation, seen ids); `kind` nca or shuffled."""
    world, size = plan.world, plan.rows_per_step
    frames = kept_films(seed, (plan.first_steps + plan.validation) * size, world)
    if kind == "shuffled":
        frames = shuffled(frames, seed)
    ids = rows(frames, world.states)
    seen = np.zeros(_config(plan).num_embed, bool)
    seen[1:world.vocabulary] = True
    cut = plan.first_steps * size
    return (stream(ids[:cut], size, seed),
            [ids[i:i + size] for i in range(cut, len(ids), size)], seen)


def _config(plan):
    return gemma.config_from_hf(ROOT / "assets" / "tiny_gemma4", dtype="float32",
                                **dict(plan.model))


def fresh_model(plan, seed):
    """(graph, weights) of a new tiny Gemma 4."""
    model = pretrain.initialise(Gemma4(_config(plan), rngs=nnx.Rngs(0)), seed)
    gemma.use_block_attention(model, plan.block)
    return nnx.split(model)


def train(plan, params, graph, batches, validation, seen, steps, state, given=0, slow=None):
    """09's loop, with a state saved at least every two minutes: (weights, history)."""
    optimizer = pretrain.make_optimizer(params, steps, plan.learning_rate,
                                        max(1, int(plan.warmup * steps)), plan.weight_decay, slow)
    step, evaluate = pretrain.make_steps(graph, optimizer, seen, given)
    return pretrain.pretrain(params, optimizer.init(params), step, evaluate, batches, validation,
                             steps, state, every=plan.every, minutes=1.5)


def points(history, batches, before=0):
    """The points of a validation curve: step, tokens read so far, losses, seconds.

    Args:
      history: from `pretrain.pretrain`.
      batches: what it was trained on; padding counts for nothing.
      before: tokens of the stages before this one.
    """
    tokens = np.cumsum([int((batches[i % len(batches)] > 0).sum()) for i in range(len(history))])
    found, since, seconds = [], [], 0.0
    for entry, total in zip(history, tokens, strict=True):
        since.append(entry["loss"])
        seconds += entry["seconds"]
        if "val_loss" in entry:
            found.append({"step": entry["step"], "tokens": int(total),
                          "all_tokens": before + int(total), "train_loss": np.mean(since),
                          "val_loss": entry["val_loss"], "seconds": seconds})
            since = []
    return pd.DataFrame(found)


def _store(path, plan, arm, seed, stage, table):
    version = importlib.metadata.version
    table["text_tokens"] = table.tokens if stage == "text" or arm == "first-text" else 0
    whole = table.assign(arm=arm, seed=seed, stage=stage, recipe=recipe(plan), jax=jax.__version__,
                         flax=version("flax"), tunix=version("google-tunix"),
                         made=time.strftime("%Y-%m-%d"))
    write_text(path, whole[COLUMNS].to_csv(index=False, float_format="%.6f"))


def first_stage(plan, kind, seed, out):
    """Weights after a seed's first stage, and how many tokens it had; kept in `out`, made once.

    It starts from the weights that another seed draws, `plan.sources` says which. Otherwise what
    is moved would come back to the embedder that it was trained with, hardly changed since. The
    documents of a first stage on text are the seed's own, since those are none of its text stage.

    Args:
      kind: "nca", "shuffled" or "text".
      out: folder; gets `first-<kind>-<seed>.csv` and, for the next arms, the weights.

    Raises:
      UserError: another process is making it.
    """
    source = plan.sources[seed]
    number = seed if kind == "text" else source
    name = f"first-{kind}-{number}"
    table, weights = Path(out) / f"{name}.csv", Path(out) / f"{name}-{recipe(plan)}.npz"
    graph, params = fresh_model(plan, source)
    if is_made(table, plan, "first") and (found := pretrain.load_state(weights, params)):
        return found[0], int(read_run(table).all_tokens.iloc[-1])
    with alone(Path(out) / f".{name}.lock"):
        print(f"── {name}", flush=True)
        if kind == "text":
            _, batches, validation, seen = text_batches(plan, seed)
            given = 0
        else:
            batches, validation, seen = automaton_batches(plan, source, kind)
            given = plan.world.frame_tokens
        state = Path(out) / f"state-{name}-{recipe(plan)}.npz"
        params, history = train(plan, params, graph, batches, validation, seen, len(batches), state,
                                given)
        pretrain.save_state(weights, params, [])
        _store(table, plan, f"first-{kind}", number, "first", points(history, batches))
        state.unlink(missing_ok=True)
    return params, int(read_run(table).all_tokens.iloc[-1])


def run(plan, arm, seed, out):
    """One run: its first stage if it has one, its text stage, and `<arm>-<seed>.csv` in `out`."""
    setting, before, slow = ARMS[arm], 0, None
    text, more, validation, seen = text_batches(plan, seed)
    graph, params = fresh_model(plan, seed)
    if setting.first:
        learned, before = first_stage(plan, setting.first, seed, out)
        params = transfer(params, learned, setting.parts)
    print(f"── {arm}-{seed}", flush=True)
    if setting.slow:
        slow = jax.tree.map(lambda part: part in setting.parts, named_parts(params)), plan.slow
    batches = text + more if setting.longer else text
    state = Path(out) / f"state-{arm}-{seed}-{recipe(plan)}.npz"
    _, history = train(plan, params, graph, batches, validation, seen, len(batches), state,
                       slow=slow)
    _store(Path(out) / f"{arm}-{seed}.csv", plan, arm, seed, "text",
           points(history, batches, before))
    state.unlink(missing_ok=True)


def compare(plan, out, runs=None):
    """All runs of the comparison that `out` does not have yet, one after the other.

    It can be stopped and started again at any moment: a finished run is not repeated, one that was
    cut off goes on from its last saved state with the same numbers. What another process is making
    is left to it, and said.

    Raises:
      UserError: `out` is no folder of ours.
    """
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file of that name, a read-only disk
        raise UserError(f"{out} cannot be made ({error.strerror}). Name another folder.") from error
    for arm, seed in runs or order(plan):
        path = out / f"{arm}-{seed}.csv"
        if is_made(path, plan):
            continue
        begun = time.perf_counter()
        try:
            with alone(out / f".{path.stem}.lock"):
                run(plan, arm, seed, out)
        except Taken as busy:
            print(f"{path.stem} is left out: {busy}", flush=True)
            continue
        print(f"{path.name}: {(time.perf_counter() - begun) / 60:.1f} min", flush=True)
        jax.clear_caches()  # every run compiles its own steps; the old ones only take memory


def is_made(path, plan, stage="text"):
    """Is this the file of a run of this plan that was trained to its end?

    One that cannot be read, or that ends early, counts as absent, and is said.
    """
    if not Path(path).exists():
        return False
    try:
        table = read_run(path)
    except UserError:
        print(f"{path} is unreadable and counts as absent", flush=True)
        return False
    same = set(table.recipe) == {recipe(plan)} and set(table.stage) == {stage}
    return same and _whole(table, plan)


def _whole(table, plan):
    """Does the table of one run reach the run's last step?"""
    arm, stage = table.arm.iloc[0], table.stage.iloc[0]
    steps = plan.text_steps if stage == "text" else 1 if arm == "first-text" else plan.first_steps
    return table.step.max() >= steps


# -- Stored results -------------------------------------------------------------------------------

def stored(folder, plan=None):
    """All stored points as one table, empty where nothing is stored yet.

    With a `plan`, runs that end before its last step are left out, and said.

    Raises:
      UserError: a file is damaged, or the runs were made from different plans.
    """
    found = []
    for path in sorted(Path(folder).glob("*.csv")):
        found.append(read_run(path))
        if plan and not _whole(found[-1], plan):
            print(f"{path} ends at step {found.pop().step.max()} and is left out")
    table = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=COLUMNS)
    if table.recipe.nunique() > 1:
        raise UserError(f"{folder} mixes runs of different plans: delete those of the older one.")
    return table


def read_run(path):
    """One run's points, as they were written.

    Raises:
      UserError: it is no such table: empty, cut off, or edited.
    """
    return read_table(path, ("arm", "seed", "stage", "step", "val_loss", "recipe"),
                      dtype=dict.fromkeys(("recipe", "jax", "flax", "tunix"), str))


def missing(table, plan):
    """The (arm, seed) of the plan that have no finished text stage in the table."""
    text = table[table.stage == "text"]
    there = set(zip(text.arm, text.seed, strict=True))
    return [run for run in order(plan) if run not in there]


def inventory(table, missing):
    """What is stored and what is missing, as two lines.

    Args:
      missing: from `missing`.
    """
    made = "" if table.empty else (f", made {min(table.made)} to {max(table.made)} with JAX "
                                   f"{', '.join(set(table.jax))}")
    stored = table[table.stage == "text"].groupby(["arm", "seed"]).ngroups
    lacking = pd.DataFrame(missing, columns=["arm", "seed"]).groupby("arm", sort=False).seed
    named = "; ".join(f"{arm} {', '.join(map(str, seeds))}" for arm, seeds in lacking)
    return (f"{stored} of {stored + len(missing)} runs are stored{made}\n"
            f"missing: {named + ' (arm and seeds)' if named else 'none'}")


def budgets(plan, seed):
    """Steps, tokens and the longest row of the stages of a seed, and of validation: a table."""
    def line(name, batches):
        return (name, len(batches), int(sum((batch > 0).sum() for batch in batches)),
                max(batch.shape[1] for batch in batches))
    text, more, validation, _ = text_batches(plan, seed)
    films_ = ("first, films", plan.first_steps, plan.first_tokens, plan.world.film_tokens)
    lines = [line("text", text), films_, line("first, text", more), line("validation", validation)]
    return pd.DataFrame(lines, columns=["stage", "steps", "tokens", "longest row"]
                        ).set_index("stage")


def final(table):
    """Validation loss at the end of the text stage. [seeds x arms], in the arms' order"""
    text = table[table.stage == "text"]
    last = text.sort_values("step").groupby(["seed", "arm"]).val_loss.last().unstack()
    return last.reindex(columns=[arm for arm in ARMS if arm in last])


def difference(values, base, confidence=0.95):
    """Mean of `values - base`, paired by seed, with a t interval: (mean, low, high, pairs).

    Args:
      values, base: Series indexed by seed; a seed that only one has is left out.

    Low and high are nan where nothing is known of the spread (`stats.seed_interval`).
    """
    gaps = (values - base).dropna()
    return *stats.seed_interval(gaps, confidence), len(gaps)


def tokens_to_reach(curve, level):
    """Text tokens at which a validation curve first comes down to `level`; nan if it never does.

    Straight lines join the points, in the logarithm of the loss.
    """
    tokens, loss = curve.text_tokens.to_numpy(float), np.log(curve.val_loss.to_numpy(float))
    below = np.flatnonzero(loss <= np.log(level))
    if not len(below):
        return float("nan")
    if (i := below[0]) == 0:
        return float(tokens[0])
    share = (loss[i - 1] - np.log(level)) / (loss[i - 1] - loss[i])
    return float(tokens[i - 1] + share * (tokens[i] - tokens[i - 1]))


def against(ends, base="scratch"):
    """Every arm beside `base`: a table with pairs, losses, difference, 95 % interval, verdict.

    The two mean losses are those of the seeds that both have, so their difference is the mean one.
    The verdict is `better` or `worse` if even an interval for as many comparisons as the table has
    (Bonferroni: 1 - 0.05 / n) excludes zero, and `perhaps` so if only that of 95 % does.

    Args:
      ends: from `final`.
    """
    found, arms = [], [arm for arm in ends if arm != base and base in ends]
    for arm in arms:
        mean, low, high, pairs = difference(ends[arm], ends[base])
        _, *wide, _ = difference(ends[arm], ends[base], 1 - 0.05 / len(arms))
        if np.isnan(low):
            verdict = "no spread known"
        elif low <= 0 <= high:
            verdict = "no difference shown"
        else:
            verdict = "perhaps " * (wide[0] <= 0 <= wide[1]) + ("better" if mean < 0 else "worse")
        both = ends[[arm, base]].dropna().mean()
        found.append((arm, pairs, both[arm], both[base], mean, low, high, verdict))
    return pd.DataFrame(found, columns=["arm", "pairs", "loss", f"{base}'s", f"against {base}",
                                        "low", "high", "verdict"])


def sooner(table, level=None, base="scratch"):
    """Text tokens that runs need to a loss, over those that `base` needed: {arm: by seed}.

    Args:
      level: the loss; None for that with which `base` ended, seed by seed.

    nan where a run never gets there.
    """
    text = table[table.stage == "text"].sort_values("step")
    runs = dict(iter(text.groupby(["arm", "seed"])))
    goals = {seed: (run.val_loss.iloc[-1] if level is None else level)
             for (arm, seed), run in runs.items() if arm == base}
    needed = {key: tokens_to_reach(run, goals[key[1]]) for key, run in runs.items()
              if key[1] in goals}
    shares = {arm: pd.Series({seed: tokens / needed[base, seed] for (name, seed), tokens
                              in needed.items() if name == arm}, dtype=float)
              for arm in ARMS if arm != base}
    return {arm: found for arm, found in shares.items() if len(found)}


def speed(table, levels):
    """How many text tokens the arms need beside scratch: one row an arm.

    Geometric means with 95 % t intervals over seeds, only where every run gets to the loss; and
    how many get to the loss with which their seed's scratch ended.
    """
    def mean_of(shares):
        mean, low, high = np.exp(stats.seed_interval(np.log(shares)))
        return f"{mean:.2f} ({low:.2f} to {high:.2f})" if low == low else f"{mean:.2f}"
    ends = sooner(table)
    found = {f"to {level:g} nats": {arm: "" if shares.isna().any() else mean_of(shares)
                                    for arm, shares in sooner(table, level).items()}
             for level in levels}
    found["to scratch's end"] = {arm: f"{shares.notna().sum()} of {len(shares)} runs"
                                 for arm, shares in ends.items()}
    return pd.DataFrame(found, index=list(ends))


def _draw_frames(axes, frames, world):
    from matplotlib.colors import ListedColormap
    colours = ListedColormap([style.BLACK, style.BLUE, style.ORANGE, "#F5F5F5"])
    for ax, frame in zip(axes, frames, strict=True):
        ax.imshow(frame, cmap=colours, vmin=0, vmax=world.states - 1)
        ax.set(xticks=[], yticks=[])


def draw_films(frames, scores, world):
    """Films as rows of frames, time from left to right, with their scores: a figure."""
    fig, axes = style.figure(rows=len(frames), columns=frames.shape[1], width=9, height=5.6)
    for row, film, score in zip(axes, frames, scores, strict=True):
        _draw_frames(row, film, world)
        row[0].set_ylabel(f"{score:.2f}", rotation=0, ha="right", va="center")
    return fig


def draw_complexity(scores, inside, noise, shown):
    """How compressible the films are, the kept ones in blue: a figure.

    Args:
      scores: of every film; `inside`: which are kept.
      noise: the score of random cells.
      shown: numbers of films to mark.
    """
    fig, ax = style.figure(width=8.5)
    ax.hist(scores, bins=50, color="#C9C9C9")
    ax.hist(scores[inside], bins=50, range=(scores.min(), scores.max()), color=style.BLUE)
    ax.axvline(noise, color=style.RED, ls="--")
    style.label_line(ax, noise, ax.get_ylim()[1] * 0.9, "noise", style.RED)
    for film in shown:
        ax.plot(scores[film], 0, "v", color=style.ORANGE, ms=9, clip_on=False, zorder=5)
    ax.set(xlabel="compressed size / raw size", ylabel="rules")
    return fig


def draw_tokens(frames, world):
    """Frames, and below each its patch numbers; blue ones stood there a frame before: a figure."""
    fig, (above, below) = style.figure(rows=2, columns=len(frames), width=9.5, height=4.2)
    _draw_frames(above, frames, world)
    numbers, side = patches(frames, world.states), world.side // PATCH
    for number, ax in enumerate(below):
        same = (numbers[number] == numbers[number - 1]) & (number > 0)
        ax.imshow(same.reshape(side, side), cmap="Blues", vmin=0, vmax=2)
        for place, patch in enumerate(numbers[number]):
            ax.text(place % side, place // side, patch, ha="center", va="center", fontsize=8)
        ax.set(xticks=[], yticks=[])
    return fig


def draw_arms(ax, table, arms, column):
    """Validation curves of the text stage: a thin line a seed, a thick one for the arm's mean.

    The mean stands where all of an arm's seeds have a point: `longer` ends a few steps apart.
    """
    text = table[table.stage == "text"]
    for arm in [arm for arm in arms if arm in set(text.arm)]:
        runs = text[text.arm == arm]
        for _, run in runs.groupby("seed"):
            ax.plot(run[column] / 1e6, run.val_loss, color=COLOURS[arm], lw=0.6, alpha=0.5)
        whole = runs.groupby("step").seed.transform("count") == runs.seed.nunique()
        mean = runs[whole].groupby("step")[[column, "val_loss"]].mean()
        ax.plot(mean[column] / 1e6, mean.val_loss, color=COLOURS[arm], lw=2, label=arm,
                **({"ls": "--", "zorder": 3} if arm in ("nca", "longer") else {}))
    what = "tokens of the text stage" if column == "text_tokens" else "tokens of both stages"
    ax.set(xlabel=f"{what}, millions", yscale="log",
           yticks=(0.2, 0.3, 0.5, 1, 2, 5), yticklabels=("0.2", "0.3", "0.5", "1", "2", "5"))
    ax.minorticks_off()


def _without_marks(ids, world):
    """The patch numbers of token rows, what `rows` was given. [R, T] -> [R, F, P]"""
    return ids.reshape(len(ids), -1, world.frame_tokens)[:, :, 1:-1] - FIRST


def counting(ids, world, weight=8):
    """Nats per token of a guesser that counts, and has no idea of time.

    After n patches of a film, of which c were p, it gives p the odds
    (c + `weight` · share of p in all these films) / (n + `weight`). It knows where the marks are.
    The first frame is counted and not guessed, as in training.

    Args:
      ids: films as token rows, [R, T].
    """
    patch = _without_marks(ids, world)
    flat, films_ = patch.reshape(len(ids), -1), np.arange(len(ids))
    share = np.bincount(flat.ravel(), minlength=world.vocabulary) / flat.size
    counts, cost = np.zeros((len(ids), world.vocabulary)), 0.0
    for place, seen in enumerate(flat.T):
        if place >= patch.shape[-1]:
            odds = (counts[films_, seen] + weight * share[seen]) / (place + weight)
            cost -= np.log(odds).sum()
        counts[films_, seen] += 1
    return float(cost / ids[:, world.frame_tokens:].size)


def looking_up(ids, world, sharp=2.5, weight=0.03):
    """Nats per token of a guesser that looks up what like neighbourhoods became; it is not trained.

    For each cell it compares the 3 x 3 neighbourhood of a frame before with all those of the film
    so far. One of which m of the nine cells are equal counts e^(`sharp` · (m - 9)) for the state
    that its middle cell took; `weight` times the share of each state so far is added. So it uses
    the dynamics and knows nothing about how rules are made. The two constants were chosen on 15
    films of a seed that is not used otherwise. The first frame is not guessed.

    Args:
      ids: films as token rows, [R, T].
    """
    patch = _without_marks(ids, world)
    digits = patch[..., None] // world.states ** np.arange(PATCH ** 2)[::-1] % world.states
    half = world.side // PATCH
    frames = digits.reshape(*patch.shape[:2], half, half, PATCH, PATCH)
    frames = np.moveaxis(frames, -2, -3).reshape(*patch.shape[:2], world.side, world.side)
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


def first_ends(table, plan):
    """What the first stages on films came to, nats per token at the end, beside two guessers.

    Args:
      table: stored rows of `first-nca` and `first-shuffled`.

    Returns a table, one row a seed, with columns (kind of films, who).
    """
    rows_ = []
    for (arm, seed), run in table.sort_values("step").groupby(["arm", "seed"]):
        kind = arm.removeprefix("first-")
        held_out = np.concatenate(automaton_batches(plan, seed, kind)[1])
        rows_ += [(seed, "counting", kind, counting(held_out, plan.world)),
                  (seed, "model", kind, run.val_loss.iloc[-1]),
                  (seed, "looking up", kind, looking_up(held_out, plan.world))]
    found = pd.DataFrame(rows_, columns=["seed", "who", "films", "nats"])
    table = found.pivot(index="seed", columns=["films", "who"], values="nats")
    return table.reindex(columns=["counting", "model", "looking up"], level="who")


def draw_first(table, ends, live, level, plan):
    """The first stages' validation curves and a live run's losses, minus the counter's: a figure.

    Args:
      table: stored rows of `first-nca` and `first-shuffled`.
      ends: from `first_ends`.
      live: a history with `step` and `loss`.
      level: nats of `counting` for the films of the live run.
    """
    fig, ax = style.figure(width=8.5)
    for (arm, seed), run in table.groupby(["arm", "seed"]):
        name = arm.removeprefix("first-")
        counted, known = ends.loc[seed, name][["counting", "looking up"]]
        label = ARMS[name].label if seed == table.seed.min() else None
        ax.plot(run.step, run.val_loss - counted, color=COLOURS[name], lw=1.2, label=label)
        if name == "nca":
            ax.axhline(known - counted, color=style.GREEN, lw=1,
                       label=label and f"{label}, looking up")
    ax.plot(live.step, live.loss - level, ".", color=style.RED, ms=4, label="this run, each step")
    ax.axhline(0, color=style.GREY, ls="--", lw=1.5, label="counting patches")
    ax.set(xlabel="step of the first stage", ylabel="nats per token above the counter",
           title="What the model learns from films, and what there is to learn",
           xlim=(0, plan.first_steps), ylim=(-2.1, 2.1))
    ax.legend(ncols=2, loc="upper right")
    return fig


def draw_differences(results, ends, off=0.2):
    """`against` as a figure: a bar for the interval, a dot for every seed.

    An arm that is further than `off` nats from scratch would hide the others: it is only named.
    """
    far = results[results["against scratch"].abs() >= off].set_index("arm")["against scratch"]
    named = "".join(f"; off the scale: {arm} {gap:+.2f}" for arm, gap in far.items())
    results = results[~results.arm.isin(far.index)]
    fig, ax = style.figure(width=8.5, height=0.4 * len(results) + 2)
    for place, row in enumerate(results.itertuples()):
        ax.plot([row.low, row.high], [place, place], color=COLOURS[row.arm], lw=5, alpha=0.35)
        gaps = (ends[row.arm] - ends["scratch"]).dropna()
        ax.plot(gaps, [place] * len(gaps), "o", ms=5, color=COLOURS[row.arm])
    ax.axvline(0, color=style.BLACK, lw=1)
    ax.set(yticks=range(len(results)), yticklabels=results.arm,
           xlabel="validation loss minus scratch's, nats per token (left of the line: better)",
           title=f"Each dot is a seed, each bar 95 %{named}")
    ax.invert_yaxis()
    return fig


def draw_parts(texts, arms, base="scratch", limits=(-0.15, 0.3)):
    """Loss minus `base`'s over the text stage: a thin line a seed, a thick one the mean: a figure.

    Args:
      texts: the rows of the text stage.
      limits: of the axis, in nats; a transferred model starts far outside.
    """
    fig, ax = style.figure(width=8.5)
    scratch = texts[texts.arm == base].set_index(["seed", "step"]).val_loss
    for arm in [arm for arm in arms if arm in set(texts.arm)]:
        runs = texts[texts.arm == arm].set_index(["seed", "step"])
        gaps = (runs.val_loss - scratch).dropna().unstack("seed")
        ax.plot(gaps.index, gaps, color=COLOURS[arm], lw=0.6, alpha=0.6)
        ax.plot(gaps.index, gaps.mean(axis=1), "o-", ms=3, color=COLOURS[arm],
                label=ARMS[arm].label)
    ax.axhline(0, color=style.BLACK, lw=1)
    ax.set(xlabel="step of the text stage", ylabel=f"loss minus {base}'s, nats", ylim=limits,
           title="Behind scratch (above the line) or ahead of it, by what was moved over")
    ax.legend()
    return fig


def conclude(results, complete):
    """The sentences that the stored numbers allow, as lines.

    Args:
      results: from `against`.
      complete: no run is missing.
    """
    found = results.set_index("arm").verdict.to_dict()
    lines = [] if complete else ["Preliminary: runs are missing."]
    if "nca" not in found:
        return "\n".join([*lines, "No pair of an automaton run and scratch is stored yet."])
    helps = [name for name, arm in ARMS.items()
             if arm.first in ("nca", "shuffled") and found.get(name) == "better"]
    return "\n".join([
        *lines, f"Automata before text, against scratch: {found['nca']}.",
        f"The same frames without their order: {found.get('shuffled', 'not stored')}.",
        f"As many tokens of text instead: {found.get('text', 'not stored')}.",
        f"The same with its embedder: {found.get('whole', 'not stored')}.",
        f"Arms with automata that helped beyond the noise: {', '.join(helps) or 'none'}.",
        *(["So 09 keeps training its base on text alone."] if complete and not helps else [])])


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m appendix.nca", description=main.__doc__)
    parser.add_argument("--out", default=os.environ.get("NCA_OUT"), required="NCA_OUT" not in
                        os.environ, help="folder of results and states; the same one to go on")
    parser.add_argument("runs", nargs="*", help="such as scratch-0 nca-0; all of them if none")
    chosen = parser.parse_args()
    one_line_errors()
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(chosen.out) / "compiled"))
    known = {f"{arm}-{seed}": (arm, seed) for arm, seed in order(Plan())}
    if unknown := [name for name in chosen.runs if name not in known]:
        raise UserError(f"there is no run {', '.join(unknown)}. There are {', '.join(known)}.")
    compare(Plan(), chosen.out, [known[name] for name in chosen.runs])


if __name__ == "__main__":
    main()
