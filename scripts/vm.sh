#!/usr/bin/env bash
# A TPU machine from your laptop: check, create, connect, list, delete. Needs gcloud, logged in.
#   scripts/vm.sh check  [MODEL]                    license and token, before anything is rented
#   scripts/vm.sh create NAME SLICE [ZONE] [HOURS]  v5p-8, v6e-8, v6e-1 ...; deleted after HOURS (3), unless classic
#   scripts/vm.sh bucket BUCKET ZONE                make a bucket near it, and let the machines write there
#   scripts/vm.sh run    NAME ZONE SCRIPT [WORD...] start a script of scripts/ there, watch its log
#   scripts/vm.sh ssh    NAME ZONE                  a shell, with port 8888 of the machine on this laptop
#   scripts/vm.sh list   [ZONE...]                  what costs money now; classic machines only if you name their ZONE
#   scripts/vm.sh delete NAME ZONE                  end a machine, however it was made
# DRY_RUN=1 prints the commands and runs none. CLASSIC=1 uses the Cloud TPU API (no guard on run time).
# run hands on what is set here of HF_TOKEN, TRACK (helpers/track.py) and the variables of W&B.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf 'vm: %s\n' "$*" >&2; }
run() {
  if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}
with_secrets() { # with_secrets LINE COMMAND...: the command reads LINE with the values of $HF_TOKEN and $WANDB_API_KEY
  local line="$1" # a secret among its words would be seen by `ps` and stand in gcloud's own log
  shift
  if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "$@"
    printf '<<<"%s"\n' "$line"
  else
    line="${line/\$WANDB_API_KEY/"${WANDB_API_KEY:-}"}"
    "$@" <<<"${line/\$HF_TOKEN/"${HF_TOKEN:-}"}"
  fi
}
usage() {
  sed -n '2,11p' scripts/vm.sh | sed 's/^# \{0,1\}//' >&2
  exit 2
}
fact() { python3 -m tables.hardware --slice "$slice" | sed -n "s/^$1=//p"; }

compute() { # compute MODEL: by the Compute Engine API, with a guard that deletes the machine
  local wait=() # below, the + is for a Mac's bash 3.2, which takes an empty list for an unset one
  if [ "$1" = FLEX_START ]; then wait=(--request-valid-for-duration=2h); fi
  run gcloud compute instances create "$name" --zone="$zone" --machine-type="$(fact MACHINE)" \
    --image-project=ubuntu-os-accelerator-images --image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e \
    --maintenance-policy=TERMINATE --scopes=cloud-platform --boot-disk-size=300GB \
    --boot-disk-type="$(fact DISK)" --provisioning-model="$1" ${wait[@]+"${wait[@]}"} \
    --max-run-duration="${hours}h" --instance-termination-action=DELETE
}
classic() { # by the Cloud TPU API: for v5p the way that others are known to have gone
  say "no time limit ends $name, so do it yourself: scripts/vm.sh delete $name $zone"
  run gcloud compute tpus tpu-vm create "$name" --zone="$zone" --version="$(fact RUNTIME)" \
    --accelerator-type="$(fact TYPE)" --spot
}

case "${1:-}" in
check)
  model="${2:-google/gemma-4-31B-it}"
  ask=(curl -fsIL -o /dev/null "https://huggingface.co/$model/resolve/main/config.json")
  if [ -n "${HF_TOKEN:-}" ]; then
    # shellcheck disable=SC2016
    ask=(with_secrets 'Authorization: Bearer $HF_TOKEN' "${ask[@]}" -H @-)
  else
    ask=(run "${ask[@]}")
  fi
  status=0
  "${ask[@]}" || status=$?
  case "$status" in
  0) [ -n "${DRY_RUN:-}" ] || say "$model can be downloaded" ;;
  22) # curl's word for an answer such as 401
    say "the hub doesn't let you download $model. Accept its license on its page, then export HF_TOKEN=hf_..."
    exit 1
    ;;
  *) say "huggingface.co can't be reached (curl's status $status). Try again later" && exit 1 ;;
  esac
  ;;
create)
  name="${2:?a name}" slice="${3:?a slice, such as v5p-8}" hours="${5:-3}"
  if ! [[ "$hours" =~ ^[1-9][0-9]*$ ]]; then # gcloud would refuse it twice, and classic have no limit
    say "HOURS is $hours: name whole hours, such as 3"
    exit 1
  fi
  zones="$(fact ZONES)"
  zone="${4:-${zones%% *}}"
  if [ -z "$zone" ] || [ -z "$(fact RUNTIME)" ]; then
    say "nothing says where and how a $slice is rented: give it a row with zones and runtime in SLICES in tables/hardware.py"
    exit 1
  fi
  say "$name: $slice in $zone, $(fact DOLLARS) USD an hour on demand"
  if [ -n "${CLASSIC:-}" ] || [ -z "$(fact MACHINE)" ]; then
    classic
  elif [ -n "${DRY_RUN:-}" ]; then
    compute FLEX_START
    compute SPOT
    classic
  else # flex-start waits in line for two hours at most, spot comes now or not at all
    compute FLEX_START || compute SPOT || classic
  fi
  ;;
bucket)
  bucket="gs://${2:?a bucket}" zone="${3:?a zone}"
  run gcloud storage buckets create "$bucket" --location="${zone%-*}" --uniform-bucket-level-access
  account="$(DRY_RUN='' run gcloud projects describe "$(gcloud config get-value project)" --format='value(projectNumber)' 2>/dev/null || echo PROJECT_NUMBER)"
  run gcloud storage buckets add-iam-policy-binding "$bucket" --role=roles/storage.objectUser \
    --member="serviceAccount:$account-compute@developer.gserviceaccount.com"
  ;;
run)
  name="${2:?a name}" zone="${3:?a zone}" script="${4:?a script, such as scripts/train.sh}"
  api=(compute)
  if [ -n "${CLASSIC:-}" ]; then api=(compute tpus tpu-vm); fi
  run gcloud "${api[@]}" scp "$script" "$name": --zone="$zone"
  settings="$(for variable in TRACK WANDB_PROJECT WANDB_NAME WANDB_MODE; do
    if [ -n "${!variable:-}" ]; then printf '%s=%q ' "$variable" "${!variable}"; fi
  done)"
  words="${settings}setsid nohup bash $(basename "$script") ${*:5} > run.log 2>&1 < /dev/null & tail -f --pid=\$! run.log"
  secrets=()
  if [ -n "${HF_TOKEN:-}" ]; then secrets+=(HF_TOKEN); fi
  if [ "${TRACK:-}" = wandb ] && [ -n "${WANDB_API_KEY:-}" ]; then secrets+=(WANDB_API_KEY); fi
  if [ "${#secrets[@]}" != 0 ]; then
    with_secrets "${secrets[*]/#/\$}" gcloud "${api[@]}" ssh "$name" --zone="$zone" \
      --command="read -r ${secrets[*]}; export ${secrets[*]}; $words"
  else
    run gcloud "${api[@]}" ssh "$name" --zone="$zone" --command="$words"
  fi
  ;;
ssh)
  api=(compute)
  if [ -n "${CLASSIC:-}" ]; then api=(compute tpus tpu-vm); fi
  run gcloud "${api[@]}" ssh "${2:?a name}" --zone="${3:?a zone}" -- -L 8888:localhost:8888
  ;;
list)
  run gcloud compute instances list --filter='machineType~ct[56]'
  for zone in "${@:2}"; do run gcloud compute tpus tpu-vm list --zone="$zone"; done
  run gcloud compute disks list
  ;;
delete)
  name="${2:?a name}" zone="${3:?a zone}"
  run gcloud compute instances delete "$name" --zone="$zone" --quiet ||
    run gcloud compute tpus tpu-vm delete "$name" --zone="$zone" --quiet
  ;;
*) usage ;;
esac
