"""Safetensors files too large to load: headers, identity, checks, copies written block by block.

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the length of a
header, a JSON header with name, dtype, shape and byte range of every tensor, then their bytes,
back to back.
"""

import hashlib
import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from helpers.run import (
    Progress,
    UserError,
    atomic_dir,
    read_json,
    room,
    sha256_file,
    wrong_files,
)

DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
          "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
          "BOOL": np.bool_}


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `start` is its first byte in the file, `stop` the first after it."""

    file: Path
    dtype: str
    shape: tuple
    start: int
    stop: int

    def data(self):
        """Its bytes, uint8, as pages of the file: nothing is read yet."""
        return np.memmap(self.file, np.uint8, "r", self.start, (self.stop - self.start,))

    def array(self):
        """The same as an array of its dtype and shape."""
        return self.data().view(DTYPES[self.dtype]).reshape(self.shape)


def read_header(path, fix="Download it again."):
    """{name: `Tensor`} of a safetensors file, in the order of their bytes.

    Raises:
      UserError: the library finds lengths, offsets or dtypes that do not fit; ends with `fix`.
    """
    try:
        with safe_open(path, "np"):
            pass
    except (SafetensorError, OSError) as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(f"{path} is damaged or cut short ({why}). {fix}") from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    tensors = {name: Tensor(Path(path), entry["dtype"], tuple(entry["shape"]),
                            *(8 + length + offset for offset in entry["data_offsets"]))
               for name, entry in entries.items()}
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def open_model(folder, fix="Download it again."):
    """{name: `Tensor`} of a model folder, checked against its index.

    A large model comes in several files (shards) and an index that says which tensor is in which.
    Neither is believed alone: every shard of the index must exist, every tensor be where it says.

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
        raise UserError(f"{folder} lacks {', '.join(missing)}, which its index names. {fix}")
    found = [(name, file, tensor) for file in files
             for name, tensor in read_header(folder / file, fix).items()]
    where = {(name, file) for name, file, _ in found}
    if promised and (wrong := where ^ set(promised.items())):
        raise UserError(f"{folder}: index and shards disagree on {len(wrong)} entries, "
                        f"first {min(wrong)[0]}. {fix}")
    return {name: tensor for name, _, tensor in found}


def tensor_table(folder):
    """{name: (dtype, shape)} of all safetensors files of a directory, from their headers alone."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: (tensor.dtype, tensor.shape)
            for file in files for name, tensor in read_header(file).items()}


def fingerprint(folder):
    """SHA-256 that tells models apart in a second, also for 62 GB: not a proof that all is whole.

    It covers what makes a model what it is (config, tokenizer, template; safetensors files by name,
    size and 64 evenly spread blocks of 16 KiB, the first of which holds the header's start), and
    neither the place nor the times of the files. `verify` reads every byte.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix not in (".safetensors", ".json", ".jinja", ".model"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            if path.suffix != ".safetensors":
                digest.update(file.read())
                continue
            for block in range(64):
                file.seek(size * block // 64)
                digest.update(file.read(1 << 14))
    return digest.hexdigest()


def verify(folder, expected):
    """Compare the files of a folder with the SHA-256 each should have; returns what is wrong.

    Large files are read once per state (`helpers.run.wrong_files`), so 62 GB are not hashed by
    every notebook.

    Args:
      folder: where the files are.
      expected: {file name: SHA-256 as hexadecimal}.

    Returns:
      {file name: "missing", "changed", or "unexpected"} (a weight file that nobody expects); empty
      if all is well.
    """
    folder = Path(folder)
    there = {name for name in expected if (folder / name).is_file()}
    there |= {file.name for file in folder.glob("*.safetensors")}
    return wrong_files(folder, expected, there)


def write_tensors(path, entries):
    """Write a safetensors file piece by piece, never holding more than one piece.

    Args:
      entries: {name: (dtype such as "F32", shape, arrays that hold its values in a row)}.
    """
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, _) in entries.items():
        end = position + math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, pieces in entries.values():
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).view(np.uint8))


def rewrite(base, out, changed, change, block_bytes):
    """Copy a model folder to `out`, letting `change` replace the values of some matrices.

    Order, layout and headers stay, and every other tensor and file, byte for byte. The folder
    appears when it is complete.

    Args:
      changed: names of the matrices to change, [rows, columns].
      change: function of (name, some of its rows, the index of the first) that returns those rows.
      block_bytes: how many bytes of rows, counted in float32, are handed over at a time. One block
        is computed while the one before is hashed and written, so memory does not grow with size.

    Returns:
      ({file: SHA-256}, {tensor: {"base": SHA-256, and "merged": SHA-256 if it was changed}}).

    Raises:
      UserError: the disk is too small or full.
    """
    base, out, hashes = Path(base), Path(out), {}
    tensors = open_model(base)
    assert set(changed) <= set(tensors), set(changed) - set(tensors)
    shards = sorted({tensor.file for tensor in tensors.values()})
    total = sum(shard.stat().st_size for shard in shards)
    room(out.parent, 1.01 * total, f"{out.name}/")
    progress = Progress(total >> 20, "MiB written:")
    with atomic_dir(out) as folder:
        files = {shard.name: _rewrite_file(shard, folder / shard.name, changed, change, block_bytes,
                                           hashes, progress) for shard in shards}
        for side in sorted(base.iterdir()):
            if side.is_file() and side.suffix not in (".safetensors", ".bin", ".gguf"):
                shutil.copyfile(side, folder / side.name)
                files[side.name] = sha256_file(side)
    return files, hashes


def _rewrite_file(source, target, changed, change, block_bytes, hashes, progress):
    """One shard, from its first byte to its last; fills `hashes`, returns the file's SHA-256."""
    tensors, whole, written = read_header(source), hashlib.sha256(), 0
    with open(source, "rb") as file:
        header = file.read(min(tensor.start for tensor in tensors.values()))
    with open(target, "wb") as out, ThreadPoolExecutor(4) as pool:
        whole.update(header)
        out.write(header)
        for name, tensor in tensors.items():
            before, after, pending = hashlib.sha256(), hashlib.sha256(), []
            for old, new in _blocks(name, tensor, name in changed and change, block_bytes):
                for job in pending:  # one block in flight: bounded memory, order kept
                    job.result()
                jobs = [(before.update, old), (whole.update, new), (out.write, new)]
                jobs += [(after.update, new)] if name in changed else []
                pending = [pool.submit(call, block) for call, block in jobs]
            for job in pending:
                job.result()
            hashes[name] = {"base": before.hexdigest()}
            if name in changed:
                hashes[name]["merged"] = after.hexdigest()
            written += tensor.stop - tensor.start
            if written >> 20:
                progress.update(written >> 20)
                written %= 1 << 20
    return whole.hexdigest()


def _blocks(name, tensor, change, block_bytes):
    """(old bytes, new bytes) of a tensor, block by block; the same object where nothing changes."""
    data = tensor.data()
    if not change:
        for start in range(0, len(data), block_bytes):
            yield (data[start:start + block_bytes],) * 2
        return
    rows, columns = tensor.shape
    count = next(n for n in range(-(-4 * rows * columns // block_bytes), rows + 1)
                 if n > 0 and rows % n == 0)  # equal blocks: JAX compiles once per shape
    step, array = rows // count, tensor.array()
    for first in range(0, rows, step):
        old = array[first:first + step]
        new = np.ascontiguousarray(change(name, old, first))
        yield old.reshape(-1).view(np.uint8), new.reshape(-1).view(np.uint8)


def storage_of(recipe, into="dequantized"):
    """How a run's base was stored, and a function that makes rows of the files what it trained on.

    Args:
      recipe: 03's; one that says nothing is of a bfloat16 base.
      into: "dequantized", or "bfloat16" to leave rows as they are.

    Returns:
      ("" or a name such as "nf4, tiles of 32", rows [outputs, inputs] -> rows).

    Raises:
      UserError: another `into`.
    """
    if into not in ("dequantized", "bfloat16"):
        raise UserError(f'into={into!r} is unknown. Choose "dequantized" or "bfloat16".')
    dtype, tile = recipe.get("base_dtype", "bfloat16"), recipe.get("tile_size", 0)
    name = "" if dtype == "bfloat16" else f"{dtype}, tiles of {tile}" if tile else dtype
    if not name or into == "bfloat16":
        return name, lambda rows: rows
    from appendix import quantized  # imports the model's libraries, which nothing else here needs
    return name, lambda rows: quantized.dequantized_rows(rows, dtype, tile, recipe["dtype"])
