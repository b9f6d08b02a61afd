"""Programs whose time on a TPU somebody else measured, compiled here and predicted.

    .venv/bin/python -m tpu_time.anchors [NAME ...]     data/anchors/anchors.csv (08, section 9)

You need libtpu (`./setup.sh dryrun`), but no TPU. Without names it makes all rows that aren't
stored yet: most take seconds, whole steps of a model take minutes.

We write each program again here, with the shapes, types and order of its source. Every row names
the clock that measured it: `trace` (the device's own), `host` (the host's, over many repetitions),
`one call` (the host's, with dispatch), `first token` (the host's, from a request to its first
token) or `not said`. The two chunk loops don't use the links. But they were subtracted from their
twins that do, and that gave the constant `links.LINK`.
"""

import datetime
import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax.sharding import NamedSharding, PartitionSpec

from tpu_time import bands, clock, compiler, hlo, links

RECIPES = "AI-Hypercomputer/tpu-recipes: microbenchmarks/"
JAX_DOCS = "jax-ml/jax: docs/pallas/tpu/matmul.ipynb, XLA matmul"
TPUCHAT = "vorushin/tpuchat: pallas/CLAUDE.md (662fcd4f), pallas/profile_breakdown.py"
LOOPS = "deep-diver/tunix-accel: 01-CCE/data/mesh_pathology_tpu_v5e_synthetic/results.csv"

Lower = Callable[[list], jax.stages.Lowered]  # devices of a slice -> JAX's lowered program
Shape = tuple[int, ...]
Cut = tuple[str | None, ...]  # the mesh's axis over which each of an array's axes is cut, or None
Weights = dict[str, Any]


@dataclass(frozen=True)
class Anchor:
    """One measurement and how its program is made again.

    Attributes:
      program: what it is, with its shapes.
      slice: Google's name of the hardware.
      milliseconds: measured.
      clock: trace, host, one call, first token or not said.
      source: repository, file, row.
      versions: what the source says of its software; "" if it says nothing.
      lower: devices of the slice -> JAX's lowered program; None where `seconds` is enough.
      seconds: what's predicted without compiling; it's added to what's compiled.
      options: for the compiler.
      mesh: its shape; None: all chips stand along the first axis.
      sets: the constant of the model that this measurement set, so that it can't test it; or "".
      lacks: what the program computes on the chip's own memory alone, without cycles by the
        compiler, so that we predict no time for it; or "".
    """

    program: str
    slice: str
    milliseconds: float
    clock: str
    source: str
    versions: str = ""
    lower: Lower | None = None
    seconds: Callable[[], float] | None = None
    options: dict = field(default_factory=dict)
    mesh: tuple[int, int] | None = None
    sets: str = ""
    lacks: str = ""


def mesh_of(devices: list, shape: tuple[int, int] | None = None) -> jax.sharding.Mesh:
    """A mesh of two axes, fsdp and tp; without a shape all devices stand along the first."""
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh(
        shape or (len(devices), 1),
        ("fsdp", "tp"),
        devices=devices,
        axis_types=(auto, auto),
    )


def placed(
    mesh: jax.sharding.Mesh,
    sizes: Shape,
    dtype: str,
    cut: Cut = (),
) -> jax.ShapeDtypeStruct:
    """An abstract array on a mesh, whole on every device unless axes are named that cut it."""
    sharding = NamedSharding(mesh, PartitionSpec(*cut))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


# ── products and collectives ──


def product(size: int) -> Lower:
    """A product of two square bfloat16 matrices on one chip."""
    def lower(devices: list) -> jax.stages.Lowered:
        square = placed(mesh_of(devices[:1]), (size, size), "bfloat16")
        return jax.jit(lambda a, b: a @ b).lower(square, square)
    return lower


def psum() -> float:
    """Seconds of an all-reduce of 17,408 x 17,408 bfloat16 numbers over a v6e-256."""
    grid = links.Box("v6e", (16, 16))
    everybody = list(range(256))
    return links.collective_time("all-reduce", 17_408**2 * 2, [everybody], grid).seconds


def ring() -> float:
    """Seconds of an all-gather of 10 MB over the 16 chips of a v5e-128's longer side."""
    grid = links.Box("v5e", (8, 16))
    side = list(range(16))
    return links.collective_time("all-gather", 10_000_000, [side], grid).seconds


def chunked_product(
    token_chunk: int,
    vocab_chunk: int,
    tokens: int = 8_192,
    width: int = 320,
    vocabulary: int = 262_144,
) -> Lower:
    """A projection to a vocabulary in chunks, tanh and sum of each, the same on four chips."""
    def step(hidden: jax.Array, head: jax.Array) -> jax.Array:
        def rows(i: jax.Array, total: jax.Array) -> jax.Array:
            corner = (i * token_chunk, 0)
            piece = jax.lax.dynamic_slice(hidden, corner, (token_chunk, width))

            def columns(j: jax.Array, total: jax.Array) -> jax.Array:
                corner = (0, j * vocab_chunk)
                part = jax.lax.dynamic_slice(head, corner, (width, vocab_chunk))
                logits = (piece @ part).astype(jnp.float32)
                return total + jnp.sum(jnp.tanh(logits)) * 1e-7

            return jax.lax.fori_loop(0, vocabulary // vocab_chunk, columns, total)

        return jax.lax.fori_loop(0, tokens // token_chunk, rows, jnp.float32(0.0))

    def lower(devices: list) -> jax.stages.Lowered:
        mesh = mesh_of(devices, (2, 2))
        hidden = placed(mesh, (tokens, width), "bfloat16")
        head = placed(mesh, (width, vocabulary), "bfloat16")
        whole = PartitionSpec()
        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(whole, whole),
            out_specs=whole,
            check_vma=False,
        )
        return jax.jit(mapped).lower(hidden, head)
    return lower


# ── tpuchat ──


def tpuchat_loss(
    rows: int = 4,
    length: int = 2_048,
    width: int = 1_024,
    vocabulary: int = 32_768,
    softcap: float = 15.0,
) -> Lower:
    """tpuchat's output matrix and loss, with the gradient of their input."""
    def loss(hidden: jax.Array, output: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = hidden @ output
        logits = (softcap * jnp.tanh(logits / softcap))[:, :-1]
        scores = jax.nn.log_softmax(logits)
        right = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)
        return -jnp.mean(right)

    def lower(devices: list) -> jax.stages.Lowered:
        mesh = mesh_of(devices[:1])
        hidden = placed(mesh, (rows, length, width), "bfloat16")
        output = placed(mesh, (width, vocabulary), "bfloat16")
        tokens = placed(mesh, (rows, length), "int32")
        return jax.jit(jax.value_and_grad(loss)).lower(hidden, output, tokens)
    return lower


def tpuchat_shapes(
    layers: int = 8,
    width: int = 1_024,
    heads: int = 4,
    size: int = 256,
    inner: int = 3_072,
    vocabulary: int = 32_768,
) -> list[Shape]:
    """The shapes of tpuchat's 163.6 M parameters."""
    layer: list[Shape] = [
        (width, heads, size),  # queries
        (width, 1, size),      # keys
        (width, 1, size),      # values
        (heads, size, width),
        (width, inner),
        (width, inner),
        (inner, width),
    ]
    embedding = (vocabulary, width)
    output = (width, vocabulary)
    return [embedding, output, *layer * layers]


def tpuchat_update(devices: list) -> jax.stages.Lowered:
    """One AdamW update of tpuchat's parameters in bfloat16; no argument is donated."""
    mesh = mesh_of(devices[:1])
    rule = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    params = [placed(mesh, sizes, "bfloat16") for sizes in tpuchat_shapes()]
    state = jax.tree.map(
        lambda array: placed(mesh, array.shape, array.dtype),
        jax.eval_shape(rule.init, params),
    )
    gradients = params  # of the same shapes
    return jax.jit(rule.update).lower(gradients, state, params)


def tpuchat_average(devices: list, micro_batches: int = 16) -> jax.stages.Lowered:
    """The mean of tpuchat's stacked gradients over its micro-batches."""
    mesh = mesh_of(devices[:1])
    stacks = []
    for sizes in tpuchat_shapes():
        stacks.append(placed(mesh, (micro_batches, *sizes), "bfloat16"))

    def mean(stacks: list[jax.Array]) -> list[jax.Array]:
        return [jnp.mean(stack, axis=0) for stack in stacks]
    return jax.jit(mean).lower(stacks)


# ── MaxText ──


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm, its sum of squares in float32."""
    squares = jnp.square(x.astype(jnp.float32))
    mean = jnp.mean(squares, -1, keepdims=True)
    factor = jax.lax.rsqrt(mean + 1e-6)
    return (x * factor.astype(x.dtype)) * scale


@dataclass(frozen=True)
class MaxText:
    """MaxText's 32B: a whole step of AdamW on weights cut over both axes.

    Attention's scores are left out of the program, because a flash kernel carries no cycles.
    `attention_seconds` counts them instead: 2% of the step. Layers are scanned. Every product is
    kept for the backward pass (remat "minimal"), and the rest is computed again.
    """

    layers: int = 32
    width: int = 8_192
    inner: int = 28_672
    heads: int = 64
    vocabulary: int = 32_000
    rows: int = 384
    length: int = 2_048
    mesh: tuple[int, int] = (16, 4)

    @property
    def rows_of_a_chip(self) -> int:
        """Its share of the step's rows."""
        fsdp, tp = self.mesh
        return self.rows // (fsdp * tp)

    def attention_seconds(self, share: float = 0.5) -> float:
        """Seconds of causal attention's seven products at a share of a v5p's peak."""
        one_product = 2 * self.length**2 * self.width  # of a row in a layer
        flops = 7 * one_product * self.layers * self.rows_of_a_chip / 2
        speed = share * links.chip("v5p").flops
        return flops / speed

    def flops(self) -> int:
        """FLOPs of a step on one chip as MaxText counts: three passes, attention not halved."""
        layer = 3 * self.width * self.inner + 4 * self.width**2
        weights = self.layers * layer + self.width * self.vocabulary
        attention = 4 * self.length * self.width * self.layers
        tokens = self.rows_of_a_chip * self.length
        return 3 * tokens * (2 * weights + attention)

    def weights(self) -> dict[str, tuple[Shape, Cut]]:
        """{name: (shape, how it's cut)}; the first axis of all but two is the layer."""
        size = self.width // self.heads
        to_heads = (self.layers, self.width, self.heads, size)
        to_inner = (self.layers, self.width, self.inner)
        by_columns = (None, "fsdp", "tp")
        return {
            "embed": ((self.vocabulary, self.width), ("tp", "fsdp")),
            "out": ((self.width, self.vocabulary), ("fsdp", "tp")),
            "norms": ((self.layers, 2, self.width), (None, None, "tp")),
            "q": (to_heads, by_columns),
            "k": (to_heads, by_columns),
            "v": (to_heads, by_columns),
            "o": ((self.layers, self.heads, size, self.width), (None, "tp", None, "fsdp")),
            "gate": (to_inner, by_columns),
            "up": (to_inner, by_columns),
            "down": ((self.layers, self.inner, self.width), (None, "tp", "fsdp")),
        }

    def lower(self, devices: list) -> jax.stages.Lowered:
        """The step, lowered for these devices."""
        mesh = mesh_of(devices, self.mesh)
        rule = optax.adamw(1e-4)
        loss = self._loss(NamedSharding(mesh, PartitionSpec("fsdp", None, "tp")))

        def step(weights: Weights, state: Any, tokens: jax.Array) -> tuple:
            value, slope = jax.value_and_grad(loss)(weights, tokens)
            change, state = rule.update(slope, state, weights)
            return optax.apply_updates(weights, change), state, value

        weights = {}
        for name, (sizes, cut) in self.weights().items():
            weights[name] = placed(mesh, sizes, "float32", cut)
        adam, *rest = jax.eval_shape(rule.init, weights)
        count = placed(mesh, (), "int32")
        state = (adam._replace(count=count, mu=weights, nu=weights), *rest)
        tokens = placed(mesh, (self.rows, self.length), "int32", ("fsdp",))
        return jax.jit(step, donate_argnums=(0, 1)).lower(weights, state, tokens)

    def _loss(self, stream: NamedSharding) -> Callable[[Weights, jax.Array], jax.Array]:
        """(weights, tokens [rows, length]) -> the mean loss.

        Args:
          stream: how the residual stream [rows, length, width] and the logits are cut.
        """
        def cut(array: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(array, stream)

        def layer(x: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
            w = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}
            h = _norm(x, w["norms"][0])
            q = jnp.einsum("btd,dnh->btnh", h, w["q"])
            k = jnp.einsum("btd,dnh->btnh", h, w["k"])
            v = jnp.einsum("btd,dnh->btnh", h, w["v"])
            mixed = cut(q + k + v)
            x = cut(x + jnp.einsum("btnh,nhd->btd", mixed, w["o"]))
            h = _norm(x, w["norms"][1])
            gate = jax.nn.silu(h @ w["gate"])
            inner = cut(gate * (h @ w["up"]))
            x = cut(x + inner @ w["down"])
            return x, None

        policy = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims
        kept = jax.checkpoint(layer, policy=policy, prevent_cse=False)

        def loss(weights: Weights, tokens: jax.Array) -> jax.Array:
            layers = dict(weights)
            embed = layers.pop("embed")
            out = layers.pop("out")
            one_hot = jax.nn.one_hot(tokens, self.vocabulary, dtype=jnp.bfloat16)  # use_iota_embed
            x = cut(one_hot @ embed.astype(jnp.bfloat16))
            x, _ = jax.lax.scan(kept, x, layers)
            logits = x @ out.astype(jnp.bfloat16)
            logits = cut(logits.astype(jnp.float32))
            right = jax.nn.one_hot(tokens, self.vocabulary)
            return optax.softmax_cross_entropy(logits, right).mean()

        return loss


# ── basic_ops.py ──


BIG = 32_768  # rows and columns of its matrices
ROWS: Cut = ("x",)  # an eighth of the rows on each chip
COLUMNS: Cut = (None, "x")


@dataclass(frozen=True)
class Operation:
    """A program that basic_ops.py timed on a v5litepod-8.

    Attributes:
      text: what it computes.
      function: of its arrays.
      arrays: the shape of each, and how it's cut over the eight chips.
      bfloat16, int8: milliseconds measured, by the type of the arrays.
      mapped: the function gets a chip's own pieces, not the whole arrays.
      sets: as in `Anchor`.
    """

    text: str
    function: Callable
    arrays: list[tuple[Shape, Cut]]
    bfloat16: float
    int8: float
    mapped: bool = False
    sets: str = ""

    def lower(self, dtype: str, devices: list) -> jax.stages.Lowered:
        """The program for arrays of a type, lowered for eight devices."""
        types = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((8,), ("x",), devices=devices, axis_types=types)
        arguments = []
        pieces = []
        for sizes, cut in self.arrays:
            arguments.append(placed(mesh, sizes, dtype, cut))
            pieces.append(PartitionSpec(*cut))
        function = self.function
        if self.mapped:
            function = jax.shard_map(
                function,
                mesh=mesh,
                in_specs=tuple(pieces),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        return jax.jit(function).lower(*arguments)

    def anchor(self, dtype: str, milliseconds: float) -> "Anchor":
        """The measurement with arrays of one type."""
        return Anchor(
            program=f"{self.text}, {dtype}",
            slice="v5e-8",
            milliseconds=milliseconds,
            clock="one call",
            source="AI-Hypercomputer/jetstream-pytorch: pull request 168, benchmarks/basic_ops.py",
            versions="August 2024, mean of five",
            lower=functools.partial(self.lower, dtype),
            mesh=(8, 1),
            sets=self.sets,
        )


def three_ffns(x: jax.Array, gate: jax.Array, down: jax.Array, up: jax.Array) -> jax.Array:
    """Llama 7B's MLP three times in a row, of pieces of its matrices, summed over the chips."""
    for _ in range(3):
        inner = jax.nn.silu((x @ gate).astype(jnp.bfloat16)) * (x @ up)
        x = jax.lax.psum(inner @ down, "x")
    return x


OPERATIONS = {
    "product": Operation(
        text=f"product of two {BIG:,} x {BIG:,} matrices on each chip",
        function=jnp.matmul,
        arrays=[((BIG, BIG), ()), ((BIG, BIG), ())],
        bfloat16=438.17,
        int8=186.436,
    ),
    "columns x rows": Operation(
        text="the same product, each chip an eighth of the sum",
        function=jnp.matmul,
        arrays=[((BIG, BIG), COLUMNS), ((BIG, BIG), ROWS)],
        bfloat16=108.891,
        int8=54.9044,
    ),
    "rows x rows": Operation(
        text="the same product, each chip an eighth of the rows of both",
        function=jnp.matmul,
        arrays=[((BIG, BIG), ROWS), ((BIG, BIG), ROWS)],
        bfloat16=76.6386,
        int8=38.6539,
    ),
    "gather": Operation(
        text=f"all-gather of a {BIG:,} x {BIG:,} matrix",
        function=lambda x: jax.lax.all_gather(x, "x"),
        arrays=[((BIG, BIG), ROWS)],
        bfloat16=68.3381,
        int8=34.4571,
        mapped=True,
        sets="links.SNAKE",
    ),
    "psum": Operation(
        text=f"all-reduce of {BIG // 8:,} x {BIG:,} numbers",
        function=lambda x: jax.lax.psum(x, "x"),
        arrays=[((BIG, BIG), ROWS)],
        bfloat16=8.25386,
        int8=4.34715,
        mapped=True,
        sets="links.SNAKE",
    ),
    "ffn": Operation(
        text="three MLPs of Llama 7B for eight tokens",
        function=three_ffns,
        arrays=[
            ((8, 4_096), ()),
            ((4_096, 11_008), COLUMNS),
            ((11_008, 4_096), ROWS),
            ((4_096, 11_008), COLUMNS),
        ],
        bfloat16=0.611614,
        int8=0.483992,
        mapped=True,
    ),
}


# ── the anchors ──


VMEM = {"xla_tpu_scoped_vmem_limit_kib": "65536"}
MAXTEXT = MaxText()
MAXTEXT_OPTIONS = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_enable_async_collective_permute": True,
    "xla_tpu_enable_ag_backward_pipelining": True,
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
    "xla_tpu_megacore_fusion_allow_ags": False,
}
ANCHORS = {
    "product 8192 v6e": Anchor(
        program="product of two 8,192 x 8,192 bfloat16 matrices, 64 MiB of on-chip memory",
        slice="v6e-1",
        milliseconds=1.328756,
        clock="trace",
        source=RECIPES + "README.md",
        lower=product(8_192),
        options=VMEM,
    ),
    "product 8192 v6e plain": Anchor(
        program="product of two 8,192 x 8,192 bfloat16 matrices",
        slice="v6e-1",
        milliseconds=2e3 * 8_192**3 / 622e12,
        clock="host",
        source="vorushin/tpuchat: LOG.md (002800d6), ~622 TFLOP/s",
        lower=product(8_192),
    ),
    "product 4096 v5e": Anchor(
        program="product of two 4,096 x 4,096 bfloat16 matrices",
        slice="v5e-1",
        milliseconds=0.827,
        clock="host",
        source=JAX_DOCS,
        lower=product(4_096),
    ),
    "product 8192 v5e": Anchor(
        program="product of two 8,192 x 8,192 bfloat16 matrices",
        slice="v5e-1",
        milliseconds=6.047,
        clock="host",
        source=JAX_DOCS,
        lower=product(8_192),
    ),
    "psum v6e": Anchor(
        program="all-reduce of 17,408 x 17,408 bfloat16 numbers",
        slice="v6e-256",
        milliseconds=5.12,
        clock="host",
        source=RECIPES + "trillium/collectives/README.md: 235.76 GB/s, formula in "
                         "accelerator-microbenchmarks (c8db87f) benchmark_collectives.py",
        versions="jax 0.5.2",
        seconds=psum,
    ),
    "gather v5e": Anchor(
        program="all-gather of 10 MB over a ring of 16 chips",
        slice="v5e-128",
        milliseconds=1e3 * 10e6 / (2 * 0.95 * 45e9),
        clock="not said",
        source="jax-ml/scaling-book: sharding.md, 95 % of the claimed 45 GB/s each way",
        seconds=ring,
    ),
    "loop 128": Anchor(
        program="projection to 262,144 words in 2,048 chunks of 128 x 8,192, with tanh and sum",
        slice="v5e-4",
        milliseconds=35.5334,
        clock="host",
        source=LOOPS + ", chunked_matmul_loop_bad",
        versions="jax 0.6.2, median of ten",
        lower=chunked_product(128, 8_192),
    ),
    "loop 512": Anchor(
        program="projection to 262,144 words in 64 chunks of 512 x 65,536, with tanh and sum",
        slice="v5e-4",
        milliseconds=17.1459,
        clock="host",
        source=LOOPS + ", chunked_matmul_loop_good",
        versions="jax 0.6.2, median of ten",
        lower=chunked_product(512, 65_536),
    ),
    "tpuchat loss": Anchor(
        program="tpuchat: output matrix and loss of 4 x 2,048 tokens, gradient of the input",
        slice="v6e-1",
        milliseconds=3.96,
        clock="one call",
        source=TPUCHAT + ": ~3.96ms",
        lower=tpuchat_loss(),
    ),
    "tpuchat update": Anchor(
        program="tpuchat: one AdamW update of 163.6 M parameters",
        slice="v6e-1",
        milliseconds=2.67,
        clock="one call",
        source=TPUCHAT + ": 2.67ms",
        lower=tpuchat_update,
    ),
    "tpuchat average": Anchor(
        program="tpuchat: mean of 16 gradients of 163.6 M parameters",
        slice="v6e-1",
        milliseconds=5.84,
        clock="one call",
        source="vorushin/tpuchat: pallas/CLAUDE.md (f5e1d348), pallas/bench_gap.py: 5.84ms",
        lower=tpuchat_average,
    ),
    "maxtext 32b": Anchor(
        program="MaxText: a step of a 32 B model, 384 x 2,048 tokens, fsdp 16 x tp 4",
        slice="v5p-128",
        milliseconds=1e3 * MAXTEXT.flops() / 328e12,
        clock="host",
        source="AI-Hypercomputer/maxtext: MaxText/configs/v5p/32b.sh and README.md, "
               "328 TFLOP/s a chip",
        lower=MAXTEXT.lower,
        seconds=MAXTEXT.attention_seconds,
        options=MAXTEXT_OPTIONS,
        mesh=MAXTEXT.mesh,
    ),
}
for _what, _operation in OPERATIONS.items():
    ANCHORS[f"v5e-8 {_what} bfloat16"] = _operation.anchor("bfloat16", _operation.bfloat16)
    ANCHORS[f"v5e-8 {_what} int8"] = _operation.anchor("int8", _operation.int8)
TOPOLOGIES = {"v5p-128": "v5p:4x4x4"}  # of slices that nobody here rents


# ── a row of the table ──


def grid_of(name: str, devices: Iterable) -> links.Box:
    """The slice of an anchor as the time model sees it: partitions in the mesh's order."""
    coordinates = [tuple(device.coords) for device in devices]
    farthest = np.max(coordinates, axis=0)
    shape = tuple(int(place) + 1 for place in farthest)
    kind, _, _ = name.partition("-")
    return links.Box(kind, shape, tuple(coordinates))


def predicted_seconds(anchor: Anchor) -> float | None:
    """What we predict of an anchor, or None if too much of its program has no known cost."""
    seconds = anchor.seconds() if anchor.seconds else 0.0
    if anchor.lower is None:
        return seconds
    topology = TOPOLOGIES.get(anchor.slice, anchor.slice)
    devices = compiler.devices_of(topology)
    compiled = anchor.lower(devices).compile(compiler_options=anchor.options or None)

    program = hlo.Program(compiled.as_text())
    mesh = mesh_of(devices[:program.chips], anchor.mesh)
    grid = grid_of(anchor.slice, mesh.devices.flat)
    prediction = clock.predict(program, grid)
    if not prediction.trusted:
        return None
    return seconds + prediction.clock


def measure(name: str, anchor: Anchor) -> dict[str, str]:
    """One row of the table: an anchor compiled, predicted and put beside its measurement."""
    start = time.process_time()
    seconds = predicted_seconds(anchor)
    cpu_seconds = time.process_time() - start

    predicted = miss = ""
    if seconds:
        milliseconds = 1e3 * seconds
        predicted = f"{milliseconds:.5g}"
        miss = f"{milliseconds / anchor.milliseconds - 1:.3f}"
    options = " ".join(f"{key}={value}" for key, value in anchor.options.items())
    return {
        "name": name,
        "program": anchor.program,
        "slice": anchor.slice,
        "clock": anchor.clock,
        "measured_ms": f"{anchor.milliseconds:.5g}",
        "predicted_ms": predicted,
        "miss": miss,
        "sets": anchor.sets,
        "lacks": anchor.lacks,
        "source": anchor.source,
        "versions": anchor.versions,
        "options": options,
        "jax": metadata.version("jax"),
        "libtpu": compiler.version(),
        "compile_cpu_seconds": f"{cpu_seconds:.0f}",
        "date": str(datetime.date.today()),
    }


def main(names: list[str], known: Mapping[str, Anchor]) -> None:
    """Make the rows that are asked for, or all that are not stored.

    Args:
      names: of anchors; none: all that are known.
      known: by their names.
    """
    compiler.start()
    compiler.register()
    for name in names or known:
        stored = {row["name"]: row for row in bands.anchors()}
        if name in stored and not names:
            continue
        row = measure(name, known[name])
        stored[name] = row
        pd.DataFrame(stored.values()).to_csv(bands.ANCHORS, index=False)
        shown = {key: row[key] for key in ("name", "measured_ms", "predicted_ms", "miss")}
        print(shown, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:], ANCHORS)
