"""Readers of a table that another process is changing all the time never see half an entry.

The writer gives every key holders that follow from the key. So an entry that has one key and another's holders, or a
row that was used anew, shows at once.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest

from twinpool.router.kv_indexer.holder_sets import DEVICE
from twinpool.router.kv_indexer.holder_table import HolderReader, HolderTable
from twinpool.router.kv_indexer.table_memory import TableMemory, TableSize

KINDS = 8
"""Keys are of as many kinds: a key's last bits say which."""
SLOTS_EACH = 6
"""Holders of a key, too many for its entry: they are in a row."""
READS = 1500


def write(path: Path, ready: Event, stop: Event) -> None:
    """A table far too small for what comes: entries and rows are used anew with every batch."""
    table, rng = HolderTable(TableMemory.create(path, TableSize(16, 64, 12), 16)), np.random.default_rng(1)
    ready.set()
    while not stop.is_set():
        kind = int(rng.integers(KINDS))
        # Few different keys, so that the reader meets them.
        keys = (rng.integers(1, 60, 12, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)) & ~np.uint64(7)
        keys |= np.uint64(kind)
        for slot in range(kind * SLOTS_EACH, (kind + 1) * SLOTS_EACH):
            table.add(slot, DEVICE, keys)
        if rng.random() < 0.2:
            table.clear(int(rng.integers(KINDS * SLOTS_EACH)), DEVICE)


@pytest.mark.slow
def test_d8_no_reader_sees_half_an_entry(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready, stop = spawn.Event(), spawn.Event()
    writer = spawn.Process(target=write, args=(tmp_path / "index", ready, stop))
    writer.start()
    try:
        assert ready.wait(60)
        reader = HolderReader(TableMemory.open(tmp_path / "index"))
        every = (np.arange(1, 60, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)) & ~np.uint64(7)
        met = 0
        for number in range(READS):
            kind = number % KINDS
            found = reader.find(every | np.uint64(kind), np.arange(1, 60, dtype=np.int32))
            holders = set(np.flatnonzero(found.held).tolist())
            strangers = holders - set(range(kind * SLOTS_EACH, (kind + 1) * SLOTS_EACH))
            assert not strangers, f"keys of kind {kind} are held by slots {sorted(strangers)}"
            met += bool(holders)
        assert met > READS / 10, "the reader met the writer's keys"
        assert writer.is_alive()
    finally:
        stop.set()
        writer.join(60)
    assert writer.exitcode == 0
