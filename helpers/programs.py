"""The programs that a run of 03 compiles, from its settings and from shapes alone.

03 runs them, and 08 hands the same ones to a TPU's compiler: for each of them, what was compiled is
what runs. `shapes_of` says how large their arguments are, `lower` traces one of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.sharding import Mesh
from tunix.models.gemma4.model import Gemma4

from helpers import gemma, train

# In the order in which they run. Each adapter is made by a program of its own, of one array.
PROGRAMS = ("answers before", "optimizer state", "evaluation", "step", "answers after")
STOPS = (1, 106, 50)  # ids that end an answer of Gemma 4; which ones changes no shape


@dataclass(frozen=True)
class Shapes:
    """How large the arguments of a run's programs are, beside the model itself."""

    step: tuple[int, int, int]        # [M micro-batches, B rows, T tokens] of an optimizer step
    evaluation: tuple[int, int, int]  # the same of a validation
    trained: int                      # K: trained tokens of a row, at most
    answers: tuple[int, int]          # [B prompts, T tokens with the answers]
    at_once: int                      # tokens of the prompts that are read in one pass


def shapes_of(cfg: train.Settings, fsdp: int, length: int, trained: int, held_out: int,
              prompts: Sequence[int]) -> Shapes:
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
    validated = math.ceil(min(cfg.validation_rows, held_out) / micro_rows)
    answers = gemma.answer_shape(prompts, cfg.answer_tokens, fsdp)
    return Shapes((micro_batches, micro_rows, length), (validated, micro_rows, length), trained,
                  answers, gemma.read_at_once(np.array(prompts)))


def adapted(model: Gemma4, cfg: train.Settings, mesh: Mesh,
            provider: qwix.QuantizationProvider | None = None) -> Gemma4:
    """A model, real or abstract, as 03 trains it: attention by blocks, and adapters.

    A quantised base (11) brings its own `provider`.
    """
    if cfg.attention_block:
        gemma.use_block_attention(model, cfg.attention_block)
    return gemma.inject_lora(model, cfg.rank, cfg.alpha, mesh, cfg.targets, cfg.seed, cfg.partial,
                             provider)


def lower(program: str, cfg: train.Settings, shapes: Shapes, mesh: Mesh, model: Gemma4,
          steps: int = 1_200) -> jax.stages.Lowered:
    """One of `PROGRAMS`, lowered: traced, not yet compiled.

    Args:
      program: its name.
      cfg, shapes: of the run.
      mesh: of devices that this machine has, or of a TPU's that it hasn't.
      model: abstract; with adapters (`adapted`), but for the answers before.
      steps: of the schedule; they change a constant and no shape.
    """
    if program.startswith("answers"):
        return _lower_answers(model, shapes, mesh)
    optimizer = train.make_optimizer(train.make_schedule(cfg, steps), cfg.weight_decay,
                                     cfg.max_grad_norm)
    loss_fn = train.make_loss(shapes.trained)
    if program == "step":
        return train.lower_step(model, optimizer, loss_fn, mesh, shapes.step)
    state, frozen = train.start(model, optimizer, mesh)
    with mesh:
        if program == "optimizer state":
            return train.jit_optimizer_state(optimizer, state.opt_state).lower(state.adapters)
        return train.jit_eval_step(model, loss_fn).lower(
            state.adapters, frozen, train.abstract_batch(shapes.evaluation, mesh))


def _lower_answers(model: Gemma4, shapes: Shapes, mesh: Mesh) -> jax.stages.Lowered:
    """The greedy answers of a model, lowered."""
    rows, total = shapes.answers
    tokens = jax.ShapeDtypeStruct((rows, total), jnp.int32)
    places = jax.ShapeDtypeStruct((rows,), jnp.int32)
    loop = gemma.answer_program(model, mesh, shapes.at_once, STOPS)
    with mesh:
        return loop.lower(nnx.state(model), tokens, places, places)


def beside(program: str, cfg: train.Settings, mesh: Mesh, model: Gemma4) -> float:
    """GiB of one device that lie beside a program's own arguments while it runs in 03.

    What trains a model stays while it answers and is evaluated: Adam's moments. While an optimizer
    state is made, the frozen weights are there.
    """
    if program in ("step", "answers before"):
        return 0.0
    optimizer = train.make_optimizer(lambda step: 1.0, cfg.weight_decay, cfg.max_grad_norm)
    state, frozen = train.start(model, optimizer, mesh)
    return gemma.gib(frozen if program == "optimizer state" else state.opt_state)
