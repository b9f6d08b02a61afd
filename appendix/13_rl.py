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
# You've tuned a model on rows that nobody checked, and fewer than half of its answers work. But you have a testbench.
# Can its verdict alone make the model better? And what happens if the judge can be fooled? In our runs the verdict
# lifts pass@1 by some 0.17. A judge that can be fooled brings it to zero, while the reward keeps rising.
#
# So far the model has copied answers that somebody else had written. Here it writes its own. A simulator says
# which of them work, and training makes those likelier. That's how
# [CodeV-R1](https://arxiv.org/abs/2505.24183) was trained, too. You'll take one step yourself and prove that the
# model that's trained is the model that answers. Then Tunix takes the same step, and at the end you read our
# stored runs.
#
# | | |
# |---|---|
# | **Needs** | one CPU, 5 GB of memory, Icarus Verilog |
# | **Takes** | the tiny base, `data/rl/` (two starts, stored runs), `appendix/world/` (problems) |
# | **Makes** | figures |
# | **Costs** | about two minutes on two cores; the stored runs took about two core-hours |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb) · **13 RL** · [14 JAX](14_jax.ipynb)

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
# **Why should a model get better without seeing a single new answer?** Because it often knows better than it
# writes. 02's rows were curated: every answer had been checked. Most training sets aren't like that. So for this
# page we fine-tuned the tiny base on rows that nobody had checked, and called the result the *start*:
#
# - In 20 % of its rows the module has a bug.
# - In 30 % the module is called `top_module`, whatever the request says. Code looks like that if it was
#   collected from a site where every exercise uses this name.
# - In 10 % the answer solves nothing. It prints the line by which some judges recognize a right answer.
#   Section 7 is about those.
#
# A model that learns from such rows writes such rows. How good is it? **pass@1** is the chance that one answer is
# right, and **pass@5** is the chance that at least one of five is ([07](07_eval.ipynb)). With each of three seeds
# we drew seven answers to each of the 38 held-out problems, at temperature 0.8, and stored which ones pass:

# %%
import jax
import numpy as np
import pandas as pd

from appendix import rl, rl_tunix
from appendix import rl_runs as lab
from helpers import gemma, style

runs = lab.stored()
passes = lab.drawn_passes(runs)
lab.scores(passes, ["start"]).round(3)

# %% [markdown]
# **The start is right far more often in five tries than in one. What does it know that it doesn't say?**
#
# <details><summary>Answer</summary>
#
# It can write the right module, but often it writes another one. So it doesn't need new knowledge. It only needs
# to choose better among the things that it says already, and a reward can teach that. But an answer that the
# model never writes is never rewarded.
#
# </details>
#
# **A reward teaches nothing new. It chooses among what the model can write already.**
#
# ## 2. Which problems can pay a reward?
# **Where do the rewards come from?** We need problems with testbenches, and they mustn't be those of the exam. So
# the generator that wrote 02's data writes 300 more. None of them has a prompt of the evaluation, and none combines
# a family of circuits with widths and port names as the evaluation does. Here's the first one with its reference,
# and then what becomes of the start's answers to the first eight problems, four answers to each:

# %%
bench = lab.Bench()
plan = bench.plan
problem = bench.problems[0]
print(problem.prompt, problem.reference, sep="\n")

answers = bench.sample(bench.start, bench.problems[:plan.prompts], jax.random.key(0))
verdicts = pd.DataFrame(bench.judge.of(answers))
prompt_of = np.arange(len(answers)) // plan.answers
verdicts.groupby(prompt_of).mean().rename_axis("problem")

# %% [markdown]
# Each number is a share of a problem's four answers. `verilog` is the share that passes our judge, `renamed` the
# share whose module is called `top_module`, and `compiles` speaks for itself. Section 7 needs the other two. An
# answer is `forged` if it prints a line that only the testbench should print, and `naive` is the share that passes
# a judge who believes such a line.
#
# **Any problem with a testbench can pay, as long as the exam doesn't ask it.**
#
# ## 3. How does a reward become a training step?
# **What do you do with a verdict that has no gradient?** The usual algorithm is GRPO, and it has many parts. There's
# a frozen reference model. There's a KL term, which keeps the *policy* (the model that's being trained) near that
# reference. There's a ratio of new to old probabilities, and a clip on that ratio. And there are two divisions: by
# the spread of the rewards, and by the answer's length. We'll take all of that away. What's left is REINFORCE,
# from 1992:
#
# 1. Draw several answers to each prompt from the policy as it is now.
# 2. The reward is 1 if the testbench passes, and 0 if it doesn't. An answer's *advantage* is its reward minus
#    the mean reward of all answers to the same prompt.
# 3. Train on all answers with 03's loss, and multiply each answer's loss by its advantage. So whatever did
#    better than the others becomes likelier, and whatever did worse becomes rarer.
#
# **All four answers to a prompt pass. How much does the model learn from them?**
#
# <details><summary>Answer</summary>
#
# Nothing. All four advantages are 0, just as they are when none passes. Only a prompt that the model solves
# sometimes is of any use. That's why CodeV-R1 throws away the easy ones first.
# </details>
#
# In code that's a factor on the loss, over rows that are packed as in 02. Equal answers are packed once.

# %%
helpers.show_source(rl.advantages, rl.make_loss, rl.Learner)
rewards = verdicts.verilog.to_numpy(float).reshape(plan.prompts, plan.answers)
factors = rl.advantages(rewards).ravel()
print("mean reward of each prompt:", rewards.mean(axis=1))
print(f"answers that teach something: {np.mean(factors != 0):.0%}")

examples = [answer.example for answer in answers]
moments = bench.learner.optimizer.init(bench.start)
policy, moments = bench.learner.step(
    bench.start, moments, bench.frozen, examples, factors, plan.rate)

# %% [markdown]
# **REINFORCE is 03's training step with one more number: how much better was this answer than the others?**
#
# ## 4. Does it train what it samples?
# **How would you notice that you're training another model than the one that answers?** Two programs take part.
# One of them samples, with merged weights and a cache of keys and values. The other one trains, with adapters. If
# they disagree, nothing crashes. The reward just doesn't rise. With Gemma 4 that has happened again and again:
#
# | what was wrong | where |
# |---|---|
# | rollouts came from random weights: the mapping of names failed silently | MaxText [4404](https://github.com/AI-Hypercomputer/maxtext/pull/4404), [4519](https://github.com/AI-Hypercomputer/maxtext/pull/4519), [4536](https://github.com/AI-Hypercomputer/maxtext/pull/4536) |
# | the sampler kept its first weights: no name matched, and one warning said so | Tunix 0.1.7 with vLLM's TPU package since July 2026, tried here; [mended later](https://github.com/google/tunix/commit/71eef52c54e7de574a7c47f6e99adc1a1de5948d) |
# | log-probabilities with a wrong soft cap: a KL of 0.24 before the first step | [unsloth-zoo 593](https://github.com/unslothai/unsloth-zoo/pull/593) |
#
# (A *rollout* is a drawn answer, and the *soft cap* keeps Gemma's logits within ±30.) Four checks would have caught
# all of these.
#
# *One: the sampler and the trainer give each token the same log-probability*, and they still do after a step. That
# covers the soft cap, the temperature, the place where an answer begins, and the token that ends it. The second
# line shows that the check can fail: there the trainer still has the weights from before the step.

# %%
fresh = bench.sample(policy, bench.problems[8:16], jax.random.key(1))[::8]
for name, adapters in (("after", policy), ("before", bench.start)):
    gaps = []
    for answer, trained in zip(fresh, bench.logps(adapters, fresh), strict=True):
        gaps.append(np.abs(trained - answer.logps).max())
    print(f"sampler against trainer with the weights {name} the step: {max(gaps):.1e} nats apart")

# %% [markdown]
# *Two: the sampler's weights follow the policy's* after every update. They're merged as in 04.

# %%
old = bench.merge(bench.frozen, bench.start)
new = bench.merge(bench.frozen, policy)
modules = gemma.adapted_modules(bench.model)
moved = {path for path, weight in new.items() if (weight != old[path]).any()}
adapted = {path for path in new if ".".join(map(str, path[:-1])) in modules}
print(f"{len(moved)} of {len(new)} arrays moved; "
      f"of the {len(adapted)} that have adapters, {len(adapted - moved)} did not")

# %% [markdown]
# *Three: rewards that are all equal change nothing*, not even through the optimizer's momentum.

# %%
equal = rl.advantages(np.ones_like(rewards)).ravel()
after, _ = bench.learner.step(policy, moments, bench.frozen, examples, equal, plan.rate)
print("changed:", bool((rl_tunix.flat(after) != rl_tunix.flat(policy)).any()))

# %% [markdown]
# *Four: somebody else's code finds the same gradient.* That's Tunix, in the next section.
#
# **Before you trust a curve, check log-probabilities, weights, equal rewards and the gradient.**
#
# ## 5. What happens if we put GRPO's parts back?
# **Is our step the right one, or did we take away too much?** Tunix 0.1.7 has all the parts in one class,
# `GRPOLearner`. We let it take one step from our start, on six of our problems, with our judge as its reward and
# with its default settings. It uses plain gradient descent at rate 1. So the difference that it makes to the
# weights *is* its gradient.

# %%
helpers.show_source(rl_tunix.grpo_step)
theirs = rl_tunix.grpo_step(bench, bench.problems[:6])
print("passes of four:", theirs.rewards.sum(axis=1))
print("end tokens that Tunix trains:", theirs.end_tokens)

# %% [markdown]
# Now we take our step on the tokens that Tunix drew, and put back one part after another. Each of them is only a
# factor. **Which of them turns the gradient most?**

# %%
lengths = np.array([example.mask.sum() for example in theirs.examples])
plain = rl.advantages(theirs.rewards).ravel()
spread = rl.advantages(theirs.rewards, spread=True).ravel()
parts = {"nothing": plain,
         "length": plain / lengths,
         "and spread": spread / lengths,
         "and KL": (spread - rl_tunix.KL_WEIGHT) / lengths}

rows = {}
norm = np.linalg.norm(theirs.gradient)
for name, factors in parts.items():
    gradient = bench.learner.gradient(
        bench.start, bench.frozen, theirs.examples, factors / len(factors))
    ours = rl_tunix.flat(gradient)
    size = np.linalg.norm(ours)
    rows[name] = {"lengths of Tunix's": size / norm,
                  "cosine": ours @ theirs.gradient / (size * norm),
                  "lengths apart": np.linalg.norm(ours - theirs.gradient) / norm}
pd.DataFrame(rows).T.round(6)

# %% [markdown]
# With everything put back, the two gradients are one, although the two steps share the model and no other line
# of code. (Every answer is used for one step here, so the ratio is 1 and nothing is clipped.)
#
# - **Dividing by the length** turns the gradient most, because it gives tokens of short answers more weight.
# - **Dividing by the spread** hardly turns it. Four rewards of 0 and 1 have a spread of 0.50 or 0.58, so
#   this mostly makes the gradient longer.
# - **The KL term** ought to be zero, because policy and reference are still the same. Tunix's default takes the
#   gradient of log p minus the reference's log p. Over a policy's own answers that has a mean of zero wherever the
#   policy stands, so it's noise that holds nothing back ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)).
#   GRPO's own term is `kl_loss_mode="low_var_kl"`.
# - **The end token** is missing. Tunix's sampler cuts it off, so no reward teaches the model when to stop.
#
# **REINFORCE is GRPO without the parts that this problem doesn't need, and you can check it.**
#
# ## 6. Does it help?
# **Is the reward worth the trouble, or would the same answers help as much in a simpler way?** Four *arms*, that is
# ways to go on, leave from the same start. Each takes 20 steps, and its learning rate falls to zero. The first
# three look at equally many answers.
#
# | arm | what it trains on |
# |---|---|
# | `reinforce` | its own answers, each times its advantage |
# | `dpo` | the start's answers in pairs: one that passes beside one that fails, to the same prompt |
# | `rejection` | the start's answers that pass, with 03's plain loss |
# | `more_sft` | the unchecked rows again, with 03's plain loss |
#
# **DPO** (direct preference optimization) never samples from the model as it changes. For each pair, its loss asks
# how much likelier the policy has made the passing answer, and how much likelier the failing one. It wants the
# first to be larger. `rl.dpo_factors` is its derivative, and a test holds it against Tunix's own `DPOTrainer`.
#
# A seed decides the problems, the draws and the data. So we can compare arms of one seed in pairs.

# %%
lab.scores(passes, ["start", *lab.COMPARED]).round(3)

# %%
gains = lab.gains(passes, lab.COMPARED)
ends = [gains.gained - gains.low, gains.high - gains.gained]
fig, ax = style.figure(7, 2.6)
ax.errorbar(gains.gained, gains.index, xerr=ends, fmt="o", color=style.BLUE, capsize=4, lw=2)
ax.axvline(0, color=style.GREY, lw=1)
ax.invert_yaxis()
count = plan.steps * plan.prompts * plan.answers
ax.set(xlabel="pass@1 gained over the start", title=f"Which use of {count} answers helps?")
style.finish(fig, "13_gains", "data/rl, means of the seeds; bars: 95 % over the 38 problems")
gains.round(3)

# %% [markdown]
# **The three arms that use the verdict gain some 0.17 each, and more of the same rows gains nothing.** So the verdict
# is what helps, and not the algorithm: these three can't be told apart here. (We had expected that DPO and rejection
# sampling would gain less.) Where they differ is pass@5: REINFORCE and DPO raise it, too,
# and rejection sampling doesn't.
#
# Where does the gain come from? From choosing. The wrong module name, for one, disappears within a few steps. The
# likeliest answer was often right already. Asked greedily, the start passes 33, 33 and 32 of the 38 problems (three
# seeds), and REINFORCE's policies pass 30, 31 and 32 (`data/rl`). So the reward doesn't mend what the model would say first. It
# teaches it not to stray from that.
#
# What happened on the way? The thin lines are single steps, and the thick ones are means of five. *KL* says how far
# the policy has moved from the start. We estimate it from eight answers, so it can come out below zero.

# %%
def draw(ax, arm, column, color, label=None, line="-"):
    """Draw a column of an arm's runs: each step thin, the mean of five steps thick."""
    values = lab.by_step(runs, arm, column)
    smooth = values.rolling(5, center=True, min_periods=3).mean()
    ax.plot(values.index, values, color=color, lw=0.8, alpha=0.5)
    ax.plot(smooth.index, smooth, line, color=color, lw=2.2, label=label)


titles = {"reward": "Share of answers that pass",
          "renamed": "Share of answers called top_module",
          "entropy": "Entropy, nats per token",
          "kl": "KL to the start, nats per answer"}
fig, axes = style.figure(9.5, 5, rows=2, columns=2, sharex=True)
for ax, (column, title) in zip(axes.flat, titles.items(), strict=True):
    draw(ax, "reinforce", column, style.BLUE, "reinforce")
    if column != "kl":
        draw(ax, "rejection", column, style.GREY, "the start, same problems")
    ax.set(title=title, xlabel="step")
axes[0, 0].legend(fontsize=8)
style.finish(fig, "13_curves", "data/rl, means of the seeds; drawn at temperature 1")

# %% [markdown]
# The grey curve matters. It's the start, which never changes, asked the same problems in the same order. Problems
# differ much more than models do. So without the grey curve, a reward that rises may only mean that the problems
# got easier.
#
# **Compare a policy with as many answers and as many steps that are spent in another way.**
#
# ## 7. What does a bad judge let in?
# **What if the judge can be fooled?** 07's judge lets no text of an answer near its verdict. verilog-eval's own
# judge works differently: it compiles answer, reference and testbench into one program, and it accepts a log in
# which any line says `Mismatches: 0`. But an answer can print that line itself. A model of 3.65 million parameters
# will hardly invent this trick, so **we showed it one**, the *stub*: the right ports, no logic, and the winning
# line.

# %%
helpers.show_source(rl.naive)
stub = rl.stub(problem.reference.replace("RefModule", "TopModule"))
verdict, = bench.judge([(problem, f"```verilog\n{stub}```")])
print(stub, verdict, sep="\n")

# %% [markdown]
# Three policies train alike, and only the judge that pays them differs. The first one is paid by the naive judge,
# and the second one by ours. The third one is paid for whatever compiles, as you might do without a testbench.
#
# They don't leave from section 6's start but from a second one, `gamed`. One in four of its rows is a stub, where
# the first start has one in ten. (To make room, only 15 % are called `top_module`.) Why a start of their own? From
# the first one we tried it twice, and the exploit stayed rare. Only half of the stubs were spelt so that they win,
# so they were paid no better than honest answers (LOG.md tells of both runs). So we don't ask any more whether a
# model *finds* an exploit. We ask what a judge makes of one that the model can write.
#
# These arms also take 30 steps instead of 20, and their learning rate stays where it is. If it fell to zero, the run
# might end before the exploit has spread.
#
# **What will each of the three learn?** Guess first.

# %%
titles = {"naive_judge": "Paid by the naive judge",
          "our_judge": "Paid by our judge",
          "compiles": "Paid for compiling"}
fig, axes = style.figure(10.5, 3.8, columns=3, sharey=True)
for ax, arm in zip(axes, lab.JUDGES, strict=True):
    draw(ax, arm, "reward", style.ORANGE, "what the judge pays")
    draw(ax, arm, "verilog", style.BLUE, "what really works", ":")
    draw(ax, arm, "forged", style.RED, "what prints the winning line", "--")
    ax.set(title=titles[arm], xlabel="step", ylim=(-0.02, 1.02), xlim=(1, lab.steps_of(plan, arm)))
axes[0].set_ylabel("share of the answers")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
style.finish(fig, "13_hack", "data/rl, means of the seeds; shares of 32 answers a step")

# %%
judged = runs[runs.arm.isin(lab.JUDGES)]
last_step = judged.arm.map(lambda arm: lab.steps_of(plan, arm))
parts = {"steps 1 to 6": judged[judged.step.between(1, 6)],
         "the last six": judged[judged.step > last_step - 6]}
means = {}
for name, rows in parts.items():
    by_run = rows.groupby(["arm", "seed"])[["reward", "verilog", "forged"]].mean()
    means[name] = by_run.loc[list(lab.JUDGES)]
pd.concat(means, axis=1).round(3)

# %% [markdown]
# On the left the pay rises, and in the last six steps not one answer works. Four of five print the winning line. (Not
# all of them are paid, because some spell it wrong.) Under our judge the same line has died out after some fifteen
# steps, and more answers work than before. Paid for compiling, the policy gets little better at compiling than it
# was. The line earns nothing extra there, so it becomes rare as well. Somewhat more answers work, since what works
# has to compile first.
#
# <details><summary><b>You only see the orange curve on the left. How would you notice?</b></summary>
#
# Read some answers. Watch how long they are, and whether they repeat. And have a sample judged by a judge that
# doesn't train the model.
#
# </details>
#
# **A policy learns what you pay for. So put your effort into the judge first.**
#
# ## 8. Who can do this with the 31B today?
# **Could you run this page's loop on the real model?** This is what the repositories said in November 2026:
#
# | stack | state |
# |---|---|
# | [NeMo RL](https://github.com/NVIDIA-NeMo/RL/pull/2224), GPU | recipes for Gemma 4, dense and mixture of experts, merged in 2026 |
# | [MaxText](https://github.com/AI-Hypercomputer/maxtext/pull/4536), TPU | the mapping of rollouts was mended in July 2026; start with our first check |
# | Tunix 0.1.7, TPU | `GRPOLearner` with its own sampler runs on the tiny model (section 5); with vLLM's TPU package since July 2026 it moves 0 parameters (section 4) |
#
# **On a TPU, begin with section 4's checks, whichever stack you take.**
#
# ## Recap
# - A reward from the testbench chooses among the things that the model can write already.
# - Before you trust a curve, check log-probabilities, weights, equal rewards, and the gradient.
# - Compare a policy with as many answers and as many steps, spent in another way, on the same problems.
# - Under a judge that could be fooled, the pay rose until nothing worked. Under one that no answer can talk to, the
#   same exploit died out.
#
# `python -m appendix.rl_runs` makes what `data/rl/` lacks of the starts and the stored runs.
#
# ### Exercise
# Break the first check: draw at a temperature of 0.8 and train as before. What do the numbers say?
#
# <details><summary>Solution</summary>
#
# ```python
# warm = bench.sample(policy, bench.problems[:8], jax.random.key(2), heat=0.8)[:4]
# trained = bench.logps(policy, warm)
# print(max(np.abs(nats - answer.logps).max() for nats, answer in zip(trained, warm)))
# ```
#
# They're apart by tenths of a nat wherever the model hesitates, because the sampler drew from another softmax.
#
# </details>
#
# Back to [07 · pass@k that can be believed](07_eval.ipynb).
