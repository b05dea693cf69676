"""Build the tokenize job as a Dataflow template, offline, and assert its graph and its job description.

    python tests/benchmarks/dataflow_template.py make ENV      an environment with apache-beam[gcp] (needs the registry)
    ENV/bin/python tests/benchmarks/dataflow_template.py check

The gcp extra contradicts our other pins, so it lives in an environment of its own. No account is used: the
storage is an emulator on this machine and the credentials are anonymous.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

PACKAGES = [
    "apache-beam[gcp]==2.77.0", "numpy", "numba", "pydantic", "zstandard", "pyarrow", "orjson", "tokenizers", "fsspec",
    "gcp-storage-emulator",
]  # fmt: skip
BUCKET = "templates"


def make(env: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    subprocess.run([str(env / "bin/python"), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)


def emulator(port: int) -> subprocess.Popen[bytes]:
    """A storage server on this machine, in memory."""
    binary = str(Path(sys.executable).parent / "gcp-storage-emulator")
    process = subprocess.Popen(
        [
            binary,
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--in-memory",
            "--default-bucket",
            BUCKET,
        ]
    )
    for _ in range(100):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.1)
    process.kill()
    raise SystemExit("the storage emulator did not start")


def build(out: Path, sources: int) -> dict[str, Any]:
    """The job description that Dataflow would be given."""
    from google.auth.credentials import AnonymousCredentials

    from data.config import FilterConfig, TokenizerConfig
    from data.runners import make_pipeline
    from data.shard_writer import JobSpec
    from data.tokenize_job import build_pipeline, shard_specs

    options = [
        "--project=offline", "--region=us-central1", "--job_name=tokenize", f"--temp_location=gs://{BUCKET}/tmp",
        f"--staging_location=gs://{BUCKET}/staging", f"--template_location={out}", "--sdk_location=container",
        "--sdk_container_image=registry/olmo3-repro:1", "--no_auth", "--experiments=use_runner_v2",
    ]  # fmt: skip
    specs = shard_specs([("web", f"gs://{BUCKET}/documents/{k:05d}.jsonl.gz") for k in range(sources)])
    job = JobSpec(f"gs://{BUCKET}/tokens", 8192, FilterConfig(enabled=True))
    with mock.patch("google.auth.default", return_value=(AnonymousCredentials(), "offline")):
        pipeline, _ = make_pipeline("dataflow", options=options)
        tokenizer = TokenizerConfig(file="tokenizer.json")
        build_pipeline(pipeline, specs, job, tokenizer)
        assert_graph(pipeline)
        pipeline.run()
    return dict(json.loads(out.read_text()))


def assert_graph(pipeline: Any) -> None:
    """Files are spread before they are tokenized, one node ends the graph, no tokenizer is pickled."""
    from apache_beam.internal import pickler
    from apache_beam.portability.api import beam_runner_api_pb2

    components = pipeline.to_runner_api().components
    transforms = {t.unique_name: t for t in components.transforms.values()}
    spread, tokenize = transforms["spread"], transforms["tokenize"]
    assert list(tokenize.inputs.values()) == list(spread.outputs.values()), (
        "fusion is not broken before tokenize"
    )
    consumed = {i for t in transforms.values() for i in t.inputs.values()}
    leaves = {o for t in transforms.values() for o in t.outputs.values()} - consumed
    assert leaves == set(transforms["manifest"].outputs.values()), leaves
    payload = beam_runner_api_pb2.ParDoPayload.FromString(tokenize.spec.payload).do_fn.payload
    fn = pickler.loads(payload)[0]
    assert type(fn).__module__ == "data.tokenize_job" and fn.tokenizer is None, fn


def check() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
    server = emulator(port)
    try:
        with tempfile.TemporaryDirectory() as tmp:
            job = build(Path(tmp) / "job.json", 1000)
    finally:
        server.terminate()
        server.wait()
    pools = job["environment"]["workerPools"]
    assert job["type"] == "JOB_TYPE_BATCH" and job["name"] == "tokenize", job["type"]
    image = "registry/olmo3-repro:1"
    found = [i["containerImage"] for p in pools for i in p.get("sdkHarnessContainerImages", [])]
    assert image in found, found
    staged = json.dumps(job)
    assert "pipeline.pb" in staged and "pickled_main_session" not in staged
    print(f"template built: {job['name']}, {job['type']}, image {image}, {len(json.dumps(job))} bytes")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        sys.path.insert(0, str(Path(__file__).parent.parent.parent))
        check()
