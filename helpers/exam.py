"""What 07 needs beside `verilog`: is the right model asked, how is a prompt written; its figures.

The figures show every answer of both models, their scores, and problem by problem who wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from helpers import chat, records, run, style
from helpers.chat import Message
from helpers.run import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Interval = tuple[float, float, float]  # mean, low, high
COLORS = {"base": style.GRAY, "tuned": style.BLUE}
FAILS = "#FBE3C0"  # a pale orange


# ── Before anything is asked ──


def check_model(merged: Path, merge: records.Merge, meta: records.DataMeta) -> None:
    """Is `merged` what 04 wrote, and will it be asked the way it was trained?

    Raises:
      UserError: it isn't, or 02's settings have changed since.
    """
    changed_files = run.changed(merged, merge.files)
    if changed_files:
        raise UserError(f"{merged} is not what 04 wrote ({changed_files}): run 04_merge and 05.")
    changed_settings = merge.recipe.asked_otherwise(meta)
    if changed_settings:
        raise UserError(f"02 changed {changed_settings} after 03: run 03, 04 and 05 again.")


def warn_of_other_exam(compared: str, asked: str) -> None:
    """Say so if 02 kept another exam out of the training rows than the one that's asked.

    Args:
      compared, asked: folders or files of problems; "": none.
    """
    if compared == asked:
        return
    other = compared or "no exam"
    print(f"02 compared its prompts with {other}, not with {asked}. Set 02's "
          "evaluation to this exam, or you won't know whether it leaked.")


class Renderers(NamedTuple):
    """How prompts become token ids, as `asking.all_prompts` takes it."""

    chat: Callable[[list[Message], bool], list[int]]  # (messages, whether the model may think)
    text: Callable[[str], list[int]]                  # plain text, with the token that begins it


def renderers(tokenizer: Any, thinking: bool) -> Renderers:
    """Chats as the training rows were rendered, and plain text.

    Args:
      tokenizer: from `chat.load_tokenizer`.
      thinking: whether the training rows had thoughts; then every chat may have one.
    """
    def chat_ids(messages: list[Message], may_think: bool) -> list[int]:
        return chat.prompt_ids(tokenizer, messages, may_think or thinking)

    def text_ids(text: str) -> list[int]:
        [ids] = chat.encode_texts(tokenizer, [text])
        return [tokenizer.bos_token_id, *ids]

    return Renderers(chat_ids, text_ids)


def numbered(code: str) -> str:
    """A text with a number before each line."""
    lines = []
    for number, line in enumerate(code.splitlines(), 1):
        lines.append(f"{number:2}  {line}")
    return "\n".join(lines)


# ── Figures ──


class Strip(NamedTuple):
    """Answers of one model, asked in one way."""

    model: str           # "base" or "tuned"
    asked: str           # for the title: how
    answers: pd.DataFrame  # `problem`, `index` and `passed`, one answer a row


class Scored(NamedTuple):
    """A score of one model, asked in one way."""

    model: str           # "base" or "tuned"
    asked: str           # how
    interval: Interval   # shares
    greedy: bool = False


def draw_answers(strips: Sequence[Strip], name: str, source: str) -> None:
    """A square for each answer: a strip for each model and wording, a column for each problem.

    Args:
      strips: their columns are in the order of the first one's scores.
      name, source: as in `style.finish`.
    """
    by_problem = strips[0].answers.groupby("problem")
    scores = by_problem.passed.sum()
    best_first = scores.sort_values(ascending=False)
    order = list(best_first.index)

    count = len(strips)
    height = 0.5 + 1.15 * count
    fig, axes = style.figure(7, height, rows=count, sharex=True, squeeze=False)
    for ax, strip in zip(axes.flat, strips, strict=True):
        _draw_strip(ax, strip, order)
    lowest = axes.flat[-1]
    lowest.set_xlabel("columns: problems, the first strip's best ones first; rows: tries; "
                      "pale squares fail")
    style.finish(fig, name, source)


def _draw_strip(ax: Axes, strip: Strip, order: Sequence[str]) -> None:
    """One strip, its problems in this order."""
    from matplotlib.colors import ListedColormap
    answers = strip.answers
    grid = answers.pivot(index="index", columns="problem", values="passed")
    grid = grid.astype(float)[order]
    passes = COLORS[strip.model]
    ax.pcolormesh(
        grid,
        vmin=0,
        vmax=1,
        cmap=ListedColormap([FAILS, passes]),
        edgecolors="white",
        linewidth=0.6,
    )
    model = strip.model.capitalize()
    passed = answers.passed.sum()
    count = f"{passed} of {len(answers)} answers pass"
    ax.set(title=f"{model} ({strip.asked}): {count}", xticks=[], yticks=[])


def draw_board(
    pairs: Mapping[Any, Mapping[str, Any]],
    primary: Any,
    ceiling: float,
    name: str,
    source: str,
) -> None:
    """All scores in one picture, and the primary comparison problem by problem.

    Args:
      pairs: {(plan of the base, plan of the tuned): from `verilog.compare`}. If both plans are the
        same greedy one, its dots are hollow.
      primary: one of their keys.
      ceiling: the share that can be won.
      name, source: as in `style.finish`.
    """
    best = pairs[primary]
    sampled = []
    greedy = []
    for (base_plan, tuned_plan), compared in pairs.items():
        is_greedy = "greedy" in base_plan
        base = Scored("base", base_plan, compared["first"], is_greedy)
        if is_greedy:
            tuned = Scored("tuned", tuned_plan, compared["second"], is_greedy)
            greedy += [base, tuned]
        else:
            sampled.append(base)
    sampled.sort(key=lambda scored: scored.interval[0], reverse=True)
    base_plan, tuned_plan = primary
    tuned = Scored("tuned", tuned_plan, best["second"])
    rival = Scored("base", base_plan, best["first"])
    others = [scored for scored in sampled if scored.asked != base_plan]
    scores = [tuned, rival, *others, *greedy]

    height = 3.4 + 0.4 * len(scores)
    fig, axes = style.figure(7, height, rows=2, height_ratios=(1.4, 1))
    above, below = axes
    draw_scores(above, scores, ceiling)
    base_share, _, _ = best["first"]
    tuned_share, _, _ = best["second"]
    how = "asked well"
    if sampled[0].asked == base_plan:
        how = "asked its best way"
    above.set_title(f"Tuned {tuned_share:.0%}, the base {how} {base_share:.0%}")
    draw_differences(below, best, base_plan, tuned_plan)
    style.finish(fig, name, f"{source}. Bars and dotted lines: 95%; wordings: section 5")


def draw_scores(ax: Axes, scores: Sequence[Scored], ceiling: float) -> None:
    """A dot with its interval for each score, in percent; the first two are compared, so bold.

    Args:
      ax: where to draw.
      scores: from the top; filled dots were sampled, hollow ones, below a line, are greedy.
      ceiling: the share that can be won.
    """
    names = []
    for place, scored in enumerate(scores):
        mean, low, high = _percents(scored.interval)
        to_the_left = mean - low
        to_the_right = high - mean
        color = COLORS[scored.model]
        inside = color
        if scored.greedy:
            inside = "white"
        ax.errorbar(
            mean,
            place,
            xerr=[[to_the_left], [to_the_right]],
            fmt="o",
            color=color,
            mfc=inside,
            capsize=4,
            lw=2,
        )
        ax.annotate(f"{mean:.0f}", (mean, place - 0.22), ha="center")
        names.append(f"{scored.model}, {scored.asked}")
    ax.axvline(100 * ceiling, color=style.RED, linestyle="--")
    places = range(len(names))
    ax.set_yticks(places, names)
    for label in ax.get_yticklabels()[:2]:
        label.set_fontweight("bold")
    filled = sum(not scored.greedy for scored in scores)
    ax.axhline(filled - 0.5, color=style.GRAY, lw=1)
    ax.set(
        xlabel="pass@1, %; dashed: the ceiling; hollow: greedy",
        xlim=(-6, 106),
        ylim=(len(names) - 0.5, -0.8),
    )


def _percents(shares: Interval) -> Interval:
    """A mean with its interval, in percent."""
    mean, low, high = shares
    return 100 * mean, 100 * low, 100 * high


def draw_differences(ax: Axes, compared: Mapping[str, Any], rival: str, tuned: str) -> None:
    """A bar for each problem: the tuned model's score minus the base's, and a dot where it's 0.

    Args:
      ax: where to draw.
      compared: from `verilog.compare`, base first.
      rival: how the base is asked.
      tuned: how the tuned model is asked.
    """
    values = 100 * np.sort(compared["values"])
    better = values > 0
    worse = values < 0
    equal = values == 0
    places = np.arange(len(values))
    colors = np.where(better, style.BLUE, style.ORANGE)
    zeros = values[equal]
    ax.bar(places, values, color=colors)
    ax.plot(places[equal], zeros, ".", color=style.GRAY)

    mean, low, high = _percents(compared["difference"])
    ax.axhline(mean, color=style.BLACK, lw=2)
    ax.axhline(low, color=style.BLACK, ls=":")
    ax.axhline(high, color=style.BLACK, ls=":")

    counted = (f"Tuned better on {better.sum()} problems, worse on {worse.sum()}, "
               f"equal on {equal.sum()}:")
    on_average = f"{mean:+.1f} points on average ({low:+.1f} to {high:+.1f})"
    luck = _luck(low, high, compared["p"])
    ax.set(
        title=f"{counted}\n{on_average}{luck}",
        xlabel="problems, sorted",
        xticks=[],
        ylabel=f"tuned ({tuned})\nminus base ({rival}),\npoints",
    )


def _luck(low: float, high: float, p: float) -> str:
    """What a title adds about luck, for a difference with this interval and p value."""
    leaves_out_zero = low > 0 or high < 0
    is_rare = p < 0.05
    if leaves_out_zero and is_rare:
        return ""
    if leaves_out_zero or is_rare:
        return ",\nat the edge of what luck explains"
    return ", so it could be luck"
