"""The offers of a draining decode worker: requests for migration, and then the hottest prefixes of its tree.

Requests that haven't begun are offered at once (`MigrationWanted`), and running ones if migrating them is quicker than
finishing them here. The router picks which worker takes them, and when. A retracted request isn't offered: it can come
back when others have left, with less work than it would take to compute its state elsewhere; then it is judged.

Whether a request is worth migrating is a matter of costs, as measured on this worker. A migration costs its bytes at
the rate of the migrations so far, and a fixed overhead. To finish costs the tokens that are still to come
(`decode.retraction.memory_pressure`), at the request's own pace.

When the last request has gone, the worker tells a router what it has (`PrefixOffered`), as much as
`decode.prefix_offer_bytes`, the hottest first. The router finds a worker with room for each and has it fetch
(`decode.migration.prefix_push`). The worker doesn't wait long: an offer that isn't taken up within `PATIENCE_S` is
void, and a worker that no router asks leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec, due
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.worker_events import MigrationWanted, PrefixOffered
from twinpool.decode.migration.prefix_push import PrefixPushes
from twinpool.decode.request import OFF_DEVICE, DecodePhase, DecodeRequest, RouterEvent
from twinpool.decode.retraction.memory_pressure import OutputLengths
from twinpool.worker.request_table import RequestTable

FIRST_BYTES_PER_S = 500e6
"""Assumed before anything was migrated: slow for memory, quick for a network."""
OVERHEAD_S = 0.02
"""Seconds that a migration takes besides its bytes: five messages, a step to end, one to begin."""
_NEW = 0.2
"""Weight of the newest measurement."""


class MigrationCosts:
    """One worker's measurements. `lengths` estimates those of its answers."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        self.bytes_per_s = FIRST_BYTES_PER_S

    def migrated(self, nbytes: int, seconds: float) -> None:
        """Record a migration of `nbytes` bytes that took `seconds`."""
        rate = nbytes / max(seconds - OVERHEAD_S, 1e-3)
        self.bytes_per_s += _NEW * (rate - self.bytes_per_s)

    def worth_migrating(self, nbytes: int, most: int, step_s: float) -> bool:
        """Whether migrating `nbytes` takes less time than the tokens still to come, at most `most` of `step_s` seconds
        each."""
        return OVERHEAD_S + nbytes / self.bytes_per_s < self._lengths.to_come(most) * step_s


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


PATIENCE_S = 1.0
"""Seconds that a worker waits for its offers to be taken up."""


class PrefixOffers:
    """The offers of one worker; see the module's prose."""

    def __init__(
        self,
        name: str,
        manager: KVCacheManager,
        prefix_pushes: PrefixPushes,
        requests: RequestTable[DecodeRequest],
        config: Config,
        clock: Clock,
    ) -> None:
        self._name, self._manager, self._prefix_pushes = name, manager, prefix_pushes
        self._requests, self._clock = requests, clock
        reuse = config.cache_for(Role.DECODE).prefix_reuse
        self._pages = config.decode.prefix_offer_bytes // manager.spec.whole.unit_bytes(manager.full) if reuse else 0
        self._number = 0
        self._open = 0
        """Offers that were made and not taken up yet."""
        self._until: float | None = None
        """When open offers are void, in seconds of the clock; None before they are made."""
        self._session: SessionId | None = None
        """That of the router that spoke last: routers alone know the other workers."""

    @property
    def over(self) -> bool:
        """Whether offers were made, none is worth waiting for, and no push is under way: the worker may leave."""
        return (
            self._until is not None and not self._prefix_pushes and (not self._open or self._clock.now() >= self._until)
        )

    @property
    def next_deadline(self) -> float | None:
        # Pushes under way end by their own deadlines; until then `PATIENCE_S` changes nothing.
        return self._until if not self._prefix_pushes and not self.over else None

    def heard_from(self, session: SessionId) -> None:
        """Note that the router of this session sent a command: offers go to it."""
        self._session = session

    def offer(self) -> list[RouterEvent]:
        """Return the offers, once, of a draining worker that has no requests any more; none at other times."""
        if self._until is not None or len(self._requests):
            return []
        self._until = self._clock.now() + PATIENCE_S
        if self._session is None or not self._pages:
            return []
        told = []
        for hot in self._manager.tree.hottest(self._manager.full, self._pages):
            self._number += 1
            name = RequestId(f"offer-{self._name}-{self._number}")
            told.append(RouterEvent(self._session, PrefixOffered(name, 0, hot.tokens, hot.salt)))
        self._open += len(told)
        return told

    def asked_for(self) -> None:
        """Count one offer as taken up."""
        self._open = max(0, self._open - 1)

    def withdraw(self) -> None:
        """Void the offers, as the worker stays; pushes under way go on."""
        self._until, self._open = None, 0
