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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/12_nca.ipynb)
#
# # 12 · Can worlds without meaning teach a model to read?
#
# **Could a model learn to read better by first watching a world in which nothing means anything?** Dan Lee,
# Seungwook Han, Akarsh Kumar and Pulkit Agrawal report that it can: *Training Language Models via Neural
# Cellular Automata* ([arXiv 2603.10055](https://arxiv.org/abs/2603.10055),
# [code](https://github.com/danihyunlee/nca-pre-pretraining)). We draw such worlds, look at what there is to
# learn in them, and try it on a very small model. There we see no gain: the model that has watched such worlds
# first reads no better than one that starts from random weights.
#
# | | |
# |---|---|
# | **Needs** | one CPU, 3 GB of memory |
# | **Reads** | `data/nca/` (stored runs) |
# | **Writes** | figures |
# | **Time and cost** | half a minute to two minutes on two cores; the stored runs took half an hour on one |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb) · [own data](own_data.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · **12 automata** · [13 RL](13_rl.ipynb) · [14 JAX](14_jax.ipynb)

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
# ## 1. See it first
# **What could a model possibly learn from a world without meaning?** Let's look at one. A *cellular
# automaton* is a grid of cells, and each cell is in one of a few states. All cells change at the same time
# and by the same rule: what a cell becomes depends on itself and on its eight neighbors. In a *neural*
# automaton the rule is a small network. Its weights are random and never trained, so every draw of weights
# is a new world.

# %%
from dataclasses import replace

import numpy as np
from matplotlib.colors import ListedColormap

from appendix import nca, runs
from appendix import nca_runs as lab
from helpers import style

plan = lab.Plan()
world = plan.world
helpers.show_source(nca.next_frame)

# %% [markdown]
# A *film* is what one rule does over time. `openings` draws two thousand rules, each with a random first
# frame, and `films` runs them all at once. It throws away the first ten frames, in which the random start
# settles. Then we measure how well gzip compresses each film, because boring films compress well.

# %%
frames = np.asarray(nca.films(*nca.openings(0, 0, 2_048, world), world))
scores = nca.complexity(frames, world)
print(f"{len(frames):,} films of {frames.shape[1]} frames, {world.side} x {world.side} cells, "
      f"{world.states} states")

# %%
shown = [np.argsort(scores)[len(scores) * share // 100] for share in (45, 62, 75, 88, 97)]
fig, axes = style.figure(rows=5, columns=world.frames, width=9, height=4.5)
colors = ListedColormap([style.BLUE, "#F5F5F5"])
for row, number in zip(axes, shown):
    for ax, frame in zip(row, frames[number]):
        ax.imshow(frame, cmap=colors, vmin=0, vmax=world.states - 1)
        ax.set(xticks=[], yticks=[])
    row[0].set_ylabel(f"{scores[number]:.2f}", rotation=0, ha="right", va="center")
fig.suptitle("Five random rules: from frozen to boiling", x=0.01, ha="left", fontweight="bold")
style.finish(fig, "12_films", "drawn here; on the left: compressed size / raw size")

# %% [markdown]
# Each row is a film, and time runs from left to right. The first world froze with all its cells alike, the
# second blinks, the third drifts. Like the paper, we train on neither the dullest films nor the wildest: we sort
# them by compressed size and keep those from the 60th to the 90th percentile. Of these five that leaves the three
# in the middle.
#
# To read a film, a model needs tokens. Each patch of 2 x 2 cells becomes one token, and two more tokens mark
# the beginning and the end of a frame. The model then predicts the next token, exactly as it does with text.
#
# **The films mean nothing. But to predict them you have to look back at the right place, copy, and find the
# rule, and a reader of text needs these skills, too.**
#
# ## 2. Does the model learn them?
# **Suppose a model's loss on these films is 1.2 nats per token. Is that good?** (*Nats* are the unit of a
# loss with natural logarithms. At 1.2 nats the right token typically got a probability of e⁻¹·², or 30%.)
# You can't tell without a scale, so we take two guessers that aren't trained at all. The first one only
# *counts* how often each patch has appeared in the film so far, so it knows nothing about time. The second
# one *looks up*: for each cell, it searches the film for neighborhoods like the present one and bets on what
# they became. Here are their losses, next to those of a small model during its first 200 steps, live:

# %%
_, live = lab.first_stage(replace(plan, first_steps=200, every=50, seeds=1), "automata")
live[["step", "tokens", "train_loss", "val_loss", "counting", "looking_up"]].round(3)

# %% [markdown]
# Between step 50 and step 100 (in the stored output) the model gets below *counting*, so it has found more
# than frequencies. But it's still far from *looking up*.
#
# How hard are these films? Easier than they look, because a world this small soon returns to an earlier frame,
# and from then on it repeats itself. How many of the films that we keep do that?

# %%
low, high = np.percentile(scores, world.band)
kept = frames[(scores >= low) & (scores <= high)]
repeats = [(film[:-1] == film[-1]).all((1, 2)).any() for film in kept]
print(f"films kept whose last frame was there before: {np.mean(repeats):.0%}")

# %% [markdown]
# **The model does learn from the films, though mostly from films that go in circles.**
#
# ## 3. Does it help with reading?
# **If a model has seen films first, does it learn text faster?** We take a small Gemma 4 of 0.85 million
# parameters and train it in two stages. In the first one it reads 0.58 million tokens of films, or of
# something else. Then we move its attention, MLPs and norms into a fresh model, and that one reads 0.44
# million tokens of text. Here are the six ways to begin, called *arms*. (The *embedder* in the last row is the
# table with a vector for each token. In the other arms it starts fresh.)
#
# | arm | what it reads first | why it's there |
# |---|---|---|
# | `scratch` | nothing | the baseline: does reading something first help at all? |
# | `automata` | films | the question |
# | `text` | as many tokens of other documents | would reading have been the better use of the time? |
# | `shuffled` | films with their frames in a wrong order | does it matter how the world moves? |
# | `dyck` | balanced brackets of 64 kinds | would any structure do? |
# | `whole` | as `text`, and the embedder is moved as well | the control: if it doesn't win, the test is blind |
#
# The text is [09](09_tiny_base.ipynb)'s corpus of Verilog modules, but without the bugs. Each arm runs with
# five seeds. Runs of the same seed share their documents and their fresh weights, so we compare them in pairs.
#
# The second stage has 300 steps, and in all six arms every part of the model learns at the same rate. (At first we
# slowed down what was moved, to protect it, and for a fair comparison we did the same to `scratch`. A reader asked
# what the slower rate costs. It cost a lot: at the ordinary rate `scratch` ends at 0.52 nats instead of 0.70 (LOG.md,
# 2026-11-29). And only at the slower rate had the films looked harmful.)
#
# A first stage that has learned nothing can't help. So we made a rule for the films: with every seed, the model
# must close at least half of the gap between counting and looking up. Harder films didn't pass (LOG.md), which
# is why these have only two states and 6 x 6 cells. Here are the stored runs, measured on one core:

# %%
table = runs.stored(lab.STORED)
first = table[(table.arm == "automata") & (table.stage == "first")]
print("share of the gap closed, by seed:", *(f"{share:.0%}" for share in lab.closed(first)))
losses = lab.final(table)
results = lab.differences(losses)
print("nats per token from scratch:", losses.scratch.mean().round(3))
results.round(3)

# %%
fig, ax = style.figure(width=8.5, height=3.6)
for place, row in enumerate(results.itertuples()):
    gaps = losses[row.arm] - losses[row.against]
    ax.plot([row.low, row.high], [place, place], color=style.GRAY, lw=5, alpha=0.4)
    ax.plot(gaps, [place] * len(gaps), "o", ms=5, color=style.BLUE)
ax.axvline(0, color=style.BLACK, lw=1)
ax.set(yticks=range(len(results)), yticklabels=results.arm + " − " + results.against,
       xlabel="difference of validation losses, nats per token (left: the first is better)",
       title='Only "whole" beats starting from nothing')
ax.invert_yaxis()
style.finish(fig, "12_differences", "data/nca; dot: a seed; bar: 95% for all")

# %% [markdown]
# Each bar is the interval of one comparison, and there are eight. With so many chances, one of eight ordinary
# 95% intervals could easily be wrong. So the bars are wider: all eight are right together in at least 95%
# of such experiments (Bonferroni's correction).
#
# - **Films are no better a start than nothing.** With each of the five seeds their loss ends a little above that of
#   `scratch`, by 0.021 nats on average. But the interval includes zero, so even that could be luck.
# - **We see no sign that it matters how the world moves.** Shuffled films end where the films do.
# - **Brackets get in the way.** They end 0.110 above `scratch`, and 0.089 above the films.
# - **Even reading other text first leaves no gain, if the embedder isn't moved.** After 100 steps the loss of `text`
#   is 0.08 below that of `scratch` (`data/nca` has the curves). At the end that lead is gone.
# - **The test isn't blind.** `whole` wins by 0.18. So what reading has taught sits in the embedder, or needs it.
#
# **At this size, films don't teach a model to read.**
#
# ## 4. How far does this reach?
# **So is the paper wrong?** We can't say. It used 1.6 billion parameters, 164 million tokens of films, and
# web text. It reports that the films lower the *perplexity* of text, which is e to the power of the loss, by
# 4 to 6% (published). Our model is about two thousand times smaller, and most of our films go in circles.
# Our first stage is longer than the text that follows, while the paper's is 1 to 4% of it. And we tried only
# one set of learning rates.
#
# Others have found mixed or negative results with settings of their own (published):
# [slowrun 63](https://github.com/qlabs-eng/slowrun/pull/63) with 1.4 billion parameters and one run each, and
# [nca-language-pretraining](https://github.com/VinodAnbalagan/nca-language-pretraining) with two layers.
#
# Two habits carry over to any such experiment. Before you judge a loss, give it a scale, as the two guessers
# did. And add two controls: one that has to win, because only then does "no difference" mean anything, and one that's
# trained the ordinary way, because otherwise you may measure your own precautions.
#
# **This page shows how to test such an idea fairly. It can't say what films do for a larger model.**
#
# ```bash
# rm data/nca/*.csv && python -m appendix.nca_runs  # makes all the stored runs again, about half an hour
# ```
#
# ## Exercises
# 1. Our films end 0.021 nats above `scratch`, and the interval reaches from −0.013 to 0.055. By how many percent might
#    they change the perplexity, and by how many does `whole` lower it? Could they do here what the paper reports, 4 to 6%
#    less?
#
# <details><summary>Solution</summary>
#
# e to the power of 0.021 is 1.021, so the films raise it by 2%. The ends of the interval are 1% less and 6% more. So a
# gain of 4% can be ruled out for this model and these films. `whole` lowers the perplexity by 17%, because e to the power
# of −0.182 is 0.83.
# </details>
#
# 2. Suppose you'd made only one of the eight comparisons, `automata` with `scratch`. Would you have called it a loss?
#    Guess from the five dots, then compute an ordinary interval:
#
# ```python
# import scipy.stats
#
# test = scipy.stats.ttest_rel(losses.automata, losses.scratch)
# print(test.confidence_interval(0.95))
# ```
#
# <details><summary>Solution</summary>
#
# From 0.003 to 0.039: alone, it would have counted as a loss. Together with seven other comparisons it doesn't. That's
# the price of asking eight questions, and the reason to decide beforehand which one counts.
# </details>
#
# Back to [09 · A Gemma 4 small enough for a laptop, pretrained from scratch](09_tiny_base.ipynb).
