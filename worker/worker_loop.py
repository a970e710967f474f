"""What a worker of either phase does alike: the round, and its side towards the host that steps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol

from contracts.clock import Clock
from contracts.errors import ErrorKind
from contracts.ids import WorkerName
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.worker_events import Event
from worker.nonfinite_rows import NonfiniteRows
from worker.request_table import R, RequestTable


class Sleeper(Protocol):
    """What a worker needs of a `Waiter`."""

    def wait(self, timeout_s: float) -> None:
        """Return when something may have come, when `wake` was called, or after `timeout_s`."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


class WorkerLoop(ABC, Generic[R]):
    """The common part of `contracts.interfaces.worker_interface.Worker`. One thread, but for `wake`."""

    def __init__(self, request_table: RequestTable[R], waiter: Sleeper, fitness: NonfiniteRows) -> None:
        self._request_table = request_table
        self._waiter = waiter
        self._fitness = fitness

    @property
    def unfit(self) -> str:
        return self._fitness.unfit

    def step(self) -> list[tuple[SessionId, Event]]:
        """One round: hear, expire, admit, compute, publish."""
        if self._request_table.fenced:
            return []
        self._poll()
        self._expire()
        self._admit()
        self._compute()
        return self._request_table.take_events()

    def wake(self) -> None:
        self._waiter.wake()

    def drop_session(self, session: SessionId) -> None:
        for request in self._request_table:
            if request.session == session:
                self._cancel(request, "its router is gone")

    def drain(self) -> None:
        self._request_table.draining = True

    def undrain(self) -> None:
        self._request_table.draining = False

    def fence(self) -> None:
        self._request_table.fenced = True

    def _expire(self) -> None:
        for request in self._request_table.expired():
            self._fail(request, ErrorKind.DEADLINE, f"not done within {request.submit.deadline_s:g} s")

    @abstractmethod
    def _poll(self) -> None:
        """Take in what rooms came to."""

    @abstractmethod
    def _admit(self) -> None:
        """Give pages to requests that wait for them."""

    @abstractmethod
    def _compute(self) -> None:
        """One step of the engine, if there is work."""

    @abstractmethod
    def _cancel(self, request: R, reason: str) -> None:
        """End it without a word to the router, who asked for it or is gone."""

    @abstractmethod
    def _fail(self, request: R, kind: ErrorKind, message: str, blame: WorkerName | None = None) -> None:
        """End it with an error for the router."""


def seconds_until(clock: Clock, *deadlines: float | None) -> float:
    """How long one may sleep before the first of `deadlines`; an hour without any."""
    due = [d for d in deadlines if d is not None]
    return max(0.0, min(due) - clock.now()) if due else 3600.0
