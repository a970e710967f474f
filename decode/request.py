"""A request on its way through decode, and the states it goes through.

    waiting --pages and slot granted--> arriving --verified--> running --last token--> gone

It is admitted with pages for its prompt and its whole answer, so a running request never lacks one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cache.leases import Lease
from contracts.messages import Submit
from contracts.ports import SessionId
from contracts.table import StateTable


class Phase(StrEnum):
    WAITING = "waiting"
    ARRIVING = "arriving"
    RUNNING = "running"
    GONE = "gone"


class PhaseEvent(StrEnum):
    GRANT = "grant"
    ARRIVED = "arrived"
    END = "end"


PHASES = StateTable[Phase, PhaseEvent](
    "decode request",
    {
        Phase.WAITING: {PhaseEvent.GRANT: Phase.ARRIVING, PhaseEvent.END: Phase.GONE},
        Phase.ARRIVING: {PhaseEvent.ARRIVED: Phase.RUNNING, PhaseEvent.END: Phase.GONE},
        Phase.RUNNING: {PhaseEvent.END: Phase.GONE},
    },
)


@dataclass(eq=False)
class Request:
    """One attempt at one request. While it is arriving, its pages are the room's; afterwards `lease` is its own."""

    session: SessionId
    submit: Submit
    arrived: float
    deadline: float
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far; the state of all but the last is in the pages."""
    bytes: int = 0
    computed: int = 0
    """Prompt positions that this worker's engine had to compute: none, as long as all state is handed over."""
    marks: dict[str, float] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.submit.prompt_len

    @property
    def positions(self) -> int:
        """Positions whose state it needs at most: the last token's is never read."""
        return max(len(self.submit.tokens), self.submit.max_len - 1)

    def step(self, event: PhaseEvent) -> None:
        self.phase = PHASES.next(self.phase, event)
