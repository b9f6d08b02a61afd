"""Which recipe? Rate and rank on few rows of the tiny world, for the figure of docs/OWN_DATA.md.

    python -m appendix.recipes           makes the runs that data/recipes/ lacks
    python tools/drawings.py recipes     draws all of them

A run goes eight times over eight of notebook 02's packed rows, with 03's step on one device. The
rate is constant after five steps of warm-up, so that any pass can be read as the end of a shorter
run. After some of them it answers the problems of data/tiny_eval, greedily, and 07's judge decides.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx
from jax.sharding import Mesh
from tunix.models.gemma4.model import Gemma4

import verilog
from appendix import runs
from appendix.tuning import Tuning
from helpers import chat, gemma, train
from helpers.answers import ask
from helpers.records import DataMeta
from helpers.run import run_dir
from verilog.asking import messages_for

BASE = "assets/tiny_gemma4"
STORED = Path("data/recipes")
RUNS = (  # rank, rate, seed
    (4, 6e-3, 42), (4, 2e-2, 42), (4, 2e-3, 42), (32, 6e-3, 42), (32, 2e-2, 42), (32, 2e-3, 42),
    (32, 6e-3, 43), (4, 2e-3, 43))
EPOCHS = (1, 2, 4, 8)  # passes after which the held-out loss is computed
ASKED = (2, 8)         # and those after which the model answers
ROWS, ROWS_PER_STEP, WARMUP, HELD_OUT, ANSWER_TOKENS = 8, 2, 5, 12, 144
STEPS_PER_EPOCH = ROWS // ROWS_PER_STEP


def run(rank: int, rate: float, seed: int) -> pd.DataFrame:
    """Train at a rate: a row for each of `EPOCHS`, with the mean loss of the last pass.

    The seed draws the rows, their order and the adapters.
    """
    began = time.process_time()
    data = run_dir("data")
    rows = train.PackedRows(data / "train")
    held_out = train.PackedRows(data / "val")
    exam = train.validation_batch(held_out, HELD_OUT, 4)
    system = DataMeta.load(data / "meta.json").system

    model, mesh = _base_with_adapters(rank, seed)
    optimizer = train.make_optimizer(0.0, 0.001, 1.0)
    loss_fn = train.make_loss(train.capacity_of(rows, held_out))
    tuning = Tuning(model, mesh, optimizer, loss_fn, _batches(rows, seed))
    points = []
    for epochs in range(1, EPOCHS[-1] + 1):
        for _ in range(STEPS_PER_EPOCH):
            _set_rate(tuning, rate)
            tuning.step()
        if epochs not in EPOCHS:
            continue
        held_out_loss = tuning.evaluate(exam)
        solved = np.nan
        if epochs in ASKED:
            tuning.finish()
            solved = passed(model, mesh, system)
        point = {"rank": rank,
                 "rate": rate,
                 "seed": seed,
                 "epochs": epochs,
                 "loss": float(np.mean(tuning.losses[-STEPS_PER_EPOCH:])),
                 "held_out": held_out_loss,
                 "passed": solved,
                 "cpu_seconds": round(time.process_time() - began),
                 "jax": jax.__version__}
        points.append(point)
        print(*point.values(), flush=True)
    return pd.DataFrame(points)


def _base_with_adapters(rank: int, seed: int) -> tuple[Gemma4, Mesh]:
    """The tiny base in bfloat16 on one device, with fresh adapters."""
    config = gemma.config_from_hf(BASE, dtype="bfloat16")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    model = gemma.load_base(BASE, config, mesh)
    gemma.use_block_attention(model, 128)
    return gemma.inject_lora(model, rank, 2.0 * rank, mesh, seed=seed), mesh


def _batches(rows: train.PackedRows, seed: int) -> Iterable[train.Batch]:
    """Micro-batches of a few drawn rows, again and again."""
    order = np.random.default_rng(seed).permutation(len(rows))
    few = [rows[int(place)] for place in order[:ROWS]]
    return train.make_dataset(few, 1, ROWS_PER_STEP, seed)


def _set_rate(tuning: Tuning, rate: float) -> None:
    """Set the rate of the next step; it comes from here, so one program does for all rates."""
    number = len(tuning.losses) + 1
    warmed_up = min(1, number / WARMUP)
    with tuning.mesh:
        tuning.moments.hyperparams["learning_rate"] = jnp.float32(rate * warmed_up)


def passed(model: nnx.Module, mesh: Mesh, system: str | None) -> int:
    """How many of the problems of data/tiny_eval a model solves at the first, greedy try."""
    problems = verilog.load_problems("data/tiny_eval")
    chats = [messages_for(problem, "ours", system) for problem in problems]
    answers = ask(model, chat.load_tokenizer(BASE), chats, ANSWER_TOKENS, mesh)
    pairs = []
    for problem, text in zip(problems, answers, strict=True):
        code, _ = verilog.extract_code(text)
        pairs.append((problem, code))
    verdicts = verilog.judge_many(pairs)
    return sum(verdict.passed for verdict in verdicts)


def main() -> None:
    """Make the runs that are missing."""
    def make(rank, rate, seed):
        return run(rank, rate, seed).to_csv(index=False, float_format="%.6g")

    wanted = {}
    for rank, rate, seed in RUNS:
        wanted[STORED / f"rank{rank}-rate{rate:g}-seed{seed}.csv"] = (rank, rate, seed)
    runs.fill(wanted, make)


if __name__ == "__main__":
    train.keep_compilations()
    main()
