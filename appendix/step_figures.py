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

COLORS = {  # of `parts.PARTS`
    "MLP": style.BLUE,
    "output matrix": style.SKY,
    "projections": style.GREEN,
    "attention": style.ORANGE,
    "LoRA": style.PURPLE,
    "norms": style.YELLOW,
    "conversions": style.GRAY,
    "optimizer": style.BLACK,
    "other": "#D0D0D0",
}
assert tuple(COLORS) == parts.PARTS
WAITS = {"waits: reduce-scatter": "#8C2D04", "waits: all-gather": "#4A1500",
         "waits: all-reduce": "#FDAE6B", "waits: collective-permute": "#FDD0A2",
         "waits: all-to-all": "#FDD0A2", "waits: copy": "#FEE6CE"}
WAITING = WAITS["waits: reduce-scatter"]  # where the kind of wait isn't told
TICKS = (1, 2, 3, 4, 5, 6, 8, 10, 15)  # times the published recipe's predicted speed
ALL = "all together"


def legend(fig: Figure, colors: Mapping[str, str]) -> None:
    """A legend of colored patches beside the axes: {label: color}."""
    patches = []
    for color in colors.values():
        patches.append(plt.Rectangle((0, 0), 1, 1, color=color))
    fig.legend(patches, colors, loc="outside right", fontsize=8)


def place_labels(ax: Axes, labels: Sequence[str]) -> None:
    """Label the bars of a figure that go down from 0: the first at the top."""
    places = [-place for place in range(len(labels))]
    ax.set_yticks(places, labels)


def draw_trace(prediction: Prediction, name: str, title: str) -> None:
    """The lanes of a prediction: what the chip computes, what it waits for, what's on the links."""
    fig, ax = style.figure(11, 2.4)
    parts_seen = set()
    for event in prediction.events:
        if event.track == "wait":
            color = WAITING
        else:
            color = COLORS.get(event.part, style.GRAY)
            parts_seen.add(event.part)
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
    shown = {part: color for part, color in COLORS.items() if part in parts_seen}
    shown["waits for the links"] = WAITING
    legend(fig, shown)
    style.finish(fig, name, "predicted from the compiled program (libtpu, no TPU)")


def draw_road(road: Sequence[tuple[str, float, float]], told: float) -> None:
    """Factors of `steps.road` as bars on a logarithmic axis, from the published recipe's speed, 1.

    The blue bar is all of them together, but for the last one: no measurement anchors a step with
    int8 products, so its bar is hatched and stands below.

    Args:
      road: (label, real tokens a second before, and after) of each stretch, int8 products last.
      told: real tokens a second that the recipe's authors measured.
    """
    *anchored, beyond = road
    fig, ax = style.figure(9, 1.4 + 0.7 * (len(road) + 1))
    _, first, _ = anchored[0]
    _, _, last = anchored[-1]
    labels, factors = [], []
    for place, (label, start, end) in enumerate(anchored):
        color = style.GREEN if end > start else style.RED
        _draw_stretch(ax, place, start, end, first, color)
        labels.append(label)
        factors.append(end / start)
    _draw_stretch(ax, len(anchored), first, last, first, style.BLUE)
    label, start, end = beyond
    _draw_stretch(ax, len(road), start, end, first, "white", hatch="///")
    place_labels(ax, [*labels, ALL, f"{label} (no anchor)"])

    longest = labels[np.argmax(factors)]
    right_end = 1.4 * end / first
    ax.set(xscale="log", xlim=(0.9, right_end),
           xlabel=f"times our prediction for the published recipe: {first:,.0f} real tokens per "
           f"second\n(its authors measured {told:,.0f})",
           title=f"The longest stretch is {longest}: {max(factors):.1f} of "
           f"{last / first:.1f} times")
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
    ax.annotate(f"x {end / start:.2f}", right_end, xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=9)


def draw_parts(predictions: Mapping[steps.Recipe, Prediction]) -> None:
    """The time of two micro-steps or more, by part of the model, and their waits by collective."""
    fig, ax = style.figure(11, 1.2 + 0.7 * len(predictions))
    colors = COLORS | WAITS
    order = list(colors)
    large = set()  # parts that can be seen in some bar, for the legend
    labels = []
    for place, (recipe, prediction) in enumerate(predictions.items()):
        seconds = steps.parts_of(recipe, prediction).groupby("part").seconds
        sums = seconds.sum()
        left = 0.0
        for part in sorted(sums.index, key=order.index):
            if sums[part] > 0.005 * prediction.clock:
                large.add(part)
            ax.barh(-place, sums[part], left=left, color=colors[part], height=0.75)
            left += sums[part]
        labels.append(f"{recipe.recipe} ({steps.real_tokens(recipe):,.0f}\nreal tokens)")
    place_labels(ax, labels)
    (first, slow), *_, (last, fast) = predictions.items()
    more_tokens = steps.real_tokens(last) / steps.real_tokens(first)
    longer = fast.clock / slow.clock
    ax.set(title=f"A micro-step of {last.recipe} takes {longer:.2f} times as long, "
           f"for {more_tokens:.1f} times the real tokens", xlabel="seconds")
    ax.grid(axis="y", visible=False)
    legend(fig, {part: color for part, color in colors.items() if part in large})
    style.finish(fig, "08_parts", "predicted from the compiled programs, 31B, all 60 layers")


def draw_anchors(rows: pd.DataFrame) -> None:
    """Predicted against measured time of data/anchors/anchors.csv, with bands of 10 and 25%.

    Hollow points are shown but don't count (`bands.counts`), and the title leaves them out.
    """
    rows = rows[rows.predicted_ms != ""]
    rows = rows.astype({"measured_ms": float, "predicted_ms": float})
    fig, ax = style.figure(7, 5)
    shortest, longest = rows.measured_ms.min(), rows.measured_ms.max()
    ends = np.array([shortest / 2, longest * 2])
    for share, alpha in ((0.25, 0.15), (0.10, 0.3)):
        low, high = ends * (1 - share), ends * (1 + share)
        ax.fill_between(ends, low, high, color=style.GRAY, alpha=alpha, lw=0,
                        label=f"within {share:.0%}")
    ax.plot(ends, ends, color=style.BLACK, lw=1, label="equal")
    colors = {"v5e": style.BLUE, "v5p": style.GREEN, "v6e": style.ORANGE}
    kinds = rows.slice.str.split("-").str[0]
    counted = np.array([bands.counts(row) for row in rows.astype(str).to_dict("records")])
    for kind, group in rows[counted].groupby(kinds):
        color = colors.get(kind, style.GRAY)
        ax.scatter(group.measured_ms, group.predicted_ms, color=color, label=kind, zorder=3)
    others = rows[~counted]
    ax.scatter(others.measured_ms, others.predicted_ms, facecolors="none", edgecolors=style.GRAY,
               label="doesn't count", zorder=3)
    miss = (rows.predicted_ms / rows.measured_ms - 1).abs()
    close = (miss[counted] <= 0.10).sum()
    ax.set(xscale="log", yscale="log", xlabel="measured by others, ms", ylabel="predicted, ms",
           title=f"{close} of {counted.sum()} programs that count are within 10%")
    ax.legend(fontsize=8)
    style.finish(fig, "08_anchors", "measured: sources in data/anchors/anchors.csv")
