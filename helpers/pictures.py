"""The figures of notebooks 03 and 04: drawing only, every number comes from the caller."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.patches import FancyBboxPatch, Rectangle

from helpers import style

CHIPS = style.CYCLE[:4]


# ── 03: sharding ──

def _pair(ax, shapes, left, bottom, unit, thick, colors):
    """W to scale, A at its left, B above it, one colour per chip. Returns where the cuts are."""
    heads, depth, size = shapes["W"]
    start, height = left + 1.4 * thick, unit * depth
    cuts = np.linspace(start, start + unit * heads * size, len(colors) + 1)
    ax.add_patch(Rectangle((left, bottom), thick, height, color="#BDBDBD", lw=0))
    for band, color in enumerate(colors):
        lines = np.linspace(*cuts[band:band + 2], heads // len(colors) + 1)
        for y, tall in ((bottom, height), (bottom + height + 0.4 * thick, thick)):
            ax.add_patch(Rectangle((lines[0], y), lines[-1] - lines[0], tall, color=color, lw=0))
            ax.vlines(lines, y, y + tall, color="white", lw=0.6)
    for y, letter in ((bottom + height / 2, "A"), (bottom + height + 0.9 * thick, "B")):
        ax.text(left + thick / 2, y, letter, ha="center", va="center", fontsize=8)
    return cuts


def layer_on_chips(cut):
    """The query and key projections of a full-attention layer of the 31B, cut over four chips.

    Drawn like a multiplication on paper: A stands left of W, B above it. W is to scale, A and B
    are drawn thicker than they are.

    Args:
      cut: {(module, "W" | "A" | "B"): {"shape": (...), "on a chip": (...)}}, W of shape
        (heads, width, head size).
    """
    unit = 6 / np.prod(cut["q_einsum", "W"]["shape"][::2])  # inches per column
    fig, ax = style.figure(10, 6.5)
    ax.set_title("Each of four chips owns whole heads, and what they compute has to be summed")
    held = ["", "", "", ""]
    for name, what, left, inside in (("q_einsum", "query head", 0, 0.12),
                                     ("k_einsum", "KV head", 7.1, 1.6)):
        whole, shard = ({part: cut[name, part][column] for part in "WAB"}
                        for column in ("shape", "on a chip"))
        each = shard["W"][0]  # heads
        assert shard["A"] == whole["A"] and whole["W"][0] == 4 * each == 4 * shard["B"][1]
        cuts = _pair(ax, whole, left, 2.55, unit, 0.24, CHIPS)
        ax.text(left, 5.33, f"{name}: {4 * each} {what}s", weight="bold")
        ax.text(left, 5.1, "W {W}, A {A}, B {B}".format(**whole), fontsize=8)
        for chip, color in enumerate(CHIPS):
            heads = f"{chip * each}-{(chip + 1) * each - 1}" if each > 1 else str(chip)
            held[chip] += f"{what}{'s' * (each > 1)} {heads}\n"
            ax.text(cuts[chip:chip + 2].mean(), 3.5, heads, color="white", ha="center",
                    bbox={"color": color, "pad": 1})
            _pair(ax, shard, 2.5 * chip + inside, 0.12, 0.55 * unit, 0.15, [color])
    for chip, color in enumerate(CHIPS):
        ax.add_patch(FancyBboxPatch((2.5 * chip + 0.05, 0.05), 2.15, 2.05, "round,pad=0.05",
                                    ec=color, fc="none", lw=1.5))
        ax.text(2.5 * chip + 0.12, 1.93, f"chip {chip}", color=color, weight="bold")
        ax.text(2.5 * chip + 0.9, 1.72, held[chip].strip(), fontsize=8)
        ax.annotate("", (2.5 * chip + 1.1, -0.62), (2.5 * chip + 1.1, -0.02),
                    arrowprops={"arrowstyle": "-|>", "color": color, "lw": 2})
    ax.add_patch(FancyBboxPatch((0.05, -1.0), 9.65, 0.3, "round,pad=0.05", ec=style.BLACK,
                                fc="#F2F2F2", lw=1))
    ax.text(4.9, -0.85, "after attn_vec_einsum: the four partial results are added "
            "(reduce-scatter, then all-gather)", ha="center", va="center", fontsize=9)
    ax.text(8.3, 2.5, "coloured: W below,\nB above it.\ngrey: A, whole\non every chip.\n\n"
            "tp=8 would need\n8 KV heads,\nthere are "
            f"{cut['k_einsum', 'W']['shape'][0]}.", fontsize=8)
    ax.set(xlim=(-0.05, 9.8), ylim=(-1.1, 5.6), aspect="equal")
    ax.axis("off")
    style.finish(fig, "03_mesh", "shapes and partition specs of Gemma 4 31B on a v5p-8 "
                                 "(fsdp=1, tp=4), computed above")


def collectives():
    """What reduce-scatter and all-gather do to one token's numbers on four chips."""
    fig, ax = style.figure(10, 2.7)

    def cell(left, row, column, parts):
        for part, color in enumerate(parts):
            ax.add_patch(Rectangle((left + column, 3 - row + part / len(parts) * 0.8), 0.92,
                                   0.8 / len(parts), color=color, lw=0))

    for left, title, filled in ((0, "each chip: its own part of all numbers", None),
                                (6.5, "each chip: a quarter, summed", "own"),
                                (13, "each chip: all, summed", "all")):
        ax.text(left, 4.05, title, fontsize=9, weight="bold")
        for row in range(4):
            for column in range(4):
                ax.add_patch(Rectangle((left + column, 3 - row), 0.92, 0.8, fc="none",
                                       ec="#CCCCCC", lw=0.8))
                if filled is None:
                    cell(left, row, column, [CHIPS[row]])
                elif filled == "all" or row == column:
                    cell(left, row, column, CHIPS)
    for row, color in enumerate(CHIPS):
        ax.text(-0.2, 3.4 - row, f"chip {row}", color=color, ha="right", va="center", fontsize=9)
    for x, name in ((4.4, "reduce-scatter"), (10.9, "all-gather")):
        ax.annotate("", (x + 1.6, 1.9), (x, 1.9), arrowprops={"arrowstyle": "-|>", "lw": 1.5})
        ax.text(x + 0.75, 2.2, name, ha="center", fontsize=9)
    ax.set(xlim=(-1.6, 17.2), ylim=(-0.1, 4.6), title="An all-reduce is two steps, and between "
           "them every chip holds only a quarter")
    ax.axis("off")
    style.finish(fig, "03_collectives", "drawn; four colours in a cell: the sum of all four chips")


# ── 03: data and loss ──

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


def draw_loss(path, steps, clip=None):
    """The figure of a `log.jsonl`: a large panel for the loss, learning rate and norm beside it.

    Args:
      path: the log.
      steps: number of the last step, where the axes end.
      clip: the norm above which gradients were clipped.

    Returns:
      The figure.
    """
    log = pd.read_json(path, lines=True)
    run = log.dropna(subset="loss")
    val = log.dropna(subset="val_loss") if "val_loss" in log else log[:0]
    fig, axes = style.figure(10, 3.9, rows=2, columns=2, width_ratios=[2.2, 1])
    grid = axes[0, 0].get_gridspec()
    for ax in axes[:, 0]:
        ax.remove()
    left = fig.add_subplot(grid[:, 0])
    left.plot(run.step, run.loss, color=style.BLUE, alpha=0.3, lw=1)
    smooth = run.loss.rolling(10, min_periods=1, center=True).mean()
    left.plot(run.step, smooth, color=style.BLUE, lw=2, label="training, mean of 10 steps")
    left.plot(val.step, val.get("val_loss"), "o-", color=style.GREEN, ms=5, label="held-out rows")
    left.set(xlabel="step", ylabel="nats per trained token", yscale="log", xlim=(0, steps * 1.02))
    left.yaxis.set_major_formatter("{x:g}")
    left.legend()
    if len(val) > 1:
        left.set_title(f"Held-out loss: {val.val_loss.iloc[0]:.3g} at step 0, "
                       f"{val.val_loss.iloc[-1]:.3g} at step {int(val.step.iloc[-1])}")
    upper, lower = axes[:, 1]
    upper.plot(run.step, run.learning_rate, color=style.ORANGE)
    upper.set(title="Learning rate", xlim=(0, steps * 1.02), ylim=(0, None))
    upper.tick_params(labelbottom=False)
    lower.plot(run.step, run.grad_norm, color=style.PURPLE)
    if clip:
        lower.axhline(clip, color=style.GREY, ls="--")
        lower.annotate("clipped above", (1, clip), xycoords=("axes fraction", "data"),
                       xytext=(0, 2), textcoords="offset points", ha="right", va="bottom",
                       fontsize=8, color=style.GREY)
    lower.set(title="Gradient norm", xlabel="step", yscale="log", xlim=(0, steps * 1.02))
    return fig


class LiveLoss:
    """A loss picture in the running cell, drawn again at most every `every` seconds.

    Outside a notebook it does nothing: there the log's lines have to do.
    """

    def __init__(self, steps, clip=None, every=60.0):
        import time

        import IPython
        self.clock, self.every, self.handle = time.monotonic, every, None
        self.steps, self.clip = steps, clip
        self.last = self.clock() if IPython.get_ipython() else float("inf")

    def __call__(self, path):
        """Called after every step with the log's path."""
        if self.clock() - self.last < self.every:
            return
        import matplotlib.pyplot as plt
        from IPython.display import display
        fig = draw_loss(path, self.steps, self.clip)
        if self.handle:
            self.handle.update(fig)
        else:
            self.handle = display(fig, display_id=True)
        plt.close(fig)
        self.last = self.clock()


# ── 04: the merge ──

def _box(ax, x, y, text, color, ha):
    look = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": color}
    ax.text(x, y, text, ha=ha, va="center", fontsize=9, bbox=look)


def key_value_map(targets, rank, layers, source):
    """Where keys and values of a sliding and a full layer go; all other kinds in one line.

    Args:
      targets: `architecture.Module`s of a model.
      rank: of the adapters.
      layers: {layer number: "sliding" | "full"}, one of each kind.
      source: what the source line says.
    """
    fig, axes = style.figure(10, 2.9, columns=len(layers))
    for ax, (layer, kind) in zip(np.atleast_1d(axes), layers.items()):
        own = [target for target in targets if target.layer == layer]
        keys = [target for target in own if target.kind[0] == "k"]
        line = 0
        for target in keys:
            shapes = ["×".join(map(str, shape)) for shape in target.adapter(rank)]
            middle = (len(target.names) - 1) / 2
            for name, (rows, columns) in target.names.items():
                ax.plot([0.55, 0.72], [middle, line], color=style.ORANGE, lw=1.5)
                _box(ax, 0.73, line, f"{name.rpartition('.')[2]}\n{rows}×{columns}", style.ORANGE,
                     "left")
                line += 1
            _box(ax, 0.55, middle, f"{target.kind}\nA {shapes[0]}\nB {shapes[1]}", style.ORANGE,
                 "right")
        if line == 1:
            ax.text(0.73, 0.75, "no v_proj: the values\nare the keys", fontsize=8, va="center",
                    color=style.GREY)
        others = [target.kind for target in own if target not in keys]
        ax.plot([0.03, 0.97], [1.65, 1.65], color="#DDDDDD", lw=0.8)
        ax.text(0.5, 1.85, "one pair, one matrix each:\n" + ", ".join(others), fontsize=8,
                ha="center", va="top", color=style.BLUE)
        ax.text(0.55, -0.62, "Tunix: adapter pair", ha="right", color=style.GREY, fontsize=8)
        ax.text(0.73, -0.62, "Hugging Face: matrix", color=style.GREY, fontsize=8)
        says = {1: "one pair for one matrix", 2: "one pair for two matrices"}.get(line, "no keys")
        ax.set(xlim=(0, 1), ylim=(2.4, -0.75), title=f"Layer {layer}, {kind} attention: {says}")
        ax.axis("off")
    style.finish(fig, "04_map", source)


def adapter_path(target, stored, plain, matrices, peft, scale, source):
    """One adapter's path: checkpoint, plain matrices, then merged weights or PEFT pairs, vLLM.

    Args:
      target: its `architecture.Module`.
      stored, plain, matrices, peft: {name: shape} of its arrays in the checkpoint, as plain
        matrices, in merged/ and in adapter/.
      scale: alpha / rank.
      source: what the source line says.
    """
    def lines(title, shapes):
        return "\n".join([title, *(f"{name}   {'×'.join(map(str, shape))}"
                                   for name, shape in shapes.items())])
    boxes = {  # text, place of its middle, colour
        "orbax": (lines(f"train/checkpoints/\n{target.path}", stored), (0.10, 0.5), style.ORANGE),
        "plain": (lines("plain matrices", plain), (0.36, 0.5), style.ORANGE),
        "merged": (lines("merged/", matrices), (0.645, 0.82), style.BLUE),
        "peft": (lines("adapter/", peft), (0.645, 0.22), style.GREEN),
        "serve": ("vLLM, every engine:\nplain weights", (0.91, 0.82), style.BLUE),
        "lora": (f"vLLM on CPU or GPU,\n--enable-lora:\nbase + {scale:g} · x A B", (0.91, 0.22),
                 style.GREEN)}
    copied = ",\nk stored as v, too" if len(peft) > len(plain) else ""
    arrows = {("orbax", "plain"): "restore,\nfold axes", ("merged", "serve"): "",
              ("plain", "merged"): f"W + {scale:g} · (A B)ᵀ,\nrounded once",
              ("plain", "peft"): f"transpose{copied}", ("peft", "lora"): ""}
    fig, ax = style.figure(10, 3.8)
    drawn = {key: ax.text(*place, text, ha="center", va="center", fontsize=8.5, linespacing=1.5,
                          bbox=dict(boxstyle="round,pad=0.5", facecolor="white", edgecolor=colour))
             for key, (text, place, colour) in boxes.items()}
    for (start, end), note in arrows.items():
        (x0, y0), (x1, y1) = boxes[start][1], boxes[end][1]
        ax.annotate("", (x1, y1), (x0, y0), arrowprops=dict(
            arrowstyle="-|>", color=style.GREY, patchA=drawn[start].get_bbox_patch(),
            patchB=drawn[end].get_bbox_patch(), shrinkA=2, shrinkB=2))
        ax.text((x0 + x1) / 2 - 0.02 * (y0 != y1), (y0 + y1) / 2 + (0.1 if y1 >= y0 else -0.13),
                note, fontsize=8, color=style.GREY, ha="center", va="center")
    ax.set(xlim=(0, 1), ylim=(0, 1), title="One adapter ends in the weights, or stays a pair")
    ax.axis("off")
    style.finish(fig, "04_path", source)


def change_map(changes, source):
    """Heat map of the relative size of the change, kind by layer; grey: no such matrix.

    Args:
      changes: table with the columns layer, kind ("q", ...) and "delta %".
      source: what the source line says.
    """
    kinds = [kind for kind in ("q", "k", "v", "o", "gate", "up", "down")
             if kind in set(changes["kind"])]
    grid = changes.pivot(index="kind", columns="layer", values="delta %").reindex(kinds)
    fig, ax = style.figure(max(6.0, 1.5 + 0.16 * grid.shape[1]), 3.4)
    ax.set_facecolor("#D9D9D9")
    image = ax.imshow(grid, aspect="auto", cmap="viridis", vmin=0)
    if grid.shape[1] <= 12:
        for (row, column), value in np.ndenumerate(grid.to_numpy()):
            if np.isfinite(value):
                light = value > 0.6 * np.nanmax(grid)
                ax.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=9,
                        color=style.BLACK if light else "white")
    ticks = range(0, grid.shape[1], 1 if grid.shape[1] <= 12 else 6)
    low, high = np.nanmin(grid), np.nanmax(grid)
    ax.set(yticks=range(len(kinds)), yticklabels=[f"{kind}_proj" for kind in kinds], xticks=ticks,
           xticklabels=[grid.columns[tick] for tick in ticks], xlabel="layer",
           title=f"The changes are {low:.3g} to {high:.3g} % of their matrices' size")
    ax.grid(False)
    fig.colorbar(image, ax=ax, label="‖ΔW‖ / ‖W‖, %")
    style.finish(fig, "04_delta", source)
