"""Step, evaluation and answers of a small E2B, compiled for a v5e chip: who copies its table?

    .venv/bin/python tests/compile_table.py FOLDER    (of `random_gemma.write`; needs .libtpu)

Prints a JSON object: {program: copies of the whole table in it}.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tpu_time import compiler  # noqa: E402

compiler.start()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from helpers import gemma, train  # noqa: E402

ROWS, LENGTH, TRAINED = 4, 256, 128


def lowered(folder):
    """{program: lowered} of a model whose table lies as `gemma.place` puts it."""
    config = gemma.config_from_hf(folder)
    config.remat_config = gemma.RematConfig.DECODER
    mesh = gemma.make_mesh(config, (1, 1), devices=compiler.devices_of("v5e-1"))
    base = gemma.abstract_base(config, mesh)
    model = gemma.inject_lora(gemma.abstract_base(config, mesh), 4, 8.0, mesh)
    optimizer = train.make_optimizer(optax.constant_schedule(1e-3), 0.0, 1.0)
    loss = train.make_loss(TRAINED)
    step = train.lower_step(model, optimizer, loss, mesh, (ROWS, 1, LENGTH))
    state, frozen = train.start(model, optimizer, mesh)
    ids = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    count = jax.ShapeDtypeStruct((4,), jnp.int32)
    with mesh:
        evaluation = train.jit_eval_step(model, loss, mesh).lower(
            state.adapters, frozen, train.abstract_batch((ROWS, 1, LENGTH), mesh))
        loop = gemma.answer_program(base, mesh, 64, [1])
        answers = loop.lower(nnx.state(base), ids, count, count)
    return {"step": step, "evaluation": evaluation, "answers": answers}


def copies(program, config):
    """How often the table is copied whole."""
    shape = f"bf16[{config.num_embed},{config.num_layers},{config.per_layer_input_dim}]"
    text = program.compile().as_text()
    return len(re.findall(rf"= {re.escape(shape)}{{[^}}]*}} copy\(", text))


def main(folder):
    """All programs, and the step once more with the layout that the TPU chooses by itself."""
    compiler.register()
    config = gemma.config_from_hf(folder)
    found = {name: copies(program, config) for name, program in lowered(folder).items()}
    gemma._row_by_row = lambda table: table  # as the TPU would have it
    found["by default"] = copies(lowered(folder)["step"], config)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
