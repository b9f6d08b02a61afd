"""Short fine-tunes on one device, for small experiments that a page shows.

02 asks what a mask in the wrong place does, and 04 how strongly adapters should count. Both train
the tiny base with 03's step and loss, in float32, and are judged by 07's judge. `Tuning` is the
loop alone: 11's runs and those of `recipes.py` use it with bases, rows and rates of their own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
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


class Tuning:
    """A fine-tune under way: 03's step, a batch at a time.

    Attributes:
      model: with adapters; they are the trained ones after `finish`.
      mesh: of the model.
      moments: the optimizer's state; a constant rate is a hyperparameter in it.
      losses: of every step so far, nats per trained token.
    """

    def __init__(self, model: Gemma4, mesh: Mesh, optimizer: optax.GradientTransformation,
                 loss_fn: Callable, batches: Iterable[train.Batch]) -> None:
        state, frozen = train.start(model, optimizer, mesh)
        self.model = model
        self.mesh = mesh
        self.moments = state.opt_state
        self.losses: list[float] = []
        self._adapters = state.adapters
        self._frozen = frozen
        self._batches = iter(batches)
        self._step = train.jit_train_step(model, optimizer, loss_fn, state)
        self._evaluate = jax.jit(train.make_eval_step(model, loss_fn))

    def step(self) -> float:
        """Learn from the next batch; returns its loss."""
        with self.mesh:
            batch = train.to_mesh(next(self._batches), self.mesh)
            self._adapters, self.moments, metrics = self._step(
                self._adapters, self.moments, self._frozen, batch)
        loss = float(metrics["loss"])
        self.losses.append(loss)
        return loss

    def run(self, steps: int, seconds: float = 5.0) -> None:
        """Learn from so many batches; a line of progress, every few seconds, says the loss."""
        progress = Progress(steps, "step", every=seconds)
        for _ in range(steps):
            loss = self.step()
            progress.update(note=f"loss {loss:.3f}")

    def evaluate(self, batch: train.Batch) -> float:
        """The loss of a batch that is not learned from, nats per trained token."""
        with self.mesh:
            placed = train.to_mesh(batch, self.mesh)
            return float(self._evaluate(self._adapters, self._frozen, placed))

    def finish(self) -> None:
        """Put copies of the adapters as they are now into the model; the fine-tune can go on."""
        copies = jax.tree.map(jnp.copy, self._adapters)  # a step uses up what it gets
        nnx.update(self.model, copies)


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
    schedule = train.make_schedule(settings, steps)
    optimizer = train.make_optimizer(schedule, settings.weight_decay, settings.max_grad_norm)
    loss_fn = train.make_loss(len(rows[0].tokens) - 1)
    batches = train.make_dataset(rows, 1, settings.rows_per_step, seed)

    tuning = Tuning(model, mesh, optimizer, loss_fn, batches)
    tuning.run(steps, seconds=20)
    tuning.finish()
    return Tuned(model, mesh, tuning.losses)


def ask(model: Gemma4, mesh: Mesh, problems: Sequence[Problem], drawn: int = 0,
        seed: int = 1) -> list[list[str]]:
    """The answers to every problem: the greedy one first, then `drawn` ones at `TEMPERATURE`."""
    tokenizer = chat.load_tokenizer(BASE)
    stops = chat.stop_ids(tokenizer)
    chats = [messages_for(problem, "ours", SYSTEM) for problem in problems]
    prompts = chat.render_prompts(tokenizer, chats, [False] * len(chats))
    temperatures = [0.0] + [TEMPERATURE] * drawn  # of the answers to one problem
    asked, heat = [], []
    for prompt in prompts:
        for temperature in temperatures:
            asked.append(prompt)
            heat.append(temperature)

    rows = gemma.greedy(model, asked, ANSWER_TOKENS, stops, mesh, heat, seed=seed)
    answers: list[list[str]] = [[] for _ in problems]
    for place, row in enumerate(rows):
        text = tokenizer.decode(row).split(chat.TURN_END)[0]
        answers[place // len(temperatures)].append(text)
    return answers


def passes(model: Gemma4, mesh: Mesh, drawn: int = 0, seed: int = 1) -> np.ndarray:
    """Which answers to the 38 held-out problems pass 07's judge: [38, 1 + drawn] of 0 and 1."""
    problems = verilog.load_problems("data/tiny_eval")
    answers = ask(model, mesh, problems, drawn, seed)
    pairs = []
    for problem, texts in zip(problems, answers, strict=True):
        for text in texts:
            code, _ = verilog.extract_code(text)
            pairs.append((problem, code))
    verdicts = verilog.judge_many(pairs)
    passed = np.array([verdict.passed for verdict in verdicts], int)
    return passed.reshape(len(problems), 1 + drawn)
