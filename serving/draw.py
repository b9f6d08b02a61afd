"""The drawings of 05 and 06. Each takes axes and data; the page makes the figure and saves it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator

from serving.results import INF, Measurement, kept_up, states

BLUE = "#0072B2"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLACK = "#222222"
GREY = "#8A8A8A"
COLORS = (BLUE, ORANGE, GREEN, "#D55E00", "#CC79A7", SKY)
MARKERS = "osD^vP"  # for a print without colours


def label(ax: Axes, x: float, y: float, text: str, color: str, **more: Any) -> None:
    """Words beside a point, in its colour, instead of a legend."""
    style = {"va": "center", "fontsize": 9, "xytext": (6, 0), "textcoords": "offset points"}
    style.update(more)
    ax.annotate(text, (x, y), color=color, **style)


def memory(ax: Axes, plans: dict[str, dict], chip_bytes: float, share: float) -> None:
    """One bar per layout: weights, then the KV cache cut into requests of 16,384 tokens.

    Args:
      plans: {label: row of `limits.memory_plan`}.
      chip_bytes: memory of one chip.
      share: of it, what vLLM takes.
    """
    edge = chip_bytes / 2.0**30
    beside = edge + 0.4
    for place, plan in enumerate(plans.values()):
        _memory_bar(ax, place, plan)
        copies = plan["dp"]
        count = plan["requests of 16,384"] // copies
        text = f"{copies} × {count}" if copies > 1 else str(count)
        ax.text(beside, place, text, va="center", fontsize=10)

    ax.axvline(share * edge, color=BLACK, lw=1)
    ax.text(beside, -0.62, "requests", va="bottom", fontsize=10, weight="bold")
    names = list(plans)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -1.1)
    ax.set_xlim(0, edge)
    ax.set_xlabel(f"GiB of one chip: weights (grey), requests (blue); line: {share:.0%} of it")
    ax.grid(axis="y", visible=False)


def _memory_bar(ax: Axes, place: int, plan: dict) -> None:
    """One bar of `memory`, at `place` on the y axis."""
    weights = plan["weights, GiB/chip"]
    request = plan["one of 16,384, GiB/chip"]
    count = plan["requests of 16,384"] // plan["dp"]
    ax.barh(place, weights, color=GREY)
    left = weights
    for _ in range(count):
        ax.barh(place, request, left=left, color=SKY, edgecolor="white")
        left += request


def timeline(ax: Axes, arrivals: Sequence[float], gap: float) -> None:
    """One streamed answer: when each piece came, in seconds since the request was sent.

    Args:
      gap: seconds between two pieces, of `limits.pace`; nan where it can't be believed.
    """
    ms = 1e3 * np.asarray(arrivals)
    first = ms[0]
    last = ms[-1]
    ax.barh(0, first, color=ORANGE, height=0.5)
    ax.barh(0, last - first, left=first, color=SKY, height=0.5)
    ax.vlines(ms, -0.25, 0.25, color="white", lw=0.7)

    pace = "not measured"
    if np.isfinite(gap):
        gaps = len(ms) - 1
        pace = f"{1e3 * gap:.1f} ms, {gaps} times"
    bold: dict[str, Any] = {"fontsize": 10, "weight": "bold"}
    ax.text(0.004 * last, 0.36, f"TTFT: {first:.0f} ms", color=ORANGE, **bold)
    ax.text(last, 0.36, f"TPOT: {pace}", color=BLUE, ha="right", **bold)

    ax.set_yticks([])
    ax.set_ylim(-0.35, 0.75)
    ax.set_xlim(0, 1.02 * last)
    ax.set_xlabel("milliseconds since the request was sent")
    ax.grid(axis="y", visible=False)


def requests(ax: Axes, measurement: Measurement) -> None:
    """One measurement, request by request: sent, first token (orange until then), last token."""
    sent = np.array(measurement.start_times)
    sent -= sent.min()
    wait = np.array(measurement.ttfts)
    answer = np.array(measurement.latencies) - wait
    count = len(sent)
    lanes = range(count)
    ax.barh(lanes, wait, left=sent, color=ORANGE, height=0.8)
    ax.barh(lanes, answer, left=sent + wait, color=SKY, height=0.8)

    last = sent.max()
    ax.axvline(last, color=BLACK, lw=1, ls=":")
    ax.text(last, 1.045 * count, " last one sent", fontsize=9, va="center")
    ax.set_ylim(1.08 * count, -1)
    ax.set_xlabel("seconds")
    ax.set_ylabel("request")
    ax.grid(axis="y", visible=False)


class _Look(NamedTuple):
    """How one regime is drawn."""

    name: str
    color: str
    marker: str


def plain_log(ax: Axes, which: str = "y") -> None:
    """Make an axis ("x" or "y") logarithmic, with a few plain numbers; call it last."""
    axis: Axis = ax.yaxis
    if which == "x":
        ax.set_xscale("log")
        axis = ax.xaxis
    else:
        ax.set_yscale("log")
    low, high = sorted(axis.get_view_interval())
    subs = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.minorticks_off()


def _regimes(table: pd.DataFrame) -> Iterator[tuple[_Look, pd.DataFrame]]:
    """Every regime: its look, and its rows."""
    styles = itertools.cycle(zip(COLORS, MARKERS, strict=True))
    regimes = table.groupby(["input_len", "output_len"])
    for (inputs, outputs), part in regimes:
        color, marker = next(styles)
        look = _Look(f"{inputs}/{outputs}", color, marker)
        yield look, part


def _spread(part: pd.DataFrame, column: str) -> pd.DataFrame:
    """The median, smallest and largest repeat of a column, by rate of one regime."""
    values = part.groupby("rate")[column]
    return values.agg(["median", "min", "max"])


def _range(row: pd.Series) -> list[list[float]]:
    """An error bar around the median that ends at the smallest and at the largest repeat."""
    below = row["median"] - row["min"]
    above = row["max"] - row["median"]
    return [[below], [above]]


def curves(ax: Axes, table: pd.DataFrame, column: str, dashed: str, words: str) -> None:
    """A column over the offered rates, by regime: medians, range of the repeats, hollow beyond the
    knee.

    Args:
      dashed: the column of the line that it may reach, and no more.
      words: what the column is, with its unit.
    """
    finite = sorted(set(table.rate) - {INF})
    place = {rate: rate for rate in finite}
    place[INF] = 1.5 * finite[-1]
    for look, part in _regimes(table):
        _curve_of_regime(ax, part, column, dashed, look, place)
    _rates_as_ticks(ax, place)
    ax.set_xlabel("offered rate, requests/s")
    ax.set_ylabel(words)
    ax.margins(x=0.12)
    plain_log(ax)


def _curve_of_regime(
        ax: Axes,
        part: pd.DataFrame,
        column: str,
        dashed: str,
        look: _Look,
        place: dict[float, float]) -> None:
    """One regime of `curves`; `place` says where a rate stands on the x axis."""
    stats = _spread(part, column)
    middle = stats["median"]
    limit = part.groupby("rate")[dashed].median()
    knee, _ = kept_up(part)
    color = look.color

    x = stats.index.map(place)
    is_rate = stats.index < INF
    burst = ~is_rate  # all at once is no rate: it stands alone
    ax.plot(x[is_rate], middle[is_rate], color=color)
    ax.plot(x[is_rate], limit[is_rate], "--", color=color, lw=1.2)
    ax.plot(x[burst], limit[burst], "_", color=color, lw=1.2)
    for rate, row in stats.iterrows():
        ax.errorbar(
            place[rate],
            row["median"],
            yerr=_range(row),
            fmt=look.marker,
            color=color,
            mfc=color if rate <= knee else "white",
            capsize=3,
            zorder=3)
    label(ax, x[-1], middle.iloc[-1], look.name, color, xytext=(9, 0))


def _rates_as_ticks(ax: Axes, place: dict[float, float]) -> None:
    """A tick at every rate that was measured; `place` says where "all at once" stands."""
    names = []
    for rate in place:
        name = f"{rate:.3g}" if rate < INF else "all at\nonce"
        names.append(name)
    ticks = list(place.values())
    ax.set_xscale("log")
    ax.set_xticks(ticks, names, fontsize=8)
    ax.xaxis.minorticks_off()


def _cost_of_regime(ax: Axes, part: pd.DataFrame, column: str, look: _Look) -> None:
    """One regime of `cost`."""
    waits = _spread(part, "ttft_p90_ms")
    middle = waits["median"]
    prices = part.groupby("rate")[column].median()
    knee, _ = kept_up(part)

    kept = prices[prices.index <= knee].sort_values()
    ax.plot(kept, middle[kept.index], color=look.color, lw=1)
    state_of = states(part)
    for rate, wait in waits.iterrows():
        price = prices[rate]
        ax.errorbar(
            price,
            wait["median"],
            yerr=_range(wait),
            fmt=look.marker,
            color=look.color,
            mfc=look.color if rate <= knee else "white",
            elinewidth=0.7,
            capsize=2)
        text = "all at once" if rate == INF else f"{rate:.3g}/s"
        if "noisy" in state_of[rate]:
            text += ", noisy"
        label(ax, price, wait["median"], text, look.color, xytext=(5, 9), fontsize=8)
    slowest = prices.index[0]  # the smallest rate is the dearest, so it stands on the right
    label(ax, prices[slowest], middle[slowest], look.name, look.color, xytext=(8, -8))


def cost(ax: Axes, table: pd.DataFrame, slo: float, unit: str = "hours of the machine") -> None:
    """The wait of the unluckiest tenth against what a million output tokens cost; the corner to aim
    at.

    The line joins the rates that were kept up with, from the cheapest to the dearest, so it never
    turns back. Overloaded points stand alone: there the wait measures the length of the test. Bars
    are the range of the repeats.

    Args:
      slo: the promised milliseconds to the first token.
      unit: "USD", or "hours of the machine" where it has no price.
    """
    column = "usd_per_million_output" if unit == "USD" else "hours_per_million_output"
    for look, part in _regimes(table):
        _cost_of_regime(ax, part, column, look)
    ax.axhline(slo, color=BLACK, lw=1, ls=":")
    beside_axis = ax.get_yaxis_transform()
    ax.text(
        0.99,
        slo,
        f"promised: {slo:g} ms",
        fontsize=9,
        ha="right",
        va="bottom",
        transform=beside_axis)
    ax.text(0.02, 0.03, "↙ better", fontsize=11, weight="bold", transform=ax.transAxes)
    ax.margins(x=0.14, y=0.2)
    plain_log(ax, "x")
    plain_log(ax)
    ax.set_xlabel(f"{unit} per million output tokens (log scale)")
    ax.set_ylabel("p90 of the time to first token, ms")


def against_floors(ax: Axes, points: pd.DataFrame) -> None:
    """Times that others published against the least time that their machine needs.

    Points below the diagonal are faster than the hardware can be. Those marked `too_fast` are
    hollow.

    Args:
      points: columns `machine`, `floor_ms`, `value` (milliseconds) and `too_fast`.
    """
    styles = zip(COLORS, MARKERS, strict=True)
    by_machine = points.groupby("machine", sort=False)
    for (machine, part), (color, marker) in zip(by_machine, styles, strict=False):
        possible = part[~part.too_fast]
        ax.plot(possible.floor_ms, possible.value, marker, color=color, ms=5, label=machine)
        below = part[part.too_fast]
        ax.plot(below.floor_ms, below.value, marker, color=color, ms=5, mfc="white")

    lowest = points.floor_ms.min()
    highest = points.floor_ms.max()
    ends = [lowest, highest]
    ax.plot(ends, ends, "--", color=BLACK, lw=1.2)
    label(ax, highest, highest, "the floor", BLACK)
    ax.legend(fontsize=9, loc="upper left")
    ax.margins(x=0.14)
    plain_log(ax, "x")
    plain_log(ax)
    ax.set_xlabel("least possible median TTFT, ms (log scale)")
    ax.set_ylabel("published median TTFT, ms")
