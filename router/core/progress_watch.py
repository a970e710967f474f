"""A watch for stalls: for how long no request has advanced although there is work.

Workers' events count as progress and, between events, their steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinpool.contracts.clock import Clock
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.router.core.routed_requests import RoutedRequests
from twinpool.router.state.worker_table import WorkerKey


class ProgressWatch:
    """The time since any request of one router advanced."""

    def __init__(self, clock: Clock, requests: RoutedRequests) -> None:
        self._clock, self._requests = clock, requests
        self._advanced = clock.now()
        self._steps: dict[WorkerKey, int] = {}
        """Steps that each worker had made in the latest table."""

    @property
    def stalled_s(self) -> float:
        """Seconds since anything advanced while there is work; 0 without work."""
        return self._clock.now() - self._advanced if self._requests.in_flight else 0.0

    def advanced(self) -> None:
        """Note that a request has advanced, or that one has arrived when there was none."""
        self._advanced = self._clock.now()

    def on_view(self, views: Sequence[WorkerView], busy: Iterable[WorkerKey]) -> None:
        """Take in the controller's table; `busy` are the workers that have requests of this router.

        A long prompt takes many steps before its first event, so a step of a busy worker is progress. A step of another
        worker is not, as it computes for another router; nor is a restart, after which a worker counts anew.
        """
        steps = {(view.record.name, view.record.incarnation): view.status.steps for view in views}
        if any(steps.get(key, 0) > self._steps.get(key, steps.get(key, 0)) for key in busy):
            self.advanced()
        self._steps = steps
