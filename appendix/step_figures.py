"""Figures of notebook 08: a predicted step as a trace and by its parts, memory, and the road.

Each function makes one figure and writes it below RUN_DIR by `helpers.style.finish`.
"""

import matplotlib.pyplot as plt
import numpy as np

from tpu_time import report
from appendix import steps
from helpers import style

COLORS = dict(zip(steps.PARTS, (
    style.BLUE, style.SKY, style.GREEN, style.ORANGE, style.PURPLE, style.YELLOW, style.GREY,
    style.BLACK, "#D0D0D0"), strict=True))
WAITS = {"waits: reduce-scatter": "#8C2D04", "waits: all-gather": "#4A1500",
         "waits: all-reduce": "#FDAE6B", "waits: collective-permute": "#FDD0A2",
         "waits: all-to-all": "#FDD0A2", "waits: copy": "#FEE6CE"}


def legend(fig, colors):
    """A legend of coloured patches beside the axes: {label: color}."""
    fig.legend([plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()], colors,
               loc="outside right", fontsize=8)


def draw_trace(found, name, title):
    """The lanes of a prediction: what the chip computes, what it waits for, what is on the links."""
    fig, ax = style.figure(11, 2.4)
    seen, waiting = set(), WAITS["waits: reduce-scatter"]
    for event in found.events:
        waits = event.track == "wait"
        color = waiting if waits else COLORS.get(event.part, style.GREY)
        lane = report.TRACKS[event.track][0]
        ax.broken_barh([(1e3 * event.start, 1e3 * event.seconds)], (-lane - 0.4, 0.8), color=color,
                       lw=0)
        seen.add(None if waits else event.part)
    lanes = dict(report.TRACKS.values())
    ax.set_yticks([-lane for lane in lanes], lanes.values())
    busy = found.compute / found.clock
    ax.set(title=f"The chip computes {busy:.0%} of the time: {title}", xlabel="ms")
    ax.grid(axis="y", visible=False)
    legend(fig, {part: color for part, color in COLORS.items() if part in seen}
           | {"waits for the links": waiting})
    style.finish(fig, name, "predicted from the compiled program (libtpu, no TPU)")


def draw_memory(table):
    """Stacked bars: arguments, fresh outputs, temporaries, against the chip's limit."""
    fig, ax = style.figure(9, 0.6 + 0.42 * len(table))
    places, left = np.arange(len(table))[::-1], 0.0
    for column, color, label in (("args_gib", style.BLUE, "arguments"),
                                 ("out_gib", style.RED, "fresh outputs"),
                                 ("temp_gib", style.ORANGE, "temporaries")):
        ax.barh(places, table[column].fillna(0), left=left, color=color, label=label)
        left += table[column].fillna(0)
    limit, refused = table.limit_gib.iloc[0], table.args_gib.isna()
    more = table.hbm_gib.fillna(1.08 * limit)[refused]  # the compiler does not always say how much
    ax.barh(places[refused], more, color="white", edgecolor=style.GREY, hatch="///", label="refused")
    ax.axvline(limit, color=style.BLACK, lw=1)
    ax.annotate(f"limit {limit:.1f} GiB ", (limit, places[0] + 0.45), fontsize=9, va="bottom",
                ha="right")
    ax.set_yticks(places, table.recipe)
    ax.set(title="HBM of one chip while a micro-step runs", xlabel="GiB")
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside upper right", ncols=4, fontsize=9)
    style.finish(fig, "08_memory", "compiled for a v5p-8 (libtpu, no TPU), 31B, all 60 layers")


def draw_road(steps):
    """Factors of `steps.road` as bars on a logarithmic axis from the published speed, 1, to ours."""
    fig, ax = style.figure(9, 1.4 + 0.7 * (len(steps) + 1))
    first, last = steps[0][1], steps[-1][2]
    longest = max(steps, key=lambda step: step[2] / step[1])
    for place, (label, start, end) in enumerate([*steps, ("all together", first, last)]):
        color = style.GREEN if end > start else style.RED
        color = style.BLUE if place == len(steps) else color
        ax.barh(-place, (end - start) / first, left=start / first, color=color, height=0.6)
        ax.annotate(f"x {end / start:.2f}", (max(start, end) / first, -place), xytext=(4, 0),
                    textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks([-place for place in range(len(steps) + 1)],
                  [*(label for label, _, _ in steps), "all together"])
    ax.set(xscale="log", xlim=(0.9, 1.4 * last / first),
           xlabel=f"times the published real tokens per second ({first:,.0f})",
           title=f"The longest stretch is {longest[0]}: {longest[2] / longest[1]:.1f} of "
           f"{last / first:.1f} times the published speed")
    ticks = [tick for tick in (1, 2, 3, 4, 5, 6, 8, 10, 15) if tick < 1.4 * last / first]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.axvline(1, color=style.GREY, lw=1)
    ax.grid(axis="y", visible=False)
    style.finish(fig, "08_road", "predicted for a v5p-8 from the compiled programs, not measured")


def draw_parts(predictions):
    """The time of a micro-step by part of the model, and its waits by collective: {recipe: Prediction}."""
    fig, ax = style.figure(11, 1.2 + 0.7 * len(predictions))
    colors, seen = COLORS | WAITS, set()
    for place, (recipe, found) in enumerate(predictions.items()):
        sums, left = steps.parts_of(recipe, found).groupby("part").seconds.sum(), 0.0
        for label in sorted(sums.index, key=[*colors].index):
            if sums[label] > 0.002 * found.clock:
                seen.add(label)
            ax.barh(-place, sums[label], left=left, color=colors[label], height=0.75)
            left += sums[label]
    ax.set_yticks([-place for place in range(len(predictions))], [
        f"{recipe.recipe} ({steps.real_tokens(recipe):,.0f}\nreal tokens)" for recipe in predictions])
    ax.set(title="One micro-step, by part of the model", xlabel="seconds")
    ax.grid(axis="y", visible=False)
    legend(fig, {label: color for label, color in colors.items() if label in seen})
    style.finish(fig, "08_parts", "predicted from the compiled programs, 31B, all 60 layers")


def draw_anchors(rows):
    """Predicted against measured time of data/anchors/anchors.csv, with bands of 10 and 25 %."""
    rows = rows[rows.predicted_ms != ""].astype({"measured_ms": float, "predicted_ms": float})
    fig, ax = style.figure(7, 5)
    ends = np.array([rows.measured_ms.min() / 2, rows.measured_ms.max() * 2])
    for share, alpha in ((0.25, 0.15), (0.10, 0.3)):
        ax.fill_between(ends, ends * (1 - share), ends * (1 + share), color=style.GREY, alpha=alpha,
                        lw=0, label=f"within {share:.0%}")
    ax.plot(ends, ends, color=style.BLACK, lw=1, label="equal")
    colors = {"v5e": style.BLUE, "v5p": style.GREEN, "v6e": style.ORANGE}
    for kind, group in rows.groupby(rows.slice.str.split("-").str[0]):
        ax.scatter(group.measured_ms, group.predicted_ms, color=colors[kind], label=kind, zorder=3)
    close = (rows.predicted_ms / rows.measured_ms - 1).abs() <= 0.10
    ax.set(xscale="log", yscale="log", xlabel="measured by others, ms", ylabel="predicted, ms",
           title=f"{close.sum()} of {len(rows)} programs are within 10 %")
    ax.legend(fontsize=8)
    style.finish(fig, "08_anchors", "measured: sources in data/anchors/anchors.csv")
