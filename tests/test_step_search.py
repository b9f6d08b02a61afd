"""tools/step_search: its variants compute what they replace, and the stored table is its own.

    .venv/bin/python -m pytest tests/test_step_search.py
"""

import csv
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT

from helpers import gemma

sys.path.insert(0, str(ROOT / "tools"))
import step_search  # noqa: E402


@pytest.mark.parametrize("window", [None, 100])
def test_a_softmax_normalised_late_is_the_same_attention(window):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 256, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (2, 256)), axis=1))
    mask = jnp.tril(ids[:, :, None] == ids[:, None, :])

    def value(attend, q, k, v):
        mixed = attend(q, k, v, mask, window, 64)
        return jnp.sum(jnp.sin(mixed)), mixed
    ours, theirs = (jax.value_and_grad(value, argnums=(1, 2, 3), has_aux=True)(attend, q, k, v)
                    for attend in (step_search.attend_late, gemma.attend))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_gelu_written_by_hand_is_jax_s():
    gate, up = jax.random.normal(jax.random.key(0), (2, 500)) * 3
    ours, theirs = (jax.grad(lambda g, u, f=f: jnp.sum(jnp.cos(f(g, u))), argnums=(0, 1))(gate, up)
                    for f in (step_search.gated, lambda g, u: jax.nn.gelu(g) * u))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_stored_rows_are_the_tool_s_and_add_up():
    known = {step_search.name_of(*row) for row in step_search.MLP}
    known |= {step_search.step_name(*row) for row in step_search.STEP}
    assert len(known) == len(step_search.MLP) + len(step_search.STEP)
    with open(step_search.TABLE, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows and {row["program"] for row in rows} <= known
    for row in rows:
        parts = float(row["compute"]) + float(row["waits"])
        assert float(row["milliseconds"]) == pytest.approx(parts, rel=0.01, abs=0.02)
        assert row["options"] in step_search.OPTIONS
