"""08's steps on a GPU: no longer predicted but run, with a model of random numbers.

    python -m appendix.on_gpu OUT.csv [NAME ...]     (NAMEs of `CASES`; none: all of them)

A GPU isn't a TPU, so nothing here says how fast a TPU is. It says that the programs run at real
widths, that their loss is that of Tunix's own trainer, and how their speeds compare on one chip.
What came out on an H200 is in data/measured/gpu.csv. JAX needs its CUDA plugin for it.
"""

import dataclasses
import datetime
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx
from jax.sharding import Mesh
from tunix.models.gemma4.model import Gemma4, ModelConfig, RematConfig
from tunix.sft import peft_trainer

from appendix import steps
from appendix.steps import Recipe
from helpers import gemma, programs, quantized, train
from helpers.run import write_text

STORED = Path("data/measured/gpu.csv")
DEVIATION = 0.02     # of the random weights
WARMUPS, TIMED = 2, 5
RATE = 1e-3          # constant, so that a few steps on one batch move the loss
SEGMENT = 512        # tokens of an example in a packed row
ALONE = "1x1"        # the mesh of one device

PUBLISHED = replace(steps.PUBLISHED, mesh=ALONE)
ON_ITS_ROW = replace(PUBLISHED, recipe="ours, on the published row", trainer="03", remat="NONE",
                     compute_dtype="bfloat16", loss="1536", attention_block=1024)
ROWS = replace(steps.ROWS, recipe="ours, four rows of 2,048", mesh=ALONE)
KINDS = {
    "published": PUBLISHED,
    "published, bfloat16": replace(PUBLISHED, recipe="published + bfloat16, no remat",
                                   compute_dtype="bfloat16", remat="NONE"),
    "its row": ON_ITS_ROW,
    "rows": ROWS,
    "long rows": replace(steps.OURS, recipe="ours, two rows of 4,096", mesh=ALONE),
    "int8": replace(ROWS, recipe="ours, int8 base", base_dtype="int8"),
    "int8 products": replace(ROWS, recipe="ours, int8 products", base_dtype="int8",
                             int8_products=True),
    "nf4": replace(ROWS, recipe="ours, nf4 base", base_dtype="nf4"),
}


def _cases() -> dict[str, Recipe]:
    """What is run, by name, the most telling first."""
    cases = {}
    for layers in (6, 12):  # two sizes give the time of a layer, and that of everything else
        for kind in ("published", "rows"):
            cases[f"{kind}, {layers}"] = replace(KINDS[kind], layers=layers)
    for kind in ("its row", "int8", "nf4", "int8 products"):
        cases[f"{kind}, 6"] = replace(KINDS[kind], layers=6)
    cases["whole"] = replace(ROWS, recipe="ours, one row at a time, DECODER remat",
                             remat="DECODER", micro_batches=4, micro_batch=1)
    cases["e2b"] = replace(steps.E2B, recipe="ours, one row at a time", mesh=ALONE)
    for layers in (6, 12):
        for kind in ("long rows", "published, bfloat16"):
            cases[f"{kind}, {layers}"] = replace(KINDS[kind], layers=layers)
    return cases


CASES = _cases()


@dataclass(frozen=True)
class Measured:
    """What a step did; times are in seconds."""

    compile_seconds: float  # of the first call, with its compilation
    seconds: float          # of a step, the median of `TIMED`
    slowest: float
    fastest: float
    loss_first: float
    loss_last: float        # after all steps on the same batch


Step = Callable[[], Any]  # one step; returns its loss


# ── Random models ─────────────────────────────────────────────────────────────────────────────────


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random numbers of a weight."""
    return DEVIATION * jax.random.normal(key, shape, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _codes(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random codes of a quantized weight, positive and negative ones alike."""
    info = jnp.iinfo(dtype)
    codes = jax.random.randint(key, shape, info.min, info.max + 1, jnp.int32)
    return codes.astype(dtype)


def _number_of(array: Any, key: jax.Array) -> jax.Array:
    """Numbers for one abstract array: ones for a norm's scale, else random ones."""
    if jnp.issubdtype(array.dtype, jnp.integer):
        return _codes(key, array.shape, array.dtype)
    if len(array.shape) == 1:
        return jnp.ones(array.shape, array.dtype)
    return _normal(key, array.shape, array.dtype)


def random_base(config: ModelConfig, mesh: Mesh, base_dtype: str) -> Gemma4:
    """A base of random weights. A quantized one is as large and as slow as a real one, no more."""
    model = quantized.abstract_base(config, mesh, base_dtype)
    leaves, structure = jax.tree.flatten(nnx.state(model))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = []
    for leaf, key in zip(leaves, keys, strict=True):
        arrays.append(_number_of(leaf, key))
    state = jax.tree.unflatten(structure, arrays)
    nnx.update(model, gemma.on_mesh(state, mesh))
    return model


# ── Random rows ───────────────────────────────────────────────────────────────────────────────────


def random_rows(recipe: Recipe, vocabulary: int) -> train.Batch:
    """Packed rows [M, B, T]: `fill` of each is real, the second half of each example is trained."""
    shape = (recipe.micro_batches, recipe.micro_batch, recipe.sequence_length)
    numbers = np.random.default_rng(0)
    places = np.arange(recipe.sequence_length)
    length = SEGMENT
    if recipe.fill < 0.5:  # the published rows hold one example each
        length = recipe.sequence_length
    real = places < int(recipe.fill * recipe.sequence_length)
    of_example = places % length
    half = min(length, int(real.sum())) // 2
    segments = np.where(real, places // length + 1, 0)
    trained = real & (of_example >= half)
    tokens = numbers.integers(10, vocabulary, shape)
    columns = {
        "tokens": np.where(real, tokens, 0).astype(np.int32),
        "loss_mask": np.broadcast_to(trained, shape).copy(),
        "segment_ids": np.broadcast_to(segments, shape).astype(np.int32),
        "positions": np.broadcast_to(np.where(real, of_example, 0), shape).astype(np.int32),
    }
    return train.Batch(**columns)


# ── Steps ─────────────────────────────────────────────────────────────────────────────────────────


def our_step(recipe: Recipe, config: ModelConfig, mesh: Mesh) -> Step:
    """03's step with its state."""
    cfg = steps.settings_of(recipe, 1)
    base = random_base(config, mesh, recipe.base_dtype)
    config.remat_config = RematConfig[recipe.remat]
    model = programs.adapted(base, cfg, mesh)
    optimizer = train.make_optimizer(lambda step: RATE, cfg.weight_decay, cfg.max_grad_norm)
    state, frozen = train.start(model, optimizer, mesh)
    loss_fn = train.make_loss(int(recipe.loss))
    program = train.jit_train_step(model, optimizer, loss_fn, state)
    batch = train.to_mesh(random_rows(recipe, config.num_embed), mesh)
    held = [state.adapters, state.opt_state]

    def step() -> jax.Array:
        adapters, opt_state = held
        held[0], held[1], metrics = program(adapters, opt_state, frozen, batch)
        return metrics["loss"]

    return step


def published_step(recipe: Recipe, config: ModelConfig, mesh: Mesh) -> Step:
    """The published script's micro-step: Tunix's trainer as it comes."""
    model = steps.published_adapters(random_base(config, mesh, recipe.base_dtype))
    gemma.place(model, mesh)
    config.remat_config = RematConfig[recipe.remat]
    options = peft_trainer.TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=8)
    trainer = peft_trainer.PeftTrainer(model, steps.published_optimizer(), options)
    trainer = trainer.with_gen_model_input_fn(steps.published_input)
    program = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
    rows = random_rows(recipe, config.num_embed)
    batch = peft_trainer.TrainingInput(jnp.asarray(rows.tokens[0]), jnp.asarray(rows.loss_mask[0]))

    def step() -> jax.Array:
        loss, *_ = program(model, trainer.optimizer, batch)
        return loss

    return step


def losses_and_times(recipe: Recipe, runs: int) -> tuple[list[float], list[float]]:
    """The losses of some steps on one batch, and the seconds that each took; one device."""
    config = steps.model_config(recipe)
    mesh = gemma.make_mesh(config, (1, 1), devices=jax.devices()[:1])
    make = our_step
    if recipe.trainer == "tunix":
        make = published_step
    losses = []
    times = []
    with mesh:
        step = make(recipe, config, mesh)
        for _ in range(runs):
            began = time.perf_counter()
            loss = float(step())  # waits until it's there
            times.append(time.perf_counter() - began)
            losses.append(loss)
    return losses, times


def measure(recipe: Recipe) -> Measured:
    """Run a recipe's step some times."""
    losses, times = losses_and_times(recipe, 1 + WARMUPS + TIMED)
    timed = times[1 + WARMUPS:]
    return Measured(
        compile_seconds=times[0],
        seconds=statistics.median(timed),
        slowest=max(timed),
        fastest=min(timed),
        loss_first=losses[0],
        loss_last=losses[-1])


def row_of(recipe: Recipe) -> dict[str, Any]:
    """A row of the table."""
    measured = measure(recipe)
    row: dict[str, Any] = dataclasses.asdict(recipe)
    del row["topology"]
    row |= dataclasses.asdict(measured)
    row["real_tokens"] = steps.real_tokens(recipe)
    row["tokens_per_second"] = steps.real_tokens(recipe) / measured.seconds
    row["device"] = jax.devices()[0].device_kind
    row["jax"] = jax.__version__
    row["date"] = str(datetime.date.today())
    return row


def at_all_layers(table: pd.DataFrame, recipe: str, layers: int = 60) -> float:
    """Seconds of a step with all layers, on the straight line through the two depths measured.

    Args:
      table: of `STORED`.
      recipe: its label.
      layers: of the whole model.
    """
    rows = table[table.recipe == recipe].sort_values("layers")
    few, more = rows.itertuples()
    of_a_layer = (more.seconds - few.seconds) / (more.layers - few.layers)
    return more.seconds + (layers - more.layers) * of_a_layer


def speeds(table: pd.DataFrame) -> dict[str, float]:
    """{recipe: real tokens a second with all layers} of what was measured at two depths."""
    of_recipe = {}
    for recipe, rows in table.groupby("recipe"):
        if rows.layers.nunique() > 1:
            seconds = at_all_layers(table, recipe)
            of_recipe[recipe] = rows.real_tokens.iloc[0] / seconds
    return of_recipe


def main(out: str, *names: str) -> None:
    """Measure the cases of these names, or all; each row is on the disk as soon as it's known."""
    rows = []
    for name in names or CASES:
        began = time.perf_counter()
        try:
            row = row_of(CASES[name])
        except jax.errors.JaxRuntimeError as error:
            first_line = str(error).splitlines()[0]
            print(f"{name}: {first_line[:300]}", flush=True)
            continue
        finally:
            jax.clear_caches()
            gc.collect()
        rows.append(row)
        write_text(out, pd.DataFrame(rows).to_csv(index=False))
        print(f"{name}: {1e3 * row['seconds']:.1f} ms a step, {row['tokens_per_second']:,.0f} real "
              f"tokens/s, loss {row['loss_first']:.3f} to {row['loss_last']:.3f}, "
              f"compiled in {row['compile_seconds']:.0f} s, "
              f"all in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
