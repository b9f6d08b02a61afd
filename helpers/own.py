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
from typing import Any, NamedTuple, TextIO

import numpy as np

from helpers import chat, data, run, style
from helpers.chat import Message
from helpers.run import UserError

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
    """The file to train on: `name`, an uploaded one for "upload", the example for "".

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
    chats = [data.as_messages(example, system, reasoning) for example in examples]
    return Rows(chats, dropped)


def draw_rows(rows: Rows, lengths: Sequence[int], limit: int) -> None:
    """Two pictures of a file: what becomes of its rows, and how long the kept ones are.

    Args:
      lengths: tokens of each kept chat.
      limit: of a packed row; what is longer is left out of training.
    """
    too_long = sum(length > limit for length in lengths)
    counts = {"kept": len(lengths) - too_long, "too long": too_long, **rows.dropped}
    counts = {name: count for name, count in counts.items() if count}
    fig, (left, right) = style.figure(8.5, 1.6 + 0.32 * max(3, len(counts)), columns=2)
    names = list(counts)[::-1]
    colours = [style.BLUE if name == "kept" else style.ORANGE for name in names]
    bars = left.barh(names, [counts[name] for name in names], color=colours)
    left.bar_label(bars, padding=3)
    left.set(title="What becomes of the rows", xticks=[], xlim=(0, 1.15 * max(counts.values())))
    left.grid(False)
    right.hist(lengths, bins=30, color=style.BLUE)
    right.axvline(limit, color=style.RED, ls="--", label=f"limit: {limit:,}")
    right.set(title="How long they are", xlabel="tokens", ylabel="chats",
              xlim=(0, None))
    right.legend()
    style.finish(fig, "own_rows", "this file")


def typical(lengths: Sequence[int], limit: int) -> int:
    """The place of a chat of middling length, among those that are trained."""
    fitting = [place for place, length in enumerate(lengths) if length <= limit]
    if not fitting:
        raise UserError(f"Every chat is longer than {limit} tokens: raise sequence_length.")
    fitting.sort(key=lambda place: lengths[place])
    return fitting[len(fitting) // 2]


def write_chats(chats: Sequence[Sequence[Message]], path: Path) -> None:
    """Write chats as `recipe.py` reads them, one a line, each with its tools in a column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for messages in chats:
        row: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        tools = row["messages"][0].pop("tools", None)
        if tools:
            row["tools"] = tools
        lines.append(json.dumps(row) + "\n")
    run.write_text(path, "".join(lines))


# ── Training ──


class Copy:
    """A stream that writes to two; whatever else it is asked, the first one answers."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self.first, self.second = first, second

    def write(self, text: str) -> int:
        """Write to both; the number of letters."""
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
    return run.digest([dict(options), [list(messages) for messages in chats]])[:8]


def train(main: Callable[[list[str]], None], options: Mapping[str, object], out: Path) -> None:
    """Train out/rows.jsonl by `recipe.main`; what it prints is shown, and added to out/log.txt.

    Args:
      options: of recipe.py, all but where data and results are.

    Raises:
      UserError: recipe.py stopped with one of its messages.
    """
    words = []
    for name, value in {**options, "data": out / "rows.jsonl", "out": out}.items():
        words += [f"--{name}", str(value)]
    with (out / "log.txt").open("a", encoding="utf-8") as file:
        try:
            with contextlib.redirect_stdout(Copy(sys.stdout, file)):  # type: ignore[type-var]
                main(words)
        except SystemExit as error:
            raise UserError(str(error).removeprefix("Error: ")) from None
        finally:
            gc.collect()  # the chip's memory is free again before the next cell


def losses(log: Path) -> dict[str, list[tuple[int, float]]]:
    """{"loss": [(step, nats per token)], "held-out loss": ...} of a log; the newest run counts."""
    steps: dict[str, dict[int, float]] = {"loss": {}, "held-out loss": {}}
    for line in log.read_text("utf-8").splitlines():
        if found := STEP.match(line):
            values = json.loads(found[3].replace("'", '"'))
            for name, value in values.items():
                steps[name][int(found[1])] = value
    return {name: sorted(values.items()) for name, values in steps.items()}


def draw_losses(log: Path) -> None:
    """The loss of each step and the held-out losses."""
    curves = losses(log)
    fig, ax = style.figure(7, 2.8)
    ax.plot(*np.array(curves["loss"]).T, color=style.BLUE, alpha=0.5, label="trained rows")
    title = "The loss of this run"
    if held_out := curves["held-out loss"]:
        ax.plot(*np.array(held_out).T, "o-", color=style.GREEN, label="held-out rows")
        best = min(held_out, key=lambda pair: pair[1])
        title = f"Held-out loss: best at step {best[0]} of {held_out[-1][0]}"
    ax.set(xlabel="optimizer step", ylabel="nats per trained token", title=title,
           xlim=(0, None), ylim=(0, None))
    ax.legend()
    style.finish(fig, "own_loss", "this run")


# ── Questions ──


class Question(NamedTuple):
    """What a held-out chat asks first, and what it answers."""

    asked: list[Message]
    wanted: str


def questions(tokenizer: Any, chats: Sequence[list[Message]], share: float, limit: int,
              most: int = 40) -> list[Question]:
    """The first question of each chat that `recipe.py` holds out, at most so many.

    Args:
      share: that is held out, as in recipe.py.
      limit: of a question and its answer together, in tokens.

    Raises:
      UserError: no chat is held out.
    """
    found: list[Question] = []
    for messages in chats:
        first = next(message["content"] for message in messages if message["role"] == "user")
        if data.held_out(first, share) and len(found) < most:
            question = _first_question(tokenizer, messages)
            ids = chat.prompt_ids(tokenizer, question.asked)
            if len(ids) + len(chat.encode_texts(tokenizer, [question.wanted])[0]) <= limit:
                found.append(question)
    if not found:
        raise UserError(f"No chat is held out of {len(chats)}: raise the share, which is {share}.")
    return found


def longest(tokenizer: Any, exam: Sequence[Question]) -> int:
    """Tokens of the longest answer that is wanted, a tenth and its end added."""
    texts = [question.wanted for question in exam]
    return int(1.1 * max(map(len, chat.encode_texts(tokenizer, texts)))) + 2


def _first_question(tokenizer: Any, messages: list[Message]) -> Question:
    place = 0
    while messages[place]["role"] != "assistant" or not messages[place].get("train", True):
        place += 1
    answer = {key: value for key, value in messages[place].items() if key != "reasoning"}
    asked = [dict(message) for message in messages[:place]]
    ids, _ = chat.render(tokenizer, [*asked, answer])
    prompt = chat.prompt_ids(tokenizer, asked)
    return Question(asked, without_end(tokenizer.decode(ids[len(prompt):])))


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
    bars = {"base": (compared["first"], style.GREY), "tuned": (compared["second"], style.BLUE)}
    for place, ((mean, low, high), colour) in enumerate(bars.values()):
        left.bar(place, mean, color=colour, width=0.6)
        left.errorbar(place, mean, [[mean - low], [high - mean]], color=style.BLACK, capsize=6)
        left.text(place, high + 0.04, f"{mean:.2f}", ha="center")
    left.set(xticks=[0, 1], xticklabels=list(bars), ylim=(0, 1.15), ylabel="mean score",
             title=f"{len(scores['base'])} held-out questions")
    right.plot([0, 1], [0, 1], color=style.GREY, lw=1)
    right.plot(scores["base"], scores["tuned"], "o", color=style.BLUE, alpha=0.5)
    right.set(xlabel="score of the base", ylabel="score of the tuned model",
              xlim=(-0.05, 1.05), ylim=(-0.05, 1.05), title="A dot is a question")
    style.finish(fig, "own_scores", "this run; bars: 95 % bootstrap intervals")


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
    from huggingface_hub import ModelCardData
    base = str(options["model"])
    on_hub = "/" in base and not Path(base).exists()
    about = ModelCardData(library_name="peft", pipeline_tag="text-generation",
                          tags=["lora", "gemma4", "tpu"], base_model=base if on_hub else None)
    places = ("model", "data", "out")
    recipe = [f"--{name} {value}" for name, value in options.items() if name not in places]
    asks = f"\nEvery chat opened with this system message:\n\n> {system}\n" if system else ""
    return CARD.format(
        metadata=about.to_yaml(), title=title, rank=options["rank"], base=base,
        chats=len(rows.read_text("utf-8").splitlines()), repository="OWNER/gemma4-on-tpu",
        questions=len(compared["values"]), first=_shown(compared["first"]),
        second=_shown(compared["second"]), difference=_shown(compared["difference"], "+"),
        p=compared["p"], sha256=run.sha256_file(rows), held_out=options["validation"],
        recipe="\n".join(recipe), system=asks)


def _shown(interval: Interval, sign: str = "") -> str:
    mean, low, high = (f"{value:{sign}.2f}" for value in interval)
    return f"{mean} ({low} to {high})"


def label(folder: Path, base: str, text: str) -> None:
    """Give an adapter its card, and the base's own name instead of the folder it was staged in."""
    run.write_text(folder / "README.md", text)
    config = run.read_json(folder / "adapter_config.json")
    run.write_json(folder / "adapter_config.json", config | {"base_model_name_or_path": base})


def download(folder: Path) -> None:
    """Pack a folder beside itself; on Colab, hand it to the browser."""
    packed = Path(shutil.make_archive(str(folder), "zip", folder))
    print(f"{packed.stat().st_size / 1e6:.1f} MB in {os.path.relpath(packed)}")
    if "COLAB_RELEASE_TAG" in os.environ:
        from google.colab import files
        files.download(str(packed))


def push_to_hub(folder: Path, name: str, private: bool = True) -> str:
    """Upload a folder as a model of the hub; gives its address.

    Args:
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
