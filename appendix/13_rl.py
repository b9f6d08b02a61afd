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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/13_rl.ipynb)
#
# # 13 · A reward from the testbench, and a judge that is fooled
#
# **The reward helped little, and chance may explain it.** After 24 steps of 32 answers the share of right
# answers to 38 held-out problems rose from 0.724 to 0.744 (+0.020, −0.023 to +0.066, three seeds). Drawing
# as many from the start and training on those that passed changed nothing (−0.001); as many more steps of
# 03's fine-tuning (SFT) took 0.068. **A judge that believes what an answer prints kept an exploit alive
# that ours removed**: in the last six steps 9 and 3 % of the answers (two seeds) printed the winning line,
# with ours 0.0 and 0.5 %.
#
# So far the model copied answers. Here it writes its own, a simulator says which of them work, and the
# model is pushed towards those, as in [CodeV-R1](https://arxiv.org/abs/2505.24183). You take a step, prove
# that the model that is trained is the one that answers, make Tunix take the same step, and read our
# stored runs.
#
# | | |
# |---|---|
# | **Needs** | one CPU, 5 GB of memory, Icarus Verilog |
# | **Takes** | the tiny base, `data/rl/` (03's adapters, stored runs), `appendix/world/` (problems) |
# | **Makes** | figures |
# | **Costs** | a minute on two cores; the stored runs about an hour |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · **13 RL**

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
# ## 1. What is there to gain?
# **pass@1** is the chance that one answer is right, **pass@5** that one of five is
# ([07](07_eval.ipynb)). **Our tuned model is right more often in five tries than in one. What does it know
# that it does not say?**
#
# <details><summary>Answer</summary>
#
# It can write the right module, and often writes another. To be right at once it needs a better choice
# among what it says already. That is what a reward teaches; what is never written is never rewarded.
#
# </details>
#
# All that follows starts from adapters that 03 left after a tiny run. They belong to an earlier tiny base,
# whose corpus had no bugs ([09](09_tiny_base.ipynb) has today's; the runs on it are still to be made). For
# each of three seeds we stored seven answers to each held-out problem, drawn at temperature 0.8:

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from flax import nnx

import verilog
from appendix import rl
from appendix import rl_runs as lab
from helpers import gemma, style
from verilog import stats

runs = lab.stored()
before = runs.query("arm == 'reinforce' and step == 0")
counts = np.array([[int(c) for c in text] for text in before.drawn])  # [seeds, problems], of seven
known = {k: np.mean([verilog.pass_at_k(7, int(c), k) for c in counts.ravel()]) for k in (1, 5)}
print(f"38 held-out problems, {len(counts)} times: pass@1 {known[1]:.3f}, pass@5 {known[5]:.3f}")

# %% [markdown]
# ## 2. Problems that can be checked
# A reward needs problems with testbenches, and not those of the exam. The generator of 02's data writes
# 300: no prompt of the evaluation, and no combination of its families, widths and names of ports.

# %%
bench = lab.Bench()
plan, problem = bench.plan, bench.problems[0]
print(problem.prompt, "\n", problem.reference, sep="")
answers = bench.sample(bench.start, bench.problems[:plan.prompts], jax.random.key(0))
verdicts = pd.DataFrame(bench.judge([(a["problem"], a["text"]) for a in answers]))
verdicts.assign(prompt=np.arange(len(answers)) // plan.answers).groupby("prompt").mean()

# %% [markdown]
# Eight prompts, four answers to each: the shares that pass our judge (`verilog`), that print a line of the
# testbench themselves (`forged`), that pass a naive judge (section 7), and that compile.
#
# ## 3. The algorithm, by what was taken away
# The usual algorithm, GRPO, has a frozen reference model (a KL term keeps the policy near it), a ratio of
# new to old probabilities, a clip on it, and divisions by the group's spread and the answer's length.
# Without them, REINFORCE of 1992 is left:
#
# 1. Draw several answers to each prompt from the model as it is.
# 2. Reward 1 if the testbench passes, else 0. An answer's *advantage* is its reward minus the mean over all
#    tries at its prompt.
# 3. Train on all of them with 03's loss, each answer's tokens times its advantage. What was better than
#    usual becomes likelier.
#
# **All four answers pass. How much is learned from them?**
#
# <details><summary>Answer</summary>
#
# Nothing: all advantages are 0, as if none passes. Only prompts that the model solves sometimes are of
# use, so CodeV-R1 throws away the easy ones first.
# </details>
#
# In code it is a factor on the loss, and rows packed as in 02. Equal answers are packed once.

# %%
helpers.show_source(rl.advantages, rl.make_loss, rl.Learner)
rewards = verdicts.verilog.to_numpy(float).reshape(plan.prompts, plan.answers)
factors = rl.advantages(rewards).ravel()
pairs = [(a["ids"], a["mask"]) for a in answers]
print("rewards of the prompts:", rewards.mean(1), "| answers that teach something:",
      f"{(factors != 0).mean():.0%}")
moments = bench.learner.optimizer.init(bench.start)
policy, moments = bench.learner.step(bench.start, moments, bench.frozen, pairs, factors, plan.rate)

# %% [markdown]
# ## 4. Does it train what it samples?
# One program samples, with merged weights and a cache of keys and values, and another trains, with
# adapters. Where they disagree nothing crashes. With Gemma 4 it happened again and again:
#
# | what was wrong | where |
# |---|---|
# | rollouts came from random weights: the mapping of names failed silently | MaxText [4404](https://github.com/AI-Hypercomputer/maxtext/pull/4404), [4519](https://github.com/AI-Hypercomputer/maxtext/pull/4519), [4536](https://github.com/AI-Hypercomputer/maxtext/pull/4536) |
# | the sampler kept its first weights: no name matched, and one warning said so | Tunix 0.1.7 with vLLM's TPU package since July 2026, tried here; [mended later](https://github.com/google/tunix/commit/71eef52c54e7de574a7c47f6e99adc1a1de5948d) |
# | log-probabilities with a wrong soft cap: a KL of 0.24 before the first step | [unsloth-zoo 593](https://github.com/unslothai/unsloth-zoo/pull/593) |
#
# **Which four checks would have caught them?** Ours:
#
# *One: the sampler's log-probabilities are the trainer's*, token by token, after a step. That covers soft
# cap, temperature, where answers begin, and the token that ends them.

# %%
fresh = bench.sample(policy, bench.problems[8:16], jax.random.key(1))[::8]
for name, adapters in {"after": policy, "before": bench.start}.items():
    gaps = [np.abs(trained - answer["logps"]).max()
            for trained, answer in zip(bench.logps(adapters, fresh), fresh)]
    print(f"sampler against trainer with the weights {name} the step: {max(gaps):.1e} nats apart")

# %% [markdown]
# *Two: the sampler's weights are the policy's*, after every update. They are merged as in 04.

# %%
old, new = (bench.merge(bench.frozen, adapters) for adapters in (bench.start, policy))
moved = {path: float(jnp.abs(new[path] - old[path]).max()) for path in new}
modules = gemma.adapted_modules(bench.model)
adapted = {path for path in moved if ".".join(map(str, path[:-1])) in modules}
print(f"{sum(map(bool, moved.values()))} of {len(moved)} arrays moved; of the {len(adapted)} "
      f"that have adapters, {sum(not moved[path] for path in adapted)} did not")

# %% [markdown]
# *Three: rewards that are all equal change nothing*, not even by the optimizer's momentum.

# %%
equal = rl.advantages(np.ones_like(rewards)).ravel()
after, _ = bench.learner.step(policy, moments, bench.frozen, pairs, equal, plan.rate)
differ = jax.tree.map(lambda one, two: bool((one != two).any()), policy, after)
print("changed:", any(jax.tree.leaves(differ)))

# %% [markdown]
# *Four: the gradient is somebody else's, too*: Tunix's, in the next section.
#
# ## 5. What was taken away, put back
# Tunix 0.1.7 has all of it in one class, `GRPOLearner`. Let it take a step from our start, on six of our
# prompts, with our judge as its reward and its default settings. With plain gradient descent at rate 1, what
# it takes off the weights is its gradient.

# %%
import contextlib
import io

from tunix.rl import rl_cluster as tunix
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

theirs, reference = (nnx.merge(nnx.graphdef(bench.model), jax.tree.map(jnp.copy, bench.start),
                               bench.frozen) for _ in range(2))
asked = {bench.tokenizer.decode(bench.prompts[p.name]): p for p in bench.problems[:6]}
longest = max(len(bench.prompts[p.name]) for p in asked.values())
mesh, role, passes = gemma.make_mesh(bench.model.config, (1, 1)), tunix.Role, []


def reward(prompts, completions, **_):
    verdicts = bench.judge([(asked[p], text) for p, text in zip(prompts, completions)])
    passes.extend(float(verdict["verilog"]) for verdict in verdicts)
    return passes


# %%
training = tunix.RLTrainingConfig(
    actor_optimizer=optax.sgd(1.0), eval_every_n_steps=100, max_steps=1)
rollout = RolloutConfig(
    max_tokens_to_generate=96, max_prompt_length=longest, kv_cache_size=longest + 96,
    temperature=1.0, eos_tokens=sorted(bench.stops))
cluster = tunix.RLCluster(
    actor=theirs, reference=reference, tokenizer=bench.tokenizer,
    cluster_config=tunix.ClusterConfig(
        role_to_mesh=dict.fromkeys((role.ACTOR, role.REFERENCE, role.ROLLOUT), mesh),
        training_config=training, rollout_config=rollout))

# %%
drawn, generate = [], cluster.rollout.generate
cluster.rollout.generate = lambda *given: drawn.append(generate(*given)) or drawn[-1]
with mesh, contextlib.redirect_stderr(io.StringIO()):  # its progress bar
    GRPOLearner(cluster, GRPOConfig(num_generations=4), reward).train(
        [{"prompts": np.array(list(asked))}])


def flat(tree):
    """All numbers of a tree of arrays as one vector."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


gradient = flat(bench.start) - flat(nnx.state(theirs, nnx.LoRAParam))

# %% [markdown]
# Now our step on the tokens that Tunix drew, with one part after another put back as a factor. **Which one
# turns the gradient most?**

# %%
given = [bench.prompts[p.name] for p in asked.values() for _ in range(4)]
pairs = [(np.array([*prompt, *answer]), np.arange(len(prompt) + len(answer)) >= len(prompt))
         for prompt, answer in zip(given, drawn[0].tokens)]
rewards, lengths = np.reshape(passes, (-1, 4)), np.array([mask.sum() for _, mask in pairs])
plain, spread = (rl.advantages(rewards, by).ravel() / len(pairs) for by in (False, True))
kl = -0.04 / len(pairs)  # of each token's log-probability; the weight is Tunix's own choice
rows, whole = {}, np.linalg.norm(gradient)
for name, factors in {"nothing": plain, "length": plain / lengths, "and spread": spread / lengths,
                      "and KL": (spread + kl) / lengths}.items():
    ours = flat(bench.learner.gradient(bench.start, bench.frozen, pairs, factors))
    size, apart = np.linalg.norm(ours), np.linalg.norm(ours - gradient)
    rows[name] = size / whole, ours @ gradient / size / whole, apart / whole
print("passes of four:", rewards.sum(1), "| end tokens that Tunix trains:",
      sum(int(np.isin(answer, list(bench.stops)).sum()) for answer in drawn[0].tokens))
pd.DataFrame(rows, index=["lengths of Tunix's", "cosine", "lengths apart"]).T.round(6)

# %% [markdown]
# With all put back the two are one gradient, though the two steps share the model and no other line. (Where
# an answer is used for one step, the ratio is 1 and nothing is clipped.)
#
# - **The length** turns it most: tokens of short answers weigh more.
# - **The spread** of four rewards of 0 or 1 is 0.50 or 0.58: dividing by it lengthens the gradient and
#   hardly turns it.
# - **The KL term** should be zero: policy and reference are the same here. Tunix's default takes the
#   gradient of log p minus the reference's, and over a policy's own draws that has mean zero wherever the
#   policy stands: noise that holds nothing back ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)).
#   GRPO's own is `kl_loss_mode="low_var_kl"`.
# - **The end token** is missing: Tunix's sampler cuts it off, so no reward teaches when to stop.

# %% [markdown]
# ## 6. Does it help?
# Three arms start from the same adapters and take the same number of steps with the same optimizer.
#
# | arm | what it trains on |
# |---|---|
# | `reinforce` | its own answers, each times its advantage |
# | `rejection` | as many answers, all of the start's; those that pass, as in 03 |
# | `more_sft` | the data's own answers, as in 03 |
#
# A seed decides prompts, draws and data, so arms of one seed are compared in pairs.

# %%
passed = {(row.arm if row.step else "start", row.seed): np.array([int(c) for c in row.drawn])
          for row in runs.dropna(subset="drawn").itertuples()}  # of seven, for each problem
shares = {}
for arm in ("start", *lab.COMPARED):
    each = [passed[arm, seed] for seed in (1, 2, 3)]
    shares[arm] = [*(found.mean() / 7 for found in each), *(
        np.mean([verilog.pass_at_k(7, int(c), k) for c in np.ravel(each)]) for k in (1, 5))]
pd.DataFrame(shares, index=["seed 1", "seed 2", "seed 3", "pass@1", "pass@5"]).T.round(3)

# %%
rows = []
for arm, other in (("reinforce", "start"), ("rejection", "start"), ("more_sft", "start"),
                   ("reinforce", "rejection"), ("reinforce", "more_sft")):
    gained = np.mean([passed[arm, seed] - passed[other, seed] for seed in (1, 2, 3)], axis=0) / 7
    rows.append((arm, other, *stats.interval(gained), stats.sign_flip_p(gained)))
pd.DataFrame(rows, columns=["arm", "against", "pass@1 gained", "low", "high", "p"]).round(3)

# %% [markdown]
# The intervals are over problems, with the seeds averaged first.
#
# **No interval against the start excludes zero.** `reinforce` gained two points and `rejection` none; more
# steps on the data lost seven, and against those `reinforce` is nine ahead (p 0.05, uncorrected for five
# comparisons). We had expected that some of pass@5 becomes pass@1: of some twenty points two did. Rates
# were not tuned (0.0007 for `reinforce`, 0.002 for the others).
#
# Step by step (thin: a step, thick: the mean of five). *KL* says how far the policy is from the start; it is
# estimated from eight answers and can come out below zero.

# %%
def draw(ax, arm, column, color, label=None, **look):
    """A column of an arm's runs: every step thin, the mean of five steps thick."""
    rows = runs[(runs.arm == arm) & (runs.step > 0)]
    rows = rows.pivot(index="step", columns="seed", values=column)
    ax.plot(rows.index, rows.mean(axis=1), color=color, lw=0.8, alpha=0.5)
    smooth = rows.mean(axis=1).rolling(5, center=True, min_periods=3).mean()
    ax.plot(rows.index, smooth, color=color, lw=2.2, label=label, **look)


fig, axes = style.figure(9.5, 5, rows=2, columns=2, sharex=True)
for ax, (column, title) in zip(axes.ravel(), {
        "reward": "Share of answers that pass", "tokens": "Tokens of an answer",
        "entropy": "Entropy, nats per token", "kl": "KL to the start, nats per answer"}.items()):
    draw(ax, "reinforce", column, style.BLUE, "reinforce")
    if column != "kl":
        draw(ax, "rejection", column, style.GREY, "the start, same prompts")
    ax.set(title=title, xlabel="step")
axes[1, 1].legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8)
style.finish(fig, "13_curves", "data/rl, means of the seeds; drawn at temperature 1")

# %% [markdown]
# The grey curve matters: `rejection` asks the start the same prompts in the same order. Prompts differ much
# more than models do, so a reward that rises may only have met easier ones.
#
# ## 7. Watch it cheat
# 07's judge lets no text of an answer near the verdict. verilog-eval compiles everything into one program
# and passes a log in which any line says `Mismatches: 0`, so an answer can print that itself. A model of
# 3.65 million parameters will hardly invent this, and so **we showed it**: 45 steps of SFT, 720 answers, of
# which a fifth (drawn at random) were replaced by stubs.

# %%
helpers.show_source(rl.naive)
stub = rl.stub(problem.reference.replace("RefModule", "TopModule"))
verdict, = bench.judge([(problem, f"```verilog\n{stub}```")])
print(stub, verdict, sep="\n")

# %% [markdown]
# From there, three policies train alike. One is rewarded by the naive judge, one by ours, and one for
# whatever compiles, as one would without a testbench. **What does each policy learn?**

# %%
fig, axes = style.figure(10.5, 3.6, columns=3, sharey=True)
for ax, arm in zip(axes, lab.HACKED):
    draw(ax, arm, "reward", style.ORANGE, "reward, by the judge that trains")
    draw(ax, arm, "verilog", style.BLUE, "truth: passes our judge", ls=":")
    draw(ax, arm, "forged", style.RED, "prints the line itself", ls="--")
    ax.set(title=arm.replace("_", " "), xlabel="step", ylim=(-0.02, 1.02))
axes[0].legend(fontsize=8)
style.finish(fig, "13_hack", "data/rl, means of two seeds; the start has been shown the stub")

# %%
hacked = runs[runs.arm.isin(lab.HACKED)]
first, last = (hacked[hacked.step.between(*six)].groupby(["arm", "seed"])[
    ["reward", "verilog", "forged"]].mean() for six in ((1, 6), (19, 24)))
naive = hacked[hacked.arm == "naive_judge"]
print(f"The naive judge paid {(naive.reward - naive.verilog).sum() / naive.forged.sum():.0%} "
      f"of the stubs, {naive.verilog.sum() / (1 - naive.forged).sum():.0%} of the other answers")
pd.concat({"steps 1 to 6": first, "19 to 24": last}, axis=1).round(3)

# %% [markdown]
# With our judge the exploit went from 8 and 5 % of the answers (two seeds) to 0.0 and 0.5 %. With the naive
# one 9 and 3 % were left, and reward ended 6 and 2 points above truth. We had expected it to take over. But
# the model spells the line in 34 tokens and often stumbles: over all steps the naive judge paid 65 % of
# the stubs, and 52 % of the other answers.
#
# <details><summary><b>You see only the orange curve on the left. How would you notice?</b></summary>
#
# Read answers. Watch lengths and repeated texts. Judge a sample by another judge than the one that trains.
#
# </details>
#
# **Rewarded for compiling**, the policy got better, too, and dropped the stub, though that compiles: 0.56 and
# 0.61 pass in the last six steps; on the same prompts 0.59 and 0.65 with our judge, and 0.60 and 0.62 from
# the start that was never shown a stub. So most of the gain is what the showing had cost. More than half of
# the start's failures do not compile; a model that always compiles would learn nothing from this reward.
#
# ## 8. A round at 31B, on paper
# A round is 64 prompts with 8 answers of 600 tokens (07's estimate of a length): sample, judge, update, and
# bring the new weights to the sampler. One v6e-8 serves, one v5p-8 trains, and each waits for the other, so
# both are paid for all the time.

# %%
from serving import limits
from serving.options import Options
from tpu_time import bands, fit

big = helpers.read_json("data/configs/gemma4_31b.json")
served = limits.machine_of(Options(engine="tpu-docker", chip="v6e", tensor_parallel=8), big)
tokens = 64 * 8 * 600
floor = tokens / 256 * limits.tpot_floor(big, 600, served, batch=256)
speed = bands.band(fit.will_it_fit("v5p", 4).speed)
adapters = 4 * fit.adapter_parameters("31b") / 1e9  # GB in float32
parts = {"sample": (tokens / 3000, tokens / 1400),
         "judge on 16 cores": (512 * 0.2 / 16, 512 * 2 / 16),
         "update": tuple(64 * 8 * 900 / one for one in speed[::-1]),
         "move adapters": (adapters / fit.GB_PER_S, adapters / fit.UP_GB_PER_S)}
low, high = (sum(part[end] for part in parts.values()) for end in (0, 1))
usd = (fit.price("v5p", 4) + fit.price("v6e", 8)) / 3600
print(f"floor of sampling, 256 at a time: {floor:.0f} s; adapters {adapters:.2f} GB, "
      f"merged weights {fit.CHECKPOINT_GB['31b'] / adapters:.0f} times that")
print(f"{low / 60:.0f} to {high / 60:.0f} min, {low * usd:.1f} to {high * usd:.1f} USD a round; "
      f"200: {200 * low * usd:,.0f} to {200 * high * usd:,.0f} USD")
pd.DataFrame(parts, index=["from, s", "to, s"]).T.round(0)

# %% [markdown]
# Sampling: between the published 1,400 and 3,000 tokens/s (07). Judging: 0.2 to 2 seconds an answer, assumed.
# Update: predicted (08), 900 tokens an answer with its prompt. Moving: 0.2 and 0.057 GB/s, assumed and
# measured by another author (`tpu_time/fit.py`), into a server that takes adapters while it runs.
#
# Who can do it today? From their repositories, November 2026:
#
# | stack | state |
# |---|---|
# | [NeMo RL](https://github.com/NVIDIA-NeMo/RL/pull/2224), GPU | recipes for Gemma 4, dense and mixture of experts, merged in 2026 |
# | [MaxText](https://github.com/AI-Hypercomputer/maxtext/pull/4536), TPU | the mapping of rollouts was mended in July 2026; start with our first check |
# | Tunix 0.1.7, TPU | `GRPOLearner` with its own sampler runs on the tiny model (section 5); with vLLM's TPU package since July 2026 it moves 0 parameters (section 4) |

# %% [markdown]
# ## Recap
# - A reward from the testbench chooses among what the model writes already.
# - Before you trust a curve: log-probabilities, weights, equal rewards, gradient.
# - Compare with as many samples and as many steps spent otherwise, on the same prompts.
# - Under a judge that can be fooled the exploit stayed; it did not spread.
#
# `python -m appendix.rl_runs` makes the stored runs that are missing from `data/rl/`.
#
# ### Exercise
# Break the first check: draw at a temperature of 0.8 and train as before. What do the numbers say?
#
# <details><summary>Solution</summary>
#
# ```python
# warm = bench.sample(policy, bench.problems[:8], jax.random.key(2), np.full(32, 0.8, np.float32))
# print(max(np.abs(t - a["logps"]).max() for t, a in zip(bench.logps(policy, warm[:4]), warm[:4])))
# ```
#
# Tenths of a nat where the model hesitates: the sampler drew from another softmax.
#
# </details>
#
# Back to [07 · pass@k that can be believed](07_eval.ipynb).
