"""The grammar gate: requests whose answers follow a grammar wait here until it is compiled.

So nothing behind the gate, no queue and no step, ever waits for a compiler, or meets a grammar that can't be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from twinpool.contracts.clock import Clock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId
from twinpool.contracts.interfaces.worker_interface import UNOWNED, SessionId
from twinpool.contracts.messages.router_commands import Audit, Cancel, Command, Submit
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output.grammar_engine import (
    AnswerGrammar,
    GrammarEngine,
    GrammarError,
    GrammarMatcher,
    StartedGrammar,
)
from twinpool.worker.request_table import AdmissionRefusal

NO_GRAMMARS = "this worker can't follow a grammar: its checkpoint has no tokenizer.json"
_AUDIT_S = 60.0
"""Seconds that the grammar of an audit may take to compile, which has no deadline of its own."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    session: SessionId
    command: Submit | Audit
    deadline: float
    started: Future[StartedGrammar]

    def result(self) -> AnswerGrammar | AdmissionRefusal:
        if not self.started.done():
            self.started.cancel()
            return AdmissionRefusal(ErrorKind.DEADLINE, "its grammar could not be compiled in time")
        try:
            started = self.started.result()
        except GrammarError as error:
            return AdmissionRefusal(ErrorKind.GRAMMAR, f"the grammar can't be used: {error}")
        return AnswerGrammar(started, len(emitted(self.command)))


class GrammarGate:
    """The gate of one worker. Single-threaded; compilers run elsewhere and wake the worker."""

    def __init__(self, engine: GrammarEngine | None, clock: Clock, wake: Callable[[], None]) -> None:
        """`engine`: None where the model's tokens have no text."""
        self._engine, self._clock, self._wake = engine, clock, wake
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def holds(self, session: SessionId, command: Command) -> bool | AdmissionRefusal:
        """Whether the command waits here for now, or why it never passes. A `Cancel` takes out what it cancels."""
        if isinstance(command, Cancel):
            self._drop(lambda w: w.session == session and w.command.request_id == command.request_id)
        if not isinstance(command, Submit | Audit) or not command.sampling.grammar:
            return False
        if self._engine is None:
            return AdmissionRefusal(ErrorKind.GRAMMAR, NO_GRAMMARS)
        # A later attempt takes the place of one that its router could not take back.
        self._drop(lambda w: w.command.request_id == command.request_id)
        started = self._engine.start(command.sampling.grammar, emitted(command))
        started.add_done_callback(lambda _: self._wake())
        seconds = command.deadline_s if isinstance(command, Submit) else _AUDIT_S
        self._waiting.append(_Waiting(session, command, self._clock.now() + seconds, started))
        return True

    def passed(self) -> Iterator[tuple[SessionId, Submit | Audit, AnswerGrammar | AdmissionRefusal]]:
        """Yield the commands whose grammars are compiled, in order of arrival, and those that never pass."""
        if not self._waiting:
            return
        now = self._clock.now()
        for waiting in [w for w in self._waiting if w.started.done() or now >= w.deadline]:
            self._waiting.remove(waiting)
            yield waiting.session, waiting.command, waiting.result()

    def drop_session(self, session: SessionId) -> None:
        """Forget what a router asked for that is gone, but for requests with a name, which go on unowned."""
        self._detach(lambda w: w.session == session)

    def detach(self, session: SessionId, request_id: RequestId) -> None:
        """Forget a request whose router gives it up, unless it has a name: then it goes on unowned."""
        self._detach(lambda w: w.session == session and w.command.request_id == request_id)

    def _detach(self, chosen: Callable[[_Waiting], bool]) -> None:
        self._drop(lambda w: chosen(w) and not _named(w.command))
        self._waiting = [replace(w, session=UNOWNED) if chosen(w) else w for w in self._waiting]

    def close(self) -> None:
        self._drop(lambda w: True)
        if self._engine is not None:
            self._engine.close()

    def masks(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[list[TokenMask] | GrammarError]:
        """As `GrammarEngine.masks`."""
        assert self._engine is not None, "nothing with a grammar has passed"
        return self._engine.masks(wanted)

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of those that wait, in seconds of the clock."""
        return min((w.deadline for w in self._waiting), default=None)

    def _drop(self, chosen: Callable[[_Waiting], bool]) -> None:
        for waiting in [w for w in self._waiting if chosen(w)]:
            waiting.started.cancel()
            self._waiting.remove(waiting)


def _named(command: Submit | Audit) -> bool:
    return isinstance(command, Submit) and command.name is not None


def emitted(command: Submit | Audit) -> tuple[int, ...]:
    """The tokens of the answer that a command's grammar begins behind; an audit draws all of them again."""
    return command.emitted if isinstance(command, Submit) else ()
