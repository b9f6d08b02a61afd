"""The figures of 08 from the stored tables: they are drawn, and the road's factors multiply up.

    .venv/bin/python -m pytest tests/test_dryrun_figures.py
"""


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
    live = steps.predicted(steps.LIVE)
    figures.draw_trace(live, "08_trace", "two layers")
    figures.draw_parts({"two": live}, {"two": 1_945.6})
    assert {path.stem for path in here.glob("*.png")} == {"08_memory", "08_trace", "08_parts"}


def test_the_road_s_factors_multiply_to_the_ratio(here, table):
    found = steps.road(table)
    factor = 1.0
    for _, start, end in found:
        factor *= end / start
    last = list(steps.ROAD)[-1].recipe
    assert factor == pytest.approx(steps.ratio(table, last))
    packed = next(end / start for label, start, end in found if label == "packed rows")
    assert packed == pytest.approx(0.95 / 0.30)
    figures.draw_road(found)
    assert (here / "08_road.png").exists()
