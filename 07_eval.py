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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/07_eval.ipynb)
#
# # 07 · pass@k that can be believed
#
# Is the tuned model better than its base, and how sure can you be? In our stored run 73% of the tuned model's answers
# pass, and 0% or 57% of the base's: none in the chat that we trained with, and 57% in the wording that suits the base
# best. On this page you'll judge one problem by hand, try to cheat the judge, and compare both models problem by problem.
# We measure *pass@k*, the chance that at least one of k answers passes.
#
# | | |
# |---|---|
# | **Needs** | a serving machine as in notebook 05, and Icarus Verilog (version 12 if there is a choice) |
# | **Reads** | `merged/` and `merge.json` from 04, `serve/options.json` from 05, `data/` from 02, the base model, a verilog-eval folder |
# | **Writes** | `eval/{base,tuned}/samples.jsonl`, `per_problem.csv` and `summary.json`, `eval/comparison.json`, figures |
# | **Time and cost** | tiny: one to five minutes on two CPU cores (measured). 31b: 14,196 answers, 25 to 55 USD on a v6e-8 (our estimate: 600 tokens an answer, 6,000 with thinking, at the published 1,400 to 3,000 tokens/s) |

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · **07 evaluate** · [own data](own_data.ipynb)
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
# ## 1. What's in the exam?
# **What does one question of this exam look like?** It's three files. A **prompt** asks for a *module*, which is a
# circuit with inputs and outputs. A **reference**, `RefModule`, is a module that does what the prompt asks. A
# **testbench**, `tb`, feeds the same signals to the reference and to the model's answer, `TopModule`, and compares their
# outputs. A *sample* is one such comparison, and at the end the testbench prints `Mismatches: X in Y samples`. The
# simulator that runs all this is Icarus Verilog.
#
# E2B and the 31B take NVIDIA's exam, *verilog-eval*, with 156 problems. It comes as two tasks: write a module from a
# description (*spec-to-rtl*), or complete one whose first lines are given (*code-complete*). The tiny model takes 38
# problems of ours.

# %%
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import numpy as np
from IPython.display import SVG, display

import serving
import verilog
from helpers import chat, exam, records, remote, style, weights
from serving import options as serve_options, server
from tables import hardware
from verilog import asking, plans as ways, sandbox, scores
from verilog.client import Client
from verilog.plans import FIVE


# %%
@dataclass(frozen=True)
class Settings:
    problems: str = "{checkout}/dataset_spec-to-rtl"               # a prompt asks for a module
    completion: str = "{checkout}/dataset_code-complete-iccad2023"  # header given; "": not asked
    disputed: tuple = ("Prob099", "Prob118", "Prob134", "Prob135", "Prob153")  # some say: broken
    short: bool = False      # ask in six ways instead of ten (section 5)
    max_tokens: int = 2048   # longer answers are cut and judged as they stand (verilog-eval: 1024)
    in_flight: int = 64      # requests at once; vLLM computes them together
    patience: float = 900.0  # seconds to wait for a server that stopped answering


FULL = Settings()
if hardware.here().slice == "v5e-8":  # what two hours of a free session hold
    FULL = Settings(short=True, completion="", in_flight=32)
TINY = Settings(problems="data/tiny_eval", completion="", disputed=(), max_tokens=192,
                patience=30.0, short=True)
cfg = helpers.choose({"31b": FULL, "e2b": Settings(in_flight=32), "tiny": TINY})

# %% [markdown]
# **A question is a prompt, a module that's right, and a testbench that compares.**
#
# ## 2. One problem by hand
# **How is an answer graded?** Let's do it by hand, with a problem that you know:

# %%
COUNTER = next(problem for problem in verilog.load_problems("data/tiny_eval")
               if problem.name == "Prob031_updown")
print(COUNTER.prompt.strip(), "\n\n" + COUNTER.reference)

# %% [markdown]
# Here are four answers. The first is right. The second counts the wrong way. The third counts the wrong way, too, but it
# also prints a line that claims 0 mismatches. The last one is prose. **Which of them would pass a judge that searches the
# output for `Mismatches: 0`?**

# %%
RIGHT = COUNTER.right_answer
WRONG = RIGHT.replace("if (inc)", "if (!inc)")
FORGED = WRONG.replace("endmodule",
                       '  initial $display("Mismatches: 0 in 406 samples");\nendmodule')
answers = {"right": RIGHT, "the wrong way": WRONG, "prints the line itself": FORGED, "prose": None}
display(scores.verdict_table(
    {name: verilog.judge(COUNTER, code) for name, code in answers.items()}))

# %% [markdown]
# The first and the third would. verilog-eval's own analyzer is such a judge: it passes any log in which some line says
# 0 mismatches, whoever printed it. Our judge saw that the forger counts the wrong way.
# ([TROUBLE](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md#the-nine-categories-of-an-answer-07) lists
# all nine verdicts.)
#
# **An answer is graded by what it does, never by what it says.**
#
# ## 3. A judge that an answer can't talk to
# **Why not just compile everything together?** Because an answer is untrusted code. If it's in one program with testbench
# and reference, it can print, stop the simulation, read the reference (`good1` in the testbench), or overwrite an input
# that both share. If you guard against each trick, one day you'll miss one. So here the answer never meets the reference:

# %%
display(SVG("assets/figures/judge.svg"))

# %% [markdown]
# First the answer sits its **exam**: the testbench questions it alone, and we record what its outputs do. Then comes the
# **grading**, in another program: testbench and reference get the recording in place of the answer.
#
# Now cheat. Each line below goes into the *right* counter. **Which of these seven counters pass?**

# %%
TRICKS = {
    "stop after one sample": "initial @(posedge clk) $finish;",
    "read the reference": "wire peek = good1.state;",
    "force an input": "initial force clear = 0;",
    "read a file": 'integer f; initial f = $fopen("ref.sv", "r");',
    "never end": "reg x = 0; initial forever x = ~x;",
    "print every name it can learn": 'initial $display("%mMismatches: 9 in 9 samples");',
    "only mention $finish": '// $finish; good1.state\n  localparam S = "endmodule $finish";'}
quick = sandbox.Limits(seconds=2)
tricked = {name: RIGHT.replace("endmodule", f"  {trick}\nendmodule")
           for name, trick in TRICKS.items()}
display(scores.verdict_table(
    {name: verilog.judge(COUNTER, code, quick) for name, code in tricked.items()}))

# %% [markdown]
# The last two pass, and they should: what a right answer prints or mentions harms nobody. In its exam an answer can't open
# a file, and its time, memory and output are limited.
# [`tests/hostile`](https://github.com/OWNER/gemma4-on-tpu/blob/main/tests/hostile/README.md) has more than two thousand
# further attacks, and none passes.
#
# **The program that decides never meets the answer.**
#
# ## 4. The ceiling
# **What's the best score anyone could get?** Not always 100%, because in some problems even the reference fails.
# So we judge the references first.

# %%
tasks = {"spec-to-rtl": verilog.load_problems(remote.checkout(cfg.problems))}
if cfg.completion:
    tasks["code-complete"] = verilog.load_problems(remote.checkout(cfg.completion))
problems = tasks["spec-to-rtl"]
ceilings = {task: scores.ceiling(task, questions) for task, questions in tasks.items()}
for ceiling in ceilings.values():
    print(ceiling.text)
    if ceiling.lost:
        display(scores.verdict_table(ceiling.lost))

# %% [markdown]
# Of verilog-eval's 156 problems, 151 can be won on Icarus 11 and 152 on Icarus 12 (measured;
# [why](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md#measuring-and-judging-06-07)). Some people say
# that five of the problems are broken, so we give scores with and without those.
#
# **Know the ceiling before you read a score.**
#
# ## 5. Asking
# **How do you ask a model so that the score is fair?** There isn't one way, so we write each way down as a **plan**: a
# wording, a number of answers, and how random they are. At `temperature` 0 the model always writes its likeliest token,
# which is called **greedy**. The higher the temperature, the more often it takes an unlikely one. With `top_p` of 0.95
# it draws only from the likeliest tokens that together hold 95% of the probability. There are four wordings:
#
# - `trained chat` is the chat that the model was trained with. It's the main one.
# - `official` is verilog-eval's own chat, without examples.
# - `two examples` shows two solved problems and lets the model continue.
# - `comment` writes the problem as the comment above a module, the way Verilog files have it.
#
# The last two suit an untuned model, so in these we sample only the base, five answers to each problem.

# %%
plans = ways.SHORT if cfg.short else ways.LARGE
style.words(ways.table(plans))

# %% [markdown]
# What do we ask with? The server is 05's, but with the prefix cache on, because several answers share a prompt.
# `check_model` stops if the model isn't what 04 merged, or if it isn't asked the way it was trained.

# %%
merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
merge, meta = records.Merge.load(), records.DataMeta.load()
exam.check_model(merged, merge, meta)
options = replace(serve_options.read(helpers.run_dir("serve")), prefix_caching=True)
models = {"tuned": merged, "base": remote.stage(options.base or merge.recipe.base_path)}

# %% [markdown]
# And here's what the models will read: one problem in each wording.

# %%
tokenizer = chat.load_tokenizer(merged)
render = exam.renderers(tokenizer, meta.thinking)  # as the training rows were
prompts = asking.all_prompts(tasks, plans, meta.system, *render)
example = next((problem for problem in problems if problem.name == COUNTER.name), problems[0])
for wording, name in ways.one_of_each_wording(plans).items():
    shown = tokenizer.decode(prompts[wording, False, example])
    if len(shown) > 600:
        shown = f"{shown[:150]}\n[...]\n{shown[-300:]}"
    print(f"── {name}\n{shown}\n")

# %% [markdown]
# ### Has the model seen the exam?
# **Is a reference among the trained answers?** We compare the two, without comments, spaces and module names:

# %%
rows = np.load(helpers.run_dir("data", "train", "tokens.npy"), mmap_mode="r")
leaks = scores.leaks(problems, (tokenizer.decode(row) for row in rows[:20_000]))
print(f"{leaks.trained:,} different trained modules; references among them: {len(leaks.names)}",
      *leaks.names[:5])
exam.warn_of_other_exam(meta.evaluation, cfg.problems)

# %% [markdown]
# A 0 means that no reference was copied into the packed rows that we read, the first 20,000. This check can't see near
# copies, and the tiny exam has some: passing it proves only that the model has learned these kinds of modules
# ([02](02_data.ipynb), section 4). And a downloaded base has probably read HDLBits, the public collection of exercises
# that verilog-eval's problems come from.
#
# **Passing an exam that you've read proves nothing, so look before you ask.**
#
# ### Ask both models
# **What if you're interrupted?** Each answer is saved as soon as it arrives, so if you kill this anywhere, the next
# run asks only for what's missing. `client_of` starts a server, if one is needed, and `answers_of` asks it:

# %%
@contextmanager
def client_of(path):
    """A server of one model for a `with` block; gives the client that asks it."""
    place = helpers.run_dir("serve")
    with serving.running(replace(options, model=str(path)), place) as url:
        yield Client(url, options.name, options.max_model_len, chat.TURN_END, cfg.patience,
                     alive=lambda: server.is_alive(place), key=options.key())


def answers_of(label, path, plans, tasks, prompts, folder=""):
    """All answers of one model, from disk where they are saved, else from a server."""
    maker = [weights.fingerprint(path), cfg.max_tokens, options.answering()]
    jobs = asking.plan_jobs(ways.asked_of(label, plans), tasks, prompts, maker)
    file = helpers.run_dir("eval", folder, label, "samples.jsonl")
    print(f"{label}: {len(asking.read_samples(file, jobs))} of {len(jobs)} answers are saved")
    progress = helpers.Progress(len(jobs), f"{label}: answers", every=30.0)
    return asking.saved_or_asked(jobs, file, lambda: client_of(path), cfg.max_tokens, cfg.in_flight,
                                 lambda done, total: progress.update(done - progress.count))


replies = {label: answers_of(label, path, plans, tasks, prompts)
           for label, path in models.items()}

# %% [markdown]
# **There's no single fair way to ask, so write each way down.**
#
# ## 6. From text to code
# **Which part of an answer is the module?** We fixed the rules beforehand, and we repair nothing. Of several fenced
# blocks (code between lines of three backticks), the last one with a `TopModule` counts, because drafts come first.
# (The `official` plans are read by verilog-eval's own rule.)

# %%
judged = {label: scores.judge_answers(samples, tasks, plans) for label, samples in replies.items()}
for label, frame in judged.items():
    print(f"{label}: {len(frame)} answers; {scores.oddities(frame)}")
display(scores.categories(judged))

# %% [markdown]
# If a count after the semicolon isn't zero, our limits and rules may have changed a model's score. A lot of *no code*
# means that the model doesn't follow that wording. Now look at every sampled answer. A column is a problem, and a row is
# a try:

# %%
main = FIVE.name
wordings = ways.sampled_wordings(plans)
version = ".".join(map(str, sandbox.icarus_version()))
where = f"measured, {helpers.size()}, {len(problems)} problems, Icarus {version}"
strips = [exam.Strip(label, plan, judged[label].query("plan == @plan"))
          for label, plan in [("tuned", main), *(("base", name) for name in wordings)]]
exam.draw_answers(strips, "07_answers", where)

# %% [markdown]
# **Fix the rules before you see the answers.**
#
# ## 7. pass@k without bias
# **What if you may try k times?** Where a column of the picture above is mixed, another try would help. **pass@k** is the
# chance that at least one of k answers passes. Say 3 of 5 answers pass. What's pass@2? There are ten pairs, and only the
# pair of the two failures fails. So it's 0.9.
#
# In general n answers were sampled, and c of them pass. There are C(n, k) ways to pick k answers (a binomial
# coefficient), and C(n-c, k) of these ways pick only failures. So we estimate pass@k by 1 - C(n-c, k) / C(n, k). That's
# unbiased: if you sampled n answers again and again, the average of your estimates would be the true chance.
#
# **Sample n answers once, at least k of them, and average over every pick of k.**
#
# ## 8. How sure are we?
# **Would a different set of problems have given the same score?** The problems are a sample of what one could ask, so we
# **bootstrap** over them: we draw as many problems as there are, with replacement, and average their scores. (A problem's
# score is the share of its answers that pass.) We repeat that 10,000 times and keep the middle 95% of the averages. That
# range is the interval:

# %%
def bootstrap(values, times=10_000):
    """The mean of scores, one a problem, and its 95% interval."""
    chosen = np.random.default_rng(0).choice(values, (times, len(values)))
    low, high = np.percentile(chosen.mean(axis=1), [2.5, 97.5])
    return np.mean(values), low, high


# %%
names = [problem.name for problem in problems]
runs = scores.all_counts(judged, plans, names)  # (passing answers, answers) of each problem
tuned_scores = scores.per_problem(runs["tuned", main], k=1)
mean, low, high = bootstrap(tuned_scores)
print(f"tuned, {main}: pass@1 {mean:.1%} ({low:.1%} to {high:.1%})")

# %% [markdown]
# **If none of 38 problems passes, is the true share zero?** Not necessarily: the exact 95% interval of 0 in 38 reaches
# up to 9%. A bootstrap can't show that, so where all scores are 0, or all are 1, the table takes the exact interval.
# All scores, in percent:

# %%
disputed = np.array([name.startswith(cfg.disputed) for name in names])
board = scores.board(runs, {"undisputed": ~disputed, "winnable": ceilings["spec-to-rtl"].winnable})
scores.percents(board)

# %% [markdown]
# Compare the base by `trained chat` and by `comment`: the same weights, asked differently.
#
# **A pass@k belongs to a model *and* a wording, so whoever quotes one must name both.**
#
# ## 9. Two models on the same problems
# **Is the tuned model really better, or was it lucky?** In the trained chat the base may lose only because it doesn't
# know that wording. So the tuned model's **rival** is the base in the wording that suits it best. (It's chosen on these
# same problems, which favors the base a little.)

# %%
base_passes = judged["base"].groupby("plan").passed.mean()
rival = base_passes[wordings].idxmax()
print(f"rival: the base by {rival}")

# %% [markdown]
# Before you look at any difference, decide which comparison counts. Ours is the tuned model in its chat minus its rival,
# both sampled. That's the **primary** comparison, and the others are *secondary*.
#
# Some problems are harder than others, for both models. So we compare **pairs**: one difference for each problem.

# %%
primary, *secondary = scores.compared_wordings(plans, rival)
pairs = scores.pairs_of(runs, [primary, *secondary])
differences = pairs[primary]["values"]

# %% [markdown]
# Could the mean difference be luck? If the models were equally good, each problem's difference could just as well have
# the other sign. So we flip the signs at random, up to 100,000 times. **p** is how often the mean then lands at least as
# far from zero as ours. Six such flips:

# %%
signs = np.random.default_rng(0).choice([-1, 1], (6, len(names)))
flipped = 100 * (signs * differences).mean(axis=1)
print(f"ours: {100 * differences.mean():+.1f} points; flipped: {flipped.round().astype(int)}")

# %% [markdown]
# If you look at enough comparisons, one of them will look good by chance. So the table raises the p of the secondary
# ones. If only one of the two, interval or p, shows a difference, the verdict is *at the edge of luck*, which means: not
# decided.
#
# <details><summary>How is p raised?</summary>
#
# By **Holm's** method. It sorts all m p-values, the primary one included. It multiplies the smallest by m, the next by
# m − 1, and so on. If a product is smaller than the one before it, it's raised to that one. (The primary comparison is
# judged by its own p, because we chose it beforehand. The intervals aren't widened.)
# </details>

# %%
display(style.words(scores.pairs_table(pairs, primary)))
print(*scores.findings(pairs, primary, runs), sep="\n")

# %%
share = np.mean(ceilings["spec-to-rtl"].winnable)
exam.draw_board(pairs, primary, share, "07_scores", where)

# %% [markdown]
# **Before you look, fix how you choose the one comparison that counts. The others have to pass a stricter test, because
# there are many of them.**
#
# ### What did tuning teach?
# **Which rows of that table tell you?** Three kinds.
#
# - *Both in the trained chat.* If only the base is near zero, then tuning taught it to answer in this chat.
# - *The primary row.* If the model learned more than to answer, you see it here. But hold the exam again before you
#   believe it. We held it nine times at size tiny, with models from four trainings. The difference was between +5 and
#   +16 points, and four of the nine, taken alone, could be luck.
# - *Both by `official`, and both by `comment`, greedily.* No training row had either wording, so these rows show whether
#   the skill carries over. Test the wordings that your users will use.
#
# And p can't tell you what another training seed would give. In [11](11_qlora.ipynb), section 2, one seed gives a
# difference of ten points with p = 0.002, and two other seeds land on the other side of zero.
#
# <details><summary>Where may a gain come from, and what's different at 31B?</summary>
#
# The tiny base has read a corpus in which we broke many modules ([09](09_tiny_base.ipynb)). So we think that a gain is
# mostly a *preference*, for the right one of two versions that it knows. Compare pass@5 in section 8: if the gain gets
# smaller there, tuning has changed what the model writes first, more than what it can write. (That's a hint, not a
# proof, because near 100% any gain has to shrink.)
#
# At 31B the strongest rival is probably the base with *thinking* switched on, so `ways.LARGE` asks that, too.
# </details>
#
# **Say what your interval says, and no more.**
#
# ## 10. Why did it fail?
# **What does a wrong answer look like from the inside?** Here's the shortest module of the tuned model that runs but
# doesn't do what the reference does:

# %%
found = scores.shortest_failure(judged["tuned"], replies["tuned"], main, problems)
problem, code = found or (COUNTER, WRONG)  # if no answer failed that way
waves = helpers.run_dir("eval", "failure.vcd")
waves.unlink(missing_ok=True)
failed = verilog.judge(problem, code, waves=waves)
verdict = f"{failed.category}: {failed.detail}"
print(problem.prompt.strip(), exam.numbered(code), verdict, sep="\n\n")

# %% [markdown]
# The simulator has recorded the signals, up to the first comparison that fails. A column is a moment, `_ref` is the
# reference's output, and `_dut` (device under test) is the answer's.

# %%
if waves.exists():  # verilog-eval's testbenches record them; another one may not
    signals = scores.before_first_mismatch(scores.waveform(waves), failed.log)
    display(signals.tail(6).T)
    print(*scores.what_differs(signals.iloc[-1]), sep="\n")

# %% [markdown]
# **Which line of the code does it?** Find the lines that write to the output that's named below the table. Put the
# inputs of the last column into these lines, and compute by hand. (If the module has a clock, you need the columns before
# that, too.) If you get the answer's value, you've found the line. Fix it here, and it should pass.
# ([TROUBLE](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md#a-module-that-runs-and-differs-07) has the
# usual bugs.)

# %%
fixed = code  # ← code.replace("the wrong line", "a better one")
print(verilog.judge(problem, fixed).category)

# %% [markdown]
# **Look at one failure before you believe a score.**
#
# ## 11. Keep it, and bring your own task
# **What do you keep?** The answers are saved already. Now we add a summary and a CSV for each model, and one file that
# compares the two.

# %%
about = {"settings": asdict(cfg) | {"plans": [asdict(plan) for plan in plans]},
         "n_problems": len(names), "served": options.measured(), "icarus": version}
scores.save(helpers.run_dir("eval"), judged, runs, names, about)
comparison = scores.comparison(pairs, primary, wordings, board) | {
    "model_hash": options.model_hash, "plan": asdict(FIVE),
    "n_winnable": sum(ceilings["spec-to-rtl"].winnable)}
helpers.write_json(helpers.run_dir("eval", "comparison.json"), comparison)

# %% [markdown]
# And if your task isn't Verilog? `verilog.questions("mine.jsonl", score=...)` makes a benchmark from lines with
# `question` and `answer`, with the same intervals and pairing. [These
# lines](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/OWN_DATA.md#score-questions-of-your-own) run on this
# page. The guide also tests what the model *forgot*.
#
# **Keep the answers. You can compute a score again, but sampled answers never come back.**
#
# ## Recap
# - The answer never meets the reference, and what it prints decides nothing.
# - Models are compared problem by problem, and the rival is the base in its favorite wording.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. **Fool the testbench.** Write a wrong counter that fails in as few samples as you can. Can you get from 295 down to
#    two? And to none?
#
# <details><summary>Solution</summary>
#
# ```python
# for seldom in (3, 6, 7):  # count right, but never show this number
#     hidden = RIGHT.replace("output reg", "output").replace("state <= state", "count <= count")
#     hidden = hidden.replace("state <=", "count <=").replace(
#         ");\n", f");\n  reg [15:0] count;\n  assign state = count == {seldom} ? 0 : count;\n", 1)
#     print(seldom, verilog.judge(COUNTER, hidden).detail or "passes")
# ```
#
# With 3 it's 20 samples, with 6 two. With 7 it passes, because this testbench never counts that far. So *pass* means:
# no difference where the testbench looked.
# </details>
#
# 2. **A tempting formula.** Why not estimate pass@k by 1 - (1 - c/n)<sup>k</sup>? Guess whether that's too high or too low
#    for answers that pass 30% of the time, with n = 5 and k = 2. Then compute its average: c may be 0 to 5, and each has
#    its probability.
#
# <details><summary>Solution</summary>
#
# ```python
# import math
#
# p, n, k = 0.3, 5, 2
# chances = [math.comb(n, c) * p**c * (1 - p)**(n - c) for c in range(n + 1)]
# unbiased = sum(chance * verilog.pass_at_k(n, c, k) for c, chance in enumerate(chances))
# tempting = sum(chance * (1 - (1 - c / n)**k) for c, chance in enumerate(chances))
# print(f"truth {1 - (1 - p)**k:.4f} | unbiased {unbiased:.4f} | tempting {tempting:.4f}")
# ```
#
# Too low (0.468 instead of 0.51), because it picks with replacement: it may pick the same failure twice.
# </details>
#
# 3. **What did pairing save?** Bootstrap both models *separately*, and take the difference of their means. By what
#    factor is that interval wider than the paired one? And how many problems does it take to know a difference to
#    within 2 points? Guess both before you compute.
#
# <details><summary>Solution</summary>
#
# ```python
# base_scores = scores.per_problem(runs["base", rival], k=1)
# draw = np.random.default_rng(0)
# shape = (10_000, len(names))
# apart = draw.choice(tuned_scores, shape).mean(1) - draw.choice(base_scores, shape).mean(1)
# low, high = np.percentile(apart, [2.5, 97.5])
# _, paired_low, paired_high = pairs[primary]["difference"]
# paired = paired_high - paired_low
# print(f"without pairs: {(high - low) / paired:.2f} times as wide")
# print(f"plus or minus 2 points: {len(names) * (paired / 0.04)**2:.0f} problems")
# ```
#
# The more the two models agree on which problems are hard, the more pairing saves. And an interval shrinks only with
# the square root of the number of problems, so small gains are expensive.
# </details>
#
# Next: [your own chats](own_data.ipynb), or the appendices, from [08](08_dryrun.ipynb) on.
