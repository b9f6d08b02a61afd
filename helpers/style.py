"""One look for every figure and for colored tokens.

The colors are from Okabe and Ito's set, which color-blind people can tell apart
(https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from helpers.run import atomic_file, run_dir
from tables.settings import described

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK, GRAY = "#CC79A7", "#56B4E9", "#F0E442", "#222222", "#8A8A8A"
SOFT = "#57606A"  # of small words: gray, and still easy to read
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


def words(frame: pd.DataFrame) -> Any:
    """A table of words for a notebook to show: left-aligned, without row numbers.

    A cell is shown letter by letter, so `<think>` isn't taken for HTML.
    """
    left = "text-align: left"
    heading = {"selector": "th", "props": left}
    cell = {"selector": "td", "props": left}
    as_written = frame.style.format(escape="html")
    as_written = as_written.format_index(escape="html", axis="columns")
    without_numbers = as_written.hide(axis="index")
    return without_numbers.set_table_styles([heading, cell])


def folded(title: str, frame: pd.DataFrame) -> None:
    """Show a table of words that opens when its title is clicked."""
    from IPython.display import HTML, display
    table = words(frame).to_html()
    summary = html.escape(title)
    display(HTML(f"<details><summary>{summary}</summary>{table}</details>"))


def folded_text(title: str, text: str) -> None:
    """Show a text, line by line as it is, that opens when its title is clicked."""
    from IPython.display import HTML, display
    summary = html.escape(title)
    inside = html.escape(text)
    display(HTML(f"<details><summary>{summary}</summary><pre>{inside}</pre></details>"))


def show_settings(settings: Any, first: Sequence[str], kind: str = "setting") -> None:
    """Show the settings that a reader changes first; the others open with a click.

    Args:
      settings: an object whose fields are `tables.settings.setting`.
      first: the names of the settings to show, in the order of the table.
      kind: what the page calls a setting.
    """
    import pandas as pd
    from IPython.display import HTML, display
    rows = {}
    for name, value, what in described(settings):
        rows[name] = {kind: name, "value": repr(value), "what it is": what}

    shown = [rows.pop(name) for name in first]
    first_table = words(pd.DataFrame(shown))
    first_html = first_table.to_html()
    display(HTML(first_html))
    others = pd.DataFrame(rows.values())
    folded(f"the other {len(rows)} {kind}s", others)


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
    width: float = 8.0,
    height: float = 3.6,
    rows: int = 1,
    columns: int = 1,
    **kwargs: Any,
) -> tuple[Figure, Any]:
    """A matplotlib figure, and its axes, in the series' style.

    Args:
      width, height: in inches.
      rows, columns: of axes; with more than one, the axes are an array.
      **kwargs: for `plt.subplots`.
    """
    import matplotlib.pyplot as plt
    plt.rcParams.update(LOOK)
    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=CYCLE)
    return plt.subplots(rows, columns, figsize=(width, height), **kwargs)


def finish(fig: Figure, name: str, source: str = "") -> None:
    """Add a source line under the figure, save it as RUN_DIR/figures/<name>.png, and show it.

    Args:
      fig: from `figure`.
      name: file name without suffix, for example `03_loss`.
      source: where the numbers come from, for example "measured, tiny, 2 CPU cores".
    """
    import matplotlib.pyplot as plt
    if source:
        fig.supxlabel(f"Source: {source}", fontsize=8, color=SOFT, x=0.01, ha="left")
    with atomic_file(run_dir("figures", f"{name}.png")) as file:
        fig.savefig(file, format="png")
    plt.show()
    plt.close(fig)


# {(is the token trained?, should it be?): (name, color of the box, color of the text)}
TOKEN_LOOK = {
    (False, False): ("context", "#E4E4E4", "#444444"),
    (True, True): ("trained", BLUE, "white"),
    (False, True): ("not trained, but should be", ORANGE, "black"),
    (True, False): ("trained, but should not be", RED, "white"),
}


def draw_tokens(
    ax: Axes,
    pieces: Sequence[str],
    mask: Sequence[bool],
    should: Sequence[bool],
    columns: int = 110,
) -> int:
    """Draw decoded tokens as colored boxes, wrapped like text; returns the number of lines.

    Args:
      ax: where to draw.
      pieces: the text of each token.
      mask, should: True where a token is trained, and where it should be.
      columns: letters of a line.
    """
    x = y = 0
    for piece, trained, wanted in zip(pieces, mask, should, strict=True):
        text = piece.replace("\n", "↵").replace(" ", "·")
        if not text:
            text = "∅"
        if x and x + len(text) > columns:
            x = 0
            y += 1
        kind = (bool(trained), bool(wanted))
        _draw_token(ax, text, x, y, kind)
        x += len(text)
        if "\n" in piece:  # the next token starts a line below, behind this one's last letters
            _, _, last_letters = piece.rpartition("\n")
            x = len(last_letters)
            y += 1

    lines = y + 1
    if pieces and "\n" in pieces[-1]:
        lines = y
    ax.set(xlim=(0, columns), ylim=(lines + 0.2, 0))
    ax.axis("off")
    return lines


def _draw_token(ax: Axes, text: str, x: int, y: int, kind: tuple[bool, bool]) -> None:
    """Draw one box with its text; `kind` is a key of `TOKEN_LOOK`."""
    from matplotlib.patches import Rectangle
    _, color, ink = TOKEN_LOOK[kind]
    corner = (x, y + 0.06)
    width = len(text) - 0.12
    box = Rectangle(corner, width, 0.88, color=color, lw=0)
    ax.add_patch(box)
    ax.text(
        x - 0.06,
        y + 0.55,
        text,
        color=ink,
        family="monospace",
        fontsize=8,
        va="center",
        parse_math=False,
    )


def show_tokens(pieces: Sequence[str], mask: Sequence[bool], name: str, title: str = "") -> None:
    """Show a figure of one example's tokens: the trained ones are blue, the others gray.

    Args:
      pieces: the text of each token.
      mask: True where a token is trained.
      name: of the figure's file.
      title: above the figure; without one, how many tokens are read and how many trained.
    """
    fig, ax = figure(7.74, 1)
    lines = draw_tokens(ax, pieces, mask, mask)
    fig.set_figheight(0.165 * lines + 0.95)
    counted = f"{len(pieces)} tokens are read, {sum(mask)} of them are trained"
    ax.set_title(title or counted)

    _, gray, _ = TOKEN_LOOK[False, False]
    _, blue, _ = TOKEN_LOOK[True, True]
    context = ax.bar(0, 0, color=gray)  # bars without height, for the legend
    trained = ax.bar(0, 0, color=blue)
    fig.legend(
        handles=[context, trained],
        labels=["context: read, not learned", "trained"],
        loc="outside lower left",
        ncols=2,
        fontsize=9,
    )
    finish(fig, name)


def draw_rows(
    ax: Axes,
    packed: dict[str, np.ndarray],
    title: str,
    colors: Sequence[str] = CYCLE,
) -> None:
    """Draw the first ten packed rows as bars: a color for each example, pale where it's context.

    Args:
      ax: where to draw.
      packed: the four arrays of `packing.pack_arrays`.
      title: above the bars.
      colors: that the examples of a row take in turn.
    """
    segment_ids = packed["segment_ids"]
    loss_mask = packed["loss_mask"]
    count, length = segment_ids.shape
    drawn = min(10, count)
    for row in range(drawn):
        segments = segment_ids[row]
        trained = loss_mask[row]
        examples = segments.max()
        for segment in range(1, examples + 1):
            color = colors[segment % len(colors)]
            is_here = segments == segment
            is_trained = is_here & trained
            _bars(ax, row, is_here, color, alpha=0.35)
            _bars(ax, row, is_trained, color, alpha=1)
    ax.set(xlim=(0, length), ylim=(9.7, -0.7), yticks=[], title=title)
    ax.grid(False)


def _bars(ax: Axes, row: int, on: np.ndarray, color: str, alpha: float) -> None:
    """Draw a bar in a row wherever `on`, bool [T], is True without a break."""
    import numpy as np
    with_ends = np.pad(on.astype(int), 1)  # a 0 before and a 0 behind
    changes = np.flatnonzero(np.diff(with_ends))
    edges = changes.reshape(-1, 2)  # [bars, 2]: the first token, the one after it
    bars = []
    for first, end in edges:
        width = end - first
        bars.append((first, width))
    ax.broken_barh(bars, (row - 0.4, 0.8), color=color, alpha=alpha, lw=0)


def squares(passed: dict[str, Sequence[bool]], name: str, title: str) -> None:
    """Show a figure with one square for each problem: filled where an answer passes.

    Args:
      passed: {name of a model: a verdict for each problem}; the base is gray, others are blue.
      name: of the figure's file.
      title: above the figure.
    """
    from matplotlib.patches import Rectangle
    longest = max(len(verdicts) for verdicts in passed.values())
    height = 0.4 + 0.25 * len(passed)
    fig, ax = figure(7, height)
    for row, model in enumerate(passed):
        verdicts = passed[model]
        color = BLUE
        if model == "base":
            color = GRAY
        ax.text(-0.6, row + 0.4, model, ha="right", va="center")
        for place, passes in enumerate(verdicts):
            fill = "white"
            if passes:
                fill = color
            square = Rectangle((place, row), 0.8, 0.8, facecolor=fill, edgecolor=color)
            ax.add_patch(square)
    ax.set(xlim=(-0.2, longest), ylim=(len(passed), -0.2), title=title)
    ax.set_aspect("equal")
    ax.axis("off")
    finish(fig, name)


def loss_with_verdicts(
    losses: Sequence[float],
    verdicts: dict[int, Any],
    vocabulary: int,
    name: str,
    source: str,
) -> None:
    """Show the loss of a training, with the judge's verdict at every stop where it was asked.

    Args:
      losses: of each step, in nats per trained token.
      verdicts: {steps done: a verdict with `passed`}; 0 is the base, which has no place here.
      vocabulary: how many tokens there are; a line shows the loss of a blind guess among them.
      name: of the figure's file.
      source: where the numbers come from.
    """
    import numpy as np
    fig, ax = figure(7, 2.8)
    steps = len(losses)
    blind = np.log(vocabulary)
    ax.plot(range(1, steps + 1), losses, color=BLUE)
    ax.axhline(blind, color=GRAY, ls="--")
    ax.text(steps, blind, "a blind guess", color=SOFT, ha="right", va="top")
    stops = dict(verdicts)
    stops.pop(0, None)
    passes = 0
    for step, verdict in stops.items():
        color, word = RED, "fails"
        if verdict.passed:
            color, word = GREEN, "passes"
            passes += 1
        loss = losses[step - 1]
        ax.plot(step, loss, "o", color=color, ms=8)
        ax.annotate(
            word,
            xy=(step, loss),
            xytext=(0, 8),
            textcoords="offset points",
            color=color,
            ha="center",
        )
    ax.set(
        xlabel="optimizer step",
        ylabel="nats per trained token",
        yscale="log",
        yticks=(0.03, 0.1, 0.3, 1, 3),
    )
    first_loss = losses[0]
    last_loss = losses[-1]
    ax.set_title(f"The loss falls from {first_loss:.1f} to {last_loss:.2f}, "
                 f"and the counter passes at {passes} of {len(stops)} stops")
    ax.yaxis.set_major_formatter("{x:g}")
    finish(fig, name, source)


def show_source(*functions: Callable[..., Any]) -> None:
    """Show the source of helper functions that a reader of the page should see, too."""
    from IPython.display import Markdown, display
    sources = [inspect.getsource(function) for function in functions]
    code = "\n\n".join(sources)
    display(Markdown(f"```python\n{code}```"))


def fold_source(title: str, *functions: Callable[..., Any]) -> None:
    """Show the source of helper functions that opens when its title is clicked."""
    sources = [inspect.getsource(function) for function in functions]
    folded_text(title, "\n\n".join(sources))


COLUMN = """<td style='width:{width}%;vertical-align:top;text-align:left'><b>{name}</b>\
<pre style='white-space:pre-wrap;word-break:normal;font:85%/1.5 monospace'>{text}</pre></td>"""
WRONG = "<u style='text-decoration:underline 2px {color}'>{word}</u>"


def side_by_side(texts: dict[str, str], asked: str = "", wrong: Iterable[str] = ()) -> None:
    """Show {heading: text} in columns, below what was asked: at most 700 letters of each text.

    Args:
      texts: {heading: text}.
      asked: shown above the columns.
      wrong: words to underline in red.
    """
    from IPython.display import HTML, display
    width = 100 // len(texts)
    columns = []
    for name, text in texts.items():
        shown = html.escape(text[:700]) or "(nothing)"
        for word in wrong:
            underlined = WRONG.format(color=RED, word=word)
            as_written = re.escape(word)
            shown = re.sub(rf"\b{as_written}\b", underlined, shown)
        column = COLUMN.format(width=width, name=name, text=shown)
        columns.append(column)
    row = "".join(columns)
    narrowest = 13 * len(texts)
    page = ("<div style='overflow-x:auto'>"
            f"<table style='width:100%;min-width:{narrowest}em;table-layout:fixed'>"
            f"<tr>{row}</tr></table></div>")
    if asked:
        question = html.escape(asked)
        page = f"<p style='white-space:pre-wrap;line-height:1.3'><i>{question}</i></p>{page}"
    display(HTML(page))


def show_stops(texts: dict[int, str], verdicts: dict[int, Any], wrong: Iterable[str] = ()) -> None:
    """Show the answers of a model at several stops of its training, each different one once.

    Args:
      texts: {steps done: the answer}.
      verdicts: {steps done: a verdict with `passed`}.
      wrong: words to underline in red.
    """
    shown: dict[str, str] = {}
    for steps, text in texts.items():
        if text in shown.values():
            continue
        word = "fails"
        if verdicts[steps].passed:
            word = "passes"
        shown[f"{steps} steps: {word}"] = text
    side_by_side(shown, wrong=wrong)
