"""Indexes of prefill workers: which blocks of a prompt each worker has in its cache, by block hash.

There is one index for each prefill incarnation, and placement asks one question of it: `WorkerIndexes.overlap`. The
answer is a guess: a worker has every block that it was sent. So an index is bounded, forgets the oldest blocks, and
dies with the worker's incarnation, as its cache does, unless the next incarnation reports that it has adopted the last
one's host memory. A wrong guess costs a worse choice and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from contracts.ids import Incarnation, Role, WorkerName
from router.state.prefix_hashes import PREFIX_BLOCK_TOKENS
from router.state.worker_table import WorkerEntry, WorkerKey

BLOCKS_REMEMBERED = 65_536
"""Most blocks of one worker; at 64 tokens a block that is 4 M positions. A block takes about 160 bytes."""
BLOCKS_IN_ALL = 4 * 1024**2
"""Most blocks of all workers together: where there are more than 64 workers, each has its share."""

NOTHING_ASKED: tuple[Sequence[bytes], int] = ((b"",), 0)


class SentBlocks:
    """The index of one incarnation: the blocks that it was sent, the least recently sent first."""

    def __init__(self, incarnation: Incarnation, previous: Mapping[bytes, None]) -> None:
        """`previous`: the blocks that the worker's last incarnation was sent, until this one has said whether it
        adopted them."""
        self.incarnation = incarnation
        self.at_most = BLOCKS_REMEMBERED
        """Most blocks that are remembered."""
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self._previous = previous
        self._last_asked = NOTHING_ASKED
        """The hashes that were looked up last, and how many were found: all choices of a prompt share one sequence."""

    def overlap(self, block_hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the worker has."""
        if block_hashes is self._last_asked[0]:  # another choice of the same prompt
            return self._last_asked[1]
        # An index with a chain's tail has its head (see `sent`), so the first gap is found by halving: a 128k prompt
        # has 2,000 hashes, and there are hundreds of workers to ask.
        found = bisect_left(block_hashes, True, key=lambda block: block not in self.blocks)
        self._last_asked = (block_hashes, found)
        return found

    def sent(self, block_hashes: Sequence[bytes]) -> None:
        """Enter the blocks of a prompt that goes to the worker."""
        if (
            block_hashes is self._last_asked[0]
            and self._last_asked[1] == len(block_hashes)
            and (not block_hashes or next(reversed(self.blocks)) == block_hashes[0])
        ):  # they are the latest already
            return
        self._last_asked = NOTHING_ASKED
        # Deepest first, so that a chain's head is younger than its tail and outlives it, always.
        for block in reversed(block_hashes):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.at_most:
            self.blocks.popitem(last=False)

    def adopt(self) -> None:
        """Enter what the last incarnation was sent, as the worker has adopted its host memory. Idempotent."""
        if self._previous:
            older = [block for block in self._previous if block not in self.blocks]
            self.blocks = OrderedDict.fromkeys([*older, *self.blocks])
            self._previous = {}
            self._last_asked = NOTHING_ASKED

    def next(self, incarnation: Incarnation) -> SentBlocks:
        """The index of the worker's next incarnation."""
        return SentBlocks(incarnation, self.blocks or self._previous)


class WorkerIndexes:
    """The indexes of all prefill workers of the table."""

    page_tokens = PREFIX_BLOCK_TOKENS
    """Tokens of a block (a page of the indexes), which a block hash names."""

    def __init__(self) -> None:
        self._indexes: dict[WorkerName, SentBlocks] = {}
        """For each worker the index of its latest prefill incarnation; kept while the worker has another role."""

    def follow(self, workers: Iterable[WorkerEntry]) -> None:
        """Take in the table of workers: add an index for each new prefill incarnation, drop those of workers gone."""
        entries = list(workers)
        share = min(BLOCKS_REMEMBERED, BLOCKS_IN_ALL // max(1, len(entries)))
        known, self._indexes = self._indexes, {}
        for entry in entries:
            index = known.get(entry.record.name)
            if entry.record.role is not Role.DECODE:
                index = self._current(index, entry)
            if index is not None:
                index.at_most = share
                self._indexes[entry.record.name] = index

    def overlap(self, worker: WorkerKey, block_hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt a prefill worker of the table has, as far as is known."""
        return self.of(worker).overlap(block_hashes)

    def sent(self, worker: WorkerKey, block_hashes: Sequence[bytes]) -> None:
        """Enter the blocks of a prompt that goes to a prefill worker of the table."""
        self.of(worker).sent(block_hashes)

    def of(self, worker: WorkerKey) -> SentBlocks:
        index = self._indexes[worker[0]]
        assert index.incarnation == worker[1], "the indexes follow the table"
        return index

    @staticmethod
    def _current(index: SentBlocks | None, entry: WorkerEntry) -> SentBlocks:
        incarnation = entry.record.incarnation
        if index is None:
            index = SentBlocks(incarnation, {})
        elif index.incarnation != incarnation:
            index = index.next(incarnation)
        if entry.status.counters.get("arena_pages_adopted", 0) > 0:
            index.adopt()
        return index
