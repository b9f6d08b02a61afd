"""The figures of notebook 03: drawing only, every number comes from the caller."""

from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers import style

if TYPE_CHECKING:
    from helpers.train import Batch

LIGHT_GREY = np.array([0.93, 0.93, 0.93])


def packed_row(row: "Batch", allowed: np.ndarray) -> None:
    """One packed row: who may look at whom, and its three companions as strips.

    Args:
      row: a `Batch` of [T] arrays.
      allowed: bool [T, T], True where a token (row) may look at another (column).
    """
    color = _colors_of(row.segment_ids)  # [T, 3]
    fig, (left, right) = style.figure(10, 4.1, columns=2, width_ratios=[1, 1.5])
    _draw_mask(left, row, allowed, color)
    _draw_strips(right, row, color)
    for ax in (left, right):
        ax.grid(False)
    style.finish(fig, "03_packed_row", f"the first packed row of step 1, {row.tokens.size} tokens; "
                 "white: padding; light: read, not trained")


def _colors_of(segment_ids: np.ndarray) -> np.ndarray:
    """A colour for each example of a row, white for padding. [T] -> [T, 3]"""
    repeats = int(segment_ids.max()) // len(style.CYCLE) + 1
    cycle = matplotlib.colors.to_rgba_array(style.CYCLE * repeats)[:, :3]
    white = np.ones((1, 3))
    return np.concatenate([white, cycle])[segment_ids]


def _draw_mask(ax: Axes, row: "Batch", allowed: np.ndarray, color: np.ndarray) -> None:
    strength = np.where(row.loss_mask, 1.0, 0.35)[:, None, None]
    looked_at = 1 - strength * (1 - color)[:, None]
    ax.imshow(np.where(allowed[..., None], looked_at, 1.0), interpolation="nearest")
    ax.set(title="No token sees another example", xlabel="token looked at", ylabel="token")


def _draw_strips(ax: Axes, row: "Batch", color: np.ndarray) -> None:
    depth = (row.positions / max(row.positions.max(), 1))[:, None]
    padded = (row.segment_ids == 0)[:, None]
    strips = {"segment_ids": color,
              "loss_mask": np.where(row.loss_mask[:, None], color, LIGHT_GREY),
              "positions": np.where(padded, 1.0, 1 - 0.75 * depth * (1 - color))}
    for place, (name, pixels) in enumerate(strips.items()):
        extent = (0, len(pixels), place + 0.8, place + 0.2)
        ax.imshow(pixels[None], aspect="auto", interpolation="nearest", extent=extent)
        ax.text(0, place + 0.13, name, fontsize=10, family="monospace")
    for segment in range(1, int(row.segment_ids.max()) + 1):
        tokens = np.flatnonzero(row.segment_ids == segment)
        ax.text(tokens.mean(), 0.5, str(segment), color="white", ha="center", va="center")
        _name_position(ax, row, tokens[0], 4, "left")
        _name_position(ax, row, tokens[-1], -4, "right")
    ax.set(title="Only answers are trained, positions restart", xlabel="token", yticks=[],
           xlim=(0, len(row.tokens)), ylim=(3.25, -0.1))
    ax.spines["left"].set_visible(False)


def _name_position(ax: Axes, row: "Batch", token: int, move: int, side: str) -> None:
    ax.annotate(str(row.positions[token]), (token, 2.9), xytext=(move, 0), ha=side,
                textcoords="offset points", va="top", fontsize=8)


def draw_loss(log: pd.DataFrame, steps: int, clip: float) -> Figure:
    """The figure of a run: losses; beside them learning rate and gradient norm.

    Args:
      log: `train.read_log` of its `log.jsonl`.
      steps: of the whole run.
      clip: the norm that a gradient is clipped to.
    """
    run, val = log.dropna(subset="loss"), log.dropna(subset="val_loss")
    fig, (left, middle, right) = style.figure(10, 3.4, columns=3, width_ratios=[2.4, 1, 1])
    left.plot(run.step, run.loss, color=style.BLUE, alpha=0.3, lw=1)
    smooth = run.loss.rolling(10, min_periods=1, center=True).mean()
    left.plot(run.step, smooth, color=style.BLUE, lw=2, label="training, mean of 10 steps")
    left.plot(val.step, val.val_loss, "o-", color=style.GREEN, ms=5, label="held-out rows")
    first, last = val.iloc[0], val.iloc[-1]
    left.set(ylabel="nats per trained token", yscale="log",
             title=f"Held-out loss: {first.val_loss:.3g} at step {first.step:.0f}, "
                   f"{last.val_loss:.3g} at step {last.step:.0f}")
    left.yaxis.set_major_formatter("{x:g}")
    left.legend()
    middle.plot(run.step, run.learning_rate, color=style.ORANGE)
    middle.set(title="Learning rate", ylim=(0, None))
    right.plot(run.step, run.grad_norm, color=style.PURPLE)
    right.axhline(clip, color=style.GREY, ls="--", label="clipped above")
    right.set(title="Gradient norm", yscale="log")
    right.legend()
    for ax in (left, middle, right):
        ax.set(xlabel="step", xlim=(0, steps * 1.02))
    return fig
