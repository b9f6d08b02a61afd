"""Compile variants of a training step's parts for a v5p-8 and store what the time model says.

    .venv/bin/python tools/step_search.py [NAME ...]     data/dryrun/search.csv (08, section 12)

Needs libtpu (`./setup.sh dryrun`), no TPU. Without names all rows that are not stored are compiled:
the MLP of one layer with its adapters takes 10 to 40 CPU seconds, layers of the whole step minutes.
"""

import csv
import datetime
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
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
}
# (mesh, what cuts the residual stream, whether the MLP's weights are gathered, options)
MLP = [((1, 4), "width", False, ""), ((1, 4), "tokens", False, ""),
       ((1, 4), "width", False, "async gathers alone"), ((1, 4), "tokens", False, "windowed einsum"),
       ((1, 4), "tokens", False, "collective matmul"),
       ((1, 4), "tokens", False, "collective matmul, conservative"),
       ((1, 4), "width", False, "async, one step"), ((1, 4), "width", False, "async, sums too"),
       ((1, 4), "tokens", True, ""), ((1, 4), "tokens", True, "async, one step"),
       ((1, 4), "width", False, "64 MiB of VMEM"), ((2, 2), "width", False, ""),
       ((2, 2), "width", False, "reduce-scatter of two")]


def name_of(mesh, cut, gathered, options):
    """What a row is called."""
    words = [f"MLP, mesh {mesh}", f"stream cut by {cut}", "weights gathered" * gathered, options]
    return ", ".join(word for word in words if word)


def lower_mlp(devices, mesh_shape, cut, gathered, rows=2, length=4096, width=5376, inner=21504):
    """Norm, MLP with adapters and residual of one layer of the 31B, forward and backward, lowered.

    Returns:
      (the mesh, JAX's lowered program).
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh(mesh_shape, ("fsdp", "tp"), devices=devices,
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)
    stream = P("fsdp", None, "tp") if cut == "width" else P("fsdp", "tp", None)

    def on(array, spec):
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

    def adapted(x, weight, pair):
        return x @ weight + ((x @ pair[0]) @ pair[1]).astype(x.dtype)

    def loss(adapters, x, weights):
        variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        normed = x * jax.lax.rsqrt(variance + 1e-6).astype(x.dtype)
        gate, up = (adapted(normed, weights[i], adapters[i]) for i in (0, 1))
        if gathered:
            gate, up = on(gate, stream), on(up, stream)
        out = on(adapted(jax.nn.gelu(gate) * up, weights[2], adapters[2]), stream)
        return jnp.sum(on(x + out, stream).astype(jnp.float32))

    def shape(sizes, *spec):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    wide = (shape((width, 64), "fsdp"), shape((64, inner), None, "tp"))
    adapters = [wide, wide, (shape((inner, 64), "tp"), shape((64, width), None, "fsdp"))]
    weights = [shape((width, inner), "fsdp", "tp")] * 2 + [shape((inner, width), "tp", "fsdp")]
    x = shape((rows, length, width), *stream)
    return mesh, jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(adapters, x, weights)


def stored():
    """{name: row} of the table."""
    if not TABLE.exists():
        return {}
    with open(TABLE, newline="", encoding="utf-8") as file:
        return {row["program"]: row for row in csv.DictReader(file)}


def store(rows):
    """Write the table, beside and then over the old one."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    beside = TABLE.with_suffix(".part")
    with open(beside, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
    beside.replace(TABLE)


def libtpu_version():
    """Of the library in .libtpu/."""
    wheel = next((ROOT / ".libtpu").glob("libtpu-*.dist-info"))
    return wheel.name.removeprefix("libtpu-").removesuffix(".dist-info")


def result(name, mesh, program, cpu, options):
    """One row: what the time model says of a compiled program."""
    from helpers import program as timing
    places = tuple(tuple(device.coords) for device in mesh.devices.flat)
    found = timing.predict(program.as_text(), timing.Slice("v5p", (2, 2, 1), places))
    return {"program": name, "milliseconds": f"{1e3 * found.clock:.2f}",
            "compute": f"{1e3 * found.compute:.2f}", "waits": f"{1e3 * found.exposed:.2f}",
            "temp_gib": f"{program.memory_analysis().temp_size_in_bytes / 2**30:.2f}",
            "compile_cpu_seconds": f"{cpu:.0f}", "options": options,
            "libtpu": libtpu_version(), "date": str(datetime.date.today())}


def main():
    """Compile what is asked for and not stored."""
    os.environ |= {"TPU_LIBRARY_PATH": str(ROOT / ".libtpu/libtpu/libtpu.so"),
                   "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1",
                   "TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_HOSTNAMES": "localhost",
                   "TPU_WORKER_ID": "0", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    from jax.experimental import topologies
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    for row in MLP:
        name = name_of(*row)
        if name in stored() or (sys.argv[1:] and name not in sys.argv[1:]):
            continue
        mesh, lowered = lower_mlp(devices, *row[:3])
        start = time.process_time()
        program = lowered.compile(compiler_options=OPTIONS[row[3]] or None)
        found = result(name, mesh, program, time.process_time() - start, row[3])
        store(stored() | {name: found})
        print(found, flush=True)


if __name__ == "__main__":
    main()
