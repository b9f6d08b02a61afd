"""Scores on the same problems: how sure is a mean, and is a difference chance?"""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.stats

from verilog import extraction, judging
from verilog.problems import Benchmark, load_problems


def pass_at_k(n, c, k):
    """Unbiased pass@k for a problem with c passing answers of n."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def score(values):
    """`interval` of scores from 0 to 1; Clopper and Pearson's exact one where all are 0, or all 1.

    With 0 of n passing, a true share above 1 - 0.025**(1/n), about 3.7/n, would give that less than
    once in forty times. (The *rule of three*, 3/n, is the bound of a one-sided 95 %.)
    """
    mean, low, high = interval(values)
    if low == high and mean in (0.0, 1.0):
        exact = scipy.stats.binomtest(int(mean * len(values)), len(values)).proportion_ci()
        low, high = float(exact.low), float(exact.high)
    return mean, low, high


def compare(first, second):
    """Two models on the same problems: {first, second, difference: (mean, low, high), p, values}.

    `values` are the differences per problem.
    """
    differences = np.asarray(second, float) - np.asarray(first, float)
    return {"first": score(first), "second": score(second), "difference": interval(differences),
            "p": sign_flip_p(differences), "values": differences}


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


def sign_flip_p(differences, flips=100_000):
    """Two-sided p-value of a paired sign-flip test (`scipy.stats.permutation_test`).

    If two models were equally good, each difference per problem could as well have had the other
    sign. p is the share of choices of signs whose mean is at least as far from zero as the mean
    found: of all choices up to 16 differences other than zero, of `flips` random ones beyond.
    """
    values = np.array([float(value) for value in differences if value])
    if len(values) < 2:  # both signs are as far from zero
        return 1.0
    values /= abs(values).sum()  # then sums that differ by rounding alone are ties
    return float(scipy.stats.permutation_test(
        (values,), lambda x, axis: x.sum(axis=axis).round(9), permutation_type="samples",
        vectorized=True, n_resamples=flips, batch=1_000, rng=np.random.default_rng(0)).pvalue)


# ---- From answers to scores ----

def verilog_eval(folder):
    """A verilog-eval folder as a `Benchmark`: an answer is its module, and a pass scores 1."""
    return Benchmark(tuple(load_problems(folder)),
                     lambda text, problem: extraction.extract_code(text, problem.interface)[0],
                     lambda pairs: [float(v.passed) for v in judging.judge_many(pairs)])


def grade(benchmark, answers):
    """Scores per problem of a `Benchmark`, the mean over a problem's answers: an array.

    Args:
      answers: {problem's name: [texts]}, one key for each problem.
    """
    pairs = [(problem, benchmark.extract(text, problem))
             for problem in benchmark.problems for text in answers[problem.name]]
    values = iter(benchmark.grade(pairs))
    return np.array([np.mean([next(values) for _ in answers[problem.name]])
                     for problem in benchmark.problems])


def judge_answers(samples, tasks, plans):
    """One row per Verilog answer: its place, how the code was found, and its verdict.

    `official` plans are read by verilog-eval's own rule (`extraction.extract_official`); `ours` is
    whether the answer would pass by ours, too. `late`: 0 mismatches, failed by the testbench's own
    TIMEOUT alone. `letter`: verilog-eval's.
    """
    of_plan, rows, asked, by_ours = {plan.name: plan for plan in plans}, [], [], []
    by_name = {(task, problem.name): problem for task, each in tasks.items() for problem in each}
    for (plan, name, index), row in samples.items():
        problem = by_name[of_plan[plan].task, name]
        code, how = extraction.extract_code(row["text"], problem.interface)
        by_ours.append((problem, code))
        if of_plan[plan].prompt == "official":
            code, how = extraction.extract_official(row["text"], problem.interface)
        asked.append((problem, code))
        rows.append((plan, name, index, row["finish"], row["tokens"], how))
    verdicts = judging.judge_many([*asked, *by_ours])
    frame = pd.DataFrame(rows, columns=["plan", "problem", "index", "finish", "tokens", "how"])
    for name in ("category", "detail", "letter", "passed"):
        frame[name] = [getattr(verdict, name) for verdict in verdicts[:len(rows)]]
    frame["late"] = [v.category == "timeout" and v.mismatches == 0 for v in verdicts[:len(rows)]]
    frame["ours"] = [verdict.passed for verdict in verdicts[len(rows):]]
    return frame


def per_problem_csv(frame, path):
    """A CSV as verilog-eval writes it: plan, problem, passed, answers, rate, and its letters."""
    frame.sort_values("index").groupby(["plan", "problem"]).agg(
        passed=("passed", "sum"), answers=("passed", "size"), rate=("passed", "mean"),
        letters=("letter", lambda each: "".join(letter or "?" for letter in each))).to_csv(path)


def verdict_table(verdicts):
    """One row per {label: verdict}: category, detail, mismatches of samples."""
    table = pd.DataFrame(list(verdicts.values()), index=list(verdicts))
    return table[["category", "detail", "mismatches", "samples"]].astype(
        {"mismatches": "Int64", "samples": "Int64"})


def waveform(path):
    """A waveform file (VCD) as a table: a row per time of a change, a column per signal, as text."""
    head, _, body = Path(path).read_text(errors="replace").partition("$enddefinitions")
    names, widths, rows, now = {}, {}, {}, 0
    for width, key, name in re.findall(r"\$var \w+ +(\d+) +(\S+) +(\S+)[^$]*\$end", head):
        names.setdefault(key, name)
        widths[key] = int(width)
    for line in body.splitlines():
        if line.startswith("#"):
            now = int(line[1:])
        elif found := re.fullmatch(r"(?:b([01xz]+) |([01xz]))(\S+)", line):
            bits = found[1] or found[2]  # what is left out in front is 0, or x or z as the first
            rows.setdefault(now, {})[names[found[3]]] = bits.rjust(
                widths[found[3]], bits[0].replace("1", "0"))
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(names.values())).ffill()


def counts(frame, plan, names):
    """(passing answers, answers) per problem for one plan, in the order of `names`."""
    grouped = frame[frame.plan == plan].groupby("problem").passed
    table = pd.DataFrame({"c": grouped.sum(), "n": grouped.size()}).reindex(names)
    assert table.notna().all(axis=None), "an answer is missing from the denominator"
    return list(table.astype(int).itertuples(index=False, name=None))


def per_problem(run, k):
    """pass@k of every problem, from its (passing answers, answers)."""
    return np.array([pass_at_k(n, c, k) for c, n in run])


def board(runs, subsets):
    """One row per model, plan and k: the score with its interval, and that on each subset.

    Args:
      runs: {(model, plan): [(passing, answers) per problem]}.
      subsets: {column: one bool per problem}; columns that would only repeat the score are left out.
    """
    rows = {}
    for (model, plan), run in runs.items():
        for k in (k for k in (1, 5, 10) if k <= min(n for _, n in run)):
            values = per_problem(run, k)
            rows[plan, f"pass@{k}", model] = dict(zip(("all", "low", "high"), score(values))) | {
                name: values[np.array(wanted, bool)].mean() for name, wanted in subsets.items()
                if 0 < sum(wanted) < len(wanted)}
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame.index = pd.MultiIndex.from_tuples(frame.index, names=["plan", "score", "model"])
    return frame.sort_index()
