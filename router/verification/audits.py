"""Audits: the choice of answers to compute again, the workers that do it, and the findings. No I/O, injected clock.

A case is queued, sent, and judged (exact, damaged, unclear) or queued again: to be confirmed, or because it was
preempted or its worker was lost. One that was begun too often, timed out or fell off a full queue is over without a
finding (docs/states.md draws it).

Answers are chosen by a hash of their request's id, so the choice doesn't depend on load; answers that the stream watch
has flagged are chosen as well. They wait in a bounded queue for a prefill worker on which nothing runs or waits; where
decode workers compute prompts too, and no prefill worker serves that could compute the answer, for one of those.
Requests come first everywhere: a full queue leaves its oldest audits out, and a worker sends its audit back when a
request arrives.

A difference is believed when a second computation, on another worker where there is one, draws the same tokens. Where
it draws others, one of the two auditors is wrong: `disputed`. Every worker that served a part of a damaged answer
invalidates all that its tree has of the answer, so that no later turn goes on from there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Sized
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec.structs import replace

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.router_config import AuditConfig
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.router_commands import Audit, Cancel, InvalidatePrefix
from twinpool.contracts.messages.stream_frames import ADAPTERS_SINCE
from twinpool.contracts.messages.worker_events import Audited, AuditEnd
from twinpool.contracts.sampling_params import TokenDifference
from twinpool.contracts.state_table import StateTable
from twinpool.router.state.routed_request import AttemptLeg, RoutedRequest
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey, WorkerTable


class AuditResult(StrEnum):
    """The result of an answer that was chosen for an audit."""

    EXACT = "exact"
    """Every token came out the same."""
    DAMAGED = "damaged"
    """At least one token was drawn from state that wasn't the answer's own; computed twice, with the same result."""
    UNCLEAR = "unclear"
    """With `numerics: fast`: tokens differ, but within `audit.margin`."""
    DISPUTED = "disputed"
    """Computed twice, with two results that differ from the answer and from each other."""
    DROPPED = "dropped"
    """Left out: later answers filled the queue, the audit was begun too often without an end, or it timed out."""
    FAILED = "failed"
    """The worker refused to compute the audit, or failed to."""


class AuditCaseState(StrEnum):
    QUEUED = "queued"
    SENT = "sent"
    OVER = "over"


class AuditCaseEvent(StrEnum):
    SEND = "send"
    RETURN = "return"
    END = "end"


STATES = StateTable[AuditCaseState, AuditCaseEvent](
    "router's audit",
    {
        AuditCaseState.QUEUED: {AuditCaseEvent.SEND: AuditCaseState.SENT, AuditCaseEvent.END: AuditCaseState.OVER},
        AuditCaseState.SENT: {AuditCaseEvent.RETURN: AuditCaseState.QUEUED, AuditCaseEvent.END: AuditCaseState.OVER},
    },
)


@dataclass(eq=False)
class AuditCase:
    """The audit of one answer, until it is over."""

    audit: Audit
    legs: tuple[AttemptLeg, ...]
    """The workers that served each part of the answer."""
    salt: str
    numerics: str = ""
    """The numerics class that the answer was computed in: only a worker of the same class draws the same bits."""
    state: AuditCaseState = AuditCaseState.QUEUED
    worker: WorkerKey | None = None
    sent_at: float = 0.0
    first: Audited | None = None
    """The result of the first computation, where that found a difference."""
    auditors: list[str] = field(default_factory=list)
    """The names of the workers that have computed the audit."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The finding of an audit whose result isn't exact; for the log."""

    request_id: RequestId
    result: AuditResult
    checked: int
    differing: int
    differences: tuple[TokenDifference, ...]
    leg: AttemptLeg | None
    """The leg that emitted the first differing position."""
    role: Role | None
    """The role of the leg's worker that drew that position."""
    auditors: tuple[str, ...]
    message: str = ""


@dataclass(frozen=True, slots=True)
class AuditEnded:
    """An audit is over, with whatever result; for the record of its request."""

    request_id: RequestId
    auditors: tuple[str, ...]
    text: str


@dataclass(slots=True)
class AuditCounts:
    """Counters of audits since the router's start."""

    results: Counter[AuditResult] = field(default_factory=Counter)
    tokens: int = 0
    """Tokens that finished audits drew again; one that was computed twice counts once."""
    differing: int = 0
    """Tokens of damaged answers that came out otherwise."""
    damage: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Damaged answers by the name and role of the worker that drew the first wrong token."""

    @property
    def damage_rate(self) -> float:
        """Share of damaged answers among those with a clear result (exact or damaged); 0 where there are none."""
        clear = self.results[AuditResult.EXACT] + self.results[AuditResult.DAMAGED]
        return self.results[AuditResult.DAMAGED] / clear if clear else 0.0


TRIES = 8
"""How often an audit is sent to a worker before it is left out."""
PAUSE_S = 0.5
"""Seconds for which a worker that sent an audit back gets no other."""
PREFIX = "audit-"
"""The beginning of the ids of audits; no request's id begins so."""


def chosen(request_id: RequestId, fraction: float) -> bool:
    """Whether a request is among the audited share: a function of its id alone."""
    number = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8, person=b"audit").digest())
    return number < fraction * 2.0**64


class Audits:
    """The audits of one router. Commands come out of `take_commands`, findings out of `take_findings`."""

    def __init__(
        self, config: AuditConfig, clock: Clock, workers: WorkerTable, in_flight: Container[RequestId], waiting: Sized
    ) -> None:
        """`in_flight`: all requests that haven't ended; `waiting`: the ones among them that wait for workers."""
        self.counts = AuditCounts()
        self._config, self._clock, self._workers = config, clock, workers
        self._in_flight, self._clients = in_flight, waiting
        self._cases: dict[RequestId, AuditCase] = {}
        """All cases that aren't over, oldest first."""
        self._flagged: set[RequestId] = set()
        """Requests in flight whose streams look broken."""
        self._paused: dict[WorkerKey, float] = {}
        self.commands: list[tuple[WorkerKey, Audit | Cancel | InvalidatePrefix]] = []
        """Until they are taken, as the next two."""
        self.findings: list[AuditFinding] = []
        self.ended: list[AuditEnded] = []

    # ------------------------------------------------------------ questions

    @property
    def queued(self) -> int:
        return sum(case.state is AuditCaseState.QUEUED for case in self._cases.values())

    @property
    def under_way(self) -> int:
        return len(self._cases) - self.queued

    def take_commands(self) -> list[tuple[WorkerKey, Audit | Cancel | InvalidatePrefix]]:
        commands, self.commands = self.commands, []
        return commands

    def take_findings(self) -> list[AuditFinding]:
        findings, self.findings = self.findings, []
        return findings

    def take_ended(self) -> list[AuditEnded]:
        over, self.ended = self.ended, []
        return over

    def check(self) -> list[str]:
        """Recount the cases; returns a line for each disagreement."""
        found = [f"{rid} is flagged but not in flight" for rid in self._flagged if rid not in self._in_flight]
        busy: Counter[WorkerKey] = Counter()
        for key, case in self._cases.items():
            if (case.state is AuditCaseState.SENT) != (case.worker is not None) or case.state is AuditCaseState.OVER:
                found.append(f"audit {key} is {case.state} with worker {case.worker}")
            if case.worker is not None:
                busy[case.worker] += 1
        found += [f"{name} #{number} has {n} audits at once" for (name, number), n in busy.items() if n > 1]
        if self.queued > self._config.queue_answers:
            found.append(f"{self.queued} audits wait, at most {self._config.queue_answers} may")
        return found

    # ------------------------------------------------------------ requests and workers' events

    def flag(self, request_id: RequestId) -> None:
        """Choose the answer of a request whose stream looks broken, whatever its id, unless it has ended already."""
        if request_id in self._in_flight:
            self._flagged.add(request_id)

    def forget(self, request_id: RequestId) -> None:
        """Forget the flag of a request that has ended. Idempotent."""
        self._flagged.discard(request_id)

    def consider(self, r: RoutedRequest) -> None:
        """Queue the full answer of a request that has ended, if it was flagged or is in the audited share. One with
        pictures isn't audited: an audit has tokens alone."""
        fraction = self._config.fraction
        if not fraction or not r.emitted or r.pictures or not (r.id in self._flagged or chosen(r.id, fraction)):
            return
        key = RequestId(f"{PREFIX}{r.id}")
        # Log-probabilities cost time and decide no token.
        sampling = replace(r.sampling, logprobs=None, prompt_logprobs=None, routed_experts=False)
        self._cases[key] = AuditCase(
            Audit(key, 0, r.tokens, len(r.prompt), sampling), tuple(r.legs), r.salt, r.numerics
        )
        waiting = [case for case in self._cases.values() if case.state is AuditCaseState.QUEUED]
        for case in waiting[: max(0, len(waiting) - self._config.queue_answers)]:
            self._end(case, AuditResult.DROPPED)

    def on_event(self, worker: WorkerKey, event: Audited) -> bool:
        """Take in a worker's answer to an audit; returns False where it isn't asked for any more."""
        case = self._cases.get(event.request_id)
        if case is None or case.worker != worker or event.attempt != case.audit.attempt:
            return False
        if event.end is AuditEnd.COMPUTED:
            case.auditors.append(worker[0])
            self._judge(case, event)
        elif event.end is AuditEnd.PREEMPTED:
            self._paused[worker] = self._clock.now() + PAUSE_S
            self._again(case)
        else:
            self._end(case, AuditResult.FAILED, event)
        self.pump()
        return True

    def lost(self, worker: WorkerKey) -> None:
        """Queue the audit of a lost worker again."""
        self._paused.pop(worker, None)
        for case in list(self._cases.values()):
            if case.worker == worker:
                self._again(case)

    def tick(self) -> None:
        """End pauses and audits whose time is up, and send what waits."""
        now = self._clock.now()
        self._paused = {key: until for key, until in self._paused.items() if until > now}
        for case in list(self._cases.values()):
            if case.worker is not None and now >= case.sent_at + self._config.timeout_s:
                self.commands.append((case.worker, Cancel(case.audit.request_id, case.audit.attempt)))
                self._end(case, AuditResult.DROPPED)
        self.pump()

    def pump(self) -> None:
        """Send waiting audits, the oldest first, to idle workers that compute prompts; none while requests wait for
        workers. Decode workers get those that no prefill worker could compute."""
        waiting = [case for case in self._cases.values() if case.state is AuditCaseState.QUEUED]
        if not waiting or len(self._clients):
            return
        now = self._clock.now()
        taken = {case.worker for case in self._cases.values()}
        pools = [self._workers.serving(role, now) for role in self._workers.computing]
        idle = {
            e.key
            for pool in pools
            for e in pool
            if _idle(e) and e.key not in taken and self._paused.get(e.key, 0.0) <= now
        }
        for case in waiting:
            if not idle:
                return
            able = next((found for pool in pools if (found := [e for e in pool if _can_compute(e, case)])), [])
            if free := [e for e in able if e.key in idle]:
                # Workers that have computed the audit come last, and before them those that served the answer.
                served = {name for leg in case.legs for name in leg.workers.values()}
                entry = min(free, key=lambda e: (e.record.name in case.auditors, e.record.name in served, e.turn))
                idle.remove(entry.key)
                self._send(case, entry.key, now)

    def _send(self, case: AuditCase, worker: WorkerKey, now: float) -> None:
        case.state = STATES.next(case.state, AuditCaseEvent.SEND)
        case.worker, case.sent_at = worker, now
        self.commands.append((worker, case.audit))

    # ------------------------------------------------------------ results

    def _judge(self, case: AuditCase, event: Audited) -> None:
        if case.first is None and not event.differences:
            self._end(case, AuditResult.UNCLEAR if event.differing else AuditResult.EXACT, event)
        elif case.first is None:
            case.first = event
            self._again(case)
        else:
            # How far off a token is depends on the worker that computed it; which token was drawn doesn't.
            same = [(d.position, d.drawn) for d in event.differences] == [
                (d.position, d.drawn) for d in case.first.differences
            ]
            self._end(case, AuditResult.DAMAGED if same else AuditResult.DISPUTED, event)

    def _again(self, case: AuditCase) -> None:
        """Queue a case again, as its next attempt; one that was sent `TRIES` times is dropped."""
        if case.audit.attempt + 1 >= TRIES:
            self._end(case, AuditResult.DROPPED)
            return
        case.state = STATES.next(case.state, AuditCaseEvent.RETURN)
        case.worker = None
        case.audit = replace(case.audit, attempt=case.audit.attempt + 1)

    def _end(self, case: AuditCase, result: AuditResult, event: Audited | None = None) -> None:
        """End a case; every end goes through here. With `event`, a result other than exact becomes a finding."""
        case.state = STATES.next(case.state, AuditCaseEvent.END)
        del self._cases[case.audit.request_id]
        counts, auditors = self.counts, tuple(case.auditors)
        counts.results[result] += 1
        text = f"{result}: {event.checked} tokens drawn again, {event.differing} otherwise" if event else str(result)
        self.ended.append(AuditEnded(RequestId(case.audit.request_id.removeprefix(PREFIX)), auditors, text))
        if event is None or result is AuditResult.EXACT:
            counts.tokens += event.checked if event is not None else 0
            return
        counts.tokens += event.checked
        differences = event.differences or (case.first.differences if case.first is not None else ())
        leg = _leg_at(case.legs, differences[0].position) if differences else None
        role = leg.role_at(differences[0].position) if leg is not None else None
        if result is AuditResult.DAMAGED:
            counts.differing += event.differing
            if leg is not None and role is not None:
                counts.damage[leg.workers.get(role, ""), role] += 1
            self._forget(case)
        request = RequestId(case.audit.request_id.removeprefix(PREFIX))
        self.findings.append(
            AuditFinding(
                request,
                result,
                event.checked,
                event.differing,
                differences,
                leg,
                role,
                tuple(case.auditors),
                event.message,
            )
        )

    def _forget(self, case: AuditCase) -> None:
        """Have every worker that served a part of an answer invalidate it: it may have cached the wrong state."""
        request = RequestId(case.audit.request_id.removeprefix(PREFIX))
        for name in sorted({name for leg in case.legs for name in leg.workers.values()}):
            entry = self._workers.named(name)
            if entry is not None and entry.linked:
                self.commands.append((entry.key, InvalidatePrefix(request, case.audit.tokens, case.salt)))


def _idle(entry: WorkerEntry) -> bool:
    """Whether a worker has no requests, by what was sent to it and by its latest status."""
    return not (entry.load or entry.status.running or entry.status.waiting)


def _can_compute(entry: WorkerEntry, case: AuditCase) -> bool:
    """Whether a worker has pages for an answer, and would draw the same bits."""
    if case.audit.sampling.adapter is not None and not entry.speaks(ADAPTERS_SINCE):
        return False
    return entry.record.fits.max_positions >= len(case.audit.tokens) and entry.numerics == case.numerics


def _leg_at(legs: tuple[AttemptLeg, ...], position: int) -> AttemptLeg | None:
    """The leg that emitted a position: the last that began at or before it."""
    return next((leg for leg in reversed(legs) if leg.base <= position), None)
