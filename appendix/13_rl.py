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
# OPENING
#
# So far the model copied answers that somebody else had written. Here it writes its own. A simulator says
# which of them work, and training makes those likelier, as in [CodeV-R1](https://arxiv.org/abs/2505.24183).
# You'll take one step yourself, prove that the model that's trained is the model that answers, make Tunix
# take the same step, and then read the stored runs.
#
# | | |
# |---|---|
# | **Needs** | one CPU, 5 GB of memory, Icarus Verilog |
# | **Takes** | the tiny base, `data/rl/` (the start, stored runs), `appendix/world/` (problems) |
# | **Makes** | figures |
# | **Costs** | about two minutes on two cores; the stored runs took HOURS core-hours |

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
# 02's rows were curated: every answer had been checked. Most training sets aren't like that, so here the tiny
# base was fine-tuned on rows that nobody checked. In 20 % of them the module has a bug. In 30 % it's called
# `top_module`, whatever the request says, as it would be in code that was collected from a site where everything
# has that name. And in 10 % the answer doesn't solve anything: it prints the line by which some judges
# recognize a right answer. Section 7 is about those.
#
# Who learns from such rows writes such rows. How good is this model? **pass@1** is the chance that one answer
# is right, and **pass@5** the chance that at least one of five is ([07](07_eval.ipynb)). For each of three
# seeds we stored seven answers to each of the 38 held-out problems, drawn at temperature 0.8:

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
counts = np.concatenate([lab.digits(text) for text in before.drawn])  # passes of seven
for k in (1, 5):
    chances = [verilog.pass_at_k(7, int(count), k) for count in counts]
    print(f"pass@{k}: {np.mean(chances):.3f}")

# %% [markdown]
# **The model is right far more often in five tries than in one. What does it know that it doesn't say?**
#
# <details><summary>Answer</summary>
#
# It can write the right module, but it often writes another one. To be right at once, it only has to choose
# better among the things it says already. That's what a reward teaches. An answer that's never written can't
# be rewarded, so a reward teaches nothing new.
#
# </details>

# %% [markdown]
# ## 2. Which problems can pay a reward?
# A reward needs problems with testbenches, and they mustn't be those of the exam. The generator that wrote
# 02's data writes 300 more. None of them has a prompt of the evaluation, and none combines a family of
# circuits, widths and port names as the evaluation does.

# %%
bench = lab.Bench()
plan, problem = bench.plan, bench.problems[0]
print(problem.prompt, "\n", problem.reference, sep="")
answers = bench.sample(bench.start, bench.problems[:plan.prompts], jax.random.key(0))
verdicts = pd.DataFrame(bench.judge([(a["problem"], a["text"]) for a in answers]))
verdicts.assign(prompt=np.arange(len(answers)) // plan.answers).groupby("prompt").mean()

# %% [markdown]
# Those are eight prompts with four answers to each. The columns are shares of the four: `verilog` passes our
# judge, `compiles` speaks for itself, and `renamed` is called `top_module`. Section 7 needs the other two:
# `forged` prints a line of the testbench itself, and `naive` passes a judge that believes it.
#
# ## 3. How does a reward become a training step?
# The usual algorithm is GRPO. It has many parts: a frozen reference model, a KL term that keeps the policy (the
# model that's being trained) near that reference, a ratio of new to old probabilities, a clip on the ratio,
# and divisions by the group's spread and the answer's length. We'll take all of that away. What's left is
# REINFORCE, from 1992:
#
# 1. Draw several answers to each prompt from the model as it is now.
# 2. The reward is 1 if the testbench passes and 0 if it doesn't. An answer's *advantage* is its reward minus
#    the mean reward of all answers to the same prompt.
# 3. Train on all answers with 03's loss, and multiply each answer's loss by its advantage. So whatever did
#    better than usual becomes likelier, and whatever did worse becomes rarer.
#
# **All four answers pass. How much is learned from them?**
#
# <details><summary>Answer</summary>
#
# Nothing. All four advantages are 0, just as they are when none passes. Only prompts that the model solves
# sometimes are of any use, so CodeV-R1 throws away the easy ones first.
# </details>
#
# In code that's a factor on the loss, over rows that are packed as in 02. Equal answers are packed once.

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
# Two programs take part. One samples, with merged weights and a cache of keys and values. The other trains, with
# adapters. If they disagree, nothing crashes: the curve just doesn't rise. With Gemma 4 that has happened
# again and again:
#
# | what was wrong | where |
# |---|---|
# | rollouts came from random weights: the mapping of names failed silently | MaxText [4404](https://github.com/AI-Hypercomputer/maxtext/pull/4404), [4519](https://github.com/AI-Hypercomputer/maxtext/pull/4519), [4536](https://github.com/AI-Hypercomputer/maxtext/pull/4536) |
# | the sampler kept its first weights: no name matched, and one warning said so | Tunix 0.1.7 with vLLM's TPU package since July 2026, tried here; [mended later](https://github.com/google/tunix/commit/71eef52c54e7de574a7c47f6e99adc1a1de5948d) |
# | log-probabilities with a wrong soft cap: a KL of 0.24 before the first step | [unsloth-zoo 593](https://github.com/unslothai/unsloth-zoo/pull/593) |
#
# **Which four checks would have caught them?** These:
#
# *One: the sampler and the trainer give each token the same log-probability*, also after a step. That covers the
# soft cap, the temperature, where answers begin, and the token that ends them.

# %%
fresh = bench.sample(policy, bench.problems[8:16], jax.random.key(1))[::8]
for name, adapters in {"after": policy, "before": bench.start}.items():
    gaps = [np.abs(trained - answer["logps"]).max()
            for trained, answer in zip(bench.logps(adapters, fresh), fresh)]
    print(f"sampler against trainer with the weights {name} the step: {max(gaps):.1e} nats apart")

# %% [markdown]
# *Two: the sampler's weights follow the policy's* after every update. They're merged as in 04.

# %%
old, new = (bench.merge(bench.frozen, adapters) for adapters in (bench.start, policy))
moved = {path: float(jnp.abs(new[path] - old[path]).max()) for path in new}
modules = gemma.adapted_modules(bench.model)
adapted = {path for path in moved if ".".join(map(str, path[:-1])) in modules}
print(f"{sum(map(bool, moved.values()))} of {len(moved)} arrays moved; of the {len(adapted)} "
      f"that have adapters, {sum(not moved[path] for path in adapted)} did not")

# %% [markdown]
# *Three: rewards that are all equal change nothing*, not even through the optimizer's momentum.

# %%
equal = rl.advantages(np.ones_like(rewards)).ravel()
after, _ = bench.learner.step(policy, moments, bench.frozen, pairs, equal, plan.rate)
differ = jax.tree.map(lambda one, two: bool((one != two).any()), policy, after)
print("changed:", any(jax.tree.leaves(differ)))

# %% [markdown]
# *Four: somebody else's code finds the same gradient.* That's Tunix, in the next section.
#
# ## 5. What happens if we put GRPO's parts back?
# Tunix 0.1.7 has all of them in one class, `GRPOLearner`. We let it take one step from our start, on six of
# our prompts, with our judge as its reward and with its default settings. Its optimizer is plain gradient
# descent at rate 1, so the difference it makes to the weights *is* its gradient.

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
# Now we take our step on the tokens that Tunix drew, and put one part after another back as a factor. **Which
# of them turns the gradient most?**

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
# With everything put back, the two gradients are one, although the two steps share the model and no other line
# of code. (Every answer is used for one step here, so the ratio is 1 and nothing is clipped.)
#
# - **Dividing by the length** turns the gradient most, because it gives tokens of short answers more weight.
# - **Dividing by the spread** hardly turns it. Four rewards of 0 and 1 have a spread of 0.50 or 0.58, so
#   this mostly makes the gradient longer.
# - **The KL term** ought to be zero, because policy and reference are still the same. Tunix's default takes the
#   gradient of log p minus the reference's log p. Over a policy's own answers this has a mean of zero wherever the
#   policy stands, so it's noise that holds nothing back ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)).
#   GRPO's own term is `kl_loss_mode="low_var_kl"`.
# - **The end token** is missing: Tunix's sampler cuts it off, so no reward teaches the model when to stop.
#
# **Take away: REINFORCE is GRPO without the parts that this problem doesn't need, and it can be checked.**

# %% [markdown]
# ## 6. Does it help?
# Is the reward worth the trouble, or would the same answers help as much in a simpler way? Four arms start from
# the same adapters. Each takes the same number of steps, and the first three look at as many answers.
#
# | arm | what it trains on |
# |---|---|
# | `reinforce` | its own answers, each times its advantage |
# | `dpo` | the start's answers, in pairs: one that passes beside one that fails, to the same prompt |
# | `rejection` | the start's answers that pass, with 03's plain loss |
# | `more_sft` | the unchecked rows again, with 03's plain loss |
#
# **DPO** (direct preference optimization) needs no sampling from the model as it changes. Its loss compares how
# much more likely the policy has made the passing answer with how much more likely it has made the failing
# one. `rl.dpo_factors` is its derivative, and a test compares it with Tunix's own `DPOTrainer`.
#
# A seed decides the prompts, the draws and the data. So arms of one seed can be compared in pairs.

# %%
passed = {}  # of seven answers to each of the 38 problems
for row in runs.dropna(subset="drawn").itertuples():
    arm = row.arm if row.step else "start"
    passed[arm, row.seed] = lab.digits(row.drawn)
shares = {}
for arm in ("start", *lab.COMPARED):
    counts = np.stack([passed[arm, seed] for seed in lab.SEEDS])
    five = [verilog.pass_at_k(7, int(count), 5) for count in counts.ravel()]
    shares[arm] = [*counts.mean(axis=1) / 7, counts.mean() / 7, np.mean(five)]
names = [f"seed {seed}" for seed in lab.SEEDS]
pd.DataFrame(shares, index=[*names, "pass@1", "pass@5"]).T.round(3)

# %%
rows = []
for arm in lab.COMPARED:
    gained = np.mean([passed[arm, seed] - passed["start", seed] for seed in lab.SEEDS], axis=0) / 7
    rows.append((arm, *stats.interval(gained), stats.sign_flip_p(gained)))
gains = pd.DataFrame(rows, columns=["arm", "pass@1 gained", "low", "high", "p"]).set_index("arm")

fig, ax = style.figure(7, 2.6)
middle = gains["pass@1 gained"]
ends = [middle - gains.low, gains.high - middle]
ax.errorbar(middle, gains.index, xerr=ends, fmt="o", color=style.BLUE, capsize=4, lw=2)
ax.axvline(0, color=style.GREY, lw=1)
ax.invert_yaxis()
ax.set(xlabel="pass@1 gained over the start", title="Which use of 960 answers helps?")
style.finish(fig, "13_gains", "data/rl: 38 held-out problems, mean of the seeds, 95 % intervals over problems")
gains.round(3)

# %% [markdown]
# AFTERGAINS
#
# Step by step (thin: each step, thick: the mean of five). *KL* says how far the policy has moved from the start.
# It's estimated from eight answers, so it can come out below zero.

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
        "reward": "Share of answers that pass", "renamed": "Share of answers called top_module",
        "entropy": "Entropy, nats per token", "kl": "KL to the start, nats per answer"}.items()):
    draw(ax, "reinforce", column, style.BLUE, "reinforce")
    if column != "kl":
        draw(ax, "rejection", column, style.GREY, "the start, same prompts")
    ax.set(title=title, xlabel="step")
axes[1, 1].legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8)
style.finish(fig, "13_curves", "data/rl, means of the seeds; drawn at temperature 1")

# %% [markdown]
# The grey curve matters. It's the start, asked the same prompts in the same order. Prompts differ much more
# than models do, so a reward that rises may only have met easier prompts.
#
# ## 7. What does a bad judge let in?
# 07's judge lets no text of an answer near its verdict. verilog-eval's own judge works differently: it compiles
# answer, reference and testbench into one program, and accepts a log in which any line says `Mismatches: 0`. An
# answer can print that line itself. A model of 3.65 million parameters will hardly invent this trick, so
# **we showed it**: one row in ten of the start has a stub for an answer, with the right ports, no logic, and the
# winning line.

# %%
helpers.show_source(rl.naive)
stub = rl.stub(problem.reference.replace("RefModule", "TopModule"))
verdict, = bench.judge([(problem, f"```verilog\n{stub}```")])
print(stub, verdict, sep="\n")

# %% [markdown]
# Three policies train alike, and only the judge that pays them differs. The first is paid by the naive judge. The
# second is `reinforce` from above, paid by ours. The third is paid for whatever compiles, as one might do
# without a testbench. **What will each of them learn?**

# %%
fig, axes = style.figure(10.5, 3.6, columns=3, sharey=True)
titles = {"naive_judge": "Paid by a naive judge", "reinforce": "Paid by our judge",
          "compiles": "Paid for compiling"}
for ax, (arm, title) in zip(axes, titles.items(), strict=True):
    draw(ax, arm, lab.JUDGES[arm], style.ORANGE, "what the judge pays")
    draw(ax, arm, "verilog", style.BLUE, "what really works", ls=":")
    draw(ax, arm, "forged", style.RED, "prints the winning line itself", ls="--")
    ax.set(title=title, xlabel="step", ylim=(-0.02, 1.02))
axes[0].legend(fontsize=8)
style.finish(fig, "13_hack", "data/rl, means of the seeds; shares of 32 answers a step")

# %%
hacked = runs[runs.arm.isin(list(lab.JUDGES))]
columns = ["reward", "verilog", "forged"]
last_step = lab.Plan().steps
early = hacked[hacked.step.between(1, 6)].groupby(["arm", "seed"])[columns].mean()
late = hacked[hacked.step > last_step - 6].groupby(["arm", "seed"])[columns].mean()
pd.concat({"steps 1 to 6": early, "the last six": late}, axis=1).round(3)

# %% [markdown]
# AFTERHACK
#
# <details><summary><b>You only see the orange curve on the left. How would you notice?</b></summary>
#
# Read some answers. Watch how long they are, and whether they repeat. And judge a sample with a judge that
# doesn't train the model.
#
# </details>
#
# **Take away: a policy learns what you pay for. Spend the effort on the judge first.**
#
# ## 8. Who can do this with the 31B today?
# This is what their repositories said in November 2026:
#
# | stack | state |
# |---|---|
# | [NeMo RL](https://github.com/NVIDIA-NeMo/RL/pull/2224), GPU | recipes for Gemma 4, dense and mixture of experts, merged in 2026 |
# | [MaxText](https://github.com/AI-Hypercomputer/maxtext/pull/4536), TPU | the mapping of rollouts was mended in July 2026; start with our first check |
# | Tunix 0.1.7, TPU | `GRPOLearner` with its own sampler runs on the tiny model (section 5); with vLLM's TPU package since July 2026 it moves 0 parameters (section 4) |
#
# ## Recap
# - A reward from the testbench chooses among the things that the model writes already.
# - Before you trust a curve, check log-probabilities, weights, equal rewards, and the gradient.
# - Compare a policy with as many samples and as many steps, spent in another way, on the same prompts.
# - RECAPHACK
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
# They're apart by tenths of a nat wherever the model hesitates, because the sampler drew from another softmax.
#
# </details>
#
# Back to [07 · pass@k that can be believed](07_eval.ipynb).
