"""The workshop of the series: batches, loss, optimizer step, loop, log and checkpoints.

Notebook 03 shows these functions and explains them, and 08 compiles the same step for a TPU.
Letters in shape comments: M micro-batches, B rows, T tokens, D embedding, V vocabulary, K trained
positions of a row. A *tree* is anything that `jax.tree.map` can walk: nested containers of arrays.
"""

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import flax
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pandas as pd
from etils import epath
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from helpers import chat, gemma, remote, track, weights
from helpers.gemma import LESS_AT_ONCE, chip_of_mesh, gib
from helpers.packing import COLUMNS, check_data
from helpers.records import OLDER, DataMeta, Recipe
from helpers.run import (
    DamagedError, UserError, clock, damaged, damaged_notes, digest, phase, run_dir, same_size,
    write_json, write_text)
from helpers.run import size as size_of_run
from tables.settings import setting
from tables.stored import PLAIN
from tables.texts import json_lines

Tree = Any  # containers of arrays, as `jax.tree.map` walks them

# ── What a run starts with ──


@dataclass(frozen=True)
class Settings:
    """What 03 trains and how. The defaults are for the 31B, and most are a published recipe's."""

    rank: int = setting(64, "r, the numbers between A and B")
    alpha: float = setting(64.0, "α: the adapter's output is scaled by α / r")
    targets: str = setting(gemma.TARGETS, "a pattern of the modules with adapters")
    partial: bool = setting(False, "True: some matrices are left out on purpose")
    learning_rate: float = setting(1e-4, "at its peak")
    warmup_steps: int = setting(100, "from zero to the peak")
    weight_decay: float = setting(0.001, "of AdamW: pulls the adapters toward zero")
    max_grad_norm: float = setting(1.0, "a step's gradient is clipped to it")
    rows_per_step: int = setting(2, "packed rows that change the adapters together")
    rows_per_device: int = setting(2, "packed rows at once, for each group of chips (section 2)")
    epochs: float = setting(1.0, "how often each row is used")
    max_steps: int = setting(0, "0: all; else the schedule is shorter")
    dtype: str = setting("bfloat16", "the numbers that it computes with; adapters are float32")
    base_dtype: str = setting("", "int8, nf4: how the frozen base is stored; empty: as dtype")
    int8_products: bool = setting(False, "True: an int8 base is multiplied in int8, too (11)")
    mesh: tuple = setting((), "(fsdp, tp); empty: as much tp as the heads allow")
    remat: str = setting("NONE", "BLOCK, DECODER: what the backward pass computes again")
    attention_block: int = setting(1_024, "tokens whose attention is computed at once (section 3)")
    log_every: int = setting(10, "steps between two lines")
    validate_every: int = setting(100, "steps")
    validation_rows: int = setting(64, "held-out rows of a validation")
    checkpoint_every: int = setting(100, "steps")
    checkpoints_kept: int = setting(3, "the newest")
    checkpoints: str = setting("", "gs://... for several hosts; empty: below RUN_DIR")
    answer_tokens: int = setting(512, "of the answers shown before and after")
    fresh: bool = setting(False, "True throws this run's checkpoints and log away")
    seed: int = setting(42, "for A's random start and for the order of the rows")


def from_environment() -> dict[str, Any]:
    """{name of a setting: value} for what the variables MAX_STEPS and CHECKPOINTS change.

    `scripts/train.sh` and `first_hour.sh` set these variables, because they don't edit a page. If a
    variable is unset or empty, its setting keeps what the page says.

    Raises:
      UserError: MAX_STEPS isn't a number of steps.
    """
    changes: dict[str, Any] = {}
    steps = os.environ.get("MAX_STEPS", "").strip()
    if steps and not steps.isdecimal():
        raise UserError(f"MAX_STEPS={steps} isn't a number of steps. Unset it, or set it to "
                        "one, such as 20.")
    if steps:
        changes["max_steps"] = int(steps)

    checkpoints = os.environ.get("CHECKPOINTS", "").strip()
    if checkpoints:
        changes["checkpoints"] = checkpoints
    return changes


def what_02_left() -> tuple[Path, DataMeta, Path, Any]:
    """Check what notebook 02 wrote, and fetch the base model that its data was made for.

    You don't choose the base model here. The tokens in `data/` belong to one tokenizer and one chat
    template, so the data decides which model it can train.

    Returns:
      (folder of the data, its `DataMeta`, folder of the base model, tokenizer).

    Raises:
      UserError: a file is missing or changed, or the base model has another chat template now; or
        the losses can't go where TRACK asks for (noticed now, not after the base is loaded).
    """
    track.check_login(verify=True)
    data = run_dir("data")
    meta = check_data(data)  # every byte is what 02 wrote
    same_size(meta.size, "02_data.py")
    with phase(f"base model {meta.base_path}"):
        base = remote.stage(meta.base_path)
    tokenizer = chat.load_tokenizer(base)
    if chat.template_sha256(tokenizer) != meta.template_sha256:
        raise UserError("The base model's chat template changed: these rows were made by another "
                        "tokenizer. Run 02_data.py again.")
    return data, meta, base, tokenizer


def keep_compilations(checkpoints: str = "") -> None:
    """Let JAX keep its compiled programs on a disk or in a bucket: a restart then compiles nothing.

    They go to `JAX_COMPILATION_CACHE_DIR` if that's set, else to `jax_cache/` in the run directory.

    Args:
      checkpoints: where the checkpoints will go, if that's a gs:// address.

    Raises:
      UserError: we may not write to one of the two addresses, and it's better to know that before
        hours of work are to be saved there; or several hosts have no place that all of them reach.
    """
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not cache:
        cache = str(run_dir("jax_cache").resolve())
    jax.config.update("jax_compilation_cache_dir", cache)

    for address in (checkpoints, cache):
        if "://" in address:
            remote.check_writable(address)
    if jax.process_count() > 1 and not checkpoints:
        raise UserError("several hosts write one checkpoint: set CHECKPOINTS to a place that "
                        "all of them reach, such as gs://bucket/run/checkpoints.")


# ── Batches ──


ROWS = PartitionSpec(None, "fsdp")  # of a batch: split over the mesh


@flax.struct.dataclass
class Batch:
    """The packed rows of one optimizer step."""

    tokens: jax.Array       # [M, B, T] int32
    loss_mask: jax.Array    # [M, B, T] bool, True where the token is to be predicted
    segment_ids: jax.Array  # [M, B, T] int32, 1, 2, ... per example of a row, 0 is padding
    positions: jax.Array    # [M, B, T] int32, from 0 in every example


class Rows(Protocol):
    """What Grain reads from: it asks for a row by its number and gets a `Batch` of [T] arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Batch: ...


class PackedRows:
    """The rows that notebook 02 wrote, memory-mapped: `rows[i]` is a `Batch` of [T] arrays.

    `arrays` holds the whole columns: {field of `Batch`: array [rows, T]}.
    """

    def __init__(self, folder: str | Path) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        folder = Path(folder)
        for field in COLUMNS:
            file = folder / f"{field}.npy"
            self.arrays[field] = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def __getitem__(self, row: int) -> Batch:
        columns = {}
        for field, array in self.arrays.items():
            columns[field] = np.asarray(array[row])
        return Batch(**columns)


def micro_batches_of(cfg: Settings, fsdp: int) -> tuple[int, int]:
    """How a step's rows are split into micro-batches, on a mesh that has `fsdp` parts of rows.

    A step needs at least one micro-batch. If a micro-batch has more rows than `rows_per_step`, the
    step gets larger than you asked for, and a printed line says so.

    Returns:
      (micro-batches of a step, rows of a micro-batch).

    Raises:
      UserError: `rows_per_step` is larger than a micro-batch, but isn't a multiple of its rows.
    """
    micro_rows = cfg.rows_per_device * fsdp
    if cfg.rows_per_step < micro_rows:
        print(f"rows_per_step is {cfg.rows_per_step}; here a step has at least {micro_rows}")
        return 1, micro_rows

    micro_batches, remainder = divmod(cfg.rows_per_step, micro_rows)
    if remainder:
        raise UserError(f"rows_per_step={cfg.rows_per_step} is no multiple of the {micro_rows} "
                        "rows of a micro-batch (rows_per_device on each part of fsdp).")
    return micro_batches, micro_rows


def make_dataset(
    rows: Rows, micro_batches: int, micro_rows: int, seed: int
) -> grain.IterDataset:
    """An endless, shuffled stream of batches [M, B, T], one for each step. It can be resumed."""
    dataset = grain.MapDataset.source(rows)
    dataset = dataset.seed(seed).shuffle().repeat()
    # An endless stream has no remainder, so nothing is dropped.
    dataset = dataset.batch(micro_rows, drop_remainder=True)
    dataset = dataset.batch(micro_batches, drop_remainder=True)
    return dataset.to_iter_dataset()


def validation_batch(rows: Rows, count: int, micro_rows: int) -> Batch:
    """The first `count` held-out rows as a batch [M, B, T].

    Empty rows, which train nothing, fill the last micro-batch up.
    """
    taken = min(count, len(rows))
    chosen = [rows[number] for number in range(taken)]
    empty_row = jax.tree.map(np.zeros_like, chosen[0])
    missing = -taken % micro_rows
    chosen += [empty_row] * missing

    def stack(*columns: np.ndarray) -> np.ndarray:
        """M * B columns [T] -> [M, B, T]."""
        row_length = columns[0].shape[-1]
        stacked = np.stack(columns)
        return stacked.reshape(-1, micro_rows, row_length)

    return jax.tree.map(stack, *chosen)


def to_mesh(batch: Batch, mesh: Mesh) -> Batch:
    """A batch [M, B, T] as global arrays, with its rows B split over the mesh's `fsdp`.

    Every host reads the whole batch (a few hundred kilobytes) and hands its devices the rows that
    the mesh gives them. Which rows these are depends on how the slice is wired, so we ask JAX.
    """
    sharding = NamedSharding(mesh, ROWS)

    def spread(array: np.ndarray) -> jax.Array:
        """A column [M, B, T], split."""
        def piece(index: tuple[slice, ...]) -> np.ndarray:
            return array[index]
        return jax.make_array_from_callback(array.shape, sharding, piece)

    return jax.tree.map(spread, batch)


def batch_of(rows: dict[str, np.ndarray], picked: np.ndarray, mesh: Mesh) -> Batch:
    """Some packed rows as a batch of one piece, [1, B, T], on a mesh.

    Args:
      rows: the four arrays of `packing.pack_arrays`.
      picked: the numbers of the B rows to take.
      mesh: as for `to_mesh`.
    """
    columns = {}
    for name, array in rows.items():
        columns[name] = array[None, picked]
    batch = Batch(**columns)
    return to_mesh(batch, mesh)


def abstract_batch(shape: tuple[int, int, int], mesh: Mesh) -> Batch:
    """What `to_mesh` makes of a batch of `shape` [M, B, T]: types and shardings, but no numbers."""
    sharding = NamedSharding(mesh, ROWS)
    columns = {}
    for field, dtype in COLUMNS.items():
        columns[field] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return Batch(**columns)


# ── Loss ──


def packed_mask(segment_ids: jax.Array) -> jax.Array:
    """Causal attention inside each example; padding sees padding. [B, T] -> [B, T, T]"""
    same_example = segment_ids[:, :, None] == segment_ids[:, None, :]
    return jnp.tril(same_example)


@contextlib.contextmanager
def without_output_matrix(model: nnx.Module) -> Iterator[None]:
    """Inside the block, calling the model returns what its last norm returns: no logits.

    Tunix has no option for that. So the output matrix is replaced by a function that does nothing,
    and the cap on the logits is off. Both are as before after the block, also after an error.
    """
    config = model.config
    model.embedder.decode = lambda hidden: hidden
    model.config = replace(config, final_logit_softcap=None)
    try:
        yield
    finally:
        model.config = config
        del model.embedder.decode  # the class's own again


def hidden_states(model: nnx.Module, rows: Batch) -> jax.Array:
    """What the model would hand to its output matrix, in the model's dtype. [B, T, D]"""
    mask = packed_mask(rows.segment_ids)
    with without_output_matrix(model):
        hidden, _ = model(rows.tokens, rows.positions, None, mask)
    return hidden.astype(model.config.dtype)


class TokenLosses(NamedTuple):
    """The losses of each row's trained tokens. K is how many a row has at most."""

    loss: jax.Array    # [B, K] float32
    weight: jax.Array  # [B, K] int32, 0 where a row has fewer
    at: jax.Array      # [B, K] int32: the token at `at + 1` was predicted from position `at`


def cross_entropy(model: nnx.Module, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each trained token. [B, K] float32

    Args:
      model: its output matrix makes logits of hidden states.
      hidden: [B, K, D], from `hidden_states`.
      labels: [B, K], the tokens that they should predict.
    """
    with jax.named_scope("output_matrix"):
        logits = model.embedder.decode(hidden)  # [B, K, V]
        logits = logits.astype(jnp.float32)
        # A chip multiplies all rows by its slice of the vocabulary: none needs the whole matrix.
        by_vocabulary = (None, None, ("tp", "fsdp"))
        logits = gemma.shard(logits, by_vocabulary)

    cap = model.config.final_logit_softcap
    if cap is not None:  # Gemma keeps logits within ±cap
        logits = jnp.tanh(logits / cap) * cap
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def chunk_of(row_length: int) -> int:
    """Positions of a row whose logits may exist at once: half a row's, 1,024 at least."""
    return max(1_024, row_length // 2)


def in_chunks(function: Callable[..., jax.Array], most: int, *arrays: jax.Array) -> jax.Array:
    """Call `function` on chunks of arrays, and join what it returns.

    Logits are the largest arrays of a step. Here a chunk's logits are forgotten as soon as its
    losses are known, and computed again for the gradient. So answers that fill whole rows need no
    more memory than answers that fill half of them. If K is one chunk, nothing is computed twice.

    Args:
      function: arrays [B, K, ...] -> [B, K], for any K.
      most: positions K that it may see at once.
      *arrays: [B, K, ...], what it's called on.

    Returns:
      [B, K], as if it had been called once.
    """
    rows, positions = arrays[0].shape[:2]
    chunks = math.ceil(positions / most)
    if chunks == 1:
        return function(*arrays)

    times_128 = math.ceil(positions / (chunks * 128))  # a TPU has 128 lanes
    size = times_128 * 128  # of a chunk
    missing = chunks * size - positions

    def cut(array: jax.Array) -> jax.Array:
        """[B, K, ...] -> [chunks, B, size, ...], with zeros behind the last position."""
        padding = [(0, 0)] * array.ndim
        padding[1] = (0, missing)
        padded = jnp.pad(array, padding)
        further = array.shape[2:]
        pieces = padded.reshape(rows, chunks, size, *further)
        return jnp.moveaxis(pieces, 1, 0)

    @jax.checkpoint
    def of_chunk(pieces: tuple[jax.Array, ...]) -> jax.Array:
        return function(*pieces)

    all_pieces = tuple(cut(array) for array in arrays)
    results = jax.lax.map(of_chunk, all_pieces)  # [chunks, B, size]
    by_row = jnp.moveaxis(results, 0, 1)
    joined = by_row.reshape(rows, -1)
    return joined[:, :positions]


def token_losses(model: nnx.Module, rows: Batch, capacity: int) -> TokenLosses:
    """Cross-entropy of the trained tokens, at most `capacity` (K) of a row."""
    with jax.named_scope("hidden_states"):  # a name in profiles; the program stays the same
        hidden = hidden_states(model, rows)

    with jax.named_scope("loss"):
        # The token at t + 1 is predicted at t. top_k of 0s and 1s lists the places of the 1s first.
        is_trained = rows.loss_mask[:, 1:].astype(jnp.int32)
        weight, at = jax.lax.top_k(is_trained, capacity)
        labels = jnp.take_along_axis(rows.tokens, at + 1, axis=1)
        hidden = jnp.take_along_axis(hidden, at[..., None], axis=1)  # [B, K, D]
        most = chunk_of(rows.tokens.shape[1])
        loss_of = functools.partial(cross_entropy, model)
        loss = in_chunks(loss_of, most, hidden, labels)
    return TokenLosses(loss, weight, at)


def capacity_of(*parts: PackedRows) -> int:
    """The `capacity` that cuts nothing off: a row's trained tokens at most, rounded up to 128."""
    most = 0
    for rows in parts:
        trained = rows.arrays["loss_mask"].sum(-1)
        most_of_part = int(trained.max())
        most = max(most, most_of_part)
    rounded_up = math.ceil(most / 128) * 128
    tokens = parts[0].arrays["tokens"]
    row_length = tokens.shape[-1]
    return min(rounded_up, row_length - 1)  # the first token of a row is never predicted


SumAndCount = tuple[jax.Array, jax.Array]  # of losses, and of the tokens that they belong to
Loss = Callable[[nnx.Module, Batch], SumAndCount]


def make_loss(capacity: int) -> Loss:
    """(model, rows) -> (summed cross-entropy, trained tokens); at most `capacity` tokens a row."""
    def loss_fn(model: nnx.Module, rows: Batch) -> SumAndCount:
        loss, weight, _ = token_losses(model, rows, capacity)
        total = jnp.sum(loss * weight)
        count = jnp.sum(weight)
        return total, count
    return loss_fn


# ── Optimizer and step ──


def steps_of(cfg: Settings, rows: int, rows_per_step: int) -> int:
    """The optimizer steps of a run on so many packed rows: `epochs`, or `max_steps` if fewer."""
    steps_of_epochs = round(cfg.epochs * rows / rows_per_step)
    steps = max(1, steps_of_epochs)
    if cfg.max_steps:
        return min(steps, cfg.max_steps)
    return steps


def steps_in_words(cfg: Settings, steps: int) -> str:
    """How long a run is, and a warning if it's too short to teach anything."""
    told = f"{steps} steps, {cfg.epochs:g} epochs"
    if steps < 20 and not cfg.max_steps:
        told += "; so few teach next to nothing: set epochs higher in section 1"
    return told


def make_schedule(cfg: Settings, steps: int) -> optax.Schedule:
    """step -> learning rate: it warms up from zero, then falls along a cosine to zero."""
    warmup = min(cfg.warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(0.0, cfg.learning_rate, warmup, steps)


# Another optimizer goes here, with its arguments: functools.partial(optax.adamw, b2=0.95). It's in
# the recipe, by `optimizer_name`, so a run never goes on from another one's checkpoint.
OPTIMIZER: Callable[..., optax.GradientTransformation] = optax.adamw


def optimizer_name() -> str:
    """What the recipe calls `OPTIMIZER`: "adamw", or "adamw(b2=0.95)" if it's a `partial`.

    Raises:
      UserError: it has no name by which another run could tell it from others.
    """
    function = OPTIMIZER
    arguments = ""
    if isinstance(OPTIMIZER, functools.partial):
        function = OPTIMIZER.func
        in_order = sorted(OPTIMIZER.keywords.items())
        words = [f"{name}={value!r}" for name, value in in_order]
        arguments = f"({', '.join(words)})"

    name = getattr(function, "__name__", "<lambda>")
    if name == "<lambda>":
        raise UserError("OPTIMIZER (in helpers/train.py) is part of a run's recipe, so it needs a "
                        "name. Use a function such as optax.lion, or "
                        "functools.partial(optax.adamw, b2=0.95).")
    return name + arguments


def make_optimizer(
    schedule: optax.Schedule, weight_decay: float, max_grad_norm: float
) -> optax.GradientTransformation:
    """Clip the whole gradient of a step, then `OPTIMIZER`, which is AdamW.

    The learning rate stands in the optimizer's state, where the log reads it.
    """
    def clipped(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        clip = optax.clip_by_global_norm(max_grad_norm)
        rule = OPTIMIZER(learning_rate, weight_decay=weight_decay)
        return optax.chain(clip, rule)

    with_readable_rate = optax.inject_hyperparams(clipped)
    return with_readable_rate(learning_rate=schedule)


MicroLoss = Callable[[nnx.State, nnx.State, Batch], SumAndCount]


def make_micro_loss(model: nnx.Module, loss_fn: Loss) -> MicroLoss:
    """(adapters, frozen, rows) -> (loss sum, tokens), computed in the model's own dtype."""
    graph = nnx.graphdef(model)
    dtype = model.config.dtype

    def micro_loss(adapters: nnx.State, frozen: nnx.State, rows: Batch) -> SumAndCount:
        in_dtype = jax.tree.map(lambda array: array.astype(dtype), adapters)
        whole_model = nnx.merge(graph, in_dtype, frozen)
        return loss_fn(whole_model, rows)
    return micro_loss


Metrics = dict[str, jax.Array]  # of a step: loss, grad_norm, real_tokens
TrainStep = Callable[[nnx.State, Tree, nnx.State, Batch], tuple[nnx.State, Tree, Metrics]]
Total = tuple[SumAndCount, nnx.State]  # of micro-batches: losses and tokens, and gradients


def make_train_step(
    model: nnx.Module, optimizer: optax.GradientTransformation, loss_fn: Loss
) -> TrainStep:
    """(adapters, opt_state, frozen, batch) -> (adapters, opt_state, metrics)."""
    micro_loss = make_micro_loss(model, loss_fn)
    loss_and_grads = jax.value_and_grad(micro_loss, has_aux=True)

    def train_step(
        adapters: nnx.State, opt_state: Tree, frozen: nnx.State, batch: Batch
    ) -> tuple[nnx.State, Tree, Metrics]:
        def add_micro_batch(total: Total, rows: Batch) -> tuple[Total, None]:
            part = loss_and_grads(adapters, frozen, rows)
            return jax.tree.map(jnp.add, total, part), None

        no_loss = (0.0, 0)
        no_grads = jax.tree.map(jnp.zeros_like, adapters)
        total, _ = jax.lax.scan(add_micro_batch, (no_loss, no_grads), batch)
        (loss, tokens), grads = total
        grads = jax.tree.map(lambda array: array / tokens, grads)  # once, for the whole step

        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, opt_state, adapters)
            changed = optax.apply_updates(adapters, updates)
        metrics = {
            "loss": loss / tokens,
            "grad_norm": optax.global_norm(grads),
            "real_tokens": jnp.sum(batch.segment_ids > 0),
        }
        return changed, opt_state, metrics
    return train_step


EvalStep = Callable[[nnx.State, nnx.State, Batch], jax.Array]


def make_eval_step(model: nnx.Module, loss_fn: Loss) -> EvalStep:
    """(adapters, frozen, batch) -> mean loss of all trained tokens of the batch."""
    micro_loss = make_micro_loss(model, loss_fn)

    def eval_step(adapters: nnx.State, frozen: nnx.State, batch: Batch) -> jax.Array:
        def of_micro_batch(rows: Batch) -> SumAndCount:
            return micro_loss(adapters, frozen, rows)

        losses, tokens = jax.lax.map(of_micro_batch, batch)  # [M] each
        total = jnp.sum(losses)
        count = jnp.sum(tokens)
        return total / count
    return eval_step


# For the TPU v5p's compiler: a product may use 32 MiB of on-chip memory, not 16 (08, section 5).
LARGE_TILES = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
# Without tensor parallelism, whole weights are gathered while the chip multiplies (08, section 6).
GATHERS_BESIDE = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_tpu_all_gather_collective_matmul_mode": "none",
}


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """The options that a TPU's compiler gets for the step on this mesh; None if it gets none."""
    chip = chip_of_mesh(mesh)
    options: dict[str, Any] = {}
    if chip == "v5p":
        options |= LARGE_TILES
    only_fsdp = mesh.size > 1 and mesh.shape["fsdp"] == mesh.size
    if chip in ("v5e", "v5p", "v6e") and only_fsdp:
        options |= GATHERS_BESIDE
    if _is_short_of_memory(mesh):
        options |= LESS_AT_ONCE
    if not options:
        return None
    return options


def _is_short_of_memory(mesh: Mesh) -> bool:
    """Does a mesh have chips so small that its compiler gets `LESS_AT_ONCE`?"""
    is_small = chip_of_mesh(mesh) == "v5e"
    return is_small and mesh.shape["fsdp"] > 1 and mesh.shape["tp"] > 1


def jit_eval_step(model: nnx.Module, loss_fn: Loss, mesh: Mesh) -> Any:
    """`make_eval_step`, to be compiled: the program that 03 runs and that 08 compiles for a TPU."""
    eval_step = make_eval_step(model, loss_fn)
    options = LESS_AT_ONCE if _is_short_of_memory(mesh) else None
    return jax.jit(eval_step, compiler_options=options)


def _shardings_of(tree: Tree) -> Tree:
    """The sharding of each array of a tree, real or abstract."""
    return jax.tree.map(lambda array: array.sharding, tree)


def jit_optimizer_state(optimizer: optax.GradientTransformation, shapes: Tree) -> Any:
    """adapters -> the optimizer's first state, to be compiled.

    Args:
      optimizer: from `make_optimizer`.
      shapes: the state without its numbers. It says on which sharding each array has to lie.
    """
    shardings = _shardings_of(shapes)
    return jax.jit(optimizer.init, out_shardings=shardings)


def jit_train_step(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    loss_fn: Loss,
    state: "State",
    options: dict[str, Any] | None = None,
) -> Any:
    """`make_train_step`, to be compiled: the program that 03 runs and that 08 compiles for a TPU.

    The old adapters and the old optimizer state are donated, so that the new ones take their
    memory. The new ones get the old ones' shardings, so that step two is the program of step one.

    Args:
      model: with adapters, real or abstract.
      optimizer: from `make_optimizer`.
      loss_fn: from `make_loss`.
      state: from `start`, for its shardings.
      options: for the compiler. They're the same if it's compiled ahead of time, or when called.
    """
    step = make_train_step(model, optimizer, loss_fn)
    of_adapters = _shardings_of(state.adapters)
    of_opt_state = _shardings_of(state.opt_state)
    new_shardings = (of_adapters, of_opt_state, None)
    return jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=new_shardings,
        compiler_options=options,
    )


def lower_step(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    loss_fn: Loss,
    mesh: Mesh,
    shape: tuple[int, int, int],
) -> jax.stages.Lowered:
    """The step of an abstract model and a batch of `shape` [M, B, T], lowered: not yet compiled.

    Nothing gets memory: model, adapters, optimizer and batch are shapes, types and shardings. A
    TPU's compiler will get the options that `compiler_options` returns.
    """
    state, frozen = start(model, optimizer, mesh)
    options = compiler_options(mesh)
    step = jit_train_step(model, optimizer, loss_fn, state, options)
    batch = abstract_batch(shape, mesh)
    with mesh:
        return step.lower(state.adapters, state.opt_state, frozen, batch)


Compiled = tuple[jax.stages.Compiled, float]  # a program, and the seconds that compiling it took


def compile_ahead(lowered: jax.stages.Lowered) -> Future[Compiled]:
    """Compile in a thread. The future gives a `Compiled`, or raises what the compiler raised."""
    def work() -> Compiled:
        began = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - began
        return compiled, seconds

    one_thread = ThreadPoolExecutor(1)
    return one_thread.submit(work)


# ── Memory ──


def memory_of(compiled: jax.stages.Compiled, state: "State", frozen: Tree) -> dict[str, float]:
    """{what: GiB per device} that a compiled step needs.

    We count the arguments; the rest is the compiler's own analysis. Temporaries are the activations
    of one micro-batch and the gradients. Fresh outputs are those that don't take the place of a
    donated array.

    Raises:
      UserError: the step needs more memory than the device has.
    """
    analysis = compiled.memory_analysis()
    temporary = analysis.temp_size_in_bytes
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    held = {
        "base weights": gib(frozen),
        "adapters": gib(state.adapters),
        "Adam's moments": gib(state.opt_state),
        "temporaries of the step": temporary / 2**30,
        "fresh outputs": fresh / 2**30,
    }

    needed = sum(held.values())
    stats = _memory_stats()
    limit = stats.get("bytes_limit", 0) / 2**30
    if limit and needed > limit:
        raise UserError(f"this does not fit: {needed:.1f} GiB per device of {limit:.1f}. "
                        f"{LESS_MEMORY}")
    return held


def _memory_stats() -> dict[str, int]:
    """What the first device says about its memory, in bytes; an empty dict on a CPU."""
    first_device = jax.local_devices()[0]
    stats = first_device.memory_stats()
    if not stats:
        return {}
    return stats


LESS_MEMORY = 'Lower rows_per_device, set remat="DECODER", or pack shorter rows in 02.'


@contextlib.contextmanager
def within_memory() -> Iterator[None]:
    """If the compiler or the allocator runs out of memory, say so in two lines that name the fix.

    Raises:
      UserError: JAX said `RESOURCE_EXHAUSTED`. The text has the numbers that came with it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        _, exhausted, details = str(error).partition("RESOURCE_EXHAUSTED")
        if not exhausted:
            raise
        first_line = details.strip(": ").splitlines()[0]
        raise UserError(f"this does not fit: {first_line[:300]}\n{LESS_MEMORY}") from None


def machine_facts(mesh: Mesh, held: dict[str, float]) -> dict[str, Any]:
    """What this machine is, and what its memory holds, for `machine.json`.

    Args:
      mesh: that the model trains on.
      held: from `memory_of`.
    """
    stats = _memory_stats()
    first_device = jax.devices()[0]
    return {
        "device_kind": first_device.device_kind,
        "devices": jax.device_count(),
        "hosts": jax.process_count(),
        "mesh": list(mesh.devices.shape),
        "held_gib_per_device": float(sum(held.values())),
        "bytes_in_use": stats.get("bytes_in_use"),
        "peak_bytes_in_use": stats.get("peak_bytes_in_use"),
        "bytes_limit": stats.get("bytes_limit"),
    }


def write_machine(mesh: Mesh, held: dict[str, float], **facts: Any) -> None:
    """Write `machine.json`: `machine_facts`, and what else the page knows of this run."""
    path = run_dir("train", "machine.json")
    of_machine = machine_facts(mesh, held)
    write_json(path, of_machine | facts)


# ── State and checkpoints ──


@dataclass(frozen=True)
class State:
    """All that changes while a model is trained, and all that a checkpoint has to hold."""

    step: int             # optimizer steps done
    adapters: nnx.State   # tree of float32 LoRA matrices
    opt_state: Any        # Optax's: Adam's two moments for every adapter, counters
    data: dict[str, Any] | None = None  # Grain's position in the batches; None: at the beginning


def start(
    model: nnx.Module, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[State, nnx.State]:
    """(the `State` before the first step, the frozen weights) of a model with adapters.

    An abstract model gives an abstract state. All shardings are canonical (`gemma.on_mesh`).
    """
    _, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    shapes = jax.eval_shape(optimizer.init, adapters)
    opt_state = gemma.on_mesh(shapes, mesh)
    if not gemma.is_abstract(adapters):
        first_state = jit_optimizer_state(optimizer, opt_state)
        opt_state = first_state(adapters)
    return State(0, adapters, opt_state), frozen


# However badly a checkpoint is damaged, at least one of these names is left in it. `save` writes
# the first two, and the others are Orbax's own notes.
MADE_BY_ORBAX = {"model_params", "optimizer_state", "_CHECKPOINT_METADATA", "commit_success.txt"}


def open_checkpoints(
    folder: str | os.PathLike[str], every: int, last: int, keep: int = 3
) -> ocp.CheckpointManager:
    """Orbax's manager of a folder of checkpoints.

    Orbax always saves after the first step; this one also saves every few steps and after the last.

    Args:
      folder: local or gs://; it's made if it's missing.
      every: steps between two checkpoints.
      last: number of the last step.
      keep: so many of the newest checkpoints stay.

    Raises:
      UserError: see `damaged_notes`.
    """
    if "://" not in str(folder):  # Orbax wants an absolute path, and says so at the first save
        folder = Path(folder).resolve()
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=every,
        save_on_steps=[last],
        max_to_keep=keep,
        create=True,
    )
    with damaged_notes(folder):
        return ocp.CheckpointManager(folder, options=options)


def throw_away(folder: str | os.PathLike[str]) -> None:
    """Delete a folder of checkpoints, local or gs://, if nothing else is in it.

    With several hosts the first one deletes it, and all of them wait until that's done.

    Raises:
      UserError: something else is in the folder, so it isn't ours. Nothing was deleted.
    """
    path = epath.Path(folder)
    if path.exists():
        for entry in sorted(path.iterdir()):
            _only_checkpoint(entry)
    _wait_for_all_hosts("the old checkpoints were looked at")
    if path.exists() and jax.process_index() == 0:
        path.rmtree()
    _wait_for_all_hosts("the old checkpoints are gone")


def _wait_for_all_hosts(what: str) -> None:
    """Go on when all hosts have come here. `what` names the place in messages."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils
        multihost_utils.sync_global_devices(what)


def _only_checkpoint(path: epath.Path) -> None:
    """Refuse a file or folder that Orbax can't have made, because we may not delete or replace it.

    Orbax makes a folder for each step. It may be finished, torn by a disk, or never finished.

    Raises:
      UserError: Orbax can't have made it.
    """
    if not _may_be_checkpoint(path):
        raise UserError(f"{path} isn't a checkpoint, so its folder isn't ours to change. Move it "
                        "away, or set CHECKPOINTS (or RUN_DIR) to another folder.")


def _may_be_checkpoint(path: epath.Path) -> bool:
    """Can Orbax have made this file or folder?"""
    step, unfinished, _ = path.name.partition(".orbax-checkpoint-tmp")
    is_numbered = step.isdecimal()
    if not is_numbered or not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    if unfinished or not names:
        return True
    return not names.isdisjoint(MADE_BY_ORBAX)


@jax.jit
def word_sum(array: jax.Array) -> jax.Array:
    """One uint32 that changes if any single word of an array does, on whatever mesh the array lies.

    Each word is mixed with its place, and the results are added modulo 2^32, so the order of the
    sum doesn't matter. The mixing is the last part of MurmurHash3
    (https://github.com/aappleby/smhasher), which maps 32 bits to 32 bits one to one.
    """
    unsigned_by_size = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    unsigned = unsigned_by_size[array.dtype.itemsize]
    if array.dtype == bool:
        words = array.astype(unsigned)
    else:
        words = jax.lax.bitcast_convert_type(array, unsigned)

    place = jnp.zeros(array.shape, jnp.uint32)  # a word's number, counted through all axes
    for axis, length in enumerate(array.shape):
        place *= length
        along_axis = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        place += along_axis

    words = words.astype(jnp.uint32)
    mixed = words + place * jnp.uint32(0x9E3779B1)
    mixed ^= mixed >> 16
    mixed *= jnp.uint32(0x85EBCA6B)
    mixed ^= mixed >> 13
    mixed *= jnp.uint32(0xC2B2AE35)
    mixed ^= mixed >> 16
    return jnp.sum(mixed, dtype=jnp.uint32)


def digests_of(state: State, recipe: dict[str, Any]) -> dict[str, str]:
    """{part of a checkpoint: hexadecimal digest}, to compare with when it's read again.

    The devices add up their own arrays, so only a number for each array travels to the host.
    """
    return {
        "adapters": _digest_of_arrays(state.adapters),
        "optimizer state": _digest_of_arrays(state.opt_state),
        "position in the data": digest(state.data),
        "recipe": digest(recipe),
    }


def _digest_of_arrays(tree: Tree) -> str:
    """One hexadecimal digest of all arrays of a tree."""
    on_devices = [word_sum(array) for array in jax.tree.leaves(tree)]  # all started, none awaited
    sums = [int(total) for total in on_devices]
    return digest(sums)


def save(manager: ocp.CheckpointManager, state: State, recipe: dict[str, Any]) -> None:
    """Write a checkpoint if one is due after this step; the next steps run meanwhile."""
    if not manager.should_save(state.step):
        return
    parts = ocp.args.Composite(
        model_params=ocp.args.PyTreeSave(state.adapters),
        optimizer_state=ocp.args.PyTreeSave(state.opt_state),
        data=ocp.args.JsonSave(state.data),
    )
    notes = {"recipe": recipe, "digests": digests_of(state, recipe)}
    manager.save(state.step, custom_metadata=notes, args=parts)


DECIDES = (
    "rank",
    "alpha",
    "targets",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "dtype",
    "base_dtype",
    "int8_products",
    "seed",
)


def recipe_of(cfg: Settings) -> dict[str, Any]:
    """The settings that decide what is trained. A checkpoint is stored with them."""
    recipe: dict[str, Any] = {"optimizer": optimizer_name()}
    for name in DECIDES:
        recipe[name] = getattr(cfg, name)
    if recipe["base_dtype"] in PLAIN:  # two words for a base that isn't quantized
        recipe["base_dtype"] = ""
    return recipe


def recipe_of_run(
    cfg: Settings,
    meta: DataMeta,
    base: Path,
    steps: int,
    rows_per_step: int,
) -> dict[str, Any]:
    """`recipe_of`, and what else decides a run: the base, the data, its template, the schedule."""
    return recipe_of(cfg) | {
        "base_model": meta.base_model,
        "base_sha256": weights.fingerprint(base),
        "steps": steps,
        "rows_per_step": rows_per_step,
        "data_sha256": meta.data_sha256,
        "template_sha256": meta.template_sha256,
    }


def write_recipe(
    recipe: dict[str, Any],
    cfg: Settings,
    meta: DataMeta,
    mesh: Mesh,
    model: nnx.Module,
    state: State,
    log: pd.DataFrame,
) -> None:
    """Write `recipe.json`: all that 04 and later pages need to know of a training.

    Args:
      recipe: from `recipe_of_run`.
      cfg: 03's settings.
      meta: of the data.
      mesh: that the model was trained on.
      model: with adapters, real or abstract.
      state: the last one.
      log: from `read_log`.
    """
    pairs = gemma.adapted_modules(model)
    trainable = 0
    for pair in pairs.values():
        a, b = pair["a"], pair["b"]
        trainable += a.size + b.size
    validations = log.dropna(subset="val_loss")
    losses = validations.set_index("step").val_loss
    examples_per_step = recipe["rows_per_step"] * meta.examples_per_row
    parts_of_mesh = {axis: int(parts) for axis, parts in mesh.shape.items()}
    Recipe(
        **recipe,
        size=size_of_run(),
        base_path=meta.base_path,
        adapter_dtype="float32",
        n_modules=len(pairs),
        trainable_parameters=trainable,
        partial=cfg.partial,
        mesh=parts_of_mesh,
        checkpoints=cfg.checkpoints or "train/checkpoints",
        final_step=state.step,
        epochs=cfg.epochs,
        system=meta.system,
        reasoning=meta.reasoning,
        val_loss_before=float(losses.get(0, np.nan)),
        val_loss_after=float(losses.iloc[-1]),
        examples_per_step=examples_per_step,
        adapter_sha256=adapters_sha256(state.adapters),
    ).save()


def restore(
    manager: ocp.CheckpointManager,
    state: State,
    recipe: dict[str, Any],
    before: int | None = None,
) -> State:
    """Go on from the newest checkpoint that's whole.

    A torn or changed checkpoint is named and left aside. Once an older one has been restored, the
    damaged one is removed, because its steps are about to be computed and saved again.

    Args:
      manager: from `open_checkpoints`.
      state: from `start`.
      recipe: from `recipe_of`, or more than that.
      before: only checkpoints of earlier steps count; None: all do.

    Returns:
      The checkpoint's `State`, with each array on the sharding that `state` has it on; `state`
      itself if there's no checkpoint. No array of `state` is changed.

    An error of another kind is a bug of ours or a full memory. Then nothing is removed.

    Raises:
      UserError: the checkpoint was trained by another recipe (the text says how they differ); or
        none of the checkpoints can be restored; or one of several hosts meets a damaged one; or a
        folder that isn't a checkpoint has a number as its name.
    """
    steps = sorted(manager.all_steps(), reverse=True)
    if before is not None:
        steps = [step for step in steps if step < before]
    folder = epath.Path(manager.directory)
    for step in steps:
        _only_checkpoint(folder / str(step))

    for place, step in enumerate(steps):
        try:
            restored = _restore_step(manager, step, state, recipe)
        except DamagedError as error:
            _leave_aside(manager, step, error)
        else:
            for newer in steps[:place]:
                manager.delete(newer)
            return restored

    if steps:
        raise UserError(f"none of the checkpoints {steps} in {manager.directory} can be restored. "
                        "Bring back a copy of one, or set fresh=True to start over.")
    return state


def checkpoints_of(cfg: Settings) -> epath.Path:
    """The folder of a run's checkpoints, in a bucket or below the run directory."""
    if cfg.checkpoints:
        return epath.Path(cfg.checkpoints)
    below_run = run_dir("train", "checkpoints")
    return epath.Path(below_run.resolve())


def begin_or_resume(
    cfg: Settings, state: State, recipe: dict[str, Any], steps: int
) -> tuple[ocp.CheckpointManager, State]:
    """Open the run's checkpoints, go on from the newest that's whole, and print where that is.

    Args:
      cfg: 03's settings; `fresh` throws old checkpoints away.
      state: from `start`.
      recipe: from `recipe_of_run`.
      steps: number of the last step.

    Raises:
      UserError: as `throw_away` and `restore`.
    """
    folder = checkpoints_of(cfg)
    if cfg.fresh:
        throw_away(folder)
    manager = open_checkpoints(folder, cfg.checkpoint_every, steps, cfg.checkpoints_kept)
    state = restore(manager, state, recipe)
    begin = "starting at step 0"
    if state.step:
        begin = f"resuming from step {state.step}"
    rest = ""
    if state.step == steps:
        rest = ", nothing left to train"
    print(f"{begin} of {steps}{rest}")
    return manager, state


def _leave_aside(manager: ocp.CheckpointManager, step: int, why: DamagedError) -> None:
    """Say that a checkpoint is damaged.

    Raises:
      UserError: several hosts are training. They all have to go on from the same step.
    """
    if jax.process_count() > 1:
        raise UserError(f"checkpoint {step} in {manager.directory} is damaged ({why}). "
                        "Delete it, and start all hosts again.") from why
    print(f"checkpoint {step} is damaged ({why}) and is left aside")
    silent = logging.CRITICAL + 1
    for name in ("asyncio", "concurrent.futures"):  # they'd print what the failed reads left behind
        logger = logging.getLogger(name)
        logger.setLevel(silent)


def _restore_step(
    manager: ocp.CheckpointManager, step: int, state: State, recipe: dict[str, Any]
) -> State:
    """The `State` of one checkpoint, with each array on the sharding that `state` has it on.

    Raises:
      UserError: it's whole, and was trained by another recipe.
      DamagedError: it's damaged.
    """
    saved_recipe, digests = _notes_of(manager, step)
    if digests and digest(saved_recipe) != digests.get("recipe"):
        raise DamagedError("its recipe isn't the one that was saved")
    _same_recipe(manager, step, saved_recipe, recipe)

    wanted = ocp.args.Composite(
        model_params=_on_shardings_of(state.adapters),
        optimizer_state=_on_shardings_of(state.opt_state),
        data=ocp.args.JsonRestore(),
    )
    with damaged():
        parts = manager.restore(step, args=wanted)
    restored = State(
        step=step,
        adapters=parts["model_params"],
        opt_state=parts["optimizer_state"],
        data=parts["data"],
    )
    _same_shapes(state.adapters, restored.adapters)
    _same_shapes(state.opt_state, restored.opt_state)
    if digests:
        for part, value in digests_of(restored, saved_recipe).items():
            if digests.get(part) != value:
                raise DamagedError(f"other bytes than were saved: {part}")
    return restored


def _notes_of(manager: ocp.CheckpointManager, step: int) -> tuple[dict, dict]:
    """(recipe, digests) that were saved with a checkpoint; earlier versions kept no digests.

    Raises:
      DamagedError: there are no such notes.
    """
    with damaged():
        notes = manager.metadata(step).custom_metadata
    if not isinstance(notes, dict):
        raise DamagedError("it has no notes")
    recipe = notes.get("recipe")
    digests = notes.get("digests", {})
    if not isinstance(recipe, dict) or not isinstance(digests, dict):
        raise DamagedError("its notes aren't what was saved")
    return recipe, digests


def _on_shardings_of(tree: Tree) -> ocp.args.PyTreeRestore:
    """What asks Orbax for a tree of these shapes, on the shardings that its arrays have."""
    plan = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.args.PyTreeRestore(item=tree, restore_args=plan)


def _same_recipe(
    manager: ocp.CheckpointManager, step: int, saved: dict[str, Any], recipe: dict[str, Any]
) -> None:
    """Refuse a checkpoint that another recipe trained.

    Raises:
      UserError: the settings that differ, with both values.
    """
    saved = OLDER | saved
    differences = []
    for key, value in recipe.items():
        saved_value = saved.get(key)
        if saved_value != value:
            there = _shown(saved_value)
            here = _shown(value)
            differences.append(f"{key}: {there} there, {here} here")
    if differences:
        listed = "; ".join(differences)
        raise UserError(f"{manager.directory} holds step {step} of another recipe: "
                        f"{listed}.\nSet fresh=True to throw it away, or another "
                        "RUN_DIR (and CHECKPOINTS, where it is set) to keep it.")


def _shown(value: Any) -> str:
    """A setting's value as a message shows it; an empty text would be invisible."""
    if value == "":
        return '""'
    return str(value)


def _same_shapes(expected: Tree, restored: Tree) -> None:
    """Refuse a tree whose arrays have other shapes or dtypes than expected.

    Raises:
      DamagedError: names the first array that differs.
    """
    expected_arrays = jax.tree.leaves(expected)
    restored_arrays = jax.tree.leaves(restored)
    for wanted, array in zip(expected_arrays, restored_arrays, strict=True):
        same_shape = array.shape == wanted.shape
        same_dtype = array.dtype == wanted.dtype
        if not same_shape or not same_dtype:
            raise DamagedError(f"an array is {array.dtype}{array.shape}, not "
                               f"{wanted.dtype}{wanted.shape}")


def adapters_sha256(adapters: Tree) -> str:
    """`weights.adapters_digest` of a state's adapters, even if several hosts hold parts of them."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils
        adapters = multihost_utils.process_allgather(adapters, tiled=True)
    return weights.adapters_digest(adapters)


# ── Log and loop ──


STEP_FIELDS = ("loss", "learning_rate", "grad_norm", "seconds", "real_tokens")


def _is_record(value: Any) -> bool:
    """Is a value from `log.jsonl` what `StepLog` writes of a step or of a validation?"""
    if not isinstance(value, dict):
        return False
    if type(value.get("step")) is not int:  # a bool is an int for isinstance
        return False
    for number in value.values():
        if type(number) not in (int, float):
            return False
    fields = set(value) - {"step"}
    return fields in ({"val_loss"}, set(STEP_FIELDS))


def read_log(path: str | Path) -> pd.DataFrame:
    """`log.jsonl` as a table, a row for each line that isn't damaged.

    The columns are `step`, `val_loss` and `STEP_FIELDS`; NaN where a line has no such number.
    """
    records = []
    text = Path(path).read_bytes()
    for line in json_lines(text):
        if _is_record(line.value):
            records.append(line.value)
    columns = ["step", "val_loss", *STEP_FIELDS]
    return pd.DataFrame(records, columns=columns, dtype=float)


class StepLog:
    """Writes `log.jsonl`, a JSON object for each step and each validation, and prints some of it.

    Args:
      path: the file. On several hosts each writes its own, with the same numbers.
      steps: number of the last step.
      every: print every so many steps, and the first and the last one.
    """

    def __init__(self, path: str | Path, steps: int, every: int) -> None:
        self.path = Path(path)
        self.steps = steps
        self.every = every
        self.validations: list[float] = []
        self.first = 0  # the step that this process goes on from
        self.begun = 0.0
        self.tracker: Any = None  # of TRACK, from `rewind` on
        self.unprinted: list[dict[str, Any]] = []  # the steps since the last printed line

    def rewind(self, step: int) -> None:
        """Keep the records up to a checkpoint's step, and forget what came after it."""
        kept = self._records_until(step)
        self.first = step
        self.validations = []
        for record in kept:
            if "val_loss" in record:
                self.validations.append(record["val_loss"])

        lines = [json.dumps(record) + "\n" for record in kept]
        text = "".join(lines)
        write_text(self.path, text)
        self.tracker = track.begin(self.path)
        for record in kept:
            track.write(self.tracker, record)

    def _records_until(self, step: int) -> list[dict[str, Any]]:
        """The records of the file up to a step; none at step 0.

        A killed run may have left half a line, and a disk can do worse. A line that isn't a record
        is left out, and a printed line says so.

        Raises:
          UserError: the file has several lines and none of them is ours. It stays as it is.
        """
        if not self.path.exists():
            return []
        records = []
        damaged = []
        text = self.path.read_bytes()
        for line in json_lines(text):
            if _is_record(line.value):
                records.append(line.value)
            else:
                damaged.append(line.number)
        if len(damaged) > 1 and not records:
            raise UserError(f"{self.path} isn't a log of this page, and training would empty it. "
                            "Set RUN_DIR to another folder, or move the file away.")

        if not step:
            return []

        kept = []
        for record in records:
            if record["step"] <= step:
                kept.append(record)
        if damaged:
            print(f"{self.path}: {len(damaged)} damaged lines are left out, the first is line "
                  f"{damaged[0]}. The training isn't touched by that.")
        return kept

    def write(self, record: dict[str, Any]) -> None:
        """Append one line. The operating system gets it at once, so a killed run has it, too."""
        line = json.dumps(record)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        track.write(self.tracker, record)

    def training(self, record: dict[str, Any]) -> None:
        """Log one optimizer step. The first, the last and one in `every` are printed, too.

        Loss, learning rate and gradient norm are the step's. Seconds a step, and tokens a second,
        are means since the line before, because the time of a single step jumps.
        """
        self.write(record)
        self.unprinted.append(record)
        step = record["step"]
        done = step - self.first - 1  # the first step warms up, so its time isn't counted
        if not done:
            self.begun = time.perf_counter()
        is_one_in_every = step % self.every == 0
        is_first = not done
        is_last = step == self.steps
        if is_one_in_every or is_first or is_last:
            self._print_step(record, done)

    def _print_step(self, record: dict[str, Any], done: int) -> None:
        """Print the line of a step. `done` steps of this process were measured before it."""
        step = record["step"]
        count = len(self.unprinted)
        seconds = sum(unprinted["seconds"] for unprinted in self.unprinted)
        tokens = sum(unprinted["real_tokens"] for unprinted in self.unprinted)
        self.unprinted = []
        pace = seconds / count
        throughput = tokens / seconds
        parts = [
            f"step {step}/{self.steps}",
            f"loss {record['loss']:.4f}",
            f"lr {record['learning_rate']:.2e}",
            f"grad norm {record['grad_norm']:.2f}",
            f"{pace:.2f} s/step",
            f"{throughput:,.0f} real tok/s",
        ]
        if done:
            since_first = time.perf_counter() - self.begun
            mean_pace = since_first / done
            steps_left = self.steps - step
            left = clock(mean_pace * steps_left)
            parts.append(f"left {left}")
        line = " | ".join(parts)
        print(line, flush=True)

    def validation(self, step: int, loss: float) -> None:
        """Log and print a validation loss, with the best one if that was earlier."""
        self.write({"step": step, "val_loss": loss})
        self.validations.append(loss)
        best = int(np.argmin(self.validations))
        newest = len(self.validations) - 1
        since = newest - best
        note = ""
        if since:
            lowest = self.validations[best]
            note = f" | best {lowest:.4f}, {since} validations ago"
        line = f"step {step}/{self.steps} | validation loss {loss:.4f}{note}"
        print(line, flush=True)


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    train_step: TrainStep              # compiled, as `jit_train_step` makes it
    frozen: nnx.State                  # the base's weights, from `start`
    validate: Callable[[nnx.State], float]  # adapters -> loss of the held-out rows
    validate_every: int                # steps
    dataset: grain.IterDataset         # from `make_dataset`
    mesh: Mesh
    log: StepLog                       # where the losses go
    manager: ocp.CheckpointManager     # where the checkpoints go
    recipe: dict[str, Any]             # what the checkpoints belong to


def train(run: Run, state: State) -> State:
    """Train from where `state` stands to the last step: batch, step, log, validate, save.

    Args:
      run: what stays the same.
      state: from `start` or `restore`. Its arrays are used up.

    Returns:
      The last `State`.

    Raises:
      UserError: a step's gradient isn't finite. Nothing of that step has been written.
    """
    log = run.log
    log.rewind(state.step)
    at_an_end = state.step in (0, log.steps)
    if at_an_end and not log.validations:  # after the last step: its log was lost
        loss = run.validate(state.adapters)
        log.validation(state.step, loss)

    steps = steps_from(run, state)
    for state, record in steps:
        log.training(record)  # before the checkpoint that contains this step
        is_due = state.step % run.validate_every == 0
        is_last = state.step == log.steps
        if is_due or is_last:
            loss = run.validate(state.adapters)
            log.validation(state.step, loss)
        save(run.manager, state, run.recipe)
    run.manager.wait_until_finished()  # files of the last steps
    return state


def steps_from(run: Run, state: State) -> Iterator[tuple[State, dict[str, Any]]]:
    """(the `State` after a step, its line of the log) of each step from `state` to the last one.

    It writes nothing. Each step uses up the arrays of the state before it.

    Raises:
      UserError: a step's gradient isn't finite.
    """
    batches = iter(run.dataset)
    if state.data is not None:
        batches.set_state(state.data)
    rows = next(batches)
    batch = to_mesh(rows, run.mesh)
    first = state.step + 1
    last = run.log.steps
    for step in range(first, last + 1):
        began = time.perf_counter()
        position = batches.get_state()
        adapters, opt_state, metrics = run.train_step(
            state.adapters, state.opt_state, run.frozen, batch)
        rows = next(batches)  # the next ones are read while this step runs
        batch = to_mesh(rows, run.mesh)
        state = State(step, adapters, opt_state, position)
        record = _record_of(state, metrics, began)
        yield state, record


def train_again(run: Run, state: State, log: pd.DataFrame, most: int) -> State:
    """Train from an earlier state, and print whether each step's loss is the one in the log.

    It writes nothing.

    Args:
      run: of the training.
      state: from `restore`. Its arrays are used up.
      log: from `read_log`.
      most: so many steps at most.

    Returns:
      The last `State`.
    """
    logged_steps = log.dropna(subset="loss")
    logged = logged_steps.set_index("step").loss
    steps = steps_from(run, state)
    for state, record in itertools.islice(steps, most):
        loss = record["loss"]
        before = logged.get(state.step)
        answer = f"not {before}"
        if loss == before:
            answer = "as before"
        print(f"step {state.step}: loss {loss}, {answer}")
    return state


def _record_of(state: State, metrics: Metrics, began: float) -> dict[str, Any]:
    """The line of the log for a step that began at `began`. Waits until the step is done.

    Raises:
      UserError: the step's gradient isn't finite.
    """
    learning_rate = state.opt_state.hyperparams["learning_rate"]
    record = {
        "step": state.step,
        "loss": float(metrics["loss"]),
        "learning_rate": float(learning_rate),
        "grad_norm": float(metrics["grad_norm"]),
        "seconds": time.perf_counter() - began,
        "real_tokens": int(metrics["real_tokens"]),
    }
    loss = record["loss"]
    norm = record["grad_norm"]
    if not np.isfinite(norm):
        raise UserError(f"step {state.step}: loss {loss}, gradient norm "
                        f"{norm}. Lower learning_rate, and start over.")
    return record
