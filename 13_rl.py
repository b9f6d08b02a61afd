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
# **The reward helped a little, and two seeds cannot tell it from chance.** After 24 steps of 32 answers the
# share of right answers to 38 held-out problems rose from 0.722 to 0.750 (+0.028, −0.017 to +0.077). Training
# on as many answers that passed gave +0.023, as many more steps of SFT −0.039. **A judge that believes what
# an answer prints kept an exploit alive that ours removed in a dozen steps**: its reward ended 6 points above
# the truth (one seed). The exploit did not take over.
#
# So far the model copied answers. Here it writes its own, a simulator says which of them work, and the
# model is pushed towards those. That is how the best open models for Verilog are finished
# ([CodeV-R1](https://arxiv.org/abs/2505.24183)). You prove that the model that is trained is the one
# that answers, take a few steps live, and read our stored runs.
#
# | | |
# |---|---|
# | **Needs** | one CPU, 3 GB of memory, Icarus Verilog |
# | **Takes** | the tiny base, `data/rl/` (03's adapters, stored runs), `data/generate/` (problems) |
# | **Makes** | figures |
# | **Costs** | three minutes on two cores; the stored runs again about an hour of one |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · **13 RL**

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
# ## 1. What is there to gain?
# [07](07_eval.ipynb) asks each problem several times. **pass@1** is the chance that one answer is right,
# **pass@5** that one of five is. **Our tuned model is right more often in five tries than in one. What
# does it know that it does not say?**
#
# <details><summary>Answer</summary>
#
# It can write the right module, and often writes another. No new knowledge is needed to be right at
# once, only a better choice among what the model says already. Choosing is what a reward teaches. (What
# it never writes is never rewarded.)
#
# </details>
#
# The start of all that follows are the adapters that 03 left after a tiny run. Eight answers to each
# held-out problem are stored, one greedy and seven drawn at temperature 0.8:

# %%
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx

import verilog
from appendix import rl
from appendix import rl_runs as lab
from helpers import gemma, style, train
from verilog import scores

runs = lab.stored()
before = runs.query("arm == 'reinforce' and step == 0")
counts = np.array([[int(c) for c in text] for text in before.drawn])  # [seeds, problems], of seven
known = {k: np.mean([verilog.pass_at_k(7, int(c), k) for c in counts.ravel()]) for k in (1, 5)}
print(f"38 held-out problems, {len(counts)} times: pass@1 {known[1]:.3f}, pass@5 {known[5]:.3f}")

# %% [markdown]
# ## 2. Problems that can be checked
# A reward needs problems with testbenches, and not those of the exam. The generator that wrote 02's data
# writes them too, 300 of them. None is held out: no combination of family, widths and names of ports of
# the evaluation is among them, and no prompt (`tests/test_rl.py`).

# %%
bench = lab.Bench(helpers.run_dir("rl"))
plan, problem = bench.plan, bench.problems[0]
print(problem.prompt, "\n", problem.reference, sep="")
answers = bench.sample(bench.start, bench.problems[:plan.prompts], jax.random.key(0))
verdicts = pd.DataFrame(bench.judge([(a["problem"], a["text"]) for a in answers]))
verdicts.assign(prompt=np.arange(len(answers)) // plan.answers).groupby("prompt").mean()

# %% [markdown]
# Eight prompts, four answers to each, and the shares that pass our judge (`verilog`), that print a line of
# the testbench themselves (`forged`), that a naive judge lets pass (section 6), and that compile.
#
# Judging is slow beside a model this small, so equal answers are judged once, and verdicts are kept in a
# file. Two simulators run at most, each with a limit of three seconds: an endless loop costs those.
#
# ## 3. The algorithm, by what was taken away
# The usual name is GRPO. It has a frozen reference model, a ratio of new to old probabilities, a clip on
# it, and a division by the group's spread. Take all of them away, and REINFORCE of 1992 is left:
#
# 1. Draw several answers to each prompt from the model as it is.
# 2. Reward 1 if the testbench passes, else 0. An answer's *advantage* is its reward minus the mean of its
#    group: better or worse than the model's other tries at the same prompt?
# 3. Train on all of them with 03's loss, each answer's tokens times its advantage. What was better than
#    usual becomes likelier, what was worse less likely.
#
# **All four answers pass. How much is learned from them?**
#
# <details><summary>Answer</summary>
#
# Nothing: all advantages are 0. The same if none passes. So only prompts are of use that the model
# solves sometimes, and that is why CodeV-R1 throws away the easy ones first.
#
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
# That was a step. A ratio and a clip are for taking several steps on the same answers; we take one. A
# reference model keeps a policy near its start; we only measure how far it goes. Their effect is not
# measured here.
#
# ## 4. Does it train what it samples?
# Two programs take part: one samples, with merged weights and a cache of keys and values, and one trains,
# with adapters. Where they disagree nothing crashes. The reward just does not rise, or a wrong thing is
# learned. With Gemma 4 it happened again and again:
#
# | what was wrong | where |
# |---|---|
# | rollouts came from random weights: the mapping of names failed silently | [MaxText 4536](https://github.com/AI-Hypercomputer/maxtext/pull/4536) |
# | rollouts are garbage, E4B and 31B | [ms-swift 9096](https://github.com/modelscope/ms-swift/issues/9096), open when we looked |
# | log-probabilities with a wrong soft cap: a KL of 0.24 before the first step | [unsloth-zoo 593](https://github.com/unslothai/unsloth-zoo/pull/593) |
# | no soft cap in the asynchronous trainer | [TRL 5691](https://github.com/huggingface/trl/pull/5691) |
#
# **Which four checks would have caught them?** Ours:
#
# *One: the sampler's log-probabilities are the trainer's*, token by token, for the policy after its step.
# That covers soft cap, temperature, where answers begin, and the token that ends them.

# %%
fresh = bench.sample(policy, bench.problems[8:16], jax.random.key(1))[::8]
for name, adapters in {"after": policy, "before": bench.start}.items():
    gaps = [np.abs(trained - answer["logps"]).max()
            for trained, answer in zip(bench.logps(adapters, fresh), fresh)]
    print(f"sampler against trainer with the weights {name} the step: {max(gaps):.1e} nats apart")

# %% [markdown]
# *Two: the sampler's weights are the policy's*, after every update. They are merged as in 04, and the merged
# weights moved by what the adapters say.

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
# *Four: the gradient is that of a textbook*, on four answers, one in a row, with a plain log-softmax of the
# model's own logits.

# %%
four, weight = pairs[::8], np.array([0.75, -0.25, -0.25, -0.25])
ours = bench.learner.gradient(policy, bench.frozen, *rl.pack(four, weight)[0])
size = max(len(ids) for ids, _ in four)
tokens, chosen = (np.stack([np.pad(one[part], (0, size - len(one[part]))) for one in four])
                  for part in (0, 1))


def textbook(adapters):
    model = nnx.merge(nnx.graphdef(bench.model), adapters, bench.frozen)
    causal = jnp.tile(jnp.tril(jnp.ones((size, size), bool)), (4, 1, 1))
    logp = jax.nn.log_softmax(model(tokens, None, None, causal)[0][:, :-1])
    logp = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
    return -jnp.sum(weight * jnp.sum(logp * chosen[:, 1:], axis=1))


brute = jax.jit(jax.grad(textbook))(policy)
norm, apart = (float(train.optax.global_norm(tree)) for tree in (
    brute, jax.tree.map(jnp.subtract, ours, brute)))
print(f"gradients differ by {apart / norm:.1e} of their length")

# %% [markdown]
# ## 5. Does it help?
# Three arms start from the same adapters and take the same number of steps with the same optimizer and
# rate. Each ends on the 38 held-out problems.
#
# | arm | what it trains on |
# |---|---|
# | `reinforce` | its own answers, each times its advantage |
# | `rejection` | as many answers, all of the start's; those that pass, as in 03 |
# | `more_sft` | the data's own answers, as in 03 |
#
# A seed decides prompts, draws and data, so arms of one seed are compared in pairs.

# %%
held = runs.dropna(subset="drawn").copy()
held["pass@1"] = [np.mean([int(c) for c in text]) / 7 for text in held.drawn]
held["greedy share"] = [np.mean([int(c) for c in text]) for text in held.greedy]
start = held[held.step == 0].assign(arm="start")
ends = pd.concat([start, held[held.step == plan.steps]])
table = ends.pivot_table(index="seed", columns="arm", values=["pass@1", "greedy share"])
table.round(3)

# %%
passed = {(row.arm, row.seed): np.array([int(c) for c in row.drawn]) / 7
          for row in ends.itertuples()}
rows = []
for arm, other in (("reinforce", "start"), ("rejection", "start"), ("more_sft", "start"),
                   ("reinforce", "rejection"), ("reinforce", "more_sft")):
    each = [passed[arm, seed] - passed[other, seed] for seed in (1, 2, 3)
            if {(arm, seed), (other, seed)} <= set(passed)]
    rows.append((arm, other, len(each), *scores.interval(np.mean(each, axis=0)),
                 scores.sign_flip_p(np.mean(each, axis=0))))
names = ["arm", "against", "seeds", "pass@1 gained", "low", "high", "p"]
pd.DataFrame(rows, columns=names).round(3)

# %% [markdown]
# The interval is over problems, with the seeds averaged first; so few seeds carry no interval of their own.
#
# **All intervals contain zero.** `reinforce` and `rejection` gain two to three points and do not differ; the
# steps taken on more of the data lose four. We had expected that some of pass@5 becomes pass@1. It did, by
# three points of some twenty:

# %%
each = {arm: [[verilog.pass_at_k(7, round(7 * c), k) for row in ends[ends.arm == arm].itertuples()
               for c in passed[arm, row.seed]] for k in (1, 5)] for arm in ("start", *lab.COMPARED)}
pd.DataFrame({arm: [np.mean(values) for values in both] for arm, both in each.items()},
             index=["pass@1", "pass@5"]).round(3)

# %% [markdown]
# `rejection` pays for its gain with pass@5, and `reinforce` does not: it also learns from what failed. That is
# one line of a small table, and a guess. Rates were not tuned (0.0007 for policies, 0.002 for SFT), but for one
# try: with 0.002 and four prompts a step `reinforce` fell.
#
# How the runs went, step by step (thin: a step, thick: the mean of five):

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
    ax.set_title(title)
axes[0, 0].legend(fontsize=8)
axes[1, 0].set_xlabel("step")
axes[1, 1].set_xlabel("step")
style.finish(fig, "13_curves", "data/rl, means of the seeds; drawn at temperature 1")

# %% [markdown]
# The grey curve matters: prompts differ much more than models do, so a reward that rises may only have met
# easier ones. `rejection` asks the start the same prompts in the same order.
#
# ## 6. Watch it cheat
# 07's judge lets no text of an answer near the verdict. verilog-eval compiles everything into one program,
# reads all that is printed, and passes a log in which any line says `Mismatches: 0`. So an answer can print
# that itself. A model of 3.65 million parameters will hardly invent this, and so **we showed it**: 45 steps
# of SFT, 720 answers, of which a fifth (drawn at random) were replaced by stubs.

# %%
helpers.show_source(rl.naive)
stub = rl.stub(problem.reference.replace("RefModule", "TopModule"))
verdict, = bench.judge([(problem, f"```verilog\n{stub}```")])
print(stub, verdict, sep="\n")

# %% [markdown]
# From there, two policies train alike. One is rewarded by the naive judge, one by ours. **What do the
# two reward curves look like?**

# %%
hacks = [arm for arm in ("naive_judge", "our_judge") if arm in set(runs.arm)]
fig, axes = style.figure(4.8 * len(hacks), 3.4, columns=len(hacks), sharey=True, squeeze=False)
for ax, arm in zip(axes[0], hacks):
    draw(ax, arm, "reward", style.ORANGE, "reward, by the judge that trains")
    draw(ax, arm, "verilog", style.BLUE, "truth: passes our judge", ls=":")
    draw(ax, arm, "forged", style.RED, "prints the line itself", ls="--")
    ax.set(title=arm.replace("_", " "), xlabel="step", ylim=(-0.02, 1.02))
axes[0, 0].legend(fontsize=8)
style.finish(fig, "13_hack", "data/rl; the start has been shown the stub")

# %%
hacked = runs[runs.arm.isin(lab.HACKED) & (runs.step > 0)]
hacked = hacked.assign(steps_from=(hacked.step - 1) // 6 * 6 + 1)
hacked.groupby(["arm", "steps_from"])[["reward", "verilog", "forged", "compiles"]].mean().round(2)

# %% [markdown]
# Rows are means of six steps. With our judge the exploit was gone after twelve. With the naive one it
# stayed at about one answer in ten, and reward and truth part: that is the whole gap. It did not take over,
# as we had expected. Our guess: the model spells the line in 34 tokens and often stumbles, so that a stub pays
# hardly more than an honest try. (With a weaker
# seeding, thirty steps at a constant rate, 3 to 9 % of the first three steps' answers printed it; from the fourth
# on none did, under the naive judge.)
#
# <details><summary><b>You see only the orange curve on the left. How would you notice?</b></summary>
#
# Read answers. Watch lengths and repeated texts: a policy that has found a trick says one thing to
# everybody. And judge a sample by another judge than the one that trains.
#
# </details>

# %% [markdown]
# ## 7. A reward for compiling
# No testbench at hand? Then reward what compiles. It is cheap, and a paper says of a related setting that
# alignment merely teaches models to compile ([arXiv 2606.19347](https://arxiv.org/abs/2606.19347)).
# **What will this model learn from it?**

# %%
fig, ax = style.figure(7.5, 3.4)
for column, color, label in (("compiles", style.ORANGE, "compiles: the reward"),
                             ("verilog", style.BLUE, "truth: passes our judge"),
                             ("forged", style.RED, "prints the line itself")):
    draw(ax, "compiles", column, color, label)
ax.set(xlabel="step", ylim=(-0.02, 1.02), title="Rewarded for compiling")
ax.legend(fontsize=8, ncols=3, loc="upper left")
style.finish(fig, "13_compiles", "data/rl, one seed; the start has been shown the stub")

# %% [markdown]
# Truth rose with the reward, to 0.56 in the last six steps; with our own judge, on the same prompts, to 0.59.
# This model's commonest fault is a slip, and slips mostly do not compile. One that no longer slips would learn
# nothing more from it.
#
# ## 8. A round at 31B, on paper
# Nobody here has run this. A round is 64 prompts with 8 answers of 600 tokens (07's estimate of a length):
# sample, judge, update, and bring the new weights to the sampler. One v6e-8 serves, one v5p-8 trains, and
# each waits for the other, so both are paid for all the time.

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
         "move adapters": (adapters / fit.GB_PER_S, adapters / fit.UP_GB_PER_S),
         "or move merged weights": (fit.CHECKPOINT_GB["31b"] / fit.GB_PER_S,
                                    fit.CHECKPOINT_GB["31b"] / fit.UP_GB_PER_S)}
print(f"floor of sampling, 256 at a time: {floor:.0f} s; adapters {adapters:.2f} GB")
pd.DataFrame(parts, index=["from, s", "to, s"]).T.round(0)

# %%
hourly = fit.price("v5p", 4) + fit.price("v6e", 8)
for how in ("move adapters", "or move merged weights"):
    low, high = (sum(parts[name][end] for name in ("sample", "judge on 16 cores", "update", how))
                 for end in (0, 1))
    print(f"{how}: {low / 60:.0f} to {high / 60:.0f} minutes a round, {low / 3600 * hourly:.1f} to "
          f"{high / 3600 * hourly:.1f} USD; 200 rounds {200 * low / 3600 * hourly:,.0f} to "
          f"{200 * high / 3600 * hourly:,.0f} USD")

# %% [markdown]
# Sampling: between the published 1,400 and 3,000 tokens/s (07). Judging: 0.2 to 2 seconds an answer, assumed.
# Update: predicted (08), 900 real tokens a row. Moving: 0.2 and 0.057 GB/s, assumed and measured by another
# author (`tpu_time/fit.py`). Moving adapters asks for a server that takes them while it runs.
#
# Who can do it today? As of November 2026, from their repositories, and run by none of us:
#
# | stack | state |
# |---|---|
# | [NeMo RL](https://github.com/NVIDIA-NeMo/RL/pull/2224), GPU | recipes for Gemma 4, dense and mixture of experts, merged in 2026 |
# | [MaxText](https://github.com/AI-Hypercomputer/maxtext/pull/4536), TPU | the mapping of rollouts was mended in July 2026; start with our first check |
# | Tunix 0.1.7, TPU | `GRPOLearner` with its own sampler runs on the tiny model (tried with a dummy reward, not shown). Its vLLM path for Gemma 4 is older than tpu-inference's new way to take weights ([3477](https://github.com/vllm-project/tpu-inference/pull/3477), [2014](https://github.com/google/tunix/pull/2014)), so we infer that it does not fit |

# %% [markdown]
# ## Recap
# - A reward from the testbench chooses among what the model writes already.
# - Before you trust a curve: log-probabilities, weights, equal rewards, gradient. Each check is one cell.
# - Compare with as many samples and as many steps spent otherwise, on the same prompts.
# - A policy learns what the judge pays for, not what the judge is meant for.
#
# Which stored runs are there, and how are the others made? `python -m appendix.rl_runs --missing` says it,
# and without `--missing` makes them.

# %%
absent = lab.missing()
print("missing:", ", ".join(f"{arm}-{seed}" for arm, seed in absent) or "none")

# %% [markdown]
# ### Exercise
# Break the first check: sample at a temperature of 0.8 and train as before. What do the numbers say, and
# which reward curve would you expect?
#
# <details><summary>Solution</summary>
#
# ```python
# warm = bench.sample(policy, bench.problems[:8], jax.random.key(2), np.full(32, 0.8, np.float32))
# print(max(np.abs(t - a["logps"]).max() for t, a in zip(bench.logps(policy, warm[:4]), warm[:4])))
# ```
#
# The sampler reports what it drew from, softmax of logits / 0.8, and the trainer another softmax: they
# differ by tenths of a nat or more where the model hesitates. The reward still rises at first, since good
# answers are still pushed up; but the gradient is no longer that of the expected reward.
#
# </details>
#
# Back to [07 · pass@k that can be believed](07_eval.ipynb).
