"""The controller's gRPC service: Register, Renew, Leave for workers; Watch, ChangeRole, Drain, Undrain, LeaseQuota
for routers.

The controller belongs to one event loop. Handlers run there; other threads (the supervisor) reach it through
`ControllerServer.call`. A watcher gets the whole table at once and again after each change; changes that come faster
than it reads are folded into one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import grpc.aio

from cluster.controller.controller import Controller
from cluster.controller.controller_actions import LeaseGrant
from cluster.controller.quota_ledger import QuotaLedger
from cluster.worker_process.asyncio_thread import AsyncioThread
from cluster.worker_process.grpc_service import ServiceServer
from contracts.clock import SystemClock
from contracts.credentials.certificate_files import CertificateFiles
from contracts.errors import ConfigError, WireError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages.quota import MOST_CLAIMS
from contracts.proto import worker_pb2 as pb
from contracts.proto import worker_pb2_grpc as pb_grpc
from contracts.wire.quota_protobuf import claim_from_proto, slice_to_proto
from contracts.wire.worker_protobuf import record_from_proto, record_to_proto, status_from_proto, status_to_proto

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
FOLD_S = 0.02
"""Seconds within which changes reach a watcher as one."""
FOLD_WORKER_S = 0.0005
"""Seconds that each worker of the table adds to `FOLD_S`."""
MOST_WATCHERS = 256
"""Routers that watch at once."""
NAME_CHARS = 253
"""The most characters of a worker's or a node's name in a request."""
CALL_TIMEOUT_S = 10.0


class ControllerService(pb_grpc.ControllerServicer):
    """The `Controller` service over one controller; every method runs on its loop."""

    def __init__(self, core: Controller) -> None:
        self._core = core
        self._quotas = QuotaLedger(SystemClock())
        self._watchers: set[asyncio.Event] = set()
        self._told: tuple[int, pb.ClusterView] | None = None
        """The latest table that was built, with its version: all watchers get the same message."""
        core.on_change(self._wake)

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def Register(self, request: pb.Registration, context: Context) -> pb.LeaseGrant:
        try:
            record = record_from_proto(request)
        except (WireError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return grant_message(self._core.register(record))

    async def Renew(self, request: pb.Renewal, context: Context) -> pb.LeaseGrant:
        name, incarnation = WorkerName(request.name), Incarnation(request.incarnation)
        try:
            status = status_from_proto(request.status)
        except (WireError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not (math.isfinite(status.stalled_s) and math.isfinite(status.longest_step_s)):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a status whose seconds are no numbers")
        return grant_message(self._core.renew(name, incarnation, status))

    async def Leave(self, request: pb.Renewal, context: Context) -> pb.Empty:
        self._core.leave(WorkerName(request.name), Incarnation(request.incarnation))
        return pb.Empty()

    async def ChangeRole(self, request: pb.RoleChange, context: Context) -> pb.Empty:
        try:
            self._core.change_role(WorkerName(request.name), Role(request.role))
        except (ConfigError, ValueError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.Empty()

    async def Drain(self, request: pb.DrainTarget, context: Context) -> pb.DrainTargets:
        return await self._steer(self._core.drain, request, context)

    async def Undrain(self, request: pb.DrainTarget, context: Context) -> pb.DrainTargets:
        return await self._steer(self._core.undrain, request, context)

    @staticmethod
    async def _steer(
        steer: Callable[[str], tuple[WorkerName, ...]], request: pb.DrainTarget, context: Context
    ) -> pb.DrainTargets:
        if len(request.name) > NAME_CHARS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a name has at most {NAME_CHARS} characters")
        try:
            workers = steer(request.name)
        except ConfigError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.DrainTargets(workers=workers)

    async def LeaseQuota(self, request: pb.QuotaClaims, context: Context) -> pb.QuotaSlices:
        if not 0 < len(request.router) <= NAME_CHARS or len(request.claims) > MOST_CLAIMS:
            text = f"a router with a name, and at most {MOST_CLAIMS} claims"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            claims = [claim_from_proto(claim) for claim in request.claims]
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        slices = [self._quotas.lease(request.router, claim) for claim in claims]
        return pb.QuotaSlices(slices=map(slice_to_proto, slices))

    async def Watch(self, request: pb.Empty, context: Context) -> AsyncIterator[pb.ClusterView]:
        if len(self._watchers) >= MOST_WATCHERS:
            text = f"{MOST_WATCHERS} routers watch already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        changed = asyncio.Event()
        with self._watching(changed):
            while True:
                changed.clear()
                view = self.view()
                yield view
                await changed.wait()
                # Heartbeats change the table all the time, and each message holds all of it: large ones go less often.
                await asyncio.sleep(FOLD_S + FOLD_WORKER_S * len(view.workers))

    @contextlib.contextmanager
    def _watching(self, changed: asyncio.Event) -> Iterator[None]:
        self._watchers.add(changed)
        try:
            yield
        finally:
            self._watchers.discard(changed)

    def view(self) -> pb.ClusterView:
        """The whole table as a message, built once for each version."""
        if self._told is not None and self._told[0] == self._core.version:
            return self._told[1]
        workers = [
            pb.WorkerView(
                registration=record_to_proto(view.record),
                status=status_to_proto(view.status),
                cordoned=view.cordoned,
            )
            for view in self._core.views()
        ]
        version = self._core.version
        view = pb.ClusterView(version=version, workers=workers, shutting_down=self._core.shutting_down)
        self._told = version, view
        return view


def grant_message(grant: LeaseGrant) -> pb.LeaseGrant:
    return pb.LeaseGrant(
        incarnation=grant.incarnation,
        lease_s=grant.lease_s,
        fenced=grant.fenced,
        drain=grant.drain,
        ended=[pb.EndedWorker(name=ended.name, incarnation=ended.incarnation) for ended in grant.ended],
    )


class ControllerServer:
    """The gRPC server of a controller, with its event loop and thread; `endpoint` is its ``host:port``."""

    def __init__(
        self,
        core: Controller,
        address: str = "127.0.0.1",
        secret: str = "",
        certificate: CertificateFiles | None = None,
    ) -> None:
        """Serve on a free port of `address`; with a `secret`, calls must carry its token, and with this node's
        `certificate` come from nodes of the cluster. Raises `OSError`."""
        self._core = core
        self._loop = AsyncioThread("controller")
        self._server = ServiceServer(
            self._loop,
            f"{address}:0",
            secret,
            certificate=certificate,
        )
        try:
            port = self._server.start(pb_grpc.add_ControllerServicer_to_server, ControllerService(core))
        except BaseException:
            self._loop.stop()
            raise
        self.endpoint = f"{address}:{port}"

    def call(self, run: Callable[[Controller], T]) -> T:
        """Run `run(core)` on the controller's loop and return its result. Any thread but the loop's.

        Raises what `run` raises, and `TimeoutError` after `CALL_TIMEOUT_S`.
        """

        async def on_loop() -> T:
            return run(self._core)

        return self._loop.run(on_loop(), CALL_TIMEOUT_S)

    def close(self) -> None:
        self._server.stop(0.1)
        self._loop.stop()
