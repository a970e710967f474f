"""What starts and ends workers' processes, as the supervisor sees it.

Apart from `actors`, which imports Ray: Ray reads its environment when it is imported, and that is set only once the
flags are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.controller.controller import NodePlace
from cluster.worker_process.worker_plan import WorkerPlan
from contracts.ids import Incarnation, WorkerName


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """An incarnation whose process is gone."""

    name: WorkerName
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerPlaced:
    """An incarnation whose process runs on a node by now."""

    name: WorkerName
    incarnation: Incarnation
    node: NodePlace


class WorkerLauncher(Protocol):
    """Starts and ends workers' processes; the supervisor's hands."""

    def start(self, plan: WorkerPlan, avoid: tuple[str, ...] = ()) -> None:
        """Start it on any node but those named by `avoid` (host names or Ray node ids)."""

    def nodes(self) -> tuple[NodePlace, ...]:
        """The nodes that it can start workers on."""

    def placed(self) -> list[WorkerPlaced]:
        """Starts whose node has become known since the last call."""

    def kill(self, name: WorkerName, incarnation: Incarnation, pid: int, node: str) -> None: ...

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None:
        """What is kept of this worker for a successor may go: all of it, or what incarnations before this one left."""

    def ended(self, timeout_s: float) -> list[WorkerEnded]:
        """Processes that have ended since the last call; waits up to `timeout_s` for the first."""

    def close(self) -> None:
        """End all processes. Idempotent."""
