"""Clients and the directory of workers in this process, without gRPC: for `transfer.plane=local` and for tests.

Worker threads and workers are the same as in a cluster; only the transport differs. Engine threads hand events to the
event loop by `call_soon_threadsafe`, so a router sees the same order as with gRPC, without serialisation.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from twinpool.cluster.controller.worker_states import WorkerState
from twinpool.cluster.worker_process.worker_thread import WorkerClosed, WorkerEnd, WorkerThread
from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.pool_changes import ChangedWorkers, PoolChange
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.settings_change import SettingsAnswer, SettingsChange
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus, WorkerView

T = TypeVar("T")
OnChange = Callable[[tuple[WorkerView, ...]], None]


class LocalSession:
    """A router's session with a worker in the same process."""

    def __init__(self, host: WorkerThread, session: SessionId) -> None:
        self._host = host
        self._session = session
        self.open = True

    def send(self, commands: Sequence[Command]) -> None:
        if self.open:
            self._host.send(self._session, commands)

    def close(self) -> None:
        if self.open:
            self.open = False
            self._host.close_session(self._session)


class LocalWorkerClient:
    """Implements `contracts.interfaces.discovery.WorkerClient` over a worker in the same process."""

    def __init__(self, host: WorkerThread) -> None:
        self._host = host
        self._sessions: list[LocalSession] = []

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[StreamEnd], None]
    ) -> LocalSession:
        loop = asyncio.get_running_loop()
        session: LocalSession | None = None

        def hand_over(events: list[Event]) -> None:
            if session is not None and session.open:
                on_events(events)

        def hang_up(end: StreamEnd) -> None:
            if session is not None and session.open:
                session.open = False
                on_closed(end)

        try:
            number = self._host.open_session(
                lambda events: _soon(loop, lambda: hand_over(events)),
                lambda end: _soon(loop, lambda: hang_up(end)),
            )
        except WorkerClosed as error:
            raise ConnectionError(str(error)) from None
        session = LocalSession(self._host, number)
        self._sessions.append(session)
        return session

    async def status(self) -> WorkerStatus:
        return await _result(self._host.status())

    async def check(self) -> CheckReport:
        return await _result(self._host.check())

    async def drain(self) -> WorkerStatus:
        return await _result(self._host.drain())

    async def undrain(self) -> WorkerStatus:
        return await _result(self._host.undrain())

    async def aclose(self) -> None:
        for session in self._sessions:
            session.close()
        self._sessions.clear()


class LocalDirectory:
    """Implements `contracts.interfaces.discovery.WorkerDirectory` over workers in the same process.

    There are no restarts: a worker that has ended stays in the table as left or dead.
    """

    def __init__(self, workers: Sequence[tuple[WorkerRecord, WorkerThread]], refresh_s: float = 0.2) -> None:
        self._workers = {record.name: (record, host) for record, host in workers}
        self._refresh_s = refresh_s
        self._watchers: list[OnChange] = []
        self._last: tuple[WorkerView, ...] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, on_change: OnChange) -> Callable[[], None]:
        """Call `on_change` with the whole table now and at each change, looked for every `refresh_s` seconds; returns
        the unsubscriber. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._watchers.append(on_change)
        self._last = self.views()
        on_change(self._last)
        self._schedule(self._refresh_s)

        def stop() -> None:
            if on_change in self._watchers:
                self._watchers.remove(on_change)
            if not self._watchers:
                self._unschedule()

        return stop

    def port(self, record: WorkerRecord) -> LocalWorkerClient:
        return LocalWorkerClient(self._workers[record.name][1])

    async def change_role(self, name: WorkerName, role: Role, *, empty: bool = False) -> None:
        raise RequestError(f"{name} can't become a {role} worker: in one process no worker is started again")

    async def drain(self, target: str, keep: Iterable[Role] = ()) -> tuple[WorkerName, ...]:
        """Tell no worker: the router drains workers by their clients, and without restarts there is nothing to cordon.

        Raises `RequestError` for an unknown name.
        """
        self._find(target)
        return ()

    async def undrain(self, target: str) -> tuple[WorkerName, ...]:
        if gone := [record.name for record, host in self._find(target) if host.ended is not None]:
            raise RequestError(f"{' and '.join(gone)} has left: in one process no worker is started again")
        return ()

    async def change_pools(self, change: PoolChange) -> ChangedWorkers:
        raise RequestError(
            "in one process no worker is started or stopped by itself: serve with a transfer.plane other than local"
        )

    async def change_settings(self, change: SettingsChange) -> SettingsAnswer:
        raise RequestError(
            "in one process no worker is started again, so settings stay: serve with a transfer.plane other than local"
        )

    def _find(self, target: str) -> list[tuple[WorkerRecord, WorkerThread]]:
        """The worker of that name, or all workers of the node of that name. Raises `RequestError` for neither."""
        found = [pair for pair in self._workers.values() if target in (pair[0].name, pair[0].node)]
        if not found:
            nodes = ", ".join(sorted({record.node for record, _ in self._workers.values()}))
            raise RequestError(f"no worker or node is named {target!r}; nodes: {nodes}")
        return found

    def views(self) -> tuple[WorkerView, ...]:
        """The whole table."""
        return tuple(WorkerView(record, _status(host)) for record, host in self._workers.values())

    def changed(self) -> None:
        """Look for changes at once instead of at the next refresh, because a worker has ended. Any thread."""
        if self._loop is not None:
            _soon(self._loop, lambda: self._schedule(0.0))

    def _refresh(self) -> None:
        views = self.views()
        if views != self._last:
            self._last = views
            for watcher in list(self._watchers):
                watcher(views)
        if self._watchers:
            self._schedule(self._refresh_s)

    def _schedule(self, delay_s: float) -> None:
        self._unschedule()
        assert self._loop is not None, "watched without a loop"
        self._timer = self._loop.call_later(delay_s, self._refresh)

    def _unschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_ENDED = {
    WorkerEnd.LEFT: WorkerState.LEFT,
    WorkerEnd.STOPPED: WorkerState.LEFT,
    WorkerEnd.DIED: WorkerState.DEAD,
    WorkerEnd.FENCED: WorkerState.DEAD,
}


def _status(host: WorkerThread) -> WorkerStatus:
    if host.ended is None:
        return host.snapshot
    return dataclasses.replace(host.snapshot, state=_ENDED[host.ended], running=0, waiting=0, outgoing=0)


async def _result(future: Future[T]) -> T:
    """Wait for a call to a worker. Raises `ConnectionError` when the worker has ended."""
    try:
        return await asyncio.wrap_future(future)
    except WorkerClosed as error:
        raise ConnectionError(str(error)) from None


def _soon(loop: asyncio.AbstractEventLoop, run: Callable[[], None]) -> None:
    """Run `run` on the loop, from any thread; does nothing when the loop is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(run)
