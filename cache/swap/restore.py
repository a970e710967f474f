"""Restore: offloaded state back into pages and slots of the device, checked there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinpool.cache.device.device_port import Completion, Device, DeviceStream
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.page_extent import PageExtents, require_current
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.swap.offload import OffloadedPages
from twinpool.cache.tiers.in_flight_copy import InFlightCopy
from twinpool.cache.tiers.tier_copy import TierCopy
from twinpool.contracts.errors import StaleLease


@dataclass(frozen=True, slots=True)
class PageDamage:
    """A page that isn't what was saved, or isn't what the restore asked for."""

    pool: str
    at: int
    """Its index in the saved extent of the pool."""
    host_index: int
    reason: str


class RestoredPages:
    """Pages on their way back to the device. The object is also the copy's `Completion`."""

    def __init__(
        self,
        saved: OffloadedPages,
        wanted: Mapping[str, Sequence[int]],
        strangers: list[PageDamage],
        copy: InFlightCopy,
    ) -> None:
        """`wanted`: by pool, indices in the saved extent of the pages that are copied, in order."""
        self.damage = strangers
        """Damaged pages: those known from the start, and once `done`, also those whose bytes arrived wrong."""
        self._wanted, self._copy, self._ended = wanted, copy, False
        self._expected = saved.digests
        self._hosts = {pool: saved.leases[pool].indices for pool in wanted}
        if copy.ended:
            self._end()

    @property
    def done(self) -> bool:
        """Whether the copy has ended, well or not."""
        if not self._ended and self._copy.done:
            self._end()
        return self._ended

    @property
    def complete(self) -> bool:
        """Whether every wanted page of every pool has arrived and matches its tag."""
        return self.done and not self._copy.failed and not self.damage

    def wait(self) -> None:
        """Return once the copy has ended; raises an operation's error. Damage raises nothing: look at `complete`."""
        try:
            self._copy.wait()
        finally:
            assert self.done

    def order(self) -> None:
        self._copy.order()

    def _end(self) -> None:
        self._ended = True
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
