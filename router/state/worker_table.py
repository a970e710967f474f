"""The workers as the router knows them: what each said of itself last, what it has in flight, and whether it serves.

Which of them a request goes to is placement's (`router/core/placement.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from contracts.config.router_config import RouterConfig
from contracts.ids import Incarnation, RequestId, Role, WorkerName
from contracts.messages.fingerprint import binding_class
from contracts.messages.router_commands import PeerRef
from contracts.messages.worker_status import WorkerRecord, WorkerStatus, WorkerView
from router.state.circuit_breaker import CircuitBreaker

WorkerKey = tuple[WorkerName, Incarnation]
"""One life of one worker."""

REFUSAL_PAUSE_S = 0.5
"""How long a worker that refused as draining is not asked again."""

DRAIN_ANSWER_S = 10.0
"""A worker that was asked to drain and still serves after so long has not heard of it."""

GONE = frozenset({"left", "dead"})


@dataclass(slots=True)
class WorkerEntry:
    """One incarnation of one worker."""

    record: WorkerRecord
    status: WorkerStatus
    breaker: CircuitBreaker
    linked: bool = False
    refuses_until: float = 0.0
    """It said that it is draining before the view did."""
    leaves_until: float = 0.0
    """An operator has asked it to drain: until then nobody counts on it, whether it has answered or not."""
    drains: bool = False
    """It has answered that it drains, and nobody has cancelled that since. A view may still show what was before."""
    load: int = 0
    """Prefill: prompt tokens in flight. Decode: sequences in flight."""
    turn: int = 0
    """When it was last chosen; ties go to the one that has waited longest."""
    requests: set[RequestId] = field(default_factory=set)
    """Those that are booked on it; `load` is of them."""

    @property
    def key(self) -> WorkerKey:
        return (self.record.name, self.record.incarnation)

    @property
    def numerics(self) -> str:
        """The numerics class that what it computes belongs to; empty where any will do (``fast``)."""
        return binding_class(self.record.fingerprint)

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.record.name, self.record.incarnation, self.record.control)

    def serves(self, now: float) -> bool:
        return self.linked and self.status.state == "ready" and now >= self.refuses_until

    def stays(self, now: float) -> bool:
        """Whether it serves and will go on to, as far as is known."""
        return self.serves(now) and now >= self.leaves_until

    def request_drain(self, now: float) -> None:
        """An operator asks it to drain, and its answer may take a while."""
        self.leaves_until = now + DRAIN_ANSWER_S

    def cancel_drain(self) -> None:
        """An operator has cancelled the drain, or it can't be."""
        self.leaves_until, self.drains = 0.0, False

    def book(self, request: RequestId, load: int) -> None:
        """A request goes to it; `load` as of the entry."""
        self.load += load
        self.requests.add(request)
        self.breaker.sent(request)

    def unbook(self, request: RequestId, load: int) -> None:
        """The request is gone from it; `load` is what of it was still booked."""
        self.load -= load
        self.requests.discard(request)
        self.breaker.left(request)


class WorkerTable:
    """The table: one entry a worker, its current incarnation only."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._entries: dict[WorkerName, WorkerEntry] = {}

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(self._entries.values())

    def get(self, key: WorkerKey) -> WorkerEntry | None:
        entry = self._entries.get(key[0])
        return entry if entry is not None and entry.record.incarnation == key[1] else None

    def named(self, name: str) -> WorkerEntry | None:
        return self._entries.get(WorkerName(name))

    def update(self, views: Iterable[WorkerView]) -> list[WorkerEntry]:
        """Take the controller's table; returns the entries whose incarnation has ended."""
        lost: list[WorkerEntry] = []
        seen = set()
        for view in views:
            name, incarnation = view.record.name, view.record.incarnation
            seen.add(name)
            old = self._entries.get(name)
            if old is not None and old.record.incarnation > incarnation:
                continue  # an older table than what we know
            if old is not None and old.record.incarnation == incarnation:
                was_gone = old.status.state in GONE
                old.record, old.status = view.record, view.status
                if view.status.state in GONE and not was_gone:
                    lost.append(old)
                continue
            if old is not None:
                lost.append(old)
            self._entries[name] = WorkerEntry(view.record, view.status, CircuitBreaker(self._config))
        for name in [n for n in self._entries if n not in seen]:
            lost.append(self._entries.pop(name))
        return lost

    def failed(self, key: WorkerKey, request: RequestId, now: float, reporter: WorkerKey) -> None:
        """An attempt failed, and `key` is at fault, as `reporter` says."""
        guilty, witness = self.get(key), self.get(reporter)
        if guilty is not None:
            guilty.breaker.failed(request, now)
        if witness is not None and reporter != key:
            witness.breaker.complained(key[0], now)

    def refused(self, key: WorkerKey, now: float) -> None:
        """A worker took nothing, because it drains; its view will say so."""
        entry = self.get(key)
        if entry is not None:
            entry.refuses_until = now + REFUSAL_PAUSE_S

    def succeeded(self, keys: Iterable[WorkerKey | None], request: RequestId, now: float) -> None:
        for entry in [self.get(key) for key in keys if key]:
            if entry is not None:
                entry.breaker.succeeded(request, now)

    def gone(self, entry: WorkerEntry) -> None:
        """Its incarnation has ended: who complained about it was right."""
        entry.breaker.over()
        for other in self:
            other.breaker.justified(entry.record.name)

    def left_alone(self, now: float) -> list[WorkerName]:
        """Those whose breakers keep requests from them."""
        return [e.record.name for e in self if e.serves(now) and not e.breaker.admits(now)]

    def others_like(self, key: WorkerKey) -> bool:
        """Whether there is another worker of this one's role, up or coming back."""
        entry = self.get(key)
        role = entry.record.role if entry is not None else None
        return any(e.record.role is role and e.record.name != key[0] and e.status.state != "left" for e in self)

    def staying(self, role: Role, now: float) -> list[WorkerEntry]:
        return [e for e in self if e.record.role is role and e.stays(now)]

    def serving(self, role: Role, now: float) -> list[WorkerEntry]:
        return [e for e in self if e.record.role is role and e.serves(now)]

    def most_positions(self, role: Role) -> int | None:
        """The longest sequence that any worker of `role` can hold; None while none is known.

        A worker that is starting has not told yet what fits (0): requests wait for it.
        """
        known = (e.record.fits.max_positions for e in self if e.record.role is role and e.status.state not in GONE)
        return max(filter(None, known), default=None)

    def classes(self, role: Role, need: int, avoid: Mapping[WorkerKey, float], now: float) -> set[str]:
        """The numerics classes of those that could take a request of `need` positions now."""
        return {e.numerics for e in self.able(role, need, avoid, now)}

    def unlike(self, now: float) -> str:
        """Why no prefill and no decode worker can serve a request together, where that is for their classes."""
        prefill, decode = (self.serving(role, now) for role in (Role.PREFILL, Role.DECODE))
        if not prefill or not decode or {e.numerics for e in prefill} & {e.numerics for e in decode}:
            return ""
        return (
            f"no prefill and decode worker compute alike: {prefill[0].record.name} is of the numerics class "
            f"{prefill[0].numerics}, {decode[0].record.name} of {decode[0].numerics}; set engine.numerics_class to a "
            "level that every machine runs, and one build everywhere"
        )

    def able(self, role: Role, need: int, avoid: Mapping[WorkerKey, float], now: float) -> list[WorkerEntry]:
        """Who could take a request of `need` positions now."""
        return [
            e
            for e in self._entries.values()
            if e.record.role is role
            and e.serves(now)
            and e.breaker.admits(now)
            and e.record.fits.max_positions >= need
            and avoid.get(e.key, 0.0) <= now
        ]
