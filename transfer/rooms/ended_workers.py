"""Ended workers: incarnations of peers that have ended for the controller.

Its word is no proof that such a worker's processes write no more: a lease that ended is kept by the thread that steps
the worker, and not by what is already on its way, or by a process that stood still and goes on. So it ends quarantine
only where access is ended besides: a plane that is revocable, or one on which the peer's own access is taken away. A
peer on this host is proven dead by its pidfd (hazard A5), or it has *closed*: its process goes on in another role, and
has said, once it had ended its threads and unmapped the memory of others, that it holds nothing of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.worker_status import EndedWorker


class EndedWorkers:
    """The latest incarnation of each worker that has ended, as far as this worker has heard."""

    def __init__(self) -> None:
        self._latest: dict[WorkerName, Incarnation] = {}
        self._closed: dict[WorkerName, tuple[Incarnation, Incarnation]] = {}
        """The first and last incarnation that the latest process that closed any has closed."""

    def update(self, ended: Sequence[EndedWorker]) -> None:
        """Take in what the controller says. A later word with a smaller number changes nothing."""
        for one in ended:
            if one.closed_from and one.incarnation >= self._latest.get(one.name, 0):
                self._closed[one.name] = one.closed_from, one.incarnation
            self._latest[one.name] = max(one.incarnation, self._latest.get(one.name, one.incarnation))

    def covers(self, name: WorkerName, incarnation: Incarnation) -> bool:
        """Whether this incarnation has ended."""
        return incarnation <= self._latest.get(name, 0)

    def closed(self, name: WorkerName, incarnation: Incarnation) -> bool:
        """Whether this incarnation has ended in a process that lives on and holds nothing of it any more."""
        first, last = self._closed.get(name, (1, 0))
        return first <= incarnation <= last

    @staticmethod
    def reason(name: WorkerName, incarnation: Incarnation) -> str:
        """Why its rooms end, in words."""
        return f"{name}, incarnation {incarnation}, has ended, as the controller says"
