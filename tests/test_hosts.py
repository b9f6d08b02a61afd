"""Several hosts: processes of their own, connected as the hosts of a slice are, on one machine.

What stands in for a slice's network is JAX's own distributed runtime with a coordinator on
localhost and gloo between CPU devices.
"""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import random_gemma
import train_driver
from conftest import ROOT


def run_hosts(folder, hosts, shape, steps):
    """Train on four devices spread over so many processes; returns what the first one logged."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for host in range(hosts):
        own = {"JAX_NUM_PROCESSES": str(hosts), "JAX_PROCESS_ID": str(host),
               "JAX_COORDINATOR_ADDRESS": address} if hosts > 1 else {}
        log = open(folder / f"host{hosts}_{host}.txt", "w")
        started.append(subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "train_driver.py"), str(folder), str(steps), "float32",
             *map(str, shape)], env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait(900) for process in started]
    said = (folder / f"host{hosts}_0.txt").read_text()
    assert codes == [0] * hosts, said[-3000:]
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()], said


def place(folder):
    """Base model and data, so that two processes do not both write them."""
    folder.mkdir()
    random_gemma.write(folder / "base", random_gemma.TINY)
    train_driver.write_data(folder / "data")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_two_hosts_train_what_one_trains(tmp_path, shape):
    steps = 20
    one, _ = run_hosts(place(tmp_path / "one"), 1, shape, steps)
    two, said = run_hosts(place(tmp_path / "two"), 2, shape, steps)
    assert [line["step"] for line in two] == [line["step"] for line in one] and len(one) > steps
    for ours, theirs in zip(two, one):
        for name in {"loss", "val_loss", "grad_norm"} & ours.keys():
            assert abs(ours[name] - theirs[name]) < 1e-3, (ours, theirs)
    first, second = (train_driver.final_adapters(tmp_path / name, steps) for name in ("one", "two"))
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], atol=1e-3)
    _, again = run_hosts(tmp_path / "two", 2, shape, steps)  # restores on both hosts, nothing to do
    assert f"training from step {steps}" in again and "training from step 0" in said
