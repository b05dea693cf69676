"""What the launch section refuses before anything is built, started or written down: names that a cloud would refuse, a schedule
that is none, and credentials."""

import json

import pytest

from infra.config import LaunchConfig
from infra.errors import RecipeError
from infra.launch import vertex
from infra.launch.job import Job
from infra.redact import redact, why_secret
from infra.topology import parse
from pipelines.cli import main
from pipelines.recipe import load_recipe


@pytest.mark.parametrize(
    "field, value",
    [
        ("image", "us-docker.pkg.dev/p/repro/train:1"),
        ("image", "localhost:5000/train@sha256:" + "a" * 64),
        ("image", "train:v1.2_3"),
        ("project", "my-project-1"),
        ("project", "example.com:my-project"),
        ("region", "northamerica-northeast1"),
        ("bucket", "gs://my_bucket.example.com/runs/7b"),
        ("bucket", "gs://bkt/runs/a/"),
        ("namespace", "team-a"),
        ("context", "gke_p_us-east5_c"),
        ("queue", "tpu.v5p"),
        ("service_account", "trainer"),
    ],
)
def test_names_that_the_clouds_take(field, value):
    assert getattr(LaunchConfig.model_validate({"target": "gke", field: value}), field) == value


@pytest.mark.parametrize(
    "field, value",
    [
        ("image", "US-docker.pkg.dev/P/train:1"),
        ("image", "train:1 --privileged"),
        ("image", "train:"),
        ("project", "My Project"),
        ("project", "p"),
        ("region", "us-east5-a"),
        ("region", "anywhere"),
        ("bucket", "s3://bkt/run"),
        ("bucket", "gs://Bkt/run"),
        ("bucket", "gs://bkt//run"),
        ("bucket", "gs://bkt/../other"),
        ("bucket", "gs://b"),
        ("namespace", "Team_A"),
        ("namespace", "a" * 64),
        ("context", "a b"),
        ("queue", "-q"),
        ("service_account", "trainer@p.iam.gserviceaccount.com"),
    ],
)
def test_names_that_the_clouds_refuse(field, value):
    with pytest.raises(ValueError, match=rf"launch\.{field} "):
        LaunchConfig.model_validate({"target": "gke", field: value})


def test_a_service_account_is_spelled_as_its_target_wants():
    mail = "trainer@p.iam.gserviceaccount.com"
    assert LaunchConfig(target="vertex", service_account=mail).service_account == mail
    with pytest.raises(ValueError, match="e-mail"):
        LaunchConfig(target="vertex", service_account="trainer")


def test_a_vertex_spec_without_its_place_is_refused():
    job = Job("a", "model.train", slice=parse("v6e:2x2"), image="i:1", run="gs://b/run")
    with pytest.raises(RecipeError, match=r"needs launch\.project and launch\.region"):
        vertex.render(job, "", "")
    with pytest.raises(RecipeError, match=r"needs launch\.region"):
        vertex.render(job, "my-project", "")


@pytest.mark.parametrize("cron", ["every day", "61 * * * *", "* * *", "@sometimes"])
def test_a_schedule_that_is_none_starts_no_server(cron, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run = ["--run-dir", str(tmp_path / "run")]
    assert main(["serve", "tiny", *run, "--set", f"launch.watch.cron={json.dumps(cron)}"]) == 2
    said = capfd.readouterr().err
    assert "launch.watch.cron" in said and "*/10 * * * *" in said
    assert not (tmp_path / ".prefect" / "server.log").exists()


SECRETS = [
    ("corpus.base_dir", "https://host/data?token=hunter2hunter2"),
    ("corpus.base_dir", "https://me:hunter2hunter2@host/data"),
    ("corpus.base_dir", "https://host/x?X-Goog-Signature=hunter2hunter2&y=1"),
    ("launch.tokenize_options", '["--region=us-east5","--db_password=hunter2hunter2"]'),
    ("launch.tokenize_options", '["--flag", "hf_hunter2hunter2hunter2hunter2"]'),
    ("launch.context", "ya29.hunter2hunter2hunter2"),
]


@pytest.mark.parametrize("field, value", SECRETS)
def test_a_credential_in_a_recipe_is_refused_by_field_and_not_repeated(field, value):
    with pytest.raises(RecipeError) as caught:
        load_recipe("tiny", [f"{field}={value}"])
    assert field in str(caught.value) and "ordinary chain" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "gs://bkt/tokens=4/part-*.jsonl",
        "--num_workers=4",
        "--service_account_key_file=/etc/key.json",
        "s3://bkt/a.jsonl?tokenizer=dolma2",
        "https://host/data?max_tokens=5",
        "data/user@example/x.txt",
    ],
)
def test_ordinary_text_is_no_credential(text):
    assert why_secret(text) == "" and redact(text) == text


def test_user_and_password_of_a_url_are_not_shown():
    assert (
        redact("no server at http://me:pass@127.0.0.1:4200/api")
        == "no server at http://[removed]@127.0.0.1:4200/api"
    )


def test_prefects_own_credential_is_not_shown(monkeypatch):
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:correct-horse")
    assert redact("login admin:correct-horse failed") == "login [removed] failed"
