"""The programs that a run of 03 compiles, from its settings and from shapes alone.

03 runs them, and 08 hands the same programs to a TPU's compiler. So what 08 compiled is what 03
runs. `shapes_of` says how large their arguments are, and `lower` traces one of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.models.gemma4.model import Gemma4, ModelConfig

from helpers import gemma, quantized, train

# In the order in which they run. Each adapter is made by a program of its own, of one array.
PROGRAMS = ("answers before", "optimizer state", "evaluation", "step", "answers after")
STOPS = (1, 106, 50)  # ids that end an answer of Gemma 4; other ids would change no shape


@dataclass(frozen=True)
class Shapes:
    """How large the arguments of a run's programs are, apart from the model itself."""

    step: tuple[int, int, int]        # [M micro-batches, B rows, T tokens] of an optimizer step
    evaluation: tuple[int, int, int]  # the same of a validation
    trained: int                      # K: trained tokens of a row, at most
    answers: tuple[int, int]          # [B prompts, T tokens with the answers]
    at_once: int                      # tokens of the prompts that are read in one pass


def shapes_of(
    cfg: train.Settings,
    fsdp: int,
    length: int,
    trained: int,
    held_out: int,
    prompts: Sequence[int],
) -> Shapes:
    """The `Shapes` of a run.

    Args:
      cfg: 03's settings.
      fsdp: parts that the mesh cuts rows into.
      length: tokens of a row.
      trained: trained tokens of a row, at most (`train.capacity_of`).
      held_out: rows that 02 left for validation.
      prompts: tokens of each prompt that is answered before and after.

    Raises:
      UserError: as `train.micro_batches_of`.
    """
    micro_batches, micro_rows = train.micro_batches_of(cfg, fsdp)
    validation_rows = min(cfg.validation_rows, held_out)
    validations = math.ceil(validation_rows / micro_rows)
    return Shapes(
        step=(micro_batches, micro_rows, length),
        evaluation=(validations, micro_rows, length),
        trained=trained,
        answers=gemma.answer_shape(prompts, cfg.answer_tokens, fsdp),
        at_once=gemma.read_at_once(np.array(prompts)),
    )


def adapted(model: Gemma4, cfg: train.Settings, mesh: Mesh) -> Gemma4:
    """A model as 03 trains it: it has adapters, and computes attention by blocks.

    Args:
      model: the base, real or abstract, stored as `cfg` says. Its attention layers are changed in
        place.
      cfg: 03's settings.
      mesh: that the model lives on.
    """
    provider = quantized.provider(
        cfg.base_dtype,
        cfg.rank,
        cfg.alpha,
        cfg.targets,
        cfg.int8_products,
    )
    if cfg.attention_block:
        gemma.use_block_attention(model, cfg.attention_block)
    return gemma.inject_lora(
        model,
        cfg.rank,
        cfg.alpha,
        mesh,
        cfg.targets,
        cfg.seed,
        cfg.partial,
        provider,
    )


def abstract(config: ModelConfig, cfg: train.Settings, mesh: Mesh) -> Gemma4:
    """A model as 03 trains it (`adapted`), of shapes, dtypes and shardings: no number, no memory.

    Args:
      config: from `gemma.config_from_hf`.
      cfg: 03's settings.
      mesh: that it would live on.
    """
    base = quantized.abstract_base(config, mesh, cfg.base_dtype)
    return adapted(base, cfg, mesh)


def per_device(model: Gemma4) -> dict[str, float]:
    """{"base" | "adapters": GiB that one device holds of it}, for a real or an abstract model."""
    _, adapters, base = nnx.split(model, nnx.LoRAParam, ...)
    return {
        "base": gemma.gib(base),
        "adapters": gemma.gib(adapters),
    }


def by_mesh(config: ModelConfig, cfg: train.Settings) -> dict[str, dict[str, float]]:
    """{"(fsdp, tp) = (1, 4)": `per_device` of a model there} for every mesh of these devices."""
    held_by = {}
    for shape in gemma.possible_meshes(config):
        mesh = gemma.make_mesh(config, shape)
        model = abstract(config, cfg, mesh)
        held_by[f"(fsdp, tp) = {shape}"] = per_device(model)
    return held_by


def lower(
    program: str,
    cfg: train.Settings,
    shapes: Shapes,
    mesh: Mesh,
    model: Gemma4,
    steps: int = 1_200,
) -> jax.stages.Lowered:
    """One of `PROGRAMS`, lowered: traced, not yet compiled.

    Args:
      program: its name.
      cfg, shapes: of the run.
      mesh: of this machine's devices, or of a TPU's that it doesn't have.
      model: abstract, and with adapters (`adapted`), except for the answers before.
      steps: of the schedule; they change a constant and no shape.
    """
    if program.startswith("answers"):
        return _lower_answers(model, shapes, mesh)
    schedule = train.make_schedule(cfg, steps)
    optimizer = train.make_optimizer(schedule, cfg.weight_decay, cfg.max_grad_norm)
    loss_fn = train.make_loss(shapes.trained)
    if program == "step":
        return train.lower_step(model, optimizer, loss_fn, mesh, shapes.step)

    state, frozen = train.start(model, optimizer, mesh)
    with mesh:
        if program == "optimizer state":
            first_state = train.jit_optimizer_state(optimizer, state.opt_state)
            return first_state.lower(state.adapters)
        batch = train.abstract_batch(shapes.evaluation, mesh)
        evaluate = train.jit_eval_step(model, loss_fn, mesh)
        return evaluate.lower(state.adapters, frozen, batch)


def _lower_answers(model: Gemma4, shapes: Shapes, mesh: Mesh) -> jax.stages.Lowered:
    """The greedy answers of a model, lowered."""
    rows, total = shapes.answers
    tokens = jax.ShapeDtypeStruct((rows, total), jnp.int32)
    places = jax.ShapeDtypeStruct((rows,), jnp.int32)
    loop = gemma.answer_program(model, mesh, shapes.at_once, STOPS)
    weights = nnx.state(model)
    with mesh:
        return loop.lower(weights, tokens, places, places)


def beside(program: str, cfg: train.Settings, mesh: Mesh, model: Gemma4) -> float:
    """GiB that one device holds, beside a program's own arguments, while the program runs in 03.

    Adam's moments stay in memory while the model answers and while it's evaluated. The frozen
    weights are there while the optimizer's state is made.
    """
    if program in ("step", "answers before"):
        return 0.0
    optimizer = train.make_optimizer(lambda step: 1.0, cfg.weight_decay, cfg.max_grad_norm)
    state, frozen = train.start(model, optimizer, mesh)
    if program == "optimizer state":
        return gemma.gib(frozen)
    return gemma.gib(state.opt_state)
