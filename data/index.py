"""The index of instances: which slice of which token file is instance i.

Instance k of file f is tokens [k*S, (k+1)*S) of that file; instances never cross files and each file's tail
is dropped; files count in manifest order (OLMo-core's `NumpyFSLDataset`, 3.0.0). With `chunk` c > 1 a file
is cut to whole multiples of c*S first. The surprising thing: the digest is made of content digests, so a
renamed file in the same place is the same index, and a changed byte is another one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from data.config import FilterConfig, TokenizerConfig
from data.files import join
from data.token_files import TokenShard, open_tokens, verify_shard
from infra.artifacts import fingerprint, read_json
from infra.errors import DataError, IdentityError

MANIFEST = "manifest.json"
FORMAT = "olmo3-tokens-v1"
ADDRESSES = ("gs", "s3", "https", "file", "memory")  # where published tokens may lie; plain http is not asked
LONGEST_NAME = 255  # bytes of one file name


def read_manifest(tokens_dir: str | Path) -> dict[str, Any]:
    """The manifest of a token directory; refuses another format."""
    manifest = read_json(Path(tokens_dir) / MANIFEST)
    if not isinstance(manifest, Mapping) or manifest.get("format") != FORMAT:
        raise IdentityError(f"{tokens_dir}/{MANIFEST} is not of the format {FORMAT}", "tokenize again")
    wrong = manifest_problem(manifest)
    if wrong:
        raise IdentityError(f"{tokens_dir}/{MANIFEST}: {wrong}", "it is damaged: tokenize again")
    return dict(manifest)


def manifest_problem(manifest: Mapping[str, Any]) -> str:
    """What is wrong with a manifest; '' if nothing is. No entry may lead out of the folder its tokens lie in."""
    shards, tokenizer = manifest.get("shards"), manifest.get("tokenizer")
    if not isinstance(shards, list) or not isinstance(tokenizer, Mapping):
        return "it has no list `shards` or no `tokenizer`"
    vocab_size = tokenizer.get("vocab_size")
    if not _is_count(vocab_size) or vocab_size == 0:
        return f"its tokenizer has the vocab_size {str(vocab_size)[:40]}"
    if wrong := _base_problem(manifest.get("base_dir", "")):
        return f"`base_dir` {wrong}"
    for number, entry in enumerate(shards):
        if not isinstance(entry, Mapping):
            return f"shard {number} is no object"
        for field in ("path", "label", "sha256", "sample_sha256"):
            if not isinstance(entry.get(field), str):
                return f"shard {number} has no text {field!r}"
        path = entry["path"]
        if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path or "://" in path:
            return f"shard {number} has the path {path[:80]!r}, which is not one below its folder"
        if not _nameable(path):
            return f"shard {number} has the path {path[:80]!r}, which no file can have"
        if not _is_count(entry.get("tokens")):
            return f"shard {number} has {str(entry.get('tokens'))[:40]} tokens"
        high = entry.get("max_id", -1)  # -1: no tokens
        if high != -1 and not (_is_count(high) and high < vocab_size):
            return f"shard {number} has the max_id {str(high)[:40]}, the vocabulary {vocab_size} entries"
    return ""


def _is_count(value: Any) -> TypeGuard[int]:
    """Whether `value` is a number of something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60


def _nameable(path: str) -> bool:
    """Whether a file can have this path: no lone surrogate, no NUL, no name longer than a file system takes."""
    try:
        return "\0" not in path and all(len(name.encode()) <= LONGEST_NAME for name in path.split("/"))
    except UnicodeEncodeError:
        return False


def _base_problem(base: Any) -> str:
    """What is wrong with the folder that a manifest's paths are relative to; '' if nothing is. Nothing is opened."""
    if not isinstance(base, str):
        return "is no text"
    if not _nameable(base):
        return f"is {base[:80]!r}, which no folder can have as its name"
    scheme, address, _ = base.partition("://")
    if address and scheme not in ADDRESSES:
        return f"is {base[:80]!r}; addresses are {', '.join(f'{a}://' for a in ADDRESSES)}"
    return ""


def check_tokenizer(manifest: Mapping[str, Any], tokenizer: TokenizerConfig, where: str) -> None:
    """Refuse tokens that another tokenizer made, or the same one with another policy."""
    made = manifest["tokenizer"]
    for field in ("sha256", "vocab_size", "eos_id", "pad_id", "strip", "literal_eos"):
        if made.get(field) != getattr(tokenizer, field):
            raise IdentityError(
                f"the tokens in {where} were made with tokenizer.{field} = {made.get(field)!r}, "
                f"the recipe says {getattr(tokenizer, field)!r}",
                "tokenize again with this tokenizer, or use the recipe that made these tokens",
            )


class InstanceIndex:
    """Instances of `sequence_length` tokens over a list of token files.

    `mask[i]` is True where instance i counts in the loss; None when no filter is on.
    """

    def __init__(
        self,
        shards: Sequence[TokenShard],
        sequence_length: int,
        chunk: int = 1,
        mask: np.ndarray | None = None,
    ):
        self.shards = tuple(shards)
        self.sequence_length = sequence_length
        self.chunk = chunk
        block = sequence_length * chunk
        counts = [shard.tokens // block * chunk for shard in self.shards]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self.n_instances = int(self.starts[-1])
        self._open: dict[int, Any] = {}
        self.vocab_size = 0
        self.mask: np.ndarray | None = None
        if mask is not None:
            self.set_mask(mask)

    @classmethod
    def from_manifest(
        cls,
        tokens_dir: str | Path,
        sequence_length: int,
        chunk: int = 1,
        *,
        tokenizer: TokenizerConfig | None = None,
        filter: FilterConfig | None = None,
        verify: str = "full",
    ) -> "InstanceIndex":
        """The index of a directory that `data.tokenize_job.tokenize` wrote.

        `verify`: full (every byte), sampled, size, or none (the files are not touched before they are read).
        Ids are held against the manifest's `max_id` by full and sampled verification, as far as it reads; with the others, and where
        the job gave no `max_id` (published mixes), when they are read. `tokenizer` refuses tokens of another one. With
        `filter.enabled` the repetition mask is made, or taken from the job when it was made there.
        """
        tokens_dir = Path(tokens_dir)
        manifest = read_manifest(tokens_dir)
        if tokenizer is not None:
            check_tokenizer(manifest, tokenizer, str(tokens_dir))
        base = manifest.get("base_dir") or str(tokens_dir)
        shards = [
            TokenShard(
                join(base, s["path"]),
                s["label"],
                s["tokens"],
                s["sha256"],
                s["sample_sha256"],
                s["path"],
                s.get("max_id"),
            )
            for s in manifest["shards"]
        ]
        if verify != "none":
            for shard in shards:
                verify_shard(shard, verify)
        index = cls(shards, sequence_length, chunk)
        if verify not in ("full", "sampled") or any("max_id" not in s for s in manifest["shards"]):
            index.vocab_size = manifest["tokenizer"]["vocab_size"]
        if index.n_instances == 0:
            raise DataError(
                f"{tokens_dir} holds {sum(s.tokens for s in shards)} tokens in {len(shards)} files, "
                f"not one instance of {sequence_length}",
                "use a larger corpus or a smaller data.sequence_length",
            )
        if filter is not None and filter.enabled:
            from data.masks import mask_for

            index.set_mask(mask_for(index, filter, tokens_dir, manifest))
        return index

    @property
    def digest(self) -> str:
        """Identity of the instances by content: sequence length, chunk and the digest of every file, in order."""
        return fingerprint(
            {
                "sequence_length": self.sequence_length,
                "chunk": self.chunk,
                "files": [[shard.identity, shard.tokens] for shard in self.shards],
            }
        )

    def set_mask(self, mask: np.ndarray) -> None:
        """Attach a repetition mask, bool[n_instances]; another length is refused."""
        if len(mask) != self.n_instances:
            raise DataError(
                f"the repetition mask has {len(mask)} entries, the index {self.n_instances} instances",
                "the mask belongs to other tokens or another sequence length: make it again",
            )
        self.mask = np.asarray(mask, dtype=bool)

    def tokens_of(self, shard: int) -> Any:
        """The opened token file number `shard` (kept open)."""
        found = self._open.get(shard)
        if found is None:
            found = self._open[shard] = open_tokens(self.shards[shard])
        return found

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Instance ids -> (file number, first token in that file), both int64."""
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.n_instances):
            raise DataError(f"instance {int(ids.max())} is out of range: the index has {self.n_instances}")
        files = np.searchsorted(self.starts, ids, side="right") - 1
        return files, (ids - self.starts[files]) * self.sequence_length

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of the instances `ids`: uint32[len(ids), S], in that order."""
        files, offsets = self.locate(ids)
        S = self.sequence_length
        out = np.empty((len(files), S), dtype=np.uint32)
        for row, (file, offset) in enumerate(zip(files.tolist(), offsets.tolist())):
            out[row] = self.tokens_of(file)[offset : offset + S]
        if self.vocab_size and len(out) and int(out.max()) >= self.vocab_size:
            row = int(np.flatnonzero((out >= self.vocab_size).any(axis=1))[0])
            raise DataError(
                f"token file {self.shards[int(files[row])].path} holds the id {int(out[row].max())} in instance "
                f"{int(ids[row])}, the vocabulary has {self.vocab_size}",
                "these are not tokens of this tokenizer, or not uint32",
            )
        return out

    def instance_mask(self, ids: np.ndarray) -> np.ndarray:
        """bool[len(ids)]: False where the repetition filter rejected the instance."""
        if self.mask is None:
            return np.ones(len(ids), dtype=bool)
        return self.mask[np.asarray(ids, dtype=np.int64)]

    def label_mask(self, ids: np.ndarray) -> np.ndarray | None:
        """None: every token of a plain instance is a label. Packed and padded rows have a mask."""
        return None

    def labels_of(self, ids: np.ndarray) -> list[str]:
        """The label (domain) of each instance."""
        files, _ = self.locate(ids)
        return [self.shards[f].label for f in files.tolist()]

    def require(self, batch: int, steps: int) -> None:
        """Raise unless one epoch gives `steps` batches of `batch` instances."""
        usable = self.n_instances // self.chunk * self.chunk
        if usable < batch:
            raise DataError(
                f"the corpus gives {usable} instances of {self.sequence_length} tokens, "
                f"which is less than one batch of {batch}",
                "use a larger corpus (corpus.megabytes_per_domain), a smaller batch or shorter sequences",
            )
        if usable < batch * steps:
            raise DataError(
                f"{steps} steps of {batch} need {batch * steps} instances, the corpus gives {usable} "
                f"({usable // batch} steps)",
                "use a larger corpus, fewer steps or a smaller batch",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}
