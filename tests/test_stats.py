"""verilog/stats.py: the sign-flip test against all signs, the interval against truth."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appendix.qlora_runs import seed_interval
from tables.errors import UserError
from verilog.stats import compare, holm, interval, pass_at_k, score, sign_flip_p


def brute_force(values):
    """The share of all sums of signs that are as far from zero as the sum found."""
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in itertools.product((-1, 1), repeat=len(values))]
    return np.mean([total >= abs(sum(values)) - 1e-9 for total in sums])


def test_holm_by_hand():
    """0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.04 * 1, which mayn't be less than the 0.06 before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []
    assert holm([2e-5, 2e-5, 0.068, 2e-5, 0.031, 1.0]) == pytest.approx(
        [12e-5, 12e-5, 0.136, 12e-5, 0.093, 1.0])


def test_pass_at_k_is_the_share_of_picks_with_a_pass():
    for n in range(1, 7):
        for passing, k in itertools.product(range(n + 1), range(1, n + 1)):
            picks = [min(pick) < passing for pick in itertools.combinations(range(n), k)]
            assert pass_at_k(n, passing, k) == pytest.approx(np.mean(picks))


@pytest.mark.parametrize("n, passing, k", [(2, 1, 5), (2, 3, 1)])
def test_pass_at_k_of_too_few_answers_is_one_line(n, passing, k):
    with pytest.raises(UserError, match=f"pass@{k} can't be estimated"):
        pass_at_k(n, passing, k)


def test_scores_of_other_problems_are_no_pairs():
    """numpy once compared the one score with each of the three."""
    with pytest.raises(UserError, match="1 and 3 scores can't be compared"):
        compare([0.5], [1.0, 0.0, 1.0])


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5), max_size=9), st.sampled_from([1, 3, 5, 20, 15_504]))
@example([], 1)
@example([0, 0, 0], 5)
@example([5], 5)
@example([1, -1], 3)
def test_shares_against_all_signs(counts, of):
    values = [count / of for count in counts]
    assert sign_flip_p(values) == pytest.approx(brute_force(values), rel=1e-12)


def test_sign_flip_is_calibrated():
    """With no difference, p is below 0.05 in about five of a hundred cases."""
    generator = np.random.default_rng(3)
    small = sum(sign_flip_p(generator.integers(-5, 6, 25) / 5, 1000) < 0.05 for _ in range(400))
    assert 0.02 <= small / 400 <= 0.08


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator, covered = np.random.default_rng(0), 0
    for round_ in range(300):
        mean, low, high = interval(generator.random(60) < 0.6, 1000, seed=round_)
        assert low <= mean <= high
        covered += low <= 0.6 <= high
    assert 0.89 <= covered / 300 <= 0.99


def test_interval_of_values_that_do_not_vary():
    assert interval([1.0] * 5) == (1.0, 1.0, 1.0) and interval([0.5]) == (0.5, 0.5, 0.5)
    assert interval([0, 1, 1, 0, 1], seed=4) == interval([0, 1, 1, 0, 1], seed=4)


@pytest.mark.parametrize("n", [1, 7, 38, 156])
def test_scores_that_are_all_0_or_all_1_have_the_exact_interval(n):
    """Clopper and Pearson: the share p with which none of n passes in one case of forty."""
    lost = 0.025 ** (1 / n)
    assert score([0.0] * n) == pytest.approx((0.0, 0.0, 1 - lost))
    assert score([1.0] * n) == pytest.approx((1.0, lost, 1.0))


def test_other_scores_have_the_bootstrap_interval():
    mixed = [0.0, 0.2, 1.0, 1.0]
    assert score(mixed) == interval(mixed)
    assert score([0.4] * 5) == pytest.approx((0.4, 0.4, 0.4))


def test_three_seeds_say_less_than_their_problems():
    mean, low, high = seed_interval([-0.105, 0.053, 0.009])
    half = 4.303 * np.std([-0.105, 0.053, 0.009], ddof=1) / math.sqrt(3)  # t table, two degrees
    assert low == pytest.approx(mean - half, rel=1e-3)
    assert high == pytest.approx(mean + half, rel=1e-3)
    assert mean == pytest.approx(-0.0143, abs=1e-4)


@pytest.mark.parametrize("values", [[0.5], [0, 0, 0], [1 / 38, 2 / 38 - 1 / 38, 1 - 37 / 38]])
def test_equal_seeds_have_no_interval_instead_of_a_certain_one(values):
    mean, low, high = seed_interval(values)
    assert mean == pytest.approx(values[0]) and math.isnan(low) and math.isnan(high)
