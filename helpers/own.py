"""A reader's own chats, from the file to the hub: what own_data.py needs beside `recipe.py`.

It looks at rows and draws them, writes them as `recipe.py` reads them, shows what that prints, asks
what was held out, draws the scores, and makes the model card that goes with an adapter.
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

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from helpers import chat, data, gemma, run, style
from helpers.chat import Message
from helpers.records import thinks
from helpers.run import UserError
from tables.texts import split_thought

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from tunix.models.gemma4.model import Gemma4

Compared = Mapping[str, Any]  # from `verilog.compare`, the base first
ENDS = (chat.TURN_END, chat.RESULT)
STEP = re.compile(r"^step (\d+)/(\d+) (\{.*\})$")  # as recipe.py prints it
SIDE = re.compile(r"^(\d+) answers; (\d+) more are too long$")  # trained, then held out
REPOSITORY = "OWNER/gemma4-on-tpu"
TINY = "assets/tiny_gemma4"
SHOWN_STEPS = 10  # every tenth step is shown
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
    cleaned = data.clean_all(rows, source, forms="docs/OWN_DATA.md",
                             keep_reasoning=thinks(reasoning))
    examples = cleaned.examples
    print(f"{len(examples):,} of {len(rows):,} rows of {source} are kept")
    for line in data.remarks(examples):
        print(line)

    chats = []
    for example in examples:
        messages = data.as_messages(example, system, reasoning)
        chats.append(messages)
    return Rows(chats, cleaned.dropped)


def draw_rows(rows: Rows, lengths: Sequence[int], limit: int) -> None:
    """A picture of a file: how long its chats are, and what becomes of its rows if some are lost.

    Args:
      rows: from `look`.
      lengths: tokens of each kept chat.
      limit: the tokens that a packed row holds. Longer chats aren't trained.
    """
    counts = _fates(rows, lengths, limit)
    lost = len(counts) > 1
    height = 2.4 + lost * (0.8 + 0.32 * len(counts))  # inches: a bar needs 0.32
    fig, axes = style.figure(7, height, rows=1 + lost, squeeze=False)
    if lost:
        _draw_fates(axes[1, 0], counts)

    ax = axes[0, 0]
    longest = max(lengths)
    width = max(1, round(longest / 25))  # of a bar, in whole tokens
    ax.hist(lengths, bins=range(0, longest + width + 1, width), color=style.BLUE)
    if limit < 1.5 * longest:  # else there'd be nothing between the chats and the limit
        ax.axvline(limit, color=style.RED, ls="--", label=f"limit: {limit:,}")
        ax.legend()
    else:
        ax.text(1, 0.9, f"limit: {limit:,} →", color=style.RED, ha="right", transform=ax.transAxes)
    fit = counts.get("kept", 0)
    title = f"{fit:,} of {len(lengths):,} chats fit into a row of {limit:,} tokens"
    if fit == len(lengths):
        title = (f"The longest of {fit:,} chats has {longest:,} tokens, "
                 f"and a row holds {limit:,}")
    ax.set(title=title)
    ax.set(xlabel="tokens", ylabel="chats", xlim=(0, None))
    style.finish(fig, "own_rows", f"{len(lengths):,} chats of the file")


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
    colors = []
    for name in names:
        widths.append(counts[name])
        colors.append(style.BLUE if name == "kept" else style.ORANGE)

    bars = ax.barh(names, widths, color=colors)
    ax.bar_label(bars, padding=3)
    right_edge = 1.15 * max(widths)  # leaves room for the numbers
    ax.set(title="What becomes of the rows", xticks=[], xlim=(0, right_edge))
    ax.grid(False)


def typical(lengths: Sequence[int], limit: int) -> int:
    """The place of a chat of average length, among those that fit into a row of `limit` tokens.

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
    """Write chats as `recipe.py` reads them, one a line, each with its tools in a column.

    A system message that says nothing is left out: it's only there to hold the tools.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for chat_messages in chats:
        messages = [_as_sent(message) for message in chat_messages]
        row: dict[str, Any] = {"messages": messages}
        tools = messages[0].pop("tools", None)
        if tools:
            row["tools"] = tools
        if messages[0]["role"] == "system" and not messages[0]["content"].strip():
            del messages[0]
        lines.append(json.dumps(row) + "\n")
    run.write_text(path, "".join(lines))


def _as_sent(message: Message) -> Message:
    """A copy of a message, with its calls' arguments as JSON texts, as the OpenAI API has them.

    `recipe.py` leaves out nulls of arguments that are objects, if a tool doesn't take them.
    """
    sent = dict(message)
    if "tool_calls" not in message:
        return sent
    sent["tool_calls"] = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        function["arguments"] = json.dumps(function["arguments"])
        sent["tool_calls"].append({**call, "function": function})
    return sent


# ── Training ──


class Screen:
    """A stream for what recipe.py prints: a log gets every line, the screen fewer and rounder ones.

    The screen answers whatever else the stream is asked.
    """

    def __init__(self, screen: TextIO, log: TextIO) -> None:
        self.screen = screen
        self.log = log
        self._begun = ""  # a line that has no end yet
        self._sides = ["to train on", "held out"]

    def write(self, text: str) -> int:
        """Write to both; gives the number of letters."""
        self.log.write(text)
        self.log.flush()
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            shown = self._shown(line)
            if shown:
                self.screen.write(f"{shown}\n")
        return len(text)

    def _shown(self, line: str) -> str:
        """A line as a reader wants it; "" for a step that isn't shown."""
        side = SIDE.match(line)
        if side and self._sides:
            return f"{self._sides.pop(0)}: {line}"
        step = STEP.match(line)
        if not step:
            return line
        number, last = int(step[1]), int(step[2])
        values = _values(step[3])
        if number % SHOWN_STEPS and number not in (1, last) and "held-out loss" not in values:
            return ""
        told = [f"{name} {value:.3f}" for name, value in values.items()]
        return f"step {number} of {last}: {', '.join(told)}"

    def flush(self) -> None:
        """Show what was written."""
        self.screen.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.screen, name)


def _values(text: str) -> dict[str, float]:
    """The losses of a step's line."""
    return dict(json.loads(text.replace("'", '"')))


def mark(options: Mapping[str, object], chats: Sequence[Sequence[Message]]) -> str:
    """Eight letters for a recipe and its rows: a folder's name that no other run has."""
    rows = [list(messages) for messages in chats]
    return run.digest([dict(options), rows])[:8]


def train(main: Callable[[list[str]], None], options: Mapping[str, object], out: Path) -> None:
    """Train out/rows.jsonl by `recipe.main`; out/log.txt gets what it prints, the screen the gist.

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
        shown_and_kept = Screen(sys.stdout, log)
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
        for name, value in _values(match[3]).items():
            by_step[name][step] = value
    return {name: sorted(values.items()) for name, values in by_step.items()}


class Counts(NamedTuple):
    """Answers, as recipe.py counted them."""

    trained: int
    held_out: int


def counts(log: Path) -> Counts:
    """How many answers were trained, and how many held out, by a log's newest lines on it.

    Raises:
      UserError: the log doesn't say.
    """
    found = []
    for line in log.read_text("utf-8").splitlines():
        match = SIDE.match(line)
        if match:
            found.append(int(match[1]))
    if len(found) < 2:
        raise UserError(f"{log} doesn't say how many answers were trained. Train again.")
    trained, held_out = found[-2:]
    return Counts(trained, held_out)


def draw_losses(log: Path, blind: int = 0) -> None:
    """Draw the loss of each step and the held-out losses of a log, and say what to do.

    Args:
      blind: tokens that a blind guess chooses from, for a dotted line; 0: no line.
    """
    from matplotlib.ticker import LogLocator, NullLocator
    curves = losses(log)
    fig, ax = style.figure(7, 3)
    trained = np.array(curves["loss"]).reshape(-1, 2)  # (step, loss) a row, of any number
    ax.plot(trained[:, 0], trained[:, 1], color=style.BLUE, alpha=0.5, label="trained rows")
    held_out = curves["held-out loss"]
    if held_out:
        measured = np.array(held_out)
        ax.plot(measured[:, 0], measured[:, 1], "o-", color=style.GREEN, label="held-out rows")

    if blind:
        ax.axhline(np.log(blind), color=style.GRAY, ls=":", label="a blind guess")
    ax.set(xlabel="optimizer step", ylabel="nats per trained token", title=advice(held_out))
    ax.set(xlim=(0, None), yscale="log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.legend()
    style.finish(fig, "own_loss", f"{len(trained)} steps of this run; logarithmic axis")


def advice(held_out: Sequence[tuple[int, float]]) -> str:
    """What the held-out losses, (step, nats), advise to do next."""
    if not held_out:
        return "Nothing was held out, so nobody can say when to stop"
    best_step, _ = min(held_out, key=lambda pair: pair[1])
    last_step, _ = held_out[-1]
    if best_step < last_step:
        return f"Lowest at step {best_step} of {last_step}: train for fewer epochs"
    return "Held-out loss is lowest at the last step: more epochs may help"


# ── Questions ──


class Question(NamedTuple):
    """What a held-out chat asks first, and what it answers."""

    asked: list[Message]
    wanted: str
    thought: str = ""  # what comes before the answer, if thoughts are trained


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
        asked = chat.prompt_ids(tokenizer, question.asked, bool(question.thought))
        if len(asked) + _length(tokenizer, question) <= limit:
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
    A thought counts, too.

    A tenth is added for other wordings, and two tokens for the end.
    """
    lengths = [_length(tokenizer, question) for question in exam]
    return int(1.1 * max(lengths)) + 2


def _length(tokenizer: Any, question: Question) -> int:
    """Tokens of what the model has to write: its thought, if there is one, and the answer."""
    written = question.wanted
    if question.thought:
        written = f"{chat.CHANNEL}thought\n{question.thought}\n{chat.CHANNEL_END}{written}"
    [ids] = chat.encode_texts(tokenizer, [written])
    return len(ids)


def _first_prompt(messages: Sequence[Message]) -> str:
    """What a chat's user writes first."""
    return next(message["content"] for message in messages if message["role"] == "user")


def _first_question(tokenizer: Any, messages: list[Message]) -> Question:
    """A chat up to its first trained answer, and that answer as the model has to write it."""
    place = 0
    while not _is_trained_answer(messages[place]):
        place += 1
    answer = dict(messages[place])
    thought = answer.pop("reasoning", None) or ""
    asked = [dict(message) for message in messages[:place]]

    ids, _ = chat.render(tokenizer, [*asked, answer])
    prompt = chat.prompt_ids(tokenizer, asked)
    written = tokenizer.decode(ids[len(prompt):])
    return Question(asked, without_end(written), thought)


def _is_trained_answer(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("train", True))


def without_end(text: str) -> str:
    """An answer without the control token that ends it."""
    for end in (*ENDS, "<eos>"):
        text = text.removesuffix(end)
    return text.strip()


class Asker:
    """A model before and after, asked by one compiled program.

    Args:
      model: with adapters.
      adapters: {name: adapters}; before the training they're those that change nothing.
      tokenizer: from `chat.load_tokenizer`.
      mesh: that the model lives on.
      exam: questions; the program is made for as many, and for their lengths. If one of them has a
        thought, all are asked as questions that a model may think about, and the thoughts are
        left out of what `ask` returns.
    """

    def __init__(self, model: Gemma4, adapters: Mapping[str, nnx.State], tokenizer: Any,
                 mesh: Mesh, exam: Sequence[Question]) -> None:
        self.model = model
        self.adapters = adapters
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.limit = longest(tokenizer, exam)
        self._rows = len(exam)
        self._stops = chat.stop_ids(tokenizer)
        self._thinks = any(question.thought for question in exam)
        lengths = [len(self._prompt(question.asked)) for question in exam]
        self._at_once = gemma.read_at_once(np.array(lengths))
        self._program = gemma.answer_program(model, mesh, self._at_once, self._stops)

    def _prompt(self, messages: list[Message]) -> list[int]:
        return chat.prompt_ids(self.tokenizer, messages, self._thinks)

    def ask(self, name: str, chats: Sequence[list[Message]]) -> list[str]:
        """Greedy answers to chats, which are lists of messages, with the adapters of this name."""
        prompts = [self._prompt(messages) for messages in chats]
        missing = self._rows - len(prompts)
        padded = prompts + prompts[:1] * missing  # the program is compiled for so many rows
        is_short = min(map(len, prompts)) < self._at_once  # then it needs a program of its own
        nnx.update(self.model, self.adapters[name])
        plural = "" if len(chats) == 1 else "s"
        text = f"{name}: {len(chats)} answer{plural} of at most {self.limit} tokens"
        with run.phase(text):
            answers = gemma.greedy(
                self.model,
                padded,
                self.limit,
                self._stops,
                self.mesh,
                program=None if is_short else self._program)
        texts = []
        for ids in answers[:len(prompts)]:
            text = self.tokenizer.decode(ids)
            texts.append(without_end(split_thought(text).rest))
        return texts


def before_and_after(model: Gemma4, checkpoints: Path,
                     restore: Callable[[Path, nnx.State], tuple[int, nnx.State]]
                     ) -> dict[str, nnx.State]:
    """{"base": adapters that change nothing, "tuned": those of the newest checkpoint}.

    Args:
      model: with fresh adapters.
      checkpoints: recipe.py's folder.
      restore: `recipe.restore`.
    """
    fresh = jax.tree.map(lambda array: array, nnx.state(model, nnx.LoRAParam))
    step, tuned = restore(checkpoints, fresh)
    print(f"the base, and the adapter of step {step} beside it")
    return {"base": fresh, "tuned": tuned}


# ── Scores ──


def other_answers(exam: Sequence[Question], score: Callable[[str, str], float]) -> float:
    """The mean score of a right answer to the wrong question: what the form alone is worth."""
    values = []
    for place, question in enumerate(exam):
        neighbor = exam[place - 1]
        values.append(score(neighbor.wanted, question.wanted))
    return float(np.mean(values))


def overlap(answer: str, wanted: str) -> float:
    """How far the words of two texts agree, 0 to 1: F1 of their words, as in SQuAD."""
    words = Counter(data.words_of(answer))
    due = Counter(data.words_of(wanted))
    common = words & due
    return 2 * common.total() / max(1, words.total() + due.total())


def listed(text: str) -> list[str]:
    """The details that a text lists: "it has: a, b and c." gives a, b and c; at least one."""
    _, _, after = text.strip().rstrip(".").rpartition(": ")
    return after.replace(" and ", ", ").split(", ")


def draw_scores(compared: Mapping[str, Compared], form_alone: Mapping[str, float]) -> None:
    """Each score of both models, and below it the paired difference with its interval.

    Args:
      compared: {name of a score: base and tuned model on the same questions}.
      form_alone: {name of a score: from `other_answers`}.
    """
    names = list(compared)
    fig, (above, below) = style.figure(7, 4.8, rows=2, height_ratios=(1.5, 1))
    for place, name in enumerate(names):
        _draw_pair(above, place, compared[name])
        floor = 100 * form_alone[name]
        above.plot([place - 0.4, place + 0.4], [floor, floor], color=style.RED, ls="--")
        _draw_difference(below, place, compared[name])
    count = len(compared[names[0]]["values"])
    parts = [f"{name} {100 * compared[name]['second'][0]:.3g}%" for name in names]
    verdict = ": more form than facts" if flatters(compared) else ""
    above.set(title=f"Tuned: {', '.join(parts)}{verdict}")
    above.set(xticks=range(len(names)), xticklabels=names, ylim=(0, 115), ylabel="score, %")
    above.bar(0, 0, color=style.GRAY, label="base")
    above.bar(0, 0, color=style.BLUE, label="tuned")
    above.plot([], [], color=style.RED, ls="--", label="an answer to another question")
    above.legend(loc="upper right", fontsize=9)
    below.axvline(0, color=style.BLACK, lw=1)
    below.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    below.set(xlabel="tuned minus base, points, question by question")
    style.finish(fig, "own_scores", f"this run, {count} held-out questions; bars: 95%")


def _draw_pair(ax: Axes, place: int, compared: Compared) -> None:
    """Two bars for one score, with their numbers: the base's, and the tuned model's."""
    for offset, part, color in ((-0.2, "first", style.GRAY), (0.2, "second", style.BLUE)):
        height = 100 * compared[part][0]
        ax.bar(place + offset, height, color=color, width=0.36)
        ax.annotate(f"{height:.3g}", (place + offset, height), xytext=(0, 6),
                    textcoords="offset points", ha="center")


def _draw_difference(ax: Axes, place: int, compared: Compared) -> None:
    """A dot for the mean of the paired differences, with its interval."""
    mean, low, high = (100 * part for part in compared["difference"])
    ends = [[mean - low], [high - mean]]
    ax.errorbar(mean, place, xerr=ends, fmt="o", color=style.BLUE, capsize=4, lw=2)
    ax.annotate(f"{mean:+.3g}", (mean, place - 0.2), ha="center")


def flatters(compared: Mapping[str, Compared]) -> bool:
    """Is the tuned model's last score, a strict one, less than half of its first, a loose one?"""
    loose, *_, strict = compared.values()
    return bool(strict["second"][0] < 0.5 * loose["second"][0])


def meaning(compared: Mapping[str, Compared], form_alone: Mapping[str, float]) -> list[str]:
    """What the scores say, a line each, and first how many answers are right.

    The first score is a loose one, the last one strict.

    Args:
      compared, form_alone: as in `draw_scores`.
    """
    loose, *_, strict = compared
    count = len(compared[strict]["values"])
    right = round(compared[strict]["second"][0] * count)
    before = round(compared[strict]["first"][0] * count)
    lines = [f"{strict}: {right} of {count} tuned answers are right, and {before} of the base's."]
    for name, one in compared.items():
        mean, low, high = (100 * part for part in one["difference"])
        found = "so no difference is shown"
        if low > 0:
            found = "so tuning raised it"
        if high < 0:
            found = "so tuning lowered it"
        lines.append(f"{name}, tuned minus base: {mean:+.1f} points ({low:+.1f} to {high:+.1f}), "
                     f"{found}")

    lines.append(f"A right answer to another question gets {form_alone[loose]:.0%} by {loose}.")
    if flatters(compared):
        score = compared[loose]["second"][0]
        lines.append(f"So {loose} flatters: {score:.0%}, with {right} of {count} answers right. "
                     "The model has learned more of the form than of the facts.")
    else:
        lines.append(f"{strict} doesn't contradict it.")
    return lines


# ── To keep, and to give away ──

CARD = """---
{metadata}
---

# {title}

A LoRA adapter of rank {rank} for `{base}`, trained on {trained:,} answers with one file,
[recipe.py](https://github.com/{repository}/blob/main/recipe.py).

## Scores

Asked greedily, {questions} of the {held_out:,} held-out answers' questions; percent, the difference
with its 95% interval over questions, and p: how often equally good models would differ as much. The
last column is what a right answer to *another* question gets: so much of a score is worth nothing.

| score | base | tuned | difference | a wrong answer |
|---|---|---|---|---|
{scores}

## Data

SHA-256 of the rows: `{sha256}`. {trained:,} answers were trained, and {held_out:,} were held out.

## Recipe

```text
{recipe}
```

## Use

{place}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = "{base}"
tokenizer = AutoTokenizer.from_pretrained(base)  # its chat template is the one of the training
model = AutoModelForCausalLM.from_pretrained(base, dtype="{dtype}")
model = PeftModel.from_pretrained(model, "{title}")  # this adapter: its folder, or name on the hub
chat = {chat}
ids = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True{thinking})
answer = model.generate(**ids, max_new_tokens=200, do_sample=False)
print(tokenizer.decode(answer[0, ids["input_ids"].shape[1]:]))
```

Ask it as it was trained: {system}.
"""


def card(title: str, options: Mapping[str, object], out: Path, compared: Mapping[str, Compared],
         form_alone: Mapping[str, float], system: str = "") -> str:
    """The model card of an adapter: base, data, recipe, scores, and how to ask it.

    Args:
      title: the adapter's name, as on the hub.
      options: those of `train`.
      out: the folder that `train` has filled.
      compared, form_alone: as in `draw_scores`.
      system: the sentence that opened every chat; "": none.

    Raises:
      UserError: the log doesn't say how many answers were trained.
    """
    base = str(options["model"])
    recipe = []
    for name, value in options.items():
        if name not in ("model", "data", "out"):  # they're places on the machine that trained
            recipe.append(f"--{name} {value}")
    chat_asked = [{"role": "user", "content": "..."}]
    asked = "without a system message"
    if system:
        chat_asked.insert(0, {"role": "system", "content": system})
        asked = "with the system message of these lines"
    thinking = ""
    if thinks(str(options.get("reasoning"))):
        thinking = ", enable_thinking=True"

    answers = counts(out / "log.txt")
    first_score = next(iter(compared.values()))
    return CARD.format(
        metadata=_card_metadata(base),
        title=title,
        rank=options["rank"],
        base=base,
        trained=answers.trained,
        held_out=answers.held_out,
        repository=REPOSITORY,
        questions=len(first_score["values"]),
        scores=_score_rows(compared, form_alone),
        sha256=run.sha256_file(out / "rows.jsonl"),
        recipe="\n".join(recipe),
        place=_place_of(base),
        dtype=options.get("dtype", "bfloat16"),
        chat=json.dumps(chat_asked, ensure_ascii=False),
        thinking=thinking,
        system=asked,
    )


def _place_of(base: str) -> str:
    """Where whoever downloads an adapter finds its base."""
    if _is_on_hub(base):
        return f"The base is [{base}](https://huggingface.co/{base}) on the hub."
    if base == TINY:
        return (f"The base is a folder of [this repository](https://github.com/{REPOSITORY}). "
                "Clone it, and start Python in it.")
    return (f"The base, `{base}`, is a folder on the machine that trained. You need the same "
            "weights; put their folder's path, or their name on the hub, in the first lines.")


def show_card(text: str, heading: str = "## Data") -> None:
    """Print a card up to a heading; the whole of it opens with a click."""
    opening, _, _ = text.partition(heading)
    print(opening)
    style.folded_text("The whole card", text)


def _is_on_hub(base: str) -> bool:
    """Is a base's name one of the hub, not a folder here?"""
    return "/" in base and not Path(base).exists()


def _score_rows(compared: Mapping[str, Compared], form_alone: Mapping[str, float]) -> str:
    """A card's rows of scores, in percent, the strictest first."""
    rows = []
    for name, one in reversed(list(compared.items())):
        base, tuned = 100 * one["first"][0], 100 * one["second"][0]
        mean, low, high = (100 * part for part in one["difference"])
        difference = f"{mean:+.1f} ({low:+.1f} to {high:+.1f}), p = {one['p']:.2g}"
        floor = 100 * form_alone[name]
        rows.append(f"| {name} | {base:.1f} | {tuned:.1f} | {difference} | {floor:.1f} |")
    return "\n".join(rows)


def _card_metadata(base: str) -> str:
    """The YAML that opens a card. It names the base if that's on the hub, not a folder here."""
    from huggingface_hub import ModelCardData
    metadata = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", "gemma4", "tpu"],
        base_model=base if _is_on_hub(base) else None,
    )
    return str(metadata.to_yaml())


def label(folder: Path, base: str, text: str) -> None:
    """Give an adapter its card, and the base's own name instead of the folder it was staged in.

    Raises:
      UserError: the adapter's settings can't be read.
    """
    path = folder / "adapter_config.json"
    config = run.read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} isn't an adapter's settings. Run this page again from the cell "
                        "that trains.")
    run.write_text(folder / "README.md", text)
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
