"""One look for every figure and for coloured tokens.

Colours are Okabe and Ito's colour-blind-safe set (https://jfly.uni-koeln.de/color/).
"""

import inspect

from helpers.run import atomic_file, run_dir

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#222222", "#8A8A8A"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


def words(frame):
    """A table of words: left-aligned, without row numbers."""
    left = [{"selector": name, "props": "text-align: left"} for name in ("th", "td")]
    return frame.style.hide(axis="index").set_table_styles(left)


def figure(width=8.0, height=3.6, rows=1, columns=1, **kwargs):
    """A matplotlib figure and axes in the series' style; size in inches."""
    import matplotlib.pyplot as plt
    plt.rcParams.update({
        "figure.dpi": 100, "savefig.dpi": 160, "font.size": 10, "axes.titlesize": 11,
        "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False,
        "axes.spines.right": False, "axes.grid": True, "grid.color": "#E6E6E6",
        "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.edgecolor": BLACK,
        "axes.prop_cycle": plt.cycler(color=CYCLE), "legend.frameon": False,
        "svg.hashsalt": "series", "figure.constrained_layout.use": True,
    })
    return plt.subplots(rows, columns, figsize=(width, height), **kwargs)


def finish(fig, name, source=""):
    """Add a source line under the figure, save it as RUN_DIR/figures/<name>.png, and show it.

    Args:
      name: file name without suffix, for example `03_loss`.
      source: where the numbers come from, for example "measured, tiny, 2 CPU cores".
    """
    import matplotlib.pyplot as plt
    if source:
        fig.supxlabel(f"Source: {source}", fontsize=8, color=GREY, x=0.01, ha="left")
    with atomic_file(run_dir("figures", f"{name}.png")) as file:
        fig.savefig(file, format="png")
    plt.show()
    plt.close(fig)


# By what is done with a token and what should be, is it trained? (name, box, ink)
TOKEN_LOOK = {(False, False): ("context", "#E4E4E4", "#444444"),
              (True, True): ("trained", BLUE, "white"),
              (False, True): ("not trained, but should be", ORANGE, "black"),
              (True, False): ("trained, but should not be", RED, "white")}


def draw_tokens(ax, pieces, mask, should, columns=110):
    """Draw decoded tokens as coloured boxes, wrapped like text; returns the number of lines.

    `mask` and `should`: True where one is trained, and where it should be. `columns`: letters a line.
    """
    from matplotlib.patches import Rectangle
    x, y = 0, 0
    for piece, *kind in zip(pieces, mask, should, strict=True):
        text = piece.replace("\n", "↵").replace(" ", "·") or "∅"
        if x and x + len(text) > columns:
            x, y = 0, y + 1
        _, colour, ink = TOKEN_LOOK[tuple(kind)]
        ax.add_patch(Rectangle((x, y + 0.06), len(text) - 0.12, 0.88, color=colour, lw=0))
        ax.text(x - 0.06, y + 0.55, text, color=ink, family="monospace", fontsize=8, va="center",
                parse_math=False)
        broken = piece.rpartition("\n")  # after a line break as deep as the text itself is
        x, y = (len(broken[2]), y + 1) if broken[1] else (x + len(text), y)
    lines = y + (not broken[1])
    ax.set(xlim=(0, columns), ylim=(lines + 0.2, 0))
    ax.axis("off")
    return lines


def show_tokens(pieces, mask, name, title=""):
    """A figure of one example's tokens: blue ones are trained (`mask`), grey ones context only."""
    fig, ax = figure(7.74, 1)
    lines = draw_tokens(ax, pieces, mask, mask)
    fig.set_figheight(0.165 * lines + 0.75)
    ax.set_title(title)
    handles = [ax.bar(0, 0, color=TOKEN_LOOK[on, on][1]) for on in (False, True)]
    fig.legend(handles, ["context: read, not learned", "trained"], loc="outside lower left",
               ncols=2, fontsize=9)
    finish(fig, name)


def draw_rows(ax, packed, title):
    """Draw the first ten packed rows as bars: a colour for each example, pale where it is context.

    Args:
      packed: the four arrays of `packing.pack_arrays`.
    """
    for row in range(min(10, len(packed["tokens"]))):
        segments = packed["segment_ids"][row]
        trained = packed["loss_mask"][row]
        for segment in range(1, segments.max() + 1):
            colour = CYCLE[segment % len(CYCLE)]
            _bars(ax, row, segments == segment, colour, alpha=0.35)
            _bars(ax, row, (segments == segment) & trained, colour, alpha=1)
    ax.set(xlim=(0, packed["tokens"].shape[1]), ylim=(9.7, -0.7), yticks=[], title=title)
    ax.grid(False)


def _bars(ax, row, on, colour, alpha):
    import numpy as np
    edges = np.flatnonzero(np.diff(np.pad(on.astype(int), 1)))
    bars = [(first, end - first) for first, end in edges.reshape(-1, 2)]
    ax.broken_barh(bars, (row - 0.4, 0.8), color=colour, alpha=alpha, lw=0)


def show_source(*functions):
    """Show the source of helper functions, for what a reader should still see."""
    from IPython.display import Markdown, display
    display(Markdown("```python\n" + "\n\n".join(map(inspect.getsource, functions)) + "```"))


def side_by_side(texts, asked=""):
    """Show {heading: text} in columns, below what was asked: at most 700 letters of each."""
    import html

    from IPython.display import HTML, display
    columns = "".join(
        f"<td style='width:{100 // len(texts)}%;vertical-align:top;text-align:left'><b>{name}</b>"
        f"<pre style='white-space:pre-wrap;word-break:normal;font:85%/1.5 monospace'>"
        f"{html.escape(text[:700]) or '(nothing)'}</pre></td>" for name, text in texts.items())
    above = f"<p style='white-space:pre-wrap;line-height:1.3'><i>{html.escape(asked)}</i></p>"
    display(HTML(above * bool(asked)
                 + f"<table style='width:100%;table-layout:fixed'><tr>{columns}</tr></table>"))
