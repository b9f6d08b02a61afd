"""Ask a served model for answers: plans, prompts, and a file that loses none.

A client of any server with /v1/completions. Answers are saved as they come, before anyone judges
them.
"""

import contextlib
import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import openai

from tables.errors import UserError


@dataclass(frozen=True)
class Plan:
    """How answers are drawn: which prompt, how many per problem, how random."""

    name: str
    prompt: str = "ours"  # "official" (`messages_for`); "examples", "comment" (`text_to_continue`)
    n: int = 5            # answers per problem
    temperature: float = 0.8
    top_p: float = 0.95
    task: str = "spec-to-rtl"  # or "code-complete": the module's header is given
    thinking: bool = False     # whether the model may fill its thought channel first
    max_tokens: int = 0        # of an answer; 0: as everywhere on the page
    only: str = ""             # "base" or "tuned" to ask one model alone


# ---- Prompts ----

BEGIN = "module TopModule"  # the start of an answer to the prompt with examples
TEXTS = "examples", "comment"
TURN_END = "<turn|>"  # Gemma 4's end of a turn
EXAMPLES = (Path(__file__).parent / "examples.txt").read_text(encoding="utf-8")


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


def text_to_continue(problem, prompt):
    """Plain text for a model that only continues text.

    "examples": two solved problems, then ours. "comment": the problem as comments above a module, as
    Verilog files have it (and as 09 writes its corpus).
    """
    text = problem.prompt.strip()
    if prompt == "examples":
        return f"{EXAMPLES}{text}\n\n{BEGIN}"
    described = text.partition("\n\n")[2] or text
    lines = [f"// {line}".rstrip() for line in described.split("\n")]
    return "\n".join(["// TopModule", "//", *lines, "", ""])


def all_prompts(tasks, plans, system, render, encode):
    """Prompt token ids by (wording, thinking, problem).

    Args:
      tasks: {task: [problems]}.
      system: the system message of training, or None.
      render: (chat messages, thinking) -> token ids, as the training data was rendered.
      encode: plain text -> token ids, with the token that begins a text.
    """
    wanted = sorted({(plan.prompt, plan.thinking, plan.task) for plan in plans})
    return {(wording, thinking, problem): encode(text_to_continue(problem, wording))
            if wording in TEXTS else render(messages_for(problem, wording, system), thinking)
            for wording, thinking, task in wanted for problem in tasks[task]}


# ---- Answers ----

def plan_jobs(plans, tasks, prompts, maker):
    """Every answer we want: {(plan, problem's name, index): its request and key}."""
    jobs = {}
    for plan in plans:
        for problem in tasks[plan.task]:
            ids = prompts[plan.prompt, plan.thinking, problem]
            what = json.dumps([maker, plan.temperature, plan.top_p, plan.max_tokens, ids]).encode()
            job = {"ids": ids, "key": hashlib.sha256(what).hexdigest()[:16], "plan": plan,
                   "problem": problem}
            jobs |= {(plan.name, problem.name, index): job for index in range(plan.n)}
    return jobs


def read_samples(path, jobs):
    """The saved answers that belong to these jobs; damaged lines count as absent."""
    samples = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line.decode())
            place = row["plan"], row["problem"], row["index"]
            whole = isinstance(row["text"], str) and isinstance(row["tokens"], int)
            same = jobs.get(place, {}).get("key") == row["key"] and row["finish"] != "error"
            if whole and same:
                samples[place] = row
    return samples


def ask(client, model, ids, plan, max_tokens, room):
    """One answer from /v1/completions: text, why it ended, tokens.

    A refusal of the server is saved as an error; a prompt that fills the context is never sent.
    `skip_special_tokens=False` keeps a thought channel visible. It is waited for as long as ten tokens
    a second take, and ten minutes more.
    """
    if room < 1:
        return {"text": "", "finish": "too long", "tokens": 0}
    begin, more = "", {"top_k": 0, "skip_special_tokens": False}
    if plan.prompt in TEXTS:  # else it would go on with a further module of its own
        begin = BEGIN if plan.prompt == "examples" else ""
        more |= {"stop": ["endmodule"], "include_stop_str_in_output": True}
    most = min(plan.max_tokens or max_tokens, room)
    try:
        reply = client.completions.create(
            model=model, prompt=ids, max_tokens=most, temperature=plan.temperature, top_p=plan.top_p,
            extra_body=more, timeout=600 + most / 10)
    except openai.APIStatusError as error:
        told = f"HTTP {error.status_code}: {error}"[:300]
        return {"text": "", "finish": "error", "tokens": 0, "error": told}
    choice = reply.choices[0]
    return {"text": begin + choice.text.split(TURN_END)[0], "finish": choice.finish_reason,
            "tokens": reply.usage.completion_tokens}


def ask_patiently(answer, patience):
    """Call `answer()`; while the server cannot be reached, try again, for `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            return answer()
        except openai.APIConnectionError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"the server has not answered for {patience:.0f} s. The answers so far are "
                    "saved: run this notebook again, and see serve/server.log.") from error
            time.sleep(1.0)


def sample(jobs, path, base_url, model, cfg, max_model_len, report=None):
    """Ask for every job that `path` does not hold yet, `cfg.in_flight` at once; return all answers.

    The file is first rewritten without half lines and answers of other runs; then every answer is
    appended as it comes. Killed anywhere, the next call asks for what is missing and nothing else.

    Raises:
      UserError: a request failed, or the server has not answered for `cfg.patience` seconds.
    """
    samples, lock = read_samples(path, jobs), threading.Lock()
    missing = [place for place in jobs if place not in samples]
    client = openai.OpenAI(base_url=base_url + "/v1", api_key="unused", max_retries=2)

    def save():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(samples[place]) + "\n"
                                 for place in jobs if place in samples), encoding="utf-8")
        fresh.replace(path)

    def one(place):
        job = jobs[place]
        room = max_model_len - len(job["ids"])
        row = ask_patiently(lambda: ask(client, model, job["ids"], job["plan"], cfg.max_tokens,
                                        room), cfg.patience)
        row = dict(zip(("plan", "problem", "index"), place)) | {"key": job["key"]} | row
        with lock, open(path, "a", encoding="utf-8") as file:
            samples[place] = row
            file.write(json.dumps(row) + "\n")
            if report:
                report(len(samples), len(jobs))

    save()
    with ThreadPoolExecutor(cfg.in_flight) as pool:
        try:
            for done in as_completed([pool.submit(one, place) for place in missing]):
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or interrupt, nothing new
    save()
    failed = [row["error"] for row in samples.values() if row["finish"] == "error"]
    if failed:
        raise UserError(f"{len(failed)} requests failed ({failed[0][:80]}). They are no answers, so "
                         "nothing is scored: run this again, it asks for these alone. The server's "
                         "side is in its log.")
    return samples
