"""11's figures: what the format of the base does to the memory, the losses and the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from appendix import qlora_runs as lab
from helpers import style

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from tpu_time.fit import Fit


def draw_answer(steps: Mapping[str, Fit]) -> None:
    """What a chip holds during each step, {name: step}, and which of the steps fit it."""
    fig, ax = style.figure(9, 1.0 + 0.5 * len(steps))
    labels = [name.replace(" with ", "\nwith ") for name in steps]
    left = np.zeros(len(steps))
    held = [part for step in steps.values() for part, gib in step.parts.items() if gib]
    for part, color in zip(dict.fromkeys(held), style.CYCLE):
        width = np.array([step.parts.get(part, 0.0) for step in steps.values()])
        ax.barh(labels, width, left=left, color=color, label=part)
        left += width
    ax.set_xlim(0, 1.04 * left.max())
    limit = next(iter(steps.values())).limit
    ax.axvline(limit, color=style.BLACK)
    ax.invert_yaxis()
    ax.text(limit, len(steps) - 1.5, f" a program may use\n {limit:.2f} GiB of a chip", va="center",
            fontsize=9)
    fig.legend(loc="outside right center", fontsize=8)
    fitting = [name for name, step in steps.items() if step.fits]
    ax.set(title=f"The 31B on four v5e chips: {', and '.join(fitting) or 'nothing'} would fit",
           xlabel="GiB of one chip")
    style.finish(fig, "11_answer", "estimated, or compiled (there the temporaries are gradients, "
                 "activations and logits in one sum)")


def draw_losses(runs: pd.DataFrame, loss: pd.DataFrame, other: str = "nf4") -> None:
    """Training losses of bfloat16's seeds as a band, with another format on it; all at the end.

    Args:
      runs, loss: from `lab.stored`.
      other: the format that's drawn on the band.
    """
    fig, (left, right) = style.figure(10, 3.4, columns=2)
    whole = _smooth(loss, "bfloat16")
    left.fill_between(whole.index, whole.min(axis=1), whole.max(axis=1), color=style.GRAY,
                      alpha=0.5, lw=0, label=f"bfloat16, {whole.shape[1]} seeds")
    theirs = _smooth(loss, other)
    left.plot(theirs, color=style.ORANGE, lw=1.2)
    left.plot([], [], color=style.ORANGE, label=f"{other}, {theirs.shape[1]} seeds")
    names = list(dict.fromkeys(loss.variant))
    ends = [_smooth(loss, name).iloc[-1].mean() for name in names]
    apart = max(ends) / min(ends) - 1
    left.set(title=f"All {len(names)} variants end within {apart:.0%} in training",
             xlabel="step", ylabel="training loss,\nnats per token (log scale)", yscale="log")
    left.legend()

    losses = runs.groupby("variant", sort=False).val_loss
    for name, values in losses:
        label = name.replace(" ", "\n")
        right.plot([label] * len(values), values, "o", color=style.BLUE)
    among_seeds = (losses.max() - losses.min()).max()
    among_variants = losses.mean().max() - losses.mean().min()
    more, less = "seeds", "variants"
    if among_variants > among_seeds:
        more, less = less, more
    right.set(title=f"At the end, {more} differ more than {less}",
              ylabel="validation loss,\nnats per token", ylim=(0, 1.25 * runs.val_loss.max()))
    right.margins(x=0.2)
    style.finish(fig, "11_loss", "data/qlora: the tiny base on one CPU device, measured")


def _smooth(loss: pd.DataFrame, variant: str) -> pd.DataFrame:
    """The training loss of a variant, means of six steps: a row per step, a column per seed."""
    rows = loss[loss.variant == variant]
    by_seed = rows.pivot(index="step", columns="seed", values="loss")
    return by_seed.rolling(6, min_periods=1, center=True).mean()


def draw_quality(answers: pd.DataFrame, table: pd.DataFrame) -> None:
    """How many more answers pass than with a base in bfloat16, in points: a dot for each seed.

    Args:
      answers: from `lab.stored`.
      table: from `lab.differences`.
    """
    fig, axes = style.figure(10, 3.1, columns=2, sharex=True, sharey=True)
    kinds = {"drawn": "Sampled", "greedy": "Greedy"}
    for ax, (plan, kind) in zip(axes, kinds.items(), strict=True):
        found: dict[str, list[str]] = {}
        for name, row in table.loc[plan].iterrows():
            dots = 100 * lab.gaps(answers, name, plan=plan).mean()
            _draw_row(ax, name, 100 * row, dots)
            found.setdefault(_said(row, dots), []).append(name)
        ax.axvline(0, color=style.BLACK, lw=1, ls=":")
        ax.set(title=f"{kind}: {_in_words(found)}",
               xlabel="pass@1 minus that of bfloat16, points, paired")
    axes[0].margins(y=0.25)
    axes[0].invert_yaxis()
    style.finish(fig, "11_quality", "data/qlora, measured; dot: a seed; 95% over problems "
                 "(gray), over seeds (line; none where all seeds agree)")


def _draw_row(ax: Axes, name: str, percent: pd.Series, dots: pd.Series) -> None:
    """One format's seeds and its two intervals; where dots coincide, how many they are."""
    ax.plot(dots, [name] * len(dots), "o", color=style.BLUE, alpha=0.6)
    ax.hlines(name, percent["problems from"], percent["problems to"], style.GRAY, lw=9, alpha=0.4,
              zorder=1)
    ax.hlines(name, percent["seeds from"], percent["seeds to"], style.BLACK, lw=1, zorder=1)
    for value, count in dots.round(6).value_counts().items():
        if count > 1:
            ax.annotate(f"{count} seeds", (value, name), xytext=(0, 8),
                        textcoords="offset points", fontsize=8, ha="center")


def _said(row: pd.Series, dots: Sequence[float]) -> str:
    """What a row of `lab.differences` shows: the same, different, or undecided."""
    ends = row[["problems from", "problems to", "seeds from", "seeds to"]]
    if np.allclose(dots, 0):
        return "the same"
    if ends.min() > 0 or ends.max() < 0:
        return "different"
    return "undecided"


def _in_words(found: dict[str, list[str]]) -> str:
    """"int8 the same, nf4 undecided" from {what is shown: names}."""
    if list(found) == ["undecided"]:
        return "no difference is shown"
    parts = [f"{' and '.join(names)} {said}" for said, names in found.items()]
    return ",\n".join(parts)
