"""Batches against OLMo-core's own NumpyFSLDataLoader; hosts, workers, resume; one integer of position."""

import numpy as np
import pytest

from data.config import DataConfig, FilterConfig
from data.index import InstanceIndex
from data.loader import StepSource, _checked, batches
from data.masks import open_mask, scan_index, write_mask
from data.order import global_order, open_order, step_at, write_order
from infra.errors import DataError

S, B = 16, 11
SIZES = [1003, 517, 15, 2048, 0, 777, 16]


@pytest.fixture
def corpus(token_dir):
    rng = np.random.Generator(np.random.PCG64(3))
    arrays = [rng.integers(0, 100256, n).astype("<u4") for n in SIZES]
    arrays[0][100:200] = 7  # a long run: some instances are rejected by the filter
    root = token_dir(arrays)
    return root, InstanceIndex.from_manifest(root, S)


def config(**changes):
    return DataConfig(sequence_length=S, global_batch_instances=B, **changes)


def paths_of(index):
    return [s.path for s in index.shards if s.tokens]


def reference_batches(loader):
    return [(b["index"].numpy(), b["input_ids"].numpy(), b.get("instance_mask")) for b in loader]


def test_every_batch_equals_olmo_core(corpus, reference_loader):
    _, index = corpus
    order = global_order(index.n_instances, 34521)
    ours = list(batches(index, order, config()))
    theirs = reference_batches(reference_loader(paths_of(index), S, B))
    assert len(ours) == len(theirs) == index.n_instances // B
    assert index.n_instances % B != 0
    for step, (mine, (ids, tokens, _)) in enumerate(zip(ours, theirs), 1):
        assert mine.step == step
        assert mine.tokens.dtype == np.int32 and mine.ids.dtype == np.uint32
        np.testing.assert_array_equal(mine.ids, ids)
        np.testing.assert_array_equal(mine.tokens, tokens)
        assert mine.instance_mask.all()


@pytest.mark.parametrize("epoch", [1, 2])
def test_chunked_batches_equal_olmo_core(corpus, reference_loader, epoch):
    root, _ = corpus
    index = InstanceIndex.from_manifest(root, S, chunk=4)
    cfg = config(max_sequence_length=4 * S, epoch=epoch)
    assert cfg.chunk == 4
    order = global_order(index.n_instances, cfg.seed, epoch, cfg.chunk)
    theirs = reference_batches(reference_loader(paths_of(index), S, B, max_target=4 * S, epoch=epoch))
    for mine, (ids, tokens, _) in zip(batches(index, order, cfg), theirs, strict=True):
        np.testing.assert_array_equal(mine.ids, ids)
        np.testing.assert_array_equal(mine.tokens, tokens)


def test_filter_masks_the_rows_olmo_core_masks(corpus, reference_loader, tmp_path):
    _, index = corpus
    cfg = FilterConfig(enabled=True, max_count=4)
    mask = scan_index(index, cfg)
    write_mask(tmp_path, mask, cfg, index)
    index.set_mask(open_mask(tmp_path, index, cfg))
    assert 0 < (~mask).sum() < len(mask)
    order = global_order(index.n_instances, 34521)
    theirs = reference_batches(reference_loader(paths_of(index), S, B, filter_count=4))
    for mine, (ids, _, instance_mask) in zip(batches(index, order, config()), theirs, strict=True):
        np.testing.assert_array_equal(mine.ids, ids)
        np.testing.assert_array_equal(mine.instance_mask, instance_mask.numpy())


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("workers, prefetch", [(0, 0), (0, 2), (2, 3)])
def test_union_over_hosts_is_the_global_batch(corpus, reference_loader, hosts, workers, prefetch):
    _, index = corpus
    order = global_order(index.n_instances, 34521)
    whole = list(batches(index, order, config()))
    cfg = config(workers=workers, prefetch=prefetch)
    streams = [list(batches(index, order, cfg, host=h, hosts=hosts)) for h in range(hosts)]
    for k, full in enumerate(whole):
        for h in range(hosts):
            part = streams[h][k]
            np.testing.assert_array_equal(part.ids, full.ids[h::hosts])
            np.testing.assert_array_equal(part.tokens, full.tokens[h::hosts])
    loader = reference_loader(paths_of(index), S, B)
    loader.dp_world_size, loader.dp_rank = hosts, hosts - 1
    np.testing.assert_array_equal(loader[2]["index"].numpy(), streams[hosts - 1][2].ids)


def test_every_instance_of_the_epoch_is_seen_once(corpus):
    _, index = corpus
    order = global_order(index.n_instances, 34521)
    seen = np.concatenate([b.ids for b in batches(index, order, config())])
    assert len(set(seen.tolist())) == len(seen) == index.n_instances // B * B


@pytest.mark.parametrize("host, hosts", [(0, 1), (2, 3)])
def test_worker_processes_change_nothing(corpus, host, hosts):
    _, index = corpus
    order = global_order(index.n_instances, 34521)
    straight = list(batches(index, order, config()))
    cfg = config(workers=2, worker_kind="process")
    parallel = list(batches(index, order, cfg, start_step=3, stop_step=9, host=host, hosts=hosts))
    assert [b.step for b in parallel] == list(range(3, 10))
    for mine, other in zip(parallel, straight[2:9], strict=True):
        np.testing.assert_array_equal(mine.ids, other.ids[host::hosts])
        np.testing.assert_array_equal(mine.tokens, other.tokens[host::hosts])


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_error_in_a_worker_reaches_the_caller(corpus, kind):
    root, index = corpus
    order = global_order(index.n_instances, 34521)
    for path in root.rglob("*.npy"):
        path.unlink()
    broken = InstanceIndex(index.shards, S)
    with pytest.raises(Exception, match="does not exist"):
        next(batches(broken, order, config(workers=1, worker_kind=kind)))


@pytest.mark.parametrize("pauses", [[5], [5, 9], [5, 5, 6]], ids=["once", "twice", "right after a restore"])
def test_resume_is_exact(corpus, pauses):
    """Position is one integer: stop anywhere, continue in a new object, again and again."""
    root, index = corpus
    order = global_order(index.n_instances, 34521)
    straight = [b.tokens for b in batches(index, order, config())]
    seen: list[np.ndarray] = []
    for pause in [*pauses, len(straight)]:
        fresh = InstanceIndex.from_manifest(root, S)
        stream = batches(fresh, order, config(prefetch=3), start_step=len(seen) + 1)
        seen += [next(stream).tokens for _ in range(pause - len(seen))]
    np.testing.assert_array_equal(np.stack(seen), np.stack(straight))


def test_a_change_of_batch_size_resumes_as_olmo_core_does(corpus, reference_loader):
    """Tokens decide: a remainder that fills no new batch is read again (sheet section 5.5)."""
    _, index = corpus
    order = global_order(index.n_instances, 34521)
    old = reference_loader(paths_of(index), S, 6)
    stream = iter(old)
    for _ in range(3):
        next(stream)
    new = reference_loader(paths_of(index), S, 8)
    new.load_state_dict(old.state_dict())
    new.reshuffle(epoch=1)
    cfg = DataConfig(sequence_length=S, global_batch_instances=8)
    first = next(batches(index, order, cfg, start_step=step_at(3 * 6 * S, 8 * S) + 1))
    assert first.step == 3
    np.testing.assert_array_equal(first.ids, next(iter(new))["index"].numpy())


def test_resume_at_every_step_with_another_number_of_hosts(corpus):
    root, index = corpus
    order = global_order(index.n_instances, 34521)
    whole = list(batches(index, order, config()))
    last = len(whole)
    for step in range(1, last + 1):
        for hosts in (1, 3):
            fresh = InstanceIndex.from_manifest(root, S)
            rest = [
                list(batches(fresh, order, config(), start_step=step, host=h, hosts=hosts))
                for h in range(hosts)
            ]
            for k, full in enumerate(whole[step - 1 :]):
                for h in range(hosts):
                    np.testing.assert_array_equal(rest[h][k].tokens, full.tokens[h::hosts])
            assert all(len(r) == last - step + 1 for r in rest)
    assert list(batches(index, order, config(), start_step=last + 1)) == []


def test_an_order_in_a_file_gives_the_same_batches(corpus, tmp_path):
    _, index = corpus
    write_order(tmp_path, index.n_instances, seed=34521, index_digest=index.digest)
    order = open_order(tmp_path, n_instances=index.n_instances, index_digest=index.digest)
    for a, b in zip(
        batches(index, order, config()),
        batches(index, global_order(index.n_instances, 34521), config()),
        strict=True,
    ):
        np.testing.assert_array_equal(a.tokens, b.tokens)


def test_a_restrided_sampler_is_refused(corpus):
    _, index = corpus
    order = global_order(index.n_instances, 34521)
    source = StepSource(index, order, B)
    every_second = (source[k] for k in range(0, 8, 2))
    with pytest.raises(DataError, match="yielded step 3 where step 2 was due"):
        list(_checked(every_second, source, 1, 4))
    other_host = StepSource(index, order, B, 1, 2)
    with pytest.raises(DataError, match="sampler or shard option"):
        list(_checked((other_host[k] for k in range(2)), StepSource(index, order, B, 0, 2), 1, 2))
    with pytest.raises(DataError, match="ended before step 3"):
        list(_checked((source[k] for k in range(2)), source, 1, 4))


def test_a_corpus_too_small_for_one_batch_is_named(corpus):
    _, index = corpus
    order = global_order(index.n_instances, 34521)
    big = DataConfig(sequence_length=S, global_batch_instances=10_000)
    with pytest.raises(DataError, match="less than one batch"):
        next(batches(index, order, big))
    with pytest.raises(DataError, match="steps of 11 need"):
        next(batches(index, order, config(), stop_step=10_000))


def test_an_order_of_another_length_is_refused(corpus):
    _, index = corpus
    with pytest.raises(DataError, match="too short"):
        next(batches(index, global_order(index.n_instances - 1, 1), config()))
    with pytest.raises(DataError, match="only"):
        next(batches(index, global_order(index.n_instances + 1, 1), config()))
