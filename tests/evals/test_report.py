"""From a run directory to results, verdict and report: complete, stopped at the gate, tampered with, and seen in a browser."""

import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import jax
import numpy as np
import pytest

from data.config import TokenizerConfig
from evals.evaluate import EvaluateSpec, Evaluator, evaluate_run, find_weights
from evals.report.build import build, plain
from evals.report.gather import gather, verdict_inputs
from evals.report.terminal import terminal_table
from evals.verdict import judge
from infra.artifacts import read_json, write_bytes_atomic, write_json_atomic
from infra.errors import DataError

STEPS = (2, 4)
TEXTS = (
    "The cat sat on the mat and looked at the moon.",
    "def f(x):\n    return x + 1\n",
    "import os, sys\nprint(os.name)\n",
    "A tale of two cities.",
)


@pytest.fixture(scope="module")
def recipe(model_cfg):
    from pipelines.recipe import validate
    from pipelines.recipes.tiny import tiny

    tree = tiny().model_dump(mode="json")
    tree["model"] = tree["reference"]["model"] = model_cfg.model_dump(mode="json")
    tree["train"] |= {"steps": 4, "landmarks": list(STEPS)}
    tree["data"]["sequence_length"] = 96
    tree["parity"]["prompt_tokens"] = 0
    tree["evals"] |= {
        "tasks": ["arc_easy", "piqa"],
        "items_per_task": 8,
        "heldout_documents": 6,
        "max_cut_share": 1.0,
        "batch_tokens": 768,
        "torch_documents": 1,
    }
    tree["evals"]["bounds"]["bootstrap"] = 400
    return validate(tree).model_dump(mode="json")


def tokens_dir(root, text, seed):
    entries, totals = (
        [],
        {"documents": 0, "eos": 0, "literal_eos": 0, "min_id": 0, "max_id": 100257, "tokens": 0},
    )
    domains = {}
    for label in ("code", "prose"):
        rng = np.random.default_rng(seed)
        documents = [[*text.encode(" ".join(rng.permutation(TEXTS)) * 2), text.eos_id] for _ in range(7)]
        ids = np.array([t for d in documents for t in d], "<u4")
        (root / label).mkdir(parents=True)
        ids.tofile(root / label / "00000.npy")
        entries.append(
            {
                "path": f"{label}/00000.npy",
                "label": label,
                "tokens": len(ids),
                "sha256": "",
                "sample_sha256": "",
            }
        )
        domains[label] = {"documents": 7, "eos": 7, "tokens": len(ids)}
        totals["documents"] += 7
        totals["eos"] += 7
        totals["tokens"] += len(ids)
    write_json_atomic(root / "manifest.json", {"format": "olmo3-tokens-v1", "shards": entries, "audit": totals, "domains": domains,
                                               "tokenizer": TokenizerConfig().model_dump(mode="json")})  # fmt: skip


def corpus_dir(root):
    import gzip

    domains = {}
    for label in ("code", "prose"):
        entry = {
            "rejected_names": [{"reason": "not UTF-8", "source": f"{label}/bad.txt", "loc": 3, "id": "x"}]
        }
        for split in ("train", "heldout"):
            name = f"{split}/{label}/00000.jsonl.gz"
            (root / name).parent.mkdir(parents=True)
            with gzip.open(root / name, "wt") as f:
                f.write(json.dumps({"id": "1", "text": f"{split} {label}"}) + "\n")
            entry[split] = {"documents": 1, "bytes": 9, "shards": [name]}
        domains[label] = entry
    write_json_atomic(
        root / "corpus.json", {"format": "olmo3-corpus-v1", "domains": domains, "rejected": {"not UTF-8": 2}}
    )


def training_logs(run, gap=1e-6):
    for side, folder in ((0, "reference"), (1, "train")):
        rows = [{"step": s, "ce": 11.0 - 0.1 * s + side * gap * (-1) ** s, "z_loss": 1e-3, "grad_norm": 1.0, "lr": 1e-4 * s, "skipped": 0,
                 "receipt": hashlib.sha256(bytes([s])).hexdigest()} for s in range(1, 5)]  # fmt: skip
        write_bytes_atomic(
            run / folder / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows).encode()
        )
    write_json_atomic(
        run / "reference" / "receipts.json", {str(s): hashlib.sha256(bytes([s])).hexdigest() for s in STEPS}
    )


@pytest.fixture(scope="module")
def whole(recipe, model_cfg, params, text, tmp_path_factory):
    """A run whose two sides differ by rounding-size noise, evaluated."""
    from model.checkpoint import write_checkpoint
    from model.convert.hf import export_hf

    run = tmp_path_factory.mktemp("runs") / "whole"
    write_json_atomic(run / "recipe.json", recipe)
    corpus_dir(run / "corpus")
    for split, seed in (("train", 1), ("heldout", 2)):
        tokens_dir(run / "tokens" / split, text, seed)
    training_logs(run)
    for step in STEPS:
        trained = jax.tree.map(lambda x, step=step: x * np.float32(1 + 1e-3 * step), params)
        export_hf(
            trained, model_cfg, run / "reference" / "hf" / f"step{step}", context_length=96, keep_padding=True
        )
        moved = jax.tree.map(lambda x: x * np.float32(1 + 2e-7), trained)
        state = {
            "params": moved,
            "opt": {"m": np.zeros(3, np.float32), "v": np.zeros(3, np.float32)},
            "step": np.int32(step),
        }
        meta = {"position": {"step": step}, "model": model_cfg.model_dump(mode="json")}
        write_checkpoint(run / "checkpoints", step, state, meta)
        write_json_atomic(
            run / "parity" / f"step{step}.json",
            {"ok": True, "max": 3e-6, "mean": 1e-7, "kl_max": 2e-12, "kl_mean": 1e-13},
        )
    write_json_atomic(
        run / "parity" / "step0.json",
        {"ok": True, "max": 3e-6, "mean": 1e-7, "kl_max": 2e-12, "kl_mean": 1e-13},
    )
    rows = [
        {"side": s, "step": STEPS[0], "logged": 10.7, "measured": 10.7} for s in ("reference", "reproduced")
    ]
    write_json_atomic(
        run / "parity" / "logged.json", {"ok": True, "limit": 2e-5, "failures": [], "rows": rows}
    )
    evaluate_run(run)
    for stage in ("parity", "evaluate"):
        write_json_atomic(run / "stages" / f"{stage}.json", {"stage": stage, "outputs": {}})
    return run


@pytest.fixture
def run(whole, tmp_path):
    """A copy to spoil. Weights are linked, not copied."""
    out = tmp_path / "run"
    shutil.copytree(
        whole, out, copy_function=lambda a, b: shutil.copy(a, b) if "safetensors" not in a else None
    )
    return out


def verdict_of(run):
    build(run)
    return read_json(run / "report" / "verdict.json")


def judged(run):
    """The verdict alone, without drawing: what `build` judges from."""
    return judge(plain(verdict_inputs(gather(run)))).to_json()


def test_equal_runs_agree_on_every_surface(whole):
    verdict = verdict_of(whole)
    surfaces = verdict["surfaces"]
    assert {surfaces[s] for s in ("heldout_loss", "domain_loss", "token_kl")} == {"FAITHFUL"}
    # 16 items cannot show that accuracy is equal within 0.005, and the verdict says how many would.
    assert surfaces["downstream"] == "INCONCLUSIVE" == verdict["overall"]
    assert any("items would be needed" in r for r in verdict["reasons"])
    assert all("downstream" in r for r in verdict["reasons"])


def test_a_wider_bound_makes_it_faithful(run):
    recipe = read_json(run / "recipe.json")
    recipe["evals"]["bounds"]["macro_accuracy"] = 0.3
    write_json_atomic(run / "recipe.json", recipe)
    verdict = verdict_of(run)
    assert verdict["overall"] == "FAITHFUL" and len(verdict["reasons"]) == 1
    text = terminal_table(verdict)
    assert text.count("FAITHFUL") >= 9 and "verdict: FAITHFUL" in text


def test_results_stand_and_are_bit_equal_when_made_again(whole, run, recipe):
    before = {p.name: p.read_bytes() for p in (whole / "evals" / "step2").iterdir()}
    assert evaluate_run(whole) == {}  # everything stands, nothing is computed
    shutil.rmtree(run)
    shutil.copytree(whole, run)
    shutil.rmtree(run / "evals")
    Evaluator(run, EvaluateSpec.from_recipe(recipe), cache=whole / ".cache" / "evals").landmark(2)
    assert {p.name: p.read_bytes() for p in (run / "evals" / "step2").iterdir()} == before


def test_results_of_other_weights_are_not_reused(whole, recipe, model_cfg, params, run):
    from model.convert.hf import export_hf

    shutil.rmtree(run)
    shutil.copytree(whole, run)
    old = read_json(run / "evals" / "step2" / "reference.heldout.json")
    shutil.rmtree(run / "reference" / "hf" / "step2")
    other = jax.tree.map(lambda x: np.float32(1.5) * x, params)
    export_hf(other, model_cfg, run / "reference" / "hf" / "step2", context_length=96, keep_padding=True)
    Evaluator(run, EvaluateSpec.from_recipe(recipe), cache=whole / ".cache" / "evals").landmark(2)
    new = read_json(run / "evals" / "step2" / "reference.heldout.json")
    assert (
        new["fingerprint"] != old["fingerprint"]
        and new["pooled"]["per_prediction"] != old["pooled"]["per_prediction"]
    )
    verdict = verdict_of(run)
    assert (
        verdict["overall"] == "NOT FAITHFUL"
        and verdict["landmarks"]["2"] == "NOT FAITHFUL" != verdict["landmarks"]["4"]
    )


def test_a_reference_without_a_landmark_is_named(whole, model_cfg):
    with pytest.raises(DataError, match="no reference weights of step 3"):
        find_weights(whole, "reference", 3, model_cfg)


def test_a_run_that_stopped_at_the_gate_gets_its_report(recipe, tmp_path):
    write_json_atomic(tmp_path / "recipe.json", recipe)
    write_json_atomic(
        tmp_path / "parity" / "step0.json",
        {"ok": False, "max": 0.3, "mean": 0.01, "kl_max": 1e-3, "kl_mean": 1e-4, "where": "layer 0, w_q"},
    )
    verdict = verdict_of(tmp_path)
    assert verdict["overall"] == "NOT FAITHFUL" and "step-0 weights failed" in verdict["reasons"][0]
    page = (tmp_path / "report" / "index.html").read_text()
    assert "not available" in page and "parts that are missing" in page


def change_a_result(run):
    """A digit of a result, after its stage has taken the digests; the figures stay within every bound."""
    name = "evals/step2/token_kl.json"
    made = {name: {"sha256": hashlib.sha256((run / name).read_bytes()).hexdigest()}}
    write_json_atomic(run / "stages" / "evaluate.json", {"stage": "evaluate", "outputs": made})
    write_json_atomic(run / name, {**read_json(run / name), "note": "edited"})


def change_a_field(run):
    """recipe.json asks for more than was evaluated."""
    made = {"evals": {**read_json(run / "recipe.json")["evals"], "items_per_task": 1}}
    record = {"stage": "evaluate", "outputs": {}, "identity": {"sections": made}}
    write_json_atomic(run / "stages" / "evaluate.json", record)


@pytest.mark.parametrize(
    ("spoil", "overall", "word"),
    [
        (
            lambda r: (r / "parity" / "step2.json").unlink(),
            "INCONCLUSIVE",
            "not measured: logit parity of the export of step 2",
        ),
        (
            lambda r: write_json_atomic(r / "parity" / "step4.json", {"ok": False, "max": 1.0}),
            "NOT FAITHFUL",
            "export of step 4 failed",
        ),
        (
            lambda r: write_json_atomic(r / "reference" / "receipts.json", {"2": "ff", "4": "ff"}),
            "NOT FAITHFUL",
            "receipt is broken at step 2",
        ),
        (lambda r: (r / "reference" / "receipts.json").unlink(), "INCONCLUSIVE", "no data receipt"),
        (
            lambda r: (r / "evals" / "step4" / "token_kl.json").unlink(),
            "INCONCLUSIVE",
            "token KL: not evaluated at step 4",
        ),
        (
            lambda r: (r / "evals" / "step2" / "reproduced.heldout.json").write_text("{"),
            "INCONCLUSIVE",
            "held-out loss: not evaluated at step 2",
        ),
        (lambda r: training_logs(r, gap=1e-3), "INCONCLUSIVE", "training does not follow"),
        (
            lambda r: (r / "train" / "metrics.jsonl").unlink(),
            "INCONCLUSIVE",
            "not compared with the reference step by step",
        ),
        (
            lambda r: shutil.rmtree(r / "checkpoints" / "step4" / "optimizer"),
            "INCONCLUSIVE",
            "optimizer state not fp32",
        ),
        (lambda r: (r / "corpus" / "corpus.json").unlink(), "INCONCLUSIVE", "overlap"),
        (lambda r: (r / "tokens" / "train" / "manifest.json").unlink(), "INCONCLUSIVE", "EOS count"),
        (lambda r: (r / "parity" / "logged.json").unlink(), "INCONCLUSIVE", "not those of the log"),
        (change_a_result, "INCONCLUSIVE", "token_kl.json changed since"),
        (lambda r: (r / "stages" / "evaluate.json").unlink(), "INCONCLUSIVE", "evaluate has no record"),
        (change_a_field, "INCONCLUSIVE", "evals.items_per_task"),
    ],
)
def test_whatever_is_spoiled_shows(run, spoil, overall, word):
    recipe = read_json(run / "recipe.json")
    recipe["evals"]["bounds"]["macro_accuracy"] = 0.3  # FAITHFUL but for what is spoiled
    write_json_atomic(run / "recipe.json", recipe)
    spoil(run)
    verdict = judged(run)
    assert verdict["overall"] == overall
    assert any(word in r for r in verdict["reasons"]), verdict["reasons"]


def test_sides_that_scored_other_documents_are_refused(run):
    path = run / "evals" / "step2" / "reproduced.heldout.json"
    found = read_json(path)
    found["documents"][0]["id"] = "another"
    write_json_atomic(path, found)
    assert verdict_of(run)["overall"] != "FAITHFUL"
    assert "did not score the same documents" in (run / "report" / "report.md").read_text()


def test_declared_differences_stand_in_the_report(run):
    recipe = read_json(run / "recipe.json")
    recipe["model"]["rope_theta"] = 10000.0
    write_json_atomic(run / "recipe.json", recipe)
    build(run)
    assert "model.rope_theta (500000.0 -> 10000.0)" in (run / "report" / "report.md").read_text()


class Page(HTMLParser):
    """Collects what a reader and a browser would look for."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.outside, self.ids, self.stack = {}, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for key, value in attrs:
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href", "xlink:href") and value and not value.startswith(("#", "data:")):
                self.outside.append(value)


def test_the_page_is_whole_and_asks_for_nothing_outside(whole):
    text = build(whole).read_text()
    page = Page(text)
    assert (
        page.outside == []
        and "<script" not in text
        and "@import" not in text
        and not re.search(r"url\((?!#)", text)
    )
    assert page.tags["svg"] >= 6 and page.tags["table"] >= 10 and len(page.ids) == len(set(page.ids))
    assert "prefers-color-scheme:dark" in text and "@media print" in text and 'name="viewport"' in text
    assert not re.search(r"#1010[0-9a-f]{2}", text)  # every placeholder colour became a variable
    for title in (
        "Landmarks and surfaces",
        "Training loss",
        "Token KL",
        "Data receipts",
        "What is not proven",
        "Alarms",
    ):
        assert f"<h2>{title}</h2>" in text
    assert "bad.txt" in text  # the document that is not UTF-8 is named


def test_markdown_and_json_say_the_same(whole):
    build(whole)
    markdown = (whole / "report" / "report.md").read_text()
    report = read_json(whole / "report" / "report.json")
    assert markdown.startswith(f"# {report['verdict']['overall']}")
    for name in re.findall(r"\(figures/(\w+)\.svg\)", markdown):
        assert (whole / "report" / "figures" / f"{name}.svg").read_text().startswith("<?xml")
    assert judge(verdict_inputs(report)).to_json() == report["verdict"]  # anyone can judge it again


def test_the_page_in_a_real_browser(whole, tmp_path):
    """Chromium renders it at the width of a phone and of a desk with no console message. The page's own policy forbids
    every outside request, and a breach would be a console error."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine; install one to run this test")
    page = build(whole)
    assert "default-src 'none'" in page.read_text()

    def dump(path, width):
        return subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},2000",
             f"--user-data-dir={tmp_path / str(width)}", "--dump-dom", "--host-resolver-rules=MAP * ~NOTFOUND", f"file://{path}"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    for width in (380, 1200):
        done = dump(page, width)
        assert done.returncode == 0 and done.stdout.count("<svg") >= 6 and "<table" in done.stdout
        assert "CONSOLE" not in done.stderr, done.stderr
    spoiled = tmp_path / "spoiled.html"
    spoiled.write_text(page.read_text().replace("</body>", '<img src="https://example.org/x.png"></body>'))
    assert "CONSOLE" in dump(spoiled, 800).stderr  # the check itself works


def test_any_two_runs_compare(whole, recipe, params, model_cfg, tmp_path):
    """`compare`: a run against itself agrees; against other weights it does not; other documents are refused."""
    from evals.compare_runs import compare_runs
    from infra.errors import IdentityError
    from model.convert.hf import export_hf

    for step in STEPS:
        if not (whole / "hf" / f"step{step}").exists():
            export_hf(params, model_cfg, whole / "hf" / f"step{step}", context_length=96, keep_padding=True)
    page = compare_runs(whole, whole, tmp_path / "same", cache=whole / ".cache" / "evals")
    verdict = read_json(page.parent / "verdict.json")
    assert {verdict["surfaces"][s] for s in ("heldout_loss", "domain_loss", "token_kl")} == {"FAITHFUL"}
    assert "judged as a reproduction of whole" in page.read_text()
    other = tmp_path / "other"
    shutil.copytree(
        whole, other, ignore=shutil.ignore_patterns("evals", "reference", "report", "checkpoints")
    )
    manifest = read_json(other / "tokens" / "heldout" / "manifest.json")
    manifest["shards"][0]["tokens"] += 1
    write_json_atomic(other / "tokens" / "heldout" / "manifest.json", manifest)
    with pytest.raises(IdentityError, match="hold out different documents"):
        compare_runs(whole, other, tmp_path / "no")
