"""Which recipe? Rate, rank and epochs on few rows of the tiny world, for OWN_DATA.md's figure.

    python -m appendix.recipes RANK SEED [DATA]    adds the points that data/recipes/RANK-SEED.csv lacks
    python -m appendix.recipes                     draws the figure from data/recipes/*.csv

A point is a run of its own, from the base to the end of its schedule: 03's step and settings at size
tiny on one device, on the first rows of `DATA` (`data/` of notebook 02). Then it answers the problems
of data/tiny_eval, greedily, and 07's judge decides. A point that is stored is not repeated.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx

import verilog
from helpers import chat, gemma, train
from helpers.run import read_json, run_dir, write_text

BASE, STORED = "assets/tiny_gemma4", Path("data/recipes")
RATES, RANKS, SEEDS = (1e-3, 3e-3, 1e-2, 3e-2), (2, 8, 32), (42, 43, 44)
EPOCHS = (1, 2, 4, 8, 16)
ROWS, ROWS_PER_STEP = 64, 4  # packed rows to train on; a step reads four
ANSWER_TOKENS = 192


class Bench:
    """One rank and seed: the model, its step, compiled once, and the questions.

    Args:
      rank, seed: of the adapters (alpha is twice the rank) and, the seed, of the order of the rows.
      data: `data/` of notebook 02.
    """

    def __init__(self, rank, seed, data):
        config = gemma.config_from_hf(BASE, dtype="bfloat16")
        self.seed, self.mesh = seed, gemma.make_mesh(config, (1, 1), jax.devices()[:1])
        model = gemma.load_base(BASE, config, self.mesh)
        gemma.use_block_attention(model, 128)
        self.model = gemma.inject_lora(model, rank, 2.0 * rank, self.mesh, seed=seed)
        self.cfg = train.Settings(warmup_steps=10, rows_per_step=ROWS_PER_STEP)
        self.optimizer = train.make_optimizer(0.0, self.cfg.weight_decay, self.cfg.max_grad_norm)
        self.rows, held_out = (train.PackedRows(data / part) for part in ("train", "val"))
        self.held_out = train.to_mesh(train.validation_batch(held_out, len(held_out), 4), self.mesh)
        most = max(int(each.arrays["loss_mask"].sum(-1).max()) for each in (self.rows, held_out))
        loss_fn = train.make_loss(-(-most // 128) * 128)
        self.state, self.frozen = train.start(self.model, self.optimizer, self.mesh)
        self.step = train.jit_train_step(self.model, self.optimizer, loss_fn, self.state)
        self.evaluate = jax.jit(train.make_eval_step(self.model, loss_fn))
        tokenizer, meta = chat.load_tokenizer(BASE), read_json(data / "meta.json")
        self.problems, self.tokenizer = verilog.load_problems("data/tiny_eval"), tokenizer
        self.judged = {}  # what was answered before is not judged again
        self.prompts = [chat.prompt_ids(tokenizer, [
            {"role": "system", "content": meta["system"]},
            {"role": "user", "content": problem.prompt.strip()}]) for problem in self.problems]

    def run(self, rate, epochs):
        """Train at a peak rate for so many epochs; {loss of the last epoch, held-out loss, passed}."""
        steps = epochs * ROWS // ROWS_PER_STEP
        schedule = train.make_schedule(replace(self.cfg, learning_rate=rate), steps)
        few = [self.rows[row] for row in range(ROWS)]
        batches = iter(train.make_dataset(few, 1, ROWS_PER_STEP, self.seed))
        adapters, moments = jax.tree.map(jnp.copy, (self.state.adapters, self.state.opt_state))
        losses = []
        with gemma.use_mesh(self.mesh):
            for step in range(steps):  # the rate comes from here, so that one program does for all
                moments.hyperparams["learning_rate"] = jnp.float32(schedule(step))
                adapters, moments, metrics = self.step(
                    adapters, moments, self.frozen, train.to_mesh(next(batches), self.mesh))
                losses.append(metrics["loss"])
            held_out = float(self.evaluate(adapters, self.frozen, self.held_out))
        nnx.update(self.model, adapters)
        return {"loss": float(np.mean(losses[-ROWS // ROWS_PER_STEP:])), "held_out": held_out,
                "passed": self.passed()}

    def passed(self):
        """How many of the problems the model as it stands solves at the first, greedy try."""
        stops = {self.tokenizer.eos_token_id, chat.special_ids(self.tokenizer)[chat.TURN_END]}
        rows = gemma.greedy(self.model, self.prompts, ANSWER_TOKENS, stops, self.mesh)
        codes = [verilog.extract_code(self.tokenizer.decode(row).split(chat.TURN_END)[0])[0]
                 for row in rows]
        pairs = list(zip(self.problems, codes, strict=True))
        new = [pair for pair in pairs if pair not in self.judged]
        self.judged |= dict(zip(new, verilog.judge_many(new), strict=True))
        return sum(self.judged[pair].passed for pair in pairs)


def fill(rank, seed, data):
    """Run the points of a rank and seed that its file lacks; the file grows by whole points."""
    path, bench = STORED / f"{rank}-{seed}.csv", None
    points = pd.read_csv(path).to_dict("records") if path.exists() else []
    stored = {(point["rate"], point["epochs"]) for point in points}
    for epochs in EPOCHS:
        for rate in (rate for rate in RATES if (rate, epochs) not in stored):
            bench, began = bench or Bench(rank, seed, data), time.perf_counter()
            points.append({"rank": rank, "seed": seed, "rate": rate, "epochs": epochs}
                          | bench.run(rate, epochs) | {
                "seconds": round(time.perf_counter() - began), "jax": jax.__version__,
                "device": jax.devices()[0].device_kind})
            write_text(path, pd.DataFrame(points).to_csv(index=False, float_format="%.6g"))
            print(*points[-1].values(), flush=True)


if __name__ == "__main__":
    train.keep_compilations()
    rank, seed, *data = sys.argv[1:]
    fill(int(rank), int(seed), Path(*data or [run_dir("data")]))
