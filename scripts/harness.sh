#!/usr/bin/env bash
# Score the server of notebook 05 with lm-evaluation-harness, the ruler that everybody uses.
#   ./setup.sh harness                            once: its environment, .venv-harness
#   scripts/harness.sh FOLDER ports               our own task, data/harness/ports.yaml
#   scripts/harness.sh FOLDER ifeval --limit 100  one of the harness's own, with any option of `lm_eval run`
# FOLDER is the server's, such as runs/31b/serve. Run it on the base and on the tuned model: what the tuned one
# loses on IFEval or GSM8K is what it forgot. Prompts are rendered by the template in the model's folder and sent as ids.
set -euo pipefail
cd "$(dirname "$0")/.."
stop() { printf '%s\n' "harness: $*" >&2; exit 1; }
folder="${1:-}"
tasks="${2:-}"
[ -n "$tasks" ] || { sed -n '2,7s/^# \{0,1\}//p' scripts/harness.sh; exit 2; }
shift 2
lm_eval="${HARNESS:-.venv-harness}/bin/lm_eval"
[ -x "$lm_eval" ] || stop "lm-evaluation-harness is not installed. Run ./setup.sh harness"
[ -f "$folder/server.json" ] || stop "no server is recorded in $folder. Run 05_serve_vllm first, or name its serve/ folder"
read_record() { "${lm_eval%lm_eval}python" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$folder/server.json" "$1"; }
url="$(read_record base_url)"
"${lm_eval%lm_eval}python" -c 'import sys, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(sys.argv[1] + "/health", timeout=10)' "$url" 2>/dev/null ||
  stop "the server of $folder does not answer at $url. Run 05_serve_vllm, or .venv/bin/python -m serving start $folder"
export OPENAI_API_KEY="${VLLM_API_KEY:-unused}" NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost TOKENIZERS_PARALLELISM=false
# A TPU refuses a request that has a seed, and the harness sends one unless it is told otherwise.
exec "$lm_eval" run --model local-completions --tasks "$tasks" --include_path data/harness \
  --apply_chat_template --gen_kwargs '{"seed": null}' --output_path "$folder/harness" --log_samples \
  --model_args "model=$(read_record name),tokenizer=$(read_record model),base_url=$url/v1/completions,max_length=$(read_record max_model_len),num_concurrent=8,tokenizer_backend=huggingface" "$@"
