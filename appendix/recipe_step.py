"""recipe.py's training step of the E2B, compiled for one TPU chip that isn't here.

    python -m appendix.recipe_step     compiles what data/dryrun/recipe_py.csv lacks (08)

recipe.py shares no code with 03, so its step is another program. These are its own functions; only
the weights are abstract.
"""

import dataclasses
import datetime
import math
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import recipe
from appendix import steps
from helpers import gemma
from helpers.run import phase, write_text
from tables.hardware import SLICES
from tables.stored import config_of
from tpu_time import compiler

STORED = steps.FOLDER / "recipe_py.csv"


@dataclass(frozen=True)
class Case:
    """One step: where it runs, and the settings of recipe.py that decide its shapes.

    Attributes:
      name: whose settings they are.
      topology: the slice, of one chip.
      size: of the model.
      rank: of the adapters.
      rows_per_step, sequence_length: of an optimizer step; one row is computed at a time.
      places: tokens of a row that get a loss, at most.
    """

    name: str
    topology: str
    size: str = "e2b"
    rank: int = 64
    rows_per_step: int = 8
    sequence_length: int = 2048
    places: int = 1024


OWN = Case("own data", "v5e-1", rank=16, sequence_length=1024, places=512)
CASES = (
    OWN,
    dataclasses.replace(OWN, topology="v6e-1"),
    Case("recipe.py as it comes", "v6e-1"),
    Case("recipe.py as it comes", "v5e-1"),
)


def lower(case: Case) -> jax.stages.Lowered:
    """The step that `recipe.make_steps` makes, lowered for an abstract model."""
    config = gemma.config_from_hf(config_of(case.size))
    config.dtype = jnp.dtype("bfloat16")
    mesh = gemma.make_mesh(config, devices=compiler.devices_of(case.topology))
    base = gemma.abstract_base(config, mesh)

    def adapt(base: nnx.Module) -> nnx.Module:
        lora = recipe.add_lora(base, mesh, case.rank, float(case.rank), seed=0)
        return lora.model

    shapes = nnx.eval_shape(adapt, base)
    model = gemma.place(shapes, mesh)
    _, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)

    cfg = recipe.Settings(rank=case.rank, rows_per_step=case.rows_per_step)
    optimizer = recipe.make_optimizer(cfg, steps=1_200)
    moments = jax.eval_shape(optimizer.init, adapters)
    moments = gemma.on_mesh(moments, mesh)
    train: Any  # what `jax.jit` returns, which can lower
    train, _ = recipe.make_steps(model, optimizer, case.places)

    rows = mesh.shape["fsdp"]
    shape = (case.rows_per_step // rows, rows, 4, case.sequence_length)
    cut = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=cut)
    with mesh:
        return train.lower(adapters, moments, frozen, batch)


def row_of(case: Case) -> dict[str, str]:
    """Compile a case: its settings, the versions, and the GiB of the chip by the compiler."""
    start = time.process_time()
    program, refusal = steps.compiled_or_refused(lower(case))
    memory = steps.memory_of_program(program, refusal)
    limit = SLICES[case.topology].chip.hbm / 2**30
    needed = memory["hbm_gib"] or math.inf  # a refusal doesn't always say how much
    return steps.as_text({
        **dataclasses.asdict(case),
        **steps.versions(),
        **memory,
        "limit_gib": limit,
        "fits": program is not None and needed <= limit,
        "compile_cpu_seconds": time.process_time() - start,
        "date": str(datetime.date.today()),
    })


def is_of(case: Case, row: dict[str, str]) -> bool:
    """Is a stored row this case, with today's versions?"""
    wanted: dict[str, Any] = dataclasses.asdict(case)
    wanted |= steps.versions()
    return steps.as_text(wanted).items() <= row.items()


def main() -> None:
    """Compile the cases that aren't stored; each row is on disk as soon as it's known."""
    assert compiler.start(), "the TPU's compiler is missing. Run: ./setup.sh dryrun"
    compiler.register()
    for case in CASES:
        rows = steps.stored_rows(STORED)
        if any(is_of(case, row) for row in rows):
            continue
        with phase(f"{case.name}, {case.size} on a {case.topology}", every=60.0):
            rows.append(row_of(case))
        write_text(STORED, pd.DataFrame(rows).to_csv(index=False))
        jax.clear_caches()


if __name__ == "__main__":
    main()
