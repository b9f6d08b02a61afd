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
# The series needs a base model that runs without a TPU, so let's make one: a corpus, a tokenizer and
# 3.65 million weights, trained with the same Tunix class as the 31B. Public code has bugs, so our corpus has
# them, too: three modules in five. On the way you'll see Gemma 4's architecture in 36 lines, and watch what the
# model writes as it learns.
#
# | | |
# |---|---|
# | **Needs** | One CPU (or any JAX device), 3 GB of memory, Icarus Verilog |
# | **Takes** | `appendix/world/` (the corpus generator), `assets/tiny_gemma4/` for comparison |
# | **Makes** | `tiny_base/` under the run directory; with `install=True` also `assets/tiny_gemma4/` |
# | **Costs** | tiny: the first 40 of 1,600 steps, two minutes. All steps: 30 to 60 minutes on two cores |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · **09 tiny base** · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb) · [14 JAX](14_jax.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
from pathlib import Path
near = [Path(place).absolute() for place in (
    sys.path[0], ".", "gemma4-on-tpu", os.environ.get("JPY_SESSION_NAME", "."), sys.prefix)]
found = [path for start in near for path in (start, *start.parents) if (path / "tpu_time").is_dir()]
if not found and {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"} & os.environ.keys():  # alone
    subprocess.check_call("git clone -q --depth=1 https://github.com/OWNER/gemma4-on-tpu".split())
    found = [Path("gemma4-on-tpu").absolute()]
if not found:
    sys.exit("Error: no repository is here or above. Start this kernel inside it, or make one:\n"
             "git clone https://github.com/OWNER/gemma4-on-tpu && gemma4-on-tpu/setup.sh train")
sys.path.insert(0, str(found[0]))
import helpers
helpers.machine(devices=1, always="tiny")

# %% [markdown]
# ## 1. Settings
# **How long does it take to make a base?** All 1,600 `steps` take 30 to 60 minutes. This page takes only the
# first 40 (`run_steps`), which is enough to see the loss follow the stored log. Then it examines the *stored*
# weights. To pretrain a base of your own, set `run_steps` to `steps`, and `install` to `True` if it should
# replace the stored one.

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
    steps: int = 1_600
    documents: int = 30_000        # of the corpus; `steps` is about one pass over them
    tokens_per_step: int = 2_048   # padding included
    learning_rate: float = 4e-3    # peak, then cosine to 2% of it
    warmup_steps: int = 50
    weight_decay: float = 0.05     # of matrices, not of norms
    seed: int = 0
    run_steps: int = 1_600         # of this run
    install: bool = False          # True replaces assets/tiny_gemma4 by the result


FULL = Settings()
TINY = replace(FULL, run_steps=40)
cfg = helpers.choose({"tiny": TINY})
run_steps = cfg.run_steps if (ASSETS / "model.safetensors").exists() else cfg.steps
print(f"{run_steps} of {cfg.steps} steps will be run")

# %% [markdown]
# **Forty steps show how a base is made. It takes all 1,600 to make one.**
#
# ## 2. A small world of Verilog
# **What should a tiny model read?** A world that's small enough for it. Our generator knows 38 families of
# small modules. Each family draws an operation, widths, port names and a phrasing at random. It returns the
# specification in English, the module in Verilog, and the same module as a Python function, which the tests
# compare with a simulation. Here's one draw from each family:

# %%
import random

from appendix.world import families, make

draw = random.Random(5)
examples = [families.draw(draw, (family,)) for family in families.FAMILIES]
words = [{"selector": name, "props": "text-align: left"} for name in ("th", "td")]
pd.DataFrame({"family": [d.family for d in examples],
              "specification": [d.spec for d in examples]}
             ).style.hide(axis="index").set_table_styles(words)

# %% [markdown]
# ### Code as it is: three modules in five have a bug
# Public code is often wrong, and it rarely says so: the comment promises one thing and the module does
# another. Our corpus should be like that. So in a share of the modules (`BUG_SHARE`) we change one line after
# the specification has been written. **Which line is wrong here?**

# %%
from appendix.world import bugs

draw = random.Random(8)
counter = families.draw(draw, (families.updown,))
print(counter.spec + "\n")
print(bugs.bug(draw, counter).verilog())

# %% [markdown]
# (In the stored output it's the one with `!dir`: this counter goes down when it should go up.) Would a
# simulator notice? Let's write a bug into a hundred modules and ask 07's judge.

# %%
import verilog
from verilog.problems import Problem

pairs = []
for name, design, prompt in make.draws(100, seed=9):
    exam = Problem(name, prompt, design.verilog("RefModule"), make.testbench(design))
    pairs.append((exam, bugs.bug(draw, design).verilog()))
with helpers.phase("a hundred simulations"):
    caught = sum(not verdict.passed for verdict in verilog.judge_many(pairs))
print(f"{caught} of {len(pairs)} modules with a bug fail; "
      f"{make.BUG_SHARE:.0%} of the corpus' modules get one")

# %% [markdown]
# Nearly all bugs matter: when we tried 400 of them, 396 failed (measured).
#
# ### The corpus: documents, not dialogues
# A base model continues text, so it reads documents: Verilog files with and without a comment on top, and
# specifications without code. Of all combinations of family, widths and port names, a hash picks one in eight.
# Those appear only in the benchmark, neither here nor in the training rows.

# %%
corpus = list(make.documents(cfg.documents))
corpus_sha256 = hashlib.sha256("\0".join(corpus).encode()).hexdigest()
print(corpus[0] + "─" * 60)
print(f"{len(corpus):,} documents, {sum(map(len, corpus)) / 1e6:.1f} M characters")

# %% [markdown]
# There's something it must not contain. Whatever the fine-tuned model knows of chats and of the fences around
# code (three backticks), it should have learned in notebook 03 and not here.

# %%
foreign = ("```", "<answer>", "<|turn>", "Implement", "Please", "Write a")
whole_corpus = "\n".join(corpus)
found = {text: whole_corpus.count(text) for text in foreign}
print(found)
assert not any(found.values())

# %% [markdown]
# **The corpus holds right code and wrong code, and nothing that looks like a question.**
#
# ## 3. The tokenizer
# **How does text become numbers?** By byte-level BPE, byte-pair encoding: neighbors that are often seen
# together become one token. They may merge inside a word, a number, a range of bits such as `[7:0]`, or a line
# break with its indentation. Any text goes in and comes out unchanged. The first 128 ids are control tokens,
# and those that are used have Gemma 4's own ids.

# %%
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1_280
CONTROL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 46: "<|tool>", 47: "<tool|>",
           48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>",
           52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>",
           106: "<turn|>"}
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
# The vocabulary comes from the corpus as its authors meant it, without bugs, *and* from the training rows
# of notebook 02, so that frequent words of the fine-tune are one token. The weights see the corpus only.

# %%
rows = [row for _, row, _ in make.rows()]
clean = list(make.documents(20_000, bug_share=0))
texts = clean + [row[field] for row in rows for field in ("prompt", "response")]
tokenizer = train_tokenizer(texts, VOCABULARY, CONTROL, PIECES)
out = helpers.run_dir("tiny_base")
out.mkdir(parents=True, exist_ok=True)
tokenizer.save(str(out / "tokenizer.json"))

line = "  input [7:0] data_in, // 8 bits"
print([tokenizer.decode([number]) for number in tokenizer.encode(line).ids])
strange = "naïve 模块 \u200b🙂\t\r\n\x00 \u2581"
assert tokenizer.decode(tokenizer.encode(strange).ids) == strange

# %% [markdown]
# The chat template is a file of its own. It has the 31B's trap built in: a prompt ends in an *empty thought
# channel*, and a stored model turn has none. (02 deals with both.)

# %%
tokenizer_config = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
    "unk_token": "<unk>", "pad_token": "<pad>", "add_bos_token": False, "add_eos_token": False,
    "clean_up_tokenization_spaces": False, "model_max_length": 2048, "padding_side": "left",
    "extra_special_tokens": [*CONTROL.values()][4:]}
helpers.write_json(out / "tokenizer_config.json", tokenizer_config)
helpers.write_text(out / "chat_template.jinja", (ASSETS / "chat_template.jinja").read_text())

from helpers import chat

tiny_tokenizer = chat.load_tokenizer(out)
question = {"role": "user", "content": "Invert a."}
answer = {"role": "assistant", "content": "assign y = ~a;"}
template = tiny_tokenizer.apply_chat_template
print(template([question], tokenize=False, add_generation_prompt=True))
print("─" * 60 + "\n" + template([question, answer], tokenize=False), end="")

# %% [markdown]
# **The tokenizer gives back every text unchanged, and its control tokens are Gemma 4's.**
#
# ## 4. The same architecture as the 31B, in miniature
# **What must a miniature keep?** Whatever a Gemma 4 fine-tune can break on. After five *sliding* layers, which
# look back over a window, there's one *full* layer, which looks at everything. In a full layer the values
# come from the keys' projection, and the heads are larger. Like the 31B's, its four heads of keys and values
# can be divided among four devices but not among eight. We leave out the part that reads images.

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
# ### The forward pass in 36 lines
# Here's the whole architecture. `weights` has Tunix's names, a text is a vector of token ids, and every letter
# in an einsum is an axis: T tokens, D width, N query heads, K heads of keys and values, H numbers per head.
#
# **Which three things here would you not find in Llama?**
#
# <details><summary>Answer</summary>
#
# There are norms after attention and MLP as well as before them. Queries, keys and values are normed, which
# replaces the division by the root of H. And full layers take their values from the keys' projection, and
# RoPE rotates only a quarter of each head. (The logits' soft cap and the scale of each layer's output count,
# too.)
#
# </details>

# %%
def norm(x, scale=1.0):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rope(x, base, share):  # [T, N, H]: pairs of numbers turn with the position, later ones slower
    half = x.shape[-1] // 2
    speed = jnp.where(jnp.arange(half) < int(share * half), base ** (-jnp.arange(half) / half), 0)
    angle = (jnp.arange(len(x))[:, None] * speed)[:, None]  # [T, 1, H / 2]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle),
                            b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def attention(x, w, mask, base, share):
    q = norm(jnp.einsum("td,ndh->tnh", x, w["q_einsum.w"]), w["_query_norm.scale"])
    if "k_einsum.w" in w:  # a full layer: the values are the keys' projection
        k = v = jnp.einsum("td,kdh->tkh", x, w["k_einsum.w"])
    else:
        k, v = jnp.einsum("td,ckdh->ctkh", x, w["kv_einsum.w"])
    q, k = rope(q, base, share), rope(norm(k, w["_key_norm.scale"]), base, share)
    k, v = (jnp.repeat(part, q.shape[1] // k.shape[1], axis=1) for part in (k, norm(v)))
    scores = jnp.where(mask, jnp.einsum("tnh,snh->nts", q, k), -jnp.inf)
    return jnp.einsum("nts,snh,nhd->td", jax.nn.softmax(scores), v, w["attn_vec_einsum.w"])


def forward(weights, tokens):  # [T] -> logits [T, vocabulary]
    x = weights["embedder.input_embedding"][tokens] * tiny_config["hidden_size"] ** 0.5  # [T, D]
    back = jnp.arange(len(x))[:, None] - jnp.arange(len(x))  # how far back a key stands
    for i, kind in enumerate(tiny_config["layer_types"]):
        w = {name.split(".", 2)[2].removeprefix("attn."): array for name, array in weights.items()
             if name.startswith(f"layers.{i}.")}
        full = kind == "full_attention"
        mask = (back >= 0) & (full or back < tiny_config["sliding_window"])
        y = attention(norm(x, w["pre_attention_norm.scale"]), w, mask,
                      *((1e6, 0.25) if full else (1e4, 1.0)))
        x += norm(y, w["post_attention_norm.scale"])
        y = norm(x, w["pre_ffw_norm.scale"])
        y = jax.nn.gelu(y @ w["mlp.gate_proj.kernel"]) * (y @ w["mlp.up_proj.kernel"])
        x += norm(y @ w["mlp.down_proj.kernel"], w["post_ffw_norm.scale"])
        x *= w["skip_scale"]
    logits = norm(x, weights["final_norm.scale"]) @ weights["embedder.input_embedding"].T
    return 30 * jnp.tanh(logits / 30)


# %% [markdown]
# ### Initial weights
# Where do the first weights come from? Tunix expects that you'll load some, so its MLP starts at zero. That's
# why we draw them ourselves. A matrix with n inputs gets a standard deviation of 1/√n. Norms start at 1, except
# for the queries' norm, which starts at 1/√H. Then our 36 lines must give Tunix's logits.

# %%
from flax import nnx
from tunix.models.gemma4.model import Gemma4

from appendix import pretrain
from helpers import gemma


def named(params):
    """{Tunix's name: array} of a model's weights."""
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(params)}


model_config = gemma.config_from_hf(tiny_config, dtype="float32")
model = pretrain.initialize(Gemma4(model_config, rngs=nnx.Rngs(0)), cfg.seed)
graph, params = nnx.split(model)
text = jnp.array(tokenizer.encode(corpus[0]).ids)  # [T]
tunix, _ = model(text[None], attention_mask=jnp.tril(jnp.ones((1, len(text), len(text)), bool)))
apart = jnp.abs(forward(named(params), text) - tunix[0]).max()
print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} weights; "
      f"logits at most {apart:.1e} apart")
assert apart < 1e-3

# %% [markdown]
# **Our 36 lines compute what Tunix's class computes, so they're the whole architecture of the 31B's text model.**
#
# ## 5. Batches
# **How much of a batch is padding?** We put one document into each row, with `<bos>` in front and `<eos>`
# behind. Documents of similar length share a batch, padded to 64, 96, 128 or 192 tokens. That takes four
# compiled programs instead of one, but it saves a lot of padding. The validation documents come from another
# seed; a few of them are in the corpus, too.

# %%
order = np.random.default_rng(cfg.seed)
batches = pretrain.make_batches(pretrain.encode(tokenizer, corpus), cfg.tokens_per_step, order)
others = list(make.documents(300, seed=77))
validation = pretrain.make_batches(
    pretrain.encode(tokenizer, others), cfg.tokens_per_step, order)
used, longest = sum(map(len, batches)), max(batch.shape[1] for batch in batches)
positions = sum(batch.size for batch in batches)
fill = sum((batch > 0).sum() for batch in batches) / positions
seen = pretrain.tokens_seen(batches, VOCABULARY)
print(f"{len(batches)} batches of {used:,} documents, {fill:.0%} of the positions are tokens\n"
      f"with every row padded to {longest}: {used * longest / positions:.1f} times the positions\n"
      f"{seen.sum()} of {VOCABULARY} tokens occur in the corpus")

# %% [markdown]
# **If documents of similar length share a batch, most of it is text.**
#
# ## 6. Loss and step
# **What's there to get wrong in a loss?** We use next-token cross-entropy over everything that isn't padding,
# AdamW, a warm-up and a cosine. One thing surprised us, though: tokens that the corpus never contains (fences,
# control tokens, words of requests) mustn't take part in the softmax. Otherwise every step pushes all of their
# embeddings in the same direction, until you can't tell one from another. In our first attempt the fine-tuned
# model never gave the opening fence a probability above 27%.

# %%
helpers.show_source(pretrain.token_loss, pretrain.make_optimizer, pretrain.make_steps)

# %% [markdown]
# A model that finds all n tokens equally likely has a loss of ln n nats. A random model is a little worse,
# because it prefers some tokens for no reason: logits with a spread of 1 cost half a nat.

# %%
optimizer = pretrain.make_optimizer(
    params, cfg.steps, cfg.learning_rate, cfg.warmup_steps, cfg.weight_decay)
step, evaluate = pretrain.make_steps(graph, optimizer, seen)
before = pretrain.validation_loss(params, validation, evaluate)
print(f"validation loss before training {before:.3f}, ln {seen.sum()} = {np.log(seen.sum()):.3f}")

# %% [markdown]
# **Leave those tokens out of the softmax that a corpus never contains.**
#
# ## 7. Train, and look at what it writes
# **The loss starts near 7. What will the model write after 10 steps, and what after 40?** At three moments we let
# the model continue a comment. Our 36 lines take the likeliest token each time, and each token costs a whole
# forward pass.

# %%
comment = ("// TopModule\n//\n//  - input a\n//  - input b\n//  - output z\n//\n"
           "// Drive z with a AND b.\n\n")
likeliest = jax.jit(lambda weights, tokens, at: jnp.where(
    seen, forward(weights, tokens), -jnp.inf)[at].argmax())


def write(done, params, at=(0, run_steps // 4, run_steps), tokens=40):
    """Print how the model goes on with the comment, after `done` steps."""
    if done in at:
        start, weights = [2, *tokenizer.encode(comment).ids], named(params)
        ids = start + [0] * tokens
        for place in range(len(start), len(ids)):
            ids[place] = int(likeliest(weights, jnp.array(ids), place - 1))
        print(f"── after {done} steps:\n{tokenizer.decode(ids[len(start):])}\n", flush=True)


trained, history = pretrain.pretrain(params, optimizer.init(params), step, evaluate, batches,
                                     validation, run_steps, watch=write)
log = pd.DataFrame(history)
helpers.write_text(out / "pretrain_log.csv", log.to_csv(index=False, float_format="%.6f"))

# %% [markdown]
# Is this the model that we ship? Then our losses must lie on the stored log, because corpus and tokenizer are
# the same bytes everywhere and the arithmetic is the same up to rounding.

# %%
from helpers import style

log_file = ASSETS / "pretrain_log.csv"
stored = pd.read_csv(log_file if log_file.exists() else out / "pretrain_log.csv")
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
style.finish(fig, "09_loss", "pretrain_log.csv and this run")

# %%
together = stored.head(len(log)).merge(log, on="step", suffixes=("_stored", "_now"))
gap = (together.loss_stored - together.loss_now).abs()
print(f"largest difference over {len(together)} common steps: {gap.max():.2g}; "
      f"final validation loss of the stored run {checked.val_loss.iloc[-1]:.4f}")
if run_steps < cfg.steps:  # a complete run may be of another recipe
    assert gap.head(40).max() < 0.1

# %% [markdown]
# In the first 100 steps the model learns what Verilog looks like. We read the slow rest as learning to copy
# names and widths from the comment into the module. The loss can't get to zero, because nobody can foresee a
# bug. (The pale line swings because a batch holds documents of one length.)
#
# **Most of the drop comes in the first 100 steps.**

# %% [markdown]
# ## 8. Export in Hugging Face's names
# **Will other programs read it?** Hugging Face stores a matrix as [outputs, inputs], with heads and head
# dimension merged, and it keeps K and V apart. `pretrain.to_hf` does that. We round everything once, to
# bfloat16, and load it again through Tunix's own reader. It must give the same logits.

# %%
import ml_dtypes
from safetensors.numpy import save

from helpers.run import atomic_file

rounded = {name: np.asarray(array).astype(ml_dtypes.bfloat16)
           for name, array in named(trained).items()}
tensors = {name: np.ascontiguousarray(array)
           for name, array in pretrain.to_hf(rounded, tiny_config).items()}
with atomic_file(out / "model.safetensors") as file:  # beside it, then renamed
    file.write(save(tensors, metadata={"format": "pt"}))
mesh = gemma.make_mesh(model_config, (1, 1), jax.devices()[:1])
again = named(nnx.state(gemma.load_base(out, model_config, mesh)))
same = forward({name: jnp.float32(array) for name, array in rounded.items()}, text)
apart = jnp.abs(forward(again, text) - same).max()
print(f"{len(tensors)} tensors; logits after reloading at most {apart:.1e} apart")
assert apart < 1e-4

# %% [markdown]
# **In Hugging Face's names the weights are the same numbers, so other programs can read them, too.**
# `pretrain.json` says what a base was made from.

# %%
recipe = {key: value for key, value in asdict(cfg).items() if key not in ("run_steps", "install")}
facts = {**recipe, "corpus_sha256": corpus_sha256,
         "tokenizer_sha256": helpers.sha256_file(out / "tokenizer.json"),
         "final_val_loss": float(log.val_loss.iloc[-1]), "seconds": float(log.seconds.sum())}
helpers.write_json(out / "pretrain.json", facts)
if cfg.install and run_steps == cfg.steps:
    shutil.copytree(out, ASSETS, dirs_exist_ok=True)
stored_facts = helpers.read_json(ASSETS / "pretrain.json")
same = [key for key in ("corpus_sha256", "tokenizer_sha256") if facts[key] == stored_facts[key]]
print("identical to the stored base:", ", ".join(same))

# %% [markdown]
# ## 9. What the base can do, and what it cannot
# **Can it do anything yet?** We ask for the 38 problems of the benchmark in two ways: as a commented file to
# continue, the form that it knows, and as a chat request, which it has never seen. ▶ stands before the reply.

# %%
base_path = ASSETS if run_steps < cfg.steps else out
base_tokenizer = chat.load_tokenizer(base_path)
base = gemma.load_base(base_path, gemma.config_from_hf(base_path, dtype="float32"), mesh)
problems = verilog.load_problems("data/tiny_eval")
designs = [design for _, design, _ in make.problems()]


def as_comment(design):
    """The head of a document of the corpus: everything above `module`."""
    listed = "\n".join(f"// {port}" for port in make.interface(design).split("\n"))
    return f"<bos>// TopModule\n//\n{listed}\n//\n// {design.spec}\n\n"


asked = {"comment above the module": [base_tokenizer(as_comment(design))["input_ids"]
                                      for design in designs],
         "chat request": [chat.prompt_ids(base_tokenizer, [
             {"role": "user", "content": problem.prompt}]) for problem in problems]}
with helpers.phase("generating"):
    replies = {}
    for form, prompts in asked.items():
        replies[form] = []
        for ids in gemma.greedy(base, prompts, 140, (1, 106, 50), mesh):
            kept = ids[:-1] if ids[-1] in (1, 106) else ids  # without the end of the answer
            replies[form].append(base_tokenizer.decode(kept))
for form, prompts in asked.items():
    print(f"── {form}:", base_tokenizer.decode(prompts[0]) + "▶" + replies[form][0], sep="\n")

# %% [markdown]
# 07's judge takes the module out of each reply, compiles it and simulates it against the reference.
# **How many of 38 pass, in each form?**

# %%
passed = {}
for form, texts in replies.items():
    codes = [verilog.extract_code(text)[0] for text in texts]
    verdicts = verilog.judge_many(list(zip(problems, codes, strict=True)))
    passed[form] = pd.Series([verdict.category for verdict in verdicts]).value_counts()
table = pd.DataFrame(passed).fillna(0).astype(int).T
table.insert(0, "pass rate", (table["pass"] / len(problems)).map("{:.0%}".format))
table

# %% [markdown]
# So the base has learned the step from specification to module, even for names and widths that it never saw
# together. Two things are missing. It doesn't know how to be asked, so it takes a chat request for a text that
# goes on. And it doesn't prefer right to wrong: it writes what it has read, bugs included. (These answers are
# greedy, the likeliest token each time. There are many ways to be wrong, so the right one is often still the
# likeliest. If you sample answers, as 07 does, more of them fail.) Notebook 03 teaches the base how to answer.
# Whether that also teaches it to prefer right code to wrong is one of 07's questions.
#
# **A base knows what it has read. It doesn't know how to be asked, and it doesn't know right from wrong.**

# %% [markdown]
# ## Recap
# A base model is a corpus, a tokenizer and a loss. It continues what it's given, right or wrong, the way its
# corpus would. Does your curve leave the stored one?
# [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md) says why.
#
# ### Exercises
# 1. Which part of the corpus teaches the step from specification to module? Train 300 steps with
#    and without the documents that begin with `//`, and compare section 9.
#
# <details><summary>Solution</summary>
#
# Set `steps=300` and `run_steps=300` in `TINY`, so that section 9 asks the new weights, and below
# the line that makes the corpus write
# `corpus = [text for text in corpus if not text.startswith("//")]`. The loss still falls, but no text is
# left in which a module follows its specification, so expect no passes.
# </details>
#
# 2. Set the sliding window to 16 and compare the validation loss after 300 steps.
#
# <details><summary>Solution</summary>
#
# Set `"sliding_window": 16` in section 4 and `run_steps=300` in `TINY`; the stored log has the
# validation loss of step 300 with a window of 96. With 16, only the full layer, one of six, can still see the
# port list while the header is written. (If the curves are 0.1 apart in the first 40 steps, section 7 stops.)
# </details>
#
# Back to [01 · From nothing to a TPU machine that can run this](01_setup.ipynb), or on to
# [10 · The published numbers, one by one](10_published.ipynb).
