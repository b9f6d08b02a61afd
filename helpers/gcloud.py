"""Google Cloud commands of notebook 01, as lists of words; nothing here runs any of them."""

import shlex
import textwrap

from serving.options import IMAGES
from tpu_time import fit
from tables.hardware import chips_of
from helpers.run import UserError

# docs.cloud.google.com/tpu/docs, read in 2026: regions-zones, runtimes, v5e, v5p, v6e; which boot
# disk a TPU takes: cloud.google.com/tpu/docs/setup-persistent-disk. Compute Engine publishes ct5lp
# for v5e and refuses to make one (github.com/xbill9/gemma4-dev, HARDWARE.md, August 2026).
SLICES = {
    "v5p-8": {"machine type": "ct5p-hightpu-4t", "classic type": "v5p-8",
              "classic runtime": "v2-alpha-tpuv5", "boot disk": "pd-balanced",
              "zones, 2026": "us-central1-a, us-east5-a"},
    "v6e-8": {"machine type": "ct6e-standard-8t", "classic type": "v6e-8",
              "classic runtime": "v2-alpha-tpuv6e", "boot disk": "hyperdisk-balanced",
              "zones, 2026": "us-central1-b, us-east5-a, us-east1-d"},
    "v6e-1": {"machine type": "ct6e-standard-1t", "classic type": "v6e-1",
              "classic runtime": "v2-alpha-tpuv6e", "boot disk": "hyperdisk-balanced",
              "zones, 2026": "us-central1-b, us-east5-a, us-east1-d"},
    "v5e-4": {"machine type": "", "classic type": "v5litepod-4",
              "classic runtime": "v2-alpha-tpuv5-lite", "boot disk": "",
              "zones, 2026": "us-central1-a, us-west4-a, us-west1-c"},
}
WORKER = ("http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
          "agent-worker-number")  # 0, 1, ...: as JAX reads it (clusters/cloud_tpu_cluster.py)
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"

# Parts of the scripts.
APT = """sudo DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a apt-get install -y -q \\
    -o DPkg::Lock::Timeout=600"""
FETCH = """\
.venv/bin/python -m helpers.remote pull $RUN $RUN_DIR  # of an earlier machine, if any
"""
# In a session of its own: Ctrl-C on what is in front is not for it, and no connection ends it.
LAST_PUSH = ".venv/bin/python -m helpers.remote push $RUN_DIR $RUN"
PUSH = f"""\
setsid nohup {LAST_PUSH} --every 300 \\
    >> sync.log 2>&1 &           # every five minutes: the machine may go at any time
"""
DONE = 'echo "all is in the bucket: delete this machine"'
WATCH = "tail -f run.log                  # Ctrl-C stops the watching, not the run\n"


def shell(command):
    """A command as one would type it: quoted where needed, one option per line."""
    first, *words = [shlex.quote(word) for word in command]
    return " ".join([first, *(f"\\\n    {word}" if word.startswith(("--", "'--")) and len(word) > 2
                              else word for word in words)])


def _about(slice_name):
    """The entry of `SLICES`, or a `UserError` that names those there are."""
    if slice_name in SLICES:
        return SLICES[slice_name]
    raise UserError(f"helpers/gcloud.py knows no machine type for a {slice_name}, only for "
                    f"{', '.join(SLICES)}: add it to SLICES (docs.cloud.google.com/tpu/docs).")


def _machine_type(slice_name):
    """Compute Engine's name of a slice, or a `UserError` that says it makes none."""
    if found := _about(slice_name)["machine type"]:
        return found
    raise UserError(f"Compute Engine makes no {slice_name}: take the classic command (01, "
                    "section 3).")


def create_command(name, slice_name, zone, hours, model):
    """`gcloud` command for a TPU VM by the Compute Engine API, deleted after `hours`.

    Args:
      model: SPOT, FLEX_START (waits in line for two hours at most) or STANDARD (on demand).
    """
    wait = ["--request-valid-for-duration=2h"] if model == "FLEX_START" else []
    return ["gcloud", "compute", "instances", "create", name, f"--zone={zone}",
            f"--machine-type={_machine_type(slice_name)}",
            "--image-project=ubuntu-os-accelerator-images",
            "--image-family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
            "--maintenance-policy=TERMINATE", "--scopes=cloud-platform", "--boot-disk-size=300GB",
            f"--boot-disk-type={_about(slice_name)['boot disk']}",
            f"--provisioning-model={model}", *wait,
            f"--max-run-duration={hours}h", "--instance-termination-action=DELETE"]


def classic_command(name, slice_name, zone, model, queued=False):
    """`gcloud` command for the same slice by the Cloud TPU API, at once or through a queue.

    A request that waits in the queue expires: granted at night, it would be a machine without a
    guard. `gcloud` without alpha has no flex-start here, so that is spot, too.
    """
    kind = slice_name.split("-")[0]  # all slices of a kind have the same runtime
    same = (name for name in SLICES if name.startswith(f"{kind}-"))
    about = _about(next(same, slice_name))
    runtime, (family, _) = about["classic runtime"], about["classic type"].split("-")
    accelerator = f"{family}-{slice_name.split('-')[1]}"  # a v5e is a v5litepod
    if queued:
        words = ["queued-resources", "create", f"{name}-request", f"--node-id={name}",
                 f"--runtime-version={runtime}", "--valid-until-duration=2h"]
    else:
        words = ["tpu-vm", "create", name, f"--version={runtime}"]
    return ["gcloud", "compute", "tpus", *words, f"--zone={zone}",
            f"--accelerator-type={accelerator}", *(["--spot"] if model != "STANDARD" else [])]


def bucket_commands(bucket, zone):
    """Make the bucket in the zone's region, let the VMs write to it, and see where it is."""
    region = zone.rsplit("-", 1)[0]
    return [["gcloud", "storage", "buckets", "create", f"gs://{bucket}", f"--location={region}",
             "--uniform-bucket-level-access"],
            ["gcloud", "storage", "buckets", "add-iam-policy-binding", f"gs://{bucket}",
             "--member=serviceAccount:PROJECT_NUMBER-compute@developer.gserviceaccount.com",
             "--role=roles/storage.objectUser"],
            ["gcloud", "storage", "buckets", "describe", f"gs://{bucket}",
             "--format=value(location)"]]


def connect_command(name, zone, classic=False):
    """Open a shell on the VM, with notebook port 8888 forwarded to this laptop."""
    words = ["compute", "tpus", "tpu-vm", "ssh"] if classic else ["compute", "ssh"]
    return ["gcloud", *words, name, f"--zone={zone}", "--", "-L", "8888:localhost:8888"]


def copy_command(path, name, zone):
    """Copy a file to the home directory of a VM."""
    return ["gcloud", "compute", "scp", str(path), f"{name}:", f"--zone={zone}"]


def vm_script(repository, bucket, size, first, last):
    """The shell commands for a fresh TPU VM: Python, the repository, this series' notebooks."""
    return (_first_lines(repository, bucket, size) + FETCH + PUSH
            + _run(f"./run_all.sh {first} {last}"))


def serving_script(repository, bucket, size):
    """The same for the VM that serves: Docker as well, and the run without what training needs."""
    left = ("train/checkpoints", "cache", "jax_cache")
    return f"""{_first_lines(repository, bucket, size)}\
command -v docker || {APT} docker.io docker-compose-v2
sudo usermod -aG docker "$(id -un)"  # `sg` below makes it count without a new login
sg docker -c 'docker pull {IMAGES["tpu-docker"]}'  # 05's image, before 62 GB
gcloud storage rsync --recursive --no-clobber --exclude='^({"|".join(left)})/' $RUN $RUN_DIR ||
  .venv/bin/python -m helpers.remote pull $RUN $RUN_DIR --without {" ".join(left)}
{PUSH}{_run('sg docker -c "./run_all.sh 05 07"')}"""


def _run(command):
    """Start it, a last copy behind it and a line that says so, and watch."""
    return f"""setsid nohup bash -c '{command} &&
  {LAST_PUSH} &&
  {DONE}' > run.log 2>&1 &
{WATCH}"""


def _first_lines(repository, bucket, size):
    """What every TPU VM does before its notebooks."""
    return f"""set -euo pipefail
sudo add-apt-repository -y -n ppa:deadsnakes/ppa
for _ in $(seq 60); do sudo apt-get update -q && break; sleep 10; done  # a new VM may hold the lock
{APT} python3.11 python3.11-venv python3.11-dev git iverilog
[ -d gemma4-on-tpu ] || git clone {shlex.quote(repository)} gemma4-on-tpu
cd gemma4-on-tpu
sudo loginctl enable-linger "$(id -un)" || true  # else your last logout empties /dev/shm
export SIZE={size}
export TMPDIR=/dev/shm HF_HOME=/dev/shm/huggingface RUN_DIR=/dev/shm/run  # not the boot disk
export RUN=gs://{bucket}/run     # another run: another address here, and an empty RUN_DIR
export CHECKPOINTS=$RUN-checkpoints JAX_COMPILATION_CACHE_DIR=gs://{bucket}/jax_cache
sudo sh -c 'echo always > {HUGE_PAGES}'  # the TPU starts faster
./setup.sh train                 # .venv with requirements/tpu.txt, since there are chips here
.venv/bin/python 01_setup.py     # the checks; stops here if one fails
"""


def hosts_script(repository, bucket, size):
    """The same for every host of a larger slice: all train, the first one merges and copies."""
    return _first_lines(repository, bucket, size) + FETCH + last_lines_of_hosts()


def last_lines_of_hosts():
    """What `hosts_script` does once a host is ready; the metadata server knows its number."""
    return f"""worker=$(curl -sSf -H 'Metadata-Flavor: Google' {WORKER})
if [ "$worker" = 0 ]; then       # the other hosts' folders hold nothing new
{textwrap.indent(PUSH, "  ")}fi
setsid nohup bash -euc '
.venv/bin/python 02_data.py      # every host makes the same rows; 03 compares their hashes
.venv/bin/python 03_train.py     # joins the other hosts
[ "$0" = 0 ] || exit 0           # the first host goes on alone
.venv/bin/python 04_merge.py
{LAST_PUSH}
{DONE}
' "$worker" > run.log 2>&1 &     # goes on when the connection drops
{WATCH}"""


def all_hosts_commands(name, slice_name, zone, model, script):
    """Make a slice of several hosts, hand `vm_hosts.sh` to each and start it on all at once."""
    words = ["gcloud", "compute", "tpus", "tpu-vm"]
    everywhere = [f"--zone={zone}", "--worker=all"]
    return [classic_command(name, slice_name, zone, model),
            [*words, "scp", str(script), f"{name}:", *everywhere],
            [*words, "ssh", name, *everywhere, "--command=bash vm_hosts.sh"]]


def list_commands(zones, bucket):
    """What runs and what is stored: machines, disks and a bucket; the classic API zone by zone."""
    return [["gcloud", "compute", "instances", "list", "--filter=machineType~ct[56]"],
            *(["gcloud", "compute", "tpus", what, "list", f"--zone={zone}"]
              for what in ("tpu-vm", "queued-resources") for zone in dict.fromkeys(zones)),
            ["gcloud", "compute", "disks", "list"],
            ["gcloud", "storage", "du", "--summarize", f"gs://{bucket}"]]


def delete_commands(name, zone):
    """End a VM that was made the current way, the classic one, or through the queue."""
    tpus = ["gcloud", "compute", "tpus"]
    return [["gcloud", "compute", "instances", "delete", name, f"--zone={zone}"],
            [*tpus, "tpu-vm", "delete", name, f"--zone={zone}"],
            [*tpus, "queued-resources", "delete", f"{name}-request", f"--zone={zone}", "--force"]]


def zones_command(slice_name):
    """Ask in which zones a slice's machine type is offered today."""
    return ["gcloud", "compute", "machine-types", "list",
            f"--filter=name={_machine_type(slice_name)}", "--format=value(zone)"]


def worst_case(slice_name, hours):
    """Dollars if a slice runs until its guard ends it, at the published on-demand rate."""
    return fit.price(*chips_of(slice_name)) * hours
