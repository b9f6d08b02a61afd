"""Build, check and execute the notebooks. `update_notebooks.sh` calls this file.

The numbered .py files are the source; `notebooks/*.ipynb` are made from them and carry the outputs
of a run of exactly that source. jupytext converts; what it lacks is here: ids made from a cell's
text, and outputs that go when the code they came from changes. (`tools/series.py` executes a range.)
"""

import argparse
import collections
import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}
# Stored results that a notebook shows: its outputs are as old as they were when it was executed.
SHOWS = {"01": ("data/dryrun", "data/published"), "03": ("data/dryrun",), "05": ("data/published",),
         "08": ("data/dryrun", "data/anchors"), "10": ("data/published",),
         "11": ("data/dryrun", "data/qlora"), "12": ("data/nca",), "13": ("data/rl",)}
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
PRIVATE_PATHS = re.compile(r"/(?:home|Users|root|content|tmp|work|private|var/folders)/[\w.-]+")


def sources():
    """The notebooks' source files, in order."""
    return sorted(ROOT.glob("[0-9][0-9]_*.py"))


def shown(path):
    """A path as the reader would type it."""
    return os.path.relpath(path, ROOT) if Path(path).is_relative_to(ROOT) else str(path)


def code_cells(notebook):
    """The code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def write(path, text):
    """Write a text file, whole or not at all."""
    fresh = path.with_name(f".{path.name}.partial")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


# ── From source to notebook ──
def build(source):
    """Turn a percent-format source into a notebook without outputs, with ids made from content."""
    notebook, seen = jupytext.read(source), collections.Counter()
    for cell in notebook.cells:  # same text, same id: no noise in diffs
        digest = hashlib.sha1(cell.source.encode()).hexdigest()[:8]
        cell["id"] = f"{digest}-{seen[digest]}"
        seen[digest] += 1
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def stored(path):
    """A notebook file; None if there is none, or none that can be read."""
    try:
        return nbformat.read(path, as_version=4) if path.exists() else None
    except (ValueError, AttributeError, nbformat.ValidationError):
        return None


def keep_outputs(new, old):
    """Copy outputs from `old` if its code cells are those of `new`; return whether they are."""
    if [cell.source for cell in code_cells(new)] != [cell.source for cell in code_cells(old)]:
        return False
    for cell, before in zip(code_cells(new), code_cells(old), strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    if "made_from" in old.metadata:
        new.metadata["made_from"] = old.metadata["made_from"]
    return True


def current(source):
    """The notebook as it should be on disk: built, with the stored outputs if still valid."""
    notebook, old = build(source), stored(target_of(source))
    if old:
        keep_outputs(notebook, old)
    return notebook


def target_of(source):
    """Where the notebook made from a source lives."""
    return FOLDER / f"{source.stem}.ipynb"


def text_of(notebook):
    """The file's text."""
    return nbformat.writes(notebook) + "\n"


def update():
    """Rewrite the notebooks whose text changed, delete orphans, and say so."""
    wanted = {target_of(source): text_of(current(source)) for source in sources()}
    FOLDER.mkdir(exist_ok=True)
    for orphan in sorted(set(FOLDER.glob("*.ipynb")) - set(wanted)):
        orphan.unlink()
        print(f"removed {shown(orphan)}")
    for target, text in wanted.items():
        if not target.exists() or target.read_bytes() != text.encode():
            write(target, text)
            print(f"wrote {shown(target)}")


# ── Outputs ──
def made_from(source):
    """{folder of stored results: hash of its tables} for those that a notebook shows."""
    found = {}
    for name in SHOWS.get(source.stem[:2], ()):
        digest = hashlib.sha256()
        for file in sorted((ROOT / name).rglob("*")):
            if file.suffix in (".csv", ".json"):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        found[name] = digest.hexdigest()[:12]
    return found


def outdated(source, notebook):
    """The stored results that have changed since a notebook was executed."""
    then = notebook.metadata.get("made_from", {})
    return [name for name, digest in made_from(source).items() if then.get(name) != digest]


def outputs(notebook):
    """All outputs of a notebook's cells."""
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def has_error(notebook):
    """Did a cell fail?"""
    return any(output.output_type == "error" for output in outputs(notebook))


def said(output):
    """What an output says, as one string (images left out)."""
    texts = ["".join(value) for kind, value in output.get("data", {}).items() if kind[:5] == "text/"]
    return "\n".join([output.get("text", ""), *texts])


def tidy(notebook):
    """Join stream outputs, drop versions and terminal colours: diffs should be quiet."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in code_cells(notebook):
        joined = []
        for output in cell.outputs:
            if "text/plain" in output.get("data", {}):  # rich makes bold numbers of ours
                output.data["text/plain"] = ESCAPES.sub("", output.data["text/plain"])
            if joined and "name" in output and output.name == joined[-1].get("name"):  # a stream's
                joined[-1].text += output.text
            else:
                joined.append(output)
        cell.outputs = joined
    return notebook


def problems():
    """What `--check` objects to, one line each."""
    found = [f"orphan, no source: {shown(path)}" for path in sorted(FOLDER.glob("*.ipynb"))
             if not (ROOT / f"{path.stem}.py").exists()]
    for source in sources():
        target, old = target_of(source), stored(target_of(source))
        if old is None:
            found.append(f"missing or unreadable: {shown(target)}")
            continue
        if target.read_text(encoding="utf-8") != text_of(current(source)):
            found.append(f"out of date: {shown(target)}")
        elif not outputs(old):
            found.append(f"without outputs: {shown(target)}")
        elif changed := outdated(source, old):
            found.append(f"executed before {' and '.join(changed)} changed: {shown(target)}")
        if has_error(old):
            found.append(f"holds an error output: {shown(target)}")
        if private := PRIVATE_PATHS.search("\n".join(map(said, outputs(old)))):
            found.append(f"absolute path in an output ({private.group()}): {shown(target)}")
    return found


# ── Executing ──
class Client(NotebookClient):
    """Executes a notebook and repeats what its cells print, as they print it."""

    child = guard = None  # the kernel's process, which leads a group, and the pipe of its guard

    async def async_start_new_kernel(self, **options):
        await super().async_start_new_kernel(**options)
        self.child = self.km.provisioner.process
        # A shell that kills the kernel's group when this process ends without a word (kill -9).
        end, self.guard = os.pipe()
        subprocess.Popen(["sh", "-c", "read word || kill -s KILL -- -$0", str(self.child.pid)],
                         stdin=end, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(end)

    def output(self, outs, msg, display_id, cell_index):
        if msg["msg_type"] == "stream":
            try:
                sys.stdout.write(msg["content"]["text"])
                sys.stdout.flush()
            except BrokenPipeError:  # `| head`: as if the terminal had been closed
                os.kill(os.getpid(), signal.SIGHUP)
        return super().output(outs, msg, display_id, cell_index)

    def end(self, seconds=25.0):
        """End the kernel's group, if it is there; servers have a session of their own and are left.

        SIGTERM ends a kernel at once, unless it has a handler for it: then it is finishing
        something, a copy to a bucket for example, and gets `seconds`.
        """
        if not self.child:
            return
        self.child.terminate()
        limit = time.monotonic() + seconds
        while self.child.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self.child.pid, signal.SIGKILL)
        os.write(self.guard, b"ended\n")
        os.close(self.guard)


def last_words(log):
    """The last line that a kernel has written to its log, Jupyter's own left out."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip() and "[IPKernelApp]" not in line]
    return f"it last said: {said[-1][:300]}" if said else ""


def execute(source, folder):
    """Run a notebook in a Jupyter kernel; write the executed copy to `folder`; return it.

    Raises:
      SystemExit: a cell failed. The copy, with the error in it, is written all the same.
    """
    notebook, stored_results = build(source), made_from(source)
    folder.mkdir(parents=True, exist_ok=True)
    copy, kernel_log = folder / f"{source.stem}.ipynb", folder / "kernel.log"
    print(f"== {source.stem} ==", flush=True)
    start, failed = time.perf_counter(), None
    client = Client(notebook, timeout=None, kernel_name="python3", record_timing=False,
                    resources={"metadata": {"path": str(ROOT)}})
    pool = ThreadPoolExecutor(1)  # signals then reach the main thread, and not nbclient
    with open(kernel_log, "wb") as log:  # what a kernel says when it crashes
        try:
            pool.submit(client.execute, stdout=log, stderr=log).result()
        except CellExecutionError as error:
            failed = ESCAPES.sub("", error.traceback).strip()
        except DeadKernelError:
            said = last_words(kernel_log) or (
                f"exit status {client.child.poll()}, -9 is often: not enough memory")
            raise SystemExit(f"{source.stem}: the kernel died; {said} "
                             f"({shown(kernel_log)})") from None
        finally:
            client.end()
            pool.shutdown(wait=False)
    took = time.perf_counter() - start
    tidy(notebook)
    if stored_results:
        notebook.metadata["made_from"] = stored_results
    write(copy, text_of(notebook))
    if failed:
        print(f"\n{failed}\n\n{source.stem} failed after {took:.0f} s: {shown(copy)}",
              file=sys.stderr, flush=True)
        raise SystemExit(1)
    if has_error(notebook):  # in a cell tagged raises-exception, which stops nothing
        print(f"{source.stem}: a cell that only teaches failed, see {shown(copy)}. What later pages "
              "need is written.", file=sys.stderr, flush=True)
    print(f"== {source.stem}: {took:.0f} s -> {shown(copy)} ==", flush=True)
    return notebook


def execute_stored(every, folder):
    """Store outputs for the notebooks that have none (or all), from a run at the tiny size.

    One that shows stored results counts as having none once they change. A copy that `run_all.sh`
    executed counts as a run, if its code is that of the source.
    """
    os.environ["SIZE"] = "tiny"
    for source in sources():
        notebook, copy = current(source), stored(folder / f"{source.stem}.ipynb")
        if not every and outputs(notebook) and not outdated(source, notebook):
            continue
        ran = copy and not has_error(copy) and not outdated(source, copy) and all(
            cell.execution_count for cell in code_cells(copy))
        if ran and not every and keep_outputs(notebook, copy):
            print(f"outputs of {source.stem} as `run_all.sh` executed it -> {shown(FOLDER)}")
        else:
            notebook = execute(source, folder)
        write(target_of(source), text_of(notebook))


# ── Publishing ──
def repository():
    """The published copy's OWNER/NAME, from the Colab badge in README."""
    return re.search(r"/github/([\w.-]+/[\w.-]+)/blob/", (ROOT / "README.md").read_text())[1]


def main():
    """Read the options and do what they say."""
    parser = argparse.ArgumentParser(prog="update_notebooks.sh", description=__doc__)
    parser.add_argument("--check", action="store_true",
                        help="change nothing; exit 1 if a notebook is out of date, an orphan, "
                             "without outputs, older than the stored results that it shows, or "
                             "has an error or an absolute path in its outputs")
    parser.add_argument("--execute", action="store_true",
                        help="give outputs to the notebooks that have none, run at the tiny size")
    parser.add_argument("--all", action="store_true",
                        help="with --execute: run all of them, whatever was run before")
    options = parser.parse_args()
    if options.check:
        found = problems()
        print("\n".join(found) or "notebooks: all up to date, with outputs, without errors")
        raise SystemExit(1 if found else 0)
    update()
    if options.execute:
        run = ROOT / (os.environ.get("RUN_DIR") or "runs/tiny")
        try:
            execute_stored(options.all, run / "notebooks")
        finally:
            subprocess.run([sys.executable, "-m", "serving", "stop", run / "serve"], cwd=ROOT, check=False)


if __name__ == "__main__":
    main()
