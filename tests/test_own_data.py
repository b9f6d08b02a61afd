"""own_data.py, its room helpers/own.py, docs/OWN_DATA.md and data/ports.

The page is run as it stands but for its file and its base: that has E2B's widths and kinds of
layers, random weights, four layers instead of 35 (with and without keys and values of their own,
sliding and full) and the tiny tokenizer with its vocabulary. One CPU device stands for the chip.
"""

import io
import json
import re
import sys
from unittest import mock

import huggingface_hub
import nbformat
import numpy as np
import pytest
import random_gemma
from conftest import ROOT, RUN, load, page, program
from safetensors.numpy import load_file

import helpers
import notebooks
import recipe
from helpers import chat, data, own
from helpers.run import UserError
from tables import architecture
from verilog import stats

from appendix.world import ports

PAGE = (ROOT / "docs/OWN_DATA.md").read_text()
FORMS = [json.loads(line) for line in re.search(r"```json\n(.*?)```", PAGE, re.S)[1].splitlines()]
TINY = ROOT / "assets" / "tiny_gemma4"
ASK, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It."}


# ── docs/OWN_DATA.md and data/ports ──


def test_every_form_on_the_page_is_understood():
    assert [data.form_of(row) for row in FORMS] == ["chat", "ShareGPT", "Alpaca", "completion"]


def test_the_pages_chat_with_tools_is_trained_as_it_happened():
    tools = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.S)[1])
    example, problem = data.clean(tools)
    assert not problem and not example["unused"] and not example["odd"]
    tokenizer = chat.load_tokenizer(TINY)
    ids, mask = chat.render(tokenizer, data.as_messages(example, None))
    assert tokenizer.decode([number for number, on in zip(ids, mask) if on]) == (
        '<|tool_call>call:stock{item:<|"|>...<|"|>}<tool_call|><|tool_response>...<turn|>')


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


# ── helpers/own.py ──


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_are_kept_dropped_and_named(tmp_path, capsys):
    good = {"messages": [ASK, {**ANSWER, "score": 5}], "id": 7}
    file = write(tmp_path / "a.jsonl", good, {"messages": [ASK]}, "no row", {"a": 1})
    rows = own.look(file, "Be brief.")
    assert [message["role"] for message in rows.chats[0]] == ["system", "user", "assistant"]
    assert rows.dropped == {"no answer at the end": 1, "not a JSON object": 1,
                            "no form that we know: a": 1}
    said = capsys.readouterr().out
    assert "1 of 4 rows" in said and "column id (1); score of assistant messages (1)" in said
    with pytest.raises(UserError, match="'no answer at the end': 1.*OWN_DATA"):
        own.look(write(tmp_path / "b.jsonl", {"messages": [ASK]}))


def test_a_file_that_cannot_be_uploaded_here_is_said(monkeypatch):
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    assert own.file_of("", "example") == "example" and own.file_of("a.jsonl", "x") == "a.jsonl"
    with pytest.raises(UserError, match="works on Colab.*Add Input"):
        own.file_of("upload", "x")


@pytest.mark.parametrize("system", ["S", ""])
def test_recipe_reads_what_is_written_for_it(system, tmp_path, capsys):
    """Every form, with tools and with an answer that isn't trained, becomes recipe.py's one."""
    rows = [*FORMS, json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.S)[1])]
    rows.append({"messages": [ASK, {**ANSWER, "weight": 0}, ASK, {**ANSWER, "reasoning": "so"}]})
    kept = own.look(write(tmp_path / "in.jsonl", *rows), system, "kept").chats
    own.write_chats(kept, tmp_path / "out.jsonl")
    tokenizer = chat.load_tokenizer(TINY)
    capsys.readouterr()
    chats, _ = recipe.read_chats(tmp_path / "out.jsonl", 0.0, kept=True)
    assert "left out" not in (said := capsys.readouterr().out) and "not used" not in said
    assert len(chats) == len(rows)
    examples = recipe.render(tokenizer, chats, 4096, kept=True)
    assert len(examples) == len(rows) + 1  # the chat with a call has two answers
    wanted = [chat.render(tokenizer, messages)[0] for messages in kept]
    assert all(ids in [example for example, _ in examples] for ids in wanted)


@pytest.mark.parametrize("reasoning, thoughts", [("stripped", 0), ("kept", 10)])
def test_section_6_trains_every_answer_of_the_thirty_rows(reasoning, thoughts, tmp_path, capsys):
    """As the page stands: its rows opened with an empty system message, and all were left out."""
    rows = own.look(str(ROOT / "data/tools/train.jsonl"), "", reasoning)
    said = capsys.readouterr().out
    assert "30 of 30 rows" in said
    assert ("thoughts of assistant messages (10)" in said) == (reasoning == "stripped")
    own.write_chats(rows.chats, tmp_path / "rows.jsonl")
    assert '"system"' not in (tmp_path / "rows.jsonl").read_text()
    kept = reasoning == "kept"
    chats, _ = recipe.read_chats(tmp_path / "rows.jsonl", 0.0, kept)
    tokenizer = chat.load_tokenizer(TINY)
    examples = recipe.render(tokenizer, chats, 384, kept)
    assert capsys.readouterr().out == "56 answers; 0 more are too long\n"
    written = [tokenizer.decode(ids[mask.index(1):]) for ids, mask in examples]
    assert sum(text.startswith("<|channel>thought\n") for text in written) == thoughts
    wanted = [chat.render(tokenizer, messages)[0] for messages in rows.chats]
    assert all(ids in [example for example, _ in examples] for ids in wanted)


def test_no_thought_is_lost_on_the_way_to_recipe(tmp_path, capsys):
    """Those of earlier turns were, and their answers were trained as if nobody had thought."""
    first, second = {**ANSWER, "reasoning": "one"}, {**ANSWER, "content": "<think>two</think>It."}
    own_rows = own.look(write(tmp_path / "in.jsonl", {"messages": [ASK, first, ASK, second]}), "",
                        "kept")
    assert "not used" not in capsys.readouterr().out
    own.write_chats(own_rows.chats, tmp_path / "out.jsonl")
    chats, _ = recipe.read_chats(tmp_path / "out.jsonl", 0.0, kept=True)
    tokenizer = chat.load_tokenizer(TINY)
    written = []
    for ids, mask in recipe.render(tokenizer, chats, 4096, kept=True):
        prompt, answer = ids[:mask.index(1)], ids[mask.index(1):]
        assert "<|think|>" in tokenizer.decode(prompt)
        assert "<|channel>" not in tokenizer.decode(prompt), "the history holds no thoughts"
        written.append(tokenizer.decode(answer))
    assert written == [f"<|channel>thought\n{thought}\n<channel|>It.<turn|>"
                       for thought in ("one", "two")]


@pytest.mark.parametrize("opening", ["", " \n", None])
def test_recipe_reads_a_system_message_that_says_nothing_as_02_does(opening, tmp_path, capsys):
    """It left such a row out; 02 leaves the message out."""
    row = {"messages": [{"role": "system", "content": opening, "mood": "good"}, ASK, ANSWER]}
    write(tmp_path / "a.jsonl", row)
    chats, _ = recipe.read_chats(tmp_path / "a.jsonl", 0.0)
    assert capsys.readouterr().out == "1 rows 'kept, but not used: mood'\n"
    tokenizer = chat.load_tokenizer(TINY)
    (ids, _), = recipe.render(tokenizer, chats, 4096)
    example, _ = data.clean(row)
    assert ids == chat.render(tokenizer, data.as_messages(example, None))[0]


LONG = {**ANSWER, "content": "It. " * 99}
NOTHING = {**ANSWER, "content": " "}


@pytest.mark.parametrize("rows, share, says", [
    ([[ASK, NOTHING]] * 2, 0, "no answer to train (2 rows left out: an empty text)"),
    ([[ASK, ANSWER]] * 3, 1, "no answer to train (3 rows held out)"),
    ([[ASK, {**ANSWER, "weight": 0}]], 0,
     "no answer to train (1 rows without an answer of weight 1)"),
    ([[ASK, LONG]], 0, "no answer to train within --sequence_length 64"),
    ([[ASK, LONG], [ASK, NOTHING]], 0,
     "no answer to train within --sequence_length 64 (1 rows left out: an empty text)"),
    ([], 0, "no answer to train")])
def test_recipe_says_why_there_is_nothing_to_train(rows, share, says, tmp_path):
    """Whatever the reason was, it blamed the length."""
    path = tmp_path / "rows.jsonl"
    write(path, *({"messages": messages} for messages in rows))
    options = {"model": TINY, "sequence_length": 64, "validation": share}
    with pytest.raises(UserError) as stopped:
        own.train(recipe.main, options, tmp_path)
    assert str(stopped.value) == f"{path}: {says}"


def test_what_is_asked_is_what_recipe_holds_out(tmp_path):
    tokenizer = chat.load_tokenizer(TINY)
    chats = []
    for number in range(60):
        chats.append([{**ASK, "content": f"What is {number}?"}, ANSWER, ASK, ANSWER])
    exam = own.questions(tokenizer, chats, 0.2, 256, most=1_000)
    own.write_chats(chats, tmp_path / "a.jsonl")
    _, held_out = recipe.read_chats(tmp_path / "a.jsonl", 0.2)
    assert [question.asked[-1]["content"] for question in exam] == [
        messages[0]["content"] for messages in held_out]
    assert {question.wanted for question in exam} == {"It."}
    assert len(own.questions(tokenizer, chats, 0.2, 256, most=3)) == 3
    with pytest.raises(UserError, match="No chat is held out of 60"):
        own.questions(tokenizer, chats, 0.0, 256)
    with pytest.raises(UserError, match="All 60 held-out questions are longer than 5 tokens"):
        own.questions(tokenizer, chats, 1.0, 5)
    tools, = own.look(str(ROOT / "data/tools/train.jsonl")).chats[:1]
    asked, wanted, _ = own.questions(tokenizer, [tools], 1.0, 512)[0]
    assert len(asked) == 2 and wanted == "<|tool_call>call:width{high:9,low:0}<tool_call|>"


def test_where_thoughts_are_trained_the_exam_asks_for_them_and_reads_past_them(monkeypatch):
    tokenizer = chat.load_tokenizer(TINY)
    thinks = {**ANSWER, "reasoning": "One and one is two."}
    exam = own.questions(tokenizer, [[ASK, thinks], [ASK, ANSWER]], 1.0, 256)
    assert [question.thought for question in exam] == ["One and one is two.", ""]
    plain = own.questions(tokenizer, [[ASK, ANSWER]], 1.0, 256)
    ids, mask = chat.render(tokenizer, [ASK, thinks])
    assert own.longest(tokenizer, exam) >= sum(mask) > own.longest(tokenizer, plain)

    asked = []
    trained = ids[mask.index(True):]  # what the model has learned to write

    def greedy(model, prompts, *_, **__):
        asked.extend(prompts)
        return [trained, trained[:4]]  # the second answer never leaves its thought
    monkeypatch.setattr(own.gemma, "greedy", greedy)
    monkeypatch.setattr(own.gemma, "answer_program", lambda *_: None)
    monkeypatch.setattr(own.nnx, "update", lambda *_: None)
    asker = own.Asker(None, {"tuned": None}, tokenizer, None, exam)
    assert asker.ask("tuned", [question.asked for question in exam]) == ["It.", ""]
    assert asked[0] == ids[:mask.index(True)] == chat.prompt_ids(tokenizer, [ASK], thinking=True)
    asked.clear()
    own.Asker(None, {"tuned": None}, tokenizer, None, plain).ask("tuned", [[ASK]])
    assert asked[0] == chat.prompt_ids(tokenizer, [ASK])


def test_the_losses_are_read_from_what_recipe_prints(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("40 answers; 0 more are too long\nstep 1/2 {'loss': 2.5}\nstep 1/2 {'loss': 3.0}"
                   "\nstep 2/2 {'loss': 1.5, 'held-out loss': 1.75}\n")
    assert own.losses(log) == {"loss": [(1, 3.0), (2, 1.5)], "held-out loss": [(2, 1.75)]}


LOG = """\
40 answers; 0 more are too long
7 answers; 1 more are too long
40 answers in 9 rows, steps 1 to 30
"""


def test_the_screen_gets_the_gist_and_the_log_gets_all(tmp_path):
    """Every tenth step, those with a held-out loss, the first and the last; three digits."""
    printed = LOG
    for step in range(1, 32):
        held_out = ", 'held-out loss': 1.23456" if step == 15 else ""
        printed += f"step {step}/31 {{'loss': 6.94200{held_out}}}\n"
    screen, log = io.StringIO(), io.StringIO()
    stream = own.Screen(screen, log)
    for start in range(0, len(printed), 7):  # in pieces, as a stream comes
        stream.write(printed[start:start + 7])
    assert log.getvalue() == printed
    shown = screen.getvalue().splitlines()
    assert shown[:3] == ["to train on: 40 answers; 0 more are too long",
                         "held out: 7 answers; 1 more are too long",
                         "40 answers in 9 rows, steps 1 to 30"]
    assert [int(line.split()[1]) for line in shown[3:]] == [1, 10, 15, 20, 30, 31]
    assert shown[5] == "step 15 of 31: loss 6.942, held-out loss 1.235"


def test_answers_are_counted_by_the_run_itself(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("50 answers; 0 more are too long\n5 answers; 0 more are too long\n" + LOG)
    assert own.counts(log) == (40, 7), "the newest lines count"
    log.write_text("step 1/2 {'loss': 2.5}\n")
    with pytest.raises(UserError, match="Train again"):
        own.counts(log)


def test_the_loss_says_what_to_do():
    assert "more epochs" in own.advice([(10, 2.0), (20, 1.0)])
    assert own.advice([(10, 1.0), (20, 2.0)]) == "Lowest at step 10 of 20: train for fewer epochs"
    assert "Nothing was held out" in own.advice([])


def test_a_score_that_flatters_is_said():
    """Many words in common while nothing is right; and it's said, too, where both scores agree."""
    def compared(base, tuned):
        return stats.compare([base] * 9 + [base + 0.01], tuned)
    overlap = compared(0.3, [0.84] * 10)
    for right, word in ((0, "flatters"), (1, "with 1 of 10 answers right"),
                        (9, "exact doesn't contradict it")):
        strict = compared(0.0, [1.0] * right + [0.0] * (10 - right))
        lines = own.meaning({"overlap": overlap, "exact": strict}, {"overlap": 0.65, "exact": 0})
        assert lines[0] == f"exact: {right} of 10 tuned answers are right, and 0 of the base's."
        assert "so tuning raised it" in lines[1] and "+53.9 points" in lines[1]
        assert not any("the tuned model is better" in line for line in lines)
        assert "gets 65% by overlap" in lines[3] and word in lines[4], lines


def test_a_score_counts_what_an_answer_lists():
    assert own.listed("a has 3 ports: input b, input c (3 bits) and output d.") == [
        "input b", "input c (3 bits)", "output d"]
    assert own.listed("Paris") == ["Paris"] and own.listed("") == [""]
    assert own.overlap("a b", "a c") == 0.5 and own.overlap("", "a") == 0 == own.overlap("", "")


def test_what_the_form_alone_is_worth():
    exam = [own.Question([], wanted) for wanted in ("a b", "a c", "a d")]
    assert own.other_answers(exam, lambda answer, wanted: float(answer == wanted)) == 0
    assert own.other_answers(exam, lambda answer, wanted: float(answer[0] == wanted[0])) == 1


def test_what_recipe_refuses_is_one_line_here(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(UserError, match="^--reasoning some: stripped or kept$"):
        own.train(recipe.main, {"reasoning": "some", "model": TINY}, tmp_path)
    with pytest.raises(UserError, match="^recipe.py doesn't take one of these options, see above"):
        own.train(recipe.main, {"rank": 16.5}, tmp_path)
    assert "--rank: invalid int value: '16.5'" in capsys.readouterr().err


def test_every_number_of_the_pages_recipes_is_what_is_trained_with(monkeypatch, tmp_path):
    arrived = []
    monkeypatch.setattr(recipe, "run", arrived.append)
    recipes = load("own_data.py", "RECIPES")
    for options in recipes.values():
        marked = {name: type(value)(7) for name, value in options.items()}
        for wanted in (options, marked):
            own.train(recipe.main, wanted, tmp_path)
            found = vars(arrived.pop())
            assert {name: str(found[name]) for name in wanted} == {
                name: str(value) for name, value in wanted.items()}


COMPARED = {"overlap": {"first": (0.1, 0.0, 0.2), "second": (0.9, 0.8, 1.0),
                        "difference": (0.8, 0.7, 0.9), "p": 0.001, "values": np.zeros(12)},
            "exact": {"first": (0.0, 0.0, 0.2), "second": (0.25, 0.1, 0.4),
                      "difference": (0.25, 0.1, 0.4), "p": 0.02, "values": np.zeros(12)}}
OPTIONS = {"model": "google/gemma-4-E2B-it", "rank": 16, "learning_rate": 2e-4, "validation": 0.1}


def test_the_card_says_base_data_recipe_and_scores(tmp_path):
    write(tmp_path / "rows.jsonl", *[{"messages": [ASK, ANSWER]}] * 47)
    (tmp_path / "log.txt").write_text(LOG)
    form = {"overlap": 0.65, "exact": 0.0}
    text = own.card("me/mine", OPTIONS, tmp_path, COMPARED, form, "Be brief.")
    card = huggingface_hub.ModelCard(text)  # the hub's own reader
    assert card.data.base_model == "google/gemma-4-E2B-it" and card.data.library_name == "peft"
    digest = helpers.sha256_file(tmp_path / "rows.jsonl")
    for words in (digest, "trained on 40 answers",
                  "| overlap | 10.0 | 90.0 | +80.0 (+70.0 to +90.0), p = 0.001 | 65.0 |",
                  "| exact | 0.0 | 25.0 | +25.0 (+10.0 to +40.0), p = 0.02 | 0.0 |",
                  "12 of the 7 held-out", "7 were held out", "--learning_rate 0.0002",
                  '{"role": "system", "content": "Be brief."}', 'base = "google/gemma-4-E2B-it"',
                  "on the hub", "do_sample=False"):
        assert words in card.text, words
    assert card.text.index("| exact |") < card.text.index("| overlap |")
    used = card.text.split("```python")[1].split("```")[0]
    compile(used, "card", "exec")
    local = own.card("m", OPTIONS | {"model": str(TINY)}, tmp_path, COMPARED, form)
    assert "base_model" not in local.split("---")[1]
    assert "without a system message" in local and "is a folder on the machine" in local
    tiny = own.card("m", OPTIONS | {"model": "assets/tiny_gemma4", "reasoning": "kept"}, tmp_path,
                    COMPARED, form)
    assert "Clone it" in tiny and "enable_thinking=True" in tiny


def test_the_card_asks_with_the_tokens_of_the_page():
    """The template that the card's lines apply opens the answer as `chat.prompt_ids` does."""
    tokenizer = chat.load_tokenizer(TINY)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    applied = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    applied = applied["input_ids"] if hasattr(applied, "keys") else applied
    assert list(applied) == chat.prompt_ids(tokenizer, messages)


def test_an_adapter_names_its_base_and_not_the_folder_it_was_staged_in(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path":
                                                              str(tmp_path / "base")}))
    own.label(tmp_path, "google/gemma-4-E2B-it", "card")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {"r": 4, "base_model_name_or_path": "google/gemma-4-E2B-it"}
    assert (tmp_path / "README.md").read_text() == "card"


def test_pushing_needs_a_token_and_sends_the_folder_to_a_private_repository(tmp_path, monkeypatch):
    """The hub is a stand-in with the signatures of the real one."""
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="Pushing to me/mine needs a token.*Secrets"):
        own.push_to_hub(tmp_path, "me/mine")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    api = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    api.upload_folder.return_value = "https://huggingface.co/me/mine/tree/main/"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: api)
    assert own.push_to_hub(tmp_path, "me/mine").endswith("me/mine/tree/main/")
    api.create_repo.assert_called_once_with("me/mine", private=True, exist_ok=True)
    api.upload_folder.assert_called_once_with(repo_id="me/mine", folder_path=tmp_path)
    api.create_repo.side_effect = huggingface_hub.errors.HFValidationError("Repo id must be so")
    with pytest.raises(UserError, match="couldn't be pushed: Repo id must be so"):
        own.push_to_hub(tmp_path, "me mine")


# ── The page ──


def test_the_page_is_short_and_has_its_badges():
    cells = notebooks.build(ROOT / "own_data.py").cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert len(code) <= 12 and all(len(source.splitlines()) <= 20 for source in code)
    first = cells[0].source
    assert ("colab.research.google.com/github/OWNER/gemma4-on-tpu/blob/main/notebooks/"
            "own_data") in first
    assert ("kaggle.com/kernels/welcome?src=https://github.com/OWNER/gemma4-on-tpu/blob/main/"
            "notebooks/own_data.ipynb") in first


@pytest.mark.series
@pytest.mark.skipif(not (RUN / "notebooks/own_data.ipynb").exists(), reason=f"no run in {RUN}")
def test_the_page_ran_and_the_tuned_model_is_better():
    cells = nbformat.read(RUN / "notebooks" / "own_data.ipynb", as_version=4).cells
    for cell in cells:
        if cell.cell_type == "code":
            assert cell.execution_count is not None, cell.source[:80]
            assert not [output for output in cell.outputs if output.output_type == "error"]
    seconds = json.loads((RUN / "times.json").read_text())["seconds"]["own_data"]
    assert seconds < 600, "four minutes on two quiet cores; this one may be busy"
    said = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", ()))
    (base, tuned), = re.findall(r"\| overlap \| ([\d.]+) \| ([\d.]+) \|", said)
    assert float(tuned) > float(base) + 20
    assert "flatters" in said or "doesn't contradict it" in said


def e2b_with_few_layers(folder):
    """A model folder: E2B's config with a layer of each kind."""
    config = helpers.read_json("data/configs/gemma4_e2b.json")["text_config"]
    vocabulary = helpers.read_json("assets/tiny_gemma4/config.json")
    vocabulary = architecture.text_config(vocabulary)["vocab_size"]
    config |= {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4,
               "layer_types": ["sliding_attention", "full_attention"] * 2,
               "num_kv_shared_layers": 2, "vocab_size": vocabulary,
               "vocab_size_per_layer_input": vocabulary}
    return random_gemma.write(folder, config, tokenizer=TINY)


def rows_of_every_form():
    """Sixty short rows, the forms in turn, and one that is no chat."""
    for number in range(60):
        ask, answer = f"What is {number} plus {number}?", f"It is {2 * number}."
        yield [{"messages": [{"role": "user", "content": ask},
                             {"role": "assistant", "content": answer}]},
               {"conversations": [{"from": "human", "value": ask},
                                  {"from": "gpt", "value": answer}]},
               {"instruction": ask, "input": "", "output": answer},
               {"prompt": ask, "completion": answer}][number % 4]
    yield {"messages": [{"role": "user", "content": "No answer?"}]}


@pytest.mark.slow
def test_the_page_leads_from_a_file_to_a_merged_e2b_and_goes_on_where_it_was(tmp_path):
    base = e2b_with_few_layers(tmp_path / "base")
    file = write(tmp_path / "chats.jsonl", *rows_of_every_form())
    text = (ROOT / "own_data.py").read_text()
    for old, new in (('FILE = ""', f"FILE = {file!r}"), ('SYSTEM = ""', 'SYSTEM = "Be brief."'),
                     ('"model": "assets/tiny_gemma4"', f'"model": {str(base)!r}'),
                     ('"rows_per_step": 1', '"rows_per_step": 2'),
                     ('"epochs": 2.5', '"epochs": 1.0')):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = tmp_path / "own_data.py"
    script.write_text(text)
    done = page(script, tmp_path / "run")
    assert done.returncode == 0, done.stdout[-1_500:] + done.stderr[-3_000:]
    assert "60 of 61 rows" in done.stdout and "## Scores" in done.stdout
    assert "adapter.zip" in done.stdout
    out, = (tmp_path / "run" / "own").iterdir()
    before, merged = (load_file(folder / "model.safetensors") for folder in (base, out / "merged"))
    changed = {name for name in before if not np.array_equal(before[name], merged[name])}
    assert any("q_proj" in name for name in changed)
    assert not any("norm" in name or "embed" in name for name in changed)
    assert json.loads((out / "adapter/adapter_config.json").read_text())[
        "base_model_name_or_path"] == str(base)
    assert (out / "adapter.zip").exists()
    assert '"content": "Be brief."' in (out / "adapter/README.md").read_text()

    again = page(script, tmp_path / "run")
    assert again.returncode == 0, again.stderr[-3_000:]
    assert "step 1/" not in again.stdout, "it goes on from its checkpoint"


def test_a_range_knows_the_page_by_its_name(tmp_path):
    done = program(sys.executable, "tools/series.py", "own", "01", RUN_DIR=str(tmp_path))
    assert done.returncode == 1 and "own comes after 01" in done.stderr
    assert re.search(r"\[0-9\]\[0-9\] \| own\) ;;", (ROOT / "run_all.sh").read_text())
