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

from serving import physics
from helpers.stats import sign_flip_p

NOTEBOOK = "10_published.py"
PUBLISHED = ROOT / "data" / "published"
implied_service, random_floors, services_at_random, burst_speed = load(
    NOTEBOOK, "implied_service", "random_floors", "services_at_random", "burst_speed")
sampling_z, pass_at_1, ratio_claim = load(NOTEBOOK, "sampling_z", "pass_at_1", "ratio_claim")


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


@settings(deadline=None)
@given(service=st.floats(0.001, 2), rate=st.floats(0.2, 64), n=st.integers(1, 40))
def test_services_at_random_invert_the_queue_of_each_draw(service, rate, n):
    """The median of one draw, given back: that draw's service is the one that made it."""
    medians = random_floors(n, rate, service, 3, np.random.default_rng(5))
    for draw, median in enumerate(medians):
        found = services_at_random(median, n, rate, 3, 5)
        assert found[draw] == pytest.approx(service, rel=1e-6)


def test_random_gaps_make_a_queue_that_even_gaps_do_not():
    """0.694 s of work, once a second: evenly spaced nobody waits, at random the median does."""
    assert physics.median_ttft_floor_fcfs(30, 1.0, 0.694) == pytest.approx(0.694)
    low, middle, high = np.quantile(
        random_floors(30, 1.0, 0.694, 4_000, np.random.default_rng(0)), [0.05, 0.5, 0.95])
    assert (low, middle, high) == pytest.approx((0.70, 1.02, 1.46), abs=0.04)


def test_only_the_slow_end_of_the_curve_tells_how_long_the_answers_were():
    """16k: n x m of 7 x 512 and 7 x 256 both fit 64 requests/s; at 1/s only 256 does."""
    import pandas as pd
    sweep = pd.read_csv(PUBLISHED / "qps_sweep_digitized.csv")
    sweep = sweep[sweep.input_tokens == "~16k"].set_index(["device", "qps", "metric"]).value
    for side, tpot in (("tpu", 0.0135), ("gpu", 0.019)):
        for rate, fits in ((64, (256, 512)), (1, (256,))):
            for length in (256, 512):
                first = sweep[side, rate, "ttft"] / 1e3
                ratio = burst_speed(7, length, rate, first, tpot) / sweep[side, rate,
                                                                          "output_throughput"]
                assert (abs(ratio - 1) < 0.06) == (length in fits), (side, rate, length, ratio)


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
    busy = found["in_progress_at_1_per_second"]  # 30 x 512 over the speed, less 30 s of sending
    assert busy == pytest.approx({"tpu": 15360 / 427.8 - 30, "gpu": 15360 / 392.2 - 30}, abs=0.1)
    assert f"about {busy['tpu']:.0f} (TPU) and {busy['gpu']:.0f} (GPU)" in (
        PUBLISHED / "corrections.csv").read_text()
    ratio = found["cold_ratio_90"]
    assert ratio["4096"] == [2.72, 2.72]  # no queue: 301.2 / 110.7
    assert ratio["8192"][1] < 780.4 / 368 and ratio["15360"][0] < 7344 / 1978 < ratio["15360"][1]
    assert found["share_of_peak_with_padding"] == pytest.approx(0.255, abs=0.001)
    low, even, high = found["break_even_million_tokens"]
    assert even == pytest.approx(63.12 / (21.52 / 5.0508 - 22.12 / 5.364), abs=1)
    assert low > 2 * even and high < even / 1.5  # 2 % of throughput either way
    parts = list(found["headline_parts"].values())
    assert parts == pytest.approx([2.72, 4.79, 1.81], abs=0.01)
    assert np.prod(parts) == pytest.approx(1443 / 61, rel=1e-3)
    assert found["pass@1_difference"] == pytest.approx(44 / 780, abs=1e-4)
    assert found["sign_flip_p"] == pytest.approx(0.0046, abs=0.0004)  # by random signs
    assert found["pass@5_p"] == pytest.approx(0.607, abs=0.001)       # McNemar, 6 against 9
    assert found["cost_ratio_24h"] == 1.135
    assert found["claims"] == {"match": 55, "substantive": 24, "rounding": 6, "draft": 5}
    assert len(list((tmp_path / "figures").glob("10_*.png"))) == 5


def test_the_logs_of_a_burst_agree_with_themselves():
    """Throughput and latencies of one run imply the same seconds, within a per cent."""
    import pandas as pd
    burst = pd.read_csv(PUBLISHED / "bench_small_burst.csv").set_index("metric")[["tpu", "gpu"]].astype(float)
    by_latency = (burst.loc["median_ttft"] + (burst.loc["output_len"] - 1) * burst.loc["median_tpot"]) / 1e3
    by_rate = burst.loc["prompts"] * burst.loc["output_len"] / burst.loc["output_throughput"]
    assert (abs(by_latency / by_rate - 1) < 0.01).all()


def test_the_tpus_loss_curve_ends_where_the_notebook_says():
    import pandas as pd
    loss = pd.read_csv(PUBLISHED / "loss_curve_digitized.csv")
    curve = loss[loss.series == "tpu_smooth20"]
    last = curve[curve.progress >= 0.9].value
    assert 0.115 < last.min() < last.max() < 0.145  # 0.12 to 0.14
    middle = curve[(curve.progress >= 0.1) & (curve.progress < 0.55)].value.mean()
    assert abs(middle - curve[curve.progress >= 0.55].value.mean()) < 0.02  # flat from a tenth on


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
    assert len(lines) == 10 and f"main ones of {len(stored)}" in source
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
