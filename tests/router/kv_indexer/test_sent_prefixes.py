"""What the router believes that a worker holds, over the worker's deaths."""

from __future__ import annotations

import pytest

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.router.kv_indexer.prefix_indexes import RECENT_S, PrefixIndexes
from twinpool.router.kv_indexer.table_memory import TableSize
from twinpool.router.state.prefix_hashes import prefix_hashes
from twinpool.router.state.worker_table import WorkerTable

NAME = WorkerName("prefill-0")
TOKENS = tuple(range(256))


def view(incarnation: int, state: str = "ready", **counters: float) -> WorkerView:
    number = Incarnation(incarnation)
    record = WorkerRecord(NAME, Role.PREFILL, number, 1, "node", "", "", WorkerLimits(1000, 1000))
    return WorkerView(record, WorkerStatus(NAME, Role.PREFILL, state, 1, "node", number, 0, 0, 0, 0, counters=counters))


class Memory:
    """The table of one prefill worker, and the indexes that follow it."""

    def __init__(self) -> None:
        self.workers, self.indexes = WorkerTable(RouterConfig()), PrefixIndexes()

    def see(self, now: WorkerView) -> None:
        self.workers.update([now])
        self.indexes.follow(self.workers)

    def holds(self) -> int:
        (entry,) = self.workers
        return self.indexes.hits(prefix_hashes(TOKENS), 0.0).held.get(entry.key, 0)


def killed() -> Memory:
    memory = Memory()
    memory.see(view(1))
    memory.indexes.sent((NAME, Incarnation(1)), prefix_hashes(TOKENS), 0.0)
    assert memory.holds() == 256
    memory.see(view(1, "dead"))
    memory.see(view(2, "starting"))
    return memory


def test_what_a_worker_was_sent_is_forgotten_with_its_death() -> None:
    memory = killed()
    assert memory.holds() == 0
    memory.see(view(2, arena_pages_adopted=0))
    assert memory.holds() == 0


def test_what_a_worker_was_sent_is_believed_again_once_its_successor_says_that_it_took_it_over() -> None:
    memory = killed()
    memory.see(view(2, arena_pages_adopted=16))
    assert memory.holds() == 256
    memory.see(view(3, "starting"))
    assert memory.holds() == 0
    memory.see(view(4, "starting"))
    memory.see(view(4, arena_pages_adopted=16))
    assert memory.holds() == 256, "also over one that never came up"


def test_adopted_memory_is_adopted_again_over_and_over() -> None:
    memory = killed()
    for incarnation in range(2, 12):
        memory.see(view(incarnation, arena_pages_adopted=16))
        assert memory.holds() == (256 if incarnation < 5 else 0), "the last few in a row"
        memory.indexes.sent((NAME, Incarnation(incarnation)), prefix_hashes([9] * 64), 0.0)


def test_slots_of_workers_that_are_gone_are_used_again_and_hold_nothing_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TableSize, "of_bytes", lambda at_most: TableSize(64, slots=16, rows=16))
    memory = Memory()
    slots = memory.indexes.sent_prefixes.table.memory.size.slots
    for incarnation in range(1, slots + 20):
        memory.see(view(incarnation))
        assert memory.holds() == 0
        memory.indexes.sent((NAME, Incarnation(incarnation)), prefix_hashes(TOKENS), 0.0)
    assert memory.holds() == 256
    assert memory.indexes.sent_prefixes.table.check() == []


@pytest.mark.parametrize("each", ["adopts", "adopts nothing", "is sent nothing at first"])
def test_no_slot_is_lost_however_incarnations_follow_each_other(monkeypatch: pytest.MonkeyPatch, each: str) -> None:
    monkeypatch.setattr(TableSize, "of_bytes", lambda at_most: TableSize(64, slots=16, rows=16))
    memory, incarnation = Memory(), 0
    for _ in range(40):
        incarnation += 1
        memory.see(view(incarnation, "starting"))
        if each == "is sent nothing at first":
            incarnation += 1
            memory.see(view(incarnation, "starting"))
        memory.see(view(incarnation, arena_pages_adopted=16 if each == "adopts" else 0))
        memory.indexes.sent((NAME, Incarnation(incarnation)), prefix_hashes(TOKENS), 0.0)
        assert memory.holds() == 256, incarnation
    memory.workers.update([])
    memory.indexes.follow(memory.workers)
    sent = memory.indexes.sent_prefixes
    assert len(set(sent._free + sent._left)) == len(sent._free + sent._left) == 16, "all are somebody's again"


def test_what_was_sent_lately_is_forgotten_after_a_while() -> None:
    memory = Memory()
    memory.see(view(1))
    sent, hashes = memory.indexes.sent_prefixes, prefix_hashes(TOKENS)
    (slot,) = sent.slots((NAME, Incarnation(1)))
    sent.sent((NAME, Incarnation(1)), hashes, 100.0)
    for now, there in ((100.0, True), (100 + RECENT_S, True), (100 + 2 * RECENT_S, False), (500.0, False)):
        assert bool(sent.find_recent(hashes, now)[slot]) is there, now
    assert sent.find(hashes)[slot] == 256, "and is remembered beside that"
