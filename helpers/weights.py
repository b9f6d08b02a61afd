"""Safetensors files that are too large to load: where each tensor lies, and which model it is.

A file (https://github.com/huggingface/safetensors#format) begins with 8 bytes that hold the length
of a header. Then comes the header, JSON with the name, dtype, shape and byte range of every tensor,
and then the bytes of all tensors, back to back.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from helpers.run import UserError
from tables import architecture

# {as safetensors names it: NumPy's} of the dtypes that we load and merge
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PREFIXES = ("model.language_model.", "model.")  # of the language model's tensors
TOWERS = (
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "model.vision_embedder.",  # the 12B's
)


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    stop: int   # the first byte after it

    def array(self, mode: Literal["r", "r+"] = "r") -> np.ndarray:
        """The tensor as pages of its file: nothing is read yet. With "r+", changes are written."""
        size = self.stop - self.start
        data = np.memmap(self.file, np.uint8, mode, self.start, size)
        dtype = DTYPES[self.dtype]
        numbers = data.view(dtype)
        return numbers.reshape(self.shape)


def read_header(path: Path) -> dict[str, Tensor]:
    """{name: `Tensor`} of a safetensors file.

    Raises:
      UserError: the library finds lengths, offsets or dtypes that don't fit.
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
    data = 8 + length  # where the tensors' bytes begin
    tensors = {}
    for name, entry in entries.items():
        first, end = entry["data_offsets"]
        tensors[name] = Tensor(
            file=path,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=data + first,
            stop=data + end,
        )
    return tensors


def files_of(folder: str | Path) -> list[Path]:
    """A model's safetensors files, in the order of their names. `names_of` says which they are.

    A large model comes in several files (shards), and an index says which tensor is in which file.
    Without an index, it's model.safetensors. Other safetensors files in the folder are refused,
    because every program picks in its own way: one would train one set of weights, and the next
    would change the other set.

    Raises:
      UserError: this isn't a model folder, or its index can't be used, or a file that the index
        names is missing, or there's a .safetensors file that it doesn't name.
    """
    folder = Path(folder)
    names = names_of(folder)
    source = SINGLE
    if (folder / INDEX).exists():
        source = INDEX
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

    The files needn't be there yet, because `remote.stage` asks this which ones to fetch.

    Raises:
      UserError: there's an index, and it can't be used.
    """
    folder = Path(folder)
    if not (folder / INDEX).exists():
        return [SINGLE]
    places = _index_of(folder)
    return sorted(set(places.values()))


def _index_of(folder: Path) -> dict[str, str]:
    """{tensor: file} of a folder's index.

    Raises:
      UserError: it isn't JSON, or names no files, or names one that isn't a safetensors file here.
    """
    path = folder / INDEX
    try:
        text = path.read_text(encoding="utf-8")
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}). Download it again.") from error

    places = None
    if isinstance(index, dict):
        places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
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
    places = set()  # (tensor, file) as the files have it
    for file in files_of(folder):
        header = read_header(file)
        for name, tensor in header.items():
            tensors[name] = tensor
            places.add((name, file.name))

    promised = places  # and as the index has it
    if (folder / INDEX).exists():
        promised = set(_index_of(folder).items())
    wrong = sorted(places ^ promised)
    if wrong:
        first_name, _ = wrong[0]
        raise UserError(f"{folder}: index and shards disagree on {len(wrong)} entries, first "
                        f"{first_name}. Download it again.")
    return tensors


def first_three(problems: Sequence[str]) -> str:
    """Up to three problems in one line, and how many more there are."""
    text = "; ".join(problems[:3])
    if len(problems) > 3:
        text += f" (and {len(problems) - 3} more)"
    return text


def language_prefix(
    folder: str | Path, tensors: Mapping[str, Tensor], config: architecture.Config
) -> str:
    """Check the language model's tensors, and return what their names start with.

    That's `model.language_model.` in google's files, and `model.` in the files of transformers'
    `Gemma4ForCausalLM`. Towers for images and sound may lie beside the language model.

    Args:
      folder: the model's, for the messages.
      tensors: from `open_model`.
      config: a config.json.

    Raises:
      UserError: a tensor that the config asks for is missing, or has another shape or a dtype that
        isn't one of `DTYPES`; or there's one that no part of the model computes with.
    """
    of_language = {}
    for name, tensor in tensors.items():
        if not name.startswith(TOWERS):
            of_language[name] = tensor
    if "lm_head.weight" in of_language:
        raise UserError(f"{folder} has an output matrix of its own (lm_head.weight), but we "
                        "compute a Gemma 4's logits with its embedding. Take a base that has none.")

    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in of_language:
            break
    else:
        first_name = min(of_language, default="none")
        raise UserError(f"{folder} has no {PREFIXES[0]}embed_tokens.weight (its first name is "
                        f"{first_name}). Take a Gemma4ForCausalLM or "
                        "Gemma4ForConditionalGeneration as transformers saves it.")

    needed, unused = architecture.tensors(config)
    problems = _differences(of_language, prefix, needed, unused)
    if problems:
        raise UserError(f"the weights in {folder} are not those of its config.json: "
                        f"{first_three(problems)}. Take a base whose files fit together.")
    return prefix


def _differences(
    tensors: Mapping[str, Tensor],
    prefix: str,
    needed: architecture.Shapes,
    unused: architecture.Shapes,
) -> list[str]:
    """What is missing, what is too much, and what has another shape or dtype, in words."""
    problems = []
    shapes = {}
    for name, shape in needed.items():
        whole_name = prefix + name
        shapes[whole_name] = shape
        if whole_name not in tensors:
            problems.append(f"{whole_name} is missing")
    for name, shape in unused.items():
        shapes[prefix + name] = shape

    dtypes = ", ".join(DTYPES)
    for name, tensor in tensors.items():
        if name not in shapes:
            problems.append(f"{name} is no part of the model that we compute")
            continue
        shape = shapes[name]
        if tensor.shape != shape or tensor.dtype not in DTYPES:
            actual = f"{tensor.dtype} {list(tensor.shape)}"
            expected = f"{list(shape)} in {dtypes}"
            problems.append(f"{name} is {actual} instead of {expected}")
    return problems


def fingerprint(folder: str | Path) -> str:
    """A SHA-256 that tells models apart. It takes a second, even for 62 GB.

    It covers config, tokenizer and template, and of each of the model's safetensors files its name,
    its size and 64 evenly spread blocks of 16 KiB. So it doesn't prove that every byte is whole.
    Where the files lie, and how old they are, doesn't matter.

    Raises:
      UserError: see `files_of`.
    """
    files = files_of(folder)
    for path in Path(folder).iterdir():
        describes_model = path.suffix in (".json", ".jinja", ".model")
        if describes_model:
            files.append(path)
    result = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        title = f"{path.name} {size} "
        result.update(title.encode())
        with open(path, "rb") as file:
            if path.suffix != ".safetensors":
                result.update(file.read())
                continue
            for block in range(64):
                start = size * block // 64
                file.seek(start)
                result.update(file.read(1 << 14))
    return result.hexdigest()


def adapters_digest(adapters: Any) -> str:
    """SHA-256 of a run's adapters: over every path, dtype, shape and byte, in the paths' order.

    A damaged checkpoint can be restored without an error, but with other numbers. The digest tells.
    What 03 holds (`gemma.adapted_modules(model)`, or an NNX state) and what 04 restores from the
    checkpoint (`merge.restore_adapters`) have the same digest if they're the same adapters.

    Args:
      adapters: {module path: (A, B)}, {module path: {"a": A, "b": B}}, or nested mappings whose
        keys are the parts of the path. Each A and B is an array, or a variable with `get_value()`.
    """
    arrays = dict(_arrays_of(adapters, ()))
    result = hashlib.sha256()
    for path in sorted(arrays):
        array = arrays[path]
        shape = list(array.shape)
        title = f"{path} {array.dtype.name} {shape}\n"
        result.update(title.encode())
        result.update(array.tobytes())
    return result.hexdigest()


def _arrays_of(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """(path, array) of every array: `layers.0.attn.q_einsum.a`, however Qwix and Orbax spell it."""
    if isinstance(tree, Mapping):
        for key, branch in tree.items():
            inner_path = (*path, str(key))
            yield from _arrays_of(branch, inner_path)
    elif isinstance(tree, tuple):
        a, b = tree
        yield from _arrays_of(a, (*path, "a"))
        yield from _arrays_of(b, (*path, "b"))
    else:
        if path[-1] == "value":  # Orbax keeps a variable's array there
            path = path[:-1]
        *parts, name = path
        module = ".".join(parts)
        _, _, letter = name.rpartition("_lora_")  # Qwix: w_lora_a, kernel_lora_a
        array = tree
        if hasattr(tree, "get_value"):
            array = tree.get_value()
        yield f"{module}.{letter}", np.asarray(array)
