"""The drawings of 05 and 06. Each takes axes and data; the page makes the figure and saves it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, MaxNLocator

from serving.results import (
    INF,
    KEPT,
    KEPT_UP,
    LIMIT,
    NOISY,
    OVERLOADED,
    LongRun,
    Measurement,
    kept_up,
    price_column,
    rows,
    states,
)

BLUE = "#0072B2"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLACK = "#222222"
GRAY = "#8A8A8A"
SOFT = "#57606A"  # of words in gray
LIGHT = "#C9C9C9"
COLORS = (BLUE, ORANGE, GREEN, "#D55E00", "#CC79A7", SKY)
MARKERS = "osD^vP"  # for a print without colors
# Of a point, by the state of its rate.
SHAPES = {KEPT_UP: "o", LIMIT: "D", OVERLOADED: "o", NOISY: "X"}


def label(ax: Axes, x: float, y: float, text: str, color: str, **more: Any) -> None:
    """Words beside a point, in its color, instead of a legend."""
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
    limit = share * edge
    for place, plan in enumerate(plans.values()):
        _memory_bar(ax, place, plan, limit)
        count = plan["requests of 16,384"]
        copies = plan["dp"]
        text = "less than one"
        if count:
            text = str(count)
        if count and copies > 1:
            text = f"{copies} × {count // copies} = {count}"
        ax.text(edge + 0.4, place, text, va="center", fontsize=10)

    ax.axvline(limit, color=BLACK, lw=1)
    heading: dict[str, Any] = {"va": "bottom", "fontsize": 10, "weight": "bold"}
    ax.text(0, -0.62, "weights", color=SOFT, **heading)
    ax.text(limit - 0.3, -0.62, "requests", color=BLUE, ha="right", **heading)
    ax.text(edge + 0.4, -0.62, "in all", **heading)
    names = list(plans)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -1.1)
    ax.set_xlim(0, edge)
    ax.set_xlabel(f"GiB of one chip; the line: the {share:.0%} that vLLM takes")
    ax.grid(axis="y", visible=False)


def _memory_bar(ax: Axes, place: int, plan: dict, limit: float) -> None:
    """One bar of `memory`, at `place` on the y axis.

    Where no long request fits, it says how many tokens do. `limit` is where the line is, in GiB.
    """
    weights = plan["weights, GiB/chip"]
    request = plan["one of 16,384, GiB/chip"]
    count = plan["requests of 16,384"] // plan["dp"]
    ax.barh(place, weights, color=GRAY)
    left = weights
    for _ in range(count):
        ax.barh(place, request, left=left, color=SKY, edgecolor="white")
        left += request
    if not count:
        room = limit - weights
        ax.barh(place, room, left=weights, color="white", edgecolor=SKY, hatch="//")
        middle = (weights + limit) / 2
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        text = f"{plan['tokens']:,} tokens"
        ax.text(
            middle,
            place,
            text,
            ha="center",
            va="center",
            fontsize=9,
            bbox=box)


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
        gap_ms = 1e3 * gap
        gaps = len(ms) - 1
        pace = f"{gap_ms:.1f} ms on average, {gaps} pieces (white lines)"
    bold: dict[str, Any] = {"fontsize": 10, "weight": "bold"}
    ax.plot(0.012 * last, 0.44, "s", color=ORANGE, ms=8)
    ax.text(0.026 * last, 0.36, f"TTFT: {first:.0f} ms", color=BLACK, **bold)
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
    lanes = range(1, count + 1)
    height = 1.0  # thin lanes with gaps would come out in two shades
    if count <= 40:
        height = 0.8
    ax.barh(lanes, wait, left=sent, color=ORANGE, height=height, label="waits for its first token")
    begun = sent + wait
    ax.barh(lanes, answer, left=begun, color=SKY, height=height, label="is being answered")

    last = sent.max()
    below_all = 1.045 * count + 1
    ax.axvline(last, color=BLACK, lw=1, ls=":")
    side = "left"
    ended = (begun + answer).max()
    if last > 0.8 * ended:  # there's no room to the right
        side = "right"
    ax.text(last, below_all, " last one sent ", fontsize=9, va="center", ha=side)
    ax.set_ylim(1.08 * count + 1, 0)
    ticks = []
    for number in MaxNLocator(integer=True).tick_values(1, count):
        if 1 <= number <= count:
            ticks.append(number)
    ax.set_yticks(ticks)
    ax.set_xlabel("seconds")
    ax.set_ylabel("request")
    ax.grid(axis="y", visible=False)


class _Look(NamedTuple):
    """How one regime is drawn."""

    name: str
    color: str


def plain_log(ax: Axes, which: str = "y") -> None:
    """Make an axis ("x" or "y") logarithmic, with a few plain numbers; call it last."""
    axis: Axis = ax.yaxis
    if which == "x":
        ax.set_xscale("log")
        axis = ax.xaxis
    else:
        ax.set_yscale("log")
    low, high = sorted(axis.get_view_interval())
    multiples: tuple[float, ...] = (1, 2, 5)
    if high <= 10 * low:
        multiples = (1, 1.5, 2, 3, 4, 5, 7)
    axis.set_major_locator(LogLocator(subs=multiples, numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.minorticks_off()


def _regimes(table: pd.DataFrame) -> Iterator[tuple[_Look, pd.DataFrame]]:
    """Every regime: its look, and its rows."""
    colors = itertools.cycle(COLORS)
    regimes = table.groupby(["input_len", "output_len"])
    for (inputs, outputs), part in regimes:
        look = _Look(f"{inputs}/{outputs}", next(colors))
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


def curves(
        ax: Axes,
        table: pd.DataFrame,
        column: str,
        words: str,
        dashed: str = "",
        dashed_words: str = "") -> None:
    """A column over the offered rates, by regime: medians, and the range of the repeats.

    A point is full where the server keeps up, a gray diamond at its limit, and hollow where it's
    overloaded. A cross is noisy: its measurements contradict each other. A line joins the rates;
    all at once is no rate, so it stands alone.

    Args:
      words: what the column is, with its unit.
      dashed: the column of the line that it may reach, and no more; "" draws none.
      dashed_words: what the dashed line is.
    """
    place = _places(table)
    regimes = list(_regimes(table))
    for look, part in regimes:
        if dashed:
            _dashed_line(ax, part, dashed, dashed_words, look, place)
        _curve_of_regime(ax, part, column, look, place)
        if len(regimes) > 1:
            _name_beside_curve(ax, part, column, look, place)
    if dashed:
        _words_at_dashed_line(ax, table, column, dashed, dashed_words, place)
    _rates_as_ticks(ax, place)
    _legend_of_states(ax, table)
    ax.set_ylabel(f"{words} (log scale)")
    ax.margins(x=0.08, y=0.12)
    plain_log(ax)


def _name_beside_curve(
        ax: Axes, part: pd.DataFrame, column: str, look: _Look, place: dict[float, float]) -> None:
    """The name of a regime at the end of its curve."""
    middle = part.groupby("rate")[column].median()
    last = middle.index[-1]
    label(
        ax,
        place[last],
        middle[last],
        look.name,
        look.color,
        xytext=(9, 0))


def _words_at_dashed_line(
        ax: Axes,
        table: pd.DataFrame,
        column: str,
        dashed: str,
        words: str,
        place: dict[float, float]) -> None:
    """What the dashed line of `curves` is, at its end: above it if the curve lies below."""
    limits = table.groupby("rate")[dashed].median()
    rates = limits.index[limits.index < INF]
    last = rates[-1]
    at_last = table[table.rate == last]
    offset = -10
    if limits[last] > at_last[column].median():
        offset = 9
    label(
        ax,
        place[last],
        limits[last],
        words,
        BLACK,
        ha="center",
        xytext=(0, offset))


def _places(table: pd.DataFrame) -> dict[float, float]:
    """{rate: where it stands on the x axis}: all at once stands to the right of all rates."""
    finite = sorted(set(table.rate) - {INF})
    place = {rate: rate for rate in finite}
    if INF in set(table.rate):
        place[INF] = 1.5 * finite[-1]
    return place


def _dashed_line(
        ax: Axes,
        part: pd.DataFrame,
        column: str,
        words: str,
        look: _Look,
        place: dict[float, float]) -> None:
    """The dashed line of `curves`, of one regime; `words` stand at a burst's own one, too."""
    limit = part.groupby("rate")[column].median()
    places = limit.index.map(place)
    is_rate = limit.index < INF
    is_burst = ~is_rate
    ax.plot(places[is_rate], limit[is_rate], "--", color=look.color, lw=1.2)
    ax.plot(places[is_burst], limit[is_burst], "_", color=look.color, lw=1.2)
    for rate, value in limit[is_burst].items():
        if value < INF:
            label(ax, place[rate], value, words, BLACK, ha="center", xytext=(0, -10))


def _curve_of_regime(
        ax: Axes, part: pd.DataFrame, column: str, look: _Look, place: dict[float, float]) -> None:
    """One regime of `curves`."""
    stats = _spread(part, column)
    middle = stats["median"]
    places = stats.index.map(place)
    is_rate = stats.index < INF
    ax.plot(places[is_rate], middle[is_rate], color=look.color)
    state_of = states(part)
    for rate, row in stats.iterrows():
        state = _drawn_as(state_of[rate])
        filling = _filling(state, look.color)
        ax.errorbar(
            place[rate],
            row["median"],
            yerr=_range(row),
            fmt=SHAPES[state],
            color=look.color,
            mfc=filling,
            capsize=3,
            zorder=3)


def _drawn_as(state: str) -> str:
    """The key of `SHAPES` for one of `results.states`: a noisy rate is noisy, whatever else."""
    if state.endswith(NOISY):
        return NOISY
    return state


def _filling(state: str, color: str) -> str:
    """The inside of a point, by a key of `SHAPES`."""
    return {KEPT_UP: color, LIMIT: LIGHT, OVERLOADED: "white", NOISY: LIGHT}[state]


def _legend_of_states(ax: Axes, table: pd.DataFrame, where: str = "best") -> None:
    """What a point's form says of its rate, for the states that this table has."""
    found = set()
    for _, part in table.groupby(["input_len", "output_len"]):
        for state in states(part).values():
            found.add(_drawn_as(state))
    for state, shape in SHAPES.items():
        if state in found:
            filling = _filling(state, BLUE)
            words = state.removeprefix(", ")
            ax.plot([], [], shape, color=BLUE, mfc=filling, label=words)
    ax.legend(fontsize=8, loc=where)
    ax.set_xlabel("offered rate, requests/s (log scale)")


def _rates_as_ticks(ax: Axes, place: dict[float, float]) -> None:
    """A tick at every rate that was measured; `place` says where "all at once" stands."""
    names = []
    for rate in place:
        name = "all at\nonce"
        if rate < INF:
            name = f"{rate:g}"
        names.append(name)
    ticks = list(place.values())
    ax.set_xscale("log")
    ax.set_xticks(ticks, names, fontsize=8)
    ax.xaxis.minorticks_off()


def promise(
        ax: Axes,
        table: pd.DataFrame,
        runs: Sequence[LongRun],
        stricter: pd.DataFrame | None = None) -> None:
    """The share of the requests that kept the objective, over the rates; stars are long runs.

    Args:
      table: of `rows`.
      runs: of `load.confirm`.
      stricter: of `rows` with half the objective, for a dashed line.
    """
    finite = _with_shares(table)
    place = _places(finite)
    regimes = list(_regimes(finite))
    for look, part in regimes:
        _curve_of_regime(ax, part, "kept", look, place)
    if stricter is not None:
        for look, part in _regimes(_with_shares(stricter)):
            middle = part.groupby("rate").kept.median()
            ax.plot(middle.index, middle, "--", color=look.color, lw=1.2)
            from_half = (middle - 50).abs()
            rate = from_half.idxmin()
            beside = (-8, -4)  # of the slope
            if from_half[rate] > 35:  # there's no point on the slope
                rate = middle.index[-1]
                beside = (0, -9)
            words = "half the objective"
            label(ax, rate, middle[rate], words, BLACK, ha="right", xytext=beside)
    if len(regimes) == 1:
        _shade_above_the_knee(ax, finite)
    stars = {}
    for run in runs:
        stars[run.rate] = 100 * run.share
    _stars(ax, stars)
    for rate, value in stars.items():  # a legend's star would look like one more run
        label(ax, rate, value, "long run", BLACK, ha="right", xytext=(-6, -12))
    nine_in_ten = 100 * KEPT
    ax.axhline(nine_in_ten, color=BLACK, lw=1, ls=":")
    ax.text(
        0.99,
        nine_in_ten,
        "nine in ten",
        fontsize=9,
        va="top",
        ha="right",
        transform=ax.get_yaxis_transform())
    _rates_as_ticks(ax, place)
    _legend_of_states(ax, finite, "lower left")
    ax.set_ylim(-4, 106)
    ax.set_ylabel("% that kept the objective")


def _with_shares(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `table` with a rate, and `kept`: % of their requests that kept the objective."""
    share = table.goodput_rps / table.delivered_rps
    with_shares = table.assign(kept=100 * share)
    return with_shares[table.rate < INF]


def _shade_above_the_knee(ax: Axes, part: pd.DataFrame) -> None:
    """Shade the rates of one regime that weren't kept up with, whatever their requests got."""
    knee, _ = kept_up(part)
    rates = sorted(set(part.rate))
    above = [rate for rate in rates if rate > knee]
    if not above:
        return
    begin = (knee * above[0]) ** 0.5  # the middle, on a logarithmic axis
    if knee == 0:
        begin = 0.95 * above[0]
    end = 1.08 * above[-1]
    ax.axvspan(begin, end, color=ORANGE, alpha=0.12, lw=0)
    ax.text(begin, 2, " not kept up with", color="#9A6A00", weight="bold", fontsize=9)


def _stars(ax: Axes, values: dict[float, float], words: str = "") -> None:
    """Stars at these {rate: value}; `words` are for a legend."""
    ax.plot(
        list(values),
        list(values.values()),
        "*",
        color=ORANGE,
        mec=BLACK,
        ms=15,
        ls="",
        zorder=4,
        label=words)


def price(ax: Axes, table: pd.DataFrame, unit: str, runs: Sequence[LongRun]) -> None:
    """What a million output tokens cost, over the rates; a star is the rate that may be promised.

    The price is the machine's by the tokens that it delivered. So it falls as long as the server
    keeps up, whatever the waits do.

    Args:
      table: of `rows`.
      unit: "USD", or "machine-hours" where the machine has no price.
      runs: of `load.confirm`.
    """
    column = price_column(unit)
    finite = table[table.rate < INF]
    curves(ax, finite, column, f"{unit} a million tokens")
    objective = (INF, INF)  # the price doesn't depend on it
    stars = {}
    for run in runs:
        if not run.held:
            continue
        dollars_per_hour = table.dollars_per_hour.iloc[0]
        long_table = rows([run.measurement], objective, dollars_per_hour)
        price_of_run = long_table[column].iloc[0]
        stars[run.rate] = float(price_of_run)
    if stars:
        _stars(ax, stars, "a rate that held")
        ax.legend(fontsize=9, loc="upper right")


def against_floors(ax: Axes, points: pd.DataFrame) -> None:
    """Times that others published against the least time that their machine needs.

    Points below the diagonal are faster than the hardware can be. Those marked `too_fast` are
    hollow, and lie in the shade, which begins at 1/1.2 of the floor.

    Args:
      points: columns `machine`, `floor_ms`, `value` (milliseconds) and `too_fast`.
    """
    styles = itertools.cycle(zip(COLORS, MARKERS, strict=True))
    for machine, part in points.groupby("machine", sort=False):
        color, marker = next(styles)
        possible = part[~part.too_fast]
        below = part[part.too_fast]
        words = f"{machine}: {len(below)} of {len(part)} too fast"
        ax.plot(possible.floor_ms, possible.value, marker, color=color, ms=5, label=words)
        ax.plot(below.floor_ms, below.value, marker, color=color, ms=5, mfc="white")

    lowest = points.floor_ms.min()
    highest = points.floor_ms.max()
    ends = [lowest, highest]
    ax.plot(ends, ends, "--", color=BLACK, lw=1.2)
    label(ax, highest, highest, "the floor", BLACK, ha="center", xytext=(8, -14))
    ax.margins(x=0.14)
    plain_log(ax, "x")
    plain_log(ax)
    ax.legend(fontsize=9, loc="upper left")
    _shade_the_impossible(ax)
    ax.set_xlabel("least possible median TTFT, ms (log scale)")
    ax.set_ylabel("published median TTFT, ms")


def _shade_the_impossible(ax: Axes) -> None:
    """Shade what lies below 1/1.2 of the diagonal, without a change of the axes' limits."""
    bottom, _ = ax.get_ylim()
    wide = np.array(ax.get_xlim())
    ax.fill_between(wide, bottom, wide / 1.2, color=ORANGE, alpha=0.12, lw=0)
    ax.set_xlim(*wide)
    ax.set_ylim(bottom=bottom)
    ax.text(
        0.97,
        0.05,
        "impossible",
        color="#9A6A00",
        weight="bold",
        ha="right",
        transform=ax.transAxes)
