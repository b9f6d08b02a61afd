"""Predict public programs whose time on a TPU somebody else measured, and store both times.

    .venv/bin/python tools/anchors.py [NAME ...]     data/dryrun/anchors.csv (08, section 9)

Needs libtpu (`./setup.sh dryrun`), no TPU. Without names all programs that are not stored are
compiled: a step takes four to five CPU minutes, the others seconds.

The programs are those of tpuchat (github.com/vorushin/tpuchat), a model of 163.6 M parameters
that its author trained on one v6e chip. They are stated again here, in the same shapes, types and
order, from its 08_tpu_ablations.py (commit 02162d67) and pallas/profile_breakdown.py (094ceda6).
Its step holds splash attention, a kernel of which the text says no cycles. So the step is compiled
twice, for two bounds: with attention in plain JAX, which a kernel is there to beat, and without
the attention's core, whose products are added at the chip's peak. The other programs have no
kernel and are predicted whole.
"""

import csv
import datetime
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from helpers.run import write_text

TABLE = ROOT / "data" / "dryrun" / "anchors.csv"
CHIP, TOPOLOGY = "v6e", "v6e-1"


@dataclass(frozen=True)
class Shapes:
    """tpuchat's model and step."""

    layers: int = 8
    width: int = 1024
    heads: int = 4          # of the queries; keys and values have one
    head_size: int = 256
    inner: int = 3072       # of the gated MLP
    vocabulary: int = 32_768
    length: int = 2_048     # tokens of a row
    rows: int = 4           # of a micro-batch
    micro_batches: int = 16
    pieces: int = 2         # of the output matrix in the loss
    softcap: float = 15.0
    block: int = 1_024      # queries, and keys, at a time in the kernel


FULL = Shapes()


def parameter_shapes(shapes):
    """{name: shape or its layers'} of all parameters, in bfloat16; norms have none."""
    import jax
    one = (shapes.width, 1, shapes.head_size)
    layer = {"query": (shapes.width, shapes.heads, shapes.head_size), "key": one, "value": one,
             "out": (shapes.heads, shapes.head_size, shapes.width),
             "gate": (shapes.width, shapes.inner), "up": (shapes.width, shapes.inner),
             "down": (shapes.inner, shapes.width)}
    tree = {"embedding": (shapes.vocabulary, shapes.width),
            "output": (shapes.width, shapes.vocabulary), "layers": [layer] * shapes.layers}
    return jax.tree.map(lambda size: jax.ShapeDtypeStruct(size, "bfloat16"), tree,
                        is_leaf=lambda one: isinstance(one, tuple))


def norm(x):
    """RMSNorm without weights, in the type of its input."""
    import jax
    import jax.numpy as jnp
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def turned(x):
    """Rotary positions, [B, N, T, H]: the two halves of a head are the parts of complex numbers."""
    import jax.numpy as jnp
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[2]), 1e4 ** (-jnp.arange(half) / half))
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos + right * sin, right * cos - left * sin], axis=-1)


def attend(query, key, value, block):
    """Causal attention in plain JAX, `block` queries at a time; keys and values have one head.

    Unscaled, like the published kernel call. All arrays are [B, N, T, H].
    """
    import jax
    import jax.numpy as jnp
    mixed = []
    for start in range(0, query.shape[2], block):
        end = start + block
        scores = jnp.einsum("bnqh,bsh->bnqs", query[:, :, start:end], key[:, 0, :end])
        seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        scores = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        mixed.append(jnp.einsum("bnqs,bsh->bnqh", weights, value[:, 0, :end]))
    return jnp.concatenate(mixed, axis=2)


def hidden_of(params, tokens, shapes, core):
    """The forward pass up to the last norm; `core` says what stands for scores, softmax, values."""
    import jax
    import jax.numpy as jnp
    x = norm(params["embedding"][tokens])
    for layer in params["layers"]:
        h = norm(x)
        query, key, value = (jnp.einsum("btd,dnh->bnth", h, layer[name])
                             for name in ("query", "key", "value"))
        query, key = norm(turned(query)), norm(turned(key))
        if core == "plain":
            mixed = attend(query, key, value, min(shapes.block, tokens.shape[1]))
        else:  # left out; the sum keeps the projections and their gradients alive
            mixed = query + key + value
        x = x + jnp.einsum("bnth,nhd->btd", mixed, layer["out"])
        h = norm(x)
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return norm(x)


def loss_of(hidden, output, labels, shapes):
    """Mean cross-entropy, the output matrix in pieces; soft-capped logits in bfloat16."""
    import jax
    import jax.numpy as jnp
    size = shapes.vocabulary // shapes.pieces
    total, right = jnp.full(labels.shape, -jnp.inf), jnp.zeros(labels.shape)
    for start in range(0, shapes.vocabulary, size):
        logits = hidden @ output[:, start:start + size]
        logits = shapes.softcap * jnp.tanh(logits / shapes.softcap)
        total = jnp.logaddexp(total, jax.nn.logsumexp(logits, axis=-1))
        here = (labels >= start) & (labels < start + size)
        place = jnp.where(here, labels - start, 0)[..., None]
        right += jnp.where(here, jnp.take_along_axis(logits, place, axis=-1)[..., 0], 0)
    return jnp.mean(total - right)


def optimizer():
    """AdamW as the step has it: its learning rate is warmed up, kept, and lowered to nothing."""
    import optax
    rate = optax.join_schedules([optax.linear_schedule(0.0, 1e-4, 6), optax.constant_schedule(1e-4),
                                 optax.linear_schedule(1e-4, 0.0, 150)], [6, 150])
    return optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)


def on_chip(tree):
    """The shapes of a tree, placed on the one chip."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from tpu_time import compiler
    mesh = jax.make_mesh((1,), ("chip",), devices=compiler.devices_of(TOPOLOGY),
                         axis_types=(jax.sharding.AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=whole), tree)


def lower_step(core, shapes=FULL):
    """The whole optimizer step, lowered: micro-batches in a loop, gradients added up, AdamW."""
    import jax
    import jax.numpy as jnp
    import optax
    update = optimizer().update

    def step(params, state, tokens, labels):
        def loss(params, tokens, labels):
            hidden = hidden_of(params, tokens, shapes, core)
            return loss_of(hidden, params["output"], labels, shapes)

        def micro_step(sums, batch):
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return jax.tree.map(jnp.add, sums, grads), value
        batches = [x.reshape(shapes.micro_batches, shapes.rows, -1) for x in (tokens, labels)]
        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, losses = jax.lax.scan(micro_step, zeros, tuple(batches))
        grads = jax.tree.map(lambda one: one / shapes.micro_batches, grads)
        updates, state = update(grads, state, params)
        return jnp.mean(losses), optax.apply_updates(params, updates), state

    params = parameter_shapes(shapes)
    batch = jax.ShapeDtypeStruct((shapes.micro_batches * shapes.rows, shapes.length), "int32")
    arguments = (params, jax.eval_shape(optimizer().init, params), batch, batch)
    return jax.jit(step).lower(*on_chip(arguments))


def lower_loss(shapes=FULL):
    """Output matrix and loss of one micro-batch, whole logits, and the gradient of its input."""
    import jax
    import jax.numpy as jnp

    def loss(hidden, output, tokens):
        logits = hidden @ output
        logits = (shapes.softcap * jnp.tanh(logits / shapes.softcap))[:, :-1]
        right = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -jnp.mean(right)
    hidden = jax.ShapeDtypeStruct((shapes.rows, shapes.length, shapes.width), "bfloat16")
    tokens = jax.ShapeDtypeStruct((shapes.rows, shapes.length), "int32")
    return jax.jit(jax.value_and_grad(loss)).lower(
        *on_chip((hidden, parameter_shapes(shapes)["output"], tokens)))


def lower_update(shapes=FULL):
    """One AdamW update of all parameters, at a constant rate; no argument is donated."""
    import jax
    import optax
    rule, params = optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1), parameter_shapes(shapes)
    return jax.jit(rule.update).lower(
        *on_chip((params, jax.eval_shape(rule.init, params), params)))


def lower_product(size=8_192):
    """A product of two square matrices in bfloat16."""
    import jax
    square = jax.ShapeDtypeStruct((size, size), "bfloat16")
    return jax.jit(lambda a, b: a @ b).lower(*on_chip((square, square)))


def attention_floor(shapes=FULL):
    """Seconds that the kernel's own products take at the chip's peak in one optimizer step.

    Two forward and seven backward, as in `dryrun.splash_floor`: both of its backward kernels
    compute the scores and the gradient of the weights anew. Whole blocks up to the diagonal.
    """
    from tables.hardware import chip
    blocks = shapes.length // shapes.block
    pairs = blocks * (blocks + 1) // 2
    product = 2 * shapes.block ** 2 * shapes.head_size * shapes.heads * pairs
    times = 9 * shapes.rows * shapes.micro_batches * shapes.layers
    return times * product / chip(CHIP).flops


# ── the table ─────────────────────────────────────────────────────────────────────────────────────

STEP = ("tpuchat, a step of 64 x 2,048 tokens", 0.275, 131_072,
        "vorushin/tpuchat: 08_tpu_ablations.py (commit 02162d67), revision 39: 163.6M, ~275ms, "
        "~477k tok/s, wall clock with data")
PARTS = "vorushin/tpuchat: pallas/CLAUDE.md (commit 662fcd4f), pallas/profile_breakdown.py: "
# (program, measured seconds, tokens, source), what the prediction is, how it was made, how it is
# lowered, seconds that are added to it
PROGRAMS = {
    "lower": (STEP, "lower", "attention's core left out, its products at the peak instead",
              lambda: lower_step("left out"), attention_floor),
    "upper": (STEP, "upper", "attention in plain JAX, 1,024 queries at a time",
              lambda: lower_step("plain"), lambda: 0.0),
    "loss": (("tpuchat, output matrix and loss of 4 x 2,048 tokens", 3.96e-3, 8_192,
              PARTS + "lm_head+loss fwd+bwd ~3.96ms, one call from the host"),
             "whole", "gradient of the input alone", lower_loss, lambda: 0.0),
    "update": (("tpuchat, one AdamW update", 2.67e-3, "",
                PARTS + "optimizer 2.67ms, one call from the host"),
               "whole", "nothing donated", lower_update, lambda: 0.0),
    "product": (("tpuchat, a product of two 8,192 x 8,192 matrices", 2 * 8_192 ** 3 / 622e12, "",
                 "vorushin/tpuchat: LOG.md (commit 002800d6), 19 February 2026: ~622 TFLOP/s"),
                "whole", "", lower_product, lambda: 0.0)}
# What is published for programs that cannot be judged, and why.
OTHERS = [
    {"program": "MaxText, Llama 3.1 8B, 24 x 8,192 tokens", "chip": "v6e", "chips": 8,
     "measured_seconds": 3.443, "tokens": 196_608,
     "source": "AI-Hypercomputer/tpu-recipes: training/trillium/Llama3.1-8B-MaxText/v6e-8/README.md"
               " (commit 10ca5b92)", "note": "attention=flash, a kernel: no cycles in the text"},
    {"program": "MaxText, DeepSeek-V2 16B, 4 x 2,048 tokens", "chip": "v5p", "chips": 4,
     "measured_seconds": 1.012, "tokens": 8_192,
     "source": "AI-Hypercomputer/maxtext: docs/guides/Understanding_Logs_and_Metrics.md "
               "(commit 831e2a83)",
     "note": "MaxText's defaults, kernels for attention and experts: no cycles in the text"}]
COLUMNS = ("program", "chip", "chips", "measured_seconds", "predicted_seconds", "predicted_is",
           "tokens", "unknown_share", "note", "source", "options", "compile_cpu_seconds", "libtpu",
           "jax", "date")


def key_of(row):
    """What tells rows apart."""
    return row["program"], row["predicted_is"]


def stored():
    """{key: row} of the table."""
    if not TABLE.exists():
        return {}
    with open(TABLE, newline="", encoding="utf-8") as file:
        return {key_of(row): row for row in csv.DictReader(file)}


def store(rows):
    """Write the table in this file's order, beside and then over the old one."""
    order = [(program[0], kind) for program, kind, *_ in PROGRAMS.values()]
    rows = [rows[key] for key in order if key in rows] + OTHERS
    write_text(TABLE, pd.DataFrame(rows, columns=COLUMNS, dtype=object).to_csv(index=False))


def result(name, text, cpu):
    """One row: what the time model says of a compiled program, beside what was measured."""
    from tpu_time import compiler
    from tpu_time import program as timing
    (program, measured, tokens, source), kind, note, _, added = PROGRAMS[name]
    found = timing.predict(text, timing.Slice(CHIP, (1, 1, 1)))
    seconds = f"{found.seconds + added():.6g}" if found.trusted else ""
    return {"program": program, "chip": CHIP, "chips": 1, "measured_seconds": f"{measured:.6g}",
            "predicted_seconds": seconds, "predicted_is": kind, "tokens": tokens,
            "unknown_share": f"{found.unknown_share:.3g}", "note": note, "source": source,
            "options": "", "compile_cpu_seconds": f"{cpu:.0f}", "libtpu": compiler.version(),
            "jax": metadata.version("jax"), "date": str(datetime.date.today())}


def main():
    """Compile what is asked for, or all that is not stored."""
    from tpu_time import compiler
    compiler.start()
    compiler.register()
    for name, (program, kind, _, lower, _) in PROGRAMS.items():
        if name in sys.argv[1:] or (not sys.argv[1:] and (program[0], kind) not in stored()):
            start = time.process_time()
            text = lower().compile().as_text()
            found = result(name, text, time.process_time() - start)
            store(stored() | {key_of(found): found})
            print(found, flush=True)


if __name__ == "__main__":
    main()
