"""10: its statistics against brute force, its numbers against an independent computation.

    .venv/bin/python -m pytest tests/test_published.py
"""

import itertools
import json
import os
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, load
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import physics

NOTEBOOK = "10_published.py"
PUBLISHED = ROOT / "data" / "published"
implied_service, sign_flip_p, sampling_z, pass_at_1, ratio_claim = load(
    NOTEBOOK, "implied_service", "sign_flip_p", "sampling_z", "pass_at_1", "ratio_claim")


def test_readme_names_every_file_and_dates_the_prices():
    text = (PUBLISHED / "README.md").read_text()
    for path in PUBLISHED.glob("*.csv"):
        assert f"`{path.name}`" in text, path.name
    assert "2605.25645" in text and "745cbdf" in text
    assert "May 2026" in text.split("**Prices**")[1]


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
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_sign_flip_against_all_signs(values):
    values = np.array(values)
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in itertools.product((-1, 1), repeat=len(values))]
    expected = np.mean([total >= abs(values.sum()) for total in sums])
    assert sign_flip_p(values) == pytest.approx(expected)


def test_sign_flip_against_scipy():
    from scipy import stats
    values = np.random.default_rng(0).integers(-5, 7, 60)
    drawn = stats.permutation_test((values,), np.mean, permutation_type="samples",
                                   n_resamples=20_000, rng=np.random.default_rng(1)).pvalue
    assert sign_flip_p(values) == pytest.approx(drawn, abs=0.01)


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The whole notebook, run as a script."""
    folder = tmp_path_factory.mktemp("published")
    source = folder / "notebook.py"
    source.write_text((ROOT / NOTEBOOK).read_text().replace('"bash", "setup.sh"', '"true"'))
    run = subprocess.run([str(ROOT / ".venv/bin/python"), str(source)], cwd=ROOT, text=True,
                         capture_output=True, env={**os.environ, "SIZE": "tiny",
                                                   "RUN_DIR": str(folder), "MPLBACKEND": "agg"})
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr, run.stderr
    return folder, run.stdout


def test_results_of_the_whole_notebook(whole):
    folder, printed = whole
    found = json.loads((folder / "published.json").read_text())
    assert found["impossible_in_table"] == 4 and found["impossible_in_sweep"] == 20
    parts = list(found["headline_parts"].values())
    assert parts == pytest.approx([2.72, 4.79, 1.81], abs=0.01)
    assert np.prod(parts) == pytest.approx(1443 / 61, rel=1e-3)
    assert found["pass@1_difference"] == pytest.approx(44 / 780, abs=1e-4)
    assert found["sign_flip_p"] == pytest.approx(0.0046, abs=0.0004)  # Monte Carlo, done before
    assert found["pass@5_p"] == pytest.approx(0.607, abs=0.001)       # McNemar, 6 against 9
    assert found["cost_ratio_24h"] == 1.135
    assert sum(found["verdicts"].values()) == 18
    assert len(list((folder / "figures").glob("10_*.png"))) == 6


@pytest.mark.parametrize("line", [  # what the prose says, as the cells print it
    "14 of 15 ratios follow from their row",
    "20 of 84 points are below their floor",
    "from QPS 1 to 2 TTFT falls in 9 of 12 series; from 2 to 16 it then stays within a factor of 1.40",
    "3 of the 20 points are within 5 % of their floor",
    "falls exactly where a bf16 cache fits: 10 of 10; with fp8 on the TPU: 9 of 10",
    "2.72 x 4.79 x 1.81 = 23.66",
    "GPU 130% of one server; TPU, were it cold, 44%",
    "TPU: sustains 2.74 requests/s", "GPU: sustains 2.71 requests/s",
    "at equal use of their peaks it is 1.22 times cheaper",
    "('TPU-trained', [50, 5, 0, 12, 89])", "('GPU-trained', [39, 8, 0, 8, 101])",
    "z = 4.46", "90 recomputed claims: 55 match, 35 do not",
    "train + 24 h: 572.59 against 650.11 USD, ratio 1.135",
])
def test_prose_and_cells_agree(whole, line):
    assert line in whole[1]
