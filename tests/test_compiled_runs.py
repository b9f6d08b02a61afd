"""What 08 compiled is what 03 runs: its settings, on the slices that are meant for it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, load

from appendix import recipe_step, steps
from helpers import gemma, programs, train
from tables import hardware, stored
from tpu_time import fit


def lengths_of(name, size):
    """Tokens of a row that 02 makes for a slice, and on a v5p those that 08's section 6 compares.

    On a v6e-8, rows of 2,048 take the mesh that's compiled for rows of 4,096, because it's faster.
    """
    if size == "31b" and name.startswith("v5p"):
        return (2_048, 4_096)
    return (4_096,) if name == "v6e-8" else (2_048,)


# (slice, size, tokens of a row, trained ones at most) of every step that 03 is meant to run.
MEANT = [(name, piece.size, length, length // 2) for name, piece in hardware.SLICES.items()
         if piece.size for length in lengths_of(name, piece.size)]


def settings_on(monkeypatch, name, size, length):
    """03's own settings of a size, as its page makes them on a slice."""
    monkeypatch.setattr(hardware, "here", lambda: SimpleNamespace(slice=name))
    full, e2b = load("03_train.py", "FULL", "E2B", length=length, base=None)
    return full if size == "31b" else e2b


def test_every_step_that_03_is_meant_to_run_is_compiled_and_fits(monkeypatch):
    missing = set()
    for name, size, length, trained in MEANT:
        cfg = settings_on(monkeypatch, name, size, length)
        row = steps.stored_step(cfg, size, name, length, trained)
        if row is None:
            missing.add((name, size))
        else:
            assert row["fits"] == "True", (name, size, length)
    assert len(MEANT) == 8 and missing == set()


def test_02_makes_rows_of_a_length_that_is_compiled(monkeypatch):
    for name, piece in hardware.SLICES.items():
        if piece.size == "31b":
            monkeypatch.setattr(hardware, "here", lambda name=name: SimpleNamespace(slice=name))
            full = load("02_data.py", "Settings", "FULL")[-1]
            assert full.sequence_length == max(lengths_of(name, "31b")), name
            assert full.max_tokens <= full.sequence_length


@pytest.mark.parametrize("changes", [
    {"rank": 32}, {"targets": ".*q_einsum"}, {"rows_per_step": 4}, {"rows_per_device": 1},
    {"dtype": "float32"}, {"mesh": (2, 2)}, {"remat": "BLOCK"}, {"attention_block": 512}],
    ids=lambda changes: next(iter(changes)))
def test_another_setting_is_another_program(monkeypatch, changes):
    cfg = settings_on(monkeypatch, "v5p-8", "31b", 4_096)
    assert steps.stored_step(cfg, "31b", "v5p-8", 4_096, 2_048)["recipe"] == "ours"
    changed = replace(cfg, **changes)
    assert steps.stored_step(changed, "31b", "v5p-8", 4_096, 2_048) is None
    for length, trained in ((2_048, 2_048), (4_096, 1_024)):
        assert steps.stored_step(cfg, "31b", "v5p-8", length, trained) is None


def test_what_changes_no_shape_changes_no_row(monkeypatch):
    cfg = settings_on(monkeypatch, "v5p-8", "31b", 4_096)
    same = replace(cfg, learning_rate=1e-3, epochs=3.0, seed=1, checkpoint_every=7)
    assert steps.stored_step(same, "31b", "v5p-8", 4_096, 2_048)["recipe"] == "ours"


def test_a_recipe_is_lowered_with_the_settings_of_03(monkeypatch):
    """Back and forth: the settings of a stored recipe are the recipe of these settings."""
    for recipe in steps.AS_03_RUNS:
        usual = {"v5p-32": 4, "v6e-8": 2, "v5e-8": 2}.get(recipe.topology, 1)
        fsdp = int(recipe.mesh.split("x")[0]) if recipe.mesh else usual
        cfg = steps.settings_of(recipe, fsdp)
        mesh = tuple(map(int, recipe.mesh.split("x"))) if recipe.mesh else ()
        found = steps.recipe_for(replace(cfg, mesh=mesh), recipe.size, recipe.topology,
                                 recipe.sequence_length, int(recipe.loss))
        assert replace(found, recipe=recipe.recipe) == recipe


def test_the_shapes_are_those_of_what_03_makes(tmp_path):
    cfg = train.Settings(rows_per_step=8, rows_per_device=1, validation_rows=10, answer_tokens=100)
    prompts = [[7] * count for count in (130, 50, 90)]
    shapes = programs.shapes_of(cfg, 4, 32, 16, 30, [len(prompt) for prompt in prompts])
    row = train.Batch(*(np.zeros(32, np.int32) for _ in range(4)))
    held_out = train.validation_batch([row] * 30, cfg.validation_rows, 4)
    assert held_out.tokens.shape == shapes.evaluation
    dataset = train.make_dataset([row] * 30, *train.micro_batches_of(cfg, 4), seed=0)
    assert next(iter(dataset)).tokens.shape == shapes.step == (2, 4, 32)
    tokens, lengths = gemma._rows_of(prompts, cfg.answer_tokens, 4)
    assert tokens.shape == shapes.answers == (4, 256)
    assert gemma.read_at_once(lengths) == shapes.at_once == 48


@pytest.mark.parametrize("compiler_here", [True, False])
def test_every_program_that_03_runs_beside_its_step_is_compiled(monkeypatch, compiler_here):
    """`DRYRUN=full` compiles what's missing (data/dryrun/README.md)."""
    if not compiler_here:
        monkeypatch.setattr(steps.compiler, "find", lambda: "")
    elif not steps.compiler.find():
        pytest.skip("no libtpu here")
    assert steps.missing_programs() == []


@pytest.mark.parametrize("topology", ["v5e-8", "v5e-1", "v6e-1", "v5p-8", "v5p-32", "v6e-8"])
def test_everything_that_03_compiles_on_a_slice_fits(topology):
    rows = [row for row in steps.stored_rows(steps.OTHERS) if row["topology"] == topology]
    assert {row["program"] for row in rows} | {"step"} == set(programs.PROGRAMS)
    assert {row["fits"] for row in rows} == {"True"}


@pytest.mark.parametrize(("topology", "floor"), [
    ("v5e-8", 0.004), ("v6e-8", 0.004), ("v5p-8", 0.005)])
def test_a_token_of_an_answer_is_no_faster_than_the_weights_are_read(topology, floor):
    """On a v5e-8, 31 GB by eight chips; on a v6e-8, 62 GB by eight; on a v5p-8, by four."""
    tokens = []
    for row in steps.stored_rows(steps.OTHERS):
        if row["topology"] == topology and row["program"].startswith("answers"):
            tokens.append(float(row["seconds_a_token"]))
    assert floor < min(tokens) <= max(tokens) < 0.025


def test_machines_says_what_is_compiled_of_the_12b_and_the_e4b():
    text = (ROOT / "docs/MACHINES.md").read_text(encoding="utf-8")
    for topology, size, base_dtype in (
            ("v6e-1", "12b", "int8"), ("v5e-8", "12b", "bfloat16"),
            ("v6e-1", "e4b", "bfloat16"), ("v5e-8", "e4b", "bfloat16")):
        row = stored.compiled_fit(topology, size, base_dtype, 2_048)
        least, most = fit.of_row(topology, size, row).speeds()
        gib = f"{float(row['hbm_gib']):.1f} of {float(row['limit_gib']):.1f}"
        line, = (line for line in text.splitlines() if f"{base_dtype} |" in line and gib in line)
        assert f"{least:,.0f} to {most:,.0f}" in line


@pytest.mark.parametrize(("topology", "base_dtype", "lengths"), [
    ("v5p-8", "bfloat16", (8_192, 16_384)), ("v6e-8", "bfloat16", (8_192, 16_384)),
    ("v5e-8", "int8", (4_096, 8_192))])
def test_machines_says_what_is_compiled_of_longer_rows(topology, base_dtype, lengths):
    text = (ROOT / "docs/MACHINES.md").read_text(encoding="utf-8")
    place = text.index(f"| {topology} | {lengths[0]:,} |")
    for length in lengths:
        row = stored.compiled_fit(topology, "31b", base_dtype, length)
        assert row["sequence_length"] == str(length)
        least, most = fit.of_row(topology, "31b", row).speeds()
        gib = f"{float(row['hbm_gib']):.1f} of {float(row['limit_gib']):.1f}"
        line = f"| {length:,} | {base_dtype} | {gib} | {least:,.0f} to {most:,.0f} "
        place = text.index(line, place)


def test_readme_says_what_recipe_py_needs_of_a_v5e_chip():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = {"recipe.py as it comes": "command above it takes {} GiB",
            "own data": "in the notebook below, it takes {} GiB"}
    compared = 0
    for row in steps.stored_rows(recipe_step.STORED):
        if row["topology"] == "v5e-1":
            assert said[row["name"]].format(f"{float(row['hbm_gib']):.1f}") in text
            assert row["fits"] == "True"
            compared += 1
    assert compared == 2


@pytest.mark.parametrize("topology", ["v5e-1", "v6e-1"])
def test_the_step_of_recipe_py_is_compiled_with_the_settings_of_own_data(topology):
    case = replace(recipe_step.OWN, topology=topology)
    assert case in recipe_step.CASES
    found, = (row for row in steps.stored_rows(recipe_step.STORED)
              if recipe_step.is_of(case, row | steps.versions()))
    assert found["fits"] == "True"
    settings = load("own_data.py", "RECIPES")["e2b"]
    wanted = settings["rank"], settings["sequence_length"], settings["rows_per_step"]
    assert (case.rank, case.sequence_length, case.rows_per_step) == wanted
