"""10: its statistics against brute force, its numbers against an independent computation.

    .venv/bin/python -m pytest tests/test_published.py
"""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, load
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import physics
from helpers.stats import sign_flip_p

NOTEBOOK = "10_published.py"
PUBLISHED = ROOT / "data" / "published"
implied_service, random_floors, sampling_z, pass_at_1, ratio_claim = load(
    NOTEBOOK, "implied_service", "random_floors", "sampling_z", "pass_at_1", "ratio_claim")


def test_every_row_with_a_source_column_has_a_source():
    import pandas as pd
    for path in PUBLISHED.glob("*.csv"):
        frame = pd.read_csv(path)
        if "source" in frame:
            assert frame.source.notna().all(), path.name


@settings(deadline=None)
@given(service=st.floats(0.001, 2), rate=st.floats(0.2, 64), n=st.integers(1, 40))
def test_implied_service_inverts_the_queue(service, rate, n):
    median = physics.median_ttft_floor_fcfs(n, rate, service)
    assert implied_service(median, n, rate) == pytest.approx(service, rel=1e-6)


@settings(deadline=None)
@given(service=st.floats(0.001, 2), rate=st.floats(0.2, 64), n=st.integers(1, 40))
def test_random_arrivals_against_the_queue_request_by_request(service, rate, n):
    found = random_floors(n, rate, service, 3, np.random.default_rng(1))
    sent = np.random.default_rng(1).exponential(1.0, (3, n)).cumsum(axis=1)
    for median, arrivals in zip(found, sent, strict=True):
        waits = physics.fcfs_ttft(list(arrivals * n / rate / arrivals[-1]), service)
        assert median == pytest.approx(np.median(waits))


def test_the_first_values_of_a_differ_by_the_root_of_six():
    """Qwix's default against PEFT's rule (Kaiming with a = sqrt(5)): variance 1 / (3 fan-in)."""
    import jax
    from qwix import LoraRule
    peft = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
    ours, theirs = (abs(draw(jax.random.key(0), (4096, 64))).max()
                    for draw in (LoraRule.lora_a_initializer, peft))
    assert theirs == pytest.approx(1 / 4096 ** 0.5, rel=1e-3)
    assert ours / theirs == pytest.approx(6 ** 0.5, rel=1e-3)


def test_sampling_z_against_simulation():
    """The variance in it is unbiased: over many draws it equals the variance of the difference."""
    rng = np.random.default_rng(0)
    chance = rng.choice([0, 0.2, 0.5, 0.9, 1], size=(2, 156))
    draws = rng.binomial(5, chance[None], size=(4000, 2, 156))
    gaps = (draws[:, 1].mean(axis=1) - draws[:, 0].mean(axis=1)) / 5
    variances = [(gap / sampling_z(a, b, 5)) ** 2 for gap, (a, b) in zip(gaps, draws, strict=True)
                 if gap]
    assert np.mean(variances) == pytest.approx(gaps.var(), rel=0.06)


def test_pass_at_1_is_the_share_up_to_rounding():
    for n in (1, 5, 20):
        for c in range(n + 1):
            assert pass_at_1(n, c) == pytest.approx(c / n)
    assert pass_at_1(5, 1) < 0.2  # the rounding behind the published histogram


@pytest.mark.parametrize(("tpu", "gpu", "claim", "answer"), [
    (1206, 728, "+66%", "+66%"), (61, 1443, "23.6x", "23.7x"), (32, 8, "4x", "4x"),
    (23.9, 31.2, "1.3x", "1.3x")])
def test_ratio_claim(tpu, gpu, claim, answer):
    assert ratio_claim(SimpleNamespace(tpu=str(tpu), gpu=gpu, claimed_ratio=claim)) == answer


def test_results_of_the_whole_notebook(tmp_path):
    """The notebook as a script, against numbers that were computed another way before."""
    run = subprocess.run([sys.executable, NOTEBOOK], cwd=ROOT, text=True, capture_output=True,
                         env={**os.environ, "SIZE": "tiny", "RUN_DIR": str(tmp_path),
                              "MPLBACKEND": "agg"})
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr, run.stderr
    found = json.loads((tmp_path / "published.json").read_text())
    assert found["impossible_in_table"] == 2
    assert (found["impossible_in_sweep"], found["below_floor_in_sweep"]) == (16, 20)
    assert found["in_progress_at_1_per_second"] == pytest.approx({"tpu": 6.9, "gpu": 10.2}, abs=0.1)
    parts = list(found["headline_parts"].values())
    assert parts == pytest.approx([2.72, 4.79, 1.81], abs=0.01)
    assert np.prod(parts) == pytest.approx(1443 / 61, rel=1e-3)
    assert found["pass@1_difference"] == pytest.approx(44 / 780, abs=1e-4)
    assert found["sign_flip_p"] == pytest.approx(0.0046, abs=0.0004)  # by random signs
    assert found["pass@5_p"] == pytest.approx(0.607, abs=0.001)       # McNemar, 6 against 9
    assert found["cost_ratio_24h"] == 1.135
    assert found["claims"] == {"match": 55, "substantive": 24, "rounding": 6, "draft": 5}
    assert len(list((tmp_path / "figures").glob("10_*.png"))) == 5


def cells_of_tables(text):
    """Words between the bars of the Markdown tables of a notebook's source, links by their text."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "")
    return {cell.strip() for line in text.splitlines() if line.startswith("# |")
            for cell in line.removeprefix("# ").split("|")}


def test_every_correction_is_stored_and_ten_are_shown():
    """10 shows some of the stored corrections in their own words, and names their number."""
    import pandas as pd
    stored = pd.read_csv(PUBLISHED / "corrections.csv")
    source = (ROOT / NOTEBOOK).read_text()
    shown = stored.published.isin(cells_of_tables(source)) & stored.this_series.isin(
        cells_of_tables(source))
    assert shown.sum() == 10 and f"Ten of the {len(stored)} corrections" in source
    assert stored.notna().all().all() and not stored.published.duplicated().any()


def test_verdicts_in_the_notebook_are_the_stored_ones():
    """Claim and verdict of each computed line of section 11 stand in verdicts.csv, too."""
    import pandas as pd
    stored = pd.read_csv(PUBLISHED / "verdicts.csv", dtype=str)
    source = (ROOT / NOTEBOOK).read_text()
    lines = re.findall(r'^    \(?\[?\(?"(\d(?:\.\d)?)", "([^"]+)", "(\w[\w ]+)",$', source, re.M)
    assert len(lines) == 9 and f"main ones of {len(stored)}" in source
    known = set(stored[["section", "claim", "verdict"]].itertuples(index=False, name=None))
    assert set(lines) <= known


def test_without_the_disputed_problems_by_random_signs():
    import pandas as pd
    scores = pd.read_csv(PUBLISHED / "eval_per_problem_digitized.csv")
    number = scores.problem.str[4:7].astype(int)
    gaps = (scores.gpu_passed_of_5 - scores.tpu_passed_of_5)[~number.isin([99, 118, 134, 135, 153])]
    assert len(gaps) == 151 and gaps.sum() == 34
    signs = np.random.default_rng(0).choice([-1, 1], (100_000, len(gaps)))
    share = (abs(signs @ gaps.to_numpy()) >= gaps.sum()).mean()
    assert sign_flip_p(gaps) == pytest.approx(share, abs=0.002)
    assert share == pytest.approx(0.021, abs=0.002)
