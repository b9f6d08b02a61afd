"""Build, check and execute the notebooks. `update_notebooks.sh` calls this file.

The numbered .py files are the source; `notebooks/*.ipynb` are made from them and carry the outputs
of a run of exactly that source. jupytext converts; what it lacks is here: ids made from a cell's
text, and outputs that go when their code changes. (`tools/series.py` executes a range.)
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
from typing import Any

os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode as Notebook  # or a cell, or an output: it has one class

import budget

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}
INPUTS = ("data", "assets")  # what a page reads below these is part of what its outputs show
# Runs in the kernel before a page: it writes down which files Python opens there.
RECORDER = """
import os, sys
log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
seen = set()
def record(event, args):
    if event == "open" and isinstance(args[0], str) and args[0] not in seen:
        seen.add(args[0])
        os.write(log, os.fsencode(os.path.abspath(args[0]) + os.linesep))
sys.addaudithook(record)
"""
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
PRIVATE_PATHS = re.compile(r"/(?:home|Users|root|content|tmp|work|private|var/folders)/[\w.-]+")


def sources() -> list[Path]:
    """The notebooks' source files, in order."""
    return budget.pages()


def shown(path: Path) -> str:
    """A path as the reader would type it."""
    return os.path.relpath(path, ROOT) if Path(path).is_relative_to(ROOT) else str(path)


def code_cells(notebook: Notebook) -> list[Notebook]:
    """The code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def write(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    fresh = path.with_name(f".{path.name}.partial")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


# ── From source to notebook ──
def build(source: Path) -> Notebook:
    """Turn a percent-format source into a notebook without outputs, with ids made from content."""
    notebook = jupytext.read(source)
    seen: collections.Counter[str] = collections.Counter()
    for cell in notebook.cells:  # same text, same id: no noise in diffs
        digest = hashlib.sha1(cell.source.encode()).hexdigest()[:8]
        cell["id"] = f"{digest}-{seen[digest]}"
        seen[digest] += 1
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def stored(path: Path) -> Notebook | None:
    """A notebook file; None if there is none, or none that can be read."""
    try:
        return nbformat.read(path, as_version=4) if path.exists() else None
    except (ValueError, AttributeError, nbformat.ValidationError):
        return None


def keep_outputs(new: Notebook, old: Notebook) -> bool:
    """Copy outputs from `old` if its code cells are those of `new`; return whether they are."""
    cells, before_cells = code_cells(new), code_cells(old)
    if [cell.source for cell in cells] != [cell.source for cell in before_cells]:
        return False
    for cell, before in zip(cells, before_cells, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    if "made_from" in old.metadata:
        new.metadata["made_from"] = old.metadata["made_from"]
    return True


def current(source: Path) -> Notebook:
    """The notebook as it should be on disk: built, with the stored outputs if still valid."""
    notebook, old = build(source), stored(target_of(source))
    if old:
        keep_outputs(notebook, old)
    return notebook


def target_of(source: Path) -> Path:
    """Where the notebook made from a source lives."""
    return FOLDER / f"{source.stem}.ipynb"


def text_of(notebook: Notebook) -> str:
    """The file's text."""
    return nbformat.writes(notebook) + "\n"


def made_by_us(path: Path) -> bool:
    """Did `build` make this notebook? Its cells' ids begin with a hash of their text."""
    notebook = stored(path)
    if notebook is None or not re.fullmatch(r"(\d\d|own)_\w+", path.stem):
        return False
    return all(re.fullmatch(r"[0-9a-f]{8}-\d+", cell.get("id", "")) for cell in notebook.cells)


def update() -> None:
    """Rewrite the notebooks whose text changed, delete those of pages that are gone, and say so."""
    wanted = {target_of(source): text_of(current(source)) for source in sources()}
    FOLDER.mkdir(exist_ok=True)
    for orphan in sorted(set(FOLDER.glob("*.ipynb")) - set(wanted)):
        if made_by_us(orphan):
            orphan.unlink()
            print(f"removed {shown(orphan)}")
    for target, text in wanted.items():
        if not target.exists() or target.read_bytes() != text.encode():
            write(target, text)
            print(f"wrote {shown(target)}")


# ── Outputs ──
def inputs_in(log: Path) -> list[str]:
    """The folders of stored results and assets that a page has read, such as data/anchors."""
    found = set()
    for line in log.read_text(errors="surrogateescape").splitlines():
        path = Path(line)
        if not path.is_relative_to(ROOT) or path.suffix in (".py", ".pyc"):
            continue
        parts = path.relative_to(ROOT).parts
        if parts[0] in INPUTS and len(parts) > 2:
            found.add("/".join(parts[:2]))
    return sorted(found)


def made_from(folders: list[str]) -> dict[str, str]:
    """{folder: hash of its files}; prose about them and code that made them are left out."""
    hashes = {}
    for name in folders:
        digest = hashlib.sha256()
        for file in sorted((ROOT / name).rglob("*")):
            if file.is_file() and file.suffix not in (".md", ".py", ".pyc"):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        hashes[name] = digest.hexdigest()[:12]
    return hashes


def outdated(notebook: Notebook) -> list[str]:
    """The folders that have changed since a notebook was executed, which read something there."""
    then = notebook.metadata.get("made_from")
    if then is None:
        return ["what it reads was recorded, or one of its inputs"]
    now = made_from(list(then))
    return [name for name in then if then[name] != now[name]]


def outputs(notebook: Notebook) -> list[Notebook]:
    """All outputs of a notebook's cells."""
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def has_error(notebook: Notebook) -> bool:
    """Did a cell fail?"""
    return any(output.output_type == "error" for output in outputs(notebook))


def said(output: Notebook) -> str:
    """What an output says, as one string (images left out)."""
    texts = [output.get("text", "")]
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            texts.append("".join(value))
    return "\n".join(texts)


def tidy(notebook: Notebook) -> Notebook:
    """Join stream outputs, drop versions and terminal colors: diffs should be quiet."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in code_cells(notebook):
        joined: list[Notebook] = []
        for output in cell.outputs:
            if "text/plain" in output.get("data", {}):  # rich makes bold numbers of ours
                output.data["text/plain"] = ESCAPES.sub("", output.data["text/plain"])
            if joined and "name" in output and output.name == joined[-1].get("name"):  # a stream's
                joined[-1].text += output.text
            else:
                joined.append(output)
        cell.outputs = joined
    return notebook


def problems() -> list[str]:
    """What `--check` objects to, one line each."""
    found = []
    stems = {source.stem for source in sources()}
    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.stem not in stems:
            found.append(f"orphan, no source: {shown(path)}")
    for source in sources():
        found += problems_of(source)
    return found


def problems_of(source: Path) -> list[str]:
    """What `--check` objects to in the notebook of one page."""
    target = target_of(source)
    name, notebook = shown(target), stored(target)
    found = []
    if notebook is None:
        return [f"missing or unreadable: {name}"]
    if target.read_text(encoding="utf-8") != text_of(current(source)):
        found.append(f"out of date: {name}")
    elif not outputs(notebook):
        found.append(f"without outputs: {name}")
    elif changed := outdated(notebook):
        found.append(f"executed before {' and '.join(changed)} changed: {name}")
    if has_error(notebook):
        found.append(f"holds an error output: {name}")
    private = PRIVATE_PATHS.search("\n".join(map(said, outputs(notebook))))
    if private:
        found.append(f"absolute path in an output ({private.group()}): {name}")
    return found


# ── Executing ──
class Client(NotebookClient):
    """Executes a notebook and repeats what its cells print, as they print it."""

    child: Any = None           # the kernel's process, which leads a group
    guard: int = -1             # the pipe of its guard
    opened: Path | None = None  # a file that gets the name of every file that the kernel opens

    async def async_start_new_kernel(self, **options: Any) -> None:
        await super().async_start_new_kernel(**options)
        self.child = self.km.provisioner.process
        # A shell that kills the kernel's group when this process ends without a word (kill -9).
        end, self.guard = os.pipe()
        subprocess.Popen(["sh", "-c", "read word || kill -s KILL -- -$0", str(self.child.pid)],
                         stdin=end, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(end)

    async def async_start_new_kernel_client(self) -> Any:
        client = await super().async_start_new_kernel_client()
        if self.opened:
            code = f"exec({RECORDER!r}, {{'LOG': {str(self.opened)!r}}})"
            await client.execute(code, silent=True, store_history=False, reply=True)
        return client

    def output(self, outs: Any, msg: Any, display_id: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "stream":
            try:
                sys.stdout.write(msg["content"]["text"])
                sys.stdout.flush()
            except BrokenPipeError:  # `| head`: as if the terminal had been closed
                os.kill(os.getpid(), signal.SIGHUP)
        return super().output(outs, msg, display_id, cell_index)

    def end(self, seconds: float = 25.0) -> None:
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


def last_words(log: Path) -> str:
    """The last line that a kernel has written to its log, Jupyter's own left out."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip() and "[IPKernelApp]" not in line]
    return f"it last said: {said[-1][:300]}" if said else ""


def execute(source: Path, folder: Path) -> Notebook:
    """Run a notebook in a Jupyter kernel; write the executed copy to `folder`; return it.

    Raises:
      SystemExit: a cell failed. The copy, with the error in it, is written all the same.
    """
    notebook = build(source)
    folder.mkdir(parents=True, exist_ok=True)
    copy, kernel_log = folder / f"{source.stem}.ipynb", folder / "kernel.log"
    opened = folder / f".{source.stem}.opened"
    opened.write_text("")
    print(f"== {source.stem} ==", flush=True)
    start, failed = time.perf_counter(), None
    client = Client(notebook, timeout=None, kernel_name="python3", record_timing=False,
                    resources={"metadata": {"path": str(ROOT)}})
    client.opened = opened.resolve()
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
    notebook.metadata["made_from"] = made_from(inputs_in(opened))
    opened.unlink()
    write(copy, text_of(notebook))
    if failed:
        print(f"\n{failed}\n\n{source.stem} failed after {took:.0f} s: {shown(copy)}",
              file=sys.stderr, flush=True)
        raise SystemExit(1)
    if has_error(notebook):  # in a cell tagged raises-exception, which stops nothing
        print(f"{source.stem}: a cell that only teaches failed, see {shown(copy)}. What later "
              "pages need is written.", file=sys.stderr, flush=True)
    print(f"== {source.stem}: {took:.0f} s -> {shown(copy)} ==", flush=True)
    return notebook


def execute_stored(every: bool, folder: Path) -> None:
    """Store outputs for the notebooks that have none (or all), from a run at the tiny size.

    One that read a file of INPUTS counts as having none once that changes. A copy that `run_all.sh`
    executed counts as a run, if its code is that of the source.
    """
    os.environ["SIZE"] = "tiny"
    for source in sources():
        notebook, copy = current(source), stored(folder / f"{source.stem}.ipynb")
        if not every and outputs(notebook) and not outdated(notebook):
            continue
        if copy and is_whole(copy) and not every and keep_outputs(notebook, copy):
            print(f"outputs of {source.stem} as `run_all.sh` executed it -> {shown(FOLDER)}")
        else:
            notebook = execute(source, folder)
        write(target_of(source), text_of(notebook))


def is_whole(copy: Notebook) -> bool:
    """Did every cell of an executed copy run, without an error, on what's stored today?"""
    if has_error(copy) or outdated(copy):
        return False
    return all(cell.execution_count for cell in code_cells(copy))


def take(folder: Path) -> None:
    """Store the outputs of all pages that `run_all.sh` has executed, if their code is today's."""
    for source in sources():
        notebook = build(source)
        copy = stored(folder / f"{source.stem}.ipynb")
        if copy and is_whole(copy) and keep_outputs(notebook, copy):
            write(target_of(source), text_of(notebook))
            print(f"outputs of {source.stem} from {shown(folder)}")


# ── Publishing ──
def repository() -> str:
    """The published copy's OWNER/NAME, from the Colab badge in README."""
    readme = (ROOT / "README.md").read_text()
    return re.findall(r"/github/([\w.-]+/[\w.-]+)/blob/", readme)[0]


def main() -> None:
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
    parser.add_argument("--take", action="store_true",
                        help="take the outputs of every page that run_all.sh has executed in "
                             "RUN_DIR, also where a page has outputs already")
    options = parser.parse_args()
    if options.check:
        found = problems()
        print("\n".join(found) or "notebooks: all up to date, with outputs, without errors")
        raise SystemExit(1 if found else 0)
    update()
    run = ROOT / (os.environ.get("RUN_DIR") or "runs/tiny")
    if options.take:
        take(run / "notebooks")
    if options.execute:
        try:
            execute_stored(options.all, run / "notebooks")
        finally:
            command = [sys.executable, "-m", "serving", "stop", str(run / "serve")]
            subprocess.run(command, cwd=ROOT, check=False)


if __name__ == "__main__":
    main()
