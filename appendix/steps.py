"""The steps that notebook 08 compiles: recipes, how they lower, a row of the table, its columns.

A *recipe* is one configuration of a training step of Gemma 4. `lower_ours` and `lower_published`
trace it, `compile_recipe` asks the TPU's compiler, `measure` and `columns_of` make a row of
data/dryrun/ of what it says (data/dryrun/README.md explains the columns). What its time depends on
is kept beside it, so that a time can be predicted again without compiling. `compiler.start` and
`compiler.register` come first where something is compiled.
"""

import dataclasses
import datetime
import gc
import itertools
import json
import lzma
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import qwix
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pandas.io.formats.style import Styler
from tunix.models.gemma4.model import Gemma4, ModelConfig, RematConfig
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

from appendix.parts import part_of
from helpers import gemma, programs, quantized, train
from helpers.run import phase, write_text
from tables import architecture
from tables.hardware import SLICES
from tables.stored import config_of
from tpu_time import clock, compiler, links, report, tape
from tpu_time.clock import Prediction

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
ONE_ROW = replace(OURS, recipe="ours, one row", micro_batch=1)
DENSE = replace(OURS, recipe="two rows, dense attention", attention_block=0)
E2B = Recipe("ours", size="e2b", micro_batches=4, sequence_length=2048, loss="1024")
NF4 = Recipe("nf4, DECODER remat", "v5e-4", remat="DECODER", micro_batches=2, sequence_length=2048,
             loss="1024", base_dtype="nf4")
INT8 = replace(NF4, recipe="int8, DECODER remat", base_dtype="int8")
INT8_ONE = replace(INT8, recipe="int8, DECODER remat, one row", micro_batches=1)  # 11's, on a v5e-4
FREE = replace(INT8, recipe="int8, mesh (4, 2), DECODER remat", topology="v5e-8", mesh="4x2",
               micro_batches=1, micro_batch=4)  # Kaggle lends that slice
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
    replace(NF4, micro_batches=1),  # 03's step has two micro-batches: this says only what fits
    INT8, INT8_ONE,
    replace(INT8, topology="v6e-4", micro_batches=1, sequence_length=4096, loss="2048"),
    FREE,
    replace(FREE, recipe="int8, mesh (4, 2), int8 products, DECODER remat", int8_products=True),
    replace(INT8, recipe="int8, rows of 4,096, DECODER remat", topology="v5e-8", micro_batches=1,
            micro_batch=2, sequence_length=4096, loss="2048"),
    replace(NF4, topology="v5e-8", micro_batches=1, micro_batch=2),
    replace(INT8, recipe="int8, BLOCK remat", topology="v6e-8", micro_batches=1, micro_batch=2,
            sequence_length=4096, loss="2048", remat="BLOCK"),
    replace(INT8, topology="v5e-1", size="e2b", micro_batches=4, sequence_length=4096, loss="2048"),
    replace(INT8, recipe="int8, DECODER remat, one row", topology="v5e-1", size="e2b",
            micro_batches=1, sequence_length=4096, loss="2048"),
    replace(NF4, topology="v5e-1", size="e4b", micro_batches=4),
    replace(NF4, recipe="nf4, DECODER remat, one row", topology="v5e-1", size="e4b",
            micro_batches=1),
    replace(INT8, topology="v6e-1", size="12b", micro_batches=4),
    replace(NF4, recipe="nf4, DECODER remat, one row", topology="v5e-1", size="12b",
            micro_batches=1),
    replace(E2B, recipe="ours, DECODER remat", topology="v5e-8", size="12b", micro_batches=1,
            micro_batch=8, remat="DECODER"),
    replace(E2B, recipe="ours, DECODER remat", topology="v6e-1", size="e4b", remat="DECODER")]
LONG = replace(OURS, recipe="ours, rows of 8,192, BLOCK remat", micro_batch=1,
               sequence_length=8192, loss="4096", remat="BLOCK")
LONGER = replace(LONG, recipe="ours, rows of 16,384, BLOCK remat", sequence_length=16_384,
                 loss="8192")
LONG_ROWS = [  # compiled as steps only, so they aren't among `AS_03_RUNS`
    LONG, LONGER,
    replace(LONGER, recipe="ours, rows of 16,384, DECODER remat", topology="v6e-8", micro_batch=2,
            remat="DECODER"),
    replace(LONG, recipe="ours, rows of 8,192, DECODER remat", topology="v6e-8", micro_batch=2,
            remat="DECODER"),
    replace(LONG, recipe="int8, rows of 8,192, DECODER remat", topology="v5e-8", micro_batch=2,
            base_dtype="int8", remat="DECODER"),
    replace(LONGER, recipe="int8, rows of 16,384, DECODER remat", topology="v5e-8", micro_batch=2,
            base_dtype="int8", remat="DECODER"),
]
E4B_ON_EIGHT = replace(E2B, recipe="ours, DECODER remat, E4B", topology="v5e-8", size="e4b",
                       micro_batches=1, micro_batch=8, remat="DECODER")  # as a step only, too
# What 08 compiles live: a sliding and a full-attention layer, one row.
LIVE = replace(OURS, layers=2, micro_batch=1, sequence_length=2048, loss="1024")
RECIPES = [*ROAD, ONE_ROW, DENSE, LIVE, *ELSEWHERE, *LONG_ROWS, E4B_ON_EIGHT]
# What 03 takes where a slice is meant for a size (`stored.settings_here`), mesh (8, 1), and 11's.
AS_03_RUNS = [OURS, ROWS, FREE, INT8_ONE,
              *(recipe for recipe in ELSEWHERE
                if recipe.base_dtype == "bfloat16" and recipe.size in ("31b", "e2b", "e4b"))]


def real_tokens(recipe: Recipe) -> float:
    """Real tokens of what was compiled, all its micro-batches: positions, less padding."""
    rows = recipe.micro_batches * recipe.micro_batch
    return rows * recipe.sequence_length * recipe.fill


# ── the steps ─────────────────────────────────────────────────────────────────────────────────────


def model_config(recipe: Recipe) -> ModelConfig:
    """Tunix's config of the real model, from data/configs/; fewer layers if asked."""
    config = gemma.config_from_hf(config_of(recipe.size))
    config.dtype = jnp.dtype(recipe.compute_dtype)
    if recipe.layers:  # the last ones of the pattern: a full-attention layer is among them
        config.num_layers = recipe.layers
        config.attention_pattern = config.attention_pattern[-recipe.layers:]
    return config


def mesh_shape(recipe: Recipe) -> tuple[int, int]:
    """(fsdp, tp) of a recipe's mesh: its own, or the one with the most tp that the heads allow."""
    if recipe.mesh:
        fsdp, tp = recipe.mesh.split("x")
        return int(fsdp), int(tp)
    config = architecture.read_config(config_of(recipe.size))
    return architecture.choose_mesh(config, SLICES[recipe.topology].chips)


def mesh_of(recipe: Recipe, config: ModelConfig) -> Mesh:
    """The mesh of a recipe, of devices that nobody owns."""
    shape = None
    if recipe.mesh:
        shape = mesh_shape(recipe)
    return gemma.make_mesh(config, shape, devices=compiler.devices_of(recipe.topology))


def settings_of(recipe: Recipe, fsdp: int) -> train.Settings:
    """03's settings for a recipe on a mesh with so many parts of fsdp."""
    return train.Settings(
        rank=recipe.rank,
        alpha=ALPHA,
        rows_per_step=recipe.micro_batches * recipe.micro_batch,
        rows_per_device=recipe.micro_batch // fsdp,
        dtype=recipe.compute_dtype,
        base_dtype=recipe.base_dtype,
        int8_products=recipe.int8_products,
        remat=recipe.remat,
        attention_block=recipe.attention_block)


def shapes_of(recipe: Recipe, fsdp: int) -> programs.Shapes:
    """The shapes of 03's programs for a recipe, as `programs.shapes_of` says them."""
    cfg = settings_of(recipe, fsdp)
    trained = int(recipe.loss)
    return programs.shapes_of(cfg, fsdp, recipe.sequence_length, trained, HELD_OUT, PROMPTS)


def recipe_for(cfg: train.Settings, size: str, topology: str, length: int,
               trained: int) -> Recipe:
    """The recipe, but for its label, of the step that 03 runs with these settings on a slice.

    Args:
      cfg: 03's settings.
      size, topology: of the model, and of the slice.
      length, trained: tokens of a row, and how many of them are trained at most.
    """
    config = architecture.read_config(config_of(size))
    most_tp = architecture.choose_mesh(config, SLICES[topology].chips)
    fsdp, tp = cfg.mesh or most_tp
    mesh = "" if (fsdp, tp) == most_tp else f"{fsdp}x{tp}"
    micro_batches, rows = train.micro_batches_of(cfg, fsdp)
    return Recipe(
        recipe="",
        topology=topology,
        size=size,
        micro_batches=micro_batches,
        micro_batch=rows,
        sequence_length=length,
        remat=cfg.remat,
        compute_dtype=cfg.dtype,
        loss=str(trained),
        attention_block=cfg.attention_block,
        base_dtype=cfg.base_dtype or "bfloat16",
        int8_products=cfg.int8_products,
        mesh=mesh,
        rank=cfg.rank)


def stored_step(cfg: train.Settings, size: str, topology: str, length: int,
                trained: int) -> dict[str, str] | None:
    """The stored row of exactly that step, or None."""
    if cfg.targets != gemma.TARGETS:
        return None
    recipe = recipe_for(cfg, size, topology, length, trained)
    wanted = _configuration(dataclasses.asdict(recipe))
    for row in stored_rows(FOLDER / f"{topology}_{size}.csv"):
        if _configuration(row) == wanted:
            return row
    return None


def _configuration(row: Mapping[str, object]) -> list[str]:
    """What a row was compiled from, without the recipe's label."""
    _, *fields = Recipe.__dataclass_fields__
    return [str(row.get(name, "")) for name in fields]


def model_of(recipe: Recipe, mesh: Mesh, config: ModelConfig, program: str = "step") -> Gemma4:
    """The abstract model that one of 03's programs is given: with adapters, but for the first."""
    base = quantized.abstract_base(config, mesh, recipe.base_dtype)
    config.remat_config = RematConfig[recipe.remat]
    if program == "answers before":
        return base
    cfg = settings_of(recipe, mesh.shape["fsdp"])
    return programs.adapted(base, cfg, mesh)


def lower_ours(recipe: Recipe, mesh: Mesh, config: ModelConfig,
               program: str = "step") -> jax.stages.Lowered:
    """One of notebook 03's programs (`programs.PROGRAMS`), lowered: traced, not yet compiled."""
    fsdp = mesh.shape["fsdp"]
    model = model_of(recipe, mesh, config, program)
    return programs.lower(program, settings_of(recipe, fsdp), shapes_of(recipe, fsdp), mesh, model)


def published_adapters(base: Gemma4) -> Gemma4:
    """The model with Qwix's stock LoRA, by the published script's own pattern."""
    provider = qwix.LoraProvider(module_path=PUBLISHED_MODULES, rank=RANK, alpha=ALPHA)
    tokens = jnp.ones((1, 2), jnp.int32)
    attention = jnp.ones((1, 2, 2), bool)
    return qwix.apply_lora_to_model(base, provider, tokens, attention_mask=attention,
                                    rngs=nnx.Rngs(0))


def published_optimizer() -> optax.GradientTransformation:
    """The published script's optimizer."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-4, 100, 1_244)
    return optax.adamw(schedule, weight_decay=0.001)


def published_input(rows: peft_trainer.TrainingInput) -> dict[str, Any]:
    """The model's arguments of a batch, as the published script makes them."""
    real = rows.input_tokens != 0
    return {"input_tokens": rows.input_tokens,
            "input_mask": rows.input_mask,
            "positions": sft_utils.build_positions_from_mask(real),
            "attention_mask": sft_utils.make_causal_attn_mask(real)}


def lower_published(recipe: Recipe, mesh: Mesh, config: ModelConfig) -> jax.stages.Lowered:
    """The published script's micro-step, an eighth of its optimizer step, lowered as Tunix does.

    Tunix's trainer as it comes: stock LoRA by the script's own pattern, gradients averaged by
    `optax.MultiSteps`, the one-hot loss over all positions, a step that returns the whole model.
    """
    base = gemma.abstract_base(config, mesh)
    model = gemma.place(nnx.eval_shape(published_adapters, base), mesh)
    config.remat_config = RematConfig[recipe.remat]

    shape = (recipe.micro_batch, recipe.sequence_length)
    spec = NamedSharding(mesh, PartitionSpec("fsdp"))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=spec)
    is_trained = jax.ShapeDtypeStruct(shape, bool, sharding=spec)
    batch = peft_trainer.TrainingInput(tokens, is_trained)
    with mesh:
        return lower_tunix(model, mesh, published_optimizer(), published_input, batch,
                           micro_batches=8)


def lower_tunix(model: nnx.Module, mesh: Mesh, rule: optax.GradientTransformation,
                model_input: Callable[[Any], dict[str, Any]], batch: Any,
                micro_batches: int | None = None) -> jax.stages.Lowered:
    """The step of Tunix's own trainer for an abstract model and batch, lowered.

    Args:
      model: abstract, with its adapters.
      mesh: on which it lies.
      rule: the optimizer.
      model_input: makes the model's arguments of a batch.
      batch: abstract arrays.
      micro_batches: whose gradients are averaged before the optimizer moves; None: of one.
    """
    options = peft_trainer.TrainingConfig(eval_every_n_steps=1,
                                          gradient_accumulation_steps=micro_batches)
    trainers = []  # `eval_shape` returns the optimizer alone

    def build(model):
        trainer = peft_trainer.PeftTrainer(model, rule, options)
        trainers.append(trainer)
        return trainer.optimizer

    optimizer = gemma.place(nnx.eval_shape(build, model), mesh)  # abstract, like the model
    trainer = trainers[0].with_gen_model_input_fn(model_input)
    step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
    return step.lower(model, optimizer, batch).lowered  # JAX's own, not NNX's


def lower(recipe: Recipe) -> jax.stages.Lowered:
    """The step of a recipe, lowered."""
    config = model_config(recipe)
    mesh = mesh_of(recipe, config)
    if recipe.trainer == "tunix":
        return lower_published(recipe, mesh, config)
    return lower_ours(recipe, mesh, config)


def compile_recipe(recipe: Recipe) -> tuple[jax.stages.Compiled | None, str, float]:
    """Compile one recipe; returns (program or None, the compiler's refusal, CPU seconds).

    A program that needs more HBM than the chip has is refused: that is a row of the table, too.
    """
    compiler.register()
    lowered = lower(recipe)
    start = time.process_time()
    program, refusal = compiled_or_refused(lowered)
    return program, refusal, time.process_time() - start


def compiled_or_refused(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled | None, str]:
    """(program, ""), or (None, what the compiler says) where the chip's memory is too small."""
    try:
        return lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, str(error)


def gib_asked_for(refusal: str) -> float | None:
    """GiB that a refused program needed, its arguments included; None if the compiler doesn't say.

    What XLA's message calls "HLO temporaries" counts the arguments, too.
    """
    needed = re.search(r"(?:Used |temporaries \()([\d.]+)G", refusal)
    return float(needed[1]) if needed else None


# ── a row of the table ────────────────────────────────────────────────────────────────────────────


COUNTED = {"args_gib": "arguments GiB", "out_gib": "fresh outputs GiB",
           "temp_gib": "temporaries GiB", "hbm_gib": "sum GiB"}
PREDICTED = ("unknown_share", "seconds_predicted", "seconds_compute", "seconds_exposed",
             "tokens_per_second_predicted", "clock")


def versions() -> dict[str, str]:
    """What the numbers depend on."""
    installed = {}
    for short, name in (("jax", "jax"), ("flax", "flax"), ("tunix", "google-tunix"),
                        ("qwix", "qwix")):
        installed[short] = metadata.version(name)
    return installed | {"libtpu": compiler.version()}


def stamp(row: dict[str, str]) -> None:
    """Write into a planned row with what it was made, and when."""
    row["jax"] = metadata.version("jax")
    row["libtpu"] = compiler.version()
    row["date"] = str(datetime.date.today())


def slice_of(recipe: Recipe) -> links.Box:
    """A recipe's slice as the time model sees it: its shape, and where the mesh puts partitions."""
    piece = SLICES[recipe.topology]
    mesh = mesh_of(recipe, model_config(recipe))
    sizes = [int(size) for size in piece.topology.split("x")]
    if len(sizes) == 2:
        sizes.append(1)
    places = tuple(tuple(device.coords) for device in mesh.devices.flat)
    return links.Box(piece.kind, tuple(sizes), places)


def columns_of(recipe: Recipe, prediction: Prediction) -> dict[str, Any]:
    """What a prediction says, as columns; empty where too much has no known cost."""
    row: dict[str, Any] = dict.fromkeys(PREDICTED)
    row["unknown_share"] = prediction.unknown_share
    row["clock"] = clock.VERSION
    if prediction.seconds is not None:
        row["seconds_predicted"] = prediction.seconds
        row["seconds_compute"] = prediction.compute
        row["seconds_exposed"] = prediction.exposed + prediction.copies
        row["tokens_per_second_predicted"] = real_tokens(recipe) / prediction.seconds
    return row


def measure(recipe: Recipe, program: jax.stages.Compiled | None, refusal: str,
            seconds: float) -> dict[str, Any]:
    """One row of the table, from the compiler's own analyses.

    Memory is that of one chip: arguments (weights, adapters, optimizer state, batch), outputs that
    do not take the place of a donated argument, and temporaries, all at once. The program's own
    code comes on top and is not counted.

    Args:
      recipe, program, refusal, seconds: what was compiled, and what `compile_recipe` returned.
    """
    piece = SLICES[recipe.topology]
    limit = piece.chip.hbm / 2**30
    row: dict[str, Any] = dataclasses.asdict(recipe)
    row |= {"chips": piece.chips, "limit_gib": limit, "fits": False}
    row |= dict.fromkeys((*COUNTED, "flops_per_chip", "real_tokens_per_step", *PREDICTED))
    if program is None:
        row["hbm_gib"] = gib_asked_for(refusal)
    else:
        memory = program.memory_analysis()
        fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
        row["args_gib"] = memory.argument_size_in_bytes / 2**30
        row["out_gib"] = fresh / 2**30
        row["temp_gib"] = memory.temp_size_in_bytes / 2**30
        row["hbm_gib"] = row["args_gib"] + row["out_gib"] + row["temp_gib"]
        row["fits"] = row["hbm_gib"] <= limit
        row["flops_per_chip"] = program.cost_analysis()["flops"]
        row["real_tokens_per_step"] = real_tokens(recipe)
    row["compile_cpu_seconds"] = seconds
    row |= versions()
    row["date"] = str(datetime.date.today())
    row["note"] = "" if program else "out of HBM"
    return row


# ── stored rows ───────────────────────────────────────────────────────────────────────────────────


def table_name(recipe: Recipe) -> str:
    """The file that a recipe's row belongs to."""
    name = f"{recipe.topology}_{recipe.size}"
    return f"{name}_{recipe.layers}layers" if recipe.layers else name


def table_path(recipe: Recipe) -> Path:
    """The same as a path."""
    return FOLDER / f"{table_name(recipe)}.csv"


def stored(name: str) -> pd.DataFrame:
    """A table of data/dryrun/."""
    return pd.read_csv(FOLDER / f"{name}.csv", dtype={"trainer": str})


def key_of(row: Mapping[str, object]) -> tuple[str, ...]:
    """What must be equal for a stored row to be valid: the recipe and the versions."""
    names = [*Recipe.__dataclass_fields__, *versions()]
    return tuple(str(row.get(name, "")) for name in names)


def stored_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table as text, [] if it is not there."""
    if not path.exists():
        return []
    return pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


def kept_path(recipe: Recipe) -> Path:
    """Where a recipe's program is kept, as far as its time depends on it."""
    words = f"{table_name(recipe)} {recipe.recipe}".replace("-", "")
    name = re.sub(r"\W+", "_", words).strip("_")
    return FOLDER / "programs" / f"{name}.json.xz"


def keep(recipe: Recipe, text: str) -> None:
    """Keep a program's slice and its tape (`tape.read`)."""
    path = kept_path(recipe)
    where = slice_of(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = tape.to_json(tape.read(text, part_of))
    held = [where.chip, where.shape, where.coordinates, rows]
    written = json.dumps(held, separators=(",", ":"))
    path.write_bytes(lzma.compress(written.encode()))


def predicted(recipe: Recipe) -> Prediction | None:
    """The prediction of a program that is kept, or None."""
    path = kept_path(recipe)
    if not path.exists():
        return None
    chip, shape, places, rows = json.loads(lzma.decompress(path.read_bytes()))
    coordinates = tuple(tuple(place) for place in places)
    return clock.play(tape.from_json(rows), links.Box(chip, tuple(shape), coordinates))


def run_table(recipes: Sequence[Recipe]) -> None:
    """Compile the recipes that are not stored yet; each row is on disk as soon as it is known."""
    for number, recipe in enumerate(recipes, 1):
        wanted = key_of(dataclasses.asdict(recipe) | versions())
        held = [key_of(row) for row in stored_rows(table_path(recipe))]
        if wanted in held:
            continue
        with phase(f"{number}/{len(recipes)} {recipe.topology} {recipe.size}: {recipe.recipe}",
                   every=60.0):
            row = _compiled_row(recipe)
        store(recipe, row)
        jax.clear_caches()
        gc.collect()


def _compiled_row(recipe: Recipe) -> dict[str, Any]:
    """Compile a recipe and keep its program; returns its row.

    The program itself lives no longer than this call: one of sixty layers takes gigabytes, as will
    the next one.
    """
    program, refusal, seconds = compile_recipe(recipe)
    row = measure(recipe, program, refusal, seconds)
    if program:
        keep(recipe, program.as_text())
        prediction = predicted(recipe)
        assert prediction is not None, "it was just kept"
        row |= columns_of(recipe, prediction)
    return row


def predict_again(recipes: Iterable[Recipe]) -> None:
    """Predict the programs that are kept by the rules of today: nothing is compiled."""
    for recipe in recipes:
        for row in stored_rows(table_path(recipe)):
            if row["recipe"] != recipe.recipe:
                continue
            prediction = predicted(recipe)
            if prediction is not None:
                store(recipe, row | columns_of(recipe, prediction))


def remake(libtpu: str) -> None:
    """Do what DRYRUN asks for: "full" compiles what isn't stored, "again" predicts all times anew.

    Args:
      libtpu: the compiler's path; without one nothing is compiled.
    """
    asked = os.environ.get("DRYRUN")
    if asked == "full" and libtpu:
        run_table(RECIPES)
        run_programs(missing_programs())
    if asked == "again":
        predict_again(RECIPES)


def beside_stored(program: jax.stages.Compiled | None, refusal: str, seconds: float,
                  prediction: Prediction) -> pd.DataFrame:
    """Two rows: what `compile_recipe(LIVE)` has just given, and what's stored of it."""
    row = measure(LIVE, program, refusal, seconds) | columns_of(LIVE, prediction)
    columns = [*COUNTED, "seconds_predicted"]
    now = pd.DataFrame([row])[columns].assign(made="now")
    before = stored(table_name(LIVE))[columns].assign(made="stored")
    return pd.concat([now, before], ignore_index=True)


def all_equal(rows: pd.DataFrame) -> bool:
    """Do the two rows of `beside_stored` have the same memory, within 0.01%?"""
    now, before = rows[list(COUNTED)].to_numpy(float)
    return bool(np.allclose(now, before, rtol=1e-4))


def store(recipe: Recipe, row: Mapping[str, object]) -> None:
    """Put the row of a recipe into its table; one that stood there for it is replaced."""
    path = table_path(recipe)
    rows = [old for old in stored_rows(path) if old["recipe"] != recipe.recipe]
    rows.append(as_text(row))
    write_text(path, pd.DataFrame(rows).to_csv(index=False))


def as_text(row: Mapping[str, object]) -> dict[str, str]:
    """A row's values as a table holds them: floats with six digits, None as nothing."""
    texts = {}
    for name, value in row.items():
        if value is None:
            texts[name] = ""
        elif isinstance(value, float):
            texts[name] = f"{value:.6g}"
        else:
            texts[name] = str(value)
    return texts


# ── the programs beside the step ──


OTHERS = FOLDER / "beside_the_step.csv"


def shape_of(recipe: Recipe, program: str, fsdp: int) -> str:
    """The shapes of one of 03's programs as text: part of what a row is known by."""
    shapes = shapes_of(recipe, fsdp)
    if program.startswith("answers"):
        prompts, length = shapes.answers
        return f"{prompts} x {length}, {shapes.at_once} at once"
    if program == "evaluation":
        micro_batches, rows, length = shapes.evaluation
        return f"{micro_batches} x {rows} x {length}, {shapes.trained} trained"
    return f"rank {recipe.rank}"


def known_by(recipe: Recipe, program: str) -> dict[str, str]:
    """What must be equal for the stored row of a program to be valid."""
    fsdp, _ = mesh_shape(recipe)
    known = {"topology": recipe.topology, "size": recipe.size, "recipe": recipe.recipe,
             "program": program, "shape": shape_of(recipe, program, fsdp)}
    installed = versions()
    if not compiler.find():
        del installed["libtpu"]  # no compiler here that could be another than the row's
    return known | installed


def missing_programs(recipes: Iterable[Recipe] = AS_03_RUNS) -> list[tuple[Recipe, str]]:
    """[(recipe, program)] of 03's programs, but for its step, that no stored row holds."""
    rows = stored_rows(OTHERS)
    missing = []
    for recipe in recipes:
        for program in programs.PROGRAMS:
            if program == "step":
                continue
            known = known_by(recipe, program)
            if not any(known.items() <= row.items() for row in rows):
                missing.append((recipe, program))
    return missing


def run_programs(wanted: Iterable[tuple[Recipe, str]]) -> None:
    """Compile [(recipe, program)] and store a row of each as soon as it is known."""
    compiler.register()
    for recipe, program in wanted:
        start = time.process_time()
        with phase(f"{recipe.topology} {recipe.size}, {recipe.recipe}: {program}", every=60.0):
            row = _program_row(recipe, program)
        row["compile_cpu_seconds"] = time.process_time() - start
        row["date"] = str(datetime.date.today())

        key = known_by(recipe, program)
        rows = [old for old in stored_rows(OTHERS) if not key.items() <= old.items()]
        rows.append(as_text(row))
        write_text(OTHERS, pd.DataFrame(rows).to_csv(index=False))
        jax.clear_caches()
        gc.collect()


def _program_row(recipe: Recipe, program: str) -> dict[str, Any]:
    """Compile one of 03's programs; returns its row, without what it took to make it."""
    config = model_config(recipe)
    mesh = mesh_of(recipe, config)
    compiled, refusal = compiled_or_refused(lower_ours(recipe, mesh, config, program))
    row: dict[str, Any] = known_by(recipe, program)
    row |= memory_of_program(compiled, refusal)
    row["seconds_a_token"] = None
    if compiled and program.startswith("answers"):
        row["seconds_a_token"] = seconds_of_a_token(recipe, compiled.as_text())
    del compiled  # it takes gigabytes
    cfg = settings_of(recipe, mesh.shape["fsdp"])
    model = model_of(recipe, mesh, model_config(recipe))
    row["beside_gib"] = programs.beside(program, cfg, mesh, model)
    row["hbm_gib"] += row["beside_gib"]
    row["limit_gib"] = SLICES[recipe.topology].chip.hbm / 2**30
    row["fits"] = row["hbm_gib"] <= row["limit_gib"]
    return row


def seconds_of_a_token(recipe: Recipe, text: str) -> float | None:
    """Predicted seconds of one turn of the loop in which a program answers, a token of each row.

    That loop is the only one whose number of turns the compiler doesn't know. None where too much
    has no known cost.
    """
    turns = []
    for record in tape.read(text, part_of):
        if isinstance(record, tape.Loop) and record.trips is None:
            turns.append(record.body)
    turn, = turns
    return clock.play(turn, slice_of(recipe)).seconds


def memory_of_program(program: jax.stages.Compiled | None,
                      refusal: str) -> dict[str, float | None]:
    """GiB of a chip that a program takes, by the compiler; what it asked for if it's refused."""
    if program is None:
        return {"args_gib": None, "temp_gib": None, "hbm_gib": gib_asked_for(refusal)}
    memory = program.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    arguments = memory.argument_size_in_bytes / 2**30
    temporaries = (memory.temp_size_in_bytes + fresh) / 2**30
    return {"args_gib": arguments, "temp_gib": temporaries, "hbm_gib": arguments + temporaries}


# ── tables to look at ─────────────────────────────────────────────────────────────────────────────


def yes_or_no(fits: bool) -> str:
    """Does it fit?"""
    return "yes" if fits else "no"


FORMS: dict[str, str | Callable[[bool], str]] = {
    "fits": yes_or_no,
    "real_tokens_per_step": "{:,.0f}",
    "seconds_predicted": "{:.3f}",
    "seconds_exposed": "{:.3f}",
    "tokens_per_second_predicted": "{:,.0f}",
    **dict.fromkeys(COUNTED, "{:.2f}"),
}


def other_programs() -> pd.DataFrame:
    """The stored rows of `OTHERS` as text: where a program runs, its memory and its time.

    `ms a token` is predicted, for programs that answer: each turn adds one token to every answer.
    """
    lines = []
    for row in stored_rows(OTHERS):
        milliseconds = ""
        if row["seconds_a_token"]:
            milliseconds = f"{1e3 * float(row['seconds_a_token']):.0f}"
        lines.append({
            "slice": row["topology"],
            "size": row["size"],
            "recipe": row["recipe"],
            "program": row["program"],
            "GiB of a chip": f"{float(row['hbm_gib']):.1f} of {float(row['limit_gib']):.1f}",
            "fits": yes_or_no(row["fits"] == "True"),
            "ms a token": milliseconds,
        })
    table = pd.DataFrame(lines)
    return table.sort_values(["slice", "size", "recipe"], kind="stable", ignore_index=True)


def show(table: pd.DataFrame, columns: Mapping[str, str]) -> Styler:
    """Columns {column: its name here} of a table, with sensible digits, to be seen."""
    forms = {name: form for name, form in FORMS.items() if name in columns}
    look = table.reset_index(drop=True).reindex(columns=list(columns)).style.hide(axis="index")
    look = look.format(forms, na_rep="").relabel_index(list(columns.values()), axis="columns")
    return look.set_table_styles([
        {"selector": ".col0", "props": "text-align: left; white-space: nowrap"}])


def show_timed(rows: pd.DataFrame) -> Styler:
    """Programs that others timed (`bands.anchors`) beside our predictions, to be seen."""
    forms = {"measured, ms": "{:,.0f}", "predicted, ms": "{:,.0f}", "miss": "{:+.0%}"}
    named = rows.rename(columns={"measured_ms": "measured, ms", "predicted_ms": "predicted, ms"})
    table = named[["program", "slice", *forms]].astype(dict.fromkeys(forms, float))
    table["source"] = named.source.str.split(":").str[0]
    return table.style.hide(axis="index").format(forms)


def in_order(table: pd.DataFrame, recipes: Sequence[Recipe]) -> pd.DataFrame:
    """A table's rows of these recipes, in their order."""
    order = [recipe.recipe for recipe in recipes]
    rows = table[table.recipe.isin(order)]
    return rows.sort_values("recipe", key=lambda names: names.map(order.index), ignore_index=True)


def int8_at(prediction: Prediction, share: float, peak: float) -> float:
    """Seconds of a prediction if its int8 products reached no more than a share of their peak.

    No anchor is a step with int8 products, and the compiler's cycles say 94% of the peak for ours.
    What such a step waits for stays as it is.
    """
    assert prediction.seconds is not None, "too much of this program has no known cost"
    slower = 0.0
    for event in prediction.events:
        if event.track == "compute" and event.int8:
            slower += max(0.0, event.int8 / (share * peak) - event.seconds)
    return prediction.seconds + slower


def road(table: pd.DataFrame) -> list[tuple[str, float, float]]:
    """[(label, tokens per second before, after)] along `ROAD`; packing is a step of its own."""
    speed = table.set_index("recipe").tokens_per_second_predicted
    stretches = []
    for before, after in itertools.pairwise(ROAD):
        start = speed[before.recipe]
        packing = after.fill / before.fill
        if packing != 1:
            stretches.append(("packed rows", start, start * packing))
        stretches.append((ROAD[after], start * packing, speed[after.recipe]))
    return stretches


def parts_of(recipe: Recipe, prediction: Prediction) -> pd.DataFrame:
    """`report.profile` of a prediction; a wait is a part of its own, named by what it waits for."""
    rows = pd.DataFrame(report.profile(prediction, SLICES[recipe.topology].chip))
    rows["part"] = rows.part.where(rows.what == "compute", "waits: " + rows.what)
    return rows


def show_parts(recipe: Recipe, prediction: Prediction, least: float = 0.02) -> Styler:
    """A prediction in milliseconds: a row for each part and each wait, longest first.

    What takes less than a share `least` of the time is left out.

    `at its limit` is the share of a part's time that its products at the peak, or its bytes at the
    HBM's speed, would take.
    """
    rows = parts_of(recipe, prediction)
    tokens = real_tokens(recipe)
    seconds = rows.pivot_table(index="part", columns="direction", values="seconds", aggfunc="sum",
                               fill_value=0.0)
    directions = [name for name in tape.DIRECTIONS if name in seconds]
    table = (1e3 * seconds).reindex(columns=directions)
    table["all"] = table.sum(axis=1)
    table["share"] = table["all"] / table["all"].sum()
    table["ms per 1,000 real tokens"] = table["all"] / tokens * 1e3
    limit = rows[rows.what == "compute"].groupby("part").at_peak.sum()
    table["at its limit"] = 1e3 * limit / table["all"]

    table = table[table["share"] >= least]
    table = table.sort_values("all", ascending=False).rename_axis(index=None, columns=None)
    look = table.style.format("{:,.1f}", na_rep="")
    look = look.format("{:.0%}", na_rep="", subset=["share", "at its limit"])
    return look.set_caption(
        f"{recipe.recipe}: {prediction.seconds:.3f} s predicted for a micro-step of {tokens:,.0f} "
        f"real tokens, {prediction.exposed:.3f} s of it waiting for the links")
