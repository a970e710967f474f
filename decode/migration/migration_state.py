"""A request on its way to another worker: its states at the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.contracts.state_table import StateTable
from twinpool.decode.request.request import DecodeRequest


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
    """The migration of one request to another worker, at the source."""

    request: DecodeRequest
    room: RoomId
    peer: PeerRef
    stage: MigrationStage = MigrationStage.STOPPING
    paused_at: float = 0.0
    """When its stream stopped, in seconds of the clock."""
    chain: list[bytes] = field(default_factory=list)
    """Block hashes of all pages of its committed positions."""
    ends: dict[str, int] = field(default_factory=dict)
    """Digests at its end, by pool: of the last page where it is partly filled, and of the state."""
    began: float = 0.0
    """When it was granted and the first bytes went out, in seconds of the clock."""
    bytes: int = 0
    """Bytes of state posted so far."""

    def step(self, event: MigrationStageEvent) -> None:
        self.stage = STAGES.next(self.stage, event)
