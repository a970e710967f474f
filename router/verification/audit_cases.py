"""An audit as the router drives it: its states, its result and its finding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.router_commands import Audit
from twinpool.contracts.messages.worker_events import Audited
from twinpool.contracts.sampling_params import TokenDifference
from twinpool.contracts.state_table import StateTable
from twinpool.router.state.routed_request import AttemptLeg
from twinpool.router.state.worker_table import WorkerKey


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
