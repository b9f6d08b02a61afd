"""REINFORCE for the tiny Gemma 4, with a simulator's verdict as reward: 13's step, sampler and runs.

    python -m appendix.rl             adds the runs that data/rl/ lacks, and prints the plan first
    python -m appendix.rl ARM SEED    one of them
    python -m appendix.rl --missing   only says which are missing

A run is a policy (adapters) that answers prompts, a judge that rewards the answers, and a step. It
is saved after every step: killed anywhere, it goes on, and stores the same rows. Letters in shape
comments: P prompts, B answers or rows, T tokens, K trained positions of a row.
"""

import functools
import hashlib
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

import verilog
from appendix import pretrain
from helpers import chat, data, gemma, packing, train, weights
from helpers.run import UserError, run_dir, write_text
from verilog.judging import analyse
from verilog.problems import Problem
from verilog.sandbox import Limits

BASE, STORED = "assets/tiny_gemma4", Path("data/rl")
START = STORED / "start.safetensors"  # 03's adapters at the end of a tiny run
ROW = 512  # tokens of a packed row
FORGED = '  initial $display("Mismatches: 0 in 400 samples");\n'


@dataclass(frozen=True)
class Plan:
    """How much of everything; the stored runs are of the defaults."""

    steps: int = 20
    prompts: int = 8          # of a step
    answers: int = 8          # to each
    answer_tokens: int = 100  # at most; the longest reference has 95
    rate: float = 1e-3        # of Adam, after a warm-up of three steps
    seeding_steps: int = 10   # of SFT that show the exploit
    seeding_share: float = 0.1
    drawn: int = 7            # answers to a held-out problem at `heat`, beside a greedy one
    heat: float = 0.8


@dataclass(frozen=True)
class Arm:
    """What differs between two runs."""

    reward: str = "verilog"    # or "naive", "compiles"
    answers_of: str = "policy" # or "start" (rejection sampling), "data" (SFT)
    baseline: bool = True      # take the group's mean off the reward
    start: str = "start"       # or "seeded"


ARMS = {
    "reinforce": Arm(),
    "rejection": Arm(answers_of="start", baseline=False),
    "more_sft": Arm(answers_of="data", baseline=False),
    "seeded": Arm(answers_of="data", baseline=False),  # the start of the three below
    "naive_judge": Arm("naive", start="seeded"),
    "our_judge": Arm("verilog", start="seeded"),
    "compiles": Arm("compiles", start="seeded"),
}
COMPARED = ("reinforce", "rejection", "more_sft")  # on the held-out problems
SEEDS = {"reinforce": (1, 2, 3), "rejection": (1, 2, 3), "more_sft": (1, 2, 3), "seeded": (1, 2),
         "naive_judge": (1, 2), "our_judge": (1, 2), "compiles": (1, 2)}


# ── Problems ──


def training_problems(count):
    """`count` problems with testbenches, none of them of the evaluation: always the same ones."""
    sys.path.insert(0, "data/generate")
    import make
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
    """What became of answers, each text judged once, also by later runs: they share a file.

    A verdict is {"verilog": passes, "naive": passes the naive judge, "compiles": ..., "forged": it
    prints a line of the testbench's itself}. The naive judge is verilog-eval's analyser over all
    that is printed, by the testbench and by the answer.
    """

    def __init__(self, path, limits=Limits(seconds=2), workers=2):
        self.path, self.limits, self.workers, self.known = Path(path), limits, workers, {}
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in lines:
            if line.endswith("}}"):  # a killed run may have left half a line
                self.known |= json.loads(line)

    def __call__(self, pairs):
        """Verdicts of (problem, text of the answer) pairs, in their order."""
        codes = [(problem, verilog.extract_code(text)[0]) for problem, text in pairs]
        keys = [hashlib.sha256(f"{problem.name}\n{problem.testbench}\n{code}".encode()).hexdigest()[
            :24] for problem, code in codes]
        new = {key: pair for key, pair in zip(keys, codes) if key not in self.known}
        verdicts = verilog.judge_many(list(new.values()), self.limits, self.workers)
        found = {key: what_of(verdict) for key, verdict in zip(new, verdicts)}
        if found:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("\n" + "\n".join(json.dumps({k: v}) for k, v in found.items()))
        self.known |= found
        return [self.known[key] for key in keys]


def what_of(verdict):
    """One verdict as the rewards that can be made of it."""
    forged = "Mismatches: " in verdict.printed
    return {"verilog": verdict.passed, "forged": forged,
            "naive": verdict.passed or analyse(verdict.log + verdict.printed)[0] == "pass",
            "compiles": verdict.category in ("pass", "mismatch", "timeout", "runtime")}


# ── The step ──


def advantages(rewards):
    """Rewards [P, answers] minus their group's mean: better or worse than one's other tries?"""
    return rewards - rewards.mean(axis=1, keepdims=True)


def pack(answers, factors, seed=0):
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
    arrays, places = packing.pack_arrays(ids, masks, ROW, seed), packing.fill_rows(
        list(map(len, ids)), ROW, seed)
    tables = [[0.0, *(factors[place] for place in row)] for row in places]
    each = [np.array(table, np.float32)[ids] for table, ids in zip(tables, arrays["segment_ids"])]
    empty = -len(each) % 4
    arrays = {name: np.pad(array, ((0, empty), (0, 0))) for name, array in arrays.items()}
    each = np.pad(np.array(each, np.float32).reshape(-1, ROW), ((0, empty), (0, 0)))
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

    def __init__(self, model, rate):
        self.optimizer = train.make_optimizer(lambda step: rate * jnp.minimum(1, (step + 1) / 3),
                                              0.0, 1.0)
        self.gradient = jax.jit(jax.grad(make_loss(model)))
        self.apply = jax.jit(self._apply)

    def _apply(self, adapters, moments, gradient, count):
        gradient = jax.tree.map(lambda array: array / count, gradient)
        updates, moments = self.optimizer.update(gradient, moments, adapters)
        return jax.tree.map(jnp.add, adapters, updates), moments

    def step(self, adapters, moments, frozen, answers, factors):
        """(adapters, moments) after a step; the same ones where no answer was better than another."""
        parts = pack(answers, factors)
        if not parts:
            return adapters, moments
        each = (self.gradient(adapters, frozen, *part) for part in parts)
        total = functools.reduce(lambda one, two: jax.tree.map(jnp.add, one, two), each)
        return self.apply(adapters, moments, total, len(answers))


# ── Runs ──


class Bench:
    """The model, its start, problems, sampler, learner and judge: all that the runs share."""

    def __init__(self, folder, plan=Plan(), problems=None):
        self.plan, self.folder = plan, Path(folder)
        config = gemma.config_from_hf(BASE, dtype="float32", use_sliding_window_kv_cache=True)
        mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
        plain = gemma.load_base(BASE, config, mesh)
        gemma.use_block_attention(plain, 128)
        with safe_open(START, "np") as file:
            self.about = {key: json.loads(text) for key, text in file.metadata().items()}
            start = {name: file.get_tensor(name) for name in file.keys()}
        if self.about["base"] != weights.fingerprint(BASE):
            raise UserError(f"{START} belongs to another base. Run 02 and 03, then "
                            "appendix.rl.store_start on 03's checkpoints.")
        self.scale = self.about["alpha"] / self.about["rank"]
        self.model = gemma.inject_lora(plain, self.about["rank"], self.about["alpha"], mesh)
        for path, pair in gemma.adapted_modules(self.model).items():
            for side in "ab":
                pair[side].set_value(jnp.asarray(start[f"{path}.{side}"], jnp.float32))
        _, self.start, self.frozen = nnx.split(self.model, nnx.LoRAParam, ...)
        self.learner, self.tokenizer = Learner(self.model, plan.rate), chat.load_tokenizer(BASE)
        self.stops = {self.tokenizer.eos_token_id, chat.special_ids(self.tokenizer)[chat.TURN_END]}
        self.problems = problems or training_problems(plan.steps * plan.prompts)
        self.held_out = verilog.load_problems("data/tiny_eval")
        every = [*self.problems, *self.held_out]
        rendered = chat.render_prompts(self.tokenizer, [self.asked(p.prompt) for p in every])
        self.prompts = {problem.name: ids for problem, ids in zip(every, rendered)}
        self.width = -(-(max(map(len, rendered)) + plan.answer_tokens) // 8) * 8
        self.sampler = make_sampler(plain, min(map(len, rendered)) - 1, plan.answers, self.stops)
        self.merge = jax.jit(functools.partial(merged, scale=self.scale))
        self.loss = jax.jit(make_loss(self.model))
        self.losses = jax.jit(lambda adapters, frozen, rows: train.token_losses(
            nnx.merge(nnx.graphdef(self.model), adapters, frozen), rows, ROW - 1))
        self.judge = Judge(self.folder / "verdicts.jsonl")

    def asked(self, prompt):
        """The chat of a request, as 02 trained it."""
        return [{"role": "system", "content": self.about["system"]},
                {"role": "user", "content": prompt.strip()}]

    def sample(self, adapters, problems, key, heat=None):
        """Answers to `plan.prompts` problems: [{problem, ids, mask, text, logps, entropy}], in order."""
        prompts = [self.prompts[problem.name] for problem in problems]
        table = np.zeros((len(prompts), self.width), np.int32)
        for row, ids in zip(table, prompts):
            row[:len(ids)] = ids
        heat = np.ones(len(prompts) * self.plan.answers, np.float32) if heat is None else heat
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
            (rows, _), = pack([(answer["ids"], answer["mask"])], [1.0])
            losses, trained, at = self.losses(adapters, self.frozen, rows)
            order = np.argsort(np.asarray(at[0])[np.asarray(trained[0]) > 0])
            found.append(-np.asarray(losses[0])[np.asarray(trained[0]) > 0][order])
        return found

    def evaluate(self, adapters, seed):
        """{greedy, drawn}: passes per held-out problem by our judge, a digit each, in order of name."""
        plan, answers = self.plan, []
        heat = np.tile([0.01] + [plan.heat] * (plan.answers - 1), plan.prompts).astype(np.float32)
        padded = self.held_out + self.held_out[:-len(self.held_out) % plan.prompts]
        for at in range(0, len(padded), plan.prompts):
            key = jax.random.fold_in(jax.random.key(seed), 10_000 + at)
            answers += self.sample(adapters, padded[at:at + plan.prompts], key, heat)
        passed = np.array([verdict["verilog"] for verdict in self.judge(
            [(answer["problem"], answer["text"]) for answer in answers])], int)
        passed = passed.reshape(-1, plan.answers)[:len(self.held_out)]
        return {"greedy": "".join(map(str, passed[:, 0])),
                "drawn": "".join(map(str, passed[:, 1:].sum(1)))}

    @functools.cached_property
    def examples(self):
        """Chats of 02's training rows, with their own answers."""
        cleaned = [data.clean(row) for row in data.read_rows("data/tiny")[:1_500]]
        return [data.as_messages(example, self.about["system"]) for example, bad in cleaned if not bad]

    def shown(self, seed, step, forged):
        """32 of them for a step of SFT, a share `forged` of their answers the exploit: [(ids, mask)]."""
        draw = np.random.default_rng((seed, step))
        chats = [self.examples[i] for i in draw.choice(len(self.examples), 32, replace=False)]
        chats = [[*messages[:-1], {**last, "content": stub(last["content"])}]
                 if draw.random() < forged else messages
                 for messages in chats for last in messages[-1:]]
        rendered = chat.render_chats(self.tokenizer, chats)
        return [(ids, mask) for ids, mask in rendered if len(ids) <= ROW]

    def nats(self, adapters, answers):
        """The trainer's negative log-probability of all answers together."""
        each = pack([(answer["ids"], answer["mask"]) for answer in answers], [1.0] * len(answers))
        return sum(float(self.loss(adapters, self.frozen, *part)) for part in each)


def one_step(bench, name, seed, step, adapters, moments):
    """(adapters, moments, the row of data/rl) after a step of an arm."""
    arm, plan, begun = ARMS[name], bench.plan, time.perf_counter()
    row = {"arm": name, "seed": seed, "step": step}
    if arm.answers_of == "data":
        answers = bench.shown(seed, step, plan.seeding_share * (name == "seeded"))
        factors = np.ones(len(answers))
    else:
        order = np.random.default_rng(seed).permutation(len(bench.problems))
        problems = [bench.problems[i] for i in order[(step - 1) * plan.prompts:][:plan.prompts]]
        key = jax.random.fold_in(jax.random.key(seed), step)
        sampled = bench.sample(bench.start if arm.answers_of == "start" else adapters, problems, key)
        verdicts = pd.DataFrame(bench.judge([(a["problem"], a["text"]) for a in sampled]))
        rewards = verdicts[arm.reward].to_numpy(float).reshape(plan.prompts, plan.answers)
        factors = (advantages(rewards) if arm.baseline else rewards).ravel()
        answers = [(answer["ids"], answer["mask"]) for answer in sampled]
        some = sampled[::plan.answers]  # one to each prompt
        row |= {"reward": rewards.mean(), **verdicts.mean().to_dict(),
                "tokens": np.mean([len(answer["logps"]) for answer in sampled]),
                "entropy": np.concatenate([answer["entropy"] for answer in sampled]).mean(),
                "kl": (bench.nats(bench.start, some)
                       + sum(float(answer["logps"].sum()) for answer in some)) / len(some)}
    adapters, moments = bench.learner.step(adapters, moments, bench.frozen, answers, factors)
    return adapters, moments, row | {
        "trained": np.mean(np.abs(factors) > 1e-6), "seconds": time.perf_counter() - begun}


def run(bench, name, seed, steps=None):
    """Run an arm to its end, from where it stood; returns (adapters, its rows)."""
    plan, path = bench.plan, bench.folder / f"{name}-{seed}.npz"
    steps = steps or (plan.seeding_steps if name == "seeded" else plan.steps)
    adapters = bench.start if ARMS[name].start == "start" else run(bench, "seeded", seed)[0]
    state = adapters, bench.learner.optimizer.init(adapters)
    state, rows = pretrain.load_state(path, state) or (state, [])
    while len(rows) <= steps:
        step, row = len(rows), {"arm": name, "seed": seed, "step": len(rows)}
        if step:
            *state, row = one_step(bench, name, seed, step, *state)
        if name in COMPARED and (step == steps or not step and name == "reinforce"):
            row |= bench.evaluate(state[0], seed)
        rows.append({key: value if isinstance(value, (str, int)) else round(float(value), 6)
                     for key, value in row.items()})
        pretrain.save_state(path, tuple(state), rows)
        print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return state[0], rows
