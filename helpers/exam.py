"""The figures of 07: every answer of both models, their scores, and problem by problem who wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from helpers import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Interval = tuple[float, float, float]  # mean, low, high
COLORS = {"base": style.GRAY, "tuned": style.BLUE}
FAILS = "#FBE3C0"  # a pale orange


class Strip(NamedTuple):
    """Answers of one model, asked in one way."""

    model: str           # "base" or "tuned"
    asked: str           # for the title: how
    answers: pd.DataFrame  # `problem`, `index` and `passed`, one answer a row


class Scored(NamedTuple):
    """A score of one model, asked in one way."""

    model: str           # "base" or "tuned"
    asked: str           # how
    interval: Interval   # shares
    greedy: bool = False


def draw_answers(strips: Sequence[Strip], name: str, source: str) -> None:
    """A square for each answer: a strip for each model and wording, a column for each problem.

    Args:
      strips: their columns are in the order of the first one's scores.
      name, source: as in `style.finish`.
    """
    best_first = strips[0].answers.groupby("problem").passed.sum().sort_values(ascending=False)
    height = 0.5 + 1.15 * len(strips)
    fig, axes = style.figure(7, height, rows=len(strips), sharex=True, squeeze=False)
    for ax, strip in zip(axes.flat, strips, strict=True):
        _draw_strip(ax, strip, list(best_first.index))
    axes.flat[-1].set_xlabel("a column is a problem, a row is a try; pale squares fail")
    style.finish(fig, name, source)


def _draw_strip(ax: Axes, strip: Strip, order: Sequence[str]) -> None:
    """One strip, its problems in this order."""
    from matplotlib.colors import ListedColormap
    answers = strip.answers
    grid = answers.pivot(index="index", columns="problem", values="passed").astype(float)
    two_colors = ListedColormap([FAILS, COLORS[strip.model]])
    ax.pcolormesh(grid[order], vmin=0, vmax=1, cmap=two_colors, edgecolors="white", linewidth=0.6)
    count = f"{answers.passed.sum()} of {len(answers)} answers pass"
    ax.set(title=f"{strip.model.capitalize()} ({strip.asked}): {count}", xticks=[], yticks=[])


def draw_scores(ax: Axes, scores: Sequence[Scored], ceiling: float) -> None:
    """A dot with its interval for each score, in percent, the first one at the bottom.

    Args:
      ax: where to draw.
      scores: filled dots were sampled, hollow ones are greedy.
      ceiling: the share that can be won.
    """
    names = []
    for place, scored in enumerate(scores):
        mean, low, high = (100 * part for part in scored.interval)
        color = COLORS[scored.model]
        inside = "white" if scored.greedy else color
        ends = [[mean - low], [high - mean]]
        ax.errorbar(mean, place, xerr=ends, fmt="o", color=color, mfc=inside, capsize=4, lw=2)
        ax.annotate(f"{mean:.0f}", (mean, place + 0.22), ha="center")
        names.append(f"{scored.model}, {scored.asked}")
    ax.axvline(100 * ceiling, color=style.RED, linestyle="--")
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="pass@1, %; dashed: the ceiling; hollow: greedy")
    ax.set(xlim=(-6, 106), ylim=(-0.5, len(names) - 0.2))


def draw_differences(ax: Axes, compared: Mapping[str, Any], rival: str) -> None:
    """A bar for each problem: the tuned model's score minus the base's, and a dot where it's 0.

    Args:
      ax: where to draw.
      compared: from `verilog.compare`, base first.
      rival: how the base is asked.
    """
    values = 100 * np.sort(compared["values"])
    places = np.arange(len(values))
    mean, low, high = (100 * part for part in compared["difference"])
    colors = [style.BLUE if value > 0 else style.ORANGE for value in values]
    ax.bar(places, values, color=colors)
    equal = values == 0
    ax.plot(places[equal], values[equal], ".", color=style.GRAY)

    better, worse = int((values > 0).sum()), int((values < 0).sum())
    counted = f"{better} better, {worse} worse, {equal.sum()} equal"
    leaves_out_zero = low > 0 or high < 0
    is_rare = compared["p"] < 0.05
    luck = ", so it could be luck"
    if leaves_out_zero and is_rare:
        luck = ""
    elif leaves_out_zero or is_rare:
        luck = ",\nat the edge of what luck explains"
    ax.axhline(mean, color=style.BLACK, lw=2)
    ax.axhline(low, color=style.BLACK, ls=":")
    ax.axhline(high, color=style.BLACK, ls=":")
    ax.set(title=f"{counted}\n{mean:+.0f} points on average ({low:+.0f} to {high:+.0f}){luck}")
    ax.set(xlabel="problems, sorted", xticks=[], ylabel=f"tuned minus base,\n{rival}, points")
