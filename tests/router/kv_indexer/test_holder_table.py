"""The holder table against dictionaries of the same content, and its behaviour when it is full."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from twinpool.router.kv_indexer.holder_sets import DEVICE, HOST
from twinpool.router.kv_indexer.holder_table import HolderReader, HolderTable
from twinpool.router.kv_indexer.table_memory import ENTRY_BYTES, TableMemory, TableSize

Model = dict[int, dict[int, int]]
"""Tiers by slot by key."""


def table(buckets: int = 512, slots: int = 64, rows: int = 512) -> HolderTable:
    return HolderTable(TableMemory.private(TableSize(buckets, slots, rows)))


def keys(numbers: list[int]) -> NDArray[np.uint64]:
    """Keys as hashes are: any 64 bits, the same for the same number."""
    return np.array([random.Random(n).getrandbits(64) for n in numbers], np.uint64)


def depth_by_slot(reader: HolderReader, chain: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    depths = np.arange(1, len(chain) + 1, dtype=np.int32)
    found = reader.find(keys(chain), depths)
    return tuple({int(s): int(of[s]) for s in np.flatnonzero(of)} for of in found)  # type: ignore[return-value]


def told_by(model: Model, chain: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """The same, counted one by one."""
    device: dict[int, int] = {}
    held: dict[int, int] = {}
    for depth, number in enumerate(chain, 1):
        for slot, tiers in model.get(number, {}).items():
            held[slot] = depth
            if tiers & DEVICE:
                device[slot] = depth
    return device, held


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_it_says_what_dictionaries_say_whatever_was_added_and_removed(seed: int) -> None:
    rng = random.Random(seed)
    subject, model = table(), defaultdict[int, dict[int, int]](dict)
    for _ in range(400):
        slot, tiers = rng.randrange(64), rng.choice((DEVICE, HOST, DEVICE | HOST))
        some = [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
        act = rng.random()
        if act < 0.70:
            subject.add(slot, tiers, keys(some))
            for number in some:
                model[number][slot] = model[number].get(slot, 0) | tiers
        elif act < 0.95:
            subject.remove(slot, tiers, keys(some))
            for number in some:
                model[number][slot] = model[number].get(slot, 0) & ~tiers
        elif act < 0.98:
            subject.clear(slot, tiers)
            for holders in model.values():
                holders[slot] = holders.get(slot, 0) & ~tiers
        else:
            dead = rng.sample(range(64), 3)
            subject.forget(dead)
            for holders in model.values():
                for one in dead:
                    holders.pop(one, None)
        for number, holders in list(model.items()):
            model[number] = {s: t for s, t in holders.items() if t}
        chain = [rng.randrange(300) for _ in range(30)]
        assert depth_by_slot(subject, chain) == told_by(model, chain)
    assert subject.check() == []
    assert subject.entries == sum(bool(holders) for holders in model.values())
    assert (subject.evicted, subject.crowded, subject.unread) == (0, 0, 0)


def test_a_prefix_that_all_workers_hold_takes_one_row() -> None:
    subject = table(slots=1000)
    chain = list(range(100))
    for slot in range(1000):
        subject.add(slot, DEVICE, keys(chain))
    assert subject._sets.used == 1
    device, held = depth_by_slot(subject, chain)
    assert device == held == dict.fromkeys(range(1000), 100)
    for slot in range(998):
        subject.remove(slot, DEVICE, keys(chain))
    assert subject._sets.used == 0
    assert depth_by_slot(subject, chain)[0] == {998: 100, 999: 100}
    assert subject.check() == []


def test_d8_a_full_table_forgets_the_oldest_counts_it_and_takes_no_more_memory() -> None:
    subject = table(buckets=64)
    size = subject.memory.size
    for number in range(100):
        subject.add(1, DEVICE, keys(list(range(20 * number, 20 * number + 20))))
        assert subject.entries <= size.entries == 512
        assert subject.check() == []
    assert subject.entries + subject.evicted == 2000
    assert subject.entries > 0.95 * size.entries, "with two buckets a key, the table is used"
    kept = [n for n in range(2000) if depth_by_slot(subject, [n])[0]]
    assert min(kept) > 1200, "a third more than fits is remembered at most, and it is the latest"
    assert set(range(1900, 2000)) <= set(kept)


def test_nine_tenths_of_a_table_can_be_used() -> None:
    """At 20 bytes an entry that is 22 bytes a block, beside slots and rows."""
    subject, rng = table(buckets=20_000), np.random.default_rng(3)
    wanted = int(0.9 * subject.memory.size.entries)
    for _ in range(0, wanted, 500):
        subject.add(1, DEVICE, rng.integers(1, 2**64, 500, dtype=np.uint64))
    assert subject.entries + subject.evicted >= wanted
    assert subject.evicted < 0.01 * wanted
    assert subject.memory.size.bytes < 1.02 * ENTRY_BYTES * subject.memory.size.entries


def test_where_there_is_no_row_left_a_block_keeps_its_holders_and_the_others_are_counted() -> None:
    subject = table(rows=1)
    chain = list(range(8))
    for slot in range(5):
        subject.add(slot, HOST, keys(chain))
    assert subject.crowded == 0
    for slot in range(10, 15):
        subject.add(slot, HOST, keys([100]))
    assert subject.crowded == 1
    assert depth_by_slot(subject, [100]) == ({}, dict.fromkeys(range(10, 14), 1))
    subject.remove(0, HOST, keys(chain))
    subject.add(14, HOST, keys([100]))
    assert depth_by_slot(subject, [100]) == ({}, dict.fromkeys(range(10, 15), 1)), "the row was free again"
    assert subject.check() == []


def test_a_worker_that_holds_a_block_holds_what_is_before_it_though_the_table_has_lost_that() -> None:
    subject = table()
    subject.add(3, DEVICE, keys([7]))
    assert depth_by_slot(subject, [5, 6, 7, 8]) == ({3: 3}, {3: 3})


def test_the_key_0_is_a_key_like_any_other() -> None:
    subject = table()
    zero = np.zeros(1, np.uint64)
    subject.add(2, DEVICE, zero)
    assert subject.find(zero, np.ones(1, np.int32)).device[2] == 1
    assert subject.check() == []


def test_a_reader_of_the_file_finds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "index"
    writer = HolderTable(TableMemory.create(path, TableSize(64, 64, 8), 16))
    reader = HolderReader(TableMemory.open(path))
    assert reader.memory.page_tokens == 16
    chain = list(range(10))
    for slot in range(6):
        writer.add(slot, DEVICE, keys(chain[: slot + 2]))
    assert depth_by_slot(reader, chain) == ({slot: slot + 2 for slot in range(6)},) * 2
    with pytest.raises(ValueError, match="read-only"):
        reader.memory.keys[0, 0] = 1
    HolderTable(TableMemory.create(path, TableSize(64, 64, 8), 16)).add(9, DEVICE, keys([1]))
    assert depth_by_slot(reader, chain)[0][5] == 7, "who has mapped the old file keeps it"
    assert depth_by_slot(HolderReader(TableMemory.open(path)), chain) == ({9: 2}, {9: 2})


@pytest.mark.parametrize("content", [b"", b"x" * 4096])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"table|empty"):
        TableMemory.open(path)
