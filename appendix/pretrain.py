"""Pretraining a small Gemma 4 from scratch: batches, loss, step, loop, saved state. For 09 and 12.

Letters in shape comments: B rows, T tokens, V vocabulary. Id 0 is padding, 2 `<bos>`, 1 `<eos>`.
"""

import json
import time
import zipfile
import zlib
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


def make_batches(documents, tokens_per_step, generator, lengths=(64, 96, 128, 192)):
    """Token arrays [B, T] with B x T close to `tokens_per_step`; longer documents are left out."""
    groups = {length: [] for length in lengths}
    for ids in documents:
        fits = [length for length in lengths if len(ids) <= length]
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


def make_optimizer(params, steps, peak, warmup, decay, slow=None):
    """AdamW with clipping; weight decay on matrices only.

    `slow` is (tree of bools, factor): where it is True, the learning rate is `factor` times as
    high.
    """
    schedule = optax.warmup_cosine_decay_schedule(0, peak, warmup, steps, 0.02 * peak)
    matrices = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    chain = [optax.clip_by_global_norm(1.0), optax.adamw(
        schedule, b1=0.9, b2=0.98, weight_decay=decay, mask=matrices)]
    if slow:
        chain.append(optax.masked(optax.scale(slow[1]), slow[0]))
    return optax.chain(*chain)


def make_steps(graph, optimizer, seen, given=0):
    """The training step and the evaluation, compiled once for each batch shape.

    Args:
      graph: structure of the model, from `nnx.split`.
      optimizer: from `make_optimizer`.
      seen: [V] bool, from `tokens_seen`.
      given: how many tokens at the head of every row are read, never predicted.

    Returns:
      step: (params, moments, tokens) -> (params, moments, mean loss); its arguments are used up.
      evaluate: (params, tokens) -> (summed loss, number of predicted tokens).
    """
    seen = jnp.asarray(seen)

    def mean_loss(params, tokens):
        total, count = token_loss(nnx.merge(graph, params), tokens, seen, given)
        return total / count

    def step(params, moments, tokens):
        loss, gradients = jax.value_and_grad(mean_loss)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def evaluate(params, tokens):
        return token_loss(nnx.merge(graph, params), tokens, seen, given)

    return jax.jit(step, donate_argnums=(0, 1)), jax.jit(evaluate)


def validation_loss(params, batches, evaluate):
    """Token-weighted mean over all validation batches."""
    sums = np.sum([np.array(evaluate(params, batch)) for batch in batches], axis=0)
    return float(sums[0] / sums[1])


def save_state(path, tree, history):
    """All arrays and the history in one file, written beside and renamed."""
    arrays = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    with atomic_file(path) as file:
        np.savez(file, history=json.dumps(history), **arrays)


def load_state(path, tree):
    """The arrays in the structure of `tree`, and the history.

    None where no such state is stored; one that cannot be read counts as none, and is said.
    """
    if not Path(path).exists():
        return None
    wanted, kind = jax.tree.flatten(tree)
    try:
        with np.load(path) as stored:
            leaves = [stored[f"leaf{i}"] for i in range(len(wanted))]
            history = json.loads(str(stored["history"]))
        if list(map(np.shape, leaves)) != list(map(np.shape, wanted)):
            raise ValueError("another model's")
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error):
        print(f"{path} is unreadable and counts as absent", flush=True)
        return None
    return jax.tree.unflatten(kind, map(jnp.asarray, leaves)), history


def pretrain(params, moments, step, evaluate, batches, validation, steps, path, every=100,
             minutes=None):
    """Train to `steps`, from the state saved in `path` if there is one.

    Args:
      params, moments: weights and optimizer state before the first step; they are used up.
      step, evaluate: from `make_steps`.
      batches, validation: from `make_batches`, or anything with a length whose items are token
        arrays; training goes round `batches`.
      steps: number of the last step.
      path: where the state is saved, and found again; its name must tell one recipe from another.
      every: validate and save after so many steps, and after the last.
      minutes: save also when the last save is that long ago.

    Returns:
      (params, history): one dict per step with step, loss (mean per token, nats), seconds and,
      after every `every` steps and the last, val_loss.
    """
    path, history = Path(path), []
    if found := load_state(path, (params, moments)):
        (params, moments), history = found
        print(f"resuming after step {len(history)}")
    saved = time.monotonic()
    progress = Progress(steps - len(history), "step", every=10)
    while len(history) < steps:
        start, number = time.perf_counter(), len(history)
        params, moments, loss = step(params, moments, batches[number % len(batches)])
        entry = {"step": number + 1, "loss": float(loss), "seconds": time.perf_counter() - start}
        history.append(entry)
        due = (number + 1) % every == 0 or number + 1 == steps
        if due:
            entry["val_loss"] = validation_loss(params, validation, evaluate)
        if due or minutes is not None and time.monotonic() - saved > 60 * minutes:
            save_state(path, (params, moments), history)
            saved = time.monotonic()
        progress.update(note=f"loss {entry['loss']:.3f}")
    return params, history
