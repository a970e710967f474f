"""One audit on its worker, and its states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cache.allocation.allocation import Allocation
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.router_commands import Audit
from contracts.sampling_params import TokenDifference
from contracts.state_table import StateTable


class AuditState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


class AuditEvent(StrEnum):
    ADMIT = "admit"
    DONE = "done"
    PREEMPT = "preempt"
    REFUSE = "refuse"


AUDITS = StateTable[AuditState, AuditEvent](
    "audit",
    {
        AuditState.WAITING: {
            AuditEvent.ADMIT: AuditState.RUNNING,
            AuditEvent.PREEMPT: AuditState.OVER,
            AuditEvent.REFUSE: AuditState.OVER,
        },
        AuditState.RUNNING: {
            AuditEvent.DONE: AuditState.OVER,
            AuditEvent.PREEMPT: AuditState.OVER,
            AuditEvent.REFUSE: AuditState.OVER,
        },
    },
)


@dataclass(eq=False)
class Audition:
    """One audit on this worker."""

    session: SessionId
    audit: Audit
    state: AuditState = AuditState.WAITING
    claim: Allocation | None = None
    committed: int = 0
    """Positions whose state is computed."""
    checked: int = 0
    differing: int = 0
    differences: list[TokenDifference] = field(default_factory=list)
