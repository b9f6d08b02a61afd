"""From answers to scores: verdicts, counts per problem, and the board of all models and plans."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from verilog import extraction, judging
from verilog.asking import Place, Plan, Row, Samples, Tasks
from verilog.judging import Verdict
from verilog.problems import Benchmark, Pair, Problem, load_problems
from verilog.stats import pass_at_k, score

Floats: TypeAlias = NDArray[np.float64]
Run = Sequence[tuple[int, int]]  # (passing answers, answers) of every problem
Runs = Mapping[tuple[str, str], Run]  # by model and plan
AT_K = (1, 5, 10)


# ---- Any benchmark ----

def verilog_eval(folder: str | Path) -> Benchmark:
    """A verilog-eval folder as a `Benchmark`: an answer is its module, and a pass scores 1."""
    def extract(text: str, problem: Problem) -> str | None:
        return extraction.extract_code(text, problem.interface).code

    def grade(pairs: Sequence[Pair]) -> list[float]:
        return [float(verdict.passed) for verdict in judging.judge_many(pairs)]

    return Benchmark(tuple(load_problems(folder)), extract, grade)


def grade(benchmark: Benchmark, answers: Mapping[str, Sequence[str]]) -> Floats:
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

def judge_answers(samples: Samples, tasks: Tasks, plans: Iterable[Plan]) -> pd.DataFrame:
    """One row per Verilog answer: its place, how the code was found, and its verdict.

    `official` plans are read by verilog-eval's own rule (`extraction.extract_official`); `ours` is
    whether the answer would pass by ours, too. `late`: 0 mismatches, failed by the testbench's own
    TIMEOUT alone. `letter`: verilog-eval's.
    """
    answers = []
    read = []     # (problem, code), by the rule of the answer's plan
    by_ours = []  # (problem, code), by ours
    for place, row, plan, problem in with_problems(samples, tasks, plans):
        ours = extraction.extract_code(row["text"], problem.interface)
        found = ours
        if plan.prompt == "official":
            found = extraction.extract_official(row["text"], problem.interface)
        answers.append((place, row, found.how))
        read.append((problem, found.code))
        by_ours.append((problem, ours.code))
    verdicts = judging.judge_many([*read, *by_ours])
    by_plan = verdicts[:len(answers)]
    by_our_rules = verdicts[len(answers):]
    rows = []
    for answer, verdict, by_our_rule in zip(answers, by_plan, by_our_rules, strict=True):
        (plan_name, problem_name, index), row, how = answer
        rows.append({
            "plan": plan_name,
            "problem": problem_name,
            "index": index,
            "finish": row["finish"],
            "tokens": row["tokens"],
            "how": how,
            "category": verdict.category,
            "detail": verdict.detail,
            "letter": verdict.letter,
            "passed": verdict.passed,
            "late": is_late(verdict),
            "ours": by_our_rule.passed})
    return pd.DataFrame(rows)


def with_problems(samples: Samples, tasks: Tasks,
                  plans: Iterable[Plan]) -> Iterator[tuple[Place, Row, Plan, Problem]]:
    """The answers, each with the plan that asked for it and the problem that it answers."""
    plan_of = {plan.name: plan for plan in plans}
    problem_of = {}
    for task, problems in tasks.items():
        for problem in problems:
            problem_of[task, problem.name] = problem
    for place, row in samples.items():
        plan_name, problem_name, _ = place
        plan = plan_of[plan_name]
        yield place, row, plan, problem_of[plan.task, problem_name]


def is_late(verdict: Verdict) -> bool:
    """No mismatch, and yet the testbench's own TIMEOUT fails the answer."""
    return verdict.category == "timeout" and verdict.mismatches == 0


def per_problem_csv(frame: pd.DataFrame, path: Path) -> None:
    """A CSV as verilog-eval writes it: plan, problem, passed, answers, rate, and its letters."""
    groups = frame.sort_values("index").groupby(["plan", "problem"])
    passed = groups.passed
    letters = groups.letter.agg(joined_letters)
    table = pd.DataFrame({
        "passed": passed.sum(),
        "answers": passed.size(),
        "rate": passed.mean(),
        "letters": letters})
    table.to_csv(path)


def joined_letters(letters: Iterable[str]) -> str:
    """verilog-eval's letters of a problem's answers; `?` where it has none."""
    return "".join([letter or "?" for letter in letters])


def verdict_table(verdicts: Mapping[str, Verdict]) -> pd.DataFrame:
    """One row per {label: verdict}: category, detail, mismatches of samples."""
    table = pd.DataFrame(list(verdicts.values()), index=list(verdicts))
    shown = table[["category", "detail", "mismatches", "samples"]]
    return shown.astype({"mismatches": "Int64", "samples": "Int64"})


# ---- Waveforms ----

SIGNAL = re.compile(r"\$var \w+ +(\d+) +(\S+) +(\S+)[^$]*\$end")
CHANGE = re.compile(r"(?:b([01xz]+) |([01xz]))(\S+)")


def waveform(path: str | Path) -> pd.DataFrame:
    """A waveform file (VCD) as a table of texts: a row per time of a change, a column a signal."""
    text = Path(path).read_text(errors="replace")
    head, _, body = text.partition("$enddefinitions")
    names: dict[str, str] = {}
    widths: dict[str, int] = {}
    for width, key, name in SIGNAL.findall(head):
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
        change = CHANGE.fullmatch(line)
        if change:
            yield time, change[3], change[1] or change[2]


def padded(bits: str, width: int) -> str:
    """The bits that a VCD file leaves out in front are 0, or x or z where the first one is."""
    filling = "0" if bits[0] == "1" else bits[0]
    return bits.rjust(width, filling)


# ---- Scores ----

def counts(frame: pd.DataFrame, plan: str, names: Sequence[str]) -> list[tuple[int, int]]:
    """(passing answers, answers) per problem for one plan, in the order of `names`."""
    answers = frame[frame.plan == plan]
    grouped = answers.groupby("problem").passed
    table = pd.DataFrame({"c": grouped.sum(), "n": grouped.size()})
    table = table.reindex(names)
    assert table.notna().all(axis=None), "an answer is missing from the denominator"
    whole = table.astype(int)
    return list(whole.itertuples(index=False, name=None))


def per_problem(run: Run, k: int) -> Floats:
    """pass@k of every problem, from its (passing answers, answers)."""
    return np.array([pass_at_k(n, c, k) for c, n in run])


def board(runs: Runs, subsets: Mapping[str, Sequence[bool]]) -> pd.DataFrame:
    """One row per model, plan and k: the score with its interval, and that on each subset.

    Args:
      runs: {(model, plan): [(passing, answers) per problem]}.
      subsets: {column: one bool per problem}; a column that would only repeat the score is out.
    """
    real = {}
    for name, wanted in subsets.items():
        chosen = np.array(wanted, bool)
        if 0 < chosen.sum() < len(chosen):
            real[name] = chosen
    rows = {}
    for (model, plan), run in runs.items():
        fewest = min([n for _, n in run])
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
