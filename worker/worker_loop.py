"""The worker loop of either role: one round, and the worker's side towards the host that steps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol

from cache.manager.kv_cache_manager import KVCacheManager
from contracts.clock import Clock
from contracts.config.cluster_config import ClusterConfig
from contracts.errors import ErrorKind
from contracts.ids import Incarnation, Role, WorkerName
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.fingerprint import Fingerprint
from contracts.messages.worker_events import Event
from contracts.messages.worker_status import EndedWorker, WorkerLimits
from transfer.rooms.sender.kv_sender import KVSender
from worker.nonfinite_rows import NonfiniteRows
from worker.request_table import R, RequestTable
from worker.worker_report import WorkerReport


class Sleeper(Protocol):
    """The part of `Waiter` that a worker uses."""

    def wait(self, timeout_s: float) -> None:
        """Return when something may have come, when `wake` was called, or after `timeout_s`."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


class WorkerLoop(ABC, Generic[R]):
    """What both roles' workers have in common of `contracts.interfaces.worker_interface.Worker`. Single-threaded,
    except `wake`."""

    role: Role

    def __init__(
        self,
        name: WorkerName,
        incarnation: Incarnation,
        config: ClusterConfig,
        manager: KVCacheManager,
        sender: KVSender,
        waiter: Sleeper,
        *,
        context: int,
        clock: Clock,
    ) -> None:
        self._name, self._manager, self._sender = name, manager, sender
        self._waiter, self._clock = waiter, clock
        self.fits = WorkerLimits(manager.supply.max_positions, context)
        self._request_table = RequestTable[R](name, self.fits, clock)
        self._fitness = NonfiniteRows(config.nonfinite_rows, config.nonfinite_window_s, clock)
        self._report = WorkerReport(
            name, self.role, incarnation, self._request_table, self._fitness, manager, sender.plane
        )

    @property
    def control(self) -> str:
        return self._sender.control

    @property
    def fingerprint(self) -> Fingerprint:
        return self._sender.fingerprint

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

    def workers_ended(self, ended: Sequence[EndedWorker]) -> None:
        self._sender.workers_ended(ended)

    def fence(self) -> None:
        self._request_table.fenced = True

    def _expire(self) -> None:
        for request in self._request_table.expired():
            self._fail(request, ErrorKind.DEADLINE, f"not done within {request.submit.deadline_s:g} s")

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


def seconds_until(clock: Clock, *deadlines: float | None) -> float:
    """Return the seconds until the first of `deadlines` (times of `clock`): 0 if it has passed, 3600 without any."""
    due = [d for d in deadlines if d is not None]
    return max(0.0, min(due) - clock.now()) if due else 3600.0
