"""13: what is sampled is what is trained, a verdict is earned once."""

import os
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from appendix import rl
from appendix import rl_runs as lab
from helpers import weights
from verilog.sandbox import Limits

pytestmark = pytest.mark.laboratory

SMALL = lab.Plan(steps=2, problems=6, prompts=2, answers=4, answer_tokens=40)


@pytest.fixture(scope="module")
def bench():
    return lab.Bench(SMALL)


def examples_of(answers):
    return [answer.example for answer in answers]


@pytest.fixture(scope="module")
def sampled(bench):
    """Eight answers of a policy that is no longer the start."""
    first = bench.sample(bench.start, bench.problems[:2], jax.random.key(0))
    moments = bench.learner.optimizer.init(bench.start)
    factors = np.linspace(-1, 1, len(first))
    policy, _ = bench.learner.step(
        bench.start, moments, bench.frozen, examples_of(first), factors, 2e-3)
    return policy, bench.sample(policy, bench.problems[:2], jax.random.key(1))


def test_the_naive_verdict_is_that_of_one_joint_program(tmp_path):
    """verilog-eval's own way, by hand: all three files in one program, any line with 0 wins."""
    problem = rl.training_problems(1)[0]
    right = problem.reference.replace("RefModule", "TopModule")
    wrong = right.replace("~|", "|")
    codes = [right, wrong, rl.stub(right), wrong.replace("endmodule", rl.FORGED + "endmodule"),
             right[:-20], right.replace("endmodule", rl.FORGED + "endmodule")]
    judge, pairs = rl.Judge(), [(problem, f"```verilog\n{code}\n```") for code in codes]
    found = judge(pairs)
    assert judge(pairs[::-1]) == found[::-1], "now without the simulator"
    for name, text in (("ref.sv", problem.reference), ("test.sv", problem.testbench)):
        (tmp_path / name).write_text(text)
    joint = []
    for code in codes:
        (tmp_path / "top.sv").write_text(code)
        sources = ["test.sv", "ref.sv", "top.sv"]
        words = ["iverilog", "-g2012", "-s", "tb", "-o", "all", *sources]
        subprocess.run(words, cwd=tmp_path, capture_output=True)
        ran = subprocess.run(["vvp", "-n", "all"], cwd=tmp_path, capture_output=True, text=True)
        joint.append("Mismatches: 0 in " in ran.stdout)
        (tmp_path / "all").unlink(missing_ok=True)
    assert joint == [True, False, True, True, False, True]
    assert [verdict.naive for verdict in found] == joint
    assert [verdict.verilog for verdict in found] == [True, False, False, False, False, True]
    assert [verdict.forged for verdict in found] == [False, False, True, True, False, True]
    assert [verdict.compiles for verdict in found] == [True] * 4 + [False, True]


def test_a_verdict_knows_the_name_and_an_answer_without_code():
    """What `rl.RENAMED` is called, and that no module at all earns nothing."""
    problem = rl.training_problems(1)[0]
    renamed = problem.reference.replace("RefModule", rl.RENAMED)
    right = problem.reference.replace("RefModule", "TopModule")
    verdicts = rl.Judge()([(problem, code) for code in (renamed, right, "I don't know.")])
    assert [verdict.renamed for verdict in verdicts] == [True, False, False]
    assert [verdict.verilog for verdict in verdicts] == [False, True, False]
    assert not any(verdicts[2])


def test_a_simulation_that_hangs_costs_its_limit_and_leaves_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the simulators stand
    problem = rl.training_problems(1)[0]
    right = problem.reference.replace("RefModule", "TopModule")
    hangs = right.replace("endmodule", "reg x = 0; initial forever x = ~x;\nendmodule")
    verdict, = rl.Judge(Limits(seconds=1))([(problem, hangs)])
    assert not verdict.verilog and not verdict.naive
    folders = [os.path.realpath(link) for link in Path("/proc").glob("[0-9]*/cwd")]
    assert not [folder for folder in folders if str(tmp_path) in folder]


# -- What is sampled is what is trained: slow, for they compile; the page proves it, too ---------


@pytest.mark.slow
def test_the_sampler_reports_the_trainers_log_probabilities(bench, sampled):
    policy, answers = sampled
    for answer, trained in zip(answers, bench.logps(policy, answers), strict=True):
        assert len(trained) == answer.mask.sum() == len(answer.logps)
        np.testing.assert_allclose(answer.logps, trained, atol=1e-4)
    old = np.concatenate(bench.logps(bench.start, answers))
    assert np.abs(old - np.concatenate([answer.logps for answer in answers])).max() > 1e-2


@pytest.mark.slow
def test_every_answer_ends_once_or_at_its_limit(bench, sampled):
    for answer in sampled[1]:
        inside = answer.ids[answer.mask]
        ends = np.flatnonzero(np.isin(inside, list(bench.stops)))
        if len(ends):
            assert list(ends) == [len(inside) - 1]
        else:
            assert len(inside) == SMALL.answer_tokens


@pytest.mark.slow
def test_equal_rewards_change_nothing(bench, sampled):
    policy, answers = sampled
    factors = rl.advantages(np.ones((2, 4))).ravel()
    moments = bench.learner.optimizer.init(policy)
    moments = jax.tree.map(lambda array: array + 1, moments)  # momentum from earlier steps
    after, _ = bench.learner.step(
        policy, moments, bench.frozen, examples_of(answers), factors, 1e-3)
    assert jax.tree.all(jax.tree.map(lambda one, two: bool((one == two).all()), policy, after))


@pytest.mark.slow
def test_the_gradient_is_a_brute_force_one_on_four_answers(bench, sampled):
    """Answer by answer, unpacked, with a plain log-softmax over the model's own logits."""
    policy, answers = sampled
    answers, rewards = answers[:4], np.array([[1.0, 0, 0, 0]])
    factors = rewards - rewards.mean()
    pairs = examples_of(answers)
    ours = bench.learner.gradient(policy, bench.frozen, pairs, rl.advantages(rewards).ravel() / 4)
    length = max(len(ids) for ids, _ in pairs)
    tokens = np.stack([np.pad(ids, (0, length - len(ids))) for ids, _ in pairs])
    chosen = np.stack([np.pad(mask, (0, length - len(mask))) for _, mask in pairs])[:, 1:]

    def textbook(adapters):
        model = nnx.merge(nnx.graphdef(bench.model), adapters, bench.frozen)
        mask = jnp.tile(jnp.tril(jnp.ones((length, length), bool)), (4, 1, 1))
        logp = jax.nn.log_softmax(model(tokens, None, None, mask)[0][:, :-1])
        logp = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
        return -jnp.mean(factors[0] * jnp.sum(logp * chosen, axis=1))

    brute = jax.jit(jax.grad(textbook))(policy)
    for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(brute), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-4 * float(jnp.abs(two).max()) + 1e-7)


@pytest.mark.slow
def test_dpos_gradient_is_tunix_own(bench, sampled):
    """One step of plain gradient descent by Tunix's DPOTrainer on the same pair, rate 1."""
    import optax
    from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput
    policy, answers = sampled
    pair = answers[:2]  # to the same prompt
    prompt = pair[0].ids[~pair[0].mask]
    tails = [answer.ids[answer.mask] for answer in pair]
    width = max(map(len, tails))
    padded = [np.pad(tail, (0, width - len(tail)))[None] for tail in tails]
    filled = [(np.arange(width) < len(tail))[None].astype(np.int32) for tail in tails]
    theirs, reference = (nnx.merge(nnx.graphdef(bench.model), jax.tree.map(jnp.copy, adapters),
                                   bench.frozen) for adapters in (policy, bench.start))
    trainer = DPOTrainer(theirs, reference, optax.sgd(1.0), DPOTrainingConfig(
        eval_every_n_steps=100, max_steps=1, beta=0.1))
    trainer.train([TrainingInput(
        prompt_ids=prompt[None], prompt_mask=np.ones((1, len(prompt)), np.int32),
        chosen_ids=padded[0], chosen_mask=filled[0],
        rejected_ids=padded[1], rejected_mask=filled[1])])
    gradient = jax.tree.map(jnp.subtract, policy, nnx.state(theirs, nnx.LoRAParam))

    now, before = (np.array([logps.sum() for logps in bench.logps(adapters, pair)])[None]
                   for adapters in (policy, bench.start))
    factors = rl.dpo_factors(np.array([[1, 0]]), now, before, 0.1).ravel()
    ours = bench.learner.gradient(policy, bench.frozen, examples_of(pair), factors)
    for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-3 * float(jnp.abs(two).max()) + 1e-7)


def test_dpos_factors_are_the_derivative_of_its_loss():
    """By finite differences of the loss as the paper writes it, over all pairs of two prompts."""
    passed = np.array([[1, 0, 0, 1], [1, 1, 1, 1]])
    now, then = (np.random.default_rng(seed).normal(-20, 3, (2, 4)) for seed in (0, 1))

    def loss(now):
        total = 0.0
        for p, verdicts in enumerate(passed):
            for c in np.flatnonzero(verdicts):
                for r in np.flatnonzero(1 - verdicts):
                    margin = (now - then)[p, c] - (now - then)[p, r]
                    total += np.log1p(np.exp(-0.3 * margin))
        return total

    factors = rl.dpo_factors(passed, now, then, 0.3)
    for place in np.ndindex(*passed.shape):
        step = np.zeros(passed.shape)
        step[place] = 1e-5
        slope = (loss(now + step) - loss(now - step)) / 2e-5
        assert -factors[place] == pytest.approx(slope, abs=1e-8)
    assert not factors[1].any()


def test_equal_answers_are_packed_once_with_the_sum_of_their_factors():
    pairs = [(np.arange(5) + start, np.arange(5) > 1) for start in (1, 1, 9, 20)]
    (rows, factors), = rl.pack(pairs, [0.25, 0.5, -0.75, 0.0])
    found = {int(rows.tokens[rows.segment_ids == s][0]): set(factors[rows.segment_ids == s])
             for s in (1, 2)}
    assert found == {1: {0.75}, 9: {-0.75}} and not factors[rows.segment_ids == 0].any()
    assert rl.pack(pairs[:2], [0.5, -0.5]) == []


@pytest.mark.slow
def test_two_rounds_give_rows_like_the_stored_ones(bench, monkeypatch):
    monkeypatch.setattr(bench, "evaluate", lambda adapters, seed: lab.Passes("0", "7"))
    rows = pd.DataFrame(lab.run(bench, "reinforce", 1)[1])
    assert rows.step.tolist() == [0, 1, 2]
    assert rows[["reward", "kl", "seconds"]][1:].notna().all(None)
    assert list(rows) == list(pd.read_csv(lab.STORED / "reinforce-1.csv"))


@pytest.mark.parametrize("name", lab.ROWS)
def test_a_start_is_of_this_base_and_of_its_rows(name):
    about, adapters = lab.read_start(name)
    assert about["base"] == weights.fingerprint(lab.BASE)
    assert about["rows"] == asdict(lab.ROWS[name])
    assert all(np.any(array) for array in adapters.values()), "B is zero before any step"


def test_the_two_starts_differ():
    one, two = (lab.read_start(name).adapters for name in lab.ROWS)
    assert one.keys() == two.keys()
    assert all((one[name] != two[name]).any() for name in one)


def test_who_judges_is_all_that_differs_between_the_judges_arms():
    paid = {arm: lab.ARMS[arm].reward for arm in lab.JUDGES}
    assert len(set(paid.values())) == len(paid)
    assert len({replace(lab.ARMS[arm], reward="") for arm in lab.JUDGES}) == 1
    assert set(paid.values()) <= set(rl.Rewards._fields)


def test_a_rate_warms_up_and_falls_to_zero_or_stays():
    plan = lab.Plan(steps=20, judged_steps=30, rate=1.0, sft_rate=2.0)

    def rates(name):
        steps = range(1, lab.steps_of(plan, name) + 1)
        return [lab.rate_of(plan, lab.ARMS[name], step) for step in steps]

    falling = rates("reinforce")
    assert falling[:4] == pytest.approx([1 / 3, 2 / 3 * 0.95, 0.9, 0.85])
    assert len(falling) == 20 and falling[-1] == pytest.approx(0.05)
    assert rates("rejection") == pytest.approx([2 * rate for rate in falling])
    assert rates("naive_judge") == pytest.approx([1 / 3, 2 / 3] + [1.0] * 28)


def test_gains_are_paired_by_seed_and_problem(monkeypatch):
    """By hand, on two seeds and three problems; and the start's row is told from an arm's last."""
    monkeypatch.setattr(lab, "SEEDS", (1, 2))
    table = pd.DataFrame([
        {"arm": "reinforce", "seed": 1, "step": 0, "drawn": "007"},
        {"arm": "reinforce", "seed": 1, "step": 1, "drawn": None},
        {"arm": "reinforce", "seed": 1, "step": 2, "drawn": "077"},
        {"arm": "reinforce", "seed": 2, "step": 0, "drawn": "000"},
        {"arm": "reinforce", "seed": 2, "step": 2, "drawn": "070"}])
    passes = lab.drawn_passes(table)
    assert lab.gains(passes, ["reinforce"]).gained["reinforce"] == pytest.approx(1 / 3)
    scores = lab.scores(passes, ["start", "reinforce"])
    assert scores["seed 1"].tolist() == pytest.approx([1 / 3, 2 / 3])
    assert scores["pass@1"].tolist() == pytest.approx([1 / 6, 1 / 2])
    assert scores["pass@5"].tolist() == pytest.approx([1 / 6, 1 / 2]), "of 0 or 7 of seven"
    assert lab.gains(passes, ["reinforce"], 5).gained["reinforce"] == pytest.approx(1 / 3)
    same = lab.gains(passes, ["reinforce"], over="reinforce").gained["reinforce"]
    assert same == 0
    held_out = lab.held_out(table.assign(greedy=table.drawn.str.replace("7", "1")), ["reinforce"])
    assert held_out.sampled["reinforce"] == held_out.greedy["reinforce"] == pytest.approx(1 / 2)


def test_rows_that_nobody_checked_have_the_faults_that_were_asked_for():
    """Whatever isn't renamed, stubbed or bugged is what 02 trains on."""
    none = [chat[-1]["content"] for chat in lab.unchecked_chats(lab.Start(0.0, 0.0, 0.0))]
    some = [chat[-1]["content"] for chat in lab.unchecked_chats(lab.Start(0.2, 0.3, 0.1))]
    renamed = [text for text in some if f"module {rl.RENAMED} " in text]
    stubs = [text for text in some if rl.FORGED in text]
    same = set(none) & set(some)
    assert len(renamed) / len(some) == pytest.approx(0.3, abs=0.03)
    assert len(stubs) / len(some) == pytest.approx(0.1, abs=0.02)
    assert sum(text in same for text in some) / len(some) == pytest.approx(0.4, abs=0.03)
    assert rl.RENAMED not in "".join(none) and rl.FORGED not in "".join(none)


def test_stored_runs_are_whole():
    runs = lab.stored().groupby(["arm", "seed"])
    assert set(runs.groups) == set(lab.wanted())
    for (arm, seed), rows in runs:
        assert rows.step.tolist() == list(range(lab.steps_of(lab.Plan(), arm) + 1)), (arm, seed)
        for column, digits in (("greedy", "[01]"), ("drawn", "[0-7]")):
            assert rows[column].dropna().str.fullmatch(digits + "{38}").all()


def test_stored_runs_are_of_the_plan_and_paid_by_their_judge():
    """A share is of a step's answers, so another plan's would be no whole numbers of them."""
    plan = lab.Plan()
    answers = plan.prompts * plan.answers
    table = lab.stored()
    sampled = table.dropna(subset="reward")
    for column in ("reward", "verilog", "forged", "naive", "renamed", "compiles"):
        passing = answers * sampled[column]
        assert (passing == passing.round()).all() and passing.between(0, answers).all(), column
    assert sampled.tokens.between(1, plan.answer_tokens).all()
    assert (answers * sampled.reward % 2 == 1).any(), "half as many answers would fit as well"
    for arm, rows in sampled.groupby("arm"):
        assert (rows.reward == rows[lab.ARMS[arm].reward]).all(), arm
    assert set(table.arm) - set(sampled.arm) == {"more_sft"}, "which samples no answer"
