"""Where processes meet: the worker as its host drives it, and the worker as a router reaches it.

A *worker* is a plain object, single-threaded, without an event loop; its host gives it a thread. A *port* is how a
router reaches a worker: over gRPC between processes, directly in one process. Both sides of both edges are here so
that the router, the hosts and the workers don't know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from contracts.ids import Role, WorkerName
from contracts.messages.router_commands import Command
from contracts.messages.worker_events import Event
from contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus, WorkerView


class WorkerSession(Protocol):
    """A router's open stream to one worker."""

    def send(self, commands: Sequence[Command]) -> None:
        """Queue commands, in order; never blocks. Nothing happens once the session is closed."""

    def close(self) -> None: ...


class WorkerClient(Protocol):
    """How a router reaches one incarnation of one worker. Used from one event loop; callbacks run on it."""

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[str], None]
    ) -> WorkerSession:
        """Open the stream. `on_closed` is called once, with the reason, when it ends other than by `close`.

        Raises `ConnectionError` when the worker can't be reached or is another incarnation.
        """

    async def status(self) -> WorkerStatus: ...

    async def check(self) -> CheckReport: ...

    async def drain(self) -> WorkerStatus: ...

    async def undrain(self) -> WorkerStatus: ...

    async def aclose(self) -> None: ...


class WorkerDirectory(Protocol):
    """The controller's table as a router watches it."""

    def watch(self, on_change: Callable[[tuple[WorkerView, ...]], None]) -> Callable[[], None]:
        """Call `on_change` with the whole table now and at each change, on the event loop; returns the unsubscriber."""

    def port(self, record: WorkerRecord) -> WorkerClient: ...

    async def change_role(self, name: WorkerName, role: Role) -> None:
        """Have the controller drain a worker and start it in another role.

        Raises `RequestError` where that can't be, saying why, and `ConnectionError` without an answer.
        """

    async def drain(self, target: str) -> tuple[WorkerName, ...]:
        """Have the controller tell a worker to leave, or cordon a node and tell all that are on it; returns who is
        told. Raises as `change_role` does."""

    async def undrain(self, target: str) -> tuple[WorkerName, ...]:
        """Have the controller take that back, for a worker or a node; returns who had left and is started again.
        Raises as `change_role` does."""
