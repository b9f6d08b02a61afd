"""Log-probabilities of the same prompts in HF transformers, PEFT and vLLM (runs in .venv-serve).

    .venv-serve/bin/python tests/merge_parity.py JOB.json WHAT OUT.npz

JOB.json: {"base", "merged", "adapter", "adapter_k_only", "dtype", "prompts": [[id, ...], ...]}.
WHAT is `hf` (arrays `base`, `merged`, `adapter`), `vllm-merged` (`merged`) or `vllm-adapter`
(`base`, `adapter`, `adapter_k_only`). Each array is [positions, vocabulary]: for every prompt,
every position but the first. Called by tests/test_merge.py, which also knows what Tunix says.
WHAT `bases` takes {"folders": {name: folder}, "dtype", "prompts"} and makes an array per folder.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
MAPPING = {"^model.language_model.": "model."}  # transformers' text class wants other names


def from_hf(job):
    """HF with the base, the merged folder, and the base under PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def run(model):
        rows = []
        with torch.no_grad():
            for ids in job["prompts"]:
                logits = model(torch.tensor([ids])).logits[0, :-1]
                rows.append(torch.log_softmax(logits.float(), -1).numpy())
        return np.concatenate(rows)

    def load(folder):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, job["dtype"]), key_mapping=MAPPING,
            attn_implementation="eager").eval()

    if "folders" in job:
        return {name: run(load(folder)) for name, folder in job["folders"].items()}
    results = {"merged": run(load(job["merged"])), "base": run(load(job["base"]))}
    adapted = PeftModel.from_pretrained(load(job["base"]), job["adapter"], key_mapping=MAPPING)
    return {**results, "adapter": run(adapted.eval())}


def from_vllm(job, adapters):
    """vLLM's offline engine: the merged folder, or the base with and without adapters."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING",
                      VLLM_ENABLE_V1_MULTIPROCESSING="0", CUDA_VISIBLE_DEVICES="")
    from serving.vllm_cpu import patch_version
    patch_version()
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest
    lora = dict(enable_lora=True, max_lora_rank=job["max_lora_rank"], max_loras=1
                ) if adapters else {}
    engine = LLM(model=job["base" if adapters else "merged"], dtype=job["dtype"], max_model_len=512,
                 skip_tokenizer_init=True, enforce_eager=True, max_logprobs=-1, seed=0,
                 enable_prefix_caching=False, **lora)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)

    def run(request=None):
        rows = []
        for output in engine.generate(prompts, sampling, lora_request=request, use_tqdm=False):
            for position in output.prompt_logprobs[1:]:
                rows.append([position[token].logprob for token in range(len(position))])
        return np.array(rows, np.float32)

    if not adapters:
        return {"merged": run()}
    return {"base": run(), **{name: run(LoRARequest(name, number, job[name])) for number, name
                              in enumerate(("adapter", "adapter_k_only"), 1)}}


if __name__ == "__main__":
    wanted, job_of_run = sys.argv[2], json.loads(Path(sys.argv[1]).read_text())
    if wanted in ("hf", "bases"):
        arrays = from_hf(job_of_run)
    else:
        arrays = from_vllm(job_of_run, wanted == "vllm-adapter")
    np.savez(sys.argv[3], **arrays)
