"""The small experiments of 02 and 04: which tokens a mask in the wrong place trains."""

import numpy as np
import pytest

from appendix import masks, scales
from helpers import train

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


def test_the_scales_hold_the_one_that_was_trained_and_none():
    assert {0.0, 1.0} <= set(scales.SCALES)
