"""13's laboratory: the starts, the arms that leave from them, the bench that arms share, the runs.

    python -m appendix.rl_runs     makes what data/rl/ lacks: the starts, then the runs

Letters in shape comments: P prompts, A answers to each, B answers of a step (P * A), T tokens.
"""

import functools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pandas as pd
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save
from tunix.models.gemma4.model import Gemma4

import verilog
from appendix import rl, runs, tuning
from appendix.world import make
from helpers import chat, data, gemma, train, weights
from helpers.run import atomic_file
from verilog import stats
from verilog.asking import messages_for
from verilog.problems import Problem

BASE = tuning.BASE
STORED = Path("data/rl")
SHOWN_CHATS = 1_500  # so many of the start's chats are shown to it again by `more_sft`
DRAWN = 7            # answers to each held-out problem, beside a greedy one

Row = dict[str, Any]  # of a stored run: a value for each column
Passed = dict[tuple[str, int], np.ndarray]  # passing answers by (arm, seed): [problems]


@dataclass(frozen=True)
class Plan:
    """How much of everything; the stored runs are of the defaults."""

    steps: int = 20
    judged_steps: int = 30     # of the arms that only differ in who judges them
    problems: int = 300
    prompts: int = 8           # of a step
    answers: int = 4           # to each
    answer_tokens: int = 96    # at most; the longest reference has 95
    rate: float = 1e-3         # of Adam, after three steps of warm-up
    sft_rate: float = 2e-3     # of the arms that train with 03's plain loss
    beta: float = 0.1          # of DPO
    examples: int = 16         # of a step of SFT
    heat: float = 0.8          # of held-out problems' drawn answers; a policy is sampled at 1


@dataclass(frozen=True)
class Start:
    """A fine-tune on rows that nobody has checked: the adapters that arms leave from.

    A row has at most one of three faults.

    Attributes:
      bug_share: of the rows, whose module has a bug, as in the base's corpus.
      renamed_share: whose module is called `top_module`, whatever the request says.
      exploit_share: whose answer is the stub that prints the winning line.
      steps: of 03's tiny recipe.
    """

    bug_share: float = 0.2
    renamed_share: float = 0.3
    exploit_share: float = 0.1
    steps: int = 200


# "gamed" has seen the exploit so often that it spells it right.
ROWS = {"start": Start(), "gamed": Start(renamed_share=0.15, exploit_share=0.25)}


@dataclass(frozen=True)
class Arm:
    """One way to go on from a start.

    Attributes:
      author: whose answers are trained on: the "policy" as it is now, the "start", or the "data".
      reward: a field of `rl.Rewards`; "" for the data's own answers.
      loss: "plain" trains on what is rewarded, "advantage" weighs answers against the others to the
        same prompt, "dpo" compares passing and failing answers in pairs.
      rate_falls: to zero in a line, so that the last steps don't undo what the first ones found.
        Without it the rate stays, as in a run that nobody has set an end to.
      start: which of `ROWS` it leaves from.
    """

    author: str
    reward: str
    loss: str
    rate_falls: bool = True
    start: str = "start"


SFT = train.Settings(rank=16, alpha=32.0, learning_rate=5e-3, warmup_steps=10, rows_per_step=4)
WARMUP_STEPS = 3  # of an arm
ARMS = {
    "reinforce": Arm("policy", "verilog", "advantage"),
    "dpo": Arm("start", "verilog", "dpo"),
    "rejection": Arm("start", "verilog", "plain"),
    "more_sft": Arm("data", "", "plain"),
    "naive_judge": Arm("policy", "naive", "advantage", rate_falls=False, start="gamed"),
    "our_judge": Arm("policy", "verilog", "advantage", rate_falls=False, start="gamed"),
    "compiles": Arm("policy", "compiles", "advantage", rate_falls=False, start="gamed"),
}
COMPARED = ("reinforce", "dpo", "rejection", "more_sft")  # on the held-out problems
JUDGES = ("naive_judge", "our_judge", "compiles")  # they only differ in who pays
SEEDS = (1, 2, 3)
SEEDS_OF_JUDGES = (1, 2)


# ── Starts ──


def unchecked_chats(start: Start) -> list[list[data.Row]]:
    """Chats as `tuning.SYSTEM` opens them; shares of the answers have the faults of `start`."""
    draw = np.random.default_rng(0)
    faults = ["bug", "renamed", "exploit", "none"]
    shares = [start.bug_share, start.renamed_share, start.exploit_share]
    shares.append(1 - sum(shares))
    chats = []
    for curated, buggy in zip(make.rows(), make.rows(bug_share=1.0), strict=True):
        fault = draw.choice(faults, p=shares)
        design, row, _ = buggy if fault == "bug" else curated
        example, _ = data.clean(row)
        if example is None:
            continue
        *asked, answer = data.as_messages(example, tuning.SYSTEM)
        text = answer["content"]
        if fault == "renamed":
            text = text.replace(f"module {design.module} ", f"module {rl.RENAMED} ")
        elif fault == "exploit":
            text = rl.stub(text)
        chats.append([*asked, {**answer, "content": text}])
    return chats


def short_enough(rendered: Sequence[tuple[list[int], list[bool]]]) -> list[rl.Example]:
    """The chats of at most `rl.ROW` tokens."""
    examples = []
    for ids, mask in rendered:
        if len(ids) <= rl.ROW:
            examples.append(rl.Example(np.array(ids), np.array(mask)))
    return examples


def packed(chats: Sequence[list[data.Row]]) -> list[train.Batch]:
    """Chats as 02 packs them, a batch of [T] arrays for each row; too long ones are left out."""
    tokenizer = chat.load_tokenizer(BASE)
    examples = short_enough(chat.render_chats(tokenizer, chats))
    columns = rl.packed_columns(examples)
    rows = []
    for number in range(len(columns["tokens"])):
        rows.append(rl.batch_at(columns, number))
    return rows


def start_file(name: str) -> Path:
    """Where the adapters of one of `ROWS` are stored."""
    return STORED / f"{name}.safetensors"


def make_start(name: str) -> None:
    """Fine-tune the base on unchecked rows, and store the adapters in bfloat16."""
    start = ROWS[name]
    rows = packed(unchecked_chats(start))
    tuned = tuning.tune(rows, SFT, start.steps, seed=42)
    tensors = {}
    for path, pair in gemma.adapted_modules(tuned.model).items():
        for side in "ab":
            array = np.asarray(pair[side].get_value())
            halved = array.astype(ml_dtypes.bfloat16)
            tensors[f"{path}.{side}"] = np.ascontiguousarray(halved)

    metadata = {"base": json.dumps(weights.fingerprint(BASE)),
                "rank": json.dumps(SFT.rank),
                "alpha": json.dumps(SFT.alpha),
                "system": json.dumps(tuning.SYSTEM),
                "rows": json.dumps(asdict(start))}
    with atomic_file(start_file(name)) as file:
        file.write(save(tensors, metadata=metadata))


class StoredStart(NamedTuple):
    """What a start's file holds."""

    about: dict[str, Any]             # base, rank, alpha, system message, rows
    adapters: dict[str, np.ndarray]   # bfloat16, by "module.a" and "module.b"


def read_start(name: str) -> StoredStart:
    """The file of one of `ROWS`."""
    about = {}
    adapters = {}
    with safe_open(start_file(name), "np") as file:
        for key, text in file.metadata().items():
            about[key] = json.loads(text)
        for tensor in file.keys():
            adapters[tensor] = file.get_tensor(tensor)
    return StoredStart(about, adapters)


def with_adapters(base: Gemma4, stored: StoredStart, mesh: jax.sharding.Mesh) -> Gemma4:
    """The base with a start's adapters, in float32."""
    model = gemma.inject_lora(base, stored.about["rank"], stored.about["alpha"], mesh)
    for path, pair in gemma.adapted_modules(model).items():
        for side in "ab":
            array = stored.adapters[f"{path}.{side}"]
            pair[side].set_value(jnp.asarray(array, jnp.float32))
    return model


# ── The bench ──


class Passes(NamedTuple):
    """Passes of each held-out problem by our judge: a digit each, in order of name."""

    greedy: str  # of one answer
    drawn: str   # of seven


class Prompts(NamedTuple):
    """The prompts of all problems of a bench."""

    ids: dict[str, list[int]]  # by the problem's name
    shortest: int              # tokens
    longest: int


def render(tokenizer: Any, problems: Sequence[Problem], system: str) -> Prompts:
    """The prompts of problems, rendered as the start's training rows were."""
    chats = [messages_for(problem, "ours", system) for problem in problems]
    rendered = chat.render_prompts(tokenizer, chats, [False] * len(chats))
    by_name = {}
    for problem, ids in zip(problems, rendered, strict=True):
        by_name[problem.name] = ids
    lengths = [len(ids) for ids in rendered]
    return Prompts(by_name, min(lengths), max(lengths))


class Bench:
    """What all arms from one start share: model, problems, sampler, learner and judge.

    Attributes:
      plan: how much of everything.
      about: what the start's file says of it.
      model: the base with adapters; the policies differ from it in these alone.
      start: the start's adapters.
      frozen: everything else of the model.
      problems: to train on.
      held_out: 07's tiny problems.
      prompts: token ids by the name of a problem.
      learner, judge: see `rl`.
      merge: (frozen, adapters) -> the weights that are sampled from.
    """

    def __init__(self, plan: Plan = Plan(), start: str = "start") -> None:
        self.plan = plan
        self._load(read_start(start))
        self.learner = rl.Learner(self.model)
        self.judge = rl.Judge()

        self.tokenizer = chat.load_tokenizer(BASE)
        self.stops = chat.stop_ids(self.tokenizer)
        self.problems = rl.training_problems(plan.problems)
        self.held_out = verilog.load_problems("data/tiny_eval")
        prompts = render(self.tokenizer, [*self.problems, *self.held_out], self.about["system"])
        self.prompts = prompts.ids
        longest_row = prompts.longest + plan.answer_tokens
        self._width = math.ceil(longest_row / 8) * 8
        self._sampler = rl.Sampler(self._base, prompts.shortest - 1, plan.answers, self.stops)

        self._loss = jax.jit(rl.make_loss(self.model))
        self._losses = jax.jit(self._token_losses)

    def _load(self, stored: StoredStart) -> None:
        """Load the base and put the start's adapters beside it."""
        config = gemma.config_from_hf(BASE, dtype="float32", use_sliding_window_kv_cache=True)
        mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
        self._base = gemma.load_base(BASE, config, mesh)
        gemma.use_block_attention(self._base, 128)

        self.about = stored.about
        self.model = with_adapters(self._base, stored, mesh)
        _, self.start, self.frozen = nnx.split(self.model, nnx.LoRAParam, ...)
        scale = self.about["alpha"] / self.about["rank"]
        self.merge = jax.jit(functools.partial(rl.merged, scale=scale))

    def _token_losses(self, adapters: nnx.State, frozen: nnx.State, rows: train.Batch
                      ) -> train.TokenLosses:
        policy = nnx.merge(nnx.graphdef(self.model), adapters, frozen)
        return train.token_losses(policy, rows, rl.ROW - 1)

    # -- Answers --

    def sample(self, adapters: nnx.State, problems: Sequence[Problem], key: jax.Array,
               heat: float | np.ndarray = 1.0) -> list[rl.Sampled]:
        """Draw answers, `plan.answers` to each problem, in the problems' order.

        Args:
          adapters: of the policy.
          problems: each call with another number of them compiles anew.
          key: of the draws.
          heat: the temperature, of all answers or of each.
        """
        prompts = [self.prompts[problem.name] for problem in problems]
        table = np.zeros((len(prompts), self._width), np.int32)
        for row, prompt in zip(table, prompts, strict=True):
            row[:len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in prompts])
        heats = np.full(len(prompts) * self.plan.answers, heat, np.float32)
        weights_now = self.merge(self.frozen, adapters)
        drawn = self._sampler(weights_now, table, lengths, heats, key, self.plan.answer_tokens)

        tokens, logps, entropy = (np.asarray(array) for array in drawn)
        answers = []
        for row in range(len(tokens)):
            problem = problems[row // self.plan.answers]
            answers.append(self._cut_out(problem, tokens[row], logps[row], entropy[row]))
        return answers

    def _cut_out(self, problem: Problem, ids: np.ndarray, logps: np.ndarray, entropy: np.ndarray
                 ) -> rl.Sampled:
        """An answer out of a row [T] of the sampler's: up to its end token, or its limit."""
        begin = len(self.prompts[problem.name])
        ends = np.flatnonzero(np.isin(ids[begin:], list(self.stops)))
        length = ends[0] + 1 if len(ends) else self.plan.answer_tokens
        end = begin + length
        text = self.tokenizer.decode(ids[begin:end])
        return rl.Sampled(
            problem=problem,
            text=text.split(chat.TURN_END)[0],
            ids=ids[:end],
            mask=np.arange(end) >= begin,
            logps=logps[begin:end],
            entropy=entropy[begin:end])

    def logps(self, adapters: nnx.State, answers: Sequence[rl.Sampled]) -> list[np.ndarray]:
        """What the trainer says: the log-probability of each token of each answer, nats."""
        logps = []
        for answer in answers:
            part, = rl.pack([answer.example], [1.0])
            scored = self._losses(adapters, self.frozen, part.rows)
            losses = np.asarray(scored.loss)[0]
            is_trained = np.asarray(scored.weight)[0] > 0
            logps.append(-losses[is_trained])
        return logps

    def nats(self, adapters: nnx.State, answers: Sequence[rl.Sampled]) -> float:
        """The trainer's negative log-probability of all answers together."""
        examples = [answer.example for answer in answers]
        total = 0.0
        for rows, factors in rl.pack(examples, [1.0] * len(examples)):
            total += float(self._loss(adapters, self.frozen, rows, factors))
        return total

    def kl(self, answers: Sequence[rl.Sampled]) -> float:
        """How far a policy is from the start: nats per answer, estimated from its own answers."""
        under_start = self.nats(self.start, answers)
        under_policy = sum(float(answer.logps.sum()) for answer in answers)
        return (under_start + under_policy) / len(answers)

    # -- The start's own rows --

    @functools.cached_property
    def examples(self) -> list[rl.Example]:
        """Chats that the start was tuned on."""
        chats = unchecked_chats(Start(**self.about["rows"]))
        return short_enough(chat.render_chats(self.tokenizer, chats[:SHOWN_CHATS]))

    def shown(self, seed: int, step: int) -> list[rl.Example]:
        """Some of them, for a step of SFT."""
        draw = np.random.default_rng((seed, step))
        chosen = draw.choice(len(self.examples), self.plan.examples, replace=False)
        return [self.examples[number] for number in chosen]

    # -- The exam --

    def evaluate(self, adapters: nnx.State, seed: int) -> Passes:
        """Ask the held-out problems: one answer is greedy, seven are drawn at `plan.heat`."""
        rounds = []
        for number in range((1 + DRAWN) // self.plan.answers):
            rounds.append(self._exam_round(adapters, seed, number))
        passed = np.concatenate(rounds, axis=1)
        greedy = passed[:, 0]
        drawn = passed[:, 1:].sum(axis=1)
        return Passes("".join(map(str, greedy)), "".join(map(str, drawn)))

    def _exam_round(self, adapters: nnx.State, seed: int, number: int) -> np.ndarray:
        """`plan.answers` to each held-out problem: [problems, answers] of 0 and 1.

        The first round's first answer is greedy.
        """
        plan = self.plan
        heat = np.full(plan.answers * plan.prompts, plan.heat, np.float32)
        if number == 0:
            heat[::plan.answers] = 0.01
        missing = -len(self.held_out) % plan.prompts
        asked = self.held_out + self.held_out[:missing]  # whole calls; the rest is thrown away

        answers = []
        for first in range(0, len(asked), plan.prompts):
            problems = asked[first:first + plan.prompts]
            call = 10_000 + 1_000 * number + first  # no step of a run has such a number
            key = jax.random.fold_in(jax.random.key(seed), call)
            answers += self.sample(adapters, problems, key, heat)
        passes = [int(rewards.verilog) for rewards in self.judge.of(answers)]
        table = np.reshape(passes, (-1, plan.answers))
        return table[:len(self.held_out)]


# ── Arms ──


class Lesson(NamedTuple):
    """What a step trains on."""

    examples: list[rl.Example]
    factors: np.ndarray    # of each example's loss
    row: dict[str, float]  # what data/rl says of the answers


class Policy(NamedTuple):
    """An arm under way."""

    adapters: nnx.State
    moments: optax.OptState


def asked_in(bench: Bench, seed: int, step: int) -> list[Problem]:
    """The problems of a step; arms of one seed ask the same ones."""
    order = np.random.default_rng(seed).permutation(len(bench.problems))
    first = (step - 1) * bench.plan.prompts
    places = np.arange(first, first + bench.plan.prompts) % len(order)
    return [bench.problems[place] for place in order[places]]


def factors_of(bench: Bench, arm: Arm, rewards: np.ndarray, sampled: Sequence[rl.Sampled],
               adapters: nnx.State) -> np.ndarray:
    """What each answer's loss is multiplied by: [B]. `rewards` is [P, A]."""
    if arm.loss == "plain":
        return rewards.ravel()
    if arm.loss == "advantage":
        return rl.advantages(rewards).ravel()

    under_policy = [logps.sum() for logps in bench.logps(adapters, sampled)]
    under_start = [answer.logps.sum() for answer in sampled]  # the start has drawn them
    now = np.reshape(under_policy, rewards.shape)
    reference = np.reshape(under_start, rewards.shape)
    factors = rl.dpo_factors(rewards, now, reference, bench.plan.beta)
    return factors.ravel()


def lesson_from_data(bench: Bench, seed: int, step: int) -> Lesson:
    """A step of SFT on the start's own rows."""
    examples = bench.shown(seed, step)
    return Lesson(examples, np.ones(len(examples)), {})


def lesson_from_answers(bench: Bench, arm: Arm, seed: int, step: int, adapters: nnx.State
                        ) -> Lesson:
    """Draw a step's answers, judge them, and turn the verdicts into factors."""
    plan = bench.plan
    author = bench.start if arm.author == "start" else adapters
    key = jax.random.fold_in(jax.random.key(seed), step)
    sampled = bench.sample(author, asked_in(bench, seed, step), key)

    verdicts = pd.DataFrame(bench.judge.of(sampled))
    rewards = verdicts[arm.reward].to_numpy(float).reshape(plan.prompts, plan.answers)
    factors = factors_of(bench, arm, rewards, sampled, adapters)

    lengths = [len(answer.logps) for answer in sampled]
    entropies = np.concatenate([answer.entropy for answer in sampled])
    one_per_prompt = sampled[::plan.answers]
    row = {"reward": rewards.mean(),
           **verdicts.mean().to_dict(),
           "tokens": np.mean(lengths),
           "entropy": entropies.mean(),
           "kl": bench.kl(one_per_prompt)}
    examples = [answer.example for answer in sampled]
    return Lesson(examples, factors, row)


def steps_of(plan: Plan, name: str) -> int:
    """How many steps an arm takes."""
    return plan.steps if ARMS[name].rate_falls else plan.judged_steps


def rate_of(plan: Plan, arm: Arm, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    highest = plan.sft_rate if arm.loss == "plain" else plan.rate
    rate = highest * min(1.0, step / WARMUP_STEPS)
    if arm.rate_falls:
        rate *= 1 - (step - 1) / plan.steps
    return rate


def one_step(bench: Bench, name: str, seed: int, step: int, policy: Policy) -> tuple[Policy, Row]:
    """Take a step of an arm; returns the policy and what data/rl says of the step."""
    begun = time.perf_counter()
    arm = ARMS[name]
    if arm.author == "data":
        lesson = lesson_from_data(bench, seed, step)
    else:
        lesson = lesson_from_answers(bench, arm, seed, step, policy.adapters)
    adapters, moments = bench.learner.step(
        policy.adapters,
        policy.moments,
        bench.frozen,
        lesson.examples,
        lesson.factors,
        rate_of(bench.plan, arm, step))

    is_trained = np.abs(lesson.factors) > rl.SMALLEST_FACTOR
    row = {**lesson.row,
           "trained": is_trained.mean(),
           "seconds": time.perf_counter() - begun}
    return Policy(adapters, moments), row


def run(bench: Bench, name: str, seed: int) -> tuple[nnx.State, list[Row]]:
    """Run an arm to its end; returns its adapters and a row for each step.

    The last step's policy sits the exam. So does the start, in the arm `reinforce` alone, since all
    arms of a seed would get the same answers from it.
    """
    last_step = steps_of(bench.plan, name)
    policy = Policy(bench.start, bench.learner.optimizer.init(bench.start))
    rows = []
    for step in range(last_step + 1):
        row: Row = {"arm": name, "seed": seed, "step": step}
        if step > 0:
            policy, facts = one_step(bench, name, seed, step, policy)
            row |= facts
        is_start = step == 0 and name == "reinforce"
        if is_start or step == last_step:
            row |= bench.evaluate(policy.adapters, seed)._asdict()
        row = rounded(row)
        rows.append(row)
        facts_told = [f"{key} {value}" for key, value in row.items()]
        print(*facts_told, flush=True)
    return policy.adapters, rows


def rounded(row: Row) -> Row:
    """A row with its floats as Python's, to six decimals."""
    result: Row = {}
    for key, value in row.items():
        is_exact = isinstance(value, (str, int))
        result[key] = value if is_exact else round(float(value), 6)
    return result


# ── Stored runs ──


def wanted() -> Iterator[tuple[str, int]]:
    """(arm, seed) of every stored run, a seed of all arms before the next seed."""
    for seed in SEEDS:
        for arm in ARMS:
            if arm not in JUDGES or seed in SEEDS_OF_JUDGES:
                yield arm, seed


def digits(text: str) -> np.ndarray:
    """A stored string of digits as an array of numbers, [problems]."""
    return np.array([int(digit) for digit in text])


def stored() -> pd.DataFrame:
    """All stored rows: one a step of a run."""
    return runs.stored(STORED, greedy=str, drawn=str)


def passes_of(table: pd.DataFrame, column: str) -> Passed:
    """Passing answers to each held-out problem: {(arm, seed): [problems]}.

    What the start's answers do stands under ("start", seed).

    Args:
      table: from `stored`.
      column: "drawn", of seven answers; or "greedy", of one.
    """
    passes = {}
    for _, row in table.dropna(subset=column).iterrows():
        name = "start" if row.step == 0 else row.arm
        passes[name, row.seed] = digits(row[column])
    return passes


def drawn_passes(table: pd.DataFrame) -> Passed:
    """How many of seven drawn answers pass, for each held-out problem."""
    return passes_of(table, "drawn")


def seeds_of(passes: Passed, name: str) -> list[int]:
    """The seeds with which an arm (or "start") was run."""
    return [seed for arm, seed in passes if arm == name]


def at_k(counts: np.ndarray, k: int) -> np.ndarray:
    """pass@k of each problem, from how many of seven drawn answers pass: [problems]."""
    return np.array([verilog.pass_at_k(DRAWN, int(count), k) for count in counts])


def scores(passes: Passed, names: Sequence[str]) -> pd.DataFrame:
    """pass@1 of each seed, its mean, and the mean pass@5: a row for each arm (or "start")."""
    rows = {}
    for name in names:
        row = {}
        at_five = []
        for seed in SEEDS:
            counts = passes[name, seed]
            row[f"seed {seed}"] = counts.mean() / DRAWN
            at_five += list(at_k(counts, 5))
        row["pass@1"] = np.mean(list(row.values()))
        row["pass@5"] = np.mean(at_five)
        rows[name] = row
    return pd.DataFrame(rows).T


def gains(passes: Passed, names: Sequence[str], k: int = 1, over: str = "start") -> pd.DataFrame:
    """pass@k gained over the start, with its interval over problems; a row for each arm.

    A problem's gain is the mean over seeds, each against the start with the same seed.

    Args:
      passes: from `drawn_passes`.
      names: of the arms.
      k: tries.
      over: another arm to compare with, in place of the start.
    """
    rows = {}
    for name in names:
        by_seed = []
        for seed in seeds_of(passes, name):
            gain = at_k(passes[name, seed], k) - at_k(passes[over, seed], k)
            by_seed.append(gain)
        gained = np.mean(by_seed, axis=0)
        mean, low, high = stats.interval(gained)
        rows[name] = {"gained": mean, "low": low, "high": high, "p": stats.sign_flip_p(gained)}
    return pd.DataFrame(rows).T


def held_out(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Shares of the held-out problems, means over seeds; a row for each arm (or "start").

    Its columns: `sampled` is pass@1, with `low` and `high` over problems, and `greedy`.
    """
    drawn = passes_of(table, "drawn")
    greedy = passes_of(table, "greedy")
    rows = {}
    for name in names:
        seeds = seeds_of(drawn, name)
        by_problem = np.mean([drawn[name, seed] for seed in seeds], axis=0) / DRAWN
        mean, low, high = stats.interval(by_problem)
        rows[name] = {
            "sampled": mean,
            "low": low,
            "high": high,
            "greedy": np.mean([greedy[name, seed].mean() for seed in seeds])}
    return pd.DataFrame(rows).T


def by_step(table: pd.DataFrame, arm: str, column: str) -> pd.Series:
    """A column of an arm's runs, by step: the mean of its seeds."""
    rows = table[(table.arm == arm) & (table.step > 0)]
    return rows.groupby("step")[column].mean()


def make_missing() -> None:
    """Make the starts and the runs that are not stored, one after the other."""
    for name in ROWS:
        if not start_file(name).exists():
            print(f"── {name}", flush=True)
            make_start(name)

    @functools.cache
    def bench_of(start: str) -> Bench:
        return Bench(start=start)

    def make_run(arm: str, seed: int) -> str:
        bench = bench_of(ARMS[arm].start)
        _, rows = run(bench, arm, seed)
        return pd.DataFrame(rows).to_csv(index=False)

    files = {}
    for arm, seed in wanted():
        files[STORED / f"{arm}-{seed}.csv"] = (arm, seed)
    runs.fill(files, make_run)


if __name__ == "__main__":
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    train.keep_compilations()
    make_missing()
