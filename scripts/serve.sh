#!/usr/bin/env bash
# On a fresh TPU machine that serves: Docker, the image, the run from the bucket, then 05 to 07.
#   bash serve.sh BUCKET [SIZE] [REPOSITORY]
set -euo pipefail
bucket="${1:?the name of your bucket}" size="${2:-31b}" repository="${3:-https://github.com/OWNER/gemma4-on-tpu}"
export RUN="gs://$bucket/run" SIZE="$size" RUN_DIR=/dev/shm/run TMPDIR=/dev/shm HF_HOME=/dev/shm/huggingface
unset TRACK # nothing is trained here

apt_get() { sudo DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 "$@"; }
sudo add-apt-repository -y -n ppa:deadsnakes/ppa
for _ in $(seq 60); do apt_get update && break; sleep 10; done
apt_get install -y python3.11 python3.11-venv python3.11-dev git iverilog acl
command -v docker >/dev/null || apt_get install -y docker.io
# Not `usermod -aG docker`: under OS Login it fails, and it would need a new login.
sudo setfacl -m "u:$(id -u):rw" /var/run/docker.sock
sudo chmod a+rw /dev/vfio/* 2>/dev/null || true
sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'
sudo loginctl enable-linger "$(id -un)" || true

[ -d gemma4-on-tpu ] || git clone -q "$repository" gemma4-on-tpu
cd gemma4-on-tpu
./setup.sh train
mkdir -p "$RUN_DIR"
gcloud storage rsync --recursive --exclude='^(train/checkpoints|cache|jax_cache)/|^(.*/)?\.' "$RUN" "$RUN_DIR"
image="$(.venv/bin/python -c 'from serving.options import IMAGES; print(IMAGES["tpu-docker"])')"
docker pull "$image" || { # Google's Trillium recipe for the 31B on a v6e-8 names this one
  docker pull vllm/vllm-tpu:gemma4
  docker tag vllm/vllm-tpu:gemma4 "$image"
}
./run_all.sh 05 07
gcloud storage rsync --recursive --exclude='^(.*/)?\.' "$RUN_DIR" "$RUN"
echo "all is in the bucket: delete this machine"
