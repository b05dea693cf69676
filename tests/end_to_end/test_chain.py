"""The whole chain at micro scale: same recipe function as `tiny`, shrunk further by overrides.

One undisturbed run serves all tests: it ends FAITHFUL, is reused, survives `kill -9`, and a wrong theta is
caught. The real `repro` command runs in its own process each time.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

REPRO = [sys.executable, "-m", "pipelines.cli"]
MICRO = [
    "corpus.megabytes_per_domain=0.3",
    "corpus.heldout_max_documents=6",
    "data.sequence_length=96",
    "data.global_batch_instances=4",
    "model.window=32",
    "reference.model.window=32",
    "train.steps=12",
    "train.landmarks=[3,6,12]",
    "train.checkpoint_every=3",
    "evals.heldout_documents=6",
    "evals.items_per_task=6",
    "evals.context=256",
    "evals.bounds.macro_accuracy=0.2",
]
FLAGS = [flag for field in MICRO for flag in ("--set", field)]


def repro(*arguments: str, timeout: float = 500) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*REPRO, *arguments], capture_output=True, text=True, timeout=timeout, cwd=Path(__file__).parents[2]
    )


def final_state(run: Path) -> tuple:
    """(step, digest of weights, moments, counter and skip window, receipt) of the newest checkpoint."""
    from model.checkpoint import state_digest
    from model.train import Trainer, TrainSpec

    step, state, receipt = Trainer(TrainSpec.from_run(run)).start()
    return step, state_digest(state), receipt.hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An undisturbed run, through Prefect."""
    run = tmp_path_factory.mktemp("e2e") / "micro"
    done = repro("reproduce", "tiny", "--run-dir", str(run), *FLAGS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "FAITHFUL" in done.stdout and "NOT FAITHFUL" not in done.stdout
    assert f"report: {run}/report/index.html" in done.stdout
    assert (
        "apitools" not in done.stdout + done.stderr
    )  # Beam warns through the root logger, which Prefect resets
    return run


def test_report_and_verdict_stand(whole):
    verdict = json.loads((whole / "report" / "verdict.json").read_text())
    assert verdict["overall"] == "FAITHFUL"
    page = (whole / "report" / "index.html").read_text()
    assert "FAITHFUL" in page and "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "")


def test_receipts_agree_with_the_reference_and_with_the_order(whole):
    """Three independent sides: OLMo-core's loader, our trainer, and index + order."""
    from data.index import InstanceIndex
    from data.order import open_order
    from data.receipt import expected

    sides = {
        name: [json.loads(line) for line in (whole / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("reference", "train")
    }
    index = InstanceIndex.from_manifest(whole / "tokens" / "train", 96)
    wanted = expected(index, open_order(whole / "order"), 4, 12)
    assert [m["receipt"] for m in sides["reference"]] == [wanted[s] for s in range(1, 13)]
    assert [m["receipt"] for m in sides["train"]] == [wanted[s] for s in range(1, 13)]


def test_second_call_reuses_every_stage(whole):
    done = repro("reproduce", "tiny", "--run-dir", str(whole), "--no-server", *FLAGS)
    assert done.returncode == 0
    assert "made: report" in done.stdout
    for stage in ("tokenize", "order", "init", "gate", "reference", "train", "convert", "parity", "evaluate"):
        assert stage in done.stdout.split("reused:")[1]


def test_audit_recomputes_and_names_the_first_wrong_step(whole, tmp_path):
    done = repro("audit", "--run-dir", str(whole))
    assert done.returncode == 0
    assert "reproduced: 12 stored receipts up to step 12 agree" in done.stdout
    run = tmp_path / "run"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("checkpoints", "hf", "init", "evals"))
    path = run / "train" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[6:]:
        line["receipt"] = line["receipt"][::-1]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = repro("audit", "--run-dir", str(run))
    assert done.returncode == 1
    assert "reproduced: the first step that differs is 7" in done.stdout


def test_any_two_checkpoints_compare(whole):
    export, ours = str(whole / "hf" / "step12"), str(whole / "checkpoints" / "step12")
    assert "PARITY" in repro("parity", export, ours, "--in", "olmo-core,jax").stdout
    other = repro("parity", export, str(whole / "checkpoints" / "step6"), "--localise")
    assert other.returncode == 1
    assert "NO PARITY" in other.stdout and "cause: embeddings differs" in other.stdout
    missing = repro("parity", "nowhere", ours)
    assert missing.returncode == 2 and "nowhere" in missing.stderr and "Traceback" not in missing.stderr


def test_another_recipe_is_refused_with_the_field(whole):
    done = repro("reproduce", "tiny", "--run-dir", str(whole), *FLAGS, "--set", "data.seed=1")
    assert done.returncode == 2
    assert "data.seed (34521 -> 1)" in done.stderr and "Traceback" not in done.stderr


def test_a_changed_artifact_is_refused_with_its_name(whole, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(whole, copy, copy_function=os.link)
    shard = next((copy / "tokens" / "train").glob("*/00000.npy"))
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.unlink()
    shard.write_bytes(content)
    done = repro("order", "tiny", "--run-dir", str(copy), "--redo")
    assert done.returncode == 2
    assert shard.name in done.stderr and "Traceback" not in done.stderr


def test_killed_flow_continues_to_the_same_weights(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert repro("status", "--run-dir", str(run)).returncode == 0
    from pipelines.stages import redo_from

    redo_from("train", run)
    flow = subprocess.Popen(
        [*REPRO, "reproduce", "tiny", "--no-server", "--run-dir", str(run), *FLAGS],
        cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    metrics = run / "train" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and (not metrics.exists() or metrics.read_text().count("\n") < 5):
        time.sleep(0.05)
    flow.send_signal(signal.SIGKILL)
    flow.wait()
    assert not (run / "stages" / "train.json").exists()
    again = repro("train", "tiny", "--run-dir", str(run))
    assert again.returncode == 0, again.stderr[-3000:]
    assert final_state(run) == final_state(whole)

    def losses(run: Path) -> list:
        lines = (run / "train" / "metrics.jsonl").read_text().splitlines()
        return [(m["step"], m["ce"], m["grad_norm"], m["receipt"]) for m in map(json.loads, lines)]

    assert losses(run) == losses(whole)


def test_wrong_theta_on_our_side_is_not_faithful(whole, tmp_path):
    run = tmp_path / "run"
    done = repro(
        "reproduce", "tiny", "--no-server", "--run-dir", str(run), *FLAGS, "--set", "model.rope_theta=10000"
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert "NOT FAITHFUL" in done.stdout
    verdict = json.loads((run / "report" / "verdict.json").read_text())
    assert verdict["overall"] == "NOT FAITHFUL"
    assert "rope_theta" in (run / "report" / "report.md").read_text()


# One fault of each section of `make faults`: the check that must answer, its words, and the verdict.
SAMPLE = {
    "epoch_from_zero": ("receipts", "first step that differs is 1", "NOT FAITHFUL"),
    "window_one_more": ("step-0 logit gate", "window", "NOT FAITHFUL"),
    "z_loss_left_out": ("z-loss", "is 1 at step 1", "INCONCLUSIVE"),
    "first_rate_zero": ("learning rate", "at step 1", "NOT FAITHFUL"),
    "layers_exchanged": ("export parity", "largest logit difference", "NOT FAITHFUL"),
    "bos_added": ("alarm: scores are not lm-eval's", "lm-eval's", "INCONCLUSIVE"),
}


@pytest.fixture(scope="module")
def trials(whole, tmp_path_factory):
    """The record of every fault of the sample, with the undisturbed run as control, two at a time."""
    patch, where = pytest.MonkeyPatch(), tmp_path_factory.mktemp("faults")
    patch.syspath_prepend(str(Path(__file__).parents[1] / "campaigns"))
    from faults import chain

    extra = ["train.landmarks=[12]"]
    found = chain.trials(whole, list(SAMPLE), where, jobs=2, cache=where / "compiled", extra=extra)
    yield {record["name"]: record for record in found}
    patch.undo()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_of_each_section_is_caught(trials, name):
    first, words, verdict = SAMPLE[name]
    heard = {c["check"]: c["message"] for c in trials[name]["checks"]}
    assert first in heard and words in heard[first], heard
    assert trials[name]["verdict"] == verdict, trials[name]["reasons"]


def mix_of(run: Path, side: str, out: Path) -> Path:
    """A `label,path` manifest of a run's token files, as AI2 publishes its mixes."""
    shards = json.loads((run / "tokens" / side / "manifest.json").read_text())["shards"]
    out.write_text("".join(f"{s['label']},{side}/{s['path']}\n" for s in shards))
    return out


def curve_of(run: Path, out: Path) -> Path:
    """The reference's log as a CSV export of W&B."""
    rows = map(json.loads, (run / "reference" / "metrics.jsonl").read_text().splitlines())
    lines = [f'"{r["step"]}","{r["ce"]!r}"' for r in rows]
    out.write_text('"Step","olmo - train/CE loss"\n' + "\n".join(lines) + "\n")
    return out


def test_a_published_reference_is_brought_and_judged(whole, tmp_path):
    """Published tokens, checkpoints and curve stand in for a reference trained here: all is equal but what cannot be known."""
    run = tmp_path / "run"
    places = {
        "corpus.kind": "tokens",
        "corpus.manifest": mix_of(whole, "train", tmp_path / "train.txt"),
        "corpus.heldout_manifest": mix_of(whole, "heldout", tmp_path / "heldout.txt"),
        "corpus.base_dir": whole / "tokens",
        "reference.kind": "published",
        "reference.published": whole / "reference" / "checkpoints" / "step{step}",
        "reference.curve_csv": curve_of(whole, tmp_path / "curve.csv"),
        "train.landmarks": "[6,12]",
    }
    flags = [flag for k, v in places.items() for flag in ("--set", f"{k}={v}")]
    done = repro("reproduce", "tiny", "--no-server", "--run-dir", str(run), *FLAGS, *flags)
    verdict = json.loads((run / "report" / "verdict.json").read_text())
    assert done.returncode == 3, done.stderr[
        -3000:
    ]  # nobody can say these of token files without their documents
    unknown = ("EOS count", "token id out of range", "documents overlap")
    assert len(verdict["reasons"]) == 3, verdict["reasons"]
    assert all(sum(word in r for r in verdict["reasons"]) == 1 for word in unknown), verdict["reasons"]
    assert set(verdict["surfaces"].values()) == {"FAITHFUL"}
    logged = json.loads((run / "parity" / "logged.json").read_text())
    assert {(r["side"], r["step"]) for r in logged["rows"]} == {("reference", 6), ("reproduced", 6)}
    brought, made = (load_file(r / "reference/hf/step12/model.safetensors") for r in (run, whole))
    assert brought.keys() == made.keys() and all((brought[k] == made[k]).all() for k in made)
    assert final_state(run)[1] == final_state(whole)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "nosuch"], "unknown recipe 'nosuch'"),
        (["reproduce", "tiny", "--set", "train.landmarks=[500]"], "beyond the last step"),
        (["train", "tiny"], "run `repro tokenize --run-dir"),
    ],
)
def test_user_errors_are_one_message(tmp_path, arguments, message):
    done = repro(*arguments, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_corpus_too_small_for_one_batch_is_named(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("a few words only")
    (tmp_path / "docs" / "b.txt").write_text("")
    source = json.dumps([{"domain": "prose", "glob": f"{tmp_path}/docs/*.txt"}])
    flags = [
        "--set",
        "corpus.kind=files",
        "--set",
        f"corpus.sources={source}",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert repro("tokenize", "tiny", *flags).returncode in (0, 2)
    done = repro("order", "tiny", *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_glob_that_matches_nothing_is_named(tmp_path):
    source = json.dumps([{"domain": "prose", "glob": f"{tmp_path}/none/*.txt"}])
    done = repro(
        "reproduce", "tiny", "--set", "corpus.kind=files", "--set", f"corpus.sources={source}", "--run-dir", str(tmp_path / "r")
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("none/*.txt") == 1  # Prefect does not say it again, nor with a traceback
    assert "Traceback" not in done.stderr + done.stdout
