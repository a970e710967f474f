"""The interfaces by which a router finds and reaches workers: session, client and directory.

A *worker* (contracts/interfaces/worker_interface.py) is a plain object, single-threaded, without an event loop; its
host gives it a thread. A `WorkerClient` (a *port*) reaches a worker over gRPC between processes, directly in one
process. The interfaces are here so that the router, the hosts and the workers don't know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from twinpool.contracts.messages.pool_changes import ChangedWorkers, OperatorChange, SettingsAnswer, SettingsChange
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import AdapterRef


class WorkerSession(Protocol):
    """A router's open stream to one worker."""

    def send(self, commands: Sequence[Command]) -> None:
        """Queue commands, in order; never blocks. Does nothing once the session is closed."""

    def close(self) -> None: ...


class WorkerClient(Protocol):
    """A router's access to one incarnation of one worker. Used from one event loop; callbacks run on it."""

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[StreamEnd], None]
    ) -> WorkerSession:
        """Open the stream. `on_closed` is called once, when the stream ends other than by `close`.

        Raises `ConnectionError` when the worker can't be reached or is another incarnation.
        """

    async def status(self) -> WorkerStatus: ...

    async def check(self) -> CheckReport: ...

    async def drain(self) -> WorkerStatus: ...

    async def undrain(self) -> WorkerStatus: ...

    async def aclose(self) -> None: ...


class WorkerDirectory(Protocol):
    """The controller's table of workers as a router watches it, and the router's calls of the controller."""

    @property
    def adapters(self) -> tuple[AdapterRef, ...]:
        """The adapters that are served, as they were told last."""

    def watch(self, on_change: Callable[[tuple[WorkerView, ...]], None]) -> Callable[[], None]:
        """Call `on_change` with the whole table now and at each change, on the event loop; returns the unsubscriber."""

    def port(self, record: WorkerRecord) -> WorkerClient: ...

    async def change_pools(self, change: OperatorChange) -> ChangedWorkers:
        """Have the controller make an operator's change of workers, pools or nodes; returns the workers that are
        started or told to leave.

        Raises `RequestError`, with the reason, where the controller refuses, and `ConnectionError` where it doesn't
        answer.
        """

    async def change_settings(self, change: SettingsChange) -> SettingsAnswer:
        """Have the supervisor change the cluster's settings, or say what that would do. Raises as `change_pools`
        does."""
