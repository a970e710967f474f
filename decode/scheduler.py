"""The decode scheduler: which requests get pages for their prompt, and which take the next step.

Requests that are here already come before new ones: a retracted request comes back before any new one is admitted.
New requests are admitted by priority; among those of one tenants have fair shares, by the tokens that they were granted
pages for and have drawn while anybody waited (`worker.fair_shares`), and each tenant's are first come, first served.
Running answers aren't cut short for that. Where memory is short, running requests are retracted (`decode.retraction`).
All queues of requests are here and, for retracted ones, there.

**Background requests** (`Submit.background`) have what others leave: while any other is here they get no pages, and
while one runs, or has just come, at most `decode.background_rows` of them take steps. Where another lacks room one
that runs is retracted, and comes back when no other waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.worker_events import LegNote
from twinpool.decode.drafting import Drafting, StepVerdict
from twinpool.decode.request import OFF_DEVICE, DecodeEvent, DecodePages, DecodePhase, DecodeRequest, RequestFailed
from twinpool.decode.retraction.memory_pressure import MemoryPressure, OutputLengths
from twinpool.decode.retraction.retraction import Retraction
from twinpool.decode.transfer_queue import TransferQueue
from twinpool.worker.fair_shares import FairShares
from twinpool.worker.request_table import RequestTable


class DecodeScheduler:
    """The queues of one decode worker; see the module's prose."""

    def __init__(
        self,
        requests: RequestTable[DecodeRequest],
        pages: DecodePages,
        prompts: TransferQueue,
        lengths: OutputLengths,
        drafting: Drafting,
        config: Config,
        clock: Clock,
    ) -> None:
        self._requests, self._pages, self._prompts, self._drafting = requests, pages, prompts, drafting
        self._config, self._faults, self._clock = config.decode, config.faults, clock
        self.waiting: deque[DecodeRequest] = deque()
        """Requests that wait for pages: by priority, then in order of arrival."""
        self.running: deque[DecodeRequest] = deque()
        """Requests of the continuous batch; the one that has waited longest for a step comes first."""
        self.retraction = Retraction(pages.manager, config.decode, clock)
        self.pressure = MemoryPressure(requests, pages.manager, self.retraction, lengths)
        self._shares = FairShares()
        self._steps = 0

    @property
    def busy(self) -> bool:
        """Whether any request is in the batch, or retracted and to come back to it."""
        return bool(self.running or len(self.retraction))

    @property
    def counters(self) -> dict[str, float]:
        return {**self.retraction.counters, "retracted": len(self.retraction), "ungranted": len(self.waiting)}

    # ------------------------------------------------------------ admission

    def add(self, request: DecodeRequest) -> None:
        """Queue a request, which waits for pages, in its place by priority and arrival."""
        self.waiting.insert(bisect_right(self.waiting, _turn(request), key=_turn), request)

    def admit(self) -> Iterator[RequestFailed]:
        """Give pages to retracted requests, then to waiting ones, as far as there are any; yields requests that fail.

        A migrating request that gets none now fails at once: its stream stands still elsewhere.
        """
        ordinary = any(not request.submit.background for request in self.waiting)
        if len(self.retraction):
            yield from self.retraction.advance()
            rests = _background_rests(self._requests, self._config.background_rows)
            yield from self.retraction.resume(self.pressure.has_room_for, background=not (ordinary or rests))
        self._shares.follow({r.submit.tenant: r.submit.weight for r in self.waiting})
        if not self.waiting:
            return
        if not self.retraction.first_in_line(background=not ordinary):
            self._grant()
        for request in [r for r in self.waiting if r.submit.migrating]:
            yield RequestFailed(request, ErrorKind.OVERLOADED, "there is no room for it now")

    def returned(self) -> list[RequestFailed]:
        """Take requests into the batch whose state is back on the device; returns failures of damaged ones."""
        back, lost = self.retraction.returned()
        self.running += back
        return lost

    def _grant(self) -> None:
        """Grant pages to waiting requests, in order.

        Each gets pages for its prompt and its next step, if there is room for the growth that is expected of it and of
        all requests that hold pages; otherwise it and all behind it wait, unless a prompt of another tenant makes way.
        A request that waits for another one's prompt holds up no other.
        """
        for request in self._in_turn():
            if request.submit.background and _background_rests(self._requests, self._config.background_rows):
                return
            if self._prompts.waits(request):
                continue
            while not (self.pressure.has_room_for(request) and self._prompts.preallocate(request)):
                if (preempted := self._prompts.make_way(request)) is None:
                    if not self.retraction.leaving and (victim := _gives_way(self.running, request)) is not None:
                        self.retract(victim)
                    return
                self.requeue(preempted)
            self.waiting.remove(request)
            assert request.allocation is not None, "it was granted"
            self._charge(request, len(request.submit.tokens) - request.allocation.cached.total)
            request.behind = None
            request.step(DecodeEvent.GRANT)
            request.marks["grant"] = at_s = self._clock.now() - request.arrived
            if request.behind_since is not None:
                request.notes.append(LegNote("waited", at_s, text="for another request's prompt, which begins alike"))

    def _in_turn(self) -> Iterator[DecodeRequest]:
        """Yield the waiting requests in the order in which they get pages."""
        for _, equals in groupby(list(self.waiting), key=lambda r: r.submit.priority):
            queues: dict[str, list[DecodeRequest]] = {}
            for request in equals:
                queues.setdefault(request.submit.tenant, []).append(request)
            yield from self._shares.in_turn(queues, {})

    def _charge(self, request: DecodeRequest, tokens: int) -> None:
        self._shares.charge(request.submit.tenant, request.submit.weight, tokens)

    # ------------------------------------------------------------ the batch

    def start(self, request: DecodeRequest) -> None:
        """Take a request whose prompt has arrived into the batch."""
        assert request.metadata is not None
        if request.metadata.computed_tokens:  # 0 from another decode worker: then the time isn't prefill's.
            seconds = request.marks["arrived"] - request.marks["grant"]
            self.retraction.rates.saw_prefill(len(request.submit.tokens), seconds)
        self.running.append(request)

    def next_batch(self) -> list[DecodeRequest]:
        """Return the requests of the next step, those that have waited longest first; plans one position for each, and
        those of its drafts.

        There are at most `decode.max_batch_tokens`. Where a request lacks pages for its step, others are retracted.
        """
        since = self._clock.now() - self._config.background_rest_s
        came = (request for request in self._requests if request.arrived > since)
        taking = _may_step(self.running, came, self._config.background_rows)
        verdict = self._drafting.verdict(taking)
        batch, short = self._able(taking, verdict)
        if short:
            short = self._make_way(short)
            for victim in self.pressure.choose_victims(short, self.running):
                self.retract(victim)
            batch = [request for request in batch if request.phase is DecodePhase.RUNNING]
        if not short:
            self._drafting.plan(batch, verdict, self._config.max_batch_tokens - len(batch))
        for request in batch:
            request.planned += 1 + len(request.drafts)
            if self.waiting:
                self._charge(request, 1)
        return batch

    def _able(
        self, taking: Sequence[DecodeRequest], verdict: StepVerdict | None
    ) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Return, in turn, the requests of `taking` that can take a step and have pages for it, and those without.

        A request waits while it is to be migrated, while it comes to `max_tokens` with the steps under way, while those
        have to say how far its drafts came, and while state that was loaded for it hasn't arrived. One with steps under
        way isn't short: they may free a page of a window, or end it. `verdict`: what drafts are worth in the step.
        """
        batch: list[DecodeRequest] = []
        short: list[DecodeRequest] = []
        for request in taking:
            if len(batch) == self._config.max_batch_tokens:
                break
            if request.stopping:
                continue
            under_way = request.launched - request.committed
            if under_way and request.generated + under_way >= request.submit.sampling.max_tokens:
                continue
            if not request.settled and not self._pages.settled(request):
                continue
            if under_way and self._drafting.waits(request, verdict):
                continue
            if request.planned < request.reach or self._pages.grow(request):
                batch.append(request)
            elif not under_way:
                short.append(request)
        return batch, short

    def _make_way(self, short: list[DecodeRequest]) -> list[DecodeRequest]:
        """Take its pages from a prompt that is being computed here, where requests are `short` of pages; returns those
        for which others have to be retracted."""
        if self.retraction.leaving:
            return short
        preempted = self._prompts.preempt(max(request.submit.priority for request in short))
        if preempted is None:
            return short
        self.pressure.shorter_than_needed()
        self.requeue(preempted)
        return []

    def requeue(self, request: DecodeRequest) -> None:
        """Have a request whose prompt was preempted wait for pages again."""
        request.step(DecodeEvent.PREEMPT)
        self.add(request)

    def launched(self, batch: list[DecodeRequest]) -> None:
        """Move the requests of a launched step behind the others. `faults.retract_every` acts here."""
        went = set(map(id, batch))
        self.running = deque([r for r in self.running if id(r) not in went] + batch)
        self._steps += 1
        if self._faults.retract_every and self._steps % self._faults.retract_every == 0:
            for request in [r for r in self.running if r.stepped or r.under_way]:
                self.retract(request, on_purpose=True)

    def retract(self, request: DecodeRequest, *, on_purpose: bool = False) -> None:
        """Retract a running request. `on_purpose`: for a fault, not for lack of pages."""
        self.running.remove(request)
        self.retraction.retract(request, on_purpose=on_purpose)

    def pause(self, request: DecodeRequest) -> None:
        """Take a request out of the batch: its state is held for another worker."""
        self.running.remove(request)
        request.step(DecodeEvent.DEPART)

    def resume(self, request: DecodeRequest) -> None:
        """Take a paused request back into the batch; it goes on from where it was paused."""
        request.step(DecodeEvent.BACK)
        self.running.append(request)

    # ------------------------------------------------------------ ends

    def remove(self, request: DecodeRequest) -> None:
        """Out of whatever queue it is in. Its allocation, if it has one, is the caller's to release."""
        self.retraction.leave(request)
        queue = {DecodePhase.WAITING: self.waiting, DecodePhase.RUNNING: self.running}.get(request.phase)
        if queue is not None:
            queue.remove(request)

    def check(self) -> list[str]:
        """Recount; returns what doesn't agree."""
        found = self.retraction.check()
        queues = {DecodePhase.WAITING: list(self.waiting), DecodePhase.RUNNING: list(self.running)}
        queues |= {phase: [r for r in self.retraction if r.phase is phase] for phase in OFF_DEVICE}
        for phase, queue in queues.items():
            members = [r for r in self._requests if r.phase is phase]
            if {id(r) for r in members} != {id(r) for r in queue} or len(members) != len(queue):
                found.append(f"{len(members)} requests are {phase}, {len(queue)} are in that queue")
        return found


def _turn(request: DecodeRequest) -> tuple[int, float]:
    """Sort key of the order in which requests get pages."""
    return -request.submit.priority, request.arrived


def _background_rests(requests: Iterable[DecodeRequest], rows: int) -> bool:
    """Whether background requests get no pages now: others are here, and as many of them as may run beside those."""
    here = list(requests)
    holding = sum(one.submit.background and one.allocation is not None for one in here)
    return holding >= rows and not all(one.submit.background for one in here)


def _gives_way(running: Iterable[DecodeRequest], request: DecodeRequest) -> DecodeRequest | None:
    """Return the background request that leaves for one that lacks room; None where none does."""
    able = [one for one in running if one.submit.background and not one.stopping]
    return None if request.submit.background else min(able, key=lambda one: one.generated, default=None)


def _may_step(running: Iterable[DecodeRequest], came: Iterable[DecodeRequest], rows: int) -> list[DecodeRequest]:
    """Return those of `running` that may take a step, in turn: of background ones the first `rows`, where others run or
    are among those that `came` lately."""
    here = list(running)
    background = [one for one in here if one.submit.background]
    if not background or (len(background) == len(here) and all(one.submit.background for one in came)):
        return here
    first = background[:rows]
    return [one for one in here if not one.submit.background or one in first]
