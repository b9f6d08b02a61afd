"""Ask a model that's in this process: chats in, greedy answers out (00, 03, 04)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from helpers import chat, gemma
from helpers.records import DataMeta, Sample

COUNTER = Path("data/tiny_eval/Prob031_updown_prompt.txt")  # the series' running example


def ask(
    model: nnx.Module,
    tokenizer: Any,
    chats: Sequence[list[dict]],
    limit: int,
    mesh: Mesh,
    thinking: bool = False,
    control: bool = False,
) -> list[str]:
    """Greedy answers (always the likeliest token) to chats, as text.

    Args:
      model: a Tunix Gemma 4, with or without adapters.
      tokenizer: from `chat.load_tokenizer`.
      chats: lists of messages, each ending with the user's.
      limit: tokens of an answer at most.
      mesh: that the model lives on.
      thinking: as in `chat.prompt_ids`.
      control: write control tokens, too. A call of a tool can only be read with them.
    """
    prompts = [chat.prompt_ids(tokenizer, messages, thinking) for messages in chats]
    stops = chat.stop_ids(tokenizer)
    answers = gemma.greedy(model, prompts, limit, stops, mesh)
    without_control = not control
    return [tokenizer.decode(ids, skip_special_tokens=without_control) for ids in answers]


def ask_folder(
    folder: str | Path, chats: Sequence[list[dict]], limit: int, thinking: bool = False
) -> list[str]:
    """`ask` for a model folder in Hugging Face's layout, loaded on one device without adapters."""
    config = gemma.config_from_hf(folder)
    first_device = jax.devices()[:1]
    mesh = gemma.make_mesh(config, (1, 1), first_device)
    model = gemma.load_base(folder, config, mesh)
    tokenizer = chat.load_tokenizer(folder)
    return ask(model, tokenizer, chats, limit, mesh, thinking)


def requests_of(meta: DataMeta, samples: Sequence[Sample]) -> list[list[dict]]:
    """The chats that 03 asks before and after training: the counter, then the held-out samples.

    With a reader's own data the first sample takes the counter's place.

    Args:
      meta: of the data.
      samples: from `records.load_samples`.
    """
    question = samples[0].messages[-1]["content"]
    if meta.asks_verilog:  # the series' own data
        question = COUNTER.read_text(encoding="utf-8").strip()
    asked = {"role": "user", "content": question}
    chats: list[list[dict]] = [[*meta.system_messages, asked]]
    for sample in samples:
        chats.append(sample.messages)
    return chats
