"""The prefill scheduler: which requests are admitted, and which chunks of prompts the next step computes.

The order of admission is the one policy here: requests whose pages decode has granted come first, in order of arrival,
and may preempt others that have no grant yet, so whoever holds decode's memory always gets on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from contracts.clock import Clock
from contracts.config.worker_config import PrefillConfig
from engine.runner.batch import BatchRow, TokenDraw
from prefill.request import PrefillEvent, PrefillPhase, PrefillRequest
from prefill.request_pages import RequestPages
from worker.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next positions of one prompt, as a row of the step that computes them."""

    request: PrefillRequest
    row: BatchRow


class PrefillScheduler:
    """See the module's prose. `granted` says whether decode has granted pages to a request."""

    def __init__(
        self,
        requests: RequestTable[PrefillRequest],
        pages: RequestPages,
        granted: Callable[[PrefillRequest], bool],
        config: PrefillConfig,
        clock: Clock,
    ) -> None:
        self._requests, self._pages, self._granted = requests, pages, granted
        self._manager, self._page_tokens = pages.manager, pages.page_tokens
        self._config, self._clock = config, clock
        self.counters = {"preemptions": 0.0}

    # ------------------------------------------------------------ admission

    def admit(self) -> None:
        """Give pages to those who wait, as far as there are any."""
        waiting = [r for r in self._requests if r.phase is PrefillPhase.WAITING]
        running = [r for r in self._requests if r.phase is PrefillPhase.RUNNING]
        for request in sorted(waiting, key=lambda r: not self._entitled(r)):
            if len(running) >= self._config.max_running:
                return
            if self._waits_for_another(request, running):
                continue
            if request.prefetch is not None and not self._manager.may_run(request.prefetch):
                continue
            while not self._pages.take(request):
                if not (self._entitled(request) and self.preempt_youngest()):
                    return
                running = [r for r in running if r.phase is PrefillPhase.RUNNING]
            request.step(PrefillEvent.ADMIT)
            request.marks.setdefault("queue", self._clock.now() - request.arrived)
            running.append(request)

    def preempt_youngest(self) -> bool:
        """Send the youngest request without a grant back to waiting; False when there is none."""
        holders = [r for r in self._requests if r.allocation is not None and not self._entitled(r)]
        if not holders:
            return False
        self._pages.preempt(holders[-1])
        self.counters["preemptions"] += 1
        return True

    def _entitled(self, request: PrefillRequest) -> bool:
        """Whether decode waits for this request, with its memory."""
        return request.alone or self._granted(request)

    def _waits_for_another(self, request: PrefillRequest, running: list[PrefillRequest]) -> bool:
        """Whether one of `running` is about to compute pages that `request` can have from the tree afterwards.

        It waits for what they have in common and no longer, and until then that one is as urgent as `request` is
        (`PrefillRequest.left`), so waiting doesn't take longer than computing the same beside it.
        """
        for other in running if self._pages.reuse else ():
            assert other.allocation is not None
            most = min(self._pages.reusable(request), len(other.prefix))
            # Keys are chained: pages are in common up to the first that differs.
            common = bisect_left(range(most), True, key=lambda page: request.chain[page] != other.chain[page])
            end = common * self._page_tokens
            if end > max(other.shared, other.allocation.depth * self._page_tokens):
                other.awaited = end if not other.awaited > other.launched else min(end, other.awaited)
                return True
        return False

    # ------------------------------------------------------------ the next step

    def next_batch(self) -> list[ScheduledChunk]:
        """The step's chunks, in order of arrival: what of its token budget each request gets.

        A part of the budget (`prefill.short_share`) goes first to those who have less left to compute than the oldest,
        the least first, so that a short prompt doesn't wait for a long one. The rest goes to all in order of arrival:
        the oldest always has the other part, and whoever waits becomes the oldest. Chunks end at page boundaries, but
        where the prompt ends.
        """
        able = [
            r for r in self._requests if r.phase is PrefillPhase.RUNNING and r.allocation and r.launched < len(r.tokens)
        ]
        budget, size = self._config.chunk_tokens, self._page_tokens
        first = max(size, int(budget * self._config.short_share)) if budget >= 2 * size else 0
        shorter = sorted((r for r in able[1:] if r.left < able[0].left), key=lambda r: r.left)
        for request in shorter:
            first -= (count := self._plan(request, min(first, budget)))
            budget -= count
        for request in able:
            budget -= self._plan(request, budget)
        planned = [(request, request.planned - request.launched) for request in able]
        return [ScheduledChunk(request, self._row(request, count)) for request, count in planned if count]

    def _plan(self, request: PrefillRequest, most: int) -> int:
        """Plan up to `most` further positions of it for this step; returns how many."""
        size, planned = self._page_tokens, request.planned
        # Recurrent states are kept as they are at the last page boundary: a chunk ends there.
        boundary = request.last_boundary(size) if self._manager.stateful else 0
        whole = boundary if request.launched < boundary else len(request.tokens)
        if self._manager.stateful and request.awaited > request.launched:
            whole = min(whole, request.awaited)  # And those who wait for it go on from the state there.
        end = min(whole, planned + most)
        if end < whole and end // size * size > planned:
            end = end // size * size
        elif end < whole and most < self._config.chunk_tokens:
            return 0  # Less than a page, which a whole budget is the first to compute.
        if request.allocation is None or end <= planned:
            return 0
        request.planned = max(planned, self._manager.extend(request.allocation, end))
        return request.planned - planned

    def _row(self, request: PrefillRequest, count: int) -> BatchRow:
        start, end = request.launched, request.launched + count
        tokens, sampling = request.tokens, request.submit.sampling
        last = end == len(tokens)
        draw = TokenDraw(sampling, tokens, request.submit.prompt_len) if last and request.wants_draw else None
        follow = tokens[start + 1 : end + 1] if request.wants_scores else ()
        assert request.allocation is not None
        tables = self._manager.block_tables(request.allocation, start, end)
        full = tables.pop(self._manager.full)
        top = sampling.prompt_logprobs or 0
        return BatchRow(
            tokens[start:end], start, full.pages, draw, follow or None, top, epochs=full.epochs, others=tables
        )
