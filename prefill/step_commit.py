"""The commit of prefill's steps: a batch is launched, and what it computed counts once it is known to be complete.

Nothing of a step counts before all that was loaded for it has proved good, and before its rows are known to have read
their own pages and to have come to numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cache.allocation.allocation import Allocation
from cache.device.device_port import Completion
from contracts.clock import Clock
from contracts.config.cluster_config import Config
from contracts.damage import DamageSite, log_damage
from contracts.errors import ErrorKind
from engine.runner.batch import NONFINITE, RowOutput
from engine.runner.model_runner import ModelRunner
from prefill.request import PrefillPhase, PrefillRequest, StepMember
from prefill.request_pages import RequestPages
from prefill.scheduler import ScheduledChunk
from worker.nonfinite_rows import NonfiniteRows
from worker.request_table import RequestTable
from worker.step_overlap import StepOverlap

log = logging.getLogger("twinpool.prefill")
_STALE_LIMIT = 2
"""How often a request starts over because a page of it was given away, before it is failed."""


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A chunk of this request is committed and sealed; `computed` is the step behind it."""

    request: PrefillRequest
    computed: Completion


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """This request can't go on."""

    request: PrefillRequest
    kind: ErrorKind
    message: str


class PrefillStepCommit:
    """See the module's prose. `pause` sleeps through `faults.step_delay_s`."""

    def __init__(
        self,
        requests: RequestTable[PrefillRequest],
        pages: RequestPages,
        engine: ModelRunner,
        fitness: NonfiniteRows,
        config: Config,
        clock: Clock,
        pause: Callable[[float], None],
    ) -> None:
        self._requests, self._pages, self._engine, self._fitness = requests, pages, engine, fitness
        self._manager, self._config, self._clock, self._pause = pages.manager, config, clock, pause
        self._overlap = StepOverlap[StepMember]()
        self.committed = False
        """Whether the last round committed something: then the next may have room for somebody."""
        self.steps = 0
        self.counters = {"prompt_tokens_computed": 0.0, "stale_pages": 0.0}

    def __len__(self) -> int:
        """Steps under way."""
        return len(self._overlap)

    def drop(self) -> None:
        """Wait for no step any more: the worker closes."""
        self._overlap.drop()

    def launch(self, batch: list[ScheduledChunk]) -> None:
        step = self._engine.launch([chunk.row for chunk in batch])
        members = [StepMember(c.request, c.request.starts, len(c.row.tokens), step) for c in batch]
        self._overlap.launched(step, members)
        for request in (chunk.request for chunk in batch):
            request.launched = request.planned
            request.latest = step
            boundary = request.launched % self._pages.page_tokens == 0
            if self._manager.stateful and request.allocation is not None and boundary:
                self._manager.snapshot(request.allocation, request.launched)
        if self._config.faults.step_delay_s:
            self._pause(self._config.faults.step_delay_s)

    def landed(self, began: float, *, go_on: bool) -> Iterator[ChunkDone | ChunkFailed]:
        """Commit the steps that are complete, one by one; what came of their rows is acted on as it is told.

        `began`: when this round did. `go_on`: another step was launched, so the last one may be waited for later.
        """
        self.committed = False
        for results in self._overlap.landed(go_on=go_on):
            self.committed = True
            self.steps += 1
            self._manager.computed(sum(member.count for member, _ in results), self._clock.now() - began)
            self._prove([member for member, _ in results])
            # Who ended or started over while this step was under way has no use for what it computed.
            yield from self._take(
                [(m, out) for m, out in results if m.request.phase is PrefillPhase.RUNNING and m.current]
            )

    def recover(self, invalid: list[Allocation]) -> None:
        """Start over whoever relied on state that turned out damaged: it isn't in the tree any more."""
        for request in [r for r in self._requests if r.allocation in invalid]:
            log.warning("request %s: it starts over, as a page loaded for it was damaged", request.submit.request_id)
            self._pages.restart(request)

    def _prove(self, members: list[StepMember]) -> None:
        """Wait until all that was loaded for these has proved good or not: before that, nothing of it is committed."""
        for member in members:
            allocation = member.request.allocation
            if member.current and allocation is not None and not self._manager.settled(allocation):
                for completion in self._manager.completions(allocation):
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
        if output.drawn is not None:
            request.first = output.drawn

    def _stale(self, request: PrefillRequest) -> Iterator[ChunkFailed]:
        """A page of it belongs to somebody else: nothing that it or the tree holds of its prompt can be trusted."""
        self.counters["stale_pages"] += 1
        self._log(DamageSite.STEP, request)
        self._pages.distrust(request)
        request.stale += 1
        if request.stale > _STALE_LIMIT:
            request.start_over()
            yield ChunkFailed(request, ErrorKind.WORKER, f"pages of it were given away {request.stale} times")
            return
        self._pages.restart(request)

    def _nonfinite(self, request: PrefillRequest) -> ChunkFailed:
        """Its logits were no numbers, so its state isn't to be trusted either: nothing of it is kept or handed over."""
        self._fitness.nonfinite()
        self._log(DamageSite.LOGITS, request)
        self._pages.distrust(request)
        return ChunkFailed(request, ErrorKind.NONFINITE, NONFINITE)

    def _log(self, site: DamageSite, request: PrefillRequest) -> None:
        log_damage(log, site, request=request.submit.request_id, positions=[request.committed, request.launched])

    def _seal(self, requests: list[PrefillRequest]) -> None:
        """Tag every page that the step finished; a prompt's last page is finished with the prompt."""
        allocations = [(r.allocation, r.committed) for r in requests if r.allocation is not None]
        self._manager.seal(allocations)
        for request, (allocation, committed) in zip(requests, allocations, strict=True):
            if committed == len(request.tokens):
                request.ends = self._manager.tail(allocation, committed) | self._manager.states(allocation, committed)
            else:
                self._manager.free_window_pages(allocation, committed)
                share = committed - request.shared >= self._config.prefill.share_tokens
                if share or 0 < request.awaited <= committed:
                    self._pages.cache(request)
                    request.awaited = 0
