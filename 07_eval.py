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
# Is the tuned model better than its base, and how sure can you be? You'll judge one answer by hand, try to
# cheat the judge, ask both models for hundreds of modules, and compare them problem by problem.
#
# | | |
# |---|---|
# | **Needs** | a serving machine as in notebook 05, and Icarus Verilog (version 12 if there is a choice) |
# | **Reads** | `merged/` and `merge.json` from 04, `serve/options.json` from 05, `data/` from 02, the base model, a verilog-eval folder |
# | **Writes** | `eval/{base,tuned}/samples.jsonl`, `per_problem.csv` and `summary.json`, `eval/comparison.json`, figures |
# | **Time and cost** | tiny: four to five minutes on two CPU cores without AVX-512 (measured). 31b: 7,488 answers of the base, 5,928 of the tuned model and 780 of the base with thinking, 25 to 55 USD on a v6e-8 (our estimate: 600 tokens an answer, 6,000 with thinking, at the published 1,400 to 3,000 tokens/s) |
#
# Every answer is saved before it's judged, so a second run asks for nothing and needs no server.

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
# **What does one question of this exam look like?** It's three files. A **prompt** asks for a *module*, which
# is a circuit with inputs and outputs. A **reference**, `RefModule`, is such a module, and it's right. A **testbench**,
# `tb`, plays the outside world: it feeds the same signals to the reference and to the model's answer, `TopModule`. It
# compares their outputs whenever the clock changes, and prints `Mismatches: X in Y samples`. Icarus Verilog compiles
# the files (`iverilog`) and runs the simulation (`vvp`).
#
# E2B and the 31B take NVIDIA's exam, *verilog-eval*, with 156 problems. The tiny model takes 38 problems of ours.
#
# **A question is a prompt, a module that's right, and a testbench that compares.**

# %%
import math
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
    max_tokens: int = 2048   # longer answers are cut, and counted as what they are (theirs: 1,024)
    in_flight: int = 64      # requests at once; vLLM computes them together
    patience: float = 900.0  # seconds to wait for a server that stopped answering


FULL = Settings()
if hardware.here().slice == "v5e-8":  # what two hours of a free session hold
    FULL = Settings(short=True, completion="", in_flight=32)
TINY = Settings(problems="data/tiny_eval", completion="", disputed=(), max_tokens=192,
                patience=30.0, short=True)
cfg = helpers.choose({"31b": FULL, "e2b": Settings(in_flight=32), "tiny": TINY})

# %% [markdown]
# ## 2. One problem by hand
# **How is an answer graded?** Let's do it by hand, with a problem that you know. Here are its prompt and its
# reference:

# %%
COUNTER = next(problem for problem in verilog.load_problems("data/tiny_eval")
               if problem.name == "Prob031_updown")
print(COUNTER.prompt.strip(), "\n\n" + COUNTER.reference)

# %% [markdown]
# Here are four answers to it. The first is right. The second counts the wrong way. The third also counts the
# wrong way, but it prints the winning line itself. The last one is prose.
#
# <details><summary><b>Which of them would pass a judge that searches the output for
# <code>Mismatches: 0</code>?</b></summary>
#
# The first and the third. verilog-eval's own analyzer is such a judge: it passes any log in which some
# line says 0 mismatches, whoever printed that line.
# </details>

# %%
RIGHT = verilog.as_answer(COUNTER)
WRONG = RIGHT.replace("if (inc)", "if (!inc)")
FORGED = WRONG.replace("endmodule",
                       '  initial $display("Mismatches: 0 in 406 samples");\nendmodule')
answers = {"right": RIGHT, "the wrong way": WRONG, "prints the line itself": FORGED, "prose": None}
display(scores.verdict_table(
    {name: verilog.judge(COUNTER, code) for name, code in answers.items()}))

# %% [markdown]
# Only behavior counted: the forger got nothing for its line. Every answer ends up in one **category**.
#
# <details><summary>The nine categories</summary>
#
# | category | what happened |
# |---|---|
# | pass | no sample differs |
# | mismatch | it runs, and it differs |
# | timeout | 30 seconds of CPU, or the testbench's own `TIMEOUT` |
# | runtime | the simulation broke down |
# | compile, syntax | Icarus doesn't accept it |
# | refused | it opens files, or ends the simulation |
# | no code | there's no module |
# | broken problem | the problem's own files don't compile: nobody's fault |
#
# What counts as wrong is what verilog-eval counts as wrong: same command line, same fatal messages. Only
# *where* we read the verdict differs.
#
# </details>
#
# **An answer is graded by what it does, never by what it says.**
#
# ## 3. A judge that an answer can't talk to
# **Why not just compile everything together?** Because an answer is untrusted code. In one program with
# testbench and reference it can print, stop the simulation, read the reference by its name (`good1.state`), or
# overwrite an input signal that both share. You could guard against each trick, but one day you'd miss one. So
# here the answer never meets the reference, and the program that decides never meets the answer:

# %%
display(SVG("assets/figures/judge.svg"))

# %% [markdown]
# First comes the **exam**. The testbench asks its questions of the answer alone, and we record what the answer's
# outputs do. There's no reference in this program, and the testbench's names are drawn anew each time. Then comes
# the **grading**: testbench and reference run together, and this second program gets the recording instead of the
# answer. Only it can pass the answer, and it doesn't contain a word of what the model wrote.
#
# <details><summary><b>What can an answer still do in its exam?</b></summary>
#
# It can read the disk, end the simulation early, or use up the machine. So it may open no file, the exam must last as
# long as the testbench does, and both programs have limits on time, memory and output.
# </details>
#
# Try it yourself. This is the *right* counter, with one more line inside.

# %%
TRICKS = {
    "stop after one sample": "initial @(posedge clk) $finish;",
    "the same, by a macro (a name for text)": "`define END $finish\ninitial @(posedge clk) `END;",
    "read the reference": "wire peek = good1.state;",
    "force the verdict": "initial force tb.tb_mismatch = 0;",
    "force an input": "initial force clear = 0;",
    "read a file": 'integer f; initial f = $fopen("ref.sv", "r");',
    "never end": "reg x = 0; initial forever x = ~x;",
    "print every name it can learn": 'initial $display("%mMismatches: 9 in 9 samples");',
    "only mention $finish": '// $finish; good1.state\n  localparam S = "endmodule $finish";'}

# %%
quick = sandbox.Limits(seconds=2)
verdicts = {}
for name, trick in TRICKS.items():
    tricked = RIGHT.replace("endmodule", f"  {trick}\nendmodule")
    verdicts[name] = verilog.judge(COUNTER, tricked, quick)
display(scores.verdict_table(verdicts))

# %% [markdown]
# The last two pass, and they should: what a right answer prints or mentions harms nobody. And honest answers are
# graded as before: the references of verilog-eval and of the tiny benchmark get the same verdicts and mismatches
# as in one program. A generator in
# [`tests/hostile`](https://github.com/OWNER/gemma4-on-tpu/blob/main/tests/hostile/README.md) writes over two
# thousand attacks, and none of them passes.
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
# In the tiny benchmark everything can be won. Of verilog-eval's 156 problems it's 151 on Icarus 11 and 152
# on Icarus 12. In its other task, code-complete, it's 152 and 153 (measured;
# [why](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md#measuring-and-judging-06-07)). Some people
# dispute five problems, so we give scores with and without those.
#
# **Know the ceiling before you read a score.**
#
# ## 5. Asking
# **How do you ask a model so that the score is fair?** There isn't one way, so we write each way down as a
# **plan**: which wording, how many answers to a problem, and how random. `temperature` sets how random the
# choice of each token is. With `top_p` of 0.95, only the likeliest tokens can be chosen: just enough of them to hold
# 95% of the probability. **Greedy** means temperature 0: always the likeliest token.
#
# There are four wordings:
#
# - `trained chat` is the chat that the model was trained with. It's the main one.
# - `official` is verilog-eval's own chat (without the one to four examples that it can put first).
# - `two examples` shows two solved problems and lets the model continue.
# - `comment` writes the problem as the comment above a module, the way Verilog files have it.
#
# The last two suit a model that nobody has tuned. So only the base gets five tries in them.

# %%
plans = ways.SHORT if cfg.short else ways.LARGE
style.words(ways.table(plans))

# %% [markdown]
# Are we asking the right model? What's served has to be what 04 merged, and it has to be asked the way it was
# trained, so we compare what 02, 03 and 04 have written down. Of 05's server we change one setting: the prefix cache
# is on, because several answers share a prompt.

# %%
merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
merge, meta = records.Merge.load(), records.DataMeta.load()
exam.check_model(merged, merge, meta)
options = replace(serve_options.read(helpers.run_dir("serve")), prefix_caching=True)
models = {"tuned": merged, "base": remote.stage(options.base or merge.recipe.base_path)}

# %%
tokenizer = chat.load_tokenizer(merged)
render = exam.renderers(tokenizer, meta.thinking)  # as the training rows were
prompts = asking.all_prompts(tasks, plans, meta.system, *render)
example = next((problem for problem in problems if problem.name == COUNTER.name), problems[0])
for wording, name in ways.one_of_each_wording(plans).items():
    shown = tokenizer.decode(prompts[wording, False, example])
    print(f"── {name}\n{shown if len(shown) < 600 else '[...]' + shown[-300:]}\n")

# %% [markdown]
# That's one problem in each wording. Is it a fair question? It isn't if the answer stood in the training rows. So we
# compare the trained *answers* with the references, without comments, spaces and module names:

# %%
rows = np.load(helpers.run_dir("data", "train", "tokens.npy"), mmap_mode="r")
leaks = scores.leaks(problems, (tokenizer.decode(row) for row in rows[:20_000]))
print(f"{leaks.trained:,} different trained modules; references among them: {len(leaks.names)}",
      *leaks.names[:5])
exam.warn_of_other_exam(meta.evaluation, cfg.problems)

# %% [markdown]
# If it says 0, no reference was copied, but a near copy doesn't show here. By 02's measure (section 5 there) the counter
# above is close to a training row: little more than a width differs. So the tiny exam asks for new combinations of
# familiar parts, not for new designs. And nobody knows what a downloaded base has read: probably HDLBits, the site that
# verilog-eval's problems come from.
#
# Now we ask both models everything. Each answer becomes a line of `samples.jsonl` as soon as it arrives, with a hash of
# the model, the serving options, the plan and the prompt. If you kill this anywhere, the next run asks only for what's
# missing.

# %%
@contextmanager
def client_of(path):
    """A server of one model for a `with` block; gives the client that asks it."""
    place = helpers.run_dir("serve")
    with serving.running(replace(options, model=str(path)), place) as url:
        yield Client(url, options.name, options.max_model_len, chat.TURN_END, cfg.patience,
                     alive=lambda: server.is_alive(place), key=options.key())


# %%
def answers_of(label, path, plans, tasks, prompts, folder=""):
    """All answers of one model, from disk where they are saved, else from a server."""
    maker = [weights.fingerprint(path), cfg.max_tokens, options.answering()]
    jobs = asking.plan_jobs(ways.asked_of(label, plans), tasks, prompts, maker)
    file = helpers.run_dir("eval", folder, label, "samples.jsonl")
    progress = helpers.Progress(len(jobs), f"{label}: answers", every=30.0)
    return asking.saved_or_asked(jobs, file, lambda: client_of(path), cfg.max_tokens, cfg.in_flight,
                                 lambda done, total: progress.update(done - progress.count))


replies = {label: answers_of(label, path, plans, tasks, prompts)
           for label, path in models.items()}

# %% [markdown]
# **A score belongs to a model that's asked in one particular way, so write the way down.**
#
# ## 6. From text to code
# **Which part of an answer is the module?** We fixed one rule beforehand, and we don't repair anything. If there are
# several fenced blocks (code between lines of three backticks), the last one with a `TopModule` counts, because drafts
# come first. The `official` plans are read by verilog-eval's own rule instead.
#
# <details><summary><b>A model writes a wrong draft in one fence, then the right module in another. What
# does each rule give it?</b></summary>
#
# Our rule takes the last fence, so the answer passes. verilog-eval's rule takes the first, so it's a mismatch. (It
# asks for code between [BEGIN] and [DONE], so to it a fence between them is a syntax error.)
# </details>

# %%
judged = {label: scores.judge_answers(samples, tasks, plans) for label, samples in replies.items()}
for label, frame in judged.items():
    odd = [f"{count} {what}" for what, count in scores.oddities(frame).items()]
    print(f"{label}: {len(frame)} answers; {', '.join(odd)}")

# %% [markdown]
# Look at these counts first. If they aren't zero, our limits and rules may have cost the model points.
#
# What do we compare it with? The tuned model's **rival** is the base, asked in the wording that suits it best: the one
# with the highest pass@1 (the share of answers that pass). We choose it by its score on these same problems, and the
# best of several scores is partly luck, so this choice favors the base a little.

# %%
main = FIVE.name
wordings = ways.sampled_wordings(plans)
base_passes = judged["base"].groupby("plan").passed.mean()
rival = base_passes[wordings].idxmax()
print(base_passes[wordings].map("{:.1%}".format).to_string(), f"\nrival: the base by {rival}")

# %% [markdown]
# Here's every answer: the tuned model's, its rival's, and the base's in the trained chat.

# %%
version = ".".join(map(str, sandbox.icarus_version()))
where = f"measured, {helpers.size()}, {len(problems)} problems, Icarus {version}"
strips = [exam.Strip(label, plan, judged[label].query("plan == @plan"))
          for label, plan in dict.fromkeys([("tuned", main), ("base", rival), ("base", main)])]
exam.draw_answers(strips, "07_answers", where)
display(scores.categories(judged))

# %% [markdown]
# If a column is mixed, another try would help. And a lot of *no code* means that the model doesn't follow this wording.
#
# **Fix the rule before you see the answers.**
#
# ## 7. pass@k without bias
# **What if you may try k times?** **pass@k** is the chance that at least one of k answers passes. Say we
# sampled n answers and c of them pass. There are C(n, k) ways to pick k of the n, and C(n-c, k) of them pick
# failures only. So pass@k is 1 - C(n-c, k) / C(n, k), and that's unbiased: on average it's the truth.
#
# <details><summary><b>Is the tempting 1 - (1 - c/n)<sup>k</sup> too high or too low?</b></summary>
#
# Too low on average, for k > 1. It picks with replacement, so it may pick the same failure twice.
# </details>
#
# Here's the function, and a test with answers that pass 30% of the time:

# %%
helpers.show_source(verilog.pass_at_k)
p, n, k = 0.3, 5, 2
chances = [math.comb(n, c) * p**c * (1 - p)**(n - c) for c in range(n + 1)]
unbiased = sum(chance * verilog.pass_at_k(n, c, k) for c, chance in enumerate(chances))
tempting = sum(chance * (1 - (1 - c / n)**k) for c, chance in enumerate(chances))
print(f"truth {1 - (1 - p)**k:.4f} | unbiased {unbiased:.4f} | tempting {tempting:.4f}")

# %% [markdown]
# **Try one by hand: 3 of 5 answers pass. What's pass@2?** List the pairs.
#
# <details><summary>Answer</summary>
#
# There are ten pairs, and only the pair of the two failures fails. So it's 0.9, and `verilog.pass_at_k(5, 3, 2)`
# agrees.
# </details>
#
# **Count the picks that fail; don't multiply chances.**
#
# ## 8. How sure are we?
# **Would another 38 problems have given the same score?** The problems are a sample of what one could ask,
# so we **bootstrap** over them: we draw as many problems as there are, with replacement, and average their scores. We
# repeat that 10,000 times and keep the middle 95% of the averages. That range is the interval:

# %%
def bootstrap(values, times=10_000):
    """The mean of scores, one a problem, and its 95% interval."""
    chosen = np.random.default_rng(0).choice(values, (times, len(values)))
    low, high = np.percentile(chosen.mean(axis=1), [2.5, 97.5])
    return np.mean(values), low, high


names = [problem.name for problem in problems]
runs = scores.all_counts(judged, plans, names)  # (passing answers, answers) of each problem
tuned_scores = scores.per_problem(runs["tuned", main], k=1)
mean, low, high = bootstrap(tuned_scores)
print(f"tuned, {main}: pass@1 {mean:.1%} ({low:.1%} to {high:.1%})")

# %% [markdown]
# <details><summary><b>Not one of 38 problems passes. Is the true share zero?</b></summary>
#
# Not necessarily: with 0 of 38, the exact 95% interval reaches up to 9%. A bootstrap can't show that, because all its
# samples are zero, too. So if all scores are 0, or all are 1, the table takes the exact interval.
# </details>
#
# And here are all the scores, in percent with their intervals:

# %%
disputed = np.array([name.startswith(cfg.disputed) for name in names])
board = scores.board(runs, {"undisputed": ~disputed, "winnable": ceilings["spec-to-rtl"].winnable})
scores.percents(board)

# %% [markdown]
# Compare the base in the row `trained chat` with the base in the row `comment`: the same weights, asked
# differently. **A pass@k belongs to a model *and* a wording, so whoever quotes one must name both.**
#
# ## 9. Two models on the same problems
# **Is the tuned model really better, or was it lucky?** First say which comparison counts, before you look. Ours is the
# tuned model in its chat minus its rival, both sampled: that's the **primary** one. All others are *secondary*.
#
# <details><summary><b>Why not the base in the trained chat, too?</b></summary>
#
# There it may lose only because it doesn't know that wording. To see what else the tuned model has learned, compare it
# with the base at its best.
# </details>

# %%
primary = scores.Wordings(base=rival, tuned=main)
secondary = [scores.Wordings(base=name, tuned=main) for name in wordings if name != rival]
secondary += [scores.Wordings(base=name, tuned=name) for name in ways.greedy_of_both(plans)]
pairs = scores.pairs_of(runs, [primary, *secondary])

# %% [markdown]
# Both models fail on the hard problems. So we compare **pairs**: one difference for each problem, and then it doesn't
# matter much how hard the problem is. If the models were equally good, you could swap their names on any problem, and a
# plus would be as likely as a minus. So we flip the signs at random, up to 100,000 times. **p** is how often the mean
# then lands at least as far from zero as ours. Six such flips:

# %%
differences = pairs[primary]["values"]
signs = np.random.default_rng(0).choice([-1, 1], (6, len(names)))
flipped = 100 * (signs * differences).mean(axis=1)
print(f"ours: {100 * differences.mean():+.1f} points; flipped: {flipped.round().astype(int)}")

# %% [markdown]
# Whoever looks at several comparisons will find one that looks good by chance. So the secondary ones are judged by
# **Holm's** p: of all m p-values in the table the smallest is multiplied by m, the next one by m − 1, and so on. (No p
# by Holm may be smaller than the one before it, so equal ones stay equal. And m counts the primary one, too, which errs
# on the careful side.)

# %%
display(style.words(scores.pairs_table(pairs, primary)))
print(*scores.findings(pairs, primary, runs), sep="\n")

# %% [markdown]
# The interval and p can disagree near the edge: with 38 problems the bootstrap's interval is a little too narrow, and
# flipped signs are a little too careful. And Holm's p pays for being one of many, which the interval doesn't. If
# interval and p disagree, the verdict is *at the edge of luck*, which means: not decided.

# %%
share = np.mean(ceilings["spec-to-rtl"].winnable)
exam.draw_board(pairs, primary, share, "07_scores", where)

# %% [markdown]
# **What did tuning teach?** Read three rows.
#
# - *Both in the trained chat.* If the base is near zero there and the tuned model isn't, it learned to answer in it.
# - *The primary row.* If it learned more than to answer, you see it here. The tiny base has read a corpus in which we
#   broke 40% of the modules ([09](09_tiny_base.ipynb)), and it writes what it has read. So if there's a gain, we think
#   it's mostly a *preference*, for the right one of two versions that it knows. Look at pass@5 in section 8, too. The
#   base can be ahead there, as it is by `comment` in the stored run. Then tuning has changed what the model writes
#   first, more than what it can write. (That's a hint and no proof: near 100% any gain has to shrink.)
# - *Both by `official`, and both by `comment`, greedily.* No training row had either wording. In the stored run the
#   tuned model passes nothing in the first, and more than in its own chat in the second. So a new wording can cost
#   everything or nothing. Test the ones that your users will use.
#
# And p knows nothing of another training seed. [11](11_qlora.ipynb), section 2, shows a difference of ten
# points with p = 0.002 that disappeared with two more seeds. At 31B the strongest rival is probably the base with
# *thinking* switched on, so the long list of plans asks it, too;
# [`neighbors.csv`](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/published/neighbors.csv) has what others have
# published nearby.
#
# **Say what your interval says, and no more.**
#
# ## 10. Why did it fail?
# **What does a wrong answer look like from the inside?** A score says how often, and a failure says why. We take the
# shortest module of the tuned model that runs and differs. The simulator has recorded its signals (as a *VCD*
# file), and the table shows them up to the first comparison that fails. A column is a moment, `_ref` is the
# reference's output, and `_dut` is the answer's ("device under test").

# %%
found = scores.shortest_failure(judged["tuned"], replies["tuned"], main, problems)
problem, code = found or (COUNTER, WRONG)  # if no answer failed that way
waves = helpers.run_dir("eval", "failure.vcd")
waves.unlink(missing_ok=True)
failed = verilog.judge(problem, code, waves=waves)
verdict = f"{failed.category}: {failed.detail}"
print(problem.prompt.strip(), exam.numbered(code), verdict, sep="\n\n")

# %%
if waves.exists():  # verilog-eval's testbenches record them; another one may not
    signals = scores.before_first_mismatch(scores.waveform(waves), failed.log)
    display(signals.tail(6).T)
    print(*scores.what_differs(signals.iloc[-1]), sep="\n")

# %% [markdown]
# **Which line of the code does it?** Take the output that's named below the table, and find the lines that write to
# it. Put the inputs of the last column (and, if there's a clock, of the ones before) into these lines, and compute
# by hand. (`&word` is the AND of all bits of `word`, `|word` their OR.) If you get the answer's value, you've found the
# line. Fix it with `code.replace`, and `verilog.judge(problem, fixed)` should pass.
# ([TROUBLE](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md#a-module-that-runs-and-differs-07) has the
# usual patterns. GTKWave and Surfer open `eval/failure.vcd`.)
#
# **Look at one failure before you believe a score.**
#
# ## 11. And if your task isn't Verilog?
# **What has to change for another task?** Little. `verilog.questions("mine.jsonl", score=...)` makes a benchmark
# from lines with `question` and `answer`. You write the score, a function, and you get the same intervals and the same
# pairing.
# [The ten lines](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/OWN_DATA.md#score-questions-of-your-own)
# run on this page, and the same guide shows how to test what the model *forgot*.
#
# **Try your score on a bad answer first: a score that nobody fails compares nothing.**
#
# ## 12. Save what was measured
# **What do you keep?** A summary and a CSV in verilog-eval's own form for each model, and one file that
# compares the two.

# %%
about = {"settings": asdict(cfg) | {"plans": [asdict(plan) for plan in plans]},
         "n_problems": len(names), "served": options.measured(), "icarus": version}
comparison = scores.comparison(pairs, primary, wordings) | {
    "model_hash": options.model_hash, "plan": asdict(FIVE),
    "n_winnable": sum(ceilings["spec-to-rtl"].winnable)}
for label, frame in judged.items():
    scores.per_problem_csv(frame, helpers.run_dir("eval", label, "per_problem.csv"))
    kept = scores.summary(frame, scores.of_model(runs, label), names)
    helpers.write_json(helpers.run_dir("eval", label, "summary.json"), about | kept)
    at_k = board.loc[main].xs(label, level="model")["all"].to_dict()
    comparison[label] = at_k | {"n_problems": len(names)}
helpers.write_json(helpers.run_dir("eval", "comparison.json"), comparison)

# %% [markdown]
# **Keep the answers. You can compute a score again, but sampled answers never come back.**
#
# ## Recap
# - The answer never meets the reference, and what it prints decides nothing.
# - The ceiling comes first, and an answer without code is a failed answer.
# - Models are compared problem by problem, and the rival is the base in its favorite wording.
# - One comparison is primary, and it's named before the results. All others pay for being many.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. **What did pairing save?** Bootstrap both models *separately*, and take the difference of their means. By what
#    factor is that interval wider than the paired one? How many problems would you need without pairs, for each one
#    that you need with them?
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
# wider = (high - low) / (paired_high - paired_low)
# print(f"{wider:.2f} times as wide, so {wider**2:.2f} times as many problems")
# ```
#
# An interval shrinks with the square root of the number of problems, so you need the square of the factor. The more
# the two models agree on which problems are hard, the more pairing saves.
# </details>
#
# 2. **Write a wrong counter that fails in as few samples as you can.** Can you get from 295 down to two? And to none?
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
# With 3 it's 20 samples, with 6 two. With 7 it passes, because the testbench never lets the counter get that far. So
# *pass* means: no difference where this testbench looked. (An answer that passes without counting at all is another
# matter. We know of none; if you find one, `tests/hostile/` wants it.)
# </details>
#
# 3. **How many problems would you need to detect a difference of 2 points**, if differences vary as much as here?
#
# <details><summary>Solution</summary>
#
# ```python
# _, low, high = pairs[primary]["difference"]
# print(round(len(names) * ((high - low) / 2 / 0.02) ** 2))
# ```
#
# With so many, the interval just reaches zero if the mean comes out at 2 points. It comes out lower half the time, so
# you'd find the difference only half the time. To find it four times out of five, the mean must lie 1.96 + 0.84 = 2.8
# standard errors from zero: 1.96 for the interval, and 0.84 because four of five means come out above 0.84 standard
# errors below the truth. That's (2.8 / 1.96)² = 2 times as many problems. verilog-eval has 156.
# </details>
#
# Next: the appendices. [08](08_dryrun.ipynb) compiles the 31B step for a TPU that you don't have,
# [09](09_tiny_base.ipynb) trains the tiny base, [10](10_published.ipynb) recomputes the published claims.
