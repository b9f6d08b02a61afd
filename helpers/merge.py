"""The merge: a checkpoint's adapters added to the weights, and the same adapters for PEFT.

Notebook 04 shows the algebra and proves it. No model is built and no chip is used. Letters:
r rank, [in, r] and [r, out] are the two matrices of an adapter.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pandas as pd
from safetensors.numpy import save_file

from helpers import weights
from helpers.records import Merge, Recipe
from helpers.run import (
    DamagedError, Progress, UserError, atomic_dir, changed, damaged_notes, digest, hashes, is_a_bug,
    room, run_dir, write_json)
from tables import architecture
from tables.architecture import Module

Folder = str | Path
Pair = tuple[np.ndarray, np.ndarray]
Adapters = dict[str, Pair]  # (A, B) by a module's path, or by a tensor's name
RowsAsTrained = Callable[[np.ndarray], np.ndarray]
# What Orbax raises for a step that is damaged; for some of its files it is a plain `Exception`.
TORN = (ValueError, OSError, KeyError, AttributeError, TypeError, DamagedError)
BLOCK = 1_024  # rows of a matrix that are in memory at a time


# ── What 03 left ──


def restore_adapters(folder: Folder, step: int) -> tuple[int, Adapters, dict[str, Any]]:
    """The adapters of a checkpoint, without a model, whatever devices wrote it.

    Args:
      folder: of Orbax's checkpoints, local or gs://.
      step: of one of them; 0 is the newest.

    Returns:
      (step, {module path: (A, B)} in float32, what 03 noted with the checkpoint: its recipe then).

    Raises:
      UserError: there is no such step, or it cannot be read.
    """
    if "://" not in str(folder):
        if not Path(folder).is_dir():
            raise UserError(f"{folder} is missing. Run 03_train.py first.")
        folder = Path(folder).resolve()
    handlers = {"model_params": ocp.PyTreeCheckpointHandler()}
    with damaged_notes(folder):
        opened = ocp.CheckpointManager(folder, item_handlers=handlers)
    with opened as manager:
        steps = sorted(manager.all_steps())
        step = step or max(steps, default=0)
        if step not in steps:
            raise UserError(f"{folder} has no finished step {step}; it has {steps}. Set "
                            "Settings.step to one of them, or run 03_train.py.")
        try:
            tree, notes = _read(manager, step)
        except Exception as error:
            known = type(error) is Exception or isinstance(error, TORN)
            if is_a_bug(error) or not known:
                raise
            text = str(error) or type(error).__name__
            why = text.splitlines()[0][:150]
            raise UserError(f"step {step} in {folder} cannot be read: {why}\nSet Settings.step to "
                            f"another of {steps}, or run 03_train.py again.") from error
    return step, _pairs(tree), notes


def _read(manager: ocp.CheckpointManager, step: int) -> tuple[Any, dict[str, Any]]:
    """(tree of NumPy arrays, notes) of a step."""
    described = manager.item_metadata(step).get("model_params")
    if described is None:
        raise DamagedError("nothing describes its arrays")
    shapes = described.tree
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    plan = jax.tree.map(lambda _: as_numpy, shapes)
    arrays = ocp.args.PyTreeRestore(restore_args=plan)
    restored = manager.restore(step, args=ocp.args.Composite(model_params=arrays))
    noted = manager.metadata(step).custom_metadata or {}
    if not isinstance(noted, dict):
        raise DamagedError("its notes aren't what was saved")
    return restored["model_params"], noted.get("recipe", {})


def _pairs(tree: Any) -> Adapters:
    """{module path: (A, B)} in float32 of a restored tree."""
    matrices: dict[str, dict[str, np.ndarray]] = {}
    for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [str(key.key) for key in keys]
        if parts[-1] == "value":
            parts.pop()
        module = ".".join(parts[:-1])
        letter = parts[-1].rpartition("_lora_")[2]
        pair = matrices.setdefault(module, {})
        pair[letter] = np.asarray(array, np.float32)
    return {module: (pair["a"], pair["b"]) for module, pair in matrices.items()}


def check_digest(adapters: Adapters, step: int, recipe: Recipe) -> None:
    """Refuse adapters that aren't those that 03 saved: a damaged file can be restored, too.

    Args:
      adapters, step: from `restore_adapters`.
      recipe: 03's. It has the digest of the last step; of an earlier one none is known here.

    Raises:
      UserError: the digest is another.
    """
    known = recipe.adapter_sha256
    if step != recipe.final_step or not known:
        return
    if weights.adapters_digest(adapters) != known:
        raise UserError(f"the adapters of step {step} are not those that 03 saved: a file of this "
                        "checkpoint has changed. Set Settings.step to another checkpoint, or run "
                        "03_train.py again.")


def targets_of(base: Folder, adapters: Adapters, recipe: Recipe) -> list[Module]:
    """The modules that get a delta: all of the config's, or those that 03 adapted on purpose."""
    listed = architecture.modules(architecture.read_config(base))
    if not recipe.partial:
        return listed
    return [module for module in listed if module.path in adapters]


def check(targets: list[Module], adapters: Adapters, tensors: Mapping[str, weights.Tensor],
          prefix: str, recipe: Recipe, notes: dict[str, Any]) -> None:
    """Refuse unless every adapter has its place, every place its adapter, and all shapes agree.

    Args:
      targets: from `targets_of`.
      adapters, notes: from `restore_adapters`.
      tensors: of the base, from `weights.open_model`; their names start with `prefix`.
      recipe: 03's.

    Raises:
      UserError: names up to three differences.
    """
    wanted = {target.path: target for target in targets}
    problems = []
    for path in sorted(wanted.keys() - adapters.keys()):
        problems.append(f"{path} has no adapter")
    for path in sorted(adapters.keys() - wanted.keys()):
        problems.append(f"adapter {path} has no place")
    for key, ours in (("rank", recipe.rank), ("alpha", recipe.alpha)):
        if notes.get(key, ours) != ours:
            problems.append(f"recipe says {key} {ours}, the checkpoint {notes[key]}")
    for path in sorted(wanted.keys() & adapters.keys()):
        target = wanted[path]
        problems += _adapter_problems(target, adapters[path], recipe.rank)
        problems += _base_problems(target, tensors, prefix)
    trained = any(b.any() for _, b in adapters.values())
    if not problems and not trained:
        problems.append("every B is zero, so it was saved before the first step")
    if problems:
        text = "; ".join(problems[:3])
        if len(problems) > 3:
            text += f" (and {len(problems) - 3} more)"
        raise UserError(f"checkpoint and base do not fit: {text}. Check Settings.base and "
                        "Settings.step, or run 03_train.py.")


def _adapter_problems(target: Module, pair: Pair,
                      rank: int) -> list[str]:
    """What is wrong with the A and B of a module."""
    problems = []
    for letter, array, shape in zip("AB", pair, target.adapter(rank), strict=True):
        if array.shape != shape:
            problems.append(f"{target.path} {letter} is {array.shape}, rank {rank} needs {shape}")
        elif not np.isfinite(array).all():
            problems.append(f"{target.path} {letter} has NaN or Inf")
    return problems


def _base_problems(target: Module, tensors: Mapping[str, weights.Tensor],
                   prefix: str) -> list[str]:
    """What is wrong with the base's matrices of a module."""
    problems = []
    for name, shape in target.names.items():
        tensor = tensors.get(f"{prefix}{name}.weight")
        there = tensor and (tensor.dtype, tensor.shape)
        fits = tensor and tensor.shape == shape and tensor.dtype in weights.DTYPES
        if not fits:
            dtypes = ", ".join(weights.DTYPES)
            problems.append(f"base {name} is {there}, expected {shape} in {dtypes}")
    return problems


# ── The algebra ──


def plan_merge(targets: list[Module], adapters: Adapters, prefix: str) -> Adapters:
    """{name of a tensor in the base: (A [in, r], B [r, out])}, every adapter exactly once."""
    plan = {}
    for target in targets:
        for name, pair in target.factors(*adapters[target.path]).items():
            plan[f"{prefix}{name}.weight"] = pair
    return plan


def add_delta(rows: np.ndarray, a: np.ndarray, b: np.ndarray,
              scale: float) -> Pair:
    """rows [m, in] + scale · (a [in, r] b [r, m])ᵀ in float32, rounded once.

    Returns:
      (the sum in the dtype of `rows`, squared norms of the rows, the delta and the rounding).
    """
    base = rows.astype(np.float32)
    delta = np.float32(scale) * (b.T @ a.T)
    merged = (base + delta).astype(rows.dtype)
    lost = merged.astype(np.float32) - (base + delta)
    squares = [np.vdot(part, part) for part in (base, delta, lost)]
    return merged, np.array(squares, np.float64)


def files_to_copy(base: Folder) -> list[Path]:
    """The files of a base that the merged model needs: its weights, and all that isn't weights.

    Raises:
      UserError: see `weights.files_of`.
    """
    files = weights.files_of(base)
    for path in Path(base).iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".gguf"):
            files.append(path)
    return sorted(files)


def merge_model(base: Folder, out: Folder, plan: Adapters, scale: float,
                as_trained: RowsAsTrained | None = None) -> pd.DataFrame:
    """Copy a model folder to `out`, then change the planned matrices in the copy.

    Every other byte is the base's. The folder appears when it is complete.

    Args:
      base, out: model folders.
      plan: from `plan_merge`.
      scale: alpha / rank.
      as_trained: None, or rows of a file -> the rows that training multiplied with (11).

    Returns:
      A table with a row per matrix: `tensor` and the norms `base`, `delta` and `rounding`.

    Raises:
      UserError: the disk is too small or full, or a matrix holds NaN or Inf.
    """
    out = Path(out)
    tensors = weights.open_model(base)
    files = files_to_copy(base)
    total = sum(path.stat().st_size for path in files)
    room(out.parent, 1.01 * total, f"{out.name}/")
    norms = []
    progress = Progress(len(plan), "matrices merged")
    with atomic_dir(out, ours="config.json") as folder:
        for path in files:
            shutil.copyfile(path, folder / path.name)
        for name, (a, b) in plan.items():
            original = tensors[name]
            copied = replace(original, file=folder / original.file.name)
            matrix = copied.array("r+")
            sums = _merge_matrix(matrix, a, b, scale, as_trained)
            if not np.isfinite(sums).all():
                raise UserError(f"{base}: {name} has NaN or Inf. Download it again.")
            lengths = np.sqrt(sums).tolist()
            norms.append((name, *lengths))
            progress.update()
    return pd.DataFrame(norms, columns=["tensor", "base", "delta", "rounding"])


def _merge_matrix(matrix: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float,
                  as_trained: RowsAsTrained | None) -> np.ndarray:
    """Change a matrix [out, in] of a file in place; returns the squared norms of `add_delta`."""
    sums = np.zeros(3)
    for first in range(0, len(matrix), BLOCK):
        part = slice(first, first + BLOCK)
        rows = matrix[part]
        if as_trained:
            rows = as_trained(rows)
        matrix[part], squares = add_delta(rows, a, b[:, part], scale)
        sums += squares
    return sums


# ── What is written ──


def peft_tensors(targets: list[Module], adapters: Adapters,
                 prefix: str) -> dict[str, np.ndarray]:
    """{name: array} of adapter_model.safetensors: lora_A [r, in] and lora_B [out, r] per matrix."""
    tensors = {}
    for target in targets:
        factors = target.factors(*adapters[target.path])
        if target.kind == "k_einsum":  # for vLLM, whose adapter for k_proj reaches K only
            for name, pair in list(factors.items()):
                factors[name.replace("k_proj", "v_proj")] = pair
        for name, (a, b) in factors.items():
            start = f"base_model.model.{prefix}{name}"
            tensors[f"{start}.lora_A.weight"] = a.T.copy()
            tensors[f"{start}.lora_B.weight"] = b.T.copy()
    return tensors


def write_adapter(out: Folder, targets: list[Module], adapters: Adapters,
                  recipe: Recipe, prefix: str) -> None:
    """Write the adapters as PEFT stores them.

    Args:
      out: the folder.
      targets, adapters, prefix: as for `check`.
      recipe: 03's.
    """
    pattern = architecture.PEFT_TARGETS  # the language model's layers only
    if recipe.partial:  # else PEFT would make random adapters for what was left out
        names: list[str] = []
        for target in targets:
            names += map(re.escape, target.names)
        one_of_them = "|".join(sorted(names))
        pattern = rf"model\.(language_model\.)?({one_of_them})"
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "base_model_name_or_path": recipe.base_model,
        "inference_mode": True,
        "target_modules": pattern,
    }
    with atomic_dir(out, ours="adapter_config.json") as folder:
        tensors = peft_tensors(targets, adapters, prefix)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(folder / "adapter_config.json", config)


def run(base: Folder, targets: list[Module], adapters: Adapters, step: int,
        recipe: Recipe, prefix: str,
        as_trained: RowsAsTrained | None = None) -> Merge:
    """Make `merged/`, `adapter/` and `merge.json` of the run directory, unless they are current.

    `merge.json` has what they were made from (`inputs`) and the SHA-256 of every file. It comes
    last, so what it describes is finished. A folder whose files are whole isn't made again because
    the other one's aren't.

    Args:
      base: the base's folder.
      targets, adapters, prefix: as for `check`.
      step, recipe: of the checkpoint, and 03's.
      as_trained: as for `merge_model`.

    Returns:
      The `Merge`.
    """
    path = run_dir("merge.json")
    merged = run_dir("merged")
    adapter = run_dir("adapter")
    scale = recipe.scale
    inputs = inputs_of(base, adapters, step, recipe)
    record = Merge.load_if_whole(path)  # a damaged one is written again, here
    norms = None
    if record and record.inputs == inputs:
        bad = changed(merged, record.files)
        bad_adapter = changed(adapter, record.adapter_files)
        if not bad and not bad_adapter:
            print(f"{merged} is current: same checkpoint, base and recipe, every file whole")
            return record
        for name, what in (bad | bad_adapter).items():
            print(f"{name} is {what}: making all of its folder again")
        if not bad:
            norms = record.norms
    if norms is None:
        plan = plan_merge(targets, adapters, prefix)
        norms = merge_model(base, merged, plan, scale, as_trained).to_dict("records")
    write_adapter(adapter, targets, adapters, recipe, prefix)
    record = Merge(inputs=inputs, step=step, scale=scale, base=str(base), recipe=recipe,
                   files=hashes(merged), adapter_files=hashes(adapter), norms=norms)
    record.save(path)
    return record


def inputs_of(base: Folder, adapters: Adapters, step: int,
              recipe: Recipe) -> dict[str, Any]:
    """What decides every byte that 04 writes: equal inputs give equal files."""
    pairs = {}
    for name, (a, b) in adapters.items():
        both = a.tobytes() + b.tobytes()
        pairs[name] = hashlib.sha256(both).hexdigest()
    return {
        "step": step,
        "base": weights.fingerprint(base),
        "recipe": digest(recipe.to_json()),
        "adapters": digest(pairs),
    }
