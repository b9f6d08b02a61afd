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
# Is the tuned model better than the base, and how sure are we? We judge one answer by hand, build a
# judge that is hard to fool, ask both models for hundreds of modules, and compare them problem by
# problem.
#
# | | |
# |---|---|
# | **Needs** | a serving machine as in notebook 05, and Icarus Verilog (version 12 if there is a choice) |
# | **Reads** | `merged/` and `merge.json` from 04, `serve/options.json` from 05, `train/recipe.json` from 03, `data/meta.json` from 02, the base model, a verilog-eval folder |
# | **Writes** | `eval/{base,tuned}/samples.jsonl` and `summary.json`, `eval/comparison.json`, figures |
# | **Time and cost** | tiny: about a minute and a half on two cores. 31b: 9,672 answers per model, 30 to 57 USD on a v6e-8 with two starts of the server (our estimate: 600 tokens an answer, at the published 1,400 to 3,000 tokens/s) |
#
# The outputs shown are those of the tiny run, on a small benchmark of our own in verilog-eval's
# file layout. Every answer is saved before it is judged, so a second run asks for nothing and needs
# no server. Terms are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# [00 quickstart](00_quickstart.ipynb) · [01 set up](01_setup.ipynb) · [02 data](02_data.ipynb) · [03 train](03_train.ipynb) · [04 merge](04_merge.ipynb) · [05 serve](05_serve_vllm.ipynb) · [06 benchmark](06_bench.ipynb) · **07 evaluate**
#
# Appendices: [08 dry run](08_dryrun.ipynb) · [09 tiny base](09_tiny_base.ipynb) · [10 published](10_published.ipynb) · [11 QLoRA](11_qlora.ipynb) · [12 automata](12_nca.ipynb)

# %% cellView="form"
# @title Find or clone the repository, install what is missing, say what this machine is.
import os, subprocess, sys
found = [p for p in (sys.path[0], ".", "..", "gemma4-on-tpu") if os.path.isdir(f"{p}/tpu_time")]
if not found:  # a notebook that was opened alone, as Colab opens it
    subprocess.check_call("git clone -q --depth=1 https://github.com/OWNER/gemma4-on-tpu".split())
sys.path.insert(0, os.path.abspath((found or ["gemma4-on-tpu"])[0]))
import helpers
helpers.machine()

# %% [markdown]
# ## 1. Settings
# A **plan** says how answers are drawn: which prompt, how many per problem, and how random. The
# first plan is the main one. `ours` is the wording that training used, `official` is verilog-eval's
# own, and `examples` shows two solved problems first. **Greedy** means always the likeliest token.
# How the models are served, and where the base is, is not said here: 05 left that in
# `serve/options.json`.

# %%
import itertools
import math
from dataclasses import asdict, dataclass, replace
from importlib import metadata

import pandas as pd
from IPython.display import display

from helpers import charts, chat, stats
from serving import options as serve_options
from verilog import answers, evaluation, judge
from verilog.evaluation import Plan

pd.set_option("display.max_colwidth", 110)

FIVE = Plan("five samples")  # at temperature 0.8, top-p 0.95, as the published run drew them
GREEDY = Plan("greedy", n=1, temperature=0.0, top_p=1.0)
MANY, OFFICIAL = Plan("n=20", n=20, temperature=0.85), Plan("official", "official", 20, 0.85)
OFFICIAL_GREEDY = replace(GREEDY, name="official greedy", prompt="official")
OFFICIAL_FIVE, EXAMPLES = Plan("official, five", "official"), Plan("two examples", "examples")
COMPLETE = Plan("code-complete", "official", 5, task="code-complete")


# %%
@dataclass(frozen=True)
class Settings:
    # ── Benchmark ──
    problems: str = "{checkout}/dataset_spec-to-rtl"
    completion: str = "{checkout}/dataset_code-complete-iccad2023"  # "": no such plan
    disputed: tuple = ("Prob099", "Prob118", "Prob134", "Prob135", "Prob153")  # section 5
    # ── Sampling ──
    # The first is shown and compared, also with those that are drawn in the same way.
    plans: tuple = (FIVE, MANY, GREEDY, OFFICIAL, OFFICIAL_GREEDY, OFFICIAL_FIVE, EXAMPLES,
                    COMPLETE)
    max_tokens: int = 2048     # longer answers are cut, and counted as what they are
    in_flight: int = 64        # requests at once; vLLM computes them together
    patience: float = 900.0    # seconds to wait for a server that stopped answering
    # ── Statistics ──
    resamples: int = 10_000    # bootstrap draws
    other_runs: tuple = ()     # run directories of further training seeds, judged by this notebook


FULL = Settings()
E2B = replace(FULL, in_flight=32)
TINY = replace(FULL, problems="data/tiny_eval", completion="", disputed=(), max_tokens=192,
               patience=30.0, plans=(FIVE, GREEDY, OFFICIAL_GREEDY, EXAMPLES))
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# ## 2. One problem by hand
# A problem is three files: a **prompt**, a reference module `RefModule`, and a **testbench** `tb`.
# The testbench is a module that plays the outside world. It feeds the same signals to the reference
# and to the answer, `TopModule`, compares their outputs at both edges of the clock, and prints
# `Mismatches: X in Y samples`. Icarus Verilog compiles the three (`iverilog`) and simulates them
# (`vvp`). You know the first problem: the up-down counter.

# %%
COUNTER = {p.name: p for p in judge.load_problems("data/tiny_eval")}["Prob031_updown"]
print(COUNTER.prompt.strip(), "\n\n" + COUNTER.reference)

# %% [markdown]
# Four answers to it. The first is right, the second counts the wrong way. The third does, too, but
# prints the winning line itself and stops. The last is prose.

# %%
RIGHT = COUNTER.reference.replace("RefModule", "TopModule")
WRONG = RIGHT.replace("if (inc)", "if (!inc)")
FORGED = WRONG.replace("endmodule", '  initial begin $display("Mismatches: 0 in 406 samples"); '
                                    "$finish; end\nendmodule")
verdicts = [judge.judge(COUNTER, code) for code in (RIGHT, WRONG, FORGED, None)]
display(evaluation.verdict_table(
    verdicts, answer=["right", "the wrong way", "prints the line itself", "prose"]))

# %% [markdown]
# What this means: only behaviour counts. A judge that merely looks for the line `Mismatches: 0`
# gives the third answer a pass. (`<NA>`: it did not come to a count.)
#
# ## 3. The judge
# `judge.judge` follows verilog-eval's rules: its command line, its 30 seconds, and its list of
# lines that fail an answer whatever comes after them. Every answer gets one **category**:
#
# | category | meaning |
# |---|---|
# | pass | `Mismatches: 0 in N samples`, N > 0, printed by the testbench |
# | mismatch | it runs and differs from the reference |
# | timeout | the time limit, or the testbench's own `TIMEOUT` |
# | runtime | the simulation broke down, printed without end, or never reported |
# | compile, syntax | Icarus does not take it; a missing or renamed `TopModule` is this |
# | refused | it does what a design has no business doing (next section) |
# | no code | the answer holds no module, or there was no answer |
#
# (Our 30 seconds are CPU time, and three times that by the clock: a busy machine must not turn
# passes into timeouts.)
#
# ## 4. A judge that is hard to fool
# An answer is untrusted code that shares a program with the testbench. It can print or stop the
# simulation (`$display`, `$finish`). By a hierarchical name it can read the reference
# (`good1.state`), and it can pull an input that both share. Here is the *right* counter with one
# more line inside:

# %%
TRICKS = {
    "stop after one sample": "reg done; initial #6 $finish;",
    "the same, spelled \\$finish": "reg done; initial #6 \\$finish ;",
    "the same, by a macro": "`define END $finish\ninitial #6 `END;",
    "read the reference": "wire peek = good1.state;",
    "force the verdict": "initial force tb.tb_mismatch = 0;",
    "force an input of both": "initial force clear = 0;",
    "write a file": 'integer f; initial f = $fopen("/tmp/owned");',
    "never end": "reg x = 0; initial forever x = ~x;",
    "only mention $finish": '// $finish; good1.state\n  localparam S = "endmodule $finish";',
}


def with_trick(code, trick):
    """The module with one more line inside."""
    return code.replace("endmodule", f"  {trick}\nendmodule")


# %%
quick = judge.Limits(seconds=2)
verdicts = [judge.judge(COUNTER, with_trick(RIGHT, trick), quick) for trick in TRICKS.values()]
display(evaluation.verdict_table(verdicts, trick=list(TRICKS)))
assert [v.passed for v in verdicts] == [False] * 8 + [True]
print("network cut off by:", " ".join(judge.network_guard()) or "nothing (not allowed here)")

# %% [markdown]
# What this means: only the last one passes, which merely mentions the words. A search for bad words
# would miss the macro and hit the comment. So we look at what the *compiler* made of the answer:
# every system call, scope and driver is in Icarus's output, with the file it came from. And a trick
# that we did not think of must get past a second wall. A test takes down all walls of a kind but
# one, and sees that the one still holds:
#
# | an answer tries to | first wall | second wall |
# |---|---|---|
# | read the reference or the testbench | every name of theirs carries a secret drawn for this answer | in the compiled program, no reference crosses the border except by a port |
# | stop early, print, write files | calls not on a list of harmless ones are refused | a pass needs as many samples as the reference had, and the line a mark that nobody can guess |
# | never end, fill the memory | limits on processor time, memory and output | a limit by the clock |
#
# The other five kinds, and what we tried of each, are in
# [`tests/hostile`](https://github.com/OWNER/gemma4-on-tpu/blob/main/tests/hostile/README.md). A
# generator there writes over a thousand attacks more.
#
# ## 5. The ceiling
# Before any model, we judge each problem's own reference. What even that cannot win, nobody can. We
# fetch verilog-eval at a pinned commit, once, or take the checkout that the environment variable
# `VERILOG_EVAL_DIR` names; the small benchmark of the tiny run is in the repository.

# %%
folder = judge.fetch(cfg.problems)
problems = judge.load_problems(folder)
tasks = {"spec-to-rtl": problems}
if cfg.completion:
    tasks["code-complete"] = judge.load_problems(judge.fetch(cfg.completion))
broken = [problem.name for each in tasks.values() for problem in each if problem.missing]
print(f"{len(problems)} problems in {folder}, {len(broken)} with a file missing", *broken)

# %%
version = judge.icarus_version()
references = {task: evaluation.judge_references(each) for task, each in tasks.items()}
winnable = {task: {p.name for p, v in zip(tasks[task], verdicts, strict=True) if v.passed}
            for task, verdicts in references.items()}
clean = {task: sum(v.mismatches == 0 for v in verdicts) for task, verdicts in references.items()}
for task, verdicts in references.items():
    print(f"{task}, Icarus {version[0]}.{version[1]}: {clean[task]} of {len(verdicts)} references "
          f"show 0 mismatches, {len(winnable[task])} problems can be won")
if version < (12,):
    print("Icarus is older than 12, which verilog-eval asks for: some references may not compile.")
lost = [(p.name, v) for p, v in zip(problems, references["spec-to-rtl"], strict=True)
        if not v.passed]
if lost:
    display(evaluation.verdict_table([v for _, v in lost], problem=[name for name, _ in lost]))

# %% [markdown]
# Here all can be won. In verilog-eval (spec-to-rtl, Icarus 11) **153 of 156 references show 0
# mismatches**: one testbench connects Y2 and Y4 where reference and interface have Y1 and Y3 (Prob099), two references need
# a cast that Icarus 11 lacks (Prob151, Prob156). Of these, **151 can be won**: the testbenches of
# Prob082 and Prob141 print `TIMEOUT` before their result, and the official analyser, which we
# follow, fails whatever follows that word. Prob099 is *disputed*, and by an open pull request of
# verilog-eval so are Prob118, 134, 135 and 153. Scores are given with and without them. (Prob099 and
# Prob135 are disputed in spec-to-rtl alone; code-complete is counted without them, too.)
#
# ## 6. Asking
# The same problem can be asked in many ways, and the way matters. `ours` is rendered by the
# function that rendered the training data. Nothing in it was written after a look at the test set.
# Two checks come first. What is served must be what 04 merged, and the prompt must be the one that
# was trained. Else a score would be some other model's.

# %%
merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
merge = helpers.read_json(helpers.require(helpers.run_dir("merge.json"), "04_merge.py"))
meta = helpers.read_json(helpers.require(helpers.run_dir("data", "meta.json"), "02_data.py"))
recipe = helpers.read_json(helpers.require(helpers.run_dir("train", "recipe.json"), "03_train.py"))
evaluation.check_story(merged, merge, meta, recipe)
options = serve_options.read(helpers.run_dir("serve"))
base = evaluation.fetch_base(options, recipe)
models = {"tuned": merged, "base": base}

# %%
tokenizer = chat.load_tokenizer(merged)
assert chat.template_sha256(tokenizer) == meta["template_sha256"], "not the template of training"
prompts = evaluation.all_prompts(tokenizer, tasks, cfg.plans, meta)
asked = next((problem for problem in problems if problem.name == COUNTER.name), problems[0])
for wording in dict.fromkeys(plan.prompt for plan in cfg.plans if plan.task == "spec-to-rtl"):
    text = tokenizer.decode(prompts[wording, asked])
    print(f"── {wording}, {asked.name}\n{text if len(text) < 900 else '[...]' + text[-420:]}\n")
longest = max(map(len, prompts.values()))
print(f"longest prompt {longest} tokens of {options.max_model_len}")

# %% [markdown]
# `examples` is for a model that cannot follow instructions but continues text: two solved problems
# in plain text, then ours, then the first two words of its answer. The examples are none of the
# benchmark's problems. If two examples do as well as a fine-tune, nobody needs to train. (An answer to
# this wording ends at its first `endmodule`, so a second module is lost.)
#
# Each answer is one line of `samples.jsonl`, written as it arrives, with a **key**: a hash of
# model, serving options, plan and prompt. Killed anywhere, the next run asks for what is missing
# and nothing else. So judging again never draws again; re-drawing only the failures would inflate
# the score. A request that the server fails is no answer: nothing is scored while one remains. (The
# server's prefix cache is off here, too. Reading a prompt of 300 tokens once for each of its
# answers costs the 31B about a minute in all, at 40 % of the chips' peak: less than a dollar.)

# %%
helpers.show_source(evaluation.plan_jobs)

# %% [markdown]
# First the tuned model, through 05's server if it still runs, then the base with the same options.
# A model whose answers are all saved needs no server, and at the end none is left running.

# %%
replies = {label: evaluation.collect(label, path, tasks, prompts, options, cfg)
           for label, path in models.items()}
evaluation.refuse_errors(replies)

# %%
for label, plan in (("base", cfg.plans[0].name), ("base", "two examples"),
                    ("tuned", cfg.plans[0].name)):
    said = replies[label].get((plan, asked.name, 0), {"text": "(not asked)"})["text"]
    print(f"── {label}, {plan}\n{said.strip()[:330]}\n")

# %% [markdown]
# That is the counter again: the base falls silent or goes on with the text, with two examples it
# writes a module, and the tuned model answers the question.
#
# ## 7. From answer to code
# Models wrap code in fences, think first, write a draft and then the module, or forget the closing
# fence. The rule is fixed before we look at answers, and it repairs nothing. Thoughts are cut off,
# and of several fences the *last* one that defines `TopModule` counts, because corrections come
# after drafts. A module with another name fails, as it would in a project.

# %%
fence, top = "```", "module TopModule; endmodule"
ANSWERS = {
    "fenced": f"Sure:\n{fence}verilog\n{top}\n{fence}\nIt is empty.",
    "draft, module, usage": f"{fence}\n{top} // draft\n{fence}\nBetter:\n{fence}sv\n{top} // 2\n"
                            f"{fence}\nUse:\n{fence}\nmodule user; TopModule t; endmodule\n{fence}",
    "thought before": f"<|channel>thought\n{fence}\n{top} // idea\n{fence}\n<channel|>{top}",
    "fence left open": f"{fence}verilog\nmodule TopModule;\n  wire a",
    "no fence, prose around": f"The answer is:\n{top}\nGood luck.",
    "only prose": "A module that adds is easy to write.",
}
found = [answers.extract_code(answer) for answer in ANSWERS.values()]
display(pd.DataFrame(found, columns=["code", "how"], index=list(ANSWERS))[["how", "code"]])

# %% [markdown]
# ## 8. Judge them all
# All cores judge at once, and identical answers are judged once. Answers without code stay in the
# table: nothing leaves the denominator.

# %%
judged = {}
for label, samples in replies.items():
    judged[label], different = evaluation.judge_answers(samples, tasks, cfg.plans)
    print(f"{label}: {len(samples)} answers, {different} different")
main = cfg.plans[0].name  # the plan that figures and the comparison show
wordings = evaluation.other_wordings(cfg.plans)  # main among them
rival = max(wordings, key=lambda name: judged["base"].query("plan == @name").passed.mean())
shown = {f"tuned, {main}": judged["tuned"].query("plan == @main"),
         f"base, {rival}": judged["base"].query("plan == @rival"),
         f"base, {main}": judged["base"].query("plan == @main")}
kinds = pd.DataFrame({name: frame.category.value_counts() for name, frame in shown.items()})
display(kinds.reindex(judge.CATEGORIES).fillna(0).astype(int))

# %%
where = (f"measured, {helpers.size()}, {len(problems)} problems, Icarus {version[0]}")
charts.draw_answers(dict(list(shown.items())[:2]), where)

# %%
cut = {label: int((frame.finish == "length").sum()) for label, frame in judged.items()}
late = {label: int(frame.late.sum()) for label, frame in judged.items()}
print(f"answers cut at {cfg.max_tokens} tokens: {cut}\n"
      f"0 mismatches, failed by the testbench's own TIMEOUT alone: {late}")

# %% [markdown]
# What this means: one column is one problem, one row one answer. Full columns show a model that is
# sure of itself; in mixed ones another try helps. Look at the kinds before any score. Many `no
# code` would mean a prompt that the model does not follow, many answers cut that `max_tokens`
# decides.
#
# ## 9. pass@k without bias
# **pass@k** is the chance that at least one of k answers passes. With n answers of which c pass,
# the share of k-subsets without a passing one is C(n-c, k) / C(n, k). One minus it is unbiased: its
# mean over many runs is the true value. The tempting `1 - (1 - c/n)**k` is too low on average for
# k > 1. Below, the formula against counting every subset, and both against a known truth.

# %%
def by_counting(n, c, k):
    """pass@k by listing every choice of k answers."""
    chosen = list(itertools.combinations([True] * c + [False] * (n - c), k))
    return sum(map(any, chosen)) / len(chosen)


for n, k in itertools.product(range(1, 8), range(1, 8)):
    for c in range(n + 1 if k <= n else 0):
        assert math.isclose(stats.pass_at_k(n, c, k), by_counting(n, c, k), abs_tol=1e-12)
p, n, k = 0.3, 5, 2
chances = [math.comb(n, c) * p**c * (1 - p)**(n - c) for c in range(n + 1)]
unbiased = sum(chance * stats.pass_at_k(n, c, k) for c, chance in enumerate(chances))
tempting = sum(chance * (1 - (1 - c / n)**k) for c, chance in enumerate(chances))
print(f"truth {1 - (1 - p)**k:.4f} | unbiased {unbiased:.4f} | tempting {tempting:.4f}")

# %% [markdown]
# ## 10. How sure are we?
# Problems are a sample of what one could ask. So we **bootstrap** over them: draw as many problems
# with replacement, average, repeat, and keep the middle 95 %. Where nothing passes there is nothing
# to vary. There an exact interval helps: after 0 of n, the true share may still be about 3.7/n.
#
# A sample of what? Every family of the 38 tiny problems was trained on, with other widths and names:
# their score says whether the model learned its lessons, not whether it can do new ones. verilog-eval
# is outside the training data (02 checks the overlap).

# %%
print("0 of 38 and 0 of 156: up to {:.3f} and {:.3f}".format(
    *(stats.score([0.0] * n, 100)[2] for n in (38, 156))))

# %%
names = [problem.name for problem in problems]
runs = {(label, plan.name): [evaluation.counts(judged[label], plan.name, names)] + [
            evaluation.other_counts(folder, label, plan.name, names) for folder in cfg.other_runs]
        for label in models for plan in cfg.plans}
task_of = {plan.name: plan.task for plan in cfg.plans}
board = evaluation.scores(runs, names, winnable, cfg.disputed, task_of, cfg.resamples)
able = len(winnable["spec-to-rtl"])
print(f"{len(names)} problems, {able} winnable: no model can be above {able / len(names):.3f}; "
      f"{sum(name.startswith(cfg.disputed) for name in names)} are disputed; "
      f"training seeds: {1 + len(cfg.other_runs)}")
display(evaluation.readable(board))

# %% [markdown]
# What this means: compare the rows of one model. The same weights, asked in another wording, are
# another model. The tiny one has only ever seen ours: look at its rows under `official greedy`. So
# a pass@k belongs to a model *and* a prompt, and whoever cites one must name both. (Name further
# training seeds in `other_runs`; pass@k is then estimated run by run and averaged. Columns that
# would only repeat `all`, such as that without disputed problems, are left out.)
#
# ## 11. Two models on the same problems
# Two intervals that overlap do not settle whether one model is better. Both models met the same
# problems, and both fail on the hard ones. A **paired** comparison takes that out: one difference
# per problem. If the models were equally good on each problem, a difference could as well have the
# other sign. The share of all choices of signs (**sign flips**) whose mean is at least as far from zero
# is p.

# %%
def paired(first, second, k):
    """Two (model, plan) on the same problems."""
    return stats.compare(*(evaluation.per_problem(runs[each], k) for each in (first, second)),
                         cfg.resamples)


ks = [k for k in (1, 5) if k <= min(cfg.plans[0].n, *(n for _, n in runs["base", rival][0]))]
pairs = {k: paired(("base", main), ("tuned", main), k) for k in ks}
against = {k: paired(("base", rival), ("tuned", main), k) for k in ks}
for title, each in (("the base, same prompt", pairs), (f"the base, {rival}", against)):
    for k, result in each.items():
        print("pass@{}: tuned minus {}: {:+.3f} [{:+.3f}, {:+.3f}],".format(
            k, title, *result["difference"]),
              f"p = {result['p']:.2g}, {result['differ']} of {len(names)} problems differ")

# %%
scored = {f"base, {rival}": {k: against[k]["first"] for k in ks},
          "tuned": {k: pairs[k]["second"] for k in ks}}
if rival != main:
    scored = {"base": {k: pairs[k]["first"] for k in ks}, **scored}
charts.draw_scores(scored, against[1], able / len(names), where)

# %%
solved = {(label, plan): {name for name, (c, _) in zip(names, runs[label, plan][0]) if c}
          for label, plan in (("base", main), ("base", rival), ("tuned", main))}
gained = sorted(solved["tuned", main] - solved["base", main])
given_up = sorted(solved["base", main] - solved["tuned", main])
print("solved only when tuned:", *sorted(solved["tuned", main] - solved["base", rival]))
print("solved only by the rival:", *sorted(solved["base", rival] - solved["tuned", main]) or ["-"])

# %% [markdown]
# What this means: asked like this the tiny base writes no module, so beating it proves little. The
# *rival* is the base in the wording in which it passes most answers: for the tiny one with two examples,
# for one that follows instructions perhaps verilog-eval's own. Thinking is off for both. A base that may
# think is a stronger rival, which we do not ask. The two lists name problems that one side solved and the
# other did not in as many tries. A red bar is a problem on which the base with examples scored higher;
# with five answers that is often chance.
#
# A p-value answers one question: how often would equal models differ this much, by the luck of the
# answers that were drawn? It knows nothing of another prompt, and nothing of another training seed: averaging several
# runs (`other_runs`) lowers the spread between them, but the interval does not contain it.
# [11](11_qlora.ipynb) shows a difference of ten points, p = 0.002, that two more seeds removed.
#
# ## 12. Reading one failure
# A score says how often, a failure says why. We take one answer that runs and differs: prompt,
# answer, message, and the waveform around the first mismatch, where a designer would look. One line
# per signal, time to the right; `_ref` is what the reference gives, `_dut` (design under test) what
# the answer gives.

# %%
row = evaluation.pick_failure(judged, main)
if row is None:
    problem, code = COUNTER, WRONG
else:
    problem = next(p for p in problems if p.name == row.problem)
    text = replies[row.model][main, row.problem, row["index"]]["text"]
    code, how = answers.extract_code(text, problem.interface)
    print(f"{row.model}, {row.problem}, answer {row['index']}: {row.category} ({row.detail})\n\n"
          f"PROMPT\n{problem.prompt.strip()}\n")
print(f"CODE\n{code}\n")

# %%
recorded = helpers.run_dir("eval", "failure.vcd")
recorded.unlink(missing_ok=True)
failed = judge.judge(problem, code, waves=recorded)
print("SIMULATOR\n" + failed.log.strip()[:1200])
charts.draw_failure(recorded, failed.log, problem.name, where)

# %% [markdown]
# `tb_mismatch` is high while the two differ. The testbench looks at it when it samples, and the
# dashed line is the first time it counted. Find the line of the code that does it: this is the
# feedback that a better dataset starts from.
#
# ## 13. Save what was measured
# One summary per model with everything that is needed to repeat or combine it, and one comparison
# for whoever only wants the answer.

# %%
about = {
    "size": helpers.size(), "problems": str(folder), "n_problems": len(names),
    "ceiling": {"winnable": able, "zero_mismatches": clean["spec-to-rtl"],
                "lost": {name: f"{v.category}: {v.detail}" for name, v in lost}},
    "settings": asdict(cfg), "system": meta["system"], "served": options.measured(),
    "template_sha256": meta["template_sha256"],
    "versions": {"icarus": ".".join(map(str, version)), "openai": metadata.version("openai"),
                 "network_cut_off": bool(judge.network_guard())}}
for label, path in models.items():
    counted = {plan.name: {name: list(pair) for name, pair in
                           zip(names, runs[label, plan.name][0])} for plan in cfg.plans}
    helpers.write_json(helpers.run_dir("eval", label, "summary.json"), {
        "model": str(path), **about, **evaluation.summary_of(judged[label], board, label),
        "late": late[label], "counts": counted})

# %%
comparison = {
    "model_hash": options.model_hash, "plan": asdict(cfg.plans[0]), "n_winnable": able,
    "seeds": 1 + len(cfg.other_runs), "rival": rival,
    **evaluation.comparison_of(pairs, board, main, runs), "gained": gained, "lost": given_up,
    "against_rival": {f"pass@{k}": evaluation.paired_json(each) for k, each in against.items()}}
helpers.write_json(helpers.run_dir("eval", "comparison.json"), comparison)
display(pd.DataFrame({label: comparison[label] for label in ("base", "tuned")}))
assert not helpers.run_dir("serve", "server.json").exists(), "a server was left running"

# %% [markdown]
# ## Recap
# - The judge is verilog-eval's, made safe: what the compiler emitted decides what may run and
#   count.
# - The ceiling comes first, answers are saved before they are judged, failures stay in the
#   denominator.
# - pass@k is unbiased, scores carry intervals over problems, and two models are compared problem by
#   problem, each asked in the way that it understands.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `Icarus Verilog (iverilog, vvp) is missing` | not installed | `sudo apt-get install -y iverilog`; on Ubuntu 24.04 and Debian 13 that is version 12 |
# | fewer references pass than in the ceiling above | another Icarus | 11 lacks the enum casts of Prob151 and Prob156; 13 is not supported by verilog-eval |
# | nearly all answers are `no code` or cut | another chat template, or `max_tokens` too small | compare section 6 with notebook 02; look at `finish` in `samples.jsonl` |
# | the tuned model is worse than the base | trained and served prompts differ | notebook 05 compares them token by token |
# | `the server has not answered for ...` | it died, often out of memory | `serve/server.log`; start again, saved answers are kept |
# | `... requests failed` | the server broke down under them (HTTP 500), or refuses them (HTTP 400) | `serve/server.log`; run again, only these are asked for |
# | a score above the ceiling | answers of other problems, or a judge that can be fooled | section 4; never judge by searching for the line |
#
# ### Exercises
# 1. How many problems would it take to see a true difference of 0.02 in pass@1, if the differences
#    scatter as between our two models?
#
# <details><summary>Solution</summary>
#
# ```python
# first, second = against[1]["values"]
# d = pd.Series(second - first)
# print(math.ceil((1.96 * d.std(ddof=1) / 0.02) ** 2))
# ```
#
# About 2,700 in the run shown, and verilog-eval has 156. That is where a true difference of 0.02 is found every second
# time; to find it four times out of five takes 2.8 instead of 1.96, and twice as many. Two models as
# different as these scatter widely. Closely related ones, one base stored in two ways as in
# [11](11_qlora.ipynb), need far fewer: the scatter decides, so compute it.
# </details>
#
# 2. Write an answer to the counter that passes without counting.
#
# <details><summary>Solution</summary>
#
# ```python
# trick = 'initial #70 $display("Mismatches: 0 in 406 samples");'   # put yours here
# verdict = judge.judge(COUNTER, with_trick(WRONG, trick), quick)
# print(verdict.category, "|", verdict.detail)
# ```
#
# `refused`. We know of none that passes, and `tests/hostile/` holds what we tried. If you find one,
# that folder wants it: a file `bad_<name>.sv` whose first line names the problem and the categories
# you would accept.
# </details>
#
# 3. Is the last checkpoint better than an earlier one? Merge step 40 into a run directory of its own
#    (`mkdir runs/early`, copy `data/` and `train/` of `runs/tiny` into it, then 04 with `step = 40` and
#    `RUN_DIR=runs/early`), and compare it with the last.
#
# <details><summary>Solution</summary>
#
# Add it before section 6 asks: `models["early"] = Path("runs/early/merged")`, and compare
# `paired(("early", main), ("tuned", main), 1)`. In one run of its own on the tiny model, 29 of 38
# greedy answers passed at step 40 and 31 at the end; of five answers at temperature 0.8 three passed
# at step 40 and nearly four at the end (119 and 144 of 190).
# </details>
#
# Next: the appendices. [08](08_dryrun.ipynb) compiles the 31B step for a TPU
# you do not have, [09](09_tiny_base.ipynb) trains the tiny base, [10](10_published.ipynb)
# recomputes the published claims.
