"""10: its statistics against brute force, its numbers against an independent computation."""

import json

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, page

from appendix.published import sampling_z
from tables import physics
from tables.hardware import chip

pytestmark = pytest.mark.laboratory

NOTEBOOK = "appendix/10_published.py"
PUBLISHED = ROOT / "data" / "published"
CONFIG = json.loads((ROOT / "data" / "configs" / "gemma4_31b.json").read_text())
PEAK = {"tpu": 8 * chip("v6e").flops, "gpu": 2 * chip("h100").flops}


def random_medians(n, rate, service, draws, rng):
    """Median TTFT of n requests, first come, first served, at random gaps: one per draw.

    The gaps are exponential and scaled so that the last request is sent at n / rate seconds, as
    `vllm bench serve` does (benchmarks/serve.py, `get_request`). `service`: seconds, one or for
    each draw.
    """
    sent = rng.exponential(1.0, (draws, n)).cumsum(axis=1)
    sent *= n / rate / sent[:, -1:]
    free, waits = np.zeros(draws), []
    for arrival in sent.T:
        free = np.maximum(free, arrival) + service
        waits.append(free - arrival)
    return np.median(waits, axis=0)


def sweep(metric="ttft"):
    """The digitized sweep; `n` is what the rows called 16k fit (the test below)."""
    table = pd.read_csv(PUBLISHED / "qps_sweep_digitized.csv")
    table = table[table.metric == metric].copy()
    table["tokens"] = table.input_tokens.replace("~16k", "15360").astype(int)
    return table.assign(n=np.where(table.tokens == 15360, 7, 30))


def floor(side, tokens):
    return physics.prefill_flops(CONFIG, tokens) / PEAK[side]


def test_the_sixteen_points_stay_too_fast_at_random_gaps():
    """What 10 marks with even gaps and a factor of 1.2 is below the floor in 99% of the draws."""
    rng, marked, possible = np.random.default_rng(0), [], []
    for row in sweep().itertuples():
        service = floor(row.device, row.tokens)
        floor_ms = 1e3 * physics.median_ttft_floor_fcfs(row.n, row.qps, service)
        marked.append(floor_ms > 1.2 * row.value)
        medians = 1e3 * random_medians(row.n, row.qps, service, 4_000, rng)
        possible.append((medians <= row.value).mean())
    assert sum(marked) == 16
    assert max(share for share, mark in zip(possible, marked, strict=True) if mark) < 0.01


@pytest.mark.parametrize("tokens, low, high", [
    (4096, 2.72, 2.72), (8192, 1.4, 2.0), (15360, 2.3, 3.8)])
def test_cold_ratios_that_random_gaps_allow(tokens, low, high):
    """The prefill times of the plotted medians at QPS 1, per draw of the gaps: middle 90%."""
    found = {}
    for row in sweep().query("qps == 1 and tokens == @tokens").itertuples():
        least, most = np.zeros(1_000), np.full(1_000, row.value / 1e3)
        for _ in range(30):
            middle = (least + most) / 2
            medians = random_medians(row.n, 1, middle, 1_000, np.random.default_rng(5))
            short = medians < row.value / 1e3
            least, most = np.where(short, middle, least), np.where(short, most, middle)
        found[row.device] = most
    spread = np.quantile(found["gpu"] / found["tpu"], [0.05, 0.95])
    assert spread == pytest.approx((low, high), abs=0.12)


def test_only_the_slow_end_of_the_curve_tells_how_long_the_answers_were():
    """16k: 7 x 512 and 7 x 256 both fit 64 requests/s, at 1/s only 256 does; 30 x 512 neither."""
    points = pd.concat([sweep(), sweep("output_throughput")])
    points = points[points.tokens == 15360].set_index(["device", "qps", "metric"]).value
    for side, tpot in (("tpu", 0.0135), ("gpu", 0.019)):
        for rate, fits in ((64, {(7, 256), (7, 512)}), (1, {(7, 256)})):
            for n, length in ((7, 256), (7, 512), (30, 512)):
                first = points[side, rate, "ttft"] / 1e3
                speed = n * length / (n / rate + first + (length - 1) * tpot)
                near = abs(speed / points[side, rate, "output_throughput"] - 1) < 0.06
                assert near == ((n, length) in fits), (side, rate, n, length)


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


def test_results_of_the_whole_notebook(tmp_path):
    """The notebook as a script, against numbers that were computed another way before."""
    run = page(NOTEBOOK, tmp_path)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr, run.stderr
    found = json.loads((tmp_path / "published.json").read_text())
    assert found["too_fast_in_sweep"] == 16
    parts = list(found["headline_parts"].values())
    assert parts == pytest.approx([2.72, 4.79, 1.81], abs=0.01)
    assert np.prod(parts) == pytest.approx(1443 / 61, rel=1e-3)
    assert found["pass@1_difference"] == pytest.approx(44 / 780, abs=1e-4)
    assert found["sign_flip_p"] == pytest.approx(0.0046, abs=0.0004)  # by random signs
    assert found["z"] == 4.46 and found["cost_ratio_24h"] == 1.135
    assert found["claims"] == {"match": 55, "substantive": 24, "rounding": 6, "draft": 5}


def test_evidence_of_the_verdicts():
    """Numbers that verdicts.csv states and 10 does not compute."""
    verdicts = pd.read_csv(PUBLISHED / "verdicts.csv")
    assert set(verdicts.verdict) == {"holds", "does not hold", "cannot be known"}
    assert verdicts.notna().all().all() and not verdicts.claim.duplicated().any()
    weights = 2 * physics.parameters(CONFIG)["total"]
    assert [round(3 * weights / speed, 3) for speed in (11.06e12, 6.7e12)] == [0.017, 0.027]
    shares = []  # of the floor in the measured time, in percent
    for chips, bandwidth, tpot in ((8, 1.638e12, 18.7e-3), (2, 3.35e12, 18.4e-3)):
        moved = physics.decode_bytes(CONFIG, 64, 128 + 128, tp=chips)
        shares.append(round(100 * physics.tpot_floor(moved, chips * bandwidth) / tpot))
    assert shares == [32, 62]
    loss = pd.read_csv(PUBLISHED / "loss_curve_digitized.csv").query("series == 'tpu_smooth20'")
    middle = loss[(loss.progress >= 0.1) & (loss.progress < 0.55)].value.mean()
    assert abs(middle - loss[loss.progress >= 0.55].value.mean()) < 0.02  # flat from a tenth on
