"""Animate an answer that gets better: one request, asked again as training goes on.

    .venv/bin/python tools/snapshots.py assets/figures/counter.json     writes counter.svg
    .venv/bin/python tools/snapshots.py snapshots.json -o x.svg

The file has what 00 has seen:

    {"request": "The counter state goes up when inc is 1 ...",
     "snapshots": [[0, "state to 0."], [5, "..."], [36, "module TopModule ..."]],
     "verdict": "PASS: 0 mismatches in 406 samples", "passed": true}

The SVG loops through the snapshots and rests on the last, with the simulator's verdict. Where
animations aren't run (a reader who wants less motion, a converter, a print) it shows that last one.
"""

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from drawings import FOLDER, write
from svg import WIDTH, Sheet

TITLE = "One request, asked again while the model learns"
EACH, LAST = 1.8, 6.0  # seconds that a snapshot stays, and the last of them
COLUMNS = 76           # letters of a line
MOST = 18              # lines of an answer that are shown
LINE = 23              # units from line to line
ROAD = 130             # where the line of the steps is drawn
CODE = 210             # where the answer begins


def animate(snapshots: Sequence[tuple[int, str]], verdict: str, passed: bool, request: str = "",
            name: str = "counter") -> str:
    """An SVG file that shows one answer after the other.

    Args:
      snapshots: (optimizer steps, answer), in the order of the steps.
      verdict: of the last answer, as the simulator gave it; shown with it alone.
      passed: whether that is a success.
      request: what was asked.
      name: the file's, without `.svg`.

    Raises:
      ValueError: there are no snapshots, or their steps don't rise.
    """
    steps = []
    answers = []
    for step, text in snapshots:
        steps.append(step)
        answers.append(shown(text))
    if not steps or steps != sorted(set(steps)):
        raise ValueError(f"the steps of the snapshots are {steps}; at least one is needed, and "
                         "each has to be larger than the one before")

    last_step, last_text = snapshots[-1]
    longest = max(map(len, answers))
    height = CODE + longest * LINE + 76
    description = (
        f"{request.strip()} After {last_step} optimizer steps the answer is: {last_text.strip()} "
        f"The simulator says: {verdict}")
    sheet = Sheet(name, height, TITLE, description)
    _frame_of(sheet, steps, request, longest)
    last = len(steps) - 1
    for place, lines in enumerate(answers):
        opacity = 1 if place == last else 0
        sheet.add(f'<g class="shot-{place}" opacity="{opacity}">')
        _snapshot(sheet, place, steps, lines)
        if place == last:
            _verdict(sheet, verdict, passed)
        sheet.add("</g>")
    sheet.rules += _motion(name, len(steps))
    return sheet.text()


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


def _frame_of(sheet: Sheet, steps: Sequence[int], request: str, longest: int) -> None:
    """What stays: the request, the road of the steps, the background of the answer."""
    sheet.words(35, 42, TITLE, 21, bold=True)
    one_line = " ".join(request.split())
    asked = textwrap.wrap(one_line, 96, max_lines=2, placeholder=" …")
    sheet.lines(35, 72, asked, size=17, colour="soft")

    sheet.words(35, ROAD + 6, "optimizer steps", 17, "soft")
    begin = _stop(steps, 0)
    end = _stop(steps, len(steps) - 1)
    sheet.line([(begin, ROAD), (end, ROAD)], "soft", 2)
    for place, step in enumerate(steps):
        x = _stop(steps, place)
        sheet.circle(x, ROAD, 7, "page", 2)
        sheet.words(x, ROAD + 32, str(step), 17, "soft", "middle")

    height = longest * LINE + 32
    sheet.rectangle(35, CODE - 30, WIDTH - 70, height, "grey", radius=8, line=0)


def _stop(steps: Sequence[int], place: int) -> float:
    """Where a snapshot stands on the road: at its share of the steps, but apart from the others."""
    first = 190.0
    last = WIDTH - 55.0
    if len(steps) == 1:
        return last
    since_first = steps[place] - steps[0]
    by_step = since_first / (steps[-1] - steps[0])
    by_place = place / (len(steps) - 1)
    return first + (last - first) * (by_step + by_place) / 2


def _snapshot(sheet: Sheet, place: int, steps: Sequence[int], lines: Sequence[str]) -> None:
    """What belongs to one snapshot: its stop is lit, and its answer stands below."""
    x = _stop(steps, place)
    step = str(steps[place])
    sheet.circle(x, ROAD, 9, "blue-solid", 0)
    sheet.words(x, ROAD + 32, step, 17, "ink", "middle", bold=True)
    sheet.lines(50, CODE, lines, LINE, size=17, colour="ink", mono=True)


def _verdict(sheet: Sheet, verdict: str, passed: bool) -> None:
    """The simulator's word, at the bottom."""
    colour = "green" if passed else "red"
    y = sheet.height - 62
    sheet.rectangle(35, y, WIDTH - 70, 42, colour, radius=8, line=2)
    sheet.words(WIDTH / 2, y + 27, verdict, 19, colour, "middle", bold=True)


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
    """Read the snapshots and write the SVG."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="the snapshots, as JSON")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER / "counter.svg")
    options = parser.parse_args()
    try:
        told = json.loads(options.file.read_text(encoding="utf-8"))
        snapshots = [(int(step), str(text)) for step, text in told["snapshots"]]
        request = told.get("request", "")
        name = options.output.stem
        drawing = animate(snapshots, told["verdict"], told["passed"], request, name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{options.file} holds no snapshots as the head of this program describes "
                     f"them: {error!r}")
    write(options.output, drawing)
    print(f"drew {options.output}")


if __name__ == "__main__":
    main()
