"""Retraction: requests off the device, on their way to host memory, there or on storage, and on their way back.

    leaving    retracting: steps under way land, then the state of the committed positions is copied, in every pool
    away       retracted: all of the state is in leased host memory or on storage, and is what was sealed
    coming     resuming: new pages and slots of every pool, into which the state is restored and checked

A retracted request is in exactly one of these queues, and its phase names it. It holds an allocation, or a swapped out
copy, or both while it comes back; `leave` takes it out of any queue and drops the copy.

A retraction costs bytes copied twice, or the prompt and the answer so far computed again by prefill. The cheaper one is
taken, by rates that are measured here: of copies, their bytes and times; of prefill, what a hand-over takes from the
grant to its arrival, with prefill's queue and the transfer. Computing again would take as long, and decode sees that
time with every request, so no other worker has to report it. To compute again, the attempt ends as *retracted*: the
router starts the next one from all tokens so far, and doesn't count it as a replay. Every attempt brings at least the
token that prefill draws, so this ends, too. State is also computed again where host memory is full and nothing else
helps: first, host pages that only the tree holds are evicted; then the state of the request that comes back last moves
on to storage, where there is one.

A request takes at least one step between two retractions. It comes back when the pool has room for what it and all
requests that hold pages are expected to grow by, or when no other request holds pages; the oldest comes first, and no
new request is admitted before (C10). After `decode.retract_limit` retractions it comes back only with pages for its
whole answer, and is retracted no more for others (only on purpose, by `faults.retract_every`): so it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.kv_cache_spec import due
from twinpool.cache.swap.offload import PageDamage
from twinpool.cache.swap.swap_storage import SwappedState, SwapPlace
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import DecodeConfig
from twinpool.contracts.damage import DamageSite, log_damage
from twinpool.contracts.errors import CapacityError, ErrorKind, StaleLease
from twinpool.contracts.messages.worker_events import LegNote
from twinpool.decode.request import DecodeEvent, DecodePhase, DecodeRequest, RequestFailed
from twinpool.decode.retraction.retraction_policy import RetractionRates, cheaper_to_copy, returns_first

log = logging.getLogger("twinpool.decode")


class Retraction:
    """The queues of retracted requests; see the module's prose. Single-threaded; nothing here waits."""

    def __init__(self, manager: KVCacheManager, config: DecodeConfig, clock: Clock) -> None:
        self._manager, self._config, self._clock = manager, config, clock
        self._page_tokens = manager.spec.page_tokens
        self._leaving: list[DecodeRequest] = []
        self._away: list[DecodeRequest] = []
        self._coming: list[DecodeRequest] = []
        self._noted: list[DecodeRequest] = []
        self._began: dict[DecodeRequest, float] = {}
        """When the copy under way of each request began, in seconds of the clock."""
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
        """Whether retracted requests are about to free pages."""
        return bool(self._leaving)

    def first_in_line(self, *, background: bool = True) -> bool:
        """Whether a retracted request is to come back before any new one is admitted; `background`: background ones,
        too. Such a one comes back behind all others."""
        return any(background or not request.submit.background for request in (*self._leaving, *self._away))

    def assured(self, request: DecodeRequest) -> bool:
        """Whether the request has been retracted as often as it may be, so that it gets pages for its whole answer."""
        return request.retractions >= self._config.retract_limit

    # ------------------------------------------------------------ away

    def retract(self, request: DecodeRequest, *, on_purpose: bool = False) -> None:
        """Take a running request off the device; its steps that are under way still count.

        `on_purpose`: a fault wants it, so it doesn't count towards `decode.retract_limit`.
        """
        request.step(DecodeEvent.RETRACT)
        request.retractions += not on_purpose
        request.notes.append(LegNote("retracted", self._clock.now() - request.arrived))
        self._leaving.append(request)

    def advance(self) -> list[RequestFailed]:
        """Begin copies of requests whose steps have landed, and take in ended copies; returns requests that fail."""
        lost: list[RequestFailed] = []
        for request in list(self._leaving):
            if request.swapped is None and self._at_rest(request):
                lost += self._copy(request)
            if request.swapped is not None:
                self._manager.swapped.settle(request.swapped)
                if request.swapped.place is not SwapPlace.SAVING:
                    lost += self._arrive(request)
        return lost

    def _at_rest(self, request: DecodeRequest) -> bool:
        """Whether nothing is under way that writes its state: steps have landed, what was loaded for it has come."""
        allocation = request.allocation
        return not request.under_way and allocation is not None and self._manager.allocations.ready(allocation)

    def _copy(self, request: DecodeRequest) -> Iterator[RequestFailed]:
        allocation, committed = request.held, request.committed
        if not self._copies(committed):
            yield self._again(request, "computing its state again is quicker than copying it")
            return
        began = self._clock.now()
        try:
            swapped = self._manager.swapped.swap_out(allocation, request.whole(self._page_tokens, committed), committed)
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
        if request.notes and request.notes[-1].kind == "retracted":
            request.notes[-1] = replace(request.notes[-1], bytes=swapped.nbytes)
        self._noted.append(request)
        self._manager.allocations.free(allocation)
        request.swapped, request.allocation, request.latest = swapped, None, None
        request.settled = request.stepped = False

    def _copies(self, committed: int) -> bool:
        if self._manager.host is None or self._config.retract == "recompute":
            return False
        spec = self._manager.spec
        nbytes = sum(len(numbers) * spec.unit_bytes(pool) for pool, numbers in due(spec, committed).items())
        return self._config.retract == "copy" or cheaper_to_copy(nbytes, committed, self.rates)

    def _again(self, request: DecodeRequest, why: str) -> RequestFailed:
        self.counters["retractions"] += request.swapped is None
        self.counters["recomputed"] += 1
        return RequestFailed(request, ErrorKind.RETRACTED, f"decode was short of pages: {why}")

    def _make_room(self) -> bool:
        """Begin to move swapped out state from host memory to storage, that of the request which comes back last.

        Returns True while such a move is under way, and False where no state can be moved.
        """
        if any(r.swapped is not None and r.swapped.place is SwapPlace.STORING for r in self._away):
            return True
        for request in sorted(self._away, key=returns_first, reverse=True):
            swapped = request.swapped
            assert swapped is not None
            tokens = request.tokens[: request.committed]
            if swapped.place is SwapPlace.HOST and swapped.leases and self._manager.swapped.to_storage(swapped, tokens):
                return True
        return False

    def _arrive(self, request: DecodeRequest) -> Iterator[RequestFailed]:
        swapped = request.swapped
        assert swapped is not None
        self.rates.saw_out(swapped.nbytes, self._clock.now() - self._began.pop(request))
        if swapped.place is SwapPlace.LOST:
            yield self._damaged(request, "when it had been copied to the host", swapped.damage)
            return
        self._leaving.remove(request)
        request.step(DecodeEvent.SWAPPED_OUT)
        self._away.append(request)

    def _damaged(self, request: DecodeRequest, where: str, pages: Mapping[str, list[int]] = {}) -> RequestFailed:
        """`pages`: the damaged pages by pool, where they are known."""
        self.counters["states_damaged_swapped"] += 1
        facts = {"request_id": request.submit.request_id, "found": where, "pages": dict(pages)}
        log_damage(log, DamageSite.RESTORE, **facts, then="its attempt ends, the next one computes it again")
        return RequestFailed(request, ErrorKind.DAMAGED, "its state was damaged while it was retracted")

    # ------------------------------------------------------------ and back

    def resume(self, may: Callable[[DecodeRequest], bool], *, background: bool = True) -> list[RequestFailed]:
        """Begin to bring back requests that `may` come and have room, oldest first, and background ones last, unless
        none of them is to come; returns requests that fail.

        A request that can't come yet holds up those behind it.
        """
        lost: list[RequestFailed] = []
        for request in sorted(self._away, key=lambda one: (one.submit.background, returns_first(one))):
            if not may(request) or (request.submit.background and not background):
                break
            swapped = request.swapped
            assert swapped is not None
            if swapped.place is not SwapPlace.HOST:
                lost += self._bring_to_host(request, swapped)
                break
            positions = request.positions_for(1 << 62 if self.assured(request) else request.committed + 1)
            began = self._clock.now()
            try:
                returning = self._manager.swapped.swap_in(swapped, positions)
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

    def _bring_to_host(self, request: DecodeRequest, swapped: SwappedState) -> Iterator[RequestFailed]:
        """Begin to read state that is on storage into host memory; state on its way there or back is left to arrive."""
        if swapped.place is SwapPlace.LOST and swapped.damage:
            yield self._damaged(request, "when it came from storage", swapped.damage)
        elif swapped.place is SwapPlace.LOST:
            yield self._again(request, "storage has lost a part of its state")
        if swapped.place is not SwapPlace.STORED:
            return
        try:
            self._manager.swapped.from_storage(swapped, request.tokens[: request.committed])
        except CapacityError as error:
            # Requests that are coming back leave host memory in a moment.
            if not self._coming and not self._make_room():
                yield self._again(request, str(error))

    def returned(self) -> tuple[list[DecodeRequest], list[RequestFailed]]:
        """Return the requests that run again, with all state loaded and verified; and failures of damaged ones."""
        back: list[DecodeRequest] = []
        lost: list[RequestFailed] = []
        for request in list(self._coming):
            returning, allocation, swapped = request.returning, request.held, request.swapped
            assert returning is not None
            assert swapped is not None
            if not returning.restored.done:
                continue
            if not returning.restored.complete:
                pages = _by_pool(swapped, returning.restored.damage)
                lost.append(self._damaged(request, "on the way back", pages))
            elif self._manager.allocations.ready(allocation):
                self.rates.saw_back(swapped.nbytes, self._clock.now() - self._began[request])
                self.counters["resumptions"] += 1
                self.counters["resumed_bytes"] += swapped.nbytes
                request.notes.append(LegNote("resumed", self._clock.now() - request.arrived, swapped.nbytes))
                self.leave(request)
                request.step(DecodeEvent.BACK)
                self._noted.append(request)
                back.append(request)
        return back, lost

    def take_noted(self) -> list[DecodeRequest]:
        """Return the requests that have left the device or come back since the last call, for their routers."""
        noted, self._noted = self._noted, []
        return [request for request in noted if request.notes]

    # ------------------------------------------------------------ ends

    def leave(self, request: DecodeRequest) -> None:
        """Take the request out of its queue and drop its swapped out state. Idempotent. Its allocation, if it has one,
        is the caller's to free."""
        for queue in (self._leaving, self._away, self._coming):
            if request in queue:
                queue.remove(request)
        self._began.pop(request, None)
        if request.swapped is not None:
            self._manager.swapped.drop(request.swapped)
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
        if swapped != len(self._manager.swapped):
            found.append(f"{len(self._manager.swapped)} swapped out copies, requests hold {swapped}")
        under_way = sum(r.swapped is not None for r in [*self._leaving, *self._coming])
        if len(self._began) != under_way:
            found.append(f"the begin of {len(self._began)} copies is kept, {under_way} are under way")
        return found


def _by_pool(swapped: SwappedState, damage: Sequence[PageDamage]) -> dict[str, list[int]]:
    """Returns, by pool, the numbers of the damaged pages in their request."""
    pages: dict[str, list[int]] = {}
    for one in damage:
        pages.setdefault(one.pool, []).append(swapped.numbers[one.pool][one.at])
    return pages
