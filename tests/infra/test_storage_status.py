"""Commands on a run directory in a bucket, against the small service over HTTP."""

import json

from infra.artifacts import write_json_atomic
from pipelines.cli import main
from pipelines.recipe import load_recipe
from pipelines.stages import BY_NAME


def test_status_of_a_run_in_a_bucket_brings_only_what_it_shows(gcs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("tiny", []).model_dump(mode="json")
    gcs.put("b", "run/recipe.json", json.dumps(recipe).encode(), None)
    gcs.put("b", "run/checkpoints/step2/params/d", b"large", None)
    write_json_atomic(tmp_path / "record.json", {"digest": "d", "seconds": 3, "outputs": {}})
    gcs.put("b", "run/stages/tokenize.json", (tmp_path / "record.json").read_bytes(), None)
    before = gcs.names()
    assert main(["status", "--run-dir", "gs://b/run"]) == 0
    assert capsys.readouterr().out.count("done in") == 1
    assert gcs.names() == before, "looking changes nothing"
    assert not list(tmp_path.rglob("checkpoints"))


def test_a_launch_on_this_machine_brings_the_run_and_sends_what_it_made(gcs, tmp_path, monkeypatch):
    from pipelines import cli_launch

    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("tiny", ["train.steps=96"]).model_dump(mode="json")
    gcs.put("b", "run/recipe.json", json.dumps(recipe).encode(), None)
    for stage in BY_NAME["train"].after:
        gcs.put("b", f"run/stages/{stage}.json", b"{}", None)
    gcs.put("b", "run/tokens/train/00000.npy", b"tokens", None)

    def trained(job, cfg, recipe, run, bucket):
        assert (run / "tokens" / "train" / "00000.npy").read_bytes() == b"tokens"
        assert job.args == ("--run", str(run)) and recipe.train.steps == 96
        (run / "train").mkdir()
        (run / "train" / "metrics.jsonl").write_text("{}\n")
        return 0

    monkeypatch.setattr(cli_launch, "_until_done", trained)
    assert main(["launch", "--target", "local", "--run-dir", "gs://b/run"]) == 0
    assert "run/train/metrics.jsonl" in {name for _, name in gcs.objects}
