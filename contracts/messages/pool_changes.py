"""What an operator asks of the cluster's pools, as values that the router passes to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twinpool.contracts.ids import Role, WorkerName


@dataclass(frozen=True, slots=True)
class AddWorkers:
    """Start so many workers of a role more."""

    role: Role
    count: int = 1
    node: str = ""
    """The one node they are to run on, by host name or Ray node id; empty: any."""


@dataclass(frozen=True, slots=True)
class ScalePools:
    """Bring pools to so many workers, by starts and by drains."""

    counts: Mapping[Role, int] = field(default_factory=dict)
    empty: bool = False
    """Whether a pool may be left without a worker."""


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """Have a worker drain, leave and start again."""

    name: WorkerName


@dataclass(frozen=True, slots=True)
class CordonNode:
    """Place no worker on a node any more; those that serve there go on."""

    node: str


@dataclass(frozen=True, slots=True)
class UncordonNode:
    """Let workers be placed on a node again."""

    node: str


PoolChange = AddWorkers | ScalePools | RestartWorker | CordonNode | UncordonNode


@dataclass(frozen=True, slots=True)
class ChangedWorkers:
    """The workers that a change of pools concerns."""

    names: tuple[WorkerName, ...] = ()
    start: frozenset[WorkerName] = frozenset()
    """Those that start, or start again."""
    leave: frozenset[WorkerName] = frozenset()
    """Those that leave for good, by drain or because they don't run. A controller of an older build says neither."""
