"""The decode worker: one round hears, expires, resumes, grants, launches one token for each of a batch, publishes the
last.

It computes no prompt token: every row starts after the state that prefill handed over. Requests get pages as they go
on; when one can't, others leave the device for a while (`decode.retraction.retraction`).
"""

from __future__ import annotations

import logging
import os
import platform
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

from cache.allocation.allocation import Allocation
from cache.device.device_port import DEVICE, Completion, spans
from cache.manager.kv_cache_manager import KVCacheManager
from cache.prefix_cache.token_prefix import TokenPrefix
from contracts.block_hash import block_hashes
from contracts.clock import Clock
from contracts.config.cluster_config import Config
from contracts.damage import PREFIX, DamageSite, log_damage
from contracts.errors import ErrorKind, WireError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.fingerprint import Fingerprint
from contracts.messages.router_commands import Command, InvalidatePrefix, MigrationCommand, PullPrefix, Submit
from contracts.messages.worker_events import Done, LegReport, Tokens
from contracts.messages.worker_status import CheckReport, WorkerLimits
from contracts.messages.worker_status import WorkerStatus as Status
from decode.migration.outgoing_migrations import Books, OutgoingMigrations
from decode.migration.prefix_pull import PrefixPulls
from decode.request.reasoning_spans import ReasoningSpans
from decode.request.request import OFF_DEVICE, DecodeEvent, DecodePhase, DecodeRequest
from decode.retraction.memory_pressure import MemoryPressure
from decode.retraction.retraction import LostRequest, Retraction
from engine.runner.batch import NONFINITE, BatchRow, RowOutput, TokenDraw, TokenFromStep
from engine.runner.model_runner import ModelRunner
from engine.runner.sampler import needs_history
from transfer.rooms.kv_receiver import KVReceiver
from transfer.rooms.kv_sender import KVSender
from transfer.rooms.room_outcomes import ExpectedPrompt, HandoverFailed, PromptArrived
from worker.admission_check import AdmissionRefusal
from worker.nonfinite_rows import NonfiniteRows
from worker.request_table import RequestTable
from worker.step_overlap import StepOverlap
from worker.worker_loop import Sleeper, WorkerLoop, seconds_until

_STEPPING = (DecodePhase.RUNNING, DecodePhase.RETRACTING)
"""Whoever's steps may be under way."""
_LOOK_S = 0.002
"""Between two looks at copies, loads and pages when nobody can take a step meanwhile."""

log = logging.getLogger("twinpool.decode")


class DecodeWorker(WorkerLoop[DecodeRequest]):
    """See the module's prose. Implements `contracts.interfaces.worker_interface.Worker`."""

    role = Role.DECODE

    def __init__(
        self,
        name: WorkerName,
        incarnation: Incarnation,
        config: Config,
        engine: ModelRunner,
        manager: KVCacheManager,
        receiver: KVReceiver,
        waiter: Sleeper,
        *,
        sender: KVSender,
        context: int,
        clock: Clock,
        pause: Callable[[float], None],
    ) -> None:
        """`sender`: the end of the rooms in which other decode workers receive what this one hands on."""
        self._name, self._incarnation, self._config = name, incarnation, config
        self._engine, self._manager, self._receiver = engine, manager, receiver
        self._clock, self._pause = clock, pause
        self._reuse = config.cache_for(self.role).prefix_reuse
        self._reasoning = ReasoningSpans.of(config.cache_for(self.role))
        self._page_tokens = manager.spec.page_tokens
        self._full = manager.full
        self._pages = manager.pools.allocators[self._full]
        self.fits = WorkerLimits(manager.max_positions, context)
        fitness = NonfiniteRows(config.cluster.nonfinite_rows, config.cluster.nonfinite_window_s, clock)
        super().__init__(RequestTable(name, self.fits, clock), waiter, fitness)
        self._waiting: deque[DecodeRequest] = deque()
        self._running: deque[DecodeRequest] = deque()
        self._retraction = Retraction(manager, config.decode, clock)
        self._pressure = MemoryPressure(manager, config.decode, self._retraction)
        self._overlap = StepOverlap[DecodeRequest]()
        books = Books(self._depart, self._come_back, self._loaded, self._leave, self._fail, self._cache_pages)
        self._migrations = OutgoingMigrations(name, manager, sender, self._request_table, config, clock, books)
        self._prefix_pulls = PrefixPulls(manager, receiver, self._request_table, reuse=self._reuse)
        self._landed = False
        """Whether the last round committed something: then the next may have room for somebody."""
        self._steps = self._launches = 0
        self._counters = {
            "prompt_tokens_computed": 0.0,
            "prompt_tokens_held": 0.0,
            "tokens_generated": 0.0,
            "received_bytes": 0.0,
            "stale_pages": 0.0,
        }

    # ------------------------------------------------------------ the host's side

    def handle(self, session: SessionId, command: Command) -> None:
        if isinstance(command, MigrationCommand):
            self._on_migration_command(session, command)
            return
        self._migrations.offers.session = session
        if isinstance(command, InvalidatePrefix):
            self._manager.invalidate(TokenPrefix.of(command.tokens, self._page_tokens, command.salt))
            return
        submit = self._request_table.accept(session, command, self._cancel)
        if submit is None:
            return
        keys = block_hashes(submit.tokens, self._page_tokens, submit.salt)
        refusal = self._open(submit, keys)
        if refusal is not None:
            self._request_table.refuse(session, submit, refusal)
            return
        now = self._clock.now()
        prefix = TokenPrefix.of(submit.tokens, self._page_tokens, submit.salt, keys)
        request = DecodeRequest(session, submit, now, now + submit.deadline_s, prefix)
        self._request_table.add(request)
        self._waiting.append(request)

    def _on_migration_command(self, session: SessionId, command: MigrationCommand) -> None:
        if isinstance(command, PullPrefix):
            self._prefix_pulls.handle(session, command)
        else:
            self._migrations.handle(session, command)

    def wait(self, timeout_s: float) -> None:
        if not (self._overlap or self._landed or self._migrations.sending):
            # Of those who run nobody could take a step: they wait for loads, or for pages.
            timeout_s = min(timeout_s, _LOOK_S) if self._running or len(self._retraction) else timeout_s
            deadlines = self._request_table.next_deadline, self._receiver.next_deadline, self._migrations.next_deadline
            due = seconds_until(self._clock, *deadlines)
            self._waiter.wait(min(timeout_s, due))

    @property
    def drained(self) -> bool:
        at_work = self._request_table or self._overlap or self._receiver.rooms or self._manager.busy
        return self._request_table.draining and not at_work and self._migrations.quiet and self._migrations.offers.over

    def undrain(self) -> None:
        super().undrain()
        self._migrations.undrain()

    @property
    def control(self) -> str:
        return self._migrations.control

    @property
    def fingerprint(self) -> Fingerprint:
        return self._receiver.fingerprint

    @property
    def runnable(self) -> bool:
        return bool(self._running or self._overlap)

    def status(self) -> Status:
        return Status(
            name=self._name,
            role=self.role,
            state="draining" if self._request_table.draining else "ready",
            pid=os.getpid(),
            node=platform.node(),
            incarnation=self._incarnation,
            running=(
                running := sum(r.phase in (DecodePhase.RUNNING, DecodePhase.LEAVING) for r in self._request_table)
            ),
            waiting=len(self._request_table) - running,
            pages_total=self._pages.total,
            pages_free=self._manager.free_pages(self._full),
            steps=self._steps,
            outgoing=self._migrations.rooms,
            counters={
                **self._counters,
                **self._migrations.stats,
                "fetched_bytes": self._prefix_pulls.bytes,
                **self._retraction.counters,
                "retracted": len(self._retraction),
                **self._manager.stats(),
                f"{PREFIX}{DamageSite.LOGITS}": self._fitness.rows,
                "pages_damaged": self._receiver.damaged,
                "late_messages": self._receiver.late,
            },
        )

    def check(self) -> CheckReport:
        found = self._manager.check({pool: self._receiver.holds(pool) for pool in self._manager.spec.by_name})
        found += self._receiver.check() + self._migrations.check() + self._retraction.check()
        allocations = (
            sum(r.allocation is not None for r in self._request_table)
            + len(self._migrations.prefix_pushes)
            + len(self._prefix_pulls)
        )
        if allocations != self._manager.allocations:
            found.append(f"{self._manager.allocations} allocations, requests hold {allocations}")
        queues = {DecodePhase.WAITING: list(self._waiting), DecodePhase.RUNNING: list(self._running)}
        queues |= {phase: [r for r in self._retraction if r.phase is phase] for phase in OFF_DEVICE}
        for phase, queue in queues.items():
            members = [r for r in self._request_table if r.phase is phase]
            if {id(r) for r in members} != {id(r) for r in queue} or len(members) != len(queue):
                found.append(f"{len(members)} requests are {phase}, {len(queue)} are in that queue")
        for request in self._request_table:
            if (request.phase in (DecodePhase.WAITING, DecodePhase.RETRACTED)) != (
                request.allocation is None
            ) and not request.swapped:
                found.append(
                    f"request {request.submit.request_id} is {request.phase} and its allocation says otherwise"
                )
            lengths = (request.committed, request.launched, request.planned)
            known = len(request.tokens) - 1 if request.phase not in (DecodePhase.WAITING, DecodePhase.ARRIVING) else 0
            if lengths[0] != known or not known <= lengths[1] <= known + len(self._overlap) or lengths[1] != lengths[2]:
                found.append(f"request {request.submit.request_id} has {known} positions and says {lengths}")
        rooms, slots = self._receiver.rooms, self._receiver.slots
        return CheckReport(self._name, self._pages.total, slots.total, self._pages.leases, rooms, tuple(found))

    def close(self) -> None:
        self._reuse = False  # Nobody will come for what could be kept.
        try:
            for request in self._request_table:
                self._leave(request, "the worker closes")
            self._overlap.drop()
            self._prefix_pulls.close()
            self._migrations.prefix_pushes.close()
            self._manager.close()
        finally:
            self._migrations.close()
            self._receiver.close()
            self._waiter.close()

    # ------------------------------------------------------------ the round

    def _open(self, submit: Submit, keys: Sequence[bytes]) -> AdmissionRefusal | None:
        if submit.peer is None:
            return AdmissionRefusal(ErrorKind.INVALID, "decode needs a prefill worker to receive from")
        try:
            self._receiver.open(submit.room, submit.peer, ExpectedPrompt(tuple(keys), len(submit.tokens)))
        except WireError as error:
            return AdmissionRefusal(ErrorKind.ROOM, str(error))
        return None

    def _poll(self) -> None:
        self._recover(self._manager.poll())
        self._migrations.poll()
        outcomes = self._receiver.poll()
        if not outcomes:
            return
        by_room = {r.submit.room: r for r in self._request_table}
        for outcome in outcomes:
            request = by_room.get(outcome.room)
            if self._prefix_pulls.on_room(outcome):
                continue
            if request is None or not self._request_table.holds(request):
                if isinstance(outcome, PromptArrived):
                    outcome.release()
            elif isinstance(outcome, PromptArrived):
                self._start(request, outcome)
            elif isinstance(outcome, HandoverFailed):
                log.warning("request %s: room %s failed: %s", request.submit.request_id, outcome.room, outcome.message)
                self._fail(request, outcome.kind, outcome.message, outcome.blame)
            else:
                self._leave(request, "prefill ended it")

    def _start(self, request: DecodeRequest, arrived: PromptArrived) -> None:
        request.step(DecodeEvent.ARRIVED)
        assert request.allocation is not None
        self._manager.commit_transfer(request.allocation, len(request.submit.tokens), arrived.leases, arrived.digests)
        request.start(arrived.metadata)
        request.marks["arrived"] = self._clock.now() - request.arrived
        if arrived.metadata.computed_tokens:  # What another decode worker hands over was computed by nobody.
            seconds = request.marks["arrived"] - request.marks["grant"]
            self._retraction.rates.saw_prefill(len(request.submit.tokens), seconds)
        self._counters["received_bytes"] += arrived.bytes
        self._report(request, held=request.allocation.cached.total, received=arrived.bytes)
        self._running.append(request)
        if self._reuse and not request.allocation.invalid:
            # From now on others with the same prompt have it from here.
            self._manager.cache_pages(request.allocation, request.prefix, request.submit.priority, full_only=True)

    def _recover(self, invalid: list[Allocation]) -> None:
        """End attempts that relied on state which turned out damaged: the next one finds it gone and is sent it all."""
        for request in [r for r in self._request_table if r.allocation in invalid]:
            self._fail(request, ErrorKind.DAMAGED, "a page loaded for it was damaged")

    def _admit(self) -> None:
        """Who was here already comes back before anybody new is admitted."""
        self._lose(self._retraction.advance())
        self._lose(self._retraction.resume(lambda request: self._pressure.has_room_for(request, self._request_table)))
        if not self._retraction.first_in_line:
            self._grant()
        for request in [r for r in self._waiting if r.submit.migrating]:
            self._fail(request, ErrorKind.OVERLOADED, "there is no room for it now")
        self._manager.launch()
        self._recover(self._manager.poll())
        back, lost = self._retraction.returned()
        self._running += back
        self._lose(lost)

    def _lose(self, lost: list[LostRequest]) -> None:
        for one in lost:
            self._fail(one.request, one.kind, one.message)

    def _grant(self) -> None:
        """First come, first served: each gets pages for its prompt and its next step, if there is room for what it and
        those who run are expected to grow by; or all behind it wait. Who waits for another one's prompt holds up
        nobody."""
        for request in list(self._waiting):
            if self._waits_for_another(request):
                continue
            if not self._pressure.has_room_for(request, self._request_table):
                return
            submit, prefix = request.submit, request.prefix if self._reuse else request.prefix.head(0)
            prompt, owner = len(submit.tokens), f"room {submit.room}"
            reserved = self._manager.preallocate(
                prefix, prompt, request.positions_for(prompt + 1), owner, request.positions
            )
            if reserved is None:
                return
            allocation, leases = reserved
            # From here on the prefill worker may write to them, so nothing that was launched may still use them.
            granted = {pool: lease.indices for pool, lease in leases.items()}
            self._engine.device.touch(f"grant of {submit.room}", writes=spans(DEVICE, granted))
            if not self._receiver.grant(submit.room, leases, allocation.held()):
                self._manager.free(allocation)
                for lease in leases.values():
                    lease.release()
                return
            self._waiting.remove(request)
            request.allocation, request.behind = allocation, None
            request.step(DecodeEvent.GRANT)
            request.marks["grant"] = self._clock.now() - request.arrived
            self._counters["prompt_tokens_held"] += allocation.cached.total

    def _waits_for_another(self, request: DecodeRequest) -> bool:
        """Whether another request is receiving pages that this one can have from the tree afterwards.

        Only where at least half of that one's prompt is in common, so that it doesn't wait long for little; and not for
        ever. When that one ends without its prompt, this one goes on by itself, or behind the next.
        """
        if not self._reuse or request.submit.migrating or not len(request.prefix):
            return False
        if request.behind is None or request.behind.phase is not DecodePhase.ARRIVING:
            request.behind = self._receiving(request)
        if request.behind is None:
            return False
        now = self._clock.now()
        request.behind_since = now if request.behind_since is None else request.behind_since
        return now - request.behind_since < self._config.decode.prompt_wait_s

    def _receiving(self, request: DecodeRequest) -> DecodeRequest | None:
        """Who is receiving more of this request's prompt than the device has."""
        arriving = [
            r for r in self._request_table if r.phase is DecodePhase.ARRIVING and r.submit.salt == request.submit.salt
        ]
        there = self._manager.on_device(request.prefix) if arriving else 0
        for other in arriving:
            most = min(len(request.prefix), len(other.prefix))
            # Keys are chained: pages are in common up to the first that differs.
            common = bisect_left(range(most), True, key=lambda n: request.prefix.key(n) != other.prefix.key(n))
            if common > there and 2 * common >= len(other.prefix):
                return other
        return None

    def _batch(self) -> list[DecodeRequest]:
        """Up to the step's token budget, in turn: whoever waited longest for its step comes first.

        Where somebody can't be given the pages for its step, others leave.
        """
        able = (r for r in self._running if r.can_go_on and self._loaded(r))
        batch, short = self._pressure.backed(able, self._config.decode.max_batch_tokens)
        for victim in self._pressure.choose_victims(short, self._running):
            self._retract(victim)
        batch = [request for request in batch if request.phase is DecodePhase.RUNNING]
        for request in batch:
            request.planned += 1
        return batch

    def _retract(self, request: DecodeRequest, *, on_purpose: bool = False) -> None:
        self._running.remove(request)
        self._retraction.retract(request, on_purpose=on_purpose)

    def _retract_on_purpose(self) -> None:
        """`faults.retract_every`: all that runs and took a step since it came."""
        every = self._config.faults.retract_every
        if every and self._launches % every == 0:
            for request in [r for r in self._running if r.stepped or r.under_way]:
                self._retract(request, on_purpose=True)

    def _loaded(self, request: DecodeRequest) -> bool:
        """Whether all that was loaded for it is there and good: a request joins a batch with everything, or not."""
        return request.allocation is not None and self._manager.settled(request.allocation)

    def _compute(self) -> None:
        """Launch the next step, then commit the one before it."""
        batch = self._batch()
        if batch:
            self._launch(batch)
        self._landed = False
        for results in self._overlap.landed(go_on=bool(batch)):
            self._landed = True
            self._steps += 1
            for request, output in results:
                # Who ended while this step was under way has no use for what it drew.
                if request.phase in _STEPPING:
                    self._commit(request, output)
        self._migrations.settle()

    def _launch(self, batch: list[DecodeRequest]) -> None:
        step = self._engine.launch([self._row(request) for request in batch])
        self._overlap.launched(step, batch)
        for number, request in enumerate(batch):
            request.launched = request.planned
            request.latest = TokenFromStep(step, number)
            if self._manager.stateful and request.allocation is not None and request.launched % self._page_tokens == 0:
                self._manager.snapshot(request.allocation, request.launched)
        went = set(map(id, batch))
        self._running = deque([r for r in self._running if id(r) not in went] + batch)
        self._launches += 1
        self._retract_on_purpose()
        if self._config.faults.step_delay_s:
            self._pause(self._config.faults.step_delay_s)

    def _row(self, request: DecodeRequest) -> BatchRow:
        assert request.allocation is not None
        at, sampling = request.launched, request.submit.sampling
        tables = self._manager.block_tables(request.allocation, at, at + 1)
        full = tables.pop(self._full)
        history = tuple(request.tokens) if needs_history(sampling) else ()
        draw = TokenDraw(sampling, history, request.submit.prompt_len, at + 1)
        tokens = request.latest if request.under_way and request.latest is not None else request.tokens[-1:]
        return BatchRow(tokens, at, full.pages, draw, epochs=full.epochs, others=tables)

    def _commit(self, request: DecodeRequest, output: RowOutput) -> None:
        if output.stale:
            self._lost(request)
            return
        if output.nonfinite:
            self._nonfinite(request)
            return
        drawn, submit = output.drawn, request.submit
        assert drawn is not None
        computed = int(request.committed < len(submit.tokens))
        request.computed += computed
        self._counters["prompt_tokens_computed"] += computed
        self._counters["tokens_generated"] += 1
        logprobs = (drawn.logprob,) if drawn.logprob is not None else ()
        event = Tokens(submit.request_id, submit.attempt, len(request.tokens), (drawn.token,), logprobs)
        request.commit(drawn.token)
        if request.allocation is not None:
            self._manager.free_window_pages(request.allocation, request.committed)
        self._request_table.emit(request.session, event)
        if "first_step" not in request.marks:
            request.marks["first_step"] = self._clock.now() - request.arrived
        if drawn.token in submit.sampling.stop_token_ids:
            self._finish(request, "stop", drawn.token)
        elif request.generated >= submit.sampling.max_tokens:
            self._finish(request, "length", None)

    def _lost(self, request: DecodeRequest) -> None:
        """A page of it belongs to somebody else: the token is dropped, the tree forgets what it has of the prompt, and
        the router starts another attempt."""
        self._counters["stale_pages"] += 1
        log_damage(
            log, DamageSite.STEP, request=request.submit.request_id, positions=[request.committed, request.launched]
        )
        assert request.allocation is not None
        self._manager.invalidate(request.prefix)
        request.allocation.invalid = True
        self._fail(request, ErrorKind.WORKER, "a step found a page of it given away")

    def _nonfinite(self, request: DecodeRequest) -> None:
        """Its logits were no numbers: no token is drawn from them, and its state isn't kept for others."""
        self._fitness.nonfinite()
        log_damage(
            log, DamageSite.LOGITS, request=request.submit.request_id, positions=[request.committed, request.launched]
        )
        assert request.allocation is not None
        self._manager.invalidate(request.prefix)
        request.allocation.invalid = True
        self._fail(request, ErrorKind.NONFINITE, NONFINITE)

    # ------------------------------------------------------------ ends

    def _cache_pages(self, request: DecodeRequest) -> None:
        """Keep the state of what it has committed, for the next turn of the conversation."""
        allocation = request.allocation
        if not self._reuse or allocation is None or allocation.invalid:
            return
        tokens = request.tokens[: request.committed]
        if self._reasoning is not None:
            tokens = tokens[: self._reasoning.keeps(tokens, request.submit.prompt_len)]
        self._manager.seal([(allocation, request.committed)])
        known = request.prefix.head(len(tokens) // self._page_tokens)
        prefix = known.longer(tokens[len(known) * self._page_tokens :])
        self._manager.cache_pages(allocation, prefix, request.submit.priority)

    def _finish(self, request: DecodeRequest, reason: str, stop_token: int | None) -> None:
        submit = request.submit
        request.marks["done"] = self._clock.now() - request.arrived
        key = (submit.request_id, submit.attempt)
        self._report(request, computed=request.computed)
        self._migrations.ended(request)
        self._pressure.output_lengths.ended(request.generated)
        self._request_table.emit(request.session, Done(*key, reason, stop_token))
        self._leave(request, reason)

    def _report(self, request: DecodeRequest, *, held: int = 0, computed: int = 0, received: int = 0) -> None:
        key = (request.submit.request_id, request.submit.attempt)
        progress = LegReport(*key, self.role, self._name, dict(request.marks), held, computed, received)
        self._request_table.emit(request.session, progress)

    def _fail(self, request: DecodeRequest, kind: ErrorKind, message: str, blame: WorkerName | None = None) -> None:
        submit = request.submit
        done = Done(submit.request_id, submit.attempt, "error", error=kind, message=message, blame=blame)
        self._request_table.emit(request.session, done)
        self._leave(request, message)

    def _cancel(self, request: DecodeRequest, reason: str) -> None:
        if request.phase in _STEPPING:
            # A stop string of the router's ends answers this way too: it grows no further.
            self._pressure.output_lengths.ended(request.generated)
        self._leave(request, reason)

    def _depart(self, request: DecodeRequest) -> None:
        self._running.remove(request)
        request.step(DecodeEvent.DEPART)

    def _come_back(self, request: DecodeRequest) -> None:
        request.step(DecodeEvent.BACK)
        self._running.append(request)

    def _leave(self, request: DecodeRequest, reason: str) -> None:
        """The one way out of the books, from any phase; the room gives back what it holds by its own rules."""
        self._migrations.drop(request, reason)
        self._receiver.abort(request.submit.room, reason)
        if request.allocation is not None:
            if request.phase in _STEPPING or request.phase is DecodePhase.LEAVING:
                self._cache_pages(request)
            under_way: list[Completion] = [request.latest.step.completion] if request.latest is not None else []
            if request.returning is not None:
                under_way.append(request.returning.restored)
            self._manager.free(request.allocation, under_way)
            request.allocation = None
        self._retraction.leave(request)
        # Where anything above breaks off, as in a round that failed, the request is still in the books, whole.
        queue = {DecodePhase.WAITING: self._waiting, DecodePhase.RUNNING: self._running}.get(request.phase)
        if queue is not None:
            queue.remove(request)
        request.step(DecodeEvent.END)
        self._request_table.remove(request)
