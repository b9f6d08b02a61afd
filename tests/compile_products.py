"""Compile products and collectives of known size for a v5p-8, without a TPU: their texts as JSON.

    TPU_LIBRARY_PATH=.libtpu/libtpu/libtpu.so JAX_PLATFORMS=cpu python tests/compile_products.py out.json
"""

import json
import sys

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

N = 8_192
OPTIONS = dict.fromkeys(("xla_tpu_enable_async_collective_fusion",
                         "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
                         "xla_tpu_enable_async_collective_fusion_multiple_steps",
                         "xla_tpu_overlap_compute_collective_tc", "xla_enable_async_all_gather"), True)


def main(path):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    meshes = {shape: jax.make_mesh(shape, ("a", "b"), devices=devices, axis_types=axis_types)
              for shape in ((1, 4), (2, 2), (4, 1))}

    def array(mesh, *spec, shape=(N, N)):
        return jax.ShapeDtypeStruct(
            shape, "bfloat16", sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def collective(mesh, what):
        return jax.shard_map(what, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(),
                             check_vma=False)

    def chain(x, *weights):  # sharded weights that have to be gathered, one after the other
        for weight in weights:
            x = jax.nn.relu(x @ weight)
        return x

    one, two, rows = meshes[1, 4], meshes[2, 2], meshes[4, 1]
    jobs = {
        "product": (lambda a, b: a @ b, [array(one), array(one)], None),
        "gather": (collective(one, lambda x: jax.lax.all_gather(x, "b", tiled=True)),
                   [array(one)], None),
        "gather_x": (collective(two, lambda x: jax.lax.all_gather(x, "b", tiled=True)),
                     [array(two)], None),
        "reduce": (collective(one, lambda x: jax.lax.psum(x, "b")), [array(one)], None),
        "overlapped": (chain, [array(rows, "a", shape=(2 * N, N)), *[array(rows, "a")] * 3],
                       OPTIONS),
        "loop": (lambda a, b: jax.lax.fori_loop(0, 12, lambda _, x: x @ b, a),
                 [array(one), array(one)], None)}
    found = {}
    for name, (function, arguments, options) in jobs.items():
        program = jax.jit(function).lower(*arguments).compile(compiler_options=options)
        found[name] = {"text": program.as_text(), "flops": program.cost_analysis().get("flops", 0.0)}
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
