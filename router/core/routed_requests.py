"""The requests of one router that haven't ended, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView

from contracts.ids import RequestId
from router.state.routed_request import RoutedRequest, RoutingPhase


class RoutedRequests:
    """All requests, in order of arrival. Those that wait for workers are queued; those that lack nothing but prefill's
    report are held."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, RoutedRequest] = {}
        self.queued: dict[RequestId, RoutedRequest] = {}
        self.held: dict[RequestId, RoutedRequest] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[RoutedRequest]:
        """Over those of this moment: what is done with one may end it."""
        return iter(list(self._requests.values()))

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    @property
    def waiting(self) -> int:
        return len(self.queued)

    def ids(self) -> KeysView[RequestId]:
        return self._requests.keys()

    def get(self, request_id: RequestId) -> RoutedRequest | None:
        return self._requests.get(request_id)

    def those(self, ids: Iterable[RequestId]) -> list[RoutedRequest]:
        """Those of these ids, in the order of the ids. Raises `KeyError` for one that has ended."""
        return [self._requests[rid] for rid in sorted(ids)]

    def add(self, request: RoutedRequest) -> None:
        """A new request, which waits for workers."""
        assert request.id not in self._requests, "request ids are minted once"
        self._requests[request.id] = request
        self.queued[request.id] = request

    def remove(self, request: RoutedRequest) -> None:
        """The request has ended."""
        del self._requests[request.id]
        self.queued.pop(request.id, None)
        self.held.pop(request.id, None)

    def check(self) -> list[str]:
        """What of the table doesn't agree with the requests' phases."""
        found = []
        for rid, r in self._requests.items():
            if (r.phase is RoutingPhase.WAITING) != (rid in self.queued):
                found.append(f"request {rid} is {r.phase} but {'in' if rid in self.queued else 'not in'} the queue")
            if r.phase is RoutingPhase.ENDED:
                found.append(f"request {rid} has ended and is still held")
        found += [f"{rid} is queued but not in the house" for rid in self.queued if rid not in self._requests]
        return found + [f"{rid} is held but not in the house" for rid in self.held if rid not in self._requests]
