"""The number of devices does not change a score: weights on one device and spread over eight."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

WORKER = Path(__file__).with_name("device_worker.py")


def scores(*devices: int) -> list[dict]:
    """What the worker prints for each number of devices, of eight host devices."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(WORKER.parents[2]),
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), *map(str, devices)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(devices) :]]


def test_scores_do_not_depend_on_the_number_of_devices():
    one, eight = scores(1, 8)
    assert (one["devices"], eight["devices"]) == (1, 8)
    # sums of up to 32 log-probabilities of a 500-class model; products are added in another order
    assert np.abs(np.array(one["totals"]) - np.array(eight["totals"])).max() < 1e-4
