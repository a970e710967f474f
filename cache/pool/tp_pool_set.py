"""Pool sets of several tensor-parallel ranks: the leader owns the indices, and each rank has its bytes under them.

Each rank holds its heads' share of every page under the same index. The followers repeat on their bytes what the leader
does to its own, in the same order: an operation sends them its order as it runs, not when it is submitted, so the order
on the leader's device is that of all ranks (and a legal one, as the device keeps to the declared order). The leader
doesn't wait for followers to zero or copy: later uses come later in the followers' line, too. A digest needs their
answers: the leader asks before it does its own part, so that all ranks work on it at once.

A page's digest is the sum of its ranks' digests, as every term of it stands alone (`cache.memory.page_digest`). Buffers
that aren't sliced by heads, and heads that several ranks hold, are counted once, from the first rank that holds them;
for each further copy its difference to the first is added, times an odd number. So a digest doesn't depend on the
number of ranks, and a page that is damaged on one rank only still changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from twinpool.cache.memory.kv_cache_spec import PoolSpec, copies, groups
from twinpool.cache.memory.memory_layout import PoolSetLayout
from twinpool.cache.memory.page_digest import PageDigester
from twinpool.cache.memory.page_moves import PageMove, PoolIndices
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.messages.rank_order_codec import OrderChannel
from twinpool.contracts.messages.rank_orders import CheckPages, CopyPages, DigestPages, PageSpan, ZeroPages

_ODD = 0xD6E8FEB86659FD93
_ALL_BITS = 0xFFFFFFFFFFFFFFFF


class TPDigester:
    """Digests one rank's shares of pages, with a digest for each group of buffers (`groups`)."""

    def __init__(self, layout: PoolSetLayout, device: torch.device, size: int) -> None:
        self._layout, self._device, self._size = layout, device, size
        self._digesters: dict[int, PageDigester] = {}

    def digest(
        self, region: torch.Tensor, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> list[list[int]]:
        """Digest as `PageDigester.digest` does; returns digests [groups][pages]."""
        return self.begin(region, pool, indices, firsts, ends)()

    def begin(
        self, region: torch.Tensor, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> Callable[[], list[list[int]]]:
        """Begin `digest`, without waiting; returns a function that waits for the digests."""
        readers = [
            self._of(count).begin(region, pool, indices, firsts, ends)
            for count in groups(self._layout.spec.by_name[pool], self._size)
        ]
        return lambda: [read() for read in readers]

    def _of(self, count: int) -> PageDigester:
        if count not in self._digesters:
            self._digesters[count] = PageDigester(
                self._layout, self._device, counts=lambda buffer: copies(buffer, self._size) == count
            )
        return self._digesters[count]


def merged(pool: PoolSpec, by_rank: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Merge digests of ranks' shares, [ranks][groups][pages], into digests of whole pages; see the module."""
    size = len(by_rank)
    out = [0] * len(by_rank[0][0])
    for group, count in enumerate(groups(pool, size)):
        for rank, digests in enumerate(by_rank):
            first = by_rank[rank - rank % count][group]
            for page, digest in enumerate(digests[group]):
                out[page] += digest if rank % count == 0 else _ODD * (digest - first[page])
    return [digest & _ALL_BITS for digest in out]


class TPPoolSet(PoolSet):
    """The leader's pool set in `place` (`DEVICE` or `HOST`); operations on its bytes are sent to the followers."""

    def __init__(
        self, layout: PoolSetLayout, region: torch.Tensor, followers: OrderChannel, place: str, tier: str = ""
    ) -> None:
        super().__init__(layout.spec, layout.counts, region, layout.order, tier)
        self.place = place
        self._followers = followers
        self.on_copy: Callable[[], None] = lambda: None
        """Called before the followers are told of a copy into these pools."""

    @cached_property
    def _groups(self) -> TPDigester:
        return TPDigester(self.layout, self.region.device, self._followers.size)

    def zero(self, indices: PoolIndices) -> None:
        self._followers.send(ZeroPages(self.place, tuple((pool, tuple(chosen)) for pool, chosen in indices.items())))
        super().zero(indices)

    def copy(self, move: PageMove, target: PoolSet, layers: range | None = None) -> None:
        assert isinstance(target, TPPoolSet), "all pools of a worker of several ranks are of several ranks"
        pieces = tuple(PageSpan(part.pool, part.sources, part.targets) for part in move.parts)
        span = None if layers is None else (layers.start, layers.stop)
        target.on_copy()
        self._followers.send(CopyPages(self.place, target.place, pieces, span))
        super().copy(move, target, layers)

    def digest(self, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]) -> list[int]:
        return self.digesting(pool, indices, firsts, ends)()

    def digesting(
        self, pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]
    ) -> Callable[[], list[int]]:
        if not len(indices):
            return list
        answers = self._followers.ask(DigestPages(self.place, pool, tuple(indices), tuple(firsts), tuple(ends)))
        mine = self._groups.begin(self.region, pool, indices, firsts, ends)
        return lambda: merged(self.spec.by_name[pool], [mine(), *answers.wait()])

    def check(self) -> list[str]:
        answers = self._followers.ask(CheckPages(self.place))
        found = super().check()
        return found + [f"rank {rank}: {line}" for rank, lines in enumerate(answers.wait(), 1) for line in lines]


class FollowerPools:
    """A follower's pool sets by place; carries out the leader's orders on their bytes."""

    def __init__(
        self,
        pools: Mapping[str, PoolSet],
        size: int,
        copied: Callable[[str], None] = lambda place: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`copied` is called after each copy, with the place of its target. `settle` waits until copies are over on the
        device, too: host memory is read and given away as soon as the leader's own copy is over."""
        self._pools, self._copied, self._settle = dict(pools), copied, settle
        self._digesters = {
            place: TPDigester(pool_set.layout, pool_set.region.device, size) for place, pool_set in pools.items()
        }

    def carry_out(self, order: ZeroPages | CopyPages | DigestPages | CheckPages) -> list[list[int]] | list[str] | None:
        """Carry out an order; returns its answer, or None for an order without one."""
        match order:
            case ZeroPages():
                self._pools[order.place].zero(dict(order.chosen))
            case CopyPages():
                move = PageMove.of(
                    {piece.pool: piece.sources for piece in order.pieces},
                    {piece.pool: piece.targets for piece in order.pieces},
                )
                layers = None if order.layers is None else range(*order.layers)
                self._pools[order.source].copy(move, self._pools[order.target], layers)
                if order.source != order.target:
                    self._settle()
                self._copied(order.target)
            case DigestPages():
                region = self._pools[order.place].region
                return self._digesters[order.place].digest(region, order.pool, order.indices, order.firsts, order.ends)
            case CheckPages():
                return self._pools[order.place].check()
        return None
