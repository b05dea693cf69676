"""The global order: goldens of the sheet (section 5.3), numpy itself, and OLMo-core's own function."""

import hashlib

import numpy as np
import pytest

from data.order import (
    batch_ids,
    describe_order,
    global_order,
    open_order,
    order_length,
    rank_slice,
    step_at,
    write_order,
)
from data.shuffle import shuffled_blocks
from infra.artifacts import read_json, write_json_atomic
from infra.errors import DataError, IdentityError

SHA = {
    (1000, 1): "7d0422e3a4d584a6ab6732fea0f4d6d075f9622a21f1f7655f5ffceb05263352",
    (1_000_000, 1): "9c0fd2cee409f936d40906361f042850f443f93bc4be6a7dc0db084667df3742",
    (5_000_000, 1): "35659747d5e64e8ae5e8a854ce276c0e4d26f8c54161b03a19c2cc28a7e6c817",
}


def sha(order):
    return hashlib.sha256(order.astype("<u4").tobytes()).hexdigest()


@pytest.mark.parametrize("n, epoch", SHA)
def test_goldens(n, epoch):
    assert sha(global_order(n, 34521, epoch)) == SHA[n, epoch]


def test_golden_ids():
    order = global_order(1000, 34521)
    assert order[:10].tolist() == [905, 250, 414, 554, 333, 834, 537, 775, 686, 804]
    assert order[-3:].tolist() == [442, 567, 787]
    second = global_order(1000, 34521, epoch=2)
    assert second[:10].tolist() == [586, 379, 498, 271, 249, 597, 383, 709, 421, 610]
    assert sha(second).startswith("c8461f94")
    assert global_order(1_000_000, 34521)[:5].tolist() == [661175, 684101, 230644, 153198, 370075]
    assert global_order(5_000_000, 34521)[:5].tolist() == [3912166, 1609400, 589358, 2431975, 4754862]
    chunked = global_order(1000, 34521, chunk=4)
    assert chunked[:10].tolist() == [652, 653, 654, 655, 416, 417, 418, 419, 944, 945]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 255, 256, 257, 16385, 65535, 65536, 65537, 300_001])
@pytest.mark.parametrize("seed", [0, 34522])
def test_our_shuffle_is_numpys(n, seed):
    expected = np.arange(n, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed)).shuffle(expected)
    np.testing.assert_array_equal(shuffled_blocks(n, seed), expected)


@pytest.mark.parametrize(
    "n, chunk, epoch", [(1, 1, 1), (999, 1, 3), (1000, 4, 1), (1003, 4, 2), (70_001, 8, 1)]
)
def test_the_file_holds_the_same_order(tmp_path, n, chunk, epoch):
    described = write_order(tmp_path, n, seed=5, epoch=epoch, chunk=chunk, index_digest="x")
    opened = open_order(tmp_path, n_instances=n, index_digest="x")
    expected = global_order(n, 5, epoch, chunk)
    np.testing.assert_array_equal(opened, expected)
    assert described["entries"] == order_length(n, chunk) == len(expected)
    assert (
        described["sha256"]
        == sha(expected)
        == hashlib.sha256((tmp_path / "order.u32").read_bytes()).hexdigest()
    )


def test_the_order_is_that_of_olmo_core(tmp_path, token_dir, reference_loader):
    root = token_dir([np.arange(4 * 321, dtype="<u4")])
    for epoch, target in ((1, None), (3, None), (2, 16)):
        path = str(next(root.rglob("*.npy")))
        loader = reference_loader([path], 4, 8, seed=11, epoch=epoch, max_target=target)
        n = len(loader.dataset)
        expected = loader.get_global_indices()
        np.testing.assert_array_equal(global_order(n, 11, epoch, (target or 4) // 4), expected)


def test_batches_and_ranks():
    order = global_order(1000, 34521)
    batch = batch_ids(order, 1, 8)
    assert rank_slice(batch, 0, 2).tolist() == [905, 414, 333, 537]
    assert rank_slice(batch, 1, 2).tolist() == [250, 554, 834, 775]
    np.testing.assert_array_equal(batch_ids(order, 125, 8), order[992:])
    for step in (0, 126):
        with pytest.raises(DataError):
            batch_ids(order, step, 8)
    with pytest.raises(DataError):
        rank_slice(batch, 2, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_interleave_to_the_batch(ranks):
    batch = batch_ids(global_order(1000, 1), 7, 24)
    rebuilt = np.empty_like(batch)
    for rank in range(ranks):
        rebuilt[rank::ranks] = rank_slice(batch, rank, ranks)
    np.testing.assert_array_equal(rebuilt, batch)


def test_a_longer_run_does_not_change_earlier_batches():
    order = global_order(1000, 1)
    np.testing.assert_array_equal(batch_ids(order, 3, 16), batch_ids(order[: 16 * 3], 3, 16))


def test_an_order_is_a_shuffled_permutation():
    order = global_order(1000, 0)
    assert sorted(order.tolist()) == list(range(1000))
    assert (order != np.arange(1000)).mean() > 0.99


def test_resume_after_a_change_of_batch_size_replays_the_remainder():
    assert step_at(96, 64) == 1
    assert step_at(128, 64) == 2
    assert step_at(0, 64) == 0


@pytest.mark.parametrize("bad", [{"n": 0}, {"n": 2**32}, {"epoch": 0}, {"chunk": 0}, {"seed": -1}])
def test_impossible_recipes(bad):
    with pytest.raises(DataError):
        global_order(**{"n": 10, "seed": 1, "epoch": 1, "chunk": 1, **bad})


def test_refused_order_files(tmp_path):
    write_order(tmp_path, 5000, seed=1, index_digest="a")
    path = tmp_path / "order.u32"
    with pytest.raises(IdentityError, match="orders 5000 instances, the index has 4999"):
        open_order(tmp_path, n_instances=4999)
    with pytest.raises(IdentityError, match="made for the index"):
        open_order(tmp_path, index_digest="b")
    good = path.read_bytes()
    path.write_bytes(good[:-400])
    with pytest.raises(IdentityError, match=r"order\.u32 has 19600 bytes"):
        open_order(tmp_path)
    path.write_bytes(good[:4] + good[8:12] + good[8:])
    with pytest.raises(IdentityError, match="not the order"):
        open_order(tmp_path)
    path.unlink()
    with pytest.raises(IdentityError, match="does not exist"):
        open_order(tmp_path)


def test_an_unknown_algorithm_is_refused(tmp_path):
    write_order(tmp_path, 50, seed=1)
    described = read_json(tmp_path / "order.json")
    write_json_atomic(tmp_path / "order.json", {**described, "algorithm": "feistel-v1"})
    with pytest.raises(IdentityError, match="unknown algorithm 'feistel-v1'"):
        describe_order(tmp_path)


def test_nothing_is_left_of_a_failed_write(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.shuffle.write_hashed", full)
    with pytest.raises(DataError, match="disk full"):
        write_order(tmp_path, 50, seed=1)
    assert list(tmp_path.iterdir()) == []
