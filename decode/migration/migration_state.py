"""A request on its way to another worker: its states at the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from contracts.ids import RoomId
from contracts.messages.router_commands import PeerRef
from contracts.state_table import StateTable
from decode.request.request import Request


class Stage(StrEnum):
    STOPPING = "stopping"
    OFFERED = "offered"
    SENDING = "sending"
    SENT = "sent"
    GONE = "gone"
    BACK = "back"


class StageEvent(StrEnum):
    LANDED = "landed"
    """Its last launched step is committed."""
    GRANT = "grant"
    SENT = "sent"
    RECEIVED = "received"
    BACK = "back"
    """It goes on here."""
    END = "end"
    """It ends here: cancelled, failed, or out of time."""


STAGES = StateTable[Stage, StageEvent](
    "departure",
    {
        Stage.STOPPING: {
            StageEvent.LANDED: Stage.OFFERED,
            StageEvent.BACK: Stage.BACK,
            StageEvent.END: Stage.GONE,
        },
        Stage.OFFERED: {
            StageEvent.GRANT: Stage.SENDING,
            StageEvent.BACK: Stage.BACK,
            StageEvent.END: Stage.GONE,
        },
        Stage.SENDING: {
            StageEvent.SENT: Stage.SENT,
            StageEvent.BACK: Stage.BACK,
            StageEvent.END: Stage.GONE,
        },
        Stage.SENT: {
            StageEvent.RECEIVED: Stage.GONE,
            StageEvent.BACK: Stage.BACK,
            StageEvent.END: Stage.GONE,
        },
    },
)


@dataclass(eq=False)
class Departure:
    """One request on its way out."""

    request: Request
    room: RoomId
    peer: PeerRef
    stage: Stage = Stage.STOPPING
    paused_at: float = 0.0
    chain: list[bytes] = field(default_factory=list)
    """Keys of all pages of its committed positions."""
    ends: dict[str, int] = field(default_factory=dict)
    """Digests at its end, by pool: of the last page where it is partly filled, and of the state."""
    began: float = 0.0
    """When the first bytes went out."""
    bytes: int = 0

    def step(self, event: StageEvent) -> None:
        self.stage = STAGES.next(self.stage, event)
