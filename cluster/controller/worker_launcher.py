"""The supervisor's interface to whatever starts and ends workers' processes.

Apart from `cluster.ray_nodes.worker_actors`, which imports Ray: Ray reads its environment when it is imported, and that
is set only once the flags are known.
"""

from __future__ import annotations

from typing import Protocol

from twinpool.cluster.controller.controller_actions import EndedProcess, PlacedProcess, WorkerKey
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, WorkerName


class WorkerLauncher(Protocol):
    """Starts and ends workers' processes for the supervisor. Used from one thread."""

    def start(
        self,
        plan: WorkerPlan,
        avoid: tuple[str, ...] = (),
        only: str = "",
        successor_of: Incarnation = NO_INCARNATION,
    ) -> None:
        """Start the process, or all ranks' processes, of a plan, on any node but those named by `avoid` (host names or
        Ray node ids), or on the one that `only` names. Doesn't wait.

        `successor_of`: an incarnation whose process waits to go on by this plan; one that can't is ended first.
        """

    def running(self) -> list[WorkerKey]:
        """The incarnations whose processes this launcher has started and has not seen end. Any thread."""

    def nodes(self) -> tuple[NodePlace, ...]:
        """The nodes that take workers."""

    def placed(self) -> list[PlacedProcess]:
        """Starts whose node has become known since the last call."""

    def kill(self, name: WorkerName, incarnation: Incarnation, pid: int, node: str) -> None: ...

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None:
        """Free the arenas that are kept for this worker's next incarnation; with `before`, only those that incarnations
        before that one left."""

    def ended(self, timeout_s: float) -> list[EndedProcess]:
        """Incarnations whose process has ended since the last call; waits up to `timeout_s` for the first."""

    def close(self) -> None:
        """End all processes. Idempotent."""
