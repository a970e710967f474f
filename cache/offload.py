"""Saving state to host memory and bringing it back: one function each way, written once over the registry.

`offload` copies any pages and slots of any pools to a host pool set and returns a `Saved`, which owns the host's
leases; `restore` copies them, or some of them, into pages and slots leased for them. Retracting a request, writing the
tree's nodes back and loading them are all this, for every model.

What is saved carries a content tag for each page: the one that its producer sealed, or else a digest of the device's
bytes taken just before they are copied. A partly filled page is digested up to its last committed position. On the way
back the tags are checked on the bytes that arrived: a page that differs is *damage*, named by pool and page, and a
restore with damage, or with an operation that failed, is never complete.

Moves go in pieces of at most `chunk_bytes`. Each is one operation of the device, so that other copies get their turn,
and temporaries (none between a device and pinned host memory) are bounded by a piece. Both ends are pinned until the
last operation has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cache.device import DEVICE, HOST, Completion, Device, Op, Span, Stream
from cache.leases import Lease, Pin
from cache.moves import Move, Part, describe_spec
from cache.pools import PoolSet
from cache.tags import ContentTag
from cache.transit import Transit
from contracts.errors import CapacityError, LayoutMismatch, StaleLease
from contracts.ids import Epoch


@dataclass(frozen=True, slots=True)
class Extent:
    """Pages (or slots) of one pool, whose they are, and what they hold.

    Page `i` holds positions `firsts[i] .. ends[i]-1`. Of a slot, `firsts` is the position that it is the state at, and
    `ends` isn't looked at.
    """

    indices: tuple[int, ...]
    epochs: tuple[Epoch, ...]
    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    keys: tuple[bytes, ...] = ()
    """Chain keys of the pages; empty: not known."""

    def __post_init__(self) -> None:
        if len({len(self.indices), len(self.epochs), len(self.firsts), len(self.ends)}) != 1:
            raise ValueError("an extent needs an epoch, a first position and an end for each index")
        if self.keys and len(self.keys) != len(self.indices):
            raise ValueError(f"{len(self.keys)} chain keys for {len(self.indices)} pages")

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def of(cls, lease: Lease, first: int, end: int, page_tokens: int, keys: Sequence[bytes] = ()) -> Extent:
        """The pages of `lease`, of which the first begins at position `first`, filled up to position `end`."""
        firsts = tuple(first + page_tokens * i for i in range(len(lease)))
        ends = tuple(max(f, min(f + page_tokens, end)) for f in firsts)
        return cls(lease.indices, lease.epochs, firsts, ends, tuple(keys))

    @classmethod
    def slot(cls, lease: Lease, position: int, key: bytes = b"") -> Extent:
        """The one slot of `lease`, holding the state after `position` tokens."""
        (index,), (epoch,) = lease.indices, lease.epochs
        return cls((index,), (epoch,), (position,), (position,), (key,) if key else ())


Extents = Mapping[str, Extent]
"""By pool name; pools with nothing to do may be left out."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A page that didn't come back as it went."""

    pool: str
    at: int
    """Its place in what was saved."""
    host_index: int
    reason: str


@dataclass
class _Piece:
    """One operation of a move: pages `at` of one pool, and their digests once it has run."""

    move: Move
    at: range
    digests: Callable[[], list[int]] | None = None


class Saved:
    """State in host memory, or on its way there. Owns its leases until `release`. It is the move's `Completion`."""

    def __init__(self, host: PoolSet, extents: Extents, leases: dict[str, Lease]) -> None:
        self.host = host
        self.spec = describe_spec(host.spec)
        self.extents = dict(extents)
        """What was saved from where; the device's pages may long be somebody else's."""
        self.leases = leases
        self.digests: dict[str, list[int]] | None = None
        """By pool; None: not yet complete, or not asked for."""
        self._transit: Transit | None = None
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
    extents: Extents,
    *,
    chunk_bytes: int,
    owner: str,
    digests: Mapping[str, Sequence[int]] | None = None,
    verify: bool = True,
    after: Sequence[Completion] = (),
) -> Saved:
    """Save `extents` of `pools` in `host`. The copies start after the operations in `after`.

    `digests`, where the pages were sealed before, go with them; without, digests are taken now, unless `verify` is off.
    Raises `CapacityError` when host memory is short, `StaleLease` when a page is no longer what the extent says, and
    `LayoutMismatch` when the two pool sets differ; nothing has been taken then. An error of an operation is raised
    here or by `wait`, and the host's pages are released.
    """
    _require_equal(describe_spec(pools.spec), host)
    _require_current(pools, extents)
    if digests is not None and {p: len(d) for p, d in digests.items() if d} != {
        p: len(e) for p, e in extents.items() if e
    }:
        raise ValueError("digests must be given for each page of each pool, or for none")
    saved = Saved(host, extents, _lease_all(host, extents, owner))
    pairs = {pool: (e.indices, saved.leases[pool].indices) for pool, e in extents.items()}
    pieces = list(_pieces(pairs, pools, chunk_bytes))
    digesting = verify and digests is None

    def copy(piece: _Piece) -> None:
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
            saved.digests = _finished(pieces, extents)
        elif digests is not None:
            saved.digests = {pool: list(digests.get(pool, ())) for pool in extents}
        saved._complete = True

    pins = _pins(pairs, pools, host, f"offload of {owner}")
    saved._transit = Transit(pins, finish)
    saved._transit.start(
        _submit(device, Stream.SAVE, "offload", piece, (DEVICE, HOST), copy, after) for piece in pieces
    )  # fmt: skip
    return saved


class Restored:
    """State on its way back to the device. It is the move's `Completion`."""

    def __init__(self, damage: list[Damage]) -> None:
        self.damage = damage
        """What arrived wrong; known once it is done."""
        self._transit: Transit | None = None
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
    saved: Saved,
    pools: PoolSet,
    into: Extents,
    *,
    chunk_bytes: int,
    only: Mapping[str, Sequence[int]] | None = None,
    after: Sequence[Completion] = (),
) -> Restored:
    """Copy what was saved into the pages and slots of `into`, and check it there.

    `only` picks, by pool, which of the saved pages are wanted (by their place in what was saved); without it, all.
    Raises `LayoutMismatch` when `pools` hold another model's state, `StaleLease` when a page of `into` or of the host
    is no longer leased, `ValueError` when `into` and what is wanted differ in number; nothing has been copied then.
    A page whose positions or chain key aren't those that `into` asks for is damage, like one whose bytes differ.
    """
    _require_equal(saved.spec, pools)
    if not saved.complete:
        raise StaleLease("what isn't completely saved, or has been released, can't be restored")
    _require_current(pools, into)
    chosen = {pool: range(len(e)) for pool, e in saved.extents.items()} if only is None else only
    wanted = {pool: tuple(at) for pool, at in chosen.items() if len(at)}
    if {p: len(at) for p, at in wanted.items()} != {p: len(e) for p, e in into.items() if len(e)}:
        raise ValueError("pages to restore into must be as many as the saved ones that are wanted, in every pool")
    out = Restored(_strangers(saved, into, wanted))
    pairs = {
        pool: (tuple(saved.leases[pool].indices[i] for i in at), into[pool].indices) for pool, at in wanted.items()
    }
    pieces = list(_pieces(pairs, pools, chunk_bytes))
    checked = saved.digests is not None

    def copy(piece: _Piece) -> None:
        saved.host.copy(piece.move, pools)
        if checked:
            (part,), at = piece.move.parts, slice(piece.at.start, piece.at.stop)
            extent = into[part.pool]
            piece.digests = pools.digesting(part.pool, part.targets, extent.firsts[at], extent.ends[at])

    def finish(error: BaseException | None) -> None:
        if error is None:
            if checked:
                out.damage += _compare(saved, _finished(pieces, into), wanted)
            out._ended_well = True

    pins = _pins(pairs, saved.host, pools, "restore")
    out._transit = Transit(pins, finish)
    out._transit.start(
        _submit(device, Stream.LOAD, "restore", piece, (HOST, DEVICE), copy, after) for piece in pieces
    )  # fmt: skip
    return out


Pairs = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


def _pieces(pairs: Pairs, pools: PoolSet, chunk_bytes: int) -> Iterator[_Piece]:
    for pool, (sources, targets) in pairs.items():
        at = 0
        for move in Move((Part(pool, sources, targets),)).chunks(pools.spec, chunk_bytes):
            yield _Piece(move, range(at, at + len(move)))
            at += len(move)


def _submit(
    device: Device,
    stream: Stream,
    name: str,
    piece: _Piece,
    places: tuple[str, str],
    run: Callable[[_Piece], None],
    after: Sequence[Completion],
) -> Callable[[], Completion]:
    (part,) = piece.move.parts
    reads, writes = Span(places[0], part.pool, part.sources), Span(places[1], part.pool, part.targets)
    return lambda: device.submit(Op(name, stream, (reads,), (writes,)), lambda: run(piece), after)


def _pins(pairs: Pairs, source: PoolSet, target: PoolSet, reason: str) -> list[Pin]:
    return [
        pools.allocators[pool].pin(indices, reason)
        for pool, ends in pairs.items()
        for pools, indices in zip((source, target), ends, strict=True)
    ]


def _finished(pieces: Sequence[_Piece], extents: Extents) -> dict[str, list[int]]:
    digests: dict[str, list[int]] = {pool: [] for pool in extents}
    for piece in pieces:
        (part,) = piece.move.parts
        assert piece.digests is not None
        digests[part.pool] += piece.digests()
    return digests


def _compare(saved: Saved, found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> list[Damage]:
    assert saved.digests is not None
    return [
        Damage(pool, i, saved.leases[pool].indices[i], "its bytes don't match its content tag")
        for pool, at in wanted.items()
        for i, digest in zip(at, found[pool], strict=True)
        if digest != saved.digests[pool][i]
    ]


def _strangers(saved: Saved, into: Extents, wanted: Mapping[str, Sequence[int]]) -> list[Damage]:
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
                out.append(Damage(pool, i, saved.leases[pool].indices[i], reason))
    return out


def _lease_all(host: PoolSet, extents: Extents, owner: str) -> dict[str, Lease]:
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


def _require_equal(spec: Mapping[str, object], pools: PoolSet) -> None:
    here = describe_spec(pools.spec)
    if spec != here:
        raise LayoutMismatch(f"state of {spec} can't be moved to or from pools of {here}")


def _require_current(pools: PoolSet, extents: Extents) -> None:
    for pool, extent in extents.items():
        now = pools.allocators[pool].epochs_of(extent.indices)
        stale = [i for i, was, current in zip(extent.indices, extent.epochs, now, strict=True) if was != current]
        if stale:
            raise StaleLease(f"{pool} page {stale[0]} belongs to somebody else by now")
