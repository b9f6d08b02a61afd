"""Greedy continuations by Tunix's Gemma 4 in float32. Usage: greedy_jax.py JOB.json OUT.json (in .venv)."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(job, out):
    from helpers import gemma, read_json
    job = json.loads(Path(job).read_text())
    config = gemma.config_from_hf(job["model"], dtype="float32")
    mesh = gemma.make_mesh(config)
    model = gemma.load_base(job["model"], config, mesh)
    stops = read_json(Path(job["model"]) / "generation_config.json")["eos_token_id"]
    Path(out).write_text(json.dumps(
        gemma.greedy(model, job["prompts"], job["max_tokens"], stops, mesh)))


if __name__ == "__main__":
    main(*sys.argv[1:])
