"""A request on its way through decode, and the states it goes through.

    waiting --pages and slot granted--> arriving --verified--> running --last token--> gone
                                                                |   ^
                                          handed to another worker   came to nothing
                                                                v   |
                                                               leaving --received there--> gone

It is admitted with pages for its prompt and its whole answer, so a running request never lacks one. While a step is
under way the next one may be launched already, with the token still on the device; not where the draw looks at the
tokens before it (repetition, presence and frequency penalties), for which the host must know them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cache.claim import Claim
from cache.prefix import Prefix
from contracts.messages import Submit
from contracts.ports import SessionId
from contracts.table import StateTable
from engine.batch import FromStep
from engine.sampling import needs_history


class Phase(StrEnum):
    WAITING = "waiting"
    ARRIVING = "arriving"
    RUNNING = "running"
    LEAVING = "leaving"
    """Its state is held for another decode worker (`decode.departures`)."""
    GONE = "gone"


class PhaseEvent(StrEnum):
    GRANT = "grant"
    ARRIVED = "arrived"
    DEPART = "depart"
    BACK = "back"
    END = "end"


PHASES = StateTable[Phase, PhaseEvent](
    "decode request",
    {
        Phase.WAITING: {PhaseEvent.GRANT: Phase.ARRIVING, PhaseEvent.END: Phase.GONE},
        Phase.ARRIVING: {PhaseEvent.ARRIVED: Phase.RUNNING, PhaseEvent.END: Phase.GONE},
        Phase.RUNNING: {PhaseEvent.DEPART: Phase.LEAVING, PhaseEvent.END: Phase.GONE},
        Phase.LEAVING: {PhaseEvent.BACK: Phase.RUNNING, PhaseEvent.END: Phase.GONE},
    },
)


@dataclass(eq=False)
class Request:
    """One attempt at one request. While it is arriving, what it lacks is the room's; afterwards all is its own."""

    session: SessionId
    submit: Submit
    arrived: float
    deadline: float
    prefix: Prefix
    """The prompt's whole pages."""
    phase: Phase = Phase.WAITING
    claim: Claim | None = None
    """What it holds of the seat; from its grant on."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far; the state of all but the last is in the pages."""
    committed: int = 0
    """Positions whose state is known to be there: all but the last token's."""
    launched: int = 0
    """Positions whose state was given to the device to compute."""
    planned: int = 0
    """Positions that are decided on."""
    latest: FromStep | None = None
    """Where its last launched token is drawn."""
    stopping: bool = False
    """It is to be handed on: no step of it is launched any more."""
    computed: int = 0
    """Prompt positions that this worker's engine had to compute: none, as long as all state is handed over."""
    marks: dict[str, float] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.submit.prompt_len

    @property
    def under_way(self) -> int:
        """Tokens that are being drawn."""
        return self.launched - self.committed

    def start(self, token: int) -> None:
        """The state of its tokens is here, and the first one after them."""
        self.tokens = [*self.submit.tokens, token]
        self.committed = self.launched = self.planned = len(self.submit.tokens)

    def commit(self, token: int) -> None:
        """A step is complete: the state of its last token, and the next token."""
        self.tokens.append(token)
        self.committed += 1

    @property
    def can_go_on(self) -> bool:
        """Whether its next step can be launched now: nothing is missing, and it doesn't end with what is under way."""
        if self.stopping:
            return False
        if not self.under_way:
            return True
        known = not needs_history(self.submit.sampling)
        return known and self.generated + self.under_way < self.submit.sampling.max_tokens

    @property
    def positions(self) -> int:
        """Positions whose state it needs at most: the last token's is never read."""
        return max(len(self.submit.tokens), self.submit.max_len - 1)

    def step(self, event: PhaseEvent) -> None:
        self.phase = PHASES.next(self.phase, event)
