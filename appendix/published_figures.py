"""Figures of notebook 10: the published sweep, its floors, the headline, scores and cost.

Each function makes one figure and writes it below RUN_DIR by `helpers.style.finish`.
"""

import numpy as np

from helpers import style


def sweep(ttft, longest, longest_name):
    """The published sweep beside its floors; the panel of `longest` tokens gets its own name.

    Args:
      ttft: a frame with tokens, device, qps, value and floor_ms (milliseconds), impossible.
    """
    fig, axes = style.figure(9, 6.0, rows=2, columns=3, sharex=True, sharey=True)
    for ax, (tokens, group) in zip(axes.flat, ttft.groupby("tokens"), strict=True):
        for side, color, marker, aside in (("tpu", style.BLUE, "o", 0.93),
                                           ("gpu", style.ORANGE, "s", 1.07)):
            points = group[group.device == side].assign(x=lambda part: part.qps * aside)
            ax.fill_between(points.x, 2, points.floor_ms, color=color, alpha=0.15, linewidth=0)
            ax.plot(points.x, points.value, color=color, linewidth=0.8)
            for wrong, face in ((False, color), (True, "white")):
                part = points[points.impossible == wrong]
                ax.plot(part.x, part.value, marker, color=color, markersize=5.5,
                        markerfacecolor=face)
        name = longest_name if tokens == longest else f"{tokens:,} tokens in"
        ax.set_title(name, fontsize=10, fontweight="normal")
        ax.set(xscale="log", yscale="log", xticks=[1, 2, 4, 8, 16, 32, 64], ylim=(2, 20_000))
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.set_xticklabels([1, 2, 4, 8, 16, 32, 64])
        ax.minorticks_off()
    for ax in axes[:, 0]:
        ax.set_ylabel("median TTFT, ms")
    axes[1, 1].set_xlabel("offered requests per second")
    looks = [axes[0, 0].plot([], [], marker, color=color, markerfacecolor=face)[0]
             for marker, color, face in (("o-", style.BLUE, style.BLUE), ("o", style.BLUE, "white"),
                                         ("s-", style.ORANGE, style.ORANGE))]
    shade = axes[0, 0].fill_between([], [], [], color=style.GREY, alpha=0.3, linewidth=0)
    axes[0, 0].legend([*looks, shade], ["TPU v6e-8", "open: clearly too fast", "2 x H100",
                                        "shaded: below the floor"], fontsize=9, loc="upper left")
    fig.suptitle(f"{ttft.impossible.sum()} of {len(ttft)} points are too fast for the work on "
                 "their label", fontsize=11, fontweight="bold", x=0.01, ha="left")
    style.finish(fig, "10_sweep", "digitised from the authors' PDF, p. 15 (h2loop/gemma-tpu "
                 "745cbdf); floors computed, 100 % of peak")


def queue(ttft, longest):
    """The share of a machine's peak that one constant prefill time implies, at every rate."""
    fig, axes = style.figure(9, 4.2, columns=2, sharey=True)
    for ax, side, title in zip(axes, ("tpu", "gpu"), ("TPU v6e-8", "2 x H100"), strict=True):
        series = ttft[ttft.device == side].groupby("tokens")
        lowest = 0.0
        for (tokens, points), color in sorted(zip(series, style.CYCLE, strict=True),
                                              key=lambda item: item[0][1].utilisation.iloc[-1]):
            use = 100 * points.utilisation
            ax.plot(points.qps, use, "o-", color=color, markersize=4, linewidth=1.2)
            lowest = max(1.35 * lowest, use.iloc[-1])  # labels must not overlap
            name = "16k in" if tokens == longest else f"{tokens:,} in"
            style.label_line(ax, 64, lowest, name, color)
        ax.axhspan(100, 1e5, color=style.GREY, alpha=0.2, linewidth=0)
        ax.text(1, 1300, "more than the hardware can do", fontsize=9, color=style.BLACK)
        ax.set_title(title, fontsize=10, fontweight="normal")
        ax.set(xscale="log", yscale="log", ylim=(3, 2500), xlim=(0.9, 130),
               xticks=[1, 2, 4, 8, 16, 32, 64], xlabel="offered requests per second")
        ax.set_xticklabels([1, 2, 4, 8, 16, 32, 64])
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.minorticks_off()
    axes[0].set_ylabel("implied use of peak, %")
    fig.suptitle("From 4/s on three cold series use a constant share of peak; the others speed up",
                 fontsize=11, fontweight="bold", x=0.01, ha="left")
    style.finish(fig, "10_queue", "digitised sweep; queueing model of 10, section 6")


def headline(parts, claimed):
    """A claimed ratio as the product of its {name: factor}; in the first one both are cold."""
    fig, ax = style.figure(height=2.4)
    left = 1.0
    for row, (name, part) in enumerate(parts.items()):
        ax.barh(row, left * part - left, left=left, color=(style.BLUE, style.GREY, style.GREY)[row])
        left *= part
        total = f", together {left:.1f}" * bool(row)
        ax.text(left * 1.05, row, f"{part:.2f} times{total}", va="center", fontsize=10)
    ax.set(xscale="log", yticks=range(3), yticklabels=list(parts), xlim=(1, 110), ylim=(2.6, -0.6),
           xticks=[1, 2, 5, 10, 20], xlabel="median TTFT at 4,096 tokens, GPU / TPU",
           title=f"With both cold, {claimed} becomes {next(iter(parts.values())):.1f}x")
    ax.set_xticklabels([1, 2, 5, 10, 20])
    ax.minorticks_off()
    ax.grid(axis="y", visible=False)
    style.finish(fig, "10_headline", "published table (arXiv S8.1) and digitised sweep")


def histogram(six, five):
    """Problems by samples that pass: {model: six counts}, and what five bins made of them."""
    fig, ax = style.figure(height=2.9)
    for (name, bars), offset, color in zip(six.items(), (-0.2, 0.2), (style.BLUE, style.ORANGE),
                                           strict=True):
        ax.bar(np.arange(6) + offset, bars, 0.38, color=color, label=name)
        for x, height in enumerate(bars):
            ax.text(x + offset, height + 1, height, ha="center", fontsize=9)
    never, drawn = [bars[0] for bars in six.values()], [bars[0] for bars in five.values()]
    ax.set(xlabel="samples of five that pass", ylabel="problems",
           title=f"{never[0]} and {never[1]} problems are never solved; five bars show "
           f"{drawn[0]} and {drawn[1]}")
    ax.grid(axis="x", visible=False)
    ax.legend()
    style.finish(fig, "10_histogram", "digitised from the authors' PDF, p. 11: 156 problems, n = 5")


def cost(total_cost, claim, alone):
    """Cost ratio over the hours of serving.

    Args:
      total_cost: (side, hours) -> dollars of training and so many hours of serving.
      claim: the ratio that was published for a day.
      alone: the ratio of serving without training.
    """
    served = np.linspace(0, 48, 200)
    ratio = total_cost("gpu", served) / total_cost("tpu", served)
    day = total_cost("gpu", 24) / total_cost("tpu", 24)
    fig, ax = style.figure(height=3.2)
    ax.plot(served, ratio, color=style.BLUE)
    for point in (1, 8, 24):
        height = total_cost("gpu", point) / total_cost("tpu", point)
        ax.plot(point, height, "o", color=style.BLUE)
        style.label_line(ax, point, height, f"{point} h: {height:.2f}", style.BLUE, xytext=(7, 6))
    ax.plot(24, claim, "x", color=style.RED, markersize=10, markeredgewidth=2)
    style.label_line(ax, 24, claim, f"claimed for a day: {claim}", style.RED, xytext=(10, 0))
    ax.axhline(alone, color=style.GREY, linestyle=":", linewidth=1.2)
    style.label_line(ax, 30, alone, "serving alone", style.GREY, xytext=(0, -9))
    ax.set(xlabel="hours of serving after one training run", ylabel="cost, GPU / TPU",
           ylim=(0.85, 2.3), title=f"{claim} times cheaper is training and an hour of serving; "
           f"with a day, {day:.2f}")
    style.finish(fig, "10_cost", "published rates (arXiv S9), recomputed")
