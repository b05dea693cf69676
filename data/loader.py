"""Batches in the global order, through Grain.

One element of the Grain pipeline is the whole slice of one global step: a random access source reads the
rows of step s in one gather. The position is one integer, the step. Hosts, workers and prefetch depth are
not inputs of the order: host h of H reads rows h, h+H, h+2H, ... of each global batch (`order.rank_slice`,
the only place where data is split).

The surprising thing: no Grain sampler, shuffle or shard option is used; each batch carries its step and ids,
and a stream that is re-strided, repeated or lost is an error at once.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from data.config import DataConfig
from data.index import InstanceIndex
from data.order import batch_ids, rank_slice
from infra.errors import DataError


class Batch(NamedTuple):
    """The rows of one host for one global step.

    step counts from 1; ids uint32[B]; tokens int32[B, S]; instance_mask bool[B], False where the repetition
    filter rejected the row (it stays in the batch and leaves the loss); label_mask bool[B, S] for packed and
    padded rows, False on padding (None: every token is a label).
    """

    step: int
    ids: np.ndarray
    tokens: np.ndarray
    instance_mask: np.ndarray
    label_mask: np.ndarray | None = None


class StepSource:
    """Random access source: element k is the batch of step k + 1 for one host."""

    def __init__(self, index: InstanceIndex, order: np.ndarray, batch: int, host: int = 0, hosts: int = 1):
        if batch < hosts:
            raise DataError(f"a global batch of {batch} instances cannot be split over {hosts} hosts")
        if len(order) > index.n_instances:
            raise DataError(
                f"the order has {len(order)} entries, the index only {index.n_instances} instances",
                "build the order again with `repro order`",
            )
        wanted = index.n_instances // index.chunk * index.chunk
        if len(order) < wanted:
            raise DataError(
                f"the order has {len(order)} entries, the index {wanted} instances: the order is too short",
                "build the order again with `repro order`",
            )
        index.require(batch, 1)
        self.index, self.order = index, order
        self.batch, self.host, self.hosts = batch, host, hosts

    def __len__(self) -> int:
        return len(self.order) // self.batch

    def ids(self, step: int) -> np.ndarray:
        """Instance ids of this host's rows at `step` (from 1)."""
        return rank_slice(batch_ids(self.order, step, self.batch), self.host, self.hosts)

    def __getitem__(self, k: int) -> Batch:
        step = int(k) + 1
        ids = self.ids(step)
        tokens = self.index.read(ids).view(np.int32)
        return Batch(step, ids, tokens, self.index.instance_mask(ids), self.index.label_mask(ids))

    def __repr__(self) -> str:
        return f"StepSource({self.index.digest[:12]}, batch={self.batch}, host={self.host}/{self.hosts})"


def batches(
    index: InstanceIndex,
    order: np.ndarray,
    cfg: DataConfig,
    start_step: int = 1,
    stop_step: int | None = None,
    host: int = 0,
    hosts: int = 1,
) -> Iterator[Batch]:
    """The batches of steps start_step..stop_step (both included; None: to the end of the epoch).

    `cfg.prefetch` batches are read ahead by `cfg.workers` threads or processes (`cfg.worker_kind`; 0 workers: by
    one thread); with prefetch 0 they are read when asked for. Threads are the fast choice: a gather from mapped
    files needs no second process, and a process has to copy every batch through shared memory.
    """
    source = StepSource(index, order, cfg.global_batch_instances, host, hosts)
    last = len(source) if stop_step is None else stop_step
    if start_step < 1:
        raise DataError(f"step {start_step} is not possible: steps count from 1")
    if last > len(source):
        index.require(cfg.global_batch_instances, last)
    return _checked(_stream(source, start_step, last, cfg), source, start_step, last)


def _stream(source: StepSource, start: int, stop: int, cfg: DataConfig) -> Iterator[Any]:
    """Grain's iterator over steps start..stop. `NoSharding` by construction: the source is already per host."""
    if stop < start:
        return iter(())
    import grain

    dataset = grain.MapDataset.source(source)[start - 1 : stop]
    if cfg.workers == 0 or cfg.worker_kind == "thread":
        threads = 0 if cfg.prefetch == 0 else max(1, cfg.workers)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(cfg.prefetch, threads))
        return iter(dataset.to_iter_dataset(options))
    _mark_flags_parsed()
    stream = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    per_worker = max(1, cfg.prefetch)
    return iter(
        stream.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=cfg.workers, per_worker_buffer_size=per_worker)
        )
    )


def _mark_flags_parsed() -> None:
    """Grain's worker processes read absl flags, which must count as parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _checked(stream: Iterator[Any], source: StepSource, start: int, stop: int) -> Iterator[Batch]:
    """The guard: every batch must be the next step with exactly the ids of the order."""
    step = start
    for found in stream:
        batch = Batch(int(found[0]), *found[1:])
        if batch.step != step or not np.array_equal(batch.ids, source.ids(step)):
            raise DataError(
                f"the loader yielded step {batch.step} where step {step} was due",
                "a sampler or shard option was added around the loader: data is split only in order.rank_slice",
            )
        yield batch
        step += 1
    if step != stop + 1:
        raise DataError(
            f"the loader ended before step {step} of {stop}", "a worker process died; see its log"
        )
