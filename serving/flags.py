"""Why each flag of the serving command is there: 05's table, for Docker's options and vLLM's."""

import pandas as pd

VARIABLES = {  # of `-e`
    "HF_HUB_OFFLINE": "no calls to the hub",
    "VLLM_ENGINE_READY_TIMEOUT_S": "up to an hour to be ready",
    "VLLM_XLA_CACHE_PATH": "the XLA cache's place",
    "MODEL_IMPL_TYPE": "whose model code",
    "USE_BATCHED_RPA_KERNEL": "the attention kernel with which vLLM's TPU project tests the 31B",
}

YOURS = "yours, from the settings"

REASONS = {
    "--rm": "remove the container when it stops; the log is ours, the cache is on a volume",
    "--name": "so that `docker logs` and `docker stop` find it",
    "--network": "the server listens on the machine's own 127.0.0.1, without port mapping",
    "--shm-size": "shared memory between vLLM's processes; Docker's default of 64 MB is too little",
    "-v": "the merged model (read-only), and the XLA cache on a named volume",
    "--privileged": "the container needs the TPU's device files and may lock memory",
    "--entrypoint": "the image's own entry point runs its arguments as a program: name vllm here; "
                    "the image, vLLM's command and the model's folder follow",
    "--gpus": "all GPUs of the machine",
    "--served-model-name": "clients say a name, not a path",
    "--host": "127.0.0.1 only: vLLM has no password by default",
    "--port": "8000, vLLM's default",
    "--dtype": "bfloat16, as trained and merged",
    "--kv-cache-dtype": "said, so that nobody has to guess: auto = the model's dtype = bfloat16",
    "--max-model-len": "prompt + answer; more would reserve and compile for more",
    "--max-num-batched-tokens": "tokens of one step: a longer prompt is read in pieces (section 6)",
    "--tensor-parallel-size": "chips that share every matrix: 8, or 4 with two copies (section 5)",
    "--data-parallel-size": "independent copies of the model behind one port",
    "--no-enable-prefix-caching": "06 measures prefill, and a cached prompt has none; turn it on "
                                  "for users, whose prompts share a beginning",
    "--enable-prefix-caching": "prompts that share a beginning are computed once",
    "--disable-uvicorn-access-log": "one log line per request would bury the rest",
    "--additional-config": "weights and arithmetic in fp8 or int8, by Qwix's rules, after loading",
    "--quantization": "the same on a GPU",
    "--speculative-config": "who proposes tokens, and how many at a time (section 9)",
    "--enable-lora": "serve an adapter beside its base (section 10)",
    "--lora-modules": "the adapter's name, as clients say it, and its folder",
    "--max-lora-rank": "the smallest that vLLM offers and that holds ours",
    "--limit-mm-per-prompt": "text only: nothing is compiled or kept for pictures, and no step "
                             "has to hold a whole video (2,496 tokens)",
    "--enforce-eager": "CPU: no compilation; a start takes 25 s instead of 38 to 55 (measured)",
}


def explain(command):
    """One row per flag: the flag, its values, the reason; `YOURS` where none is known."""
    rows = {}
    first = command.index("run") + 1 if "run" in command else command.index("serve") + 1
    for part in command[first:]:
        if part.startswith("-"):
            flag, equals, value = part.partition("=")
            rows.setdefault(flag, []).extend([value] if equals else [])
        elif rows:
            rows[flag].append(part)
    reasons = {**REASONS, "-e": "; ".join(
        VARIABLES.get(name, f"{name}: {YOURS}") for name, *_ in (v.split("=") for v in rows.get("-e", ())))}
    return pd.DataFrame([(flag, " ".join(values), reasons.get(flag, YOURS)) for flag, values in rows.items()],
                        columns=["flag", "value", "why"]).set_index("flag")
