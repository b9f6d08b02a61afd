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

from tables import measured, published, stored
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
# What README and STATUS make of 07's verdict on tuned against base.
MEANINGS = {
    "the tuned model is better": ("which is more than luck explains", "Shown."),
    "at the edge of luck": ("at the edge of what luck explains", "Not quite shown."),
    "could be luck": ("which could still be luck", "Not shown."),
    "no difference": ("which is nothing", "Not shown."),
    "the base is better": ("so the base is better", "No.")}
# Others' gathers over eight v5e chips took so many times what our model used to say (MACHINES).
SLOW_LINKS = 2.3
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
    return f"Predicted: {between(ours / theirs, 2)} times as fast"


def caution(points: list[Bar]) -> list[str]:
    """Two lines on how far our prediction missed the published run; none if it's not shown."""
    bar_of = {bar.label: bar for bar in points}
    theirs = bar_of.get("published recipe, predicted")
    told = bar_of.get("published recipe, measured by its authors")
    if theirs is None or told is None or theirs.low <= told.value <= theirs.high:
        return []
    side, half = ("below", "lower") if told.value < theirs.low else ("above", "upper")
    return [f"The measured {told.value:,.0f} lies {side} our range for that recipe,",
            f"so expect the {half} half of the blue bar's range."]


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
KINDS = {"measured": "green-solid", "predicted": "blue", "planned": "blue", "assumed": "gray"}


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
    """One bar for each page of the free road, at its longest, by how its minutes are known."""
    pages = list(dict.fromkeys(part.page for part in parts))
    low, high = free_hours(parts)
    sheet = Sheet("free-road", 160 + 40 * len(pages), "Kaggle's free session, page by page",
                  f"The whole 31B takes {low:.1f} to {high:.1f} of {BUDGET:g} hours. "
                  + "; ".join(f"{page}: {_minutes(parts, page)}" for page in pages), WIDE)
    fits = "should do" if high <= BUDGET else "may not do"
    sheet.words(LEFT, 42, f"One session {fits}: {low:.1f} to {high:.1f} hours", 22, bold=True)
    sheet.words(LEFT, 72, "the 31B on Kaggle's v5e-8, each page at its slowest", 18, "soft")
    across = WIDE - 2 * LEFT - 88
    scale = across / (BUDGET * 60)
    x = LEFT + 88.0
    for place, page in enumerate(pages):
        y = 104 + 40 * place
        sheet.words(LEFT, y + 20, page, 17, "ink", bold=True)
        start = x
        for part in [part for part in parts if part.page == page]:
            sheet.rectangle(x, y, part.high * scale, 28, KINDS[part.kind], radius=0, line=1.5,
                            dashed=part.kind == "assumed")
            x += part.high * scale
        text = _minutes(parts, page)
        if x < WIDE - 190:
            sheet.words(x + 8, y + 20, text, 16, "soft")
        else:
            sheet.words(start - 8, y + 20, text, 16, "soft", "end")
    end = LEFT + 88 + across
    sheet.words(end, 90, f"{BUDGET:g} h", 17, "red", "end", bold=True)
    sheet.line([(end, 98), (end, 104 + 40 * len(pages))], "red", 2, dashed=True)
    _legend(sheet, 120 + 40 * len(pages))
    write(target, sheet.text())


def _minutes(parts: list[Part], page: str) -> str:
    """Minutes of a page, as text."""
    low = sum(part.low for part in parts if part.page == page)
    high = sum(part.high for part in parts if part.page == page)
    return f"{high:.0f} min" if low == high else f"{low:.0f} to {high:.0f} min"


def _legend(sheet: Sheet, y: float) -> None:
    """How the minutes are known."""
    for x, kind, words in ((LEFT, "measured", "measured by others"),
                           (LEFT + 210, "predicted", "predicted, planned"),
                           (LEFT + 420, "assumed", "assumed")):
        sheet.rectangle(x, y, 20, 20, KINDS[kind], radius=2, dashed=kind == "assumed")
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
    if not (run / "eval" / "comparison.json").exists():
        return texts
    scores = json.loads((run / "eval" / "comparison.json").read_text())
    for name in ("base", "tuned"):
        texts[f"pass_{name}"] = f"{100 * scores[name]['pass@1']:.0f}"
    best = scores.get("against", {}).get(scores["rival"])
    if best:
        low, high = best["interval"]
        texts["rival"] = scores["rival"]
        texts["gain"] = (f"{100 * best['difference']:+.0f} points of pass@1 "
                         f"({100 * low:+.0f} to {100 * high:+.0f})")
        of_base = scores["tuned"]["pass@1"] - best["difference"]
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
    slower = [1 - table.seconds_predicted["published"] / told for told in published_step()]
    hours = {speed: fit.run_cost(fitted, RUN_TOKENS, price, speed)["hours_text"]
             for speed in (ours, whole)}
    return {
        "miss": f"{100 * typical_miss():.0f}",
        "too_fast": " to ".join(f"{100 * share:.0f}" for share in slower),
        "gib_ours": f"{table.hbm_gib['ours']:.1f}",
        "speed_ours": between(ours, form="{:,.0f}"), "ratio": between(ours / theirs, 2),
        "ratio_two": between(ours / theirs, 2, sigmas=2), "hours_ours": hours[ours],
        "speed_rows": between(whole, form="{:,.0f}"), "ratio_rows": between(whole / theirs, 2),
        "ratio_rows_two": between(whole / theirs, 2, sigmas=2), "hours_rows": hours[whole]}


def published_step() -> tuple[float, float]:
    """Seconds of a published micro-step: the whole run's without a quarter of an hour, and with it.

    That quarter is for loading and compiling, of which nobody said how long they took.
    """
    micro_steps = 9_952
    seconds = 3_600 * float(published("training_results", "metric", "tpu")["wall_clock"])
    return round((seconds - 900) / micro_steps, 2), round(seconds / micro_steps, 2)


def free_numbers() -> dict[str, str]:
    """Memory and speed of the step on Kaggle's free v5e-8, as it's compiled, with its ranges."""
    step = fit.will_it_fit("v5e", 8, "31b", "int8", "DECODER", row_length=2_048)
    assert step.compiled and step.speed
    tokens = fit.step_tokens(step)
    seconds = tokens / step.speed
    steps_of_a_run = int(RUN_TOKENS / tokens)
    row = stored.compiled_fit("v5e-8", "31b", "int8", 2_048)
    assert row is not None
    slow = float(row["seconds_compute"]) + SLOW_LINKS * float(row["seconds_exposed"])
    _, most = band(steps_of_a_run * slow / 60)
    least_hours, most_hours = free_hours(free_parts(MACHINES.read_text(encoding="utf-8")))
    return {
        "hours_free": f"{least_hours:.1f} to {most_hours:.1f} hours",
        "minutes_slow": f"{most:.0f}",
        "gib_free": f"{step.total:.1f}",
        "speed_free": between(step.speed, form="{:,.0f}"),
        "speed_free_two": between(step.speed, form="{:,.0f}", sigmas=2),
        "second_free": between(seconds, form="{:.2f}"),
        "steps_free": f"{steps_of_a_run:,}",
        "minutes_free": between(steps_of_a_run * seconds / 60, form="{:.0f}"),
    }


def readme_numbers() -> dict[str, str]:
    """What README alone says of the predicted steps, and how the published one compares."""
    predicted, told, ours = bars()[:3]
    table = steps()
    fitted, price = fit.will_it_fit("v5p", 4), fit.price("v5p", 4)
    minutes = fit.run_cost(fitted, RUN_TOKENS, price, ours.value)["minutes"]
    where, half = "above", "upper"
    if told.value < predicted.low:
        where, half = "below", "lower"
    return {
        "minutes_predicted": between(minutes["optimizer steps"] + minutes["validate"],
                                     form="{:.0f}"),
        "ratio_packing": f"{table.fill['ours'] / table.fill['published']:.1f}",
        "speed_published": between(predicted.value, form="{:,.0f}"),
        "where_published": where, "half_published": half}


def write_numbers(texts: dict[str, str], path: Path) -> list[str]:
    """Put each number between its marks; return the names whose text changed."""
    page, changed = path.read_text(encoding="utf-8"), []
    for name, value in texts.items():
        new = re.sub(rf"(<!--{name}-->).*?(<!---->)", rf"\g<1>{value}\2", page)
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
