"""One list of a Gemma 4's layers and matrices, from its config.json: 31B, E2B, E4B, 26B-A4B, tiny.

Training (`helpers.gemma`), the merge (04) and counting (`serving.physics`) all read this list, and
05 to 07 with them, so JAX is not imported here. Letters: D width of the model, N query heads, K key
and value heads, H numbers per head, F width of an MLP, r rank of an adapter.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path


# Every kind of matrix that an adapter may change: Tunix's name, then Hugging Face's (HF). Tunix
# keeps keys and values in one array, except where V = K: that one projection is `k_einsum`.
HF_NAMES = {"q_einsum": ("q_proj",), "kv_einsum": ("k_proj", "v_proj"), "k_einsum": ("k_proj",),
            "attn_vec_einsum": ("o_proj",), "gate_proj": ("gate_proj",), "up_proj": ("up_proj",),
            "down_proj": ("down_proj",)}
# All of them as a pattern, for Qwix, and for PEFT, which must not reach into the vision tower.
TARGETS = f".*({'|'.join(HF_NAMES)})"
PEFT_TARGETS = (r"model\.(language_model\.)?layers\.\d+\."
                r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")

# What the text part of every Gemma 4's config.json has.
REQUIRED = {"layer_types": list, **dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
     "sliding_window", "vocab_size"), int)}


@dataclass(frozen=True)
class Module:
    """One module of the language model that can have an adapter.

    Attributes:
      path: its name in Tunix, for example `layers.0.attn.q_einsum`.
      layer: the index of its layer.
      inputs, outputs: the axes that it takes and gives, as Tunix stores them: (D,) and (N, H).
    """

    path: str
    layer: int
    inputs: tuple
    outputs: tuple

    @property
    def kind(self):
        """The last part of the path, a key of `HF_NAMES`."""
        return self.path.rpartition(".")[2]

    @property
    def size(self):
        """Numbers in it."""
        return math.prod(self.inputs) * math.prod(self.outputs)

    @property
    def names(self):
        """{HF module: (out, in)} of the matrices it is in a checkpoint, without their prefix."""
        block = "self_attn" if ".attn." in self.path else "mlp"
        hf, columns = HF_NAMES[self.kind], math.prod(self.inputs)
        return {f"layers.{self.layer}.{block}.{name}":
                (math.prod(self.outputs) // len(hf), columns) for name in hf}

    def adapter(self, rank):
        """Shapes of A and B: LoRA puts the rank between inputs and outputs."""
        return (*self.inputs, rank), (rank, *self.outputs)


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
      index: its place, from 0.
      kind: "sliding" (attends to a window) or "full".
      width, heads, kv_heads, head_dim, mlp: D, N, K, H, F.
      window: how many keys a query sees at the most, itself included; None is all of them.
      kv_from: the layer whose keys and values it uses: itself, or an earlier one (E2B, E4B).
      k_is_v: whether the values are the keys' projection, which is stored once.
      experts, active, expert_mlp: in a mixture of experts (26B-A4B) how many there are beside the
        MLP, how many a token goes through, and their width; else 0.
    """

    index: int
    kind: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    window: int | None
    kv_from: int
    k_is_v: bool
    experts: int = 0
    active: int = 0
    expert_mlp: int = 0

    @property
    def owns_kv(self):
        """Whether it has a projection to keys (and values) of its own."""
        return self.kv_from == self.index

    def modules(self):
        """Its matrices as `Module`s, in the order of the arithmetic; experts are not among them."""
        D, N, K, H, F = self.width, self.heads, self.kv_heads, self.head_dim, self.mlp
        kv = [("attn.k_einsum", (D,), (K, H)) if self.k_is_v else
              ("attn.kv_einsum", (D,), (2, K, H))] if self.owns_kv else []
        rows = [("attn.q_einsum", (D,), (N, H)), *kv, ("attn.attn_vec_einsum", (N, H), (D,)),
                ("mlp.gate_proj", (D,), (F,)), ("mlp.up_proj", (D,), (F,)),
                ("mlp.down_proj", (F,), (D,))]
        return [Module(f"layers.{self.index}.{name}", self.index, inputs, outputs)
                for name, inputs, outputs in rows]

    @property
    def expert_size(self):
        """Numbers in one expert: gate, up and down."""
        return 3 * self.width * self.expert_mlp

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
      ValueError: the file is missing, or no JSON object.
    """
    if isinstance(source, dict):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: {source} holds no Hugging Face model.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is a JSON {type(found).__name__} and no object, so it describes "
                        "no model. Download it again.")
    return found


def text_config(config):
    """The text part of a config.json, whether it is nested under `text_config` or flat.

    Raises:
      ValueError: it does not describe a Gemma 4.
    """
    text = config.get("text_config") or config
    kind = text.get("model_type") if isinstance(text, dict) else type(text).__name__
    if kind != "gemma4_text":
        raise ValueError("this config.json is not a Gemma 4's (31B, E2B, E4B, 26B-A4B or tiny): its "
                        f"text part has model_type {kind}.")
    lacking = [key for key, kind in REQUIRED.items() if not isinstance(text.get(key), kind)]
    rope = text.get("rope_parameters") or {}
    if not isinstance(rope, dict) or not all(isinstance(one, dict) for one in rope.values()):
        lacking.append("rope_parameters")
    if lacking:
        raise ValueError(f"this config.json of a Gemma 4 says nothing usable about "
                        f"{', '.join(lacking)}. Download it again.")
    return text


def layers(config):
    """The decoder layers of a config.json (a dict) as a list of `Layer`.

    The rules are those of transformers' `modeling_gemma4.py`; the tests build that model.

    Raises:
      ValueError: not a Gemma 4, or its layers share keys and values that no layer computes.
    """
    text = text_config(config)
    kinds = ["full" if name == "full_attention" else "sliding" for name in text["layer_types"]]
    unshared = len(kinds) - (text.get("num_kv_shared_layers") or 0)
    origin = {kind: index for index, kind in enumerate(kinds[:unshared])}  # the last of each kind
    if set(kinds) - set(origin):
        raise ValueError("num_kv_shared_layers leaves a kind of layer without keys and values.")
    moe, found = bool(text.get("enable_moe_block")), []
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
            experts=text["num_experts"] if moe else 0, active=text["top_k_experts"] if moe else 0,
            expert_mlp=text["moe_intermediate_size"] if moe else 0))
    return found


def modules(config):
    """Every module that LoRA must reach: 360 in the 31B. (Experts are not adapted.)"""
    return [module for layer in layers(config) for module in layer.modules()]


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
      ValueError: no mesh of them can hold this model.
    """
    for tp in range(devices, 0, -1):
        if devices % tp == 0 and not mesh_problem(config, devices // tp, tp):
            return devices // tp, tp
    raise ValueError(f"no mesh of {devices} devices fits: {mesh_problem(config, devices, 1)}")
