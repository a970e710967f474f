"""The controller's decisions as values: the grants it answers with, and the actions for the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages.worker_status import EndedWorker


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


ControllerAction = StartWorker | KillWorker | ForgetArenas | OperatorNote
