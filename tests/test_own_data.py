"""The page docs/OWN_DATA.md, rehearsed: its blocks, as they stand, in 02, 03 and 04.

The model has E2B's widths and kinds of layers, random weights, four layers instead of 35 (with and
without keys and values of their own, sliding and full) and the tiny tokenizer with its vocabulary.
A folder stands for the mounted Drive, one CPU device for the chip. The rows are short and the steps
are two: it is about the way. The example, data/ports, is trained as the page says, with the tiny
model.
"""

import json
import re
import sys

import numpy as np
import pytest
import random_gemma
from conftest import ROOT, program, serve
from safetensors.numpy import load_file

import helpers
import verilog
from helpers import chat, data, packing, records
from tables import architecture
from verilog import asking, scores

from appendix.world import ports

PAGE = (ROOT / "docs/OWN_DATA.md").read_text()
DRIVE, IN_02, IN_03, ASK, COMPARE, SCORE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
FORMS = [json.loads(line) for line in re.search(r"```json\n(.*?)```", PAGE, re.S)[1].splitlines()]
# `google.colab` is on Colab only; here mounting makes a folder.
COLAB = """import sys, types, pathlib
sys.modules["google.colab"] = types.SimpleNamespace(drive=types.SimpleNamespace(
    mount=lambda place: pathlib.Path(place, "MyDrive").mkdir(parents=True, exist_ok=True)))
"""


def test_every_form_on_the_page_is_understood():
    assert [data.form_of(row) for row in FORMS] == ["chat", "ShareGPT", "Alpaca", "completion"]


def test_the_pages_chat_with_tools_is_trained_as_it_happened():
    tools = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.S)[1])
    example, problem = data.clean(tools)
    assert not problem and not example["unused"] and not example["odd"]
    tokenizer = chat.load_tokenizer(ROOT / "assets" / "tiny_gemma4")
    ids, mask = chat.render(tokenizer, data.as_messages(example, None))
    assert tokenizer.decode([number for number, on in zip(ids, mask) if on]) == (
        '<|tool_call>call:stock{item:<|"|>...<|"|>}<tool_call|><|tool_response>...<turn|>')


def test_the_comparison_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    """With a model that says nothing and one that repeats the question, which holds the answer."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {number}?", "answer": str(number)} for number in range(12)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exec(COMPARE, {"ask": lambda model, question: question if model == "tuned" else "no"})
    assert "base 0.00, tuned 1.00, difference +1.00" in capsys.readouterr().out


def e2b_with_few_layers(folder):
    """A model folder: E2B's config with a layer of each kind."""
    config = helpers.read_json("data/configs/gemma4_e2b.json")["text_config"]
    vocabulary = helpers.read_json("assets/tiny_gemma4/config.json")
    vocabulary = architecture.text_config(vocabulary)["vocab_size"]
    config |= {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4,
               "layer_types": ["sliding_attention", "full_attention"] * 2,
               "num_kv_shared_layers": 2, "vocab_size": vocabulary,
               "vocab_size_per_layer_input": vocabulary}
    return random_gemma.write(folder, config, tokenizer=ROOT / "assets" / "tiny_gemma4")


def rows_of_every_form():
    """Sixty short rows, the page's forms in turn, and one that is no chat."""
    for number in range(60):
        ask, answer = f"What is {number} plus {number}?", f"It is {2 * number}."
        yield [{"messages": [{"role": "user", "content": ask},
                             {"role": "assistant", "content": answer}]},
               {"conversations": [{"from": "human", "value": ask},
                                  {"from": "gpt", "value": answer}]},
               {"instruction": ask, "input": "", "output": answer},
               {"prompt": ask, "completion": answer}][number % 4]
    yield {"messages": [{"role": "user", "content": "No answer?"}]}


def run(source, tmp_path, *changes):
    """Execute a notebook with the Drive's block before it and `changes` (pattern, text) in it."""
    text = (ROOT / source).read_text()
    for pattern, new in changes:
        text, count = re.subn(pattern, lambda _, new=new: new, text, flags=re.M | re.S)
        assert count == 1, pattern
    script = tmp_path / source
    script.write_text(f'{COLAB}{DRIVE.replace("/content", str(tmp_path))}'
                      f'del sys.modules["google.colab"]\n{text}')
    done = program(sys.executable, script, RUN_DIR=None, SIZE=None, XLA_FLAGS=None,
                   MPLBACKEND="agg", MAX_STEPS="2")  # the size is set by the page's block
    assert done.returncode == 0, done.stdout[-1_500:] + done.stderr[-3_000:]
    return done.stdout


@pytest.mark.slow
def test_the_pages_cells_lead_from_a_file_to_a_merged_e2b(tmp_path):
    base = e2b_with_few_layers(tmp_path / "base")
    drive = tmp_path / "drive" / "MyDrive"
    drive.mkdir(parents=True)
    (drive / "my_chats.jsonl").write_text("".join(
        json.dumps(row) + "\n" for row in rows_of_every_form()))

    small = f"cfg = replace(cfg, base={str(base)!r}, max_tokens=128, sequence_length=256)\n"
    said = run("02_data.py", tmp_path, (r"^# cfg = replace\(cfg, source=[^\n]*\n", IN_02.replace(
        "/content", str(tmp_path)) + small))
    assert "60 of 61 rows are usable" in said
    meta = packing.check_data(drive / "gemma4" / "data")
    assert meta.rows_kept == 60 and meta.system == "You answer questions about our products."
    assert meta.val_examples > 0

    page = (ROOT / "03_train.py").read_text()
    choose = re.search(r"^cfg = helpers\.choose\(.*?\)\n", page, re.M)[0]
    said = run("03_train.py", tmp_path,
        (r"helpers\.machine\(devices=4\)", "helpers.machine(devices=1)"),  # one chip
        (re.escape(choose), f"{choose}{IN_03}cfg = replace(cfg, rank=4, answer_tokens=4)\n"))
    assert "asked:\nWhat is" in said, "the running example is one of one's own"
    recipe = records.Recipe.load(drive / "gemma4")
    assert recipe.epochs == 3.0 and recipe.final_step == 2 and recipe.system == meta.system

    run("04_merge.py", tmp_path)
    before = load_file(base / "model.safetensors")
    merged = {}
    for path in (drive / "gemma4" / "merged").glob("*.safetensors"):
        merged |= load_file(path)
    assert merged.keys() == before.keys()
    changed = {name for name in before if not np.array_equal(before[name], merged[name])}
    assert any("q_proj" in name for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed)

    script = tmp_path / "ask.py"  # the block that asks without a server, with another library
    script.write_text(f"import os\nos.environ['RUN_DIR'] = {str(drive / 'gemma4')!r}\n"
                      + ASK.replace("max_new_tokens=200", "max_new_tokens=4"))
    serve(script)


def test_the_example_is_what_its_generator_writes():
    """And its answers say what a regular expression finds in the questions."""
    chats, held_out = ports.rows()
    for name, wanted in (("train", chats), ("held_out", held_out)):
        lines = (ROOT / "data" / "ports" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == wanted
    for row in held_out:
        found = re.findall(r"(input|output) (?:\[(\d+):0\] )?(\w+)", row["question"])
        told = re.findall(r"(input|output) (\w+)(?: \((\d+) bits\))?", row["answer"])
        assert told == [(kind, name, high and str(int(high) + 1)) for kind, high, name in found]
        assert f" has {len(found)} ports: " in row["answer"]
    assert not {row["question"] for row in held_out} & {
        row["messages"][0]["content"] for row in chats}


# Greedy answers by transformers, in the other environment: folder, {name: prompts}, their file.
ANSWER = """import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, asked, answers = sys.argv[1], json.load(open(sys.argv[2])), {}
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype="float32", key_mapping={"^model.language_model.": "model."})
for name, texts in asked.items():
    ids = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False,
                    return_token_type_ids=False)
    out = model.generate(**ids, max_new_tokens=120, do_sample=False, eos_token_id=[1, 106, 50])
    answers[name] = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1]:],
                                           skip_special_tokens=True)
json.dump(answers, open(sys.argv[3], "w"))
"""


def what_it_knows(folder, tmp_path):
    """[ports named, ports told with their width, modules written below a comment], in per cent."""
    bench = verilog.questions(ROOT / "data/ports/held_out.jsonl")
    problems = verilog.load_problems(ROOT / "data/tiny_eval")
    asked = {"ports": [f"<bos><|turn>user\n{one.prompt}<turn|>\n<|turn>model\n<|channel>thought\n"
                       "<channel|>" for one in bench.problems],
             "modules": ["<bos>" + asking.text_to_continue(one, "comment") for one in problems]}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    (tmp_path / "answer.py").write_text(ANSWER)
    serve(tmp_path / "answer.py", folder, tmp_path / "asked.json", tmp_path / "answers.json")
    answers = json.loads((tmp_path / "answers.json").read_text())
    texts = {one.name: [text] for one, text in zip(bench.problems, answers["ports"], strict=True)}
    shares = []
    for code in (SCORE, SCORE.replace(r"put \w+", r"put \w+(?: \(\d+ bits\))?")):
        exec(code, space := {})
        score = verilog.questions(ROOT / "data/ports/held_out.jsonl", space["ports_named"])
        shares.append(scores.grade(score, texts).mean())
    verdicts = verilog.judge_many([(one, verilog.extract_code(text)[0]) for one, text in
                                   zip(problems, answers["modules"], strict=True)])
    shares.append(np.mean([verdict.passed for verdict in verdicts]))
    return [100 * float(share) for share in shares]


@pytest.mark.slow
def test_the_tiny_model_learns_the_example_and_forgets_as_the_page_says(tmp_path):
    command = re.search(r"```bash\n\.venv/bin/python (recipe\.py .*?)```", PAGE, re.S)[1]
    command = command.replace("\\\n", " ").replace("runs/ports", str(tmp_path / "out")).split()
    done = program(sys.executable, *command)
    assert done.returncode == 0, done.stderr[-3_000:]
    on_the_page = np.array(re.findall(r"\| (\d+) % \| (\d+) % \|$", PAGE, re.M), float).T
    found = [what_it_knows(folder, tmp_path) for folder in
             (ROOT / "assets/tiny_gemma4", tmp_path / "out" / "merged")]
    assert (abs(found - on_the_page) <= 10).all(), found  # another machine rounds otherwise
