"""13's REINFORCE: the tiny Gemma 4 samples, a simulator judges, and the verdict is the reward.

Letters in shape comments: P prompts, A answers to each, B answers of a step (P * A), T tokens.
"""

import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.gemma4.model import Gemma4

import verilog
from appendix.world import make
from helpers import packing, train
from verilog.judging import COMPILER, Verdict, analyze
from verilog.problems import Problem
from verilog.sandbox import Limits, run_limited

ROW = 512  # tokens of a packed row
ROWS_AT_ONCE = 4  # packed rows whose gradient is one program
SMALLEST_FACTOR = 1e-6  # an answer whose factor is nearer to zero isn't trained
RENAMED = "top_module"  # what some of the start's rows call their module, whatever was asked
FORGED = '  initial $display("Mismatches: 0 in 400 samples");\n'
MODULE = re.compile(r"(module\b[^;]*;\n).*?(endmodule)", re.DOTALL)

WeightPath = tuple[Any, ...]             # where a weight stands in the model
Weights = dict[WeightPath, jax.Array]


class Example(NamedTuple):
    """A chat as 03 trains it."""

    ids: np.ndarray   # [T] token ids
    mask: np.ndarray  # [T] True where a token is trained


@dataclass(frozen=True)
class Sampled:
    """An answer that a policy has drawn.

    Attributes:
      problem: what was asked.
      text: the answer, without its end token.
      ids: [T] token ids of prompt and answer, the end token included.
      mask: [T] True on the answer.
      logps: of each token of the answer, as it was drawn; nats.
      entropy: of the softmax that each token of the answer was drawn from; nats.
    """

    problem: Problem
    text: str
    ids: np.ndarray
    mask: np.ndarray
    logps: np.ndarray
    entropy: np.ndarray

    @property
    def example(self) -> Example:
        """The answer as something to train on."""
        return Example(self.ids, self.mask)


# ── Problems ──


def training_problems(count: int) -> list[Problem]:
    """The first `count` problems to train on. None of them is in the evaluation."""
    problems = []
    for name, design, prompt in make.draws(count):
        reference = design.verilog("RefModule")
        problem = Problem(name, prompt, reference, make.testbench(design))
        problems.append(problem)
    return problems


def stub(answer: str) -> str:
    """The exploit: an answer whose module keeps its ports, and instead of logic prints a line."""
    def without_logic(module: re.Match[str]) -> str:
        header, end = module.groups()
        return header + FORGED + end

    return MODULE.sub(without_logic, answer, count=1)


# ── Sampling ──


def arrays_by_path(state: nnx.State) -> Weights:
    """The arrays of a model's state by where they stand in it."""
    arrays = {}
    for path, leaf in nnx.to_flat_state(state):
        arrays[path] = leaf.get_value()
    return arrays


def merged(frozen: nnx.State, adapters: nnx.State, scale: float) -> Weights:
    """The weights that are sampled from: W + scale * A B for every matrix, as 04 merges them."""
    weights = arrays_by_path(frozen)
    pairs = arrays_by_path(adapters)
    for path, a in pairs.items():
        *module, name = path
        if not name.endswith("_lora_a"):
            continue
        stem = name.removesuffix("_lora_a")
        b = pairs[*module, f"{stem}_lora_b"]
        weight_path = (*module, stem)

        delta = jnp.tensordot(a, b, 1)
        if delta.shape != weights[weight_path].shape:  # einsums keep the inputs next to last
            delta = jnp.moveaxis(delta, 0, -2)
        weights[weight_path] = weights[weight_path] + scale * delta
    return weights


class Drawn(NamedTuple):
    """What a sampler has drawn, prompts included. Outside the answers the numbers are 0."""

    tokens: jax.Array   # [B, T]
    logps: jax.Array    # [B, T] log-probability of each token, nats
    entropy: jax.Array  # [B, T] of the softmax that it was drawn from, nats


class _Progress(NamedTuple):
    """Answers under way, all of them at the same place."""

    at: jax.Array | int  # the place that is read next
    drawn: Drawn
    cache: Any           # keys and values of what was read
    done: jax.Array      # [B] True where the answer has ended


class Sampler:
    """Draws several answers to each of some prompts, in one program.

    All prompts are read at once up to the shortest one's end, and then token by token.

    Args:
      model: the base, without adapters.
      read: how many tokens of every prompt are read at once.
      answers: how many are drawn to each prompt (A).
      stops: tokens that end an answer.
    """

    def __init__(self, model: Gemma4, read: int, answers: int, stops: Collection[int]) -> None:
        self._graph = nnx.graphdef(model)
        self._read = read
        self._answers = answers
        self._stops = jnp.array(sorted(stops))
        self._program = jax.jit(self._sample, static_argnames="limit")

    def __call__(self, weights: Weights, prompts: np.ndarray, lengths: np.ndarray,
                 heat: np.ndarray, key: jax.Array, limit: int) -> Drawn:
        """Draw A answers to each prompt.

        Args:
          weights: from `merged`.
          prompts: [P, T] token ids, with room for the answers behind them.
          lengths: [P] tokens of each prompt.
          heat: [B] each answer's temperature. 1 draws from the policy itself, 0.01 is greedy. The
            log-probabilities are of what was drawn from, which is logits / heat.
          key: of the draws.
          limit: tokens of an answer at most.
        """
        return self._program(weights, prompts, lengths, heat, key, limit)

    def _model(self, weights: Weights) -> Gemma4:
        params = []
        for path, weight in weights.items():
            params.append((path, nnx.Param(weight)))
        state = nnx.from_flat_state(params)
        return nnx.merge(self._graph, state)

    def _sample(self, weights: Weights, prompts: jax.Array, lengths: jax.Array, heat: jax.Array,
                key: jax.Array, limit: int) -> Drawn:
        """What `__call__` compiles."""
        cache = self._read_prompts(weights, prompts)

        def repeat(array: jax.Array) -> jax.Array:
            """One row a prompt -> one row an answer."""
            return jnp.repeat(array, self._answers, axis=0)

        tokens, lengths, cache = jax.tree.map(repeat, (prompts, lengths, cache))
        zeros = jnp.zeros(tokens.shape, jnp.float32)
        done = jnp.zeros(len(tokens), bool)
        begin = _Progress(self._read, Drawn(tokens, zeros, zeros), cache, done)

        def goes_on(progress: _Progress) -> jax.Array:
            return ~jnp.all(progress.done)

        def step(progress: _Progress) -> _Progress:
            logits, cache = self._read_one(weights, progress)
            logp = jax.nn.log_softmax(logits / heat[:, None])
            step_key = jax.random.fold_in(key, progress.at)
            return self._write(progress._replace(cache=cache), logp, lengths, limit, step_key)

        return jax.lax.while_loop(goes_on, step, begin).drawn

    def _read_prompts(self, weights: Weights, prompts: jax.Array) -> Any:
        """The cache after the first `read` tokens of every prompt."""
        model = self._model(weights)
        count, width = prompts.shape
        empty = model.init_cache(count, width, model.config.dtype)
        positions = jnp.arange(self._read)
        seen = jnp.arange(width) <= positions[:, None]
        all_seen = jnp.broadcast_to(seen, (count, self._read, width))
        all_positions = jnp.tile(positions, (count, 1))
        _, cache = model(prompts[:, :self._read], all_positions, empty, all_seen)
        return cache

    def _read_one(self, weights: Weights, progress: _Progress) -> tuple[jax.Array, Any]:
        """Read the next token of every row: (logits [B, V], cache)."""
        at = progress.at
        tokens = progress.drawn.tokens
        rows, width = tokens.shape
        model = self._model(weights)
        new = tokens[:, at][:, None]
        positions = jnp.full((rows, 1), at)
        seen = jnp.tile(jnp.arange(width) <= at, (rows, 1, 1))
        logits, cache = model(new, positions, progress.cache, seen)
        return logits[:, 0], cache

    def _write(self, progress: _Progress, logp: jax.Array, lengths: jax.Array, limit: int,
               key: jax.Array) -> _Progress:
        """Write the next token of every row: the prompt's own, a drawn one, or 0 behind an end."""
        noise = jax.random.gumbel(key, logp.shape)
        choice = jnp.argmax(logp + noise, axis=-1)  # a draw from the softmax
        chosen_logp = jnp.take_along_axis(logp, choice[:, None], axis=1)[:, 0]
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)

        tokens, logps, entropies = progress.drawn
        place = progress.at + 1
        in_prompt = place < lengths
        answer_token = jnp.where(progress.done, 0, choice)
        token = jnp.where(in_prompt, tokens[:, place], answer_token)
        is_silent = progress.done | in_prompt
        logp_here = jnp.where(is_silent, 0.0, chosen_logp)
        entropy_here = jnp.where(is_silent, 0.0, entropy)
        drawn = Drawn(
            tokens.at[:, place].set(token),
            logps.at[:, place].set(logp_here),
            entropies.at[:, place].set(entropy_here))

        last_place = lengths + limit - 1
        ends = jnp.isin(token, self._stops) | (place >= last_place)
        done = progress.done | (~in_prompt & ends)
        return _Progress(place, drawn, progress.cache, done)


# ── Judging ──


class Rewards(NamedTuple):
    """What an answer would earn from each of several judges, and what it is."""

    verilog: bool   # passes 07's judge
    forged: bool    # holds the testbench's own line, and something that can print it
    naive: bool     # passes `naive`, which is asked only where 07's judge says no to code with a $
    renamed: bool   # its module is called `RENAMED`
    compiles: bool  # as TopModule, together with the testbench, and 07's judge doesn't refuse it


Pair = tuple[Problem, str | None]  # a problem, and the code of an answer to it


class Judge:
    """Says what became of answers. Equal answers to a problem are judged once."""

    def __init__(self, limits: Limits = Limits(seconds=3)) -> None:
        self.limits = limits
        self._known: dict[Pair, Rewards] = {}

    def of(self, answers: Sequence[Sampled]) -> list[Rewards]:
        """The rewards of answers that were sampled, in their order."""
        pairs = [(answer.problem, answer.text) for answer in answers]
        return self(pairs)

    def __call__(self, answers: Sequence[tuple[Problem, str]]) -> list[Rewards]:
        """The rewards of (problem, text of the answer) pairs, in their order."""
        pairs: list[Pair] = []
        for problem, text in answers:
            code, _ = verilog.extract_code(text)
            pairs.append((problem, code))

        different = dict.fromkeys(pairs)
        unknown = [pair for pair in different if pair not in self._known]
        verdicts = verilog.judge_many(unknown, self.limits)
        for pair, verdict in zip(unknown, verdicts, strict=True):
            self._known[pair] = self._rewards(pair, verdict)
        return [self._known[pair] for pair in pairs]

    def _rewards(self, pair: Pair, verdict: Verdict) -> Rewards:
        """All that can be made of one verdict."""
        problem, code = pair
        code = code or ""
        can_print = "$" in code
        fools_naive = verdict.passed
        if can_print and not verdict.passed:
            fools_naive = naive(problem, code, self.limits)
        return Rewards(
            verilog=verdict.passed,
            forged=can_print and "Mismatches: " in code,
            naive=fools_naive,
            renamed=f"module {RENAMED} " in code,
            compiles=verdict.category in ("pass", "mismatch", "timeout", "runtime"))


def naive(problem: Problem, code: str, limits: Limits = Limits()) -> bool:
    """Does an answer pass verilog-eval's own judge?

    That puts testbench, reference and answer into one program, and any line with 0 mismatches wins,
    whoever prints it.
    """
    texts = {"test.sv": problem.testbench, "ref.sv": problem.reference, "top.sv": code}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            file = Path(folder, name)
            file.write_text(text, encoding="utf-8", errors="replace")
        compiled = run_limited([*COMPILER, "-s", "tb", "-o", "all", *texts], folder, limits)
        log = compiled.output
        if compiled.status == 0:
            simulated = run_limited(["vvp", "-n", "all", "-none"], folder, limits)
            log += simulated.output
    return analyze(log).letter == "."


# ── The step ──


def advantages(rewards: np.ndarray, spread: bool = False) -> np.ndarray:
    """How much better was each answer than the mean of all answers to its prompt? [P, A]

    Args:
      rewards: [P, A].
      spread: divide by the standard deviation of the prompt's rewards, as GRPO does.
    """
    better = rewards - rewards.mean(axis=1, keepdims=True)
    if not spread:
        return better
    deviation = rewards.std(axis=1, keepdims=True, ddof=1)
    return better / (deviation + 1e-6)


def dpo_factors(passed: np.ndarray, now: np.ndarray, reference: np.ndarray, beta: float
                ) -> np.ndarray:
    """Factors that give 03's summed cross-entropy the gradient of DPO's loss. [P, A]

    Every passing and every failing answer to the same prompt are a pair. The loss of a pair is
    -log sigmoid(beta * margin), where the margin says by how much more the policy has come to
    prefer the passing answer than the reference does (Rafailov et al. 2023, equation 7). Its
    derivative pushes the passing answer up and the failing one down, with the same weight. If all
    answers to a prompt pass, or all fail, their factors are zero.

    Args:
      passed: [P, A] of 0 and 1.
      now: [P, A] log-probability of each whole answer under the policy, nats.
      reference: the same under the frozen reference.
      beta: how strongly the policy is held at the reference.
    """
    gained = now - reference
    factors = np.zeros(passed.shape)
    for prompt, verdicts in enumerate(passed):
        for chosen in np.flatnonzero(verdicts > 0):
            for rejected in np.flatnonzero(verdicts == 0):
                margin = gained[prompt, chosen] - gained[prompt, rejected]
                weight = beta / (1 + np.exp(beta * margin))
                factors[prompt, chosen] += weight
                factors[prompt, rejected] -= weight
    return factors


def packed_columns(examples: Sequence[Example]) -> packing.Packed:
    """Examples packed as 02 does it: {column: [rows, ROW]}."""
    ids = [example.ids for example in examples]
    masks = [example.mask for example in examples]
    return packing.pack_arrays(ids, masks, ROW, seed=0)


def batch_at(columns: packing.Packed, rows: int | slice) -> train.Batch:
    """One packed row, or several, as what 03 trains on."""
    chosen = {}
    for name, column in columns.items():
        chosen[name] = column[rows]
    return train.Batch(**chosen)


class Weighted(NamedTuple):
    """Packed rows, and what the loss of each of their tokens is multiplied by."""

    rows: train.Batch    # of [ROWS_AT_ONCE, ROW] arrays
    factors: np.ndarray  # [ROWS_AT_ONCE, ROW]; 0 in the padding


def pack(examples: Sequence[Example], factors: Sequence[float] | np.ndarray) -> list[Weighted]:
    """Examples and their factors as packed rows, `ROWS_AT_ONCE` at a time.

    Equal examples are packed once, with the sum of their factors. What then has no factor to speak
    of adds nothing, and is left out.
    """
    kept, totals = _different(examples, factors)
    if not kept:
        return []

    # Pack the examples' numbers as well: so each token gets its example's factor, and padding 0.
    numbered = []
    for number, (ids, mask) in enumerate(kept, start=1):
        numbered.append(Example(np.full(len(ids), number), mask))
    number_of_token = packed_columns(numbered)["tokens"]
    factor_of_number = np.array([0.0, *totals], np.float32)
    columns = packed_columns(kept)
    columns["factors"] = factor_of_number[number_of_token]

    missing = -len(number_of_token) % ROWS_AT_ONCE
    for name, column in columns.items():
        columns[name] = np.pad(column, ((0, missing), (0, 0)))
    token_factors = columns.pop("factors")

    parts = []
    for first in range(0, len(token_factors), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        parts.append(Weighted(batch_at(columns, rows), token_factors[rows]))
    return parts


def _different(examples: Sequence[Example], factors: Sequence[float] | np.ndarray
               ) -> tuple[list[Example], list[float]]:
    """Each example once, with the sum of its factors, where that isn't zero."""
    totals: dict[bytes, float] = {}
    by_name: dict[bytes, Example] = {}
    for (ids, mask), factor in zip(examples, factors, strict=True):
        name = np.asarray(ids, np.int32).tobytes()
        totals[name] = factor + totals.get(name, 0.0)
        by_name[name] = Example(ids, mask)

    kept = [name for name, total in totals.items() if abs(total) > SMALLEST_FACTOR]
    return [by_name[name] for name in kept], [totals[name] for name in kept]


PolicyLoss = Callable[[nnx.State, nnx.State, train.Batch, np.ndarray], jax.Array]


def make_loss(model: Gemma4) -> PolicyLoss:
    """(adapters, frozen, rows, factors) -> 03's loss of each token, times its factor, summed."""
    graph = nnx.graphdef(model)

    def loss(adapters: nnx.State, frozen: nnx.State, rows: train.Batch,
             factors: np.ndarray) -> jax.Array:
        policy = nnx.merge(graph, adapters, frozen)
        losses, trained, at = train.token_losses(policy, rows, ROW - 1)
        token_factors = jnp.take_along_axis(factors, at + 1, axis=1)
        return jnp.sum(losses * trained * token_factors)

    return loss


class Learner:
    """The step: the gradient of all answers, divided by how many there are, and then Adam."""

    def __init__(self, model: Gemma4) -> None:
        self.optimizer = train.make_optimizer(0.0, weight_decay=0.0, max_grad_norm=1.0)
        self._gradient = jax.jit(jax.grad(make_loss(model)))
        self._update = jax.jit(self._updated)

    def _updated(self, adapters: nnx.State, moments: optax.OptState, gradient: nnx.State,
                 count: int) -> tuple[nnx.State, optax.OptState]:
        mean = jax.tree.map(lambda array: array / count, gradient)
        updates, moments = self.optimizer.update(mean, moments, adapters)
        return jax.tree.map(jnp.add, adapters, updates), moments

    def gradient(self, adapters: nnx.State, frozen: nnx.State, examples: Sequence[Example],
                 factors: Sequence[float] | np.ndarray) -> nnx.State | None:
        """Of the summed loss of all examples; None if no factor is left."""
        total = None
        for rows, token_factors in pack(examples, factors):
            part = self._gradient(adapters, frozen, rows, token_factors)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    def step(self, adapters: nnx.State, moments: optax.OptState, frozen: nnx.State,
             examples: Sequence[Example], factors: Sequence[float] | np.ndarray, rate: float
             ) -> tuple[nnx.State, optax.OptState]:
        """Take a step at a learning rate; returns (adapters, moments).

        Without a gradient nothing moves, not even by the momentum of earlier steps.
        """
        gradient = self.gradient(adapters, frozen, examples, factors)
        if gradient is None:
            return adapters, moments
        moments.hyperparams["learning_rate"] = jnp.float32(rate)
        return self._update(adapters, moments, gradient, len(examples))
