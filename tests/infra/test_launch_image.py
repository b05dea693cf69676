"""The image cannot be built here; what its steps say is checked: pins, user, paths, and that what it leaves out is not needed."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "infra" / "Dockerfile").read_text()
LINES = [x for x in re.sub(r"\\\n\s*", " ", TEXT).splitlines() if x and not x.startswith("#")]
BLOCKED_IMPORT = {"torch": "torch", "torchmetrics": "torchmetrics", "accelerate": "accelerate", "ai2-olmo-core": "olmo_core",
                  "lightning-utilities": "lightning_utilities", "wandb": "wandb", "bettermap": "bettermap"}  # fmt: skip


def instructions(name: str) -> list[str]:
    return [x.removeprefix(name).strip() for x in LINES if x.split()[0] == name]


def left_out() -> set[str]:
    return set(re.search(r"grep -vE '\^\((.*?)\)=='", TEXT).group(1).split("|"))


def test_lint():
    """The rules of the usual Dockerfile linters that apply here."""
    for base in instructions("FROM"):
        assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm( AS build)?", base), (
            "the base is pinned, and not latest"
        )
    assert not instructions("ADD") and not instructions("MAINTAINER")
    assert "sudo" not in TEXT and "apt-get" not in TEXT and "curl" not in TEXT
    assert all("pip install" not in run or "--no-deps" in run for run in instructions("RUN"))
    assert "PIP_NO_CACHE_DIR=1" in TEXT
    [user] = instructions("USER")
    assert user == "10001:10001" and LINES.index(f"USER {user}") > max(
        i for i, x in enumerate(LINES) if x.startswith("RUN")
    )
    assert all(w.startswith("/") for w in instructions("WORKDIR"))
    assert instructions("CMD") == ['["repro", "--help"]']


def test_user_is_the_one_of_the_spec():
    from infra.launch.gke import UID

    assert instructions("USER") == [f"{UID}:{UID}"]


def test_everything_copied_is_there_and_in_the_context():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    for copied in instructions("COPY"):
        if copied.startswith("--from"):
            continue
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignore or f"!{source.removeprefix('./')}/**" in ignore, source


def test_what_is_left_out_is_in_the_lock_and_not_needed_for_training():
    """The training process and its entry are imported with these packages made unimportable."""
    lock = {
        x.split("==")[0]
        for x in (ROOT / "requirements.lock").read_text().splitlines()
        if "==" in x and not x.startswith("#")
    }
    assert left_out() == set(BLOCKED_IMPORT) <= lock
    code = (
        f"import sys\nblocked = {sorted(BLOCKED_IMPORT.values())!r}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in blocked: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import infra.launch.worker, infra.mirror, infra.launch.gke, model.train, model.convert.hf, data.loader, pipelines.cli\n"
        "assert not set(blocked) & {m.split('.')[0] for m in sys.modules}\n"
        "assert pipelines.cli.main(['recipes']) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": "/tmp"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_lock_pins_every_package():
    lines = [x for x in (ROOT / "requirements.lock").read_text().splitlines() if x and not x.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[\w.+!]+", x) for x in lines)
    assert any(x.startswith("libtpu==") for x in lines)
