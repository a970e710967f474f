"""Pages for those who run: who can be admitted, who gets a page for its next step, and who leaves when there is none.

Admission counts in pages of the full pool, the only one that a request takes more of as it goes on: windows and
recurrent states it has in full from its grant on. Room is what is free or only kept for reuse, less what all who hold
pages are expected to grow by; a request is let in when its own pages, grown as expected, fit into that. Alone it is
always let in: what can't fit into an empty pool was refused when it came.

At least one request always advances. Whoever lacks a page for its step waits a round or two while others leave, and one
who isn't assured of all its pages always stays: with everybody else gone, all pages are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.manager.kv_cache_manager import KVCacheManager
from contracts.config.worker_config import DecodeConfig
from decode.request.output_length import OutputLengths
from decode.request.request import DecodeRequest
from decode.retraction import retraction_policy as policy
from decode.retraction.retraction import Retraction
from decode.retraction.retraction_policy import RetractionCandidate


class MemoryPressure:
    """See the module's prose. Decides; the worker does it."""

    def __init__(self, manager: KVCacheManager, config: DecodeConfig, retraction: Retraction) -> None:
        self._manager, self._retraction = manager, retraction
        self.output_lengths = OutputLengths(config.output_length_quantile, config.first_answer_tokens)

    # ------------------------------------------------------------ admission

    def has_room_for(self, request: DecodeRequest, everybody: Iterable[DecodeRequest]) -> bool:
        """Whether `request`, new or retracted, may take pages beside those who hold some."""
        holders = [other for other in everybody if other.allocation is not None]
        if not holders:
            return True
        shared = self._manager.kept_pages(request.prefix)
        wanted = self._expected_pages(request) - shared
        to_come = sum(max(0, self._expected_pages(other) - self._held(other)) for other in holders)
        return wanted <= self._manager.free_pages(self._manager.full) - to_come

    def _expected_pages(self, request: DecodeRequest) -> int:
        """Full pages that it will come to, as far as one can tell."""
        if self._retraction.assured(request):
            return self._manager.pools.pages_for(request.positions)
        length = self.output_lengths.expected(request.generated, request.submit.sampling.max_tokens)
        at_least = max(len(request.submit.tokens), len(request.tokens)) + 1
        return self._manager.pools.pages_for(request.positions_for(max(at_least, request.submit.prompt_len + length)))

    def _held(self, request: DecodeRequest) -> int:
        """Full pages that it has: of one that is arriving, the room does."""
        assert request.allocation is not None
        granted = self._manager.pools.pages_for(request.positions_for(len(request.submit.tokens) + 1))
        return max(len(request.allocation.tables[self._manager.full]), granted)

    # ------------------------------------------------------------ steps

    def backed(self, able: Iterable[DecodeRequest], limit: int) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Give pages for one more position to up to `limit` of `able`, in turn: who has them, and who is short.

        Who has steps under way isn't short: those may leave a page of a window, or end it.
        """
        batch: list[DecodeRequest] = []
        short: list[DecodeRequest] = []
        for request in able:
            if len(batch) == limit:
                break
            assert request.allocation is not None
            if self._manager.extend(request.allocation, request.planned + 1) > request.planned:
                batch.append(request)
            elif not request.under_way:
                short.append(request)
        return batch, short

    def choose_victims(self, short: Sequence[DecodeRequest], running: Iterable[DecodeRequest]) -> list[DecodeRequest]:
        """Who leaves so that those who are short can go on: nobody while pages are about to become free anyway."""
        if not short or self._retraction.leaving:
            return []
        candidates = [self._candidate(request) for request in running if self._may_go(request)]
        if len(candidates) == len(list(running)):
            candidates.remove(max(candidates, key=policy.retract_first))
        chosen = policy.victims(candidates, len(short))
        if chosen:
            self.output_lengths.retracted()
        return chosen

    def _may_go(self, request: DecodeRequest) -> bool:
        """Whether it took a step since it came back, and may be retracted once more."""
        return request.stepped and not self._retraction.assured(request)

    def _candidate(self, request: DecodeRequest) -> RetractionCandidate[DecodeRequest]:
        allocation, submit = request.allocation, request.submit
        assert allocation is not None
        pages = allocation.own(self._manager.full)
        return RetractionCandidate(
            request, submit.priority, request.generated, submit.prompt_len, request.arrived, pages
        )
