"""From answers to scores: verdicts, counts per problem, and the board of all models and plans."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tables.errors import UserError
from tables.files import write_json
from verilog import extraction, judging
from verilog.asking import Place, Plan, Row, Samples, Tasks
from verilog.judging import Verdict
from verilog.plans import FIVE, greedy_of_both, sampled_wordings
from verilog.problems import Benchmark, Pair, Problem, load_problems
from verilog.stats import Comparison, compare, holm, pass_at_k, score

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
        verdicts = judging.judge_many(pairs)
        return [float(verdict.passed) for verdict in verdicts]

    problems = load_problems(folder)
    return Benchmark(tuple(problems), extract, grade)


def grade(benchmark: Benchmark, answers: Mapping[str, Sequence[str]]) -> Floats:
    """Scores per problem of a `Benchmark`, the mean over a problem's answers: [problems].

    Args:
      answers: {problem's name: [texts]}, one key for each problem.
    """
    pairs = []
    for problem in benchmark.problems:
        for text in answers[problem.name]:
            extracted = benchmark.extract(text, problem)
            pairs.append((problem, extracted))
    grades = benchmark.grade(pairs)
    values = np.asarray(list(grades), float)

    means = []
    start = 0
    for problem in benchmark.problems:
        end = start + len(answers[problem.name])
        mean = np.mean(values[start:end])
        means.append(mean)
        start = end
    return np.array(means)


def texts_of(samples: Samples, plan: str) -> dict[str, list[str]]:
    """The answers of one plan as `grade` takes them: {problem's name: [texts]}, in their order."""
    texts: dict[str, list[str]] = {}
    for place in sorted(samples):
        plan_name, problem, _ = place
        if plan_name != plan:
            continue
        text = samples[place]["text"]
        of_problem = texts.setdefault(problem, [])
        of_problem.append(text)
    return texts


class Answer(NamedTuple):
    """A saved answer with what it answers, and the plan that asked for it."""

    place: Place
    row: Row
    plan: Plan
    problem: Problem


# ---- Verilog's verdicts ----

class Ceiling(NamedTuple):
    """What a perfect model could get."""

    winnable: list[bool]      # of each problem: does its reference pass?
    lost: dict[str, Verdict]  # of the references that don't, by problem
    text: str                 # a line for the reader


def ceiling(task: str, problems: Sequence[Problem]) -> Ceiling:
    """Judge the references of a task: which problems can be won at all?

    Raises:
      UserError: none can.
    """
    pairs: list[Pair] = []
    for problem in problems:
        pairs.append((problem, problem.right_answer))
    verdicts = judging.judge_many(pairs)
    winnable = []
    lost = {}
    without_mismatch = 0
    for problem, verdict in zip(problems, verdicts, strict=True):
        winnable.append(verdict.passed)
        if verdict.mismatches == 0:
            without_mismatch += 1
        if not verdict.passed:
            lost[problem.name] = verdict

    if len(lost) == len(problems):
        name, first = next(iter(lost.items()))
        raise UserError(
            f"no reference of {task} passes its own testbench, so no answer could ({name}: "
            f"{first.category}, {first.detail}). Fix the problems, or choose others.")
    text = (f"{task}: {len(problems)} problems, {without_mismatch} references show 0 mismatches, "
            f"{sum(winnable)} can be won")
    return Ceiling(winnable, lost, text)


class Leaks(NamedTuple):
    """References that stand in training texts."""

    trained: int       # different modules in the training texts
    names: list[str]   # of the problems whose reference is one of them


def leaks(problems: Iterable[Problem], texts: Iterable[str]) -> Leaks:
    """Compare references with trained modules, without comments, spaces and module names."""
    trained: set[str] = set()
    for text in texts:
        trained |= extraction.bare_modules(text)
    names = []
    for problem in problems:
        if extraction.bare_modules(problem.reference) & trained:
            names.append(problem.name)
    return Leaks(len(trained), names)


def judge_answers(samples: Samples, tasks: Tasks, plans: Iterable[Plan]) -> pd.DataFrame:
    """One row per Verilog answer: its place, how the code was found, and its verdict.

    `official` plans are read by verilog-eval's own rule (`extraction.extract_official`); `ours` is
    whether the answer would pass by ours, too. `late`: 0 mismatches, failed by the testbench's own
    TIMEOUT alone. `letter`: verilog-eval's.
    """
    answers = list(with_problems(samples, tasks, plans))
    hows = []     # how the code was found
    read = []     # (problem, code), by the rule of the answer's plan
    by_ours = []  # (problem, code), by ours
    for answer in answers:
        text = answer.row["text"]
        problem = answer.problem
        ours = extraction.extract_code(text, problem.interface)
        extracted = ours
        if answer.plan.prompt == "official":
            extracted = extraction.extract_official(text, problem.interface)
        hows.append(extracted.how)
        read.append((problem, extracted.code))
        by_ours.append((problem, ours.code))

    verdicts = judging.judge_many([*read, *by_ours])
    count = len(answers)
    by_plan = verdicts[:count]
    by_our_rule = verdicts[count:]
    judged = zip(answers, hows, by_plan, by_our_rule, strict=True)
    rows = []
    for answer, how, verdict, ours_too in judged:
        row = _judged(answer, how, verdict)
        row["ours"] = ours_too.passed
        rows.append(row)
    return pd.DataFrame(rows)


def _judged(answer: Answer, how: str, verdict: Verdict) -> Row:
    """The row of one answer in `judge_answers`, without `ours`."""
    plan, problem, index = answer.place
    return {
        "plan": plan,
        "problem": problem,
        "index": index,
        "finish": answer.row["finish"],
        "tokens": answer.row["tokens"],
        "how": how,
        "category": verdict.category,
        "detail": verdict.detail,
        "letter": verdict.letter,
        "passed": verdict.passed,
        "late": is_late(verdict)}


def with_problems(samples: Samples, tasks: Tasks, plans: Iterable[Plan]) -> Iterator[Answer]:
    """The answers, each with the plan that asked for it and the problem that it answers."""
    plan_of = {plan.name: plan for plan in plans}
    problem_of = {}
    for task, problems in tasks.items():
        for problem in problems:
            problem_of[task, problem.name] = problem

    for place, row in samples.items():
        plan_name, problem_name, _ = place
        plan = plan_of[plan_name]
        problem = problem_of[plan.task, problem_name]
        yield Answer(place, row, plan, problem)


def is_late(verdict: Verdict) -> bool:
    """No mismatch, and yet the testbench's own TIMEOUT fails the answer."""
    return verdict.category == "timeout" and verdict.mismatches == 0


def per_problem_csv(frame: pd.DataFrame, path: Path) -> None:
    """A CSV with plan, problem, passed, answers, rate, and verilog-eval's letters."""
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
    """One row per {label: verdict}: its category, and the detail."""
    rows = list(verdicts.values())
    labels = list(verdicts)
    table = pd.DataFrame(rows, index=labels)
    return table[["category", "detail"]]


def oddities(frame: pd.DataFrame) -> str:
    """How many answers of `judge_answers` say something about our limits, and not about a model."""
    is_cut = frame.finish == "length"
    is_refused = frame.category == "refused"
    depends_on_rule = frame.passed != frame.ours
    return (
        f"{is_cut.sum()} cut at max_tokens, "
        f"{frame.late.sum()} failed only because the testbench ran out of time, "
        f"{is_refused.sum()} refused by us that verilog-eval would run, "
        f"{depends_on_rule.sum()} judged otherwise by our own rule for finding the module")


def categories(judged: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """How many answers of each model and plan got which category, the most passes first.

    Args:
      judged: {model: from `judge_answers`}.
    """
    every = pd.concat(judged)
    model = pd.Grouper(level=0)
    counted = every.groupby([model, "plan"]).category.value_counts()
    table = counted.unstack(fill_value=0)
    if "pass" in table:
        table = table.sort_values("pass", ascending=False)
    return table


def shortest_failure(
        frame: pd.DataFrame, samples: Samples, plan: str, problems: Iterable[Problem]
        ) -> tuple[Problem, str] | None:
    """The shortest module that runs and differs, with its problem; None if there's none.

    Args:
      frame: from `judge_answers`.
      samples: the answers that it judged.
    """
    by_name = {problem.name: problem for problem in problems}
    of_plan = frame[frame.plan == plan]
    differing = of_plan[of_plan.category == "mismatch"]
    shortest = None
    least = 0  # characters of the shortest
    for row in differing.to_dict("records"):
        name = row["problem"]
        problem = by_name[name]
        answer = samples[plan, name, row["index"]]
        extracted = extraction.extract_code(answer["text"], problem.interface)
        code = extracted.code or ""
        if shortest is None or len(code) < least:
            shortest = problem, code
            least = len(code)
    return shortest


# ---- Waveforms ----

SIGNAL = re.compile(r"\$var \w+ +(\d+) +(\S+) +(\S+)[^$]*\$end")
CHANGE = re.compile(r"(?:b([01xz]+) |([01xz]))(\S+)")


def waveform(path: str | Path) -> pd.DataFrame:
    """A waveform file (VCD) as a table of texts: a row per time of a change, a column a signal."""
    text = Path(path).read_text(errors="replace")
    head, _, body = text.partition("$enddefinitions")
    signals = _signals(head)
    rows: dict[int, dict[str, str]] = {}  # by time
    for change in changes(body):
        signal = signals[change.key]
        bits = padded(change.bits, signal.width)
        row = rows.setdefault(change.time, {})
        row[signal.name] = bits
    columns = [signal.name for signal in signals.values()]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    return table.ffill()


def before_first_mismatch(table: pd.DataFrame, log: str) -> pd.DataFrame:
    """The rows of a `waveform` up to the first comparison that failed, by a testbench's log.

    An edge of the clock compares what stood there just before. So the last row is what was
    compared. Without such a line in the log it's the whole table.
    """
    times = re.findall(r"First mismatch occurred at time (\d+)", log)
    if not times:
        return table
    first = min(map(int, times))
    return table.loc[:first - 1]


def wrong_outputs(row: "pd.Series[str]") -> list[str]:
    """The outputs that differ in a row of a `waveform`: `x` for signals `x_ref` and `x_dut`."""
    names = []
    for signal in row.index:
        name = signal.removesuffix("_ref")
        twin = f"{name}_dut"
        has_twin = name != signal and twin in row.index
        if has_twin and row[signal] != row[twin]:
            names.append(name)
    return names


def what_differs(row: "pd.Series[str]") -> list[str]:
    """A sentence for each of `wrong_outputs`."""
    sentences = []
    for name in wrong_outputs(row):
        wanted = row[f"{name}_ref"]
        given = row[f"{name}_dut"]
        sentences.append(
            f"In the last column, {name} should be {wanted}, and the answer gives {given}.")
    return sentences


class Signal(NamedTuple):
    """A signal of a VCD file."""

    name: str
    width: int  # bits


def _signals(head: str) -> dict[str, Signal]:
    """The signals that a VCD file defines, by their keys; of several names the first counts."""
    signals: dict[str, Signal] = {}
    for width, key, name in SIGNAL.findall(head):
        signal = Signal(name, int(width))
        signals.setdefault(key, signal)
    return signals


class Change(NamedTuple):
    """A line of a VCD file: at this time a signal took other bits."""

    time: int
    key: str   # the signal's, in this file
    bits: str


def changes(body: str) -> Iterator[Change]:
    """Every change in a VCD file behind its definitions."""
    time = 0
    for line in body.splitlines():
        if line.startswith("#"):
            time = int(line[1:])
            continue
        change = CHANGE.fullmatch(line)
        if change:
            bits = change[1] or change[2]
            yield Change(time, change[3], bits)


def padded(bits: str, width: int) -> str:
    """The bits that a VCD file leaves out in front are 0, or x or z where the first one is."""
    first = bits[0]
    filling = "0" if first == "1" else first
    return bits.rjust(width, filling)


# ---- Scores ----

def counts(frame: pd.DataFrame, plan: str, names: Sequence[str]) -> list[tuple[int, int]]:
    """(passing answers, answers) per problem for one plan, in the order of `names`."""
    answers = frame[frame.plan == plan]
    passed = answers.groupby("problem").passed
    table = pd.DataFrame({
        "passing": passed.sum(),
        "answers": passed.size()})
    ordered = table.reindex(names)
    is_there = ordered.notna()
    assert is_there.all(axis=None), "an answer is missing from the denominator"
    rows = ordered.astype(int).itertuples(index=False, name=None)
    return list(rows)


def all_counts(
        judged: Mapping[str, pd.DataFrame], plans: Iterable[Plan], names: Sequence[str]
        ) -> dict[tuple[str, str], Run]:
    """`counts` of every model and plan that was asked of it, by (model, plan)."""
    runs: dict[tuple[str, str], Run] = {}
    for plan in plans:
        for model, frame in judged.items():
            if plan.is_asked_of(model):
                runs[model, plan.name] = counts(frame, plan.name, names)
    return runs


def of_model(runs: Runs, model: str) -> dict[str, Run]:
    """{plan: counts} of one model."""
    by_plan = {}
    for (asked, plan), run in runs.items():
        if asked == model:
            by_plan[plan] = run
    return by_plan


def per_problem(run: Run, k: int) -> Floats:
    """pass@k of every problem, from its (passing answers, answers)."""
    values = []
    for passing, answers in run:
        value = pass_at_k(answers, passing, k)
        values.append(value)
    return np.array(values)


def board(runs: Runs, subsets: Mapping[str, Sequence[bool]]) -> pd.DataFrame:
    """One row per model, plan and k: the score with its interval, and that on each subset.

    Args:
      runs: {(model, plan): [(passing, answers) per problem]}.
      subsets: {column: one bool per problem}; a column that only repeats the score is left out.
    """
    kept = {}
    for name, subset in subsets.items():
        chosen = np.array(subset, bool)
        size = chosen.sum()
        if 0 < size < len(chosen):
            kept[name] = chosen

    rows = {}
    for (model, plan), run in runs.items():
        fewest = min([answers for _, answers in run])
        for k in AT_K:
            if k > fewest:
                continue
            name = f"pass@{k}"
            rows[plan, name, model] = _scores(run, k, kept)
    frame = pd.DataFrame.from_dict(rows, orient="index")
    names = ["plan", "score", "model"]
    frame.index = pd.MultiIndex.from_tuples(frame.index, names=names)
    return frame.sort_index()


def _scores(run: Run, k: int, subsets: Mapping[str, NDArray[np.bool_]]) -> dict[str, float]:
    """One row of `board`."""
    values = per_problem(run, k)
    mean, low, high = score(values)
    row = {
        "all": mean,
        "low": low,
        "high": high}
    for name, chosen in subsets.items():
        part = values[chosen]
        row[name] = part.mean()
    return row


def percents(table: pd.DataFrame) -> pd.DataFrame:
    """A `board` to read: base and tuned side by side, as "74 (63 to 84)", in percent."""
    columns = {"": _percents_of_problems(table)}
    for name in table.columns.drop(["all", "low", "high"]):
        percent = 100 * table[name]
        columns[name] = percent.map("{:.0f}".format)
    long = pd.DataFrame(columns)
    wide = long.unstack("model").fillna("not asked")
    headings = []
    for name, model in wide.columns:
        heading = f"{model} {name}"
        headings.append(heading.strip())
    wide.columns = headings
    return wide


def _percents_of_problems(table: pd.DataFrame) -> "pd.Series[str]":
    """The score of each row of a `board` with its interval, in percent."""
    percent = 100 * table
    shown = {}
    for place, row in percent.iterrows():
        interval = f"{row['low']:.0f} to {row['high']:.0f}"
        shown[place] = f"{row['all']:.0f} ({interval})"
    return pd.Series(shown).reindex(table.index)


def summary(frame: pd.DataFrame, runs: Mapping[str, Run], names: Sequence[str]) -> dict[str, Any]:
    """What 07 keeps of one model: categories of its answers, and counts per problem, by plan.

    Args:
      frame: from `judge_answers`.
      runs: {plan: [(passing, answers) per problem]}.
      names: the problems, in that order.
    """
    categories = {}
    for plan, group in frame.groupby("plan"):
        categories[plan] = group.category.value_counts().to_dict()
    by_problem = {}
    for plan, run in runs.items():
        by_problem[plan] = dict(zip(names, run, strict=True))
    return {"categories": categories, "counts": by_problem}


def save(
        folder: Path, judged: Mapping[str, pd.DataFrame], runs: Runs, names: Sequence[str],
        about: Mapping[str, Any]) -> None:
    """Write `summary.json` and `per_problem.csv` of each model into its folder in `folder`.

    Args:
      judged: {model: from `judge_answers`}.
      runs: from `all_counts`.
      names: the problems, in that order.
      about: what else a summary says: settings, versions.
    """
    for model, frame in judged.items():
        place = folder / model
        per_problem_csv(frame, place / "per_problem.csv")
        counted = summary(frame, of_model(runs, model), names)
        write_json(place / "summary.json", {**about, **counted})


def verdict_on(difference: tuple[float, float, float], p: float) -> str:
    """What a comparison of tuned minus base says, in words.

    A difference is shown if its interval leaves out zero and signs alone give it in fewer than one
    case of twenty. If just one of the two holds, it's at the edge.

    Args:
      difference: mean and 95% interval.
      p: how often signs alone come as far.
    """
    mean, low, high = difference
    if low == high == 0:
        return "no difference"
    leaves_out_zero = low > 0 or high < 0
    is_rare = p < 0.05
    if leaves_out_zero and is_rare:
        return "the tuned model is better" if mean > 0 else "the base is better"
    if leaves_out_zero or is_rare:
        return "at the edge of luck"
    return "could be luck"


class Wordings(NamedTuple):
    """How two models are asked that are compared: by which plan the base, by which the tuned."""

    base: str
    tuned: str


def compared_wordings(plans: Sequence[Plan], rival: str) -> list[Wordings]:
    """Which comparisons 07 makes, the primary one first: the tuned model in its chat and its rival.

    The others are the tuned model and the base in every other wording that was sampled, and both
    models in each wording that both were asked greedily.

    Args:
      rival: the name of the plan that suits the base best.
    """
    compared = [Wordings(base=rival, tuned=FIVE.name)]
    for name in sampled_wordings(plans):
        if name != rival:
            compared.append(Wordings(base=name, tuned=FIVE.name))
    for name in greedy_of_both(plans):
        compared.append(Wordings(base=name, tuned=name))
    return compared


def pairs_of(runs: Runs, wordings: Iterable[Wordings]) -> dict[Wordings, Comparison]:
    """Base and tuned model on the same problems, by the share of a problem's answers that pass."""
    pairs = {}
    for asked in wordings:
        base = per_problem(runs["base", asked.base], 1)
        tuned = per_problem(runs["tuned", asked.tuned], 1)
        pairs[asked] = compare(base, tuned)
    return pairs


def pairs_table(pairs: Mapping[Wordings, Comparison], primary: Wordings) -> pd.DataFrame:
    """A row for each comparison, the primary one first, in percent and points.

    The primary comparison is judged by its own p. Whoever looks at several others finds one that
    looks good by chance, so those are judged by `stats.holm` over all comparisons of the table.
    """
    ps = [compared["p"] for compared in pairs.values()]
    corrected = dict(zip(pairs, holm(ps), strict=True))
    secondary = [asked for asked in pairs if asked != primary]
    rows = []
    for asked in (primary, *secondary):
        compared = pairs[asked]
        difference = compared["difference"]
        if asked == primary:
            rank = "primary"
            deciding = compared["p"]
            by_holm = ""
        else:
            rank = "secondary"
            deciding = corrected[asked]
            by_holm = f"{deciding:.2g}"
        base, *_ = compared["first"]
        tuned, *_ = compared["second"]
        rows.append({
            "": rank,
            "base asked by": asked.base,
            "tuned asked by": asked.tuned,
            "base": f"{100 * base:.0f}",
            "tuned": f"{100 * tuned:.0f}",
            "difference": in_points(difference),
            "p": f"{compared['p']:.2g}",
            "p by Holm": by_holm,
            "verdict": verdict_on(difference, deciding)})
    return pd.DataFrame(rows)


def in_points(difference: tuple[float, float, float]) -> str:
    """A mean of shares with its interval, as "+11.6 (+0.5 to +22.6)"."""
    mean, low, high = (100 * part for part in difference)
    interval = f"{low:+.1f} to {high:+.1f}"
    return f"{mean:+.1f} ({interval})"


def findings(
        pairs: Mapping[Wordings, Comparison], primary: Wordings, runs: Runs) -> list[str]:
    """What the comparisons say: the primary one, and wordings by which no tuned answer passes."""
    compared = pairs[primary]
    difference = compared["difference"]
    p = compared["p"]
    verdict = verdict_on(difference, p)
    points = in_points(difference)
    lines = [f"Primary: {points} points, p = {p:.2g}: {verdict}."]
    if verdict == "at the edge of luck":
        lines.append("Interval and p disagree, so this run doesn't decide it.")

    for plan, run in of_model(runs, "tuned").items():
        passed = 0
        asked = 0
        for passing, answers in run:
            passed += passing
            asked += answers
        if passed == 0:
            lines.append(f"Asked by {plan}, the tuned model passes 0 of {asked}.")
    return lines


def comparison(
        pairs: Mapping[Wordings, Comparison], primary: Wordings, names: Sequence[str],
        table: pd.DataFrame) -> dict[str, Any]:
    """What 07 keeps of the comparisons of a tuned model with its base, in every sampled wording.

    Args:
      names: of the plans that the base was sampled by.
      table: a `board`. Of it we keep every pass@k of both models by the tuned one's plan.
    """
    against = {}
    for name in names:
        compared = pairs[Wordings(name, primary.tuned)]
        mean, *bounds = compared["difference"]
        against[name] = {
            "difference": mean,
            "interval": bounds,
            "p": compared["p"]}
    kept = {"rival": primary.base, "against": against}

    by_plan = table.loc[primary.tuned]
    n_problems = len(pairs[primary]["values"])
    for model in ("tuned", "base"):
        at_k = by_plan.xs(model, level="model")["all"].to_dict()
        kept[model] = at_k | {"n_problems": n_problems}
    return kept
