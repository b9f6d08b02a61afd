"""The workshop of the series: batches, loss, optimizer step, loop, log and checkpoints.

Notebook 03 shows these functions and explains them, 08 compiles the same step for a TPU.
Letters in shape comments: M micro-batches, B rows, T tokens, D embedding, V vocabulary, K trained
positions of a row. A *tree* is anything that `jax.tree.map` can walk: nested containers of arrays.
"""

import contextlib
import functools
import json
import logging
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
from helpers.gemma import gib
from helpers.packing import COLUMNS, check_data
from helpers.records import DataMeta
from helpers.run import UserError, clock, digest, phase, run_dir, same_size, write_text
from tables.hardware import chip_of
from tables.settings import described, setting
from tables.texts import json_lines

Tree = Any  # containers of arrays, as `jax.tree.map` walks them

# ── What a run starts with ──


@dataclass(frozen=True)
class Settings:
    """What 03 trains and how; the defaults are for the 31B, mostly those of a published recipe."""

    rank: int = setting(64, "numbers between A and B")
    alpha: float = setting(64.0, "the adapter counts alpha / rank times")
    targets: str = setting(gemma.TARGETS, "which matrices get adapters")
    partial: bool = setting(False, "True: some matrices are left out on purpose")
    learning_rate: float = setting(1e-4, "at its peak")
    warmup_steps: int = setting(100, "from zero to the peak")
    weight_decay: float = setting(0.001, "of AdamW")
    max_grad_norm: float = setting(1.0, "a step's gradient is clipped to it")
    rows_per_step: int = setting(2, "packed rows of an optimizer step")
    rows_per_device: int = setting(2, "of them that a device computes at once")
    epochs: float = setting(1.0, "passes over the rows")
    max_steps: int = setting(0, "0: all; else the schedule is shorter")
    dtype: str = setting("bfloat16", "of the arithmetic; adapters are float32")
    mesh: tuple = setting((), "(fsdp, tp); empty: as much tp as the heads allow")
    remat: str = setting("NONE", "BLOCK, DECODER: what is computed again")
    attention_block: int = setting(1_024, "queries at a time; sliding: half a window")
    log_every: int = setting(10, "steps between two lines")
    validate_every: int = setting(100, "steps")
    validation_rows: int = setting(64, "held-out rows of a validation")
    checkpoint_every: int = setting(100, "steps")
    checkpoints_kept: int = setting(3, "the newest")
    checkpoints: str = setting("", "gs://... for several hosts; empty: below RUN_DIR")
    answer_tokens: int = setting(512, "of the answers shown before and after")
    fresh: bool = setting(False, "True throws this run's checkpoints and log away")
    seed: int = setting(42, "of A and of the order of the rows")

    def table(self) -> pd.DataFrame:
        """All settings with what they mean."""
        columns = ["setting", "value", "what it is"]
        return pd.DataFrame(described(self), columns=columns).set_index("setting")


def from_environment() -> dict[str, Any]:
    """The settings that the environment changes: those of MAX_STEPS and CHECKPOINTS that are set.

    `scripts/train.sh` and `first_hour.sh` set them, because they don't edit a page. Where one is
    unset or empty, the setting keeps what the page says.

    Raises:
      UserError: MAX_STEPS isn't a number of steps.
    """
    changes: dict[str, Any] = {}
    if steps := os.environ.get("MAX_STEPS", "").strip():
        if not steps.isdecimal():
            raise UserError(f"MAX_STEPS={steps} isn't a number of steps. Unset it, or set it to "
                            "one, such as 20.")
        changes["max_steps"] = int(steps)
    if address := os.environ.get("CHECKPOINTS", "").strip():
        changes["checkpoints"] = address
    return changes


def what_02_left() -> tuple[Path, DataMeta, Path, Any]:
    """(folder, meta, base, tokenizer) of notebook 02's data: checked, the base model fetched.

    The base model is no setting of a training run: the tokens in `data/` belong to one tokenizer
    and one chat template, so the data says which model they are for.

    Raises:
      UserError: a file is missing or changed, or the base model has another chat template now.
    """
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
    """Send JAX's compiled programs to a disk or bucket, so that a restart need not compile again.

    That is `JAX_COMPILATION_CACHE_DIR` if set, else `jax_cache/` in the run directory.

    Args:
      checkpoints: where the checkpoints will go, if that is a gs:// address.

    Raises:
      UserError: one of the two addresses refuses us, said before hours of work are to be saved
        there; or several hosts have no place that all of them reach.
    """
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(run_dir("jax_cache").resolve())
    jax.config.update("jax_compilation_cache_dir", cache)
    for address in (checkpoints, cache):
        if "://" in address:
            remote.check_writable(address)
    if jax.process_count() > 1 and not checkpoints:
        raise UserError("several hosts write one checkpoint: set CHECKPOINTS to a place that "
                        "all of them reach, such as gs://bucket/run/checkpoints.")


def one_cpu() -> list[jax.Device]:
    """A CPU device in a list; with JAX_PLATFORMS=tpu, which leaves the CPU out, the first chip."""
    try:
        return jax.local_devices(backend="cpu")[:1]
    except RuntimeError:
        return jax.local_devices()[:1]


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
    """What Grain reads from: rows by their number, each a `Batch` of [T] arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Batch: ...


class PackedRows:
    """The rows that notebook 02 wrote, memory-mapped: `rows[i]` is a `Batch` of [T] arrays."""

    def __init__(self, folder: str | Path):
        self.arrays = {}
        for field in COLUMNS:
            self.arrays[field] = np.load(Path(folder) / f"{field}.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def __getitem__(self, row: int) -> Batch:
        columns = {field: np.asarray(array[row]) for field, array in self.arrays.items()}
        return Batch(**columns)


def micro_batches_of(cfg: Settings, fsdp: int) -> tuple[int, int]:
    """(micro-batches of a step, rows of one) on a mesh with so many parts of `fsdp`.

    A step has at least one micro-batch: where that is more than `rows_per_step`, it is said.

    Raises:
      UserError: `rows_per_step` is larger, and no multiple of a micro-batch's rows.
    """
    micro_rows = cfg.rows_per_device * fsdp
    if cfg.rows_per_step < micro_rows:
        print(f"rows_per_step is {cfg.rows_per_step}; here a step has at least {micro_rows}")
        return 1, micro_rows
    if cfg.rows_per_step % micro_rows:
        raise UserError(f"rows_per_step={cfg.rows_per_step} is no multiple of the {micro_rows} "
                        "rows of a micro-batch (rows_per_device on each part of fsdp).")
    return cfg.rows_per_step // micro_rows, micro_rows


def make_dataset(rows: Rows, micro_batches: int, micro_rows: int,
                 seed: int) -> grain.IterDataset:
    """An endless, shuffled, seekable stream of the batches of the steps."""
    dataset = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
    dataset = dataset.batch(micro_rows, drop_remainder=True)  # of an endless stream nothing remains
    return dataset.batch(micro_batches, drop_remainder=True).to_iter_dataset()


def validation_batch(rows: Rows, count: int, micro_rows: int) -> Batch:
    """`count` held-out rows as micro-batches [M, B, T], filled up with empty rows."""
    chosen = [rows[place] for place in range(min(count, len(rows)))]
    empty = jax.tree.map(np.zeros_like, chosen[0])
    missing = -len(chosen) % micro_rows
    chosen += [empty] * missing

    def stack(*columns):
        return np.stack(columns).reshape(-1, micro_rows, columns[0].shape[-1])
    return jax.tree.map(stack, *chosen)


def to_mesh(batch: Batch, mesh: Mesh) -> Batch:
    """A batch [M, B, T] as global arrays, its rows B split over the mesh's `fsdp`.

    Every host reads the whole batch (a few hundred kilobytes) and hands its devices the rows that
    the mesh gives them. Which rows these are depends on how the slice is wired, so JAX is asked.
    """
    sharding = NamedSharding(mesh, ROWS)

    def spread(array):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return jax.tree.map(spread, batch)


def abstract_batch(shape: tuple[int, int, int], mesh: Mesh) -> Batch:
    """What `to_mesh` makes of a batch of `shape` [M, B, T], without its numbers."""
    sharding = NamedSharding(mesh, ROWS)
    columns = {}
    for field, kind in COLUMNS.items():
        columns[field] = jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
    return Batch(**columns)


# ── Loss ──


def packed_mask(segment_ids: jax.Array) -> jax.Array:
    """Causal attention inside each example and nowhere else. [B, T] -> [B, T, T]"""
    return jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :])


@contextlib.contextmanager
def without_output_matrix(model: nnx.Module) -> Iterator[None]:
    """Inside the block the model ends with its last norm, whatever happens there."""
    config = model.config
    model.embedder.decode = lambda hidden: hidden
    model.config = replace(config, final_logit_softcap=None)
    try:
        yield
    finally:
        model.config = config
        del model.embedder.decode  # the class's own again


def hidden_states(model: nnx.Module, rows: Batch) -> jax.Array:
    """What the model would hand to its output matrix. [B, T, D]"""
    mask = packed_mask(rows.segment_ids)
    with without_output_matrix(model):
        hidden, _ = model(rows.tokens, rows.positions, None, mask)
    return hidden.astype(model.config.dtype)


class TokenLosses(NamedTuple):
    """Losses of the trained tokens of each row; K is the most that a row has."""

    loss: jax.Array    # [B, K] float32
    weight: jax.Array  # [B, K] int32, 0 where a row has fewer
    at: jax.Array      # [B, K] int32: the token at `at + 1` was predicted from position `at`


def cross_entropy(model: nnx.Module, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    """Of hidden states [B, K, D] and the tokens [B, K] that they should predict. [B, K] float32"""
    with jax.named_scope("output_matrix"):
        logits = model.embedder.decode(hidden).astype(jnp.float32)  # [B, K, V]
        # A chip multiplies all rows by its slice of the vocabulary: none needs the whole matrix.
        logits = gemma.shard(logits, (None, None, ("tp", "fsdp")))
    if (cap := model.config.final_logit_softcap) is not None:  # Gemma keeps logits within ±cap
        logits = jnp.tanh(logits / cap) * cap
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def chunk_of(row_length: int) -> int:
    """Positions of a row whose logits may exist at once: half a row's, 1,024 at least."""
    return max(1_024, row_length // 2)


def in_chunks(function: Callable[..., jax.Array], most: int, *arrays: jax.Array) -> jax.Array:
    """`function` of arrays [B, K, ...], at most `most` of K at a time; returns its [B, K].

    Logits are the largest arrays of a step. A chunk's are forgotten as soon as its losses are
    known, and computed again for the gradient, so answers that fill whole rows need no more memory
    than answers that fill half of them. Where K is one chunk, nothing is computed twice.
    """
    rows, places = arrays[0].shape[:2]
    count = -(-places // most)
    if count == 1:
        return function(*arrays)
    size = -(-places // (count * 128)) * 128

    def cut(array: jax.Array) -> jax.Array:
        """[B, K, ...] -> [chunks, B, size, ...], zeros behind the last."""
        missing = count * size - places
        padded = jnp.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)])
        return jnp.moveaxis(padded.reshape(rows, count, size, *array.shape[2:]), 1, 0)

    forgetful = jax.checkpoint(lambda pieces: function(*pieces))
    found = jax.lax.map(forgetful, tuple(cut(array) for array in arrays))
    return jnp.moveaxis(found, 0, 1).reshape(rows, -1)[:, :places]


def token_losses(model: nnx.Module, rows: Batch, capacity: int) -> TokenLosses:
    """Cross-entropy of the trained tokens, at most `capacity` (K) of a row."""
    with jax.named_scope("hidden_states"):  # a name in profiles; the program stays the same
        hidden = hidden_states(model, rows)
    with jax.named_scope("loss"):
        # The token at t + 1 is predicted at t; top_k of 0s and 1s lists where the 1s are.
        weight, at = jax.lax.top_k(rows.loss_mask[:, 1:].astype(jnp.int32), capacity)
        labels = jnp.take_along_axis(rows.tokens, at + 1, axis=1)
        hidden = jnp.take_along_axis(hidden, at[..., None], axis=1)  # [B, K, D]
        most = chunk_of(rows.tokens.shape[1])
        loss = in_chunks(functools.partial(cross_entropy, model), most, hidden, labels)
    return TokenLosses(loss, weight, at)


def capacity_of(*parts: PackedRows) -> int:
    """`capacity` that cuts nothing off: the most trained tokens of a row, rounded up to 128."""
    most = 0
    for rows in parts:
        most = max(most, int(rows.arrays["loss_mask"].sum(-1).max()))
    rounded_up = -(-most // 128) * 128
    row_length = parts[0].arrays["tokens"].shape[-1]
    return min(rounded_up, row_length - 1)  # the first token of a row is never predicted


Loss = Callable[[nnx.Module, Batch], tuple[jax.Array, jax.Array]]


def make_loss(capacity: int) -> Loss:
    """(model, rows) -> (summed cross-entropy, trained tokens); at most `capacity` a row."""
    def loss_fn(model, rows):
        loss, weight, _ = token_losses(model, rows, capacity)
        return jnp.sum(loss * weight), jnp.sum(weight)
    return loss_fn


# ── Optimizer and step ──


def steps_of(cfg: Settings, rows: int, rows_per_step: int) -> int:
    """Optimizer steps of a run on so many packed rows."""
    steps = max(1, round(cfg.epochs * rows / rows_per_step))
    return min(steps, cfg.max_steps or steps)


def make_schedule(cfg: Settings, steps: int) -> optax.Schedule:
    """step -> learning rate: warm-up from zero, then a cosine down to zero."""
    warmup = min(cfg.warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(0.0, cfg.learning_rate, warmup, steps)


# Its name is part of the recipe: no checkpoint of another optimizer is continued.
OPTIMIZER = optax.adamw


def make_optimizer(schedule: optax.Schedule, weight_decay: float,
                   max_grad_norm: float) -> optax.GradientTransformation:
    """Clip the step's whole gradient, then AdamW; the learning rate stays readable for the log."""
    def clipped(learning_rate):
        clip = optax.clip_by_global_norm(max_grad_norm)
        return optax.chain(clip, OPTIMIZER(learning_rate, weight_decay=weight_decay))
    return optax.inject_hyperparams(clipped)(learning_rate=schedule)


def make_micro_loss(model: nnx.Module, loss_fn: Loss) -> Callable:
    """(adapters, frozen, rows) -> (loss sum, tokens), computed in the model's own dtype."""
    graph, dtype = nnx.graphdef(model), model.config.dtype

    def micro_loss(adapters, frozen, rows):
        copy = jax.tree.map(lambda array: array.astype(dtype), adapters)
        return loss_fn(nnx.merge(graph, copy, frozen), rows)
    return micro_loss


def make_train_step(model: nnx.Module, optimizer: optax.GradientTransformation,
                    loss_fn: Loss) -> Callable:
    """(adapters, opt_state, frozen, batch) -> (adapters, opt_state, metrics)."""
    micro_loss = make_micro_loss(model, loss_fn)

    def train_step(adapters, opt_state, frozen, batch):
        def add(total, rows):
            one = jax.value_and_grad(micro_loss, has_aux=True)(adapters, frozen, rows)
            return jax.tree.map(jnp.add, total, one), None

        zero = ((0.0, 0), jax.tree.map(jnp.zeros_like, adapters))
        ((loss, tokens), grads), _ = jax.lax.scan(add, zero, batch)
        grads = jax.tree.map(lambda array: array / tokens, grads)  # once, for the whole step
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, opt_state, adapters)
            changed = optax.apply_updates(adapters, updates)
        metrics = {"loss": loss / tokens, "grad_norm": optax.global_norm(grads),
                   "real_tokens": jnp.sum(batch.segment_ids > 0)}
        return changed, opt_state, metrics
    return train_step


def make_eval_step(model: nnx.Module, loss_fn: Loss) -> Callable:
    """(adapters, frozen, batch) -> mean loss of all trained tokens of the batch."""
    micro_loss = make_micro_loss(model, loss_fn)

    def eval_step(adapters, frozen, batch):
        loss, tokens = jax.lax.map(lambda rows: micro_loss(adapters, frozen, rows), batch)
        return jnp.sum(loss) / jnp.sum(tokens)
    return eval_step


# For the TPU v5p's compiler: a product may use 32 MiB of on-chip memory, not 16 (08, section 5).
LARGE_TILES = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
# Without tensor parallelism: weights are gathered while the chip multiplies (08, section 6), whole.
GATHERS_BESIDE = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_tpu_all_gather_collective_matmul_mode": "none",
}


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """What a TPU's compiler is asked for; None for nothing."""
    chip = chip_of(mesh.devices.flat[0].device_kind)
    options: dict[str, Any] = {}
    if chip == "v5p":
        options |= LARGE_TILES
    if chip in ("v5e", "v5p", "v6e") and mesh.shape["fsdp"] == mesh.size > 1:
        options |= GATHERS_BESIDE
    return options or None


def jit_eval_step(model: nnx.Module, loss_fn: Loss) -> Any:
    """`make_eval_step`, to be compiled: the program that 03 runs and that 08 compiles for a TPU."""
    return jax.jit(make_eval_step(model, loss_fn))


def jit_optimizer_state(optimizer: optax.GradientTransformation, hull: Tree) -> Any:
    """The optimizer's beginning for adapters, to be compiled; `hull` says where its arrays lie."""
    shardings = jax.tree.map(lambda array: array.sharding, hull)
    return jax.jit(optimizer.init, out_shardings=shardings)


def jit_train_step(model: nnx.Module, optimizer: optax.GradientTransformation, loss_fn: Loss,
                   state: "State", options: dict[str, Any] | None = None) -> Callable:
    """`make_train_step`, to be compiled: the program that 03 runs and that 08 compiles for a TPU.

    `options` are the compiler's, the same whether it is compiled ahead of time or when called.

    The old adapters and optimizer state are donated, so that the new ones take their memory, and
    the new ones are pinned to the old ones' shardings, so that step two is the program of step one.
    """
    step = make_train_step(model, optimizer, loss_fn)
    adapters, opt_state = jax.tree.map(
        lambda array: array.sharding, (state.adapters, state.opt_state))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(adapters, opt_state, None),
                   compiler_options=options)


def lower_step(model: nnx.Module, optimizer: optax.GradientTransformation, loss_fn: Loss,
               mesh: Mesh, shape: tuple[int, int, int]) -> jax.stages.Lowered:
    """The step of an abstract model and a batch of `shape` [M, B, T], lowered: not yet compiled.

    Nothing gets memory: model, adapters, optimizer and batch are shapes, types and shardings. On a
    TPU the compiler will be asked for what `compiler_options` says.
    """
    state, frozen = start(model, optimizer, mesh)
    step: Any = jit_train_step(model, optimizer, loss_fn, state, compiler_options(mesh))
    with mesh:
        return step.lower(state.adapters, state.opt_state, frozen, abstract_batch(shape, mesh))


def compile_ahead(lowered: jax.stages.Lowered) -> Future:
    """Compile in a thread: a future of (compiled, seconds), or of what the compiler raised."""
    def work():
        began = time.perf_counter()
        return lowered.compile(), time.perf_counter() - began
    return ThreadPoolExecutor(1).submit(work)


# ── Memory ──


def memory_of(compiled: jax.stages.Compiled, state: "State", frozen: Tree) -> dict[str, float]:
    """{what: GiB per device} of a compiled step: its arguments counted, the rest by the compiler.

    Temporaries are the activations of one micro-batch and the gradients. Fresh outputs are those
    that take no donated array's place.

    Raises:
      UserError: it is more than the device has.
    """
    analysis = compiled.memory_analysis()
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    held = {
        "base weights": gib(frozen),
        "adapters": gib(state.adapters),
        "Adam's moments": gib(state.opt_state),
        "temporaries of the step": analysis.temp_size_in_bytes / 2**30,
        "fresh outputs": fresh / 2**30,
    }
    needed = sum(held.values())
    limit = _memory_stats().get("bytes_limit", 0) / 2**30
    if limit and needed > limit:
        raise UserError(f"this does not fit: {needed:.1f} GiB per device of {limit:.1f}. "
                        f"{LESS_MEMORY}")
    return held


def _memory_stats() -> dict[str, int]:
    """What the first device says about its memory; nothing on a CPU."""
    return jax.local_devices()[0].memory_stats() or {}


LESS_MEMORY = 'Lower rows_per_device, set remat="DECODER", or pack shorter rows in 02.'


@contextlib.contextmanager
def within_memory() -> Iterator[None]:
    """Where the compiler or the allocator is out of memory, say so in two lines that name the fix.

    Raises:
      UserError: `RESOURCE_EXHAUSTED`, with the numbers that came with it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        numbers = str(error).partition("RESOURCE_EXHAUSTED")[2].strip(": ").splitlines()[0]
        raise UserError(f"this does not fit: {numbers[:300]}\n{LESS_MEMORY}") from None


def machine_facts(mesh: Mesh, held: dict[str, float]) -> dict[str, Any]:
    """What this machine is and holds, for `machine.json`; `held` is from `memory_of`."""
    stats = _memory_stats()
    return {
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "hosts": jax.process_count(),
        "mesh": list(mesh.devices.shape),
        "held_gib_per_device": float(sum(held.values())),
        "bytes_in_use": stats.get("bytes_in_use"),
        "peak_bytes_in_use": stats.get("peak_bytes_in_use"),
        "bytes_limit": stats.get("bytes_limit"),
    }


# ── State and checkpoints ──


@dataclass(frozen=True)
class State:
    """All that changes while a model is trained, and all that a checkpoint has to hold."""

    step: int             # optimizer steps done
    adapters: nnx.State   # tree of float32 LoRA matrices
    opt_state: Any        # Optax's: Adam's two moments for every adapter, counters
    data: dict | None = None  # Grain's position in the stream of batches; None is the beginning


def start(model: nnx.Module, optimizer: optax.GradientTransformation,
          mesh: Mesh) -> tuple[State, nnx.State]:
    """(the `State` before the first step, the frozen weights) of a model with adapters.

    An abstract model gives an abstract state. All shardings are canonical (`gemma.on_mesh`).
    """
    _, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    hull = gemma.on_mesh(jax.eval_shape(optimizer.init, adapters), mesh)
    if isinstance(jax.tree.leaves(adapters)[0], jax.ShapeDtypeStruct):
        return State(0, adapters, hull), frozen
    return State(0, adapters, jit_optimizer_state(optimizer, hull)(adapters)), frozen


# Of these a checkpoint has at least one, however badly it's damaged: what `save` puts into it, and
# Orbax's own notes.
MADE_BY_ORBAX = {"model_params", "optimizer_state", "_CHECKPOINT_METADATA", "commit_success.txt"}


def open_checkpoints(folder: str | os.PathLike, every: int, last: int,
                     keep: int = 3) -> ocp.CheckpointManager:
    """Orbax's manager of a folder, local or gs://: keeps the newest few.

    It saves after the first step (Orbax does), then every few, and after the last.
    """
    if "://" not in str(folder):  # Orbax wants an absolute path, and says so at the first save
        folder = Path(folder).resolve()
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=every, save_on_steps=[last], max_to_keep=keep, create=True)
    return ocp.CheckpointManager(folder, options=options)


def throw_away(folder: str | os.PathLike) -> None:
    """Delete a folder of checkpoints, local or gs://, if checkpoints are all that's in it.

    On several hosts the first one deletes, and all of them wait until it has.

    Raises:
      UserError: something else lies there, so the folder isn't ours. Nothing was deleted.
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
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils
        multihost_utils.sync_global_devices(what)


def _only_checkpoint(path: epath.Path) -> None:
    """Refuse a file or folder that Orbax can't have made: it isn't ours to delete or to replace.

    Orbax makes a folder for each step. It may be finished, torn by a disk, or never finished.
    """
    step, unfinished, _ = path.name.partition(".orbax-checkpoint-tmp")
    if step.isdecimal() and path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        if unfinished or not names or names & MADE_BY_ORBAX:
            return
    raise UserError(f"{path} isn't a checkpoint, so its folder isn't ours to change. Move it away, "
                    "or set CHECKPOINTS (or RUN_DIR) to another folder.")


@jax.jit
def word_sum(array: jax.Array) -> jax.Array:
    """One uint32 that changes with any single word of an array, on whatever mesh the array lies.

    The words are mixed with their places (the last steps of MurmurHash3, which map 32 bits to 32
    bits one to one) and added modulo 2^32, so the order of the sum doesn't matter.
    """
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = array.astype(kind) if array.dtype == bool else jax.lax.bitcast_convert_type(array, kind)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis, length in enumerate(array.shape):
        place = place * length + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    mixed = bits.astype(jnp.uint32) + place * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def digests_of(state: State, recipe: dict[str, Any]) -> dict[str, str]:
    """What a checkpoint is compared with when it's read again: {part of it: hexadecimal digest}.

    The devices add up their own arrays: nothing of them travels to the host.
    """
    def of_arrays(tree):
        sums = [word_sum(array) for array in jax.tree.leaves(tree)]
        return digest([int(total) for total in sums])
    return {
        "adapters": of_arrays(state.adapters),
        "optimizer state": of_arrays(state.opt_state),
        "position in the data": digest(state.data),
        "recipe": digest(recipe),
    }


def save(manager: ocp.CheckpointManager, state: State, recipe: dict[str, Any]) -> None:
    """Write a checkpoint if this step is due; the files are written while the next steps run."""
    if not manager.should_save(state.step):
        return
    notes = {"recipe": recipe, "digests": digests_of(state, recipe)}
    adapters = ocp.args.PyTreeSave(state.adapters)
    opt_state = ocp.args.PyTreeSave(state.opt_state)
    position = ocp.args.JsonSave(state.data)
    parts = ocp.args.Composite(model_params=adapters, optimizer_state=opt_state, data=position)
    manager.save(state.step, custom_metadata=notes, args=parts)


DECIDES = ("rank", "alpha", "targets", "learning_rate", "warmup_steps", "weight_decay",
           "max_grad_norm", "dtype", "seed")


def recipe_of(cfg: Settings) -> dict[str, Any]:
    """The settings that decide what is trained; a checkpoint is stored with them."""
    recipe: dict[str, Any] = {"optimizer": OPTIMIZER.__name__}
    for name in DECIDES:
        recipe[name] = getattr(cfg, name)
    return recipe


def restore(manager: ocp.CheckpointManager, state: State, recipe: dict[str, Any]) -> State:
    """The newest whole checkpoint's `State`, each array on the sharding that `state` has it on.

    A torn or changed one is named, left aside, and removed once an older one has been restored,
    because its steps are about to be computed and saved again. Without any checkpoint this is
    `state` itself.

    Raises:
      UserError: it was trained by another recipe, and how they differ; or none of the checkpoints
        restores; or one of several hosts meets a damaged one; or a folder that isn't a checkpoint
        has a number as its name.
    """
    steps = sorted(manager.all_steps(), reverse=True)
    for step in steps:
        _only_checkpoint(epath.Path(manager.directory) / str(step))
    for place, step in enumerate(steps):
        try:
            restored = _restore_step(manager, step, state, recipe)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  Orbax's own for torn files is a plain Exception
            _leave_aside(manager, step, error)
        else:
            for newer in steps[:place]:
                manager.delete(newer)
            return restored
    if steps:
        raise UserError(f"none of the checkpoints {steps} in {manager.directory} can be restored. "
                        "Bring back a copy of one, or set fresh=True to start over.")
    return state


def _leave_aside(manager: ocp.CheckpointManager, step: int, error: Exception) -> None:
    """Say that a checkpoint is damaged.

    Raises:
      UserError: several hosts are training. They all have to go on from the same step.
      Exception: the memory is full. That's this machine's trouble, not the checkpoint's.
    """
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        raise error
    first_line = (str(error).splitlines() or [""])[0]
    why = f"{type(error).__name__}: {first_line[:150]}"
    if jax.process_count() > 1:
        raise UserError(f"checkpoint {step} in {manager.directory} is damaged ({why}). "
                        "Delete it, and start all hosts again.") from error
    print(f"checkpoint {step} is damaged ({why}) and is left aside")
    for name in ("asyncio", "concurrent.futures"):  # they'd print what the failed reads left behind
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _restore_step(manager: ocp.CheckpointManager, step: int, state: State,
                  recipe: dict[str, Any]) -> State:
    """The `State` of one checkpoint, each array on the sharding that `state` has it on.

    Raises:
      UserError: it's whole, and was trained by another recipe.
      Exception: it's damaged. What Orbax and TensorStore raise depends on the file and the damage.
    """
    notes = manager.metadata(step).custom_metadata
    saved_recipe = notes["recipe"]
    digests = notes.get("digests", {})  # earlier versions kept none
    if digests and digest(saved_recipe) != digests["recipe"]:
        raise DamagedError("its recipe isn't the one that was saved")
    _same_recipe(manager, step, saved_recipe, recipe)
    adapters = _on_shardings_of(state.adapters)
    opt_state = _on_shardings_of(state.opt_state)
    wanted = ocp.args.Composite(
        model_params=adapters, optimizer_state=opt_state, data=ocp.args.JsonRestore())
    parts = manager.restore(step, args=wanted)
    restored = State(step, parts["model_params"], parts["optimizer_state"], parts["data"])
    _same_shapes((state.adapters, state.opt_state), (restored.adapters, restored.opt_state))
    if digests:
        for part, value in digests_of(restored, saved_recipe).items():
            if digests[part] != value:
                raise DamagedError(f"other bytes than were saved: {part}")
    return restored


def _on_shardings_of(tree: Tree) -> ocp.args.PyTreeRestore:
    plan = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.args.PyTreeRestore(item=tree, restore_args=plan)


def _same_recipe(manager: ocp.CheckpointManager, step: int, saved: dict, recipe: dict) -> None:
    differences = []
    for key, value in recipe.items():
        if saved.get(key) != value:
            differences.append(f"{key}: {saved.get(key)} there, {value} here")
    if differences:
        raise UserError(f"{manager.directory} holds step {step} of another recipe: "
                        f"{'; '.join(differences)}.\nSet fresh=True to throw it away, or another "
                        "RUN_DIR (and CHECKPOINTS, where it is set) to keep it.")


def _same_shapes(expected: Tree, restored: Tree) -> None:
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(restored), strict=True)
    for wanted, array in pairs:
        if wanted.shape != array.shape or wanted.dtype != array.dtype:
            raise DamagedError(f"an array is {array.dtype}{array.shape}, not "
                               f"{wanted.dtype}{wanted.shape}")


class DamagedError(Exception):
    """A checkpoint that can be read, and isn't what was saved."""


def adapters_sha256(adapters: Tree) -> str:
    """`weights.adapters_digest` of a state's adapters, also where they're spread over hosts."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils
        adapters = multihost_utils.process_allgather(adapters, tiled=True)
    return weights.adapters_digest(adapters)


# ── Log and loop ──


STEP_FIELDS = ("loss", "learning_rate", "grad_norm", "seconds", "real_tokens")


def _is_record(value: Any) -> bool:
    """Whether a value from `log.jsonl` is what `StepLog` writes: of a step, or of a validation."""
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return False
    if any(type(number) not in (int, float) for number in value.values()):
        return False
    return value.keys() - {"step"} in ({"val_loss"}, set(STEP_FIELDS))


def read_log(path: str | Path) -> pd.DataFrame:
    """`log.jsonl` as a table: `step`, `val_loss` and what a step has; NaN where a line has none."""
    records = [line.value for line in json_lines(Path(path).read_bytes()) if _is_record(line.value)]
    return pd.DataFrame(records, columns=["step", "val_loss", *STEP_FIELDS], dtype=float)


class StepLog:
    """`log.jsonl`, one JSON object per step and per validation, and the lines a reader sees.

    Args:
      path: the file. On several hosts each writes its own, with the same numbers.
      steps: number of the last step.
      every: print every so many steps, and the first and the last one.
    """

    def __init__(self, path: str | Path, steps: int, every: int):
        self.path, self.steps, self.every = Path(path), steps, every
        self.validations: list[float] = []
        self.first = 0  # the step that this process goes on from
        self.begun = 0.0
        self.tracker: Any = None  # of TRACK, from `rewind` on

    def rewind(self, step: int) -> None:
        """Keep what happened up to a checkpoint.

        A killed run may have left half a line, and a disk can do worse: a line that is no record
        of a step is left out, and said.
        """
        content = b""
        if step and self.path.exists():
            content = self.path.read_bytes()
        kept, damaged = [], []
        for line in json_lines(content):
            if not _is_record(line.value):
                damaged.append(line.number)
            elif line.value["step"] <= step:
                kept.append(line.value)
        if damaged:
            print(f"{self.path}: {len(damaged)} damaged lines are left out, the first is line "
                  f"{damaged[0]}. The training isn't touched by that.")
        self.validations = [record["val_loss"] for record in kept if "val_loss" in record]
        self.first = step
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self.tracker = track.begin(self.path)
        for record in kept:
            track.write(self.tracker, record)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line, handed to the operating system at once."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        track.write(self.tracker, record)

    def training(self, record: dict[str, Any]) -> None:
        """Log one optimizer step, and print the first, the last and every few."""
        self.write(record)
        step = record["step"]
        done = step - self.first - 1  # the first step warms up, and is not in the time left
        if not done:
            self.begun = time.perf_counter()
        if step % self.every and done and step != self.steps:
            return
        seconds = record["seconds"]
        parts = [
            f"step {step}/{self.steps}",
            f"loss {record['loss']:.4f}",
            f"lr {record['learning_rate']:.2e}",
            f"grad norm {record['grad_norm']:.2f}",
            f"{seconds:.2f} s/step",
            f"{record['real_tokens'] / seconds:,.0f} real tok/s",
        ]
        if done:
            pace = (time.perf_counter() - self.begun) / done
            parts.append(f"left {clock(pace * (self.steps - step))}")
        print(" | ".join(parts), flush=True)

    def validation(self, step: int, loss: float) -> None:
        """Log a validation loss, and say so when it no longer falls."""
        self.write({"step": step, "val_loss": loss})
        self.validations.append(loss)
        note = ""
        if since := len(self.validations) - 1 - int(np.argmin(self.validations)):
            note = f" | best {min(self.validations):.4f}, {since} validations ago"
        print(f"step {step}/{self.steps} | validation loss {loss:.4f}{note}", flush=True)


@dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    train_step: Callable               # compiled, as `jit_train_step` makes it
    frozen: nnx.State                  # the base's weights, from `start`
    validate: Callable[[nnx.State], float]  # adapters -> loss of the held-out rows
    validate_every: int                # steps
    dataset: grain.IterDataset         # from `make_dataset`
    mesh: Mesh
    log: StepLog                       # where the losses go
    manager: ocp.CheckpointManager     # where the checkpoints go
    recipe: dict[str, Any]             # what they belong to


def train(run: Run, state: State) -> State:
    """Next batch, step, log, validate, save: from where `state` stands to the last step.

    Args:
      run: what stays the same.
      state: from `start` or `restore`. Its arrays are used up.

    Returns:
      The last `State`.

    Raises:
      UserError: a step's gradient is not finite. Nothing of that step has been written.
    """
    log, batches = run.log, iter(run.dataset)
    if state.data is not None:
        batches.set_state(state.data)
    log.rewind(state.step)
    if not log.validations and state.step in (0, log.steps):  # at the end: its log was lost
        log.validation(state.step, run.validate(state.adapters))
    batch = to_mesh(next(batches), run.mesh)
    for step in range(state.step + 1, log.steps + 1):
        began = time.perf_counter()
        position = batches.get_state()
        adapters, opt_state, metrics = run.train_step(
            state.adapters, state.opt_state, run.frozen, batch)
        batch = to_mesh(next(batches), run.mesh)  # the next one is read while this step runs
        state = State(step, adapters, opt_state, position)
        record = _record_of(state, metrics, began)
        log.training(record)  # before the checkpoint that contains this step
        if step % run.validate_every == 0 or step == log.steps:
            log.validation(step, run.validate(state.adapters))
        save(run.manager, state, run.recipe)
    run.manager.wait_until_finished()  # files of the last steps
    return state


def _record_of(state: State, metrics: dict[str, jax.Array], began: float) -> dict[str, Any]:
    """The line of the log for a step that began at `began`; waits until the step is done."""
    learning_rate = state.opt_state.hyperparams["learning_rate"]
    record = {
        "step": state.step,
        "loss": float(metrics["loss"]),
        "learning_rate": float(learning_rate),
        "grad_norm": float(metrics["grad_norm"]),
        "seconds": time.perf_counter() - began,
        "real_tokens": int(metrics["real_tokens"]),
    }
    if not np.isfinite(record["grad_norm"]):
        raise UserError(f"step {state.step}: loss {record['loss']}, gradient norm "
                        f"{record['grad_norm']}. Lower learning_rate, start over.")
    return record
