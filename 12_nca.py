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
# A paper of 2026 trains a language model on films of random *neural cellular automata* (NCA) before it
# sees any text, and reports that the text is then learned better (arXiv 2603.10055). We draw such
# films, train the tiny Gemma 4 of notebook 09 on them, and compare fairly. **At our size it does not
# help.** After a million automaton tokens and 400 steps of text, the model that saw automata ends a
# little behind the one that did not, with every seed; films with their frames in a wrong order do no
# worse. Two controls say where to look. The model learned hardly any rule of its films. And as much
# *text* instead of films helps only if its embedder comes along, too: what is learned is lost on the
# way.
#
# | | |
# |---|---|
# | **Needs** | One CPU (or any JAX device), 3 GB of memory |
# | **Takes** | `data/generate/` (09's corpus), `data/nca/*.csv` (the stored comparison) |
# | **Makes** | figures; with `NCA=full` the comparison itself, `data/nca/*.csv` |
# | **Costs** | two minutes on two cores; the comparison takes about four hours of both |
#
# The outputs shown are those of the tiny run on two CPU cores. Terms are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · [07 evaluate](07_eval.ipynb)
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · **12 automata**

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
# ## 1. See it first
# A cellular automaton is a grid of cells, each in one of a few states. All cells change at once, and
# what a cell becomes depends on itself and its eight neighbours. The rule is the same everywhere.
# Conway's Game of Life is one such rule, written by hand; ours are drawn at random.

# %%
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from IPython.display import display

from appendix import nca, pretrain
from helpers import style


@dataclass(frozen=True)
class Settings:
    plan: nca.Plan = nca.Plan()   # of the stored comparison; every row in data/nca has its hash
    rules: int = 2_048            # drawn live
    timed: int = 200              # of them, for the plain loop
    live_steps: int = 50          # of the first stage, trained here
    full: bool = os.environ.get("NCA") == "full"


cfg = helpers.choose({"tiny": Settings()})
world = cfg.plan.world
print(world)

# %% [markdown]
# The next cell draws two thousand rules and lets each of them run. The first ten frames are thrown
# away: they show how a random start dies down rather than what the rule does.

# %%
rules, starts = nca.openings(0, 0, cfg.rules, world)
frames = np.asarray(nca.films(rules, starts, world))
scores = nca.complexity(frames, world)
print(f"{len(frames):,} films of {frames.shape[1]} frames, {world.side} x {world.side} cells, "
      f"{world.states} states")

# %% [markdown]
# Here are six of them, one in a row, time from left to right. They are sorted by how badly gzip
# compresses them, which section 5 turns into a filter.

# %%
shares = (20, 35, 47, 60, 75, 97)  # per cent of the films that compress better
shown = [np.argsort(scores)[len(scores) * share // 100] for share in shares]
fig = nca.draw_films(frames[shown], scores[shown], world)
fig.suptitle("Six random rules: from frozen to boiling", x=0.01, ha="left", fontweight="bold")
style.finish(fig, "12_films", "drawn here; on the left: compressed size / raw size")

# %% [markdown]
# **What this means.** Some worlds freeze, and to predict their next frame you copy the last one.
# Some blink, and you copy the last but one. Those in the middle drift and collide: you have to find
# out which rule is at work, from examples, and apply it. Nothing in them means anything. But looking
# back at the right place, copying, and keeping track of a state are what a reader of text does, too.
# That is the whole idea: learn the moves here, and bring them along.

# %% [markdown]
# ## 2. A rule is a small network with random weights
# That is why they are called neural: the rule is a small network, never trained. A 3 x 3 convolution
# looks at the neighbours' states, two small matrices follow, and the likeliest state wins. A cell at
# the edge has neighbours at the opposite edge: the grid is a torus, so no cell is special.

# %%
helpers.show_source(nca.next_frame)
one = jax.tree.map(lambda leaf: leaf[0], rules)
print({name: leaf.shape for name, leaf in one._asdict().items()})
print(f"{sum(leaf.size for leaf in one)} weights a rule")

# %% [markdown]
# Is it right? This rule, built by hand, passes on the state of the neighbour below and to the right. So
# the picture moves up and to the left, and what leaves at one corner comes back at the opposite one.

# %%
kernel = np.zeros((3, 3, 4, 4), np.float32)
kernel[2, 2] = np.eye(4)                     # below, right: one channel for each state
through = np.eye(4, 16, dtype=np.float32)
shift = nca.Rule(kernel, through, through.T)
corner = np.zeros((8, 8), np.int32)
corner[0, 0] = 3
moved = np.asarray(nca.next_frame(shift, corner))
print("a single cell at (0, 0) goes to", tuple(map(int, np.argwhere(moved == 3)[0])))
assert (moved == np.roll(corner, (-1, -1), (0, 1))).all()

# %% [markdown]
# ## 3. Thousands of worlds at once
# Training needs very many tokens, each film from a rule of its own. Written down as one thinks
# of it, that is a loop over films around a loop over frames. In JAX, `scan` runs over time, and
# `vmap` turns the function of one rule into a function of thousands.

# %%
helpers.show_source(nca.film, nca.films)


def plain_film(kernel, hidden, out, cells, world):
    """The frames of one film after the burn-in, one after the other, in NumPy. [F, H, H]"""
    made = []
    for _ in range(world.burn_in + world.frames):
        made.append(cells)
        total = np.zeros((*cells.shape, kernel.shape[-1]), np.float32)
        for down, right in itertools.product((-1, 0, 1), repeat=2):
            total += kernel[down + 1, right + 1][np.roll(cells, (-down, -right), (0, 1))]
        cells = (np.maximum(total @ hidden, 0) @ out).argmax(-1)
    return np.stack(made[world.burn_in:])


# %% [markdown]
# Both make the same films. We time the second call in JAX: the first one also compiles.

# %%
start = time.perf_counter()
jax.block_until_ready(nca.films(rules, starts, world))
seconds = {"JAX, all rules at once": (time.perf_counter() - start) / cfg.rules}
arrays = [np.asarray(leaf)[:cfg.timed] for leaf in (*rules, starts)]
start = time.perf_counter()
plain = np.stack([plain_film(*film, world) for film in zip(*arrays, strict=True)])
seconds["NumPy, one by one"] = (time.perf_counter() - start) / cfg.timed
equal = (plain == frames[:cfg.timed]).all((1, 2, 3)).mean()
speed = {name: world.frames * world.frame_tokens / value for name, value in seconds.items()}
for name, value in speed.items():
    print(f"{name}: {value:,.0f} tokens per second")
print(f"{max(speed.values()) / min(speed.values()):.0f} times as fast; {equal:.1%} of films equal")
assert equal > 0.99

# %% [markdown]
# Some of that is doing all rules at once, which NumPy could do as well; the rest is compilation and
# threads. A million tokens cost less than a training step of two thousand, so the data is nearly free.
# (A film may differ where two states are equally likely up to rounding.)

# %% [markdown]
# ## 4. From cells to tokens
# A language model reads a row of numbers. A patch of 2 x 2 cells is one token: its four states are
# the digits of a number in base 4, so there are 256 different ones. Ids 0 to 2 are padding and
# the two marks of a frame, so patch p is token p + 3. A frame makes 18 tokens, and a film of ten frames
# fills a row of 180 to the last position.

# %%
film = shown[3]
numbers = nca.patches(frames[film], world.states)  # [F, 16]
ids = nca.rows(frames[film:film + 1], world.states)
print("first patch:", *frames[film, 0, :2, :2].ravel(), "in base 4 is", numbers[0, 0])
print("first frame as tokens:", ids[0, :world.frame_tokens].tolist())
print("a row:", ids.shape)

# %% [markdown]
# The same film in both forms: below each frame, its patches as numbers.

# %%
fig = nca.draw_tokens(frames[film, :5], world)
fig.suptitle("The same film as cells and as tokens", x=0.01, ha="left", fontweight="bold")
style.finish(fig, "12_tokens", "drawn here; blue: the same patch as one frame before")

# %% [markdown]
# The model predicts each token from all before it. Nothing comes before the first frame, so its tokens
# are read but not trained on. From then on a patch depends on itself and its surroundings one frame
# back, some 18 tokens earlier, through a rule that nobody tells the model. It changes with every row,
# so it cannot be memorised: it has to be worked out from the frames so far.

# %% [markdown]
# ## 5. Which rules are worth reading?
# A quarter of all random rules freeze at once, and others look like noise. The paper sorts films by
# compressibility: gzip their tokens and divide by the raw size. It keeps ratios of 0.5 and more for web
# text, 0.3 to 0.4 for code. With our generator (ten states, 12 x 12 cells) that is the upper 43 %, or
# the 27th to 37th percentile. On our small grid pure noise reaches only 0.49, and the 27th percentile is all
# but frozen, so we keep a band of our own, the 40th to the 70th: neither frozen nor boiling. We
# tried no other.

# %%
inside, (low, high) = nca.kept(scores, world.band)
every = nca.patches(frames, world.states)
still = (every[:, 1:] == every[:, :-1]).mean((1, 2))
print(f"as a frame before: {still.mean():.0%} of patches, {still[inside].mean():.0%} of kept ones")
noise = np.random.default_rng(0).integers(0, world.states, (200, *frames.shape[1:]))
ceiling = nca.complexity(noise.astype(np.uint8), world).mean()
fig = nca.draw_complexity(scores, inside, ceiling, shown)
fig.suptitle(f"We keep the blue ones: {inside.mean():.0%} of the rules, {low:.2f} to {high:.2f}",
             x=0.01, ha="left", fontweight="bold")
style.finish(fig, "12_complexity", "drawn here; triangles: the six films of section 1")

# %% [markdown]
# So plain copying is hardly taught by what is kept.
#
# ## 6. A fair comparison
# If one model has read more, or started from better numbers, its lead proves nothing about automata. So
# every *arm* below but `longer` has the same text stage: 400 steps of 09's recipe, the same documents in
# the same order for the same seed, the same fresh embedder. Arms differ in their first stage, and in
# which weights are kept from it.

# %%
arms = pd.DataFrame([{"arm": name, "first stage": arm.first or "none",
                      "kept from it": ", ".join(arm.parts) if arm.first else "",
                      "seeds": cfg.plan.main_seeds if name in nca.MAIN else cfg.plan.other_seeds,
                      "what it is": arm.label} for name, arm in nca.ARMS.items()])
arms.style.hide(axis="index")

# %% [markdown]
# Four arms are controls. `shuffled` reads the same frames of the same films in another order: if it
# helps as much, dynamics are not the reason. `text` reads as many tokens of *other documents*: if it
# helps more, text was the better use of the time. `longer` is text without the detour, in one run.
# `whole` is `text` with its embedder moved as well. If it did not win, nothing could.
#
# Attention, MLPs and norms move over; token embeddings stay behind, since the two vocabularies share
# nothing. **How fresh is a fresh embedder?** Draw it from the seed that the first stage began with, and
# it is the one that the blocks were trained beside, hardly changed since. We did that at first, and
# `text` began its second stage at a loss of 1.1; beside an embedder that is really new, at 7.2. So a
# first stage starts from weights that another seed draws (`Plan.sources`).

# %%
helpers.show_source(nca.part_of, nca.transfer)
_, fresh = nca.fresh_model(cfg.plan, 0)
sizes = pd.Series([leaf.size for leaf in jax.tree.leaves(fresh)], name="weights")
sizes.groupby(jax.tree.leaves(nca.named_parts(fresh))).sum().to_frame()

# %% [markdown]
# Budgets must be stated both ways. Counted in tokens of the *text stage*, all arms but `longer` are
# equal. Counted in *all* tokens, every arm but scratch has two and a half times scratch's, and `longer`
# is their match; since text is padded, it makes a tenth more steps.

# %%
plan = cfg.plan
nca.budgets(plan, 0)

# %% [markdown]
# **What we expected, written before the first run.** Nothing, or close to it. The paper used 164
# million automaton tokens and a model four hundred times ours. We would not be surprised if copying
# learned on films helped in the first hundred steps, and if the end did not show it. (This is the third
# comparison. In the first, with a quarter of both budgets, automata cost 0.110 of 0.87 nats; the second
# had the stale embedder. `whole` was added last.)

# %% [markdown]
# ## 7. The first stage, live
# We train the first 50 of its 500 steps here, on the schedule of the stored runs. The data comes from
# Grain, shuffled and with random access: an interrupted run can ask for batch 97 again.

# %%
helpers.show_source(nca.stream)
batches, held_out, used_ids = nca.automaton_batches(plan, 0, "nca")
fill = np.mean([(batches[i] > 0).mean() for i in range(20)])
print(f"{len(batches)} batches of shape {batches[0].shape}, {fill:.0%} of the positions are tokens")

# %% [markdown]
# What is a good loss? Two guessers, neither of them trained, give the scale. One *counts* the patches of
# a film as they come and has no idea of time: for it the frames might come in any order. The other
# *looks up*: for each cell it finds neighbourhoods like today's earlier in the film, and bets on what
# became of them. It knows that a rule is local, but no rule.

# %%
helpers.show_source(nca.counting)
films = np.concatenate(held_out)
level, known = nca.counting(films, world), nca.looking_up(films, world)
print(f"by counting: {level:.2f} nats per token; by looking up: {known:.2f}")

# %% [markdown]
# Loop, step and optimizer are 09's; `given` is new, the tokens that are read and not predicted.

# %%
graph, params = nca.fresh_model(plan, 0)
optimizer = pretrain.make_optimizer(params, plan.first_steps, plan.learning_rate,
                                    int(plan.warmup * plan.first_steps), plan.weight_decay)
step, evaluate = pretrain.make_steps(graph, optimizer, used_ids, given=world.frame_tokens)
out = helpers.run_dir("nca")
out.mkdir(parents=True, exist_ok=True)
live_state = out / f"live-{nca.recipe(plan)}.npz"
params, history = pretrain.pretrain(params, optimizer.init(params), step, evaluate, batches,
                                    held_out, cfg.live_steps, live_state, every=plan.every)
live_state.unlink(missing_ok=True)
live = pd.DataFrame(history)
print(f"{len(live)} steps in {live.seconds.sum():.0f} s, validation loss "
      f"{live.val_loss.iloc[-1]:.3f}")

# %% [markdown]
# ## 8. The whole comparison
# With `NCA=full` in the environment, the next cell trains all runs that are not finished yet. Stop it
# at any moment: a run that was cut off goes on from a state at most two minutes old, with the same
# numbers. Without a notebook, `python -m appendix.nca --out FOLDER` does the same.

# %%
STORE = Path("data/nca")
if cfg.full:
    runs_folder = Path(os.environ.get("NCA_OUT") or out)
    nca.compare(plan, runs_folder)
    for file in runs_folder.glob("*.csv"):
        helpers.write_text(STORE / file.name, file.read_text())

# %% [markdown]
# Everything below is computed from the stored rows. Where runs are missing, it says so.

# %%
table = nca.stored(STORE, plan)
missing = nca.missing(table, plan)
print(nca.inventory(table, missing))
assert table.empty or set(table.recipe) == {nca.recipe(plan)}, "stored from another plan"

# %% [markdown]
# First: did the first stage learn anything? Each seed has films of its own, so the figure subtracts what
# the counter pays for them; green is looking up.

# %%
first = table[(table.stage == "first") & (table.arm != "first-text")]
kinds = nca.first_ends(first, plan)
fig = nca.draw_first(first, kinds, live, level, plan)
style.finish(fig, "12_first_stage", f"{STORE}, one line a seed, and this run")

# %%
there = first[(first.arm == "first-nca") & (first.seed == 0)].set_index("step").val_loss
gap = (there - live.set_index("step").val_loss).abs().max()
print(f"largest difference of the live run from the stored one: {gap:.1e} nats")
assert there.empty or gap < 0.05
kinds.style.format(precision=3, na_rep="")

# %% [markdown]
# **It has hardly begun to use the past.** Looking up takes more than 1.4 nats off what counting pays, so
# that much is there to be learned from ten frames; shuffled, the same films give nothing to look up.
# The model takes off 0.1, and half as much where the order says nothing. The rest, some 0.04 nats, is all
# that it knows of dynamics. So `nca` and `shuffled` move nearly the same weights, and what follows is
# about a first stage that learned hardly any rule.
#
# ## 9. Does it help?
# The curves show the validation loss of the text stage: thin lines are seeds, thick ones their mean.
# On the left, only text counts. On the right the first stage counts as well.

# %%
texts = table[table.stage == "text"]
if len(texts):
    fig, axes = style.figure(columns=2, width=10, height=4.2, sharey=True)
    for ax, column in zip(axes, ("text_tokens", "all_tokens"), strict=True):
        nca.draw_arms(ax, table, (*nca.MAIN, "longer", "whole"), column)
    axes[0].set(ylabel="validation loss, nats per token", title="Counting the text stage")
    axes[1].set(title="Counting both stages")
    axes[0].legend()
    style.finish(fig, "12_curves", f"{STORE}, {texts.seed.nunique()} seeds")

# %% [markdown]
# Close curves need numbers. Runs of one seed share documents, order and embedder, so we compare them
# in pairs. The interval is Student's t for the mean of the differences, at 95 %; it covers seeds, not
# the choice of the 132 validation documents. With nine such intervals about one table in three would
# show a false alarm. So an arm is `better` or `worse` only if an interval widened for all of them
# (Bonferroni) leaves zero out, too, and `perhaps` if it does not. With three pairs that takes nearly
# eight standard deviations, with five two and a half: "no difference shown" is not "equal".

# %%
helpers.show_source(nca.difference)
ends = nca.final(table)
results = nca.against(ends)
results.style.hide(axis="index").format(precision=4)

# %%
if len(results):
    fig = nca.draw_differences(results, ends)
    style.finish(fig, "12_differences", str(STORE))

# %% [markdown]
# Three questions are not about scratch. Is it the order of the frames? What does the embedder bring?
# And would one longer run have been the better use of the same text?

# %%
for one, other in (("nca", "shuffled"), ("whole", "text"), ("whole", "longer")):
    if {one, other} <= set(ends):
        mean, low, high, pairs = nca.difference(ends[one], ends[other])
        print(f"{one} against {other}: {mean:+.4f} ({low:+.4f} to {high:+.4f}, {pairs} pairs)")

# %% [markdown]
# The paper's other claim is speed. The table has the text tokens that an arm needs to a loss, over those
# that scratch needed: below 1 is faster. Scratch's own final loss is a poor mark, since it comes where
# the rate is down to nothing; the last column counts who gets there.

# %%
nca.speed(table, (1.0, 0.35))

# %% [markdown]
# (`longer` has a rate that falls more slowly, hence its late arrival.) The conclusion, from the same
# numbers:

# %%
print(nca.conclude(results, not missing))

# %% [markdown]
# **What this means.** We expected nothing and found a little harm, with every seed: 0.02 of 0.29 nats,
# 7 %, half of what one longer run gains. (The paper gains 2 to 7 % of its loss.) Between films in order and
# shuffled ones no difference is shown, and none could be: their first stages hardly differ (section 8).
# So nothing follows about dynamics. The text arms say more. `whole` keeps most of what it has read. The
# same blocks beside a new embedder (`text`) have nothing left of it at the end. The blocks of `nca` go the
# same way, so we cannot tell a bad first stage from a bad transfer. (Here a first stage is half as large again as scratch's
# whole text, in the paper 1 to 4 % of it.)
#
# ## 10. Which part carries it over?
# The paper draws one part anew at a time, and finds that attention carries the most and MLPs only where
# films and text resemble each other. Ours moves one part at a time. It also asks about forgetting: in
# `slow` everything moves, but what has moved learns at a tenth of the rate.

# %%
parts_moved = ("nca", "attention", "mlp", "norms", "text")
if set(parts_moved) & set(texts.arm):
    fig = nca.draw_parts(texts, parts_moved)
    style.finish(fig, "12_parts", f"{STORE}; thin: a seed, thick: the mean; the start is cut off")
    early = nca.against(nca.final(texts[texts.step <= 100])).set_index("arm")
    display(early.reindex(parts_moved)[["pairs", "against scratch", "low", "high"]].round(3))

# %% [markdown]
# At step 100 (the table) three arms are ahead of scratch in the mean: text, the attention alone, the
# norms alone. We chose that step after looking: a hint, no result. Does the attention bring what it
# learned of worlds? The norms, 4,006 scales and too few to hold a rule, are ahead by nearly as much, so
# it may be no more than scales that suit a trained model. Nothing is left of it at the end. `slow` has
# not caught up by then: the cost of a low rate. We did not run scratch with it, so nothing follows about
# forgetting.
#
# ## 11. What others found
# The paper's own numbers come from a 1.6 B Llama, 164 million tokens of each first stage, and 4 to
# 13 billion of text. Lower perplexity is better.

# %%
published = pd.DataFrame({"scratch": [14.66, 8.11, 1.92], "C4 text first": [14.69, 8.14, 1.88],
                          "Dyck first": [14.35, 7.91, 1.85], "automata first": [13.82, 7.70, 1.84]},
                         index=["OpenWebText", "OpenWebMath", "CodeParrot"])
better = 1 - published["automata first"] / published["scratch"]
published.assign(gain=better.map("{:.1%}".format)).rename_axis("perplexity, arXiv 2603.10055")

# %% [markdown]
# The gain is 4 to 6 % of the perplexity. As many tokens of text before text (C4) help only with code;
# balanced brackets (Dyck) lie between. The independent attempts that we can cite are negative or mixed:
#
# | attempt | setting | result |
# |---|---|---|
# | [slowrun, pull request 63](https://github.com/qlabs-eng/slowrun/pull/63) (April 2026) | 1.4 B, attention or all moved, four variants, one run each | validation loss 3.188 to 3.208, without automata 3.177 |
# | [nca-language-pretraining](https://github.com/VinodAnbalagan/nca-language-pretraining) (2026) | two layers, brackets instead of text, three seeds | ahead after 10 epochs (0.574 against 0.603), level from 50 on; the attention that the films had taught fades unless it is frozen or learns at a tenth of the rate, and then the loss stays above scratch's |
#
# Neither has the paper's setting, nor have we.

# %% [markdown]
# ## 12. What our size can and cannot show
# **It can show** whether a short warm-up on automata changes how fast *this* model learns *this* text.
# **It cannot show** that the paper is wrong, nor that automata are a bad first stage. We have 3.65
# million weights where it has 1.6 billion, 0.66 million tokens of text where it has billions, rows of
# 180 tokens with 4 states where it has 1,024 with 10, and another band. Its first stage takes ten epochs
# of 16 million tokens; ours one million, too few: with four million a model took 0.36 nats off counting
# instead of 0.1, at our rate and at a quarter of it (one run each, LOG). Whether that helps with text we
# have not tried. And our text is a small world of Verilog, in which copying names is most of the work.

# %% [markdown]
# ## Recap
# Automata, tokens, filter, transfer and comparison are in `appendix/nca.py`, the training loop shared with
# 09 in `appendix/pretrain.py`, one file a run in `data/nca/`.
#
# ### What can go wrong
# | symptom | cause | fix |
# |---|---|---|
# | an arm is ahead, and its control as well | more steps, not automata | compare with `shuffled`, `text` and `longer` |
# | stored rows are refused | they come from another plan | delete `data/nca/*.csv`, or restore the plan |
#
# ### Exercises
# 1. Keep the frozen worlds instead: the 5th to 30th percentile. Does the first stage learn faster,
#    and what has it learned?
#
# <details><summary>Solution</summary>
#
# Set `plan: nca.Plan = nca.Plan(world=nca.World(band=(5, 30)))` in section 1 and run sections 1,
# 5, 6 and 7. The loss falls quickly: nearly nine in ten tokens can be copied from 18 positions before.
# That is one attention pattern, and nothing about rules.
# </details>
#
# Back to the series: [01 · From nothing to a TPU machine that can run this](01_setup.ipynb), or to
# [09 · A Gemma 4 small enough for a laptop, pretrained from scratch](09_tiny_base.ipynb).
