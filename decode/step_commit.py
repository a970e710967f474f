"""The step commit of decode: launches a batch, and counts what it drew once that is known to be complete.

Every row computes the position of its request's last token, and those of its drafts, and draws what comes behind each.
What a row drew counts only where it read the request's own pages and its logits are finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from cache.allocation.allocation import Allocation
from contracts.clock import Clock
from contracts.config.cluster_config import Config
from contracts.damage import DamageSite, log_damage
from contracts.errors import ErrorKind
from contracts.messages.worker_events import Tokens
from decode.request.request import DecodeRequest
from decode.request.request_outcomes import RequestFailed, RequestFinished, RouterEvent
from decode.request.request_pages import DecodePages
from decode.speculation.drafting import Drafting
from engine.runner.batch import NONFINITE, BatchRow, DrawnToken, RowOutput, StepHandle, TokenDraw, TokenFromStep
from engine.runner.model_runner import ModelRunner
from worker.nonfinite_rows import NonfiniteRows
from worker.request_table import RequestTable
from worker.step_overlap import StepOverlap

log = logging.getLogger("twinpool.decode")


class DecodeStepCommit:
    """The steps of one decode worker; see the module's prose. `pause(seconds)` sleeps, for `faults.step_delay_s`."""

    def __init__(
        self,
        requests: RequestTable[DecodeRequest],
        pages: DecodePages,
        engine: ModelRunner,
        fitness: NonfiniteRows,
        drafting: Drafting,
        config: Config,
        clock: Clock,
        pause: Callable[[float], None],
    ) -> None:
        self._requests, self._pages, self._engine, self._fitness = requests, pages, engine, fitness
        self._drafting = drafting
        self._manager, self._config, self._clock, self._pause = pages.manager, config, clock, pause
        self._overlap = StepOverlap[DecodeRequest]()
        self.committed = False
        """Whether the last round committed a step: then the next round may have pages for a waiting request."""
        self.steps = 0
        self.counters = {
            "prompt_tokens_computed": 0.0,
            "tokens_generated": 0.0,
            "tokens_drafted": 0.0,
            "drafts_accepted": 0.0,
            "stale_pages": 0.0,
        }

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._overlap)

    def drop(self) -> None:
        """Wait for the steps under way and drop their results: the worker closes."""
        self._overlap.drop()

    # ------------------------------------------------------------ launch

    def launch(self, batch: list[DecodeRequest]) -> None:
        step = self._engine.launch(self.rows(batch))
        self.launched(step, step, batch)
        if self._config.faults.step_delay_s:
            self._pause(self._config.faults.step_delay_s)

    def rows(self, batch: list[DecodeRequest]) -> list[BatchRow]:
        """Return the rows of a step, one a request."""
        return [self._row(request) for request in batch]

    def launched(self, step: StepHandle, mine: StepHandle, batch: list[DecodeRequest]) -> None:
        """Count the requests of `batch` as launched: their rows are the first of `step`, and all of `mine`."""
        self._overlap.launched(mine, batch)
        for number, request in enumerate(batch):
            request.launched = request.planned
            request.latest = TokenFromStep(step, number)
            boundary = request.launched % self._pages.page_tokens == 0
            if self._manager.slots.stateful and request.allocation is not None and boundary:
                self._manager.slots.snapshot(request.allocation, request.launched)

    def _row(self, request: DecodeRequest) -> BatchRow:
        at, sampling, drafts = request.launched, request.submit.sampling, request.drafts
        end = at + 1 + len(drafts)
        tables = self._manager.growth.block_tables(request.held, at, end)
        draw = TokenDraw(sampling, request.history or (), request.submit.prompt_len, end, request.mask)
        if request.under_way and request.latest is not None:
            assert not drafts, "drafts follow from tokens that are known"
            return BatchRow(request.latest, at, tables, draw)
        return BatchRow([request.tokens[-1], *drafts], at, tables, draw, drafted=len(drafts))

    # ------------------------------------------------------------ commit

    def landed(self, *, go_on: bool) -> Iterator[RouterEvent | RequestFinished | RequestFailed]:
        """Commit the steps that are complete, row by row; yields what came of each row.

        The caller must act on each outcome before it takes the next. `go_on`: another step was launched in this round,
        so the last one may be waited for later.
        """
        self.committed = False
        for results in self._overlap.landed(go_on=go_on):
            self.committed = True
            self.steps += 1
            for request, output in results:
                # A request that ended while this step was under way has no use for what it drew.
                if request.stepping:
                    yield from self._take(request, output)

    def recover(self, invalid: list[Allocation]) -> Iterator[RequestFailed]:
        """Fail the requests whose allocations are in `invalid`: state that was loaded for them is damaged.

        Their next attempts find that state gone from the tree, and are sent all of it.
        """
        for request in [r for r in self._requests if r.allocation in invalid]:
            yield RequestFailed(request, ErrorKind.DAMAGED, "a page loaded for it was damaged")

    def _take(
        self, request: DecodeRequest, output: RowOutput
    ) -> Iterator[RouterEvent | RequestFinished | RequestFailed]:
        if output.stale:
            yield self._stale(request)
            return
        if output.nonfinite:
            yield self._nonfinite(request)
            return
        assert output.drawn is not None
        sampling, drawn = request.submit.sampling, [*output.accepted, output.drawn]
        # What is drawn behind the answer's end isn't part of it.
        stop = next((n for n, one in enumerate(drawn) if one.token in sampling.stop_token_ids), len(drawn))
        drawn = drawn[: min(stop + 1, sampling.max_tokens - request.generated)]
        yield self._commit(request, drawn)
        if request.drafts:
            self.counters["tokens_drafted"] += len(request.drafts)
            self.counters["drafts_accepted"] += len(output.accepted)
            self._drafting.landed(request, len(output.accepted))
        last = drawn[-1].token
        if last in sampling.stop_token_ids:
            yield RequestFinished(request, "stop", last)
        elif request.generated >= sampling.max_tokens:
            yield RequestFinished(request, "length", None)

    def _commit(self, request: DecodeRequest, drawn: Sequence[DrawnToken]) -> RouterEvent:
        submit = request.submit
        computed = int(request.committed < len(submit.tokens))
        request.computed += computed
        self.counters["prompt_tokens_computed"] += computed
        self.counters["tokens_generated"] += len(drawn)
        logprobs = tuple(one.logprob for one in drawn if one.logprob is not None)
        tokens = tuple(one.token for one in drawn)
        event = Tokens(submit.request_id, submit.attempt, len(request.tokens), tokens, logprobs)
        request.commit(tokens)
        if request.allocation is not None:
            self._manager.growth.free_window_pages(request.allocation, request.committed)
        if "first_step" not in request.marks:
            request.marks["first_step"] = self._clock.now() - request.arrived
        return RouterEvent(request.session, event)

    def _stale(self, request: DecodeRequest) -> RequestFailed:
        """Fail a request whose row found one of its pages given away: the token is dropped, the tree forgets what it
        has of the prompt, and the router starts another attempt."""
        self.counters["stale_pages"] += 1
        self._log(DamageSite.STEP, request)
        self._pages.distrust(request)
        return RequestFailed(request, ErrorKind.WORKER, "a step found a page of it given away")

    def _nonfinite(self, request: DecodeRequest) -> RequestFailed:
        """Fail a request with non-finite logits: no token is drawn from them, and its state isn't kept for others."""
        self._fitness.nonfinite()
        self._log(DamageSite.LOGITS, request)
        self._pages.distrust(request)
        return RequestFailed(request, ErrorKind.NONFINITE, NONFINITE)

    def _log(self, site: DamageSite, request: DecodeRequest) -> None:
        log_damage(log, site, request=request.submit.request_id, positions=[request.committed, request.launched])
