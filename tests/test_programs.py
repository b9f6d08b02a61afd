"""Parts of 03's programs: the loss in chunks, the per-layer table's layout, the greedy answers."""

import functools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import random_gemma
from conftest import ROOT
from flax import nnx

from helpers import gemma, pictures, programs, train
from tables import architecture

LENGTH = 256


@functools.cache
def small(shape, folder):
    """(model with adapters whose B is random, mesh) in float32, on one device."""
    base = random_gemma.write(folder, getattr(random_gemma, shape))
    config = gemma.config_from_hf(base, dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    model = gemma.place(gemma.load_base(base, config, mesh), mesh)
    model = gemma.inject_lora(model, 4, 8.0, mesh)
    rng = np.random.default_rng(0)
    for pair in gemma.adapted_modules(model).values():
        value = pair["b"].get_value()
        pair["b"].set_value(jnp.asarray(rng.normal(size=value.shape) * 0.05, jnp.float32))
    return model, mesh


def full_rows(rows, trained):
    """A `Batch` [B, T] of random tokens, two examples a row; the last `trained` are trained."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(3, 320, (rows, LENGTH)).astype(np.int32)
    at = np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1))
    return train.Batch(tokens, at >= LENGTH - trained, at // 100 + 1, at % 100)


def loss_and_gradient(model, mesh, rows, capacity):
    graph, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)

    def mean(adapters):
        loss, tokens = train.make_loss(capacity)(nnx.merge(graph, adapters, frozen), rows)
        return loss / tokens
    with mesh:
        return jax.jit(jax.value_and_grad(mean))(adapters)


# ── The loss in chunks ──

@pytest.mark.parametrize("shape", ["SHALLOW", pytest.param("E2B", marks=pytest.mark.slow)])
@pytest.mark.parametrize("trained", [LENGTH - 1, 130])
def test_a_loss_in_chunks_is_the_loss(tmp_path, monkeypatch, shape, trained):
    """130 trained tokens leave most of the second chunk without any."""
    model, mesh = small(shape, tmp_path)
    rows = full_rows(2, trained)
    whole = loss_and_gradient(model, mesh, rows, LENGTH - 1)
    monkeypatch.setattr(train, "chunk_of", lambda row_length: 128)
    parts = loss_and_gradient(model, mesh, rows, LENGTH - 1)
    assert parts[0] == pytest.approx(float(whole[0]), rel=1e-6)
    largest = max(float(jnp.abs(one).max()) for one in jax.tree.leaves(whole[1]))
    for one, other in zip(jax.tree.leaves(whole[1]), jax.tree.leaves(parts[1]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * largest)


def test_one_chunk_is_no_loop():
    """So what was compiled, and every stored loss, stays as it was."""
    function, array = jnp.negative, jnp.ones((2, 1_024))
    for most, loops in ((1_024, False), (1_023, True)):
        traced = jax.make_jaxpr(functools.partial(train.in_chunks, function, most))(array)
        assert ("scan" in str(traced)) == loops
    assert [train.chunk_of(length) for length in (512, 2_048, 4_096)] == [1_024, 1_024, 2_048]


def test_answers_that_fill_the_rows_need_no_more_memory_than_those_that_fill_half():
    """A vocabulary of which 1,024 positions take 256 MiB is nearly all that this step needs."""
    shape = random_gemma.SHALLOW | {"vocab_size": 65_536, "sliding_window": 1_024}
    config = gemma.config_from_hf(shape, dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])

    def temporaries(capacity):
        model = gemma.abstract_base(config, mesh)
        gemma.use_block_attention(model, 1_024)
        model = gemma.inject_lora(model, 4, 8.0, mesh)
        lowered = train.lower_step(model, optax.inject_hyperparams(optax.sgd)(1.0),
                                   train.make_loss(capacity), mesh, (2, 1, 2_048))
        return lowered.compile().memory_analysis().temp_size_in_bytes
    half, full = temporaries(1_024), temporaries(2_047)
    assert half > 2 * 2**28 and full < 1.1 * half


# ── The per-layer table's layout ──

LIBTPU = ROOT / ".libtpu" / "libtpu" / "libtpu.so"


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU.exists(), reason="no libtpu on this machine")
def test_a_tpu_copies_no_per_layer_table(tmp_path):
    """In step, evaluation and answers; where the TPU chooses the layout, it does copy it."""
    script = ROOT / "tests" / "compile_table.py"
    done = subprocess.run([sys.executable, script, random_gemma.write(tmp_path, TABLE)],
                          capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2_000:]
    copied = json.loads(done.stdout.splitlines()[-1])
    assert copied == {"step": 0, "evaluation": 0, "answers": 0, "by default": 1}


TABLE = random_gemma.E2B | {
    "vocab_size": 4_096, "vocab_size_per_layer_input": 4_096, "hidden_size_per_layer_input": 128,
    "hidden_size": 128}


# ── Answers ──

def continued(model, mesh, prompt, count):
    """The likeliest `count` tokens after a prompt, each by a forward pass over all of them."""
    ids, total = list(prompt), len(prompt) + count
    graph, state = nnx.split(model)
    mask = np.tril(np.ones((1, total, total), bool))
    places = np.arange(total)[None]
    forward = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids, places, None, mask)[0])
    with mesh:
        for _ in range(count):
            padded = np.array([ids + [0] * (total - len(ids))], np.int32)
            ids.append(int(forward(state, padded)[0, len(ids) - 1].argmax()))
    return ids[len(prompt):]


@pytest.mark.parametrize("shape", ["SHALLOW", pytest.param("E2B", marks=pytest.mark.slow)])
def test_a_prompt_that_is_read_at_once_gets_the_same_answer(tmp_path, shape):
    """Longer and shorter than the window of 16; 45 tokens are read as 32 at once and 13 more."""
    model, mesh = small(shape, tmp_path)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, 320, count).tolist() for count in (45, 33)]
    assert gemma.read_at_once(np.array([45, 33])) == 32
    answers = gemma.greedy(model, prompts, 12, [], mesh)
    assert answers == [continued(model, mesh, prompt, 12) for prompt in prompts]
    end = answers[0][3]
    short, = gemma.greedy(model, prompts[:1], 12, [end], mesh)
    assert short == answers[0][:answers[0].index(end) + 1]
    one, = gemma.greedy(model, [prompts[0][:16]], 4, [], mesh)  # nothing but what is read at once
    assert one == continued(model, mesh, prompts[0][:16], 4)


# ── What one device holds (03, section 4) ──

def adapters_per_device(config, rank, fsdp, tp):
    """GiB of float32 adapters: what leads back to the embedding's width has its two cuts swapped.
    """
    numbers = 0
    for module in architecture.modules(config):
        a, b = (math.prod(shape) for shape in module.adapter(rank))
        back = module.kind in ("attn_vec_einsum", "down_proj")
        numbers += a / (tp if back else fsdp) + b / (fsdp if back else tp)
    return 4 * numbers / 2**30


MESHES = ((1, 4), (2, 2), (4, 1))


def test_what_a_device_holds_of_the_tiny_model():
    cfg = train.Settings(rank=16, alpha=32.0, dtype="float32", attention_block=128)
    config = gemma.config_from_hf(ROOT / "assets/tiny_gemma4", dtype="float32")
    text = architecture.text_config(architecture.read_config(ROOT / "assets/tiny_gemma4"))
    assert set(gemma.possible_meshes(config, 4)) == set(MESHES)
    whole = 4 * architecture.parameters(text)["total"] / 2**30
    held_by = programs.by_mesh(config, cfg)
    assert list(held_by) == [f"(fsdp, tp) = {mesh}" for mesh in MESHES]
    for fsdp, tp in MESHES:
        mesh = gemma.make_mesh(config, (fsdp, tp), jax.devices()[:4])
        held = programs.per_device(programs.abstract(config, cfg, mesh))
        assert held == held_by[f"(fsdp, tp) = {(fsdp, tp)}"]
        assert held["adapters"] == pytest.approx(adapters_per_device(text, 16, fsdp, tp))
        assert held["base"] == pytest.approx(whole / 4, rel=0.01)  # norms lie on every device


def test_what_03_says_of_the_31b_follows_from_its_shapes():
    config = architecture.read_config(ROOT / "data/configs/gemma4_31b.json")
    assert gemma.possible_meshes(gemma.config_from_hf(config), 8) == [(2, 4), (4, 2), (8, 1)]
    page = " ".join((ROOT / "03_train.py").read_text().replace("\n#", " ").split())
    whole = architecture.parameters(architecture.text_config(config))["total"]
    assert f"weights take {2 * whole / 2**30:.0f} GiB without the part that reads images" in page
    share = adapters_per_device(config, 64, 1, 1) * 2**30 / 4 / whole
    assert f"in the 31B it's {share:.1%} with rank 64" in page


def test_the_adapters_table_says_which_layers():
    config = gemma.config_from_hf(ROOT / "assets/tiny_gemma4", dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    model = programs.abstract(config, train.Settings(rank=4), mesh)
    table = pictures.adapter_table(gemma.adapted_modules(model), gemma.layer_kinds(config))
    layers = table.groupby("module")["in layers"].agg(list).to_dict()
    assert layers["k_einsum"] == ["full"] and layers["kv_einsum"] == ["sliding"]
    assert layers["q_einsum"] == ["sliding", "full"] and layers["up_proj"] == ["full and sliding"]
    assert table.modules.sum() == 36 and all(table.makes)


def test_few_steps_are_called_few():
    assert train.steps_in_words(train.Settings(epochs=0.6), 367) == "367 steps, 0.6 epochs"
    assert "teach next to nothing" in train.steps_in_words(train.Settings(), 19)
    assert "nothing" not in train.steps_in_words(train.Settings(max_steps=5), 5)
