"""One table per model family, and from it the layers and matrices of a config.json.

Loading and LoRA (`helpers.gemma`), merging (`helpers.merge`), quantising (`appendix.quantized`) and
counting (`tables.physics`, `tpu_time`) all read this file. Standard library only. Letters: D width
of the model, N query heads, K key and value heads, H numbers per head, F width of an MLP, r rank.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from tables.errors import UserError


@dataclass(frozen=True)
class Kind:
    """One kind of matrix that an adapter may change: how Tunix and Hugging Face (HF) cut it.

    Tunix keeps heads as axes, HF has flat [out, in] matrices. An adapter has A [inputs, r] and
    B [r, outputs].
    """

    names: tuple   # of the HF matrices that it is; two of them are stacked along Tunix's axis `c`
    inputs: str    # axes that it takes
    outputs: str   # axes that it gives
    weight: str    # axes of the frozen weight, as Tunix stores it
    when: str = "always"  # or, by what a layer keeps: "keys and values", "keys alone"

    @property
    def equation(self):
        """What LoRA computes in training, for `einsum(…, x, A, B)`; t are tokens."""
        return f"t{self.inputs},{self.inputs}r,r{self.outputs}->t{self.outputs}"


# Where V = K, in the full-attention layers of the 31B, only the keys' projection is stored.
GEMMA4 = {
    "attn.q_einsum": Kind(("self_attn.q_proj",), "D", "NH", "NDH"),
    "attn.kv_einsum": Kind(("self_attn.k_proj", "self_attn.v_proj"), "D", "cKH", "cKDH",
                           "keys and values"),
    "attn.k_einsum": Kind(("self_attn.k_proj",), "D", "KH", "KDH", "keys alone"),
    "attn.attn_vec_einsum": Kind(("self_attn.o_proj",), "NH", "D", "NHD"),
    "mlp.gate_proj": Kind(("mlp.gate_proj",), "D", "F", "DF"),
    "mlp.up_proj": Kind(("mlp.up_proj",), "D", "F", "DF"),
    "mlp.down_proj": Kind(("mlp.down_proj",), "F", "D", "FD"),
}
FAMILIES = {"gemma4_text": GEMMA4}  # by the `model_type` of a config.json's text part
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
    inputs: tuple   # the sizes of its axes, such as (D,)
    outputs: tuple  # such as (N, H)

    @property
    def kind(self):
        """The last part of the path, a key of `KINDS`."""
        return self.path.rpartition(".")[2]

    @property
    def size(self):
        """Numbers in it."""
        return math.prod(self.inputs) * math.prod(self.outputs)

    @property
    def names(self):
        """{HF module: (out, in)} of the matrices it is in a checkpoint, without their prefix."""
        shape = (math.prod(self.outputs) // len(self.how.names), math.prod(self.inputs))
        return {f"layers.{self.layer}.{name}": shape for name in self.how.names}

    def adapter(self, rank):
        """Shapes of A and B: LoRA puts the rank between inputs and outputs."""
        return (*self.inputs, rank), (rank, *self.outputs)

    def factors(self, a, b):
        """{HF module: (A [in, r], B [r, out])}, two plain matrices for each of `names`.

        Heads fold into one axis, in the order that they have. Stacked matrices come apart; they
        share A. `a` and `b` are arrays with the shapes of `adapter`.
        """
        rank = a.shape[-1]
        parts = b.reshape(rank, len(self.how.names), -1)
        return {name: (a.reshape(-1, rank), parts[:, place])
                for place, name in enumerate(self.names)}


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
    window: int | None  # how many keys a query sees at the most, itself included; None: all
    kv_from: int        # the layer whose keys and values it uses: itself or an earlier (E2B, E4B)
    k_is_v: bool        # whether the values are the keys' projection, which is stored once
    family: dict = field(repr=False)  # one of `FAMILIES`

    @property
    def owns_kv(self):
        """Whether it has a projection to keys (and values) of its own."""
        return self.kv_from == self.index

    def modules(self):
        """Its matrices as `Module`s, in the order of the arithmetic."""
        sizes = {"D": self.width, "N": self.heads, "K": self.kv_heads, "H": self.head_dim,
                 "F": self.mlp, "c": 2}
        keeps = "keys alone" if self.k_is_v else "keys and values"
        keeps = keeps if self.owns_kv else "nothing"
        return [Module(f"layers.{self.index}.{path}", self.index, kind,
                       tuple(sizes[axis] for axis in kind.inputs),
                       tuple(sizes[axis] for axis in kind.outputs))
                for path, kind in self.family.items() if kind.when in ("always", keeps)]

    def pairs(self, tokens):
        """(query, key) pairs of a causal prompt: each token itself and what its window shows it."""
        seen = tokens if self.window is None else min(tokens, self.window)
        return seen * (seen + 1) // 2 + (tokens - seen) * seen

    def keys(self, context):
        """Keys that one new token looks at, and that the cache holds, after `context` tokens."""
        return context if self.window is None else min(context, self.window)


def read_config(source):
    """A config.json as a dict, from a model folder, the file itself, or such a dict.

    Raises:
      UserError: the file is missing, or no JSON.
    """
    if isinstance(source, dict):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {source} holds no Hugging Face model.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}). Download it again.") from error


def text_config(config):
    """The text part of a config.json, whether it is nested under `text_config` or flat.

    Raises:
      UserError: it does not describe a Gemma 4, or it is the mixture of experts.
    """
    text = config.get("text_config") or config
    if text.get("model_type") not in FAMILIES:
        raise UserError("this config.json is not a Gemma 4's (31B, E2B, E4B or tiny): its "
                        f"text part has model_type {text.get('model_type')}.")
    if text.get("enable_moe_block"):
        raise UserError("a mixture of experts (26B-A4B): Tunix 0.1.7 computes it wrongly (what its "
                         "router reads, and an approximate top-k). Take the 31B, E2B or E4B.")
    if text.get("per_layer_config") and not text.get("global_head_dim"):
        raise UserError("transformers 5.15 or newer saved this config.json again, with the head sizes "
                         "in per_layer_config. Put the original one back: the weights are the same.")
    return text


def layers(config):
    """The decoder layers of a config.json (a dict) as a list of `Layer`.

    The rules are those of transformers' `modeling_gemma4.py`; the tests build that model.

    Raises:
      UserError: not a Gemma 4.
    """
    text = text_config(config)
    kinds = ["full" if name == "full_attention" else "sliding" for name in text["layer_types"]]
    unshared = len(kinds) - (text.get("num_kv_shared_layers") or 0)
    origin = {kind: index for index, kind in enumerate(kinds[:unshared])}  # the last of each kind
    found = []
    for index, kind in enumerate(kinds):
        full, shared = kind == "full", index >= unshared
        k_is_v = full and bool(text.get("attention_k_eq_v"))
        kv_heads = k_is_v and text.get("num_global_key_value_heads") or text["num_key_value_heads"]
        wide = 2 if shared and text.get("use_double_wide_mlp") else 1
        found.append(Layer(
            index, kind, width=text["hidden_size"], heads=text["num_attention_heads"],
            kv_heads=kv_heads,
            head_dim=full and text.get("global_head_dim") or text["head_dim"],
            mlp=wide * text["intermediate_size"],
            window=None if full else text["sliding_window"],
            kv_from=origin[kind] if shared else index, k_is_v=k_is_v,
            family=FAMILIES[text["model_type"]]))
    return found


def modules(config):
    """Every module that LoRA must reach: 360 in the 31B."""
    return [module for layer in layers(config) for module in layer.modules()]


def parameters(config):
    """Parameter counts of the text model by kind.

    Returns:
      dict with `embedding`, `attention`, `mlp`, `per_layer_input` (its matrices), `per_layer_table`
      (its embedding table), `norms`, `unused` (K and V matrices that google's E2B and E4B files hold
      for layers that share), `total` (their sum), and `matmul`: what one token is multiplied with
      inside the layers.
    """
    text, stack = text_config(config), layers(config)
    width, depth = text["hidden_size"], len(stack)
    extra = text.get("hidden_size_per_layer_input") or 0
    found = [module for layer in stack for module in layer.modules()]
    count = {
        "embedding": text["vocab_size"] * width,
        "attention": sum(module.size for module in found if ".attn." in module.path),
        "mlp": sum(module.size for module in found if ".mlp." in module.path),
        "per_layer_input": 3 * width * extra * depth,
        "per_layer_table": (text.get("vocab_size_per_layer_input") or 0) * extra * depth,
        "norms": (depth * ((5 if extra else 4) * width + 1) + width + extra
                  + sum(2 * layer.head_dim for layer in stack)),
        "unused": sum(width * layer.head_dim * (2 - layer.k_is_v) * layer.kv_heads
                      for layer in stack if not layer.owns_kv),
    }
    count["total"] = sum(count.values())
    count["matmul"] = count["attention"] + count["mlp"] + count["per_layer_input"]
    return count


def mesh_problem(config, fsdp, tp):
    """Why a (fsdp, tp) mesh cannot hold this model, or an empty string if it can.

    Tensor parallelism deals out heads, MLP columns and the vocabulary; `fsdp` cuts the width.
    """
    text = text_config(config)
    kv_heads = text["num_key_value_heads"]
    by_tp = {
        "query heads": text["num_attention_heads"], "KV heads of the sliding layers": kv_heads,
        "KV heads of the full-attention layers": text.get("num_global_key_value_heads") or kv_heads,
        "MLP columns": text["intermediate_size"], "vocabulary entries": text["vocab_size"]}
    by_fsdp = {"embedding columns": text["hidden_size"],
               "per-layer input columns": text.get("hidden_size_per_layer_input") or 0}
    for axis, size, parts in (("tp", tp, by_tp), ("fsdp", fsdp, by_fsdp)):
        for what, number in parts.items():
            if number % size:
                return f"{axis}={size} does not divide the {number} {what}"
    return ""


def choose_mesh(config, devices):
    """(fsdp, tp) for a number of devices: the largest tensor parallelism that the heads allow.

    Raises:
      UserError: no mesh of them can hold this model.
    """
    for tp in range(devices, 0, -1):
        if devices % tp == 0 and not mesh_problem(config, devices // tp, tp):
            return devices // tp, tp
    raise UserError(f"no mesh of {devices} devices fits: {mesh_problem(config, devices, 1)}")
