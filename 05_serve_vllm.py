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
# it, explain its command flag by flag, and prove that it computes on the very tokens we trained on.
#
# | | |
# |---|---|
# | **Needs** | 31b: a v6e-8 with Docker. e2b: one v6e chip with Docker, which Colab does not offer. tiny: two CPU cores, 4 GB of memory, Linux on x86-64 |
# | **Reads** | `merged/`, `adapter/` and `merge.json` of 04; `data/samples.json` of 02 |
# | **Writes** | a running server; `serve/options.json` (what 06 and 07 follow), `serve/server.json` (process, port, command), `serve/server.log`, `serve/docker-compose.yml` |
# | **Time and cost** | tiny: one to two minutes. 31b: about 10 minutes until the first answer (published), 3.59 USD at 21.52 USD/h; 2 to 3 minutes when the compile cache is warm (our estimate) |
#
# The outputs shown are those of the tiny run on two CPU cores. What only a TPU can do is printed as
# the command to run there; vLLM's own parser has read every flag of it, no TPU of ours has. Terms
# are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · **05 serve** · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
found = [p for p in (sys.path[0], ".", "..", "gemma4-on-tpu") if os.path.isdir(f"{p}/tpu_time")]
if not found:  # a notebook that was opened alone, as Colab opens it
    subprocess.check_call("git clone -q --depth=1 https://github.com/OWNER/gemma4-on-tpu".split())
sys.path.insert(0, os.path.abspath((found or ["gemma4-on-tpu"])[0]))
import helpers
helpers.machine()

# %% [markdown]
# ## 1. Settings
# **vLLM** is a server program: it loads a model once and answers requests over HTTP. **Prefill**
# reads a prompt, all its tokens at once; **decode** then makes one token per step. The steps of all
# requests are computed together, and requests come and go between two steps (**continuous
# batching**). That is what a server does better than a loop over `generate`.
#
# The engine decides what runs: `tpu-docker` and `gpu-docker` start a container, `cpu` starts vLLM's
# CPU build. Every cell after the start is the same for all three. Underneath, vLLM runs JAX models
# on a TPU and PyTorch models elsewhere. These settings are the only place that says what the server
# is. 06 takes its floors and its price from them, and 07 its server and the base.

# %%
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import yaml
from IPython.display import display
from openai import OpenAI

from helpers import charts, chat, remote, style, weights
from serving import flags, physics, server
from tables import published
from tables.hardware import chip

pd.set_option("display.max_colwidth", None)


# %%
@dataclass(frozen=True)
class Settings:
    engine: str = "tpu-docker"      # or "gpu-docker", "cpu"
    name: str = "gemma4-verilog"    # what clients ask for
    port: int = 8000                # 0: any free port
    host: str = "127.0.0.1"         # only this machine; section 9 says what another one exposes
    max_model_len: int = 16_384     # prompt + answer, tokens; 06 needs 15,360 + 512
    max_num_batched_tokens: int = 2048  # of one step; a longer prompt takes several (section 6)
    tensor_parallel: int = 8        # chips that share every matrix
    data_parallel: int = 1          # copies of the model
    kv_cache_dtype: str = "auto"    # auto: bfloat16, as the model; or "fp8"
    quantization: str = ""          # weights: "" as merged, bfloat16; or "fp8", "int8" (section 5)
    implementation: str = ""        # on a TPU: "" is vLLM's choice, "vllm" is torchax (section 10)
    environment: tuple = ()         # variables of the server's process, "NAME=value"
    flags: tuple = ()               # further flags of `vllm serve`
    image: str = ""                 # of the container; "": the one shown in section 4
    base: str = ""                  # for 07: path, hub id or gs://; "": as in merge.json
    chip: str = "v6e"               # a name of helpers.chip, for 06; "" where none is on sale
    timeout: float = 3600.0         # seconds until healthy; a TPU compiles first
    adapter: bool = False           # also serve base + adapter beside it: a CPU has room for two


FULL = Settings(environment=("USE_BATCHED_RPA_KERNEL=1",))  # attention as upstream tests it
E2B = Settings(tensor_parallel=1, max_model_len=4096)
SECOND = replace(FULL, tensor_parallel=4, data_parallel=2, kv_cache_dtype="fp8", quantization="fp8")
TINY = Settings(engine="cpu", port=0, tensor_parallel=1, max_model_len=1024, chip="",
                timeout=600.0, adapter=True)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# ## 2. Start it
# First: is this the model that was merged? On the real machines `merged/` has travelled from the
# v5p-8 through a bucket. Half a shard gives fluent nonsense, which looks like a bad fine-tune. So
# we compare every file with the SHA-256 in `merge.json`. (62 GB take about a minute, once.) Second:
# can this machine have the base, with which 07 compares? Better asked now than hours later.

# %%
def check_merged(folder, hashes):
    """Raise unless the folder holds the files of merge.json, with the bytes they had, no more."""
    if bad := weights.verify(folder, hashes):
        raise helpers.UserError(f"{folder} is not what 04_merge wrote: {bad}. Copy it again, "
                                "or run 04_merge.")
    return len(hashes)


merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
merge = helpers.read_json(helpers.require(helpers.run_dir("merge.json"), "04_merge.py"))
recipe = merge["recipe"]
count = check_merged(merged, merge["files"])
print(f"{count} files as merged: step {merge['step']}, rank {recipe['rank']}, "
      f"base {recipe['base_model']}, model {server.model_hash(merge)[:12]}")
base = cfg.base or recipe["base_path"]
remote.check(base)  # raises where 07 could neither find nor fetch it

# %% [markdown]
# `start_as` runs the command of section 4 in the background, records it in `serve/server.json`, and
# asks `/health` until the answer is yes. A healthy server of the same files is reused. Closing this
# notebook does not end it. On a CPU a second server starts beside it, with the base model and our
# adapter: we want to compare.

# %%
def options_for(cfg, model, model_hash=""):
    """What the settings say about the server, in the form that travels to 06 and 07."""
    return server.Options(
        engine=cfg.engine, model=str(model), name=cfg.name, model_hash=model_hash, host=cfg.host,
        port=cfg.port, max_model_len=cfg.max_model_len, image=cfg.image, base=cfg.base,
        max_num_batched_tokens=cfg.max_num_batched_tokens, tensor_parallel=cfg.tensor_parallel,
        data_parallel=cfg.data_parallel, kv_cache_dtype=cfg.kv_cache_dtype,
        quantization=cfg.quantization, implementation=cfg.implementation,
        environment=cfg.environment, flags=cfg.flags, chip=cfg.chip, timeout=cfg.timeout)


# %%
server.prepare(cfg.engine)
options = options_for(cfg, merged, server.model_hash(merge))
beside = replace(options, model=merge.get("adapter_base", recipe["base_path"]),
                 name="gemma4-base", model_hash="", port=0)
side = dict(slot="adapter", adapter=helpers.run_dir("adapter"))
if cfg.adapter:
    check_merged(side["adapter"], merge["adapter_files"])
    server.start_as(beside, wait=False, **side)
try:
    record = server.start_as(options)
    other = server.start_as(beside, **side) if cfg.adapter else None
except helpers.UserError:
    server.stop("adapter")  # a failed start leaves nothing behind
    raise
server.write_options(options)  # outlives the server: 06 and 07 read it
print(f"process {record['pid']}, serving {record['model_path']} as {record['model']}, "
      f"ready after {record['ready_seconds']:.0f} s")

# %% [markdown]
# ## 3. Talk to it
# vLLM speaks OpenAI's HTTP interface, so the `openai` package is a client for it. (It wants a key;
# the server does not.) `chat_request` asks as training asked: the same system message, thinking
# only if the training answers did, and **greedy**, that is always the likeliest token.

# %%
longest = cfg.max_model_len // 2  # tokens of an answer, at the most


def ask(text, record=record, name=cfg.name):
    """The answer of a server to one request, as text."""
    client = OpenAI(base_url=record["base_url"] + "/v1", api_key="unused", max_retries=0)
    reply = client.chat.completions.create(
        **server.chat_request(text, recipe, model=name, max_tokens=longest))
    return reply.choices[0].message.content


counter = Path("data/tiny_eval/Prob031_updown_prompt.txt").read_text()
print(counter, ask(counter), sep="\n")

# %% [markdown]
# That is our up-down counter, now over HTTP. ✏️ **Your own request**: change the text, run the cell
# again. Left the base model, right the tuned one. (An accelerator has no room for both, so there
# you see the tuned one alone. The tiny model knows small modules and this way of asking: leave the
# first sentence as it is. Read its answer closely, ports included: only a judge, as in 07, knows.)

# %%
MINE = """I would like you to implement a module named TopModule with the following interface. \
All ports are one bit unless otherwise specified.

 - input a (4 bits)
 - input b (4 bits)
 - output result (4 bits)

The output result is the bitwise AND of a and b."""  # ← your own request

columns = {"tuned": ask(MINE)}
if other and server.healthy(other):
    columns = {"base": ask(MINE, other, "gemma4-base"), **columns}
style.side_by_side(columns, MINE)

# %% [markdown]
# A person would rather read along. With `stream=True` the server sends each token as soon as it has
# it. The wait for the first piece is the **time to first token** (TTFT, the prefill); the pace
# after it is the **time per output token** (TPOT, decode). One request, and the first one that is
# streamed, says little about either; notebook 06 asks often, alone and under load.

# %%
client = OpenAI(base_url=record["base_url"] + "/v1", api_key="unused", max_retries=0)
request = server.chat_request(counter, recipe, model=cfg.name, max_tokens=longest)
start, arrivals, text = time.perf_counter(), [], ""
for piece in client.chat.completions.create(**request, stream=True):
    if piece.choices and piece.choices[0].delta.content:
        arrivals.append(time.perf_counter() - start)
        text += piece.choices[0].delta.content
        print(piece.choices[0].delta.content, end="", flush=True)
gaps = (arrivals[-1] - arrivals[0]) / max(len(arrivals) - 1, 1)
print(f"\n\nfirst piece after {1e3 * arrivals[0]:.0f} ms, then one every {1e3 * gaps:.1f} ms")
assert text == ask(counter)  # streamed or not, it is the same answer

# %% [markdown]
# ## 4. The command for a v6e-8
# One function builds the command as a list, for every engine. This is what it gives for the 31B on
# eight v6e chips:

# %%
def command_for(cfg, **more):
    """The command for the 31B as this notebook would start it on a serving machine."""
    return server.command(options_for(cfg, "/dev/shm/run/merged"), results="/dev/shm/run/bench",
                          **more)


tpu = command_for(FULL)
print(server.shown(tpu))

# %% [markdown]
# `flags.explain` has a reason for every flag, first Docker's, then vLLM's. A flag that you added in
# `Settings.flags` is marked as yours.

# %%
left = [{"selector": "th, td", "props": "text-align: left"}]
display(flags.explain(tpu).rename_axis(None).style.set_table_styles(left))

# %% [markdown]
# Nothing here is specific to the tuned model: it mounts `merged/`. We have not seen this image; the
# newest that we saw used is v0.27.0. `docker manifest inspect vllm/vllm-tpu:v0.32.0` answers before
# you rent.
#
# **Text only** is not common practice. Gemma 4 can see, and with pictures on, a step on a TPU must hold
# a whole video (2,496 tokens); with our 2,048 the server may refuse to start. In a published log
# the E2B without pictures is healthy on one v6e chip after 346 s (vLLM 0.29,
# github.com/xbill9/gemma4-dev, September 2026).
#
# The same function gives the command for two H100 cards and for this CPU. For Docker Compose the
# container is a file: `docker compose up` in its folder starts the 31B's server above.

# %%
gpu = command_for(replace(FULL, engine="gpu-docker", tensor_parallel=2, chip="h100",
                          environment=(), max_num_batched_tokens=8192))
cpu = server.command(options_for(replace(TINY, port=8000), "runs/tiny/merged"))
print(server.shown(cpu))
compose_file = helpers.run_dir("serve", "docker-compose.yml")
helpers.write_text(compose_file, yaml.safe_dump(server.compose(tpu), sort_keys=False))
print(f"\n{compose_file}:\n{compose_file.read_text()[:180]}...")

# %% [markdown]
# ## 5. What fits into the memory of a chip
# A chip holds its share of the weights. The rest of what vLLM may use (92 % by default) is the **KV
# cache**: keys and values of the tokens of all requests in progress. What one token costs follows
# from `config.json`: 16 KV heads of 256 numbers in each of 50 sliding layers, 4 KV heads of 512 in
# each of 10 full ones. Those 4 **global KV heads** are the reason to think about the layout: eight
# chips that share every matrix (**tensor parallel** 8) cannot share four heads, so each is stored
# twice.
#
# A sliding layer sees only the last 1,024 tokens, but its cache keeps all: vLLM's TPU package 0.32.0
# sets `sliding_window = None` there (`runner/kv_cache_manager.py`).

# %%
config_31b = helpers.read_json("data/configs/gemma4_31b.json")
CHECKPOINT = 62.5e9  # bytes of the published 31B checkpoint, vision tower included
GIB = 2.0**30
SHARE = 0.92         # of a chip's memory that vLLM takes, unless told otherwise


def memory_plan(config, chip_bytes, tp, dp, kv_dtype_bytes, stored, windowed=False):
    """HBM per chip and the requests that fit, for one layout; sizes are per chip, in GiB."""
    left = SHARE * chip_bytes - stored / tp
    per_token = physics.kv_bytes_per_token(config, kv_dtype_bytes, tp)
    if kv_dtype_bytes == 1 and tp >= 4:  # one global head per chip: its K and V fill half of a
        per_token["full"] *= 2           # 32-bit word, which holds four fp8 numbers
    window = config["text_config"]["sliding_window"] if windowed else float("inf")
    row = {"tp": tp, "dp": dp, "bytes per KV number": kv_dtype_bytes,
           "weights": "fp8" if stored < CHECKPOINT else "bfloat16",
           "sliding layers keep": "their window" if windowed else "everything",
           "weights, GiB/chip": stored / tp / GIB, "left for KV, GiB/chip": left / GIB}
    for tokens in (4096, 16_384):
        need = per_token["sliding"] * min(tokens, window) + per_token["full"] * tokens
        row[f"requests of {tokens:,}"] = dp * int(left / (need / tp))
    return row | {"one of 16,384, GiB/chip": need / tp / GIB}


# %%
v6e = chip("v6e")
fp8 = CHECKPOINT - physics.parameters(config_31b)["matmul"]  # one byte less for each weight
layouts = ((8, 1, 2, CHECKPOINT), (4, 2, 2, CHECKPOINT), (8, 1, 1, CHECKPOINT),
           (4, 2, 1, CHECKPOINT), (4, 2, 1, fp8), (8, 1, 2, CHECKPOINT, True))
plans = [memory_plan(config_31b, v6e.hbm, *layout) for layout in layouts]
table = pd.DataFrame(plans, index=range(1, len(plans) + 1))
display(table.drop(columns="one of 16,384, GiB/chip").style.format(precision=1))

# %%
charts.draw_memory(plans, v6e.hbm, SHARE)

# %% [markdown]
# This is arithmetic. Three servers of others have logged how many tokens of the 31B fit:

# %%
# bfloat16, v6e, August 2026: github.com/xbill9/gemma4-dev, gce-vllm-v6e8-31b/benchmarks/runs. Its
# report of 2026-08-25 quotes the third from a preprint, Zimbres 2026.
MEASURED = (("vLLM 0.26.1rc1", 4, 67_392), ("image v0.26.0", 4, 67_328), ("Zimbres", 8, 187_136))
for version, tp, measured in MEASURED:
    plan = memory_plan(config_31b, v6e.hbm, tp, 1, 2, CHECKPOINT)
    fit = plan["left for KV, GiB/chip"] / plan["one of 16,384, GiB/chip"] * 16_384
    print(f"{version:14} on {tp} chips: predicted {fit:8,.0f}, measured by others {measured:8,} "
          f"({fit / measured - 1:+.1%}): {measured // 16_384} requests of 16,384")

# %% [markdown]
# One formula, without a window, gives all three. Row by row:
#
# - **1, tensor parallel 8**: our first choice, 11 long requests at once. It should start. The first
#   server above did, 12 minutes after `docker run`, on half the chips with twice our context, twice
#   our tokens a step, and pictures. *Upstream*, which brings vLLM to TPUs
#   ([tpu-inference](https://github.com/vllm-project/tpu-inference)), tests our layout and attention
#   kernel in bfloat16 on a v6e-8, with a context of 4,096 at most: passed in release 0.26. Its
#   benchmark left 2 % of a chip, 0.6 GiB, to compute in, and did not fit
#   ([issue 2333](https://github.com/vllm-project/tpu-inference/issues/2333)); ours leaves 2.5 GiB.
#   We know of no start of 0.32.0 or of all our flags together.
# - **2, two copies**: no head is stored twice, but all weights. Rows 3 and 4 add **an fp8 cache**: not
#   twice the room, as words of the full layers stay half empty (0.32.0's source, not measured). On a
#   v6e it is e5m2, two bits of mantissa; judge it with 07.
# - **5, fp8 weights as well**: our second choice, in the layout of upstream's daily benchmark (context
#   2,048). Only if row 1 ends with `RESOURCE_EXHAUSTED`: write `"31b": SECOND` in the last line of
#   section 1's settings and run `./run_all.sh 05 07` again. A v6e has no fp8 arithmetic, so fp8 saves
#   memory, not time; `quantization="int8"` should save both (unverified).
# - **6**: row 1 with the window, should it
#   [come back](https://github.com/vllm-project/tpu-inference/pull/3220).
#
# What is new in the command of the second choice:

# %%
print(flags.news(command_for(SECOND), tpu))

# %% [markdown]
# ## 6. What a start costs on a TPU
# XLA, the compiler behind JAX, makes a program for each shape. So vLLM rounds the tokens of every
# step up to a **bucket**: 16, 32, 64 … 2,048, our `--max-num-batched-tokens`. A cold start compiles
# all of them: 8 of the 10 minutes to the first answer on the published machine. With the cache on a
# volume the next start reads them. Rounding up costs too, depending on where in its bucket a step
# lands:

# %%
def padded(tokens, smallest=16, largest=FULL.max_num_batched_tokens):
    """Tokens the chip computes for `tokens`: whole steps of the largest bucket, then one more."""
    whole, rest = divmod(tokens, largest)
    size = smallest
    while size < rest:
        size *= 2
    return whole * largest + (size if rest else 0)


startup = published("hardware_inference", "spec", "tpu")
print(f"cold start, published: {startup['startup_total']:.0f} min = "
      f"{startup['startup_total'] / 60 * startup['hourly_rate_on_demand']:.2f} USD")
for what, n in {"one sequence decoding": 1, "30 sequences decoding": 30, "a prompt of 512": 512,
                "a prompt of 1,100": 1100, "a prompt of 4,200, in 3 steps": 4200}.items():
    print(f"{what:30} {n:5} tokens, computed {padded(n):5}, wasted {1 - n / padded(n):.0%}")

# %% [markdown]
# A lone sequence wastes 15 of 16 rows, which costs little: decoding waits for memory, not for
# arithmetic. A prompt of 1,100 tokens is computed as 2,048, and that does cost. Under load vLLM
# fills a step with the tokens of several requests.
#
# On the v6e-8 the whole stage is `serve.sh`, which notebook 01 prints in section 4. It installs Docker,
# fetches the run from the bucket without checkpoints and caches, runs 05 to 07 in the background, and
# copies what they find to the bucket every five minutes: these are five hours of a machine that may go
# at any time. (`/dev/shm` is memory, half of the 1,440 GB that a ct6e-standard-8t has, published. 07
# fetches the base from the hub, 62 GB; only if it asks who you are: `export HF_TOKEN=hf_...` first.)
# From a second shell, while it runs:
#
# ```bash
# cd gemma4-on-tpu && export RUN_DIR=/dev/shm/run
# .venv/bin/python -m serving.server status  # address, container, log
# .venv/bin/python -m serving.server stop
# docker volume ls --filter name=vllm-xla-cache  # stays, so the next start is warm
# ```

# %% [markdown]
# ## 7. Proof: the tokens we trained on are the tokens it computes on
# Training rendered prompts with `chat.prompt_ids`. The chat endpoint renders them on its own, with
# the template in the model's folder. If the two differ by one token, the model answers a question
# that it was never taught. vLLM's `/tokenize` says what the endpoint would compute on, so we
# compare every token id, for the counter and the held-out samples of 02.

# %%
samples = helpers.read_json(helpers.require(helpers.run_dir("data", "samples.json"), "02_data.py"))
tokenizer = chat.load_tokenizer(merged)
thinking, template = server.as_trained(recipe)
chats = [request["messages"], *(sample["messages"] for sample in samples)]
for messages in chats:
    trained = chat.prompt_ids(tokenizer, messages, thinking)
    theirs = server.post(record, "/tokenize", {"model": cfg.name, "messages": messages, **template})
    assert trained == theirs["tokens"], (trained[:20], theirs["tokens"][:20])
ids = chat.prompt_ids(tokenizer, chats[0], thinking)
print(f"{len(chats)} prompts, equal id by id; the counter has {len(ids)}: {ids[:6]} ... {ids[-6:]}")
print("it ends in", repr(tokenizer.decode(ids[-8:])))

# %%
def complete(ids, model=cfg.name, **options):
    """Send token ids; get the first choice of /v1/completions with the ids of its text."""
    body = {"model": model, "prompt": ids, "temperature": 0, "max_tokens": longest,
            "return_token_ids": True, **options}
    return server.post(record, "/v1/completions", body)["choices"][0]


first, second = complete(ids), complete(ids)
assert first["prompt_token_ids"] == ids and first["token_ids"] == second["token_ids"]
assert first["text"] == text
print(f"two greedy runs from ids and the chat's answer: the same {len(first['token_ids'])} tokens")

# %% [markdown]
# So 06 and 07 may send token ids to `/v1/completions` and measure the model that chat users meet.
# One difference is deliberate: where a *user* writes `<turn|>`, the chat endpoint makes a control
# token of it, and `prompt_ids` keeps it text. And "twice the same" holds for requests that run
# alone. In a batch, sums are taken in another order, and a near tie can fall the other way.
#
# ## 8. Proof: an answer ends where its turn ends
# A model that was taught to close its turn with `<turn|>` must be stopped there, or every answer
# runs to `max_tokens`. vLLM takes the stop ids from `generation_config.json`. As a control we ask
# again with `ignore_eos`, which switches them off: the same tokens, and then more.

# %%
turn_end = chat.special_ids(tokenizer)[chat.TURN_END]
stops = helpers.read_json(merged / "generation_config.json")["eos_token_id"]
count = len(first["token_ids"])
onward = complete(ids, ignore_eos=True, max_tokens=count + 4)
print(f"stop ids {stops}; {chat.TURN_END} is {turn_end}")
for label, answer in (("as served", first), ("with ignore_eos", onward)):
    print(f"{label}: {len(answer['token_ids'])} tokens, finish_reason {answer['finish_reason']!r}, "
          f"the last ids {answer['token_ids'][-6:]}")
assert turn_end in stops and first["token_ids"][-1] == turn_end, "the answer does not end"
assert first["finish_reason"] == "stop" and onward["finish_reason"] == "length"
assert onward["token_ids"][:count] == first["token_ids"]

# %% [markdown]
# That file also sets what happens if a request says nothing: temperature 1.0, top-k 64, top-p 0.95.
# Every measurement in this series therefore says its sampling settings.
#
# ## 9. Where it listens
# The server is bound to `127.0.0.1`, so only this machine can reach it. `host="0.0.0.0"` opens it
# to everybody who can reach the machine: no password, no encryption. Better is a tunnel from your
# own machine, after which `http://127.0.0.1:8000` works there:
#
# ```bash
# gcloud compute ssh gemma4-serve --zone=us-east5-a -- -N -L 8000:127.0.0.1:8000
# ```
#
# If it must be open, set `VLLM_API_KEY` (it protects `/v1`, not `/metrics` or `/tokenize`) and put
# a proxy with TLS before it.
#
# ## 10. The adapter without merging
# vLLM can also load the base and add the adapter's product at every matrix (`--enable-lora`): one
# base, many fine-tunes, switched by the model's name. On a TPU vLLM's JAX models have no LoRA, so
# there one merges. Its PyTorch models on TPU do (`implementation="vllm"`, by *torchax*, which runs
# PyTorch on JAX), but upstream tests that
# with a small Qwen alone, so for Gemma 4 it is **unverified**. The command would differ by this
# (with the rank of this run's adapter; the 31B's has 64):

# %%
torchax = replace(FULL, implementation="vllm", name="gemma4-base")
with_adapter = command_for(torchax, model="/dev/shm/base", adapter=helpers.run_dir("adapter"))
print(flags.news(with_adapter, tpu))

# %% [markdown]
# Where it works, both ways must agree. The merged model, base + adapter, and the base alone each
# give a log-probability to every token of the merged model's answer:

# %%
if cfg.adapter:
    whole = ids + first["token_ids"]
    wanted = server.logprobs(record, cfg.name, whole)[len(ids) - 1:]
    apart = {}
    ways = {"base + adapter": "gemma4-base-adapter", "base alone": "gemma4-base"}
    for label, model in ways.items():
        found = server.logprobs(other, model, whole)[len(ids) - 1:]
        apart[label] = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
        print(f"{label}, against merged: |difference| {sum(apart[label]) / len(wanted):.4f} on "
              f"average, at most {max(apart[label]):.4f}, over {len(wanted)} tokens")
    server.stop("adapter")
    assert sum(apart["base + adapter"]) < 0.2 * sum(apart["base alone"])

# %% [markdown]
# Base + adapter is the merged model up to bfloat16 rounding; the base alone is another model. It
# holds because notebook 04 stores the `k_proj` adapter of the layers in which V equals K a second
# time as `v_proj` (04, section 10, measures what happens without).
#
# ## 11. It stays
# The server outlives this notebook. 06 and 07 find it in `serve/server.json`, or bring it up again
# from `serve/options.json`. `./run_all.sh` ends it when its range is done, so after `serve.sh` no
# server is left. To go on serving, from the file that this notebook wrote:
#
# ```bash
# cd gemma4-on-tpu && export SIZE=31b TMPDIR=/dev/shm RUN_DIR=/dev/shm/run
# .venv/bin/python -m serving.server start  # until `stop`, or until the guard of 01 deletes the machine
# ```
#
# The next cell is what 06 and 07 begin with.

# %%
record = server.current()
print(f"{record['model']} at {record['base_url']}: process {record['pid']}, "
      f"{len(server.members(record))} processes, started {record['started']}")
again = server.start_as(server.options())  # from the file, as 06 and 07 do
assert again["pid"] == record["pid"]

# %% [markdown]
# ## Recap
# - A server is one command; each of its flags has a reason, and one function builds it for TPU, GPU
#   and CPU.
# - The served files are the merged files, by their hashes, and the prompt's tokens are those of
#   training.
# - What the weights leave is KV cache: room for 11 long requests on eight chips.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `port 8000 ... is in use` | another server, perhaps your own from another run directory | `python -m serving.server stop` with that `RUN_DIR`, or `port=0` |
# | `out of memory` at the start | another process holds the chips or the memory; or the cache does not fit | stop it (on a TPU: `docker ps`), lower `max_model_len` |
# | `manifest for vllm/vllm-tpu:v0.32.0 not found` | PyPI has 0.32.0, the newest image tag that we saw used is v0.27.0 | `image="vllm/vllm-tpu:latest"`; better its digest, by `docker inspect --format '{{index .RepoDigests 0}}'` |
# | `Unable to poll TPU GCE Metadata. Got status code: 404` and a page of HTML | the VM was made by Compute Engine; the logs of section 5 begin so, too, and end healthy | nothing |
# | the log says `Automatically using fp8_e5m2` | a message only: `regular_attn_dtype=bfloat16` follows in the log of section 4 | nothing |
# | `starting ...` for 8 minutes, then healthy | the first compilation | keep the volume `vllm-xla-cache`; raise `timeout` if it is more |
# | answers run to `max_tokens` | `generation_config.json` lost its `eos_token_id` | run 04 again; it carries the base's file over |
# | fluent answers to another question | the server rendered another template | section 7; copy `chat_template.jinja` into the folder |
# | `JAX does not support per-request seed` | a request with `seed` on a TPU | leave it out; 07 saves its samples instead |
#
# ### Exercises
# 1. How many requests of 16,384 tokens fit on *four* v6e chips in bfloat16, and with an fp8 cache?
#
# <details><summary>Solution</summary>
#
# ```python
# for kv in (2, 1):
#     print(memory_plan(config_31b, v6e.hbm, 4, 1, kv, CHECKPOINT)["requests of 16,384"])
# ```
#
# 4 and 7. The first server of section 5 logged room for 2.06 requests of 32,768.
# </details>
#
# 2. Ask the server for three different answers to one prompt in one request.
#
# <details><summary>Solution</summary>
#
# ```python
# drawn = {**request, "n": 3, "temperature": 0.8, "top_p": 0.95, "max_tokens": 256}
# for choice in client.chat.completions.create(**drawn).choices:
#     print(choice.finish_reason, len(choice.message.content))
# ```
# </details>
#
# Next: [06 · How fast is it, and could it be?](06_bench.ipynb)
