"""Greedy continuations by vLLM in float32, in .venv-serve: greedy_vllm.py JOB.json OUT.json."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")


def main(job, out):
    from serving import vllm_cpu

    vllm_cpu.patch_version()
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job).read_text())
    llm = LLM(
        job["model"],
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    settings = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in job["prompts"]], settings, use_tqdm=False
    )
    Path(out).write_text(json.dumps([list(o.outputs[0].token_ids) for o in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
