"""The charts of 07: what answers are worth."""

import re

import numpy as np
from matplotlib.colors import ListedColormap

from helpers import style
from verilog import judge, waves

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
