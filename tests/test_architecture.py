"""The list of layers and matrices against what Tunix and transformers build for the same config."""

import dataclasses
import json
import math
import re
import sys

import numpy as np
import pytest
import random_gemma
from conftest import ROOT, SERVE, program, serve

from helpers import gemma
from tables import physics
from tables import architecture

TINY = ROOT / "assets" / "tiny_gemma4"
SIZES = {name: architecture.read_config(ROOT / "data" / "configs" / f"gemma4_{name}.json")
         for name in ("31b", "e2b", "e4b")}
SIZES |= {"tiny": architecture.read_config(TINY), "e2b-like": random_gemma.E2B}
PUBLISHED = ["31b", "e2b", "e4b"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What transformers builds, on the meta device: {size: (matrices, layers)}."""
    if not SERVE.exists():
        pytest.skip("no .venv-serve: run ./setup.sh serve")
    folder = tmp_path_factory.mktemp("transformers")
    texts = {name: architecture.text_config(config) for name, config in SIZES.items()}
    (folder / "sizes.json").write_text(json.dumps(texts))
    code = """
import itertools, json, sys, torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
found = {}
for size, config in json.load(open(sys.argv[1])).items():
    with torch.device("meta"):
        model = Gemma4ForCausalLM(Gemma4TextConfig(**config))
    kept = [name for name in model.state_dict() if name.endswith("layer_scalar")]
    tensors = {**dict(model.named_parameters()), **{name: model.state_dict()[name] for name in kept}}
    layers = []
    for layer in model.model.layers:
        attention = layer.self_attn
        layers.append([attention.layer_type, attention.sliding_window, attention.head_dim,
                       attention.num_key_value_groups, attention.is_kv_shared_layer,
                       attention.store_full_length_kv])
    found[size] = {name: list(t.shape) for name, t in tensors.items()}, layers
json.dump(found, open(sys.argv[2], "w"))
"""
    serve("-c", code, folder / "sizes.json", folder / "found.json")
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("size", SIZES)
def test_matrices_are_those_of_transformers(size, theirs):
    tensors, _ = theirs[size]
    ours = {f"model.{name}.weight": list(shape) for module in architecture.modules(SIZES[size])
            for name, shape in module.names.items()}
    linear = {name: shape for name, shape in tensors.items() if name.endswith("_proj.weight")}
    assert ours == linear


@pytest.mark.parametrize("size", SIZES)
def test_layers_are_those_of_transformers(size, theirs):
    _, built = theirs[size]
    layers = architecture.layers(SIZES[size])
    keepers = {kind: index for index, (kind, *_, keeps) in enumerate(built) if keeps}
    for layer, (kind, window, head_dim, groups, shared, _) in zip(layers, built, strict=True):
        assert kind == {"full": "full_attention", "sliding": "sliding_attention"}[layer.kind]
        assert (layer.window, layer.head_dim) == (window, head_dim)
        assert layer.heads // layer.kv_heads == groups and layer.owns_kv != shared
        assert layer.kv_from == (keepers[kind] if shared else layer.index)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_those_of_transformers(size, theirs):
    """Without the K, V and key norm that google's own files hold for layers that share."""
    tensors, _ = theirs[size]
    count, layers = physics.parameters(SIZES[size]), architecture.layers(SIZES[size])
    norms = sum(layer.head_dim for layer in layers if not layer.owns_kv)
    assert count["total"] - count["unused"] - norms == sum(map(math.prod, tensors.values()))


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_and_modules_are_those_of_tunix(size):
    """Against ModelConfig.gemma4_31b() and so on, which no file of ours has touched."""
    from flax import nnx
    from tunix.models.gemma4 import model
    shape = getattr(model.ModelConfig, f"gemma4_{size}")()
    abstract = nnx.eval_shape(lambda: model.Gemma4(shape, rngs=gemma.SameKey(0)))
    found = {".".join(map(str, path)): math.prod(leaf.shape)
             for path, leaf in nnx.to_flat_state(nnx.state(abstract, nnx.Param))}
    count, layers = physics.parameters(SIZES[size]), architecture.layers(SIZES[size])

    def total(*words):
        return sum(number for path, number in found.items() if any(word in path for word in words))
    assert count["total"] == sum(found.values())
    assert count["embedding"] == found["embedder.input_embedding"]
    assert count["mlp"] == total("gate_proj", "up_proj", "down_proj")
    assert count["attention"] + count["unused"] == total("einsum")
    for module in architecture.modules(SIZES[size]):
        name = module.path + (".kernel" if "mlp" in module.path else ".w")
        assert found[name] == module.size, name
    assert [m.path for m in architecture.modules(SIZES[size])] == gemma.expected_modules(shape)
    assert [layer.kind == "full" for layer in layers] == [
        kind == model.AttentionType.GLOBAL for kind in
        (shape.attention_pattern[i % len(shape.attention_pattern)] for i in range(shape.num_layers))]


@pytest.mark.parametrize("size", SIZES)
def test_tunix_config_there_and_back(size):
    config = gemma.config_from_hf(SIZES[size], dtype="float32")
    assert architecture.layers(gemma._as_hf(config)) == architecture.layers(SIZES[size])
    if size in PUBLISHED:
        own = getattr(type(config), f"gemma4_{size}")()
        sharding = config.shd_config.emb_vd  # ours alone: the embedding lies by vocabulary
        own.shd_config = dataclasses.replace(own.shd_config, emb_vd=sharding)
        own.attention_pattern = (own.attention_pattern * own.num_layers)[:own.num_layers]
        assert {field.name: (getattr(config, field.name), getattr(own, field.name))
                for field in dataclasses.fields(own)
                if getattr(config, field.name) != getattr(own, field.name)} == {}


def test_the_pattern_for_peft_reaches_nothing_else():
    for other in ("model.vision_tower.encoder.layers.0.self_attn.q_proj", "model.layers.0.experts.down_proj",
                  "model.language_model.layers.0.per_layer_projection", "model.layers.0.router.proj"):
        assert not re.fullmatch(architecture.PEFT_TARGETS, other)


def test_no_jax_in_what_counts():
    """05 to 07 count with these and must not start JAX beside a server."""
    code = ("import sys; import serving, verilog; from helpers import weights; from verilog import asking; from tables import architecture; "
            "assert 'jax' not in sys.modules and 'torch' not in sys.modules")
    assert program(sys.executable, "-c", code).returncode == 0


INVENTED = {  # keys and values apart, heads behind the width: as many other models have it
    "attn.q": architecture.Kind(("attention.wq",), "D", "NH", "DNH"),
    "attn.k": architecture.Kind(("attention.wk",), "D", "KH", "DKH"),
    "attn.v": architecture.Kind(("attention.wv",), "D", "KH", "DKH"),
    "attn.o": architecture.Kind(("attention.wo",), "NH", "D", "NHD"),
    "mlp.up": architecture.Kind(("mlp.w1",), "D", "F", "DF"),
    "mlp.down": architecture.Kind(("mlp.w2",), "F", "D", "FD")}


@pytest.mark.parametrize("family", [architecture.GEMMA4, INVENTED], ids=["Gemma 4", "invented"])
def test_plain_factors_are_the_einsum_of_training_in_any_family(family, monkeypatch):
    """A new family is one table: its layers are listed, and its adapters fold, without more."""
    monkeypatch.setitem(architecture.FAMILIES, "invented_text", family)
    modules = architecture.modules(random_gemma.TINY | {"model_type": "invented_text"})
    assert {module.path.partition(".")[2].partition(".")[2] for module in modules} == set(family)
    draw = np.random.default_rng(0)
    for module in modules:
        a, b = (draw.normal(size=shape) for shape in module.adapter(4))
        x = draw.normal(size=(3, *module.inputs))
        folded = module.factors(a, b)
        assert {name: (two.shape[1], len(one)) for name, (one, two) in folded.items()} == module.names
        ours = np.concatenate([x.reshape(3, -1) @ one @ two for one, two in folded.values()], axis=1)
        theirs = np.einsum(module.how.equation, x, a, b).reshape(3, -1)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_base_that_would_be_read_wrongly_is_refused():
    """transformers 5.15 and newer write the full layers' sizes as here (its configuration_gemma4.py); read as
    before, they would be those of the sliding layers."""
    text = architecture.text_config(SIZES["tiny"]) | {"per_layer_config": {"5": {"head_dim": 64}}}
    del text["global_head_dim"]
    with pytest.raises(ValueError, match="transformers 5.15 .* Put the original one back"):
        gemma.config_from_hf(text)
    with pytest.raises(ValueError, match="a mixture of experts .* Take the 31B"):
        gemma.config_from_hf(architecture.text_config(SIZES["tiny"]) | {"enable_moe_block": True})
