"""The page sealer: takes the digests of finished pages, and of the end of a prompt that is handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinpool.cache.allocation.allocation import Allocation
from twinpool.cache.allocation.block_table import NULL_PAGE
from twinpool.cache.device.device_port import DEVICE, Device, PageSpanUse
from twinpool.cache.manager.pool_kinds import PoolKinds
from twinpool.cache.pool.pool_set import PoolSet


class PageSealer:
    """Takes digests from the device's bytes, of committed positions only."""

    def __init__(self, pools: PoolSet, kinds: PoolKinds, device: Device) -> None:
        self._pools, self._kinds, self._device = pools, kinds, device

    def seal(self, finished: Sequence[tuple[Allocation, int]]) -> None:
        """Digest the pages of each allocation that have become whole at its committed length (positions)."""
        size = self._pools.spec.page_tokens
        begun: list[tuple[str, list[tuple[Allocation, int]], Callable[[], list[int]]]] = []
        for pool in self._kinds.paged:
            todo: list[tuple[Allocation, int]] = []
            for allocation, committed in finished:
                digests, table = allocation.digests[pool], allocation.tables[pool].pages
                first = len(digests)
                digests += [None] * max(0, committed // size - first)
                todo += [(allocation, page) for page in range(first, len(digests)) if table[page] != NULL_PAGE]
            indices = [allocation.tables[pool].pages[page] for allocation, page in todo]
            firsts = [page * size for _, page in todo]
            self._device.touch("seal", reads=[PageSpanUse(DEVICE, pool, indices)])
            if todo:
                begun.append((pool, todo, self._pools.digesting(pool, indices, firsts, [at + size for at in firsts])))
        # A device takes those of all pools while the first are waited for.
        for pool, todo, read in begun:
            for (allocation, page), digest in zip(todo, read(), strict=True):
                allocation.digests[pool][page] = digest

    def end_digests(self, allocation: Allocation, committed: int) -> dict[str, int]:
        """Digests of the last, partly filled pages and of the recurrent states at `committed` positions, by pool.

        No step may have been launched beyond `committed`.
        """
        begun = self._tail_digests(allocation, committed) | self._state_digests(allocation, committed)
        return {pool: read()[0] for pool, read in begun.items()}

    def _tail_digests(self, allocation: Allocation, committed: int) -> dict[str, Callable[[], list[int]]]:
        """Begins digests of the last, partly filled page at `committed` positions, by pool; none at a page boundary."""
        size = self._pools.spec.page_tokens
        page = committed // size
        if committed % size == 0:
            return {}
        return {
            pool: self._pools.digesting(pool, [allocation.tables[pool].pages[page]], [page * size], [committed])
            for pool in self._kinds.paged
        }

    def _state_digests(self, allocation: Allocation, committed: int) -> dict[str, Callable[[], list[int]]]:
        """Begins digests of the recurrent states by pool; a slot has the state after all launched positions."""
        out = {}
        for pool, lease in allocation.slots.items():
            self._device.touch("seal state", reads=[PageSpanUse(DEVICE, pool, lease.indices)])
            out[pool] = self._pools.digesting(pool, lease.indices, [committed], [committed + 1])
        return out
