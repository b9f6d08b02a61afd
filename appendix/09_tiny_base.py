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
# 3.65 million weights, in the same Tunix class that holds the 31B. You'll see Gemma 4's architecture in 36 lines
# and watch what the model writes as it learns. And since public code has bugs, our corpus has them, too: two
# modules in five.
#
# | | |
# |---|---|
# | **Needs** | One CPU (or any JAX device), 3 GB of memory, Icarus Verilog |
# | **Reads** | `appendix/world/` (the corpus generator), `assets/tiny_gemma4/` for comparison |
# | **Writes** | `tiny_base/` under the run directory; with `install=True` also `assets/tiny_gemma4/` |
# | **Time and cost** | tiny: the first 40 of 1,600 steps; the page takes five to six minutes. All steps: about an hour on two cores (69 minutes for the stored base, beside other work) |

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
# **How long does it take to make a base?** All 1,600 `steps` take about an hour, so this page takes the first 40
# (`run_steps`) and then examines the *stored* weights. For a base of your own set `run_steps` to `steps`, and `install`
# to `True` if it should replace the stored one.

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
    install: bool = False          # True replaces assets/tiny_gemma4 with the result


FULL = Settings()
TINY = replace(FULL, run_steps=40)
cfg = helpers.choose({"tiny": TINY})
run_steps = cfg.run_steps if (ASSETS / "model.safetensors").exists() else cfg.steps
print(f"{run_steps} of {cfg.steps} steps will be run")

# %% [markdown]
# **Forty steps show how a base is made. The result of all 1,600 is stored.**
#
# ## 2. A small world of Verilog
# **What should a tiny model read?** A world that's small enough for it. Our generator knows 38 families of
# small modules. It picks the operation, the widths, the port names and the phrasing at random. Then it writes a
# specification in English and the Verilog that belongs to it. (It also writes a Python function that computes the same.
# Our tests compare that function with a simulation of the Verilog.) Here's one draw from each family:

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
# ### Code as it is: two modules in five have a bug
# Public code is often wrong: the comment promises one thing and the module does another. So in a share of our
# modules (`BUG_SHARE`) we change one line of the code, and the specification stays as it is. **Which line is wrong
# here?**

# %%
from appendix.world import bugs

draw = random.Random(8)
counter = families.draw(draw, (families.updown,))
print(counter.spec + "\n")
print(bugs.bug(draw, counter).verilog())
print(f"{make.BUG_SHARE:.0%} of the modules in the corpus get a bug")

# %% [markdown]
# (It's the one with `!dir`.) A simulator nearly always notices: when [07](07_eval.ipynb)'s judge simulated 400 such
# modules, 396 failed.
#
# ### The corpus: documents, not dialogues
# **What should a base see, and what mustn't it see?** A base model continues text, so it reads documents: Verilog files
# with and without a comment on top, and specifications without code. It mustn't see a chat, or a fence around code
# (three backticks), because notebook 03 is supposed to teach those. And it never sees one in eight combinations of
# family, widths and port names, because those are kept for the benchmark. (A hash decides which.)

# %%
corpus = list(make.documents(cfg.documents))
corpus_sha256 = hashlib.sha256("\0".join(corpus).encode()).hexdigest()
print(corpus[0] + "─" * 60)
print(f"{len(corpus):,} documents, {sum(map(len, corpus)) / 1e6:.1f} M characters")
for foreign in ("```", "<answer>", "<|turn>", "Implement", "Please", "Write a"):
    assert not any(foreign in document for document in corpus)

# %% [markdown]
# **Look again at the document above. Is it right?** (It adds b to itself, so it's one of the two in five.)
#
# **The corpus holds right code and wrong code, and nothing that looks like a question.**
#
# ## 3. The tokenizer
# **How does text become numbers?** By *byte-pair encoding* (BPE). It begins with one token for each byte, so it can
# write any text. Then it makes two neighbors that are often seen together into one token, again and again, until the
# vocabulary is full. Neighbors merge only inside one of the `PIECES`: a word, a number, a range of bits such as
# `[7:0]`, or a line break with its indentation. The first 128 ids are set aside for control tokens such as `<turn|>`,
# which have the same ids as in Gemma 4.
#
# The tokenizer learns from the corpus without its bugs, *and* from the training rows of notebook 02, so that frequent
# words of the fine-tune are one token. (The model learns from the corpus only.)

# %%
from appendix import pretrain
from helpers import style

VOCABULARY = 1_280
PIECES = (r"\n *| ?\[[0-9]+:0\]|[0-9]{1,3}| ?[A-Za-z_][A-Za-z0-9_]*"
          r"| ?[^\sA-Za-z0-9_]+| +(?= )|\s")

texts = list(make.documents(20_000, bug_share=0))
for _, row, _ in make.rows():
    texts += [row["prompt"], row["response"]]
tokenizer = pretrain.train_tokenizer(texts, VOCABULARY, PIECES)
out = helpers.run_dir("tiny_base")
pretrain.save_tokenizer(tokenizer, ASSETS / "chat_template.jinja", out)

# %%
line = "  input [7:0] data_in, // 8 bits"
print([tokenizer.decode([number]) for number in tokenizer.encode(line).ids])
strange = "naïve 模块 \u200b🙂\t\r\n\x00 \u2581"
assert tokenizer.decode(tokenizer.encode(strange).ids) == strange
style.fold_source("train_tokenizer: BPE behind 128 control tokens", pretrain.train_tokenizer)

# %% [markdown]
# Beside the tokenizer we store a chat template that has the 31B's trap built in: a prompt that asks for an answer ends
# in an *empty thought channel*, but an answer in a stored chat doesn't begin with one ([02](02_data.ipynb) deals with
# both).
#
# **The tokenizer gives back every text unchanged, and its control tokens are Gemma 4's.**
#
# ## 4. The same architecture as the 31B, in miniature
# **What must a miniature keep?** Whatever a Gemma 4 fine-tune can break on. So we take the 31B's own config and
# change only its sizes, and which tokens end a text. After five *sliding* layers, which look back over a window,
# there's one *full* layer, which looks at everything. As in the 31B, a full layer's four heads of keys and values can
# be divided among four devices but not among eight. We leave out the part that reads images.

# %%
big_config = helpers.read_json("data/configs/gemma4_31b.json")["text_config"]
smaller = {
    "vocab_size": VOCABULARY, "hidden_size": 160, "intermediate_size": 640,
    "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 32, "global_head_dim": 64, "sliding_window": 96,
    "max_position_embeddings": 2048, "vocab_size_per_layer_input": VOCABULARY}
tiny_config = big_config | smaller | {
    "architectures": ["Gemma4ForCausalLM"], "layer_types": big_config["layer_types"][:6],
    "eos_token_id": pretrain.STOPS, "initializer_range": 0.02}
shown = [*smaller, "num_global_key_value_heads", "attention_k_eq_v", "final_logit_softcapping"]
pd.DataFrame({"tiny": tiny_config, "31B": big_config}).loc[shown]

# %% [markdown]
# ### The forward pass in 36 lines
# **What exactly does a Gemma 4 compute?** Here's all of it, from token ids to logits. `weights` has Tunix's names, a
# text is a vector of token ids, and every letter in an einsum is an axis: `t` tokens, `d` width, `n` query heads, `k`
# heads of keys and values, `h` numbers per head. (`s` means tokens, too, those that are looked at, and `c` is keys or
# values. The shapes in the comments have the same letters as capitals.) *RoPE*, the function `rope`, writes a token's
# position into queries and keys by rotating pairs of their numbers.

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
# **If you know Llama: what here would you not find there?**
#
# <details><summary>Answer</summary>
#
# - Attention and MLP have a norm behind them, as well as the one before them.
# - Queries, keys and values have norms, in place of the division by the root of H.
# - Most layers are sliding ones. In the full ones the values are the keys' projection, and RoPE rotates only a quarter
#   of each head.
# - The logits have a *soft cap*, which squeezes them into −30 to 30.
# - Each layer's output is multiplied by a number (`skip_scale`), and the embeddings by the root of D.
# - The MLP's gate is GELU. Llama's is SiLU.
#
# </details>
#
# Is that all? Then these lines must give Tunix's logits. We draw the first weights ourselves, because Tunix lets the
# MLP start at zero. A matrix with n inputs gets a standard deviation of 1/√n. Norms start at 1, the queries' norm at
# 1/√H.

# %%
from flax import nnx
from tunix.models.gemma4.model import Gemma4

from helpers import gemma

model_config = gemma.config_from_hf(tiny_config, dtype="float32")
model = pretrain.initialize(Gemma4(model_config, rngs=nnx.Rngs(0)), cfg.seed)
graph, params = nnx.split(model)
text = jnp.array(tokenizer.encode(corpus[0]).ids)  # [T]
tunix, _ = model(text[None], attention_mask=jnp.tril(jnp.ones((1, len(text), len(text)), bool)))
apart = jnp.abs(forward(pretrain.named(params), text) - tunix[0]).max()
print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} weights; "
      f"logits at most {apart:.1e} apart")
assert apart < 1e-3

# %% [markdown]
# **Our 36 lines compute what Tunix's class computes. They're the whole architecture of the 31B's text model.**
#
# ## 5. Batches and a loss
# **How much of a batch is padding?** We don't pack here, as 02 does, but put one document into each row, with `<bos>`
# in front and `<eos>` behind. So no row needs segment ids. Documents of similar length share a batch, padded to 64, 96,
# 128 or 192 tokens. That takes four compiled programs instead of one, but it saves a lot of padding. (For validation
# the generator draws 300 more documents. A few of these are in the corpus, too.)

# %%
order = np.random.default_rng(cfg.seed)
batches = pretrain.make_batches(pretrain.encode(tokenizer, corpus), cfg.tokens_per_step, order)
others = list(make.documents(300, seed=77))
validation = pretrain.make_batches(
    pretrain.encode(tokenizer, others), cfg.tokens_per_step, order)
positions = sum(batch.size for batch in batches)
fill = sum((batch > 0).sum() for batch in batches) / positions
padded = sum(map(len, batches)) * max(pretrain.LENGTHS) / positions
seen = pretrain.tokens_seen(batches, VOCABULARY)
print(f"{len(batches)} batches; {fill:.0%} of their positions are tokens\n"
      f"with every row padded to {max(pretrain.LENGTHS)}: {padded:.1f} times the positions\n"
      f"{seen.sum()} of {VOCABULARY} tokens occur in the corpus")

# %% [markdown]
# **And what's there to get wrong in a loss?** It's next-token cross-entropy over everything that isn't padding.
# But one thing surprised us: tokens that the corpus never contains (fences, control tokens, words of requests)
# mustn't take part in the softmax. Otherwise every step pushes all of their embeddings in the same direction. In our
# first attempt that's what happened, and the fine-tuned model then hardly found the opening fence. **Can you find the
# line that prevents it?**

# %%
helpers.show_source(pretrain.token_loss)
style.fold_source("AdamW with a warm-up and a cosine, and the step",
                  pretrain.make_optimizer, pretrain.make_steps)
optimizer = pretrain.make_optimizer(
    params, cfg.steps, cfg.learning_rate, cfg.warmup_steps, cfg.weight_decay)
step, evaluate = pretrain.make_steps(graph, optimizer, seen)
before = pretrain.validation_loss(params, validation, evaluate)
print(f"validation loss before training {before:.3f}, ln {seen.sum()} = {np.log(seen.sum()):.3f}")

# %% [markdown]
# (It's the line with `seen`.) A model that finds all n tokens equally likely has a loss of ln n nats. A random one is
# a little worse, because it prefers some tokens for no reason: if its logits have a standard deviation of 1, the loss is
# half a nat higher.
#
# **If a token never occurs in your corpus, leave it out of the softmax.**
#
# ## 6. Train, and look at what it writes
# **What will the model write after 10 steps, and what after 40?** At three moments our 36 lines continue a comment,
# always with the likeliest token.

# %%
comment = ("// TopModule\n//\n//  - input a\n//  - input b\n//  - output z\n//\n"
           "// Drive z with a AND b.\n\n")
likeliest = jax.jit(lambda weights, tokens, at: jnp.where(
    seen, forward(weights, tokens), -jnp.inf)[at].argmax())


def write(done, params, at=(0, run_steps // 4, run_steps), tokens=40):
    """Print how the model goes on with the comment, after `done` steps."""
    if done in at:
        start, weights = [2, *tokenizer.encode(comment).ids], pretrain.named(params)
        ids = start + [0] * tokens
        for place in range(len(start), len(ids)):
            ids[place] = int(likeliest(weights, jnp.array(ids), place - 1))
        print(f"── after {done} steps:\n{tokenizer.decode(ids[len(start):])}\n", flush=True)


unfinished = pretrain.Unfinished(out / "unfinished.npz", f"{cfg} {corpus_sha256}")
trained, history = pretrain.pretrain(
    params, optimizer.init(params), step, evaluate, batches, validation, run_steps, watch=write,
    unfinished=unfinished)  # killed? Then run this cell again
log = pd.DataFrame(history)
helpers.write_text(out / "pretrain_log.csv", log.to_csv(index=False, float_format="%.6f"))

# %% [markdown]
# After 40 steps it only repeats lines of a comment. That's as far as this short run goes. Section 8 asks the stored base,
# after all 1,600. (If the loss jumps up for a step, nothing is wrong. Each batch holds documents of about one length, and
# the shortest ones are the hardest to predict.)
#
# Is this the model that we ship? Then this run has to reproduce the stored losses, because the corpus and the tokenizer
# are the same bytes everywhere, and the arithmetic is the same up to rounding.

# %%
log_file = ASSETS / "pretrain_log.csv"
stored = pd.read_csv(log_file if log_file.exists() else out / "pretrain_log.csv")
checked = stored.dropna(subset="val_loss")
fig, ax = style.figure(7.5, 3.8)
ax.plot(stored.step, stored.loss, color=style.SKY, lw=1, label="stored run, each step")
ax.plot(checked.step, checked.val_loss, "D", ms=5, color=style.BLACK, mfc="white",
        label="its validation")
ax.plot(log.step, log.loss, ".", ms=6, color=style.RED, label="this run")
begin, soon, end = stored.loss[0], *checked.val_loss.iloc[[0, -1]]
ax.set(xscale="log", xlabel="step", ylabel="loss per token, nats", ylim=(0, None),
       title=f"{(begin - soon) / (begin - end):.0%} of the drop comes in the first "
             f"{checked.step.iloc[0]} steps")
ax.set_xticks([1, 10, 100, 1_000], ["1", "10", "100", "1,000"])
ax.legend(fontsize=9)
style.finish(fig, "09_loss", "pretrain_log.csv and this run")

# %%
gap = (stored.loss.head(len(log)) - log.loss).abs()
print(f"this run and the stored one are at most {gap.max():.2g} apart; "
      f"final validation loss of the stored run {checked.val_loss.iloc[-1]:.4f}")
if run_steps < cfg.steps:  # a complete run may be of another recipe
    assert gap.head(40).max() < 0.1

# %% [markdown]
# **Most of the drop comes in the first 100 steps.** There the model learns what Verilog looks like. We think that in the
# slow rest it learns to copy names and widths from the comment. The loss can't get to zero, because nobody can predict a
# bug, or which module, names and widths the generator will draw next.
#
# ## 7. Export in Hugging Face's names
# **Will other programs read it?** Hugging Face stores a matrix as [outputs, inputs], with heads and head
# dimension merged and with K and V apart. `pretrain.export` writes that, rounded to bfloat16. Loaded again through
# Tunix's own reader, the weights must give the same logits.

# %%
rounded = pretrain.export(trained, tiny_config, out)
mesh = gemma.make_mesh(model_config, (1, 1), jax.devices()[:1])
again = pretrain.named(nnx.state(gemma.load_base(out, model_config, mesh)))
same = forward({name: jnp.float32(array) for name, array in rounded.items()}, text)
apart = jnp.abs(forward(again, text) - same).max()
print(f"logits after reloading at most {apart:.1e} apart")
assert apart < 1e-4

# %% [markdown]
# A file beside the weights, `pretrain.json`, says what a base was made from:

# %%
facts = {**asdict(cfg), "corpus_sha256": corpus_sha256,
         "tokenizer_sha256": helpers.sha256_file(out / "tokenizer.json"),
         "final_val_loss": float(log.val_loss.iloc[-1]), "seconds": float(log.seconds.sum())}
helpers.write_json(out / "pretrain.json", facts)
if cfg.install and run_steps == cfg.steps:
    shutil.copytree(out, ASSETS, dirs_exist_ok=True)
stored_facts = helpers.read_json(ASSETS / "pretrain.json")
same = [key for key in ("corpus_sha256", "tokenizer_sha256") if facts[key] == stored_facts[key]]
print("identical to the stored base:", ", ".join(same))

# %% [markdown]
# **Hugging Face's names and shapes make the weights readable for other programs.**
#
# ## 8. What the base can do, and what it cannot
# **Can it do anything yet?** We ask the benchmark's 38 problems in two ways: as a commented file to continue, the form
# that it knows, and as a chat request, which it has never seen. ▶ stands before the reply.

# %%
import verilog
from helpers import chat
from verilog.asking import messages_for, text_to_continue

base_path = ASSETS if run_steps < cfg.steps else out
base_tokenizer = chat.load_tokenizer(base_path)
base = gemma.load_base(base_path, gemma.config_from_hf(base_path, dtype="float32"), mesh)
problems = verilog.load_problems("data/tiny_eval")

asked = {"comment above the module": [], "chat request": []}
for problem in problems:
    asked["comment above the module"].append(
        base_tokenizer("<bos>" + text_to_continue(problem, "comment"))["input_ids"])
    asked["chat request"].append(
        chat.prompt_ids(base_tokenizer, messages_for(problem, "ours", None)))
replies = {}
with helpers.phase("generating"):
    for form, prompts in asked.items():
        answers = gemma.greedy(base, prompts, 140, pretrain.STOPS, mesh)
        replies[form] = base_tokenizer.batch_decode(answers, skip_special_tokens=True)
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
pd.DataFrame(passed).fillna(0).astype(int).T

# %% [markdown]
# Most pass as a comment to continue, and none as a chat request. So the base has learned the step from specification to
# module, even for names and widths that it never saw together. Two things are missing:
#
# - It doesn't answer a chat request, it continues it.
# - It writes what it has read, bugs included. (You see few bugs in these answers, because they take the likeliest
#   token each time. A line can be wrong in many ways, so the right line is usually likelier than any single bug.)
#
# Notebook 03 teaches the base how to answer. Whether that also teaches it to prefer right code is one of 07's questions.
# (If 07 also takes the likeliest token each time, it may count one more or one fewer for the same base. It asks through
# a server that rounds differently, which can tip a token. 07's main score for the base is lower, because there the tokens
# are drawn at random, so more of the bugs show up.)
#
# **A base knows what it has read. It doesn't know how to be asked, and it doesn't know right from wrong.**
#
# ## Recap
# - You can make a base of your own: a corpus, a tokenizer with Gemma 4's control tokens, and the 31B's config with
#   smaller sizes.
# - You've read the architecture of the 31B's text model line by line, and checked your lines against Tunix's class.
# - Tokens that never occur in the corpus stay out of the softmax, so that a later fine-tune can still learn them.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md), which also says why
# your losses in section 6 may differ from the stored ones.
#
# ### Exercises
# 1. Break one of the 36 lines: leave out the norm of the values, the sliding window, or the soft cap of the logits,
#    and run section 4's last two cells. Guess first: which change moves the logits least?
#
# <details><summary>Solution</summary>
#
# Replace `norm(v)` with `v`, `full or back < …` with `True`, or `30 * jnp.tanh(logits / 30)` with `logits`. All three trip
# the check: on our CPU the logits move by up to 0.70, 0.52 and 0.08. The window moves them although the text has only
# 103 tokens, so just the last seven notice. The soft cap moves them least, because it only bends large logits, and a
# fresh model has none. A trained model has some, so check with trained weights, too.
# </details>
#
# 2. The comment of section 6 asks for AND, and a module has come as far as `assign z = a`. How likely does the stored
#    base find `&`, and what comes second? Guess with the help of `BUG_SHARE`.
#
# <details><summary>Solution</summary>
#
# ```python
# begun = "<bos>" + comment + """module TopModule (
#   input a,
#   input b,
#   output z
# );
#   assign z = a"""
# ids = jnp.array(base_tokenizer(begun)["input_ids"])
# weights = {name: jnp.float32(w) for name, w in pretrain.named(nnx.state(base)).items()}
# shares = jax.nn.softmax(jnp.where(seen, forward(weights, ids)[-1], -jnp.inf))
# for number in shares.argsort()[::-1][:3]:
#     print(repr(base_tokenizer.decode([int(number)])), f"{shares[number]:.0%}")
# ```
#
# Our stored base gives `&` 64%, roughly the share of modules without a bug, and `|` 34%, nearly all of the rest. The
# base writes what it has read, as often as it has read it.
# </details>
#
# Back to [01 · From nothing to a TPU machine that can run this](01_setup.ipynb), or on to
# [10 · The published numbers, one by one](10_published.ipynb).
