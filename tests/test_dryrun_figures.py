"""The figures of 08 from the stored tables: they are drawn, and the road's factors multiply up.

    .venv/bin/python -m pytest tests/test_dryrun_figures.py
"""

import json

import matplotlib
import pandas as pd
import pytest
from conftest import ROOT

matplotlib.use("Agg")
from appendix import steps  # noqa: E402
from appendix import step_figures as figures  # noqa: E402


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    return tmp_path / "figures"


@pytest.fixture
def table():
    return pd.read_csv(ROOT / "data/dryrun/v5p-8_31b.csv", dtype={"trainer": str})


def test_memory_trace_and_parts_are_drawn(here, table):
    figures.draw_memory(table)
    figures.draw_trace(ROOT / "data/dryrun/trace_2layers.json.gz", "08_trace")
    figures.draw_parts({name: json.loads(
        (ROOT / f"data/dryrun/profiles/v5p8_31b_{name}.json").read_text())
        for name in ("published", "ours")}, {"published": 921.6, "ours": 7_782.4})
    assert {path.stem for path in here.glob("*.png")} == {"08_memory", "08_trace", "08_parts"}


def test_waits_are_those_of_the_chip_s_own_track():
    events = [{"ph": "M", "name": "thread_name", "tid": 1},
              {"ph": "X", "name": "MLP", "tid": 1, "dur": 3.0},
              {"ph": "X", "name": "wait: all-gather", "tid": 1, "dur": 1.0},
              {"ph": "X", "name": "all-gather", "tid": 2, "dur": 9.0}]
    assert figures.waiting(events) == 0.25


def test_the_road_s_factors_multiply_to_the_ratio(here, table):
    found = steps.road_steps(table, ["published", "ours"], ["published", "ours"])
    assert [label for label, _, _ in found] == ["packed rows", "ours"]
    assert found[0][2] / found[0][1] == pytest.approx(0.95 / 0.30)
    speed = table.set_index("recipe").tokens_per_second_predicted
    factor = 1.0
    for _, start, end in found:
        factor *= end / start
    assert factor == pytest.approx(speed["ours"] / speed["published"])
    figures.draw_road(found)
    assert (here / "08_road.png").exists()


def test_the_memory_figure_s_title_is_what_the_table_says(table):
    assert figures.memory_title(table) == (
        "Two rows fit only with attention by blocks; three leave 0.3 GiB")
    assert "Two rows" not in figures.memory_title(table[table.recipe == "published"])


def test_a_row_that_is_not_predicted_shares_the_next_one_s_step(table):
    names = [recipe.recipe for recipe in steps.ROAD if recipe.recipe in set(table.recipe)]
    alone = table.assign(seconds_predicted=table.seconds_predicted.where(
        table.recipe.isin(["published", "ours, one row"])))
    labels = [label for label, _, _ in steps.road(alone)]
    assert labels == ["packed rows", ",\n".join(steps.ROAD_LABELS[1:names.index("ours, one row") + 1])]
    known = table[table.recipe.isin(names)].assign(seconds_predicted=1.0)
    known["tokens_per_second_predicted"] = known.recipe.map(
        {name: 100.0 * place for place, name in enumerate(names, 1)})
    found = steps.road(known)
    assert len(found) == len(names), "one step between two rows each, and packing"
    assert found[-1][2] == 100.0 * len(names)
