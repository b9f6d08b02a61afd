"""07_eval: extraction; resumable sampling against a small OpenAI-like server; scores.

    VERILOG_EVAL_DIR=/path/to/verilog-eval .venv/bin/python -m pytest tests/test_eval.py
"""

import collections
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, RUN, page, program
from hypothesis import given, settings
from hypothesis import strategies as st

from appendix.world import make
from serving.options import Options
from tables.errors import UserError
from verilog import asking, extraction, judging, plans, problems as exams, scores
from verilog.asking import (Plan, all_prompts, messages_for, plan_jobs, read_samples, sample,
                            text_to_continue)
from verilog.client import Client, is_this_machine
from verilog.scores import board, counts
from verilog.stats import compare, pass_at_k

CHECKOUT = os.environ.get("VERILOG_EVAL_DIR")
FIXTURES = ROOT / "tests" / "fixtures"
PROBLEMS = {p.name: p for p in exams.load_problems(FIXTURES / "verilog_eval")}


def test_an_answer_that_only_the_testbench_own_timeout_fails_is_counted_apart():
    """As Prob082, Prob141: TIMEOUT first, then 0 mismatches; verilog-eval fails what follows."""
    bench = """module tb;
  wire a, b;
  RefModule r(a); TopModule t(b);
  initial begin #5; {early} $display("Mismatches: %0d in %0d samples", (a !== b), 7); $finish; end
endmodule"""
    code = "module TopModule(output o);\n  assign o = {};\nendmodule\n"
    reference = code.format(1).replace("TopModule", "RefModule")
    found = {}
    for name, early in (("late", '$display("TIMEOUT");'), ("fine", "")):
        problem = exams.Problem(name, "p", reference, bench.replace("{early}", early))
        samples = {("a", name, bit): {"text": code.format(bit), "finish": "stop", "tokens": 1}
                   for bit in (1, 0)}
        frame = scores.judge_answers(samples, {"spec-to-rtl": [problem]}, PLANS)
        found[name] = list(zip(frame.category, frame.late, frame.passed))
    assert found == {"late": [("timeout", True, False), ("timeout", False, False)],
                     "fine": [("pass", False, True), ("mismatch", False, False)]}


# ---- Extraction ----

TOP = "module TopModule;\nendmodule"
BITS = "module TopModule(input [9:0] s, output x);\nassign x = s[BEGIN] | s[DONE];\nendmodule"


@pytest.mark.parametrize("text, code, how", [
    (f"Sure.\n```verilog\n{TOP}\n```\nDone.", TOP, "fence"),
    (f"```\n{TOP} // 1\n```\nBetter:\n```sv\n{TOP} // 2\n```", f"{TOP} // 2",
     "last module of 2 fences"),
    (f"```\n{TOP}\n```\nUse it:\n```\nmodule tb;\nendmodule\n```", TOP, "last module of 2 fences"),
    (f"```text\nnotes\n```\n```verilog\n{TOP}\n```", TOP, "last module of 2 fences"),
    ("```verilog\nmodule TopModule;\n  wire a", "module TopModule;\n  wire a", "unclosed fence"),
    (f"The answer:\n{TOP}\nGood luck.", TOP, "no fence"),
    (f"<|channel>thought\n```\n{TOP} // idea\n```<channel|>```\n{TOP}\n```", TOP, "fence"),
    (f"<think>```\n{TOP} // idea\n```</think><answer>```verilog\n{TOP}\n```</answer>", TOP,
     "fence"),
    (f"<|channel>thought\n```\n{TOP}\n```", None, "thought never ends"),
    (f"[BEGIN]\n{TOP}\n[DONE]", TOP, "marked"),
    (f"[BEGIN]\n`define W 8\n{TOP}\n[DONE] Good luck.", f"`define W 8\n{TOP}", "marked"),
    (f"[BEGIN]\n{TOP} // 1\n[DONE]\nMarked by [BEGIN] and [DONE].", f"{TOP} // 1", "marked"),
    (f"[BEGIN]{TOP}[DONE]", TOP, "marked"),
    (f"```\n{BITS}\n```", BITS, "fence"),
    (f"[BEGIN]\n{BITS}\n[DONE]", BITS, "marked"),
    (f"```\n{TOP}\n```\n```\n// Tests module TopModule\nmodule tb;\nendmodule\n```", TOP,
     "last module of 2 fences"),
    (f"```\n{TOP}\n```\nIts header:\n```\nmodule TopModule;\n```", TOP, "last module of 2 fences"),
    *((f"```\n{head}\nendmodule\n```", f"{head}\nendmodule", "fence") for head in (
        "module TopModule // eight flip-flops\n  (input a);", "module TopModule /* x */ (input a);",
        "(* keep_hierarchy *) module TopModule(input a);", "module automatic TopModule;",
        "/* x */ module TopModule (input a);")),
    (f"[BEGIN]\n```verilog\n{TOP}\n```\n[DONE]", TOP, "fence"),
    ("```verilog\nmodule top_module;\nendmodule\n```", "module top_module;\nendmodule", "fence"),
    ("A module that adds. endmodule", None, "no module"),
    ("", None, "no module"),
    ("```\nassign a = b;\n```", None, "no module"),
])
def test_extract_code(text, code, how):
    assert extraction.extract_code(text) == (code, how)


def test_a_body_completes_the_given_header_only_where_there_is_one():
    header = "module TopModule(input a, output b);"
    body = "  assign b = a;\nendmodule"
    completed = f"{header}\n{body}", "body of the given header"
    assert extraction.extract_code(f"```\n{body}\n```", header) == completed
    assert extraction.extract_code(f"```\n{TOP}\n```", header) == (TOP, "fence")
    assert extraction.extract_code("", header) == (None, "no module")
    whole, helper = f"{header}\n{body}", "module ff(input d);\nendmodule"
    for text, wanted in ((f"```\n{body}\n{helper}\n```", f"{whole}\n{helper}"),
                         (f"```\n{body}\n```\nTruth table:\n```\n0 | 1\n```", whole),
                         (f"{body}\nThat is all.", whole)):  # verilog-eval passes all three
        assert extraction.extract_code(text, header) == (wanted, "body of the given header")


@given(st.text(alphabet="`\nmodule Topend;<>|[]BEGINDONEthik ", max_size=200))
@settings(max_examples=200, deadline=None)
def test_extract_code_never_raises_and_returns_text_of_the_answer(text):
    code, how = extraction.extract_code(text)
    assert isinstance(how, str) and (code is None or code in text.replace("\r", "\n"))


COUNTER = "\n".join((
    "module ff(input c, d, output reg q);", "  always @(posedge c) q <= d;", "endmodule",
    "module TopModule(input clk, d, output q);", "  ff one(clk, d, q);", "endmodule"))
TAGS = ("</think>", "<think>", "<answer>", "</answer>", "<answer></answer>", "[BEGIN]", "[DONE]",
        "[BEGIN] and [DONE]", "<|channel>", "<channel|>", "<|channel>thought<channel|>")


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_in_a_comment_a_fence_or_prose_is_text_like_any_other(tag):
    """Wherever it stands in a right answer, the same two modules are found."""
    fenced = f"```verilog\n{COUNTER}\n```"
    said = f"I was told to use {tag}, so here it is."
    answers = [f"{said}\n{fenced}", f"{fenced}\n{said}", f"{said}\n{COUNTER}\n{said}",
               f"[BEGIN]\n{COUNTER}\n[DONE]\n{said}", f"<answer>\n{fenced}\n</answer>\n{said}"]
    for answer in answers:
        assert extraction.extract_code(answer)[0] == COUNTER, answer
    lines = COUNTER.split("\n")
    for place in range(len(lines)):
        for comment in (f"  // {tag}", f"  /* {tag}\n {tag} */"):
            code = "\n".join([*lines[:place], lines[place] + comment, *lines[place + 1:]])
            for answer in (code, f"```\n{code}\n```", f"[BEGIN]\n{code}\n[DONE]"):
                found = extraction.extract_code(answer)[0]
                assert found and code.startswith(found), answer
                assert extraction.bare_modules(found) == extraction.bare_modules(COUNTER)


def test_a_bit_select_with_a_space_is_no_mark():
    code = "module TopModule(input [9:0] s, output x);\nassign x = s [BEGIN] | s [DONE];\nendmodule"
    for answer in (code, f"```\n{code}\n```", f"[BEGIN]\n{code}\n[DONE]"):
        assert extraction.extract_code(answer)[0] == code


def test_a_thought_stands_at_the_beginning_only():
    drafted = f"<think>\n```\n{BITS}\n```\n</think>\n{TOP}"
    assert extraction.extract_code(drafted) == (TOP, "no fence")
    assert extraction.extract_code("Well. " + drafted) == (BITS, "fence")


@pytest.mark.parametrize("piece", [
    "/*", "/* */ /*", "(*", "(* *)", "(* *)\n", "module ", "module a ", "\nmodule a", "\nmodule a;",
    "module automatic ", "```", "\n```\n", "\n```\nmodule a;\n", "<answer>", "[BEGIN]",
    "\n[BEGIN]\n", "<answer>\nmodule a;\n", "[BEGIN]module a;[DONE]", "//", "\n", " ",
    "\nendmodule"])
def test_time_grows_with_the_length_alone(piece):
    """300,000 characters took the old rule minutes where nothing closed a comment or a module."""
    text = piece * (300_000 // len(piece))
    start = time.process_time()
    extraction.extract_code(text)
    extraction.extract_code(text, "module TopModule(input a);")
    extraction.extract_official(text)
    extraction.bare_modules(text)
    assert time.process_time() - start < 15


def official_code(text, interface):
    """What verilog-eval's own sv-generate writes for an answer: its lines, run as they are."""
    source = (Path(CHECKOUT) / "scripts" / "sv-generate").read_text()
    start = source.index("  file = open( opts.output, 'w' )\n"
                         '  print( "", file=file )\n\n  if task ==')
    part = source[start:source.index("\nmain()", start)]
    part = textwrap.dedent(part).replace("file.close()", "")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "p_ifc.txt").write_text(interface)
        opts = types.SimpleNamespace(output=f"{folder}/out.sv",
                                     prompt_filename=f"{folder}/p_prompt.txt")
        reply = types.SimpleNamespace(content=text)
        names = {"opts": opts, "resp": reply, "model": "m", "sys": sys,
                 "task": "code-complete-iccad2023" if interface else "spec-to-rtl"}
        exec(part, names)
        names["file"].close()
        return [line for line in (Path(folder) / "out.sv").read_text().splitlines()
                if line.strip() and "VERILOG-EVAL" not in line]


PIECES = [TOP, "```verilog", "```", "[BEGIN]", "[DONE]", "Sure.", "  endmodule",
          "module TopModule(input a);", "wire x;", "[BEGIN] module TopModule;", "endmodule [DONE]",
          "module other;", "endmodule"]


@pytest.mark.skipif(not CHECKOUT, reason="VERILOG_EVAL_DIR names no checkout of verilog-eval")
@pytest.mark.parametrize("interface", ["", "module TopModule(input a, output b);"])
def test_the_official_rule_is_verilog_evals_own(interface):
    generator = random.Random(0)
    for _ in range(300):
        text = "\n".join(generator.choice(PIECES) for _ in range(generator.randint(1, 9)))
        code, _ = extraction.extract_official(text, interface)
        wanted = official_code(text, interface)
        if not code:  # theirs writes the interface and nothing to complete it
            assert wanted in ([], [interface]), text
        else:
            assert [line for line in code.splitlines() if line.strip()] == wanted, text


@pytest.mark.parametrize("answer", [f"[BEGIN]\n{TOP}\n[DONE]", f"```verilog\n{TOP}\n```", TOP])
@pytest.mark.parametrize("idea", ["Let me see.", f"[BEGIN]\n{TOP} // draft\n[DONE]",
                                  f"```\n{TOP} // draft\n```"])
def test_the_official_rule_never_sees_a_thought(answer, idea):
    """verilog-eval asks APIs that keep it apart; here it stands before the answer, on one line."""
    told = f"<|channel>thought\n{idea}\n<channel|>{answer}"
    code, _ = extraction.extract_official(told)
    assert code is not None and code.strip() == TOP
    if CHECKOUT:
        lines = [line for line in code.splitlines() if line.strip()]
        assert lines == official_code(answer, "")
    cut = told.partition("<channel|>")[0]
    assert extraction.extract_official(cut) == (None, "thought never ends")


def test_where_the_two_rules_differ():
    """07's questions: drafts, a fence between marks, a mark that is missing."""
    other = TOP.replace(";", "; wire draft;", 1)
    for text, ours, theirs in ((f"```\n{other}\n```\n```\n{TOP}\n```", TOP, other),
                               (f"[BEGIN]\n{TOP}", TOP, None),
                               (f"[BEGIN]\n```\n{TOP}\n```\n[DONE]", TOP, f"```\n{TOP}\n```")):
        assert extraction.extract_code(text)[0] == ours
        assert (extraction.extract_official(text)[0] or "").strip() == (theirs or "")


def test_questions_of_ones_own(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "4"}\n'
                    '{"question": "Capital of France?", "answer": "Paris"}\n')
    for score_, wanted in ((exams.contains, [1.0, 0.5]),
                           (lambda question, answer, reference: 0.25, [0.25, 0.25])):
        bench = exams.questions(path, score_)
        answered = dict(zip((p.name for p in bench.problems), (["It is 4."], ["paris", "Rome"])))
        assert list(scores.grade(bench, answered)) == wanted
    path.write_text('{"question": "x"}\n')
    with pytest.raises(ValueError, match="line 1: give each line as"):
        exams.questions(path)


def test_a_score_sees_an_answer_without_its_thought(tmp_path):
    """A model that was trained to think thinks here, too: every exact score once was 0."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "4"}\n')
    bench = exams.questions(path, lambda question, answer, wanted: float(answer == wanted))
    texts = ["<|channel>thought\n4? Or 5?\n<channel|>4", "<think>5</think>\n4\n", "4",
             "<|channel>thought\n4"]
    graded = [scores.grade(bench, {"00001": [text]})[0] for text in texts]
    assert graded == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("value", [None, math.nan, 50, -0.1, "much"])
def test_a_score_that_is_none_is_an_error(tmp_path, value):
    """A score without `return` gave None, the mean NaN, and the comparison p = 0."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "4"}\n')
    bench = exams.questions(path, lambda question, answer, wanted: value)
    with pytest.raises(UserError, match=f"score returned {value} .*00001.* from 0 to 1"):
        scores.grade(bench, {"00001": ["4"]})


def test_an_empty_reference_is_in_every_answer(tmp_path):
    """So `contains` refuses it. A score of one's own may do without, and 02 reads no answer."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": " "}\n')
    with pytest.raises(UserError, match="The answer to '2 . 2.' is empty in your file"):
        scores.grade(exams.questions(path), {"00001": ["5"]})
    own = exams.questions(path, lambda question, answer, wanted: 0.5)
    assert list(scores.grade(own, {"00001": ["5"]})) == [0.5]


def test_a_file_of_questions_may_hold_what_json_lines_may_hold(tmp_path):
    """U+2028 and NEL inside a text, a byte-order mark, blank lines, and no line feed at the end."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes('\ufeff{"question": "a\u2028b", "answer": "c\x85d"}\r\n\n'
                     '{"question": 1, "answer": 2.5}'.encode())
    first, second = exams.questions(path).problems
    assert (first.prompt, first.reference) == ("a\u2028b", "c\x85d")
    assert (second.name, second.prompt, second.reference) == ("00003", "1", "2.5")


@pytest.mark.parametrize("line", [b'{"question": "x", "answer": null}', b"[1]", b"{", b"[" * 99_999,
                                  b'{"question": "caf\xe9", "answer": "x"}'])
def test_a_bad_question_is_named_by_its_line(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"question": "x", "answer": "y"}\n\n' + line)
    with pytest.raises(UserError, match="line 3: give each line as"):
        exams.questions(path)
    with pytest.raises(UserError, match="There is no file"):
        exams.questions(tmp_path / "other.jsonl")


@pytest.mark.parametrize("suffix, text", [
    ("_ref.sv", ""), ("_ref.sv", None), ("_ref.sv", "module Other; endmodule"),
    ("_prompt.txt", " \n"), ("_test.sv", None), ("_test.sv", "module tb; endmodule"),
    ("_test.sv", "")])
def test_a_broken_problem_is_an_error_that_names_its_file(tmp_path, suffix, text):
    folder = tmp_path / "mine"
    shutil.copytree(FIXTURES / "verilog_eval", folder)
    path = folder / f"Prob041_dff8r{suffix}"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=path.name):
        exams.load_problems(folder)
    with pytest.raises(UserError, match="no such folder"):
        exams.load_problems(tmp_path / "mistyped")


def test_verilog_is_a_benchmark_like_any_other():
    bench = scores.verilog_eval(FIXTURES / "verilog_eval")
    right = {}
    for problem in bench.problems:
        right[problem.name] = [problem.reference.replace("RefModule", "TopModule"), "prose"]
    assert list(scores.grade(bench, right)) == [0.5] * 3


# ---- Sampling ----

class FakeServer:
    """Enough of /v1/completions: answers name their prompt; it can refuse."""

    def __init__(self, refuse=lambda ids: False, delay=0.0):
        self.asked, self.flying, self.most, lock = [], 0, 0, threading.Lock()
        self.keys = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.asked.append(body)
                    outer.keys.append(self.headers["Authorization"])
                    outer.flying += 1
                    outer.most = max(outer.most, outer.flying)
                time.sleep(delay)
                with lock:
                    outer.flying -= 1
                refused = refuse(body["prompt"])
                answer = {
                    "id": "x", "object": "text_completion", "created": 0, "model": "m",
                    "choices": [{"index": 0, "text": f"answer to {body['prompt']}<turn|>",
                                 "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}}
                if refused:
                    answer = {"error": {"message": "no", "type": "BadRequestError", "code": 400}}
                data = json.dumps(answer).encode()
                self.send_response(400 if refused else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


PLANS = Plan("a", n=3), Plan("greedy", n=1, temperature=0.0)
TASK = {"spec-to-rtl": [exams.Problem(f"p{i}", "", "", "") for i in range(6)]}
PROMPTS = {("ours", False, problem): [2, number]
           for number, problem in enumerate(TASK["spec-to-rtl"])}


def asked_of(server, jobs, path, in_flight=8, **client):
    """`sample` with a client of a small server."""
    told = {"patience": 2.0, "turn_end": "<turn|>", **client}
    return sample(jobs, path, Client(server.url, "m", 100, **told), 7, in_flight)


@pytest.fixture
def jobs():
    return plan_jobs(PLANS, TASK, PROMPTS, "model")


def test_sampling_asks_for_everything_once_and_in_parallel(jobs, tmp_path):
    server = FakeServer(delay=0.05)
    path = tmp_path / "base" / "samples.jsonl"
    samples = asked_of(server, jobs, path)
    assert list(read_samples(path, jobs)) == list(jobs) and len(server.asked) == len(jobs) == 24
    assert server.most >= 4
    assert samples["a", "p3", 2]["text"] == "answer to [2, 3]"
    for body in server.asked:
        assert body["max_tokens"] == 7 and body["top_k"] == 0 and "seed" not in body
    assert collections.Counter(body["temperature"] for body in server.asked) == {0.8: 18, 0.0: 6}
    before = path.read_bytes()
    assert asked_of(server, jobs, path).keys() == jobs.keys()
    assert len(server.asked) == 24 and path.read_bytes() == before
    server.close()


def test_a_killed_run_continues_to_the_same_file(jobs, tmp_path):
    """SIGKILL in the middle, half a line at the end: nothing saved is asked for again."""
    server = FakeServer(delay=0.15)
    path = tmp_path / "base" / "samples.jsonl"
    script = tmp_path / "run.py"
    script.write_text(f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]
import test_eval as t
from pathlib import Path
jobs = t.plan_jobs(t.PLANS, t.TASK, t.PROMPTS, "model")
t.sample(jobs, Path({str(path)!r}), t.Client({server.url!r}, "m", 100, "<turn|>"), 7, 2)
""")
    process = subprocess.Popen([sys.executable, str(script)])
    end = time.monotonic() + 60
    while time.monotonic() < end and (not path.exists() or path.read_text().count("\n") < 5):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = read_samples(path, jobs)
    assert 5 <= len(saved) < len(jobs)
    with open(path, "a") as file:
        file.write('{"plan": "a", "problem": "p5", "ind')
    asked = len(server.asked)
    samples = asked_of(server, jobs, path)
    assert len(server.asked) - asked == len(jobs) - len(saved)
    assert all(samples[place] == row for place, row in saved.items())
    fresh = tmp_path / "other" / "samples.jsonl"
    asked_of(server, jobs, fresh)
    assert fresh.read_bytes() == path.read_bytes()
    server.close()


def test_a_key_that_the_server_asks_for_is_sent(monkeypatch):
    """05 can start a server with VLLM_API_KEY; 07 once asked it with another key."""
    server = FakeServer()
    monkeypatch.setenv("VLLM_API_KEY", "k-1")
    key = Options(model="m", environment=("VLLM_API_KEY",)).key()
    assert key == "k-1" and Options(model="m").key() == ""
    Client(server.url, "m", 100, key=key).complete([1], 5, 0.0, 1.0, {})
    Client(server.url, "m", 100).complete([1], 5, 0.0, 1.0, {})
    server.close()
    assert server.keys == ["Bearer k-1", "Bearer unused"]


def test_answers_of_another_model_plan_or_prompt_do_not_count(jobs, tmp_path):
    server = FakeServer()
    path = tmp_path / "base" / "samples.jsonl"
    asked_of(server, jobs, path)
    plan = Plan("a", n=3)

    def found(*others):
        return len(read_samples(path, plan_jobs(*others)))
    assert found((plan,), TASK, PROMPTS, "model") == 18
    assert found((plan,), TASK, PROMPTS, "another model") == 0
    assert found((dataclasses.replace(plan, temperature=0.7),), TASK, PROMPTS, "model") == 0
    assert found((plan,), TASK, {key: [9] for key in PROMPTS}, "model") == 0
    assert found((dataclasses.replace(plan, n=4),), TASK, PROMPTS, "model") == 18  # more: 6 to ask
    server.close()


def test_failed_requests_are_no_answers_and_long_prompts_are(jobs, tmp_path):
    server = FakeServer(refuse=lambda ids: ids == [2, 4])
    path = tmp_path / "base" / "samples.jsonl"
    long = ("a", "p1", 0)
    jobs[long] = dataclasses.replace(jobs[long], ids=[2] * 100)
    with pytest.raises(ValueError, match="4 requests failed .*HTTP 400.* Run this again"):
        asked_of(server, jobs, path)
    assert len(read_samples(path, jobs)) == 20
    server.close()
    healthy = FakeServer()  # a later run asks again for what was refused, and for nothing else
    samples = asked_of(healthy, jobs, path)
    assert len(healthy.asked) == 4
    ends = collections.Counter(row["finish"] for row in samples.values())
    assert ends == {"stop": 23, "too long": 1}
    problems = [exams.Problem(f"p{i}", "x", "module RefModule; endmodule", "tb") for i in range(6)]
    frame = scores.judge_answers(samples, {"spec-to-rtl": problems}, PLANS)
    assert len(frame) == 24 and set(frame.category) == {"no code"} and not frame.passed.any()
    healthy.close()


def damaged(line, other):
    """Ten forms of damage to a line of samples.jsonl, as bytes."""
    row, raw = json.loads(line), line.encode()
    without = {name: value for name, value in row.items() if name != "tokens"}
    return {
        "cut in the middle": raw[:len(raw) // 2], "two in one": raw[:-9] + other.encode(),
        "no UTF-8": raw.replace(b"answer", b"ans\xffer"), "null bytes": raw[:20] + bytes(30),
        "a list": b"[1, 2]", "a number": b"7", "a key is missing": json.dumps(without).encode(),
        "no text": json.dumps(row | {"text": None}).encode(), "brackets": b"[" * 100_000,
        "a place that's a list": json.dumps(row | {"problem": ["p0"]}).encode()}


@pytest.mark.parametrize("form", damaged('{"text": "answer"}', ""))
def test_a_damaged_line_is_asked_for_again_and_nothing_else(jobs, tmp_path, form):
    server = FakeServer()
    path = tmp_path / "base" / "samples.jsonl"
    asked_of(server, jobs, path)
    lines = path.read_text().splitlines()
    whole = path.read_bytes()
    broken = damaged(lines[7], lines[8])[form]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join([*lines[:7], ""]).encode() + broken
                     + "\r\n\n".join(["", *lines[8:], ""]).encode())  # and what's allowed
    asked = len(server.asked)
    asked_of(server, jobs, path)
    assert len(server.asked) - asked == 1 and path.read_bytes() == whole
    server.close()


@pytest.mark.parametrize("names", [("HTTP_PROXY", "http_proxy"), ("ALL_PROXY", "all_proxy")])
def test_our_own_server_is_asked_directly_whatever_the_environment_says(jobs, tmp_path, monkeypatch,
                                                                        names):
    for name in names:
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = FakeServer()
    assert len(asked_of(server, jobs, tmp_path / "samples.jsonl")) == len(jobs)
    server.close()


def test_this_machine_is_known_by_each_of_its_addresses():
    for url in ("http://127.0.0.1:8000", "http://localhost:8000", "http://127.0.0.2"):
        assert is_this_machine(url), url
    for url in ("http://192.0.2.1:8000", "http://no-such-host.invalid", "http://:80"):
        assert not is_this_machine(url), url


def test_nobody_waits_for_a_server_that_has_died(jobs, tmp_path):
    server = FakeServer()
    server.close()
    start = time.monotonic()
    with pytest.raises(ValueError, match="has died.*run this notebook again"):
        asked_of(server, jobs, tmp_path / "samples.jsonl", patience=600.0, alive=lambda: False)
    assert time.monotonic() - start < 30
    with pytest.raises(ValueError, match=f"{server.url} hasn't answered for 1 s"):
        asked_of(server, jobs, tmp_path / "samples.jsonl", patience=1.0)


def test_prompts_are_the_official_ones_and_ours_without_hints():
    problem = PROBLEMS["Prob022_mux2to1"]
    ours = messages_for(problem, "ours", "S")
    assert ours == [{"role": "system", "content": "S"},
                    {"role": "user", "content": problem.prompt.strip()}]
    assert messages_for(problem, "ours", None) == ours[1:]
    system, user = (m["content"] for m in messages_for(problem, "official", "S"))
    assert system == ("You are a Verilog RTL designer that only writes code using correct Verilog "
                      "syntax.")
    assert user.startswith(f"\nQuestion:\n{problem.prompt.strip()}\n")
    assert user.endswith("do NOT output anything else.\n\nAnswer:\n")
    assert "[BEGIN] and [DONE]" in user
    complete = dataclasses.replace(problem, prompt="Choose.\nmodule TopModule(\n  input a\n);\n",
                                   interface="module TopModule(\n  input a\n);\n")
    text = messages_for(complete, "official", None)[1]["content"]
    assert "// Choose.\n" in text and "\nmodule TopModule(\n  input a\n);" in text


def test_every_wording_and_thinking_only_where_asked(tmp_path):
    problem, asked = PROBLEMS["Prob022_mux2to1"], []
    plans = [Plan("a"), Plan("b", "official", thinking=True, max_tokens=99),
             Plan("c", "examples"), Plan("d", "comment")]

    def render(messages, thinking):
        asked.append((messages[0]["content"], thinking))
        return [1]
    prompts = all_prompts({"spec-to-rtl": [problem]}, plans, "S", render, lambda text: text)
    assert [thinking for _, thinking in sorted(asked)] == [False, True]
    examples, comment = (prompts[wording, False, problem] for wording in ("examples", "comment"))
    assert examples.endswith(f"{problem.prompt.strip()}\n\nmodule TopModule")
    assert "S" not in examples.split()[:5]
    assert comment.startswith("// TopModule\n//\n// ") and comment.endswith("\n\n")
    shown = re.findall(r"(module TopModule.*?endmodule)\n", examples, re.S)
    assert len(shown) >= 2
    for code in shown:
        (tmp_path / "shown.sv").write_text(code)
        compiled = program("iverilog", "-g2012", "-Wall", "-tnull", tmp_path / "shown.sv")
        assert compiled.returncode == 0 and not compiled.stderr


def test_a_comment_is_what_the_corpus_has_above_a_module():
    """07's wording is 09's: the same text above the module, for all families of the tiny world."""
    problems = {p.name: p for p in exams.load_problems(ROOT / "data" / "tiny_eval")}
    for name, design, _ in make.problems():
        listed = "\n".join(f"// {port}" for port in make.interface(design).split("\n"))
        comment = f"// TopModule\n//\n{listed}\n//\n// {design.spec}\n\n"
        assert text_to_continue(problems[name], "comment") == comment


# ---- Statistics ----

def test_pass_at_k_is_unbiased():
    p, n, k = 0.35, 6, 3
    mean = sum(math.comb(n, c) * p**c * (1 - p)**(n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert math.isclose(mean, 1 - (1 - p)**k)


def test_the_published_gap_is_found_at_pass_1_and_not_at_pass_5():
    import pandas as pd
    paper = pd.read_csv(ROOT / "data/published/eval_per_problem_digitized.csv")
    assert paper.tpu_passed_of_5.sum() == 500 and paper.gpu_passed_of_5.sum() == 544
    found = {}
    for k in (1, 5):
        tpu = [pass_at_k(5, c, k) for c in paper.tpu_passed_of_5]
        gpu = [pass_at_k(5, c, k) for c in paper.gpu_passed_of_5]
        found[k] = compare(tpu, gpu)
    assert 0.003 < found[1]["p"] < 0.007
    assert found[1]["difference"] == pytest.approx((0.0564, 0.019, 0.095), abs=0.004)
    assert found[5]["p"] == pytest.approx(0.607, abs=0.01) and (found[5]["values"] != 0).sum() == 15
    assert found[5]["difference"][1] < 0 < found[5]["difference"][2]


def test_the_board_has_a_column_for_each_real_subset():
    runs = {("tuned", "p"): [(5, 5), (0, 5), (5, 5)]}
    found = board(runs, {"old": [True, True, False], "every": [True] * 3})
    row = found.loc[("p", "pass@1", "tuned")]
    assert list(found) == ["all", "low", "high", "old"]
    assert row["all"] == pytest.approx(2 / 3) and row["old"] == pytest.approx(0.5)


def test_the_board_is_read_in_percent_with_the_models_side_by_side():
    runs = {("tuned", "p"): [(5, 5), (0, 5), (5, 5)], ("base", "p"): [(0, 5)] * 3,
            ("base", "q"): [(5, 5)] * 3}
    shown = scores.percents(board(runs, {"old": [True, True, False]}))
    assert list(shown) == ["base", "tuned", "base old", "tuned old"]
    row = shown.loc["p", "pass@1"]
    assert row["tuned"] == "67 (0 to 100)" and row["base"].startswith("0 (0 to ")
    assert row["tuned old"] == "50" and shown.loc["q", "pass@1"].tuned == "not asked"


def test_a_comparison_has_one_verdict():
    cases = (((0.1, -0.01, 0.2), 0.09, "could be luck"), ((0.0, 0.0, 0.0), 1.0, "no diff"),
             ((0.1, 0.02, 0.2), 0.01, "tuned"), ((-0.1, -0.2, -0.01), 0.01, "base"),
             ((0.1, 0.005, 0.2), 0.06, "edge"), ((0.1, -0.001, 0.2), 0.049, "edge"))
    for difference, p, word in cases:
        assert word in scores.verdict_on(difference, p)
    asked = scores.Wordings("a", "b")
    pairs = {asked: compare([0.0, 0.5, 1.0], [1.0, 1.0, 1.0])}
    row, = scores.pairs_table(pairs, asked).to_dict("records")
    assert (row["base"], row["tuned"]) == ("50", "100") and row["difference"].startswith("+50.0 (")


def test_only_the_primary_comparison_is_judged_by_its_own_p():
    """Six problems won and none lost: p = 2/64. As one of two questions it isn't a finding."""
    won = compare([0.0] * 6 + [1.0] * 32, [1.0] * 38)
    lost = compare([1.0] * 6 + [0.0] * 32, [0.0] * 38)
    assert won["p"] == pytest.approx(2 / 64) and won["difference"][1] > 0
    first, second = scores.Wordings("comment", "chat"), scores.Wordings("greedy", "greedy")
    rows = scores.pairs_table({first: won, second: won}, second).to_dict("records")
    assert [row["base asked by"] for row in rows] == ["greedy", "comment"], "the primary one first"
    assert [row["verdict"] for row in rows] == ["the tuned model is better", "at the edge of luck"]
    assert rows[0]["p by Holm"] == "" and rows[1]["p by Holm"] == "0.062"
    runs = {("base", "greedy"): [(0, 1)] * 38, ("tuned", "greedy"): [(1, 1)] * 38,
            ("tuned", "official"): [(0, 1)] * 38}
    assert scores.findings({first: won, second: lost}, second, runs) == [
        "Primary: -15.8 (-28.9 to -5.3) points, p = 0.031: the base is better.",
        "Asked by official, the tuned model passes 0 of 38."]


def test_the_primary_comparison_comes_first_and_every_other_wording_once():
    first, *others = scores.compared_wordings(plans.SHORT, "comment")
    assert first == ("comment", "trained chat")
    assert others == [
        ("trained chat", "trained chat"), ("two examples", "trained chat"),
        *((name, name) for name in plans.greedy_of_both(plans.SHORT))]


def test_a_base_that_thinks_may_be_the_rival():
    assert plans.sampled_wordings(plans.SHORT) == ["trained chat", "two examples", "comment"]
    assert plans.sampled_wordings(plans.LARGE)[-2:] == ["official", "thinking"]
    assert plans.greedy_of_both(plans.SHORT) == [plan.name for plan in plans.SHORT[3:]]
    assert {plan.name for plan in plans.asked_of("tuned", plans.LARGE)} == {
        plan.name for plan in plans.LARGE} - {"two examples", "comment", "thinking"}


def test_a_reference_in_the_training_rows_is_found():
    problems = list(PROBLEMS.values())[:2]
    renamed = problems[0].reference.replace("RefModule", "mine")
    found = scores.leaks(problems, ["nothing", f"// a comment\n{renamed}"])
    assert found.names == [problems[0].name] and found.trained == 1


def test_the_shortest_failure_is_one_that_runs():
    import pandas as pd
    name = next(iter(PROBLEMS))
    code = {0: "module TopModule; wire longer; endmodule", 1: "module TopModule; endmodule", 2: ""}
    frame = pd.DataFrame({"plan": ["a", "a", "a"], "problem": [name] * 3,
                          "index": [0, 1, 2], "category": ["mismatch", "mismatch", "no code"]})
    samples = {("a", name, index): {"text": text} for index, text in code.items()}
    problem, shortest = scores.shortest_failure(frame, samples, "a", PROBLEMS.values())
    assert problem.name == name and shortest.strip() == code[1]
    assert scores.shortest_failure(frame, samples, "b", PROBLEMS.values()) is None


def test_a_server_starts_only_if_an_answer_is_missing(jobs, tmp_path):
    def refuse():
        raise AssertionError("a server was started")
    rows = {place: {"plan": place[0], "problem": place[1], "index": place[2], "key": job.key,
                    "text": "", "finish": "stop", "tokens": 1} for place, job in jobs.items()}
    file = tmp_path / "samples.jsonl"
    asking.write_samples(file, jobs, rows)
    assert asking.saved_or_asked(jobs, file, refuse, 8, 1) == rows
    asking.write_samples(file, jobs, dict(list(rows.items())[1:]))
    with pytest.raises(AssertionError, match="a server was started"):
        asking.saved_or_asked(jobs, file, refuse, 8, 1)


def test_what_points_at_our_limits_is_counted():
    import pandas as pd
    frame = pd.DataFrame({"finish": ["length", "stop", "stop"],
                          "category": ["pass", "refused", "timeout"],
                          "late": [False, False, True], "passed": [True, False, False],
                          "ours": [True, True, False]})
    assert re.findall(r"\d+", scores.oddities(frame)) == ["1", "1", "1", "1"]
    whole = frame.assign(finish="stop", category="pass", late=False, ours=frame.passed)
    assert re.findall(r"\d+", scores.oddities(whole)) == ["0", "0", "0", "0"]


def test_nothing_leaves_the_denominator():
    import pandas as pd
    frame = pd.DataFrame({"plan": ["a"] * 4, "problem": ["x", "x", "y", "y"],
                          "passed": [True, False, False, False]})
    assert counts(frame, "a", ["x", "y"]) == [(1, 2), (0, 2)]
    with pytest.raises(AssertionError):
        counts(frame, "a", ["x", "y", "z"])


def test_waveform_of_a_failure(tmp_path):
    problem = PROBLEMS["Prob041_dff8r"]
    wrong = problem.reference.replace("RefModule", "TopModule")
    wrong = wrong.replace("r <= d", "r <= d + 1").replace("q <= d", "q <= d + 1")
    verdict = judging.judge(problem, wrong, waves=tmp_path / "wave.vcd")
    signals = scores.waveform(tmp_path / "wave.vcd")
    assert {"clk", "reset", "d", "q_ref", "q_dut", "tb_mismatch"} <= set(signals)
    seen = scores.before_first_mismatch(signals, verdict.log).iloc[-1]
    assert seen.q_ref != seen.q_dut and len(seen.q_ref) == 8 and seen.tb_mismatch == "1"
    assert scores.wrong_outputs(seen) == ["q"]
    assert len(scores.before_first_mismatch(signals, "no such line")) == len(signals)


# ---- A finished run ----

def some_problems(folder, *names):
    """A folder of problems with some of the tiny benchmark's."""
    folder.mkdir()
    for name in names:
        for path in (ROOT / "data" / "tiny_eval").glob(f"{name}_*"):
            shutil.copy(path, folder)


def eval_page(folder, problems):
    """07 as a script, on a copy of the finished run, with other problems."""
    source = (ROOT / "07_eval.py").read_text()
    assert source.count('problems="data/tiny_eval"') == 1
    changed = source.replace('problems="data/tiny_eval"', f"problems={problems!r}")
    (folder / "07.py").write_text(changed)
    for part in ("merged", "data", "serve", "eval"):
        shutil.copytree(RUN / part, folder / "run" / part)
    shutil.copy(RUN / "merge.json", folder / "run")
    return page(folder / "07.py", folder / "run")


judged_run = pytest.mark.skipif(not (RUN / "eval" / "comparison.json").exists(),
                                reason=f"no evaluation in {RUN}")


@pytest.mark.series
@judged_run
def test_a_benchmark_may_be_small(tmp_path):
    """07 with two problems: their answers are saved, so no server is asked."""
    some_problems(tmp_path / "mine", "Prob004_mux2", "Prob037_fsm")
    done = eval_page(tmp_path, str(tmp_path / "mine"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run/eval/tuned/summary.json").read_text())["n_problems"] == 2


@pytest.mark.series
@judged_run
@pytest.mark.parametrize("name, told", [
    ("mistyped", "Error: .*mistyped"),
    ("unwinnable", "Error: no reference of spec-to-rtl passes its own testbench")])
def test_a_folder_of_problems_that_cannot_be_used_is_one_line(tmp_path, name, told):
    """And nothing is made or changed beside the run."""
    some_problems(tmp_path / "unwinnable", "Prob004_mux2")
    bench = tmp_path / "unwinnable" / "Prob004_mux2_test.sv"
    early = 'initial begin $display("TIMEOUT");'  # which the official rules fail
    bench.write_text(bench.read_text().replace("initial begin", early, 1))
    done = eval_page(tmp_path, str(tmp_path / name))
    assert done.returncode and re.search(told, done.stderr) and "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"unwinnable", "07.py", "run"}


@pytest.mark.series
@judged_run
def test_a_finished_run_adds_up():
    comparison = json.loads((RUN / "eval/comparison.json").read_text())
    for label in ("base", "tuned"):
        summary = json.loads((RUN / "eval" / label / "summary.json").read_text())
        lines = (RUN / "eval" / label / "samples.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        plans = {plan["name"]: plan["n"] for plan in summary["settings"]["plans"]
                 if plan["only"] in ("", label)}
        assert len(rows) == summary["n_problems"] * sum(plans.values())
        for plan, n in plans.items():
            assert sum(summary["categories"][plan].values()) == summary["n_problems"] * n
            assert all(total == n for _, total in summary["counts"][plan].values())
        main = comparison["plan"]["name"]
        mine = np.mean([c / n for c, n in summary["counts"][main].values()])
        assert math.isclose(comparison[label]["pass@1"], mine) and summary["icarus"]
    assert comparison["against"][comparison["rival"]]["difference"] == min(
        found["difference"] for found in comparison["against"].values())
