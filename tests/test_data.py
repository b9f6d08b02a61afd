"""02_data: ids, masks, extraction, packing and reading, against what we did not write."""

import gzip
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from conftest import ROOT, load, needs_serve, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from helpers import chat, data, packing

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
    for number, text in ((0, "<pad>"), (1, "<eos>"), (2, "<bos>"), (3, "<unk>"), (98, "<|think|>"),
                         (100, "<|channel>"), (101, "<channel|>"), (105, "<|turn>"), (106, "<turn|>")):
        names[number] = text
    built = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    built.normalizer = normalizers.Replace(" ", "▁")
    built.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                       decoders.Fuse()])
    text = ["user\n\nmodel\nmodule m;\nendmodule\n```\n\n\nthought\n ```verilog\nmodule a(input b);\n"] * 20
    built.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=700, special_tokens=names + [f"<0x{i:02X}>" for i in range(256)]))
    saved = json.loads(built.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] < 107]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(saved)), bos_token="<bos>", eos_token="<eos>",
        pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = tiny_tokenizer().chat_template
    return tokenizer


TOKENIZERS = {"tiny": tiny_tokenizer(), "small template": small_template(), "Gemma-like": gemma_like()}
every = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)

CONTROL = sorted(chat.special_ids(TOKENIZERS["tiny"]), key=len)[-8:] + ["<bos>", "<eos>", "<pad>"]
PIECES = ["```verilog\nmodule m;\nendmodule\n```", "\r\n", "\n\n", "  ", "\t", "é😀漢字", "a", "<", "|>",
          "\u200b", "\x00", "<|", "turn", "model\n", "user\n", "\ufdd0"]
text = st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join))
plain = text.filter(lambda value: not any(name in value for name in chat.special_ids(
    TOKENIZERS["tiny"])) and not any(name in value for name in chat.special_ids(TOKENIZERS["Gemma-like"])))
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
@given(user=hostile, answer=st.one_of(text, hostile, st.just(""), text.map(lambda a: a + " \n\r\n ")),
       system=st.none() | text)
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
@given(user=hostile, answer=text, turns=st.lists(st.tuples(hostile, hostile), min_size=1, max_size=3))
def test_every_turn_of_the_model_is_trained_and_nothing_else(tokenizer, user, answer, turns):
    messages = messages_of(user, "Be brief.", turns)
    ids, mask = chat.render(tokenizer, [*messages, {"role": "assistant", "content": answer}])
    assert ids[:-len(chat.encode_texts(tokenizer, [answer])[0]) - 1] == chat.prompt_ids(tokenizer, messages)
    spans = [[number for number, _ in group] for on, group in itertools.groupby(
        zip(ids, mask), key=lambda pair: pair[1]) if on]
    stored = [given.strip() for given, _ in turns]  # the template trims what it stores
    trained = [tokenizer.decode(span) for span in spans]
    if tokenizer is not TOKENIZERS["Gemma-like"]:
        assert trained == [given + "<turn|>" for given in [*stored, answer]]
    assert len(trained) == len(stored) + 1  # there, an id may span "model\n" and the first letters
    assert all((given + "<turn|>").endswith(span) for given, span in zip([*stored, answer], trained))


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
    (chat_row(QUESTION, ("system", "s"), QUESTION, ANSWER), "user and assistant do not take turns"),
    ({"messages": ["hi"]}, "messages is not a list of objects"),
    (chat_row(("user", [{"type": "text", "text": "q"}]), ANSWER), "user message is not text"),
    (chat_row(("user", " \n"), ANSWER), "empty user message"),
    (chat_row(QUESTION, ("assistant", "\ud800")), "assistant message is not Unicode"),
    (chat_row(QUESTION, ("assistant", "<think>cut off"), QUESTION, ANSWER), "unfinished reasoning"),
    (chat_row(QUESTION, ("assistant", "<think>t</think>"), QUESTION, ANSWER), "empty answer"),
    ({"conversations": [{"from": "bing", "value": "q"}, {"from": "gpt", "value": "a"}]},
     "user and assistant do not take turns"),
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
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, **named: asked.append((words, named))
                        or [{"messages": CHAT}])
    for source in ("a/b", "a/b:sft", "a/b@v1", "a/b:sft@v1"):
        assert data.read_rows(source) == [{"messages": CHAT}]
    assert [(words[1], named["revision"]) for words, named in asked] == [
        (None, None), ("sft", None), (None, "v1"), ("sft", "v1")]
    assert {words[0] for words, _ in asked} == {"a/b"} and asked[0][1]["split"] == "train"


@every
def test_the_example_of_ones_own_data(tokenizer):
    """Ten rows, one of them faulty and one with two answers: every answer is trained, nothing else."""
    rows = data.read_rows("data/own_example.jsonl")
    cleaned = [data.clean(row, False) for row in rows]
    assert len(rows) == 10 and Counter(problem for _, problem in cleaned) == {
        "": 9, "no answer at the end": 1}
    chats = [data.as_messages(example, "S", "stripped") for example, problem in cleaned if not problem]
    assert sorted(sum(m["role"] == "assistant" for m in c) for c in chats) == [1] * 8 + [2]
    for messages, (ids, mask) in zip(chats, chat.render_chats(tokenizer, chats), strict=True):
        assert not any("think" in message["content"] for message in messages)
        check_row(tokenizer, messages, ids, mask)
        if tokenizer is not TOKENIZERS["Gemma-like"]:  # there an id may span "model\n" and the answer
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


# ── Overlap, split, files ──

def test_overlap_equals_brute_force():
    rng = np.random.default_rng(0)
    prompts = [" ".join(rng.choice(list("ab"), 12)) for _ in range(40)]
    exams = {f"e{i}": " ".join(rng.choice(list("ab"), 9)) for i in range(8)} | {"same": prompts[7].upper()}
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
            assert len(grams(exam) & grams(prompts[place])) / len(grams(exam)) == pytest.approx(best)
    assert data.overlap(["x y"], {"e": "no such words in here"}, n=3) == (set(), {"e": (0.0, -1)})
    assert data.words_of("A=b[3:0];") == ["a", "=", "b", "[", "3", ":", "0", "]", ";"]


def test_validation_split_follows_the_prompt():
    picks = [data.held_out(f"prompt {i}", 0.1) for i in range(4_000)]
    assert 300 < sum(picks) < 500
    assert [data.held_out(f"Prompt  {i}\n", 0.1) for i in range(100)] == picks[:100]
    assert all(data.held_out(f"prompt {i}", 0.2) for i, pick in enumerate(picks) if pick), "shares nest"


def test_the_published_mask_is_six_ids_late():
    """6 ids late, and into the <eos>; counted here without the function's own arithmetic."""
    tokenizer, answer = TOKENIZERS["tiny"], "```verilog\nmodule m;\nendmodule\n```"
    ids, mask = load("02_data.py", "published_row")(tokenizer, "question", answer)
    target = chat.encode_texts(tokenizer, [answer])[0]
    start = next(i for i in range(len(ids)) if ids[i:i + len(target)] == target)
    assert mask.index(True) == start + 6 and mask[-1] and ids[-1] == tokenizer.eos_token_id


# ── Packing ──

def marked_examples(lengths):
    """Examples whose ids say which example and which place they are."""
    ids = [np.arange(n, dtype=np.int32) + 10_000 * (i + 1) for i, n in enumerate(lengths)]
    return ids, [np.arange(n) >= n // 2 for n in lengths]


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
    """Against a plain search for the fullest row, and against Grain's packer on CodeV-R1's lengths."""
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
    source = grain.MapDataset.source([{"ids": np.zeros(n, np.int8)} for n in like]).seed(7).shuffle()
    theirs = sum(1 for _ in grain.experimental.BestFitPackIterDataset(
        source.to_iter_dataset(), length_struct={"ids": 4_096}, num_packing_bins=512, seed=7))
    assert len(packing.fill_rows(like, 4_096, 7)) <= theirs + 2


def test_rows_of_codev_lengths_are_at_least_95_percent_full():
    """02 says so, and 30 % for one per row of 3,072; 08: 3 % do not fit 2,048. Published lengths."""
    n = codev_lengths(10_000, 7)
    assert abs(n.mean() - 922) < 15 and abs(np.percentile(n, 99) - 2553) < 120 and n.max() <= 3072
    short = n[n <= 2_048]
    assert short.size / n.size == pytest.approx(0.97, abs=0.005)
    for few, length in ((n, 4_096), (short, 2_048)):
        assert few.sum() / len(packing.fill_rows(few, length, 7)) / length >= 0.95
    assert n.mean() / 3_072 == pytest.approx(0.30, abs=0.005)


def test_length_study_by_hand():
    table = packing.length_study(np.array([4, 4, 8]), [4, 8], 8, 0)
    assert table["examples kept"].tolist() == pytest.approx([2 / 3, 1])
    assert table["padding, one per row"].tolist() == pytest.approx([0, 1 - 16 / 3 / 8])
    assert table["real tokens, packed"].tolist() == [1.0, 1.0]
