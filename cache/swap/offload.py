"""Offload and restore: any pages and slots to leased host memory, with digests, and back, checked on the device.

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
from dataclasses import dataclass

from twinpool.cache.device.device_port import Completion, Device, DeviceStream
from twinpool.cache.memory.page_digest import ContentTag
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.pool_set import PageExtents, PoolSet, require_current
from twinpool.cache.tiers.tier_copy import InFlightCopy, TierCopy
from twinpool.contracts.errors import CapacityError, StaleLease


class _TierMove:
    """A copy between the tiers whose end is taken in once, by `_end`; also the copy's `Completion`."""

    def __init__(self, copy: InFlightCopy) -> None:
        self._copy, self._ended = copy, False

    @property
    def done(self) -> bool:
        """Whether the copy has ended, well or not."""
        self._take_end()
        return self._ended

    def wait(self) -> None:
        """Return once the copy has ended; raises an operation's error."""
        try:
            self._copy.wait()
        finally:
            self._take_end()

    def order(self) -> None:
        self._copy.order()

    def _take_end(self) -> None:
        if not self._ended and self._copy.done:
            self._ended = True
            self._end()

    def _end(self) -> None:
        """Take in the end of the copy. It is called once, when the copy is done."""
        raise NotImplementedError


class OffloadedPages(_TierMove):
    """Pages in host memory or on their way there. Owns host leases until `release`; those of a copy that failed are
    released when that is known."""

    def __init__(
        self,
        host: PoolSet,
        extents: PageExtents,
        leases: dict[str, Lease],
        copy: InFlightCopy,
        digests: dict[str, list[int]] | None,
    ) -> None:
        """`digests`: by pool, where they are known already; without them, the copy's are used."""
        super().__init__(copy)
        self.host = host
        self.extents = dict(extents)
        """By pool, the device's pages as they were saved; they may have other owners by now."""
        self.leases = leases
        self._sealed = digests
        self.digests: dict[str, list[int]] | None = None
        """Digests of the saved pages by pool, in order; None until the copy is complete, or if none were asked for."""
        if copy.ended:
            self._take_end()

    def __len__(self) -> int:
        return sum(len(e) for e in self.extents.values())

    @property
    def nbytes(self) -> int:
        return sum(len(e) * self.host.spec.unit_bytes(pool) for pool, e in self.extents.items())

    @property
    def complete(self) -> bool:
        """Whether every page is in host memory, and nothing has been released."""
        return self.done and not self._copy.failed and all(lease.live for lease in self.leases.values())

    def _end(self) -> None:
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


@dataclass(frozen=True, slots=True)
class PageDamage:
    """A page that isn't what was saved, or isn't what the restore asked for."""

    pool: str
    at: int
    """Its index in the saved extent of the pool."""
    host_index: int
    reason: str


class RestoredPages(_TierMove):
    """Pages on their way back to the device. Damage raises nothing where the copy is waited for: look at `complete`."""

    def __init__(
        self,
        saved: OffloadedPages,
        wanted: Mapping[str, Sequence[int]],
        strangers: list[PageDamage],
        copy: InFlightCopy,
    ) -> None:
        """`wanted`: by pool, indices in the saved extent of the pages that are copied, in order."""
        super().__init__(copy)
        self.damage = strangers
        """Damaged pages: those known from the start, and once `done`, also those whose bytes arrived wrong."""
        self._wanted = wanted
        self._expected = saved.digests
        self._hosts = {pool: saved.leases[pool].indices for pool in wanted}
        if copy.ended:
            self._take_end()

    @property
    def complete(self) -> bool:
        """Whether every wanted page of every pool has arrived and matches its tag."""
        return self.done and not self._copy.failed and not self.damage

    def _end(self) -> None:
        if not self._copy.failed:
            self.damage += self._differing()

    def _differing(self) -> list[PageDamage]:
        found, expected = self._copy.digests(), self._expected
        if found is None or expected is None:
            return []
        return [
            PageDamage(pool, i, self._hosts[pool][i], "its bytes don't match its content tag")
            for pool, at in self._wanted.items()
            for i, digest in zip(at, found[pool], strict=True)
            if digest != expected[pool][i]
        ]


def restore(
    device: Device,
    saved: OffloadedPages,
    pools: PoolSet,
    into: PageExtents,
    *,
    chunk_bytes: int,
    only: Mapping[str, Sequence[int]] | None = None,
    after: Sequence[Completion] = (),
) -> RestoredPages:
    """Copy saved pages into the pages and slots of `into`, in pieces of at most `chunk_bytes`, and check them there.

    `only` picks, by pool, the saved pages that are wanted (by their index in the saved extent); without it, all. The
    copies start after the operations in `after`. Raises `LayoutMismatch` when `pools` hold another model's state,
    `StaleLease` when `saved` isn't complete or a page of `into` or of the host is no longer leased, `ValueError` when
    `into` and the wanted pages differ in number; nothing has been copied then. A page whose positions or block hash
    aren't those that `into` asks for is damage, like one whose bytes differ.
    """
    copier = TierCopy(device, saved.host, pools, DeviceStream.LOAD)
    if not saved.complete:
        raise StaleLease("what isn't completely saved, or has been released, can't be restored")
    require_current(pools, into)
    chosen = {pool: range(len(e)) for pool, e in saved.extents.items()} if only is None else only
    wanted = {pool: tuple(at) for pool, at in chosen.items() if len(at)}
    if {p: len(at) for p, at in wanted.items()} != {p: len(e) for p, e in into.items() if len(e)}:
        raise ValueError("pages to restore into must be as many as the saved ones that are wanted, in every pool")
    sources = {pool: [saved.leases[pool].indices[i] for i in at] for pool, at in wanted.items()}
    move = PageMove.of(sources, {pool: into[pool].indices for pool in wanted})
    digested = {pool: into[pool] for pool in wanted} if saved.digests is not None else None
    copy = copier.by_pieces("restore", move, chunk_bytes, digested=digested, after=after)
    return RestoredPages(saved, wanted, _strangers(saved, into, wanted), copy)


def _strangers(saved: OffloadedPages, into: PageExtents, wanted: Mapping[str, Sequence[int]]) -> list[PageDamage]:
    """Wanted pages whose positions or block hash aren't those that `into` asks for."""
    out = []
    for pool, at in wanted.items():
        mine, its = saved.extents[pool], into[pool]
        for place, i in enumerate(at):
            reason = ""
            if (mine.firsts[i], mine.ends[i]) != (its.firsts[place], its.ends[place]):
                reason = f"it holds positions {mine.firsts[i]}..{mine.ends[i]}"
            elif mine.keys and its.keys and mine.keys[i] != its.keys[place]:
                reason = "it holds other tokens"
            if reason:
                out.append(PageDamage(pool, i, saved.leases[pool].indices[i], reason))
    return out
