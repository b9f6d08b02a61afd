"""Draw README's figures of speeds and hours, and write the numbers of README, STATUS and MACHINES.

    .venv/bin/python tools/readme_figure.py            draw assets/figures/tokens_per_second.svg
                                                       from data/dryrun/v5p-8_31b.csv, and
                                                       free_road.svg from docs/MACHINES.md
    .venv/bin/python tools/readme_figure.py numbers    write what stands between <!--name--> and
                                                       <!----> in README.md, docs/STATUS.md and
                                                       docs/MACHINES.md, from that run and data/
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import budget
from drawings import write
from svg import Sheet

from helpers.records import Comparison
from tables import measured, published
from tpu_time import fit
from tpu_time.bands import band, between, typical_miss
from verilog import scores as verdicts

TABLE = ROOT / "data" / "dryrun" / "v5p-8_31b.csv"
FIGURE = ROOT / "assets" / "figures" / "tokens_per_second.svg"
FREE_FIGURE = ROOT / "assets" / "figures" / "free_road.svg"
MACHINES = ROOT / "docs" / "MACHINES.md"
# Pages with <!--name--> marks.
NUMBERED = (ROOT / "README.md", ROOT / "docs" / "STATUS.md", MACHINES)
# The figure's bars: base and published are gray, ours blue, what readers measured green.
BAR_COLORS = {"GRAY": "gray", "RED": "red", "BLUE": "blue", "GREEN": "green"}
QUICKSTART = ROOT / "notebooks" / "00_quickstart.ipynb"
# What README and STATUS make of 07's verdict on tuned against base; README's goes on from "which".
MEANINGS = {
    "the tuned model is better": ("is more than luck explains", "Shown."),
    "at the edge of luck": ("is at the edge of what luck explains", "Not quite shown."),
    "could be luck": ("could still be luck", "Not shown."),
    "no difference": ("is nothing", "Not shown."),
    "the base is better": ("means that the base is better", "No.")}
RUN_TOKENS = 10_000 * 922  # the published run's samples, and its mean of tokens in one


class Bar(NamedTuple):
    """One bar: real tokens per second with their range, and a name of `BAR_COLORS`."""

    label: str
    value: float
    low: float
    high: float
    color: str


def steps() -> pd.DataFrame:
    """The steps that 08 compiled for a v5p-8, by recipe."""
    return pd.read_csv(TABLE).set_index("recipe")


def bars() -> list[Bar]:
    """What the figure shows, from the top.

    The prediction of the published recipe with its range, what its authors measured, the prediction
    of the row that 03 trains with, and whatever readers have measured of the 31B (data/measured).
    """
    theirs, ours = steps().tokens_per_second_predicted[["published", "ours"]]
    told = float(published("training_results", "metric", "tpu")["throughput"])
    low, high = band(theirs)
    our_low, our_high = band(ours)
    return [Bar("published recipe, predicted", theirs, low, high, "GRAY"),
            Bar("published recipe, measured by its authors", told, told, told, "RED"),
            Bar("this series, predicted", ours, our_low, our_high, "BLUE"),
            *measured_bars()]


def measured_bars(folder: Path = measured.FOLDER) -> list[Bar]:
    """A bar for each report of the 31B that has come back; none as long as there's no report."""
    found = []
    for report in measured.reports(folder):
        speed = report.values.get("real_tokens_per_second")
        if report.size == "31b" and speed:
            made_up = " (made up)" if report.made_up else ""
            label = f"this series on a {report.slice}, measured by a reader{made_up}"
            found.append(Bar(label, speed, speed, speed, "GREEN"))
    return found


def described(points: list[Bar]) -> str:
    """The figure's numbers as text: it travels in the file, so that a test can compare."""
    return "; ".join(f"{bar.label}: {bar.value:.0f} ({bar.low:.0f} to {bar.high:.0f})"
                     for bar in points)


WIDE = 640     # of both drawings, narrow enough for a phone
LEFT = 25      # where their words and bars begin


def draw(points: list[Bar], target: Path) -> None:
    """Bars of real tokens per second below their names; pale with its range: only predicted."""
    warning = caution(points)
    sheet = Sheet("speed", 146 + 74 * len(points) + 28 * len(warning),
                  "How fast LoRA trains Gemma 4 31B",
                  f"Real tokens per second, padding not counted. {described(points)}. "
                  + " ".join(warning), WIDE)
    sheet.words(LEFT, 42, headline(points), 22, bold=True)
    sheet.words(LEFT, 72, "LoRA on Gemma 4 31B, one v5p-8: tokens a second,", 18, "soft")
    sheet.words(LEFT, 95, "padding not counted", 18, "soft")
    widest = max(bar.high for bar in points)
    scale = (WIDE - 2 * LEFT - 180) / widest  # 180: the words behind the longest bar
    for place, bar in enumerate(points):
        y = 124 + 74 * place
        sheet.words(LEFT, y + 6, bar.label.partition(",")[0], 18, "ink")
        _draw_bar(sheet, bar, y + 16, scale)
    sheet.lines(LEFT, 136 + 74 * len(points), warning, 24, size=18, color="ink")
    sheet.words(LEFT, sheet.height - 18, "measured: arXiv 2605.25645, S5.1; predicted: notebook 08",
                16, "soft")
    write(target, sheet.text())


def headline(points: list[Bar]) -> str:
    """What the figure says: the ratio of the two predictions, or that there's a measurement."""
    values = {bar.label: bar.value for bar in points}
    if any("by a reader" in bar.label for bar in points):
        return "Predicted, and measured by readers"
    theirs, ours = values["published recipe, predicted"], values["this series, predicted"]
    return f"Both predicted: ours is {between(ours / theirs, 2)} times as fast"


def caution(points: list[Bar]) -> list[str]:
    """Two lines on how far our prediction missed the published run; none if it's not shown."""
    bar_of = {bar.label: bar for bar in points}
    theirs = bar_of.get("published recipe, predicted")
    told = bar_of.get("published recipe, measured by its authors")
    ours = bar_of.get("this series, predicted")
    if theirs is None or told is None or ours is None or theirs.low <= told.value <= theirs.high:
        return []
    side = "below" if told.value < theirs.low else "above"
    low, high = with_their_miss(ours.value, theirs.value, told.value)
    return [f"The measured {told.value:,.0f} lies {side} our range for that recipe.",
            f"With the same miss, ours comes to {low:,.0f} to {high:,.0f}."]


def told_speeds(told: float) -> tuple[float, float]:
    """Tokens a second of the published steps: as told, and without a quarter of an hour.

    Their speed is tokens over the whole run's time, and nobody said whether that includes loading
    and compiling. So the second one leaves a quarter of an hour out.
    """
    without, whole = published_step()
    return told, told * whole / without


def with_their_miss(ours: float, theirs: float, told: float) -> tuple[float, float]:
    """(least, most) of our tokens a second if its prediction misses as the published one does.

    Args:
      ours, theirs: predicted.
      told: what the authors of the published recipe measured.

    Returns:
      Both rounded to hundreds, because the two readings of `told` differ by more than that.
    """
    speeds = [round(ours * speed / theirs, -2) for speed in told_speeds(told)]
    return min(speeds), max(speeds)


def what_to_expect(least: float, most: float, predicted: tuple[float, float]) -> str:
    """Where our speed lies in its predicted range if it's from `least` to `most`, in words."""
    low, high = predicted
    if most < low:
        return "less than our range"
    if least > high:
        return "more than our range"
    if least < low:
        return "the low end of our range, or a little less"
    if most > high:
        return "the high end of our range, or a little more"
    return "a speed inside of our range"


def _draw_bar(sheet: Sheet, bar: Bar, y: float, scale: float) -> None:
    """One bar, solid if measured, with its range as a line and its numbers behind it."""
    predicted = bar.high > bar.low
    color = BAR_COLORS[bar.color]
    sheet.rectangle(LEFT, y, bar.value * scale, 26, color if predicted else f"{color}-solid",
                    radius=0, line=2 if predicted else 0, dashed=predicted)
    text, kind = f"{bar.value:,.0f}", "measured"
    if predicted:
        text, kind = f"{bar.low:,.0f} to {bar.high:,.0f}", "predicted"
        low, high = LEFT + bar.low * scale, LEFT + bar.high * scale
        sheet.line([(low, y + 13), (high, y + 13)], "ink", 2)
        for end in (low, high):
            sheet.line([(end, y + 6), (end, y + 20)], "ink", 2)
    x = LEFT + bar.high * scale + 10
    sheet.words(x, y + 10, text, 17, "ink", bold=True)
    sheet.words(x, y + 29, kind, 16, "soft")


# ── The free road: how long each page takes ──
BUDGET = 8.5  # hours of Kaggle's nine that the launcher uses
TRY_MINUTES = 60  # that a server gets to start, before the session tries another way
KINDS = {
    "measured": "green-solid",
    "predicted": "blue",
    "computed": "blue",
    "assumed": "gray-solid",
}
# What a page does, where the drawing stands before the table of pages.
DOES = {"03": "train", "04": "merge", "05": "serve", "06": "benchmark", "07": "judge"}
NAMES_WIDE = 134  # of the drawing, where these names stand


class Part(NamedTuple):
    """Minutes of one row of MACHINES' table: of which page, and how they're known."""

    page: str
    low: float
    high: float
    kind: str


def free_parts(text: str) -> list[Part]:
    """The rows of the table of the nine hours in docs/MACHINES.md, without the queue and the sum.

    Raises:
      ValueError: there's no such table, or a row says not how its minutes are known.
    """
    table = text.partition("| what | minutes |")[2].partition("\n\n")[0]
    parts = []
    for line in re.sub("<!--.*?-->", "", table).splitlines()[2:]:
        what, minutes, how = (cell.strip("* ") for cell in line.split("|")[1:4])
        if what.startswith(("the queue", "sum")):
            continue
        low, _, high = minutes.partition(" to ")
        kinds = sorted((how.find(kind), kind) for kind in KINDS if kind in how)
        if not kinds:
            raise ValueError(f"MACHINES does not say how the minutes of {what!r} are known")
        page = what.partition(":")[0] if ":" in what else "set-up"
        parts.append(Part(page, float(low), float(high or low), kinds[0][1]))
    if not parts:
        raise ValueError("docs/MACHINES.md has no table of the nine hours")
    return parts


def free_hours(parts: list[Part]) -> tuple[float, float]:
    """Hours of all parts, the least and the most; rounded to ten minutes, as in MACHINES."""
    low = round(sum(part.low for part in parts), -1)
    high = round(sum(part.high for part in parts), -1)
    return low / 60, high / 60


def draw_free(parts: list[Part], target: Path) -> None:
    """A bar for each page of the free road, as long as the page at most, by how we know that."""
    pages = list(dict.fromkeys(part.page for part in parts))
    low, high = free_hours(parts)
    sheet = Sheet("free-road", 190 + 40 * len(pages), "Kaggle's free session, page by page",
                  f"The whole 31B takes {low:.1f} to {high:.1f} of {BUDGET:g} hours. "
                  + "; ".join(f"{page}: {_minutes(parts, page)}" for page in pages), WIDE)
    fits = "should be enough" if high <= BUDGET else "may not be enough"
    sheet.words(LEFT, 42, f"One session {fits}: {low:.1f} to {high:.1f} hours", 22, bold=True)
    sheet.words(LEFT, 72, "the 31B on Kaggle's v5e-8; bars show the most", 18, "soft")
    across = WIDE - 2 * LEFT - NAMES_WIDE
    scale = across / (BUDGET * 60)
    bottom = 104 + 40 * len(pages)
    for hours in range(0, int(BUDGET) + 1, 2):
        tick = LEFT + NAMES_WIDE + 60 * hours * scale
        sheet.line([(tick, 98), (tick, bottom)], "page", 1.5)
        sheet.words(tick, bottom + 20, f"{hours} h", 16, "soft", "middle")
    x = LEFT + float(NAMES_WIDE)
    for place, page in enumerate(pages):
        y = 104 + 40 * place
        name = f"{page} {DOES.get(page, '')}".rstrip()
        sheet.words(LEFT, y + 20, name, 17, "ink", bold=True)
        start = x
        for part in [part for part in parts if part.page == page]:
            sheet.rectangle(x, y, part.high * scale, 28, KINDS[part.kind], radius=0, line=1.5)
            x += part.high * scale
        text = _minutes(parts, page)
        if x < WIDE - 190:
            sheet.words(x + 8, y + 20, text, 16, "soft")
        else:
            sheet.words(start - 8, y + 20, text, 16, "soft", "end")
    end = LEFT + NAMES_WIDE + across
    sheet.words(end, 90, f"{BUDGET:g} h: our launcher stops", 17, "red", "end", bold=True)
    sheet.line([(end, 98), (end, bottom)], "red", 2, dashed=True)
    _legend(sheet, bottom + 46)
    write(target, sheet.text())


def _minutes(parts: list[Part], page: str) -> str:
    """Minutes of a page, as text."""
    low = sum(part.low for part in parts if part.page == page)
    high = sum(part.high for part in parts if part.page == page)
    return f"{high:.0f} min" if low == high else f"{low:.0f} to {high:.0f} min"


def _legend(sheet: Sheet, y: float) -> None:
    """How the minutes are known."""
    for x, kind, words in ((LEFT, "measured", "measured by others"),
                           (LEFT + 210, "predicted", "predicted, computed"),
                           (LEFT + 420, "assumed", "assumed")):
        sheet.rectangle(x, y, 20, 20, KINDS[kind], radius=2)
        sheet.words(x + 28, y + 16, words, 17, "ink")


def numbers(run: Path) -> dict[str, str]:
    """{name: text} of the pages' numbers, as far as the run and the tables have them."""
    return (reading_numbers() | quickstart_numbers() | run_numbers(run) | step_numbers()
            | readme_numbers() | free_numbers())


def reading_numbers() -> dict[str, str]:
    """Minutes that each page takes to read, and hours of 01 to 07."""
    texts, seven = {}, 0.0
    for path in budget.pages():
        number, minutes = budget.number_of(path), budget.reading(path)["minutes"]
        texts[f"read_{number}"] = f"{minutes:.0f}"
        if "01" <= number <= "07":
            seven += minutes
    return texts | {"read_seven": f"{seven / 60:.1f}"}


def quickstart_numbers(page: Path = QUICKSTART) -> dict[str, str]:
    """How many problems pass before and after, as the stored notebook 00 has printed it."""
    if not page.exists():
        return {}
    # In the file a line that was printed is a JSON text of its own.
    found = re.search(r"(\d+) of \d+ before, (\d+) of \d+ after", page.read_text("utf-8"))
    if found is None:
        return {}
    return {"quick_before": found[1], "quick_after": found[2]}


def run_numbers(run: Path) -> dict[str, str]:
    """Seconds and scores of a run, as far as it went."""
    texts = {}
    if (run / "times.json").exists():
        seconds = json.loads((run / "times.json").read_text())["seconds"]
        for name, value in seconds.items():
            minutes = f"{value / 60:.0f} min"
            texts[f"run_{name.partition('_')[0]}"] = minutes if value > 90 else f"{value:.0f} s"
    if not run.joinpath(*Comparison.PLACE).exists():
        return texts
    compared = Comparison.load(run)
    base, tuned = compared.base["pass@1"], compared.tuned["pass@1"]
    texts["pass_base"] = f"{100 * base:.0f}"
    texts["pass_tuned"] = f"{100 * tuned:.0f}"
    best = compared.against.get(compared.rival)
    if best:
        low, high = best["interval"]
        texts["rival"] = compared.rival
        # With a decimal: +0.5 isn't as far from nothing as +1.
        texts["gain"] = (f"{100 * best['difference']:+.1f} points "
                         f"({100 * low:+.1f} to {100 * high:+.1f})")
        of_base = tuned - best["difference"]
        texts["pass_rival"] = f"{100 * of_base:.0f}"
        difference = (best["difference"], low, high)
        found = verdicts.verdict_on(difference, best["p"])
        texts["gain_means"], texts["verdict"] = MEANINGS[found]
    return texts


def step_numbers() -> dict[str, str]:
    """Memory and speed of the compiled steps with their ranges, and hours of a whole run."""
    table = steps()
    theirs, ours, whole = table.tokens_per_second_predicted[
        ["published", "ours", "ours, mesh (4, 1)"]]
    fitted, price = fit.will_it_fit("v5p", 4), fit.price("v5p", 4)
    told = told_speeds(float(published("training_results", "metric", "tpu")["throughput"]))
    too_high = sorted(100 * (theirs / speed - 1) for speed in told)
    least, most = with_their_miss(ours, theirs, told[0])
    hours = {speed: fit.run_cost(fitted, RUN_TOKENS, price, speed)["hours_text"]
             for speed in (ours, whole)}
    return {
        "miss": f"{100 * typical_miss():.0f}",
        "told": f"{told[0]:.0f}", "told_steps": f"{told[1]:.0f}",
        "expect": what_to_expect(least, most, band(ours)),
        "guess_published": f"{theirs:,.0f}",
        "guess_ours": f"{ours:,.0f}",
        "too_high": " to ".join(f"{share:.0f}" for share in too_high),
        "expected_ours": f"{least:,.0f} to {most:,.0f}",
        "gib_ours": f"{table.hbm_gib['ours']:.1f}",
        "speed_ours": between(ours, form="{:,.0f}"), "ratio": between(ours / theirs, 2),
        "ratio_same": f"{ours / theirs:.1f}",
        "ratio_two": between(ours / theirs, 2, sigmas=2), "hours_ours": hours[ours],
        "speed_rows": between(whole, form="{:,.0f}"), "ratio_rows": between(whole / theirs, 2),
        "ratio_rows_two": between(whole / theirs, 2, sigmas=2), "hours_rows": hours[whole]}


def published_step() -> tuple[float, float]:
    """Seconds of a published micro-step: the whole run's without a quarter of an hour, and with it.

    That quarter is for loading and compiling, of which nobody said how long they took.
    """
    micro_steps = 9_952
    seconds = 3_600 * float(published("training_results", "metric", "tpu")["wall_clock"])
    return (seconds - 900) / micro_steps, seconds / micro_steps


def free_numbers() -> dict[str, str]:
    """Memory, speed and minutes of 03 on Kaggle's free v5e-8, and the hours of its session."""
    step = fit.best_fit("v5e", 8, "31b", "int8", row_length=2_048)
    assert step.compiled and step.speed
    tokens = fit.step_tokens(step)
    steps_of_a_run = int(RUN_TOKENS / tokens)
    slow_seconds = tokens / step.speed * step.slowed
    slowest, fastest = step.speeds()
    texts = {
        "gib_free": f"{step.total:.1f}",
        "speed_free": _spread(step.speeds(), "{:,.0f}"),
        "speed_free_two": _spread(step.speeds(sigmas=2), "{:,.0f}"),
        "second_free": f"{tokens / fastest:.2f} to {tokens / slowest:.2f}",
        "second_slow": f"{slow_seconds:.2f}",
        "minutes_typical": between(RUN_TOKENS / step.speed / 60, form="{:.0f}"),
        "steps_free": f"{steps_of_a_run:,}",
    }
    texts |= minutes_of_03(step)
    page = fill(MACHINES.read_text(encoding="utf-8"), texts)
    parts = free_parts(page)
    least, most = free_hours(parts)
    return texts | {
        "free_03": _minutes(parts, "03"),
        "free_sum": f"{60 * least:.0f} to {60 * most:.0f}",
        "hours_free": f"{least:.1f} to {most:.1f} hours",
        "free_after_failure": f"{60 * most + TRY_MINUTES:.0f}",
    }


def minutes_of_03(step: fit.Fit) -> dict[str, str]:
    """{name: minutes} of the rows of 03 in MACHINES' table, as 01 and 08 count them."""
    cost = fit.run_cost(step, RUN_TOKENS, fit.price("v5e", 8))
    ranges = cost["ranges"]
    low, high = (validate + save for validate, save in zip(ranges["validate"], ranges["save"]))
    return {
        "free_load": _spread(ranges["load it onto the chips"]),
        "free_compile": _spread(ranges["compile"]),
        "free_answer": _spread(ranges["answer before and after"]),
        "minutes_free": _spread(ranges["optimizer steps"]),
        "free_validate": _spread(ranges["validate"]),
        "free_save": _spread((low, high)),
        "rented_download": _spread(ranges["download the base"]),
        "hours_rented": cost["hours_text"],
    }


def _spread(ends: tuple[float, float], form: str = "{:.0f}") -> str:
    """A range as text: "48 to 99"."""
    low, high = ends
    return f"{form.format(low)} to {form.format(high)}"


def readme_numbers() -> dict[str, str]:
    """What README alone says of the predicted steps."""
    predicted, _, ours = bars()[:3]
    table = steps()
    fitted, price = fit.will_it_fit("v5p", 4), fit.price("v5p", 4)
    ranges = fit.run_cost(fitted, RUN_TOKENS, price, ours.value)["ranges"]
    return {
        "minutes_predicted": _spread(ranges["optimizer steps"]),
        "ratio_packing": f"{table.fill['ours'] / table.fill['published']:.1f}",
        "speed_published": between(predicted.value, form="{:,.0f}")}


def fill(page: str, texts: dict[str, str]) -> str:
    """A page's text with each number between its marks."""
    for name, value in texts.items():
        page = re.sub(rf"(<!--{name}-->).*?(<!---->)", rf"\g<1>{value}\2", page)
    return page


def write_numbers(texts: dict[str, str], path: Path) -> list[str]:
    """Put each number between its marks; return the names whose text changed."""
    page, changed = path.read_text(encoding="utf-8"), []
    for name, value in texts.items():
        new = fill(page, {name: value})
        if new != page:
            changed.append(name)
        page = new
    path.write_text(page, encoding="utf-8")
    return changed


def main() -> None:
    """Draw the figure, or write the numbers."""
    run = Path(os.environ.get("RUN_DIR") or ROOT / "runs" / "tiny")
    if "numbers" in sys.argv[1:]:
        for page in NUMBERED:
            changed = write_numbers(numbers(run), page)
            print(f"{page.name}:", ", ".join(changed) or "all current")
    else:
        points = bars()
        draw(points, FIGURE)
        print(f"{FIGURE.relative_to(ROOT)}: {described(points)}")
        draw_free(free_parts(MACHINES.read_text(encoding="utf-8")), FREE_FIGURE)
        print(f"{FREE_FIGURE.relative_to(ROOT)}: the minutes of docs/MACHINES.md")


if __name__ == "__main__":
    main()
