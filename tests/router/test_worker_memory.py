"""What the router believes that a worker holds, over the worker's deaths."""

from __future__ import annotations

from contracts.config.router_config import RouterConfig
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from router.state.worker_table import WorkerTable, prefix_hashes

NAME = WorkerName("prefill-0")
HASHES = prefix_hashes(list(range(256)))


def view(incarnation: int, state: str = "ready", **counters: float) -> WorkerView:
    number = Incarnation(incarnation)
    record = WorkerRecord(NAME, Role.PREFILL, number, 1, "node", "", "", WorkerLimits(1000, 1000))
    return WorkerView(record, WorkerStatus(NAME, Role.PREFILL, state, 1, "node", number, 0, 0, 0, 0, counters=counters))


def holds(workers: WorkerTable) -> int:
    entry = workers.named(NAME)
    assert entry is not None
    return entry.cached_tokens(HASHES)


def killed() -> WorkerTable:
    workers = WorkerTable(RouterConfig())
    workers.update([view(1)])
    entry = workers.named(NAME)
    assert entry is not None
    entry.remember(HASHES)
    assert holds(workers) == 256
    workers.update([view(1, "dead")])
    workers.update([view(2, "starting")])
    return workers


def test_what_a_worker_was_sent_is_forgotten_with_its_death() -> None:
    workers = killed()
    assert holds(workers) == 0
    workers.update([view(2, arena_pages_adopted=0)])
    assert holds(workers) == 0


def test_what_a_worker_was_sent_is_believed_again_once_its_successor_says_that_it_took_it_over() -> None:
    workers = killed()
    workers.update([view(2, arena_pages_adopted=16)])
    assert holds(workers) == 256
    workers.update([view(3, "starting")])
    assert holds(workers) == 0
    workers.update([view(4, "starting")])
    workers.update([view(4, arena_pages_adopted=16)])
    assert holds(workers) == 256, "also over one that never came up"
