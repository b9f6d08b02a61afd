"""Tunix's own LoRA step, which others ran on v5e chips: the memory that XLA plans, and its seconds.

    python -m appendix.memory     fills in what data/anchors/memory.csv and anchors.csv lack of it (08)

The others kept XLA's memory report of every run, also of those that the compiler refused: GiB of a
chip, "Default CE", rank 16, JAX 0.10.1, Tunix 0.1.7 at 43cb3bd. A v5e holds 15.75.
"""

import datetime
import functools
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
from tunix.sft import utils as sft_utils

from appendix import steps
from helpers import gemma
from tables.files import write_text
from tpu_time import anchors, compiler

STORED = Path("data/anchors/memory.csv")
MODULES = ".*(q_einsum|kv_einsum|qkv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj).*"
MODELS = {"270M": gemma3.ModelConfig.gemma3_270m, "1B": gemma3.ModelConfig.gemma3_1b_it,
          "E2B": gemma4.ModelConfig.gemma4_e2b, "E4B": gemma4.ModelConfig.gemma4_e4b}


def lower(row):
    """The step of a row of the table, lowered.

    The batch was whole on every chip: `jax.set_mesh` hides a mesh from Tunix.
    """
    config = MODELS[row["model"]]()
    config.param_dtype = jnp.bfloat16  # as stored; Tunix computes Gemma 4 in float32 unless it is asked
    kind = gemma4.Gemma4 if isinstance(config, gemma4.ModelConfig) else gemma3.Gemma3
    mesh = jax.make_mesh(tuple(map(int, row["mesh"].split("x"))), ("fsdp", "tp"),
                         devices=compiler.devices_of(row["slice"]),
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
    shape = int(row["rows"]), int(row["length"])
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for name, dtype in
             (("input_tokens", jnp.int32), ("input_mask", bool), ("valid", bool))}
    with jax.set_mesh(mesh):
        return steps.lower_tunix(gemma.place(nnx.eval_shape(build), mesh), mesh,
                                 optax.adamw(2e-4, weight_decay=0.0), model_input, batch)


def timed(model, chips, mesh, number, length, milliseconds, file):
    """A step that ran 5,000 times on one chip or 1,000 times on four, mean without the first."""
    row = {"model": model, "slice": chips, "mesh": mesh, "rows": number, "length": length}
    return anchors.Anchor(
        f"Tunix: LoRA step of Gemma {4 if model == 'E2B' else 3} {model}, {number} x {length} tokens",
        chips, milliseconds, "host", f"deep-diver/tunix-accel (492fccc): 01-CCE/data/{file}, default",
        "JAX 0.10.1", lower=lambda devices: lower(row))


SUMMARY = "gemma_1b_e2b_cce_transfer/training_summary.csv"
TIMED = {f"tunix {model} {chips}": timed(model, chips, *row) for model, chips, *row in (
    ("270M", "v5e-1", "1x1", 16, 512, 106.30, "gemma3_270m_full_cce/all_runs.csv"),
    ("270M", "v5e-4", "4x1", 16, 512, 202.36, SUMMARY),
    ("1B", "v5e-4", "4x1", 8, 512, 216.94, SUMMARY),
    ("E2B", "v5e-4", "4x1", 4, 256, 192.75, SUMMARY))}


def main():
    """Plan the rows that have no `ours_gib`, then predict the timed steps that are not stored."""
    compiler.start()  # and no device before the last plan
    rows = steps.stored_rows(STORED)
    for row in rows:
        if row["ours_gib"]:
            continue
        ours, theirs = compiler.planned(functools.partial(lower, row)), float(row["theirs_gib"])
        row |= {"ours_gib": f"{ours:.4g}", "miss": f"{ours / theirs - 1:.4f}",
                "jax": metadata.version("jax"), "libtpu": compiler.version(),
                "date": str(datetime.date.today())}
        write_text(STORED, pd.DataFrame(rows).to_csv(index=False))
        print(*row.values(), flush=True)
    anchors.ANCHORS |= TIMED
    anchors.main(())


if __name__ == "__main__":
    main()
