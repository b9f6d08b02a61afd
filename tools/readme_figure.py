"""Draw the README's figure from data/dryrun/v5p-8_31b.csv, and count reading times.

    .venv/bin/python tools/readme_figure.py            draw assets/figures/tokens_per_second.svg
    .venv/bin/python tools/readme_figure.py reading    print the minutes that the README states
"""

import csv
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TABLE = ROOT / "data" / "dryrun" / "v5p-8_31b.csv"
FIGURE = ROOT / "assets" / "figures" / "tokens_per_second.svg"
WORDS_PER_MINUTE, LINES_PER_MINUTE = 200, 20
ROAD = {  # recipes of notebook 08, each with one change more than the one before
    "published": "published recipe",
    "published + bfloat16": "+ bfloat16 arithmetic",
    "published + bfloat16, no remat": "+ nothing recomputed",
    "ours, one row, dense attention": "+ packed rows, our step",
    "ours, one row": "+ attention by blocks",
    "ours": "this series: two rows at once"}


def road(table=TABLE):
    """The way from `published` to `ours`: [(recipe, tokens/s estimated, tokens/s by roofline)].

    A step that is not compiled or does not fit is left out; without both ends there is no road.
    """
    if not table.exists():
        return []
    with open(table, newline="") as file:
        rows = {row["recipe"]: row for row in csv.DictReader(file)}
    columns = ("real_tokens_per_second", "real_tokens_per_second_roofline")
    known = [name for name in ROAD if rows.get(name, {}).get(columns[0])]
    points = [(name, *(float(rows[name][column]) for column in columns)) for name in known]
    return points if {"published", "ours"} <= set(known) else []


def labels(points):
    """What a reader sees for each row; a step that is left out is named in the next one."""
    names = {name for name, *_ in points}
    packed = "ours, one row, dense attention"
    changed = {} if "published + bfloat16, no remat" in names else {
        packed: "+ bfloat16, nothing recomputed,\npacked rows, our step"}
    return [(ROAD | changed)[name] for name, *_ in points]


def described(points):
    """The figure's numbers as text: it travels in the file, so that a test can compare."""
    return "; ".join(f"{name}: {estimate:.0f}, roofline {roofline:.0f}"
                     for name, estimate, roofline in points)


def draw(points, target):
    """Horizontal bars: real tokens per second by the TPU compiler's estimate, one per recipe."""
    import matplotlib
    matplotlib.use("agg")
    from helpers import style
    from helpers.machine import published
    measured = published("training_results", "metric", "tpu")["throughput"]
    fig, ax = style.figure(9.0, 1.3 + 0.52 * len(points))
    _, first, first_bound = points[0]
    widest = max(estimate for _, estimate, _ in points)
    for row, (name, estimate, bound) in enumerate(points):
        ax.barh(row, estimate, height=0.62, color=style.BLUE if name == "ours" else style.SKY)
        text = f"{estimate:,.0f}" + (f", {estimate / first:.1f} times as many "
                                     f"({bound / first_bound:.1f} by the roofline)") * bool(row)
        ax.text(estimate + 0.012 * widest, row - 0.16 * (not row), text, va="center", fontsize=9.5)
    ax.plot(measured, 0, "o", color=style.RED, ms=6)
    ax.text(first + 0.012 * widest, 0.2, f"{measured:,.0f} measured by its authors (dot)",
            color=style.RED, va="center", fontsize=9)
    ax.set(yticks=range(len(points)), yticklabels=labels(points),
           xlabel="by the TPU compiler's estimate, not a measurement",
           xlim=(0, 2.0 * widest), ylim=(len(points) - 0.5, -0.6),
           title="Real tokens per second: LoRA on Gemma 4 31B, one v5p-8")
    ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= 1.05 * widest])
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(axis="y", visible=False)
    fig.supxlabel("Source: notebook 08, data/dryrun/v5p-8_31b.csv; measured: arXiv 2605.25645, "
                  "S5.1", fontsize=8, color=style.GREY, x=0.01, ha="left")
    target.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(target, metadata={"Date": None, "Description": described(points)})


def reading_minutes(source):
    """Minutes for a notebook: words of prose / 200 + lines of code / 20, without the opening."""
    import jupytext
    cells = jupytext.read(source).cells
    last = max(i for i, cell in enumerate(cells) if "helpers.machine(" in cell.source)
    words = lines = 0
    for i, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            words += len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", cell.source)))
        elif i > last:
            lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    return words / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE


def main():
    """Draw the figure, or print the reading times."""
    if "reading" in sys.argv[1:]:
        sources = sorted(ROOT.glob("[0-9][0-9]_*.py"))
        minutes = {path.stem: reading_minutes(path) for path in sources}
        for name, value in minutes.items():
            print(f"{name:15} {value:5.1f} -> {5 * round(value / 5)} min")
        print(f"{'all':15} {sum(minutes.values()) / 60:.1f} h")
        return
    points = road()
    if not points:
        raise SystemExit(f"{TABLE.relative_to(ROOT)} has no `published` and `ours` yet: "
                         "DRYRUN=full in notebook 08 makes them")
    draw(points, FIGURE)
    print(f"{FIGURE.relative_to(ROOT)}: {described(points)}")


if __name__ == "__main__":
    main()
