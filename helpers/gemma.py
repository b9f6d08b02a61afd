"""Gemma 4 in Tunix: config, mesh, weights, LoRA adapters and greedy text. Shared by 03, 04 and 08.

Importing this file imports JAX but starts no device: notebooks call `helpers.machine` first.
Letters in shape comments: B rows, T tokens, D embedding, V vocabulary.
"""

import contextlib
import math
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

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

# Fields of Tunix's `ModelConfig` and the keys of a config.json that hold the same.
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
Cache = dict[str, jax.Array] | None  # keys `k` and values `v`
AnyModel = TypeVar("AnyModel", bound=nnx.Module)
KINDS = {"full": AttentionType.GLOBAL, "sliding": AttentionType.LOCAL_SLIDING}
ANY_PREFIX = r"(?:model\.language_model\.)?"  # how Tunix's patterns of tensor names begin


def config_from_hf(source: architecture.Config | str | Path, dtype: str = "bfloat16",
                   **overrides: Any) -> ModelConfig:
    """Tunix's `ModelConfig` from a Hugging Face `config.json`: 31B, 12B, E4B, E2B or tiny.

    Args:
      source: a directory with a config.json, the file itself, or its content as a dict.
      dtype: of weights and of computation. Tunix's default is float32, also for bf16 weights.
      **overrides: further `ModelConfig` fields, for example `num_layers=2`.

    Raises:
      UserError: the file is missing, it describes no Gemma 4, or one that Tunix computes otherwise.
    """
    text = architecture.text_config(architecture.read_config(source))
    stack = architecture.layers(text)
    count = len(stack)
    if stack[-1].kind != "full":
        raise UserError("the last of config.json's layer_types must be full_attention: "
                        "transformers makes it one anyway. Put the original file back.")
    first_sharing = sum(layer.owns_kv for layer in stack)
    origin = {"full": first_sharing - 1, "sliding": first_sharing - 2}  # in Tunix
    for layer in stack[first_sharing:]:
        if layer.kv_from != origin[layer.kind]:
            raise UserError("the layers that share keys and values must start after a "
                            "full-attention layer: Tunix knows no other arrangement.")
    fields = {field: text[key] for field, key in SAME.items()}
    fields["num_layers"] = count
    fields["attention_pattern"] = tuple(KINDS[layer.kind] for layer in stack)
    fields["frac_shared_layers"] = (count - first_sharing) / count
    fields["k_eq_v_global"] = bool(text["attention_k_eq_v"])
    if not text["attention_k_eq_v"]:
        fields["num_global_kv_heads"] = None  # transformers uses it where V = K, Tunix always
    fields["per_layer_input_dim"] = text["hidden_size_per_layer_input"] or 0
    if stack[-1].mlp != stack[0].mlp:
        fields["override_kv_shared_ffw_hidden"] = stack[-1].mlp
    sliding = text["rope_parameters"]["sliding_attention"]
    full = text["rope_parameters"]["full_attention"]
    fields["local_base_frequency"] = _whole_if_it_is(sliding["rope_theta"])
    fields["global_base_frequency"] = _whole_if_it_is(full["rope_theta"])
    fields["global_rope_proportion"] = float(full["partial_rotary_factor"])
    fields["dtype"] = fields["param_dtype"] = jnp.dtype(dtype)
    config = ModelConfig(**{**fields, **overrides})
    if _unshared(count, config.frac_shared_layers) != first_sharing:
        config.frac_shared_layers = (count - first_sharing - 0.25) / count
    config.shd_config = replace(config.shd_config, emb_vd=(("tp", "fsdp"), None))  # by vocabulary
    return config


def _whole_if_it_is(number: float) -> float:
    """10000 for 10000.0, as Tunix writes it."""
    return int(number) if number == int(number) else number


def _unshared(count: int, share: float) -> int:
    """How many layers have their own keys and values: Tunix cuts a rounded product."""
    return int(count - share * count)


def _as_hf(config: ModelConfig) -> architecture.Config:
    """The text part of a config.json for a Tunix `ModelConfig`: what `config_from_hf` read."""
    pattern = config.attention_pattern or gemma4.GEMMA4_ATTENTION_PATTERN
    names = []
    for index in range(config.num_layers):
        is_full = pattern[index % len(pattern)] == AttentionType.GLOBAL
        names.append("full_attention" if is_full else "sliding_attention")
    text = {key: getattr(config, field) for field, key in SAME.items()}
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
    return [module.path for module in architecture.modules(_as_hf(config))]


def make_mesh(config: ModelConfig, shape: tuple[int, int] | None = None,
              devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A JAX mesh with the axes `fsdp` (rows, shards of the weights) and `tp` (heads, MLP columns).

    Tunix looks for it in the context: call its models `with mesh:`.

    Args:
      config: Tunix's `ModelConfig`.
      shape: (fsdp, tp), or None for `tables.architecture.choose_mesh`.
      devices: the JAX devices, or None for all of them.

    Raises:
      UserError: the shape does not fit the model or the devices; the message names the reason.
    """
    devices = jax.devices() if devices is None else devices
    text = _as_hf(config)
    fsdp, tp = shape or architecture.choose_mesh(text, len(devices))
    if fsdp * tp != len(devices):
        raise UserError(f"a ({fsdp}, {tp}) mesh needs {fsdp * tp} devices, there are "
                        f"{len(devices)}.")
    problem = architecture.mesh_problem(text, fsdp, tp)
    if problem:
        raise UserError(f"a ({fsdp}, {tp}) mesh is impossible here: {problem}.")
    axis_types = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Auto)
    return jax.make_mesh((fsdp, tp), ("fsdp", "tp"), axis_types=axis_types, devices=devices)


def on_mesh(tree: Any, mesh: Mesh) -> Any:
    """A tree of NNX variables and arrays, each on the sharding that its variable's metadata names.

    Trailing Nones are dropped: a step returns P('fsdp'), Qwix leaves P('fsdp', None), and for JAX
    the two are different arguments, so that without this the second step would compile again.
    Arrays without metadata are put on every device whole, and so are dimensions of size 1: scales
    of quantised weights carry their weights' specs. Abstract arrays (`jax.ShapeDtypeStruct`) get
    the same shardings.
    """

    def put(array: Any, spec: Any) -> Any:
        axes = [None if size == 1 else axis for size, axis in zip(array.shape, spec or ())]
        while axes and axes[-1] is None:
            axes.pop()
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return jax.device_put(array, sharding)

    return jax.tree.map(put, tree, nnx.get_partition_spec(tree))


def place(model: AnyModel, mesh: Mesh) -> AnyModel:
    """`on_mesh` for all variables of an NNX module or optimizer, in place; returns it."""
    nnx.update(model, on_mesh(nnx.state(model), mesh))
    if not isinstance(model, nnx.Module):  # an optimizer's state has no table
        return model
    for _, module in model.iter_modules():
        if isinstance(module, Embedder) and hasattr(module, "per_layer_input_embedding"):
            table = module.per_layer_input_embedding
            table.set_value(_row_by_row(table.get_value()))
    return model


def _row_by_row(table: Any) -> Any:
    """The per-layer table of E2B and E4B [V, L layers, P] with a token's L * P numbers together.

    A TPU's own choice puts the layers outermost, and every loop that looks tokens up wants the
    tokens there. XLA then copies the table, 5 GiB of E2B's, before the loop and keeps both: on a
    v5e chip the step of several micro-batches, the evaluation and the answers don't fit. A program
    takes an array in the layout that it has, so it's enough to say it once, here. A CPU has it so
    anyway.
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
        bits += math.prod(piece) * jax.dtypes.itemsize_bits(array.dtype)
    return bits / 8 / 2**30


def load_base(source: str | Path, config: ModelConfig, mesh: Mesh) -> Gemma4:
    """The Tunix Gemma 4 with the weights of a Hugging Face directory, sharded over `mesh`.

    Args:
      source: local directory, Hugging Face id or gs:// address.
      config: from `config_from_hf`; weights are cast to its `param_dtype`.
      mesh: from `make_mesh`.

    Raises:
      UserError: there are no weights, or they are not exactly the tensors that the model has.
    """
    folder = remote.stage(source)
    architecture.text_config(architecture.read_config(folder))  # may refuse it
    tensors = open_model(folder)
    prefix = language_prefix(folder, tensors, _as_hf(config))
    filler = _unused_weights(config, prefix, tensors)
    stack_heads = tensor_names._make_preprocess_fn(config)

    def arrange(loaded: Arrays) -> Arrays:
        stacked = jax.tree.map(np.asarray, stack_heads(loaded))
        return {**filler, **stacked}

    def names_of(config: ModelConfig) -> dict[str, Any]:
        """Tunix's map of names, for names that start with `prefix` and no others."""
        own = re.escape(prefix)
        places = tensor_names._get_key_and_transform_mapping(config)
        return {name.replace(ANY_PREFIX, own): place for name, place in places.items()}

    dtypes = {tensor.dtype for tensor in tensors.values()}  # Tunix's fast reader knows one
    mode = "auto" if len(dtypes) == 1 else "original"
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
    """Weights of keys and values that no layer uses: Tunix has them, not every file does."""
    filler: Arrays = {}
    for layer in architecture.layers(_as_hf(config)):
        if layer.owns_kv:
            continue
        path = f"layers.{layer.index}"
        theirs = f"{prefix}{path}.self_attn"
        one_matrix = (layer.kv_heads, layer.width, layer.head_dim)
        has_keys = f"{theirs}.k_proj.weight" in tensors
        has_values = f"{theirs}.v_proj.weight" in tensors
        if layer.k_is_v and not has_keys:
            filler[f"{path}.attn.k_einsum.w"] = np.zeros(one_matrix, np.float32)
        if not layer.k_is_v and not (has_keys and has_values):
            filler[f"{path}.attn.kv_einsum.w"] = np.zeros((2, *one_matrix), np.float32)
        if f"{theirs}.k_norm.weight" not in tensors:
            filler[f"{path}.attn._key_norm.scale"] = np.ones(layer.head_dim, np.float32)
    return filler


@contextlib.contextmanager
def _folder_of(files: Sequence[Path]) -> Iterator[str]:
    """A folder that holds these files and nothing else, because Tunix takes all that it finds."""
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            (Path(folder) / file.name).symlink_to(file.resolve())
        yield folder


@contextlib.contextmanager
def _arrays_on_the_host() -> Iterator[None]:
    """New arrays go into the host's memory, not onto the first chip.

    Tunix transposes and stacks the queries, keys and values of all layers before it shards them: 10
    GiB in the 31B, for which a chip of 16 GiB has no room beside its share of the weights. The
    setting is JAX's global one, because Tunix's slow reader makes its arrays in threads.
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
        with jax.named_scope("norm"):
            return super().__call__(x)


class Mlp(gemma4.FeedForward):
    """Tunix's MLP, named."""

    def block(self, x: Array) -> Array:
        """What is computed again where rematerialisation is on, so the name stands in here."""
        with jax.named_scope("mlp"):
            return super().block(x)


class Attention(gemma4.Attention):
    """Tunix's attention, named."""

    def block(self, x: Array, segment_pos: Array, cache: Cache, attn_mask: Array,
              kv_shared_cache: Cache = None) -> tuple[Cache, Array, tuple[Array, Array]]:
        """What is computed again where rematerialisation is on, so the name stands in here."""
        with jax.named_scope("attention"):
            return super().block(x, segment_pos, cache, attn_mask, kv_shared_cache)


class Embedder(gemma4.Embedder):
    """Tunix's embedding, named; `train.token_losses` names its use as the output matrix."""

    def encode(self, x: Array) -> Array:
        """Vectors [B, T, D] of token ids [B, T]."""
        with jax.named_scope("embed"):
            return super().encode(x)

    def encode_per_layer_input(self, x: Array, t: Array) -> Array:
        """The second embedding, which E2B and E4B give each layer a slice of."""
        with jax.named_scope("embed"):
            return super().encode_per_layer_input(x, t)


class Projection(gemma4.Einsum):
    """A matrix of the attention, named."""

    def __call__(self, x: Array) -> Array:
        with jax.named_scope("projection"):
            return super().__call__(x)


NAMED = {gemma4.RMSNorm: Norm, gemma4.FeedForward: Mlp, gemma4.Attention: Attention,
         gemma4.Embedder: Embedder}


def _with_named_parts(model: Gemma4) -> Gemma4:
    """The model, its parts of Tunix's classes turned into ours, in place.

    A name (`jax.named_scope`) is all that ours add: it becomes part of an operation's `op_name` and
    changes nothing in the program. There is no other way in, because Tunix's model makes its parts
    itself. Swapping the class of an object that exists is safe here: a subclass without fields of
    its own has the same variables under the same paths.
    """
    for _, module in model.iter_modules():
        module.__class__ = NAMED.get(type(module), type(module))
    for layer in model.layers:
        for name in ("q_einsum", "kv_einsum", "k_einsum", "attn_vec_einsum"):
            if hasattr(layer.attn, name):
                getattr(layer.attn, name).__class__ = Projection
    return model


# ── LoRA ──


def lora_a(key: Array, shape: Sequence[int], dtype: Any) -> Array:
    """Uniform within sqrt(6 / inputs), in float32 whatever the base weight's dtype is.

    PEFT draws within 1 / sqrt(inputs), 2.45 times less: a learning rate of PEFT's differs here.
    """
    return jax.nn.initializers.he_uniform()(key, shape, "float32")


def lora_b(key: Array, shape: Sequence[int], dtype: Any) -> Array:
    """Zeros, in float32: before the first step the adapters change nothing."""
    return jnp.zeros(shape, "float32")


class _OfTheInput(qwix.PtqProvider):
    """The base product, of the input itself and not of the copy that LoRA reads."""

    def dot_general(self, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        with jax.named_scope("base"):
            return super().dot_general(self.original(lhs), *args, **kwargs)

    def einsum(self, equation: str, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        with jax.named_scope("base"):
            return super().einsum(equation, self.original(lhs), *args, **kwargs)


class SharedInputs(qwix.LoraProvider, _OfTheInput):
    """LoRA that reads a copy of its input, one copy for all matrices with the same input.

    Nothing is copied when it runs. What changes is the order in which JAX adds up the input's
    gradient: those of the base products (gate and up; queries, keys and values) come first, next to
    each other, and LoRA's follow. On a mesh each of the former is a sum over the chips, and XLA
    makes one sum of two only if nothing stands between them: a third fewer reduce-scatters in the
    backward pass (08, section 5).

    Both products happen under the name `lora`, the base's under `lora/base`.
    """

    _pair: tuple[Any, Any] = (None, None)  # the input and its copy

    def dot_general(self, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """Of nnx.Linear: the MLP matrices."""
        with jax.named_scope("lora"):
            return super().dot_general(self.copy(lhs), *args, **kwargs)

    def einsum(self, equation: str, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """Of Tunix's Einsum: the attention matrices."""
        with jax.named_scope("lora"):
            return super().einsum(equation, self.copy(lhs), *args, **kwargs)

    def copy(self, lhs: Array) -> Array:
        """The copy of an input; the same one for the same array."""
        if self._pair[0] is not lhs:
            self._pair = lhs, jnp.copy(lhs)
        return self._pair[1]

    def original(self, lhs: Array) -> Array:
        """What `copy` copied."""
        return self._pair[0] if lhs is self._pair[1] else lhs


class Float32Lora(SharedInputs):
    """Qwix's LoRA with float32 adapters beside bfloat16 weights.

    Stock Qwix gives the adapters, and thereby Adam's moments, the dtype of the base weight. In
    bfloat16 beta2 = 0.999 rounds to 1 and small updates vanish. What a layer returns keeps its
    dtype.
    """

    def dot_general(self, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """Of nnx.Linear, in the dtype of its input."""
        return super().dot_general(lhs, *args, **kwargs).astype(lhs.dtype)

    def einsum(self, equation: str, lhs: Array, *args: Any, **kwargs: Any) -> Array:
        """Of Tunix's Einsum, in the dtype of its input."""
        return super().einsum(equation, lhs, *args, **kwargs).astype(lhs.dtype)


def lora_provider(rank: int, alpha: float, targets: str = TARGETS) -> Float32Lora:
    """The provider that `inject_lora` hands to Qwix: float32 adapters, no dropout."""
    return Float32Lora(module_path=targets, rank=rank, alpha=alpha, dropout=0.0,
                       lora_a_initializer=lora_a, lora_b_initializer=lora_b)


class SameKey(nnx.Rngs):
    """Random keys for abstract models, where only shapes matter: all the same, and fast to trace.

    Flax counts the keys it gives out, and tracing each count takes time quadratic in the layers.
    """

    def params(self) -> Array:
        """Always the same key."""
        return jax.random.key(0)


def abstract_base(config: ModelConfig, mesh: Mesh) -> Gemma4:
    """The model without memory: shapes, dtypes and shardings of every weight."""
    model = nnx.eval_shape(lambda: Gemma4(config, rngs=SameKey(0)))
    return place(_with_named_parts(model), mesh)


@contextlib.contextmanager
def _without_remat(config: ModelConfig) -> Iterator[None]:
    """The config asks for no rematerialisation inside the block."""
    before = config.remat_config
    config.remat_config = RematConfig.NONE
    try:
        yield
    finally:
        config.remat_config = before


def probe(model: Gemma4, provider: qwix.QuantizationProvider, mesh: Mesh) -> Gemma4:
    """What Qwix makes of a model with a provider: abstract, on the mesh.

    Qwix finds the matrices by running the model on a dummy of two tokens (one would mean decoding).
    That happens without arithmetic, and without rematerialisation, which it cannot see through.
    Providers that modules of the model have already are taken off first, so that none is nested.
    """
    rows = mesh.shape["fsdp"]

    def adapt(model: Gemma4) -> Gemma4:
        for _, module in model.iter_modules():
            module.__class__ = getattr(module, "_unquantized_type", type(module))
            vars(module).pop("qwix_rngs", None)  # a None, to which Flax would not let Qwix assign
        tokens = jnp.ones((rows, 2), jnp.int32)
        positions = jnp.tile(jnp.arange(2), (rows, 1))
        mask = jnp.ones((rows, 2, 2), bool)
        return qwix.apply_lora_to_model(model, provider, tokens, positions=positions,
                                        attention_mask=mask, rngs=SameKey(0))

    with mesh, _without_remat(model.config):
        tuned = place(nnx.eval_shape(adapt, model), mesh)
    tuned.config.remat_config = model.config.remat_config
    return tuned


def inject_lora(model: Gemma4, rank: int, alpha: float, mesh: Mesh, targets: str = TARGETS,
                seed: int = 0, partial: bool = False,
                provider: qwix.QuantizationProvider | None = None) -> Gemma4:
    """The model with LoRA adapters on every module that `targets` matches: A random, B zero.

    Works on an abstract model, too (`probe`). A quantised base (11) brings its own `provider`, made
    for the same rank, alpha and targets.

    Raises:
      UserError: a module of `expected_modules` got no adapter and `partial`, some modules are left
        out on purpose, is False; or not one module got any.
    """
    tuned = probe(model, provider or lora_provider(rank, alpha, targets), mesh)
    adapters = adapted_modules(tuned)
    missing = sorted(set(expected_modules(model.config)) - set(adapters))
    if missing and not (partial and adapters):
        text = (f"{len(missing)} modules got no adapter, for example {missing[0]}: the pattern of "
                "LoRA targets does not match them.")
        if adapters:
            text += " If that is meant, set partial=True."
        raise UserError(text)
    base = nnx.state(model)
    is_abstract = isinstance(jax.tree.leaves(base)[0], jax.ShapeDtypeStruct)
    if is_abstract:
        return tuned
    nnx.update(tuned, base)
    keys = nnx.Rngs(seed)
    for pair in adapted_modules(tuned).values():
        for side, initializer in (("a", lora_a), ("b", lora_b)):
            hull = pair[side].get_value()
            value = initializer(keys.params(), hull.shape, hull.dtype)
            pair[side].set_value(jax.device_put(value, hull.sharding))
    return tuned


def adapted_modules(model: nnx.Module) -> dict[str, dict[str, nnx.Variable]]:
    """{module path: {"a": variable, "b": variable}} of all LoRA adapters of a model."""
    pairs: dict[str, dict[str, nnx.Variable]] = {}
    state = nnx.state(model, nnx.LoRAParam)
    for path, variable in nnx.to_flat_state(state):
        module = ".".join(map(str, path[:-1]))
        letter = str(path[-1])[-1]
        pairs.setdefault(module, {})[letter] = variable
    return pairs


# ── Attention by blocks ──


def attend(query: Array, key: Array, value: Array, mask: Array,
           window: int | None, block: int) -> Array:
    """Softmax attention under a causal mask, `block` queries at a time; unseen keys are skipped.

    A block of queries meets only the keys that one of them may see: up to the block's end and, in a
    sliding layer, no further back than the window. The rest is never computed and never stored.

    Args:
      query: [B, T, N, H], scaled already.
      key, value: [B, T, K, H]; N is a multiple of K.
      mask: [B, T, T], True where a query may look; nothing above the diagonal.
      window: how many tokens a query sees at most, itself included; None for all.
      block: queries at a time.
    """
    B, T, N, H = query.shape
    grouped = query.reshape(B, T, key.shape[2], -1, H)
    mixed = []
    for start in range(0, T, block):
        end = min(start + block, T)
        first = 0
        if window is not None:
            first = max(0, start - window + 1) // 128 * 128  # 128: TPU lanes
        allowed = mask[:, start:end, first:end]
        if window is not None:
            distance = jnp.arange(start, end)[:, None] - jnp.arange(first, end)
            allowed &= distance < window
        scores = jnp.einsum("BQKGH,BSKH->BKGQS", grouped[:, start:end], key[:, first:end])
        scores = jnp.where(allowed[:, None, None], scores.astype(jnp.float32), K_MASK)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        mixed.append(jnp.einsum("BKGQS,BSKH->BQKGH", weights, value[:, first:end]))
    return jnp.concatenate(mixed, axis=1).reshape(B, T, N, H)


class BlockAttention(Attention):
    """Tunix's attention layer with the same parameters, scores by blocks of `size` queries."""

    def block(self, x: Array, segment_pos: Array, cache: Cache, attn_mask: Array,
              kv_shared_cache: Cache = None) -> tuple[Cache, Array, tuple[Array, Array]]:
        """Tunix's `Attention.block`, whose arguments and results these are."""
        if cache is not None or x.shape[1] <= self.size:
            return super().block(x, segment_pos, cache, attn_mask, kv_shared_cache)
        with jax.named_scope("attention"):
            return self._by_blocks(x, segment_pos, attn_mask, kv_shared_cache)

    def _by_blocks(self, x: Array, segment_pos: Array, attn_mask: Array,
                   kv_shared_cache: Cache) -> tuple[Cache, Array, tuple[Array, Array]]:
        """As `block`, without a cache of its own."""
        config = self.config
        x = x.astype(config.dtype)
        query = shard(self.q_einsum(x), config.shd_config.act_btnh)
        query = self._turned(self._query_norm(query), segment_pos)
        if kv_shared_cache is not None:
            key, value = kv_shared_cache["k"], kv_shared_cache["v"]
        else:
            key, value = self._keys_and_values(x, segment_pos)
        window, size = None, self.size
        if self.attn_type == AttentionType.LOCAL_SLIDING:
            window = config.sliding_window_size
            size = min(size, window // 2)  # few scores beyond the window
        mixed = attend(query, key, value, attn_mask, window, size)
        output = shard(self.attn_vec_einsum(mixed), config.shd_config.act_btd)
        return {"k": key, "v": value}, output, (key, value)

    def _turned(self, heads: Array, positions: Array) -> Array:
        """Queries or keys [B, T, N, H] with RoPE: turned by angles that grow with the position."""
        return gemma4.apply_rope(
            heads, positions, base_frequency=self.rope_base_frequency,
            scale_factor=self.rope_scale_factor, rope_proportion=self.rope_proportion)

    def _keys_and_values(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """Keys and values [B, T, K, H] of the layer's own projections."""
        heads = self.config.shd_config.act_btnh
        if hasattr(self, "k_einsum"):  # K is V, too
            key = value = self.k_einsum(x)
        else:
            key, value = self.kv_einsum(x)
        key, value = shard(key, heads), shard(value, heads)
        mean_square = jnp.mean(jnp.square(value), axis=-1, keepdims=True)
        value *= jax.lax.rsqrt(mean_square + 1e-6)
        return self._turned(self._key_norm(key), positions), value


def use_block_attention(model: Gemma4, size: int = 1_024) -> None:
    """Let every layer of a Tunix Gemma 4 compute its scores `size` queries at a time, in place.

    In sliding layers it is half a window at most. Same parameters, same result up to rounding for a
    causal mask. Rows of at most `size` tokens and decoding take Tunix's own way. Call it before
    `inject_lora`. It swaps the class of each attention layer, as `_with_named_parts` does, for the
    same reason.
    """
    for layer in model.layers:
        layer.attn.__class__ = BlockAttention
        layer.attn.size = size


# ── Text ──


@contextlib.contextmanager
def _weights_stay(config: ModelConfig) -> Iterator[None]:
    """Activations are cut so that no weight has to travel: for answers, a token at a time.

    While a model trains on a mesh with `fsdp`, a chip keeps its rows and gathers the weights. One
    token of a few rows is some kilobytes, and gathering the weights for each token takes twenty
    times as long as reading them. So here a chip multiplies its own part of each weight by the
    numbers that meet it, and what is added up over the links are the tokens' sums.
    """
    before = config.shd_config
    config.shd_config = replace(before, act_btd=(None, None, "fsdp"))
    try:
        yield
    finally:
        config.shd_config = before


def answer_program(model: Gemma4, mesh: Mesh, at_once: int, stop_ids: Collection[int],
                   heat: np.ndarray | None = None, seed: int = 0) -> Any:
    """The program of `greedy`: (weights, tokens [B, T], lengths [B], last [B]) -> tokens [B, T].

    It is compiled, or lowered by 08, inside `with mesh`. `at_once` tokens are read in one pass (0:
    none), `last` are the places of the last tokens wanted, `heat` [B, 1] are temperatures.
    """
    graph, config = nnx.graphdef(model), model.config
    stops = np.array(sorted(stop_ids), np.int32)

    def program(state: Any, tokens: Array, lengths: Array, last: Array) -> Array:
        rows, total = tokens.shape

        def read(tokens: Array, places: Array, cache: Any, seen: Array) -> tuple[Array, Any]:
            model = nnx.merge(graph, state)  # here, not outside: Qwix notes things on its modules
            return model(tokens, places, cache, seen, decode_only_last_token=True)

        def choose(at: Any, tokens: Array, read: tuple[Array, Any], done: Array) -> tuple:
            logits, cache = read
            scores = logits[:, -1].astype(jnp.float32)
            if heat is not None:  # the largest of scores plus such noise: a draw from a softmax
                noise = jax.random.gumbel(jax.random.key(seed * total + at), scores.shape)
                scores += heat * noise
            new = jnp.argmax(scores, axis=-1).astype(jnp.int32)
            place = at + 1
            reading = place < lengths
            new = jnp.where(reading, tokens[:, place], jnp.where(done, 0, new))
            is_last = jnp.isin(new, stops) | (place >= last)
            done |= ~reading & is_last
            return place, tokens.at[:, place].set(new), cache, done

        def step(carry: tuple) -> tuple:
            at, tokens, cache, done = carry
            seen = jnp.tile(jnp.arange(total) <= at, (rows, 1, 1))
            token = tokens[:, at][:, None]
            found = read(token, jnp.full((rows, 1), at), cache, seen)
            return choose(at, tokens, found, done)

        cache = nnx.merge(graph, state).init_cache(rows, total, config.dtype)
        carry = (0, tokens, cache, jnp.zeros(rows, bool))
        if at_once > 1:
            places = jnp.tile(jnp.arange(at_once), (rows, 1))
            seen = jnp.tile(jnp.tril(jnp.ones((at_once, total), bool)), (rows, 1, 1))
            found = read(tokens[:, :at_once], places, cache, seen)
            carry = choose(at_once - 1, tokens, found, carry[3])
        return jax.lax.while_loop(lambda carry: ~jnp.all(carry[3]), step, carry)[1]

    def placed(*arguments: Any) -> Array:
        with _weights_stay(config):
            return program(*arguments)

    everywhere = NamedSharding(mesh, PartitionSpec())  # on every host
    return jax.jit(placed, out_shardings=everywhere)


def greedy(model: Gemma4, prompts: Prompts, max_new_tokens: int, stop_ids: Collection[int],
           mesh: Mesh, temperatures: Sequence[float] | None = None, seed: int = 0
           ) -> list[list[int]]:
    """Continue prompts by the most likely token until a stop id; returns lists of new ids.

    One compiled program with a KV cache. It reads in one pass what all prompts have room for (as
    many tokens as the shortest has, in sixteens); then a loop goes on token by token, through the
    rest of the longer prompts, too.

    Args:
      model: a Tunix Gemma 4, with or without adapters.
      prompts: lists of token ids.
      max_new_tokens: at most so many new tokens each.
      stop_ids: ids that end a text (kept as the last id).
      mesh: the mesh that the model lives on.
      temperatures: one per prompt, to draw tokens instead (0: the most likely); `seed` decides.
    """
    tokens, lengths = _rows_of(prompts, max_new_tokens, mesh.shape["fsdp"])
    heat = None
    if temperatures:
        heat = np.resize(np.asarray(temperatures, np.float32), (len(tokens), 1))
    last = lengths + max_new_tokens - 1  # [B] position of the last token wanted
    program = answer_program(model, mesh, read_at_once(lengths), stop_ids, heat, seed)
    with mesh:
        filled = np.asarray(program(nnx.state(model), tokens, lengths, last))
    answers = []
    for row, start in zip(filled[:len(prompts)], lengths):
        answer = row[start:start + max_new_tokens]
        answers.append(_until_stop(answer.tolist(), stop_ids))
    return answers


def read_at_once(lengths: np.ndarray) -> int:
    """Tokens that are read in one pass: the shortest prompt's, in sixteens (few programs)."""
    return int(lengths.min()) // 16 * 16


def answer_shape(lengths: Sequence[int], max_new_tokens: int, parts: int) -> tuple[int, int]:
    """[B, T] of prompts with their answers: rows that `parts` divides, room for the new tokens."""
    rows = math.ceil(len(lengths) / parts) * parts
    total = math.ceil((max(lengths) + max_new_tokens) / 64) * 64  # few different shapes to compile
    return rows, total


def _rows_of(prompts: Prompts, max_new_tokens: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, T], lengths [B]) of prompts; the last one fills the rows that are left over."""
    count, total = answer_shape([len(prompt) for prompt in prompts], max_new_tokens, parts)
    padded = list(prompts) + [prompts[-1]] * (count - len(prompts))
    lengths = np.array([len(row) for row in padded], np.int32)
    tokens = np.zeros((count, total), np.int32)
    for row, prompt in zip(tokens, padded):
        row[:len(prompt)] = prompt
    return tokens, lengths


def _until_stop(answer: list[int], stop_ids: Collection[int]) -> list[int]:
    """An answer's ids up to the first that ends a text, that one included."""
    for index, token in enumerate(answer):
        if token in stop_ids:
            return answer[:index + 1]
    return answer
