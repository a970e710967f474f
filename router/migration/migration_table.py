"""The migration of one request from a decode worker to another: its states, as the router drives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from twinpool.contracts.ids import RoomId
from twinpool.contracts.state_table import StateTable
from twinpool.router.state.worker_table import WorkerKey

AVOID_S, DOUBLINGS = 5.0, 4
"""Seconds for which a worker that could not take a request isn't chosen for its migration again. They double with each
try, `DOUBLINGS` times at most."""


class MigrationState(StrEnum):
    AHEAD = "ahead"
    """Finished pages are copied to the target while the request runs on."""
    ASKED = "asked"
    """The source was told to pause the request."""
    OFFERED = "offered"
    """The request is paused, and was submitted to the target, which receives the rest of its state."""
    GIVEN = "given"
    """The source says that the target has all of its state."""
    MIGRATED = "migrated"
    """The target goes on with the request."""
    STAYED = "stayed"
    """The source goes on with the request, or the request has ended."""


class MigrationEvent(StrEnum):
    COPIED = "copied"
    """The copying of pages ahead has ended, or none are worth it."""
    PAUSED = "paused"
    """The source has paused the request."""
    GIVEN = "given"
    """The source has handed over all of its state."""
    SPOKE = "spoke"
    """The target sent its first event of the request."""
    BACK = "back"
    """The migration failed, and the source still has the request."""
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
            MigrationEvent.SPOKE: MigrationState.MIGRATED,
            MigrationEvent.BACK: MigrationState.STAYED,
            MigrationEvent.END: MigrationState.STAYED,
        },
        MigrationState.GIVEN: {
            MigrationEvent.SPOKE: MigrationState.MIGRATED,
            MigrationEvent.END: MigrationState.STAYED,
        },
    },
)


@dataclass(eq=False, slots=True)
class Migration:
    """One migration under way. Times are seconds of the router core's clock."""

    source: WorkerKey
    target: WorkerKey
    attempt: int
    """The number of the request's attempt at the target."""
    room: RoomId
    """The room in which the target receives the state of the paused request."""
    ahead: RoomId
    """The room in which the target receives the pages that are copied ahead."""
    heard: float
    """When the migration last got on."""
    state: MigrationState = MigrationState.AHEAD
    paused_at: float = 0.0

    def step(self, event: MigrationEvent, now: float) -> None:
        self.state, self.heard = MIGRATION.next(self.state, event), now


@dataclass(slots=True)
class DrainWish:
    """A draining worker's wish that another worker goes on with a request."""

    worker: WorkerKey
    started: bool
    """Whether the worker has begun to decode the request; a request that hasn't begun starts over elsewhere."""
    tries: int = 0
    avoid: dict[WorkerKey, float] = field(default_factory=dict)
    """Workers that could not take the request, each with the time until which it isn't chosen as a target. A replay may
    well go there, as it can wait in the worker's queue."""

    def refused(self, target: WorkerKey, now: float) -> None:
        """Avoid a target to which a migration has failed, for longer with each try."""
        self.tries += 1
        self.avoid[target] = now + AVOID_S * 2 ** min(self.tries - 1, DOUBLINGS)


@dataclass(slots=True)
class MigrationCounts:
    """Counters of migrations since the router's start; read by the metrics."""

    begun: int = 0
    migrated: int = 0
    stayed: int = 0
    restarted: int = 0
    """Requests that began elsewhere: not yet begun at a draining worker, or taken off it at once (`fail_over`)."""
    migrated_bytes: int = 0
    paused_s: float = 0.0
    """Seconds that the migrated requests stood still, in all: from each pause until the target's first event."""
    longest_pause_s: float = 0.0
