"""13's laboratory: the arms, the bench that they share, and their runs.

    python -m appendix.rl_runs     makes the runs that data/rl/ lacks
"""

import functools
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx
from safetensors import safe_open

import verilog
from appendix import rl, runs
from helpers import chat, data, gemma, train
from verilog.asking import messages_for

BASE, STORED = "assets/tiny_gemma4_clean", Path("data/rl")  # its corpus has no bugs
START = STORED / "start.safetensors"  # 03's adapters at the end of a tiny run


@dataclass(frozen=True)
class Plan:
    """How much of everything; the stored runs are of the defaults."""

    steps: int = 24
    problems: int = 300
    prompts: int = 8           # of a step
    answers: int = 4           # to each
    answer_tokens: int = 96    # at most; the longest reference has 95
    rate: float = 7e-4         # of Adam, after a warm-up of three steps
    sft_rate: float = 2e-3     # of the arms that train on other answers than the policy's
    examples: int = 16         # of a step of SFT
    seeding_steps: int = 45    # of SFT that show the exploit, the last 15 at a falling rate
    seeding_share: float = 0.2
    heat: float = 0.8          # of held-out problems' drawn answers; a policy is sampled at 1


# arm: (whose answers it trains on, what rewards them). Rejection sampling asks the start; only the
# policy's own answers have a baseline, the mean of their group.
ARMS = {"reinforce": ("policy", "verilog"), "rejection": ("start", "verilog"),
        "more_sft": ("data", ""), "seeded": ("data", ""), "naive_judge": ("policy", "naive"),
        "our_judge": ("policy", "verilog"), "compiles": ("policy", "compiles")}
COMPARED = ("reinforce", "rejection", "more_sft")  # on the held-out problems
HACKED = ("naive_judge", "our_judge", "compiles")  # these start where `seeded` ends
RUNS = [*itertools.product(COMPARED, (1, 2, 3)), *itertools.product(HACKED, (1, 2))]


class Bench:
    """The model, its start, problems, sampler, learner and judge: all that the runs share."""

    def __init__(self, plan=Plan()):
        self.plan = plan
        config = gemma.config_from_hf(BASE, dtype="float32", use_sliding_window_kv_cache=True)
        mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
        plain = gemma.load_base(BASE, config, mesh)
        gemma.use_block_attention(plain, 128)
        with safe_open(START, "np") as file:
            self.about = {key: json.loads(text) for key, text in file.metadata().items()}
            start = {name: file.get_tensor(name) for name in file.keys()}
        self.scale = self.about["alpha"] / self.about["rank"]
        self.model = gemma.inject_lora(plain, self.about["rank"], self.about["alpha"], mesh)
        for path, pair in gemma.adapted_modules(self.model).items():
            for side in "ab":
                pair[side].set_value(jnp.asarray(start[f"{path}.{side}"], jnp.float32))
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
        """Chats of 02's training rows, with their own answers."""
        cleaned = [data.clean(row) for row in data.read_rows("data/tiny")[:1_500]]
        return [data.as_messages(example, self.about["system"]) for example, bad in cleaned if not bad]

    def shown(self, seed, step, forged):
        """Some of them for a step of SFT, a share `forged` of their answers the exploit: [(ids, mask)]."""
        draw, chats = np.random.default_rng((seed, step)), []
        for number in draw.choice(len(self.examples), self.plan.examples, replace=False):
            *asked, answer = self.examples[number]
            if draw.random() < forged:
                answer = answer | {"content": rl.stub(answer["content"])}
            chats.append([*asked, answer])
        rendered = chat.render_chats(self.tokenizer, chats)
        return [(ids, mask) for ids, mask in rendered if len(ids) <= rl.ROW]

    def nats(self, adapters, answers):
        """The trainer's negative log-probability of all answers together."""
        each = rl.pack([(answer["ids"], answer["mask"]) for answer in answers], [1.0] * len(answers))
        return sum(float(self.loss(adapters, self.frozen, *part)) for part in each)


def one_step(bench, name, seed, step, adapters, moments):
    """(adapters, moments, what a row of data/rl says of it) after a step of an arm."""
    (author, reward), plan, begun, row = ARMS[name], bench.plan, time.perf_counter(), {}
    if author == "data":
        answers = bench.shown(seed, step, plan.seeding_share * (name == "seeded"))
        factors = np.ones(len(answers))
    else:
        order = np.random.default_rng(seed).permutation(len(bench.problems))
        problems = [bench.problems[i] for i in order[(step - 1) * plan.prompts:][:plan.prompts]]
        key = jax.random.fold_in(jax.random.key(seed), step)
        sampled = bench.sample(bench.start if author == "start" else adapters, problems, key)
        verdicts = pd.DataFrame(bench.judge([(a["problem"], a["text"]) for a in sampled]))
        rewards = verdicts[reward].to_numpy(float).reshape(plan.prompts, plan.answers)
        factors = (rl.advantages(rewards) if author == "policy" else rewards).ravel()
        answers = [(answer["ids"], answer["mask"]) for answer in sampled]
        some = sampled[::plan.answers]  # one to each prompt
        row = {"reward": rewards.mean(), **verdicts.mean().to_dict(),
               "tokens": np.mean([len(answer["logps"]) for answer in sampled]),
               "entropy": np.concatenate([answer["entropy"] for answer in sampled]).mean(),
               "kl": (bench.nats(bench.start, some)
                      + sum(float(answer["logps"].sum()) for answer in some)) / len(some)}
    rate = (plan.rate if author == "policy" else plan.sft_rate) * min(1.0, step / 3)
    if name == "seeded":
        rate *= min(1.0, (plan.seeding_steps + 1 - step) / 15)
    adapters, moments = bench.learner.step(
        adapters, moments, bench.frozen, answers, factors, rate)
    return adapters, moments, row | {
        "trained": np.mean(np.abs(factors) > 1e-6), "seconds": time.perf_counter() - begun}


@functools.cache
def seeded(bench, seed):
    """The start of the arms that are `HACKED`: it has been shown the exploit."""
    return run(bench, "seeded", seed)[0]


def run(bench, name, seed):
    """Run an arm to its end; returns (adapters, its rows)."""
    plan, rows = bench.plan, []
    steps = plan.seeding_steps if name == "seeded" else plan.steps
    adapters = seeded(bench, seed) if name in HACKED else bench.start
    moments = bench.learner.optimizer.init(adapters)
    for step in range(steps + 1):
        row = {"arm": name, "seed": seed, "step": step}
        if step:
            adapters, moments, more = one_step(bench, name, seed, step, adapters, moments)
            row |= more
        if name in COMPARED and (step == steps or not step and name == "reinforce"):
            row |= bench.evaluate(adapters, seed)
        rows.append({key: value if isinstance(value, (str, int)) else round(float(value), 6)
                     for key, value in row.items()})
        print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return adapters, rows


def stored():
    """All stored rows: one a step of a run."""
    return runs.stored(STORED, greedy=str, drawn=str)


if __name__ == "__main__":
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    train.keep_compilations()
    bench = functools.cache(Bench)
    runs.fill({STORED / f"{arm}-{seed}.csv": (arm, seed) for arm, seed in RUNS},
              lambda *which: pd.DataFrame(run(bench(), *which)[1]).to_csv(index=False))
