"""05 and serving/server.py: the command, the life of a server, and what goes wrong with it.

The life-cycle tests start a small stand-in process instead of vLLM, so they take seconds; the real
server is started by the tests marked `slow` and by the series.
"""

import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT, load

import helpers
from serving import bench as server_bench
from helpers import remote
from serving import flags, physics, server
from verilog import evaluation

SERVE = ROOT / ".venv-serve" / "bin" / "python"
needs_vllm = pytest.mark.skipif(not SERVE.exists(), reason="no .venv-serve: ./setup.sh serve")
MODEL = "/dev/shm/run/merged"


# -- The command ---------------------------------------------------------------------------------

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
    print(json.dumps([args.served_model_name, args.tensor_parallel_size, args.data_parallel_size,
                      args.enable_prefix_caching, args.max_model_len]))
    print(json.dumps({"config": args.additional_config, "quantization": args.quantization,
                      "kv": args.kv_cache_dtype, "lora": bool(args.lora_modules),
                      "step": args.max_num_batched_tokens, "limits": args.limit_mm_per_prompt,
                      "whole": args.disable_chunked_mm_input}))
for arguments in job["bench"]:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(arguments[2:])
    print(json.dumps([args.num_prompts, args.seed, args.ignore_eos, args.temperature,
                      args.goodput]))
try:
    make_arg_parser(FlexibleArgumentParser()).parse_args(job["wrong"])
except SystemExit:
    print("refused")
"""


def parse(serve, bench, wrong):
    job = json.dumps({"serve": serve, "bench": list(bench), "wrong": wrong[1:]})
    return subprocess.run([SERVE, "-c", PARSE], input=job, cwd=ROOT, capture_output=True, text=True)


def vllm_part(command):
    return command[command.index("serve"):]


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 48}')
    return folder


def every_command(adapter):
    return [server.vllm_command("tpu-docker", MODEL, "name", 8000, max_model_len=16384,
                                tensor_parallel=8, results="/tmp/bench"),
            server.vllm_command("tpu-docker", MODEL, "name", 8000, max_model_len=16384,
                                tensor_parallel=4, data_parallel=2, kv_cache_dtype="fp8"),
            server.vllm_command("gpu-docker", MODEL, "name", 8000, tensor_parallel=2,
                                adapter=adapter),
            server.vllm_command("cpu", "runs/tiny/merged", "name", 8001, adapter=adapter),
            server.vllm_command("tpu-docker", MODEL, "name", 8000, quantization="int8",
                                implementation="vllm", adapter=adapter,
                                flags=("--max-num-seqs", "256")),
            server.vllm_command("tpu-docker", MODEL, "name", 8000, tensor_parallel=4,
                                data_parallel=2, kv_cache_dtype="fp8", quantization="fp8"),
            server.vllm_command("gpu-docker", MODEL, "name", 8000, quantization="fp8")]


@needs_vllm
def test_vllm_itself_understands_every_flag_of_serve_and_bench(adapter):
    TINY = load("06_bench.py", "Settings", "INF", "FULL", "E2B", "TINY")[-1]
    client = type("Client", (), {"model": "m", "results": "r"})
    record = {"base_url": "http://127.0.0.1:1", "model": "name"}
    bench = [server_bench.bench_arguments(client, record, TINY, (256, 64), rate, 30, 7, "x.json")
             for rate in TINY.rates]
    commands = every_command(adapter)
    wrong = vllm_part(commands[0]) + ["--limit-mm-per-prompts-please", "x"]
    done = parse([vllm_part(command) for command in commands], bench, wrong)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "unrecognized arguments" in done.stderr and done.stdout.rstrip().endswith("refused")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines[:4] == [[["name"], 8, 1, False, 16384], [["name"], 4, 2, False, 16384],
                         [["name"], 2, 1, False, 1024], [["name"], 1, 1, False, 1024]]
    assert lines[7:] == [[30, 7, True, 0.0, ["ttft:500", "tpot:30"]]] * 4
    read = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rules = [entry["config"].get("quantization", {}).get("qwix", {}).get("rules") for entry in read]
    assert rules[4] == [{"module_path": ".*", "weight_qtype": "int8", "act_qtype": "int8"}]
    assert rules[5] == [{"module_path": ".*", "weight_qtype": "float8_e4m3fn",
                         "act_qtype": "float8_e4m3fn"}]
    assert not any(rules[:4]) and rules[6] is None and read[6]["quantization"] == "fp8"
    assert [entry["lora"] for entry in read] == [False, False, True, True, True, False, False]
    nothing = {"image": 0, "video": 0, "audio": 0}
    assert [entry["limits"] for entry in read] == [nothing] * 3 + [{}] + [nothing] * 3
    assert {(entry["step"], entry["whole"]) for entry in read} == {(2048, False)}


@needs_vllm
def test_the_launcher_is_still_needed():
    """When this fails, vllm-cpu calls itself vllm: use `vllm` and delete serving/vllm_cpu.py."""
    code = "import importlib.metadata as m; print(m.version('vllm-cpu')); m.version('vllm')"
    done = subprocess.run([SERVE, "-c", code], capture_output=True, text=True)
    assert done.stdout and "PackageNotFoundError" in done.stderr


def test_commands_survive_the_shell_and_every_flag_has_a_reason(adapter):
    explain = flags.explain
    for command in every_command(adapter):
        text = server.shown(command)
        assert shlex.split(text.replace("\\\n", "")) == [p.replace(f"{ROOT}/", "") for p in command]
        assert subprocess.run(["bash", "-n", "-c", text]).returncode == 0
    for command in every_command(adapter)[:2]:
        assert len(explain(command)) >= 15
    named = ("FULL", "E2B", "SECOND", "TINY", "command_for")
    *settings, command_for = load("05_serve_vllm.py", "Settings", "options_for", *named)[2:]
    for command in (*every_command(adapter), *map(command_for, settings)):
        unknown = explain(command).why.str.contains(flags.YOURS)
        assert list(unknown[unknown].index) == ["--max-num-seqs"] * ("--max-num-seqs" in command)


def test_flags_of_ones_own_are_shown_as_such():
    """Both spellings, known or not, and a variable: section 4 ran into an assertion."""
    own = ("--gpu-memory-utilization=0.98", "--block-size=256", "--enable-prefix-caching",
           "--speed-up=9", "--slow-down", "2")
    command = server.vllm_command("tpu-docker", MODEL, "name", 8000, flags=own, environment=("A=1",))
    table = flags.explain(command)
    assert table.value["--gpu-memory-utilization"] == "0.98" and table.value["--slow-down"] == "2"
    assert table.why["--speed-up"] == table.why["--slow-down"] == flags.YOURS
    assert flags.YOURS not in table.why["--block-size"] + table.why["--enable-prefix-caching"]
    assert f"A: {flags.YOURS}" in table.why["-e"] and "MODEL_IMPL_TYPE" not in table.why["-e"]


def test_docker_compose_is_the_same_container(adapter):
    """Read the file as Compose would, and put the `docker run` command together again."""
    import yaml
    compose = server.compose
    for command in [c for c in every_command(adapter) if c[0] == "docker"]:
        text = yaml.safe_dump(compose(command), sort_keys=False)
        content = yaml.safe_load(text)
        service = content["services"]["vllm"]
        again = {"docker", "run", "--rm", "--name", service.pop("container_name"), "--network",
                 service.pop("network_mode"), "--shm-size", service.pop("shm_size"), "--entrypoint",
                 service.pop("entrypoint"), service.pop("image")}
        for option, key in (("-v", "volumes"), ("-e", "environment")):
            again |= {option, *service.pop(key)}
        if service.pop("privileged", False):
            again.add("--privileged")
        if deploy := service.pop("deploy", None):
            again |= {"--gpus", deploy["resources"]["reservations"]["devices"][0]["count"]}
        assert service.pop("command") == command[command.index("serve"):] and not service
        assert again == set(command[:command.index("serve")])
        named = {"vllm-xla-cache"} if "--privileged" in command else set()
        assert set(content["volumes"]) == named
    with pytest.raises(AssertionError, match="no place for --init"):
        compose(["docker", "run", "--init", *every_command(adapter)[0][2:]])


def test_shell_blocks_in_the_text_are_valid_bash():
    text = re.sub(r"(?m)^# ?", "", (ROOT / "05_serve_vllm.py").read_text())
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    assert len(blocks) >= 2
    for block in blocks:
        done = subprocess.run(["bash", "-n", "-c", block], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_docker_command_mounts_the_merged_model_and_keeps_the_compile_cache(adapter):
    tpu, _, gpu, cpu = every_command(adapter)[:4]
    assert tpu[tpu.index("--entrypoint"):][:5] == [
        "--entrypoint", "vllm", server.IMAGES["tpu-docker"], "serve", "/model"]
    assert f"{MODEL}:/model:ro" in tpu and "vllm-xla-cache:/xla_cache" in tpu
    assert "VLLM_XLA_CACHE_PATH=/xla_cache" in tpu and "--privileged" in tpu
    assert not any("gemma-4-31B-it" in part for part in tpu), "not the stock model"
    assert "--gpus" in gpu and "--privileged" not in gpu and "--max-lora-rank" in gpu
    assert gpu[gpu.index("--max-lora-rank") + 1] == "64", "the next rank that vLLM accepts"
    for command in (tpu, gpu, cpu):
        assert command[command.index("--host") + 1] == "127.0.0.1"
        assert "--no-enable-prefix-caching" in command
    with pytest.raises(ValueError, match="merge it .* instead"):
        server.vllm_command("tpu-docker", MODEL, "name", 8000, adapter=adapter)
    torchax = every_command(adapter)[4]
    assert torchax[torchax.index("MODEL_IMPL_TYPE=vllm") - 1] == "-e" and "--enable-lora" in torchax
    assert torchax[-2:] == ["--max-num-seqs", "256"]
    for engine, options, words in (
            ("npu", {}, "there are tpu-docker"),
            ("tpu-docker", {"adapter": adapter, "implementation": "vllm", "data_parallel": 2},
             "data_parallel=1"),
            ("gpu-docker", {"implementation": "vllm"}, "a choice of vLLM on TPU"),
            ("gpu-docker", {"quantization": "int8"}, "fp8 on gpu-docker"),
            ("cpu", {"quantization": "int8"}, "is not for cpu")):
        with pytest.raises(ValueError, match=words):
            server.vllm_command(engine, MODEL, "name", 8000, **options)


# -- Options travel -------------------------------------------------------------------------------

def test_what_05_decides_is_what_06_and_07_find(tmp_path, monkeypatch, adapter):
    """05's command with another layout and cache, then 07's for the base, through the file."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    options_for, FULL = load("05_serve_vllm.py", "options_for", "FULL", "Settings")[:2]
    (tmp_path / "merged").mkdir()
    cfg = replace(FULL, tensor_parallel=4, data_parallel=2, kv_cache_dtype="fp8", port=8123,
                  quantization="fp8", max_model_len=2048, flags=("--max-num-seqs", "256"))
    decided = options_for(cfg, tmp_path / "merged", "a hash")
    server.write_options(decided)
    found = server.options()
    assert found == decided and found.chips == 8 and (found.kv_bytes, found.weight_bytes) == (1, 1)
    stored = json.loads(server.options_path().read_text())
    assert (stored["chips"], stored["chip"], stored["model_hash"]) == (8, "v6e", "a hash")
    ours, base = server.command(decided), server.command(found, model=tmp_path / "base", name="b")
    for flag, value in (("--tensor-parallel-size", "4"), ("--data-parallel-size", "2"),
                        ("--kv-cache-dtype", "fp8"), ("--max-model-len", "2048"),
                        ("--max-num-seqs", "256"), ("--port", "8123")):
        assert ours[ours.index(flag) + 1] == base[base.index(flag) + 1] == value
    changed = {(a, b) for a, b in zip(ours, base, strict=True) if a != b}
    mounts = tuple(f"{tmp_path}/{folder}:/model:ro" for folder in ("merged", "base"))
    assert changed == {(cfg.name, "b"), mounts}
    other = server.command(options_for(FULL, "m"))
    assert other[other.index("--tensor-parallel-size") + 1] == "8" and "fp8" not in other


def test_options_that_are_none_say_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="no server was ever started.*Run 05_serve_vllm"):
        server.options()
    server.write_options(server.Options("cpu", str(tmp_path), "name"))
    good = server.options_path().read_text()
    for broken in (good[:100], "[]", "{}", "null", good.replace('"engine"', '"motor"')):
        server.options_path().write_text(broken)
        with pytest.raises(ValueError, match="not what 05_serve_vllm writes. Run 05 again"):
            server.options()


# -- The base, which 07 compares with --------------------------------------------------------------

BASE = "google/gemma-4-31B-it"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that has BASE and nothing else, and the list of what was fetched from it."""
    import huggingface_hub
    taken, file = [], SimpleNamespace(rfilename="config.json", size=2)

    def model_info(self, name, **_):
        if name != BASE:
            raise OSError("404 not found")
        return SimpleNamespace(siblings=[file], sha="abc")

    def snapshot_download(name, local_dir, **_):
        taken.append(name)
        (local_dir / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shm"))
    return taken


def test_a_base_on_the_hub_is_asked_for_by_05_fetched_by_07_and_mounted(hub, tmp_path):
    """At 31b `base_path` is a hub id: 07 said that it is missing, after the hours of 06."""
    options_for, FULL = load("05_serve_vllm.py", "options_for", "FULL", "Settings")[:2]
    options, recipe = options_for(FULL, tmp_path), {"base_path": BASE}
    remote.check(recipe["base_path"])
    assert not hub, "05 only asks"
    base = evaluation.fetch_base(options, recipe)
    assert hub == [BASE]
    assert f"{tmp_path}/shm/base/{BASE}:/model:ro" in server.command(options, model=base)
    (tmp_path / "mine").mkdir()
    mine = options_for(replace(FULL, base=str(tmp_path / "mine")), tmp_path)
    assert evaluation.fetch_base(mine, recipe) == tmp_path / "mine" and hub == [BASE]


def test_a_base_that_cannot_be_had_is_said_without_fetching(hub, tmp_path):
    for name, words in ((BASE + "-typo", "hub does not give google/gemma-4-31B-it-typo"),
                        ("/nowhere/base", "neither a directory, nor a hub id")):
        with pytest.raises(ValueError, match=words):
            remote.check(name)
    remote.check(tmp_path)
    assert not hub


def test_05_asks_for_the_base_before_it_starts_anything(tmp_path):
    """The notebook itself at 31b, with a merged folder of one file and no network."""
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text("{}")
    recipe = {"rank": 8, "base_model": BASE, "base_path": BASE}
    (tmp_path / "merge.json").write_text(json.dumps({
        "step": 1, "recipe": recipe, "files": {"config.json": hashlib.sha256(b"{}").hexdigest()}}))
    done = subprocess.run([sys.executable, "05_serve_vllm.py"], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "SIZE": "31b", "RUN_DIR": str(tmp_path),
                                          "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path),
                                          "MPLBACKEND": "agg"})
    assert done.returncode and "1 files as merged" in done.stdout, done.stderr[-2000:]
    assert done.stderr.strip().splitlines()[-2].startswith(
        f"Error: the Hugging Face hub does not give {BASE}"), done.stderr[-2000:]
    assert not (tmp_path / "serve" / "options.json").exists()


# -- What 05 computes ----------------------------------------------------------------------------

PLAN = ("memory_plan", "GIB", "SHARE", "CHECKPOINT")


def test_memory_plan_against_arithmetic_by_hand():
    memory_plan = load("05_serve_vllm.py", *PLAN)[0]
    config = json.loads((ROOT / "data/configs/gemma4_31b.json").read_text())
    chip = 31.25 * 2**30
    plan = memory_plan(config, chip, 4, 2, 2, 62.5e9, windowed=True)
    sliding, full = 50 * 2 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2
    room = 4 * (0.92 * chip - 62.5e9 / 4)
    assert plan["requests of 4,096"] == 2 * int(room / (sliding * 1024 + full * 4096))
    assert plan["requests of 16,384"] == 2 * int(room / (sliding * 1024 + full * 16384))
    eight = memory_plan(config, chip, 8, 1, 2, 62.5e9)
    room = 8 * (0.92 * chip - 62.5e9 / 8)
    assert eight["requests of 16,384"] == int(room / ((sliding + 2 * full) * 16384)) == 11
    assert physics.kv_bytes_per_token(config, 2, 8)["full"] == 2 * full, "4 heads on 8 chips"
    small = memory_plan(config, chip, 8, 1, 1, 62.5e9)  # fp8: half of a full layer's word is empty
    assert small["requests of 16,384"] == int(room / ((sliding / 2 + 2 * full) * 16384)) == 19


def test_the_memory_plan_gives_the_caches_that_others_measured():
    """Tokens of three servers' logs; with 31.24 GiB and 58.4 GiB of weights, as they say, closer."""
    memory_plan, measured = load("05_serve_vllm.py", *PLAN, "MEASURED")[::len(PLAN)]
    config = json.loads((ROOT / "data/configs/gemma4_31b.json").read_text())
    gib = 2**30
    assert {(tp, tokens) for _, tp, tokens in measured} == {(4, 1053 * 64), (4, 526 * 128),
                                                            (8, 187_136)}

    def tokens_of(tp, chip, stored, **more):
        plan = memory_plan(config, chip, tp, 1, 2, stored, **more)
        return 16_384 * plan["left for KV, GiB/chip"] / plan["one of 16,384, GiB/chip"]
    for _, tp, tokens in measured:
        assert tokens_of(tp, 31.25 * gib, 62.5e9) == pytest.approx(tokens, rel=6e-3)
        assert tokens_of(tp, 31.24 * gib, 58.4 * gib) == pytest.approx(tokens, rel=1.5e-3)
        assert tokens_of(tp, 31.25 * gib, 62.5e9, windowed=True) > 4 * tokens, "a window was kept"


def test_padding_to_buckets_against_brute_force():
    padded = load("05_serve_vllm.py", "padded", "Settings", "FULL")[0]
    buckets = [16 * 2**i for i in range(8)]
    for tokens in (*range(1, 5000, 7), 16, 17, 2048, 2049, 4096):
        whole, rest = 0, tokens
        while rest > buckets[-1]:
            whole, rest = whole + buckets[-1], rest - buckets[-1]
        assert padded(tokens) == whole + min(b for b in buckets if b >= rest)


def test_prompts_think_only_where_training_did():
    from helpers import chat
    as_trained = server.as_trained
    tokenizer = chat.load_tokenizer(ROOT / "assets" / "tiny_gemma4")
    messages, seen = [{"role": "user", "content": "a counter"}], []
    for reasoning, wanted in (("stripped", False), ("kept", True)):
        thinking, template = as_trained({"reasoning": reasoning})
        assert thinking is wanted
        ids = chat.prompt_ids(tokenizer, messages, thinking)
        theirs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True,
            **template["chat_template_kwargs"])["input_ids"]
        assert ids == list(theirs)
        seen.append(ids)
    assert seen[0] != seen[1], "the template has a thinking prompt"


def test_a_changed_or_missing_file_is_not_served(tmp_path):
    check_merged = load("05_serve_vllm.py", "check_merged")
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two")
    hashes = {n: hashlib.sha256((tmp_path / n).read_bytes()).hexdigest() for n in "ab"}
    assert check_merged(tmp_path, hashes) == 2
    (tmp_path / "a").write_text("0ne")
    with pytest.raises(ValueError, match="'a': 'changed'.*Copy it again"):
        check_merged(tmp_path, hashes)
    (tmp_path / "b").unlink()
    with pytest.raises(ValueError, match="'b': 'missing'"):
        check_merged(tmp_path, hashes)
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two")
    (tmp_path / "model-2.safetensors").write_text("of an earlier merge")
    with pytest.raises(ValueError, match="'model-2.safetensors': 'unexpected'"):
        check_merged(tmp_path, hashes)


# -- The life of a server ------------------------------------------------------------------------

FAKE = """
import http.server, subprocess, sys, time
mode, port = sys.argv[1], int(sys.argv[2])
if mode == "dies":
    print("(Worker pid=1) ERROR 11-21 04:09:03 [x.py:1] ValueError: the shard is broken")
    sys.exit(1)
if mode == "memory":
    print("ValueError: Available memory is less than requested memory for kv (900.0 GiB).")
    sys.exit(1)
if mode == "hangs":
    print("INFO 11-21 04:09:03 [x.py:1] compiling", flush=True)
    time.sleep(600)
if mode == "slow":
    time.sleep(2)
if mode == "slowly dies":
    time.sleep(1)
    print("(Worker pid=1) ERROR 11-21 04:09:03 [x.py:1] ValueError: the shard is broken")
    sys.exit(1)
if mode == "family":  # as vLLM: an engine and a worker below the server
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no such page"}}')
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def life(tmp_path, monkeypatch):
    """A run directory with a model in it, and `start(mode)` that starts the stand-in."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    fake, model = tmp_path / "fake.py", tmp_path / "run" / "merged"
    fake.write_text(FAKE)
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")

    def start(mode="healthy", **options):
        def command(engine, model, name, port, **_):
            return [sys.executable, str(fake), mode, str(port)]
        monkeypatch.setattr(server, "vllm_command", command)
        return server.start("cpu", model, "name", **{"port": 0, "timeout": 20.0, **options})
    yield start
    for slot in ("server", "adapter"):
        server.stop(slot)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def gone(pids):
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_start_record_reuse_stop(life, capsys):
    record = life()
    saved = json.loads(server.record_path().read_text())
    assert set(server.RECORD) | {"command", "started", "owner"} <= set(saved)
    assert os.getsid(record["pid"]) == record["pid"] != os.getsid(0), "detached"
    assert server.current()["pid"] == record["pid"]
    assert life()["pid"] == record["pid"] and "reusing" in capsys.readouterr().out
    assert server.stop() and gone([record["pid"]]) and not server.record_path().exists()
    assert not server.stop(), "nothing left to stop"
    with pytest.raises(ValueError, match="Run 05_serve_vllm first"):
        server.current()


def test_a_bad_record_counts_as_absent_and_keeps_no_server_alive(life, tmp_path, capsys):
    """Half-written, empty, of another kind: each beside a live server, and for a live server."""
    stop = [sys.executable, "-m", "serving.server", "stop"]
    environment = {**os.environ, "RUN_DIR": str(tmp_path / "run")}
    for text in ('{"pid": 12', "{}", "[]", '"x"', "", '{"pid": "12", "born": 3}'):
        first, second = life(), life("family", slot="adapter")
        helpers.write_json(server.options_path(), {"no": "slot"})
        server.record_path("adapter").write_text(text)
        done = subprocess.run(stop, cwd=ROOT, text=True, capture_output=True, env=environment)
        assert done.returncode == 0 and "taken as absent" in done.stdout, done.stderr
        assert gone([first["pid"], *server.members(second)]), text
        assert not server.record_path("adapter").exists() and server.options_path().exists()
    server.record_path().write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match="no server is recorded"):
        server.current()
    first = life()
    assert "taken as absent" in capsys.readouterr().out and server.current()["pid"] == first["pid"]


def test_a_server_that_was_never_recorded_is_found(life, monkeypatch):
    """SIGKILL between the start of the process and its record."""
    def killed(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(server, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        life("family")
    assert not server.record_path().exists()
    family = server._marked(server.MARK, str(server.record_path().resolve()))
    assert family and server.stop() and gone(family)


def test_the_clock_may_jump(life, monkeypatch):
    first = life("slow", wait=False)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1e7)
    second = life("slow", timeout=30.0)
    assert second["pid"] == first["pid"] and second["ready_seconds"] < 30


@pytest.fixture
def owner():
    """A process that owns servers, until it is killed."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_server_ends_with_its_owner_and_says_so(life, owner):
    record = life("family", owner=owner.pid)
    time.sleep(2)
    family = server.members(record)
    assert len(family) == 3 and server.current()["owner"]["pid"] == owner.pid
    owner.kill()
    owner.wait()
    end = time.monotonic() + 15
    while server.record_path().exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert gone(family) and not server.record_path().exists()
    assert f"started this server, {owner.pid}, has ended: stopping it" in server.tail(record["log"])


def test_the_environment_names_an_owner_and_without_one_a_server_stays(life, owner, monkeypatch):
    assert life()["owner"] is None
    server.stop()
    monkeypatch.setenv("SERVER_OWNER", str(owner.pid))
    assert life()["owner"]["pid"] == owner.pid


def test_a_server_that_outlived_owner_and_watcher_is_taken_over_or_ended_and_that_is_said(
        life, owner, tmp_path, capsys):
    record = life(owner=owner.pid)
    watchers = [process for process in psutil.process_iter(["cmdline"])
                if (process.info["cmdline"] or [])[-2:] == ["watch", "server"]
                and process.environ().get("RUN_DIR") == str(tmp_path / "run")]
    assert len(watchers) == 1
    watchers[0].kill()
    watchers[0].wait()
    owner.kill()
    owner.wait()
    assert "which has ended" in server.status()[0]
    done = server.stop_all()
    assert done == ["stopped the server of name (the process that started it has ended)"]
    assert gone([record["pid"]])
    record = {**life(), "owner": record["owner"]}
    helpers.write_json(server.record_path(), record)
    assert life()["owner"] is None and "taken over" in capsys.readouterr().out


def test_two_run_directories_side_by_side(life, tmp_path, monkeypatch):
    first, name = life(), server.container_name()
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "other"))
    assert server.container_name() != name != server.container_name("adapter")
    assert not server.running() and not server.stop()
    assert server.stop_all() == ["no server was running"]
    second = life()
    assert second["port"] != first["port"] and second["pid"] != first["pid"]
    with pytest.raises(ValueError, match="is in use"):
        life(port=first["port"])
    life()
    assert server.stop() and not server.running()
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    assert server.current()["pid"] == first["pid"]


def test_another_or_a_newly_merged_model_replaces_the_server(life, tmp_path):
    first = life()
    (tmp_path / "run" / "merged" / "config.json").write_text('{"merged": "again"}')
    second = life()
    assert second["pid"] != first["pid"] and gone([first["pid"]])


def test_two_slots_run_side_by_side_and_the_command_line_stops_both(life, tmp_path):
    first, second = life(), life(slot="adapter")
    assert server.current()["pid"] == first["pid"] != second["pid"]
    done = subprocess.run([sys.executable, "-m", "serving.server", "stop"], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "RUN_DIR": str(tmp_path / "run")})
    assert done.returncode == 0 and "stopped" in done.stdout, done.stderr
    for record in (first, second):
        assert not [p for p in server.members(record)]


def test_a_server_that_is_still_starting_is_waited_for_not_started_again(life, capsys):
    begin = time.monotonic()
    first = life("slow", wait=False)
    assert time.monotonic() - begin < 1.5 and "ready_seconds" not in first
    with pytest.raises(ValueError, match="does not answer"):
        server.current()
    assert life("slow", wait=False)["pid"] == first["pid"], "still starting, still the same"
    second = life("slow")
    assert second["pid"] == first["pid"] and second["ready_seconds"] >= 1.5
    assert "healthy after" in capsys.readouterr().out
    assert json.loads(server.record_path().read_text())["ready_seconds"] == second["ready_seconds"]


def test_a_server_that_dies_while_nobody_waits_says_why_when_somebody_does(life):
    first = life("slowly dies", wait=False)
    with pytest.raises(ValueError, match="ended after .* the shard is broken"):
        life("slowly dies")
    assert not server.record_path().exists() and gone([first["pid"]])


@pytest.mark.parametrize(("line", "wanted", "unwanted"), [
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
     "Raise --gpu-memory-utilization", "lower --gpu"),
    ("ValueError: To serve one request, 9 GiB KV cache is needed, which is larger than the 2 available",
     "Raise --gpu-memory-utilization", "lower --gpu"),
    ("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm",
     "--gpu-memory-utilization", "Raise")])
def test_what_to_do_about_memory_depends_on_whose_it_is(tmp_path, line, wanted, unwanted):
    """vLLM's words of 0.32 (v1/core/kv_cache_utils.py): a cache without room wants a larger share."""
    log = tmp_path / "server.log"
    log.write_text(f"(EngineCore pid=1) ERROR 11-23 10:00:00 [core.py:1] {line}\n")
    said = server.reason(log, 1)
    assert wanted in said and unwanted not in said and line in said


def test_without_docker_the_commands_that_bring_it_are_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no docker here.*apt-get install -y docker.io"):
        server.prepare("tpu-docker")


@pytest.mark.parametrize(("open_to_us", "says"), [
    (False, "docker.sock may not be opened.*log in again or start this as `sg docker -c"),
    (True, "docker pull .*failed, see above")])
def test_a_group_that_does_not_count_yet_is_told_from_a_missing_image(
        monkeypatch, tmp_path, open_to_us, says):
    """`usermod -aG docker` counts from the next login on."""
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    (tmp_path / "docker.sock").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(server, "SOCKET", tmp_path / "docker.sock")
    monkeypatch.setattr(server.os, "access", lambda path, how: open_to_us)  # root may always
    with pytest.raises(ValueError, match=says):
        server.prepare("tpu-docker")


def test_stop_ends_the_whole_family(life):
    record = life("family")
    end = time.monotonic() + 5
    while len(server.members(record)) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    family = server.members(record)
    assert len(family) == 3
    server.stop()
    assert gone(family)


def test_a_killed_server_is_noticed_and_its_orphans_are_ended(life):
    record = life("family")
    time.sleep(0.5)
    family = server.members(record)
    os.kill(record["pid"], signal.SIGKILL)
    assert gone([record["pid"]])
    with pytest.raises(ValueError, match="has died.*\nRun 05_serve_vllm again"):
        server.current()
    assert server.members(record), "the engine and the worker outlive it"
    server.stop()
    assert gone(family)


@pytest.mark.parametrize("mode, message", [
    ("dies", "ValueError: the shard is broken"), ("memory", "out of memory: .*900.0 GiB"),
    ("hangs", "was not healthy within 1 s.*compiling")])
def test_a_failed_start_says_why_and_leaves_nothing(life, mode, message):
    with pytest.raises(ValueError, match=message):
        life(mode, timeout=1.0 if mode == "hangs" else 20.0)
    assert not server.record_path().exists()


def test_a_port_in_use_is_said_before_anything_starts(life):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ValueError, match="is in use.*ss -ltnp"):
            life(port=other.getsockname()[1])
    assert not server.record_path().exists()


def test_another_process_with_the_same_number_is_left_alone(life):
    record = life()
    server.stop()
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        record["pid"] = stranger.pid  # the kernel gave the number away; the start time differs
        helpers.write_json(server.record_path(), record)
        with pytest.raises(ValueError, match="has died"):
            server.current()
        server.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_requests_to_a_dead_or_unwilling_server_give_one_line(life):
    record = life()
    with pytest.raises(ValueError, match="HTTP 404: no such page"):
        server.request(record, "/v1/models")
    server.stop()
    with pytest.raises(ValueError, match="no server answers at .*Run 05_serve_vllm"):
        server.request(record, "/health")


def test_reasons_are_found_in_real_logs(tmp_path):
    log = tmp_path / "log"
    cases = {
        "Traceback (most recent call last):\nOSError: [Errno 98] Address already in use\n":
            "OSError: [Errno 98] Address already in use",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (100000) is greater than\n":
            "Value error, User-specified max_model_len (100000) is greater than",
        "(Worker pid=1) ERROR 11-21 04:20:12 [a.py:9]     assert loaded.shape == wanted\n"
        "(Worker pid=1) ERROR 11-21 04:20:12 [a.py:9]            ^^^^^^^^^^\n"
        "(Worker pid=1) ERROR 11-21 04:20:12 [a.py:9] AssertionError\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n":
            "AssertionError in `assert loaded.shape == wanted`",
        "vllm: error: unrecognized arguments: --foo\n":
            "vllm: error: unrecognized arguments: --foo",
        'docker: Error response from daemon: Conflict. The container name "/x" is in use\n':
            'docker: Error response from daemon: Conflict. The container name "/x" is in use',
    }
    for text, wanted in cases.items():
        log.write_text("(APIServer pid=1) WARNING 11-21 04:19:40 [a.py:2] like "
                       "`OSError: [Errno 24]`\n" + text)
        assert server.reason(log, 1) == wanted
    log.write_text("")
    assert "SIGKILL" in server.reason(log, -9) and "exit status 3" in server.reason(log, 3)


def test_the_client_repeats_the_reason_and_starts_anew_after_a_failure(tmp_path, monkeypatch):
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import json, sys\nfor line in sys.stdin:\n    words = json.loads(line)\n"
                        "    if 'bad' in words: raise ValueError('no such model')\n"
                        f"    print('text'); print({server.DONE!r}, flush=True)\n")
    monkeypatch.setattr(server, "PYTHON", sys.executable)
    monkeypatch.setattr(server, "LAUNCHER", str(launcher))
    record = {"engine": "cpu", "model_path": "m"}
    with server.Client(record, tmp_path, tmp_path / "client.log") as client:
        client.run(["bench", "serve"])
        process = client.process
        client.run(["bench", "serve"])
        assert client.process is process, "one process for many runs"
        with pytest.raises(ValueError, match="serve failed: ValueError: no such model"):
            client.run(["bench", "serve", "bad"])
        client.run(["bench", "serve"])
        last = client.process
    assert last.poll() is not None, "nothing is left running"
    assert "$ vllm bench serve" in (tmp_path / "client.log").read_text()


# -- Docker, by a stand-in that records what it was asked -----------------------------------------

DOCKER = """#!{python}
import os, signal, subprocess, sys, time
words, log = sys.argv[1:], {folder!r}
with open(log + "/calls", "a") as file:
    print(*words, file=file)
def detached(command, extra, name):  # the daemon's child: no signal of ours reaches it
    process = subprocess.Popen(command, start_new_session=True, env={{**os.environ, **extra}})
    open(log + "/" + name, "a").write(str(process.pid) + chr(10))
    sys.exit(process.wait())
def pids(name):
    try:
        return [int(line) for line in open(log + "/" + name)]
    except FileNotFoundError:
        return []
if words[0] == "run":
    port, name = words[words.index("--port") + 1], words[words.index("--name") + 1]
    detached([sys.executable, {fake!r}, "healthy", port], {{}}, name)
if words[0] == "stop":
    for pid in pids(words[-1]):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    sys.exit(0 if pids(words[-1]) else 1)
if words[0] == "exec":
    extra = {{}}
    while words[1] == "-e":
        extra |= dict([words[2].split("=", 1)])
        words[1:3] = []
    name, command = words[1], words[2:]
    if not pids(name):
        sys.exit("Error response from daemon: No such container: " + name)
    detached(["sleep", "600"] if command[0] == "vllm" else command, extra, "clients")
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A `docker` first in PATH that keeps its containers alive whatever happens to its client."""
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "run" / "merged").mkdir(parents=True)
    (tmp_path / "run" / "merged" / "config.json").write_text("{}")
    (tmp_path / "fake.py").write_text(FAKE)
    script = tmp_path / "bin" / "docker"
    script.write_text(DOCKER.format(python=sys.executable, folder=str(tmp_path / "state"),
                                    fake=str(tmp_path / "fake.py")))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    options = server.Options("gpu-docker", str(tmp_path / "run" / "merged"), "name", timeout=20.0)
    server.write_options(options)
    yield tmp_path / "state"
    server.stop_all()
    for path in (tmp_path / "state").iterdir():
        for pid in path.read_text().split() if path.name != "calls" else ():
            if alive(int(pid)):
                os.kill(int(pid), signal.SIGKILL)


def pids_of(path):
    return [int(line) for line in path.read_text().split()]


def test_a_container_outlives_its_client_and_is_ended_all_the_same(docker):
    record = server.bring_up()
    container = docker / server.container_name()
    assert record["container"] == container.name and server.running()
    inside = pids_of(container)
    os.kill(record["pid"], signal.SIGKILL)  # the `docker run` client
    assert gone([record["pid"]]) and alive(inside[0])
    with pytest.raises(ValueError, match="has died"):
        server.current()
    server.stop()
    assert gone(inside)
    server.bring_up()
    server.record_path().write_text("{")
    server.stop()
    assert gone(pids_of(container)), "without a record, by the name that the run directory gives"
    assert "stop -t 30 " + container.name in (docker / "calls").read_text()


def test_05_in_another_layout_and_what_06_and_07_make_of_it(docker, tmp_path):
    """05 itself at 31b, up to its running server; then 06's floors and 07's server of the base."""
    run, base = tmp_path / "run", tmp_path / "base"
    config = (ROOT / "data/configs/gemma4_31b.json").read_text()
    (run / "merged" / "config.json").write_text(config)
    base.mkdir()
    recipe = {"rank": 8, "base_model": "31B", "base_path": str(base)}
    helpers.write_json(run / "merge.json", {
        "step": 1, "recipe": recipe,
        "files": {"config.json": hashlib.sha256(config.encode()).hexdigest()}})
    start = (ROOT / "05_serve_vllm.py").read_text().split("# ## 3. Talk to it")[0]
    source, count = re.subn(
        r"(?m)^cfg = helpers\.choose.*$", r"\g<0>\ncfg = replace(cfg, port=0, timeout=30.0, "
        "tensor_parallel=4, data_parallel=2, kv_cache_dtype='fp8')", start)
    assert count == 1
    (tmp_path / "05_serve_vllm.py").write_text(source)
    done = subprocess.run([sys.executable, tmp_path / "05_serve_vllm.py"], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "SIZE": "31b"})
    assert done.returncode == 0 and "1 files as merged" in done.stdout, done.stderr[-2000:]
    ours = [line.split() for line in (docker / "calls").read_text().splitlines()][-1]
    # 06: one request has half of the chips, and its cache is read in one byte a number.
    options, config = server.options(), json.loads(config)
    plain = replace(options, tensor_parallel=8, data_parallel=1, kv_cache_dtype="auto")
    two, eight = (server_bench.machine_of(one, config) for one in (options, plain))
    assert (two.system, two.peak) == (eight.system, eight.peak / 2) == ("v6e-8", 4 * 918e12)
    cache = [server_bench.step_bytes(config, one, 1, 4096) - server_bench.step_bytes(config, one)
             for one in (plain, options)]
    assert cache[0] > 2 * cache[1] > 0, "tp 8 stores the four heads of full layers twice"
    # 07: the same container with the base in it.
    server.start_as(options, evaluation.fetch_base(options, recipe))
    theirs = [line.split() for line in (docker / "calls").read_text().splitlines()][-1]
    for command in (ours, theirs):
        for flag, value in (("--tensor-parallel-size", "4"), ("--data-parallel-size", "2"),
                            ("--kv-cache-dtype", "fp8")):
            assert command[command.index(flag) + 1] == value
    assert f"{run}/merged:/model:ro" in ours and f"{base}:/model:ro" in theirs


CLIENT = """
import sys
from serving import server
with server.Client(server.current(), sys.argv[1], sys.argv[1] + "/client.log") as client:
    print("sending", flush=True)
    client.run(["bench", "serve"])
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_client_in_a_container_is_found_and_ended(docker, tmp_path, capsys, sign):
    record, results = server.bring_up(), tmp_path / "run" / "bench"
    sender = subprocess.Popen([sys.executable, "-c", CLIENT, str(results)], cwd=ROOT,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert sender.stdout.readline() == b"sending\n"
    end = time.monotonic() + 10
    while "vllm bench" not in (docker / "calls").read_text() \
            or len(pids_of(docker / "clients")) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    inside = pids_of(docker / "clients")[-1]
    sender.send_signal(sign)
    sender.wait()
    assert alive(inside) or sign == signal.SIGINT
    with server.Client(record, results, results / "client.log"):
        said = capsys.readouterr().out
        assert gone([inside])
    assert (f"an earlier client was still sending: ended (process {inside})" in said) \
        == (sign == signal.SIGKILL), "an interrupt is cleaned up at once, a kill by the next client"
    calls = [line.split() for line in (docker / "calls").read_text().splitlines()]
    sent = next(call for call in calls if "vllm" in call and call[0] == "exec")
    assert sent[-4:] == [record["container"], "vllm", "bench", "serve"]
    assert server.running(), "the server itself is left alone"


def test_the_command_line_starts_says_and_stops(docker, tmp_path):
    def call(word):
        return subprocess.run([sys.executable, "-m", "serving.server", word], cwd=ROOT, text=True,
                              capture_output=True)
    none = call("status")
    assert none.returncode == 1 and "no server runs for" in none.stderr
    begun = call("start")
    assert begun.returncode == 0 and "healthy after" in begun.stdout, begun.stderr
    assert "reusing the healthy server" in call("start").stdout
    assert f"healthy, process {server.current()['pid']}" in call("status").stdout
    assert call("stop").stdout == "stopped the server of name\n" and not server.running()
    assert call("stop").stdout == "no server was running\n"
    assert call("go").returncode == 1 and "start | status | stop" in call("go").stderr
    (tmp_path / "run" / "merged" / "config.json").write_text('{"merged": "again"}')
    changed = call("start")
    assert changed.returncode == 1 and "no longer what 05_serve_vllm checked" in changed.stderr


def test_an_earlier_client_on_this_machine_is_ended_too(tmp_path, capsys):
    record = {"engine": "cpu", "model_path": "m"}
    client = server.Client(record, tmp_path, tmp_path / "client.log")
    old = subprocess.Popen(["sleep", "600"], env={**os.environ, server.CLIENT_MARK: client.mark})
    with client:
        assert f"ended (process {old.pid})" in capsys.readouterr().out
    assert old.wait() == -signal.SIGKILL


def test_other_programs_are_told_from_ours():
    record = {"pid": os.getpid(), "born": 0.0, "mark": "none"}
    spin = "import time\nwhile time.process_time() < 0.4: pass\ntime.sleep(60)"
    before = server.cpu_seconds(record)
    ours = subprocess.Popen([sys.executable, "-c", spin])
    end = time.monotonic() + 30
    while (after := server.cpu_seconds(record))[ours.pid] < 0.35 and time.monotonic() < end:
        time.sleep(0.1)
    ours.kill()
    ours.wait()
    assert after[ours.pid] >= 0.35 and after[None] - before[None] >= 0.3
    made = {None: before[None] + 3.0, "clock": before["clock"] + 2.0, 7: 1.0}
    assert server.others_cores({**before, 7: 0.5}, made) == pytest.approx(1.25)
    assert server.others_cores(before, {**before, "clock": before["clock"] + 1}) == 0


# -- The real thing ------------------------------------------------------------------------------

@needs_vllm
@pytest.mark.slow
def test_real_server_ids_stops_and_end(tmp_path, monkeypatch):
    """The base model through vLLM: ids as rendered, a forced turn end, a kill -9 of the engine."""
    from helpers import chat
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    model = ROOT / "assets" / "tiny_gemma4"
    server.write_options(server.Options("cpu", str(model), "tiny", timeout=900))
    record = server.bring_up(owner=os.getpid())
    try:
        tokenizer = chat.load_tokenizer(model)
        for messages in ([{"role": "user", "content": "a 2-bit counter\n\n```verilog\n```"}],
                         [{"role": "system", "content": " Be brief. "},
                          {"role": "user", "content": "größer ≥ 3; \t tabs"},
                          {"role": "assistant", "content": "```verilog\nmodule a; endmodule\n```"},
                          {"role": "user", "content": "again"}]):
            theirs = server.post(record, "/tokenize", {"model": "tiny", "messages": messages})
            assert theirs["tokens"] == [int(i) for i in chat.prompt_ids(tokenizer, messages)]
            kept = server.post(record, "/tokenize", {
                "model": "tiny", "messages": messages,
                "chat_template_kwargs": {"enable_thinking": True}})
            wanted = chat.prompt_ids(tokenizer, messages, thinking=True)
            assert kept["tokens"] == wanted != theirs["tokens"]
        ids, end = theirs["tokens"], chat.special_ids(tokenizer)[chat.TURN_END]
        body = {"model": "tiny", "prompt": ids, "max_tokens": 20, "temperature": 0}
        forced = server.post(record, "/v1/completions", {**body, "logit_bias": {str(end): 100}})
        assert forced["choices"][0]["finish_reason"] == "stop"
        assert forced["usage"]["completion_tokens"] == 1
        with pytest.raises(ValueError, match="404.*does not exist"):
            server.post(record, "/v1/completions", {**body, "model": "other"})
        metric, metrics = server_bench.metric, server_bench.metrics
        with pytest.raises(ValueError, match="timed out"):  # a client that goes away
            server.post(record, "/v1/completions",
                        {**body, "max_tokens": 600, "ignore_eos": True}, timeout=0.5)
        busy = metric(metrics(record), "vllm:num_requests_running")
        idle = server_bench.wait_idle(record, patience=120.0)
        assert busy == 1 and metric(idle, "vllm:num_requests_running") == 0, \
            "an aborted request leaves the gauges: 06 would wait for ever"
        family = server.members(record)
        assert len(family) >= 3
        for pid in family[1:]:
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while server._lives(record) and server.healthy(record) and time.monotonic() < end:
            time.sleep(0.5)
        with pytest.raises(ValueError, match="05_serve_vllm again"):
            server.current()
        again = server.bring_up()
        assert again["pid"] != record["pid"] and gone(family), "as it was, after its engine's death"
        marked = server._marked(server.MARK, again["mark"])
        assert len(marked) >= 3, "renamed processes keep the mark"
        family = server.members(again)
    finally:
        server.stop()
    assert gone(family)


def test_no_server_survives_this_file():
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in commands for script, mode in itertools.pairwise(words)
                if script.endswith("fake.py") and mode in ("healthy", "family")]
