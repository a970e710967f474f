"""The prefill worker: a round polls rooms, expires, admits, launches a step and commits the one before it.

The scheduler (`prefill.scheduler`) decides which requests are admitted and computed, the step commit
(`prefill.step_commit`) launches steps and commits them, and the hand-over beside it sends state to decode. They report
outcomes to the worker, which alone sends events to routers and takes requests out of the table (`_leave`).
"""

from __future__ import annotations

import logging

from twinpool.cache.device.device_port import DONE, Completion
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.kept_answers import Attach
from twinpool.contracts.messages.router_commands import Command, MigrationCommand
from twinpool.contracts.messages.worker_status import CheckReport, WorkerStatus
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar
from twinpool.prefill.audit_runner import AuditRunner
from twinpool.prefill.request import (
    PrefillEvent,
    PrefillPages,
    PrefillPhase,
    PrefillRequest,
    UnfitPictures,
    first_token_events,
    unfinished_report,
)
from twinpool.prefill.scheduler import PrefillScheduler, StepCost
from twinpool.prefill.step_commit import (
    ChunkFailed,
    Damaged,
    Granted,
    LayeredSends,
    Lost,
    PrefillHandover,
    PrefillStepCommit,
)
from twinpool.worker.request_table import AdmissionRefusal
from twinpool.worker.worker_loop import WorkerLoop, WorkerSetup

log = logging.getLogger("twinpool.prefill")


class PrefillWorker(WorkerLoop[PrefillRequest]):
    """The worker of the prefill role; see the module's prose. Implements
    `contracts.interfaces.worker_interface.Worker`: commands come in by `_take`, a round is `_poll`, `_admit` and
    `_compute`, and requests end by `_leave`."""

    role = Role.PREFILL

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        config, engine, manager, clock = setup.config, setup.engine, setup.manager, setup.clock
        requests, fitness, sender, pause = self._request_table, self._fitness, setup.sender, setup.pause
        most = min(self.fits.context, self.fits.max_positions)
        self._auditor = AuditRunner(config, engine, manager, requests.emit, fitness.nonfinite, most, self._gate)
        self._request_pages = PrefillPages(manager, reuse=config.cache_for(self.role).prefix_reuse)
        if engine.pictures is not None and not config.no_images(engine.pictures.tower.spec.whole_positions):
            self._request_pages.encoder = engine.pictures
            self.report.counted.append(engine.pictures)
        self._handover = PrefillHandover(sender, requests)
        self._layered = LayeredSends(sender, manager.spec, engine.device, config.transfer)
        pages, cost = self._request_pages, StepCost(config.prefill.chunk_tokens)
        self._scheduler = PrefillScheduler(requests, pages, self._handover.granted, config.prefill, clock, cost)
        self._steps = PrefillStepCommit(requests, pages, engine, fitness, config, pause, cost)
        report = self.report
        self._audited = self._auditor.sampled
        self._session_parts.append(self._auditor)
        report.counted += (
            self._steps, pages, self._scheduler, sender, self._handover, self._layered, self._auditor
        )  # fmt: skip
        report.timed.append(self._scheduler)
        report.recounted += (self._handover, self._auditor)
        report.holding.append(self._auditor)

    # ------------------------------------------------------------ the host's side

    def _take(self, session: SessionId, command: Command, grammar: AnswerGrammar | None) -> None:
        if isinstance(command, MigrationCommand | Attach):
            return  # For decode alone: prefill's requests leave with their hand-over.
        if self._auditor.handle(session, command, grammar, busy=self._busy):
            return
        submit = self._request_table.accept(session, command, self._cancel)
        if submit is None:
            return
        try:
            pictures = self._request_pages.placed(submit, self._request_table)
            self._handover.open(submit)
        except (UnfitPictures, WireError) as error:
            kind = error.kind if isinstance(error, UnfitPictures) else ErrorKind.ROOM
            self._request_table.refuse(session, submit, AdmissionRefusal(kind, str(error)))
            return
        self._auditor.preempt("a request came")
        now, (prefix, chain) = self._clock.now(), self._request_pages.prefix(submit)
        deadline, begin_by = now + submit.deadline_s, submit.begin_by(now)
        request = PrefillRequest(
            session, submit, now, deadline, prefix, grammar, chain=chain, begin_by=begin_by, pictures=pictures
        )
        self._request_pages.prefetch(request)
        self._request_table.add(request)

    def wait(self, timeout_s: float) -> None:
        if self._auditor and not self._busy:
            return
        if not self.runnable and not self._steps.committed:
            self._waiter.wait(min(timeout_s, self.report.next_due(self._clock)))

    @property
    def _busy(self) -> bool:
        """Whether the worker has work that comes before audits, or drains."""
        return bool(self._request_table or self._steps or self._request_table.draining)

    def drain(self) -> None:
        super().drain()
        self._auditor.preempt("the worker drains")

    @property
    def emptied(self) -> bool:
        at_work = self._request_table or self._gate or self._steps or self._manager.busy
        return self._request_table.draining and not at_work and self._sender.quiet

    @property
    def runnable(self) -> bool:
        return bool(self._steps) or self._scheduler.rest.computable(self._request_table)

    def status(self) -> WorkerStatus:
        running = sum(r.phase is not PrefillPhase.WAITING for r in self._request_table)
        return self.report.status(
            running=running,
            steps=self._steps.steps + self._request_pages.slices,
            prompt_tokens=sum(request.left for request in self._request_table),
        )

    def check(self) -> CheckReport:
        found = [wrong for request in self._request_table for wrong in request.check()]
        return self.report.check(self._manager.check() + found, rooms=self._sender.rooms)

    def close(self) -> None:
        self._gate.close()
        self._request_pages.close()
        try:
            for request in self._request_table:
                self._drop(request, ErrorKind.WORKER, "the worker closes")
            self._auditor.close()
            self._steps.drop()
            self._manager.close()
        finally:
            self._sender.close()
            self._engine.device.close()
            self._waiter.close()

    # ------------------------------------------------------------ the round

    def _poll(self) -> None:
        self._steps.recover(self._manager.poll())
        for told in self._handover.poll():
            match told:
                case Damaged(request):
                    facts = {"request_id": request.submit.request_id, "attempt": request.submit.attempt}
                    log.warning("its state arrived damaged", extra={**facts, "peer": request.peer})
                    self._manager.finished.invalidate(request.prefix)
                case Granted(request):
                    request.marks["grant"] = self._clock.now() - request.arrived
                    # What is still being loaded goes out with the step that waits for it.
                    if request.allocation is not None and self._manager.allocations.ready(request.allocation):
                        self._write(request, DONE)
                case Lost(request, reason):
                    self._fail(request, ErrorKind.ROOM, reason, request.peer)

    def _admit(self) -> None:
        self._scheduler.admit()
        self._manager.launch()
        self._steps.recover(self._manager.poll())

    def _compute(self) -> None:
        """Launch the next step, then commit the one before it."""
        self._request_pages.compute_pictures(self._request_table, self.setup.config.prefill, self._clock)
        began = self._clock.now()
        batch = self._scheduler.next_batch()
        if batch:
            self._steps.launch(batch, self._layered)
        elif self._auditor and not self._busy:
            self._auditor.step()
        for told in self._steps.landed(began, go_on=bool(batch)):
            request = told.request
            if isinstance(told, ChunkFailed):
                self._fail(request, told.kind, told.message)
            elif request.committed == len(request.tokens):
                self._complete(request, told.computed)
            else:
                self._write(request, told.computed)

    def _complete(self, request: PrefillRequest, computed: Completion) -> None:
        """Publish a finished prompt's first token, then end the request or hand it over."""
        request.step(PrefillEvent.COMPUTED)
        self._request_pages.cache(request)
        if "prefill" not in request.marks:  # A preempted request has been published before.
            request.marks["prefill"] = self._clock.now() - request.arrived
            for event in first_token_events(request, self._name):
                self._request_table.emit(request.session, event)
        submit, drawn = request.submit, request.first
        generated = len(submit.emitted) + (drawn is not None)
        stopped = drawn is not None and drawn.token in submit.sampling.stop_token_ids
        if not (stopped or request.alone or generated >= submit.sampling.max_tokens):
            self._write(request, computed)
            return
        self._handover.finish(request)
        stop_token = drawn.token if stopped and drawn is not None else None
        self._request_table.finished(request, "stop" if stopped else "length", stop_token)
        self._leave(request)

    def _write(self, request: PrefillRequest, computed: Completion) -> None:
        """Hand over sealed pages that aren't sent yet, once `computed` is done; with the last one the request
        leaves."""
        try:
            posted = self._handover.write(request, computed)
        except WireError as error:
            self._fail(request, ErrorKind.ROOM, str(error), request.peer)
            return
        if posted:
            self._leave(request)

    # ------------------------------------------------------------ ends

    def _expire(self) -> None:
        super()._expire()
        now = self._clock.now()
        for request in self._request_table:
            if request.late(now):
                self._fail(request, ErrorKind.LATE, request.submit.late)

    def _fail(self, request: PrefillRequest, kind: ErrorKind, message: str, blame: WorkerName | None = None) -> None:
        self._request_table.failed(request, kind, message, blame)
        self._drop(request, kind, message)

    def _cancel(self, request: PrefillRequest, reason: str) -> None:
        self._drop(request, ErrorKind.CANCELLED, reason)

    def _drop(self, request: PrefillRequest, kind: ErrorKind, message: str) -> None:
        self._handover.fail(request, kind, message)
        if (report := unfinished_report(request, self._name)) is not None:
            self._request_table.emit(request.session, report)
        self._leave(request)

    def _leave(self, request: PrefillRequest) -> None:
        """Free all that the request holds and take it out of the table. Every request ends through here."""
        self._request_pages.free(request)
        self._request_pages.release_prefetch(request)
        request.step(PrefillEvent.END)
        self._request_table.remove(request)
