"""Fixtures of the data tests: token files with known content, and OLMo-core's own loader over them."""

import csv
import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.index import FORMAT
from data.token_files import TokenShard, sample_digest
from infra.artifacts import write_json_atomic

EOS, PAD, VOCAB = 100257, 100277, 100278


def make_tokens(n: int, seed: int, mean_document: int = 40) -> np.ndarray:
    """n random token ids with an EOS about every `mean_document`: uint32[n], the last one an EOS."""
    rng = np.random.Generator(np.random.PCG64(seed))
    tokens = rng.integers(0, 100256, n).astype("<u4")
    tokens[rng.random(n) < 1 / mean_document] = EOS
    if n:
        tokens[-1] = EOS
    return tokens


@pytest.fixture
def token_dir(tmp_path: Path) -> Callable[..., Path]:
    """Write token files (one per array) with a manifest, as the tokenize job does; returns the directory."""

    def write(arrays: list[np.ndarray], name: str = "tokens", labels: list[str] | None = None) -> Path:
        root = tmp_path / name
        entries = []
        for k, array in enumerate(arrays):
            label = labels[k] if labels else f"d{k}"
            relative = f"{label}/{k:05d}.npy"
            path = root / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            array.astype("<u4").tofile(path)
            ends = np.flatnonzero(array == EOS) + 1
            with gzip.open(path.with_suffix(".csv.gz"), "wt", newline="") as f:
                csv.writer(f).writerows(zip([0, *ends[:-1].tolist()], ends.tolist()))
            entries.append(
                {
                    "path": relative,
                    "label": label,
                    "tokens": len(array),
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                    "sample_sha256": sample_digest(path),
                }
            )
        tokenizer = {
            "sha256": "3ca996cca8afea58b34e95c353e859333592642a5e51d695d7a6dbbaf692dfe9",
            "vocab_size": VOCAB,
            "eos_id": EOS,
            "pad_id": PAD,
            "strip": True,
            "literal_eos": "special",
        }
        manifest = {"format": FORMAT, "tokenizer": tokenizer, "filter": None, "shards": entries}
        write_json_atomic(root / "manifest.json", manifest)
        return root

    return write


@pytest.fixture
def shards_of() -> Callable[[Path], list[TokenShard]]:
    """The token files below a directory, sorted by name, without digests."""

    def shards(root: Path) -> list[TokenShard]:
        paths = sorted(root.rglob("*.npy"))
        return [TokenShard(str(p), p.parent.name, p.stat().st_size // 4) for p in paths]

    return shards


@pytest.fixture
def reference_loader(tmp_path: Path) -> Callable[..., Any]:
    """OLMo-core's NumpyFSLDataLoader over token files, reshuffled for `epoch`."""

    def build(
        paths: list[str],
        sequence_length: int,
        batch: int,
        *,
        seed: int = 34521,
        epoch: int = 1,
        max_target: int | None = None,
        filter_count: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        kind: str = "fsl",
        **options: Any,
    ) -> Any:
        from olmo_core.data import (
            DataCollator,
            InstanceFilterConfig,
            NumpyDataLoaderConfig,
            NumpyFSLDatasetConfig,
            NumpyPackedFSLDatasetConfig,
            NumpyPaddedFSLDatasetConfig,
            TokenizerConfig,
        )
        from olmo_core.data.numpy_dataset import NumpyDatasetDType

        made = {
            "fsl": NumpyFSLDatasetConfig,
            "packed": NumpyPackedFSLDatasetConfig,
            "padded": NumpyPaddedFSLDatasetConfig,
        }[kind]
        if max_target is not None:
            options["max_target_sequence_length"] = max_target
        if filter_count is not None:
            options["instance_filter_config"] = InstanceFilterConfig(
                repetition_min_period=1, repetition_max_period=13, repetition_max_count=filter_count
            )
        work = tmp_path / "reference"
        config = made(
            tokenizer=TokenizerConfig.dolma2(),
            paths=paths,
            sequence_length=sequence_length,
            dtype=NumpyDatasetDType.uint32,
            work_dir=str(work),
            **options,
        )
        dataset = config.build()
        dataset.prepare()
        loader = NumpyDataLoaderConfig(
            global_batch_size=batch * sequence_length, seed=seed, work_dir=str(work)
        ).build(dataset, collator=DataCollator(pad_token_id=PAD, vocab_size=VOCAB), dp_process_group=None)
        loader.dp_rank, loader.dp_world_size = rank, ranks
        loader.reshuffle(epoch=epoch)
        return loader

    return build
