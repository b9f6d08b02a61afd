"""The glue of notebook 03 around its own definitions, on small random data, for tests.

As a program: train_driver.py FOLDER STEPS; continues from FOLDER's checkpoints, like the notebook.
Line by line it prints what a test may want to wait for.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = ("--xla_force_host_platform_device_count=4 "
                               "--xla_llvm_disable_expensive_passes=true")
    os.environ["NPROC"] = "16"
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import conftest  # noqa: F401  (finds the repository)
import numpy as np
import random_gemma
from conftest import load

from helpers import gemma

NAMES = ("Batch", "PackedRows", "make_dataset", "packed_mask", "Headless", "hidden_states", "make_loss",
         "alone", "textbook_loss",
         "make_optimizer", "make_micro_loss", "make_train_step", "make_eval_step", "PackedTrainer",
         "StepLog", "Batches", "LoggedTrainer", "saved_recipe", "refuse_another_recipe",
         "validation_batch", "mesh_table", "lora_table")
CAPACITY = 31


def notebook():
    """The definitions of 03_train.py as attributes."""
    class Definitions:
        """What 03_train.py defines."""
    for name, value in zip(NAMES, load("03_train.py", *NAMES)):
        setattr(Definitions, name, staticmethod(value) if not isinstance(value, type) else value)
    return Definitions


def examples(count, length, vocab=320, seed=0):
    """Random packed rows: {field: [count, length]}; two or three examples and some padding a row."""
    rng = np.random.default_rng(seed)
    rows = {"tokens": np.zeros((count, length), np.int32), "loss_mask": np.zeros((count, length), bool),
            "segment_ids": np.zeros((count, length), np.int32),
            "positions": np.zeros((count, length), np.int32)}
    for row in range(count):
        cuts = np.sort(rng.choice(np.arange(4, length - 2, 3), size=rng.integers(2, 4), replace=False))
        for segment, (start, stop) in enumerate(zip((0, *cuts[:-1]), cuts), 1):
            rows["tokens"][row, start:stop] = rng.integers(3, vocab, stop - start)
            rows["segment_ids"][row, start:stop] = segment
            rows["positions"][row, start:stop] = np.arange(stop - start)
            rows["loss_mask"][row, start + (stop - start + 1) // 2:stop] = True
    return rows


def write_data(folder, length=32):
    """data/train and data/val as notebook 02 leaves them."""
    for part, count, seed in (("train", 24, 1), ("val", 6, 2)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for name, array in examples(count, length, seed=seed).items():
            np.save(folder / part / f"{name}.npy", array)


def build(folder, steps, checkpoint_every=2, rank=4, config=random_gemma.TINY, dtype="bfloat16"):
    """A trainer as 03 makes it, restored from `folder` if there is a checkpoint."""
    import jax
    import optax
    import orbax.checkpoint as ocp
    from tunix.sft import peft_trainer

    from helpers.machine import quiet
    quiet()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    nb, folder = notebook(), Path(folder)
    jax.config.update("jax_compilation_cache_dir", str((folder.parent / "cache").resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if not (folder / "base").exists():
        random_gemma.write(folder / "base", config)
        write_data(folder / "data")
    model_config = gemma.config_from_hf(folder / "base", dtype=dtype)
    mesh = gemma.make_mesh(model_config)
    model = gemma.load_base(folder / "base", model_config, mesh)
    gemma.use_block_attention(model, 16)
    model = gemma.inject_lora(gemma.place(model, mesh), rank, 2.0 * rank, mesh)
    rows = 2 * mesh.shape["fsdp"]
    dataset = nb.make_dataset(nb.PackedRows(folder / "data" / "train"), 2, rows, seed=3)
    recipe = {"rank": rank, "steps": steps}
    nb.refuse_another_recipe(folder / "checkpoints", recipe)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, steps)
    training = peft_trainer.TrainingConfig(
        eval_every_n_steps=3, checkpoint_root_directory=str((folder / "checkpoints").resolve()),
        checkpointing_options=ocp.CheckpointManagerOptions(
            save_interval_steps=checkpoint_every, save_on_steps=[steps], max_to_keep=3),
        data_sharding_axis=(None, "fsdp"))
    trainer = nb.LoggedTrainer(model, nb.make_optimizer(schedule, 1e-3, 1.0), training)
    trainer.with_loss_fn(nb.make_loss(CAPACITY))
    with gemma.use_mesh(mesh):
        trainer.prepare(mesh, nb.Batches(dataset, steps), nb.StepLog(folder / "log.jsonl", steps, 1),
                        nb.validation_batch(nb.PackedRows(folder / "data" / "val"), 6, rows), 3, recipe)
        trainer.compile(next(iter(dataset)))
    return trainer, mesh


if __name__ == "__main__":
    trainer, mesh = build(sys.argv[1], int(sys.argv[2]))
    print(f"training from step {trainer.train_steps}", flush=True)
    with gemma.use_mesh(mesh):
        trainer.train()
    print("finished", flush=True)
