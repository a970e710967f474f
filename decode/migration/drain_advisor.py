"""The drain advisor: which requests a draining decode worker offers to its router for migration, and when.

Requests that haven't begun are offered at once (`MigrationWanted`), and running ones if migrating them is quicker than
finishing them here. The router picks which worker takes them, and when. A retracted request isn't offered: it can come
back when others have left, with less work than it would take to compute its state elsewhere; then it is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.required_pages import due
from twinpool.contracts.clock import Clock
from twinpool.contracts.messages.worker_events import MigrationWanted
from twinpool.decode.migration.migration_cost import MigrationCosts
from twinpool.decode.request.request import OFF_DEVICE, DecodePhase, DecodeRequest
from twinpool.decode.request.request_outcomes import RouterEvent
from twinpool.worker.request_table import RequestTable

JUDGE_EVERY_S = 1.0
"""Seconds until a draining worker judges a request again that it let finish."""
STEPS_TO_TELL = 4
"""Steps after which a request's own pace is known."""


@dataclass(slots=True)
class _DrainVerdict:
    """What a draining worker has decided about a request."""

    request: DecodeRequest
    running: bool
    goes: bool
    """The router was told that the request is to migrate; else it may finish here."""
    again_at: float
    """When to judge the request again, in seconds of the clock."""


class DrainAdvisor:
    """The verdicts on one worker's requests; see the module's prose. `spec` says what state a request takes along."""

    def __init__(
        self, requests: RequestTable[DecodeRequest], spec: PoolSetSpec, costs: MigrationCosts, clock: Clock
    ) -> None:
        self._requests, self._spec, self._clock = requests, spec, clock
        self.costs = costs
        self._verdicts: dict[int, _DrainVerdict] = {}
        """By the identity of the request; empty unless the worker drains."""
        self.counters = {"left_to_finish": 0.0}

    @property
    def next_deadline(self) -> float | None:
        """When to judge a request again, in seconds of the clock; None unless the worker drains. A request that a
        router has told to migrate isn't judged meanwhile."""
        if not self._requests.draining:
            return None
        return min((v.again_at for v in self._verdicts.values() if not v.goes and not v.request.stopping), default=None)

    def advise(self) -> Iterator[RouterEvent]:
        """Yield a `MigrationWanted` for each request that should leave; to be called while the worker drains.

        A request that was left to finish may turn out to take long, and is judged again.
        """
        now = self._clock.now()
        for request in self._requests:
            running = request.phase is DecodePhase.RUNNING
            if request.phase in OFF_DEVICE:
                yield from self._take_back(request)
            if request.stopping or request.phase not in (DecodePhase.RUNNING, DecodePhase.WAITING):
                continue  # Its state is on its way here, or will be: with that it goes.
            known = self._verdicts.get(id(request))
            if known is not None and known.running == running and (known.goes or now < known.again_at):
                continue
            goes = not running or self._worth_migrating(request, now)
            self._verdicts[id(request)] = _DrainVerdict(request, running, goes, now + JUDGE_EVERY_S)
            if goes:
                yield _wanted(request)
        self.counters["left_to_finish"] = sum(not v.goes for v in self._verdicts.values())

    def _take_back(self, request: DecodeRequest) -> Iterator[RouterEvent]:
        """Withdraw the offer of a retracted request: no worker can take it now. It is judged again when it is back."""
        verdict = self._verdicts.pop(id(request), None)
        if verdict is not None and verdict.goes:
            yield _wanted(request, withdrawn=True)

    def _worth_migrating(self, request: DecodeRequest, now: float) -> bool:
        most = request.submit.sampling.max_tokens - request.generated
        steps = request.committed - len(request.submit.tokens)
        first = request.marks.get("first_step")
        if first is None or steps < STEPS_TO_TELL:
            return most > 1
        step_s = (now - request.arrived - first) / (steps - 1)
        return self.costs.worth_migrating(self._bytes(request), most, step_s)

    def _bytes(self, request: DecodeRequest) -> int:
        """Return the bytes of all state that the request would take along."""
        numbers: Mapping[str, range] = due(self._spec, request.committed)
        return sum(len(wanted) * self._spec.whole.unit_bytes(pool) for pool, wanted in numbers.items())

    def migrated(self, nbytes: int, seconds: float) -> None:
        """Record a migration of `nbytes` bytes that took `seconds`."""
        self.costs.migrated(nbytes, seconds)

    def stays(self, request: DecodeRequest) -> None:
        """Leave a request here for `JUDGE_EVERY_S` seconds: its migration came to nothing."""
        again_at = self._clock.now() + JUDGE_EVERY_S
        self._verdicts[id(request)] = _DrainVerdict(request, running=True, goes=False, again_at=again_at)

    def forget(self, request: DecodeRequest) -> None:
        """Forget a request that has ended. Idempotent."""
        self._verdicts.pop(id(request), None)

    def withdraw(self) -> list[RouterEvent]:
        """Withdraw all offers, as the worker stays; returns the events. Migrations that have begun go on."""
        gone = [v.request for v in self._verdicts.values() if v.goes and not v.request.stopping]
        self._verdicts.clear()
        self.counters["left_to_finish"] = 0.0
        return [_wanted(request, withdrawn=True) for request in gone]


def _wanted(request: DecodeRequest, *, withdrawn: bool = False) -> RouterEvent:
    submit, started = request.submit, request.phase is DecodePhase.RUNNING
    return RouterEvent(request.session, MigrationWanted(submit.request_id, submit.attempt, started, withdrawn))
