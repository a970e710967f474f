"""What the controller and its supervisor tell each other, as values, and the grants with which it answers workers."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.cluster.controller.node_room import NodePlace
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, Role, WorkerName
from twinpool.contracts.messages.settings_change import SettingsChange
from twinpool.contracts.messages.worker_status import EndedWorker

WorkerKey = tuple[WorkerName, Incarnation]
"""One incarnation of one worker."""


@dataclass(frozen=True, slots=True)
class EndedProcess:
    """An incarnation whose process has ended, as the supervisor tells it."""

    name: WorkerName
    incarnation: Incarnation
    reason: str
    """Why it ended, in words for the operator."""


@dataclass(frozen=True, slots=True)
class PlacedProcess:
    """An incarnation whose process runs on a node, before its worker has registered."""

    name: WorkerName
    incarnation: Incarnation
    node: NodePlace


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The controller's answer to a registration or renewal."""

    incarnation: Incarnation
    lease_s: float
    """Seconds that the lease lasts; 0 where it is fenced."""
    fenced: bool = False
    """Whether the incarnation is over: the worker must send nothing more and exit."""
    drain: bool = False
    """Whether the worker is to drain and leave."""
    renew_s: float = 0.0
    """Seconds after which the worker is to renew; 0: as configured."""
    ended: tuple[EndedWorker, ...] = ()
    """The latest incarnation of each worker that has ended."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start the process of an incarnation."""

    name: WorkerName
    role: Role
    incarnation: Incarnation
    avoid: tuple[str, ...] = ()
    """Cordoned nodes, by host name or Ray node id, on which the worker must not start."""
    only: str = ""
    """The one node, by host name or Ray node id, on which it is to start; empty: any."""
    successor_of: Incarnation = NO_INCARNATION
    """The incarnation whose process has closed it and waits to go on as this one; 0: none does."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Make sure that the process of an incarnation is gone."""

    name: WorkerName
    incarnation: Incarnation
    pid: int
    """0 where the worker hasn't registered."""
    node: str
    """Host name of its node; empty where the worker hasn't registered."""


@dataclass(frozen=True, slots=True)
class ForgetArenas:
    """Free a worker's arenas: it won't be started again, or its successor has taken over all that it can use.

    With `before`, only arenas of incarnations before that one.
    """

    name: WorkerName
    before: Incarnation | None = None


@dataclass(frozen=True, slots=True)
class OperatorNote:
    """A line for the operator to read."""

    text: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker has died that was never ready: what it needs may be missing."""

    name: WorkerName
    reason: str


ControllerAction = StartWorker | KillWorker | ForgetArenas | OperatorNote | StartFailed | SettingsChange
