"""helpers/charts.py: what the figures of 07 say, read from the figures themselves."""

import matplotlib
import numpy as np
import pandas as pd
import pytest

from helpers import charts, stats, style

matplotlib.use("agg")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were finished: [(name, figure), ...]."""
    figures = []
    monkeypatch.setattr(style, "finish", lambda fig, name, source="": figures.append((name, fig)))
    yield figures
    matplotlib.pyplot.close("all")


def labels(ticks):
    return [tick.get_text() for tick in ticks]


@pytest.mark.parametrize("problems, named", [(38, True), (156, False)])
def test_answers_are_named_only_where_names_can_be_read(drawn, problems, named):
    frames = {}
    for label, every in (("tuned", 2), ("base", 5)):
        rows = [(f"Prob{p:03}_p{p}", index, "pass" if p % every else "mismatch")
                for p in range(problems) for index in range(5)]
        frame = pd.DataFrame(rows, columns=["problem", "index", "category"])
        frames[label] = frame.assign(passed=frame.category == "pass")
    charts.draw_answers(frames, "here")
    fig = drawn[0][1]
    assert len(fig.axes) == 2 and bool(labels(fig.axes[1].get_xticklabels())) == named
    assert f"{frames['tuned'].passed.sum()} of {5 * problems}" in fig.axes[0].get_title(loc="left")


def test_scores_of_none_have_an_interval_and_differences_are_counted(drawn):
    base, rival, tuned = np.zeros(38), np.repeat([0.0, 1.0], 19), np.repeat([1.0, 0.8], 19)
    result = stats.compare(rival, tuned, 500)
    scored = {"base": {1: stats.score(base, 500)}, "base, two examples": {1: result["first"]},
              "tuned": {1: result["second"]}}
    charts.draw_scores(scored, result, 1.0, "here")
    left, right = drawn[0][1].axes
    assert right.get_title(loc="left") == "19 problems better, 19 worse, 0 level"
    assert left.get_title(loc="left") == "Tuned 0.90, untuned at best 0.50 (pass@1)"
    bars = [segment for each in left.collections for segment in each.get_segments()]
    assert any(bar[0][1] == 0 and 0.05 < bar[1][1] < 0.1 for bar in bars), "0 of 38 is no point"
