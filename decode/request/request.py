"""A request on its way through decode, and the states it goes through.

docs/states.md draws them. A request waits until pages and a slot are granted, arrives until everything is verified, and
runs until its last token. Where pages are short it leaves the device (retracting: its steps land; retracted: its state
is in host memory; resuming) and runs again when everything is back and matches its tags. What is handed to another
worker is leaving until it was received there, and runs on here when that came to nothing. What is off the device isn't
handed on, but comes back first.

It is admitted with pages for its prompt and its next step, and gets more as it goes on; where there are none, somebody
is retracted (`decode.retraction.retraction`). While a step is under way the next one may be launched already, with the
token still on the device; not where the draw looks at the tokens before it (repetition, presence and frequency
penalties), for which the host must know them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cache.allocation.allocation import Allocation
from cache.manager.swapping import SwapInProgress
from cache.prefix_cache.token_prefix import TokenPrefix
from cache.swap.swapped_state import SwappedState
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.router_commands import Submit
from contracts.state_table import StateTable
from engine.runner.batch import TokenFromStep
from engine.runner.sampler import needs_history
from transfer.rooms.metadata_slots import HandoverMetadata


class DecodePhase(StrEnum):
    WAITING = "waiting"
    ARRIVING = "arriving"
    RUNNING = "running"
    LEAVING = "leaving"
    """Its state is held for another decode worker (`decode.migration.outgoing_migrations`)."""
    RETRACTING = "retracting"
    """It leaves the device: steps under way land, then its state is copied."""
    RETRACTED = "retracted"
    """Its state is in host memory."""
    RESUMING = "resuming"
    """Its state is on its way back."""
    GONE = "gone"


class DecodeEvent(StrEnum):
    GRANT = "grant"
    ARRIVED = "arrived"
    DEPART = "depart"
    RETRACT = "retract"
    SWAPPED_OUT = "swapped"
    RESUME = "resume"
    BACK = "back"
    END = "end"


PHASES = StateTable[DecodePhase, DecodeEvent](
    "decode request",
    {
        DecodePhase.WAITING: {DecodeEvent.GRANT: DecodePhase.ARRIVING, DecodeEvent.END: DecodePhase.GONE},
        DecodePhase.ARRIVING: {DecodeEvent.ARRIVED: DecodePhase.RUNNING, DecodeEvent.END: DecodePhase.GONE},
        DecodePhase.RUNNING: {
            DecodeEvent.DEPART: DecodePhase.LEAVING,
            DecodeEvent.RETRACT: DecodePhase.RETRACTING,
            DecodeEvent.END: DecodePhase.GONE,
        },
        DecodePhase.LEAVING: {DecodeEvent.BACK: DecodePhase.RUNNING, DecodeEvent.END: DecodePhase.GONE},
        DecodePhase.RETRACTING: {DecodeEvent.SWAPPED_OUT: DecodePhase.RETRACTED, DecodeEvent.END: DecodePhase.GONE},
        DecodePhase.RETRACTED: {DecodeEvent.RESUME: DecodePhase.RESUMING, DecodeEvent.END: DecodePhase.GONE},
        DecodePhase.RESUMING: {DecodeEvent.BACK: DecodePhase.RUNNING, DecodeEvent.END: DecodePhase.GONE},
    },
)

OFF_DEVICE = (DecodePhase.RETRACTING, DecodePhase.RETRACTED, DecodePhase.RESUMING)
"""Those of `decode.retraction.retraction`."""


@dataclass(eq=False)
class DecodeRequest:
    """One attempt at one request. While it is arriving, what it lacks is the room's; afterwards all is its own."""

    session: SessionId
    submit: Submit
    arrived: float
    deadline: float
    prefix: TokenPrefix
    """The prompt's whole pages."""
    phase: DecodePhase = DecodePhase.WAITING
    allocation: Allocation | None = None
    """What it holds of the KV cache manager: from its grant on, but not while it is off the device."""
    swapped: SwappedState | None = None
    """What it holds in host memory: from the copy's beginning until it runs again."""
    returning: SwapInProgress | None = None
    """The way back of what is swapped out."""
    retractions: int = 0
    """How often it was retracted."""
    stepped: bool = True
    """False from its coming back until a step of it is committed: so long it isn't retracted again."""
    metadata: HandoverMetadata | None = None
    """What prefill handed over besides pages, the draft state with it: a copy of its own, whatever becomes of the slot
    and wherever its pages are (hazard A2)."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far; the state of all but the last is in the pages."""
    committed: int = 0
    """Positions whose state is known to be there: all but the last token's."""
    launched: int = 0
    """Positions whose state was given to the device to compute."""
    planned: int = 0
    """Positions that are decided on."""
    latest: TokenFromStep | None = None
    """Where its last launched token is drawn."""
    stopping: bool = False
    """It is to be handed on: no step of it is launched any more."""
    computed: int = 0
    """Prompt positions that this worker's engine had to compute: none, as long as all state is handed over."""
    behind: DecodeRequest | None = None
    """Who is receiving the prompt that it has in common with it, while it waits for that."""
    behind_since: float | None = None
    """When it began to wait for another one first, in seconds."""
    marks: dict[str, float] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        """Tokens of its answer, those of earlier attempts among them."""
        return max(len(self.tokens), len(self.submit.tokens)) - self.submit.prompt_len

    @property
    def in_place(self) -> bool:
        """Whether the state of all its committed positions is on the device, in its allocation."""
        return self.allocation is not None and self.phase in (
            DecodePhase.RUNNING,
            DecodePhase.RETRACTING,
            DecodePhase.LEAVING,
        )

    @property
    def under_way(self) -> int:
        """Tokens that are being drawn."""
        return self.launched - self.committed

    def start(self, metadata: HandoverMetadata) -> None:
        """The state of its tokens is here, and the first one after them."""
        self.metadata = metadata
        self.tokens = [*self.submit.tokens, metadata.token]
        self.committed = self.launched = self.planned = len(self.submit.tokens)

    def commit(self, token: int) -> None:
        """A step is complete: the state of its last token, and the next token."""
        self.tokens.append(token)
        self.committed += 1
        self.stepped = True

    def whole(self, page_tokens: int, end: int) -> TokenPrefix:
        """The whole pages of its first `end` tokens."""
        known = self.prefix.head(end // page_tokens)
        return known.longer(self.tokens[len(known) * page_tokens : end])

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

    def positions_for(self, end: int) -> int:
        """Positions up to `end`, as far as it can ever need them."""
        return min(self.positions, end)

    def step(self, event: DecodeEvent) -> None:
        self.phase = PHASES.next(self.phase, event)
