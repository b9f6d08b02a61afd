"""Which recipe? Rate and rank on few rows of the tiny world, for the figure of docs/OWN_DATA.md.

    python -m appendix.recipes     makes the runs that data/recipes/ lacks, and draws all

A run goes eight times over eight of notebook 02's packed rows, with 03's step on one device. The
rate is constant after five steps of warm-up, so that any pass can be read as the end of a shorter
run. After some of them it answers the problems of data/tiny_eval, greedily, and 07's judge decides.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx
from jax.sharding import Mesh
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

import verilog
from appendix import runs
from helpers import chat, gemma, style, train
from helpers.answers import ask
from helpers.records import DataMeta
from helpers.run import atomic_file, run_dir
from verilog.asking import messages_for

BASE = "assets/tiny_gemma4_clean"  # its corpus has no bugs
STORED = Path("data/recipes")
FIGURE = Path("assets/figures/recipes.svg")
RUNS = (  # rank, rate, seed
    (4, 6e-3, 42), (4, 2e-2, 42), (4, 2e-3, 42), (32, 6e-3, 42), (32, 2e-2, 42), (32, 2e-3, 42),
    (32, 6e-3, 43), (4, 2e-3, 43))
EPOCHS = (1, 2, 4, 8)  # passes after which the held-out loss is computed
ASKED = (2, 8)         # and those after which the model answers
ROWS, ROWS_PER_STEP, WARMUP, HELD_OUT, ANSWER_TOKENS = 8, 2, 5, 12, 144


def run(rank: int, rate: float, seed: int) -> pd.DataFrame:
    """Train at a rate: a row for each of `EPOCHS`, with the mean loss of the last pass.

    The seed draws the rows, their order and the adapters.
    """
    began = time.process_time()
    data = run_dir("data")
    config = gemma.config_from_hf(BASE, dtype="bfloat16")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    model = gemma.load_base(BASE, config, mesh)
    gemma.use_block_attention(model, 128)
    model = gemma.inject_lora(model, rank, 2.0 * rank, mesh, seed=seed)
    rows = train.PackedRows(data / "train")
    held_out = train.PackedRows(data / "val")
    loss_fn = train.make_loss(train.capacity_of(rows, held_out))
    exam = train.to_mesh(train.validation_batch(held_out, HELD_OUT, 4), mesh)
    optimizer = train.make_optimizer(0.0, 0.001, 1.0)
    state, frozen = train.start(model, optimizer, mesh)
    step = train.jit_train_step(model, optimizer, loss_fn, state)
    evaluate = jax.jit(train.make_eval_step(model, loss_fn))
    batches = _batches(rows, seed)
    adapters, moments = state.adapters, state.opt_state
    losses, points = [], []
    for number in range(1, EPOCHS[-1] * ROWS // ROWS_PER_STEP + 1):
        with mesh:  # the rate comes from here: one compiled program does for all
            moments.hyperparams["learning_rate"] = jnp.float32(rate * min(1, number / WARMUP))
            batch = train.to_mesh(next(batches), mesh)
            adapters, moments, metrics = step(adapters, moments, frozen, batch)
            losses.append(float(metrics["loss"]))
        epochs, inside = divmod(number * ROWS_PER_STEP, ROWS)
        if inside or epochs not in EPOCHS:
            continue
        with mesh:
            value = float(evaluate(adapters, frozen, exam))
        solved = np.nan
        if epochs in ASKED:
            nnx.update(model, jax.tree.map(jnp.copy, adapters))  # a step uses up what it gets
            solved = passed(model, mesh, DataMeta.load(data / "meta.json").system)
        points.append({"rank": rank, "rate": rate, "seed": seed, "epochs": epochs,
                       "loss": float(np.mean(losses[-ROWS // ROWS_PER_STEP:])), "held_out": value,
                       "passed": solved, "cpu_seconds": round(time.process_time() - began),
                       "jax": jax.__version__})
        print(*points[-1].values(), flush=True)
    return pd.DataFrame(points)


def _batches(rows: train.PackedRows, seed: int) -> Iterator[train.Batch]:
    """Micro-batches of a few drawn rows, again and again."""
    order = np.random.default_rng(seed).permutation(len(rows))
    few = [rows[int(place)] for place in order[:ROWS]]
    return iter(train.make_dataset(few, 1, ROWS_PER_STEP, seed))


def passed(model: nnx.Module, mesh: Mesh, system: str | None) -> int:
    """How many of the problems of data/tiny_eval a model solves at the first, greedy try."""
    problems = verilog.load_problems("data/tiny_eval")
    chats = [messages_for(problem, "ours", system) for problem in problems]
    answers = ask(model, chat.load_tokenizer(BASE), chats, ANSWER_TOKENS, mesh)
    codes = [verilog.extract_code(text)[0] for text in answers]
    verdicts = verilog.judge_many(list(zip(problems, codes, strict=True)))
    return sum(verdict.passed for verdict in verdicts)


def draw() -> None:
    """The figure: loss and passed problems after each pass, for every rate and rank."""
    points = runs.stored(STORED)
    fig, axes = style.figure(9.0, 5.2, 2, points["rank"].nunique(), sharex=True, sharey="row",
                             squeeze=False)
    lines: dict[str, Line2D] = {}  # of the legend
    for column, (rank, of_rank) in zip(axes.T, points.groupby("rank"), strict=True):
        losses, problems = column
        losses.set_title(f"rank {rank}")
        for color, (rate, of_rate) in zip(style.CYCLE, of_rank.groupby("rate"), strict=False):
            for seed, run in of_rate.groupby("seed"):
                is_first = seed == RUNS[0][2]
                line = _draw_run(losses, problems, run, color, 1.0 if is_first else 0.45)
                lines.setdefault(f"rate {rate:g}", line)
        losses.set(yscale="log")
        problems.set(xscale="log", xticks=EPOCHS, xticklabels=EPOCHS, xlabel="passes over the rows")
        problems.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes[0, 0].set_ylabel("nats per trained token")
    axes[1, 0].set_ylabel("of 38 problems passed")
    fig.legend(lines.values(), lines, loc="outside upper center", ncols=3)
    fig.supxlabel("Solid: held-out rows, star: the least; dotted: the trained rows. Measured at "
                  "size tiny on a CPU, data/recipes/", fontsize=8, color=style.GREY, x=0.01,
                  ha="left")
    with atomic_file(FIGURE) as file:
        fig.savefig(file, format="svg", metadata={"Date": None})


def _draw_run(losses: Axes, problems: Axes, run: pd.DataFrame, color: str, alpha: float) -> Line2D:
    """One run in both panels of its rank; returns the line of its passed problems."""
    look = {"color": color, "marker": "o", "markersize": 4, "alpha": alpha}
    losses.plot(run.epochs, run.held_out, **look)
    losses.plot(run.epochs, run.loss, **look | {"marker": ""}, linestyle=":")
    asked = run.dropna(subset="passed")
    line, = problems.plot(asked.epochs, asked.passed, **look)
    least = run.loc[run.held_out.idxmin()]
    losses.plot(least.epochs, least.held_out, "*", color=color, markersize=13)
    return line


def main() -> None:
    """Make the runs that are missing, and the figure of all."""
    def make(rank, rate, seed):
        return run(rank, rate, seed).to_csv(index=False, float_format="%.6g")
    wanted = {}
    for rank, rate, seed in RUNS:
        wanted[STORED / f"rank{rank}-rate{rate:g}-seed{seed}.csv"] = (rank, rate, seed)
    runs.fill(wanted, make)
    draw()


if __name__ == "__main__":
    train.keep_compilations()
    main()
