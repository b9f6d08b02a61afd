"""Time and peak anonymous memory of the merge of 04_merge.py, beside a plain copy with fsync.

    .venv/bin/python tests/benchmarks/bench_merge.py [folder]

Writes a checkpoint of five layers as wide as the 31B's (5.1 GB, random) and rank-64 adapters, then
runs both, each in a process of its own. Anonymous memory is sampled every 5 ms. The limits: twice
the largest tensor plus 300 MB, four times the copy. `--quick` uses a small checkpoint.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import random_gemma  # noqa: E402

from tables import architecture  # noqa: E402

RANK, ALPHA, PREFIX = 64, 64.0, "model.language_model."
WIDE = random_gemma.TINY | {
    "vocab_size": 16_384, "vocab_size_per_layer_input": 16_384, "hidden_size": 5_376,
    "intermediate_size": 21_504, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"]}
QUICK = WIDE | {"vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size": 256,
                "intermediate_size": 1_024, "head_dim": 32, "global_head_dim": 64}


def write_checkpoint(folder, adapters):
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
        manager.save(1, args=ocp.args.Composite(model_params=ocp.args.PyTreeSave(tree)))


# ── One process each ──
def prepare(folder, config):
    """Base and checkpoint in `folder`; prints the bytes of base, largest tensor and adapters."""
    random_gemma.write(folder / "base", config)
    rng = np.random.default_rng(1)
    adapters = {target.path: tuple(rng.standard_normal(shape, np.float32) * 0.02
                                   for shape in target.adapter(RANK))
                for target in architecture.modules(config)}
    write_checkpoint(folder / "checkpoints", adapters)
    sizes = [2 * math.prod(shape) for shape in random_gemma.tensors(config).values()]
    print(json.dumps([sum(sizes), max(sizes), sum(a.nbytes + b.nbytes for a, b in adapters.values())]))


def run_copy(folder):
    (folder / "copy").mkdir()
    for source in sorted((folder / "base").iterdir()):
        with open(source, "rb") as read, open(folder / "copy" / source.name, "wb") as write:
            shutil.copyfileobj(read, write, 16 << 20)
            write.flush()
            os.fsync(write.fileno())


def run_merge(folder):
    from helpers import merge, weights
    _, adapters, notes = merge.restore_adapters(folder / "checkpoints", 1)
    targets = architecture.modules(architecture.read_config(folder / "base"))
    recipe = {"rank": RANK, "alpha": ALPHA, "n_modules": len(targets)}
    merge.check(targets, adapters, weights.open_model(folder / "base"), PREFIX, recipe, notes)
    merge.merge_model(folder / "base", folder / "merged", merge.plan_merge(targets, adapters, PREFIX),
                      ALPHA / RANK)


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
        print(f"checkpoint {total / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, "
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
        {"copy": run_copy, "merge": run_merge, "prepare": lambda folder: prepare(folder, WIDE),
         "quick": lambda folder: prepare(folder, QUICK)}[mode](where)
    else:
        sys.exit(main())
