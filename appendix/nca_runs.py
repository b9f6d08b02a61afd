"""12's laboratory: the arms that ask whether films of automata help a model to read, and their runs.

    python -m appendix.nca_runs     makes the arms that data/nca/ lacks

Letters in shape comments: S seeds, K steps, N rows, B rows of a step, T tokens.
"""

import dataclasses
import functools
from pathlib import Path

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

BASE, STORED = Path("assets/tiny_gemma4"), Path("data/nca")
VOCABULARY = 1280  # of text: the tiny model's tokenizer


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
    return jax.tree.map_with_path(
        lambda path, _: part_of(jax.tree_util.keystr(path, simple=True, separator=".")), params)


def transfer(fresh, learned, parts):
    """`fresh` weights with those of the named parts from `learned`; the others stay fresh."""
    return jax.tree.map(lambda part, new, old: jnp.array(old if part in parts else new),
                        named_parts(fresh), fresh, learned)


def fresh_model(plan, seed, vocabulary=VOCABULARY):
    """(graph, weights) of a new model; a first stage without text needs a smaller vocabulary."""
    config = gemma.config_from_hf(BASE, dtype="float32", **dict(plan.model), num_embed=vocabulary)
    return nnx.split(pretrain.initialise(Gemma4(config, rngs=nnx.Rngs(0)), seed))


def stacked(trees):
    """One tree of many like it: their arrays get a first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


# -- Data of the five seeds, side by side: [S, N, T] -----------------------------------------------

@functools.lru_cache(1)
def text_data(plan):
    """(rows of the text stage, rows of other documents for a first stage, validation rows).

    Documents of 09's corpus, for validation others, are joined and cut into rows. Here no module has
    a bug (`bug_share=0`), unlike in the corpus that 09's base reads. Which documents are read in
    which stage differs from seed to seed; validation is the same.
    """
    from appendix.world import make
    tokenizer, length = Tokenizer.from_file(str(BASE / "tokenizer.json")), plan.world.film_tokens

    def cut(documents):
        ids = np.concatenate(pretrain.encode(tokenizer, documents)).astype(np.int32)
        return ids[:len(ids) // length * length].reshape(-1, length)

    documents = list(make.documents(plan.documents, bug_share=0))
    unread = set(make.documents(600, seed=77, bug_share=0)) - set(documents)
    corpus, others = cut(documents), cut(sorted(unread))
    text, first = plan.text_steps * plan.rows, plan.first_steps * plan.rows
    order = [np.random.default_rng(seed).permutation(len(corpus)) for seed in range(plan.seeds)]
    drawn = np.stack([corpus[numbers] for numbers in order])
    same = np.stack([others[:plan.validation]] * plan.seeds)
    return drawn[:, :text], drawn[:, text:text + first], same


def first_data(plan, kind):
    """(rows, validation rows, vocabulary, the films of the validation rows, if any) of a first stage."""
    if kind == "text":
        return *text_data(plan)[1:], VOCABULARY, None
    world, cut, seeds = plan.world, plan.first_steps * plan.rows, range(plan.seeds)
    count = cut + plan.validation
    if kind == "dyck":
        drawn = np.stack([nca.brackets(count, world.film_tokens, plan.kinds, seed) for seed in seeds])
        return drawn[:, :cut], drawn[:, cut:], nca.FIRST + 2 * plan.kinds, None
    films = [nca.kept_films(seed, count, world) for seed in seeds]
    if kind == "shuffled":
        films = [nca.shuffled(films[seed], seed) for seed in seeds]
    drawn = np.stack([nca.rows(each, world.states) for each in films])
    return drawn[:, :cut], drawn[:, cut:], world.vocabulary, [each[cut:] for each in films]


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


def train(plan, stage, params, data, validation, given=0):
    """Train every seed from its weights in `params` [S, ...], which are used up. Rows are read in order.

    Returns:
      (weights [S, ...], table): a row for each point and seed, losses in nats a token. The first
      `given` tokens of a row are not trained on.
    """
    size, steps = plan.rows, plan.first_steps if stage == "first" else plan.text_steps
    vocabulary = params["embedder"]["input_embedding"].get_value().shape[1]
    seen = pretrain.tokens_seen([data, validation], vocabulary)  # a masked id would cost 1e9 nats
    initial, advance, evaluate = programs(plan, stage, vocabulary)
    held = jnp.asarray(validation.reshape(plan.seeds, -1, size, validation.shape[-1]))
    state, points = initial(params), []
    progress = Progress(steps, f"{stage} stage: step", every=10)
    for done in range(plan.every, steps + 1, plan.every):
        batch = data[:, (done - plan.every) * size:done * size]
        state, losses = advance(state, batch.reshape(plan.seeds, plan.every, size, -1), seen, given)
        values = evaluate(state[0], held, seen, given).tolist()
        points += [{"seed": seed, "stage": stage, "step": done, "tokens": done * size * data.shape[-1],
                    "train_loss": loss, "val_loss": value}
                   for seed, (loss, value) in enumerate(zip(losses.mean(1).tolist(), values))]
        progress.update(plan.every, f"loss {np.mean(values):.3f}")
    return state[0], pd.DataFrame(points)


# -- Runs -----------------------------------------------------------------------------------------

@functools.lru_cache(1)  # `text` and `whole` share theirs
def first_stage(plan, kind):
    """(weights [S, ...], table) of a first stage.

    On films the table holds what the two guessers pay, too. Seed s starts from the weights that the
    *next* seed draws: otherwise its blocks would meet the embedder beside which they were trained,
    hardly changed.
    """
    data, validation, vocabulary, films = first_data(plan, kind)
    params = stacked([fresh_model(plan, seed + 1, vocabulary)[1] for seed in range(plan.seeds)])
    given = plan.world.frame_tokens if films else 0
    params, table = train(plan, "first", params, data, validation, given)
    if films:
        for name, guesser in (("counting", nca.counting), ("looking_up", nca.looking_up)):
            paid = {seed: guesser(frames, plan.world) for seed, frames in enumerate(films)}
            table[name] = table.seed.map(paid)
    return params, table


def closed(table):
    """Share of the gap between counting and looking up that a first stage closed. [seeds]"""
    last = table[table.step == table.step.max()].set_index("seed")
    return (last.counting - last.val_loss) / (last.counting - last.looking_up)


def run(plan, arm):
    """The points of an arm, of all its seeds: first stage if it has one, then the text stage.

    Raises:
      UserError: a seed learned too little of the automata for its blocks to be moved.
    """
    kind, parts = ARMS[arm]
    params, tables = stacked([fresh_model(plan, seed)[1] for seed in range(plan.seeds)]), []
    if kind:
        learned, table = first_stage(plan, kind)
        tables.append(table)
        if kind == "automata" and closed(table).min() < plan.gate:
            raise UserError(f"the gate: of the gap {closed(table).min():.0%} closed, "
                            f"{plan.gate:.0%} needed. Make the films easier (Plan.world).")
        params = transfer(params, learned, parts)
    text, _, validation = text_data(plan)
    tables.append(train(plan, "text", params, text, validation)[1])
    return pd.concat(tables).assign(
        arm=arm, plan=digest(dataclasses.asdict(plan))[:12], jax=jax.__version__,
        device=jax.devices()[0].device_kind)


def compare(plan, folder):
    """Make the arms that a folder lacks, a csv file each."""
    runs.fill({folder / f"{arm}.csv": (plan, arm) for arm in ARMS},
              lambda *which: run(*which).to_csv(index=False, float_format="%.6f"))


# -- Results --------------------------------------------------------------------------------------

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


if __name__ == "__main__":
    compare(Plan(), STORED)
