"""14: what its cells print is what its text says."""

import re

import pytest
from conftest import page

pytestmark = pytest.mark.laboratory


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """All that the page prints, as a program."""
    done = page("appendix/14_jax.py", tmp_path_factory.mktemp("run"))
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


def test_a_second_call_of_the_same_shape_traces_nothing(said):
    assert said.count("traced for") == 2


def test_a_has_no_gradient_and_a_step_makes_the_loss_smaller(said):
    assert "{'a': 0.0, 'b': " in said
    before, after = re.search(r"loss ([\d.]+), after one small step ([\d.]+)", said).groups()
    assert float(after) < float(before)


def test_the_mean_of_means_is_another_number(said):
    pattern = r"32 tokens that count: ([\d.]+); mean of both means: ([\d.]+)"
    once, means = re.search(pattern, said).groups()
    assert float(means) > 2 * float(once)


def test_a_quarter_lies_on_each_device_and_heads_limit_tp(said):
    assert "(16, 24); a device holds (8, 12)" in said
    assert "tp=8 does not divide the 4 KV heads" in said and said.count("divides everything") == 3


def test_a_step_that_returns_the_frozen_weights_needs_them_twice(said):
    changed, whole = (int(number.replace(",", "")) for number in re.findall(
        r"([\d,]+) bytes of fresh outputs", said))
    frozen = 4 * (16 * 24 + 24)
    assert changed < 100 and frozen <= whole - changed < frozen + 100
