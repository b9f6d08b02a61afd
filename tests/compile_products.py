"""Compile products and collectives of known size for a v5p-8, without a TPU: their texts as JSON.

    TPU_LIBRARY_PATH=.libtpu/libtpu/libtpu.so JAX_PLATFORMS=cpu \\
        python tests/compile_products.py out.json
"""

import json
import sys

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

N = 8_192


def main(path):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    meshes = {shape: jax.make_mesh(shape, ("a", "b"), devices=devices, axis_types=axis_types)
              for shape in ((1, 4), (2, 2))}

    def array(mesh):
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct((N, N), "bfloat16", sharding=whole)

    def collective(mesh, what):
        return jax.shard_map(what, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(),
                             check_vma=False)

    one, two = meshes[1, 4], meshes[2, 2]
    jobs = {
        "product": (lambda a, b: a @ b, [array(one), array(one)]),
        "gather": (collective(one, lambda x: jax.lax.all_gather(x, "b", tiled=True)), [array(one)]),
        "gather_x": (
            collective(two, lambda x: jax.lax.all_gather(x, "b", tiled=True)), [array(two)]),
        "reduce": (collective(one, lambda x: jax.lax.psum(x, "b")), [array(one)])}
    found = {}
    for name, (function, arguments) in jobs.items():
        program = jax.jit(function).lower(*arguments).compile()
        flops = program.cost_analysis().get("flops", 0.0)
        found[name] = {"text": program.as_text(), "flops": flops}
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
