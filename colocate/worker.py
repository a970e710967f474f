"""The colocated worker: a decode worker that computes its prompts itself, in the same steps, over the same KV cache.

A round is decode's, with two differences. Prompts come from `colocate.local_prompts` instead of rooms, unless their
requests migrate here. And a step has rows of both kinds: each running request takes one token of its budget, chunks of
prompts the rest (`prompt_tokens`). Everything else is decode's own: the one queue for pages, retraction,
migration to other workers, ends. There is one request table, one KV cache manager, one engine and one device queue, so
it fails as one.

The step budget is how the tokens of one step are shared between decode and prompts. A step has `prefill.chunk_tokens`
tokens. Each row of decode takes one and those of its drafts, first; chunks of prompts get the rest, but never less than
`colocate.prompt_tokens` or a page. So a running request has a row in every step (or in its turn, where there are more
than `decode.max_batch_tokens`), and the time between two of its tokens is that of one step, of no more tokens than the
budget, or than its rows and the prompts' least part where that is more. And the oldest prompt gets on in every step,
however many requests run: neither can starve the other.

The decode worker of conditional disaggregation (`ConditionalDecodeWorker`) has most prompts handed over, and computes
some itself. It is a colocated worker in the role of decode. A request that comes with a peer receives its prompt in a
room, as on any decode worker; one without a peer has it computed here. Both wait in one queue for pages and run in one
batch, and from their second token on there is no difference between them.

What runs here is what the pool of decode workers is for, so prompts are held to a smaller budget: a step with running
requests has `disaggregation.step_tokens` tokens at most, of which prompts get what rows leave, and a page at least. How
many prompts come is the router's decision (`router.core.routing_policies`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from twinpool.cache.allocation import Allocation
from twinpool.colocate.local_prompts import LocalPrompts
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages import router_commands as commands
from twinpool.contracts.messages.worker_status import WorkerStatus
from twinpool.decode.drafting import Drafter
from twinpool.decode.request import DecodePhase, DecodeRequest
from twinpool.decode.worker import DecodeWorker, Outcome
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar
from twinpool.prefill.audit_runner import AuditRunner
from twinpool.prefill.scheduler import ScheduledChunk
from twinpool.prefill.step_commit import PrefillStepCommit
from twinpool.worker.step_commit import split
from twinpool.worker.worker_loop import WorkerSetup


def prompt_tokens(budget: int, taken: int, least: int, page_tokens: int) -> int:
    """Return the tokens that chunks of prompts may have in a step in which rows of decode have `taken` some.

    `budget`: tokens of the step; `least`: tokens that prompts keep. Chunks end at page boundaries, so they keep at
    least a page, where the budget has one.
    """
    return max(budget - taken, min(budget, max(least, page_tokens)))


class ColocatedWorker(DecodeWorker):
    """The worker of both roles; see the module's prose. Implements `contracts.interfaces.worker_interface.Worker`."""

    role = Role.COLOCATED
    prompts = LocalPrompts
    at_work = DecodeWorker.at_work | {DecodePhase.ARRIVING}

    def __init__(self, setup: WorkerSetup, drafter: Drafter | None = None) -> None:
        """As `DecodeWorker`."""
        setup = replace(setup, config=setup.config.with_local_prompts(self.role))
        config, engine, manager, pause = setup.config, setup.engine, setup.manager, setup.pause
        self._config, self._pause = config, pause
        super().__init__(setup, drafter)
        assert isinstance(self._prompts, LocalPrompts)
        self._local = local = self._prompts
        if engine.pictures is not None and not config.no_images(engine.pictures.tower.spec.whole_positions):
            local.prompt_pages.encoder = engine.pictures
            self.report.counted.append(engine.pictures)
        self._chunks = PrefillStepCommit(
            local.admitted, local.prompt_pages, engine, self._fitness, config, pause, local.cost
        )
        most = min(self.fits.context, self.fits.max_positions)
        emit, nonfinite = self._request_table.emit, self._fitness.nonfinite
        self._auditor = AuditRunner(config, engine, manager, emit, nonfinite, most, self._gate)
        self._ended_steps, self.counters = 0, {"mixed_steps": 0.0}
        report = self.report
        self._audited = self._auditor.sampled
        self._session_parts.append(self._auditor)
        report.counted += (self._chunks, self._auditor, self)
        report.timed.append(local)
        report.recounted += (local, self._auditor)
        report.holding.append(self._auditor)

    # ------------------------------------------------------------ the host's side

    def wait(self, timeout_s: float) -> None:
        if self._auditor and not self._busy:
            return
        if not (self._local.rest.computable(self._local.admitted) or self._chunks or self._chunks.committed):
            super().wait(timeout_s)

    @property
    def _busy(self) -> bool:
        """Whether the worker has work that comes before audits, or drains."""
        return bool(self._request_table or self._steps or self._chunks or self._request_table.draining)

    def _hand_to(self, session: SessionId, request: DecodeRequest, deadline: float) -> None:
        self._local.hand_to(session, request)
        super()._hand_to(session, request, deadline)

    def drain(self) -> None:
        super().drain()
        self._auditor.preempt("the worker drains")

    @property
    def emptied(self) -> bool:
        return super().emptied and not self._chunks

    @property
    def runnable(self) -> bool:
        return self._local.rest.computable(self._local.admitted) or bool(self._chunks) or super().runnable

    def status(self) -> WorkerStatus:
        left = self._local.tokens_left
        steps = self._ended_steps + self._local.prompt_pages.slices
        return structs.replace(super().status(), steps=steps, prompt_tokens=left)

    def close(self) -> None:
        self._local.prompt_pages.close()
        try:
            self._auditor.close()
            self._chunks.drop()
        finally:
            super().close()

    # ------------------------------------------------------------ what routers say

    def _submit(
        self, session: SessionId, command: commands.Submit | commands.Cancel | commands.Audit,
        grammar: AnswerGrammar | None,
    ) -> None:  # fmt: skip
        if self._auditor.handle(session, command, grammar, busy=self._busy):
            return
        super()._submit(session, command, grammar)
        if isinstance(command, commands.Submit) and len(self._request_table):
            self._auditor.preempt("a request came")

    # ------------------------------------------------------------ the round

    def _recover(self, invalid: list[Allocation]) -> Iterator[Outcome]:
        # By their marks: the commit of a step of prompts polls as well, and what it learns is of no use to decode.
        damaged = [allocation for allocation in self._manager.allocations if allocation.invalid]
        if damaged:
            self._chunks.recover(damaged)
            yield from self._local.restarted()
            yield from super()._recover(damaged)

    def _expire(self) -> None:
        super()._expire()
        for request in self._request_table:
            if self._local.late(request):
                self._fail(request, ErrorKind.LATE, request.submit.late)

    def _compute(self) -> None:
        """Launch the next step, with rows of both kinds, then commit the one before it."""
        self._local.prompt_pages.compute_pictures(self._local.admitted, self._config.prefill, self._clock)
        began = self._clock.now()
        batch = self._scheduler.next_batch()
        taken = sum(1 + len(request.drafts) for request in batch)
        beside = any(not request.submit.background for request in batch)
        chunks = self._local.next_chunks(self._prompt_tokens_of_step(taken), beside=beside)
        go_on = bool(batch or chunks)
        if go_on:
            self._launch(batch, chunks)
        elif self._auditor and not self._busy:
            self._auditor.step()
        before = self._steps.steps, self._chunks.steps
        self._act(self._steps.landed(go_on=go_on))
        self._act(self._local.landed(self._chunks.landed(began, go_on=go_on)))
        self._ended_steps += max(self._steps.steps - before[0], self._chunks.steps - before[1])
        self._act(self._migrations.settle())

    def _prompt_tokens_of_step(self, taken: int) -> int:
        """Return the tokens that prompts may have in a step in which rows of decode have `taken` some."""
        least = self._config.colocate.prompt_tokens
        return prompt_tokens(self._config.prefill.chunk_tokens, taken, least, self._request_pages.page_tokens)

    def _launch(self, batch: list[DecodeRequest], chunks: list[ScheduledChunk]) -> None:
        if batch and chunks and self._config.colocate.mixed_steps:
            step = self._steps.begin(batch, [chunk.row for chunk in chunks])
            rows, prompts = split(step, (len(batch), len(chunks)))
            self._steps.launched(step, rows, batch)
            self._chunks.launched(prompts, chunks)
            self.counters["mixed_steps"] += 1
        else:
            if chunks:
                self._chunks.launched(self._engine.launch([chunk.row for chunk in chunks]), chunks)
            if batch:  # Last, as no other step may begin before its draw.
                step = self._steps.begin(batch)
                self._steps.launched(step, step, batch)
        if batch:
            self._scheduler.launched(batch)
        if self._config.faults.step_delay_s:
            self._pause(self._config.faults.step_delay_s)

    def _start(self, request: DecodeRequest, received: int) -> None:
        if request.submit.peer is not None:
            super()._start(request, received)
            return
        self._request_table.emit(request.session, request.report(self._name))
        self._scheduler.start(request)


class ConditionalDecodeWorker(ColocatedWorker):
    """A decode worker that can compute prompts; see the module's prose. Implements
    `contracts.interfaces.worker_interface.Worker`."""

    role = Role.DECODE

    def _prompt_tokens_of_step(self, taken: int) -> int:
        chunk = self._config.prefill.chunk_tokens
        budget = min(chunk, self._config.disaggregation.step_tokens) if taken else chunk
        return prompt_tokens(budget, taken, 1, self._request_pages.page_tokens)


def decode_class_for(role: Role, config: Config) -> type[DecodeWorker]:
    """Return the class of a decode or colocated worker."""
    if role is Role.COLOCATED:
        return ColocatedWorker
    return ConditionalDecodeWorker if config.conditional else DecodeWorker
