"""The figures of notebook 03: drawing only, every number comes from the caller."""

import matplotlib
import numpy as np

from helpers import style

def packed_row(row, allowed):
    """One packed row: who may look at whom, and its three companions as strips.

    Args:
      row: a `Batch` of [T] arrays.
      allowed: bool [T, T], True where a token (row) may look at another (column).
    """
    examples = int(row.segment_ids.max())
    palette = np.array([[1, 1, 1], *matplotlib.colors.to_rgba_array(
        style.CYCLE * (examples // len(style.CYCLE) + 1))[:, :3]])
    color = palette[row.segment_ids]
    strength = np.where(row.loss_mask, 1.0, 0.35)[:, None, None]
    fig, (left, right) = style.figure(10, 4.1, columns=2, width_ratios=[1, 1.5])
    left.imshow(np.where(allowed[..., None], 1 - strength * (1 - color)[:, None], 1.0),
                interpolation="nearest")
    left.set(title="No token sees another example", xlabel="token looked at", ylabel="token")
    depth = (row.positions / max(row.positions.max(), 1))[:, None]
    grey = np.array([0.93, 0.93, 0.93])
    strips = {"segment_ids": color, "loss_mask": np.where(row.loss_mask[:, None], color, grey),
              "positions": np.where(row.segment_ids[:, None] > 0, 1 - 0.75 * depth * (1 - color),
                                    1.0)}
    for place, (name, pixels) in enumerate(strips.items()):
        right.imshow(pixels[None], aspect="auto", interpolation="nearest",
                     extent=(0, len(pixels), place + 0.8, place + 0.2))
        right.text(0, place + 0.13, name, fontsize=10, family="monospace")
    for segment in range(1, examples + 1):
        at = np.flatnonzero(row.segment_ids == segment)
        right.text(at.mean(), 0.5, str(segment), color="white", ha="center", va="center")
        for end, move, side in ((0, 4, "left"), (-1, -4, "right")):
            right.annotate(str(row.positions[at[end]]), (at[end], 2.9), xytext=(move, 0), ha=side,
                           textcoords="offset points", va="top", fontsize=8)
    right.set(title="Only answers are trained, positions restart", xlabel="token", yticks=[],
              xlim=(0, len(row.tokens)), ylim=(3.25, -0.1))
    right.spines["left"].set_visible(False)
    for ax in (left, right):
        ax.grid(False)
    style.finish(fig, "03_packed_row", f"the first packed row of step 1, {row.tokens.size} tokens; "
                 "white: padding; light: read, not trained")


def draw_loss(log, steps, clip):
    """The figure of a run: losses; beside them learning rate and gradient norm (and `clip`).

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
    left.set(ylabel="nats per trained token", yscale="log",
             title=f"Held-out loss: {val.val_loss.iloc[0]:.3g} at step {int(val.step.iloc[0])}, "
                   f"{val.val_loss.iloc[-1]:.3g} at step {int(val.step.iloc[-1])}")
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
