"""The checkers of what operations touch, for the adversarial device: that accesses are ordered, and that they are
declared.

`RaceChecker`: vector clocks over the streams and the host tell which accesses are ordered. Every operation is the n-th
*tick* of its actor: a stream, or the host. Its clock says how many ticks of each actor are certain to be over when it
begins; so access a came before access b if b's clock has reached a's tick. Certainty comes from declared order alone
(see `cache.device.device_port`), never from what happened to run first. That is why the checker finds a race in every
run, also where the operations happened to run in the right order.

Two accesses conflict when they share a page of a pool in one place, and a layer, and one of them writes. For every
page and layer the checker keeps the last write and, since then, the last read of each actor: an access that is ordered
after these is ordered after everything before them.

`WriteChecker`: a copy of watched pools finds operations that write pages that they didn't declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from twinpool.cache.device.device_port import DeviceOp, PageSpanUse
from twinpool.contracts.errors import UnorderedAccess

VectorClock = dict[str, int]
"""Ticks by actor."""
ClockOf = Callable[[str, int | None], VectorClock]
"""Returns an operation's clock at the time it touches a layer of a pool; layer None: all layers at once."""


def join(clock: VectorClock, other: VectorClock) -> None:
    """Raise each tick of `clock` to that of `other`, in place."""
    for actor, tick in other.items():
        if tick > clock.get(actor, 0):
            clock[actor] = tick


@dataclass(frozen=True, slots=True)
class PageAccess:
    """One operation's access to a page."""

    actor: str
    tick: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.actor} #{self.tick})"


@dataclass(slots=True)
class _Page:
    """The latest accesses to one page, by layer; None is an access to all layers."""

    writes: dict[int | None, PageAccess] = field(default_factory=dict)
    reads: dict[int | None, dict[str, PageAccess]] = field(default_factory=dict)


class RaceChecker:
    """Refuses accesses that conflict with an earlier one and aren't ordered after it."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, str, int], _Page] = {}

    def enter(
        self, access: PageAccess, reads: Sequence[PageSpanUse], writes: Sequence[PageSpanUse], clock_of: ClockOf
    ) -> None:
        """Record an access; raises `UnorderedAccess` naming both, recording nothing, if an earlier one conflicts."""
        for spans, writing in ((reads, False), (writes, True)):
            for span in spans:
                for number in span.pages:
                    self._check(access, span, number, writing, clock_of)
        for span in reads:
            for page in self._touched(span):
                for layer in _layers(span):
                    page.reads.setdefault(layer, {})[access.actor] = access
        for span in writes:
            for page in self._touched(span):
                for layer in _layers(span):
                    _overwrite(page, layer, access)

    def _check(self, access: PageAccess, span: PageSpanUse, number: int, writing: bool, clock_of: ClockOf) -> None:
        page = self._pages.get((span.place, span.pool, number))
        if page is None:
            return
        for layer in _layers(span):
            for at, earlier in _conflicting(page, layer, writing):
                clock = clock_of(span.pool, layer if at is None else at)
                if clock.get(earlier.actor, 0) < earlier.tick:
                    where = "all layers" if layer is None and at is None else f"layer {layer if at is None else at}"
                    verb = "writes" if writing else "reads"
                    raise UnorderedAccess(
                        f"{access} {verb} {span.place} {span.pool} page {number}, {where}, and nothing orders it after "
                        f"{earlier}"
                    )

    def _touched(self, span: PageSpanUse) -> Iterator[_Page]:
        for number in span.pages:
            yield self._pages.setdefault((span.place, span.pool, number), _Page())


def _layers(span: PageSpanUse) -> Iterable[int | None]:
    return (None,) if span.layers is None else span.layers


def _conflicting(page: _Page, layer: int | None, writing: bool) -> Iterator[tuple[int | None, PageAccess]]:
    """Earlier accesses that share `layer`, each with the layer it was made to."""
    for at, write in page.writes.items():
        if layer is None or at is None or at == layer:
            yield at, write
    if writing:
        for at, reads in page.reads.items():
            if layer is None or at is None or at == layer:
                yield from ((at, read) for read in reads.values())


def _overwrite(page: _Page, layer: int | None, access: PageAccess) -> None:
    """Make `access` the last write and forget earlier accesses to these layers.

    A later access that conflicts with this write must be ordered after it, and so after what the write came after.
    """
    if layer is None:
        page.writes.clear()
        page.reads.clear()
    else:
        page.reads.pop(layer, None)
    page.writes[layer] = access


@dataclass(frozen=True)
class _Watched:
    place: str
    pool: str
    layers: Sequence[Mapping[str, torch.Tensor]]
    copies: list[dict[str, torch.Tensor]]


class WriteChecker:
    """Remembers the bytes of watched pools; `compare` blames an operation for what changed since."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []

    def watch(self, place: str, pool: str, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Watch each layer's buffers, [pages, ...], from now on."""
        copies = [{name: view.clone() for name, view in buffers.items()} for buffers in layers]
        self._watched.append(_Watched(place, pool, layers, copies))

    def accept_all(self) -> None:
        """Take the present bytes of all watched pools as right."""
        for watched in self._watched:
            for buffers, copies in zip(watched.layers, watched.copies, strict=True):
                for name, view in buffers.items():
                    copies[name].copy_(view)

    def compare(self, op: DeviceOp) -> None:
        """Raises `UnorderedAccess` when a page changed in a layer that `op` doesn't declare as written."""
        for watched in self._watched:
            spans = [s for s in op.writes if (s.place, s.pool) == (watched.place, watched.pool)]
            for number, (buffers, copies) in enumerate(zip(watched.layers, watched.copies, strict=True)):
                allowed = {page for s in spans if s.layers is None or number in s.layers for page in s.pages}
                for name, view in buffers.items():
                    wrong = [page for page in _changed(view, copies[name]) if page not in allowed]
                    if wrong:
                        raise UnorderedAccess(
                            f"{op.name} changed {name} in {watched.place} {watched.pool} page {wrong[0]}, layer "
                            f"{number}, which it doesn't declare as written"
                        )


def _changed(now: torch.Tensor, before: torch.Tensor) -> list[int]:
    """Pages whose bytes differ."""
    a, b = (t.contiguous().view(torch.uint8).flatten(1) for t in (now, before))
    return [int(page) for page in (a != b).any(1).nonzero().flatten()]
