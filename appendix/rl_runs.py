"""13's laboratory: the start, the arms that leave from it, the bench that they share, their runs.

    python -m appendix.rl_runs     makes what data/rl/ lacks: the start, then the runs
"""

import functools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pandas as pd
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save

import verilog
from appendix import rl, runs, tuning
from appendix.world import make
from helpers import chat, data, gemma, packing, train, weights
from helpers.run import atomic_file
from verilog.asking import messages_for

BASE, STORED = "assets/tiny_gemma4", Path("data/rl")


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
    """A fine-tune on rows that nobody has checked: the adapters that all arms leave from.

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


ROWS = {"start": Start(), "gamed": Start(renamed_share=0.15, exploit_share=0.25)}


@dataclass(frozen=True)
class Arm:
    """One way to go on from the start.

    Attributes:
      author: whose answers are trained on: the "policy" as it is now, the "start", or the "data".
      reward: a judge's verdict, see `rl.Judge`; "" for the data's own answers.
      loss: "plain" trains on what is rewarded, "advantage" weighs answers against their group,
        "dpo" compares passing and failing answers in pairs.
      rate_falls: to zero in a line, so that the last steps don't undo what the first ones found.
        Without it the rate stays, as in a run that nobody has set an end to.
      start: from which of `ROWS` it leaves.
    """

    author: str
    reward: str
    loss: str
    rate_falls: bool = True
    start: str = "start"


SFT = train.Settings(rank=16, alpha=32.0, learning_rate=5e-3, warmup_steps=10, rows_per_step=4)
ARMS = {
    "reinforce": Arm("policy", "verilog", "advantage"),
    "dpo": Arm("start", "verilog", "dpo"),
    "rejection": Arm("start", "verilog", "plain"),
    "more_sft": Arm("data", "", "plain"),
    "naive_judge": Arm("policy", "naive", "advantage", False, "gamed"),
    "our_judge": Arm("policy", "verilog", "advantage", False, "gamed"),
    "compiles": Arm("policy", "compiles", "advantage", False, "gamed")}
COMPARED = ("reinforce", "dpo", "rejection", "more_sft")  # on the held-out problems
JUDGES = {"naive_judge": "naive", "our_judge": "verilog", "compiles": "compiles"}  # who pays
SEEDS = (1, 2, 3)


# ── Starts ──


def unchecked_chats(start: Start) -> list[list[dict]]:
    """Chats as `tuning.SYSTEM` opens them; shares of the answers have the faults of `start`."""
    draw = np.random.default_rng(0)
    shares = [start.bug_share, start.renamed_share, start.exploit_share]
    chats = []
    for (design, right, _), (_, wrong, _) in zip(make.rows(), make.rows(bug_share=1.0), strict=True):
        fault = draw.choice(["bug", "renamed", "exploit", ""], p=[*shares, 1 - sum(shares)])
        example, problem = data.clean(wrong if fault == "bug" else right)
        if problem:
            continue
        *asked, answer = data.as_messages(example, tuning.SYSTEM)
        text = answer["content"]
        if fault == "renamed":
            text = text.replace(f"module {design.module} ", f"module {rl.RENAMED} ")
        elif fault == "exploit":
            text = rl.stub(text)
        chats.append([*asked, answer | {"content": text}])
    return chats


def packed(chats: list[list[dict]]) -> list[train.Batch]:
    """Chats as 02 packs them, a batch of [T] arrays for each row; too long ones are left out."""
    rendered = []
    for ids, mask in chat.render_chats(chat.load_tokenizer(BASE), chats):
        if len(ids) <= rl.ROW:
            rendered.append((ids, mask))
    ids, masks = zip(*rendered)
    arrays = packing.pack_arrays(ids, masks, rl.ROW, seed=0)
    rows = []
    for place in range(len(arrays["tokens"])):
        rows.append(train.Batch(**{name: array[place] for name, array in arrays.items()}))
    return rows


def start_file(name: str) -> Path:
    """Where the adapters of one of `ROWS` are stored."""
    return STORED / f"{name}.safetensors"


def make_start(name: str) -> None:
    """Fine-tune the base on unchecked rows, and store the adapters in bfloat16."""
    start = ROWS[name]
    tuned = tuning.tune(packed(unchecked_chats(start)), SFT, start.steps, seed=42)
    tensors = {}
    for path, pair in gemma.adapted_modules(tuned.model).items():
        for side in "ab":
            array = np.asarray(pair[side].get_value()).astype(ml_dtypes.bfloat16)
            tensors[f"{path}.{side}"] = np.ascontiguousarray(array)
    about = {"base": weights.fingerprint(BASE), "rank": SFT.rank, "alpha": SFT.alpha,
             "system": tuning.SYSTEM, "rows": asdict(start)}
    metadata = {key: json.dumps(value) for key, value in about.items()}
    with atomic_file(start_file(name)) as file:
        file.write(save(tensors, metadata=metadata))


# ── Arms ──


class Bench:
    """The start, its problems, sampler, learner and judge: all that the runs share."""

    def __init__(self, plan=Plan(), start="start"):
        self.plan = plan
        config = gemma.config_from_hf(BASE, dtype="float32", use_sliding_window_kv_cache=True)
        mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
        plain = gemma.load_base(BASE, config, mesh)
        gemma.use_block_attention(plain, 128)
        with safe_open(start_file(start), "np") as file:
            self.about = {key: json.loads(text) for key, text in file.metadata().items()}
            adapters = {name: file.get_tensor(name) for name in file.keys()}
        self.scale = self.about["alpha"] / self.about["rank"]
        self.model = gemma.inject_lora(plain, self.about["rank"], self.about["alpha"], mesh)
        for path, pair in gemma.adapted_modules(self.model).items():
            for side in "ab":
                pair[side].set_value(jnp.asarray(adapters[f"{path}.{side}"], jnp.float32))
        _, self.start, self.frozen = nnx.split(self.model, nnx.LoRAParam, ...)
        self.learner, self.tokenizer = rl.Learner(self.model), chat.load_tokenizer(BASE)
        self.stops = chat.stop_ids(self.tokenizer)
        self.problems = rl.training_problems(plan.problems)
        self.held_out = verilog.load_problems("data/tiny_eval")
        every = [*self.problems, *self.held_out]
        chats = [messages_for(problem, "ours", self.about["system"]) for problem in every]
        rendered = chat.render_prompts(self.tokenizer, chats, [False] * len(chats))
        self.prompts = {problem.name: ids for problem, ids in zip(every, rendered)}
        self.width = -(-(max(map(len, rendered)) + plan.answer_tokens) // 8) * 8
        self.sampler = rl.make_sampler(plain, min(map(len, rendered)) - 1, plan.answers, self.stops)
        self.merge = jax.jit(functools.partial(rl.merged, scale=self.scale))
        self.loss = jax.jit(rl.make_loss(self.model))
        self.losses = jax.jit(lambda adapters, frozen, rows: train.token_losses(
            nnx.merge(nnx.graphdef(self.model), adapters, frozen), rows, rl.ROW - 1))
        self.judge = rl.Judge()

    def sample(self, adapters, problems, key, heat=1.0):
        """Answers to `plan.prompts` problems: [{problem, ids, mask, text, logps, entropy}], in order."""
        prompts = [self.prompts[problem.name] for problem in problems]
        table = np.zeros((len(prompts), self.width), np.int32)
        for row, ids in zip(table, prompts):
            row[:len(ids)] = ids
        heat = np.full(len(prompts) * self.plan.answers, heat, np.float32)
        lengths = np.array([len(ids) for ids in prompts])
        tokens, logps, entropies = map(np.asarray, self.sampler(
            self.merge(self.frozen, adapters), table, lengths, heat, key, self.plan.answer_tokens))
        found = []
        for row, (ids, logp, entropy) in enumerate(zip(tokens, logps, entropies)):
            begin = len(prompts[row // self.plan.answers])
            ends = np.flatnonzero(np.isin(ids[begin:], list(self.stops)))
            end = begin + (ends[0] + 1 if len(ends) else self.plan.answer_tokens)
            text = self.tokenizer.decode(ids[begin:end]).split(chat.TURN_END)[0]
            found.append({"problem": problems[row // self.plan.answers], "text": text,
                          "ids": ids[:end], "mask": np.arange(end) >= begin,
                          "logps": logp[begin:end], "entropy": entropy[begin:end]})
        return found

    def logps(self, adapters, answers):
        """The trainer's log-probabilities of the trained tokens of each answer: a list of arrays."""
        found = []
        for answer in answers:
            (rows, _), = rl.pack([(answer["ids"], answer["mask"])], [1.0])
            losses, trained, _ = map(np.asarray, self.losses(adapters, self.frozen, rows))
            found.append(-losses[0][trained[0] > 0])
        return found

    def evaluate(self, adapters, seed):
        """{greedy, drawn}: passes per held-out problem by our judge, a digit each, in order of name.

        One answer is greedy, seven are drawn at `plan.heat`.
        """
        plan, passed = self.plan, []
        padded = self.held_out + self.held_out[:-len(self.held_out) % plan.prompts]
        for again in range(8 // plan.answers):
            heat = np.full(plan.answers * plan.prompts, plan.heat, np.float32)
            heat[::plan.answers] = plan.heat if again else 0.01
            answers = []
            for at in range(0, len(padded), plan.prompts):
                key = jax.random.fold_in(jax.random.key(seed), 10_000 + 1_000 * again + at)
                answers += self.sample(adapters, padded[at:at + plan.prompts], key, heat)
            verdicts = self.judge([(answer["problem"], answer["text"]) for answer in answers])
            passed.append(np.array([v["verilog"] for v in verdicts], int).reshape(-1, plan.answers))
        passed = np.concatenate(passed, axis=1)[:len(self.held_out)]
        return {"greedy": "".join(map(str, passed[:, 0])),
                "drawn": "".join(map(str, passed[:, 1:].sum(1)))}

    @functools.cached_property
    def examples(self):
        """[(ids, mask)] of the chats that the start was tuned on."""
        chats = unchecked_chats(Start(**self.about["rows"]))
        rendered = chat.render_chats(self.tokenizer, chats[:1_500])
        return [(ids, mask) for ids, mask in rendered if len(ids) <= rl.ROW]

    def shown(self, seed, step):
        """Some of them for a step of SFT: [(ids, mask)]."""
        draw = np.random.default_rng((seed, step))
        chosen = draw.choice(len(self.examples), self.plan.examples, replace=False)
        return [self.examples[number] for number in chosen]

    def nats(self, adapters, answers):
        """The trainer's negative log-probability of all answers together."""
        each = rl.pack([(answer["ids"], answer["mask"]) for answer in answers], [1.0] * len(answers))
        return sum(float(self.loss(adapters, self.frozen, *part)) for part in each)


def asked_in(bench, seed, step):
    """The problems of a step; arms of one seed ask the same ones."""
    order = np.random.default_rng(seed).permutation(len(bench.problems))
    first = (step - 1) * bench.plan.prompts
    places = np.arange(first, first + bench.plan.prompts) % len(order)
    return [bench.problems[place] for place in order[places]]


def factors_of(bench, arm, rewards, sampled, adapters):
    """What each answer's loss is multiplied by: [answers]. `rewards` is [P, answers]."""
    if arm.loss == "advantage":
        return rl.advantages(rewards).ravel()
    if arm.loss == "dpo":
        now = np.array([logps.sum() for logps in bench.logps(adapters, sampled)])
        then = np.array([answer["logps"].sum() for answer in sampled])  # of the start, as sampled
        shape = rewards.shape
        return rl.dpo_factors(rewards, now.reshape(shape), then.reshape(shape),
                              bench.plan.beta).ravel()
    return rewards.ravel()


def steps_of(plan: Plan, name: str) -> int:
    """How many steps an arm takes."""
    return plan.steps if ARMS[name].rate_falls else plan.judged_steps


def one_step(bench, name, seed, step, adapters, moments):
    """(adapters, moments, what a row of data/rl says of it) after a step of an arm."""
    arm, plan, begun, row = ARMS[name], bench.plan, time.perf_counter(), {}
    if arm.author == "data":
        answers = bench.shown(seed, step)
        factors = np.ones(len(answers))
    else:
        author = bench.start if arm.author == "start" else adapters
        key = jax.random.fold_in(jax.random.key(seed), step)
        sampled = bench.sample(author, asked_in(bench, seed, step), key)
        verdicts = pd.DataFrame(bench.judge([(a["problem"], a["text"]) for a in sampled]))
        rewards = verdicts[arm.reward].to_numpy(float).reshape(plan.prompts, plan.answers)
        factors = factors_of(bench, arm, rewards, sampled, adapters)
        answers = [(answer["ids"], answer["mask"]) for answer in sampled]
        some = sampled[::plan.answers]  # one to each prompt
        row = {"reward": rewards.mean(), **verdicts.mean().to_dict(),
               "tokens": np.mean([len(answer["logps"]) for answer in sampled]),
               "entropy": np.concatenate([answer["entropy"] for answer in sampled]).mean(),
               "kl": (bench.nats(bench.start, some)
                      + sum(float(answer["logps"].sum()) for answer in some)) / len(some)}
    highest = plan.sft_rate if arm.loss == "plain" else plan.rate
    rate = highest * min(1.0, step / 3)
    if arm.rate_falls:
        rate *= 1 - (step - 1) / plan.steps
    adapters, moments = bench.learner.step(
        adapters, moments, bench.frozen, answers, factors, rate)
    return adapters, moments, row | {
        "trained": np.mean(np.abs(factors) > 1e-6), "seconds": time.perf_counter() - begun}


def run(bench, name, seed):
    """Run an arm to its end; returns (adapters, its rows)."""
    plan, rows, adapters = bench.plan, [], bench.start
    last_step = steps_of(plan, name)
    moments = bench.learner.optimizer.init(adapters)
    for step in range(last_step + 1):
        row = {"arm": name, "seed": seed, "step": step}
        if step:
            adapters, moments, more = one_step(bench, name, seed, step, adapters, moments)
            row |= more
        if step == last_step or not step and name == "reinforce":
            row |= bench.evaluate(adapters, seed)
        rows.append({key: value if isinstance(value, (str, int)) else round(float(value), 6)
                     for key, value in row.items()})
        print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return adapters, rows


def wanted() -> Iterator[tuple[str, int]]:
    """(arm, seed) of every stored run, a seed of all arms before the next seed."""
    for seed in SEEDS:
        for arm in ARMS:
            yield arm, seed


def digits(text: str) -> np.ndarray:
    """A stored string of digits as an array of numbers, [problems]."""
    return np.array([int(digit) for digit in text])


def stored():
    """All stored rows: one a step of a run."""
    return runs.stored(STORED, greedy=str, drawn=str)


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
        rows = run(bench_of(ARMS[arm].start), arm, seed)[1]
        return pd.DataFrame(rows).to_csv(index=False)

    files = {STORED / f"{arm}-{seed}.csv": (arm, seed) for arm, seed in wanted()}
    runs.fill(files, make_run)


if __name__ == "__main__":
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    train.keep_compilations()
    make_missing()
