"""Rows with tools end to end: read alike by 02 and recipe.py, trained, called, parsed by vLLM."""

import json
import sys

import jax
import pytest
from conftest import ROOT, needs_serve, program, serve

import recipe
import serving
from helpers import answers, chat, data, gemma
from serving import Options, asking
from test_data import ASK, DONE, TOOL_CHATS, TOOLS, call, calling, result

from appendix.world import calls

TINY = ROOT / "assets" / "tiny_gemma4"
FILE = ROOT / "data" / "tools" / "train.jsonl"
SYSTEM = {"role": "system", "content": "S"}


def rendered(tokenizer, messages, tools, reasoning="stripped"):
    """recipe.py's examples of a chat: [(ids of the prompt, those of the answer)]."""
    row, problem = recipe.parse(json.dumps({"messages": messages, "tools": tools}))
    assert not problem
    examples = recipe.render(tokenizer, [row["messages"]], 4096, reasoning == "kept")
    pairs = []
    for ids, mask in examples:
        first = mask.index(1)
        assert not any(mask[:first]) and all(mask[first:])
        pairs.append((ids[:first], ids[first:]))
    return pairs


# ── recipe.py reads what 02 reads ──


@pytest.mark.parametrize("name", TOOL_CHATS)
def test_recipe_renders_every_answer_as_02_renders_the_chat_up_to_it(name):
    tokenizer = chat.load_tokenizer(TINY)
    messages, reasoning, trained = TOOL_CHATS[name]
    ours = rendered(tokenizer, [SYSTEM, *messages], TOOLS, reasoning)
    example, _ = data.clean({"messages": messages, "tools": TOOLS})
    whole = data.as_messages(example, "S", reasoning)
    ids, _ = chat.render(tokenizer, whole)
    assert [*ours[-1][0], *ours[-1][1]] == ids
    written = [tokenizer.decode(answer) for _, answer in ours]
    for text in trained:  # what 02 trains in one row, recipe.py trains in several
        assert text in written
    for (prompt, _), text in zip(ours, written, strict=True):
        thinking = text.startswith(chat.CHANNEL)
        served = []
        for end in range(1, len(whole)):
            served.append(chat.prompt_ids(tokenizer, whole[:end], thinking))
        assert prompt in served, "the prompt is one that a server sends"


@pytest.mark.parametrize("messages, tools, problem", [
    ([ASK, calling(call(0)), DONE], TOOLS, "a call without its result"),
    ([ASK, calling(call(0), call(1)), result(0, "ok"), DONE], TOOLS, "a call without its result"),
    ([ASK, result(0, "ok"), DONE], TOOLS, "a result without its call"),
    ([ASK, calling(call(0)), result(7, "ok"), DONE], TOOLS, "a result without its call"),
    ([ASK, calling({"id": "c0", "function": {"name": "f", "arguments": "{cut"}}), result(0, "a"),
      DONE], TOOLS, "a call is not {id: ..., function: {name: ..., arguments: JSON}}"),
    ([ASK, calling({"id": "c0", "name": "f"})], TOOLS,
     "a call is not {id: ..., function: {name: ..., arguments: JSON}}"),
    ([ASK, DONE], "{cut", "tools are not a list, or not JSON"),
    ([ASK, DONE], 3, "tools are not a list, or not JSON"),
    *[([ASK, DONE], [tool], "a tool is not {type: function, function: {name: ..., parameters: "
       "JSON schema}}") for tool in (
        "f", {"function": {}}, {"name": "f"}, {"function": {"name": "f", "parameters": "{cut"}},
        {"function": {"name": "f", "parameters": {"properties": ["code"]}}},
        {"function": {"name": "f", "parameters": {"properties": {"code": "string"}}}})],
    ([ASK, calling(call(0)), result(0, "ok")], TOOLS,
     "user and assistant do not take turns, up to an answer"),
    ([ASK, DONE, calling(call(0)), result(0, "ok"), DONE], TOOLS,
     "user and assistant do not take turns, up to an answer"),
    ([{**ASK, "tool_calls": [call(0)]}, result(0, "ok"), DONE], TOOLS,
     "no object with messages that hold text"),
    ([ASK, calling(call(0)), {**result(0, "ok"), "content": {"a": 1}}, DONE], TOOLS,
     "no object with messages that hold text"),
    ([ASK, calling(call(0)), {**result(0, "ok"), "content": None}, DONE], json.dumps(TOOLS), "")])
def test_recipe_names_what_is_wrong_with_a_chat_with_tools(messages, tools, problem):
    """It left out every row with a call, and trained rows with tools as if there were none."""
    assert recipe.parse(json.dumps({"messages": messages, "tools": tools}))[1] == problem


def test_recipe_says_if_thoughts_are_not_used(tmp_path, capsys):
    row = {"messages": [ASK, {**DONE, "reasoning_content": "so"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    recipe.read_chats(tmp_path / "a.jsonl", 0.0)
    assert "kept, but not used: reasoning_content" in capsys.readouterr().out
    recipe.read_chats(tmp_path / "a.jsonl", 0.0, kept=True)
    assert "not used" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--reasoning some: stripped or kept"):
        recipe.main(["--reasoning=some", f"--model={TINY}", f"--data={tmp_path / 'a.jsonl'}",
                     f"--out={tmp_path / 'out'}"])


def test_recipe_refuses_a_template_that_writes_no_calls():
    tokenizer = chat.load_tokenizer(TINY)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    row, _ = recipe.parse(json.dumps({"messages": [ASK, calling(call(0))], "tools": TOOLS}))
    with pytest.raises(SystemExit, match="writes no calls of tools"):
        recipe.render(tokenizer, [row["messages"]], 4096)


def test_an_answer_ends_where_the_model_waits_for_a_result():
    """Without `<|tool_response>` among the stops, a model wrote the result itself."""
    tokenizer = chat.load_tokenizer(TINY)
    special = chat.special_ids(tokenizer)
    assert chat.stop_ids(tokenizer) == {special["<eos>"], special["<turn|>"], special[chat.RESULT]}


# ── data/tools ──


def test_the_thirty_rows_are_what_their_generator_writes_and_their_results_are_right():
    rows = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert rows == calls.rows() and len(rows) == 30
    counted = 0
    for row in rows:
        example, problem = data.clean(row)
        assert not problem and not example["unused"] and not example["odd"]
        called = {}
        for message in row["messages"]:
            for made in message.get("tool_calls", ()):
                called[made["id"]] = json.loads(made["function"]["arguments"])
            if message["role"] == "tool":
                arguments = called[message["tool_call_id"]]
                bits = int(message["content"])
                if "n" in arguments:
                    assert 2 ** (bits - 1) < arguments["n"] <= 2 ** bits
                else:
                    assert len(range(arguments["low"], arguments["high"] + 1)) == bits
                assert f" {bits} bits" in row["messages"][-1]["content"]
                counted += 1
    assert counted == 29


# ── The tuned tiny model calls, and vLLM understands it ──

READ = """import json, sys
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
folder, tools, texts = sys.argv[1], *map(json.loads, sys.argv[2:])
tokenizer = AutoTokenizer.from_pretrained(folder)
request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=tools)
parser = ToolParserManager.get_tool_parser("gemma4")(tokenizer, request.tools)
thoughts = ReasoningParserManager.get_reasoning_parser("gemma4")(tokenizer)
found = []
for text in texts:
    read = parser.extract_tool_calls(text, request)
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in read.tool_calls]
    found.append([calls, thoughts.extract_reasoning(text, request)[0]])
print(json.dumps(found))
"""


@needs_serve
def test_vllms_parsers_read_what_is_trained():
    tokenizer = chat.load_tokenizer(TINY)
    texts, wanted = [], []
    for line in FILE.read_text().splitlines():
        row = json.loads(line)
        _, answer = rendered(tokenizer, row["messages"], row["tools"], "kept")[0]
        texts.append(tokenizer.decode(answer))
        first = row["messages"][1]
        made = []
        for one in first.get("tool_calls", ()):
            function = one["function"]
            made.append([function["name"], json.loads(function["arguments"])])
        wanted.append([made, first.get("reasoning_content")])
    printed = serve("-c", READ, TINY, json.dumps(calls.TOOLS), json.dumps(texts))
    found = json.loads(printed.splitlines()[-1])
    for (made, thought), (made_there, thought_there) in zip(wanted, found, strict=True):
        assert made_there == made
        assert (thought_there or "").strip() == (thought or "")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The tiny model, tuned by recipe.py on data/tools; gives the folder of its run."""
    out = tmp_path_factory.mktemp("tools") / "out"
    done = program(sys.executable, "recipe.py", "--model", TINY, "--data", FILE, "--out", out,
                   "--rank=16", "--alpha=32", "--learning_rate=5e-3", "--warmup_steps=10",
                   "--sequence_length=512", "--rows_per_step=4", "--epochs=10", "--every=100",
                   "--validation=0", "--dtype=float32", XLA_FLAGS=None)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert "left out" not in done.stdout
    return out


@needs_serve
@pytest.mark.slow
def test_the_tuned_tiny_model_calls_a_tool_and_vllm_answers_with_the_call(tuned, tmp_path):
    """By our own ids in JAX, by vLLM's parser, and by a server that was started with `tools`."""
    asked, wanted = [], []
    for line in FILE.read_text().splitlines():
        row = json.loads(line)
        question, first = row["messages"][:2]
        if made := first.get("tool_calls"):
            asked.append([{**question, "tools": row["tools"]}])
            wanted.append([[one["function"]["name"], json.loads(one["function"]["arguments"])]
                           for one in made])
    tokenizer = chat.load_tokenizer(tuned / "merged")
    config = gemma.config_from_hf(tuned / "merged", dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    model = gemma.load_base(tuned / "merged", config, mesh)
    texts = answers.ask(model, tokenizer, asked, 60, mesh, control=True)
    printed = serve("-c", READ, TINY, json.dumps(calls.TOOLS), json.dumps(texts))
    found = [made for made, _ in json.loads(printed.splitlines()[-1])]
    right = sum(made == due for made, due in zip(found, wanted, strict=True))
    assert right >= 0.8 * len(wanted), list(zip(texts, wanted))

    options = Options(model=str(tuned / "merged"), name="tiny", timeout=900.0, tools=True)
    record = serving.start(options, tmp_path)
    try:
        for messages, reasoning, _ in TOOL_CHATS.values():
            if "<turn|>" in str(messages):  # becomes a control token there
                continue
            example, _ = data.clean({"messages": messages, "tools": TOOLS})
            prompt = data.as_messages(example, "S", reasoning)[:-1]
            ids = chat.prompt_ids(tokenizer, prompt, reasoning == "kept")
            for message in prompt:
                message.pop("tools", None)
                message.pop("train", None)
            theirs = asking.post(record, "/tokenize", {
                "model": "tiny", "messages": prompt, "tools": TOOLS,
                "chat_template_kwargs": {"enable_thinking": reasoning == "kept"}})
            assert theirs["tokens"] == ids
        place = found.index(next(made for made, due in zip(found, wanted) if made == due))
        question = [{key: asked[place][0][key] for key in ("role", "content")}]
        answer = asking.post(record, "/v1/chat/completions", {
            "model": "tiny", "messages": question, "tools": calls.TOOLS, "temperature": 0,
            "max_tokens": 60})["choices"][0]
        made = [[one["function"]["name"], json.loads(one["function"]["arguments"])]
                for one in answer["message"]["tool_calls"]]
        assert made == wanted[place] and answer["finish_reason"] == "tool_calls"
    finally:
        serving.stop(tmp_path)
