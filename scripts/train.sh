#!/usr/bin/env bash
# On a fresh TPU machine: set it up and run 01 to 04. Start it again on a new machine to go on.
#   bash train.sh BUCKET [SIZE] [REPOSITORY]
# Checkpoints and compiled programs go straight into the bucket; the rest of the run is copied there
# every five minutes and comes back at the start. Several hosts: start it on all of them
# (gcloud compute tpus tpu-vm ssh NAME --worker=all); all train, the first one merges and copies.
set -euo pipefail
bucket="${1:?the name of your bucket}" size="${2:-31b}" repository="${3:-https://github.com/OWNER/gemma4-on-tpu}"
export RUN="gs://$bucket/run" SIZE="$size" RUN_DIR=/dev/shm/run
export TMPDIR=/dev/shm HF_HOME=/dev/shm/huggingface # RAM: the boot disk may be too small
export CHECKPOINTS="$RUN-checkpoints" JAX_COMPILATION_CACHE_DIR="gs://$bucket/jax_cache"

apt_get() { sudo DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 "$@"; }
sudo add-apt-repository -y -n ppa:deadsnakes/ppa # the image has Python 3.10, Tunix needs 3.11
for _ in $(seq 60); do apt_get update && break; sleep 10; done
apt_get install -y python3.11 python3.11-venv python3.11-dev git iverilog acl
sudo chmod a+rw /dev/vfio/* 2>/dev/null || true      # the chips, for this user
sudo prlimit --pid $$ --memlock=unlimited:unlimited  # ulimit -l: the TPU runtime pins memory
sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled' # a TPU starts faster
sudo loginctl enable-linger "$(id -un)" || true      # else your last logout empties /dev/shm

[ -d gemma4-on-tpu ] || git clone -q "$repository" gemma4-on-tpu
cd gemma4-on-tpu
./setup.sh train
if [ "${TRACK:-}" = wandb ]; then .venv/bin/python -m pip install -q wandb; fi # helpers/track.py
.venv/bin/python 01_setup.py # the checks; stops here if one fails

# gcloud holds a pattern against a path from its start. Names with a dot in front are being written.
copy() { gcloud storage rsync --recursive --exclude='^(.*/)?\.|^jax_cache/|.*\.lock$' "$1" "$2"; }
mkdir -p "$RUN_DIR"
copy "$RUN" "$RUN_DIR" || true # of an earlier machine, if any
worker="$(curl -sf -H 'Metadata-Flavor: Google' \
  http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number || echo 0)"
if [ "$worker" = 0 ]; then
  (while sleep 300; do copy "$RUN_DIR" "$RUN" || true; done) >sync.log 2>&1 &
  trap 'kill $!' EXIT
fi
hosts="$(python3 -m tables.hardware | sed -n 's/^HOSTS=//p')"
if [ "$hosts" = 1 ]; then
  ./run_all.sh 02 04
else
  .venv/bin/python 02_data.py # every host makes the same rows
  .venv/bin/python 03_train.py
  [ "$worker" = 0 ] || exit 0
  .venv/bin/python 04_merge.py
fi
copy "$RUN_DIR" "$RUN"
echo "all is in the bucket: delete this machine"
