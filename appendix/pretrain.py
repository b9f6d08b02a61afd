"""Pretraining a small Gemma 4 from scratch: batches, loss, step, loop, export. For 09 and 12.

Letters in shape comments: B rows, T tokens, V vocabulary. Id 0 is padding, 2 `<bos>`, 1 `<eos>`.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from helpers.run import Progress
from tables import architecture


def inputs_of(name, shape):
    """How many numbers one output of this matrix adds up."""
    if "input_embedding" in name or "_einsum" in name and "attn_vec" not in name:
        return shape[-2] if "_einsum" in name else shape[-1]
    return int(np.prod(shape[:-1]))  # o_proj: heads x head_dim; MLP kernels: their first axis


def initialise(model, seed):
    """Fill a Tunix Gemma 4's variables, in the order of their names, from one NumPy generator."""
    generator = np.random.default_rng(seed)
    variables = {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model))}
    for name in sorted(variables):
        shape = variables[name].get_value().shape
        if "norm" in name or "skip_scale" in name:
            scale = shape[0] ** -0.5 if "_query_norm" in name else 1.0
            value = np.full(shape, scale)
        else:
            value = generator.normal(0, inputs_of(name, shape) ** -0.5, shape)
        variables[name].set_value(jnp.asarray(value, jnp.float32))
    return model


def encode(tokenizer, documents):
    """Ids of every document, `<bos>` in front and `<eos>` behind."""
    return [[2, *row.ids, 1] for row in tokenizer.encode_batch(documents)]


LENGTHS = (64, 96, 128, 192)


def make_batches(documents, tokens_per_step, generator):
    """Token arrays [B, T] with B x T close to `tokens_per_step`; longer documents are left out."""
    groups = {length: [] for length in LENGTHS}
    for ids in documents:
        fits = [length for length in LENGTHS if len(ids) <= length]
        if fits:
            groups[fits[0]].append(ids + [0] * (fits[0] - len(ids)))
    batches = []
    for length, group in groups.items():
        size = tokens_per_step // length
        batches += [np.array(group[i:i + size], np.int32)
                    for i in range(0, len(group) - size + 1, size)]
    return [batches[i] for i in generator.permutation(len(batches))]


def tokens_seen(batches, vocabulary):
    """Which ids occur in the batches, padding left out: it is read, never predicted. [V] bool"""
    seen = np.zeros(vocabulary, bool)
    for batch in batches:
        seen[batch] = True
    seen[0] = False
    return seen


def token_loss(model, tokens, seen, given=0):
    """Summed next-token loss over the tokens ever seen, and the number of predicted tokens.

    The first `given` tokens of a row are read, never predicted.
    """
    size = tokens.shape[1]
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (len(tokens), size, size))
    logits, _ = model(tokens, attention_mask=causal)  # [B, T, V]
    logits = jnp.where(seen, logits, -1e9)
    predicted = (tokens[:, 1:] > 0) & (jnp.arange(1, size) >= given)
    weight = predicted.astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return jnp.sum(loss * weight), jnp.sum(weight)


def make_optimizer(params, steps, peak, warmup, decay):
    """AdamW with clipping; weight decay on matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(0, peak, warmup, steps, 0.02 * peak)
    matrices = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(
        schedule, b1=0.9, b2=0.98, weight_decay=decay, mask=matrices))


def make_steps(graph, optimizer, seen):
    """The training step and the evaluation, compiled once for each batch shape.

    Args:
      graph: structure of the model, from `nnx.split`.
      optimizer: from `make_optimizer`.
      seen: [V] bool, from `tokens_seen`.

    Returns:
      step: (params, moments, tokens) -> (params, moments, mean loss); its arguments are used up.
      evaluate: (params, tokens) -> (summed loss, number of predicted tokens).
    """
    seen = jnp.asarray(seen)

    def mean_loss(params, tokens):
        total, count = token_loss(nnx.merge(graph, params), tokens, seen)
        return total / count

    def step(params, moments, tokens):
        loss, gradients = jax.value_and_grad(mean_loss)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def evaluate(params, tokens):
        return token_loss(nnx.merge(graph, params), tokens, seen)

    return jax.jit(step, donate_argnums=(0, 1)), jax.jit(evaluate)


def validation_loss(params, batches, evaluate):
    """Token-weighted mean over all validation batches."""
    sums = np.sum([np.array(evaluate(params, batch)) for batch in batches], axis=0)
    return float(sums[0] / sums[1])


VECTORS = {  # of a layer, Hugging Face's name: Tunix's
    "self_attn.q_norm.weight": "attn._query_norm.scale",
    "self_attn.k_norm.weight": "attn._key_norm.scale",
    "input_layernorm.weight": "pre_attention_norm.scale",
    "post_attention_layernorm.weight": "post_attention_norm.scale",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm.scale",
    "post_feedforward_layernorm.weight": "post_ffw_norm.scale", "layer_scalar": "skip_scale"}


def to_hf(weights, config):
    """{Hugging Face name: array} of {Tunix name: array}, the reverse of loading; `config` is a dict.

    Matrices become [outputs, inputs], with heads folded into one axis; K and V come apart.
    """
    tensors = {"embed_tokens.weight": weights["embedder.input_embedding"],
               "norm.weight": weights["final_norm.scale"]}
    for module in architecture.modules(config):
        kind, leaf = module.how, "w" if ".attn." in module.path else "kernel"
        axes = [kind.weight.index(axis) for axis in kind.outputs + kind.inputs]
        matrices = weights[f"{module.path}.{leaf}"].transpose(axes).reshape(
            len(kind.names), -1, np.prod(module.inputs))
        tensors |= {f"{name}.weight": matrix for name, matrix in zip(module.names, matrices)}
    for layer in range(config["num_hidden_layers"]):
        for name, tunix in VECTORS.items():
            tensors[f"layers.{layer}.{name}"] = weights[f"layers.{layer}.{tunix}"]
    return {f"model.language_model.{name}": array for name, array in tensors.items()}


def pretrain(params, moments, step, evaluate, batches, validation, steps, every=100, watch=None):
    """Train for `steps` steps, round and round the batches; `watch(steps done, params)` looks on.

    Returns:
      (params, history): one dict per step with step, loss (mean per token, nats), seconds and,
      after every `every` steps and the last, val_loss.
    """
    params, moments = jax.tree.map(jnp.copy, (params, moments))  # a step uses up what it gets
    history, progress = [], Progress(steps, "step", every=10)
    for number in range(steps):
        if watch:
            watch(number, params)
        start, batch = time.perf_counter(), batches[number % len(batches)]
        params, moments, loss = step(params, moments, batch)
        entry = {"step": number + 1, "loss": float(loss), "seconds": time.perf_counter() - start}
        history.append(entry)
        if (number + 1) % every == 0 or number + 1 == steps:
            entry["val_loss"] = validation_loss(params, validation, evaluate)
        speed = (np.asarray(batch) > 0).sum() / entry["seconds"]
        progress.update(note=f"loss {entry['loss']:.3f} | {speed:,.0f} tokens/s")
    if watch:
        watch(steps, params)
    return params, history
