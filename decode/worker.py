"""The decode worker: a round polls rooms, expires, admits, launches a step and commits the one before it.

It computes no prompt token: every row starts after the state that prefill handed over. The scheduler
(`decode.scheduler`) decides which requests get pages and steps, the transfer queue (`decode.transfer_queue`) takes in
their prompts, the step commit (`decode.step_commit`) launches steps and commits them, and `decode.migration` moves
requests and finished pages to other decode workers. They report outcomes to the worker, which alone takes requests out
of the table (`_leave`) and tells routers what became of them; the tokens of a step go to their routers as it is
committed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from msgspec import structs
from msgspec.structs import replace

from twinpool.cache.allocation import Allocation
from twinpool.cache.prefix_cache.token_prefix import TokenPrefix
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import UNOWNED, SessionId
from twinpool.contracts.messages import router_commands as commands
from twinpool.contracts.messages.kept_answers import Attach, Attached
from twinpool.contracts.messages.worker_events import Done
from twinpool.contracts.messages.worker_status import CheckReport, EndedWorker, WorkerStatus
from twinpool.decode.drafting import Drafter, Drafting, PromptLookupDrafter
from twinpool.decode.kept_answers import KeptAnswers
from twinpool.decode.migration.drain_offers import DrainAdvisor, MigrationCosts, PrefixOffers
from twinpool.decode.migration.outgoing_migrations import OutgoingMigrations
from twinpool.decode.migration.prefix_push import PrefixPulls, PrefixPushes
from twinpool.decode.request import (
    DecodeEvent,
    DecodePhase,
    DecodeRequest,
    PromptPreempted,
    PromptReceived,
    RequestFailed,
    RequestFinished,
    RequestLeft,
    RouterEvent,
)
from twinpool.decode.request_pages import DecodePages
from twinpool.decode.retraction.memory_pressure import OutputLengths
from twinpool.decode.scheduler import DecodeScheduler
from twinpool.decode.step_commit import DecodeStepCommit
from twinpool.decode.transfer_queue import TransferQueue
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome
from twinpool.transfer.rooms.room_outcomes import RoomGranted, RoomReleased
from twinpool.transfer.rooms.sender.sender_rooms import SenderOutcome
from twinpool.worker.request_table import AdmissionRefusal
from twinpool.worker.worker_loop import WorkerLoop, WorkerSetup, seconds_until

Outcome = (
    RouterEvent
    | RequestFinished
    | RequestFailed
    | RequestLeft
    | PromptReceived
    | PromptPreempted
    | SenderOutcome
    | ReceiverOutcome
)
_LOOK_S = 0.002
"""Seconds between two looks at copies, loads and pages when no request can take a step meanwhile."""


class DecodeWorker(WorkerLoop[DecodeRequest]):
    """The worker of the decode role; see the module's prose. Implements `contracts.interfaces.worker_interface.Worker`,
    which has half of its more than twenty methods; the others are the steps of a round, and one for each outcome that
    the parts report."""

    role = Role.DECODE
    prompts: ClassVar[type[TransferQueue]] = TransferQueue
    """Where prompts come from: the rooms in which others hand them over."""

    def __init__(self, setup: WorkerSetup, receiver: KVReceiver, drafter: Drafter | None = None) -> None:
        """`drafter`: makes drafts, where the configuration asks for some; None: by prompt lookup."""
        super().__init__(setup)
        config, engine, manager, clock = setup.config, setup.engine, setup.manager, setup.clock
        sender, pause = setup.sender, setup.pause
        self._receiver = receiver
        self._kept = KeptAnswers(config.decode, clock)
        self._claims = itertools.count(1)
        requests, fitness = self._request_table, self._fitness
        self._lengths = OutputLengths(config.decode.output_length_quantile, config.decode.first_answer_tokens)
        self._request_pages = pages = DecodePages(manager, config.cache_for(self.role))
        self._prompts = self.prompts(receiver, requests, pages, engine.device, config, clock)
        drafting = Drafting(pages, config.decode, drafter or PromptLookupDrafter())
        self._scheduler = DecodeScheduler(requests, pages, self._prompts, self._lengths, drafting, config, clock)
        self._steps = DecodeStepCommit(requests, pages, engine, fitness, config, pause, drafting, self._grammars)
        self._advisor = advisor = DrainAdvisor(requests, manager.spec, MigrationCosts(self._lengths), clock)
        self._migrations = OutgoingMigrations(requests, pages, sender, self._scheduler, advisor, config.decode, clock)
        self._pushes = PrefixPushes(requests, pages, sender, config, clock)
        self._pulls = PrefixPulls(requests, pages, receiver)
        self._offers = PrefixOffers(setup.name, manager, self._pushes, requests, config, clock)
        self._commands: dict[type[commands.Command], Callable[[SessionId, Any], Iterable[Outcome]]] = {
            commands.InvalidatePrefix: self._invalidate,
            commands.PauseForMigration: self._migrations.begin,
            commands.ResumeHere: self._migrations.undo,
            commands.PushPrefix: self._push,
            commands.PullPrefix: self._pulls.begin,
            Attach: self._attach,
        }

    # ------------------------------------------------------------ the host's side

    def _take(self, session: SessionId, command: commands.Command, grammar: AnswerGrammar | None) -> None:
        if isinstance(command, commands.Submit | commands.Cancel | commands.Audit):
            self._act(self._submit(session, command, grammar))
        else:
            self._act(self._commands[type(command)](session, command))

    def wait(self, timeout_s: float) -> None:
        if not (self._steps or self._steps.committed or self._migrations.sending or self._pushes.writing):
            # No running request could take a step: they wait for loads, or for pages.
            timeout_s = min(timeout_s, _LOOK_S) if self._scheduler.busy else timeout_s
            self._waiter.wait(min(timeout_s, seconds_until(self._clock, *self._deadlines)))

    @property
    def _deadlines(self) -> tuple[float | None, ...]:
        parts = (
            self._receiver, self._sender, self._migrations, self._advisor, self._pushes, self._offers, self._grammars,
            self._kept,
        )  # fmt: skip
        return self._request_table.next_deadline, *(part.next_deadline for part in parts)

    def workers_ended(self, ended: Sequence[EndedWorker]) -> None:
        super().workers_ended(ended)
        self._receiver.workers_ended(ended)

    @property
    def drained(self) -> bool:
        waiting = self._request_table or self._grammars
        at_work = waiting or self._steps or self._receiver.rooms or self._manager.busy
        return self._request_table.draining and not at_work and self._sender.quiet and self._offers.over

    def undrain(self) -> None:
        super().undrain()
        self._act(self._advisor.withdraw())
        self._offers.withdraw()

    @property
    def runnable(self) -> bool:
        return bool(self._scheduler.running or self._steps)

    def status(self) -> WorkerStatus:
        running = sum(self._runs(r) for r in self._request_table)
        return self._report.status(
            running=running,
            steps=self._ended,
            outgoing=self._sender.rooms,
            counters=self._counters(),
            prompt_tokens=self._prompt_tokens,
            ungranted=len(self._scheduler.waiting),
        )

    @property
    def _prompt_tokens(self) -> int:
        """Tokens of prompts that this worker has to compute."""
        return 0

    @property
    def _ended(self) -> int:
        """Steps that were committed."""
        return self._steps.steps

    def _runs(self, request: DecodeRequest) -> bool:
        """Whether the request counts as running in the status; else it waits."""
        return request.phase in (DecodePhase.RUNNING, DecodePhase.LEAVING)

    def _counters(self) -> dict[str, float]:
        return {
            **self._steps.counters,
            **self._prompts.counters,
            **self._scheduler.counters,
            **self._migrations.counters,
            **self._advisor.counters,
            **self._sender.outgoing,
            **self._sender.links,
            "given_bytes": self._pushes.bytes,
            "fetched_bytes": self._pulls.bytes,
            "pages_damaged": self._receiver.damaged,
            "late_messages": self._receiver.late,
            "kept_answers": len(self._kept),
            "kept_answers_forgotten": self._kept.forgotten,
            "unowned": self._unowned,
        }

    def check(self) -> CheckReport:
        rooms, slots = self._receiver.rooms, self._receiver.slots.total
        report = self._report.check(self._violations(), self._allocations, rooms=rooms, slots=slots)
        return replace(report, kept_answers=len(self._kept) + self._unowned)

    def _violations(self) -> list[str]:
        """Recount; returns what doesn't agree."""
        held = {pool: self._receiver.holds(pool) for pool in self._manager.spec.by_name}
        found = self._manager.check(held) + self._receiver.check() + self._sender.check()
        found += self._migrations.check() + self._scheduler.check() + self._kept.check(self._unowned)
        return found + [wrong for request in self._request_table for wrong in request.check(len(self._steps))]

    @property
    def _allocations(self) -> int:
        """Allocations of the KV cache manager that requests, pushes and pulls hold."""
        return sum(r.allocation is not None for r in self._request_table) + len(self._pushes) + len(self._pulls)

    @property
    def _unowned(self) -> int:
        """Requests that run for nobody."""
        return sum(request.session == UNOWNED for request in self._request_table)

    def close(self) -> None:
        self._grammars.close()
        self._kept.clear()
        self._request_pages.close()
        try:
            for request in self._request_table:
                self._leave(request, "the worker closes")
            self._steps.drop()
            self._pulls.close()
            self._pushes.close()
            self._manager.close()
        finally:
            self._sender.close()
            self._receiver.close()
            self._engine.device.close()
            self._waiter.close()

    # ------------------------------------------------------------ what routers say

    def _submit(
        self, session: SessionId, command: commands.Submit | commands.Cancel | commands.Audit,
        grammar: AnswerGrammar | None,
    ) -> Iterable[Outcome]:  # fmt: skip
        self._offers.heard_from(session)
        if isinstance(command, commands.Cancel) and command.keep:
            whole = self._request_table.find(session, command.request_id, command.attempt)
            if whole is not None:
                self._keep(whole)
        submit = self._request_table.accept(session, command, self._cancel)
        if submit is None:
            return ()
        if submit.name is not None:
            self._supersede(submit)
        opened = self._prompts.open(session, submit, grammar)
        if isinstance(opened, AdmissionRefusal):
            self._request_table.refuse(session, submit, opened)
        else:
            opened.claim = next(self._claims)
            self._request_table.add(opened)
            self._scheduler.add(opened)
            if session == UNOWNED:  # Its router was lost while its grammar was compiled.
                self._detach(opened, "its router is gone")
        return ()

    def _invalidate(self, session: SessionId, command: commands.InvalidatePrefix) -> Iterable[Outcome]:
        self._offers.heard_from(session)
        prefix = TokenPrefix.of(command.tokens, self._request_pages.page_tokens, command.salt)
        self._manager.finished.invalidate(prefix)
        return ()

    def _push(self, session: SessionId, command: commands.PushPrefix) -> Iterable[Outcome]:
        if command.tokens:
            self._offers.asked_for()
        return self._pushes.begin(session, command)

    # ------------------------------------------------------------ answers with a name

    def _detach(self, request: DecodeRequest, reason: str) -> None:
        others = self._unowned - (request.session == UNOWNED)
        if request.submit.name is not None and not self._kept.room(others):
            self._cancel(request, f"{reason}, and too many run for nobody")
        else:
            super()._detach(request, reason)

    def _supersede(self, submit: commands.Submit) -> None:
        """Forget what is kept under the name of a request that begins anew, and end what runs under it for nobody."""
        assert submit.name is not None
        self._kept.forget(submit.name)
        for request in self._request_table:
            name = request.submit.name
            same = name is not None and (name.key, name.index) == (submit.name.key, submit.name.index)
            if same and request.session == UNOWNED and request.submit.request_id != submit.request_id:
                self._cancel(request, "it was begun anew")

    def _keep(self, request: DecodeRequest, reason: str = "", stop_token: int | None = None) -> None:
        """Keep the tokens of a request that ends here, if it has a name and tokens."""
        name, told = request.submit.name, request.told(self._clock.now())
        if name is not None and told is not None and told.tokens:
            others = self._unowned - (request.session == UNOWNED)
            self._kept.keep(name, structs.replace(told, running=False, reason=reason, stop_token=stop_token), others)

    def _attach(self, session: SessionId, command: Attach) -> Iterator[Outcome]:
        """Hand all that has this key to the router that asks, but not what another router claimed later than it knows;
        routers that had it are told."""
        self._offers.heard_from(session)
        named = [r for r in self._request_table if r.submit.name is not None and r.submit.name.key == command.key]
        ended = self._kept.of(command.key)
        bodies = {r.submit.name.body for r in named if r.submit.name is not None} | {name.body for name, _ in ended}
        ask = command.request_id, command.attempt
        if bodies - {command.body}:
            yield RouterEvent(session, Attached(*ask, other_body=True))
            return
        newest = max((r.claim for r in named if r.session not in (UNOWNED, session)), default=0)
        if command.seen is not None and newest > command.seen:
            yield RouterEvent(session, Attached(*ask, contested=newest))
            return
        answers = [answer for _, answer in ended]
        for request in named:
            yield from self._migrations.recall(request)
            told = request.told(self._clock.now())
            if told is None or not self._request_table.holds(request):
                continue
            answers.append(told)
            submit = request.submit
            if request.session not in (UNOWNED, session):
                message = "the client came back on another connection, which goes on with this answer"
                done = Done(submit.request_id, submit.attempt, "error", error=ErrorKind.SUPERSEDED, message=message)
                yield RouterEvent(request.session, done)
            self._hand_to(session, request, request.arrived + submit.deadline_s)
            request.claim = next(self._claims)
            request.tells_first = request.tells_first or not told.started
            self._advisor.forget(request)
        yield RouterEvent(session, Attached(*ask, answers=tuple(answers)))

    # ------------------------------------------------------------ the round

    def _poll(self) -> None:
        self._act(self._recover(self._manager.poll()))
        self._act(self._migrations.poll())
        self._pushes.round()
        if self._request_table.draining:
            self._act(self._advisor.advise())
            self._act(self._offers.offer())
        self._act(self._prompts.poll())

    def _recover(self, invalid: list[Allocation]) -> Iterable[Outcome]:
        """What becomes of requests whose allocations are in `invalid`, as state that was loaded for them is damaged."""
        return self._steps.recover(invalid)

    def _expire(self) -> None:
        super()._expire()
        self._kept.expire()

    def _admit(self) -> None:
        retracted = len(self._scheduler.retraction) > 0
        admits = retracted or bool(self._scheduler.waiting)
        self._act(self._scheduler.admit())
        self._manager.launch()
        if admits:  # Loads that were planned just now may have come at once.
            self._act(self._recover(self._manager.poll()))
        if not retracted:
            return
        self._act(self._scheduler.returned())
        for request in self._scheduler.retraction.take_noted():
            if self._request_table.holds(request):
                self._request_table.emit(request.session, request.report(self._name))

    def _compute(self) -> None:
        """Launch the next step, then commit the one before it."""
        batch = self._scheduler.next_batch()
        if batch:
            self._steps.launch(batch)
            self._scheduler.launched(batch)
        self._act(self._steps.landed(go_on=bool(batch)))
        self._act(self._migrations.settle())

    def _act(self, outcomes: Iterable[Outcome]) -> None:
        """Act on the outcomes that the parts report, one by one."""
        for told in outcomes:
            match told:
                case RouterEvent(session, event):
                    self._request_table.emit(session, event)
                case RequestFinished(request, reason, stop_token):
                    self._finish(request, reason, stop_token)
                case RequestFailed(request, kind, message, blame):
                    self._fail(request, kind, message, blame)
                case RequestLeft(request, reason) if request.tells_first and request.waits_for_prefill:
                    # Prefill has told the end to a router that doesn't have the request any more.
                    self._fail(request, ErrorKind.ROOM, reason)
                case RequestLeft(request, reason):
                    self._leave(request, reason)
                case PromptReceived(request, nbytes):
                    self._start(request, nbytes)
                case PromptPreempted(request):
                    self._scheduler.requeue(request)
                case RoomGranted() | RoomReleased():
                    self._pushes.on_room(told)
                case _:
                    self._act(self._pulls.on_room(told))

    def _start(self, request: DecodeRequest, received: int) -> None:
        report = request.report(self._name, held=request.held.cached.total, received=received)
        self._request_table.emit(request.session, report)
        self._tell_first(request)
        self._scheduler.start(request)
        self._request_pages.cache_prompt(request)

    def _tell_first(self, request: DecodeRequest) -> None:
        """Tell a router that came later what prefill has told another one: what its cache had, and the first token."""
        if request.tells_first:
            for event in request.first_token(self._name):
                self._request_table.emit(request.session, event)

    # ------------------------------------------------------------ ends

    def _finish(self, request: DecodeRequest, reason: str, stop_token: int | None) -> None:
        request.marks["done"] = self._clock.now() - request.arrived
        self._request_table.emit(request.session, request.report(self._name, computed=request.computed))
        self._lengths.ended(request.generated)
        self._request_table.finished(request, reason, stop_token)
        self._keep(request, reason, stop_token)
        self._leave(request, reason)

    def _fail(self, request: DecodeRequest, kind: ErrorKind, message: str, blame: WorkerName | None = None) -> None:
        self._request_table.failed(request, kind, message, blame)
        if request.session == UNOWNED and kind.retryable and kind is not ErrorKind.NONFINITE:
            self._keep(request)  # Nobody is there to try it again: it can go on from its tokens later.
        self._leave(request, message)

    def _cancel(self, request: DecodeRequest, reason: str) -> None:
        if request.stepping:
            # A stop string of the router's ends answers this way too: it grows no further.
            self._lengths.ended(request.generated)
        self._leave(request, reason)

    def _leave(self, request: DecodeRequest, reason: str) -> None:
        """The one way out of the table, from any phase."""
        self._advisor.forget(request)
        self._migrations.drop(request, reason)
        if (report := self._prompts.abort(request, reason)) is not None:
            self._request_table.emit(request.session, report)
        self._request_pages.free(request)
        # Where anything above breaks off, as in a round that failed, the request is still in the table, whole.
        self._scheduler.remove(request)
        request.step(DecodeEvent.END)
        self._request_table.remove(request)
