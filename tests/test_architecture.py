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
from tables.errors import UserError

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
    tensors = dict(model.named_parameters()) | {name: model.state_dict()[name] for name in kept}
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
    pattern = shape.attention_pattern * shape.num_layers
    for layer, kind in zip(layers, pattern[:shape.num_layers], strict=True):
        assert (layer.kind == "full") == (kind == model.AttentionType.GLOBAL)


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
    for other in ("model.vision_tower.encoder.layers.0.self_attn.q_proj",
                  "model.layers.0.experts.down_proj", "model.layers.0.router.proj",
                  "model.language_model.layers.0.per_layer_projection"):
        assert not re.fullmatch(architecture.PEFT_TARGETS, other)


def test_no_jax_in_what_counts():
    """05 to 07 count with these and must not start JAX beside a server."""
    code = ("import sys; import serving, verilog; from helpers import weights; "
            "from verilog import asking; from tables import architecture; "
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
        shapes, parts = {}, []
        for name, (flat_a, flat_b) in folded.items():
            shapes[name] = flat_b.shape[1], len(flat_a)
            parts.append(x.reshape(3, -1) @ flat_a @ flat_b)
        assert shapes == module.names
        ours = np.concatenate(parts, axis=1)
        theirs = np.einsum(module.how.equation, x, a, b).reshape(3, -1)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


# ── What a config.json may say ──
def one_line(match):
    """Refused, in one line that names what is wrong."""
    return pytest.raises(UserError, match=rf"\A(?=.*{match})[^\n]*\Z")


def rope(kind, **settings):
    return {"rope_parameters": {f"{kind}_attention": settings}}


REFUSED = {  # what the line says: what is changed in the tiny model's config.json
    "hidden_activation \"silu\", but .* \"gelu_pytorch_tanh\"": {"hidden_activation": "silu"},
    "rms_norm_eps 1e-05, but .* 1e-06": {"rms_norm_eps": 1e-5},
    "attention_bias true": {"attention_bias": True},
    "tie_word_embeddings false": {"tie_word_embeddings": False},
    "use_bidirectional_attention \"all\"": {"use_bidirectional_attention": "all"},
    "rope_parameters.full_attention.factor 8.0": rope("full", factor=8.0),
    "rope_parameters.full_attention.rope_type \"yarn\"": rope("full", rope_type="yarn"),
    "sliding_attention.rope_type \"linear\"": rope("sliding", rope_type="linear", factor=2.0),
    "sliding_attention.partial_rotary_factor 0.5": rope("sliding", partial_rotary_factor=0.5),
    "full_attention.attention_factor 2": rope("full", attention_factor=2),
    "rope_parameters.rope_theta 10000": {"rope_parameters": {"rope_theta": 10000}},
    "vocab_size_per_layer_input 7": {
        "vocab_size_per_layer_input": 7, "hidden_size_per_layer_input": 8},
    "layer_types with \"chunked_attention\"": {"layer_types": ["chunked_attention"] * 6},
    "7 num_hidden_layers and 6 layer_types": {"num_hidden_layers": 7},
    "attn_logit_softcapping 50.0, which no Gemma 4": {"attn_logit_softcapping": 50.0},
    "query_pre_attn_scalar 256, which no": {"query_pre_attn_scalar": 256},
    "rope_scaling .\"factor\": 8.0., which no": {"rope_scaling": {"factor": 8.0}},
    "rope_theta 5000, which no Gemma 4 that we know": {"rope_theta": 5000},
    "quantized .bitsandbytes.": {"quantization_config": {"quant_method": "bitsandbytes"}},
    "a mixture of experts .* fixed after 0.1.7, by .*e31e280e .* Take the 31B": {
        "enable_moe_block": True}}


@pytest.mark.parametrize("match", REFUSED)
def test_a_base_that_we_would_compute_otherwise_is_refused(match, tmp_path):
    with one_line(match):
        gemma.config_from_hf(random_gemma.TINY | REFUSED[match])
    nested = {"model_type": "gemma4", "text_config": random_gemma.TINY | REFUSED[match]}
    with one_line(match):
        architecture.layers(nested)


def test_top_of_a_nested_config_is_read_too():
    nested = {"model_type": "gemma4", "text_config": random_gemma.TINY, "vision_config": {"any": 1}}
    assert architecture.layers(nested) == architecture.layers(random_gemma.TINY)
    with one_line("tie_word_embeddings false"):
        architecture.layers(nested | {"tie_word_embeddings": False})
    with one_line("quantized .gptq."):
        architecture.layers(nested | {"quantization_config": {"quant_method": "gptq"}})


def test_a_base_that_was_trained_for_four_bits_is_taken():
    """Google's -qat-q4_0-unquantized: bfloat16 weights, and no method that has packed them."""
    of_qat = {"quantization_config": {"quant_type": "q4_0"}}
    for where in ("beside", "inside"):
        nested = {"model_type": "gemma4", "text_config": random_gemma.TINY}
        if where == "beside":
            nested |= of_qat
        else:
            nested["text_config"] = random_gemma.TINY | of_qat
        assert architecture.layers(nested) == architecture.layers(random_gemma.TINY)
    with one_line("quantized .with quantization_config."):
        architecture.layers(random_gemma.TINY | {"quantization_config": {"quant_algo": "NVFP4"}})


def test_what_changes_nothing_is_taken():
    known = gemma.config_from_hf(random_gemma.TINY)
    harmless = {"attn_logit_softcapping": None, "unsloth_version": "2026.1", "use_cache": False,
                "_name_or_path": "x", "transformers_version": "9", "num_experts": 128,
                "use_bidirectional_attention": "vision", "attention_dropout": 0.1,
                "rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 1.0}}}
    assert gemma.config_from_hf(random_gemma.TINY | harmless) == known


def test_every_key_of_transformers_is_classified_and_the_defaults_are_its_own():
    """Against the Gemma4TextConfig of the training environment: a new key there fails here."""
    from transformers import Gemma4TextConfig
    defaults = Gemma4TextConfig().to_dict()
    tables = [set(architecture.COMPUTED), architecture.COMPUTED_APART, set(architecture.FIXED),
              architecture.HARMLESS]
    assert {key for key in defaults if not key.startswith("_")} <= set().union(*tables)
    assert sum(map(len, tables)) == len(set().union(*tables)), "a key stands in two tables"
    for key, value in architecture.COMPUTED.items():
        assert value == defaults[key], key
    for key, values in architecture.FIXED.items():
        assert defaults[key] in values, key
    bare = architecture.text_config({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0})
    assert bare["layer_types"] == defaults["layer_types"]
    for kind, settings in defaults["rope_parameters"].items():
        assert bare["rope_parameters"][kind] == {
            key: value for key, value in settings.items() if key != "rope_type"}


def test_the_tensors_of_a_config_are_its_parameters():
    for config in SIZES.values():
        needed, unused = architecture.tensors(config)
        count = architecture.parameters(config)
        assert sum(map(math.prod, (needed | unused).values())) == count["total"]


def as_saved_since_5_15(config):
    """As transformers 5.15 and newer write the full layers' sizes (configuration_gemma4.py)."""
    text = dict(config)
    sizes = {"head_dim": text.pop("global_head_dim")}
    heads = text.pop("num_global_key_value_heads")
    if text["attention_k_eq_v"] and heads is not None:
        sizes["num_key_value_heads"] = heads
    return text | {"per_layer_config": {str(index): sizes for index, kind in enumerate(
        text["layer_types"]) if kind == "full_attention"}}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_in_per_layer_config_are_those_of_the_full_layers(size):
    text = architecture.text_config(SIZES[size])
    assert architecture.layers(as_saved_since_5_15(text)) == architecture.layers(text)


def test_other_sizes_in_per_layer_config_are_refused():
    saved = as_saved_since_5_15(random_gemma.TINY)
    for entries in ({"4": {"head_dim": 32}}, {"5": {"head_dim": 32, "intermediate_size": 7}}):
        with one_line("transformers 5.15 .* Put the original one back"):
            gemma.config_from_hf(saved | {"per_layer_config": entries})
    with one_line("transformers 5.15 .* Put the original one back"):
        gemma.config_from_hf(random_gemma.TINY | {"per_layer_config": {"5": {"head_dim": 64}}})


# ── What is computed, against transformers' logits ──
T, E = random_gemma.TINY, random_gemma.E2B
FULL, SLIDING = "full_attention", "sliding_attention"
ROPES = {SLIDING: {"rope_type": "default", "rope_theta": 123.5},
         FULL: {"rope_type": "proportional", "rope_theta": 777.0, "partial_rotary_factor": 0.5}}
COMPUTED = {"tiny": T, "e2b": E, "rope": T | {"rope_parameters": ROPES},
            "no cap": T | {"final_logit_softcapping": None},
            "low cap": T | {"final_logit_softcapping": 0.5}, "window": T | {"sliding_window": 5},
            "V of its own": T | {"attention_k_eq_v": False, "num_global_key_value_heads": 2},
            "two heads": T | {"num_global_key_value_heads": 2},
            "pattern": T | {"layer_types": [FULL, SLIDING, FULL, SLIDING, SLIDING, FULL]},
            "V = K, shared": E | {"attention_k_eq_v": True, "use_double_wide_mlp": False}}
MATTERS = {"rms_norm_eps": 1e-2, "hidden_activation": "silu", "use_bidirectional_attention": "all",
           "attention_bias": True, "rope_parameters": {
               SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
               FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
                      "factor": 4.0}}}


@pytest.mark.skipif(not SERVE.exists(), reason="no .venv-serve: run ./setup.sh serve")
@pytest.mark.slow
def test_what_we_compute_is_what_transformers_computes(tmp_path):
    """Each value that we take gives transformers' logits, and each that we refuse gives others."""
    import jax
    folders = {name: random_gemma.write(tmp_path / name, config, dtype=np.float32)
               for name, config in COMPUTED.items()}
    for key, value in MATTERS.items():
        folders[key] = random_gemma.write(tmp_path / key, T | {key: value}, dtype=np.float32)
    prompts = np.random.default_rng(1).integers(3, 320, (2, 40))
    job = {"dtype": "float32", "prompts": prompts.tolist(),
           "folders": {name: str(folder) for name, folder in folders.items()}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    serve("tests/merge_parity.py", tmp_path / "job.json", "bases", tmp_path / "out.npz")
    theirs = np.load(tmp_path / "out.npz")
    mask = np.tril(np.ones((2, 40, 40), bool))
    for name in COMPUTED:
        config = gemma.config_from_hf(folders[name], dtype="float32")
        mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
        model = gemma.load_base(folders[name], config, mesh)
        with mesh:
            scores, _ = model(prompts, np.tile(np.arange(40), (2, 1)), None, mask)
        ours = np.asarray(jax.nn.log_softmax(scores[:, :-1]))
        assert np.abs(ours.reshape(theirs[name].shape) - theirs[name]).max() < 1e-3, name
        if name not in ("tiny", "e2b"):
            like = theirs["e2b" if name == "V = K, shared" else "tiny"]
            assert np.abs(theirs[name] - like).max() > 0.01, f"{name} changes nothing"
    for key in MATTERS:
        if key != "attention_bias":  # transformers starts missing biases at zero
            assert np.abs(theirs[key] - theirs["tiny"]).max() > 0.01, f"{key} changes nothing"
        with one_line(key):
            gemma.config_from_hf(folders[key])


# ── Names of parts ──
def lowered(shape, remat):
    """A gradient with LoRA and blockwise attention, lowered: nothing is computed."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    config = gemma.config_from_hf(shape, remat_config=gemma.RematConfig[remat])
    mesh = gemma.make_mesh(config, (4, 1))
    model = gemma.abstract_base(config, mesh)
    gemma.use_block_attention(model, 16)
    graph, adapters, rest = nnx.split(gemma.inject_lora(model, 4, 8.0, mesh), nnx.LoRAParam, ...)
    tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    mask = jax.ShapeDtypeStruct((4, 64, 64), jnp.bool_)

    def total(adapters, rest, tokens, mask):
        return nnx.merge(graph, adapters, rest)(tokens, tokens, None, mask)[0].sum()
    with mesh:
        return jax.jit(jax.grad(total)).lower(adapters, rest, tokens, mask)


@pytest.mark.parametrize("shape, remat", [
    (random_gemma.SHALLOW, "NONE"), (random_gemma.SHALLOW, "BLOCK"), (random_gemma.E2B, "DECODER")])
def test_parts_have_names_and_the_program_is_the_same_without_them(shape, remat, monkeypatch):
    import contextlib

    import jax
    named = lowered(shape, remat)
    places = named.as_text(debug_info=True)
    for name in ("norm", "mlp", "embed", "projection", "attention", "lora", "lora/base"):
        assert re.search(rf'[/("]{name}[/)]', places), name
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    bare = lowered(shape, remat)
    assert bare.as_text() == named.as_text()
    assert not re.search(r'[/("](mlp|norm|projection|lora/base)[/)]', bare.as_text(debug_info=True))
