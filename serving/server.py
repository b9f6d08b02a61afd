"""One vLLM server per run directory: its options, its command, its start, its state, its end.

    python -m serving.server start      bring it up as 05 left it (RUN_DIR/serve/options.json)
    python -m serving.server status     what runs for this RUN_DIR
    python -m serving.server stop       end all of it

`serve/options.json` says what 05 decided and outlives the server; `serve/server.json` records the
running one. A second server beside it (05 compares two) has a slot of its own, that is another
record. Every process of a server carries the path of its record in its environment, so `stop` finds
it even where that record was never written, or only half.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from helpers.opening import ROOT
from helpers.run import digest, read_json, run_dir, write_json
from serving.vllm_cpu import DONE

IMAGES = {"tpu-docker": "vllm/vllm-tpu:v0.32.0", "gpu-docker": "vllm/vllm-openai:v0.32.0"}
SOCKET = Path("/var/run/docker.sock")
CONTAINER = "gemma4-vllm"  # `start` adds a mark of the run directory
PYTHON, LAUNCHER = ".venv-serve/bin/python", "serving/vllm_cpu.py"
TEXT_ONLY = '{"image": 0, "video": 0, "audio": 0}'  # so vLLM sets up neither vision nor audio
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as --max-lora-rank
QWIX = {"int8": "int8", "fp8": "float8_e4m3fn"}  # the names that Qwix gives to these types
MARK, CLIENT_MARK, OWNER = "GEMMA4_SERVER", "GEMMA4_CLIENT", "SERVER_OWNER"  # in the environment
NO_MEMORY = re.compile(r"(?i)out ?of ?memory|RESOURCE_EXHAUSTED|cannot allocate|MemoryError|"
                       r"\bOOM\b|less than requested memory")
NO_CACHE = re.compile(r"(?i)KV cache.*(is needed|larger)|No available memory")  # weights fit


# -- Options -----------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Options:
    """What 05 decided about the server: enough to start it again, and to compute its floors.

    Attributes:
      engine: "tpu-docker", "gpu-docker" or "cpu" (the CPU build in .venv-serve).
      model, model_hash: the served folder, and `model_hash` of the merge.json that it was checked
        against ("": not checked).
      name: what clients ask for.
      port: 0 takes any free one.
      max_num_batched_tokens: tokens of one step at the most; a longer prompt takes several steps.
      kv_cache_dtype: as vLLM's flag; "auto" is the model's own, bfloat16.
      quantization: "" (bfloat16), "int8" or "fp8": weights and arithmetic.
      implementation: MODEL_IMPL_TYPE on a TPU: "" (vLLM chooses), "flax_nnx" or "vllm" (torchax).
      environment: further variables of the server's process, as "NAME=value".
      flags: further flags of `vllm serve`.
      image: the container's image; "": the one in `IMAGES`.
      base: the model that 07 compares with, as `remote.stage` takes it; "": that of the training.
      chip: a name of `helpers.chip`; "" where there is no data sheet (a CPU).
      timeout: seconds until healthy.
    """

    engine: str
    model: str
    name: str
    model_hash: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    max_model_len: int = 1024
    max_num_batched_tokens: int = 2048
    tensor_parallel: int = 1
    data_parallel: int = 1
    kv_cache_dtype: str = "auto"
    quantization: str = ""
    implementation: str = ""
    environment: tuple = ()
    flags: tuple = ()
    image: str = ""
    base: str = ""
    chip: str = ""
    timeout: float = 180.0

    @property
    def chips(self):
        """How many chips serve: those of one copy of the model, times the copies."""
        return self.tensor_parallel * self.data_parallel

    @property
    def weight_bytes(self):
        """Bytes of one weight, at the least: quantised to one, else bfloat16."""
        return 1 if self.quantization else 2

    @property
    def kv_bytes(self):
        """Bytes of one cached number."""
        return 1 if "8" in self.kv_cache_dtype else 2

    def serving(self):
        """What `vllm_command` wants to know, beside engine, model, name, port and host."""
        names = ("max_model_len", "max_num_batched_tokens", "tensor_parallel", "data_parallel",
                 "kv_cache_dtype", "quantization", "implementation", "environment", "flags",
                 "image")
        return {name: getattr(self, name) for name in names}

    def measured(self):
        """What a measurement of this server belongs to: all that shapes its speed, but no path."""
        return {"engine": self.engine, "model_hash": self.model_hash, "chip": self.chip,
                **self.serving(), "environment": list(self.environment), "flags": list(self.flags)}


def model_hash(merge):
    """One hash for the files that a merge.json lists with theirs."""
    return digest(merge["files"])


def options_path():
    """Where 05 leaves the server's options."""
    return run_dir("serve", "options.json")


def write_options(options):
    """Leave `Options` for 06 and 07, with the state of the files that they were decided for."""
    write_json(options_path(), {**dataclasses.asdict(options), "chips": options.chips,
                                "files": _file_states(options.model)})


def _read_options():
    if not options_path().exists():
        raise ValueError(f"{options_path()} is missing: no server was ever started for this run "
                        "directory. Run 05_serve_vllm first.")
    with contextlib.suppress(TypeError, KeyError, ValueError):
        found = dict(read_json(options_path()))
        files, _ = found.pop("files"), found.pop("chips")
        lists = {name: tuple(found[name]) for name in ("environment", "flags")}
        return Options(**{**found, **lists}), files
    raise ValueError(f"{options_path()} is not what 05_serve_vllm writes. Run 05 again.")


def options():
    """The `Options` that 05 left.

    Raises:
      ValueError: it has not run, or the file is broken.
    """
    return _read_options()[0]


def command(options, model=None, name=None, port=None, **more):
    """The command that serves as 05 did; with `model` and `name`, another model in the same way."""
    return vllm_command(options.engine, model or options.model, name or options.name,
                        options.port if port is None else port, host=options.host,
                        **options.serving(), **more)


# -- The command -------------------------------------------------------------------------------

def vllm_command(engine, model, name, port, *, host="127.0.0.1", max_model_len=1024,
                 max_num_batched_tokens=2048, tensor_parallel=1, data_parallel=1,
                 kv_cache_dtype="auto", quantization="", implementation="", environment=(),
                 flags=(), image="", adapter=None, results=None, container=CONTAINER):
    """The command that serves `model` under `name`, as a list for `subprocess`.

    Args:
      engine ... image: as in `Options`.
      model: a Hugging Face directory on this machine.
      adapter: a PEFT directory, served beside the model as `<name>-adapter`.
      results: a directory the container may write benchmark results to (Docker only).
      container: its name.

    Raises:
      ValueError: an unknown engine, or options that it cannot serve; says which would do.
    """
    if engine not in (*IMAGES, "cpu"):
        raise ValueError(f"engine {engine!r} is unknown; there are tpu-docker, gpu-docker and cpu.")
    inside = "/model" if engine in IMAGES else str(model)
    serve = ["serve", inside, "--served-model-name", name, "--host", host, "--port", str(port),
             "--dtype", "bfloat16", "--kv-cache-dtype", kv_cache_dtype,
             "--max-model-len", str(max_model_len),
             "--max-num-batched-tokens", str(max_num_batched_tokens),
             "--tensor-parallel-size", str(tensor_parallel),
             "--data-parallel-size", str(data_parallel),
             "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
             *_quantization_flags(engine, quantization)]
    mounts = [f"{Path(model).resolve()}:/model:ro"]
    if results:
        mounts.append(f"{Path(results).resolve()}:/bench")
    if implementation and engine != "tpu-docker":
        raise ValueError(f"implementation {implementation!r} is a choice of vLLM on TPU alone.")
    if adapter:
        if engine == "tpu-docker" and (implementation != "vllm" or data_parallel > 1):
            raise ValueError('on a TPU only implementation="vllm" with data_parallel=1 takes '
                            "adapters, untested with Gemma 4: merge it (04_merge) instead.")
        rank = read_json(Path(adapter) / "adapter_config.json")["r"]
        mounts.append(f"{Path(adapter).resolve()}:/adapter:ro")
        path = "/adapter" if engine in IMAGES else str(adapter)
        serve += ["--enable-lora", "--lora-modules", f"{name}-adapter={path}",
                  "--max-lora-rank", str(min(r for r in RANKS if r >= rank))]
    if engine == "cpu":
        return ["env", "VLLM_CPU_KVCACHE_SPACE=1", "HF_HUB_OFFLINE=1", *environment,
                PYTHON, LAUNCHER, *serve, "--enforce-eager", *flags]
    docker = ["docker", "run", "--rm", "--name", container, "--network", "host",
              "--shm-size", "16g", *(part for mount in mounts for part in ("-v", mount)),
              "-e", "HF_HUB_OFFLINE=1", "-e", "VLLM_ENGINE_READY_TIMEOUT_S=3600",
              *(part for variable in environment for part in ("-e", variable))]
    if engine == "tpu-docker":
        docker += ["--privileged", "-v", "vllm-xla-cache:/xla_cache",
                   "-e", "VLLM_XLA_CACHE_PATH=/xla_cache"]
        docker += ["-e", f"MODEL_IMPL_TYPE={implementation}"] if implementation else []
    else:
        docker += ["--gpus", "all"]
    return [*docker, "--entrypoint", "vllm", image or IMAGES[engine], *serve,
            "--limit-mm-per-prompt", TEXT_ONLY, *flags]


def _quantization_flags(engine, quantization):
    if not quantization:
        return []
    if engine == "tpu-docker" and quantization in QWIX:  # quantised after it has been loaded
        rule = {"module_path": ".*", "weight_qtype": QWIX[quantization],
                "act_qtype": QWIX[quantization]}
        return ["--additional-config", json.dumps({"quantization": {"qwix": {"rules": [rule]}}})]
    if engine == "gpu-docker" and quantization == "fp8":
        return ["--quantization", "fp8"]
    raise ValueError(f"quantization {quantization!r} is not for {engine}: there are int8 and fp8 on "
                    "tpu-docker, fp8 on gpu-docker.")


def compose(command):
    """The `docker run` command as the content of a docker-compose.yml."""
    words, service = iter(command[command.index("run") + 1:]), {}
    plain = {"--name": "container_name", "--network": "network_mode", "--shm-size": "shm_size",
             "--entrypoint": "entrypoint"}
    for word in words:
        if word in plain:
            service[plain[word]] = next(words)
        elif word in ("-v", "-e"):
            service.setdefault({"-v": "volumes", "-e": "environment"}[word], []).append(next(words))
        elif word == "--privileged":
            service["privileged"] = True
        elif word == "--gpus":
            device = {"driver": "nvidia", "count": next(words), "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        elif word != "--rm":
            assert not word.startswith("-"), f"no place for {word}"
            service |= {"image": word, "command": list(words)}
    named = [volume.split(":")[0] for volume in service["volumes"] if not volume.startswith("/")]
    return {"services": {"vllm": service}, "volumes": {name: {"name": name} for name in named}}


def shown(command):
    """A command as one could type it in the repository, one option per line."""
    line = shlex.join(command).replace(f"-v {ROOT}/", '-v "$PWD"/').replace(f"{ROOT}/", "")
    return re.sub(r" (?=--?[a-zA-Z])", " \\\n    ", line)


# -- Processes ---------------------------------------------------------------------------------

def _born(process):
    """Seconds from the machine's boot to a process's start; no change of the clock moves it."""
    return round(process.create_time() - psutil.boot_time(), 2)


def _lives(who):
    """True if the process of {"pid", "born"} runs; another one with its number does not count."""
    try:
        process = psutil.Process(who["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and abs(_born(process) - who["born"]) < 0.05
    except psutil.Error:
        return False


def _marked(name, value):
    """Live processes that have `name=value` in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _session(record):
    """Live processes of the recorded server's session, if its number is still its own."""
    if psutil.pid_exists(record["pid"]) and not _lives(record):
        with contextlib.suppress(psutil.Error):
            if psutil.Process(record["pid"]).status() != psutil.STATUS_ZOMBIE:
                return []  # the number was given to another process since
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == record["pid"] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def members(record):
    """Process ids of the recorded server: the API server, its engine, its workers."""
    return sorted({*_session(record), *_marked(MARK, record["mark"])})


def container_name(slot="server"):
    """The container of this run directory and slot: two run directories do not meet."""
    mark = hashlib.sha256(str(run_dir().resolve()).encode()).hexdigest()[:8]
    return f"{CONTAINER}-{mark}" + f"-{slot}" * (slot != "server")


def _stop_container(name):
    subprocess.run(["docker", "stop", "-t", "30", name], capture_output=True)


def _end(leader, family, reap):
    """SIGTERM to the server, which ends its engine, and to orphans; after 20 s SIGKILL to all.

    Returns the processes that are left even so.
    """
    told, begin = set(), time.monotonic()
    while (left := family()) and (waited := time.monotonic() - begin) < 25.0:
        sign = signal.SIGTERM if waited < 20.0 else signal.SIGKILL
        for pid in [leader] if leader in left and sign == signal.SIGTERM else left:
            if (pid, sign) not in told:
                told.add((pid, sign))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
        time.sleep(0.1)
        if reap:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(reap, os.WNOHANG)
    return left


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
        found = re.match(r"(?:[\w.]+\.)?\w*(Error|Exception)\b(: .+)?$|.*error: .+|docker: .+",
                         text)
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
    if NO_CACHE.search(first):
        first = (f"no room for the KV cache: {first}\nRaise --gpu-memory-utilization or (on a CPU) "
                 "VLLM_CPU_KVCACHE_SPACE, lower --max-model-len, or quantise the weights.")
    elif NO_MEMORY.search(first):
        first = (f"out of memory: {first}\nFree some, or lower --max-model-len, "
                 "--gpu-memory-utilization or (on a CPU) VLLM_CPU_KVCACHE_SPACE.")
    return first


# -- HTTP --------------------------------------------------------------------------------------

def request(record, path, payload=None, timeout=60.0):
    """The server's answer to a GET (or, with `payload`, a POST of JSON), as text.

    Raises:
      ValueError: no server answers, or it refuses; its own message is repeated.
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
        raise ValueError(f"{path}: HTTP {error.code}: {text[:300]}") from error
    except OSError as error:
        raise ValueError(f"no server answers at {record['base_url']} "
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
    thinking = recipe["reasoning"] == "kept"
    return thinking, {"chat_template_kwargs": {"enable_thinking": thinking}}


def chat_request(text, recipe, **more):
    """Arguments for `client.chat.completions.create`: `text` asked as training asked, greedy."""
    system = [{"role": "system", "content": recipe["system"]}] if recipe["system"] else []
    return {"messages": [*system, {"role": "user", "content": text.strip()}], "temperature": 0,
            "extra_body": as_trained(recipe)[1], **more}


def logprobs(record, model, ids):
    """Log-probability of each token id given those before it: one less than there are ids."""
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    scored = post(record, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [entry[str(token)]["logprob"] for entry, token in zip(scored[1:], ids[1:], strict=True)]


# -- Life --------------------------------------------------------------------------------------

RECORD = {"pid": int, "born": float, "port": int, "base_url": str, "model": str, "model_path": str,
          "engine": str, "log": str, "mark": str, "container": str, "max_model_len": int,
          "launched": float, "wanted": list, "files": list}


def record_path(slot="server"):
    """Where the server of this run directory is recorded."""
    return run_dir("serve", f"{slot}.json")


def _record(slot):
    """The record of a slot, or None: there is none, or it is no record, which is said."""
    path = record_path(slot)
    if not path.exists():
        return None
    with contextlib.suppress(UnicodeDecodeError):
        found = read_json(path)
        if isinstance(found, dict) and all(isinstance(found.get(k), t) for k, t in RECORD.items()):
            first = Path(found["mark"])
            if first == path.resolve() or not first.exists():  # the latter: a folder was moved
                return found
            print(f"{path} is a copy of {first}, whose server it is: taken as absent")
            return None
    print(f"{path} is not the record of a server (half-written?): taken as absent")
    return None


def _slots():
    """Every slot of this run directory that has a record or a process."""
    files = {path.stem for path in run_dir("serve").glob("*.json")} - {options_path().stem}
    folder, marks = str(record_path().resolve().parent), set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            marks.add(process.environ().get(MARK, ""))
    return sorted(files | {Path(mark).stem for mark in marks if str(Path(mark).parent) == folder})


def _orphaned(record):
    """True if the process that asked for this server, and was to end it, has itself ended."""
    return bool(record.get("owner")) and not _lives(record["owner"])


def current(slot="server"):
    """The record of the server that runs now.

    Raises:
      ValueError: none was started, or it is dead or does not answer; says what to run.
    """
    record = _record(slot)
    if record is None:
        raise ValueError(f"no server is recorded in {record_path(slot)}. Run 05_serve_vllm first.")
    if not _lives(record):
        raise ValueError(f"the server of {record['model']} (process {record['pid']}) has died: "
                        f"{reason(record['log'])}\nRun 05_serve_vllm again; its log is "
                        f"{record['log']}.")
    if not healthy(record):
        raise ValueError(f"the server of {record['model']} (process {record['pid']}) runs but does "
                        f"not answer at {record['base_url']}. Look at {record['log']}, run "
                        "05_serve_vllm again.")
    return record


def running(slot="server"):
    """True if a server is recorded, alive and healthy."""
    record = _record(slot)
    return record is not None and _lives(record) and healthy(record)


def _file_states(*folders):
    """Names, sizes and times of the served files: a model that was merged again is another one."""
    files = sorted(path for folder in folders if folder for path in Path(folder).iterdir()
                   if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _free_port(host, port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"port {port} on {host} is in use ({error.strerror}). See who: "
                            f"ss -ltnp 'sport = :{port}'. Stop it, or choose another port "
                            "(0: any).") from error
        return probe.getsockname()[1]


def prepare(engine, image=""):
    """Make the serving environment or pull the image; once it is there, this takes a second."""
    command = ["bash", "setup.sh", "serve"] if engine == "cpu" else \
        ["docker", "pull", image or IMAGES[engine]]
    try:
        failed = subprocess.run(command, cwd=ROOT).returncode
    except FileNotFoundError:
        raise ValueError(f"there is no {command[0]} here. Run: sudo apt-get install -y docker.io, "
                        'then sudo usermod -aG docker "$USER", and log in again.') from None
    if failed and engine != "cpu" and SOCKET.exists() and not os.access(SOCKET, os.W_OK):
        raise ValueError(f"{SOCKET} may not be opened by this user. Run: sudo usermod -aG docker "
                        '"$USER", then log in again or start this as `sg docker -c \'...\'`.')
    if failed:
        raise ValueError(f"`{shlex.join(command)}` failed, see above.")


def start(engine, model, name, *, port=8000, host="127.0.0.1", timeout=180.0, slot="server",
          wait=True, owner=None, **options):
    """Serve `model` in a process of its own session, wait until it is healthy, return its record.

    A healthy server of the same files and options is reused, and one that is still starting is
    waited for. Another one that this run directory records is stopped first: two do not fit into
    an accelerator's memory.

    Args:
      port: 0 takes any free one.
      timeout: seconds to become healthy. A TPU compiles for many minutes the first time.
      slot: another name lets a second server run beside the first.
      wait: False returns at once; the same call again, without it, waits.
      owner: a process id, by default the environment's SERVER_OWNER. When that process has ended,
        however it did, the server is ended too. Without one it stays until somebody stops it.
      **options: as for `vllm_command`.

    Raises:
      ValueError: the port is in use, or the server died or was not healthy in time; says why.
    """
    options = {"results": run_dir("bench"), "container": container_name(slot), **options}
    options["results"].mkdir(parents=True, exist_ok=True)  # else Docker makes it, as root
    wanted = vllm_command(engine, model, name, 0, host=host, **options)
    files = _file_states(model, options.get("adapter"))
    path, log = record_path(slot), run_dir("serve", f"{slot}.log")
    record, owner = _record(slot), _lease(owner)
    if record and (record["wanted"], record["files"]) == (wanted, files) \
            and port in (0, record["port"]) and _lives(record):
        starting = "ready_seconds" not in record
        if starting or healthy(record):
            _take_over(record, slot, owner)
            if not starting:
                print(f"reusing the healthy server of {name} at {record['base_url']}")
            return _ready(record, slot, timeout) if starting and wait else record
    stop(slot)
    port = _free_port(host, port)
    command = vllm_command(engine, model, name, port, host=host, **options)
    log.parent.mkdir(parents=True, exist_ok=True)
    mark = str(path.resolve())
    marks = {"NO_COLOR": "1", MARK: mark, "SPT_NOENV": "1"}  # SPT_: renamed processes keep the mark
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                                   stdin=subprocess.DEVNULL, start_new_session=True,
                                   env={**os.environ, **marks})
    reach = "127.0.0.1" if host == "0.0.0.0" else host
    record = {"pid": process.pid, "port": port, "base_url": f"http://{reach}:{port}", "model": name,
              "model_path": str(model), "engine": engine, "command": command,
              "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "launched": time.monotonic(),
              "born": _born(psutil.Process(process.pid)), "mark": mark, "owner": owner,
              "container": options["container"],
              "log": str(log), "max_model_len": options.get("max_model_len", 1024),
              "wanted": wanted, "files": files}
    write_json(path, record)
    _watch_over(record, slot)
    return _ready(record, slot, timeout) if wait else record


def _ready(record, slot, timeout):
    with contextlib.ExitStack() as failed:  # an error or an interrupt leaves no process behind
        failed.callback(stop, slot)
        record["ready_seconds"] = round(_wait(record, timeout), 1)
        write_json(record_path(slot), record)
        failed.pop_all()
    return record


def _wait(record, timeout, every=10.0):
    said = time.monotonic() - record["launched"]
    while True:
        waited = time.monotonic() - record["launched"]
        if not _lives(record):
            code = None
            with contextlib.suppress(ChildProcessError):
                code = os.waitstatus_to_exitcode(os.waitpid(record["pid"], 0)[1])
            raise ValueError(f"the server ended after {waited:.0f} s: "
                            f"{reason(record['log'], code)}\nIts log is {record['log']}.")
        if healthy(record):
            print(f"healthy after {waited:.0f} s at {record['base_url']}", flush=True)
            return waited
        if waited > timeout:
            raise ValueError(f"the server was not healthy within {timeout:.0f} s and was stopped; "
                            f"it last said: {tail(record['log'])[:200]}\nIts log is "
                            f"{record['log']}.")
        if waited - said >= (every if waited < 6 * every else 3 * every):
            said = waited
            print(f"starting ... {waited:3.0f} s", flush=True)
        time.sleep(0.25)


def stop(slot="server"):
    """End the server of a slot, with all its processes, recorded or not. True if one ran."""
    path, record = record_path(slot), _record(slot)
    mark = str(path.resolve())

    def family():
        return sorted({*_marked(MARK, mark), *(_session(record) if record else ())})
    ran = bool(family())
    leader = record["pid"] if record and _lives(record) else None
    if record is None and (ran or path.exists()) and shutil.which("docker"):
        _stop_container(container_name(slot))
    elif record and record["engine"] in IMAGES:
        _stop_container(record["container"])
    if left := _end(leader, family, record["pid"] if record else 0):
        raise ValueError(f"the server did not end; run: kill -9 {' '.join(map(str, left))}")
    path.unlink(missing_ok=True)
    return ran


# -- As 05 left it -----------------------------------------------------------------------------

def start_as(options, model=None, name=None, **more):
    """`start` as 05 decided; with `model` and `name`, another model served in the same way."""
    return start(options.engine, model or options.model, name or options.name, port=options.port,
                 host=options.host, timeout=options.timeout, **options.serving(), **more)


def bring_up(owner=None):
    """The record of a server as 05 left it: the one that runs, or a new one.

    Raises:
      ValueError: 05 has not run, or the files that it checked have changed since.
    """
    found, files = _read_options()
    if not Path(found.model).is_dir() or _file_states(found.model) != files:
        raise ValueError(f"{found.model} is no longer what 05_serve_vllm checked and served. "
                        "Run 05 again.")
    if not running():
        if record := _record("server"):
            print(f"the server of {record['model']} has ended: {reason(record['log'])}")
        prepare(found.engine, found.image)
    return start_as(found, owner=owner)


# -- A lease: who ends a server that its owner cannot end any more ------------------------------

def _lease(owner):
    """{"pid", "born"} of the owner; None without one, or if it has ended already."""
    owner = owner or int(os.environ.get(OWNER) or 0)
    with contextlib.suppress(psutil.Error):
        return {"pid": owner, "born": _born(psutil.Process(owner))} if owner else None
    return None


def _take_over(record, slot, owner):
    """Put a running server whose owner has ended under the present one, and say so."""
    if _orphaned(record):
        print(f"process {record['owner']['pid']}, which started this server, has ended without it: "
              "taken over")
        record["owner"] = owner
        write_json(record_path(slot), record)
        _watch_over(record, slot)


def _watch_over(record, slot):
    """Start the process that ends a server when its owner has ended; nothing without an owner."""
    if record["owner"]:
        environment = {**os.environ, "RUN_DIR": str(run_dir().resolve())}
        with open(record["log"], "ab") as log:
            subprocess.Popen([sys.executable, "-m", "serving.server", "watch", slot], cwd=ROOT,
                             stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                             start_new_session=True, env=environment)


def watch(slot, every=1.0):
    """End a slot's server as soon as its owner has ended, and say so in its log."""
    owner = (_record(slot) or {}).get("owner")
    while (record := _record(slot)) and record["owner"] == owner:
        if _orphaned(record):
            with open(record["log"], "a") as log:
                log.write(f"WARNING {time.strftime('%m-%d %H:%M:%S')} [serving/server.py] the "
                          f"process that started this server, {record['owner']['pid']}, has ended: "
                          "stopping it\n")
            stop(slot)
        elif not _lives(record):  # its record stays and says why
            if record["engine"] in IMAGES:
                _stop_container(record["container"])  # it may outlive its client
            return
        time.sleep(every)


# -- The benchmark client -----------------------------------------------------------------------

END_CLIENTS = """for place in /proc/[0-9]*; do
  if tr '\\0' '\\n' < "$place/environ" 2>/dev/null | grep -qxF "$1"; then
    kill -KILL "${place#/proc/}" && echo "${place#/proc/}"
  fi
done"""


class Client:
    """`vllm` as a client of the recorded server: one process for many short runs.

    On a CPU that is the launcher's `--lines`; beside a container each run is a `docker exec`, which
    passes no signal on: interrupted, it leaves its `vllm` in the container, sending. So every run
    carries a mark, and both ends of a `with` block end what carries it: what an earlier block left,
    and what an interrupt of this one would leave.

    Attributes:
      model, results: the model's and the results' directory as the client sees them.
    """

    def __init__(self, record, results, log):
        self.docker, self.log, self.process = record["engine"] in IMAGES, Path(log), None
        self.container = record.get("container")
        self.model = "/model" if self.docker else record["model_path"]
        self.results = "/bench" if self.docker else str(results)
        self.mark = str(Path(results).resolve())
        self.log.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        if found := self.end():
            print(f"an earlier client was still sending: ended (process {', '.join(found)})")
        return self

    def __exit__(self, *error):
        if self.process:
            self.process.kill()
            self.process.wait()
        self.end()

    def end(self):
        """End every client of these results, also one of an earlier process; returns their ids."""
        if self.docker:
            done = subprocess.run(["docker", "exec", self.container, "sh", "-c", END_CLIENTS, "sh",
                                   f"{CLIENT_MARK}={self.mark}"], capture_output=True, text=True)
            return done.stdout.split()
        found = _marked(CLIENT_MARK, self.mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [str(pid) for pid in found]

    def run(self, arguments):
        """Run `vllm <arguments>`; raises ValueError with the reason if it fails."""
        with open(self.log, "ab") as log:
            log.write(f"\n$ vllm {shlex.join(arguments)}\n".encode())
            log.flush()
            begin = log.tell()
            if self.docker:
                mark = ["-e", f"{CLIENT_MARK}={self.mark}", "-e", "SPT_NOENV=1"]
                code = subprocess.run(["docker", "exec", *mark, self.container, "vllm", *arguments],
                                      stdout=log, stderr=log).returncode
            else:
                code = self._line(arguments, log)
        if code:
            part = self.log.with_suffix(".last")
            part.write_bytes(self.log.read_bytes()[begin:])
            raise ValueError(f"vllm {' '.join(arguments[:2])} failed: {reason(part, code)}")

    def _line(self, arguments, log):
        if self.process is None:
            command = ["env", "HF_HUB_OFFLINE=1", f"{CLIENT_MARK}={self.mark}", "SPT_NOENV=1",
                       PYTHON, LAUNCHER, "--lines"]
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


def cpu_seconds(record):
    """CPU seconds so far: of this machine under None, and of each process of ours by its number.

    Ours are the server's, this one and its children, a benchmark client among them.
    """
    times, me = psutil.cpu_times(), psutil.Process()
    idle = times.idle + getattr(times, "iowait", 0.0)
    again = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # in user and nice
    used = {None: sum(times) - idle - again}
    for pid in {me.pid, *(child.pid for child in me.children(recursive=True)), *members(record)}:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            used[pid] = sum(process.cpu_times()[:2])
    return {**used, "clock": time.monotonic()}


def others_cores(before, after):
    """Cores that processes other than ours kept busy between two answers of `cpu_seconds`."""
    ours = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items()
               if isinstance(pid, int))
    busy, seconds = after[None] - before[None], after["clock"] - before["clock"]
    return max(0.0, (busy - ours) / seconds) if seconds else 0.0


# -- By hand -----------------------------------------------------------------------------------

def status():
    """Lines that say which servers run for this run directory; raises ValueError if none does."""
    lines = []
    for slot in _slots():
        record = _record(slot)
        if record and _lives(record):
            state = "healthy" if healthy(record) else "does not answer yet"
            where = f", container {record['container']}" * (record["engine"] in IMAGES)
            owner = ""
            if record.get("owner"):
                owner = (f", for process {record['owner']['pid']}"
                         + ", which has ended" * _orphaned(record))
            lines.append(f"{record['model']} at {record['base_url']}: {state}, process "
                         f"{record['pid']}{where}{owner}; log {record['log']}")
    if not lines:
        raise ValueError(f"no server runs for {run_dir()}.")
    return lines


def stop_all():
    """End every server of this run directory; returns a line for each."""
    lines = []
    for slot in _slots():
        record = _record(slot)
        name = record["model"] if record else f"slot {slot}, whose record could not be read"
        why = " (the process that started it has ended)" if record and _orphaned(record) else ""
        if stop(slot):
            lines.append(f"stopped the server of {name}{why}")
    return lines or ["no server was running"]


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case ["start"]:
                bring_up()
            case ["stop"]:
                print(*stop_all(), sep="\n")
            case ["status"]:
                print(*status(), sep="\n")
            case ["watch", slot]:
                watch(slot)
            case _:
                raise ValueError("python -m serving.server start | status | stop")
    except ValueError as error:
        sys.exit(str(error))
