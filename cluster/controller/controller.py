"""The controller: the one authority on which incarnation of which worker may act.

The logic alone, without I/O. Messages and the passing of time go in, actions come out; the clock is injected, so
leases, fencing and restarts are tested in microseconds.

Guarantees:

- *Incarnations* grow with every start of a name, also across restarts of the controller: a number is written to the
  ledger before it is handed out.
- A controller that is started again goes on from its ledger: whoever had a lease has one, and whatever was wanted still
  is. Workers and routers come back to it and notice nothing, if it was away for less than
  `lease_keeper.longest_absence_s`.
- A *lease* ends `lease_s` after the controller last heard from the worker. The worker counts from when it sent that
  message, which is earlier, and takes a margin; so by the time the controller declares the worker dead and starts the
  next incarnation, the old one has already stopped sending.
- A worker that renews but makes no progress (`cluster.worker_process.worker_thread`) loses its lease as if it had not
  renewed, and is killed and started again.
- A worker that is known to have died (its process is gone) is restarted at once; a worker that dies again soon after
  its start waits longer each time; a worker that dies more than `restart_limit` times in `restart_window_s` is left
  dead (`cluster.processes.restart_policy`).
- A worker that left by drain, or died while it was draining or had only been told to, is not started again until an
  operator wants it back (`undrain`). A worker that was told to change its role is started in the new role, whether it
  left or died; one that left and says that it has closed keeps its process, which goes on by the plan of that start.
- Workers that share their experts start together, and come back together: what ends the start of one ends that of the
  others, and where one is told to leave for a while, so are they.
- No worker is started that no node has room for, only so many start at once, and who served before comes first
  (`cluster.controller.node_room`).
- A node that is *cordoned* gets no worker until it is uncordoned: a worker that is only starting there is started
  elsewhere, or waits while no other node can take it.
- Nothing is started while no supervisor is there to start it (`attach`, `detach`). One that comes says which processes
  it has: those that should not be there are killed, and a start that it knows nothing of begins anew.
- Each grant names the latest incarnation of each worker that has ended: what other workers hold for it can come back,
  where its access is really ended (`docs/decisions/0045-fencing.md`).
- A controller that stood still itself has heard no heartbeat, and ends no lease for that (`stood_still`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable

from msgspec import structs

from twinpool.cluster.controller.controller_actions import (
    ControllerAction,
    EndedProcess,
    ForgetArenas,
    KillWorker,
    StartFailed,
    StartWorker,
    WorkerKey,
)
from twinpool.cluster.controller.controller_table import ControllerTable, RowChange, StartQueue, keep_together, killing
from twinpool.cluster.controller.leadership import ControllerLedger
from twinpool.cluster.controller.node_room import NOWHERE, ClusterRoom, NodePlace
from twinpool.cluster.controller.pool_operations import PoolOperations
from twinpool.cluster.controller.wanted_worker import WantedWorker, WorkerEvent, WorkerState, advance
from twinpool.cluster.controller.weights_changes import WeightsChanges
from twinpool.cluster.worker_process.lease_keeper import renewal_pause_s
from twinpool.cluster.worker_process.worker_thread import why_stalled
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, WorkerName
from twinpool.contracts.messages.leases import LeaseGrant
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerStatus, WorkerView

PLACE_S = 10.0
"""Seconds from its start after which a worker without a node counts as waiting for one."""


class Controller:
    """Grants incarnations as leases and decides restarts. Not thread-safe: one loop owns it.

    It has more than twenty methods: most are one for each message of workers and of the supervisor, and the others
    change the one table of workers accordingly. What operators ask for is done by `pools`.
    """

    def __init__(
        self,
        clock: Clock,
        config: ClusterConfig,
        ledger: ControllerLedger,
        *,
        supervised: bool = True,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`supervised`: whether somebody carries out its actions from the beginning. `wall`: seconds since 1970. Raises
        `ConfigError` for a ledger that can't be read."""
        self._clock = clock
        self._config = config
        self.table = ControllerTable(clock, config, ledger)
        self.weights = WeightsChanges(self.table, wall)
        self.pools = PoolOperations(self.table, self.weights)
        self._supervised = supervised
        self.late_messages = 0
        """Messages of incarnations that had already ended; dropped."""
        self.deaths = 0
        """Workers that have died, since this controller's start."""
        self.shutting_down = False

    @property
    def can_start(self) -> bool:
        """Whether somebody carries out starts, and the cluster doesn't end."""
        return self._supervised and not self.shutting_down

    @property
    def version(self) -> int:
        """The number of the table's latest change."""
        return self.table.version

    # ------------------------------------------------------------ messages of the supervisor

    def attach(self, running: Iterable[WorkerKey], ended: Iterable[EndedProcess] = ()) -> None:
        """Take up a supervisor that has come, with the processes that it has and those that it knows to have ended.

        A worker with a lease whose process it doesn't have is left its lease: it may live where the supervisor can't
        see it, and renews then.
        """
        self._supervised = True
        for one in ended:
            self.died(one.name, one.incarnation, one.reason)
        there = set(running)
        for name, incarnation in there:
            row = self.table.rows.get(name)
            current = row is not None and row.incarnation == incarnation
            if row is None or not current or row.state in (WorkerState.DEAD, WorkerState.LEFT):
                self.table.act(KillWorker(name, incarnation, 0, ""))
        for row in self.table.rows.values():
            if row.state is WorkerState.STARTING and (row.name, row.incarnation) not in there:
                self.table.end_start(row, "its start was lost")
            elif row.serves and row.incarnation > 1:
                self.table.act(ForgetArenas(row.name, row.incarnation))
            elif not row.wanted and not row.serves:
                self.table.act(ForgetArenas(row.name))

    def detach(self) -> None:
        """Note that the supervisor is gone: nothing is started until one comes."""
        self._supervised = False
        self.table.actions.clear()  # `attach` finds all of it again.

    def died(self, name: WorkerName, incarnation: Incarnation, reason: str) -> None:
        """Note that the process of this incarnation is gone, and plan its restart. Idempotent."""
        row = self._current(name, incarnation)
        if row is not None and row.state not in (WorkerState.DEAD, WorkerState.LEFT):
            self._die(row, reason)

    def set_nodes(self, nodes: Iterable[NodePlace]) -> None:
        """Replace the nodes that workers can be placed on. While none are known, no start waits for a node."""
        self.table.nodes.places = tuple(nodes)

    def set_room(self, room: ClusterRoom) -> None:
        """Replace what nodes have for workers. Raises as the ledger does."""
        self.table.set_room(room)

    def placed(
        self, name: WorkerName, incarnation: Incarnation, node: NodePlace, others: tuple[NodePlace, ...] = ()
    ) -> None:
        """Note the node that a start's process was placed on, and those of its other ranks; on a cordoned node, the
        start begins anew elsewhere."""
        row = self._current(name, incarnation)
        if row is not None and row.state is WorkerState.STARTING:
            row.node, row.others, row.waits = node, others, ""
            row.deadline = self._clock.now() + self._config.start_timeout_s
            row.status = row.own_status()
            if not self.table.cordoned(row):
                self.table.saved(row)
            else:
                self.table.end_start(row, "its node is cordoned")

    def stood_still(self, seconds: float) -> None:
        """Extend all deadlines by the time in which this controller could hear no heartbeat.

        This is safe: each worker counts its own lease, and stops by itself.
        """
        for row in self.table.rows.values():
            row.deadline += seconds

    def shut_down(self) -> None:
        """Start no worker any more, and show routers that the cluster is shutting down."""
        self.shutting_down = True
        self.table.changed()

    # ------------------------------------------------------------ messages of workers

    def register(self, record: WorkerRecord) -> LeaseGrant:
        """Make a started worker ready; returns its first lease.

        The grant is fenced when another incarnation is the current one, when this one is already over, or when its node
        is cordoned. A worker whose answer was lost with an earlier controller registers again, and gets it.
        """
        row = self._current(record.name, record.incarnation)
        if row is not None and row.serves and row.record == record:
            return self._grant(row)
        if row is None or row.state is not WorkerState.STARTING:
            return self._fenced(record.incarnation)
        row.node = NodePlace(record.node_id, record.node)
        row.others = tuple(NodePlace(one.node_id, one.node) for one in record.rank_nodes)
        if self.table.cordoned(row):
            self.table.end_start(row, "its node is cordoned")
            return self._fenced(record.incarnation)
        now = self._clock.now()
        row.state = advance(row.state, WorkerEvent.REGISTERED)
        row.record, row.ready_since, row.ever_ready, row.waits = record, now, True, ""
        row.served_as = row.role
        row.status = row.own_status()
        row.deadline = now + self._config.lease_s
        if row.incarnation > 1:
            # A worker takes arenas over before it registers. Other arenas of older incarnations are of no use, such as
            # those on another node or of another role.
            self.table.act(ForgetArenas(row.name, row.incarnation))
        if row.incarnation > 1 and row.restarts.deaths:
            self.table.note(f"{row.name} is back, incarnation {row.incarnation}")
        self.table.saved(row)
        return self._grant(row)

    def renew(self, name: WorkerName, incarnation: Incarnation, status: WorkerStatus) -> LeaseGrant:
        """Take a heartbeat: renew the lease, and note the worker's status.

        The grant is fenced when the lease has ended or the worker hangs: the worker must stop sending and exit.
        """
        row = self._current(name, incarnation)
        if row is None or not row.serves:
            return self._fenced(incarnation)
        row.deadline = self._clock.now() + self._config.lease_s
        before = row.state
        draining = status.state == WorkerState.DRAINING
        if draining and row.state is WorkerState.READY:
            row.state = advance(row.state, WorkerEvent.DRAINING)
        elif not draining and row.state is WorkerState.DRAINING:
            row.state = advance(row.state, WorkerEvent.UNDRAINED)
            row.becomes = None
        row.drains = row.drains and not draining
        counters = status.counters
        if status.counters_left_out:
            counters = row.status.counters if row.status is not None else {}
        told = row.status
        row.status = structs.replace(
            status, state=row.state, last_end=row.last_reason, counters=counters, counters_left_out=False
        )
        if row.state is not before:
            self.table.saved(row)
        elif row.status != told:
            self.table.numbers_changed(row, counters=not status.counters_left_out)
        if reason := why_stalled(status, self._config):
            self._kill(row, reason)
            return self._fenced(incarnation)
        return self._grant(row)

    def leave(self, name: WorkerName, incarnation: Incarnation, *, closed: bool = False) -> bool:
        """Note that a drained worker has left. It starts again only to be restarted or change its role, or when an
        operator wants it back. `closed`: whether it is closed, and its process could go on as another worker. Returns
        whether that is to wait for its plan: the next start is for it."""
        row = self._current(name, incarnation)
        if row is None or not row.serves:
            return False
        goes_on = False
        if row.becomes is not None:
            row.state = advance(row.state, WorkerEvent.CHANGED)
            other = row.becomes is not row.role
            keeps = other or (row.changes and self.weights.keeps_process(row))
            goes_on = closed and keeps and self.can_start and not self.table.cordoned(row)
            what = f"goes on as a {row.becomes} worker" if goes_on else "starts again" + f" for {row.becomes}" * other
            self.table.note(f"{name} has left, and {what}")
            row.waiting = incarnation if goes_on else NO_INCARNATION
            row.restart_at = self._clock.now()
            _take_role(row)
        else:
            row.state = advance(row.state, WorkerEvent.LEFT)
            row.wanted = row.drains = False
            self.table.act(ForgetArenas(name))
            self.table.note(f"{name} has left")
        row.last_reason = ""  # This one has left in order: how one before it ended is over.
        row.status = row.own_status()
        self.table.note_end(row, closed=closed)
        self.table.saved(row)
        return goes_on

    # ------------------------------------------------------------ the passing of time, and actions

    def tick(self) -> list[ControllerAction]:
        """End leases and starts that are overdue, and begin starts that are due.

        Returns all actions since the last tick, in order; the caller must carry them out.
        """
        now = self._clock.now()
        self.weights.tick()
        for row in list(self.table.rows.values()):
            if row.serves and now >= row.deadline:
                self._kill(row, f"no heartbeat for {self._config.lease_s:g} s", silent=True)
            elif row.unplaced and self.table.nodes.places and now >= row.started_at + PLACE_S:
                self._wait_for_place(row, now)
            elif row.state is WorkerState.STARTING and now >= row.deadline:
                self._kill(row, f"not ready after {self._config.start_timeout_s:g} s", silent=True)
        keep_together(self.table)
        if self.can_start:
            self._start_due(now)
        actions, self.table.actions = self.table.actions, []
        return actions

    def views(self) -> tuple[WorkerView, ...]:
        """The whole table, one row a worker, including workers that have left or are dead."""
        return self.table.views()

    def changes(self, since: int) -> list[RowChange]:
        """What has changed after the table's version `since`, a row each."""
        return self.table.changes(since)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the table, on the caller's thread."""
        self.table.on_change(listener)

    # ------------------------------------------------------------ inside

    def _start_due(self, now: float) -> None:
        """Begin the starts that are due and have their turn, and say what the others wait for."""
        queue = StartQueue(self.table, now)
        for row in queue.due():
            if not self._has_place(row):
                continue
            if why := queue.why_not(row):
                self._queue_up(row, why)
            else:
                self._start(row, now, queue.full(row))
                queue.started()

    def _queue_up(self, row: WantedWorker, why: str) -> None:
        """Show what a start waits for; operators are told of a lack of room."""
        if why == row.waits:
            return
        row.waits = why
        row.status = row.own_status()
        if row.lacks_room:
            self.table.note(f"{row.name} waits for {why}")
        self.table.changed(row)

    def _start(self, row: WantedWorker, now: float, full: tuple[str, ...] = ()) -> None:
        """`full`: nodes, by Ray id, that it doesn't fit on."""
        number = Incarnation(row.incarnation + 1)
        state = advance(row.state, WorkerEvent.STARTED)
        fresh = dataclasses.replace(
            row,
            state=state,
            incarnation=number,
            record=None,
            status=None,
            ready_since=None,
            node=NOWHERE,
            deadline=now + self._config.start_timeout_s,
            started_at=now,
            avoids=tuple(sorted({*self.table.nodes.names, *full})),
            waits=row.waits if row.waits == _place_of(row) else "",
            lacks_room=False,
            waiting=NO_INCARNATION,
            process_since=row.process_since if row.waiting else number,
            changes=False,
        )
        self.table.save(fresh)  # Before it is handed out, and before anything here says so.
        self.table.rows[row.name] = fresh
        weights = self.weights.of_a_start
        self.table.act(StartWorker(fresh.name, fresh.role, number, fresh.avoids, fresh.only, row.waiting, weights))
        self.table.changed(fresh)

    def _wait_for_place(self, row: WantedWorker, now: float) -> None:
        """Show that a start waits for a node with a place, and begin it anew from time to time.

        It has served nothing and nothing of it runs, so this counts as no death. Its process is asked for all the
        while, which is what a Ray autoscaler adds nodes for.
        """
        if now >= row.deadline:
            self.table.end_start(row, f"no node had a place for it within {self._config.start_timeout_s:g} s")
        elif not row.waits:
            self._make_way(row)
            row.waits = _place_of(row)
            row.status = row.own_status()
            self.table.note(f"{row.name} waits for {row.waits}")
            self.table.changed(row)

    def _make_way(self, row: WantedWorker) -> None:
        """Take back the last start of a worker of the same role that has never served, where one that has served finds
        no place: it may have taken that of this one."""
        others = [one for one in self.table.rows.values() if one.role is row.role and not one.served]
        starting = [one for one in others if one.state is WorkerState.STARTING]
        if row.served and starting:
            latest = max(starting, key=lambda one: one.started_at)
            self.table.end_start(latest, f"{row.name}, which served before, has no place")

    def _kill(self, row: WantedWorker, reason: str, *, silent: bool = False) -> None:
        self.table.act(killing(row))
        self._die(row, reason, silent=silent)

    def _has_place(self, row: WantedWorker) -> bool:
        """Whether some node isn't cordoned, or none is known; tells the operator once when a worker has to wait."""
        nodes = self.table.nodes
        free = nodes.free(row.only)
        if not free and not row.held and row.only:
            self.table.note(f"{row.name} waits: its node {row.only} is cordoned or gone")
        elif not free and not row.held:
            self.table.note(f"{row.name} waits: every node is cordoned ({', '.join(sorted(nodes.names))}); undrain one")
        row.held = not free
        return free

    def _die(self, row: WantedWorker, reason: str, *, silent: bool = False) -> None:
        """Count a death, and decide whether and when the worker starts again. `silent`: it was ended for its silence,
        which may be its machine's doing."""
        now = self._clock.now()
        was_draining = row.state is WorkerState.DRAINING or row.drains
        self.deaths += 1
        row.state = advance(row.state, WorkerEvent.DIED)
        row.last_reason, row.waits = reason, ""
        self.table.note_end(row)
        delay = row.restarts.died(now, row.ready_since, silent=silent)
        row.restart_at = now + delay
        what_next = self._what_next(row, was_draining, delay)
        row.status = row.own_status()  # Only now: its role may be another one.
        if not row.wanted:
            self.table.act(ForgetArenas(row.name))
        self.table.note(f"{row.name} died ({reason}); {what_next}")
        if not row.ever_ready:
            self.table.act(StartFailed(row.name, reason))
        self.table.saved(row)

    def _what_next(self, row: WantedWorker, was_draining: bool, delay: float) -> str:
        """Decide whether a dead worker is still wanted; returns what happens next, for the operator."""
        if self.shutting_down:
            return "shutting down"
        was_draining = was_draining and row.becomes is None
        _take_role(row)
        if was_draining:
            row.wanted = False
            return "it was draining and is not restarted"
        if row.restarts.too_many:
            row.wanted = False
            within = f"{row.restarts.deaths} deaths in {self._config.restart_window_s:g} s"
            return f"{within}, it is left dead (cluster.restart_limit)"
        wait = f" in {delay:g} s" if delay else ""
        return f"restarting{wait}, incarnation {row.incarnation + 1}"

    def _current(self, name: WorkerName, incarnation: Incarnation) -> WantedWorker | None:
        """The worker's row if this is its current incarnation; else None, counted in `late_messages`."""
        row = self.table.rows.get(name)
        if row is not None and row.incarnation == incarnation:
            return row
        self.late_messages += 1
        return None

    def _grant(self, row: WantedWorker) -> LeaseGrant:
        lease_s = self._config.lease_s
        renew_s = renewal_pause_s(self._config, len(self.table.rows))
        grant = LeaseGrant(row.incarnation, lease_s, drain=row.drains, renew_s=renew_s, ended=self.table.ended)
        return self.weights.granted(row, grant)

    def _fenced(self, incarnation: Incarnation) -> LeaseGrant:
        return LeaseGrant(incarnation, 0.0, fenced=True)


def _place_of(row: WantedWorker) -> str:
    """What a start waits for that Ray has no place for; shown until it has one, also while it is begun anew."""
    return f"a node with a place for a {row.role} worker"


def _take_role(row: WantedWorker) -> None:
    """Give the worker its new role, if it was told to change it, and stop telling it to drain."""
    row.drains = False
    if row.becomes is not None and row.becomes is not row.role:
        row.role, row.record = row.becomes, None
    row.becomes = None
