"""Saving state to host memory and bringing it back: one function each way, written once over the registry.

`offload` copies any pages and slots of any pools to a host pool set and returns a `OffloadedPages`, which owns the
host's leases; `restore` copies them, or some of them, into pages and slots leased for them. Retracting a request,
writing the tree's nodes back and loading them are all this, for every model.

What is saved carries a content tag for each page: the one that its producer sealed, or else a digest of the device's
bytes taken just before they are copied. A partly filled page is digested up to its last committed position. On the way
back the tags are checked on the bytes that arrived: a page that differs is *damage*, named by pool and page, and a
restore with damage, or with an operation that failed, is never complete.

Moves go in pieces of at most `chunk_bytes`. Each is one operation of the device, so that other copies get their turn,
and temporaries (none between a device and pinned host memory) are bounded by a piece. Both ends are pinned until the
last operation has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cache.device.device_port import DEVICE, HOST, Completion, Device, DeviceStream
from cache.memory.page_digest import ContentTag
from cache.memory.page_moves import describe_spec
from cache.pool.in_flight import InFlightCopy
from cache.pool.page_allocator import Lease
from cache.pool.pool_set import PoolSet
from cache.tiers.tier_copy import (
    CopyPiece,
    PageExtents,
    finished,
    pieces_of,
    pins_of,
    require_current,
    require_equal,
    submit_pieces,
)
from contracts.errors import CapacityError


class OffloadedPages:
    """State in host memory, or on its way there. Owns its leases until `release`. It is the move's `Completion`."""

    def __init__(self, host: PoolSet, extents: PageExtents, leases: dict[str, Lease]) -> None:
        self.host = host
        self.spec = describe_spec(host.spec)
        self.extents = dict(extents)
        """What was saved from where; the device's pages may long be somebody else's."""
        self.leases = leases
        self.digests: dict[str, list[int]] | None = None
        """By pool; None: not yet complete, or not asked for."""
        self._transit: InFlightCopy | None = None
        self._complete = False

    def __len__(self) -> int:
        return sum(len(e) for e in self.extents.values())

    @property
    def nbytes(self) -> int:
        return sum(len(e) * self.host.spec.unit_bytes(pool) for pool, e in self.extents.items())

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._transit is None or self._transit.done

    @property
    def complete(self) -> bool:
        """Whether all of it is in host memory, and has not been released."""
        return self.done and self._complete and all(lease.live for lease in self.leases.values())

    def wait(self) -> None:
        """Return once all of it is in host memory; raises what failed, having released the leases."""
        if self._transit is not None:
            self._transit.wait()

    def order(self) -> None:
        if self._transit is not None:
            self._transit.order()

    def tags(self, pool: str) -> list[ContentTag]:
        """The content tags of what was saved of `pool`."""
        assert self.done
        assert self.digests is not None, "tags are known once it is complete, if they were asked for"
        extent = self.extents[pool]
        keys = extent.keys or (b"",) * len(extent)
        return [ContentTag(key, digest) for key, digest in zip(keys, self.digests[pool], strict=True)]

    def move_to(self, leases: dict[str, Lease]) -> None:
        """Its bytes went elsewhere, and come back into these leases of the same pool set, in the same order."""
        assert self.done, "a copy that is under way writes where it was told to"
        self.release()
        self.leases = leases

    def release(self) -> None:
        """Give the host's pages back. Those still being written become free once `done` says that this has ended."""
        for lease in self.leases.values():
            lease.release()


def offload(
    device: Device,
    pools: PoolSet,
    host: PoolSet,
    extents: PageExtents,
    *,
    chunk_bytes: int,
    owner: str,
    digests: Mapping[str, Sequence[int]] | None = None,
    verify: bool = True,
    after: Sequence[Completion] = (),
) -> OffloadedPages:
    """Save `extents` of `pools` in `host`. The copies start after the operations in `after`.

    `digests`, where the pages were sealed before, go with them; without, digests are taken now, unless `verify` is off.
    Raises `CapacityError` when host memory is short, `StaleLease` when a page is no longer what the extent says, and
    `LayoutMismatch` when the two pool sets differ; nothing has been taken then. An error of an operation is raised
    here or by `wait`, and the host's pages are released.
    """
    require_equal(describe_spec(pools.spec), host)
    require_current(pools, extents)
    if digests is not None and {p: len(d) for p, d in digests.items() if d} != {
        p: len(e) for p, e in extents.items() if e
    }:
        raise ValueError("digests must be given for each page of each pool, or for none")
    saved = OffloadedPages(host, extents, _lease_all(host, extents, owner))
    pairs = {pool: (e.indices, saved.leases[pool].indices) for pool, e in extents.items()}
    pieces = list(pieces_of(pairs, pools, chunk_bytes))
    digesting = verify and digests is None

    def copy(piece: CopyPiece) -> None:
        if digesting:
            (part,), at = piece.move.parts, slice(piece.at.start, piece.at.stop)
            extent = extents[part.pool]
            piece.digests = pools.digesting(part.pool, part.sources, extent.firsts[at], extent.ends[at])
        pools.copy(piece.move, host)

    def finish(error: BaseException | None) -> None:
        if error is not None:
            saved.release()
            return
        if digesting:
            saved.digests = finished(pieces, extents)
        elif digests is not None:
            saved.digests = {pool: list(digests.get(pool, ())) for pool in extents}
        saved._complete = True

    pins = pins_of(pairs, pools, host, f"offload of {owner}")
    saved._transit = InFlightCopy(pins, finish)
    saved._transit.start(
        submit_pieces(device, DeviceStream.SAVE, "offload", piece, (DEVICE, HOST), copy, after) for piece in pieces
    )  # fmt: skip
    return saved


def _lease_all(host: PoolSet, extents: PageExtents, owner: str) -> dict[str, Lease]:
    """A lease in every pool, or `CapacityError` and none."""
    leases: dict[str, Lease] = {}
    try:
        for pool, extent in extents.items():
            leases[pool] = host.allocators[pool].lease(len(extent), owner)
    except CapacityError:
        for lease in leases.values():
            lease.release()
        raise
    return leases
