"""Copying pages between two pool sets: in pieces, with both ends pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cache.device.device_port import Completion, Device, DeviceOp, DeviceStream, PageSpanUse
from cache.memory.page_moves import PageMove, PoolMove, describe_spec
from cache.pool.page_allocator import Lease, Pin
from cache.pool.pool_set import PoolSet
from contracts.errors import LayoutMismatch, StaleLease
from contracts.ids import Epoch


@dataclass(frozen=True, slots=True)
class PageExtent:
    """Pages (or slots) of one pool, whose they are, and what they hold.

    Page `i` holds positions `firsts[i] .. ends[i]-1`. Of a slot, `firsts` is the position that it is the state at, and
    `ends` isn't looked at.
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


@dataclass
class CopyPiece:
    """One operation of a move: pages `at` of one pool, and their digests once it has run."""

    move: PageMove
    at: range
    digests: Callable[[], list[int]] | None = None


PagePairs = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def pieces_of(pairs: PagePairs, pools: PoolSet, chunk_bytes: int) -> Iterator[CopyPiece]:
    for pool, (sources, targets) in pairs.items():
        at = 0
        for move in PageMove((PoolMove(pool, sources, targets),)).chunks(pools.spec, chunk_bytes):
            yield CopyPiece(move, range(at, at + len(move)))
            at += len(move)


def submit_pieces(
    device: Device,
    stream: DeviceStream,
    name: str,
    piece: CopyPiece,
    places: tuple[str, str],
    run: Callable[[CopyPiece], None],
    after: Sequence[Completion],
) -> Callable[[], Completion]:
    (part,) = piece.move.parts
    reads, writes = PageSpanUse(places[0], part.pool, part.sources), PageSpanUse(places[1], part.pool, part.targets)
    return lambda: device.submit(DeviceOp(name, stream, (reads,), (writes,)), lambda: run(piece), after)


def pins_of(pairs: PagePairs, source: PoolSet, target: PoolSet, reason: str) -> list[Pin]:
    return [
        pools.allocators[pool].pin(indices, reason)
        for pool, ends in pairs.items()
        for pools, indices in zip((source, target), ends, strict=True)
    ]


def finished(pieces: Sequence[CopyPiece], extents: PageExtents) -> dict[str, list[int]]:
    digests: dict[str, list[int]] = {pool: [] for pool in extents}
    for piece in pieces:
        (part,) = piece.move.parts
        assert piece.digests is not None
        digests[part.pool] += piece.digests()
    return digests


def require_equal(spec: Mapping[str, object], pools: PoolSet) -> None:
    here = describe_spec(pools.spec)
    if spec != here:
        raise LayoutMismatch(f"state of {spec} can't be moved to or from pools of {here}")


def require_current(pools: PoolSet, extents: PageExtents) -> None:
    for pool, extent in extents.items():
        now = pools.allocators[pool].epochs_of(extent.indices)
        stale = [i for i, was, current in zip(extent.indices, extent.epochs, now, strict=True) if was != current]
        if stale:
            raise StaleLease(f"{pool} page {stale[0]} belongs to somebody else by now")
