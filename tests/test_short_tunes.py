"""The small experiments of 02 and 04: what a mask in the wrong place trains, and their loop."""

import re

import jax
import jupytext
import numpy as np
import pandas as pd
import pytest
import random_gemma
from conftest import ROOT
from flax import nnx

import verilog
from appendix import masks, rounded, scales
from appendix.tuning import Tuning
from helpers import gemma, train

pytestmark = pytest.mark.laboratory

# Two examples and padding: the first has ten tokens and four of answer, the second eight and three.
SEGMENTS = np.array([1] * 10 + [2] * 8 + [0] * 2)
ANSWERS = np.array([0] * 6 + [1] * 4 + [0] * 5 + [1] * 3 + [0] * 2, bool)
ROW = train.Batch(tokens=np.arange(20), loss_mask=ANSWERS, segment_ids=SEGMENTS,
                  positions=np.array([*range(10), *range(8), 0, 0]))


def test_the_right_mask_is_that_of_02():
    assert masks.mask_of(ROW, "answers") is ROW.loss_mask


def test_prompts_are_trained_too_but_for_what_nothing_predicts():
    trained = masks.mask_of(ROW, "prompts, too")
    assert np.flatnonzero(trained).tolist() == [*range(1, 10), *range(11, 18)]


def test_a_late_mask_stays_inside_its_example():
    """Both answers are shorter than six tokens, so that a mask six tokens late trains none."""
    assert not masks.mask_of(ROW, "six tokens late").any()
    long = np.array([0] * 2 + [1] * 8 + [0] * 10, bool)
    row = train.Batch(tokens=ROW.tokens, loss_mask=long, segment_ids=SEGMENTS,
                      positions=ROW.positions)
    assert np.flatnonzero(masks.mask_of(row, "six tokens late")).tolist() == [8, 9]


def test_the_stored_scales_are_those_of_the_plan():
    for path in sorted((ROOT / scales.STORED).glob("*.csv")):
        table = pd.read_csv(path)
        assert tuple(table.scale) == scales.SCALES and {0.0, 1.0} <= set(table.scale), path.name
        assert set(table.steps) == {masks.STEPS} and set(table.seed) == {int(path.stem)}
        assert table.greedy.between(0, table.problems).all() and set(table.problems) == {38}
        passing = table.set_index("scale").greedy
        assert passing[0.0] < passing[1.0], "what was trained counts"
        assert max(passing[0.5], passing[1.5]) < passing[1.0], "04 says so"


def test_what_04_says_of_four_bits_is_what_is_stored(monkeypatch, capsys):
    table = pd.read_csv(ROOT / rounded.STORED)
    greedy = table.groupby("weights").greedy.sum()
    mean, low, high = rounded.compared(table)["difference"]
    cell, = (cell for cell in jupytext.read(ROOT / "04_merge.py").cells
             if cell.cell_type == "code" and "data/rounded" in cell.source)
    monkeypatch.chdir(ROOT)
    exec(cell.source, {"pd": pd, "verilog": verilog})
    said = capsys.readouterr().out
    assert table.problem.nunique() == 38 and "of 38 problems pass, asked greedily" in said
    for weights in ("four bits", "bfloat16"):
        assert re.search(rf"{weights} +{greedy[weights]}\n", said), said
    points = f"{100 * mean:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
    assert points.replace("-0.0", "+0.0") in said


# ── The loop ──

def tuning_of_a_small_model():
    """A fine-tune of two random layers on two rows of 24 tokens, always the same two."""
    config = gemma.config_from_hf(random_gemma.SHALLOW, dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.local_devices(backend="cpu")[:1])
    model = gemma.gemma4.Gemma4(config, rngs=nnx.Rngs(0))
    model = gemma.inject_lora(model, 4, 8.0, mesh, seed=1)
    draw = np.random.default_rng(5)
    rows = []
    for _ in range(2):
        rows.append(train.Batch(
            tokens=draw.integers(1, 320, 24).astype(np.int32),
            loss_mask=np.arange(24) > 0,  # nothing predicts the first
            segment_ids=np.ones(24, np.int32),
            positions=np.arange(24, dtype=np.int32)))
    optimizer = train.make_optimizer(1e-2, 0.0, 1.0)
    batches = train.make_dataset(rows, 1, 2, 0)
    return Tuning(model, mesh, optimizer, train.make_loss(23), batches), rows


def adapters_of(tuning):
    """Copies of the adapters that its model holds."""
    state = nnx.state(tuning.model, nnx.LoRAParam)
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
def test_the_loop_learns_and_goes_on_after_its_adapters_were_taken():
    """A step uses up what it gets: what `finish` put into the model must outlive the next ones."""
    tuning, rows = tuning_of_a_small_model()
    exam = train.validation_batch(rows, 2, 2)
    before = tuning.evaluate(exam)
    tuning.run(2)
    tuning.finish()
    taken = adapters_of(tuning)
    tuning.run(2)
    for old, new in zip(taken, adapters_of(tuning), strict=True):
        np.testing.assert_array_equal(old, new)
    assert len(tuning.losses) == 4 and tuning.losses[0] == pytest.approx(before, rel=1e-5)
    assert tuning.evaluate(exam) < before
    tuning.finish()
    last = adapters_of(tuning)
    assert any((old != new).any() for old, new in zip(taken, last, strict=True))
