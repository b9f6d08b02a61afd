"""The workshop of the series: batches, loss, optimizer step, loop, log and checkpoints.

Notebook 03 shows these functions and explains them, 08 compiles the same step for a TPU.
Letters in shape comments: M micro-batches, B rows, T tokens, D embedding, V vocabulary, K trained
positions of a row. A *tree* is anything that `jax.tree.map` can walk: nested containers of arrays.
"""

import contextlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import flax
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pandas as pd
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from helpers import chat, gemma, remote
from helpers.gemma import gib
from helpers.packing import COLUMNS, check_data
from helpers.run import UserError, clock, phase, run_dir, same_size, write_text
from tables import described, setting
from tables.hardware import chip_of

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
    checkpoints: str = setting("", "gs://...; empty: below RUN_DIR")
    answer_tokens: int = setting(512, "of the answers shown before and after")
    fresh: bool = setting(False, "True throws this run's checkpoints and log away")
    seed: int = setting(42, "of A and of the order of the rows")

    def table(self):
        """All settings with what they mean."""
        return pd.DataFrame(described(self),
                            columns=["setting", "value", "what it is"]).set_index("setting")


def what_02_left():
    """(folder, meta, base, tokenizer) of notebook 02's data: checked, the base model fetched.

    The base model is no setting of a training run: the tokens in `data/` belong to one tokenizer
    and one chat template, so the data says which model they are for.

    Raises:
      UserError: a file is missing or changed, or the base model has another chat template now.
    """
    data = run_dir("data")
    meta = check_data(data)  # every byte is what 02 wrote
    same_size(meta["size"], "02_data.py")
    with phase(f"base model {meta['base_path']}"):
        base = remote.stage(meta["base_path"])
    tokenizer = chat.load_tokenizer(base)
    if chat.template_sha256(tokenizer) != meta["template_sha256"]:
        raise UserError("The base model's chat template changed: these rows were made by another "
                        "tokenizer. Run 02_data.py again.")
    return data, meta, base, tokenizer


def keep_compilations(checkpoints=""):
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


def ask(model, tokenizer, chats, limit, mesh, thinking=False):
    """Greedy answers (always the likeliest token) to chats, as text.

    Args:
      model, mesh: a Tunix Gemma 4, with or without adapters, and the mesh that it lives on.
      chats: lists of messages, each ending with the user's.
      limit: tokens of an answer at most.
      thinking: as in `chat.prompt_ids`.
    """
    stops = {tokenizer.eos_token_id, chat.special_ids(tokenizer)[chat.TURN_END]}
    prompts = [chat.prompt_ids(tokenizer, messages, thinking) for messages in chats]
    found = gemma.greedy(model, prompts, limit, stops, mesh)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in found]


# ── Batches ──


ROWS = PartitionSpec(None, "fsdp")  # of a batch: split over the mesh


@flax.struct.dataclass
class Batch:
    """The packed rows of one optimizer step."""

    tokens: jax.Array       # [M, B, T] int32
    loss_mask: jax.Array    # [M, B, T] bool, True where the token is to be predicted
    segment_ids: jax.Array  # [M, B, T] int32, 1, 2, ... per example of a row, 0 is padding
    positions: jax.Array    # [M, B, T] int32, from 0 in every example


class PackedRows:
    """The rows that notebook 02 wrote, memory-mapped: `rows[i]` is a `Batch` of [T] arrays."""

    def __init__(self, folder):
        self.arrays = {field: np.load(Path(folder) / f"{field}.npy", mmap_mode="r")
                       for field in COLUMNS}

    def __len__(self):
        return len(self.arrays["tokens"])

    def __getitem__(self, row):
        return Batch(**{field: np.asarray(array[row]) for field, array in self.arrays.items()})


def micro_batches_of(cfg, fsdp):
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


def make_dataset(rows, micro_batches, micro_rows, seed):
    """An endless, shuffled, seekable stream of the batches of the steps."""
    dataset = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
    dataset = dataset.batch(micro_rows, drop_remainder=True)  # of an endless stream nothing remains
    return dataset.batch(micro_batches, drop_remainder=True).to_iter_dataset()


def validation_batch(rows, count, micro_rows):
    """`count` held-out rows as micro-batches [M, B, T], filled up with empty rows."""
    picked = [rows[i] for i in range(min(count, len(rows)))]
    empty = jax.tree.map(np.zeros_like, picked[0])
    picked += [empty] * (-len(picked) % micro_rows)
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *picked)
    return jax.tree.map(lambda a: a.reshape(-1, micro_rows, a.shape[-1]), stacked)


def to_mesh(batch, mesh):
    """A batch [M, B, T] as global arrays, its rows B split over the mesh's `fsdp`.

    Every host reads the whole batch (a few hundred kilobytes) and hands its devices the rows that
    the mesh gives them. Which rows these are depends on how the slice is wired, so JAX is asked.
    """
    sharding = NamedSharding(mesh, ROWS)
    return jax.tree.map(lambda a: jax.make_array_from_callback(
        a.shape, sharding, lambda index: a[index]), batch)


# ── Loss ──


def packed_mask(segment_ids):
    """Causal attention inside each example and nowhere else. [B, T] -> [B, T, T]"""
    return jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :])


def hidden_states(model, rows):
    """What the model would hand to its output matrix: it runs without one. [B, T, D]"""
    embedder, config = model.embedder, model.config
    embedder.decode, model.config = lambda x: x, replace(config, final_logit_softcap=None)
    hidden, _ = model(rows.tokens, rows.positions, None, packed_mask(rows.segment_ids))
    model.config = config
    del embedder.decode  # the class's own again
    return hidden.astype(config.dtype)


def token_losses(model, rows, capacity):
    """Cross-entropy of the trained tokens, at most `capacity` of a row.

    Returns:
      (loss, weight, at), each [B, K]: `weight` is 0 where a row has fewer; the token predicted from
      position `at` stands at `at + 1`.
    """
    with jax.named_scope("hidden_states"):  # a name in profiles; the program stays the same
        hidden = hidden_states(model, rows)
    # The token at t + 1 is predicted at t; top_k of 0s and 1s lists where the 1s are.
    weight, at = jax.lax.top_k(rows.loss_mask[:, 1:].astype(jnp.int32), capacity)
    labels = jnp.take_along_axis(rows.tokens, at + 1, axis=1)
    hidden = jnp.take_along_axis(hidden, at[..., None], axis=1)  # [B, K, D]
    with jax.named_scope("output_matrix"):
        logits = model.embedder.decode(hidden).astype(jnp.float32)  # [B, K, V]
        # A chip multiplies all rows by its slice of the vocabulary: no chip needs the whole matrix.
        logits = gemma.shard(logits, (None, None, ("tp", "fsdp")))
    if (cap := model.config.final_logit_softcap) is not None:  # Gemma keeps logits within ±cap
        logits = jnp.tanh(logits / cap) * cap
    with jax.named_scope("loss"):
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return loss, weight, at


def capacity_of(*parts):
    """`capacity` that cuts nothing off: the most trained tokens of a row, of any `PackedRows`."""
    most = max(int(one.arrays["loss_mask"].sum(-1).max()) for one in parts)
    return min(-(-most // 128) * 128, parts[0].arrays["tokens"].shape[-1] - 1)


def make_loss(capacity):
    """(model, rows) -> (summed cross-entropy, trained tokens); at most `capacity` a row."""
    def loss_fn(model, rows):
        loss, weight, _ = token_losses(model, rows, capacity)
        return jnp.sum(loss * weight), jnp.sum(weight)
    return loss_fn


# ── Optimizer and step ──


def steps_of(cfg, rows, rows_per_step):
    """Optimizer steps of a run on so many packed rows."""
    steps = max(1, round(cfg.epochs * rows / rows_per_step))
    return min(steps, cfg.max_steps or steps)


def make_schedule(cfg, steps):
    """step -> learning rate: warm-up from zero, then a cosine down to zero."""
    return optax.warmup_cosine_decay_schedule(
        0.0, cfg.learning_rate, min(cfg.warmup_steps, steps // 2), steps)


def make_optimizer(schedule, weight_decay, max_grad_norm):
    """Clip the step's whole gradient, then AdamW; the learning rate stays readable for the log."""
    def clipped_adamw(learning_rate):
        return optax.chain(optax.clip_by_global_norm(max_grad_norm),
                           optax.adamw(learning_rate, weight_decay=weight_decay))
    return optax.inject_hyperparams(clipped_adamw)(learning_rate=schedule)


def make_micro_loss(model, loss_fn):
    """(adapters, frozen, rows) -> (loss sum, tokens), computed in the model's own dtype."""
    graph, dtype = nnx.graphdef(model), model.config.dtype

    def micro_loss(adapters, frozen, rows):
        copy = jax.tree.map(lambda array: array.astype(dtype), adapters)
        return loss_fn(nnx.merge(graph, copy, frozen), rows)
    return micro_loss


def make_train_step(model, optimizer, loss_fn):
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
        return changed, opt_state, {
            "loss": loss / tokens, "grad_norm": optax.global_norm(grads),
            "real_tokens": jnp.sum(batch.segment_ids > 0)}
    return train_step


def make_eval_step(model, loss_fn):
    """(adapters, frozen, batch) -> mean loss of all trained tokens of the batch."""
    micro_loss = make_micro_loss(model, loss_fn)

    def eval_step(adapters, frozen, batch):
        loss, tokens = jax.lax.map(lambda rows: micro_loss(adapters, frozen, rows), batch)
        return jnp.sum(loss) / jnp.sum(tokens)
    return eval_step


# For the TPU v5p's compiler. A product may use 32 MiB of the on-chip memory, not 16 (08, section 5).
LARGE_TILES = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
# Without tensor parallelism: weights are gathered while the chip multiplies (08, section 6), whole.
GATHERS_BESIDE = dict.fromkeys((
    "xla_enable_async_all_gather", "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_overlap_compute_collective_tc"), True) | {"xla_tpu_all_gather_collective_matmul_mode": "none"}


def compiler_options(mesh):
    """What a TPU's compiler is asked for; None for nothing."""
    chip = chip_of(mesh.devices.flat[0].device_kind)
    options = LARGE_TILES if chip == "v5p" else {}
    if chip in ("v5e", "v5p", "v6e") and mesh.shape["fsdp"] == mesh.size > 1:
        options = options | GATHERS_BESIDE
    return options or None


def jit_train_step(model, optimizer, loss_fn, state, options=None):
    """`make_train_step`, to be compiled: the program that 03 runs and that 08 compiles for a TPU.

    `options` are the compiler's, the same whether it is compiled ahead of time or when called.

    The old adapters and optimizer state are donated, so that the new ones take their memory, and
    the new ones are pinned to the old ones' shardings, so that step two is the program of step one.
    """
    shardings = jax.tree.map(lambda array: array.sharding, (state.adapters, state.opt_state))
    return jax.jit(make_train_step(model, optimizer, loss_fn), donate_argnums=(0, 1),
                   out_shardings=(*shardings, None), compiler_options=options)


def lower_step(model, optimizer, loss_fn, mesh, shape):
    """The step of an abstract model and a batch of `shape` [M, B, T], lowered: not yet compiled.

    Nothing gets memory: model, adapters, optimizer and batch are shapes, types and shardings. On a
    TPU the compiler will be asked for what `compiler_options` says.
    """
    state, frozen = start(model, optimizer, mesh)
    batch = Batch(**{field: jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, ROWS))
                     for field, kind in COLUMNS.items()})
    with mesh:
        return jit_train_step(model, optimizer, loss_fn, state, compiler_options(mesh)).lower(
            state.adapters, state.opt_state, frozen, batch)


def compile_ahead(lowered):
    """Compile in a thread. Returns a future of (compiled, seconds), or of what the compiler raised."""
    def work():
        began = time.perf_counter()
        return lowered.compile(), time.perf_counter() - began
    return ThreadPoolExecutor(1).submit(work)


# ── Memory ──


def memory_of(compiled, state, frozen):
    """{what: GiB per device} of a compiled step: its arguments counted, the rest by the compiler.

    Temporaries are the activations of one micro-batch and the gradients. Fresh outputs are those
    that take no donated array's place.

    Raises:
      UserError: it is more than the device has.
    """
    said = compiled.memory_analysis()
    held = {"base weights": gib(frozen), "adapters": gib(state.adapters),
            "Adam's moments": gib(state.opt_state),
            "temporaries of the step": said.temp_size_in_bytes / 2**30,
            "fresh outputs": (said.output_size_in_bytes - said.alias_size_in_bytes) / 2**30}
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0) / 2**30
    if limit and sum(held.values()) > limit:
        raise UserError(f"this does not fit: {sum(held.values()):.1f} GiB per device of "
                        f"{limit:.1f}. {LESS_MEMORY}")
    return held


LESS_MEMORY = 'Lower rows_per_device, set remat="DECODER", or pack shorter rows in 02.'


@contextlib.contextmanager
def within_memory():
    """Where the compiler or the allocator is out of memory, say so in two lines that name the fix.

    Raises:
      UserError: `RESOURCE_EXHAUSTED`, with the numbers that came with it.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = str(error).partition("RESOURCE_EXHAUSTED")[2].strip(": ").splitlines()[0]
        raise UserError(f"this does not fit: {said[:300]}\n{LESS_MEMORY}") from None


def machine_facts(mesh, held):
    """What this machine is and holds, for `machine.json`."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return {"device_kind": jax.devices()[0].device_kind, "devices": jax.device_count(),
            "hosts": jax.process_count(), "mesh": list(mesh.devices.shape),
            "held_gib_per_device": float(sum(held.values())),
            **{key: stats.get(key) for key in ("bytes_in_use", "peak_bytes_in_use",
                                               "bytes_limit")}}


# ── State and checkpoints ──


@dataclass(frozen=True)
class State:
    """All that changes while a model is trained, and all that a checkpoint has to hold."""

    step: int             # optimizer steps done
    adapters: nnx.State   # tree of float32 LoRA matrices
    opt_state: tuple      # Optax's: Adam's two moments for every adapter, counters
    data: dict | None = None  # Grain's position in the stream of batches; None is the beginning


def start(model, optimizer, mesh):
    """(the `State` before the first step, the frozen weights) of a model with adapters.

    An abstract model gives an abstract state. All shardings are canonical (`gemma.on_mesh`).
    """
    _, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    hull = gemma.on_mesh(jax.eval_shape(optimizer.init, adapters), mesh)
    if isinstance(jax.tree.leaves(adapters)[0], jax.ShapeDtypeStruct):
        return State(0, adapters, hull), frozen
    shardings = jax.tree.map(lambda array: array.sharding, hull)
    return State(0, adapters, jax.jit(optimizer.init, out_shardings=shardings)(adapters)), frozen


def open_checkpoints(folder, every, last, keep=3):
    """Orbax's manager of a folder, local or gs://: keeps the newest few.

    It saves after the first step (Orbax does), then every few, and after the last.
    """
    if "://" not in str(folder):  # Orbax wants an absolute path, and says so at the first save
        folder = Path(folder).resolve()
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(
        save_interval_steps=every, save_on_steps=[last], max_to_keep=keep, create=True))


def save(manager, state, recipe):
    """Write a checkpoint if this step is due; the files are written while the next steps run."""
    manager.save(state.step, custom_metadata={"recipe": recipe}, args=ocp.args.Composite(
        model_params=ocp.args.PyTreeSave(state.adapters),
        optimizer_state=ocp.args.PyTreeSave(state.opt_state), data=ocp.args.JsonSave(state.data)))


def recipe_of(cfg):
    """The settings that decide what is trained; a checkpoint is stored with them."""
    return {"optimizer": "adamw", **{key: getattr(cfg, key) for key in (
        "rank", "alpha", "targets", "learning_rate", "warmup_steps", "weight_decay",
        "max_grad_norm", "dtype", "seed")}}


def restore(manager, state, recipe):
    """The newest whole checkpoint's `State`, each array on the sharding that `state` has it on.

    A torn one is named, left aside, and removed once an older one has been restored, because its
    steps are about to be computed and saved again. Without any checkpoint this is `state` itself.

    Raises:
      UserError: it was trained by another recipe, and how they differ; or none of the checkpoints
        restores; or one of several hosts meets a torn one.
    """
    def like(tree):
        plan = ocp.checkpoint_utils.construct_restore_args(tree)
        return ocp.args.PyTreeRestore(item=tree, restore_args=plan)

    items = ocp.args.Composite(
        model_params=like(state.adapters), optimizer_state=like(state.opt_state),
        data=ocp.args.JsonRestore())
    steps = sorted(manager.all_steps(), reverse=True)
    for step in steps:
        try:
            saved = manager.metadata(step).custom_metadata["recipe"]
            if differences := [f"{key}: {saved.get(key)} there, {value} here"
                               for key, value in recipe.items() if saved.get(key) != value]:
                raise UserError(
                    f"{manager.directory} holds step {step} of another recipe: "
                    f"{'; '.join(differences)}.\nSet fresh=True to throw it away, or another "
                    "RUN_DIR (and CHECKPOINTS, where it is set) to keep it.")
            found = manager.restore(step, args=items)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:  # a file is missing or damaged
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
            if jax.process_count() > 1:  # the hosts have to go on from the same step
                raise UserError(f"checkpoint {step} in {manager.directory} is damaged ({why}). "
                                "Delete it, and start all hosts again.") from error
            print(f"checkpoint {step} is damaged ({why}) and is left aside")
            continue
        for newer in steps[:steps.index(step)]:
            manager.delete(newer)
        return State(step, found["model_params"], found["optimizer_state"], found["data"])
    if steps:
        raise UserError(f"none of the checkpoints {steps} in {manager.directory} can be restored. "
                        "Bring back a copy of one, or set fresh=True to start over.")
    return state


# ── Log and loop ──


class StepLog:
    """`log.jsonl`, one JSON object per step and per validation, and the lines a reader sees.

    Args:
      path: the file. On several hosts each writes its own, with the same numbers.
      steps: number of the last step.
      every: print every so many steps, and the first and the last one.
    """

    def __init__(self, path, steps, every):
        self.path, self.steps, self.every = Path(path), steps, every

    def rewind(self, step):
        """Keep what happened up to a checkpoint; a killed run may have left half a line."""
        text = self.path.read_text() if step and self.path.exists() else ""
        records = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        records = [record for record in records if record["step"] <= step]
        self.validations = [record["val_loss"] for record in records if "val_loss" in record]
        self.first = step
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in records))

    def write(self, record):
        """Append one line, handed to the operating system at once."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def training(self, record):
        """Log one optimizer step, and print the first, the last and every few."""
        self.write(record)
        step = record["step"]
        done = step - self.first - 1  # the first step warms up, and is not in the time left
        if not done:
            self.begun = time.perf_counter()
        if step % self.every == 0 or not done or step == self.steps:
            left = (time.perf_counter() - self.begun) / max(1, done) * (self.steps - step)
            eta = f" | left {clock(left)}" if done else ""
            print(f"step {step}/{self.steps} | loss {record['loss']:.4f} | lr "
                  f"{record['learning_rate']:.2e} | grad norm {record['grad_norm']:.2f} | "
                  f"{record['seconds']:.2f} s/step | "
                  f"{record['real_tokens'] / record['seconds']:,.0f} real tok/s{eta}", flush=True)

    def validation(self, step, loss):
        """Log a validation loss, and say so when it no longer falls."""
        self.write({"step": step, "val_loss": loss})
        self.validations.append(loss)
        since = len(self.validations) - 1 - int(np.argmin(self.validations))
        note = f" | best {min(self.validations):.4f}, {since} validations ago" if since else ""
        print(f"step {step}/{self.steps} | validation loss {loss:.4f}{note}", flush=True)


def train(state, frozen, train_step, validate, dataset, mesh, log, manager, recipe, validate_every):
    """Next batch, step, log, validate, save: from where `state` stands to the last step.

    Args:
      state, frozen: from `start`, or `state` from `restore`. Its arrays are used up.
      train_step: the compiled step.
      validate: adapters -> loss of the held-out rows.
      dataset: from `make_dataset`; read on from `state.data`.
      log, manager, recipe: where the losses go, where the checkpoints go, and what they belong to.

    Returns:
      The last `State`.

    Raises:
      UserError: a step's gradient is not finite. Nothing of that step has been written.
    """
    batches = iter(dataset)
    if state.data is not None:
        batches.set_state(state.data)
    log.rewind(state.step)
    if state.step == 0:
        log.validation(0, validate(state.adapters))
    batch = to_mesh(next(batches), mesh)
    for step in range(state.step + 1, log.steps + 1):
        began, position = time.perf_counter(), batches.get_state()
        adapters, opt_state, metrics = train_step(state.adapters, state.opt_state, frozen, batch)
        batch = to_mesh(next(batches), mesh)  # the next one is read while this step runs
        state = State(step, adapters, opt_state, position)
        record = {"step": step, "loss": float(metrics["loss"]),
                  "learning_rate": float(opt_state.hyperparams["learning_rate"]),
                  "grad_norm": float(metrics["grad_norm"]),
                  "seconds": time.perf_counter() - began,
                  "real_tokens": int(metrics["real_tokens"])}
        if not np.isfinite(record["grad_norm"]):
            raise UserError(f"step {step}: loss {record['loss']}, gradient norm "
                            f"{record['grad_norm']}. Lower learning_rate, start over.")
        log.training(record)  # before the checkpoint that contains this step
        if step % validate_every == 0 or step == log.steps:
            log.validation(step, validate(state.adapters))
        save(manager, state, recipe)
    manager.wait_until_finished()  # files of the last steps
    return state
