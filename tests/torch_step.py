"""The same model in PyTorch, for tests/test_train.py.

It runs in .venv-serve, which has torch, transformers and peft.

torch_step.py logits BASE TOKENS.npy OUT.npy
torch_step.py step BASE IN.npz OUT.npz RANK ALPHA LEARNING_RATE WEIGHT_DECAY MAX_GRAD_NORM
"""

import sys

import numpy as np
import torch
from transformers import AutoConfig, Gemma4ForCausalLM

HF = {"q_einsum": ["q_proj"], "kv_einsum": ["k_proj", "v_proj"], "k_einsum": ["k_proj"],
      "attn_vec_einsum": ["o_proj"], "gate_proj": ["gate_proj"], "up_proj": ["up_proj"],
      "down_proj": ["down_proj"]}


def load(folder):
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    return Gemma4ForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager",
        key_mapping={"^model.language_model.": "model."})


def logits(base, tokens, out):
    with torch.no_grad():
        found = load(base)(input_ids=torch.tensor(np.load(tokens)).long(), use_cache=False).logits
    np.save(out, found.float().numpy())


def to_hf(kind, part, a, b):
    """Tunix's A and B as PEFT's lora_A (r, in) and lora_B (out, r); part is 0 for K, 1 for V."""
    rank = a.shape[-1]
    a = a.reshape(-1, rank).T
    if kind == "kv_einsum":
        b = b[:, part]
    return a.copy(), b.reshape(rank, -1).T.copy()


def from_hf(kind, shape_a, shape_b, a, b):
    """Back: lists of one or two (K, V) PEFT arrays to Tunix's A and B; A is shared, so summed."""
    rank = shape_a[-1]
    big_a = sum(x.T for x in a).reshape(shape_a)
    parts = [x.T.reshape(rank, *shape_b[2 if kind == "kv_einsum" else 1:]) for x in b]
    return big_a, (np.stack(parts, axis=1) if kind == "kv_einsum" else parts[0]).reshape(shape_b)


def step(base, source, out, rank, alpha, learning_rate, weight_decay, max_norm):
    from peft import LoraConfig, get_peft_model
    given = dict(np.load(source))
    batch = {name[6:]: given.pop(name) for name in list(given) if name.startswith("batch.")}
    paths = sorted({name.rsplit(".", 1)[0] for name in given})
    model = get_peft_model(load(base), LoraConfig(
        r=int(rank), lora_alpha=float(alpha), lora_dropout=0.0, bias="none",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                        "down_proj"]))
    modules = dict(model.named_modules())

    def linear(path, hf):
        name = path.replace(".attn.", ".self_attn.").rsplit(".", 1)[0]
        return modules[f"base_model.model.model.{name}.{hf}"]

    tied = {}
    for path in paths:
        kind = path.rsplit(".", 1)[1]
        for part, hf in enumerate(HF[kind]):
            a, b = to_hf(kind, part, given[f"{path}.a"], given[f"{path}.b"])
            module = linear(path, hf)
            module.lora_B["default"].weight.data = torch.tensor(b)
            if part == 0:
                module.lora_A["default"].weight.data = torch.tensor(a)
                tied[path] = module.lora_A["default"].weight
            else:
                module.lora_A["default"].weight = tied[path]  # Tunix's K and V share one A
    adapters = [p for p in model.parameters() if p.requires_grad]  # named once where tied

    total, count = 0.0, 0
    length = batch["tokens"].shape[-1]
    tokens, mask, segments = (batch[name].reshape(-1, length)
                              for name in ("tokens", "loss_mask", "segment_ids"))
    for row in range(len(tokens)):  # every example alone: no packing, no padding
        for segment in range(1, segments[row].max() + 1):
            at = segments[row] == segment
            ids = torch.tensor(tokens[row][at]).long()[None]
            wanted = torch.tensor(mask[row][at])[1:]
            score = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(score, ids[0, 1:], reduction="none")
            total, count = total + (loss * wanted).sum(), count + int(wanted.sum())
    (total / count).backward()
    result = {"loss": (total / count).item()}

    def collect(prefix, pick):
        for path in paths:
            kind = path.rsplit(".", 1)[1]
            places = [linear(path, hf) for hf in HF[kind]]
            a = [pick(places[0].lora_A["default"].weight)]
            b = [pick(place.lora_B["default"].weight) for place in places]
            result[f"{prefix}.{path}.a"], result[f"{prefix}.{path}.b"] = from_hf(
                kind, given[f"{path}.a"].shape, given[f"{path}.b"].shape, a, b)

    collect("grad", lambda p: p.grad.numpy().copy())
    result["grad_norm"] = torch.nn.utils.clip_grad_norm_(adapters, float(max_norm)).item()
    torch.optim.AdamW(adapters, lr=float(learning_rate), weight_decay=float(weight_decay)).step()
    collect("new", lambda p: p.detach().numpy().copy())
    np.savez(out, **result)


if __name__ == "__main__":
    {"logits": logits, "step": step}[sys.argv[1]](*sys.argv[2:])
