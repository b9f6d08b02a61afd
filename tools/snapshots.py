"""Animate an answer that gets better: one request, asked again as training goes on.

    .venv/bin/python tools/snapshots.py assets/figures/counter.json     writes counter.svg
    .venv/bin/python tools/snapshots.py snapshots.json -o x.svg

The file has what 00 has seen:

    {"request": "The counter state goes up when inc is 1 ...",
     "snapshots": [[0, "state to 0."], [5, "..."], [36, "module TopModule ..."]]}

The request is part of the prompt of a problem in data/tiny_eval. So the judge of 07 says of each
answer whether it passes, and which ports have names that nobody asked for (you need Icarus).

The SVG loops through the snapshots and rests on the last. Each has its verdict below it. Where
animations aren't run (a reader who wants less motion, a converter, a print) it shows the last one.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from drawings import FOLDER, ROOT, write
from svg import Sheet

sys.path.insert(0, str(ROOT))

import verilog  # noqa: E402
from verilog.extraction import port_names  # noqa: E402
from verilog.judging import Verdict  # noqa: E402
from verilog.problems import Problem  # noqa: E402

EACH, LAST = 2.2, 6.0  # seconds that a snapshot stays, and the last of them
WIDTH = 640            # narrow, so that a phone shows large letters
COLUMNS = 46           # letters of a line of an answer
ASKED = 64             # letters of a line of the request
MOST = 18              # lines of an answer that are shown
LINE = 25              # units from line to line
LETTER = 0.602         # width of a letter in a font of equal widths, as a share of its size
SIZE = 19              # of an answer's letters


class Snapshot(NamedTuple):
    """One answer, and what the judge says of it."""

    step: int     # optimizer steps before it
    answer: str
    passed: bool
    verdict: str  # in a few words
    wrong: tuple[str, ...] = ()  # names of ports that nobody asked for


def judged(pairs: Sequence[tuple[int, str]], request: str) -> list[Snapshot]:
    """The snapshots with the verdicts of 07's judge.

    Args:
      pairs: (optimizer steps, answer).
      request: part of the prompt of one problem of data/tiny_eval.

    Raises:
      ValueError: no problem asks that.
    """
    problems = verilog.load_problems(ROOT / "data" / "tiny_eval")
    asking = [problem for problem in problems if request and request in problem.prompt]
    if len(asking) != 1:
        raise ValueError(f"{len(asking)} problems of data/tiny_eval ask {request!r}")
    problem = asking[0]
    codes = [verilog.extract_code(answer).code for _, answer in pairs]
    verdicts = verilog.judge_many([(problem, code) for code in codes])
    found = []
    for (step, answer), verdict in zip(pairs, verdicts, strict=True):
        wrong, missing = differing_ports(problem, answer)
        text = in_a_few_words(verdict, missing)
        found.append(Snapshot(step, answer, verdict.passed, text, wrong))
    return found


def differing_ports(problem: Problem, answer: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names of an answer's ports that nobody asked for, names that it lacks)."""
    asked, given = port_names(problem.reference), port_names(answer)
    wrong = tuple(name for name in given if name not in asked)
    missing = tuple(name for name in asked if name not in given)
    return wrong, missing


def in_a_few_words(verdict: Verdict, missing: Sequence[str]) -> str:
    """What the simulator found.

    Args:
      missing: the names of the ports that the answer lacks.
    """
    if verdict.passed:
        return f"PASS: all {verdict.samples} samples are right"
    if verdict.category == "no code":
        return "FAIL: this isn't a module"
    if verdict.category == "compile" and missing:
        return f"FAIL: no port is called {' or '.join(missing)}"
    if verdict.mismatches is not None:
        return f"FAIL: {verdict.mismatches} of {verdict.samples} samples are wrong"
    return f"FAIL: {verdict.category}"


def animate(shots: Sequence[Snapshot], request: str = "", name: str = "counter") -> str:
    """An SVG file that shows one answer after the other.

    Args:
      shots: in the order of their steps.
      request: what was asked.
      name: the file's, without `.svg`.

    Raises:
      ValueError: there are no snapshots, or their steps don't rise.
    """
    steps = [shot.step for shot in shots]
    if not steps or steps != sorted(set(steps)):
        raise ValueError(f"the steps of the snapshots are {steps}; at least one is needed, and "
                         "each has to be larger than the one before")
    answers = [shown(shot.answer) for shot in shots]
    asked = textwrap.wrap(" ".join(request.split()), ASKED, max_lines=4, placeholder=" …")
    longest = max(len(lines) for lines in answers)
    road = 88 + 23 * len(asked)  # where the line of the steps is drawn
    code = road + 92             # where the answer begins
    told = [f"After {shot.step} steps: {shot.verdict}." for shot in shots]
    sheet = Sheet(name, code + longest * LINE + 84, headline(shots),
                  f"{request.strip()} {' '.join(told)} The last answer: {shots[-1].answer.strip()}",
                  WIDTH)
    sheet.words(25, 44, headline(shots), 22, bold=True)
    sheet.lines(25, 76, asked, 23, size=18, color="soft")
    _road(sheet, shots, road)
    sheet.rectangle(25, code - 32, WIDTH - 50, longest * LINE + 34, "gray", radius=8, line=0)
    for place, shot in enumerate(shots):
        sheet.add(f'<g class="shot-{place}" opacity="{int(place == len(steps) - 1)}">')
        _here(sheet, shots, place, road)
        _answer(sheet, answers[place], shot.wrong, code)
        _verdict(sheet, shot)
        sheet.add("</g>")
    sheet.rules += _motion(name, len(steps))
    return sheet.text()


def headline(shots: Sequence[Snapshot]) -> str:
    """The result: from which snapshot on every answer passes."""
    first = None
    for shot in reversed(shots):
        if not shot.passed:
            break
        first = shot.step
    if first is None:
        return f"After {shots[-1].step} training steps it still fails"
    return f"After {first} training steps the answer passes"


def shown(text: str) -> list[str]:
    """An answer as lines that fit: long ones go on below, and what's too much is cut off."""
    lines: list[str] = []
    spaced = text.strip("\n").expandtabs(4)
    for line in spaced.split("\n"):
        clean = _printable(line)
        wrapped = textwrap.wrap(clean, COLUMNS, drop_whitespace=False)
        lines += wrapped or [""]
    if len(lines) > MOST:
        lines = [*lines[:MOST - 1], "…"]
    return lines


def _printable(line: str) -> str:
    """A line with � for each letter that can't be shown."""
    letters = []
    for letter in line:
        letters.append(letter if letter.isprintable() else "�")
    return "".join(letters)


def _road(sheet: Sheet, shots: Sequence[Snapshot], y: float) -> None:
    """What stays: the line of the steps. Green stops pass, red ones fail."""
    sheet.words(25, y + 6, "steps", 18, "soft")
    sheet.line([(_stop(shots, 0), y), (_stop(shots, len(shots) - 1), y)], "soft", 2)
    for place, shot in enumerate(shots):
        x = _stop(shots, place)
        color = "green" if shot.passed else "red"
        sheet.circle(x, y, 9, color, 2)
        sheet.words(x, y + 36, str(shot.step), 18, "soft", "middle")


def _stop(shots: Sequence[Snapshot], place: int) -> float:
    """Where a snapshot stands on the road: at its share of the steps, but apart from the others."""
    first, last = 110.0, WIDTH - 45.0
    if len(shots) == 1:
        return last
    by_step = (shots[place].step - shots[0].step) / (shots[-1].step - shots[0].step)
    by_place = place / (len(shots) - 1)
    return first + (last - first) * (by_step + by_place) / 2


def _here(sheet: Sheet, shots: Sequence[Snapshot], place: int, y: float) -> None:
    """The stop of one snapshot is filled, and its number is bold."""
    x = _stop(shots, place)
    color = "green" if shots[place].passed else "red"
    sheet.circle(x, y, 12, f"{color}-solid", 0)
    sheet.words(x, y + 36, str(shots[place].step), 18, "ink", "middle", bold=True)


def _answer(sheet: Sheet, lines: Sequence[str], wrong: Sequence[str], y: float) -> None:
    """The answer's lines; wrong names are underlined in red."""
    sheet.lines(42, y, lines, LINE, size=SIZE, color="ink", mono=True)
    if len(lines) == 1 and len(lines[0]) < 3:
        sheet.words(42 + 40, y, "is the whole answer", 18, "soft")
    for row, line in enumerate(lines):
        for name in wrong:
            for place in re.finditer(rf"\b{re.escape(name)}\b", line):
                start = 42 + SIZE * LETTER * place.start()
                end = 42 + SIZE * LETTER * place.end()
                below = y + row * LINE + 5
                sheet.line([(start, below), (end, below)], "red", 3)


def _verdict(sheet: Sheet, shot: Snapshot) -> None:
    """The simulator's word, at the bottom."""
    color = "green" if shot.passed else "red"
    y = sheet.height - 66
    sheet.rectangle(25, y, WIDTH - 50, 46, color, radius=8, line=2)
    sheet.words(WIDTH / 2, y + 30, shot.verdict, 21, color, "middle", bold=True)


def _motion(name: str, count: int) -> list[str]:
    """CSS: each snapshot is seen in its time. Without animation only the last one is."""
    seconds = EACH * (count - 1) + LAST
    rules = []
    for place in range(count):
        is_last = place == count - 1
        begin = 100 * EACH * place / seconds  # per cent of the animation
        end = 100.0
        if not is_last:
            end = 100 * EACH * (place + 1) / seconds
        frames = _frames(begin, end)
        opacity = 1 if is_last else 0
        rules.append(f"@keyframes {name}-{place} {{ {frames} }}")
        rules.append(f"#{name} .shot-{place} {{ opacity: {opacity}; "
                     f"animation: {name}-{place} {seconds:g}s step-end infinite }}")

    still = f'#{name} g[class^="shot"] {{ animation: none }}'
    rules.append(f"@media (prefers-reduced-motion: reduce) {{ {still} }}")
    return rules


def _frames(begin: float, end: float) -> str:
    """CSS: seen from `begin` to `end`, in per cent of the animation, and not before or after."""
    frames = [f"{begin:.2f}%, {end:.2f}% {{ opacity: 1 }}"]
    if begin > 0:
        frames.insert(0, f"0%, {begin - 0.01:.2f}% {{ opacity: 0 }}")
    if end < 100:
        frames.append(f"{end + 0.01:.2f}%, 100% {{ opacity: 0 }}")
    return " ".join(frames)


def main() -> None:
    """Read the snapshots, have them judged, and write the SVG."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="the snapshots, as JSON")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER / "counter.svg")
    options = parser.parse_args()
    try:
        found = json.loads(options.file.read_text(encoding="utf-8"))
        pairs = [(int(step), str(text)) for step, text in found["snapshots"]]
        shots = judged(pairs, found["request"])
        text = animate(shots, found["request"], options.output.stem)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{options.file} holds no snapshots as the head of this program describes "
                     f"them: {error!r}")
    write(options.output, text)
    print(f"drew {options.output}")


if __name__ == "__main__":
    main()
