"""The queue of starts: who of the workers that are due is started now, and what the others wait for.

- *Only so many at once.* A process that starts loads packages and a model, and a node that starts thirty at once has
  nothing left for those that serve. At most `NodeRoom.starts` workers start on a node; the others wait their turn.
- *Who served comes first.* A worker that has served and died goes before all that never did, starts of such don't hold
  it up, and nobody takes the memory or the place that it comes back to. So an overloaded cluster that has lost workers
  gets back what it had before it grows.
- *Only what fits.* Whoever was added has been checked, but a table may be older than that check, its nodes smaller than
  they were, or cards gone: who doesn't fit waits, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from twinpool.cluster.controller.controller_table import ControllerTable
from twinpool.cluster.controller.node_room import NOWHERE, ClusterRoom, NodeRoom, Occupant
from twinpool.cluster.controller.wanted_worker import WantedWorker
from twinpool.cluster.controller.worker_states import WorkerState

TURN = "its turn to start (cluster.starts_at_once)"


def occupant(row: WantedWorker) -> Occupant:
    """A worker as the room is asked about it; one that doesn't run may come back anywhere."""
    runs = row.serves or row.state is WorkerState.STARTING
    return Occupant(row.name, row.role, row.node if runs else NOWHERE, row.only, starts=not row.serves)


class StartQueue:
    """The workers of one table that are due, for one moment: make a new one for each."""

    def __init__(self, table: ControllerTable, now: float) -> None:
        self._table, self._room, self._now = table, table.room, now
        self._refused: dict[tuple[object, ...], tuple[str, bool]] = {}
        """What workers of a kind wait for, of which the first was looked at, and whether that is room."""
        self._by_name = any(node.cards is not None for node in self._room.nodes)

    def due(self) -> list[WantedWorker]:
        """The workers whose start is due, in the order in which they are to start."""
        due = [row for row in self._table.rows.values() if self._is_due(row)]
        return sorted(due, key=lambda row: (not row.waiting, not row.served))

    def why_not(self, row: WantedWorker) -> str:
        """What this worker's start has to wait for; empty where it can begin. In words that don't change with each
        moment."""
        if row.waiting or not self._room.nodes:  # Its process is there already.
            return ""
        kind = row.role, row.only, row.served, row.incarnation == 0, row.name if self._by_name else ""
        if kind not in self._refused:
            why, room = self._look(row)
            if not why:
                return ""
            self._refused[kind] = why, room
        why, row.lacks_room = self._refused[kind]
        return why

    def full(self, row: WantedWorker) -> tuple[str, ...]:
        """The nodes, by Ray id, that have neither memory nor cores for this worker: it must not be placed there.
        Whether Ray has a place is Ray's business."""
        if not self._room.nodes:
            return ()
        able = {node.node for node in self._nodes_for(row, _without_places(self._room))}
        return tuple(node.node.node_id for node in self._room.nodes if node.node.node_id and node.node not in able)

    def started(self) -> None:
        """Note that a start has begun, which changes what others wait for."""
        self._refused.clear()

    # ------------------------------------------------------------ inside

    def _is_due(self, row: WantedWorker) -> bool:
        return row.state is WorkerState.DEAD and row.wanted and self._now >= row.restart_at

    def _look(self, row: WantedWorker) -> tuple[str, bool]:
        if not row.served and (first := self._one_that_served(row)) is not None:
            return f"{first.name}, which served before and comes back first", False
        able = self._nodes_for(row, self._room)
        if not able and not self._room.grows:
            need = next((node.roles[row.role] for node in self._room.nodes if row.role in node.roles), None)
            size = f" (about {need.nbytes / 2**20:,.0f} MiB at most)" if need is not None else ""
            return f"room for a {row.role} worker on {row.only or 'a node'}{size}", True
        able = [node for node in able or self._room.nodes if not self._table.nodes.cordoned(node.node)]
        return (TURN if sum(node.starts for node in able) <= self._starting(row, able) else ""), False

    def _nodes_for(self, row: WantedWorker, room: ClusterRoom) -> list[NodeRoom]:
        """The nodes with room for a worker beside all that run, and beside those that served and come back."""
        there = [
            occupant(one)
            for one in self._table.rows.values()
            if one is not row
            and (
                one.serves
                or one.state is WorkerState.STARTING
                or one.waiting
                or (one.wanted and one.served and one.state is WorkerState.DEAD and not row.served)
            )
        ]
        if row.incarnation:  # Its memory was looked at before, and its arenas are kept.
            room = ClusterRoom(tuple(_without_free(node) for node in room.nodes), room.grows)
        return room.nodes_for(there, occupant(row))

    def _one_that_served(self, row: WantedWorker) -> WantedWorker | None:
        """A worker of the same role that served, and has yet to be placed: this one could take its place."""
        for one in self._table.rows.values():
            back = one.served and one.wanted and one.role is row.role and not (one.only or one.held)
            if back and (self._is_due(one) or (one.unplaced and one.incarnation > 1)):
                return one
        return None

    def _starting(self, row: WantedWorker, able: Sequence[NodeRoom]) -> int:
        """How many starts this one has to wait for, of those under way on the nodes that it could go to.

        One that has no node yet may be on any of them. One that Ray has no place for has no process; but where places
        are without number Ray is only slow, as on a machine that is overloaded, and more starts would make that worse.
        """
        slow = any(one.places is None for node in able for one in node.roles.values())
        return sum(
            (one.unplaced and (slow or not one.waits)) or any(node.is_at(one.node) for node in able)
            for one in self._table.rows.values()
            if one.state is WorkerState.STARTING and (one.served or not row.served)
        )


def _without_free(node: NodeRoom) -> NodeRoom:
    return replace(node, free=None)


def _without_places(room: ClusterRoom) -> ClusterRoom:
    def placed_anywhere(node: NodeRoom) -> NodeRoom:
        roles = {role: replace(one, places=None) for role, one in node.roles.items()}
        return replace(node, roles=roles)

    return ClusterRoom(tuple(placed_anywhere(node) for node in room.nodes), room.grows)
