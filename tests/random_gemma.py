"""A Hugging Face directory of a small Gemma 4 with random weights, for tests (NumPy only)."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

TINY = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16",
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 4,
    "head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True, "sliding_window": 16,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 512,
    "tie_word_embeddings": True, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
SHALLOW = TINY | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
# E2B's shape: layers that share keys and values, wider MLPs in them, inputs per layer, one KV head.
E2B = TINY | {
    "num_hidden_layers": 6, "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "num_key_value_heads": 1, "num_global_key_value_heads": None, "attention_k_eq_v": False,
    "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}


def tensors(config, keep_unused=True):
    """{name: shape} as google's checkpoints name them; shared layers may carry unused K and V."""
    c, names = config, {}
    width, ple = c["hidden_size"], c["hidden_size_per_layer_input"]
    names["embed_tokens.weight"] = (c["vocab_size"], width)
    names["norm.weight"] = (width,)
    if ple:
        columns = c["num_hidden_layers"] * ple
        names["embed_tokens_per_layer.weight"] = (c["vocab_size"], columns)
        names["per_layer_model_projection.weight"] = (columns, width)
        names["per_layer_projection_norm.weight"] = (ple,)
    for i, kind in enumerate(c["layer_types"]):
        full = kind == "full_attention"
        size = c["global_head_dim"] if full else c["head_dim"]
        kv = c["num_key_value_heads"]
        if full and c["attention_k_eq_v"]:
            kv = c["num_global_key_value_heads"] or kv
        shared = i >= c["num_hidden_layers"] - c["num_kv_shared_layers"]
        wide = c["intermediate_size"] * (2 if shared and c["use_double_wide_mlp"] else 1)
        heads, layer = c["num_attention_heads"], f"layers.{i}."
        names[layer + "self_attn.q_proj.weight"] = (heads * size, width)
        names[layer + "self_attn.o_proj.weight"] = (width, heads * size)
        names[layer + "self_attn.q_norm.weight"] = (size,)
        if keep_unused or not shared:
            names[layer + "self_attn.k_proj.weight"] = (kv * size, width)
            names[layer + "self_attn.k_norm.weight"] = (size,)
            if not (full and c["attention_k_eq_v"]):
                names[layer + "self_attn.v_proj.weight"] = (kv * size, width)
        names[layer + "mlp.gate_proj.weight"] = (wide, width)
        names[layer + "mlp.up_proj.weight"] = (wide, width)
        names[layer + "mlp.down_proj.weight"] = (width, wide)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            names[f"{layer}{name}_layernorm.weight"] = (width,)
        names[layer + "layer_scalar"] = (1,)
        if ple:
            names[layer + "per_layer_input_gate.weight"] = (ple, width)
            names[layer + "per_layer_projection.weight"] = (width, ple)
            names[layer + "post_per_layer_input_norm.weight"] = (width,)
    names = {f"model.language_model.{name}": shape for name, shape in names.items()}
    if not keep_unused:  # a tower of as many layers, as in an E2B that transformers saved
        tower = f"model.vision_tower.encoder.layers.{i}"
        names[f"{tower}.self_attn.k_proj.linear.weight"] = (width, width)
    return names


def write(folder, config, seed=0, dtype=ml_dtypes.bfloat16, keep_unused=True, tokenizer=None):
    """Write config.json and model.safetensors; with `tokenizer`, copy that folder's tokenizer."""
    rng, folder = np.random.default_rng(seed), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {}
    for name, shape in tensors(config, keep_unused).items():
        value = rng.normal(size=shape) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        weights[name] = (value + (len(shape) == 1)).astype(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in Path(tokenizer).glob("*") if tokenizer else ():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(file, folder)
    return folder
