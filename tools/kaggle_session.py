"""One session on Kaggle's TPU: install, fetch the base, run the pages, keep what counts.

    tools/kaggle_session.py [--smoke]

scripts/kaggle_launch.py starts it, with the Python of Kaggle's image. JAX isn't imported here: one
process at a time owns the chips. However it ends, KAGGLE_WORKING holds what the next session needs,
and report.json. Only the standard library is needed, as the packages are installed by what it runs.

KAGGLE_WORKING, KAGGLE_SCRATCH and KAGGLE_INPUT name the three disks, KAGGLE_HOURS how long it may
take, BASE_FROM whether the base comes from the "hub" or a "mount" (unset: the one, then the other).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from helpers import run
from helpers.kept import Keeper, earlier_output
from helpers.run import UserError
from tables import hardware, kaggle

HOURS = 8.5        # of the nine that a session lasts
# A smoke test's, of the 1.5 and 2.5 that scripts/kaggle.sh asks for. The 31B's 62 GB take up to
# half an hour to come, and its server up to an hour to start.
SMOKE_HOURS = {"31b": 2.4}
SMALL_SMOKE_HOURS = 1.4
KEEP_EVERY = 600.0  # seconds between two copies of what is worth keeping
PATIENCE = 120.0   # seconds that a page gets to end in order
TRIES = 5          # of serving/v5e.py, which only the series' own Python can import
# The hub's name of each size's base, and where Kaggle mounts its own copy.
BASES = {"31b": ("google/gemma-4-31B-it", "gemma-4-31b-it"),
         "e2b": ("google/gemma-4-E2B-it", "gemma-4-e2b-it")}
MOUNTS = "models/google/gemma-4/transformers"
STAGE = "import sys; from helpers import remote; print(remote.stage(sys.argv[1]))"


class Stopped(BaseException):
    """A signal asked this process to end."""


class OutOfTime(Exception):
    """The clock has run out; what was finished is kept."""


class Places(NamedTuple):
    """The three disks of a session."""

    working: Path  # persists, and has 20 GB
    scratch: Path  # has a terabyte, and is gone at the end
    input: Path    # what was attached: models, an earlier output

    @classmethod
    def here(cls) -> "Places":
        """Kaggle's own places, or those that the environment names."""
        ask = os.environ.get
        return cls(Path(ask("KAGGLE_WORKING", "/kaggle/working")),
                   Path(ask("KAGGLE_SCRATCH", "/tmp")), Path(ask("KAGGLE_INPUT", "/kaggle/input")))


def usual_hours(size: str, smoke: bool) -> float:
    """Hours that a session takes at most if KAGGLE_HOURS is unset."""
    return SMOKE_HOURS.get(size, SMALL_SMOKE_HOURS) if smoke else HOURS


class Session:
    """What a session knows while it runs: places, clock, the environment of its children."""

    def __init__(self, places: Places, smoke: bool) -> None:
        size = os.environ.get("SIZE") or ("e2b" if smoke else "31b")
        usual = usual_hours(size, smoke)
        try:
            hours = float(os.environ.get("KAGGLE_HOURS") or usual)
        except ValueError:
            raise UserError(f"KAGGLE_HOURS={os.environ['KAGGLE_HOURS']} is no number. Name hours, "
                            f"such as {HOURS}, or leave it unset.") from None
        self.places, self.smoke = places, smoke
        self.until = time.time() + 3600 * hours
        self.run = places.scratch / "run"
        self.log = places.scratch / "session.log"
        self.page = ""  # the one that began last
        self.error = ""  # the last line in which something said what went wrong
        self.accepted = False  # whether the machine is the one that was asked for
        self.run.mkdir(parents=True, exist_ok=True)
        (places.scratch / "tmp").mkdir(exist_ok=True)
        last_start = self.until - min(600.0, 180 * hours)  # no page begins in the last minutes
        self.env = os.environ | {
            "SIZE": size, "RUN_DIR": str(self.run), "TMPDIR": str(places.scratch / "tmp"),
            "HF_HOME": str(places.scratch / "huggingface"), "RUN_UNTIL": f"{last_start:.0f}",
            "VLLM_XLA_CACHE_PATH": str(self.run / "xla_cache"), "PYTHONUNBUFFERED": "1",
            "HF_HUB_DISABLE_XET": os.environ.get("HF_HUB_DISABLE_XET", "1")}
        for name in ("RUN_DIR_LOCKED", "PYTHONPATH"):  # the image's modules are for its own Python
            self.env.pop(name, None)
        self.keeper = Keeper(self.run, places.working, self.log)

    def say(self, text: str) -> None:
        """Print a line and log it."""
        line = f"kaggle: {text}"
        print(line, flush=True)
        with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def call(self, *words: str, more: Mapping[str, str] | None = None) -> int:
        """Run a program, pass on and log what it prints; its exit status.

        While it runs, what is worth keeping is copied every few minutes. When the clock runs out
        it's asked to end, in order.

        Raises:
          OutOfTime: the clock has run out.
        """
        if time.time() >= self.until:
            raise OutOfTime
        process = subprocess.Popen(
            words, cwd=ROOT, env=self.env | dict(more or {}), stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            start_new_session=True)
        reader = threading.Thread(target=self._pass_on, args=(process,), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                left = self.until - time.time()
                if left <= 0:
                    raise OutOfTime
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(KEEP_EVERY, left))
                    continue
                self.keeper.keep()
        finally:
            end(process)
            reader.join(10)
        return process.returncode

    def _pass_on(self, process: subprocess.Popen) -> None:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("== ") and line.rstrip().endswith(" =="):
                self.page = line.strip("= \n")
            if line.startswith("Error: "):
                self.error = line.removeprefix("Error: ").strip()
            with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as file:
                file.write(line)


def end(process: subprocess.Popen) -> None:
    """End a child and all that it started: asked first, then killed."""
    for number, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            break
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# -- What a session does, in order --------------------------------------------------------------

def look(session: Session) -> None:
    """Mend the environment, print the machine, and refuse what isn't the v5e-8 asked for.

    Raises:
      UserError: a silent CPU, fewer than eight chips, chips that somebody holds, or a host without
        the memory that 03 needs.
    """
    for line in kaggle.mend(session.env):
        session.say(line)
    for name in set(os.environ) - set(session.env):
        del os.environ[name]
    os.environ.update(session.env)
    machine = hardware.detect()
    places = session.places
    free = [f"{shutil.disk_usage(place).free / 1e9:.0f} GB free in {place}"
            for place in (places.working, places.scratch)]
    memory = hardware.host_memory()
    session.say(f"{machine}, {os.cpu_count()} cores, {memory / hardware.GIB:.0f} GiB memory, "
                f"{', '.join(free)}")
    why = kaggle.refusal(machine) or kaggle.no_memory(session.env["SIZE"], memory)
    if why or machine.trouble:
        raise UserError(f"{why or machine.trouble}.")
    session.accepted = True


def install(session: Session) -> None:
    """Icarus by apt, Python 3.11 by uv, then the series' packages.

    Raises:
      UserError: one of them failed.
    """
    if not shutil.which("iverilog"):
        session.call("apt-get", "update", "-q")
        if session.call("apt-get", "install", "-y", "-q", "iverilog"):
            session.say("Icarus Verilog can't be installed: 01 is left out, which would refuse "
                        "this machine, and 07 won't run")
    folder = session.places.scratch / "python"
    uv = [sys.executable, "-m", "uv"]
    session.env["UV_PYTHON_INSTALL_DIR"] = str(folder)
    if subprocess.run([*uv, "--version"], capture_output=True).returncode:
        session.call(sys.executable, "-m", "pip", "install", "-q", "uv")
    if session.call(*uv, "python", "install", "3.11"):
        raise UserError("uv can't install Python 3.11 (see above). Is the internet switched on for "
                        "this notebook? scripts/kaggle.sh push asks for it.")
    found = subprocess.run([*uv, "python", "find", "--managed-python", "3.11"], text=True,
                           capture_output=True, env=session.env)
    session.env["PYTHON"] = found.stdout.strip()
    if not session.env["PYTHON"]:
        raise UserError(f"uv has installed Python 3.11 and doesn't find it: {found.stderr[-200:]}")
    if session.call("./setup.sh", "train"):
        raise UserError("./setup.sh train failed (see above).")


def fetch_base(session: Session) -> None:
    """Bring the base to the large disk: from the hub (8 minutes for the 31B), or from the mount.

    The mount is slower (469 to 1,761 s for 62 GB, measured by others) and asks nobody outside.

    Raises:
      UserError: neither has it.
    """
    size = session.env["SIZE"]
    if size not in BASES:
        return
    name, folder = BASES[size]
    wish = os.environ.get("BASE_FROM", "")
    if wish != "mount":
        python = str(ROOT / ".venv/bin/python")
        if session.call(python, "-c", STAGE, name) == 0:
            return
        session.say(f"the hub doesn't give {name} (see above)")
    places = sorted(session.places.input.glob(f"{MOUNTS}/{folder}/*/config.json"))
    if wish == "hub" or not places:
        raise UserError(f"{name} comes neither from the hub nor from a mount. Try again later, or "
                        "push with BASE_FROM=mount and accept Gemma's license on Kaggle first.")
    target = Path(session.env["TMPDIR"]) / "base" / name
    session.say(f"copying the mounted base from {places[-1].parent} to {target}")
    shutil.copytree(places[-1].parent, target, dirs_exist_ok=True)
    (target / ".complete").touch()  # helpers/remote.py's mark


def run_smoke(session: Session) -> None:
    """Thirty steps and one start of the server, for as long as the clock allows.

    Raises:
      UserError: one of them failed.
      OutOfTime: the clock has run out.
    """
    minutes = (session.until - time.time()) / 60 - 3  # three for its report
    if session.call("./first_hour.sh", "--minutes", f"{max(1.0, minutes):.0f}"):
        raise UserError("the smoke test failed: first_hour/report.json says where.")


def run_pages(session: Session) -> None:
    """The pages 01 to 07; where 05 can't start its server, 05 to 07 again, another way each time.

    Raises:
      UserError: a page failed.
      OutOfTime: the clock has run out.
    """
    first = int(session.env.get("SERVE_TRY") or 0)
    begin = "01" if shutil.which("iverilog") else "02"
    if session.call("./run_all.sh", begin, "07") == 0:
        return
    for attempt in range(first + 1, TRIES):
        if time.time() >= float(session.env["RUN_UNTIL"]):
            raise OutOfTime
        if not session.page.startswith("05") or session.env["SIZE"] != "31b":
            break
        session.say(f"the server didn't start; try {attempt} of serving/v5e.py")
        more = {"SERVE_TRY": str(attempt)}
        if session.call("./run_all.sh", "05", "07", more=more) == 0:
            return
    if time.time() >= float(session.env["RUN_UNTIL"]):
        raise OutOfTime
    raise UserError(f"{session.page or 'the series'} failed: {session.error or 'see session.log'}")


def work(session: Session) -> None:
    """All of a session, in order."""
    look(session)
    earlier = earlier_output(session.places.input)
    if earlier:
        session.say(f"going on from {earlier}: {session.keeper.bring_back(earlier)}")
    install(session)
    fetch_base(session)
    if session.smoke:
        run_smoke(session)
    else:
        run_pages(session)


def outcome_of(session: Session, job: Callable[[Session], None]) -> tuple[str, int]:
    """Do the job; (how it ended in one line, this program's exit status).

    Everything after the machine was accepted ends with status 0: Kaggle keeps the output of such a
    session, and attaches it to the next.
    """
    try:
        job(session)
        return "done", 0
    except OutOfTime:
        return f"stopped by the clock in {session.page or 'the installation'}", 0
    except Stopped as stopped:
        return f"stopped by {signal.Signals(stopped.args[0]).name} in {session.page}", 0
    except Exception as error:  # noqa: BLE001 - whatever it is, what was finished is kept
        line = run.what_to_do(error)
        if not line:
            traceback.print_exc()
            line = f"{type(error).__name__}: {error}"
        return f"failed: {line}", 0 if session.accepted else 1


def write_report(session: Session, outcome: str) -> None:
    """report.json, by the series' own Python where there is one: it knows the versions."""
    python = ROOT / ".venv/bin/python"
    words = [str(python if python.exists() else sys.executable), "-m", "helpers.report",
             str(session.run), str(session.places.working / "report.json"), outcome]
    subprocess.run(words, cwd=ROOT, env=session.env | {"JAX_PLATFORMS": "cpu"})


def main(words: list[str]) -> int:
    """Run a session; whatever happens, keep what counts and write report.json."""
    session = Session(Places.here(), "--smoke" in words)

    def stop(number: int, _: object) -> None:
        for other in (signal.SIGTERM, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    session.keeper.reserve()
    outcome, status = outcome_of(session, work)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    session.say(outcome)
    for line in session.keeper.keep():
        session.say(line)
    session.keeper.give_back_reserve()
    write_report(session, outcome)
    return status


if __name__ == "__main__":
    run.one_line_errors()
    sys.exit(main(sys.argv[1:]))
