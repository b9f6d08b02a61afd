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
# **What does one question of this exam look like?** Three files. A **prompt** says what's wanted. A
# reference module, `RefModule`, does it. A **testbench**, `tb`, plays the outside world: it feeds the same
# signals to the reference and to the answer, which is called `TopModule`, compares their outputs at both
# edges of the clock, and prints `Mismatches: X in Y samples`. Icarus Verilog compiles the files
# (`iverilog`) and runs the simulation (`vvp`).
#
# First the imports and the settings. The settings also list the *plans*, which are ways of asking a model these
# questions: six for the tiny model, ten for the 31B. You don't need them before section 5, which explains them.

# %%
import math
import re
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd
from IPython.display import SVG, display

import serving
import verilog
from helpers import chat, records, remote, style, weights
from serving import options as serve_options, server
from tables import hardware
from verilog import asking, extraction, sandbox, scores
from verilog.asking import Plan
from verilog.client import Client

pd.set_option("display.max_colwidth", 90)

# %%
FIVE, GREEDY = Plan("ours"), Plan("ours, greedy", n=1, temperature=0.0, top_p=1.0)
EXAMPLES = Plan("two examples", "examples", only="base")
COMMENT = Plan("comment", "comment", only="base")
COMMENT_GREEDY = replace(GREEDY, name="comment, greedy", prompt="comment")
OFFICIAL_GREEDY = replace(GREEDY, name="official, greedy", prompt="official")
SHORT = (FIVE, EXAMPLES, COMMENT, GREEDY, COMMENT_GREEDY, OFFICIAL_GREEDY)
LARGE = (FIVE, EXAMPLES, COMMENT, Plan("official", "official"), GREEDY, COMMENT_GREEDY,
         OFFICIAL_GREEDY, Plan("official, n=20", "official", 20, 0.85),
         Plan("code-complete", "official", task="code-complete"),
         Plan("thinking", "official", thinking=True, max_tokens=16384, only="base"))


@dataclass(frozen=True)
class Settings:
    problems: str = "{checkout}/dataset_spec-to-rtl"
    completion: str = "{checkout}/dataset_code-complete-iccad2023"  # "": no such plan
    disputed: tuple = ("Prob099", "Prob118", "Prob134", "Prob135", "Prob153")  # section 4
    plans: tuple = LARGE
    max_tokens: int = 2048   # longer answers are cut, and counted as what they are (theirs: 1,024)
    in_flight: int = 64      # requests at once; vLLM computes them together
    patience: float = 900.0  # seconds to wait for a server that stopped answering


FULL = Settings()
if hardware.here().slice == "v5e-8":  # what two hours of a free session hold
    FULL = Settings(plans=SHORT, completion="", in_flight=32)
TINY = Settings(problems="data/tiny_eval", completion="", disputed=(), max_tokens=192,
                patience=30.0, plans=SHORT)
cfg = helpers.choose({"31b": FULL, "e2b": Settings(in_flight=32), "tiny": TINY})

# %% [markdown]
# **A question is a prompt, a module that does it, and a testbench that compares.**
#
# ## 2. One problem by hand
# **How is an answer graded?** Let's do it by hand, with a problem that you know. Here are its prompt and its
# reference:

# %%
COUNTER = next(problem for problem in verilog.load_problems("data/tiny_eval")
               if problem.name == "Prob031_updown")
print(COUNTER.prompt.strip(), "\n\n" + COUNTER.reference)

# %% [markdown]
# Here are four answers to it. The first is right. The second counts the wrong way. The third does, too,
# but it prints the winning line itself. The last one is prose.
#
# <details><summary><b>Which of them would pass a judge that searches the output for
# <code>Mismatches: 0</code>?</b></summary>
#
# The first and the third. verilog-eval's own analyser is such a judge: it passes any log in which some
# line says 0 mismatches, whoever printed that line.
# </details>

# %%
def as_answer(problem):
    """The reference, as if a model had written it."""
    return problem.reference.replace("RefModule", "TopModule")


RIGHT = as_answer(COUNTER)
WRONG = RIGHT.replace("if (inc)", "if (!inc)")
FORGED = WRONG.replace("endmodule",
                       '  initial $display("Mismatches: 0 in 406 samples");\nendmodule')
answers = {"right": RIGHT, "the wrong way": WRONG, "prints the line itself": FORGED, "prose": None}
display(scores.verdict_table(
    {name: verilog.judge(COUNTER, code) for name, code in answers.items()}))

# %% [markdown]
# Only behaviour counted. Every answer ends up in one **category**: *pass*; *mismatch* (it runs and
# differs); *timeout* (30 seconds of CPU, or the testbench's own `TIMEOUT`); *runtime* (the simulation broke
# down); *compile* and *syntax* (Icarus doesn't accept it); *refused* (it opens files, or ends the
# simulation); *no code*; or *broken problem*, where the problem's own files don't compile, so that no answer
# is guilty. We follow verilog-eval's rules: its command line, and its list of messages that fail an answer
# whatever comes after them.
#
# **An answer is graded by what it does, never by what it says.**
#
# ## 3. A judge that an answer cannot talk to
# **Why not just compile everything together?** Because an answer is untrusted code. In one program with
# testbench and reference it can print, stop the simulation, read the reference by its name
# (`good1.state`), or pull on an input that both share. You could guard against each trick, but that's a
# race you'd lose one day. So here the answer never meets the reference, and the program that decides never
# meets the answer:

# %%
display(SVG("assets/figures/judge.svg"))

# %% [markdown]
# First the answer sits an **exam**: the testbench asks its questions, and we write down what the
# answer's outputs do. There's no reference in this program, and the testbench's names are drawn anew
# each time, so the answer can't know them. Then comes the **marking**: testbench and reference run
# together, and a recording of the outputs stands in the answer's place. Only this second program can
# pass the answer, and it holds not one word of it. **Copying is hopeless: what could be copied isn't in
# the room.**
#
# <details><summary><b>What can an answer still do in its exam?</b></summary>
#
# It can fetch the reference from the disk, end the simulation early, or use up the machine. So the
# compiler's list of what it read may name no further file, the compiled program may call nothing that
# opens one, the exam must last as long as the testbench does, and both programs have limits on time,
# memory and output.
# </details>
#
# Try it yourself. This is the *right* counter, with one more line inside.

# %%
TRICKS = {
    "stop after one sample": "initial @(posedge clk) $finish;",
    "the same, by a macro": "`define END $finish\ninitial @(posedge clk) `END;",
    "read the reference": "wire peek = good1.state;",
    "force the verdict": "initial force tb.tb_mismatch = 0;",
    "force an input": "initial force clear = 0;",
    "read a file": 'integer f; initial f = $fopen("ref.sv", "r");',
    "never end": "reg x = 0; initial forever x = ~x;",
    "print every name it can learn": 'initial $display("%mMismatches: 9 in 9 samples");',
    "only mention $finish": '// $finish; good1.state\n  localparam S = "endmodule $finish";'}


def with_trick(code, trick):
    """The module with one more line inside."""
    return code.replace("endmodule", f"  {trick}\nendmodule")


quick = sandbox.Limits(seconds=2)
display(scores.verdict_table({
    name: verilog.judge(COUNTER, with_trick(RIGHT, trick), quick)
    for name, trick in TRICKS.items()}))

# %% [markdown]
# The last two pass, and they should: what a right answer prints or mentions harms nobody. Are honest answers
# graded as before, too? Yes: for the references of verilog-eval and of the tiny benchmark, verdicts and
# mismatches are the same as with everything in one program. A generator in
# [`tests/hostile`](https://github.com/OWNER/gemma4-on-tpu/blob/main/tests/hostile/README.md) writes over two
# thousand attacks, and none of them passes.
#
# ## 4. The ceiling
# **What's the best score anyone could get?** Not always 100 %. We let each problem's own reference sit the
# exam first: what even the reference can't win, no model can.

# %%
folder = remote.checkout(cfg.problems)
tasks = {"spec-to-rtl": verilog.load_problems(folder)}
if cfg.completion:
    tasks["code-complete"] = verilog.load_problems(remote.checkout(cfg.completion))
winnable, version = {}, ".".join(map(str, sandbox.icarus_version()))
for task, problems in tasks.items():
    verdicts = verilog.judge_many([(problem, as_answer(problem)) for problem in problems])
    winnable[task] = [verdict.passed for verdict in verdicts]
    clean = sum(verdict.mismatches == 0 for verdict in verdicts)
    print(f"{task}, Icarus {version}: {len(problems)} problems, {clean} references show 0 "
          f"mismatches, {sum(winnable[task])} can be won")
    lost = {problem.name: verdict for problem, verdict in zip(problems, verdicts)
            if not verdict.passed}
    if lost:
        display(scores.verdict_table(lost))
    if len(lost) == len(problems):
        raise helpers.UserError(
            f"no reference of {task} passes its own testbench, so no answer could: the table says "
            "what broke. Mend the problems, or choose others.")

# %% [markdown]
# In the tiny benchmark everything can be won. Of verilog-eval's 156 problems it's 151 on Icarus 11 and 152
# on Icarus 12; in its other task, code-complete, it's 152 and 153 (measured).
#
# <details><summary><b>Why can a problem's own reference lose?</b></summary>
#
# Prob099's testbench connects ports that its interface doesn't have. Prob151 and Prob156 need a cast that
# Icarus 11 doesn't know. Prob082, Prob141 and, on Icarus 12, Prob156 print `TIMEOUT` first, and the
# official rules fail that. People also *dispute* five problems: Prob099, and by an open pull request
# Prob118, 134, 135 and 153. So we give scores with and without those.
# </details>
#
# ## 5. Asking
# **How do you ask a model so that the score is fair?** There isn't one way, so we write each way down as a
# **plan**: which wording, how many answers to a problem, and how random. `temperature` is how random, and
# `top_p` keeps only the likeliest tokens, up to that share. **Greedy** means temperature 0: always the
# likeliest token.
#
# There are four wordings. `ours` is the chat that training used, and it's the main one. `official` is
# verilog-eval's own chat (without the one to four examples that it can put first). `examples` shows two
# solved problems and lets the model continue. `comment` writes the problem as the comment above a module,
# the way Verilog files have it. The last two are made for a model that nobody has tuned, so we ask them of the
# base, and of the tuned model only once, by `comment` and greedily.
#
# Are we asking the right model? What's served has to be what 04 merged, and it has to be asked the way
# it was trained. Otherwise the score belongs to another model. So the files check each other first. The server
# settings come from 05's `serve/options.json`, but here the prefix cache is on, since several answers share a
# prompt.

# %%
merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
merge, meta = records.Merge.load(), records.DataMeta.load()
changed_files = helpers.changed(merged, merge.files)
if changed_files:
    raise helpers.UserError(
        f"{merged} is not what 04 wrote ({changed_files}): run 04_merge and 05.")
changed_settings = merge.recipe.asked_otherwise(meta)
if changed_settings:
    raise helpers.UserError(f"02 changed {changed_settings} after 03: run 03, 04 and 05 again.")
options = replace(serve_options.read(helpers.run_dir("serve")), prefix_caching=True)
models = {"tuned": merged, "base": remote.stage(options.base or merge.recipe.base_path)}

# %%
tokenizer = chat.load_tokenizer(merged)


def render(messages, thinking):
    """The token ids of a chat, rendered as 02 rendered it for training."""
    return chat.prompt_ids(tokenizer, messages, thinking or meta.thinking)


def encode(text):
    """The token ids of a plain text, with the token that begins a text."""
    return [tokenizer.bos_token_id, *chat.encode_texts(tokenizer, [text])[0]]


prompts = asking.all_prompts(tasks, cfg.plans, meta.system, render, encode)
by_name = {problem.name: problem for problem in tasks["spec-to-rtl"]}
example = by_name.get(COUNTER.name, tasks["spec-to-rtl"][0])
for wording in dict.fromkeys(plan.prompt for plan in cfg.plans):
    shown = tokenizer.decode(prompts[wording, False, example])
    print(f"── {wording}\n{shown if len(shown) < 600 else '[...]' + shown[-300:]}\n")

# %% [markdown]
# Those are the four wordings of one problem. Now we ask both models everything. Each answer is one line of
# `samples.jsonl`, written as soon as it arrives. Its **key** is a hash of the model, the serving options, the plan
# and the prompt. If you kill this anywhere, the next run asks only for what's missing.
#
# **A score belongs to a model that's asked in one particular way, so we write the way down.**

# %%
served = [getattr(options, name) for name in (
    "engine", "kv_cache_dtype", "quantization", "implementation", "environment", "max_model_len",
    "flags")]


def answers_of(label, path, plans, tasks, prompts, exam=""):
    """All answers of one model, from disk where they are saved, else from a server."""
    asked = [plan for plan in plans if plan.only in ("", label)]
    maker = [weights.fingerprint(path), cfg.max_tokens, served]
    jobs = asking.plan_jobs(asked, tasks, prompts, maker)
    file = helpers.run_dir("eval", exam, label, "samples.jsonl")
    saved = asking.read_samples(file, jobs)
    if len(saved) == len(jobs):
        return saved
    progress = helpers.Progress(len(jobs) - len(saved), f"{label}: answers")
    place = helpers.run_dir("serve")
    with serving.running(replace(options, model=str(path)), place) as url:
        client = Client(url, options.name, options.max_model_len, chat.TURN_END, cfg.patience,
                        alive=lambda: server.is_alive(place))
        return asking.sample(jobs, file, client, cfg.max_tokens, cfg.in_flight,
                             lambda done, total: progress.update())


replies = {label: answers_of(label, path, cfg.plans, tasks, prompts)
           for label, path in models.items()}

# %% [markdown]
# ## 6. From text to code
# **Which part of an answer is the module?** One rule decides, we fixed it beforehand, and nothing gets
# repaired. If there are several fenced blocks, the last one with a `TopModule` counts, because drafts come
# first. The `official` plans are read by verilog-eval's own rule instead.
#
# <details><summary><b>A model writes a wrong draft in one fence, then the right module in another. What
# does each rule give it?</b></summary>
#
# Ours takes the last: pass. verilog-eval's takes the first: mismatch. The other way round ours fails and
# theirs passes. A fence inside [BEGIN] … [DONE] is a syntax error for theirs, and a missing [DONE] is
# no code.
# </details>

# %%
judged = {label: scores.judge_answers(samples, tasks, cfg.plans)
          for label, samples in replies.items()}
pd.DataFrame({label: {
    "answers": len(frame), "cut at max_tokens": (frame.finish == "length").sum(),
    "failed by the testbench's own TIMEOUT alone": frame.late.sum(),
    "refused, verilog-eval would run them": (frame.category == "refused").sum(),
    "verdicts that our rule of extraction would change": (frame.passed != frame.ours).sum()}
    for label, frame in judged.items()})

# %% [markdown]
# In our run everything below the first line is zero. In a run of your own, look there first: answers that were
# cut or refused say something about the limits and not about the model.
#
# Whom do we compare with? The tuned model's **rival** is the base, asked in the wording in which it passes
# most often. Here's every answer of both:

# %%
main = cfg.plans[0].name
wordings = [plan.name for plan in cfg.plans if plan.only != "tuned" and (
    plan.task, plan.n, plan.temperature) == (FIVE.task, FIVE.n, FIVE.temperature)]
rival = max(wordings, key=lambda name: judged["base"].query("plan == @name").passed.mean())
where = f"measured, {helpers.size()}, {len(tasks['spec-to-rtl'])} problems, Icarus {version}"
fig, axes = style.figure(9.5, 2.8, rows=2, sharex=True)
order = judged["tuned"].query("plan == @main").groupby("problem").passed.sum().sort_values().index
for ax, (label, plan) in zip(axes, (("tuned", main), ("base", rival))):
    frame = judged[label].query("plan == @plan")
    grid = frame.pivot(index="index", columns="problem", values="passed").astype(float)
    ax.pcolormesh(grid[order[::-1]], vmin=0, vmax=1, edgecolors="white", linewidth=0.3)
    ax.set(title=f"{label}, {plan}: {frame.passed.sum()} of {len(frame)} answers pass", yticks=[])
axes[1].set(xticks=[], xlabel="one column is one problem, one row one answer; yellow passes")
style.finish(fig, "07_answers", where)
display(pd.concat(judged).groupby([pd.Grouper(level=0), "plan"]).category.value_counts().unstack(
    fill_value=0))

# %% [markdown]
# A full column means that the model is sure of itself. A mixed one means that another try would help.
# Many *no code* mean a wording that the model doesn't follow.
#
# Could the exam have leaked into the training rows? 02 compared the prompts. Here we compare the trained
# *answers* with the references, without comments, spaces and module names. We can't know what a downloaded base
# has read. It probably has read HDLBits, the site that verilog-eval's problems come from.

# %%
rows = np.load(helpers.run_dir("data", "train", "tokens.npy"), mmap_mode="r")
texts = (tokenizer.decode(row) for row in rows[:20_000])
trained = set().union(*map(extraction.bare_modules, texts))
leaked = [problem.name for problem in tasks["spec-to-rtl"]
          if extraction.bare_modules(problem.reference) & trained]
print(f"{len(trained)} different trained modules; references among them: {len(leaked)}",
      *leaked[:5])
if meta.evaluation != cfg.problems:
    print(f"02 compared its prompts with {meta.evaluation or 'no exam'}, not with {cfg.problems}. "
          "Set 02's evaluation to this exam, or you won't know whether it leaked.")

# %% [markdown]
# ## 7. pass@k without bias
# **What if you may try k times?** **pass@k** is the chance that at least one of k answers passes. Say we
# drew n answers and c of them pass. There are C(n, k) ways to pick k of the n, and C(n-c, k) of them pick
# failures only. So pass@k is 1 - C(n-c, k) / C(n, k), and that's unbiased: on average it's the truth.
#
# <details><summary><b>Is the tempting 1 - (1 - c/n)<sup>k</sup> too high or too low?</b></summary>
#
# Too low on average, for k > 1. It draws with replacement, so it may draw the same failure twice.
# </details>

# %%
p, n, k = 0.3, 5, 2
chances = [math.comb(n, c) * p**c * (1 - p)**(n - c) for c in range(n + 1)]
unbiased = sum(chance * verilog.pass_at_k(n, c, k) for c, chance in enumerate(chances))
tempting = sum(chance * (1 - (1 - c / n)**k) for c, chance in enumerate(chances))
print(f"truth {1 - (1 - p)**k:.4f} | unbiased {unbiased:.4f} | tempting {tempting:.4f}")

# %% [markdown]
# ## 8. How sure are we?
# **Would another 38 problems have given the same score?** The problems are a sample of what one could ask,
# so we **bootstrap** over them: draw as many problems with replacement, average, repeat, and keep the
# middle 95 %. That range is the interval.
#
# <details><summary><b>Not one of 38 problems passes. Is the true share zero?</b></summary>
#
# Not necessarily. It may be as much as about 3.5/38, which is where an exact interval ends. A bootstrap can't
# tell, because all its samples are zero, too.
# </details>

# %%
problems = tasks["spec-to-rtl"]
names = [problem.name for problem in problems]
disputed = np.array([name.startswith(cfg.disputed) for name in names])
runs = {(label, plan.name): scores.counts(judged[label], plan.name, names) for label in models
        for plan in cfg.plans if plan.only in ("", label)}
board = scores.board(runs, {"undisputed": ~disputed, "winnable": winnable["spec-to-rtl"]})
display(board.round(3))

# %% [markdown]
# Compare the base in the row `ours` with the base in the row `comment`: the same weights, asked
# differently. **A pass@k belongs to a model *and* a wording, so whoever quotes one must name both.**
#
# ## 9. Two models on the same problems
# **Is the tuned model really better, or was it lucky?** Both models met the same problems and fail on the
# hard ones, so we compare **pairs**: one difference for each problem. Then it doesn't matter how hard the
# problems are. If the models were equally good, each difference could just as well have the other sign. So we flip
# signs at random many times, and p is the share of these **sign flips** whose mean is at least as far from zero as
# the mean we saw. (We flip at most 100,000 times, so the smallest p is 2e-05.)
#
# <details><summary><b>Which base is the fair rival: the one that's asked as the tuned model is, or the one that's
# asked in its favourite way?</b></summary>
#
# Ask both. Against the base in the trained wording, a fine-tune may only have taught the wording. What
# else it taught shows against the base at its best.
# </details>

# %%
def paired(first, second, k=1):
    """Two (model, plan) on the same problems."""
    return verilog.compare(scores.per_problem(runs[first], k),
                           scores.per_problem(runs[second], k))


against = {name: paired(("base", name), ("tuned", main))
           for name in dict.fromkeys([*wordings, main])}
for name, compared in against.items():
    mean, low, high = compared["difference"]
    print(f"pass@1, tuned minus base asked by {name}: {mean:+.3f} [{low:+.3f}, {high:+.3f}], "
          f"p = {compared['p']:.2g}")
best = against[rival]
low, high = best["difference"][1:]
verdict = "tuning taught more than the wording" if low > 0 else "no difference is shown"
print(f"Against the base at its best ({rival}): {'the base is better' if high < 0 else verdict}")

# %%
weakest_first = sorted(against, key=lambda name: against[name]["first"][0])
scored = {f"base, {name}": against[name]["first"] for name in weakest_first}
scored["tuned"] = best["second"]
fig, (left, right) = style.figure(9.5, 3.4, columns=2, width_ratios=(1, 1.1))
for place, (mean, low, high) in enumerate(scored.values()):
    left.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", capsize=4)
    left.annotate(f"{mean:.2f}", (mean, place + 0.2), ha="center")
left.axvline(np.mean(winnable["spec-to-rtl"]), color=style.RED, linestyle="--")
left.set_yticks(range(len(scored)), list(scored))
left.set(title="Asked the same way, and each in its best way", xlabel="pass@1; dashed: the ceiling",
         xlim=(-0.07, 1.07), ylim=(-0.5, len(scored)))
mean, low, high = best["difference"]
right.bar(range(len(problems)), np.sort(best["values"]))
right.axhspan(low, high, color=style.SKY, alpha=0.4)
right.axhline(mean, color=style.BLACK)
right.set(title=f"mean {mean:+.2f} [{low:+.2f}, {high:+.2f}]", xlabel="problems, sorted", xticks=[],
          ylabel=f"tuned minus base, {rival}")
style.finish(fig, "07_scores", where + ". Bars and band: 95 %")

# %% [markdown]
# **Tuning taught this model two things.** The first is to answer: in the chat it was tuned for, its base
# passes next to nothing. The second shows against the base at its best, asked with a comment above the
# module: the base writes what its corpus writes, and in two modules of five that's a bug. The training rows
# held no new kind of module. They only showed which of the two to write, right or wrong. That's what
# fine-tuning mostly does: **it chooses among what the base already knows.**
#
# How sure is the second? We drew twice from the same two models. The difference was 11 points both times. One
# interval left zero out (2 to 21), and the other just touches it (−1 to 22). So 38 problems with five
# answers each can barely tell 11 points from luck.
#
# A p-value answers one question: how often would equally good models differ this much by chance? It knows
# nothing of another wording or another training seed. [11](11_qlora.ipynb) shows a difference of ten points
# with p = 0.002 that two more seeds removed.
#
# **At 31B** the strongest rival is probably the base with *thinking* switched on, and the plans ask it, too. Don't
# expect an easy win. Here's what others have published nearby
# ([`neighbours.csv`](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/published/neighbours.csv)):
# a 31B tuned without reasoning 64 to 70 %, GPT-4o 63 %, a 7B trained to reason 69 %. Nobody has published
# the base that thinks. And verilog-eval is nearly saturated and
# [contaminated](https://arxiv.org/abs/2503.13572).
#
# ## 10. Why did it fail?
# A score says how often, and a failure says why. Here's one answer of the tuned model that runs and
# differs, with the signals up to the first mismatch: `_ref` is the reference's output, `_dut` is the
# answer's ("device under test").

# %%
failing = judged["tuned"].query("plan == @main and category == 'mismatch'")
problem, code = COUNTER, WRONG
if len(failing):
    row = failing.iloc[0]
    problem = by_name[row.problem]
    code, _ = verilog.extract_code(replies["tuned"][main, row.problem, row["index"]]["text"])
waves = helpers.run_dir("eval", "failure.vcd")
waves.unlink(missing_ok=True)
failed = verilog.judge(problem, code, waves=waves)
print(f"{problem.prompt.strip()}\n\n{code}\n\n{failed.category}: {failed.detail}")
times = re.findall(r"First mismatch occurred at time (\d+)", failed.log)
if times and waves.exists():  # verilog-eval's testbenches tell both; another one may not
    display(scores.waveform(waves).loc[:min(map(int, times))].tail(8).T)

# %% [markdown]
# Which line of the code does it? (You can open `eval/failure.vcd` in GTKWave or Surfer.)
#
# <details><summary>Answer, for our run</summary>
#
# The fourth, `input [9:0] w`. Nobody asked for that port, so nothing is connected to it, and its bits have no
# value (`z`). An XOR with them is unknown: that's the `x` in `outp_dut`.
#
# </details>
#
# **Look at one failure before you believe a score.**
#
# ## 11. And if your task isn't Verilog?
# **What has to change for another task?** Little. A benchmark is one object, `verilog.Benchmark`:
# problems, how an answer is read, and how it's graded. `verilog.questions("mine.jsonl", score=...)` makes
# one from lines with `question` and `answer`. The score is a function of yours, and you get the same
# intervals and the same pairing. Try your score on a bad answer first: **a score that nobody fails compares
# nothing.**
#
# <details><summary><b>The whole of it</b></summary>
#
# Name the file in 02's `evaluation`, too, so that its questions stay out of your training rows. Then ask both
# models, in the names of this page. The answers get a folder of their own, `eval/mine/`.
#
# ```python
# def score(question, answer, wanted):
#     return float(answer.lower() == wanted.lower())
#
#
# mine = verilog.questions("mine.jsonl", score)
# exam, plans = {"mine": mine.problems}, [replace(GREEDY, name="mine", task="mine")]
# asked = asking.all_prompts(exam, plans, meta.system, render, encode)
# marks = {}
# for label, path in models.items():
#     samples = answers_of(label, path, plans, exam, asked, "mine")
#     marks[label] = scores.grade(mine, scores.texts_of(samples, "mine"))
# print(verilog.compare(marks["base"], marks["tuned"]))
# ```
#
# If you'd rather score held-out rows of your own file, [own data](own_data.ipynb) does it without a server.
#
# </details>
#
# <details><summary><b>What did the model forget, by everybody's ruler?</b></summary>
#
# A tuned model may follow instructions or count worse than before, and no Verilog problem would show it.
# [lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness) has the scores that papers
# quote, such as IFEval (can it follow instructions?) and GSM8K (can it do sums in words?). It asks the
# server of 05 with the same token ids as we do:
#
# ```bash
# ./setup.sh harness                                 # once: an environment of its own
# scripts/harness.sh runs/31b/serve ifeval,gsm8k     # and the same for the base's server
# scripts/harness.sh runs/31b/serve ports            # our questions about ports (data/ports)
# ```
#
# On our own questions its exact match equals `verilog.questions` (`tests/test_harness.py`), so you may compare
# its numbers with ours. Score the base, too: **what was forgotten is the difference**.
#
# </details>
#
# ## 12. Save what was measured
# What do you keep? For each model a summary and a CSV in verilog-eval's own form, and one file that compares the
# two.

# %%
for label, frame in judged.items():
    scores.per_problem_csv(frame, helpers.run_dir("eval", label, "per_problem.csv"))
    helpers.write_json(helpers.run_dir("eval", label, "summary.json"), {
        "settings": asdict(cfg), "n_problems": len(names),
        "served": options.measured(), "icarus": version,
        "categories": {plan: group.category.value_counts().to_dict()
                       for plan, group in frame.groupby("plan")},
        "counts": {plan: dict(zip(names, counts))
                   for (model, plan), counts in runs.items() if model == label}})

# %%
helpers.write_json(helpers.run_dir("eval", "comparison.json"), {
    **{label: board.loc[main].xs(label, level="model")["all"].to_dict() | {"n_problems": len(names)}
       for label in models},
    "model_hash": options.model_hash, "plan": asdict(cfg.plans[0]), "rival": rival,
    "n_winnable": int(sum(winnable["spec-to-rtl"])),
    "against": {name: {"difference": compared["difference"][0],
                       "interval": compared["difference"][1:], "p": compared["p"]}
                for name, compared in against.items()}})

# %% [markdown]
# ## Recap
# - The answer never meets the reference, and what it prints decides nothing.
# - The ceiling comes first, answers are saved before they're judged, and failures stay in the denominator.
# - Scores carry intervals over problems. Models are compared problem by problem, and the rival is the base
#   in its favourite wording.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. How many problems would show a true difference of 0.02 in pass@1, if the differences scatter as
#    between our two models?
#
# <details><summary>Solution</summary>
#
# ```python
# print(math.ceil((1.96 * best["values"].std(ddof=1) / 0.02) ** 2))
# ```
#
# With so many problems you'd find the difference every second time. To find it four times out of five, take 2.8
# instead of 1.96. For comparison, verilog-eval has 156 problems.
# </details>
#
# 2. Write an answer to the counter that passes without counting: `verilog.judge(COUNTER, with_trick(WRONG,
#    "..."), quick)`. We don't know of one. If you find it, `tests/hostile/` wants it.
#
# Next: the appendices. [08](08_dryrun.ipynb) compiles the 31B step for a TPU that you don't have,
# [09](09_tiny_base.ipynb) trains the tiny base, [10](10_published.ipynb) recomputes the published claims.
