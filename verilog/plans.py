"""The ways in which 07 asks a model: which wording, how many answers, how random.

`FIVE` is the main plan. `SHORT` is asked in small and in free sessions, `LARGE` otherwise.
"""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from verilog.asking import Plan

FIVE = Plan("trained chat")
EXAMPLES = Plan("two examples", "examples", only="base")
COMMENT = Plan("comment", "comment", only="base")
GREEDY = Plan("trained chat, greedy", n=1, temperature=0.0, top_p=1.0)
COMMENT_GREEDY = replace(GREEDY, name="comment, greedy", prompt="comment")
OFFICIAL_GREEDY = replace(GREEDY, name="official, greedy", prompt="official")
OFFICIAL = Plan("official", "official")
OFFICIAL_20 = Plan("official, n=20", "official", n=20, temperature=0.85)
COMPLETION = Plan("code-complete", "official", task="code-complete")
THINKING = Plan("thinking", "official", thinking=True, max_tokens=16384, only="base")

SHORT = (FIVE, EXAMPLES, COMMENT, GREEDY, COMMENT_GREEDY, OFFICIAL_GREEDY)
LARGE = (
    FIVE, EXAMPLES, COMMENT, OFFICIAL, GREEDY, COMMENT_GREEDY, OFFICIAL_GREEDY, OFFICIAL_20,
    COMPLETION, THINKING)


def table(plans: Sequence[Plan]) -> pd.DataFrame:
    """A row for each plan, for a reader."""
    rows = []
    for plan in plans:
        rows.append({
            "plan": plan.name,
            "answers to a problem": plan.n,
            "temperature": f"{plan.temperature:g}",
            "top_p": f"{plan.top_p:g}",
            "asked of": plan.only or "both"})
    return pd.DataFrame(rows)


def asked_of(model: str, plans: Sequence[Plan]) -> list[Plan]:
    """The plans by which a model is asked.

    Args:
      model: "base" or "tuned".
    """
    return [plan for plan in plans if plan.is_asked_of(model)]


def sampled_wordings(plans: Sequence[Plan]) -> list[str]:
    """The names of the plans that ask what `FIVE` asks, and as often, in whatever wording."""
    names = []
    for plan in plans:
        is_as_often = plan.n == FIVE.n
        is_same_task = plan.task == FIVE.task
        if is_as_often and is_same_task:
            names.append(plan.name)
    return names


def greedy_of_both(plans: Sequence[Plan]) -> list[str]:
    """The names of the plans with one answer to a problem that both models are asked by."""
    names = []
    for plan in plans:
        is_of_both = not plan.only
        if plan.n == 1 and is_of_both:
            names.append(plan.name)
    return names


def one_of_each_wording(plans: Sequence[Plan]) -> dict[str, str]:
    """{wording: what a reader calls it}, from the first plan that has it."""
    names: dict[str, str] = {}
    for plan in plans:
        name, _, _ = plan.name.partition(",")
        names.setdefault(plan.prompt, name)
    return names
