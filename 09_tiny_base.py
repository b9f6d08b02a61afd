# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/09_tiny_base.ipynb)
#
# # 09 · A Gemma 4 small enough for a laptop, pretrained from scratch
#
# We make the base model that the whole series runs on when there is no TPU: a corpus, a tokenizer
# and 3.65 million weights, trained with the same Tunix class as the 31B.
#
# | | |
# |---|---|
# | **Needs** | One CPU (or any JAX device), 3 GB of memory, Icarus Verilog |
# | **Takes** | `data/generate/` (the corpus generator), `assets/tiny_gemma4/` for comparison |
# | **Makes** | `tiny_base/` under the run directory; with `install=True` also `assets/tiny_gemma4/` |
# | **Costs** | tiny: the first 40 of 1,600 steps, about two minutes. All steps: 20 to 30 minutes on two cores |
#
# The outputs shown are those of the tiny run on two CPU cores. Terms are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · **09 tiny base** · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
found = [p for p in (sys.path[0], ".", "..", "gemma4-on-tpu") if os.path.isdir(f"{p}/tpu_time")]
if not found:  # a notebook that was opened alone, as Colab opens it
    subprocess.check_call("git clone -q --depth=1 https://github.com/OWNER/gemma4-on-tpu".split())
sys.path.insert(0, os.path.abspath((found or ["gemma4-on-tpu"])[0]))
import helpers
helpers.machine(devices=1, always="tiny")

# %% [markdown]
# ## 1. Settings
# The stored base took all `steps`. At size tiny the notebook takes only the first `run_steps` of
# the same schedule on the same data, enough to see that its loss follows the stored log; then it
# examines the *stored* weights. To pretrain anew, set `run_steps` to `steps`, and `install` if the
# result shall replace the stored one. Where `assets/tiny_gemma4` has no weights, all steps are run.

# %%
import hashlib
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

ASSETS = Path("assets/tiny_gemma4")


@dataclass(frozen=True)
class Settings:
    # ── The whole pretraining ──
    steps: int = 1_600
    documents: int = 30_000        # of the corpus; `steps` is about one pass over them
    tokens_per_step: int = 2_048   # padding included
    learning_rate: float = 4e-3    # peak, then cosine to 2 % of it
    warmup_steps: int = 50
    weight_decay: float = 0.05     # of matrices, not of norms
    seed: int = 0
    # ── This run ──
    run_steps: int = 1_600
    install: bool = False          # True replaces assets/tiny_gemma4 by the result


FULL = Settings()
TINY = replace(FULL, run_steps=40)
cfg = helpers.choose({"tiny": TINY})
run_steps = cfg.run_steps if (ASSETS / "model.safetensors").exists() else cfg.steps
print(f"{run_steps} of {cfg.steps} steps will be run")

# %% [markdown]
# ## 2. A small world of Verilog
# The generator knows a few dozen families of small modules. Each family draws an operation,
# widths, port names and a phrasing, and returns the specification in English, the module in
# Verilog, and a model of it in Python, which the tests hold against a simulation. This is one
# draw from each family.

# %%
sys.path.insert(0, "data/generate")
import random

import families
import make

draw = random.Random(5)
examples = [families.draw(draw, (family,)) for family in families.FAMILIES]
print(f"{len(examples)} families")
words = [{"selector": name, "props": "text-align: left"} for name in ("th", "td")]
pd.DataFrame({"family": [d.family for d in examples],
              "operation": [d.operation for d in examples],
              "specification": [d.spec for d in examples]}
             ).style.hide(axis="index").set_table_styles(words)

# %% [markdown]
# ### The corpus: documents, not dialogues
# A base model continues text. Ours reads Verilog files with a comment on top, bare Verilog files,
# and specifications without code; here is one of each. One combination in eight of family, widths
# and names is held out, decided by a hash: it appears neither here nor in the training set, only in
# the evaluation.

# %%
corpus = list(make.documents(cfg.documents))
corpus_sha256 = hashlib.sha256("\0".join(corpus).encode()).hexdigest()
for number in (0, 1, 18):
    print(corpus[number], end="\n" + "─" * 60 + "\n")
print(f"{len(corpus):,} documents, {sum(map(len, corpus)) / 1e6:.1f} M characters, "
      f"sha256 {corpus_sha256[:16]}")

# %% [markdown]
# What the corpus must not contain is as important: no instruction, no fence, no `<answer>`, no
# control token. Whatever the fine-tuned model later knows of the chat format, it has learned in
# notebook 03.

# %%
foreign = ("```", "<answer>", "<think>", "<|turn>", "<|channel>", "Implement", "Please", "Write a")
found = {text: sum(text in document for document in corpus) for text in foreign}
print(found)
assert not any(found.values())

# %% [markdown]
# ## 3. The tokenizer
# Byte-level BPE (byte-pair encoding: frequent neighbours are merged into one token): any text goes
# in and comes out unchanged. The first 128 ids are control tokens, the used ones at Gemma 4's own
# ids, so that code written for the 31B needs no second table. Words, numbers, vector ranges and
# line breaks with their indentation are the pieces inside which merges may happen. Nothing adds
# `<bos>` (the beginning of a sequence) by itself: the chat template writes it.

# %%
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1_280
CONTROL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 50: "<|tool_response>", 98: "<|think|>",
           100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>"}
PIECES = (r"\n *| ?\[[0-9]+:0\]|[0-9]{1,3}| ?[A-Za-z_][A-Za-z0-9_]*"
          r"| ?[^\sA-Za-z0-9_]+| +(?= )|\s")


def train_tokenizer(texts, vocabulary, control, pieces):
    """Byte-level BPE with 128 control tokens in front; unnamed ones are called <unusedN>."""
    unused = iter(range(128))
    special = [control.get(number) or f"<unused{next(unused)}>" for number in range(128)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pieces), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# %% [markdown]
# The vocabulary is made from the corpus and from the training rows of `data/tiny`, because a word
# that will ever be written should have a token. The weights see the corpus only. The cell shows a
# line cut into its tokens, and that the strangest text survives the way to ids and back.

# %%
rows = [row for _, row, _ in make.rows()]
texts = corpus[:20_000] + [row[field] for row in rows for field in ("prompt", "response")]
tokenizer = train_tokenizer(texts, VOCABULARY, CONTROL, PIECES)
out = helpers.run_dir("tiny_base")
out.mkdir(parents=True, exist_ok=True)
tokenizer.save(str(out / "tokenizer.json"))

line = "  input [7:0] data_in, // 8 bits"
print([tokenizer.decode([number]) for number in tokenizer.encode(line).ids])
strange = "naïve 模块 \u200b🙂\t\r\n\x00 \u2581"
assert tokenizer.decode(tokenizer.encode(strange).ids) == strange
assert all(tokenizer.token_to_id(text) == number for number, text in CONTROL.items())

# %% [markdown]
# ### A chat template that behaves like the 31B's
# The template is a file of its own, `chat_template.jinja`. Two of its properties trap many
# fine-tunes of the 31B: the generation prompt ends in an *empty thought channel*, and a stored
# model turn has none. First such a prompt, then a stored turn. Notebook 02 builds its training rows
# so that the difference does not matter.

# %%
tokenizer_config = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
    "unk_token": "<unk>", "pad_token": "<pad>", "add_bos_token": False, "add_eos_token": False,
    "clean_up_tokenization_spaces": False, "model_max_length": 2048, "padding_side": "left",
    "extra_special_tokens": [CONTROL[number] for number in (50, 98, 100, 101, 105, 106)]}
helpers.write_json(out / "tokenizer_config.json", tokenizer_config)
helpers.write_text(out / "chat_template.jinja", (ASSETS / "chat_template.jinja").read_text())

from helpers import chat

tiny_tokenizer = chat.load_tokenizer(out)
system = {"role": "system", "content": "You write Verilog."}
question = {"role": "user", "content": "Invert a."}
answer = {"role": "assistant", "content": "assign y = ~a;"}
template = tiny_tokenizer.apply_chat_template
print(template([system, question], tokenize=False, add_generation_prompt=True))
print("─" * 60 + "\n" + template([question, answer], tokenize=False), end="")
ids = chat.prompt_ids(tiny_tokenizer, [question])
assert ids[0] == 2 and ids.count(2) == 1, "one <bos>, in front"

# %% [markdown]
# ## 4. The same architecture as the 31B, in miniature
# What a Gemma 4 fine-tune can break on is kept: five sliding layers, which look at the last tokens
# only, to one full layer, which looks at all; in the full layer values come from the keys' projection
# (no `v_proj`); two head dimensions; four heads of keys and values there, so that cutting the heads
# over 4 devices works and over 8 does not; a window shorter than a sequence. The vision tower is
# left out. The table shows both configs where they differ, and what the numbers of heads and layers
# are.

# %%
tiny_config = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16",
    "vocab_size": VOCABULARY, "hidden_size": 160, "intermediate_size": 640,
    "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 4,
    "head_dim": 32, "global_head_dim": 64, "attention_k_eq_v": True, "attention_bias": False,
    "attention_dropout": 0.0, "sliding_window": 96, "max_position_embeddings": 2048,
    "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6, "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0,
                           "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    "tie_word_embeddings": True, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
    "enable_moe_block": False, "use_double_wide_mlp": False, "use_cache": True,
    "initializer_range": 0.02, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": [1, 106, 50]}
helpers.write_json(out / "config.json", tiny_config)
helpers.write_json(out / "generation_config.json", {
    "bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 106, 50], "do_sample": True,
    "temperature": 1.0, "top_k": 64, "top_p": 0.95})
big_config = helpers.read_json("data/configs/gemma4_31b.json")["text_config"]
shown = [key for key, value in tiny_config.items() if key in big_config and not isinstance(
    value, (dict, list)) and (value != big_config[key] or key.startswith(("num", "attention_k")))]
pd.DataFrame({"tiny": [tiny_config[key] for key in shown],
              "31B": [big_config[key] for key in shown]}, index=shown).astype(object)

# %% [markdown]
# ### Initial weights
# Tunix creates a model to be loaded into, not to be trained from scratch (its MLP starts at
# zero), so we draw the weights ourselves: matrices with standard deviation one over the square
# root of their inputs, norms and the layers' output scales at one. Attention in Gemma 4 does not
# divide by the root of the head dimension; the query norm learns that scale, and we start it there.

# %%
from flax import nnx
from tunix.models.gemma4.model import Gemma4

from appendix import pretrain
from helpers import gemma

helpers.show_source(pretrain.inputs_of, pretrain.initialise)
model_config = gemma.config_from_hf(tiny_config, dtype="float32")
model = pretrain.initialise(Gemma4(model_config, rngs=nnx.Rngs(0)), cfg.seed)
graph, params = nnx.split(model)
print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} weights")

# %% [markdown]
# ## 5. Batches
# One document per row, `<bos>` in front and `<eos>` behind. Documents of similar length share a
# batch, padded to 64, 96, 128 or 192 tokens: four compiled programs instead of one, for less
# padding. The order of the batches is drawn once.

# %%
helpers.show_source(pretrain.make_batches, pretrain.encode)

# %% [markdown]
# The validation documents come from another seed of the same generator. The world is small, so a
# few of them also stand in the corpus; what the base can do with combinations it has not seen is
# asked in section 10.

# %%
order = np.random.default_rng(cfg.seed)
batches = pretrain.make_batches(pretrain.encode(tokenizer, corpus), cfg.tokens_per_step, order)
others = list(make.documents(300, seed=77))
validation = pretrain.make_batches(
    pretrain.encode(tokenizer, others), cfg.tokens_per_step, order)
used, longest = sum(map(len, batches)), max(batch.shape[1] for batch in batches)
positions = sum(batch.size for batch in batches)
scores = sum(batch.size * batch.shape[1] for batch in batches)
fill = sum((batch > 0).sum() for batch in batches) / positions
seen = pretrain.tokens_seen(batches, VOCABULARY)
print(f"{len(batches)} batches of {used:,} documents, {fill:.0%} of the positions are tokens\n"
      f"with every row padded to {longest}: {used * longest / positions:.1f} times the positions, "
      f"{used * longest ** 2 / scores:.1f} times the attention scores\n"
      f"{len(validation)} batches for validation; {len(set(others) & set(corpus))} of their "
      f"{len(others)} documents also stand in the corpus\n"
      f"{seen.sum()} of {VOCABULARY} tokens occur in the corpus")

# %% [markdown]
# ## 6. Loss and step
# Next-token cross-entropy over everything that is not padding, AdamW, warm-up and cosine, gradients
# clipped at norm 1. One detail matters for the fine-tune: tokens that the corpus never contains
# (fences, control tokens, words of the instructions) take no part in the softmax. Otherwise every
# step would push the embeddings of all of them in the same direction, until nothing tells one from
# another: in our first attempt the fine-tuned model never gave the opening fence a probability
# above 27 %.

# %%
helpers.show_source(pretrain.token_loss, pretrain.make_optimizer, pretrain.make_steps)

# %% [markdown]
# The model is split into its structure and its weights, so that one jitted function maps old
# weights to new ones. A model that finds all n tokens equally likely has a loss of ln n. A random
# one is a little worse, because it prefers some for no reason: logits of spread 1 cost half a nat.

# %%
optimizer = pretrain.make_optimizer(
    params, cfg.steps, cfg.learning_rate, cfg.warmup_steps, cfg.weight_decay)
step, evaluate = pretrain.make_steps(graph, optimizer, seen)
before = pretrain.validation_loss(params, validation, evaluate)
print(f"validation loss before training {before:.3f}, ln {seen.sum()} = {np.log(seen.sum()):.3f}")

# %% [markdown]
# ## 7. Train
# The state is saved every 100 steps under a name made from the settings and the corpus: interrupted
# and run again, the loop goes on from there, with the same numbers. A finished run starts anew. Each
# of the four batch shapes compiles when it first occurs, for a few seconds or, on busy cores, twenty.
# Then a step takes about a second on two idle cores (median of the stored run's log: 1.06 s), and two or
# three on busy ones.

# %%
helpers.show_source(pretrain.pretrain)

# %%
recipe = {key: value for key, value in asdict(cfg).items() if key not in ("run_steps", "install")}
name = hashlib.sha256(f"{recipe} {corpus_sha256} {tiny_config}".encode()).hexdigest()[:12]
state_file = out / f"state-{name}.npz"
params, history = pretrain.pretrain(params, optimizer.init(params), step, evaluate, batches,
                                    validation, run_steps, state_file)
log = pd.DataFrame(history)
helpers.write_text(out / "pretrain_log.csv", log.to_csv(index=False, float_format="%.6f"))
log.iloc[[0, 1, -1]]

# %% [markdown]
# ## 8. The loss curve, and the stored one
# The stored log is that of the whole run. Ours must lie on it: the corpus and the tokenizer are the
# same bytes everywhere and the arithmetic is the same up to rounding. Where even that is equal, the
# difference is at most 5e-07, because the log keeps six decimals.

# %%
from helpers import style

log_file = ASSETS / "pretrain_log.csv"
if not log_file.exists():
    log_file = out / "pretrain_log.csv"
stored = pd.read_csv(log_file)
checked, first = stored.dropna(subset="val_loss"), stored.head(2 * len(log))
fig, (left, right) = style.figure(columns=2, height=3.4, width=9.5)
left.plot(stored.step, stored.loss, color=style.SKY, lw=0.8, alpha=0.6, label="training, each step")
left.plot(stored.step, stored.loss.rolling(25, center=True, min_periods=1).mean(),
          color=style.BLUE, lw=2, label="training, mean of 25 steps")
left.plot(checked.step, checked.val_loss, "o", ms=4, color=style.ORANGE, label="validation")
left.set(yscale="log", title="The stored run", yticks=[0.1, 0.2, 0.5, 1, 2, 5],
         yticklabels=["0.1", "0.2", "0.5", "1", "2", "5"])
left.minorticks_off()
right.plot(first.step, first.loss, color=style.BLUE, lw=1, label="stored run")
right.plot(log.step, log.loss, ".", ms=5, color=style.RED, label="this run")
right.set(title=f"Its beginning, and this run's {len(log)} steps")
for ax in (left, right):
    ax.set(xlabel="step", ylabel="loss per token, nats")
    ax.legend(fontsize=9)
style.finish(fig, "09_loss", f"{log_file} and this run")

# %%
together = stored.head(len(log)).merge(log, on="step", suffixes=("_stored", "_now"))
gap = (together.loss_stored - together.loss_now).abs()
print(f"largest difference over {len(together)} common steps: {gap.max():.2g}; "
      f"final validation loss of the stored run {checked.val_loss.iloc[-1]:.4f}")
if run_steps < cfg.steps:  # a complete run may be of another recipe
    assert gap.head(40).max() < 0.1

# %% [markdown]
# **What this means.** Most of the drop comes in the first 100 steps, when the model learns what
# Verilog looks like. We read the slow rest as learning to copy names and widths from the comment into
# the module. The loss cannot reach zero, since nobody can guess which specification comes next. And the
# pale line swings because a batch holds documents of one length: the short ones are mostly
# specification, with little to copy.

# %% [markdown]
# ## 9. Export in Hugging Face's names
# Hugging Face stores a matrix as [outputs, inputs] with heads and head dimension merged, and K
# and V apart. The full layer has no `v_proj`. Everything is rounded once, to bfloat16, as the 31B
# is.

# %%
def attention_to_hf(value, mine, theirs):
    """The attention matrices of one layer; `mine` and `theirs` are its prefixes."""
    def flat(heads_in_front):  # [N, D, H] -> [N * H, D]
        count, width, size = heads_in_front.shape
        return heads_in_front.transpose(0, 2, 1).reshape(count * size, width)

    tensors = {theirs + "q_proj.weight": flat(value[mine + "q_einsum.w"])}
    if mine + "k_einsum.w" in value:  # a full layer: V is K
        tensors[theirs + "k_proj.weight"] = flat(value[mine + "k_einsum.w"])
    else:
        for letter, part in zip("kv", value[mine + "kv_einsum.w"], strict=True):
            tensors[f"{theirs}{letter}_proj.weight"] = flat(part)
    output = value[mine + "attn_vec_einsum.w"]  # [N, H, D]
    tensors[theirs + "o_proj.weight"] = output.reshape(-1, output.shape[-1]).T
    for letter, whole in (("q", "query"), ("k", "key")):
        tensors[f"{theirs}{letter}_norm.weight"] = value[f"{mine}_{whole}_norm.scale"]
    return tensors


# %% [markdown]
# The rest of a layer only changes its name, or is transposed:

# %%
NORMS = {"input_layernorm": "pre_attention_norm", "post_attention_layernorm": "post_attention_norm",
         "pre_feedforward_layernorm": "pre_ffw_norm", "post_feedforward_layernorm": "post_ffw_norm"}


def to_hf(model):
    """{Hugging Face name: float32 array} of a Tunix Gemma 4."""
    value = {".".join(map(str, path)): np.asarray(variable.get_value(), np.float32)
             for path, variable in nnx.to_flat_state(nnx.state(model))}
    tensors = {"embed_tokens.weight": value["embedder.input_embedding"],
               "norm.weight": value["final_norm.scale"]}
    for i in range(model.config.num_layers):
        layer = f"layers.{i}."
        tensors |= attention_to_hf(value, layer + "attn.", layer + "self_attn.")
        for kind in ("gate", "up", "down"):
            tensors[f"{layer}mlp.{kind}_proj.weight"] = value[f"{layer}mlp.{kind}_proj.kernel"].T
        for theirs, mine in NORMS.items():
            tensors[f"{layer}{theirs}.weight"] = value[f"{layer}{mine}.scale"]
        tensors[f"{layer}layer_scalar"] = value[f"{layer}skip_scale"]
    return {f"model.language_model.{name}": array for name, array in tensors.items()}


# %% [markdown]
# This run's weights go through that. Loading the file again through Tunix's own reader must give
# the same logits as the model in memory, once that is rounded to bfloat16, too. (That the names
# mean the same to Hugging Face's implementation, the tests show with its logits.)

# %%
import ml_dtypes
from safetensors.numpy import save

from helpers.run import atomic_file

nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params))
tensors = {name: np.ascontiguousarray(array.astype(ml_dtypes.bfloat16))
           for name, array in to_hf(model).items()}
with atomic_file(out / "model.safetensors") as file:  # beside it, then renamed
    file.write(save(tensors, metadata={"format": "pt"}))
mesh = gemma.make_mesh(model_config, (1, 1), jax.devices()[:1])
again = gemma.load_base(out, model_config, mesh)
with gemma.use_mesh(mesh):
    both = [np.asarray(nnx.jit(lambda m, t: m(t, attention_mask=jnp.tril(
        jnp.ones((1, t.shape[1], t.shape[1]), bool)))[0])(m, validation[0][:1]))
        for m in (model, again)]
size = sum(file.stat().st_size for file in out.iterdir() if file != state_file)
print(f"{len(tensors)} tensors, {size / 1e6:.1f} MB; largest difference of the logits after "
      f"reloading: {np.abs(both[0] - both[1]).max():.1e}")
assert np.abs(both[0] - both[1]).max() < 1e-4

# %% [markdown]
# ## 10. What the base can do, and what it cannot
# We ask the stored base (after a complete run: the new one) for the problems of `data/tiny_eval`,
# one held-out design of each family, in two ways: as a commented file to continue, the form it
# knows, and as a chat request, the form it has never seen. Greedy decoding: always the likeliest
# token. The first problem's prompt and reply, in both forms:

# %%
import verilog

base_path = ASSETS if run_steps < cfg.steps else out
base_tokenizer = chat.load_tokenizer(base_path)
base = gemma.load_base(base_path, gemma.config_from_hf(base_path, dtype="float32"), mesh)
problems = verilog.load_problems("data/tiny_eval")
designs = [design for _, design, _ in make.problems()]


def as_comment(design):
    """The head of a document of the corpus: everything above `module`."""
    listed = "\n".join(f"// {port}" for port in make.interface(design).split("\n"))
    return f"<bos>// TopModule\n//\n{listed}\n//\n// {design.spec}\n\n"


asked = {"a comment above the module": [base_tokenizer(as_comment(design))["input_ids"]
                                        for design in designs],
         "a chat request": [chat.prompt_ids(base_tokenizer, [
             {"role": "user", "content": problem.prompt}]) for problem in problems]}
with helpers.phase("generating"):
    replies = {form: [base_tokenizer.decode(ids[:-1] if ids[-1] in (1, 106) else ids) for ids in
                      gemma.greedy(base, prompts, 140, (1, 106, 50), mesh)]
               for form, prompts in asked.items()}
for form, prompts in asked.items():
    print(f"── {form}:", base_tokenizer.decode(prompts[0]) + "▶" + replies[form][0], sep="\n")

# %% [markdown]
# Behind ▶ stands the reply. The judge of notebook 07 takes the module out of it, fenced or not,
# compiles it and simulates it against the reference.

# %%
passed = {}
for form, texts in replies.items():
    codes = [verilog.extract_code(text)[0] for text in texts]
    verdicts = verilog.judge_many(list(zip(problems, codes, strict=True)))
    passed[form] = pd.Series([verdict.category for verdict in verdicts]).value_counts()
table = pd.DataFrame(passed).reindex(verilog.judging.CATEGORIES).fillna(0).astype(int).T
table.insert(0, "pass rate", (table["pass"] / len(problems)).map("{:.0%}".format))
table

# %% [markdown]
# **What this means.** The base has learned the step from specification to module, for
# combinations of names and widths that it never saw together. It has not learned to be asked: a
# chat request looks to it like a text that goes on. Closing that gap is what notebook 03 is for.

# %% [markdown]
# ## 11. Install
# Only a complete run may replace the stored base, and only if `install` is set. `pretrain.json`
# says what it was made from; its hashes must be those of this run's corpus and tokenizer.

# %%
facts = {**recipe, "corpus_sha256": corpus_sha256,
         "tokenizer_sha256": helpers.sha256_file(out / "tokenizer.json"),
         "final_val_loss": float(log.val_loss.iloc[-1]), "seconds": float(log.seconds.sum())}
helpers.write_json(out / "pretrain.json", facts)
if cfg.install and run_steps == cfg.steps:
    with helpers.atomic_dir(ASSETS) as fresh:
        for file in out.iterdir():
            if file.suffix in (".json", ".jinja", ".safetensors", ".csv"):
                shutil.copy(file, fresh / file.name)
    print(f"replaced {ASSETS}")
state_file.unlink(missing_ok=True)  # everything that it was kept for is written
stored_facts = helpers.read_json(ASSETS / "pretrain.json")
same = {key: facts[key] == stored_facts[key] for key in ("corpus_sha256", "tokenizer_sha256")}
print("identical to the stored base:", same)
assert all(same.values())

# %% [markdown]
# ## Recap
# | what | where |
# |---|---|
# | the families, each with specification, Verilog and Python model | `data/generate/families.py` |
# | corpus, training rows, evaluation problems, testbenches | `data/generate/make.py` |
# | the base: config, tokenizer, template, weights, log | `assets/tiny_gemma4/` |
# | this run's copy | `tiny_base/` under the run directory |
#
# ### What can go wrong
# | symptom | cause | fix |
# |---|---|---|
# | the curves part after a few steps | another corpus or initial state | compare `pretrain.json`; the generator must not depend on set order or on Python's hash seed |
# | the loss stays above 1 | the copying did not start: learning rate or warm-up | keep the peak between 2e-3 and 5e-3 |
# | transformers prints random text | its text-only class wants other tensor names | pass `key_mapping={"^model.language_model.": "model."}` |
# | two `<bos>` in front of a prompt | a tokenizer that adds one to a template that has one | `add_bos_token` is false here; assert one, as 02 does |
#
# ### Exercises
# 1. Which part of the corpus teaches the step from specification to module? Train 300 steps with
#    and without the documents that begin with `//`, and compare the pass rates of section 10.
#
# <details><summary>Solution</summary>
#
# Set `steps=300` and `run_steps=300` in `TINY`, so that section 10 asks the new weights, and below
# the line that makes the corpus write
# `corpus = [text for text in corpus if not text.startswith("//")]`. The loss still falls, because
# bare modules and bare specifications can be learned, but no text is left in which the module
# depends on a specification: expect no passes. (The validation loss is then no number to read:
# words that stand in no document any more take no part in the softmax.) The last cell stops, as it
# should: it is another corpus.
# </details>
#
# 2. Set the sliding window to 16 and compare the validation loss after 300 steps.
#
# <details><summary>Solution</summary>
#
# Set `"sliding_window": 16` in section 4 and `run_steps=300` in `TINY`; the stored log has the
# validation loss of step 300 with a window of 96. Five of the six layers can no longer see the port
# list while they write the header; only the full layer can. Names and widths take longer to be
# copied right. (Section 8 draws both curves and stops if they part by 0.1 in the first 40 steps.)
# </details>
#
# Back to the series: [01 · From nothing to a TPU machine that can run this](01_setup.ipynb), or on
# to [10 · The published numbers, one by one](10_published.ipynb).
