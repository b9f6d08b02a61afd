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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/10_published.ipynb)
#
# # 10 · The published numbers, one by one
#
# The recipe that this series re-does was published as *Fine-Tuning and Serving Gemma 4 31B on Google
# Cloud TPU: A Technical Comparison with GPU Baselines* (Singh, Kishnani, Goel, Agrawal, Mishra;
# [arXiv 2605.25645](https://arxiv.org/abs/2605.25645), May 2026). Which of its claims hold? We take
# 31 of them word for word and recompute what its numbers allow.
#
# | | |
# |---|---|
# | **Needs** | any machine; no accelerator, no network |
# | **Takes** | `data/published/*.csv`, `data/configs/gemma4_31b.json` |
# | **Makes** | `figures/10_*.png`, `published.json` |
# | **Costs** | ten seconds |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · **10 published** · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · [13 RL](13_rl.ipynb)

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
# ## 1. What was published
# The authors fine-tuned Gemma 4 31B on a v5p-8 and on two H100s, served the untuned model on a v6e-8 and
# on two H100s, and compared times, costs and quality. The GPU machine was chosen "based on cost
# equivalence" (S10.3): 22.12 against 21.52 dollars an hour for serving. *TPU* and *GPU* mean these
# machines with their software.
#
# S8.1 and the like are sections of the paper. Its draft and code are public (h2loop/gemma-tpu,
# commit 745cbdf), and so are raw logs of short runs. Where only a figure has the data, we read it off
# with about 1 % error. `data/published/README.md` has the sources.

# %%
import math

import numpy as np
import pandas as pd
from IPython.display import display
from scipy import stats

from helpers import style
from tables import physics
from verilog.stats import interval, sign_flip_p
from tables.hardware import chip as chip_of

PROMPTS = 30           # requests per point of the sweep (S8.1)
DISPUTED = (99, 118, 134, 135, 153)  # problems of verilog-eval, see section 8


def table(name):
    """One published table."""
    return pd.read_csv(f"data/published/{name}.csv")


# %% [markdown]
# *Prefill* reads the whole prompt and ends with the first token; *decoding* then makes one token per
# step. **TTFT** is the time to the first token, **TPOT** the time per output token after it, **QPS** the
# requests offered per second. The paper's serving table (S8.1), with the ratio that it claims:

# %%
results = table("inference_results")
as_published = results[results.source == "arxiv:S8.1"].dropna(subset="input_tokens")
as_published.insert(0, "tokens", as_published.input_tokens.map("{:.0f} in, ".format)
                    + as_published.output_tokens.map("{:.0f} out".format))
display(as_published[["tokens", "load", "metric", "tpu", "gpu", "unit", "claimed_ratio"]]
        .fillna("").style.hide(axis="index"))

# %% [markdown]
# ## 2. The arithmetic
# Divide the two columns, and compare with the claimed ratio at its own precision.

# %%
def ratio_claim(row):
    """The claimed ratio recomputed from the row's two numbers, in the claim's own form."""
    tpu, gpu = float(row.tpu), float(row.gpu)
    ratio = max(tpu, gpu) / min(tpu, gpu)
    if row.claimed_ratio.endswith("%"):
        return f"+{100 * (ratio - 1):.0f}%"
    digits = len(row.claimed_ratio.rstrip("x").partition(".")[2])
    return f"{ratio:.{digits}f}x"


claimed = results[results.claimed_ratio.str.match(r"^\+?[\d.]+[x%]$", na=False)
                  & ~results.metric.eq("kv_cache_dtype")].copy()
claimed["recomputed"] = [ratio_claim(row) for row in claimed.itertuples()]
agree = claimed.recomputed == claimed.claimed_ratio
print(f"{agree.sum()} of {len(claimed)} ratios follow from their row; the others:")
display(claimed.loc[~agree, ["context", "metric", "tpu", "gpu", "claimed_ratio", "recomputed"]])
kinds = table("claims_recomputed").kind.value_counts()
print(f"all {kinds.sum()} numbers that we recomputed (claims_recomputed.csv):", kinds.to_dict())

# %% [markdown]
# The tables divide correctly; 23.66 was cut instead of rounded. Of the 90 numbers, *rounding* means off
# by a cent or a last digit, *draft* that it stands in the draft alone, *substantive* that it disagrees.
# The logs agree with themselves: throughput and latencies of a run imply the same seconds. And the
# authors did what few do: they published code, logs, the obstacles they met, and a result against their
# own machine, with two reasons for caution beside it.
#
# ## 3. How fast can a prompt be read?
# **Before you go on:** a v6e-8 does 7.3 · 10¹⁵ multiplications and additions a second. How long must
# it take at least to read 15,360 tokens with 31 billion weights?
#
# <details><summary>Answer</summary>
#
# Two operations per weight and token, 2 · 31e9 · 15,360 ≈ 9.5e14, and attention on top: 1.0e15. At
# the peak that is 0.136 seconds.
# </details>
#
# `tables/physics.py` counts this from the model's config: all matrices, causal attention, a window
# of 1,024 in 50 of 60 layers, the logits of one token. Divided by the machine's peak it is a *floor*
# under TTFT, whatever the software.

# %%
config = helpers.read_json("data/configs/gemma4_31b.json")
hardware = table("hardware_inference").set_index("spec")
count = {side: int(hardware.loc["accelerator_count", side]) for side in ("tpu", "gpu")}
PEAK = {side: count[side] * chip_of(name).flops  # FLOP/s of the whole machine
        for side, name in (("tpu", "v6e"), ("gpu", "h100"))}


def floor_ms(side, tokens):
    """Least milliseconds to read a prompt on one of the two machines."""
    return 1e3 * physics.prefill_flops(config, int(tokens)) / PEAK[side]


rows = results[results.metric.eq("median_ttft") & results.source.eq("arxiv:S8.1")]
read = pd.DataFrame([(int(row.input_tokens), side.upper(), float(getattr(row, side)),
                      floor_ms(side, row.input_tokens))
                     for row in rows.itertuples() for side in ("tpu", "gpu")],
                    columns=["tokens", "machine", "published, ms", "floor, ms"])
read["share of peak, %"] = 100 * read["floor, ms"] / read["published, ms"]
read.round(0)

# %% [markdown]
# 62 and 99 ms for a prompt of 15,360 tokens would take 2.2 and 5.1 times the chips' peak. So either a
# part was skipped, which a cache does, or the prompts were shorter. The headline, 61 ms at 4,096 tokens,
# is possible, at 56 % of peak and with nothing else to do. The sweep shows it in company.
#
# ## 4. The sweep
# A figure of the draft (page 15) plots median TTFT for 1 to 64 requests per second, 30 prompts per
# point. Prompts that come faster than they can be read wait, so the floor under the *median* rises with
# the load. The row called 16k fits 7 prompts instead of 30 (section 6).

# %%
sweep = table("qps_sweep_digitized")
sweep["tokens"] = sweep.input_tokens.replace("~16k", "15360").astype(int)
ttft = sweep[sweep.metric == "ttft"].copy()
ttft["n"] = np.where(ttft.tokens == 15_360, 7, PROMPTS)
ttft["floor_ms"] = [physics.median_ttft_floor_fcfs(row.n, row.qps, floor_ms(row.device, row.tokens)
                                                   / 1e3) * 1e3 for row in ttft.itertuples()]
ttft["too_fast"] = ttft.floor_ms > 1.2 * ttft.value
alone = [floor_ms(row.device, row.tokens) > 1.2 * row.value for row in ttft.itertuples()]
print(f"{ttft.too_fast.sum()} of {len(ttft)} points are more than 1.2 times too fast; "
      f"{sum(alone)} of them even for one prompt alone")

# %%
fig, axes = style.figure(9, 6.0, rows=2, columns=3, sharex=True, sharey=True)
for ax, (tokens, group) in zip(axes.flat, ttft.groupby("tokens"), strict=True):
    for side, color, marker in (("tpu", style.BLUE, "o"), ("gpu", style.ORANGE, "s")):
        points = group[group.device == side]
        ax.plot(points.qps, points.floor_ms, "--", color=color, linewidth=1.2)
        ax.plot(points.qps, points.value, marker + "-", color=color, linewidth=0.8, ms=5.5,
                label="TPU v6e-8" if side == "tpu" else "2 x H100")
        wrong = points[points.too_fast]
        ax.plot(wrong.qps, wrong.value, marker, color=color, ms=5.5, markerfacecolor="white")
    name = f"{tokens:,} tokens in" if tokens < 15_360 else "about 16k in, 7 prompts"
    ax.set_title(name, fontsize=10, fontweight="normal")
    ax.set(xscale="log", yscale="log", xticks=[1, 2, 4, 8, 16, 32, 64], ylim=(2, 20_000))
    ax.set_xticklabels([1, 2, 4, 8, 16, 32, 64])
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.minorticks_off()
axes[0, 0].legend(fontsize=9, loc="upper left")
axes[0, 0].set_ylabel("median TTFT, ms")
axes[1, 0].set_ylabel("median TTFT, ms")
axes[1, 1].set_xlabel("offered requests per second (dashed: the floor; open: too fast)")
fig.suptitle("Nine of twelve series fall at their second point: more load, less waiting",
             fontsize=11, fontweight="bold", x=0.01, ha="left")
style.finish(fig, "10_sweep", "digitised from the draft's PDF, p. 15; floors at 100 % of peak")

# %% [markdown]
# The factor of 1.2 leaves room for the 1 % of reading a figure, for engines that skip part of the
# last layer (1.7 %), and for the rhythm of arrivals: the client sends at random gaps, our floor
# assumes even ones. A test draws such gaps 4,000 times: all sixteen points stay impossible in more than
# 99 % of the draws.
#
# In three series more load means a longer wait: the GPU's at 4,096 and 8,192 tokens and the TPU's at
# 8,192. In the other nine TTFT *falls* from 1 to 2 requests per second and then stays within a factor of
# 1.4 up to 16.
#
# ## 5. More load, less waiting
# **Why would a prompt be read faster when more of them come?**
#
# <details><summary>Answer</summary>
#
# It is read once. vLLM keeps the keys and values (KV) of earlier prompts in a *prefix cache* as long as
# they fit. `vllm bench serve` draws its random prompts from a fixed seed, so every point of a sweep on
# one server sends the same prompts. The first point fills the cache (*cold*), the next ones find it
# (*warm*).
# </details>
#
# If so, TTFT must fall exactly where one run's tokens fit the cache. We compute the room from the
# logged memory minus the weights, assuming that every layer keeps every token:

# %%
def pool_tokens(side, dtype_bytes):
    """Tokens that fit beside the weights if every layer keeps every token."""
    used = float(hardware.loc["hbm_used_per_chip", side]) * 2**30 * count[side]
    per_token = sum(physics.kv_bytes_per_token(config, dtype_bytes, count[side]).values())
    return (used - float(hardware.loc["weights_bf16", side]) * 1e9) / per_token


value = ttft.pivot_table(index=["tokens", "device"], columns="qps", values="value")
short = value.drop(15_360)
need = pd.Series({key: PROMPTS * (key[0] + (256 if key[0] == 512 else 512)) for key in short.index})
falls = short[2] < short[1]
for name, fp8 in (("bfloat16 on both", False), ("fp8 on the TPU", True)):
    fits = [need[key] < pool_tokens(key[1], 1 if fp8 and key[1] == "tpu" else 2)
            for key in short.index]
    print(f"{name}: falls exactly where one run fits in {(falls == fits).sum()} of {len(fits)}")
print({side: f"room for {pool_tokens(side, 2):,.0f} tokens in bfloat16" for side in count})

# %% [markdown]
# So the fall is most likely the prefix cache. That it held bfloat16, as S8.1's text says, and not fp8,
# as its table says, rests on one series, the TPU's at 8,192 tokens. No log of the sweep is public. Others
# have met the same trap, and vLLM's client now warns of it
# ([vllm 53920](https://github.com/vllm-project/vllm/pull/53920)).
#
# ## 6. The headline, 23.6 times
# 1,443 ms over 61 ms. What is in it? The point at 1 request per second is cold on both sides and, at
# this length, without a queue.

# %%
headline = results[(results.input_tokens == 4096) & (results.metric == "median_ttft")].iloc[0]
tpu_cold, gpu_cold = value.loc[(4096, "tpu"), 1], value.loc[(4096, "gpu"), 1]
parts = {"both cold, 1 request/s": gpu_cold / tpu_cold,
         "the GPU's queue at QPS 4": float(headline.gpu) / gpu_cold,
         "the TPU's prefix cache (most likely)": tpu_cold / float(headline.tpu)}
print(" x ".join(f"{part:.2f}" for part in parts.values()), f"= {math.prod(parts.values()):.2f}")
# In a queue that never empties, prompt i waits i * s - (i - 1) / rate: the median gives s.
middle = (PROMPTS + 1) / 2
for qps in (4, 8, 16, 32, 64):
    s = (value.loc[(4096, "gpu"), qps] + 1e3 * (middle - 1) / qps) / middle
    print(f"GPU at QPS {qps}: {s:.0f} ms per prompt, {floor_ms('gpu', 4096) / s:.0%} of peak, "
          f"{qps * s / 1e3:.0%} of its time asked for")

# %%
fig, ax = style.figure(height=2.4)
left = 1.0
for row, (name, part) in enumerate(parts.items()):
    ax.barh(row, left * part - left, left=left, color=(style.BLUE, style.GREY, style.GREY)[row])
    left *= part
    text = f"{part:.1f} times" + f", together {left:.1f}" * bool(row)
    ax.text(left * 1.05, row, text, va="center")
ax.set(xscale="log", yticks=range(3), yticklabels=list(parts), xlim=(1, 150), ylim=(2.6, -0.6),
       xticks=[1, 2, 5, 10, 20], xlabel="median TTFT at 4,096 tokens, GPU / TPU",
       title="Cold, at one request/s, the TPU answers 2.7 times sooner")
ax.set_xticklabels([1, 2, 5, 10, 20])
ax.minorticks_off()
ax.grid(axis="y", visible=False)
style.finish(fig, "10_headline", "published table (S8.1) and digitised sweep")

# %% [markdown]
# 2.7 is the comparison that a reader expects: cold prompts, at a load that both servers keep up with. The
# rest is a queue on one side (at 4 requests a second the GPU is asked for 130 % of what it does, so its
# median depends on how many prompts are sent) and a cache on the other. One number, 0.32 seconds per
# prompt at 40 % of peak, explains five of the GPU's points.
#
# The cold ratios at all lengths, each from one run a side:

# %%
cold = value[1].unstack("device")
cold["GPU / TPU"] = cold.gpu / cold.tpu
print(f"the peaks differ {PEAK['tpu'] / PEAK['gpu']:.1f} times")
cold.round(1)

# %% [markdown]
# From 8,192 tokens on the GPU's median holds a queue even at one request per second. For the prefill
# alone random gaps allow 1.4 to 2.0 at 8,192 and 2.3 to 3.8 at 16k (`tests/test_published.py`).
#
# **Why does the TPU read 16k tokens faster than 8,192?**
#
# <details><summary>Answer</summary>
#
# The row is another workload than its label. At 64 requests per second output speed is about prompts
# divided by TPOT: 474 tokens per second times 13.5 ms are 6.4, not 30. Seven prompts with answers of 256
# tokens fit both ends of the curve, on both machines.
# </details>
#
# *"Saturates at QPS ~32 ~8"*: thirty prompts at 8 per second are a burst of four seconds, which shows no
# capacity. In the authors' log the TPU made 3,085 tokens per second with 128 prompts; the sweep's peak is
# 1,404. No such GPU run is public.
#
# ## 7. Training
# A LoRA step needs at least 4 operations per parameter and token, 6 by the usual convention, and padding
# is work, too. The code filled each sequence up to 3,072 tokens (S3.8; S5.1 says 4,096), of which 922
# were real on average.

# %%
training = table("training_results").set_index("metric")
data = table("data_stats").set_index("name").value
hours = table("training_cost").set_index("metric")
params = physics.parameters(config)["total"]
fill = float(data["token_len_mean"]) / float(data["max_seq_len"])
usd = {}
for side, chips, name in (("tpu", 4, "v5p"), ("gpu", 2, "h100")):
    machine = chips * chip_of(name).flops
    share = 6 * params * float(training.loc["throughput", side]) / machine
    usd[side] = float(hours.loc["hourly_rate", side]) / machine
    padded = f", {share / fill:.1%} with its padding" * (side == "tpu")
    print(f"{side.upper()}: {share:.1%} of peak in real tokens{padded}")
paid = {side: float(hours.loc["total_cost", side]) for side in usd}
print(f"cheaper by the measured runs: {paid['gpu'] / paid['tpu']:.2f} times; at equal use of the "
      f"peaks: {usd['gpu'] / usd['tpu']:.2f} times")

# %% [markdown]
# 3.34 and 5.39 hours were measured, on two machines that were both far from busy with real tokens. (The
# GPU's code is not public, so whether it padded is unknown.) S5.3 gives four reasons for the difference.
# Two conflict with its numbers, bandwidth and interconnect; XLA fusion and eager mode were not profiled.
#
# *"Both runs used identical hyperparameters"* (S5.1) does not hold: by the authors' plot code the
# GPU made 625 steps of 16 sequences, the TPU 1,244 of 8, and the two published patterns of adapted
# modules reach 489.7 and 467.8 million parameters (the TPU's leaves out the key projection of ten
# layers; [03](03_train.ipynb)). Clipping differs as well; S3.7 says so itself. And by default Qwix
# draws LoRA's A 2.45 times wider than PEFT does.
#
# ## 8. Quality
# 156 problems, five samples each. The bars of a figure give all 312 scores back; their totals are
# exactly the published 500 and 544 passes. **Is that gap noise?** We compare problem by problem, with the
# interval and the sign flips of [07](07_eval.ipynb). *z* asks only whether another five samples could
# have made the gap.

# %%
def sampling_z(first, second, samples):
    """z of the difference in pass@1 against the noise of drawing `samples` per problem alone."""
    variance = 0.0
    for passed in (first, second):
        share = passed / samples
        variance += (share * (1 - share) / (samples - 1)).sum() / len(share) ** 2
    return (second.mean() - first.mean()) / samples / math.sqrt(variance)


scores = table("eval_per_problem_digitized")
tpu, gpu = scores.tpu_passed_of_5.to_numpy(), scores.gpu_passed_of_5.to_numpy()
gap, low, high = interval((gpu - tpu) / 5)
sound = ~scores.problem.str.extract(r"Prob(\d+)_")[0].astype(int).isin(DISPUTED).to_numpy()
flip, sound_flip = sign_flip_p(gpu - tpu), sign_flip_p((gpu - tpu)[sound])
z = sampling_z(tpu, gpu, 5)
only = [int(((a > 0) & (b == 0)).sum()) for a, b in ((tpu, gpu), (gpu, tpu))]
print(f"pass@1 {tpu.sum() / 780:.4f} and {gpu.sum() / 780:.4f}: {gap:.3f} higher for the "
      f"GPU-trained model, 95 % interval {low:.3f} to {high:.3f}")
print(f"over problems p = {flip:.4f}; without {sum(~sound)} disputed ones {sound_flip:.4f}")
print(f"over samples z = {z:.1f}; pass@5: {only[0]} and {only[1]} problems solved by one model "
      f"only, p = {stats.binomtest(only[0], sum(only)).pvalue:.2f}")

# %% [markdown]
# S6.2 says two things. *"The gap is within normal run-to-run variance for stochastic sampling at
# n=5"* does not hold: z is 4.5. The gap *"is not statistically significant enough to attribute to
# hardware"*: it is significant over problems, but no test of one training run a side can name a cause.
# So their advice stands, that it *"should not be interpreted as a hardware-driven difference"*.
#
# Five problems are disputed (an open pull request changes their tests,
# [verilog-eval 16](https://github.com/NVlabs/verilog-eval/pull/16)); without them p is 0.02. Without the
# base model's score nobody knows what tuning did; [07](07_eval.ipynb) asks its base, too.
#
# ## 9. Cost

# %%
tco = table("tco").set_index("component")
for served in (1, 8, 24):
    cost = {side: tco.loc["training", f"{side}_usd"]
            + served * tco.loc["inference_1h", f"{side}_usd"] for side in ("tpu", "gpu")}
    print(f"training and {served} h of serving: {cost['tpu']:.2f} against {cost['gpu']:.2f} USD, "
          f"{cost['gpu'] / cost['tpu']:.2f} times")
day = cost["gpu"] / cost["tpu"]

# %% [markdown]
# The sums are S9's. Its sentence says *"1.82× cheaper end-to-end for a single training run plus a day of
# inference serving"*: 1.82 is the row with one hour, a day gives 1.14.
#
# *"For short-context workloads, GPU is 3% cheaper per token"* (S8.6) rests on one burst of 30 requests a
# side. In the authors' log with 64 prompts the TPU is 6 % cheaper. [06](06_bench.ipynb) varies the load.
#
# ## 10. The verdicts
# Every claim word for word, and whether the published numbers bear it. `verdicts.csv` also names the
# line of the draft where each stands.

# %%
verdicts = table("verdicts")
print(verdicts.verdict.value_counts().to_dict())
left = [{"selector": name, "props": "text-align: left"} for name in ("th", "td")]
verdicts.drop(columns="seen_in").style.hide(axis="index").set_table_styles(left)

# %%
helpers.write_json(helpers.run_dir("published.json"), {
    "too_fast_in_sweep": int(ttft.too_fast.sum()), "claims": kinds.to_dict(),
    "headline_parts": {name: round(float(part), 3) for name, part in parts.items()},
    "pass@1_difference": round(gap, 4), "sign_flip_p": round(flip, 4), "z": round(z, 2),
    "sign_flip_p_undisputed": round(sound_flip, 4), "cost_ratio_24h": round(day, 3)})

# %% [markdown]
# Three reasons come back: a prefix cache that was most likely warm, too few requests per point, and no
# profile behind an explanation. [06](06_bench.ipynb) is built against the first two. What else this
# series does otherwise is in `data/published/corrections.csv`, with the page that shows it.
#
# ## Recap
# The divisions are right. By the authors' own data, cold and at one request per second, a v6e-8 begins
# its answer to 4,096 tokens about 2.7 times sooner than two H100s for about the same price: one run of 30
# prompts a side, vLLM 0.19.0 against 0.20.2, read off a figure. 23.6 is the ratio of a queue to most
# likely a cache, the quality gap is not sampling noise, and 1.82 is for an hour.
#
# ### Exercises
# 1. A blog ([dev.to/gde/gemma4-5fon](https://dev.to/gde/gemma4-5fon), May 2026) reports a peak of
#    463,345 tokens per second of prefill for this model on a v6e-4. Take prompts of 1,600 tokens,
#    one of the two lengths it names. What share of the four chips' peak is that?
# 2. How many samples per problem would it have taken to see the difference in pass@1 at z = 2
#    against sampling noise alone?
#
# <details><summary>Solutions</summary>
#
# 1. `463_345 / 1600 * physics.prefill_flops(config, 1600) / (PEAK["tpu"] / 2)` is about 7.6, so
#    7.6 times the peak. A prefix cache again, most likely.
# 2. z grows with the square root of the number of samples: 4.46 at five, so `5 * (2 / 4.46) ** 2`
#    is about one sample per problem. The problems, not the samples, limit this comparison.
#
# </details>
#
# Next: [06 · How fast is it, and could it be?](06_bench.ipynb) or
# [07 · pass@k that can be believed](07_eval.ipynb).
