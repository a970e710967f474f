"""The decode worker: a round polls rooms, expires, admits, launches a step and commits the one before it.

It computes no prompt token: every row starts after the state that prefill handed over. The scheduler
(`decode.scheduler`) decides which requests get pages and steps, the transfer queue (`decode.transfer_queue`) takes in
their prompts, the step commit (`decode.step_commit`) launches steps and commits them, and `decode.migration` moves
requests and finished pages to other decode workers. They report outcomes to the worker, which alone takes requests out
of the table (`_leave`) and tells routers what became of them; the tokens of a step go to their routers as it is
committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, assert_never

from msgspec.structs import replace

from twinpool.cache.allocation import Allocation
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import UNOWNED, SessionId
from twinpool.contracts.messages import router_commands as commands
from twinpool.contracts.messages.kept_answers import Attach, Detach
from twinpool.contracts.messages.worker_status import CheckReport, WorkerStatus
from twinpool.decode.drafting import Drafter, Drafting
from twinpool.decode.kept_answers import NamedAnswers
from twinpool.decode.migration.drain_offers import DrainAdvisor, MigrationCosts, PrefixOffers
from twinpool.decode.migration.outgoing_migrations import OutgoingMigrations
from twinpool.decode.migration.prefix_push import PrefixPulls, PrefixPushes
from twinpool.decode.request import (
    DecodeEvent,
    DecodePages,
    DecodePhase,
    DecodeRequest,
    PromptPreempted,
    PromptReceived,
    RequestFailed,
    RequestFinished,
    RequestLeft,
    RouterEvent,
)
from twinpool.decode.retraction.memory_pressure import OutputLengths
from twinpool.decode.scheduler import DecodeScheduler
from twinpool.decode.step_commit import DecodeStepCommit
from twinpool.decode.transfer_queue import TransferQueue
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome
from twinpool.transfer.rooms.room_states import RoomGranted, RoomReleased
from twinpool.transfer.rooms.sender.sender_rooms import SenderOutcome
from twinpool.worker.request_table import AdmissionRefusal
from twinpool.worker.worker_loop import WorkerLoop, WorkerSetup

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
    """The worker of the decode role; see the module's prose. Implements `contracts.interfaces.worker_interface.Worker`:
    commands come in by `_take`, a round is `_poll`, `_admit` and `_compute`, `_act` does what the parts report, and
    requests end by `_leave`."""

    role = Role.DECODE
    prompts: ClassVar[type[TransferQueue]] = TransferQueue
    """Where prompts come from: the rooms in which others hand them over."""
    at_work: ClassVar[frozenset[DecodePhase]] = frozenset({DecodePhase.RUNNING, DecodePhase.LEAVING})
    """The phases of requests that count as running in the status; the others wait."""

    def __init__(self, setup: WorkerSetup, drafter: Drafter | None = None) -> None:
        """`setup` has a receiver. `drafter`: makes drafts, where the configuration asks for some; None: what it
        asks for."""
        super().__init__(setup)
        config, engine, manager, clock = setup.config, setup.engine, setup.manager, setup.clock
        sender, receiver, pause = setup.sender, setup.receiver, setup.pause
        assert receiver is not None
        self._receiver = receiver
        requests, fitness = self._request_table, self._fitness
        self._lengths = OutputLengths(config.decode.output_length_quantile, config.decode.first_answer_tokens)
        self._request_pages = pages = DecodePages(manager, config.cache_for(self.role))
        self._prompts = self.prompts(receiver, requests, pages, engine.device, config, clock)
        drafting = Drafting(pages, config.decode, engine, clock, drafter)
        self._scheduler = DecodeScheduler(requests, pages, self._prompts, self._lengths, drafting, config, clock)
        self._steps = DecodeStepCommit(requests, pages, engine, fitness, config, pause, drafting, self._gate)
        self._advisor = advisor = DrainAdvisor(requests, manager.spec, MigrationCosts(self._lengths), clock)
        self._migrations = OutgoingMigrations(requests, pages, sender, self._scheduler, advisor, config.decode, clock)
        self._pushes = PrefixPushes(requests, pages, sender, config, clock)
        self._pulls = PrefixPulls(requests, pages, receiver)
        self._offers = PrefixOffers(setup.name, manager, self._pushes, requests, config, clock)
        self._named = NamedAnswers(requests, self._migrations, advisor, config.decode, self._hand_to)
        report, named, pushes, pulls = self.report, self._named, self._pushes, self._pulls
        self._may_go_on = self._named.may_go_on
        self._peer_parts.append(receiver)
        report.counted += (
            self._steps, drafting, self._prompts, self._scheduler, self._migrations, advisor, sender, receiver, pushes,
            pulls, named,
        )  # fmt: skip
        report.timed += (receiver, self._migrations, advisor, pushes, self._offers, named)
        report.recounted += (receiver, self._migrations, self._scheduler, named)
        report.holding += (pushes, pulls)

    # ------------------------------------------------------------ the host's side

    def _take(self, session: SessionId, command: commands.Command, grammar: AnswerGrammar | None) -> None:
        self._offers.heard_from(session)
        match command:
            case commands.Submit() | commands.Cancel() | commands.Audit():
                self._submit(session, command, grammar)
            case commands.InvalidatePrefix():
                prefix = TokenPrefix.of(command.tokens, self._request_pages.page_tokens, command.salt)
                self._manager.finished.invalidate(prefix)
            case commands.PauseForMigration():
                self._act(self._migrations.begin(session, command))
            case commands.ResumeHere():
                self._act(self._migrations.undo(session, command))
            case commands.PushPrefix():
                if command.tokens:
                    self._offers.asked_for()
                self._act(self._pushes.begin(session, command))
            case commands.PullPrefix():
                self._act(self._pulls.begin(session, command))
            case Attach():
                self._act(self._named.attach(session, command))
            case Detach():
                raise AssertionError("the loop carries it out")
            case _:
                assert_never(command)

    def _submit(
        self, session: SessionId, command: commands.Submit | commands.Cancel | commands.Audit,
        grammar: AnswerGrammar | None,
    ) -> None:  # fmt: skip
        """Take in a new request, or end one."""
        if isinstance(command, commands.Cancel) and command.keep:
            whole = self._request_table.find(session, command.request_id, command.attempt)
            if whole is not None:
                self._named.keep(whole)
        submit = self._request_table.accept(session, command, self._cancel)
        if submit is None:
            return
        for before in self._named.superseded(submit):
            self._cancel(before, "it was begun anew")
        opened = self._prompts.open(session, submit, grammar)
        if isinstance(opened, AdmissionRefusal):
            self._request_table.refuse(session, submit, opened)
            return
        self._named.claim(opened)
        self._request_table.add(opened)
        self._scheduler.add(opened)
        if session == UNOWNED:  # Its router was lost while its grammar was compiled.
            self._detach(opened, "its router is gone")

    def wait(self, timeout_s: float) -> None:
        if not (self._steps or self._steps.committed or self._migrations.sending or self._pushes.writing):
            # No running request could take a step: they wait for loads, or for pages.
            timeout_s = min(timeout_s, _LOOK_S) if self._scheduler.busy else timeout_s
            self._waiter.wait(min(timeout_s, self.report.next_due(self._clock)))

    @property
    def emptied(self) -> bool:
        waiting = self._request_table or self._gate
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
        running = sum(request.phase in self.at_work for request in self._request_table)
        return self.report.status(running=running, steps=self._steps.steps, ungranted=len(self._scheduler.waiting))

    def check(self) -> CheckReport:
        held = {pool: self._receiver.holds(pool) for pool in self._manager.spec.by_name}
        found = self._manager.check(held)
        found += [wrong for request in self._request_table for wrong in request.check(len(self._steps))]
        report = self.report.check(found, rooms=self._receiver.rooms, slots=self._receiver.slots.total)
        return replace(report, kept_answers=self._named.bounded)

    def close(self) -> None:
        self._gate.close()
        self._named.clear()
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

    # ------------------------------------------------------------ the round

    def _poll(self) -> None:
        self._act(self._recover(self._manager.poll()))
        self._act(self._migrations.poll())
        self._pushes.round()
        self._named.expire()
        if self._request_table.draining:
            self._act(self._advisor.advise())
            self._act(self._offers.offer())
        self._act(self._prompts.poll())

    def _recover(self, invalid: list[Allocation]) -> Iterable[Outcome]:
        """What becomes of requests whose allocations are in `invalid`, as state that was loaded for them is damaged."""
        return self._steps.recover(invalid)

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
        if request.tells_first:  # Its router came later: prefill has told another one.
            for event in request.first_token(self._name):
                self._request_table.emit(request.session, event)
        self._scheduler.start(request)
        self._request_pages.cache_prompt(request)

    # ------------------------------------------------------------ ends

    def _finish(self, request: DecodeRequest, reason: str, stop_token: int | None) -> None:
        request.marks["done"] = self._clock.now() - request.arrived
        self._request_table.emit(request.session, request.report(self._name, computed=request.computed))
        self._lengths.ended(request.generated)
        self._request_table.finished(request, reason, stop_token)
        self._named.keep(request, reason, stop_token)
        self._leave(request, reason)

    def _fail(self, request: DecodeRequest, kind: ErrorKind, message: str, blame: WorkerName | None = None) -> None:
        self._request_table.failed(request, kind, message, blame)
        if request.session == UNOWNED and kind.retryable and kind is not ErrorKind.NONFINITE:
            self._named.keep(request)  # Nobody is there to try it again: it can go on from its tokens later.
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
