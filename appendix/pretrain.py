"""Pretraining a small Gemma 4 from scratch: batches, loss, step, loop, export. For 09 and 12.

Letters in shape comments: B rows, T tokens, V vocabulary. Id 0 is padding, 2 `<bos>`, 1 `<eos>`.
"""

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from helpers.run import Progress, atomic_file


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


NORMS = {"input_layernorm": "pre_attention_norm", "post_attention_layernorm": "post_attention_norm",
         "pre_feedforward_layernorm": "pre_ffw_norm", "post_feedforward_layernorm": "post_ffw_norm"}


def to_hf(weights, layers):
    """{Hugging Face name: array [outputs, inputs]} of {Tunix name: array}, the reverse of loading."""
    def flat(heads):  # [N, D, H] -> [N * H, D]
        return heads.transpose(0, 2, 1).reshape(-1, heads.shape[1])

    tensors = {"embed_tokens.weight": weights["embedder.input_embedding"],
               "norm.weight": weights["final_norm.scale"]}
    for i in range(layers):
        mine, theirs = f"layers.{i}.attn.", f"layers.{i}.self_attn."
        tensors[theirs + "q_proj.weight"] = flat(weights[mine + "q_einsum.w"])
        if mine + "k_einsum.w" in weights:  # a full layer: V is K
            tensors[theirs + "k_proj.weight"] = flat(weights[mine + "k_einsum.w"])
        else:
            for letter, part in zip("kv", weights[mine + "kv_einsum.w"], strict=True):
                tensors[f"{theirs}{letter}_proj.weight"] = flat(part)
        output = weights[mine + "attn_vec_einsum.w"]  # [N, H, D]
        tensors[theirs + "o_proj.weight"] = output.reshape(-1, output.shape[-1]).T
        for name, tunix in {"q_norm": "_query_norm", "k_norm": "_key_norm"}.items():
            tensors[f"{theirs}{name}.weight"] = weights[f"{mine}{tunix}.scale"]
        for kind in ("gate", "up", "down"):
            tensors[f"layers.{i}.mlp.{kind}_proj.weight"] = \
                weights[f"layers.{i}.mlp.{kind}_proj.kernel"].T
        for name, tunix in NORMS.items():
            tensors[f"layers.{i}.{name}.weight"] = weights[f"layers.{i}.{tunix}.scale"]
        tensors[f"layers.{i}.layer_scalar"] = weights[f"layers.{i}.skip_scale"]
    return {f"model.language_model.{name}": array for name, array in tensors.items()}


def save_state(path, tree, history):
    """All arrays and the history in one file, written beside and renamed."""
    arrays = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    with atomic_file(path) as file:
        np.savez(file, history=json.dumps(history), **arrays)


def load_state(path, tree):
    """(arrays in the structure of `tree`, history), or None where no state is stored."""
    if not Path(path).exists():
        return None
    leaves, kind = jax.tree.flatten(tree)
    with np.load(path) as stored:
        arrays = [jnp.asarray(stored[f"leaf{i}"]) for i in range(len(leaves))]
        return jax.tree.unflatten(kind, arrays), json.loads(str(stored["history"]))


def pretrain(params, moments, step, evaluate, batches, validation, steps, path, every=100,
             watch=None):
    """Train to `steps`, from the state saved in `path` if there is one.

    Args:
      params, moments: weights and optimizer state before the first step; they are used up.
      step, evaluate: from `make_steps`.
      batches, validation: token arrays, from `make_batches`; training goes round `batches`.
      steps: number of the last step.
      path: where the state is saved; its name must tell one recipe from another.
      every: validate and save after so many steps, and after the last.
      watch: called with (steps done, params) before the first step and after each.

    Returns:
      (params, history): one dict per step with step, loss (mean per token, nats), seconds and,
      after every `every` steps and the last, val_loss.
    """
    history = []
    if found := load_state(path, (params, moments)):
        (params, moments), history = found
        print(f"resuming after step {len(history)}")
    progress = Progress(steps - len(history), "step", every=10)
    for number in range(len(history), steps):
        if watch:
            watch(number, params)
        start, batch = time.perf_counter(), batches[number % len(batches)]
        params, moments, loss = step(params, moments, batch)
        entry = {"step": number + 1, "loss": float(loss), "seconds": time.perf_counter() - start}
        history.append(entry)
        if (number + 1) % every == 0 or number + 1 == steps:
            entry["val_loss"] = validation_loss(params, validation, evaluate)
            save_state(path, (params, moments), history)
        speed = (np.asarray(batch) > 0).sum() / entry["seconds"]
        progress.update(note=f"loss {entry['loss']:.3f} | {speed:,.0f} tokens/s")
    if watch:
        watch(steps, params)
    return params, history
