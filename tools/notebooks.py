"""Build, check and execute the notebooks. `update_notebooks.sh` and `run_all.sh` call this file.

The numbered .py files are the source; `notebooks/*.ipynb` are made from them and carry the outputs
of a run of exactly that source.
"""

import argparse
import collections
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel, not a user-wide one

import jupytext
import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}
PRIVATE_PATHS = re.compile(r"/(?:home|Users|root|tmp|work|private|var/folders)/[\w.-]+")


def sources():
    """The notebooks' source files, in order."""
    return sorted(ROOT.glob("[0-9][0-9]_*.py"))


def build(source):
    """Turn a percent-format source into a notebook without outputs, with ids made from content."""
    notebook = jupytext.read(source)
    seen = collections.Counter()
    for cell in notebook.cells:  # same text, same id: no noise in diffs
        digest = hashlib.sha1(cell.source.encode()).hexdigest()[:8]
        cell["id"] = f"{digest}-{seen[digest]}"
        seen[digest] += 1
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def code_cells(notebook):
    """The code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def keep_outputs(new, old):
    """Copy outputs from `old` if its code cells are those of `new`; return whether they are."""
    if [c.source for c in code_cells(new)] != [c.source for c in code_cells(old)]:
        return False
    for cell, before in zip(code_cells(new), code_cells(old)):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    return True


def target_of(source):
    """Where the notebook made from a source lives."""
    return FOLDER / f"{source.stem}.ipynb"


def current(source):
    """The notebook as it should be on disk: built, with the stored outputs if still valid."""
    notebook, target = build(source), target_of(source)
    if target.exists():
        keep_outputs(notebook, nbformat.read(target, as_version=4))
    return notebook


def text_of(notebook):
    """The file's text."""
    return nbformat.writes(notebook) + "\n"


def has_outputs(notebook):
    """Was the notebook executed?"""
    return any(cell.outputs for cell in code_cells(notebook))


def has_error(notebook):
    """Did a cell fail?"""
    return any(o.output_type == "error" for cell in code_cells(notebook) for o in cell.outputs)


def output_text(notebook):
    """Everything the outputs say, as one string (images left out)."""
    parts = []
    for cell in code_cells(notebook):
        for output in cell.outputs:
            parts.append(output.get("text", ""))
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/"):
                    parts.append(value if isinstance(value, str) else "".join(value))
    return "\n".join(parts)


def tidy(notebook):
    """Join stream outputs, drop versions and times from the metadata: diffs should be quiet."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        joined = []
        for output in cell.outputs:
            output.get("metadata", {}).pop("execution", None)
            same = joined and output.output_type == "stream" == joined[-1].output_type
            if same and output.name == joined[-1].name:
                joined[-1].text += output.text
            else:
                joined.append(output)
        cell.outputs = joined
    return notebook


class Client(NotebookClient):
    """Executes a notebook and repeats what its cells print, as they print it."""

    def output(self, outs, msg, display_id, cell_index):
        if msg["msg_type"] == "stream":
            sys.stdout.write(msg["content"]["text"])
            sys.stdout.flush()
        return super().output(outs, msg, display_id, cell_index)


def execute(source, folder):
    """Run a notebook in a Jupyter kernel; write the executed copy to `folder`; return it.

    Raises:
      SystemExit: a cell failed. The copy, with the error in it, is written all the same.
    """
    notebook = build(source)
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f"{source.stem}.ipynb"
    print(f"== {source.stem} ==", flush=True)
    start = time.perf_counter()
    client = Client(notebook, timeout=None, kernel_name="python3",
                    resources={"metadata": {"path": str(ROOT)}})
    failed = None
    with open(folder / "kernel.log", "ab") as log:  # what a kernel says when it crashes
        try:
            client.execute(stdout=log, stderr=log)
        except CellExecutionError as error:
            failed = error
        except DeadKernelError:
            raise SystemExit(f"{source.stem}: the kernel died; {shown(folder / 'kernel.log')} may say "
                             "why (often: not enough memory)") from None
    copy.write_text(text_of(tidy(notebook)), encoding="utf-8")
    if failed:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", failed.traceback).strip()
        print(f"\n{plain}\n\n{source.stem} failed after {time.perf_counter() - start:.0f} s: "
              f"{shown(copy)}", file=sys.stderr)
        raise SystemExit(1)
    print(f"== {source.stem}: {time.perf_counter() - start:.0f} s -> {shown(copy)} ==", flush=True)
    return notebook


def shown(path):
    """A path as the reader would type it."""
    return os.path.relpath(path, ROOT) if Path(path).is_relative_to(ROOT) else str(path)


def problems():
    """What `--check` objects to, one line each."""
    found = []
    for orphan in sorted(FOLDER.glob("*.ipynb")):
        if not (ROOT / f"{orphan.stem}.py").exists():
            found.append(f"orphan, no source: {shown(orphan)}")
    for source in sources():
        target = target_of(source)
        if not target.exists():
            found.append(f"missing: {shown(target)}")
            continue
        stored = nbformat.read(target, as_version=4)
        if target.read_text(encoding="utf-8") != text_of(current(source)):
            found.append(f"out of date: {shown(target)}")
        elif not has_outputs(stored):
            found.append(f"without outputs: {shown(target)}")
        if has_error(stored):
            found.append(f"holds an error output: {shown(target)}")
        private = PRIVATE_PATHS.search(output_text(stored))
        if private:
            found.append(f"absolute path in an output ({private.group()}): {shown(target)}")
    return found


def update():
    """Rewrite the notebooks whose text changed, delete orphans, and say so."""
    FOLDER.mkdir(exist_ok=True)
    for orphan in FOLDER.glob("*.ipynb"):
        if not (ROOT / f"{orphan.stem}.py").exists():
            orphan.unlink()
            print(f"removed {shown(orphan)}")
    for source in sources():
        text, target = text_of(current(source)), target_of(source)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
            print(f"wrote {shown(target)}")


def execute_stored(every):
    """Store outputs for the notebooks that have none (or all), from a run at the tiny size.

    A copy that `run_all.sh` executed counts as a run, if its code is that of the source.
    """
    os.environ["SIZE"] = "tiny"
    folder = Path(os.environ.get("RUN_DIR", ROOT / "runs" / "tiny")) / "notebooks"
    for source in sources():
        notebook, copy = current(source), folder / f"{source.stem}.ipynb"
        if has_outputs(notebook) and not every:
            continue
        if every or not (copy.exists() and adopt(notebook, copy)):
            notebook = execute(source, folder)
        target_of(source).write_text(text_of(notebook), encoding="utf-8")


def adopt(notebook, copy):
    """Take the outputs of an executed copy; False if its code differs or it did not finish."""
    executed = nbformat.read(copy, as_version=4)
    if any(cell.execution_count is None for cell in code_cells(executed)) or has_error(executed):
        return False
    if adopted := keep_outputs(notebook, executed):
        print(f"outputs of {shown(copy)} -> {shown(FOLDER)}")
    return adopted


def set_repository(url):
    """Write another clone address, and the Colab badges that go with it, everywhere."""
    match = re.fullmatch(r"https://github\.com/([\w.-]+)/([\w.-]+?)(?:\.git)?/?", url)
    if not match:
        raise SystemExit("--repository wants https://github.com/NAME/REPOSITORY: "
                         "the Colab badge opens notebooks from GitHub")
    owner, name = match.groups()
    opening = (ROOT / "tools" / "opening.txt").read_text(encoding="utf-8")
    old_owner, old_name = re.search(r"https://github\.com/([\w.-]+)/([\w.-]+)\"", opening).groups()
    files = [*sources(), ROOT / "tools" / "opening.txt", *ROOT.glob("*.md")]
    for path in files:
        text = path.read_text(encoding="utf-8")
        new = text.replace(f"github.com/{old_owner}/{old_name}", f"github.com/{owner}/{name}")
        new = new.replace(f"/github/{old_owner}/{old_name}/", f"/github/{owner}/{name}/")
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"rewrote {shown(path)}")


class PeakMemory(threading.Thread):
    """Samples the largest resident set of any one process of this run: they inherit its RUN_DIR."""

    def __init__(self):
        super().__init__(daemon=True)
        self.gib, self.done = 0.0, threading.Event()

    def run(self):
        while not self.done.wait(1.0):
            for process in psutil.process_iter():
                try:
                    if process.environ().get("RUN_DIR") == os.environ["RUN_DIR"]:
                        self.gib = max(self.gib, process.memory_info().rss / 2**30)
                except (psutil.Error, OSError):
                    continue  # it ended, or it is not ours to look at


def run_series(first, last):
    """Execute the notebooks whose numbers lie between `first` and `last`, in order."""
    run = Path(os.environ["RUN_DIR"])
    chosen = [source for source in sources() if first <= source.name[:2] <= last]
    if not chosen:
        raise SystemExit(f"there is no notebook between {first} and {last}")
    memory, times = PeakMemory(), {}
    memory.start()
    for source in chosen:
        start = time.perf_counter()
        execute(source, run / "notebooks")
        times[source.stem] = round(time.perf_counter() - start, 1)
    memory.done.set()
    memory.join()
    stored = run / "times.json"
    earlier = json.loads(stored.read_text()) if stored.exists() else {}
    seconds = {**earlier.get("seconds", {}), **times}
    peak = max(memory.gib, earlier.get("peak_gib", 0.0))
    stored.write_text(json.dumps({"seconds": seconds, "peak_gib": round(peak, 2)}, indent=2) + "\n")
    print("   ".join(f"{name} {value:.0f} s" for name, value in times.items()))
    print(f"run_all: {len(times)} notebooks in {sum(times.values()) / 60:.1f} min, at most "
          f"{memory.gib:.1f} GiB in one process; results in {shown(run.resolve())}, "
          f"executed notebooks in {shown((run / 'notebooks').resolve())}")


def main():
    parser = argparse.ArgumentParser(prog="update_notebooks.sh", description=__doc__)
    parser.add_argument("--check", action="store_true",
                        help="change nothing; exit 1 if a notebook is out of date, an orphan, without "
                             "outputs, or holds an error or an absolute path in its outputs")
    parser.add_argument("--execute", action="store_true",
                        help="give outputs to the notebooks that have none, from a run at the tiny size")
    parser.add_argument("--all", action="store_true", help="with --execute: run all of them, whatever was run before")
    parser.add_argument("--repository", metavar="URL", help="write this clone address everywhere")
    parser.add_argument("--series", nargs=2, metavar=("FIRST", "LAST"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.series:
        run_series(*options.series)
    elif options.check:
        found = problems()
        print("\n".join(found) or "notebooks: all up to date, with outputs, without errors")
        raise SystemExit(1 if found else 0)
    else:
        if options.repository:
            set_repository(options.repository)
        update()
        if options.execute:
            execute_stored(options.all)
            subprocess.run([sys.executable, "-m", "helpers.server", "stop"], cwd=ROOT, check=False)


if __name__ == "__main__":
    main()
