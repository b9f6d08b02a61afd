"""02_data: ids, masks, extraction, packing and reading, against what we did not write."""

import copy
import gzip
import itertools
import json
import random
import textwrap
import time
from collections import Counter

import numpy as np
import pytest
from conftest import ROOT, needs_serve, page, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft3Validator, Draft202012Validator
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from helpers import chat, data, late_mask, packing
from helpers.run import UserError
from tables import texts

ASSET = ROOT / "assets" / "tiny_gemma4"
# The small models' template, shortened: no empty thought channel in the generation prompt.
SMALL = """{{ bos_token }}{% for m in messages %}{% if loop.first and enable_thinking %}{{
'<|turn>system\\n<|think|>\\n<turn|>\\n' }}{% endif %}{{ '<|turn>' +
('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content | trim) + '<turn|>\\n' }}{%
endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""


def tiny_tokenizer():
    return chat.load_tokenizer(ASSET)


def small_template():
    tokenizer = chat.load_tokenizer(ASSET)
    tokenizer.chat_template = SMALL
    return tokenizer


def gemma_like():
    """A tokenizer built like the real one: SentencePiece spaces, bytes as a fallback, and merges
    across line breaks, so that "model\\n" and what follows could share a token."""
    names = [f"<unused{i}>" for i in range(107)]
    for number, text in ((0, "<pad>"), (1, "<eos>"), (2, "<bos>"), (3, "<unk>"), (46, "<|tool>"),
                         (47, "<tool|>"), (48, "<|tool_call>"), (49, "<tool_call|>"),
                         (50, "<|tool_response>"), (51, "<tool_response|>"), (52, '<|"|>'),
                         (98, "<|think|>"), (100, "<|channel>"), (101, "<channel|>"),
                         (105, "<|turn>"), (106, "<turn|>")):
        names[number] = text
    built = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    built.normalizer = normalizers.Replace(" ", "▁")
    built.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                       decoders.Fuse()])
    text = ["user\n\nmodel\nmodule m;\nendmodule\n```\n\n\nthought\n ```verilog\n"
            "module a(input b);\n"] * 20
    built.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=700, special_tokens=names + [f"<0x{i:02X}>" for i in range(256)]))
    saved = json.loads(built.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < 107]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(saved)),
        bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = tiny_tokenizer().chat_template
    return tokenizer


TOKENIZERS = {"tiny": tiny_tokenizer(), "small template": small_template(),
              "Gemma-like": gemma_like()}
every = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)

CONTROL = sorted(chat.special_ids(TOKENIZERS["tiny"]), key=len)[-8:] + ["<bos>", "<eos>", "<pad>"]
PIECES = ["```verilog\nmodule m;\nendmodule\n```", "\r\n", "\n\n", "  ", "\t", "é😀漢字", "a", "<",
          "|>",
          "\u200b", "\x00", "<|", "turn", "model\n", "user\n", "\ufdd0"]
text = st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join))
names = {*chat.special_ids(TOKENIZERS["tiny"]), *chat.special_ids(TOKENIZERS["Gemma-like"])}
plain = text.filter(lambda value: not any(name in value for name in names))
hostile = st.lists(st.one_of(st.sampled_from(CONTROL), st.sampled_from(PIECES))).map("".join)
many = settings(max_examples=60, deadline=None)


def messages_of(user, system=None, turns=()):
    opening = [{"role": "system", "content": system}] if system is not None else []
    talk = [{"role": "user", "content": user}]
    for answer, question in turns:
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return opening + talk


def controls(tokenizer, ids):
    """The control ids of a row, in order."""
    special = set(chat.special_ids(tokenizer).values())
    return [number for number in ids if number in special]


def check_row(tokenizer, messages, ids, mask):
    """Compare one rendered row with transformers' own chat rendering."""
    end = chat.special_ids(tokenizer)[chat.TURN_END]
    thinking = bool(messages[-1].get("reasoning"))
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True,
                                           enable_thinking=thinking)["input_ids"]
    assert ids[:len(prompt)] == prompt, "prompt ids differ from the chat template's"
    assert mask[len(prompt) - 1:] == [False] + [True] * (len(ids) - len(prompt))
    assert ids[-1] == end and ids.count(tokenizer.bos_token_id) == 1
    starts = [place for place in range(1, len(ids)) if mask[place] and not mask[place - 1]]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    answers = answers[-1:] if thinking else answers  # `render` says why
    for first, answer in zip(starts, answers, strict=True):  # these, and nothing else
        stop = ids.index(end, first) + 1
        assert all(mask[first:stop]) and not any(mask[stop:stop + 1])
        header = "\n" * (stop < len(ids))  # an earlier answer follows "model\n"
        assert tokenizer.decode(ids[first - 1:stop]).endswith(header + answer + chat.TURN_END)


def codev_lengths(count, seed):
    """Lengths like CodeV-R1's: log-normal with its published mean and 99th percentile."""
    drawn = np.random.default_rng(seed).lognormal(6.707, 0.489, count)
    return np.clip(drawn, 64, 3_072).astype(int)


# ── Ids and mask ──

@every
@many
@given(user=plain, system=st.none() | plain, turns=st.lists(st.tuples(plain, plain), max_size=2))
def test_prompt_ids_are_the_chat_templates_own(tokenizer, user, system, turns):
    messages = messages_of(user, system, turns)
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert chat.prompt_ids(tokenizer, messages) == theirs


@every
@many
@given(user=hostile, system=st.none() | hostile)
def test_typed_control_tokens_stay_text(tokenizer, user, system):
    ids = chat.prompt_ids(tokenizer, messages_of(user, system))
    harmless = chat.prompt_ids(tokenizer, messages_of("x", None if system is None else "x"))
    assert controls(tokenizer, ids) == controls(tokenizer, harmless)
    assert user.strip() in tokenizer.decode(ids)


@every
@many
@given(user=hostile, system=st.none() | text, answer=st.one_of(
    text, hostile, st.just(""), text.map(lambda a: a + " \n\r\n ")))
def test_a_row_is_prompt_answer_and_turn_end(tokenizer, user, answer, system):
    messages = messages_of(user, system)
    ids, mask = chat.render(tokenizer, [*messages, {"role": "assistant", "content": answer}])
    prompt, end = chat.prompt_ids(tokenizer, messages), chat.special_ids(tokenizer)["<turn|>"]
    assert ids == prompt + chat.encode_texts(tokenizer, [answer])[0] + [end]
    assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids[len(prompt):]) == answer + "<turn|>"
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


@every
@many
@given(user=hostile, answer=text,
       turns=st.lists(st.tuples(hostile, hostile), min_size=1, max_size=3))
def test_every_turn_of_the_model_is_trained_and_nothing_else(tokenizer, user, answer, turns):
    messages = messages_of(user, "Be brief.", turns)
    ids, mask = chat.render(tokenizer, [*messages, {"role": "assistant", "content": answer}])
    end = len(chat.encode_texts(tokenizer, [answer])[0]) + 1
    assert ids[:-end] == chat.prompt_ids(tokenizer, messages)
    spans = [[number for number, _ in group] for on, group in itertools.groupby(
        zip(ids, mask), key=lambda pair: pair[1]) if on]
    stored = [given.strip() for given, _ in turns]  # the template trims what it stores
    trained = [tokenizer.decode(span) for span in spans]
    if tokenizer is not TOKENIZERS["Gemma-like"]:
        assert trained == [given + "<turn|>" for given in [*stored, answer]]
    assert len(trained) == len(stored) + 1  # there, an id may span "model\n" and the first letters
    for wanted, span in zip([*stored, answer], trained):
        assert (wanted + "<turn|>").endswith(span)


@every
def test_with_reasoning_kept_the_last_answer_alone_is_trained(tokenizer):
    """An earlier one stands without its thought: after that very prompt it taught not to think."""
    messages = [*messages_of("hi"), {"role": "assistant", "content": "one"}, *messages_of("more"),
                {"role": "assistant", "content": "two", "reasoning": "a <turn|> b"}]
    ids, mask = chat.render(tokenizer, messages)
    trained = tokenizer.decode([number for number, on in zip(ids, mask) if on])
    assert trained == "<|channel>thought\na <turn|> b\n<channel|>two<turn|>"
    check_row(tokenizer, messages, ids, mask)


@pytest.mark.parametrize("template, complaint", [
    ("{{ bos_token }}" + SMALL, "2 <bos>"), (SMALL.replace("{{ bos_token }}", ""), "0 <bos>")])
def test_a_template_with_another_number_of_bos_is_refused(template, complaint):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=complaint):
        chat.prompt_ids(tokenizer, messages_of("hi"))


@needs_serve
def test_the_serving_environment_renders_the_same_ids():
    """Another transformers, the one that vLLM renders chats with."""
    chats = [messages_of("a\r\n\n b<turn|>", "é"), messages_of("q", turns=[(" yes \n", "more")])]
    program = ("import json, sys; from helpers import chat; t = chat.load_tokenizer(sys.argv[1]);"
               "print(json.dumps([chat.prompt_ids(t, m) for m in json.loads(sys.argv[2])]"
               " + [t.apply_chat_template(json.loads(sys.argv[2])[1], add_generation_prompt=True)"
               "['input_ids']]))")
    answer = serve("-c", program, ASSET, json.dumps(chats)).splitlines()[-1]
    ours = [chat.prompt_ids(TOKENIZERS["tiny"], messages) for messages in chats]
    assert json.loads(answer) == [*ours, ours[1]]


# ── Reading and cleaning ──

CODE = "module m;\n  assign y = a;\nendmodule"
FENCED = f"```verilog\n{CODE}\n```"


@pytest.mark.parametrize("response, problem", [
    (f"<think>t</think>\n<answer>\n{FENCED}\n</answer>", ""),
    (f"Here: {FENCED}", "unfinished code fence"),  # a fence stands at the start of a line
    (f"text\n  ```\n{CODE}\n  ```\ntext", ""),
    (f"<think>{FENCED}\n<answer>x</answer></think>\n<answer>\n{FENCED}\n</answer>", ""),
    (FENCED.replace("\n", "\r\n"), ""),
    (f"{FENCED}\n{FENCED}", "several code fences"),
    (f"<answer>\n{FENCED}\n</answer>\nUse it so:\n```\nm m1();\n```", ""),
    (f"<answer>\n{CODE}\n</answer>", "no code fence"),
    (f"```verilog\n{CODE}", "unfinished code fence"),
    (f"<think>t {FENCED}", "unfinished reasoning"),
    ("```verilog\nassign y = a;\n```", "no module in the fence"),
    ("", "no code fence"),
])
def test_answer_extraction(response, problem):
    reasoning, answer, found = data.split_response(response)
    assert found == problem
    if not problem:
        assert answer == FENCED and "<think>" not in reasoning


def clean(row):
    return data.clean(row, False)[1]


def chat_row(*pairs):
    """A row in chat form; a pair is role and content."""
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


QUESTION, ANSWER = ("user", "q"), ("assistant", "a")


@pytest.mark.parametrize("row, problem", [
    (chat_row(QUESTION, ANSWER), ""),
    (chat_row(("system", "s"), QUESTION, ANSWER, QUESTION, ANSWER), ""),
    (chat_row(QUESTION), "no answer at the end"),
    (chat_row(QUESTION, QUESTION, ANSWER), "user and assistant do not take turns"),
    (chat_row(QUESTION, ("system", "s"), ANSWER), "a system message that is not the first"),
    (chat_row(("system", "s"), ("system", "s"), QUESTION, ANSWER),
     "a system message that is not the first"),
    ({"messages": ["hi"]}, "messages is not a list of objects"),
    (chat_row(("user", [{"type": "text", "text": "q"}]), ANSWER), "user message is not text"),
    (chat_row(("user", " \n"), ANSWER), "empty user message"),
    (chat_row(QUESTION, ("assistant", "\ud800")), "assistant message is not Unicode"),
    (chat_row(QUESTION, ("assistant", "<think>cut off"), QUESTION, ANSWER), "unfinished reasoning"),
    (chat_row(QUESTION, ("assistant", "<think>t</think>"), QUESTION, ANSWER), "empty answer"),
    ({"conversations": [{"from": "bing", "value": "q"}, {"from": "gpt", "value": "a"}]},
     "role 'bing' is none of system, user, assistant and tool"),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{}"},
                        {"from": "observation", "value": "a"}]},
     "role 'function_call' is none of system, user, assistant and tool"),
    (chat_row(("developer", "s"), QUESTION, ANSWER),
     "role 'developer' is none of system, user, assistant and tool"),
    ({"instruction": "q", "input": 3, "output": "a"}, "input is not text"),
    ({"prompt": "q", "completion": None}, "completion is not text"),
    ({"question": "q", "answer": "a"}, "no form that we know: answer, question"),
])
def test_rows_of_ones_own_are_taken_or_named(row, problem):
    assert clean(row) == problem


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("row", [
    {"instruction": "q", "output": "a"}, {"prompt": "q", "completion": "a"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"messages": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]},
    {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"},
                  {"role": "assistant", "content": "a"}]}])
def test_a_system_column_opens_the_chat_in_every_form(row):
    """It was read in ShareGPT's form alone; in the others the setting's sentence took its place."""
    example, problem = data.clean({"system": "own", **row})
    assert not problem
    assert data.as_messages(example, "the setting's") == [
        {"role": "system", "content": "own"}, {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"}]


def test_a_dataset_of_the_hub_is_one_setting(monkeypatch):
    """What `datasets` is asked for: name, configuration and revision out of one text."""
    import datasets
    asked = []
    def load_dataset(*words, **named):
        asked.append((words, named))
        return [{"messages": CHAT}]
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("a/b", "a/b:sft", "a/b@v1", "a/b:sft@v1"):
        assert data.read_rows(source) == [{"messages": CHAT}]
    assert [(words[1], named["revision"]) for words, named in asked] == [
        (None, None), ("sft", None), (None, "v1"), ("sft", "v1")]
    assert {words[0] for words, _ in asked} == {"a/b"} and asked[0][1]["split"] == "train"


@every
def test_the_example_of_ones_own_data(tokenizer):
    """Ten rows, one of them faulty, one with two answers: every answer is trained, nothing else."""
    rows = data.read_rows("data/own_example.jsonl")
    cleaned = [data.clean(row, False) for row in rows]
    assert len(rows) == 10 and Counter(problem for _, problem in cleaned) == {
        "": 9, "no answer at the end": 1}
    chats = [data.as_messages(example, "S") for example, problem in cleaned if not problem]
    assert sorted(sum(m["role"] == "assistant" for m in c) for c in chats) == [1] * 8 + [2]
    for messages, (ids, mask) in zip(chats, chat.render_chats(tokenizer, chats), strict=True):
        assert not any("think" in message["content"] for message in messages)
        check_row(tokenizer, messages, ids, mask)
        if tokenizer is not TOKENIZERS["Gemma-like"]:  # there an id may span "model\n" and more
            trained = tokenizer.decode([number for number, on in zip(ids, mask) if on])
            answers = [m["content"] for m in messages if m["role"] == "assistant"]
            assert trained == "".join(answer + "<turn|>" for answer in answers)


def test_files_are_read_line_by_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "1"}\n\n{"prompt": \n\xff\n"text"\r\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"prompt": "2"}\n')
    rows = data.read_rows(str(tmp_path))
    assert len(rows) == 5 and rows[0] == {"prompt": "1"} and rows[-1] == {"prompt": "2"}
    assert [clean(row) for row in rows[1:4]] == ["not a JSON object"] * 3


# ── Tools ──

TOOLS = [{"type": "function", "function": {
    "name": "simulate", "description": "Runs a testbench.", "parameters": {
        "type": "object", "required": ["code"],
        "properties": {"code": {"type": "string", "description": "Verilog."},
                       "steps": {"type": "integer"}}}}}]
DECLARED = ('<|tool>declaration:simulate{description:<|"|>Runs a testbench.<|"|>,parameters:{'
            'properties:{code:{description:<|"|>Verilog.<|"|>,type:<|"|>STRING<|"|>},'
            'steps:{type:<|"|>INTEGER<|"|>}},'
            'required:[<|"|>code<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>')


def call(number, **arguments):
    return {"id": f"c{number}", "type": "function",
            "function": {"name": "simulate", "arguments": json.dumps(arguments)}}


def calling(*calls, content=None, **more):
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def result(number, content):
    return {"role": "tool", "tool_call_id": f"c{number}", "content": content}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def written(code, **more):
    rest = "".join(f",{name}:{value}" for name, value in more.items())
    return f'<|tool_call>call:simulate{{code:<|"|>{code}<|"|>{rest}}}<tool_call|>'


ASK, DONE = said("user", "q"), said("assistant", "It works.")
STOP = "<|tool_response>"  # where the model waits for a result
# What is trained of a chat, told by hand: {name: (messages, reasoning, trained texts)}
TOOL_CHATS = {
    "a call, its result, an answer": (
        [ASK, calling(call(0, code="m", steps=2)), result(0, "ok"), DONE], "stripped",
        [written("m", steps=2) + STOP, "It works.<turn|>"]),
    "two calls at once, results the other way round": (
        [ASK, calling(call(0, code="a"), call(1, code="b")), result(1, "B"), result(0, "A"), DONE],
        "stripped", [written("a") + written("b") + STOP, "It works.<turn|>"]),
    "a call after a call": (
        [ASK, calling(call(0, code="a")), result(0, "bad"), calling(call(0, code="b")),
         result(0, "ok"), DONE],
        "stripped", [written("a") + STOP, written("b") + STOP, "It works.<turn|>"]),
    "the last message calls, after a word": (
        [ASK, DONE, ASK, calling(call(0, code="m"), content="Let me look.")], "stripped",
        ["It works.<turn|>", "Let me look." + written("m") + STOP]),
    "a word beside an earlier call": (
        [ASK, calling(call(0, code="m"), content="Let me look."), result(0, "ok"), DONE],
        "stripped", ["It works.<turn|>"]),
    "a call that isn't trained": (
        [ASK, calling(call(0, code="m"), weight=0), result(0, "ok"), DONE], "stripped",
        ["It works.<turn|>"]),
    "an end that isn't trained": (
        [ASK, calling(call(0, code="m")), result(0, "ok"), {**DONE, "train": False}], "stripped",
        [written("m") + STOP]),
    "a thought before the call and before the answer": (
        [ASK, DONE, ASK, calling(call(0, code="m"), reasoning_content="hm"), result(0, "ok"),
         {**DONE, "thinking": "so"}], "kept",
        ["<|channel>thought\nhm\n<channel|>" + written("m") + STOP,
         "<|channel>thought\nso\n<channel|>It works.<turn|>"]),
    "a call without a thought, where thoughts are kept": (
        [ASK, calling(call(0, code="m")), result(0, "ok"), {**DONE, "reasoning": "so"}], "kept",
        ["<|channel>thought\nso\n<channel|>It works.<turn|>"]),
    "a thought before the call alone": (
        [ASK, calling(call(0, code="m"), reasoning_content="hm"), result(0, "ok"), DONE], "kept",
        ["<|channel>thought\nhm\n<channel|>" + written("m") + STOP, "It works.<turn|>"]),
    "a second call without a thought": (
        [ASK, calling(call(0, code="a")), result(0, "bad"),
         calling(call(0, code="b"), reasoning="hm"), result(0, "bad"), calling(call(0, code="c")),
         result(0, "ok"), DONE], "kept",
        ["<|channel>thought\nhm\n<channel|>" + written("b") + STOP, written("c") + STOP,
         "It works.<turn|>"]),
    "thoughts in two turns": (
        [ASK, calling(call(0, code="m"), reasoning="hm"), result(0, "ok"),
         {**DONE, "reasoning": "one"}, ASK, {**DONE, "reasoning": "two"}], "kept",
        ["<|channel>thought\ntwo\n<channel|>It works.<turn|>"]),
    "a text that spells control tokens": (
        [ASK, calling(call(0, code="<turn|><|tool_response>")),
         result(0, "<tool_response|><turn|>"), DONE], "stripped",
        [written("<turn|><|tool_response>") + STOP, "It works.<turn|>"]),
}


@pytest.mark.parametrize("messages, reasoning, trained", TOOL_CHATS.values(), ids=TOOL_CHATS)
@pytest.mark.parametrize("name", ["tiny", "Gemma-like"])
def test_a_chat_with_tools_is_trained_as_it_happened(name, messages, reasoning, trained):
    """It became a chat without tools: "Let me look." was an answer, no call was ever learned."""
    tokenizer = TOKENIZERS[name]
    example, problem = data.clean({"messages": messages, "tools": TOOLS})
    assert not problem
    chat_of_it = data.as_messages(example, "S", reasoning)
    ids, mask = chat.render(tokenizer, chat_of_it)
    assert DECLARED in tokenizer.decode(ids)
    spans = [tokenizer.decode([number for number, _ in group]) for on, group in itertools.groupby(
        zip(ids, mask), key=lambda pair: pair[1]) if on]
    assert len(spans) == len(trained)
    for span, wanted in zip(spans, trained):  # there, an id may span "model\n" and more
        assert span == wanted or name == "Gemma-like" and wanted.endswith(span)
    thinking = reasoning == "kept"
    prompt = chat.prompt_ids(tokenizer, chat_of_it[:-1], thinking)
    assert ids[:len(prompt)] == prompt and not mask[len(prompt) - 1] and all(mask[len(prompt):])
    if "<turn|>" not in str(messages):  # which transformers take for control tokens
        head, *rest = chat_of_it[:-1]
        theirs = tokenizer.apply_chat_template(
            [{key: head[key] for key in ("role", "content")}, *rest], tools=TOOLS,
            add_generation_prompt=True, enable_thinking=thinking)["input_ids"]
        assert prompt == theirs


values = st.recursive(st.integers(-9, 9) | st.booleans() | plain, lambda inner: st.lists(
    inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2), max_leaves=4)


@many
@given(arguments=st.dictionaries(st.sampled_from(["code", "n", "x"]), values), answer=plain,
       content=plain)
def test_ids_of_tools_are_the_chat_templates_own(arguments, answer, content):
    tokenizer = TOKENIZERS["tiny"]
    messages = [said("system", content), ASK, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": arguments}}]},
        result(0, answer)]
    theirs = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)
    ours = chat.prompt_ids(tokenizer, [{**messages[0], "tools": TOOLS}, *messages[1:]])
    assert ours == theirs["input_ids"]
    row, mask = chat.render(tokenizer, messages[:3])
    trained = tokenizer.decode([number for number, on in zip(row, mask) if on])
    stored = tokenizer.apply_chat_template(messages[:3], tokenize=False)
    assert stored.endswith("<|turn>model\n" + trained)


def test_a_template_without_tools_is_refused():
    messages = [said("system", "", tools=TOOLS), ASK, DONE]
    with pytest.raises(ValueError, match="doesn't write <|tool>"):
        chat.render(TOKENIZERS["small template"], messages)


def opens_a_thought_after_a_result():
    """Google's template of July 2026 does, where it's asked to let the model think."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- if add_generation_prompt and not state.called -%}",
        "{%- if add_generation_prompt and state.called and thinking -%}"
        "{{- '<|channel>thought\n' -}}"
        "{%- elif add_generation_prompt and not state.called -%}")
    return tokenizer


def test_an_opened_thought_is_closed_where_nothing_is_thought():
    """The answer stood inside the thought that the prompt had opened."""
    example, _ = data.clean({"messages": [
        ASK, calling(call(0, code="m"), reasoning="hm"), result(0, "ok"), DONE]})
    tokenizer = opens_a_thought_after_a_result()
    ids, mask = chat.render(tokenizer, data.as_messages(example, None, "kept"))
    assert tokenizer.decode(ids).endswith(
        "<tool_response|><|channel>thought\n<channel|>It works.<turn|>")
    trained = tokenizer.decode([number for number, on in zip(ids, mask) if on])
    assert trained.endswith("<|tool_response><channel|>It works.<turn|>")


def test_a_template_that_opens_the_thought_after_a_result():
    tokenizer = opens_a_thought_after_a_result()
    example, _ = data.clean({"messages": [
        ASK, calling(call(0, code="m")), result(0, "ok"), {**DONE, "reasoning": "so"}]})
    ids, mask = chat.render(tokenizer, data.as_messages(example, None, "kept"))
    assert tokenizer.decode(ids).endswith(
        "<tool_response|><|channel>thought\nso\n<channel|>It works.<turn|>")
    assert tokenizer.decode([number for number, on in zip(ids, mask) if on]).startswith("so\n")


NO_LIST = "required, in a tool, is not a list of names"
NO_TYPE = "type, in a tool, is neither text nor a list"
SCHEMAS = [  # {"required": true}, as JSON Schema had it until 2012, ended 02 with a traceback
    ({"type": "object", "properties": {"x": {"type": "string"}}, "required": True}, NO_LIST),
    ({"type": "object", "properties": {}, "required": [1]}, NO_LIST),
    ({"properties": {"x": {"type": "object", "required": True, "properties": {}}}}, NO_LIST),
    ({"properties": {"x": {"type": "array", "items": {"type": 3}}}}, NO_TYPE),
    ({"properties": {"x": {"type": "object", "properties": ["y"]}}},
     "a tool's parameters are not a JSON schema"),
    ({"properties": {"x": {"type": ["string", "null"]}, "required": {"type": "string"},
                     "type": {"type": "object", "properties": {}, "required": []}}}, ""),
    ({"type": "object"}, ""),
    ({"type": "object", "additionalProperties": {"type": "string"}}, ""),
    ({"type": "object", "patternProperties": {".": {"type": "string"}}}, ""),
    ({"type": "object", "default": {}, "example": {"x": 1}}, ""),
]
OF_2010 = {  # JSON Schema wrote `required` in this way until 2012
    "x": {"type": "string", "required": True}, "y": {"type": "object", "required": False},
    "z": {"type": "array", "required": True, "items": {"type": "string"}}}
REQUIRED_OBJECT = {"x": {"type": "object", "required": True, "properties": {}}}
REQUIRED_ITEMS = {"x": {"type": "array", "items": {"type": "string", "required": False}}}
MORE_SCHEMAS = [  # where a chat template, or a table of the hub, isn't jsonschema
    ({"properties": {"x": {"type": "object", "y": {"type": "object", "required": 1}}}}, NO_LIST),
    ({"num": {"description": "n", "type": "int"}},
     "parameters of a tool that are not under properties, as in xLAM"),
    ({"type": "object", "properties": None, "required": None}, ""),
    (json.dumps({"type": "object", "properties": {"x": {"type": "string"}, "y": None}}), ""),
    ({"properties": OF_2010}, ""), ({"properties": REQUIRED_OBJECT}, NO_LIST),
    ({"properties": REQUIRED_ITEMS}, NO_LIST),
    ({"properties": {"x": {"type": ["string", None]}}}, ""),
    ({"properties": {"x": {"type": "array", "items": {"type": ["string", None]}}}}, ""),
    ({"properties": {"x": {"type": "string", "example": {"required": True, "type": 3}}}}, ""),
]


@pytest.mark.parametrize("schema, problem", SCHEMAS)
def test_schemas_are_refused_where_jsonschema_refuses_them(schema, problem):
    validator = Draft202012Validator(Draft202012Validator.META_SCHEMA)
    assert validator.is_valid(schema) == (not problem)
    assert clean({"messages": CHAT, "tools": [{"name": "f", "parameters": schema}]}) == problem


@pytest.mark.parametrize("properties", [OF_2010, REQUIRED_OBJECT, REQUIRED_ITEMS])
def test_required_as_until_2012_is_what_it_was(properties):
    """`MORE_SCHEMAS` says where it's taken: where no template reads it. No row with one was."""
    Draft3Validator.check_schema({"type": "object", "properties": properties})


NO_OUTPUT = ("", "\n", None, [])  # what files have where a tool returned nothing


@pytest.mark.parametrize("messages, tools, problem", [
    ([ASK, calling(call(0)), DONE], TOOLS, "a call without its result"),
    ([ASK, calling(call(0), call(1)), result(0, "ok"), DONE], TOOLS, "a call without its result"),
    ([ASK, result(0, "ok"), DONE], TOOLS, "a result without its call"),
    ([ASK, calling(call(0)), result(7, "ok"), DONE], TOOLS, "a result without its call"),
    ([{**ASK, "tool_calls": [call(0)]}, DONE], TOOLS, "a call that is not the assistant's"),
    ([ASK, calling({"function": {"name": "f", "arguments": "[1]"}}), result(0, "a"), DONE], TOOLS,
     "a call's arguments are not an object"),
    ([ASK, {**DONE, "tool_calls": "{cut"}], TOOLS, "tool_calls are a text that is not JSON"),
    ([ASK, DONE], 3, "tools are not a list"),
    ([ASK, DONE], [{"name": "f", "parameters": "{cut"}], "a tool's parameters are not JSON"),
    ([ASK, DONE], [{"name": "f", "parameters": {"properties": ["code"]}}],
     "a tool's parameters are not a JSON schema"),
    ([ASK, DONE], [{"name": "f", "parameters": {"properties": {"code": "string"}}}],
     "a tool's parameters are not a JSON schema"),
    ([ASK, calling(call(0), call(0)), result(0, "a"), result(0, "b"), DONE], TOOLS,
     "two calls with one id"),
    ([ASK, calling({"function": {"name": "f", "arguments": "{cut"}}), result(0, "a"), DONE], TOOLS,
     "a call's arguments are not JSON"),
    ([ASK, calling({"name": "f", "arguments": {}})], json.dumps(TOOLS), ""),
    ([ASK, calling({"name": "f", "arguments": {}})], [json.dumps(one) for one in TOOLS], ""),
    ([ASK, DONE], ["{cut"], "a tool without a name"),
    *[([ASK, calling(call(0)), result(0, nothing), DONE], TOOLS, "") for nothing in NO_OUTPUT],
    ([ASK, calling(call(0)), result(0, 0), DONE], TOOLS, "tool message is not text"),
    ([ASK, calling({"name": "f"})], [{"name": "f", "parameters": None}], ""),
    ([ASK, calling({"arguments": {}})], TOOLS, "a call without a name"),
    ([ASK, calling({"name": "f", "id": ["0"]})], TOOLS,
     "a call's id is neither text nor a number"),
    ([ASK, calling(call(0)), {**result(0, "ok"), "tool_call_id": {}, "content": "ok"}, DONE], TOOLS,
     ""),
    ([ASK, calling(call(0)), {**result(0, "ok"), "tool_call_id": ["0"]}, DONE], TOOLS,
     "a result without its call"),
    ([ASK, DONE], "no list", "tools are a text that is not JSON"),
    ([ASK, DONE], [{"function": {}}], "a tool without a name"),
    ([ASK, said("assistant", None, function_call={"name": "f"})], None,
     "function_call, the old form of tool_calls"),
    ([ASK, calling(call(0), content="a", tool_responses=[{"name": "simulate", "response": {}}])],
     TOOLS, "tool_responses, which we take as messages of role tool"),
    ([ASK, {**calling(call(0)), "tool_responses": []}], TOOLS, ""),
    *[([ASK, DONE], [{"name": "f", "parameters": form}], why) for form, why in MORE_SCHEMAS],
    ([ASK, calling(call(0)), result(0, "ok")], TOOLS, "no answer at the end"),
    ([ASK, {**DONE, "weight": 0}], None, "nothing to train: weight 0"),
    ([ASK, {**DONE, "weight": 0.5}], None, "weight is neither 0 nor 1"),
    ([ASK, {**DONE, "train": "no"}], None, "train is neither 0 nor 1"),
])
def test_a_chat_with_tools_that_cannot_be_trained_is_named(messages, tools, problem):
    assert clean({"messages": messages, "tools": tools}) == problem


@every
def test_a_message_of_weight_0_is_read_and_not_learned(tokenizer):
    turns = [ASK, {**DONE, "weight": 0}, ASK, {**said("assistant", "Yes."), "weight": 1}, ASK,
             {**said("assistant", "No."), "train": True}, ASK, {**DONE, "train": False}]
    example, problem = data.clean({"messages": turns})
    ids, mask = chat.render(tokenizer, data.as_messages(example, None))
    trained = tokenizer.decode([number for number, on in zip(ids, mask) if on])
    assert not problem and trained == "Yes.<turn|>No.<turn|>"
    assert tokenizer.decode(ids).count("It works.") == 1


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_by_any_name_is_reasoning(key):
    example, problem = data.clean({"messages": [ASK, {**DONE, key: "why"}]}, need_reasoning=True)
    assert not problem and example["reasoning"] == "why" and not example["unused"]


def test_a_thought_that_says_nothing_is_no_thought():
    """A row with one was dropped."""
    example, problem = data.clean({"messages": [ASK, {**DONE, "reasoning": " \n"}]})
    assert not problem and example["reasoning"] == "" and not example["unused"]


THINKS, CALLS_ALOUD = {**DONE, "reasoning": "so"}, calling(call(0, code="m"), reasoning="hm")
OK = result(0, "ok")
BEFORE = ("what the model says before the last turn's first thought isn't trained, because "
          "reasoning is kept")


@pytest.mark.parametrize("messages, problem, odd", [
    ([ASK, CALLS_ALOUD, OK, DONE], "", []),
    ([ASK, CALLS_ALOUD], "", []),
    ([ASK, calling(call(0, code="m")), OK, DONE], "no reasoning", None),
    ([ASK, THINKS, ASK, THINKS], "", [BEFORE]),
    ([ASK, {**DONE, "weight": 0}, ASK, THINKS], "", []),
    ([ASK, calling(call(0, code="m")), OK, THINKS], "", [BEFORE]),
    ([ASK, THINKS, ASK, DONE], "no reasoning to train after the last question", None),
    ([ASK, {**CALLS_ALOUD, "weight": 0}, OK, DONE],
     "no reasoning to train after the last question", None)])
def test_where_reasoning_is_kept_a_calls_thought_counts(messages, problem, odd):
    """All rows of data/tools were dropped. And earlier answers were left out in silence."""
    example, found = data.clean({"messages": messages, "tools": TOOLS}, need_reasoning=True)
    assert found == problem
    if not problem:
        assert example["odd"] == odd and not example["unused"]
        ids, mask = chat.render(TOKENIZERS["tiny"], data.as_messages(example, None, "kept"))
        think = chat.special_ids(TOKENIZERS["tiny"])["<|think|>"]
        assert ids.index(think) < mask.index(True)


def tool(name, **properties):
    """A tool by the types of its parameters; a parameter may have a schema of its own."""
    schemas = {}
    for key, kind in properties.items():
        schemas[key] = kind if isinstance(kind, dict) else {"type": kind}
    parameters = {"type": "object", "properties": schemas}
    return {"type": "function",
            "function": {"name": name, "description": "d", "parameters": parameters}}


def chat_with_call(name, **arguments):
    """A chat with one call, whose arguments are an object and no JSON text."""
    function = {"name": name, "arguments": arguments}
    made = {"id": "c0", "type": "function", "function": function}
    return [ASK, calling(made), result(0, "ok"), DONE]


INNER = {"type": "object", "properties": {"z": {"type": ["integer", "null"]}}}
NULLS = "null arguments that the tool does not take"


def test_what_a_table_of_the_hub_fills_into_calls_is_not_trained(tmp_path):
    """Arrow gives every call all keys that any row has: `call:f{x:1,y:null}` was learned."""
    import datasets
    tools = [tool("f", x="integer", o=INNER, list={"type": "array", "items": INNER}),
             tool("g", y="string"), tool("now")]
    ours = [chat_with_call("f", x=1, o={"z": 2}, list=[{"z": 3}]), chat_with_call("g", y="b"),
            chat_with_call("f", o={"z": None}), chat_with_call("now")]
    more = chat_with_call("f", x=1, o={"z": 2, "q": 1}, list=[{"z": 3, "r": "s"}])
    rows = [{"messages": messages, "tools": json.dumps(tools)} for messages in [*ours, more]]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    stored = datasets.Dataset.from_parquet(
        str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))
    assert '"y": null' in json.dumps(stored[0]) and '"q": null' in json.dumps(stored[0])

    for row, messages in zip(stored, ours, strict=False):
        example, problem = data.clean(row)
        wanted, _ = data.clean({"messages": messages, "tools": tools})
        assert not problem and not wanted["unused"] and example["unused"] == [NULLS]
        assert example["before"] == wanted["before"]
    example, _ = data.clean(stored[4])
    arguments = example["before"][1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"x": 1, "o": {"z": 2, "q": 1}, "list": [{"z": 3, "r": "s"}]}
    assert data.remarks([example]) == [f"not used of the rows that are kept: {NULLS} (1)"]


KINDS = ("string", "number", "integer", "boolean", "array", "object")


@pytest.mark.parametrize("kind", [*KINDS, "null"])
def test_null_is_of_no_other_type(kind):
    assert Draft202012Validator({"type": kind}).is_valid(None) == (kind == "null")


@pytest.mark.parametrize("schema, arguments, kept", [
    ({"properties": {"x": {}}}, {"x": None, "y": None}, {"x": None}),
    *[({"properties": {"x": {"type": kind}}}, {"x": None}, {}) for kind in KINDS],
    *[({"properties": {"x": {"type": kind}}}, {"x": None}, {"x": None})
      for kind in ("null", ["string", "null"], ["string", None], "any", "Optional[int]")],
    ({"properties": {"x": {"type": "string", "nullable": True}}}, {"x": None}, {"x": None}),
    ({"properties": {"x": {"type": "object", "patternProperties": {".": {}}}}},
     {"x": {"y": None}}, {"x": {"y": None}}),
    ({"properties": {"x": {"type": "object"}}}, {"x": {"y": None, "z": [None]}},
     {"x": {"z": [None]}}),
    ({"properties": {"x": {"$ref": "#/$defs/X"}}}, {"x": {"y": None}}, {"x": {"y": None}}),
    ({"properties": {}, "additionalProperties": {}}, {"y": None}, {}),
    ({"properties": {}, "additionalProperties": True}, {"y": None}, {"y": None}),
    (None, {"y": None}, {})])
def test_a_null_that_the_schema_may_know_stays(schema, arguments, kept):
    tools = [{"name": "f", "parameters": schema}]
    example, _ = data.clean({"messages": chat_with_call("f", **arguments), "tools": tools})
    assert example["before"][1]["tool_calls"][0]["function"]["arguments"] == kept
    assert example["unused"] == [NULLS] * (kept != arguments)


def test_nulls_in_arguments_that_are_a_text_are_the_authors():
    """No table can fill them in there. They were dropped."""
    for messages in ([ASK, calling(call(0, code="m", steps=None, more=None))],
                     [ASK, {**DONE, "tool_calls": json.dumps([call(0, code="m", more=None)])}]):
        example, problem = data.clean({"messages": messages, "tools": TOOLS})
        assert not problem and not example["unused"]
        assert example["tool_calls"][0]["function"]["arguments"]["more"] is None


def test_calls_of_functions_that_nobody_declared_are_counted():
    remark = "a call of a function that is not among the tools"
    examples = []
    for tools in (None, [tool("g")], [tool("f"), tool("g")]):
        example, problem = data.clean({"messages": chat_with_call("f"), "tools": tools})
        assert not problem
        examples.append(example)
    last_calls, _ = data.clean({"messages": chat_with_call("f")[:2], "tools": [tool("g")]})
    assert data.remarks([*examples, last_calls]) == [f"kept, but look at these rows: {remark} (3)"]


# The serving environment's transformers on prompts, vLLM's reader of Gemma 4's calls on answers.
ORACLE = """import json, sys
from transformers import AutoTokenizer
from vllm.tool_parsers.gemma4_utils import parse_tool_calls
folder, tools, cases = sys.argv[1], *map(json.loads, sys.argv[2:])
tokenizer, found = AutoTokenizer.from_pretrained(folder), []
for messages, thinking, trained in cases:
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True,
                                        enable_thinking=thinking)["input_ids"]
    found.append((ids, parse_tool_calls(trained, strict=True)))
print(json.dumps(found))
"""


@needs_serve
def test_the_serving_environment_renders_tools_as_we_do_and_reads_our_calls():
    tokenizer = TOKENIZERS["tiny"]
    names = [name for name in TOOL_CHATS if "spells" not in name]  # those become tokens there
    cases, prompts = [], []
    for name in names:
        messages, reasoning, trained = TOOL_CHATS[name]
        example, _ = data.clean({"messages": messages, "tools": TOOLS})
        asked = data.as_messages(example, "S", reasoning)[:-1]
        prompts.append(chat.prompt_ids(tokenizer, asked, reasoning == "kept"))
        for message in asked:  # what no server is sent
            message.pop("tools", None)
            message.pop("train", None)
        cases.append((asked, reasoning == "kept", "".join(trained)))
    printed = serve("-c", ORACLE, ASSET, json.dumps(TOOLS), json.dumps(cases)).splitlines()[-1]
    found = json.loads(printed)
    assert [ids for ids, _ in found] == prompts
    calls = dict(zip(names, [calls for _, calls in found]))
    assert calls["a call, its result, an answer"] == [
        {"name": "simulate", "arguments": {"code": "m", "steps": "2"}}]
    assert [one["arguments"]["code"] for one in calls["a call after a call"]] == ["a", "b"]
    assert len(calls["two calls at once, results the other way round"]) == 2
    assert calls["a word beside an earlier call"] == []


# ── Any row at all ──

VALUES = (None, 0, 1, True, -1, 1.5, float("nan"), 10**400, "", " ", "x", "\ud800", "\x00", [], {},
          [[]], [{}], [None], {"a": None}, {"name": "f"}, "[]", "{", "null", "user", "tool",
          "<think>", "</think>", "```", [{"role": "user", "content": "q"}])
KEYS = ("role", "content", "from", "value", "tool_calls", "tool_call_id", "name", "weight", "train",
        "reasoning", "function", "arguments", "parameters", "properties", "id", "system", "tools")
ROWS = (
    {"messages": [said("system", "s"), *CHAT], "tools": None},
    {"messages": [ASK, calling(call(0, code="m"), content="Look."), result(0, "ok"), DONE],
     "tools": TOOLS},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"instruction": "i", "input": "", "output": "o"},
    {"prompt": "p", "completion": "c"},
    {"prompt": "p", "response": f"<think>t</think>\n{FENCED}"},
)


def parts_of(value):
    """All dicts and lists of a structure, itself included."""
    if not isinstance(value, (dict, list)):
        return []
    parts = [value]
    for inner in value.values() if isinstance(value, dict) else value:
        parts += parts_of(inner)
    return parts


def spoil(row, generator):
    """Put some value at some place of a row, or take one away."""
    part = generator.choice([part for part in parts_of(row) if part] or [row])
    keys = list(part) if isinstance(part, dict) else list(range(len(part)))
    if isinstance(part, dict) and (not part or generator.random() < 0.2):
        keys = KEYS
    key = generator.choice(keys)
    if generator.random() < 0.15 and not isinstance(key, int):
        part.pop(key, None)
    else:
        part[key] = copy.deepcopy(generator.choice(VALUES))


def test_whatever_stands_in_a_row_it_is_taken_or_named():
    """An id that was a list once ended 02 with a traceback."""
    generator = random.Random(1)
    taken, problems = [], set()
    for _ in range(5_000):
        row = copy.deepcopy(generator.choice(ROWS))
        for _ in range(generator.choice((1, 1, 1, 2, 3))):
            spoil(row, generator)
        example, problem = data.clean(row)
        assert (example is None) == bool(problem), row
        problems.add(problem)
        if example:
            taken.append(example)
            assert isinstance(data.remarks([example]), list)
    assert len(taken) > 1_000 and len(problems) > 40
    tokenizer = TOKENIZERS["tiny"]
    for example in generator.sample(taken, 300):
        messages = data.as_messages(example, "S", generator.choice(("kept", "stripped")))
        ids, mask = chat.render(tokenizer, messages)
        assert len(ids) == len(mask) and any(mask)


@pytest.mark.parametrize("piece", [
    "```verilog\n", "\n```(*a;", "```\n\n", "<think>", "<think>\n```v\n", "</think>\n", "<answer>",
    "</answer>", "<|channel>", "\n", "`"])
def test_time_grows_with_the_length_of_an_answer_alone(piece):
    """Fences that nothing closes took four times as long where there were twice as many."""
    text = piece * (300_000 // len(piece))
    start = time.process_time()
    data.split_response(text)
    texts.split_thought(f"<think>{text}")
    data.clean({"prompt": text, "completion": text})
    assert time.process_time() - start < 10


# ── What isn't used, and what looks odd ──

@pytest.mark.parametrize("row, unused", [
    ({"messages": CHAT, "id": 7, "source": "", "tags": []}, ["column id"]),
    ({"messages": [{**CHAT[0], "name": "Al", "weight": 0}, {**CHAT[1], "audio": {"id": 1}}]},
     ["name of user messages", "audio of assistant messages"]),
    ({"messages": [{**CHAT[0], "weight": 1}, CHAT[1]]}, ["weight of user messages"]),
    ({"prompt": "q", "completion": "a", "thinking": "t"}, ["column thinking"]),
    ({"system": "s", "prompt": "q", "response": FENCED}, ["column system"]),
    ({"messages": [CHAT[0], {**CHAT[1], "thinking": "t"}, *CHAT]},
     ["thoughts of assistant messages"]),
    ({"prompt": "q", "completion": "<think>t</think>a", "id": 7},
     ["column id", "thoughts of assistant messages"]),
    ({"prompt": "q", "response": f"<think>t</think>\n<answer>\n{FENCED}\n</answer>"},
     ["thoughts of assistant messages"]),
    ({"prompt": "q", "completion": "a", "tools": [
        {"function": {"name": "f", "strict": True, "response": {"type": "object"}, "x": None}},
        {"type": "function", "name": "g", "strict": False}]},
     ["strict of tools", "response of tools"]),
    ({"messages": CHAT, "system": "s", "tools": None}, [])])
def test_what_is_left_out_of_a_kept_row_is_named(row, unused):
    example, problem = data.clean(row)
    assert not problem and example["unused"] == unused
    counted = "; ".join(f"{name} (2)" for name in sorted(unused))
    wanted = [f"not used of the rows that are kept: {counted}"] if unused else []
    assert data.remarks([example, example]) == wanted


@pytest.mark.parametrize("user, answer, odd", [
    ("q", "Yes.</s>", "an answer ends in </s>, which is trained as letters"),
    ("q", "Yes.<turn|>\n", "an answer ends in <turn|>, which is trained as letters"),
    ("q", "Write <eos> at the end.", ""),
    ("[INST] q [/INST]", "a", "a prompt holds [INST]: it was rendered before, for some model"),
    ("<start_of_turn>user\nq", "a",
     "a prompt holds <start_of_turn>: it was rendered before, for some model"),
    ("q", '<tool_call>\n{"name": "f"}\n</tool_call>',
     "an answer holds <tool_call>, which is trained as letters"),
    ("q", "<|tool_call>call:f{}<tool_call|>",
     "an answer holds <|tool_call>, which is trained as letters"),
    ("q", '<TOOLCALL>[{"name": "f"}]</TOOLCALL>',
     "an answer holds <TOOLCALL>, which is trained as letters"),
    ("q", '<functioncall> {"name": "f"}',
     "an answer holds <functioncall>, which is trained as letters"),
    ("q", "A tool_call is no tag.", ""),
    ("q", "The tag </think> ends it.",
     "an answer holds a <think> tag, which is trained as letters")])
def test_chats_that_were_rendered_before_are_counted(user, answer, odd):
    example, problem = data.clean({"prompt": user, "completion": answer})
    assert not problem and example["odd"] == ([odd] if odd else [])
    assert data.remarks([example]) == ([f"kept, but look at these rows: {odd} (1)"] if odd else [])


# ── Where a thought ends ──

@pytest.mark.parametrize("text, thought, rest", [
    ("<think>a</think>b", "a", "b"),
    (" \n<think>a</think>\n<think>b</think>c", "a\nb", "c"),
    ("<|channel>thought\na\n<channel|>b", "a", "b"),
    ("The tag </think> closes it.", "", "The tag </think> closes it."),
    ("Write <think> first.", "", "Write <think> first."),
    ("```v\nx // after </think>\n```", "", "```v\nx // after </think>\n```"),
    ("```\n</think>\n```", "", "```\n</think>\n```"),
    ("Well. <think>\na\n</think>\nb", "", "Well. <think>\na\n</think>\nb"),
    ("why\n</think>\n\nb", "why", "\n\nb"),  # the prompt opened it
    ("why</think>\n<answer>b", "why", "\n<answer>b"),
    ("<think>try\n```v\n// </think>\n```\nso</think>b", "try\n```v\n// </think>\n```\nso", "b"),
    ("<think>try\n```v\nm\n</think>\n```v\nn\n```", "try\n```v\nm", "\n```v\nn\n```"),
    ("<think>try\n```v\nm\n</think>\n```\nn", "try\n```v\nm", "\n```\nn"),
])
def test_a_thought_stands_at_the_beginning_only(text, thought, rest):
    assert texts.split_thought(text) == (thought, rest, True)


def test_a_thought_that_never_ends():
    assert texts.split_thought("<think>a</think><think>b") == ("a\nb", "", False)
    assert texts.split_thought("<think>") == ("", "", False)


@given(st.lists(st.sampled_from(["<think>", "</think>", "```", "```v", "\n", "a", "<answer>"]),
                max_size=12).map("".join))
@settings(max_examples=300, deadline=None)
def test_no_letter_of_an_answer_is_lost(value):
    thought, rest, closed = texts.split_thought(value)
    assert value.endswith(rest) and (closed or not rest)
    if not value.lstrip().startswith("<think>") and "</think>" not in value:
        assert (thought, rest) == ("", value)


def test_tags_in_a_comment_of_the_answer_are_letters():
    code = CODE.replace("a;", "a; // <answer> </think> </answer>")
    response = f"<think>t</think>\n<answer>\n```verilog\n{code}\n```\n</answer>"
    assert data.split_response(response) == ("t", f"```verilog\n{code}\n```", "")
    example, problem = data.clean({"prompt": "q", "completion": f"Look:\n{response[17:]}"})
    assert not problem and example["answer"].startswith("Look:") and not example["reasoning"]


# ── Files and columns that people have ──

@pytest.mark.parametrize("row", [
    {"messages": None, "instruction": "q", "output": "a"},
    {"messages": [], "prompt": "q", "completion": "a"},
    {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"instruction": "q", "input": " \n", "output": "a"},
    {"messages": [{"role": "system", "content": " "}, *CHAT]},
    {"messages": [{"role": "system", "content": None}, *CHAT], "system": " "}])
def test_rows_that_say_the_same_are_one_chat(row):
    example, problem = data.clean(row)
    assert not problem and data.as_messages(example, None) == CHAT and not example["unused"]


def test_preferences_are_named():
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert clean(row) == "a preference (chosen and rejected), not an answer to learn"


def test_exactly_the_data_files_of_a_folder_are_read(tmp_path):
    """Backups tripled the rows."""
    line = json.dumps({"prompt": "q", "completion": "a"}) + "\n"
    for name in ("chats.jsonl", "chats.jsonl.bak", "chats.jsonl~", ".chats.jsonl", "chats.jsonl.1"):
        (tmp_path / name).write_text(line)
    (tmp_path / "folder.jsonl").mkdir()
    assert len(data.read_rows(str(tmp_path))) == 1


def test_a_json_array_is_read_as_its_rows(tmp_path):
    rows = [{"prompt": str(number), "completion": "a\u2028b\x85c"} for number in range(40)]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "rows.jsonl").write_text(f"\ufeff[\n{lines}\n]\n")
    assert data.read_rows(str(tmp_path / "rows.jsonl")) == rows
    (tmp_path / "rows.jsonl").write_text("\ufeff" + lines.replace(",\n", "\n") + "\n\n")
    assert data.read_rows(str(tmp_path / "rows.jsonl")) == rows


STRANGE = "a b [1-9] 100% $HOME $x 'q' \"p\" äß{y}"


@pytest.mark.slow
def test_02_runs_in_folders_with_strange_names(tmp_path):
    """Its data, its own copy and its run directory, which can't have a [ (`run.run_dir`)."""
    folder = tmp_path / STRANGE
    run = tmp_path / STRANGE.replace("[1-9]", "*?")
    (folder / "rows").mkdir(parents=True)
    with open(folder / "rows" / "my $rows$.jsonl", "w") as file:
        for n in range(60):
            row = {"prompt": f"What is {n} plus {n}?", "completion": f"It is {2 * n}.", "when": n}
            file.write(json.dumps(row) + "\n")
    script = folder / "02_data.py"
    script.write_text(changed_page(source=str(folder / "rows"), evaluation="", validation=0.2))
    done = page(script, run)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "60 of 60 rows are usable" in done.stdout
    assert "not used of the rows that are kept: column when (60)" in done.stdout
    assert packing.check_data(run / "data").rows_kept == 60


def changed_page(**settings):
    """02 with other settings, run from anywhere."""
    text = (ROOT / "02_data.py").read_text()
    words = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    found = text.replace("# Your own data (section 7):\n", f"cfg = replace(cfg, {words})\n")
    assert found != text
    return found


@pytest.mark.slow
def test_02_stops_if_there_are_no_exams(tmp_path):
    """With a mistyped folder it compared with 0 exams and went on."""
    script = tmp_path / "02_data.py"
    script.write_text(changed_page(evaluation="data/ports"))
    done = page(script, tmp_path / "run")
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode and "data/ports" in line and "*_prompt.txt" in line
    assert "Traceback" not in done.stderr and not (tmp_path / "run" / "data").exists()


@pytest.mark.slow
def test_02_takes_rows_with_dates_and_tools(tmp_path, monkeypatch):
    """A hub's row may hold a datetime, which isn't JSON; and every chat may end in a call."""
    script = tmp_path / "02_data.py"
    rows = """
    import datetime
    calls = [{"name": "f", "arguments": {"n": 1}}]
    data.read_rows = lambda source: [{"when": datetime.datetime.now(), "tools": [{"name": "f"}],
        "messages": [{"role": "user", "content": f"q {n}"},
                     {"role": "assistant", "content": None, "tool_calls": calls}]}
        for n in range(60)]
    """
    text = changed_page(evaluation="", validation=0.2, source="somebody/rows")
    text = text.replace("everything = data", textwrap.dedent(rows) + "everything = data")
    script.write_text(text)
    done = page(script, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-2_000:]
    samples = json.loads((tmp_path / "run" / "data" / "samples.json").read_text())
    assert json.loads(samples[0]["answer"])[0]["function"]["arguments"] == {"n": 1}
    assert samples[0]["messages"][0]["tools"][0]["function"]["name"] == "f"


# ── Overlap, split, files ──

def test_overlap_equals_brute_force():
    rng = np.random.default_rng(0)
    prompts = [" ".join(rng.choice(list("ab"), 12)) for _ in range(40)]
    exams = {f"e{i}": " ".join(rng.choice(list("ab"), 9)) for i in range(8)}
    exams["same"] = prompts[7].upper()
    exact, closest = data.overlap(prompts, exams, n=4)

    def grams(value):
        words = value.lower().split()
        return {tuple(words[i:i + 4]) for i in range(len(words) - 3)}
    assert exact == {i for i, prompt in enumerate(prompts) if prompt == prompts[7]}
    for name, exam in exams.items():
        best = max(len(grams(exam) & grams(prompt)) / len(grams(exam)) for prompt in prompts)
        assert closest[name][0] == pytest.approx(best)
        if best:
            place = closest[name][1]
            shared = len(grams(exam) & grams(prompts[place]))
            assert shared / len(grams(exam)) == pytest.approx(best)
    assert data.overlap(["x y"], {"e": "no such words in here"}, n=3) == (set(), {"e": (0.0, -1)})
    short = {"e": "How wide?", "nothing": " "}  # an exam shorter than a run was never found
    near = {"e": (1.0, 1), "nothing": (0.0, -1)}
    assert data.overlap(["x y", "Say: how wide?"], short) == (set(), near)
    assert data.words_of("A=b[3:0];") == ["a", "=", "b", "[", "3", ":", "0", "]", ";"]


def test_what_a_close_row_does_not_share_is_named():
    exams = {"counter": "A counter of 16 bits.", "far": "Something else"}
    rows = data.closest_rows({"counter": (0.8, 1), "far": (0.0, -1)}, exams,
                             ["a wire", "A counter of 32 BITS"], 4)
    assert rows == [{"evaluation prompt": "counter", "shared runs": "80%",
                     "only in the exam": "16 .", "only in the closest training row": "32"}]


def test_validation_split_follows_the_prompt():
    picks = [data.held_out(f"prompt {i}", 0.1) for i in range(4_000)]
    assert 300 < sum(picks) < 500
    assert [data.held_out(f"Prompt  {i}\n", 0.1) for i in range(100)] == picks[:100]
    picked = [i for i, pick in enumerate(picks) if pick]
    assert all(data.held_out(f"prompt {i}", 0.2) for i in picked), "shares nest"


def test_the_published_mask_is_six_ids_late():
    """6 ids late, and into the <eos>; counted here without the function's own arithmetic."""
    tokenizer, answer = TOKENIZERS["tiny"], "```verilog\nmodule m;\nendmodule\n```"
    ids, mask = late_mask.published_row(tokenizer, "question", answer)
    target = chat.encode_texts(tokenizer, [answer])[0]
    start = next(i for i in range(len(ids)) if ids[i:i + len(target)] == target)
    assert mask.index(True) == start + 6 and mask[-1] and ids[-1] == tokenizer.eos_token_id


# ── Packing ──

def marked_examples(lengths):
    """Examples whose ids say which example and which place they are."""
    ids = [np.arange(n, dtype=np.int32) + 10_000 * (i + 1) for i, n in enumerate(lengths)]
    return ids, [np.arange(n) >= n // 2 for n in lengths]


def test_each_part_is_packed_by_itself():
    ids, masks = marked_examples([9, 20, 11, 40])
    arrays = packing.pack_parts({"train": [0, 3], "val": [2]}, ids, masks, 50, 0)
    assert {name: set(part["tokens"][part["segment_ids"] > 0] // 10_000)
            for name, part in arrays.items()} == {"train": {1, 4}, "val": {3}}


@given(st.lists(st.integers(2, 50), min_size=1, max_size=120), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_packing_keeps_every_example_whole(lengths, seed):
    ids, masks = marked_examples(lengths)
    rows = packing.pack_arrays(ids, masks, 50, seed)
    assert {name: array.dtype for name, array in rows.items()} == {
        "tokens": np.int32, "loss_mask": bool, "segment_ids": np.int32, "positions": np.int32}
    seen = []
    for tokens, mask, segments, positions in zip(*(rows[name] for name in (
            "tokens", "loss_mask", "segment_ids", "positions"))):
        assert segments.max() >= 1, "an empty row"
        assert list(dict.fromkeys(segments[segments > 0])) == list(range(1, segments.max() + 1))
        assert not tokens[segments == 0].any() and not mask[segments == 0].any()
        for segment in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == segment)
            assert np.array_equal(places, np.arange(places[0], places[-1] + 1))
            assert np.array_equal(positions[places], np.arange(len(places)))
            example = int(tokens[places[0]] // 10_000 - 1)
            assert np.array_equal(tokens[places], ids[example])
            assert np.array_equal(mask[places], masks[example])
            seen.append(example)
    assert sorted(seen) == list(range(len(lengths)))


def test_packing_is_best_fit_by_brute_force_and_fills_rows_as_grain_does():
    """Against a plain search for the fullest row, and against Grain's on CodeV-R1's lengths."""
    lengths = np.random.default_rng(1).integers(1, 100, 300)
    expected, free = [], []
    for example in np.random.default_rng(3).permutation(300):
        room = [(gap, row) for row, gap in enumerate(free) if gap >= lengths[example]]
        row = min(room)[1] if room else len(free)
        if not room:
            free.append(100)
            expected.append([])
        free[row] -= lengths[example]
        expected[row].append(example)
    assert packing.fill_rows(lengths, 100, 3) == expected

    import grain
    like = codev_lengths(2_000, 7)
    examples = [{"ids": np.zeros(n, np.int8)} for n in like]
    source = grain.MapDataset.source(examples).seed(7).shuffle()
    theirs = sum(1 for _ in grain.experimental.BestFitPackIterDataset(
        source.to_iter_dataset(), length_struct={"ids": 4_096}, num_packing_bins=512, seed=7))
    assert len(packing.fill_rows(like, 4_096, 7)) <= theirs + 2


def test_rows_of_codev_lengths_are_at_least_95_percent_full():
    """02 says so, and 30% for one per row of 3,072; 08: 3% don't fit 2,048. Published lengths."""
    n = codev_lengths(10_000, 7)
    assert abs(n.mean() - 922) < 15 and abs(np.percentile(n, 99) - 2553) < 120 and n.max() <= 3072
    short = n[n <= 2_048]
    assert short.size / n.size == pytest.approx(0.97, abs=0.005)
    assert short.sum() / n.sum() == pytest.approx(0.92, abs=0.005)  # 02: 8% of the tokens are lost
    for few, length in ((n, 4_096), (short, 2_048)):
        assert few.sum() / len(packing.fill_rows(few, length, 7)) / length >= 0.95
    assert n.mean() / 3_072 == pytest.approx(0.30, abs=0.005)


def test_length_study_by_hand():
    table = packing.length_study(np.array([4, 4, 8]), [4, 8], 8, 0)
    assert table["examples kept"].tolist() == pytest.approx([2 / 3, 1])
    assert table["one per row: real tokens"].tolist() == pytest.approx([1, 16 / 3 / 8])
    assert table["packed: real tokens"].tolist() == [1.0, 1.0]
    assert table["packed: row length"].tolist() == [8, 8]


# ── What 02 leaves to helpers ──

def test_rows_are_cleaned_and_reasons_are_counted():
    good = {"prompt": "Invert.", "completion": "assign y = ~a;"}
    cleaned = data.clean_all([good, {"a": 1}, {"b": 2}, good], "mine.jsonl")
    assert [example["answer"] for example in cleaned.examples] == ["assign y = ~a;"] * 2
    assert cleaned.dropped == {"no form that we know: a": 1, "no form that we know: b": 1}
    assert cleaned.ends["no form that we know: b"] == "{'b': 2}"
    with pytest.raises(UserError, match="No row of mine.jsonl is usable"):
        data.clean_all([{"a": 1}], "mine.jsonl")


def test_a_split_needs_both_sides_and_a_limit_has_to_fit():
    examples = [{"prompt": f"question {number}"} for number in range(200)]
    parts = data.split(examples, range(0, 200, 2), 0.3)
    assert sorted(parts["train"] + parts["val"]) == list(range(0, 200, 2))
    assert all(data.held_out(examples[place]["prompt"], 0.3) for place in parts["val"])
    with pytest.raises(UserError, match="leave one side empty"):
        data.split(examples, [3], 0.3)
    lengths = np.array([10, 20])
    packing.check_limits(lengths, 10, 32)
    for limit in (9, 33):
        with pytest.raises(UserError, match="shortest has 10 tokens.*rows of 32"):
            packing.check_limits(lengths, limit, 32)


def test_a_chat_that_the_published_recipe_cannot_render_is_replaced():
    one = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert late_mask.one_question(one, otherwise=[]) is one
    assert late_mask.one_question(one * 2, otherwise=one) is one
    with_tools = [{"role": "system", "tools": []}, *one]
    assert late_mask.one_question(with_tools, otherwise=one) is one
