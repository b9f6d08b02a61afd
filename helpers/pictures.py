"""The figures and tables of notebooks 03 and 04; every number in them comes from the caller."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers import packing, style
from tables import architecture

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flax import nnx

    from helpers.packing import Packed
    from helpers.train import Batch

LIGHT_GRAY = np.array([0.93, 0.93, 0.93])


def packed_row(row: "Batch", allowed: np.ndarray) -> None:
    """Show one packed row: which token may look at which, and its other three columns as strips.

    Args:
      row: a `Batch` of [T] arrays.
      allowed: bool [T, T], True where a token (row) may look at another (column).
    """
    colors = _colors_of(row.segment_ids)
    fig, axes = style.figure(6.4, 7.2, rows=2, height_ratios=[1.9, 1])
    upper, lower = axes
    _draw_mask(upper, row, allowed, colors)
    _draw_strips(lower, row, colors)
    for ax in axes:
        ax.grid(False)

    dark = upper.bar(0, 0, color=style.GRAY)  # bars without height, for the legend
    pale = upper.bar(0, 0, color=style.GRAY, alpha=0.35)
    white = upper.bar(0, 0, color="white", edgecolor=style.GRAY)
    upper.legend(
        handles=[dark, pale, white],
        labels=["trained", "read, not trained", "padding, or not to be seen"],
        loc="upper right",
        fontsize=9,
    )
    tokens = row.tokens.size
    style.finish(fig, "03_packed_row", f"the first packed row of step 1, {tokens} tokens")


def _colors_of(segment_ids: np.ndarray) -> np.ndarray:
    """The color of each token's example, white for padding. [T] -> [T, 3]"""
    examples = int(segment_ids.max())
    repeats = examples // len(style.CYCLE) + 1
    cycle = matplotlib.colors.to_rgba_array(style.CYCLE * repeats)
    opaque = cycle[:, :3]
    white = np.ones((1, 3))
    palette = np.concatenate([white, opaque])
    return palette[segment_ids]


def _draw_mask(ax: Axes, row: "Batch", allowed: np.ndarray, colors: np.ndarray) -> None:
    """Draw `allowed` [T, T] in the colors [T, 3] of the tokens that look, pale if not trained."""
    strengths = np.where(row.loss_mask, 1.0, 0.35)
    strength = strengths[:, None]
    of_token = 1 - strength * (1 - colors)  # [T, 3]
    pixels = np.where(allowed[..., None], of_token[:, None], 1.0)  # [T, T, 3]
    ax.imshow(pixels, interpolation="nearest")
    ax.set(
        title="No token sees another example",
        xlabel="the token that it looks at",
        ylabel="a token",
    )


def _draw_strips(ax: Axes, row: "Batch", colors: np.ndarray) -> None:
    """Draw a row's segment ids, loss mask and positions, each as a strip of T colors."""
    trained = row.loss_mask[:, None]  # each of these [T, 1]
    padding = row.segment_ids == 0
    padded = padding[:, None]
    furthest = max(row.positions.max(), 1)
    depths = row.positions / furthest
    depth = depths[:, None]
    strength = 0.25 + 0.75 * depth  # the further into its example, the darker
    darker = 1 - strength * (1 - colors)
    of_mask = np.where(trained, colors, LIGHT_GRAY)
    strips = {
        "segment_ids": colors,
        "loss_mask": np.where(padded, 1.0, of_mask),
        "positions": np.where(padded, 1.0, darker),
    }
    for place, (name, pixels) in enumerate(strips.items()):
        extent = (0, len(pixels), place + 0.8, place + 0.2)
        ax.imshow(pixels[None], aspect="auto", interpolation="nearest", extent=extent)
        ax.text(0, place + 0.13, name, fontsize=10, family="monospace")

    examples = int(row.segment_ids.max())
    for segment in range(1, examples + 1):
        tokens = np.flatnonzero(row.segment_ids == segment)
        middle = tokens.mean()
        ink = _ink_on(colors[tokens[0]])
        ax.text(middle, 0.5, str(segment), color=ink, ha="center", va="center")
        _name_positions(ax, row, tokens)
    ax.set(
        title="Only answers are trained, positions restart",
        xlabel="token",
        yticks=[],
        xlim=(0, len(row.tokens)),
        ylim=(3.25, -0.1),
    )
    ax.spines["left"].set_visible(False)


def _ink_on(color: np.ndarray) -> str:
    """Black or white, whatever can be read on a color. [3]"""
    brightness = color @ [0.30, 0.59, 0.11]
    if brightness > 0.45:
        return style.BLACK
    return "white"


def _name_positions(ax: Axes, row: "Batch", tokens: np.ndarray) -> None:
    """Write an example's first and last position below the strips, if there's room for them."""
    enough = len(row.tokens) / 12
    if len(tokens) < enough:
        return
    positions = row.positions[tokens]
    first = positions[0]
    last = positions[-1]
    middle = tokens.mean()
    ax.text(middle, 2.9, f"{first}…{last}", ha="center", va="top", fontsize=9)


def draw_packing(packed: "Packed", ids: "Sequence[Any]", masks: "Sequence[Any]") -> Figure:
    """Ten rows with one example each, above the first ten packed rows.

    Args:
      packed: the four arrays of `packing.pack_arrays`.
      ids, masks: of the examples; the first ten are drawn alone.
    """
    length = packed["tokens"].shape[1]
    ten_ids = ids[:10]
    ten_masks = masks[:10]
    single_rows = []
    for example, mask in zip(ten_ids, ten_masks, strict=True):
        single_row = packing.pack_arrays([example], [mask], length, seed=0)
        single_rows.append(single_row)
    alone = {}
    for name in packed:
        columns = [row[name] for row in single_rows]
        alone[name] = np.concatenate(columns)

    is_real_alone = alone["segment_ids"] > 0
    ten_alone = is_real_alone.mean()
    is_real = packed["segment_ids"] > 0
    ten_packed = is_real[:10].mean()
    all_packed = is_real.mean()
    title_alone = f"One example per row: these ten are {ten_alone:.0%} full"
    title_packed = f"Packed: these ten are {ten_packed:.0%} full, all {all_packed:.0%}"

    fig, axes = style.figure(7.74, 4.6, rows=2)
    upper, lower = axes
    style.draw_rows(upper, alone, title_alone, colors=[style.GRAY])
    style.draw_rows(lower, packed, title_packed)
    lower.set(xlabel="token of the row (white: padding; light: context; dark: trained)")
    return fig


def draw_loss(log: pd.DataFrame, steps: int, clip: float) -> Figure:
    """The figure of a run: its losses, and below them learning rate and gradient norm.

    Args:
      log: `train.read_log` of its `log.jsonl`.
      steps: of the whole run.
      clip: the norm that a gradient is clipped to.
    """
    training = log.dropna(subset="loss")
    validations = log.dropna(subset="val_loss")
    heights = [3, 1, 1]
    fig, axes = style.figure(7, 5.6, rows=3, height_ratios=heights, sharex=True)
    losses, rates, norms = axes
    _draw_losses(losses, training, validations)

    rates.plot(training.step, training.learning_rate, color=style.ORANGE)
    rates.set(title="Learning rate", ylim=(0, None))

    norms.plot(training.step, training.grad_norm, color=style.PURPLE)
    norms.axhline(clip, color=style.GRAY, ls="--")
    norms.set(
        title=f"Gradient norm (clipped to the dashed line, {clip:g})",
        yscale="log",
        xlabel="step",
        xlim=(0, steps * 1.02),
    )
    return fig


def _draw_losses(ax: Axes, training: pd.DataFrame, validations: pd.DataFrame) -> None:
    """Draw the losses of steps and of validations, from their lines of the log."""
    steps = training.step
    windows = training.loss.rolling(10, min_periods=1, center=True)
    smooth = windows.mean()
    ax.plot(steps, training.loss, color=style.BLUE, alpha=0.3, lw=1, label="training, each step")
    ax.plot(steps, smooth, color=style.BLUE, lw=2, label="training, mean of 10 steps")

    held_out = validations.val_loss
    other = "held-out (compare directions, not heights)"
    ax.plot(validations.step, held_out, "o-", color=style.GREEN, ms=5, label=other)
    first = validations.iloc[0]
    last = validations.iloc[-1]
    lowest = validations.loc[held_out.idxmin()]
    ax.plot(
        lowest.step,
        lowest.val_loss,
        "o",
        ms=11,
        mfc="none",
        mec=style.GREEN,
        label=f"lowest, at step {lowest.step:.0f}",
    )
    ax.set(
        ylabel="nats per trained token",
        yscale="log",
        title=f"Held-out loss: {first.val_loss:.3g} at step {first.step:.0f}, "
              f"{last.val_loss:.3g} at step {last.step:.0f}",
    )
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend()


# ── Tables ──


MAKES = {  # what a module of Tunix's Gemma 4 makes
    "q_einsum": "queries",
    "k_einsum": "keys, which are the values, too",
    "kv_einsum": "keys and values",
    "attn_vec_einsum": "attention's output",
    "gate_proj": "MLP, the gate",
    "up_proj": "MLP, wider",
    "down_proj": "MLP, back again",
}


def adapter_table(
    modules: "Mapping[str, Mapping[str, nnx.Variable]]", kinds: "Sequence[str]"
) -> pd.DataFrame:
    """The shapes of A and B by kind of module, how many modules are alike, and their numbers.

    Args:
      modules: from `gemma.adapted_modules`.
      kinds: of the layers, from `gemma.layer_kinds`.
    """
    rows = []
    for path, pair in modules.items():
        a, b = pair["a"], pair["b"]
        _, _, name = path.rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", path)
        kind = ""
        if layer:
            number = int(layer[1])
            kind = kinds[number]
        rows.append({
            "module": name,
            "makes": MAKES.get(name, ""),
            "layers": kind,
            "A": a.shape,
            "B": b.shape,
            "numbers": a.size + b.size,
        })

    table = pd.DataFrame(rows)
    groups = []
    for key, alike in table.groupby(["module", "makes", "A", "B"], sort=False):
        name, makes, a_shape, b_shape = key
        layers = sorted(set(alike.layers))
        numbers = alike.numbers.sum()
        groups.append({
            "module": name,
            "makes": makes,
            "in layers": " and ".join(layers),
            "A": a_shape,
            "B": b_shape,
            "modules": len(alike),
            "numbers": f"{numbers:,}",
        })
    return pd.DataFrame(groups)


def memory(gib: float) -> str:
    """GiB as text, in MiB or KiB where that reads better."""
    mib = gib * 2**10
    kib = gib * 2**20
    if gib >= 1:
        return f"{gib:.3g} GiB"
    if mib >= 1:
        return f"{mib:.3g} MiB"
    return f"{kib:.3g} KiB"


def memory_table(held: dict[str, float]) -> pd.DataFrame:
    """What `train.memory_of` found, as a table."""
    column = pd.Series(held, name="per device")
    return column.map(memory).to_frame()


# ── Of 04 ──


def kinds_table(kinds: "Iterable[architecture.Module]", rank: int) -> pd.DataFrame:
    """How Tunix and Hugging Face store each kind of matrix, and the shapes of its adapter."""
    rows = []
    for module in kinds:
        a_shape, b_shape = module.adapter(rank)
        theirs = []
        for path, shape in module.names.items():
            _, _, name = path.rpartition(".")
            theirs.append(f"{name} {shape}")
        rows.append({
            "Tunix": module.kind,
            "A": a_shape,
            "B": b_shape,
            "in training": module.how.equation,
            "Hugging Face [out, in]": ", ".join(theirs),
        })
    return pd.DataFrame(rows)


def heat_map(norms: pd.DataFrame) -> Any:
    """A table of how much each matrix changed, in % of its norm, the darker the more.

    Args:
      norms: from `merge.norms_table`.
    """
    change = 100 * norms.delta / norms.base
    percent = norms.assign(change=change)
    least = percent.change.min()
    most = percent.change.max()

    changes = percent.pivot(index="layer", columns="kind", values="change")
    rounded = changes.style.format("{:.0f}", na_rep="–")
    table = rounded.background_gradient("Blues", axis=None)
    table = table.highlight_null(props="background-color: transparent; color: inherit")
    caption = f"change, % of the matrix: from {least:.2g} to {most:.2g}"
    if changes.isna().any(axis=None):
        caption += " (–: this layer has no such matrix)"
    return table.set_caption(caption)


SCALES = Path("data/scales")  # `python -m appendix.scales` makes the runs


def read_scales() -> pd.DataFrame:
    """The stored runs of adapters that are applied more or less strongly than they were trained."""
    files = sorted(SCALES.glob("*.csv"))
    return pd.concat([pd.read_csv(path) for path in files])


def draw_scales(runs: pd.DataFrame) -> Figure:
    """Problems passed by how strongly adapters are applied, and a rough yardstick for luck.

    The yardstick is the standard deviation of a count of independent problems. All points answer
    the same problems, so two of them can be closer than it says, and training's noise isn't in it.

    Args:
      runs: from `read_scales`.
    """
    problems = int(runs.problems.iloc[0])
    means = runs.groupby("scale").greedy.mean()
    trained = means[1.0]
    share = trained / problems
    deviation = math.sqrt(problems * share * (1 - share))  # of a binomial count
    distances = (means - trained).abs()
    alike = means[distances <= deviation]
    weakest, strongest = alike.index.min(), alike.index.max()
    title = f"From {weakest:g} to {strongest:g} times the trained strength, little changes"
    if len(alike) == 1:
        title = "Every other strength scores clearly differently than the trained one"

    fig, ax = style.figure(7, 2.9)
    ax.axhspan(
        trained - deviation,
        trained + deviation,
        color=style.GRAY,
        alpha=0.2,
        lw=0,
        label="as trained, give or take luck",
    )
    for seed, run in runs.groupby("seed"):
        ax.plot(run.scale, run.greedy, "o-", color=style.BLUE, label=f"one run, seed {seed}")
    ax.axvline(1.0, color=style.GRAY, linestyle=":")
    ax.set(
        title=title,
        xlabel="times alpha / rank (dotted: as trained)",
        ylabel=f"of {problems} passed",
        xticks=means.index,
        ylim=(-1, problems),
    )
    ax.legend(fontsize=9, loc=(0.26, 0.04))  # between the curve and the dotted line
    return fig
