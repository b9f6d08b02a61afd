"""Pretraining a small Gemma 4 from scratch, from the tokenizer to the export. For 09 and 12.

Letters in shape comments: B rows, T tokens, V vocabulary. Id 0 is padding, 2 `<bos>`, 1 `<eos>`.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tunix.models.gemma4.model import Gemma4

from helpers.run import Progress, atomic_file, write_json
from tables import architecture

CONTROL = {  # Gemma 4's own ids
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 46: "<|tool>", 47: "<tool|>",
    48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>",
    52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>",
    106: "<turn|>"}
CONTROL_IDS = 128
STOPS = [1, 106, 50]  # <eos>, <turn|>, <|tool_response>


# ── Tokenizer ──

def train_tokenizer(texts: Iterable[str], vocabulary: int, pieces: str) -> Tokenizer:
    """Byte-level BPE behind 128 control tokens; those without a name are called <unusedN>.

    Args:
      texts: to count pairs in.
      vocabulary: tokens, control tokens included.
      pieces: a regular expression; tokens merge inside what it matches, never across.
    """
    special = []
    unused = 0
    for number in range(CONTROL_IDS):
        if number in CONTROL:
            special.append(CONTROL[number])
        else:
            special.append(f"<unused{unused}>")
            unused += 1
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pieces), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, template: Path, folder: Path) -> None:
    """Write a tokenizer, its settings and a copy of a chat template, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = list(CONTROL.values())
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
        "unk_token": "<unk>", "pad_token": "<pad>", "add_bos_token": False, "add_eos_token": False,
        "clean_up_tokenization_spaces": False, "model_max_length": 2048, "padding_side": "left",
        "extra_special_tokens": names[4:]})
    shutil.copyfile(template, folder / template.name)


# ── First weights ──

def inputs_of(name: str, shape: Sequence[int]) -> int:
    """How many numbers one output of this matrix adds up."""
    if "input_embedding" in name:
        return shape[-1]
    if "_einsum" in name and "attn_vec" not in name:
        return shape[-2]
    return int(np.prod(shape[:-1]))  # o_proj: heads x head_dim; MLP kernels: their first axis


def initialize(model: Gemma4, seed: int) -> Gemma4:
    """Fill a Tunix Gemma 4's variables, in the order of their names, from one NumPy generator."""
    generator = np.random.default_rng(seed)
    variables = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(str(part) for part in path)
        variables[name] = variable
    for name in sorted(variables):
        shape = variables[name].get_value().shape
        if "_query_norm" in name:
            value = np.full(shape, shape[0] ** -0.5)
        elif "norm" in name or "skip_scale" in name:
            value = np.full(shape, 1.0)
        else:
            spread = inputs_of(name, shape) ** -0.5
            value = generator.normal(0, spread, shape)
        variables[name].set_value(jnp.asarray(value, jnp.float32))
    return model


def named(params: nnx.State) -> dict[str, jax.Array]:
    """{Tunix's dotted name: array} of a model's weights."""
    arrays = {}
    for path, variable in nnx.to_flat_state(params):
        name = ".".join(str(part) for part in path)
        arrays[name] = variable.get_value()
    return arrays


# ── Batches ──

def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> list[list[int]]:
    """Ids of every document, `<bos>` in front and `<eos>` behind."""
    return [[2, *row.ids, 1] for row in tokenizer.encode_batch(documents)]


LENGTHS = (64, 96, 128, 192)


def make_batches(documents: Iterable[list[int]], tokens_per_step: int,
                 generator: np.random.Generator) -> list[np.ndarray]:
    """Token arrays [B, T] with B x T close to `tokens_per_step`; longer documents are left out."""
    groups: dict[int, list[list[int]]] = {length: [] for length in LENGTHS}
    for ids in documents:
        for length in LENGTHS:  # the shortest that holds it
            if len(ids) <= length:
                padding = [0] * (length - len(ids))
                groups[length].append(ids + padding)
                break
    batches = []
    for length, group in groups.items():
        size = tokens_per_step // length
        whole = len(group) // size * size
        for start in range(0, whole, size):
            batches.append(np.array(group[start:start + size], np.int32))
    return [batches[place] for place in generator.permutation(len(batches))]


def tokens_seen(batches: Iterable[np.ndarray], vocabulary: int) -> np.ndarray:
    """Which ids occur in the batches, padding left out: it is read, never predicted. [V] bool"""
    seen = np.zeros(vocabulary, bool)
    for batch in batches:
        seen[batch] = True
    seen[0] = False
    return seen


# ── Loss and step ──

def token_loss(model: Gemma4, tokens: jax.Array, seen: jax.Array,
               given: int = 0) -> tuple[jax.Array, jax.Array]:
    """Summed next-token loss over the tokens ever seen, and the number of predicted tokens.

    The first `given` tokens of a row are read, never predicted.
    """
    rows, size = tokens.shape
    lower_triangle = jnp.tril(jnp.ones((size, size), bool))
    causal = jnp.broadcast_to(lower_triangle, (rows, size, size))
    logits, _ = model(tokens, attention_mask=causal)  # [B, T, V]
    logits = jnp.where(seen, logits, -1e9)

    targets = tokens[:, 1:]
    predicted = (targets > 0) & (jnp.arange(1, size) >= given)
    weight = predicted.astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets)
    return jnp.sum(loss * weight), jnp.sum(weight)


def make_optimizer(params: nnx.State, steps: int, peak: float, warmup: int,
                   decay: float) -> optax.GradientTransformation:
    """AdamW with clipping; weight decay on matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(0, peak, warmup, steps, 0.02 * peak)
    matrices = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    adam = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def make_steps(graph: nnx.GraphDef, optimizer: optax.GradientTransformation,
               seen: np.ndarray) -> tuple[Callable, Callable]:
    """The training step and the evaluation, compiled once for each batch shape.

    Args:
      graph: structure of the model, from `nnx.split`.
      optimizer: from `make_optimizer`.
      seen: [V] bool, from `tokens_seen`.

    Returns:
      step: (params, moments, tokens) -> (params, moments, mean loss); its arguments are used up.
      evaluate: (params, tokens) -> (summed loss, number of predicted tokens).
    """
    is_seen = jnp.asarray(seen)

    def mean_loss(params, tokens):
        total, count = token_loss(nnx.merge(graph, params), tokens, is_seen)
        return total / count

    def step(params, moments, tokens):
        loss, gradients = jax.value_and_grad(mean_loss)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def evaluate(params, tokens):
        return token_loss(nnx.merge(graph, params), tokens, is_seen)

    return jax.jit(step, donate_argnums=(0, 1)), jax.jit(evaluate)


def validation_loss(params: nnx.State, batches: Iterable[np.ndarray],
                    evaluate: Callable) -> float:
    """Token-weighted mean over all validation batches."""
    sums = np.sum([np.array(evaluate(params, batch)) for batch in batches], axis=0)
    loss, count = sums
    return float(loss / count)


# ── Export ──

VECTORS = {  # of a layer, Hugging Face's name: Tunix's
    "self_attn.q_norm.weight": "attn._query_norm.scale",
    "self_attn.k_norm.weight": "attn._key_norm.scale",
    "input_layernorm.weight": "pre_attention_norm.scale",
    "post_attention_layernorm.weight": "post_attention_norm.scale",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm.scale",
    "post_feedforward_layernorm.weight": "post_ffw_norm.scale", "layer_scalar": "skip_scale"}


def to_hf(weights: Mapping[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """{Hugging Face name: array} of {Tunix name: array}: the reverse of loading.

    Matrices become [outputs, inputs], with heads folded into one axis; K and V come apart.

    Args:
      weights: all variables of a Tunix Gemma 4 by their dotted names.
      config: the model's text config, as config.json has it.
    """
    tensors = {"embed_tokens.weight": weights["embedder.input_embedding"],
               "norm.weight": weights["final_norm.scale"]}
    for module in architecture.modules(config):
        kind = module.how
        leaf = "w" if ".attn." in module.path else "kernel"
        axes = [kind.weight.index(axis) for axis in kind.outputs + kind.inputs]
        transposed = weights[f"{module.path}.{leaf}"].transpose(axes)
        matrices = transposed.reshape(len(kind.names), -1, np.prod(module.inputs))
        for name, matrix in zip(module.names, matrices, strict=True):
            tensors[f"{name}.weight"] = matrix
    for layer in range(config["num_hidden_layers"]):
        for name, tunix_name in VECTORS.items():
            tensors[f"layers.{layer}.{name}"] = weights[f"layers.{layer}.{tunix_name}"]
    return {f"model.language_model.{name}": array for name, array in tensors.items()}


def export(params: nnx.State, config: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """Write weights and config in Hugging Face's form, rounded to bfloat16.

    Args:
      params: the weights.
      config: as config.json has it.
      folder: what's there already is replaced.

    Returns:
      {Tunix name: array}, rounded.
    """
    rounded = {}
    for name, array in named(params).items():
        rounded[name] = np.asarray(array).astype(ml_dtypes.bfloat16)
    tensors = {}
    for name, array in to_hf(rounded, config).items():
        tensors[name] = np.ascontiguousarray(array)
    with atomic_file(folder / "model.safetensors") as file:  # beside it, then renamed
        file.write(save(tensors, metadata={"format": "pt"}))
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": 2, "pad_token_id": 0, "eos_token_id": STOPS, "do_sample": True,
        "temperature": 1.0, "top_k": 64, "top_p": 0.95})
    return rounded


# ── The loop ──

class Unfinished(NamedTuple):
    """Where a run keeps what it has, so that after an interruption the next run goes on from it.

    Attributes:
      path: an .npz; it's gone when the run has ended.
      recipe: what makes this run this run. A file of another recipe is left out, then replaced.
    """

    path: Path
    recipe: str


def keep(unfinished: Unfinished, state: Any, history: list[dict[str, Any]]) -> None:
    """Store weights, optimizer and history: whole, or not at all."""
    arrays = {"about": np.array([unfinished.recipe, json.dumps(history)])}
    for place, leaf in enumerate(jax.tree.leaves(state)):
        arrays[f"leaf{place}"] = np.asarray(leaf)
    with atomic_file(unfinished.path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def resume(unfinished: Unfinished, state: Any) -> tuple[Any, list[dict[str, Any]]]:
    """What `keep` stored, as (state, history); the first state and no history if there's nothing.

    Args:
      unfinished: where to look.
      state: the first one, which says what the leaves belong to.
    """
    if not unfinished.path.exists():
        return state, []
    with np.load(unfinished.path) as stored:
        recipe, told = (str(text) for text in stored["about"])
        if recipe != unfinished.recipe:
            print(f"{unfinished.path} is of another recipe, so this run starts anew", flush=True)
            return state, []
        leaves, structure = jax.tree.flatten(state)
        stored_leaves = [jnp.asarray(stored[f"leaf{place}"]) for place in range(len(leaves))]
    history = json.loads(told)
    print(f"going on after step {len(history)}, from {unfinished.path}", flush=True)
    return jax.tree.unflatten(structure, stored_leaves), history


def pretrain(params: nnx.State, moments: Any, step: Callable, evaluate: Callable,
             batches: Sequence[np.ndarray], validation: Sequence[np.ndarray], steps: int,
             every: int = 100, watch: Callable[[int, nnx.State], object] | None = None,
             unfinished: Unfinished | None = None
             ) -> tuple[nnx.State, list[dict[str, Any]]]:
    """Train for some steps, round and round the batches.

    Args:
      params, moments: weights, and the optimizer's first state; both stay as they are.
      step, evaluate: of `make_steps`.
      batches, validation: of `make_batches`.
      steps: how many, in all.
      every: steps after which the validation loss is computed; so it is after the last.
        With `unfinished`, everything is stored then, too.
      watch: called with (steps done, weights), before each step and after the last.
      unfinished: where to go on after an interruption, if there is something.

    Returns:
      (params, history): one dict per step with step, loss (mean per token, nats), seconds and,
      where it was computed, val_loss.
    """
    params, moments = jax.tree.map(jnp.copy, (params, moments))  # a step uses up what it gets
    history: list[dict[str, Any]] = []
    if unfinished:
        (params, moments), history = resume(unfinished, (params, moments))
    progress = Progress(steps, "step", every=10)
    progress.count = len(history)
    for number in range(len(history), steps):
        if watch:
            watch(number, params)
        batch = batches[number % len(batches)]
        start = time.perf_counter()
        params, moments, loss = step(params, moments, batch)
        entry = {"step": number + 1, "loss": float(loss), "seconds": time.perf_counter() - start}
        history.append(entry)

        is_last = number + 1 == steps
        if is_last or (number + 1) % every == 0:
            entry["val_loss"] = validation_loss(params, validation, evaluate)
            if unfinished and not is_last:
                keep(unfinished, (params, moments), history)
        real_tokens = np.count_nonzero(batch)
        speed = real_tokens / entry["seconds"]
        progress.update(note=f"loss {entry['loss']:.3f} | {speed:,.0f} tokens/s")
    if watch:
        watch(steps, params)
    if unfinished:
        unfinished.path.unlink(missing_ok=True)
    return params, history
