"""11_qlora: its stored runs and how they are scored."""

import conftest  # noqa: F401  (finds the repository)
import numpy as np
import pandas as pd
import pytest

from appendix import qlora_runs as lab
from helpers import stats


def table(model, variant, seed, passed, n=4):
    """Rows of answers.csv: one problem per number of passing answers."""
    return pd.DataFrame({"problem": [f"P{i}" for i in range(len(passed))], "plan": "drawn", "c": passed,
                         "n": n, "variant": variant, "seed": seed, "model": model})


def test_scores_average_seeds_first_and_compare_the_same_problems():
    answers = pd.concat([
        table("as trained", "bfloat16", 42, [4, 2, 0]), table("as trained", "bfloat16", 43, [4, 4, 0]),
        table("as trained", "int8", 42, [4, 3, 1]), table("as trained", "int8", 43, [4, 3, 0]),
        table("merged into bfloat16", "int8", 42, [0, 0, 0])])
    found = lab.scores(answers, "as trained")
    assert list(found.index) == ["bfloat16", "int8"]
    assert found.loc["bfloat16", "pass@1"] == pytest.approx((1 + 0.75 + 0) / 3)
    assert found.loc["int8", "against bfloat16"] == pytest.approx(0.125 / 3)
    assert found.loc["bfloat16", "against bfloat16"] == 0 and found.loc["bfloat16", "p"] == 1
    assert (found["seeds"] == 2).all()
    assert found.loc["int8", "lowest seed"] < found.loc["int8", "highest seed"]
    merged = lab.merge_scores(answers)
    assert merged.loc[("int8", "merged into bfloat16"), "pass@1"] == 0
    assert merged.loc[("int8", "as trained"), "pass@1"] > 0.5


def test_differences_are_of_the_same_seed_and_problem_and_show_both_spreads():
    pair = (("as trained", "nf4"), ("as trained", "bfloat16"), "drawn")
    answers = pd.concat([
        table("as trained", "bfloat16", 42, [4, 2, 0]), table("as trained", "bfloat16", 43, [4, 4, 0]),
        table("as trained", "bfloat16", 44, [0, 0, 0]),  # nf4 lacks this seed
        table("as trained", "nf4", 43, [4, 2, 0]), table("as trained", "nf4", 42, [4, 4, 1])])
    gaps = lab.gaps(answers, *pair)
    assert gaps.to_dict("list") == {42: [0, 0.5, 0.25], 43: [0, -0.5, 0]}
    found = lab.differences(answers, {"nf4": pair, "greedy": (*pair[:2], "greedy")})
    assert list(found.index) == ["nf4"]
    row = found.loc["nf4"]
    assert (row.seeds, row.differ) == (2, 1) and row.difference == pytest.approx(0.125 / 3)
    assert row["problems from"] == 0 and row["problems to"] == pytest.approx(0.125)
    half = 12.706 * 5 / 12 / 2  # t of one degree of freedom; the seeds are 1/4 and -1/6
    assert row["seeds to"] - row["seeds from"] == pytest.approx(2 * half, rel=1e-3)
    assert lab.differences(lab.stored("answers.csv").iloc[:0], {"nf4": pair}).empty


@pytest.mark.skipif(not len(lab.stored("runs.csv")), reason="no run is stored")
def test_what_11_says_of_nf4_in_the_stored_answers():
    """One seed shows ten points, three show nothing; greedy answers and merges settle nothing."""
    answers, whole = lab.stored("answers.csv"), ("as trained", "bfloat16")
    first = lab.gaps(answers, ("as trained", "nf4"), whole)[42]
    assert first.mean() < -0.1 and stats.sign_flip_p(first) == pytest.approx(0.002, abs=0.0005)
    pairs = {plan: (("as trained", "nf4"), whole, plan) for plan in ("drawn", "greedy")}
    pairs |= {f"merge, {plan}": (("merged into bfloat16", "nf4"), ("merged into dequantized", "nf4"),
                                 plan) for plan in pairs}
    found = lab.differences(answers, pairs)
    drawn, greedy = found.loc["drawn"], found.loc["greedy"]
    assert drawn["seeds from"] < -0.2 < drawn["problems from"] and drawn["seeds to"] > 0.15
    assert greedy.difference == pytest.approx(0.061, abs=0.001) and 0.05 < greedy.p < 0.1
    assert (found.p[["drawn", "merge, drawn", "merge, greedy"]] > 0.4).all()


def test_the_errors_of_storage():
    errors = lab.weight_errors([("int8", 0), ("nf4", 32), ("nf4", 16)])
    mean = errors.groupby("storage").error.mean()
    assert len(errors) == 3 * 36 and not errors.error.isna().any()
    assert mean["int8"] < 0.02 < mean["nf4, tiles of 16"] < mean["nf4, tiles of 32"] < 0.15


@pytest.mark.skipif(not len(lab.stored("runs.csv")), reason="no run is stored")
def test_stored_runs_fit_together():
    runs, loss, answers = (lab.stored(f"{name}.csv") for name in ("runs", "loss", "answers"))
    keys = [set(map(tuple, each[["variant", "seed"]].to_numpy())) for each in (runs, loss, answers)]
    assert keys[0] == keys[1] == keys[2] and len(runs) == len(keys[0])
    assert (answers.c <= answers.n).all()
    for (variant, seed), each in loss.groupby(["variant", "seed"]):
        assert len(each.loss.dropna()) == lab.SETTINGS["steps"], (variant, seed)
    for _, run in runs.iterrows():
        mine = answers[(answers.variant == run.variant) & (answers.seed == run.seed)]
        models = 1 if run.base_dtype == "bfloat16" else 3
        assert len(mine) == models * 2 * 38
        drawn = mine[(mine.model == "as trained") & (mine.plan == "drawn")]
        assert np.isclose(drawn.c.sum() / drawn.n.sum(), run["as trained, drawn"], atol=1e-4)
        assert lab.VARIANTS[run.variant]["base_dtype"] == run.base_dtype
