"""What a worker of either phase does alike: the round, and its side towards the host that steps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic

from contracts.errors import ErrorKind
from contracts.ids import WorkerName
from contracts.messages import Event
from contracts.ports import SessionId
from transfer.desk import Desk, R
from transfer.fitness import Fitness
from transfer.waiting import Sleep


class PhaseWorker(ABC, Generic[R]):
    """The common part of `contracts.ports.Worker`. One thread, but for `wake`."""

    def __init__(self, desk: Desk[R], waiter: Sleep, fitness: Fitness) -> None:
        self._desk = desk
        self._waiter = waiter
        self._fitness = fitness

    @property
    def unfit(self) -> str:
        return self._fitness.unfit

    def step(self) -> list[tuple[SessionId, Event]]:
        """One round: hear, expire, admit, compute, publish."""
        if self._desk.fenced:
            return []
        self._hear()
        self._expire()
        self._admit()
        self._compute()
        return self._desk.take_events()

    def wake(self) -> None:
        self._waiter.wake()

    def drop_session(self, session: SessionId) -> None:
        for request in self._desk:
            if request.session == session:
                self._cancel(request, "its router is gone")

    def drain(self) -> None:
        self._desk.draining = True

    def undrain(self) -> None:
        self._desk.draining = False

    def fence(self) -> None:
        self._desk.fenced = True

    def _expire(self) -> None:
        for request in self._desk.expired():
            self._fail(request, ErrorKind.DEADLINE, f"not done within {request.submit.deadline_s:g} s")

    @abstractmethod
    def _hear(self) -> None:
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
