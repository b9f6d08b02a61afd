"""What a vLLM server is: its options, the command that they make, and what must hold before it starts."""

import dataclasses
import hashlib
import json
import re
import shlex
from pathlib import Path

from tables.errors import UserError
from tables import hardware
from tables.settings import setting

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {"tpu-docker": "vllm/vllm-tpu:v0.32.0", "gpu-docker": "vllm/vllm-openai:v0.32.0"}
ENGINES = (*IMAGES, "tpu", "cpu")
CONTAINER = "gemma4-vllm"  # `start` adds a mark of its folder: two run directories do not meet
VENV = ROOT / ".venv-serve" / "bin"  # `./setup.sh serve`
TPU_VENV = ROOT / ".venv-serve-tpu" / "bin"  # `./setup.sh serve-tpu`
LAUNCHER = ROOT / "serving" / "vllm_cpu.py"
TEXT_ONLY = '{"image": 0, "video": 0, "audio": 0}'  # so vLLM sets up neither vision nor audio
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as --max-lora-rank
QWIX = {"int8": "int8", "fp8": "float8_e4m3fn"}  # the names that Qwix gives to these types
SHARE = 0.92  # of a chip's memory that vLLM takes, unless told otherwise


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything that says what a server is; 06 and 07 follow what 05 decided here."""

    engine: str = setting("cpu", '"tpu-docker" or "gpu-docker" (a container), "tpu" (vllm-tpu from '
                          'PyPI) or "cpu" (vLLM\'s CPU build), the last two in environments of their '
                          "own, which `start` makes")
    model: str = setting("", "the served folder, in Hugging Face's layout")
    name: str = setting("gemma4-verilog", "what clients ask for")
    host: str = setting("127.0.0.1", "127.0.0.1 is only this machine")
    port: int = setting(0, "0 takes any free one")
    max_model_len: int = setting(1024, "prompt and answer, in tokens")
    max_num_batched_tokens: int = setting(2048, "tokens of one step at the most; a longer prompt takes "
                                          "several steps")
    tensor_parallel: int = setting(1, "chips that share every matrix")
    data_parallel: int = setting(1, "copies of the model")
    kv_cache_dtype: str = setting("auto", 'the model\'s own, bfloat16; or "fp8"')
    quantization: str = setting("", 'of weights: "" (bfloat16), "int8" or "fp8"')
    prefix_caching: bool = setting(False, "whether prompts that share a beginning are computed once")
    drafter: str = setting("", '"" for none, "ngram", or the folder of a smaller model that proposes tokens')
    draft_tokens: int = setting(4, "how many it proposes at a time")
    adapter: str = setting("", "a PEFT folder that is served beside the model, as `<name>-adapter`")
    implementation: str = setting("", 'MODEL_IMPL_TYPE on a TPU: "" (vLLM chooses), "flax_nnx" or "vllm" '
                                  "(torchax)")
    environment: tuple = setting((), 'further variables of the server\'s process, as "NAME=value"')
    flags: tuple = setting((), "further flags of `vllm serve`")
    image: str = setting("", 'the container\'s image; "": the one in `IMAGES`')
    chip: str = setting("", 'a name of `tables.hardware.CHIPS`; "" where there is no data sheet (a CPU)')
    timeout: float = setting(600.0, "seconds until healthy; a TPU compiles first")
    base: str = setting("", "for 07, the model that it compares with: a path, hub id or gs://; "
                        '"": that of the training')
    model_hash: str = setting("", 'of the files that 04 merged; "": not checked')

    @property
    def chips(self):
        """How many chips serve: those of one copy of the model, times the copies."""
        return self.tensor_parallel * self.data_parallel

    @property
    def docker(self):
        """Whether it runs in a container."""
        return self.engine in IMAGES

    def measured(self):
        """What a measurement of this server belongs to: all that shapes its speed.

        The model is its hash, wherever its folder is; without a hash it is the folder.
        """
        no = ("adapter", "name", "host", "port", "timeout", "base", *["model"] * bool(self.model_hash))
        return json.loads(json.dumps({k: v for k, v in dataclasses.asdict(self).items() if k not in no}))


# -- In a file --------------------------------------------------------------------------------------

def file_states(*folders):
    """Names, sizes and times of the served files: a model that was merged again is another one."""
    files = sorted(path for folder in folders if folder for path in Path(folder).iterdir()
                   if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def write(options, folder):
    """Leave options in `<folder>/options.json`, with the state of the files they were decided for."""
    found = {**dataclasses.asdict(options), "files": file_states(options.model)}
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "options.json").write_text(json.dumps(found, indent=2) + "\n")


def read(folder):
    """The `Options` that `write` left.

    Raises:
      UserError: there are none, the file is broken, or the model's files have changed since.
    """
    path = Path(folder) / "options.json"
    if not path.exists():
        raise UserError(f"{path} is missing: no server was ever started for this run directory. "
                         "Run 05_serve_vllm first.")
    try:
        found = json.loads(path.read_text())
        files = found.pop("files")
        options = Options(**{**found, **{name: tuple(found[name]) for name in ("environment", "flags")}})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not what 05_serve_vllm writes. Run 05 again.") from error
    if not Path(options.model).is_dir() or file_states(options.model) != files:
        raise UserError(f"{options.model} is no longer what 05_serve_vllm checked and served. "
                         "Run 05 again.")
    return options


# -- What must hold before a server starts -----------------------------------------------------------

def check(options):
    """Raise unless these options can be served here.

    Raises:
      UserError: no chips for engine "tpu", a drafter that is none or of another tokenizer, or an
        adapter where there can be none; one line that says what would do.
    """
    if options.engine not in ENGINES:
        raise UserError(f"engine {options.engine!r} is unknown; there are {', '.join(ENGINES)}.")
    if options.engine == "tpu" and not hardware.detect().accelerator.startswith("tpu"):
        raise UserError('engine="tpu" needs TPU chips, and this machine has none that it may open. '
                         'Serve with engine="cpu" here, or run this on a TPU VM.')
    if options.adapter and options.engine.startswith("tpu") and (
            options.implementation != "vllm" or options.data_parallel > 1):
        raise UserError('on a TPU only implementation="vllm" with data_parallel=1 takes adapters, '
                         "untested with Gemma 4: merge it (04_merge) instead.")
    if options.drafter in ("", "ngram"):
        return
    drafter, model = Path(options.drafter), Path(options.model)
    if not (drafter / "config.json").exists():
        raise UserError(f"the drafter {drafter} is no folder of a model. Download it first: hf download "
                         f"{drafter} --local-dir drafter")
    files = [folder / "tokenizer.json" for folder in (model, drafter)]
    ours, theirs = (json.loads(file.read_text())["model"]["vocab"] if file.exists() else None for file in files)
    if theirs and ours != theirs:
        raise UserError(f"the drafter {drafter} has another tokenizer than {model}: its tokens would all "
                         "be wrong. Take the one that was made for this model.")


# -- The command ---------------------------------------------------------------------------------------

def command(options, container=CONTAINER):
    """The command that serves `options`, as a list for `subprocess`; `container` is Docker's name.

    Raises:
      UserError: a quantisation that the engine does not have.
    """
    here = {"model": options.model, "adapter": options.adapter,
            "drafter": options.drafter if options.drafter != "ngram" else ""}
    place = {what: f"/{what}" if options.docker else str(path) for what, path in here.items()}
    serve = ["serve", place["model"], "--served-model-name", options.name,
             "--host", options.host, "--port", str(options.port), "--dtype", "bfloat16",
             "--kv-cache-dtype", options.kv_cache_dtype,
             "--max-model-len", str(options.max_model_len),
             "--max-num-batched-tokens", str(options.max_num_batched_tokens),
             "--tensor-parallel-size", str(options.tensor_parallel),
             "--data-parallel-size", str(options.data_parallel),
             f"--{'' if options.prefix_caching else 'no-'}enable-prefix-caching",
             "--disable-uvicorn-access-log", *_quantization_flags(options)]
    if options.drafter:
        serve += ["--speculative-config", json.dumps(_speculation(options, place["drafter"]))]
    if options.adapter:
        rank = json.loads((Path(options.adapter) / "adapter_config.json").read_text())["r"]
        serve += ["--enable-lora", "--lora-modules", f"{options.name}-adapter={place['adapter']}",
                  "--max-lora-rank", str(min(r for r in RANKS if r >= rank))]
    model_code = [f"MODEL_IMPL_TYPE={options.implementation}"] if options.implementation else []
    if options.engine == "cpu":
        return ["env", "VLLM_CPU_KVCACHE_SPACE=1", "HF_HUB_OFFLINE=1", *options.environment,
                str(VENV / "python"), str(LAUNCHER), *serve, "--enforce-eager", *options.flags]
    serve += ["--limit-mm-per-prompt", TEXT_ONLY, *options.flags]
    if options.engine == "tpu":
        return ["env", "HF_HUB_OFFLINE=1", *model_code, *options.environment,
                str(TPU_VENV / "vllm"), *serve]
    variables = ["HF_HUB_OFFLINE=1", "VLLM_ENGINE_READY_TIMEOUT_S=3600", *options.environment]
    devices, volumes = ["--gpus", "all"], []
    if options.engine == "tpu-docker":
        devices, volumes = ["--privileged"], ["vllm-xla-cache:/xla_cache"]
        variables += ["VLLM_XLA_CACHE_PATH=/xla_cache", *model_code]
    volumes = [*(f"{Path(path).resolve()}:/{what}:ro" for what, path in here.items() if path), *volumes]
    return ["docker", "run", "--rm", "--name", container, "--network", "host", "--shm-size", "16g",
            *(word for volume in volumes for word in ("-v", volume)),
            *(word for variable in variables for word in ("-e", variable)), *devices,
            "--entrypoint", "vllm", options.image or IMAGES[options.engine], *serve]


def _speculation(options, drafter):
    tokens = {"num_speculative_tokens": options.draft_tokens}
    if options.drafter == "ngram":
        return {"method": "ngram", **tokens, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    path = Path(options.drafter) / "config.json"
    kind = json.loads(path.read_text())["model_type"] if path.exists() else Path(options.drafter).name
    method = "mtp" if kind.endswith("assistant") else "draft_model"  # Gemma 4's own reads its cache
    return {"method": method, "model": drafter, **tokens}


def _quantization_flags(options):
    engine, quantization = options.engine, options.quantization
    if not quantization:
        return []
    if engine.startswith("tpu") and quantization in QWIX:  # quantised after it has been loaded
        rule = {"module_path": ".*", "weight_qtype": QWIX[quantization],
                "act_qtype": QWIX[quantization]}
        return ["--additional-config", json.dumps({"quantization": {"qwix": {"rules": [rule]}}})]
    if engine == "gpu-docker" and quantization == "fp8":
        return ["--quantization", "fp8"]
    raise UserError(f"quantization {quantization!r} is not for {engine}: there are int8 and fp8 on a "
                     "TPU, fp8 on gpu-docker.")


def shown(command):
    """A command as one could type it in the repository, one option per line."""
    line = shlex.join(command).replace(f"-v {ROOT}/", '-v "$PWD"/').replace(f"{ROOT}/", "")
    return re.sub(r" (?=--?[a-zA-Z])", " \\\n    ", line)


def news(command, known):
    """The options of a command that another one does not have, one per line."""
    lines = shown(known).splitlines()
    return "\n".join(line for line in shown(command).splitlines() if line not in lines)


def container_of(folder):
    """The container of a folder."""
    mark = hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:8]
    return f"{CONTAINER}-{mark}"
