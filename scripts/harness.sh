#!/usr/bin/env bash
# Score the server of notebook 05 with lm-evaluation-harness, the ruler that everybody uses.
#   ./setup.sh harness                            once: its environment, .venv-harness
#   scripts/harness.sh FOLDER ports               our own task, data/harness/ports.yaml
#   scripts/harness.sh FOLDER ifeval --limit 100  one of the harness's own, with any option of `lm_eval run`
#   scripts/harness.sh FOLDER ports --system_instruction "You are brief."  the system sentence that you trained with
# FOLDER is the server's, such as runs/31b/serve. Run it on the base and on the tuned model: what the tuned one
# loses on IFEval or GSM8K is what it forgot. Prompts are rendered by the template in the model's folder and sent as ids.
set -euo pipefail
folder="${1:-}"
tasks="${2:-}"
case "$folder" in "" | /*) ;; *) folder="$PWD/$folder" ;; esac # relative to where one stands
cd "$(dirname "$0")/.."
stop() { printf '%s\n' "harness: $*" >&2; exit 1; }
[ -n "$tasks" ] || { sed -n '2,8s/^# \{0,1\}//p' scripts/harness.sh; exit 2; }
shift 2
bin="${HARNESS:-.venv-harness}/bin"
[ -x "$bin/lm_eval" ] || stop "lm-evaluation-harness is not installed. Run ./setup.sh harness"
[ -f "$folder/server.json" ] || stop "no server is recorded in $folder. Run 05_serve_vllm first, or name its serve/ folder"

read_record() { # read_record KEY: its value in server.json, or one line that says what is wrong with that file
  "$bin/python" - "$folder/server.json" "$1" <<'PYTHON'
import sys

from tables import errors, files

path, key = sys.argv[1:]
fix = "Run 05_serve_vllm again: it ends what still runs there, and writes it anew."
try:
    record = files.read_json(path, fix)
except errors.UserError as error:
    sys.exit(f"harness: {error}")
if not isinstance(record, dict) or key not in record:
    sys.exit(f"harness: {path} names no {key}. {fix}")
print(record[key])
PYTHON
}
url="$(read_record base_url)"
name="$(read_record name)"
model="$(read_record model)"
"$bin/python" -c 'import sys, urllib.request as u; u.build_opener(u.ProxyHandler({})).open(sys.argv[1] + "/health", timeout=10)' "$url" 2>/dev/null ||
  stop "the server of $folder does not answer at $url. Run 05_serve_vllm, or .venv/bin/python -m serving start $folder"
export OPENAI_API_KEY="${VLLM_API_KEY:-unused}" NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost TOKENIZERS_PARALLELISM=false

# max_length: where a prompt is too long for it, lm_eval cuts off the beginning and says nothing. So we name a length
# that no prompt has, and the server refuses what is too long for it.
# seed: lm_eval always sends one, and a TPU refuses it where answers are sampled. vLLM takes -1 for no seed.
arguments="model=$name,tokenizer=$model,base_url=$url/v1/completions,max_length=1000000,seed=-1"
arguments="$arguments,num_concurrent=8,tokenizer_backend=huggingface"
log="$(mktemp)" # what lm_eval says, because its reason may stand far above the last line
trap 'rm -f "$log"' EXIT
status=0
{
  "$bin/lm_eval" run --model local-completions --tasks "$tasks" --include_path data/harness --apply_chat_template \
    --output_path "$folder/harness" --log_samples --model_args "$arguments" "$@" 2>&1 >&3 3>&- | tee -i "$log" >&2
} 3>&1 || status=$?
[ "$status" != 0 ] || exit 0

explain() { printf '%s\n' "harness: $*" >&2; exit "$status"; }
unknown="$(sed -n 's/^ValueError: Tasks not found: //p' "$log")"
[ -z "$unknown" ] || explain "lm_eval knows no task $unknown. $bin/lm_eval ls tasks lists those that it knows"
refusal="$(grep -oEm 1 '[^"]*(max_model_len|maximum (context|model) length)[^"]*' "$log")" || exit "$status"
refusal="${refusal%%$'\n'*}" # the first of those in that line
longer="Take a larger max_model_len in section 1 of 05 and run 05 again"
case "$refusal" in
max_tokens*) explain "the server refused: $refusal $longer, or ask for shorter answers, which may cost points: --gen_kwargs max_gen_toks=256" ;;
*) explain "the server refused: $refusal $longer, or take a task with shorter prompts (fewer examples: --num_fewshot 0)" ;;
esac
