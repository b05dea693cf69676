"""The tokenize job: document files to token files, boundaries, filter masks and one manifest, with Beam.

    tokenize([("code", "corpus/train/code/00000.jsonl.gz"), ...], out, TokenizerConfig())

One element of the pipeline is one input file. Names and bytes depend on the input list only, never on
bundle, worker, retry or runner: a shard is called `<domain>/<number in its domain>`, is written beside its
name and renamed, and the manifest is in the order of the input list. The audit in the manifest is enforced.

The surprising thing: the manifest is written by the pipeline's last and only end node, because DaskRunner
runs nothing but the last branch; errors a user can fix travel there as data, since runners turn exceptions
into text. Runners by name: `data/runners.py`.
"""

import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam

from data.config import FilterConfig, TokenizerConfig
from data.files import join, whole_file
from data.index import FORMAT, MANIFEST
from data.masks import filter_identity
from data.runners import make_pipeline
from data.shard_writer import JobSpec, ShardSpec, tokenize_shard
from data.token_files import byte_size
from data.tokenizer import Tokenizer, load_tokenizer, tokenizer_file
from infra.artifacts import read_json, sha256_file
from infra.errors import DataError, LaunchError, ReproError
from infra.progress import Progress

MIX, ERRORS = "mix.txt", "errors.json"


class TokenizeShard(beam.DoFn):
    """ShardSpec -> (position, manifest entry or error). The tokenizer is made in the worker, never pickled."""

    def __init__(self, job: JobSpec, cfg: TokenizerConfig):
        self.job, self.cfg = job, cfg
        self.tokenizer: Tokenizer | None = None

    def process(self, element: tuple[int, dict[str, str]]) -> Iterable[tuple[int, dict[str, Any]]]:
        position, fields = element
        try:
            if self.tokenizer is None:
                self.tokenizer = load_tokenizer(self.cfg)
            yield position, tokenize_shard(ShardSpec(**fields), self.job, self.tokenizer)
        except ReproError as e:
            yield position, {"error": {"what": e.what, "remedy": e.remedy}}


class WriteManifest(beam.DoFn):
    """All (position, entry) pairs -> the manifest file, or the errors file. Yields the name it wrote."""

    def __init__(self, job: JobSpec, tokenizer: dict[str, Any], expected: int):
        self.job, self.tokenizer, self.expected = job, tokenizer, expected

    def process(self, found: list[tuple[int, dict[str, Any]]]) -> Iterable[str]:
        entries = [entry for _, entry in sorted(found, key=lambda pair: pair[0])]
        errors = [entry["error"] for entry in entries if "error" in entry]
        if not errors:
            try:
                manifest = make_manifest(entries, self.job, self.tokenizer, self.expected)
                write_text(join(self.job.out, MIX), "".join(f"{e['label']},{e['path']}\n" for e in entries))
                write_text(
                    join(self.job.out, MANIFEST), json.dumps(manifest, indent=1, sort_keys=True) + "\n"
                )
                yield MANIFEST
                return
            except ReproError as e:
                errors = [{"what": e.what, "remedy": e.remedy}]
        write_text(join(self.job.out, ERRORS), json.dumps(errors, indent=1) + "\n")
        yield ERRORS


def write_text(path: str, text: str) -> None:
    with whole_file(path) as f:
        f.write(text.encode())


def make_manifest(
    entries: list[dict[str, Any]], job: JobSpec, tokenizer: dict[str, Any], expected: int
) -> dict[str, Any]:
    """The manifest of a job: its entries, sums per domain, and the audit, which must hold."""
    domains: dict[str, Counter[str]] = {}
    for entry in entries:
        sums = domains.setdefault(entry["label"], Counter())
        for key in ("documents", "tokens", "eos", "literal_eos", "literal_eos_as_text", "text_bytes"):
            sums[key] += entry[key]
        for reason, count in entry["rejected"].items():
            sums[f"rejected: {reason}"] += count
        for key in ("instances", "masked"):
            sums[key] += entry.get("mask", {}).get(key, 0)
    audit = audit_entries(entries, tokenizer["vocab_size"], expected)
    return {
        "format": FORMAT,
        "dtype": "<u4",
        "tokenizer": tokenizer,
        "filter": filter_identity(job.filter, job.sequence_length) if job.filter.enabled else None,
        "max_document_bytes": job.max_bytes,
        "shards": entries,
        "domains": {name: dict(sorted(sums.items())) for name, sums in domains.items()},
        "audit": audit,
    }


def audit_entries(entries: Sequence[dict[str, Any]], vocab_size: int, expected: int) -> dict[str, Any]:
    """Totals of all shards; raises DataError where they contradict each other."""
    if len(entries) != expected:
        raise DataError(f"the job gave {len(entries)} shards for {expected} inputs", "run it again")
    for entry in entries:
        due = entry["documents"] + entry["literal_eos"]
        if entry["eos"] != due:
            raise DataError(
                f"{entry['path']} has {entry['eos']} EOS ids, {entry['documents']} documents and "
                f"{entry['literal_eos']} literal EOS make {due}",
                "the tokenizer does not treat the EOS text as one token: check tokenizer.eos_id",
            )
        if entry["max_id"] >= vocab_size:
            raise DataError(
                f"{entry['path']} has the token id {entry['max_id']}, the vocabulary has {vocab_size}"
            )
    used = [e for e in entries if e["tokens"]]
    rejected = sum((Counter(e["rejected"]) for e in entries), Counter[str]())
    return {
        "documents": sum(e["documents"] for e in entries),
        "tokens": sum(e["tokens"] for e in entries),
        "eos": sum(e["eos"] for e in entries),
        "literal_eos": sum(e["literal_eos"] for e in entries),
        "min_id": min((e["min_id"] for e in used), default=-1),
        "max_id": max((e["max_id"] for e in used), default=-1),
        "rejected": dict(sorted(rejected.items())),
        "eos_equals_documents_plus_literal": True,
    }


def shard_specs(sources: Sequence[tuple[str, str | Path] | ShardSpec]) -> list[ShardSpec]:
    """One ShardSpec per input, named `<domain>/<number in its domain>`, in the order given."""
    counts: Counter[str] = Counter()
    specs = []
    for source in sources:
        spec = source if isinstance(source, ShardSpec) else ShardSpec(str(source[1]), "", source[0], "")
        number = counts[spec.label]
        counts[spec.label] += 1
        specs.append(
            dataclasses.replace(
                spec,
                name=spec.name or f"{spec.label}/{number:05d}",
                source=spec.source or f"{spec.label}/{Path(spec.path).name}",
            )
        )
    names = Counter(spec.name for spec in specs)
    for name, count in names.items():
        if count > 1:
            raise DataError(f"{count} inputs would be written to {name}.npy", "give them different names")
    return specs


def build_pipeline(
    pipeline: beam.Pipeline, specs: Sequence[ShardSpec], job: JobSpec, cfg: TokenizerConfig
) -> Any:
    """The graph: files -> reshuffle (one file per worker at a time) -> tokenize -> one list -> manifest."""
    described = {**Tokenizer.identity(cfg), "sha256": cfg.sha256 or sha256_file(tokenizer_file(cfg))}
    return (
        pipeline
        | "files" >> beam.Create([(k, dataclasses.asdict(spec)) for k, spec in enumerate(specs)])
        | "spread" >> beam.Reshuffle()
        | "tokenize" >> beam.ParDo(TokenizeShard(job, cfg))
        | "collect" >> beam.CombineGlobally(beam.combiners.ToListCombineFn())
        | "manifest" >> beam.ParDo(WriteManifest(job, described, len(specs)))
    )


def tokenize(
    sources: Sequence[tuple[str, str | Path] | ShardSpec],
    out: str | Path,
    cfg: TokenizerConfig,
    *,
    sequence_length: int = 8192,
    filter: FilterConfig | None = None,
    max_document_mb: float = 64.0,
    runner: str = "direct",
    processes: int = 1,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the job and return its manifest. `sources`: (domain, document file) pairs in manifest order.

    `runner`: direct, dask, flink or dataflow; `options` are further Beam flags. Existing files of the same
    names are replaced. A fault in the data is a DataError that names the file.
    """
    specs = shard_specs(sources)
    if not specs:
        raise DataError("there is no document file to tokenize", "build the corpus first")
    filter = filter or FilterConfig()
    job = JobSpec(str(out), sequence_length, filter, int(max_document_mb * 1e6))
    for stale in (MANIFEST, ERRORS):
        if "://" not in str(out):
            Path(out, stale).unlink(missing_ok=True)
    progress = Progress("tokenize", len(specs), "files")
    with _Watch(progress, specs, job):
        pipeline, finish = make_pipeline(runner, processes, options)
        build_pipeline(pipeline, specs, job, cfg)
        try:
            finish(pipeline)
        except RuntimeError as e:  # a runner with workers of its own gives the worker's traceback as text
            last = [line for line in str(e).splitlines() if line.strip()][-1:]
            raise LaunchError(
                f"the tokenize job failed: {''.join(last)[:300]}", "see the traceback: --debug"
            ) from e
    manifest = read_result(job)
    progress.finish(f"{manifest['audit']['documents']} documents, {manifest['audit']['tokens']} tokens")
    return manifest


def read_result(job: JobSpec) -> dict[str, Any]:
    """The manifest that the pipeline wrote, checked against the files; or the error it recorded."""
    if "://" in job.out:
        import fsspec

        def load(name: str) -> Any:
            fs, key = fsspec.core.url_to_fs(join(job.out, name))
            return json.loads(fs.cat_file(key)) if fs.exists(key) else None
    else:

        def load(name: str) -> Any:
            path = Path(job.out, name)
            return read_json(path) if path.exists() else None

    errors = load(ERRORS)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise DataError(errors[0]["what"] + more, errors[0]["remedy"])
    manifest = load(MANIFEST)
    if manifest is None:
        raise DataError(f"the tokenize job ended without a manifest in {job.out}", "see the runner's log")
    for entry in manifest["shards"]:
        if byte_size(join(job.out, entry["path"])) != entry["tokens"] * 4:
            raise DataError(f"{entry['path']} does not have the size its manifest says", "tokenize again")
    return dict(manifest)


class _Watch:
    """Moves the progress line while the pipeline runs: counts the expected files that stand already."""

    def __init__(self, progress: Progress, specs: Sequence[ShardSpec], job: JobSpec):
        self.progress, self.stop = progress, threading.Event()
        self.paths = [Path(job.out, f"{s.name}.npy") for s in specs] if "://" not in job.out else []
        self.before = {p: p.stat().st_mtime_ns for p in self.paths if p.exists()}
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.stop.wait(1.0):
            done = sum(1 for p in self.paths if p.exists() and p.stat().st_mtime_ns != self.before.get(p))
            self.progress.update(done)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
