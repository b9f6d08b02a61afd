"""Problems: Verilog's, in verilog-eval's layout, and any other questions with references."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables.errors import UserError
from tables.texts import JsonLine, json_lines, split_thought

Pair = tuple["Problem", str | None]  # a problem, and what counts of an answer to it; None: nothing
Grade = Callable[[Sequence[Pair]], list[float]]
TEXT = str, int, float
Score = Callable[[str, str, str], float]  # (question, answer, reference) -> 0 to 1


@dataclass(frozen=True)
class Problem:
    """A question and its right answer; Verilog's have a testbench, code-complete's a header too."""

    name: str
    prompt: str
    reference: str
    testbench: str = ""
    interface: str = ""

    @property
    def right_answer(self) -> str:
        """A Verilog problem's reference, as if a model had written it."""
        return self.reference.replace("RefModule", "TopModule")


def load_problems(folder: str | Path) -> list[Problem]:
    """The problems in a verilog-eval dataset folder, by name.

    Raises:
      UserError: there is no problem in it; or one lacks a file, or what the file has to define.
    """
    folder = Path(folder)
    names = set()
    for suffix in DEFINES:
        for path in folder.glob(f"*{suffix}"):
            name = path.name.removesuffix(suffix)
            names.add(name)
    if not names:
        missing = ""
        if not folder.is_dir():
            missing = " (there is no such folder)"
        raise UserError(f"{folder} holds no verilog-eval problem{missing}: {FILES}.")
    return [_loaded(folder, name) for name in sorted(names)]


def _loaded(folder: Path, name: str) -> Problem:
    """One problem of a folder, with the header of code-complete if it has one."""
    prompt, reference, testbench = [read_part(folder, name, suffix) for suffix in DEFINES]
    header = folder / f"{name}_ifc.txt"
    interface = ""
    if header.exists():
        interface = header.read_text(encoding="utf-8", errors="replace")
    return Problem(name, prompt, reference, testbench, interface)


# What verilog-eval's files end in, in the order of `Problem`'s fields, and what each has to hold.
DEFINES = {"_prompt.txt": r"\S", "_ref.sv": r"\bRefModule\b", "_test.sv": r"\bTopModule\b"}
FILES = "each needs *_prompt.txt, *_ref.sv (module RefModule) and *_test.sv (which tests TopModule)"


def read_part(folder: Path, name: str, suffix: str) -> str:
    """One file of a problem.

    Raises:
      UserError: it's missing, or lacks what it has to define.
    """
    path = folder / f"{name}{suffix}"
    if not path.is_file():
        raise UserError(f"{path} is missing: {FILES}.")
    text = path.read_text(encoding="utf-8", errors="replace")
    pattern = DEFINES[suffix]
    if not re.search(pattern, text):
        raise UserError(f"{path} is broken, so nobody could be judged by it: {FILES}.")
    return text


# ---- Another benchmark than Verilog ----

def contains(question: str, answer: str, reference: str) -> float:
    """1.0 where the reference stands somewhere in the answer, whatever its case.

    Raises:
      UserError: the reference is empty, so every answer would contain it.
    """
    wanted = _words(reference)
    if not wanted:
        raise UserError(f"The answer to {question[:80]!r} is empty in your file, so whatever a "
                        "model says contains it. Write an answer, or give a score of your own.")
    given = _words(answer)
    return float(wanted in given)


def _words(text: str) -> str:
    """A text's words in small letters, with one space between two."""
    words = text.lower().split()
    return " ".join(words)


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark is: problems, how an answer is read, and how it is scored.

    `asking` samples answers to the problems, `scores` compares models on them; neither knows more
    of a benchmark than this.
    """

    problems: tuple[Problem, ...]
    # (text, problem) -> what counts of an answer, or None
    extract: Callable[[str, Problem], str | None]
    # pairs of a problem and an extracted answer -> a score from 0 to 1 for each, 1 for a pass
    grade: Grade


def questions(path: str | Path, score: Score = contains) -> Benchmark:
    """A `Benchmark` from a file with one {"question": ..., "answer": ...} per line.

    Args:
      path: the file (.jsonl, UTF-8). An answer may be a number; blank lines are skipped.
      score: score(question, answer, reference) -> float from 0 to 1; your own, or `contains`. An
        answer comes without a thought that it begins with.

    Raises:
      UserError: there is no such file, no line, or one without these two texts.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There is no file {path}. Give one with a question and its answer a line.")
    content = path.read_bytes()
    problems = []
    for line in json_lines(content):
        pair = question_and_answer(line)
        if pair is None:
            raise UserError(f"{path}, line {line.number}: give each line as "
                            '{"question": "...", "answer": "..."}, in UTF-8.')
        question, answer = pair
        name = f"{line.number:05d}"
        problem = Problem(name, question, answer)
        problems.append(problem)
    if not problems:
        raise UserError(f"{path} holds no question.")

    return Benchmark(tuple(problems), stripped, graded_by(score))


def stripped(text: str, question: Problem) -> str | None:
    """An answer without a thought before it and the space around it; None if nothing is left."""
    return split_thought(text).rest.strip() or None


def is_share(value: Any) -> bool:
    """Is it a number from 0 to 1? None, NaN and percents aren't."""
    try:
        return 0 <= float(value) <= 1
    except (TypeError, ValueError):
        return False


def graded_by(score: Score) -> Grade:
    """Grade each answer by `score`; no answer scores 0.

    The grading raises UserError if `score` returns anything but a number from 0 to 1.
    """
    def grade(pairs: Sequence[Pair]) -> list[float]:
        values = []
        for question, answer in pairs:
            value = 0.0
            if answer:
                value = score(question.prompt, answer, question.reference)
            if not is_share(value):
                raise UserError(f"score returned {value} for the answer to question "
                                f"{question.name}. It has to return a number from 0 to 1.")
            values.append(float(value))
        return values
    return grade


def question_and_answer(line: JsonLine) -> tuple[str, str] | None:
    """The two texts of a line; None if it lacks one, or isn't UTF-8."""
    if not isinstance(line.value, dict):
        return None
    question = line.value.get("question")
    answer = line.value.get("answer")
    for text in (question, answer):
        if not isinstance(text, TEXT):
            return None
    try:
        line.text.encode()
    except UnicodeEncodeError:  # the file's bytes were no UTF-8
        return None
    return str(question), str(answer)
