"""Fine-tune Gemma 4 with LoRA and merge the result: notebooks 02 to 04 in one file, to copy.

    pip install google-tunix==0.1.7 "jax[tpu]==0.10.2"
    python recipe.py --model MODEL --data chats.jsonl --out OUT

MODEL is a Gemma 4 (31B, E2B, E4B): a folder, or a name on the hub. A line of chats.jsonl is
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
OUT gets checkpoints/, adapter/ (for PEFT) and merged/ (for vLLM, transformers). Started again after
a kill, it goes on from its newest checkpoint. It runs on a CPU, one TPU chip, or all of a host.
M are micro-batches, B rows, T tokens, D the width, N and K heads, r the rank.
"""
import argparse
import hashlib
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix
from flax import nnx
from huggingface_hub import snapshot_download
from safetensors.flax import load_file, save_file
from transformers import AutoTokenizer
from tunix.models.gemma4 import model as gemma4
from tunix.models.gemma4.params_safetensors import create_model_from_safe_tensors

CONSTANTS = {  # each is an option of the command, too: --rank 16
    "model": (Path("google/gemma-4-E2B-it"), "the base: a folder, or a name on the hub"),
    "data": (Path("chats.jsonl"), "the chats, one on a line"),
    "out": (Path("out"), "folder for checkpoints/, adapter/ and merged/"),
    "rank": (64, "r of the adapters"),
    "alpha": (64.0, "their product counts alpha / rank times"),
    "learning_rate": (1e-4, "at its peak, after the warm-up and before the cosine"),
    "warmup_steps": (100, "from 0 to the peak; at most half of all steps"),
    "weight_decay": (0.001, "of AdamW"),
    "max_grad_norm": (1.0, "longer gradients are cut to this length"),
    "epochs": (1.0, "how often the data is read"),
    "sequence_length": (2048, "T of a packed row; longer examples are left out"),
    "rows_per_step": (8, "packed rows of one optimizer step; one chip computes one at a time"),
    "validation": (0.02, "share of the answers that is held out"),
    "every": (100, "steps between two held-out losses, and two checkpoints; two are kept"),
    "dtype": ("bfloat16", "of weights and arithmetic; adapters and Adam are float32"),
    "seed": (42, "of adapters, packing and the order of rows"),
}

# ── Data: an example is prompt and answer, a row holds several of them ──
def read_examples(tokenizer, path):
    """(ids, mask) of every answer in the chats, behind the prompt that a server would send."""
    end, examples = [tokenizer.convert_tokens_to_ids("<turn|>")], []
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    for chat in (json.loads(line)["messages"] for line in path.open() if line.strip()):
        for at in (at for at, message in enumerate(chat) if message["role"] == "assistant"):
            prompt = tokenizer.apply_chat_template(
                chat[:at], add_generation_prompt=True, return_dict=False)
            answer = tokenizer(chat[at]["content"], **plain)["input_ids"] + end
            examples.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    return examples

def pack(examples, length, multiple):
    """int32 [rows, 4, T]: tokens, mask, segment (1, 2, ...; 0 is padding), position in it."""
    rows = []
    for example in (example for example in examples if len(example[0]) <= length):
        free = length - len(example[0])
        roomy = [row for row in rows[-64:] if sum(len(ids) for ids, _ in row) <= free]
        rows += [] if roomy else [[]]
        (roomy or rows[-1:])[0].append(example)
    packed = np.zeros((math.ceil(len(rows) / multiple) * multiple, 4, length), np.int32)
    for number, row in enumerate(rows):
        parts = [(ids, mask, [segment] * len(ids), range(len(ids)))
                 for segment, (ids, mask) in enumerate(row, 1)]
        packed[number, :, :sum(len(ids) for ids, _ in row)] = np.concatenate(parts, axis=1)
    return packed

# ── Model: Tunix's Gemma 4, cut over the mesh, an adapter beside every matrix of a layer ──
RENAMED = {"num_embed": "vocab_size", "embed_dim": "hidden_size", "hidden_dim": "intermediate_size",
           "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
           "num_global_kv_heads": "num_global_key_value_heads", "head_dim": "head_dim",
           "global_key_size": "global_head_dim", "sliding_window_size": "sliding_window",
           "final_logit_softcap": "final_logit_softcapping", "k_eq_v_global": "attention_k_eq_v"}

def load_model(folder, dtype):
    """(model, mesh) of a Hugging Face folder: tp cuts heads and MLPs, fsdp rows and weights."""
    text = json.loads((folder / "config.json").read_text())
    text = text.get("text_config", text)
    full, sliding = gemma4.AttentionType.GLOBAL, gemma4.AttentionType.LOCAL_SLIDING
    kinds = tuple(full if name == "full_attention" else sliding for name in text["layer_types"])
    shared = text.get("num_kv_shared_layers") or 0  # the last layers of E2B and E4B reuse K and V
    wide = 2 * text["intermediate_size"] if shared and text.get("use_double_wide_mlp") else None
    config = gemma4.ModelConfig(
        **{name: text.get(key) for name, key in RENAMED.items()},
        num_layers=len(kinds), attention_pattern=kinds,
        frac_shared_layers=max(0, shared - 0.25) / len(kinds),  # Tunix rounds the others' number
        per_layer_input_dim=text.get("hidden_size_per_layer_input") or 0,
        override_kv_shared_ffw_hidden=wide, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    tp = math.gcd(config.num_kv_heads, config.num_global_kv_heads or 0, jax.device_count())
    mesh = jax.make_mesh((jax.device_count() // tp, tp), ("fsdp", "tp"),
                         axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return create_model_from_safe_tensors(str(folder), config, mesh, config.param_dtype), mesh

class Float32Lora(qwix.LoraProvider):
    """What a layer returns keeps its dtype although the adapters are float32."""
    def dot_general(self, lhs, *args, **kwargs):
        return super().dot_general(lhs, *args, **kwargs).astype(lhs.dtype)
    def einsum(self, equation, lhs, *args, **kwargs):
        return super().einsum(equation, lhs, *args, **kwargs).astype(lhs.dtype)

def add_lora(model, mesh, rank, alpha, seed):
    """(model, adapters, frozen weights). A is uniform (Kaiming He), B zero: nothing changes."""
    draw, rows = jax.nn.initializers.he_uniform(), mesh.shape["fsdp"]
    provider = Float32Lora(
        module_path=".*(_einsum|gate_proj|up_proj|down_proj)", rank=rank, alpha=alpha, dropout=0.0,
        lora_a_initializer=lambda key, shape, dtype: draw(key, shape, "float32"),
        lora_b_initializer=lambda key, shape, dtype: jnp.zeros(shape, "float32"))
    with mesh:  # Qwix finds the matrices by running the model, here on two tokens
        model = qwix.apply_lora_to_model(
            model, provider, jnp.ones((rows, 2), jnp.int32), jnp.tile(jnp.arange(2), (rows, 1)),
            attention_mask=jnp.ones((rows, 2, 2), bool), rngs=nnx.Rngs(seed))
    model.config.remat_config = gemma4.RematConfig.BLOCK  # compute again instead of storing
    _, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    return model, adapters, frozen

# ── Loss and step: every trained token counts the same, whatever row it stands in ──
def make_steps(model, optimizer, places):
    """(train, evaluate), compiled, for rows of at most `places` trained tokens."""
    dtype, cap = model.config.dtype, model.config.final_logit_softcap
    model.config.final_logit_softcap = None  # below, on the logits that are needed
    graph = nnx.graphdef(model)
    def evaluate(adapters, frozen, rows):  # [B, 4, T] -> summed loss, trained tokens
        tokens, mask, segments, positions = jnp.moveaxis(rows, 1, 0)  # each [B, T]
        model = nnx.merge(graph, jax.tree.map(lambda a: a.astype(dtype), adapters), frozen)
        model.embedder.decode = lambda x: x  # all logits would be the largest array of all
        sees = jnp.tril(segments[:, :, None] == segments[:, None, :])  # its own example's past
        hidden, _ = model(tokens, positions, None, sees)
        weight, at = jax.lax.top_k(mask[:, 1:], places)  # at t the token at t + 1 is due
        hidden = jnp.take_along_axis(hidden.astype(dtype), at[..., None], axis=1)
        logits = gemma4.Embedder.decode(model.embedder, hidden).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(
            jnp.tanh(logits / cap) * cap, jnp.take_along_axis(tokens, at + 1, axis=1))
        return jnp.sum(loss * weight), jnp.sum(weight)
    def train(adapters, moments, frozen, batch):  # [M, B, 4, T] -> ..., mean loss
        def add(total, rows):
            one = jax.value_and_grad(evaluate, has_aux=True)(adapters, frozen, rows)
            return jax.tree.map(jnp.add, total, one), None
        zero = ((0.0, 0), jax.tree.map(jnp.zeros_like, adapters))
        ((loss, tokens), gradients), _ = jax.lax.scan(add, zero, batch)
        gradients = jax.tree.map(lambda array: array / tokens, gradients)
        updates, moments = optimizer.update(gradients, moments, adapters)
        return optax.apply_updates(adapters, updates), moments, loss / tokens
    return jax.jit(train, donate_argnums=(0, 1)), jax.jit(evaluate)

# ── Merge: W + alpha / rank · (A B)ᵀ, in float32, rounded once ──
def factors(path, a, b):
    """{Hugging Face matrix: (A [in, r], B [r, out])} of one Tunix module."""
    block, kind = path.replace(".attn.", ".self_attn.").rsplit(".", 1)
    if kind in ("kv_einsum", "k_einsum"):  # B [r, 2, K, H]; [r, K, H] where the values are the keys
        two = {"k": b[:, 0], "v": b[:, 1]} if kind == "kv_einsum" else {"k": b, "v": b}
        return {f"{block}.{kv}_proj": (a, part.reshape(len(b), -1)) for kv, part in two.items()}
    name = {"attn_vec_einsum": "o_proj"}.get(kind, kind.replace("_einsum", "_proj"))
    return {f"{block}.{name}": (a.reshape(-1, len(b)), b.reshape(len(b), -1))}

def export(folder, base, pairs, rank, alpha, name_of_base):
    """Write adapter/ as PEFT stores it, and merged/: the base's files with the adapters added."""
    plan = {f"model.language_model.{name}": two for path, (a, b) in pairs.items()
            for name, two in factors(path, a, b).items()}
    tensors = {f"base_model.model.{name}.lora_{letter}.weight": matrix.T + 0
               for name, two in plan.items() for letter, matrix in zip("AB", two)}
    (folder / "adapter").mkdir(parents=True)
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha,
        "base_model_name_or_path": name_of_base, "target_modules": r"model\.(language_model\.)?"
        r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"}))
    shutil.copytree(base, folder / "merged", ignore=shutil.ignore_patterns("*.safetensors", ".*"))
    for file in sorted(base.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in plan if f"{name}.weight" in tensors]:
            delta = jnp.einsum("ir,ro->oi", *plan.pop(name), precision="highest")
            old = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = (old + alpha / rank * delta).astype(old.dtype)
        save_file(tensors, folder / "merged" / file.name, {"format": "pt"})
    assert all(name.endswith("v_proj") for name in plan), f"{base} lacks {sorted(plan)[:3]}"

# ── The run ──
def main(argv=None):
    """Train from where OUT stands, and write what OUT is to get."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, (value, meaning) in CONSTANTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=meaning)
    cfg = parser.parse_args(argv)
    recipe = f"{vars(cfg)} {hashlib.sha256(cfg.data.read_bytes()).hexdigest()}"
    note = cfg.out / "recipe.txt"
    if note.exists() and note.read_text() != recipe:
        raise SystemExit(f"{note} names another recipe or other data: choose another --out")
    cfg.out.mkdir(parents=True, exist_ok=True)
    note.write_text(recipe)
    base = cfg.model if cfg.model.is_dir() else Path(snapshot_download(str(cfg.model)))
    model, mesh = load_model(base, cfg.dtype)
    model, adapters, frozen = add_lora(model, mesh, cfg.rank, cfg.alpha, cfg.seed)
    examples = read_examples(AutoTokenizer.from_pretrained(base), cfg.data)
    draw, cut = np.random.default_rng(cfg.seed), math.ceil(cfg.validation * len(examples))
    draw.shuffle(examples)
    at_once = mesh.shape["fsdp"]  # rows of a micro-batch
    held_out, rows = (pack(part, cfg.sequence_length, at_once)
                      for part in (examples[:cut], examples[cut:]))
    count, per_step = len(rows), max(1, cfg.rows_per_step // at_once) * at_once
    steps = max(1, round(cfg.epochs * count / per_step))
    passes = [draw.permutation(count) for _ in range(math.ceil(steps * per_step / count))]
    order = np.concatenate(passes)[:steps * per_step].reshape(steps, -1, at_once)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, cfg.learning_rate, min(cfg.warmup_steps, steps // 2), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm),
                            optax.adamw(schedule, weight_decay=cfg.weight_decay))
    places = max(int(part[:, 1].sum(axis=-1).max()) for part in (held_out, rows))
    train, evaluate = make_steps(model, optimizer, places)
    split = jax.NamedSharding(mesh, jax.P(None, "fsdp"))  # of batches [M, B, 4, T]
    exam = jax.device_put(held_out.reshape(-1, at_once, *held_out.shape[1:]), split)
    manager = ocp.CheckpointManager(
        (cfg.out / "checkpoints").resolve(), options=ocp.CheckpointManagerOptions(
            save_interval_steps=cfg.every, save_on_steps=[steps], max_to_keep=2))
    state, done = (adapters, optimizer.init(adapters)), manager.latest_step() or 0
    state = jax.device_put(state, nnx.get_named_sharding(state, mesh))  # Adam's counter, too
    state = manager.restore(done, args=ocp.args.StandardRestore(state)) if done else state
    print(f"{len(examples)} answers in {count} rows, steps {done + 1} to {steps}", flush=True)
    with mesh:
        for step in range(done + 1, steps + 1):
            batch = jax.device_put(rows[order[step - 1]], split)
            *state, loss = train(*state, frozen, batch)
            losses = {"loss": float(loss)}
            if step % cfg.every == 0 or step == steps:
                total, tokens = np.sum([evaluate(state[0], frozen, part) for part in exam], axis=0)
                losses["held-out loss"] = float(total / tokens)
            print(f"step {step}/{steps}", losses, flush=True)
            manager.save(step, args=ocp.args.StandardSave(tuple(state)))
    manager.wait_until_finished()
    pairs, partial = {}, cfg.out / "partial"
    for path, variable in nnx.to_flat_state(state[0]):  # lora_a, then lora_b of each module
        pairs.setdefault(".".join(map(str, path[:-1])), []).append(jnp.array(variable.get_value()))
    shutil.rmtree(partial, ignore_errors=True)
    export(partial, base, pairs, cfg.rank, cfg.alpha, str(cfg.model))
    for name in ("adapter", "merged"):  # whole, or not there
        shutil.rmtree(cfg.out / name, ignore_errors=True)
        (partial / name).rename(cfg.out / name)

if __name__ == "__main__":
    main()
