"""A sample of `make resume-campaign`: the control is noticed, two interrupted runs are bit-equal."""

import json
import os
import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).resolve().parents[1] / "campaigns" / "resume.py"


def test_two_trials_and_the_control(make_run, tmp_path):
    run = make_run(steps=12, train={"checkpoint_every": 3, "landmarks": [6, 12]})
    done = subprocess.run(
        [sys.executable, str(DRIVER), "--run", str(run), "--work", str(tmp_path / "work"), "--trials", "2", "--out",
         str(tmp_path / "record")],
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "record.json").read_text())
    control, *trials = record["trials"]
    assert control["kind"] == "control" and control["different"]
    assert [t["different"] for t in trials] == [[], []]
    assert all(blow["landed"] for t in record["trials"] for blow in t["blows"])
    assert (
        len(record["compared"]) == 2 * 6 + 12
    )  # six kinds of evidence at two landmarks, and a line per step
