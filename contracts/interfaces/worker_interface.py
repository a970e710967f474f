"""The worker as its loop's thread drives it."""

from __future__ import annotations

from typing import NewType, Protocol

from contracts.messages.fingerprint import Fingerprint
from contracts.messages.router_commands import Command
from contracts.messages.worker_events import Event
from contracts.messages.worker_status import CheckReport, WorkerLimits, WorkerStatus

SessionId = NewType("SessionId", int)
"""One router's connection to one worker, numbered by the host; a request belongs to the session that submitted it."""


class Worker(Protocol):
    """A prefill or decode worker. All methods but `wake` are called from the one thread that its host gives it."""

    def handle(self, session: SessionId, command: Command) -> None:
        """Take a command in; never raises for a bad request (that ends in a `Done` with an error)."""

    def step(self) -> list[tuple[SessionId, Event]]:
        """One round: hear the peers, expire what is late, schedule, compute one batch, publish. Takes one batch's
        time at most and returns the events to deliver, in order."""

    def wait(self, timeout_s: float) -> None:
        """Return when `step` has something to do, when `wake` was called, or after `timeout_s`."""

    def wake(self) -> None:
        """Make `wait` return; may be called from any thread."""

    def drop_session(self, session: SessionId) -> None:
        """The router behind `session` is gone: cancel its requests."""

    def drain(self) -> None:
        """Stop admission; what runs is finished. Idempotent."""

    def undrain(self) -> None:
        """Admit again."""

    @property
    def drained(self) -> bool:
        """Draining, and nothing runs, waits or is outgoing: the worker can leave."""

    @property
    def runnable(self) -> bool:
        """Something could be computed now: a worker that says so and ends no step is hung."""

    @property
    def unfit(self) -> str:
        """Why nothing more that it computes can be trusted, in words; empty while it can. Its host ends it then."""

    def fence(self) -> None:
        """The worker's lease has ended: send nothing any more, to routers or peers."""

    @property
    def fits(self) -> WorkerLimits: ...

    @property
    def control(self) -> str:
        """Endpoint of the control socket for rooms; empty where peers don't connect to this worker."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What its peers must have in common with it."""

    def status(self) -> WorkerStatus: ...

    def check(self) -> CheckReport: ...

    def close(self) -> None:
        """Release everything. Idempotent."""
