"""The step commit of prefill: launches a batch, and counts what it computed once that is known to be complete.

Nothing of a step counts before all state that was loaded for it is verified, and before its rows are known to have read
their own pages and to have finite logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from twinpool.cache.allocation import Allocation
from twinpool.cache.device.device_port import Completion
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.damage import DamageSite
from twinpool.contracts.errors import ErrorKind
from twinpool.engine.runner.batch import NONFINITE, RowOutput, StepHandle
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.prefill.handover import LayeredSends
from twinpool.prefill.request import PrefillPages, PrefillPhase, PrefillRequest, StepMember
from twinpool.prefill.scheduler import ScheduledChunk, StepCost
from twinpool.worker.request_table import RequestTable
from twinpool.worker.step_commit import NonfiniteRows, StepCommit

log = logging.getLogger("twinpool.prefill")
_STALE_LIMIT = 2
"""How often a request starts over because one of its pages was given away; the next time it is failed."""


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A chunk of this request is committed and sealed; `computed` is the completion of the step that computed it."""

    request: PrefillRequest
    computed: Completion


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """This request can't go on: the worker fails it with `kind` and `message`."""

    request: PrefillRequest
    kind: ErrorKind
    message: str


class PrefillStepCommit(StepCommit[PrefillRequest, StepMember]):
    """The steps of one prefill worker; see the module's prose."""

    log = log

    def __init__(
        self,
        requests: RequestTable[PrefillRequest],
        pages: PrefillPages,
        engine: ModelRunner,
        fitness: NonfiniteRows,
        config: Config,
        pause: Callable[[float], None],
        cost: StepCost,
    ) -> None:
        super().__init__(requests, pages, engine, fitness, config, pause)
        self._pages, self._cost = pages, cost

    def launch(self, batch: list[ScheduledChunk], layered: LayeredSends) -> None:
        """Launch the step that computes `batch`, and the sends of what it will have finished."""
        sends = layered.plan(batch)
        step = self._engine.launch([chunk.row for chunk in batch], sends.marks if sends is not None else None)
        if sends is not None:
            layered.post(sends, step)
        self.launched(step, batch)
        self._delay()

    def launched(self, step: StepHandle, batch: list[ScheduledChunk]) -> None:
        """Count the chunks of `batch` as launched; they are the rows of `step`, in order."""
        members = [StepMember(c.request, c.request.starts, len(c.row.tokens), step, c.row.start) for c in batch]
        self._overlap.launched(step, members)
        for chunk in batch:
            chunk.request.latest = step
        self._count_launched([chunk.request for chunk in batch])

    def landed(self, began: float, *, go_on: bool) -> Iterator[ChunkDone | ChunkFailed]:
        """Commit the steps that are complete; yields what came of each row.

        The caller must act on each outcome before it takes the next. `began`: when this round began, in seconds of the
        clock. `go_on`: another step was launched in this round, so the last one may be waited for later.
        """
        self.committed = False
        for results in self._overlap.landed(go_on=go_on):
            self.committed = True
            self.steps += 1
            self._measure([member for member, _ in results], self._clock.now() - began)
            self._prove([member for member, _ in results])
            # A request that ended or started over while this step was under way has no use for its result.
            yield from self._take(
                [(m, out) for m, out in results if m.request.phase is PrefillPhase.RUNNING and m.current]
            )

    def _measure(self, members: list[StepMember], seconds: float) -> None:
        """Take in how long a step took."""
        tokens = sum(member.count for member in members)
        self._manager.planner.computed(tokens, seconds)
        self._cost.saw(tokens, sum(m.count * (2 * m.begin + m.count) // 2 for m in members), seconds)

    def recover(self, invalid: list[Allocation]) -> None:
        """Restart the requests whose allocations are in `invalid`: state that was loaded for them is damaged, and isn't
        in the tree any more."""
        for request in [r for r in self._requests if r.allocation in invalid]:
            facts = {"request_id": request.submit.request_id, "attempt": request.submit.attempt}
            log.warning("it starts over, as a page loaded for it was damaged", extra=facts)
            self._pages.restart(request)

    def _prove(self, members: list[StepMember]) -> None:
        """Wait until all state that was loaded for these rows is verified, and restart requests for which it is
        damaged; before that, nothing of the step is committed."""
        for member in members:
            allocation = member.request.allocation
            if member.current and allocation is not None and not self._manager.allocations.ready(allocation):
                for completion in self._manager.allocations.completions(allocation):
                    completion.wait()
                self.recover(self._manager.poll())

    def _take(self, results: list[tuple[StepMember, RowOutput]]) -> Iterator[ChunkDone | ChunkFailed]:
        """Commit one step's results."""
        good = []
        for member, output in results:
            if output.stale:
                yield from self._stale(member.request)
            elif output.nonfinite:
                yield self._nonfinite(member.request)
            else:
                self._commit(member.request, member.count, output)
                good.append(member)
        self._seal([member.request for member in good])
        for member in good:
            yield ChunkDone(member.request, member.step.completion)

    def _commit(self, request: PrefillRequest, count: int, output: RowOutput) -> None:
        request.committed += count
        request.computed += count
        self.counters["prompt_tokens_computed"] += count
        request.scores += output.scores
        if output.embedding:
            request.embedding = output.embedding
        if output.drawn is not None:
            request.first = output.drawn

    def _stale(self, request: PrefillRequest) -> Iterator[ChunkFailed]:
        """Restart a request whose row found one of its pages given away, and fail it after `_STALE_LIMIT` restarts."""
        self._distrust(request, DamageSite.STEP)
        request.stale += 1
        if request.stale > _STALE_LIMIT:
            request.start_over()
            yield ChunkFailed(request, ErrorKind.WORKER, f"pages of it were given away {request.stale} times")
            return
        self._pages.restart(request)

    def _nonfinite(self, request: PrefillRequest) -> ChunkFailed:
        """Fail a request with non-finite logits: its state isn't trusted either, so none is kept or handed over."""
        self._distrust(request, DamageSite.LOGITS)
        return ChunkFailed(request, ErrorKind.NONFINITE, NONFINITE)

    def _seal(self, requests: list[PrefillRequest]) -> None:
        """Digest every page that the step finished, the partly filled last page of a prompt that is handed over too,
        and give the tree those that other requests can use already."""
        allocations = [(r.allocation, r.committed) for r in requests if r.allocation is not None]
        self._manager.finished.seal(allocations)
        for request, (allocation, committed) in zip(requests, allocations, strict=True):
            if committed == len(request.tokens):
                if not request.alone:  # Nothing of it is sent.
                    request.ends = self._manager.finished.end_digests(allocation, committed)
            else:
                self._manager.running.free_window_pages(allocation, committed)
                share = committed - request.shared >= self._config.prefill.share_tokens
                if share or 0 < request.awaited <= committed:
                    self._pages.cache(request)
                    request.awaited = 0
