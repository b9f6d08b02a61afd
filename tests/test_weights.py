"""helpers/weights.py: headers against the library, identity, what changed."""

import numpy as np
import random_gemma
from conftest import ROOT
from safetensors.numpy import load_file

from helpers import run, weights

TINY = ROOT / "assets" / "tiny_gemma4"


# ── Headers and identity ──
def test_tensors_are_the_librarys():
    tensors, library = weights.open_model(TINY), load_file(TINY / "model.safetensors")
    assert set(tensors) == set(library)
    for name, tensor in tensors.items():
        assert tensor.array().dtype == library[name].dtype and tensor.shape == library[name].shape
        assert np.array_equal(tensor.array(), library[name])


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


def test_changed_files_are_named(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.safetensors").write_bytes(np.random.default_rng(number).bytes(30_000))
    hashes = run.hashes(tmp_path)
    assert run.changed(tmp_path, hashes) == {}
    (tmp_path / "0.safetensors").unlink()
    data = bytearray((tmp_path / "1.safetensors").read_bytes())
    data[12_345] ^= 1
    (tmp_path / "1.safetensors").write_bytes(data)
    (tmp_path / "x.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("harmless")
    assert run.changed(tmp_path, hashes) == {
        "0.safetensors": "missing", "1.safetensors": "changed", "x.safetensors": "unexpected"}
    assert run.changed(tmp_path / "nowhere", hashes) == dict.fromkeys(hashes, "missing")
