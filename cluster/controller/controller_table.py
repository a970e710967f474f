"""The controller's table: a row for each worker, the nodes, and what is to be done about them.

The table is kept in a ledger, row by row, as it changes; a controller that is started again goes on from it. What only
heartbeats say is not kept: it comes again within a heartbeat.

The workers of the table that are due form a queue of starts (`StartQueue`):

- *Only so many at once.* A process that starts loads packages and a model, and a node that starts thirty at once has
  nothing left for those that serve. At most `NodeRoom.starts` workers start on a node; the others wait their turn.
- *Who served comes first.* A worker that has served and died goes before all that never did, starts of such don't hold
  it up, and nobody takes the memory or the place that it comes back to. So an overloaded cluster that has lost workers
  gets back what it had before it grows.
- *Those that share experts start together.* None of them can serve without the others (`prefill.dp`).
- *Only what fits.* Whoever was added has been checked, but a table may be older than that check, its nodes smaller than
  they were, or cards gone: who doesn't fit waits, and says so.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from twinpool.cluster.controller.controller_actions import ControllerAction, KillWorker, OperatorNote
from twinpool.cluster.controller.leadership import ControllerLedger, LedgerLost
from twinpool.cluster.controller.node_room import NOWHERE, ClusterRoom, NodePlace, NodeRoom, NodeTable, Occupant
from twinpool.cluster.controller.wanted_worker import (
    WantedWorker,
    WorkerEvent,
    WorkerState,
    advance,
    from_ledger,
    to_ledger,
)
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, Role, WorkerName, dp_rank
from twinpool.contracts.message_types import as_dict
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.worker_status import EndedWorker, WorkerView
from twinpool.contracts.outside_data import read_json
from twinpool.contracts.sampling_params import AdapterRef

log = logging.getLogger("twinpool.controller")

WORKER_KEY, CORDONS_KEY, AUTOSCALER_KEY, QUOTAS_KEY = "worker/", "cordoned", "autoscaler", "quotas"
ROOM_KEY, ADAPTERS_KEY, SERVED_KEY = "room", "adapters", "served"


class RowChange(NamedTuple):
    """A row that has changed."""

    view: WorkerView
    whole: bool
    """Whether more has changed than numbers of its status."""
    counters: bool
    """Whether its counters were said since."""


class ControllerTable:
    """The rows of all workers, in the order in which they were added."""

    def __init__(self, clock: Clock, config: ClusterConfig, ledger: ControllerLedger) -> None:
        """Begin with a ledger, and take up what it holds. Raises `ConfigError` for one that can't be read."""
        self.clock, self.config = clock, config
        self._ledger = ledger
        self.rows: dict[WorkerName, WantedWorker] = {}
        self.actions: list[ControllerAction] = []
        """What the supervisor is to do, in order."""
        self.ended: tuple[EndedWorker, ...] = ()
        """The latest incarnation of each worker that has ended: each grant says it."""
        self.version = 1
        self.failed = ""
        """Why the ledger can't be written any more; empty while it can. A controller whose ledger has failed must end:
        its table may be ahead of what its successor will read."""
        self._listeners: list[Callable[[], None]] = []
        self._note_listeners: list[Callable[[str], None]] = []
        self._row_listeners: list[Callable[[WantedWorker], None]] = []
        kept = ledger.begin()
        self.autoscaler = kept.get(AUTOSCALER_KEY, "")
        """What an earlier controller's autoscaler has kept (`cluster.controller.autoscaler`); empty where it kept
        nothing."""
        self.quotas = kept.get(QUOTAS_KEY, "")
        """What an earlier controller has kept of tenants' quotas (`cluster.controller.quota_ledger`)."""
        try:
            self.nodes = NodeTable(read_json(kept.get(CORDONS_KEY, "[]")))
            self.room = ClusterRoom.from_json(kept[ROOM_KEY]) if ROOM_KEY in kept else ClusterRoom()
            """What nodes have for workers, as the supervisor told last."""
            self.adapters = {one.name: one for one in _adapters(kept.get(ADAPTERS_KEY, "[]"))}
            """The adapters that are served, by name."""
            self.adapters_at = self.version
            """The table's version when they changed."""
            self.served = msgspec.convert(read_json(kept.get(SERVED_KEY, "[]")), ServedWeights)
            """The weights that the cluster serves, and whether it does."""
            for key, text in kept.items():
                if key.startswith(WORKER_KEY):
                    self._take_up(from_ledger(WorkerName(key.removeprefix(WORKER_KEY)), text, config))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the ledger holds a table that this version can't read: {error!r}") from None

    def _take_up(self, row: WantedWorker) -> None:
        """Enter a row of an earlier controller. Whoever had a lease has one now, as long as any that was granted."""
        now = self.clock.now()
        allowed = self.config.start_timeout_s if row.state is WorkerState.STARTING else self.config.lease_s
        row.deadline, row.restart_at, row.started_at = now + allowed, now, now
        row.ready_since = now if row.serves else None
        self.rows[row.name] = row
        lives = row.serves or row.state is WorkerState.STARTING
        if last := row.incarnation - lives:
            self.ended = (*self.ended, EndedWorker(row.name, Incarnation(last)))

    # ------------------------------------------------------------ changes

    def save(self, row: WantedWorker) -> None:
        """Store a row. Raises `OSError` and `LedgerLost`; `failed` says why from then on."""
        self._put(WORKER_KEY + row.name, to_ledger(row))

    def saved(self, row: WantedWorker) -> None:
        """Store a row that has changed, and have it published."""
        self.save(row)
        self.changed(row)

    def save_cordons(self) -> None:
        self._put(CORDONS_KEY, json.dumps(sorted(self.nodes.names)))
        self.changed()

    def save_adapters(self, adapters: Mapping[str, AdapterRef]) -> None:
        """Store the adapters that are served from now on, and have them published. Raises as `save` does."""
        self._put(ADAPTERS_KEY, json.dumps([as_dict(one) for one in adapters.values()]))
        self.adapters = dict(adapters)
        self.changed()
        self.adapters_at = self.version

    def save_served(self, served: ServedWeights) -> None:
        """Store what the cluster serves from now on, and have it published. Raises as `save` does."""
        self._put(SERVED_KEY, json.dumps(msgspec.to_builtins(served)))
        self.served = served
        self.changed()

    def set_room(self, room: ClusterRoom) -> None:
        """Take in what nodes have for workers, and store it where it has changed. Raises as `save` does."""
        before, self.room = self.room, room
        if (kept := room.to_json()) != before.to_json():
            self._put(ROOM_KEY, kept)

    def save_autoscaler(self, kept: str) -> None:
        """Store what the autoscaler of the next controller is to know. Raises as `save` does."""
        if kept != self.autoscaler:
            self._put(AUTOSCALER_KEY, kept)
            self.autoscaler = kept

    def save_quotas(self, kept: str) -> None:
        """Store what the next controller is to know of tenants' quotas. Raises as `save` does."""
        self._put(QUOTAS_KEY, kept)

    def _put(self, key: str, value: str) -> None:
        try:
            self._ledger.put(key, value)
        except (OSError, LedgerLost) as error:
            self.failed = self.failed or str(error)
            raise

    def changed(self, *rows: WantedWorker) -> None:
        """Have rows published; all of them where none is named."""
        self.version += 1
        for row in rows or self.rows.values():
            row.changed_at = self.version
        for row in rows:
            for listener in self._row_listeners:
                listener(row)
        self._tell()

    def numbers_changed(self, row: WantedWorker, *, counters: bool) -> None:
        """Have the numbers of a row's status published, and its counters where they were said."""
        self.version += 1
        row.numbers_at = self.version
        if counters:
            row.counters_at, row.counters_said = self.version, self.clock.now()
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the table, on the caller's thread."""
        self._listeners.append(listener)

    def on_row(self, listener: Callable[[WantedWorker], None]) -> None:
        """Call `listener` with each row of which more than numbers has changed, on the caller's thread."""
        self._row_listeners.append(listener)

    def act(self, *actions: ControllerAction) -> None:
        self.actions += actions

    def note(self, text: str) -> None:
        """Tell the operator a line."""
        log.warning(text)
        self.act(OperatorNote(text))
        for listener in self._note_listeners:
            listener(text)

    def on_note(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with each line that the operator is told, on the caller's thread."""
        self._note_listeners.append(listener)

    def note_end(self, row: WantedWorker, *, closed: bool = False) -> None:
        """Have grants say that a worker's incarnation has ended; the one before its first never was. `closed`: by its
        own word, in a process that may live on."""
        if row.incarnation:
            others = (ended for ended in self.ended if ended.name != row.name)
            closed_from = row.process_since if closed else NO_INCARNATION
            self.ended = (*others, EndedWorker(row.name, row.incarnation, closed_from))

    def end_start(self, row: WantedWorker, why: str) -> bool:
        """End a start that is under way; returns whether there was one. It has served no request, so this counts as no
        death."""
        if row.state is not WorkerState.STARTING:
            return False
        self.act(killing(row))
        self.note(f"{row.name} is started anew: {why}" if row.wanted else f"{row.name} isn't started: {why}")
        row.state = advance(row.state, WorkerEvent.DIED)
        row.status, row.restart_at = row.own_status(), self.clock.now()
        self.note_end(row)
        self.saved(row)
        return True

    # ------------------------------------------------------------ questions

    def changes(self, since: int) -> list[RowChange]:
        """What has changed after the table's version `since`, a row each."""
        found = []
        for row in self.rows.values():
            whole = row.changed_at > since
            if whole or row.numbers_at > since:
                view = row.view(self.cordoned(row)) if whole else row.view(cordoned=False)
                found.append(RowChange(view, whole, row.counters_at > since))
        return found

    def views(self) -> tuple[WorkerView, ...]:
        """The whole table, one row a worker, including workers that have left or are dead."""
        return tuple(row.view(self.cordoned(row)) for row in self.rows.values())

    def cordoned(self, row: WantedWorker) -> bool:
        """Whether a node that this worker has a process on takes no workers."""
        return any(self.nodes.cordoned(node) for node in row.nodes)

    def every_node(self) -> set[NodePlace]:
        """All known nodes: nodes that take workers, and nodes that workers are or were on."""
        return {*self.nodes.places, *(node for row in self.rows.values() for node in row.nodes if node.host)}

    def is_node(self, name: str) -> bool:
        return name in self.nodes.names or any(node.named(name) for node in self.every_node())

    def on_node(self, name: str) -> Iterable[WantedWorker]:
        """The workers that have a process on a node."""
        return [row for row in self.rows.values() if any(node.named(name) for node in row.nodes)]

    def sharers(self, name: WorkerName, role: Role) -> tuple[WorkerName, ...]:
        """The workers that share their experts with this one, itself among them."""
        size = self.room.together(role)
        if size == 1:
            return (name,)
        group, kind = dp_rank(name, size)[0], name.rpartition("-")[0]
        return tuple(WorkerName(f"{kind}-{group * size + rank}") for rank in range(size))

    def other_sharers(self, row: WantedWorker) -> list[WantedWorker]:
        """The rows of the workers that share their experts with this one."""
        names = self.sharers(row.name, row.role)
        return [one for name in names if name != row.name and (one := self.rows.get(name)) is not None]

    def known_nodes(self) -> str:
        return ", ".join(sorted({node.host for node in self.every_node()})) or "none"


def _adapters(text: str) -> list[AdapterRef]:
    """The adapters of a ledger. Raises `ValueError` for what aren't any."""
    return [AdapterRef(str(one["name"]), str(one["digest"]), str(one["path"])) for one in read_json(text)]


def killing(row: WantedWorker) -> KillWorker:
    record = row.record
    return KillWorker(row.name, row.incarnation, record.pid if record else 0, record.node if record else "")


def keep_together(table: ControllerTable) -> None:
    """Have workers that share their experts start together, and leave together where one leaves to come back: alone it
    would wait for the others for as long as it may."""
    if all(table.room.together(role) == 1 for role in Role):
        return
    for row in list(table.rows.values()):
        others = table.other_sharers(row)
        if row.state is WorkerState.STARTING:
            missing = [one.name for one in others if one.state in (WorkerState.DEAD, WorkerState.LEFT)]
            if missing:
                table.end_start(row, f"{missing[0]}, with which it shares its experts, has to start with it")
        elif row.state is WorkerState.READY and not row.drains:
            changing = [one for one in others if one.serves and one.leaves and one.becomes is not None]
            if changing:
                row.becomes, row.drains, row.changes = row.role, True, changing[0].changes
                table.saved(row)


TURN = "its turn to start (cluster.starts_at_once)"


def occupant(row: WantedWorker) -> Occupant:
    """A worker as the room is asked about it; one that doesn't run may come back anywhere."""
    runs = row.serves or row.state is WorkerState.STARTING
    node, others = (row.node, row.others) if runs else (NOWHERE, ())
    return Occupant(row.name, row.role, node, row.only, starts=not row.serves, others=others)


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
        others = {name: self._table.rows.get(name) for name in self._table.sharers(row.name, row.role)}
        if any(one is not None and self._starts_now(one) for one in others.values()):
            return ""  # They have their turn together.
        if lacking := [name for name, one in others.items() if one is None or not self._is_due(one)]:
            return f"{lacking[0]}, with which it shares its experts"
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
        awake = not self._table.served.asleep
        return awake and row.state is WorkerState.DEAD and row.wanted and self._now >= row.restart_at

    def _starts_now(self, row: WantedWorker) -> bool:
        return row.state is WorkerState.STARTING and row.started_at == self._now

    def _look(self, row: WantedWorker) -> tuple[str, bool]:
        if not row.served and (first := self._one_that_served(row)) is not None:
            return f"{first.name}, which served before and comes back first", False
        able = self._nodes_for(row, self._room)
        if not able and not self._room.grows:
            need = next((node.roles[row.role] for node in self._room.nodes if row.role in node.roles), None)
            count = self._room.together(row.role)
            size = f" (about {count * need.nbytes / 2**20:,.0f} MiB at most)" if need is not None else ""
            who = f"a {row.role} worker" if count == 1 else f"{count} {row.role} workers that share their experts"
            return f"room for {who} on {row.only or 'a node'}{size}", True
        able = [node for node in able or self._room.nodes if not self._table.nodes.cordoned(node.node)]
        return (TURN if sum(node.starts for node in able) <= self._starting(row, able) else ""), False

    def _nodes_for(self, row: WantedWorker, room: ClusterRoom) -> list[NodeRoom]:
        """The nodes with room for a worker, and for those that start in its turn, beside all that run, and beside those
        that served and come back."""
        group = [self._table.rows.get(name) for name in self._table.sharers(row.name, row.role)]
        together = [row, *(one for one in group if one is not None and one is not row and self._is_due(one))]
        names = {one.name for one in together}
        there = [
            occupant(one)
            for one in self._table.rows.values()
            if one.name not in names
            and (
                one.serves
                or one.state is WorkerState.STARTING
                or one.waiting
                or (one.wanted and one.served and one.state is WorkerState.DEAD and not row.served)
            )
        ]
        if row.incarnation:  # Its memory was looked at before, and its arenas are kept.
            room = ClusterRoom(tuple(_without_free(node) for node in room.nodes), room.grows)
        return room.nodes_for(there, [occupant(one) for one in together])

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
