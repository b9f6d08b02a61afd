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
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from helpers.run import UserError
from tables import architecture

DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}  # a merge's results
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PREFIXES = ("model.language_model.", "model.")  # of the language model's tensors
TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
          "model.vision_embedder.")  # the last is the 12B's


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `start` is its first byte in the file, `stop` the first after it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def array(self, mode: Literal["r", "r+"] = "r") -> np.ndarray:
        """The tensor as pages of its file: nothing is read yet. Mode "r+" writes to the file."""
        size = self.stop - self.start
        data = np.memmap(self.file, np.uint8, mode, self.start, size)
        return data.view(DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> dict[str, Tensor]:
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
    tensors = {}
    for name, entry in entries.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        shape = tuple(entry["shape"])
        tensors[name] = Tensor(path, entry["dtype"], shape, start, stop)
    return tensors


def files_of(folder: str | Path) -> list[Path]:
    """A model's safetensors files, in the order of their names. `names_of` decides which they are.

    A large model comes in several files (shards), and an index says which tensor is in which. Where
    there is no index, it is model.safetensors. Files that lie beside these are refused, because
    every program picks in its own way: one would train a model, the next would change another.

    Raises:
      UserError: not a model folder, an index that cannot be used, a file that it names and that is
        missing, or a .safetensors file that it doesn't name.
    """
    folder = Path(folder)
    source = INDEX if (folder / INDEX).exists() else SINGLE
    names = names_of(folder)
    has_config = (folder / "config.json").exists()
    if not has_config or not (folder / source).exists():
        raise UserError(f"{folder} is not a model folder (config.json and safetensors files).")
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder} lacks {file.name}, which its index names. "
                            "Download it again.")
    for path in sorted(folder.glob("*.safetensors")):
        if path not in files:
            raise UserError(f"{folder} holds a second set of weights: {path.name} beside {source}. "
                            "Move what isn't this model's to another folder.")
    return files


def names_of(folder: str | Path) -> list[str]:
    """The names of a model's safetensors files: those in its index, else model.safetensors.

    The files needn't be there yet: `remote.stage` fetches the ones that this names.

    Raises:
      UserError: there is an index, and it can't be used.
    """
    if (Path(folder) / INDEX).exists():
        return sorted(set(_index_of(Path(folder)).values()))
    return [SINGLE]


def _index_of(folder: Path) -> dict[str, str]:
    """{tensor: file} of a folder's index."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}). Download it again.") from error
    places = None
    if isinstance(index, dict):
        places = index.get("weight_map")
    if not places or not isinstance(places, dict):
        raise UserError(f"{path} has no weight_map, so it names no files. Download it again.")
    for name, file in places.items():
        is_in_folder = Path(str(file)).name == file
        if not is_in_folder or not file.endswith(".safetensors"):
            raise UserError(f"{path} puts {name} into {file!r}, which is no safetensors file of "
                            "this folder. Download it again.")
    return places


def open_model(folder: str | Path) -> dict[str, Tensor]:
    """{name: `Tensor`} of a model folder, checked against its index.

    Raises:
      UserError: see `files_of`; or a file is damaged, or at odds with the index.
    """
    folder = Path(folder)
    tensors: dict[str, Tensor] = {}
    places = set()
    for file in files_of(folder):
        for name, tensor in read_header(file).items():
            tensors[name] = tensor
            places.add((name, file.name))
    promised = places
    if (folder / INDEX).exists():
        promised = set(_index_of(folder).items())
    wrong = sorted(places ^ promised)
    if wrong:
        first_name, _ = wrong[0]
        raise UserError(f"{folder}: index and shards disagree on {len(wrong)} entries, first "
                        f"{first_name}. Download it again.")
    return tensors


def language_prefix(folder: str | Path, tensors: Mapping[str, Tensor],
                    config: architecture.Config) -> str:
    """What the names of the language model's tensors start with, once all of them are checked.

    That is `model.language_model.` in google's files, and `model.` in those of transformers'
    `Gemma4ForCausalLM`. Towers for images and sound may lie beside the language model.

    Args:
      folder: the model's, for the messages.
      tensors: from `open_model`.
      config: a config.json.

    Raises:
      UserError: a tensor that the config asks for is missing, or has another shape or a dtype that
        isn't one of `DTYPES`; or there is one that no part of the model computes with.
    """
    own = {}
    for name, tensor in tensors.items():
        if not name.startswith(TOWERS):
            own[name] = tensor
    if "lm_head.weight" in own:
        raise UserError(f"{folder} has an output matrix of its own (lm_head.weight), but we "
                        "compute a Gemma 4's logits with its embedding. Take a base that has none.")
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in own:
            break
    else:
        raise UserError(f"{folder} has no {PREFIXES[0]}embed_tokens.weight (its first name is "
                        f"{min(own, default='none')}). Take a Gemma4ForCausalLM or "
                        "Gemma4ForConditionalGeneration as transformers saves it.")
    problems = _differences(own, prefix, *architecture.tensors(config))
    if problems:
        text = "; ".join(problems[:3])
        if len(problems) > 3:
            text += f" (and {len(problems) - 3} more)"
        raise UserError(f"the weights in {folder} are not those of its config.json: {text}. "
                        "Take a base whose files fit together.")
    return prefix


def _differences(tensors: Mapping[str, Tensor], prefix: str, needed: architecture.Shapes,
                 unused: architecture.Shapes) -> list[str]:
    """What is missing, what is too much, and what has another shape or dtype, in words."""
    problems = []
    for name in needed:
        if prefix + name not in tensors:
            problems.append(f"{prefix}{name} is missing")
    known = {**needed, **unused}
    shapes = {prefix + name: shape for name, shape in known.items()}
    for name, tensor in tensors.items():
        if name not in shapes:
            problems.append(f"{name} is no part of the model that we compute")
        elif tensor.shape != shapes[name] or tensor.dtype not in DTYPES:
            there = f"{tensor.dtype} {list(tensor.shape)}"
            dtypes = ", ".join(DTYPES)
            ours = f"{list(shapes[name])} in {dtypes}"
            problems.append(f"{name} is {there} instead of {ours}")
    return problems


def fingerprint(folder: str | Path) -> str:
    """SHA-256 that tells models apart in a second, also for 62 GB: not a proof that all is whole.

    It covers config, tokenizer, template, and of each of the model's safetensors files its name,
    its size and 64 evenly spread blocks of 16 KiB; neither the place nor the times of the files.

    Raises:
      UserError: see `files_of`.
    """
    files = files_of(folder)
    for path in Path(folder).iterdir():
        if path.suffix in (".json", ".jinja", ".model"):
            files.append(path)
    result = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        result.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            if path.suffix != ".safetensors":
                result.update(file.read())
                continue
            for block in range(64):
                file.seek(size * block // 64)
                result.update(file.read(1 << 14))
    return result.hexdigest()


def adapters_digest(adapters: Any) -> str:
    """SHA-256 of a run's adapters: over every path, dtype, shape and byte, in the paths' order.

    A damaged checkpoint restores without a word, with other numbers; this notices. What 03 holds
    (`gemma.adapted_modules(model)`, or an NNX state) and what 04 restores from the checkpoint
    (`merge.restore_adapters`) give the same digest for the same adapters.

    Args:
      adapters: {module path: (A, B)}, {module path: {"a": A, "b": B}}, or nested mappings whose
        keys are the parts of the path. Each A and B is an array, or a variable with `get_value()`.
    """
    arrays = dict(_arrays_of(adapters, ()))
    result = hashlib.sha256()
    for path in sorted(arrays):
        array = arrays[path]
        title = f"{path} {array.dtype.name} {list(array.shape)}\n"
        result.update(title.encode())
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
        if path[-1] == "value":  # Orbax keeps a variable's array there
            path = path[:-1]
        letter = path[-1].rpartition("_lora_")[2]  # Qwix: w_lora_a, kernel_lora_a
        if hasattr(tree, "get_value"):
            tree = tree.get_value()
        module = ".".join(path[:-1])
        yield f"{module}.{letter}", np.asarray(tree)
