"""Weights in four bits, as vLLM and its TPU package load them (compressed-tensors, W4A16).

Each matrix of the language model's layers becomes three tensors: `weight_packed`, int32
[out, in / 8] with eight numbers a word, `weight_scale`, bfloat16 [out, in / 32], and
`weight_shape`. A weight is its number, -8 to 7, times the scale of its group of 32. Arithmetic
stays in bfloat16, so four bits save memory and the time to read it, nothing else. Embedding, norms
and towers are copied.

`tests/test_four_bits.py` unpacks them with the library's own code
(https://github.com/vllm-project/compressed-tensors).
"""

import re
import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pandas as pd
from safetensors.numpy import load_file, save_file

from helpers.run import Progress, UserError, atomic_dir, read_json, room, write_json
from helpers.weights import INDEX, Tensor, fingerprint, open_model
from tables import architecture

GROUP = 32  # weights that share a scale; a TPU's kernel wants fewer than 128
WORD = 8    # numbers in an int32
LEVELS = (8, 7, 6, 5, 4)  # what a group's largest weight may become, but for its sign
ROWS = 256  # of a matrix that a thread works on at a time
THREADS = 8  # that work on a matrix: numpy computes on one core
SHIFTS = 4 * np.arange(WORD, dtype=np.uint32)
MATRIX = re.compile(architecture.PEFT_TARGETS + r"\.weight")
LAYER = re.compile(r"model\.(language_model\.)?layers\.(\d+)\.")
Arrays = dict[str, np.ndarray]
Row = dict[str, Any]  # `tensor`, the name of a matrix, and its `error`
RECORD = "four_bits.json"  # in a folder: the fingerprint of what it was made from, and the errors
METHOD: dict[str, Any] = {  # `quantization_config` of google's own gemma-4-31B-it-qat-w4a16-ct
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "pack-quantized",
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "dynamic": False,
                "strategy": "group",
                "group_size": GROUP,
                "actorder": None,
            },
            "input_activations": None,
            "output_activations": None,
        },
    },
    "ignore": ["lm_head", "re:.*vision_.*", "re:.*audio_.*", "re:.*embed_.*", "re:.*per_layer_.*"],
}


# ── The arithmetic ──


def quantize(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Four-bit numbers of some rows of a matrix.

    Each group of weights tries several scales. The first gives its largest weight the number -8,
    whatever the weight's sign (so a scale may be negative), as llama.cpp's Q4_0 does. The others
    give it -7, -6, -5 and -4. The group keeps the scale that loses least. That's why the weights of
    google's `-qat-q4_0-unquantized` models come back: they lie on four-bit steps already, but the
    largest of a group isn't always at 8 (measured on google's files by
    github.com/xbill9/gemma4-dev, `jev-tpu-31b/repack_q4_0.py`). Where it stands at 3, half the step
    puts it at 6; where it stands at 2 or 1, half or a quarter of the step puts it at 4.

    Args:
      rows: [m, in] in any float type; `in` is a multiple of `GROUP`.

    Returns:
      (numbers, int8 [m, in], -8 to 7; scales, bfloat16 [m, in / GROUP]).
    """
    weights = rows.astype(np.float32)
    groups = weights.reshape(len(rows), -1, GROUP)
    sizes = np.abs(groups)
    place = sizes.argmax(axis=-1, keepdims=True)
    largest = np.take_along_axis(groups, place, axis=-1)  # [m, in / GROUP, 1]

    numbers = np.zeros(groups.shape, np.int8)
    scales = np.zeros(largest.shape, ml_dtypes.bfloat16)
    least = np.full(largest.shape, np.inf, np.float32)
    for level in LEVELS:
        tried = _numbers_at(groups, largest / -level)
        scale = _best_scale(groups, tried)
        off = tried * scale.astype(np.float32) - groups
        lost = _dot(off, off)
        better = lost < least
        numbers = np.where(better, tried.astype(np.int8), numbers)
        scales = np.where(better, scale, scales)
        least = np.where(better, lost, least)
    return numbers.reshape(rows.shape), scales[..., 0]


def _numbers_at(groups: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The nearest numbers, float32 [m, g, GROUP], of groups with these steps, [m, g, 1]."""
    steps = np.where(steps == 0, 1, steps)  # a group of zeros
    nearest = np.rint(groups / steps)
    return nearest.clip(-8, 7, out=nearest)


def _best_scale(groups: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The scales, bfloat16 [m, g, 1], with which these numbers come nearest to the groups: the
    least-squares fit of one factor."""
    squares = _dot(numbers, numbers)
    fit = _dot(numbers, groups) / np.maximum(squares, 1)
    return fit.astype(ml_dtypes.bfloat16)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The dot products of two arrays' groups, [m, g, 1]."""
    products = np.einsum("mgi,mgi->mg", a, b)
    return products[..., None]


def pack(numbers: np.ndarray) -> np.ndarray:
    """int8 [m, in], -8 to 7, as int32 [m, in / 8]: the first number is in the lowest bits."""
    digits = (numbers + 8).astype(np.uint32)
    words = digits.reshape(len(numbers), -1, WORD)
    shifted = words << SHIFTS
    packed = np.bitwise_or.reduce(shifted, axis=-1)
    return packed.view(np.int32)


def restore(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weights, bfloat16 [m, in], of `pack`'s words [m, in / 8] and scales [m, in / GROUP]."""
    words = packed.view(np.uint32)[..., None]
    digits = (words >> SHIFTS) & 15  # [m, in / 8, 8]
    digits = digits.astype(np.float32)
    groups = digits.reshape(*scales.shape, GROUP)
    steps = scales.astype(np.float32)[..., None]
    weights = (groups - 8) * steps
    rows = weights.reshape(len(packed), -1)
    return rows.astype(ml_dtypes.bfloat16)


class _Part(NamedTuple):
    """Some rows of a matrix in four bits."""

    words: np.ndarray   # int32 [m, in / 8]
    scales: np.ndarray  # bfloat16 [m, in / GROUP]
    total: float        # the squared norm of the rows
    lost: float         # that of what four bits lost of them


def _pack_rows(rows: np.ndarray) -> _Part:
    """Some rows, [m, in], in four bits.

    Raises:
      FloatingPointError: they hold NaN or Inf.
    """
    rows = rows.astype(np.float32)
    is_finite = np.isfinite(rows)
    if not is_finite.all():
        raise FloatingPointError("NaN or Inf")
    numbers, scales = quantize(rows)
    words = pack(numbers)
    difference = restore(words, scales).astype(np.float32) - rows
    return _Part(
        words,
        scales,
        total=float(np.vdot(rows, rows)),
        lost=float(np.vdot(difference, difference)))


def _three_tensors(name: str, tensor: Tensor) -> tuple[Arrays, float]:
    """A matrix in four bits, {name: array}, and its relative error, ‖restored - W‖ / ‖W‖.

    Raises:
      UserError: its rows can't be cut into groups of `GROUP`, or hold NaN or Inf.
    """
    if tensor.shape[1] % GROUP:
        shape = list(tensor.shape)
        raise UserError(f"{name} is {shape}: its rows can't be cut into groups of "
                        f"{GROUP}, so this model can't be packed into four bits. Serve merged/.")
    matrix = tensor.array()
    blocks = [matrix[first:first + ROWS] for first in range(0, len(matrix), ROWS)]
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            parts = list(pool.map(_pack_rows, blocks))
    except FloatingPointError as found:
        raise UserError(f"{tensor.file}: {name} has {found}. Run 04_merge again.") from found
    total = sum(part.total for part in parts)
    lost = sum(part.lost for part in parts)

    arrays = {
        f"{name}_packed": np.concatenate([part.words for part in parts]),
        f"{name}_scale": np.concatenate([part.scales for part in parts]),
        f"{name}_shape": np.array(matrix.shape, np.int64),
    }
    error = 0.0
    if total:
        error = (lost / total) ** 0.5
    return arrays, error


# ── Folders ──


def export(model: str | Path, out: str | Path) -> pd.DataFrame:
    """Write a model folder again in four bits, a file for each layer, unless `out` is current.

    Args:
      model: a folder in bfloat16, such as `merged/`.
      out: the folder to make; it appears when it's complete.

    Returns:
      A table with a row for each matrix: `tensor`, and `error`, ‖restored - W‖ / ‖W‖.

    Raises:
      UserError: this isn't a Gemma 4, it's quantized already, a matrix can't be packed, or the disk
        is too small.
    """
    model = Path(model)
    out = Path(out)
    config = architecture.read_config(model)
    architecture.text_config(config)  # may refuse it
    tensors = open_model(model)
    source = fingerprint(model)
    noted = _made(out)
    if noted["model"] == source:
        print(f"{out} is current: the same model, every file whole")
        return pd.DataFrame(noted["errors"])
    size = 0
    for name, tensor in tensors.items():
        size += _bytes_of(name, tensor)
    room(out.parent, size, f"{out.name}/")

    files = _by_layer(tensors)
    count = len(files)
    progress = Progress(count, "layers packed")
    errors: list[Row] = []
    places: dict[str, str] = {}  # {tensor: file}
    new_config = {**config, "quantization_config": METHOD}
    with atomic_dir(out, ours=RECORD) as folder:
        _copy_the_rest(model, folder)
        write_json(folder / "config.json", new_config)
        for number, names in enumerate(files, 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            of_layer = {name: tensors[name] for name in names}
            arrays, errors_of_layer = _packed(of_layer)
            errors += errors_of_layer
            _save_part(folder / file, arrays, places)
            progress.update()
        write_json(folder / INDEX, {"metadata": {}, "weight_map": places})
        write_json(folder / RECORD, {"model": source, "errors": errors})
    return pd.DataFrame(errors)


def _save_part(file: Path, arrays: Arrays, places: dict[str, str]) -> None:
    """Write one of a model's safetensors files, and add its tensors to `places`, {tensor: file}."""
    save_file(arrays, file, metadata={"format": "pt"})
    for name in arrays:
        places[name] = file.name


def _packed(tensors: dict[str, Tensor]) -> tuple[Arrays, list[Row]]:
    """({name: array} of tensors with their matrices in four bits, a row of errors for each matrix).

    Raises:
      UserError: as for `_three_tensors`.
    """
    arrays: Arrays = {}
    errors: list[Row] = []
    for name, tensor in tensors.items():
        if MATRIX.fullmatch(name):
            three_tensors, error = _three_tensors(name, tensor)
            arrays |= three_tensors
            errors.append({"tensor": name, "error": error})
        else:
            arrays[name] = tensor.array()
    return arrays, errors


def dequantize(model: str | Path, out: str | Path) -> None:
    """Write a folder of `export` again in bfloat16, with what four bits left of each weight.

    Any engine loads it. So 07's judge can say what four bits cost, even on a machine that has no
    kernel for four bits.

    Args:
      model: a folder of `export`.
      out: the folder to make; it appears when it's complete.

    Raises:
      UserError: `model` isn't such a folder, `out` is the same one, or the disk is too small.
    """
    model = Path(model)
    out = Path(out)
    if out.resolve() == model.resolve():
        raise UserError(f"{out} would replace the folder that it's made from. Name another one.")
    config = architecture.read_config(model)
    method = config.pop("quantization_config", None)
    if method != METHOD:
        raise UserError(f"{model} isn't a folder that four_bits.export wrote (its config.json says "
                        "otherwise). Run that first.")
    tensors = open_model(model)
    source = fingerprint(model)
    noted = _made(out)
    if noted["model"] == source:
        print(f"{out} is current: the same model, every file whole")
        return
    files = sorted({tensor.file for tensor in tensors.values()})
    size = sum(file.stat().st_size for file in files)
    room(out.parent, 4 * size, f"{out.name}/")

    progress = Progress(len(files), "layers unpacked")
    places: dict[str, str] = {}  # {tensor: file}
    with atomic_dir(out, ours=RECORD) as folder:
        _copy_the_rest(model, folder)
        write_json(folder / "config.json", config)
        for file in files:
            packed = load_file(file)
            arrays = _unpacked(packed)
            _save_part(folder / file.name, arrays, places)
            progress.update()
        write_json(folder / INDEX, {"metadata": {}, "weight_map": places})
        write_json(folder / RECORD, {"model": source})


def _unpacked(arrays: Arrays) -> Arrays:
    """{name: array} of a file of `export`, with one matrix for each three tensors."""
    result = dict(arrays)
    for name in arrays:
        if not name.endswith(".weight_packed"):
            continue
        matrix = name.removesuffix("_packed")
        words = result.pop(name)
        scales = result.pop(f"{matrix}_scale")
        del result[f"{matrix}_shape"]
        result[matrix] = restore(words, scales)
    return result


def _made(out: Path) -> dict[str, Any]:
    """What `export` noted in a folder, if its files are whole; else the notes of no model."""
    nothing = {"model": "", "errors": []}
    if not (out / RECORD).exists():
        return nothing
    try:
        open_model(out)
        noted = read_json(out / RECORD)
    except UserError:  # cut short, so it's made again
        return nothing
    if isinstance(noted, dict):
        noted = nothing | noted  # `dequantize` notes no errors
    if not _is_note(noted):
        return nothing
    return noted


def _is_note(noted: Any) -> bool:
    """Is that what `export` notes: the model's fingerprint, and an error for each matrix?"""
    if not isinstance(noted, dict):
        return False
    if not isinstance(noted.get("model"), str):
        return False
    errors = noted.get("errors")
    if not isinstance(errors, list):
        return False
    for row in errors:
        if not isinstance(row, dict):
            return False
        if not isinstance(row.get("tensor"), str):
            return False
        if not isinstance(row.get("error"), float):
            return False
    return True


def _bytes_of(name: str, tensor: Tensor) -> int:
    """Bytes that a tensor of the base will take in `export`'s folder."""
    if not MATRIX.fullmatch(name):
        return tensor.stop - tensor.start
    weights = tensor.shape[0] * tensor.shape[1]
    numbers = weights // 2
    scales = 2 * weights // GROUP
    return numbers + scales + 16  # and the two int64 of the shape


def _by_layer(tensors: dict[str, Tensor]) -> list[list[str]]:
    """The names of each layer's tensors. Those that belong to no layer come last."""
    groups: dict[float, list[str]] = defaultdict(list)
    for name in tensors:
        number = float("inf")
        layer = LAYER.match(name)
        if layer:
            number = float(layer[2])
        groups[number].append(name)
    in_order = sorted(groups)
    return [groups[number] for number in in_order]


def _copy_the_rest(model: Path, folder: Path) -> None:
    """Copy what is neither weights nor says where they are: tokenizer, template and settings."""
    made_anew = ("config.json", INDEX, RECORD)
    for path in sorted(model.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".gguf")
        if is_weights or path.name in made_anew:
            continue
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
