"""Offload: any pages and slots to leased host memory, with digests; `cache.swap.restore` copies them back.

`offload` copies pages and slots of any pools to a host pool set and returns an `OffloadedPages`, which owns the host's
leases; `restore` copies all or some of them into pages and slots leased for them. Both are written once over the
registry, for every model; swap-out and swap-in are made of them.

Each saved page carries a content tag: the one that its producer sealed, or else a digest of the device's bytes taken
just before they are copied. A partly filled page is digested up to its last committed position. On the way back the
tags are checked on the bytes that arrived: a page that differs is *damage*, named by pool and page, and a restore with
damage, or with an operation that failed, is never complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinpool.cache.device.device_port import Completion, Device, DeviceStream
from twinpool.cache.memory.page_digest import ContentTag
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.page_extent import PageExtents, require_current
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.tiers.in_flight_copy import InFlightCopy
from twinpool.cache.tiers.tier_copy import TierCopy
from twinpool.contracts.errors import CapacityError


class OffloadedPages:
    """Pages in host memory or on their way there: also the copy's `Completion`. Owns host leases until `release`."""

    def __init__(
        self,
        host: PoolSet,
        extents: PageExtents,
        leases: dict[str, Lease],
        copy: InFlightCopy,
        digests: dict[str, list[int]] | None,
    ) -> None:
        """`digests`: by pool, where they are known already; without them, the copy's are used."""
        self.host = host
        self.extents = dict(extents)
        """By pool, the device's pages as they were saved; they may have other owners by now."""
        self.leases = leases
        self._copy = copy
        self._sealed = digests
        self._ended = False
        self.digests: dict[str, list[int]] | None = None
        """Digests of the saved pages by pool, in order; None until the copy is complete, or if none were asked for."""
        if copy.ended:
            self._end()

    def __len__(self) -> int:
        return sum(len(e) for e in self.extents.values())

    @property
    def nbytes(self) -> int:
        return sum(len(e) * self.host.spec.unit_bytes(pool) for pool, e in self.extents.items())

    @property
    def done(self) -> bool:
        """Whether the copy has ended, well or not."""
        if not self._ended and self._copy.done:
            self._end()
        return self._ended

    @property
    def complete(self) -> bool:
        """Whether every page is in host memory, and nothing has been released."""
        return self.done and not self._copy.failed and all(lease.live for lease in self.leases.values())

    def wait(self) -> None:
        """Return once every page is in host memory; raises an operation's error, having released the leases."""
        try:
            self._copy.wait()
        finally:
            assert self.done

    def order(self) -> None:
        self._copy.order()

    def _end(self) -> None:
        self._ended = True
        try:
            failed = self._copy.failed
        except Exception:
            self.release()
            raise
        if failed:
            self.release()
        else:
            self.digests = self._copy.digests() if self._sealed is None else self._sealed

    def tags(self, pool: str) -> list[ContentTag]:
        """The content tags of the saved pages of `pool`, in order."""
        assert self.done
        assert self.digests is not None, "tags are known once it is complete, if they were asked for"
        extent = self.extents[pool]
        keys = extent.keys or (b"",) * len(extent)
        return [ContentTag(key, digest) for key, digest in zip(keys, self.digests[pool], strict=True)]

    def move_to(self, leases: dict[str, Lease]) -> None:
        """Release the leases, and own `leases` of the same pool set instead: the caller brings the bytes there.

        By pool, with as many pages in the same order. The copy must have ended.
        """
        assert self.done, "a copy that is under way writes where it was told to"
        self.release()
        self.leases = leases

    def release(self) -> None:
        """Give the host's pages back. Idempotent. Pages still being written become free once `done` has said True."""
        _release_all(self.leases)


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
    """Save `extents` of `pools` in `host`, in pieces of at most `chunk_bytes`, after the operations in `after`.

    `digests`: by pool, those of pages that were sealed before, one for each page; without them, digests are taken
    as the pages are copied, unless `verify` is off. Raises `CapacityError` when host memory is short, `StaleLease` when
    a page of `extents` has been freed since, `LayoutMismatch` when the two pool sets hold different models' state, and
    `ValueError` for digests of some pages only; nothing has been taken then. An error of an operation is raised by
    `wait`, and the host's pages are released.
    """
    copier = TierCopy(device, pools, host, DeviceStream.SAVE)
    require_current(pools, extents)
    if digests is not None and {p: len(d) for p, d in digests.items() if d} != {
        p: len(e) for p, e in extents.items() if e
    }:
        raise ValueError("digests must be given for each page of each pool, or for none")
    leases = _lease_all(host, extents, owner)
    move = PageMove.of({p: e.indices for p, e in extents.items()}, {p: lease.indices for p, lease in leases.items()})
    digested = extents if verify and digests is None else None
    try:
        copy = copier.by_pieces("offload", move, chunk_bytes, digested=digested, after=after)
    except BaseException:
        _release_all(leases)
        raise
    sealed = None if digests is None else {pool: list(digests.get(pool, ())) for pool in extents}
    return OffloadedPages(host, extents, leases, copy, sealed)


def _lease_all(host: PoolSet, extents: PageExtents, owner: str) -> dict[str, Lease]:
    """Lease host pages for every pool of `extents`; raises `CapacityError` with none leased."""
    leases: dict[str, Lease] = {}
    try:
        for pool, extent in extents.items():
            leases[pool] = host.allocators[pool].lease(len(extent), owner)
    except CapacityError:
        _release_all(leases)
        raise
    return leases


def _release_all(leases: Mapping[str, Lease]) -> None:
    for lease in leases.values():
        lease.release()
