"""Ask models for Verilog, judge what they answer, and say how sure the scores are.

07 is the notebook of this file. Answers are saved before they are judged. No JAX here: this is a
client of a server.
"""

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import openai
import pandas as pd

from helpers import chat, remote, stats, weights
import serving
from serving.options import model_hash
from verilog import answers, judge
from helpers.run import Progress, read_json, require, run_dir, write_text


@dataclass(frozen=True)
class Plan:
    """How answers are drawn: which prompt, how many per problem, how random.

    Attributes:
      prompt: "ours", "official" or "examples", see `messages_for`.
      n: answers per problem.
      task: "spec-to-rtl", or "code-complete": the module's header is given.
    """

    name: str
    prompt: str = "ours"
    n: int = 5
    temperature: float = 0.8
    top_p: float = 0.95
    task: str = "spec-to-rtl"


def other_wordings(plans):
    """Names of the plans that differ from the first one in the prompt only, itself among them."""
    def drawn(plan):
        return replace(plan, name="", prompt="")
    return [plan.name for plan in plans if drawn(plan) == drawn(plans[0])]


# -- Prompts -------------------------------------------------------------------------------------

BEGIN = "module TopModule"  # the start of an answer to the prompt with examples
EXAMPLES = """\
I would like you to implement a module named TopModule with the following interface. All ports are \
one bit unless otherwise specified.

 - input a
 - input b
 - input c
 - output z

The output z is 1 when exactly two of the three inputs are 1.

module TopModule (
  input a,
  input b,
  input c,
  output z
);
  assign z = (a & b & ~c) | (a & ~b & c) | (~a & b & c);
endmodule

I would like you to implement a module named TopModule with the following interface. All ports are \
one bit unless otherwise specified.

 - input clk
 - input reset
 - input d
 - output q

At each rising edge of clk, q becomes 0 when reset is 1. Otherwise it becomes 1 when d is 1, and
stays 1 until the next reset.

module TopModule (
  input clk,
  input reset,
  input d,
  output reg q
);
  always @(posedge clk)
    if (reset) q <= 0;
    else if (d) q <= 1;
endmodule

"""


def messages_for(problem, prompt, system):
    """The chat for a problem: our wording, or verilog-eval's ("official")."""
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


def text_to_continue(problem):
    """The prompt with two worked examples: plain text, for a model that only continues text."""
    return f"{EXAMPLES}{problem.prompt.strip()}\n\n{BEGIN}"


def all_prompts(tokenizer, tasks, plans, meta):
    """Prompt token ids by (wording, problem), rendered as 02 rendered the training data."""
    thinking, wanted = meta["reasoning"] == "kept", {(plan.prompt, plan.task) for plan in plans}

    def ids(wording, problem):
        if wording == "examples":
            text = chat.encode_texts(tokenizer, [text_to_continue(problem)])[0]
            return [tokenizer.bos_token_id, *text]
        return chat.prompt_ids(tokenizer, messages_for(problem, wording, meta["system"]), thinking)
    return {(wording, problem): ids(wording, problem)
            for wording, task in sorted(wanted) for problem in tasks[task]}


def check_story(merged, merge, meta, recipe):
    """Raise where the files of the merged model, or the prompt, are not those of the training."""
    if bad := weights.verify(merged, merge["files"]):  # reads 62 GB once, then remembers
        raise ValueError(f"{merged} is not what 04 wrote ({bad}): run 04_merge and 05.")
    keys = ("system", "reasoning", "template_sha256")
    changed = [key for key in keys if meta[key] != recipe[key]]
    if changed:
        raise ValueError(f"data/meta.json and train/recipe.json differ in {changed}: 02 ran "
                        "again after 03. Train again (03, 04, 05), or restore the data.")


def fetch_base(options, recipe):
    """The folder of the base that 07 compares with: 05's choice, or what 03 trained on."""
    return remote.stage(options.base or recipe["base_path"])  # fetched, if it is not here yet


# -- Answers -------------------------------------------------------------------------------------

def identity(folder):
    """One hash of a model: of every byte for `merged/`, whose hashes merge.json has, else a sample.

    `check_story` has compared those with the files.
    """
    record = run_dir("merge.json")
    if record.exists() and Path(folder).resolve() == run_dir("merged").resolve():
        return model_hash(read_json(record)["files"])
    return weights.fingerprint(folder)


def made_by(folder, options, max_tokens):
    """What shapes an answer beside plan and prompt: the model, how it is served, and the limits."""
    names = ("engine", "kv_cache_dtype", "quantization", "implementation", "environment",
             "max_model_len", "flags")
    return [identity(folder), max_tokens, [getattr(options, name) for name in names]]


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


def ask(client, model, ids, plan, max_tokens, room):
    """One answer from /v1/completions: text, why it ended, tokens.

    A refusal of the server is saved as an error; a prompt that fills the context is never sent.
    `skip_special_tokens=False` keeps a thought channel visible.
    """
    if room < 1:
        return {"text": "", "finish": "too long", "tokens": 0}
    begin, more = "", {"top_k": 0, "skip_special_tokens": False}
    if plan.prompt == "examples":  # else it would go on with a third example of its own
        begin = BEGIN
        more |= {"stop": ["endmodule"], "include_stop_str_in_output": True}
    try:
        reply = client.completions.create(
            model=model, prompt=ids, max_tokens=min(max_tokens, room), temperature=plan.temperature,
            top_p=plan.top_p, extra_body=more)
    except openai.APIStatusError as error:
        told = f"HTTP {error.status_code}: {error}"[:300]
        return {"text": "", "finish": "error", "tokens": 0, "error": told}
    choice = reply.choices[0]
    return {"text": begin + choice.text.split(chat.TURN_END)[0], "finish": choice.finish_reason,
            "tokens": reply.usage.completion_tokens}


def ask_patiently(answer, patience, pause=1.0):
    """Call `answer()`; while the server cannot be reached, try again, for `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            return answer()
        except openai.APIConnectionError as error:
            if time.monotonic() > end:
                raise ValueError(
                    f"the server has not answered for {patience:.0f} s. The answers so far are "
                    "saved: run this notebook again, and see serve/server.log.") from error
            time.sleep(pause)


def sample(jobs, path, base_url, model, cfg, max_model_len):
    """Ask for every job that `path` does not hold yet, `cfg.in_flight` at once; return all answers.

    The file is first rewritten without half lines and answers of other runs; then every answer is
    appended as it comes. Killed anywhere, the next call asks for what is missing and nothing else.
    """
    samples, lock, stop = read_samples(path, jobs), threading.Lock(), threading.Event()
    missing = [place for place in jobs if place not in samples]
    client = openai.OpenAI(base_url=base_url + "/v1", api_key="unused", max_retries=2, timeout=600)
    progress = Progress(len(missing), f"{path.parent.name}: answers")

    def save():
        write_text(path, "".join(json.dumps(samples[place]) + "\n"
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


def collect(label, folder, tasks, prompts, options, cfg):
    """All answers of one model, from disk where they are saved, else from a server."""
    jobs = plan_jobs(cfg.plans, tasks, prompts, made_by(folder, options, cfg.max_tokens))
    path = run_dir("eval", label, "samples.jsonl")
    saved = read_samples(path, jobs)
    print(f"{label}: {len(saved)} of {len(jobs)} answers are saved")
    if len(saved) == len(jobs):
        return saved
    with serving.running(replace(options, model=str(folder)), run_dir("serve")) as url:
        start = time.perf_counter()
        samples = sample(jobs, path, url, options.name, cfg, options.max_model_len)
    took, new = time.perf_counter() - start, len(jobs) - len(saved)
    tokens = sum(samples[place]["tokens"] for place in jobs if place not in saved)
    print(f"{label}: {new} answers, {tokens} tokens in {took:.0f} s")
    return samples


def refuse_errors(replies):
    """A request that failed is no answer: raise, and say how to go on, while one remains."""
    failed = [row["error"] for rows in replies.values() for row in rows.values()
              if row["finish"] == "error"]
    if failed:
        raise ValueError(f"{len(failed)} requests failed ({failed[0][:80]}). They are no "
                        "answers, so nothing is scored: run this notebook again, it asks "
                        "for these alone. The server's side is in serve/server.log.")


# -- Verdicts ------------------------------------------------------------------------------------

def verdict_table(verdicts, **columns):
    """One row per verdict: category, detail, mismatches of samples."""
    rows = [(v.category, v.detail, v.mismatches, v.samples) for v in verdicts]
    frame = pd.DataFrame(rows, columns=["category", "detail", "mismatches", "samples"])
    for name, values in columns.items():
        frame.insert(0, name, values)
    return frame.astype({"mismatches": "Int64", "samples": "Int64"}).set_index(list(columns))


def judge_references(problems):
    """Judge every problem's reference as if a model had written it."""
    renamed = [(p, p.reference.replace("RefModule", "TopModule")) for p in problems]
    return judge.judge_many(renamed, text="references")


def judge_answers(samples, tasks, plans):
    """(One row per answer: its place, how the code was found, its category; different answers)."""
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


def pick_failure(judged, plan):
    """The failing answer that got furthest: a mismatch before an error, tuned before base."""
    frame = pd.concat([judged[label].assign(model=label) for label in ("tuned", "base")])
    failing = frame[(frame.plan == plan) & ~frame.passed]
    rank = failing.category.map(judge.CATEGORIES.index)
    return None if failing.empty else failing.iloc[int(np.lexsort((np.arange(len(rank)), rank))[0])]


# -- Scores --------------------------------------------------------------------------------------

def counts(frame, plan, names):
    """(passing answers, answers) per problem for one plan, in the order of `names`."""
    grouped = frame[frame.plan == plan].groupby("problem").passed
    table = pd.DataFrame({"c": grouped.sum(), "n": grouped.size()}).reindex(names)
    assert table.notna().all(axis=None), "an answer is missing from the denominator"
    return list(table.astype(int).itertuples(index=False, name=None))


def other_counts(folder, label, plan, names):
    """The same of another run directory, from its summary.json."""
    path = require(Path(folder) / "eval" / label / "summary.json", "07_eval.py")
    saved = read_json(path)["counts"].get(plan, {})
    if set(saved) != set(names):
        raise ValueError(f"{path} has other problems, or no plan {plan!r}: run 07_eval there.")
    return [tuple(saved[name]) for name in names]


def per_problem(runs, k):
    """pass@k of every problem: estimated run by run, then averaged over the runs.

    Pooling the answers of several training runs first would overstate it: a problem that one run
    solves always and another never has a pass@5 of 0.5 on average, and 0.996 from 5 of 10.
    """
    return np.mean([[stats.pass_at_k(n, c, k) for c, n in run] for run in runs], axis=0)


def scores(runs, names, winnable, disputed, task_of, draws):
    """One row per model, plan and k: over all, winnable and undisputed problems, and by seed."""
    rows = []
    undisputed = [not name.startswith(tuple(disputed)) for name in names]
    for (label, plan), each in runs.items():
        won = [name in winnable[task_of[plan]] for name in names]
        for k in (k for k in (1, 5, 10) if k <= min(n for run in each for _, n in run)):
            values, seeds = per_problem(each, k), [per_problem([run], k).mean() for run in each]
            rows.append((label, plan, f"pass@{k}", *stats.score(values, draws), values[won].mean(),
                         values[undisputed].mean(), min(seeds), max(seeds),
                         sum(n for run in each for _, n in run)))
    columns = ["model", "plan", "score", "all", "low", "high", "winnable", "undisputed",
               "lowest seed", "highest seed", "answers"]
    return pd.DataFrame(rows, columns=columns).set_index(["plan", "score", "model"]).sort_index()


def readable(board):
    """`scores` for reading: three digits, and no column that only repeats `all`."""
    same = [name for name in ("winnable", "undisputed", "lowest seed", "highest seed")
            if (board[name] == board["all"]).all()]
    return board.drop(columns=same).round(3)


def summary_of(frame, board, label):
    """What one model's answers came to: scores, categories, how answers ended, tokens."""
    rows = board.reset_index()
    return {"scores": rows[rows.model == label].drop(columns="model").to_dict("records"),
            "categories": {plan: group.category.value_counts().to_dict()
                           for plan, group in frame.groupby("plan")},
            "finish": frame.finish.value_counts().to_dict(), "tokens": int(frame.tokens.sum())}


def comparison_of(pairs, board, main, runs):
    """The comparison as comparison.json holds it: base, tuned, and both paired, for each k."""
    found = {"base": {}, "tuned": {}, "paired": {}}
    for label, key in (("base", "first"), ("tuned", "second")):
        run = runs[label, main]
        found[label] = {"n_problems": len(run[0]),
                        "n_samples": sum(n for each in run for _, n in each)}
        for k, result in pairs.items():
            mean, low, high = result[key]
            found[label] |= {f"pass@{k}": mean, f"pass@{k}_interval": [low, high],
                             **{f"pass@{k}_{which}": float(board.loc[(main, f"pass@{k}", label),
                                                                     which])
                                for which in ("winnable", "undisputed")}}
    for k, result in pairs.items():
        found["paired"][f"pass@{k}"] = paired_json(result)
    return found


def paired_json(result):
    """One paired comparison (of `stats.compare`) for a JSON file."""
    mean, low, high = result["difference"]
    return {"difference": mean, "interval": [low, high], "p": result["p"],
            "problems_that_differ": result["differ"]}
