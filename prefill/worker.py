"""The prefill worker: one round hears, expires, admits, launches one chunk, seals, writes and publishes the last.

Admission order is the one policy here: requests whose pages decode has granted come first, in order of arrival, and
may preempt others that have no grant yet, so whoever holds decode's memory always gets on.
"""

from __future__ import annotations

import logging
import os
import platform
from bisect import bisect_left
from collections.abc import Callable

from cache.allocation.allocation import Allocation
from cache.device.device_port import DONE, Completion
from cache.manager.kv_cache_manager import KVCacheManager
from cache.prefix_cache.token_prefix import TokenPrefix
from contracts.block_hash import block_hashes
from contracts.clock import Clock
from contracts.config.cluster_config import Config
from contracts.damage import PREFIX, DamageSite, log_damage
from contracts.errors import ErrorKind, WireError
from contracts.ids import Incarnation, Role, RoomId, WorkerName
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.fingerprint import Fingerprint
from contracts.messages.router_commands import Command, MigrationCommand, Submit
from contracts.messages.worker_events import Done, LegReport, PromptScores, Tokens
from contracts.messages.worker_status import CheckReport, WorkerLimits
from contracts.messages.worker_status import WorkerStatus as Status
from engine.runner.batch import NONFINITE, BatchRow, RowOutput, TokenDraw
from engine.runner.model_runner import ModelRunner
from prefill.audit_runner import AuditRunner
from prefill.request import PrefillEvent, PrefillPhase, PrefillRequest, StepMember
from transfer.rooms.kv_sender import KVSender
from transfer.rooms.metadata_slots import HandoverMetadata
from transfer.rooms.room_outcomes import RoomGranted, RoomReleased
from worker.admission_check import AdmissionRefusal
from worker.nonfinite_rows import NonfiniteRows
from worker.request_table import RequestTable
from worker.sendable_pages import finished
from worker.step_overlap import StepOverlap
from worker.worker_loop import Sleeper, WorkerLoop, seconds_until

log = logging.getLogger("twinpool.prefill")
_STALE_LIMIT = 2
"""How often a request starts over because a page of it was given away, before it is failed."""


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
        self._name, self._incarnation, self._config = name, incarnation, config
        self._engine, self._manager, self._sender = engine, manager, sender
        self._clock, self._pause = clock, pause
        self._reuse = config.cache_for(self.role).prefix_reuse
        self._page_tokens = manager.spec.page_tokens
        self._full = manager.full
        self._pages = manager.pools.allocators[self._full]
        self.fits = WorkerLimits(manager.max_positions, context)
        cluster = config.cluster
        fitness = NonfiniteRows(cluster.nonfinite_rows, cluster.nonfinite_window_s, clock)
        super().__init__(RequestTable(name, self.fits, clock), waiter, fitness)
        most = min(context, manager.max_positions)
        self._auditor = AuditRunner(config, engine, manager, self._request_table.emit, fitness.nonfinite, most)
        self._unconfirmed: dict[RoomId, PrefillRequest] = {}
        """Requests that have left, until decode confirms that what was sent is right."""
        self._overlap = StepOverlap[StepMember]()
        self._landed = False
        """Whether the last round committed something: then the next may have room for somebody."""
        self._steps = 0
        self._counters = dict.fromkeys(
            ("prompt_tokens_computed", "prompt_tokens_cached", "preemptions", "stale_pages"), 0.0
        )

    # ------------------------------------------------------------ the host's side

    def handle(self, session: SessionId, command: Command) -> None:
        if isinstance(command, MigrationCommand):
            return  # For decode: prefill's requests leave by themselves.
        if self._auditor.handle(session, command, busy=self._busy):
            return
        submit = self._request_table.accept(session, command, self._cancel)
        if submit is None:
            return
        if submit.peer is not None:
            try:
                self._sender.open(submit.room, submit.peer)
            except WireError as error:
                self._request_table.refuse(session, submit, AdmissionRefusal(ErrorKind.ROOM, str(error)))
                return
        self._auditor.preempt("a request came")
        request = self._request(session, submit)
        if self._reusable(request):
            request.prefetch = self._manager.prefetch(request.prefix.head(self._reusable(request)), submit.request_id)
        self._request_table.add(request)

    def wait(self, timeout_s: float) -> None:
        if self._auditor and not self._busy:
            return
        if not self.runnable and not self._landed:
            fetched = [
                self._manager.prefetch_deadline(r.prefetch) for r in self._request_table if r.prefetch is not None
            ]
            due = seconds_until(self._clock, self._request_table.next_deadline, self._sender.next_deadline, *fetched)
            self._waiter.wait(min(timeout_s, due))

    @property
    def _busy(self) -> bool:
        """Whether there is anything to do that comes before audits."""
        return bool(self._request_table or self._overlap or self._request_table.draining)

    def drop_session(self, session: SessionId) -> None:
        self._auditor.drop_session(session)
        super().drop_session(session)

    def drain(self) -> None:
        super().drain()
        self._auditor.preempt("the worker drains")

    @property
    def drained(self) -> bool:
        at_work = self._request_table or self._overlap or self._manager.busy
        return self._request_table.draining and not at_work and self._sender.quiet

    @property
    def runnable(self) -> bool:
        return bool(self._overlap) or any(r.phase is PrefillPhase.RUNNING for r in self._request_table)

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
            pages_free=self._manager.free_pages(self._full),
            steps=self._steps,
            outgoing=self._sender.rooms,
            counters={
                **self._counters,
                **self._manager.stats(),
                **self._sender.outgoing,
                **self._auditor.counters,
                f"{PREFIX}{DamageSite.LOGITS}": self._fitness.rows,
                "sent_bytes": self._sender.sent_bytes,
                "late_messages": self._sender.late,
            },
        )

    def check(self) -> CheckReport:
        found = self._manager.check() + self._sender.check()
        allocations = sum(r.allocation is not None for r in self._request_table) + self._auditor.allocations
        if allocations != self._manager.allocations:
            found.append(f"{self._manager.allocations} allocations, requests hold {allocations}")
        if self._sender.unconfirmed != self._unconfirmed.keys():
            found.append(f"{len(self._unconfirmed)} requests wait for decode's word, not the rooms that do")
        found += [wrong for request in self._request_table for wrong in request.check()] + self._auditor.check()
        return CheckReport(self._name, self._pages.total, 0, self._pages.leases, self._sender.rooms, tuple(found))

    def close(self) -> None:
        self._reuse = False  # Nobody will come for what could be kept.
        try:
            for request in self._request_table:
                self._drop(request, ErrorKind.WORKER, "the worker closes")
            self._auditor.close()
            self._overlap.drop()
            self._manager.close()
        finally:
            self._sender.close()
            self._waiter.close()

    # ------------------------------------------------------------ the round

    def _poll(self) -> None:
        self._recover(self._manager.poll())
        by_room = {r.submit.room: r for r in self._request_table}
        for outcome in self._sender.poll():
            request = by_room.get(outcome.room)
            if isinstance(outcome, RoomReleased):
                gone = self._unconfirmed.pop(outcome.room, request)
                if outcome.damaged and gone is not None:
                    self._manager.invalidate(gone.prefix)
            if request is None or not self._request_table.holds(request):
                continue
            if isinstance(outcome, RoomGranted):
                request.marks["grant"] = self._clock.now() - request.arrived
                # What is still being loaded goes out with the step that waits for it.
                if request.allocation is not None and self._manager.settled(request.allocation):
                    self._write(request, DONE)
            elif not outcome.received:
                self._fail(request, ErrorKind.ROOM, outcome.reason, request.peer)

    def _admit(self) -> None:
        self._take_in()
        self._manager.launch()
        self._recover(self._manager.poll())

    def _take_in(self) -> None:
        waiting = [r for r in self._request_table if r.phase is PrefillPhase.WAITING]
        running = [r for r in self._request_table if r.phase is PrefillPhase.RUNNING]
        for request in sorted(waiting, key=lambda r: not self._entitled(r)):
            if len(running) >= self._config.prefill.max_running:
                return
            if self._waits_for_another(request, running):
                continue
            if request.prefetch is not None and not self._manager.may_run(request.prefetch):
                continue
            while not self._take_pages(request):
                if not (self._entitled(request) and self._preempt_one()):
                    return
                running = [r for r in running if r.phase is PrefillPhase.RUNNING]
            request.step(PrefillEvent.ADMIT)
            request.marks.setdefault("queue", self._clock.now() - request.arrived)
            running.append(request)

    def _waits_for_another(self, request: PrefillRequest, running: list[PrefillRequest]) -> bool:
        """Whether one of `running` is about to compute pages that `request` can have from the tree afterwards.

        It waits for what they have in common and no longer, and until then that one is as urgent as `request` is
        (`PrefillRequest.left`), so waiting doesn't take longer than computing the same beside it.
        """
        for other in running if self._reuse else ():
            assert other.allocation is not None
            most = min(self._reusable(request), len(other.prefix))
            # Keys are chained: pages are in common up to the first that differs.
            common = bisect_left(range(most), True, key=lambda page: request.chain[page] != other.chain[page])
            end = common * self._page_tokens
            if end > max(other.shared, other.allocation.depth * self._page_tokens):
                other.awaited = end if not other.awaited > other.launched else min(end, other.awaited)
                return True
        return False

    def _batch(self) -> list[tuple[PrefillRequest, BatchRow]]:
        """The step's rows, in order of arrival: what of its token budget each request gets.

        A part of the budget (`prefill.short_share`) goes first to those who have less left to compute than the oldest,
        the least first, so that a short prompt doesn't wait for a long one. The rest goes to all in order of arrival:
        the oldest always has the other part, and whoever waits becomes the oldest. Chunks end at page boundaries, but
        where the prompt ends.
        """
        prefill = self._config.prefill
        able = [
            r
            for r in self._request_table
            if r.phase is PrefillPhase.RUNNING and r.allocation and r.launched < len(r.tokens)
        ]
        budget = prefill.chunk_tokens
        first = max(self._page_tokens, int(budget * prefill.short_share)) if budget >= 2 * self._page_tokens else 0
        shorter = sorted((r for r in able[1:] if r.left < able[0].left), key=lambda r: r.left)
        for request in shorter:
            first -= (count := self._plan_rows(request, min(first, budget)))
            budget -= count
        for request in able:
            budget -= self._plan_rows(request, budget)
        planned = [(request, request.planned - request.launched) for request in able]
        return [(request, self._row(request, count)) for request, count in planned if count]

    def _plan_rows(self, request: PrefillRequest, most: int) -> int:
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
        elif end < whole and most < self._config.prefill.chunk_tokens:
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
        full = tables.pop(self._full)
        top = sampling.prompt_logprobs or 0
        return BatchRow(
            tokens[start:end], start, full.pages, draw, follow or None, top, epochs=full.epochs, others=tables
        )

    def _compute(self) -> None:
        """Launch the next step, then commit the one before it."""
        began = self._clock.now()
        batch = self._batch()
        if batch:
            self._launch(batch)
        elif self._auditor and not self._busy:
            self._auditor.step()
        self._landed = False
        for results in self._overlap.landed(go_on=bool(batch)):
            self._landed = True
            self._steps += 1
            self._manager.computed(sum(member.count for member, _ in results), self._clock.now() - began)
            self._prove([member for member, _ in results])
            # Who ended or started over while this step was under way has no use for what it computed.
            self._take([(m, out) for m, out in results if m.request.phase is PrefillPhase.RUNNING and m.current])

    def _launch(self, batch: list[tuple[PrefillRequest, BatchRow]]) -> None:
        step = self._engine.launch([row for _, row in batch])
        members = [StepMember(request, request.starts, len(row.tokens), step) for request, row in batch]
        self._overlap.launched(step, members)
        for request, _ in batch:
            request.launched = request.planned
            request.latest = step
            if self._manager.stateful and request.allocation is not None and request.launched % self._page_tokens == 0:
                self._manager.snapshot(request.allocation, request.launched)
        if self._config.faults.step_delay_s:
            self._pause(self._config.faults.step_delay_s)

    def _prove(self, members: list[StepMember]) -> None:
        """Wait until all that was loaded for these has proved good or not: before that, nothing of it is committed."""
        for member in members:
            allocation = member.request.allocation
            if member.current and allocation is not None and not self._manager.settled(allocation):
                for completion in self._manager.completions(allocation):
                    completion.wait()
                self._recover(self._manager.poll())

    def _recover(self, invalid: list[Allocation]) -> None:
        """Start over whoever relied on state that turned out damaged: it isn't in the tree any more."""
        for request in [r for r in self._request_table if r.allocation in invalid]:
            log.warning("request %s: it starts over, as a page loaded for it was damaged", request.submit.request_id)
            request.start_over()
            self._return_pages(request)
            request.step(PrefillEvent.PREEMPT)

    def _take(self, results: list[tuple[StepMember, RowOutput]]) -> None:
        """Commit one step's results, then hand over and publish what they finished."""
        good = []
        for member, output in results:
            if output.stale:
                self._lost(member.request)
            elif output.nonfinite:
                self._nonfinite(member.request)
            else:
                self._commit(member.request, member.count, output)
                good.append(member)
        self._seal([member.request for member in good])
        for member in good:
            request = member.request
            if request.committed == len(request.tokens):
                self._complete(request, member.step.completion)
            else:
                self._write(request, member.step.completion)

    def _commit(self, request: PrefillRequest, count: int, output: RowOutput) -> None:
        request.committed += count
        request.computed += count
        self._counters["prompt_tokens_computed"] += count
        request.scores += output.scores
        if output.drawn is not None:
            request.first = output.drawn

    def _lost(self, request: PrefillRequest) -> None:
        """A page of it belongs to somebody else: nothing that it or the tree holds of its prompt can be trusted."""
        self._counters["stale_pages"] += 1
        log_damage(
            log, DamageSite.STEP, request=request.submit.request_id, positions=[request.committed, request.launched]
        )
        assert request.allocation is not None
        self._manager.invalidate(request.prefix)
        request.allocation.invalid = True
        request.stale += 1
        request.start_over()
        if request.stale > _STALE_LIMIT:
            self._fail(request, ErrorKind.WORKER, f"pages of it were given away {request.stale} times")
            return
        self._return_pages(request)
        request.step(PrefillEvent.PREEMPT)

    def _nonfinite(self, request: PrefillRequest) -> None:
        """Its logits were no numbers, so its state isn't to be trusted either: nothing of it is kept or handed over."""
        self._fitness.nonfinite()
        log_damage(
            log, DamageSite.LOGITS, request=request.submit.request_id, positions=[request.committed, request.launched]
        )
        assert request.allocation is not None
        self._manager.invalidate(request.prefix)
        request.allocation.invalid = True
        self._fail(request, ErrorKind.NONFINITE, NONFINITE)

    def _seal(self, requests: list[PrefillRequest]) -> None:
        """Tag every page that the step finished; a prompt's last page is finished with the prompt."""
        allocations = [(r.allocation, r.committed) for r in requests if r.allocation is not None]
        self._manager.seal(allocations)
        for request, (allocation, committed) in zip(requests, allocations, strict=True):
            if committed == len(request.tokens):
                request.ends = self._manager.tail(allocation, committed) | self._manager.states(allocation, committed)
            else:
                self._manager.free_window_pages(allocation, committed)
                if committed - request.shared >= self._config.prefill.share_tokens or 0 < request.awaited <= committed:
                    self._cache_pages(request)
                    request.awaited = 0

    def _complete(self, request: PrefillRequest, computed: Completion) -> None:
        """The prompt is done: publish its first token, then end the request or hand it over."""
        request.step(PrefillEvent.COMPUTED)
        self._cache_pages(request)
        self._publish(request)
        submit, drawn = request.submit, request.first
        generated = len(submit.emitted) + (drawn is not None)
        if drawn is not None and drawn.token in submit.sampling.stop_token_ids:
            self._finish(request, "stop", drawn.token)
        elif request.alone or generated >= submit.sampling.max_tokens:
            self._finish(request, "length", None)
        else:
            self._write(request, computed)

    def _publish(self, request: PrefillRequest) -> None:
        """First token, prompt scores and timeline, once; a preempted request has been published before."""
        if "prefill" in request.marks:
            return
        request.marks["prefill"] = self._clock.now() - request.arrived
        submit, key = request.submit, (request.submit.request_id, request.submit.attempt)
        if request.wants_scores:
            self._request_table.emit(request.session, PromptScores(*key, tuple(request.scores)))
        if request.first is not None:
            logprobs = (request.first.logprob,) if request.first.logprob is not None else ()
            self._request_table.emit(
                request.session, Tokens(*key, len(submit.tokens), (request.first.token,), logprobs)
            )
        tiers = {"device": request.cached.device, "host": request.cached.host, "storage": request.cached.storage}
        progress = LegReport(
            *key, self.role, self._name, dict(request.marks), request.cached.total, request.computed,
            cached_by_tier=tiers,
        )  # fmt: skip
        self._request_table.emit(request.session, progress)

    def _write(self, request: PrefillRequest, computed: Completion) -> None:
        """Hand over what is sealed and not yet sent, after the step behind it; with the last page, the metadata."""
        room = request.submit.room
        if not self._sender.granted(room) or request.allocation is None:
            return
        wanted = self._sender.wanted(room)
        self._sender.write(room, finished(wanted, request.allocation, request.chain, request.ends), (computed,))
        if request.phase is PrefillPhase.COMPUTED:
            assert request.first is not None
            drawn = request.first
            metadata = HandoverMetadata(room, 0, drawn.token, drawn.logprob, request.cached.total, request.computed)
            try:
                self._sender.seal(room, metadata)
            except WireError as error:
                self._fail(request, ErrorKind.ROOM, str(error), request.peer)
                return
            self._unconfirmed[room] = request
            self._leave(request)

    # ------------------------------------------------------------ pages

    def _entitled(self, request: PrefillRequest) -> bool:
        """Whether decode waits for this request, with its memory."""
        return request.alone or self._sender.granted(request.submit.room)

    def _reusable(self, request: PrefillRequest) -> int:
        """Leading pages that may come from the tree: the last token is computed, and every scored one."""
        return (len(request.tokens) - 1) // self._page_tokens if self._reuse and not request.wants_scores else 0

    def _take_pages(self, request: PrefillRequest) -> bool:
        """Claim what the tiers have and pages for the rest; on False nothing was taken."""
        allocation = self._manager.allocate(
            request.prefix, len(request.tokens), f"request {request.submit.request_id}",
            reusable=self._reusable(request), prefetch=request.prefetch,
        )  # fmt: skip
        if allocation is None:
            return False
        request.allocation = allocation
        request.begin(allocation.depth * self._page_tokens)
        request.cached = allocation.cached
        self._counters["prompt_tokens_cached"] += allocation.cached.total
        return True

    def _cache_pages(self, request: PrefillRequest) -> None:
        """Give its finished pages to the tree at once, locked for as long as it is here: others may wait for them."""
        if self._reuse and request.allocation is not None and not request.allocation.invalid:
            self._manager.cache_pages(request.allocation, request.prefix, request.submit.priority)
            request.shared = request.committed

    def _return_pages(self, request: PrefillRequest) -> None:
        """Give finished pages to the tree and the rest back. Idempotent: nothing is held afterwards."""
        if request.allocation is None:
            return
        self._cache_pages(request)
        # What it shares with others is not its own to free, but a step under way may read that too.
        self._manager.free(request.allocation, [request.latest.completion] if request.latest is not None else [])
        request.allocation = None

    def _preempt_one(self) -> bool:
        """Send the youngest request without a grant back to waiting; False when there is none."""
        holders = [r for r in self._request_table if r.allocation is not None and not self._entitled(r)]
        if not holders:
            return False
        request = holders[-1]
        self._return_pages(request)
        request.start_over()
        request.step(PrefillEvent.PREEMPT)
        self._counters["preemptions"] += 1
        return True

    # ------------------------------------------------------------ ends

    def _request(self, session: SessionId, submit: Submit) -> PrefillRequest:
        now = self._clock.now()
        chain = block_hashes(submit.tokens, self._page_tokens, submit.salt)
        prefix = TokenPrefix.of(submit.tokens, self._page_tokens, submit.salt, chain)
        return PrefillRequest(session, submit, now, now + submit.deadline_s, prefix, chain)

    def _finish(self, request: PrefillRequest, reason: str, stop_token: int | None) -> None:
        self._sender.finish(request.submit.room)
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
        self._sender.fail(request.submit.room, kind, message)
        self._leave(request)

    def _leave(self, request: PrefillRequest) -> None:
        """The one way out of the books."""
        self._return_pages(request)
        if request.prefetch is not None:
            self._manager.stop_prefetch(request.prefetch)
        request.step(PrefillEvent.END)
        self._request_table.remove(request)
