"""13's figures: what happens step by step, and what is held out, sampled and greedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from appendix import rl_runs as lab
from helpers import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"start": "the start",
         "reinforce": "REINFORCE:\nown answers × advantage",
         "dpo": "DPO:\npairs of answers",
         "rejection": "rejection:\nkeep what passes",
         "more_sft": "more of the\nsame rows",
         "naive_judge": "the naive judge",
         "our_judge": "our judge",
         "compiles": "for compiling"}
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # a label on a line stays readable


def smoothed(values: pd.Series) -> pd.Series:
    """Means of five steps around each step, of fewer at the ends."""
    return values.rolling(5, center=True, min_periods=3).mean()


def draw_steps(ax: Axes, table: pd.DataFrame, arm: str, column: str, color: str,
               label: str | None = None, line: str = "-") -> None:
    """Draw a column of an arm's runs: each step thin, the mean of five steps thick.

    Args:
      ax: where to draw.
      table: from `lab.stored`.
      arm, column: what to draw.
      color, label, line: how.
    """
    values = lab.by_step(table, arm, column)
    smooth = smoothed(values)
    ax.plot(values.index, values, color=color, lw=0.8, alpha=0.5)
    ax.plot(smooth.index, smooth, line, color=color, lw=2.2, label=label)
    ax.xaxis.get_major_locator().set_params(integer=True)


def draw_beside_start(ax: Axes, table: pd.DataFrame, column: str, title: str) -> None:
    """REINFORCE beside the start on the same problems; the title says where the thick lines end.

    Args:
      ax, table, column: as for `draw_steps`.
      title: what these answers do, for the title.
    """
    draw_steps(ax, table, "reinforce", column, style.BLUE, "REINFORCE")
    draw_steps(ax, table, "rejection", column, style.GRAY, "the start, same problems")
    last = smoothed(lab.by_step(table, "reinforce", column)).iloc[-1]
    start = smoothed(lab.by_step(table, "rejection", column)).iloc[-1]
    ax.set(title=f"At the end, {last:.0%} {title}; the start, asked the same: {start:.0%}",
           ylim=(0, None))


def draw_held_out(ax: Axes, shares: pd.DataFrame) -> None:
    """A row for each arm: a filled dot for sampled answers, a hollow one for greedy ones.

    Args:
      ax: where to draw.
      shares: from `lab.held_out`.
    """
    percent = 100 * shares
    for place, (arm, row) in enumerate(percent.iterrows()):
        color = style.GRAY if arm == "start" else style.BLUE
        ends = [[row.sampled - row.low], [row.high - row.sampled]]
        ax.errorbar(row.sampled, place, xerr=ends, fmt="o", color=color, capsize=4, lw=2)
        ax.plot(row.greedy, place + 0.2, "o", color=color, mfc="white", mew=2)
        ax.annotate(f"{row.sampled:.1f}", (row.sampled, place - 0.16), ha="center", bbox=BEHIND)
        ax.annotate(f"{row.greedy:.1f}", (row.greedy, place + 0.2), xytext=(8, 0),
                    textcoords="offset points", va="center", bbox=BEHIND)
    if "start" in percent.index:
        start = percent.loc["start"]
        ax.axvline(start.sampled, color=style.GRAY, lw=1)
        ax.axvline(start.greedy, color=style.GRAY, lw=1, ls=":")
    names = [NAMES[arm] for arm in percent.index]
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="% of 38 held-out problems pass; filled: sampled, hollow: greedy")
    ax.set(xlim=(-5, 102), ylim=(len(names) - 0.5, -0.6))


def draw_judged(ax: Axes, table: pd.DataFrame, arm: str) -> None:
    """What one judge pays, what really works, and what prints the winning line, step by step."""
    draw_steps(ax, table, arm, "reward", style.ORANGE, "what the judge pays")
    draw_steps(ax, table, arm, "verilog", style.BLUE, "what really works", ":")
    draw_steps(ax, table, arm, "forged", style.RED, "what prints the winning line", "--")
    pay = lab.by_step(table, arm, "reward")
    truth = lab.by_step(table, arm, "verilog")
    first = truth[truth.index <= 6].mean()
    last = truth[truth.index > truth.index.max() - 6].mean()
    same = " (pay and truth are one line)" if np.allclose(pay, truth) else ""
    ax.set(title=f"Paid by {NAMES[arm]}: from {first:.0%} to {last:.0%} work{same}".replace(
        "by for", "for"))
    ax.set(ylim=(-0.02, 1.02), xlim=(1, truth.index.max()), ylabel="share of the answers")


def as_percent(interval: Mapping[str, float]) -> str:
    """A gain as "+17 (+11 to +23)", in points; keys are gained, low and high."""
    gained, low, high = (100 * interval[key] for key in ("gained", "low", "high"))
    return f"{gained:+.0f} ({low:+.0f} to {high:+.0f})"


def gains_table(passes: lab.Passed, arms: Sequence[str]) -> pd.DataFrame:
    """What each arm gains over the start, in points, with intervals and p, at one try and at five.

    Args:
      passes: from `lab.drawn_passes`.
      arms: one for each row.
    """
    gained = {}
    for k in (1, 5):
        table = lab.gains(passes, arms, k)
        gained[f"pass@{k} over the start"] = table.apply(as_percent, axis=1)
        gained[f"p, pass@{k}"] = table.p.map("{:.1g}".format)
    names = {arm: NAMES[arm].replace("\n", " ") for arm in arms}
    return pd.DataFrame(gained).rename(index=names)
