"""The road of 08: its factors multiply up to the ratio, and it is drawn.

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
