"""Drawings of scores, answers and waveforms, on axes that the caller made."""

import re
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap

from verilog.judging import CATEGORIES

BLUE, SKY, GREEN, ORANGE, RED = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00"
COLOURS = dict(zip(CATEGORIES, (GREEN, ORANGE, "#F0E442", SKY, BLUE, "#CC79A7", "#222222",
                                "#BBBBBB"), strict=True))


def read_vcd(path, limit=4 << 20):
    """Read a waveform file: {signal: [(time, value as a string of 0 1 x z, one per bit), ...]}.

    Of several values at one time only the last, the settled one, is kept.
    """
    text = Path(path).read_text(errors="replace")[:limit]
    signals, changes, now = {}, {}, 0
    head, _, body = text.partition("$enddefinitions")
    for width, key, name in re.findall(r"\$var \w+ +(\d+) +(\S+) +(\S+)[^$]*\$end", head):
        signals.setdefault(key, (name, int(width)))
    for line in body.splitlines():
        if line.startswith("#"):
            now = int(line[1:])
            continue
        value, _, key = line[1:].partition(" ") if line[:1] in "bB" else (line[:1], "", line[1:])
        if key in signals and set(value) <= set("01xzXZ"):
            name, width = signals[key]
            value = value.lower().rjust(width, value[0].lower() if value[0] in "xzXZ" else "0")
            events = changes.setdefault(name, [])
            if events and events[-1][0] == now:
                events.pop()
            if not events or events[-1][1] != value:
                events.append((now, value))
    return changes


def draw_waves(ax, changes, at, before=60, after=40):
    """Draw signals around time `at`: one lane each, buses with their values in hexadecimal."""
    start, end = max(0, at - before), at + after
    lanes = [name for name in changes if name != "tb_mismatch"][:12]
    lanes += ["tb_mismatch"] * ("tb_mismatch" in changes)
    for lane, name in enumerate(reversed(lanes)):
        events = [event for event in changes[name] if event[0] <= end]
        for (time_, value), (until, _) in zip(events, [*events[1:], (end, "")], strict=True):
            left, right = max(time_, start), min(until, end)
            known = set(value) <= {"0", "1"}
            if right <= left:
                continue
            if len(value) == 1 and known:
                level = lane + 0.6 * int(value)
                ax.plot([left, right], [level, level], color=BLUE, linewidth=1.5)
                if left > start:
                    ax.plot([left, left], [lane, lane + 0.6], color=BLUE, linewidth=0.8)
                continue
            ax.fill_between([left, right], lane, lane + 0.6, linewidth=0,
                            color=SKY if known else "#DDDDDD")
            ax.plot([left, left], [lane, lane + 0.6], color="white", linewidth=2.5)
            shown = f"{int(value, 2):x}" if known else value[:4]
            if right - left >= 0.015 * len(shown) * (end - start):
                ax.text((left + right) / 2, lane + 0.28, shown, ha="center", va="center",
                        fontsize=8)
    ax.axvline(at, color=RED, linestyle="--", linewidth=1)
    ax.set_yticks([lane + 0.3 for lane in range(len(lanes))], list(reversed(lanes)))
    ax.set(xlabel="simulation time (ps)", xlim=(start, end), ylim=(-0.3, len(lanes)))
    ax.grid(False)


def first_mismatch(changes, log):
    """The time at which a testbench first counted a mismatch, by its log, else by its signal."""
    told = [int(at) for at in re.findall(r"First mismatch occurred at time (\d+)", log)]
    seen = [at for at, value in changes.get("tb_mismatch", []) if value == "1"]
    return min(told or seen or [0])


def draw_scores(ax, scored, ceiling):
    """Scores with 95 % intervals, the best model last.

    Args:
      ax: the axes.
      scored: {label: (mean, low, high)}.
      ceiling: share of problems that can be won.
    """
    colours = ["#999999"] * (len(scored) - 2) + [ORANGE, BLUE]
    for place, ((mean, low, high), colour) in enumerate(zip(scored.values(), colours)):
        ax.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", capsize=4,
                    color=colour)
        ax.text(mean, place + 0.15, f"{mean:.2f}", ha="center", fontsize=9, color=colour)
    ax.axvline(ceiling, color=RED, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(scored)), list(scored))
    ax.set(xlabel="pass@1, share of problems", xlim=(-0.03, 1.05), ylim=(-0.5, len(scored) - 0.4))


def draw_differences(ax, result):
    """One bar per problem of a paired comparison (`scores.compare`)."""
    values = np.subtract(result["values"][1], result["values"][0])
    order = np.argsort(values, kind="stable")
    ax.bar(range(len(values)), values[order],
           color=[BLUE if value > 0 else RED for value in values[order]])
    mean, low, high = result["difference"]
    ax.axhspan(low, high, color=SKY, alpha=0.35, linewidth=0)
    ax.axhline(mean, color="#222222", linewidth=1)
    ax.set(title=f"mean {mean:+.2f} [{low:+.2f}, {high:+.2f}]", xlabel="problems, sorted",
           xticks=[], ylim=(-1.05, 1.05))


def draw_answers(axes, panels):
    """A heat map per panel: problems across, answers down.

    Args:
      axes: one for each panel, sharing x.
      panels: {title: frame with problem, index, category, passed, of one plan}; problems are sorted
        by how many answers of the first panel pass.
    """
    passed = [frame.groupby("problem").passed.sum() for frame in panels.values()]
    order = sorted(passed[0].index, key=lambda name: (*(-each[name] for each in passed), name))
    for ax, (title, frame) in zip(axes, panels.items()):
        grid = frame.pivot(index="index", columns="problem", values="category")[order]
        ax.pcolormesh(grid.map(CATEGORIES.index).to_numpy(), edgecolors="white",
                      linewidth=0.6 if len(order) <= 60 else 0.2, vmin=-0.5, vmax=7.5,
                      cmap=ListedColormap(list(COLOURS.values())))
        ax.set(title=f"{title}: {frame.passed.sum()} of {len(frame)} answers pass",
               ylabel="answer", yticks=[])
        ax.grid(False)
    seen = set().union(*(frame.category for frame in panels.values()))
    handles = [axes[0].plot([], [], "s", color=COLOURS[c], label=c)[0] for c in COLOURS
               if c in seen]
    axes[0].figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9)
    if len(order) <= 60:  # more names would be too small to read
        axes[-1].set_xticks(np.arange(len(order)) + 0.5,
                            [name.split("_", 1)[-1] for name in order], rotation=90, fontsize=8)
    else:
        axes[-1].set(xticks=[], xlabel="problems, sorted")
