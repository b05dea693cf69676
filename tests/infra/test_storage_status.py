"""Commands on a run directory in a bucket, against the small service over HTTP."""

import json

from infra.artifacts import write_json_atomic
from pipelines.cli import main
from pipelines.recipe import load_recipe


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
