"""A worker that echoes: real in every promise of the worker contract, with arithmetic in the model's place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.fingerprint import PROTOCOL, Fingerprint
from twinpool.contracts.messages.router_commands import Cancel, Command, Submit
from twinpool.contracts.messages.worker_events import Done, Event, Tokens
from twinpool.contracts.messages.worker_status import CheckReport, EndedWorker, WorkerLimits, WorkerStatus
from twinpool.contracts.sampling_params import SamplingParams


def submit(request_id: str, max_tokens: int = 4, tokens: tuple[int, ...] = (1, 2, 3)) -> Submit:
    return Submit(
        RequestId(request_id), 0, RoomId(f"room-{request_id}"), tokens, len(tokens), SamplingParams(max_tokens), None
    )


class FakeWorker:
    """Emits one token a step and request: the sum of the tokens so far."""

    def __init__(self, name: str = "decode-0", role: Role = Role.DECODE, incarnation: int = 1, pid: int = 0) -> None:
        self.name, self.role, self.incarnation, self.pid = WorkerName(name), role, Incarnation(incarnation), pid
        self.running: dict[tuple[SessionId, RequestId], tuple[Submit, list[int]]] = {}
        self.out: list[tuple[SessionId, Event]] = []
        self.draining = self.fenced = self.closed = False
        self.dropped: list[SessionId] = []
        self.threads: set[int] = set()
        self.steps = self.parts = 0
        self.hold = False
        """Make no progress, as if the batch were always full."""
        self.fail: Exception | None = None
        self.unfit = ""
        self.on_step: Callable[[], None] = lambda: None
        self._woken = threading.Event()

    fits = WorkerLimits(max_positions=1024, context=2048)
    control = "tcp://127.0.0.1:1"
    fingerprint = Fingerprint(PROTOCOL, "a layout", "invariant:by hand", "a model")

    def handle(self, session: SessionId, command: Command) -> None:
        self.threads.add(threading.get_ident())
        match command:
            case Submit() if self.draining:
                done = Done(command.request_id, command.attempt, "error", None, ErrorKind.DRAINING, "draining")
                self.out.append((session, done))
            case Submit():
                self.running[session, command.request_id] = (command, list(command.tokens))
            case Cancel():
                self.running.pop((session, command.request_id), None)

    def step(self) -> list[tuple[SessionId, Event]]:
        self.threads.add(threading.get_ident())
        self.on_step()
        if self.fail is not None:
            raise self.fail
        out, self.out = self.out, []
        for (session, request_id), (request, tokens) in [] if self.hold else list(self.running.items()):
            self.steps += 1
            out.append((session, Tokens(request_id, request.attempt, len(tokens), (sum(tokens),))))
            tokens.append(sum(tokens))
            if len(tokens) >= request.max_len:
                del self.running[session, request_id]
                out.append((session, Done(request_id, request.attempt, "length")))
        return out

    def wait(self, timeout_s: float) -> None:
        if not self.running or self.hold:
            self._woken.wait(timeout_s)
        self._woken.clear()

    def take_part(self) -> None:
        self.parts += 1

    def wake(self) -> None:
        self._woken.set()

    def drop_session(self, session: SessionId) -> None:
        self.dropped.append(session)
        for key in [key for key in self.running if key[0] == session]:
            del self.running[key]

    def drain(self) -> None:
        self.draining = True

    def undrain(self) -> None:
        self.draining = False
        self.hurried = ""

    def end_requests(self, reason: str) -> None:
        self.hurried = reason

    def workers_ended(self, ended: Sequence[EndedWorker]) -> None:
        self.ended = tuple(ended)

    @property
    def drained(self) -> bool:
        return self.draining and not self.running and not self.out

    @property
    def runnable(self) -> bool:
        return bool(self.running)

    def fence(self) -> None:
        self.fenced = True

    def status(self) -> WorkerStatus:
        state = "draining" if self.draining else "ready"
        return WorkerStatus(
            self.name, self.role, state, self.pid, "node", self.incarnation, len(self.running), 0, 64, 64, self.steps
        )

    def check(self) -> CheckReport:
        return CheckReport(self.name, 64, 8, len(self.running), len(self.running))

    def close(self) -> None:
        self.closed = True
