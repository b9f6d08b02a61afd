"""The merge: a checkpoint's adapters added to the weights, and the same adapters for PEFT.

Notebook 04 shows the algebra and proves it. No model is built and no chip is used. Letters:
r rank, [in, r] and [r, out] are the two matrices of an adapter.
"""

import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pandas as pd
from safetensors.numpy import save_file

from helpers import weights
from helpers.records import Merge
from helpers.run import (
    Progress, UserError, atomic_dir, changed, digest, hashes, room, run_dir, write_json)
from tables import architecture

BLOCK = 1_024  # rows of a matrix that are in memory at a time


# ── What 03 left ──


def restore_adapters(folder, step):
    """The adapters of a checkpoint, without a model, whatever devices wrote it.

    Args:
      folder: of Orbax's checkpoints, local or gs://.
      step: of one of them; 0 is the newest.

    Returns:
      (step, {module path: (A, B)} in float32, the recipe saved with the checkpoint).

    Raises:
      UserError: there is no such step, or it cannot be read.
    """
    handlers = {"model_params": ocp.PyTreeCheckpointHandler()}
    if "://" not in str(folder):
        if not Path(folder).is_dir():
            raise UserError(f"{folder} is missing. Run 03_train.py first.")
        folder = Path(folder).resolve()
    with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
        steps = sorted(manager.all_steps())
        step = step or (steps[-1] if steps else 0)
        if step not in steps:
            raise UserError(f"{folder} has no finished step {step}; it has {steps}. Set "
                            "Settings.step to one of them, or run 03_train.py.")
        try:
            shapes = manager.item_metadata(step)["model_params"].tree
            plan = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
            tree = manager.restore(step, args=ocp.args.Composite(
                model_params=ocp.args.PyTreeRestore(restore_args=plan)))["model_params"]
            recipe = (manager.metadata(step).custom_metadata or {}).get("recipe", {})
        except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0][:150]
            raise UserError(f"step {step} in {folder} cannot be read: {why}\nSet Settings.step to "
                            f"another of {steps}, or run 03_train.py again.") from error
    adapters = {}
    for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [str(key.key) for key in keys if str(key.key) != "value"]
        path, which = ".".join(parts[:-1]), parts[-1].rpartition("_lora_")[2]
        adapters.setdefault(path, {})[which] = np.asarray(array, np.float32)
    return step, {path: (pair["a"], pair["b"]) for path, pair in adapters.items()}, recipe


def targets_of(base, adapters, recipe):
    """The modules that get a delta: all of the config's, or those that 03 adapted on purpose."""
    listed = architecture.modules(architecture.read_config(base))
    return [one for one in listed if not recipe.partial or one.path in adapters]


def check(targets, adapters, tensors, prefix, recipe, notes):
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
    problems = [f"{path} has no adapter" for path in sorted(set(wanted) - set(adapters))]
    problems += [f"adapter {path} has no place" for path in sorted(set(adapters) - set(wanted))]
    for key, ours in (("rank", recipe.rank), ("alpha", recipe.alpha)):
        if notes.get(key, ours) != ours:
            problems.append(f"recipe says {key} {ours}, the checkpoint {notes[key]}")
    for path in sorted(set(wanted) & set(adapters)):
        needed = wanted[path].adapter(recipe.rank)
        for letter, array, shape in zip("AB", adapters[path], needed):
            if array.shape != shape:
                problems.append(f"{path} {letter} is {array.shape}, rank {recipe.rank} needs "
                                f"{shape}")
            elif not np.isfinite(array).all():
                problems.append(f"{path} {letter} has NaN or Inf")
        for name, shape in wanted[path].names.items():
            tensor = tensors.get(f"{prefix}{name}.weight")
            if tensor is None or tensor.shape != shape or tensor.dtype not in weights.DTYPES:
                problems.append(f"base {name} is {tensor and (tensor.dtype, tensor.shape)}, "
                                f"expected {shape} in {', '.join(weights.DTYPES)}")
    if not problems and not any(b.any() for _, b in adapters.values()):
        problems = ["every B is zero, so it was saved before the first step"]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError("checkpoint and base do not fit: " + "; ".join(problems[:3]) + more
                        + ". Check Settings.base and Settings.step, or run 03_train.py.")


# ── The algebra ──


def plan_merge(targets, adapters, prefix):
    """{name of a tensor in the base: (A [in, r], B [r, out])}, every adapter exactly once."""
    return {f"{prefix}{name}.weight": pair for target in targets
            for name, pair in target.factors(*adapters[target.path]).items()}


def add_delta(rows, a, b, scale):
    """rows [m, in] + scale · (a [in, r] b [r, m])ᵀ in float32, rounded once.

    Returns:
      (the sum in the dtype of `rows`, squared norms of the rows, the delta and the rounding).
    """
    base = rows.astype(np.float32)
    delta = np.float32(scale) * (b.T @ a.T)
    merged = (base + delta).astype(rows.dtype)
    lost = merged.astype(np.float32) - (base + delta)
    return merged, np.array([np.vdot(part, part) for part in (base, delta, lost)], np.float64)


def merge_model(base, out, plan, scale, as_trained=None):
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
    base, tensors = Path(base), weights.open_model(base)
    files = [path for path in sorted(base.iterdir())
             if path.is_file() and path.suffix not in (".bin", ".gguf")]
    room(Path(out).parent, 1.01 * sum(path.stat().st_size for path in files), f"{out.name}/")
    norms, progress = [], Progress(len(plan), "matrices merged")
    with atomic_dir(out) as folder:
        for path in files:
            shutil.copyfile(path, folder / path.name)
        for name, (a, b) in plan.items():
            there = replace(tensors[name], file=folder / tensors[name].file.name)
            matrix = there.array("r+")
            sums = np.zeros(3)
            for first in range(0, len(matrix), BLOCK):
                part = slice(first, first + BLOCK)
                rows = as_trained(matrix[part]) if as_trained else matrix[part]
                matrix[part], more = add_delta(rows, a, b[:, part], scale)
                sums += more
            if not np.isfinite(sums).all():
                raise UserError(f"{base}: {name} has NaN or Inf. Download it again.")
            norms.append((name, *np.sqrt(sums).tolist()))
            progress.update()
    return pd.DataFrame(norms, columns=["tensor", "base", "delta", "rounding"])


# ── What is written ──


def peft_tensors(targets, adapters, prefix):
    """{name: array} of adapter_model.safetensors: lora_A [r, in] and lora_B [out, r] per matrix."""
    tensors = {}
    for target in targets:
        factors = target.factors(*adapters[target.path])
        if target.kind == "k_einsum":  # for vLLM, whose adapter for k_proj reaches K only
            factors |= {name.replace("k_proj", "v_proj"): pair for name, pair in factors.items()}
        for name, (a, b) in factors.items():
            for letter, matrix in (("A", a.T), ("B", b.T)):
                tensors[f"base_model.model.{prefix}{name}.lora_{letter}.weight"] = matrix.copy()
    return tensors


def write_adapter(out, targets, adapters, recipe, prefix):
    """Write the adapters as PEFT stores them.

    Args:
      out: the folder.
      targets, adapters, prefix: as for `check`.
      recipe: 03's.
    """
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": recipe.rank,
              "lora_alpha": recipe.alpha, "lora_dropout": 0.0, "bias": "none",
              "base_model_name_or_path": recipe.base_model, "inference_mode": True,
              "target_modules": architecture.PEFT_TARGETS}  # the language model's layers only
    if recipe.partial:  # else PEFT would make random adapters for what was left out
        names = sorted(re.escape(name) for target in targets for name in target.names)
        config["target_modules"] = rf"model\.(language_model\.)?({'|'.join(names)})"
    with atomic_dir(out) as folder:
        save_file(peft_tensors(targets, adapters, prefix),
                  folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(folder / "adapter_config.json", config)


def run(base, targets, adapters, step, recipe, prefix, as_trained=None):
    """Make `merged/`, `adapter/` and `merge.json` of the run directory, unless they are current.

    `merge.json` has what they were made from (`inputs`) and the SHA-256 of every file. It comes
    last, so what it describes is finished.

    Args:
      base: the base's folder.
      targets, adapters, prefix: as for `check`.
      step, recipe: of the checkpoint, and 03's.
      as_trained: as for `merge_model`.

    Returns:
      The `Merge`.
    """
    path, merged, adapter = (run_dir(name) for name in ("merge.json", "merged", "adapter"))
    pairs = {name: hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest()
             for name, (a, b) in adapters.items()}
    inputs = {"step": step, "base": weights.fingerprint(base), "recipe": digest(recipe.to_json()),
              "adapters": digest(pairs)}
    record = Merge.load_if_whole(path)  # a damaged one is written again, here
    if record and record.inputs == inputs:
        bad = changed(merged, record.files) | changed(adapter, record.adapter_files)
        if not bad:
            print(f"{merged} is current: same checkpoint, base and recipe, every file whole")
            return record
        for name, what in bad.items():
            print(f"{name} is {what}: making all of it again")
    norms = merge_model(base, merged, plan_merge(targets, adapters, prefix), recipe.scale,
                        as_trained)
    write_adapter(adapter, targets, adapters, recipe, prefix)
    record = Merge(inputs=inputs, step=step, scale=recipe.scale, base=str(base), recipe=recipe,
                   files=hashes(merged), adapter_files=hashes(adapter),
                   norms=norms.to_dict("records"))
    record.save(path)
    return record
