"""helpers/four_bits.py: the arithmetic, the folders, and what compressed-tensors, transformers and
vLLM read."""

import json
import platform
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import random_gemma
from conftest import needs_serve, serve
from safetensors.numpy import load_file, save_file

import helpers
from helpers import four_bits, weights

SCRIPT = "tests/four_bits_unpack.py"


def bfloat16(rows):
    return np.asarray(rows).astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model like the 31B: some layers have no projection to values."""
    return random_gemma.write(tmp_path_factory.mktemp("four") / "model", random_gemma.TINY)


@pytest.fixture(scope="module")
def packed(model):
    out = model.parent / "packed"
    errors = four_bits.export(model, out)
    return out, errors


@pytest.fixture(scope="module")
def back(packed):
    out = packed[0].parent / "back"
    four_bits.dequantize(packed[0], out)
    return out


# ── The arithmetic ──

def test_what_is_packed_comes_out_again():
    numbers = np.random.default_rng(0).integers(-8, 8, (5, 64)).astype(np.int8)
    ones = bfloat16(np.ones((5, 2)))
    assert (four_bits.restore(four_bits.pack(numbers), ones) == numbers).all()


def test_the_error_is_less_than_that_of_the_usual_step():
    """The usual step is max|w| / 7.5 (compressed-tensors' own, and google's files')."""
    rows = bfloat16(np.random.default_rng(0).normal(size=(64, 320))).astype(np.float32)
    ours = four_bits.restore(four_bits.pack(four_bits.quantize(rows)[0]),
                             four_bits.quantize(rows)[1]).astype(np.float32)
    groups = rows.reshape(64, -1, 32)
    step = np.abs(groups).max(-1, keepdims=True) / 7.5
    usual = (np.clip(np.rint(groups / step), -8, 7) * step).reshape(rows.shape)
    error = np.linalg.norm(ours - rows)
    assert error < 0.95 * np.linalg.norm(usual - rows)


@pytest.mark.parametrize("peak", range(1, 9))
def test_weights_on_four_bit_steps_come_back_as_they_were(peak):
    """So a `-qat-q4_0-unquantized` model loses nothing before it is tuned.

    The largest weight of a group isn't always at 8 there, see `four_bits.quantize`.
    """
    rng = np.random.default_rng(peak)
    signs = rng.choice([-1, 1], (64, 4, 1))
    numbers = rng.integers(-peak, min(peak, 7) + 1, (64, 4, 32))
    numbers[..., 7:8] = -8 if peak == 8 else peak * signs
    steps = bfloat16(rng.normal(size=(64, 4, 1))).astype(np.float32)
    rows = bfloat16(numbers * steps).reshape(64, 128)
    found, scales = four_bits.quantize(rows)
    restored = four_bits.restore(four_bits.pack(found), scales)
    same = restored.astype(np.float32) == rows.astype(np.float32)
    assert same.mean() > 0.97  # the others differ in their last bit
    np.testing.assert_allclose(
        restored.astype(np.float32), rows.astype(np.float32), rtol=2 ** -7, atol=0)


def test_no_scale_of_a_fine_grid_loses_much_less():
    """Brute force: 400 scales around each group's own, with the nearest numbers of each."""
    rows = bfloat16(np.random.default_rng(3).normal(size=(8, 64))).astype(np.float32)
    numbers, scales = four_bits.quantize(rows)
    ours = four_bits.restore(four_bits.pack(numbers), scales).astype(np.float32)
    ours_lost = np.square(ours - rows).sum()
    groups = rows.reshape(8, 2, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    best = np.inf
    for sign in (-1, 1):
        for share in np.linspace(1 / 9, 1 / 5, 200):
            steps = sign * share * largest
            tried = np.clip(np.rint(groups / steps), -8, 7) * steps
            best = np.minimum(best, np.square(tried - groups).sum(-1))
    assert ours_lost < 1.12 * best.sum()


def test_a_group_of_zeros_stays_zero():
    found, scales = four_bits.quantize(bfloat16(np.zeros((2, 32))))
    assert not four_bits.restore(four_bits.pack(found), scales).any()


# ── Folders ──

def test_all_matrices_of_the_layers_are_packed_and_all_else_is_copied(model, packed):
    out, errors = packed
    before = load_file(model / "model.safetensors")
    after = {}
    for file in weights.files_of(out):
        after |= load_file(file)
    matrices = {name for name in before if ".self_attn." in name or ".mlp." in name}
    matrices = {name for name in matrices if before[name].ndim == 2}
    assert set(errors.tensor) == matrices and errors.error.between(0.05, 0.12).all()
    for name, array in before.items():
        if name in matrices:
            assert after.pop(f"{name}_packed").shape == (array.shape[0], array.shape[1] // 8)
            assert after.pop(f"{name}_scale").shape == (array.shape[0], array.shape[1] // 32)
            assert after.pop(f"{name}_shape").tolist() == list(array.shape)
        else:
            assert after.pop(name).tobytes() == array.tobytes()
    assert not after


def test_the_files_take_four_and_a_half_bits_a_weight(model, packed):
    before = load_file(model / "model.safetensors")
    size = sum(array.size for name, array in before.items() if four_bits.MATRIX.fullmatch(name))
    after = {}
    for file in weights.files_of(packed[0]):
        after |= load_file(file)
    bytes_of = sum(array.nbytes for name, array in after.items()
                   if name.endswith(("_packed", "_scale")))
    assert bytes_of == size * 4.5 / 8


def test_a_second_run_changes_nothing_and_a_cut_file_is_made_again(model, packed, tmp_path, capsys):
    out = tmp_path / "packed"
    shutil.copytree(packed[0], out)
    again = four_bits.export(model, out)
    assert "is current" in capsys.readouterr().out and again.equals(packed[1])
    for text in ("[]", "3", "{", "{}"):
        (out / four_bits.RECORD).write_text(text)
        assert four_bits.export(model, out).equals(packed[1])
    assert "is current" not in capsys.readouterr().out
    file = weights.files_of(out)[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    four_bits.export(model, out)
    assert file.read_bytes() == whole


def test_a_shared_layers_unused_keys_are_packed_too_and_a_tower_is_not(tmp_path):
    """tpu-inference makes K and V for E2B's layers that share, so it looks for them packed."""
    for unused in (True, False):
        model = random_gemma.write(tmp_path / f"e2b-{unused}", random_gemma.E2B,
                                   keep_unused=unused)
        out = tmp_path / f"out-{unused}"
        packed = set(four_bits.export(model, out).tensor)
        last = "model.language_model.layers.5.self_attn.k_proj.weight"
        assert (last in packed) == unused
        names = weights.open_model(out)
        assert not any("vision" in name and "packed" in name for name in names)
        assert not any("per_layer" in name and "packed" in name for name in names)


def test_what_is_refused_says_what_to_do(packed, model, tmp_path):
    with pytest.raises(helpers.UserError, match="is quantized .*Take the original model"):
        four_bits.export(packed[0], tmp_path / "twice")
    with pytest.raises(helpers.UserError, match="isn't a folder that four_bits.export wrote"):
        four_bits.dequantize(model, tmp_path / "plain")
    odd = random_gemma.TINY | {"intermediate_size": 40}
    with pytest.raises(helpers.UserError, match="cut into groups of 32.*Serve merged/"):
        four_bits.export(random_gemma.write(tmp_path / "odd", odd), tmp_path / "out")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(helpers.UserError, match="mine"):
        four_bits.export(model, mine)
    assert (mine / "thesis.txt").exists() and len(list(tmp_path.iterdir())) == 2


def test_a_folder_is_not_unpacked_onto_itself(packed):
    out, _ = packed
    before = weights.fingerprint(out)
    with pytest.raises(helpers.UserError, match="Name another one"):
        four_bits.dequantize(out, out.parent / "." / out.name)
    assert weights.fingerprint(out) == before


def test_nan_is_named(tmp_path):
    model = random_gemma.write(tmp_path / "model", random_gemma.SHALLOW)
    arrays = load_file(model / "model.safetensors")
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    arrays[name][3, 3] = np.nan
    save_file(arrays, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(helpers.UserError, match=f"{name} has NaN"):
        four_bits.export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ── What others read ──

@needs_serve
def test_compressed_tensors_unpacks_the_same_weights(packed, back, tmp_path):
    serve(SCRIPT, "weights", packed[0], tmp_path / "theirs.npz")
    theirs = np.load(tmp_path / "theirs.npz")
    ours = {}
    for file in weights.files_of(back):
        ours |= load_file(file)
    assert set(theirs) == set(packed[1].tensor)
    for name in theirs:
        np.testing.assert_array_equal(ours[name].astype(np.float32), theirs[name], err_msg=name)


@needs_serve
def test_transformers_computes_the_same_with_either_folder(packed, back, tmp_path):
    """It packs out by itself what it finds in four bits."""
    for name, folder in (("packed", packed[0]), ("back", back)):
        serve(SCRIPT, "logits", folder, tmp_path / f"{name}.npz")
    four, plain = (np.load(tmp_path / f"{name}.npz")["logits"] for name in ("packed", "back"))
    assert np.abs(four - plain).max() < 0.02 * plain.std()


@needs_serve
@pytest.mark.slow
def test_vllm_reads_the_settings(packed):
    told = json.loads(serve(SCRIPT, "vllm", packed[0]).splitlines()[-1])
    left = told.pop("left")
    assert told == {"quantization": "compressed-tensors", "bits": 4, "group": 32, "kernel": True}
    assert sorted(name for name, ignored in left.items() if not ignored) == [
        "language_model.model.layers.0.mlp.down_proj",
        "language_model.model.layers.0.self_attn.q_proj", "model.layers.5.self_attn.k_proj"]


@needs_serve
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64"
                    or "avx512f" not in Path("/proc/cpuinfo").read_text(),
                    reason="vLLM's four-bit kernel for CPUs needs AVX-512, which this CPU lacks")
def test_vllm_computes_with_four_bits(tmp_path):
    """Its arithmetic is bfloat16, so the two folders agree as two runs in bfloat16 do."""
    heads = {"head_dim": 32, "global_head_dim": 64}  # vLLM's attention on a CPU takes no 16
    model = random_gemma.write(tmp_path / "model", random_gemma.TINY | heads)
    four_bits.export(model, tmp_path / "packed")
    four_bits.dequantize(tmp_path / "packed", tmp_path / "back")
    prompts = np.random.default_rng(2).integers(3, 320, (4, 40)).tolist()
    found = []
    for name in ("packed", "back"):
        folder = tmp_path / name
        job = {"merged": str(folder), "dtype": "bfloat16", "prompts": prompts}
        (tmp_path / "job.json").write_text(json.dumps(job))
        out = tmp_path / f"{name}.npz"
        serve("tests/merge_parity.py", tmp_path / "job.json", "vllm-merged", out)
        found.append(np.load(out)["merged"])
    assert np.abs(found[0] - found[1]).mean() < 0.05
