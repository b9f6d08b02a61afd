"""11's laboratory: the tiny base trained with its weights stored in different ways, and judged.

    python -m appendix.qlora_runs                   adds the runs that data/qlora/ lacks
    python -m appendix.qlora_runs VARIANT SEED      one of them

Each run is 03 at size tiny on one device, with half as many steps: its data (`data/` of 02),
settings, step and loop. A run that was killed continues; one that is stored is not repeated.
"""

import itertools
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import optax
import pandas as pd

from appendix import quantized
from helpers import chat, gemma, stats, train
from verilog import answers, judge
from helpers.run import (
    UserError,
    alone,
    one_line_errors,
    read_json,
    read_table,
    run_dir,
    write_text,
)

BASE = "assets/tiny_gemma4"
STORED = Path("data/qlora")
SEEDS = (42, 43, 44)
SETTINGS = {"rank": 16, "alpha": 32.0, "learning_rate": 5e-3, "warmup_steps": 10,
            "weight_decay": 0.001, "max_grad_norm": 1.0, "steps": 38}  # TINY of 03, half as long
VARIANTS = {  # how the base is stored, and in what its products are computed
    "bfloat16": {"base_dtype": "bfloat16", "tile_size": 0, "int8_products": False},
    "int8": {"base_dtype": "int8", "tile_size": 0, "int8_products": False},
    "int8 arithmetic": {"base_dtype": "int8", "tile_size": 0, "int8_products": True},
    "nf4": {"base_dtype": "nf4", "tile_size": 32, "int8_products": False},
}
ANSWERS = 3          # drawn answers per problem, beside the greedy one
TEMPERATURE = 0.8
ANSWER_TOKENS = 192
# What the tables of data/qlora/ need in every row.
COLUMNS = {"runs.csv": ("variant", "seed", "val_loss"), "loss.csv": ("variant", "seed", "step"),
           "answers.csv": ("variant", "seed", "model", "problem", "plan", "c", "n")}


def world():
    """(config in bfloat16, mesh of one device) of the tiny base."""
    config = gemma.config_from_hf(BASE, dtype="bfloat16")
    return config, gemma.make_mesh(config, (1, 1), jax.local_devices(backend="cpu")[:1])


def build(variant, seed=SEEDS[0], rank=SETTINGS["rank"], alpha=SETTINGS["alpha"]):
    """(model with adapters, mesh) for a name of `VARIANTS`."""
    (config, mesh), how = world(), VARIANTS[variant]
    model = quantized.load_base(BASE, config, mesh, how["base_dtype"], how["tile_size"])
    gemma.use_block_attention(model, 128)
    provider = quantized.provider(how["base_dtype"], rank, alpha, tile_size=how["tile_size"],
                                  int8_products=how["int8_products"])
    return gemma.inject_lora(model, rank, alpha, mesh, seed=seed, provider=provider), mesh


def fit(variant, seed, folder, steps=SETTINGS["steps"], validate_every=19, data=None):
    """Train a variant as 03 does; returns (model, mesh, path of the log).

    Args:
      variant: a name of `VARIANTS`.
      seed: of A's first values and of the order of the rows.
      folder: for log and checkpoints; a run found there goes on.
      steps: optimizer steps of four rows, and the schedule's length.
      validate_every: steps between validation losses.
      data: 02's folder; None is RUN_DIR's.

    Raises:
      UserError: another process trains in this folder.
    """
    data, folder = Path(data or run_dir("data")), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        return _fit(variant, seed, folder, steps, validate_every, data)


def _fit(variant, seed, folder, steps, validate_every, data):
    model, mesh = build(variant, seed)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, SETTINGS["learning_rate"], min(SETTINGS["warmup_steps"], steps // 2), steps)
    optimizer = train.make_optimizer(
        schedule, SETTINGS["weight_decay"], SETTINGS["max_grad_norm"])
    rows, held_out = (train.PackedRows(data / part) for part in ("train", "val"))
    most = max(int(np.asarray(one.arrays["loss_mask"]).sum(-1).max()) for one in (rows, held_out))
    loss_fn = train.make_loss(min(-(-most // 128) * 128, rows.arrays["tokens"].shape[1] - 1))
    state, frozen = train.start(model, optimizer, mesh)
    recipe = SETTINGS | VARIANTS[variant] | {
        "steps": steps, "seed": seed, "data_sha256": read_json(data / "meta.json")["data_sha256"]}
    manager = train.open_checkpoints((folder / "checkpoints").resolve(), 19, steps)
    train.refuse_another_recipe(manager, recipe)
    state = train.restore(manager, state)
    dataset = train.make_dataset(rows, 2, 2, seed)
    held_out = train.to_mesh(train.validation_batch(held_out, 8, 2), mesh)
    evaluate = jax.jit(train.make_eval_step(model, loss_fn))
    log = train.StepLog(folder / "log.jsonl", steps, 19)
    with gemma.use_mesh(mesh):
        state = train.train(
            state, frozen, train.jit_train_step(model, optimizer, loss_fn, state),
            lambda adapters: float(evaluate(adapters, frozen, held_out)), dataset, mesh, log,
            manager, recipe, validate_every)
    manager.close()
    gemma.nnx.update(model, state.adapters)
    return model, mesh, log.path


def ask(model, mesh, problems, drawn=ANSWERS, data=None):
    """Answers to problems: [(problem, "greedy" or "drawn", text)], all in one batch."""
    meta = read_json(Path(data or run_dir("data")) / "meta.json")
    tokenizer = chat.load_tokenizer(BASE)
    stops = {tokenizer.eos_token_id, chat.special_ids(tokenizer)[chat.TURN_END]}
    jobs = [(problem, plan) for problem in problems for plan in ["greedy"] + ["drawn"] * drawn]
    system = [{"role": "system", "content": meta["system"]}] if meta["system"] else []
    prompts = [chat.prompt_ids(tokenizer, [*system, {"role": "user", "content": (
        problem.prompt.strip())}], meta["reasoning"] == "kept") for problem, _ in jobs]
    heat = [TEMPERATURE * (plan == "drawn") for _, plan in jobs]
    rows = gemma.greedy(model, prompts, ANSWER_TOKENS, stops, mesh, heat, seed=1)
    texts = [tokenizer.decode(row).split(chat.TURN_END)[0] for row in rows]
    return [(*job, text) for job, text in zip(jobs, texts, strict=True)]


def judged(asked):
    """One row per problem and plan: passing answers `c` of `n`, by 07's judge."""
    verdicts = judge.judge_many([(problem, answers.extract_code(text)[0])
                                 for problem, _, text in asked])
    table = pd.DataFrame([(problem.name, plan, verdict.passed) for (problem, plan, _), verdict
                          in zip(asked, verdicts, strict=True)],
                         columns=["problem", "plan", "passed"])
    found = table.groupby(["problem", "plan"], sort=False).passed.agg(c="sum", n="size")
    return found.reset_index()


def merged(tuned, mesh, into):
    """The model that 04 would make of a tuned one: merged into "dequantized" or "bfloat16"."""
    config, _ = world()
    plain = gemma.place(gemma.load_base(BASE, config, mesh), mesh)
    if into == "dequantized":
        plain = quantized.dequantize_into(plain, tuned)
    return quantized.merge_into(plain, tuned, SETTINGS["alpha"] / SETTINGS["rank"])


def weight_errors(storages):
    """Relative error of every stored matrix of the tiny base: ||W - Q|| / ||W||, one row each.

    Args:
      storages: list of (base_dtype, tile_size).
    """
    config, mesh = world()
    plain = gemma.abstract_base(config, mesh)
    whole = gemma.place(gemma.load_base(BASE, config, mesh), mesh)
    rows = []
    for base_dtype, tile_size in storages:
        for path, hull in quantized.plan(plain, mesh, base_dtype, tile_size).items():
            weight = getattr(quantized.module_at(whole, path[:-1]), path[-1]).get_value()
            stored = quantized.quantize_weight(weight, hull.how)
            exact = np.asarray(weight, np.float32)
            lost = exact - np.asarray(quantized.qwix.dequantize(stored), np.float32)
            rows.append((f"{base_dtype}, tiles of {tile_size}" if tile_size else base_dtype,
                         path[1], path[-2], np.linalg.norm(lost) / np.linalg.norm(exact)))
    return pd.DataFrame(rows, columns=["storage", "layer", "kind", "error"])


def gradients(model, mesh, rows):
    """Adapter gradients of the summed loss of packed rows, {kind: one flat array}."""
    graph, adapters, frozen = gemma.nnx.split(model, gemma.nnx.LoRAParam, ...)
    loss_fn = train.make_loss(rows.tokens.shape[1] - 1)
    with gemma.use_mesh(mesh):
        found = jax.jit(jax.grad(lambda adapters, frozen: loss_fn(
            gemma.nnx.merge(graph, adapters, frozen), rows)[0]))(adapters, frozen)
    kinds = {}
    for path, leaf in gemma.nnx.to_flat_state(found):
        kinds.setdefault(path[-2], []).append(np.ravel(leaf.get_value()))
    return {kind: np.concatenate(parts) for kind, parts in kinds.items()}


def with_random_b(model, seed=0):
    """The model with a random B in every adapter: with B = 0, the gradient of A is zero."""
    draw = np.random.default_rng(seed)
    for pair in gemma.adapted_modules(model).values():
        pair["b"].set_value(np.asarray(draw.normal(0, 0.05, pair["b"].shape), np.float32))
    return model


def cosine(a, b):
    """Cosine of the angle between two flat arrays."""
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def add_rows(name, rows):
    """Put one run's rows into a table of data/qlora/, in place of those it had; a whole file."""
    STORED.mkdir(exist_ok=True)
    with alone(STORED, wait=True):
        path = STORED / name
        old = [stored(name)] if path.exists() else []
        run = ["variant", "seed"]
        others = [table[~table.set_index(run).index.isin(rows.set_index(run).index)]
                  for table in old]
        write_text(path, pd.concat([*others, rows], ignore_index=True).to_csv(
            index=False, float_format="%.6g"))


def stored(name):
    """A table of data/qlora/, empty if there is none.

    Raises:
      UserError: it is damaged.
    """
    path = STORED / name
    if path.exists():
        return read_table(path, COLUMNS[name])
    return pd.DataFrame(columns=[*COLUMNS[name], *(["loss"] if name == "loss.csv" else [])])


def scores(table, model, plan="drawn"):
    """pass@1 by variant for one way to serve it, with intervals over problems, paired.

    Args:
      table: answers.csv.
      model: "as trained", "merged into dequantized" or "merged into bfloat16".
      plan: "drawn" or "greedy".

    Returns:
      One row per variant: its mean over seeds and 95 % interval over problems; its lowest and
      highest seed; its difference to bfloat16 as trained on the same problems, and p of that.
    """
    table = table[table.plan == plan].assign(share=lambda rows: rows.c / rows.n)
    shares = table.pivot_table(index="problem", columns=["model", "variant"], values="share")
    if ("as trained", "bfloat16") not in shares:  # nothing to compare with
        return pd.DataFrame(columns=["seeds", "pass@1"])
    first, rows = shares["as trained", "bfloat16"], {}
    for variant in VARIANTS:
        if (model, variant) not in shares:
            continue
        mine = shares[model, variant]
        seeds = table[(table.model == model) & (table.variant == variant)].groupby("seed").share
        mean, low, high = stats.interval(mine)
        more, least, most = stats.interval(mine - first)
        rows[variant] = {"seeds": seeds.ngroups, "pass@1": mean, "from": low, "to": high,
                         "lowest seed": seeds.mean().min(), "highest seed": seeds.mean().max(),
                         "against bfloat16": more, "from ": least, "to ": most,
                         "p": stats.sign_flip_p(mine - first)}
    return pd.DataFrame(rows).T


def merge_scores(table):
    """`scores` of the quantised variants, by what they were merged into."""
    models = ("as trained", "merged into dequantized", "merged into bfloat16")
    columns = ["pass@1", "from", "to", "against bfloat16", "p"]
    found = {model: scores(table, model).reindex(columns=columns).drop("bfloat16", errors="ignore")
             for model in models}
    return pd.concat(found, names=["served", "variant"]).swaplevel().sort_index(
        sort_remaining=False)


def gaps(table, mine, base, plan="drawn"):
    """Share of passing answers, `mine` minus `base`: a row per problem, a column per seed.

    Args:
      table: answers.csv.
      mine, base: (model, variant), as ("as trained", "nf4"); a seed that only one has is left out.
      plan: "drawn" or "greedy".
    """
    table = table[table.plan == plan].assign(share=lambda rows: rows.c / rows.n)
    first, second = (table[(table.model == model) & (table.variant == variant)].pivot(
        index="problem", columns="seed", values="share") for model, variant in (mine, base))
    return (first - second).dropna(axis=1, how="all").astype(float)


def differences(table, pairs):
    """Mean paired differences, with what is known of them over problems and over seeds.

    Neither interval holds the other's spread: the first keeps the trained models as they are, the
    second the problems.

    Args:
      table: answers.csv.
      pairs: {label: (mine, base, plan)}, see `gaps`; those that are not stored are left out.

    Returns:
      One row per pair: seeds, mean, how many problems `differ`, 95 % interval over problems (seeds
      averaged) and p of that, 95 % t interval over seeds (problems averaged; nan if unknown).
    """
    rows = {}
    for label, pair in pairs.items():
        found = gaps(table, *pair)
        if found.empty:
            continue
        by_problem = found.mean(axis=1).round(15)  # thirds that cancel leave 1e-17
        mean, low, high = stats.interval(by_problem)
        _, least, most = stats.seed_interval(found.mean())
        rows[label] = {"seeds": found.shape[1], "difference": mean, "differ": sum(by_problem != 0),
                       "problems from": low, "problems to": high,
                       "p": stats.sign_flip_p(by_problem), "seeds from": least, "seeds to": most}
    return pd.DataFrame(rows).T


def run(variant, seed):
    """Train, ask and judge one variant, unless it is stored; its rows go to data/qlora/."""
    done, *_ = map(stored, COLUMNS)  # all of them: damage is said before hours of training
    if len(done) and ((done.variant == variant) & (done.seed == seed)).any():
        return
    began = time.perf_counter()
    model, mesh, path = fit(variant, seed, run_dir("qlora", f"{variant}-{seed}"))
    log = pd.read_json(path, lines=True)
    if "val_loss" not in log or log.val_loss.isna().all():
        raise UserError(f"{path} has no validation loss: it was damaged after training. Delete "
                        f"{path.parent} and run this again.")
    models = {"as trained": model}
    if VARIANTS[variant]["base_dtype"] != "bfloat16":
        models |= {f"merged into {into}": merged(model, mesh, into)
                   for into in ("dequantized", "bfloat16")}
    label, tables, shares = {"variant": variant, "seed": seed}, [], {}
    problems = judge.load_problems("data/tiny_eval")
    for name, one in models.items():
        table = judged(ask(one, mesh, problems))
        tables.append(table.assign(**label, model=name))
        shares |= {f"{name}, {plan}": each.c.sum() / each.n.sum()
                   for plan, each in table.groupby("plan")}
        print(label, name, {plan: f"{share:.3f}" for plan, share in shares.items()}, flush=True)
    add_rows("answers.csv", pd.concat(tables))
    add_rows("loss.csv", log[["step", "loss", "val_loss"]].assign(**label))
    add_rows("runs.csv", pd.DataFrame([label | VARIANTS[variant] | {
        "steps": SETTINGS["steps"], "val_loss": log.val_loss.dropna().iloc[-1], **shares,
        "seconds": time.perf_counter() - began, "jax": jax.__version__,
        "qwix": version("qwix"), "date": time.strftime("%Y-%m-%d")}]))


if __name__ == "__main__":
    one_line_errors()
    known = {(variant, str(seed)): (variant, seed)
             for seed, variant in itertools.product(SEEDS, VARIANTS)}
    asked = [tuple(sys.argv[1:])] if sys.argv[1:] else list(known)
    if asked[0] not in known:
        raise UserError(f"no run is called {' '.join(asked[0])}. Say a variant and a seed: "
                        f"{', '.join(VARIANTS)}; {', '.join(map(str, SEEDS))}.")
    for name in asked:
        run(*known[name])
