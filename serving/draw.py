"""The drawings of 05 and 06. Each takes axes and data; the page makes the figure and saves it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator

from serving.results import INF, Measurement, kept_up, states

BLUE, ORANGE, SKY, GREEN = "#0072B2", "#E69F00", "#56B4E9", "#009E73"
BLACK, GREY = "#222222", "#8A8A8A"
COLORS = (BLUE, ORANGE, GREEN, "#D55E00", "#CC79A7", SKY)
MARKERS = "osD^vP"  # for a print without colours


def label(ax: Axes, x: float, y: float, text: str, color: str, **more: Any) -> None:
    """Words beside a point, in its colour, instead of a legend."""
    usual = {"va": "center", "fontsize": 9, "xytext": (6, 0), "textcoords": "offset points"}
    ax.annotate(text, (x, y), color=color, **{**usual, **more})


def memory(ax: Axes, plans: dict[str, dict], chip_bytes: float, share: float) -> None:
    """One bar per layout: weights, then the KV cache cut into requests of 16,384 tokens.

    Args:
      plans: {label: row of `limits.memory_plan`}.
      chip_bytes: memory of one chip.
      share: of it, what vLLM takes.
    """
    edge = chip_bytes / 2.0**30
    for place, plan in enumerate(plans.values()):
        weights = plan["weights, GiB/chip"]
        count = plan["requests of 16,384"] // plan["dp"]
        size = plan["one of 16,384, GiB/chip"]
        ax.barh(place, weights, color=GREY)
        lefts = weights + size * np.arange(count)
        ax.barh([place] * count, size, left=lefts, color=SKY, edgecolor="white")
        text = f"{plan['dp']} × {count}" if plan["dp"] > 1 else str(count)
        ax.text(edge + 0.4, place, text, va="center", fontsize=10)
    ax.axvline(share * edge, color=BLACK, lw=1)
    ax.text(edge + 0.4, -0.62, "requests", va="bottom", fontsize=10, weight="bold")
    ax.set_yticks(range(len(plans)), list(plans))
    ax.set_ylim(len(plans) - 0.4, -1.1)
    ax.set_xlim(0, edge)
    ax.set_xlabel(f"GiB of one chip: weights (grey), requests (blue); line: {share:.0%} of it")
    ax.grid(axis="y", visible=False)


def timeline(ax: Axes, arrivals: Sequence[float], gap: float) -> None:
    """One streamed answer: when each piece came, in seconds since the request was sent.

    Args:
      gap: seconds between two pieces, of `limits.pace`; nan where it cannot be believed.
    """
    ms = 1e3 * np.asarray(arrivals)
    first, last = ms[0], ms[-1]
    ax.barh(0, first, color=ORANGE, height=0.5)
    ax.barh(0, last - first, left=first, color=SKY, height=0.5)
    ax.vlines(ms, -0.25, 0.25, color="white", lw=0.7)
    bold: dict[str, Any] = {"fontsize": 10, "weight": "bold"}
    ax.text(0.004 * last, 0.36, f"TTFT: {first:.0f} ms", color=ORANGE, **bold)
    pace = f"{1e3 * gap:.1f} ms, {len(ms) - 1} times" if np.isfinite(gap) else "not measured"
    ax.text(last, 0.36, f"TPOT: {pace}", color=BLUE, ha="right", **bold)
    ax.set_yticks([])
    ax.set_ylim(-0.35, 0.75)
    ax.set_xlim(0, 1.02 * last)
    ax.set_xlabel("milliseconds since the request was sent")
    ax.grid(axis="y", visible=False)


def requests(ax: Axes, measurement: Measurement) -> None:
    """One measurement, request by request: sent, first token (orange until then), last token."""
    sent = np.array(measurement.start_times) - min(measurement.start_times)
    first, total = np.array(measurement.ttfts), np.array(measurement.latencies)
    rows = np.arange(len(sent))
    ax.barh(rows, first, left=sent, color=ORANGE, height=0.8)
    ax.barh(rows, total - first, left=sent + first, color=SKY, height=0.8)
    ax.axvline(sent.max(), color=BLACK, lw=1, ls=":")
    ax.text(sent.max(), 1.045 * len(rows), " last one sent", fontsize=9, va="center")
    ax.set_ylim(1.08 * len(rows), -1)
    ax.set_xlabel("seconds")
    ax.set_ylabel("request")
    ax.grid(axis="y", visible=False)


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


def _regimes(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, str, str]]:
    """(name, rows, colour, marker) of every regime."""
    looks = itertools.cycle(zip(COLORS, MARKERS, strict=True))
    for (inputs, outputs), part in table.groupby(["input_len", "output_len"]):
        color, marker = next(looks)
        yield f"{inputs}/{outputs}", part, color, marker


def _range(values: pd.DataFrame) -> list[pd.Series]:
    """Error bars, below and above the median, that end at the smallest and the largest repeat."""
    return [values["median"] - values["min"], values["max"] - values["median"]]


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
    for name, part, color, marker in _regimes(table):
        by_rate = part.groupby("rate")
        stats = by_rate[column].agg(["median", "min", "max"])
        limit = by_rate[dashed].median()
        knee, _ = kept_up(part)
        x = stats.index.map(place)
        is_rate = stats.index < INF  # all at once is no rate: it stands alone
        ax.plot(x[is_rate], stats["median"][is_rate], color=color)
        for chosen, fill in ((stats.index <= knee, color), (stats.index > knee, "white")):
            some = stats[chosen]
            ax.errorbar(x[chosen], some["median"], _range(some), fmt=marker, color=color, mfc=fill,
                        capsize=3, zorder=3)
        ax.plot(x[is_rate], limit[is_rate], "--", color=color, lw=1.2)
        ax.plot(x[~is_rate], limit[~is_rate], "_", color=color, lw=1.2)
        label(ax, x[-1], stats["median"].iloc[-1], name, color, xytext=(9, 0))
    ax.set_xscale("log")
    names = [f"{rate:.3g}" for rate in finite]
    ax.set_xticks(list(place.values()), [*names, "all at\nonce"], fontsize=8)
    ax.xaxis.minorticks_off()
    ax.set_xlabel("offered rate, requests/s")
    ax.set_ylabel(words)
    ax.margins(x=0.12)
    plain_log(ax)


def _cost_of_regime(ax: Axes, part: pd.DataFrame, column: str, name: str, color: str,
                    marker: str) -> None:
    """One regime of `cost`."""
    by_rate = part.groupby("rate")
    waits = by_rate.ttft_p90_ms.agg(["median", "min", "max"])
    prices = by_rate[column].median()
    knee, _ = kept_up(part)
    kept = waits.index <= knee
    ax.plot(waits["median"][kept], prices[kept], color=color, lw=1)
    words = states(part)
    for rate, wait in waits.iterrows():
        fill = color if rate <= knee else "white"
        below_and_above = [[wait["median"] - wait["min"]], [wait["max"] - wait["median"]]]
        ax.errorbar(wait["median"], prices[rate], xerr=below_and_above, fmt=marker, color=color,
                    mfc=fill, elinewidth=0.7, capsize=2)
        text = "all at once" if rate == INF else f"{rate:.3g}/s"
        state = words[rate].removeprefix("kept up").removeprefix(", ")
        text += f", {state}" if state else ""
        label(ax, wait["median"], prices[rate], text, color, xytext=(5, 7), fontsize=8)
    label(ax, waits["median"].iloc[0], prices.iloc[0], name, color, ha="right", xytext=(-8, 0))


def cost(ax: Axes, table: pd.DataFrame, slo: float, unit: str = "hours of the machine") -> None:
    """What a million output tokens cost against the wait of the unluckiest tenth; the corner to aim
    at.

    The line joins the rates that were kept up with. Overloaded points stand alone: there the wait
    measures the length of the test. Bars are the range of the repeats.

    Args:
      slo: the promised milliseconds to the first token.
      unit: "USD", or "hours of the machine" where it has no price.
    """
    column = "usd_per_million_output" if unit == "USD" else "hours_per_million_output"
    for name, part, color, marker in _regimes(table):
        _cost_of_regime(ax, part, column, name, color, marker)
    ax.axvline(slo, color=BLACK, lw=1, ls=":")
    ax.text(slo, 0.96, f" promised: {slo:g} ms", fontsize=9, transform=ax.get_xaxis_transform())
    ax.text(0.02, 0.03, "↙ better", fontsize=11, weight="bold", transform=ax.transAxes)
    ax.margins(x=0.2, y=0.14)
    plain_log(ax, "x")
    plain_log(ax)
    ax.set_xlabel("p90 of the time to first token, ms (log scale)")
    ax.set_ylabel(f"{unit} per million output tokens")
