"""The fakes behind real gRPC servers on free ports: a worker's service and the controller's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from contracts.proto import worker_pb2 as pb
from contracts.proto import worker_pb2_grpc as pb_grpc
from contracts.wire.command_protobuf import command_from_proto
from contracts.wire.event_protobuf import event_to_proto
from contracts.wire.worker_protobuf import report_to_proto, status_to_proto
from router.links.grpc_worker import INCARNATION_KEY
from tests.router.fake_worker import FakeCluster, FakeSession, FakeWorker


class WorkerFake(pb_grpc.WorkerServicer):
    """One fake's gRPC service."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.hanging = 0
        """Calls that will never be answered."""
        self.says = worker.incarnation
        """The incarnation it writes on its frames."""

    async def Serve(self, frames: Any, context: Any) -> AsyncIterator[pb.WorkerFrame]:
        await self._check(context)
        outbox: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        session = FakeSession(
            self.worker, lambda events: outbox.put_nowait(list(events)), lambda reason: outbox.put_nowait(None)
        )
        self.worker.sessions.append(session)
        reader = asyncio.create_task(self._read(session, frames))
        try:
            while (events := await outbox.get()) is not None:
                yield pb.WorkerFrame(incarnation=self.says, events=[event_to_proto(e) for e in events])
        finally:
            reader.cancel()
            session.close()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker ends")

    async def _read(self, session: FakeSession, frames: Any) -> None:
        async for frame in frames:
            session.send([command_from_proto(c) for c in frame.commands])

    async def _check(self, context: Any) -> None:
        if self.worker.hangs:
            self.hanging += 1
            await asyncio.Event().wait()
        given = dict(context.invocation_metadata()).get(INCARNATION_KEY)
        if given != str(self.worker.incarnation):
            text = f"this is incarnation {self.worker.incarnation}, the call is for {given}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)

    async def Status(self, request: pb.Empty, context: Any) -> pb.WorkerStatus:
        await self._check(context)
        return status_to_proto(self.worker.status())

    async def Check(self, request: pb.Empty, context: Any) -> pb.CheckReport:
        await self._check(context)
        return report_to_proto(self.worker.check())

    async def Drain(self, request: pb.Empty, context: Any) -> pb.WorkerStatus:
        await self._check(context)
        self.worker.state = "draining"
        return status_to_proto(self.worker.status())

    async def Undrain(self, request: pb.Empty, context: Any) -> pb.WorkerStatus:
        await self._check(context)
        self.worker.state = "ready"
        return status_to_proto(self.worker.status())


class ControllerFake(pb_grpc.ControllerServicer):
    """The controller's table over a fake cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def Watch(self, request: pb.Empty, context: Any) -> AsyncIterator[pb.ClusterView]:
        while True:
            self._changed.clear()
            yield pb.ClusterView(workers=[self._view(w) for w in self.cluster.workers.values()])
            await self._changed.wait()

    @staticmethod
    def _view(worker: FakeWorker) -> pb.WorkerView:
        r = worker.record
        registration = pb.Registration(
            name=r.name, role=r.role, pid=r.pid, node=r.node, endpoint=r.endpoint, control=r.control,
            max_positions=r.fits.max_positions, context=r.fits.context, incarnation=r.incarnation,
        )  # fmt: skip
        return pb.WorkerView(registration=registration, status=status_to_proto(worker.status()))


async def start(add: Any, servicer: Any, port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add(servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


async def start_worker(worker: FakeWorker) -> tuple[grpc.aio.Server, WorkerFake]:
    """Serve `worker` on a free port, which becomes its endpoint."""
    fake = WorkerFake(worker)
    server, port = await start(pb_grpc.add_WorkerServicer_to_server, fake)
    worker.endpoint = f"127.0.0.1:{port}"
    return server, fake


async def start_controller(cluster: FakeCluster, port: int = 0) -> tuple[grpc.aio.Server, ControllerFake, int]:
    fake = ControllerFake(cluster)
    server, bound = await start(pb_grpc.add_ControllerServicer_to_server, fake, port)
    return server, fake, bound


@contextlib.asynccontextmanager
async def grpc_cluster(cluster: FakeCluster) -> AsyncIterator[str]:
    """Every worker and the controller of `cluster` on free ports; gives the controller's address."""
    servers = [(await start_worker(w))[0] for w in cluster.workers.values()]
    controller, _, port = await start_controller(cluster)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await asyncio.gather(*(s.stop(0) for s in [*servers, controller]))
