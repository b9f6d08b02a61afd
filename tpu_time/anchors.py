"""Programs whose time on a TPU somebody else measured, compiled here and predicted.

    .venv/bin/python -m tpu_time.anchors [NAME ...]     data/anchors/anchors.csv (08, section 9)

Needs libtpu (`./setup.sh dryrun`), no TPU. Without names all rows that are not stored are made: most
take seconds, steps of a model minutes. Programs are stated again here in the shapes, types and order
of their sources. (Two chunk loops were also subtracted from their twins to set the links' constant,
which they do not use.) Every row names the clock that measured it: `trace` (the device's own),
`host` (repeated), `one call` (with dispatch) or `not said`.
"""

import datetime
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax.sharding import NamedSharding, PartitionSpec

from tpu_time import bands, clock, compiler, links

RECIPES = "AI-Hypercomputer/tpu-recipes: microbenchmarks/"
JAX_DOCS = "jax-ml/jax: docs/pallas/tpu/matmul.ipynb, XLA matmul"
TPUCHAT = "vorushin/tpuchat: pallas/CLAUDE.md (662fcd4f), pallas/profile_breakdown.py"
Lower = Callable[[list], jax.stages.Lowered]  # devices of a slice -> JAX's lowered program
LOOPS = "deep-diver/tunix-accel: 01-CCE/data/mesh_pathology_tpu_v5e_synthetic/results.csv"


@dataclass(frozen=True)
class Anchor:
    """One measurement and how its program is made again.

    Attributes:
      program: what it is, with its shapes.
      slice: Google's name of the hardware.
      milliseconds: measured.
      clock: trace, host or one call.
      source: repository, file, row.
      versions: what the source says of its software; "" for nothing.
      lower: devices of the slice -> JAX's lowered program; None where `seconds` is enough.
      seconds: predicted without compiling, beside what is compiled.
      options: for the compiler.
      mesh: shape; None for all chips along the first axis.
      sets: the constant of the model that this measurement set, so that it can't test it; or "".
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


def on(devices: list, shapes: Any, shape: tuple[int, int] | None = None,
       axes: tuple[str, str] = ("fsdp", "tp"), spec: tuple = ()) -> tuple[jax.sharding.Mesh, Any]:
    """(mesh, the shapes placed on it): whole on every device unless a spec is given."""
    mesh = jax.make_mesh(shape or (len(devices), 1), axes, devices=devices,
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)
    where = NamedSharding(mesh, PartitionSpec(*spec))
    return mesh, jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where), shapes)


def product(size: int) -> Lower:
    """A product of two square bfloat16 matrices on one chip."""
    def lower(devices):
        square = jax.ShapeDtypeStruct((size, size), "bfloat16")
        _, arguments = on(devices[:1], (square, square))
        return jax.jit(lambda a, b: a @ b).lower(*arguments)
    return lower


def psum() -> float:
    """Seconds of an all-reduce of 17,408 x 17,408 bfloat16 numbers over a v6e-256."""
    grid = links.Box("v6e", (16, 16))
    return links.collective_time("all-reduce", 17_408**2 * 2, [list(range(256))], grid)[0]


def ring() -> float:
    """Seconds of an all-gather of 10 MB over the 16 chips of a v5e-128's longer side."""
    grid = links.Box("v5e", (8, 16))
    return links.collective_time("all-gather", 10_000_000, [list(range(16))], grid)[0]


def chunked_product(token_chunk: int, vocab_chunk: int, tokens: int = 8_192, width: int = 320,
                    vocabulary: int = 262_144) -> Lower:
    """A projection to a vocabulary in chunks, tanh and sum of each, the same on four chips."""
    def lower(devices):
        mesh, arguments = on(devices, (jax.ShapeDtypeStruct((tokens, width), "bfloat16"),
                                       jax.ShapeDtypeStruct((width, vocabulary), "bfloat16")),
                             (2, 2))

        def step(hidden, head):
            def rows(i, total):
                piece = jax.lax.dynamic_slice(hidden, (i * token_chunk, 0), (token_chunk, width))

                def columns(j, total):
                    part = jax.lax.dynamic_slice(head, (0, j * vocab_chunk), (width, vocab_chunk))
                    logits = (piece @ part).astype(jnp.float32)
                    return total + jnp.sum(jnp.tanh(logits)) * 1e-7
                return jax.lax.fori_loop(0, vocabulary // vocab_chunk, columns, total)
            return jax.lax.fori_loop(0, tokens // token_chunk, rows, jnp.float32(0.0))
        whole = PartitionSpec()
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(whole, whole), out_specs=whole,
                                     check_vma=False)).lower(*arguments)
    return lower


def tpuchat_loss(rows: int = 4, length: int = 2_048, width: int = 1_024, vocabulary: int = 32_768,
                 softcap: float = 15.0) -> Lower:
    """tpuchat's output matrix and loss, with the gradient of their input."""
    def lower(devices):
        def loss(hidden, output, tokens):
            logits = hidden @ output
            logits = (softcap * jnp.tanh(logits / softcap))[:, :-1]
            right = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
            return -jnp.mean(right)
        _, arguments = on(devices[:1], (jax.ShapeDtypeStruct((rows, length, width), "bfloat16"),
                                        jax.ShapeDtypeStruct((width, vocabulary), "bfloat16"),
                                        jax.ShapeDtypeStruct((rows, length), "int32")))
        return jax.jit(jax.value_and_grad(loss)).lower(*arguments)
    return lower


def tpuchat_shapes(layers: int = 8, width: int = 1_024, heads: int = 4, size: int = 256,
                   inner: int = 3_072, vocabulary: int = 32_768) -> list[tuple[int, ...]]:
    """The shapes of tpuchat's 163.6 M parameters."""
    keys = values = (width, 1, size)
    layer = [(width, heads, size), keys, values, (heads, size, width), (width, inner),
             (width, inner), (inner, width)]
    return [(vocabulary, width), (width, vocabulary), *layer * layers]


def tpuchat_update(devices: list) -> jax.stages.Lowered:
    """One AdamW update of tpuchat's parameters in bfloat16; no argument is donated."""
    params = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in tpuchat_shapes()]
    rule = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    _, arguments = on(devices[:1], (params, jax.eval_shape(rule.init, params), params))
    return jax.jit(rule.update).lower(*arguments)


def tpuchat_average(devices: list, micro_batches: int = 16) -> jax.stages.Lowered:
    """The mean of tpuchat's stacked gradients over its micro-batches."""
    stacks = [jax.ShapeDtypeStruct((micro_batches, *shape), "bfloat16") for shape in tpuchat_shapes()]
    _, arguments = on(devices[:1], stacks)
    return jax.jit(lambda tree: [jnp.mean(stack, axis=0) for stack in tree]).lower(arguments)


def maxtext_step(layers: int = 32, width: int = 8_192, inner: int = 28_672, heads: int = 64,
                 vocabulary: int = 32_000, rows: int = 384, length: int = 2_048,
                 mesh_shape: tuple[int, int] = (16, 4)) -> Lower:
    """MaxText's 32B: a whole step of AdamW on weights cut over both axes, without attention's scores.

    A flash kernel carries no cycles, so the mixing of values is left out here and counted by
    `flash`: 2 % of the step. Layers are scanned; every product is kept for the backward pass
    (remat "minimal"), the rest is computed again.
    """
    def lower(devices):
        mesh, _ = on(devices, (), mesh_shape)

        def cut(array, *spec):
            return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*spec)))

        shapes = {  # name: (shape, how it is cut); the first axis of all but two is the layer
            "embed": ((vocabulary, width), ("tp", "fsdp")),
            "out": ((width, vocabulary), ("fsdp", "tp")),
            "norms": ((layers, 2, width), (None, None, "tp")),
            **{name: ((layers, width, heads, width // heads), (None, "fsdp", "tp")) for name in "qkv"},
            "o": ((layers, heads, width // heads, width), (None, "tp", None, "fsdp")),
            "gate": ((layers, width, inner), (None, "fsdp", "tp")),
            "up": ((layers, width, inner), (None, "fsdp", "tp")),
            "down": ((layers, inner, width), (None, "tp", "fsdp"))}
        stacked = set(shapes) - {"embed", "out"}

        def norm(x, scale):
            size = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)
            return (x * size.astype(x.dtype)) * scale

        def layer(x, w):
            w = {name: one.astype(jnp.bfloat16) for name, one in w.items()}
            h = norm(x, w["norms"][0])
            q, k, v = (jnp.einsum("btd,dnh->btnh", h, w[name]) for name in "qkv")
            x = cut(x + jnp.einsum("btnh,nhd->btd", cut(q + k + v, "fsdp", None, "tp"), w["o"]),
                    "fsdp", None, "tp")
            h = norm(x, w["norms"][1])
            h = jax.nn.silu(h @ w["gate"]) * (h @ w["up"])
            return cut(x + cut(h, "fsdp", None, "tp") @ w["down"], "fsdp", None, "tp"), None

        kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
                              prevent_cse=False)

        def loss(w, tokens):
            one_hot = jax.nn.one_hot(tokens, vocabulary, dtype=jnp.bfloat16)  # use_iota_embed
            x = cut(one_hot @ w["embed"].astype(jnp.bfloat16), "fsdp", None, "tp")
            x, _ = jax.lax.scan(kept, x, {name: w[name] for name in stacked})
            logits = cut((x @ w["out"].astype(jnp.bfloat16)).astype(jnp.float32), "fsdp", None, "tp")
            return optax.softmax_cross_entropy(logits, jax.nn.one_hot(tokens, vocabulary)).mean()

        rule = optax.adamw(1e-4)

        def step(w, state, tokens):
            value, slope = jax.value_and_grad(loss)(w, tokens)
            change, state = rule.update(slope, state, w)
            return optax.apply_updates(w, change), state, value

        def placed(shape, spec, dtype="float32"):
            where = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

        w = {name: placed(*both) for name, both in shapes.items()}
        adam, *rest = jax.eval_shape(rule.init, w)
        state = (adam._replace(count=placed((), (), "int32"), mu=w, nu=w), *rest)
        return jax.jit(step, donate_argnums=(0, 1)).lower(
            w, state, placed((rows, length), ("fsdp",), "int32"))
    return lower


def flash(layers: int = 32, width: int = 8_192, rows: int = 6, length: int = 2_048,
          share: float = 0.5) -> float:
    """Seconds of causal attention's seven products at a share of a v5p's peak."""
    return 7 * 2 * length**2 * width * layers * rows / 2 / (share * links.chip("v5p").flops)


def maxtext_flops(layers: int = 32, width: int = 8_192, inner: int = 28_672,
                  vocabulary: int = 32_000, rows: int = 6, length: int = 2_048) -> int:
    """FLOPs of a step on one chip as MaxText counts them: three passes, attention not halved."""
    weights = layers * (3 * width * inner + 4 * width**2) + width * vocabulary
    return 3 * rows * length * (2 * weights + 4 * length * width * layers)


BIG = 32_768  # rows and columns of the matrices of basic_ops.py


def eight_chips(function: Callable, dtype: str, shapes: list[tuple], specs: list[tuple],
                mapped: bool = False) -> Lower:
    """A function of arrays that are cut over eight chips; `mapped`: of each chip's own pieces."""
    def lower(devices):
        mesh = jax.make_mesh((8,), ("x",), devices=devices,
                             axis_types=(jax.sharding.AxisType.Auto,))
        arguments = []
        for shape, spec in zip(shapes, specs, strict=True):
            where = NamedSharding(mesh, PartitionSpec(*spec))
            arguments.append(jax.ShapeDtypeStruct(shape, dtype, sharding=where))
        whole = function
        if mapped:
            pieces = tuple(PartitionSpec(*spec) for spec in specs)
            whole = jax.shard_map(function, mesh=mesh, in_specs=pieces,
                                  out_specs=PartitionSpec(), check_vma=False)
        return jax.jit(whole).lower(*arguments)
    return lower


def three_ffns(x: jax.Array, gate: jax.Array, down: jax.Array, up: jax.Array) -> jax.Array:
    """Llama 7B's MLP three times in a row, of pieces of its matrices, summed over the chips."""
    for _ in range(3):
        inner = jax.nn.silu((x @ gate).astype(jnp.bfloat16)) * (x @ up)
        x = jax.lax.psum(inner @ down, "x")
    return x


def basic_ops() -> dict[str, Anchor]:
    """Products and collectives that basic_ops.py timed on a v5litepod-8, in two types."""
    square, ffn = (BIG, BIG), [(8, 4_096), (4_096, 11_008), (11_008, 4_096), (4_096, 11_008)]
    rows, columns = ("x",), (None, "x")
    programs: dict[str, tuple] = {  # what: (text, function, shapes, specs, of each piece, ms, ms)
        "product": (f"product of two {BIG:,} x {BIG:,} matrices on each chip", jnp.matmul,
                    [square, square], [(), ()], False, 438.17, 186.436),
        "columns x rows": ("the same product, each chip an eighth of the sum", jnp.matmul,
                           [square, square], [columns, rows], False, 108.891, 54.9044),
        "rows x rows": ("the same product, each chip an eighth of the rows of both", jnp.matmul,
                        [square, square], [rows, rows], False, 76.6386, 38.6539),
        "gather": (f"all-gather of a {BIG:,} x {BIG:,} matrix", lambda x: jax.lax.all_gather(x, "x"),
                   [square], [rows], True, 68.3381, 34.4571),
        "psum": (f"all-reduce of {BIG // 8:,} x {BIG:,} numbers", lambda x: jax.lax.psum(x, "x"),
                 [square], [rows], True, 8.25386, 4.34715),
        "ffn": ("three MLPs of Llama 7B for eight tokens", three_ffns, ffn,
                [(), columns, rows, columns], True, 0.611614, 0.483992)}
    found = {}
    for what, (text, function, shapes, specs, mapped, *measured) in programs.items():
        for dtype, milliseconds in zip(("bfloat16", "int8"), measured, strict=True):
            found[f"v5e-8 {what} {dtype}"] = Anchor(
                f"{text}, {dtype}", "v5e-8", milliseconds, "one call",
                "AI-Hypercomputer/jetstream-pytorch: pull request 168, benchmarks/basic_ops.py",
                "August 2024, mean of five", mesh=(8, 1),
                lower=eight_chips(function, dtype, shapes, specs, mapped),
                sets="links.SNAKE" if what in ("gather", "psum") else "")
    return found


VMEM = {"xla_tpu_scoped_vmem_limit_kib": "65536"}
BESIDE = dict.fromkeys(("xla_tpu_enable_async_collective_fusion_fuse_all_gather",
                        "xla_enable_async_collective_permute",
                        "xla_tpu_enable_ag_backward_pipelining",
                        "xla_tpu_enable_data_parallel_all_reduce_opt",
                        "xla_tpu_data_parallel_opt_different_sized_ops",
                        "xla_tpu_enable_async_collective_fusion",
                        "xla_tpu_enable_async_collective_fusion_multiple_steps",
                        "xla_tpu_overlap_compute_collective_tc",
                        "xla_enable_async_all_gather"), True) | {
    "xla_tpu_megacore_fusion_allow_ags": False}
ANCHORS = {
    "product 8192 v6e": Anchor(
        "product of two 8,192 x 8,192 bfloat16 matrices, 64 MiB of on-chip memory", "v6e-1",
        1.328756, "trace", RECIPES + "README.md", lower=product(8_192), options=VMEM),
    "product 8192 v6e plain": Anchor(
        "product of two 8,192 x 8,192 bfloat16 matrices", "v6e-1", 2e3 * 8_192**3 / 622e12, "host",
        "vorushin/tpuchat: LOG.md (002800d6), ~622 TFLOP/s", lower=product(8_192)),
    "product 4096 v5e": Anchor(
        "product of two 4,096 x 4,096 bfloat16 matrices", "v5e-1", 0.827, "host", JAX_DOCS,
        lower=product(4_096)),
    "product 8192 v5e": Anchor(
        "product of two 8,192 x 8,192 bfloat16 matrices", "v5e-1", 6.047, "host", JAX_DOCS,
        lower=product(8_192)),
    "psum v6e": Anchor(
        "all-reduce of 17,408 x 17,408 bfloat16 numbers", "v6e-256", 5.12, "host",
        RECIPES + "trillium/collectives/README.md: 235.76 GB/s, formula in "
        "accelerator-microbenchmarks (c8db87f) benchmark_collectives.py", "jax 0.5.2",
        seconds=psum),
    "gather v5e": Anchor(
        "all-gather of 10 MB over a ring of 16 chips", "v5e-128",
        1e3 * 10e6 / (2 * 0.95 * 45e9), "not said",
        "jax-ml/scaling-book: sharding.md, 95 % of the claimed 45 GB/s each way", seconds=ring),
    "loop 128": Anchor(
        "projection to 262,144 words in 2,048 chunks of 128 x 8,192, with tanh and sum", "v5e-4",
        35.5334, "host", LOOPS + ", chunked_matmul_loop_bad", "jax 0.6.2, median of ten",
        lower=chunked_product(128, 8_192)),
    "loop 512": Anchor(
        "projection to 262,144 words in 64 chunks of 512 x 65,536, with tanh and sum", "v5e-4",
        17.1459, "host", LOOPS + ", chunked_matmul_loop_good", "jax 0.6.2, median of ten",
        lower=chunked_product(512, 65_536)),
    "tpuchat loss": Anchor(
        "tpuchat: output matrix and loss of 4 x 2,048 tokens, gradient of the input", "v6e-1",
        3.96, "one call", TPUCHAT + ": ~3.96ms", lower=tpuchat_loss()),
    "tpuchat update": Anchor(
        "tpuchat: one AdamW update of 163.6 M parameters", "v6e-1", 2.67, "one call",
        TPUCHAT + ": 2.67ms", lower=tpuchat_update),
    "tpuchat average": Anchor(
        "tpuchat: mean of 16 gradients of 163.6 M parameters", "v6e-1", 5.84, "one call",
        "vorushin/tpuchat: pallas/CLAUDE.md (f5e1d348), pallas/bench_gap.py: 5.84ms",
        lower=tpuchat_average),
    "maxtext 32b": Anchor(
        "MaxText: a step of a 32 B model, 384 x 2,048 tokens, fsdp 16 x tp 4", "v5p-128",
        1e3 * maxtext_flops() / 328e12, "host",
        "AI-Hypercomputer/maxtext: MaxText/configs/v5p/32b.sh and README.md, 328 TFLOP/s a chip",
        lower=maxtext_step(), seconds=flash, options=BESIDE, mesh=(16, 4)),
}


ANCHORS |= basic_ops()
TOPOLOGIES = {"v5p-128": "v5p:4x4x4"}  # of slices that nobody here rents


def grid_of(name: str, devices: Iterable) -> links.Box:
    """The slice of an anchor as the time model sees it: partitions in the mesh's order."""
    used = np.array([device.coords for device in devices])
    return links.Box(name.split("-")[0], tuple(int(size) for size in used.max(axis=0) + 1),
                     tuple(map(tuple, used.tolist())))


def measure(name: str) -> dict[str, str]:
    """One row of the table: an anchor compiled, predicted and put beside its measurement."""
    anchor, start = ANCHORS[name], time.process_time()
    seconds = anchor.seconds() if anchor.seconds else 0.0
    if anchor.lower:
        devices = compiler.devices_of(TOPOLOGIES.get(anchor.slice, anchor.slice))
        program = anchor.lower(devices).compile(compiler_options=anchor.options or None)
        text = program.as_text()
        partitions = re.search(r"num_partitions=(\d+)", text)
        chips = int(partitions[1]) if partitions else 1
        mesh, _ = on(devices[:chips], (), anchor.mesh)
        prediction = clock.predict(text, grid_of(anchor.slice, mesh.devices.flat))
        seconds = seconds + prediction.clock if prediction.trusted else 0.0
    measured = anchor.milliseconds
    return {"name": name, "program": anchor.program, "slice": anchor.slice, "clock": anchor.clock,
            "measured_ms": f"{measured:.5g}",
            "predicted_ms": f"{1e3 * seconds:.5g}" if seconds else "",
            "miss": f"{1e3 * seconds / measured - 1:.3f}" if seconds else "",
            "sets": anchor.sets, "source": anchor.source, "versions": anchor.versions,
            "options": " ".join(f"{key}={value}" for key, value in anchor.options.items()),
            "jax": metadata.version("jax"), "libtpu": compiler.version(),
            "compile_cpu_seconds": f"{time.process_time() - start:.0f}",
            "date": str(datetime.date.today())}


def main(names: list[str]) -> None:
    """Make the rows that are asked for, or all that are not stored."""
    compiler.start()
    compiler.register()
    for name in names or ANCHORS:
        stored = {row["name"]: row for row in bands.anchors()}
        if names or name not in stored:
            stored[name] = measure(name)
            pd.DataFrame(stored.values()).to_csv(bands.ANCHORS, index=False)
            print({key: stored[name][key] for key in ("name", "measured_ms", "predicted_ms", "miss")},
                  flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
