"""The table of one router's requests that haven't ended, and of what each waits for.

The watch for stalls (`ProgressWatch`) knows for how long none of them has advanced although there is work. Workers'
events count as progress and, between events, their steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Sequence
from math import inf

from twinpool.contracts.clock import Clock
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.router.state.routed_request import RoutedRequest, RoutingPhase
from twinpool.router.state.worker_table import WorkerKey


class RoutedRequests:
    """All requests of one router, in order of arrival. `queued` requests wait for workers; `held` ones lack nothing but
    prefill's report."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, RoutedRequest] = {}
        self.get = self._requests.get
        """Returns a request by its id, None where it has ended; the dictionary's own method, as each event asks."""
        self.queued: dict[RequestId, RoutedRequest] = {}
        self.held: dict[RequestId, RoutedRequest] = {}
        self._first_deadline = inf
        """No request's deadline is earlier."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[RoutedRequest]:
        """Iterate over a copy, since the loop's body may end requests."""
        return iter(list(self._requests.values()))

    def due(self, now: float) -> list[RoutedRequest]:
        """The requests whose deadline is over, and all that are queued: in order of arrival. All are looked through
        only when a deadline may be over."""
        if now < self._first_deadline:
            return list(self.queued.values())
        over = [r for rid, r in self._requests.items() if now >= r.deadline or rid in self.queued]
        self._first_deadline = min((r.deadline for r in self._requests.values() if now < r.deadline), default=inf)
        return over

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def waiting(self) -> int:
        return len(self.queued)

    def ids(self) -> KeysView[RequestId]:
        return self._requests.keys()

    def those(self, ids: Iterable[RequestId]) -> list[RoutedRequest]:
        """The requests of these ids, sorted by id. Raises `KeyError` for a request that has ended."""
        return [self._requests[rid] for rid in sorted(ids)]

    def add(self, request: RoutedRequest) -> None:
        """Add a new request, queued for workers."""
        assert request.id not in self._requests, "request ids are minted once"
        self._requests[request.id] = request
        self.queued[request.id] = request
        self._first_deadline = min(self._first_deadline, request.deadline)

    def adopt(self, request: RoutedRequest) -> None:
        """Add a request that a worker has already: it waits for none."""
        assert request.id not in self._requests, "its former owner here has given it up"
        self._requests[request.id] = request
        self._first_deadline = min(self._first_deadline, request.deadline)

    def remove(self, request: RoutedRequest) -> None:
        """Remove a request that has ended."""
        del self._requests[request.id]
        self.queued.pop(request.id, None)
        self.held.pop(request.id, None)

    def check(self) -> list[str]:
        """Compare the table with the requests' phases; returns a line for each disagreement."""
        found = []
        for rid, r in self._requests.items():
            if (r.phase is RoutingPhase.WAITING) != (rid in self.queued):
                found.append(f"request {rid} is {r.phase} but {'in' if rid in self.queued else 'not in'} the queue")
            if r.phase is RoutingPhase.ENDED:
                found.append(f"request {rid} has ended and is still held")
        found += [f"{rid} is queued but not in flight" for rid in self.queued if rid not in self._requests]
        return found + [f"{rid} is held but not in flight" for rid in self.held if rid not in self._requests]


class ProgressWatch:
    """The time since any request of one router advanced."""

    def __init__(self, clock: Clock, requests: RoutedRequests) -> None:
        self._clock, self._requests = clock, requests
        self.at = clock.now()
        """When a request advanced last."""
        self._steps: dict[WorkerKey, int] = {}
        """Steps that each worker had made in the latest table."""

    @property
    def stalled_s(self) -> float:
        """Seconds since anything advanced while there is work; 0 without work."""
        return self._clock.now() - self.at if self._requests.in_flight else 0.0

    def advanced(self) -> None:
        """Note that a request has advanced, or that one has arrived when there was none."""
        self.at = self._clock.now()

    def on_view(self, views: Sequence[WorkerView], busy: Iterable[WorkerKey]) -> None:
        """Take in the controller's table; `busy` are the workers that have requests of this router.

        A long prompt takes many steps before its first event, so a step of a busy worker is progress. A step of another
        worker is not, as it computes for another router; nor is a restart, after which a worker counts anew.
        """
        steps = {(view.record.name, view.record.incarnation): view.status.steps for view in views}
        if any(steps.get(key, 0) > self._steps.get(key, steps.get(key, 0)) for key in busy):
            self.advanced()
        self._steps = steps
