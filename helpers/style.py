"""One look for every figure and for coloured tokens.

Colours are Okabe and Ito's colour-blind-safe set (https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from helpers.run import atomic_file, run_dir

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#222222", "#8A8A8A"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


def words(frame: pd.DataFrame) -> Any:
    """A table of words: left-aligned, without row numbers."""
    left = "text-align: left"
    styles = [{"selector": "th", "props": left}, {"selector": "td", "props": left}]
    return frame.style.hide(axis="index").set_table_styles(styles)


def folded(title: str, frame: pd.DataFrame) -> None:
    """Show a table of words that opens when its title is clicked."""
    from IPython.display import HTML, display
    table = words(frame).to_html()
    display(HTML(f"<details><summary>{html.escape(title)}</summary>{table}</details>"))


LOOK: dict[Any, Any] = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "svg.hashsalt": "series",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": BLACK,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}


def figure(
    width: float = 8.0, height: float = 3.6, rows: int = 1, columns: int = 1, **kwargs: Any
) -> tuple[Figure, Any]:
    """A matplotlib figure and axes in the series' style; size in inches."""
    import matplotlib.pyplot as plt
    plt.rcParams.update(LOOK)
    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=CYCLE)
    return plt.subplots(rows, columns, figsize=(width, height), **kwargs)


def finish(fig: Figure, name: str, source: str = "") -> None:
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
TOKEN_LOOK = {
    (False, False): ("context", "#E4E4E4", "#444444"),
    (True, True): ("trained", BLUE, "white"),
    (False, True): ("not trained, but should be", ORANGE, "black"),
    (True, False): ("trained, but should not be", RED, "white"),
}


def draw_tokens(
    ax: Axes, pieces: Sequence[str], mask: Sequence[bool], should: Sequence[bool],
    columns: int = 110,
) -> int:
    """Draw decoded tokens as coloured boxes, wrapped like text; returns the number of lines.

    Args:
      pieces: the text of each token.
      mask, should: True where a token is trained, and where it should be.
      columns: letters a line.
    """
    x = y = 0
    for piece, trained, wanted in zip(pieces, mask, should, strict=True):
        text = piece.replace("\n", "↵").replace(" ", "·") or "∅"
        if x and x + len(text) > columns:
            x = 0
            y += 1
        _draw_token(ax, text, x, y, (bool(trained), bool(wanted)))
        x += len(text)
        if "\n" in piece:  # the next one stands below, as deep as this one's last line is long
            x = len(piece) - piece.rindex("\n") - 1
            y += 1
    lines = y if pieces and "\n" in pieces[-1] else y + 1
    ax.set(xlim=(0, columns), ylim=(lines + 0.2, 0))
    ax.axis("off")
    return lines


def _draw_token(ax: Axes, text: str, x: int, y: int, kind: tuple[bool, bool]) -> None:
    from matplotlib.patches import Rectangle
    _, colour, ink = TOKEN_LOOK[kind]
    box = Rectangle((x, y + 0.06), len(text) - 0.12, 0.88, color=colour, lw=0)
    ax.add_patch(box)
    ax.text(x - 0.06, y + 0.55, text, color=ink, family="monospace", fontsize=8, va="center",
            parse_math=False)


def show_tokens(pieces: Sequence[str], mask: Sequence[bool], name: str, title: str = "") -> None:
    """A figure of one example's tokens: blue ones are trained (`mask`), grey ones context only."""
    fig, ax = figure(7.74, 1)
    lines = draw_tokens(ax, pieces, mask, mask)
    fig.set_figheight(0.165 * lines + 0.75)
    ax.set_title(title)
    grey = ax.bar(0, 0, color=TOKEN_LOOK[False, False][1])
    blue = ax.bar(0, 0, color=TOKEN_LOOK[True, True][1])
    fig.legend([grey, blue], ["context: read, not learned", "trained"],
               loc="outside lower left", ncols=2, fontsize=9)
    finish(fig, name)


def draw_rows(ax: Axes, packed: dict[str, np.ndarray], title: str) -> None:
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


def _bars(ax: Axes, row: int, on: np.ndarray, colour: str, alpha: float) -> None:
    import numpy as np
    edges = np.flatnonzero(np.diff(np.pad(on.astype(int), 1)))
    bars = [(first, end - first) for first, end in edges.reshape(-1, 2)]
    ax.broken_barh(bars, (row - 0.4, 0.8), color=colour, alpha=alpha, lw=0)


def show_source(*functions: Callable[..., Any]) -> None:
    """Show the source of helper functions, for what a reader should still see."""
    from IPython.display import Markdown, display
    sources = [inspect.getsource(function) for function in functions]
    display(Markdown("```python\n" + "\n\n".join(sources) + "```"))


COLUMN = """<td style='width:{width}%;vertical-align:top;text-align:left'><b>{name}</b>\
<pre style='white-space:pre-wrap;word-break:normal;font:85%/1.5 monospace'>{text}</pre></td>"""


def side_by_side(texts: dict[str, str], asked: str = "") -> None:
    """Show {heading: text} in columns, below what was asked: at most 700 letters of each."""
    from IPython.display import HTML, display
    page = ""
    if asked:
        page = f"<p style='white-space:pre-wrap;line-height:1.3'><i>{html.escape(asked)}</i></p>"
    page += "<table style='width:100%;table-layout:fixed'><tr>"
    for name, text in texts.items():
        shown = html.escape(text[:700]) or "(nothing)"
        page += COLUMN.format(width=100 // len(texts), name=name, text=shown)
    display(HTML(page + "</tr></table>"))
