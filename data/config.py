"""Recipe sections of the data plane: corpus, tokenizer, slicing, order.

Facts of AI2's tokenizer and order come from OLMo-core (`data/tokenizer.py`, `data/data_loader.py`,
version 3.0.0).
"""

from typing import Literal

from pydantic import Field, model_validator

from data.environment import DOMAINS
from infra.section import Section

DOLMA2_SHA256 = "3ca996cca8afea58b34e95c353e859333592642a5e51d695d7a6dbbaf692dfe9"


class Source(Section):
    """One labelled set of document files."""

    domain: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    glob: str = Field(min_length=1, description="local path or gs:// pattern")
    format: Literal["auto", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"] = "auto"
    text_field: str = "text"
    id_field: str = "id"


class CorpusConfig(Section):
    """Where documents come from, and which are held out.

    `environment` reads text that every machine with this package's environment already has (the
    standard library and installed packages), in four domains; `files` reads `sources`; `tokens` reads
    a published mix manifest of token files (`label,path` lines) and skips tokenization.
    """

    kind: Literal["environment", "files", "tokens"] = "environment"
    sources: tuple[Source, ...] = ()
    megabytes_per_domain: float = Field(4.0, gt=0, description="environment: training text per domain, MB")
    heldout_one_in: int = Field(20, ge=2, description="a document is held out when sha256(text) % this == 0")
    heldout_max_documents: int = Field(40, ge=1, description="held-out documents kept per domain")
    shard_megabytes: float = Field(
        2.0, gt=0, description="environment: uncompressed text per document shard, MB"
    )
    manifest: str = Field("", description="tokens: name of a mix that ships in ai2-olmo-core, or a path")
    base_dir: str = Field("", description="tokens: what the manifest's paths are relative to")
    heldout_manifest: str = Field(
        "",
        description="validation mix to judge on (v3-small-ppl-validation, c4-ppl-validation, or a path), below base_dir; "
        "tokens: the held-out side; other kinds: judged instead of the corpus's own held-out documents",
    )
    max_document_mb: float = Field(64.0, gt=0, description="a longer document is refused, counted and listed")

    @model_validator(mode="after")
    def _complete(self) -> "CorpusConfig":
        if self.kind == "files" and not self.sources:
            raise ValueError("corpus.kind 'files' needs at least one entry in corpus.sources")
        if self.kind == "tokens" and not (self.manifest and self.base_dir):
            raise ValueError("corpus.kind 'tokens' needs corpus.manifest and corpus.base_dir")
        if self.heldout_manifest and not self.base_dir:
            raise ValueError("corpus.heldout_manifest needs corpus.base_dir, what its paths are relative to")
        return self

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains of the judged documents; empty where only a manifest says them."""
        if self.heldout_manifest or self.kind == "tokens":
            return ()
        return DOMAINS if self.kind == "environment" else tuple(dict.fromkeys(s.domain for s in self.sources))

    @property
    def judged(self) -> str:
        """Folder below tokens/ whose documents are judged."""
        return "validation" if self.heldout_manifest and self.kind != "tokens" else "heldout"


class TokenizerConfig(Section):
    """The tokenizer, by content. `file` empty means the dolma2 JSON inside the installed `ai2-olmo`."""

    name: str = "allenai/dolma2-tokenizer"
    file: str = ""
    sha256: str = DOLMA2_SHA256
    vocab_size: int = Field(100278, ge=1)
    eos_id: int = Field(100257, ge=0)
    pad_id: int = Field(100277, ge=0)
    strip: bool = Field(True, description="strip white space around a document first, as AI2's toolkit does")
    literal_eos: Literal["special", "text"] = Field(
        "special", description="a literal <|endoftext|> in a document: the EOS id (AI2's tools) or plain text"
    )


class FilterConfig(Section):
    """OLMo-core's repetition filter over instances (sheet section 5.6). Off for 7B, on for 32B and 190M."""

    enabled: bool = False
    min_period: int = Field(1, ge=1)
    max_period: int = Field(13, ge=1)
    max_count: int = Field(32, ge=2)


class DataConfig(Section):
    """Slicing, filter, order and batch."""

    sequence_length: int = Field(8192, ge=8)
    max_sequence_length: int | None = Field(
        None, description="OLMo-core's max_target_sequence_length; its chunk is this over sequence_length"
    )
    global_batch_instances: int = Field(512, ge=1)
    seed: int = Field(34521, ge=0)
    epoch: int = Field(1, ge=1)
    order: Literal["olmo-core-pcg64-v1"] = "olmo-core-pcg64-v1"
    filter: FilterConfig = FilterConfig()
    workers: int = Field(0, ge=0, description="Grain read-ahead workers; never an input of the order")
    worker_kind: Literal["thread", "process"] = "thread"
    prefetch: int = Field(2, ge=0)

    @model_validator(mode="after")
    def _chunk(self) -> "DataConfig":
        if self.max_sequence_length is not None and self.max_sequence_length % self.sequence_length:
            raise ValueError(
                f"data.max_sequence_length {self.max_sequence_length} is not a multiple of "
                f"data.sequence_length {self.sequence_length}"
            )
        return self

    @property
    def chunk(self) -> int:
        """Consecutive instances that are shuffled as one block (1 in stages 1 and 2)."""
        return (self.max_sequence_length or self.sequence_length) // self.sequence_length

    @property
    def global_batch_tokens(self) -> int:
        return self.sequence_length * self.global_batch_instances
