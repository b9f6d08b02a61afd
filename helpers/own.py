"""A reader's own chats, from the file to the hub: what own_data.py needs beside `recipe.py`.

It looks at rows and draws them, writes them as `recipe.py` reads them, asks what was held out,
draws the scores, and makes the model card that goes with an adapter.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from helpers import chat, data, run, style
from helpers.chat import Message
from helpers.run import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Interval = tuple[float, float, float]  # mean, low, high
ENDS = (chat.TURN_END, chat.RESULT)
STEP = re.compile(r"^step (\d+)/(\d+) (\{.*\})$")  # as recipe.py prints it
TOKEN_HELP = ("on Colab add HF_TOKEN under Secrets (the key in the left margin), elsewhere "
              "`export HF_TOKEN=hf_...`; it needs the right to write.")


class Rows(NamedTuple):
    """What a file holds."""

    chats: list[list[Message]]  # those that are kept, as `data.as_messages` gives them
    dropped: Counter[str]       # {reason: rows}


# ── The file ──


def file_of(name: str, example: str) -> str:
    """The file to train on.

    Args:
      name: a file; "upload" asks for one; "" takes the example.
      example: that file.

    Raises:
      UserError: this machine has no button to upload with, or nothing was uploaded.
    """
    if not name:
        return example
    if name != "upload":
        return name
    if "COLAB_RELEASE_TAG" not in os.environ:
        raise UserError('FILE = "upload" works on Colab. Here, name the file: on Kaggle choose '
                        "Add Input, Upload, and it's below /kaggle/input.")
    from google.colab import files
    uploaded = files.upload()
    if not uploaded:
        raise UserError("Nothing was uploaded. Run the cell again and choose a file.")
    return str(next(iter(uploaded)))


def look(source: str, system: str = "", reasoning: str = "stripped") -> Rows:
    """Read a file, print how many rows are kept and what isn't used of them, and keep those.

    Args:
      source: as in `data.read_rows`.
      system: a sentence that opens every chat without a system message of its own; "": none.
      reasoning: "stripped", or "kept".

    Raises:
      UserError: no row can be used; the reasons are in the text.
    """
    rows = data.read_rows(source)
    examples = []
    dropped: Counter[str] = Counter()
    for row in rows:
        example, problem = data.clean(row)
        if example is None or problem:
            dropped[problem] += 1
        else:
            examples.append(example)
    if not examples:
        raise UserError(f"No row of {source} is usable: {dict(dropped)}. docs/OWN_DATA.md shows "
                        "the forms that a row can have.")

    print(f"{len(examples):,} of {len(rows):,} rows of {source} are kept")
    for line in data.remarks(examples):
        print(line)

    chats = []
    for example in examples:
        messages = data.as_messages(example, system, reasoning)
        chats.append(messages)
    return Rows(chats, dropped)


def draw_rows(rows: Rows, lengths: Sequence[int], limit: int) -> None:
    """Two pictures of a file: what becomes of its rows, and how long the kept ones are.

    Args:
      rows: from `look`.
      lengths: tokens of each kept chat.
      limit: the tokens that a packed row holds. Longer chats aren't trained.
    """
    counts = _fates(rows, lengths, limit)
    height = 1.6 + 0.32 * max(3, len(counts))  # inches: a bar needs 0.32
    fig, (left, right) = style.figure(8.5, height, columns=2)
    _draw_fates(left, counts)

    right.hist(lengths, bins=30, color=style.BLUE)
    right.axvline(limit, color=style.RED, ls="--", label=f"limit: {limit:,}")
    right.set(title="How long they are", xlabel="tokens", ylabel="chats", xlim=(0, None))
    right.legend()
    style.finish(fig, "own_rows", "this file")


def _fates(rows: Rows, lengths: Sequence[int], limit: int) -> dict[str, int]:
    """{what becomes of a row: how many rows}, without those that happen to none."""
    too_long = sum(length > limit for length in lengths)
    counts = {"kept": len(lengths) - too_long, "too long": too_long, **rows.dropped}
    return {fate: count for fate, count in counts.items() if count}


def _draw_fates(ax: Axes, counts: Mapping[str, int]) -> None:
    """A bar for each fate of a row, the first one on top."""
    names = list(counts)
    names.reverse()  # bars are drawn from the bottom up
    widths = []
    colours = []
    for name in names:
        widths.append(counts[name])
        colours.append(style.BLUE if name == "kept" else style.ORANGE)

    bars = ax.barh(names, widths, color=colours)
    ax.bar_label(bars, padding=3)
    right_edge = 1.15 * max(widths)  # leaves room for the numbers
    ax.set(title="What becomes of the rows", xticks=[], xlim=(0, right_edge))
    ax.grid(False)


def typical(lengths: Sequence[int], limit: int) -> int:
    """The place of a chat of middling length, among those that fit into a row of `limit` tokens.

    Raises:
      UserError: none of them fits.
    """
    fitting = [place for place, length in enumerate(lengths) if length <= limit]
    if not fitting:
        raise UserError(f"Every chat is longer than {limit} tokens: raise sequence_length.")
    fitting.sort(key=lengths.__getitem__)
    middle = len(fitting) // 2
    return fitting[middle]


def write_chats(chats: Sequence[Sequence[Message]], path: Path) -> None:
    """Write chats as `recipe.py` reads them, one a line, each with its tools in a column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for chat_messages in chats:
        messages = [dict(message) for message in chat_messages]
        row: dict[str, Any] = {"messages": messages}
        tools = messages[0].pop("tools", None)
        if tools:
            row["tools"] = tools
        lines.append(json.dumps(row) + "\n")
    run.write_text(path, "".join(lines))


# ── Training ──


class Copy:
    """A stream that writes to two streams. The first one answers whatever else it's asked."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self.first = first
        self.second = second

    def write(self, text: str) -> int:
        """Write to both; gives the number of letters."""
        self.second.write(text)
        self.second.flush()
        return self.first.write(text)

    def flush(self) -> None:
        """Show what was written."""
        self.first.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first, name)


def mark(options: Mapping[str, object], chats: Sequence[Sequence[Message]]) -> str:
    """Eight letters for a recipe and its rows: a folder's name that no other run has."""
    rows = [list(messages) for messages in chats]
    return run.digest([dict(options), rows])[:8]


def train(main: Callable[[list[str]], None], options: Mapping[str, object], out: Path) -> None:
    """Train out/rows.jsonl by `recipe.main`; what it prints is shown, and added to out/log.txt.

    Args:
      main: `recipe.main`, which takes the words of a command line.
      options: of recipe.py, all but where data and results are.
      out: the folder that holds the rows, and gets the results.

    Raises:
      UserError: recipe.py stopped with one of its messages.
    """
    all_options = {**options, "data": out / "rows.jsonl", "out": out}
    words = []
    for name, value in all_options.items():
        words += [f"--{name}", str(value)]

    with (out / "log.txt").open("a", encoding="utf-8") as log:
        shown_and_kept = Copy(sys.stdout, log)
        try:
            with contextlib.redirect_stdout(shown_and_kept):  # type: ignore[type-var]
                main(words)
        except SystemExit as error:
            line = str(error).removeprefix("Error: ")
            if not isinstance(error.code, str):  # argparse has said it, in the lines above
                line = "recipe.py doesn't take one of these options, see above."
            raise UserError(line) from None
        finally:
            gc.collect()  # the chip's memory is free again before the next cell


def losses(log: Path) -> dict[str, list[tuple[int, float]]]:
    """{"loss": [(step, nats per token)], "held-out loss": ...} of a log.

    If a run was stopped and went on, some steps are there twice. The later one counts.
    """
    by_step: dict[str, dict[int, float]] = {"loss": {}, "held-out loss": {}}
    for line in log.read_text("utf-8").splitlines():
        match = STEP.match(line)
        if not match:
            continue
        step = int(match[1])
        values = json.loads(match[3].replace("'", '"'))
        for name, value in values.items():
            by_step[name][step] = value
    return {name: sorted(values.items()) for name, values in by_step.items()}


def draw_losses(log: Path) -> None:
    """Draw the loss of each step and the held-out losses of a log."""
    curves = losses(log)
    fig, ax = style.figure(7, 2.8)
    trained = np.array(curves["loss"]).reshape(-1, 2)  # (step, loss) a row, of any number
    ax.plot(trained[:, 0], trained[:, 1], color=style.BLUE, alpha=0.5, label="trained rows")
    title = "The loss of this run"

    held_out = curves["held-out loss"]
    if held_out:
        measured = np.array(held_out)
        ax.plot(measured[:, 0], measured[:, 1], "o-", color=style.GREEN, label="held-out rows")
        best_step, _ = min(held_out, key=lambda pair: pair[1])
        last_step, _ = held_out[-1]
        title = f"Held-out loss: best at step {best_step} of {last_step}"

    ax.set(xlabel="optimizer step", ylabel="nats per trained token", title=title)
    ax.set(xlim=(0, None), ylim=(0, None))
    ax.legend()
    style.finish(fig, "own_loss", "this run")


# ── Questions ──


class Question(NamedTuple):
    """What a held-out chat asks first, and what it answers."""

    asked: list[Message]
    wanted: str


def questions(tokenizer: Any, chats: Sequence[list[Message]], share: float, limit: int,
              most: int = 40) -> list[Question]:
    """The first question of each chat that `recipe.py` holds out, at most `most` of them.

    Args:
      tokenizer: from `chat.load_tokenizer`.
      chats: those that are trained and held out, from `look`.
      share: of the chats that's held out, as in recipe.py.
      limit: tokens of a question and its answer together; longer pairs are skipped.
      most: questions.

    Raises:
      UserError: no chat is held out, or none that's held out fits into `limit`.
    """
    exam: list[Question] = []
    too_long = 0
    for messages in chats:
        if len(exam) == most:
            break
        if not data.held_out(_first_prompt(messages), share):
            continue
        question = _first_question(tokenizer, messages)
        asked = chat.prompt_ids(tokenizer, question.asked)
        [wanted] = chat.encode_texts(tokenizer, [question.wanted])
        if len(asked) + len(wanted) <= limit:
            exam.append(question)
        else:
            too_long += 1
    if not exam and too_long:
        raise UserError(f"All {too_long} held-out questions are longer than {limit} tokens, with "
                        "their answers: raise sequence_length.")
    if not exam:
        raise UserError(f"No chat is held out of {len(chats)}: raise the share, which is {share}.")
    return exam


def longest(tokenizer: Any, exam: Sequence[Question]) -> int:
    """How long an answer may become: the tokens of the longest one that's wanted, and some more.

    A tenth is added for other wordings, and two tokens for the end.
    """
    texts = [question.wanted for question in exam]
    lengths = [len(ids) for ids in chat.encode_texts(tokenizer, texts)]
    return int(1.1 * max(lengths)) + 2


def _first_prompt(messages: Sequence[Message]) -> str:
    """What a chat's user writes first."""
    return next(message["content"] for message in messages if message["role"] == "user")


def _first_question(tokenizer: Any, messages: list[Message]) -> Question:
    """A chat up to its first trained answer, and that answer as the model has to write it."""
    place = 0
    while not _is_trained_answer(messages[place]):
        place += 1
    answer = dict(messages[place])
    answer.pop("reasoning", None)
    asked = [dict(message) for message in messages[:place]]

    ids, _ = chat.render(tokenizer, [*asked, answer])
    prompt = chat.prompt_ids(tokenizer, asked)
    written = tokenizer.decode(ids[len(prompt):])
    return Question(asked, without_end(written))


def _is_trained_answer(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("train", True))


def without_end(text: str) -> str:
    """An answer without the control token that ends it."""
    for end in (*ENDS, "<eos>"):
        text = text.removesuffix(end)
    return text.strip()


def draw_scores(scores: Mapping[str, Sequence[float]], compared: Mapping[str, Any]) -> None:
    """Base and tuned model: mean scores with 95 % intervals, and every question as a dot.

    Args:
      scores: {"base": scores from 0 to 1, question by question, "tuned": the same}.
      compared: from `verilog.compare` of these two.
    """
    fig, (left, right) = style.figure(8, 3.2, columns=2, width_ratios=[1, 1.2])
    _draw_mean(left, 0, compared["first"], style.GREY)
    _draw_mean(left, 1, compared["second"], style.BLUE)
    left.set(xticks=[0, 1], xticklabels=["base", "tuned"])
    left.set(ylim=(0, 1.15), ylabel="mean score")
    left.set(title=f"{len(scores['base'])} held-out questions")

    right.plot([0, 1], [0, 1], color=style.GREY, lw=1)  # here both models score the same
    right.plot(scores["base"], scores["tuned"], "o", color=style.BLUE, alpha=0.5)
    right.set(xlabel="score of the base", ylabel="score of the tuned model")
    right.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05), title="A dot is a question")
    style.finish(fig, "own_scores", "this run; bars: 95 % bootstrap intervals")


def _draw_mean(ax: Axes, place: int, interval: Interval, colour: str) -> None:
    """A bar for one model's mean score, with its interval and its number."""
    mean, low, high = interval
    ax.bar(place, mean, color=colour, width=0.6)
    below, above = mean - low, high - mean
    ax.errorbar(place, mean, [[below], [above]], color=style.BLACK, capsize=6)
    ax.text(place, high + 0.04, f"{mean:.2f}", ha="center")


# ── To keep, and to give away ──

CARD = """---
{metadata}
---

# {title}

A LoRA adapter of rank {rank} for `{base}`, trained on {chats:,} chats with one file,
[recipe.py](https://github.com/{repository}/blob/main/recipe.py).

## Scores

Asked greedily, {questions} questions that it has not read; scores from 0 to 1, 95 % intervals.

| | score |
|---|---|
| base | {first} |
| tuned | {second} |
| difference | {difference} (p = {p:.2g}, paired sign-flip test) |

## Data

SHA-256 of the rows as they were trained: `{sha256}`. {held_out:.0%} of the questions were held out.

## Recipe

```text
{recipe}
```

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}", dtype="bfloat16")
model = PeftModel.from_pretrained(base, "{title}")
```
{system}"""


def card(title: str, options: Mapping[str, object], rows: Path, compared: Mapping[str, Any],
         system: str = "") -> str:
    """The model card of an adapter: base, data, recipe and scores.

    Args:
      title: the adapter's name, as on the hub.
      options: those of `train`.
      rows: the file that was trained on.
      compared: from `verilog.compare`, base first.
      system: the sentence that opened every chat; "": none.
    """
    base = str(options["model"])
    recipe = []
    for name, value in options.items():
        if name not in ("model", "data", "out"):  # they're places on the machine that trained
            recipe.append(f"--{name} {value}")
    system_note = ""
    if system:
        system_note = f"\nEvery chat opened with this system message:\n\n> {system}\n"

    chats = rows.read_text("utf-8").splitlines()
    return CARD.format(
        metadata=_card_metadata(base),
        title=title,
        rank=options["rank"],
        base=base,
        chats=len(chats),
        repository="OWNER/gemma4-on-tpu",
        questions=len(compared["values"]),
        first=_shown(compared["first"]),
        second=_shown(compared["second"]),
        difference=_shown(compared["difference"], "+"),
        p=compared["p"],
        sha256=run.sha256_file(rows),
        held_out=options["validation"],
        recipe="\n".join(recipe),
        system=system_note,
    )


def _card_metadata(base: str) -> str:
    """The YAML that opens a card. It names the base if that's on the hub, not a folder here."""
    from huggingface_hub import ModelCardData
    on_hub = "/" in base and not Path(base).exists()
    metadata = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", "gemma4", "tpu"],
        base_model=base if on_hub else None,
    )
    return str(metadata.to_yaml())


def _shown(interval: Interval, sign: str = "") -> str:
    """An interval as "0.50 (0.10 to 0.90)"; `sign` is "+" where plus signs are shown, too."""
    mean, low, high = interval
    return f"{mean:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"


def label(folder: Path, base: str, text: str) -> None:
    """Give an adapter its card, and the base's own name instead of the folder it was staged in."""
    run.write_text(folder / "README.md", text)
    path = folder / "adapter_config.json"
    config = run.read_json(path)
    config["base_model_name_or_path"] = base
    run.write_json(path, config)


def download(folder: Path) -> None:
    """Pack a folder beside itself; on Colab, hand it to the browser."""
    archive = shutil.make_archive(str(folder), "zip", folder)
    megabytes = Path(archive).stat().st_size / 1e6
    print(f"{megabytes:.1f} MB in {os.path.relpath(archive)}")
    if "COLAB_RELEASE_TAG" in os.environ:
        from google.colab import files
        files.download(archive)


def push_to_hub(folder: Path, name: str, private: bool = True) -> str:
    """Upload a folder as a model of the hub; gives its address.

    Args:
      folder: an adapter with its card.
      name: "you/your-model"; it's made if it doesn't exist.
      private: whether only you can see a new one.

    Raises:
      UserError: there is no token, it may not write, or the name isn't one.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    token = get_token()
    if not token:
        raise UserError(f"Pushing to {name} needs a token: {TOKEN_HELP}")
    api = HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder))
    except (HfHubHTTPError, HFValidationError) as error:
        why = str(error).strip().splitlines()[-1]
        raise UserError(f"{name} couldn't be pushed: {why}. {TOKEN_HELP}") from error
