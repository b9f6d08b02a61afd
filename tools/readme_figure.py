"""Draw README's figure of speeds, and write its numbers and those of STATUS and MACHINES.

    .venv/bin/python tools/readme_figure.py            draw assets/figures/tokens_per_second.svg
                                                       from data/dryrun/v5p-8_31b.csv
    .venv/bin/python tools/readme_figure.py numbers    write what stands between <!--name--> and
                                                       <!----> in README.md, docs/STATUS.md and
                                                       docs/MACHINES.md, from that run and data/
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import budget

from helpers import style
from tables import measured, published
from tpu_time import fit
from tpu_time.bands import band, between, typical_miss

TABLE = ROOT / "data" / "dryrun" / "v5p-8_31b.csv"
FIGURE = ROOT / "assets" / "figures" / "tokens_per_second.svg"
# Pages with <!--name--> marks.
NUMBERED = (ROOT / "README.md", ROOT / "docs" / "STATUS.md", ROOT / "docs" / "MACHINES.md")
RUN_TOKENS = 10_000 * 922  # the published run's samples, and its mean of tokens in one


class Bar(NamedTuple):
    """One bar: real tokens per second with their range, and the name of a colour in `style`."""

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
    return [Bar("published recipe, predicted", theirs, low, high, "SKY"),
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


def draw(points: list[Bar], target: Path) -> None:
    """Horizontal bars: real tokens per second; hatched with its range what is only predicted."""
    fig, ax = style.figure(9.0, 1.2 + 0.52 * len(points))
    widest = max(bar.high for bar in points)
    for row, bar in enumerate(points):
        color = getattr(style, bar.color)
        predicted = "predicted" in bar.label
        ax.barh(row, bar.value, height=0.62, color="white" if predicted else color,
                edgecolor=color, hatch="///" if predicted else None, linewidth=1.4)
        text = f"{bar.value:,.0f}"
        if bar.high > bar.low:
            text = f"{bar.low:,.0f} to {bar.high:,.0f}"
            reach = [[bar.value - bar.low], [bar.high - bar.value]]
            ax.errorbar(bar.value, row, xerr=reach, color=style.BLACK, capsize=4, linewidth=1.4)
        ax.text(bar.high + 0.015 * widest, row, text, va="center", fontsize=9.5)
    ax.set(yticks=range(len(points)), yticklabels=[bar.label for bar in points],
           xlabel="tokens per second, padding not counted", xlim=(0, 1.25 * widest),
           ylim=(len(points) - 0.5, -0.6), title="LoRA on Gemma 4 31B, one v5p-8 (4 chips)")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(axis="y", visible=False)
    fig.supxlabel("Source: notebook 08, data/dryrun/v5p-8_31b.csv; hatched: predicted from the "
                  "compiled program; measured: arXiv 2605.25645, S5.1", fontsize=8,
                  color=style.GREY, x=0.01, ha="left")
    save(fig, target, described(points))


def save(fig: Any, target: Path, description: str) -> None:
    """Write a figure, the same bytes for the same content, with what it shows in its metadata."""
    fig.savefig(target, metadata={"Date": None, "Description": description})


def numbers(run: Path) -> dict[str, str]:
    """{name: text} of the pages' numbers, as far as the run and the tables have them."""
    return reading_numbers() | run_numbers(run) | step_numbers() | free_numbers()


def reading_numbers() -> dict[str, str]:
    """Minutes that each page takes to read, and hours of 01 to 07."""
    texts, seven = {}, 0.0
    for path in budget.pages():
        number, minutes = budget.number_of(path), budget.reading(path)["minutes"]
        texts[f"read_{number}"] = f"{minutes:.0f}"
        if "01" <= number <= "07":
            seven += minutes
    return texts | {"read_seven": f"{seven / 60:.1f}"}


def run_numbers(run: Path) -> dict[str, str]:
    """Seconds and scores of a run, as far as it went."""
    texts = {}
    if (run / "times.json").exists():
        seconds = json.loads((run / "times.json").read_text())["seconds"]
        for name, value in seconds.items():
            texts[f"run_{name.partition('_')[0]}"] = f"{value:.0f}"
    if not (run / "eval" / "comparison.json").exists():
        return texts
    scores = json.loads((run / "eval" / "comparison.json").read_text())
    for name in ("base", "tuned"):
        texts[f"pass_{name}"] = f"{100 * scores[name]['pass@1']:.0f}"
    best = scores.get("against", {}).get(scores["rival"])
    if best:
        low, high = best["interval"]
        texts["rival"] = scores["rival"]
        texts["verdict"] = "Shown." if low > 0 else "Not shown."
        texts["gain"] = (f"{100 * best['difference']:+.0f} points of pass@1 "
                         f"({100 * low:+.0f} to {100 * high:+.0f})")
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
    return {
        "gib_free": f"{step.total:.1f}",
        "speed_free": between(step.speed, form="{:,.0f}"),
        "speed_free_two": between(step.speed, form="{:,.0f}", sigmas=2),
        "second_free": between(seconds, form="{:.2f}"),
        "steps_free": f"{steps_of_a_run:,}",
        "minutes_free": between(steps_of_a_run * seconds / 60, form="{:.0f}"),
    }


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
    matplotlib.use("agg")
    run = Path(os.environ.get("RUN_DIR") or ROOT / "runs" / "tiny")
    if "numbers" in sys.argv[1:]:
        for page in NUMBERED:
            changed = write_numbers(numbers(run), page)
            print(f"{page.name}:", ", ".join(changed) or "all current")
    else:
        points = bars()
        draw(points, FIGURE)
        print(f"{FIGURE.relative_to(ROOT)}: {described(points)}")


if __name__ == "__main__":
    main()
