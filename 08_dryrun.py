# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/08_dryrun.ipynb)
#
# # 08 · Appendix: compile the 31B training step for a TPU you do not have
#
# The TPU's own compiler runs on any x86-64 Linux machine. We hand it the step that notebook 03
# trains with, and the published one, and learn what fits, how long it takes and what it costs.
# Notebook 03 comes first: what it explains is used here.
#
# | | |
# |---|---|
# | **Needs** | Linux on x86-64 and `./setup.sh dryrun` (libtpu, 0.7 GB) for the live part; otherwise nothing: stored results are shown |
# | **Takes** | `data/configs/` (shapes of the models); no weights, no data |
# | **Makes** | `data/dryrun/*.csv` with `DRYRUN=full`; figures under `RUN_DIR/figures/` |
# | **Costs** | default: one to three minutes on two cores and 2 GB. `DRYRUN=full`: 5 to 20 minutes and 8 to 13 GB of memory per full-depth row. No TPU |
#
# The outputs shown are those of the tiny run on two CPU cores; the numbers in them are about the
# 31B and E2B on real TPU slices: *compiled* (counts) or *predicted* (times), not measured. Terms
# are in the [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# Three cells that open every notebook: find the repository, install what is missing, and say what
# this machine is.

# %% cellView="form"
# @title Find the repository. Colab opens a notebook without it, so there we clone it.
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY_URL = os.environ.get("REPOSITORY_URL") or "https://github.com/OWNER/gemma4-on-tpu"
if os.environ.get("RUN_DIR"):  # relative to where you stand, not to the repository
    os.environ["RUN_DIR"] = os.path.abspath(os.environ["RUN_DIR"])
here = Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()
places = (here, here.parent, Path.cwd(), here / "gemma4-on-tpu")
root = next((place for place in places if (place / "helpers").is_dir()), None)
if root is None and "COLAB_RELEASE_TAG" not in os.environ:
    raise SystemExit(f"Run this inside the repository: git clone {REPOSITORY_URL}")
if root is None:
    subprocess.run(["git", "clone", "-q", "--depth=1", REPOSITORY_URL, "gemma4-on-tpu"], check=True)
    root = here / "gemma4-on-tpu"
os.chdir(root)
sys.path.insert(0, str(root))

# %%
# Install what is missing, on Colab or in the repository's own .venv; other Pythons stay untouched.
import helpers

helpers.install()

# %%
# What this machine is. Every result below was made with these versions.
helpers.machine()

# %%
# Where this notebook stands.
helpers.you_are_here("08")

# %% [markdown]
# ## The answers first
# Will the 31B's training step fit a v5p-8, how long does a run take, and where does the time go?
# These are the stored answers, predicted by what the rest of this notebook explains. Section 10 has
# them for every slice, section 9 as a picture, line by line of the model's code.

# %%
from helpers import fit

answer = fit.will_it_fit("v5p", 4)
cost = fit.run_cost(answer, 10_000 * 922, fit.price("v5p", 4))
print(answer)
print("\n".join(f"{minutes:5.1f} minutes: {part}" for part, minutes in cost["minutes"].items()))
print(f"{cost['hours']:.1f} hours and {cost['dollars']:.0f} dollars for 10,000 published samples")

# %% [markdown]
# ## 1. Find the compiler
# `libtpu` is the library that drives a TPU, and the compiler inside it works without one. Where it
# is missing, `./setup.sh dryrun` puts it into `.libtpu/`, beside the notebooks and outside their
# environment. The variables below are read when JAX starts, so they come first: where the library
# is, what to take this machine for, and not to ask the cloud about it. The last one lets two
# processes load the library at once: its lock guards a chip, and there is none here.

# %%
import dataclasses
import datetime
import gzip
import importlib.util
import json
import re
import time
from dataclasses import dataclass, replace
from importlib import metadata


def find_libtpu():
    """The library's path, or an empty string: TPU_LIBRARY_PATH, .libtpu/, or an installed wheel."""
    wheel = importlib.util.find_spec("libtpu")
    places = [os.environ.get("TPU_LIBRARY_PATH", ""), ".libtpu/libtpu/libtpu.so"]
    folders = wheel.submodule_search_locations if wheel else ()
    places += [f"{folder}/libtpu.so" for folder in folders]
    return next((str(Path(place).resolve()) for place in places if Path(place).is_file()), "")


libtpu = find_libtpu()
if libtpu:
    os.environ |= {"TPU_LIBRARY_PATH": libtpu, "JAX_PLATFORMS": "tpu_compiler,cpu",
                   "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5p-8",
                   "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
                   "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
print("libtpu found: section 5 compiles" if libtpu else
      "libtpu is not on this machine: nothing is compiled, the tables are the stored ones")

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import qwix
from flax import nnx
from IPython.display import display
from jax.experimental import topologies
from jax.extend.backend import register_backend_factory
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma4.model import Gemma4, RematConfig
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

from helpers import dryrun_figures as figures
from helpers import gemma, quantized, train
from helpers import program as timing
from helpers.machine import published

# %% [markdown]
# ## 2. Settings and slices
# What is trained comes from notebook 03. The settings here are how deep the live compile is and
# whether the full table is made. The published run's 10,000 samples of 922 tokens turn tokens per
# second into hours and dollars, in the same way for every row.

# %%
@dataclass(frozen=True)
class Settings:
    live_layers: int = 2             # of the 60, in the compile that runs here
    live_length: int = 2_048         # tokens of its rows
    full_table: bool = os.environ.get("DRYRUN", "") == "full"  # compile what is not stored yet
    again: bool = os.environ.get("DRYRUN", "") == "kept"  # predict again from the texts kept
    keep: str = os.environ.get("DRYRUN_KEEP", "")  # a folder for the texts of compiled programs
    samples: int = 10_000            # published
    tokens_per_sample: int = 922     # published: data_stats.csv, token_len_mean
    spare: float = 0.10              # of the HBM stays free in what we recommend


cfg = Settings()
cfg

# %% [markdown]
# A slice is what one rents. A v5p-8 is *four* chips: Google counts its eight TensorCores, and XLA
# sees the two of a chip as one device. HBM is what XLA can use of one chip; peak (bfloat16) and
# bandwidth are the vendor's and price the published recipe's (v5e: the list price), per slice.

# %%
@dataclass(frozen=True)
class Slice:
    """A TPU slice: its topology's name, how many chips of which kind, options for the compiler."""

    topology: str
    chips: int
    chip: str
    options: dict


ONE = {"chips_per_host_bounds": (1, 1, 1)}
SLICES = {"v5p-8": Slice("v5p:2x2x1", 4, "v5p", {}), "v5p-32": Slice("v5p:2x2x4", 16, "v5p", {}),
          "v6e-8": Slice("v6e:2x4", 8, "v6e", {}), "v6e-1": Slice("v6e:1x1", 1, "v6e", ONE),
          "v5e-1": Slice("v5e:1x1", 1, "v5e", ONE), "v5e-4": Slice("v5e:2x2", 4, "v5e", {}),
          "v5e-8": Slice("v5e:2x4", 8, "v5e", {}), "v6e-4": Slice("v6e:2x2", 4, "v6e", {})}


def slice_table():
    """What each slice has and costs."""
    rows = {}
    for name, piece in SLICES.items():
        chip = helpers.chip(piece.chip)
        rows[name] = {"chips": piece.chips, "HBM GiB per chip": chip.hbm / 2**30,
                      "peak TFLOP/s": piece.chips * chip.flops / 1e12,
                      "HBM TB/s": piece.chips * chip.bandwidth / 1e12,
                      "USD per hour": piece.chips * chip.dollars_per_hour}
    return pd.DataFrame(rows).T


slice_table().style.format("{:,.4g}")

# %% [markdown]
# A *topology* describes devices that nobody has to own: one can compile for them, not compute on
# them. We also register them as JAX's first backend. Tunix asks `jax.devices()` for its platform
# and leaves its sharding constraints out on a CPU; this way it traces the program that a TPU would
# get. JAX's names for the chips differ from Google's: v5p is "TPU v5", v5e "TPU v5 lite".

# %%
def devices_of(name):
    """The devices of a slice, for compiling only."""
    piece = SLICES[name]
    return topologies.get_topology_desc(
        platform="tpu", topology_name=piece.topology, **piece.options).devices


if libtpu:
    register_backend_factory(
        "tpu_compiler", lambda: devices_of("v5p-8")[0].client, priority=500)
    jax.config.update("jax_default_device", jax.devices("cpu")[0])  # what is computed here
    print("\n".join(f"{name}: {len(devices_of(name))} x {devices_of(name)[0].device_kind}"
                    for name in SLICES))

# %% [markdown]
# ## 3. The trainer's own step
# Nothing is retold here: loss, optimizer and step are those of `helpers/train.py`, which notebook
# 03 trains with and explains. Rank and alpha are 03's at size 31b, and the published ones.

# %%
RANK = 64
ALPHA = 64.0
helpers.show_source(train.jit_train_step)

# %% [markdown]
# A recipe is one configuration to compile; its fields are columns of the result. `published` is
# what the published script does: float32 arithmetic, bfloat16 adapters on 350 modules, every
# decoder layer recomputed, one example per row of 3,072 tokens, 30 % of it real (922 / 3,072). Its
# dropout of 0.05 is left out: that can only make it look better. `ours` is notebook 03 at size
# 31b. Its packed rows count as 95 % real, the least that notebook 02 accepts. Only trained
# positions meet the output matrix there, as many as the fullest row has; we assume 2,048 of 4,096,
# while the published mean share of trained tokens is 15 %.

# %%
@dataclass(frozen=True)
class Recipe:
    """One configuration to compile."""

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
    attention_block: int = 1024   # queries at a time (section 6); 0: Tunix's dense scores
    layers: int = 0               # 0: all of them
    flag: bool = False            # with --xla_llvm_disable_expensive_passes
    base_dtype: str = "bfloat16"  # how the frozen base is stored (11); or int8, nf4
    tile_size: int = 0            # its input weights per scale
    int8_products: bool = False   # its products in int8, forward and backward


PUBLISHED = Recipe("published", trainer="tunix", sequence_length=3072, remat="DECODER",
                   compute_dtype="float32", loss="one-hot", fill=0.30, attention_block=0)
OURS = Recipe("ours", micro_batch=2)
pd.DataFrame({"published": dataclasses.asdict(PUBLISHED), "ours": dataclasses.asdict(OURS)})

# %% [markdown]
# Nothing gets memory: `nnx.eval_shape` builds model, adapters and optimizer as shapes, types and
# shardings. That is enough to *lower* a trainer's step: to trace it into the program that XLA
# compiles.

# %%
def model_config(recipe):
    """Tunix's config of the real model, from data/configs/; fewer layers if asked."""
    config = gemma.config_from_hf(f"data/configs/gemma4_{recipe.size}.json")
    config.dtype = jnp.dtype(recipe.compute_dtype)
    if recipe.layers:  # the last ones of the pattern: a full-attention layer is among them
        config.num_layers = recipe.layers
        config.attention_pattern = config.attention_pattern[-recipe.layers:]
    return config

# %% [markdown]
# On a v5p-8 notebook 03 computes two rows at once and then updates the adapters, so this program is
# its whole optimizer step.

# %%
def lower_ours(recipe, mesh, config):
    """Notebook 03's step with one micro-batch of packed rows, lowered."""
    model = quantized.abstract_base(config, mesh, recipe.base_dtype, recipe.tile_size)
    if recipe.attention_block:
        gemma.use_block_attention(model, recipe.attention_block)
    config.remat_config = RematConfig[recipe.remat]
    model = gemma.inject_lora(model, RANK, ALPHA, mesh, provider=quantized.provider(
        recipe.base_dtype, RANK, ALPHA, tile_size=recipe.tile_size,
        int8_products=recipe.int8_products))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-4, 100, 1_200)
    optimizer = train.make_optimizer(schedule, weight_decay=0.001, max_grad_norm=1.0)
    state, frozen = train.start(model, optimizer, mesh)
    loss_fn = train.make_loss(min(int(recipe.loss), recipe.sequence_length - 1))
    shape = (1, recipe.micro_batch, recipe.sequence_length)
    spec = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    batch = train.Batch(**{
        name: jax.ShapeDtypeStruct(shape, bool if name == "loss_mask" else jnp.int32, sharding=spec)
        for name in train.Batch.__dataclass_fields__})
    with gemma.use_mesh(mesh):
        return train.jit_train_step(model, optimizer, loss_fn, state).lower(
            state.adapters, state.opt_state, frozen, batch)

# %% [markdown]
# The published script uses Tunix's trainer as it comes: stock LoRA, gradients averaged over eight
# micro-batches by `optax.MultiSteps`, the one-hot loss over all positions, and a compiled step that
# returns the whole model. Here is that, with its pattern for the modules: a *micro-step*, an eighth
# of its optimizer step.

# %%
def lower_published(recipe, mesh, config):
    """The published script's micro-step, lowered as Tunix compiles it."""
    pattern = ".*q_einsum|.*kv_einsum|.*attn_vec_einsum|.*gate_proj|.*down_proj|.*up_proj"
    provider = qwix.LoraProvider(module_path=pattern, rank=RANK, alpha=ALPHA)

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
    with gemma.use_mesh(mesh):
        return step.lower(model, optimizer, batch).lowered  # JAX's own, not NNX's

# %% [markdown]
# ## 4. Compile and read
# A program that needs more HBM than the chip has is refused by the compiler: that is a row of the
# table, without FLOPs and times, not a crash.

# %%
def compile_recipe(recipe):
    """Compile one recipe; returns (program or None, the compiler's refusal, CPU seconds)."""
    config = model_config(recipe)
    mesh = gemma.make_mesh(config, devices=devices_of(recipe.topology))
    lowered = (lower_published(recipe, mesh, config) if recipe.trainer == "tunix"
               else lower_ours(recipe, mesh, config))
    options = {"xla_llvm_disable_expensive_passes": True} if recipe.flag else None
    start = time.process_time()
    try:
        program, refusal = lowered.compile(compiler_options=options), ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        program, refusal = None, str(error)
    return program, refusal, time.process_time() - start


def versions():
    """What the numbers depend on."""
    names = {"jax": "jax", "flax": "flax", "tunix": "google-tunix", "qwix": "qwix"}
    wheel = next(Path(libtpu).parent.parent.glob("libtpu-*.dist-info"), Path("libtpu-unknown"))
    library = wheel.name.removeprefix("libtpu-").removesuffix(".dist-info")
    return {short: metadata.version(name) for short, name in names.items()} | {"libtpu": library}

# %% [markdown]
# Per chip: arguments (weights, adapters, optimizer state, batch), outputs that do not take the
# place of a donated argument, and temporaries. All three must fit at once; the program's own code
# comes on top and is not counted. Two times: the compiler's own estimate, and the *roofline*, the
# larger of FLOPs over peak and bytes over bandwidth. The step's real tokens over its time are the
# speed.
#
# One trap in the estimate: XLA enters an operation of unknown cost as minus one second. We count
# those and add the seconds back. Where there are ten or more (v5e and v6e: hundreds), or what is
# left lies below the roofline or beyond ten times of it, the estimate stays empty.

# %%
def unknown_costs(text):
    """Custom calls outside fusions: XLA's cost analysis adds -1 second for each of them."""
    count, fused = 0, False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            fused = "fused_computation" in line.split("(")[0]
        elif " custom-call(" in line and not fused:
            count += "tpu_custom_call" not in line  # kernels count as 0 seconds instead
    return count


def times(recipe, flops, moved, guess, cfg):
    """Seconds, real tokens per second, hours and dollars of one compiled micro-step."""
    piece, chip = SLICES[recipe.topology], helpers.chip(SLICES[recipe.topology].chip)
    bound = max(flops / chip.flops, moved / chip.bandwidth)
    estimate = guess if bound <= guess < 10 * bound else None
    tokens = recipe.micro_batch * recipe.sequence_length * recipe.fill
    hours = cfg.samples * cfg.tokens_per_sample * (estimate or bound) / tokens / 3600
    return {"seconds_estimate": estimate, "seconds_roofline": bound, "real_tokens_per_step": tokens,
            "real_tokens_per_second": tokens / estimate if estimate else None,
            "real_tokens_per_second_roofline": tokens / bound, "hours": hours,
            "dollars": hours * piece.chips * chip.dollars_per_hour,
            "hours_from": "estimate" if estimate else "roofline"}

# %% [markdown]
# ### A third time, from the program itself
# The estimate leaves out the links between the chips; the roofline leaves out all but the limit.
# What they miss stands in the compiled text, which is the *schedule* of one chip: instructions in
# order, nearly all with the back end's own count of cycles, and collectives with their sizes and
# groups. `helpers/program.py` walks through it with a clock:
#
# - an instruction moves the clock on by its cycles;
# - a collective takes its bytes over the links that its group can use. If it stops the chip, the
#   clock waits. If it runs beside, only what is not covered when it is needed costs time;
# - collectives that use the same links wait for each other.
#
# Clock and peak are the vendor's, the links' speed and shape the
# [scaling book's](https://jax-ml.github.io/scaling-book/tpus): a v5p link carries 90 GB/s each way,
# and in a 2 x 2 slice each chip has two. Nothing is fitted to a measurement.

# %%
helpers.show_source(timing.Slice.box, timing.collective_time)

# %% [markdown]
# A few instructions have no cycles. Those that only move bytes, concatenations above all, get the
# time that the HBM needs for them. The others cost nothing here, so they must not matter: we add up
# their FLOPs and bytes, and where either is more than 2 % of the program's, or a custom kernel says
# nothing about itself, no time is predicted.

# %%
def slice_of(recipe):
    """The slice as the time model sees it: its shape, and where the mesh puts each partition."""
    piece = SLICES[recipe.topology]
    sizes = [int(size) for size in piece.topology.split(":")[1].split("x")]
    mesh = gemma.make_mesh(model_config(recipe), devices=devices_of(recipe.topology))
    places = tuple(tuple(device.coords) for device in mesh.devices.flat)
    return timing.Slice(piece.chip, (*sizes, 1)[:3], places)


def columns_of(recipe, found, cfg):
    """What a prediction says, as columns; empty where too much has no known cost."""
    row = {"unknown_share": 1.0 if found.opaque else max(found.unknown_flops, found.unknown_bytes)}
    if found.seconds is None:
        return row
    tokens = recipe.micro_batch * recipe.sequence_length * recipe.fill
    hours = cfg.samples * cfg.tokens_per_sample * found.seconds / tokens / 3600
    piece = SLICES[recipe.topology]
    return row | {
        "seconds_predicted": found.seconds, "seconds_compute": found.compute,
        "seconds_exposed": found.exposed + found.copies,
        "tokens_per_second_predicted": tokens / found.seconds, "hours_predicted": hours,
        "dollars_predicted": hours * piece.chips * helpers.chip(piece.chip).dollars_per_hour}


# %% [markdown]
# One row of the table holds the recipe, what the compiler counted, and what follows from it.

# %%
def measure(recipe, program, refusal, seconds, cfg):
    """One row of the table, from the compiler's own analyses."""
    limit = helpers.chip(SLICES[recipe.topology].chip).hbm
    row = dataclasses.asdict(recipe) | {"chips": SLICES[recipe.topology].chips,
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
        row |= times(recipe, flops, moved, guess, cfg) | {"unknown_costs": unknown}
    today = str(datetime.date.today())  # of the compilation
    return row | {"compile_cpu_seconds": seconds} | versions() | {"date": today}

# %% [markdown]
# ## 5. Live: two layers of the 31B
# The full table would take hours, so its rows are stored, one file per slice and size. `show`
# prints some columns of them; `data/dryrun/README.md` explains them all.

# %%
PREDICTED = ("unknown_share", "seconds_predicted", "seconds_compute", "seconds_exposed",
             "tokens_per_second_predicted", "hours_predicted", "dollars_predicted")


def stored(name):
    """A table of data/dryrun/, empty if it is not there."""
    path = Path("data/dryrun") / f"{name}.csv"
    if not path.exists():
        return pd.DataFrame(columns=["recipe", "flag", "fits", "temp_gib", *PREDICTED])
    table = pd.read_csv(path, dtype={"trainer": str})
    return table.reindex(columns=list(dict.fromkeys([*table, *PREDICTED])))


def table_name(recipe):
    """The file that a recipe's row belongs to."""
    return f"{recipe.topology}_{recipe.size}" + (f"_{recipe.layers}layers" if recipe.layers else "")


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
    """The columns of {column: its name here}, with sensible digits and units."""
    forms = {name: form for name, form in FORMS.items() if name in columns}
    if "seconds_predicted" in columns:  # a number that is missing says why
        why = table.unknown_share.notna().map({True: "costs unknown", False: "not predicted yet"})
        known = table.seconds_predicted.map(forms.pop("seconds_predicted").format)
        table = table.assign(seconds_predicted=known.where(
            table.seconds_predicted.notna(), why.where(table.args_gib.notna(), "")))
    look = table.reset_index(drop=True).reindex(columns=list(columns)).style.hide(axis="index")
    look = look.format(forms, na_rep="").relabel_index(list(columns.values()), axis="columns")
    return look.set_table_styles([
        {"selector": ".col0", "props": "text-align: left; white-space: nowrap"}])

# %% [markdown]
# Now live: one sliding and one full-attention layer at the 31B's width, one row of 2,048 tokens, in
# the step of notebook 03, compiled for the four chips of a v5p-8. Beside it stands what is stored
# for the published step. The full table is made by the same call without `layers`.

# %%
few = dict(layers=cfg.live_layers, sequence_length=cfg.live_length, micro_batch=1)
LIVE = [replace(PUBLISHED, **few), replace(OURS, loss="1024", **few)]
LIVE_COLUMNS = COUNTED | {"flops_per_chip": "TFLOP per chip", "seconds_roofline": "s, roofline",
                          "seconds_predicted": "s, predicted"}
shown = stored(table_name(LIVE[0]))
shown = shown[~shown.flag.astype(bool)]
if libtpu:
    with helpers.phase(f"compiling {cfg.live_layers} layers of the 31B for a v5p-8", every=30.0):
        program, refusal, seconds = compile_recipe(LIVE[1])
        found = timing.predict(program.as_text(), slice_of(LIVE[1]))
        live = pd.DataFrame([measure(LIVE[1], program, refusal, seconds, cfg)
                             | columns_of(LIVE[1], found, cfg)])
    before = shown[shown.recipe == "ours"].reindex(columns=[*LIVE_COLUMNS]).dropna(axis="columns")
    same = before.size and np.allclose(
        before.to_numpy(float), live[[*before]].to_numpy(float), rtol=1e-4)
    print("the same as stored" if same else "not as stored: DRYRUN=full makes the table anew")
    shown = pd.concat([shown[shown.recipe != "ours"], live.assign(date="now")], ignore_index=True)
show(shown, {"recipe": "recipe", "date": "compiled"} | LIVE_COLUMNS)

# %% [markdown]
# The fresh outputs are the difference to look at: the published step hands back every frozen
# weight as a new copy; ours hands back nothing that was not donated. At 60 layers (section 8) that
# copy takes about a sixth of the chip's HBM.
#
# ### The same program as a trace
# A prediction knows when each instruction starts, so it can be written as the trace that a profiler
# would have recorded: drop the file on [ui.perfetto.dev](https://ui.perfetto.dev). Below is its
# picture, from the live compile or, without one, from a stored trace of two layers (two rows of
# 4,096).

# %%
trace = Path("data/dryrun/trace_2layers.json.gz")
if libtpu:
    trace = helpers.run_dir("dryrun", "trace_2layers.json.gz")
    trace.parent.mkdir(parents=True, exist_ok=True)
    timing.write_trace(found, trace, "two layers of our step, predicted for one chip of a v5p-8")
if trace.exists():
    figures.draw_trace(trace, "08_trace")
    print(f"trace for ui.perfetto.dev: {trace}")

# %% [markdown]
# The chip computes nearly all the time, and each gap is a collective that stops it: the compiler
# gathers activations before a block and scatters its sum after it, one after the other.
#
# ## 6. Attention by blocks
# For a row of T tokens Tunix computes all T x T scores and masks at least half of them away. Ours
# takes 1,024 queries at a time. In a sliding layer none of them may look further back than 1,023
# tokens: at most 2,048 keys are enough. In a full-attention layer it is those up to the block's
# end. What is never computed needs neither time nor memory. It is plain JAX: the compiler counts
# all of it, and it runs on a CPU. Notebook 03 trains with it.

# %%
helpers.show_source(gemma.attend, gemma.use_block_attention)

# %% [markdown]
# A subclass of Tunix's attention calls it; its parameters keep their names, so LoRA and checkpoints
# do not notice. The proof, on the CPU in float32, with a packed mask and a small random model that
# has the 31B's five sliding layers and one full one with V = K: same logits, same gradients, up to
# the rounding of sums taken in another order.

# %%
def small_model(**overrides):
    """A small random Gemma 4 in float32: sliding and full layers, K equal to V in the latter."""
    config = gemma.config_from_hf("data/configs/gemma4_31b.json", dtype="float32")
    fields = dict(num_layers=6, num_embed=96, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=16,
                  num_kv_heads=2, num_global_kv_heads=1, global_key_size=32, sliding_window_size=48)
    return Gemma4(replace(config, **(fields | overrides)), rngs=nnx.Rngs(0))


def logits_and_gradient(model, tokens, segment_ids):
    """Logits, and the gradient of their mean square for every parameter."""
    mask = jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :])
    graph, state = nnx.split(model)

    def value(state):
        logits = nnx.merge(graph, state)(tokens, attention_mask=mask)[0]
        return jnp.mean(logits ** 2), logits
    (_, logits), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(state)
    return [np.asarray(leaf) for leaf in (logits, *jax.tree.leaves(gradient))]


rng = np.random.default_rng(0)
tokens = jnp.asarray(rng.integers(0, 96, (1, 256)))
segment_ids = jnp.asarray(np.sort(rng.integers(1, 5, (1, 256)), axis=1))
model = small_model()
dense = logits_and_gradient(model, tokens, segment_ids)
gemma.use_block_attention(model, 64)
blocks = logits_and_gradient(model, tokens, segment_ids)
worst = max(abs(a - b).max() / max(abs(a).max(), 1e-6) for a, b in zip(dense, blocks, strict=True))
print(f"{len(dense) - 1} gradients and the logits agree to {worst:.1e} of their largest entry")
assert worst < 1e-4

# %% [markdown]
# ## 7. What this estimate cannot judge: splash attention
# JAX ships a hand-written TPU kernel, splash attention, that also skips masked blocks, and takes
# segment ids (Tunix's use of it drops them, so packed examples would read each other). Here is the
# call, and on the CPU, interpreted, it computes what `attend` computes.

# %%
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask


def splash_attend(query, key, value, segment_ids, window, block, interpret=False):
    """The kernel, on the [B, T, N, H] arrays of one chip; mask from window and segment ids."""
    T, heads = query.shape[1], query.shape[2]
    one = (splash_mask.CausalMask((T, T)) if window is None
           else splash_mask.LocalMask((T, T), window_size=(window - 1, 0), offset=0))
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute",
             "block_q_dq", "block_kv_dq")
    kernel = splash.make_splash_mha(
        splash_mask.MultiHeadMask([one] * heads), head_shards=1, q_seq_shards=1,
        block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)), interpret=interpret)
    query, key, value = (jnp.swapaxes(array, 1, 2) for array in (query, key, value))
    mixed = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=splash.SegmentIds(ids, ids)))(
        query, key, value, segment_ids)
    return jnp.swapaxes(mixed, 1, 2)


q, k, v = (jax.random.normal(key, (1, 256, heads, 128)) * 0.3
           for key, heads in zip(jax.random.split(jax.random.key(0), 3), (4, 2, 2)))
mask = jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :])
for window in (None, 64):
    ours = gemma.attend(q, k, v, mask, window, 128)
    kernel = splash_attend(q, k, v, segment_ids.astype(jnp.int32), window, 128, interpret=True)
    print(f"window {window}: largest difference {abs(ours - kernel).max():.1e}")
    assert abs(ours - kernel).max() < 1e-4

# %% [markdown]
# But what does the compiler think it costs? We compile the attention of one layer of the 31B alone,
# without its projections, forward and backward, T = 4,096, heads over four chips, in three ways.

# %%
def compile_attention(kind, how):
    """One attention layer of the 31B on a v5p-8, forward and backward: what the compiler says."""
    full = kind == "full"
    window, kv_heads, size = (None, 4, 512) if full else (1_024, 16, 256)
    mesh = jax.make_mesh((1, 4), ("fsdp", "tp"), devices=devices_of("v5p-8"),
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split, whole = PartitionSpec(None, None, "tp"), PartitionSpec()
    block = {"dense": 4_096, "blocks": 1_024, "splash": 512}[how]

    def attention(query, key, value, ids):  # what one chip does
        if how == "splash":
            return splash_attend(query, key, value, ids, window, block)
        mask = jnp.tril(ids[:, :, None] == ids[:, None, :])
        return gemma.attend(query, key, value, mask, window, block)

    def loss(query, key, value, ids):
        mapped = jax.shard_map(attention, mesh=mesh, in_specs=(split, split, split, whole),
                               out_specs=split, check_vma=False)
        return jnp.sum(mapped(query, key, value, ids).astype(jnp.float32) ** 2)

    shapes = [jax.ShapeDtypeStruct((1, 4_096, heads, size), jnp.bfloat16,
                                   sharding=NamedSharding(mesh, split))
              for heads in (32, kv_heads, kv_heads)]
    ids = jax.ShapeDtypeStruct((1, 4_096), jnp.int32, sharding=NamedSharding(mesh, whole))
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes, ids).compile()
    cost, memory = program.cost_analysis(), program.memory_analysis()
    return {"kind": kind, "attention": how, "flops_per_chip": cost["flops"],
            "bytes_per_chip": cost["bytes accessed"], "seconds_estimate": cost["optimal_seconds"],
            "temp_gib": memory.temp_size_in_bytes / 2**30} | versions() | {
                "date": str(datetime.date.today())}


attention = stored("attention_v5p-8")
if cfg.full_table and libtpu and not len(attention):
    attention = pd.DataFrame([compile_attention(kind, how) for kind in ("sliding", "full")
                              for how in ("dense", "blocks", "splash")])
    helpers.write_text("data/dryrun/attention_v5p-8.csv", attention.to_csv(index=False))
show(attention, {"kind": "layer", "attention": "attention", "flops_per_chip": "TFLOP per chip",
                 "bytes_per_chip": "GB per chip", "seconds_estimate": "s, estimate",
                 "temp_gib": "temporaries GiB"})

# %% [markdown]
# Of the splash rows the compiler counts only what surrounds the kernel; the kernel itself is a
# black box to its cost model and enters with nothing. A step with splash attention therefore looks
# faster than it can be. The kernel's FLOPs can be counted by hand, and the time they take at the
# chip's peak is the least that such a row has to add; we keep the kernel out of the table until
# someone measures it on a chip.

# %%
def splash_floor(length=4_096, block=512, window=1_024, chips=4, peak=None):
    """Seconds the kernel's blocks take at peak in 60 layers: 2 products forward, 7 backward."""
    blocks = length // block
    causal = blocks * (blocks + 1) // 2
    sliding = sum(min(i + 1, 1 + -(-(window - 1) // block)) for i in range(blocks))
    product = 2 * block * block * 32 / chips  # times the head size: FLOPs of one block, all heads
    flops = 9 * product * (50 * sliding * 256 + 10 * causal * 512)
    return flops / (peak or helpers.chip("v5p").flops)


print(f"splash attention, one row of 4,096: {splash_floor() * 1e3:.0f} ms at the peak, "
      f"{2 * splash_floor() * 1e3:.0f} ms at half of it; the compiler counts 0 for the kernel")

# %% [markdown]
# ## 8. The table
# Every idea is a row. `DRYRUN=full python 08_dryrun.py` compiles what is not stored or not
# predicted yet, one row at a time, and writes after each: stop it whenever you like. A row is
# compiled again only if its recipe or a library's version changed. A change of notebook 03's step
# it does not see; "the same as stored" in section 5 is the check for that. `DRYRUN_KEEP=<folder>`
# keeps the programs' texts, and `DRYRUN=kept` predicts from them again without compiling.

# %%
ONE_ROW = replace(OURS, recipe="ours, one row", micro_batch=1)
DENSE = replace(ONE_ROW, recipe="ours, one row, dense attention", attention_block=0)
BFLOAT16 = replace(PUBLISHED, recipe="published + bfloat16", compute_dtype="bfloat16")
ROAD = [PUBLISHED, BFLOAT16,
        replace(BFLOAT16, recipe="published + bfloat16, no remat", remat="NONE"),
        DENSE, ONE_ROW, OURS]
E2B = Recipe("ours", size="e2b", sequence_length=2048, loss="1024")
ELSEWHERE = [replace(E2B, topology="v6e-1"),
             replace(E2B, recipe="ours, DECODER remat", topology="v5e-1", remat="DECODER"),
             replace(OURS, recipe="ours, DECODER remat", topology="v6e-8", remat="DECODER"),
             replace(OURS, topology="v5p-32", micro_batch=8)]
SEARCH = [replace(OURS, recipe="four rows, BLOCK remat", micro_batch=4, remat="BLOCK"),
          replace(ONE_ROW, recipe="one row of 8,192", sequence_length=8192, loss="4096"),
          replace(OURS, recipe="all positions in the loss", loss="4095"),
          replace(OURS, recipe="three rows", micro_batch=3),
          replace(DENSE, recipe="two rows, dense attention", micro_batch=2)]
NF4 = Recipe("nf4, DECODER remat", "v5e-4", remat="DECODER", sequence_length=2048, loss="1024",
             base_dtype="nf4", tile_size=32)
INT8 = replace(NF4, recipe="int8, DECODER remat", base_dtype="int8", tile_size=0)
QUANTISED = [NF4, INT8, replace(INT8, topology="v6e-4", sequence_length=4096, loss="2048"),
             replace(INT8, topology="v5e-8", micro_batch=2),
             replace(INT8, recipe="int8, BLOCK remat", topology="v6e-8", micro_batch=2,
                     sequence_length=4096, loss="2048", remat="BLOCK")]
FLAG = [replace(recipe, flag=flag) for recipe in LIVE for flag in (False, True)]
RECIPES = [PUBLISHED, DENSE, ONE_ROW, OURS, *ELSEWHERE[:2], *ROAD[1:3], *FLAG, *ELSEWHERE[2:],
           *SEARCH, *QUANTISED]
print(f"{len(RECIPES)} recipes, {sum(recipe.layers == 0 for recipe in RECIPES)} at full depth")

# %%
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


def name_of(recipe):
    """A file name for what belongs to one recipe."""
    words = f"{table_name(recipe)} {recipe.recipe}" + " flag" * recipe.flag
    return re.sub(r"\W+", "_", words.replace("-", ""))


def predict(recipe, text, cfg, folder):
    """The time model's columns; a full-depth row's profile is stored beside the table."""
    found = timing.predict(text, slice_of(recipe))
    if not recipe.layers and found.seconds:
        profile = timing.summary(found, helpers.chip(SLICES[recipe.topology].chip))
        helpers.write_text(Path(folder) / "profiles" / f"{name_of(recipe)}.json",
                           json.dumps(profile) + "\n")
    return columns_of(recipe, found, cfg)

# %%
def run_table(recipes, cfg, folder="data/dryrun"):
    """Compile the recipes that are not stored yet; each row is on disk as soon as it is known."""
    for number, recipe in enumerate(recipes, 1):
        path = Path(folder) / f"{table_name(recipe)}.csv"
        kept = Path(cfg.keep) / f"{name_of(recipe)}.txt.gz" if cfg.keep else Path("nowhere")
        wanted = dataclasses.asdict(recipe) | versions()
        row = next((old for old in stored_rows(path) if key_of(old) == key_of(wanted)), {})
        predicted = row.get("unknown_share") or row.get("note")
        if (predicted and not cfg.again) or (cfg.again and not (row and kept.exists())):
            continue
        with helpers.phase(f"{number}/{len(recipes)} {recipe.topology} {recipe.size}: "
                           f"{recipe.recipe}", every=60.0):
            if row and kept.exists():
                text = gzip.decompress(kept.read_bytes()).decode()
            else:
                compiled = compile_recipe(recipe)
                row = measure(recipe, *compiled, cfg)
                text = compiled[0].as_text() if compiled[0] else ""
                if cfg.keep and text:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_bytes(gzip.compress(text.encode(), 6))
            row = {**row, **(predict(recipe, text, cfg, folder) if text else {})}
        rows = [old for old in stored_rows(path)  # read anew: another process may have added some
                if key_of(old | versions()) != key_of(wanted)]
        row = {name: f"{value:.6g}" if isinstance(value, float) else value
               for name, value in row.items()}
        helpers.write_text(path, pd.DataFrame([*rows, row]).to_csv(index=False))


if (cfg.full_table or cfg.again) and libtpu:
    run_table(RECIPES, cfg)

# %% [markdown]
# What is stored for the 31B on a v5p-8, first the memory of one chip. It fits if the sum is at
# most 95.74 GiB, what XLA can use. A row with nothing but a sum was refused by the compiler.

# %%
order = [recipe.recipe for recipe in [*ROAD, *SEARCH]]
table = stored("v5p-8_31b").sort_values(
    "recipe", key=lambda names: names.map(order.index), ignore_index=True)
show(table, {"recipe": "recipe", "micro_batch": "rows", "sequence_length": "tokens a row",
             "remat": "remat"} | COUNTED | {"fits": "fits"})

# %% [markdown]
# Then the time of one micro-step and what follows from it: *predicted* by the time model, with what
# the chip waits in it, and beside it the compiler's estimate and the roofline. None is measured.
# Hours and dollars follow the prediction, for the steps alone, without loading and compiling. The
# files in `data/dryrun/` have all columns.

# %%
show(table, {"recipe": "recipe", "seconds_predicted": "s, predicted",
             "seconds_exposed": "of these waiting",
             "tokens_per_second_predicted": "real tokens/s", "hours_predicted": "hours",
             "dollars_predicted": "USD", "seconds_estimate": "s, estimate",
             "seconds_roofline": "s, roofline"})

# %% [markdown]
# ### How many times?
# Five times the published real tokens per second is what this series set out for. `published` and
# `ours` come from the same code and the same compiler. Estimate and roofline stand beside the
# prediction: all three see the same programs, each with its own blind spots. The recommendation is
# the fastest of our predicted rows that leaves a tenth of the HBM free.

# %%
def ratio(table, recipe, base="published", column="tokens_per_second_predicted"):
    """How many times as many real tokens per second as another row."""
    speed = table.set_index("recipe")[column].astype(float)
    return speed[recipe] / speed[base]


def recommend(table, spare):
    """The fastest row of notebook 03's trainer that fits with `spare` of the HBM left."""
    fits = table[(table.trainer == "03") & table.seconds_predicted.notna()
                 & (table.hbm_gib <= (1 - spare) * table.limit_gib)]
    return fits.loc[fits.tokens_per_second_predicted.idxmax()]


SPEEDS = {"predicted": "tokens_per_second_predicted", "by the estimate": "real_tokens_per_second",
          "by the roofline": "real_tokens_per_second_roofline"}
done = set(table.recipe[table.seconds_predicted.notna()])
if {"ours", "published"} <= done:
    best = recommend(table, cfg.spare)
    for name in dict.fromkeys(["ours", best.recipe]):
        many = ", ".join(f"{ratio(table, name, column=column):.2f} {how}"
                         for how, column in SPEEDS.items())
        print(f"{name}: times the published real tokens per second: {many}")
    print(f"recommended: {best.recipe} ({best.hbm_gib:.1f} of {best.limit_gib:.1f} GiB)")

# %% [markdown]
# What this means: of the three ratios the prediction's is the largest, and the tokens per second
# behind it are the fewest. The estimate flattered both steps, the published one more: section 9
# shows why. And recomputing buys memory, not speed. With `BLOCK` four rows at once need less than
# half of the HBM, and a quarter of the speed is lost (by the estimate). Letting all positions meet
# the output matrix costs 1.6 GiB. Three rows fit with 0.3 GiB to spare. Two rows with dense
# attention are refused.
#
# ## 9. Memory, speed and cost, drawn
# First the HBM of one chip. What the published step returns is nearly as large as what it is given.

# %%
if len(table):
    figures.draw_memory(table)

# %% [markdown]
# Then the road from the published recipe to ours, in predicted real tokens per second. The axis is
# logarithmic, so a factor has the same length wherever it stands. Rows that are not predicted yet
# share a bar with the next one. Packing counts by itself: 95 % of the positions are real tokens
# instead of 30 %. "Our step" is notebook 03's: float32 adapters on 360 modules, and nothing is
# returned that was not donated.

# %%
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


names = [recipe.recipe for recipe in ROAD]
labels = ["published", "bfloat16 arithmetic", "no remat", "our step", "attention by blocks",
          "two rows at once"]
known, together = [], []
for name, label in zip(names, labels, strict=True):
    together.append(label)
    if name in done:  # a row that is not predicted shares the bar of the next one
        known.append((name, ",\n".join(together)))
        together = []
if len(known) > 1:
    figures.draw_road(road_steps(table, *map(list, zip(*known))))

# %% [markdown]
# **What this means.** Packing alone gives 0.95 / 0.30 = 3.2 times as many real tokens. All other
# changes together make the rest.
#
# ### Where the time goes
# A prediction is a sum over instructions, and each knows the line of Python it came from: the
# calls' names say which part of the model it serves, JAX's names say which pass. Two bars for each
# recipe: the parts of one micro-step added up, and the same step in the order in which a chip goes
# through it. A collective is shorter than a pixel of that, so 40 ms of it stand below. The thin
# lines are the pass: forward light, recomputed middle, backward dark.

# %%
def stored_profile(recipe):
    """What `predict` stored for a recipe, or None."""
    path = Path("data/dryrun/profiles") / f"{name_of(recipe)}.json"
    return json.loads(path.read_text()) if path.exists() else None


profiles = {recipe.recipe: stored_profile(recipe) for recipe in (PUBLISHED, OURS)}
profiles = {name: found for name, found in profiles.items() if found}
if profiles:
    figures.draw_parts(profiles)
else:
    print("not predicted yet: DRYRUN=full makes the profiles")

# %% [markdown]
# The numbers, in milliseconds. *At its limit* is the share of its time that a part would need if
# its products ran at the peak, or its bytes at the HBM's speed, whichever takes longer: what is
# left is what a better program could still save. Collectives have no such limit here.

# %%
def by_part(profile):
    """Milliseconds by part and pass, waits by kind of collective; the share of its own limit."""
    rows = pd.DataFrame(profile["profile"])
    compute = rows.what == "compute"
    rows["part"] = rows.part.where(compute, "waits: " + rows.what)
    table = 1e3 * rows.pivot_table(index="part", columns="direction", values="seconds",
                                   aggfunc="sum", fill_value=0.0)
    table = table.reindex(columns=[name for name in timing.DIRECTIONS if name in table])
    table["all"] = table.sum(axis=1)
    table["share"] = table["all"] / table["all"].sum()
    limit = 1e3 * rows[compute].groupby("part").at_peak.sum()
    table["at its limit"] = limit.reindex(table.index) / table["all"]
    return table.sort_values("all", ascending=False).rename_axis(index=None, columns=None)


for name, profile in profiles.items():
    look = by_part(profile).style.format("{:,.1f}", na_rep="")
    look = look.format("{:.0%}", na_rep="", subset=["share", "at its limit"])
    display(look.set_caption(f"{name}: {profile['seconds']:.3f} s predicted for a micro-step, "
                             f"{profile['exposed']:.3f} s of it waiting for the links"))

# %% [markdown]
# The ten lines that take longest in our step, all layers together. A line is where the model asks
# for it; what the wrappers of Qwix and Flax do inside counts for the line that called them.

# %%
if "ours" in profiles:
    lines = pd.DataFrame(profiles["ours"]["longest"]).assign(
        ms=lambda rows: 1e3 * rows.seconds)[["ms", "count", "what", "part", "direction", "line"]]
    display(lines.style.hide(axis="index").format({"ms": "{:,.1f}"}))

# %% [markdown]
# What this means: in the published step more than a quarter of the time goes into computing the
# layers a second time, more than a sixth into waiting for the links, and an eighth into copies from
# one layout to another, which take ten times what their bytes need. Its products of the MLP are in
# float32 and run at half of their limit. Ours recomputes nothing, hardly copies and multiplies in
# bfloat16, at three quarters. In both, attention and norms are at a third of their limit or less,
# LoRA's thin products in ours not much higher, and every collective stops the chip. That is where a
# faster step has to come from.
#
# ### What stands between this step and a faster one
# Eight times the published speed would be a step of 1.22 s. We tried changes on parts of the
# program, where a compilation takes seconds to minutes: the MLP of one layer with its adapters,
# forward and backward, and a few layers of the whole step (`tools/step_search.py`; all rows,
# losers, too, are in `data/dryrun/search.csv`).

# %%
search = stored("search").dropna(axis="columns", how="all")
if len(search):
    names = {"program": "program", "milliseconds": "ms", "compute": "ms computing",
             "waits": "ms waiting", "temp_gib": "temporaries GiB",
             "compile_cpu_seconds": "CPU s to compile"}
    look = search.sort_values("program")[[*names]].rename(columns=names)
    look = look.style.hide(axis="index").format(precision=2, na_rep="refused")
    display(look.format("{:.0f}", na_rep="", subset=["CPU s to compile"]))

# %% [markdown]
# What this means, row by row:
#
# - *Mesh (2, 2), collectives beside the products* ("async"). Products are larger and take a tenth
#   less time, and nearly all gathers of weights are covered. But the compiler merges LoRA's small
#   sums with the large ones, and a merged sum cannot stay a reduce-scatter: it moves twice the
#   bytes, and nothing covers it. By our reckoning from six layers, sixty would take 1.31 s instead
#   of 1.37: 7.4 times the published speed. With reduce-scatters it would be 7.9.
#   With the sums beside the products, too, one product needs more on-chip memory than there is, and
#   the compiler refuses.
#   *Reduce-scatter of two*, an option for such sums, takes 0.5 ms off the MLP's 12.5 on (2, 2).
# - *Softmax normalised late*: dividing after the product with the values saves a pass over the
#   scores, backward too. The same rows hold a gradient of GELU written by hand, which changed
#   nothing: those products are not slow because of it.
# - *64 MiB of VMEM*: one option, which lets a product use more of the on-chip memory. The MLP
#   computes a tenth faster and compiles three times as long. It is the next thing to try.
# - *MLP weights gathered, the stream cut by tokens*: no sums are left, only gathers. With "async,
#   one step" most of them are covered: 9.0 ms instead of 9.8.
# - *int8*: stored and multiplied in int8 (11), with the weights gathered, the MLP takes 6.6 ms
#   instead of 9.8, even with every gather exposed: half the bytes travel, and a token's scale needs
#   no other chip. With the stream cut by width int8 loses instead: its sums travel in 32 bits.
# - *Windowed einsum*, *async gathers alone* and the conservative *collective matmul* give the
#   same predicted times. The full collective matmul doubles its products.
#
# So eight times in bfloat16 looks reachable, but no full-depth row shows it. What stands before it
# is the price of compiling: with "async" it takes 64 CPU seconds a layer instead of ten, more
# than an hour at full depth. No such row is stored, so notebook 03 keeps the step of section 8.
#
# ## 10. What can you rent?
# The same question for every slice, on one basis: which base dtype, which recomputation, how many
# gibibytes a chip, how many hours and dollars for *your* tokens at *your* price. Change the two
# lines below. `will_it_fit` answers with a compiled row where this table has one. Else it adds up
# the parts: what the step is handed, what the backward pass reads again, logits, gradients, weights
# gathered from other chips. For every compiled row the sum is within a tenth of the compiler's
# (`tests/test_fit.py`), so an estimate has to leave a tenth of the chip free.

# %%
MY_TOKENS = cfg.samples * cfg.tokens_per_sample
MY_PRICES = {}  # dollars per hour of a slice, for example {"v5p-8": 7.5}; else those of section 2
helpers.show_source(fit.estimate)
print(fit.will_it_fit("v6e", 4, base_dtype="int8", remat="DECODER"))

# %% [markdown]
# A run is more than its steps: it downloads, loads, compiles, validates and saves. `run_cost` adds
# these from assumptions that it states: 0.2 GB/s for every byte that moves, a quarter of an hour
# for three compilations. Hours are *predicted* where a stored row is. *At least* (≥) means that no
# time is: the compiled bfloat16 program at the chips' peaks stands in for it, or, where none is
# compiled, its arithmetic alone. Storage saves no time, so int8 and nf4 get bfloat16's bound. Where
# `fsdp` is above 1 we assume that a chip keeps gathered bfloat16 copies of the other chips' nf4
# weights: so nf4 can need more than int8 there.

# %%
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
            "steps alone, h": f"{least}{steps / 60:.2f}", "whole run, h": f"{least}"
            f"{cost['hours']:.2f}", "USD": f"{least}{cost['dollars']:.2f}"})
    table = pd.DataFrame(lines)
    table.loc[table.fits == "no", ["steps alone, h", "whole run, h", "USD"]] = ""
    return table


rented = renters_table(fit.renters_rows(), MY_TOKENS, MY_PRICES)
display(rented.style.hide(axis="index"))
display(renters_table(fit.renters_rows(("e2b",), fit.ONE_CHIP), MY_TOKENS,
                      MY_PRICES).style.hide(axis="index"))

# %% [markdown]
# What this means: for 9.2 million tokens the fixed part of a v5p-8's hour is longer than its steps,
# so a faster step buys little, and a second epoch costs only its steps. Today the published 10,000
# samples are about an hour and 17 dollars there. *At least* can rule a slice out, and no more: the
# same slice may need three times that. A v5e-8 or v5e-4 holds the 31B only with a quantised base
# (11). The same table with fields to fill in is the page
# [What will it cost me?](https://github.com/OWNER/gemma4-on-tpu/blob/main/tools/site/cost.md) of the
# site.
#
# These are the compiled rows behind it, beside the v5p-8's of section 8. *Costs unknown* means that
# instructions of no known cost hold more than 2 % of the bytes: then no time is predicted.

# %%
others = pd.concat(map(stored, ("v6e-1_e2b", "v5e-1_e2b", "v5p-32_31b", "v6e-8_31b")))
show(others, {"topology": "slice", "size": "model", "micro_batch": "rows",
              "sequence_length": "tokens a row", "remat": "remat", "hbm_gib": "sum GiB",
              "limit_gib": "limit GiB", "fits": "fits", "seconds_predicted": "s, predicted",
              "seconds_estimate": "s, estimate", "seconds_roofline": "s, roofline"})

# %% [markdown]
# ## 11. The flag that does nothing
# The published recipe praises `--xla_llvm_disable_expensive_passes`: compilation falls from eight
# minutes to three, and the step gets 2 to 5 % slower. The flag belongs to LLVM, XLA's back end for
# CPUs and GPUs; the TPU's is another. Two layers of either step, compiled without and with it:

# %%
flags = stored(table_name(LIVE[0]))
flags = flags.groupby("recipe").filter(lambda pair: len(pair) == 2)
COMPARED = ["flops_per_chip", "bytes_per_chip", "hbm_gib", "temp_gib", "seconds_estimate"]
for _, pair in flags.groupby("recipe"):
    assert (pair[COMPARED].nunique() == 1).all(), "the flag changed something"
print(f"{len(COMPARED)} numbers, the same with and without the flag" if len(flags)
      else "not stored")
show(flags, {"recipe": "recipe", "flag": "flag", "flops_per_chip": "TFLOP per chip",
             "bytes_per_chip": "GB per chip", "hbm_gib": "sum GiB", "temp_gib": "temporaries GiB",
             "seconds_estimate": "s, estimate", "compile_cpu_seconds": "CPU s to compile"})

# %% [markdown]
# Nor does it compile faster: the last column, taken on a machine that did other things, too, is no
# smaller with it. What does shorten a restart is JAX's persistent compilation cache, which notebook
# 03 switches on.
#
# ## 12. How far from the truth, how far from the peak
# One time is known: the published run took 3.34 h for 1,244 steps of eight micro-steps (published).
# Its clock also holds loading and compiling, about a quarter of an hour by our reckoning, so the
# truth lies between the two rows of measured time. A ratio of 1 would be a perfect prediction.

# %%
def validation(table, overhead=0.25):
    """Predicted, estimate and roofline of the published micro-step against the time it took."""
    hours = published("training_results", "metric", "tpu")["wall_clock"]
    row = table.set_index("recipe").loc["published"]
    measured = {f"all of {hours} h": hours, f"less {overhead} h of loading": hours - overhead}
    return pd.DataFrame({
        how: {"measured, s": value * 3600 / (1_244 * 8)} | {
            f"{name} / measured": row[f"seconds_{name}"] / (value * 3600 / (1_244 * 8))
            for name in ("predicted", "estimate", "roofline")}
        for how, value in measured.items()}).T


if "published" in done:
    seconds = table.set_index("recipe").seconds_predicted["published"]
    print(f"predicted: {seconds:.3f} s a micro-step")
    display(validation(table).style.format("{:.3f}"))

# %% [markdown]
# The prediction lies between the two, a few percent from either; the estimate is too fast by more
# than a third. One number is consistency, not proof: a model that is wrong twice can hit it, too.
# What else speaks for it: nothing in it was fitted, and products and collectives of known size come
# out at the data sheet's times (`tests/test_program.py`). We know of no second anchor that it can
# judge: other public step times belong to programs with hand-written kernels (tpuchat's 275 ms on a
# v6e-1, MaxText's tables), and of those a text says no cycles.
#
# Useful work is 4N FLOPs per real token (N parameters; a frozen base needs 2N forward and 2N
# backward); its share of the four chips' peak says how much could still be gained.

# %%
def shares(table, names):
    """Tokens per second, hours and dollars as predicted, and the share of the chips' peak."""
    rows = table.set_index("recipe").loc[names]
    parameters = published("spec_sheet_reference", "item")["gemma4_31b_text_params"]
    peak = SLICES["v5p-8"].chips * helpers.chip("v5p").flops
    speed = rows.tokens_per_second_predicted.astype(float)
    return pd.DataFrame({"real tokens/s": speed, "hours": rows.hours_predicted,
                         "USD": rows.dollars_predicted, "waits": rows.seconds_exposed
                         / rows.seconds_predicted, "share of peak": 4 * parameters * speed / peak})


if known:
    forms = ["{:,.0f}", "{:.2f}", "{:.2f}", "{:.0%}", "{:.0%}"]
    look = shares(table, [name for name, _ in known])
    display(look.style.format(dict(zip(look, forms, strict=True))))

# %% [markdown]
# ## Recap
# - The TPU's compiler answers on a machine without a TPU: what fits, FLOPs, bytes, and a schedule
#   from which the time can be predicted.
# - Packing is the largest factor, 3.2 times: 70 % of the published positions were padding.
# - What an estimate leaves out can be larger than what it gets wrong: here, the links.
# - A step must not return what it does not change.
# - A kernel that the cost model cannot see into makes any estimate look good. We left it out.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `libtpu is not on this machine` | macOS, Windows, ARM, or not installed | stored results are shown; on Linux x86-64 see section 1 |
# | `Unable to initialize backend 'tpu_compiler'` | JAX started before section 1 | restart the kernel, run from the top |
# | killed while compiling | a full-depth compile needs up to 13 GB | close other programs; stored rows are kept |
# | a row with nothing but a sum | refused: more HBM than the chip has | fewer rows at once, shorter rows, or recompute (`remat`) |
# | a row is compiled again | a library's version changed | intended: the numbers belong to versions |
#
# ### Exercises
# 1. What is the longest row that fits a v5p-8 with block attention and no recomputation?
#
# <details><summary>Solution</summary>
#
# Add `replace(ONE_ROW, recipe="one row of 16,384", sequence_length=16_384)` to `SEARCH` and run
# with `DRYRUN=full`. What to expect: arguments take 16.7 of 95.7 GiB, and a row of 4,096 needs 25.5
# GiB of temporaries. If these grew with the length alone, 12,700 tokens would be the end; scores
# grow faster. `SEARCH` has a row of 8,192 to hold against that.
#
# </details>
#
# 2. Why does the one-hot loss over 262,144 classes not cost more memory than integer labels?
#
# <details><summary>Solution</summary>
#
# XLA fuses the comparison into the sum: the one-hot array never exists. Fewer *positions* do help:
# the recipe `all positions in the loss` says how much.
#
# </details>
#
# Next appendix:
# [09 · A Gemma 4 small enough for a laptop, pretrained from scratch](09_tiny_base.ipynb).
