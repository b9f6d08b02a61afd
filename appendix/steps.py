"""The steps that notebook 08 compiles: recipes, how they lower, a row of the table, its columns.

A *recipe* is one configuration of a training step of Gemma 4. `lower_ours` and `lower_published`
trace it, `compile_recipe` asks the TPU's compiler, `measure` and `predict` make a row of data/dryrun/
of what it says (data/dryrun/README.md explains the columns). `compiler.start` and
`compiler.register` come first where something is compiled.
"""

import dataclasses
import datetime
import gc
import gzip
import json
import re
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma4.model import RematConfig
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

from appendix import quantized
from helpers import gemma, train
from helpers.run import phase, write_text
from tables.hardware import SLICES
from tpu_time import compiler, fit
from tpu_time import program as timing

FOLDER = Path("data/dryrun")
RANK, ALPHA = 64, 64.0         # 03's at size 31b, and the published ones
SAMPLES = 10_000               # of the published run
TOKENS_PER_SAMPLE = 922        # of its data, counted with Gemma 3's tokenizer (data_stats.csv)
PUBLISHED_MODULES = (          # the pattern of the published script
    ".*q_einsum|.*kv_einsum|.*attn_vec_einsum|.*gate_proj|.*down_proj|.*up_proj")
STEPS, MICRO_STEPS = 1_244, 8  # of the published run, and micro-steps in each (published)


# ── recipes ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Recipe:
    """One configuration to compile; the fields are columns of its row."""

    recipe: str                   # published, ours, or a label
    topology: str = "v5p-8"
    size: str = "31b"
    trainer: str = "03"           # notebook 03's, or Tunix's own ("tunix")
    micro_batch: int = 1          # rows that are computed at once, over all chips
    sequence_length: int = 4096   # tokens of a row
    remat: str = "NONE"           # what the backward pass recomputes: NONE, BLOCK, DECODER
    compute_dtype: str = "bfloat16"
    loss: str = "2048"            # positions of a row that meet the output matrix, or "one-hot"
    fill: float = 0.95            # share of the positions that are real tokens
    attention_block: int = 1024   # queries at a time; 0: Tunix's dense scores
    layers: int = 0               # 0: all of them
    flag: bool = False            # with --xla_llvm_disable_expensive_passes
    base_dtype: str = "bfloat16"  # how the frozen base is stored (11); or int8, nf4
    tile_size: int = 0            # its input weights per scale
    int8_products: bool = False   # its products in int8, forward and backward
    one_sum: bool = False         # LoRA reads a copy: one sum over chips for one input
    vmem_kib: int = 0             # on-chip memory that a product may use; 0: the compiler's 16 MiB
    mesh: str = ""                # fsdp x tp; empty: the one that the heads allow with most tp
    gathers_beside: bool = False  # weights are gathered while the chip computes


PUBLISHED = Recipe("published", trainer="tunix", sequence_length=3072, remat="DECODER",
                   compute_dtype="float32", loss="one-hot", fill=0.30, attention_block=0)
OURS = Recipe("ours", micro_batch=2)
FASTER = replace(OURS, recipe="ours, faster", one_sum=True, vmem_kib=train.VMEM_KIB)
ONE_ROW = replace(OURS, recipe="ours, one row", micro_batch=1)
ONE_FASTER = replace(FASTER, recipe="ours, one row, faster", micro_batch=1)
DENSE = replace(ONE_ROW, recipe="ours, one row, dense attention", attention_block=0)
BFLOAT16 = replace(PUBLISHED, recipe="published + bfloat16", compute_dtype="bfloat16")
ROAD = [PUBLISHED, BFLOAT16,
        replace(BFLOAT16, recipe="published + bfloat16, no remat", remat="NONE"),
        DENSE, ONE_ROW, ONE_FASTER, FASTER]
SEARCH = [replace(OURS, recipe="four rows, BLOCK remat", micro_batch=4, remat="BLOCK"),
          replace(ONE_ROW, recipe="one row of 8,192", sequence_length=8192, loss="4096"),
          replace(OURS, recipe="all positions in the loss", loss="4095"),
          replace(OURS, recipe="three rows", micro_batch=3),
          replace(DENSE, recipe="two rows, dense attention", micro_batch=2)]
E2B = Recipe("ours", size="e2b", sequence_length=2048, loss="1024", one_sum=True)
E2B_V6E = replace(E2B, topology="v6e-1")
ELSEWHERE = [E2B_V6E,
             replace(E2B, recipe="ours, DECODER remat", topology="v5e-1", remat="DECODER"),
             replace(OURS, recipe="ours, DECODER remat", topology="v6e-8", remat="DECODER"),
             replace(FASTER, recipe="ours", topology="v5p-32", micro_batch=8),
             replace(OURS, recipe="ours, four rows, BLOCK remat", topology="v6e-8", micro_batch=4,
                     remat="BLOCK", one_sum=True)]
NF4 = Recipe("nf4, DECODER remat", "v5e-4", remat="DECODER", sequence_length=2048, loss="1024",
             base_dtype="nf4", tile_size=32, one_sum=True)
INT8 = replace(NF4, recipe="int8, DECODER remat", base_dtype="int8", tile_size=0)
QUANTISED = [NF4, INT8, replace(INT8, topology="v6e-4", sequence_length=4096, loss="2048"),
             replace(INT8, topology="v5e-8", micro_batch=2),
             replace(NF4, topology="v5e-8", micro_batch=2),
             replace(INT8, recipe="int8, BLOCK remat", topology="v6e-8", micro_batch=2,
                     sequence_length=4096, loss="2048", remat="BLOCK"),
             replace(INT8, topology="v5e-1", size="e2b", sequence_length=4096, loss="2048"),
             replace(NF4, topology="v5e-1", size="e4b")]
FEW = {"layers": 2, "sequence_length": 2048, "micro_batch": 1}  # of the live compile
LIVE = [replace(PUBLISHED, **FEW), replace(OURS, loss="1024", **FEW)]
FLAG = [replace(recipe, flag=flag) for recipe in LIVE for flag in (False, True)]
ROWS = replace(FASTER, recipe="ours, mesh (4, 1)", mesh="4x1", gathers_beside=True, micro_batch=4,
               sequence_length=2048, loss="1024")
ROWS_INT8 = replace(ROWS, recipe="ours, mesh (4, 1), int8 products", base_dtype="int8",
                    int8_products=True)
SIX = [replace(recipe, layers=6) for recipe in (OURS, FASTER, ROWS, ROWS_INT8)]
TWO = [replace(recipe, layers=2) for recipe in (ROWS, ROWS_INT8)]
RECIPES = [PUBLISHED, DENSE, ONE_ROW, OURS, *ELSEWHERE[:2], *ROAD[1:3], *FLAG, *ELSEWHERE[2:],
           *SEARCH, *QUANTISED, *SIX, *TWO, FASTER, ONE_FASTER, ROWS, ROWS_INT8]


def real_tokens(recipe):
    """Real tokens of one micro-step: positions, less padding."""
    return recipe.micro_batch * recipe.sequence_length * recipe.fill


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


def lower_ours(recipe, mesh, config):
    """Notebook 03's step with one micro-batch of packed rows, lowered: traced, not yet compiled.

    Nothing gets memory: model, adapters, optimizer and batch are shapes, types and shardings.
    """
    model = quantized.abstract_base(config, mesh, recipe.base_dtype, recipe.tile_size)
    if recipe.attention_block:
        gemma.use_block_attention(model, recipe.attention_block)
    config.remat_config = RematConfig[recipe.remat]
    provider = quantized.provider(recipe.base_dtype, RANK, ALPHA, tile_size=recipe.tile_size,
                                  int8_products=recipe.int8_products)
    provider.share = recipe.one_sum
    model = gemma.inject_lora(model, RANK, ALPHA, mesh, provider=provider)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-4, 100, 1_200)
    optimizer = train.make_optimizer(schedule, weight_decay=0.001, max_grad_norm=1.0)
    state, frozen = train.start(model, optimizer, mesh)
    loss_fn = train.make_loss(min(int(recipe.loss), recipe.sequence_length - 1))
    shape = (1, recipe.micro_batch, recipe.sequence_length)
    spec = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    batch = train.Batch(**{
        name: jax.ShapeDtypeStruct(shape, bool if name == "loss_mask" else jnp.int32, sharding=spec)
        for name in train.Batch.__dataclass_fields__})
    with mesh:
        return train.jit_train_step(model, optimizer, loss_fn, state).lower(
            state.adapters, state.opt_state, frozen, batch)


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
    options = peft_trainer.TrainingConfig(eval_every_n_steps=0, max_steps=1_244,
                                          gradient_accumulation_steps=8)
    trainers = []

    def build(model):
        trainers.append(peft_trainer.PeftTrainer(
            model, optax.adamw(schedule, weight_decay=0.001), options))
        return trainers[0].optimizer

    optimizer = gemma.place(nnx.eval_shape(build, model), mesh)  # abstract, like the model
    trainer = trainers[0]
    trainer.with_gen_model_input_fn(model_input)
    shape = (recipe.micro_batch, recipe.sequence_length)
    spec = NamedSharding(mesh, PartitionSpec("fsdp"))
    batch = peft_trainer.TrainingInput(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=spec),
                                       jax.ShapeDtypeStruct(shape, bool, sharding=spec))
    step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
    with mesh:
        return step.lower(model, optimizer, batch).lowered  # JAX's own, not NNX's


# Weights are gathered while products run, several of them to a gather (libtpu's own names).
GATHERS_BESIDE = dict.fromkeys((
    "xla_enable_async_all_gather", "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc"), True)


def compile_recipe(recipe):
    """Compile one recipe; returns (program or None, the compiler's refusal, CPU seconds).

    A program that needs more HBM than the chip has is refused: that is a row of the table, too.
    """
    compiler.register()
    config = model_config(recipe)
    mesh = mesh_of(recipe, config)
    lowered = (lower_published(recipe, mesh, config) if recipe.trainer == "tunix"
               else lower_ours(recipe, mesh, config))
    options = train.compiler_options(mesh.devices.flat[0].device_kind, recipe.vmem_kib) or {}
    options |= GATHERS_BESIDE if recipe.gathers_beside else {}
    options |= {"xla_llvm_disable_expensive_passes": True} if recipe.flag else {}
    start = time.process_time()
    try:
        program, refusal = lowered.compile(compiler_options=options), ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        program, refusal = None, str(error)
    return program, refusal, time.process_time() - start


# ── names of parts ────────────────────────────────────────────────────────────────────────────────

PARTS = ("MLP", "output matrix", "projections", "attention", "LoRA", "norms", "conversions",
         "optimizer", "other")
# Of appendix/quantized.py: a stored base weight's own product.
OWN_PRODUCTS = ("Dequantized.weight", "Int8Products.weight", "int8_dot", "int8_einsum")
UPDATE = re.compile(r"^(Optimizer\.|MultiSteps|scale_by_|global_norm|clip_by_|apply_updates|tree_|"
                    r"add_decayed|safe_increment|make_optimizer)")


def part_of(stack, op_name, product, moves):
    """The part of the model that an instruction belongs to, one of `PARTS`.

    Args:
      stack: from `Program.stack`.
      op_name: JAX's name of the operation.
      product: it contains a matrix product, or moves what one needs or made over the links.
      moves: it only converts, copies or rearranges.
    """
    names = [function for _, function, _ in stack]
    if any(UPDATE.match(name) for name in names):
        return "optimizer"
    provider = next((name for file, name, _ in stack if "Provider." in name or "Lora." in name), "")
    equation = re.search(r"[\w,]+->\w+", op_name)
    low_rank = bool(equation) and "r" in equation[0]
    stored = any(name.startswith(OWN_PRODUCTS) for name in names)  # a quantised base's own product
    adapter = product and "Lora" in provider and not stored
    if low_rank or "_compute_lora_delta" in names or adapter:
        return "LoRA"
    if moves and not product:
        return "conversions"
    for name in names:
        if name.startswith("RMSNorm"):
            return "norms"
        if name.startswith("FeedForward"):
            return "MLP"
        if name.startswith(("Embedder.decode", "_default_loss_fn", "make_loss", "token_losses",
                            "make_micro_loss")):
            return "output matrix"
        if name.startswith(("Attention.", "BlockAttention.", "attend", "apply_rope")):
            weight = provider and any(name.startswith("Einsum.__call__") for name in names)
            return "projections" if product and weight else "attention"
    return "output matrix" if "log_softmax" in op_name else "other"


ONCE = ("output matrix", "other")  # parts that do not grow with the number of layers


def deeper(rows, times):
    """A `profile` of so many times as many layers: what each layer has counts so many times.

    Good to a few percent. What layers share, such as masks, is multiplied like the rest, and the
    first layer counts like the others, though it is cheaper: nothing below it is trained.
    """
    return [row | {name: times * row[name] for name in ("seconds", "at_peak", "count", "flops")
                   if row[name] is not None and row["part"] not in ONCE} for row in rows]


def gaps(rows):
    """What stands between a step and the chip's limits, from a `profile`.

    Returns:
      {what: (seconds, seconds at its own limit)}, the largest difference first: parts of the model
      that grow with the layers, waits for the links, and the rest. The limit of a wait is nothing:
      the links could carry while the chip computes.
    """
    found = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        what = (row["part"] if row["part"] in PARTS[:6] else "conversions, optimizer, other")
        what = what if row["what"] in ("compute", "copy") else "waits for the links"
        found[what][0] += row["seconds"]
        found[what][1] += row["at_peak"] or 0.0
    return dict(sorted(((what, tuple(pair)) for what, pair in found.items()),
                       key=lambda one: one[1][1] - one[1][0]))


# ── a row of the table ────────────────────────────────────────────────────────────────────────────


def versions():
    """What the numbers depend on."""
    names = {"jax": "jax", "flax": "flax", "tunix": "google-tunix", "qwix": "qwix"}
    return ({short: metadata.version(name) for short, name in names.items()}
            | {"libtpu": compiler.version()})


def unknown_costs(text):
    """Custom calls outside fusions in a program's text: XLA's cost analysis adds -1 s for each.

    `measure` adds these seconds back. Where there are ten or more (v5e and v6e: hundreds) it gives
    no estimate.
    """
    count, fused = 0, False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            fused = "fused_computation" in line.split("(")[0]
        elif " custom-call(" in line and not fused:
            count += "tpu_custom_call" not in line  # kernels count as 0 seconds instead
    return count


def times(recipe, flops, moved, guess):
    """Seconds, real tokens per second, hours and dollars of one compiled micro-step.

    Args:
      recipe: a `Recipe`.
      flops, moved: of one chip: operations, and bytes that its HBM moves.
      guess: the compiler's own estimate in seconds. It counts where it is between the roofline and
        ten times that.
    """
    piece = SLICES[recipe.topology]
    spec = piece.chip
    bound = max(flops / spec.flops, moved / spec.bandwidth)
    estimate = guess if bound <= guess < 10 * bound else None
    tokens = real_tokens(recipe)
    hours = SAMPLES * TOKENS_PER_SAMPLE * (estimate or bound) / tokens / 3600
    return {"seconds_estimate": estimate, "seconds_roofline": bound, "real_tokens_per_step": tokens,
            "real_tokens_per_second": tokens / estimate if estimate else None,
            "real_tokens_per_second_roofline": tokens / bound, "hours": hours,
            "dollars": hours * piece.chips * spec.dollars_per_hour,
            "hours_from": "estimate" if estimate else "roofline"}


def slice_of(recipe):
    """The slice of a recipe, with 03's mesh on it, as the time model sees it."""
    return on_slice(recipe.topology, mesh_of(recipe, model_config(recipe)))


def on_slice(topology, mesh):
    """A slice as the time model sees it: its shape, and where the mesh puts each partition."""
    piece = SLICES[topology]
    sizes = [int(size) for size in piece.topology.split("x")]
    places = tuple(tuple(device.coords) for device in mesh.devices.flat)
    return timing.Slice(piece.kind, (*sizes, 1)[:3], places)


def columns_of(recipe, found):
    """What a `program.Prediction` says, as columns; empty where too much has no known cost."""
    row = dict.fromkeys(PREDICTED) | {"unknown_share": found.unknown_share,
                                      "clock": timing.VERSION}
    if found.seconds is None:
        return row
    tokens = real_tokens(recipe)
    hours = SAMPLES * TOKENS_PER_SAMPLE * found.seconds / tokens / 3600
    piece = SLICES[recipe.topology]
    return row | {
        "seconds_predicted": found.seconds, "seconds_compute": found.compute,
        "seconds_exposed": found.exposed + found.copies,
        "tokens_per_second_predicted": tokens / found.seconds, "hours_predicted": hours,
        "dollars_predicted": hours * piece.chips * piece.chip.dollars_per_hour}


def measure(recipe, program, refusal, seconds):
    """One row of the table, from the compiler's own analyses.

    Memory is that of one chip: arguments (weights, adapters, optimizer state, batch), outputs that
    do not take the place of a donated argument, and temporaries, all at once. The program's own
    code comes on top and is not counted.
    """
    piece = SLICES[recipe.topology]
    limit = piece.chip.hbm
    row = dataclasses.asdict(recipe) | {"chips": piece.chips,
                                        "limit_gib": limit / 2**30, "fits": False}
    if program is None:
        needed = re.search(r"(?:Used |temporaries \()([\d.]+)G", refusal)
        row |= {"hbm_gib": float(needed[1]) if needed else None, "note": "out of HBM"}
    else:
        memory, cost = program.memory_analysis(), program.cost_analysis()
        fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
        total = memory.argument_size_in_bytes + fresh + memory.temp_size_in_bytes
        flops, moved = cost["flops"], cost["bytes accessed"]
        unknown = unknown_costs(program.as_text())
        guess = cost["optimal_seconds"] + unknown if unknown < 10 else 0.0  # 0: no estimate
        row |= {"args_gib": memory.argument_size_in_bytes / 2**30, "out_gib": fresh / 2**30,
                "temp_gib": memory.temp_size_in_bytes / 2**30, "hbm_gib": total / 2**30,
                "fits": bool(total <= limit), "flops_per_chip": flops, "bytes_per_chip": moved}
        row |= times(recipe, flops, moved, guess) | {"unknown_costs": unknown}
    today = str(datetime.date.today())  # of the compilation
    return row | {"compile_cpu_seconds": seconds} | versions() | {"date": today}


# ── stored rows ───────────────────────────────────────────────────────────────────────────────────


PREDICTED = ("unknown_share", "seconds_predicted", "seconds_compute", "seconds_exposed",
             "tokens_per_second_predicted", "hours_predicted", "dollars_predicted", "clock")


def table_name(recipe):
    """The file that a recipe's row belongs to."""
    return f"{recipe.topology}_{recipe.size}" + (f"_{recipe.layers}layers" if recipe.layers else "")


def name_of(recipe):
    """A file name for what belongs to one recipe."""
    words = f"{table_name(recipe)} {recipe.recipe}" + " flag" * recipe.flag
    return re.sub(r"\W+", "_", words.replace("-", ""))


def stored(name):
    """A table of data/dryrun/, empty if it is not there."""
    path = FOLDER / f"{name}.csv"
    if not path.exists():
        return pd.DataFrame(columns=["recipe", "flag", "fits", "temp_gib", *PREDICTED])
    table = pd.read_csv(path, dtype={"trainer": str})
    return table.reindex(columns=list(dict.fromkeys([*table, *PREDICTED])))


def key_of(row):
    """What must be equal for a stored row to be valid: the recipe and the versions."""
    fields = {field.name: field.default for field in dataclasses.fields(Recipe)}
    fields |= dict.fromkeys(versions())  # an older table lacks the columns of newer fields
    return tuple(str(default if row.get(field, "") == "" else row[field])
                 for field, default in fields.items())


def stored_rows(path):
    """The rows of a table as text, [] if it is not there."""
    return (pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
            if path.exists() else [])


def predict(recipe, text, folder):
    """The time model's columns; the profile of six or all layers is stored beside the table."""
    found = timing.predict(text, slice_of(recipe), part_of)
    if recipe.layers in (0, 2, 6) and found.seconds:
        profile = timing.summary(found, SLICES[recipe.topology].chip)
        write_text(Path(folder) / "profiles" / f"{name_of(recipe)}.json",
                   json.dumps(profile) + "\n")
    return columns_of(recipe, found)


def run_table(recipes, keep="", again=False, folder=FOLDER):
    """Compile the recipes that are not stored yet; each row is on disk as soon as it is known.

    Args:
      recipes: list of `Recipe`.
      keep: a folder for the texts of compiled programs; empty: none is kept.
      again: predict again from the texts kept, and compile nothing.
      folder: of the tables.
    """
    for number, recipe in enumerate(recipes, 1):
        path = Path(folder) / f"{table_name(recipe)}.csv"
        kept = Path(keep) / f"{name_of(recipe)}.txt.gz" if keep else Path("nowhere")
        wanted = dataclasses.asdict(recipe) | versions()
        row = next((old for old in stored_rows(path) if key_of(old) == key_of(wanted)), {})
        predicted = row.get("clock") == str(timing.VERSION) or row.get("note")
        if (predicted and not again) or (again and not (row and kept.exists())):
            continue
        with phase(f"{number}/{len(recipes)} {recipe.topology} {recipe.size}: "
                           f"{recipe.recipe}", every=60.0):
            if row and kept.exists():
                text = gzip.decompress(kept.read_bytes()).decode()
            else:
                compiled = compile_recipe(recipe)
                row = measure(recipe, *compiled)
                text = compiled[0].as_text() if compiled[0] else ""
                if keep and text:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_bytes(gzip.compress(text.encode(), 6))
            row = {**row, **(predict(recipe, text, folder) if text else {})}
        store(recipe, row, folder)
        compiled = text = None  # a program of sixty layers takes gigabytes, as will the next one
        jax.clear_caches()
        gc.collect()


def store(recipe, row, folder=FOLDER):
    """Put the row of a recipe into its table; one that stood there for it is replaced."""
    path = Path(folder) / f"{table_name(recipe)}.csv"
    key = key_of(dataclasses.asdict(recipe) | versions())
    rows = [old for old in stored_rows(path)  # read anew: another process may have added some
            if key_of(old | versions()) != key]
    def text(value):  # pandas would make 0 to 0.0 beside an older row that lacks the column
        return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)

    row = {name: text(value) for name, value in row.items()}
    write_text(path, pd.DataFrame([*rows, row]).to_csv(index=False))


def stored_profile(recipe):
    """The profile that `predict` stored for a recipe, or None."""
    path = FOLDER / "profiles" / f"{name_of(recipe)}.json"
    return json.loads(path.read_text()) if path.exists() else None


# ── what stands between a step and a faster one ───────────────────────────────────────────────────


def reckoned(depth=60):
    """Sixty layers from the profiles of six, or of two where six are not compiled (`deeper`).

    Two layers hold one of full attention, which the model has once in six: the slower kind.

    Returns:
      A DataFrame by recipe: `from layers`, `ms, 60 layers`, `real tokens/s`, and `times the published`
      where both were predicted by the same rules.
    """
    base, lines = stored("v5p-8_31b").set_index("recipe").loc["published"], {}
    for recipe in (FASTER, ROWS, ROWS_INT8):
        few = next((replace(recipe, layers=layers) for layers in (6, 2)
                    if stored_profile(replace(recipe, layers=layers))), None)
        if few is None:
            continue
        row = stored(table_name(few)).set_index("recipe").loc[recipe.recipe]
        total = milliseconds(deeper(stored_profile(few)["profile"], depth / few.layers))
        speed = 1e3 * real_tokens(recipe) / total
        same = str(row.clock) == str(base.clock)
        lines[recipe.recipe] = {
            "from layers": few.layers, "ms, 60 layers": total, "real tokens/s": speed,
            "times the published": speed / base.tokens_per_second_predicted if same else None}
    return pd.DataFrame(lines).T.astype(float)


def milliseconds(rows):
    """All of a profile's rows."""
    return 1e3 * sum(row["seconds"] for row in rows)


# ── tables to look at ─────────────────────────────────────────────────────────────────────────────


COUNTED = {"args_gib": "arguments GiB", "out_gib": "fresh outputs GiB",
           "temp_gib": "temporaries GiB", "hbm_gib": "sum GiB"}
FORMS = {"flops_per_chip": lambda count: f"{count / 1e12:,.4g}",
         "bytes_per_chip": lambda count: f"{count / 1e9:,.4g}",
         "fits": lambda fits: "yes" if fits else "no", "micro_batch": "{:.0f}",
         "sequence_length": "{:,.0f}", "limit_gib": "{:.2f}", "hours": "{:.2f}",
         "dollars": "{:.2f}", "compile_cpu_seconds": "{:.0f}", "seconds_estimate": "{:.4f}",
         "seconds_roofline": "{:.4f}", "real_tokens_per_second": "{:,.0f}",
         "real_tokens_per_second_roofline": "{:,.0f}", "seconds_predicted": "{:.4f}",
         "seconds_exposed": "{:.4f}", "tokens_per_second_predicted": "{:,.0f}",
         "hours_predicted": "{:.2f}", "dollars_predicted": "{:.2f}",
         **dict.fromkeys(COUNTED, "{:.2f}")}


def show(table, columns):
    """Columns {column: its name here} of a table, with sensible digits and units, to be seen."""
    forms = {name: form for name, form in FORMS.items() if name in columns}
    if "seconds_predicted" in columns:  # a number that is missing says why
        why = table.unknown_share.notna().map({True: "costs unknown", False: "not predicted yet"})
        known = table.seconds_predicted.map(forms.pop("seconds_predicted").format)
        table = table.assign(seconds_predicted=known.where(
            table.seconds_predicted.notna(), why.where(table.temp_gib.notna(), "")))
    look = table.reset_index(drop=True).reindex(columns=list(columns)).style.hide(axis="index")
    look = look.format(forms, na_rep="").relabel_index(list(columns.values()), axis="columns")
    return look.set_table_styles([
        {"selector": ".col0", "props": "text-align: left; white-space: nowrap"}])


def compared(live, stored, columns):
    """Whether a live row is "the same as stored", in the columns that the stored one has."""
    before = stored.reindex(columns=[*columns]).dropna(axis="columns")
    same = before.size and np.allclose(
        before.to_numpy(float), live[[*before]].to_numpy(float), rtol=1e-4)
    return "the same as stored" if same else "not as stored: DRYRUN=full makes the table anew"


def in_order(table, recipes):
    """A table's rows of these recipes, in their order."""
    order = [recipe.recipe for recipe in recipes]
    return table[table.recipe.isin(order)].sort_values(
        "recipe", key=lambda names: names.map(order.index), ignore_index=True)


SPEEDS = {"predicted": "tokens_per_second_predicted", "by the estimate": "real_tokens_per_second",
          "by the roofline": "real_tokens_per_second_roofline"}


def ratio(table, recipe, base="published", column="tokens_per_second_predicted"):
    """How many times as many real tokens per second as row `base`, by a column of the table."""
    speed = table.set_index("recipe")[column].astype(float)
    return speed[recipe] / speed[base]


def recommend(table, spare, rows=2):
    """The fastest predicted program of 03's whole optimizer step that leaves `spare` of HBM free.

    Args:
      rows: of an optimizer step. A program with fewer is one of several micro-steps.
    """
    fits = table[(table.trainer == "03") & table.seconds_predicted.notna()
                 & (table.micro_batch >= rows) & (table.hbm_gib <= (1 - spare) * table.limit_gib)]
    return fits.loc[fits.tokens_per_second_predicted.idxmax()]


def road_steps(table, names, labels):
    """[(label, tokens per second before, after)] from row to row; packing is a step of its own."""
    rows, steps = table.set_index("recipe"), []
    for before, after, label in zip(names[:-1], names[1:], labels[1:], strict=True):
        start, end = rows.tokens_per_second_predicted[[before, after]].astype(float)
        packing = rows.fill[after] / rows.fill[before]
        if packing != 1:
            steps.append(("packed rows", start, start * packing))
        steps.append((label, start * packing, end))
    return steps


ROAD_LABELS = ["published", "bfloat16 arrays", "no remat", "our step", "attention by blocks",
               "one sum, on-chip memory", "two rows at once"]


def road(table):
    """`road_steps` along `ROAD`; a row that is not predicted shares the step of the next one."""
    done = set(table.recipe[table.seconds_predicted.notna()])
    known, together = [], []
    for recipe, label in zip(ROAD, ROAD_LABELS, strict=True):
        together.append(label)
        if recipe.recipe in done:
            known.append((recipe.recipe, ",\n".join(together)))
            together = []
    return road_steps(table, *map(list, zip(*known, strict=True)))


def by_part(profile, tokens):
    """Milliseconds by part and pass, waits by kind of collective; the share of its own limit.

    Args:
      profile: from `stored_profile`.
      tokens: real tokens of the micro-step.

    Returns:
      A DataFrame: a row for each part, longest first. `at its limit` is the share of a part's time
      that its products at the peak, or its bytes at the HBM's speed, would take.
    """
    rows = pd.DataFrame(profile["profile"])
    compute = rows.what == "compute"
    rows["part"] = rows.part.where(compute, "waits: " + rows.what)
    table = 1e3 * rows.pivot_table(index="part", columns="direction", values="seconds",
                                   aggfunc="sum", fill_value=0.0)
    table = table.reindex(columns=[name for name in timing.DIRECTIONS if name in table])
    table["all"] = table.sum(axis=1)
    table["share"] = table["all"] / table["all"].sum()
    table["ms per 1,000 real tokens"] = table["all"] / tokens * 1e3
    limit = 1e3 * rows[compute].groupby("part").at_peak.sum()
    table["at its limit"] = limit.reindex(table.index) / table["all"]
    return table.sort_values("all", ascending=False).rename_axis(index=None, columns=None)


def show_parts(name, profile, tokens):
    """`by_part` as a table with a caption."""
    look = by_part(profile, tokens).style.format("{:,.1f}", na_rep="")
    look = look.format("{:.0%}", na_rep="", subset=["share", "at its limit"])
    return look.set_caption(f"{name}: {profile['seconds']:.3f} s predicted for a micro-step of "
                            f"{tokens:,.0f} real tokens, {profile['exposed']:.3f} s of it waiting "
                            "for the links")


def renters_table(rows, tokens, prices):
    """One line for each slice and base dtype: what fits, how long a whole run takes, its price."""
    lines = []
    for found, price in rows:
        cost = fit.run_cost(found, tokens, prices.get(found.slice, price))
        least = "≥ " if cost["at_least"] else ""
        steps = cost["minutes"]["optimizer steps"]
        lines.append({
            "slice": found.slice, "model": found.model, "base": found.base_dtype,
            "fits": "yes" if found.fits else "no", "remat": found.remat,
            "rows": f"{found.rows} x {found.row_length:,}", "GiB a chip": f"{found.total:.1f}",
            "limit": f"{found.limit:.1f}", "from": "compiled" if found.compiled else "estimated",
            "real tokens/s": found.pace, "steps alone, h": f"{least}{steps / 60:.2f}",
            "whole run, h": f"{least}{cost['hours']:.2f}", "USD": f"{least}{cost['dollars']:.2f}"})
    table = pd.DataFrame(lines)
    table.loc[table.fits == "no", ["real tokens/s", "steps alone, h", "whole run, h", "USD"]] = ""
    return table


# ── attention, alone ──────────────────────────────────────────────────────────────────────────────

