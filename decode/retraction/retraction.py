"""Requests off the device: on their way to host memory, there, and on their way back.

    leaving    retracting: steps under way land, then the state of the committed positions is copied, in every pool
    away       retracted: all of it is in leased host memory, and is what was sealed
    coming     resuming: new pages and slots of every pool, into which it is restored and checked

A request is in exactly one of these queues, and its phase names it. It holds an allocation, or a swapped out copy, or
both while it comes back; `leave` gives everything back from any of them.

What a retraction costs is copied bytes, twice, or the prompt and the answer so far computed again by prefill. The
cheaper one is taken, by rates that are measured here: of copies, their bytes and times; of prefill, what a hand-over
takes from the grant to its arrival, with prefill's queue and the transfer. That is what computing again would take, and
decode sees it with every request, so nobody has to tell it. To compute again, the attempt ends as *retracted*: the
router starts the next one from all tokens so far, which costs it none of its replays. Every attempt brings at least the
token that prefill draws, so this ends, too. It is also what is done where host memory is full: first what only the tree
holds there goes; then the state of whoever comes back last goes on to storage, where there is one; then this.

How often: a request takes at least one step between two retractions. It comes back when the pool has room for what it
and all who run are expected to grow by, or when nobody else holds pages; oldest first, and nobody is admitted before
those who were here already (C10). After `decode.retract_limit` retractions it comes back only with pages for its whole
answer, and is not retracted any more for others (only on purpose, by `faults.retract_every`): so it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cache.manager.kv_cache_manager import KVCacheManager
from cache.memory.required_pages import due
from cache.swap.restore import PageDamage
from cache.swap.swapped_state import SwappedState, SwapPlace
from contracts.clock import Clock
from contracts.config.worker_config import DecodeConfig
from contracts.damage import DamageSite, log_damage
from contracts.errors import CapacityError, ErrorKind, StaleLease
from decode.request.request import DecodeEvent, DecodePhase, DecodeRequest
from decode.retraction.retraction_policy import RetractionRates, cheaper_to_copy, returns_first

log = logging.getLogger("twinpool.decode")


@dataclass(frozen=True, slots=True)
class LostRequest:
    """A request whose state won't come back to the device: its attempt ends so."""

    request: DecodeRequest
    kind: ErrorKind
    message: str


class Retraction:
    """See the module's prose. Single-threaded; nothing here waits."""

    def __init__(self, manager: KVCacheManager, config: DecodeConfig, clock: Clock) -> None:
        self._manager, self._config, self._clock = manager, config, clock
        self._page_tokens = manager.spec.page_tokens
        self._leaving: list[DecodeRequest] = []
        self._away: list[DecodeRequest] = []
        self._coming: list[DecodeRequest] = []
        self._began: dict[DecodeRequest, float] = {}
        """When the copy under way of each began."""
        self.rates = RetractionRates()
        self.counters = dict.fromkeys(
            ("retractions", "resumptions", "retracted_bytes", "resumed_bytes", "recomputed", "states_damaged_swapped"),
            0.0,
        )

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter([*self._leaving, *self._away, *self._coming])

    def __len__(self) -> int:
        return len(self._leaving) + len(self._away) + len(self._coming)

    @property
    def leaving(self) -> bool:
        """Whether pages are about to become free."""
        return bool(self._leaving)

    @property
    def first_in_line(self) -> bool:
        """Whether somebody is to come back before anybody new is admitted."""
        return bool(self._leaving or self._away)

    def assured(self, request: DecodeRequest) -> bool:
        """Whether it has been retracted as often as a request may be."""
        return request.retractions >= self._config.retract_limit

    # ------------------------------------------------------------ away

    def retract(self, request: DecodeRequest, *, on_purpose: bool = False) -> None:
        """Take a running request off the device; steps of it that are under way still count.

        `on_purpose`: a fault wants it, so it says nothing about how often the request was in the way of others.
        """
        request.step(DecodeEvent.RETRACT)
        request.retractions += not on_purpose
        self._leaving.append(request)

    def advance(self) -> list[LostRequest]:
        """Begin the copies of those whose steps have landed, and take in the copies that have ended."""
        lost: list[LostRequest] = []
        for request in list(self._leaving):
            if request.swapped is None and self._at_rest(request):
                lost += self._copy(request)
            if request.swapped is not None:
                self._manager.settle_swap_out(request.swapped)
                if request.swapped.place is not SwapPlace.SAVING:
                    lost += self._arrive(request)
        return lost

    def _at_rest(self, request: DecodeRequest) -> bool:
        """Whether nothing is under way that writes its state: steps have landed, what was loaded for it has come."""
        return not request.under_way and request.allocation is not None and self._manager.settled(request.allocation)

    def _copy(self, request: DecodeRequest) -> Iterator[LostRequest]:
        allocation, committed = request.allocation, request.committed
        assert allocation is not None
        if not self._copies(committed):
            yield self._again(request, "computing its state again is quicker than copying it")
            return
        began = self._clock.now()
        try:
            swapped = self._manager.swap_out(allocation, request.whole(self._page_tokens, committed), committed)
        except CapacityError as error:
            if not self._make_room():
                yield self._again(request, str(error))
            return
        except RuntimeError as error:
            yield self._again(request, f"its state could not be copied: {error}")
            return
        self._began[request] = began
        self.counters["retractions"] += 1
        self.counters["retracted_bytes"] += swapped.nbytes
        self._manager.free(allocation)
        request.swapped, request.allocation, request.latest, request.stepped = swapped, None, None, False

    def _copies(self, committed: int) -> bool:
        if self._manager.host is None or self._config.retract == "recompute":
            return False
        spec = self._manager.spec
        nbytes = sum(len(numbers) * spec.unit_bytes(pool) for pool, numbers in due(spec, committed).items())
        return self._config.retract == "copy" or cheaper_to_copy(nbytes, committed, self.rates)

    def _again(self, request: DecodeRequest, why: str) -> LostRequest:
        self.counters["retractions"] += request.swapped is None
        self.counters["recomputed"] += 1
        return LostRequest(request, ErrorKind.RETRACTED, f"decode was short of pages: {why}")

    def _make_room(self) -> bool:
        """Send on to storage whoever of those on the host comes back last; False where nobody can be."""
        if any(r.swapped is not None and r.swapped.place is SwapPlace.STORING for r in self._away):
            return True
        for request in sorted(self._away, key=returns_first, reverse=True):
            swapped = request.swapped
            assert swapped is not None
            tokens = request.tokens[: request.committed]
            if swapped.place is SwapPlace.HOST and swapped.leases and self._manager.put_on_storage(swapped, tokens):
                return True
        return False

    def _arrive(self, request: DecodeRequest) -> Iterator[LostRequest]:
        swapped = request.swapped
        assert swapped is not None
        self.rates.saw_out(swapped.nbytes, self._clock.now() - self._began.pop(request))
        if swapped.place is SwapPlace.LOST:
            yield self._damaged(request, "when it had been copied to the host", swapped.damage)
            return
        self._leaving.remove(request)
        request.step(DecodeEvent.SWAPPED_OUT)
        self._away.append(request)

    def _damaged(self, request: DecodeRequest, where: str, pages: Mapping[str, list[int]] = {}) -> LostRequest:
        """`pages`: which ones, by pool, where that is known."""
        self.counters["states_damaged_swapped"] += 1
        facts = {"request": request.submit.request_id, "found": where, "pages": dict(pages)}
        log_damage(log, DamageSite.RESTORE, **facts, then="its attempt ends, the next one computes it again")
        return LostRequest(request, ErrorKind.DAMAGED, "its state was damaged while it was retracted")

    # ------------------------------------------------------------ and back

    def resume(self, may: Callable[[DecodeRequest], bool]) -> list[LostRequest]:
        """Begin to bring back whoever may come and has room, oldest first; who can't come holds those behind it."""
        lost: list[LostRequest] = []
        for request in sorted(self._away, key=returns_first):
            if not may(request):
                break
            swapped = request.swapped
            assert swapped is not None
            if swapped.place is not SwapPlace.HOST:
                lost += self._bring_to_host(request, swapped)
                break
            positions = request.positions_for(1 << 62 if self.assured(request) else request.committed + 1)
            began = self._clock.now()
            try:
                returning = self._manager.swap_in(swapped, positions)
            except (StaleLease, RuntimeError) as error:
                lost.append(self._damaged(request, str(error)))
                continue
            if returning is None:
                break
            self._began[request] = began
            self._away.remove(request)
            request.step(DecodeEvent.RESUME)
            request.returning, request.allocation = returning, returning.allocation
            self._coming.append(request)
        return lost

    def _bring_to_host(self, request: DecodeRequest, swapped: SwappedState) -> Iterator[LostRequest]:
        """Of what is on storage, or on the way there or back: let it come, if it isn't coming."""
        if swapped.place is SwapPlace.LOST and swapped.damage:
            yield self._damaged(request, "when it came from storage", swapped.damage)
        elif swapped.place is SwapPlace.LOST:
            yield self._again(request, "storage has lost a part of its state")
        if swapped.place is not SwapPlace.STORED:
            return
        try:
            self._manager.fetch_from_storage(swapped, request.tokens[: request.committed])
        except CapacityError as error:
            # Who is coming back leaves the host in a moment.
            if not self._coming and not self._make_room():
                yield self._again(request, str(error))

    def returned(self) -> tuple[list[DecodeRequest], list[LostRequest]]:
        """Those who run again, with everything loaded and proved; and those whose state didn't come back right."""
        back: list[DecodeRequest] = []
        lost: list[LostRequest] = []
        for request in list(self._coming):
            returning, allocation, swapped = request.returning, request.allocation, request.swapped
            assert returning is not None
            assert allocation is not None
            assert swapped is not None
            if not returning.restored.done:
                continue
            if not self._manager.finish_swap_in(returning):
                lost.append(self._damaged(request, "on the way back", _by_pool(returning.restored.damage)))
            elif self._manager.settled(allocation):
                self.rates.saw_back(swapped.nbytes, self._clock.now() - self._began[request])
                self.counters["resumptions"] += 1
                self.counters["resumed_bytes"] += swapped.nbytes
                self.leave(request)
                request.step(DecodeEvent.BACK)
                back.append(request)
        return back, lost

    # ------------------------------------------------------------ ends

    def leave(self, request: DecodeRequest) -> None:
        """Out of the queues, and out of host memory. Its allocation, if it has one, is the caller's to release."""
        for queue in (self._leaving, self._away, self._coming):
            if request in queue:
                queue.remove(request)
        self._began.pop(request, None)
        if request.swapped is not None:
            self._manager.drop(request.swapped)
        request.swapped = request.returning = None

    def check(self) -> list[str]:
        """Recount; returns what doesn't agree."""
        found = []
        queues = (
            (DecodePhase.RETRACTING, self._leaving),
            (DecodePhase.RETRACTED, self._away),
            (DecodePhase.RESUMING, self._coming),
        )
        for phase, queue in queues:
            for request in queue:
                name = request.submit.request_id
                if request.phase is not phase:
                    found.append(f"request {name} is {request.phase} and in the queue of those {phase}")
                holds = {
                    DecodePhase.RETRACTING: (request.allocation is None) == (request.swapped is not None),
                    DecodePhase.RETRACTED: request.allocation is None and request.swapped is not None,
                    DecodePhase.RESUMING: request.allocation is not None and request.swapped is not None,
                }
                if not holds[phase]:
                    found.append(
                        f"request {name} is {phase}, and its allocation or its swapped out copy says otherwise"
                    )
                if request.swapped is not None and request.swapped.positions != request.committed:
                    found.append(
                        f"request {name}: {request.swapped.positions} positions are swapped out of {request.committed}"
                    )
        swapped = sum(r.swapped is not None for r in self)
        if swapped != self._manager.swapped:
            found.append(f"{self._manager.swapped} swapped out copies, requests hold {swapped}")
        return found


def _by_pool(damage: Sequence[PageDamage]) -> dict[str, list[int]]:
    pages: dict[str, list[int]] = {}
    for one in damage:
        pages.setdefault(one.pool, []).append(one.at)
    return pages
