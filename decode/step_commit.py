"""The step commit of decode: launches a batch, and counts what it drew once that is known to be complete.

Every row computes the position of its request's last token, and those of its drafts, and draws what comes behind each.
What a row drew counts only where it read the request's own pages and its logits are finite.

Where a grammar says what may be drawn, it has to know all tokens before. So a step with such a row is begun, which
computes its logits; while it runs, the step before it is committed and the masks are made; and then it is drawn.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twinpool.cache.allocation import Allocation
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.damage import DamageSite
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.worker_events import Tokens
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.decode.drafting import Drafting
from twinpool.decode.request import STEPPING, DecodePages, DecodeRequest, RequestFailed, RequestFinished
from twinpool.engine.runner.batch import (
    NONFINITE,
    BatchRow,
    RowOutput,
    StepHandle,
    TokenDraw,
    TokenFromStep,
)
from twinpool.engine.runner.launched_step import LaunchedStep
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output.grammar_engine import GrammarError, GrammarMatcher
from twinpool.worker.request_table import RequestGate, RequestTable
from twinpool.worker.step_commit import NonfiniteRows, StepCommit

log = logging.getLogger("twinpool.decode")


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step whose tokens are still to be drawn: `mine` is its part of the rows of `batch`, which come first."""

    step: LaunchedStep
    mine: StepHandle
    batch: list[DecodeRequest]


class Masked(NamedTuple):
    """A request of a step, and the number of its first draw there."""

    request: DecodeRequest
    first: int


class DecodeStepCommit(StepCommit[DecodeRequest, DecodeRequest]):
    """The steps of one decode worker; see the module's prose."""

    log = log

    def __init__(
        self,
        requests: RequestTable[DecodeRequest],
        pages: DecodePages,
        engine: ModelRunner,
        fitness: NonfiniteRows,
        config: Config,
        pause: Callable[[float], None],
        drafting: Drafting,
        grammars: RequestGate,
    ) -> None:
        super().__init__(requests, pages, engine, fitness, config, pause)
        self._pages, self._drafting, self._grammars = pages, drafting, grammars
        self._begun: BegunStep | None = None
        """The step of this round, where its draw waits for masks."""
        self.counters |= {"tokens_generated": 0.0}
        self._sizes: deque[tuple[int, float]] = deque()
        """Of steps under way: positions, and when each was launched, in seconds of the clock; 0 positions of one that
        has prompts, too."""
        self._landed_at = 0.0

    # ------------------------------------------------------------ launch

    def launch(self, batch: list[DecodeRequest]) -> None:
        """Launch the step of a batch."""
        step = self.begin(batch)
        self.launched(step, step, batch)
        self._delay()

    def begin(self, batch: list[DecodeRequest], others: Sequence[BatchRow] = ()) -> LaunchedStep:
        """Launch a step of one row for each request, and `others` behind them; where a grammar has to say what may be
        drawn, it is begun, and `landed` draws it."""
        rows = [self._row(request) for request in batch]
        size, at = 0 if others else sum(len(row.tokens) for row in rows), self._clock.now()
        rows += others
        step = self._engine.begin(rows) if _masked(batch) else self._engine.launch(rows)
        self._sizes.append((size, at))
        return step

    def launched(self, step: LaunchedStep, mine: StepHandle, batch: list[DecodeRequest]) -> None:
        """Count the requests of `batch` as launched: their rows are the first of `step`, and all of `mine`."""
        if _masked(batch):
            self._begun = BegunStep(step, mine, batch)
        else:
            self._overlap.launched(mine, batch)
        for number, request in enumerate(batch):
            request.latest = TokenFromStep(step, number)
        self._count_launched(batch)

    def _row(self, request: DecodeRequest) -> BatchRow:
        at, submit, drafts, history = request.launched, request.submit, request.drafts, request.history
        assert request.allocation is not None, "a request of a batch has its pages"
        end = at + 1 + len(drafts)
        tables = self._manager.running.block_tables(request.allocation, at, end)
        draw = TokenDraw(submit.sampling, () if history is None else history, submit.prompt_len, end, request.mask)
        tokens: Sequence[int] | TokenFromStep = [request.tokens[-1], *drafts]
        if at > request.committed and request.latest is not None:
            assert not drafts, "drafts follow from tokens that are known"
            tokens = request.latest
        return BatchRow(
            tokens,
            at,
            tables,
            draw,
            drafted=len(drafts),
            adapter=submit.sampling.adapter,
            turned=request.turned,
            routed=submit.sampling.routed_experts,
        )

    # ------------------------------------------------------------ commit

    def landed(self, *, go_on: bool) -> Iterator[RequestFinished | RequestFailed]:
        """Commit the steps that are complete, row by row: what a row drew is emitted for its router, and the requests
        that it ends are yielded.

        The caller must act on each outcome before it takes the next. `go_on`: another step was launched in this round,
        so the last one may be waited for later.
        """
        self.committed = False
        begun, self._begun = self._begun, None
        if begun is not None:
            for results in self._overlap.all_landed():
                yield from self._commit_step(results)
            yield from self._draw(begun)
        for results in self._overlap.landed(go_on=go_on):
            yield from self._commit_step(results)

    def _draw(self, begun: BegunStep) -> Iterator[RequestFailed]:
        """Draw a step that was begun, with the masks of its rows. Yields the requests whose grammar has no mask."""
        masks, wanted, places = dict[int, TokenMask](), list[tuple[GrammarMatcher, Sequence[int]]](), list[Masked]()
        number = 0
        failed: list[RequestFailed] = []
        for request in begun.batch:
            drafts = request.drafts
            # One that has ended meanwhile has no use for what is drawn.
            if request.grammar is not None and request.stepping:
                try:
                    wanted.append((request.grammar.behind(request.answer), drafts))
                    places.append(Masked(request, number))
                except GrammarError as error:
                    failed.append(RequestFailed(request, ErrorKind.GRAMMAR, f"the grammar can't be followed: {error}"))
            number += 1 + len(drafts)
        for (request, first), made in zip(places, self._grammars.masks(wanted) if wanted else (), strict=True):
            if isinstance(made, GrammarError):
                failed.append(RequestFailed(request, ErrorKind.GRAMMAR, f"the grammar can't be followed: {made}"))
            else:
                masks.update(enumerate(made, first))
        self._engine.draw(begun.step, masks)
        self._overlap.launched(begun.mine, begun.batch)
        yield from failed

    def _commit_step(
        self, results: Sequence[tuple[DecodeRequest, RowOutput]]
    ) -> Iterator[RequestFinished | RequestFailed]:
        self.committed = True
        self.steps += 1
        positions, launched_at = self._sizes.popleft()
        began, self._landed_at = max(launched_at, self._landed_at), self._clock.now()
        if positions:
            self._drafting.saw(positions, self._landed_at - began)
        for request, output in results:
            # A request that ended while this step was under way has no use for what it drew.
            if request.phase in STEPPING and (outcome := self._commit(request, output)) is not None:
                yield outcome

    def _sure(self, request: DecodeRequest) -> bool:
        return not request.drafts

    def recover(self, invalid: list[Allocation]) -> list[RequestFailed]:
        """Fail the requests whose allocations are in `invalid`: state that was loaded for them is damaged.

        Their next attempts find that state gone from the tree, and are sent all of it.
        """
        if not invalid:
            return []
        damaged = [r for r in self._requests if r.allocation in invalid]
        return [RequestFailed(r, ErrorKind.DAMAGED, "a page loaded for it was damaged") for r in damaged]

    def _commit(self, request: DecodeRequest, output: RowOutput) -> RequestFinished | RequestFailed | None:
        """Count what a row drew and emit it; returns the request's end, if that was its last step."""
        if output.stale:
            return self._stale(request)
        if output.nonfinite:
            return self._nonfinite(request)
        assert output.drawn is not None
        submit, sampling, before = request.submit, request.submit.sampling, len(request.tokens)
        left, stops = sampling.max_tokens - (before - submit.prompt_len), sampling.stop_token_ids
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        for token, logprob in (*output.accepted, output.drawn):
            tokens.append(token)
            if logprob is not None:
                logprobs.append(logprob)
            if token in stops or len(tokens) == left:
                break  # What is drawn behind the answer's end isn't part of it.
        if request.committed < len(submit.tokens):
            request.computed += 1
            self.counters["prompt_tokens_computed"] += 1
        self.counters["tokens_generated"] += len(tokens)
        event = Tokens(submit.request_id, submit.attempt, before, tuple(tokens), tuple(logprobs))
        request.commit(tokens, logprobs)
        if self._manager.kinds.windows and request.allocation is not None:
            self._manager.running.free_window_pages(request.allocation, request.committed)
        if "first_step" not in request.marks:
            request.marks["first_step"] = self._clock.now() - request.arrived
        self._requests.emit(request.session, event)
        if request.drafts:
            self._drafting.landed(request, len(output.accepted))
        if tokens[-1] in stops:
            return RequestFinished(request, "stop", tokens[-1])
        return RequestFinished(request, "length", None) if len(tokens) == left else None

    def _stale(self, request: DecodeRequest) -> RequestFailed:
        """Fail a request whose row found one of its pages given away: the token is dropped, the tree forgets what it
        has of the prompt, and the router starts another attempt."""
        self._distrust(request, DamageSite.STEP)
        return RequestFailed(request, ErrorKind.WORKER, "a step found a page of it given away")

    def _nonfinite(self, request: DecodeRequest) -> RequestFailed:
        """Fail a request with non-finite logits: no token is drawn from them, and its state isn't kept for others."""
        self._distrust(request, DamageSite.LOGITS)
        return RequestFailed(request, ErrorKind.NONFINITE, NONFINITE)


def _masked(batch: Sequence[DecodeRequest]) -> bool:
    """Whether a grammar says what may be drawn, for any of these requests."""
    return bool([request for request in batch if request.grammar is not None])
