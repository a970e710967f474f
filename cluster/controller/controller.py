"""The controller: the one authority on which incarnation of which worker may act.

The logic alone, without I/O. Messages and the passing of time go in, actions come out; the clock is injected, so
leases, fencing and restarts are tested in microseconds.

Guarantees:

- *Incarnations* grow with every start of a name, also across restarts of the controller: a number is written to the
  ledger before it is handed out.
- A *lease* ends `lease_s` after the controller last heard from the worker. The worker counts from when it sent that
  message, which is earlier, and takes a margin; so by the time the controller declares the worker dead and starts the
  next incarnation, the old one has already stopped sending.
- A worker that renews but makes no progress (`cluster.worker_process.step_watchdog`) loses its lease as if it had not
  renewed, and is killed and started again.
- A worker that is known to have died (its process is gone) is restarted at once; a worker that dies again soon after
  its start waits longer each time; a worker that dies more than `restart_limit` times in `restart_window_s` is left
  dead (`cluster.processes.restart_policy`).
- A worker that left by drain, or died while it was draining, is not started again until an operator wants it back
  (`undrain`). A worker that was told to change its role is started in the new role, whether it left or died.
- A node that is *cordoned* (`drain` of a node) gets no worker until it is undrained: workers that serve there drain, a
  worker that is only starting there is started elsewhere, or waits while no other node can take it.
- Each grant names the latest incarnation of each worker that has ended: what other workers hold for it can come back,
  where its access is really ended (`docs/decisions/0045-the-controller-says-who-has-ended.md`).
- A controller that stood still itself has heard no heartbeat, and ends no lease for that (`stood_still`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.controller.controller_actions import (
    ControllerAction,
    ForgetArenas,
    KillWorker,
    LeaseGrant,
    OperatorNote,
    StartWorker,
)
from cluster.controller.incarnation_ledger import IncarnationLedger
from cluster.controller.worker_states import WorkerEvent, WorkerState, advance
from cluster.processes.restart_policy import RestartHistory
from cluster.worker_process.step_watchdog import why_stalled
from contracts.clock import Clock
from contracts.config.cluster_config import ClusterConfig
from contracts.errors import ConfigError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages.worker_status import EndedWorker, WorkerLimits, WorkerRecord, WorkerStatus, WorkerView

NODE_ID_CHARS = 8
"""The first characters of a Ray node id that are enough to name a node."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node that workers can be placed on."""

    node_id: str
    """The Ray node id, hex; empty without Ray."""
    host: str
    """The node's host name."""

    def named(self, name: str) -> bool:
        """Whether `name` means this node: its host name, or (the beginning of) its Ray node id."""
        return bool(name) and (self.host == name or (len(name) >= NODE_ID_CHARS and self.node_id.startswith(name)))


@dataclass(slots=True)
class _WantedWorker:
    """A worker's row of the controller's table; the row stays when the worker has left or is left dead."""

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
    node: NodePlace = NodePlace("", "")
    """The node that its process is or was on; empty from a start until its node is known."""
    avoids: tuple[str, ...] = ()
    """Nodes that were cordoned at its start."""
    ever_ready: bool = False
    drains: bool = False
    """Whether the next grants tell the worker to drain; ends when its status says that it drains."""
    becomes: Role | None = None
    """The role of its next start; None: the same role."""
    last_reason: str = ""
    held: bool = False
    """Whether its start is due and waits, because every node is cordoned."""


class Controller:
    """Grants incarnations as leases and decides restarts. Not thread-safe: one loop owns it.

    It has more than twenty methods: half are one for each message of workers, operators and launchers, and the others
    change the one table of workers accordingly.
    """

    def __init__(self, clock: Clock, config: ClusterConfig, ledger: IncarnationLedger) -> None:
        self._clock = clock
        self._config = config
        self._ledger = ledger
        self._granted = dict(ledger.load())
        self._slots: dict[WorkerName, _WantedWorker] = {}
        self._actions: list[ControllerAction] = []
        self._listeners: list[Callable[[], None]] = []
        self._ended: tuple[EndedWorker, ...] = ()
        """The latest incarnation of each worker that has ended: each grant says it."""
        self._cordoned: set[str] = set()
        """Names of nodes, as operators and Ray gave them."""
        self._nodes: tuple[NodePlace, ...] = ()
        self.version = 1
        self.late_messages = 0
        """Messages of incarnations that had already ended; dropped."""
        self.shutting_down = False

    # ------------------------------------------------------------ messages of operators and of the supervisor

    def add(self, name: WorkerName, role: Role) -> None:
        """Add a worker, or bring back one that has left or is left dead; the next `tick` starts it.

        Raises `ConfigError` for the name of a worker that is still wanted.
        """
        slot = self._slots.get(name)
        if slot is None:
            number = Incarnation(self._granted.get(name, 0))
            self._slots[name] = slot = _WantedWorker(name, role, number, RestartHistory(self._config))
            self._note_end(slot)  # Of an incarnation that an earlier controller granted.
            self._changed()
        elif slot.wanted:
            raise ConfigError(f"there is already a worker {name}")
        else:
            self._want(slot)
            slot.role = role

    def died(self, name: WorkerName, incarnation: Incarnation, reason: str) -> None:
        """Note that the process of this incarnation is gone, and plan its restart. Idempotent."""
        slot = self._current(name, incarnation)
        if slot is not None and slot.state not in (WorkerState.DEAD, WorkerState.LEFT):
            self._die(slot, reason)

    def change_role(self, name: WorkerName, role: Role) -> None:
        """Have a worker drain and come back in another role. Raises `ConfigError` for a worker that is not ready or has
        this role already."""
        slot = self._slots.get(name)
        if slot is None or slot.state is not WorkerState.READY:
            raise ConfigError(f"{name} is {slot.state if slot else 'unknown'}: only a ready worker can change its role")
        if Role.COLOCATED in (slot.role, role):
            raise ConfigError(f"{name} is a {slot.role} worker and can't become a {role} one: a colocated one has both")
        if slot.role is role:
            raise ConfigError(f"{name} is a {role} worker already")
        slot.becomes, slot.drains = role, True

    def drain(self, target: str) -> tuple[WorkerName, ...]:
        """Have a worker leave, or cordon a node and have all its workers leave; returns the workers that are told.

        A worker that drains already isn't told again; a worker that is still starting on the node is started elsewhere,
        and is among those returned. Raises `ConfigError` for a name that is neither a worker's nor a node's.
        """
        slot = self._slots.get(WorkerName(target))
        if slot is not None:
            return (slot.name,) if self._tell_to_drain(slot) else ()
        if not self._is_node(target):
            raise ConfigError(f"no worker or node is named {target!r}; nodes: {self._known_nodes()}")
        self._cordoned.add(target)
        on_node = [slot for slot in self._slots.values() if slot.node.named(target)]
        told = tuple(slot.name for slot in on_node if self._tell_to_drain(slot) or self._start_elsewhere(slot))
        self._changed()
        return told

    def undrain(self, target: str) -> tuple[WorkerName, ...]:
        """Take back the drain of a worker, or of a node and its workers; returns the workers that are started again.

        A worker that still runs is no longer told to drain; the router undrains one that drains by now. Raises
        `ConfigError` for an unknown name, and for a wanted worker that is neither ready nor draining.
        """
        slot = self._slots.get(WorkerName(target))
        if slot is not None:
            if slot.wanted and slot.state not in (WorkerState.READY, WorkerState.DRAINING):
                raise ConfigError(f"{target} is not draining; it is {slot.state}")
            return self._take_back([slot])
        if not self._is_node(target):
            raise ConfigError(f"no worker or node is named {target!r}; nodes: {self._known_nodes()}")
        same = {node for node in self._every_node() if node.named(target)}
        self._cordoned -= {c for c in self._cordoned if c == target or any(node.named(c) for node in same)}
        back = self._take_back(slot for slot in self._slots.values() if slot.node.named(target))
        for slot in self._slots.values():
            if slot.avoids and not slot.node.host:  # It may wait for a place for as long as it must not be here.
                self._start_elsewhere(slot, "a node was undrained")
        self._changed()
        return back

    def cordoned(self, node: NodePlace) -> bool:
        """Whether no worker may be placed on this node."""
        return any(node.named(name) for name in self._cordoned)

    def set_nodes(self, nodes: Iterable[NodePlace]) -> None:
        """Replace the nodes that workers can be placed on. While none are known, no start waits for a node."""
        self._nodes = tuple(nodes)

    def placed(self, name: WorkerName, incarnation: Incarnation, node: NodePlace) -> None:
        """Note the node that a start's process was placed on; on a cordoned node, the start begins anew elsewhere."""
        slot = self._current(name, incarnation)
        if slot is not None and slot.state is WorkerState.STARTING:
            slot.node = node
            slot.status = _status(slot)
            if self.cordoned(node):
                self._start_elsewhere(slot)
            else:
                self._changed()

    def stood_still(self, seconds: float) -> None:
        """Extend all deadlines by the time in which this controller could hear no heartbeat.

        This is safe: each worker counts its own lease, and stops by itself.
        """
        for slot in self._slots.values():
            slot.deadline += seconds

    def shut_down(self) -> None:
        """Start no worker any more, and show routers that the cluster is shutting down."""
        self.shutting_down = True
        self._changed()

    # ------------------------------------------------------------ messages of workers

    def register(self, record: WorkerRecord) -> LeaseGrant:
        """Make a started worker ready; returns its first lease.

        The grant is fenced when another incarnation is the current one, when this one is already over, or when its node
        is cordoned.
        """
        slot = self._current(record.name, record.incarnation)
        if slot is None or slot.state is not WorkerState.STARTING:
            return self._fenced(record.incarnation)
        slot.node = NodePlace(record.node_id, record.node)
        if self.cordoned(slot.node):
            self._start_elsewhere(slot)
            return self._fenced(record.incarnation)
        now = self._clock.now()
        slot.state = advance(slot.state, WorkerEvent.REGISTERED)
        slot.record, slot.ready_since, slot.ever_ready = record, now, True
        slot.status = _status(slot)
        slot.deadline = now + self._config.lease_s
        if slot.incarnation > 1:
            # A worker takes arenas over before it registers. Other arenas of older incarnations are of no use, such as
            # those on another node or of another role.
            self._actions.append(ForgetArenas(slot.name, slot.incarnation))
        if slot.incarnation > 1 and slot.restarts.deaths:
            self._actions.append(OperatorNote(f"{slot.name} is back, incarnation {slot.incarnation}"))
        self._changed()
        return self._grant(slot)

    def renew(self, name: WorkerName, incarnation: Incarnation, status: WorkerStatus) -> LeaseGrant:
        """Take a heartbeat: renew the lease, and note the worker's status.

        The grant is fenced when the lease has ended or the worker hangs: the worker must stop sending and exit.
        """
        slot = self._current(name, incarnation)
        if slot is None or slot.state not in (WorkerState.READY, WorkerState.DRAINING):
            return self._fenced(incarnation)
        slot.deadline = self._clock.now() + self._config.lease_s
        draining = status.state == WorkerState.DRAINING
        if draining and slot.state is WorkerState.READY:
            slot.state = advance(slot.state, WorkerEvent.DRAINING)
        elif not draining and slot.state is WorkerState.DRAINING:
            slot.state = advance(slot.state, WorkerEvent.UNDRAINED)
            slot.becomes = None
        slot.drains = slot.drains and not draining
        changed = dataclasses.replace(status, state=slot.state, last_end=slot.last_reason)
        if changed != slot.status:
            slot.status = changed
            self._changed()
        if reason := why_stalled(status, self._config):
            self._kill(slot, reason)
            return self._fenced(incarnation)
        return self._grant(slot)

    def leave(self, name: WorkerName, incarnation: Incarnation) -> None:
        """Note that a drained worker has left. It starts again only to change its role, or by `undrain` or `add`."""
        slot = self._current(name, incarnation)
        if slot is None or slot.state not in (WorkerState.READY, WorkerState.DRAINING):
            return
        if slot.becomes is not None:
            slot.state = advance(slot.state, WorkerEvent.CHANGED)
            self._actions.append(OperatorNote(f"{name} has left, and starts again for {slot.becomes}"))
            slot.restart_at = self._clock.now()
            self._take_role(slot)
        else:
            slot.state = advance(slot.state, WorkerEvent.LEFT)
            slot.wanted = False
            self._actions += [ForgetArenas(name), OperatorNote(f"{name} has left")]
        slot.status = _status(slot)
        self._note_end(slot)
        self._changed()

    # ------------------------------------------------------------ the passing of time, and actions

    def tick(self) -> list[ControllerAction]:
        """End leases and starts that are overdue, and begin starts that are due.

        Returns all actions since the last tick, in order; the caller must carry them out.
        """
        now = self._clock.now()
        for slot in self._slots.values():
            if slot.state in (WorkerState.READY, WorkerState.DRAINING) and now >= slot.deadline:
                self._kill(slot, f"no heartbeat for {self._config.lease_s:g} s")
            elif slot.state is WorkerState.STARTING and now >= slot.deadline:
                self._kill(slot, f"not ready after {self._config.start_timeout_s:g} s")
            due = slot.state is WorkerState.DEAD and slot.wanted and now >= slot.restart_at
            if due and not self.shutting_down and self._has_place(slot):
                self._start(slot, now)
        actions, self._actions = self._actions, []
        return actions

    def views(self) -> tuple[WorkerView, ...]:
        """The whole table, one row a worker, including workers that have left or are dead."""
        return tuple(
            WorkerView(slot.record or _empty_record(slot), slot.status or _status(slot), self.cordoned(slot.node))
            for slot in self._slots.values()
        )

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the table, on the caller's thread."""
        self._listeners.append(listener)

    def never_ready(self) -> list[tuple[WorkerName, str]]:
        """Workers that have died and were never ready, each with the reason of its last death."""
        return [(s.name, s.last_reason) for s in self._slots.values() if s.restarts.deaths and not s.ever_ready]

    # ------------------------------------------------------------ inside

    def _start(self, slot: _WantedWorker, now: float) -> None:
        number = Incarnation(slot.incarnation + 1)
        self._ledger.record(slot.name, number)
        slot.state = advance(slot.state, WorkerEvent.STARTED)
        slot.incarnation, slot.record, slot.ready_since, slot.node = number, None, None, NodePlace("", "")
        slot.deadline = now + self._config.start_timeout_s
        slot.status = _status(slot)
        slot.avoids = tuple(sorted(self._cordoned))
        self._actions.append(StartWorker(slot.name, slot.role, number, slot.avoids))
        self._changed()

    def _kill(self, slot: _WantedWorker, reason: str) -> None:
        self._actions.append(_killing(slot))
        self._die(slot, reason)

    def _tell_to_drain(self, slot: _WantedWorker) -> bool:
        """Have the next grant tell the worker to drain; returns whether it is ready and wasn't told before."""
        if slot.state is not WorkerState.READY or slot.drains:
            return False
        slot.drains = True
        return True

    def _start_elsewhere(self, slot: _WantedWorker, why: str = "its node is cordoned") -> bool:
        """End a start, to begin it anew on a node that isn't cordoned; returns whether the worker was starting.

        It has served no request, so this counts as no death.
        """
        if slot.state is not WorkerState.STARTING:
            return False
        self._actions += [_killing(slot), OperatorNote(f"{slot.name} is started anew: {why}")]
        slot.state = advance(slot.state, WorkerEvent.DIED)
        slot.status, slot.restart_at = _status(slot), self._clock.now()
        self._note_end(slot)
        self._changed()
        return True

    def _has_place(self, slot: _WantedWorker) -> bool:
        """Whether some node isn't cordoned, or none is known; tells the operator once when a worker has to wait."""
        free = not self._nodes or any(not self.cordoned(node) for node in self._nodes)
        if not free and not slot.held:
            text = f"{slot.name} waits: every node is cordoned ({', '.join(sorted(self._cordoned))}); undrain one"
            self._actions.append(OperatorNote(text))
        slot.held = not free
        return free

    def _take_back(self, slots: Iterable[_WantedWorker]) -> tuple[WorkerName, ...]:
        """Take back drains; returns the workers that had left or were left dead, and are started again."""
        back = []
        for slot in slots:
            if slot.state is WorkerState.READY and slot.drains:
                slot.becomes = None  # `renew` does so for a worker that drains by now.
            if slot.wanted:
                slot.drains = False
            else:
                self._want(slot)
                back.append(slot.name)
        return tuple(back)

    def _want(self, slot: _WantedWorker) -> None:
        """Want a worker again that had left or was left dead, with a clean restart history."""
        if slot.state is WorkerState.LEFT:
            slot.state = advance(slot.state, WorkerEvent.WANTED)
            slot.status = _status(slot)
        slot.wanted, slot.drains, slot.becomes = True, False, None
        slot.restart_at = self._clock.now()
        slot.restarts.forgive()
        self._changed()

    def _every_node(self) -> set[NodePlace]:
        """All known nodes: nodes that take workers, and nodes that workers are or were on."""
        return {*self._nodes, *(slot.node for slot in self._slots.values() if slot.node.host)}

    def _is_node(self, name: str) -> bool:
        return name in self._cordoned or any(node.named(name) for node in self._every_node())

    def _known_nodes(self) -> str:
        return ", ".join(sorted({node.host for node in self._every_node()})) or "none"

    def _die(self, slot: _WantedWorker, reason: str) -> None:
        """Count a death, and decide whether and when the worker starts again."""
        now = self._clock.now()
        was_draining = slot.state is WorkerState.DRAINING
        slot.state = advance(slot.state, WorkerEvent.DIED)
        slot.last_reason = reason
        slot.status = _status(slot)
        self._note_end(slot)
        delay = slot.restarts.died(now, slot.ready_since)
        slot.restart_at = now + delay
        what_next = self._what_next(slot, was_draining, delay)
        self._actions += [] if slot.wanted else [ForgetArenas(slot.name)]
        self._actions.append(OperatorNote(f"{slot.name} died ({reason}); {what_next}"))
        self._changed()

    @staticmethod
    def _take_role(slot: _WantedWorker) -> None:
        """Give the worker its new role, if it was told to change it, and stop telling it to drain."""
        slot.drains = False
        if slot.becomes is not None:
            slot.role, slot.becomes, slot.record = slot.becomes, None, None

    def _what_next(self, slot: _WantedWorker, was_draining: bool, delay: float) -> str:
        """Decide whether a dead worker is still wanted; returns what happens next, for the operator."""
        if self.shutting_down:
            return "shutting down"
        was_draining = was_draining and slot.becomes is None
        self._take_role(slot)
        if was_draining:
            slot.wanted = False
            return "it was draining and is not restarted"
        if slot.restarts.too_many:
            slot.wanted = False
            within = f"{slot.restarts.deaths} deaths in {self._config.restart_window_s:g} s"
            return f"{within}, it is left dead (cluster.restart_limit)"
        wait = f" in {delay:g} s" if delay else ""
        return f"restarting{wait}, incarnation {slot.incarnation + 1}"

    def _current(self, name: WorkerName, incarnation: Incarnation) -> _WantedWorker | None:
        """The worker's row if this is its current incarnation; else None, counted in `late_messages`."""
        slot = self._slots.get(name)
        if slot is not None and slot.incarnation == incarnation:
            return slot
        self.late_messages += 1
        return None

    def _grant(self, slot: _WantedWorker) -> LeaseGrant:
        return LeaseGrant(slot.incarnation, self._config.lease_s, drain=slot.drains, ended=self._ended)

    def _note_end(self, slot: _WantedWorker) -> None:
        """Have grants say that a worker's incarnation has ended; the one before its first never was."""
        if slot.incarnation:
            others = (ended for ended in self._ended if ended.name != slot.name)
            self._ended = (*others, EndedWorker(slot.name, slot.incarnation))

    def _fenced(self, incarnation: Incarnation) -> LeaseGrant:
        return LeaseGrant(incarnation, 0.0, fenced=True)

    def _changed(self) -> None:
        self.version += 1
        for listener in self._listeners:
            listener()


def _empty_record(slot: _WantedWorker) -> WorkerRecord:
    node = slot.node
    return WorkerRecord(slot.name, slot.role, slot.incarnation, 0, node.host, "", "", WorkerLimits(0, 0), node.node_id)


def _killing(slot: _WantedWorker) -> KillWorker:
    record = slot.record
    return KillWorker(slot.name, slot.incarnation, record.pid if record else 0, record.node if record else "")


def _status(slot: _WantedWorker) -> WorkerStatus:
    """A status made by the controller itself, for a worker that has sent none yet or whose last one is outdated."""
    pid = slot.record.pid if slot.record else 0
    return WorkerStatus(
        slot.name, slot.role, slot.state, pid, slot.node.host, slot.incarnation, 0, 0, 0, 0, last_end=slot.last_reason
    )
