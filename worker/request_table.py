"""Requests of a worker of either role: what they have in common, their table, and the gate in front of it.

The table has requests by id, refusals, deadlines, and events for routers. It refuses requests that can't be served, and
keeps the flags `draining` and `fenced`. The phases of a request are the business of the prefill or decode worker. What
prefill's and decode's requests have in common is who sent them and when they end, their tokens' hashes, their
allocation, and the three lengths (`worker.step_commit`).

At the gate requests wait until the grammar that their answer follows is compiled, and their adapter is in memory. So
nothing behind the gate, no queue and no step, ever waits for a compiler or a disk, or meets a grammar that can't be
compiled or an adapter that isn't there. An adapter that a request behind the gate needs stays until the request ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, TypeVar

from msgspec import structs

from twinpool.cache.allocation import Allocation
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.page_digest import ContentTag
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.clock import Clock
from twinpool.contracts.errors import CheckpointError, ErrorKind
from twinpool.contracts.ids import RequestId, WorkerName
from twinpool.contracts.interfaces.worker_interface import UNOWNED, SessionId
from twinpool.contracts.messages.router_commands import Audit, Cancel, Command, Submit
from twinpool.contracts.messages.worker_events import Audited, AuditEnd, Done, Event, LegNote
from twinpool.contracts.messages.worker_status import WorkerLimits
from twinpool.contracts.sampling_params import ADAPTER_SALT, CLASSES, DENSE, JUDGED, POOLINGS, AdapterRef
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output.grammar_engine import (
    AnswerGrammar,
    GrammarEngine,
    GrammarError,
    GrammarMatcher,
    StartedGrammar,
)
from twinpool.engine.tensors.adapters import AdapterStore
from twinpool.transfer.rooms.room_states import SendablePages


@dataclass(eq=False)
class WorkerRequest:
    """One attempt at one request, as far as both roles have the same of it."""

    session: SessionId
    submit: Submit
    arrived: float
    """When the request came, in seconds of the worker's clock."""
    deadline: float
    """When it is failed, on the same clock."""
    prefix: TokenPrefix
    """The prompt's whole pages."""
    grammar: AnswerGrammar | None = None
    """What the answer follows."""
    allocation: Allocation | None = None
    """Its pages and slots, while it has some."""
    committed: int = 0
    """Positions whose state is known to be complete: what may be sealed, shared and sent."""
    launched: int = 0
    """Positions whose state was given to the device to compute."""
    planned: int = 0
    """Positions that the scheduler has decided to compute."""
    marks: dict[str, float] = field(default_factory=dict)
    """Seconds from its arrival to events, by the names of `LegReport`."""
    notes: list[LegNote] = field(default_factory=list)
    """What happened to it besides, for its router; a decode worker's are of the time since its last report."""

    @property
    def held(self) -> Allocation:
        """The allocation, for callers that know by the phase that there is one."""
        assert self.allocation is not None, f"{self} has no allocation"
        return self.allocation


class RequestPages:
    """The KV cache manager as the requests of one worker use it. `reuse`: whether pages come from the tree and go to
    it."""

    def __init__(self, manager: KVCacheManager, *, reuse: bool) -> None:
        self.manager = manager
        self.page_tokens = manager.spec.page_tokens
        self.reuse = reuse

    def prefix(self, submit: Submit) -> tuple[TokenPrefix, list[bytes]]:
        """Return the prefix of the whole pages of a request's tokens, and the block hashes of all its pages, the last
        partly filled one included."""
        chain = block_hashes(submit.tokens, self.page_tokens, submit.salt)
        return TokenPrefix.of(submit.tokens, self.page_tokens, submit.salt, chain), chain

    def distrust(self, request: WorkerRequest) -> None:
        """Invalidate the request's prompt in the tree and its allocation: none of that state is used again."""
        self.manager.finished.invalidate(request.prefix)
        request.held.invalid = True

    def close(self) -> None:
        """Give nothing to the tree from here on: the worker closes."""
        self.reuse = False


def pages_within(spec: PoolSetSpec, nbytes: int) -> dict[str, int]:
    """Return how many pages or slots of each pool, with the heads of all ranks, fit into `nbytes`; at least one."""
    return {pool: max(1, nbytes // spec.whole.unit_bytes(pool)) for pool in spec.by_name}


def sendable_pages(
    wanted: Mapping[str, range],
    allocation: Allocation,
    chain: Sequence[bytes],
    ends: Mapping[str, int],
    most: Mapping[str, int] | None = None,
) -> dict[str, SendablePages]:
    """Return, by pool, the next pages and slots of `wanted`, up to the first that isn't sealed; no entry for none.

    `chain` has the block hashes of all pages of the sequence, the last partly filled one included. `ends` has the
    digests at its end, by pool: of that last page, and of the recurrent state. `most` limits the pages or slots of each
    pool.
    """
    out = {}
    for pool, left in wanted.items():
        tags = []
        for number in left if most is None else left[: most[pool]]:
            digest = _sealed(allocation, pool, number, ends if number == len(chain) - 1 else {})
            if digest is None:
                break
            tags.append(ContentTag(chain[number], digest))
        if tags:
            table = allocation.tables.get(pool)
            places = table.pages[left.start :] if table is not None else allocation.slots[pool].indices
            out[pool] = SendablePages(left.start, tuple(places[: len(tags)]), tuple(tags))
    return out


def _sealed(allocation: Allocation, pool: str, number: int, ends: Mapping[str, int]) -> int | None:
    """Return the digest of a page or state by its number; None while it isn't finished."""
    whole = allocation.digests.get(pool, ())
    return whole[number] if number < len(whole) else ends.get(pool)


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """Why a worker refuses a request: the `kind` and `message` of the `Done` event that tells its router."""

    kind: ErrorKind
    message: str


log = logging.getLogger("twinpool.worker")

R = TypeVar("R", bound=WorkerRequest)


class RequestTable(Generic[R]):
    """The requests of one worker by id, one attempt of each at most, and the events that wait for their routers."""

    def __init__(self, name: WorkerName, fits: WorkerLimits, clock: Clock) -> None:
        self.name, self.fits = name, fits
        self.clock = clock
        self._requests: dict[RequestId, R] = {}
        self._events: list[tuple[SessionId, Event]] = []
        self.draining = False
        self.fenced = False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._requests.values()))

    def accept(self, session: SessionId, command: Command, leave: Callable[[R, str], None]) -> Submit | None:
        """Take in a command; returns its `Submit` if that is a request to open, else None.

        A cancelled request goes through `leave(request, reason)`, and so does an earlier attempt that its router could
        not take back. A refusal is emitted as an event, and so is that of an `Audit`. The caller opens the returned
        request and passes it to `add`, or calls `refuse`.
        """
        if isinstance(command, Cancel):
            request = self.find(session, command.request_id, command.attempt)
            if request is not None:
                leave(request, "cancelled")
            return None
        if isinstance(command, Audit):
            self.refuse(session, command, AdmissionRefusal(ErrorKind.INVALID, f"{self.name} computes no audits"))
            return None
        assert isinstance(command, Submit), "what concerns the tree is its worker's business"
        held = self._requests.get(command.request_id)
        if held is not None and held.submit.attempt < command.attempt:
            leave(held, "a later attempt came")
        refusal = self._refusal(command)
        if refusal is not None:
            self.refuse(session, command, refusal)
            return None
        return command

    def _refusal(self, submit: Submit) -> AdmissionRefusal | None:
        """Return why this request can't be taken, or None. A replay brings prefill the answer too, so all of it must
        fit."""
        if self.draining:
            return AdmissionRefusal(ErrorKind.DRAINING, f"{self.name} is draining")
        if not submit.tokens or submit.prompt_len > len(submit.tokens):
            return AdmissionRefusal(ErrorKind.INVALID, "the prompt is empty")
        if submit.sampling.pooling.removesuffix(DENSE) not in ("", *POOLINGS, JUDGED, CLASSES):
            how = f"{self.name} embeds by one of {', '.join(POOLINGS)}, not by {submit.sampling.pooling!r}"
            return AdmissionRefusal(ErrorKind.INVALID, how)
        positions = max(submit.max_len, len(submit.tokens))
        if positions > self.fits.context:
            return AdmissionRefusal(
                ErrorKind.TOO_LONG, f"{positions} positions exceed the context of {self.fits.context}"
            )
        if positions > self.fits.max_positions:
            limit = self.fits.max_positions
            return AdmissionRefusal(
                ErrorKind.TOO_LONG, f"{positions} positions exceed what {self.name} can hold, {limit}"
            )
        if submit.request_id in self._requests:
            return AdmissionRefusal(ErrorKind.INVALID, f"request {submit.request_id} is here already")
        return None

    def add(self, request: R) -> None:
        self._requests[request.submit.request_id] = request

    def find(self, session: SessionId, request_id: RequestId, attempt: int) -> R | None:
        """Return the request; None if it isn't here, is another session's, or is a later attempt."""
        request = self._requests.get(request_id)
        if request is None or request.session != session or request.submit.attempt > attempt:
            return None
        return request

    def get(self, session: SessionId, request_id: RequestId, attempt: int) -> R | None:
        """Return this very attempt of the session's request; None if it isn't here."""
        request = self.find(session, request_id, attempt)
        return request if request is not None and request.submit.attempt == attempt else None

    def remove(self, request: R) -> None:
        del self._requests[request.submit.request_id]

    def holds(self, request: R) -> bool:
        return self._requests.get(request.submit.request_id) is request

    def expired(self) -> list[R]:
        """Return the requests whose deadline has passed; the caller ends them."""
        now = self.clock.now()
        return [r for r in self._requests.values() if now >= r.deadline]

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline, in seconds of the worker's clock; None without requests."""
        return min((r.deadline for r in self._requests.values()), default=None)

    def emit(self, session: SessionId, event: Event) -> None:
        self._events.append((session, event))

    def refuse(self, session: SessionId, command: Submit | Audit, refusal: AdmissionRefusal) -> None:
        """Tell a router why what it asked for isn't done."""
        key, message = (command.request_id, command.attempt), refusal.message
        if isinstance(command, Audit):
            self.emit(session, Audited(*key, AuditEnd.REFUSED, message=message))
            return
        self._log("attempt refused", command, refusal.kind, message)
        self.emit(session, Done(*key, "error", error=refusal.kind, message=message))

    def finished(self, request: R, reason: str, stop_token: int | None) -> None:
        """Tell the request's router that its answer is complete; `reason` is ``stop`` or ``length``."""
        submit = request.submit
        self.emit(request.session, Done(submit.request_id, submit.attempt, reason, stop_token))

    def failed(self, request: R, kind: ErrorKind, message: str, blame: WorkerName | None) -> None:
        """Tell the request's router why this attempt ends; `blame` is the worker at fault where it isn't this one."""
        submit = request.submit
        self._log("attempt failed", submit, kind, message)
        done = Done(submit.request_id, submit.attempt, "error", error=kind, message=message, blame=blame)
        self.emit(request.session, done)

    def _log(self, event: str, submit: Submit, kind: ErrorKind, reason: str) -> None:
        facts = {"request_id": submit.request_id, "attempt": submit.attempt, "room": submit.room, "worker": self.name}
        log.info(event, extra={**facts, "error": str(kind), "reason": reason})

    def take_events(self) -> list[tuple[SessionId, Event]]:
        """Return the events since the last call, in order; none from a fenced worker."""
        events, self._events = self._events, []
        return [] if self.fenced else events


# ------------------------------------------------------------ the gate


Grammar = AnswerGrammar | None
NO_ADAPTERS = "this worker takes no adapters: adapters.load and adapters.roots are empty, or it has several ranks"
ADAPTER_WAIT_S = 30.0
"""Seconds that a request waits for its adapter at most. Where requests need all that a worker can hold, they may be
waiting for each other: those of prefill for decode, and of decode for prefill."""
NO_GRAMMARS = "this worker can't follow a grammar: its checkpoint has no tokenizer.json"
NO_EXPERTS = (
    "return_routed_experts: this model has no mixture of experts that could be told, or its layers are divided into "
    "stages, or transformers computes them"
)
_AUDIT_S = 60.0
"""Seconds that the grammar of an audit may take to compile, which has no deadline of its own."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    session: SessionId
    command: Submit | Audit
    deadline: float
    started: Future[StartedGrammar] | None
    """None: it has no grammar."""
    adapter_by: float
    """When it is refused unless its adapter is in memory, in seconds of the clock."""

    def ready(self) -> bool:
        return self.started is None or self.started.done()

    def result(self) -> Grammar | AdmissionRefusal:
        if self.started is None:
            return None
        if not self.started.done():
            self.started.cancel()
            return AdmissionRefusal(ErrorKind.DEADLINE, "its grammar could not be compiled in time")
        try:
            started = self.started.result()
        except GrammarError as error:
            return AdmissionRefusal(ErrorKind.GRAMMAR, f"the grammar can't be used: {error}")
        return AnswerGrammar(started, len(emitted(self.command)))


class RequestGate:
    """The gate of one worker. Single-threaded; compilers and readers run elsewhere and wake the worker."""

    def __init__(
        self,
        engine: GrammarEngine | None,
        clock: Clock,
        wake: Callable[[], None],
        adapters: AdapterStore | None = None,
        unowned_s: float = inf,
        *,
        routed: bool = False,
    ) -> None:
        """`engine`: None where the model's tokens have no text. `adapters`: None where no request may have one.
        `unowned_s`: how long a request may go on for nobody. `routed`: whether the experts that tokens go to can be
        told."""
        self._engine, self._clock, self._wake, self._adapters = engine, clock, wake, adapters
        self._unowned_s, self._routed = unowned_s, routed
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def holds(self, session: SessionId, command: Command) -> bool | AdmissionRefusal:
        """Whether the command waits here for now, or why it never passes. A `Cancel` takes out what it cancels."""
        if isinstance(command, Cancel):
            self._drop(lambda w: w.session == session and w.command.request_id == command.request_id)
        if not isinstance(command, Submit | Audit):
            return False
        sampling, wrong = command.sampling, salt_fault(command)
        if wrong:
            return AdmissionRefusal(ErrorKind.INVALID, wrong)
        if sampling.routed_experts and not self._routed:
            return AdmissionRefusal(ErrorKind.INVALID, NO_EXPERTS)
        if not sampling.grammar and sampling.adapter is None:
            return False
        if sampling.grammar and self._engine is None:
            return AdmissionRefusal(ErrorKind.GRAMMAR, NO_GRAMMARS)
        # A later attempt takes the place of one that its router could not take back.
        self._drop(lambda w: w.command.request_id == command.request_id)
        if not sampling.grammar and (there := self._adapter_there(sampling.adapter)) is not False:
            return there if isinstance(there, AdmissionRefusal) else False
        started = None
        if sampling.grammar and self._engine is not None:
            started = self._engine.start(sampling.grammar, emitted(command))
            started.add_done_callback(lambda _: self._wake())
        seconds, now = command.deadline_s if isinstance(command, Submit) else _AUDIT_S, self._clock.now()
        deadline = now + seconds
        self._waiting.append(_Waiting(session, command, deadline, started, min(deadline, now + ADAPTER_WAIT_S)))
        return True

    def _adapter_there(self, adapter: AdapterRef | None) -> bool | AdmissionRefusal:
        """Whether a request's adapter is in memory, and may be gone again unless it passes now; or why it won't be."""
        if adapter is None:
            return True
        if self._adapters is None:
            return AdmissionRefusal(ErrorKind.ADAPTER, NO_ADAPTERS)
        try:
            return self._adapters.wants(adapter)
        except CheckpointError as error:
            return AdmissionRefusal(ErrorKind.ADAPTER, f"the adapter {adapter.name} can't be used: {error}")

    def passed(self) -> Iterator[tuple[SessionId, Submit | Audit, Grammar | AdmissionRefusal]]:
        """Yield the commands whose grammars are compiled and whose adapters are in memory, in order of arrival, and
        those that never pass. The caller takes each in before it asks for the next."""
        now = self._clock.now()
        for waiting in [w for w in self._waiting if w.ready() or now >= w.deadline]:
            there = True if not waiting.ready() else self._adapter_there(waiting.command.sampling.adapter)
            if there is False and now < waiting.adapter_by:
                continue
            self._waiting.remove(waiting)
            if there is False and now >= waiting.deadline:
                there = AdmissionRefusal(ErrorKind.DEADLINE, "its adapter could not be read in time")
            elif there is False:
                there = AdmissionRefusal(ErrorKind.ADAPTER, f"no room for its adapter within {ADAPTER_WAIT_S:g} s")
            yield waiting.session, waiting.command, waiting.result() if there is True else there

    def drop_session(self, session: SessionId) -> None:
        """Forget what a router asked for that is gone, but for requests with a name, which go on unowned."""
        self._detach(lambda w: w.session == session)

    def detach(self, session: SessionId, request_id: RequestId) -> None:
        """Forget a request whose router gives it up, unless it has a name: then it goes on unowned."""
        self._detach(lambda w: w.session == session and w.command.request_id == request_id)

    def _detach(self, chosen: Callable[[_Waiting], bool]) -> None:
        self._drop(lambda w: chosen(w) and not _named(w.command))
        self._waiting = [self._unowned(w) if chosen(w) else w for w in self._waiting]

    def _unowned(self, waiting: _Waiting) -> _Waiting:
        assert isinstance(waiting.command, Submit), "it has a name"
        deadline_s = min(waiting.command.deadline_s, self._unowned_s)
        return replace(waiting, session=UNOWNED, command=structs.replace(waiting.command, deadline_s=deadline_s))

    def close(self) -> None:
        self._drop(lambda w: True)
        if self._engine is not None:
            self._engine.close()
        if self._adapters is not None:
            self._adapters.close()

    def masks(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[list[TokenMask] | GrammarError]:
        """As `GrammarEngine.masks`."""
        assert self._engine is not None, "nothing with a grammar has passed"
        return self._engine.masks(wanted)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of those that wait, in seconds of the clock."""
        return min((w.adapter_by if w.ready() else w.deadline for w in self._waiting), default=None)

    def _drop(self, chosen: Callable[[_Waiting], bool]) -> None:
        for waiting in [w for w in self._waiting if chosen(w)]:
            if waiting.started is not None:
                waiting.started.cancel()
            self._waiting.remove(waiting)


def salt_fault(command: Submit | Audit) -> str:
    """What is wrong with a request's salt: it begins with its adapter's digest, and no other salt does so. Else its
    pages would be found by requests of another adapter."""
    if isinstance(command, Audit):
        return ""
    adapter, salt = command.sampling.adapter, command.salt
    if adapter is None:
        return "its salt names an adapter, and it has none" if salt.startswith(ADAPTER_SALT) else ""
    return "" if salt.startswith(adapter.salted("")) else f"its salt doesn't name its adapter {adapter.name}"


def _named(command: Submit | Audit) -> bool:
    return isinstance(command, Submit) and command.name is not None


def emitted(command: Submit | Audit) -> tuple[int, ...]:
    """The tokens of the answer that a command's grammar begins behind; an audit draws all of them again."""
    return command.emitted if isinstance(command, Submit) else ()
