"""Ask a served model for answers: plans, prompts, and a file that loses none.

`client.Client` talks to the server. Answers are saved as they come, before anyone judges them.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables.errors import UserError
from tables.texts import json_lines
from verilog.client import Client, Reply
from verilog.problems import Problem

Message = dict[str, str]           # of a chat: "role" and "content"
Ids = list[int]                    # tokens
Place = tuple[str, str, int]       # an answer's plan, problem and index
Row = dict[str, Any]               # a line of samples.jsonl
Samples = dict[Place, Row]
Report = Callable[[int, int], None]  # told how many answers there are, and how many there will be
Tasks = Mapping[str, Sequence[Problem]]
Prompts = dict[tuple[str, bool, Problem], Ids]  # by wording, thinking and problem


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

    def is_asked_of(self, model: str) -> bool:
        """Is "base" or "tuned" asked by it?"""
        return self.only in ("", model)


# ---- Prompts ----

BEGIN = "module TopModule"  # the start of an answer to the prompt with examples
TEXTS = "examples", "comment"
EXAMPLES = (Path(__file__).parent / "examples.txt").read_text(encoding="utf-8")


def messages_for(problem: Problem, prompt: str, system: str | None) -> list[Message]:
    """The chat for a problem: our wording, or verilog-eval's ("official")."""
    if prompt == "ours":
        user = problem.prompt.strip()
    elif problem.interface:
        system, user = official_completion(problem)
    else:
        system = ("You are a Verilog RTL designer that only writes code using correct Verilog "
                  "syntax.")
        user = (f"\nQuestion:\n{problem.prompt.strip()}\n\nEnclose your code with [BEGIN] and "
                "[DONE]. Only output the code snippet\nand do NOT output anything else.\n\n"
                "Answer:\n")
    messages = [{"role": "user", "content": user}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def official_completion(problem: Problem) -> tuple[str, str]:
    """verilog-eval's code-complete: the description as comments, then the header that is given."""
    system = ("You only complete chats with syntax correct Verilog code. End the Verilog "
              "module code completion with 'endmodule'. Do not include module, input and "
              "output definitions.")
    text, header, rest = problem.prompt.partition("module TopModule")
    user = ("// Implement the Verilog module based on the following description. Assume that "
            "signals are positive clock/clk triggered unless otherwise stated.\n")
    described = []
    for line in text.splitlines():
        described.append(f"// {line}")
    user += "\n".join(described)
    return system, f"{user}\n\n{header}{rest}"


def text_to_continue(problem: Problem, prompt: str) -> str:
    """Plain text for a model that only continues text.

    "examples": two solved problems, then ours. "comment": the problem as comments above a module,
    as Verilog files have it (and as 09 writes its corpus).
    """
    text = problem.prompt.strip()
    if prompt == "examples":
        return f"{EXAMPLES}{text}\n\n{BEGIN}"

    _, _, behind_title = text.partition("\n\n")
    described = behind_title or text
    lines = ["// TopModule", "//"]
    for line in described.split("\n"):
        comment = f"// {line}"
        lines.append(comment.rstrip())
    comments = "\n".join(lines)
    return f"{comments}\n\n"


def all_prompts(
        tasks: Tasks,
        plans: Sequence[Plan],
        system: str | None,
        render: Callable[[list[Message], bool], Ids],
        encode: Callable[[str], Ids]) -> Prompts:
    """The token ids of every prompt.

    Args:
      tasks: {task: [problems]}.
      system: the system message of training, or None.
      render: (chat messages, thinking) -> token ids, as the training data was rendered.
      encode: plain text -> token ids, with the token that begins a text.
    """
    wanted = set()
    for plan in plans:
        wanted.add((plan.prompt, plan.thinking, plan.task))
    prompts: Prompts = {}
    for wording, thinking, task in sorted(wanted):
        for problem in tasks[task]:
            if wording in TEXTS:
                ids = encode(text_to_continue(problem, wording))
            else:
                ids = render(messages_for(problem, wording, system), thinking)
            prompts[wording, thinking, problem] = ids
    return prompts


# ---- Answers ----

@dataclass(frozen=True)
class Job:
    """One answer that we want."""

    ids: Ids   # the prompt
    key: str   # a hash of all that the answer depends on
    plan: Plan
    problem: Problem


Jobs = dict[Place, Job]


def plan_jobs(plans: Sequence[Plan], tasks: Tasks, prompts: Prompts, maker: Any) -> Jobs:
    """Every answer we want, by its place.

    Args:
      maker: who answers, as anything that JSON can hold; an answer of another maker doesn't count.
    """
    jobs: Jobs = {}
    for plan in plans:
        for problem in tasks[plan.task]:
            ids = prompts[plan.prompt, plan.thinking, problem]
            key = _key(plan, ids, maker)
            job = Job(ids, key, plan, problem)
            for index in range(plan.n):
                jobs[plan.name, problem.name, index] = job
    return jobs


def _key(plan: Plan, ids: Ids, maker: Any) -> str:
    """Sixteen letters for all that an answer depends on."""
    asked = [maker, plan.temperature, plan.top_p, plan.max_tokens, ids]
    text = json.dumps(asked)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return digest[:16]


def read_samples(path: Path, jobs: Jobs) -> Samples:
    """The saved answers that belong to these jobs; damaged lines count as absent."""
    samples: Samples = {}
    if not path.exists():
        return samples
    content = path.read_bytes()
    for line in json_lines(content):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            line.text.encode()  # bytes that were no UTF-8 can't be encoded again
            row = line.value
            place = row["plan"], row["problem"], row["index"]
            if _is_answer_to(row, jobs.get(place)):
                samples[place] = row
    return samples


def _is_answer_to(row: Row, job: Job | None) -> bool:
    """Is a saved row a whole answer to this job, asked with the same prompt and options?"""
    if job is None or job.key != row["key"]:
        return False
    is_whole = isinstance(row["text"], str) and isinstance(row["tokens"], int)
    return is_whole and row["finish"] != "error"


def write_samples(path: Path, jobs: Jobs, samples: Samples) -> None:
    """Write the answers in the order of the jobs; a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with open(fresh, "w", encoding="utf-8") as file:
        for place in jobs:
            if place in samples:
                line = json.dumps(samples[place])
                file.write(f"{line}\n")
    fresh.replace(path)


def ask(client: Client, job: Job, max_tokens: int) -> Reply:
    """One answer. A prompt that fills the context is never sent, and its answer is "too long".

    Args:
      max_tokens: of the answer, where the plan doesn't say.
    """
    plan = job.plan
    room = client.context - len(job.ids)
    if room < 1:
        return Reply("", "too long", 0)

    options: dict[str, Any] = {"top_k": 0, "skip_special_tokens": False}  # a thought stays visible
    if plan.prompt in TEXTS:  # else the model would go on with a further module of its own
        options["stop"] = ["endmodule"]
        options["include_stop_str_in_output"] = True
    wanted = plan.max_tokens or max_tokens
    most = min(wanted, room)
    reply = client.complete(job.ids, most, plan.temperature, plan.top_p, options)

    if plan.prompt == "examples" and not reply.error:
        whole = BEGIN + reply.text
        return reply._replace(text=whole)
    return reply


def sample(
        jobs: Jobs,
        path: Path,
        client: Client,
        max_tokens: int,
        in_flight: int,
        report: Report = lambda done, of: None) -> Samples:
    """Ask for every job that `path` doesn't hold yet, and return all answers.

    The file is first rewritten without half lines and answers of other runs; then every answer is
    appended as it comes. Killed anywhere, the next call asks for what is missing and nothing else.

    Args:
      max_tokens: of an answer, where its plan doesn't say.
      in_flight: requests at once.
      report: called after every answer.

    Raises:
      UserError: a request failed, or the server died or can't be reached.
    """
    samples = read_samples(path, jobs)
    missing = [place for place in jobs if place not in samples]
    lock = threading.Lock()

    def answer(place: Place) -> None:
        job = jobs[place]
        reply = ask(client, job, max_tokens)
        row = _row(place, job, reply)
        line = json.dumps(row)
        with lock, open(path, "a", encoding="utf-8") as file:
            samples[place] = row
            file.write(f"{line}\n")
            report(len(samples), len(jobs))

    write_samples(path, jobs, samples)
    with ThreadPoolExecutor(in_flight) as pool:
        try:
            waiting = [pool.submit(answer, place) for place in missing]
            for done in as_completed(waiting):
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or interrupt, nothing new
    write_samples(path, jobs, samples)
    _check_errors(samples)
    return samples


def saved_or_asked(
        jobs: Jobs,
        path: Path,
        connect: Callable[[], AbstractContextManager[Client]],
        max_tokens: int,
        in_flight: int,
        report: Report = lambda done, of: None) -> Samples:
    """All answers, from `path` if it holds them. If it lacks one, a server starts and is asked.

    Args:
      connect: starts a server; a `with` block around its result has the server's client.
      max_tokens, in_flight, report: as in `sample`.

    Raises:
      UserError: as in `sample`.
    """
    saved = read_samples(path, jobs)
    if len(saved) == len(jobs):
        return saved
    with connect() as client:
        return sample(jobs, path, client, max_tokens, in_flight, report)


def _row(place: Place, job: Job, reply: Reply) -> Row:
    """An answer as samples.jsonl keeps it."""
    plan, problem, index = place
    row = {
        "plan": plan,
        "problem": problem,
        "index": index,
        "key": job.key,
        "text": reply.text,
        "finish": reply.finish,
        "tokens": reply.tokens}
    if reply.error:
        row["error"] = reply.error
    return row


def _check_errors(samples: Samples) -> None:
    """Raise if the server refused a request: a refusal is no answer, and must not be scored.

    Raises:
      UserError: it did; with its own words.
    """
    errors = []
    for row in samples.values():
        if row["finish"] == "error":
            errors.append(row["error"])
    if not errors:
        return
    first = errors[0][:80]
    raise UserError(f"{len(errors)} requests failed ({first}). They aren't answers, so nothing is "
                    "scored. Run this again: it asks for these alone. The server's log has its "
                    "side.")
