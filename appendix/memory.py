"""Tunix's own LoRA step, which others ran on v5e chips: the memory that XLA plans, and its seconds.

    python -m appendix.memory     fills in what memory.csv and anchors.csv in data/anchors lack (08)

The others kept XLA's memory report of every run, also of those that the compiler refused: GiB of a
chip, "Default CE", rank 16, JAX 0.10.1, Tunix 0.1.7 at 43cb3bd. A v5e holds 15.75.
"""

import functools
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
from helpers.run import write_text
from tpu_time import anchors, compiler

STORED = Path("data/anchors/memory.csv")
MODULES = ".*(q_einsum|kv_einsum|qkv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj).*"
MODELS = {"270M": gemma3.ModelConfig.gemma3_270m, "1B": gemma3.ModelConfig.gemma3_1b_it,
          "E2B": gemma4.ModelConfig.gemma4_e2b, "E4B": gemma4.ModelConfig.gemma4_e4b}
DTYPES = {"input_tokens": jnp.int32, "input_mask": bool, "valid": bool}  # of a batch


def lower(row: dict[str, str]) -> jax.stages.Lowered:
    """The step of a row of the table, lowered.

    The batch was whole on every chip: `jax.set_mesh` hides a mesh from Tunix.
    """
    config = MODELS[row["model"]]()
    config.param_dtype = jnp.bfloat16  # as stored; Tunix's own default for Gemma 4 is float32
    is_gemma4 = isinstance(config, gemma4.ModelConfig)
    kind = gemma4.Gemma4 if is_gemma4 else gemma3.Gemma3
    fsdp, tp = row["mesh"].split("x")
    mesh = jax.make_mesh((int(fsdp), int(tp)), ("fsdp", "tp"),
                         devices=compiler.devices_of(row["slice"]),
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def build():
        base = kind(config, rngs=nnx.Rngs(0))
        provider = qwix.LoraProvider(module_path=MODULES, rank=16, alpha=32.0)
        example = base.get_model_input()
        return qwix.apply_lora_to_model(base, provider, **example, rngs=nnx.Rngs(0))

    def model_input(batch):
        valid = batch.pop("valid")
        positions = sft_utils.build_positions_from_mask(valid)
        mask = sft_utils.make_causal_attn_mask(valid)
        return batch | {"positions": positions, "attention_mask": mask}

    shape = (int(row["rows"]), int(row["length"]))
    whole = NamedSharding(mesh, PartitionSpec())
    batch = {}
    for name, dtype in DTYPES.items():
        batch[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
    optimizer = optax.adamw(2e-4, weight_decay=0.0)
    with jax.set_mesh(mesh):
        model = gemma.place(nnx.eval_shape(build), mesh)
        return steps.lower_tunix(model, mesh, optimizer, model_input, batch)


def timed(model: str, chips: str, mesh: str, number: int, length: int, milliseconds: float,
          file: str) -> anchors.Anchor:
    """A step that ran 5,000 times on one chip or 1,000 times on four, mean without the first.

    Args:
      model: a key of `MODELS`.
      chips: the slice, such as "v5e-4".
      mesh: fsdp x tp, such as "4x1".
      number, length: the rows of a step, and their tokens.
      milliseconds: what a step took there.
      file: that says so, in the others' repository.
    """
    row = {"model": model,
           "slice": chips,
           "mesh": mesh,
           "rows": str(number),
           "length": str(length)}
    family = 4 if model == "E2B" else 3
    what = f"Tunix: LoRA step of Gemma {family} {model}, {number} x {length} tokens"
    source = f"deep-diver/tunix-accel (492fccc): 01-CCE/data/{file}, default"
    return anchors.Anchor(what, chips, milliseconds, "host", source, "JAX 0.10.1",
                          lower=lambda devices: lower(row))


SUMMARY = "gemma_1b_e2b_cce_transfer/training_summary.csv"
TIMED = {
    "tunix 270M v5e-1": timed("270M", "v5e-1", "1x1", 16, 512, 106.30,
                              "gemma3_270m_full_cce/all_runs.csv"),
    "tunix 270M v5e-4": timed("270M", "v5e-4", "4x1", 16, 512, 202.36, SUMMARY),
    "tunix 1B v5e-4": timed("1B", "v5e-4", "4x1", 8, 512, 216.94, SUMMARY),
    "tunix E2B v5e-4": timed("E2B", "v5e-4", "4x1", 4, 256, 192.75, SUMMARY),
}


def main() -> None:
    """Plan the rows that have no `ours_gib`, then predict the timed steps that are not stored."""
    compiler.start()  # and no device before the last plan
    rows = steps.stored_rows(STORED)
    for row in rows:
        if row["ours_gib"]:
            continue
        ours = compiler.planned(functools.partial(lower, row))
        theirs = float(row["theirs_gib"])
        row["ours_gib"] = f"{ours:.4g}"
        row["miss"] = f"{ours / theirs - 1:.4f}"
        steps.stamp(row)
        write_text(STORED, pd.DataFrame(rows).to_csv(index=False))
        print(*row.values(), flush=True)
    anchors.main([], anchors.ANCHORS | TIMED)


if __name__ == "__main__":
    main()
