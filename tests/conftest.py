"""Settings shared by all tests: CPU only, no network, no analytics, two threads."""

import os

import pytest

for name, value in {
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}.items():
    os.environ.setdefault(name, value)

# Peak memory of the process itself. `ru_maxrss` will not do: exec hands a child the peak of the process that started it, so
# "after minus before" is nothing in a child of a large test process.
PEAK_KB = """
def peak_kb():
    with open("/proc/self/status") as f:
        return int(next(line.split()[1] for line in f if line.startswith("VmHWM")))
"""


@pytest.fixture(scope="session")
def peak_kb() -> str:
    """Source of `peak_kb()`, for the program of a child process."""
    return PEAK_KB


@pytest.fixture(scope="session")
def xmanager_database(tmp_path_factory) -> None:
    """XManager keeps one database per process, in the first state directory it hears of: here one that outlives every test."""
    from infra.launch.local import parse_flags

    parse_flags(tmp_path_factory.mktemp("xmanager"))
