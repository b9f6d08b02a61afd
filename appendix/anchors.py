"""Programs whose time on a TPU somebody else measured, compiled here and predicted.

    .venv/bin/python -m appendix.anchors [NAME ...]     data/anchors/anchors.csv (08, section 9)

Needs libtpu (`./setup.sh dryrun`), no TPU. Without names all rows that are not stored are made: most
take seconds, steps of a model minutes. Programs are stated again here in the shapes, types and order
of their sources; no row was used to set a constant of `tpu_time.program`, and every row names the
clock that measured it: `trace` (the device's own), `host` (repeated) or `one call` (with dispatch).
"""

import datetime
import re
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import qwix
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma4 import model as gemma4
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils

from helpers import gemma
from helpers.run import write_text
from tpu_time import bands, compiler
from tpu_time import program as timing

RECIPES = "AI-Hypercomputer/tpu-recipes: microbenchmarks/"
JAX_DOCS = "jax-ml/jax: docs/pallas/tpu/matmul.ipynb, XLA matmul"
TPUCHAT = "vorushin/tpuchat: pallas/CLAUDE.md (662fcd4f), pallas/profile_breakdown.py"
LOOPS = "deep-diver/tunix-accel: 01-CCE/data/mesh_pathology_tpu_v5e_synthetic/results.csv"
STEPS = "deep-diver/tunix-accel: 01-CCE/data/gemma_1b_e2b_cce_transfer/training_summary.csv"


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
      seconds: predicted without compiling.
      options: for the compiler.
      gib: memory of a chip that their XLA planned.
    """

    program: str
    slice: str
    milliseconds: float
    clock: str
    source: str
    versions: str = ""
    lower: object = None
    seconds: object = None
    options: dict = field(default_factory=dict)
    gib: float = None


def on(devices, shapes, shape=None, axes=("fsdp", "tp"), spec=()):
    """(mesh, the shapes placed on it): whole on every device unless a spec is given."""
    mesh = jax.make_mesh(shape or (len(devices), 1), axes, devices=devices,
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)
    where = NamedSharding(mesh, PartitionSpec(*spec))
    return mesh, jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where), shapes)


def product(size):
    """A product of two square bfloat16 matrices on one chip."""
    def lower(devices):
        square = jax.ShapeDtypeStruct((size, size), "bfloat16")
        _, arguments = on(devices[:1], (square, square))
        return jax.jit(lambda a, b: a @ b).lower(*arguments)
    return lower


def psum():
    """Seconds of an all-reduce of 17,408 x 17,408 bfloat16 numbers over a v6e-256."""
    grid = timing.Slice("v6e", (16, 16))
    return timing.collective_time("all-reduce", 17_408**2 * 2, [list(range(256))], grid)[0]


def chunked_product(token_chunk, vocab_chunk, tokens=8_192, width=320, vocabulary=262_144):
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


def tpuchat_loss(rows=4, length=2_048, width=1_024, vocabulary=32_768, softcap=15.0):
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


def tpuchat_update(layers=8, width=1_024, heads=4, size=256, inner=3_072, vocabulary=32_768):
    """One AdamW update of tpuchat's 163.6 M parameters in bfloat16; no argument is donated."""
    def lower(devices):
        one = (width, 1, size)
        layer = [(width, heads, size), one, one, (heads, size, width), (width, inner),
                 (width, inner), (inner, width)]
        shapes = [(vocabulary, width), (width, vocabulary), *layer * layers]
        params = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
        rule = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)
        _, arguments = on(devices[:1], (params, jax.eval_shape(rule.init, params), params))
        return jax.jit(rule.update).lower(*arguments)
    return lower


def tunix_step(model, config, rows, length, rank=16, alpha=32.0):
    """A LoRA step of Tunix's own trainer as tunix-accel runs it: fsdp over all chips, no remat.

    Args:
      model: Tunix's class.
      config: without arguments -> its `ModelConfig`.
      rows, length: of the batch.
    """
    pattern = ".*(q_einsum|kv_einsum|qkv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj).*"

    def lower(devices):
        mesh, _ = on(devices, ())
        provider = qwix.LoraProvider(module_path=pattern, rank=rank, alpha=alpha)
        sample = jnp.ones((len(devices), 8), jnp.int32)

        def adapt():
            base = model(config(), rngs=gemma.SameKey(0))
            real = jnp.ones_like(sample, bool)
            return qwix.apply_lora_to_model(
                base, provider, sample, sft_utils.build_positions_from_mask(real), None,
                sft_utils.make_causal_attn_mask(real), rngs=gemma.SameKey(0))

        def model_input(batch):
            return {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
                    "positions": sft_utils.build_positions_from_mask(batch.input_tokens != 0),
                    "attention_mask": sft_utils.make_causal_attn_mask(batch.input_tokens != 0)}

        trainers = []

        def build(tuned):
            trainers.append(peft_trainer.PeftTrainer(
                tuned, optax.adamw(1e-4),
                peft_trainer.TrainingConfig(eval_every_n_steps=1_001, max_steps=1_000)))
            return trainers[0].optimizer

        with mesh:
            tuned = gemma.place(nnx.eval_shape(adapt), mesh)
            optimizer = gemma.place(nnx.eval_shape(build, tuned), mesh)
            trainers[0].with_gen_model_input_fn(model_input)
            cut = NamedSharding(mesh, PartitionSpec("fsdp"))
            batch = peft_trainer.TrainingInput(
                *(jax.ShapeDtypeStruct((rows, length), kind, sharding=cut)
                  for kind in (jnp.int32, bool)))
            step = nnx.jit(trainers[0].create_train_step_fn(), donate_argnames=("optimizer",))
            return step.lower(tuned, optimizer, batch).lowered
    return lower


VMEM = {"xla_tpu_scoped_vmem_limit_kib": "65536"}
TUNIX = "Tunix 43cb3bd, 1,000 steps, no splash, default cross-entropy"
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
        TPUCHAT + ": 2.67ms", lower=tpuchat_update()),
    "tunix 270m": Anchor(
        "Tunix LoRA step, Gemma 3 270M, 16 x 512 tokens", "v5e-4", 202.356, "host",
        "deep-diver/tunix-accel: 01-CCE/data/gemma3_270m_4chip_quality/training_summary.csv", TUNIX,
        gib=11.29, lower=tunix_step(gemma3.Gemma3, gemma3.ModelConfig.gemma3_270m, 16, 512)),
    "tunix 1b": Anchor(
        "Tunix LoRA step, Gemma 3 1B, 8 x 512 tokens", "v5e-4", 216.943, "host", STEPS, TUNIX,
        gib=9.85, lower=tunix_step(gemma3.Gemma3, gemma3.ModelConfig.gemma3_1b_it, 8, 512)),
    "tunix e2b": Anchor(
        "Tunix LoRA step, Gemma 4 E2B, 4 x 256 tokens", "v5e-4", 192.750, "host", STEPS, TUNIX,
        gib=9.74, lower=tunix_step(gemma4.Gemma4, gemma4.ModelConfig.gemma4_e2b, 4, 256)),
}


def grid_of(name, devices):
    """The slice of an anchor as the time model sees it: partitions in the devices' order."""
    used = np.array([device.coords for device in devices])
    return timing.Slice(name.split("-")[0], tuple(int(size) for size in used.max(axis=0) + 1),
                        tuple(map(tuple, used.tolist())))


def measure(name):
    """One row of the table: an anchor compiled, predicted and put beside its measurement."""
    anchor, start, memory, seconds = ANCHORS[name], time.process_time(), None, None
    if anchor.seconds:
        seconds = anchor.seconds()
    else:
        devices = compiler.devices_of(anchor.slice)
        program = anchor.lower(devices).compile(compiler_options=anchor.options or None)
        chips = int(re.search(r"num_partitions=(\d+)|$", program.as_text())[1] or 1)
        found = timing.predict(program.as_text(), grid_of(anchor.slice, devices[:chips]))
        seconds, sizes = found.seconds, program.memory_analysis()
        if anchor.gib:
            memory = (sizes.argument_size_in_bytes + sizes.output_size_in_bytes
                      - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes) / 2**30
    measured = anchor.milliseconds
    return {"name": name, "program": anchor.program, "slice": anchor.slice, "clock": anchor.clock,
            "measured_ms": f"{measured:.5g}",
            "predicted_ms": f"{1e3 * seconds:.5g}" if seconds else "",
            "miss": f"{1e3 * seconds / measured - 1:.3f}" if seconds else "",
            "planned_gib": anchor.gib or "", "compiled_gib": f"{memory:.2f}" if memory else "",
            "source": anchor.source, "versions": anchor.versions,
            "options": " ".join(f"{key}={value}" for key, value in anchor.options.items()),
            "jax": metadata.version("jax"), "libtpu": compiler.version(),
            "compile_cpu_seconds": f"{time.process_time() - start:.0f}",
            "date": str(datetime.date.today())}


def main(names):
    """Make the rows that are asked for, or all that are not stored."""
    compiler.start()
    compiler.register()
    for name in names or ANCHORS:
        stored = {row["name"]: row for row in bands.anchors()}
        if names or name not in stored:
            stored[name] = measure(name)
            rows = [stored[one] for one in ANCHORS if one in stored]
            write_text(bands.ANCHORS, pd.DataFrame(rows).to_csv(index=False))
            print({key: stored[name][key] for key in ("name", "measured_ms", "predicted_ms", "miss",
                                                      "planned_gib", "compiled_gib")}, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
