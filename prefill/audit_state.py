"""One audit on its worker, and its states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.cache.allocation.allocation import Allocation
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Audit
from twinpool.contracts.sampling_params import TokenDifference
from twinpool.contracts.state_table import StateTable
from twinpool.engine.structured_output.answer_grammar import AnswerGrammar


class AuditRunState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


class AuditRunEvent(StrEnum):
    ADMIT = "admit"
    DONE = "done"
    PREEMPT = "preempt"
    REFUSE = "refuse"


AUDITS = StateTable[AuditRunState, AuditRunEvent](
    "audit",
    {
        AuditRunState.WAITING: {
            AuditRunEvent.ADMIT: AuditRunState.RUNNING,
            AuditRunEvent.PREEMPT: AuditRunState.OVER,
            AuditRunEvent.REFUSE: AuditRunState.OVER,
        },
        AuditRunState.RUNNING: {
            AuditRunEvent.DONE: AuditRunState.OVER,
            AuditRunEvent.PREEMPT: AuditRunState.OVER,
            AuditRunEvent.REFUSE: AuditRunState.OVER,
        },
    },
)


@dataclass(eq=False)
class AuditRun:
    """One audit on this worker: its command, its state, and the result so far."""

    session: SessionId
    audit: Audit
    grammar: AnswerGrammar | None = None
    """What the answer follows."""
    state: AuditRunState = AuditRunState.WAITING
    allocation: Allocation | None = None
    committed: int = 0
    """Positions whose state is computed."""
    checked: int = 0
    """Tokens of the answer that were drawn again."""
    differing: int = 0
    """How many of those came out differently."""
    differences: list[TokenDifference] = field(default_factory=list)
    """The first of those, for the report."""

    @property
    def held(self) -> Allocation:
        """The allocation, for callers that know by the state that there is one."""
        assert self.allocation is not None, f"{self.state} without an allocation"
        return self.allocation
