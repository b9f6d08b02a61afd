"""scripts/harness.sh: lm-evaluation-harness and `verilog.questions` give the same score.

Most tests ask a server of ours: it answers some questions right, some wrong, some with space around
them, and it refuses what vLLM refuses, so that neither model nor vLLM is needed. One test asks vLLM
with the model that own_data tuned. `HARNESS` names an environment that isn't .venv-harness.
"""

import http.server
import json
import os
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import yaml
from conftest import ROOT, RUN, a_server_record, needs_serve, program, serve
from test_ci import stubs  # noqa: F401

import helpers
import serving
import verilog
from helpers import chat, exam
from serving import Options
from verilog import asking, client, plans

ASSETS = ROOT / "assets" / "tiny_gemma4"
PORTS = ROOT / "data" / "ports" / "held_out.jsonl"
HARNESS = ROOT / os.environ.get("HARNESS", ".venv-harness")
needs_harness = pytest.mark.skipif(not (HARNESS / "bin/lm_eval").exists(),
                                   reason="no .venv-harness: ./setup.sh harness makes it")
OWN = sorted(RUN.glob("own/*/merged"))  # of the series' own_data, tuned on data/ports
SYSTEM = "You know every port, and you say nothing else."
PAGE = (ROOT / "docs/OWN_DATA.md").read_text().split("## Score questions of your own")[1]


def harness(*words, cwd=ROOT, **env):
    """The script, with its environment and no hub."""
    told = {"HARNESS": str(HARNESS), "HF_HUB_OFFLINE": "1", **env}
    return program("bash", ROOT / "scripts" / "harness.sh", *words, cwd=cwd, **told)


def theirs(folder):
    """(the harness's own score, what it logged of each question), from one run of it."""
    results, = folder.glob("harness/*/results_*.json")
    score = json.loads(results.read_text())["results"]["ports"]["exact_match,stripped"]
    samples, = folder.glob("harness/*/samples_ports_*.jsonl")
    return score, [json.loads(line) for line in samples.read_text().splitlines()]


def exact():
    """Our own benchmark of the same questions: an answer counts if it's the reference."""
    return verilog.questions(PORTS, lambda question, answer, wanted: answer == wanted)


def answers():
    """{question: what our server says}: of ten questions, six right, two of them with space."""
    lines = map(json.loads, PORTS.read_text().splitlines())
    said = {}
    for place, row in enumerate(lines):
        forms = {0: f"\n{row['answer']} ", 1: row["answer"].upper(), 2: row["answer"] + " More.",
                 3: " ", 4: "The ports are in the module."}
        said[row["question"]] = forms.get(place % 10, row["answer"])
    return said


def refused(body, context):
    """What vLLM says of a request that's too long for a model of so many tokens; "" if it isn't.

    `test_vllm_refuses_in_these_words_and_takes_our_seed_for_none` asks vLLM.
    """
    wanted = body["max_tokens"]
    if wanted > context:
        return (f"max_tokens={wanted} cannot be greater than max_model_len={context}. Please "
                f"request fewer output tokens. (parameter=max_tokens, value={wanted})")
    longest = max(map(len, body["prompt"]))
    if longest > context:
        return (f"This model's maximum context length is {context} tokens. However, your prompt "
                f"contains {longest} input tokens, which exceeds this limit even without any "
                "output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={longest})")
    return ""


def choice(place, ids, said, text):
    """One answer as vLLM forms it; log-probabilities, which are always the same, and an answer."""
    probabilities = [-1.0] * (len(ids) + 1)
    tops = [{"x": -1.0}] * (len(ids) + 1)
    answer = next((said[question] for question in said if question in text), "I don't know.")
    return {"index": place, "text": answer,
            "logprobs": {"token_logprobs": probabilities, "top_logprobs": tops}}


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
            refusal = refused(body, 1024)
            if refusal:
                error = {"message": refusal, "type": "BadRequestError", "code": 400}
                answer = {"error": error}
            else:
                answer = {"choices": [choice(place, ids, said, tokenizer.decode(ids))
                                      for place, ids in enumerate(body["prompt"])]}
            content = json.dumps(answer, separators=(",", ":")).encode()
            self.send_response(400 if refusal else 200)
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


def a_task(folder, name, rows, **changes):
    """Write a task of lm_eval's, with one dict for each question."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {
        "test": str(file)}}, "test_split": "test", "output_type": "generate_until",
        "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<turn|>"], "do_sample": False},
        "metric_list": [{"metric": "exact_match"}], **changes}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def sent_ids(requests):
    return sorted(ids for request in requests for ids in request["prompt"])


@needs_harness
def test_exact_match_is_the_score_of_verilog_questions(server):
    folder, requests = server
    done = harness(folder, "ports")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "harness: " not in done.stderr
    score, _ = theirs(Path(folder))

    benchmark = exact()
    said = answers()
    pairs = [(problem, benchmark.extract(said[problem.prompt], problem))
             for problem in benchmark.problems]
    ours = benchmark.grade(pairs)
    assert score == pytest.approx(sum(ours) / len(ours)) and 0.3 < score < 0.9

    tokenizer = chat.load_tokenizer(ASSETS)
    wanted = [chat.prompt_ids(tokenizer, [{"role": "user", "content": problem.prompt}], False)
              for problem in benchmark.problems]
    assert sent_ids(requests) == sorted(wanted)  # what 02 trains and 05 serves
    assert all(request["seed"] == -1 and request["temperature"] == 0 for request in requests)


@needs_harness
def test_a_system_sentence_and_options_of_ones_own_arrive_and_no_seed(server, tmp_path):
    """The prompts are those of the page's own lines.

    There's no seed with a choice by log-probability, either, where `--gen_kwargs` has no say.
    """
    folder, requests = server
    rows = [{"question": f"Which is {number}?", "answer": "it"} for number in range(3)]
    a_task(tmp_path, "asked", rows)
    a_task(tmp_path, "picked", rows, output_type="multiple_choice", doc_to_choice=["it", "that"],
           doc_to_target=0, generation_kwargs=None, metric_list=[{"metric": "acc"}])
    done = harness(folder, "asked,picked", "--include_path", tmp_path,
                   "--system_instruction", SYSTEM, "--gen_kwargs", "temperature=0.8,max_gen_toks=9")
    assert done.returncode == 0, done.stderr[-3000:]

    render = exam.renderers(chat.load_tokenizer(ASSETS), thinking=False)
    mine = verilog.questions(tmp_path / "asked.jsonl", lambda *_: 0.0)
    my_plans = [replace(plans.GREEDY, name="mine", task="mine")]
    prompts = asking.all_prompts({"mine": mine.problems}, my_plans, SYSTEM, *render)
    answered = [request for request in requests if not request.get("echo")]
    picked = [request for request in requests if request.get("echo")]
    assert sent_ids(answered) == sorted(prompts.values())
    assert [request["max_tokens"] for request in answered] == [9] * 3
    assert [request["temperature"] for request in answered] == [0.8] * 3
    assert len(picked) == 6
    assert {request["seed"] for request in requests} == {-1}


@needs_harness
def test_a_prompt_too_long_for_the_server_is_sent_whole_and_refused_in_its_words(server, tmp_path):
    """lm_eval cuts off the beginning of a prompt that it knows to be too long, and says nothing."""
    folder, requests = server
    question = "Describe the ports. " * 400
    a_task(tmp_path, "long", [{"question": question, "answer": "it"}])
    done = harness(folder, "long", "--include_path", tmp_path)
    tokenizer = chat.load_tokenizer(ASSETS)
    whole = chat.prompt_ids(tokenizer, [{"role": "user", "content": question}], False)
    assert len(whole) > 1024 and all(request["prompt"] == [whole] for request in requests)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(
        "harness: the server refused: This model's maximum context length is 1024 tokens. However, "
        f"your prompt contains {len(whole)} input tokens")
    assert "max_model_len in section 1 of 05" in last and "--num_fewshot 0" in last
    assert not list(folder.glob("harness/*/results_*.json")), "no score of what wasn't asked"


@needs_harness
def test_answers_too_long_for_the_server_are_refused_and_not_asked_of_an_empty_prompt(server):
    """IFEval wants 1280 tokens of an answer, and the tiny server holds 1024 with its prompt."""
    folder, requests = server
    done = harness(folder, "ports", "--limit", "1", "--gen_kwargs", "max_gen_toks=1280")
    assert requests and all(len(ids) > 20 for ids in sent_ids(requests))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(
        "harness: the server refused: max_tokens=1280 cannot be greater than max_model_len=1024.")
    assert "ask for shorter answers" in last and last.endswith("--gen_kwargs max_gen_toks=256")


@needs_harness
def test_a_task_that_nobody_has_is_named_in_the_last_line(server):
    folder, requests = server
    done = harness(folder, "ports,nonesuch")
    assert done.returncode == 1 and not requests
    assert "lm_eval knows no task nonesuch." in done.stderr.splitlines()[-1]


@needs_serve
@pytest.mark.slow
def test_vllm_refuses_in_these_words_and_takes_our_seed_for_none():
    """Its own checks of a request, without a server. A TPU refuses RANDOM_SEED alone."""
    said = serve("-c", """
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import TokenizeParams
for answer, prompt in ((1280, 40), (256, 1030)):
    try:
        limits = TokenizeParams(1024, answer, max_total_tokens_param="max_model_len",
                                max_output_tokens_param="max_tokens")
        limits._token_len_check(None, [1] * prompt)
    except VLLMValidationError as error:
        print(error)
for seed in (-1, 1234):
    request = CompletionRequest(model="m", prompt=[1], temperature=1.0, seed=seed)
    print(request.to_sampling_params(9, {}).sampling_type.name)
""")
    lines = said.splitlines()
    assert lines[-4] == refused({"max_tokens": 1280, "prompt": [[1] * 40]}, 1024)
    assert lines[-3] == refused({"max_tokens": 256, "prompt": [[1] * 1030]}, 1024)
    assert lines[-2:] == ["RANDOM", "RANDOM_SEED"]


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
    assert harness().stdout.endswith("sent as ids.\n") and harness().returncode == 2
    damaged = {"{": "is not valid JSON", "[]": "names no base_url",
               '{"base_url": "http://127.0.0.1:1"}': "names no name"}
    for text, trouble in damaged.items():
        (tmp_path / "server.json").write_text(text)
        done = harness(tmp_path, "ports", HARNESS=str(tmp_path))
        assert done.returncode == 1 and f"server.json {trouble}" in done.stderr
        assert done.stderr.startswith("harness: ") and "Run 05_serve_vllm again" in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def stub(tmp_path):
    """An environment whose lm_eval writes what it was told, and ends as `ENDS` says."""
    place = tmp_path / "stub" / "bin"
    place.mkdir(parents=True)
    (place / "python").symlink_to(ROOT / ".venv/bin/python")
    (place / "lm_eval").write_text('#!/bin/sh\necho "$@"\necho its words >&2\nexit "${ENDS:-0}"\n')
    (place / "lm_eval").chmod(0o755)
    return place.parent


def test_a_folder_is_found_from_where_one_stands(server, stub):
    folder, _ = server
    for name, place in ((folder.name, folder.parent), (".", folder), (str(folder), ROOT)):
        done = harness(name, "ports", "--limit", "2", cwd=place, HARNESS=str(stub))
        assert done.returncode == 0 and done.stderr == "its words\n"
        assert "--output_path /" in done.stdout and done.stdout.endswith(" --limit 2\n")


def test_how_the_harness_ends_is_how_the_script_ends(server, stub):
    folder, _ = server
    done = harness(folder, "ports", HARNESS=str(stub), ENDS="3")
    assert done.returncode == 3 and done.stderr == "its words\n"


def test_the_lines_that_serve_the_base_are_ones_that_server_takes(tmp_path, monkeypatch):
    """As they stand on the page, at the end of 07; nothing is started."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    lines = PAGE.split("```python")[2].split("```")[0]
    watched = mock.create_autospec(serving.server)
    space = {"replace": replace, "helpers": helpers, "server": watched,
             "options": Options(model="tuned", port=8000, model_hash="of the tuned"),
             "models": {"base": ASSETS, "tuned": Path("tuned")}}
    exec(lines, space)
    stopped, started = watched.method_calls
    assert stopped == mock.call.stop(tmp_path / "serve")
    name, (options, folder), _ = started
    assert name == "start" and folder == tmp_path / "base"
    assert options == Options(model=str(ASSETS), name="base", port=8000)
    serving.options.check(options)
    assert f"scripts/harness.sh runs/31b/{folder.name} ifeval,gsm8k" in PAGE


@pytest.mark.parametrize(("words", "wanted"), [
    ([], 0), (["--lesson"], 0), (["--laboratory"], 0), (["--slow"], 1), (["--all"], 1)])
def test_the_slow_suites_install_the_harness_and_the_fast_ones_do_not(stubs, words, wanted):  # noqa: F811
    done = program("bash", stubs / "run_tests.sh", *words, RUN_DIR=None)
    assert done.returncode == 0, done.stderr
    calls = (stubs / "calls").read_text().splitlines()
    assert calls.count("setup.sh harness") == wanted
    tests = [place for place, call in enumerate(calls) if " -m pytest" in call]
    assert "setup.sh harness" not in calls[tests[0]:]


def test_once_a_week_the_two_scores_are_compared():
    """The equality tests are skipped where there's no .venv-harness."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["newest"]["steps"]]
    said = "\n".join(commands)
    assert "./setup.sh harness" in said.partition("./run_tests.sh")[0]


def test_our_own_server_is_asked_past_any_proxy(server, stub):
    """A lower-case no_proxy of the shell's comes before NO_PROXY, for urllib and requests alike."""
    folder, _ = server
    code = "import urllib.request as u; print(u.proxy_bypass('127.0.0.1:8000'), u.getproxies())"
    (stub / "bin" / "lm_eval").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}"\n')
    shell = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "corp.example"}
    done = harness(folder, "ports", HARNESS=str(stub), **shell)
    assert done.stdout.startswith("True {") and "127.0.0.1:9" in done.stdout, done.stderr


@needs_serve
@needs_harness
@pytest.mark.slow
@pytest.mark.series
@pytest.mark.skipif(not OWN, reason=f"no model of own_data in {RUN}")
def test_a_real_server_gets_one_score_by_both(tmp_path):
    """vLLM with a tuned model: we grade the harness's answers, and those that we ask for."""
    tokenizer = chat.load_tokenizer(OWN[0])
    benchmark = exact()
    record = serving.start(Options(model=str(OWN[0]), name="ports", timeout=900.0), tmp_path)
    try:
        done = harness(tmp_path, "ports")
        assert done.returncode == 0, done.stderr[-3000:]
        ask = client.Client(record.base_url, "ports", record.max_model_len, chat.TURN_END)
        asked = []
        for problem in benchmark.problems:
            ids = chat.prompt_ids(tokenizer, [{"role": "user", "content": problem.prompt}])
            reply = ask.complete(ids, 128, 0.0, 1.0, {"skip_special_tokens": False})
            asked.append((problem, benchmark.extract(reply.text, problem)))
    finally:
        serving.stop(tmp_path)

    score, samples = theirs(tmp_path)
    said = {sample["doc"]["question"]: sample for sample in samples}
    pairs = []
    marks = []
    for problem in benchmark.problems:
        sample = said[problem.prompt]
        pairs.append((problem, benchmark.extract(sample["resps"][0][0], problem)))
        marks.append(sample["exact_match"])
    ours = benchmark.grade(pairs)
    print(f"exact match of {len(ours)} questions: {score:.3f} by the harness, "
          f"{sum(ours) / len(ours):.3f} by us, "
          f"{sum(benchmark.grade(asked)) / len(asked):.3f} of the answers that we asked for")
    assert ours == marks and score == pytest.approx(sum(ours) / len(ours))
    assert 0 < score < 1, "a score that can tell answers apart"
    same = sum(pair == other for pair, other in zip(asked, pairs, strict=True))
    assert same >= 0.9 * len(asked), "greedy answers; a batch may turn a near tie"
