"""A mask in the wrong place (02): how the published recipe got one, and what it does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers import chat, style

STORED = Path("data/masks")  # `python -m appendix.masks` makes the runs
BEFORE = 8  # tokens before the answer that are drawn
NAMES = {  # of the masks in data/masks, as the figure calls them
    "answers": "the answer",
    "prompts, too": "prompt and answer",
    "six tokens late": "the answer, six tokens late",
}
TITLES = {  # how the figure's title begins, by the mask that does worst
    "answers": "Answer trained",
    "prompts, too": "Prompt trained, too",
    "six tokens late": "Mask six tokens late",
}


# ── The published mask beside ours ──


def published_row(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[bool]]:
    """Ids and mask the published way: tokenize all, then each piece again, and add up lengths."""
    def encode(text: str) -> list[int]:  # it adds both, whatever the caller asks for
        inside = tokenizer.encode(text, add_special_tokens=False)
        return [tokenizer.bos_token_id, *inside, tokenizer.eos_token_id]

    pieces = ["<|turn>user\n", f"{prompt}<turn|>\n", "<|turn>model\n", f"{answer}<turn|>\n"]
    ids = encode("".join(pieces))
    ends = 1 + np.cumsum([len(encode(piece)) for piece in pieces])
    places = np.arange(len(ids))
    is_trained = (ends[2] <= places) & (places < ends[3])
    return ids, is_trained.tolist()


def _answer_places(ids: Sequence[int], answer: Sequence[int]) -> list[bool]:
    """True where the answer's ids stand for the first time: what should be trained."""
    length = len(answer)
    wanted = list(answer)
    should = [False] * len(ids)
    last_start = len(ids) - length
    for first in range(last_start + 1):
        end = first + length
        if list(ids[first:end]) == wanted:
            should[first:end] = [True] * length
            break
    return should


def one_question(messages: list[dict], otherwise: list[dict]) -> list[dict]:
    """A chat that the published recipe can render: one question and one answer, without tools.

    Args:
      messages: taken if it's such a chat.
      otherwise: taken if it isn't.
    """
    has_more_turns = len(messages) > 3
    has_tools = "tools" in messages[0]
    if has_more_turns or has_tools:
        return otherwise
    return messages


def draw_both(tokenizer: Any, messages: list[dict]) -> Figure:
    """The tokens and masks of one chat from just before its answer, the published way above ours.

    Args:
      tokenizer: from `chat.load_tokenizer`.
      messages: a chat that ends with a question and its answer.
    """
    question = messages[-2]["content"]
    answer = messages[-1]["content"]
    [answer_ids] = chat.encode_texts(tokenizer, [answer])
    end_of_turn = chat.special_ids(tokenizer)[chat.TURN_END]
    target = [*answer_ids, end_of_turn]
    ways = {
        "The published way": published_row(tokenizer, question, answer),
        "Ours": chat.render(tokenizer, messages),
    }

    published_ids, published_mask = ways["The published way"]
    should = np.array(_answer_places(published_ids, target))
    late = np.logical_and(should, np.logical_not(published_mask)).sum()
    too_many = np.logical_and(published_mask, ~should).sum()

    fig, axes = style.figure(7.74, 6, rows=2)
    fig.suptitle(f"Counting lengths: {late} tokens too late, {too_many} too many",
                 fontsize=11, fontweight="bold", x=0.01, ha="left")
    heights = []
    for ax, (name, row) in zip(axes, ways.items(), strict=True):
        lines, count = _draw_way(ax, tokenizer, row, target)
        heights.append(lines)
        ax.set_title(f"{name}: {count} of {len(target)} answer tokens are trained",
                     fontweight="normal")
    all_lines = sum(heights)
    fig.set_figheight(0.165 * all_lines + 1.3)
    upper = axes[0]
    upper.get_gridspec().set_height_ratios(heights)

    handles = []
    for name, box, _ in style.TOKEN_LOOK.values():
        bar = upper.bar(0, 0, color=box, label=name)  # without height, for the legend
        handles.append(bar)
    upper.legend(handles=handles, loc="upper right", fontsize=9)
    return fig


def _draw_way(ax: Axes, tokenizer: Any, row: Sequence, target: Sequence[int]) -> tuple[int, int]:
    """Draw one way's tokens; returns the lines they take, and how many of the answer are trained.

    Args:
      ax: where to draw.
      tokenizer: from `chat.load_tokenizer`.
      row: (ids, mask) of the whole chat.
      target: the ids that should be trained.
    """
    ids, trained = row
    should = _answer_places(ids, target)
    first_wanted = should.index(True)
    begin = max(0, first_wanted - BEFORE)
    pieces = [tokenizer.decode([number]) for number in ids[begin:]]
    lines = style.draw_tokens(ax, pieces, trained[begin:], should[begin:])
    trained_rightly = np.logical_and(trained, should)
    return lines, sum(trained_rightly)


# ── What it does ──


def read_runs() -> pd.DataFrame:
    """The stored runs, one row for each mask and seed, with the share of sampled answers passed."""
    files = sorted(STORED.glob("*.csv"))
    tables = [pd.read_csv(path) for path in files]
    runs = pd.concat(tables, ignore_index=True)
    runs["share"] = runs.drawn / runs.answers_drawn
    return runs


def draw_runs(runs: pd.DataFrame) -> Figure:
    """The share of answers that pass by mask, with its final loss; a dot is a seed, if several."""
    fig, ax = style.figure(7, 2.7)
    means = runs.groupby("mask")[["share", "loss"]].mean()
    for place, mask in enumerate(NAMES):
        of_mask = runs[runs["mask"] == mask]
        share = means.share[mask]
        loss = means.loss[mask]
        ax.barh(place, 100 * share, color=style.SKY)
        percents = 100 * of_mask.share
        if len(of_mask) > 1:
            spread = np.linspace(-0.2, 0.2, len(of_mask))  # equal ones would hide each other
            ax.plot(percents, place + spread, "o", color=style.BLUE)
        furthest = percents.max()
        label = f"  {share:.0%} pass, loss {loss:.3f}"
        ax.annotate(label, (furthest, place), va="center")

    answers = runs.answers_drawn.iloc[0]
    seeds = runs.seed.nunique()
    dots = "one seed"
    if seeds > 1:
        dots = f"dots: {seeds} seeds"
    ax.set(
        yticks=range(len(NAMES)),
        yticklabels=list(NAMES.values()),
        xlim=(-2, 100),
        ylim=(2.6, -0.6),
        title=_title_of(means),
        xlabel=f"% of {answers} sampled answers that pass; {dots}",
    )
    ax.grid(False)  # it would run through the labels
    return fig


def _title_of(means: pd.DataFrame) -> str:
    """The figure's title: the worst mask, and whether its loss would have told.

    Args:
      means: `share` and `loss` by mask.
    """
    worst = str(means.share.idxmin())
    share = means.share[worst]
    usual_loss = means.loss["answers"]
    same_loss = ""
    if means.loss[worst] <= 1.1 * usual_loss:
        same_loss = "same low loss, "
    return f"{TITLES[worst]}: {same_loss}{share:.0%} pass"
