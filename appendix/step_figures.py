"""Figures of notebook 08: a predicted step as a trace and by its parts, the road, and anchors.

Each function makes one figure and writes it below RUN_DIR by `helpers.style.finish`.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from appendix import parts, steps
from helpers import style
from tpu_time import bands, report
from tpu_time.clock import Prediction

REST, WAITS = "the rest", "waits"
LETTER = 0.0085  # width of a small letter, of the longest bar
COLORS = {  # few enough to tell apart
    "MLP": style.BLUE,
    "output matrix": style.PURPLE,
    "projections": style.GREEN,
    "attention": style.ORANGE,
    "LoRA": style.SKY,
    REST: "#D0D0D0",
    WAITS: "#8C2D04",
}
assert set(COLORS) - {REST, WAITS} < set(parts.PARTS)
TICKS = (1, 2, 3, 4, 5, 6, 8, 10, 15)  # times the published recipe's predicted speed
MINE = "03 as it is"
LOWEST = 0.45  # ratio of predicted to measured on the axis of the anchors


def legend(fig: Figure, colors: Mapping[str, str]) -> None:
    """A legend of colored patches beside the axes: {label: color}."""
    patches = []
    for color in colors.values():
        patches.append(plt.Rectangle((0, 0), 1, 1, color=color))
    fig.legend(patches, colors, loc="outside right", fontsize=8)


def group_of(part: str) -> str:
    """The key of `COLORS` for one of `parts.PARTS`, or for a wait of `steps.parts_of`."""
    if part.startswith(WAITS):
        return WAITS
    if part in COLORS:
        return part
    return REST


def place_labels(ax: Axes, labels: Sequence[str]) -> None:
    """Label the bars of a figure that go down from 0: the first at the top."""
    places = [-place for place in range(len(labels))]
    ax.set_yticks(places, labels)


def draw_trace(prediction: Prediction, name: str, title: str) -> None:
    """The lanes of a prediction: what the chip computes, what it waits for, what's on the links."""
    fig, ax = style.figure(11, 2.4)
    for event in prediction.events:
        group = group_of(event.part)
        if event.track == "wait":
            group = WAITS
        color = COLORS[group]
        lane, _ = report.TRACKS[event.track]
        start = 1e3 * event.start
        duration = 1e3 * event.seconds
        bottom = -lane - 0.4
        ax.broken_barh([(start, duration)], (bottom, 0.8), color=color, lw=0)

    lanes = dict(report.TRACKS.values())
    ax.set_yticks([-lane for lane in lanes], lanes.values())
    busy = prediction.compute / prediction.clock
    ax.set(title=f"{title[0].upper()}{title[1:]}: the chip computes {busy:.0%} of the time",
           xlabel="ms")
    ax.grid(axis="y", visible=False)
    legend(fig, COLORS)
    style.finish(fig, name, "predicted from the compiled program (libtpu, no TPU)")


def draw_road(road: Sequence[tuple[str, float, float]], told: float) -> None:
    """Factors of `steps.road` as bars on a logarithmic axis, from the published recipe's speed, 1.

    The blue bar is what 03 does. Below it stand two stretches that 03 doesn't go by itself: another
    mesh, and int8 products, which no measurement on a TPU checks, so their bar is hatched.

    Args:
      road: (label, real tokens a second before, and after) of each stretch, that mesh and int8
        products last.
      told: real tokens a second that the recipe's authors measured.
    """
    *mine, (mesh, before, after), (int8, start, end) = road
    fig, ax = style.figure(9, 1.4 + 0.6 * (len(road) + 2))
    _, first, _ = mine[0]
    _, _, last = mine[-1]
    labels, factors = [], []
    for place, (label, begun, ended) in enumerate(mine):
        color = style.GREEN if ended > begun else style.RED
        _draw_stretch(ax, place, begun, ended, first, color)
        labels.append(label)
        factors.append(ended / begun)
    below = len(mine)
    _draw_stretch(ax, below, first, last, first, style.BLUE)
    _draw_stretch(ax, below + 1, before, after, first, style.SKY)
    _draw_stretch(ax, below + 2, first, after, first, style.SKY)
    _draw_stretch(ax, below + 3, start, end, first, "white", hatch="///")
    place_labels(ax, [*labels, MINE, mesh, f"03 on {mesh}",
                      f"{int8}\n(not measured\non any TPU)"])

    longest = labels[np.argmax(factors)]
    right_end = 1.4 * end / first
    ax.set(xscale="log", xlim=(0.9, right_end),
           xlabel=f"times our prediction for the published recipe: {first:,.0f} real tokens per "
           f"second\n(its authors measured {told:,.0f}; log scale)",
           title=f"The largest factor is {longest}, {max(factors):.1f}; "
           f"{MINE} has {last / first:.1f}")
    ticks = [tick for tick in TICKS if tick < right_end]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.axvline(1, color=style.GRAY, lw=1)
    ax.grid(axis="y", visible=False)
    style.finish(fig, "08_road", "predicted for a v5p-8 from the compiled programs, not measured")


def _draw_stretch(ax: Axes, place: int, start: float, end: float, first: float,
                  color: str, hatch: str = "") -> None:
    """One bar of the road from `start` to `end`, in units of `first`, with its factor beside it."""
    width = (end - start) / first
    edge = style.GRAY if hatch else color
    ax.barh(-place, width, left=start / first, color=color, edgecolor=edge, hatch=hatch, height=0.6)
    right_end = (max(start, end) / first, -place)
    ax.annotate(f"× {end / start:.2f}", right_end, xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=9)


def draw_parts(predictions: Mapping[steps.Recipe, Prediction]) -> None:
    """The time of two micro-steps or more, by part of the model; waits are hatched."""
    fig, ax = style.figure(9, 1.2 + 0.7 * len(predictions))
    labels = []
    longest = max(prediction.clock for prediction in predictions.values())
    for place, (recipe, prediction) in enumerate(predictions.items()):
        rows = steps.parts_of(recipe, prediction)
        sums = rows.groupby(rows.part.map(group_of)).seconds.sum()
        left = 0.0
        for group, color in COLORS.items():
            width = sums.get(group, 0.0)
            is_wide = width > LETTER * len(group) * longest
            _draw_part(ax, place, group, left, width, color, is_wide)
            left += width
        labels.append(f"{recipe.recipe} ({steps.real_tokens(recipe):,.0f}\nreal tokens)")
    place_labels(ax, labels)
    (first, slow), *_, (last, fast) = predictions.items()
    more_tokens = steps.real_tokens(last) / steps.real_tokens(first)
    longer = fast.clock / slow.clock
    ax.set(title=f"A micro-step of {last.recipe} takes {longer:.2f} times as long, "
           f"for {more_tokens:.1f} times the real tokens", xlabel="seconds")
    ax.set_ylim(-len(predictions) + 0.5, 0.65)
    ax.grid(axis="y", visible=False)
    style.finish(fig, "08_parts", "predicted from the compiled programs, 31B, all 60 layers")


def _draw_part(
        ax: Axes, place: int, group: str, left: float, width: float, color: str,
        is_wide: bool) -> None:
    """One piece of a bar of `draw_parts`, with its name inside, or above it if it's too narrow.

    Waits are white, and hatched.
    """
    fill, hatch, ink = color, "", "white"
    if group == WAITS:
        fill, hatch, ink = "white", "////", color
    if group in ("attention", "LoRA", REST):
        ink = style.BLACK
    ax.barh(-place, width, left=left, color=fill, edgecolor=color, hatch=hatch, height=0.75)
    middle = left + width / 2
    if not is_wide:
        ax.text(middle, 0.41 - place, group, color=style.BLACK, fontsize=8, ha="center")
        return
    box = {"facecolor": fill, "edgecolor": "none", "pad": 1.0}
    ax.text(middle, -place, group, color=ink, fontsize=8, ha="center", va="center", bbox=box)


def draw_anchors(rows: pd.DataFrame) -> None:
    """Predicted over measured time of data/anchors/anchors.csv, with bands of 10 and 25%.

    Whole training steps have their names beside them. Hollow points are shown but don't count
    (`bands.counts`), and the title leaves them out. A ratio below `LOWEST` is a triangle at the
    lower edge, with its number.
    """
    rows = rows[rows.predicted_ms != ""]
    rows = rows.astype({"measured_ms": float, "predicted_ms": float})
    rows = rows.assign(ratio=rows.predicted_ms / rows.measured_ms)
    fig, ax = style.figure(8, 4.4)
    for share, alpha in ((0.25, 0.15), (0.10, 0.3)):
        ax.axhspan(1 - share, 1 + share, color=style.GRAY, alpha=alpha, lw=0,
                   label=f"within {share:.0%}")
    ax.axhline(1, color=style.BLACK, lw=1)
    colors = {"v5e": style.BLUE, "v5p": style.GREEN, "v6e": style.ORANGE}
    kinds = rows.slice.str.split("-").str[0]
    counted = np.array([bands.counts(row) for row in rows.astype(str).to_dict("records")])
    for kind, group in rows[counted].groupby(kinds):
        color = colors.get(kind, style.GRAY)
        ax.scatter(group.measured_ms, group.ratio, color=color, label=kind, zorder=3)
    others = rows[~counted & (rows.ratio >= LOWEST)]
    ax.scatter(others.measured_ms, others.ratio, facecolors="none", edgecolors=style.GRAY,
               label="doesn't count", zorder=3)
    for row in rows[rows.ratio < LOWEST].itertuples():
        ax.plot(row.measured_ms, 1.04 * LOWEST, "v", mfc="none", color=style.GRAY)
        ax.annotate(f"{row.ratio:.2f}", (row.measured_ms, 1.08 * LOWEST), rotation=60, fontsize=8)
    _name_steps(ax, rows[rows.name.str.match("maxtext|tunix")])
    miss = (rows.ratio - 1).abs()
    close = (miss[counted] <= 0.10).sum()
    half = (miss[counted] <= 0.25).sum()
    ax.set(xscale="log", yscale="log", xlabel="measured by others, ms (log scale)",
           ylabel="predicted / measured (log scale)",
           title=f"Of {counted.sum()} programs that count, {close} are within 10%, "
                 f"{half} within 25%")
    ticks = (0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.6)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.set(xlim=(None, 1e5), ylim=(LOWEST, 1.8))
    ax.legend(fontsize=8, loc="lower right")
    style.finish(fig, "08_anchors", "data/anchors/anchors.csv, measured by others")


def _name_steps(ax: Axes, rows: pd.DataFrame) -> None:
    """Names beside the dots of whole training steps, from the highest dot to the lowest."""
    by_height = rows.sort_values("ratio", ascending=False)
    for number, row in enumerate(by_height.itertuples()):
        ax.annotate(row.name, (row.measured_ms, row.ratio), xytext=(14, 36 - 20 * number),
                    textcoords="offset points", fontsize=8, va="center",
                    arrowprops={"arrowstyle": "-", "color": style.GRAY, "lw": 0.7})
