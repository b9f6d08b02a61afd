"""Tokenising and packing 10,000 CodeV-R1-like rows: ours against the published script's way.

    .venv/bin/python tests/benchmarks/bench_data.py [--rows 10000]

The published way (arXiv 2605.25645, in our own code): one row at a time, tokenise the whole chat,
then every piece of it again to find the mask, pad to 3,072. Ours: chats rendered in batches, ids and mask
once, written to the cache, packed into rows of 4,096. Both take turns on the same rows, 1,000 at a
time. Other work on the machine adds time, and takes the second core that only ours uses; so beside
the sums stands the ratio of both ways' fastest turns (per id). Exits with 1 if ours is not 3 times as
fast by the sums or by the fastest turns, or if all rows packed together are less than 95 % full, or
take more than 60 s or 2 GB.
"""

import argparse
import gzip
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from helpers import chat  # noqa: E402
from helpers.data import codev_lengths, published_row, render_all  # noqa: E402
from helpers.opening import quiet  # noqa: E402
from helpers.packing import pack_arrays  # noqa: E402


def codev_like(tokenizer, lengths, seed):
    """Examples of about these lengths, from the words of the tiny set's prompts and answers."""
    with gzip.open(ROOT / "data" / "tiny" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:500]
    texts = [row["prompt"] + "\n" for row in rows], [row["response"] + "\n" for row in rows]
    sizes = [[len(ids) for ids in chat.encode_texts(tokenizer, part)] for part in texts]
    rng, examples = np.random.default_rng(seed), []
    for length in lengths:
        parts = []
        for part, count, share in zip(texts, sizes, (0.4, 0.55)):
            picked, total = [], 0
            while total < length * share - 40:
                place = int(rng.integers(len(part)))
                picked.append(part[place])
                total += count[place]
            parts.append("".join(picked))
        examples.append(parts)
    return examples


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    count = parser.parse_args().rows
    quiet()
    tokenizer = chat.load_tokenizer(ROOT / "assets" / "tiny_gemma4")
    examples = codev_like(tokenizer, codev_lengths(count, 0), 0)
    system = {"role": "system", "content": "Write the Verilog module that is asked for."}
    chats = [[system, {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
             for prompt, answer in examples]
    chat.render(tokenizer, chats[0])  # neither pays for what is made once
    turns, ids, masks = [], [], []

    def now():  # wall clock and this process's own CPU seconds
        return np.array([time.perf_counter(), time.process_time()])
    for place in range(0, count, 1_000):
        began = now()
        for prompt, answer in examples[place:place + 1_000]:
            row, mask = published_row(tokenizer, prompt, answer)
            np.pad(np.array(row[:3_072], np.int32), (0, max(0, 3_072 - len(row))))
            np.pad(np.array(mask[:3_072]), (0, max(0, 3_072 - len(row))))
        published = now() - began
        with tempfile.TemporaryDirectory() as folder:
            began = now()
            part = render_all(tokenizer, chats[place:place + 1_000], Path(folder) / "rendered")
            rendered = now() - began
            pack_arrays(*part, 4_096, 0)
            packed = now() - began - rendered
        turns.append([published, rendered, packed, [sum(map(len, part[0]))] * 2])
        ids += part[0]
        masks += part[1]
    turns = np.array(turns)  # [turn, what, wall or CPU]
    theirs, ours, total = turns[:, 0], turns[:, 1] + turns[:, 2], turns.sum(0)
    fastest = (theirs / turns[:, 3]).min(0) / (ours / turns[:, 3]).min(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    began = now()
    keep = [i for i, row in enumerate(ids) if len(row) <= 4_096]
    packed = pack_arrays([ids[i] for i in keep], [masks[i] for i in keep], 4_096, 0)
    packing = now() - began
    fill = (packed["segment_ids"] > 0).mean()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    mean = np.mean([len(row) for row in ids])
    print(f"{count} rows, mean {mean:.0f} ids, two ways side by side; seconds and (CPU seconds)")
    for name, (wall, cpu) in {"published way": total[0], "ours: rendering": total[1],
                              "ours: packing": total[2], "packing all": packing}.items():
        print(f"{name:16} {wall:6.2f} ({cpu:.2f})")
    sums = total[0] / (total[1] + total[2])
    print(f"ratio of sums {sums[0]:.2f} ({sums[1]:.2f}), of the fastest of {len(turns)} turns "
          f"{fastest[0]:.2f} ({fastest[1]:.2f}); by turn "
          + " ".join(f"{ratio:.2f}" for ratio in theirs[:, 0] / ours[:, 0]))
    print(f"packed together: fill {fill:.1%}, peak {peak:.2f} GiB, before {before:.2f}")
    quick = max(sums[0], fastest[0]) >= 3
    sys.exit(0 if quick and fill >= 0.95 and packing[0] <= 60 and peak <= 2 else 1)


if __name__ == "__main__":
    main()
