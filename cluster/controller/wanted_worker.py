"""A worker's states and row of the controller's table, and how the row is kept in the ledger.

docs/states.md draws it. Rules:

- A worker has one incarnation at a time; each `STARTED` has a larger number, and messages of older ones are dropped.
- A worker that left by drain is not started again unless an operator wants it back (undrain).
- A worker may leave straight from `ready`: drain and departure can fall between two heartbeats.
- An event that is not in the table raises `IllegalTransition` and changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from twinpool.cluster.controller.node_room import NOWHERE, NodePlace
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import IllegalTransition
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.outside_data import read_json


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


@dataclass(slots=True)
class WantedWorker:
    """A worker's row; it stays when the worker has left or is left dead."""

    name: WorkerName
    role: Role
    incarnation: Incarnation
    restarts: RestartHistory
    state: WorkerState = WorkerState.DEAD
    wanted: bool = True
    """Whether the worker is to run: false once it has left, or is left dead."""
    record: WorkerRecord | None = None
    status: WorkerStatus | None = None
    deadline: float = 0.0
    """When the lease, or the time to register, ends, in seconds of the clock."""
    ready_since: float | None = None
    restart_at: float = 0.0
    node: NodePlace = NOWHERE
    """The node that its process is or was on; empty from a start until its node is known."""
    only: str = ""
    """The one node that it is to run on, by host name or Ray node id; empty: any."""
    avoids: tuple[str, ...] = ()
    """Nodes that were cordoned at its start."""
    ever_ready: bool = False
    drains: bool = False
    """Whether the next grants tell the worker to drain; ends when its status says that it drains."""
    becomes: Role | None = None
    """The role of its next start, which follows when it has left; None: it isn't started again then."""
    last_reason: str = ""
    waits: str = ""
    """What its start has waited for; empty where it doesn't wait, or hasn't for long."""
    started_at: float = 0.0
    """When its start began, in seconds of the clock."""
    held: bool = False
    """Whether its start is due and waits, because every node is cordoned."""
    lacks_room: bool = False
    """Whether its start is due and waits, because no node has room for it."""
    served_as: Role | None = None
    """The role in which it was ready last; None where it never was."""
    changed_at: int = 0
    """The table's version at the latest change of anything but numbers of its status."""
    numbers_at: int = 0
    """The table's version at the latest change of its status."""
    counters_at: int = 0
    """The table's version when its counters were last said."""
    counters_said: float = 0.0
    """When they were, in seconds of the clock."""
    waiting: Incarnation = NO_INCARNATION
    """The incarnation whose process waits to go on as the next one, which is due; 0: none does."""
    process_since: Incarnation = NO_INCARNATION
    """The first incarnation that its process has been."""
    changes: bool = False
    """Whether it drains to change its weights, or to sleep: routers send it nothing new from the moment it is told."""
    others: tuple[NodePlace, ...] = ()
    """The nodes of its ranks from 1 on, where some are or were on other nodes."""

    @property
    def nodes(self) -> tuple[NodePlace, ...]:
        """Each node that it has or had a process on, its own first."""
        return tuple(dict.fromkeys((self.node, *self.others)))

    @property
    def serves(self) -> bool:
        """Whether an incarnation has a lease."""
        return self.state in (WorkerState.READY, WorkerState.DRAINING)

    @property
    def served(self) -> bool:
        """Whether it has been ready in its role: then what it had there is its own before any that never was."""
        return self.served_as is self.role

    @property
    def leaves(self) -> bool:
        """Whether it is told to drain, or drains."""
        return self.drains or self.state is WorkerState.DRAINING

    @property
    def stays(self) -> bool:
        """Whether the worker is to go on, or to come back."""
        return self.wanted and (not self.leaves or self.becomes is not None)

    @property
    def unplaced(self) -> bool:
        """Whether it is starting and has no node yet."""
        return self.state is WorkerState.STARTING and not self.node.host

    @property
    def waits_for_place(self) -> bool:
        """Whether it could start and no node has a place or room for it."""
        dead = self.state is WorkerState.DEAD
        return (self.lacks_room and dead and bool(self.waits)) or (self.unplaced and bool(self.waits))

    @property
    def waits_its_turn(self) -> bool:
        """Whether it has yet to start and will once others have."""
        return self.state is WorkerState.DEAD and self.wanted and bool(self.waits) and not self.lacks_room

    def own_status(self) -> WorkerStatus:
        """A status made by the controller itself, for a worker that has sent none yet or whose last one is outdated.
        One that has never run and waits to start isn't shown as dead: nothing has died."""
        pid = self.record.pid if self.record else 0
        waits = self.wanted and bool(self.waits) and not self.incarnation
        return WorkerStatus(
            self.name,
            self.role,
            WorkerState.STARTING if waits else self.state,
            pid,
            self.node.host,
            self.incarnation,
            0,
            0,
            0,
            0,
            last_end=self.last_reason,
            waits=self.waits,
        )

    def view(self, cordoned: bool) -> WorkerView:
        """The row as routers see it: under the incarnation that its status is of."""
        record, status = self.record or self._empty_record(), self.status or self.own_status()
        if self.changes and status.state == WorkerState.READY:
            status = replace(status, state=WorkerState.DRAINING)
        return WorkerView(replace(record, incarnation=status.incarnation or record.incarnation), status, cordoned)

    def _empty_record(self) -> WorkerRecord:
        node, none = self.node, WorkerLimits(0, 0)
        return WorkerRecord(self.name, self.role, self.incarnation, 0, node.host, "", "", none, node.node_id)


def to_ledger(row: WantedWorker) -> str:
    """A row as JSON: all that outlives a controller. What heartbeats say, and the history of deaths, does not."""
    kept: dict[str, Any] = {
        "role": row.role,
        "incarnation": row.incarnation,
        "state": row.state,
        "wanted": row.wanted,
        "node": [row.node.node_id, row.node.host],
        "others": [[node.node_id, node.host] for node in row.others],
        "only": row.only,
        "ever_ready": row.ever_ready,
        "drains": row.drains,
        "becomes": row.becomes,
        "last_reason": row.last_reason,
        "record": msgspec.to_builtins(row.record),
    }
    return json.dumps(kept)


def from_ledger(name: WorkerName, text: str, config: ClusterConfig) -> WantedWorker:
    """Read a row back. Raises `ValueError`, `KeyError` or `TypeError` where it can't be read."""
    kept = read_json(text)
    return WantedWorker(
        name=name,
        role=Role(kept["role"]),
        incarnation=Incarnation(int(kept["incarnation"])),
        restarts=RestartHistory(config),
        state=WorkerState(kept["state"]),
        wanted=bool(kept["wanted"]),
        record=msgspec.convert(kept["record"], WorkerRecord | None),
        node=NodePlace(*kept["node"]),
        others=tuple(NodePlace(*node) for node in kept.get("others", ())),
        only=kept["only"],
        ever_ready=bool(kept["ever_ready"]),
        drains=bool(kept["drains"]),
        served_as=Role(kept["role"]) if kept["ever_ready"] else None,
        process_since=Incarnation(int(kept["incarnation"])),
        becomes=Role(kept["becomes"]) if kept["becomes"] is not None else None,
        last_reason=kept["last_reason"],
    )
