"""Statistics of scores on the same problems: how sure is a mean, and is a difference chance?"""

import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike, NDArray

from tables.errors import UserError

Interval = tuple[float, float, float]  # mean, low, high


class Comparison(TypedDict):
    """Two models on the same problems."""

    first: Interval
    second: Interval
    difference: Interval  # second minus first
    p: float              # of `sign_flip_p`
    values: NDArray[np.float64]  # the differences, one a problem


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k for a problem with c passing answers of n.

    Raises:
      UserError: k answers can't be picked from n, or more than n pass.
    """
    if k > n or c > n:
        raise UserError(f"pass@{k} can't be estimated from {c} passing answers of {n}: it takes at "
                        f"least {k} answers, and no more can pass than there are.")
    all_fail = math.comb(n - c, k)  # choices of k answers of which none passes
    choices = math.comb(n, k)
    return 1.0 - all_fail / choices


def score(values: ArrayLike) -> Interval:
    """`interval` of scores from 0 to 1; Clopper and Pearson's exact one where all are 0, or all 1.

    With 0 of n passing, a true share above 1 - 0.025**(1/n), about 3.7/n, would give that less than
    once in forty times. (The *rule of three*, 3/n, is the bound of a one-sided 95%.)
    """
    mean, low, high = interval(values)
    if low == high and mean in (0.0, 1.0):
        n = np.size(values)
        passing = int(mean * n)
        test = scipy.stats.binomtest(passing, n)
        exact = test.proportion_ci()
        low = float(exact.low)
        high = float(exact.high)
    return mean, low, high


def compare(first: ArrayLike, second: ArrayLike) -> Comparison:
    """Two models on the same problems.

    Args:
      first, second: their scores, one a problem, in the same order.

    Raises:
      UserError: there aren't equally many.
    """
    before = np.asarray(first, float)
    after = np.asarray(second, float)
    if before.shape != after.shape:
        raise UserError(f"{before.size} and {after.size} scores can't be compared in pairs. Give "
                        "one a problem for each of the two models.")
    differences = after - before
    return {
        "first": score(first),
        "second": score(second),
        "difference": interval(differences),
        "p": sign_flip_p(differences),
        "values": differences}


def holm(ps: Sequence[float]) -> list[float]:
    """p-values that are corrected for how many there are, by Holm's step-down method.

    The smallest of m values is multiplied by m, the next by m - 1, and so on. None becomes smaller
    than one before it, and none larger than 1. If you then call those below 0.05 a finding, you're
    wrong about any of them in at most one of twenty such tables (Holm, 1979).

    Args:
      ps: p-values, in any order; the result has the same order.
    """
    order = sorted(range(len(ps)), key=ps.__getitem__)
    corrected = [1.0] * len(ps)
    largest = 0.0
    for rank, place in enumerate(order):
        value = ps[place] * (len(ps) - rank)
        largest = max(largest, value)
        corrected[place] = min(1.0, largest)
    return corrected


def interval(values: ArrayLike, draws: int = 10_000, seed: int = 0) -> Interval:
    """Mean over problems and its 95% bootstrap interval.

    Problems are drawn again with replacement, `draws` times (`scipy.stats.bootstrap`, percentile).
    Where all values are equal there is nothing to vary, and the interval is a point.
    """
    values = np.asarray(values, float)
    mean = float(values.mean())
    if len(values) == 1:  # scipy wants two
        return mean, mean, mean
    drawn = scipy.stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=draws,
        batch=1_000,
        method="percentile",
        rng=np.random.default_rng(seed))
    bounds = drawn.confidence_interval
    return mean, float(bounds.low), float(bounds.high)


def sign_flip_p(differences: ArrayLike, flips: int = 100_000) -> float:
    """Two-sided p-value of a paired sign-flip test (`scipy.stats.permutation_test`).

    If two models were equally good, each difference per problem could as well have had the other
    sign. p is the share of choices of signs whose mean is at least as far from zero as the mean
    found: of all choices up to 16 differences other than zero, of `flips` random ones beyond.
    """
    values = np.asarray(differences, float)
    values = values[values != 0]
    if len(values) < 2:  # both signs are as far from zero
        return 1.0
    values = values / abs(values).sum()  # then sums that differ by rounding alone are ties

    def rounded_sum(x: NDArray, axis: int) -> NDArray:
        return x.sum(axis=axis).round(9)

    test = scipy.stats.permutation_test(
        (values,),
        rounded_sum,
        permutation_type="samples",
        vectorized=True,
        n_resamples=flips,
        batch=1_000,
        rng=np.random.default_rng(0))
    return float(test.pvalue)
