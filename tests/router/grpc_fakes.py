"""The fakes behind real servers on free ports: a worker's gRPC service and its streams, and the controller's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from tests.router.fake_worker import FakeCluster, FakeSession, FakeWorker
from tests.support.raw_frames import framed, read_frame
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.proto import worker_pb2_grpc as pb_grpc
from twinpool.contracts.wire.stream_codec import decode_commands, decode_opening, encode_events
from twinpool.contracts.wire.worker_protobuf import report_to_proto, status_to_proto
from twinpool.router.links.grpc_worker import INCARNATION_KEY


class WorkerFake(pb_grpc.WorkerServicer):
    """One fake's gRPC service, and its streams."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.hanging = 0
        """Calls that will never be answered."""
        self.says = worker.incarnation
        """The incarnation it writes on its frames."""
        self.writers: set[asyncio.StreamWriter] = set()
        """Of the streams that are open."""

    def greeting(self) -> bytes:
        """What a router that is admitted is sent first."""
        return encode_events(self.says)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one router's stream, in bytes."""

        def say(frame: bytes) -> None:
            if not writer.is_closing():
                writer.write(framed(frame))

        def tell(events: Any) -> None:
            say(encode_events(self.says, events))

        def end(end: StreamEnd) -> None:
            say(encode_events(self.says, end=end))
            writer.close()

        session: FakeSession | None = None
        self.writers.add(writer)
        try:
            opening = decode_opening(await read_frame(reader))
            if self.worker.hangs:
                self.hanging += 1
                await asyncio.Event().wait()
            if opening.incarnation != self.worker.incarnation:
                text = f"this is incarnation {self.worker.incarnation}, the call is for {opening.incarnation}"
                say(encode_events(self.worker.incarnation, end=StreamEnd(text)))
                return
            session = FakeSession(self.worker, tell, end)
            self.worker.sessions.append(session)
            say(self.greeting())
            while True:
                session.send(decode_commands(await read_frame(reader))[0])
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            if session is not None:
                session.close()
            self.writers.discard(writer)
            writer.close()

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

    async def Drain(self, request: pb.DrainTarget, context: Any) -> pb.WorkerNames:
        return pb.WorkerNames(workers=[request.name])

    @staticmethod
    def _view(worker: FakeWorker) -> pb.WorkerView:
        r = worker.record
        registration = pb.Registration(
            name=r.name, role=r.role, pid=r.pid, node=r.node, endpoint=r.endpoint, stream=r.stream, control=r.control,
            max_positions=r.fits.max_positions, context=r.fits.context, incarnation=r.incarnation,
            stream_protocol=r.stream_protocol,
        )  # fmt: skip
        return pb.WorkerView(registration=registration, status=status_to_proto(worker.status()))


async def start(add: Any, servicer: Any, port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add(servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


class WorkerFakeServer:
    """The servers of one fake."""

    def __init__(self, calls: grpc.aio.Server, streams: asyncio.Server, fake: WorkerFake) -> None:
        self._calls, self._streams, self._fake = calls, streams, fake

    async def stop(self, grace_s: float) -> None:
        self._streams.close()
        for writer in self._fake.writers:
            writer.transport.abort()
        await self._calls.stop(grace_s)


async def start_worker(worker: FakeWorker, fake: WorkerFake | None = None) -> tuple[WorkerFakeServer, WorkerFake]:
    """Serve `worker` on free ports, which become its addresses."""
    fake = fake or WorkerFake(worker)
    calls, port = await start(pb_grpc.add_WorkerServicer_to_server, fake)
    streams = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    worker.endpoint = f"127.0.0.1:{port}"
    worker.stream = f"127.0.0.1:{streams.sockets[0].getsockname()[1]}"
    return WorkerFakeServer(calls, streams, fake), fake


async def start_controller(cluster: FakeCluster, port: int = 0) -> tuple[grpc.aio.Server, ControllerFake, int]:
    fake = ControllerFake(cluster)
    server, bound = await start(pb_grpc.add_ControllerServicer_to_server, fake, port)
    return server, fake, bound


@contextlib.asynccontextmanager
async def grpc_cluster(cluster: FakeCluster) -> AsyncIterator[str]:
    """Every worker and the controller of `cluster` on free ports; gives the controller's address."""
    servers: list[Any] = [(await start_worker(w))[0] for w in cluster.workers.values()]
    controller, _, port = await start_controller(cluster)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await asyncio.gather(*(s.stop(0) for s in [*servers, controller]))
