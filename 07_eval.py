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
# Ask the tuned and the base model for Verilog, simulate every answer against a reference, and say
# how much better one is than the other, and how sure we are.
#
# | | |
# |---|---|
# | **Needs** | a serving machine as in notebook 05, and Icarus Verilog (version 12 if there is a choice) |
# | **Takes** | `merged/` and `merge.json` from 04, `serve/options.json` from 05, `train/recipe.json` from 03, `data/meta.json` from 02, the base model, a verilog-eval folder |
# | **Makes** | `eval/{base,tuned}/samples.jsonl` and `summary.json`, `eval/comparison.json`, figures |
# | **Costs** | tiny: under 3 minutes on two cores. 31b: 8,112 answers per model, 27 to 49 USD on a v6e-8 with two starts of the server (our estimate: 600 tokens an answer, at the published 1,400 to 3,000 tokens/s) |
#
# The outputs shown are those of the tiny run on two CPU cores: a small benchmark of our own, in
# verilog-eval's file layout. Every answer is saved before it is judged, so a second run asks for
# nothing and needs no server. Terms are in the
# [glossary](https://github.com/OWNER/gemma4-on-tpu/blob/main/GLOSSARY.md).

# %% [markdown]
# ## Before we start
# Three cells that open every notebook: find the repository, install what is missing, and say what
# this machine is.

# %%
# Find the repository. Colab opens a notebook without it, so there we clone it.
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY_URL = os.environ.get("REPOSITORY_URL") or "https://github.com/OWNER/gemma4-on-tpu"
if os.environ.get("RUN_DIR"):  # relative to where you stand, not to the repository
    os.environ["RUN_DIR"] = os.path.abspath(os.environ["RUN_DIR"])
here = Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()
places = (here, here.parent, Path.cwd(), here / "gemma4-on-tpu")
root = next((place for place in places if (place / "helpers").is_dir()), None)
if root is None and "COLAB_RELEASE_TAG" not in os.environ:
    raise SystemExit(f"Run this inside the repository: git clone {REPOSITORY_URL}")
if root is None:
    subprocess.run(["git", "clone", "-q", "--depth=1", REPOSITORY_URL, "gemma4-on-tpu"], check=True)
    root = here / "gemma4-on-tpu"
os.chdir(root)
sys.path.insert(0, str(root))

# %%
# Install what is missing, on Colab or in the repository's own .venv; other Pythons stay untouched.
import helpers

helpers.install()

# %%
# What this machine is. Every result below was made with these versions.
helpers.machine()

# %% [markdown]
# ## 1. Settings
# A **plan** says how answers are drawn: which prompt, how many per problem, and how random. The
# first plan is the main one, which the figures show: 20 answers, as verilog-eval recommends. Beside
# it stand the 5 at temperature 0.8 of the published recipe, and one **greedy** answer (always the
# likeliest token). `official` is verilog-eval's own wording of the prompt; `ours` is the wording
# that training used. No plan has hints written after looking at the test set. How the models are
# served is not said here: 05 left its options in `serve/options.json`, and both are served so.

# %%
import hashlib
import itertools
import json
import math
import re
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace

import numpy as np
import openai
import pandas as pd
from IPython.display import display

from helpers import answers, chat, judge, server, stats, style, waves, weights

pd.set_option("display.max_colwidth", 110)


@dataclass(frozen=True)
class Plan:
    name: str
    prompt: str = "ours"  # or "official"
    n: int = 5            # answers per problem
    temperature: float = 0.8
    top_p: float = 0.95
    task: str = "spec-to-rtl"  # or "code-complete": the module's header is given


PUBLISHED, GREEDY = Plan("published"), Plan("greedy", n=1, temperature=0.0, top_p=1.0)
MANY, OFFICIAL = Plan("n=20", n=20, temperature=0.85), Plan("official", "official", 20, 0.85)
OFFICIAL_GREEDY = replace(GREEDY, name="official greedy", prompt="official")
COMPLETE = Plan("code-complete", "official", 5, task="code-complete")

# %%
@dataclass(frozen=True)
class Settings:
    # ── Benchmark ──
    problems: str = "{checkout}/dataset_spec-to-rtl"
    completion: str = "{checkout}/dataset_code-complete-iccad2023"  # "": no such plan
    disputed: tuple = ("Prob099", "Prob118", "Prob134", "Prob135", "Prob153")  # section 5
    # ── Sampling ──
    plans: tuple = (MANY, PUBLISHED, GREEDY, OFFICIAL, OFFICIAL_GREEDY, COMPLETE)
    max_tokens: int = 2048     # longer answers are cut, and counted as what they are
    in_flight: int = 64        # requests at once; vLLM computes them together
    patience: float = 900.0    # seconds to wait for a server that stopped answering
    base_model: str = ""       # where the base is on this machine; "": as in train/recipe.json
    # ── Statistics ──
    resamples: int = 10_000    # bootstrap draws
    other_runs: tuple = ()     # run directories of further training seeds, judged by this notebook


FULL = Settings()
E2B = replace(FULL, in_flight=32)
TINY = replace(FULL, problems="data/tiny_eval", completion="", disputed=(), max_tokens=192,
               patience=30.0, plans=(PUBLISHED, GREEDY, OFFICIAL_GREEDY))
cfg = helpers.choose({"31b": FULL, "e2b": E2B, "tiny": TINY})

# %% [markdown]
# ## 2. The benchmark
# Verilog describes hardware. A **module** is a box with inputs and outputs; `assign out = a & b;`
# is wiring that always holds, `always @(posedge clk) q <= d;` a register that takes a new value at
# each rising edge of the clock. Icarus Verilog compiles such text (`iverilog`) and simulates it
# (`vvp`), with a **testbench**, another module, that plays the outside world.
#
# A problem is three files: the **prompt**, a reference module `RefModule`, and a testbench `tb`
# that feeds both the reference and the answer, `TopModule`, with the same signals, compares their
# outputs (usually at both edges of a clock), and at its end prints `Mismatches: X in Y samples`.
# verilog-eval has 156 of them and asks in two ways: as a specification (spec-to-rtl, our main
# benchmark) and with the module's header to be completed (code-complete). We fetch it at a pinned
# commit, once, or take the checkout that the environment variable `VERILOG_EVAL_DIR` names. The
# cell shows one problem: its name, its prompt, its reference.

# %%
folder = judge.fetch(cfg.problems)
problems = judge.load_problems(folder)
tasks = {"spec-to-rtl": problems}
if cfg.completion:
    tasks["code-complete"] = judge.load_problems(judge.fetch(cfg.completion))
broken = [problem.name for each in tasks.values() for problem in each if problem.missing]
print(f"{len(problems)} problems in {folder}, {len(broken)} with a file missing", *broken)
print(f"\n{problems[1].name}\n{problems[1].prompt.strip()}\n\n{problems[1].reference.strip()}")

# %% [markdown]
# ## 3. One problem by hand
# The smallest problem we could write has a testbench of one screen. Four answers to it: a right
# one, one with the inputs exchanged, one that prints the winning line itself and stops, and
# prose. `judge.judge` compiles and simulates each in a folder of its own and gives one
# **category**.

# %%
MUX = judge.Problem("mux", "Choose b where sel is 1, else a.", """
module RefModule(input a, b, sel, output out);
  assign out = sel ? b : a;
endmodule""", """
module tb;
  reg a, b, sel;
  wire out_ref, out_dut;
  wire tb_mismatch = out_dut !== out_ref;
  integer i, bad = 0, n = 0;
  RefModule good1(.a, .b, .sel, .out(out_ref));
  TopModule top_module1(.a, .b, .sel, .out(out_dut));
  initial begin
    $dumpfile("wave.vcd"); $dumpvars(1, a, b, sel, out_ref, out_dut, tb_mismatch);
    for (i = 0; i < 8; i = i + 1) begin
      {sel, a, b} = i; #5 n = n + 1; if (tb_mismatch) bad = bad + 1; #5;
    end
    $display("Mismatches: %1d in %1d samples", bad, n); $finish;
  end
endmodule""")
RIGHT = "module TopModule(input a, b, sel, output out);\n  assign out = sel ? b : a;\nendmodule"
WRONG = RIGHT.replace("b : a", "a : b")
FORGED = WRONG.replace("endmodule", '  initial begin $display("Mismatches: 0 in 8 samples"); '
                                    "$finish; end\nendmodule")


def table_of(verdicts, **columns):
    """One row per verdict: category, detail, mismatches of samples."""
    rows = [(v.category, v.detail, v.mismatches, v.samples) for v in verdicts]
    frame = pd.DataFrame(rows, columns=["category", "detail", "mismatches", "samples"])
    for name, values in columns.items():
        frame.insert(0, name, values)
    return frame.astype({"mismatches": "Int64", "samples": "Int64"}).set_index(list(columns))


verdicts = [judge.judge(MUX, code) for code in (RIGHT, WRONG, FORGED, None)]
display(table_of(verdicts, answer=["right", "inputs exchanged", "prints the line itself", "prose"]))

# %% [markdown]
# What this means: only behaviour counts, and whoever looks for the line `Mismatches: 0` alone has
# given the third answer a pass. (`<NA>`: it did not come to a count.) The rules are verilog-eval's
# own: its command line, its 30 seconds (ours are seconds of CPU time, and three times that by the
# clock, since a busy machine would turn passes into timeouts), and its analyser's list of lines
# that fail an answer whatever comes after them, `TIMEOUT` among them.
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

# %% [markdown]
# ## 4. A judge that is hard to fool
# An answer is untrusted code that shares a program with the testbench. By a **system call** it can
# print (`$display`), stop the simulation (`$finish`) or write files; by a hierarchical name it can
# read the reference (`good1.out`: signal `out` of the instance `good1`); it can pull an input that
# both share. Looking for bad words in its text would miss macros and hit comments. So we take the
# names away, and look at what the *compiler* made of the answer: every system call, scope and
# driver of a signal is in Icarus's output, with the file it came from.

# %%
TRICKS = {
    "stop after one sample": "reg done; initial #6 $finish;",
    "the same, spelled \\$finish": "reg done; initial #6 \\$finish ;",
    "the same, by a macro": "`define END $finish\ninitial #6 `END;",
    "read the reference": "wire peek = good1.out;",
    "force the verdict": "initial force tb.tb_mismatch = 0;",
    "force an input of both": "initial force sel = 0;",
    "write a file": 'integer f; initial f = $fopen("/tmp/owned");',
    "never end": "reg x = 0; initial forever x = ~x;",
    "only mention $finish": '// $finish; good1.out\n  localparam S = "endmodule $finish";',
}


def with_trick(code, trick):
    """The module with one more line inside."""
    return code.replace("endmodule", f"  {trick}\nendmodule")


quick = judge.Limits(seconds=2)
verdicts = [judge.judge(MUX, with_trick(RIGHT, trick), quick) for trick in TRICKS.values()]
display(table_of(verdicts, trick=list(TRICKS)))
assert [v.passed for v in verdicts] == [False] * 8 + [True]
print("network cut off by:", " ".join(judge.network_guard()) or "nothing (not allowed here)")
attacks, honest = (len(list(Path("tests/hostile").glob(f"{kind}_*"))) for kind in ("bad", "good"))
print(f"tests/hostile: {attacks} attacks, none of which may pass, and {honest} honest modules")

# %% [markdown]
# What this means: all nine are the *right* design, and still only the last one passes. A trick that
# we did not think of must get past a second wall, so each kind of attack meets two, and a test
# takes down all but one of them to see that the one still holds.
#
# | an answer tries to | first wall | second wall |
# |---|---|---|
# | read, write, call or disable what belongs to testbench or reference | every name of theirs carries a secret drawn for this answer | in the compiled program, no reference crosses the border except by a port |
# | use or override their constants (`good1.P`, `defparam`) | the secret names | it must compile alone, with no declaration outside its module that has a name of theirs |
# | instantiate the reference, hang a module into the testbench (`bind`) | empty modules have the plain names | no scope of one side lies below the other |
# | change their text by macros, open comments or conditions | their copy holds no directive and no comment | whatever it makes of the text lacks the secret names |
# | drive an input | drivers and directions of all inputs are counted | no driver crosses the border |
# | stop early, print, write files, read arguments | calls not on a list of harmless ones are refused | a pass needs as many samples as the reference had, and the line needs a mark that nobody can guess; the simulator may write no file and has no network |
# | include files | the text names none | the compiler lists the files that it read |
# | never end, fill the memory | limits on processor time, memory and output | a limit by the clock |
#
# `$random` is refused because the testbench draws its stimuli from the same stream: an answer that
# draws, too, is tested with other samples than all the others. `tests/hostile` holds what we tried:
# single files, honest code that only looks suspicious, and a generator that writes over a thousand
# attacks, each for every problem of the small set. A test judges all of it, and shows that a
# hundred of them fool a judge that merely compiles an answer alone.

# %% [markdown]
# ## 5. The ceiling
# Before any model, we judge each problem's own reference. What even that cannot win, nobody can.
# In verilog-eval (spec-to-rtl, Icarus 11), **153 of the 156 references show 0 mismatches**: one
# testbench uses ports that its prompt never names (Prob099), two references need a cast that
# Icarus 11 lacks (Prob151, Prob156). Of these, **151 can be won**: the testbenches of Prob082 and
# Prob141 need nearly twice the time that their own watchdog allows, so they print `TIMEOUT` before
# their result, and the official analyser fails whatever follows that word.
#
# We follow the analyser, and section 10 counts the answers that only this rule fails. (In the small
# benchmark of this page all can be won.) Some problems are *disputed*: Prob099, and by an open pull
# request of verilog-eval's Prob118, 134, 135 and 153, whose references or prompts are said to be
# wrong; an issue doubts the initial value of a flip-flop. Scores are given over all problems, over
# the winnable, and without the disputed.

# %%
def judge_references(problems):
    """Judge every problem's reference as if a model had written it."""
    renamed = [(p, p.reference.replace("RefModule", "TopModule")) for p in problems]
    return judge.judge_many(renamed, text="references")


version = judge.icarus_version()
references = {task: judge_references(each) for task, each in tasks.items()}
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
    display(table_of([v for _, v in lost], problem=[name for name, _ in lost]))

# %% [markdown]
# ## 6. The prompt
# One frozen prompt for every model, rendered by the function that rendered the training data: the
# system message of `data/meta.json` and the problem's text. The published evaluation added hints
# about port and array names after a look at the failures, which tunes on the test set. The second
# setting is verilog-eval's official wording, so that results can be compared with others'. Where
# training kept the reasoning, the prompt asks every model to think first; `max_tokens` must then
# leave room for thoughts. Otherwise it ends with an empty thought channel, as in training (02).

# %%
def messages_for(problem, prompt, system):
    """The chat for a problem: our wording, or verilog-eval's."""
    if prompt == "ours":
        user = problem.prompt.strip()
    elif problem.interface:  # code-complete: the description as comments, then the given header
        system = ("You only complete chats with syntax correct Verilog code. End the Verilog "
                  "module code completion with 'endmodule'. Do not include module, input and "
                  "output definitions.")
        text, header, rest = problem.prompt.partition("module TopModule")
        described = "\n".join("// " + line for line in text.splitlines())
        user = ("// Implement the Verilog module based on the following description. Assume that "
                "signals are positive clock/clk triggered unless otherwise stated.\n"
                f"{described}\n\n{header}{rest}")
    else:
        system = ("You are a Verilog RTL designer that only writes code using correct Verilog "
                  "syntax.")
        user = (f"\nQuestion:\n{problem.prompt.strip()}\n\nEnclose your code with [BEGIN] and "
                "[DONE]. Only output the code snippet\nand do NOT output anything else.\n\n"
                "Answer:\n")
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": user}]


def all_prompts(tokenizer, tasks, plans, meta):
    """Prompt ids by (wording, problem), rendered as notebook 02 rendered the training data."""
    thinking, wanted = meta["reasoning"] == "kept", {(plan.prompt, plan.task) for plan in plans}
    return {(wording, problem): chat.prompt_ids(
                tokenizer, messages_for(problem, wording, meta["system"]), thinking)
            for wording, task in sorted(wanted) for problem in tasks[task]}


# %% [markdown]
# Three files must tell the same story before anything is asked: what is served must be what 04
# merged, and `meta.json` must still ask as training did. Otherwise a score would be some other
# model's, or the same model's under a prompt that it has never seen.

# %%
def check_story(merged, merge, meta, recipe):
    """Raise where the files of the merged model, or the prompt, are not those of the training."""
    if bad := weights.verify(merged, merge["files"]):  # reads 62 GB once, then remembers
        raise helpers.UserError(f"{merged} is not what 04 wrote ({bad}): run 04_merge and 05.")
    keys = ("system", "reasoning", "template_sha256")
    changed = [key for key in keys if meta[key] != recipe[key]]
    if changed:
        raise helpers.UserError(f"data/meta.json and train/recipe.json differ in {changed}: 02 ran "
                                "again after 03. Train again (03, 04, 05), or restore the data.")


merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
merge = helpers.read_json(helpers.require(helpers.run_dir("merge.json"), "04_merge.py"))
meta = helpers.read_json(helpers.require(helpers.run_dir("data", "meta.json"), "02_data.py"))
recipe = helpers.read_json(helpers.require(helpers.run_dir("train", "recipe.json"), "03_train.py"))
check_story(merged, merge, meta, recipe)
options = server.options()
base = helpers.require(cfg.base_model or recipe["base_path"], "01_setup.py")
models = {"tuned": merged, "base": base}
tokenizer = chat.load_tokenizer(merged)
assert chat.template_sha256(tokenizer) == meta["template_sha256"], "not the template of training"
prompts = all_prompts(tokenizer, tasks, cfg.plans, meta)
lengths = np.array([len(ids) for ids in prompts.values()])
print(tokenizer.decode(prompts["ours", problems[1]]))
print(f"\nlongest prompt {lengths.max()} tokens of {options.max_model_len}; "
      f"no room for an answer: {(lengths >= options.max_model_len).sum()} prompts")

# %% [markdown]
# ## 7. From answer to code
# Models wrap code in fences, think first, write a draft and then the module, or forget the
# closing fence. The rule is fixed before we look at answers, and it repairs nothing: thoughts are
# cut off, and of several fences the *last* one that defines `TopModule` counts, because
# corrections come after drafts and a usage example defines another module. A module with another
# name fails, as it would in a project.

# %%
fence, top = "```", "module TopModule; endmodule"
ANSWERS = {
    "fenced": f"Sure:\n{fence}verilog\n{top}\n{fence}\nIt is empty.",
    "draft, module, usage": f"{fence}\n{top} // draft\n{fence}\nBetter:\n{fence}sv\n{top} // 2\n"
                            f"{fence}\nUse:\n{fence}\nmodule user; TopModule t; endmodule\n{fence}",
    "thought before": f"<|channel>thought\n{fence}\n{top} // idea\n{fence}\n<channel|>{top}",
    "fence left open": f"{fence}verilog\nmodule TopModule;\n  wire a",
    "no fence, prose around": f"The answer is:\n{top}\nGood luck.",
    "official markers": f"[BEGIN]\n{top}\n[DONE]",
    "only prose": "A module that adds is easy to write.",
}
found = [answers.extract_code(answer) for answer in ANSWERS.values()]
display(pd.DataFrame(found, columns=["code", "how"], index=list(ANSWERS))[["how", "code"]])

# %% [markdown]
# ## 8. Answers are saved before they are judged
# Each answer is one line of `samples.jsonl`, written when it arrives, with a **key**: the hash of
# model, serving options that change answers, plan and prompt ids. Killed anywhere, the next run
# asks for what is missing and nothing else; another model, dtype or prompt gets other keys, so old
# answers are never mixed in. That also means that judging again never draws again: re-drawing only
# the failures, as the published script could, inflates pass@k. (We send no `seed`: vLLM on TPU has
# none per request.)

# %%
def made_by(folder, options, max_tokens):
    """What shapes an answer beside plan and prompt: the model, how it is served, and the limits."""
    names = ("engine", "kv_cache_dtype", "quantization", "implementation", "max_model_len", "flags")
    return [weights.fingerprint(folder), max_tokens, [getattr(options, name) for name in names]]


def plan_jobs(plans, tasks, prompts, maker):
    """Every answer we want: {(plan, problem's name, index): its request and key}."""
    jobs = {}
    for plan in plans:
        for problem in tasks[plan.task]:
            ids = prompts[plan.prompt, problem]
            what = json.dumps([maker, plan.temperature, plan.top_p, ids]).encode()
            job = {"ids": ids, "key": hashlib.sha256(what).hexdigest()[:16], "plan": plan,
                   "problem": problem}
            jobs |= {(plan.name, problem.name, index): job for index in range(plan.n)}
    return jobs


def read_samples(path, jobs):
    """The saved answers that belong to these jobs; damaged lines count as absent, and are said."""
    samples, damaged = {}, 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line.decode())
            place = row["plan"], row["problem"], row["index"]
            whole = isinstance(row["text"], str) and isinstance(row["tokens"], int)
            same = jobs.get(place, {}).get("key") == row["key"] and row["finish"] != "error"
        except (ValueError, TypeError, KeyError, RecursionError):
            whole = same = False
        damaged += not whole
        if whole and same:
            samples[place] = row
    if damaged:
        print(f"{path}: {damaged} damaged lines count as absent")
    return samples

# %% [markdown]
# A request can fail in three ways. A prompt that fills the context gets no answer and is never
# sent. If the server refuses one or breaks down (HTTP 400, 500), that is no answer of the model's:
# it is saved as an error, nothing is scored while one remains, and the next run asks again. If the
# server is gone, all wait for it, up to `patience`, and then the run ends in one line; what was
# saved stays. `skip_special_tokens=False` keeps a thought channel visible.

# %%
def ask(client, model, ids, plan, max_tokens, room):
    """One answer from /v1/completions: text, why it ended, tokens."""
    if room < 1:
        return {"text": "", "finish": "too long", "tokens": 0}
    try:
        reply = client.completions.create(
            model=model, prompt=ids, max_tokens=min(max_tokens, room), temperature=plan.temperature,
            top_p=plan.top_p, extra_body={"top_k": 0, "skip_special_tokens": False})
    except openai.APIStatusError as error:
        told = f"HTTP {error.status_code}: {error}"[:300]
        return {"text": "", "finish": "error", "tokens": 0, "error": told}
    choice = reply.choices[0]
    return {"text": choice.text.split(chat.TURN_END)[0], "finish": choice.finish_reason,
            "tokens": reply.usage.completion_tokens}


def ask_patiently(answer, patience, pause=1.0):
    """Call `answer()`; while the server cannot be reached, try again, for `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            return answer()
        except openai.APIConnectionError as error:
            if time.monotonic() > end:
                raise helpers.UserError(
                    f"the server has not answered for {patience:.0f} s. The answers so far are "
                    "saved: run this notebook again, and see serve/server.log.") from error
            time.sleep(pause)

# %% [markdown]
# vLLM computes all requests in flight as one batch, so we keep many open. The file is first
# rewritten without half lines and answers of other runs; then every answer is appended as it
# comes.

# %%
def sample(jobs, path, base_url, model, cfg, max_model_len):
    """Ask for every job that `path` does not hold yet, many at a time; return all answers."""
    samples, lock, stop = read_samples(path, jobs), threading.Lock(), threading.Event()
    missing = [place for place in jobs if place not in samples]
    client = openai.OpenAI(base_url=base_url + "/v1", api_key="unused", max_retries=2, timeout=600)
    progress = helpers.Progress(len(missing), f"{path.parent.name}: answers")

    def save():
        helpers.write_text(path, "".join(json.dumps(samples[place]) + "\n"
                                         for place in jobs if place in samples))

    def one(place):
        job = jobs[place]
        room = max_model_len - len(job["ids"])
        if stop.is_set():
            return
        row = ask_patiently(lambda: ask(client, model, job["ids"], job["plan"], cfg.max_tokens,
                                        room), cfg.patience)
        row = dict(zip(("plan", "problem", "index"), place)) | {"key": job["key"]} | row
        with lock, open(path, "a", encoding="utf-8") as file:
            samples[place] = row
            file.write(json.dumps(row) + "\n")
            progress.update()

    save()
    with ThreadPoolExecutor(cfg.in_flight) as pool:
        try:
            for done in as_completed([pool.submit(one, place) for place in missing]):
                done.result()
        finally:
            stop.set()  # after an error or an interrupt nothing new is asked
    save()
    return samples

# %% [markdown]
# ## 9. Ask both models
# First the tuned model, through the server that notebook 05 left running if it is still there,
# then the base model with the same function. A model whose answers are all saved needs no server.
# At the end none is left running.

# %%
def collect(label, folder, tasks, prompts, options, cfg):
    """All answers of one model, from disk where they are saved, else from a server."""
    jobs = plan_jobs(cfg.plans, tasks, prompts, made_by(folder, options, cfg.max_tokens))
    path = helpers.run_dir("eval", label, "samples.jsonl")
    saved = read_samples(path, jobs)
    print(f"{label}: {len(saved)} of {len(jobs)} answers are saved")
    if len(saved) == len(jobs):
        return saved
    server.prepare(options.engine, options.image)
    record = server.start_as(options, folder, owner=os.getpid())
    start = time.perf_counter()
    samples = sample(jobs, path, record["base_url"], options.name, cfg, options.max_model_len)
    took, new = time.perf_counter() - start, len(jobs) - len(saved)
    tokens = sum(samples[place]["tokens"] for place in jobs if place not in saved)
    print(f"{label}: {new} answers, {tokens} tokens in {took:.0f} s")
    return samples


def refuse_errors(replies):
    """A request that failed is no answer: raise, and say how to go on, while one remains."""
    failed = [row["error"] for rows in replies.values() for row in rows.values()
              if row["finish"] == "error"]
    if failed:
        raise helpers.UserError(f"{len(failed)} requests failed ({failed[0][:80]}). They are no "
                                "answers, so nothing is scored: run this notebook again, it asks "
                                "for these alone. The server's side is in serve/server.log.")


replies = {label: collect(label, path, tasks, prompts, options, cfg)
           for label, path in models.items()}
print("server stopped" if server.stop() else "no server to stop")
refuse_errors(replies)

# %% [markdown]
# ## 10. Judge them
# All cores judge at once, and identical answers are judged once: with a greedy plan and a model
# that is sure of itself that saves a third and more. An answer without code and a prompt that was
# too long stay in the table: nothing leaves the denominator.

# %%
def judge_answers(samples, tasks, plans):
    """One row per answer: its place, how the code was found, its category."""
    task, rows, candidates = {plan.name: plan.task for plan in plans}, [], []
    by_name = {(task, problem.name): problem for task, each in tasks.items() for problem in each}
    for (plan, name, index), row in samples.items():
        problem = by_name[task[plan], name]
        code, how = answers.extract_code(row["text"], problem.interface)
        candidates.append((problem, code))
        rows.append((plan, name, index, row["finish"], row["tokens"], how))
    verdicts = judge.judge_many(candidates)
    frame = pd.DataFrame(rows, columns=["plan", "problem", "index", "finish", "tokens", "how"])
    frame["category"] = [verdict.category for verdict in verdicts]
    frame["detail"] = [verdict.detail for verdict in verdicts]
    frame["late"] = [v.category == "timeout" and v.mismatches == 0 for v in verdicts]
    return frame.assign(passed=frame.category == "pass"), len(set(candidates))


judged = {}
for label, samples in replies.items():
    start = time.perf_counter()
    judged[label], different = judge_answers(samples, tasks, cfg.plans)
    print(f"{label}: {len(samples)} answers, {different} different, "
          f"judged in {time.perf_counter() - start:.1f} s")
main = cfg.plans[0].name  # the plan that figures and the comparison show
kinds = pd.DataFrame({label: frame[frame.plan == main].category.value_counts()
                      for label, frame in judged.items()})
kinds = kinds.reindex(judge.CATEGORIES).fillna(0).astype(int)
display(kinds.rename_axis(f"category, plan {main}"))
cut = {label: int((frame.finish == "length").sum()) for label, frame in judged.items()}
late = {label: int(frame.late.sum()) for label, frame in judged.items()}
print(f"answers cut at {cfg.max_tokens} tokens: {cut}\n"
      f"0 mismatches, failed by the testbench's own TIMEOUT alone: {late}")

# %% [markdown]
# What this means: the tiny base knows Verilog but follows no instructions, so nearly all of its
# answers hold no module (`no code`); the tuned model mostly fails by designs that run and differ
# (`mismatch`). Look here before any score: many answers cut would mean that `max_tokens` decides.
#
# ## 11. pass@k without bias
# **pass@k** is the chance that at least one of k answers passes. With n answers of which c pass,
# the fraction of k-subsets that hold no passing one is C(n-c, k) / C(n, k), and one minus it is
# an unbiased estimate: its mean over many runs is the true value. The tempting `1 - (1 - c/n)**k`
# is too low on average for k > 1. Below, the formula against counting every subset, and the means
# of both estimates against a known truth.

# %%
def pass_at_k(n, c, k):
    """Unbiased pass@k for a problem with c passing answers of n."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def by_counting(n, c, k):
    """The same by listing every choice of k answers."""
    chosen = list(itertools.combinations([True] * c + [False] * (n - c), k))
    return sum(map(any, chosen)) / len(chosen)


for n, k in itertools.product(range(1, 8), range(1, 8)):
    for c in range(n + 1 if k <= n else 0):
        assert math.isclose(pass_at_k(n, c, k), by_counting(n, c, k), abs_tol=1e-12)
p, n, k = 0.3, 5, 2
chances = [math.comb(n, c) * p**c * (1 - p)**(n - c) for c in range(n + 1)]
unbiased = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
tempting = sum(chance * (1 - (1 - c / n)**k) for c, chance in enumerate(chances))
print(f"truth {1 - (1 - p)**k:.4f} | unbiased {unbiased:.4f} | tempting {tempting:.4f}")

# %% [markdown]
# ## 12. How sure are we?
# Problems are a sample of what one could ask, so we **bootstrap** over them: draw as many
# problems with replacement, average, repeat, and keep the middle 95 % (`stats.interval`, by SciPy).
# Where all problems score alike there is nothing to vary; with 0 of n passing, the true share may
# still be about 3/n at 95 % (the *rule of three*). Two models that answered the same problems are
# compared **paired**, problem by problem. If they were equally good, each difference could as well
# have the other sign; the share of all choices of signs (**sign flips**) whose mean is at least as
# far from zero is p.

# %%
def interval(values, draws):
    """Mean over problems and its 95 % interval; the rule of three where all are 0, or all 1."""
    mean, low, high = stats.interval(values, draws)
    if low == high and mean in (0.0, 1.0):
        unseen = 1 - 0.05 ** (1 / len(values))
        low, high = (0.0, unseen) if mean == 0 else (1 - unseen, 1.0)
    return mean, low, high


print("0 of 38 and 0 of 156: up to {:.3f} and {:.3f}".format(
    *(interval([0.0] * n, 100)[2] for n in (38, 156))))

# %% [markdown]
# Do these see what the published evaluation missed? It reported pass@1 of 0.641 (trained on TPU)
# and 0.697 (on GPU) and called the gap normal variation. Its per-problem counts can be read off a
# figure of its repository (`data/published/`, digitised; they add up to its totals exactly).

# %%
def compare(first, second, draws):
    """Two models on the same problems: scores, their difference, intervals, p."""
    differences = np.asarray(second, float) - np.asarray(first, float)
    return {"first": interval(first, draws), "second": interval(second, draws),
            "difference": stats.interval(differences, draws), "p": stats.sign_flip_p(differences),
            "differ": int((differences != 0).sum())}


paper = pd.read_csv("data/published/eval_per_problem_digitized.csv")
published = {}
for k in (1, 5):
    tpu, gpu = ([pass_at_k(5, c, k) for c in paper[column]]
                for column in ("tpu_passed_of_5", "gpu_passed_of_5"))
    published[k] = compare(tpu, gpu, cfg.resamples)
    print("pass@{}: TPU {:.3f} [{:.3f}, {:.3f}], GPU {:.3f} [{:.3f}, {:.3f}]".format(
        k, *published[k]["first"], *published[k]["second"]))
    print("        difference {:+.3f} [{:+.3f}, {:+.3f}]".format(*published[k]["difference"]),
          f"p = {published[k]['p']:.4f}, {published[k]['differ']} problems differ")

# %% [markdown]
# What this means: at pass@1 the gap is no accident of these problems (p about 0.005), at pass@5
# it could well be. What neither number can say is what another *training* seed would give: each
# platform trained once.
#
# ## 13. The scores
# Every plan, over all problems, over those that can be won, and without the disputed. Further
# training seeds can be named in `other_runs`. pass@k is then estimated for each run and averaged
# per problem. Pooling passes and answers first would overstate it: a problem that one seed solves
# always and another never has a pass@5 of 0.5 on average, and 0.996 from 5 passes of 10.

# %%
def counts(frame, plan, names):
    """(passing answers, answers) per problem for one plan, in the order of `names`."""
    grouped = frame[frame.plan == plan].groupby("problem").passed
    table = pd.DataFrame({"c": grouped.sum(), "n": grouped.size()}).reindex(names)
    assert table.notna().all(axis=None), "an answer is missing from the denominator"
    return list(table.astype(int).itertuples(index=False, name=None))


def other_counts(folder, label, plan, names):
    """The same of another run directory, from its summary.json."""
    path = helpers.require(Path(folder) / "eval" / label / "summary.json", "07_eval.py")
    saved = helpers.read_json(path)["counts"].get(plan, {})
    if set(saved) != set(names):
        raise helpers.UserError(f"{path} has other problems, or no plan {plan!r}: "
                                "run 07_eval there.")
    return [tuple(saved[name]) for name in names]


def per_problem(runs, k):
    """pass@k of every problem: estimated run by run, then averaged over the runs."""
    return np.mean([[pass_at_k(n, c, k) for c, n in run] for run in runs], axis=0)


names = [problem.name for problem in problems]
runs = {(label, plan.name): [counts(judged[label], plan.name, names)] + [
            other_counts(folder, label, plan.name, names) for folder in cfg.other_runs]
        for label in models for plan in cfg.plans}
print(f"one seed 5 of 5, one 0 of 5: pass@5 {per_problem([[(5, 5)], [(0, 5)]], 5)[0]:.3f}, "
      f"pooled {pass_at_k(10, 5, 5):.3f}")

# %%
def scores(runs, names, winnable, disputed, task_of, draws):
    """One row per model, plan and k: over all, winnable and undisputed problems, and by seed."""
    rows = []
    undisputed = [not name.startswith(tuple(disputed)) for name in names]
    for (label, plan), each in runs.items():
        won = [name in winnable[task_of[plan]] for name in names]
        for k in (k for k in (1, 5, 10) if k <= min(n for run in each for _, n in run)):
            values, seeds = per_problem(each, k), [per_problem([run], k).mean() for run in each]
            rows.append((label, plan, f"pass@{k}", *interval(values, draws), values[won].mean(),
                         values[undisputed].mean(), min(seeds), max(seeds),
                         sum(n for run in each for _, n in run)))
    columns = ["model", "plan", "score", "all", "low", "high", "winnable", "undisputed",
               "lowest seed", "highest seed", "answers"]
    return pd.DataFrame(rows, columns=columns).set_index(["plan", "score", "model"]).sort_index()


task_of = {plan.name: plan.task for plan in cfg.plans}
board = scores(runs, names, winnable, cfg.disputed, task_of, cfg.resamples)
able = len(winnable["spec-to-rtl"])
print(f"{len(names)} problems, {able} winnable: no model can be above {able / len(names):.3f}; "
      f"{sum(name.startswith(cfg.disputed) for name in names)} are disputed; "
      f"training seeds: {1 + len(cfg.other_runs)}")
display(board.round(3))

# %% [markdown]
# What this means: compare the tuned model's `greedy` and `official greedy` rows, the same weights
# asked in two wordings. The tiny model has only ever seen ours, and under the official one its
# score is close to nothing, so a pass@k belongs to a model *and* a prompt, and whoever cites one
# must name both. The intervals are wide because the problems are few, and two models tend to fail
# on the same hard ones; a paired comparison takes that part out.
#
# ## 14. Base against tuned
# The same problems, one difference each. Where only one of the two models has any passing answer,
# the problem is **discordant**, and the list of those says what tuning gave and what it took. A
# p-value answers one question: would the difference hold on other problems? It knows nothing of
# another training seed, unless several were run, and nothing of another prompt.

# %%
def paired(runs, plan, k, draws):
    """Base and tuned on the same problems."""
    base, tuned = (per_problem(runs[label, plan], k) for label in ("base", "tuned"))
    return compare(base, tuned, draws) | {"values": (base, tuned)}


pairs = {k: paired(runs, main, k, cfg.resamples) for k in (1, 5) if k <= cfg.plans[0].n}
for k, result in pairs.items():
    print("pass@{}: tuned - base {:+.3f} [{:+.3f}, {:+.3f}],".format(k, *result["difference"]),
          f"p = {result['p']:.2g}, {result['differ']} of {len(names)} problems differ")
print("p is about problems; it ignores what another training seed would change"
      + (f" ({1 + len(cfg.other_runs)} are averaged)." if cfg.other_runs else " (one was run)."))
solved = {label: {name for name, (c, _) in zip(names, runs[label, main][0]) if c}
          for label in models}
gained = sorted(solved["tuned"] - solved["base"])
given_up = sorted(solved["base"] - solved["tuned"])
print(f"\nsolved only when tuned: {len(gained)}", textwrap.fill(" ".join(gained), 98), sep="\n")
print(f"solved only by the base: {len(given_up)}\n  {' '.join(given_up)}")

# %% [markdown]
# Three figures. First the scores with their intervals, under the ceiling of this benchmark and
# simulator, and the paired differences, one bar per problem (no bar: no difference), with the 95 %
# interval of their mean as a band.

# %%
def draw_scores(pairs, ceiling, where):
    """Left: base and tuned with 95 % intervals. Right: tuned minus base per problem, sorted."""
    fig, (left, right) = style.figure(9, 3.4, columns=2, width_ratios=(1, 1.2))
    for place, (k, result) in enumerate(pairs.items()):
        for shift, key, label, colour in ((-0.1, "first", "base", style.GREY),
                                          (0.1, "second", "tuned", style.BLUE)):
            mean, low, high = result[key]
            left.errorbar(place + shift, mean, [[mean - low], [high - mean]], fmt="o", capsize=4,
                          color=colour, label=label if place == 0 else None)
            left.text(place + 1.8 * shift, mean, f"{mean:.2f}", va="center", fontsize=9,
                      color=colour, ha="right" if shift < 0 else "left")
    left.axhline(ceiling, color=style.RED, linestyle="--", linewidth=1)
    left.text(-0.45, ceiling - 0.015, f"ceiling {ceiling:.2f}", color=style.RED, va="top",
              fontsize=9)
    left.set_xticks(range(len(pairs)), [f"pass@{k}" for k in pairs])
    left.set(ylabel="share of problems", xlim=(-0.5, len(pairs) - 0.3), ylim=(-0.03, 1.05),
             title="Tuning takes pass@1 from {:.2f} to {:.2f}".format(
                 pairs[1]["first"][0], pairs[1]["second"][0]))
    left.legend(loc="center right")
    values = sorted(np.subtract(pairs[1]["values"][1], pairs[1]["values"][0]))
    better, worse = sum(value > 0 for value in values), sum(value < 0 for value in values)
    right.bar(range(len(values)), values,
              color=[style.BLUE if value > 0 else style.RED for value in values])
    mean, low, high = pairs[1]["difference"]
    right.axhspan(low, high, color=style.SKY, alpha=0.35, linewidth=0)
    right.axhline(mean, color=style.BLACK, linewidth=1)
    right.text(0.98, 0.08, f"mean {mean:+.2f} [{low:+.2f}, {high:+.2f}]", fontsize=9, ha="right",
               transform=right.transAxes)
    right.set(title=f"{better} problems improve, {worse} get worse", xlabel="problems, sorted",
              ylabel="tuned minus base", ylim=(-1.05, 1.1), xticks=[])
    style.finish(fig, "07_scores", where + ". Bars and band: 95 %")


where = (f"measured, {helpers.size()}, {len(names)} problems x {cfg.plans[0].n} answers, "
         f"Icarus {version[0]}")
draw_scores(pairs, able / len(names), where)

# %% [markdown]
# Every answer of the main plan as one cell, problems ordered by what the tuned model makes of
# them. Full columns mean a model that is sure of itself; mixed ones are where more answers
# (pass@5) help.

# %%
COLOURS = dict(zip(judge.CATEGORIES, (style.GREEN, style.ORANGE, style.YELLOW, style.SKY,
                                        style.BLUE, style.PURPLE, style.BLACK, "#BBBBBB")))


def draw_answers(judged, plan, names, pairs, where):
    """A heat map: problems across, answers down, one panel per model."""
    from matplotlib.colors import ListedColormap
    scores = dict(zip(("base", "tuned"), (dict(zip(names, each)) for each in pairs[1]["values"])))
    order = sorted(names, key=lambda name: (-scores["tuned"][name], -scores["base"][name], name))
    fig, axes = style.figure(9, 3.9, rows=2, sharex=True)
    for ax, label, key in zip(axes, ("tuned", "base"), ("second", "first")):
        frame = judged[label][judged[label].plan == plan]
        grid = frame.pivot(index="index", columns="problem", values="category")[order]
        ax.pcolormesh(grid.map(judge.CATEGORIES.index).to_numpy(), edgecolors="white",
                      linewidth=0.6, vmin=-0.5, vmax=7.5,
                      cmap=ListedColormap(list(COLOURS.values())))
        ax.set(title=f"{label}: {frame.passed.sum()} of {len(frame)} answers pass; "
                     "pass@1 {:.2f} [{:.2f}, {:.2f}]".format(*pairs[1][key]),
               ylabel="answer", yticks=[])
        ax.grid(False)
    seen = set().union(*(frame[frame.plan == plan].category for frame in judged.values()))
    handles = [axes[0].plot([], [], "s", color=COLOURS[c], label=c)[0] for c in COLOURS
               if c in seen]
    fig.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9)
    few = len(order) <= 60  # more names would be too small to read
    axes[1].set_xticks(np.arange(len(order)) + 0.5 if few else [],
                       [name.split("_", 1)[1] for name in order] if few else [], rotation=90,
                       fontsize=8)
    style.finish(fig, "07_answers", where)


draw_answers(judged, main, names, pairs, where)

# %% [markdown]
# ## 15. Reading one failure
# A score says how often, a failure says why. We take one answer of the tuned model that runs and
# differs (or, if there is none, one of the base): prompt, answer, code, message, and the waveform
# around the first mismatch, which is where a designer would look: one line per signal, time to the
# right, values of several bits in hexadecimal, `_ref` what the reference gives and `_dut` (design
# under test) what the answer gives.

# %%
def pick_failure(judged, plan):
    """The failing answer that got furthest: a mismatch before an error, tuned before base."""
    frames = [judged[label].assign(model=label) for label in ("tuned", "base")]
    frame = pd.concat(frames)
    failing = frame[(frame.plan == plan) & ~frame.passed]
    rank = failing.category.map(judge.CATEGORIES.index)
    return None if failing.empty else failing.iloc[int(np.lexsort((np.arange(len(rank)), rank))[0])]


row = pick_failure(judged, main)
if row is None:
    problem, code = MUX, WRONG
else:
    problem = next(p for p in problems if p.name == row.problem)
    text = replies[row.model][main, row.problem, row["index"]]["text"]
    code, how = answers.extract_code(text, problem.interface)
    print(f"{row.model}, {row.problem}, answer {row['index']}: {row.category} ({row.detail})\n")
    print(f"PROMPT\n{problem.prompt.strip()}\n\nANSWER ({row.finish})\n{text.strip()}\n")
print(f"CODE\n{code}\n")
recorded = helpers.run_dir("eval", "failure.vcd")
recorded.unlink(missing_ok=True)
shown = judge.judge(problem, code, waves=recorded)
print("SIMULATOR\n" + shown.log.strip()[:1200])

# %%
if recorded.exists():
    changes = waves.read_vcd(recorded)
    told = [int(at) for at in re.findall(r"First mismatch occurred at time (\d+)", shown.log)]
    seen = [at for at, value in changes.get("tb_mismatch", []) if value == "1"]
    fig, ax = style.figure(9, 0.9 + 0.36 * min(13, len(changes)))
    waves.draw_waves(ax, changes, min(told or seen or [0]))
    ax.set_title(f"{problem.name}: the answer first differs at {min(told or seen or [0])} ps")
    style.finish(fig, "07_waveform", where + "; dashed: the testbench's first mismatch")
else:
    print("this answer never ran, so there is no waveform")

# %% [markdown]
# `tb_mismatch` is high while the two differ. The testbench looks at it when it samples, a little
# after it rose or at the next edge of the clock, and the dashed line is the first time it counted.
#
# ## 16. Save what was measured
# One summary per model with everything that is needed to repeat or combine it, and one comparison
# for whoever only wants the answer.

# %%
from importlib import metadata


def summary(label):
    """All that was measured for one model."""
    frame, rows = judged[label], board.reset_index()
    rows = rows[rows.model == label].drop(columns="model")
    return {
        "model": str(models[label]), "size": helpers.size(), "problems": str(folder),
        "scores": rows.to_dict("records"), "n_problems": len(names),
        "ceiling": {"winnable": able, "zero_mismatches": clean["spec-to-rtl"],
                    "lost": {name: f"{v.category}: {v.detail}" for name, v in lost}},
        "categories": {plan: group.category.value_counts().to_dict() for plan, group in
                       frame.groupby("plan")},
        "finish": frame.finish.value_counts().to_dict(), "tokens": int(frame.tokens.sum()),
        "late": late[label],
        "counts": {plan.name: {name: list(pair) for name, pair in
                               zip(names, runs[label, plan.name][0])} for plan in cfg.plans},
        "settings": asdict(cfg), "system": meta["system"], "served": options.measured(),
        "template_sha256": meta["template_sha256"],
        "versions": {"icarus": ".".join(map(str, version)), "openai": metadata.version("openai"),
                     "network_cut_off": bool(judge.network_guard())}}


comparison = {"plan": asdict(cfg.plans[0]), "n_winnable": able,
              "seeds": 1 + len(cfg.other_runs), "paired": {}}
for label, key in (("base", "first"), ("tuned", "second")):
    helpers.write_json(helpers.run_dir("eval", label, "summary.json"), summary(label))
    samples = sum(n for run in runs[label, main] for _, n in run)
    entry = {"n_problems": len(names), "n_samples": samples}
    for k, result in pairs.items():
        mean, low, high = result[key]
        entry |= {f"pass@{k}": mean, f"pass@{k}_interval": [low, high],
                  **{f"pass@{k}_{which}": float(board.loc[(main, f"pass@{k}", label), which])
                     for which in ("winnable", "undisputed")}}
    comparison[label] = entry
for k, result in pairs.items():
    mean, low, high = result["difference"]
    comparison["paired"][f"pass@{k}"] = {"difference": mean, "interval": [low, high],
                                         "p": result["p"], "problems_that_differ": result["differ"]}
comparison |= {"gained": gained, "lost": given_up}
helpers.write_json(helpers.run_dir("eval", "comparison.json"), comparison)
display(pd.DataFrame({label: comparison[label] for label in ("base", "tuned")}))
assert not server.record_path().exists(), "a server was left running"

# %% [markdown]
# ## Recap
# - The judge is verilog-eval's, made safe: what the compiler emitted decides what may run and
#   count.
# - The ceiling comes first, answers are saved before they are judged, failures stay in the
#   denominator.
# - pass@k is unbiased, scores carry intervals over problems, and two models are compared problem by
#   problem.
#
# ### What can go wrong
#
# | symptom | cause | fix |
# |---|---|---|
# | `Icarus Verilog (iverilog, vvp) is missing` | not installed | `sudo apt-get install -y iverilog`; on Ubuntu 24.04 and Debian 13 that is version 12 |
# | fewer references pass than in the ceiling above | another Icarus | 11 lacks the enum casts of Prob151 and Prob156; 13 is not supported by verilog-eval |
# | nearly all answers are `no code` or cut | another chat template, or `max_tokens` too small | compare section 6 with notebook 02; look at `finish` in `samples.jsonl` |
# | the tuned model is worse than the base | trained and served prompts differ | notebook 05 compares them id by id |
# | `the server has not answered for ...` | it died, often out of memory | `serve/server.log`; start again, saved answers are kept |
# | `... requests failed` | the server broke down under them (HTTP 500), or refuses them (HTTP 400) | `serve/server.log`; run again, only these are asked for |
# | a score above the ceiling | answers of other problems, or a judge that can be fooled | section 4; never judge by searching for the line |
#
# ### Exercises
# 1. How many problems would it take to see a true difference of 0.02 in pass@1, if the differences
#    scatter as in the published pair?
#
# <details><summary>Solution</summary>
#
# ```python
# d = (paper.gpu_passed_of_5 - paper.tpu_passed_of_5) / 5
# print(math.ceil((1.96 * d.std(ddof=1) / 0.02) ** 2))
# ```
#
# 565: nearly four times as many as verilog-eval has. And that is where a true difference of 0.02
# is found every second time; to find it four times out of five takes 2.8 instead of 1.96, and
# twice as many. A difference of two points on 156 problems is not a result.
# </details>
#
# 2. Write an answer to the multiplexer of section 3 that passes without computing the right output.
#
# <details><summary>Solution</summary>
#
# ```python
# trick = 'initial #70 $display("Mismatches: 0 in 8 samples");'   # put yours here
# verdict = judge.judge(MUX, with_trick(WRONG, trick), quick)
# print(verdict.category, "|", verdict.detail)
# ```
#
# `refused`. We know of none that passes, and `tests/hostile/` holds what we tried. If you find one,
# that folder wants it: a file `bad_<name>.sv` whose first line names the problem and the categories
# you would accept.
# </details>
#
# Next: the appendices. [08](08_dryrun.ipynb) compiles the 31B step for a TPU
# you do not have, [09](09_tiny_base.ipynb) trains the tiny base, [10](10_published.ipynb)
# recomputes the published claims.
