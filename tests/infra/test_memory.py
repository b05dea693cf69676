"""Children of ours get huge pages where the kernel gives them, and keep what the user tuned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.memory import allocator_environment

ASKED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TAKE = (
    "import numpy as np, re; block = np.ones(64 << 20, np.uint8);"
    "print(sum(int(n) for n in re.findall(r'AnonHugePages: +(\\d+) kB', open('/proc/self/smaps').read())))"
)


def test_other_tunables_stay_and_ours_is_said_once(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1:glibc.malloc.hugetlb=1")
    assert allocator_environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.hugetlb=1"


@pytest.mark.skipif(
    not ASKED.exists() or "[never]" in ASKED.read_text(), reason="this kernel gives no huge pages"
)
def test_a_large_block_lies_in_huge_pages():
    env = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0", **allocator_environment()}
    done = subprocess.run([sys.executable, "-c", TAKE], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 48 << 10  # kB, of 64 MB
