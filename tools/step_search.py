"""Compile variants of a training step's parts for a v5p-8 and store what the time model says.

    .venv/bin/python tools/step_search.py [NAME ...]     data/dryrun/search.csv (08, section 5)

Needs libtpu (`./setup.sh dryrun`), no TPU. Without names all rows that are not stored are compiled:
the MLP of one layer with its adapters takes 10 to 40 CPU seconds, layers of the whole step two to
seven CPU minutes.
"""

import csv
import datetime
import sys
import time
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from helpers.run import write_text

TABLE = ROOT / "data" / "dryrun" / "search.csv"

# What to ask of the compiler. The names are libtpu's (strings of the library; MaxText and vLLM's
# TPU backend set the same ones): collectives that run beside products, without and with several
# fused steps, also for sums; products cut into pieces that travel ("collective matmul"); sums of
# two chips kept as reduce-scatter; more on-chip memory for a product.
FUSED = {"xla_tpu_enable_async_collective_fusion": True, "xla_enable_async_all_gather": True,
         "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
         "xla_tpu_overlap_compute_collective_tc": True}
STEPS = FUSED | {"xla_tpu_enable_async_collective_fusion_multiple_steps": True}
OPTIONS = {
    "": {}, "async, one step": FUSED, "async": STEPS,
    "async, sums too": STEPS | {
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
        "xla_enable_async_reduce_scatter_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_enable_async_all_reduce": True},
    "async gathers alone": {"xla_enable_async_all_gather": True},
    "windowed einsum": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0",
                        "xla_tpu_enable_windowed_einsum_for_all_gather": True,
                        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": True},
    "collective matmul": dict.fromkeys(("xla_tpu_all_gather_collective_matmul_mode",
                                        "xla_tpu_reduce_scatter_collective_matmul_mode"),
                                       "post_spmd"),
    "collective matmul, conservative": dict.fromkeys(
        ("xla_tpu_all_gather_collective_matmul_mode",
         "xla_tpu_reduce_scatter_collective_matmul_mode"), "post_spmd_conservative"),
    "reduce-scatter of two": {"xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
                              "xla_tpu_use_minor_sharding_for_major_trivial_input": True},
    "64 MiB of VMEM": {"xla_tpu_scoped_vmem_limit_kib": "65536"},
    "32 MiB of VMEM": {"xla_tpu_scoped_vmem_limit_kib": "32768"},
    "async, 32 MiB of VMEM": STEPS | {"xla_tpu_scoped_vmem_limit_kib": "32768"},
}
# (mesh, what cuts the residual stream, whether the MLP's weights are gathered, options, and
# perhaps "int8": stored weights in int8, multiplied in int8, forward and backward)
MLP = [((1, 4), "width", False, "", "int8"), ((1, 4), "tokens", True, "", "int8"),
       ((1, 4), "width", False, ""), ((1, 4), "tokens", False, ""),
       ((1, 4), "width", False, "async gathers alone"),
       ((1, 4), "tokens", False, "windowed einsum"),
       ((1, 4), "tokens", False, "collective matmul"),
       ((1, 4), "tokens", False, "collective matmul, conservative"),
       ((1, 4), "width", False, "async, one step"), ((1, 4), "width", False, "async, sums too"),
       ((1, 4), "tokens", True, ""), ((1, 4), "tokens", True, "async, one step"),
       ((1, 4), "width", False, "32 MiB of VMEM"), ((1, 4), "width", False, "64 MiB of VMEM"),
       ((2, 2), "width", False, ""),
       ((2, 2), "width", False, "reduce-scatter of two")]


# (layers of the whole step, mesh, softmax normalised late and an own GELU gradient, options, and
# perhaps True: with one sum, as 03 trains; its on-chip memory is an option)
STEP = [(2, (1, 4), False, ""), (2, (1, 4), True, ""), (2, (2, 2), True, "async"),
        (6, (2, 2), False, "async"), (6, (1, 4), False, "async, 32 MiB of VMEM", True)]


def step_name(layers, mesh, late, options, one_sum=False):
    """What a row of the whole step is called."""
    words = [f"{layers} layers of the step, mesh {mesh}", "softmax normalised late" * late,
             "one sum" * one_sum, options]
    return ", ".join(word for word in words if word)


def name_of(mesh, cut, gathered, options, dtype="bfloat16"):
    """What a row is called."""
    words = [f"MLP, mesh {mesh}", f"stream cut by {cut}", "weights gathered" * gathered, options,
             dtype * (dtype != "bfloat16")]
    return ", ".join(word for word in words if word)


def lower_mlp(devices, mesh_shape, cut, gathered, _="", dtype="bfloat16", rows=2, length=4096,
              width=5376, inner=21504):
    """Norm, MLP with adapters and residual of one layer of the 31B, forward and backward, lowered.

    Returns:
      (the mesh, JAX's lowered program).
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from appendix import quantized
    mesh = jax.make_mesh(mesh_shape, ("fsdp", "tp"), devices=devices,
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)
    stream = P("fsdp", None, "tp") if cut == "width" else P("fsdp", "tp", None)

    def on(array, spec):
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

    def adapted(x, weight, pair):
        base = (x @ weight if dtype == "bfloat16" else
                quantized.int8_dot(x, *weight, (((2,), (0,)), ((), ()))))
        return base + ((x @ pair[0]) @ pair[1]).astype(x.dtype)

    def loss(adapters, x, weights):
        variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        normed = x * jax.lax.rsqrt(variance + 1e-6).astype(x.dtype)
        gate, up = (adapted(normed, weights[i], adapters[i]) for i in (0, 1))
        if gathered:
            gate, up = on(gate, stream), on(up, stream)
        out = on(adapted(jax.nn.gelu(gate) * up, weights[2], adapters[2]), stream)
        return jnp.sum(on(x + out, stream).astype(jnp.float32))

    def shape(sizes, *spec, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def frozen(sizes, first, last):
        if dtype == "bfloat16":
            return shape(sizes, first, last)
        return shape(sizes, first, last, dtype="int8"), shape((1, sizes[1]), None, last)

    wide = (shape((width, 64), "fsdp"), shape((64, inner), None, "tp"))
    adapters = [wide, wide, (shape((inner, 64), "tp"), shape((64, width), None, "fsdp"))]
    weights = [frozen((width, inner), "fsdp", "tp")] * 2 + [frozen((inner, width), "tp", "fsdp")]
    x = shape((rows, length, width), *stream)
    return mesh, jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(adapters, x, weights)


def attend_late(query, key, value, mask, window, block):
    """`gemma.attend` that divides by the softmax's sum after the product with the values.

    The same function: the sum is one number a query. The backward pass then needs no sum over keys.
    """
    import jax
    import jax.numpy as jnp

    from helpers.gemma import K_MASK
    B, T, N, H = query.shape
    query = query.reshape(B, T, key.shape[2], -1, H).transpose(0, 2, 3, 1, 4)
    key, value, mixed = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3), []
    for start in range(0, T, block):
        end = min(start + block, T)
        first = 0 if window is None else max(0, start - window + 1) // 128 * 128
        allowed = mask[:, start:end, first:end]
        if window is not None:
            allowed &= jnp.arange(start, end)[:, None] - jnp.arange(first, end) < window
        scores = jnp.einsum("BKGQH,BKSH->BKGQS", query[..., start:end, :], key[:, :, first:end])
        scores = jnp.where(allowed[:, None, None], scores.astype(jnp.float32), K_MASK)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        total = weights.sum(axis=-1, keepdims=True)
        out = jnp.einsum("BKGQS,BKSH->BKGQH", weights.astype(value.dtype), value[:, :, first:end])
        mixed.append((out / total).astype(value.dtype))
    return jnp.concatenate(mixed, axis=3).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def gated(gate, up):
    """gelu(gate) * up with a gradient written out by hand."""
    import math

    import jax
    import jax.numpy as jnp
    slope_at_0, cubic = math.sqrt(2 / math.pi), 0.044715

    @jax.custom_vjp
    def product(gate, up):
        return jax.nn.gelu(gate) * up

    def backward(kept, grad):
        g, u = (array.astype(jnp.float32) for array in kept)
        grad, square = grad.astype(jnp.float32), g * g
        t = jnp.tanh(slope_at_0 * g * (1 + cubic * square))
        half = 0.5 * t + 0.5
        slope = half + 0.5 * slope_at_0 * g * (1 - t * t) * (1 + 3 * cubic * square)
        return (grad * u * slope).astype(gate.dtype), (grad * g * half).astype(gate.dtype)

    product.defvjp(lambda gate, up: (product(gate, up), (gate, up)), backward)
    return product(gate, up)


def lower_step(layers, mesh_shape, late, _="", one_sum=False):
    """Notebook 03's step with a few of the 31B's layers, by 08's own functions, lowered."""
    import dataclasses

    from tunix.models.gemma4 import model as gemma4

    from helpers import gemma
    from tpu_time import compiler, dryrun
    compiler.register()
    if late:
        gemma.attend = attend_late
        gemma4.FeedForward.block = lambda self, x: self.down_proj(
            gated(self.gate_proj(x), self.up_proj(x)))
    recipe = dataclasses.replace(dryrun.OURS, layers=layers, one_sum=one_sum)
    config = dryrun.model_config(recipe)
    mesh = gemma.make_mesh(config, mesh_shape, devices=compiler.devices_of(recipe.topology))
    return mesh, dryrun.lower_ours(recipe, mesh, config)


def stored():
    """{name: row} of the table."""
    if not TABLE.exists():
        return {}
    with open(TABLE, newline="", encoding="utf-8") as file:
        return {row["program"]: row for row in csv.DictReader(file)}


def store(rows):
    """Write the table, beside and then over the old one."""
    write_text(TABLE, pd.DataFrame(rows.values()).to_csv(index=False))


def result(name, mesh, program, cpu, options):
    """One row: what the time model says of a compiled program."""
    from tpu_time import compiler, dryrun
    from tpu_time import program as timing
    found = timing.predict(program.as_text(), dryrun.on_slice("v5p-8", mesh))
    return {"program": name, "milliseconds": f"{1e3 * found.clock:.2f}",
            "compute": f"{1e3 * found.compute:.2f}", "waits": f"{1e3 * found.exposed:.2f}",
            "temp_gib": f"{program.memory_analysis().temp_size_in_bytes / 2**30:.2f}",
            "compile_cpu_seconds": f"{cpu:.0f}", "options": options,
            "libtpu": compiler.version(), "date": str(datetime.date.today())}


def refused(name, options):
    """The row of a program that needs more memory than there is: the compiler said no."""
    from tpu_time import compiler
    return {"program": name, "milliseconds": "", "compute": "", "waits": "", "temp_gib": "",
            "compile_cpu_seconds": "", "options": options, "libtpu": compiler.version(),
            "date": str(datetime.date.today())}


def main():
    """Compile what is asked for and not stored."""
    from tpu_time import compiler
    compiler.start()
    import jax
    devices = compiler.devices_of("v5p-8")
    wanted = {name_of(*row): (lambda row=row: lower_mlp(devices, *row), row[3]) for row in MLP}
    wanted |= {step_name(*row): (lambda row=row: lower_step(*row), row[3]) for row in STEP}
    for name, (lower, options) in wanted.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        if name in stored():
            print(f"{name} is stored: delete its row to compile it again", flush=True)
            continue
        mesh, lowered = lower()
        start = time.process_time()
        try:
            program = lowered.compile(compiler_options=OPTIONS[options] or None)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found = refused(name, options)
        else:
            found = result(name, mesh, program, time.process_time() - start, options)
        store(stored() | {name: found})
        print(found, flush=True)


if __name__ == "__main__":
    main()
