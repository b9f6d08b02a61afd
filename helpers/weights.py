"""Safetensors files too large to load: where each tensor lies, and which model they are.

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the length of a
header, a JSON header with name, dtype, shape and byte range of every tensor, then their bytes,
back to back.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from helpers.run import UserError, read_json

DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}  # that a merge can round to


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `start` is its first byte in the file, `stop` the first after it."""

    file: Path
    dtype: str
    shape: tuple
    start: int
    stop: int

    def array(self, mode="r"):
        """The tensor as pages of its file: nothing is read yet. Mode "r+" writes to the file."""
        data = np.memmap(self.file, np.uint8, mode, self.start, (self.stop - self.start,))
        return data.view(DTYPES[self.dtype]).reshape(self.shape)


def read_header(path):
    """{name: `Tensor`} of a safetensors file.

    Raises:
      UserError: the library finds lengths, offsets or dtypes that do not fit.
    """
    try:
        with safe_open(path, "np"):
            pass
    except (SafetensorError, OSError) as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(f"{path} is damaged or cut short ({why}). Download it again.") from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return {name: Tensor(path, entry["dtype"], tuple(entry["shape"]),
                         *(8 + length + offset for offset in entry["data_offsets"]))
            for name, entry in entries.items()}


def open_model(folder):
    """{name: `Tensor`} of a model folder, checked against its index.

    A large model comes in several files (shards) and an index that says which tensor is in which.

    Raises:
      UserError: not a model folder, or a file is missing, damaged, or at odds with the index.
    """
    folder = Path(folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not (folder / "config.json").exists() or not (index.exists() or single.exists()):
        raise UserError(f"{folder} is not a model folder (config.json and safetensors files).")
    promised = read_json(index)["weight_map"] if index.exists() else None
    files = sorted(set(promised.values())) if promised else [single.name]
    if missing := [name for name in files if not (folder / name).exists()]:
        raise UserError(f"{folder} lacks {', '.join(missing)}, which its index names. "
                        "Download it again.")
    found = [item for file in files for item in read_header(folder / file).items()]
    where = {(name, tensor.file.name) for name, tensor in found}
    if promised and (wrong := where ^ set(promised.items())):
        raise UserError(f"{folder}: index and shards disagree on {len(wrong)} entries, "
                        f"first {min(wrong)[0]}. Download it again.")
    return dict(found)


def fingerprint(folder):
    """SHA-256 that tells models apart in a second, also for 62 GB: not a proof that all is whole.

    It covers config, tokenizer, template, and of each safetensors file its name, its size and 64
    evenly spread blocks of 16 KiB; neither the place nor the times of the files.
    """
    found = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix not in (".safetensors", ".json", ".jinja", ".model"):
            continue
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            if path.suffix != ".safetensors":
                found.update(file.read())
                continue
            for block in range(64):
                file.seek(size * block // 64)
                found.update(file.read(1 << 14))
    return found.hexdigest()


def adapters_digest(adapters: Any) -> str:
    """SHA-256 of a run's adapters: over every path, dtype, shape and byte, in the paths' order.

    A damaged checkpoint restores without a word, with other numbers; this notices. What 03 holds
    (`gemma.adapted_modules(model)`, or an NNX state) and what 04 restores from the checkpoint
    (`merge.restore_adapters`) give the same digest for the same adapters.

    Args:
      adapters: {module path: (A, B)}, {module path: {"a": A, "b": B}}, or nested mappings whose keys
        are the parts of the path. Each A and B is an array, or a variable with `get_value()`.
    """
    arrays = dict(_arrays_of(adapters, ()))
    result = hashlib.sha256()
    for path in sorted(arrays):
        array = arrays[path]
        result.update(f"{path} {array.dtype.name} {list(array.shape)}\n".encode())
        result.update(array.tobytes())
    return result.hexdigest()


def _arrays_of(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """(path, array) of every array: `layers.0.attn.q_einsum.a`, however Qwix and Orbax spell it."""
    if isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from _arrays_of(branch, (*path, str(key)))
    elif isinstance(tree, tuple):
        for letter, array in zip("ab", tree, strict=True):
            yield from _arrays_of(array, (*path, letter))
    else:
        parts = [part for part in path if part != "value"]  # where Orbax keeps a variable's array
        parts[-1] = parts[-1].rpartition("_lora_")[2]       # Qwix: w_lora_a, kernel_lora_a
        value = tree.get_value() if hasattr(tree, "get_value") else tree
        yield ".".join(parts), np.asarray(value)
