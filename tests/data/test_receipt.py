"""The receipt: definition by hand, sensitivity to every kind of mix-up, hosts add up, loader equals index."""

import hashlib
import struct

import numpy as np
import pytest

from data.config import DataConfig
from data.index import InstanceIndex
from data.loader import batches
from data.order import global_order
from data.receipt import Receipt, combine, expected, step_digest
from infra.errors import DataError, IdentityError

B, S = 6, 8


@pytest.fixture
def data(token_dir):
    rng = np.random.default_rng(0)
    root = token_dir([rng.integers(0, 100, n).astype("<u4") for n in (401, 300)])
    index = InstanceIndex.from_manifest(root, S)
    return index, global_order(index.n_instances, 7)


def rows(step, index, order):
    ids = order[(step - 1) * B : step * B]
    return ids, index.read(ids)


def test_definition_written_out_by_hand(data):
    index, order = data
    value = bytes(32)
    for step in (1, 2):
        ids, tokens = rows(step, index, order)
        total = 0
        for position in range(B):
            head = struct.pack("<QQQ", step, position, int(ids[position]))
            h = hashlib.blake2b(head + tokens[position].astype("<u4").tobytes(), digest_size=32).digest()
            total = (total + int.from_bytes(h, "little")) % 2**256
        value = hashlib.sha256(value + struct.pack("<Q", step) + total.to_bytes(32, "little")).digest()
    assert expected(index, order, B, 2)[2] == value.hex()


def test_the_loader_and_the_index_agree(data):
    index, order = data
    receipt = Receipt()
    due = expected(index, order, B, 10)
    for batch in batches(index, order, DataConfig(sequence_length=S, global_batch_instances=B), stop_step=10):
        receipt.update(batch.step, batch.ids, batch.tokens)
        assert receipt.hexdigest() == due[batch.step]


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8])
def test_hosts_add_up(data, hosts):
    index, order = data
    whole, added = Receipt(), Receipt()
    for step in range(1, 5):
        ids, tokens = rows(step, index, order)
        whole.update(step, ids, tokens)
        parts = [step_digest(step, ids[h::hosts], tokens[h::hosts], h, hosts) for h in range(hosts)]
        added.push(step, combine(reversed(parts)))
    assert whole.hexdigest() == added.hexdigest()


def test_every_mix_up_changes_it(data):
    index, order = data
    ids, tokens = rows(3, index, order)
    good = step_digest(3, ids, tokens)
    swapped = ids.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    changed = tokens.copy()
    changed[4, 5] += 1
    repeated = ids.copy()
    repeated[1] = repeated[0]
    bad = {
        "another step": step_digest(4, ids, tokens),
        "rows permuted": step_digest(3, swapped, index.read(swapped)),
        "one token": step_digest(3, ids, changed),
        "one id": step_digest(3, repeated, tokens),
        "a row repeated": step_digest(3, repeated, index.read(repeated)),
        "a row lost": step_digest(3, ids[:-1], tokens[:-1]),
        "hosts exchanged": combine(step_digest(3, ids[h::2], tokens[h::2], 1 - h, 2) for h in range(2)),
    }
    assert good not in bad.values()
    assert len(set(bad.values())) == len(bad)
    assert step_digest(3, ids, tokens.view(np.int32)) == good


def test_steps_must_follow_each_other(data):
    index, order = data
    receipt = Receipt()
    receipt.update(1, *rows(1, index, order))
    for step in (1, 3):
        with pytest.raises(DataError, match="stands at step 1"):
            receipt.update(step, *rows(step, index, order))


def test_saved_and_restored_at_every_step(data):
    index, order = data
    due = expected(index, order, B, 6)
    for stop in range(7):
        receipt = Receipt()
        for step in range(1, stop + 1):
            receipt.update(step, *rows(step, index, order))
        again = Receipt.from_json(Receipt.from_json(receipt.to_json()).to_json())
        for step in range(stop + 1, 7):
            again.update(step, *rows(step, index, order))
        assert again.hexdigest() == due[6]
        assert expected(index, order, B, 6, start=receipt).get(6, receipt.hexdigest()) == due[6]


def test_another_algorithm_is_refused():
    with pytest.raises(IdentityError, match="no receipt"):
        Receipt.from_json({"algorithm": "crc32", "step": 1, "digest": "00"})
