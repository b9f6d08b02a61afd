"""Shared by the tests: where the repository is, how to run a program, what one notebook defines."""

import ast
import atexit
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVE = ROOT / ".venv-serve" / "bin" / "python"
needs_serve = pytest.mark.skipif(not SERVE.exists(),
                                 reason="no .venv-serve: ./setup.sh serve makes it")
sys.path[:0] = [str(ROOT / place) for place in (".", "tools", "tests/hostile")]
os.chdir(ROOT)
os.environ.setdefault("SIZE", "tiny")
RUN = Path(os.environ.get("RUN_DIR") or "runs/tiny").resolve()  # of `run_tests.sh`, or one's own
# Four simulated devices, and programs that compile fast: here they run for a second.
os.environ["XLA_FLAGS"] = ("--xla_force_host_platform_device_count=4 "
                           "--xla_backend_optimization_level=0")
os.environ.setdefault("NPROC", "16")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # what two tests compile, for this run alone
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax_cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def no_garbage_collection():
    """For blocks that parse Python.

    CPython 3.11 (gh-106905): `ast.parse` fails with "AST constructor recursion depth mismatch" if a
    finalizer that the collector runs meanwhile parses something itself, as a traceback printed for
    an abandoned task does.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


LONGEST = ("test_train", "test_quantized", "test_merge", "test_dryrun", "test_recipe", "test_nca",
           "test_series",
           "test_promises", "test_tools")


def pytest_collection_modifyitems(items):
    """The longest files first, so that two processes end together (`--dist loadfile`)."""
    items.sort(key=lambda item: (*LONGEST, item.path.stem).index(item.path.stem))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """pytest parses every test module that it rewrites."""
    with no_garbage_collection():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish():
    """So it does with what it imports for its last words."""
    with no_garbage_collection():
        return (yield)


def program(*words, cwd=ROOT, stdin=None, **env):
    """A program that has ended, with what it said as text; None takes a variable out of `env`."""
    kept = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    return subprocess.run(list(map(str, words)), cwd=cwd, input=stdin, text=True,
                          capture_output=True, env=kept)


def serve(*words):
    """What the serving environment's Python (PyTorch, vLLM ...) printed; it must not fail."""
    done = program(SERVE, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def never_shown():
    """{variable: value} of the secrets with which run_tests.sh runs the series."""
    lines = (ROOT / "tests/never_shown.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def files_with_secrets(folder):
    """Which file below a folder holds the value of which variable, as text."""
    found = []
    for path in sorted(Path(folder).rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        found += [f"{path} shows {name}" for name, value in never_shown().items()
                  if value.encode() in content]
    return found


def page(source, folder, *words, **env):
    """A notebook as a script, at the tiny size, in this run directory, with a reader's flags."""
    told = {"SIZE": "tiny", "RUN_DIR": str(folder), "MPLBACKEND": "agg", "XLA_FLAGS": None, **env}
    return program(sys.executable, source, *words, **told)


def parse(path):
    """The syntax tree of a Python file."""
    with no_garbage_collection():
        return ast.parse(Path(path).read_text())


def load(source, *names, **given):
    """Execute only the imports and the named definitions of a notebook's source file.

    For functions that live in one notebook; what two files use is in `helpers` and imported.
    `given` are names that they use. Returns the definitions in the order named, or the only one.
    """
    def wanted(node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return node.name in names
        if isinstance(node, ast.Assign):
            return any(getattr(part, "id", None) in names
                       for target in node.targets for part in ast.walk(target))
        return isinstance(node, (ast.Import, ast.ImportFrom))
    path = ROOT / source
    body = [node for node in parse(path).body if wanted(node)]
    space = {"__name__": path.stem} | given
    exec(compile(ast.Module(body, []), str(path), "exec"), space)
    found = [space[name] for name in names]
    return found[0] if len(found) == 1 else found


def a_recipe(**changes):
    """A `Recipe` as 03 leaves it, of a model that nobody trained, with some fields changed."""
    from helpers import records
    return records.Recipe(**{
        "optimizer": "adamw", "rank": 4, "alpha": 8.0, "targets": ".*", "learning_rate": 1e-3,
        "warmup_steps": 10, "weight_decay": 0.001, "max_grad_norm": 1.0, "dtype": "float32",
        "seed": 42, "base_model": "random", "base_sha256": "b", "steps": 20, "rows_per_step": 4,
        "data_sha256": "d", "template_sha256": "t", "size": "tiny", "base_path": "base",
        "adapter_dtype": "float32", "n_modules": 42, "trainable_parameters": 1_000,
        "partial": False, "mesh": {"fsdp": 1, "tp": 1}, "checkpoints": "train/checkpoints",
        "final_step": 20, "epochs": 1.0, "system": "s", "reasoning": "stripped",
        "val_loss_before": 2.0, "val_loss_after": 1.0, "examples_per_step": 12.5} | changes)


def a_data_meta(**changes):
    """A `DataMeta` as 02 leaves it, of data that nobody made, with some fields changed."""
    from helpers import records
    return records.DataMeta(**{
        "source": "a set", "system": "s", "base": "base", "rows": 4_000, "max_tokens": 384,
        "sequence_length": 512, "reasoning": "stripped", "validation": 0.05, "evaluation": "",
        "seed": 42, "size": "tiny", "rows_in": 4, "rows_kept": 3, "dropped": {"too long": 1},
        "tokens": 2_000, "fill": 0.9, "trained_tokens": 1_234, "examples_per_row": 3.0,
        "template_sha256": "t", "tokenizer": "base", "base_model": "random", "base_path": "base",
        "train_examples": 3, "val_examples": 1, "train_rows": 1, "val_rows": 1, "files": {},
        "data_sha256": "d"} | changes)


def a_comparison(**changes):
    """A `Comparison` as 07 leaves it, of models that nobody asked, with some fields changed."""
    from helpers import records
    return records.Comparison(**{
        "rival": "comment", "against": {"comment": {"difference": 0.1, "interval": [0.0, 0.2],
                                                    "p": 0.04}},
        "model_hash": "m", "plan": {"n": 5}, "n_winnable": 156,
        "base": {"pass@1": 0.5, "n_problems": 156}, "tuned": {"pass@1": 0.625, "n_problems": 156},
        } | changes)


def a_server_record(base_url):
    """The record of a server that nobody started."""
    from serving.records import ServerRecord
    return ServerRecord(
        pid=1, born=1.0, started=1.0, base_url=base_url, name="name", model="m", engine="cpu",
        max_model_len=1024, container="", log="x", command=[], environment=[], files=[])
