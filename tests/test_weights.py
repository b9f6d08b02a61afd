"""helpers/weights.py: headers against the library, verification and its memory, writing and copying.

    .venv/bin/python -m pytest tests/test_weights.py
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import random_gemma
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from helpers import UserError, run, weights

TINY = ROOT / "assets" / "tiny_gemma4"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ── Headers and identity ──
def test_header_and_table_are_the_librarys():
    tensors, table = weights.open_model(TINY), weights.tensor_table(TINY)
    library = load_file(TINY / "model.safetensors")
    assert set(tensors) == set(table) == set(library)
    with safe_open(TINY / "model.safetensors", "np") as file:
        for name, tensor in tensors.items():
            assert table[name] == (file.get_slice(name).get_dtype(), library[name].shape)
            assert tensor.array().dtype == library[name].dtype
            assert np.array_equal(tensor.array(), library[name])


def test_damaged_header_names_file_and_way_out(tmp_path):
    shutil.copytree(TINY, tmp_path / "base")
    os.truncate(tmp_path / "base" / "model.safetensors", 4000)
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short .* Download it again"):
        weights.open_model(tmp_path / "base")
    with pytest.raises(ValueError, match="Run 04_merge.py"):
        weights.open_model(tmp_path / "base", "Run 04_merge.py.")


def test_fingerprint_sees_weights_tokenizer_and_config_but_not_place_or_time(tmp_path):
    first = weights.fingerprint(random_gemma.write(tmp_path / "a", random_gemma.TINY))
    again = random_gemma.write(tmp_path / "b", random_gemma.TINY)
    (again / "README.md").write_text("no part of the model")
    (again / ".complete").touch()
    assert weights.fingerprint(again) == first
    assert weights.fingerprint(random_gemma.write(tmp_path / "c", random_gemma.TINY, seed=1)) != first
    (again / "tokenizer.json").write_text("{}")
    with_tokenizer = weights.fingerprint(again)
    (again / "tokenizer.json").write_text("{ }")
    assert len({first, with_tokenizer, weights.fingerprint(again)}) == 3


# ── Verification ──
@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three files of an hour ago and their hashes; the run directory is an empty one."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    place = tmp_path / "merged"
    place.mkdir()
    for number in range(3):
        path = place / f"{number}.safetensors"
        path.write_bytes(np.random.default_rng(number).bytes(3_000_000))
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return place, {path.name: sha256(path) for path in place.iterdir()}


def test_verify_finds_what_is_wrong(folder):
    place, hashes = folder
    assert weights.verify(place, hashes) == {}
    (place / "0.safetensors").unlink()
    data = bytearray((place / "1.safetensors").read_bytes())
    data[1_234_567] ^= 1
    (place / "1.safetensors").write_bytes(data)
    (place / "x.safetensors").write_bytes(b"")
    (place / "notes.txt").write_text("harmless")
    assert weights.verify(place, hashes) == {
        "0.safetensors": "missing", "1.safetensors": "changed", "x.safetensors": "unexpected"}
    assert weights.verify(place / "nowhere", hashes) == dict.fromkeys(hashes, "missing")


def test_a_file_is_hashed_once_per_state(folder, monkeypatch):
    place, hashes = folder
    read, hash_ = [], run.sha256_file
    monkeypatch.setattr(run, "sha256_file", lambda path, *rest: read.append(path.name) or hash_(path, *rest))
    assert weights.verify(place, hashes) == {} and sorted(read) == sorted(hashes)
    assert weights.verify(place, hashes) == {} and len(read) == 3
    data = bytearray((place / "1.safetensors").read_bytes())
    data[7] ^= 1
    (place / "1.safetensors").write_bytes(data)
    os.utime(place / "1.safetensors", (1_700_000_000, 1_700_000_000))  # size and time as before
    assert weights.verify(place, hashes) == {"1.safetensors": "changed"} and len(read) == 4
    shutil.copy(place / "2.safetensors", place / "copy")
    os.replace(place / "copy", place / "2.safetensors")
    assert weights.verify(place, hashes) == {"1.safetensors": "changed"}
    assert "2.safetensors" in read[4:]


def test_a_file_written_a_moment_ago_is_not_remembered(folder):
    """Within a tick of the file system's clock it could change again without a new time."""
    place, hashes = folder
    (place / "0.safetensors").touch()
    assert weights.verify(place, hashes) == {}
    memory = json.loads(run.run_dir("cache", "hashes.json").read_text())
    assert sorted(Path(name).name for name in memory) == ["1.safetensors", "2.safetensors"]


@pytest.mark.parametrize("text", ["", "[]", "5", '{"%s": 5}', '{"%s": []}', "\udc80", "[" * 200_000,
                                  '{"%s": ["0", 1, 2, 3, 4]}'])
def test_a_broken_memory_counts_as_absent(folder, text):
    place, hashes = folder
    memory = run.run_dir("cache", "hashes.json")
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text(text.replace("%s", str((place / "0.safetensors").resolve())),
                      errors="surrogateescape")
    assert weights.verify(place, hashes) == {}
    assert len(json.loads(memory.read_text())) == 3


# ── Writing ──
@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["F32", "BF16", "F16", "U8", "I64"]),
                          st.lists(st.integers(1, 5), max_size=3)), min_size=1, max_size=5))
def test_written_pieces_are_what_the_library_reads(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("written") / "x.safetensors"
    rng, entries, whole = np.random.default_rng(0), {}, {}
    for number, (dtype, shape) in enumerate(tensors):
        whole[f"t{number}"] = array = rng.integers(0, 100, shape).astype(weights.DTYPES[dtype])
        pieces = (piece for piece in np.array_split(array.reshape(-1), 3))
        entries[f"t{number}"] = (dtype, array.shape, pieces)
    weights.write_tensors(path, entries)
    for name, array in load_file(path).items():
        assert array.dtype == whole[name].dtype and np.array_equal(array, whole[name])


@pytest.mark.parametrize("block_bytes", [1 << 10, 1 << 13, 1 << 30])
def test_rewrite_changes_what_it_is_told_to_and_nothing_else(tmp_path, block_bytes):
    """Doubling two matrices of the tiny model, in blocks, against doing it in memory."""
    names = [name for name in weights.open_model(TINY) if name.endswith(("q_proj.weight", "up_proj.weight"))][:2]
    rows = {name: [] for name in names}

    def double(name, some, first):
        rows[name].append((first, len(some)))
        return some * 2

    files, hashes = weights.rewrite(TINY, tmp_path / "out", names, double, block_bytes)
    before, after = load_file(TINY / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert list(before) == list(after)
    for name, array in before.items():
        wanted = array * 2 if name in names else array
        assert np.array_equal(after[name].view(np.uint8), wanted.view(np.uint8))
        assert hashes[name]["base"] == hashlib.sha256(array.tobytes()).hexdigest()
        assert hashes[name].get("merged", hashes[name]["base"]) == hashlib.sha256(wanted.tobytes()).hexdigest()
    for name in names:  # every row once, in order, in equal blocks that fit
        assert [first for first, _ in rows[name]] == list(range(0, len(before[name]), rows[name][0][1]))
        assert len({count for _, count in rows[name]}) == 1
        fits = rows[name][0][1] * before[name].shape[1] * 4 <= block_bytes
        assert fits or rows[name][0][1] == 1
    assert {path.name: sha256(path) for path in (tmp_path / "out").iterdir()} == files
    assert weights.verify(tmp_path / "out", files) == {}
    assert not set(hashes) ^ set(before) and ml_dtypes.bfloat16 in {a.dtype.type for a in before.values()}


def test_rewrite_refuses_a_name_that_is_not_there(tmp_path):
    with pytest.raises(AssertionError):
        weights.rewrite(TINY, tmp_path / "out", ["ghost"], None, 1 << 20)
    assert not (tmp_path / "out").exists()


def test_rewrite_leaves_nothing_behind_if_change_fails(tmp_path):
    name = next(name for name in weights.open_model(TINY) if name.endswith("q_proj.weight"))

    def fail(*_):
        raise UserError("NaN")

    with pytest.raises(ValueError):
        weights.rewrite(TINY, tmp_path / "out", [name], fail, 1 << 20)
    assert not (tmp_path / "out").exists()
