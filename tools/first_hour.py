"""The first hour on a real slice, in one command and one report: see first_hour.sh.

Every stage is a program of its own with a limit; its result is read from the files that it wrote.
Finished stages are not repeated by a second call. Only the standard library is needed here, because
on a new machine the packages are what the first stage installs. Several hosts: start it on all.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from helpers import run
from helpers.report import training
from helpers.run import UserError, read_json, run_dir, size, write_json, write_text
from tables import hardware, stored

if TYPE_CHECKING:  # serving needs packages that a new machine lacks
    from serving import Options

PYTHON = str(ROOT / ".venv/bin/python")
STEPS = 30  # to train
# Of the one point of load: prompt tokens, answer tokens, requests/s, how many.
LOAD = {"tiny": (256, 64, 1.0, 8), "e2b": (1024, 128, 1.0, 30), "31b": (1024, 128, 1.0, 60)}


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    if not log.exists():
        return "nothing"
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.strip():
            return line.strip()[:300]
    return "nothing"


def run_command(command: list[str], log: Path, seconds: float,
                env: dict[str, str]) -> tuple[str, str]:
    """Run a command for at most `seconds`, and end all that it started.

    Returns:
      (status, why): "done", "failed" or "stopped"; `why` is the log's last line.
    """
    with open(log, "ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                                   stdin=subprocess.DEVNULL, start_new_session=True, env=env)
    try:
        code = process.wait(timeout=max(seconds, 0.1))
        return ("failed", last_words(log)) if code else ("done", "")
    except subprocess.TimeoutExpired:
        return "stopped", f"the time was up; it last said: {last_words(log)}"
    finally:  # also after an interrupt: nothing of it stays
        for number, wait in ((signal.SIGTERM, 15), (signal.SIGKILL, 1)):
            try:
                os.killpg(process.pid, number)
                process.wait(timeout=wait)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


class Stage(NamedTuple):
    """One program of the hour."""

    command: list[str]
    collect: Callable[[], dict] = dict  # what it measured, read from its files
    skip: str = ""                      # why it isn't run here


def stages(machine: hardware.Hardware, size_name: str, own: Path) -> dict[str, Stage]:
    """{name: stage} for a machine, in order; they write to the folder `own`."""
    serves = machine.slice in ("v6e-8", "v5e-8")
    if size_name == "e2b" and machine.kind == "v6e":  # 05 takes one of its chips
        serves = True
    if not machine.slice and size_name == "tiny":
        serves = (ROOT / ".venv-serve").exists()
    skip = "" if serves else f"a {machine.slice or 'CPU without .venv-serve'} does not serve"
    return {
        "setup": Stage(["bash", "setup.sh", "train"]),
        "data": Stage([PYTHON, "02_data.py"]),
        "train": Stage([PYTHON, "03_train.py"], lambda: training(own)),
        "serve": Stage([PYTHON, "tools/first_hour.py", "--serve"],
                       lambda: read_json(own / "serve.json"), skip)}


def served(base: str) -> "Options":
    """What the one start is made of.

    On a v5e-8 it's the try of serving/v5e.py that SERVE_TRY names. If SERVE_TRY is unset, it's the
    quickest try, because the first question is whether the server starts at all.
    """
    from serving import Options, v5e
    tiny, chips = size() == "tiny", 8 if size() == "31b" else 1
    if hardware.here().slice == v5e.SLICE and not tiny:
        options = v5e.options_here(v5e.QUICKEST)
        return replace(options, model=base, name="base", tensor_parallel=chips)
    return Options(engine="cpu" if tiny else "tpu-docker", model=base, name="base", timeout=3600.0,
                   max_model_len=1024 if tiny else 4096, tensor_parallel=chips)


def serve() -> None:
    """Serve the base model, load it once, stop it; the result goes to serve.json."""
    from helpers import records, remote
    from serving import load, server, v5e
    base = remote.stage(records.DataMeta.load().base_path)
    prompt, answer, rate, count = LOAD[size()]
    chosen = served(str(base))
    try:
        record = server.start(chosen, run_dir("serve"))
        ready_seconds = round(record.age(), 1)
        with load.Client(run_dir("serve")) as client:
            point = load.Point((prompt, answer), rate, count)
            found = client.run(load.arguments(record, load.Load(warmups=2), point, seed=0))
    finally:
        server.stop(run_dir("serve"))
    kept = ("completed", "output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms")
    write_json(run_dir("serve.json"), {
        "engine": record.engine, "ready_seconds": ready_seconds,
        "prompt_tokens": prompt, "answer_tokens": answer, "requests_per_second": rate,
        **{key: found.get(key) for key in kept},
        **({"try": v5e.try_here(v5e.QUICKEST)} if chosen.chip == "v5e" else {})})


def earlier_report(path: Path) -> dict[str, Any]:
    """The report that an earlier call of this program left.

    Raises:
      UserError: the file isn't one.
    """
    report = read_json(path)
    parts = []
    if isinstance(report, dict):
        stages = report.get("stages")
        parts = [report.get("about"), stages]
        if isinstance(stages, dict):
            parts += stages.values()
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path} isn't a report of the first hour. Delete its folder, or set "
                        "RUN_DIR to keep it.")
    return report


def measure(plan: Mapping[str, Stage], folder: Path, about: dict[str, Any],
            minutes: float) -> dict[str, Any]:
    """All stages in order, finished ones not again, within `minutes`. Returns the report.

    Raises:
      UserError: an earlier report is about another machine, size or commit.
    """
    deadline, path, own = time.monotonic() + 60 * minutes, folder / "report.json", folder / "run"
    own.mkdir(parents=True, exist_ok=True)
    report = earlier_report(path) if path.exists() else {"about": about, "stages": {}}
    if changed := [key for key in about if report["about"].get(key) != about[key]]:
        raise UserError(f"{path} is about another {', '.join(changed)}. "
                        "Delete its folder, or set RUN_DIR to keep it.")
    checkpoints = os.environ.get("CHECKPOINTS")
    env = {**os.environ, "RUN_DIR": str(own), "MAX_STEPS": str(STEPS), "MPLBACKEND": "agg"}
    if checkpoints:
        env["CHECKPOINTS"] = f"{checkpoints.rstrip('/')}/first_hour"
    for name, (command, collect, skip) in plan.items():
        if report["stages"].get(name, {}).get("status") in ("done", "skipped"):
            continue
        entry = report["stages"][name] = {"status": "skipped", "why": skip}
        if not skip:
            print(f"{name} ...", flush=True)
            start = time.monotonic()
            entry["status"], entry["why"] = run_command(
                command, folder / f"{name}.log", deadline - start, env)
            entry["seconds"] = round(time.monotonic() - start, 1)
            if entry["status"] == "done":
                entry["result"] = collect()
            print(f"{name}: {entry['status']} in {entry['seconds']} s {entry['why']}", flush=True)
        write_json(path, report)
        # The server gets the base, so it's started even if the training failed.
        is_needed = name != "train"
        if entry["status"] == "stopped" or (entry["status"] == "failed" and is_needed):
            break
    return report


def markdown(report: dict[str, Any]) -> str:
    """The report as a block that can be sent as an issue, predictions beside measurements."""
    about = report["about"]
    found = {name: entry.get("result", {}) for name, entry in report["stages"].items()}
    trained = found.get("train", {})
    length = trained.get("sequence_length")
    base_dtype = trained.get("base_dtype") or "bfloat16"
    guess = stored.compiled_fit(about["slice"], about["size"], base_dtype, length or 4_096) or {}
    if length and guess and int(guess["sequence_length"]) != length:
        name = "tokens_per_second_predicted"  # all that compares with rows of another length
        guess = {name: guess[name]}
    lines = [f"### First hour on a {about['slice'] or 'CPU'} (size {about['size']})", "",
             f"{about['chips']} chips, {about['hosts']} host(s), commit {about['commit']}", "",
             "| | measured | compiled or predicted (08) |", "|---|---|---|"]
    beside = {"step_seconds": "seconds_predicted", "held_gib_per_device": "hbm_gib",
              "real_tokens_per_second": "tokens_per_second_predicted"}
    rows = {**found.get("train", {}), **{f"serve {key}": value
                                         for key, value in found.get("serve", {}).items()}}
    for key, value in rows.items():
        text = f"{value:,.4g}" if isinstance(value, float) else value
        lines.append(f"| {key.replace('_', ' ')} | {text} | {guess.get(beside.get(key, ''), '')} |")
    attempt = found.get("serve", {}).get("try")
    if attempt is not None:
        lines += ["", f"The server started by try {attempt} of serving/v5e.py. The series begins "
                  f"with try 0; with SERVE_TRY={attempt} it begins with this one."]
    lines += ["", "Stages: " + "; ".join(
        f"{name} {entry['status']} {entry.get('seconds', '')} {entry['why']}".strip()
        for name, entry in report["stages"].items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is left to measure, then print the report."""
    parser = argparse.ArgumentParser(description="The first hour on a real slice, as one report.")
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of this call")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.chdir(ROOT)
    run.one_line_errors()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, like Ctrl-C
    if chosen.serve:
        serve()
        return
    machine = hardware.here()
    if machine.trouble:
        raise UserError(f"{machine}: {machine.trouble}.")
    os.environ["SIZE"] = size()
    folder = run_dir("first_hour").resolve()
    commit = run.commit_of(ROOT, "describe", "--always", "--dirty", "--exclude=*") or "no git"
    about = {**asdict(machine), "slice": machine.slice, "size": size(), "commit": commit}
    print(f"{machine}, size {size()}: at most {chosen.minutes:g} minutes; results in {folder}")
    report = measure(stages(machine, size(), folder / "run"), folder, about, chosen.minutes)
    block = markdown(report)
    write_text(folder / "report.md", block)
    print(f"\nTo share it, look it over and send this block as an issue:\n\n{block}")
    if any(entry["status"] in ("failed", "stopped") for entry in report["stages"].values()):
        sys.exit("Not everything was measured. Call it again: finished stages are not repeated.")


if __name__ == "__main__":
    main()
