"""Ended workers: incarnations of peers that have ended for the controller.

Its word is no proof that such a worker's processes write no more: a lease that ended is kept by the thread that steps
the worker, and not by what is already on its way, or by a process that stood still and goes on. So it ends quarantine
only where access is ended besides: a plane that is revocable, or one on which the peer's own access is taken away. A
peer on this host is proven dead by its pidfd, and by nothing else (hazard A5).
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts.ids import Incarnation, WorkerName
from contracts.messages.worker_status import EndedWorker


class EndedWorkers:
    """The latest incarnation of each worker that has ended, as far as this worker has heard."""

    def __init__(self) -> None:
        self._latest: dict[WorkerName, Incarnation] = {}

    def update(self, ended: Sequence[EndedWorker]) -> None:
        """Take in what the controller says. A later word with a smaller number changes nothing."""
        for one in ended:
            self._latest[one.name] = max(one.incarnation, self._latest.get(one.name, one.incarnation))

    def covers(self, name: WorkerName, incarnation: Incarnation) -> bool:
        """Whether this incarnation has ended."""
        return incarnation <= self._latest.get(name, 0)

    @staticmethod
    def reason(name: WorkerName, incarnation: Incarnation) -> str:
        """Why its rooms end, in words."""
        return f"{name}, incarnation {incarnation}, has ended, as the controller says"
