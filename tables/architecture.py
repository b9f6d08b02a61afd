"""One table per model family, and from it the layers and matrices of a config.json.

Loading and LoRA (`helpers.gemma`), merging (`helpers.merge`), quantizing (`helpers.quantized`) and
counting (`tables.physics`, `tpu_time`) all read this file. Standard library only. Letters: D width
of the model, N query heads, K key and value heads, H numbers per head, F width of an MLP, r rank.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tables.errors import UserError

Config = dict[str, Any]  # a config.json, or its text part
Shapes = dict[str, tuple[int, ...]]  # by the names of tensors


@dataclass(frozen=True)
class Kind:
    """One kind of matrix that an adapter may change: how Tunix and Hugging Face (HF) cut it.

    Tunix keeps heads as axes, HF has flat [out, in] matrices. An adapter has A [inputs, r] and
    B [r, outputs].
    """

    names: tuple[str, ...]  # of its HF matrices; two of them are stacked along Tunix's axis `c`
    inputs: str     # axes that it takes
    outputs: str    # axes that it gives
    weight: str     # axes of the frozen weight, as Tunix stores it
    when: str = "always"  # or, by what a layer keeps: "keys and values", "keys alone"

    @property
    def equation(self) -> str:
        """What LoRA computes in training, for `einsum(…, x, A, B)`; t are tokens."""
        return f"t{self.inputs},{self.inputs}r,r{self.outputs}->t{self.outputs}"


# Where V = K, in the full-attention layers of the 31B, only the keys' projection is stored.
GEMMA4 = {
    "attn.q_einsum": Kind(("self_attn.q_proj",), "D", "NH", "NDH"),
    "attn.kv_einsum": Kind(
        names=("self_attn.k_proj", "self_attn.v_proj"),
        inputs="D",
        outputs="cKH",
        weight="cKDH",
        when="keys and values",
    ),
    "attn.k_einsum": Kind(("self_attn.k_proj",), "D", "KH", "KDH", when="keys alone"),
    "attn.attn_vec_einsum": Kind(("self_attn.o_proj",), "NH", "D", "NHD"),
    "mlp.gate_proj": Kind(("mlp.gate_proj",), "D", "F", "DF"),
    "mlp.up_proj": Kind(("mlp.up_proj",), "D", "F", "DF"),
    "mlp.down_proj": Kind(("mlp.down_proj",), "F", "D", "FD"),
}
UNIFIED = "gemma4_unified_text"  # the 12B's language model: the 31B's kinds of layers
FAMILIES = {"gemma4_text": GEMMA4, UNIFIED: GEMMA4}  # by `model_type` of a config.json's text part
NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")  # of every layer
KINDS = {path.rpartition(".")[2]: kind for path, kind in GEMMA4.items()}  # by Tunix's name
# All of them as a pattern, for Qwix, and for PEFT, which must not reach into the vision tower.
TARGETS = f".*({'|'.join(KINDS)})"
PEFT_TARGETS = (r"model\.(language_model\.)?layers\.\d+\."
                r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")


@dataclass(frozen=True)
class Module:
    """One module of the language model that can have an adapter."""

    path: str       # its name in Tunix, for example `layers.0.attn.q_einsum`
    layer: int      # the index of its layer
    how: Kind
    inputs: tuple[int, ...]   # the sizes of its axes, such as (D,)
    outputs: tuple[int, ...]  # such as (N, H)

    @property
    def kind(self) -> str:
        """The last part of the path, a key of `KINDS`."""
        return self.path.rpartition(".")[2]

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.inputs) * math.prod(self.outputs)

    @property
    def names(self) -> dict[str, tuple[int, int]]:
        """{HF module: (out, in)} of the matrices it is in a checkpoint, without their prefix."""
        matrices = self.how.names
        rows = math.prod(self.outputs) // len(matrices)  # stacked matrices are alike
        columns = math.prod(self.inputs)
        return {f"layers.{self.layer}.{name}": (rows, columns) for name in matrices}

    def adapter(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B: LoRA puts the rank between inputs and outputs."""
        a = (*self.inputs, rank)
        b = (rank, *self.outputs)
        return a, b

    def factors(self, a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
        """{HF module: (A [in, r], B [r, out])}, two plain matrices for each of `names`.

        Heads fold into one axis, in the order that they have. Stacked matrices come apart; they
        share A. `a` and `b` are arrays with the shapes of `adapter`.
        """
        rank = a.shape[-1]
        flat_a = a.reshape(-1, rank)
        parts = b.reshape(rank, len(self.how.names), -1)
        pairs = {}
        for place, name in enumerate(self.names):
            pairs[name] = flat_a, parts[:, place]
        return pairs


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    index: int          # its place, from 0
    kind: str           # "sliding" (attends to a window) or "full"
    width: int          # D
    heads: int          # N
    kv_heads: int       # K
    head_dim: int       # H
    mlp: int            # F
    window: int | None  # how many keys a query sees at most, its own included; None: all
    kv_from: int        # the layer whose keys and values it uses: itself or an earlier (E2B, E4B)
    k_is_v: bool        # whether the values are the keys' projection, which is stored once
    family: dict[str, Kind] = field(repr=False)  # one of `FAMILIES`

    @property
    def owns_kv(self) -> bool:
        """Whether it has a projection to keys (and values) of its own."""
        return self.kv_from == self.index

    def modules(self) -> list[Module]:
        """Its matrices as `Module`s, in the order of the arithmetic."""
        if not self.owns_kv:
            keeps = "nothing"
        elif self.k_is_v:
            keeps = "keys alone"
        else:
            keeps = "keys and values"
        sizes = self._sizes()
        listed = []
        for path, kind in self.family.items():
            if kind.when in ("always", keeps):
                module = Module(
                    path=f"layers.{self.index}.{path}",
                    layer=self.index,
                    how=kind,
                    inputs=tuple([sizes[axis] for axis in kind.inputs]),
                    outputs=tuple([sizes[axis] for axis in kind.outputs]),
                )
                listed.append(module)
        return listed

    def _sizes(self) -> dict[str, int]:
        """The sizes of axes by their letters."""
        return {
            "D": self.width,
            "N": self.heads,
            "K": self.kv_heads,
            "H": self.head_dim,
            "F": self.mlp,
            "c": 2,
        }

    def pairs(self, tokens: int) -> int:
        """(query, key) pairs of a causal prompt: each token itself and what its window shows it."""
        seen = self.keys(tokens)  # by the last token
        while_it_fills = seen * (seen + 1) // 2
        afterward = (tokens - seen) * seen
        return while_it_fills + afterward

    def keys(self, context: int) -> int:
        """Keys that one new token looks at, and that the cache holds, after `context` tokens."""
        if self.window is None:
            return context
        return min(context, self.window)


# What Gemma 4's text config may say. Every key of transformers' `Gemma4TextConfig` is in one of
# these tables: a value that we compute with, a value that is built in, or one that changes nothing.
COMPUTED: Config = {  # by key: what transformers takes where a config.json leaves it out
    "vocab_size": 262_144,
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": None,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": False,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
# What the 12B's class takes instead; it has no inputs per layer at all.
UNIFIED_DEFAULTS: Config = {"sliding_window": 1_024, "hidden_size_per_layer_input": 0}
COMPUTED_APART = {"num_hidden_layers", "layer_types", "rope_parameters", "per_layer_config"}
FIXED: dict[str, tuple] = {  # by key: the values that mean what Tunix 0.1.7 computes
    "hidden_activation": ("gelu_pytorch_tanh",),
    "rms_norm_eps": (1e-6,),
    "attention_bias": (False,),
    "tie_word_embeddings": (True,),
    "enable_moe_block": (False, None),
    "use_bidirectional_attention": (None, "vision"),  # image tokens alone: text is causal
}
HARMLESS = {
    # about experts, where there are none
    "num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size",
    # about training from nothing, and about tokens
    "attention_dropout", "initializer_range", "max_position_embeddings", "use_cache",
    "pad_token_id", "bos_token_id", "eos_token_id",
    # what any model's config.json may hold
    "model_type", "dtype", "torch_dtype", "architectures", "transformers_version",
    "name_or_path", "return_dict", "output_attentions", "output_hidden_states",
    "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "num_labels",
    "problem_type", "auto_map", "tokenizer_class",
}
KNOWN = {*COMPUTED, *COMPUTED_APART, *FIXED, *HARMLESS, "quantization_config"}
ANY: tuple = ()
ROPE: dict[str, dict[str, tuple]] = {  # as FIXED, by a layer's kind
    "sliding_attention": {
        "rope_type": ("default",),
        "rope_theta": ANY,
        "partial_rotary_factor": (1.0, None),
        "factor": (1.0, None),
    },
    "full_attention": {
        "rope_type": ("proportional",),
        "rope_theta": ANY,
        "partial_rotary_factor": ANY,
        "factor": (1.0, None),
    },
}
ROPE_DEFAULTS: dict[str, Config] = {
    "sliding_attention": {"rope_theta": 10_000.0},
    "full_attention": {"rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}


def read_config(source: Config | str | Path) -> Config:
    """A config.json as a dict, from a model folder, the file itself, or such a dict.

    Raises:
      UserError: the file is missing, or can't be read, or it isn't a JSON object.
    """
    if isinstance(source, dict):
        return source
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {source} holds no Hugging Face model.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}). Download it again.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Download it again.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no model's settings (no JSON object). Download it again.")
    return config


def only_trained_for_four_bits(quantized: Config) -> bool:
    """Whether a `quantization_config` only says what the weights were trained for.

    Google's `-qat-q4_0-unquantized` models hold bfloat16 weights. Their `quantization_config` has a
    `quant_type` and no `quant_method` (github.com/jundot/omlx/pull/1690); vLLM takes such a model
    as not quantized, too.
    """
    return "quant_type" in quantized and not quantized.get("quant_method")


def quantization_of(config: Config) -> Config:
    """The `quantization_config` of stored weights; {} if they're in bfloat16."""
    quantized = config.get("quantization_config")
    text = config.get("text_config")
    if not quantized and isinstance(text, dict):
        quantized = text.get("quantization_config")
    quantized = quantized or {}
    if only_trained_for_four_bits(quantized):
        return {}
    return quantized


def quantized_groups(quantized: Config) -> list[Config]:
    """How compressed-tensors says that groups of matrices are stored; another format has one group
    that says nothing."""
    groups = quantized.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return [{}]
    return list(groups.values())


def unquantized(config: Config) -> Config:
    """The same model in bfloat16: fewer bits change neither its shapes nor its arithmetic."""
    if not quantization_of(config):
        return config
    plain = dict(config)
    plain.pop("quantization_config", None)
    if isinstance(plain.get("text_config"), dict):
        text = dict(plain["text_config"])
        text.pop("quantization_config", None)
        plain["text_config"] = text
    return plain


def text_config(config: Config) -> Config:
    """The text part of a config.json, nested under `text_config` or flat, with all `COMPUTED` keys.

    What the file leaves out has transformers' default. A file that transformers 5.15 or newer saved
    has the full layers' sizes in `per_layer_config`; here they have their old names.

    Raises:
      UserError: it doesn't describe a Gemma 4, its weights are quantized, or it may mean other
        arithmetic than ours: by a key's value, or by a key that we don't know.
    """
    text = config.get("text_config") or config
    if text.get("model_type") not in FAMILIES:
        raise UserError(
            "this config.json is not a Gemma 4's (31B, 12B, E4B, E2B or tiny): its "
            f"text part has model_type {text.get('model_type')}. Take one of those."
        )
    if text.get("enable_moe_block"):
        raise UserError(
            "a mixture of experts (26B-A4B): Tunix 0.1.7 computes it wrongly (what its "
            "router reads, and an approximate top-k). Both are fixed after 0.1.7, by "
            "github.com/google/tunix/commit/e31e280e of 12 June 2026, in no release "
            "yet. Take the 31B, 12B, E4B or E2B."
        )
    quantized = quantization_of(config)
    if quantized:
        method = quantized.get("quant_method", "with quantization_config")
        raise UserError(
            f"this base is quantized ({method}), and adapters are trained beside "
            "bfloat16 weights. Take the original model; 11 quantizes it itself."
        )
    _check_keys({"tie_word_embeddings": config.get("tie_word_embeddings", True)})
    _check_keys(text)
    own_defaults = UNIFIED_DEFAULTS if text["model_type"] == UNIFIED else {}
    complete = {**COMPUTED, **own_defaults, **text}
    complete["layer_types"] = _layer_types(text)
    complete["rope_parameters"] = _rope(text)
    complete |= _sizes_of_full_layers(text, complete["layer_types"])
    if complete["hidden_size_per_layer_input"]:
        ours = complete["vocab_size"]
        theirs = complete["vocab_size_per_layer_input"]
        if theirs != ours:
            raise _other_arithmetic("vocab_size_per_layer_input", theirs, (ours,))
    return complete


def _other_arithmetic(key: str, value: Any, ours: tuple) -> UserError:
    """The error about a key whose value isn't one of those that mean our arithmetic."""
    computed = " or ".join(json.dumps(choice) for choice in ours)
    return UserError(
        f"config.json has {key} {json.dumps(value)}, but training here computes "
        f"{computed}, so it would train another model. Take a base with {computed}."
    )


def _check_keys(text: Config) -> None:
    """Refuse a value of a `FIXED` key that isn't ours, and a key that we don't know."""
    for key, value in text.items():
        if key in FIXED and value not in FIXED[key]:
            raise _other_arithmetic(key, value, FIXED[key])
        is_a_note = key.startswith(("_", "unsloth"))
        if key not in KNOWN and not is_a_note and value is not None:
            shown = json.dumps(value)[:100]
            raise UserError(
                f"config.json has {key} {shown}, which no Gemma 4 that we know has: it may "
                "change the arithmetic. If you know that it doesn't, delete it from the file; "
                "else take the original model."
            )


def _layer_types(text: Config) -> list[str]:
    """The kind of every layer. If the file doesn't say, every sixth is a full one.

    Raises:
      UserError: the file's number of layers is another one, or we don't know a kind.
    """
    kinds = text.get("layer_types")
    if kinds is None:
        count = text.get("num_hidden_layers", 30)
        pattern = ["sliding_attention"] * 5 + ["full_attention"]
        kinds = [pattern[index % 6] for index in range(count)]
    count = text.get("num_hidden_layers", len(kinds))
    if count != len(kinds):
        raise UserError(
            f"config.json has {count} num_hidden_layers and "
            f"{len(kinds)} layer_types. Put the original file back."
        )
    for kind in kinds:
        if kind not in ROPE:
            raise _other_arithmetic("layer_types with", kind, tuple(ROPE))
    return kinds


def _rope(text: Config) -> dict[str, Config]:
    """`rope_parameters`, checked and with transformers' defaults."""
    given = text.get("rope_parameters") or {}
    complete = {}
    for kind in ROPE:
        settings = given.get(kind) or {}
        _check_rope(kind, settings)
        complete[kind] = {**ROPE_DEFAULTS[kind], **settings}
    for key in given.keys() - ROPE.keys():
        raise _other_arithmetic(f"rope_parameters.{key}", given[key], (None,))
    return complete


def _check_rope(kind: str, settings: Config) -> None:
    """Refuse a value in the `rope_parameters` of one kind of layer that isn't ours."""
    allowed = ROPE[kind]
    for key, value in settings.items():
        ours = allowed.get(key, (None,))
        if ours is not ANY and value not in ours:
            raise _other_arithmetic(f"rope_parameters.{kind}.{key}", value, ours)


def _sizes_of_full_layers(text: Config, kinds: list[str]) -> Config:
    """What `per_layer_config` says, under the keys that it replaced; {} if there's none.

    Raises:
      UserError: it has other sizes than one for all full-attention layers.
    """
    entries = text.get("per_layer_config")
    if not entries:
        return {}
    full = set()
    for index, kind in enumerate(kinds):
        if kind == "full_attention":
            full.add(str(index))
    first = min(entries)
    sizes = entries[first]
    are_alike = all(entry == sizes for entry in entries.values())

    ours = {"head_dim"}
    if text.get("attention_k_eq_v"):
        ours.add("num_key_value_heads")
    head_dim = text.get("head_dim", COMPUTED["head_dim"])
    old = {
        "global_head_dim": sizes.get("head_dim", head_dim),
        "num_global_key_value_heads": sizes.get("num_key_value_heads"),
    }
    agree = all(text.get(key, value) == value for key, value in old.items())

    is_for_full_layers = set(entries) == full
    has_only_ours = sizes.keys() <= ours
    if is_for_full_layers and are_alike and agree and has_only_ours:
        return old
    raise UserError(
        "transformers 5.15 or newer saved this config.json again, and its "
        "per_layer_config has other sizes than one for all full-attention layers. "
        "Put the original one back: the weights are the same."
    )


def layers(config: Config) -> list[Layer]:
    """The decoder layers of a config.json (a dict).

    The rules are those of transformers' `modeling_gemma4.py`; the tests build that model.

    Raises:
      UserError: see `text_config`.
    """
    text = text_config(config)
    kinds = text["layer_types"]
    unshared = len(kinds) - (text["num_kv_shared_layers"] or 0)
    last_of_kind = {}
    for index, kind in enumerate(kinds[:unshared]):
        last_of_kind[kind] = index
    stack = []
    for index, kind in enumerate(kinds):
        is_full = kind == "full_attention"
        is_shared = index >= unshared
        k_is_v = is_full and bool(text["attention_k_eq_v"])
        kv_heads = text["num_key_value_heads"]
        head_dim = text["head_dim"]
        mlp = text["intermediate_size"]
        if k_is_v:
            kv_heads = text["num_global_key_value_heads"] or kv_heads
        if is_full:
            head_dim = text["global_head_dim"] or head_dim
        if is_shared and text["use_double_wide_mlp"]:
            mlp *= 2
        layer = Layer(
            index=index,
            kind="full" if is_full else "sliding",
            width=text["hidden_size"],
            heads=text["num_attention_heads"],
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=mlp,
            window=None if is_full else text["sliding_window"],
            kv_from=last_of_kind[kind] if is_shared else index,
            k_is_v=k_is_v,
            family=FAMILIES[text["model_type"]],
        )
        stack.append(layer)
    return stack


def modules(config: Config) -> list[Module]:
    """Every module that LoRA must reach: 360 in the 31B."""
    listed = []
    for layer in layers(config):
        listed += layer.modules()
    return listed


def tensors(config: Config) -> tuple[Shapes, Shapes]:
    """What a checkpoint of this config holds of the language model, without its names' prefix.

    Returns:
      ({name: shape} of what must be there, {name: shape} of what may be there and is never used:
      keys and values of layers that take those of an earlier layer, as in google's E2B and E4B).
    """
    text = text_config(config)
    stack = layers(config)
    width = text["hidden_size"]
    extra = text["hidden_size_per_layer_input"] or 0
    needed: Shapes = {
        "embed_tokens.weight": (text["vocab_size"], width),
        "norm.weight": (width,),
    }
    unused: Shapes = {}
    if extra:
        columns = len(stack) * extra
        needed["embed_tokens_per_layer.weight"] = (text["vocab_size_per_layer_input"], columns)
        needed["per_layer_model_projection.weight"] = (columns, width)
        needed["per_layer_projection_norm.weight"] = (extra,)
    for layer in stack:
        needed |= _tensors_of(layer, extra)
        keys_and_values = _keys_and_values_of(layer)
        if layer.owns_kv:
            needed |= keys_and_values
        else:
            unused |= keys_and_values
    return needed, unused


def _tensors_of(layer: Layer, extra: int) -> Shapes:
    """{name: shape} of a layer but for keys and values; `extra` inputs per layer, or 0."""
    start = f"layers.{layer.index}"
    width = layer.width
    shapes: Shapes = {
        f"{start}.layer_scalar": (1,),
        f"{start}.self_attn.q_norm.weight": (layer.head_dim,),
    }
    for module in layer.modules():
        for name, shape in module.names.items():
            shapes[f"{name}.weight"] = shape
    for norm in NORMS:
        shapes[f"{start}.{norm}_layernorm.weight"] = (width,)
    if extra:
        shapes[f"{start}.per_layer_input_gate.weight"] = (extra, width)
        shapes[f"{start}.per_layer_projection.weight"] = (width, extra)
        shapes[f"{start}.post_per_layer_input_norm.weight"] = (width,)
    return shapes


def _keys_and_values_of(layer: Layer) -> Shapes:
    """{name: shape} of a layer's projections to keys and values, and of the keys' norm."""
    start = f"layers.{layer.index}.self_attn"
    matrix = (layer.kv_heads * layer.head_dim, layer.width)
    shapes: Shapes = {
        f"{start}.k_norm.weight": (layer.head_dim,),
        f"{start}.k_proj.weight": matrix,
    }
    if not layer.k_is_v:
        shapes[f"{start}.v_proj.weight"] = matrix
    return shapes


def parameters(config: Config) -> dict[str, int]:
    """Parameter counts of the text model by kind.

    Returns:
      dict with `embedding`, `attention`, `mlp`, `per_layer_input` (its matrices), `per_layer_table`
      (its embedding table), `norms`, `unused` (K and V matrices that google's E2B and E4B files
      hold for layers that share), `total` (their sum), and `matmul`: what one token is multiplied
      with inside the layers.
    """
    text = text_config(config)
    stack = layers(config)
    width = text["hidden_size"]
    depth = len(stack)
    extra = text["hidden_size_per_layer_input"] or 0
    attention = mlp = unused = 0
    norms = depth * (4 * width + 1) + width
    for layer in stack:
        for module in layer.modules():
            if ".attn." in module.path:
                attention += module.size
            else:
                mlp += module.size
        norms += 2 * layer.head_dim
        if not layer.owns_kv:
            matrices = 1 if layer.k_is_v else 2
            unused += matrices * width * layer.head_dim * layer.kv_heads
    if extra:
        norms += depth * width + extra
    count = {
        "embedding": text["vocab_size"] * width,
        "attention": attention,
        "mlp": mlp,
        "per_layer_input": 3 * width * extra * depth,
        "per_layer_table": text["vocab_size_per_layer_input"] * extra * depth,
        "norms": norms,
        "unused": unused,
    }
    count["total"] = sum(count.values())
    count["matmul"] = attention + mlp + count["per_layer_input"]
    return count


def mesh_problem(config: Config, fsdp: int, tp: int) -> str:
    """Why a (fsdp, tp) mesh can't hold this model, or an empty string if it can.

    Tensor parallelism deals out heads, MLP columns and the vocabulary; `fsdp` cuts the width.
    """
    text = text_config(config)
    kv_heads = global_heads = text["num_key_value_heads"]
    if text["attention_k_eq_v"]:
        global_heads = text["num_global_key_value_heads"] or kv_heads
    by_tp = {
        "query heads": text["num_attention_heads"],
        "KV heads of the sliding layers": kv_heads,
        "KV heads of the full-attention layers": global_heads,
        "MLP columns": text["intermediate_size"],
        "vocabulary entries": text["vocab_size"],
    }
    by_fsdp = {
        "embedding columns": text["hidden_size"],
        "per-layer input columns": text["hidden_size_per_layer_input"] or 0,
    }
    for what, number in by_tp.items():
        if number % tp:
            return f"tp={tp} does not divide the {number} {what}"
    for what, number in by_fsdp.items():
        if number % fsdp:
            return f"fsdp={fsdp} does not divide the {number} {what}"
    return ""


def choose_mesh(config: Config, devices: int) -> tuple[int, int]:
    """(fsdp, tp) for a number of devices: the largest tensor parallelism that the heads allow.

    Raises:
      UserError: no mesh of so many devices can hold this model.
    """
    problem = ""
    for tp in range(devices, 0, -1):
        fsdp, rest = divmod(devices, tp)
        if rest:
            continue
        problem = mesh_problem(config, fsdp, tp)
        if not problem:
            return fsdp, tp
    raise UserError(f"no mesh of {devices} devices fits: {problem}")  # the last one's: tp=1
