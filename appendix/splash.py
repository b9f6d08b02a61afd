"""The LoRA step of the 31B that somebody trained on a v5e-8, with splash attention: its memory.

    python -m appendix.splash     plans the rows of data/anchors/splash.csv that lack a plan

Their step isn't Tunix's: adapters on the upper half of the layers only, in float32, Adam without
weight decay, and a loss that meets the output matrix 1,024 positions at a time. The model is
Tunix's, DECODER remat, fsdp 2 x tp 4, two rows. Source: damsolanke/gemma4-swe-kit (401aa98),
examples/tpu, there with JAX 0.11.0, libtpu 0.0.44.1 and Tunix at e80311f.
"""

import functools
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pandas as pd
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma4 import model as gemma4

from appendix import steps
from helpers import gemma, train
from helpers.run import write_text
from tpu_time import anchors, compiler

STORED = Path("data/anchors/splash.csv")
LAYERS = 60

MODULES = {
    "q": "attn/q_einsum",
    "o": "attn/attn_vec_einsum",
    "gate": "mlp/gate_proj",
    "up": "mlp/up_proj",
    "down": "mlp/down_proj",
}
CHUNK = 1_024  # positions of a row that meet the output matrix at once
SOFTCAP = 30.0
ROWS = 2


def adapted(layers: int, targets: list[str], mesh: jax.sharding.Mesh, rank: int) -> gemma4.Gemma4:
    """The abstract model, with adapters on the upper half of its layers, and splash attention."""
    config = gemma4.ModelConfig.gemma4_31b()
    config.num_layers = layers
    config.param_dtype = config.dtype = jnp.bfloat16

    def build() -> gemma4.Gemma4:
        base = gemma4.Gemma4(config, rngs=nnx.Rngs(0))
        upper = "|".join(str(layer) for layer in range(layers // 2, layers))
        modules = "|".join(MODULES[target] for target in targets)
        provider = qwix.LoraProvider(
            module_path=rf"layers/({upper})/({modules})", rank=rank, alpha=float(rank))
        return qwix.apply_lora_to_model(base, provider, **base.get_model_input(),
                                        rngs=nnx.Rngs(0))

    model = gemma.place(nnx.eval_shape(build), mesh)
    for _, module in nnx.iter_modules(model):
        own = getattr(module, "config", None)
        if isinstance(own, gemma4.ModelConfig):  # only after Qwix has run it on two tokens
            own.use_sliding_window_kv_cache = False
            own.use_flash_attention = True
            own.remat_config = gemma4.RematConfig.DECODER
    return model


def last_stream(model: gemma4.Gemma4, tokens: jax.Array) -> jax.Array:
    """What the output matrix would get. Qwix adapts the whole model's call alone, so we make it."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with train.without_output_matrix(model):
        hidden, _ = model(tokens, positions, None, None)
    return hidden.astype(jnp.bfloat16)


def losses(hidden: jax.Array, output: jax.Array, targets: jax.Array, weights: jax.Array
           ) -> jax.Array:
    """The weighted loss of each row, a chunk of positions at a time, computed again backward."""
    def pieces(array: jax.Array) -> jax.Array:
        return array.reshape(ROWS, -1, CHUNK, *array.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def of_chunk(h: jax.Array, target: jax.Array, weight: jax.Array, output: jax.Array
                 ) -> jax.Array:
        logits = jnp.einsum("bcd,vd->bcv", h, output, preferred_element_type=jnp.float32)
        logits = jnp.tanh(logits / SOFTCAP) * SOFTCAP
        words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        right = jnp.sum(jnp.where(words == target[..., None], logits, 0.0), -1)
        return jnp.sum((jax.nn.logsumexp(logits, -1) - right) * weight, -1)

    def add(total: jax.Array, piece: tuple) -> tuple[jax.Array, None]:
        return total + of_chunk(*piece, output), None

    start = jnp.zeros(ROWS, jnp.float32)
    total, _ = jax.lax.scan(add, start, (pieces(hidden), pieces(targets), pieces(weights)))
    return total


class Step(NamedTuple):
    """A step that isn't lowered yet."""

    mesh: jax.sharding.Mesh
    function: Any  # jitted
    arguments: tuple  # trees of abstract arrays, the adapters and Adam's moments first

    def gib(self) -> float:
        """GiB that one chip holds of the arguments."""
        total = 0
        for array in jax.tree.leaves(self.arguments):
            piece = array.sharding.shard_shape(array.shape)
            total += math.prod(piece) * array.dtype.itemsize
        return total / 2**30


def step_of(layers: int, length: int, targets: list[str], rank: int = 32) -> Step:
    """The step for a v5e-8.

    Args:
      layers: whose upper half has adapters; 60 is the model.
      length: tokens of each of the two rows.
      targets: keys of `MODULES`.
      rank: of the adapters.
    """
    mesh = anchors.mesh_of(compiler.devices_of("v5e-8"), (2, 4))
    model = adapted(layers, targets, mesh, rank)
    graph, adapters, base = nnx.split(model, nnx.LoRAParam, ...)
    wide = partial(jax.tree.map, lambda array: jax.ShapeDtypeStruct(
        array.shape, jnp.float32, sharding=array.sharding))
    adapters = wide(adapters)
    rule = optax.apply_if_finite(optax.scale_by_adam(), max_consecutive_errors=20)
    whole = NamedSharding(mesh, PartitionSpec())

    def loss(adapters: Any, base: Any, tokens: jax.Array, answers: jax.Array, weights: jax.Array
             ) -> tuple[jax.Array, jax.Array]:
        narrow = jax.tree.map(lambda array: array.astype(jnp.bfloat16), adapters)
        model = nnx.merge(graph, narrow, base)
        hidden = last_stream(model, tokens)
        output = jax.lax.with_sharding_constraint(
            model.embedder.input_embedding.get_value(),
            NamedSharding(mesh, PartitionSpec("tp", None)))
        each = losses(hidden, output, answers, weights)
        return each.sum() / jnp.maximum(weights.sum(), 1.0), each

    def step(adapters: Any, state: Any, base: Any, tokens: jax.Array, answers: jax.Array,
             weights: jax.Array, rate: jax.Array) -> tuple:
        (value, each), slope = jax.value_and_grad(loss, has_aux=True)(
            adapters, base, tokens, answers, weights)
        change, state = rule.update(slope, state, adapters)
        change = jax.tree.map(lambda array: (-rate * array).astype(array.dtype), change)
        return (optax.apply_updates(adapters, change), state, value, each,
                optax.global_norm(slope))

    def is_adapters(node: Any) -> bool:
        return isinstance(node, nnx.State)

    def placed(node: Any) -> Any:
        if is_adapters(node):
            return adapters
        return jax.ShapeDtypeStruct(node.shape, node.dtype, sharding=whole)

    state = jax.tree.map(placed, jax.eval_shape(rule.init, adapters), is_leaf=is_adapters)
    shardings = partial(jax.tree.map, lambda array: array.sharding)
    rows = partial(anchors.placed, mesh, (ROWS, length), cut=("fsdp",))
    outputs = (shardings(adapters), shardings(state), whole, whole, whole)
    function = jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs)
    arguments = (adapters, state, base, rows("int32"), rows("int32"), rows("float32"),
                 anchors.placed(mesh, (), "float32"))
    return Step(mesh, function, arguments)


def lower(layers: int, length: int, targets: list[str], rank: int = 32) -> jax.stages.Lowered:
    """`step_of`, lowered. Tunix asks for the mesh while it's traced."""
    step = step_of(layers, length, targets, rank)
    with step.mesh:
        return step.function.lower(*step.arguments)


def compare(row: dict[str, str]) -> None:
    """Fill in a chip's share of the arguments, and how far our plan is from theirs."""
    step = step_of(LAYERS, int(row["length"]), row["targets"].split(), int(row["rank"]))
    arguments = step.gib()
    whole = float(row["whole_gib"])
    ours = whole - arguments if row["theirs"] == "temporaries" else whole
    row["arguments_gib"] = f"{arguments:.4g}"
    row["miss"] = f"{ours / float(row['theirs_gib']) - 1:.3f}"


def main() -> None:
    """Plan the rows that have no `whole_gib`: a few CPU minutes each."""
    compiler.start()  # and no device before the last plan
    rows = steps.stored_rows(STORED)
    for row in rows:
        if row["whole_gib"]:
            continue
        whole = compiler.planned(functools.partial(
            lower, LAYERS, int(row["length"]), row["targets"].split(), int(row["rank"])))
        row["whole_gib"] = f"{whole:.4g}"
        steps.stamp(row)
        write_text(STORED, pd.DataFrame(rows).to_csv(index=False))
        print(*row.values(), flush=True)
    compiler.register()
    for row in rows:
        if row["whole_gib"] and not row["miss"]:
            compare(row)
    write_text(STORED, pd.DataFrame(rows).to_csv(index=False))


if __name__ == "__main__":
    main()
