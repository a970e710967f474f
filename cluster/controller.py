"""The controller: the one authority on which start of which worker may act.

A brain without I/O. Messages and the passing of time go in, actions come out; the clock is injected, so leases,
fencing and restarts are tested in microseconds.

What it guarantees:

- *Incarnations* grow with every start of a name, also across restarts of the controller: a number is written to the
  ledger before it is handed out.
- A *lease* ends `lease_s` after the controller last heard of the worker. The worker counts from when it sent that
  message, which is earlier, and takes a margin; so by the time the controller calls it dead and starts the next
  incarnation, the old one has already stopped sending.
- A worker that renews but makes no progress (`cluster.progress`) loses its lease as if it had not renewed, and is
  killed and started again.
- A worker that is known to have died (its process is gone) is restarted at once; one that dies again soon after its
  start waits longer each time; one that dies more than `restart_limit` times in ten minutes is left dead.
- A worker that left by drain, or died while it was draining, is not started again: the operator wanted it gone. One
  that was to change its role is started in the new one, whichever way it ended.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cluster.progress import why_stalled
from cluster.states import WorkerEvent, WorkerState, advance
from contracts.clock import Clock
from contracts.config import ClusterConfig
from contracts.errors import ConfigError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages import Fits, WorkerStatus
from contracts.ports import WorkerRecord, WorkerView

RESTART_WINDOW_S = 600.0
"""`restart_limit` counts deaths within this time."""
SETTLED_S = 10.0
"""A worker that served this long before it died is restarted without delay."""
BACKOFF_S = 0.5
BACKOFF_MAX_S = 10.0


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a registration or renewal."""

    incarnation: Incarnation
    lease_s: float
    fenced: bool = False
    drain: bool = False
    """The worker is to leave."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start this incarnation of this worker."""

    name: WorkerName
    role: Role
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Kill:
    """Make sure that this incarnation is gone."""

    name: WorkerName
    incarnation: Incarnation
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Of this worker nothing need be kept any more: it won't be started again, or its successor has what it could use.

    With `before`, that is what incarnations before this one have left.
    """

    name: WorkerName
    before: Incarnation | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A line for the operator."""

    text: str


Action = Start | Kill | Forget | Report


class Ledger(Protocol):
    """Where granted incarnations outlive the controller."""

    def load(self) -> Mapping[str, int]: ...

    def record(self, name: str, incarnation: int) -> None:
        """Return once the number is safe."""


class MemoryLedger:
    """A ledger for clusters that live no longer than their controller."""

    def __init__(self) -> None:
        self.granted: dict[str, int] = {}

    def load(self) -> Mapping[str, int]:
        return dict(self.granted)

    def record(self, name: str, incarnation: int) -> None:
        self.granted[name] = incarnation


@dataclass(slots=True)
class _Slot:
    """One wanted worker."""

    name: WorkerName
    role: Role
    incarnation: Incarnation
    state: WorkerState = WorkerState.DEAD
    wanted: bool = True
    record: WorkerRecord | None = None
    status: WorkerStatus | None = None
    deadline: float = 0.0
    """When the lease, or the time to register, ends."""
    ready_since: float | None = None
    restart_at: float = 0.0
    quick_deaths: int = 0
    deaths: deque[float] = field(default_factory=deque)
    ever_ready: bool = False
    drains: bool = False
    """It is to be told to drain; until it says that it does."""
    becomes: Role | None = None
    """The role that it is started in when it has left."""
    last_reason: str = ""


class Controller:
    """Grants incarnations as leases and decides restarts. Not thread-safe: one loop owns it."""

    def __init__(self, clock: Clock, config: ClusterConfig, ledger: Ledger) -> None:
        self._clock = clock
        self._config = config
        self._ledger = ledger
        self._granted = dict(ledger.load())
        self._slots: dict[WorkerName, _Slot] = {}
        self._actions: list[Action] = []
        self._listeners: list[Callable[[], None]] = []
        self.version = 1
        self.late_messages = 0
        """Messages of incarnations that had already ended; dropped."""
        self.shutting_down = False

    # ------------------------------------------------------------ what the operator and the supervisor say

    def add(self, name: WorkerName, role: Role) -> None:
        """Want a worker; the next `tick` starts it. Raises `ConfigError` for a name that is taken."""
        if name in self._slots:
            raise ConfigError(f"there is already a worker {name}")
        self._slots[name] = _Slot(name, role, Incarnation(self._granted.get(name, 0)))
        self._changed()

    def died(self, name: WorkerName, incarnation: Incarnation, reason: str) -> None:
        """The process of this incarnation is gone."""
        slot = self._current(name, incarnation)
        if slot is not None and slot.state not in (WorkerState.DEAD, WorkerState.LEFT):
            self._die(slot, reason)

    def change_role(self, name: WorkerName, role: Role) -> None:
        """Have a worker drain and come back in another role. Raises `ConfigError` where it can't."""
        slot = self._slots.get(name)
        if slot is None or slot.state is not WorkerState.READY:
            raise ConfigError(f"{name} is {slot.state if slot else 'unknown'}: only a ready worker can change its role")
        if slot.role is role:
            raise ConfigError(f"{name} is a {role} worker already")
        slot.becomes, slot.drains = role, True

    def drain(self, name: WorkerName) -> bool:
        """Have a worker drain, as its node goes; False for one that isn't serving."""
        slot = self._slots.get(name)
        if slot is None or slot.state is not WorkerState.READY or slot.drains:
            return False
        slot.drains = True
        return True

    def shut_down(self) -> None:
        """No restarts any more; routers are told."""
        self.shutting_down = True
        self._changed()

    # ------------------------------------------------------------ what the workers say

    def register(self, record: WorkerRecord) -> Grant:
        """A worker is up. Fenced when another incarnation is the current one, or this one is already over."""
        slot = self._current(record.name, record.incarnation)
        if slot is None or slot.state is not WorkerState.STARTING:
            return self._fenced(record.incarnation)
        now = self._clock.now()
        slot.state = advance(slot.state, WorkerEvent.REGISTERED)
        slot.record, slot.ready_since, slot.ever_ready = record, now, True
        slot.status = _status(slot)
        slot.deadline = now + self._config.lease_s
        if slot.incarnation > 1:
            # What it has not taken over by now nobody will: its role or its node may be another one.
            self._actions.append(Forget(slot.name, slot.incarnation))
        if slot.incarnation > 1 and slot.deaths:
            self._actions.append(Report(f"{slot.name} is back, incarnation {slot.incarnation}"))
        self._changed()
        return self._grant(slot)

    def renew(self, name: WorkerName, incarnation: Incarnation, status: WorkerStatus) -> Grant:
        """A heartbeat. Fenced when the lease has ended: the worker must stop sending and exit."""
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
        changed = dataclasses.replace(status, state=slot.state)
        if changed != slot.status:
            slot.status = changed
            self._changed()
        if reason := why_stalled(status, self._config):
            self._kill(slot, reason)
            return self._fenced(incarnation)
        return self._grant(slot)

    def leave(self, name: WorkerName, incarnation: Incarnation) -> None:
        """A drained worker is gone for good."""
        slot = self._current(name, incarnation)
        if slot is None or slot.state not in (WorkerState.READY, WorkerState.DRAINING):
            return
        if slot.becomes is not None:
            slot.state = advance(slot.state, WorkerEvent.CHANGED)
            self._actions.append(Report(f"{name} has left, and starts again for {slot.becomes}"))
            slot.restart_at = self._clock.now()
            self._take_role(slot)
        else:
            slot.state = advance(slot.state, WorkerEvent.LEFT)
            slot.wanted = False
            self._actions += [Forget(name), Report(f"{name} has left")]
        slot.status = _status(slot)
        self._changed()

    # ------------------------------------------------------------ what time says, and what to do

    def tick(self) -> list[Action]:
        """Expire what is late, start what is due; returns all actions since the last tick, in order."""
        now = self._clock.now()
        for slot in self._slots.values():
            if slot.state in (WorkerState.READY, WorkerState.DRAINING) and now >= slot.deadline:
                self._kill(slot, f"no heartbeat for {self._config.lease_s:g} s")
            elif slot.state is WorkerState.STARTING and now >= slot.deadline:
                self._kill(slot, f"not ready after {self._config.start_timeout_s:g} s")
            if slot.state is WorkerState.DEAD and slot.wanted and now >= slot.restart_at and not self.shutting_down:
                self._start(slot, now)
        actions, self._actions = self._actions, []
        return actions

    def views(self) -> tuple[WorkerView, ...]:
        """The whole table, one row a wanted worker, those without a process included."""
        return tuple(
            WorkerView(slot.record or _empty_record(slot), slot.status or _status(slot))
            for slot in self._slots.values()
        )

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the table, on the caller's thread."""
        self._listeners.append(listener)

    def never_ready(self) -> list[tuple[WorkerName, str]]:
        """Workers that have died and were never ready, with the last reason."""
        return [(s.name, s.last_reason) for s in self._slots.values() if s.deaths and not s.ever_ready]

    # ------------------------------------------------------------ inside

    def _start(self, slot: _Slot, now: float) -> None:
        number = Incarnation(slot.incarnation + 1)
        self._ledger.record(slot.name, number)
        slot.state = advance(slot.state, WorkerEvent.STARTED)
        slot.incarnation, slot.record, slot.ready_since = number, None, None
        slot.deadline = now + self._config.start_timeout_s
        slot.status = _status(slot)
        self._actions.append(Start(slot.name, slot.role, number))
        self._changed()

    def _kill(self, slot: _Slot, reason: str) -> None:
        record = slot.record
        self._actions.append(
            Kill(slot.name, slot.incarnation, record.pid if record else 0, record.node if record else "")
        )
        self._die(slot, reason)

    def _die(self, slot: _Slot, reason: str) -> None:
        now = self._clock.now()
        was_draining = slot.state is WorkerState.DRAINING
        slot.state = advance(slot.state, WorkerEvent.DIED)
        slot.last_reason = reason
        slot.status = _status(slot)
        slot.deaths.append(now)
        while slot.deaths[0] < now - RESTART_WINDOW_S:
            slot.deaths.popleft()
        settled = slot.ready_since is not None and now - slot.ready_since >= SETTLED_S
        slot.quick_deaths = 0 if settled else slot.quick_deaths + 1
        delay = min(BACKOFF_MAX_S, BACKOFF_S * 2 ** (slot.quick_deaths - 2)) if slot.quick_deaths > 1 else 0.0
        slot.restart_at = now + delay
        what_next = self._what_next(slot, was_draining, delay)
        self._actions += [] if slot.wanted else [Forget(slot.name)]
        self._actions.append(Report(f"{slot.name} died ({reason}); {what_next}"))
        self._changed()

    @staticmethod
    def _take_role(slot: _Slot) -> None:
        """Be of the new role, if there is one, from the next start on."""
        slot.drains = False
        if slot.becomes is not None:
            slot.role, slot.becomes, slot.record = slot.becomes, None, None

    def _what_next(self, slot: _Slot, was_draining: bool, delay: float) -> str:
        if self.shutting_down:
            return "shutting down"
        was_draining = was_draining and slot.becomes is None
        self._take_role(slot)
        if was_draining:
            slot.wanted = False
            return "it was draining and is not restarted"
        if len(slot.deaths) > self._config.restart_limit:
            slot.wanted = False
            return f"{len(slot.deaths)} deaths in ten minutes, it is left dead (cluster.restart_limit)"
        wait = f" in {delay:g} s" if delay else ""
        return f"restarting{wait}, incarnation {slot.incarnation + 1}"

    def _current(self, name: WorkerName, incarnation: Incarnation) -> _Slot | None:
        slot = self._slots.get(name)
        if slot is not None and slot.incarnation == incarnation:
            return slot
        self.late_messages += 1
        return None

    def _grant(self, slot: _Slot) -> Grant:
        return Grant(slot.incarnation, self._config.lease_s, drain=slot.drains)

    def _fenced(self, incarnation: Incarnation) -> Grant:
        return Grant(incarnation, 0.0, fenced=True)

    def _changed(self) -> None:
        self.version += 1
        for listener in self._listeners:
            listener()


def _empty_record(slot: _Slot) -> WorkerRecord:
    return WorkerRecord(slot.name, slot.role, slot.incarnation, 0, "", "", "", Fits(0, 0))


def _status(slot: _Slot) -> WorkerStatus:
    """A row made by the controller itself: the worker has said nothing yet, or no longer counts."""
    record = slot.record
    pid, node = (record.pid, record.node) if record else (0, "")
    return WorkerStatus(slot.name, slot.role, slot.state, pid, node, slot.incarnation, 0, 0, 0, 0)
