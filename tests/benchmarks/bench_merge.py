"""Time and peak anonymous memory of the merge of 04_merge.py, beside a plain copy with fsync.

    .venv/bin/python tests/benchmarks/bench_merge.py [--quick] [folder]

Writes a base of five layers as wide as the 31B's (5.1 GB, random), then copies it and merges
rank-64
adapters into it, each in a process of its own. Anonymous memory is sampled every 5 ms. The limits:
twice the largest tensor plus 300 MB, four times the copy. `--quick` uses a small base.
"""

import contextlib
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


# ── One process each ──
def run_copy(folder):
    (folder / "copy").mkdir()
    for source in sorted((folder / "base").iterdir()):
        with open(source, "rb") as read, open(folder / "copy" / source.name, "wb") as write:
            shutil.copyfileobj(read, write, 16 << 20)
            write.flush()
            os.fsync(write.fileno())


def run_merge(folder):
    from helpers import merge
    rng, targets = np.random.default_rng(1), architecture.modules(
        architecture.read_config(folder / "base"))
    adapters = {target.path: tuple(rng.standard_normal(shape, np.float32) * 0.02
                                   for shape in target.adapter(RANK)) for target in targets}
    plan = merge.plan_merge(targets, adapters, PREFIX)
    merge.merge_model(folder / "base", folder / "merged", plan,
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
    config = QUICK if "--quick" in sys.argv else WIDE
    paths = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    sizes = [2 * math.prod(shape) for shape in random_gemma.tensors(config).values()]
    adapters = sum(4 * math.prod(shape) for target in architecture.modules(config)
                   for shape in target.adapter(RANK))
    place = paths[0] if paths else None
    with tempfile.TemporaryDirectory(prefix="bench_merge_", dir=place) as folder:
        random_gemma.write(Path(folder) / "base", config)
        print(f"base {sum(sizes) / 1e9:.2f} GB, largest tensor {max(sizes) / 1e6:.0f} MB, "
              f"adapters {adapters / 1e6:.0f} MB, {os.cpu_count()} cores", flush=True)
        (copied, _), (seconds, peak) = (measure(mode, folder) for mode in ("copy", "merge"))
    print(f"copy with fsync {copied:.1f} s, merge {seconds:.1f} s, {seconds / copied:.2f} x copy; "
          f"peak without adapters {(peak - adapters) / 1e6:.0f} MB")
    small, fast = peak - adapters <= 2 * max(sizes) + 300e6, seconds <= 4 * copied
    print(f"limits: memory {'held' if small else 'BROKEN'}, time {'held' if fast else 'BROKEN'}")
    return 0 if small and fast else 1


if __name__ == "__main__":
    if "--child" in sys.argv:
        {"copy": run_copy, "merge": run_merge}[sys.argv[-2]](Path(sys.argv[-1]))
    else:
        sys.exit(main())
