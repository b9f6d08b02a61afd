"""The charts of 05 to 07: what a server holds, how fast it is, what its answers are worth."""

import math
import re

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from helpers import style
from verilog import judge, waves
from serving.bench import REGIME, kept_up, short

INF = math.inf
LOOKS = list(zip(style.CYCLE, "osD^vP", strict=True)) * 4  # colour and marker: grey prints, too


# -- 05: memory ------------------------------------------------------------------------------------

def draw_memory(plans, chip_bytes, share):
    """One bar per layout: weights, then the KV cache cut into requests of 16,384 tokens.

    Args:
      plans: rows of 05's `memory_plan`.
      chip_bytes: memory of one chip.
      share: of it, what vLLM takes.
    """
    gib = 2.0**30
    fig, ax = style.figure(10, 1.2 + 0.5 * len(plans))
    labels, edge = [], chip_bytes / gib
    for place, plan in enumerate(plans):
        grey, each = plan["weights, GiB/chip"], plan["one of 16,384, GiB/chip"]
        count = plan["requests of 16,384"] // plan["dp"]
        ax.barh(place, grey, color=style.GREY)
        ax.barh([place] * count, each, left=[grey + i * each for i in range(count)],
                color=style.SKY, edgecolor="white", linewidth=0.8 if count < 60 else 0.3)
        label = f"{plan['dp']} × {count}" if plan["dp"] > 1 else str(count)
        ax.text(edge + 0.4, place, label, va="center", fontsize=10)
        kept = ", window" if plan["sliding layers keep"] == "their window" else ""
        number = "fp8" if plan["bytes per KV number"] == 1 else "bfloat16"
        small = ", fp8 weights" if plan["weights"] == "fp8" else ""
        labels.append(f"{place + 1}. tp {plan['tp']}, dp {plan['dp']}, {number} cache{kept}{small}")
    ax.axvline(share * edge, color=style.BLACK, lw=1)
    ax.text(edge + 0.4, -0.62, "requests", va="bottom", fontsize=10, weight="bold")
    ax.set_yticks(range(len(plans)), labels)
    ax.set_ylim(len(plans) - 0.4, -1.1)
    real = [plan for plan in plans if plan["sliding layers keep"] == "everything"]
    least, most = (pick(plan["requests of 16,384"] for plan in real) for pick in (min, max))
    ax.set(title=f"The same eight chips hold {least} to {most} requests of 16,384 tokens",
           xlabel=f"GiB of one v6e chip: weights (grey), requests (blue); line: {share:.0%} of it",
           xlim=(0, edge))
    ax.grid(axis="y", visible=False)
    style.finish(fig, "05_memory", "arithmetic from config.json and the v6e data sheet")


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


def draw_curve(ax, points, knee, color, marker):
    """One curve over the rates: a line through the finite ones, hollow markers beyond the knee.

    A burst is no rate, so its marker stands alone.

    Args:
      ax: the axes.
      points: by rate, `x` and `y`; `x_low`, `x_high`, `y_low`, `y_high` if they have a spread.
      knee: the last rate that was kept up with.
      color, marker: its look.
    """
    line = points[points.index < INF]
    ax.plot(line.x, line.y, color=color)
    calm = points.index <= knee
    for some, fill in ((points[calm], color), (points[~calm], "white")):
        bars = {f"{d}err": [some[d] - some[f"{d}_low"], some[f"{d}_high"] - some[d]]
                for d in "xy" if f"{d}_low" in points}
        ax.errorbar(some.x, some.y, fmt=marker, color=color, mfc=fill, capsize=3, zorder=3, **bars)


def spread_of(part, column, along):
    """Median, smallest and largest of a column over the repeats of each rate, named for `along`."""
    stats = part.groupby("rate")[column].agg(["median", "min", "max"])
    return stats.set_axis([along, f"{along}_low", f"{along}_high"], axis=1)


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
    ax.text(ms[-1], 0.36, f"then one every {gap:.1f} ms on average", color=style.BLUE, fontsize=9,
            ha="right")
    ax.set(yticks=[], ylim=(-0.35, 0.75), xlim=(0, 1.02 * ms[-1]),
           xlabel="milliseconds since the request was sent",
           title=f"{tokens[0]} tokens in, {tokens[1]} out: {ms[-1]:.0f} ms, "
                 f"{ms[0] / ms[-1]:.0%} of it before the first token")
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
        points = spread_of(part, "delivered_rps", "y")
        points["x"] = points.index.map(place)
        knee = kept_up(part)[0]
        draw_curve(ax, points, knee, color, marker)
        if knee:
            ax.plot(*points.loc[knee, ["x", "y"]], "*", ms=17, color=color, mec=style.BLACK,
                    zorder=5)
        ends.append((*points.iloc[-1][["x", "y"]], title_of(key, curves), color))
    knees = " and ".join(f"{short(kept_up(part)[0]) if kept_up(part)[0] else 'none of these rates'}"
                         + "/s" * bool(kept_up(part)[0]) + f" of {title_of(key, curves)}"
                         for key, part in list(curves.items())[:3])
    ax.set(ylabel="delivered, requests/s", title=f"It keeps up with {knees} (stars)")
    ax.set_yscale("log", base=2)
    ax.set_yticks(finite, [f"{rate:g}" for rate in finite])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.margins(x=0.22)
    style.label_ends(ax, ends)
    style.finish(fig, "06_throughput",
                 f"{source}; median, bars: smallest and largest repeat; hollow: beyond the knee")


def draw_latency(table, source):
    """TTFT over the rates with its floors, and TPOT on a linear axis."""
    curves = curves_of(table)
    fig, (left, right) = style.figure(9.5, 4.2, columns=2, width_ratios=(1.25, 1))
    for ax, kind in ((left, "ttft"), (right, "tpot")):
        place, ends = rate_axis(ax, table.rate), []
        for (key, part), (color, marker) in zip(curves.items(), LOOKS):
            points = part.groupby("rate").median(numeric_only=True)
            points = points.assign(x=points.index.map(place), y=points[f"{kind}_p50_ms"])
            draw_curve(ax, points, kept_up(part)[0], color, marker)
            line = points[points.index < INF]
            ax.fill_between(line.x, line.y, line[f"{kind}_p90_ms"], color=color, alpha=0.15, lw=0)
            if kind == "ttft" and "ttft_queue_floor_ms" in part:
                ax.plot(line.x, line.ttft_queue_floor_ms, "--", color=color, lw=1.2)
                burst = points[points.index == INF]
                ax.plot(burst.x, burst.ttft_queue_floor_ms, "_", color=color, ms=12)
                if key == next(iter(curves)):
                    style.label_line(ax, line.x.iloc[0], line.ttft_queue_floor_ms.iloc[0],
                                     "floors, dashed", style.BLACK, xytext=(0, -9))
            ends.append((*points.iloc[-1][["x", "y"]], title_of(key, curves), color))
        ax.margins(x=0.2, y=0.1)
        if kind == "ttft":
            plain_log(ax)
        else:
            ax.set_ylim(bottom=0)
        style.label_ends(ax, ends)
    points = table.groupby([*REGIME, "rate"]).median(numeric_only=True)  # as 06's table beside it
    factor = points.ttft_p50_ms / points.ttft_queue_floor_ms \
        if "ttft_queue_floor_ms" in points else None
    left.set(ylabel="milliseconds (log scale)",
             title="First token" + ("" if factor is None else
                                    f": {short(factor.min())} to {short(factor.max())} times its "
                                    "floor"))
    between = points.tpot_p50_ms
    right.set(ylabel="milliseconds",
              title=f"Each further token: {between.min():.2g} to {between.max():.2g} ms")
    style.finish(fig, "06_latency", f"{source}; line: median, band: up to p90; hollow: beyond "
                 "the knee")


def draw_cost(table, slo, source):
    """What a million output tokens cost against the wait of the unluckiest tenth.

    In dollars where every system has a price, else in hours of the machine.
    """
    curves, priced = curves_of(table), table.dollars_per_hour.notna().all()
    table = table.assign(cost=table.hours_per_million_output
                         * (table.dollars_per_hour if priced else 1.0))
    fig, ax = style.figure(8.0, 4.2)
    for place, ((key, part), (color, marker)) in enumerate(zip(curves_of(table).items(), LOOKS)):
        points = spread_of(part, "ttft_p90_ms", "x").assign(y=part.groupby("rate").cost.median())
        draw_curve(ax, points, kept_up(part)[0], color, marker)
        for rate, point in points.iterrows():
            text = "all at once" if rate == INF else f"{rate:g}/s"
            if rate == points.index[0]:
                text += f" of {title_of(key, curves)}"
            below = {"xytext": (-4, -13), "ha": "right"}
            style.label_line(ax, point.x, point.y, text, color,
                             **({"xytext": (6, 9)} if place % 2 else below))
    ax.axvline(slo, color=style.BLACK, lw=1, ls=":")
    ax.text(slo, 0.96, f" promised: {slo:g} ms", fontsize=9, transform=ax.get_xaxis_transform())
    ax.margins(x=0.2, y=0.14)
    plain_log(ax, "x")
    plain_log(ax)
    unit = "USD" if priced else "hours of the machine"
    ax.set(xlabel="p90 of the time to first token, ms (log scale)",
           ylabel=f"{unit} per million output tokens",
           title="A full machine makes cheap tokens, and queues")
    style.finish(fig, "06_cost", f"{source}; bars: smallest and largest repeat; hollow: beyond the "
                 "knee")


# -- 07: scores, answers, one failure --------------------------------------------------------------

COLOURS = dict(zip(judge.CATEGORIES, (style.GREEN, style.ORANGE, style.YELLOW, style.SKY,
                                      style.BLUE, style.PURPLE, style.BLACK, "#BBBBBB")))


def draw_scores(scored, result, ceiling, source):
    """Left: scores with 95 % intervals. Right: a paired comparison, one bar per problem.

    Args:
      scored: {label: {k: (mean, low, high)}}, the best one last.
      result: of `stats.compare`; its second model is the last of `scored`, its first the one
        before.
      ceiling: share of problems that can be won.
      source: the figure's source line.
    """
    fig, (left, right) = style.figure(9.5, 3.6, columns=2, width_ratios=(1, 1.15))
    colours = (style.GREY, style.ORANGE, style.BLUE)[-len(scored):]
    ks = list(next(iter(scored.values())))
    for shift, (label, each), colour in zip((-0.26, 0, 0.26)[-len(scored):], scored.items(),
                                            colours):
        for place, k in enumerate(ks):
            mean, low, high = each[k]
            left.errorbar(place + shift, mean, [[mean - low], [high - mean]], fmt="o", capsize=4,
                          color=colour, label=label if place == 0 else None)
            left.text(place + shift + 0.03, mean, f"{mean:.2f}", va="center", fontsize=9,
                      color=colour)
    left.axhline(ceiling, color=style.RED, linestyle="--", linewidth=1)
    left.text(-0.55, ceiling - 0.015, f"ceiling {ceiling:.2f}", color=style.RED, va="top",
              fontsize=9)
    left.set_xticks(range(len(ks)), [f"pass@{k}" for k in ks])
    names = list(scored)
    at_best = max(each[ks[0]][0] for each in list(scored.values())[:-1])
    left.set(ylabel="share of problems", xlim=(-0.6, len(ks) - 0.35), ylim=(-0.03, 1.25),
             yticks=np.linspace(0, 1, 6), title=f"{names[-1].capitalize()} "
             f"{scored[names[-1]][ks[0]][0]:.2f}, untuned at best {at_best:.2f} (pass@{ks[0]})")
    left.legend(loc="upper left", ncols=len(scored), fontsize=8, columnspacing=1,
                handletextpad=0.2)
    values = sorted(np.subtract(result["values"][1], result["values"][0]))
    better, worse = sum(value > 0 for value in values), sum(value < 0 for value in values)
    right.bar(range(len(values)), values,
              color=[style.BLUE if value > 0 else style.RED for value in values])
    mean, low, high = result["difference"]
    right.axhspan(low, high, color=style.SKY, alpha=0.35, linewidth=0)
    right.axhline(mean, color=style.BLACK, linewidth=1)
    right.text(0.02, 0.9, f"mean {mean:+.2f} [{low:+.2f}, {high:+.2f}]", fontsize=9,
               transform=right.transAxes)
    right.set(title=f"{better} problems better, {worse} worse, "
                    f"{len(values) - better - worse} level",
              xlabel="problems, sorted", xticks=[], ylabel=f"{names[-1]} minus {names[-2]}",
              ylim=(-1.05, 1.1))
    style.finish(fig, "07_scores", source + ". Bars and band: 95 %")


def draw_answers(panels, source):
    """A heat map: problems across, answers down, one panel per model.

    Args:
      panels: {title: frame of `evaluation.judge_answers`, of one plan}; problems are sorted by how
        many answers of the first panel pass.
      source: the figure's source line.
    """
    fig, axes = style.figure(9.5, 1.1 + 1.35 * len(panels), rows=len(panels), sharex=True,
                             squeeze=False)
    passed = [frame.groupby("problem").passed.sum() for frame in panels.values()]
    order = sorted(passed[0].index, key=lambda name: (*(-each[name] for each in passed), name))
    for ax, (title, frame) in zip(axes[:, 0], panels.items()):
        grid = frame.pivot(index="index", columns="problem", values="category")[order]
        ax.pcolormesh(grid.map(judge.CATEGORIES.index).to_numpy(), edgecolors="white",
                      linewidth=0.6 if len(order) <= 60 else 0.2, vmin=-0.5, vmax=7.5,
                      cmap=ListedColormap(list(COLOURS.values())))
        ax.set(title=f"{title}: {frame.passed.sum()} of {len(frame)} answers pass",
               ylabel="answer", yticks=[])
        ax.grid(False)
    seen = set().union(*(frame.category for frame in panels.values()))
    handles = [axes[0, 0].plot([], [], "s", color=COLOURS[c], label=c)[0] for c in COLOURS
               if c in seen]
    fig.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9)
    if len(order) <= 60:  # more names would be too small to read
        axes[-1, 0].set_xticks(np.arange(len(order)) + 0.5,
                               [name.split("_", 1)[1] for name in order], rotation=90, fontsize=8)
    else:
        axes[-1, 0].set(xticks=[], xlabel="problems, sorted")
    style.finish(fig, "07_answers", source)


def draw_failure(path, log, name, source):
    """The waveforms around the first mismatch; says so where the answer never ran.

    Args:
      path: the VCD file that the testbench left, or would have.
      log: what the simulator printed.
    """
    if not path.exists():
        print("this answer never ran, so there is no waveform")
        return
    changes = waves.read_vcd(path)
    told = [int(at) for at in re.findall(r"First mismatch occurred at time (\d+)", log)]
    seen = [at for at, value in changes.get("tb_mismatch", []) if value == "1"]
    first = min(told or seen or [0])
    fig, ax = style.figure(9, 0.9 + 0.36 * min(13, len(changes)))
    waves.draw_waves(ax, changes, first)
    ax.set_title(f"{name}: first mismatch counted at {first} ps")
    style.finish(fig, "07_waveform",
                 source + "; dashed: the testbench's first mismatch; buses in hexadecimal")
