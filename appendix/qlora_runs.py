"""11's laboratory: the tiny base trained with its weights stored in different ways, and judged.

    python -m appendix.qlora_runs     makes the runs that data/qlora/ lacks of this base

Each run is 03 at size tiny on one device, with half as many steps: its data (`data/` of 02),
settings and step.
"""

import itertools
import json
import math
import time
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import scipy.stats

import verilog
from appendix import quantized, runs
from helpers import chat, gemma, train, weights
from helpers.records import DataMeta
from helpers.run import Progress, run_dir
from verilog import stats
from verilog.asking import messages_for

BASE = "assets/tiny_gemma4"
STORED = Path("data/qlora")
SEEDS = (42, 43, 44)
SETTINGS = train.Settings(rank=16, alpha=32.0, learning_rate=5e-3, warmup_steps=10,
                          max_steps=38)  # TINY of 03, half as long
VARIANTS = {  # how the base is stored, and in what its products are computed
    "bfloat16": {"base_dtype": "bfloat16", "int8_products": False},
    "int8": {"base_dtype": "int8", "int8_products": False},
    "int8 arithmetic": {"base_dtype": "int8", "int8_products": True},
    "nf4": {"base_dtype": "nf4", "int8_products": False},
}
DRAWN = 3            # answers per problem at TEMPERATURE, beside the greedy one
TEMPERATURE = 0.8
ANSWER_TOKENS = 192


def world():
    """(config in bfloat16, mesh of one device) of the tiny base."""
    config = gemma.config_from_hf(BASE, dtype="bfloat16")
    return config, gemma.make_mesh(config, (1, 1), jax.local_devices(backend="cpu")[:1])


def build(variant, seed=SEEDS[0]):
    """(model with adapters, mesh) for a name of `VARIANTS`."""
    (config, mesh), how, cfg = world(), VARIANTS[variant], SETTINGS
    model = quantized.load_base(BASE, config, mesh, how["base_dtype"])
    gemma.use_block_attention(model, 128)
    provider = quantized.provider(rank=cfg.rank, alpha=cfg.alpha, **how)
    return gemma.inject_lora(model, cfg.rank, cfg.alpha, mesh, seed=seed, provider=provider), mesh


def fit(variant, seed, steps=SETTINGS.max_steps):
    """Train a variant with 03's step; returns (model, mesh, losses of the steps, validation loss).

    The seed is that of A's first values and of the order of the rows; a step takes four.
    """
    model, mesh = build(variant, seed)
    optimizer = train.make_optimizer(train.make_schedule(SETTINGS, steps), SETTINGS.weight_decay,
                                     SETTINGS.max_grad_norm)
    rows, held_out = (train.PackedRows(run_dir("data", part)) for part in ("train", "val"))
    loss_fn = train.make_loss(train.capacity_of(rows, held_out))
    state, frozen = train.start(model, optimizer, mesh)
    step = train.jit_train_step(model, optimizer, loss_fn, state)
    evaluate = jax.jit(train.make_eval_step(model, loss_fn))
    batches = iter(train.make_dataset(rows, 2, 2, seed))
    adapters, moments, losses, progress = state.adapters, state.opt_state, [], Progress(steps, "step")
    with mesh:
        for _ in range(steps):
            batch = train.to_mesh(next(batches), mesh)
            adapters, moments, metrics = step(adapters, moments, frozen, batch)
            losses.append(float(metrics["loss"]))
            progress.update(note=f"loss {losses[-1]:.3f}")
        held_out = train.to_mesh(train.validation_batch(held_out, 8, 2), mesh)
        validation = float(evaluate(adapters, frozen, held_out))
    gemma.nnx.update(model, adapters)
    return model, mesh, losses, validation


def ask(model, mesh, problems):
    """Answers to problems: [(problem, "greedy" or "drawn", text)], all in one batch."""
    meta = DataMeta.load()
    tokenizer = chat.load_tokenizer(BASE)
    stops = chat.stop_ids(tokenizer)
    jobs = [(problem, plan) for problem in problems for plan in ["greedy"] + ["drawn"] * DRAWN]
    chats = [messages_for(problem, "ours", meta.system) for problem, _ in jobs]
    prompts = chat.render_prompts(tokenizer, chats, [meta.thinking] * len(chats))
    heat = [TEMPERATURE * (plan == "drawn") for _, plan in jobs]
    rows = gemma.greedy(model, prompts, ANSWER_TOKENS, stops, mesh, heat, seed=1)
    texts = [tokenizer.decode(row).split(chat.TURN_END)[0] for row in rows]
    return [(*job, text) for job, text in zip(jobs, texts, strict=True)]


def judged(asked):
    """[{problem, plan, c passing answers of n}] by 07's judge."""
    verdicts = verilog.judge_many([(problem, verilog.extract_code(text)[0])
                                 for problem, _, text in asked])
    table = pd.DataFrame([(problem.name, plan, verdict.passed) for (problem, plan, _), verdict
                          in zip(asked, verdicts, strict=True)],
                         columns=["problem", "plan", "passed"])
    found = table.groupby(["problem", "plan"], sort=False).passed.agg(c="sum", n="size")
    return found.reset_index().to_dict("records")


def gradients(model, mesh, rows):
    """Adapter gradients of the summed loss of packed rows, {kind: one flat array}.

    Each adapter first gets a random B, in place: with B = 0, the gradient of A is zero.
    """
    draw = np.random.default_rng(0)
    for pair in gemma.adapted_modules(model).values():
        pair["b"].set_value(np.asarray(draw.normal(0, 0.05, pair["b"].shape), np.float32))
    graph, adapters, frozen = gemma.nnx.split(model, gemma.nnx.LoRAParam, ...)
    loss_fn = train.make_loss(rows.tokens.shape[1] - 1)
    with mesh:
        found = jax.jit(jax.grad(lambda adapters, frozen: loss_fn(
            gemma.nnx.merge(graph, adapters, frozen), rows)[0]))(adapters, frozen)
    kinds = {}
    for path, leaf in gemma.nnx.to_flat_state(found):
        kinds.setdefault(path[-2], []).append(np.ravel(leaf.get_value()))
    return {kind: np.concatenate(parts) for kind, parts in kinds.items()}


def cosines(found, others):
    """{kind: cosine of the angle between two models' `gradients`}."""
    return {kind: float(one @ others[kind] / np.linalg.norm(one) / np.linalg.norm(others[kind]))
            for kind, one in found.items()}


# ── Stored runs ──


def base_id():
    """Twelve letters that tell this base from another; every stored run carries its own."""
    return weights.fingerprint(BASE)[:12]


def stored(base):
    """(runs, losses, answers) of data/qlora/, of one base (`base_id`): three tables.

    runs: variant, seed, base, val_loss …; losses: a row per step; answers: c of n passing answers
    per problem and plan, "greedy" or "drawn".
    """
    found = [json.loads(path.read_text()) for path in STORED.glob(f"*-{base}.json")]
    found.sort(key=lambda run: (list(VARIANTS).index(run["variant"]), run["seed"]))
    losses, answers = (pd.json_normalize(found, name, ["variant", "seed"])
                       for name in ("loss", "answers"))
    return pd.DataFrame(found).drop(columns=["loss", "answers"]), losses, answers


def gaps(table, mine, plan="drawn"):
    """Share of passing answers (from `stored`), variant `mine` minus bfloat16, "drawn" or "greedy".

    A row per problem, a column per seed that both have.
    """
    table = table[table.plan == plan].assign(share=lambda rows: rows.c / rows.n)
    first, second = (table[table.variant == name].pivot(index="problem", columns="seed",
                                                        values="share") for name in (mine, "bfloat16"))
    return (first - second).dropna(axis=1, how="all").astype(float)


def seed_interval(values):
    """Mean over runs that differ in their seed, and its t interval: (mean, low, high).

    Low and high are nan where the spread is unknown: for one run, and where all values are equal.
    A few equal scores show how coarse the score is, not that another seed would give the same.
    """
    values = np.asarray(values, float)
    if len(values) < 2 or np.allclose(values, values[0], rtol=0, atol=1e-12):
        return float(values.mean()), math.nan, math.nan
    low, high = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return float(values.mean()), float(low), float(high)


def differences(table, plans=("drawn", "greedy")):
    """Every variant against bfloat16, with what is known over problems and over seeds.

    Neither interval holds the other's spread: the first keeps the trained models as they are, the
    second the problems.

    Returns:
      One row per plan and variant: seeds, mean, 95 % interval over problems (seeds averaged) and p
      of that, 95 % t interval over seeds (problems averaged; nan if unknown).
    """
    rows = {}
    for plan, name in itertools.product(plans, [name for name in VARIANTS if name != "bfloat16"]):
        found = gaps(table, name, plan=plan)
        by_problem = found.mean(axis=1).round(15)  # thirds that cancel leave 1e-17
        mean, low, high = stats.interval(by_problem)
        _, least, most = seed_interval(found.mean())
        rows[plan, name] = {"seeds": found.shape[1], "difference": mean, "problems from": low,
                            "problems to": high, "p": stats.sign_flip_p(by_problem),
                            "seeds from": least, "seeds to": most}
    return pd.DataFrame(rows).T


def run(variant, seed):
    """Train, ask and judge one variant; returns what is stored of it, as JSON."""
    began = time.perf_counter()
    model, mesh, losses, validation = fit(variant, seed)
    answers = judged(ask(model, mesh, verilog.load_problems("data/tiny_eval")))
    return json.dumps({
        "variant": variant, "seed": seed, "base": base_id(), "steps": SETTINGS.max_steps,
        "val_loss": validation, "seconds": round(time.perf_counter() - began),
        "jax": jax.__version__, "qwix": version("qwix"), "date": time.strftime("%Y-%m-%d"),
        "loss": [{"step": step, "loss": round(loss, 5)} for step, loss in enumerate(losses, 1)],
        "answers": answers})


if __name__ == "__main__":
    runs.fill({STORED / f"{variant.replace(' ', '_')}-{seed}-{base_id()}.json": (variant, seed)
               for seed, variant in itertools.product(SEEDS, VARIANTS)}, run)
