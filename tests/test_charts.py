"""helpers/charts.py: what the figures of 05 to 07 say, read from the figures themselves."""

import math

import matplotlib
import numpy as np
import pandas as pd
import pytest
from conftest import load

from helpers import charts, stats, style
from serving import bench, server

matplotlib.use("agg")
INF = math.inf


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were finished: [(name, figure), ...]."""
    figures = []
    monkeypatch.setattr(style, "finish", lambda fig, name, source="": figures.append((name, fig)))
    yield figures
    matplotlib.pyplot.close("all")


def table(system="here", dollars=math.nan, capacity=10.0):
    """Rows as 06 makes them, of a server that delivers at most `capacity`."""
    rows = []
    for rate in (4.0, 8.0, 16.0, INF):
        for repeat, more in enumerate((0.97, 0.99, 1.0)):
            delivered = min(rate, capacity) * more
            rows.append({
                "system": system, "input_len": 256, "output_len": 64, "rate": rate,
                "repeat": repeat, "delivered_rps": delivered, "goodput_rps": delivered,
                "ttft_p50_ms": 50 * max(1, min(rate, 32) / capacity),
                "ttft_p90_ms": 9 * min(rate, 32),
                "ttft_queue_floor_ms": 5.0, "tpot_p50_ms": 9.0, "tpot_p90_ms": 20.0,
                "dollars_per_hour": dollars,
                "hours_per_million_output": 1e6 / 3600 / (64 * delivered)})
    return pd.DataFrame(rows)


def labels(ticks):
    return [tick.get_text() for tick in ticks]


def test_the_star_is_the_knee_and_stands_on_the_curve(drawn):
    charts.draw_throughput(table(), "here")
    fig, ax = drawn[0][1], drawn[0][1].axes[0]
    star = next(line for line in ax.lines if line.get_marker() == "*")
    (x,), (y,) = star.get_data()
    assert (x, y) == (8.0, pytest.approx(8 * 0.99)) and bench.kept_up(table()) == (8.0, 16.0)
    assert "keeps up with 8/s of 256/64" in ax.get_title(loc="left")
    fig.canvas.draw()
    assert labels(ax.get_xticklabels())[:3] == labels(ax.get_yticklabels()) == ["4", "8", "16"]
    charts.draw_throughput(table(capacity=2.0), "here")
    assert "none of these rates" in drawn[1][1].axes[0].get_title(loc="left")


@pytest.mark.parametrize("others, unit", [((), "hours of the machine"), ((21.5,), "hours"),
                                          ((21.5, 4.0), "USD")])
def test_cost_is_in_dollars_only_where_every_machine_has_a_price(drawn, others, unit):
    prices = dict(zip(("v6e-8", "mine"), others)) if len(others) == 2 else \
        {"cpu": math.nan, **dict(zip(("v6e-8",), others))}
    charts.draw_cost(pd.concat([table(name, price) for name, price in prices.items()],
                               ignore_index=True), 500, "here")
    ax = drawn[0][1].axes[0]
    assert ax.get_ylabel().startswith(unit)
    x, y = ax.lines[0].get_data()
    assert list(x) == sorted(x) and list(y) == sorted(y, reverse=True)


def test_latency_shows_floors_under_the_first_token_and_starts_the_other_at_zero(drawn):
    charts.draw_latency(table(), "here")
    left, right = drawn[0][1].axes
    assert any(line.get_linestyle() == "--" for line in left.lines)
    assert right.get_ylim()[0] == 0 and right.get_yscale() == "linear"
    assert "First token: 10 to 32 times its floor" in left.get_title(loc="left")


def test_the_factor_over_the_floor_is_that_of_each_regime_as_in_the_table(drawn):
    """Two prompt lengths pooled at one rate would hide the ends: 06's table goes from 10 to 320."""
    slow = table().assign(input_len=768, ttft_p50_ms=lambda rows: 10 * rows.ttft_p50_ms)
    charts.draw_latency(pd.concat([table(), slow], ignore_index=True), "here")
    left = drawn[0][1].axes[0]
    assert "First token: 10 to 320 times its floor" in left.get_title(loc="left")


@pytest.mark.parametrize("draw", ["throughput", "latency", "cost"])
def test_beyond_the_knee_markers_are_hollow_and_a_burst_stands_alone(drawn, draw):
    more = {"slo": 500} if draw == "cost" else {}
    getattr(charts, f"draw_{draw}")(table(), source="here", **more)
    for ax in drawn[0][1].axes:
        line = next(line for line in ax.lines if line.get_linestyle() == "-")
        assert len(line.get_xdata()) == 3, "4, 8 and 16/s, and not all at once"
        marks = {line.get_markerfacecolor(): len(line.get_xdata()) for line in ax.lines
                 if line.get_marker() == "o"}
        assert marks == {style.BLUE: 2, "white": 2}, "the knee is 8/s"


def test_the_cost_figure_shows_how_far_the_p90_of_the_repeats_are_apart(drawn):
    rows = table().assign(ttft_p90_ms=lambda t: t.ttft_p90_ms * (1 + t.repeat))
    charts.draw_cost(rows, 500, "here")
    bars = [segment for each in drawn[0][1].axes[0].collections for segment in each.get_segments()]
    assert sorted(bar[:, 0].tolist() for bar in bars)[0] == [36, 108], "4/s: 36, 72, 108 ms"


def test_the_end_of_a_throughput_curve_repeats_no_other_number(drawn):
    charts.draw_throughput(table(), "here")
    texts = [text.get_text() for text in drawn[0][1].axes[0].texts]
    assert "256/64" in texts and not any("256/64:" in text for text in texts)


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


def test_memory_has_a_bar_per_layout_and_its_count_beside_it(drawn):
    memory_plan = load("05_serve_vllm.py", "memory_plan", "GIB", "SHARE", "CHECKPOINT")[0]
    config = server.read_json("data/configs/gemma4_31b.json")
    plans = [memory_plan(config, 33e9, 8, 1, 2, 62.5e9), memory_plan(config, 33e9, 4, 2, 1, 34e9)]
    charts.draw_memory(plans, 33e9, 0.92)
    ax = drawn[0][1].axes[0]
    texts = [text.get_text() for text in ax.texts]
    assert str(plans[0]["requests of 16,384"]) in texts
    assert f"2 × {plans[1]['requests of 16,384'] // 2}" in texts
    assert ["fp8 weights" in label for label in labels(ax.get_yticklabels())] == [False, True]


def test_a_timeline_says_how_much_of_the_wait_is_the_first_token(drawn):
    charts.draw_timeline([0.1, 0.2, 0.3, 0.4], (132, 4), "here")
    assert drawn[0][1].axes[0].get_title(loc="left") == (
        "132 tokens in, 4 out: 400 ms, 25% of it before the first token")
