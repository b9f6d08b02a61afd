"""Draw the README's figures, and count reading times.

    .venv/bin/python tools/readme_figure.py            draw assets/figures/tokens_per_second.svg
                                                       from data/dryrun/v5p-8_31b.csv
    .venv/bin/python tools/readme_figure.py answers    draw assets/figures/before_after.svg from the
                                                       answers in RUN_DIR/eval (default runs/tiny)
    .venv/bin/python tools/readme_figure.py reading    print minutes and cell lengths
"""

import ast
import csv
import itertools
import json
import math
import os
import re
import statistics
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("helpers", "tables", "verilog", "serving", "tpu_time", "appendix")
sys.path.insert(0, str(ROOT))

from helpers.run import atomic_file

TABLE = ROOT / "data" / "dryrun" / "v5p-8_31b.csv"
FIGURE = ROOT / "assets" / "figures" / "tokens_per_second.svg"
ANSWERS = ROOT / "assets" / "figures" / "before_after.svg"
EXAMPLE = "Prob031_updown"
WORDS_PER_MINUTE, LINES_PER_MINUTE = 200, 20


def bars(table=TABLE):
    """What the figure shows: [(label, real tokens per second, colour's name)].

    Predicted and measured for the published recipe, predicted for our fastest. Without a prediction
    of both there is no figure: an empty list.
    """
    if not table.exists():
        return []
    with open(table, newline="") as file:
        rows = {row["recipe"]: row["tokens_per_second_predicted"] for row in csv.DictReader(file)}
    ours = rows.get("ours, faster") or rows.get("ours")  # what 03 trains with
    speed = {"published": rows.get("published"), "ours": ours}
    if not all(speed.values()):
        return []
    from tables import published
    measured = published("training_results", "metric", "tpu")["throughput"]
    return [("published recipe, predicted", float(speed["published"]), "SKY"),
            ("published recipe, measured by its authors", measured, "RED"),
            ("this series, predicted", float(speed["ours"]), "BLUE")]


def described(points):
    """The figure's numbers as text: it travels in the file, so that a test can compare."""
    return "; ".join(f"{label}: {value:.0f}" for label, value, _ in points)


def draw(points, target):
    """Horizontal bars: real tokens per second, predicted and measured."""
    import matplotlib
    matplotlib.use("agg")
    from helpers import style
    fig, ax = style.figure(9.0, 1.1 + 0.52 * len(points))
    first, widest = points[0][1], max(value for _, value, _ in points)
    for row, (_, value, color) in enumerate(points):
        ax.barh(row, value, height=0.62, color=getattr(style, color))
        text = f"{value:,.0f}" + f", {value / first:.1f} times as many" * (value == widest)
        ax.text(value + 0.012 * widest, row, text, va="center", fontsize=9.5)
    ax.set(yticks=range(len(points)), yticklabels=[label for label, _, _ in points],
           xlabel="predicted: cycles and collectives of the program that the TPU's compiler makes",
           xlim=(0, 1.45 * widest), ylim=(len(points) - 0.5, -0.6),
           title="Real tokens per second: LoRA on Gemma 4 31B, one v5p-8")
    ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= 1.05 * widest])
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(axis="y", visible=False)
    fig.supxlabel("Source: notebook 08, data/dryrun/v5p-8_31b.csv; measured: arXiv 2605.25645, "
                  "S5.1", fontsize=8, color=style.GREY, x=0.01, ha="left")
    save(fig, target, described(points))


def save(fig, target, description):
    """Write a figure as SVG or PNG, whole, with what it shows in its metadata."""
    with atomic_file(target) as file:
        fig.savefig(file, format=target.suffix[1:],
                    metadata={"Date": None, "Description": description})


def answers(folder):
    """(request, base's answer, tuned model's answer) of the running example, greedy, from 07."""
    prompt = (ROOT / "data" / "tiny_eval" / f"{EXAMPLE}_prompt.txt").read_text()
    found = []
    for model in ("base", "tuned"):
        with open(Path(folder) / "eval" / model / "samples.jsonl") as file:
            rows = [json.loads(line) for line in file]
        found.append(next(row["text"] for row in rows
                          if row["problem"] == EXAMPLE and row["plan"] == "greedy"))
    return (prompt.split("\n\n", 1)[1], *found)


def draw_answers(texts, target):
    """Three panels of text: what is asked, and what the model says before and after training."""
    import matplotlib
    matplotlib.use("agg")
    from helpers import style
    fig, axes = style.figure(9.6, 2.35, columns=3, width_ratios=(1, 0.75, 1.1))
    titles = ("You ask", "Before training", "After 76 steps of LoRA on two CPU cores")
    colors = (style.BLACK, style.RED, style.BLUE)
    for ax, title, color, text in zip(axes, titles, colors, texts, strict=True):
        ax.set_axis_off()
        ax.set_title(title, color=color, fontsize=10)
        lines = [part for line in text.strip("\n").splitlines() if not line.startswith("```")
                 for part in textwrap.wrap(line, 40) or [""]]
        ax.text(0, 0.97, "\n".join(lines), family="monospace", fontsize=8, va="top",
                transform=ax.transAxes, color=style.BLACK)
    fig.supxlabel(f"Tiny Gemma 4, greedy answers to {EXAMPLE}, one of 38 held-out problems",
                  fontsize=8, color=style.GREY, x=0.01, ha="left")
    save(fig, target, json.dumps(texts))


def shown_lines(code, before=()):
    """Lines of the helpers' source that a cell prints with `show_source`, blank ones left out.

    Both arguments are syntax trees: of the cell, and of what may import names for it.
    """
    imported, count = {}, 0
    for node in itertools.chain(*map(ast.walk, (*before, code))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ROOMS:
            imported |= {item.asname or item.name: f"{node.module}.{item.name}"
                         for item in node.names}
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call)
             and ast.unparse(node.func).endswith("show_source")]
    for word in (ast.unparse(word) for call in calls for word in call.args):
        head, *rest = word.split(".")
        room, module, *names = [*imported.get(head, head).split("."), *rest]
        text = (ROOT / room / f"{module}.py").read_text()
        found = ast.parse(text)
        for name in names:
            found = next(node for node in found.body if getattr(node, "name", "") == name)
        first = min([found.lineno, *(item.lineno for item in found.decorator_list)])
        count += sum(bool(line.strip()) for line in text.splitlines()[first - 1:found.end_lineno])
    return count


def reading(source):
    """How a notebook reads, without its opening.

    Returns a dict: `minutes` (words of prose / 200 + lines of code / 20), `lines` of every code
    cell with the source that it prints, and `drawn`, the places where two cells of drawing code
    follow each other without a word between them.
    """
    import jupytext
    cells = jupytext.read(source).cells
    last = max(i for i, cell in enumerate(cells) if "helpers.machine(" in cell.source)
    words, lines, drawn, before = 0, [], 0, False
    trees = [ast.parse(cell.source) for cell in cells if cell.cell_type == "code"]
    for i, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            words += len(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", cell.source)))
            before = False
        elif i > last:
            own = sum(bool(line.strip()) for line in cell.source.splitlines())
            lines.append(own + shown_lines(ast.parse(cell.source), trees))
            draws = len(re.findall(r"\bax(?:es|is)?\b|\.axes|add_patch|\bfig\.", cell.source)) >= 4
            drawn, before = drawn + (draws and before), draws
    return {"minutes": words / WORDS_PER_MINUTE + sum(lines) / LINES_PER_MINUTE, "words": words,
            "lines": lines, "drawn": drawn}


def print_reading():
    """One line for each notebook, and the sum of the seven."""
    pages = {path.stem: reading(path) for path in sorted(ROOT.glob("[0-9][0-9]_*.py"))}
    print(f"{'':16} minutes  words  code  cells  median  nine of ten  longest  drawing twice")
    for name, page in pages.items():
        lines = sorted(page["lines"])
        tenth = lines[min(len(lines) - 1, math.ceil(0.9 * len(lines)) - 1)]
        print(f"{name:16} {page['minutes']:7.1f} {page['words']:6} {sum(lines):5} {len(lines):6} "
              f"{statistics.median(lines):7.1f} {tenth:12} {lines[-1]:8} {page['drawn']:14}")
    for text, first, end in (("01 to 07", "01", "08"), ("all", "00", "99")):
        minutes = [page["minutes"] for name, page in pages.items() if first <= name < end]
        print(f"{text:16} {sum(minutes) / 60:5.2f} h")


def main():
    """Draw a figure, or print the reading times."""
    if "reading" in sys.argv[1:]:
        print_reading()
        return
    if "answers" in sys.argv[1:]:
        draw_answers(answers(os.environ.get("RUN_DIR") or ROOT / "runs" / "tiny"), ANSWERS)
        print(f"{ANSWERS.relative_to(ROOT)} drawn")
        return
    points = bars()
    if not points:
        raise SystemExit(f"{TABLE.relative_to(ROOT)} predicts not both `published` and `ours` yet: "
                         "DRYRUN=full in notebook 08 does")
    draw(points, FIGURE)
    print(f"{FIGURE.relative_to(ROOT)}: {described(points)}")


if __name__ == "__main__":
    main()
