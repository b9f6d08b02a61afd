"""The figures of notebook 03. They're drawn here, and every number comes from the caller."""

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
    """Show one packed row: which token may look at which, and its other three columns as strips.

    Args:
      row: a `Batch` of [T] arrays.
      allowed: bool [T, T], True where a token (row) may look at another (column).
    """
    colours = _colours_of(row.segment_ids)
    fig, (left, right) = style.figure(10, 4.1, columns=2, width_ratios=[1, 1.5])
    _draw_mask(left, row, allowed, colours)
    _draw_strips(right, row, colours)
    for ax in (left, right):
        ax.grid(False)
    source = (f"the first packed row of step 1, {row.tokens.size} tokens; "
              "white: padding; light: read, not trained")
    style.finish(fig, "03_packed_row", source)


def _colours_of(segment_ids: np.ndarray) -> np.ndarray:
    """The colour of each token's example, white for padding. [T] -> [T, 3]"""
    repeats = int(segment_ids.max()) // len(style.CYCLE) + 1
    cycle = matplotlib.colors.to_rgba_array(style.CYCLE * repeats)
    white = np.ones((1, 3))
    palette = np.concatenate([white, cycle[:, :3]])
    return palette[segment_ids]


def _draw_mask(ax: Axes, row: "Batch", allowed: np.ndarray, colours: np.ndarray) -> None:
    """Draw `allowed` [T, T] in the colours [T, 3] of the tokens that look, pale if not trained."""
    strength = np.where(row.loss_mask, 1.0, 0.35)[:, None]
    of_token = 1 - strength * (1 - colours)  # [T, 3]
    pixels = np.where(allowed[..., None], of_token[:, None], 1.0)  # [T, T, 3]
    ax.imshow(pixels, interpolation="nearest")
    ax.set(title="No token sees another example", xlabel="token looked at", ylabel="token")


def _draw_strips(ax: Axes, row: "Batch", colours: np.ndarray) -> None:
    """Draw a row's segment ids, loss mask and positions, each as a strip of T colours."""
    trained = row.loss_mask[:, None]
    padded = (row.segment_ids == 0)[:, None]
    depth = (row.positions / max(row.positions.max(), 1))[:, None]
    darker = 1 - 0.75 * depth * (1 - colours)  # the further into its example
    strips = {
        "segment_ids": colours,
        "loss_mask": np.where(trained, colours, LIGHT_GREY),
        "positions": np.where(padded, 1.0, darker),
    }
    for place, (name, pixels) in enumerate(strips.items()):
        extent = (0, len(pixels), place + 0.8, place + 0.2)
        ax.imshow(pixels[None], aspect="auto", interpolation="nearest", extent=extent)
        ax.text(0, place + 0.13, name, fontsize=10, family="monospace")

    examples = int(row.segment_ids.max())
    for segment in range(1, examples + 1):
        tokens = np.flatnonzero(row.segment_ids == segment)
        ax.text(tokens.mean(), 0.5, str(segment), color="white", ha="center", va="center")
        _name_position(ax, row, tokens[0], 4, "left")
        _name_position(ax, row, tokens[-1], -4, "right")
    ax.set(
        title="Only answers are trained, positions restart",
        xlabel="token",
        yticks=[],
        xlim=(0, len(row.tokens)),
        ylim=(3.25, -0.1),
    )
    ax.spines["left"].set_visible(False)


def _name_position(ax: Axes, row: "Batch", token: int, shift: int, side: str) -> None:
    """Write a token's position below the strips, `shift` points beside the token."""
    ax.annotate(
        str(row.positions[token]),
        (token, 2.9),
        xytext=(shift, 0),
        textcoords="offset points",
        ha=side,
        va="top",
        fontsize=8,
    )


def draw_loss(log: pd.DataFrame, steps: int, clip: float) -> Figure:
    """The figure of a run: its losses, and beside them learning rate and gradient norm.

    Args:
      log: `train.read_log` of its `log.jsonl`.
      steps: of the whole run.
      clip: the norm that a gradient is clipped to.
    """
    training = log.dropna(subset="loss")
    validations = log.dropna(subset="val_loss")
    fig, (left, middle, right) = style.figure(10, 3.4, columns=3, width_ratios=[2.4, 1, 1])
    _draw_losses(left, training, validations)

    middle.plot(training.step, training.learning_rate, color=style.ORANGE)
    middle.set(title="Learning rate", ylim=(0, None))

    right.plot(training.step, training.grad_norm, color=style.PURPLE)
    right.axhline(clip, color=style.GREY, ls="--", label="clipped above")
    right.set(title="Gradient norm", yscale="log")
    right.legend()
    for ax in (left, middle, right):
        ax.set(xlabel="step", xlim=(0, steps * 1.02))
    return fig


def _draw_losses(ax: Axes, training: pd.DataFrame, validations: pd.DataFrame) -> None:
    """Draw the losses of steps and of validations, from their lines of the log."""
    steps = training.step
    smooth = training.loss.rolling(10, min_periods=1, center=True).mean()
    ax.plot(steps, training.loss, color=style.BLUE, alpha=0.3, lw=1)
    ax.plot(steps, smooth, color=style.BLUE, lw=2, label="training, mean of 10 steps")

    held_out = validations.val_loss
    ax.plot(validations.step, held_out, "o-", color=style.GREEN, ms=5, label="held-out rows")
    first = validations.iloc[0]
    last = validations.iloc[-1]
    ax.set(
        ylabel="nats per trained token",
        yscale="log",
        title=f"Held-out loss: {first.val_loss:.3g} at step {first.step:.0f}, "
              f"{last.val_loss:.3g} at step {last.step:.0f}",
    )
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend()
