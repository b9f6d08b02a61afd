"""Gemma 4 in Tunix: config, mesh, weights, LoRA adapters and greedy text. Shared by 03, 04 and 08.

Importing this file imports JAX but starts no device, because notebooks call `helpers.machine`
first. Letters in shape comments: B rows, T tokens, D embedding, V vocabulary, N heads of queries,
K heads of keys and values, H numbers of a head.
"""

import contextlib
import glob
import math
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.models import safetensors_loader
from tunix.models.gemma4 import model as gemma4
from tunix.models.gemma4 import params_safetensors as tensor_names
from tunix.models.gemma4.model import (
    K_MASK, AttentionType, Gemma4, ModelConfig, RematConfig)
from tunix.utils.sharding_utils import shard

from helpers import remote
from helpers.run import UserError
from helpers.weights import Tensor, files_of, language_prefix, open_model
from tables import architecture
from tables.architecture import TARGETS
from tables.hardware import chip_of

# {field of Tunix's `ModelConfig`: the key of a config.json that holds the same}
SAME = {
    "num_embed": "vocab_size",
    "embed_dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "num_kv_heads": "num_key_value_heads",
    "num_global_kv_heads": "num_global_key_value_heads",
    "global_key_size": "global_head_dim",
    "sliding_window_size": "sliding_window",
    "final_logit_softcap": "final_logit_softcapping",
    "k_eq_v_global": "attention_k_eq_v",
    "per_layer_input_dim": "hidden_size_per_layer_input",
}
Array: TypeAlias = jax.Array
Arrays = dict[str, Any]  # by Tunix's names
Prompts = Sequence[Sequence[int]]  # token ids
Cache = dict[str, jax.Array] | None  # a layer's keys `k` and values `v`
KeysAndValues = tuple[jax.Array, jax.Array]  # [B, T, K, H] each
AttentionResult = tuple[Cache, jax.Array, KeysAndValues]  # the second one is the output [B, T, D]
Pair = dict[str, nnx.Variable]  # an adapter's matrices `a` and `b`
AnyModel = TypeVar("AnyModel", bound=nnx.Module)
KINDS = {"full": AttentionType.GLOBAL, "sliding": AttentionType.LOCAL_SLIDING}
ANY_PREFIX = r"(?:model\.language_model\.)?"  # how Tunix's patterns of tensor names begin


def config_from_hf(
    source: architecture.Config | str | Path, dtype: str = "bfloat16", **overrides: Any
) -> ModelConfig:
    """Tunix's `ModelConfig` from a Hugging Face `config.json`: 31B, 12B, E4B, E2B or tiny.

    Args:
      source: a directory with a config.json, the file itself, or its content as a dict.
      dtype: of weights and of computation. Tunix's default is float32, even for bf16 weights.
      **overrides: more fields of `ModelConfig`, for example `num_layers=2`.

    Raises:
      UserError: the file is missing, or it doesn't describe a Gemma 4, or it describes one that
        Tunix would compute in another way.
    """
    whole = architecture.read_config(source)
    text = architecture.text_config(whole)
    stack = architecture.layers(text)
    _check_order(stack)

    count = len(stack)
    owning = _count_owning(stack)
    fields = _fields_of(text, stack)
    fields["frac_shared_layers"] = (count - owning) / count
    fields["dtype"] = jnp.dtype(dtype)
    fields["param_dtype"] = jnp.dtype(dtype)
    fields.update(overrides)

    config = ModelConfig(**fields)
    if _unshared(count, config.frac_shared_layers) != owning:  # Tunix would round to another count
        config.frac_shared_layers = (count - owning - 0.25) / count
    by_vocabulary = (("tp", "fsdp"), None)
    config.shd_config = replace(config.shd_config, emb_vd=by_vocabulary)
    return config


def _count_owning(stack: Sequence[architecture.Layer]) -> int:
    """How many layers have keys and values of their own. They come first; the others share."""
    return sum(layer.owns_kv for layer in stack)


def _check_order(stack: Sequence[architecture.Layer]) -> None:
    """Refuse an order of layers that Tunix would compute in another way.

    Raises:
      UserError: says which order it has to be.
    """
    if stack[-1].kind != "full":
        raise UserError("the last of config.json's layer_types must be full_attention: "
                        "transformers makes it one anyway. Put the original file back.")
    owning = _count_owning(stack)
    source = {"full": owning - 1, "sliding": owning - 2}  # where Tunix takes shared ones from
    for layer in stack[owning:]:
        if layer.kv_from != source[layer.kind]:
            raise UserError("the layers that share keys and values must start after a "
                            "full-attention layer: Tunix knows no other arrangement.")


def _fields_of(text: architecture.Config, stack: Sequence[architecture.Layer]) -> dict[str, Any]:
    """{field of Tunix's `ModelConfig`: value} for the text part of a config.json.

    How many layers share keys and values, and the dtypes, aren't among them.
    """
    fields: dict[str, Any] = {}
    for field, key in SAME.items():
        fields[field] = text[key]
    kinds = [KINDS[layer.kind] for layer in stack]
    fields["num_layers"] = len(stack)
    fields["attention_pattern"] = tuple(kinds)

    k_is_v = bool(text["attention_k_eq_v"])
    fields["k_eq_v_global"] = k_is_v
    if not k_is_v:
        fields["num_global_kv_heads"] = None  # transformers uses it where V = K, Tunix always
    if not fields["per_layer_input_dim"]:
        fields["per_layer_input_dim"] = 0  # a config.json may say null
    first_mlp = stack[0].mlp
    last_mlp = stack[-1].mlp
    if last_mlp != first_mlp:
        fields["override_kv_shared_ffw_hidden"] = last_mlp

    rope = text["rope_parameters"]
    sliding = rope["sliding_attention"]
    full = rope["full_attention"]
    fields["local_base_frequency"] = _whole_if_it_is(sliding["rope_theta"])
    fields["global_base_frequency"] = _whole_if_it_is(full["rope_theta"])
    fields["global_rope_proportion"] = float(full["partial_rotary_factor"])
    return fields


def _whole_if_it_is(number: float) -> float:
    """10000 for 10000.0, as Tunix writes it."""
    if number == int(number):
        return int(number)
    return number


def _unshared(count: int, share: float) -> int:
    """How many of `count` layers have their own keys and values; Tunix rounds it down like this."""
    return int(count - share * count)


def _as_hf(config: ModelConfig) -> architecture.Config:
    """The text part of a config.json for a Tunix `ModelConfig`: what `config_from_hf` read."""
    pattern = config.attention_pattern or gemma4.GEMMA4_ATTENTION_PATTERN
    names = []
    for index in range(config.num_layers):
        kind = pattern[index % len(pattern)]
        if kind == AttentionType.GLOBAL:
            names.append("full_attention")
        else:
            names.append("sliding_attention")
    text = {}
    for field, key in SAME.items():
        text[key] = getattr(config, field)
    unshared = _unshared(config.num_layers, config.frac_shared_layers)
    return {
        **text,
        "model_type": "gemma4_text",
        "layer_types": names,
        "num_hidden_layers": config.num_layers,
        "num_kv_shared_layers": config.num_layers - unshared,
        "vocab_size_per_layer_input": config.num_embed,
        "use_double_wide_mlp": config.override_kv_shared_ffw_hidden is not None,
    }


def expected_modules(config: ModelConfig) -> list[str]:
    """Paths of the modules that LoRA must reach: 360 for the 31B, from the config alone."""
    modules = architecture.modules(_as_hf(config))
    return [module.path for module in modules]


def possible_meshes(config: ModelConfig, devices: int | None = None) -> list[tuple[int, int]]:
    """Each (fsdp, tp) that a model allows on so many devices, the largest `tp` first.

    Args:
      config: Tunix's `ModelConfig`.
      devices: how many, or None for all that JAX sees.
    """
    count = devices
    if not count:
        count = jax.device_count()
    text = _as_hf(config)
    shapes = []
    for tp in range(count, 0, -1):
        fsdp, rest = divmod(count, tp)
        if rest:
            continue
        if not architecture.mesh_problem(text, fsdp, tp):
            shapes.append((fsdp, tp))
    return shapes


def layer_kinds(config: ModelConfig) -> list[str]:
    """ "sliding" or "full" for each layer."""
    stack = architecture.layers(_as_hf(config))
    return [layer.kind for layer in stack]


def make_mesh(
    config: ModelConfig,
    shape: tuple[int, int] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A JAX mesh with the axes `fsdp` (rows, shards of the weights) and `tp` (heads, MLP columns).

    Tunix looks for the mesh in the context, so call its models `with mesh:`.

    Args:
      config: Tunix's `ModelConfig`.
      shape: (fsdp, tp), or None for `tables.architecture.choose_mesh`.
      devices: the JAX devices, or None for all of them.

    Raises:
      UserError: the shape doesn't fit the model or the devices; the message names the reason.
    """
    if devices is None:
        devices = jax.devices()
    count = len(devices)
    text = _as_hf(config)
    if not shape:
        shape = architecture.choose_mesh(text, count)
    fsdp, tp = shape
    needed = fsdp * tp
    if needed != count:
        raise UserError(f"a ({fsdp}, {tp}) mesh needs {needed} devices, there are {count}.")
    problem = architecture.mesh_problem(text, fsdp, tp)
    if problem:
        raise UserError(f"a ({fsdp}, {tp}) mesh is impossible here: {problem}.")

    automatic = jax.sharding.AxisType.Auto
    return jax.make_mesh(
        (fsdp, tp),
        ("fsdp", "tp"),
        axis_types=(automatic, automatic),
        devices=devices,
    )


def is_abstract(tree: Any) -> bool:
    """Does a tree hold shapes (`jax.ShapeDtypeStruct`) instead of arrays? Its first leaf tells."""
    first = jax.tree.leaves(tree)[0]
    return isinstance(first, jax.ShapeDtypeStruct)


def on_mesh(tree: Any, mesh: Mesh) -> Any:
    """Put a tree of NNX variables and arrays on a mesh.

    Each array goes where its variable's metadata says. An array without metadata goes on every
    device whole. Abstract arrays (`jax.ShapeDtypeStruct`) get the same shardings.
    """

    def put(array: Any, spec: Any) -> Any:
        axes = _canonical_axes(array.shape, spec)
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return jax.device_put(array, sharding)

    specs = nnx.get_partition_spec(tree)
    return jax.tree.map(put, tree, specs)


def _canonical_axes(shape: Sequence[int], spec: Sequence[Any] | None) -> list[Any]:
    """The axes of a spec, in the one way that we spell them; none without a spec.

    A dimension of size 1 isn't split: scales of quantized weights carry their weights' specs.
    Trailing Nones are dropped. A step returns P('fsdp') and Qwix leaves P('fsdp', None), and for
    JAX these are different arguments. With both, the second step would compile again.
    """
    axes: list[Any] = []
    if not spec:
        return axes
    for size, axis in zip(shape, spec):
        if size == 1:
            axis = None
        axes.append(axis)
    while axes and axes[-1] is None:
        axes.pop()
    return axes


def place(model: AnyModel, mesh: Mesh) -> AnyModel:
    """`on_mesh` for all variables of an NNX module or optimizer, in place; returns it."""
    state = nnx.state(model)
    nnx.update(model, on_mesh(state, mesh))
    if not isinstance(model, nnx.Module):  # an optimizer's state has no table
        return model
    for _, module in model.iter_modules():
        if isinstance(module, Embedder) and hasattr(module, "per_layer_input_embedding"):
            table = module.per_layer_input_embedding
            row_by_row = _row_by_row(table.get_value())
            table.set_value(row_by_row)
    return model


def _row_by_row(table: Any) -> Any:
    """The per-layer table of E2B and E4B [V, L layers, P] with a token's L * P numbers together.

    A TPU on its own puts the layers outermost, but a loop that looks tokens up wants the tokens
    there. So XLA copies the table before the loop and keeps both. E2B's table takes 5 GiB, and with
    two of them a step of several micro-batches, the evaluation and the answers don't fit on a v5e
    chip. A program takes an array in the layout that it has, so it's enough to set the layout once,
    here. On a CPU nothing changes.
    """
    together = Format(Layout((0, 1, 2)), table.sharding)
    if isinstance(table, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=together)
    return jax.device_put(table, together)


def gib(tree: Any) -> float:
    """GiB that one device holds of a tree of arrays, real or abstract; two 4-bit numbers a byte."""
    bits = 0
    for array in jax.tree.leaves(tree):
        piece = array.sharding.shard_shape(array.shape)
        numbers = math.prod(piece)
        bits_each = jax.dtypes.itemsize_bits(array.dtype)
        bits += numbers * bits_each
    return bits / 8 / 2**30


def load_base(source: str | Path, config: ModelConfig, mesh: Mesh) -> Gemma4:
    """The Tunix Gemma 4 with the weights of a Hugging Face directory, sharded over `mesh`.

    Args:
      source: local directory, Hugging Face id or gs:// address.
      config: from `config_from_hf`; weights are cast to its `param_dtype`.
      mesh: from `make_mesh`.

    Raises:
      UserError: there are no weights, or they aren't exactly the tensors that the model has.
    """
    folder = remote.stage(source)
    architecture.text_config(architecture.read_config(folder))  # may refuse it
    tensors = open_model(folder)
    prefix = language_prefix(folder, tensors, _as_hf(config))
    filler = _unused_weights(config, prefix, tensors)
    stack_heads = tensor_names._make_preprocess_fn(config)

    def arrange(loaded: Arrays) -> Arrays:
        """What Tunix wants of the files' tensors: heads stacked, and no variable left out."""
        stacked = jax.tree.map(np.asarray, stack_heads(loaded))
        return {**filler, **stacked}

    def names_of(config: ModelConfig) -> dict[str, Any]:
        """Tunix's map of names, for names that start with `prefix` and no others."""
        own_prefix = re.escape(prefix)
        tunix_map = tensor_names._get_key_and_transform_mapping(config)
        named = {}
        for pattern, place in tunix_map.items():
            named[pattern.replace(ANY_PREFIX, own_prefix)] = place
        return named

    dtypes = {tensor.dtype for tensor in tensors.values()}  # Tunix's fast reader knows one
    mode = "original"
    if len(dtypes) == 1:
        mode = "auto"
    # Tunix's public loader takes no tensors beside those of the files, so we call what it calls.
    with _folder_of(files_of(folder)) as exactly, _arrays_on_the_host():
        model = safetensors_loader.load_and_create_model(
            exactly,
            model_class=Gemma4,
            config=config,
            key_mapping=names_of,
            mesh=mesh,
            preprocess_fn=arrange,
            dtype=config.param_dtype,
            mode=mode,
        )
    return _with_named_parts(model)


def _unused_weights(config: ModelConfig, prefix: str, tensors: Mapping[str, Tensor]) -> Arrays:
    """{Tunix's name: array} of weights that the files lack, because no layer uses them.

    A layer that shares keys and values has such weights of its own in Tunix. Some files have them,
    too; others leave them out.
    """
    filler: Arrays = {}
    for layer in architecture.layers(_as_hf(config)):
        if layer.owns_kv:
            continue
        in_files = f"{prefix}layers.{layer.index}.self_attn"
        in_tunix = f"layers.{layer.index}.attn"
        has_keys = f"{in_files}.k_proj.weight" in tensors
        has_values = f"{in_files}.v_proj.weight" in tensors
        has_norm = f"{in_files}.k_norm.weight" in tensors
        matrix = (layer.kv_heads, layer.width, layer.head_dim)
        if layer.k_is_v:
            if not has_keys:
                filler[f"{in_tunix}.k_einsum.w"] = np.zeros(matrix, np.float32)
        elif not (has_keys and has_values):
            two_matrices = (2, *matrix)
            filler[f"{in_tunix}.kv_einsum.w"] = np.zeros(two_matrices, np.float32)
        if not has_norm:
            filler[f"{in_tunix}._key_norm.scale"] = np.ones(layer.head_dim, np.float32)
    return filler


@contextlib.contextmanager
def _folder_of(files: Sequence[Path]) -> Iterator[str]:
    """A folder that holds these files and nothing else, because Tunix takes all that it finds.

    Tunix looks for files by a pattern that begins with the folder's name. So its name is escaped:
    a TMPDIR called `a[b]` would match nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            link = Path(folder) / file.name
            link.symlink_to(file.resolve())
        yield glob.escape(folder)


@contextlib.contextmanager
def _arrays_on_the_host() -> Iterator[None]:
    """Inside the block, new arrays go into the host's memory, not onto the first chip.

    Tunix transposes and stacks the queries, keys and values of all layers before it shards them.
    For the 31B that's 10 GiB, and a chip of 16 GiB has no room for them beside its share of the
    weights. We change JAX's global setting, because Tunix's slow reader makes arrays in threads.
    """
    before = jax.config.values["jax_default_device"]
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS=tpu leaves JAX no CPU
        host = before
    jax.config.update("jax_default_device", host)
    try:
        yield
    finally:
        jax.config.update("jax_default_device", before)


# ── Names of parts, for profiles and for the time model ──


class Norm(gemma4.RMSNorm):
    """Tunix's norm, named."""

    def __call__(self, x: Array) -> Array:
        """x [..., D], normed."""
        with jax.named_scope("norm"):
            return super().__call__(x)


class Mlp(gemma4.FeedForward):
    """Tunix's MLP, named."""

    def block(self, x: Array) -> Array:
        """[B, T, D] -> [B, T, D].

        With rematerialization this method is what's computed again, so the name is set inside it.
        """
        with jax.named_scope("mlp"):
            return super().block(x)


class Attention(gemma4.Attention):
    """Tunix's attention, named."""

    def block(
        self,
        x: Array,
        segment_pos: Array,
        cache: Cache,
        attn_mask: Array,
        kv_shared_cache: Cache = None,
    ) -> AttentionResult:
        """Attention of x [B, T, D] at the positions [B, T], under a mask [B, T, keys].

        With rematerialization this method is what's computed again, so the name is set inside it.

        Args:
          x: what the layer reads.
          segment_pos: the tokens' positions.
          cache: keys and values of earlier tokens; None while training.
          attn_mask: True where a token may look.
          kv_shared_cache: keys and values of the layer whose ones this layer shares.
        """
        with jax.named_scope("attention"):
            return super().block(x, segment_pos, cache, attn_mask, kv_shared_cache)


class Embedder(gemma4.Embedder):
    """Tunix's embedding, named; `train.token_losses` names its use as the output matrix."""

    def encode(self, x: Array) -> Array:
        """Vectors [B, T, D] of token ids [B, T]."""
        with jax.named_scope("embed"):
            return super().encode(x)

    def encode_per_layer_input(self, x: Array, t: Array) -> Array:
        """The second embedding of token ids t [B, T]: E2B and E4B give each layer a slice of it."""
        with jax.named_scope("embed"):
            return super().encode_per_layer_input(x, t)


class Projection(gemma4.Einsum):
    """A matrix of the attention, named."""

    def __call__(self, x: Array) -> Array:
        """x times the matrix, by the equation that the projection was made with."""
        with jax.named_scope("projection"):
            return super().__call__(x)


NAMED = {
    gemma4.RMSNorm: Norm,
    gemma4.FeedForward: Mlp,
    gemma4.Attention: Attention,
    gemma4.Embedder: Embedder,
}


def _with_named_parts(model: Gemma4) -> Gemma4:
    """The model with our classes in place of Tunix's, changed in place.

    All that our classes add is a name (`jax.named_scope`). It becomes part of an operation's
    `op_name` and changes nothing in the program. We swap the class of objects that exist, because
    Tunix's model makes its parts itself. That's safe here: a subclass without fields of its own has
    the same variables under the same paths.
    """
    for _, module in model.iter_modules():
        tunix_class = type(module)
        module.__class__ = NAMED.get(tunix_class, tunix_class)
    for layer in model.layers:
        for name in ("q_einsum", "kv_einsum", "k_einsum", "attn_vec_einsum"):
            projection = getattr(layer.attn, name, None)
            if projection is not None:
                projection.__class__ = Projection
    return model


# ── LoRA ──


def lora_a(key: Array, shape: Sequence[int], dtype: Any) -> Array:
    """Uniform within sqrt(6 / inputs), in float32 whatever the base weight's dtype is.

    PEFT draws within 1 / sqrt(inputs), which is 2.45 times less. So a learning rate that works best
    with PEFT needn't be the best one here.
    """
    draw = jax.nn.initializers.he_uniform()
    return draw(key, shape, "float32")


def lora_b(key: Array, shape: Sequence[int], dtype: Any) -> Array:
    """Zeros, in float32: before the first step the adapters change nothing."""
    return jnp.zeros(shape, "float32")


class _OfTheInput(qwix.PtqProvider):
    """Multiplies the base's weight with the input itself, not with the copy that LoRA reads."""

    def dot_general(self, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """The base's product of nnx.Linear."""
        with jax.named_scope("base"):
            original = self.original(lhs)
            return super().dot_general(original, *args, **kwargs)

    def einsum(self, equation: str, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """The base's product of Tunix's Einsum."""
        with jax.named_scope("base"):
            original = self.original(lhs)
            return super().einsum(equation, original, *args, **kwargs)


class SharedInputs(qwix.LoraProvider, _OfTheInput):
    """LoRA that reads a copy of its input, one copy for all matrices with the same input.

    Nothing is copied when it runs. The copy only changes the order in which JAX adds up the input's
    gradient. The parts of the base products (gate and up; queries, keys and values) come first and
    next to each other, and LoRA's parts follow. On a mesh each of the base's parts is a sum over
    the chips, and XLA turns two sums into one only if nothing stands between them. That's a third
    fewer reduce-scatters in the backward pass (08, section 5).

    Both products happen under the name `lora`, and the base's under `lora/base`.
    """

    _input: Any = None  # the last one that was copied
    _copied: Any = None

    def dot_general(self, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """Of nnx.Linear: the MLP matrices."""
        with jax.named_scope("lora"):
            copied = self.copy(lhs)
            return super().dot_general(copied, *args, **kwargs)

    def einsum(self, equation: str, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """Of Tunix's Einsum: the attention matrices."""
        with jax.named_scope("lora"):
            copied = self.copy(lhs)
            return super().einsum(equation, copied, *args, **kwargs)

    def copy(self, lhs: Array) -> Array:
        """The copy of an input; the same one for the same array."""
        if lhs is not self._input:
            self._input = lhs
            self._copied = jnp.copy(lhs)
        return self._copied

    def original(self, lhs: Array) -> Array:
        """The input that `copy` copied; any other array is returned as it is."""
        if lhs is self._copied:
            return self._input
        return lhs


class Float32Lora(SharedInputs):
    """Qwix's LoRA with float32 adapters beside bfloat16 weights.

    Stock Qwix gives the adapters the dtype of the base weight, and Adam's moments get it, too. In
    bfloat16 beta2 = 0.999 rounds to 1, and small updates vanish. The layer's result keeps the dtype
    of its input.
    """

    def dot_general(self, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """Of nnx.Linear, in the dtype of its input."""
        product = super().dot_general(lhs, *args, **kwargs)
        return product.astype(lhs.dtype)

    def einsum(self, equation: str, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """Of Tunix's Einsum, in the dtype of its input."""
        product = super().einsum(equation, lhs, *args, **kwargs)
        return product.astype(lhs.dtype)


def lora_provider(rank: int, alpha: float, targets: str = TARGETS) -> Float32Lora:
    """The provider that `inject_lora` hands to Qwix: float32 adapters, no dropout."""
    return Float32Lora(
        module_path=targets,
        rank=rank,
        alpha=alpha,
        dropout=0.0,
        lora_a_initializer=lora_a,
        lora_b_initializer=lora_b,
    )


class SameKey(nnx.Rngs):
    """Random keys for abstract models. Only shapes matter there, so all keys are the same.

    That's fast to trace. Flax counts the keys it gives out, and tracing each count takes time that
    grows with the square of the layers.
    """

    def params(self) -> Array:
        """Always the same key."""
        return jax.random.key(0)


def abstract_base(config: ModelConfig, mesh: Mesh) -> Gemma4:
    """The model without memory: only the shape, dtype and sharding of every weight."""
    model = nnx.eval_shape(lambda: Gemma4(config, rngs=SameKey(0)))
    model = _with_named_parts(model)
    return place(model, mesh)


@contextlib.contextmanager
def _without_remat(config: ModelConfig) -> Iterator[None]:
    """Inside the block, the config asks for no rematerialization."""
    before = config.remat_config
    config.remat_config = RematConfig.NONE
    try:
        yield
    finally:
        config.remat_config = before


def probe(model: Gemma4, provider: qwix.QuantizationProvider, mesh: Mesh) -> Gemma4:
    """What Qwix makes of a model with a provider: an abstract model on the mesh.

    Qwix finds the matrices by running the model on two dummy tokens (with one, the model would take
    it for decoding). That happens without arithmetic, and without rematerialization, which hides
    the matrices from Qwix. A provider that the model's modules have already is taken off first,
    because otherwise the new one would be wrapped around it.
    """
    rows = mesh.shape["fsdp"]

    def adapt(model: Gemma4) -> Gemma4:
        for _, module in model.iter_modules():
            module.__class__ = getattr(module, "_unquantized_type", type(module))
            vars(module).pop("qwix_rngs", None)  # a None, to which Flax would not let Qwix assign
        tokens = jnp.ones((rows, 2), jnp.int32)
        positions = jnp.tile(jnp.arange(2), (rows, 1))
        mask = jnp.ones((rows, 2, 2), bool)
        return qwix.apply_lora_to_model(
            model,
            provider,
            tokens,
            positions=positions,
            attention_mask=mask,
            rngs=SameKey(0),
        )

    with mesh, _without_remat(model.config):
        shapes = nnx.eval_shape(adapt, model)
        tuned = place(shapes, mesh)
    tuned.config.remat_config = model.config.remat_config
    return tuned


def inject_lora(
    model: Gemma4,
    rank: int,
    alpha: float,
    mesh: Mesh,
    targets: str = TARGETS,
    seed: int = 0,
    partial: bool = False,
    provider: qwix.QuantizationProvider | None = None,
) -> Gemma4:
    """The model with LoRA adapters on every module that `targets` matches: A random, B zero.

    Args:
      model: real or abstract (`abstract_base`).
      rank: numbers between A and B.
      alpha: the adapter counts alpha / rank times.
      mesh: that the model lives on.
      targets: a pattern of module paths.
      seed: of A.
      partial: True if some modules are left out on purpose.
      provider: of a quantized base (11), made for the same rank, alpha and targets.

    Raises:
      UserError: a module of `expected_modules` got no adapter, and `partial` is False; or not one
        module got any.
    """
    if provider is None:
        provider = lora_provider(rank, alpha, targets)
    tuned = probe(model, provider, mesh)
    adapters = adapted_modules(tuned)
    expected = set(expected_modules(model.config))
    missing = sorted(expected - set(adapters))
    is_meant = partial and adapters
    if missing and not is_meant:
        text = (f"{len(missing)} modules got no adapter, for example {missing[0]}: the pattern of "
                "LoRA targets does not match them.")
        if adapters:
            text += " If that is meant, set partial=True."
        raise UserError(text)

    base = nnx.state(model)
    if is_abstract(base):
        return tuned
    nnx.update(tuned, base)
    _fill_adapters(tuned, seed)
    return tuned


def _fill_adapters(tuned: Gemma4, seed: int) -> None:
    """Give each adapter of a model its first numbers, where so far there are only shapes."""
    keys = nnx.Rngs(seed)
    for pair in adapted_modules(tuned).values():
        for letter, initializer in (("a", lora_a), ("b", lora_b)):
            variable = pair[letter]
            shape_only = variable.get_value()
            key = keys.params()
            value = initializer(key, shape_only.shape, shape_only.dtype)
            placed = jax.device_put(value, shape_only.sharding)
            variable.set_value(placed)


def adapted_modules(model: nnx.Module) -> dict[str, Pair]:
    """{module path: {"a": variable, "b": variable}} of all LoRA adapters of a model."""
    pairs: dict[str, Pair] = {}
    state = nnx.state(model, nnx.LoRAParam)
    for path, variable in nnx.to_flat_state(state):
        *parents, name = path
        module = ".".join(map(str, parents))
        pair = pairs.setdefault(module, {})
        letter = str(name)[-1]  # of w_lora_a, kernel_lora_b
        pair[letter] = variable
    return pairs


# ── Attention by blocks ──


def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Array,
    window: int | None,
    block: int,
) -> Array:
    """Softmax attention under a causal mask, `block` queries at a time. Returns [B, T, N, H].

    A block of queries meets only the keys that at least one of its queries may see: up to the
    block's end and, in a sliding layer, no further back than the window. Scores for other keys are
    never computed and never stored.

    Args:
      query: [B, T, N, H], scaled already.
      key, value: [B, T, K, H]; N is a multiple of K.
      mask: [B, T, T], True where a query may look; nothing above the diagonal.
      window: how many tokens a query sees at most, itself included; None for all.
      block: queries at a time.
    """
    B, T, N, H = query.shape
    K = key.shape[2]
    grouped = query.reshape(B, T, K, -1, H)  # G = N / K queries share a head of keys
    mixed = []
    for start in range(0, T, block):
        end = min(start + block, T)
        first = 0  # the first key that a query of this block may see
        if window is not None:
            oldest = max(0, start - window + 1)
            first = oldest // 128 * 128  # 128: TPU lanes
        allowed = mask[:, start:end, first:end]
        if window is not None:
            queries_at = jnp.arange(start, end)[:, None]
            keys_at = jnp.arange(first, end)
            distance = queries_at - keys_at
            allowed &= distance < window

        queries = grouped[:, start:end]
        keys = key[:, first:end]
        scores = jnp.einsum("BQKGH,BSKH->BKGQS", queries, keys)
        allowed_in_heads = allowed[:, None, None]  # [B, 1, 1, Q, S]
        scores = scores.astype(jnp.float32)
        scores = jnp.where(allowed_in_heads, scores, K_MASK)
        weights = jax.nn.softmax(scores, axis=-1)
        weights = weights.astype(value.dtype)
        values = value[:, first:end]
        of_block = jnp.einsum("BKGQS,BSKH->BQKGH", weights, values)
        mixed.append(of_block)
    joined = jnp.concatenate(mixed, axis=1)
    return joined.reshape(B, T, N, H)


class BlockAttention(Attention):
    """Tunix's attention layer, with the same parameters; it computes scores block by block."""

    size: int  # queries of a block, at most; `use_block_attention` sets it

    def block(
        self,
        x: Array,
        segment_pos: Array,
        cache: Cache,
        attn_mask: Array,
        kv_shared_cache: Cache = None,
    ) -> AttentionResult:
        """As `Attention.block`, and as Tunix's own."""
        tokens = x.shape[1]
        if cache is not None or tokens <= self.size:
            return super().block(x, segment_pos, cache, attn_mask, kv_shared_cache)
        with jax.named_scope("attention"):
            return self._by_blocks(x, segment_pos, attn_mask, kv_shared_cache)

    def _by_blocks(
        self,
        x: Array,
        segment_pos: Array,
        attn_mask: Array,
        kv_shared_cache: Cache,
    ) -> AttentionResult:
        """As `block`, but always in blocks, and without earlier tokens' keys and values."""
        config = self.config
        x = x.astype(config.dtype)
        query = self.q_einsum(x)
        query = shard(query, config.shd_config.act_btnh)
        query = self._query_norm(query)
        query = self._turned(query, segment_pos)
        if kv_shared_cache is None:
            key, value = self._keys_and_values(x, segment_pos)
        else:
            key = kv_shared_cache["k"]
            value = kv_shared_cache["v"]

        window = None
        size = self.size
        if self.attn_type == AttentionType.LOCAL_SLIDING:
            window = config.sliding_window_size
            size = min(size, window // 2)  # few scores beyond the window
        mixed = attend(query, key, value, attn_mask, window, size)
        output = self.attn_vec_einsum(mixed)
        output = shard(output, config.shd_config.act_btd)
        return {"k": key, "v": value}, output, (key, value)

    def _turned(self, heads: Array, positions: Array) -> Array:
        """Queries or keys [B, T, N, H] with RoPE: turned by angles that grow with the position."""
        return gemma4.apply_rope(
            heads,
            positions,
            base_frequency=self.rope_base_frequency,
            scale_factor=self.rope_scale_factor,
            rope_proportion=self.rope_proportion,
        )

    def _keys_and_values(self, x: Array, positions: Array) -> KeysAndValues:
        """Keys and values [B, T, K, H] of the layer's own projections."""
        if hasattr(self, "k_einsum"):  # V is K before norm and RoPE
            key = value = self.k_einsum(x)
        else:
            key, value = self.kv_einsum(x)
        by_heads = self.config.shd_config.act_btnh
        key = shard(key, by_heads)
        value = shard(value, by_heads)

        squares = jnp.square(value)
        mean_square = jnp.mean(squares, axis=-1, keepdims=True)
        value *= jax.lax.rsqrt(mean_square + 1e-6)
        key = self._key_norm(key)
        key = self._turned(key, positions)
        return key, value


def use_block_attention(model: Gemma4, size: int = 1_024) -> None:
    """Let every layer of a Tunix Gemma 4 compute its scores block by block, in place.

    A block has `size` queries; in sliding layers it's half a window at most. The parameters stay,
    and under a causal mask the result is the same up to rounding. Rows of at most `size` tokens
    still take Tunix's own way, and so does decoding.

    Call it before `inject_lora`. It swaps the class of each attention layer, for the same reason as
    `_with_named_parts`.
    """
    for layer in model.layers:
        layer.attn.__class__ = BlockAttention
        layer.attn.size = size


# ── Text ──


# By default a TPU's scheduler works on several layers at once, as long as the chip has room for it:
# on mesh (4, 2) of a v5e-8 it plans 15.4 of 15.75 GiB for the 31B's int8 step, and 10.5 with these;
# for answers on a v5e-4 it takes 16.9, and 13.2 with these.
LESS_AT_ONCE = {
    "xla_tpu_scheduler_percent_shared_memory_limit": 50,
    "xla_jf_rematerialization_percent_shared_memory_limit": 75,
}


def chip_of_mesh(mesh: Mesh) -> str | None:
    """Name of a mesh's chips, such as v5e; None for a CPU."""
    first_device = mesh.devices.flat[0]
    return chip_of(first_device.device_kind)


def answer_options(mesh: Mesh) -> dict[str, Any] | None:
    """The options that a TPU's compiler gets for answers on this mesh; None if it gets none."""
    if chip_of_mesh(mesh) == "v5e" and mesh.size > 1:
        return LESS_AT_ONCE
    return None


@contextlib.contextmanager
def _weights_stay(config: ModelConfig) -> Iterator[None]:
    """Inside the block, activations are cut so that no weight has to travel.

    That's for answers, which are made one token at a time. While a model trains on a mesh with
    `fsdp`, a chip keeps its rows and gathers the weights. But one token of a few rows is only some
    kilobytes, and gathering the weights for each token takes twenty times as long as reading them.
    So here a chip multiplies its own part of each weight by the numbers that belong to that part,
    and only the tokens' sums travel over the links.
    """
    before = config.shd_config
    config.shd_config = replace(before, act_btd=(None, None, "fsdp"))
    try:
        yield
    finally:
        config.shd_config = before


class _Progress(NamedTuple):
    """How far the answers are: what changes from token to token."""

    place: int | Array  # of the token to read next, in every row
    tokens: Array   # [B, T] int32, prompts and answers so far
    cache: Any      # keys and values of what the model has read
    done: Array     # [B] bool, True where an answer has ended


@dataclass(frozen=True, eq=False)
class _Answering:
    """One run of the program of `greedy`: what stays the same from token to token."""

    graph: nnx.GraphDef       # of the model
    state: Any                # its weights
    lengths: Array            # [B] int32, of the prompts
    last: Array               # [B] int32, places of the last tokens wanted
    stops: np.ndarray         # [stops] int32, ids that end an answer
    heat: np.ndarray | None   # [B, 1] float32, temperatures; None: always the likeliest token
    seed: int                 # of the draws

    def read(self, tokens: Array, places: Array, cache: Any, seen: Array) -> tuple[Array, Any]:
        """(logits [B, 1, V] after the last of these tokens, cache) of tokens [B, n] at `places`."""
        model = nnx.merge(self.graph, self.state)  # a new one: Qwix notes things on its modules
        return model(tokens, places, cache, seen, decode_only_last_token=True)

    def begin(self, progress: _Progress, count: int) -> _Progress:
        """Read the first `count` tokens of all prompts in one pass."""
        rows, total = progress.tokens.shape
        places = jnp.arange(count)
        places = jnp.tile(places, (rows, 1))
        all_true = jnp.ones((count, total), bool)
        causal = jnp.tril(all_true)
        seen = jnp.tile(causal, (rows, 1, 1))
        tokens = progress.tokens[:, :count]
        logits, cache = self.read(tokens, places, progress.cache, seen)
        progress = progress._replace(place=count - 1, cache=cache)
        return self.choose(progress, logits)

    def step(self, progress: _Progress) -> _Progress:
        """Read one more token of each row."""
        rows, total = progress.tokens.shape
        at = progress.place
        up_to_here = jnp.arange(total) <= at
        seen = jnp.tile(up_to_here, (rows, 1, 1))
        token = progress.tokens[:, at][:, None]
        places = jnp.full((rows, 1), at)
        logits, cache = self.read(token, places, progress.cache, seen)
        progress = progress._replace(cache=cache)
        return self.choose(progress, logits)

    def choose(self, progress: _Progress, logits: Array) -> _Progress:
        """The next token of each row: the prompt's, as long as it has one, else the model's."""
        new = self.drawn(progress, logits)
        tokens = progress.tokens
        place = progress.place + 1
        in_prompt = place < self.lengths
        of_prompt = tokens[:, place]
        of_model = jnp.where(progress.done, 0, new)
        new = jnp.where(in_prompt, of_prompt, of_model)

        is_stop = jnp.isin(new, self.stops)
        is_last = is_stop | (place >= self.last)
        ends_here = ~in_prompt & is_last
        done = progress.done | ends_here
        tokens = tokens.at[:, place].set(new)
        return _Progress(place, tokens, progress.cache, done)

    def drawn(self, progress: _Progress, logits: Array) -> Array:
        """[B] int32, the model's token after the last of logits [B, n, V]."""
        scores = logits[:, -1]
        scores = scores.astype(jnp.float32)
        if self.heat is not None:  # the largest of scores plus such noise: a draw from a softmax
            total = progress.tokens.shape[1]
            own_seed = self.seed * total + progress.place
            key = jax.random.key(own_seed)
            noise = jax.random.gumbel(key, scores.shape)
            scores += self.heat * noise
        likeliest = jnp.argmax(scores, axis=-1)
        return likeliest.astype(jnp.int32)


def answer_program(
    model: Gemma4,
    mesh: Mesh,
    at_once: int,
    stop_ids: Collection[int],
    heat: np.ndarray | None = None,
    seed: int = 0,
) -> Any:
    """The program of `greedy`: (weights, tokens [B, T], lengths [B], last [B]) -> tokens [B, T].

    `lengths` are those of the prompts, and `last` are the places of the last tokens wanted. 03
    calls it, and so compiles it, inside `with mesh`; 08 lowers it there.

    Args:
      model: a Tunix Gemma 4, real or abstract.
      mesh: the mesh that the model lives on.
      at_once: tokens of the prompts that are read in one pass; 0 for none.
      stop_ids: ids that end an answer.
      heat: [B, 1] float32, temperatures; None for the likeliest tokens.
      seed: of what is drawn.
    """
    graph = nnx.graphdef(model)
    config = model.config
    stops = np.array(sorted(stop_ids), np.int32)

    def program(state: Any, tokens: Array, lengths: Array, last: Array) -> Array:
        answering = _Answering(graph, state, lengths, last, stops, heat, seed)
        rows, total = tokens.shape
        merged = nnx.merge(graph, state)
        cache = merged.init_cache(rows, total, config.dtype)
        none_done = jnp.zeros(rows, bool)
        progress = _Progress(0, tokens, cache, none_done)
        if at_once > 1:
            progress = answering.begin(progress, at_once)

        def goes_on(progress: _Progress) -> Array:
            return ~jnp.all(progress.done)

        finished = jax.lax.while_loop(goes_on, answering.step, progress)
        return finished.tokens

    def placed(*arguments: Any) -> Array:
        with _weights_stay(config):
            return program(*arguments)

    everywhere = NamedSharding(mesh, PartitionSpec())  # on every host
    return jax.jit(placed, out_shardings=everywhere, compiler_options=answer_options(mesh))


def greedy(
    model: Gemma4,
    prompts: Prompts,
    max_new_tokens: int,
    stop_ids: Collection[int],
    mesh: Mesh,
    temperatures: Sequence[float] | None = None,
    seed: int = 0,
    program: Any = None,
) -> list[list[int]]:
    """Continue prompts by the most likely token until a stop id; returns lists of new ids.

    It's one compiled program with a KV cache. First it reads the beginning of all prompts in one
    pass: as many tokens as the shortest prompt has, rounded down to a multiple of 16. Then a loop
    goes on token by token, also through the rest of the longer prompts.

    Args:
      model: a Tunix Gemma 4, with or without adapters.
      prompts: lists of token ids.
      max_new_tokens: each prompt gets at most so many new tokens.
      stop_ids: ids that end a text (kept as the last id).
      mesh: the mesh that the model lives on.
      temperatures: one per prompt, to draw tokens instead; 0 is the most likely token.
      seed: decides what is drawn.
      program: from `answer_program`, to use one that's compiled already; None makes one.
    """
    tokens, lengths = _rows_of(prompts, max_new_tokens, mesh.shape["fsdp"])
    heat = None
    if temperatures:
        of_prompts = np.asarray(temperatures, np.float32)
        heat = np.resize(of_prompts, (len(tokens), 1))
    last = lengths + max_new_tokens - 1  # [B] position of the last token wanted
    if program is None:
        at_once = read_at_once(lengths)
        program = answer_program(model, mesh, at_once, stop_ids, heat, seed)
    weights = nnx.state(model)
    with mesh:
        filled = np.asarray(program(weights, tokens, lengths, last))

    answers = []
    for row, start in zip(filled[:len(prompts)], lengths):
        end = start + max_new_tokens
        answer = row[start:end].tolist()
        answers.append(_until_stop(answer, stop_ids))
    return answers


def read_at_once(lengths: np.ndarray) -> int:
    """Tokens that are read in one pass: the shortest prompt's, in sixteens (few programs)."""
    shortest = int(lengths.min())
    return shortest // 16 * 16


def answer_shape(lengths: Sequence[int], max_new_tokens: int, parts: int) -> tuple[int, int]:
    """[B, T] of prompts with their answers: rows that `parts` divides, room for the new tokens."""
    rows_of_part = math.ceil(len(lengths) / parts)
    rows = rows_of_part * parts
    longest = max(lengths) + max_new_tokens
    total = math.ceil(longest / 64) * 64  # few different shapes to compile
    return rows, total


def _rows_of(prompts: Prompts, max_new_tokens: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, T], lengths [B]) of prompts; the last prompt fills the rows left over."""
    lengths_of_prompts = [len(prompt) for prompt in prompts]
    rows, total = answer_shape(lengths_of_prompts, max_new_tokens, parts)
    tokens = np.zeros((rows, total), np.int32)
    lengths = np.zeros(rows, np.int32)
    final = len(prompts) - 1
    for row in range(rows):
        prompt = prompts[min(row, final)]
        length = len(prompt)
        lengths[row] = length
        tokens[row, :length] = prompt
    return tokens, lengths


def _until_stop(answer: list[int], stop_ids: Collection[int]) -> list[int]:
    """An answer's ids up to the first that ends a text, that one included."""
    for index, token in enumerate(answer):
        if token in stop_ids:
            return answer[:index + 1]
    return answer
