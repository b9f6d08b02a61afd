"""11's laboratory: the tiny base trained with its weights in different formats, and judged.

    python -m appendix.qlora_runs     makes the runs that data/qlora/ lacks of this base

Each run trains on one device, on `data/` of 02 at size tiny and with 03's step, for 38 steps.
"""

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
import scipy.stats
from flax import nnx
from jax.sharding import Mesh
from tunix.models.gemma4.model import Gemma4, ModelConfig

import verilog
from appendix import runs
from appendix.tuning import Tuning
from helpers import chat, gemma, quantized, train, weights
from helpers.records import DataMeta
from helpers.run import run_dir
from tpu_time import fit as renting
from verilog import stats
from verilog.asking import messages_for
from verilog.problems import Problem

BASE = "assets/tiny_gemma4"
STORED = Path("data/qlora")
SEEDS = (42, 43, 44)
SETTINGS = train.Settings(rank=16, alpha=32.0, learning_rate=5e-3, warmup_steps=10,
                          max_steps=38)  # a tenth of 03's
VARIANTS = {  # (how the base is stored, whether its products are computed in int8)
    "bfloat16": ("bfloat16", False),
    "int8": ("int8", False),
    "int8 arithmetic": ("int8", True),
    "nf4": ("nf4", False),
}
DRAWN = 3            # answers per problem at TEMPERATURE, beside the greedy one
PLANS = ("greedy", *("drawn",) * DRAWN)  # how the answers to a problem are picked
TEMPERATURE = 0.8
ANSWER_TOKENS = 192
PUBLISHED_TOKENS = 10_000 * 922  # of the published run's samples


class Answer(NamedTuple):
    """What a model wrote to a problem, "greedy" or "drawn"."""

    problem: Problem
    plan: str
    text: str


class Trained(NamedTuple):
    """A variant after its training."""

    model: Gemma4
    mesh: Mesh
    losses: list[float]  # of its steps
    validation: float    # loss on the held-out rows


def world() -> tuple[ModelConfig, Mesh]:
    """(config in bfloat16, mesh of one device) of the tiny base."""
    config = gemma.config_from_hf(BASE, dtype="bfloat16")
    return config, gemma.make_mesh(config, (1, 1), jax.local_devices(backend="cpu")[:1])


def build(variant: str, seed: int = SEEDS[0]) -> tuple[Gemma4, Mesh]:
    """(model with adapters, mesh) for a name of `VARIANTS`."""
    config, mesh = world()
    base_dtype, int8_products = VARIANTS[variant]
    model = quantized.load_base(BASE, config, mesh, base_dtype)
    gemma.use_block_attention(model, 128)
    rank, alpha = SETTINGS.rank, SETTINGS.alpha
    provider = quantized.provider(base_dtype, rank, alpha, int8_products=int8_products)
    return gemma.inject_lora(model, rank, alpha, mesh, seed=seed, provider=provider), mesh


def fit(variant: str, seed: int, steps: int = SETTINGS.max_steps) -> Trained:
    """Train a variant with 03's step.

    The seed is that of A's first values and of the order of the rows; a step takes four.
    """
    model, mesh = build(variant, seed)
    schedule = train.make_schedule(SETTINGS, steps)
    optimizer = train.make_optimizer(schedule, SETTINGS.weight_decay, SETTINGS.max_grad_norm)
    rows = train.PackedRows(run_dir("data", "train"))
    held_out = train.PackedRows(run_dir("data", "val"))
    loss_fn = train.make_loss(train.capacity_of(rows, held_out))
    batches = train.make_dataset(rows, 2, 2, seed)

    tuning = Tuning(model, mesh, optimizer, loss_fn, batches)
    tuning.run(steps)
    validation = tuning.evaluate(train.validation_batch(held_out, 8, 2))
    tuning.finish()
    return Trained(model, mesh, tuning.losses, validation)


def ask(model: Gemma4, mesh: Mesh, problems: Sequence[Problem]) -> list[Answer]:
    """Answers to problems, one greedy and `DRAWN` drawn ones to each, all in one batch."""
    meta = DataMeta.load()
    tokenizer = chat.load_tokenizer(BASE)
    stops = chat.stop_ids(tokenizer)
    asked, plans, heat, chats = [], [], [], []
    for problem in problems:
        messages = messages_for(problem, "ours", meta.system)
        for plan in PLANS:
            asked.append(problem)
            plans.append(plan)
            heat.append(0.0 if plan == "greedy" else TEMPERATURE)
            chats.append(messages)
    prompts = chat.render_prompts(tokenizer, chats, [meta.thinking] * len(chats))
    rows = gemma.greedy(model, prompts, ANSWER_TOKENS, stops, mesh, heat, seed=1)
    answers = []
    for problem, plan, row in zip(asked, plans, rows, strict=True):
        text = tokenizer.decode(row).split(chat.TURN_END)[0]
        answers.append(Answer(problem, plan, text))
    return answers


def judged(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """[{problem, plan, c passing answers of n}] by 07's judge."""
    pairs = []
    for answer in answers:
        code, _ = verilog.extract_code(answer.text)
        pairs.append((answer.problem, code))
    verdicts = verilog.judge_many(pairs)
    rows = []
    for answer, verdict in zip(answers, verdicts, strict=True):
        rows.append((answer.problem.name, answer.plan, verdict.passed))
    table = pd.DataFrame(rows, columns=["problem", "plan", "passed"])
    counts = table.groupby(["problem", "plan"], sort=False).passed.agg(c="sum", n="size")
    return counts.reset_index().to_dict("records")


def gradients(model: Gemma4, mesh: Mesh, rows: train.Batch) -> dict[str, np.ndarray]:
    """Adapter gradients of the summed loss of packed rows, {kind: one flat array}.

    Each adapter first gets a random B, in place: with B = 0, the gradient of A is zero.
    """
    draw = np.random.default_rng(0)
    for pair in gemma.adapted_modules(model).values():
        values = draw.normal(0, 0.05, pair["b"].shape)
        pair["b"].set_value(values.astype(np.float32))
    graph, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    loss_fn = train.make_loss(rows.tokens.shape[1] - 1)

    def loss(adapters, frozen):
        total, _ = loss_fn(nnx.merge(graph, adapters, frozen), rows)
        return total

    with mesh:
        slopes = jax.jit(jax.grad(loss))(adapters, frozen)
    kinds: dict[str, list[np.ndarray]] = {}
    for path, leaf in nnx.to_flat_state(slopes):
        kind = path[-2]  # the adapted matrix
        kinds.setdefault(kind, []).append(np.ravel(leaf.get_value()))
    return {kind: np.concatenate(parts) for kind, parts in kinds.items()}


def cosines(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """{kind: cosine of the angle between two models' `gradients`}."""
    result = {}
    for kind, first in ours.items():
        second = theirs[kind]
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        result[kind] = float(cosine)
    return result


# ── Stored runs ──


def base_id() -> str:
    """Twelve letters that tell this base from another; every stored run carries its own."""
    return weights.fingerprint(BASE)[:12]


def stored(base: str) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(runs, losses, answers) of data/qlora/, of one base (`base_id`): three tables.

    runs: variant, seed, base, val_loss …; losses: a row per step; answers: c of n passing answers
    per problem and plan, "greedy" or "drawn".
    """
    runs_of_base = []
    for path in STORED.glob(f"*-{base}.json"):
        runs_of_base.append(json.loads(path.read_text()))
    order = list(VARIANTS)

    def place(run):
        return order.index(run["variant"]), run["seed"]

    runs_of_base.sort(key=place)
    losses = pd.json_normalize(runs_of_base, "loss", ["variant", "seed"])
    answers = pd.json_normalize(runs_of_base, "answers", ["variant", "seed"])
    table = pd.DataFrame(runs_of_base).drop(columns=["loss", "answers"])
    return table, losses, answers


def gaps(table: pd.DataFrame, mine: str, plan: str = "drawn") -> pd.DataFrame:
    """Share of passing answers (from `stored`), variant `mine` minus bfloat16, "drawn" or "greedy".

    A row per problem, a column per seed that both have.
    """
    of_plan = table[table.plan == plan]
    of_plan = of_plan.assign(share=of_plan.c / of_plan.n)

    def shares(variant):
        rows = of_plan[of_plan.variant == variant]
        return rows.pivot(index="problem", columns="seed", values="share")

    gap = shares(mine) - shares("bfloat16")
    return gap.dropna(axis=1, how="all").astype(float)


def seed_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean over runs that differ in their seed, and its t interval: (mean, low, high).

    Low and high are nan where the spread is unknown: for one run, and where all values are equal.
    A few equal scores show how coarse the score is, not that another seed would give the same.
    """
    values = np.asarray(values, float)
    mean = float(values.mean())
    if len(values) < 2 or np.allclose(values, values[0], rtol=0, atol=1e-12):
        return mean, math.nan, math.nan
    test = scipy.stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval(0.95)
    return mean, float(low), float(high)


def in_points(table: pd.DataFrame) -> pd.DataFrame:
    """`differences` as text, in points, with an en dash for what's unknown."""
    shown = (100 * table.drop(columns=["seeds", "p"])).astype(float)
    text = shown.map(lambda value: "–" if np.isnan(value) else f"{value:+.1f}")
    return text.rename_axis(["answers", "base"]).reset_index()


def differences(table: pd.DataFrame,
                plans: Sequence[str] = ("drawn", "greedy")) -> pd.DataFrame:
    """Every variant against bfloat16, with what is known over problems and over seeds.

    Neither interval holds the other's spread: the first keeps the trained models as they are, the
    second the problems.

    Returns:
      One row per plan and variant: seeds, mean, 95% interval over problems (seeds averaged) and p
      of that, 95% t interval over seeds (problems averaged; nan if unknown).
    """
    rows = {}
    for plan, name in itertools.product(plans, VARIANTS):
        if name == "bfloat16":
            continue
        gap = gaps(table, name, plan=plan)
        by_problem = gap.mean(axis=1).round(15)  # thirds that cancel leave 1e-17
        mean, low, high = stats.interval(by_problem)
        _, least, most = seed_interval(gap.mean())
        rows[plan, name] = {
            "seeds": gap.shape[1],
            "difference": mean,
            "problems from": low,
            "problems to": high,
            "p": stats.sign_flip_p(by_problem),
            "seeds from": least,
            "seeds to": most,
        }
    return pd.DataFrame(rows).T


def one_row() -> renting.Fit:
    """The 31B's int8 step on a v5e-4 if a step has a single row, so no loop: as 08 compiled it."""
    table = pd.read_csv("data/dryrun/v5e-4_31b.csv", dtype=str, keep_default_na=False)
    row = table[table.recipe == "int8, DECODER remat, one row"].iloc[0]
    return renting.of_row("v5e-4", "31b", row.to_dict())


def best_steps(slices: Sequence[tuple[str, str, int]]) -> pd.DataFrame:
    """The best training step in each format, as text, and what the published samples would cost.

    Args:
      slices: (model, kind of chip, chips) of each.
    """
    rows = []
    for (model, kind, chips), dtype in itertools.product(slices, quantized.BASE_DTYPES):
        step = renting.best_fit(kind, chips, model, dtype)
        cost = renting.run_cost(step, PUBLISHED_TOKENS, renting.price(kind, chips))
        gib, how = renting.needed(step)
        is_timed = step.fits and step.speed is not None
        rows.append({
            "model": model,
            "slice": step.slice,
            "base": dtype,
            "fits": "yes" if step.fits else "no",
            "rows": f"{step.rows} x {step.row_length:,}",
            "GiB a chip": f"{gib:.1f} of {step.limit:.2f}",
            "how we know": how,
            "hours": cost["hours_text"] if is_timed else "-",
            "USD": cost["dollars_text"] if is_timed else "-",
        })
    return pd.DataFrame(rows)


def run(variant: str, seed: int) -> str:
    """Train, ask and judge one variant; returns what is stored of it, as JSON."""
    began = time.perf_counter()
    trained = fit(variant, seed)
    answers = ask(trained.model, trained.mesh, verilog.load_problems("data/tiny_eval"))
    counts = judged(answers)
    losses = []
    for step, loss in enumerate(trained.losses, 1):
        losses.append({"step": step, "loss": round(loss, 5)})
    return json.dumps({
        "variant": variant,
        "seed": seed,
        "base": base_id(),
        "steps": SETTINGS.max_steps,
        "val_loss": trained.validation,
        "seconds": round(time.perf_counter() - began),
        "jax": jax.__version__,
        "qwix": version("qwix"),
        "date": time.strftime("%Y-%m-%d"),
        "loss": losses,
        "answers": counts,
    })


def main() -> None:
    """Make the runs that are missing."""
    base = base_id()
    wanted = {}
    for seed, variant in itertools.product(SEEDS, VARIANTS):
        name = variant.replace(" ", "_")
        wanted[STORED / f"{name}-{seed}-{base}.json"] = (variant, seed)
    runs.fill(wanted, run)


if __name__ == "__main__":
    main()
