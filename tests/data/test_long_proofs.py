"""Long proofs (`make proofs`): a million filter verdicts, and 100 MB of real text through both tokenizers."""

import numpy as np
import pytest

from data.config import FilterConfig, TokenizerConfig
from data.documents import Document, read_documents
from data.environment import environment_files
from data.repetition import rejections
from data.tokenizer import load_tokenizer

pytestmark = [pytest.mark.slow_proof, pytest.mark.timeout(7200)]


def test_a_million_verdicts_equal_olmo_core():
    from olmo_core.data.utils import find_periodic_sequences

    rng = np.random.Generator(np.random.PCG64(11))
    rejected = 0
    for k in range(1_000_000):
        S = int(rng.integers(3, 96))
        x = rng.integers(0, int(rng.integers(2, 6)), S).astype(np.uint32)
        count = int(rng.integers(3, 9))
        if k % 2:
            p = int(rng.integers(1, 15))
            length = max(0, count * p + int(rng.integers(-2, 3)))
            at = int(rng.choice([0, max(0, S - length), rng.integers(0, S)]))
            part = np.resize(rng.integers(0, 6, p), length)[: S - at]
            x[at : at + len(part)] = part
        found = any(m.times >= count for m in find_periodic_sequences(x.astype(np.int64), max_period=13))
        verdict = rejections(x[None], FilterConfig(enabled=True, max_count=count))[0, 0] != 0
        assert verdict == found, (x.tolist(), count)
        rejected += found
    assert 100_000 < rejected < 900_000


def test_both_tokenizers_agree_on_100_megabytes_of_real_text():
    fast = load_tokenizer(TokenizerConfig(), "fastokens")
    slow = load_tokenizer(TokenizerConfig(), "tokenizers")
    seen = 0
    for files in environment_files().values():
        taken = 0
        for file in files:
            texts = [
                d.text
                for d in read_documents(file.path, format="txt", max_bytes=2_000_000)
                if isinstance(d, Document)
            ]
            if not texts:
                continue
            assert fast.encode_batch(texts) == slow.encode_batch(texts), file.name
            taken += sum(len(t.encode()) for t in texts)
            if taken > 45e6:
                break
        seen += taken
    assert seen > 100e6
