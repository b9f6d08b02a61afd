"""The floors: FLOP against XLA, bytes and published floors, queues against brute force."""

import dataclasses
import json

import numpy as np
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from tables import architecture, physics
from tables.hardware import chip


def config(name):
    return json.loads((ROOT / "data" / "configs" / f"gemma4_{name}.json").read_text())


BIG = config("31b")


@settings(deadline=None)
@given(tokens=st.integers(1, 60), window=st.one_of(st.none(), st.integers(1, 20)))
def test_attention_pairs_against_the_mask(tokens, window):
    query, key = np.indices((tokens, tokens))
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    layer = dataclasses.replace(architecture.layers(BIG)[0], window=window)
    assert layer.pairs(tokens) == mask.sum()
    assert layer.keys(tokens) == mask[-1].sum()


def test_prefill_is_the_sum_of_its_tokens():
    """Reading token by token costs the same, but for the logits of all tokens instead of one."""
    tokens = 1_100  # beyond the window of 1,024
    stepwise = sum(physics.decode_flops(BIG, 1, context) for context in range(1, tokens + 1))
    logits = 2 * physics.parameters(BIG)["embedding"]
    assert stepwise - (tokens - 1) * logits == physics.prefill_flops(BIG, tokens)


def test_flops_against_xla():
    """XLA's own count of a forward pass, less the attention that it computes but masks away."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.models.gemma4 import model

    shape = dataclasses.replace(
        model.ModelConfig.gemma4_31b(),
        num_layers=6,
        num_embed=512,
        embed_dim=128,
        hidden_dim=512,
        num_heads=8,
        head_dim=32,
        num_kv_heads=4,
        num_global_kv_heads=2,
        global_key_size=64,
        sliding_window_size=16,
    )
    text = dict(
        BIG["text_config"],
        vocab_size=512,
        hidden_size=128,
        intermediate_size=512,
        num_attention_heads=8,
        head_dim=32,
        num_key_value_heads=4,
        sliding_window=16,
        num_global_key_value_heads=2,
        global_head_dim=64,
        num_hidden_layers=6,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    network = model.Gemma4(shape, rngs=nnx.Rngs(0))
    tokens = 64
    ids = jnp.zeros((1, tokens), jnp.int32)
    mask = jnp.tril(jnp.ones((1, tokens, tokens), bool))
    graph, state = nnx.split(network)
    forward = jax.jit(
        lambda state: nnx.merge(graph, state)(ids, jnp.arange(tokens)[None], None, mask)[0]
    )
    counted = forward.lower(state).compile().cost_analysis()["flops"]
    square = sum(
        4 * layer.heads * layer.head_dim * tokens**2 for layer in architecture.layers(text)
    )
    kept = sum(
        4 * layer.heads * layer.head_dim * layer.pairs(tokens)
        for layer in architecture.layers(text)
    )
    logits = 2 * (tokens - 1) * physics.parameters(text)["embedding"]
    expected = physics.prefill_flops(text, tokens) + square - kept + logits
    assert expected <= counted <= 1.06 * expected  # the rest: norms, softmax, RoPE, activations


def test_audited_decode_floors():
    bandwidth = {"tpu": 8 * chip("v6e").bandwidth, "gpu": 2 * chip("h100").bandwidth}
    for batch, tokens, out, tpu, gpu in (
        (64, 128, 256, 6.0, 11.5),
        (30, 4096, 512, 8.3, 14.6),
        (30, 8192, 512, 9.8, 16.1),
        (7, 15360, 256, 6.5, 11.5),
    ):
        for side, tp, expected in (("tpu", 8, tpu), ("gpu", 2, gpu)):
            moved = 62e9 + batch * physics.kv_bytes(BIG, tokens + out // 2, tp=tp)  # the checkpoint
            assert round(1e3 * physics.tpot_floor(moved, bandwidth[side]), 1) == expected


def test_kv_bytes():
    assert physics.kv_bytes_per_token(BIG) == {"sliding": 819_200, "full": 81_920}
    assert physics.kv_bytes_per_token(BIG, tp=8) == {"sliding": 819_200, "full": 163_840}
    assert physics.kv_bytes_per_token(BIG, dtype_bytes=1)["full"] == 40_960
    assert physics.kv_bytes(BIG, 500) == 500 * 901_120
    assert physics.kv_bytes(BIG, 5000) == 1024 * 819_200 + 5000 * 81_920
    e2b = physics.kv_bytes_per_token(
        config("e2b")
    )  # 12 sliding and 3 full layers own their K and V
    assert e2b == {"sliding": 12 * 2 * 256 * 2, "full": 3 * 2 * 512 * 2}


def test_decode_reads_each_weight_once_and_each_cache():
    assert physics.decode_bytes(BIG, 0, 10) == 2 * physics.parameters(BIG)["total"]
    one = physics.decode_bytes(BIG, 1, 4096) - physics.decode_bytes(BIG, 0, 4096)
    assert one == physics.kv_bytes(BIG, 4096)
    e2b = config("e2b")  # its table of per-layer inputs is looked up, not read
    assert physics.decode_bytes(e2b, 0, 1) < 2 * physics.parameters(e2b)["total"] - 2 * 2.3e9


@settings(deadline=None)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.floats(1e-3, 5))
def test_queue_against_a_simulation_in_small_steps(gaps, service):
    arrivals = list(np.cumsum(gaps))
    waits = physics.fcfs_ttft(arrivals, service)
    assert all(wait >= service - 1e-9 for wait in waits)
    finish = [a + w for a, w in zip(arrivals, waits, strict=True)]
    assert all(b - a >= service - 1e-9 for a, b in zip(finish, finish[1:], strict=False))
    work = [
        max(arrivals[i] + (j - i + 1) * service for i in range(j + 1)) for j in range(len(finish))
    ]
    assert np.allclose(
        finish, work
    )  # the k-th cannot end before any earlier arrival's work is done
