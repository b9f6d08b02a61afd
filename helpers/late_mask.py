"""A mask in the wrong place (02): how the published recipe got one, and what it does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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
    should = [False] * len(ids)
    for first in range(len(ids) - len(answer) + 1):
        end = first + len(answer)
        if list(ids[first:end]) == list(answer):
            should[first:end] = [True] * len(answer)
            break
    return should


def one_question(messages: list[dict], otherwise: list[dict]) -> list[dict]:
    """A chat that the published recipe can render: one question and one answer, without tools.

    Args:
      messages: taken if it's such a chat.
      otherwise: taken if it isn't.
    """
    if len(messages) > 3 or "tools" in messages[0]:
        return otherwise
    return messages


def draw_both(tokenizer: Any, messages: list[dict]) -> Figure:
    """The tokens and masks of one chat from just before its answer, the published way above ours.

    Args:
      tokenizer: from `chat.load_tokenizer`.
      messages: a chat that ends with a question and its answer.
    """
    question, answer = messages[-2]["content"], messages[-1]["content"]
    answer_ids, = chat.encode_texts(tokenizer, [answer])
    end_of_turn = chat.special_ids(tokenizer)[chat.TURN_END]
    target = [*answer_ids, end_of_turn]
    ways = {
        "The published way": published_row(tokenizer, question, answer),
        "Ours": chat.render(tokenizer, messages),
    }

    fig, axes = style.figure(7.74, 6, rows=2)
    heights = []
    for ax, (name, (ids, trained)) in zip(axes, ways.items(), strict=True):
        should = _answer_places(ids, target)
        begin = max(0, should.index(True) - BEFORE)
        pieces = [tokenizer.decode([number]) for number in ids[begin:]]
        lines = style.draw_tokens(ax, pieces, trained[begin:], should[begin:])
        heights.append(lines)
        rightly = sum(np.logical_and(trained, should))
        ax.set_title(f"{name}: {rightly} of {len(target)} answer tokens are trained")
    fig.set_figheight(0.165 * sum(heights) + 1)
    axes[0].get_gridspec().set_height_ratios(heights)

    handles = []
    for name, box, _ in style.TOKEN_LOOK.values():
        handles.append(axes[0].bar(0, 0, color=box, label=name))  # without height, for the legend
    axes[0].legend(handles=handles, loc="upper right", fontsize=9)
    return fig


# ── What it does ──


def read_runs() -> pd.DataFrame:
    """The stored runs, one row for each mask and seed, with the share of sampled answers passed."""
    files = sorted(STORED.glob("*.csv"))
    runs = pd.concat([pd.read_csv(path) for path in files], ignore_index=True)
    runs["share"] = runs.drawn / runs.answers_drawn
    return runs


def draw_runs(runs: pd.DataFrame) -> Figure:
    """The share of answers that pass by mask, with its final loss; a dot is a seed, if several."""
    fig, ax = style.figure(7, 2.7)
    means = runs.groupby("mask")[["share", "loss"]].mean()
    for place, mask in enumerate(NAMES):
        of_mask = runs[runs["mask"] == mask]
        share, loss = means.share[mask], means.loss[mask]
        ax.barh(place, 100 * share, color=style.SKY)
        if len(of_mask) > 1:
            ax.plot(100 * of_mask.share, [place] * len(of_mask), "o", color=style.BLUE)
        furthest = 100 * of_mask.share.max()
        ax.annotate(f"  {share:.0%} pass, loss {loss:.3f}", (furthest, place), va="center")

    worst = str(means.share.idxmin())
    same_loss = "same low loss, " if means.loss[worst] <= 1.1 * means.loss["answers"] else ""
    title = f"{TITLES[worst]}: {same_loss}{means.share[worst]:.0%} pass"
    seeds = runs.seed.nunique()
    ax.set(
        yticks=range(len(NAMES)),
        yticklabels=list(NAMES.values()),
        xlim=(0, 100),
        ylim=(2.6, -0.6),
        title=title,
        xlabel=f"% of {runs.answers_drawn.iloc[0]} answers, sampled at temperature 0.8, that pass; "
               + ("one seed" if seeds == 1 else f"a dot is one of {seeds} seeds"),
    )
    return fig
