"""The merge: a checkpoint's adapters are added to the weights, and also written as PEFT's.

Notebook 04 shows the algebra and proves it. No model is built and no chip is used. Letters in shape
comments: r rank; an adapter's matrices are A [in, r] and B [r, out], the base's is W [out, in].
"""

import hashlib
import json
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

from helpers import remote, weights
from helpers.records import OLDER, DataMeta, Merge, Recipe
from helpers.run import (
    DamagedError, Progress, UserError, atomic_dir, changed, damaged, damaged_notes, digest, hashes,
    room, run_dir, write_json)
from tables import architecture
from tables.architecture import Module

Folder = str | Path
Pair = tuple[np.ndarray, np.ndarray]
Adapters = dict[str, Pair]  # (A, B) by a module's path, or by a tensor's name
RowsAsTrained = Callable[[np.ndarray], np.ndarray]
BLOCK = 1_024  # rows of a matrix that are in memory at a time


# ── What 03 left ──


def restore_adapters(folder: Folder, step: int) -> tuple[int, Adapters, dict[str, Any]]:
    """The adapters of a checkpoint. It needs no model, and works whatever devices wrote them.

    Args:
      folder: of Orbax's checkpoints, local or gs://.
      step: of one of them; 0 is the newest.

    Returns:
      (step, {module path: (A, B)} in float32, the recipe that 03 noted with the checkpoint).

    Raises:
      UserError: there's no such step, or it can't be read.
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
        if not step:
            step = max(steps, default=0)
        if step not in steps:
            raise UserError(f"{folder} has no finished step {step}; it has {steps}. Set "
                            "Settings.step to one of them, or run 03_train.py.")
        try:
            tree, notes = _read(manager, step)
        except DamagedError as why:
            raise UserError(f"step {step} in {folder} cannot be read: {why}\nSet "
                            f"Settings.step to another of {steps}, or run 03_train.py again."
                            ) from why
    return step, _pairs(tree), notes


def _read(manager: ocp.CheckpointManager, step: int) -> tuple[Any, dict[str, Any]]:
    """(tree of NumPy arrays, notes) of a step.

    Raises:
      DamagedError: it's damaged.
    """
    with damaged():
        items = manager.item_metadata(step)
    described = items.get("model_params")
    if described is None:
        raise DamagedError("nothing describes its arrays")
    shapes = described.tree
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    plan = jax.tree.map(lambda _: as_numpy, shapes)
    arrays = ocp.args.PyTreeRestore(restore_args=plan)
    wanted = ocp.args.Composite(model_params=arrays)
    with damaged():
        restored = manager.restore(step, args=wanted)
    with damaged():
        noted = manager.metadata(step).custom_metadata
    if not noted:
        noted = {}
    if not isinstance(noted, dict):
        raise DamagedError("its notes aren't what was saved")
    recipe = noted.get("recipe", {})
    return restored["model_params"], recipe


def _pairs(tree: Any) -> Adapters:
    """{module path: (A, B)} in float32 of a restored tree."""
    matrices: dict[str, dict[str, np.ndarray]] = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    for keys, array in leaves:
        path = [str(key.key) for key in keys]
        if path[-1] == "value":  # Orbax keeps a variable's array there
            path.pop()
        name = path.pop()
        module = ".".join(path)
        _, _, letter = name.rpartition("_lora_")  # Qwix: w_lora_a, kernel_lora_a
        pair = matrices.setdefault(module, {})
        pair[letter] = np.asarray(array, np.float32)

    adapters: Adapters = {}
    for module, pair in matrices.items():
        a, b = pair["a"], pair["b"]
        adapters[module] = (a, b)
    return adapters


def check_digest(adapters: Adapters, step: int, recipe: Recipe) -> None:
    """Refuse adapters that aren't those that 03 saved: a damaged file can be restored, too.

    Args:
      adapters, step: from `restore_adapters`.
      recipe: 03's. It only has the digest of the last step, so earlier steps aren't checked.

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


def adapters_of(recipe: Recipe, step: int = 0) -> tuple[int, Adapters, dict[str, Any]]:
    """The adapters of a run of 03, checked: `restore_adapters` and `check_digest`.

    Args:
      recipe: 03's. It says where the checkpoints are.
      step: of a checkpoint; 0 is the one that 03 finished with.

    Raises:
      UserError: as these two.
    """
    folder: Folder = recipe.checkpoints  # gs://..., or below the run directory
    if "://" not in recipe.checkpoints:
        folder = run_dir(recipe.checkpoints)
    if not step:
        step = recipe.final_step
    step, adapters, notes = restore_adapters(folder, step)
    check_digest(adapters, step, recipe)  # not a byte has changed since
    return step, adapters, notes


def base_of(recipe: Recipe, place: str = "") -> Path:
    """The folder of the base that 03 trained on, fetched if need be.

    Args:
      place: another copy of it; empty is where 03 found it.

    Raises:
      UserError: it's another model, by its fingerprint.
    """
    base = remote.stage(place or recipe.base_path)
    if weights.fingerprint(base) != recipe.base_sha256:
        raise UserError(f"{base} is not the model that notebook 03 trained on. Set Settings.base "
                        "to that one, or run 03_train.py with this one.")
    return base


def targets_of(base: Folder, adapters: Adapters, recipe: Recipe) -> list[Module]:
    """The modules that get a delta: all of the config's, or those that 03 adapted on purpose."""
    config = architecture.read_config(base)
    listed = architecture.modules(config)
    if not recipe.partial:
        return listed
    return [module for module in listed if module.path in adapters]


def check(
    targets: list[Module],
    adapters: Adapters,
    tensors: Mapping[str, weights.Tensor],
    prefix: str,
    recipe: Recipe,
    notes: dict[str, Any],
) -> None:
    """Refuse to merge unless every adapter has its place, every place its adapter, and shapes fit.

    Args:
      targets: from `targets_of`.
      adapters, notes: from `restore_adapters`.
      tensors: of the base, from `weights.open_model`; their names start with `prefix`.
      recipe: 03's.

    Raises:
      UserError: names up to three differences.
    """
    places = {target.path: target for target in targets}
    problems = []
    for path in sorted(places.keys() - adapters.keys()):
        problems.append(f"{path} has no adapter")
    for path in sorted(adapters.keys() - places.keys()):
        problems.append(f"adapter {path} has no place")
    if notes:
        problems += _recipe_problems(recipe, notes)

    for path in sorted(places.keys() & adapters.keys()):
        target = places[path]
        problems += _adapter_problems(target, adapters[path], recipe.rank)
        problems += _base_problems(target, tensors, prefix)
    if not problems and not _is_trained(adapters):
        problems.append("every B is zero, so it was saved before the first step")
    if problems:
        raise UserError(f"checkpoint and base do not fit: {weights.first_three(problems)}. Check "
                        "Settings.base and Settings.step, or run 03_train.py.")


# What the checkpoint's own notes have to say as well, because it decides what a merge writes.
NOTED = ("rank", "alpha", "dtype", "base_dtype")


def _recipe_problems(recipe: Recipe, notes: dict[str, Any]) -> list[str]:
    """Where 03's recipe.json and the notes of the checkpoint disagree, in words."""
    problems = []
    for name in NOTED:
        written = getattr(recipe, name)
        in_older = OLDER.get(name, written)
        noted = notes.get(name, in_older)
        if noted != written:
            here = written or "nothing"
            there = noted or "nothing"
            problems.append(f"recipe says {name} {here}, the checkpoint {there}")
    return problems


def _is_trained(adapters: Adapters) -> bool:
    """Has a step changed the adapters? Before the first one every B is zero."""
    for _, b in adapters.values():
        if b.any():
            return True
    return False


def _adapter_problems(target: Module, pair: Pair, rank: int) -> list[str]:
    """What is wrong with the A and B of a module, in words."""
    problems = []
    a, b = pair
    a_shape, b_shape = target.adapter(rank)
    for letter, array, shape in (("A", a, a_shape), ("B", b, b_shape)):
        name = f"{target.path} {letter}"
        if array.shape != shape:
            problems.append(f"{name} is {array.shape}, rank {rank} needs {shape}")
            continue
        is_finite = np.isfinite(array)
        if not is_finite.all():
            problems.append(f"{name} has NaN or Inf")
    return problems


def _base_problems(
    target: Module, tensors: Mapping[str, weights.Tensor], prefix: str
) -> list[str]:
    """What is wrong with the base's matrices of a module, in words."""
    dtypes = ", ".join(weights.DTYPES)
    problems = []
    for name, shape in target.names.items():
        tensor = tensors.get(f"{prefix}{name}.weight")
        actual = None
        fits = False
        if tensor:
            actual = (tensor.dtype, tensor.shape)
            fits = tensor.shape == shape and tensor.dtype in weights.DTYPES
        if not fits:
            problems.append(f"base {name} is {actual}, expected {shape} in {dtypes}")
    return problems


# ── The algebra ──


def plan_merge(targets: list[Module], adapters: Adapters, prefix: str) -> Adapters:
    """{name of a tensor in the base: (A [in, r], B [r, out])}, every adapter exactly once."""
    plan: Adapters = {}
    for target in targets:
        a, b = adapters[target.path]
        for name, pair in target.factors(a, b).items():
            plan[f"{prefix}{name}.weight"] = pair
    return plan


def without_adapters(base: Folder, adapters: Adapters, prefix: str) -> Adapters:
    """As `plan_merge`, for the matrices that 03 left without adapters on purpose: rank 0.

    A quantized base is quantized there, too. So these matrices have to be written as the run
    multiplied with them, though nothing is added.
    """
    plan: Adapters = {}
    config = architecture.read_config(base)
    for module in architecture.modules(config):
        if module.path in adapters:
            continue
        for name, (outputs, inputs) in module.names.items():
            a = np.zeros((inputs, 0), np.float32)
            b = np.zeros((0, outputs), np.float32)
            plan[f"{prefix}{name}.weight"] = a, b
    return plan


def add_delta(
    rows: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """rows [m, in] + scale · (a [in, r] b [r, m])ᵀ in float32, rounded once.

    Returns:
      (the sum [m, in] in the dtype of `rows`, three squared norms in float64: of the rows, of the
      delta and of what the rounding changed).
    """
    base = rows.astype(np.float32)
    delta = np.float32(scale) * (b.T @ a.T)
    exact = base + delta
    merged = exact.astype(rows.dtype)
    rounding = merged.astype(np.float32) - exact
    squares = np.array(
        [np.vdot(base, base), np.vdot(delta, delta), np.vdot(rounding, rounding)],
        np.float64,
    )
    return merged, squares


def files_to_copy(base: Folder) -> list[Path]:
    """The files of a base that the merged model needs: its weights, and all that isn't weights.

    Weights in another format than safetensors stay behind.

    Raises:
      UserError: see `weights.files_of`.
    """
    files = weights.files_of(base)
    for path in Path(base).iterdir():
        is_weights = path.suffix in (".safetensors", ".bin", ".gguf")
        if path.is_file() and not is_weights:
            files.append(path)
    return sorted(files)


def merge_model(
    base: Folder,
    out: Folder,
    plan: Adapters,
    scale: float,
    as_trained: RowsAsTrained | None = None,
) -> pd.DataFrame:
    """Copy a model folder to `out`, then change the planned matrices in the copy.

    Every other byte is the base's. The folder appears when it's complete.

    Args:
      base, out: model folders.
      plan: from `plan_merge`.
      scale: alpha / rank.
      as_trained: None, or rows of a file -> the rows that training multiplied with (11).

    Returns:
      A table with a row for each matrix: `tensor`, and the norms `base`, `delta` and `rounding`.

    Raises:
      UserError: the disk is too small or full, or a matrix holds NaN or Inf.
    """
    out = Path(out)
    tensors = weights.open_model(base)
    files = files_to_copy(base)
    size = 0
    for path in files:
        size += path.stat().st_size
    room(out.parent, 1.01 * size, f"{out.name}/")

    norms = []
    progress = Progress(len(plan), "matrices merged")
    with atomic_dir(out, ours="config.json") as folder:
        for path in files:
            shutil.copyfile(path, folder / path.name)
        for name, (a, b) in plan.items():
            original = tensors[name]
            copied = replace(original, file=folder / original.file.name)
            matrix = copied.array("r+")
            squares = _merge_matrix(matrix, a, b, scale, as_trained)
            is_finite = np.isfinite(squares)
            if not is_finite.all():
                raise UserError(f"{base}: {name} has NaN or Inf. Download it again.")
            base_norm, delta_norm, rounding_norm = np.sqrt(squares).tolist()
            norms.append((name, base_norm, delta_norm, rounding_norm))
            progress.update()
    return pd.DataFrame(norms, columns=["tensor", "base", "delta", "rounding"])


def _merge_matrix(
    matrix: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scale: float,
    as_trained: RowsAsTrained | None,
) -> np.ndarray:
    """Change a matrix [out, in] of a file in place; returns the squared norms of `add_delta`."""
    sums = np.zeros(3)
    for first in range(0, len(matrix), BLOCK):
        part = slice(first, first + BLOCK)
        rows = matrix[part]
        if as_trained:
            rows = as_trained(rows)
        b_of_rows = b[:, part]
        matrix[part], squares = add_delta(rows, a, b_of_rows, scale)
        sums += squares
    return sums


# ── What is written ──


def peft_tensors(
    targets: list[Module], adapters: Adapters, prefix: str
) -> dict[str, np.ndarray]:
    """{name: array} of adapter_model.safetensors: lora_A [r, in] and lora_B [out, r] per matrix."""
    tensors: dict[str, np.ndarray] = {}
    for target in targets:
        a, b = adapters[target.path]
        for name, pair in target.factors(a, b).items():
            _add_for_peft(tensors, f"{prefix}{name}", pair)
            if target.kind == "k_einsum":  # V is K, but vLLM's adapter for k_proj reaches K only
                values = name.replace("k_proj", "v_proj")
                _add_for_peft(tensors, f"{prefix}{values}", pair)
    return tensors


def _add_for_peft(tensors: dict[str, np.ndarray], module: str, pair: Pair) -> None:
    """Add the two matrices of a module to PEFT's tensors."""
    a, b = pair
    lora_a = a.T.copy()
    lora_b = b.T.copy()
    tensors[f"base_model.model.{module}.lora_A.weight"] = lora_a
    tensors[f"base_model.model.{module}.lora_B.weight"] = lora_b


def write_adapter(
    out: Folder,
    targets: list[Module],
    adapters: Adapters,
    recipe: Recipe,
    prefix: str,
) -> None:
    """Write the adapters as PEFT stores them.

    Args:
      out: the folder.
      targets, adapters, prefix: as for `check`.
      recipe: 03's.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": recipe.rank,
        "lora_alpha": recipe.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "base_model_name_or_path": recipe.base_model,
        "inference_mode": True,
        "target_modules": _peft_pattern(targets, recipe),
    }
    tensors = peft_tensors(targets, adapters, prefix)
    with atomic_dir(out, ours="adapter_config.json") as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(folder / "adapter_config.json", config)


def _peft_pattern(targets: list[Module], recipe: Recipe) -> str:
    """The pattern by which PEFT finds the modules that have adapters.

    If some modules were left out on purpose, it names the others one by one, because PEFT makes
    random adapters for all that the pattern matches.
    """
    if not recipe.partial:
        return architecture.PEFT_TARGETS  # the language model's layers only
    names: list[str] = []
    for target in targets:
        names += map(re.escape, target.names)
    one_of_them = "|".join(sorted(names))
    return rf"model\.(language_model\.)?({one_of_them})"


def run(
    base: Folder,
    targets: list[Module],
    adapters: Adapters,
    step: int,
    recipe: Recipe,
    prefix: str,
) -> Merge:
    """Make `merged/`, `adapter/` and `merge.json` of the run directory, unless they're current.

    `merge.json` has what they were made from (`inputs`) and the SHA-256 of every file. It's written
    last, so what it describes is finished. If only `adapter/` is damaged, `merged/` stays.

    Args:
      base: the base's folder.
      targets, adapters, prefix: as for `check`.
      step, recipe: of the checkpoint, and 03's. If it stored the base quantized, the adapters are
        merged into what it multiplied with.

    Returns:
      The `Merge`.
    """
    path = run_dir("merge.json")
    merged = run_dir("merged")
    adapter = run_dir("adapter")
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
        only_rounded: Adapters = {}
        as_trained = rows_as_trained(recipe)
        if as_trained:
            only_rounded = without_adapters(base, adapters, prefix)
        table = merge_model(base, merged, plan | only_rounded, recipe.scale, as_trained)
        changed_rows = table[~table.tensor.isin(list(only_rounded))]
        norms = changed_rows.to_dict("records")
    write_adapter(adapter, targets, adapters, recipe, prefix)
    record = Merge(
        inputs=inputs,
        step=step,
        scale=recipe.scale,
        base=str(base),
        recipe=recipe,
        files=hashes(merged),
        adapter_files=hashes(adapter),
        norms=norms,
    )
    record.save(path)
    return record


def rows_as_trained(recipe: Recipe) -> RowsAsTrained | None:
    """What turns rows of the base's files into those that a run multiplied with.

    None if the run multiplied with them as they are.
    """
    if not recipe.quantized:
        return None
    from helpers import quantized  # JAX, which the rest of a merge doesn't need
    return quantized.as_trained(recipe.base_dtype, recipe.dtype)


def inputs_of(base: Folder, adapters: Adapters, step: int, recipe: Recipe) -> dict[str, Any]:
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


def model_card(recipe: Recipe, data: DataMeta, step: int, modules: int) -> str:
    """What a stranger needs to know of the merged model, as the hub's Markdown.

    Args:
      recipe, data: what 03 and 02 left.
      step: that was merged.
      modules: that have adapters.
    """
    return f"""---
base_model: {recipe.base_model}
base_model_relation: finetune
---
# {recipe.base_model}, tuned
- **Data**: {data.source}, {data.train_examples:,} examples,
  {data.trained_tokens:,} trained tokens.
- **Ask it as it was trained**: system message {json.dumps(data.system)},
  reasoning {data.reasoning}.
- **Training**: LoRA rank {recipe.rank}, alpha {recipe.alpha:g} on {modules} modules,
  {step} steps, learning rate {recipe.learning_rate:g}; added in float32, rounded once.
"""


def norms_table(record: Merge) -> pd.DataFrame:
    """The norms of `merge.json`, a row for each matrix, with its `layer` and its `kind` ("q").

    The columns `base`, `delta` and `rounding` are the norms of W, of its change, and of what the
    rounding of their sum moved.
    """
    norms = pd.DataFrame(record.norms)
    names = norms.tensor.str.extract(r"layers\.(?P<layer>\d+)\.\w+\.(?P<kind>\w+)_proj")
    norms["layer"] = names.layer.astype(int)
    norms["kind"] = names.kind
    return norms
