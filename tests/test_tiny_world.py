"""The tiny world: data, benchmark, tokenizer, template and base model.

Held against a Python model of every module (simulated), against Icarus, against transformers, and
against the promise that nothing of the evaluation is in the training data or in the corpus.
"""

import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import random_gemma
from conftest import ROOT, load
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import verilog
from appendix import pretrain
from appendix.world import bugs, families, make
from helpers import gemma
from verilog.problems import Problem

pytestmark = pytest.mark.laboratory

ASSETS = ROOT / "assets" / "tiny_gemma4"
TINY, EVAL = ROOT / "data" / "tiny", ROOT / "data" / "tiny_eval"
FACTS = json.loads((ASSETS / "pretrain.json").read_text())
COMMAND = ["iverilog", "-Wall", "-Winfloop", "-Wno-timescale", "-g2012", "-s", "tb", "-o", "sim"]


@pytest.fixture(scope="module")
def corpus():
    return list(make.documents(FACTS["documents"]))


@pytest.fixture(scope="module")
def problems():
    return list(make.problems())


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(ASSETS)


def simulate(folder, **files):
    """Compile and run with verilog-eval's own command; returns everything that was printed."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.sv").write_text(text)
    built = subprocess.run([*COMMAND, *(f"{name}.sv" for name in files)], cwd=folder,
                           capture_output=True, text=True)
    if built.returncode:
        return "compile error: " + built.stderr
    run = subprocess.run(["vvp", "sim"], cwd=folder, capture_output=True, text=True, timeout=30)
    return built.stderr + run.stdout


def in_parallel(function, items):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, items))


# ── Reproducible ──

def test_the_generator_writes_the_committed_bytes(tmp_path):
    script = (f"import pathlib\nfrom appendix.world import make\n"
              f"make.write(pathlib.Path({str(tmp_path)!r}))")
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT,
                   env={**os.environ, "PYTHONHASHSEED": "12345", "LC_ALL": "C"})
    fresh = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*") if path.is_file()}
    stored = {path.relative_to(ROOT / "data"): path for folder in (TINY, EVAL)
              for path in folder.rglob("*") if path.is_file() and path.name != "README.md"}
    assert fresh.keys() == stored.keys()
    for name, path in fresh.items():
        read = gzip.decompress if path.suffix == ".gz" else bytes  # zlib may pack differently
        assert read(path.read_bytes()) == read(stored[name].read_bytes()), name


def test_the_corpus_is_the_one_the_base_was_trained_on(corpus):
    assert hashlib.sha256("\0".join(corpus).encode()).hexdigest() == FACTS["corpus_sha256"]


def test_the_tokenizer_is_made_again_byte_for_byte(tmp_path):
    """Its texts are the corpus without bugs, so that a bug makes no piece of its own."""
    vocabulary, pieces = load("appendix/09_tiny_base.py", "VOCABULARY", "PIECES")
    texts = list(make.documents(20_000, bug_share=0))
    for _, row, _ in make.rows():
        texts += [row["prompt"], row["response"]]
    tokenizer = pretrain.train_tokenizer(texts, vocabulary, pieces)
    pretrain.save_tokenizer(tokenizer, ASSETS / "chat_template.jinja", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes(), name


def test_a_bug_is_one_line_of_the_body_and_nearly_always_fails():
    draw, pairs = random.Random(3), []
    for name, design, prompt in make.draws(60, seed=11):
        wrong = bugs.bug(draw, design)
        assert wrong.spec == design.spec and wrong.ports == design.ports
        assert sum(one != two for one, two in zip(wrong.body, design.body, strict=True)) == 1
        exam = Problem(name, prompt, design.verilog("RefModule"), make.testbench(design))
        pairs.append((exam, wrong.verilog()))
    verdicts = verilog.judge_many(pairs)
    assert sum(not verdict.passed for verdict in verdicts) >= 54
    assert all(verdict.category != "broken problem" for verdict in verdicts)


def test_every_family_can_go_wrong():
    draw = random.Random(0)
    for family in families.FAMILIES:
        for _ in range(20):
            assert bugs.bugs(families.draw(draw, (family,))), family


def test_the_corpus_without_bugs_is_the_same_one_corrected():
    clean, buggy = (list(make.documents(1_000, bug_share=share)) for share in (0, make.BUG_SHARE))
    changed = sum(one != two for one, two in zip(clean, buggy, strict=True))
    assert abs(changed / 1_000 - make.BUG_SHARE * 0.88) < 0.05  # 88% of the documents have code
    rows = [row for _, row, _ in make.rows(count=300, bug_share=0.4)]
    asked = [row["prompt"] for _, row, _ in make.rows(count=300)]
    assert [row["prompt"] for row in rows] == asked


# ── The training rows ──


def check_against_python(tmp_path, designs):
    logs = in_parallel(lambda item: simulate(tmp_path / str(item[0]), module=item[1].verilog(),
                                             tb=make.checks(item[1])), enumerate(designs))
    for design, log in zip(designs, logs, strict=True):
        assert "PASS" in log and "warning" not in log, (design.family, design.operation, log)


def test_answers_compile_and_do_what_the_python_model_says(tmp_path):
    picked = {}
    for design, row, form in make.rows():
        if form == "plain":
            assert design.verilog() in row["response"] and design.spec in row["prompt"]
        picked.setdefault((design.family, design.operation.split("_")[-1]), design)
    check_against_python(tmp_path, random.Random(0).sample(sorted(
        picked.values(), key=lambda d: d.key), 60))


@pytest.mark.slow
def test_a_thousand_answers_do_what_the_python_model_says(tmp_path):
    check_against_python(tmp_path, [design for design, _, _ in make.rows()][::4])


def test_the_python_model_notices_a_wrong_module(tmp_path):
    for number, family in enumerate((families.adder, families.counter, families.edge)):
        design = families.draw(random.Random(7), (family,))
        wrong = design.verilog().replace(" + ", " - ").replace(" & ", " | ").replace("^", "&")
        wrong = wrong if wrong != design.verilog() else design.verilog().replace(" - ", " + ")
        assert wrong != design.verilog()
        log = simulate(tmp_path / str(number), module=wrong, tb=make.checks(design))
        assert "PASS" not in log and "not" in log


# ── The benchmark ──


def test_references_agree_with_the_python_models(tmp_path, problems):
    check_against_python(tmp_path, [design for _, design, _ in problems])


WRONG = ((r" \+ ", " - "), (" - ", " + "), (" & ", " ^ "), (r" \| ", " & "), (r" \^ ", " | "),
         ("== ", "!= "), (" < ", " > "), (" > ", " < "), ("<< ", ">> "), (">> ", "<< "),
         (r"\? ", "? ~"), ("<= 0;", "<= 1;"), (r" or posedge \w+", ""),
         (r"(assign [^=]* =) ", r"\1 ~"), (r"(\w+ <=) (\w+;)", r"\1 ~\2"),
         (r"(0: \w+ =) ", r"\1 ~"), (r"if \((\w+)", r"if (~\1"))


def test_testbenches_notice_wrong_modules(tmp_path, problems):
    """Every mutant of every reference must fail, asynchronous resets made synchronous included."""
    def mutants(item):
        name, design, _ = item
        head, body = design.verilog().split(");\n", 1)
        for number, (old, new) in enumerate(WRONG):
            if re.search(old, body):
                yield name, number, f"{head});\n{re.sub(old, new, body, count=1)}"

    found = [mutant for item in problems for mutant in mutants(item)]
    logs = in_parallel(lambda m: simulate(
        tmp_path / f"{m[0]}-{m[1]}", test=(EVAL / f"{m[0]}_test.sv").read_text(),
        reference=(EVAL / f"{m[0]}_ref.sv").read_text(), candidate=m[2]), found)
    survivors = []
    for mutant, log in zip(found, logs, strict=True):
        if "Mismatches: 0 in" in log:
            survivors.append(mutant)
    assert {mutant[0] for mutant in found} == {name for name, _, _ in problems}
    assert not survivors, survivors


# ── Disjoint ──

def test_no_combination_of_the_benchmark_is_in_the_training_data_or_the_corpus(problems, corpus):
    held = {design.key for _, design, _ in problems}
    trained = {design.key for design, _, _ in make.rows()}
    seen = {design.key for (_, design), _ in zip(make.designs(make.CORPUS_SEED, make.MODULES),
                                                range(FACTS["documents"]))}
    assert len(held) == len(problems) and len(trained) > 1_000 and len(seen) > 5_000
    assert not held & trained and not held & seen


def test_no_text_of_the_benchmark_is_in_the_training_data_or_the_corpus(problems, corpus):
    """The same from the texts alone: no module of the benchmark, whatever its module's name."""
    def module(text):
        return {re.sub(r"module \w+", "module", found)
                for found in re.findall(r"^module .*?^endmodule", text, re.S | re.M)}
    with gzip.open(TINY / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    known = set().union(*(module(row["response"]) for row in rows), *map(module, corpus))
    asked = set().union(*(module((EVAL / f"{name}_ref.sv").read_text()) for name, _, _ in problems))
    assert len(asked) == len(problems) and len(known) > 10_000
    assert not asked & known
    prompts = {row["prompt"].strip() for row in rows}
    assert not prompts & {text.strip() for _, _, text in problems}


def test_training_problems_with_testbenches_are_none_of_the_evaluation(tmp_path, problems):
    make.write_problems(tmp_path / "draws", make.draws(40))
    texts = {path.name: path.read_text() for path in (tmp_path / "draws").iterdir()}
    asked = {text for name, text in texts.items() if name.endswith("_prompt.txt")}
    assert len(texts) == 120 and len(asked) == 40 and not asked & {text for _, _, text in problems}
    held = {design.key for _, design, _ in problems}
    drawn = list(make.draws(300))
    assert len({text for _, _, text in drawn}) == 300 and not held & {d.key for _, d, _ in drawn}
    references = sorted(name for name in texts if name.endswith("_ref.sv"))
    for name in [name.removesuffix("_ref.sv") for name in references[:8]]:
        reference = texts[f"{name}_ref.sv"]
        log = simulate(tmp_path / name, test=texts[f"{name}_test.sv"], reference=reference,
                       candidate=reference.replace("RefModule", "TopModule"))
        assert re.search(r"Mismatches: 0 in \d{3} samples", log), (name, log)


def test_the_base_has_never_seen_the_instruction_format(corpus):
    for text in ("`", "<answer>", "<think>", "<|", "<turn", "Implement", "Please", "I would like"):
        assert not any(text in document for document in corpus), text


# ── Tokenizer ──

IDS = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<|tool>": 46, "<tool|>": 47,
       "<|tool_call>": 48, "<tool_call|>": 49, "<|tool_response>": 50, "<tool_response|>": 51,
       '<|"|>': 52, "<|think|>": 98,
       "<|channel>": 100, "<channel|>": 101, "<|turn>": 105, "<turn|>": 106}


def test_control_tokens_are_at_gemma_4s_ids(tokenizer):
    assert {text: tokenizer.convert_tokens_to_ids(text) for text in IDS} == IDS
    assert all(tokenizer.convert_ids_to_tokens(number).startswith("<") for number in range(128))
    assert len(tokenizer) == tokenizer.vocab_size and len(tokenizer) % 64 == 0
    assert tokenizer("x")["input_ids"] == tokenizer("x", add_special_tokens=False)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_unicode_comes_back(tokenizer, text):
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not ids or min(ids) >= 128  # what somebody wrote never becomes a control token


# ── The base model ──

def test_config_has_every_structural_feature_of_the_31b():
    tiny = json.loads((ASSETS / "config.json").read_text())
    big = json.loads((ROOT / "data" / "configs" / "gemma4_31b.json").read_text())["text_config"]
    assert tiny["architectures"] == ["Gemma4ForCausalLM"]
    assert tiny["model_type"] == big["model_type"]
    assert tiny["layer_types"] == big["layer_types"][:6]
    for key in ("attention_k_eq_v", "num_global_key_value_heads", "final_logit_softcapping",
                "tie_word_embeddings", "rope_parameters", "num_kv_shared_layers", "rms_norm_eps",
                "hidden_activation", "hidden_size_per_layer_input", "pad_token_id", "bos_token_id"):
        assert tiny[key] == big[key], key
    for config in (tiny, big):
        assert config["num_attention_heads"] > config["num_key_value_heads"] > \
            config["num_global_key_value_heads"] == 4
        assert config["global_head_dim"] == 2 * config["head_dim"]
        for key in ("hidden_size", "intermediate_size", "vocab_size"):
            assert config[key] % 4 == 0, key
    assert tiny["sliding_window"] < 128  # shorter than the sequences it is trained on


def test_the_page_makes_the_stored_config():
    """It takes the 31B's and changes sizes; the stored one has all of its keys."""
    _, _, _, made = load(
        "appendix/09_tiny_base.py", "VOCABULARY", "big_config", "smaller", "tiny_config")
    stored = json.loads((ASSETS / "config.json").read_text())
    assert {key: stored[key] for key in made} == made


# ── Pretraining ──

def test_batches_hold_every_document_once_and_nothing_else():
    generator = np.random.default_rng(0)
    documents = [generator.integers(1, 99, generator.integers(3, 250)).tolist() for _ in range(900)]
    batches = pretrain.make_batches(documents, 2048, np.random.default_rng(1))
    known = {tuple(ids) for ids in documents}
    back = [tuple(row[row > 0].tolist()) for batch in batches for row in batch]
    assert set(back) <= known and len(set(back)) == len(back)
    short = sum(len(ids) <= 192 for ids in documents)
    assert short - len(back) < 32 + 21 + 16 + 10  # the rest of each length
    assert all(1_500 < batch.size <= 2_048 for batch in batches)


def a_small_run():
    """(weights, optimizer, step, evaluate, batches) of a shallow model; five steps end it."""
    config = gemma.config_from_hf(random_gemma.SHALLOW, dtype="float32")
    draw = np.random.default_rng(3)
    batches = [draw.integers(1, 320, (2, 24)).astype(np.int32) for _ in range(3)]
    graph, params = nnx.split(pretrain.initialize(gemma.gemma4.Gemma4(config, rngs=nnx.Rngs(0)), 0))
    optimizer = pretrain.make_optimizer(params, 5, 4e-3, 2, 0.05)
    step, evaluate = pretrain.make_steps(graph, optimizer, pretrain.tokens_seen(batches, 320))
    return params, optimizer, step, evaluate, batches


def test_the_loop_trains_and_validates_every_few_steps_and_after_the_last():
    params, optimizer, step, evaluate, batches = a_small_run()
    before, watched = pretrain.validation_loss(params, batches, evaluate), []
    trained, history = pretrain.pretrain(
        params, optimizer.init(params), step, evaluate, batches, batches, 5, every=2,
        watch=lambda done, weights: watched.append(done))
    assert watched == list(range(6)) and [entry["step"] for entry in history] == watched[1:]
    assert [entry["step"] for entry in history if "val_loss" in entry] == [2, 4, 5]
    assert history[-1]["val_loss"] == pretrain.validation_loss(trained, batches, evaluate) < before
    assert pretrain.validation_loss(params, batches, evaluate) == before  # what it was given stays


def test_a_pretraining_that_was_killed_goes_on_to_the_same_weights(tmp_path, capsys):
    """All steps take up to an hour; a kill, or a closed tab, once cost all of it."""
    params, optimizer, step, evaluate, batches = a_small_run()

    def run(recipe="ours", watch=None):
        unfinished = pretrain.Unfinished(tmp_path / "unfinished.npz", recipe)
        return pretrain.pretrain(params, optimizer.init(params), step, evaluate, batches, batches,
                                 5, every=2, watch=watch, unfinished=unfinished)

    def kill(done, weights):
        if done == 3:
            raise KeyboardInterrupt

    whole, history = run()
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        run(watch=kill)
    watched = []
    again, told = run(watch=lambda done, weights: watched.append(done))
    assert watched == [2, 3, 4, 5] and "going on after step 2" in capsys.readouterr().out
    assert [entry["loss"] for entry in told] == [entry["loss"] for entry in history]
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
        assert (np.asarray(one) == np.asarray(two)).all()

    with pytest.raises(KeyboardInterrupt):
        run(watch=kill)
    run("another rate", watch=lambda done, weights: watched.append(done))
    assert watched[4:] == list(range(6)) and "another recipe" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
