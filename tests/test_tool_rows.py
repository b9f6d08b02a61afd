"""Rows with tools end to end: read alike by 02, recipe.py and a server; trained, called, parsed.

The slow tests start vLLM twice: with the base, to ask what ids it makes of our rows, and with a
model that was tuned on `data/tools`, to ask for calls.
"""

import collections
import contextlib
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
ROWS = [json.loads(line) for line in FILE.read_text().splitlines()]
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
    assert ROWS == calls.rows() and len(ROWS) == 30
    counted = 0
    for row in ROWS:
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


# ── What a server makes of our rows ──


@contextlib.contextmanager
def a_server(folder, model):
    """vLLM with a model, started as 05 starts one whose settings have `tools=True`."""
    options = Options(model=str(model), name="tiny", timeout=900.0, tools=True)
    try:
        yield serving.start(options, folder)
    finally:
        serving.stop(folder)


@pytest.fixture(scope="module")
def base_server(tmp_path_factory):
    with a_server(tmp_path_factory.mktemp("base"), TINY) as record:
        yield record


def tokenized(record, messages, tools, thinking, answers_next=True):
    """The ids that vLLM's /tokenize makes of a chat."""
    answer = asking.post(record, "/tokenize", {
        "model": "tiny", "messages": messages, "tools": tools,
        "add_generation_prompt": answers_next,
        "chat_template_kwargs": {"enable_thinking": thinking}})
    return answer["tokens"]


def completed(record, messages, tools, thinking, max_tokens):
    """What /v1/chat/completions answers, with the ids that it read."""
    return asking.post(record, "/v1/chat/completions", {
        "model": "tiny", "messages": messages, "tools": tools, "temperature": 0,
        "max_tokens": max_tokens, "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": thinking}})


def called(message):
    """[[name, arguments]] of a message's calls, in the form of the OpenAI API."""
    made = []
    for one in message.get("tool_calls") or ():
        function = one["function"]
        made.append([function["name"], json.loads(function["arguments"])])
    return made


def sent(messages, reasoning):
    """The messages of a row as a client sends them: with thoughts only where they're kept."""
    kept = []
    for message in messages:
        copied = dict(message)
        thought = copied.pop("reasoning_content", None)
        if thought and reasoning == "kept":
            copied["reasoning"] = thought
        kept.append(copied)
    return kept


def as_a_client_sends(messages):
    """Messages as 02 hands them to the template, in the form of the OpenAI API."""
    sent_messages = json.loads(json.dumps(messages))
    for message in sent_messages:
        message.pop("tools", None)
        message.pop("train", None)
        for made in message.get("tool_calls") or ():
            arguments = made["function"]["arguments"]
            if not isinstance(arguments, str):
                made["function"]["arguments"] = json.dumps(arguments)
    return sent_messages


def form_of(messages):
    """In words: how many calls the last message makes, whether it thinks, what came before."""
    *before, last = messages
    results = sum(message["role"] == "tool" for message in before)
    thought = "a thought" if last.get("reasoning") else "no thought"
    return f"{thought}, {len(called(last))} calls after {results} results"


FORMS = {
    "stripped": {
        "no thought, 0 calls after 0 results": 4,
        "no thought, 1 calls after 0 results": 23,
        "no thought, 2 calls after 0 results": 3,
        "no thought, 0 calls after 1 results": 23,
        "no thought, 0 calls after 2 results": 3},
    "kept": {
        "no thought, 0 calls after 0 results": 4,
        "no thought, 1 calls after 0 results": 13,
        "a thought, 1 calls after 0 results": 10,
        "no thought, 2 calls after 0 results": 3,
        "no thought, 0 calls after 1 results": 23,
        "no thought, 0 calls after 2 results": 3}}


@needs_serve
@pytest.mark.slow
@pytest.mark.parametrize("reasoning", FORMS)
def test_the_thirty_rows_have_the_ids_that_a_server_makes_of_them(base_server, reasoning):
    """For each of the model's messages: the prompt before it, and itself as it's read later."""
    tokenizer = chat.load_tokenizer(TINY)
    special = chat.special_ids(tokenizer)
    thought, line_end = chat.encode_texts(tokenizer, ["thought\n", "\n"])
    no_thought = [special[chat.CHANNEL], *thought, special[chat.CHANNEL_END]]
    forms = collections.Counter()
    for row in ROWS:
        messages = sent(row["messages"], reasoning)
        tools = row["tools"]
        pairs = rendered(tokenizer, row["messages"], tools, reasoning)
        places = [place for place, turn in enumerate(messages) if turn["role"] == "assistant"]
        for place, (prompt, answer) in zip(places, pairs, strict=True):
            thinking = "reasoning" in messages[place]
            assert tokenized(base_server, messages[:place], tools, thinking) == prompt
            form = form_of(messages[:place + 1])
            if form not in forms:  # once: an answer takes longer than a list of ids
                reply = completed(base_server, messages[:place], tools, thinking, 1)
                assert reply["prompt_token_ids"] == prompt, "the ids that it really answers"
            forms[form] += 1

            stored = tokenized(base_server, messages[:place + 1], tools, thinking, False)
            if prompt[-len(no_thought):] == no_thought:  # asks for an answer; no stored one has it
                prompt = prompt[:-len(no_thought)]
            end = [] if messages[place].get("tool_calls") else line_end
            assert stored == prompt + answer + end

        example, _ = data.clean(row)
        whole, _ = chat.render(tokenizer, data.as_messages(example, None, reasoning))
        assert whole == [*pairs[-1][0], *pairs[-1][1]], "02's row is the same as recipe.py's last"
    assert forms == FORMS[reasoning]


@needs_serve
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TOOL_CHATS if "spells" not in name])
def test_harder_chats_have_the_ids_that_a_server_makes_of_them(base_server, name):
    """All but the one whose text spells control tokens: in a server's prompt they become such."""
    tokenizer = chat.load_tokenizer(TINY)
    messages, reasoning, _ = TOOL_CHATS[name]
    example, _ = data.clean({"messages": messages, "tools": TOOLS})
    prompt = data.as_messages(example, "S", reasoning)[:-1]
    ids = chat.prompt_ids(tokenizer, prompt, reasoning == "kept")
    prompt = as_a_client_sends(prompt)
    assert tokenized(base_server, prompt, TOOLS, reasoning == "kept") == ids


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


def read_by_vllm(texts):
    """[[calls, thought]] that vLLM's parsers find in the texts of answers."""
    printed = serve("-c", READ, TINY, json.dumps(calls.TOOLS), json.dumps(texts))
    return json.loads(printed.splitlines()[-1])


@needs_serve
def test_vllms_parsers_read_what_is_trained():
    tokenizer = chat.load_tokenizer(TINY)
    texts = []
    for row in ROWS:
        _, answer = rendered(tokenizer, row["messages"], row["tools"], "kept")[0]
        texts.append(tokenizer.decode(answer))
    for row, (made, thought) in zip(ROWS, read_by_vllm(texts), strict=True):
        first = row["messages"][1]
        assert made == called(first)
        assert (thought or "").strip() == first.get("reasoning_content", "")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The tiny model, tuned by recipe.py on data/tools; gives the folder of its run."""
    out = tmp_path_factory.mktemp("tools") / "out"
    done = program(sys.executable, "recipe.py", "--model", TINY, "--data", FILE, "--out", out,
                   "--rank=16", "--alpha=32", "--learning_rate=5e-3", "--warmup_steps=10",
                   "--sequence_length=352", "--rows_per_step=2", "--epochs=10", "--every=100",
                   "--validation=0", "--dtype=float32", "--reasoning=kept", XLA_FLAGS=None)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert "left out" not in done.stdout
    return out


@pytest.mark.slow
@needs_serve
def test_the_tuned_tiny_model_writes_calls_that_vllms_parser_reads(tuned):
    """By our own ids, in JAX."""
    asked, wanted = [], []
    for row in ROWS:
        question, first = row["messages"][:2]
        if called(first) and "reasoning_content" not in first:
            asked.append([{**question, "tools": row["tools"]}])
            wanted.append(called(first))
    tokenizer = chat.load_tokenizer(tuned / "merged")
    config = gemma.config_from_hf(tuned / "merged", dtype="float32")
    mesh = gemma.make_mesh(config, (1, 1), jax.devices()[:1])
    model = gemma.load_base(tuned / "merged", config, mesh)
    texts = answers.ask(model, tokenizer, asked, 60, mesh, control=True)
    found = [made for made, _ in read_by_vllm(texts)]
    right = sum(made == due for made, due in zip(found, wanted, strict=True))
    assert right >= 0.8 * len(wanted), list(zip(texts, wanted))


def answered(record, row, prompts):
    """What a server makes of a row's question: (calls, thought, why it ended, the last answer).

    If the calls are the row's, they get the row's results. `prompts` are the ids that were trained
    before each of the model's messages.
    """
    question, first = row["messages"][:2]
    results = row["messages"][2:-1]
    thinking = "reasoning_content" in first
    reply = completed(record, [question], row["tools"], thinking, 80)
    assert reply["prompt_token_ids"] == prompts[0]
    choice = reply["choices"][0]
    message = choice["message"]
    made = called(message)
    answer = message["content"]
    if made and made == called(first):
        returned = []
        for result, call in zip(results, message["tool_calls"], strict=True):
            returned.append({**result, "tool_call_id": call["id"]})
        reply = completed(record, [question, message, *returned], row["tools"], False, 80)
        if message.get("reasoning") == first.get("reasoning_content"):
            assert reply["prompt_token_ids"] == prompts[1], "with the message as it was sent"
        answer = reply["choices"][0]["message"]["content"]
    return made, message.get("reasoning"), choice["finish_reason"], answer


@needs_serve
@pytest.mark.slow
def test_the_tuned_tiny_model_on_a_server_calls_and_answers_as_its_rows(tuned, tmp_path):
    """`tool_calls` and `reasoning` by vLLM's own parsers, and an answer to the tools' results."""
    tokenizer = chat.load_tokenizer(TINY)
    right = collections.Counter()
    wrong = []
    with a_server(tmp_path, tuned / "merged") as record:
        for row in ROWS:
            pairs = rendered(tokenizer, row["messages"], row["tools"], "kept")
            made, thought, end, answer = answered(record, row, [prompt for prompt, _ in pairs])
            assert end == ("tool_calls" if made else "stop")
            first, last = row["messages"][1], row["messages"][-1]
            due = called(first)
            right[f"{len(due)} calls"] += made == due
            right["thoughts"] += thought is not None and thought == first.get("reasoning_content")
            right["answers"] += made == due and answer == last["content"]
            if made != due or answer != last["content"]:
                wrong.append((row["messages"][0]["content"], due, made, thought, answer))
    print(dict(right), *wrong, sep="\n")
    assert right["1 calls"] >= 0.8 * 23 and right["2 calls"] >= 1 and right["0 calls"] >= 1, wrong
    assert right["thoughts"] >= 0.8 * 10 and right["answers"] >= 0.5 * 30, wrong
