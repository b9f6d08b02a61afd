"""11_qlora: its stored runs and how they are compared."""

import conftest  # noqa: F401  (finds the repository)
import pandas as pd
import pytest

from appendix import qlora_runs as lab
from verilog import stats

pytestmark = pytest.mark.laboratory


def table(variant, seed, passed, n=4):
    """Answers: one problem per number of passing answers."""
    return pd.DataFrame({"problem": [f"P{i}" for i in range(len(passed))], "plan": "drawn",
                         "c": passed, "n": n, "variant": variant, "seed": seed})


def test_differences_are_of_the_same_seed_and_problem_and_show_both_spreads():
    answers = pd.concat([
        table("bfloat16", 42, [4, 2, 0]), table("bfloat16", 43, [4, 4, 0]),
        table("bfloat16", 44, [0, 0, 0]),  # the others lack this seed
        *(table(name, seed, passed) for name in ("int8", "int8 arithmetic", "nf4")
          for seed, passed in ((43, [4, 2, 0]), (42, [4, 4, 1])))])
    assert lab.gaps(answers, "nf4").to_dict("list") == {42: [0, 0.5, 0.25], 43: [0, -0.5, 0]}
    found = lab.differences(answers, plans=("drawn",))
    assert list(found.index) == [("drawn", "int8"), ("drawn", "int8 arithmetic"), ("drawn", "nf4")]
    row = found.loc["drawn", "nf4"]
    assert row.seeds == 2 and row.difference == pytest.approx(0.125 / 3)
    assert row["problems from"] == 0 and row["problems to"] == pytest.approx(0.125)
    half = 12.706 * 5 / 12 / 2  # t of one degree of freedom; the seeds are 1/4 and -1/6
    assert row["seeds to"] - row["seeds from"] == pytest.approx(2 * half, rel=1e-3)


def test_one_seed_of_the_first_base_shows_ten_points_and_the_others_do_not():
    """Section 2 of 11."""
    _, _, answers = lab.stored("814107fdbaa3")
    gaps = lab.gaps(answers, "nf4")
    assert gaps[42].mean() < -0.1 and stats.sign_flip_p(gaps[42]) == pytest.approx(0.002, abs=5e-4)
    assert gaps[43].mean() > 0 and gaps[44].mean() > 0
