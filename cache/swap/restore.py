"""Swapping in: saved state back into pages and slots of the device, checked there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cache.device.device_port import DEVICE, HOST, Completion, Device, DeviceStream
from cache.pool.in_flight import InFlightCopy
from cache.pool.pool_set import PoolSet
from cache.swap.offload import OffloadedPages
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
from contracts.errors import StaleLease


@dataclass(frozen=True, slots=True)
class PageDamage:
    """A page that didn't come back as it went."""

    pool: str
    at: int
    """Its place in what was saved."""
    host_index: int
    reason: str


class RestoredPages:
    """State on its way back to the device. It is the move's `Completion`."""

    def __init__(self, damage: list[PageDamage]) -> None:
        self.damage = damage
        """What arrived wrong; known once it is done."""
        self._transit: InFlightCopy | None = None
        self._ended_well = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._transit is None or self._transit.done

    @property
    def complete(self) -> bool:
        """Whether every page of every pool has arrived, and its tag matched."""
        return self.done and self._ended_well and not self.damage

    def wait(self) -> None:
        """Return once it has ended; raises what failed. Damage raises nothing: look at `complete`."""
        if self._transit is not None:
            self._transit.wait()

    def order(self) -> None:
        if self._transit is not None:
            self._transit.order()


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
    """Copy what was saved into the pages and slots of `into`, and check it there.

    `only` picks, by pool, which of the saved pages are wanted (by their place in what was saved); without it, all.
    Raises `LayoutMismatch` when `pools` hold another model's state, `StaleLease` when a page of `into` or of the host
    is no longer leased, `ValueError` when `into` and what is wanted differ in number; nothing has been copied then.
    A page whose positions or block hash aren't those that `into` asks for is damage, like one whose bytes differ.
    """
    require_equal(saved.spec, pools)
    if not saved.complete:
        raise StaleLease("what isn't completely saved, or has been released, can't be restored")
    require_current(pools, into)
    chosen = {pool: range(len(e)) for pool, e in saved.extents.items()} if only is None else only
    wanted = {pool: tuple(at) for pool, at in chosen.items() if len(at)}
    if {p: len(at) for p, at in wanted.items()} != {p: len(e) for p, e in into.items() if len(e)}:
        raise ValueError("pages to restore into must be as many as the saved ones that are wanted, in every pool")
    out = RestoredPages(_strangers(saved, into, wanted))
    pairs = {
        pool: (tuple(saved.leases[pool].indices[i] for i in at), into[pool].indices) for pool, at in wanted.items()
    }
    pieces = list(pieces_of(pairs, pools, chunk_bytes))
    checked = saved.digests is not None

    def copy(piece: CopyPiece) -> None:
        saved.host.copy(piece.move, pools)
        if checked:
            (part,), at = piece.move.parts, slice(piece.at.start, piece.at.stop)
            extent = into[part.pool]
            piece.digests = pools.digesting(part.pool, part.targets, extent.firsts[at], extent.ends[at])

    def finish(error: BaseException | None) -> None:
        if error is None:
            if checked:
                out.damage += _compare(saved, finished(pieces, into), wanted)
            out._ended_well = True

    pins = pins_of(pairs, saved.host, pools, "restore")
    out._transit = InFlightCopy(pins, finish)
    out._transit.start(
        submit_pieces(device, DeviceStream.LOAD, "restore", piece, (HOST, DEVICE), copy, after) for piece in pieces
    )  # fmt: skip
    return out


def _compare(
    saved: OffloadedPages, found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]
) -> list[PageDamage]:
    assert saved.digests is not None
    return [
        PageDamage(pool, i, saved.leases[pool].indices[i], "its bytes don't match its content tag")
        for pool, at in wanted.items()
        for i, digest in zip(at, found[pool], strict=True)
        if digest != saved.digests[pool][i]
    ]


def _strangers(saved: OffloadedPages, into: PageExtents, wanted: Mapping[str, Sequence[int]]) -> list[PageDamage]:
    """Pages that hold something else than what `into` asks for."""
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
