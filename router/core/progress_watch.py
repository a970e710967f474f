"""How long nothing has advanced although there is work: by the workers' events and, between those, their steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contracts.clock import Clock
from contracts.messages.worker_status import WorkerView
from router.core.routed_requests import RoutedRequests
from router.state.worker_table import WorkerKey


class ProgressWatch:
    """One router's."""

    def __init__(self, clock: Clock, requests: RoutedRequests) -> None:
        self._clock, self._requests = clock, requests
        self._advanced = clock.now()
        self._steps: dict[WorkerKey, int] = {}
        """That workers had made in the latest table."""

    @property
    def stalled_s(self) -> float:
        """Seconds since anything advanced while there is work; 0 without work."""
        return self._clock.now() - self._advanced if self._requests.in_flight else 0.0

    def advanced(self) -> None:
        """A request was brought on, or the first one has come."""
        self._advanced = self._clock.now()

    def on_view(self, views: Sequence[WorkerView], busy: Iterable[WorkerKey]) -> None:
        """Take the controller's table; `busy` have requests from here.

        A long prompt takes many steps before its first event. What workers compute for somebody else is no progress,
        nor is a start, from which they count anew.
        """
        steps = {(view.record.name, view.record.incarnation): view.status.steps for view in views}
        if any(steps.get(key, 0) > self._steps.get(key, steps.get(key, 0)) for key in busy):
            self.advanced()
        self._steps = steps
