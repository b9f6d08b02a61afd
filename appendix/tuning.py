"""Short fine-tunes of the tiny base on one device, for small experiments that a page shows.

02 asks what a mask in the wrong place does, and 04 how strongly adapters should count. Both train
with 03's step and loss, in float32, and are judged by 07's judge.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.models.gemma4.model import Gemma4

import verilog
from helpers import chat, gemma, train
from helpers.run import Progress
from verilog.asking import messages_for
from verilog.problems import Problem

BASE = "assets/tiny_gemma4"
SYSTEM = "Write the Verilog module that is asked for, as one code block."
ANSWER_TOKENS = 112  # the longest reference has 95, the fences and the end some more
TEMPERATURE = 0.8    # of drawn answers, as in 07


@dataclass(frozen=True)
class Tuned:
    """What is left of a fine-tune.

    Attributes:
      model: the base with its adapters, in float32.
      mesh: the one device.
      losses: of every step, nats per trained token.
    """

    model: Gemma4
    mesh: Mesh
    losses: list[float]


def plain_base() -> tuple[Gemma4, Mesh]:
    """The tiny base in float32 on one CPU device."""
    config = gemma.config_from_hf(BASE, dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.local_devices(backend="cpu")[:1])
    model = gemma.load_base(BASE, config, mesh)
    gemma.use_block_attention(model, 128)
    return model, mesh


def tune(rows: train.Rows, settings: train.Settings, steps: int, seed: int) -> Tuned:
    """Train adapters for `steps` steps of `settings.rows_per_step` rows.

    Args:
      rows: packed rows, such as `train.PackedRows` or a list of batches of [T] arrays.
      settings: rank, alpha, rates and rows of a step; the rest isn't used.
      steps: optimizer steps; the rate's schedule ends with them.
      seed: of A's first values and of the order of the rows.
    """
    model, mesh = plain_base()
    model = gemma.inject_lora(model, settings.rank, settings.alpha, mesh, seed=seed)
    optimizer = train.make_optimizer(train.make_schedule(settings, steps), settings.weight_decay,
                                     settings.max_grad_norm)
    loss_fn = train.make_loss(len(rows[0].tokens) - 1)
    state, frozen = train.start(model, optimizer, mesh)
    step = train.jit_train_step(model, optimizer, loss_fn, state)
    batches = iter(train.make_dataset(rows, 1, settings.rows_per_step, seed))
    adapters, moments = state.adapters, state.opt_state
    losses: list[float] = []
    progress = Progress(steps, "step", every=20)
    for _ in range(steps):
        with mesh:
            batch = train.to_mesh(next(batches), mesh)
            adapters, moments, metrics = step(adapters, moments, frozen, batch)
        losses.append(float(metrics["loss"]))
        progress.update(note=f"loss {losses[-1]:.3f}")
    nnx.update(model, adapters)
    return Tuned(model, mesh, losses)


def ask(model: Gemma4, mesh: Mesh, problems: Sequence[Problem], drawn: int = 0,
        seed: int = 1) -> list[list[str]]:
    """The answers to every problem: the greedy one first, then `drawn` ones at `TEMPERATURE`."""
    tokenizer = chat.load_tokenizer(BASE)
    stops = chat.stop_ids(tokenizer)
    chats = [messages_for(problem, "ours", SYSTEM) for problem in problems]
    prompts = chat.render_prompts(tokenizer, chats, [False] * len(chats))
    each = 1 + drawn
    repeated = [prompt for prompt in prompts for _ in range(each)]
    heat = ([0.0] + [TEMPERATURE] * drawn) * len(problems)
    rows = gemma.greedy(model, repeated, ANSWER_TOKENS, stops, mesh, heat, seed=seed)
    texts = [tokenizer.decode(row).split(chat.TURN_END)[0] for row in rows]
    return [texts[start:start + each] for start in range(0, len(texts), each)]


def passes(model: Gemma4, mesh: Mesh, drawn: int = 0, seed: int = 1) -> np.ndarray:
    """Which answers to the 38 held-out problems pass 07's judge: [38, 1 + drawn] of 0 and 1."""
    problems = verilog.load_problems("data/tiny_eval")
    pairs = []
    for problem, texts in zip(problems, ask(model, mesh, problems, drawn, seed), strict=True):
        for text in texts:
            pairs.append((problem, verilog.extract_code(text)[0]))
    verdicts = verilog.judge_many(pairs)
    passed = np.array([verdict.passed for verdict in verdicts], int)
    return passed.reshape(len(problems), 1 + drawn)
