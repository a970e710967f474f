"""Decisions under memory pressure: which requests are admitted, get a page for their next step, or are retracted.

Admission counts in pages of the full pool, the only one that a request takes more of as it goes on: pages of windows
and slots of recurrent states it has in full from its grant on. Room is what is free or only kept for reuse, less what
all requests that hold pages are expected to grow by; a request is admitted when its own pages, grown as expected, fit
into that. While no other request holds pages it is always admitted: a request that can't fit into an empty pool was
refused when it came.

At least one request always advances. A request that lacks a page for its step waits a round or two while others are
retracted, and at least one running request stays. A request that is alone and still lacks a page has some of its prefix
twice: other requests computed it as well, the tree kept their pages, and can't evict them above those that it took of
this request. It is retracted then, too: with no page of the tree locked there is room for all of it when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.decode.request.output_length import OutputLengths
from twinpool.decode.request.request import DecodeRequest
from twinpool.decode.retraction import retraction_policy as policy
from twinpool.decode.retraction.retraction import Retraction
from twinpool.decode.retraction.retraction_policy import RetractionCandidate


class MemoryPressure:
    """The decisions, which the scheduler carries out; see the module's prose."""

    def __init__(self, manager: KVCacheManager, retraction: Retraction, lengths: OutputLengths) -> None:
        self._manager, self._retraction, self._lengths = manager, retraction, lengths

    # ------------------------------------------------------------ admission

    def has_room_for(self, request: DecodeRequest, everybody: Iterable[DecodeRequest]) -> bool:
        """Whether `request`, new or retracted, may take pages beside the requests that hold some.

        `everybody`: all requests of the worker.
        """
        holders = [other for other in everybody if other.allocation is not None]
        if not holders:
            return True
        shared = self._manager.supply.kept_pages(request.prefix)
        wanted = self._expected_pages(request) - shared
        to_come = sum(max(0, self._expected_pages(other) - self._held(other)) for other in holders)
        return wanted <= self._manager.supply.free_pages(self._manager.full) - to_come

    def _expected_pages(self, request: DecodeRequest) -> int:
        """Return how many pages of the full pool the request is expected to come to."""
        if self._retraction.assured(request):
            return self._manager.pools.pages_for(request.positions)
        length = self._lengths.expected(request.generated, request.submit.sampling.max_tokens)
        at_least = max(len(request.submit.tokens), len(request.tokens)) + 1
        return self._manager.pools.pages_for(request.positions_for(max(at_least, request.submit.prompt_len + length)))

    def _held(self, request: DecodeRequest) -> int:
        """Return how many pages of the full pool the request has, or its room while the prompt is arriving."""
        granted = self._manager.pools.pages_for(request.positions_for(len(request.submit.tokens) + 1))
        return max(len(request.held.tables[self._manager.full]), granted)

    # ------------------------------------------------------------ steps

    def backed(self, able: Iterable[DecodeRequest], limit: int) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Give pages for one more position to up to `limit` of `able`, in turn; returns the requests with them, and the
        short.

        A request with steps under way isn't short: those steps may free a page of a window, or end it.
        """
        batch: list[DecodeRequest] = []
        short: list[DecodeRequest] = []
        for request in able:
            if len(batch) == limit:
                break
            if self._manager.growth.extend(request.held, request.planned + 1) > request.planned:
                batch.append(request)
            elif not request.under_way:
                short.append(request)
        return batch, short

    def choose_victims(self, short: Sequence[DecodeRequest], running: Iterable[DecodeRequest]) -> list[DecodeRequest]:
        """Return the requests to retract so that `short` ones can go on; none while pages are about to become free
        anyway."""
        if not short or self._retraction.leaving:
            return []
        candidates = [self._candidate(request) for request in running if self._may_go(request)]
        if len(candidates) == len(list(running)) and not self._alone():
            candidates.remove(max(candidates, key=policy.retract_first))
        chosen = policy.victims(candidates, len(short))
        if chosen:
            self._lengths.retracted()
        return chosen

    def shorter_than_needed(self) -> None:
        """Expect longer answers: a prompt had to be preempted for requests that run."""
        self._lengths.retracted()

    def _alone(self) -> bool:
        """Whether one request has all that is allocated, and no copy under way is about to free anything."""
        return len(self._manager.table) == 1 and not self._manager.busy

    def _may_go(self, request: DecodeRequest) -> bool:
        """Whether the request may be retracted: it took a step since it came back, and is below the limit."""
        return request.stepped and not self._retraction.assured(request)

    def _candidate(self, request: DecodeRequest) -> RetractionCandidate[DecodeRequest]:
        allocation, submit = request.held, request.submit
        pages = allocation.own(self._manager.full)
        return RetractionCandidate(
            request, submit.priority, request.generated, submit.prompt_len, request.arrived, pages
        )
