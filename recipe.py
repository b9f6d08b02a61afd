"""Fine-tune Gemma 4 with LoRA and merge the result: notebooks 02 to 04 in one file, to copy.

    pip install google-tunix==0.1.7 "jax[tpu]==0.10.2"
    python recipe.py --model MODEL --data chats.jsonl --out OUT

MODEL is a Gemma 4 (31B, 12B, E4B, E2B): a folder, or a name on the hub. A line of chats.jsonl is
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]},
with "tools" and "tool_calls", where there are any, as the OpenAI API writes them.
OUT gets checkpoints/, adapter/ (for PEFT) and merged/ (for vLLM, transformers). Killed and started
again, it goes on from its newest whole checkpoint. It runs on a CPU, a TPU chip, or all of a host.
M are micro-batches, B rows, T tokens, D the width, N and K heads, r the rank.
"""
import argparse
import functools
import gzip
import hashlib
import json
import math
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from filelock import FileLock
from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from jax.experimental.layout import Format, Layout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from tunix.models.gemma4 import model as gemma4
from tunix.models.gemma4.params_safetensors import create_model_from_safe_tensors

CONSTANTS = {  # each is an option of the command, too: --rank 16
    "model": Path("google/gemma-4-E2B-it"), "data": Path("chats.jsonl"), "out": Path("out"),
    "rank": 64, "alpha": 64.0,  # of the adapters: their product counts alpha / rank times
    "learning_rate": 1e-4, "warmup_steps": 100,  # up to that rate, at most half of all
    "weight_decay": 0.001, "max_grad_norm": 1.0,  # of AdamW; longer gradients are cut to it
    "epochs": 1.0, "seed": 42,  # how often the data is read; of adapters and order
    "sequence_length": 2048,  # T of a packed row; longer examples are left out
    "rows_per_step": 8,  # of one optimizer step; one chip computes one row at a time
    "validation": 0.02,  # share of the questions whose chats are held out
    "every": 100,  # steps between two held-out losses, and two checkpoints; two are kept
    "reasoning": "stripped",  # or "kept": an answer's reasoning is trained as its thought
    "dtype": "bfloat16",  # of weights and arithmetic; adapters and Adam are float32
}
MUST: dict[str, list] = {  # what Tunix 0.1.7 computes, whatever a config.json asks for
    "model_type": ["gemma4_text", "gemma4_unified_text"],
    "hidden_activation": ["gelu_pytorch_tanh"],
    "rms_norm_eps": [1e-6], "tie_word_embeddings": [True], "enable_moe_block": [False],
    "per_layer_config": [None], "use_bidirectional_attention": [None, "vision"],
    "sliding_attention": [{"rope_type": "default", "rope_theta": 1e4}],
    "full_attention": [{"rope_type": "proportional", "rope_theta": 1e6,
                        "partial_rotary_factor": 0.25}]}
RENAMED = {"num_embed": "vocab_size", "embed_dim": "hidden_size", "hidden_dim": "intermediate_size",
           "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
           "num_global_kv_heads": "num_global_key_value_heads", "head_dim": "head_dim",
           "global_key_size": "global_head_dim", "sliding_window_size": "sliding_window",
           "final_logit_softcap": "final_logit_softcapping", "k_eq_v_global": "attention_k_eq_v"}
TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
          "model.vision_embedder.")  # of the 12B
FOREIGN = re.compile(r"<eos>|</s>|<\w+_of_turn>|<\|?turn\|?>|<\|im_\w+\|>|\[INST\]|<think>")
SPEAKERS = {"system": "s", "user": "u", "assistant": "a", "calling assistant": "c"}
TURNS = re.compile("s?(uc*a)*uc*[ac]")  # after a call c and its results, the same turn goes on
CALLS = re.compile(r"<\|tool_call>.*<tool_call\|>", re.S)
SEEN = ("role", "content", "tool_calls", "tool_call_id", "name")  # by the chat template
THOUGHTS = ("reasoning", "reasoning_content", "thinking")
MARK = "\ufdd0"  # one of Unicode's noncharacters: never in a text
OURS = "[0-9]*.*.safetensors"  # checkpoints, as `save` names them
Example = tuple[list[int], list[int]]  # ids, and 1 where an id is trained

def check(holds: object, message: str) -> None:
    """Stop with one line for what you can mend; whatever else goes wrong keeps its traceback."""
    if not holds:
        raise SystemExit(f"Error: {message}")

# ── Data: an example is prompt and answer, a row holds several of them ──
def from_json(value: object) -> object:
    """What a JSON text says; any other value, and a text that isn't JSON, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value

def is_tool(tool: object) -> bool:
    """Has it a name, and as parameters, if any, a JSON schema? One that is a text is read."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not function.get("name"):
        return False
    schema = from_json(function.get("parameters") or {})
    properties = (schema.get("properties") or {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return False
    if function.get("parameters"):  # "{}" is a text, too
        function["parameters"] = schema
    return all(isinstance(inner, dict) for inner in properties.values())

def calls_problem(chat: list[dict], tools: object) -> str:
    """Why nobody could have called tools like this, or "". Arguments that are a text are read."""
    if not isinstance(tools, list):
        return "tools are not a list, or not JSON"
    if not all(map(is_tool, tools)):
        return "a tool is not {type: function, function: {name: ..., parameters: JSON schema}}"
    waiting = []
    for turn in chat:
        if turn["role"] == "tool":
            if turn.get("tool_call_id") not in waiting:
                return "a result without its call"
            waiting.remove(turn.get("tool_call_id"))
        elif waiting:
            return "a call without its result"
        for call in turn.get("tool_calls") or []:
            function = call.get("function") or {}
            function["arguments"] = from_json(function.get("arguments") or {})
            if not (function.get("name") and isinstance(function["arguments"], dict)):
                return "a call is not {id: ..., function: {name: ..., arguments: JSON}}"
            waiting.append(call.get("id"))
    return ""

def parse(line: str) -> tuple[dict, str]:
    """(row, why its chat can't be trained on, or ""). The first message gets the row's tools."""
    try:
        row = json.loads(line)
        chat = row["messages"]
        tools = from_json(row.get("tools")) or []
        if problem := calls_problem(chat, tools):
            return row, problem
        names = ["calling " * bool(turn.get("tool_calls")) + turn["role"] for turn in chat]
        letters = "".join(SPEAKERS[name] for name in names if name != "tool")
        if not TURNS.fullmatch(letters) or names[-1] == "tool":
            return row, "user and assistant do not take turns, up to an answer"
        for turn, name in zip(chat, names, strict=True):
            if "tools" in turn:  # only the row's are used, and these are named as unused
                turn["tools of a message"] = turn.pop("tools")
            turn["content"] = turn.get("content") or ""
            if not turn["content"].strip() and name not in ("tool", "calling assistant"):
                return row, "an empty text"
            if not {turn.get("weight"), turn.get("train")} <= {None, 0, 1}:  # True is 1
                return row, "a weight that is not 0 or 1"
            if not all(isinstance(turn.get(key) or "", str) for key in THOUGHTS):
                return row, "a thought that is not text"
        json.dumps(row, ensure_ascii=False).encode()  # half a character raises an error here
        if tools:
            chat[0]["tools"] = tools
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}, "no object with messages that hold text"
    return row, ""

def read_chats(path: Path, share: float, kept: bool = False) -> tuple[list, list]:
    """(trained, held out) chats, parted by their first question's words; prints what isn't used."""
    trained, held_out, counts = [], [], Counter()
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as lines:
        for line in filter(str.strip, lines):
            row, problem = parse(line)
            if problem:
                counts[f"left out: {problem}"] += 1
                continue
            chat = row["messages"]
            unused = {key for key in row if row[key]} - {"messages", "tools"}
            filled = {key for turn in chat for key in turn if turn[key]}
            unused |= filled - {"tools", "weight", "train", *SEEN, *THOUGHTS * kept}
            counts.update(f"kept, but not used: {key}" for key in sorted(unused))
            tags = sorted(set(FOREIGN.findall(line)))
            counts.update(f"kept, read as letters: {tag}" for tag in tags)
            question = next(turn["content"] for turn in chat if turn["role"] == "user")
            words = " ".join(re.findall(r"\w+|[^\w\s]", question.lower()))
            number = int(hashlib.sha256(words.encode()).hexdigest()[:16], 16)
            (held_out if number < share * 2**64 else trained).append(chat)  # as 02 chooses
    for what, count in counts.items():
        print(f"{count} rows {what!a}", flush=True)
    return trained, held_out

def marked(value: Any, pattern: re.Pattern) -> Any:
    """The same structure, with a mark in all that only spells a control token."""
    if isinstance(value, str):
        return pattern.sub(lambda word: word[0][0] + MARK + word[0][1:], value)
    if isinstance(value, dict):
        return {marked(key, pattern): marked(inner, pattern) for key, inner in value.items()}
    return [marked(inner, pattern) for inner in value] if isinstance(value, list) else value

def for_template(turn: dict, kept: bool) -> dict:
    """What the chat template is to see of a message."""
    seen = {key: turn[key] for key in SEEN if turn.get(key) is not None}
    thoughts = [turn[key] for key in THOUGHTS if kept and turn.get(key)]
    return seen | {"reasoning": thoughts[0]} if thoughts else seen

def answer_of(turn: dict, prompt: str, template: Callable) -> str:
    """What the model writes after the prompt: thought, text, calls, and the token that ends it."""
    text = turn["content"]
    if "reasoning" in turn:  # a template may have opened the thought
        is_open = prompt.rfind("<|channel>") > prompt.rfind("<channel|>")
        opening = "" if is_open else "<|channel>thought\n"
        text = f"{opening}{turn['reasoning']}\n<channel|>{text}"
    if not turn.get("tool_calls"):  # many files have an empty list in every answer
        return f"{text}<turn|>"
    written = template([{"role": "user", "content": "x"}, turn | {"content": ""}])
    calls = CALLS.findall(written)
    check(calls, "this chat template writes no calls of tools: take those rows out of your data")
    return f"{text}{calls[0]}<|tool_response>"  # here the model stops, and waits for the result

def render(tokenizer: PreTrainedTokenizerBase, chats: list, length: int,
           kept: bool = False) -> list[Example]:
    """(ids, mask) of every answer behind the prompt that a server sends, if `length` has room."""
    plain = {"add_special_tokens": False, "split_special_tokens": True}  # <turn|> stays letters
    added = tokenizer.added_tokens_decoder.items()
    control = {token.content: number for number, token in added if token.special}
    pattern = re.compile(f"({'|'.join(map(re.escape, control))})")
    template = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    def ids_of(text: str) -> list[int]:
        ids: list[int] = []
        for piece in pattern.split(text):
            if piece in control:
                ids.append(control[piece])
            else:
                ids.extend(tokenizer.encode(piece.replace(MARK, ""), **plain))
        return ids
    examples = []
    for chat in marked(chats, pattern):
        turns = [for_template(turn, kept) for turn in chat]
        for place, turn in enumerate(chat):
            if turn["role"] != "assistant" or 0 in (turn.get("weight"), turn.get("train")):
                continue
            text = template(turns[:place], tools=chat[0].get("tools"), add_generation_prompt=True,
                            enable_thinking="reasoning" in turns[place])
            prompt, answer = ids_of(text), ids_of(answer_of(turns[place], text, template))
            examples.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    fitting = [example for example in examples if len(example[0]) <= length]
    print(f"{len(fitting)} answers; {len(examples) - len(fitting)} more are too long", flush=True)
    return fitting

def pack(examples: list[Example], length: int, multiple: int) -> np.ndarray:
    """int32 [rows, 4, T]: tokens, mask, segment (1, 2, ...; 0 is padding), position in it."""
    rows = []
    for ids, mask in examples:
        roomy = (row for row in rows[-64:] if np.count_nonzero(row[2]) + len(ids) <= length)
        row = next(roomy, None)
        if row is None:
            row = np.zeros((4, length), np.int32)
            rows.append(row)
        used = np.count_nonzero(row[2])
        segment = [row[2].max() + 1] * len(ids)
        row[:, used:used + len(ids)] = ids, mask, segment, range(len(ids))
    rows += [np.zeros((4, length), np.int32)] * (-len(rows) % multiple)
    return np.array(rows, np.int32).reshape(-1, 4, length)

# ── Model: Tunix's Gemma 4, cut over the mesh, an adapter beside every matrix of a layer ──
def files_of(folder: Path) -> list[Path]:
    """The base's files, decided once: what is loaded, copied and merged is one set of weights."""
    names = {"model.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = from_json(index.read_text("utf-8", "replace"))
        places = shards.get("weight_map", {}) if isinstance(shards, dict) else {}
        check(places and isinstance(places, dict), f"{index} has no weight_map: download it again")
        names = set(map(str, places.values()))
    odd = names ^ {path.name for path in folder.glob("*.safetensors")}
    check(not odd, f"{folder}: {sorted(odd)} missing, or beside the model's own {sorted(names)}")
    small = (".json", ".jinja", ".model", ".txt")
    return sorted(path for path in folder.iterdir() if path.name in names or path.suffix in small)

def load_model(folder: Path, dtype: str) -> tuple[nnx.Module, jax.sharding.Mesh]:
    """(model, mesh) of a Hugging Face folder: tp cuts heads and MLPs, fsdp rows and weights."""
    text = from_json((folder / "config.json").read_text("utf-8", "replace"))
    text = text.get("text_config", text) if isinstance(text, dict) else {}
    text = text if isinstance(text, dict) else {}
    rope = text.get("rope_parameters") or {}
    described = isinstance(rope, dict) and isinstance(text.get("layer_types"), list)
    check(described, f"{folder}/config.json describes no layers of a Gemma 4: download it again")
    asked = text | rope
    odd = {key: asked[key] for key in MUST if key in asked and asked[key] not in MUST[key]}
    check(not odd, f"{folder}/config.json asks for {odd}, and Tunix computes something else")
    full, sliding = gemma4.AttentionType.GLOBAL, gemma4.AttentionType.LOCAL_SLIDING
    kinds = tuple(full if name == "full_attention" else sliding for name in text["layer_types"])
    shared = text.get("num_kv_shared_layers") or 0  # the last layers of E2B and E4B reuse K and V
    fits = not shared or kinds[:-shared][-2:] == (sliding, full)  # those whose K and V Tunix shares
    check(fits, f"{folder}: the layers before those that share K and V are not sliding, full")
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
    held, dtypes = 0, set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.keys():
                tensor = file.get_slice(name)
                dtypes.add(tensor.get_dtype())
                held += 0 if name.startswith(TOWERS) else math.prod(tensor.get_shape())
    model = nnx.eval_shape(lambda: gemma4.Gemma4(config, rngs=nnx.Rngs(0)))
    wanted = sum(array.size for array in jax.tree.leaves(nnx.state(model)))
    check(held == wanted, f"{folder} holds {held:,} numbers of the language model, and its "
          f"config.json describes {wanted:,}: a part of it would go unused, or is missing")
    mode = "auto" if len(dtypes) == 1 else "original"  # the fast reader takes one dtype for granted
    model = create_model_from_safe_tensors(str(folder), config, mesh, jnp.dtype(dtype), mode)
    if config.per_layer_input_dim:  # E2B, E4B: a TPU would lay this table out so that loops copy it
        table = model.embedder.per_layer_input_embedding
        layout = Format(Layout((0, 1, 2)), table.get_value().sharding)
        table.set_value(jax.device_put(table.get_value(), layout))
    return model, mesh

def add_lora(model: nnx.Module, mesh: jax.sharding.Mesh, rank: int, alpha: float,
             seed: int) -> tuple[nnx.Module, nnx.State, nnx.State]:
    """(model, adapters, frozen weights). A is uniform (Kaiming He), B zero: nothing changes."""
    draw, rows = jax.nn.initializers.he_uniform(), mesh.shape["fsdp"]
    provider = qwix.LoraProvider(
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
def make_steps(model: nnx.Module, optimizer: optax.GradientTransformation, places: int) -> tuple:
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
        @jax.checkpoint  # logits are the largest arrays: forgotten, and computed again backwards
        def losses(picked):  # [B, some of them] -> their cross-entropies
            near = jnp.take_along_axis(hidden.astype(dtype), picked[..., None], axis=1)
            logits = gemma4.Embedder.decode(model.embedder, near).astype(jnp.float32)
            logits = jnp.tanh(logits / cap) * cap if cap else logits
            due = jnp.take_along_axis(tokens, picked + 1, axis=1)
            return optax.softmax_cross_entropy_with_integer_labels(logits, due)
        parts = [losses(at[:, start:start + 1024]) for start in range(0, places, 1024)]
        loss = jnp.concatenate(parts, axis=1)
        return jnp.sum(loss * weight), jnp.sum(weight)
    def train(adapters, moments, frozen, batch):  # [M, B, 4, T] -> ..., mean loss
        def add(total, rows):
            more = jax.value_and_grad(evaluate, has_aux=True)(adapters, frozen, rows)
            return jax.tree.map(jnp.add, total, more), None
        zero = ((0.0, 0), jax.tree.map(jnp.zeros_like, adapters))
        ((loss, tokens), gradients), _ = jax.lax.scan(add, zero, batch)
        gradients = jax.tree.map(lambda array: array / tokens, gradients)
        updates, moments = optimizer.update(gradients, moments, adapters)
        adapters = optax.apply_updates(adapters, updates)
        return adapters, moments, loss / tokens, optax.global_norm(gradients)
    return jax.jit(train, donate_argnums=(0, 1)), jax.jit(evaluate)

# ── Checkpoints and merge: W + alpha / rank · (A B)ᵀ, in float32, rounded once ──
def sha256_of(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def save(folder: Path, step: int, state: tuple) -> None:
    """Write STEP.SHA256.safetensors, whole or not at all; the newest two are kept."""
    arrays = {str(n): np.asarray(array) for n, array in enumerate(jax.tree.leaves(state))}
    save_file(arrays, folder / "partial")
    (folder / "partial").rename(folder / f"{step:07}.{sha256_of(folder / 'partial')}.safetensors")
    for old in sorted(folder.glob(OURS))[:-2]:
        old.unlink()

def restore(folder: Path, state: tuple) -> tuple[int, tuple]:
    """(step, state) of the newest whole checkpoint; damaged ones are renamed and left aside."""
    for path in sorted(folder.glob(OURS), reverse=True):
        step, digest, _ = path.name.split(".")
        if digest == sha256_of(path):
            arrays = load_file(path)
            old, tree = jax.tree.flatten(state)
            leaves = [jax.device_put(arrays[str(n)], leaf.sharding) for n, leaf in enumerate(old)]
            return int(step), jax.tree.unflatten(tree, leaves)
        print(f"checkpoint {step} is left aside: its bytes have changed", flush=True)
        path.rename(path.with_suffix(".damaged"))
    return 0, state

def factors(path: str, a: np.ndarray, b: np.ndarray) -> dict[str, tuple]:
    """{Hugging Face matrix: (A [in, r], B [r, out])} of one Tunix module."""
    block, kind = path.replace(".attn.", ".self_attn.").rsplit(".", 1)
    if kind in ("kv_einsum", "k_einsum"):  # B [r, 2, K, H]; [r, K, H] where the values are the keys
        two = {"k": b[:, 0], "v": b[:, 1]} if kind == "kv_einsum" else {"k": b, "v": b}
        return {f"{block}.{kv}_proj": (a, part.reshape(len(b), -1)) for kv, part in two.items()}
    name = {"attn_vec_einsum": "o_proj"}.get(kind, kind.replace("_einsum", "_proj"))
    return {f"{block}.{name}": (a.reshape(-1, len(b)), b.reshape(len(b), -1))}

def export(folder: Path, files: list[Path], pairs: dict, cfg: argparse.Namespace) -> None:
    """Write adapter/ as PEFT stores it, and merged/: the base's files with the adapters added."""
    plan, adapter = {}, {}
    for path, (a, b) in pairs.items():
        plan |= factors(f"model.language_model.{path}", a, b)
    for name, (a, b) in plan.items():
        adapter[f"base_model.model.{name}.lora_A.weight"] = a.T.copy()
        adapter[f"base_model.model.{name}.lora_B.weight"] = b.T.copy()
    for name in ("adapter", "merged"):
        (folder / name).mkdir(parents=True)
    save_file(adapter, folder / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": cfg.rank, "lora_alpha": cfg.alpha,
        "base_model_name_or_path": str(cfg.model), "target_modules": r"model\.(language_model\.)?"
        r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"}))
    for file in files:
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / "merged" / file.name)
            continue
        tensors = load_file(file)  # in their own dtypes
        for name in [name for name in plan if f"{name}.weight" in tensors]:
            delta = jnp.einsum("ir,ro->oi", *plan.pop(name), precision="highest")
            old = tensors[f"{name}.weight"]
            new = jnp.asarray(old) + cfg.alpha / cfg.rank * delta
            tensors[f"{name}.weight"] = np.asarray(new.astype(old.dtype))
        save_file(tensors, folder / "merged" / file.name, {"format": "pt"})
    assert all(name.endswith("v_proj") for name in plan), f"no place for {sorted(plan)[:3]}"

# ── The run ──
def claim(cfg: argparse.Namespace, files: list[Path]) -> str:
    """What decides the result: settings, and the files' hashes. Refuse an OUT of something else."""
    lines = [f"{name}: {value}" for name, value in vars(cfg).items() if not isinstance(value, Path)]
    for path in (cfg.data, *files):
        lines.append(f"{'data' if path == cfg.data else path.name}: {sha256_of(path)}")
    note = cfg.out / "recipe.txt"
    if note.exists():
        odd = sorted(set(lines) ^ set(note.read_text("utf-8").splitlines()))
        check(not odd, f"{note} is of another recipe, data or base ({odd}): choose another --out")
    else:
        own = [path.name for path in cfg.out.iterdir() if path.is_dir()]
        check(not own, f"{cfg.out} has {own}, and no recipe.txt: choose another --out")
    return "\n".join(lines)

def run(cfg: argparse.Namespace) -> None:
    """Train from where OUT stands, and write what OUT is to get, while nobody else writes there."""
    check(cfg.data.is_file(), f"{cfg.data} is no file")  # before a base is downloaded
    for name in ("rank", "sequence_length", "rows_per_step", "every"):
        check(getattr(cfg, name) > 0, f"--{name} {getattr(cfg, name)} is not a number from 1 on")
    check(cfg.dtype in ("bfloat16", "float32"), f"--dtype {cfg.dtype}: bfloat16 or float32")
    kept = cfg.reasoning == "kept"
    check(kept or cfg.reasoning == "stripped", f"--reasoning {cfg.reasoning}: stripped or kept")
    base = cfg.model if cfg.model.is_dir() else Path(snapshot_download(str(cfg.model)))
    files = files_of(base)
    recipe = claim(cfg, files)
    tokenizer = AutoTokenizer.from_pretrained(base)
    check(tokenizer.chat_template, f"{base} has no chat template: take its -it model")
    length = cfg.sequence_length
    chats = read_chats(cfg.data, cfg.validation, kept)
    sides = [render(tokenizer, side, length, kept) for side in chats]
    check(sides[0], f"{cfg.data}: no answer to train within --sequence_length {length}")
    model, mesh = load_model(base, cfg.dtype)
    model, adapters, frozen = add_lora(model, mesh, cfg.rank, cfg.alpha, cfg.seed)
    draw, at_once = np.random.default_rng(cfg.seed), mesh.shape["fsdp"]  # rows of a micro-batch
    draw.shuffle(sides[0])
    rows, held_out = (pack(side, length, at_once) for side in sides)
    count, per_step = len(rows), max(1, cfg.rows_per_step // at_once) * at_once
    steps = max(1, round(cfg.epochs * count / per_step))
    passes = [draw.permutation(count) for _ in range(math.ceil(steps * per_step / count))]
    order = np.concatenate(passes)[:steps * per_step].reshape(steps, -1, at_once)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, cfg.learning_rate, min(cfg.warmup_steps, steps // 2), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm),
                            optax.adamw(schedule, weight_decay=cfg.weight_decay))
    places = max(int(part[:, 1].sum(axis=-1).max(initial=0)) for part in (held_out, rows))
    train, evaluate = make_steps(model, optimizer, places)
    split = jax.NamedSharding(mesh, jax.P(None, "fsdp"))  # of batches [M, B, 4, T]
    exam = jax.device_put(held_out.reshape(-1, at_once, *held_out.shape[1:]), split)
    (cfg.out / "recipe.part").write_text(recipe, "utf-8")
    (cfg.out / "recipe.part").rename(cfg.out / "recipe.txt")
    checkpoints = cfg.out / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    state = (adapters, optimizer.init(adapters))
    state = jax.device_put(state, nnx.get_named_sharding(state, mesh))  # Adam's counter, too
    done, state = restore(checkpoints, state)
    print(f"{len(sides[0])} answers in {count} rows, steps {done + 1} to {steps}", flush=True)
    with mesh:
        for step in range(done + 1, steps + 1):
            batch = jax.device_put(rows[order[step - 1]], split)
            *state, loss, norm = train(*state, frozen, batch)
            losses = {"loss": float(loss)}
            check(jnp.isfinite(norm), f"step {step}: {losses}, gradient {norm}: lower the rate")
            pause = step % cfg.every == 0 or step == steps
            if pause and exam.size:
                total, tokens = np.sum([evaluate(state[0], frozen, part) for part in exam], axis=0)
                losses["held-out loss"] = float(total / tokens)
            print(f"step {step}/{steps}", losses, flush=True)
            if pause:
                save(checkpoints, step, state)
    pairs, partial = {}, cfg.out / "partial"
    for path, variable in nnx.to_flat_state(state[0]):  # lora_a, then lora_b of each module
        pairs.setdefault(".".join(map(str, path[:-1])), []).append(np.array(variable.get_value()))
    shutil.rmtree(partial, ignore_errors=True)
    export(partial, files, pairs, cfg)
    for name in ("adapter", "merged"):  # whole, or not there
        shutil.rmtree(cfg.out / name, ignore_errors=True)
        (partial / name).rename(cfg.out / name)
    partial.rmdir()

def main(argv: list[str] | None = None) -> None:
    """Read the options, and run with them as the only writer of OUT."""
    parser = argparse.ArgumentParser()
    for name, value in CONSTANTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    cfg = parser.parse_args(argv)
    try:
        cfg.out.mkdir(parents=True, exist_ok=True)
        with FileLock(cfg.out / "one_run_at_a_time.lock", timeout=0):
            run(cfg)
    except (OSError, EOFError, zlib.error, HFValidationError, SafetensorError) as error:
        raise SystemExit(f"Error: {error}") from None  # a folder, a lock, room, the network, a .gz

if __name__ == "__main__":
    main()
