"""What the controller decides, as values."""

from __future__ import annotations

from dataclasses import dataclass

from contracts.ids import Incarnation, Role, WorkerName


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The answer to a registration or renewal."""

    incarnation: Incarnation
    lease_s: float
    fenced: bool = False
    drain: bool = False
    """The worker is to leave."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start this incarnation of this worker."""

    name: WorkerName
    role: Role
    incarnation: Incarnation
    avoid: tuple[str, ...] = ()
    """Nodes that are cordoned, by host name or Ray node id: not there."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Make sure that this incarnation is gone."""

    name: WorkerName
    incarnation: Incarnation
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class ForgetArenas:
    """Of this worker nothing need be kept any more: it won't be started again, or its successor has what it could use.

    With `before`, that is what incarnations before this one have left.
    """

    name: WorkerName
    before: Incarnation | None = None


@dataclass(frozen=True, slots=True)
class OperatorNote:
    """A line for the operator."""

    text: str


ControllerAction = StartWorker | KillWorker | ForgetArenas | OperatorNote
