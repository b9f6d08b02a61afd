"""The memory that XLA plans for Tunix's own LoRA step: here, and where others ran it on v5e chips.

    .venv/bin/python -m appendix.memory [MODEL ...]    makes what data/anchors/memory.csv lacks (08)

The others kept XLA's memory report of every run, also of those that the compiler refused.
"""

import datetime
import functools
import sys
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pandas as pd
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma4 import model as gemma4
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

from appendix import steps
from helpers import gemma
from helpers.run import write_text
from tpu_time import compiler

STORED = Path("data/anchors/memory.csv")
SOURCE = "deep-diver/tunix-accel (492fccc): 01-CCE/data/"  # JAX 0.10.1, Tunix 0.1.7 at 43cb3bd
MODULES = ".*(q_einsum|kv_einsum|qkv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj).*"
MODELS = {"270M": gemma3.ModelConfig.gemma3_270m, "1B": gemma3.ModelConfig.gemma3_1b_it,
          "E2B": gemma4.ModelConfig.gemma4_e2b}
SLICES = {1: "v5e-1", 4: "v5e-4"}
# (model, fsdp, tp): {(rows, length): GiB of a chip}, "Default CE", rank 16. A v5e holds 15.75.
ONE, FOUR = "gemma3_270m_full_cce/all_runs.csv", "gemma3_270m_4chip_frontier/frontier_runs.csv"
LARGER = "gemma_1b_e2b_cce_transfer/transfer_runs.csv"
PLANS = {
    ("1B", 4, 1, LARGER): {(8, 512): 9.85, (1, 512): 2.06, (4, 512): 5.4, (4, 4096): 38.72},
    ("E2B", 4, 1, LARGER): {(4, 256): 9.74, (1, 1024): 10.75, (1, 2048): 21.07, (1, 256): 7.17},
    ("270M", 4, 1, FOUR): {(1, 512): 0.9956, (4, 512): 3.06, (1, 2048): 3.46, (8, 512): 5.83,
                           (1, 4096): 7.83, (16, 512): 11.29, (8, 1024): 11.84, (8, 2048): 21.08},
    ("270M", 2, 2, FOUR): {(4, 512): 1.81, (8, 512): 3.3, (16, 512): 6.23},
    ("270M", 1, 1, ONE): {(1, 512): 1.45, (4, 512): 3.87, (1, 2048): 4.28, (8, 512): 6.85,
                          (1, 4096): 8.75, (16, 512): 12.57, (8, 1024): 13.1, (32, 512): 21.32}}


def lower(model, shape, rows, length):
    """The step of a run. It kept its batch whole on every chip: `jax.set_mesh` hides a mesh from Tunix."""
    config = MODELS[model]()
    config.param_dtype = jnp.bfloat16  # as stored; Tunix computes Gemma 4 in float32 unless it is asked
    kind = gemma4.Gemma4 if model[0] == "E" else gemma3.Gemma3
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), devices=compiler.devices_of(SLICES[shape[0] * shape[1]]),
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def build():
        base = kind(config, rngs=nnx.Rngs(0))
        provider = qwix.LoraProvider(module_path=MODULES, rank=16, alpha=32.0)
        return qwix.apply_lora_to_model(base, provider, **base.get_model_input(), rngs=nnx.Rngs(0))

    def model_input(batch):
        valid = batch.pop("valid")
        return batch | {"positions": sft_utils.build_positions_from_mask(valid),
                        "attention_mask": sft_utils.make_causal_attn_mask(valid)}

    whole = NamedSharding(mesh, PartitionSpec())
    batch = {name: jax.ShapeDtypeStruct((rows, length), dtype, sharding=whole) for name, dtype in
             (("input_tokens", jnp.int32), ("input_mask", bool), ("valid", bool))}
    options = peft_trainer.TrainingConfig(eval_every_n_steps=3, max_steps=2)
    with jax.set_mesh(mesh):
        return steps.lower_tunix(gemma.place(nnx.eval_shape(build), mesh), mesh,
                                 optax.adamw(2e-4, weight_decay=0.0), options, model_input, batch), None


def main(models):
    """Make the rows that are not stored, of all models or of these; each is on disk at once."""
    for (model, fsdp, tp, file), runs in PLANS.items():
        for (count, length), theirs in runs.items():
            key = {"model": model, "slice": SLICES[fsdp * tp], "mesh": f"{fsdp}x{tp}",
                   "rows": str(count), "length": str(length)}
            if model not in (models or MODELS) or any(key.items() <= row.items()
                                                      for row in steps.stored_rows(STORED)):
                continue
            ours = compiler.planned(functools.partial(lower, model, (fsdp, tp), count, length))
            row = key | {
                "theirs_gib": f"{theirs:.4g}", "ours_gib": f"{ours:.4g}", "miss": f"{ours / theirs - 1:.4f}",
                "source": SOURCE + file, "jax": metadata.version("jax"), "libtpu": compiler.version(),
                "date": str(datetime.date.today())}
            write_text(STORED, pd.DataFrame([*steps.stored_rows(STORED), row]).to_csv(index=False))
            print(*row.values(), flush=True)


if __name__ == "__main__":
    compiler.start()
    main(sys.argv[1:])
