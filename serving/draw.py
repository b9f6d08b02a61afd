"""The drawings of 05 and 06. Each takes axes and data; the page makes the figure and saves it."""

import numpy as np
from matplotlib.ticker import LogLocator

from serving.load import INF, kept_up

BLUE, ORANGE, SKY, GREEN, BLACK, GREY = "#0072B2", "#E69F00", "#56B4E9", "#009E73", "#222222", "#8A8A8A"
LOOKS = tuple(zip((BLUE, ORANGE, GREEN, "#D55E00", "#CC79A7", SKY), "osD^vP"))  # grey prints, too


def label(ax, x, y, text, color, **more):
    """Words beside a point, in its colour, instead of a legend."""
    given = {"va": "center", "fontsize": 9, "xytext": (6, 0), "textcoords": "offset points", **more}
    ax.annotate(text, (x, y), color=color, **given)


def memory(ax, plans, chip_bytes, share):
    """One bar per layout: weights, then the KV cache cut into requests of 16,384 tokens.

    Args:
      plans: {label: row of `limits.memory_plan`}.
      chip_bytes: memory of one chip.
      share: of it, what vLLM takes.
    """
    edge = chip_bytes / 2.0**30
    for place, plan in enumerate(plans.values()):
        weights, count = plan["weights, GiB/chip"], plan["requests of 16,384"] // plan["dp"]
        each = plan["one of 16,384, GiB/chip"]
        ax.barh(place, weights, color=GREY)
        ax.barh([place] * count, each, left=[weights + i * each for i in range(count)], color=SKY,
                edgecolor="white")
        text = f"{plan['dp']} × {count}" if plan["dp"] > 1 else str(count)
        ax.text(edge + 0.4, place, text, va="center", fontsize=10)
    ax.axvline(share * edge, color=BLACK, lw=1)
    ax.text(edge + 0.4, -0.62, "requests", va="bottom", fontsize=10, weight="bold")
    ax.set_yticks(range(len(plans)), list(plans))
    ax.set_ylim(len(plans) - 0.4, -1.1)
    ax.set(xlabel=f"GiB of one chip: weights (grey), requests (blue); line: {share:.0%} of it",
           xlim=(0, edge))
    ax.grid(axis="y", visible=False)


def timeline(ax, arrivals):
    """One streamed answer: when each piece came, in seconds since the request was sent."""
    ms = 1e3 * np.asarray(arrivals)
    gap = (ms[-1] - ms[0]) / max(len(ms) - 1, 1)
    ax.barh(0, ms[0], color=ORANGE, height=0.5)
    ax.barh(0, ms[-1] - ms[0], left=ms[0], color=SKY, height=0.5)
    ax.vlines(ms, -0.25, 0.25, color="white", lw=0.7)
    ax.text(0.004 * ms[-1], 0.36, f"TTFT: {ms[0]:.0f} ms", color=ORANGE, fontsize=10, weight="bold")
    ax.text(ms[-1], 0.36, f"TPOT: {gap:.1f} ms, {len(ms) - 1} times", color=BLUE, fontsize=10, ha="right",
            weight="bold")
    ax.set(yticks=[], ylim=(-0.35, 0.75), xlim=(0, 1.02 * ms[-1]),
           xlabel="milliseconds since the request was sent")
    ax.grid(axis="y", visible=False)


def requests(ax, result):
    """One measurement, request by request: sent, first token (orange until then), last token."""
    sent = np.array(result["start_times"]) - min(result["start_times"])
    first, total = np.array(result["ttfts"]), np.array(result["latencies"])
    rows = np.arange(len(sent))
    ax.barh(rows, first, left=sent, color=ORANGE, height=0.8)
    ax.barh(rows, total - first, left=sent + first, color=SKY, height=0.8)
    ax.axvline(sent.max(), color=BLACK, lw=1, ls=":")
    ax.text(sent.max(), 1.045 * len(rows), " last one sent", fontsize=9, va="center")
    ax.set(xlabel="seconds", ylabel="request", ylim=(1.08 * len(rows), -1))
    ax.grid(axis="y", visible=False)


def plain_log(ax, which="y"):
    """Make an axis ("x" or "y") logarithmic, with a few plain numbers; call it last."""
    getattr(ax, f"set_{which}scale")("log")
    axis, (low, high) = getattr(ax, f"{which}axis"), getattr(ax, f"get_{which}lim")()
    subs = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 7)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.minorticks_off()


def curves(ax, table, column, dashed, words):
    """A column over the offered rates, by regime: medians, range of the repeats, hollow beyond the knee.

    Args:
      dashed: the column of the line that it may reach, and no more.
      words: what the column is, with its unit.
    """
    finite = sorted({rate for rate in table.rate if rate < INF})
    place = {**{rate: rate for rate in finite}, INF: 1.5 * finite[-1]}
    for (regime, part), (color, marker) in _regimes(table):
        stats, knee = part.groupby("rate")[column].agg(["median", "min", "max"]), kept_up(part)[0]
        limit = part.groupby("rate")[dashed].median()
        x, line = stats.index.map(place), stats.index < INF  # all at once is no rate: it stands alone
        ax.plot(x[line], stats["median"][line], color=color)
        for some, fill in ((stats.index <= knee, color), (stats.index > knee, "white")):
            low, middle, high = (stats[name][some] for name in ("min", "median", "max"))
            ax.errorbar(x[some], middle, [middle - low, high - middle], fmt=marker, color=color, mfc=fill,
                        capsize=3, zorder=3)
        for some, look in ((line, "--"), (~line, "_")):
            ax.plot(x[some], limit[some], look, color=color, lw=1.2)
        label(ax, x[-1], stats["median"].iloc[-1], f"{regime[0]}/{regime[1]}", color, xytext=(9, 0))
    ax.set_xscale("log")
    ax.set_xticks(list(place.values()), [*(f"{rate:.3g}" for rate in finite), "all at\nonce"], fontsize=8)
    ax.xaxis.minorticks_off()
    ax.set(xlabel="offered rate, requests/s", ylabel=words)
    ax.margins(x=0.12)
    plain_log(ax)


def _regimes(table):
    return zip(table.groupby(["input_len", "output_len"]), LOOKS * 4)


def cost(ax, table, slo, unit="hours of the machine"):
    """What a million output tokens cost against the wait of the unluckiest tenth; the corner to aim at.

    Args:
      slo: the promised milliseconds to the first token.
      unit: "USD", or "hours of the machine" where it has no price.
    """
    column = "usd_per_million_output" if unit == "USD" else "hours_per_million_output"
    for (regime, part), (color, marker) in _regimes(table):
        points, knee = part.groupby("rate").median(numeric_only=True), kept_up(part)[0]
        ax.plot(points.ttft_p90_ms, points[column], color=color, lw=1)
        for rate, point in points.iterrows():
            ax.plot(point.ttft_p90_ms, point[column], marker, color=color,
                    mfc=color if rate <= knee else "white")
            text = "all at once" if rate == INF else f"{rate:.3g}/s"
            label(ax, point.ttft_p90_ms, point[column], text, color, xytext=(5, 7), fontsize=8)
        label(ax, *points.iloc[0][["ttft_p90_ms", column]], f"{regime[0]}/{regime[1]}", color, ha="right",
              xytext=(-8, 0))
    ax.axvline(slo, color=BLACK, lw=1, ls=":")
    ax.text(slo, 0.96, f" promised: {slo:g} ms", fontsize=9, transform=ax.get_xaxis_transform())
    ax.text(0.02, 0.03, "↙ better", fontsize=11, weight="bold", transform=ax.transAxes)
    ax.margins(x=0.2, y=0.14)
    plain_log(ax, "x")
    plain_log(ax)
    ax.set(xlabel="p90 of the time to first token, ms (log scale)", ylabel=f"{unit} per million output tokens")
