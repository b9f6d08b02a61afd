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


# ── The adapters' digest ──
def nested(adapters):
    """Adapters as Orbax restores them: a dict per part of the path, Qwix's names, and `value`."""
    tree = {}
    for path, (a, b) in adapters.items():
        place = tree
        for part in path.split("."):
            place = place.setdefault(part, {})
        kind = "w" if "attn" in path else "kernel"
        place |= {f"{kind}_lora_a": {"value": a}, f"{kind}_lora_b": {"value": b}}
    return tree


def test_the_digest_of_adapters_is_of_their_paths_types_shapes_and_bytes_alone():
    draw = np.random.default_rng(0)
    adapters = {path: (draw.normal(size=(8, 2)).astype(np.float32),
                       draw.normal(size=(2, 4, 2)).astype(np.float32))
                for path in ("layers.10.mlp.up_proj", "layers.2.attn.q_einsum")}
    known = weights.adapters_digest(adapters)
    assert len(known) == 64 and weights.adapters_digest(nested(adapters)) == known
    assert weights.adapters_digest(dict(reversed(adapters.items()))) == known
    letters = {path: {"a": a, "b": b} for path, (a, b) in adapters.items()}
    assert weights.adapters_digest(letters) == known
    path, (a, b) = next(iter(adapters.items()))
    flipped = b.copy()
    flipped.view(np.uint8).reshape(-1)[5] ^= 1
    others = [(a, flipped), (a, b.reshape(2, 8)), (a, b.astype(np.float64)), (b, a)]
    digests = {weights.adapters_digest(adapters | {path: pair}) for pair in others}
    digests.add(weights.adapters_digest({path.replace("10", "11"): (a, b)}))
    assert len(digests) == 5 and known not in digests
