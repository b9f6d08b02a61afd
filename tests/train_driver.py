"""What 03 does with helpers/train.py, on small random data, for tests.

As a program: train_driver.py FOLDER STEPS [DTYPE [FSDP TP]]; like the notebook it continues from
FOLDER's checkpoints. CHECKPOINTS names another place for them; with JAX_NUM_PROCESSES it's one of
several hosts. Line by line it prints what a test may want to wait for.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest  # noqa: F401  (finds the repository, and asks for four devices)

if __name__ == "__main__":
    hosts = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("count=4", f"count={4 // hosts}")

import jax
import numpy as np
import optax
import random_gemma

from helpers import gemma, train
from helpers.opening import join_hosts, quiet
from helpers.packing import COLUMNS


def examples(count, length, vocab=320, seed=0):
    """Random packed rows: {field: [count, length]}; two or three examples and padding."""
    rng = np.random.default_rng(seed)
    rows = {field: np.zeros((count, length), kind) for field, kind in COLUMNS.items()}
    for row in range(count):
        places, number = np.arange(4, length - 2, 3), rng.integers(2, 4)
        cuts = np.sort(rng.choice(places, size=number, replace=False))
        for segment, (start, stop) in enumerate(zip((0, *cuts[:-1]), cuts), 1):
            rows["tokens"][row, start:stop] = rng.integers(3, vocab, stop - start)
            rows["segment_ids"][row, start:stop] = segment
            rows["positions"][row, start:stop] = np.arange(stop - start)
            rows["loss_mask"][row, start + (stop - start + 1) // 2:stop] = True
    return rows


def write_data(folder):
    """data/train and data/val as notebook 02 leaves them."""
    for part, count, seed in (("train", 24, 1), ("val", 6, 2)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for name, array in examples(count, 32, seed=seed).items():
            np.save(folder / part / f"{name}.npy", array)


def make(model, mesh, optimizer=None):
    """A model with adapters and what trains it: loss, optimizer, first state, jitted step."""
    loss_fn = train.make_loss(31)
    optimizer = optimizer or optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    state, frozen = train.start(model, optimizer, mesh)
    return SimpleNamespace(
        model=model, mesh=mesh, optimizer=optimizer, loss_fn=loss_fn, state=state, frozen=frozen,
        step=train.jit_train_step(model, optimizer, loss_fn, state))


def build(folder, steps, dtype="bfloat16", shape=None):
    """A run as 03 makes it, restored from `folder` if there is a checkpoint."""
    quiet()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    folder = Path(folder)
    if not (folder / "base").exists():
        random_gemma.write(folder / "base", random_gemma.SHALLOW)
        write_data(folder / "data")
    model_config = gemma.config_from_hf(folder / "base", dtype=dtype)
    mesh = gemma.make_mesh(model_config, shape, jax.devices()[:1] if shape == (1, 1) else None)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, steps)
    optimizer = train.make_optimizer(schedule, 1e-3, 1.0)
    rows = 4 if shape else 2 * mesh.shape["fsdp"]

    def adapt(model):
        gemma.use_block_attention(model, 16)
        return gemma.inject_lora(model, 4, 8.0, mesh)
    shapes = adapt(gemma.abstract_base(model_config, mesh))
    ahead = train.compile_ahead(train.lower_step(
        shapes, optimizer, train.make_loss(31), mesh, (2, rows, 32)))
    model = adapt(gemma.place(gemma.load_base(folder / "base", model_config, mesh), mesh))
    run = make(model, mesh, optimizer)
    run.dataset = train.make_dataset(train.PackedRows(folder / "data" / "train"), 2, rows, seed=3)
    held_out = train.validation_batch(train.PackedRows(folder / "data" / "val"), 6, rows)
    held_out = train.to_mesh(held_out, mesh)
    evaluate = jax.jit(train.make_eval_step(model, run.loss_fn))
    run.validate = lambda adapters: float(evaluate(adapters, run.frozen, held_out))
    run.recipe = {"rank": 4, "steps": steps}
    checkpoints = os.environ.get("CHECKPOINTS") or folder / "checkpoints"
    run.manager = train.open_checkpoints(checkpoints, 2, steps)
    run.state = train.restore(run.manager, run.state, run.recipe)
    host = jax.process_index()  # each writes its own log; the tests read the first one's
    run.log = train.StepLog(folder / (f"log{host}.jsonl" if host else "log.jsonl"), steps, 1)
    run.compiled, _ = ahead.result()
    return run


def parts_of(run):
    """What 03 hands to its training loop."""
    return train.Run(
        train_step=run.compiled, frozen=run.frozen, validate=run.validate, validate_every=3,
        dataset=run.dataset, mesh=run.mesh, log=run.log, manager=run.manager, recipe=run.recipe)


def go(run):
    """Train to the end, as 03 does."""
    with run.mesh:
        run.state = train.train(parts_of(run), run.state)
    run.manager.close()
    return run


if __name__ == "__main__":
    join_hosts()
    run = build(sys.argv[1], int(sys.argv[2]), dtype=(*sys.argv[3:4], "bfloat16")[0],
                shape=tuple(map(int, sys.argv[4:6])) or None)
    print(f"training from step {run.state.step}", flush=True)
    go(run)
    print("finished", flush=True)
