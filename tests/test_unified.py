"""Gemma 4 12B: its language model (`gemma4_unified_text`) through loading, LoRA, merge and PEFT.

`data/configs/gemma4_12b.json` is the text part of google/gemma-4-12B's config.json (revision
56820d7d on the hub, June 2026), as somebody else's public log shows that file.
"""

import json
import shutil

import numpy as np
import pytest
import random_gemma
from conftest import ROOT, needs_serve, serve
from safetensors.numpy import load_file, save_file
from test_merge import make_world, tunix

import helpers
from helpers import four_bits, gemma, merge, weights
from tables import architecture, physics

BIG = architecture.read_config(ROOT / "data" / "configs" / "gemma4_12b.json")
UNIFIED = random_gemma.TINY | {
    "architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text",
    "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
PREFIX = "model.language_model."


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A small 12B with adapters that Tunix made, and its logits without and with them."""
    return make_world(tmp_path_factory.mktemp("unified"), UNIFIED)


def log_probabilities(logits):
    """float64 [positions, vocabulary]: for every prompt, every position but the last."""
    scores = logits[:, :-1].reshape(-1, logits.shape[-1])
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@needs_serve
def test_tunix_transformers_and_peft_agree(world, tmp_path):
    """Base, merged model and base + adapter, against transformers' Gemma4UnifiedForCausalLM."""
    merge.merge_model(world.base, tmp_path / "merged", world.plan, world.scale)
    merge.write_adapter(tmp_path / "adapter", world.targets, world.adapters, world.recipe, PREFIX)
    job = {"dtype": "float32", "prompts": world.prompts.tolist(), "base": str(world.base),
           "merged": str(tmp_path / "merged"), "adapter": str(tmp_path / "adapter")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    serve("tests/merge_parity.py", tmp_path / "job.json", "hf", tmp_path / "hf.npz")
    theirs = np.load(tmp_path / "hf.npz")
    for name, ours in (("base", world.before), ("merged", world.after), ("adapter", world.after)):
        apart = np.abs(log_probabilities(ours) - theirs[name]).max()
        assert apart < 1e-4, (name, apart)
    assert np.abs(theirs["merged"] - theirs["base"]).max() > 0.05, "the adapter changes nothing"


def test_every_matrix_has_an_adapter(world):
    """Keys alone in the full layers, as in the 31B: 36 modules of these six layers."""
    listed = architecture.modules(UNIFIED)
    assert len(world.adapters) == len(listed) == 36
    assert set(world.adapters) == {module.path for module in listed}


def test_names_stay_as_they_were(world, tmp_path):
    """Also those of the vision embedder, which is no tower and has a name of its own."""
    base = tmp_path / "base"
    shutil.copytree(world.base, base)
    file = weights.files_of(base)[-1]
    arrays = load_file(file)
    arrays["model.vision_embedder.patch_dense.weight"] = np.ones((4, 4), np.float32)
    save_file(arrays, file, metadata={"format": "pt"})
    index = json.loads((base / weights.INDEX).read_text())
    index["weight_map"]["model.vision_embedder.patch_dense.weight"] = file.name
    (base / weights.INDEX).write_text(json.dumps(index))
    nested = {"model_type": "gemma4_unified", "text_config": UNIFIED, "vision_config": {},
              "architectures": ["Gemma4UnifiedForConditionalGeneration"]}
    (base / "config.json").write_text(json.dumps(nested))
    tensors = weights.open_model(base)
    assert weights.language_prefix(base, tensors, architecture.read_config(base)) == PREFIX
    merge.merge_model(base, tmp_path / "merged", world.plan, world.scale)
    assert list(weights.open_model(tmp_path / "merged")) == list(tensors)
    packed = four_bits.export(tmp_path / "merged", tmp_path / "packed")
    assert len(packed) == len(world.plan)


def test_the_recipe_loads_it_as_03_does(world):
    """Array by array; on four devices, of which no two share the one head."""
    import jax
    from flax import nnx

    import recipe
    model, mesh = recipe.load_model(world.base, "float32")
    assert dict(mesh.shape) == {"fsdp": 4, "tp": 1}
    theirs, _ = tunix(world.base)
    pairs = zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(theirs)), strict=True)
    for mine, other in pairs:
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def test_the_published_config():
    """48 layers, 11.9 billion parameters; the one head of its full layers leaves no tp."""
    stack = architecture.layers(BIG)
    assert len(stack) == 48 and sum(layer.k_is_v for layer in stack) == 8
    assert physics.parameters(BIG)["total"] == pytest.approx(11.9e9, rel=0.001)
    assert [architecture.choose_mesh(BIG, chips) for chips in (1, 4, 8)] == [(1, 1), (4, 1), (8, 1)]
    with pytest.raises(helpers.UserError, match="tp=2 does not divide the 1 KV heads"):
        gemma.make_mesh(gemma.config_from_hf(BIG), (2, 2), [None] * 4)


@needs_serve
def test_layers_and_defaults_are_those_of_transformers():
    """The full size on the meta device, and a config.json that leaves everything out."""
    code = """
import json, sys, torch
from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig
config = json.loads(sys.argv[1])
with torch.device("meta"):
    model = Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**config))
shapes = {name: list(tensor.shape) for name, tensor in model.named_parameters()}
print(json.dumps([shapes, Gemma4UnifiedTextConfig().to_dict()]))
"""
    text = architecture.text_config(BIG)
    shapes, defaults = json.loads(serve("-c", code, json.dumps(text)).splitlines()[-1])
    needed, unused = architecture.tensors(BIG)
    scalars = {name for name in needed if name.endswith("layer_scalar")}  # buffers there
    ours = {f"model.{name}": list(shape) for name, shape in needed.items() if name not in scalars}
    assert ours == shapes and not unused
    bare = architecture.text_config({"model_type": "gemma4_unified_text"})
    for key in ("sliding_window", "hidden_size", "num_attention_heads", "layer_types"):
        assert bare[key] == defaults[key], key
    assert bare["hidden_size_per_layer_input"] == 0


def test_another_familys_base_is_refused_in_one_line(tmp_path):
    for kind in ("gemma3_text", "llama", "gemma4_unified_vision"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        words = rf"\A[^\n]*model_type {kind}. Take one[^\n]*\Z"
        with pytest.raises(helpers.UserError, match=words):
            gemma.config_from_hf(tmp_path)
