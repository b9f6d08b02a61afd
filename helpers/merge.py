"""The merge: reading a checkpoint without a model, checks, the algebra, and the files it makes.

Notebook 04 shows the algebra (which axes fold, what is added, when it is rounded) and proves it.
Importing this file imports JAX but starts no device. Letters: D width, N query heads, K key and
value heads, H head size, r rank.
"""

import contextlib
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pandas as pd

from helpers import weights
from tables import architecture
from helpers.data import teaches_verilog
from helpers.run import (
    UserError,
    atomic_dir,
    differences,
    digest,
    local_path,
    read_json,
    read_leftover,
    require,
    room,
    run_dir,
    sha256_file,
    write_json,
)

FLOATS = ("BF16", "F16", "F32")  # what the sum can be rounded to


def read_step(manager, step):
    """The arrays of one step, as a tree of NumPy arrays, and the recipe saved with them."""
    try:
        shapes = manager.item_metadata(step)["model_params"].tree
        plan = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        tree = manager.restore(step, args=ocp.args.Composite(
            model_params=ocp.args.PyTreeRestore(restore_args=plan)))["model_params"]
        return tree, (manager.metadata(step).custom_metadata or {}).get("recipe", {})
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        why = str(error) or type(error).__name__
        raise UserError(why.splitlines()[0][:150]) from error


def another_step(manager, steps, damaged):
    """What to do about a damaged step: the newest other one that is whole, if there is one."""
    for step in sorted(set(steps) - {damaged}, reverse=True):
        with contextlib.suppress(UserError):
            read_step(manager, step)
            return f"Step {step} is whole: set Settings.step to it, or run 03_train.py again."
    return "No other step is whole. Run 03_train.py again."


def restore_adapters(folder, step):
    """Return (step, {module path: (A, B)} in float32, the recipe saved with the checkpoint)."""
    handlers = {"model_params": ocp.PyTreeCheckpointHandler()}
    if "://" not in str(folder) and not Path(folder).is_dir():
        raise UserError(f"{folder} is missing. Run 03_train.py first.")
    with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
        steps = sorted(manager.all_steps())
        step = step or (steps[-1] if steps else 0)
        if step not in steps:
            raise UserError(f"{folder} has no finished step {step}; it has {steps}. "
                                    "Set Settings.step to one of them, or run 03_train.py.")
        try:
            tree, notes = read_step(manager, step)
        except UserError as error:
            raise UserError(f"step {step} in {folder} cannot be read: {error}\n"
                                    + another_step(manager, steps, step)) from error
    adapters = {}
    for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [str(key.key) for key in keys if str(key.key) != "value"]
        path, which = ".".join(parts[:-1]), parts[-1].rpartition("_lora_")[2]
        adapters.setdefault(path, {})[which] = np.asarray(array, np.float32)
    return step, {path: (pair.get("a"), pair.get("b")) for path, pair in adapters.items()}, notes


def check(targets, adapters, tensors, prefix, recipe, notes):
    """Refuse unless every adapter has its place, every place its adapter, and all shapes agree."""
    wanted = {target.path: target for target in targets}
    problems = [f"{path} has no adapter" for path in sorted(set(wanted) - set(adapters))]
    problems += [f"adapter {path} has no place" for path in sorted(set(adapters) - set(wanted))]
    problems += [f"recipe says n_modules {recipe['n_modules']}, the base has {len(wanted)}"
                 ] * (recipe["n_modules"] != len(wanted))
    problems += [f"recipe says {key} {recipe[key]}, the checkpoint {notes[key]}"
                 for key in ("rank", "alpha") if notes.get(key, recipe[key]) != recipe[key]]
    for path in sorted(set(wanted) & set(adapters)):
        needed = wanted[path].adapter(recipe["rank"])
        for letter, array, shape in zip("AB", adapters[path], needed):
            if array is None or array.shape != shape:
                problems.append(f"{path} {letter} is {getattr(array, 'shape', 'missing')}, "
                                f"rank {recipe['rank']} needs {shape}")
            elif not np.isfinite(array).all():
                problems.append(f"{path} {letter} has NaN or Inf")
        for name, shape in wanted[path].names.items():
            tensor = tensors.get(f"{prefix}{name}.weight")
            if tensor is None or tensor.shape != shape or tensor.dtype not in FLOATS:
                problems.append(f"base {name} is {tensor and (tensor.dtype, tensor.shape)}, "
                                f"expected {shape} in {', '.join(FLOATS)}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError("checkpoint and base do not fit: " + "; ".join(problems[:3]) + more
                                + ". Check Settings.base and Settings.step, or run 03_train.py.")


def split_targets(targets, adapters, recipe):
    """(modules to merge, modules left alone); all are to be merged unless 03 said otherwise."""
    def wanted(target):
        return not recipe.get("partial") or target.path in adapters
    return [t for t in targets if wanted(t)], [t for t in targets if not wanted(t)]


# ── The algebra ──


def q_factors(a, b):
    """A (D, r) and B (r, N, H), as two plain matrices."""
    return {"q_proj": (a, b.reshape(b.shape[0], -1))}


def kv_factors(a, b):
    """A (D, r), which both share, and B (r, 2, K, H): keys first, then values."""
    rank = b.shape[0]
    return {"k_proj": (a, b[:, 0].reshape(rank, -1)), "v_proj": (a, b[:, 1].reshape(rank, -1))}


def k_factors(a, b):
    """A (D, r) and B (r, K, H), where the values are the keys' projection."""
    return {"k_proj": (a, b.reshape(b.shape[0], -1))}


def o_factors(a, b):
    """A (N, H, r) and B (r, D): here the input has heads."""
    return {"o_proj": (a.reshape(-1, a.shape[-1]), b)}


def mlp_factors(kind):
    """Of an MLP's projection: plain matrices already."""
    return lambda a, b: {kind: (a, b)}


FACTORS = {"q_einsum": q_factors, "kv_einsum": kv_factors, "k_einsum": k_factors,
           "attn_vec_einsum": o_factors,
           **{kind: mlp_factors(kind) for kind in ("gate_proj", "up_proj", "down_proj")}}


def plan_merge(targets, adapters, prefix):
    """{name of a tensor in the base: (A [in, r], B [r, out])}, every adapter exactly once."""
    plan = {}
    for target in targets:
        factors = FACTORS[target.kind](*adapters[target.path])
        for name in target.names:
            plan[f"{prefix}{name}.weight"] = factors[name.rpartition(".")[2]]
    return plan


@jax.jit
def add_delta(rows, a, b, scale):
    """rows [m, in] + scale · (a [in, r] b [r, m])ᵀ; also the squared norms of what went in."""
    base = rows.astype(jnp.float32)
    delta = scale * jnp.einsum("ir,rm->mi", a, b, precision="highest")
    merged = (base + delta).astype(rows.dtype)
    lost = merged.astype(jnp.float32) - (base + delta)
    return merged, jnp.stack([jnp.vdot(part, part) for part in (base, delta, lost)])


def merge_model(base, out, plan, scale, block_bytes, as_trained=lambda rows: rows):
    """Write base + delta as a complete model folder; returns (files, tensors, norms)."""
    norms = {name: np.zeros(3) for name in plan}

    def change(name, rows, first):
        a, b = plan[name]
        merged, sums = add_delta(as_trained(rows), a, b[:, first:first + len(rows)], scale)
        norms[name] += sums
        if not np.isfinite(norms[name]).all():
            raise UserError(f"{base}: {name} has NaN or Inf. Download it again.")
        return np.asarray(merged)

    files, hashes = weights.rewrite(base, out, plan, change, block_bytes)
    return files, hashes, {name: np.sqrt(sums).tolist() for name, sums in norms.items()}


def no_change(targets, prefix):
    """A plan that adds nothing: for matrices that are only to be dequantised."""
    return {f"{prefix}{name}.weight": (np.zeros((inputs, 1), np.float32),
                                       np.zeros((1, outputs), np.float32))
            for target in targets for name, (outputs, inputs) in target.names.items()}


# ── What is written ──


def to_make(record, inputs, wanted):
    """{folder: why it must be made}. `wanted`: {folder: name of its hashes in the record}."""
    if not record:
        return dict.fromkeys(wanted, "not there yet")
    if apart := differences(record.get("inputs"), inputs):
        return dict.fromkeys(wanted, "; ".join(apart))
    found = {}
    for folder, key in wanted.items():
        bad = weights.verify(run_dir(folder), record[key])
        if bad or not record[key]:
            what = ", ".join(f"{name} {what}" for name, what in bad.items())
            found[folder] = what or "not asked for before"
    return found


def check_room(folder, sizes):
    """Raise a `UserError` if `folder` has no room for new {name: bytes}; old ones go afterwards."""
    room(folder, 1.01 * sum(sizes.values()), ", ".join(f"{name}/" for name in sizes))


def write_adapter(out, targets, adapters, recipe, prefix, base_name=""):
    """The adapters as PEFT stores them; returns {file: sha256}."""
    entries, outer = {}, f"base_model.model.{prefix}"
    for target in targets:
        factors = FACTORS[target.kind](*adapters[target.path])
        if target.kind == "k_einsum":
            factors["v_proj"] = factors["k_proj"]  # for vLLM, whose k_proj adapter reaches K only
        block = next(iter(target.names)).rpartition(".")[0]
        for module, (a, b) in factors.items():
            for letter, matrix in (("A", a.T), ("B", b.T)):
                entries[f"{outer}{block}.{module}.lora_{letter}.weight"] = (
                    "F32", matrix.shape, [matrix])
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": recipe["rank"],
              "lora_alpha": recipe["alpha"], "lora_dropout": 0.0, "bias": "none",
              "base_model_name_or_path": base_name or recipe["base_model"], "inference_mode": True,
              "target_modules": architecture.PEFT_TARGETS}  # the language model's layers only
    if recipe.get("base_dtype", "bfloat16") != "bfloat16":  # PEFT names what it does not know
        config["quantized_base"] = {key: recipe[key] for key in ("base_dtype", "tile_size")}
    if recipe.get("partial"):  # else PEFT would make random adapters for what was left out
        names = sorted(re.escape(name) for target in targets for name in target.names)
        config["target_modules"] = rf"model\.(language_model\.)?({'|'.join(names)})"
    with atomic_dir(out) as folder:
        weights.write_tensors(folder / "adapter_model.safetensors", entries)
        write_json(folder / "adapter_config.json", config)
    return {file.name: sha256_file(file) for file in sorted(out.iterdir())}


def export_text(merged, out, prefix):
    """The language model of `merged` under transformers' own names; returns {file: sha256}."""
    config, files, index, size = architecture.read_config(merged), {}, {}, 0
    text = {**config.get("text_config", config), "architectures": ["Gemma4ForCausalLM"]}
    text["dtype"] = config.get("dtype") or text.get("dtype")
    for name, tensor in weights.open_model(merged).items():
        if name.startswith(prefix):
            new = "model." + name.removeprefix(prefix)
            entries = files.setdefault(tensor.file.name, {})
            entries[new] = (tensor.dtype, tensor.shape, [tensor.data()])
            index[new], size = tensor.file.name, size + tensor.stop - tensor.start
    with atomic_dir(out) as folder:
        for file, entries in files.items():
            weights.write_tensors(folder / file, entries)
        write_json(folder / "config.json", text)
        if (merged / "model.safetensors.index.json").exists():
            write_json(folder / "model.safetensors.index.json",
                               {"metadata": {"total_size": size}, "weight_map": index})
        for side in ("generation_config.json", "tokenizer.json", "tokenizer_config.json",
                     "chat_template.jinja"):
            if (merged / side).exists():
                shutil.copyfile(merged / side, folder / side)
    return {file.name: sha256_file(file) for file in sorted(out.iterdir())}


def recompute(base, merged, plan, scale, samples, as_trained=lambda rows: rows):
    """Check a sample of tensors of `merged` against the sum in float64.

    Returns:
      (merged tensors checked, untouched ones checked, largest error in steps of the dtype), what
      float32 may be wrong by taken off the error.

    Raises:
      AssertionError: names or an untouched tensor differ.
    """
    before, after = weights.open_model(base), weights.open_model(merged)
    assert list(before) == list(after), "names or order changed"
    touched = sorted(plan, key=digest)[:samples]
    others = [name for name in before if name not in plan][:samples]
    assert all(np.array_equal(before[name].data(), after[name].data()) for name in others)
    worst = 0.0
    for name in touched:
        old, new = before[name].array(), after[name].array()
        a, b = plan[name]
        for start in range(0, len(old), 1024):  # in slices, to stay small
            part = slice(start, start + 1024)
            wide = b[:, part].T.astype(np.float64)
            ours = as_trained(old[part]).astype(np.float64)
            exact = ours + scale * (wide @ a.T)
            step = np.spacing(np.abs(exact).astype(np.float32)) * 2.0 ** (
                23 - ml_dtypes.finfo(new.dtype).nmant)
            bound = np.abs(ours) + scale * np.abs(wide) @ np.abs(a.T)
            in_float32 = (len(b) + 2) * 2.0**-24 * bound
            error = np.abs(new[part].astype(np.float64) - exact) - in_float32
            worst = max(worst, float((error / step).max()))
    return len(touched), len(others), worst


def norm_table(record):
    """One row per merged tensor: layer, kind, delta/base and rounding/delta in percent."""
    table = pd.DataFrame(record["norms"])
    parts = table["tensor"].str.extract(r"layers\.(?P<layer>\d+)\.\w+\.(?P<kind>\w+)_proj")
    table["layer"], table["kind"] = parts["layer"].astype(int), parts["kind"]
    table["delta %"] = 100 * table["delta"] / table["base"]
    table["rounding %"] = 100 * table["rounding"] / table["delta"].clip(lower=1e-30)
    return table


def if_smaller(old, delta, shares):
    """What would arrive of a delta in the base's type, had the fine-tune been smaller."""
    before, rows = old.astype(np.float64), []
    for wanted in (share * delta for share in shares):
        arrived = (before + wanted).astype(old.dtype).astype(np.float64) - before
        rows.append({"delta %": np.linalg.norm(wanted) / np.linalg.norm(before),
                     "rounding %": np.linalg.norm(arrived - wanted) / np.linalg.norm(wanted),
                     "arrives %": np.vdot(arrived, wanted) / np.vdot(wanted, wanted),
                     "weights unchanged %": (arrived == 0).mean()})
    return (100 * pd.DataFrame(rows)).style.hide(axis="index").format(precision=2)


def check_hub_name(name):
    """Would the hub take this as the name of a base model?

    Raises:
      UserError: it is a folder or a bucket, so say the name instead.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name} is not the name of a model on the hub, and its card has to name "
                        "the base. Set Settings.hub_base in 04, for example "
                        '"google/gemma-4-31B-it".')


def card_sources(record):
    """(02's record, 07's comparison or None): what the model card may say about this merge.

    Raises:
      UserError: the data in this run directory is not what was trained on.
    """
    data = read_json(require(run_dir("data", "meta.json"), "02_data.py"))
    if data.get("data_sha256") != record["recipe"].get("data_sha256"):
        raise UserError("data/meta.json describes other data than was trained on: 02 ran again "
                        "after 03. Run 02 with the settings of then, or 03 and 04 again.")
    evaluation = read_leftover(run_dir("eval", "comparison.json"), {})
    if evaluation and evaluation.get("model_hash") != digest(record["files"]):
        print("eval/comparison.json is about another merge: no scores on the card until 07 ran")
        return data, None
    return data, evaluation or None


def model_card(record, data, evaluation, hub_base=""):
    """The README.md of the published model.

    Args:
      record: merge.json.
      data: 02's meta.json.
      evaluation: 07's comparison, or None.
      hub_base: the base model's name on the hub, where 02 was given a copy of it.
    """
    recipe, source = record["recipe"], data["source"]
    base, verilog = hub_base or recipe["base_model"], teaches_verilog(source)
    if not verilog and (local_path(source) or Path(source).exists()):
        source = Path(source).name  # whose folders these are is nobody's business
    licence = " (CC BY-SA 4.0)" if "CodeV" in source else ""
    storage = recipe.get("base_dtype", "bfloat16")
    quantised = "" if storage == "bfloat16" else (
        f" The base was stored in {storage} while training; merged into "
        f"{record['inputs'].get('into', 'bfloat16')} weights.")
    lines = ["---", f"base_model: {base}", "base_model_relation: finetune",
             *(["license: apache-2.0", "tags: [verilog]"] if verilog else []), "---", "",
             f"# {base}, tuned" + " for Verilog" * verilog, "",
             f"- **Base**: {base}, Apache-2.0" + (
                 ", and so are these weights." if verilog else
                 ". The licence of these weights is yours to say."),
             f"- **Data**: {source}{licence}, {data['train_examples']:,} examples, "
             f"{data['trained_tokens']:,} trained tokens, reasoning {data['reasoning']}.",
             f"- **Ask it as it was trained**: system message {json.dumps(data['system'])}, "
             f"`enable_thinking={str(data['reasoning'] == 'kept').lower()}`.",
             f"- **Training**: LoRA rank {recipe['rank']}, alpha {recipe['alpha']:g} on "
             f"{recipe['n_modules']} modules, {record['step']} steps, learning rate "
             f"{recipe['learning_rate']:g}; added to the weights in float32, rounded once."
             + quantised]
    for label in ("base", "tuned") if evaluation else ():
        scores, plan = evaluation[label], evaluation["plan"]
        low, high = scores["pass@1_interval"]
        lines.append(f"- **Evaluation**, {label}: pass@1 {scores['pass@1']:.3f} [{low:.3f}, "
                     f"{high:.3f}] on {scores['n_problems']} problems, {plan['n']} answers each, "
                     f"temperature {plan['temperature']:g}.")
    return "\n".join(lines if evaluation else [*lines, "- **Evaluation**: not run yet."]) + "\n"
