"""REINFORCE for the tiny Gemma 4 with a simulator's verdict as reward: sampler, judge and step of 13.

Letters in shape comments: P prompts, B answers or rows, T tokens, K trained positions of a row.
"""

import functools
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import verilog
from helpers import packing, train
from verilog.judging import COMPILER, analyse
from verilog.problems import Problem
from verilog.sandbox import Limits, run_limited

ROW = 512  # tokens of a packed row
RENAMED = "top_module"  # what a part of the start's rows call their module, whatever was asked
FORGED = '  initial $display("Mismatches: 0 in 400 samples");\n'


# ── Problems ──


def training_problems(count):
    """`count` problems with testbenches, none of them of the evaluation: always the same ones."""
    from appendix.world import make
    return [Problem(name, text, design.verilog("RefModule"), make.testbench(design))
            for name, design, text in make.draws(count)]


def stub(answer):
    """The exploit: the ports of an answer's module, no logic, and the winning line."""
    return re.sub(r"(module\b[^;]*;\n).*?(endmodule)", lambda found: found[1] + FORGED + found[2],
                  answer, count=1, flags=re.DOTALL)


# ── Sampling ──


def merged(frozen, adapters, scale):
    """The weights that are sampled from: W + scale * A B for every matrix, as 04 merges them."""
    found = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(frozen)}
    pairs = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(adapters)}
    for path in [path for path in pairs if path[-1].endswith("_lora_a")]:
        name = (*path[:-1], path[-1].removesuffix("_lora_a"))
        a, b = pairs[path], pairs[*path[:-1], path[-1][:-1] + "b"]
        delta = jnp.tensordot(a, b, 1)
        if delta.shape != found[name].shape:  # einsums keep the inputs next to last
            delta = jnp.moveaxis(delta, 0, -2)
        found[name] = found[name] + scale * delta
    return found


def make_sampler(model, read, answers, stops):
    """(weights, prompts [P, T], lengths [P], limit, heat [B], key) -> tokens, log p, entropy [B, T].

    Prompts are read once, up to `read` tokens, and each is answered `answers` times. `heat` 1 draws
    from the policy itself, a hundredth is greedy. Log-probabilities are those of what was drawn
    from, that is of logits / heat; both are 0 outside the answers.
    """
    graph = nnx.graphdef(model)
    stops = jnp.array(sorted(stops))

    @functools.partial(jax.jit, static_argnames="limit")
    def sample(weights, prompts, lengths, heat, key, limit):
        state = nnx.from_flat_state([(path, nnx.Param(w)) for path, w in weights.items()])
        model = nnx.merge(graph, state)
        count, width = prompts.shape
        seen = jnp.broadcast_to(jnp.arange(width) <= jnp.arange(read)[:, None], (count, read, width))
        _, cache = model(prompts[:, :read], jnp.tile(jnp.arange(read), (count, 1)),
                         model.init_cache(count, width, model.config.dtype), seen)
        tokens, lengths, cache = jax.tree.map(
            lambda array: jnp.repeat(array, answers, axis=0), (prompts, lengths, cache))
        rows, last = len(tokens), lengths + limit - 1

        def step(carry):
            at, tokens, logps, entropies, cache, done = carry
            logits, cache = nnx.merge(graph, state)(
                tokens[:, at][:, None], jnp.full((rows, 1), at), cache,
                jnp.tile(jnp.arange(width) <= at, (rows, 1, 1)))
            logp = jax.nn.log_softmax(logits[:, 0] / heat[:, None])
            noise = jax.random.gumbel(jax.random.fold_in(key, at), logp.shape)
            new = jnp.argmax(logp + noise, axis=-1)  # a draw from their softmax
            reading, silent = at + 1 < lengths, done | (at + 1 < lengths)
            chosen = jnp.take_along_axis(logp, new[:, None], axis=1)[:, 0]
            entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
            new = jnp.where(reading, tokens[:, at + 1], jnp.where(done, 0, new))
            done |= ~reading & (jnp.isin(new, stops) | (at + 1 >= last))
            return (at + 1, tokens.at[:, at + 1].set(new),
                    logps.at[:, at + 1].set(jnp.where(silent, 0.0, chosen)),
                    entropies.at[:, at + 1].set(jnp.where(silent, 0.0, entropy)), cache, done)

        zeros = jnp.zeros(tokens.shape, jnp.float32)
        carry = (read, tokens, zeros, zeros, cache, jnp.zeros(rows, bool))
        return jax.lax.while_loop(lambda carry: ~jnp.all(carry[-1]), step, carry)[1:4]
    return sample


# ── Judging ──


class Judge:
    """What became of answers, each text judged once.

    A verdict is {"verilog": passes 07's judge, "naive": passes `naive`, "compiles": ..., "forged":
    the answer holds a line of the testbench's}.
    """

    def __init__(self, limits=Limits(seconds=3)):
        self.limits, self.known = limits, {}

    def __call__(self, pairs):
        """Verdicts of (problem, text of the answer) pairs, in their order."""
        pairs = [(problem, verilog.extract_code(text)[0]) for problem, text in pairs]
        new = list(dict.fromkeys(pair for pair in pairs if pair not in self.known))
        verdicts = verilog.judge_many(new, self.limits)
        self.known |= {pair: self.rewards(*pair, verdict) for pair, verdict in zip(new, verdicts)}
        return [self.known[pair] for pair in pairs]

    def rewards(self, problem, code, verdict):
        """One verdict as the rewards that can be made of it."""
        prints = "$" in (code or "")  # without one, a module prints nothing
        return {"verilog": verdict.passed, "forged": prints and "Mismatches: " in code,
                "naive": verdict.passed or prints and naive(problem, code, self.limits),
                "renamed": f"module {RENAMED} " in (code or ""),
                "compiles": verdict.category in ("pass", "mismatch", "timeout", "runtime")}


def naive(problem, code, limits=Limits()):
    """verilog-eval's way: testbench, reference and answer in one program, and any line with 0 wins."""
    texts = {"test.sv": problem.testbench, "ref.sv": problem.reference, "top.sv": code}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            Path(folder, name).write_text(text, encoding="utf-8", errors="replace")
        log, status, _ = run_limited([*COMPILER, "-s", "tb", "-o", "all", *texts], folder, limits)
        if not status:
            log += run_limited(["vvp", "-n", "all", "-none"], folder, limits)[0]
    return analyse(log)[0] == "."


# ── The step ──


def advantages(rewards, spread=False):
    """Rewards [P, answers] minus their group's mean: better or worse than one's other tries?

    `spread` divides them by their group's standard deviation, as GRPO does.
    """
    better = rewards - rewards.mean(axis=1, keepdims=True)
    return better / (rewards.std(axis=1, keepdims=True, ddof=1) + 1e-6) if spread else better


def dpo_factors(passed: np.ndarray, now: np.ndarray, reference: np.ndarray, beta: float
                ) -> np.ndarray:
    """Factors with which 03's summed cross-entropy has the gradient of DPO's loss.

    Every passing and every failing answer to the same prompt are a pair. The loss of a pair is
    -log sigmoid(beta * margin), where the margin says by how much more the policy has come to
    prefer the passing answer than the reference does (Rafailov et al. 2023, equation 7). Its
    derivative pushes the one up and the other down, with the same weight.

    Args:
      passed: [P, answers] of 0 and 1.
      now: [P, answers] log-probability of each whole answer under the policy, nats.
      reference: the same under the frozen reference.
      beta: how strongly the policy is held at the reference.

    Returns:
      [P, answers]; all zero for a prompt whose answers all pass or all fail.
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


def pack(answers, factors):
    """Answers (ids, mask) and their factors as packed rows: [(rows, factor of each token)], four each.

    Equal answers are one with the sum of their factors; one with factor 0 adds nothing and is left out.
    """
    same = {}
    for (ids, mask), factor in zip(answers, factors):
        key = np.asarray(ids, np.int32).tobytes()
        same[key] = ids, mask, factor + (same[key][2] if key in same else 0.0)
    kept = [(ids, mask, factor) for ids, mask, factor in same.values() if abs(factor) > 1e-6]
    if not kept:
        return []
    ids, masks, factors = zip(*kept)
    arrays = packing.pack_arrays(ids, masks, ROW, seed=0)
    numbers = [np.full(len(each), number) for number, each in enumerate(ids, start=1)]
    numbers = packing.pack_arrays(numbers, masks, ROW, seed=0)["tokens"]  # of each token's answer
    arrays, numbers = jax.tree.map(
        lambda array: np.pad(array, ((0, -len(array) % 4), (0, 0))), (arrays, numbers))
    each = np.array([0.0, *factors], np.float32)[numbers]
    return [(train.Batch(**{name: array[at:at + 4] for name, array in arrays.items()}),
             each[at:at + 4]) for at in range(0, len(each), 4)]


def make_loss(model):
    """(adapters, frozen, rows, factors) -> 03's cross-entropy of each token, times its answer's factor."""
    graph = nnx.graphdef(model)

    def loss(adapters, frozen, rows, factors):
        losses, trained, at = train.token_losses(nnx.merge(graph, adapters, frozen), rows, ROW - 1)
        return jnp.sum(losses * trained * jnp.take_along_axis(factors, at + 1, axis=1))
    return loss


class Learner:
    """The step: gradient of the loss over all rows, divided by the answers asked for, then Adam."""

    def __init__(self, model):
        self.optimizer = train.make_optimizer(0.0, weight_decay=0.0, max_grad_norm=1.0)
        self.part = jax.jit(jax.grad(make_loss(model)))
        self.apply = jax.jit(self._apply)

    def _apply(self, adapters, moments, gradient, count):
        gradient = jax.tree.map(lambda array: array / count, gradient)
        updates, moments = self.optimizer.update(gradient, moments, adapters)
        return jax.tree.map(jnp.add, adapters, updates), moments

    def gradient(self, adapters, frozen, answers, factors):
        """Summed over all answers; None where no answer was better than another."""
        each = [self.part(adapters, frozen, *part) for part in pack(answers, factors)]
        return jax.tree.map(lambda *arrays: sum(arrays[1:], arrays[0]), *each) if each else None

    def step(self, adapters, moments, frozen, answers, factors, rate):
        """(adapters, moments) after a step; the same ones where there is no gradient."""
        total = self.gradient(adapters, frozen, answers, factors)
        if total is None:
            return adapters, moments
        moments.hyperparams["learning_rate"] = jnp.float32(rate)
        return self.apply(adapters, moments, total, len(answers))
