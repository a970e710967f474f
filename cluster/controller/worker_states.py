"""The state table of a worker in the controller.

docs/states.md draws it. Rules:

- A worker has one incarnation at a time; each `STARTED` has a larger number, and messages of older ones are dropped.
- A worker that left by drain is not started again unless an operator wants it back (undrain).
- A worker may leave straight from `ready`: drain and departure can fall between two heartbeats.
- An event that is not in the table raises `IllegalTransition` and changes nothing.
"""

from __future__ import annotations

from enum import StrEnum

from twinpool.contracts.errors import IllegalTransition


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LEFT = "left"
    DEAD = "dead"


class WorkerEvent(StrEnum):
    STARTED = "started"
    REGISTERED = "registered"
    DRAINING = "draining"
    UNDRAINED = "undrained"
    LEFT = "left"
    CHANGED = "changed"
    """The worker has left, to start again in another role."""
    DIED = "died"
    WANTED = "wanted"
    """An operator wants a worker back that had left."""
    UNWANTED = "unwanted"
    """Nobody has use for a worker any more that doesn't run."""


TRANSITIONS: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (WorkerState.DEAD, WorkerEvent.STARTED): WorkerState.STARTING,
    (WorkerState.STARTING, WorkerEvent.REGISTERED): WorkerState.READY,
    (WorkerState.STARTING, WorkerEvent.DIED): WorkerState.DEAD,
    (WorkerState.READY, WorkerEvent.DRAINING): WorkerState.DRAINING,
    (WorkerState.READY, WorkerEvent.LEFT): WorkerState.LEFT,
    (WorkerState.READY, WorkerEvent.DIED): WorkerState.DEAD,
    (WorkerState.DRAINING, WorkerEvent.UNDRAINED): WorkerState.READY,
    (WorkerState.DRAINING, WorkerEvent.LEFT): WorkerState.LEFT,
    (WorkerState.DRAINING, WorkerEvent.DIED): WorkerState.DEAD,
    (WorkerState.READY, WorkerEvent.CHANGED): WorkerState.DEAD,
    (WorkerState.DRAINING, WorkerEvent.CHANGED): WorkerState.DEAD,
    (WorkerState.LEFT, WorkerEvent.WANTED): WorkerState.DEAD,
    (WorkerState.DEAD, WorkerEvent.UNWANTED): WorkerState.LEFT,
}


def advance(state: WorkerState, event: WorkerEvent) -> WorkerState:
    """The state after `event`. Raises `IllegalTransition` when the table has no such transition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a worker that is {state} can't have {event}") from None
