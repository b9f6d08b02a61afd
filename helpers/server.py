"""One vLLM server per run directory: its command, its start, its state, its end.

    python -m helpers.server status|stop      what RUN_DIR/serve/server.json records; end it

The record is written the moment the process exists, so that whatever happens next `stop` finds it.
A second server beside it (05 compares two) has a slot of its own, that is another record.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from helpers.machine import ROOT
from helpers.run import UserError, read_json, run_dir, write_json
from helpers.vllm_cpu import DONE

IMAGES = {"tpu-docker": "vllm/vllm-tpu:v0.32.0", "gpu-docker": "vllm/vllm-openai:v0.32.0"}
CONTAINER = "gemma4-vllm"
PYTHON, LAUNCHER = ".venv-serve/bin/python", "helpers/vllm_cpu.py"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as --max-lora-rank
NO_MEMORY = re.compile(r"(?i)out ?of ?memory|RESOURCE_EXHAUSTED|cannot allocate|MemoryError|\bOOM\b|"
                       r"less than requested memory|KV cache.*(is needed|larger)|No available memory")


def vllm_command(engine, model, name, port, *, host="127.0.0.1", max_model_len=1024,
                 tensor_parallel=1, data_parallel=1, kv_cache_dtype="auto", adapter=None,
                 results=None):
    """The command that serves `model` under `name`, as a list for `subprocess`.

    Args:
      engine: "tpu-docker", "gpu-docker" or "cpu" (the CPU build in .venv-serve).
      model: a Hugging Face directory on this machine.
      adapter: a PEFT directory, served beside the model as `<name>-adapter`; not on a TPU.
      results: a directory the container may write benchmark results to (Docker only).

    Raises:
      UserError: an unknown engine, or an adapter on a TPU.
    """
    if engine not in (*IMAGES, "cpu"):
        raise UserError(f"engine {engine!r} is unknown; there are tpu-docker, gpu-docker and cpu.")
    inside = "/model" if engine in IMAGES else str(model)
    serve = ["serve", inside, "--served-model-name", name, "--host", host, "--port", str(port),
             "--dtype", "bfloat16", "--kv-cache-dtype", kv_cache_dtype,
             "--max-model-len", str(max_model_len),
             "--tensor-parallel-size", str(tensor_parallel),
             "--data-parallel-size", str(data_parallel),
             "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    mounts = [f"{Path(model).resolve()}:/model:ro"]
    if results:
        mounts.append(f"{Path(results).resolve()}:/bench")
    if adapter:
        if engine == "tpu-docker":
            raise UserError("vLLM's JAX backend serves no LoRA adapters: merge it (04_merge) instead.")
        rank = read_json(Path(adapter) / "adapter_config.json")["r"]
        mounts.append(f"{Path(adapter).resolve()}:/adapter:ro")
        path = "/adapter" if engine in IMAGES else str(adapter)
        serve += ["--enable-lora", "--lora-modules", f"{name}-adapter={path}",
                  "--max-lora-rank", str(min(r for r in RANKS if r >= rank))]
    if engine == "cpu":
        return ["env", "VLLM_CPU_KVCACHE_SPACE=1", "HF_HUB_OFFLINE=1",
                PYTHON, LAUNCHER, *serve, "--enforce-eager"]
    docker = ["docker", "run", "--rm", "--name", CONTAINER, "--network", "host",
              "--shm-size", "16g", *(part for mount in mounts for part in ("-v", mount)),
              "-e", "HF_HUB_OFFLINE=1", "-e", "VLLM_ENGINE_READY_TIMEOUT_S=3600"]
    if engine == "tpu-docker":
        docker += ["--privileged", "-v", "vllm-xla-cache:/xla_cache",
                   "-e", "VLLM_XLA_CACHE_PATH=/xla_cache"]
    else:
        docker += ["--gpus", "all"]
    return [*docker, "--entrypoint", "vllm", IMAGES[engine], *serve, "--disable-chunked-mm-input"]


def shown(command):
    """A command as one could type it, one option per line."""
    line = shlex.join(command).replace(str(ROOT) + "/", "")
    return re.sub(r" (?=--?[a-zA-Z])", " \\\n    ", line)


# -- Processes ---------------------------------------------------------------------------------

def _stat(pid):
    """(state, session, start time) of a process from /proc, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rsplit(")", 1)[1].split()
    return fields[0], int(fields[3]), int(fields[19])


def _alive(record):
    found = _stat(record["pid"])
    return found is not None and found[0] != "Z" and found[2] == record["born"]


def members(record):
    """Process ids of the recorded server's session: the API server, its engine, its workers."""
    leader = _stat(record["pid"])
    if leader and leader[2] != record["born"]:
        return []  # the number was given to another process since
    found = {int(path.name): _stat(path.name) for path in Path("/proc").glob("[0-9]*")}
    return sorted(pid for pid, stat in found.items() if stat and stat[1] == record["pid"] and stat[0] != "Z")


def _kill(record):
    if record["engine"] in IMAGES:
        subprocess.run(["docker", "stop", "-t", "30", CONTAINER], capture_output=True)
    for sign, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        end, family = time.monotonic() + seconds, members(record)
        # SIGTERM goes to the server, which ends its engine; to orphans of a dead one, and SIGKILL, to all.
        for pid in [record["pid"]] if sign == signal.SIGTERM and _alive(record) else family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        while (left := members(record)) and time.monotonic() < end:
            time.sleep(0.1)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(record["pid"], os.WNOHANG)
    if left:
        raise UserError(f"the server did not end; run: kill -9 {' '.join(map(str, left))}")


# -- The log -----------------------------------------------------------------------------------

def _lines(log):
    text = Path(log).read_text(errors="replace") if Path(log).exists() else ""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    strip = re.compile(r"^(\([^)]*pid=\d+\) ?)?((INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
    return [(line, strip.sub("", line).strip()) for line in text.splitlines()]


def tail(log):
    """The last thing a server said in its log, without process name and time stamp."""
    said = [text for line, text in _lines(log) if re.search(r"(INFO|WARNING|ERROR) \d", line)
            and text[:1].isalpha() and not text.endswith(("(", "^"))]
    return said[-1] if said else "nothing yet"


def reason(log, code=None):
    """Why a `vllm` ended, in one line: the first error in its log, or its exit status."""
    texts = [text for line, text in _lines(log) if not re.search(r"(INFO|WARNING) \d", line)]
    first, before = "", ""
    for text in texts:
        found = re.match(r"(?:[\w.]+\.)?\w*(Error|Exception)\b(: .+)?$|.*error: .+|docker: .+", text)
        if text.startswith("Value error, "):  # the useful line of a pydantic ValidationError
            first = text
            break
        if found and not first and "root cause" not in text:
            first = text if found[2] or not found[1] else f"{text} in `{before}`"
        before = before if set(text) <= set("^~ ") else text
    if not first and code == -signal.SIGKILL:
        first = "killed by SIGKILL, as the kernel does when the machine is out of memory"
    how = "killed from outside" if code is None else f"exit status {code}"
    first = first[:400] or f"{how}, without an error of its own; it last said: {tail(log)}"
    if NO_MEMORY.search(first):
        first = (f"out of memory: {first}\nFree some, or lower --max-model-len, "
                 "--gpu-memory-utilization or (on a CPU) VLLM_CPU_KVCACHE_SPACE.")
    return first


# -- HTTP --------------------------------------------------------------------------------------

def request(record, path, payload=None, timeout=60.0):
    """The server's answer to a GET (or, with `payload`, a POST of JSON), as text.

    Raises:
      UserError: no server answers, or it refuses; its own message is repeated.
    """
    data = None if payload is None else json.dumps(payload).encode()
    query = urllib.request.Request(record["base_url"] + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(query, timeout=timeout) as answer:
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
    with contextlib.suppress(UserError):
        request(record, "/health", timeout=5.0)
        return True
    return False


# -- Life --------------------------------------------------------------------------------------

def record_path(slot="server"):
    """Where the server of this run directory is recorded."""
    return run_dir("serve", f"{slot}.json")


def current(slot="server"):
    """The record of the server that runs now.

    Raises:
      UserError: none was started, or it is dead or does not answer; says what to run.
    """
    if not record_path(slot).exists():
        raise UserError(f"no server is recorded in {record_path(slot)}. Run 05_serve_vllm first.")
    record = read_json(record_path(slot))
    if not _alive(record):
        raise UserError(f"the server of {record['model']} (process {record['pid']}) has died: "
                        f"{reason(record['log'])}\nRun 05_serve_vllm again; its log is {record['log']}.")
    if not healthy(record):
        raise UserError(f"the server of {record['model']} (process {record['pid']}) runs but does not "
                        f"answer at {record['base_url']}. Look at {record['log']}, run 05_serve_vllm again.")
    return record


def _fingerprint(*folders):
    """Names, sizes and times of the served files: a model that was merged again is another one."""
    files = sorted(path for folder in folders if folder for path in Path(folder).iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _free_port(host, port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"port {port} on {host} is in use ({error.strerror}). See who: "
                            f"ss -ltnp 'sport = :{port}'. Stop it, or choose another port (0: any).") from error
        return probe.getsockname()[1]


def prepare(engine):
    """Make the serving environment or pull the image; once it is there, this takes a second."""
    command = ["bash", "setup.sh", "serve"] if engine == "cpu" else ["docker", "pull", IMAGES[engine]]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise UserError(f"`{shlex.join(command)}` failed, see above.")


def start(engine, model, name, *, port=8000, host="127.0.0.1", timeout=180.0, slot="server",
          wait=True, **options):
    """Serve `model` in a process of its own session, wait until it is healthy, return its record.

    A healthy server of the same files and options is reused, and one that is still starting is waited
    for. Another one that this run directory records is stopped first: two do not fit into an
    accelerator's memory.

    Args:
      port: 0 takes any free one.
      timeout: seconds to become healthy. A TPU compiles for many minutes the first time.
      slot: another name lets a second server run beside the first.
      wait: False returns at once; the same call again, without it, waits.
      **options: as for `vllm_command`.

    Raises:
      UserError: the port is in use, or the server died or was not healthy in time; says why.
    """
    options = {"results": run_dir("bench"), **options}
    options["results"].mkdir(parents=True, exist_ok=True)  # else Docker makes it, as root
    wanted = vllm_command(engine, model, name, 0, host=host, **options)
    files = _fingerprint(model, options.get("adapter"))
    path, log = record_path(slot), run_dir("serve", f"{slot}.log")
    if path.exists():
        record = read_json(path)
        if (record["wanted"], record["files"]) == (wanted, files) and port in (0, record["port"]) \
                and _alive(record):
            if healthy(record):
                print(f"reusing the healthy server of {name} at {record['base_url']}")
                return record
            if "ready_seconds" not in record:
                return _ready(record, path, slot, timeout) if wait else record
        stop(slot)
    port = _free_port(host, port)
    command = vllm_command(engine, model, name, port, host=host, **options)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                                   stdin=subprocess.DEVNULL, start_new_session=True,
                                   env={**os.environ, "NO_COLOR": "1"})
    reach = "127.0.0.1" if host == "0.0.0.0" else host
    record = {"pid": process.pid, "port": port, "base_url": f"http://{reach}:{port}", "model": name,
              "model_path": str(model), "engine": engine, "command": command,
              "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "launched": time.time(),
              "born": _stat(process.pid)[2],
              "log": str(log), "max_model_len": options.get("max_model_len", 1024),
              "wanted": wanted, "files": files}
    write_json(path, record)
    return _ready(record, path, slot, timeout) if wait else record


def _ready(record, path, slot, timeout):
    with contextlib.ExitStack() as failed:  # an error or an interrupt leaves no process behind
        failed.callback(stop, slot)
        record["ready_seconds"] = round(_wait(record, timeout), 1)
        write_json(path, record)
        failed.pop_all()
    return record


def _wait(record, timeout, every=10.0):
    said, last = time.time() - record["launched"], ""
    while True:
        waited = time.time() - record["launched"]
        if not _alive(record):
            code = None
            with contextlib.suppress(ChildProcessError):
                code = os.waitstatus_to_exitcode(os.waitpid(record["pid"], 0)[1])
            raise UserError(f"the server ended after {waited:.0f} s: "
                            f"{reason(record['log'], code)}\nIts log is {record['log']}.")
        if healthy(record):
            print(f"healthy after {waited:.0f} s at {record['base_url']}", flush=True)
            return waited
        if waited > timeout:
            raise UserError(f"the server was not healthy within {timeout:.0f} s and was stopped; it last "
                            f"said: {tail(record['log'])[:200]}\nIts log is {record['log']}.")
        if waited - said >= every:
            said, now = waited, tail(record["log"])[:90]
            print(f"starting ... {waited:3.0f} s" + f" | {now}" * (now != last), flush=True)
            last = now
        time.sleep(0.25)


def stop(slot="server"):
    """End the server that this run directory records, with all its processes. True if one ran."""
    if not record_path(slot).exists():
        return False
    record = read_json(record_path(slot))
    ran = bool(members(record))
    _kill(record)
    record_path(slot).unlink(missing_ok=True)
    return ran


# -- The benchmark client -----------------------------------------------------------------------

class Client:
    """`vllm` as a client of the recorded server: one process for many short runs.

    On a CPU that is the launcher's `--lines`; beside a container each run is a `docker exec`.
    Use it in a `with` block: the process ends with it.

    Attributes:
      model, results: the model's and the results' directory as the client sees them.
    """

    def __init__(self, record, results, log):
        self.docker, self.log, self.process = record["engine"] in IMAGES, Path(log), None
        self.model = "/model" if self.docker else record["model_path"]
        self.results = "/bench" if self.docker else str(results)
        self.log.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process:
            self.process.kill()
            self.process.wait()

    def run(self, arguments):
        """Run `vllm <arguments>`; raises UserError with the reason if it fails."""
        with open(self.log, "ab") as log:
            log.write(f"\n$ vllm {shlex.join(arguments)}\n".encode())
            log.flush()
            begin = log.tell()
            if self.docker:
                code = subprocess.run(["docker", "exec", CONTAINER, "vllm", *arguments],
                                      stdout=log, stderr=log).returncode
            else:
                code = self._line(arguments, log)
        if code:
            part = self.log.with_suffix(".last")
            part.write_bytes(self.log.read_bytes()[begin:])
            raise UserError(f"vllm {' '.join(arguments[:2])} failed: {reason(part, code)}")

    def _line(self, arguments, log):
        if self.process is None:
            command = ["env", "HF_HUB_OFFLINE=1", PYTHON, LAUNCHER, "--lines"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=log, cwd=ROOT)
        with contextlib.suppress(BrokenPipeError):  # it has died: its exit status says so below
            self.process.stdin.write(json.dumps(arguments).encode() + b"\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.decode().strip() == DONE:
                return 0
            log.write(line)
        code, self.process = self.process.wait(), None
        return code or 1


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["stop"]:
            slots = [path.stem for path in run_dir("serve").glob("*.json")]
            print("stopped the server" if any([stop(slot) for slot in slots]) else "no server was running")
        else:
            print(f"{current()['model']} at {current()['base_url']}")
    except UserError as error:
        sys.exit(str(error))
