"""04_merge: the map, the algebra, what is written, what is refused, and what other engines say."""

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import random_gemma
from conftest import ROOT, a_data_meta, a_recipe, needs_serve, page, program, serve

import helpers
from helpers import gemma, merge, records, weights
from tables import architecture

RANK, ALPHA, PREFIX = 4, 8.0, "model.language_model."
TINY = random_gemma.TINY | {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 160}


def split_in_two(folder):
    """Two shards and an index, as the 31B has them."""
    from safetensors.numpy import load_file, save_file
    arrays = load_file(folder / "model.safetensors")
    names, index = sorted(arrays), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: arrays[name] for name in part}, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    places = {"metadata": {}, "weight_map": index}  # transformers wants both
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "processor_config.json").write_text("{}")
    return folder


def tunix(folder, dtype="float32"):
    """The folder's model in Tunix, on one device."""
    import jax
    config = gemma.config_from_hf(folder, dtype=dtype)
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    return gemma.load_base(folder, config, mesh), mesh


def logits(model, mesh, prompts):
    import jax.numpy as jnp
    tokens = jnp.asarray(prompts)
    rows, length = tokens.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    with mesh:
        found, _ = model(tokens, jnp.tile(jnp.arange(length), (rows, 1)), None, mask)
    return np.asarray(found, np.float64)


def adapted(model, mesh, rank, alpha, size=0.05):
    """The model with adapters, B random: as if it had been trained."""
    model = gemma.inject_lora(model, rank, alpha, mesh)
    rng = np.random.default_rng(0)
    for pair in gemma.adapted_modules(model).values():
        for variable in pair.values():
            shape = variable.get_value().shape
            variable.set_value(np.float32(rng.normal(size=shape) * size))
    return model


def save(folder, model, rank, alpha, steps):
    """The checkpoint, by Tunix's own manager."""
    import orbax.checkpoint as ocp
    from tunix.sft.checkpoint_manager import CheckpointManager
    manager = CheckpointManager(str(folder), options=ocp.CheckpointManagerOptions())
    for step in steps:
        manager.save(step, model, None, save_only_lora_params=True, force=True,
                     custom_metadata={"recipe": {"rank": rank, "alpha": alpha}})
    manager.close()


def make_world(folder, config):
    """A base in float32, a checkpoint that Tunix wrote for it, and the logits of the two."""
    base = split_in_two(random_gemma.write(folder / "base", config, dtype=np.float32))
    model, mesh = tunix(base)
    prompts = np.random.default_rng(1).integers(3, config["vocab_size"], (2, 40))
    before = logits(model, mesh, prompts)
    model = adapted(model, mesh, RANK, ALPHA)
    save(folder / "checkpoints", model, RANK, ALPHA, (10, 20))
    text = json.loads((base / "config.json").read_text())
    targets = architecture.modules(text)
    _, adapters, notes = merge.restore_adapters(folder / "checkpoints", 20)
    recipe = a_recipe(rank=RANK, alpha=ALPHA, n_modules=len(targets))
    return SimpleNamespace(folder=folder, base=base, prompts=prompts, before=before,
                           targets=targets, after=logits(model, mesh, prompts),
                           adapters=adapters, notes=notes,
                           recipe=recipe, tensors=weights.open_model(base), scale=ALPHA / RANK,
                           plan=merge.plan_merge(targets, adapters, PREFIX))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("merge"), TINY)


@pytest.fixture(scope="module")
def merged(world):
    out = world.folder / "merged"
    world.norms = merge.merge_model(world.base, out, world.plan, world.scale)
    return out


# ── The result ──
def test_merged_gives_the_logits_of_the_adapters(world, merged):
    model, mesh = tunix(merged)
    found = logits(model, mesh, world.prompts)
    assert np.abs(found - world.after).max() < 1e-3
    assert np.abs(found - world.before).max() > 0.1, "the adapters change nothing"


@pytest.mark.slow
def test_merged_e2b_gives_the_logits_of_the_adapters(tmp_path):
    """Shared keys and values, per-layer inputs, one KV head, wide MLPs in the shared layers."""
    world = make_world(tmp_path, random_gemma.E2B)
    merge.check(world.targets, world.adapters, world.tensors, PREFIX, world.recipe, world.notes)
    merge.merge_model(world.base, tmp_path / "merged", world.plan, world.scale)
    model, mesh = tunix(tmp_path / "merged")
    found = logits(model, mesh, world.prompts)
    assert np.abs(found - world.after).max() < 1e-3 < 0.1 < np.abs(found - world.before).max()


def test_everything_else_is_the_base_byte_for_byte(world, merged):
    before, after = weights.open_model(world.base), weights.open_model(merged)
    assert list(before) == list(after)
    for shard in world.base.glob("*.safetensors"):
        start = min(tensor.start for tensor in before.values() if tensor.file == shard)
        assert shard.read_bytes()[:start] == (merged / shard.name).read_bytes()[:start]
    for name, tensor in before.items():
        same = tensor.array().tobytes() == after[name].array().tobytes()
        assert same == (name not in world.plan), name
    for file in world.base.iterdir():
        if file.suffix != ".safetensors":
            assert file.read_bytes() == (merged / file.name).read_bytes()
    assert {path.name for path in merged.iterdir()} == {path.name for path in world.base.iterdir()}


@pytest.mark.parametrize("block", [7, 1 << 20], ids=["many blocks", "one block"])
def test_bfloat16_sum_is_rounded_once(world, tmp_path, block, monkeypatch):
    """Against the whole matrix in float64 with the einsum of training, for every merged tensor."""
    import ml_dtypes
    base = random_gemma.write(tmp_path / "base", TINY, 3, ml_dtypes.bfloat16)
    monkeypatch.setattr(merge, "BLOCK", block)
    merge.merge_model(base, tmp_path / "merged", world.plan, world.scale)
    before, after = weights.open_model(base), weights.open_model(tmp_path / "merged")
    einsums = {"q_einsum": ("dr,rnh->nhd",), "kv_einsum": ("dr,rkh->khd", "dr,rkh->khd"),
               "k_einsum": ("dr,rkh->khd",), "attn_vec_einsum": ("nhr,rd->dnh",)}
    for target in world.targets:
        a, b = (np.float64(array) for array in world.adapters[target.path])
        for i, (name, shape) in enumerate(target.names.items()):
            half = b[:, i] if target.kind == "kv_einsum" else b
            delta = np.einsum(einsums.get(target.kind, ("ir,ro->oi",) * 2)[i], a, half)
            old = np.float64(before[f"{PREFIX}{name}.weight"].array())
            exact = old + ALPHA / RANK * delta.reshape(shape)
            new = np.float64(after[f"{PREFIX}{name}.weight"].array())
            assert (np.abs(new - exact) <= 2.0**-8 * np.abs(exact) + 1e-6).all(), name
            once = exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
            assert (new != once).mean() < 1e-3, name  # ties of the float32 sum


def test_norms_are_those_of_the_delta(world, merged):
    norms = world.norms.set_index("tensor")
    for name, (a, b) in world.plan.items():
        delta = world.scale * (np.float64(a) @ np.float64(b)).T
        old = np.float64(weights.open_model(world.base)[name].array())
        assert norms.delta[name] == pytest.approx(np.linalg.norm(delta), rel=1e-4)
        assert norms.base[name] == pytest.approx(np.linalg.norm(old), rel=1e-4)


def test_vision_tower_and_nested_config_stay(world, tmp_path):
    """A multimodal base: other tensors and files untouched, whatever their dtype."""
    from safetensors.numpy import load_file, save_file
    base, shard = tmp_path / "base", "model-00002-of-00002.safetensors"
    shutil.copytree(world.base, base)
    extra = {"model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight":
             np.ones((8, 8), np.float32), "model.vision_tower.flags": np.ones(3, np.uint8)}
    save_file(load_file(base / shard) | extra, base / shard, metadata={"format": "pt"})
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"].update(dict.fromkeys(extra, shard))
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    nested = {"model_type": "gemma4", "text_config": TINY, "vision_config": {}, "dtype": "float32"}
    (base / "config.json").write_text(json.dumps(nested))
    merge.merge_model(base, tmp_path / "merged", world.plan, world.scale)
    after = load_file(tmp_path / "merged" / shard)
    for name, array in extra.items():
        assert np.array_equal(array, after[name]) and array.dtype == after[name].dtype


def test_adapter_shares_a_and_repeats_k_as_v(world, tmp_path):
    from safetensors.numpy import load_file
    merge.write_adapter(tmp_path / "adapter", world.targets, world.adapters, world.recipe, PREFIX)
    arrays = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    inside = "base_model.model.model.language_model.layers.{}.self_attn.{}.lora_{}.weight"
    equal = lambda i, letter: np.array_equal(arrays[inside.format(i, "k_proj", letter)],
                                             arrays[inside.format(i, "v_proj", letter)])
    assert equal(0, "A") and not equal(0, "B") and equal(5, "A") and equal(5, "B")
    assert all(array.dtype == np.float32 for array in arrays.values())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)


def attention_only(world):
    """(modules to merge, adapters, recipe) as if 03 had trained attention alone, on purpose."""
    adapters = {path: pair for path, pair in world.adapters.items() if ".attn." in path}
    recipe = replace(world.recipe, partial=True)
    targets = merge.targets_of(world.base, adapters, recipe)
    assert {target.path for target in targets} == set(adapters)
    return targets, adapters, recipe


def test_what_was_left_out_on_purpose_stays_as_it_was(world, tmp_path):
    import re
    targets, adapters, recipe = attention_only(world)
    merge.check(targets, adapters, world.tensors, PREFIX, recipe, world.notes)
    plan = merge.plan_merge(targets, adapters, PREFIX)
    assert plan and all(".self_attn." in name for name in plan)
    merge.write_adapter(tmp_path / "adapter", targets, adapters, recipe, PREFIX)
    pattern = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    matched = {name for name in world.tensors
               if re.fullmatch(pattern, name.removesuffix(".weight"))}
    assert matched == set(plan)
    # The same checkpoint without the word `partial` is a mistake.
    with refused("has no adapter"):
        merge.check(world.targets, adapters, world.tensors, PREFIX, world.recipe, world.notes)


# ── What is refused ──
def refused(match):
    return pytest.raises(ValueError, match=match)


def check_with(world, **changes):
    parts = {"targets": world.targets, "adapters": world.adapters, "tensors": world.tensors,
             "prefix": PREFIX, "recipe": world.recipe, "notes": world.notes}
    merge.check(**parts | changes)


def test_missing_and_unknown_modules(world):
    fewer = {path: pair for path, pair in world.adapters.items() if "k_einsum" not in path}
    with refused("layers.5.attn.k_einsum has no adapter"):
        check_with(world, adapters=fewer)
    with refused("adapter layers.0.attn.rope has no place"):
        stray = {"layers.0.attn.rope": (np.ones(1), np.ones(1))}
        check_with(world, adapters=world.adapters | stray)
    zeros = {path: (a, 0 * b) for path, (a, b) in world.adapters.items()}
    with refused("every B is zero"):
        check_with(world, adapters=zeros)


def test_damaged_checkpoint(world, tmp_path):
    shutil.copytree(world.folder / "checkpoints", tmp_path / "checkpoints")
    for file in (tmp_path / "checkpoints" / "20" / "model_params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:10])
    with refused(r"(?s)step 20 in .* cannot be read.*another of \[10, 20\]") as error:
        merge.restore_adapters(tmp_path / "checkpoints", 20)
    assert len(str(error.value).splitlines()) <= 2 and len(str(error.value)) < 500


def damages(file):
    """(what was done, bytes) of a file that a disk spoiled."""
    data = file.read_bytes()
    yield "emptied", b""
    yield "cut in half", data[:len(data) // 2]
    yield "overwritten", b"\0" * len(data)
    yield "one bit", data[:-1] + bytes([data[-1] ^ 16])


def test_whatever_happens_to_a_checkpoint_is_one_line_or_changes_nothing(world, tmp_path):
    """Every file of a step, spoiled in four ways and taken away: restored whole, or refused."""
    folder = shutil.copytree(world.folder / "checkpoints", tmp_path / "checkpoints")
    recipe = replace(world.recipe, final_step=20,
                     adapter_sha256=weights.adapters_digest(world.adapters))
    refusals = 0
    for file in sorted(path for path in (folder / "20").rglob("*") if path.is_file()):
        whole = file.read_bytes()
        for what, data in [*damages(file), ("taken away", None)]:
            file.unlink() if data is None else file.write_bytes(data)
            try:
                step, adapters, _ = merge.restore_adapters(folder, 20)
                merge.check_digest(adapters, step, recipe)
            except helpers.UserError as error:
                refusals += 1
                assert len(str(error).splitlines()) <= 2, (file, what)
            file.write_bytes(whole)
    assert refusals > 10


def test_a_bug_of_ours_is_not_called_a_damaged_step(world, monkeypatch):
    monkeypatch.setattr(merge.ocp, "RestoreArgs", None)
    with pytest.raises(TypeError):
        merge.restore_adapters(world.folder / "checkpoints", 20)


def test_other_numbers_than_03_saved_are_refused(world):
    """A flipped bit in a checkpoint restores without a word: the digest notices."""
    plain = replace(world.recipe, final_step=20, adapter_sha256="")
    recipe = replace(plain, adapter_sha256=weights.adapters_digest(world.adapters))
    merge.check_digest(world.adapters, 20, recipe)
    path, (a, b) = next(iter(world.adapters.items()))
    flipped = b.copy()
    flipped.view(np.uint8).reshape(-1)[7] ^= 1
    damaged = world.adapters | {path: (a, flipped)}
    with refused("adapters of step 20 are not those that 03 saved.*Set Settings.step to another"):
        merge.check_digest(damaged, 20, recipe)
    merge.check_digest(damaged, 20, plain)  # none is known
    merge.check_digest(damaged, 10, recipe)  # the digest is of the last step


def test_a_checkpoint_gives_the_digest_of_the_model_that_was_saved(world):
    """03 takes it of its model, 04 of what Orbax restores."""
    model, mesh = tunix(world.base)
    model = adapted(model, mesh, RANK, ALPHA)
    known = weights.adapters_digest(gemma.adapted_modules(model))
    assert known == weights.adapters_digest(world.adapters)


# ── The notebook as a whole ──
@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """A run directory as 03 leaves it."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(world.folder / "checkpoints", folder / "train" / "checkpoints")
    base = shutil.copytree(world.base, folder / "base")
    replace(world.recipe, base_path=str(base), base_sha256=weights.fingerprint(base)).save(
        folder / "train" / "recipe.json")
    a_data_meta().save(folder / "data" / "meta.json")
    return folder


def test_another_base_than_the_one_trained_on_is_refused(run):
    recipe = records.Recipe.load(run)
    assert merge.base_of(recipe) == run / "base"
    with pytest.raises(helpers.UserError, match="is not the model that notebook 03 trained on"):
        merge.base_of(recipe, str(ROOT / "assets/tiny_gemma4"))


def test_the_notebook_writes_all_then_nothing_then_what_was_damaged(run, merged):
    first = page("04_merge.py", run)
    assert first.returncode == 0, first.stderr[-2000:]
    record = json.loads((run / "merge.json").read_text())
    for folder, files in (("merged", "files"), ("adapter", "adapter_files")):
        assert helpers.run.hashes(run / folder) == record[files] != {}
    for path in merged.glob("*.safetensors"):
        assert path.read_bytes() == (run / "merged" / path.name).read_bytes()
    card = (run / "model_card.md").read_text()
    assert "rank 4, alpha 8" in card and "1,234 trained tokens" in card
    made = (run / "merged" / "config.json").stat().st_mtime_ns
    second = page("04_merge.py", run)
    assert second.returncode == 0 and "is current" in second.stdout, second.stderr[-2000:]
    assert (run / "merged" / "config.json").stat().st_mtime_ns == made
    tensor = weights.open_model(run / "merged")[f"{PREFIX}embed_tokens.weight"]
    tensor.array("r+").view(np.uint32).reshape(-1)[3] ^= 1  # one bit
    assert helpers.changed(run / "merged", record["files"]) == {tensor.file.name: "changed"}
    third = page("04_merge.py", run)
    assert third.returncode == 0 and f"{tensor.file.name} is changed" in third.stdout
    assert json.loads((run / "merge.json").read_text()) == record
    assert helpers.changed(run / "merged", record["files"]) == {}


@pytest.mark.parametrize("text", [
    "", "{", "[]", "3", "null", "\xff", '{"inputs": 3}', '{"inputs": INPUTS}',
    '{"inputs": INPUTS, "files": [], "adapter_files": {}, "norms": []}'])
def test_a_torn_record_is_written_again(world, tmp_path, monkeypatch, text):
    """04 writes merge.json, so no merge.json may stop it."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    things = (world.base, world.targets, world.adapters, 20, world.recipe, PREFIX)
    whole = merge.run(*things)
    torn = text.replace("INPUTS", json.dumps(whole.inputs))
    (tmp_path / "merge.json").write_bytes(torn.encode("latin-1"))
    assert merge.run(*things) == whole == records.Merge.load(tmp_path)


# ── What other engines say (slow) ──
def tiny_base(folder, dtype):
    """assets/tiny_gemma4, cast to dtype."""
    import ml_dtypes
    from safetensors.numpy import load_file, save_file
    shutil.copytree(ROOT / "assets" / "tiny_gemma4", folder)
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    arrays = load_file(folder / "model.safetensors")
    save_file({name: array.astype(kind) for name, array in arrays.items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, config


@pytest.fixture(scope="module")
def prompts():
    """Ten prompts of 100 tokens: problems of the tiny benchmark, in the tiny tokenizer."""
    from helpers import chat
    tokenizer = chat.load_tokenizer(ROOT / "assets" / "tiny_gemma4")
    ids = []
    for path in sorted((ROOT / "data" / "tiny_eval").glob("*_prompt.txt")):
        ids += chat.prompt_ids(tokenizer, [{"role": "user", "content": path.read_text()}])
    assert len(ids) >= 1000
    return [ids[start:start + 100] for start in range(0, 1000, 100)]


def parity(folder, dtype, prompts):
    """Log-probabilities of five paths: {name: [positions, vocabulary]}."""
    base, config = tiny_base(folder / "base", dtype)
    model, mesh = tunix(base, dtype)
    model = adapted(model, mesh, RANK, ALPHA, 0.1)
    save(folder / "checkpoints", model, RANK, ALPHA, (1,))
    scores = logits(model, mesh, prompts)[:, :-1].reshape(-1, config["vocab_size"])
    shifted = scores - scores.max(-1, keepdims=True)
    found = {"Tunix with adapters": shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))}
    targets = architecture.modules(config)
    _, adapters, notes = merge.restore_adapters(folder / "checkpoints", 1)
    recipe = a_recipe(rank=RANK, alpha=ALPHA, n_modules=len(targets))
    merge.check(targets, adapters, weights.open_model(base), PREFIX, recipe, notes)
    plan = merge.plan_merge(targets, adapters, PREFIX)
    merge.merge_model(base, folder / "merged", plan, ALPHA / RANK)
    merge.write_adapter(folder / "adapter", targets, adapters, recipe, PREFIX)
    k_only(folder / "adapter", folder / "adapter_k_only")
    job = {"dtype": dtype, "prompts": prompts, "max_lora_rank": 8, **{
        name: str(folder / name) for name in ("base", "merged", "adapter", "adapter_k_only")}}
    (folder / "job.json").write_text(json.dumps(job))
    for what in ("hf", "vllm-merged", "vllm-adapter"):
        serve("tests/merge_parity.py", folder / "job.json", what, folder / f"{what}.npz")
        engine = what.partition("-")[0].upper().replace("VLLM", "vLLM")
        for name, array in np.load(folder / f"{what}.npz").items():
            found[f"{engine} {name}"] = np.float64(array)
    return found


def k_only(adapter, out):
    """The adapter as a straightforward export would have it: no copy of k_proj as v_proj."""
    from safetensors.numpy import load_file, save_file
    shutil.copytree(adapter, out)
    arrays = load_file(out / "adapter_model.safetensors")
    kept = {name: array for name, array in arrays.items() if "5.self_attn.v_proj" not in name}
    save_file(kept, out / "adapter_model.safetensors", metadata={"format": "pt"})


def report(found, reference, dtype):
    """Print the table that LOG.md and the notebook show (pytest -s)."""
    print(f"\n{dtype}, against {reference}, {found[reference].shape} log-probabilities")
    rows = {}
    for name, array in found.items():
        delta = np.abs(array - found[reference])
        rows[name] = (delta.max(), delta.mean())
        print(f"  {name:22} max {delta.max():.2e}  mean {delta.mean():.2e}")
    return rows


@needs_serve
@pytest.mark.slow
def test_five_paths_agree_in_float32(tmp_path, prompts):
    found = parity(tmp_path, "float32", prompts)
    rows = report(found, "Tunix with adapters", "float32")
    for name in ("HF merged", "HF adapter", "vLLM merged", "vLLM adapter"):
        assert found[name].shape[0] >= 200 and rows[name][0] <= 1e-3, name
    assert rows["HF base"][0] > 0.5, "the adapter changes nothing"
    # Where V = K, vLLM applies a k_proj adapter to K only. The day this fails, vLLM applies it to
    # both, and 04_merge.py need not copy it as v_proj any more.
    assert rows["vLLM adapter_k_only"][0] > 100 * rows["vLLM adapter"][0]


@needs_serve
@pytest.mark.slow
def test_five_paths_agree_in_bfloat16(tmp_path, prompts):
    found = parity(tmp_path, "bfloat16", prompts)
    report(found, "HF merged", "bfloat16")
    noise = np.abs(found["HF base"] - found["vLLM base"]).mean()
    print(f"  the base's own HF-to-vLLM noise: mean {noise:.2e}")
    for name in ("HF adapter", "vLLM merged", "vLLM adapter", "Tunix with adapters"):
        assert np.abs(found[name] - found["HF merged"]).mean() <= 2 * noise, name


@needs_serve
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["TINY", "E2B"])
def test_a_base_that_transformers_saved_keeps_its_names(tmp_path, shape):
    """Gemma4ForCausalLM names tensors model.layers…, and writes per_layer_config since 5.15."""
    text, base = getattr(random_gemma, shape), tmp_path / "base"
    code = """
import json, sys, torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
torch.manual_seed(0)
model = Gemma4ForCausalLM(Gemma4TextConfig(**json.loads(sys.argv[1])))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
model.save_pretrained(sys.argv[2])
"""
    serve("-c", code, json.dumps(text), base)
    prompts = np.random.default_rng(1).integers(3, text["vocab_size"], (2, 40))
    model, mesh = tunix(base)
    before = logits(model, mesh, prompts)
    model = adapted(model, mesh, RANK, ALPHA)
    save(tmp_path / "checkpoints", model, RANK, ALPHA, (1,))
    config, tensors = architecture.read_config(base), weights.open_model(base)
    prefix = weights.language_prefix(base, tensors, config)
    assert prefix == "model."
    _, adapters, notes = merge.restore_adapters(tmp_path / "checkpoints", 1)
    targets = architecture.modules(config)
    recipe = a_recipe(rank=RANK, alpha=ALPHA, base_model="saved", n_modules=len(targets))
    merge.check(targets, adapters, tensors, prefix, recipe, notes)
    plan = merge.plan_merge(targets, adapters, prefix)
    merge.merge_model(base, tmp_path / "merged", plan, ALPHA / RANK)
    merge.write_adapter(tmp_path / "adapter", targets, adapters, recipe, prefix)
    assert list(weights.open_model(tmp_path / "merged")) == list(tensors)
    job = {"dtype": "float32", "prompts": prompts.tolist(), **{
        name: str(tmp_path / name) for name in ("base", "merged", "adapter")}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    serve("tests/merge_parity.py", tmp_path / "job.json", "hf", tmp_path / "hf.npz")
    found = np.load(tmp_path / "hf.npz")
    after = logits(model, mesh, prompts)
    for name, ours in (("base", before), ("merged", after), ("adapter", after)):
        scores = ours[:, :-1].reshape(-1, text["vocab_size"])
        shifted = scores - scores.max(-1, keepdims=True)
        ours = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        assert np.abs(ours - found[name]).max() < 1e-3, name
    assert np.abs(found["merged"] - found["base"]).max() > 0.05, "the adapter changes nothing"


@needs_serve
@pytest.mark.slow
@pytest.mark.parametrize("which", ["all", "attention"])
def test_adapter_loads_on_the_text_and_the_multimodal_class(world, tmp_path, which):
    """PEFT attaches every matrix except the copies of k_proj, and nothing in the vision tower."""
    parts = (attention_only(world) if which == "attention"
             else (world.targets, world.adapters, world.recipe))
    merge.write_adapter(tmp_path / "adapter", *parts, PREFIX)
    (tmp_path / "text.json").write_text(json.dumps(TINY))
    code = """
import json, sys, warnings, torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration,
                          Gemma4TextConfig)
text, adapter = json.load(open(sys.argv[1])), sys.argv[2]
vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=2, head_dim=16)
both = Gemma4Config(text_config=text, vision_config=vision)
saved = load_file(adapter + "/adapter_model.safetensors")
for model, mapping in (
        (Gemma4ForCausalLM(Gemma4TextConfig(**text)), {"^model.language_model.": "model."}),
        (Gemma4ForConditionalGeneration(both), None)):
    names = [name for name, _ in model.named_modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = PeftModel.from_pretrained(model, adapter, key_mapping=mapping)
    found = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert len(found) == len(saved) - 2, (len(found), len(saved))
    for name, parameter in found.items():
        key = name.replace(".default", "")
        if mapping:
            key = key.replace("base_model.model.model.", "base_model.model.model.language_model.")
        assert torch.equal(parameter, saved[key]), name
    assert not any("vision" in name for name in found)
    assert mapping or any("vision_tower" in name for name in names)
"""
    serve("-c", code, tmp_path / "text.json", tmp_path / "adapter")


@needs_serve
@pytest.mark.slow
def test_memory_stays_small(tmp_path):
    """The benchmark on a small checkpoint; its own limit, twice the largest tensor plus 300 MB."""
    done = program(sys.executable, "tests/benchmarks/bench_merge.py", "--quick", tmp_path)
    assert "memory held" in done.stdout, done.stdout + done.stderr[-500:]
