"""scripts/harness.sh: lm-evaluation-harness and `verilog.questions` give the same score.

The server is ours: it answers some questions right, some wrong, some with space around them, so
that neither model nor vLLM is needed. `HARNESS` names an environment that isn't .venv-harness.
"""

import http.server
import json
import os
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT, a_server_record, program

import verilog
from helpers import chat

ASSETS = ROOT / "assets" / "tiny_gemma4"
PORTS = ROOT / "data" / "ports" / "held_out.jsonl"
HARNESS = ROOT / os.environ.get("HARNESS", ".venv-harness")


def harness(*words, **env):
    return program("bash", ROOT / "scripts" / "harness.sh", *words, **env)


def answers():
    """{question: what our server says}: of ten questions, six right, two of them with space."""
    lines = map(json.loads, PORTS.read_text().splitlines())
    said = {}
    for place, row in enumerate(lines):
        forms = {0: f"\n{row['answer']} ", 1: row["answer"].upper(), 2: row["answer"] + " More.",
                 3: " ", 4: "The ports are in the module."}
        said[row["question"]] = forms.get(place % 10, row["answer"])
    return said


@pytest.fixture
def server(tmp_path):
    """(the folder of its record, the requests that came)."""
    tokenizer = chat.load_tokenizer(ASSETS)
    said, requests = answers(), []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            choices = []
            for place, ids in enumerate(body["prompt"]):
                text = tokenizer.decode(ids)
                question = next(question for question in said if question in text)
                choices.append({"index": place, "text": said[question]})
            content = json.dumps({"choices": choices}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        record = replace(a_server_record(f"http://127.0.0.1:{running.server_port}"),
                         model=str(ASSETS), name="tiny")
        (tmp_path / "server.json").write_text(json.dumps(asdict(record)))
        yield tmp_path, requests
        running.shutdown()


@pytest.mark.skipif(not (HARNESS / "bin/lm_eval").exists(),
                    reason="no .venv-harness: ./setup.sh harness makes it")
def test_exact_match_is_the_score_of_verilog_questions(server):
    folder, requests = server
    done = harness(folder, "ports", HARNESS=str(HARNESS), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    results, = Path(folder).glob("harness/*/results_*.json")
    theirs = json.loads(results.read_text())["results"]["ports"]["exact_match,stripped"]

    benchmark = verilog.questions(PORTS, lambda question, answer, wanted: answer == wanted)
    said = answers()
    pairs = [(problem, benchmark.extract(said[problem.prompt], problem))
             for problem in benchmark.problems]
    ours = benchmark.grade(pairs)
    assert theirs == pytest.approx(sum(ours) / len(ours)) and 0.3 < theirs < 0.9

    tokenizer = chat.load_tokenizer(ASSETS)
    wanted = [chat.prompt_ids(tokenizer, [{"role": "user", "content": problem.prompt}], False)
              for problem in benchmark.problems]
    sent = [ids for request in requests for ids in request["prompt"]]
    assert sorted(map(list, sent)) == sorted(map(list, wanted))  # what 02 trains and 05 serves
    assert all(request.get("seed") is None and request["temperature"] == 0 for request in requests)


def test_what_is_missing_is_said_in_one_line(tmp_path):
    done = harness(tmp_path, "ports", HARNESS=str(tmp_path / "none"))
    assert done.returncode == 1 and done.stderr == (
        "harness: lm-evaluation-harness is not installed. Run ./setup.sh harness\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lm_eval").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "lm_eval").chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(ROOT / ".venv/bin/python")
    done = harness(tmp_path / "nowhere", "ports", HARNESS=str(tmp_path))
    assert done.returncode == 1 and "no server is recorded in" in done.stderr
    record = a_server_record("http://127.0.0.1:1")
    (tmp_path / "server.json").write_text(json.dumps(asdict(record)))
    done = harness(tmp_path, "ports", HARNESS=str(tmp_path))
    assert done.returncode == 1 and "does not answer at http://127.0.0.1:1." in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "scripts/harness.sh FOLDER ports" in harness().stdout


def test_our_own_server_is_asked_past_any_proxy(server, tmp_path):
    """A lower-case no_proxy of the shell's comes before NO_PROXY, for urllib and requests alike."""
    folder, _ = server
    stub = tmp_path / "stub" / "bin"
    stub.mkdir(parents=True)
    (stub / "python").symlink_to(ROOT / ".venv/bin/python")
    code = "import urllib.request as u; print(u.proxy_bypass('127.0.0.1:8000'), u.getproxies())"
    (stub / "lm_eval").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}"\n')
    (stub / "lm_eval").chmod(0o755)
    shell = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "corp.example"}
    done = harness(folder, "ports", HARNESS=str(stub.parent), **shell)
    assert done.stdout.startswith("True {") and "127.0.0.1:9" in done.stdout, done.stderr
