"""Which recipe? Rate and rank on few rows of the tiny world, for the figure of OWN_DATA.md.

    python -m appendix.recipes DATA RANK     makes the runs of a rank that data/recipes/ lacks
    python -m appendix.recipes               draws all: assets/figures/recipes.svg

A run goes eight times over eight packed rows of `DATA` (`data/` of notebook 02), with 03's step on
one device. The rate is constant after five steps of warm-up, so that any pass can be read as the end
of a shorter run. After some of them it answers the problems of data/tiny_eval, greedily, and 07's
judge decides.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx

import verilog
from helpers import chat, gemma, style, train
from helpers.run import atomic_file, read_json, write_text

BASE, STORED, FIGURE = "assets/tiny_gemma4", Path("data/recipes"), "assets/figures/recipes.svg"
RUNS = [(rank, rate, 42) for rank in (4, 32) for rate in (6e-3, 2e-2, 2e-3)] + [
    (32, 6e-3, 43), (4, 2e-3, 43)]
EPOCHS, ASKED = (1, 2, 4, 8), (2, 8)  # held-out loss after these passes, problems after those
ROWS, ROWS_PER_STEP, WARMUP, HELD_OUT, ANSWER_TOKENS = 8, 2, 5, 12, 144


class Bench:
    """One rank: the model, its step, compiled once, and the questions; `data` is a `Path`."""

    def __init__(self, rank, data):
        config = gemma.config_from_hf(BASE, dtype="bfloat16")
        self.mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
        model = gemma.load_base(BASE, config, self.mesh)
        gemma.use_block_attention(model, 128)
        self.base, self.rank = model, rank
        self.optimizer = train.make_optimizer(0.0, 0.001, 1.0)
        self.rows, held_out = (train.PackedRows(data / part) for part in ("train", "val"))
        self.held_out = train.to_mesh(train.validation_batch(held_out, HELD_OUT, 4), self.mesh)
        most = max(int(each.arrays["loss_mask"].sum(-1).max()) for each in (self.rows, held_out))
        self.loss_fn = train.make_loss(-(-most // 128) * 128)
        self.step = None
        self.tokenizer, meta = chat.load_tokenizer(BASE), read_json(data / "meta.json")
        self.problems = verilog.load_problems("data/tiny_eval")
        self.chats = [[{"role": "system", "content": meta["system"]},
                       {"role": "user", "content": problem.prompt.strip()}]
                      for problem in self.problems]
        self.judged = {}  # what was answered before is not judged again

    def run(self, rate, seed):
        """Train at a rate; yields {epochs, loss of the last one, held-out loss, passed}.

        The seed draws the rows, their order and the adapters.
        """
        model = gemma.inject_lora(self.base, self.rank, 2.0 * self.rank, self.mesh, seed=seed)
        state, frozen = train.start(model, self.optimizer, self.mesh)
        if self.step is None:
            self.step = train.jit_train_step(model, self.optimizer, self.loss_fn, state)
            self.evaluate = jax.jit(train.make_eval_step(model, self.loss_fn))
        few = [self.rows[int(row)] for row in
               np.random.default_rng(seed).permutation(len(self.rows))[:ROWS]]
        batches = iter(train.make_dataset(few, 1, ROWS_PER_STEP, seed))
        adapters, moments, losses = state.adapters, state.opt_state, []
        for step in range(1, EPOCHS[-1] * ROWS // ROWS_PER_STEP + 1):
            with self.mesh:  # the rate comes from here: one program does for all
                moments.hyperparams["learning_rate"] = jnp.float32(rate * min(1, step / WARMUP))
                adapters, moments, metrics = self.step(
                    adapters, moments, frozen, train.to_mesh(next(batches), self.mesh))
                losses.append(float(metrics["loss"]))
            epochs, inside = divmod(step * ROWS_PER_STEP, ROWS)
            if inside or epochs not in EPOCHS:
                continue
            with self.mesh:
                held_out = float(self.evaluate(adapters, frozen, self.held_out))
            passed = np.nan
            if epochs in ASKED:
                nnx.update(model, jax.tree.map(jnp.copy, adapters))  # a step uses up what it gets
                passed = self.passed(model)
            yield {"epochs": epochs, "loss": float(np.mean(losses[-ROWS // ROWS_PER_STEP:])),
                   "held_out": held_out, "passed": passed}

    def passed(self, model):
        """How many of the problems the model as it stands solves at the first, greedy try."""
        answers = train.ask(model, self.tokenizer, self.chats, ANSWER_TOKENS, self.mesh)
        pairs = list(zip(self.problems, (verilog.extract_code(text)[0] for text in answers),
                         strict=True))
        new = [pair for pair in pairs if pair not in self.judged]
        self.judged |= dict(zip(new, verilog.judge_many(new), strict=True))
        return sum(self.judged[pair].passed for pair in pairs)


def fill(data, rank):
    """Make the runs of a rank that are not stored whole; a file grows by a point at a time."""
    bench = Bench(rank, data)
    for rate, seed in (run[1:] for run in RUNS if run[0] == rank):
        path = STORED / f"rank{rank}-rate{rate:g}-seed{seed}.csv"
        if path.exists() and len(pd.read_csv(path)) == len(EPOCHS):
            continue
        points, began = [], time.process_time()
        for point in bench.run(rate, seed):
            points.append({"rank": rank, "rate": rate, "seed": seed, **point,
                           "cpu_seconds": round(time.process_time() - began),
                           "jax": jax.__version__})
            write_text(path, pd.DataFrame(points).to_csv(index=False, float_format="%.6g"))
            print(*points[-1].values(), flush=True)


def draw():
    """The figure: loss and passed problems after each pass, for every rate and rank."""
    points = pd.concat(map(pd.read_csv, sorted(STORED.glob("*.csv"))))
    fig, axes = style.figure(9.0, 5.2, 2, points["rank"].nunique(), sharex=True, sharey="row",
                             squeeze=False)
    lines = {}
    for column, (rank, of_rank) in zip(axes.T, points.groupby("rank"), strict=True):
        column[0].set_title(f"rank {rank}")
        for color, (rate, runs) in zip(style.CYCLE, of_rank.groupby("rate")):
            for seed, run in runs.groupby("seed"):
                look = {"color": color, "marker": "o", "markersize": 4,
                        "alpha": 1.0 if seed == RUNS[0][2] else 0.45}
                column[0].plot(run.epochs, run.held_out, **look)
                column[0].plot(run.epochs, run.loss, **look | {"marker": ""}, linestyle=":")
                asked = run.dropna(subset="passed")
                line, = column[1].plot(asked.epochs, asked.passed, **look)
                lines.setdefault(f"rate {rate:g}", line)
                least = run.loc[run.held_out.idxmin()]
                column[0].plot(least.epochs, least.held_out, "*", color=color, markersize=13)
        column[0].set(yscale="log")
        column[1].set(xscale="log", xticks=EPOCHS, xticklabels=EPOCHS, xlabel="passes over the rows")
        column[1].tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes[0, 0].set_ylabel("nats per trained token")
    axes[1, 0].set_ylabel("of 38 problems passed")
    fig.legend(lines.values(), lines, loc="outside upper center", ncols=3)
    fig.supxlabel("Solid: held-out rows, star: the least; dotted: the trained rows. Measured at size "
                  "tiny on a CPU, data/recipes/", fontsize=8, color=style.GREY, x=0.01, ha="left")
    with atomic_file(Path(FIGURE)) as file:
        fig.savefig(file, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    train.keep_compilations()
    if sys.argv[1:]:
        fill(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        draw()
