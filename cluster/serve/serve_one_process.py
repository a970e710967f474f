"""`twinpool serve --set transfer.plane=local`: router and workers in this one process, without Ray.

The same router, worker threads and workers as in a cluster, joined by a directory in memory. Each worker has its engine
thread; the router has the main thread and its event loop. Workers aren't restarted here: one that dies stays dead, the
operator reads why, and /health fails.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import TextIO

from cluster.assembly.build_worker import build_worker
from cluster.processes.run_folder import RunFolder
from cluster.processes.service_manager import ServiceManager
from cluster.serve.local_dashboard import LocalDashboard
from cluster.serve.local_directory import LocalDirectory
from cluster.serve.preflight import ServePlan
from cluster.serve.security_check import open_ways
from cluster.serve.shutdown_signal import ShutdownSignal
from cluster.serve.terminal import Terminal, curl_line, urls_of
from cluster.worker_process.worker_plan import node_name, on_card
from cluster.worker_process.worker_thread import WorkerEnd, WorkerThread
from contracts.clock import SystemClock
from contracts.config.setting_effects import routers_digest
from contracts.errors import TwinpoolError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages.router_report import RouterIdentity
from contracts.messages.worker_status import WorkerRecord
from router.api.app import create_admin_app, create_app
from router.api.router_server import AdminListener, RouterListeners, RouterServer
from router.main import listen, listen_for_operators
from router.service.controller_ports import ControllerPorts
from router.service.router_service import RouterService

HOST = "127.0.0.1"
FLUSH_S = 1.5
HEALTHY_S = 15.0
POLL_S = 0.02


class _Server(RouterServer):
    """The router's HTTP server; calls `on_ready` once every role has a worker that serves.

    Its start raises `TimeoutError` when that takes longer than `HEALTHY_S`.
    """

    def __init__(self, service: RouterService, admin: socket.socket | None, on_ready: Callable[[], None]) -> None:
        operators = AdminListener(create_admin_app(service), admin) if admin is not None else None
        super().__init__(create_app(service), service, listeners=RouterListeners(operators))
        self._core = service.core
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            async with asyncio.timeout(HEALTHY_S):
                while not all(self._core.serving(role) for role in self._core.workers.roles):
                    await asyncio.sleep(POLL_S)
            self._on_ready()


class ServeOneProcess:
    """One run of `twinpool serve` in one process."""

    def __init__(self, prepared: ServePlan, folder: RunFolder, out: TextIO, began: float | None = None) -> None:
        self._prepared = prepared
        self._folder = folder
        self._clock = SystemClock()
        self._terminal = Terminal(self._clock, out, began)
        self._manager = ServiceManager.adopt()
        self._stopping = ShutdownSignal(prepared.config.cluster.stop_timeout_s, self._manager)
        self._directory: LocalDirectory | None = None

    def run(self) -> int:
        """Serve until asked to stop; returns the exit code. Raises `TwinpoolError` when the start fails."""
        self._stopping.install()
        prepared, options = self._prepared, self._prepared.options
        spec = prepared.spec
        with ExitStack() as stack:
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
            workers = [self._start_worker(stack, name, role) for name, role in prepared.workers]
            directory = self._directory = LocalDirectory(workers)
            dashboard = LocalDashboard(directory, prepared.config.cluster.name, self._clock)
            address = "{}:{}".format(*bound.getsockname()[:2])
            identity = RouterIdentity("router", address, routers_digest(prepared.config), kept=True)
            ports = ControllerPorts(dashboard=dashboard, identity=identity)
            service = RouterService(spec, prepared.config, directory, ports=ports)
            dashboard.recent = service.records.kept.recent
            server = _Server(service, admin, lambda: self._ready(directory))
            # The server handles the other two signals while it runs.
            signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
            try:
                server.run([bound])
            except TimeoutError:
                raise TwinpoolError(f"the router did not reach the workers; see {self._folder.logs}") from None
            finally:
                self._stopping.promise()
            self._terminal.line("stopping")
        return 0

    def _start_worker(self, stack: ExitStack, name: WorkerName, role: Role) -> tuple[WorkerRecord, WorkerThread]:
        prepared = self._prepared
        sizes = prepared.here.sizes(role)
        config = sizes.applied_to(prepared.config, role)
        for card in prepared.cards_of(name, role):
            config = on_card(config, card)
        incarnation = Incarnation(1)
        worker = build_worker(role, name, incarnation, prepared.spec, config, host=HOST, counts=sizes.counts)
        try:
            host = WorkerThread(worker, on_end=lambda end, reason: self._on_end(name, end, reason))
        except BaseException:
            worker.close()
            raise
        record = WorkerRecord(
            name=name,
            role=role,
            incarnation=incarnation,
            pid=os.getpid(),
            node=node_name(),
            endpoint="",
            control=host.control,
            fits=host.fits,
            fingerprint=worker.fingerprint,
        )
        host.start()
        stack.callback(host.stop, FLUSH_S)
        self._terminal.step("worker", str(name))
        return record, host

    def _ready(self, directory: LocalDirectory) -> None:
        prepared, security = self._prepared, self._prepared.config.security
        url, operators = urls_of(prepared)
        self._folder.publish(operators, prepared.options.model, security.tls_ca, prepared.options.file)
        self._stopping.ready()
        self._terminal.table(prepared, directory.views())
        self._terminal.line(f"Twinpool is ready: {url}")
        self._manager.ready(f"serves at {url}")
        if operators != url:
            self._terminal.line(f"operators' paths: {operators}")
        self._terminal.line(f"dashboard: {operators}/dashboard")
        self._terminal.line(curl_line(url, prepared.spec.name, key=bool(security.keys_file), ca=security.tls_ca))

    def _on_end(self, name: WorkerName, end: WorkerEnd, reason: str) -> None:
        """Tell the operator and the directory that a worker has ended; runs on its engine thread."""
        if end is WorkerEnd.LEFT:
            self._terminal.line(f"{name} has left")
        elif end is not WorkerEnd.STOPPED:
            self._terminal.line(f"{name} died ({reason}); in one process it is not restarted")
        if self._directory is not None:
            self._directory.changed()
