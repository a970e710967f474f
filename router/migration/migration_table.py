"""One migration as the router drives it: its states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from contracts.ids import RoomId
from contracts.state_table import StateTable
from router.state.worker_table import WorkerKey

AVOID_S, DOUBLINGS = 5.0, 4
"""How long a worker that could not take a request isn't asked to take it again: twice as long with each try."""


class MigrationState(StrEnum):
    AHEAD = "ahead"
    ASKED = "asked"
    OFFERED = "offered"
    GIVEN = "given"
    MOVED = "moved"
    STAYED = "stayed"


class MigrationEvent(StrEnum):
    COPIED = "copied"
    """As much as can be was copied ahead, or it isn't worth it."""
    PAUSED = "paused"
    GIVEN = "given"
    SPOKE = "spoke"
    """The target did."""
    BACK = "back"
    END = "end"
    """The request ended or is replayed."""


MIGRATION = StateTable[MigrationState, MigrationEvent](
    "migration",
    {
        MigrationState.AHEAD: {
            MigrationEvent.COPIED: MigrationState.ASKED,
            MigrationEvent.BACK: MigrationState.STAYED,
            MigrationEvent.END: MigrationState.STAYED,
        },
        MigrationState.ASKED: {
            MigrationEvent.PAUSED: MigrationState.OFFERED,
            MigrationEvent.BACK: MigrationState.STAYED,
            MigrationEvent.END: MigrationState.STAYED,
        },
        MigrationState.OFFERED: {
            MigrationEvent.GIVEN: MigrationState.GIVEN,
            MigrationEvent.SPOKE: MigrationState.MOVED,
            MigrationEvent.BACK: MigrationState.STAYED,
            MigrationEvent.END: MigrationState.STAYED,
        },
        MigrationState.GIVEN: {
            MigrationEvent.SPOKE: MigrationState.MOVED,
            MigrationEvent.END: MigrationState.STAYED,
        },
    },
)


@dataclass(eq=False, slots=True)
class Migration:
    """One request on its way. Times are seconds of the router core's clock."""

    source: WorkerKey
    target: WorkerKey
    attempt: int
    """As which the target knows it."""
    room: RoomId
    ahead: RoomId
    """For what is copied ahead."""
    heard: float
    state: MigrationState = MigrationState.AHEAD
    paused_at: float = 0.0

    def step(self, event: MigrationEvent, now: float) -> None:
        self.state, self.heard = MIGRATION.next(self.state, event), now


@dataclass(slots=True)
class DrainWish:
    """A worker's wish to be rid of a request."""

    worker: WorkerKey
    started: bool
    tries: int = 0
    avoid: dict[WorkerKey, float] = field(default_factory=dict)
    """Who could not take it, and when to ask again. A replay may well go there: it can wait."""

    def refused(self, target: WorkerKey, now: float) -> None:
        self.tries += 1
        self.avoid[target] = now + AVOID_S * 2 ** min(self.tries - 1, DOUBLINGS)


@dataclass(slots=True)
class MigrationCounts:
    """What happened since the start; read by the metrics."""

    begun: int = 0
    moved: int = 0
    stayed: int = 0
    restarted: int = 0
    """Requests that had not begun at a draining worker, or that it was to leave at once, and began elsewhere."""
    moved_bytes: int = 0
    paused_s: float = 0.0
    """Of all that moved, from their pause until the other worker had everything."""
    longest_pause_s: float = 0.0
