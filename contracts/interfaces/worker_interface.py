"""The interface of a worker, as the thread that its host gives it drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, Protocol

from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, EndedWorker, WorkerLimits, WorkerStatus

SessionId = NewType("SessionId", int)
"""One router's connection to one worker, numbered by the host; a request belongs to the session that submitted it."""
UNOWNED = SessionId(0)
"""The session of requests that go on though their router or client is gone; hosts number sessions from 1."""


class Worker(Protocol):
    """A prefill or decode worker. All methods but `wake` are called from the one thread that its host gives it."""

    def handle(self, session: SessionId, command: Command) -> None:
        """Take in a command of `session`. Never raises for a bad request, which ends in a `Done` with an error."""

    def step(self) -> list[tuple[SessionId, Event]]:
        """Make one round: hear the peers, expire late requests, schedule, compute one batch, publish. Takes one batch's
        time at most. Returns the events to deliver, in order, each with its session."""

    def wait(self, timeout_s: float) -> None:
        """Return when `step` has something to do, when `wake` was called, or after `timeout_s`."""

    def take_part(self) -> None:
        """Do what the workers need that it shares its experts with, and nothing else: between two steps, while it makes
        none of its own."""

    def wake(self) -> None:
        """Make `wait` return; may be called from any thread."""

    def drop_session(self, session: SessionId) -> None:
        """Cancel the requests of `session`, whose router is gone; those with a name go on for a while, `UNOWNED`."""

    def drain(self) -> None:
        """Stop admission; requests that run are finished. Idempotent."""

    def undrain(self) -> None:
        """Admit again."""

    def end_requests(self, reason: str) -> None:
        """End all requests with an error after which routers try them again elsewhere."""

    def workers_ended(self, ended: Sequence[EndedWorker]) -> None:
        """Take in which incarnations of workers have ended, as the controller says: the latest one of each name."""

    @property
    def drained(self) -> bool:
        """Whether the worker drains, and no request runs, waits or is outgoing: it can leave. One that shares its
        experts can when all that it shares them with have drained, too."""

    @property
    def runnable(self) -> bool:
        """Whether something could be computed now. A worker that is runnable and ends no step is hung."""

    @property
    def unfit(self) -> str:
        """Why the worker's results can't be trusted any more, in words; empty while they can. Its host ends an unfit
        worker."""

    def fence(self) -> None:
        """Send nothing any more, to routers or peers: the worker's lease has ended."""

    @property
    def fits(self) -> WorkerLimits: ...

    @property
    def control(self) -> str:
        """Endpoint of the control socket for rooms; empty where peers don't connect to this worker."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What peers must have in common with this worker before state is handed over."""

    def status(self) -> WorkerStatus: ...

    def check(self) -> CheckReport: ...

    def close(self) -> None:
        """Release everything. Idempotent."""
