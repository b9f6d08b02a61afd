"""A quantized base under float32 adapters: int8 or NF4 storage, and int8 arithmetic on top of it.

03 takes it where a slice is too small for the base in bfloat16, and 11 explains it. Nothing is
patched. Tunix's `Einsum` calls `jnp.astype` on its weight, which fails on Qwix's quantized arrays;
Qwix asks its provider which functions to intercept, and ours names that one more.
Letters in shape comments: B rows, T tokens, D embedding, N heads, H head size.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.interpreters import pxla
from jax.sharding import Mesh, PartitionSpec
from tunix.models.gemma4.model import Gemma4, ModelConfig

from helpers import gemma
from helpers.run import UserError, phase
from tables.stored import PLAIN, STORAGES

BASE_DTYPES = STORAGES
TILE = 32  # input weights that share a scale in NF4; in int8 all of an output's do
WeightAndScale = tuple[jax.Array, jax.Array]
_dot_general = jax.lax.dot_general  # as it is outside of Qwix's interception


# ── Providers: what Qwix calls instead of JAX's products ──


class Casts(qwix.PtqProvider):
    """Answers the one call of Tunix that Qwix does not answer for its quantized weights."""

    def get_intercept_map(self) -> dict[str, Callable]:
        """Qwix's functions to answer, and the one that Tunix's `Einsum` calls on its weight."""
        answered = super().get_intercept_map()
        return answered | {"jax.numpy.astype": self.cast}

    def cast(self, x: Any, dtype: Any, **options: Any) -> Any:
        """`jnp.astype` that knows Qwix's quantized weights: their scales take the dtype."""
        if is_quantized(x):
            return self.asarray(x, dtype=dtype)
        return jnp.astype(x, dtype, **options)


class StoredProducts(Casts):
    """Multiplies with a stored weight by `weight_dot` and `weight_einsum`, else as Qwix does."""

    def dot_general(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any,
                    **kwargs: Any) -> jax.Array:
        """Of nnx.Linear: the MLP matrices."""
        if not is_quantized(rhs):
            return super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)
        self._get_current_rule_and_op_id("dot_general")  # Qwix counts operations
        return self.weight_dot(lhs, rhs.array, dimension_numbers)

    def einsum(self, equation: str, *operands: Any, **kwargs: Any) -> jax.Array:
        """Of Tunix's Einsum: the attention matrices."""
        if len(operands) != 2 or not is_quantized(operands[1]):
            return super().einsum(equation, *operands, **kwargs)
        self._get_current_rule_and_op_id("einsum")
        lhs, weight = operands
        return self.weight_einsum(equation, lhs, weight.array)


class Dequantized(StoredProducts):
    """Dequantizes a stored weight and multiplies in the dtype of its scales.

    So does Qwix, but its NF4 looks every weight up in a table, in one flat row: on a mesh that
    gathers the whole matrix on every chip. `dequantize` keeps its shape.
    """

    def weight_dot(self, lhs: jax.Array, weight: qwix.QArray, dimension_numbers: Any) -> jax.Array:
        """`lhs` times the dequantized weight."""
        rows, columns = weight.shape
        axis = 0 if rows < columns else 1  # Gemma's MLPs are wider than what they read and write
        whole = gathered(weight, axis)
        return _dot_general(lhs, dequantize(whole), dimension_numbers)

    def weight_einsum(self, equation: str, lhs: jax.Array, weight: qwix.QArray) -> jax.Array:
        """The same for an einsum."""
        inputs, _ = equation.split("->")
        _, letters = inputs.split(",")
        whole = gathered(weight, letters.index("D"))  # Tunix's letter for the embedding
        return jnp.einsum(equation, lhs, dequantize(whole))


class QuantizedLora(gemma.Float32Lora, Dequantized):
    """Float32 adapters beside a base that is dequantized before it multiplies.

    The order of inheritance does the work: LoRA asks its parent for the base product, and finds
    `Dequantized` before Qwix's own provider.
    """


class Int8Products(StoredProducts):
    """Multiplies with stored int8 weights in int8, forward and backward (see `int8_dot`)."""

    def weight_dot(self, lhs: jax.Array, weight: qwix.QArray, dimension_numbers: Any) -> jax.Array:
        """`lhs` times the weight as it is stored."""
        return int8_dot(lhs, weight.qvalue, weight.scale, dimension_numbers)

    def weight_einsum(self, equation: str, lhs: jax.Array, weight: qwix.QArray) -> jax.Array:
        """The same for an einsum."""
        return int8_einsum(equation, lhs, weight.qvalue, weight.scale)


class Int8Lora(gemma.Float32Lora, Int8Products):
    """Float32 adapters beside int8 weights that are multiplied as int8."""


def check_storage(base_dtype: str) -> None:
    """Refuse a storage that nobody knows.

    Raises:
      UserError: the text lists what there is.
    """
    if base_dtype not in (*PLAIN, *BASE_DTYPES):
        known = ", ".join(BASE_DTYPES)
        raise UserError(f"base_dtype={base_dtype!r} is no storage that we know. Take one of "
                        f"{known}, or leave it empty.")


@functools.cache
def _levels() -> tuple[float, ...]:
    """The 16 values of NF4, as Qwix has them."""
    with jax.ensure_compile_time_eval():
        codes = jnp.arange(16, dtype=jnp.uint4)
        unit_scale = jnp.ones(1)
        array = qwix.QArray(codes, unit_scale, qtype="nf4")
        levels = qwix.dequantize(array)
        return tuple(float(level) for level in levels)


def dequantize(array: qwix.QArray) -> jax.Array:
    """`qwix.dequantize` without a look-up: the same numbers, each where its code is."""
    if array.qtype != "nf4":
        return qwix.dequantize(array)
    values = _values_of_codes(array)
    tiles: list[int] = []   # each axis of the values as (tiles, values of a tile)
    spread: list[int] = []  # and the scales beside it, one for each tile
    for size, count in zip(values.shape, array.scale.shape, strict=True):
        tiles += [count, size // count]
        spread += [count, 1]
    tiled = values.reshape(tiles)
    scales = array.scale.reshape(spread)
    scaled = tiled * scales
    return scaled.reshape(values.shape)


def _values_of_codes(array: qwix.QArray) -> jax.Array:
    """The level of each NF4 code, before any scale."""
    code = array.qvalue.astype(jnp.int32)
    dtype = array.scale.dtype
    values = [jnp.asarray(level, dtype) for level in _levels()]
    for bit in range(4):  # the lowest bit tells neighbors apart: 16 values, 8, 4, 2, 1
        is_set = (code >> bit) & 1 == 1
        lows, highs = values[::2], values[1::2]
        values = []
        for low, high in zip(lows, highs, strict=True):
            chosen = jnp.where(is_set, high, low)
            values.append(chosen)
    return values[0]


def gathered(weight: qwix.QArray, axis: int) -> qwix.QArray:
    """The same weight, with its pieces along `fsdp` brought together while they're still small.

    Without this the compiler gathers what a product takes, which is the dequantized weight: twice
    as many bytes as int8 has.

    Args:
      weight: stored.
      axis: the embedding's, which Tunix cuts along `fsdp`.
    """
    mesh = pxla.thread_resources.env.physical_mesh  # of the `with mesh:` around us, as Tunix asks
    if mesh.empty or mesh.shape.get("fsdp", 1) == 1:
        return weight
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * weight.ndim
    spec[axis] = None
    cut = PartitionSpec(*spec)
    codes = jax.lax.with_sharding_constraint(weight.qvalue, cut)
    scales = jax.lax.with_sharding_constraint(weight.scale, cut)
    return dataclasses.replace(weight, qvalue=codes, scale=scales)


def is_quantized(x: Any) -> bool:
    """Is this one of Qwix's quantized weights, as a module holds it or hands it to an operation?"""
    return isinstance(getattr(x, "array", None), qwix.QArray)


def provider(
    base_dtype: str,
    rank: int,
    alpha: float,
    targets: str = gemma.TARGETS,
    int8_products: bool = False,
) -> qwix.LoraProvider:
    """The provider that `gemma.inject_lora` hands to Qwix, for a base stored as `base_dtype`.

    Matrices that `targets` leaves without adapters are quantized all the same.

    Raises:
      UserError: an unknown `base_dtype`, or int8 products of anything but int8 weights.
    """
    check_storage(base_dtype)
    if int8_products and base_dtype != "int8":
        raise UserError('int8_products needs base_dtype="int8".')
    if base_dtype in PLAIN:
        return gemma.lora_provider(rank, alpha, targets)
    stored = _stored_as(base_dtype)
    adapted = qwix.LoraRule(
        module_path=targets,
        rank=rank,
        alpha=alpha,
        dropout=0.0,
        lora_a_initializer=gemma.lora_a,
        lora_b_initializer=gemma.lora_b,
        **stored)
    rest = qwix.QuantizationRule(module_path=gemma.TARGETS, **stored)
    if int8_products:
        return Int8Lora([adapted, rest])
    return QuantizedLora([adapted, rest])


# ── int8 arithmetic ──


def rounded(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """(int8 values, scale) of an array: symmetric, the largest along `axes` becomes 127."""
    sizes = jnp.abs(x)
    largest = jnp.max(sizes, axis=axes, keepdims=True)
    scale = largest.astype(jnp.float32) / 127
    scale = jnp.where(scale == 0, 1.0, scale)
    steps = x.astype(jnp.float32) / scale
    values = jnp.round(steps)
    return values.astype(jnp.int8), scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def int8_dot(
    lhs: jax.Array, weight: jax.Array, scale: jax.Array, dimension_numbers: Any
) -> jax.Array:
    """`lhs` times a frozen int8 weight, both factors int8, summed in int32.

    Each row of `lhs` (each token) gets its own scale, so does each output channel of the weight,
    hence both come out of the sum. The gradient for `lhs` is an int8 product as well: the weight's
    scales go into the incoming gradient first, then its rows are rounded. The weight gets none.

    Args:
      lhs: activations, floating point.
      weight: int8, no batch dimensions.
      scale: of the weight's ndim, 1 along contracted dimensions (Qwix without tiles).
      dimension_numbers: as for `jax.lax.dot_general`.

    Returns:
      in the dtype of `lhs`: dimensions of `lhs` that remain, then those of the weight.
    """
    (left, right), (batch, _) = dimension_numbers
    assert not batch, "a weight has no batch dimensions"
    values, rows = rounded(lhs, left)
    total = _dot_general(values, weight, dimension_numbers, preferred_element_type=jnp.int32)
    rows = jnp.squeeze(rows, left)
    channels = jnp.squeeze(scale, right)
    channels = channels.astype(jnp.float32)
    ones = (1,) * channels.ndim
    rows = rows.reshape(rows.shape + ones)
    product = total * rows * channels
    return product.astype(lhs.dtype)


def _int8_forward(
    lhs: jax.Array, weight: jax.Array, scale: jax.Array, dimension_numbers: Any
) -> tuple[jax.Array, WeightAndScale]:
    """The product, and what its gradient needs."""
    product = int8_dot(lhs, weight, scale, dimension_numbers)
    return product, (weight, scale)


def _int8_backward(
    dimension_numbers: Any, kept: WeightAndScale, gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    """The gradients of `int8_dot` for its three arrays; only the first has one."""
    weight, scale = kept
    (left, right), _ = dimension_numbers
    of_channels = _others(weight.ndim, right)
    first = gradient.ndim - len(of_channels)  # the weight's channels are the gradient's last axes
    last = tuple(range(first, gradient.ndim))
    channels = jnp.squeeze(scale, right)
    channels = channels.astype(gradient.dtype)
    values, rows = rounded(gradient * channels, last)
    summed = (last, tuple(of_channels))
    no_batch: tuple = ((), ())
    total = _dot_general(values, weight, (summed, no_batch), preferred_element_type=jnp.int32)
    ones = (1,) * len(right)
    rows = rows.reshape(rows.shape[:first] + ones)
    result = (total * rows).astype(gradient.dtype)  # rows of lhs, then contracted axes in order

    remaining = _others(first + len(left), left)
    home = []  # where each contracted axis belongs
    for axis in sorted(right):
        place = right.index(axis)
        home.append(left[place])
    order = np.argsort(remaining + home)
    of_lhs = jnp.transpose(result, order.tolist())
    return of_lhs, None, None


def _others(count: int, axes: Sequence[int]) -> list[int]:
    """The axes of an array of `count` dimensions that aren't in `axes`."""
    return [axis for axis in range(count) if axis not in axes]


int8_dot.defvjp(_int8_forward, _int8_backward)


def int8_einsum(
    equation: str, lhs: jax.Array, weight: jax.Array, scale: jax.Array
) -> jax.Array:
    """`jnp.einsum(equation, lhs, weight)` as one `int8_dot`, transposed if the equation says so."""
    letters = equation.replace(" ", "")
    inputs, out = letters.split("->")
    left, right = inputs.split(",")
    shared = [letter for letter in right if letter in left]
    summed = (_places(shared, left), _places(shared, right))
    no_batch: tuple = ((), ())
    product = int8_dot(lhs, weight, scale, (summed, no_batch))

    remaining = [letter for letter in left + right if letter not in shared]
    order = _places(out, remaining)
    return jnp.transpose(product, order)


def _places(letters: Sequence[str], axes: Sequence[str]) -> tuple[int, ...]:
    """Where each letter stands among an array's axes."""
    return tuple(axes.index(letter) for letter in letters)


def _stored_as(base_dtype: str) -> dict[str, Any]:
    """Arguments of a Qwix rule for a storage."""
    tile = None
    if base_dtype == "nf4":
        tile = TILE
    return {"weight_qtype": base_dtype, "tile_size": tile}


# ── Quantizing ──


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(
    array: jax.Array,
    qtype: str,
    channelwise: tuple[int, ...],
    tiled: tuple[tuple[int, int], ...],
) -> qwix.QArray:
    """A quantized array, computed in float32; its scales have the array's dtype.

    Args:
      array: of any floating dtype.
      qtype: Qwix's name of the storage.
      channelwise: axes along which every place has scales of its own.
      tiled: (axis, values that share a scale) of the others that are cut.
    """
    return qwix.quantize(
        array.astype(jnp.float32),
        qtype,
        channelwise_axes=channelwise,
        tiled_axes=dict(tiled),
        scale_dtype=array.dtype)


def quantized_places(model: nnx.Module) -> list[tuple[tuple, nnx.Module, str]]:
    """(path of the module, module, name in it) of every quantized weight of a model."""
    places = []
    for path, module in model.iter_modules():
        for name, value in vars(module).items():
            if is_quantized(value):
                places.append((path, module, name))
    return places


def plan(model: Gemma4, mesh: Mesh, base_dtype: str) -> dict[tuple, Any]:
    """{path: abstract quantized weight} of every matrix of a Gemma 4 that is to be quantized.

    Qwix finds the matrices and what they sum over by running the model abstractly. Where these are
    two axes (heads and head size of `attn_vec_einsum`), it tiles the last one and lets all heads
    share its scales. Here a tile stays within a head.
    """
    stored = _stored_as(base_dtype)
    rule = qwix.QuantizationRule(module_path=gemma.TARGETS, **stored)
    shapes = gemma.probe(model, Dequantized([rule]), mesh)
    places = quantized_places(shapes)
    if base_dtype == "nf4":
        for _, module, name in places:
            per_head = _per_head(getattr(module, name))
            setattr(module, name, per_head)
    gemma.place(shapes, mesh)

    weights = {}
    for path, module, name in places:
        weights[(*path, name)] = getattr(module, name)
    return weights


def _per_head(hull: Any) -> Any:
    """The same abstract weight with a scale of its own for each tile of each head."""
    values = hull.array.qvalue.get_value()
    tiled = hull.how.tiled_axes
    channelwise, scales = [], []  # axes; how many scales there are along each
    for axis, size in enumerate(values.shape):
        tile = tiled.get(axis, 1)
        scales.append(size // tile)
        if axis not in tiled:
            channelwise.append(axis)
    how = dataclasses.replace(hull.how, channelwise_axes=tuple(channelwise))
    shape = jax.ShapeDtypeStruct(tuple(scales), hull.dtype)
    variable = hull.array.qvalue
    scale = variable.replace(shape)  # cut like the values; Qwix's would not cut heads
    array = dataclasses.replace(hull.array, scale=scale)
    return hull.replace(how=how, array=array)


def dequantized(weight: Any) -> jax.Array:
    """A quantized weight as the model multiplies with it, in the dtype of its scales."""
    values = weight.array.qvalue.get_value()
    scale = weight.array.scale.get_value()
    array = qwix.QArray(qvalue=values, scale=scale, qtype=weight.how.qtype)
    return dequantize(array)


def as_trained(base_dtype: str, dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    """For `merge.run`: a function of rows [outputs, inputs] that makes them what a run trained on.

    Bit for bit what `load_base` stores and the model multiplies with, because no scale is shared by
    two outputs and no tile crosses heads: any rows can be taken by themselves. `dtype` is what the
    base had before it was stored as `base_dtype`, and is multiplied in.

    Raises:
      UserError: `base_dtype` isn't a storage with fewer bits.
    """
    check_storage(base_dtype)
    if base_dtype in PLAIN:
        raise UserError(f"base_dtype={base_dtype!r} stores the base as it is: nothing is rounded.")
    tiled: tuple = ()
    if base_dtype == "nf4":
        tiled = ((1, TILE),)

    def rows_as_trained(rows: np.ndarray) -> np.ndarray:
        with jax.default_device(_cpu()):
            as_loaded = np.asarray(rows).astype(dtype)
            stored = _quantize(as_loaded, base_dtype, (0,), tiled)
            weights = qwix.dequantize(stored)
            multiplied = np.asarray(weights)
        return multiplied.astype(rows.dtype)

    return rows_as_trained


def parameters_of(model: nnx.Module) -> int:
    """How many weights a model has; the scales of quantized ones aren't weights."""
    total = 0
    state = nnx.state(model)
    for path, leaf in nnx.to_flat_state(state):
        if path[-2:] == ("array", "scale"):
            continue
        total += leaf.get_value().size
    return total


def dequantize_into(plain: nnx.Module, quantized: nnx.Module) -> nnx.Module:
    """Set `plain`'s weights to the dequantized ones of another model, in place; returns it."""
    modules = dict(plain.iter_modules())
    for path, module, name in quantized_places(quantized):
        variable = getattr(modules[path], name)
        stored = getattr(module, name)
        weight = dequantized(stored)
        variable.set_value(weight.astype(variable.dtype))
    return plain


def answering(model: Gemma4) -> Gemma4:
    """A quantized model that runs by itself, and so does the MLP of each layer; shares its arrays.

    Qwix intercepts the call of one module, so each that is called from outside needs it. Inside the
    model's own call an MLP's interception does nothing: both have the same provider, which has no
    rules, because what is to be quantized is. `gemma.inject_lora` replaces them by its own.
    """
    base = Dequantized([])
    for layer in model.layers:
        layer.mlp = qwix.quantize_model(layer.mlp, base, skip_nnx_init=True)
    return qwix.quantize_model(model, base, skip_nnx_init=True)


def abstract_base(config: ModelConfig, mesh: Mesh, base_dtype: str = "bfloat16") -> Gemma4:
    """`gemma.abstract_base` with a quantized base: shapes, dtypes and shardings, no memory."""
    check_storage(base_dtype)
    model = gemma.abstract_base(config, mesh)
    if base_dtype in PLAIN:
        return model
    modules = dict(model.iter_modules())
    for place, hull in plan(model, mesh, base_dtype).items():
        *path, name = place
        module = modules[tuple(path)]
        setattr(module, name, hull)
    return answering(model)


def _cpu() -> jax.Device:
    """The device of JAX that is this machine's CPU.

    Raises:
      UserError: JAX_PLATFORMS hides it.
    """
    try:
        devices = jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise UserError("A base is quantized on the CPU, and JAX_PLATFORMS hides the CPU from JAX. "
                        "Unset it and start again.") from error
    return devices[0]


def load_base(
    source: str | Path, config: ModelConfig, mesh: Mesh, base_dtype: str = "bfloat16"
) -> Gemma4:
    """`gemma.load_base` for a base stored as `base_dtype`, placed on the mesh; it can be asked.

    The model is loaded into the host's memory (62 GB for the 31B); there one matrix at a time is
    quantized, so the numbers are the same on every machine (`as_trained` makes them, too), and sent
    to the chips, which never hold a bfloat16 copy.

    Raises:
      UserError: see `gemma.load_base`; or JAX may not use the CPU, which does the quantizing.
    """
    check_storage(base_dtype)
    if base_dtype in PLAIN:
        model = gemma.load_base(source, config, mesh)
        return gemma.place(model, mesh)
    host = _cpu()
    on_host = gemma.make_mesh(config, (1, 1), [host])
    model = gemma.load_base(source, config, on_host)
    modules = dict(model.iter_modules())
    shapes = gemma.abstract_base(config, mesh)
    for place, hull in plan(shapes, mesh, base_dtype).items():
        *path, name = place
        module = modules[tuple(path)]
        weight = getattr(module, name).get_value()
        _fill(hull, np.asarray(weight), host)
        setattr(module, name, hull)
    return gemma.place(answering(model), mesh)


def _fill(hull: Any, weight: np.ndarray, host: jax.Device) -> None:
    """Quantize a matrix on the host, and put it where an abstract quantized weight should lie."""
    channelwise = tuple(hull.how.channelwise_axes)
    tiled = tuple(hull.how.tiled_axes.items())
    with jax.default_device(host):
        stored = _quantize(weight, hull.how.qtype, channelwise, tiled)
    for part in ("qvalue", "scale"):
        variable = getattr(hull.array, part)
        sharding = variable.get_value().sharding
        values = np.asarray(getattr(stored, part))
        placed = jax.device_put(values, sharding)
        variable.set_value(placed)


def load_onto(
    name: str,
    source: str | Path,
    config: ModelConfig,
    mesh: Mesh,
    base_dtype: str = "bfloat16",
) -> tuple[Gemma4, float]:
    """(a base on its devices, the seconds that took), with a line of progress.

    Args:
      name: of the base, as a reader knows it.
      source, config, mesh, base_dtype: for `load_base`.
    """
    began = time.perf_counter()
    axes = [f"{axis}={parts}" for axis, parts in mesh.shape.items()]
    shape = " x ".join(axes)
    with phase(f"loading {name} onto {mesh.size} devices, {shape}"):
        model = load_base(source, config, mesh, base_dtype)
        state = nnx.state(model)
        jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    return model, seconds
