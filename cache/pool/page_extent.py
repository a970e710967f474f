"""Page extents: pages with the positions that they hold, and with epochs that tell whether they were freed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.errors import StaleLease
from twinpool.contracts.ids import Epoch


@dataclass(frozen=True, slots=True)
class PageExtent:
    """Pages (or slots) of one pool, with their epochs and the positions that they hold.

    Page `i` holds positions `firsts[i] .. ends[i]-1`. A slot holds the state after `firsts[i]` positions; its digest
    doesn't depend on `ends[i]`.
    """

    indices: tuple[int, ...]
    epochs: tuple[Epoch, ...]
    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    keys: tuple[bytes, ...] = ()
    """Block hashes of the pages; empty: not known."""

    def __post_init__(self) -> None:
        if len({len(self.indices), len(self.epochs), len(self.firsts), len(self.ends)}) != 1:
            raise ValueError("an extent needs an epoch, a first position and an end for each index")
        if self.keys and len(self.keys) != len(self.indices):
            raise ValueError(f"{len(self.keys)} block hashes for {len(self.indices)} pages")

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def of(cls, lease: Lease, first: int, end: int, page_tokens: int, keys: Sequence[bytes] = ()) -> PageExtent:
        """The pages of `lease`, of which the first begins at position `first`, filled up to position `end`."""
        firsts = tuple(first + page_tokens * i for i in range(len(lease)))
        ends = tuple(max(f, min(f + page_tokens, end)) for f in firsts)
        return cls(lease.indices, lease.epochs, firsts, ends, tuple(keys))

    @classmethod
    def slot(cls, lease: Lease, position: int, key: bytes = b"") -> PageExtent:
        """The one slot of `lease`, holding the state after `position` tokens."""
        (index,), (epoch,) = lease.indices, lease.epochs
        return cls((index,), (epoch,), (position,), (position,), (key,) if key else ())


PageExtents = Mapping[str, PageExtent]
"""By pool name; pools with nothing to do may be left out."""


def require_current(pools: PoolSet, extents: PageExtents) -> None:
    """Raises `StaleLease` where a page of `extents` has been freed since the extent was made."""
    for pool, extent in extents.items():
        now = pools.allocators[pool].epochs.of(extent.indices)
        stale = [i for i, was, current in zip(extent.indices, extent.epochs, now, strict=True) if was != current]
        if stale:
            raise StaleLease(f"{pool} page {stale[0]} belongs to somebody else by now")
