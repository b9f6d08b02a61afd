"""12's laboratory: the arms that ask whether films of automata help a model to read; their runs.

    python -m appendix.nca_runs     makes the arms that data/nca/ lacks

Letters in shape comments: S seeds, K steps, N rows, B rows of a step, T tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import scipy.stats
from flax import nnx
from tokenizers import Tokenizer
from tunix.models.gemma4.model import Gemma4

from appendix import nca, pretrain, runs
from helpers import gemma
from helpers.run import Progress, UserError, digest

BASE = Path("assets/tiny_gemma4")
STORED = Path("data/nca")
VOCABULARY = 1280  # of text: the tiny model's tokenizer
Params: TypeAlias = nnx.State  # weights of one model, or of all seeds' with a first axis S


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every run shares; a hash of it stands in every stored row."""

    world: nca.World = nca.World()
    gate: float = 0.5               # share of the gap between counting and looking up
    rows: int = 12                  # of a step, as long as a film: 121 tokens
    first_steps: int = 400
    first_rate: float = 3e-3        # constant, no decay: never annealed, as in the authors' code
    kinds: int = 64                 # of brackets
    text_steps: int = 300
    text_rate: float = 4e-3         # 09's peak, with 09's schedule and decay
    documents: int = 14_000
    every: int = 100                # steps between two points of a validation curve
    validation: int = 96            # rows
    seeds: int = 5
    # Half of the tiny model's layers, a quarter of its heads, half of its MLPs; full attention.
    model: tuple[tuple[str, int], ...] = (
        ("num_layers", 3), ("num_heads", 4), ("num_kv_heads", 2), ("hidden_dim", 320),
        ("sliding_window_size", 256))


# arm: (first stage, parts that are moved). `whole` is the positive control.
BLOCKS = ("attention", "mlp", "norms")
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scratch": ("", ()),
    "automata": ("automata", BLOCKS),
    "text": ("text", BLOCKS),
    "whole": ("text", (*BLOCKS, "embedder")),
    "dyck": ("dyck", BLOCKS),
    "shuffled": ("shuffled", BLOCKS),
}
COMPARISONS = (
    ("automata", "text"), ("automata", "shuffled"), ("automata", "dyck"), ("automata", "scratch"),
    ("text", "scratch"), ("whole", "scratch"), ("dyck", "scratch"), ("shuffled", "scratch"))


def part_of(name: str) -> str:
    """Which part of the model a weight belongs to, by its dotted name.

    Query and key norms set the scale of the attention scores and count as attention; `norms` are
    those around the blocks, the final one, and the layers' output scales.
    """
    if name.startswith("embedder."):
        return "embedder"
    if ".attn." in name:
        return "attention"
    if ".mlp." in name:
        return "mlp"
    return "norms"


def named_parts(params: Params) -> Params:
    """A tree like `params` that names each leaf's part."""
    def name_part(path, _leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return part_of(name)

    return jax.tree.map_with_path(name_part, params)


def transfer(fresh: Params, learned: Params, parts: Collection[str]) -> Params:
    """`fresh` weights with those of the named parts from `learned`; the others stay fresh."""
    def choose(part, new, old):
        return jnp.array(old if part in parts else new)

    return jax.tree.map(choose, named_parts(fresh), fresh, learned)


def fresh_model(plan: Plan, seed: int,
                vocabulary: int = VOCABULARY) -> tuple[nnx.GraphDef, Params]:
    """(graph, weights) of a new model; a first stage without text needs a smaller vocabulary."""
    changes = dict(plan.model) | {"num_embed": vocabulary}
    config = gemma.config_from_hf(BASE, dtype="float32", **changes)
    model = Gemma4(config, rngs=nnx.Rngs(0))
    return nnx.split(pretrain.initialize(model, seed))


def fresh_weights(plan: Plan, first: int = 0, vocabulary: int = VOCABULARY) -> Params:
    """The weights of a new model for every seed of a plan, counted from `first`. [S, ...]"""
    trees = []
    for seed in range(plan.seeds):
        _, weights = fresh_model(plan, first + seed, vocabulary)
        trees.append(weights)
    return stacked(trees)


def stacked(trees: list[Params]) -> Params:
    """One tree of many like it: their arrays get a first axis."""
    def stack(*leaves):
        return jnp.stack(leaves)

    return jax.tree.map(stack, *trees)


# -- Data of the five seeds, side by side: [S, N, T] -----------------------------------------------

class TextData(NamedTuple):
    """Rows of text for every seed: those of the text stage, of a first stage, and held out."""

    text: np.ndarray
    first: np.ndarray
    validation: np.ndarray


class FirstData(NamedTuple):
    """What a first stage trains on."""

    rows: np.ndarray
    validation: np.ndarray
    vocabulary: int
    films: list[np.ndarray] | None  # of the validation rows, one array for each seed


@functools.lru_cache(1)
def text_data(plan: Plan) -> TextData:
    """Rows of text.

    Documents of 09's corpus, for validation others, are joined and cut into rows. Here no module
    has a bug (`bug_share=0`), unlike in the corpus that 09's base reads. Which documents are read
    in which stage differs from seed to seed; validation is the same.
    """
    from appendix.world import make
    length = plan.world.film_tokens
    documents = list(make.documents(plan.documents, bug_share=0))
    others = set(make.documents(600, 77, bug_share=0)) - set(documents)
    corpus = _cut(documents, length)
    held_out = _cut(sorted(others), length)

    drawn = []
    for seed in range(plan.seeds):
        order = np.random.default_rng(seed).permutation(len(corpus))
        drawn.append(corpus[order])
    rows = np.stack(drawn)
    text_rows = plan.text_steps * plan.rows
    first_rows = plan.first_steps * plan.rows
    text = rows[:, :text_rows]
    first = rows[:, text_rows:text_rows + first_rows]
    validation = np.stack([held_out[:plan.validation]] * plan.seeds)
    return TextData(text, first, validation)


def _cut(documents: list[str], length: int) -> np.ndarray:
    """The documents' tokens, one after the other, as rows. [N, T] int32"""
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    ids = np.concatenate(pretrain.encode(tokenizer, documents)).astype(np.int32)
    rows = len(ids) // length
    return ids[:rows * length].reshape(rows, length)


def first_data(plan: Plan, kind: str) -> FirstData:
    """The data of a first stage: "text", "dyck", "automata" or "shuffled"."""
    if kind == "text":
        texts = text_data(plan)
        return FirstData(texts.first, texts.validation, VOCABULARY, None)
    world = plan.world
    cut = plan.first_steps * plan.rows
    count = cut + plan.validation
    drawn, held_out_films = [], []
    for seed in range(plan.seeds):
        if kind == "dyck":
            drawn.append(nca.brackets(count, world.film_tokens, plan.kinds, seed))
            continue
        films = nca.kept_films(seed, count, world)
        if kind == "shuffled":
            films = nca.shuffled(films, seed)
        drawn.append(nca.rows(films, world.states))
        held_out_films.append(films[cut:])
    rows = np.stack(drawn)
    vocabulary = world.vocabulary
    if kind == "dyck":
        vocabulary = nca.FIRST + 2 * plan.kinds
    return FirstData(rows[:, :cut], rows[:, cut:], vocabulary, held_out_films or None)


# -- Training: all seeds at once, `plan.every` steps a call ----------------------------------------

def optimizer_of(plan: Plan, stage: str, params: Params) -> optax.GradientTransformation:
    """First stage: Adam at a constant rate. Text: 09's own."""
    if stage == "first":
        warmed_up = optax.linear_schedule(0.0, plan.first_rate, 100)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(warmed_up))
    warmup = max(1, plan.text_steps // 10)
    return pretrain.make_optimizer(params, plan.text_steps, plan.text_rate, warmup, 0.05)


class Programs(NamedTuple):
    """The compiled programs of a stage. S seeds, K steps, B rows; losses are mean nats a token."""

    init: Callable      # (params [S, ...]) -> (params, moments)
    advance: Callable   # (state, rows [S, K, B, T], seen [V], given) -> (state, losses [S, K])
    evaluate: Callable  # (params, rows [S, N, B, T], seen, given) -> losses [S]


@functools.lru_cache(4)
def programs(plan: Plan, stage: str, vocabulary: int) -> Programs:
    """The `Programs` of a stage, compiled once for all arms."""
    graph, params = fresh_model(plan, 0, vocabulary)
    optimizer = optimizer_of(plan, stage, params)

    def loss(params, tokens, seen, given):
        total, count = pretrain.token_loss(nnx.merge(graph, params), tokens, seen, given)
        return total / count

    def run_seed(state, tokens, seen, given):
        def step(state, batch):
            params, moments = state
            value, gradients = jax.value_and_grad(loss)(params, batch, seen, given)
            updates, moments = optimizer.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        return jax.lax.scan(step, state, tokens)

    def judge_seed(params, tokens, seen, given):
        def loss_of(batch):
            return loss(params, batch, seen, given)

        return jax.lax.map(loss_of, tokens).mean()

    def init(params):
        return params, jax.vmap(optimizer.init)(params)

    over_seeds = functools.partial(jax.vmap, in_axes=(0, 0, None, None))
    return Programs(
        init=jax.jit(init),
        advance=jax.jit(over_seeds(run_seed), donate_argnums=0),
        evaluate=jax.jit(over_seeds(judge_seed)))


def train(plan: Plan, stage: str, params: Params, data: np.ndarray, validation: np.ndarray,
          given: int = 0) -> tuple[Params, pd.DataFrame]:
    """Train every seed from its weights in `params` [S, ...], which are used up.

    Rows are read in order. The first `given` tokens of a row are not trained on.

    Returns:
      (weights [S, ...], table): a row for each point and seed, losses in nats a token.
    """
    size = plan.rows
    length = data.shape[-1]
    steps = plan.first_steps if stage == "first" else plan.text_steps
    vocabulary = params["embedder"]["input_embedding"].get_value().shape[1]
    seen = pretrain.tokens_seen([data, validation], vocabulary)  # a masked id would cost 1e9 nats
    init, advance, evaluate = programs(plan, stage, vocabulary)
    held = jnp.asarray(validation.reshape(plan.seeds, -1, size, length))

    state = init(params)
    points: list[dict[str, Any]] = []
    progress = Progress(steps, f"{stage} stage: step", every=10)
    for done in range(plan.every, steps + 1, plan.every):
        first_row = (done - plan.every) * size
        rows = data[:, first_row:done * size]
        batches = rows.reshape(plan.seeds, plan.every, size, length)
        state, losses = advance(state, batches, seen, given)
        trained = losses.mean(1).tolist()
        params, _ = state
        held_out = evaluate(params, held, seen, given).tolist()
        for seed in range(plan.seeds):
            points.append({
                "seed": seed,
                "stage": stage,
                "step": done,
                "tokens": done * size * length,
                "train_loss": trained[seed],
                "val_loss": held_out[seed],
            })
        progress.update(plan.every, f"loss {np.mean(held_out):.3f}")
    return params, pd.DataFrame(points)


# -- Runs -----------------------------------------------------------------------------------------

@functools.lru_cache(1)  # `text` and `whole` share theirs
def first_stage(plan: Plan, kind: str) -> tuple[Params, pd.DataFrame]:
    """(weights [S, ...], table) of a first stage.

    On films the table holds what the two guessers pay, too. Seed s starts from the weights that the
    *next* seed draws: otherwise its blocks would meet the embedder beside which they were trained,
    hardly changed.
    """
    data = first_data(plan, kind)
    params = fresh_weights(plan, 1, data.vocabulary)
    given = plan.world.frame_tokens if data.films else 0
    params, table = train(plan, "first", params, data.rows, data.validation, given)
    if data.films:
        for guesser in (nca.counting, nca.looking_up):
            paid = {}
            for seed, frames in enumerate(data.films):
                paid[seed] = guesser(frames, plan.world)
            table[guesser.__name__] = table.seed.map(paid)
    return params, table


def closed(table: pd.DataFrame) -> pd.Series:
    """Share of the gap between counting and looking up that a first stage closed. [seeds]"""
    last = table[table.step == table.step.max()].set_index("seed")
    return (last.counting - last.val_loss) / (last.counting - last.looking_up)


def run(plan: Plan, arm: str) -> pd.DataFrame:
    """The points of an arm, of all its seeds: first stage if it has one, then the text stage.

    Raises:
      UserError: a seed learned too little of the automata for its blocks to be moved.
    """
    kind, parts = ARMS[arm]
    params = fresh_weights(plan)
    tables = []
    if kind:
        learned, table = first_stage(plan, kind)
        tables.append(table)
        if kind == "automata":
            least = closed(table).min()
            if least < plan.gate:
                raise UserError(f"the gate: of the gap {least:.0%} closed, {plan.gate:.0%} needed. "
                                "Make the films easier (Plan.world).")
        params = transfer(params, learned, parts)
    data = text_data(plan)
    _, table = train(plan, "text", params, data.text, data.validation)
    tables.append(table)
    return pd.concat(tables).assign(
        arm=arm,
        plan=digest(dataclasses.asdict(plan))[:12],
        jax=jax.__version__,
        device=jax.devices()[0].device_kind)


def compare(plan: Plan, folder: Path) -> None:
    """Make the arms that a folder lacks, a csv file each."""
    def make(plan, arm):
        return run(plan, arm).to_csv(index=False, float_format="%.6f")

    wanted = {}
    for arm in ARMS:
        wanted[folder / f"{arm}.csv"] = (plan, arm)
    runs.fill(wanted, make)


# -- Results --------------------------------------------------------------------------------------

def final(table: pd.DataFrame) -> pd.DataFrame:
    """Validation loss at the end of the text stage. [seeds x arms]"""
    text = table[table.stage == "text"].sort_values("step")
    return text.groupby(["seed", "arm"]).val_loss.last().unstack()


def differences(ends: pd.DataFrame) -> pd.DataFrame:
    """One row a comparison of stored arms: nats per token that the first ends above the second.

    Pairs of one seed, t intervals. They are widened for the number of `COMPARISONS` (Bonferroni):
    with 95% none of them misses.
    """
    table = []
    confidence = 1 - 0.05 / len(COMPARISONS)
    for arm, base in COMPARISONS:
        if arm not in ends or base not in ends:
            continue
        test = scipy.stats.ttest_rel(ends[arm], ends[base])
        interval = test.confidence_interval(confidence)
        difference = (ends[arm] - ends[base]).mean()
        table.append([arm, base, difference, interval.low, interval.high])
    return pd.DataFrame(table, columns=["arm", "against", "difference", "low", "high"])


if __name__ == "__main__":
    compare(Plan(), STORED)
