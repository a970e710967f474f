"""The prefill scheduler: which requests are admitted, and which chunks of prompts the next step computes.

The order of admission is the one policy here: requests to which decode has granted pages, and those that prefill
answers alone, come first; among them the ones of a higher priority, and then in order of arrival. They may preempt
requests that have no grant yet, so a request that holds decode's memory always gets on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.clock import Clock
from contracts.config.worker_config import PrefillConfig
from engine.runner.batch import BatchRow, TokenDraw
from engine.runner.sampling.token_mask import TokenMask
from prefill.request import PrefillEvent, PrefillPhase, PrefillRequest
from prefill.request_pages import PrefillPages
from worker.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next positions of one prompt, as a row of the step that computes them."""

    request: PrefillRequest
    row: BatchRow


class PrefillScheduler:
    """The admission and the batches of one prefill worker; see the module's prose. `granted` says whether decode has
    granted pages to a request."""

    def __init__(
        self,
        requests: RequestTable[PrefillRequest],
        pages: PrefillPages,
        granted: Callable[[PrefillRequest], bool],
        config: PrefillConfig,
        clock: Clock,
    ) -> None:
        self._requests, self._pages, self._granted = requests, pages, granted
        self._manager, self._page_tokens = pages.manager, pages.page_tokens
        self._config, self._clock = config, clock
        self.counters = {"preemptions": 0.0, "prefetches_given_up": 0.0}

    # ------------------------------------------------------------ admission

    def admit(self) -> None:
        """Give pages to waiting requests, as far as there are any, up to `prefill.max_running` requests in all."""
        waiting = [r for r in self._requests if r.phase is PrefillPhase.WAITING]
        running = [r for r in self._requests if r.phase is PrefillPhase.RUNNING]
        for request in sorted(waiting, key=lambda r: (not self._entitled(r), -r.submit.priority)):
            if len(running) >= self._config.max_running:
                return
            if self.waits(request, running):
                continue
            while not self._pages.take(request):
                if not (self._entitled(request) and self.preempt_youngest()) and not self.give_up_prefetch(waiting):
                    return
                running = [r for r in running if r.phase is PrefillPhase.RUNNING]
            self.begin(request)
            running.append(request)

    def waits(self, request: PrefillRequest, running: Sequence[PrefillRequest]) -> bool:
        """Whether `request` waits for something else than pages: for what one of `running` computes, or for reads from
        storage. It holds up no other meanwhile."""
        if self._waits_for_another(request, running):
            return True
        return request.prefetch is not None and not self._manager.tiers.prefetcher.may_run(request.prefetch)

    def begin(self, request: PrefillRequest) -> None:
        """Take a request that has its pages into the next steps."""
        request.step(PrefillEvent.ADMIT)
        request.marks.setdefault("queue", self._clock.now() - request.arrived)

    def preempt_youngest(self) -> bool:
        """Send the youngest request without a grant, of the lowest priority, back to waiting; False when there is
        none."""
        holders = [r for r in self._requests if r.allocation is not None and not self._entitled(r)]
        if not holders:
            return False
        self._pages.preempt(min(reversed(holders), key=lambda r: r.submit.priority))
        self.counters["preemptions"] += 1
        return True

    def give_up_prefetch(self, waiting: Sequence[PrefillRequest]) -> bool:
        """Let go of what was prefetched for the youngest of `waiting`, where nothing else will make room; False when
        there is nothing to let go of.

        Under `cache.write_policy: back`, pages of the device can't be evicted while the host is full and keeps pages
        below them: with nothing allocated and nothing being copied, prefetched pages are all that keeps them.
        """
        if len(self._manager.table) or self._manager.busy:
            return False
        holders = [r for r in waiting if r.phase is PrefillPhase.WAITING and r.prefetch is not None]
        if not holders:
            return False
        self._pages.release_prefetch(holders[-1])
        self.counters["prefetches_given_up"] += 1
        return True

    def _entitled(self, request: PrefillRequest) -> bool:
        """Whether the request comes first: decode holds memory for it, or prefill answers it alone."""
        return request.alone or self._granted(request)

    def _waits_for_another(self, request: PrefillRequest, running: Sequence[PrefillRequest]) -> bool:
        """Whether one of `running` is about to compute pages that `request` can have from the tree afterwards.

        `request` waits for the pages that both have in common and no longer. Until then the other one is as urgent as
        `request` is (`PrefillRequest.left`), so waiting takes no longer than computing the same pages beside it.
        """
        for other in running if self._pages.reuse else ():
            most = min(self._pages.reusable(request), len(other.prefix))
            # Keys are chained: pages are in common up to the first that differs.
            common = bisect_left(range(most), True, key=lambda page: request.chain[page] != other.chain[page])
            end = common * self._page_tokens
            if end > max(other.shared, other.held.depth * self._page_tokens):
                other.awaited = end if not other.awaited > other.launched else min(end, other.awaited)
                return True
        return False

    # ------------------------------------------------------------ the next step

    def next_batch(self, budget: int | None = None) -> list[ScheduledChunk]:
        """Divide the next step's token budget among the running requests; returns its chunks, the most urgent first.

        `budget`: tokens; None: `prefill.chunk_tokens`, as for every step that has nothing but chunks.
        A part of the budget (`prefill.short_share`) goes first to requests with less left to compute than the oldest of
        the highest priority, the least first, so that a short prompt doesn't wait for a long one of its priority. The
        rest goes to all by priority and in order of arrival: that oldest one always has the other part, and every
        request that waits becomes the oldest of its priority in time. Chunks end at page boundaries, except at the end
        of the prompt and where the whole budget is less than a page.
        """
        able = [
            r for r in self._requests if r.phase is PrefillPhase.RUNNING and r.allocation and r.launched < len(r.tokens)
        ]
        able.sort(key=lambda r: -r.submit.priority)
        whole = budget = self._config.chunk_tokens if budget is None else budget
        size = self._page_tokens
        first = max(size, int(budget * self._config.short_share)) if budget >= 2 * size else 0
        shorter = sorted((r for r in able[1:] if _overtakes(r, able[0])), key=lambda r: r.left)
        for request in shorter:
            first -= (count := self._plan(request, min(first, budget), whole))
            budget -= count
        for request in able:
            budget -= self._plan(request, budget, whole)
        planned = [(request, request.planned - request.launched) for request in able]
        return [ScheduledChunk(request, self._row(request, count)) for request, count in planned if count]

    def _plan(self, request: PrefillRequest, most: int, budget: int) -> int:
        """Plan up to `most` more positions of the request for this step, whose budget is `budget`; returns how many."""
        size, planned = self._page_tokens, request.planned
        # Recurrent states are kept as they are at the last page boundary: a chunk ends there.
        boundary = request.last_boundary(size) if self._manager.slots.stateful else 0
        whole = boundary if request.launched < boundary else len(request.tokens)
        if self._manager.slots.stateful and request.awaited > request.launched:
            whole = min(whole, request.awaited)  # Requests that wait for it go on from the state there.
        end = min(whole, planned + most)
        if end < whole and end // size * size > planned:
            end = end // size * size
        elif end < whole and most < budget:
            return 0  # Less than a page is left to a step with the whole budget for it.
        if request.allocation is None or end <= planned:
            return 0
        request.planned = max(planned, self._manager.growth.extend(request.allocation, end))
        return request.planned - planned

    def _row(self, request: PrefillRequest, count: int) -> BatchRow:
        start, end = request.launched, request.launched + count
        tokens, sampling = request.tokens, request.submit.sampling
        draw = None
        if end == len(tokens) and request.wants_draw:
            mask = TokenMask.allowed(sampling.allowed_token_ids)
            draw = TokenDraw(sampling, tokens, request.submit.prompt_len, mask=mask)
            if request.grammar is not None:
                draw = draw.masked(request.grammar.first)
        follow = tokens[start + 1 : end + 1] if request.wants_scores else ()
        tables = self._manager.growth.block_tables(request.held, start, end)
        top = sampling.prompt_logprobs or 0
        return BatchRow(tokens[start:end], start, tables, draw, follow or None, top)


def _overtakes(request: PrefillRequest, oldest: PrefillRequest) -> bool:
    """Whether a request gets a part of each step though `oldest` isn't done."""
    return request.left < oldest.left and request.submit.priority == oldest.submit.priority
