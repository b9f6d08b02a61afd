"""Draw the README's figures, and write its numbers.

    .venv/bin/python tools/readme_figure.py            draw assets/figures/tokens_per_second.svg
                                                       from data/dryrun/v5p-8_31b.csv
    .venv/bin/python tools/readme_figure.py answers    draw assets/figures/before_after.svg from the
                                                       answers in RUN_DIR/eval (default runs/tiny)
    .venv/bin/python tools/readme_figure.py numbers    write what stands between <!--name--> and
                                                       <!----> in README.md, from that run and data/
"""

import json
import os
import re
import sys
import textwrap
from pathlib import Path

import matplotlib
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import budget

from helpers import style
from tables import published
from tpu_time.bands import band, between

TABLE = pd.read_csv(ROOT / "data" / "dryrun" / "v5p-8_31b.csv").set_index("recipe")
FIGURE = ROOT / "assets" / "figures" / "tokens_per_second.svg"
ANSWERS = ROOT / "assets" / "figures" / "before_after.svg"
EXAMPLE = "Prob031_updown"


def bars():
    """What the figure shows: [(label, real tokens per second, lowest, highest, colour's name)].

    The prediction of the published recipe with its range, what its authors measured, and the
    prediction of the row that 03 trains with.
    """
    theirs, ours = TABLE.tokens_per_second_predicted[["published", "ours"]]
    measured = published("training_results", "metric", "tpu")["throughput"]
    return [("published recipe, predicted", theirs, *band(theirs), "SKY"),
            ("published recipe, measured by its authors", *[measured] * 3, "RED"),
            ("this series, predicted", ours, *band(ours), "BLUE")]


def described(points):
    """The figure's numbers as text: it travels in the file, so that a test can compare."""
    return "; ".join(f"{label}: {value:.0f} ({low:.0f} to {high:.0f})"
                     for label, value, low, high, _ in points)


def draw(points, target):
    """Horizontal bars: real tokens per second; hatched with its range what is only predicted."""
    fig, ax = style.figure(9.0, 1.2 + 0.52 * len(points))
    widest = max(high for _, _, _, high, _ in points)
    for row, (label, value, low, high, name) in enumerate(points):
        color, guess = getattr(style, name), "predicted" in label
        ax.barh(row, value, height=0.62, color="white" if guess else color, edgecolor=color,
                hatch="///" if guess else None, linewidth=1.4)
        spread = f"{low:,.0f} to {high:,.0f}" if high > low else f"{value:,.0f}"
        if high > low:
            ax.errorbar(value, row, xerr=[[value - low], [high - value]], color=style.BLACK,
                        capsize=4, linewidth=1.4)
        ax.text(high + 0.015 * widest, row, spread, va="center", fontsize=9.5)
    ax.set(yticks=range(len(points)), yticklabels=[label for label, *_ in points],
           xlabel="tokens per second, padding not counted", xlim=(0, 1.25 * widest),
           ylim=(len(points) - 0.5, -0.6), title="LoRA on Gemma 4 31B, one v5p-8 (4 chips)")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(axis="y", visible=False)
    fig.supxlabel("Source: notebook 08, data/dryrun/v5p-8_31b.csv; hatched: predicted from the "
                  "compiled program; measured: arXiv 2605.25645, S5.1", fontsize=8,
                  color=style.GREY, x=0.01, ha="left")
    save(fig, target, described(points))


def save(fig, target, description):
    """Write a figure, the same bytes for the same content, with what it shows in its metadata."""
    fig.savefig(target, metadata={"Date": None, "Description": description})


def answers(folder):
    """(request, base's answer, tuned model's answer, steps) of the running example, from 07."""
    prompt = (ROOT / "data" / "tiny_eval" / f"{EXAMPLE}_prompt.txt").read_text()
    found = []
    for model in ("base", "tuned"):
        with open(Path(folder) / "eval" / model / "samples.jsonl") as file:
            rows = [json.loads(line) for line in file]
        found.append(next(row["text"] for row in rows
                          if row["problem"] == EXAMPLE and row["plan"] == "ours, greedy"))
    with open(Path(folder) / "train" / "log.jsonl") as file:
        steps = max(json.loads(line)["step"] for line in file)
    return prompt.split("\n\n", 1)[1], *found, steps


def draw_answers(shown, target):
    """Three panels of text: what is asked, and what the model says before and after training."""
    *texts, steps = shown
    fig, axes = style.figure(9.6, 2.35, columns=3, width_ratios=(1, 0.75, 1.1))
    titles = ("You ask", "Before training", f"After {steps} steps of LoRA on two CPU cores")
    colors = (style.BLACK, style.RED, style.BLUE)
    for ax, title, color, text in zip(axes, titles, colors, texts, strict=True):
        ax.set_axis_off()
        ax.set_title(title, color=color, fontsize=10)
        lines = [part for line in text.strip("\n").splitlines() if not line.startswith("```")
                 for part in textwrap.wrap(line, 40) or [""]]
        ax.text(0, 0.97, "\n".join(lines), family="monospace", fontsize=8, va="top",
                transform=ax.transAxes, color=style.BLACK)
    fig.supxlabel(f"Tiny Gemma 4, greedy answers to {EXAMPLE}, a problem that training never saw",
                  fontsize=8, color=style.GREY, x=0.01, ha="left")
    save(fig, target, json.dumps(texts))


def numbers(run):
    """{name: text} of README's numbers, as far as the run and the tables have them."""
    pages = {path.stem[:2]: budget.reading(path) for path in sorted(ROOT.glob("[0-9][0-9]_*.py"))}
    found = {f"read_{name}": f"{page['minutes']:.0f}" for name, page in pages.items()}
    seven = sum(page["minutes"] for name, page in pages.items() if "01" <= name <= "07")
    found["read_seven"] = f"{seven / 60:.1f}"
    if (run / "times.json").exists():
        seconds = json.loads((run / "times.json").read_text())["seconds"]
        found |= {f"run_{name[:2]}": f"{value:.0f}" for name, value in seconds.items()}
    if (run / "eval" / "comparison.json").exists():
        scores = json.loads((run / "eval" / "comparison.json").read_text())
        found |= {f"pass_{name}": f"{100 * scores[name]['pass@1']:.0f}" for name in ("base",
                                                                                     "tuned")}
        if best := scores.get("against", {}).get(scores["rival"]):
            gain, low, high = (100 * value for value in (best["difference"], *best["interval"]))
            found |= {"rival": scores["rival"],
                      "gain": f"{gain:+.0f} points of pass@1 ({low:+.0f} to {high:+.0f})"}
    theirs, ours, whole, int8 = TABLE.tokens_per_second_predicted[
        ["published", "ours", "ours, mesh (4, 1)", "ours, mesh (4, 1), int8 products"]]
    return found | {
        "gib_ours": f"{TABLE.hbm_gib['ours']:.1f}",
        "speed_ours": between(ours, form="{:,.0f}"), "ratio": between(ours / theirs, 2),
        "speed_rows": between(whole, form="{:,.0f}"), "ratio_rows": between(whole / theirs, 2),
        "speed_int8": between(int8, form="{:,.0f}"), "ratio_int8": between(int8 / theirs, 2)}


def write_numbers(found, path):
    """Put each number between its marks; return the names whose text changed."""
    text, changed = path.read_text(encoding="utf-8"), []
    for name, value in found.items():
        new = re.sub(rf"(<!--{name}-->).*?(<!---->)", rf"\g<1>{value}\2", text)
        changed += [name] * (new != text)
        text = new
    path.write_text(text, encoding="utf-8")
    return changed


def main():
    """Draw one of the figures, or write the numbers."""
    matplotlib.use("agg")
    run = Path(os.environ.get("RUN_DIR") or ROOT / "runs" / "tiny")
    if "numbers" in sys.argv[1:]:
        print("README.md:",
              ", ".join(write_numbers(numbers(run), ROOT / "README.md")) or "all current")
    elif "answers" in sys.argv[1:]:
        draw_answers(answers(run), ANSWERS)
        print(f"{ANSWERS.relative_to(ROOT)} drawn")
    else:
        draw(points := bars(), FIGURE)
        print(f"{FIGURE.relative_to(ROOT)}: {described(points)}")


if __name__ == "__main__":
    main()
