"""The prefill worker: a round polls rooms, expires, admits, launches a step and commits the one before it.

Who is admitted and computed is the scheduler's (`prefill.scheduler`), what becomes of a launched step the commit's
(`prefill.step_commit`), what goes to decode the hand-over's (`prefill.handover`). They tell the worker what came of it;
it alone speaks to routers, and takes a request from the table by one way out.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

from cache.device.device_port import DONE, Completion
from cache.manager.kv_cache_manager import KVCacheManager
from cache.prefix_cache.token_prefix import TokenPrefix
from contracts.block_hash import block_hashes
from contracts.clock import Clock
from contracts.config.cluster_config import Config
from contracts.damage import PREFIX, DamageSite
from contracts.errors import ErrorKind, WireError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.fingerprint import Fingerprint
from contracts.messages.router_commands import Command, MigrationCommand, Submit
from contracts.messages.worker_events import Done
from contracts.messages.worker_status import CheckReport, WorkerLimits
from contracts.messages.worker_status import WorkerStatus as Status
from engine.runner.model_runner import ModelRunner
from prefill.audit_runner import AuditRunner
from prefill.first_token_events import first_token_events
from prefill.handover import Damaged, Granted, Lost, PrefillHandover
from prefill.request import PrefillEvent, PrefillPhase, PrefillRequest
from prefill.request_pages import RequestPages
from prefill.scheduler import PrefillScheduler
from prefill.step_commit import ChunkFailed, PrefillStepCommit
from transfer.rooms.kv_sender import KVSender
from worker.admission_check import AdmissionRefusal
from worker.nonfinite_rows import NonfiniteRows
from worker.request_table import RequestTable
from worker.worker_loop import Sleeper, WorkerLoop, seconds_until


class PrefillWorker(WorkerLoop[PrefillRequest]):
    """See the module's prose. Implements `contracts.interfaces.worker_interface.Worker`."""

    role = Role.PREFILL

    def __init__(
        self,
        name: WorkerName,
        incarnation: Incarnation,
        config: Config,
        engine: ModelRunner,
        manager: KVCacheManager,
        sender: KVSender,
        waiter: Sleeper,
        *,
        context: int,
        clock: Clock,
        pause: Callable[[float], None],
    ) -> None:
        self._name, self._incarnation, self._clock = name, incarnation, clock
        self._engine, self._manager, self._sender = engine, manager, sender
        self._pages = manager.pools.allocators[manager.full]
        self.fits = WorkerLimits(manager.max_positions, context)
        cluster = config.cluster
        fitness = NonfiniteRows(cluster.nonfinite_rows, cluster.nonfinite_window_s, clock)
        requests = RequestTable[PrefillRequest](name, self.fits, clock)
        super().__init__(requests, waiter, fitness)
        most = min(context, manager.max_positions)
        self._auditor = AuditRunner(config, engine, manager, requests.emit, fitness.nonfinite, most)
        self._request_pages = RequestPages(manager, reuse=config.cache_for(self.role).prefix_reuse)
        self._handover = PrefillHandover(sender, requests)
        self._scheduler = PrefillScheduler(requests, self._request_pages, self._handover.granted, config.prefill, clock)
        self._steps = PrefillStepCommit(requests, self._request_pages, engine, fitness, config, clock, pause)

    # ------------------------------------------------------------ the host's side

    def handle(self, session: SessionId, command: Command) -> None:
        if isinstance(command, MigrationCommand):
            return  # For decode: prefill's requests leave by themselves.
        if self._auditor.handle(session, command, busy=self._busy):
            return
        submit = self._request_table.accept(session, command, self._cancel)
        if submit is None:
            return
        try:
            self._handover.open(submit)
        except WireError as error:
            self._request_table.refuse(session, submit, AdmissionRefusal(ErrorKind.ROOM, str(error)))
            return
        self._auditor.preempt("a request came")
        request = self._request(session, submit)
        self._request_pages.prefetch(request)
        self._request_table.add(request)

    def wait(self, timeout_s: float) -> None:
        if self._auditor and not self._busy:
            return
        if not self.runnable and not self._steps.committed:
            fetched = [
                self._manager.prefetch_deadline(r.prefetch) for r in self._request_table if r.prefetch is not None
            ]
            due = seconds_until(self._clock, self._request_table.next_deadline, self._sender.next_deadline, *fetched)
            self._waiter.wait(min(timeout_s, due))

    @property
    def _busy(self) -> bool:
        """Whether there is anything to do that comes before audits."""
        return bool(self._request_table or self._steps or self._request_table.draining)

    def drop_session(self, session: SessionId) -> None:
        self._auditor.drop_session(session)
        super().drop_session(session)

    def drain(self) -> None:
        super().drain()
        self._auditor.preempt("the worker drains")

    @property
    def drained(self) -> bool:
        at_work = self._request_table or self._steps or self._manager.busy
        return self._request_table.draining and not at_work and self._sender.quiet

    @property
    def runnable(self) -> bool:
        return bool(self._steps) or any(r.phase is PrefillPhase.RUNNING for r in self._request_table)

    @property
    def control(self) -> str:
        return self._sender.control

    @property
    def fingerprint(self) -> Fingerprint:
        return self._sender.fingerprint

    def status(self) -> Status:
        waiting = sum(r.phase is PrefillPhase.WAITING for r in self._request_table)
        return Status(
            name=self._name,
            role=self.role,
            state="draining" if self._request_table.draining else "ready",
            pid=os.getpid(),
            node=platform.node(),
            incarnation=self._incarnation,
            running=len(self._request_table) - waiting,
            waiting=waiting,
            pages_total=self._pages.total,
            pages_free=self._manager.free_pages(self._manager.full),
            steps=self._steps.steps,
            outgoing=self._sender.rooms,
            counters={
                **self._steps.counters,
                **self._request_pages.counters,
                **self._scheduler.counters,
                **self._manager.stats(),
                **self._handover.counters(),
                **self._auditor.counters,
                f"{PREFIX}{DamageSite.LOGITS}": self._fitness.rows,
            },
        )

    def check(self) -> CheckReport:
        found = self._manager.check() + self._handover.check()
        allocations = sum(r.allocation is not None for r in self._request_table) + self._auditor.allocations
        if allocations != self._manager.allocations:
            found.append(f"{self._manager.allocations} allocations, requests hold {allocations}")
        found += [wrong for request in self._request_table for wrong in request.check()] + self._auditor.check()
        pages, leases = self._pages.total, self._pages.leases
        return CheckReport(self._name, pages, 0, leases, self._sender.rooms, tuple(found))

    def close(self) -> None:
        self._request_pages.reuse = False  # Nobody will come for what could be kept.
        try:
            for request in self._request_table:
                self._drop(request, ErrorKind.WORKER, "the worker closes")
            self._auditor.close()
            self._steps.drop()
            self._manager.close()
        finally:
            self._sender.close()
            self._waiter.close()

    # ------------------------------------------------------------ the round

    def _poll(self) -> None:
        self._steps.recover(self._manager.poll())
        for told in self._handover.poll():
            match told:
                case Damaged(request):
                    self._manager.invalidate(request.prefix)
                case Granted(request):
                    request.marks["grant"] = self._clock.now() - request.arrived
                    # What is still being loaded goes out with the step that waits for it.
                    if request.allocation is not None and self._manager.settled(request.allocation):
                        self._write(request, DONE)
                case Lost(request, reason):
                    self._fail(request, ErrorKind.ROOM, reason, request.peer)

    def _admit(self) -> None:
        self._scheduler.admit()
        self._manager.launch()
        self._steps.recover(self._manager.poll())

    def _compute(self) -> None:
        """Launch the next step, then commit the one before it."""
        began = self._clock.now()
        batch = self._scheduler.next_batch()
        if batch:
            self._steps.launch(batch)
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
        """The prompt is done: publish its first token, then end the request or hand it over."""
        request.step(PrefillEvent.COMPUTED)
        self._request_pages.cache(request)
        if "prefill" not in request.marks:  # A preempted request has been published before.
            request.marks["prefill"] = self._clock.now() - request.arrived
            for event in first_token_events(request, self._name):
                self._request_table.emit(request.session, event)
        submit, drawn = request.submit, request.first
        generated = len(submit.emitted) + (drawn is not None)
        if drawn is not None and drawn.token in submit.sampling.stop_token_ids:
            self._finish(request, "stop", drawn.token)
        elif request.alone or generated >= submit.sampling.max_tokens:
            self._finish(request, "length", None)
        else:
            self._write(request, computed)

    def _write(self, request: PrefillRequest, computed: Completion) -> None:
        """Hand over what is sealed and not yet sent, after the step behind it; with the last of it, it leaves."""
        try:
            posted = self._handover.write(request, computed)
        except WireError as error:
            self._fail(request, ErrorKind.ROOM, str(error), request.peer)
            return
        if posted:
            self._leave(request)

    # ------------------------------------------------------------ ends

    def _request(self, session: SessionId, submit: Submit) -> PrefillRequest:
        now, page_tokens = self._clock.now(), self._request_pages.page_tokens
        chain = block_hashes(submit.tokens, page_tokens, submit.salt)
        prefix = TokenPrefix.of(submit.tokens, page_tokens, submit.salt, chain)
        return PrefillRequest(session, submit, now, now + submit.deadline_s, prefix, chain)

    def _finish(self, request: PrefillRequest, reason: str, stop_token: int | None) -> None:
        self._handover.finish(request)
        submit = request.submit
        self._request_table.emit(request.session, Done(submit.request_id, submit.attempt, reason, stop_token))
        self._leave(request)

    def _fail(self, request: PrefillRequest, kind: ErrorKind, message: str, blame: WorkerName | None = None) -> None:
        submit = request.submit
        done = Done(submit.request_id, submit.attempt, "error", error=kind, message=message, blame=blame)
        self._request_table.emit(request.session, done)
        self._drop(request, kind, message)

    def _cancel(self, request: PrefillRequest, reason: str) -> None:
        self._drop(request, ErrorKind.CANCELLED, reason)

    def _drop(self, request: PrefillRequest, kind: ErrorKind, message: str) -> None:
        self._handover.fail(request, kind, message)
        self._leave(request)

    def _leave(self, request: PrefillRequest) -> None:
        """The one way out of the table."""
        self._request_pages.free(request)
        if request.prefetch is not None:
            self._manager.stop_prefetch(request.prefetch)
        request.step(PrefillEvent.END)
        self._request_table.remove(request)
