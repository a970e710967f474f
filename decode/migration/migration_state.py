"""A request on its way to another worker: its states at the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from contracts.ids import RoomId
from contracts.messages.router_commands import PeerRef
from contracts.state_table import StateTable
from decode.request.request import DecodeRequest


class MigrationStage(StrEnum):
    STOPPING = "stopping"
    OFFERED = "offered"
    SENDING = "sending"
    SENT = "sent"
    GONE = "gone"
    BACK = "back"


class MigrationStageEvent(StrEnum):
    LANDED = "landed"
    """Its last launched step is committed."""
    GRANT = "grant"
    SENT = "sent"
    RECEIVED = "received"
    BACK = "back"
    """It goes on here."""
    END = "end"
    """It ends here: cancelled, failed, or out of time."""


STAGES = StateTable[MigrationStage, MigrationStageEvent](
    "outgoing migration",
    {
        MigrationStage.STOPPING: {
            MigrationStageEvent.LANDED: MigrationStage.OFFERED,
            MigrationStageEvent.BACK: MigrationStage.BACK,
            MigrationStageEvent.END: MigrationStage.GONE,
        },
        MigrationStage.OFFERED: {
            MigrationStageEvent.GRANT: MigrationStage.SENDING,
            MigrationStageEvent.BACK: MigrationStage.BACK,
            MigrationStageEvent.END: MigrationStage.GONE,
        },
        MigrationStage.SENDING: {
            MigrationStageEvent.SENT: MigrationStage.SENT,
            MigrationStageEvent.BACK: MigrationStage.BACK,
            MigrationStageEvent.END: MigrationStage.GONE,
        },
        MigrationStage.SENT: {
            MigrationStageEvent.RECEIVED: MigrationStage.GONE,
            MigrationStageEvent.BACK: MigrationStage.BACK,
            MigrationStageEvent.END: MigrationStage.GONE,
        },
    },
)


@dataclass(eq=False)
class OutgoingMigration:
    """One request on its way out."""

    request: DecodeRequest
    room: RoomId
    peer: PeerRef
    stage: MigrationStage = MigrationStage.STOPPING
    paused_at: float = 0.0
    chain: list[bytes] = field(default_factory=list)
    """Keys of all pages of its committed positions."""
    ends: dict[str, int] = field(default_factory=dict)
    """Digests at its end, by pool: of the last page where it is partly filled, and of the state."""
    began: float = 0.0
    """When the first bytes went out."""
    bytes: int = 0

    def step(self, event: MigrationStageEvent) -> None:
        self.stage = STAGES.next(self.stage, event)
