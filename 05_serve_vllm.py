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
# Start a server for the model that notebook 04 merged, prove that it computes on the very token
# ids we trained on, and leave it running for notebooks 06 and 07.
#
# | | |
# |---|---|
# | **Needs** | 31b: a v6e-8 with Docker. e2b: one v6e chip with Docker, which Colab does not offer. tiny: two CPU cores, 4 GB of memory, Linux on x86-64 |
# | **Takes** | `merged/`, `adapter/` and `merge.json` of 04; `data/samples.json` of 02 |
# | **Makes** | a running server; `serve/options.json` (what 06 and 07 follow), `serve/server.json` (process, port, command), `serve/server.log`, `serve/docker-compose.yml` |
# | **Costs** | tiny: one to two minutes. 31b: about 10 minutes until the first answer (published), 3.59 USD at 21.52 USD/h; 2 to 3 minutes when the compile cache is warm (our estimate) |
#
# The outputs shown are those of the tiny run on two CPU cores. What only a TPU can do is printed
# as the command to run there, and a test has vLLM's own parser read every flag of it. Terms are in
# the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# Three cells that open every notebook: find the repository, install what is missing, and say what
# this machine is.

# %%
# Find the repository. Colab opens a notebook without it, so there we clone it.
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY_URL = os.environ.get("REPOSITORY_URL") or "https://github.com/OWNER/gemma4-on-tpu"
if os.environ.get("RUN_DIR"):  # relative to where you stand, not to the repository
    os.environ["RUN_DIR"] = os.path.abspath(os.environ["RUN_DIR"])
here = Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()
places = (here, here.parent, Path.cwd(), here / "gemma4-on-tpu")
root = next((place for place in places if (place / "helpers").is_dir()), None)
if root is None and "COLAB_RELEASE_TAG" not in os.environ:
    raise SystemExit(f"Run this inside the repository: git clone {REPOSITORY_URL}")
if root is None:
    subprocess.run(["git", "clone", "-q", "--depth=1", REPOSITORY_URL, "gemma4-on-tpu"], check=True)
    root = here / "gemma4-on-tpu"
os.chdir(root)
sys.path.insert(0, str(root))

# %%
# Install what is missing, on Colab or in the repository's own .venv; other Pythons stay untouched.
import helpers

helpers.install()

# %%
# What this machine is. Every result below was made with these versions.
helpers.machine()

# %% [markdown]
# ## 1. Settings
# **vLLM** is a server program: it loads a model once and answers requests over HTTP. A request has
# two parts. **Prefill** reads the prompt, all its tokens at once; **decode** then makes one token
# per step. The steps of all requests are computed together, and requests come and go between two
# steps (**continuous batching**): that is what a server does better than a loop over `generate`.
#
# The engine decides what runs: `tpu-docker` and `gpu-docker` start a container, `cpu` starts
# vLLM's CPU build from `.venv-serve`. It is the same vLLM with the same HTTP interface, so every
# cell after the start is the same. What computes below it is not: JAX models on a TPU, PyTorch
# models elsewhere. `max_model_len` is the longest prompt plus answer; notebook 06 needs
# 15,360 + 512 tokens at 31b. (Gemma 4 E2B passes vLLM's own tests on v6e with the implementation
# that vLLM chooses for it, flax_nnx; those of the other one, torchax, fail. Published: the support
# matrix of tpu-inference, August 2026.)
#
# These settings say what the server is, and the only place that says it: section 6 leaves them in
# `serve/options.json`, from which 06 takes its floors and its price and 07 its server.

# %%
import time
from dataclasses import dataclass, replace

import pandas as pd
import yaml
from IPython.display import display
from openai import OpenAI

from helpers import chat, physics, server, style, weights
from helpers.machine import published

pd.set_option("display.max_colwidth", None)


@dataclass(frozen=True)
class Settings:
    engine: str = "tpu-docker"      # or "gpu-docker", "cpu"
    name: str = "gemma4-verilog"    # what clients ask for
    port: int = 8000                # 0: any free port
    host: str = "127.0.0.1"         # only this machine; section 10 says what another one exposes
    max_model_len: int = 16_384     # prompt + answer, tokens
    tensor_parallel: int = 8        # chips that share every matrix
    data_parallel: int = 1          # copies of the model
    kv_cache_dtype: str = "auto"    # auto: bfloat16, as the model; or "fp8"
    quantization: str = ""          # weights: "" as merged, bfloat16; or "fp8", "int8" (section 4)
    implementation: str = ""        # on a TPU: "" is vLLM's choice, "vllm" is torchax (section 11)
    flags: tuple = ()               # further flags of `vllm serve`
    chip: str = "v6e"               # a name of helpers.chip, for 06; "" where none is on sale
    timeout: float = 3600.0         # seconds until healthy; a TPU compiles first
    adapter: bool = False           # also serve base + adapter beside it: a CPU has room for two


FULL = Settings()
E2B = replace(FULL, tensor_parallel=1, max_model_len=4096)
SECOND = replace(FULL, tensor_parallel=4, data_parallel=2, kv_cache_dtype="fp8", quantization="fp8")
TINY = replace(FULL, engine="cpu", port=0, tensor_parallel=1, max_model_len=1024, chip="",
               timeout=600.0, adapter=True)
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# ## 2. Is this the model that was merged?
# On the real machines `merged/` has travelled: from the v5p-8 that trained it to a bucket, and from
# there into `/dev/shm` of the v6e-8. `merge.json` holds the SHA-256 of every file. Serving half a
# shard gives fluent nonsense, which is hard to tell from a bad fine-tune, so we compare before we
# serve. (62 GB are hashed in about a minute, at the 1 GB/s that one core here does, and
# `cache/hashes.json` remembers what was read, so that 07 need not read it again.) The hash of all
# those hashes names the model: 06 keeps a measurement only for the model that it was made with.

# %%
def check_files(folder, hashes):
    """Raise unless the folder holds the files of merge.json, with the bytes they had, no more."""
    if bad := weights.verify(folder, hashes):
        raise helpers.UserError(f"{folder} is not what 04_merge wrote: {bad}. Copy it again, "
                                "or run 04_merge.")
    return len(hashes)


merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
merge = helpers.read_json(helpers.require(helpers.run_dir("merge.json"), "04_merge.py"))
recipe = merge["recipe"]
count = check_files(merged, merge["files"])
print(f"{count} files as merged: step {merge['step']}, rank {recipe['rank']}, "
      f"base {recipe['base_model']}, model {server.model_hash(merge)[:12]}")

# %% [markdown]
# The recipe holds one more thing that a server must know. If notebook 02 kept the reasoning
# (`reasoning="kept"`), training prompts asked the model to think first, and every request has to
# ask for the same; the chat endpoint is told so by an argument to the template.

# %%
def as_trained(recipe):
    """(thinking, what to add to a chat request) so that prompts are those of notebook 02."""
    thinking = recipe["reasoning"] == "kept"
    return thinking, {"chat_template_kwargs": {"enable_thinking": thinking}}


thinking, template = as_trained(recipe)
print(f"reasoning {recipe['reasoning']} in training, so requests say {template}")

# %% [markdown]
# ## 3. The command for a v6e-8
# `helpers.server` builds the command as a list, for every engine; this is what it gives for the 31B
# on eight v6e chips. The container runs in the foreground of a detached process, so its log lands
# in `serve/server.log`; `--rm` removes it when it stops. (`start` adds a mark of the run directory
# to the container's name, so that two of them do not meet.)

# %%
def options_for(cfg, model, model_hash=""):
    """What the settings say about the server, in the form that travels to 06 and 07."""
    return server.Options(
        engine=cfg.engine, model=str(model), name=cfg.name, model_hash=model_hash, host=cfg.host,
        port=cfg.port, max_model_len=cfg.max_model_len, tensor_parallel=cfg.tensor_parallel,
        data_parallel=cfg.data_parallel, kv_cache_dtype=cfg.kv_cache_dtype,
        quantization=cfg.quantization, implementation=cfg.implementation, flags=cfg.flags,
        chip=cfg.chip, timeout=cfg.timeout)


def command_for(cfg, **more):
    """The command for the 31B as this notebook would start it on a serving machine."""
    return server.command(options_for(cfg, "/dev/shm/run/merged"), results="/dev/shm/run/bench",
                          **more)


tpu = command_for(FULL)
print(server.shown(tpu))

# %% [markdown]
# Every flag is there for a reason, and a flag without one should not be. The next cell holds the
# reasons and refuses to go on if the command has a flag that it cannot explain.

# %%
DOCKER = {
    "--rm": "remove the container when it stops; the log is ours, the cache is on a volume",
    "--name": "so that `docker logs`, `docker exec` (06) and `docker stop` find it",
    "--network": "the server listens on the machine's own 127.0.0.1, without port mapping",
    "--shm-size": "shared memory between vLLM's processes; Docker's default of 64 MB is too little",
    "-v": "the merged model (read-only), 06's results, and the XLA cache on a named volume",
    "-e": "no calls to the hub; up to an hour to be ready; the XLA cache's place; whose model code",
    "--privileged": "the container needs the TPU's device files and may lock memory",
    "--entrypoint": "the image's own entry point runs its arguments as a program: name vllm here; "
                    "the image, vLLM's command and the model's folder follow",
    "--gpus": "all GPUs of the machine",
}

# %% [markdown]
# Those were Docker's; these are vLLM's:

# %%
REASONS = {
    **DOCKER,
    "--served-model-name": "clients say a name, not a path",
    "--host": "127.0.0.1 only: vLLM has no password by default",
    "--port": "8000, vLLM's default",
    "--dtype": "bfloat16, as trained and merged",
    "--kv-cache-dtype": "said, so that nobody has to guess: auto = the model's dtype = bfloat16",
    "--max-model-len": "prompt + answer; more would reserve and compile for more",
    "--tensor-parallel-size": "chips that share every matrix: 8, or 4 with two copies (section 4)",
    "--data-parallel-size": "independent copies of the model behind one port",
    "--no-enable-prefix-caching": "06 measures prefill, and a cached prompt has none; turn it on "
                                  "for users, whose prompts share a beginning",
    "--disable-uvicorn-access-log": "one log line per request would bury the rest",
    "--additional-config": "weights and arithmetic in fp8 or int8: Qwix's rules, applied to every "
                           "matrix after the bfloat16 weights were loaded",
    "--quantization": "the same on a GPU",
    "--enable-lora": "serve an adapter beside its base (section 11)",
    "--lora-modules": "the adapter's name, as clients say it, and its folder",
    "--max-lora-rank": "the smallest that vLLM offers and that holds ours",
    "--disable-chunked-mm-input": "vLLM on TPU cannot split an image over two steps; a long text "
                                  "prompt is still read in pieces of 2,048 tokens",
    "--enforce-eager": "CPU: no compilation; a start takes 25 s instead of 38 to 55 (measured)",
}

# %%
def explain(command):
    """One row per flag: the flag, its values, the reason."""
    rows = {}
    for part in command[command.index("run") + 1:] if "run" in command else command:
        if part.startswith("-"):
            flag = part
            rows.setdefault(flag, [])
        elif rows:
            rows[flag].append(part)
    unknown = rows.keys() - REASONS.keys()
    assert not unknown, f"no reason given for {unknown}"
    return pd.DataFrame([(flag, " ".join(values), REASONS[flag]) for flag, values in rows.items()],
                        columns=["flag", "value", "why"]).set_index("flag")


left = [{"selector": "th, td", "props": "text-align: left"}]
display(explain(tpu).rename_axis(None).style.set_table_styles(left))

# %% [markdown]
# What this means: nothing in the list is specific to the tuned model. Where the published recipe
# served the stock `google/gemma-4-31B-it`, this mounts `merged/`. Two more things differ in
# substance from its command: the prefix cache (keys and values of earlier prompts, kept for prompts
# that begin alike) is off (notebook 06 and [10_published](10_published.ipynb) show what it did to
# the published latencies), and the compile cache survives the container.
#
# The same function gives the command for two H100 cards and for this CPU:

# %%
gpu = command_for(replace(FULL, engine="gpu-docker", tensor_parallel=2, chip="h100"))
cpu = server.command(options_for(replace(TINY, port=8000), "runs/tiny/merged"))
print(server.shown(gpu), "\n", server.shown(cpu), sep="\n")
explain(gpu), explain(cpu);  # both pass: no flag without a reason

# %% [markdown]
# Who keeps services in Docker Compose wants the same container as a file. It is made from the list,
# word by word, and stops at an option that it does not know; `docker compose up` in the folder of
# the file starts what section 6 starts by hand. (`--rm` has no place in it: `docker compose down`
# removes the container.)

# %%
def compose(command):
    """The `docker run` command as the content of a docker-compose.yml."""
    words, service = iter(command[command.index("run") + 1:]), {}
    plain = {"--name": "container_name", "--network": "network_mode", "--shm-size": "shm_size",
             "--entrypoint": "entrypoint"}
    for word in words:
        if word in plain:
            service[plain[word]] = next(words)
        elif word in ("-v", "-e"):
            service.setdefault({"-v": "volumes", "-e": "environment"}[word], []).append(next(words))
        elif word == "--privileged":
            service["privileged"] = True
        elif word == "--gpus":
            device = {"driver": "nvidia", "count": next(words), "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        elif word != "--rm":
            assert not word.startswith("-"), f"no place for {word}"
            service |= {"image": word, "command": list(words)}
    named = [volume.split(":")[0] for volume in service["volumes"] if not volume.startswith("/")]
    return {"services": {"vllm": service}, "volumes": {name: {"name": name} for name in named}}


compose_file = helpers.run_dir("serve", "docker-compose.yml")
helpers.write_text(compose_file, yaml.safe_dump(compose(tpu), sort_keys=False))
print(f"{compose_file}:\n{compose_file.read_text()[:420]}...")

# %% [markdown]
# ## 4. What fits into the memory of a chip
# A chip holds its share of the weights, and the rest of what vLLM may use (92 % by default) is the
# **KV cache**: keys and values of every token that is still being attended to. (A **KV head** is
# one set of them, used by a group of query heads.) How much one token costs follows from
# `config.json`. The 50 sliding layers, which see a window, keep 16 KV heads of 256 numbers for the
# last 1,024 tokens; the 10 full layers keep 4 KV heads of 512 numbers for all of them. **Tensor
# parallel** 8 means that eight chips share every matrix, each with its own heads, and those 4
# **global KV heads** are the reason to think about the layout: eight chips cannot share four
# heads, so each is stored twice. (Activations come off what is left: the numbers are upper bounds.)

# %%
config_31b = helpers.read_json("data/configs/gemma4_31b.json")
CHECKPOINT = 62.5e9  # bytes of the published 31B checkpoint, vision tower included
GIB = 2.0**30
SHARE = 0.92         # of a chip's memory that vLLM takes, unless told otherwise


def weights_of(config, checkpoint, quantization=""):
    """Bytes of one copy: the checkpoint's, less one for each weight that is quantised."""
    return checkpoint - (physics.parameters(config)["matmul"] if quantization else 0)


def memory_plan(config, chip_bytes, tp, dp, kv_dtype_bytes, stored, windowed=True):
    """HBM per chip and the requests that fit, for one layout; sizes are per chip, in GiB."""
    left = SHARE * chip_bytes - stored / tp
    per_token = physics.kv_bytes_per_token(config, kv_dtype_bytes, tp)
    row = {"tp": tp, "dp": dp, "bytes per KV number": kv_dtype_bytes,
           "sliding layers keep": "their window" if windowed else "everything",
           "weights, GiB/chip": stored / tp / GIB, "left for KV, GiB/chip": left / GIB}
    for tokens in (4096, 16_384):
        full = sum(per_token.values()) * tokens
        need = physics.kv_bytes(config, tokens, kv_dtype_bytes, tp) if windowed else full
        row[f"requests of {tokens:,}"] = dp * int(left / (need / tp))
    return row | {f"one of {tokens:,}, GiB/chip": need / tp / GIB}


# %%
v6e = helpers.chip("v6e")
half = weights_of(config_31b, CHECKPOINT, SECOND.quantization)
plans = [memory_plan(config_31b, v6e.hbm, tp, dp, kv, stored, windowed)
         for tp, dp, kv, stored, windowed in (
             (8, 1, 2, CHECKPOINT, False), (8, 1, 2, CHECKPOINT, True), (4, 2, 2, CHECKPOINT, True),
             (8, 1, 1, CHECKPOINT, True), (4, 2, 1, CHECKPOINT, True), (4, 2, 1, half, True))]
display(pd.DataFrame(plans).style.hide(axis="index").format(precision=1))

# %% [markdown]
# What this means (arithmetic, not measured; tp is chips that share the matrices, dp copies of the
# model): at tensor parallel 8 the full layers' cache is stored twice over; two copies at tensor
# parallel 4 do not pay that, but hold the weights twice. At 4,096 tokens the second copy costs more
# than it saves, at 16,384 the two are level. What tensor parallel 4 promises is speed, because no
# chip works on a head it shares.
#
# The first row is a server whose cache manager gives sliding layers room for the whole context, as
# the published runs suggest (section 5 of [10_published](10_published.ipynb)). fp8 doubles the room
# for the cache and changes the answers a little, and is used only if the command says
# `--kv-cache-dtype fp8`: a line in a TPU log that fp8 is supported does not mean it is on.
#
# The last row is our second choice, should the first not fit. Upstream has not shown that it does:
# its release tests say "not enough HBM" of their bfloat16 benchmark of this model on a v6e-8 (with
# pictures, tensor parallel 8), and its daily one runs fp8 at tensor parallel 4 with two copies
# (tpu-inference, August 2026). A v6e has no fp8 arithmetic: there fp8 saves memory, not time. int8
# saves both (`quantization="int8"`). Either makes another model of yours, so let 07 judge it.
#
# The same as a picture. The grey part is there before the first request comes:

# %%
def draw_memory(plans, chip_bytes):
    """One bar per layout: weights, then the KV cache cut into requests of 16,384 tokens."""
    fig, ax = style.figure(10, 0.9 + 0.5 * len(plans))
    labels, edge = [], chip_bytes / GIB
    for place, plan in enumerate(plans):
        grey, each = plan["weights, GiB/chip"], plan["one of 16,384, GiB/chip"]
        count = plan["requests of 16,384"] // plan["dp"]
        ax.barh(place, grey, color=style.GREY)
        ax.barh([place] * count, each, left=[grey + i * each for i in range(count)],
                color=style.SKY, edgecolor="white", linewidth=0.8)
        label = f"{plan['dp']} × {count}" if plan["dp"] > 1 else count
        ax.text(edge + 0.3, place, label, va="center", fontsize=10)
        kept = "" if plan["sliding layers keep"] == "their window" else ", no window"
        number = "fp8" if plan["bytes per KV number"] == 1 else "bfloat16"
        small = ", fp8 weights" if grey * plan["tp"] * GIB < 0.99 * CHECKPOINT else ""
        labels.append(f"tp {plan['tp']}, dp {plan['dp']}, {number} cache{kept}{small}")
    ax.axvline(SHARE * edge, color=style.BLACK, lw=1)
    ax.text(edge + 0.3, -0.75, "requests", va="center", fontsize=10)
    ax.set_yticks(range(len(plans)), labels)
    ax.set_ylim(len(plans) - 0.4, -1.1)
    least, most = (pick(plan["requests of 16,384"] for plan in plans) for pick in (min, max))
    ax.set(title=f"The same eight chips hold {least} or {most} requests of 16,384 tokens",
           xlabel=f"GiB of one v6e chip: weights (grey), requests (blue); line: {SHARE:.0%} of it",
           xlim=(0, edge))
    ax.grid(axis="y", visible=False)
    style.finish(fig, "05_memory", "arithmetic from config.json and the v6e data sheet, above")


draw_memory(plans, v6e.hbm)

# %% [markdown]
# The second choice is the same function with other settings. What is new in its command:

# %%
def news(command, known):
    """The options of a command that another one does not have; each has a reason, too."""
    explain(command)
    lines = server.shown(known).splitlines()
    return "\n".join(line for line in server.shown(command).splitlines() if line not in lines)


print(news(command_for(SECOND), tpu))

# %% [markdown]
# ## 5. What a start costs on a TPU
# XLA, the compiler behind JAX, makes a program for each shape, so vLLM rounds the tokens of every
# step up to a **bucket**: 16, 32, 64 ... 2,048, vLLM's default for `--max-num-batched-tokens`. A
# cold start compiles all of them: 8 of the 10 minutes to the first answer on the published machine.
# With the cache on a volume the next start reads them. Both happen at the full price of the
# machine. Rounding up costs too, and how much depends on where in its bucket a step lands:

# %%
def padded(tokens, smallest=16, largest=2048):
    """Tokens the chip computes for `tokens`: whole steps of the largest bucket, then one more."""
    whole, rest = divmod(tokens, largest)
    size = smallest
    while size < rest:
        size *= 2
    return whole * largest + (size if rest else 0)


startup = published("hardware_inference", "spec", "tpu")
price = startup["hourly_rate_on_demand"]
print(f"cold start, published: {startup['startup_total']:.0f} min at {price} USD/h = "
      f"{startup['startup_total'] / 60 * price:.2f} USD, of which compiling "
      f"{startup['xla_compile_startup'] / 60 * price:.2f} USD")
steps = {"one sequence decoding": 1, "30 sequences decoding": 30, "130 sequences decoding": 130,
         "a prompt of 512": 512, "a prompt of 1,100": 1100, "a prompt of 4,200, in 3 steps": 4200}
table = pd.DataFrame([(what, n, padded(n), 1 - n / padded(n)) for what, n in steps.items()],
                     columns=["work", "tokens", "computed", "wasted"])
display(table.set_index("work").style.format({"wasted": "{:.0%}"}, thousands=","))

# %% [markdown]
# What this means: a lone sequence wastes 15 of 16 rows, which costs little, because decoding waits
# for memory and not for arithmetic. A prompt of 1,100 tokens is computed as 2,048, and that does
# cost. It is no argument for prompts of round lengths: under load vLLM fills a step with the
# tokens of several requests.
#
# On the v6e-8 the whole stage is this, after the first six lines of notebook 01's script (Python
# 3.11, Icarus Verilog, the repository). The bucket is the one that script copied the training
# machine's run to; 62.5 GB within a region take some minutes, and `/dev/shm` is memory, half of the
# 1,440 GB that a ct6e-standard-8t has (published). What comes over is the run without its
# checkpoints and caches: `merged/`, `merge.json` and the small files of 02 and 03 that 05 to 07
# read.
#
# ```bash
# command -v docker || sudo apt-get install -y docker.io
# sudo usermod -aG docker "$USER"   # once, then log in again: docker without sudo
# export SIZE=31b RUN_DIR=/dev/shm/run TMPDIR=/dev/shm BUCKET=my-gemma4-bucket
# mkdir -p "$RUN_DIR"
# gcloud storage rsync --recursive --exclude='^(train/checkpoints|cache|jax_cache)/' \
#     "gs://$BUCKET/run" "$RUN_DIR"
# ./run_all.sh 05 07                # or open the notebooks one by one
# .venv/bin/python -m helpers.server status  # while it runs: address, container, log
# .venv/bin/python -m helpers.server stop
# gcloud storage rsync --recursive "$RUN_DIR/bench" "gs://$BUCKET/run/bench"
# gcloud storage rsync --recursive "$RUN_DIR/eval" "gs://$BUCKET/run/eval"
# docker volume ls --filter name=vllm-xla-cache  # stays, so the next start is warm
# ```

# %% [markdown]
# ## 6. Start it
# `start` opens the log, starts the command in a session of its own (closing this notebook does not
# end it; started by `./run_all.sh`, it ends with that, however that ends), records it in
# `serve/server.json`, and asks `/health` until the answer is yes. Every ten seconds it prints the
# last line of the log, if that is a new one. A port in use, a process that dies or too little
# memory end in one line with the reason. A healthy server of the same files is reused.
# `write_options` leaves the settings in `serve/options.json`, which outlives the server: `python -m
# helpers.server start` brings it up again from there. On a CPU most of a start is Python importing
# vLLM, on one core; so the second server, which section 11 needs (base + adapter), starts beside
# the first.

# %%
server.prepare(cfg.engine)
options = options_for(cfg, merged, server.model_hash(merge))
beside = replace(options, model=merge.get("adapter_base", recipe["base_path"]),
                 name="gemma4-base", model_hash="", port=0)
side = dict(slot="adapter", adapter=helpers.run_dir("adapter"))
if cfg.adapter:
    server.start_as(beside, wait=False, **side)
try:
    record = server.start_as(options)
except helpers.UserError:
    server.stop("adapter")  # a failed start leaves nothing behind
    raise
server.write_options(options)
print(f"process {record['pid']}, serving {record['model_path']} as {record['model']}, "
      f"ready after {record['ready_seconds']:.0f} s")

# %% [markdown]
# ## 7. Ask it
# vLLM speaks OpenAI's HTTP interface, so the `openai` package is a client for it; a key is
# required by the package, not by the server. We ask for a held-out specification from notebook 02,
# with the system message that training used, if any. `temperature=0` means greedy: always the
# likeliest token.

# %%
client = OpenAI(base_url=record["base_url"] + "/v1", api_key="unused", max_retries=0)
longest = cfg.max_model_len // 2  # tokens of an answer, at the most
samples = helpers.read_json(helpers.require(helpers.run_dir("data", "samples.json"), "02_data.py"))
messages = samples[0]["messages"]
print(f"models: {[model.id for model in client.models.list()]}")
print(f"messages: {[message['role'] for message in messages]}\n{messages[-1]['content'][:400]}\n")

# %%
reply = client.chat.completions.create(model=cfg.name, messages=messages, temperature=0,
                                       max_tokens=longest, extra_body=template)
print(reply.choices[0].message.content)
print(f"\n{reply.usage.prompt_tokens} prompt tokens, {reply.usage.completion_tokens} answer "
      f"tokens, finish_reason {reply.choices[0].finish_reason!r}")

# %% [markdown]
# The same request as a stream: the server sends each token as soon as it has it. Two times matter
# to a reader who waits, and notebook 06 measures them under load: the **time to first token**
# (TTFT), in which the whole prompt is computed, and the **time per output token** (TPOT) after it.
# There is one piece less than tokens, because the last one, `<turn|>`, has no text.

# %%
start, arrivals, text = time.perf_counter(), [], ""
for piece in client.chat.completions.create(model=cfg.name, messages=messages, temperature=0,
                                            max_tokens=longest, extra_body=template, stream=True):
    if piece.choices and piece.choices[0].delta.content:
        arrivals.append(time.perf_counter() - start)
        text += piece.choices[0].delta.content
gaps = [later - earlier for earlier, later in zip(arrivals, arrivals[1:])]
print(f"first piece after {1e3 * arrivals[0]:.0f} ms, then one every "
      f"{1e3 * sum(gaps) / max(len(gaps), 1):.1f} ms, {len(arrivals)} pieces")
assert text == reply.choices[0].message.content

# %% [markdown]
# ## 8. Proof: the ids we trained on are the ids it computes on
# Training rendered prompts with `chat.prompt_ids`; the chat endpoint renders them on its own, with
# the template in the model's folder. If these differ by one token, the model answers a question it
# was never taught. vLLM's `/tokenize` says what the chat endpoint would compute on, so we can
# compare every id, for the held-out samples that 02 stored, and the completion of our ids with the
# chat's answer.

# %%
tokenizer = chat.load_tokenizer(merged)
for sample in samples:
    ours = chat.prompt_ids(tokenizer, sample["messages"], thinking)
    theirs = server.post(record, "/tokenize",
                         {"model": cfg.name, "messages": sample["messages"], **template})
    assert ours == theirs["tokens"], (ours[:20], theirs["tokens"][:20])
ids = chat.prompt_ids(tokenizer, messages, thinking)
print(f"{len(samples)} prompts, equal id by id; the first has {len(ids)}: {ids[:6]} ... {ids[-6:]}")
print("it ends in", repr(tokenizer.decode(ids[-8:])))

# %%
def complete(ids, model=cfg.name, **options):
    """Send token ids; get the first choice of /v1/completions with the ids of its text."""
    body = {"model": model, "prompt": ids, "temperature": 0, "max_tokens": longest,
            "return_token_ids": True, **options}
    return server.post(record, "/v1/completions", body)["choices"][0]


first, second = complete(ids), complete(ids)
assert first["prompt_token_ids"] == ids and first["token_ids"] == second["token_ids"]
assert first["text"] == reply.choices[0].message.content
print(f"two greedy runs from ids and the chat's answer: the same {len(first['token_ids'])} tokens")

# %% [markdown]
# What this means: notebooks 06 and 07 may send ids to `/v1/completions` and measure the same model
# that chat users meet. One difference is deliberate: where a *user* writes `<turn|>`, the chat
# endpoint makes a control token of it, and `prompt_ids` keeps it text. Against strangers that is
# the safer side. And "twice the same" holds for requests that run alone: in a batch, sums are
# taken in another order, and a near tie between two tokens can fall the other way.

# %% [markdown]
# ## 9. Proof: an answer ends where its turn ends
# A model that was taught to close its turn with `<turn|>` must be stopped there, or every answer
# runs to `max_tokens`. vLLM takes the stop ids from `generation_config.json`. The answer above ends
# with that id. As a control we ask again with `ignore_eos`, which switches the stop ids off: the
# same tokens, and then more.

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
# That file also sets what happens if a request says nothing: temperature 1.0 (draw from the model's
# own probabilities), top-k 64 and top-p 0.95 (but only from the 64 likeliest tokens, and the
# likeliest that make up 95 %). Every measurement in this series therefore says its sampling
# settings.
#
# ## 10. Where it listens
# The server is bound to `127.0.0.1`, so only this machine can reach it. `host="0.0.0.0"` opens it
# to everybody who can reach the machine: no password, no encryption, and `/metrics` and the API
# docs with it. Better is a tunnel from your own machine, after which `http://127.0.0.1:8000` works
# there:
#
# ```bash
# gcloud compute ssh gemma4-serve --zone=us-central1-b -- -N -L 8000:127.0.0.1:8000
# ```
#
# If it must be open, set `VLLM_API_KEY` (it protects `/v1`, not `/metrics` or `/tokenize`) and put
# a proxy with TLS before it.

# %% [markdown]
# ## 11. The adapter without merging
# vLLM can also load the base model and add the adapter's product at every matrix (`--enable-lora`):
# one base, many fine-tunes, switched by the model's name. On a TPU vLLM's JAX models have no LoRA,
# so there one merges; its PyTorch models on TPU do (`implementation="vllm"`, one copy), but
# upstream tests that with a small Qwen alone, so for Gemma 4 it is **unverified**. The command
# would be this, the base being its model:

# %%
torchax = replace(FULL, implementation="vllm", name="gemma4-base")
print(news(command_for(torchax, model="/dev/shm/base", adapter=helpers.run_dir("adapter")), tpu))

# %% [markdown]
# Where it works, both ways must agree. We score the merged model's own answer, token by token, with
# the merged model, with base + adapter, and with the base alone.

# %%
def logprobs(record, model, ids):
    """Log-probability of each id given those before it, from `prompt_logprobs`."""
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    scored = server.post(record, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [entry[str(token)]["logprob"] for entry, token in zip(scored[1:], ids[1:], strict=True)]


def compare_adapter(record, beside, ids, answer):
    """Mean and largest |difference| of log-probabilities of the answer, against the merged."""
    whole = ids + answer
    wanted = logprobs(record, cfg.name, whole)[-len(answer):]
    rows = []
    for label, model in (("base + adapter", "gemma4-base-adapter"), ("base alone", "gemma4-base")):
        found = logprobs(beside, model, whole)[-len(answer):]
        apart = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
        rows.append((label, len(apart), sum(apart) / len(apart), max(apart)))
    return pd.DataFrame(rows, columns=["compared with merged", "tokens", "mean |difference|",
                                       "largest"]).set_index("compared with merged")


# %%
if cfg.adapter:
    other = server.start_as(beside, **side)
    apart = compare_adapter(record, other, ids, first["token_ids"])
    server.stop("adapter")
    display(apart.style.format(precision=4))
    assert apart.loc["base + adapter"].iloc[1] < 0.2 * apart.loc["base alone"].iloc[1]

# %% [markdown]
# What this means (natural logarithms): base + adapter is the merged model up to bfloat16 rounding
# (merging rounds the sum once, the adapter's product is rounded on its way), while the base alone
# is another model. It holds because notebook 04 stores the `k_proj` adapter of the layers in which
# V equals K a second time as `v_proj`. Without that copy vLLM would adapt K and not V: section 10
# of 04 measures that, and compares in float32 over more positions.

# %% [markdown]
# ## 12. It stays
# The server outlives this notebook. Notebooks 06 and 07 find it in `serve/server.json`, or bring it
# up again from `serve/options.json`; 07 stops it, serves the base model for comparison, and stops
# that. `python -m helpers.server stop` does it by hand, and `./run_all.sh` does it when its range
# is done. The next cell is what 06 and 07 begin with; had the server died in the meantime, it would
# say why, and what to run.

# %%
record = server.current()
print(f"{record['model']} at {record['base_url']}: process {record['pid']}, "
      f"{len(server.members(record))} processes, started {record['started']}")
again = server.start_as(server.options())  # from the file, as 06 and 07 do
assert again["pid"] == record["pid"]

# %% [markdown]
# ## Recap
# - The command is a list that one function builds for TPU, GPU and CPU; each flag has a reason.
# - The served files are the merged files, by their hashes.
# - Prompt ids of training and serving are equal, an answer ends at `<turn|>`, and greedy is
#   repeatable for a request that runs alone.
# - What the weights leave for the KV cache limits how many long requests fit, and 4 global KV heads
#   decide the layout.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `port 8000 ... is in use` | another server, perhaps your own from another run directory | `python -m helpers.server stop` with that `RUN_DIR`, or `port=0` |
# | `out of memory` at the start | another process holds the chips or the memory; or the cache does not fit | stop it (on a TPU: `docker ps`), lower `max_model_len` |
# | `Conflict. The container name` | an earlier container was not removed | `docker rm -f` and the name in the message |
# | `starting ...` for 8 minutes, then healthy | the first compilation | keep the volume `vllm-xla-cache`; raise `timeout` if it is more |
# | answers run to `max_tokens` | `generation_config.json` lost its `eos_token_id` | run 04 again; it carries the base's file over |
# | fluent answers to another question | the server rendered another template | section 8; copy `chat_template.jinja` into the folder |
# | `JAX does not support per-request seed` | a request with `seed` on a TPU | leave it out; 07 saves its samples instead |
# | `logit_bias` changes nothing | vLLM on TPU (tpu-inference 0.32.0) stores it and never applies it | do without |
# | `The model ... does not exist` | the client says another name | `cfg.name` is the name, see `client.models.list()` |
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
# 27 and 55: half of what two such copies hold.
# </details>
#
# 2. Ask the server for three different answers to one prompt in one request.
#
# <details><summary>Solution</summary>
#
# ```python
# several = client.chat.completions.create(model=cfg.name, messages=messages, n=3,
#                                          temperature=0.8, top_p=0.95, max_tokens=256,
#                                          extra_body=template)
# for choice in several.choices:
#     print(choice.finish_reason, len(choice.message.content))
# ```
#
# The prompt is computed once per answer here, because the prefix cache is off.
# </details>
#
# Next: [06 · How fast is it, and could it be?](06_bench.ipynb)
