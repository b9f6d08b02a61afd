"""From answers to scores: verdicts, counts per problem, and the board of all models and plans."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from verilog import extraction, judging
from verilog.asking import Place, Plan, Row, Tasks
from verilog.judging import Verdict
from verilog.problems import Benchmark, Problem, load_problems
from verilog.stats import pass_at_k, score

Run = Sequence[tuple[int, int]]  # (passing answers, answers) of every problem
AT_K = (1, 5, 10)


# ---- Any benchmark ----

def verilog_eval(folder: str | Path) -> Benchmark:
    """A verilog-eval folder as a `Benchmark`: an answer is its module, and a pass scores 1."""
    def extract(text: str, problem: Problem) -> str | None:
        return extraction.extract_code(text, problem.interface).code

    def grade(pairs: Sequence[tuple[Problem, str | None]]) -> list[float]:
        return [float(verdict.passed) for verdict in judging.judge_many(pairs)]

    return Benchmark(tuple(load_problems(folder)), extract, grade)


def grade(benchmark: Benchmark, answers: Mapping[str, Sequence[str]]) -> NDArray[np.float64]:
    """Scores per problem of a `Benchmark`, the mean over a problem's answers: [problems].

    Args:
      answers: {problem's name: [texts]}, one key for each problem.
    """
    pairs = []
    for problem in benchmark.problems:
        for text in answers[problem.name]:
            pairs.append((problem, benchmark.extract(text, problem)))
    values = np.asarray(list(benchmark.grade(pairs)), float)
    means = []
    start = 0
    for problem in benchmark.problems:
        end = start + len(answers[problem.name])
        means.append(np.mean(values[start:end]))
        start = end
    return np.array(means)


# ---- Verilog's verdicts ----

def judge_answers(samples: Mapping[Place, Row], tasks: Tasks,
                  plans: Iterable[Plan]) -> pd.DataFrame:
    """One row per Verilog answer: its place, how the code was found, and its verdict.

    `official` plans are read by verilog-eval's own rule (`extraction.extract_official`); `ours` is
    whether the answer would pass by ours, too. `late`: 0 mismatches, failed by the testbench's own
    TIMEOUT alone. `letter`: verilog-eval's.
    """
    plan_of = {plan.name: plan for plan in plans}
    problem_of = {}
    for task, problems in tasks.items():
        for problem in problems:
            problem_of[task, problem.name] = problem
    rows = []
    judged = []  # as the plan reads an answer
    by_ours = []
    for (name, problem_name, index), row in samples.items():
        plan = plan_of[name]
        problem = problem_of[plan.task, problem_name]
        ours = extraction.extract_code(row["text"], problem.interface)
        found = ours
        if plan.prompt == "official":
            found = extraction.extract_official(row["text"], problem.interface)
        rows.append((name, problem_name, index, row["finish"], row["tokens"], found.how))
        judged.append((problem, found.code))
        by_ours.append((problem, ours.code))
    verdicts = judging.judge_many([*judged, *by_ours])
    frame = pd.DataFrame(rows, columns=["plan", "problem", "index", "finish", "tokens", "how"])
    first = verdicts[:len(rows)]
    for name in ("category", "detail", "letter", "passed"):
        frame[name] = [getattr(verdict, name) for verdict in first]
    frame["late"] = [verdict.category == "timeout" and verdict.mismatches == 0 for verdict in first]
    frame["ours"] = [verdict.passed for verdict in verdicts[len(rows):]]
    return frame


def per_problem_csv(frame: pd.DataFrame, path: Path) -> None:
    """A CSV as verilog-eval writes it: plan, problem, passed, answers, rate, and its letters."""
    groups = frame.sort_values("index").groupby(["plan", "problem"])
    table = groups.agg(passed=("passed", "sum"), answers=("passed", "size"),
                       rate=("passed", "mean"), letters=("letter", joined_letters))
    table.to_csv(path)


def joined_letters(letters: Iterable[str]) -> str:
    """verilog-eval's letters of a problem's answers; `?` where it has none."""
    return "".join(letter or "?" for letter in letters)


def verdict_table(verdicts: Mapping[str, Verdict]) -> pd.DataFrame:
    """One row per {label: verdict}: category, detail, mismatches of samples."""
    table = pd.DataFrame(list(verdicts.values()), index=list(verdicts))
    table = table[["category", "detail", "mismatches", "samples"]]
    return table.astype({"mismatches": "Int64", "samples": "Int64"})


# ---- Waveforms ----

def waveform(path: str | Path) -> pd.DataFrame:
    """A waveform file (VCD) as a table: a row per time of a change, a column per signal, as text."""
    head, _, body = Path(path).read_text(errors="replace").partition("$enddefinitions")
    names: dict[str, str] = {}
    widths: dict[str, int] = {}
    for width, key, name in re.findall(r"\$var \w+ +(\d+) +(\S+) +(\S+)[^$]*\$end", head):
        names.setdefault(key, name)
        widths[key] = int(width)
    rows: dict[int, dict[str, str]] = {}
    for time, key, bits in changes(body):
        row = rows.setdefault(time, {})
        row[names[key]] = padded(bits, widths[key])
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(names.values()))
    return table.ffill()


def changes(body: str) -> Iterator[tuple[int, str, str]]:
    """(time, signal's key, its new bits) of every change in a VCD file behind its definitions."""
    time = 0
    for line in body.splitlines():
        if line.startswith("#"):
            time = int(line[1:])
            continue
        change = re.fullmatch(r"(?:b([01xz]+) |([01xz]))(\S+)", line)
        if change:
            yield time, change[3], change[1] or change[2]


def padded(bits: str, width: int) -> str:
    """The bits that a VCD file leaves out in front are 0, or x or z where the first one is."""
    filling = "0" if bits[0] == "1" else bits[0]
    return bits.rjust(width, filling)


# ---- Scores ----

def counts(frame: pd.DataFrame, plan: str, names: Sequence[str]) -> list[tuple[int, int]]:
    """(passing answers, answers) per problem for one plan, in the order of `names`."""
    grouped = frame[frame.plan == plan].groupby("problem").passed
    table = pd.DataFrame({"c": grouped.sum(), "n": grouped.size()}).reindex(names)
    assert table.notna().all(axis=None), "an answer is missing from the denominator"
    return list(table.astype(int).itertuples(index=False, name=None))


def per_problem(run: Run, k: int) -> NDArray[np.float64]:
    """pass@k of every problem, from its (passing answers, answers)."""
    return np.array([pass_at_k(n, c, k) for c, n in run])


def board(runs: Mapping[tuple[str, str], Run],
          subsets: Mapping[str, Sequence[bool]]) -> pd.DataFrame:
    """One row per model, plan and k: the score with its interval, and that on each subset.

    Args:
      runs: {(model, plan): [(passing, answers) per problem]}.
      subsets: {column: one bool per problem}; columns that would only repeat the score are left out.
    """
    real = {}
    for name, wanted in subsets.items():
        chosen = np.array(wanted, bool)
        if 0 < chosen.sum() < len(chosen):
            real[name] = chosen
    rows = {}
    for (model, plan), run in runs.items():
        fewest = min(n for _, n in run)
        for k in AT_K:
            if k > fewest:
                continue
            values = per_problem(run, k)
            mean, low, high = score(values)
            row = {"all": mean, "low": low, "high": high}
            for name, chosen in real.items():
                row[name] = values[chosen].mean()
            rows[plan, f"pass@{k}", model] = row
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame.index = pd.MultiIndex.from_tuples(frame.index, names=["plan", "score", "model"])
    return frame.sort_index()
