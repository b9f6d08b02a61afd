"""Time and peak anonymous memory of the merge of 04_merge.py, beside a plain copy with fsync.

    .venv/bin/python tests/benchmarks/bench_merge.py [folder]

Writes a checkpoint of five layers as wide as the 31B's (5.1 GB, random) and rank-64 adapters, then
runs both, each in a process of its own. Anonymous memory is sampled every 5 ms. The limits: twice
the largest tensor plus 300 MB, four times the copy. `--quick` uses a small checkpoint.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from tables import architecture  # noqa: E402 (no more: .venv-serve, for PEFT, lacks ml_dtypes)

RANK, ALPHA = 64, 64.0
WIDE = dict(model_type="gemma4_text", vocab_size=16384, hidden_size=5376, intermediate_size=21504,
            num_hidden_layers=5, num_attention_heads=32, num_key_value_heads=16, head_dim=256,
            num_global_key_value_heads=4, global_head_dim=512, attention_k_eq_v=True,
            sliding_window=1024, final_logit_softcapping=30.0, hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=16384, tie_word_embeddings=True, dtype="bfloat16",
            layer_types=["sliding_attention"] * 4 + ["full_attention"])
QUICK = {**WIDE, "vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size": 256,
         "intermediate_size": 1024, "head_dim": 32, "global_head_dim": 64}


def tensor_shapes(text, targets):
    """Names and shapes of a text-only Gemma 4 checkpoint: adapted matrices, embedding, norms."""
    D, prefix = text["hidden_size"], "model.language_model."
    shapes = {f"{prefix}embed_tokens.weight": (text["vocab_size"], D), f"{prefix}norm.weight": (D,)}
    for target in targets:
        shapes.update({f"{prefix}{name}.weight": shape for name, shape in target.names.items()})
    for i, kind in enumerate(text["layer_types"]):
        layer = f"{prefix}layers.{i}."
        size = text["global_head_dim"] if kind == "full_attention" else text["head_dim"]
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}{norm}_layernorm.weight"] = (D,)
        shapes[f"{layer}self_attn.q_norm.weight"] = shapes[f"{layer}self_attn.k_norm.weight"] = (size,)
        shapes[f"{layer}layer_scalar"] = (1,)
    return shapes


def write_base(folder, text, shapes, shards, seed=0):
    """A random bfloat16 checkpoint in `shards` files with an index; returns its bytes."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file
    folder.mkdir(parents=True)
    draw, names, index = np.random.default_rng(seed), sorted(shapes), {}
    total = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    groups, filled = [[] for _ in range(shards)], 0
    for name in names:
        groups[min(shards - 1, filled * shards // total)].append(name)
        filled += 2 * int(np.prod(shapes[name]))
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        index |= dict.fromkeys(group, file)
        save_file({name: (draw.standard_normal(shapes[name], np.float32) * 0.02).astype(
            ml_dtypes.bfloat16) for name in group}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": total}, "weight_map": index}, indent=2))
    (folder / "config.json").write_text(json.dumps(
        {**text, "architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}, indent=2))
    return total


def random_adapters(targets, seed=1):
    """{Tunix path: (A, B)}, as large as training makes them."""
    import numpy as np
    rng = np.random.default_rng(seed)
    return {target.path: tuple(rng.standard_normal(shape, np.float32) * 0.02
                               for shape in target.adapter(RANK)) for target in targets}


def write_checkpoint(folder, adapters, steps):
    """An Orbax checkpoint laid out as Tunix's manager lays it out."""
    import orbax.checkpoint as ocp
    tree = {}
    for path, pair in adapters.items():
        *parents, module = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        weight = "kernel" if module.endswith("_proj") else "w"
        node[module] = {f"{weight}_lora_{letter}": {"value": array}
                        for letter, array in zip("ab", pair)}
    with ocp.CheckpointManager(folder, item_handlers={"model_params": ocp.PyTreeCheckpointHandler()}
                               ) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.Composite(model_params=ocp.args.PyTreeSave(tree)))


# ── One process each ──
def run_copy(folder):
    (folder / "copy").mkdir()
    for source in sorted((folder / "base").iterdir()):
        with open(source, "rb") as read, open(folder / "copy" / source.name, "wb") as write:
            shutil.copyfileobj(read, write, 16 << 20)
            write.flush()
            os.fsync(write.fileno())


def run_merge(folder):
    os.environ["JAX_PLATFORMS"] = "cpu"
    from helpers import merge, weights
    text = json.loads((folder / "base" / "config.json").read_text())
    _, adapters, notes = merge.restore_adapters(folder / "checkpoints", 1)
    targets = architecture.modules(text)
    recipe = {"rank": RANK, "alpha": ALPHA, "n_modules": len(targets)}
    merge.check(targets, adapters, weights.open_model(folder / "base"), "model.language_model.", recipe, notes)
    plan = merge.plan_merge(targets, adapters, "model.language_model.")
    merge.merge_model(folder / "base", folder / "merged", plan, ALPHA / RANK)


def prepare(folder, text):
    """Base and checkpoint in `folder`; returns bytes of (base, largest, adapters)."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    targets = architecture.modules(text)
    shapes = tensor_shapes(text, targets)
    total = write_base(folder / "base", text, shapes, 3)
    adapters = random_adapters(targets)
    write_checkpoint(folder / "checkpoints", adapters, [1])
    largest = max(2 * a * b for a, b in (s for s in shapes.values() if len(s) == 2))
    return total, largest, sum(a.nbytes + b.nbytes for a, b in adapters.values())


def measure(mode, folder):
    """Run one mode in its own process; (seconds, peak bytes of anonymous memory)."""
    os.sync()
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, __file__, "--child", mode, str(folder)],
                             stdout=subprocess.DEVNULL, cwd=ROOT)
    peak = 0
    while child.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = psutil.Process(child.pid).memory_info()
            peak = max(peak, memory.rss - memory.shared)  # shared: pages of files
        time.sleep(0.005)
    if child.wait():
        raise SystemExit(f"{mode} failed")
    return time.perf_counter() - start, peak


def main():
    quick = "--quick" in sys.argv
    paths = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    folder = Path(tempfile.mkdtemp(prefix="bench_merge_", dir=paths[0] if paths else None))
    try:
        child = subprocess.run([sys.executable, __file__, "--child", "quick" if quick else "prepare",
                                str(folder)], check=True, capture_output=True, text=True, cwd=ROOT)
        total, largest, adapters = json.loads(child.stdout.splitlines()[-1])
        print(f"checkpoint {total / 1e9:.2f} GB in 3 shards, largest tensor {largest / 1e6:.0f} MB, "
              f"adapters {adapters / 1e6:.0f} MB, {os.cpu_count()} cores", flush=True)
        (copied, _), (seconds, peak) = (measure(mode, folder) for mode in ("copy", "merge"))
        print(f"copy with fsync {copied:.1f} s, merge {seconds:.1f} s, {seconds / copied:.2f} x copy; "
              f"peak without adapters {(peak - adapters) / 1e6:.0f} MB")
        small, fast = peak - adapters <= 2 * largest + 300e6, seconds <= 4 * copied
        print(f"limits: memory {'held' if small else 'BROKEN'}, time {'held' if fast else 'BROKEN'}")
        return 0 if small and fast else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if "--child" in sys.argv:
        mode, where = sys.argv[-2], Path(sys.argv[-1])
        if mode in ("prepare", "quick"):
            print(json.dumps(prepare(where, QUICK if mode == "quick" else WIDE)))
        else:
            {"copy": run_copy, "merge": run_merge}[mode](where)
    else:
        sys.exit(main())
