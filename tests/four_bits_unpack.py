"""What other people's code reads from a folder in four bits (runs in .venv-serve).

    .venv-serve/bin/python tests/four_bits_unpack.py weights FOLDER OUT.npz
    .venv-serve/bin/python tests/four_bits_unpack.py logits FOLDER OUT.npz
    .venv-serve/bin/python tests/four_bits_unpack.py vllm FOLDER

`weights`: {name of a matrix: float32 array}, by compressed-tensors' own compressor, told what to do
by the folder's config.json. `logits`: transformers loads the folder, [positions, vocabulary] of a
fixed prompt. `vllm`: vLLM reads the folder's settings and says, as JSON, what it would do with some
of the layers. Called by tests/test_four_bits.py.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def weights(folder):
    """The matrices, unpacked."""
    import torch
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file
    method = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(method)
    scheme = config.config_groups["group_0"]
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    result = {}
    for name in tensors:
        if name.endswith(".weight_packed"):
            start = name.removesuffix("weight_packed")
            parts = {key.removeprefix(start): value for key, value in tensors.items()
                     if key.startswith(start)}
            parts["weight_shape"] = torch.Size(parts["weight_shape"].tolist())
            whole = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
            result[f"{start}weight"] = whole.float().numpy()
    return result


def logits(folder):
    """Of token ids 2, 3, 4, ... by transformers."""
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager",
        key_mapping={"^model.language_model.": "model."}).eval()
    with torch.no_grad():
        return {"logits": model(torch.arange(2, 42)[None]).logits[0].float().numpy()}


def vllm(folder):
    """The method that vLLM found, and which layers it would leave alone."""
    from serving.vllm_cpu import patch_version
    patch_version()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig)
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
        should_ignore_layer)
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True).create_model_config()
    method = config.hf_config.quantization_config
    parsed = CompressedTensorsConfig.from_config(method)
    weights = parsed.target_scheme_map["Linear"]["weights"]
    layers = ["language_model.model.layers.0.self_attn.q_proj",
              "language_model.model.layers.0.mlp.down_proj", "model.layers.5.self_attn.k_proj",
              "vision_tower.encoder.layers.0.self_attn.k_proj.linear", "lm_head",
              "model.layers.0.per_layer_input_gate", "embed_vision.embedding_projection"]
    left = {name: should_ignore_layer(name, ignore=parsed.ignore) for name in layers}
    return {"quantization": config.quantization, "bits": weights.num_bits,
            "group": weights.group_size, "kernel": parsed._is_wNa16_group_channel(weights, None),
            "left": left}


if __name__ == "__main__":
    what, place = sys.argv[1], Path(sys.argv[2])
    if what == "vllm":
        print(json.dumps(vllm(place)))
    else:
        np.savez(sys.argv[3], **{"weights": weights, "logits": logits}[what](place))
