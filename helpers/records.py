"""The files that travel between pages, as records: what 02, 03 and 04 leave for later pages.

A record is read with `load`, which checks it, and written with `save`. On disk it's a JSON object
that people can read, with the same names. `samples.json` is a list of examples, and `load_samples`
reads it. Standard library only: 05, 06 and 07 read these files, too.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from helpers.run import UserError, changed, require, run_dir
from tables import files, records, stored

# What a checkpoint trained on whose recipe is older than these names.
OLDER = {"base_dtype": "", "int8_products": False}

# ── What all records can do ──


@dataclass(frozen=True)
class Record:
    """One JSON file of the run directory.

    A field with a default is one that older files lack, so it's optional, and it's written only
    where it says something else than the default. Names in a file that no field has are left alone.
    """

    PLACE: ClassVar[tuple[str, ...]]  # below the run directory
    PAGE: ClassVar[str]               # that writes it

    @classmethod
    def load(cls, where: str | Path | None = None) -> Self:
        """Read a record and check it.

        Args:
          where: the file, or the run directory that holds it; None is the run directory at hand.

        Raises:
          UserError: the file is missing or damaged, a field is missing, or it has another type.
            The text names the file, the field and the page that writes the file again.
        """
        path = Path(where) if where else run_dir()
        if where is None or path.is_dir():
            path = path.joinpath(*cls.PLACE)
        require(path, cls.PAGE)
        value = files.read_json(path, _fix(cls.PAGE))
        return cls.from_json(value, path)

    @classmethod
    def load_if_whole(cls, where: str | Path | None = None) -> Self | None:
        """As `load`, for the page that writes the file: None where it's missing or damaged."""
        try:
            return cls.load(where)
        except UserError:
            return None

    @classmethod
    def from_json(cls, value: Any, source: str | Path, page: str = "") -> Self:
        """A record from what JSON gave.

        Args:
          value: an object, as a dict.
          source: names the file in an error.
          page: that writes the file, if it isn't the record's own.

        Raises:
          UserError: as for `load`.
        """
        try:
            record = records.from_json(cls, value)
            record.check()
        except records.Misfit as error:
            raise UserError(f"{source} {error}. {_fix(page or cls.PAGE)}") from error
        return record

    def check(self) -> None:
        """Refuse what has the right types, and still isn't what a page writes.

        Raises:
          Misfit: names the field.
        """

    def to_json(self) -> dict[str, Any]:
        """The record as JSON holds it, names in the order of the fields.

        Raises:
          TypeError: a field has a value of another type than it says; that's a bug of ours.
        """
        return records.to_json(self)

    def save(self, where: str | Path | None = None) -> None:
        """Write the record to a file, or to its place below the run directory at hand.

        Raises:
          TypeError: see `to_json`.
        """
        path = where or run_dir(*self.PLACE)
        files.write_json(path, self.to_json())


def _fix(page: str) -> str:
    """What to do about a file that can't be used."""
    return (f"It's damaged, or from another version of this repository. Run {page} again, "
            "which writes it.")


# ── What the pages leave ──


def thinks(reasoning: str) -> bool:
    """Whether a model thinks before it answers that was trained with this setting of 02.

    Args:
      reasoning: "stripped", or "kept".
    """
    return reasoning == "kept"


class _AskedAs:
    """How a chat begins that's asked as the training chats were."""

    system: str | None
    reasoning: str

    @property
    def thinking(self) -> bool:
        """Whether the model thinks before it answers, as its training answers did."""
        return thinks(self.reasoning)

    @property
    def system_messages(self) -> list[dict[str, str]]:
        """The system message that opens a chat, in a list; an empty list without one."""
        if not self.system:
            return []
        return [{"role": "system", "content": self.system}]


@dataclass(frozen=True)
class DataMeta(_AskedAs, Record):
    """`data/meta.json`: 02's settings, and what it made with them."""

    PLACE: ClassVar = ("data", "meta.json")
    PAGE: ClassVar = "02_data.py"

    source: str
    system: str | None       # the message that opens every chat
    base: str
    rows: int                # at most so many were read
    max_tokens: int
    sequence_length: int     # T, tokens of a packed row
    reasoning: str           # "stripped" or "kept"
    validation: float        # share that's held out
    evaluation: str          # folder or .jsonl of the exam that mustn't be in the data; "": none
    seed: int
    size: str
    rows_in: int
    rows_kept: int
    dropped: dict[str, int]  # rows by the reason why they were left out
    tokens: int              # in the training rows, without padding
    fill: float              # share of the rows' places that aren't padding
    trained_tokens: int
    examples_per_row: float
    template_sha256: str
    tokenizer: str
    base_model: str          # its name
    base_path: str           # where it's fetched from
    train_examples: int
    val_examples: int
    train_rows: int
    val_rows: int
    files: dict[str, str]    # SHA-256 by the path below data/
    data_sha256: str         # of all of them

    @property
    def asks_verilog(self) -> bool:
        """Whether the exam is a folder of Verilog problems, and not a file of questions."""
        return bool(self.evaluation) and not self.evaluation.endswith(".jsonl")


@dataclass(frozen=True)
class Sample:
    """A held-out example of `data/samples.json`, which 03 and 05 ask again."""

    messages: list[dict[str, Any]]  # of the chat before the answer
    answer: str                     # the dataset's own


def load_samples(where: str | Path | None = None) -> list[Sample]:
    """The held-out examples that 02 left in `data/samples.json`, checked.

    Args:
      where: the file; None is the one in the run directory at hand.

    Raises:
      UserError: the file is missing or damaged, or an example isn't what 02 writes. The text names
        the file, the example and the page that writes the file again.
    """
    path = Path(where) if where else run_dir("data", "samples.json")
    page = DataMeta.PAGE
    fix = _fix(page)
    require(path, page)
    value = files.read_json(path, fix)
    if not isinstance(value, list) or not value:
        raise UserError(f"{path} holds {records.shown(value)} instead of a list of examples. {fix}")

    samples = []
    for number, entry in enumerate(value, 1):
        try:
            sample = records.from_json(Sample, entry)
            check_messages("messages", sample.messages)
        except records.Misfit as error:
            raise UserError(f"{path}: example {number} {error}. {fix}") from error
        samples.append(sample)
    return samples


def check_messages(name: str, messages: list[dict[str, Any]]) -> None:
    """Refuse what isn't a chat that can be asked.

    Args:
      name: of the field that holds the messages.
      messages: as JSON had them.

    Raises:
      Misfit: there's no message, or one lacks its role, or its content isn't text.
    """
    if not messages:
        raise records.Misfit(f"has no message in {name!r}")
    for message in messages:
        role = message.get("role")
        content = message.get("content", "")  # a message that calls a tool may have none
        if not isinstance(role, str) or not isinstance(content, str):
            raise records.Misfit(f"has {records.shown(message)} in {name!r}, which should be a "
                                 "message with a role and a text")


@dataclass(frozen=True)
class Recipe(_AskedAs, Record):
    """`train/recipe.json`: what decided the training, and what came out of it."""

    PLACE: ClassVar = ("train", "recipe.json")
    PAGE: ClassVar = "03_train.py"

    optimizer: str
    rank: int
    alpha: float
    targets: str              # pattern of the modules that have adapters
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    dtype: str                # of the arithmetic
    seed: int
    base_model: str           # its name
    base_sha256: str          # `weights.fingerprint` of its folder
    steps: int                # of the schedule
    rows_per_step: int
    data_sha256: str
    template_sha256: str
    size: str
    base_path: str
    adapter_dtype: str
    n_modules: int            # that have adapters
    trainable_parameters: int
    partial: bool             # whether modules were left out on purpose
    mesh: dict[str, int]
    checkpoints: str          # gs://..., or a path below the run directory
    final_step: int
    epochs: float
    system: str | None
    reasoning: str
    val_loss_before: float = field(metadata=records.MAY_BE_NAN)  # NaN: its log was lost
    val_loss_after: float
    examples_per_step: float
    adapter_sha256: str = ""  # `weights.adapters_digest` of the final adapters
    base_dtype: str = ""      # how the base was stored, if it was quantized (`helpers.quantized`)
    int8_products: bool = False

    @property
    def scale(self) -> float:
        """What A · B is multiplied with."""
        return self.alpha / self.rank

    @property
    def quantized(self) -> bool:
        """Whether the base was stored with fewer bits than its files have."""
        return self.base_dtype not in stored.PLAIN

    def check(self) -> None:
        """See `Record.check`: there's a rank to divide by, and we know how the base was stored."""
        if self.rank < 1:
            raise records.Misfit(f"has {self.rank} as 'rank', which should be 1 or more")
        if self.base_dtype not in (*stored.PLAIN, *stored.STORAGES):
            storages = ", ".join(stored.STORAGES)
            raise records.Misfit(f"has {records.shown(self.base_dtype)} as 'base_dtype', which "
                                 f"should be one of {storages}")

    def asked_otherwise(self, data: DataMeta) -> list[str]:
        """The names of what decides a prompt and has changed in the data since the training."""
        changed = []
        for name in ("system", "reasoning", "template_sha256"):
            if getattr(data, name) != getattr(self, name):
                changed.append(name)
        return changed


@dataclass(frozen=True)
class Answers(Record):
    """`train/answers.json`: a question that 03 asked, with the answers before and after."""

    PLACE: ClassVar = ("train", "answers.json")
    PAGE: ClassVar = "03_train.py"

    asked: list[dict[str, Any]]  # the chat's messages
    limit: int                   # tokens of an answer, at most
    before: str
    after: str

    def check(self) -> None:
        """See `Record.check`: the question is a chat that can be asked."""
        check_messages("asked", self.asked)


@dataclass(frozen=True)
class Merge(Record):
    """`merge.json`: what 04 merged, from what, and the SHA-256 of every file."""

    PLACE: ClassVar = ("merge.json",)
    PAGE: ClassVar = "04_merge.py"

    inputs: dict[str, Any]        # step and hashes; equal inputs give equal files
    step: int
    scale: float
    base: str                     # the folder that was merged into
    recipe: Recipe
    files: dict[str, str]         # SHA-256 by the path below merged/
    adapter_files: dict[str, str]  # below adapter/
    norms: list[dict[str, Any]]   # of the deltas, a row for each matrix
    adapter_base: str = ""        # where the adapter is served on another base than the recipe's

    def compare_files(self, name: str) -> int:
        """How many files `merged/` or `adapter/` holds, by `name`, if they're those that 04 wrote.

        Raises:
          UserError: a file is missing, has other bytes, or is one too many.
        """
        folder = run_dir(name)
        known = {"merged": self.files, "adapter": self.adapter_files}[name]
        if wrong := changed(folder, known):
            raise UserError(f"{folder} is not what 04_merge wrote: {wrong}. Copy it again, or run "
                            "04_merge.")
        return len(known)

    def check(self) -> None:
        """See `Record.check`: the recipe's own check, and the norms have what 04 draws."""
        if not self.norms:
            raise records.Misfit("has no 'norms'")
        try:
            self.recipe.check()
        except records.Misfit as error:
            raise records.Misfit(f"has a 'recipe' that {error}") from error
        for row in self.norms:
            numbers = [row.get(name) for name in ("base", "delta", "rounding")]
            is_named = isinstance(row.get("tensor"), str)
            if not is_named or not all(type(number) in (int, float) for number in numbers):
                raise records.Misfit(f"has {records.shown(row)} in 'norms', which should be a "
                                     "tensor with three norms")


@dataclass(frozen=True)
class Comparison(Record):
    """`eval/comparison.json`: both models' scores in 07, and what the tuning brought."""

    PLACE: ClassVar = ("eval", "comparison.json")
    PAGE: ClassVar = "07_eval.py"

    rival: str                          # the plan by which the base is asked in the primary one
    against: dict[str, dict[str, Any]]  # difference, interval and p by the base's plan
    model_hash: str
    plan: dict[str, Any]                # by which the tuned model is asked
    n_winnable: int                     # problems whose reference passes
    base: dict[str, float]              # shares that pass, such as "pass@1"; and "n_problems"
    tuned: dict[str, float]

    def check(self) -> None:
        """See `Record.check`: what README and a report quote is there."""
        for scores in (self.base, self.tuned):
            for name in ("pass@1", "n_problems"):
                if name not in scores:
                    raise records.Misfit(f"has no {name!r} of a model")
        for compared in self.against.values():
            is_whole = len(compared.get("interval", ())) == 2
            if not is_whole or not {"difference", "p"} <= compared.keys():
                raise records.Misfit(f"has {records.shown(compared)} in 'against', which should "
                                     "be a difference, its interval and p")
