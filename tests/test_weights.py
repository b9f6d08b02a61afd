"""helpers/weights.py: which files a model has, headers against the library, identity."""

import json

import numpy as np
import pytest
import random_gemma
from conftest import ROOT
from safetensors.numpy import load_file, save_file

import recipe
from helpers import gemma, merge, run, weights

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
    other = random_gemma.write(tmp_path / "c", random_gemma.TINY, seed=1)
    assert weights.fingerprint(other) != first
    (again / "tokenizer.json").write_text("{}")
    with_tokenizer = weights.fingerprint(again)
    (again / "tokenizer.json").write_text("{ }")
    assert len({first, with_tokenizer, weights.fingerprint(again)}) == 3


def test_changed_files_are_named(tmp_path):
    for number in range(3):
        data = np.random.default_rng(number).bytes(30_000)
        (tmp_path / f"{number}.safetensors").write_bytes(data)
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


# ── Which files are the model ──
def one_line(match):
    """Refused, in one line that names what is wrong."""
    return pytest.raises(run.UserError, match=rf"\A(?=.*{match})[^\n]*\Z")


def in_two(folder):
    """A small model in two shards, with an index."""
    random_gemma.write(folder, random_gemma.SHALLOW)
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, places = sorted(arrays), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: arrays[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / weights.INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("make, stray", [
    (lambda folder: random_gemma.write(folder, random_gemma.SHALLOW), "consolidated.safetensors"),
    (lambda folder: random_gemma.write(folder, random_gemma.SHALLOW), "._model.safetensors"),
    (in_two, "model.safetensors"), (in_two, "model-00003-of-00002.safetensors")])
def test_a_second_set_of_weights_is_refused_by_all_who_read_a_model(tmp_path, make, stray):
    """None of them may choose by itself: the loader took the last of the folder, 04 the index's."""
    base = make(tmp_path / "base")
    known = {path.name for path in base.iterdir()}
    assert {path.name for path in merge.files_to_copy(base)} == known
    config = gemma.config_from_hf(base)
    mesh = gemma.make_mesh(config, (1, 1), gemma.jax.devices()[:1])
    random_gemma.write(tmp_path / "other", random_gemma.SHALLOW, seed=1)
    (tmp_path / "other" / "model.safetensors").rename(base / stray)
    for reader in (weights.open_model, weights.fingerprint, merge.files_to_copy,
                   lambda folder: merge.merge_model(folder, tmp_path / "out", {}, 1.0),
                   lambda folder: gemma.load_base(folder, config, mesh)):
        with one_line(f"second set of weights: {stray} beside model.*another folder"):
            reader(base)
    assert not (tmp_path / "out").exists()


def test_tunix_is_handed_the_files_of_the_list_and_no_others(tmp_path, monkeypatch):
    """Whatever comes into the folder later: Tunix takes every file that it finds."""
    base = in_two(tmp_path / "base")
    files = weights.files_of(base)
    random_gemma.write(tmp_path / "other", random_gemma.SHALLOW, seed=1)
    (tmp_path / "other" / "model.safetensors").rename(base / "zz.safetensors")
    with gemma._folder_of(files) as folder:
        assert {path.name for path in gemma.Path(folder).iterdir()} == {file.name for file in files}
        for file in files:
            assert (gemma.Path(folder) / file.name).read_bytes() == file.read_bytes()


def with_index(index):
    def damage(folder):
        (folder / weights.INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    return damage


def cut_short(folder):
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1_000])


DAMAGES = {  # what the line says: how the folder came to be so
    "index.json is not valid JSON .*Download it again": with_index("{"),
    "has no weight_map, so it names no files": with_index({"metadata": {}}),
    "index.json has no weight_map": with_index([]),
    "lacks gone.safetensors, which its index names": with_index({"weight_map": {
        "model.language_model.norm.weight": "gone.safetensors"}}),
    "puts a into '../b.safetensors', which is no": with_index(
        {"weight_map": {"a": "../b.safetensors"}}),
    "puts a into 3, which is no safetensors file": with_index({"weight_map": {"a": 3}}),
    "00002-of-00002.safetensors is damaged or cut short": cut_short}


@pytest.mark.parametrize("match", DAMAGES)
def test_a_damaged_folder_is_one_line(tmp_path, match):
    base = in_two(tmp_path / "base")
    DAMAGES[match](base)
    with one_line(match):
        weights.open_model(base)


# ── The tensors of the language model ──
def language_prefix(folder):
    config = weights.architecture.read_config(folder)
    return weights.language_prefix(folder, weights.open_model(folder), config)


@pytest.mark.parametrize("config", [random_gemma.TINY, random_gemma.E2B], ids=["tiny", "e2b"])
@pytest.mark.parametrize("unused", [True, False])
def test_every_tensor_is_known_whatever_the_prefix(tmp_path, config, unused):
    """random_gemma's list of names is written by itself, from google's files."""
    base = random_gemma.write(tmp_path / "base", config, keep_unused=unused)
    assert language_prefix(base) == "model.language_model."
    arrays = load_file(base / "model.safetensors")
    short = {name.replace("language_model.", ""): array for name, array in arrays.items()}
    save_file(short, base / "model.safetensors")
    assert language_prefix(base) == "model."


P = "model.language_model."
CHANGES = {  # what the line says: the tensors that are changed (None: taken out)
    "output matrix of its own .lm_head.weight.": {"lm_head.weight": np.ones((320, 64), np.float32)},
    "layers.5.self_attn.v_proj.weight is no part of the model that we compute": {
        f"{P}layers.5.self_attn.v_proj.weight": np.ones((128, 64), np.float32)},
    "layers.0.self_attn.q_proj.bias is no part of the model": {
        f"{P}layers.0.self_attn.q_proj.bias": np.ones(128, np.float32)},
    "model.layers.0.mlp.up_proj.weight is no part": {
        "model.layers.0.mlp.up_proj.weight": np.ones((128, 64), np.float32)},
    "layers.3.layer_scalar is missing": {f"{P}layers.3.layer_scalar": None},
    r"norm.weight is F32 \[65\] instead of \[64\]": {f"{P}norm.weight": np.ones(65, np.float32)},
    r"up_proj.weight is U8 \[128, 64\] instead of .* BF16": {
        f"{P}layers.0.mlp.up_proj.weight": np.ones((128, 64), np.uint8)},
    "has no model.language_model.embed_tokens.weight": {f"{P}embed_tokens.weight": None}}


@pytest.mark.parametrize("match", CHANGES)
def test_a_tensor_that_nobody_computes_with_is_refused(tmp_path, match):
    """Before, each of them was dropped without a word, or ended in a tree of shapes."""
    base = random_gemma.write(tmp_path / "base", random_gemma.TINY)
    config = gemma.config_from_hf(base)
    mesh = gemma.make_mesh(config, (1, 1), gemma.jax.devices()[:1])
    arrays = load_file(base / "model.safetensors") | CHANGES[match]
    kept = {name: array for name, array in arrays.items() if array is not None}
    save_file(kept, base / "model.safetensors")
    with one_line(match):
        language_prefix(base)
    with one_line(match):
        gemma.load_base(base, config, mesh)


def test_files_of_several_dtypes_load_as_those_of_one(tmp_path):
    """Tunix has a second reader for them, which makes its arrays in threads."""
    import jax
    from flax import nnx
    base = random_gemma.write(tmp_path / "base", random_gemma.SHALLOW)
    config = gemma.config_from_hf(base)
    mesh = gemma.make_mesh(config, (2, 1), jax.devices()[:2])
    known = nnx.to_pure_dict(nnx.state(gemma.load_base(base, config, mesh)))
    arrays = load_file(base / "model.safetensors")
    flags = {"model.vision_tower.flags": np.ones(3, np.uint8)}
    for name in arrays:
        if name.endswith("norm.weight"):
            arrays[name] = arrays[name].astype(np.float32)
    save_file(arrays | flags, base / "model.safetensors")
    again = nnx.to_pure_dict(nnx.state(gemma.load_base(base, config, mesh)))
    assert jax.tree.all(jax.tree.map(np.array_equal, known, again))
    assert jax.config.jax_default_device is None


@pytest.mark.parametrize("name", ["a[b]", "a*", "[0-9]?"])
def test_a_folder_may_be_called_like_a_pattern(tmp_path, monkeypatch, name):
    """Tunix looked for `a[b]/*.safetensors` and found none, in a TMPDIR or a base of that name."""
    folder = tmp_path / name
    folder.mkdir()
    base = random_gemma.write(folder / "base", random_gemma.SHALLOW)
    config = gemma.config_from_hf(base)
    mesh = gemma.make_mesh(config, (1, 1), gemma.jax.devices()[:1])
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    gemma.load_base(base, config, mesh)
    recipe.load_model(base, "float32")
