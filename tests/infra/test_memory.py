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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=2", "glibc.malloc.hugetlb=2"),
    ],
)
def test_what_the_user_tuned_stays(monkeypatch, before, after):
    monkeypatch.setenv("GLIBC_TUNABLES", before)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    assert allocator_environment() == {"GLIBC_TUNABLES": after, "MALLOC_ARENA_MAX": "3"}


@pytest.mark.skipif(
    not ASKED.exists() or "[madvise]" not in ASKED.read_text(),
    reason="this kernel gives huge pages to all or to none",
)
def test_a_large_block_lies_in_huge_pages_only_when_asked():
    def kilobytes(**more: str) -> int:
        env = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0", **more}
        done = subprocess.run(
            [sys.executable, "-c", TAKE], env=env, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert kilobytes(GLIBC_TUNABLES="") == 0
    assert kilobytes(**allocator_environment()) >= 48 << 10  # of 64 MB
