"""One step of Tunix's GRPO from a start of 13's: does somebody else's code find our gradient?"""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.gemma4.model import Gemma4
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from appendix import rl
from appendix.rl_runs import Bench
from helpers import gemma
from verilog.problems import Problem

KL_WEIGHT = 0.04  # GRPOConfig's own `beta`


class Step(NamedTuple):
    """What Tunix did in one step; B = problems * answers, in order."""

    gradient: np.ndarray         # of all adapters, as one vector
    rewards: np.ndarray          # [problems, answers] of 0 and 1
    examples: list[rl.Example]   # B: prompt and answer, as Tunix drew it
    end_tokens: int              # how many of them stand in the answers


def flat(tree: Any) -> np.ndarray:
    """All numbers of a tree of arrays as one vector."""
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves)


def fresh_model(bench: Bench) -> Gemma4:
    """The start, with copies of its adapters: Tunix may change these."""
    copies = jax.tree.map(jnp.copy, bench.start)
    return nnx.merge(nnx.graphdef(bench.model), copies, bench.frozen)


def make_cluster(bench: Bench, policy: Gemma4, longest: int) -> rl_cluster.RLCluster:
    """Tunix's models and their settings. Gradient descent at rate 1, so a step is the gradient."""
    mesh = gemma.make_mesh(bench.model.config, (1, 1))
    role = rl_cluster.Role
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.sgd(1.0),
        eval_every_n_steps=100,
        max_steps=1)
    rollout = RolloutConfig(
        max_tokens_to_generate=bench.plan.answer_tokens,
        max_prompt_length=longest,
        kv_cache_size=longest + bench.plan.answer_tokens,
        temperature=1.0,
        eos_tokens=sorted(bench.stops))
    return rl_cluster.RLCluster(
        actor=policy,
        reference=fresh_model(bench),
        tokenizer=bench.tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            training_config=training,
            rollout_config=rollout))


def with_prompts(prompts: Sequence[Sequence[int]], tokens: Sequence[Any]) -> list[rl.Example]:
    """Answers behind their prompts, as something to train on; equally many answers to each."""
    answers = len(tokens) // len(prompts)
    examples = []
    for number, answer in enumerate(tokens):
        prompt = prompts[number // answers]
        ids = np.array([*prompt, *answer])
        mask = np.arange(len(ids)) >= len(prompt)
        examples.append(rl.Example(ids, mask))
    return examples


def grpo_step(bench: Bench, problems: Sequence[Problem], answers: int = 4) -> Step:
    """Let Tunix draw `answers` to each problem and train on them, paid by our judge."""
    prompts = [bench.prompts[problem.name] for problem in problems]
    asked = [bench.tokenizer.decode(prompt) for prompt in prompts]
    problem_of = dict(zip(asked, problems, strict=True))
    passes: list[float] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        pairs = []
        for prompt, text in zip(prompts, completions, strict=True):
            pairs.append((problem_of[prompt], text))
        paid = [float(verdict.verilog) for verdict in bench.judge(pairs)]
        passes.extend(paid)
        return paid

    policy = fresh_model(bench)
    longest = max(len(prompt) for prompt in prompts)
    cluster = make_cluster(bench, policy, longest)
    generate = cluster.rollout.generate
    drawn = []

    def generate_and_keep(*arguments: Any) -> Any:
        drawn.append(generate(*arguments))
        return drawn[-1]

    cluster.rollout.generate = generate_and_keep
    mesh = gemma.make_mesh(bench.model.config, (1, 1))
    with mesh, contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        learner = GRPOLearner(cluster, GRPOConfig(num_generations=answers), reward)
        learner.train([{"prompts": np.array(asked)}])

    tokens = drawn[0].tokens
    is_end = np.isin(np.concatenate(tokens), list(bench.stops))
    trained = nnx.state(policy, nnx.LoRAParam)
    return Step(
        gradient=flat(bench.start) - flat(trained),
        rewards=np.reshape(passes, (len(problems), answers)),
        examples=with_prompts(prompts, tokens),
        end_tokens=int(is_end.sum()))


def compare(bench: Bench, theirs: Step, factors: np.ndarray) -> dict[str, float]:
    """Our gradient on Tunix's answers beside Tunix's own: sizes and angle.

    Args:
      bench: that Tunix's step began with.
      theirs: from `grpo_step`.
      factors: [B], what we multiply the loss of each answer by.
    """
    mean = factors / len(factors)
    ours = flat(bench.learner.gradient(bench.start, bench.frozen, theirs.examples, mean))
    size, norm = np.linalg.norm(ours), np.linalg.norm(theirs.gradient)
    return {"size / Tunix's size": size / norm,
            "cosine": ours @ theirs.gradient / (size * norm)}
