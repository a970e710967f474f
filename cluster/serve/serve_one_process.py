"""`twinpool serve --set transfer.plane=local`: router and workers in this one process, without Ray.

The same router, worker threads and workers as in a cluster, joined by a directory in memory (`LocalDirectory`, which
tests use too). Engine threads hand events to the event loop by `call_soon_threadsafe`, so a router sees the same order
as between processes, without serialisation. Each worker has its engine thread; the router has the main thread and its
event loop. Workers aren't restarted here: one that dies stays dead, the operator reads why, and /health fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TextIO, TypeVar

from msgspec import structs

from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.cluster.controller.dashboard_feed import DashboardFeed, TooManyWatch
from twinpool.cluster.controller.wanted_worker import WorkerState
from twinpool.cluster.dashboard.cluster_frames import ClusterFrames, ClusterState, EventKind
from twinpool.cluster.dashboard.frame_rows import SHOWN, WorkerSample
from twinpool.cluster.processes.run_folder import START_REPORT, RunFolder
from twinpool.cluster.serve.preflight import ServePlan, adapters_of
from twinpool.cluster.serve.security_check import open_ways
from twinpool.cluster.serve.shutdown_signal import ShutdownSignal, handled_signals, run_until_asked
from twinpool.cluster.serve.terminal import Terminal, summary, urls_of, ways_in
from twinpool.cluster.worker_process.worker_plan import node_name, on_card
from twinpool.cluster.worker_process.worker_thread import WorkerClosed, WorkerEnd, WorkerThread
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.config.setting_effects import routers_digest
from twinpool.contracts.errors import RequestError, TwinpoolError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.pool_changes import (
    ChangedWorkers,
    DrainWorkers,
    LoadAdapter,
    OperatorChange,
    SetRole,
    SettingsAnswer,
    SettingsChange,
    UndrainWorkers,
    UnloadAdapter,
)
from twinpool.contracts.messages.request_record import RequestRecord
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.router_report import RouterIdentity, RouterReport
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.router.api.app import create_admin_app, create_app
from twinpool.router.api.router_server import AdminListener, RouterListeners, RouterServer
from twinpool.router.links.controller_port import ControllerPorts
from twinpool.router.main import listen, listen_for_operators
from twinpool.router.service.router_service import RouterService

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
    """Implements `router.links.controller_port.WorkerClient` over a worker in the same process."""

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
    """Implements `router.links.controller_port.WorkerDirectory` over workers in the same process.

    There are no restarts: a worker that has ended stays in the table as left or dead.
    """

    serving = ServedWeights()

    def __init__(self, workers: Sequence[tuple[WorkerRecord, WorkerThread]], refresh_s: float = 0.2) -> None:
        self._workers = {record.name: (record, host) for record, host in workers}
        self.served: dict[str, AdapterRef] = {}
        """The adapters that are served, by name."""
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

    @property
    def adapters(self) -> tuple[AdapterRef, ...]:
        return tuple(self.served.values())

    def port(self, record: WorkerRecord) -> LocalWorkerClient:
        return LocalWorkerClient(self._workers[record.name][1])

    async def change_pools(self, change: OperatorChange) -> ChangedWorkers:
        """Refuse what needs restarts. A drain tells no worker: the router drains workers by their clients, and without
        restarts there is nothing to cordon. Raises `RequestError`, also for an unknown name."""
        match change:
            case DrainWorkers(target):
                self._find(target)
            case UndrainWorkers(target):
                if gone := [record.name for record, host in self._find(target) if host.ended is not None]:
                    raise RequestError(f"{' and '.join(gone)} has left: in one process no worker is started again")
            case SetRole(name, role):
                raise RequestError(f"{name} can't become a {role} worker: in one process no worker is started again")
            case LoadAdapter(adapter, replaces):
                before = self.served.get(adapter.name)
                if before is not None and before.digest != adapter.digest and not replaces:
                    raise RequestError(f"another adapter is served as {adapter.name}: unload it first, or replace it")
                self.served[adapter.name] = adapter
                self._tell()
            case UnloadAdapter(name):
                if self.served.pop(name, None) is None:
                    raise RequestError(f"no adapter is served as {name[:80]!r}")
                self._tell()
            case _:
                text = "no worker is started or stopped by itself: serve with a transfer.plane other than local"
                raise RequestError(f"in one process {text}")
        return ChangedWorkers()

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
            self._tell()
        if self._watchers:
            self._schedule(self._refresh_s)

    def _tell(self) -> None:
        for watcher in list(self._watchers):
            watcher(self._last)

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
    return structs.replace(host.snapshot, state=_ENDED[host.ended], running=0, waiting=0, outgoing=0)


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


TICK_S = 0.1


class LocalDashboard:
    """Implements `router.links.controller_port.DashboardSource` over the workers of this process; on the router's
    loop."""

    def __init__(self, directory: LocalDirectory, name: str, clock: Clock) -> None:
        """`name`: the cluster's."""
        self._directory, self._clock = directory, clock
        frames = ClusterFrames(name, secrets.token_hex(8), build_id(), clock.now())
        frames.log.add(time.time(), EventKind.CONTROL, "router and workers run in one process: none is started again")
        self._feed = DashboardFeed(frames, self._state, clock, time.time)
        self._timer: asyncio.TimerHandle | None = None
        self.recent: Callable[[int], Sequence[RequestRecord]] = lambda count: ()
        """Returns the router's latest records; set once there is a router."""

    async def frames(self) -> AsyncIterator[bytes]:
        try:
            async with contextlib.aclosing(self._feed.watch()) as watched:
                async for frame in watched:
                    yield frame
        except TooManyWatch as error:
            raise ConnectionError(str(error)) from None

    async def past(self) -> bytes:
        return self._feed.past()

    async def routers(self) -> list[RouterReport]:
        return self._feed.routers()

    async def report(self, report: RouterReport) -> float:
        if self._timer is None:  # The first report comes once the router's loop runs.
            self._tick()
        return self._feed.report(report)

    def _tick(self) -> None:
        self._feed.tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _state(self) -> ClusterState:
        now = self._clock.now()
        views = self._directory.views()
        dead = sum(view.status.state == "dead" for view in views)
        return ClusterState([WorkerSample(view, now) for view in views], deaths=dead, requests=self.recent(SHOWN))


HOST = "127.0.0.1"
FLUSH_S = 1.5
HEALTHY_S = 60.0
POLL_S = 0.02


class _Server(RouterServer):
    """The router's HTTP server; calls `on_ready` once every role has a worker that serves.

    Its start raises `TimeoutError` when that takes longer than `HEALTHY_S`. Signals are `stopping`'s too, which hears
    none itself while the event loop runs.
    """

    def __init__(
        self,
        service: RouterService,
        admin: socket.socket | None,
        on_ready: Callable[[], None],
        on_stop: Callable[[], None],
        stopping: ShutdownSignal,
    ) -> None:
        operators = AdminListener(create_admin_app(service), admin) if admin is not None else None
        super().__init__(create_app(service), service, listeners=RouterListeners(operators))
        self._core = service.core
        self._on_ready, self._on_stop, self._stopping = on_ready, on_stop, stopping

    def asked_to_end(self) -> None:
        if not self._stopping.asked and self._stopping.serving:
            self._on_stop()
        self._stopping.ask()
        super().asked_to_end()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._stopping.asked:  # Before the loop ran.
            self.should_exit = True
        if self.started:
            async with asyncio.timeout(HEALTHY_S):
                while not all(self._core.serving(role) for role in self._core.workers.roles):
                    if self.should_exit:
                        return
                    await asyncio.sleep(POLL_S)
            self._on_ready()


def start_worker(
    plan: ServePlan,
    name: WorkerName,
    role: Role,
    stack: ExitStack,
    on_end: Callable[[WorkerName, WorkerEnd, str], None],
) -> tuple[WorkerRecord, WorkerThread]:
    """Start a worker of `plan` on a thread of this process, which `stack` ends. `on_end` is called on it."""
    sizes = plan.here.sizes(role)
    config = sizes.applied_to(plan.config, role)
    for card in plan.cards_of(name, role):
        config = on_card(config, card)
    worker = build_worker(role, name, Incarnation(1), plan.spec, config, host=HOST, counts=sizes.counts)
    try:
        host = WorkerThread(worker, on_end=lambda end, reason: on_end(name, end, reason))
    except BaseException:
        worker.close()
        raise
    here = os.getpid(), node_name(), ""
    record = WorkerRecord(name, role, Incarnation(1), *here, host.control, host.fits, fingerprint=worker.fingerprint)
    record = structs.replace(record, stream_protocol=STREAM_PROTOCOL)
    host.start()
    stack.callback(host.stop, FLUSH_S)
    return record, host


class ServeOneProcess:
    """One run of `twinpool serve` in one process."""

    def __init__(
        self,
        prepared: ServePlan,
        folder: RunFolder,
        out: TextIO,
        stopping: ShutdownSignal,
        began: float | None = None,
    ) -> None:
        """`stopping`: the signals that end it, handled already."""
        self._prepared = prepared
        self._folder = folder
        self._clock = SystemClock()
        self._terminal = Terminal(
            self._clock, out, began, report=folder.logs / START_REPORT, verbose=prepared.options.verbose
        )
        self._stopping = stopping
        self._directory: LocalDirectory | None = None

    def run(self) -> int:
        """Serve until asked to stop; returns the exit code."""
        return run_until_asked(self._serve, self._stopping, self._terminal, self._folder.logs)

    def _serve(self, stack: ExitStack) -> None:
        """Start, and serve until asked to stop."""
        prepared, options = self._prepared, self._prepared.options
        spec = prepared.spec
        self._terminal.step(
            "checkpoint",
            f"{spec.name}: {spec.architecture}, {spec.layers} layers, {spec.dtype}, context {spec.context}",
        )
        self._terminal.step("logs", str(self._folder.logs))
        self._terminal.nodes(prepared)
        for line in open_ways(prepared.config.security, options.host, HOST):
            self._terminal.step("open", line)
        bound = stack.enter_context(listen(options.host, prepared.port))
        admin = stack.enter_context(listen_for_operators(prepared.config))
        workers = []
        for name, role in prepared.workers:
            if self._stopping.asked:
                return
            workers.append(start_worker(prepared, name, role, stack, self._on_end))
            self._terminal.step("worker", str(name))
        directory = self._directory = LocalDirectory(workers)
        directory.served = {one.name: one for one in adapters_of(prepared.config)}
        dashboard = LocalDashboard(directory, prepared.config.cluster.name, self._clock)
        address = "{}:{}".format(*bound.getsockname()[:2])
        identity = RouterIdentity("router", address, routers_digest(prepared.config), kept=True)
        ports = ControllerPorts(dashboard=dashboard, identity=identity)
        service = RouterService(spec, prepared.config, directory, ports=ports)
        dashboard.recent = service.records.kept.recent
        server = _Server(service, admin, lambda: self._ready(directory), self._draining, self._stopping)
        if signal.SIGHUP in handled_signals():  # The server handles the other two signals while it runs.
            signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
        try:
            server.run([bound])
        except TimeoutError:
            raise TwinpoolError(f"the router did not reach the workers; see {self._folder.logs}") from None
        finally:
            self._stopping.install()

    def _ready(self, directory: LocalDirectory) -> None:
        prepared, security, views = self._prepared, self._prepared.config.security, directory.views()
        url, operators = urls_of(prepared)
        self._folder.publish(operators, prepared.options.model, security.tls_ca, prepared.options.file)
        self._stopping.ready()
        self._terminal.table(prepared, views)
        self._terminal.ready(url, summary(prepared, views), ways_in(prepared))
        self._stopping.manager.ready(f"serves at {url}")

    def _draining(self) -> None:
        self._terminal.line(self._stopping.drain_line)

    def _on_end(self, name: WorkerName, end: WorkerEnd, reason: str) -> None:
        """Tell the operator and the directory that a worker has ended; runs on its engine thread."""
        if end is WorkerEnd.LEFT:
            self._terminal.line(f"{name} has left")
        elif end is not WorkerEnd.STOPPED:
            self._terminal.line(f"{name} died ({reason}); in one process it is not restarted")
        if self._directory is not None:
            self._directory.changed()
