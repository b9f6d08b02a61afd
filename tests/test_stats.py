"""helpers/stats.py: the sign-flip test against all signs and SciPy, the interval against truth.

    .venv/bin/python -m pytest tests/test_stats.py
"""

import itertools
import math

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from helpers.stats import interval, score, seed_interval, sign_flip_p


def brute_force(values):
    """The share of all sums of signs that are as far from zero as the sum found."""
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in itertools.product((-1, 1), repeat=len(values))]
    return np.mean([total >= abs(sum(values)) - 1e-9 for total in sums])


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5), max_size=9), st.sampled_from([1, 3, 5, 20, 15_504]))
@example([], 1)
@example([0, 0, 0], 5)
@example([5], 5)
@example([1, -1], 3)
def test_shares_against_all_signs(counts, of):
    values = [count / of for count in counts]
    assert sign_flip_p(values) == pytest.approx(brute_force(values), rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-3, 3, allow_subnormal=False), min_size=1, max_size=9))
@example([7e-144, 7e-144])  # near zero is not zero
def test_any_numbers_against_all_signs(values):
    """Rounded to a millionth of their sum: exact for the rounded ones, ties included."""
    unit = sum(map(abs, values)) / 1e6 or 1
    loose = [abs(sum(s * v for s, v in zip(signs, values))) - abs(sum(values))
             for signs in itertools.product((-1, 1), repeat=len(values))]
    low, high = (np.mean(np.array(loose) >= edge) for edge in (20 * unit, -20 * unit))
    assert low - 1e-9 <= sign_flip_p(values) <= high + 1e-9


@pytest.mark.parametrize("values", [
    np.random.default_rng(0).integers(-5, 7, 60) / 5, np.random.default_rng(1).normal(0.25, 1, 80)],
    ids=["shares of five", "normal"])
def test_many_problems_against_scipy(values):
    drawn = stats.permutation_test((values,), np.mean, permutation_type="samples",
                                   n_resamples=50_000, rng=np.random.default_rng(1)).pvalue
    assert sign_flip_p(values) == pytest.approx(drawn, abs=5 * math.sqrt(drawn / 50_000))


def test_fourteen_problems_against_scipys_exact_test():
    values = np.random.default_rng(2).normal(0.5, 1, 14)
    theirs = stats.permutation_test((values,), np.mean, permutation_type="samples",
                                    n_resamples=np.inf).pvalue
    assert sign_flip_p(values) == pytest.approx(theirs, abs=1e-4)


def test_sign_flip_is_calibrated():
    """With no difference, p is below 0.05 in about five of a hundred cases."""
    generator = np.random.default_rng(3)
    small = sum(sign_flip_p(generator.integers(-5, 6, 25) / 5) < 0.05 for _ in range(1000))
    assert 0.035 <= small / 1000 <= 0.06  # under 0.05 on the whole: the sums come in steps


def test_small_p_values_keep_their_digits():
    assert sign_flip_p([1.0] * 156) == 2.0**-155
    assert sign_flip_p([0.2] * 40) == 2.0**-39


def test_the_published_gap():
    """156 problems, five answers each; drawing signs at random gave 0.0046 (10_published)."""
    import pandas as pd
    paper = pd.read_csv(ROOT / "data/published/eval_per_problem_digitized.csv")
    gap = (paper.gpu_passed_of_5 - paper.tpu_passed_of_5).to_numpy()
    assert sign_flip_p(gap) == pytest.approx(0.0046, abs=0.0004)
    assert sign_flip_p(gap / 5) == sign_flip_p(gap) == sign_flip_p(-gap)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator, covered = np.random.default_rng(0), 0
    for round_ in range(300):
        mean, low, high = interval(generator.random(60) < 0.6, 1000, seed=round_)
        assert low <= mean <= high
        covered += low <= 0.6 <= high
    assert 0.89 <= covered / 300 <= 0.99


@pytest.mark.parametrize("passed", (0, 1))
@pytest.mark.parametrize("n", (1, 5, 38, 156))
def test_scores_without_spread_have_the_exact_two_sided_interval(n, passed):
    """The bound was once the one-sided rule of three's, beside intervals of two sides."""
    exact = stats.binomtest(n * passed, n).proportion_ci(0.95, "exact")
    assert score([passed] * n, 10) == pytest.approx((passed, exact.low, exact.high))


def test_interval_of_values_that_do_not_vary():
    assert interval([1.0] * 5) == (1.0, 1.0, 1.0) and interval([0.5]) == (0.5, 0.5, 0.5)
    assert interval([0, 1, 1, 0, 1], seed=4) == interval([0, 1, 1, 0, 1], seed=4)


def test_three_seeds_say_less_than_their_problems():
    mean, low, high = seed_interval([-0.105, 0.053, 0.009])
    half = 4.303 * np.std([-0.105, 0.053, 0.009], ddof=1) / math.sqrt(3)  # t table, two degrees
    assert (low, high) == (pytest.approx(mean - half, rel=1e-3), pytest.approx(mean + half, rel=1e-3))
    assert mean == pytest.approx(-0.0143, abs=1e-4)


@pytest.mark.parametrize("values", [[0.5], [0, 0, 0], [1 / 38, 2 / 38 - 1 / 38, 1 - 37 / 38]])
def test_equal_seeds_have_no_interval_instead_of_a_certain_one(values):
    mean, low, high = seed_interval(values)
    assert mean == pytest.approx(values[0]) and math.isnan(low) and math.isnan(high)
