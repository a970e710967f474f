"""What workers tell the controller and operators."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker registered with the controller."""

    name: WorkerName
    role: Role
    incarnation: Incarnation
    pid: int
    node: str
    endpoint: str
    """Its gRPC service, ``host:port``; empty in one process."""
    control: str
    fits: WorkerLimits
    node_id: str = ""
    """The Ray node that it runs on; empty without Ray."""
    fingerprint: Fingerprint | None = None
    """What its peers must have in common with it; None while no process of it has registered."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the controller last saw it."""

    record: WorkerRecord
    status: WorkerStatus
    cordoned: bool = False
    """Its node gets no worker until it is undrained."""


# ---------------------------------------------------------------- worker state, for the controller and operators


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One line of `twinpool status`."""

    name: WorkerName
    role: Role
    state: str
    """``starting``, ``ready``, ``draining``, ``left``, ``dead``."""
    pid: int
    node: str
    incarnation: Incarnation
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    steps: int = 0
    """Steps made since start: a worker that has work and makes none is stuck."""
    outgoing: int = 0
    """Rooms whose pages have not been released yet."""
    counters: dict[str, float] = field(default_factory=dict)
    stalled_s: float = 0.0
    """How long its loop has made no progress, or had work that could run and ended no step; 0 while all is well."""
    longest_step_s: float = 0.0
    """The longest of its latest steps: what is long for one worker is usual for another."""
    last_end: str = ""
    """Why its last incarnation ended, as the controller knows; empty where none has."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check()` counted and found, recomputed from scratch."""

    name: WorkerName
    pages: int
    slots: int
    leases: int
    rooms: int
    violations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker can ever hold, for the router's early refusals."""

    max_positions: int
    """Longest prompt + answer that fits into the pool when it is empty."""
    context: int
    """The model's context length."""
