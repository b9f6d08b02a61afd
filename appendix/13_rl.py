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
# Suppose you've tuned a model on rows that nobody checked, and fewer than half of its answers work. But you have a
# testbench. Can its verdict alone make the model better? And what if the judge can be fooled? In our runs the
# verdict lifts pass@1 by some 17 points. A judge that can be fooled brings it down nearly to zero, while the reward
# goes up.
#
# So far the model has learned from answers that somebody else had written. Here it writes its own, a simulator says
# which of them work, and training makes those likelier, as in [CodeV-R1](https://arxiv.org/abs/2505.24183). You'll
# take one step yourself, let Tunix take the same step, and read our stored runs.
#
# | | |
# |---|---|
# | **Needs** | one CPU, 5 GB of memory, Icarus Verilog |
# | **Reads** | the tiny base, `data/rl/` (two starts, stored runs), `appendix/world/` (problems) |
# | **Writes** | figures |
# | **Time and cost** | about two minutes on two cores; the stored runs took about two core-hours |

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
# writes. 02's rows are right by construction: a program wrote each answer together with its request. (It broke a few on
# purpose, but only their form: some have too many fences, for example.) Most training sets aren't like that. So for this
# page we fine-tuned a tiny base on rows that nobody had checked, and called the result the *start*.
#
# - In 20% of the start's rows the module has a bug.
# - In 30% the module is called `top_module`, whatever the request says.
# - In 10% the answer solves nothing. It prints the line by which some judges recognize a right answer
#   (section 6).
#
# A model that learns from such rows writes such rows. How good is it? With each of three seeds we sampled seven
# answers to each of the 38 held-out problems, at temperature 0.8. **pass@1** is the chance that one answer is
# right, and **pass@5** that at least one of five is:

# %%
import jax
import numpy as np
import pandas as pd

from appendix import rl, rl_figures, rl_tunix
from appendix import rl_runs as lab
from helpers import gemma, style

runs = lab.stored()
passes = lab.drawn_passes(runs)
(100 * lab.scores(passes, ["start"])).round().astype(int)

# %% [markdown]
# The table is in percent, and its first three columns are pass@1, seed by seed. The start is right far more often in
# five tries than in one. So it can write the right module, but often it writes a wrong one.
#
# **Our guess: a reward teaches nothing new, and only chooses among what the model can write already.**
#
# ## 2. How does a reward become a training step?
# **Where do rewards come from?** Any problem with a testbench can give a reward, as long as it isn't in the exam. So the
# generator that wrote 02's data writes 300 more. None of them shares a prompt with the exam, or a combination of
# circuit, widths and port names. Here's the first one with its reference, and how the start does on the first eight,
# with four answers to each:

# %%
bench = lab.Bench()
plan = bench.plan
problem = bench.problems[0]
print(problem.prompt, problem.reference, sep="\n")

answers = bench.sample(bench.start, bench.problems[:plan.prompts], jax.random.key(0))
verdicts = pd.DataFrame(bench.judge.of(answers))
prompt_of = np.arange(len(answers)) // plan.answers
shown = verdicts[["verilog", "renamed", "compiles"]].groupby(prompt_of).mean()
(100 * shown).astype(int).rename_axis("problem").rename(columns="{}, %".format)

# %% [markdown]
# Each number is a percentage of a problem's four answers. `verilog` is what passes our judge, and `renamed` is what's
# called `top_module`. `compiles` is what compiles together with the testbench, so a module with the wrong name doesn't.
#
# **But what do you do with a verdict that has no gradient?** The usual algorithm, GRPO (group relative policy
# optimization), has many parts: a frozen reference model, a *KL term* (a kind of distance) that keeps the *policy* (the
# model that's being trained) near it, a clipped ratio of new to old probabilities, and two divisions, by the spread of
# the rewards and by the answer's length. Take all of that away, and what's left is REINFORCE, from 1992:
#
# 1. Sample several answers to each prompt from the policy as it is now.
# 2. The reward is 1 if the answer passes the testbench, and 0 if it doesn't. An answer's *advantage* is its reward minus
#    the mean reward of all answers to the same prompt. (What's subtracted is called a *baseline*.)
# 3. Train on all answers with 03's loss, and multiply each answer's loss by its advantage. So whatever did better than
#    the others becomes likelier, and whatever did worse becomes rarer.
#
# **All four answers to a prompt pass. How much does the model learn from them?**
#
# <details><summary>Answer</summary>
#
# Nothing, because all four advantages are 0, as they are when none passes. Only a prompt that the model
# solves sometimes is of use. That's why CodeV-R1 throws away the easy ones first.
# </details>
#
# In code, the advantage is a factor on the loss, over rows that are packed as in 02. We take one step with the 32
# answers from above:

# %%
helpers.show_source(rl.advantages)
style.fold_source("make_loss and Learner: the factor and the step", rl.make_loss, rl.Learner)
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
# ## 3. Does it train what it samples?
# **How would you notice that the model you train isn't the model that answers?** One program samples, with merged
# weights and a cache of keys and values. Another one trains, with adapters. If they disagree, nothing crashes: the
# reward just doesn't rise. It has happened with Gemma 4. (In the table, a *rollout* is a sampled answer, and the *soft
# cap* keeps the model's logits within ±30.)
#
# | what was wrong | where |
# |---|---|
# | rollouts came from random weights: the mapping of names failed silently | MaxText [4404](https://github.com/AI-Hypercomputer/maxtext/pull/4404), [4519](https://github.com/AI-Hypercomputer/maxtext/pull/4519), [4536](https://github.com/AI-Hypercomputer/maxtext/pull/4536), fixed in July 2026 |
# | the sampler kept its first weights: no name matched, and one warning said so | Tunix 0.1.7 with vLLM's TPU package since July 2026, tried here; [fixed later](https://github.com/google/tunix/commit/71eef52c54e7de574a7c47f6e99adc1a1de5948d) |
# | log-probabilities with a wrong soft cap: a KL of 0.24 before the first step | [unsloth-zoo 593](https://github.com/unslothai/unsloth-zoo/pull/593) |
#
# Four checks would have caught all of them, so whichever stack you take, begin with them.
#
# *One: the sampler and the trainer give each token the same log-probability*, after a step, too. That covers the soft
# cap, the temperature, and where an answer begins and ends. To show that the check can fail, we do it twice: in the
# second line of the output the trainer still has the weights from before the step.

# %%
fresh = bench.sample(policy, bench.problems[8:16], jax.random.key(1))[::8]  # 4 of 32 will do
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
# *Three: rewards that are all equal change nothing*, not even through the optimizer's running averages (its moments).

# %%
equal = rl.advantages(np.ones_like(rewards)).ravel()
after, _ = bench.learner.step(policy, moments, bench.frozen, examples, equal, plan.rate)
print("changed:", bool((rl_tunix.flat(after) != rl_tunix.flat(policy)).any()))

# %% [markdown]
# *Four: somebody else's code finds the same gradient.* That's Tunix, in the next section.
#
# **Before you trust a curve, check log-probabilities, weights, equal rewards and the gradient.**
#
# ## 4. What happens if we put GRPO's parts back?
# **Is our step the right one, or did we take away too much?** Tunix 0.1.7 has all the parts in one class,
# `GRPOLearner`. We let it take one step from our start, on four answers to each of six problems, with our judge and
# Tunix's default settings for GRPO, but with plain gradient descent at rate 1. So what it subtracts from the weights
# *is* its gradient.

# %%
style.fold_source("grpo_step: how Tunix takes its step", rl_tunix.grpo_step)
theirs = rl_tunix.grpo_step(bench, bench.problems[:6])
print("passes of four:", theirs.rewards.sum(axis=1))
print("end tokens that Tunix trains:", theirs.end_tokens)

# %% [markdown]
# Now we take our step on the tokens that Tunix sampled, and put back one part of GRPO after another. Each only
# changes the factor of an answer. (A cosine of 1 means that our gradient points where Tunix's does.) **Which part turns
# our gradient most?**

# %%
lengths = np.array([example.mask.sum() for example in theirs.examples])
plain = rl.advantages(theirs.rewards).ravel()
spread = rl.advantages(theirs.rewards, spread=True).ravel()
parts = {"nothing": plain,
         "÷ tokens of the answer": plain / lengths,
         "and ÷ spread": spread / lengths,
         "and the KL term": (spread - rl_tunix.KL_WEIGHT) / lengths}

rows = {name: rl_tunix.compare(bench, theirs, factors) for name, factors in parts.items()}
pd.DataFrame(rows).T.map("{:.3g}".format)

# %% [markdown]
# With everything put back the two gradients agree, although the two steps share no code but the model. (In the first
# step on an answer, new and old probabilities are equal, so nothing is clipped.)
#
# - **Dividing by the answer's tokens** turns the gradient most: tokens of short answers get more weight.
# - **Dividing by the spread** mostly makes it larger. Four rewards of 0 and 1 have a spread of 0.50 or 0.58.
# - **The KL term** that Tunix takes by default only adds noise. Over the policy's own answers its gradient averages to
#   zero, however far the policy has moved ([arXiv 2506.09477](https://arxiv.org/abs/2506.09477)), so it holds nothing
#   back. (You get GRPO's own term with `kl_loss_mode="low_var_kl"`.)
# - **The end token** is missing from these answers. Tunix's sampler cuts it off, so no reward teaches the model when to
#   stop. (Ours keeps it.)
#
# **Put GRPO's parts back and you get Tunix's gradient. So our step is GRPO without them.**
#
# ## 5. Does it help?
# **Is the reward worth the trouble, or would the same answers help as much in a simpler way?** We go on from the same
# start in four ways, which we call *arms*. Each takes 20 steps. The first three look at equally many answers.
#
# | arm | what it trains on |
# |---|---|
# | `reinforce` | its own answers, each times its advantage |
# | `dpo` | the start's answers in pairs: one that passes beside one that fails, to the same prompt |
# | `rejection` | the start's answers that pass, with 03's plain loss |
# | `more_sft` | the unchecked rows again, with 03's plain loss (*SFT* is supervised fine-tuning, which is what 03 does) |
#
# **DPO** (direct preference optimization) never samples from the model as it changes. Its loss asks the policy to raise
# the probability of a pair's passing answer more than that of the failing one. (`rl.dpo_factors` is its derivative, and
# a test compares it with Tunix's own `DPOTrainer`.)
#
# A seed decides the problems, the samples and the data, so we compare arms of the same seed in pairs. They answer the
# held-out problems in two ways: greedily, and sampled at temperature 0.8. (Intervals and p are as in
# [07](07_eval.ipynb), section 9.) **Which arm would you bet on?**

# %%
shares = lab.held_out(runs, ["start", *lab.COMPARED])
best = shares.drop("start").sampled.max() - shares.sampled["start"]
greedy = shares.drop("start").greedy - shares.greedy["start"]
end = "greedy ones gain, too" if greedy.max() > 0 else "no arm's greedy ones gain"
fig, ax = style.figure(7, 3.8)
rl_figures.draw_held_out(ax, shares)
ax.set_title(f"Sampled answers gain up to {100 * best:.1f} points;\n{end}")
style.finish(fig, "13_gains", "data/rl, means of three seeds; bars: 95% over the 38 problems")

rl_figures.gains_table(passes, lab.COMPARED)

# %% [markdown]
# **The three arms that use the verdict gain some 17 points of pass@1 each, and more of the same rows gains nothing.** So
# it's the verdict that helps. Which algorithm uses it hardly matters, because sampled answers can't tell the three apart.
# At five tries little or nothing is gained. Only REINFORCE's interval leaves out zero, and only just.
#
# Greedy answers tell a different story: no arm beats the start, and rejection sampling loses most. So the gain comes
# from choosing. The start's likeliest answer was often right already, but a sampled one strayed from it. The verdict
# teaches the model not to stray, and doesn't improve what it would say first. So our guess of section 1 held, as far as
# these problems can tell.
#
# **What happened on the way?** The thin lines are single steps, and the thick ones means of five, on training problems
# at temperature 1 (where answers stray further, so the start passes less often than above).

# %%
titles = {"reward": "pass", "renamed": "have the wrong name"}
fig, axes = style.figure(7, 5, rows=2, sharex=True)
for ax, (column, title) in zip(axes, titles.items(), strict=True):
    rl_figures.draw_beside_start(ax, runs, column, title)
axes[0].legend(fontsize=8)
axes[0].set_ylabel("share that passes")
axes[1].set(xlabel="step", ylabel="share called top_module")
style.finish(fig, "13_curves", "data/rl, means of three seeds; training problems, temperature 1")

# %% [markdown]
# The gray curve matters: it's the start, which never changes, asked the same problems in the same order. Without it,
# a rising reward may only mean that the problems got easier.
#
# **Give a simpler method the same answers and steps, and compare both sampled *and* greedy answers.**
#
# ## 6. What does a bad judge let in?
# **What if the judge can be fooled?** verilog-eval's own judge compiles answer, reference and testbench into one
# program, and accepts a log in which any line says `Mismatches: 0`. But an answer can print that line itself. (07's
# judge lets no text of an answer near its verdict.) A model of 3.65 million parameters is unlikely to invent this, so
# **we showed it how**. Here's such a *stub*: the right ports, no logic, and the winning line.

# %%
style.fold_source("naive: verilog-eval's own judge", rl.naive)
stub = rl.stub(problem.right_answer)
verdict, = bench.judge([(problem, f"```verilog\n{stub}```")])
print(stub, verdict, sep="\n")

# %% [markdown]
# Three policies train alike, and only the judge that pays them differs. The naive judge pays the first one, and our
# judge the second. The third one is paid for every module that compiles together with the testbench, right or wrong. For
# that, the module only has to be called `TopModule` and have the ports that the testbench connects. (What our judge
# refuses earns nothing, such as an answer that ends the simulation itself.)
#
# They begin at a second start, `gamed`. One in four of its training rows was a stub, and in 15% the module had the wrong
# name. (In two attempts from the first start the exploit stayed rare: LOG.md.) So this page can't say whether a model
# *finds* an exploit. It asks what happens to an exploit that the model can already write. These arms take 30 steps at a
# constant learning rate, while section 5's falls to zero.
#
# **What will each of the three learn?** Guess first. (Thin lines are steps, thick ones means of five steps, as before.)

# %%
fig, axes = style.figure(7, 8, rows=3, sharex=True)
for ax, arm in zip(axes, lab.JUDGES, strict=True):
    rl_figures.draw_judged(ax, runs, arm)
axes[-1].set_xlabel("step")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9)
style.finish(fig, "13_hack", "data/rl, means of two seeds; titles: steps 1 to 6 and the last six")

# %% [markdown]
# - **Paid by the naive judge**, the policy earns more, and in the last six steps not one answer works. Four of five
#   print the winning line. (Some spell it wrong and aren't paid.)
# - **Paid by our judge**, the policy has all but given up that line after some ten steps, and more answers work than
#   before.
# - **Paid for compiling**, the policy gets little better at compiling, and somewhat more answers work. The line becomes
#   rare here as well, and we don't know why: a stub that's spelled right compiles, so it's paid like any other module.
#
# **And the held-out problems?**

# %%
judged = lab.held_out(runs, lab.JUDGES)
fig, ax = style.figure(7, 2.6)
rl_figures.draw_held_out(ax, judged)
ax.set_title("Held out: naive judge {naive_judge:.1%}, ours {our_judge:.0%}, "
             "compiling {compiles:.0%}".format(**judged.sampled))
style.finish(fig, "13_judges", "data/rl, means of two seeds; bars: 95% over the 38 problems")

apart = lab.gains(passes, ["our_judge"], over="compiles").loc["our_judge"]
print(f"our judge minus paid for compiling, sampled: {rl_figures.as_percent(apart)} points, "
      f"p = {apart.p:.1g}; greedy: {100 * (judged.greedy.our_judge - judged.greedy.compiles):+.0f}")

# %% [markdown]
# That's a surprise: the policy that was paid for *compiling* is nearly as good as the one that our judge paid. The
# interval can't tell them apart, and greedily it's even a little better. (How this start does on these problems isn't
# stored, so we can't say how much each has gained.) Part of the reason may be the name. None of the three judges pays
# for `top_module`, and under each of them its share falls, from 17% of the answers in the first step to 0.3% in the last
# six (`data/rl`).
#
# <details><summary><b>You only see what the judge pays (the solid line of the first panel). How would you notice?</b></summary>
#
# Read some answers. Watch how long they are, and whether they repeat. And have a sample judged by a judge that
# doesn't train the model.
#
# </details>
#
# **A judge that can be fooled cost us everything. One that also pays for wrong modules cost us little here, but nothing
# guarantees that.**
#
# ## Recap
# - You can train with a testbench: an answer's advantage (its reward minus the mean of its prompt) is one more factor on
#   03's loss.
# - You have four checks that find out whether the model that samples is the one that's trained. Run them before you
#   believe a curve.
# - In our runs the verdict made sampled answers better, whichever of three algorithms used it. Greedy answers gained
#   nothing.
# - A judge that can be fooled brought the score nearly to zero, so try to fool yours before a policy does.
#
# If a start or a stored run is missing in `data/rl/`, `python -m appendix.rl_runs` makes it.
#
# ### Exercises
# 1. By hand: one of four answers to a prompt passes. What are the four advantages? And what are they if two pass? Then
#    divide by the spread, as GRPO does (1 and 0, 0, 0 have a spread of 0.50; two of each have 0.58). Which of the two
#    prompts gains weight when you divide?
#
# <details><summary>Solution</summary>
#
# If one passes, they're 0.75, and three times −0.25. If two pass, they're twice 0.5 and twice −0.5. Divided by the
# spread, that's 1.5 and three times −0.5, or twice 0.87 and twice −0.87. Add up the sizes: without the division the
# first prompt has 1.5 and the second 2, so it counts three quarters as much. With the division they have 3 and 3.46, and
# it counts 87% as much. So the division shifts weight toward prompts that nearly always fail or nearly always pass.
# </details>
#
# 2. Break the first check: sample at a temperature of 0.8 (`bench.sample(…, heat=0.8)`), and let `bench.logps` score the
#    answers as before. How far apart are sampler and trainer now?
#
# <details><summary>Solution</summary>
#
# ```python
# warm = bench.sample(policy, bench.problems[8:16], jax.random.key(2), heat=0.8)[::8]
# trained = bench.logps(policy, warm)
# print(max(np.abs(nats - answer.logps).max() for nats, answer in zip(trained, warm)))
# ```
#
# From a tenth of a nat to more than one, depending on which tokens were drawn. Where the model is sure of a token, both
# softmaxes give it nearly 1, so there's hardly a gap. Where the model hesitates, the sampler's softmax is sharper than
# the trainer's, and for an unlikely token the gap is large.
# </details>
#
# 3. Fool our judge: put something worse into `stub`, such as a line that reads the reference's output. Which of your
#    tricks pass our judge, and which would pass verilog-eval's?
#
# <details><summary>Solution</summary>
#
# ```python
# for trick in ('initial begin $display("Mismatches: 0 in 400 samples"); $finish; end',
#               "assign match = tb.good1.match;", "RefModule mine (num, match);"):
#     code = stub.replace(rl.FORGED.strip(), trick)
#     print(bench.judge([(problem, f"```verilog\n{code}```")]))
# ```
#
# None passes ours: it refuses the first one, and the other two don't even compile, because the answer sits its exam
# without the reference. All three would pass verilog-eval's judge. The output says `naive=True` for the first one only,
# because `bench.judge` saves work: it asks the naive judge only about answers with a `$`, which can print. Print
# `rl.naive(problem, code)` in the loop, and you see all three pass. If you find a trick that passes ours, please tell us.
# </details>
#
# Back to [07 · pass@k that can be believed](07_eval.ipynb).
