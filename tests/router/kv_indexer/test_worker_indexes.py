"""What the router believes that a worker holds, over the worker's deaths."""

from __future__ import annotations

from contracts.config.router_config import RouterConfig
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from router.kv_indexer.worker_indexes import SentBlocks, WorkerIndexes
from router.state.prefix_hashes import prefix_hashes
from router.state.worker_table import WorkerTable

NAME = WorkerName("prefill-0")
HASHES = prefix_hashes(list(range(256)))


def view(incarnation: int, state: str = "ready", **counters: float) -> WorkerView:
    number = Incarnation(incarnation)
    record = WorkerRecord(NAME, Role.PREFILL, number, 1, "node", "", "", WorkerLimits(1000, 1000))
    return WorkerView(record, WorkerStatus(NAME, Role.PREFILL, state, 1, "node", number, 0, 0, 0, 0, counters=counters))


class Memory:
    """The table of one prefill worker, and the indexes that follow it."""

    def __init__(self) -> None:
        self.workers, self.indexes = WorkerTable(RouterConfig()), WorkerIndexes()

    def see(self, now: WorkerView) -> None:
        self.workers.update([now])
        self.indexes.follow(self.workers)

    def holds(self) -> int:
        (entry,) = self.workers
        return self.indexes.overlap(entry.key, HASHES) * self.indexes.page_tokens


def killed() -> Memory:
    memory = Memory()
    memory.see(view(1))
    memory.indexes.sent((NAME, Incarnation(1)), HASHES)
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


def test_a_prompt_that_is_sent_again_is_the_latest_also_where_its_blocks_were_just_looked_up() -> None:
    blocks = SentBlocks(Incarnation(1), {})
    blocks.at_most = 8
    first, second, third = HASHES[:4], [bytes([n]) * 8 for n in range(4)], [bytes([9, n]) * 4 for n in range(4)]
    blocks.sent(first)
    blocks.sent(second)
    assert blocks.overlap(first) == 4, "all of it is there, and yet it was sent before the other one"
    blocks.sent(first)
    blocks.sent(third)
    assert (blocks.overlap(first), blocks.overlap(second)) == (4, 0), "the least recently sent has made room"
