"""Scores on the same problems: how sure is a mean, and is a difference chance?"""

import math
from fractions import Fraction

import numpy as np
import scipy.stats


def pass_at_k(n, c, k):
    """Unbiased pass@k for a problem with c passing answers of n."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def score(values, draws=10_000):
    """`interval` of scores from 0 to 1; Clopper and Pearson's exact one where all are 0, or all 1.

    With 0 of n passing, a true share above 1 - 0.025**(1/n), about 3.7/n, would give that less than
    once in forty times. (The *rule of three*, 3/n, is the bound of a one-sided 95 %.)
    """
    mean, low, high = interval(values, draws)
    if low == high and mean in (0.0, 1.0):
        unseen = 1 - 0.025 ** (1 / len(values))
        low, high = (0.0, unseen) if mean == 0 else (1 - unseen, 1.0)
    return mean, low, high


def compare(first, second, draws=10_000):
    """Two models on the same problems: {first, second, difference: (mean, low, high), p, differ}.

    `values` are the scores per problem as given, `differ` how many problems differ.
    """
    differences = np.asarray(second, float) - np.asarray(first, float)
    return {"first": score(first, draws), "second": score(second, draws),
            "difference": interval(differences, draws), "p": sign_flip_p(differences),
            "differ": int((differences != 0).sum()), "values": (first, second)}


def interval(values, draws=10_000, seed=0):
    """Mean over problems and its 95 % bootstrap interval: (mean, low, high).

    Problems are drawn again with replacement, `draws` times (`scipy.stats.bootstrap`, percentile).
    Where all values are equal there is nothing to vary, and the interval is a point.
    """
    values = np.asarray(values, float)
    if len(values) == 1:
        return (float(values[0]),) * 3  # scipy wants two
    found = scipy.stats.bootstrap((values,), np.mean, n_resamples=draws, batch=1_000,
                                  method="percentile", rng=np.random.default_rng(seed))
    return float(values.mean()), *map(float, found.confidence_interval)


def seed_interval(values, confidence=0.95):
    """Mean over runs that differ in their seed, and its t interval: (mean, low, high).

    Low and high are nan where the spread is unknown: for one run, and where all values are equal.
    A few equal scores show how coarse the score is, not that another seed would give the same.
    """
    values = np.asarray(values, float)
    if len(values) < 2 or np.allclose(values, values[0], rtol=0, atol=1e-12):
        return float(values.mean()), math.nan, math.nan
    low, high = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    return float(values.mean()), float(low), float(high)


def sign_flip_p(differences, cells=1_000_000):
    """Two-sided p-value of a paired sign-flip test over all 2**n signs; no random draw.

    If two models were equally good, each difference per problem could as well have had the other
    sign. p is the share of all choices of signs whose sum is at least as far from zero as the sum
    found; with n differences other than zero it is 2**(1 - n) at the least.

    The choices are counted, not listed. A sum of signs is extreme where the differences that point
    the other way add up to at most `limit`; `chance[k]` is the share of choices that add up to k,
    and takes in one difference after the other.

    Args:
      differences: one number per problem. Where they are fractions (shares of answers, pass@k), the
        count runs on their common denominator and p is exact.
      cells: the resolution where they are not: they are rounded to 1/cells of the sum of their
        sizes, and p is that of the rounded numbers (memory: 16 bytes per cell at the most).
    """
    values = [float(value) for value in differences if value]
    known = [Fraction(value).limit_denominator(100_000) for value in values]
    parts = math.lcm(*(fraction.denominator for fraction in known))
    exact = all(abs(a - b) <= 1e-12 * abs(b) for a, b in zip(known, values, strict=True))
    if exact and parts * sum(map(abs, known)) <= cells:
        steps = [int(parts * fraction) for fraction in known]
    else:
        unit = sum(map(abs, values)) / cells
        steps = [round(value / unit) for value in values]
    limit = (sum(map(abs, steps)) - abs(sum(steps))) // 2
    chance = np.zeros(limit + 1)
    chance[0] = 1.0
    for step in sorted(map(abs, steps)):
        chance[step:] += chance[:-step or None]
        chance /= 2
    return min(1.0, 2 * float(chance.sum()))
