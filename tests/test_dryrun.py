"""08_dryrun: the stored table is consistent, the bar holds, and the ideas compute what they replace.

    .venv/bin/python -m pytest tests/test_dryrun.py
"""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from flax import nnx
from tunix.models.gemma4.model import AttentionType

from helpers import gemma, train
from tables import hardware
from tpu_time import compiler, dryrun
from tpu_time import program as timing
from tables import published
from helpers.run import write_text

sys.path.insert(0, str(ROOT / "tools"))
import anchors  # noqa: E402

SOURCE = "08_dryrun.py"
TABLES = sorted((ROOT / "data" / "dryrun").glob("*_*[be].csv"))
CHIPS = {"v5p-8": ("v5p", 4), "v5p-32": ("v5p", 16), "v6e-8": ("v6e", 8), "v6e-1": ("v6e", 1),
         "v5e-1": ("v5e", 1), "v5e-4": ("v5e", 4), "v5e-8": ("v5e", 8), "v6e-4": ("v6e", 4)}


def table(name):
    path = ROOT / "data" / "dryrun" / f"{name}.csv"
    if not path.exists() and name != "v5p-8_31b":
        pytest.skip(f"{path.name} is not there: DRYRUN=full in notebook 08 makes it")
    return pd.read_csv(ROOT / "data" / "dryrun" / f"{name}.csv", dtype={"trainer": str})


def compiled(name):
    rows = table(name)
    return rows[rows.args_gib.notna()]


# ── the stored numbers ──────────────────────────────────────────────────────────────────────────

def test_ours_has_eight_times_the_published_real_tokens_per_second():
    rows = table("v5p-8_31b").set_index("recipe")
    ours, published = rows.loc["ours, faster"], rows.loc["published"]
    assert ours.tokens_per_second_predicted >= 8.0 * published.tokens_per_second_predicted
    assert ours.fits and published.fits
    for column in ("jax", "libtpu", "tunix", "qwix", "flax", "topology", "size", "layers"):
        assert ours[column] == published[column], column


def test_the_published_row_is_what_its_script_does():
    row = table("v5p-8_31b").set_index("recipe").loc["published"]
    assert (row.trainer, row.micro_batch, row.sequence_length) == ("tunix", 1, 3072)
    assert (row.remat, row.compute_dtype, row.loss) == ("DECODER", "float32", "one-hot")
    assert (row.attention_block, row.fill, row.layers, row.flag) == (0, 0.30, 0, False)
    assert row.out_gib > 10, "Tunix's own step returns the base weights"


@pytest.mark.parametrize("path", TABLES, ids=[path.stem for path in TABLES])
def test_every_row_adds_up(path):
    rows = compiled(path.stem)
    for _, row in rows.iterrows():
        kind, count = CHIPS[row.topology]
        chip = hardware.chip(kind)
        assert row.chips == count
        assert row.hbm_gib == pytest.approx(row.args_gib + row.out_gib + row.temp_gib, rel=1e-4)
        assert row.fits == (row.hbm_gib <= chip.hbm / 2**30)
        bound = max(row.flops_per_chip / chip.flops, row.bytes_per_chip / chip.bandwidth)
        assert row.seconds_roofline == pytest.approx(bound, rel=1e-4)
        tokens = row.micro_batch * row.sequence_length * row.fill
        assert row.real_tokens_per_step == pytest.approx(tokens, rel=1e-4)
        time = row.seconds_estimate if row.hours_from == "estimate" else row.seconds_roofline
        if kind == "v5p":
            assert row.hours_from == "estimate" and row.seconds_estimate >= 0.9 * bound
        if row.hours_from == "estimate":
            assert row.real_tokens_per_second == pytest.approx(tokens / time, rel=1e-4)
        else:
            assert np.isnan(row.seconds_estimate) and np.isnan(row.real_tokens_per_second)
        hours = 10_000 * 922 / (tokens / time) / 3600
        assert row.hours == pytest.approx(hours, rel=1e-4)
        assert row.dollars == pytest.approx(hours * count * chip.dollars_per_hour, rel=1e-4)
    refused = table(path.stem)[table(path.stem).args_gib.isna()]
    assert not refused.fits.astype(bool).any()


def test_flops_are_those_of_the_whole_model():
    """4N per position with nothing recomputed, 6N with everything, and attention on top."""
    parameters = published("spec_sheet_reference", "item")["gemma4_31b_text_params"]
    for _, row in compiled("v5p-8_31b").iterrows():
        passes = {"NONE": 4, "BLOCK": 6, "DECODER": 6}[row.remat]
        floor = passes * parameters * row.micro_batch * row.sequence_length / row.chips
        # embeddings are looked up, not multiplied, and the loss may see fewer positions
        assert 0.9 < row.flops_per_chip / floor < 1.45, row.recipe


def test_ours_is_what_notebook_03_trains_with():
    full = train.Settings()
    assert (dryrun.RANK, dryrun.ALPHA, gemma.TARGETS) == (full.rank, full.alpha, full.targets)
    ours = table("v5p-8_31b").set_index("recipe").loc["ours, faster"]  # tp=4, so fsdp=1
    assert (ours.micro_batch, ours.remat, ours.compute_dtype, ours.attention_block) == (
        full.rows_per_device, full.remat, full.dtype, full.attention_block)
    assert ours.vmem_kib == train.VMEM_KIB and ours.one_sum == gemma.SharedInputs.share


@pytest.mark.parametrize("name", ["v6e-1_e2b", "v5e-1_e2b", "v5e-1_e4b"])
def test_a_small_model_fits_one_chip(name):
    assert table(name).fits.astype(bool).any()


def test_the_llvm_flag_changes_nothing():
    rows = table("v5p-8_31b_2layers")
    if set(rows.groupby("recipe").size()) != {2}:
        pytest.skip("only one of a pair is stored: DRYRUN=full in notebook 08 makes the other")
    for _, pair in rows.groupby("recipe"):
        assert sorted(pair.flag) == [False, True]
        for column in ("flops_per_chip", "bytes_per_chip", "hbm_gib", "temp_gib", "seconds_estimate"):
            assert pair[column].nunique() == 1, column


def test_the_compiler_does_not_count_the_kernel():
    """The reason why no splash row is in the table."""
    rows = table("attention_v5p-8").set_index(["kind", "attention"]).flops_per_chip
    for kind in ("sliding", "full"):
        assert rows[kind, "splash"] < 0.01 * rows[kind, "blocks"] < 0.01 * rows[kind, "dense"]


# ── what is compiled ────────────────────────────────────────────────────────────────────────────

@pytest.fixture(scope="module")
def small():
    """Mesh and a config of the 31B's structure that lowers in seconds."""
    config = dryrun.small_model().config
    config.dtype = config.param_dtype = jnp.dtype("bfloat16")
    return gemma.make_mesh(config, (1, 1), jax.devices()[:1]), config


def sizes(arrays, dtype):
    """How many elements of a dtype are in the arrays of a tree, scalars left out."""
    return sum(leaf.size for leaf in jax.tree.leaves(arrays) if leaf.dtype == dtype and leaf.size > 1)


def test_only_the_published_step_returns_the_frozen_weights(small):
    mesh, config = small
    short = {"sequence_length": 64, "remat": "NONE"}
    model = gemma.abstract_base(config, mesh)
    base = sizes(nnx.state(model), jnp.bfloat16)
    adapters = nnx.state(gemma.inject_lora(model, 64, 64.0, mesh), nnx.LoRAParam)
    ours = dryrun.lower_ours(
        dataclasses.replace(dryrun.OURS, loss="16", **short), mesh, config).out_info
    assert sizes(ours, jnp.bfloat16) == 0
    assert sizes(ours, jnp.float32) == 3 * sizes(adapters, jnp.float32), "adapters, Adam's moments"
    theirs = dryrun.lower_published(
        dataclasses.replace(dryrun.PUBLISHED, **short), mesh, config).out_info
    assert sizes(theirs, jnp.bfloat16) > base > 0
    assert sizes(theirs, jnp.float32) < sizes(adapters, jnp.float32), "the sum of the gradients"


def test_published_adapts_350_modules_and_ours_360():
    """Their pattern by its own rule (the whole path must match) on the modules of the 31B."""
    config = dryrun.model_config(dryrun.OURS)
    names = gemma.expected_modules(config)
    pattern = dryrun.PUBLISHED_MODULES
    missed = [name for name in names if not re.fullmatch(pattern, name)]
    assert len(names) == 360 and len(names) - len(missed) == 350
    assert all(name.endswith("k_einsum") for name in missed)


def test_configs_have_the_real_depth():
    config = dryrun.model_config(dryrun.OURS)
    assert (config.num_layers, config.num_global_kv_heads) == (60, 4)
    few = dryrun.model_config(dataclasses.replace(dryrun.OURS, layers=2))
    assert few.num_layers == 2 and [kind.name for kind in few.attention_pattern] == [
        "LOCAL_SLIDING", "GLOBAL"]


# ── the ideas ───────────────────────────────────────────────────────────────────────────────────

def packed(rng, rows, length):
    return jnp.asarray(np.sort(rng.integers(1, 5, (rows, length)), axis=1), jnp.int32)


@pytest.mark.parametrize("window", [None, 1, 129, 4_000])
@pytest.mark.parametrize("block", [64, 192])
def test_blocks_equal_jax_attention(window, block):
    rng = np.random.default_rng(block)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 320, heads, 16)), jnp.float32) for heads in (6, 2, 2))
    ids = packed(rng, 2, 320)
    mask = jnp.tril(ids[:, :, None] == ids[:, None, :])
    far = jnp.arange(320)[:, None] - jnp.arange(320)
    seen = mask & (far < (window or 320))
    theirs = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=1.0)
    ours = jax.jit(gemma.attend, static_argnums=(4, 5))(q, k, v, mask, window, block)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


TWO = (AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL)


@pytest.mark.parametrize("fields", [
    {"num_layers": 2},
    {"num_layers": 4, "frac_shared_layers": 0.5, "num_kv_heads": 1, "num_global_kv_heads": None,
     "k_eq_v_global": False}], ids=["31b", "e2b"])
def test_block_attention_is_tunix_attention(fields):
    rng = np.random.default_rng(1)
    tokens, ids = jnp.asarray(rng.integers(0, 96, (1, 192))), packed(rng, 1, 192)
    model = dryrun.small_model(attention_pattern=TWO, **fields)
    dense = dryrun.logits_and_gradient(model, tokens, ids)
    paths = list(nnx.to_flat_state(nnx.state(model)).paths)
    gemma.use_block_attention(model, 64)
    assert list(nnx.to_flat_state(nnx.state(model)).paths) == paths, "checkpoints would differ"
    blocks = dryrun.logits_and_gradient(model, tokens, ids)
    for a, b in zip(dense, blocks, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(abs(a).max(), 1e-6))


def contracted(makers, value):
    """How many numbers a product sums up that made a value (4: LoRA's rank here), 0 for no product."""
    line = makers.get(value)
    while line is not None and line.primitive.name in ("transpose", "reshape", "convert_element_type"):
        line = makers.get(line.invars[0])
    if line is None or line.primitive.name != "dot_general":
        return 0
    left = line.params["dimension_numbers"][0][0]
    return int(np.prod([line.invars[0].aval.shape[axis] for axis in left]))


def test_lora_s_copy_of_the_input_changes_the_order_of_sums_and_nothing_else():
    """Gradients of two base products meet each other first, so that XLA can sum them at once."""
    model = dryrun.small_model(num_layers=2)
    mesh = gemma.make_mesh(model.config, (1, 1), jax.devices()[:1])
    gemma.use_block_attention(model, 64)
    rng, found = np.random.default_rng(3), {}
    tokens, ids = jnp.asarray(rng.integers(0, 96, (1, 128))), packed(rng, 1, 128)
    for share in (False, True):
        provider = gemma.lora_provider(4, 4.0)
        provider.share = share
        tuned = gemma.inject_lora(model, 4, 4.0, mesh, provider=provider)
        for pair in gemma.adapted_modules(tuned).values():
            shape = pair["b"].get_value().shape
            pair["b"].set_value(jnp.asarray(rng.normal(size=shape), "float32") if not found
                                else found[False][2].pop(0))
        kept = [pair["b"].get_value() for pair in gemma.adapted_modules(tuned).values()]
        graph, adapters, rest = nnx.split(tuned, nnx.LoRAParam, ...)

        def value(adapters, graph=graph, rest=rest):
            mask = jnp.tril(ids[:, :, None] == ids[:, None, :])
            return jnp.mean(nnx.merge(graph, adapters, rest)(tokens, attention_mask=mask)[0] ** 2)
        traced = jax.jit(jax.value_and_grad(value)).trace(adapters)
        makers = {out: line for line in traced.jaxpr.eqns for out in line.outvars}
        both = [line for line in traced.jaxpr.eqns if line.primitive.name == "add_any"
                and all(contracted(makers, one) not in (0, 4) for one in line.invars)]
        found[share] = (traced.lower().compile()(adapters), len(both), kept)
    (before, apart, _), (after, together, _) = found[False], found[True]
    assert together >= apart + 3, "gate and up twice, queries and keys at least once"
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_only_a_v5p_is_asked_for_larger_tiles():
    assert train.compiler_options("TPU v5p") == train.compiler_options("TPU v5") == {"xla_tpu_scoped_vmem_limit_kib": "32768"}
    assert train.compiler_options("TPU v5", 0) is train.compiler_options("cpu") is None
    faster = dryrun.FASTER
    assert faster.vmem_kib == train.VMEM_KIB and faster.one_sum == gemma.SharedInputs.share


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
def test_splash_equals_blocks_on_packed_rows(window):
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 256, heads, 128)) * 0.3, jnp.float32)
               for heads in (4, 2, 2))
    ids = packed(rng, 1, 256)
    mask = jnp.tril(ids[:, :, None] == ids[:, None, :])
    ours = jax.jit(gemma.attend, static_argnums=(4, 5))(q, k, v, mask, window, 128)
    kernel = dryrun.splash_on(gemma.make_mesh(dryrun.small_model().config, (1, 1), jax.devices()[:1]),
                              128, interpret=True)(q, k, v, mask, window, 128)
    np.testing.assert_allclose(ours, kernel, atol=1e-4)


# ── the table's machinery ───────────────────────────────────────────────────────────────────────

TEXT = """%fused_computation.1 (param: s32[8]) -> s32[8] {
  %custom-call.1 = s32[8]{0} custom-call(%param), custom_call_target="AssumeGatherIndicesInBound"
}
ENTRY %main (param.1: f32[8]) -> f32[8] {
  %start = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"
  %kernel = f32[8] custom-call(%param.1), custom_call_target="tpu_custom_call"
}
"""


class Program:
    """What the compiler returns, as far as the table reads it."""

    argument_size_in_bytes, output_size_in_bytes = 3 * 2**30, 2 * 2**30
    alias_size_in_bytes, temp_size_in_bytes = 2**30, 5 * 2**30

    def memory_analysis(self):
        return self

    def cost_analysis(self):
        return {"flops": 459e12, "bytes accessed": 1e9, "optimal_seconds": 2.0 - 1}

    def as_text(self):
        return TEXT


def test_operations_of_unknown_cost_are_counted():
    """XLA's cost analysis adds -1 second for each, but not for those inside a fusion."""
    count = dryrun.unknown_costs
    assert count(TEXT) == 1
    assert count(TEXT.replace("tpu_custom_call", "PrepareAsyncCallDone")) == 2


def test_table_resumes_and_refusals_are_rows(tmp_path, monkeypatch):
    run_table, recipe_class = dryrun.run_table, dryrun.Recipe
    calls, version = [], {"jax": "1"}

    def fake(recipe):
        calls.append(recipe.recipe)
        refused = "RESOURCE_EXHAUSTED: Used 112.60G of 95.74G hbm"
        return (None, refused, 1.0) if recipe.recipe == "big" else (Program(), "", 1.0)
    monkeypatch.setattr(dryrun, "compile_recipe", fake)
    monkeypatch.setattr(dryrun, "versions", lambda: dict(version))
    monkeypatch.setattr(dryrun, "predict", lambda *_: {"unknown_share": 0.01})
    recipes = [recipe_class("ours"), recipe_class("big")]
    run_table(recipes, folder=tmp_path)
    run_table(recipes, folder=tmp_path)
    assert calls == ["ours", "big"], "the second run compiles nothing"
    rows = pd.read_csv(tmp_path / "v5p-8_31b.csv").set_index("recipe")
    assert rows.loc["ours", "hbm_gib"] == 9 and rows.loc["ours", "seconds_roofline"] == 1
    assert rows.loc["ours", "real_tokens_per_second"] == pytest.approx(4096 * 0.95 / 2)
    assert rows.loc["big", "hbm_gib"] == 112.6 and not rows.loc["big", "fits"]
    elsewhere = recipe_class("ours", topology="v6e-8")  # its bound is above the guess: no estimate
    with monkeypatch.context() as patch:
        patch.setattr(Program, "cost_analysis", lambda self: {
            "flops": 9e15, "bytes accessed": 1e9, "optimal_seconds": -100.0})
        run_table([elsewhere], folder=tmp_path)
    alone = pd.read_csv(tmp_path / "v6e-8_31b.csv")
    assert {"seconds_estimate", "real_tokens_per_second"} <= set(alone), "empty columns are columns"
    assert alone.seconds_estimate.isna().all() and alone.hours_from[0] == "roofline"
    assert calls.pop() == "ours"
    version["jax"] = "2"
    run_table(recipes[:1], folder=tmp_path)
    assert calls == ["ours", "big", "ours"], "other versions are compiled again"
    assert len(pd.read_csv(tmp_path / "v5p-8_31b.csv")) == 2, "and replace their row"


def test_a_row_is_found_again_beside_one_without_its_columns(tmp_path):
    older = {"recipe": "ours", **dryrun.versions()}
    write_text(tmp_path / "v5p-8_31b.csv", pd.DataFrame([older]).to_csv(index=False))
    newer = dryrun.FASTER
    dryrun.store(newer, dataclasses.asdict(newer) | dryrun.versions() | {"hours": None}, tmp_path)
    wanted = dryrun.key_of(dataclasses.asdict(newer) | dryrun.versions())
    keys = [dryrun.key_of(row) for row in dryrun.stored_rows(tmp_path / "v5p-8_31b.csv")]
    assert len(keys) == 2 and wanted in keys


def test_every_stored_row_is_a_recipe_of_the_table():
    """Else `DRYRUN=full` would compile it again each time."""
    blank = dict.fromkeys(dryrun.versions(), "")
    known = {dryrun.key_of(dataclasses.asdict(recipe) | blank) for recipe in dryrun.RECIPES}
    for path in TABLES:
        for row in dryrun.stored_rows(path):
            assert dryrun.key_of(row | blank) in known, row["recipe"]


def test_both_wordings_of_a_refusal_say_how_much_was_asked_for(monkeypatch):
    monkeypatch.setattr(dryrun, "versions", dict)
    for text, gib in (("Ran out of memory in memory space hbm. Used 112.60G of 95.74G hbm.", 112.6),
                      ("total memory required for HLO temporaries (18.01G) exceeds", 18.01)):
        row = dryrun.measure(dryrun.Recipe("big"), None, f"RESOURCE_EXHAUSTED: {text}", 1.0)
        assert row["hbm_gib"] == gib and row["note"] == "out of HBM" and not row["fits"]


def test_the_compiler_is_found_where_it_is_said_to_be(tmp_path, monkeypatch):
    library = tmp_path / "libtpu" / "libtpu.so"
    library.parent.mkdir()
    library.touch()
    (tmp_path / "libtpu-9.8.dist-info").mkdir()
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    assert compiler.find() == str(library) and compiler.version() == "9.8"
    before = dict(os.environ)
    try:
        assert compiler.start() == str(library)
        assert os.environ["JAX_PLATFORMS"] == "tpu_compiler,cpu"
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".libtpu/libtpu/libtpu.so").exists()
                    and importlib.util.find_spec("libtpu") is None, reason="no libtpu on this machine")
def test_a_live_compile_gives_the_stored_numbers(tmp_path):
    """The whole notebook, as a script; its live rows equal the stored ones."""
    done = subprocess.run([sys.executable, SOURCE], capture_output=True, text=True, timeout=1_800,
                          env={**os.environ, "RUN_DIR": str(tmp_path), "SIZE": "tiny"})
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "the same as stored" in done.stdout


@pytest.mark.slow
def test_without_libtpu_the_notebook_says_so_and_shows_what_is_stored(tmp_path):
    """A copy of the repository has no .libtpu: what a reader on macOS or Windows sees."""
    if importlib.util.find_spec("libtpu"):
        pytest.skip("this environment has libtpu itself")
    for name in ("helpers", "tables", "serving", "tpu_time", "appendix", "verilog", "data", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in (SOURCE, "setup.sh"):
        shutil.copy2(ROOT / name, tmp_path)
    env = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
    done = subprocess.run([sys.executable, SOURCE], cwd=tmp_path, capture_output=True, text=True,
                          env=env | {"RUN_DIR": str(tmp_path / "run"), "SIZE": "tiny",
                                     "DRYRUN": "full", "MPLBACKEND": "agg"}, timeout=600)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "libtpu is not on this machine: nothing is compiled" in done.stdout
    assert "times the published real tokens per second" in done.stdout
    assert "compiling" not in done.stdout
    drawn = {path.stem for path in (tmp_path / "run" / "figures").glob("*.png")}
    assert {"08_memory", "08_road"} <= drawn


def test_setup_dryrun_where_libtpu_has_no_wheel(tmp_path):
    shutil.copy2(ROOT / "setup.sh", tmp_path)
    uname = tmp_path / "bin" / "uname"
    uname.parent.mkdir()
    uname.write_text('#!/bin/sh\ncase "$1" in -s) echo Darwin;; *) echo arm64;; esac\n')
    uname.chmod(0o755)
    done = subprocess.run(["bash", "setup.sh", "dryrun"], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PATH": f"{uname.parent}:{os.environ['PATH']}"})
    assert done.returncode == 0 and "no wheel for Darwin arm64" in done.stdout
    assert "stored results" in done.stdout and not (tmp_path / ".libtpu").exists()


def test_six_layers_reckoned_to_sixty_are_the_sixty_that_were_compiled():
    """Section 5's rule, on the step that is stored at both depths."""
    profiles = ROOT / "data" / "dryrun" / "profiles"
    six, sixty = (json.loads((profiles / f"v5p8_31b_{name}.json").read_text())["profile"]
                  for name in ("6layers_ours", "ours"))
    reckoned = sum(row["seconds"] for row in timing.deeper(six, 10))
    assert reckoned == pytest.approx(sum(row["seconds"] for row in sixty), rel=0.03)


# ── what others measured ────────────────────────────────────────────────────────────────────────

SMALL = anchors.Shapes(layers=1, width=32, head_size=16, heads=2, inner=48, vocabulary=64,
                       length=24, rows=2, micro_batches=2, block=8)


def drawn(tree, seed=0):
    """Float32 numbers in place of shapes."""
    leaves, form = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return form.unflatten([jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) / 4
                           for leaf in leaves])


def test_the_restated_model_has_the_published_number_of_parameters():
    params = anchors.parameter_shapes(anchors.FULL)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert f"{count / 1e6:.1f} {(count - params['embedding'].size) / 1e6:.1f}" == "163.6 130.0"
    tokens = jax.ShapeDtypeStruct((4, 2_048), "int32")
    for core in ("plain", "left out"):
        hidden = jax.eval_shape(
            lambda p, t, core=core: anchors.hidden_of(p, t, anchors.FULL, core), params, tokens)
        assert hidden.shape == (4, 2_048, 1_024) and hidden.dtype == jnp.bfloat16


def test_the_restated_attention_and_loss_are_jax_s():
    query, key, value = (jnp.asarray(np.random.default_rng(seed).normal(size=(2, heads, 24, 16)),
                                     jnp.float32) for seed, heads in enumerate((4, 1, 1)))
    ours = anchors.attend(query, key, value, 8)
    theirs = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (query, key, value)),
                                          is_causal=True, scale=1.0)
    np.testing.assert_allclose(ours.swapaxes(1, 2), theirs, rtol=1e-4, atol=1e-5)
    params = drawn(anchors.parameter_shapes(SMALL))
    hidden, labels = value[:, 0, :, :] @ drawn(np.empty((16, 32))), jnp.arange(48).reshape(2, 24)
    logits = 15 * jnp.tanh(hidden @ params["output"] / 15)
    whole = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], 2))
    mine = anchors.loss_of(hidden, params["output"], labels, SMALL)
    np.testing.assert_allclose(mine, whole, rtol=1e-5)


def test_the_left_out_core_keeps_every_gradient_alive():
    """Else the compiler would drop the projections, and a bound of less than the step."""
    params, tokens = drawn(anchors.parameter_shapes(SMALL)), jnp.arange(48).reshape(2, 24)
    grads = jax.grad(lambda p: jnp.sum(jnp.sin(anchors.hidden_of(p, tokens, SMALL, "left out"))))
    layer = grads(params)["layers"][0]
    assert all(abs(layer[name]).max() > 0 for name in layer)


def test_positions_turn_by_their_distance_alone():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 1, 16)), jnp.float32)
    row = anchors.turned(jnp.broadcast_to(x, (1, 1, 9, 16)))[0, 0]
    products = row @ row.T
    np.testing.assert_allclose(np.diagonal(products, 3), products[0, 3], rtol=1e-4)
    assert abs(products[0, 1] - products[0, 0]) > 1e-3


def test_the_kernel_s_products_are_counted_like_splash_floor():
    """The same rule as 08's: 60 layers of which 10 are full, here with one kind of layer."""
    shapes = dataclasses.replace(anchors.FULL, layers=10, length=4_096, block=512, rows=1, heads=32,
                                 micro_batches=1, head_size=512)
    peak = hardware.chip("v6e").flops
    causal = dryrun.splash_floor(chips=1, window=4_096, peak=peak) * 10 * 512 / (
        10 * 512 + 50 * 256)
    assert anchors.attention_floor(shapes) == pytest.approx(causal)


def test_anchors_are_what_was_measured_and_predicted():
    rows = dryrun.anchors(table("v5p-8_31b"))
    assert rows.source.str.len().gt(20).all() and rows.measured_seconds.gt(0).all()
    known = rows[rows.predicted_seconds.notna()]
    np.testing.assert_allclose(known.ratio, known.predicted_seconds / known.measured_seconds)
    assert set(known.predicted_is) == {"whole", "lower", "upper"}
    assert (known.unknown_share.dropna() <= timing.TRUSTED).all()
    assert rows[rows.predicted_seconds.isna()].note.notna().all(), "says why it has no prediction"
    step = known[known.tokens == 64 * 2_048].set_index("predicted_is")
    assert step.loc["lower", "predicted_seconds"] <= step.loc["upper", "predicted_seconds"]
    assert step.measured_seconds.eq(0.275).all()
    share = dryrun.validation(table("v5p-8_31b"), (0.0,)).iloc[0]
    assert rows.ratio[0] == pytest.approx(share["predicted / measured"])


def test_the_stored_anchors_are_the_tool_s():
    rows = pd.read_csv(anchors.TABLE, keep_default_na=False, dtype=str)
    wanted = {(program[0], kind): program for program, kind, *_ in anchors.PROGRAMS.values()}
    mine = rows[rows.predicted_is != ""].set_index(["program", "predicted_is"])
    assert set(mine.index) == set(wanted) and list(rows) == list(anchors.COLUMNS)
    for key, (_, measured, tokens, source) in wanted.items():
        assert float(mine.loc[key].measured_seconds) == pytest.approx(measured, rel=1e-5)
        assert (mine.loc[key].tokens, mine.loc[key].source) == (str(tokens), source)
    others = rows[rows.predicted_is == ""]
    assert list(others.program) == [row["program"] for row in anchors.OTHERS]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".libtpu/libtpu/libtpu.so").exists()
                    and importlib.util.find_spec("libtpu") is None, reason="no libtpu on this machine")
def test_anchors_compiled_again_are_the_stored_ones():
    """Those that take seconds; a step takes minutes (tools/anchors.py makes its rows anew)."""
    code = """
        import sys
        sys.path[:0] = [".", "tools"]
        import anchors
        from tpu_time import compiler
        compiler.start(), compiler.register()
        for name in ("loss", "product"):
            text = anchors.PROGRAMS[name][3]().compile().as_text()
            print("seconds:", anchors.result(name, text, 0.0)["predicted_seconds"])"""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, text=True,
                          capture_output=True, timeout=1_800)
    assert done.returncode == 0, done.stderr[-2_000:]
    found = [float(line.split()[1]) for line in done.stdout.splitlines() if "seconds:" in line]
    rows = pd.read_csv(anchors.TABLE).set_index("program")
    rows = rows.loc[[anchors.PROGRAMS[name][0][0] for name in ("loss", "product")]]
    if set(rows.libtpu) != {compiler.version()}:
        pytest.skip("the stored rows belong to another libtpu")
    np.testing.assert_allclose(found, rows.predicted_seconds, rtol=1e-4)
