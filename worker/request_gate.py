"""The request gate: requests wait here until the grammar that their answer follows is compiled, and their adapter is in
memory.

So nothing behind the gate, no queue and no step, ever waits for a compiler or a disk, or meets a grammar that can't be
compiled or an adapter that isn't there. An adapter that a request behind the gate needs stays until the request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import inf

from msgspec import structs

from twinpool.contracts.clock import Clock
from twinpool.contracts.errors import CheckpointError, ErrorKind
from twinpool.contracts.ids import RequestId
from twinpool.contracts.interfaces.worker_interface import UNOWNED, SessionId
from twinpool.contracts.messages.router_commands import Audit, Cancel, Command, Submit
from twinpool.contracts.sampling_params import ADAPTER_SALT, AdapterRef
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output.grammar_engine import (
    AnswerGrammar,
    GrammarEngine,
    GrammarError,
    GrammarMatcher,
    StartedGrammar,
)
from twinpool.engine.tensors.adapters import AdapterStore
from twinpool.worker.request_table import AdmissionRefusal

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
