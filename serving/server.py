"""One vLLM server per folder: its start, its record, its end, and questions to it.

`<folder>/server.json` records it: process, address, name, command; `<folder>/server.log` is what it says.
A second server beside it has a folder of its own. It outlives the Python that started it.
"""

import collections
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tables.errors import UserError
from serving.options import IMAGES, ROOT, check, command, container_of, file_states

NO_MEMORY = re.compile(r"(?i)out ?of ?memory|RESOURCE_EXHAUSTED|cannot allocate|MemoryError|"
                       r"\bOOM\b|less than requested memory|No available memory|KV cache is needed")


# -- The record, and the processes that it names -----------------------------------------------------

def record_of(folder):
    """What `start` wrote for this folder; None if it wrote nothing, or only a part of it."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((Path(folder) / "server.json").read_text())


def _born(process):
    """Seconds from the machine's boot to a process's start; no change of the clock moves it."""
    return round(process.create_time() - psutil.boot_time(), 1)


def members(record):
    """Live processes of a recorded server: it leads a process group, which its workers stay in."""
    with contextlib.suppress(psutil.Error):
        if abs(_born(psutil.Process(record["pid"])) - record["born"]) > 0.2:
            return []  # the number was given to another process since
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == record["pid"] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def current(folder):
    """The record of the server that runs now.

    Raises:
      UserError: none was started, or it has ended, or it does not answer; says what to run.
    """
    record = record_of(folder)
    if record is None:
        raise UserError(f"no server is recorded in {folder}. Run 05_serve_vllm first.")
    alive = members(record)
    if not alive or not healthy(record):
        raise UserError(f"the server of {record['name']} (process {record['pid']}) "
                         f"{'does not answer' if alive else 'has died'}. Run 05_serve_vllm again. It last "
                         f"said ({record['log']}):\n{last_lines(record['log'])}")
    return record


def last_lines(log):
    """The first error of a server's log, if it names one, and its last 15 lines."""
    text = Path(log).read_text(errors="replace") if Path(log).exists() else ""
    noise = re.compile(r"\s*$|nanobind:|see https://nanobind| - (leaked|\.\.\. skipped)", re.I)
    lines = [line for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if not noise.match(line)]
    first = [line for line in lines[:-15] if re.search(r"\w(Error|Exception): |error: ", line)
             and "root cause" not in line][:1]
    shown = [line[:300] for line in (*first, *lines[-15:])] or ["nothing"]
    if NO_MEMORY.search(text):
        shown += ["out of memory: end what else holds it, or lower max_model_len, or quantise the weights"]
    return "\n".join(shown)


# -- Start and stop ----------------------------------------------------------------------------------

def prepare(*words):
    """Run what brings an environment or an image; once that is there, this takes a second."""
    if subprocess.run(words, cwd=ROOT).returncode:
        raise UserError(f"`{shlex.join(words)}` failed, see above.")


def start(options, folder, wait=True):
    """Serve `options`, wait until it is healthy, and return its record, a dict.

    A healthy server of the same options and files is reused, and one that is still starting is waited
    for. Another one of this folder is stopped first: two do not fit into an accelerator's memory.

    Args:
      folder: where the record and the log go.
      wait: False returns at once; the same call again, without it, waits.

    Raises:
      UserError: what `check` raises; the port is in use; or the server died or was not healthy in
        time: its last lines.
    """
    folder, record = Path(folder), record_of(folder)
    check(options)
    wanted = command(options, container_of(folder))
    files = file_states(options.model, options.adapter)
    if record and (record["command"], record["files"]) == (wanted, files) and members(record):
        if healthy(record):
            print(f"{record['name']} runs already, at {record['base_url']}")
            return record
        return _wait(record, folder, options.timeout) if wait else record
    stop(folder)
    port = _free_port(options.host, options.port)
    if options.docker:
        image = shlex.quote(options.image or IMAGES[options.engine])
        prepare("sh", "-c", f"docker image inspect {image} >/dev/null 2>&1 || docker pull {image}")
        _remove(container_of(folder))  # one that lost its record has the same name
    else:
        prepare("bash", "setup.sh", "serve-tpu" if options.engine == "tpu" else "serve")
    words = command(dataclasses.replace(options, port=port), container_of(folder))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                                   stdin=subprocess.DEVNULL, start_new_session=True,
                                   env={**os.environ, "NO_COLOR": "1"})
    reach = "127.0.0.1" if options.host == "0.0.0.0" else options.host
    record = {"pid": process.pid, "base_url": f"http://{reach}:{port}",
              "name": options.name, "model": options.model, "engine": options.engine,
              "max_model_len": options.max_model_len, "born": _born(psutil.Process(process.pid)),
              "container": container_of(folder) if options.docker else "",
              "started": time.time(), "log": str(folder / "server.log"), "command": wanted, "files": files}
    (folder / "server.json").write_text(json.dumps(record, indent=2) + "\n")
    return _wait(record, folder, options.timeout) if wait else record


def _wait(record, folder, timeout):
    """Wait until a server is healthy; however this ends otherwise, no server is left."""
    said = record["started"]
    with _terminable(), contextlib.ExitStack() as failed:
        failed.callback(stop, folder)
        while not healthy(record):
            waited = time.time() - record["started"]
            why = "" if members(record) else f"ended after {waited:.0f} s"
            if not why and waited > timeout:
                why = f"was not healthy within {timeout:.0f} s and was stopped"
            if why:
                raise UserError(f"the server {why}. It last said ({record['log']}):\n"
                                 f"{last_lines(record['log'])}")
            if time.time() - said >= max(10.0, waited / 6):
                said = time.time()
                print(f"starting ... {waited:3.0f} s")
            time.sleep(0.25)
        failed.pop_all()
    record["ready_seconds"] = round(time.time() - record["started"], 1)
    print(f"healthy after {record['ready_seconds']:.0f} s at {record['base_url']}")
    return record


@contextlib.contextmanager
def _terminable():
    """SIGTERM as an exception, so that what is to be cleaned up is; only a main thread can have that."""
    main = threading.current_thread() is threading.main_thread()
    before = main and signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def running(options, folder):
    """A server for the length of a `with` block; gives its URL. However the block ends, it is stopped."""
    with _terminable():
        try:
            yield start(options, folder)["base_url"]
        finally:
            stop(folder)


def stop(folder, patience=20.0):
    """End the server of a folder with all its processes; True if one ran."""
    record = record_of(folder)
    if record is None:
        return False
    ran = bool(members(record))
    if record["container"]:
        _remove(record["container"])
    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        if not members(record):
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(record["pid"], sign)
        end = time.monotonic() + seconds
        while members(record) and time.monotonic() < end:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(record["pid"], os.WNOHANG)
            time.sleep(0.1)
    if left := members(record):
        raise UserError(f"the server did not end; run: kill -9 {' '.join(map(str, left))}")
    (Path(folder) / "server.json").unlink(missing_ok=True)
    return ran


def _remove(container):
    subprocess.run(["docker", "rm", "-f", container], capture_output=True)


def _free_port(host, port):
    try:
        with socket.create_server((host, port)) as probe:
            return probe.getsockname()[1]
    except OSError as error:
        raise UserError(f"port {port} on {host} is in use ({error.strerror}). See who: "
                         f"ss -ltnp 'sport = :{port}'. Stop it, or choose another port (0: any).") from error


# -- HTTP ------------------------------------------------------------------------------------------------

def request(record, path, payload=None, timeout=60.0):
    """The server's answer to a GET (or, with `payload`, a POST of JSON), as text.

    Raises:
      UserError: no server answers, or it refuses; its own message is repeated.
    """
    data = None if payload is None else json.dumps(payload).encode()
    query = urllib.request.Request(record["base_url"] + path, data,
                                   {"Content-Type": "application/json"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(query, timeout=timeout) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        raise UserError(f"{path}: HTTP {error.code}: {text[:300]}") from error
    except OSError as error:
        raise UserError(f"no server answers at {record['base_url']} "
                         f"({getattr(error, 'reason', error)}). Run 05_serve_vllm.") from error


def post(record, path, payload, timeout=600.0):
    """`request` with a payload, its answer decoded from JSON."""
    return json.loads(request(record, path, payload, timeout))


def healthy(record):
    """True if the server answers its health check."""
    with contextlib.suppress(ValueError):
        request(record, "/health", timeout=5.0)
        return True
    return False


def as_trained(recipe):
    """(thinking, what to add to a chat request) so that prompts are those of notebook 02."""
    return recipe.thinking, {"chat_template_kwargs": {"enable_thinking": recipe.thinking}}


def chat_request(text, recipe, **more):
    """Arguments for `client.chat.completions.create`: `text` asked as training asked, greedy."""
    return {"messages": [*recipe.system_messages, {"role": "user", "content": text.strip()}], "temperature": 0,
            "extra_body": as_trained(recipe)[1], **more}


# -- What it counts --------------------------------------------------------------------------------------

def counters(record):
    """The server's metrics: a `Counter` of name, sum over its labels, and of (name, position) per draft token.

    Prometheus' names: a counter ends in `_total`. "cache" has the labels of vLLM's cache_config_info.
    """
    found = collections.Counter()
    for family in text_string_to_metric_families(request(record, "/metrics")):
        for sample in family.samples:
            found[sample.name] += sample.value
            if "position" in sample.labels:
                found[sample.name, int(sample.labels["position"])] += sample.value
            if sample.name == "vllm:cache_config_info":
                found["cache"] = sample.labels
    return found


def acceptance(before, after):
    """What speculation gained between two answers of `counters`.

    Returns:
      {"drafts": ..., "by position": share of drafts whose token at this position was accepted,
      "tokens per step": accepted tokens and the one that every step gives}, or None without a draft.
    """
    drafts, accepted = (after[name] - before[name] for name in (
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"))
    if not drafts:
        return None
    places = sorted(key for key in after if key[0] == "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    return {"drafts": int(drafts), "by position": [(after[key] - before[key]) / drafts for key in places],
            "tokens per step": 1 + accepted / drafts}


def wait_idle(record, patience=60.0):
    """Return the counters of the server once no request runs or waits there; raise if some stay."""
    end = time.monotonic() + patience
    while True:
        found = counters(record)
        busy = [int(found[f"vllm:num_requests_{what}"]) for what in ("running", "waiting")]
        if not any(busy):
            return found
        if time.monotonic() > end:
            raise UserError(f"the server is not idle: {busy[0]} requests run and {busy[1]} wait after "
                             f"{patience:.0f} s. Another client uses it: end that, then run this again.")
        time.sleep(0.2)
