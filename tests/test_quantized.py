"""helpers/quantized.py: a quantized base against the unquantized one, small and abstractly."""

import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
import random_gemma
import test_merge
import train_driver
from conftest import ROOT, RUN, a_recipe, needs_serve, page, serve
from flax import nnx

from helpers import gemma, merge, programs, quantized, records, train, weights
from helpers.run import UserError
from tpu_time import fit

pytestmark = pytest.mark.laboratory

KINDS = ("q_einsum", "kv_einsum", "k_einsum", "attn_vec_einsum", "gate_proj", "up_proj",
         "down_proj")
TINY = "assets/tiny_gemma4"


def one_device(config):
    return gemma.make_mesh(config, (1, 1), jax.local_devices(backend="cpu")[:1])


def with_adapters(base_dtype, int8_products=False, dtype="float32", source=TINY):
    """The tiny model on one device, adapters of rank 4 with random B."""
    config = gemma.config_from_hf(source, dtype=dtype)
    mesh = one_device(config)
    model = quantized.load_base(source, config, mesh, base_dtype)
    model = gemma.inject_lora(model, 4, 8.0, mesh, provider=quantized.provider(
        base_dtype, 4, 8.0, int8_products=int8_products))
    draw = np.random.default_rng(0)
    for pair in gemma.adapted_modules(model).values():
        pair["b"].set_value(jnp.asarray(draw.normal(0, 0.05, pair["b"].shape), jnp.float32))
    return model, mesh


def loss_and_gradients(model, mesh):
    """Loss and adapter gradients of two packed rows of random ids."""
    rows = train.Batch(**train_driver.examples(2, 64, vocab=1_200))
    graph, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    loss_fn = train.make_loss(63)
    with mesh:
        return jax.jit(jax.value_and_grad(
            lambda adapters, frozen: loss_fn(nnx.merge(graph, adapters, frozen), rows)[0]))(
                adapters, frozen)


@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_a_stored_matrix_travels_as_int8(shape):
    """It was dequantized first, so twice as many bytes went over the links (LOG, 2026-11-29)."""
    config = gemma.config_from_hf(TINY, dtype="float32")
    mesh = gemma.make_mesh(config, shape)
    model = quantized.load_base(TINY, config, mesh, "int8")
    model = gemma.inject_lora(model, 4, 8.0, mesh, provider=quantized.provider("int8", 4, 8.0))
    rows = train.Batch(**train_driver.examples(4, 64, vocab=1_200))
    graph, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    loss_fn = train.make_loss(63)
    step = jax.jit(jax.value_and_grad(
        lambda adapters, frozen: loss_fn(nnx.merge(graph, adapters, frozen), rows)[0]))
    with mesh:
        text = step.lower(adapters, frozen).compile().as_text()

    vocabulary = config.num_embed
    sizes = {"s8": 0, "f32": 0}  # of the largest array that is gathered, but for the embeddings
    for dtype, dimensions in re.findall(r"= (s8|f32)\[([\d,]+)\]\S* all-gather\(", text):
        numbers = [int(number) for number in dimensions.split(",")]
        if vocabulary not in numbers:
            sizes[dtype] = max(sizes[dtype], math.prod(numbers))
    assert sizes["s8"] >= config.embed_dim * config.hidden_dim // shape[1]
    assert sizes["f32"] < sizes["s8"]


@pytest.fixture(scope="module")
def unquantized():
    return loss_and_gradients(*with_adapters("bfloat16"))


def cosines(gradients, others):
    """{kind: cosine between the adapter gradients of two models}."""
    found = {}
    for kind in KINDS:
        pairs = [(np.ravel(a.get_value()), np.ravel(b.get_value())) for (path, a), (_, b) in zip(
            nnx.to_flat_state(gradients), nnx.to_flat_state(others)) if kind in path]
        ours, theirs = (np.concatenate(side) for side in zip(*pairs))
        found[kind] = float(ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs))
    return found


@pytest.mark.parametrize("base_dtype, int8_products, least",
                         [("int8", False, 0.98),
                          pytest.param("nf4", False, 0.6, marks=pytest.mark.slow),
                          pytest.param("int8", True, 0.97, marks=pytest.mark.slow)])
def test_gradients_of_every_kind_point_where_the_unquantized_ones_do(
        unquantized, base_dtype, int8_products, least):
    loss, gradients = loss_and_gradients(*with_adapters(base_dtype, int8_products))
    found = cosines(gradients, unquantized[1])
    print(base_dtype, int8_products, float(loss), float(unquantized[0]), found)
    assert min(found.values()) > least, found
    assert abs(loss / unquantized[0] - 1) < 0.05


@pytest.mark.parametrize("base_dtype", [
    "int8", pytest.param("nf4", marks=pytest.mark.slow)])
def test_forward_is_dequantize_then_multiply(base_dtype):
    """Same weights written out in full, stock model: same logits. Also what the merge relies on."""
    model, mesh = with_adapters(base_dtype)
    plain, _ = with_adapters("bfloat16")
    files = weights.open_model(TINY)
    paths = {path: module for path, module in model.iter_modules()
             if any(quantized.is_quantized(value) for value in vars(module).values())}
    assert len(paths) == 36
    modules = dict(plain.iter_modules())
    for path, module in paths.items():
        name = "w" if hasattr(module, "w") else "kernel"
        weight = quantized.dequantized(getattr(module, name))
        variable = getattr(modules[path], name)
        assert not np.array_equal(weight, variable.get_value())
        variable.set_value(weight)
    name = "model.language_model.layers.0.self_attn.o_proj.weight"
    as_trained = quantized.as_trained(base_dtype, "float32")
    rows = as_trained(files[name].array()[7:19].astype(np.float32))
    ours = quantized.dequantized(model.layers[0].attn.attn_vec_einsum.w)
    np.testing.assert_array_equal(rows, np.asarray(ours).reshape(-1, ours.shape[-1]).T[7:19])
    tokens = np.random.default_rng(0).integers(3, 1_200, (2, 48))
    mask = np.tril(np.ones((2, 48, 48), bool))
    with mesh:
        ours, theirs = (np.asarray(nnx.jit(lambda one: one(tokens, attention_mask=mask)[0])(one))
                        for one in (model, plain))
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("tiles", [{}, {1: 4}, {0: 2, 1: 4}])
def test_dequantized_nf4_is_qwix_s_without_its_gather(tiles):
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(6, 16, 5)), jnp.bfloat16)
    stored = qwix.quantize(weight, "nf4", channelwise_axes=[2], tiled_axes=tiles)
    np.testing.assert_array_equal(quantized.dequantize(stored), qwix.dequantize(stored))
    for function, gathers in ((qwix.dequantize, True), (quantized.dequantize, False)):
        assert ("gather" in jax.jit(function).lower(stored).as_text()) == gathers


@pytest.mark.parametrize("equation, left, right", [
    ("BTD,NDH->BTNH", (2, 3, 8), (4, 8, 6)), ("BTNH,NHD->BTD", (2, 3, 4, 6), (4, 6, 8)),
    ("BSD,CKDH->CBSKH", (2, 3, 8), (2, 4, 8, 6)), ("BTD,DF->BTF", (2, 3, 8), (8, 10))])
def test_int8_product_and_gradient(equation, left, right):
    draw = np.random.default_rng(0)
    lhs, weight = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in (left, right))
    inputs = [axis for axis, letter in enumerate(equation.split("->")[0].split(",")[1])
              if letter not in equation.split("->")[1]]
    stored = qwix.quantize(weight, "int8", channelwise_axes=[a for a in range(weight.ndim)
                                                            if a not in inputs])
    out = jnp.asarray(draw.normal(size=jnp.einsum(equation, lhs, weight).shape), jnp.float32)

    def score(product):
        return lambda lhs: jnp.sum(product(lhs) * out)
    exact = score(lambda lhs: jnp.einsum(equation, lhs, qwix.dequantize(stored)))
    ours = score(lambda lhs: quantized.int8_einsum(equation, lhs, stored.qvalue, stored.scale))
    for wanted, found in ((jnp.einsum(equation, lhs, qwix.dequantize(stored)),
                           quantized.int8_einsum(equation, lhs, stored.qvalue, stored.scale)),
                          (jax.grad(exact)(lhs), jax.grad(ours)(lhs))):
        cosine = jnp.vdot(wanted, found) / jnp.linalg.norm(wanted) / jnp.linalg.norm(found)
        assert wanted.shape == found.shape and cosine > 0.9995
    text = jax.jit(jax.grad(ours)).lower(lhs).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all("xi8>" in line and "xi32>" in line for line in products)


@pytest.mark.parametrize("name, layers, tp, per_layer, shared", [
    ("31b", 12, 4, 0, 0), ("e2b-small", 6, 1, 2, 3),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in (("e2b", 35, 1, 2, 20), ("31b", 60, 4, 0, 0)))])
def test_every_matrix_is_quantized_or_left_on_purpose(name, layers, tp, per_layer, shared,
                                                      monkeypatch):
    """31B and E2B, abstractly: all that LoRA reaches; not norms, embedders, per-layer inputs."""
    source = random_gemma.E2B if name == "e2b-small" else f"data/configs/gemma4_{name}.json"
    config = gemma.config_from_hf(source, num_layers=layers)
    devices = np.array(jax.devices()[:1] * tp).reshape(1, tp)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
    monkeypatch.setattr(quantized, "TILE", tile := 16 if layers == 6 else 32)
    model = quantized.abstract_base(config, mesh, "nf4")
    state = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}
    stored = {path.removesuffix(".array.qvalue"): leaf for path, leaf in state.items()
              if path.endswith(".array.qvalue")}
    modules = {path.rpartition(".")[0] for path in stored}
    assert modules == set(gemma.expected_modules(config))
    assert {str(leaf.get_value().dtype) for leaf in stored.values()} == {"uint4"}
    left = [path for path, leaf in state.items() if ".array." not in path and leaf.ndim > 1]
    unused = [path for path in left if path.endswith("kv_einsum.w")]
    assert len(unused) == shared  # layers that reuse keys: Tunix has the weights, nobody uses them
    left = [path for path in left if path not in unused]
    embedder = [path for path in left if path.startswith("embedder.")]
    rest = {path.split(".")[2] for path in left if path not in embedder}
    assert len(embedder) == (3 if per_layer else 1), embedder
    assert rest == ({"per_layer_input_gate", "per_layer_projection"} if per_layer else set())
    assert len(left) == len(embedder) + per_layer * config.num_layers
    if layers in (35, 60):  # all of them
        padding = 2 * fit._padding(fit._config(name), 1) / tp / 2**30
        held = fit.held(name, 1, tp, "nf4")[0] - padding
        assert gemma.gib(nnx.state(model)) == pytest.approx(held, rel=0.02)
    for hull in (model.layers[0].attn.attn_vec_einsum.w, model.layers[0].mlp.down_proj.kernel):
        values, scale = (getattr(hull.array, part).get_value() for part in ("qvalue", "scale"))
        assert math.prod(values.shape) == tile * math.prod(scale.shape)
        scale.sharding.shard_shape(scale.shape)  # raises if an axis does not divide
    adapted = gemma.inject_lora(model, 8, 8.0, mesh, provider=quantized.provider(
        "nf4", 8, 8.0))
    assert set(gemma.adapted_modules(adapted)) == set(gemma.expected_modules(config))


def test_layers_that_reuse_keys_load(tmp_path):
    """E2B's shape, saved as transformers saves it: without the weights that no layer uses."""
    folder = random_gemma.write(tmp_path / "base", random_gemma.E2B, keep_unused=False)
    config = gemma.config_from_hf(folder)
    mesh = one_device(config)
    model = quantized.load_base(folder, config, mesh, "int8")
    whole = gemma.place(gemma.load_base(folder, config, mesh), mesh)
    leaves = jax.tree.leaves(nnx.state(model))
    assert leaves and not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        if ".array." not in ".".join(map(str, path)):
            np.testing.assert_array_equal(leaf.get_value(), dict(
                nnx.to_flat_state(nnx.state(whole)))[path].get_value())


# ── Merging (04) ──


@pytest.fixture
def trained(made, monkeypatch):
    """The same, with tiles that divide its small matrices."""
    monkeypatch.setattr(quantized, "TILE", 16)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base in float32 with a checkpoint, as tests/test_merge.py makes it, on an NF4 base."""
    world = test_merge.make_world(tmp_path_factory.mktemp("quantized"), test_merge.TINY)
    world.recipe = replace(world.recipe, dtype="float32")
    return world


def logits_on(world, base, base_dtype="bfloat16"):
    """Logits of the adapters beside a base."""
    config = gemma.config_from_hf(base, dtype="float32")
    mesh = one_device(config)
    model = quantized.load_base(base, config, mesh, base_dtype)
    model = gemma.inject_lora(model, test_merge.RANK, test_merge.ALPHA, mesh, provider=(
        quantized.provider(base_dtype, test_merge.RANK, test_merge.ALPHA)))
    for path, pair in gemma.adapted_modules(model).items():
        for side, value in zip("ab", world.adapters[path]):
            pair[side].set_value(jnp.asarray(value))
    return test_merge.logits(model, mesh, world.prompts)


def test_a_merge_into_the_base_as_trained(trained, tmp_path):
    """Its logits are those of the adapters beside the NF4 base; beside the other: test_merge."""
    as_trained = quantized.as_trained("nf4", trained.recipe.dtype)
    merge.merge_model(trained.base, tmp_path / "merged", trained.plan, trained.scale, as_trained)
    model, mesh = test_merge.tunix(tmp_path / "merged")
    found = test_merge.logits(model, mesh, trained.prompts)
    wanted = logits_on(trained, trained.base, "nf4")
    assert np.abs(found - wanted).max() < 1e-3 < 0.1 < np.abs(found - trained.after).max()


ONLY_Q = ".*q_einsum"


def test_partial_targets_on_a_quantized_base(trained, tmp_path, monkeypatch):
    """Every matrix is quantized, q_proj has adapters; the merged folder says the same of both."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    config = gemma.config_from_hf(trained.base, dtype="float32")
    mesh = one_device(config)
    rank, alpha = test_merge.RANK, test_merge.ALPHA
    model = quantized.load_base(trained.base, config, mesh, "nf4")
    provider = quantized.provider("nf4", rank, alpha, ONLY_Q)
    with pytest.raises(UserError, match="If that is meant, set partial=True"):
        gemma.inject_lora(model, rank, alpha, mesh, ONLY_Q, provider=provider)
    model = gemma.inject_lora(model, rank, alpha, mesh, ONLY_Q, partial=True, provider=provider)
    adapters = {path: pair for path, pair in trained.adapters.items() if path.endswith("q_einsum")}
    pairs = gemma.adapted_modules(model)
    assert set(pairs) == set(adapters)
    for path, pair in pairs.items():
        for side, value in zip("ab", adapters[path]):
            pair[side].set_value(jnp.asarray(value))
    wanted = test_merge.logits(model, mesh, trained.prompts)

    recipe = replace(trained.recipe, targets=ONLY_Q, partial=True, base_dtype="nf4")
    targets = merge.targets_of(trained.base, adapters, recipe)
    record = merge.run(trained.base, targets, adapters, 20, recipe, test_merge.PREFIX)
    found = test_merge.logits(*test_merge.tunix(tmp_path / "merged"), trained.prompts)
    assert np.abs(found - wanted).max() < 1e-3, "all matrices are written as they were trained on"
    assert len(record.norms) == len(adapters) and all(row["delta"] > 0 for row in record.norms)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "q_proj" in config["target_modules"] and "up_proj" not in config["target_modules"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_rows_are_rounded_whatever_dtype_the_base_s_files_have(dtype):
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(3, 64)).astype(jnp.dtype(dtype))
    for base_dtype in ("int8", "nf4"):
        rounded = quantized.as_trained(base_dtype, "bfloat16")(rows)
        assert rounded.dtype == rows.dtype and rounded.shape == rows.shape
        error = np.abs(np.float32(rounded) - np.float32(rows)).max()
        assert 0 < error < 0.02 * (1 if base_dtype == "int8" else 30)


@pytest.mark.slow
@pytest.mark.series
@pytest.mark.skipif(not (RUN / "data").exists(), reason=f"no run in {RUN}: ./run_all.sh makes one")
def test_03_and_04_take_a_quantized_base(tmp_path):
    """All of 03's page, two steps; 04's merged folder then answers as the quantized model did."""
    text = (ROOT / "03_train.py").read_text()
    old = "TINY = train.Settings("
    assert text.count(old) == 1
    (script := tmp_path / "03_train.py").write_text(text.replace(old, old + 'base_dtype="int8", '))
    shutil.copytree(RUN / "data", tmp_path / "run" / "data")
    said = page(script, tmp_path / "run", PYTHONPATH=str(ROOT), MAX_STEPS="2")
    assert said.returncode == 0, said.stderr[-2_000:]
    assert "step 2/2 | validation loss" in said.stdout
    held = re.search(r"parameters, ([\d.]+) MiB per device", said.stdout)
    assert held and float(held[1]) < 2, "the base was quantized: it's 3.48 MiB in float32"

    said = page(ROOT / "04_merge.py", tmp_path / "run")
    assert said.returncode == 0, said.stderr[-2_000:]
    assert "the answer in 03 was the same to the letter" in said.stdout
    merged = weights.open_model(tmp_path / "run" / "merged")
    base = weights.open_model(ROOT / TINY)
    name = "model.language_model.layers.0.mlp.gate_proj.weight"
    moved = np.float32(merged[name].array()) - np.float32(base[name].array())
    assert np.linalg.matrix_rank(moved, tol=1e-3) > 16, "merged into the rounded base"


def test_a_storage_that_nobody_knows_is_refused_with_a_list():
    for base_dtype in ("fp8", "int4", "BF16"):
        with pytest.raises(UserError, match="bfloat16, int8, nf4"):
            quantized.provider(base_dtype, 4, 8.0)
    for base_dtype in ("", "bfloat16", "nf4"):
        with pytest.raises(UserError, match="int8_products needs"):
            quantized.provider(base_dtype, 4, 8.0, int8_products=True)


@pytest.mark.parametrize("base_dtype", ["INT8", "fp8", " int8", 3, None, True, ["int8"]])
def test_a_storage_that_nobody_knows_is_refused_before_anything_is_read(base_dtype, monkeypatch):
    config = gemma.config_from_hf(TINY)
    mesh = one_device(config)
    monkeypatch.setattr(gemma, "load_base", None)  # would be a TypeError
    monkeypatch.setattr(gemma, "abstract_base", None)
    for ask in (lambda: quantized.abstract_base(config, mesh, base_dtype),
                lambda: quantized.load_base("nowhere", config, mesh, base_dtype),
                lambda: quantized.provider(base_dtype, 4, 8.0),
                lambda: quantized.as_trained(base_dtype, "bfloat16")):
        with pytest.raises(UserError, match="no storage that we know. Take one of bfloat16, int8"):
            ask()


@pytest.mark.parametrize("page_s_own", ["", "bfloat16"])
def test_int8_products_of_a_plain_base_stop_03_before_anything_is_loaded(page_s_own, monkeypatch):
    """03 makes the abstract model and its adapters first, and `load_base` comes after that."""
    config = gemma.config_from_hf(TINY)
    mesh = one_device(config)
    cfg = train.Settings(base_dtype=page_s_own, int8_products=True)
    with pytest.raises(UserError, match='int8_products needs base_dtype="int8"'):
        programs.adapted(quantized.abstract_base(config, mesh, cfg.base_dtype), cfg, mesh)


def test_the_two_words_for_a_plain_base_are_one_recipe():
    plain, named = (train.recipe_of(train.Settings(base_dtype=word)) for word in ("", "bfloat16"))
    assert plain == named and plain["base_dtype"] == ""
    for word in ("", "bfloat16"):
        assert merge.rows_as_trained(a_recipe(base_dtype=word)) is None
    with pytest.raises(UserError, match="nothing is rounded"):
        quantized.as_trained("bfloat16", "float32")


@pytest.mark.parametrize("base_dtype", ["fp8", "INT8", 3, None, True, ["int8"]])
def test_a_recipe_with_another_storage_is_one_line_that_names_its_file(base_dtype, tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(a_recipe().to_json() | {"base_dtype": base_dtype}))
    with pytest.raises(UserError, match="'base_dtype'.*Run 03_train.py again") as error:
        records.Recipe.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_an_older_recipe_beside_an_int8_checkpoint_is_refused(made):
    """Else 04 would merge int8 training into the base as it was before."""
    ours = made.recipe
    noted = {"rank": ours.rank, "alpha": ours.alpha, "dtype": ours.dtype, "base_dtype": "int8",
             "int8_products": False}
    parts = made.targets, made.adapters, made.tensors, test_merge.PREFIX
    merge.check(*parts, replace(ours, base_dtype="int8"), noted)
    with pytest.raises(UserError, match="recipe says base_dtype nothing, the checkpoint int8"):
        merge.check(*parts, ours, noted)
    for older in ({}, made.notes):  # an older checkpoint says nothing of it, and was plain
        merge.check(*parts, ours, older)
    with pytest.raises(UserError, match="recipe says base_dtype int8, the checkpoint nothing"):
        merge.check(*parts, replace(ours, base_dtype="int8"), made.notes)
    with pytest.raises(UserError, match="recipe says dtype float32, the checkpoint bfloat16"):
        merge.check(*parts, replace(ours, base_dtype="int8"), noted | {"dtype": "bfloat16"})


def test_a_checkpoint_without_the_new_names_is_one_of_a_plain_base():
    """Older ones have no `base_dtype`; and a changed storage is another recipe."""
    recipe = train.recipe_of(train.Settings())
    older = {key: value for key, value in recipe.items() if key not in train.OLDER}
    manager = SimpleNamespace(directory="checkpoints")
    train._same_recipe(manager, 5, older, recipe)
    stored_as_int8 = train.recipe_of(train.Settings(base_dtype="int8"))
    for saved, wanted, words in ((older, stored_as_int8, '"" there, int8 here'),
                                 (stored_as_int8, recipe, 'int8 there, "" here')):
        with pytest.raises(UserError, match=f"base_dtype: {words}"):
            train._same_recipe(manager, 5, saved, wanted)


@needs_serve
@pytest.mark.slow
def test_peft_loads_the_adapter_with_the_base_that_it_states(trained, tmp_path):
    """PEFT is given the adapter's folder alone: its logits are those of the trained NF4 model."""
    nothing = {name: (a, 0 * b) for name, (a, b) in trained.plan.items()}
    merge.merge_model(trained.base, tmp_path / "dequantized", nothing, 0.0,
                      quantized.as_trained("nf4", trained.recipe.dtype))
    merge.write_adapter(tmp_path / "adapter", trained.targets, trained.adapters, replace(
        trained.recipe, base_model=str(tmp_path / "dequantized")), test_merge.PREFIX)
    index = tmp_path / "dequantized" / "model.safetensors.index.json"  # transformers' always has:
    index.write_text(json.dumps({"metadata": {}} | json.loads(index.read_text())))
    np.save(tmp_path / "prompts.npy", trained.prompts)
    code = """
import sys, numpy as np, torch
from pathlib import Path
from peft import AutoPeftModelForCausalLM, PeftConfig
folder = Path(sys.argv[1])
assert PeftConfig.from_pretrained(folder / "adapter").base_model_name_or_path == str(
    folder / "dequantized")
model = AutoPeftModelForCausalLM.from_pretrained(
    folder / "adapter", dtype=torch.float32, attn_implementation="eager",
    key_mapping={"^model.language_model.": "model."}).eval()
with torch.no_grad():
    np.save(folder / "logits.npy", model(torch.tensor(np.load(folder / "prompts.npy"))).logits)
"""
    serve("-c", code, tmp_path)
    found = np.load(tmp_path / "logits.npy")
    assert np.abs(found - logits_on(trained, trained.base, "nf4")).max() < 1e-3
    assert np.abs(found - trained.after).max() > 0.1  # beside the base that was not quantized
