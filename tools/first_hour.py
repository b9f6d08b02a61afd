"""The first hour on a real slice, in one command and one report: see first_hour.sh.

Every stage is a program of its own, which this one starts, watches and ends; what a stage found is
read from the files that it wrote. Only the standard library is needed here, because on a new
machine the packages are what the first stage installs. Several hosts: start it on all of them.
"""

import argparse
import csv
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tables import hardware
from helpers.run import UserError, phase, read_json, run_dir, size, write_json, write_text

PYTHON = str(ROOT / ".venv/bin/python")
STEPS, WARM = 30, 3  # steps to train; the first ones warm caches up and are not counted
PACKAGES = ("jax", "libtpu", "google-tunix", "qwix", "flax", "orbax-checkpoint")
SERVING_SLICES = ("v6e-8",)
# How the server is started, the first choice first; a test compares these with 05's settings.
_BATCHED = ("USE_BATCHED_RPA_KERNEL=1",)
SERVING = {
    "tiny": ({"max_model_len": 1024},), "e2b": ({"max_model_len": 4096},),
    "31b": ({"max_model_len": 16_384, "tensor_parallel": 8, "environment": _BATCHED},
            {"max_model_len": 16_384, "tensor_parallel": 4, "data_parallel": 2,
             "kv_cache_dtype": "fp8", "quantization": "fp8", "environment": _BATCHED})}
# Requests of the one point of load: (prompt tokens, answer tokens, requests/s, how many).
LOAD = {"tiny": (256, 64, 1.0, 8), "e2b": (1024, 128, 1.0, 30), "31b": (1024, 128, 1.0, 60)}
# (key of data/dryrun's times, key of its tokens/s, what that number is), the best first.
PREDICTIONS = (
    ("seconds_predicted", "tokens_per_second_predicted", "predicted: cycles and interconnect"),
    ("seconds_estimate", "real_tokens_per_second", "the compiler's own estimate"),
    ("seconds_roofline", "real_tokens_per_second_roofline", "roofline, no faster than this"))


# ── Stages: start, watch, end ──


@dataclass(frozen=True)
class Stage:
    """One part of the hour.

    Attributes:
      name: its key in the report.
      command: what to run; empty if there is nothing to run.
      collect: () -> what it found, as a dict for JSON; called after the command succeeded.
      environment: variables beside those of this process; None takes one away.
      needs: names of stages that must be done before.
      skip: why it is not for this machine; "" if it is.
      after: a command to run after it, however it ends, so that nothing is left running.
    """

    name: str
    command: list
    collect: callable
    environment: dict = field(default_factory=dict)
    needs: tuple = ()
    skip: str = ""
    after: list = field(default_factory=list)


def last_words(log):
    """The last line of a log that says something."""
    lines = Path(log).read_text(errors="replace").splitlines() if Path(log).exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "nothing")


def end(process, seconds=15.0):
    """End a process and all of its session: SIGTERM, then SIGKILL."""
    for sign, wait in ((signal.SIGTERM, seconds), (signal.SIGKILL, 5.0)):
        until, send = time.monotonic() + wait, sign
        while time.monotonic() < until:
            process.poll()  # a dead leader must not count as a member of its group
            try:
                os.killpg(process.pid, send)
            except ProcessLookupError:
                return
            send = 0  # once; from here on only ask whether somebody is left
            time.sleep(0.1)


def environment_of(stage):
    """This process's environment with the stage's own variables."""
    joined = {**os.environ, "MPLBACKEND": "agg", "PYTHONUNBUFFERED": "1", **stage.environment}
    return {key: value for key, value in joined.items() if value is not None}


def run_command(stage, log, deadline, every=30.0):
    """Run a stage's command until it ends or `deadline` (of the monotonic clock) has come.

    Returns:
      (status, why): "done", "failed" or "stopped"; `why` is the log's last line.
    """
    start = said = time.monotonic()
    with open(log, "ab") as file:
        process = subprocess.Popen(
            stage.command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            cwd=ROOT, start_new_session=True, env=environment_of(stage))
    try:
        while process.poll() is None:
            now = time.monotonic()
            if now >= deadline:
                return "stopped", f"the time was up; it last said: {last_words(log)}"
            if now - said >= every:
                said = now
                print(f"{stage.name} ... {now - start:.0f} s, {deadline - now:.0f} s left | "
                      f"{last_words(log)[:90]}", flush=True)
            time.sleep(0.2)
        return ("failed", last_words(log)) if process.returncode else ("done", "")
    finally:  # also after an interrupt: nothing of it stays
        end(process)
        if stage.after:
            try:
                subprocess.run(stage.after, cwd=ROOT, env=environment_of(stage), timeout=45,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            except subprocess.TimeoutExpired:
                print(f"{' '.join(stage.after)} did not finish: run it again yourself", flush=True)


def run_stage(stage, folder, report, deadline):
    """One stage into `report`: its status, seconds, attempts, and what it found or why not."""
    entry = report["stages"].setdefault(stage.name, {"attempts": 0})
    missing = [name for name in stage.needs
               if report["stages"].get(name, {}).get("status") != "done"]
    if stage.skip or missing or time.monotonic() >= deadline:
        why = stage.skip or (f"needs {', '.join(missing)}" if missing else "no time was left")
        entry.update(status="skipped" if stage.skip else "left", why=why)
        return
    entry.update(status="started", attempts=entry["attempts"] + 1)
    entry.pop("why", None)
    write_json(folder / "report.json", report)
    print(f"{stage.name} ...", flush=True)
    start, status, why = time.monotonic(), "done", ""
    if stage.command:
        status, why = run_command(stage, folder / f"{stage.name}.log", deadline)
    entry.update(status=status, seconds=round(time.monotonic() - start, 1))
    if status == "done":
        entry["result"] = stage.collect()
    else:
        entry["why"] = why
    print(f"{stage.name}: {status} in {entry['seconds']} s{f' ({why})' * bool(why)}", flush=True)


def run(stages, folder, about, minutes):
    """All stages in order, finished ones not again, within `minutes`. Returns the report.

    The report is on the disk after every stage. A part of the time is kept for ending what runs.

    Raises:
      UserError: an earlier report is about another machine, size or commit.
    """
    total = 60.0 * minutes
    deadline = time.monotonic() + total - min(75.0, 0.1 * total)
    path = folder / "report.json"
    folder.mkdir(parents=True, exist_ok=True)
    report = read_json(path) if path.exists() else {"format": 1, "about": about, "stages": {}}
    if report["about"] != about:
        changed = [key for key in about if report["about"].get(key) != about[key]]
        raise UserError(f"{path} is about another {', '.join(changed)}. "
                        "Set RUN_DIR to keep it, or call this with --fresh.")
    for stage in stages:
        if report["stages"].get(stage.name, {}).get("status") == "done":
            print(f"{stage.name}: done earlier")
            continue
        run_stage(stage, folder, report, deadline)
        write_json(path, report)
    report["summary"] = summary(report)
    report["finished"] = all(report["stages"][stage.name]["status"] in ("done", "skipped")
                             for stage in stages)
    write_json(path, report)
    return report


# ── What the stages find ──


def versions():
    """Versions of the training environment's packages; None for one that is not there."""
    code = ("import json, sys\nfrom importlib import metadata\nfound = {}\n"
            "for name in sys.argv[1:]:\n"
            "    try:\n        found[name] = metadata.version(name)\n"
            "    except metadata.PackageNotFoundError:\n        found[name] = None\n"
            "print(json.dumps(found))")
    done = subprocess.run([PYTHON, "-c", code, *PACKAGES], capture_output=True, text=True,
                          check=True)
    return json.loads(done.stdout)


def training(folder):
    """What 03 left in a run directory: its machine.json, and its steps from log.jsonl."""
    machine = read_json(folder / "train/machine.json")
    records = [json.loads(line) for line in (folder / "train/log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    steady = steps[WARM:] or steps
    trace = [path for path in (folder / "train/trace").rglob("*") if path.is_file()]
    return {**machine, "steps_measured": len(steady),
            "step_seconds": statistics.median(record["seconds"] for record in steady),
            "first_step_seconds": steps[0]["seconds"],
            "real_tokens_per_second": sum(record["real_tokens"] for record in steady)
            / sum(record["seconds"] for record in steady),
            "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"],
            "trace": {"folder": "train/trace", "files": len(trace),
                      "bytes": sum(path.stat().st_size for path in trace)}}


def prediction(slice_name, size_name, machine, tables=ROOT / "data/dryrun"):
    """What 08 has stored for 03's step on this slice, or None.

    Args:
      machine: 03's machine.json; the row of the same batch and recomputation is taken if there is
        one, and what differs is said otherwise.
    """
    path = tables / f"{slice_name}_{size_name}.csv"
    if not slice_name or not path.exists():
        return None
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["trainer"] == "03"
                and row["layers"] == "0" and row["fits"] == "True"]
    here = {"micro_batch": machine["micro_rows"], "sequence_length": machine["sequence_length"],
            "remat": machine["remat"]}

    def apart(row):
        return [f"{key} {row[key]} there, {value} here" for key, value in here.items()
                if row[key] != str(value)]

    for row in sorted(rows, key=lambda row: (len(apart(row)), row.get("one_sum") != "True",
                                           row["recipe"] != "ours")):
        for seconds, tokens, kind in PREDICTIONS:
            if row.get(seconds) and row.get(tokens):
                return {"kind": kind, "recipe": row["recipe"], "differs": apart(row),
                        "step_seconds": float(row[seconds]) * machine["micro_batches"],
                        "real_tokens_per_second": float(row[tokens]),
                        "gib_per_chip": float(row["hbm_gib"]), "libtpu": row["libtpu"]}
    return None


def summary(report):
    """The numbers that one wants to compare, from what the stages found."""
    about = report["about"]
    found = {name: entry.get("result", {}) for name, entry in report["stages"].items()}
    train, serve = found.get("train", {}), found.get("serve", {})
    names = ("device_kind", "devices", "load_seconds", "compile_seconds", "step_seconds",
             "steps_measured", "real_tokens_per_second", "held_gib_per_device", "bytes_in_use",
             "peak_bytes_in_use", "bytes_limit")
    attempts = report["stages"].get("train", {}).get("attempts", 1)
    return {"slice": about["slice"], "chips": about["chips"], "hosts": about["hosts"],
            "size": about["size"], "commit": about["commit"],
            "versions": found.get("setup", {}).get("versions", {}),
            **{name: train.get(name) for name in names},
            "compiled_cold": attempts == 1,  # a second attempt finds the first one's programs
            "predicted": prediction(about["slice"], about["size"], train) if train else None,
            "serve": serve or None}


# ── The server, and one point of load ──


def start_server(size_name, model):
    """(record, options) of the base model, served as 05 serves the tuned one.

    The 31B falls back on 05's second choice: in bfloat16 it may not fit.
    """
    from serving import options, server

    def start(chosen):
        named = options.Options(engine="cpu" if size_name == "tiny" else "tpu-docker", model=str(model),
                                name="base", timeout=3600.0, **chosen)
        return server.start(named, run_dir("serve")), chosen

    *firsts, last = SERVING[size_name]
    for chosen in firsts:
        try:
            return start(chosen)
        except ValueError as error:
            print(f"{error}\nthe second choice of 05:", flush=True)
    return start(last)


def serve():
    """Start the server on the base model, load it once, stop it; the result goes to serve.json."""
    from helpers import remote
    from serving import load, options, server
    base = remote.stage(read_json(run_dir("data", "meta.json"))["base_path"])
    prompt, answer, rate, count = LOAD[size()]
    try:
        record, chosen = start_server(size(), base)
        with phase("one point of load"), load.Client(run_dir("serve")) as client:
            found = client.run(load.arguments(client, load.Load(warmups=2), (prompt, answer), rate, count,
                                              seed=0))
    finally:
        server.stop(run_dir("serve"))
    kept = ("completed", "duration", "request_throughput", "output_throughput", "p50_ttft_ms",
            "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")
    write_json(run_dir("serve.json"), {
        "engine": record["engine"], "image": options.IMAGES.get(record["engine"]),
        "options": chosen, "ready_seconds": record["ready_seconds"], "prompt_tokens": prompt,
        "answer_tokens": answer, "requests_per_second": rate, "requests": count,
        **{key: found.get(key) for key in kept}})


# ── The plan of this machine, and its report ──


def plan(machine, size_name, folder):
    """The stages for a machine, in order; they work in `folder`/run."""
    here, own = run_dir(), folder / "run"
    own.mkdir(parents=True, exist_ok=True)
    checkpoints = os.environ.get("CHECKPOINTS")
    inside = {"RUN_DIR": str(own), "MAX_STEPS": str(STEPS), "JAX_COMPILATION_CACHE_DIR": None,
              "CHECKPOINTS": f"{checkpoints.rstrip('/')}/first_hour" if checkpoints else None}
    there = (here / "data/meta.json").exists()

    def share():
        if not (own / "data").exists():
            try:
                (own / "data").symlink_to((here / "data").resolve())
            except OSError:  # a file system without links
                shutil.copytree(here / "data", own / "data")
        return {"made_now": not there}

    if machine.hosts > 1:
        no_server = "the series serves on one host"
    elif size_name == "tiny":
        no_server = "" if (ROOT / ".venv-serve").exists() else "no .venv-serve (./setup.sh serve)"
    else:
        no_server = "" if machine.slice in SERVING_SLICES else f"a {machine.slice} does not serve"
    return [
        Stage("setup", ["bash", "setup.sh", "train"], lambda: {"versions": versions()}),
        Stage("data", [] if there else [PYTHON, "02_data.py"], share, needs=("setup",)),
        Stage("train", [PYTHON, "03_train.py"], lambda: training(own), inside, ("data",)),
        Stage("serve", [PYTHON, "tools/first_hour.py", "--serve"],
              lambda: read_json(own / "serve.json"), inside, ("data",), no_server,
              [PYTHON, "-m", "serving", "stop", str(own / "serve")])]


def number(value, unit="", digits=3):
    """A number for a reader, or a dash."""
    return "-" if value is None else f"{value:,.{digits}g} {unit}".strip()


def gib(value):
    """Bytes as GiB, or None."""
    return None if not value else value / 2**30


def markdown(report):
    """The report as a block that can be sent as an issue."""
    all_of, guess = report["summary"], report["summary"]["predicted"] or {}
    lines = [f"### First hour on a {all_of['slice'] or 'CPU'} (size {all_of['size']})", "",
             f"{all_of['devices'] or all_of['chips']} x {all_of['device_kind'] or 'devices'}, "
             f"{all_of['hosts']} host{'s' * (all_of['hosts'] != 1)}, commit {all_of['commit']}, "
             + ", ".join(f"{name} {version}" for name, version in all_of["versions"].items()
                         if version),
             "", f"| | measured | {guess.get('kind', 'predicted')} |", "|---|---|---|"]
    rows = [
        ("load", number(all_of["load_seconds"], "s"), ""),
        ("compile the step", number(all_of["compile_seconds"], "s")
         + " (cache of an earlier attempt)" * (not all_of["compiled_cold"]), ""),
        (f"step, median of {all_of['steps_measured'] or 0}", number(all_of["step_seconds"], "s"),
         number(guess.get("step_seconds"), "s")),
        ("real tokens/s", number(all_of["real_tokens_per_second"], digits=4),
         number(guess.get("real_tokens_per_second"), digits=4)),
        ("memory of a device, GiB", f"peak {number(gib(all_of['peak_bytes_in_use']))}, in use "
         f"{number(gib(all_of['bytes_in_use']))} of {number(gib(all_of['bytes_limit']))}; counted "
         f"{number(all_of['held_gib_per_device'])}", number(guess.get("gib_per_chip")))]
    if load := all_of["serve"]:
        rows += [("server ready", number(load["ready_seconds"], "s"), ""),
                 (f"load: {load['requests_per_second']:g} requests/s, {load['prompt_tokens']} + "
                  f"{load['answer_tokens']} tokens",
                  f"TTFT p50 {number(load['p50_ttft_ms'], 'ms')}, TPOT p50 "
                  f"{number(load['p50_tpot_ms'], 'ms')}, {number(load['output_throughput'])} "
                  "tokens/s", "")]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if guess.get("differs"):
        lines += ["", "The stored prediction is for another program: "
                  f"{'; '.join(guess['differs'])}."]
    lines += ["", "Stages: " + "; ".join(
        f"{name} {entry['status']}" + (f" {entry['seconds']:g} s" if "seconds" in entry else "")
        + (f" ({entry['why']})" if entry.get("why") else "")
        for name, entry in report["stages"].items())]
    return "\n".join(lines) + "\n"


def main():
    """Measure what is left to measure, then print the report."""
    parser = argparse.ArgumentParser(description="The first hour on a real slice, as one report.")
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of this call")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier call measured")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, like Ctrl-C
    if chosen.serve:
        return serve()
    machine, size_name = hardware.here(), size()
    if machine.trouble:
        raise UserError(f"{machine}: {machine.trouble}.")
    os.environ["SIZE"] = size_name
    os.environ["RUN_DIR"] = str(run_dir().resolve())
    folder = run_dir("first_hour")
    if chosen.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12",
                             "--exclude=*"], capture_output=True, text=True)
    about = {**asdict(machine), "slice": machine.slice, "size": size_name,
             "commit": commit.stdout.strip() or "no git"}
    print(f"{machine}, size {size_name}: at most {chosen.minutes:g} minutes; results in {folder}")
    report = run(plan(machine, size_name, folder), folder, about, chosen.minutes)
    block = markdown(report)
    write_text(folder / "report.md", block)
    print(f"\nThe whole report is {folder / 'report.json'}. To share it, look it over and send "
          f"this block as an issue to the project's repository:\n\n{block}")
    if not report["finished"]:
        sys.exit("Not everything was measured. Call it again: finished stages are not repeated.")


if __name__ == "__main__":
    main()
