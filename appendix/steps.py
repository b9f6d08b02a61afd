"""The steps that notebook 08 compiles: recipes, how they lower, a row of the table, its columns.

A *recipe* is one configuration of a training step of Gemma 4. `lower_ours` and `lower_published`
trace it, `compile_recipe` asks the TPU's compiler, `measure` and `columns_of` make a row of data/dryrun/
of what it says (data/dryrun/README.md explains the columns). What its time depends on is kept beside it, so
that a time can be predicted again without compiling. `compiler.start` and `compiler.register` come
first where something is compiled.
"""

import dataclasses
import datetime
import gc
import itertools
import json
import lzma
import re
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pandas as pd
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma4.model import RematConfig
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

from appendix import quantized
from appendix.parts import part_of
from helpers import gemma, programs, train
from helpers.run import phase, write_text
from tables import architecture
from tables.hardware import SLICES
from tpu_time import clock, compiler, fit, links, report, tape

FOLDER = Path("data/dryrun")
RANK, ALPHA = 64, 64.0         # 03's at size 31b, and the published ones
HELD_OUT = 64                  # rows that 02 left for validation, or more
PROMPTS = (512,) * 4           # tokens of the four prompts that 03 answers before and after
PUBLISHED_MODULES = (          # the pattern of the published script
    ".*q_einsum|.*kv_einsum|.*attn_vec_einsum|.*gate_proj|.*down_proj|.*up_proj")


# ── recipes ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Recipe:
    """One configuration to compile; the fields are columns of its row."""

    recipe: str                   # published, ours, or a label
    topology: str = "v5p-8"
    size: str = "31b"
    trainer: str = "03"           # notebook 03's, or Tunix's own ("tunix")
    micro_batches: int = 1        # of an optimizer step
    micro_batch: int = 1          # rows that are computed at once, over all chips
    sequence_length: int = 4096   # tokens of a row
    remat: str = "NONE"           # what the backward pass recomputes: NONE, BLOCK, DECODER
    compute_dtype: str = "bfloat16"
    loss: str = "2048"            # positions of a row that meet the output matrix, or "one-hot"
    fill: float = 0.95            # share of the positions that are real tokens
    attention_block: int = 1024   # queries at a time; 0: Tunix's dense scores
    layers: int = 0               # 0: all of them
    base_dtype: str = "bfloat16"  # how the frozen base is stored (11); or int8, nf4
    int8_products: bool = False   # its products in int8, forward and backward
    mesh: str = ""                # fsdp x tp; empty: the one that the heads allow with most tp
    rank: int = RANK              # of the adapters


PUBLISHED = Recipe("published", trainer="tunix", sequence_length=3072, remat="DECODER",
                   compute_dtype="float32", loss="one-hot", fill=0.30, attention_block=0)
OURS = Recipe("ours", micro_batch=2)
ROWS = replace(OURS, recipe="ours, mesh (4, 1)", mesh="4x1", micro_batch=4, sequence_length=2048,
               loss="1024")
ROWS_INT8 = replace(ROWS, recipe="ours, mesh (4, 1), int8 products", base_dtype="int8",
                    int8_products=True)
ROAD = {PUBLISHED: "published",
        replace(PUBLISHED, recipe="published + bfloat16, no remat", compute_dtype="bfloat16",
                remat="NONE"): "bfloat16, no remat",
        OURS: "our step", ROWS: "mesh (4, 1)", ROWS_INT8: "int8 products"}
ONE_ROW = replace(OURS, recipe="ours, one row", micro_batch=1, micro_batches=2)
DENSE = replace(OURS, recipe="two rows, dense attention", attention_block=0)
E2B = Recipe("ours", size="e2b", micro_batches=4, sequence_length=2048, loss="1024")
NF4 = Recipe("nf4, DECODER remat", "v5e-4", remat="DECODER", micro_batches=2, sequence_length=2048,
             loss="1024", base_dtype="nf4")
INT8 = replace(NF4, recipe="int8, DECODER remat", base_dtype="int8")
ELSEWHERE = [
    replace(E2B, topology="v6e-1"),
    replace(E2B, recipe="ours, DECODER remat", topology="v5e-1", remat="DECODER"),
    replace(OURS, topology="v5p-32", micro_batch=8),
    replace(ROWS, recipe="ours, mesh (16, 1)", topology="v5p-32", mesh="16x1", micro_batch=16),
    replace(ROWS, recipe="ours, mesh (8, 1), DECODER remat", topology="v6e-8", mesh="8x1",
            micro_batch=8, remat="DECODER"),
    replace(ROWS_INT8, recipe="ours, mesh (8, 1), int8 products, BLOCK remat", topology="v6e-8",
            mesh="8x1", micro_batch=8, remat="BLOCK"),
    replace(OURS, recipe="ours, four rows, BLOCK remat", topology="v6e-8", micro_batch=4,
            remat="BLOCK"),
    NF4, INT8, replace(INT8, topology="v6e-4", sequence_length=4096, loss="2048"),
    replace(INT8, topology="v5e-8", micro_batches=1, micro_batch=2),
    replace(NF4, topology="v5e-8", micro_batches=1, micro_batch=2),
    replace(INT8, recipe="int8, BLOCK remat", topology="v6e-8", micro_batches=1, micro_batch=2,
            sequence_length=4096, loss="2048", remat="BLOCK"),
    replace(INT8, topology="v5e-1", size="e2b", micro_batches=4, sequence_length=4096, loss="2048"),
    replace(NF4, topology="v5e-1", size="e4b", micro_batches=4)]
# What 08 compiles live: a sliding and a full-attention layer, one row.
LIVE = replace(OURS, layers=2, micro_batch=1, sequence_length=2048, loss="1024")
RECIPES = [*ROAD, ONE_ROW, DENSE, LIVE, *ELSEWHERE]
# What 03 takes where a slice is meant for a size (`stored.settings_here`).
AS_03_RUNS = [OURS, ROWS, *(recipe for recipe in ELSEWHERE if recipe.base_dtype == "bfloat16")]


def real_tokens(recipe):
    """Real tokens of what was compiled, all its micro-batches: positions, less padding."""
    rows = recipe.micro_batches * recipe.micro_batch
    return rows * recipe.sequence_length * recipe.fill


# ── the steps ─────────────────────────────────────────────────────────────────────────────────────


def model_config(recipe):
    """Tunix's config of the real model, from data/configs/; fewer layers if asked."""
    config = gemma.config_from_hf(f"data/configs/gemma4_{recipe.size}.json")
    config.dtype = jnp.dtype(recipe.compute_dtype)
    if recipe.layers:  # the last ones of the pattern: a full-attention layer is among them
        config.num_layers = recipe.layers
        config.attention_pattern = config.attention_pattern[-recipe.layers:]
    return config


def mesh_of(recipe, config):
    """The mesh of a recipe, of devices that nobody owns."""
    shape = tuple(map(int, recipe.mesh.split("x"))) if recipe.mesh else None
    return gemma.make_mesh(config, shape, devices=compiler.devices_of(recipe.topology))


def settings_of(recipe, fsdp):
    """03's settings for a recipe on a mesh with so many parts of fsdp."""
    return train.Settings(
        rank=recipe.rank, alpha=ALPHA, rows_per_step=recipe.micro_batches * recipe.micro_batch,
        rows_per_device=recipe.micro_batch // fsdp, dtype=recipe.compute_dtype, remat=recipe.remat,
        attention_block=recipe.attention_block)


def shapes_of(recipe, fsdp):
    """The shapes of 03's programs for a recipe, as `programs.shapes_of` says them."""
    return programs.shapes_of(settings_of(recipe, fsdp), fsdp, recipe.sequence_length,
                              int(recipe.loss), HELD_OUT, PROMPTS)


def recipe_for(cfg, size, topology, length, trained):
    """The recipe, but for its label, of the step that 03 runs with these settings on a slice.

    Args:
      cfg: a `train.Settings`.
      size, topology: of the model, and of the slice.
      length, trained: tokens of a row, and how many of them are trained at most.
    """
    config = architecture.read_config(f"data/configs/gemma4_{size}.json")
    most_tp = architecture.choose_mesh(config, SLICES[topology].chips)
    mesh = cfg.mesh or most_tp
    micro_batches, rows = train.micro_batches_of(cfg, mesh[0])
    return Recipe("", topology, size, "03", micro_batches, rows, length, cfg.remat, cfg.dtype,
                  str(trained), attention_block=cfg.attention_block,
                  mesh="" if tuple(mesh) == most_tp else "x".join(map(str, mesh)), rank=cfg.rank)


def stored_step(cfg, size, topology, length, trained):
    """The stored row of exactly that step, or None."""
    wanted = key_of(dataclasses.asdict(recipe_for(cfg, size, topology, length, trained)))[1:]
    for row in stored_rows(FOLDER / f"{topology}_{size}.csv"):
        if cfg.targets == gemma.TARGETS and key_of(row | dict.fromkeys(versions(), ""))[1:] == wanted:
            return row
    return None


def model_of(recipe, mesh, config, program="step"):
    """The abstract model that one of 03's programs is given: with adapters, but for the first."""
    base = quantized.abstract_base(config, mesh, recipe.base_dtype)
    config.remat_config = RematConfig[recipe.remat]
    if program == "answers before":
        return base
    cfg = settings_of(recipe, mesh.shape["fsdp"])
    provider = quantized.provider(recipe.base_dtype, cfg.rank, cfg.alpha,
                                  int8_products=recipe.int8_products)
    return programs.adapted(base, cfg, mesh, provider)


def lower_ours(recipe, mesh, config, program="step"):
    """One of notebook 03's programs (`programs.PROGRAMS`), lowered: traced, not yet compiled."""
    fsdp = mesh.shape["fsdp"]
    model = model_of(recipe, mesh, config, program)
    return programs.lower(program, settings_of(recipe, fsdp), shapes_of(recipe, fsdp), mesh, model)


def lower_published(recipe, mesh, config):
    """The published script's micro-step, an eighth of its optimizer step, lowered as Tunix does.

    Tunix's trainer as it comes: stock LoRA by the script's own pattern, gradients averaged by
    `optax.MultiSteps`, the one-hot loss over all positions, a step that returns the whole model.
    """
    provider = qwix.LoraProvider(module_path=PUBLISHED_MODULES, rank=RANK, alpha=ALPHA)

    def adapt(model):
        return qwix.apply_lora_to_model(model, provider, jnp.ones((1, 2), jnp.int32),
                                        attention_mask=jnp.ones((1, 2, 2), bool), rngs=nnx.Rngs(0))

    def model_input(rows):
        real = rows.input_tokens != 0
        return {"input_tokens": rows.input_tokens, "input_mask": rows.input_mask,
                "positions": sft_utils.build_positions_from_mask(real),
                "attention_mask": sft_utils.make_causal_attn_mask(real)}

    model = gemma.place(nnx.eval_shape(adapt, gemma.abstract_base(config, mesh)), mesh)
    config.remat_config = RematConfig[recipe.remat]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-4, 100, 1_244)
    shape = (recipe.micro_batch, recipe.sequence_length)
    spec = NamedSharding(mesh, PartitionSpec("fsdp"))
    batch = peft_trainer.TrainingInput(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=spec),
                                       jax.ShapeDtypeStruct(shape, bool, sharding=spec))
    with mesh:
        return lower_tunix(model, mesh, optax.adamw(schedule, weight_decay=0.001), model_input,
                           batch, micro_batches=8)


def lower_tunix(model, mesh, rule, model_input, batch, micro_batches=None):
    """The step of Tunix's own trainer for an abstract model and batch, lowered."""
    trainers, options = [], peft_trainer.TrainingConfig(
        eval_every_n_steps=1, gradient_accumulation_steps=micro_batches)

    def build(model):
        trainers.append(peft_trainer.PeftTrainer(model, rule, options))
        return trainers[0].optimizer

    optimizer = gemma.place(nnx.eval_shape(build, model), mesh)  # abstract, like the model
    trainer = trainers[0].with_gen_model_input_fn(model_input)
    step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
    return step.lower(model, optimizer, batch).lowered  # JAX's own, not NNX's


def lower(recipe):
    """The step of a recipe, lowered."""
    config = model_config(recipe)
    mesh = mesh_of(recipe, config)
    if recipe.trainer == "tunix":
        return lower_published(recipe, mesh, config)
    return lower_ours(recipe, mesh, config)


def compile_recipe(recipe):
    """Compile one recipe; returns (program or None, the compiler's refusal, CPU seconds).

    A program that needs more HBM than the chip has is refused: that is a row of the table, too.
    """
    compiler.register()
    lowered = lower(recipe)
    start = time.process_time()
    try:
        program, refusal = lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        program, refusal = None, str(error)
    return program, refusal, time.process_time() - start


# ── a row of the table ────────────────────────────────────────────────────────────────────────────


COUNTED = {"args_gib": "arguments GiB", "out_gib": "fresh outputs GiB",
           "temp_gib": "temporaries GiB", "hbm_gib": "sum GiB"}
PREDICTED = ("unknown_share", "seconds_predicted", "seconds_compute", "seconds_exposed",
             "tokens_per_second_predicted", "clock")


def versions():
    """What the numbers depend on."""
    names = {"jax": "jax", "flax": "flax", "tunix": "google-tunix", "qwix": "qwix"}
    return ({short: metadata.version(name) for short, name in names.items()}
            | {"libtpu": compiler.version()})


def slice_of(recipe):
    """The slice of a recipe as the time model sees it: its shape, and where the mesh puts partitions."""
    piece, mesh = SLICES[recipe.topology], mesh_of(recipe, model_config(recipe))
    sizes = [int(size) for size in piece.topology.split("x")]
    places = tuple(tuple(device.coords) for device in mesh.devices.flat)
    return links.Box(piece.kind, (*sizes, 1)[:3], places)


def columns_of(recipe, found):
    """What a `program.Prediction` says, as columns; empty where too much has no known cost."""
    row = dict.fromkeys(PREDICTED) | {"unknown_share": found.unknown_share,
                                      "clock": clock.VERSION}
    if found.seconds is None:
        return row
    return row | {"seconds_predicted": found.seconds, "seconds_compute": found.compute,
                  "seconds_exposed": found.exposed + found.copies,
                  "tokens_per_second_predicted": real_tokens(recipe) / found.seconds}


def measure(recipe, program, refusal, seconds):
    """One row of the table, from the compiler's own analyses.

    Memory is that of one chip: arguments (weights, adapters, optimizer state, batch), outputs that
    do not take the place of a donated argument, and temporaries, all at once. The program's own
    code comes on top and is not counted.
    """
    piece = SLICES[recipe.topology]
    limit = piece.chip.hbm / 2**30
    row = dataclasses.asdict(recipe) | {"chips": piece.chips, "limit_gib": limit, "fits": False}
    row |= dict.fromkeys((*COUNTED, "flops_per_chip", "real_tokens_per_step", *PREDICTED))
    if program is None:
        needed = re.search(r"(?:Used |temporaries \()([\d.]+)G", refusal)
        row |= {"hbm_gib": float(needed[1]) if needed else None}
    else:
        memory = program.memory_analysis()
        fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
        sizes = [size / 2**30 for size in (memory.argument_size_in_bytes, fresh,
                                           memory.temp_size_in_bytes)]
        row |= dict(zip(COUNTED, (*sizes, sum(sizes)), strict=True))
        row |= {"fits": sum(sizes) <= limit, "flops_per_chip": program.cost_analysis()["flops"],
                "real_tokens_per_step": real_tokens(recipe)}
    return row | {"compile_cpu_seconds": seconds} | versions() | {
        "date": str(datetime.date.today()), "note": "" if program else "out of HBM"}


# ── stored rows ───────────────────────────────────────────────────────────────────────────────────


def table_name(recipe):
    """The file that a recipe's row belongs to."""
    return f"{recipe.topology}_{recipe.size}" + (f"_{recipe.layers}layers" if recipe.layers else "")


def table_path(recipe):
    """The same as a path."""
    return FOLDER / f"{table_name(recipe)}.csv"


def stored(name):
    """A table of data/dryrun/."""
    return pd.read_csv(FOLDER / f"{name}.csv", dtype={"trainer": str})


def key_of(row):
    """What must be equal for a stored row to be valid: the recipe and the versions."""
    return tuple(str(row.get(name, "")) for name in
                 (*Recipe.__dataclass_fields__, *versions()))


def stored_rows(path):
    """The rows of a table as text, [] if it is not there."""
    return (pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
            if path.exists() else [])


def kept_path(recipe):
    """Where a recipe's program is kept, as far as its time depends on it."""
    words = f"{table_name(recipe)} {recipe.recipe}".replace("-", "")
    return FOLDER / "programs" / (re.sub(r"\W+", "_", words).strip("_") + ".json.xz")


def keep(recipe, text):
    """Keep a program's slice and its tape (`tape.read`)."""
    path, where = kept_path(recipe), slice_of(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    held = [where.chip, where.shape, where.coordinates, tape.to_json(tape.read(text, part_of))]
    path.write_bytes(lzma.compress(json.dumps(held, separators=(",", ":")).encode()))


def predicted(recipe):
    """The `program.Prediction` of a program that is kept, or None."""
    path = kept_path(recipe)
    if not path.exists():
        return None
    chip, shape, places, rows = json.loads(lzma.decompress(path.read_bytes()))
    where = links.Box(chip, tuple(shape), tuple(map(tuple, places)))
    return clock.play(tape.from_json(rows), where)


def run_table(recipes):
    """Compile the recipes that are not stored yet; each row is on disk as soon as it is known."""
    for number, recipe in enumerate(recipes, 1):
        wanted = key_of(dataclasses.asdict(recipe) | versions())
        if wanted in map(key_of, stored_rows(table_path(recipe))):
            continue
        with phase(f"{number}/{len(recipes)} {recipe.topology} {recipe.size}: {recipe.recipe}",
                   every=60.0):
            compiled = compile_recipe(recipe)
            row = measure(recipe, *compiled)
            if compiled[0]:
                keep(recipe, compiled[0].as_text())
                row |= columns_of(recipe, predicted(recipe))
        store(recipe, row)
        compiled = None  # a program of sixty layers takes gigabytes, as will the next one
        jax.clear_caches()
        gc.collect()


def predict_again(recipes):
    """Predict the programs that are kept by the rules of today: nothing is compiled."""
    for recipe in recipes:
        for row in stored_rows(table_path(recipe)):
            if row["recipe"] == recipe.recipe and (found := predicted(recipe)):
                store(recipe, row | columns_of(recipe, found))


def store(recipe, row):
    """Put the row of a recipe into its table; one that stood there for it is replaced."""
    path = table_path(recipe)
    rows = [old for old in stored_rows(path) if old["recipe"] != recipe.recipe]
    write_text(path, pd.DataFrame([*rows, as_text(row)]).to_csv(index=False))


def as_text(row):
    """A row's values as a table holds them."""
    def text(value):
        return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    return {name: text(value) for name, value in row.items()}


# ── the programs beside the step ──


OTHERS = FOLDER / "beside_the_step.csv"


def shape_of(recipe, program, fsdp):
    """The shapes of one of 03's programs as text: part of what a row is known by."""
    shapes = shapes_of(recipe, fsdp)
    if program.startswith("answers"):
        return f"{shapes.answers[0]} x {shapes.answers[1]}, {shapes.at_once} at once"
    if program == "evaluation":
        return " x ".join(map(str, shapes.evaluation)) + f", {shapes.trained} trained"
    return f"rank {recipe.rank}"


def known_by(recipe, program):
    """What must be equal for the stored row of a program to be valid."""
    config = architecture.read_config(f"data/configs/gemma4_{recipe.size}.json")
    chosen = architecture.choose_mesh(config, SLICES[recipe.topology].chips)
    fsdp = int(recipe.mesh.split("x")[0]) if recipe.mesh else chosen[0]
    return {"topology": recipe.topology, "size": recipe.size, "recipe": recipe.recipe,
            "program": program, "shape": shape_of(recipe, program, fsdp)} | versions()


def missing_programs(recipes=AS_03_RUNS):
    """[(recipe, program)] of 03's programs, but for its step, that no stored row holds."""
    rows = stored_rows(OTHERS)
    missing = []
    for recipe in recipes:
        for program in programs.PROGRAMS:
            known = known_by(recipe, program)
            held = any(known.items() <= row.items() for row in rows)
            if program != "step" and not held:
                missing.append((recipe, program))
    return missing


def run_programs(wanted):
    """Compile [(recipe, program)] and store a row of each as soon as it is known."""
    compiler.register()
    for recipe, program in wanted:
        config = model_config(recipe)
        mesh = mesh_of(recipe, config)
        start = time.process_time()
        with phase(f"{recipe.topology} {recipe.size}, {recipe.recipe}: {program}", every=60.0):
            lowered = lower_ours(recipe, mesh, config, program)
            row = known_by(recipe, program) | memory_of_program(lowered)
        cfg = settings_of(recipe, mesh.shape["fsdp"])
        beside = programs.beside(program, cfg, mesh, model_of(recipe, mesh, model_config(recipe)))
        limit = SLICES[recipe.topology].chip.hbm / 2**30
        total = row["hbm_gib"] + beside
        row |= {"beside_gib": beside, "hbm_gib": total, "limit_gib": limit, "fits": total <= limit,
                "compile_cpu_seconds": time.process_time() - start,
                "date": str(datetime.date.today())}
        key = known_by(recipe, program).items()
        rows = [old for old in stored_rows(OTHERS) if not key <= old.items()]
        write_text(OTHERS, pd.DataFrame([*rows, as_text(row)]).to_csv(index=False))
        jax.clear_caches()
        gc.collect()


def memory_of_program(lowered):
    """GiB of a chip that a lowered program takes, by the compiler; what it asked for if refused."""
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = re.search(r"(?:Used |temporaries \()([\d.]+)G", str(error))
        return {"args_gib": None, "temp_gib": None, "hbm_gib": float(needed[1])}
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = {"args_gib": memory.argument_size_in_bytes / 2**30,
             "temp_gib": (memory.temp_size_in_bytes + fresh) / 2**30}
    return sizes | {"hbm_gib": sum(sizes.values())}


# ── tables to look at ─────────────────────────────────────────────────────────────────────────────


FORMS = {"fits": lambda fits: "yes" if fits else "no", "seconds_predicted": "{:.3f}",
         "seconds_exposed": "{:.3f}", "tokens_per_second_predicted": "{:,.0f}",
         **dict.fromkeys(COUNTED, "{:.2f}")}


def show(table, columns):
    """Columns {column: its name here} of a table, with sensible digits, to be seen."""
    forms = {name: form for name, form in FORMS.items() if name in columns}
    look = table.reset_index(drop=True).reindex(columns=list(columns)).style.hide(axis="index")
    look = look.format(forms, na_rep="").relabel_index(list(columns.values()), axis="columns")
    return look.set_table_styles([
        {"selector": ".col0", "props": "text-align: left; white-space: nowrap"}])


def in_order(table, recipes):
    """A table's rows of these recipes, in their order."""
    order = [recipe.recipe for recipe in recipes]
    return table[table.recipe.isin(order)].sort_values(
        "recipe", key=lambda names: names.map(order.index), ignore_index=True)


def int8_at(found, share, peak):
    """Seconds of a prediction if its int8 products reached no more than a share of their peak.

    No anchor is a step with int8 products, and the compiler's cycles say 94 % of the peak for ours.
    What such a step waits for stays as it is.
    """
    slower = 0.0
    for event in found.events:
        if event.track == "compute" and event.int8:
            slower += max(0.0, event.int8 / (share * peak) - event.seconds)
    return found.seconds + slower


def road(table):
    """[(label, tokens per second before, after)] along `ROAD`; packing is a step of its own."""
    speed, found = table.set_index("recipe").tokens_per_second_predicted, []
    for before, after in itertools.pairwise(ROAD):
        start, packing = speed[before.recipe], after.fill / before.fill
        if packing != 1:
            found.append(("packed rows", start, start * packing))
        found.append((ROAD[after], start * packing, speed[after.recipe]))
    return found


def parts_of(recipe, found):
    """`report.profile` of a prediction; a wait is a part of its own, named by what is waited for."""
    rows = pd.DataFrame(report.profile(found, SLICES[recipe.topology].chip))
    rows["part"] = rows.part.where(rows.what == "compute", "waits: " + rows.what)
    return rows


def show_parts(recipe, found):
    """A `program.Prediction` in milliseconds: a row for each part and each wait, longest first.

    `at its limit` is the share of a part's time that its products at the peak, or its bytes at the
    HBM's speed, would take.
    """
    rows, tokens = parts_of(recipe, found), real_tokens(recipe)
    table = 1e3 * rows.pivot_table(index="part", columns="direction", values="seconds",
                                   aggfunc="sum", fill_value=0.0)
    table = table.reindex(columns=[name for name in tape.DIRECTIONS if name in table])
    table["all"] = table.sum(axis=1)
    table["share"] = table["all"] / table["all"].sum()
    table["ms per 1,000 real tokens"] = table["all"] / tokens * 1e3
    limit = rows[rows.what == "compute"].groupby("part").at_peak.sum()
    table["at its limit"] = 1e3 * limit / table["all"]
    table = table.sort_values("all", ascending=False).rename_axis(index=None, columns=None)
    look = table.style.format("{:,.1f}", na_rep="")
    look = look.format("{:.0%}", na_rep="", subset=["share", "at its limit"])
    return look.set_caption(f"{recipe.recipe}: {found.seconds:.3f} s predicted for a micro-step of "
                            f"{tokens:,.0f} real tokens, {found.exposed:.3f} s of it waiting "
                            "for the links")


def renters_table(tokens, prices):
    """One line for each slice and base dtype: what fits, how long a whole run takes, its price.

    `tokens` are the run's real ones, `prices` your own: {slice: dollars an hour}.
    """
    lines = []
    for found, price in fit.renters_rows():
        cost = fit.run_cost(found, tokens, prices.get(found.slice, price))
        line = {"slice": found.slice, "model": found.model, "base": found.base_dtype,
                "fits": "yes" if found.fits else "no", "remat": found.remat,
                "rows": f"{found.rows} x {found.row_length:,}", "GiB a chip": f"{found.total:.1f}",
                "limit": f"{found.limit:.1f}", "from": "compiled" if found.compiled else "estimated"}
        spent = {"real tokens/s": found.pace, "whole run, h": cost["hours_text"],
                 "USD": cost["dollars_text"]}
        lines.append(line | (spent if found.fits else dict.fromkeys(spent, "")))
    return pd.DataFrame(lines)
