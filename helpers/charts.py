"""The charts of 05 to 07: what a server holds, how fast it is, what its answers are worth."""

import math

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from helpers import judge, style
from helpers.bench import capacities, kept_up

INF = math.inf
LOOKS = list(zip(style.CYCLE, "osD^vP", strict=True)) * 4  # colour and marker: grey prints, too


# -- 06: rates, latencies, cost --------------------------------------------------------------------

def curves_of(table):
    """{(system, prompt, answer): rows} of a table of `bench.systems`."""
    return dict(list(table.groupby(["system", "input_len", "output_len"])))


def title_of(key, curves):
    """`prompt/answer` of a curve, with its system where there are several."""
    several = len({system for system, *_ in curves}) > 1
    return f"{key[1]}/{key[2]}" + (f", {key[0]}" if several else "")


def rate_axis(ax, rates):
    """A logarithmic axis of offered rates; inf stands beyond the largest. Returns its places."""
    finite = sorted({rate for rate in rates if rate < INF})
    place = {**{rate: rate for rate in finite}, INF: 2 * finite[-1]}
    ax.set_xscale("log", base=2)
    shown = sorted(set(rates))
    ax.set_xticks([place[rate] for rate in shown],
                  [f"{rate:g}" if rate < INF else "all\nat once" for rate in shown])
    ax.minorticks_off()
    ax.set_xlabel("offered rate, requests/s")
    return place


def plain_log(ax, which="y"):
    """Make an axis ("x" or "y") logarithmic, with a few plain numbers; call it last."""
    getattr(ax, f"set_{which}scale")("log")
    axis, (low, high) = getattr(ax, f"{which}axis"), getattr(ax, f"get_{which}lim")()
    subs = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def series_of(part, column, place):
    """x, median, smallest and largest of a column over the repeats of each rate."""
    stats = part.groupby("rate")[column].agg(["median", "min", "max"])
    return [place[rate] for rate in stats.index], stats["median"], stats["min"], stats["max"]


def draw_timeline(arrivals, tokens, source):
    """One streamed answer: when each piece came.

    Args:
      arrivals: seconds since the request was sent, one per piece, ascending.
      tokens: (prompt tokens, answer tokens).
      source: the figure's source line.
    """
    ms = 1e3 * np.asarray(arrivals)
    fig, ax = style.figure(9.0, 1.9)
    ax.barh(0, ms[0], color=style.ORANGE, height=0.5)
    ax.barh(0, ms[-1] - ms[0], left=ms[0], color=style.SKY, height=0.5)
    ax.vlines(ms, -0.25, 0.25, color="white", lw=0.7)
    gap = (ms[-1] - ms[0]) / max(len(ms) - 1, 1)
    ax.text(0, 0.36, f"first token: {ms[0]:.0f} ms", color=style.ORANGE, fontsize=9)
    ax.text(ms[-1], 0.36, f"then one every {gap:.1f} ms", color=style.BLUE, fontsize=9, ha="right")
    ax.set(yticks=[], ylim=(-0.35, 0.75), xlim=(0, 1.02 * ms[-1]),
           xlabel="milliseconds since the request was sent",
           title=f"{tokens[0]} tokens in, {tokens[1]} out: {ms[-1]:.0f} ms, "
                 f"{ms[0] / ms[-1]:.0%} of them before the first word")
    ax.grid(axis="y", visible=False)
    style.finish(fig, "06_timeline", source)


def draw_requests(result, source):
    """One measurement, request by request: sent, first token, last token."""
    sent = np.array(result["start_times"]) - min(result["start_times"])
    first, total = np.array(result["ttfts"]), np.array(result["latencies"])
    rows = np.arange(len(sent))
    fig, (left, right) = style.figure(9.5, 4.0, columns=2, width_ratios=[1.3, 1])
    left.barh(rows, first, left=sent, color=style.ORANGE, height=0.8)
    left.barh(rows, total - first, left=sent + first, color=style.SKY, height=0.8)
    left.axvline(sent.max(), color=style.BLACK, lw=1, ls=":")
    left.set_ylim(1.08 * len(rows), -1)
    left.text(sent.max(), 1.045 * len(rows), " last one sent", fontsize=9, va="center")
    left.grid(axis="y", visible=False)
    left.set(xlabel="seconds", ylabel="request",
             title=f"Waiting (orange), answering (blue): {total.max():.1f} s for the slowest")
    for values, label, color, line in ((first, "first token", style.ORANGE, "-"),
                                       (total, "whole answer", style.BLUE, "--")):
        right.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), line, color=color)
        style.label_line(right, np.median(values), 0.5, label, color)
    right.set(xlabel="seconds since it was sent", ylabel="share of requests", ylim=(0, 1.02),
              xlim=(0, total.max() * 1.25),
              title=f"Half wait over {np.median(first):.2g} s to begin")
    style.finish(fig, "06_requests", source)


def draw_throughput(table, source):
    """Delivered against offered rate, with the knee of each curve as a star on it."""
    curves, ends = curves_of(table), []
    fig, ax = style.figure(8.0, 4.4)
    place = rate_axis(ax, table.rate)
    finite = sorted(rate for rate in set(table.rate) if rate < INF)
    ax.plot(finite, finite, "--", color=style.GREY, lw=1)
    style.label_line(ax, finite[-1], finite[-1], "delivered = offered", style.GREY, ha="right",
                     xytext=(-12, 4))
    for (key, part), (color, marker) in zip(curves.items(), LOOKS):
        x, middle, low, high = series_of(part, "delivered_rps", place)
        ax.errorbar(x, middle, [middle - low, high - middle], marker=marker, color=color, capsize=3)
        knee = kept_up(part)[0]
        if knee:
            ax.plot(place[knee], middle[knee], "*", ms=17, color=color, mec=style.BLACK, zorder=5)
        most = np.median(capacities(part))
        ends.append((x[-1], middle.iloc[-1], f"{title_of(key, curves)}: {most:.3g}/s", color))
    knees = " and ".join(f"{kept_up(part)[0]:g}/s of {title_of(key, curves)}"
                         for key, part in list(curves.items())[:3])
    ax.set(ylabel="delivered, requests/s", title=f"It keeps up with {knees} (stars)")
    ax.set_yscale("log", base=2)
    ax.set_yticks(finite, [f"{rate:g}" for rate in finite])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.margins(x=0.22)
    style.label_ends(ax, ends)
    style.finish(fig, "06_throughput",
                 f"{source}; marker: median, bars: smallest and largest repeat")


def draw_latency(table, source):
    """TTFT over the rates with its floors, and TPOT on a linear axis."""
    curves = curves_of(table)
    fig, (left, right) = style.figure(9.5, 4.2, columns=2, width_ratios=(1.25, 1))
    for ax, kind in ((left, "ttft"), (right, "tpot")):
        place, ends = rate_axis(ax, table.rate), []
        for (key, part), (color, marker) in zip(curves.items(), LOOKS):
            x, median, _, _ = series_of(part, f"{kind}_p50_ms", place)
            worst = series_of(part, f"{kind}_p99_ms", place)[1]
            ax.fill_between(x, median, worst, color=color, alpha=0.15, lw=0)
            ax.plot(x, median, marker=marker, color=color)
            if kind == "ttft" and "ttft_queue_floor_ms" in part:
                least = series_of(part, "ttft_queue_floor_ms", place)[1]
                ax.plot(x, least, "--", color=color, lw=1.2)
                if key == next(iter(curves)):
                    style.label_line(ax, x[0], least.iloc[0], "floors, dashed", style.BLACK,
                                     xytext=(0, -9))
            ends.append((x[-1], median.iloc[-1], title_of(key, curves), color))
        ax.margins(x=0.2, y=0.1)
        if kind == "ttft":
            plain_log(ax)
        else:
            ax.set_ylim(bottom=0)
        style.label_ends(ax, ends)
    factor = (table.ttft_p50_ms / table.ttft_queue_floor_ms).groupby(table.rate).median() \
        if "ttft_queue_floor_ms" in table else None
    left.set(ylabel="milliseconds (log scale)",
             title="First token" + ("" if factor is None else
                                    f": {factor.min():.2g} to {factor.max():.2g} times its floor"))
    right.set(ylabel="milliseconds", title="Each further token")
    style.finish(fig, "06_latency", f"{source}; line: median, band: up to p99")


def draw_cost(table, slo, source):
    """What a million output tokens cost against the wait of the unluckiest hundredth.

    In dollars where every system has a price, else in hours of the machine.
    """
    curves, priced = curves_of(table), table.dollars_per_hour.notna().all()
    table = table.assign(cost=table.hours_per_million_output
                         * (table.dollars_per_hour if priced else 1.0))
    fig, ax = style.figure(8.0, 4.2)
    for (key, part), (color, marker) in zip(curves_of(table).items(), LOOKS):
        points = part.groupby("rate")[["ttft_p99_ms", "cost"]].median()
        ax.plot(points.ttft_p99_ms, points.cost, marker=marker, color=color)
        for rate, point in points.iterrows():
            text = "all at once" if rate == INF else f"{rate:g}/s"
            text += f" of {title_of(key, curves)}" * (rate == points.index[0])
            style.label_line(ax, *point, text, color, xytext=(6, 7))
    low, high = ax.get_ylim()
    ax.axvline(slo, color=style.BLACK, lw=1, ls=":")
    ax.text(slo, high, f" promised: {slo:g} ms", fontsize=9, va="top")
    ax.margins(x=0.14, y=0.14)
    plain_log(ax, "x")
    plain_log(ax)
    unit = "USD" if priced else "hours of the machine"
    ax.set(xlabel="p99 of the time to first token, ms (log scale)",
           ylabel=f"{unit} per million output tokens",
           title="The cheaper the token, the longer the unluckiest hundredth waits")
    style.finish(fig, "06_cost", source)
