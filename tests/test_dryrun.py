"""08_dryrun: the stored table is consistent, the bar holds, the ideas compute what they replace.

    .venv/bin/python -m pytest tests/test_dryrun.py
"""

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, page
from flax import nnx
from tunix.models.gemma4.model import AttentionType, Gemma4

from helpers import gemma, train
from tables import hardware
from appendix import steps
from tpu_time import bands, compiler, links
from tables import published

pytestmark = pytest.mark.laboratory

SOURCE = "appendix/08_dryrun.py"
TABLES = sorted((ROOT / "data" / "dryrun").glob("*_*[be].csv"))


def small_model(**overrides):
    """A small random Gemma 4 in float32: sliding and full layers, K equal to V in the latter."""
    config = gemma.config_from_hf("data/configs/gemma4_31b.json", dtype="float32")
    fields = dict(num_layers=6, num_embed=96, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=16,
                  num_kv_heads=2, num_global_kv_heads=1, global_key_size=32, sliding_window_size=48)
    return Gemma4(dataclasses.replace(config, **(fields | overrides)), rngs=nnx.Rngs(0))


def logits_and_gradient(model, tokens, segment_ids):
    """Logits, and the gradient of their mean square for every parameter."""
    mask = jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :])
    graph, state = nnx.split(model)

    def value(state):
        logits = nnx.merge(graph, state)(tokens, attention_mask=mask)[0]
        return jnp.mean(logits ** 2), logits
    (_, logits), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(state)
    return [np.asarray(leaf) for leaf in (logits, *jax.tree.leaves(gradient))]


# ── the stored numbers ──────────────────────────────────────────────────────────────────────────

def test_ratios_are_of_one_clock_and_one_compiler():
    rows = steps.stored("v5p-8_31b")
    rows = rows[rows.seconds_predicted.notna()]
    assert {steps.PUBLISHED.recipe, steps.OURS.recipe, steps.ROWS_INT8.recipe} <= set(rows.recipe)
    assert rows.fits.all()
    for column in ("clock", "jax", "libtpu", "tunix", "qwix", "flax", "topology", "size", "layers"):
        assert rows[column].nunique() == 1, column


OTHER_SLICES = [recipe for recipe in steps.RECIPES if recipe.topology != "v5p-8"]


@pytest.mark.parametrize("recipes", [
    pytest.param([*steps.ROAD, steps.FREE], id="the road and the free slice"),
    pytest.param(OTHER_SLICES, id="the others", marks=pytest.mark.slow)])
def test_every_stored_time_is_what_the_kept_program_gives(recipes):
    """No row keeps a time of older rules: each is predicted again from its text, to the digit."""
    timed = 0
    for recipe in recipes:
        row = steps.stored(steps.table_name(recipe)).set_index("recipe").loc[recipe.recipe]
        recipe = dataclasses.replace(recipe, micro_batches=int(row.micro_batches))  # as compiled
        found = steps.predicted(recipe)
        assert (found is None) == np.isnan(row.clock), recipe.recipe
        if found:
            for name, value in steps.columns_of(recipe, found).items():
                value = np.nan if value is None else value
                assert f"{row[name]:.6g}" == f"{value:.6g}", (recipe.recipe, name)
            timed += 1
    assert timed >= 4


def test_on_a_machine_with_chips_the_page_leaves_them_alone(monkeypatch, capsys):
    """`compiler.start` would take the chips' library, and hide the chips from JAX."""
    cells = (ROOT / SOURCE).read_text().split("# %%")
    cell, = (cell for cell in cells if "get_topology_desc" in cell)
    monkeypatch.setattr(hardware, "here", lambda: hardware.Hardware("tpu", "v5p", 4))
    monkeypatch.setattr(compiler, "start", lambda: pytest.fail("the compiler was started"))
    names = {}
    exec(cell, names)
    assert names["libtpu"] == "" and "real chips" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("speed, sentence", [
    (0.5, "mesh (4, 1) would be {:.1f} times as fast as the published step, "
          "against {:.1f} for mesh (1, 4)"),
    (0.4, "At 0.4 it has lost it: {:.1f} against {:.1f}."),
    (0.25, "At a quarter it's {:.1f} against {:.1f}.")])
def test_what_the_page_says_of_slow_links(monkeypatch, speed, sentence):
    """The solution of exercise 2."""
    monkeypatch.setattr(links, "LINK", speed)
    tokens = {}
    for recipe in (steps.PUBLISHED, steps.OURS, steps.ROWS):
        tokens[recipe] = steps.real_tokens(recipe) / steps.predicted(recipe).seconds
    times = [tokens[recipe] / tokens[steps.PUBLISHED] for recipe in (steps.ROWS, steps.OURS)]
    text = " ".join((ROOT / SOURCE).read_text().replace("\n# ", " ").split())
    assert sentence.format(*times) in text


@pytest.mark.slow
@pytest.mark.parametrize("share, sentence", [
    (0.8, "At 80% of the peak our step would be {:.1f} times as fast as the published one ({:.2f} "
          "times the same mesh in bfloat16)"),
    (0.6, "at 60% {:.1f} times ({:.2f})")])
def test_what_the_readme_says_of_slower_int8_products(share, sentence):
    whole = steps.predicted(steps.ROWS_INT8)
    peak = hardware.SLICES["v5p-8"].chip.int8
    tokens = steps.real_tokens(steps.ROWS_INT8) / steps.int8_at(whole, share, peak)
    speed = steps.stored("v5p-8_31b").set_index("recipe").tokens_per_second_predicted
    text = " ".join((ROOT / "data/dryrun/README.md").read_text().split())
    others = [speed["published"], speed[steps.ROWS.recipe]]
    assert sentence.format(*(tokens / other for other in others)) in text


def test_the_factors_of_the_road_multiply_up_to_the_ratio():
    rows = steps.stored("v5p-8_31b")
    factors = {label: end / start for label, start, end in steps.road(rows)}
    speed = rows.set_index("recipe").tokens_per_second_predicted
    last = list(steps.ROAD)[-1].recipe
    ratio = speed[last] / speed["published"]
    assert np.prod(list(factors.values())) == pytest.approx(ratio)
    assert factors["packed rows"] == pytest.approx(0.95 / 0.30)


def test_the_published_row_is_what_its_script_does():
    row = steps.stored("v5p-8_31b").set_index("recipe").loc["published"]
    assert (row.trainer, row.micro_batch, row.sequence_length) == ("tunix", 1, 3072)
    assert (row.remat, row.compute_dtype, row.loss) == ("DECODER", "float32", "one-hot")
    assert (row.attention_block, row.fill, row.layers) == (0, 0.30, 0)
    assert row.out_gib > 10, "Tunix's own step returns the base weights"


@pytest.mark.parametrize("path", TABLES, ids=[path.stem for path in TABLES])
def test_every_row_adds_up(path):
    rows = steps.stored(path.stem)
    assert not rows[rows.args_gib.isna()].fits.astype(bool).any(), "refused"
    for _, row in rows[rows.args_gib.notna()].iterrows():
        piece = hardware.slice_of(row.topology)
        chip = piece.chip
        assert row.chips == piece.chips
        assert row.hbm_gib == pytest.approx(row.args_gib + row.out_gib + row.temp_gib, rel=1e-4)
        assert row.fits == (row.hbm_gib <= chip.hbm / 2**30)
        tokens = row.micro_batches * row.micro_batch * row.sequence_length * row.fill
        assert row.real_tokens_per_step == pytest.approx(tokens, rel=1e-4)
        if not np.isnan(row.seconds_predicted):
            peak = chip.int8 if row.int8_products else chip.flops
            assert row.seconds_predicted > row.flops_per_chip / peak, "faster than the chip can be"


def test_flops_are_those_of_the_whole_model():
    """4N per position with nothing recomputed, 6N with everything, and attention on top."""
    parameters = published("spec_sheet_reference", "item")["gemma4_31b_text_params"]
    rows = steps.stored("v5p-8_31b")
    for _, row in rows[rows.args_gib.notna()].iterrows():
        passes = {"NONE": 4, "BLOCK": 6, "DECODER": 6}[row.remat]
        rows_of_step = row.micro_batches * row.micro_batch
        floor = passes * parameters * rows_of_step * row.sequence_length / row.chips
        # embeddings are looked up, not multiplied, and the loss may see fewer positions
        assert 0.9 < row.flops_per_chip / floor < 1.45, row.recipe


def test_ours_is_what_notebook_03_trains_with():
    full = train.Settings()
    assert (steps.RANK, steps.ALPHA, gemma.TARGETS) == (full.rank, full.alpha, full.targets)
    ours = steps.stored("v5p-8_31b").set_index("recipe").loc["ours"]  # tp=4, so fsdp=1
    assert (ours.micro_batch, ours.remat, ours.compute_dtype, ours.attention_block) == (
        full.rows_per_device, full.remat, full.dtype, full.attention_block)


# ── what is compiled ────────────────────────────────────────────────────────────────────────────

def sizes(arrays, dtype):
    """How many elements of a dtype are in the arrays of a tree, scalars left out."""
    total = 0
    for leaf in jax.tree.leaves(arrays):
        if leaf.dtype == dtype and leaf.size > 1:
            total += leaf.size
    return total


@pytest.mark.slow
def test_only_the_published_step_returns_the_frozen_weights():
    config = small_model().config
    config.dtype = config.param_dtype = jnp.dtype("bfloat16")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    short = {"sequence_length": 64, "remat": "NONE"}
    model = gemma.abstract_base(config, mesh)
    base = sizes(nnx.state(model), jnp.bfloat16)
    adapters = nnx.state(gemma.inject_lora(model, 64, 64.0, mesh), nnx.LoRAParam)
    ours = steps.lower_ours(
        dataclasses.replace(steps.OURS, loss="16", **short), mesh, config).out_info
    assert sizes(ours, jnp.bfloat16) == 0
    assert sizes(ours, jnp.float32) == 3 * sizes(adapters, jnp.float32), "adapters, Adam's moments"
    theirs = steps.lower_published(
        dataclasses.replace(steps.PUBLISHED, **short), mesh, config).out_info
    assert sizes(theirs, jnp.bfloat16) > base > 0
    assert sizes(theirs, jnp.float32) < sizes(adapters, jnp.float32), "the sum of the gradients"


# ── the ideas ───────────────────────────────────────────────────────────────────────────────────

def packed(rng, rows, length):
    return jnp.asarray(np.sort(rng.integers(1, 5, (rows, length)), axis=1), jnp.int32)


@pytest.mark.parametrize("window", [None, 1, 129, 4_000])
@pytest.mark.parametrize("block", [64, 192])
def test_blocks_equal_jax_attention(window, block):
    rng = np.random.default_rng(block)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 320, heads, 16)), jnp.float32)
               for heads in (6, 2, 2))
    ids = packed(rng, 2, 320)
    mask = jnp.tril(ids[:, :, None] == ids[:, None, :])
    far = jnp.arange(320)[:, None] - jnp.arange(320)
    seen = mask & (far < (window or 320))
    theirs = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=1.0)
    ours = jax.jit(gemma.attend, static_argnums=(4, 5))(q, k, v, mask, window, block)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("fields", [
    {"num_layers": 2},
    pytest.param({"num_layers": 4, "frac_shared_layers": 0.5, "num_kv_heads": 1,
                  "num_global_kv_heads": None, "k_eq_v_global": False}, marks=pytest.mark.slow)],
    ids=["31b", "e2b"])
def test_block_attention_is_tunix_attention(fields):
    rng = np.random.default_rng(1)
    tokens, ids = jnp.asarray(rng.integers(0, 96, (1, 192))), packed(rng, 1, 192)
    kinds = AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL
    model = small_model(attention_pattern=kinds, **fields)
    dense = logits_and_gradient(model, tokens, ids)
    paths = list(nnx.to_flat_state(nnx.state(model)).paths)
    gemma.use_block_attention(model, 64)
    assert list(nnx.to_flat_state(nnx.state(model)).paths) == paths, "checkpoints would differ"
    blocks = logits_and_gradient(model, tokens, ids)
    for a, b in zip(dense, blocks, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(abs(a).max(), 1e-6))


# ── the notebook as a whole ─────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".libtpu/libtpu/libtpu.so").exists()
                    and importlib.util.find_spec("libtpu") is None,
                    reason="no libtpu on this machine")
def test_a_live_compile_gives_the_stored_numbers(tmp_path):
    """The whole notebook, as a script; its live rows equal the stored ones."""
    done = page(SOURCE, tmp_path)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "the same as stored" in done.stdout


@pytest.mark.slow
def test_without_libtpu_the_notebook_says_so_and_shows_what_is_stored(tmp_path):
    """A copy of the repository has no .libtpu: what a reader on macOS or Windows sees."""
    if importlib.util.find_spec("libtpu"):
        pytest.skip("this environment has libtpu itself")
    for name in ("helpers", "tables", "serving", "tpu_time", "appendix", "verilog", "data",
                 "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in (SOURCE, "setup.sh"):
        shutil.copy2(ROOT / name, tmp_path)
    done = page(tmp_path / SOURCE, tmp_path / "run", cwd=tmp_path, TPU_LIBRARY_PATH=None,
                DRYRUN="full")
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "There is no compiler here" in done.stdout
    assert "times as fast end to end" in done.stdout
    assert "compiling" not in done.stdout
    drawn = {path.stem for path in (tmp_path / "run" / "figures").glob("*.png")}
    assert drawn == {"08_trace", "08_parts", "08_road", "08_anchors"}


# ── ranges and anchors ──────────────────────────────────────────────────────────────────────────

def test_a_range_is_the_anchors_typical_miss(tmp_path, monkeypatch):
    path = tmp_path / "anchors.csv"
    path.write_text("predicted_ms,measured_ms,clock\n2,1,trace\n1,2,host\n,5,host\n")
    monkeypatch.setattr(bands, "ANCHORS", path)
    assert bands.band(10.0) == pytest.approx((5.0, 20.0))
    assert bands.band(10.0, 2) == pytest.approx((10 / 2**2**0.5, 10 * 2**2**0.5))


def test_what_says_nothing_about_a_step_widens_no_range(tmp_path, monkeypatch):
    path = tmp_path / "anchors.csv"
    path.write_text("predicted_ms,measured_ms,clock,sets,lacks\n2,1,trace,,\n1,2.67,one call,,\n"
                    "1,9,host,links.SNAKE,\n,5,host,,\n1,9,host,,a sort\n")
    monkeypatch.setattr(bands, "ANCHORS", path)
    assert bands.band(10.0) == pytest.approx((5.0, 20.0))
    assert bands.band(10.0, sigmas=2) == pytest.approx((2.5, 40.0))
    path.write_text(path.read_text() + "100,50,one call,,\n")  # a long call does count
    assert bands.typical_miss() == pytest.approx(np.log(2))
    path.write_text(path.read_text() + "50,50,one call,,\n")
    assert bands.typical_miss() < 0.9 * np.log(2)


def test_the_stored_anchors_add_up():
    from appendix import decode, memory
    from tpu_time import anchors
    rows, known = bands.anchors(), anchors.ANCHORS | memory.TIMED | decode.TIMED
    assert {row["name"] for row in rows} == set(known)
    for row in rows:
        anchor = known[row["name"]]
        assert float(row["measured_ms"]) == pytest.approx(anchor.milliseconds, rel=1e-4)
        assert row["clock"] == anchor.clock and row["source"] == anchor.source
        if row["predicted_ms"]:
            assert float(row["miss"]) == pytest.approx(
                float(row["predicted_ms"]) / anchor.milliseconds - 1, abs=2e-3)
        assert row["sets"] == anchor.sets and row["lacks"] == anchor.lacks
    psum = next(row for row in rows if row["name"] == "psum v6e")
    by_hand = 2 * 255 / 256 * 17_408**2 * 2 / (4 * 0.9 * 90e9)
    assert float(psum["predicted_ms"]) == pytest.approx(1e3 * by_hand, rel=1e-3)


def test_the_decoder_that_others_timed_is_the_31b():
    from appendix import decode
    text = json.loads((ROOT / "data/configs/gemma4_31b.json").read_text())["text_config"]
    model = decode.DENSE
    assert (model.layers, model.width, model.inner, model.heads, model.vocabulary) == (
        text["num_hidden_layers"], text["hidden_size"], text["intermediate_size"],
        text["num_attention_heads"], text["vocab_size"])
    for layer, name in enumerate(text["layer_types"]):
        assert model.kind(layer) is (model.full if name == "full_attention" else model.sliding)
    assert (model.sliding.kv_heads, model.sliding.size, model.sliding.window) == (
        text["num_key_value_heads"], text["head_dim"], text["sliding_window"])
    assert (model.full.kv_heads, model.full.size) == (
        text["num_global_key_value_heads"], text["global_head_dim"])
    for model, theirs in ((decode.DENSE, 57.2), (decode.EXPERTS, 47.0)):
        weights = (model.vocabulary + 1) * model.width
        for layer in range(model.layers):
            weights += sum(np.prod(sizes) for sizes, _ in model.weights(layer).values())
        assert 2 * weights / 2**30 == pytest.approx(theirs, abs=0.05), "GiB of bfloat16"


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".libtpu/libtpu/libtpu.so").exists(),
                    reason="no libtpu on this machine")
def test_six_layers_of_a_decode_step_take_what_they_took():
    """Compiled again: all 60 layers are a row of the anchors, and take ten times as long."""
    code = ("from tpu_time import anchors, compiler; compiler.start(); compiler.register()\n"
            "from dataclasses import replace; from appendix import decode\n"
            "short = replace(decode.DENSE, layers=6)\n"
            "print(anchors.predicted_seconds(decode.timed(short, '31B', 1.0, '')))\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(2.424e-3, rel=0.02)


def test_the_plan_of_the_step_with_splash_attention_adds_up():
    rows = pd.read_csv(ROOT / "data/anchors/splash.csv")
    assert rows.source.str.startswith("damsolanke/gemma4-swe-kit (401aa98)").all()
    for row in rows.dropna(subset="whole_gib").itertuples():
        ours = row.whole_gib - row.arguments_gib if row.theirs == "temporaries" else row.whole_gib
        assert row.miss == pytest.approx(ours / row.theirs_gib - 1, abs=2e-3)
        assert (row.whole_gib < 15.75) == (row.theirs == "temporaries"), "fits, or is refused"
    refused = rows[rows.theirs == "refused"]
    assert len(refused) == 3 and refused.miss.abs().max() < 0.02, "as 08 and STATUS say"


def test_the_memory_planned_here_is_the_memory_planned_on_chips():
    from appendix import memory
    rows = pd.read_csv(ROOT / memory.STORED).dropna(subset="ours_gib")
    assert len(rows) >= 20
    for row in rows.itertuples():
        assert row.miss == pytest.approx(row.ours_gib / row.theirs_gib - 1, abs=1e-3)
        assert (row.ours_gib < 15.75) == (row.theirs_gib < 15.75), "fits, or does not"
