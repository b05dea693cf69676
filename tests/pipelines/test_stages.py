"""How stages are made, reused, refused and redone, with the work replaced by small writes."""

import dataclasses
import json

import numpy as np
import pytest

from infra.artifacts import sealed, write_json_atomic
from infra.errors import IdentityError, RecipeError
from pipelines import stages
from pipelines.recipe import load_recipe
from pipelines.stages import STAGES, open_run, read_recipe, redo_from, run_stage, status_lines

TINY = load_recipe("tiny")


@pytest.fixture
def calls(monkeypatch):
    """Names of the stages whose work ran; each only writes one small file for every pattern it owns."""
    ran = []

    def fake(stage):
        def work(recipe, run):
            ran.append(stage.name)
            for pattern in stage.owns:
                path = run / pattern.replace("[1-9]*", "1")
                path = path if path.suffix else path / "f"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(stage.name)

        return dataclasses.replace(stage, work=work)

    monkeypatch.setattr(stages, "BY_NAME", {s.name: fake(s) for s in STAGES})
    return ran


@pytest.fixture
def run(tmp_path):
    open_run(TINY, tmp_path / "run")
    return tmp_path / "run"


def test_stages_stand_in_an_order_that_works():
    seen: set[str] = set()
    for stage in STAGES:
        assert set(stage.after) <= seen, stage.name
        seen.add(stage.name)


def test_everything_is_made_once_and_then_reused(run, calls):
    made = [run_stage(s.name, TINY, run) for s in STAGES]
    again = [run_stage(s.name, TINY, run) for s in STAGES]
    assert calls == [s.name for s in STAGES]
    assert [o.reused for o in made] == [False] * len(STAGES)
    assert [o.reused for o in again] == [True] * len(STAGES)
    assert [o.digest for o in again] == [o.digest for o in made]
    assert all("done in" in line for line in status_lines(run))


def test_a_stage_without_its_inputs_is_refused(run, calls):
    with pytest.raises(IdentityError, match=r"stage order needs stage tokenize(.|\n)*repro tokenize"):
        run_stage("order", TINY, run)
    assert calls == []


def test_work_that_fails_commits_nothing(run, calls, monkeypatch):
    def broken(recipe, run):
        (run / "corpus").mkdir()
        (run / "corpus" / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(
        stages.BY_NAME, "tokenize", dataclasses.replace(stages.BY_NAME["tokenize"], work=broken)
    )
    with pytest.raises(OSError):
        run_stage("tokenize", TINY, run)
    assert not (run / "stages" / "tokenize.json").exists()


def test_what_a_killed_writer_left_is_no_output(run, calls):
    whole = run_stage("tokenize", TINY, run).digest
    redo_from("tokenize", run)
    (run / "tokens" / "train").mkdir(parents=True)
    # 4194305 is above the kernel's largest process id, so this writer is gone for certain.
    (run / "tokens" / "train" / ".00000.npy.tmp-4194305.77-0123abcd").write_bytes(b"half")
    assert run_stage("tokenize", TINY, run).digest == whole
    assert not list(run.rglob("*.tmp-*"))


def test_redo_deletes_the_stage_and_all_after_it(run, calls):
    for s in STAGES:
        run_stage(s.name, TINY, run)
    gone = redo_from("train", run)
    assert gone == ["train", "convert", "parity", "evaluate"]
    assert not (run / "checkpoints").exists() and not (run / "evals").exists()
    assert (run / "parity" / "step0.json").exists() and (run / "reference" / "f").exists()
    assert [run_stage(s.name, TINY, run).reused for s in STAGES] == [s.name not in gone for s in STAGES]


def test_changed_code_is_refused_with_the_module(run, calls, monkeypatch):
    run_stage("tokenize", TINY, run)
    real = stages.code_digest
    monkeypatch.setattr(stages, "code_digest", lambda *m: {**real(*m), "data.tokenizer": "edited"})
    with pytest.raises(IdentityError, match=r"code\.data\.tokenizer"):
        run_stage("tokenize", TINY, run)


def test_a_changed_input_is_refused_downstream(run, calls):
    run_stage("tokenize", TINY, run)
    run_stage("order", TINY, run)
    record = run / "stages" / "tokenize.json"
    changed = json.loads(record.read_text())
    record.write_text(json.dumps(sealed({**changed, "digest": "0" * 64})))
    with pytest.raises(IdentityError, match=r"inputs\.tokenize"):
        run_stage("order", TINY, run)


def test_a_damaged_record_is_told_from_a_damaged_artifact(run, calls):
    run_stage("tokenize", TINY, run)
    record = run / "stages" / "tokenize.json"
    good = json.loads(record.read_text())
    name, _ = next(iter(good["outputs"].items()))
    for field, value in (
        ("key", "0" * 64),
        ("seconds", 1e9),
        ("outputs", {name: {"sha256": "0" * 64, "bytes": 1}}),
    ):
        record.write_text(json.dumps({**good, field: value}))
        for stage in ("tokenize", "order"):
            with pytest.raises(IdentityError, match=r"stages/tokenize\.json is damaged") as refused:
                run_stage(stage, TINY, run)
            assert "--redo" not in str(refused.value)
    del good["seal"]  # a record from before records were sealed
    record.write_text(json.dumps(good))
    assert run_stage("tokenize", TINY, run).reused


def test_a_stage_is_not_made_from_a_changed_file(run, calls):
    run_stage("tokenize", TINY, run)
    name, _ = next(iter(json.loads((run / "stages" / "tokenize.json").read_text())["outputs"].items()))
    (run / name).write_bytes((run / name).read_bytes() + b"!")
    with pytest.raises(IdentityError, match=f"{name} changed since stage tokenize made it"):
        run_stage("order", TINY, run)
    (run / name).unlink()
    with pytest.raises(IdentityError, match=f"{name} is missing, but stage tokenize is recorded as done"):
        run_stage("order", TINY, run)
    assert not (run / "stages" / "order.begun.json").exists()


def test_run_directory_remembers_its_recipe(run):
    assert read_recipe(run) == TINY
    open_run(TINY, run)
    with pytest.raises(IdentityError, match=r"train\.steps \(96 -> 40\)"):
        open_run(load_recipe("tiny", ["train.steps=40"]), run)


def test_launch_may_change_without_starting_over(run):
    open_run(load_recipe("tiny", ["launch.threads=1"]), run)


def test_fresh_never_deletes_what_is_no_run_directory(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(IdentityError, match="not a run directory"):
        open_run(TINY, tmp_path, fresh=True)
    assert (tmp_path / "thesis.txt").exists()


def test_fresh_starts_over(run, calls):
    run_stage("tokenize", TINY, run)
    open_run(load_recipe("tiny", ["train.steps=40"]), run, fresh=True)
    assert not (run / "stages").exists()
    assert read_recipe(run).train.steps == 40


def test_a_published_reference_that_is_not_named_or_not_there_is_an_error(tmp_path):
    for number, (where, error, word) in enumerate(
        (
            ("", RecipeError, "must name the checkpoints"),
            ("/nowhere/step{step}", IdentityError, "/nowhere/step0"),
        )
    ):
        recipe = load_recipe("olmo3_7b_stage1", [f"reference.published={where}"])
        open_run(recipe, tmp_path / f"run{number}")
        with pytest.raises(error, match=word):
            run_stage("init", recipe, tmp_path / f"run{number}")
        assert not (tmp_path / f"run{number}" / "init").exists()


def test_token_files_of_a_mix_take_the_place_of_documents(tmp_path):
    """corpus.kind=tokens: a `label,path` manifest, locked by content, then ordered; the order is OLMo-core's rule."""
    rng = np.random.default_rng(0)
    for name, n in (("a", 4000), ("b", 900), ("h", 600)):
        rng.integers(0, 1000, n, dtype=np.uint32).astype("<u4").tofile(tmp_path / f"{name}.npy")
    (tmp_path / "mix.txt").write_text("web,a.npy\n# a comment\ncode,b.npy\n")
    (tmp_path / "heldout.txt").write_text("web,h.npy\n")
    recipe = load_recipe(
        "tiny",
        [
            "corpus.kind=tokens",
            f"corpus.manifest={tmp_path}/mix.txt",
            f"corpus.heldout_manifest={tmp_path}/heldout.txt",
            f"corpus.base_dir={tmp_path}",
            "data.sequence_length=256",
            "data.global_batch_instances=4",
            "train.steps=4",
        ],
    )
    run = tmp_path / "run"
    open_run(recipe, run)
    run_stage("tokenize", recipe, run)
    run_stage("order", recipe, run)
    instances = 4000 // 256 + 900 // 256
    wanted = np.arange(instances, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(34521 + 1)).shuffle(wanted)
    assert np.fromfile(run / "order" / "order.u32", "<u4").tolist() == wanted.tolist()
    assert set(json.loads((run / "order" / "receipts.json").read_text())) == {"1", "2", "3", "4"}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["tokenize", "--run-dir", "{file}"], "a file stands where a directory should be"),
        (["tokenize", "--run-dir", "{file}/run"], "choose another place"),
        (["tokenize", "--run-dir", "a" * 300], "choose a shorter name"),
        (["status", "--run-dir", "{folder}"], "a directory stands where a file should be"),
        (["report", "--run-dir", "{new}"], "is not a run directory"),
        (["tokenize", "--run-dir", "{new}", "--set", "evals.bounds.heldout_loss=Infinity"], "finite number"),
        (["tokenize", "--run-dir", "{new}", "--set", "evals.tasks=[]"], "evals.tasks"),
        (["tokenize", "--run-dir", "{new}", "--set", 'evals.tasks=["piqa","mmlu"]'], "known tasks: arc_easy"),
        (["tokenize", "--run-dir", "{new}", "--set", "corpus.sources.0.glob=x"], "corpus.sources=JSON"),
        (["status", "--run-dir", "{new}"], "there is no run directory"),
        (["status", "--run-dir", "{empty}"], "is not a run directory: it has no recipe.json"),
        (["status", "olmo3_190m", "--run-dir", "{run}"], "holds recipe 'tiny', not 'olmo3_190m'"),
        (["tokenize", "--run-dir", "{empty}", "--processes", "0"], "0 processes are not possible"),
        (["order", "--run-dir", "{cut}"], "restore it, or FRESH=1 starts over"),
        (["order", "olmo3_190m", "--run-dir", "{run}"], "holds recipe 'tiny', not 'olmo3_190m'"),
        (["order", "--run-dir", "{run}"], "run `repro tokenize --run-dir"),
        (["order", "--run-dir", "{list}"], "recipe.json holds no JSON object"),
        (["reproduce", "--no-server", "--run-dir", "{list}"], "recipe.json holds no JSON object"),
        (["status", "--run-dir", "{torn}"], "tokenize.json is no record of a stage"),
        (["order", "--run-dir", "{torn}"], "tokenize.json is no record of a stage"),
    ],
)
def test_what_a_user_gets_wrong_is_one_message(tmp_path, capfd, monkeypatch, arguments, word):
    from pipelines import cli

    monkeypatch.setattr(cli, "quiet", lambda args: None)  # it sets the environment of this whole process
    places = {name: tmp_path / name for name in ("file", "new", "run", "list", "torn", "cut", "empty")}
    places["file"].write_text("not a directory")
    for name in ("run", "torn"):
        open_run(load_recipe("tiny"), places[name])
    write_json_atomic(places["torn"] / "stages" / "tokenize.json", {})
    write_json_atomic(places["list"] / "recipe.json", [])
    places["folder"] = tmp_path / "folder"
    (places["folder"] / "recipe.json").mkdir(parents=True)
    places["empty"].mkdir()
    places["cut"].mkdir()
    (places["cut"] / "recipe.json").write_text('{"name": "ti')
    assert cli.main([a.format(**places) for a in arguments]) == 2
    assert word in capfd.readouterr().err
    assert not places["new"].exists()


def test_a_missing_curve_is_named_before_anything_is_fetched(tmp_path):
    from pipelines.work import reference

    recipe = load_recipe("tiny", ["reference.kind=published", "reference.curve_csv=/nope.csv"])
    with pytest.raises(RecipeError, match=r"curve_csv: there is no file /nope\.csv"):
        reference(recipe, tmp_path)
