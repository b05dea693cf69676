"""Held-out loss: documents, both definitions, bits per byte. Oracles: sheet 6.1, NumPy, PyTorch."""

import gzip
import json

import jax.numpy as jnp
import numpy as np
import pytest

from evals.heldout import Document, HeldoutSet, evaluate, figures, pooled, read_documents, spans, summary
from infra.errors import DataError

EOS = 36


def write_tokens(root, shards, boundaries=True):
    """A token directory with only what the reader needs. shards: {path: (label, [documents], tail)}"""
    entries = []
    for path, (label, documents, tail) in shards.items():
        ids = np.array([t for d in documents for t in d] + tail, "<u4")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        ids.tofile(root / path)
        if boundaries:
            at, rows = 0, []
            for k, d in enumerate(documents):
                rows.append(f"{at},{at + len(d)},doc{k},src,{k}\n")
                at += len(d)
            with gzip.open((root / path).with_suffix(".csv.gz"), "wt") as f:
                f.writelines(rows)
        entries.append({"path": path, "label": label, "tokens": len(ids), "sha256": "", "sample_sha256": ""})
    manifest = {"format": "olmo3-tokens-v1", "shards": entries, "tokenizer": {"vocab_size": 100278}}
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def read(root, **options):
    defaults = {"context": 8, "per_domain": 100, "eos_id": EOS, "byte_lengths": np.arange(37)}
    return read_documents(root, **(defaults | options))


def test_the_reference_definition_is_low_by_one_prediction_per_document():
    """Sheet 6.1: documents of 4, 2 and 8 (cut) tokens with a loss of 1 per prediction give 11/14."""
    rows = [{"nll": n - 1.0, "predictions": n - 1, "tokens": n, "bytes": 10} for n in (4, 2, 8)]
    found = pooled(rows)
    assert found["reference"] == pytest.approx(11 / 14, rel=1e-12)
    assert found["reference"] == pytest.approx(0.7857142686843872, rel=1e-7)
    assert found["per_prediction"] == 1.0


def test_documents_are_cut_at_eos_and_at_the_context(tmp_path):
    documents = [[1, 2, 3, EOS], list(range(1, 12)) + [EOS], [EOS], [4, EOS]]
    for boundaries in (True, False):
        root = write_tokens(tmp_path / str(boundaries), {"a/0.npy": ("a", documents, [7, 8])}, boundaries)
        found = read(root)
        assert [d.tokens.tolist() for d in found.documents] == [[1, 2, 3, EOS], list(range(1, 9)), [4, EOS]]
        assert [d.cut for d in found.documents] == [False, True, False]
        assert found.left_out == {
            "without_a_prediction": 1,
            "unterminated_tail_tokens": 2,
            "beyond_the_limit": 0,
        }
        assert found.documents[1].bytes == sum(range(2, 9))  # the first token is not predicted
    assert spans(np.array([5, 6]), EOS) == []


def test_a_larger_limit_only_adds_documents(tmp_path):
    documents = [[k % 30 + 1, 2, EOS] for k in range(40)]
    root = write_tokens(tmp_path, {"a/0.npy": ("a", documents, []), "b/0.npy": ("b", documents, [])})
    few, many = read(root, per_domain=5), read(root, per_domain=9)
    assert few.domains == ["a", "b"] and len(few.documents) == 10
    assert {d.id for d in few.documents} < {d.id for d in many.documents}
    assert few.left_out["beyond_the_limit"] == 70
    assert few.digest == read(root, per_domain=5).digest != many.digest


def test_no_document_is_a_named_error(tmp_path):
    with pytest.raises(DataError, match="no held-out document"):
        read(write_tokens(tmp_path, {"a/0.npy": ("a", [[EOS]], [])}))


def test_losses_match_a_bigram_oracle_and_do_not_depend_on_the_batch(bigram):
    make, table = bigram
    rng = np.random.default_rng(0)
    documents = [Document(str(i), "ab"[i % 2], rng.integers(0, 37, n).astype(np.int32), 3 * n, False)
                 for i, n in enumerate((2, 9, 24, 17, 25))]  # fmt: skip
    heldout = HeldoutSet(documents, 25, {})
    logp = table.astype(np.float64) - np.log(np.exp(table.astype(np.float64)).sum(1, keepdims=True))
    want = [-sum(logp[a, b] for a, b in zip(d.tokens, d.tokens[1:])) for d in documents]
    results = [evaluate(make(batch_tokens=n), jnp.asarray(table), heldout) for n in (24, 64, 512)]
    assert results[0] == results[1] == results[2]
    assert np.abs(np.array(results[0]) - want).max() < 2e-5
    found = summary(heldout, results[0])
    assert found["pooled"]["per_prediction"] == pytest.approx(
        sum(want) / sum(len(d.tokens) - 1 for d in documents), abs=1e-6
    )
    assert found["domains"]["a"]["documents"] == 3
    assert found["pooled"]["bits_per_byte"] == pytest.approx(
        sum(want) / np.log(2) / sum(3 * len(d.tokens) for d in documents), rel=1e-6
    )


def test_losses_equal_torch_cross_entropy(scorer, params, hf_model, text):
    import torch

    samples = ["The cat sat on the mat.", "def f(x):\n    return x * 2\n" * 9, '{"key": [1, 2, 3]}']
    lengths = text.byte_lengths(100352)
    documents = []
    for i, sample in enumerate(samples):
        ids = np.array([*text.encode(sample), text.eos_id][:96], np.int32)
        documents.append(Document(str(i), "x", ids, int(lengths[ids[1:]].sum()), False))
    ours = evaluate(scorer, params, HeldoutSet(documents, 96, {}))
    for d, mine in zip(documents, ours, strict=True):
        ids = torch.tensor(d.tokens.astype(np.int64))
        with torch.no_grad():
            logits = hf_model(ids[None]).logits[0, :-1].float()
        theirs = float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        assert mine == pytest.approx(theirs, rel=2e-6)


def test_first_ids_have_no_bos_and_bytes_are_exact(text):
    """F1, F2: the first id is the text's own; bytes of all tokens are the bytes of the text."""
    lengths = text.byte_lengths(100352)
    for sample in ("The cat", "héllo wörld 中文 🙂\n\tdef f():", " leading", "a<|endoftext|>b"):
        ids = text.encode(sample)
        assert ids[0] != text.eos_id
        assert lengths[ids].sum() == len(sample.replace("<|endoftext|>", "").encode())
    assert lengths[text.eos_id] == 0 and (lengths[100278:] == 0).all()


def test_a_loss_that_is_not_finite_is_named():
    heldout = HeldoutSet([Document("d7", "a", np.array([1, 2]), 2, False)], 8, {})
    with pytest.raises(DataError, match="d7"):
        summary(heldout, [float("nan")])


def test_perplexity_is_the_exponential_of_the_loss():
    assert figures(8.0, 4, 5, 16)["perplexity"] == pytest.approx(np.exp(2.0))
