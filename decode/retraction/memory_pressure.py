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

How long answers will be is learned from those that ended lately, for admission and for migration. Nobody knows how long
an answer will be: `max_tokens` is its limit, usually far above its length. To reserve that much for every request
leaves most of a pool empty; to reserve nothing admits more requests than can go on. So a request that has drawn `n`
tokens is expected to come to the given quantile of recent answers *of more than n tokens*, and never to more than its
`max_tokens`. As old answers are forgotten, the estimate follows the load.

An estimate that is too low costs retractions. So each of them raises the quantile, half of the way to the longest
answer seen, and each answer that ends lowers it a little, down to the given one. Before anything is known, an answer is
expected to come to a configured number of tokens, or to twice what it has: a request without `max_tokens` may have the
rest of the context, and to reserve that would admit a handful of the first requests and no more.

Whether a request is worth migrating depends on what is still to come of it, where too high an estimate is no better
than too low a one. For that, answers are taken to end without memory: whatever was generated, the mean of recent
answers is still to come.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.decode.request import DecodeRequest
from twinpool.decode.retraction import retraction_policy as policy
from twinpool.decode.retraction.retraction import Retraction
from twinpool.decode.retraction.retraction_policy import RetractionCandidate
from twinpool.worker.request_table import RequestTable

REMEMBERED = 256
"""Recent answers that the estimate is made of."""
KNOWN = 8
"""Answers that must have ended before the estimate goes by them; and of those, how many must be longer than a request
has got before it goes by their quantile."""
_CALM = 0.9
"""What is left of the raise of the quantile after each answer that ended."""


class OutputLengths:
    """The estimates of one worker; see the module's prose. All lengths are in tokens of the answer."""

    def __init__(self, quantile: float, first: int) -> None:
        """`quantile`: of recent lengths, 0 to 1. `first`: the expected length before anything is known."""
        self._base, self._first = quantile, first
        self._raised = 0.0
        self._lengths: deque[int] = deque()
        self._sorted: list[int] = []

    @property
    def quantile(self) -> float:
        """The quantile in use: the given one, raised by recent retractions."""
        return self._base + (1 - self._base) * self._raised

    def ended(self, length: int) -> None:
        """Record the length of an answer that has ended."""
        if len(self._lengths) == REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._lengths.popleft())]
        self._lengths.append(length)
        insort(self._sorted, length)
        self._raised *= _CALM

    def retracted(self) -> None:
        """Raise the quantile: requests had to be retracted, as the estimate was too low."""
        self._raised = (1 + self._raised) / 2

    def expected(self, generated: int, most: int) -> int:
        """Return the expected length of an answer of `generated` tokens so far, from `generated` to `most`."""
        if len(self._sorted) < KNOWN:
            return min(most, max(2 * generated, self._first))
        first = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - first
        if longer < KNOWN:
            # Longer than nearly all answers that were seen: it may well be half done.
            return min(most, max(2 * generated, self._sorted[-1]))
        return min(most, self._sorted[first + min(longer - 1, int(self.quantile * longer))])

    def to_come(self, most: int) -> float:
        """Return how many more tokens an answer is expected to get, where it may get `most` more."""
        known = len(self._lengths)
        return min(most, sum(self._lengths) / known) if known >= KNOWN else most


class MemoryPressure:
    """The decisions, which the scheduler carries out; see the module's prose."""

    def __init__(
        self,
        requests: RequestTable[DecodeRequest],
        manager: KVCacheManager,
        retraction: Retraction,
        lengths: OutputLengths,
    ) -> None:
        self._requests, self._manager, self._retraction, self._lengths = requests, manager, retraction, lengths

    # ------------------------------------------------------------ admission

    def has_room_for(self, request: DecodeRequest) -> bool:
        """Whether `request`, new or retracted, may take pages beside the requests that hold some."""
        holders = [other for other in self._requests if other.allocation is not None]
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
        return len(self._manager.allocations) == 1 and not self._manager.busy

    def _may_go(self, request: DecodeRequest) -> bool:
        """Whether the request may be retracted: it took a step since it came back, and is below the limit; or it is a
        background one, which goes on when nobody else is here."""
        return request.submit.background or (request.stepped and not self._retraction.assured(request))

    def _candidate(self, request: DecodeRequest) -> RetractionCandidate[DecodeRequest]:
        allocation, submit = request.held, request.submit
        pages = allocation.own(self._manager.full)
        return RetractionCandidate(
            request, submit.priority, request.generated, submit.prompt_len, request.arrived, pages
        )
