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
# **What does one question of this exam look like?** It consists of three files. A **prompt** asks for a *module*, which
# is a circuit with inputs and outputs. A **reference**, `RefModule`, is such a module, and it's right. A **testbench**,
# `tb`, plays the outside world: it feeds the same signals to the reference and to the model's answer, `TopModule`. It
# compares their outputs whenever the clock changes, and prints `Mismatches: X in Y samples`. Icarus Verilog compiles
# the files (`iverilog`) and runs the simulation (`vvp`).
#
# E2B and the 31B take NVIDIA's exam, *verilog-eval*, with 156 problems. The tiny model takes 38 problems of ours, in
# the same form.
#
# First the imports and the settings.

# %%
import math
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd
from IPython.display import SVG, display

import serving
import verilog
from helpers import chat, exam, records, remote, style, weights
from serving import options as serve_options, server
from tables import hardware
from verilog import asking, extraction, sandbox, scores
from verilog.asking import Plan
from verilog.client import Client

pd.set_option("display.max_colwidth", 90)


@dataclass(frozen=True)
class Settings:
    problems: str = "{checkout}/dataset_spec-to-rtl"
    completion: str = "{checkout}/dataset_code-complete-iccad2023"  # "": not asked
    disputed: tuple = ("Prob099", "Prob118", "Prob134", "Prob135", "Prob153")  # section 4
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
# **A question is a prompt, a module that's right, and a testbench that compares.**
#
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
# Only behavior counted: the forger got nothing for its line. Every answer ends up in one **category**: *pass*;
# *mismatch* (it runs and differs); *timeout* (30 seconds of CPU, or the testbench's own `TIMEOUT`); *runtime* (the
# simulation broke down); *compile* and *syntax* (Icarus doesn't accept it); *refused* (it opens files, or ends the
# simulation); *no code*; or *broken problem*, where the problem's own files don't compile, so it's nobody's fault. Our
# rules are verilog-eval's: we use its command line, and its list of messages that fail an answer whatever comes later.
#
# **An answer is graded by what it does, never by what it says.**
#
# ## 3. A judge that an answer cannot talk to
# **Why not just compile everything together?** Because an answer is untrusted code. In one program with
# testbench and reference it can print, stop the simulation, read the reference by its name
# (`good1.state`), or overwrite an input signal that both share. You could guard against each trick, but that's a
# race you'd lose one day. So here the answer never meets the reference, and the program that decides never
# meets the answer:

# %%
display(SVG("assets/figures/judge.svg"))

# %% [markdown]
# First comes the **exam**. The testbench asks its questions of the answer alone, and we record what the answer's
# outputs do. There's no reference in this program, and the testbench's names are chosen anew each time, so the
# answer can't know them. Then comes the **marking**: testbench and reference run together, and the second
# program gets the recording instead of the answer. Only this second program can pass the answer, and it doesn't
# contain a word of what the model wrote. Copying is hopeless, because what could be copied isn't in the room.
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
# **The program that decides never meets the answer.**
#
# ## 4. The ceiling
# **What's the best score anyone could get?** Not always 100%, because in some problems even the reference fails.
# So we judge the references first, to see which problems can be won at all.

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
            "what broke. Fix the problems, or choose others.")

# %% [markdown]
# In the tiny benchmark everything can be won. Of verilog-eval's 156 problems it's 151 on Icarus 11 and 152
# on Icarus 12. In its other task, code-complete (the module's header is given), it's 152 and 153 (measured).
#
# <details><summary><b>Why can a problem's own reference lose?</b></summary>
#
# Prob099's testbench connects ports that its interface doesn't have. Prob151 and Prob156 need a cast that
# Icarus 11 doesn't know. Prob082, Prob141 and, on Icarus 12, Prob156 print `TIMEOUT` first, and the
# official rules fail that. People also *dispute* five problems: Prob099, and by an open pull request
# Prob118, 134, 135 and 153. So we give scores with and without those.
# </details>
#
# **Know the ceiling before you read a score.**
#
# ## 5. Asking
# **How do you ask a model so that the score is fair?** There isn't one way, so we write each way down as a
# **plan**: which wording, how many answers to a problem, and how random. `temperature` sets how random the
# choice of each token is. `top_p` restricts it to the likeliest tokens, as many as together have that
# probability. **Greedy** means temperature 0: always the likeliest token.
#
# There are four wordings:
#
# - `trained chat` is the chat that the model was trained with. It's the main one.
# - `official` is verilog-eval's own chat (without the one to four examples that it can put first).
# - `two examples` shows two solved problems and lets the model continue.
# - `comment` writes the problem as the comment above a module, the way Verilog files have it.
#
# The last two are meant for a model that nobody has tuned. So we ask the base in these wordings, and the tuned
# model only once: by `comment`, greedily. That gives us a pair in which nothing differs but the weights.

# %%
FIVE, GREEDY = Plan("trained chat"), Plan("trained chat, greedy", n=1, temperature=0.0, top_p=1.0)
EXAMPLES = Plan("two examples", "examples", only="base")
COMMENT = Plan("comment", "comment", only="base")
COMMENT_GREEDY = replace(GREEDY, name="comment, greedy", prompt="comment")
OFFICIAL_GREEDY = replace(GREEDY, name="official, greedy", prompt="official")
SHORT = (FIVE, EXAMPLES, COMMENT, GREEDY, COMMENT_GREEDY, OFFICIAL_GREEDY)
LARGE = (FIVE, EXAMPLES, COMMENT, Plan("official", "official"), GREEDY, COMMENT_GREEDY,
         OFFICIAL_GREEDY, Plan("official, n=20", "official", 20, 0.85),
         Plan("code-complete", "official", task="code-complete"),
         Plan("thinking", "official", thinking=True, max_tokens=16384, only="base"))
plans = SHORT if cfg.short else LARGE
display(pd.DataFrame([{
    "plan": plan.name, "answers to a problem": plan.n, "temperature": plan.temperature,
    "asked of": plan.only or "both"} for plan in plans]))

# %% [markdown]
# Are we asking the right model? What's served has to be what 04 merged, and it has to be asked the way
# it was trained. So we first compare what 02, 03 and 04 have written
# down. The server settings come from 05's `serve/options.json`, but here the prefix cache is on, because several
# answers share a prompt.

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


def chat_ids(messages, thinking):
    """A chat's token ids, rendered as the training rows were."""
    return chat.prompt_ids(tokenizer, messages, thinking or meta.thinking)


def text_ids(text):
    """Plain text's token ids, after the token that begins a text."""
    ids, = chat.encode_texts(tokenizer, [text])
    return [tokenizer.bos_token_id, *ids]


prompts = asking.all_prompts(tasks, plans, meta.system, chat_ids, text_ids)
by_name = {problem.name: problem for problem in tasks["spec-to-rtl"]}
example = by_name.get(COUNTER.name, tasks["spec-to-rtl"][0])
names_of_wordings = {plan.prompt: plan.name.split(",")[0] for plan in reversed(plans)}
for wording, name in names_of_wordings.items():
    shown = tokenizer.decode(prompts[wording, False, example])
    print(f"── {name}\n{shown if len(shown) < 600 else '[...]' + shown[-300:]}\n")

# %% [markdown]
# That's one problem in each wording. Is it a fair question? It isn't if the answer stood in the training rows. 02
# compared the prompts, so here we compare the trained *answers* with the references, without comments, spaces and
# module names. But we can't know what a downloaded base has read. It has probably read HDLBits, the site that
# verilog-eval's problems come from.

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
# Now we ask both models everything. Each answer is one line of `samples.jsonl`, written as soon as it arrives. Its
# **key** is a hash of the model, the serving options, the plan and the prompt. If you kill this anywhere, the next
# run asks only for what's missing.

# %%
served = [getattr(options, name) for name in (
    "engine", "kv_cache_dtype", "quantization", "implementation", "environment", "max_model_len",
    "flags")]


def answers_of(label, path, plans, tasks, prompts, folder=""):
    """All answers of one model, from disk where they are saved, else from a server."""
    wanted = [plan for plan in plans if plan.only in ("", label)]
    maker = [weights.fingerprint(path), cfg.max_tokens, served]
    jobs = asking.plan_jobs(wanted, tasks, prompts, maker)
    file = helpers.run_dir("eval", folder, label, "samples.jsonl")
    saved = asking.read_samples(file, jobs)
    if len(saved) == len(jobs):
        return saved
    progress = helpers.Progress(len(jobs) - len(saved), f"{label}: answers", every=30.0)
    place = helpers.run_dir("serve")
    with serving.running(replace(options, model=str(path)), place) as url:
        client = Client(url, options.name, options.max_model_len, chat.TURN_END, cfg.patience,
                        alive=lambda: server.is_alive(place))
        return asking.sample(jobs, file, client, cfg.max_tokens, cfg.in_flight,
                             lambda done, total: progress.update())


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
# Our rule takes the last fence, so the answer passes. verilog-eval's rule takes the first, so it's a mismatch. If
# the right module comes first, it's the other way around. (verilog-eval asks for code between [BEGIN] and [DONE], so by
# its rule a fence between them is a syntax error, and an answer without [DONE] has no code.)
# </details>

# %%
judged = {label: scores.judge_answers(samples, tasks, plans) for label, samples in replies.items()}
for label, frame in judged.items():
    odd = [f"{count} {what}" for what, count in scores.oddities(frame).items()]
    print(f"{label}: {len(frame)} answers; {', '.join(odd)}")

# %% [markdown]
# Look at these counts first. If they aren't zero, our limits and rules may have cost the model points.
#
# Whom do we compare with? The tuned model's **rival** is the base, asked in the wording with the highest pass@1 (the
# share of answers that pass). We choose that wording by its score on these same problems, and the best of several
# scores is partly luck, so this choice favors the base a little. Here's every answer of both, and the base's in the
# trained chat:

# %%
main = FIVE.name
wordings = [plan.name for plan in plans if plan.n == FIVE.n and plan.task == FIVE.task]
base_passes = judged["base"].groupby("plan").passed.mean()
rival = base_passes[wordings].idxmax()
where = f"measured, {helpers.size()}, {len(tasks['spec-to-rtl'])} problems, Icarus {version}"
strips = [exam.Strip(label, plan, judged[label].query("plan == @plan"))
          for label, plan in dict.fromkeys([("tuned", main), ("base", rival), ("base", main)])]
exam.draw_answers(strips, "07_answers", where)
categories = pd.concat(judged).groupby([pd.Grouper(level=0), "plan"]).category.value_counts()
display(categories.unstack(fill_value=0).sort_values("pass", ascending=False))

# %% [markdown]
# If a column has only one kind of answer, the model is sure of itself there. If it's mixed, another try would help. And
# a lot of *no code* means that the model doesn't follow this wording.
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
# Try one by hand: 3 of 5 answers pass, so what's pass@2? There are 10 pairs, and only one of them holds both
# failures. `verilog.pass_at_k(5, 3, 2)` has to agree.
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


problems = tasks["spec-to-rtl"]
names = [problem.name for problem in problems]
runs = {(label, plan.name): scores.counts(judged[label], plan.name, names) for label in models
        for plan in plans if plan.only in ("", label)}
tuned_scores = scores.per_problem(runs["tuned", main], k=1)  # the share of a problem's answers
mean, low, high = bootstrap(tuned_scores)
print(f"tuned, {main}: pass@1 {mean:.1%} ({low:.1%} to {high:.1%})")

# %% [markdown]
# <details><summary><b>Not one of 38 problems passes. Is the true share zero?</b></summary>
#
# Not necessarily. With 0 of 38, the exact 95% interval (Clopper and Pearson's) reaches up to 9%. A bootstrap can't
# show that, because all its samples are zero, too. So if all scores are 0, or all are 1, the table takes the exact
# interval.
# </details>
#
# And here are all the scores, in percent with their intervals:

# %%
disputed = np.array([name.startswith(cfg.disputed) for name in names])
board = scores.board(runs, {"undisputed": ~disputed, "winnable": winnable["spec-to-rtl"]})
scores.percents(board)

# %% [markdown]
# Compare the base in the row `trained chat` with the base in the row `comment`: the same weights, asked
# differently. **A pass@k belongs to a model *and* a wording, so whoever quotes one must name both.**
#
# ## 9. Two models on the same problems
# **Is the tuned model really better, or was it lucky?** Both models met the same problems and fail on the
# hard ones. So we compare **pairs**: we take one difference for each problem, and then it doesn't matter much how hard
# the problem is. If the models were equally good, each difference could just as well have the other sign. So we flip
# signs at random many times, and p is the share of these **sign flips** whose mean is at least as far from zero as
# the mean we saw.
#
# <details><summary><b>Which base is the fair rival: the one that's asked as the tuned model is, or the one that's
# asked in its favorite way?</b></summary>
#
# Compare with both. If the base is asked in the trained wording, the tuned model may win only because it has learned
# that wording. If it has learned anything else, that shows against the base at its best.
# </details>

# %%
def sign_flips(differences, times=10_000):
    """How often a mean as far from zero comes from signs alone."""
    signs = np.random.default_rng(0).choice([-1, 1], (times, len(differences)))
    means = (signs * differences).mean(axis=1)
    as_far = np.abs(means) >= abs(np.mean(differences)) - 1e-9
    return (1 + as_far.sum()) / (1 + times)


differences = tuned_scores - scores.per_problem(runs["base", rival], k=1)
mean, low, high = bootstrap(differences)
print(f"tuned minus base, asked by {rival}: {100 * mean:+.1f} points "
      f"({100 * low:+.1f} to {100 * high:+.1f}), p = {sign_flips(differences):.2g}")

# %% [markdown]
# `verilog.compare` does the same with SciPy (and up to 100,000 flips, so its smallest p is 2e-05). Here it compares
# the tuned model with the base in every sampled wording. Below these are the greedy pairs, where both models are
# asked in the same wording:

# %%
def paired(base_plan, tuned_plan, k=1):
    """Base and tuned model, each asked by a plan, on the same problems."""
    return verilog.compare(scores.per_problem(runs["base", base_plan], k),
                           scores.per_problem(runs["tuned", tuned_plan], k))


same_wording = [(plan.name, plan.name) for plan in plans if plan.n == 1 and not plan.only]
pairs = {(base_plan, tuned_plan): paired(base_plan, tuned_plan)
         for base_plan, tuned_plan in [*((name, main) for name in wordings), *same_wording]}
best = pairs[rival, main]
display(scores.pairs_table(pairs).style.hide(axis="index"))
for wording in (main, "comment"):
    base, tuned = (sum(passed for passed, _ in runs[label, f"{wording}, greedy"])
                   for label in ("base", "tuned"))
    print(f"greedily, asked by {wording}: base {base} of {len(names)}, tuned {tuned}")
five_tries = scores.pairs_table({(rival, main): paired(rival, main, FIVE.n)}).iloc[0]
print(f"with {FIVE.n} tries each, base by {rival}, tuned by {main}: base {five_tries.base}%, "
      f"tuned {five_tries.tuned}%, difference {five_tries.difference}: {five_tries.so}")

# %%
scored = [exam.Scored("base", plan, pairs[plan, main]["first"])
          for plan in base_passes[wordings].sort_values().index]
scored.append(exam.Scored("tuned", main, best["second"]))
for plan, _ in same_wording[:2]:
    scored.append(exam.Scored("base", plan, pairs[plan, plan]["first"], greedy=True))
    scored.append(exam.Scored("tuned", plan, pairs[plan, plan]["second"], greedy=True))
fig, (above, below) = style.figure(7, 7, rows=2, height_ratios=(1.2, 1))
exam.draw_scores(above, scored, np.mean(winnable["spec-to-rtl"]))
above.set_title(f"pass@1: base asked well {best['first'][0]:.0%}, tuned {best['second'][0]:.0%}")
exam.draw_differences(below, best, rival)
style.finish(fig, "07_scores", where + ". Bars and dotted lines: 95%")
print(f"Base, asked by {rival}: {1 - best['first'][0]:.0%} of the answers fail. "
      f"Tuned, asked by {main}: {1 - best['second'][0]:.0%}.")

# %% [markdown]
# **Tuning taught the tiny model one thing for sure, and perhaps a second.** For sure, it taught the model to answer:
# look at the row in which both are asked in the chat that the model was trained with.
#
# The second thing would be to prefer right code to wrong code. The base has read a corpus in which we broke 40% of
# the modules ([09](09_tiny_base.ipynb)), and it writes what it has read. The training rows held no new kind of
# module. So if the tuned model fails less often than the base in its favorite wording, we think that fine-tuning mostly
# changed *which* of two known versions the model writes. The line about five tries tests that: with five tries, even a
# base that chooses badly has often written the right module once, so there the gain should shrink.
#
# Is the difference real? The row with the rival says what this run's interval says. Before this run we sampled answers
# twice, from the same two models ([LOG](https://github.com/OWNER/gemma4-on-tpu/blob/main/LOG.md)). The difference
# was 11 points both times, but one interval excluded zero (2 to 21) and the other included it (−1 to 22). So 38
# problems with five answers each can't quite tell 11 points from luck.
#
# The greedy pair by `comment` is the cleanest one: nothing differs but the weights, and the wording is one that no
# training row had. If its interval leaves zero out, that speaks for the second thing. Also compare the tuned model's
# two greedy scores, because a model isn't always at its best in the chat it was tuned for.
#
# A p-value answers one question: how often would equally good models differ this much by chance? It
# knows nothing of another wording or another training seed. [11](11_qlora.ipynb), section 2, shows a difference of ten
# points with p = 0.002 that disappeared with two more seeds.
#
# **At 31B** the strongest rival is probably the base with *thinking* switched on, and the full list of plans asks it,
# too. Here's what others have published nearby
# ([`neighbors.csv`](https://github.com/OWNER/gemma4-on-tpu/blob/main/data/published/neighbors.csv)):
# a 31B tuned without reasoning reaches 64 to 70%, GPT-4o 63%, and a 7B trained to reason 69%. We know of no
# published score of the base with thinking. And the best models are close to verilog-eval's ceiling, and have probably
# [seen its problems](https://arxiv.org/abs/2503.13572).
#
# **Say what your interval says, and no more.**
#
# ## 10. Why did it fail?
# **What does a wrong answer look like from the inside?** A score says how often, and a failure says why. We take the
# shortest module of the tuned model that runs and differs. The simulator has recorded its signals (as a *VCD*
# file), and the table shows them up to the first comparison that fails. A column is a moment, `_ref` is the
# reference's output, and `_dut` is the answer's ("device under test").

# %%
wrong = [(COUNTER, WRONG)]  # in case that no answer of the model is like that
failing = judged["tuned"].query("plan == @main and category == 'mismatch'")
if len(failing):
    wrong = [(by_name[row.problem], verilog.extract_code(
        replies["tuned"][main, row.problem, row["index"]]["text"]).code)
        for _, row in failing.iterrows()]
problem, code = min(wrong, key=lambda pair: len(pair[1]))
waves = helpers.run_dir("eval", "failure.vcd")
waves.unlink(missing_ok=True)
failed = verilog.judge(problem, code, waves=waves)
print(problem.prompt.strip(), "\n")
for number, line in enumerate(code.splitlines(), 1):
    print(f"{number:2}  {line}")
print(f"\n{failed.category}: {failed.detail}")
if waves.exists():  # verilog-eval's testbenches record them; another one may not
    signals = scores.before_first_mismatch(scores.waveform(waves), failed.log)
    display(signals.tail(6).T)
    compared = signals.iloc[-1]
    for name in scores.wrong_outputs(compared):
        print(f"In the last column, {name} should be {compared[f'{name}_ref']}, and the answer "
              f"gives {compared[f'{name}_dut']}.")

# %% [markdown]
# **Which line of the code does it?** Take the output that's named below the table, and find the lines that write to
# it. Put the inputs of the last column (and, if there's a clock, of the ones before) into these lines, and compute
# by hand. If you get the answer's value, you've found the line. (You can open `eval/failure.vcd` in GTKWave or
# Surfer, too.)
#
# <details><summary><b>What patterns should I look for?</b></summary>
#
# - An `x` or `z` (no value) in the answer's row: perhaps it has a port that nobody asked for, or uses a signal that no
#   line writes to.
# - Only 0 or 1 where a number is due: a comparison such as `a > b` has one bit. To choose, write `a > b ? a : b`.
# - The right value in a later or an earlier column: there's a register too many, or one too few.
# - Right everywhere but after a reset, or the exact opposite: a condition is missing, or it's upside down.
# - Off by one, or wrong only for large numbers: a constant, or a width that cuts the highest bits.
#
# </details>
#
# <details><summary><b>How do I know that I'm right?</b></summary>
#
# Fix the line and judge again. If it prints `pass`, you've found it.
#
# ```python
# fixed = code.replace("what is wrong", "what is right")
# print(verilog.judge(problem, fixed).category)
# ```
#
# </details>
#
# **Look at one failure before you believe a score.**
#
# ## 11. And if your task isn't Verilog?
# **What has to change for another task?** Little. A benchmark is one object, `verilog.Benchmark`. It holds the
# problems, and says how an answer is read and how it's graded. `verilog.questions("mine.jsonl", score=...)` makes
# one from lines with `question` and `answer`. You write the score, a function, and you get the same
# intervals and the same pairing. [Own data](own_data.ipynb) has a whole example, and shows how a score can flatter.
#
# <details><summary><b>The whole of it</b></summary>
#
# Name the file in 02's `evaluation`, too, so that its questions stay out of your training rows. Then ask both
# models. (The code uses the variables of this page.) The answers get a folder of their own, `eval/mine/`.
#
# ```python
# def score(question, answer, wanted):
#     return float(answer.lower() == wanted.lower())
#
#
# mine = verilog.questions("mine.jsonl", score)
# my_tasks = {"mine": mine.problems}
# my_plans = [replace(GREEDY, name="mine", task="mine")]
# asked = asking.all_prompts(my_tasks, my_plans, meta.system, chat_ids, text_ids)
# marks = {}
# for label, path in models.items():
#     samples = answers_of(label, path, my_plans, my_tasks, asked, "mine")
#     marks[label] = scores.grade(mine, scores.texts_of(samples, "mine"))
# print(verilog.compare(marks["base"], marks["tuned"]))
# ```
#
# </details>
#
# <details><summary><b>What did the model forget, by a test that others use, too?</b></summary>
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
# its numbers with ours. Score the base, too: what was forgotten is the difference.
#
# </details>
#
# **Try your score on a bad answer first: a score that nobody fails compares nothing.**
#
# ## 12. Save what was measured
# **What do you keep?** We write a summary and a CSV in verilog-eval's own form for each model, and one file that
# compares the two.

# %%
about = {"settings": asdict(cfg) | {"plans": [asdict(plan) for plan in plans]},
         "n_problems": len(names), "served": options.measured(), "icarus": version}
comparison = {"model_hash": options.model_hash, "plan": asdict(FIVE), "rival": rival,
              "n_winnable": int(sum(winnable["spec-to-rtl"])),
              "against": {name: {"difference": pairs[name, main]["difference"][0],
                                 "interval": pairs[name, main]["difference"][1:],
                                 "p": pairs[name, main]["p"]} for name in wordings}}
for label, frame in judged.items():
    mine = {plan: counts for (model, plan), counts in runs.items() if model == label}
    scores.per_problem_csv(frame, helpers.run_dir("eval", label, "per_problem.csv"))
    helpers.write_json(helpers.run_dir("eval", label, "summary.json"),
                       about | scores.summary(frame, mine, names))
    at_k = board.loc[main].xs(label, level="model")["all"].to_dict()
    comparison[label] = at_k | {"n_problems": len(names)}
helpers.write_json(helpers.run_dir("eval", "comparison.json"), comparison)

# %% [markdown]
# **Keep the answers. You can compute a score again, but sampled answers never come back.**
#
# ## Recap
# - The answer never meets the reference, and what it prints decides nothing.
# - The ceiling comes first, answers are saved before they're judged, and an answer without code is a failed answer.
# - Scores carry intervals over problems. Models are compared problem by problem, and the rival is the base
#   in its favorite wording.
#
# What can go wrong: [TROUBLE.md](https://github.com/OWNER/gemma4-on-tpu/blob/main/docs/TROUBLE.md).
#
# ### Exercises
# 1. How many problems would you need to detect a difference of 2 points, if differences vary as much as here? An
#    interval's half width shrinks with the square root of the number of problems. (If it's 11.3 points with 38
#    problems, you need about 1,213.)
#
# <details><summary>Solution</summary>
#
# ```python
# _, low, high = best["difference"]
# half_width = (high - low) / 2
# print(round(len(names) * (half_width / 0.02) ** 2))
# ```
#
# With so many problems you'd find the difference every second time. To find it four times out of five, you need twice
# as many: (2.8 / 1.96)² = 2. For comparison, verilog-eval has 156 problems.
# </details>
#
# 2. Write an answer to the counter that passes without counting: `verilog.judge(COUNTER, with_trick(WRONG,
#    "..."), quick)`. We don't know of one. If you find it, `tests/hostile/` wants it.
#
# Next: the appendices. [08](08_dryrun.ipynb) compiles the 31B step for a TPU that you don't have,
# [09](09_tiny_base.ipynb) trains the tiny base, [10](10_published.ipynb) recomputes the published claims.
