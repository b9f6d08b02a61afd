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
# | **Takes** | `merged/` from 04, `train/recipe.json` from 03, `data/meta.json` from 02, the base model, a verilog-eval folder |
# | **Makes** | `eval/{base,tuned}/samples.jsonl` and `summary.json`, `eval/comparison.json`, figures |
# | **Costs** | tiny: under 3 minutes on two cores. 31b: 7,332 answers per model, 25 to 45 USD on a v6e-8 with two starts of the server (our estimate: 600 tokens an answer, at the published 1,400 to 3,000 tokens/s) |
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
here = Path.cwd()
places = (here, here.parent, here / "gemma4-on-tpu")
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
# published recipe drew 5 at temperature 0.8; verilog-eval recommends 20, and one **greedy**
# answer (always the likeliest token). `official` is verilog-eval's own wording of the prompt;
# `ours` is the wording that training used. No plan has hints written after looking at the test
# set.

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
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import numpy as np
import openai
import pandas as pd
from IPython.display import display

from helpers import answers, chat, judge, server, style, waves

pd.set_option("display.max_colwidth", 110)


@dataclass(frozen=True)
class Plan:
    name: str
    prompt: str = "ours"  # or "official"
    n: int = 5            # answers per problem
    temperature: float = 0.8
    top_p: float = 0.95


PUBLISHED, GREEDY = Plan("published"), Plan("greedy", n=1, temperature=0.0, top_p=1.0)
MANY, OFFICIAL = Plan("n=20", n=20, temperature=0.85), Plan("official", "official", 20, 0.85)
OFFICIAL_GREEDY = replace(GREEDY, name="official greedy", prompt="official")

# %%
@dataclass(frozen=True)
class Settings:
    # ── Benchmark ──
    problems: str = "{checkout}/dataset_spec-to-rtl"  # or dataset_code-complete-iccad2023
    # ── Sampling ──
    plans: tuple = (PUBLISHED, GREEDY, MANY, OFFICIAL, OFFICIAL_GREEDY)
    max_tokens: int = 2048     # longer answers are cut, and counted as what they are
    in_flight: int = 64        # requests at once; vLLM computes them together
    patience: float = 900.0    # seconds to wait for a server that stopped answering
    # ── Serving: as in notebook 05, whose running server is then used ──
    engine: str = "tpu-docker"
    name: str = "gemma4-verilog"
    base_model: str = ""       # where the base is on this machine; "": as in train/recipe.json
    port: int = 8000
    max_model_len: int = 16_384
    tensor_parallel: int = 8
    timeout: float = 3600.0
    # ── Statistics ──
    resamples: int = 10_000    # bootstrap draws; sign flips are 10 times as many
    other_runs: tuple = ()     # run directories of further training seeds, to be combined


FULL = Settings()
E2B = replace(FULL, tensor_parallel=1, max_model_len=4096, in_flight=32)
TINY = replace(FULL, problems="data/tiny_eval", max_tokens=192, in_flight=64, patience=30.0,
               plans=(PUBLISHED, GREEDY, OFFICIAL_GREEDY),
               engine="cpu", port=0, tensor_parallel=1, max_model_len=1024, timeout=600.0)
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
# verilog-eval has 156 of them in two wordings; we fetch it at a pinned commit, once, or take the
# checkout that the environment variable `VERILOG_EVAL_DIR` names. The cell shows one problem: its
# name, its prompt, its reference.

# %%
folder = judge.fetch(cfg.problems)
problems = judge.load_problems(folder)
broken = [problem.name for problem in problems if problem.missing]
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
# benchmark of this page all can be won.) Scores are given over all problems and over the winnable.

# %%
def judge_references(problems):
    """Judge every problem's reference as if a model had written it."""
    renamed = [(p, p.reference.replace("RefModule", "TopModule")) for p in problems]
    return judge.judge_many(renamed, text="references")


version = judge.icarus_version()
references = judge_references(problems)
winnable = {p.name for p, v in zip(problems, references, strict=True) if v.passed}
clean = sum(v.mismatches == 0 for v in references)
print(f"Icarus {version[0]}.{version[1]}: {clean} of {len(problems)} references show 0 mismatches, "
      f"{len(winnable)} problems can be won")
if version < (12,):
    print("Icarus is older than 12, which verilog-eval asks for: some references may not compile.")
lost = [(p.name, v) for p, v in zip(problems, references, strict=True) if not v.passed]
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


def all_prompts(tokenizer, problems, plans, meta):
    """Prompt ids by (wording, problem), rendered as notebook 02 rendered the training data."""
    thinking = meta["reasoning"] == "kept"
    return {(wording, problem.name): chat.prompt_ids(
                tokenizer, messages_for(problem, wording, meta["system"]), thinking)
            for wording in sorted({plan.prompt for plan in plans}) for problem in problems}


# %%
merged = helpers.require(helpers.run_dir("merged"), "04_merge.py")
meta = helpers.read_json(helpers.require(helpers.run_dir("data", "meta.json"), "02_data.py"))
recipe = helpers.read_json(helpers.require(helpers.run_dir("train", "recipe.json"), "03_train.py"))
base = helpers.require(cfg.base_model or recipe["base_path"], "01_setup.py")
models = {"tuned": merged, "base": base}
tokenizer = chat.load_tokenizer(merged)
assert chat.template_sha256(tokenizer) == meta["template_sha256"], "not the template of training"
prompts = all_prompts(tokenizer, problems, cfg.plans, meta)
lengths = pd.Series({key: len(ids) for key, ids in prompts.items()}).unstack(0)
print(tokenizer.decode(prompts["ours", problems[1].name]))
print(f"\nlongest prompt {int(lengths.max().max())} tokens of {cfg.max_model_len}; "
      f"no room for an answer: {int((lengths >= cfg.max_model_len).sum().sum())} prompts")

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
# model, plan and prompt ids. Killed anywhere, the next run asks for what is missing and nothing
# else; another model or prompt gets other keys, so old answers are never mixed in. That also
# means that judging again never draws again: re-drawing only the failures, as the published
# script could, inflates pass@k. (We send no `seed`: vLLM on TPU has none per request.)

# %%
def fingerprint(folder):
    """Hash of a model folder: sizes of its files, and 64 blocks of 4 KiB from each."""
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(folder).iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for block in range(64):
                file.seek(size * block // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()


def plan_jobs(plans, problems, prompts, model, max_tokens):
    """Every answer we want: {(plan, problem, index): its request and key}."""
    jobs = {}
    for plan, problem in itertools.product(plans, problems):
        ids = prompts[plan.prompt, problem.name]
        what = json.dumps([model, asdict(plan), max_tokens, ids]).encode()
        job = {"ids": ids, "key": hashlib.sha256(what).hexdigest()[:16], "plan": plan}
        jobs |= {(plan.name, problem.name, index): job for index in range(plan.n)}
    return jobs


def read_samples(path, jobs):
    """The saved answers that belong to these jobs; half a line, as a kill leaves it, is skipped."""
    samples = {}
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        with suppress(json.JSONDecodeError):
            row = json.loads(line)
            place = row["plan"], row["problem"], row["index"]
            if place in jobs and jobs[place]["key"] == row["key"] and row["finish"] != "error":
                samples[place] = row
    return samples

# %% [markdown]
# A request can fail in three ways. A prompt that fills the context gets no answer and is never
# sent. If the server refuses one, that is saved as an error and counts as a failure until a later
# run gets an answer. If the server is gone, all wait for it, up to `patience`, and then the run
# ends in one line; what was saved stays. `skip_special_tokens=False` keeps a thought channel
# visible.

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
def sample(jobs, path, base_url, model, cfg):
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
        room = cfg.max_model_len - len(job["ids"])
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
def collect(label, folder, problems, prompts, cfg):
    """All answers of one model, from disk where they are saved, else from a server."""
    jobs = plan_jobs(cfg.plans, problems, prompts, fingerprint(folder), cfg.max_tokens)
    path = helpers.run_dir("eval", label, "samples.jsonl")
    saved = read_samples(path, jobs)
    print(f"{label}: {len(saved)} of {len(jobs)} answers are saved")
    if len(saved) == len(jobs):
        return saved
    server.prepare(cfg.engine)
    record = server.start(cfg.engine, folder, cfg.name, port=cfg.port, timeout=cfg.timeout,
                          max_model_len=cfg.max_model_len, tensor_parallel=cfg.tensor_parallel,
                          results=helpers.run_dir("bench"))
    start = time.perf_counter()
    samples = sample(jobs, path, record["base_url"], cfg.name, cfg)
    took, new = time.perf_counter() - start, len(jobs) - len(saved)
    tokens = sum(samples[place]["tokens"] for place in jobs if place not in saved)
    errors = [row["error"] for row in samples.values() if row["finish"] == "error"]
    print(f"{label}: {new} answers, {tokens} tokens in {took:.0f} s; "
          f"{len(errors)} refused by the server", *errors[:1])
    return samples


replies = {label: collect(label, path, problems, prompts, cfg) for label, path in models.items()}
print("server stopped" if server.stop() else "no server to stop")

# %% [markdown]
# ## 10. Judge them
# All cores judge at once, and identical answers are judged once: with a greedy plan and a model
# that is sure of itself that saves a third and more. An answer without code, a refused request
# and a prompt that was too long stay in the table: nothing leaves the denominator.

# %%
def judge_answers(samples, problems):
    """One row per answer: its place, how the code was found, its category."""
    by_name = {problem.name: problem for problem in problems}
    rows, candidates = [], []
    for (plan, name, index), row in samples.items():
        code, how = answers.extract_code(row["text"], by_name[name].interface)
        candidates.append((by_name[name], code))
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
    judged[label], different = judge_answers(samples, problems)
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
# problems with replacement, average, repeat, and keep the middle 95 %. Two models that answered
# the same problems are compared **paired**, problem by problem. If they were equally good, each
# difference could as well have the other sign; the share of random **sign flips** with a mean at
# least as far from zero is p.

# %%
def interval(values, draws, seed=0):
    """Mean over problems and its 95 % bootstrap interval."""
    values, generator = np.asarray(values, float), np.random.default_rng(seed)
    means = [values[generator.integers(0, len(values), (block, len(values)))].mean(1)
             for block in [500] * max(1, draws // 500)]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def sign_flip_p(differences, flips, seed=0):
    """Two-sided p of a paired sign-flip test; exact for up to 16 differing problems."""
    values = np.asarray(differences, float)
    values = values[values != 0]
    if len(values) <= 16:
        signs = np.array(list(itertools.product((-1, 1), repeat=len(values))))
        return float((np.abs(signs @ values) >= abs(values.sum()) - 1e-9).mean())
    generator, extreme = np.random.default_rng(seed), 0
    for _ in range(max(1, flips // 1000)):
        signs = generator.choice((-1.0, 1.0), (1000, len(values)))
        extreme += int((np.abs(signs @ values) >= abs(values.sum()) - 1e-9).sum())
    return (1 + extreme) / (1 + 1000 * max(1, flips // 1000))

# %% [markdown]
# Do these see what the published evaluation missed? It reported pass@1 of 0.641 (trained on TPU)
# and 0.697 (on GPU) and called the gap normal variation. Its per-problem counts can be read off a
# figure of its repository (`data/published/`, digitised; they add up to its totals exactly).

# %%
def compare(first, second, draws):
    """Two models on the same problems: scores, their difference, intervals, p."""
    differences = np.asarray(second, float) - np.asarray(first, float)
    return {"first": interval(first, draws), "second": interval(second, draws),
            "difference": interval(differences, draws), "p": sign_flip_p(differences, 10 * draws),
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
# Every plan, over all problems and over those that can be won. Further training seeds can be
# named in `other_runs`: their passes and answers are added up per problem before anything is
# estimated. (How far the seeds lie apart, their own `summary.json` files say.)

# %%
def counts(frame, plan, names):
    """(passing answers, answers) per problem for one plan, in the order of `names`."""
    grouped = frame[frame.plan == plan].groupby("problem").passed
    table = pd.DataFrame({"c": grouped.sum(), "n": grouped.size()}).reindex(names)
    assert table.notna().all(axis=None), "an answer is missing from the denominator"
    return list(table.astype(int).itertuples(index=False, name=None))


def combine(*runs):
    """Add up the (passing, answers) pairs of several runs, problem by problem."""
    return [tuple(map(sum, zip(*same_problem))) for same_problem in zip(*runs, strict=True)]


def all_counts(label, plan, names):
    """This run's counts and those of `other_runs`, combined."""
    runs = [counts(judged[label], plan, names)]
    for folder in cfg.other_runs:
        path = Path(folder) / "eval" / label / "summary.json"
        saved = helpers.read_json(helpers.require(path, "07_eval.py"))["counts"][plan]
        runs.append([tuple(saved[name]) for name in names])
    return combine(*runs)


names = [problem.name for problem in problems]
tally = {(label, plan.name): all_counts(label, plan.name, names)
         for label in models for plan in cfg.plans}

# %%
def scores(tally, names, winnable, draws):
    """One row per model, plan and k: means over all and over the winnable problems."""
    rows = []
    for (label, plan), pairs in tally.items():
        for k in (k for k in (1, 5, 10) if k <= min(n for _, n in pairs)):
            values = {name: pass_at_k(n, c, k) for name, (c, n) in zip(names, pairs, strict=True)}
            won = [values[name] for name in names if name in winnable]
            rows.append((label, plan, f"pass@{k}", *interval(list(values.values()), draws),
                         *interval(won, draws), sum(n for _, n in pairs)))
    columns = ["model", "plan", "score", "all", "low", "high", "winnable", "winnable low",
               "winnable high", "answers"]
    return pd.DataFrame(rows, columns=columns).set_index(["plan", "score", "model"]).sort_index()


board = scores(tally, names, winnable, cfg.resamples)
print(f"{len(names)} problems, {len(winnable)} winnable: no model can be above "
      f"{len(winnable) / len(names):.3f}")
display(board.round(3))

# %% [markdown]
# What this means: compare the tuned model's `greedy` and `official greedy` rows, the same weights
# asked in two wordings. The tiny model has only ever seen ours, and under the official one its
# score is close to nothing, so a pass@k belongs to a model *and* a prompt, and whoever cites one
# must name both.
#
# The intervals are wide because the problems are few, and two models tend to fail on the same hard
# ones; a paired comparison takes that part out. Where all problems score alike, as for the tiny
# base, the bootstrap has nothing to vary, and [0, 0] is no certainty: with none of 38 solved, the
# true share may still be as large as 3/38, 8 %, at 95 % (the *rule of three*).
#
# ## 14. Base against tuned
# The same problems, one difference each. Where only one of the two models has any passing answer,
# the problem is **discordant**, and the list of those says what tuning gave and what it took. With
# 100,000 random flips no p can be below 1e-05.

# %%
def paired(tally, plan, k, draws):
    """Base and tuned on the same problems."""
    base, tuned = ([pass_at_k(n, c, k) for c, n in tally[label, plan]]
                   for label in ("base", "tuned"))
    return compare(base, tuned, draws) | {"values": (base, tuned)}


pairs = {k: paired(tally, main, k, cfg.resamples) for k in (1, 5) if k <= cfg.plans[0].n}
for k, result in pairs.items():
    print("pass@{}: tuned - base {:+.3f} [{:+.3f}, {:+.3f}],".format(k, *result["difference"]),
          f"p = {result['p']:.2g}, {result['differ']} of {len(names)} problems differ")
solved = {label: {name for name, (c, _) in zip(names, tally[label, main]) if c} for label in models}
gained = sorted(solved["tuned"] - solved["base"])
given_up = sorted(solved["base"] - solved["tuned"])
print(f"\nsolved only when tuned: {len(gained)}", textwrap.fill(" ".join(gained), 98), sep="\n")
print(f"solved only by the base: {len(given_up)}\n  {' '.join(given_up)}")

# %% [markdown]
# Four figures. First the scores with their intervals, under the ceiling of this benchmark and
# simulator, and beside them the published pair, which is the 31B on verilog-eval's 156 problems.

# %%
def draw_scores(pairs, published, ceiling, where):
    """Points with 95 % intervals: base and tuned, and the published pair."""
    fig, axes = style.figure(8, 3.4, columns=2, sharey=True, width_ratios=(1.4, 1))
    groups = ((axes[0], pairs, ("base", "tuned"), (style.GREY, style.BLUE)),
              (axes[1], published, ("TPU-trained", "GPU-trained"), (style.ORANGE, style.PURPLE)))
    for ax, results, labels, colours in groups:
        for place, (k, result) in enumerate(results.items()):
            for shift, key, label, colour in zip((-0.1, 0.1), ("first", "second"), labels, colours):
                mean, low, high = result[key]
                ax.errorbar(place + shift, mean, [[mean - low], [high - mean]], fmt="o", capsize=4,
                            color=colour, label=label if place == 0 else None)
                ax.text(place + 1.8 * shift, mean, f"{mean:.2f}", va="center", fontsize=9,
                        color=colour, ha="right" if shift < 0 else "left")
        ax.set_xticks(range(len(results)), [f"pass@{k}" for k in results])
        ax.set_xlim(-0.5, len(results) - 0.3)
        ax.set_ylim(-0.03, 1.05)
        ax.legend(loc="lower right")
    axes[0].axhline(ceiling, color=style.RED, linestyle="--", linewidth=1)
    axes[0].text(-0.45, ceiling - 0.015, f"ceiling {ceiling:.2f}", color=style.RED, va="top",
                 fontsize=9)
    axes[0].set(title="This run", ylabel="share of problems")
    axes[1].set_title("Published: 31B, verilog-eval")
    style.finish(fig, "07_scores", where + "; right: data/published (digitised). Bars: 95 %")


where = (f"measured, {helpers.size()}, {len(names)} problems x {cfg.plans[0].n} answers, "
         f"Icarus {version[0]}")
draw_scores(pairs, published, len(winnable) / len(names), where)

# %% [markdown]
# Every answer of the main plan as one cell, problems ordered by what the tuned model makes of
# them. Full columns mean a model that is sure of itself; mixed ones are where more answers
# (pass@5) help.

# %%
COLOURS = dict(zip(judge.CATEGORIES, (style.GREEN, style.ORANGE, style.YELLOW, style.SKY,
                                        style.BLUE, style.PURPLE, style.BLACK, "#BBBBBB")))


def draw_answers(judged, plan, names, tally, where):
    """A heat map: problems across, answers down, one panel per model."""
    from matplotlib.colors import ListedColormap
    passes = {label: dict(zip(names, (c for c, _ in tally[label, plan]))) for label in judged}
    order = sorted(names, key=lambda name: (-passes["tuned"][name], -passes["base"][name], name))
    fig, axes = style.figure(9, 3.9, rows=2, sharex=True)
    for ax, label in zip(axes, ("tuned", "base")):
        frame = judged[label][judged[label].plan == plan]
        grid = frame.pivot(index="index", columns="problem", values="category")[order]
        ax.pcolormesh(grid.map(judge.CATEGORIES.index).to_numpy(), edgecolors="white",
                      linewidth=0.6, vmin=-0.5, vmax=7.5,
                      cmap=ListedColormap(list(COLOURS.values())))
        ax.set(title=label, ylabel="answer", yticks=[])
        ax.grid(False)
    seen = set().union(*(frame[frame.plan == plan].category for frame in judged.values()))
    handles = [axes[0].plot([], [], "s", color=COLOURS[c], label=c)[0] for c in COLOURS
               if c in seen]
    fig.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9)
    axes[1].set_xticks(np.arange(len(order)) + 0.5, [name.split("_", 1)[1] for name in order],
                       rotation=90, fontsize=6 if len(order) < 60 else 3)
    style.finish(fig, "07_answers", where)


draw_answers(judged, main, names, tally, where)

# %% [markdown]
# Then what becomes of the answers, by category, and the paired differences, one bar per problem
# (no bar: no difference). The band is the 95 % interval of their mean.

# %%
def draw_outcomes(kinds, result, names, where):
    """Left: categories stacked. Right: tuned minus base per problem, sorted."""
    fig, (left, right) = style.figure(9, 3.4, columns=2, width_ratios=(1, 1.2))
    shares, start = kinds / kinds.sum(), pd.Series(0.0, index=kinds.columns)
    for category in judge.CATEGORIES:
        if shares.loc[category].any():
            left.barh(list(kinds.columns), shares.loc[category], left=start, label=category,
                      color=COLOURS[category])
            start = start + shares.loc[category]
    left.set(title="What becomes of the answers", xlabel="share of answers", xlim=(0, 1))
    left.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    left.grid(False)
    values = sorted(np.subtract(result["values"][1], result["values"][0]))
    right.bar(range(len(values)), values,
              color=[style.BLUE if value > 0 else style.RED for value in values])
    mean, low, high = result["difference"]
    right.axhspan(low, high, color=style.SKY, alpha=0.35, linewidth=0)
    right.axhline(mean, color=style.BLACK, linewidth=1)
    right.text(0.98, 0.08, f"mean {mean:+.2f} [{low:+.2f}, {high:+.2f}]", fontsize=9, ha="right",
               transform=right.transAxes)
    right.set(title="Tuned minus base, pass@1", xlabel="problems, sorted", ylim=(-1.05, 1.1),
              xticks=[])
    style.finish(fig, "07_outcomes", where)


draw_outcomes(kinds[["tuned", "base"]], pairs[1], names, where)

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
    ax.set_title(f"{problem.name}: around the first mismatch")
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
        "ceiling": {"winnable": len(winnable), "zero_mismatches": clean,
                    "lost": {name: f"{v.category}: {v.detail}" for name, v in lost}},
        "categories": {plan: group.category.value_counts().to_dict() for plan, group in
                       frame.groupby("plan")},
        "finish": frame.finish.value_counts().to_dict(), "tokens": int(frame.tokens.sum()),
        "late": late[label],
        "counts": {plan.name: {name: list(pair) for name, pair in
                               zip(names, counts(frame, plan.name, names))} for plan in cfg.plans},
        "settings": asdict(cfg), "system": meta["system"],
        "template_sha256": meta["template_sha256"],
        "versions": {"icarus": ".".join(map(str, version)), "openai": metadata.version("openai"),
                     "network_cut_off": bool(judge.network_guard())}}


comparison = {"plan": asdict(cfg.plans[0]), "n_winnable": len(winnable), "paired": {}}
for label, key in (("base", "first"), ("tuned", "second")):
    helpers.write_json(helpers.run_dir("eval", label, "summary.json"), summary(label))
    entry = {"n_problems": len(names), "n_samples": sum(n for _, n in tally[label, main])}
    for k, result in pairs.items():
        mean, low, high = result[key]
        entry |= {f"pass@{k}": mean, f"pass@{k}_interval": [low, high],
                  f"pass@{k}_winnable": float(board.loc[(main, f"pass@{k}", label), "winnable"])}
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
