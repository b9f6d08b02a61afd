"""Problems: Verilog's, in verilog-eval's layout, and any other questions with references."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tables.errors import UserError


@dataclass(frozen=True)
class Problem:
    """A question and its right answer; Verilog's have a testbench, code-complete's the header, too."""

    name: str
    prompt: str
    reference: str
    testbench: str = ""
    interface: str = ""


def load_problems(folder):
    """The problems in a verilog-eval dataset folder, by name.

    Raises:
      UserError: there is no problem in it, or one lacks a file.
    """
    folder, suffixes = Path(folder), ("_prompt.txt", "_ref.sv", "_test.sv")
    names = sorted({path.name.removesuffix(suffix) for suffix in suffixes
                    for path in folder.glob(f"*{suffix}")})
    if not names:
        raise UserError(f"{folder} holds no verilog-eval problem (*_prompt.txt, *_ref.sv, "
                         "*_test.sv).")

    def read(name, suffix):
        path = folder / f"{name}{suffix}"
        if suffix in suffixes and not path.exists():
            raise UserError(f"{path} is missing. Each problem needs *_prompt.txt, *_ref.sv and "
                             "*_test.sv.")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    return [Problem(name, *(read(name, suffix) for suffix in (*suffixes, "_ifc.txt")))
            for name in names]


# ---- Another benchmark than Verilog ----

def contains(question, answer, reference):
    """1.0 where the reference stands somewhere in the answer, whatever its case."""
    return float(" ".join(reference.lower().split()) in " ".join(answer.lower().split()))


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark is: problems, how an answer is read, and how it is scored.

    `asking` samples answers to the problems, `scores` compares models on them; neither knows more of
    a benchmark than this.
    """

    problems: tuple    # `Problem` objects
    extract: Callable  # (text, problem) -> what counts of an answer, or None
    grade: Callable    # [(problem, extracted answer)] -> a score from 0 to 1 for each, 1 for a pass


def questions(path, score=contains):
    """A `Benchmark` from a file with one {"question": ..., "answer": ...} per line.

    Args:
      path: the file (.jsonl, UTF-8).
      score: score(question, answer, reference) -> float from 0 to 1; your own, or `contains`.

    Raises:
      UserError: no line, or one without these two texts.
    """
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            found.append(Problem(f"{number:05d}", str(row["question"]), str(row["answer"])))
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: give each line as "
                             '{"question": "...", "answer": "..."}.') from None
    if not found:
        raise UserError(f"{path} holds no question.")
    return Benchmark(tuple(found), lambda text, question: text.strip() or None,
                     lambda pairs: [score(question.prompt, answer, question.reference)
                                    if answer else 0.0 for question, answer in pairs])
