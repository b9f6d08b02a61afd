"""Rows with tools end to end: read alike by 02, recipe.py and a server; trained, called, parsed.

The slow tests start vLLM twice: with the base, to ask what ids it makes of our rows, and with a
model that was tuned on `data/tools`, to ask for calls.
"""

import collections
import contextlib
import itertools
import json
import random
import shutil
import sys

import jax
import pytest
from conftest import ROOT, needs_serve, program, serve

import recipe
import serving
from helpers import answers, chat, data, gemma, own
from serving import Options, asking, commands
from test_data import (
    ASK,
    DONE,
    MORE_SCHEMAS,
    NO_OUTPUT,
    SCHEMAS,
    TOOL_CHATS,
    TOOLS,
    call,
    calling,
    chat_with_call,
    opens_a_thought_after_a_result,
    parts_of,
    result,
    tool,
)

from appendix.world import calls

TINY = ROOT / "assets" / "tiny_gemma4"
FILE = ROOT / "data" / "tools" / "train.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text().splitlines()]
SYSTEM = {"role": "system", "content": "S"}
THINK = "<|think|>"


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
    for prompt, _ in ours:
        thinking = THINK in tokenizer.decode(prompt)
        served = []
        for end in range(1, len(whole)):
            served.append(chat.prompt_ids(tokenizer, whole[:end], thinking))
        assert prompt in served, "the prompt is one that a server sends"


# ── The same ids and masks, whatever a chat looks like ──


def one_of_the_models(generator, **message):
    """A message of the model's: with a thought or without, trained or only read."""
    key = generator.choice(["reasoning", "reasoning_content", "thinking"])
    thought = generator.choice(["hm", "so\n", " ", "", None, None])
    weight = generator.choice([{}, {}, {}, {"weight": 0}, {"train": False}])
    return {"role": "assistant", **message, key: thought, **weight}


def drawn_chat(generator):
    """A row of one to three questions, with up to three calls before each answer."""
    messages = []
    opening = generator.choice([None, "", " \n", "S"])
    if opening is not None:
        messages.append({"role": "system", "content": opening})
    for turn in range(generator.randint(1, 3)):
        messages.append({"role": "user", "content": f"q{turn}"})
        for number in range(generator.choice([0, 0, 1, 2, 3])):
            word = generator.choice([None, None, None, "Let me look."])
            made = [call(number, code=f"m{turn}{number}")]
            messages.append(one_of_the_models(generator, content=word, tool_calls=made))
            messages.append(result(number, "ok"))
        messages.append(one_of_the_models(generator, content=f"a{turn}"))
    if len(messages) > 2 and messages[-2]["role"] == "tool" and generator.random() < 0.3:
        del messages[-2:]  # the chat ends with the call
    return {"messages": messages, "tools": generator.choice([TOOLS, TOOLS, None])}


def as_stored(prompt, answer):
    """An answer of recipe.py's as its thought and its rest; the prompt may have opened it."""
    if prompt.endswith("<|channel>thought\n"):
        answer = "<|channel>thought\n" + answer
    thought, _, rest = answer.rpartition("<channel|>")
    thought = thought.removeprefix("<|channel>thought\n")
    return thought, rest


def trained_by_02(texts, before_the_last):
    """What 02 trains of [(prompt, answer)], the texts of recipe.py's examples of a chat."""
    thinks = THINK in texts[-1][0]
    questions = texts[-1][0].count("<|turn>user")
    wanted = []
    for prompt, answer in texts:
        thought, rest = as_stored(prompt, answer)
        is_earlier = prompt.count("<|turn>user") < questions
        if thinks and (is_earlier or THINK not in prompt):
            continue
        if is_earlier:  # no prompt has earlier turns' thoughts
            thought = ""
        wanted.append((thought, rest))
    for message in before_the_last:
        if message["content"] and message.get("tool_calls"):
            return wanted[-1:]
    return wanted


@pytest.mark.parametrize("reasoning", ["stripped", "kept"])
@pytest.mark.parametrize("template", ["the 31B's", "of July 2026"])
def test_02_recipe_and_own_data_train_the_same(reasoning, template, tmp_path):
    """150 drawn chats: 02's row is recipe.py's last example, and trains what recipe.py trains.

    02 can't train what the model says before the last turn's first thought, and says so.
    """
    tokenizer = chat.load_tokenizer(TINY)
    if template == "of July 2026":
        tokenizer = opens_a_thought_after_a_result()
    generator = random.Random(7)
    chats, all_pairs, seen = [], [], collections.Counter()
    while len(chats) < 150:
        row = drawn_chat(generator)
        pairs = rendered(tokenizer, **row, reasoning=reasoning)
        kept = reasoning == "kept"
        example, problem = data.clean(row, keep_reasoning=kept)
        if not pairs:
            assert problem == "nothing to train: weight 0"
            continue
        whole = data.as_messages(example, "", reasoning)
        ids, mask = chat.render(tokenizer, whole)
        prompt, answer = pairs[-1]
        assert ids == prompt + answer
        thinks = THINK in tokenizer.decode(ids)
        assert thinks == (kept and chat.last_turn_thinks(whole))

        trained = []
        for on, group in itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
            if on:
                trained.append(tokenizer.decode([number for number, _ in group]))
        texts = [tuple(map(tokenizer.decode, pair)) for pair in pairs]
        trained[-1] = "".join(as_stored(*texts[-1]))
        found = [as_stored("", text) for text in trained[:-1]]
        found.append(as_stored(*texts[-1]))
        assert found == trained_by_02(texts, whole[:-1])

        needed, problem = data.clean(row, need_reasoning=True)
        assert thinks == (not problem) or not kept
        says_so = data.BEFORE_A_THOUGHT in needed["odd"] if needed else False
        aloud = any(m["content"] and m.get("tool_calls") for m in whole[:-1])
        assert not thinks or aloud or says_so == (len(found) < len(pairs))
        seen.update(thinks=thinks, less=len(found) < len(pairs), several=len(pairs) > 2)
        chats.append(whole)
        all_pairs += pairs
    assert seen["several"] > 40 and (reasoning == "stripped" or seen["thinks"] > 40)

    own.write_chats(chats, tmp_path / "rows.jsonl")
    read, _ = recipe.read_chats(tmp_path / "rows.jsonl", 0.0, reasoning == "kept")
    examples = recipe.render(tokenizer, read, 4096, reasoning == "kept")
    assert [ids for ids, _ in examples] == [prompt + answer for prompt, answer in all_pairs]


NO_TOOL = "a tool is not {type: function, function: {name: ..., parameters: JSON schema}}"
NO_SCHEMA = "a tool's parameters are not a JSON schema"


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
    *[([ASK, DONE], [form], NO_TOOL) for form in (
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
    ([{"role": "developer", "content": "S"}, ASK, DONE], TOOLS,
     "role 'developer' is none of system, user, assistant and tool"),
    ([ASK, calling(call(0), tool_responses=[{"name": "simulate", "response": {}}])], TOOLS,
     "tool_responses, which we take as messages of role tool"),
    ([ASK, calling(call(0), call(0)), result(0, "a"), result(0, "b"), DONE], TOOLS,
     "two calls with one id"),
    *[([ASK, DONE], [{"function": {"name": "f", "parameters": form}}],
       NO_TOOL if why == NO_SCHEMA else why)
      for form, why in [*SCHEMAS, *MORE_SCHEMAS]],
    *[([ASK, calling(call(0)), result(0, what), DONE], TOOLS,
       "no object with messages that hold text") for what in (0, False, {})],
    ([ASK, DONE, SYSTEM, ASK, DONE], None, "a system message that is not the first"),
    ([ASK, calling(call(0)), {**result(0, "ok"), "content": None}, DONE], json.dumps(TOOLS), "")])
def test_recipe_names_what_is_wrong_with_a_chat_with_tools(messages, tools, problem):
    """It left out every row with a call, and trained rows with tools as if there were none."""
    assert recipe.parse(json.dumps({"messages": messages, "tools": tools}))[1] == problem


F_AND_G = [tool("f", x="integer"), tool("g", y="string")]


def two_calls(results, **ids):
    """A chat that calls f and g at once, and gets these results; ids by the functions' names."""
    made = []
    for name, arguments in (("f", '{"x": 1}'), ("g", '{"y": "b"}')):
        given = {"id": ids[name]} if name in ids else {}
        function = {"name": name, "arguments": arguments}
        made.append({**given, "type": "function", "function": function})
    returned = [{"role": "tool", **more} for more in results]
    return [ASK, calling(*made), *returned, DONE]


def responses(content_of_first, content_of_second, first="f", second="g"):
    """What the chat template writes of two results."""
    return (f'<|tool_response>response:{first}{{value:<|"|>{content_of_first}<|"|>}}'
            f'<tool_response|><|tool_response>response:{second}{{value:<|"|>{content_of_second}'
            '<|"|>}<tool_response|>')


F, G = {"name": "f", "content": "F"}, {"name": "g", "content": "G"}


@pytest.mark.parametrize("results, ids, wanted", [
    ([F, G], {}, responses("F", "G")),
    ([G, F], {}, responses("G", "F", "g", "f")),
    ([G, F], {"f": "1", "g": "2"}, responses("G", "F", "g", "f")),
    ([{"content": "F"}, {"content": "G"}], {}, responses("F", "G")),
    ([{"content": "F"}, {"content": "G"}], {"f": "1", "g": "2"}, responses("F", "G")),
    ([{"content": "G"}, F], {}, responses("G", "F", "g", "f")),
    ([{"name": "x", "content": "F"}, {"name": "y", "content": "G"}], {}, responses("F", "G")),
    ([{"name": "g", "content": "F"}, {"name": "g", "content": "G"}], {},
     responses("F", "G", "g", "f")),
    ([{"content": "G"}, {"content": "F", "tool_call_id": "1"}], {"f": "1", "g": "2"},
     responses("G", "F", "g", "f")),
    ([{**F, "tool_call_id": "2"}, {**G, "tool_call_id": "1"}], {"f": "1", "g": "2"},
     responses("F", "G", "g", "f"))])
def test_results_find_their_calls_by_id_then_by_name_then_in_order(results, ids, wanted):
    """Without ids, 02 took every result in order, and recipe.py wrote `response:g` for all."""
    tokenizer = chat.load_tokenizer(TINY)
    messages = two_calls(results, **ids)
    example, problem = data.clean({"messages": messages, "tools": F_AND_G})
    assert not problem
    written, _ = chat.render(tokenizer, data.as_messages(example, None))
    assert wanted in tokenizer.decode(written)
    _, (prompt, answer) = rendered(tokenizer, messages, F_AND_G)
    assert written == [*prompt, *answer]


@pytest.mark.parametrize("nothing", NO_OUTPUT)
def test_a_result_may_say_nothing(nothing):
    """02 dropped rows whose command printed an empty line, and those with null."""
    tokenizer = chat.load_tokenizer(TINY)
    messages = [ASK, calling(call(0, code="m")), result(0, nothing), DONE]
    example, _ = data.clean({"messages": messages, "tools": TOOLS})
    written, _ = chat.render(tokenizer, data.as_messages(example, None))
    assert f'simulate{{value:<|"|>{nothing or ""}<|"|>}}' in tokenizer.decode(written)
    _, (prompt, answer) = rendered(tokenizer, messages, TOOLS)
    assert written == [*prompt, *answer]


# What vLLM hands to the chat template, and the ids that the template makes of it.
SERVED = """import json, sys
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
class Text:
    multimodal_config, enable_prompt_embeds = None, False
    def __getattr__(self, name):
        return None
tokenizer, found = AutoTokenizer.from_pretrained(sys.argv[1]), []
for messages, tools in json.loads(sys.argv[2]):
    request = ChatCompletionRequest(messages=messages, tools=tools)
    conversation, *_ = parse_chat_messages(request.messages, Text(), "string")
    tools = [tool.model_dump() for tool in request.tools]
    found.append(tokenizer.apply_chat_template(
        conversation, tools=tools, add_generation_prompt=True)["input_ids"])
print(json.dumps(found))
"""


@needs_serve
def test_vllm_hands_over_tools_and_results_as_we_train_them():
    """A tool without a description has "None" there, and was trained with an empty one.

    vLLM refuses calls without ids. A result without one it takes by its name.
    """
    tokenizer = chat.load_tokenizer(TINY)
    undescribed, null, plain = json.loads(json.dumps([tool("f", x="integer")] * 3))
    del undescribed["function"]["description"]
    null["function"].update(description=None, parameters=None)
    plain["function"]["parameters"]["properties"]["x"]["description"] = None
    cases = [([ASK, DONE], [declared]) for declared in (undescribed, null, plain)]
    cases.append((two_calls([G, F], f="1", g="2"), F_AND_G))
    with_ids = [{**G, "tool_call_id": "2"}, {**F, "tool_call_id": "1"}]
    cases.append((two_calls(with_ids, f="1", g="2"), F_AND_G))
    asked = [(messages[:-1], tools) for messages, tools in cases]
    served = json.loads(serve("-c", SERVED, TINY, json.dumps(asked)).splitlines()[-1])
    assert 'declaration:f{description:<|"|>None<|"|>' in tokenizer.decode(served[0])
    for (messages, tools), ids in zip(cases, served, strict=True):
        example, _ = data.clean({"messages": messages, "tools": tools})
        assert chat.prompt_ids(tokenizer, data.as_messages(example, None)[:-1]) == ids
        assert rendered(tokenizer, messages, tools)[-1][0] == ids


def with_template(folder, ours, theirs):
    """A copy of the tiny model in `folder`, whose template has one piece as Google writes it."""
    shutil.copytree(TINY, folder)
    path = folder / "chat_template.jinja"
    template = path.read_text()
    assert template.count(ours) == 1
    path.write_text(template.replace(ours, theirs))
    return folder


PARTS = """import json, sys
from transformers import AutoTokenizer
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format
class Text:
    multimodal_config, enable_prompt_embeds = None, False
    def __getattr__(self, name):
        return None
tokenizer, messages = AutoTokenizer.from_pretrained(sys.argv[1]), json.loads(sys.argv[2])
for form in (_detect_content_format(tokenizer.chat_template, default="string"), sys.argv[3]):
    conversation, *_ = parse_chat_messages(messages, Text(), form)
    print(tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"])
"""
AS_GOOGLE_WRITES_PARTS = """
    {%- if messages[0]['content'] is string -%}
      {{- messages[0]['content'] | trim -}}
    {%- else -%}
      {%- for item in messages[0]['content'] -%}{{- item['text'] | trim + ' ' -}}{%- endfor -%}
    {%- endif -%}
"""


@needs_serve
def test_a_server_hands_messages_to_the_template_as_texts(tmp_path):
    """By itself vLLM makes parts of them, and Google's template ends each part with a space."""
    ours = "    {{- text(messages[0]['content']) -}}\n"
    model = with_template(tmp_path / "model", ours, AS_GOOGLE_WRITES_PARTS)
    messages = [{"role": "system", "content": "Be brief."}, ASK]
    words = commands.command(Options(engine="cpu", model=str(TINY)))
    flag = words[words.index("--chat-template-content-format") + 1]
    printed = serve("-c", PARTS, model, json.dumps(messages), flag).splitlines()[-2:]
    by_itself, as_we_start_it = map(json.loads, printed)
    tokenizer = chat.load_tokenizer(model)
    assert as_we_start_it == chat.prompt_ids(tokenizer, messages)
    assert len(by_itself) == len(as_we_start_it) + 1
    assert "Be brief. <turn|>" in tokenizer.decode(by_itself)


RESPONSES = """  {%- if tool['response'] -%}
    {{- ',response:{type:' ~ quoted(tool['response']['type'] | upper) ~ '}' -}}
  {%- endif -%}
"""


@needs_serve
def test_a_function_has_no_more_keys_than_a_server_hands_over(tmp_path):
    """Google's template writes a function's `response`, but vLLM never hands it one."""
    end = "  {{- '}<tool|>' -}}\n"
    model = with_template(tmp_path / "model", end, RESPONSES + end)
    tools = [tool("f", x="integer")]
    tools[0]["function"].update(strict=True, response={"type": "object"})
    printed = serve("-c", SERVED, model, json.dumps([([ASK], tools)])).splitlines()
    [served] = json.loads(printed[-1])
    tokenizer = chat.load_tokenizer(model)
    assert "response" in tokenizer.apply_chat_template([ASK], tools=tools, tokenize=False)
    example, _ = data.clean({"messages": [ASK, DONE], "tools": tools})
    assert chat.prompt_ids(tokenizer, data.as_messages(example, None)[:-1]) == served
    assert rendered(tokenizer, [ASK, DONE], tools)[-1][0] == served


# ── Tools and calls with something odd in them ──

ODD = (None, 0, True, False, "", "x", "string", "object", [], {}, ["x"], [1], [None], {"a": None},
       {"type": "string"}, {"type": 3}, {"required": True}, {"a": {"type": "string"}}, "{}", "{",
       {"type": "array", "items": {"type": 3}}, {"type": "object", "y": {"required": True}})
PLACES = ("type", "required", "properties", "items", "enum", "description", "nullable", "anyOf",
          "additionalProperties", "$ref", "name", "parameters", "x", "arguments")


def drawn_row(generator):
    """A row with two calls, whose results may lack ids, and with odd values in its tools."""
    inner = {"type": "object", "properties": {"z": {"type": ["integer", "null"]}}}
    shelf = {"type": "array", "items": {**inner, "required": ["z"]}}
    tools = json.loads(json.dumps([tool("f", o=inner, list=shelf, free="object"), tool("g")]))
    arguments = {"o": {"z": None, "q": None}, "list": [{"z": 1, "r": None}], "y": None}
    made = []
    for name in generator.choice(["fg", "ff", "gh"]):
        given = generator.choice([dict(arguments), dict(arguments), json.dumps(arguments)])
        function = {"name": name, "arguments": given}
        made.append({"id": name + str(len(made)), "type": "function", "function": function})
    results = []
    for number, one in enumerate(made):
        named = {"tool_call_id": one["id"], "name": one["function"]["name"]}
        for key in generator.sample(sorted(named), generator.randint(0, 2)):
            del named[key]
        results.append({"role": "tool", "content": str(number), **named})
    generator.shuffle(results)
    if generator.random() < 0.3:
        for one in [*made, *results]:
            one.pop("id", None)
            one.pop("tool_call_id", None)

    spoiled = generator.choice([tools, tools, [one["function"] for one in made]])
    for _ in range(generator.randint(0, 2)):
        part = generator.choice([part for part in parts_of(spoiled) if isinstance(part, dict)])
        key = generator.choice([*part, *PLACES])
        part[key] = json.loads(json.dumps(generator.choice(ODD)))
    return {"messages": [ASK, calling(*made), *results, DONE], "tools": tools}


def test_02_recipe_and_own_data_take_the_same_odd_tools_and_calls_and_train_the_same(tmp_path):
    """400 drawn rows. What they take, the chat template can write."""
    tokenizer = chat.load_tokenizer(TINY)
    generator = random.Random(5)
    seen = collections.Counter()
    for _ in range(400):
        row = drawn_row(generator)
        example, problem = data.clean(row)
        read, same_problem = recipe.parse(json.dumps(row))
        assert (not problem) == (not same_problem), (problem, same_problem, row)
        seen["left out" if problem else "kept"] += 1
        if problem:
            continue
        nulls = "null arguments that the tool does not take"
        assert (nulls in example["unused"]) == (nulls in recipe.unused_keys(read, False))
        undeclared = "a call of a function that is not among the tools" in example["odd"]
        assert undeclared == recipe.calls_another(read["messages"])
        seen.update({"nulls": nulls in example["unused"], "undeclared": undeclared})

        whole = data.as_messages(example, None)
        ids, mask = chat.render(tokenizer, whole)
        examples = recipe.render(tokenizer, [read["messages"]], 4096)
        assert ids == examples[-1].ids
        own.write_chats([whole], tmp_path / "rows.jsonl")
        again, _ = recipe.read_chats(tmp_path / "rows.jsonl", 0.0)
        assert recipe.render(tokenizer, again, 4096) == examples
        trained = [number for number, on in zip(ids, mask, strict=True) if on]
        by_recipe = []
        for one in examples:
            by_recipe += one.ids[one.mask.index(1):]
        assert trained == by_recipe
    assert min(seen.values()) > 50 and seen["kept"] > 150, seen


@pytest.mark.parametrize("messages, tools, said", [
    (chat_with_call("f", x=1, y=None), [tool("f", x="integer")],
     "kept, but not used: null arguments that the tool does not take"),
    (chat_with_call("f", x=None), [tool("f", x="integer")],
     "kept, but not used: null arguments that the tool does not take"),
    ([ASK, calling(call(0, code=None, more=None))], TOOLS, ""),
    ([ASK, DONE], [{"function": {**tool("f")["function"], "strict": True}}],
     "kept, but not used: strict of tools"),
    (chat_with_call("f"), None, "kept, with a call of a function that is not among the tools"),
    (chat_with_call("f"), [tool("g")],
     "kept, with a call of a function that is not among the tools"),
    (chat_with_call("f"), [tool("f")], ""),
    ([ASK, {**DONE, "content": '<tool_call>{"name": "f"}'}], None,
     "kept, read as letters: <tool_call>"),
    ([ASK, {**DONE, "content": "<|tool_call>call:f{}"}], None,
     "kept, read as letters: <|tool_call>"),
    ([ASK, {**DONE, "content": '<TOOLCALL>[{"name": "f"}]</TOOLCALL>'}], None,
     "kept, read as letters: <TOOLCALL>"),
    ([ASK, {**DONE, "content": '<functioncall> {"name": "f"}'}], None,
     "kept, read as letters: <functioncall>")])
def test_recipe_counts_what_is_odd_about_calls_that_it_keeps(
        messages, tools, said, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}))
    chats, _ = recipe.read_chats(tmp_path / "a.jsonl", 0.0)
    assert len(chats) == 1 and capsys.readouterr().out == (f"1 rows '{said}'\n" if said else "")


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
        thinks = "reasoning_content" in str(row)
        assert example["unused"] == ["thoughts of assistant messages"] * thinks
        assert not problem and not example["odd"]
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
            thinking = "reasoning" in str(messages[:place + 1])  # there's one question in a row
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
        reply = completed(record, [question, message, *returned], row["tools"], thinking, 80)
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
