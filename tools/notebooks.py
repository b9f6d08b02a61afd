"""Build, check and execute the notebooks. `update_notebooks.sh` calls this file.

The numbered .py files are the source; `notebooks/*.ipynb` are made from them and carry the outputs
of a run of exactly that source. (`tools/series.py` executes a range of them, for `run_all.sh`.)
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
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel
sys.modules.setdefault("rfc3987_syntax", None)  # Jupyter Lab brings it; a second to load, unused

import jupytext
import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from helpers.run import UserError, run_dir, write_text

FOLDER = ROOT / "notebooks"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}
# Stored results that a notebook shows: its outputs are as old as they were when it was executed.
SHOWS = {"01": ("data/dryrun", "data/published"), "03": ("data/dryrun",),
         "05": ("data/published",), "08": ("data/dryrun", "data/published"),
         "10": ("data/published",), "11": ("data/dryrun", "data/qlora"), "12": ("data/nca",)}
# Where an opening clones from, and the name of the folder.
ADDRESS = re.compile(r'(?<=--depth=1 )https://github\.com/[\w./-]+|(?<="\.\.", )"[\w.-]+"'
                     r'|(?<=or \[)"[\w.-]+"')
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
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


def made_from(source):
    """{folder or file of stored results: hash of its tables} for those that a notebook shows."""
    found = {}
    for name in SHOWS.get(source.stem[:2], ()):
        path, digest = ROOT / name, hashlib.sha256()
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in (".csv", ".json"):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        found[name] = digest.hexdigest()[:12]
    return found


def outdated(source, notebook):
    """The stored results that have changed since a notebook was executed."""
    then = notebook.metadata.get("made_from", {})
    return [name for name, digest in made_from(source).items() if then.get(name) != digest]


def code_cells(notebook):
    """The code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def keep_outputs(new, old):
    """Copy outputs from `old` if its code cells are those of `new`; return whether they are.

    Another clone address makes no other code, unless the outputs show the one that was.
    """
    def code(notebook):
        return [ADDRESS.sub("", cell.source) for cell in code_cells(notebook)]
    now, then = (ADDRESS.findall("\n".join(cell.source for cell in code_cells(notebook)))
                 for notebook in (new, old))
    if code(new) != code(old) or now != then and any(url in output_text(old) for url in then):
        return False
    for cell, before in zip(code_cells(new), code_cells(old)):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    if "made_from" in old.metadata:
        new.metadata["made_from"] = old.metadata["made_from"]
    return True


def target_of(source):
    """Where the notebook made from a source lives."""
    return FOLDER / f"{source.stem}.ipynb"


def stored(path):
    """A notebook file; None if there is none, or, said, none that can be read."""
    if not path.exists():
        return None
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        return notebook
    except (ValueError, AttributeError, KeyError, TypeError, nbformat.ValidationError):
        print(f"{shown(path)} is unreadable and counts as absent", flush=True)
        return None


def current(source):
    """The notebook as it should be on disk: built, with the stored outputs if still valid."""
    notebook, old = build(source), stored(target_of(source))
    if old:
        keep_outputs(notebook, old)
    return notebook


def unparsable():
    """The sources that are not Python, one line each: their notebooks must not be touched."""
    found = []
    for source in sources():
        try:
            compile(source.read_text(encoding="utf-8"), source.name, "exec")
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            found.append(f"{source.name}{f', line {line}' if line else ''}, does not parse: "
                         f"{getattr(error, 'msg', error)}")
    return found


def refuse_unparsable():
    """Raise a `SystemExit` with a line for each source that does not parse."""
    if wrong := unparsable():
        raise SystemExit("\n".join([*wrong, "no notebook was changed"]))


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
    """Join stream outputs, drop versions, times and terminal colours: diffs should be quiet."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        joined = []
        for output in cell.outputs:
            output.get("metadata", {}).pop("execution", None)
            if "text/plain" in output.get("data", {}):  # rich makes bold numbers of ours
                output.data["text/plain"] = ESCAPES.sub("", output.data["text/plain"])
            same = joined and output.output_type == "stream" == joined[-1].output_type
            if same and output.name == joined[-1].name:
                joined[-1].text += output.text
            else:
                joined.append(output)
        cell.outputs = joined
    return notebook


class Client(NotebookClient):
    """Executes a notebook and repeats what its cells print, as they print it."""

    kernel = child = None  # the kernel's process, which leads a group, to psutil and to Python
    guard = None           # the pipe of its guard

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.unread = Future()  # fails as soon as nobody reads what is printed here

    async def async_start_new_kernel(self, **options):
        await super().async_start_new_kernel(**options)
        self.kernel = psutil.Process(self.km.provisioner.pid)
        self.child = self.km.provisioner.process
        # A shell that kills the kernel's group when this process ends without a word (kill -9).
        end, self.guard = os.pipe()
        subprocess.Popen(["sh", "-c", "read word || kill -s KILL -- -$0", str(self.kernel.pid)],
                         stdin=end, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(end)

    def cause(self):
        """How the kernel has ended, in words."""
        status = self.child.poll()
        if status == -signal.SIGKILL:
            return "killed from outside, often: not enough memory"
        return signal.Signals(-status).name if (status or 0) < 0 else f"exit status {status}"

    def dismiss(self):
        """The kernel has ended: its guard may go."""
        if self.guard is not None:
            os.write(self.guard, b"ended\n")
            os.close(self.guard)
            self.guard = None

    def output(self, outs, msg, display_id, cell_index):
        if msg["msg_type"] == "stream":
            try:
                sys.stdout.write(msg["content"]["text"])
                sys.stdout.flush()
            except BrokenPipeError as error:
                if not self.unread.done():
                    self.unread.set_exception(error)
        return super().output(outs, msg, display_id, cell_index)


def end_kernel(kernel, seconds=2.0, longest=25.0):
    """End a kernel and its children; servers, which have a session of their own, are left.

    SIGTERM ends a kernel at once, unless it has a handler for it: then it is finishing something,
    a copy to a bucket for example, and gets `longest`. What is left after that is killed.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        status = Path(f"/proc/{kernel.pid}/status")
        # psutil does not say which signals are caught
        caught = re.search(r"SigCgt:\s*(\w+)", status.read_text()) if status.exists() else None
        busy = caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1
        kernel.terminate()
        end = time.monotonic() + (longest if busy else seconds)
        while kernel.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(kernel.pid, signal.SIGKILL)


def in_thread(other, work, *arguments, **options):
    """Call `work` in a thread and wait: signals then reach the main thread, and nobody else.

    If the future `other` ends first, that one is what this raises or returns.
    """
    pool = ThreadPoolExecutor(1)
    try:
        running = pool.submit(work, *arguments, **options)
        ended, _ = wait({running, other}, return_when=FIRST_COMPLETED)
        return (other if other in ended else running).result()
    finally:
        pool.shutdown(wait=False)


def last_words(log, begin):
    """The last line that a kernel has written to its log since `begin`, Jupyter's own left out."""
    with open(log, "rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip() and "[IPKernelApp]" not in line]
    return said[-1][:300] if said else ""


def execute(source, folder, **options):
    """Run a notebook in a Jupyter kernel; write the executed copy to `folder`; return it.

    Args:
      **options: for the kernel's process, as for `subprocess.Popen`.

    Raises:
      SystemExit: a cell failed. The copy, with the error in it, is written all the same.
    """
    notebook, stored_results = build(source), made_from(source)
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / f"{source.stem}.ipynb"
    print(f"== {source.stem} ==", flush=True)
    start = time.perf_counter()
    client = Client(notebook, timeout=None, kernel_name="python3",
                    resources={"metadata": {"path": str(ROOT)}})
    failed, ended = None, False
    with open(folder / "kernel.log", "ab") as log:  # what a kernel says when it crashes
        begin = log.tell()
        try:
            in_thread(client.unread, client.execute, stdout=log, stderr=log, **options)
            ended = True
        except CellExecutionError as error:
            ended, failed = True, re.sub(r"\x1b\[[0-9;]*m", "", error.traceback).strip()
        except DeadKernelError:
            said = last_words(folder / "kernel.log", begin)
            why = f"it last said: {said}" if said else client.cause()
            raise SystemExit(f"{source.stem}: the kernel died; {why} "
                             f"({shown(folder / 'kernel.log')})") from None
        finally:
            if client.kernel and not ended:
                end_kernel(client.kernel)
            client.dismiss()
    took = time.perf_counter() - start
    if failed:
        print(f"\n{failed}\n\n{source.stem} failed after {took:.0f} s: {shown(copy)}",
              file=sys.stderr, flush=True)
    tidy(notebook)
    if stored_results:
        notebook.metadata["made_from"] = stored_results
    try:
        write_text(copy, text_of(notebook))
    except UserError as error:
        what = "" if failed else f"{source.stem} ran to its end, and what it wrote is kept. "
        raise SystemExit(f"{what}{shown(copy)} could not be saved: {error}") from None
    if failed:
        raise SystemExit(1)
    print(f"== {source.stem}: {took:.0f} s -> {shown(copy)} ==", flush=True)
    return notebook


def shown(path):
    """A path as the reader would type it."""
    return os.path.relpath(path, ROOT) if Path(path).is_relative_to(ROOT) else str(path)


def problems():
    """What `--check` objects to, one line each."""
    found = unparsable()
    for orphan in sorted(FOLDER.glob("*.ipynb")):
        if not (ROOT / f"{orphan.stem}.py").exists():
            found.append(f"orphan, no source: {shown(orphan)}")
    for source in sources():
        target = target_of(source)
        old = stored(target)
        if old is None:
            found.append(f"missing: {shown(target)}")
            continue
        if target.read_text(encoding="utf-8") != text_of(current(source)):
            found.append(f"out of date: {shown(target)}")
        elif not has_outputs(old):
            found.append(f"without outputs: {shown(target)}")
        elif changed := outdated(source, old):
            found.append(f"executed before {' and '.join(changed)} changed: {shown(target)}")
        if has_error(old):
            found.append(f"holds an error output: {shown(target)}")
        private = PRIVATE_PATHS.search(output_text(old))
        if private:
            found.append(f"absolute path in an output ({private.group()}): {shown(target)}")
    return found


def update():
    """Rewrite the notebooks whose text changed, delete orphans, and say so.

    Raises:
      SystemExit: a source does not parse; then nothing is changed.
    """
    refuse_unparsable()
    FOLDER.mkdir(exist_ok=True)
    for orphan in FOLDER.glob("*.ipynb"):
        if not (ROOT / f"{orphan.stem}.py").exists():
            orphan.unlink()
            print(f"removed {shown(orphan)}")
    for source in sources():
        text, target = text_of(current(source)), target_of(source)
        if not target.exists() or target.read_bytes() != text.encode():
            write_text(target, text)
            print(f"wrote {shown(target)}")


def execute_stored(every):
    """Store outputs for the notebooks that have none (or all), from a run at the tiny size.

    One that shows stored results counts as having none once they change. A copy that `run_all.sh`
    executed counts as a run, if its code is that of the source.
    """
    os.environ |= {"SIZE": "tiny", "SERVER_OWNER": str(os.getpid())}
    folder = run_dir("notebooks")
    for source in sources():
        notebook, copy = current(source), folder / f"{source.stem}.ipynb"
        if has_outputs(notebook) and not outdated(source, notebook) and not every:
            continue
        if every or not adopt(source, notebook, copy):
            notebook = execute(source, folder)
        write_text(target_of(source), text_of(notebook))


def adopt(source, notebook, copy):
    """Take the outputs of an executed copy; False if its code or what it shows is not today's, or
    if it did not finish."""
    executed = stored(copy)
    if executed is None or has_error(executed) or outdated(source, executed):
        return False
    if any(cell.execution_count is None for cell in code_cells(executed)):
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
        new = new.replace(f'"{old_name}"', f'"{name}"') if path.suffix != ".md" else new
        if new != text:
            write_text(path, new)
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


def main():
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    parser = argparse.ArgumentParser(prog="update_notebooks.sh", description=__doc__)
    parser.add_argument("--check", action="store_true",
                        help="change nothing; exit 1 if a notebook is out of date, an orphan, "
                             "without outputs, older than the stored results that it shows, or "
                             "has an error or an absolute path in its outputs")
    parser.add_argument("--execute", action="store_true",
                        help="give outputs to the notebooks that have none, run at the tiny size")
    parser.add_argument("--all", action="store_true",
                        help="with --execute: run all of them, whatever was run before")
    parser.add_argument("--repository", metavar="URL", help="write this clone address everywhere")
    options = parser.parse_args()
    if options.check:
        found = problems()
        print("\n".join(found) or "notebooks: all up to date, with outputs, without errors")
        raise SystemExit(1 if found else 0)
    else:
        if options.repository:
            refuse_unparsable()
            set_repository(options.repository)
        update()
        if options.execute:
            try:
                execute_stored(options.all)
            finally:
                subprocess.run([sys.executable, "-m", "serving.server", "stop"], cwd=ROOT,
                               check=False)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"update_notebooks: {error}") from None
