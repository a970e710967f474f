"""The worker loop of either role: one round, the worker's side towards the host that steps it, and its reports."""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.damage import PREFIX, DamageSite
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import UNOWNED, SessionId
from twinpool.contracts.messages.kept_answers import Detach
from twinpool.contracts.messages.router_commands import Audit, Command, Submit
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, EndedWorker, WorkerLimits, WorkerStatus
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.launched_step import take_part
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar, GrammarEngine
from twinpool.engine.tensors.adapters import AdapterStore
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.request_table import AdmissionRefusal, R, RequestGate, RequestTable
from twinpool.worker.step_commit import NonfiniteRows


class Sleeper(Protocol):
    """The part of `Waiter` that a worker uses."""

    def wait(self, timeout_s: float) -> None:
        """Return when something may have come, when `wake` was called, or after `timeout_s`."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker of any role is built of."""

    name: WorkerName
    incarnation: Incarnation
    config: Config
    engine: ModelRunner
    manager: KVCacheManager
    sender: KVSender
    """The sending end of the rooms in which this worker hands requests over."""
    waiter: Sleeper
    context: int
    """Positions that a request of the model may have, prompt and answer."""
    clock: Clock
    pause: Callable[[float], None]
    """Sleeps for so many seconds (`faults.step_delay_s`)."""
    grammars: GrammarEngine | None = None
    """Compiles the grammars that answers follow; None: answers with one are refused."""
    adapters: AdapterStore | None = None
    """The adapters that requests may have; None: requests with one are refused."""
    routed: bool = False
    """Whether requests may ask for the experts that their tokens go to."""
    receiver: KVReceiver | None = None
    """The receiving end of the rooms in which others hand requests over; prefill has none."""


class Counting(Protocol):
    """A part of a worker that counts."""

    @property
    def counters(self) -> Mapping[str, float]: ...


class Timed(Protocol):
    """A part of a worker that has something to do at a time."""

    @property
    def next_deadline(self) -> float | None:
        """In seconds of the worker's clock; None while it has nothing to do by itself."""


class Recounted(Protocol):
    """A part of a worker that can recount what it holds."""

    def check(self) -> list[str]:
        """Returns what doesn't agree."""


class Holding(Protocol):
    """A part of a worker, besides its requests, that holds allocations of the KV cache manager."""

    @property
    def allocations(self) -> int: ...


class WorkerReport:
    """What a worker tells of itself: it asks the parts that are listed here, and the caller passes the rest."""

    def __init__(self, setup: WorkerSetup, role: Role, requests: RequestTable[Any], fitness: NonfiniteRows) -> None:
        self._setup, self._role, self.requests, self._fitness = setup, role, requests, fitness
        self._manager = setup.manager
        self._pages = setup.manager.pools.allocators[setup.manager.full]
        self.counted: list[Counting] = []
        """What parts count under one name is added up."""
        self.timed: list[Timed] = [requests, setup.sender]
        self.recounted: list[Recounted] = [setup.sender]
        self.holding: list[Holding] = []

    def status(self, *, running: int, steps: int, prompt_tokens: int = 0, ungranted: int = 0) -> WorkerStatus:
        """Return the status. `running`: how many requests run, the others wait. `prompt_tokens`: of its prompts that
        are still to be computed. `ungranted`: requests that wait for pages."""
        counters = Counter[str]()
        for part in self.counted:
            counters.update(part.counters)
        return WorkerStatus(
            name=self._setup.name,
            role=self._role,
            state="draining" if self.requests.draining else "ready",
            pid=os.getpid(),
            node=platform.node(),
            incarnation=self._setup.incarnation,
            running=running,
            waiting=len(self.requests) - running,
            pages_total=self._pages.total,
            pages_free=self._manager.supply.free_pages(self._manager.full),
            steps=steps,
            outgoing=self._setup.sender.rooms,
            counters={
                **counters,
                **self._manager.stats(),
                f"{PREFIX}{DamageSite.LOGITS}": self._fitness.rows,
            },
            plane=self._setup.sender.plane,
            kv_events=self._manager.tiers.events.endpoint,
            kv_replay=self._manager.tiers.events.replay_endpoint,
            prompt_tokens=prompt_tokens,
            ungranted=ungranted,
            adapters=() if self._setup.adapters is None else tuple(self._setup.adapters.loaded),
            background=sum(request.submit.background for request in self.requests),
        )

    @property
    def allocations(self) -> int:
        """Allocations of the KV cache manager that requests and other parts hold."""
        held = sum(request.allocation is not None for request in self.requests)
        return held + sum(part.allocations for part in self.holding)

    def check(self, found: Sequence[str], *, rooms: int, slots: int = 0) -> CheckReport:
        """Recount; returns `found` and what else doesn't agree. `slots`: the worker's metadata slots."""
        wrong = [*found, *(line for part in self.recounted for line in part.check())]
        held, known = self.allocations, len(self._manager.allocations)
        if held != known:
            wrong.append(f"{known} allocations, requests hold {held}")
        return CheckReport(self._setup.name, self._pages.total, slots, self._pages.leases, rooms, tuple(wrong))

    def next_due(self, clock: Clock) -> float:
        """Return the seconds until the first of the parts has something to do; 0 if its time is over, 3600 if none
        has."""
        due = [at for part in self.timed if (at := part.next_deadline) is not None]
        return max(0.0, min(due) - clock.now()) if due else 3600.0


class SessionPart(Protocol):
    """A part of a worker that keeps what routers asked for."""

    def drop_session(self, session: SessionId) -> None: ...


class PeerPart(Protocol):
    """A part of a worker that talks to other workers."""

    def workers_ended(self, ended: Sequence[EndedWorker]) -> None: ...


def _needed_adapters(requests: RequestTable[Any], audited: Sequence[SamplingParams]) -> set[str]:
    """Digests of the adapters that requests behind the gate, and audits, need: none of these is dropped."""
    sampled = [request.submit.sampling for request in requests]
    return {one.adapter.digest for one in (*sampled, *audited) if one.adapter is not None}


class ExpertSharing(ABC):
    """What a worker does for those that it shares its experts with; nothing where it has all of them."""

    _engine: ModelRunner

    def take_part(self) -> None:
        """`contracts.interfaces.worker_interface.Worker.take_part`."""
        if self._engine.experts is not None:
            take_part(self._engine, drained=self.emptied)

    @property
    def drained(self) -> bool:
        """Whether the worker can leave: it is emptied, and so are those that it shares its experts with."""
        experts = self._engine.experts
        return self.emptied if experts is None else experts.over

    @property
    @abstractmethod
    def emptied(self) -> bool:
        """Whether the worker drains, and no request runs, waits or is outgoing."""


class WorkerLoop(ExpertSharing, Generic[R]):
    """What both roles' workers have in common of `contracts.interfaces.worker_interface.Worker`. Single-threaded,
    except `wake`."""

    role: Role

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        config, manager, clock = setup.config, setup.manager, setup.clock
        self._name, self._engine, self._manager, self._sender = setup.name, setup.engine, manager, setup.sender
        self._waiter, self._clock, self._unowned_s = setup.waiter, clock, config.decode.kept_answer_s
        self.fits = WorkerLimits(manager.supply.max_positions, setup.context)
        self._request_table = RequestTable[R](setup.name, self.fits, clock)
        self._fitness = NonfiniteRows(config.cluster.nonfinite_rows, config.cluster.nonfinite_window_s, clock)
        self._gate = RequestGate(
            setup.grammars, clock, setup.waiter.wake, setup.adapters, self._unowned_s, routed=setup.routed
        )
        self.control, self.fingerprint = setup.sender.control, setup.sender.end.fingerprint
        self.report = WorkerReport(setup, self.role, self._request_table, self._fitness)
        self.report.timed.append(self._gate)
        self._may_go_on: Callable[[R], bool] = lambda request: request.submit.name is not None
        """Whether a request may go on for nobody."""
        self._session_parts: list[SessionPart] = [self._gate]
        self._peer_parts: list[PeerPart] = [setup.sender]
        self._audited: Callable[[], list[SamplingParams]] = list
        """Returns by what parameters audits compute answers again."""
        if self._engine.experts is not None:
            self.report.counted.append(self._engine.experts)
        if setup.adapters is not None:
            setup.adapters.needed = lambda: _needed_adapters(self._request_table, self._audited())
            self.report.counted.append(setup.adapters)

    @property
    def unfit(self) -> str:
        return self._fitness.unfit

    def handle(self, session: SessionId, command: Command) -> None:
        if isinstance(command, Detach):
            self._gate.detach(session, command.request_id)
            request = self._request_table.find(session, command.request_id, command.attempt)
            if request is not None:
                self._detach(request, "its client is gone")
            return
        held = self._gate.holds(session, command)
        if isinstance(held, AdmissionRefusal):
            assert isinstance(command, Submit | Audit)
            self._request_table.refuse(session, command, held)
        elif not held:
            self._take(session, command, None)

    def step(self) -> list[tuple[SessionId, Event]]:
        """One round: hear, expire, admit, compute, publish."""
        if self._request_table.fenced:
            return []
        for session, command, grammar in self._gate.passed():
            if isinstance(grammar, AdmissionRefusal):
                self._request_table.refuse(session, command, grammar)
            else:
                self._take(session, command, grammar)
        self._poll()
        self._expire()
        self._admit()
        self._compute()
        self.take_part()
        return self._request_table.take_events()

    def wake(self) -> None:
        self._waiter.wake()

    def drop_session(self, session: SessionId) -> None:
        for part in self._session_parts:
            part.drop_session(session)
        for request in self._request_table:
            if request.session == session:
                self._detach(request, "its router is gone")

    def _detach(self, request: R, reason: str) -> None:
        """Let a request with a name go on for nobody, for a while; cancel any other."""
        if self._may_go_on(request):
            self._hand_to(UNOWNED, request, min(request.deadline, self._clock.now() + self._unowned_s))
        else:
            self._cancel(request, reason)

    def _hand_to(self, session: SessionId, request: R, deadline: float) -> None:
        """Make the request another session's. What is told of it goes there from now on."""
        request.session, request.deadline = session, deadline

    def drain(self) -> None:
        self._request_table.draining = True

    def undrain(self) -> None:
        self._request_table.draining = False

    def end_requests(self, reason: str) -> None:
        for request in list(self._request_table):
            self._fail(request, ErrorKind.RETRACTED, reason)

    def workers_ended(self, ended: Sequence[EndedWorker]) -> None:
        for part in self._peer_parts:
            part.workers_ended(ended)

    def fence(self) -> None:
        self._request_table.fenced = True

    def _expire(self) -> None:
        for request in self._request_table.expired():
            self._fail(request, ErrorKind.DEADLINE, f"not done within {request.submit.deadline_s:g} s")

    @abstractmethod
    def _take(self, session: SessionId, command: Command, grammar: AnswerGrammar | None) -> None:
        """Carry out a command; `grammar` is what the answer follows, where the command's parameters have one."""

    @abstractmethod
    def _poll(self) -> None:
        """Take in completed copies and loads, and what became of rooms."""

    @abstractmethod
    def _admit(self) -> None:
        """Give pages to waiting requests."""

    @abstractmethod
    def _compute(self) -> None:
        """Launch one step of the engine, if there is work, and commit the steps that are complete."""

    @abstractmethod
    def _cancel(self, request: R, reason: str) -> None:
        """End the request without an event: its router asked for that or is gone."""

    @abstractmethod
    def _fail(self, request: R, kind: ErrorKind, message: str, blame: WorkerName | None = None) -> None:
        """End the request with an error for its router; `blame` is the worker at fault where it isn't this one."""
