"""One audit as the router drives it: its states and findings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from contracts.ids import RequestId, Role
from contracts.messages.router_commands import Audit
from contracts.messages.worker_events import Audited
from contracts.sampling_params import TokenDifference
from contracts.state_table import StateTable
from router.state.routed_request import AttemptLeg
from router.state.worker_table import WorkerKey


class AuditResult(StrEnum):
    """What became of an answer that was chosen."""

    EXACT = "exact"
    """Every token came out the same."""
    DAMAGED = "damaged"
    """At least one token was drawn from another state than the answer's own; computed twice, with the same result."""
    UNCLEAR = "unclear"
    """numerics: fast: tokens differ within the margin."""
    DISPUTED = "disputed"
    """Computed twice, with two results that differ from the answer and from each other."""
    DROPPED = "dropped"
    """Left out: others came later and the queue was full, or requests took every worker."""
    FAILED = "failed"
    """No worker could compute it."""


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
    """One answer to be audited."""

    audit: Audit
    legs: tuple[AttemptLeg, ...]
    """Who served which part of it."""
    salt: str
    numerics: str = ""
    """The numerics class that the answer was computed in: only a worker of the same draws the same bits again."""
    state: AuditCaseState = AuditCaseState.QUEUED
    worker: WorkerKey | None = None
    sent_at: float = 0.0
    first: Audited | None = None
    """What the first computation that found a difference came to."""
    auditors: list[str] = field(default_factory=list)
    """Workers that have computed it."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """An answer that didn't come out exact; for the log."""

    request_id: RequestId
    result: AuditResult
    checked: int
    differing: int
    differences: tuple[TokenDifference, ...]
    leg: AttemptLeg | None
    """The attempt that the first position that differs is of."""
    role: Role | None
    """Which worker of it drew that position."""
    auditors: tuple[str, ...]
    message: str = ""


@dataclass(slots=True)
class AuditCounts:
    """What audits came to since the start."""

    results: Counter[AuditResult] = field(default_factory=Counter)
    tokens: int = 0
    """Tokens that were drawn again, of whole audits; a second computation doesn't count."""
    differing: int = 0
    """Those of damaged answers that came out otherwise."""
    damage: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Damaged answers by worker and role that served the first wrong token."""

    @property
    def damage_rate(self) -> float:
        """Share of the answers with a clear result that are damaged."""
        clear = self.results[AuditResult.EXACT] + self.results[AuditResult.DAMAGED]
        return self.results[AuditResult.DAMAGED] / clear if clear else 0.0
