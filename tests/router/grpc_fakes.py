"""The fakes behind real servers on free ports: a worker's gRPC service and its streams, and the controller's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio

from tests.router.fake_worker import FakeCluster, FakeSession, FakeWorker
from tests.support.raw_frames import framed, read_frame
from twinpool.contracts.ids import WorkerName
from twinpool.contracts.messages.calls import (
    CHANGE_POOLS,
    CHECK_WORKER,
    DRAIN_WORKER,
    UNDRAIN_WORKER,
    WATCH,
    WORKER_STATUS,
    Empty,
)
from twinpool.contracts.messages.cluster_view import ClusterView, WatchRequest
from twinpool.contracts.messages.pool_changes import ChangedWorkers, DrainWorkers, OperatorChange
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_status import CheckReport, WorkerStatus, WorkerView
from twinpool.contracts.wire.grpc_calls import (
    Admit,
    CallHandlers,
    CallRefused,
    Handler,
    IncomingCall,
    handle_call,
    handle_subscription,
)
from twinpool.contracts.wire.message_codec import decode_commands, decode_opening, encode_events
from twinpool.router.links.worker_links import INCARNATION_KEY


class WorkerFake:
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

    def handlers(self) -> list[Handler]:
        async def status(request: Empty) -> WorkerStatus:
            await self._maybe_hang()
            return self.worker.status()

        async def check(request: Empty) -> CheckReport:
            await self._maybe_hang()
            return self.worker.check()

        async def drain(request: Empty) -> WorkerStatus:
            await self._maybe_hang()
            self.worker.state = "draining"
            return self.worker.status()

        async def undrain(request: Empty) -> WorkerStatus:
            await self._maybe_hang()
            self.worker.state = "ready"
            return self.worker.status()

        return [
            handle_call(WORKER_STATUS, status),
            handle_call(CHECK_WORKER, check),
            handle_call(DRAIN_WORKER, drain),
            handle_call(UNDRAIN_WORKER, undrain),
        ]

    def admit(self, call: IncomingCall) -> None:
        given = call.metadata.get(INCARNATION_KEY)
        if given != str(self.worker.incarnation) and not self.worker.hangs:
            text = f"this is incarnation {self.worker.incarnation}, the call is for {given}"
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, text)

    async def _maybe_hang(self) -> None:
        if self.worker.hangs:
            self.hanging += 1
            await asyncio.Event().wait()


class ControllerFake:
    """The controller's table over a fake cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    def handlers(self) -> list[Handler]:
        return [handle_subscription(WATCH, self.watch), handle_call(CHANGE_POOLS, self.change)]

    async def watch(self, request: WatchRequest) -> AsyncGenerator[ClusterView]:
        while True:
            self._changed.clear()
            yield ClusterView(0, tuple(WorkerView(w.record, w.status()) for w in self.cluster.workers.values()))
            await self._changed.wait()

    async def change(self, change: OperatorChange) -> ChangedWorkers:
        assert isinstance(change, DrainWorkers)
        return ChangedWorkers((WorkerName(change.target),))


async def start(handlers: Iterable[Handler], port: int = 0, admit: Iterable[Admit] = ()) -> tuple[grpc.aio.Server, int]:
    """Serve calls on a port, 0: a free one; returns the server and its port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((CallHandlers(handlers, admit),))
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
    calls, port = await start(fake.handlers(), admit=[fake.admit])
    streams = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    worker.endpoint = f"127.0.0.1:{port}"
    worker.stream = f"127.0.0.1:{streams.sockets[0].getsockname()[1]}"
    return WorkerFakeServer(calls, streams, fake), fake


async def start_controller(cluster: FakeCluster, port: int = 0) -> tuple[grpc.aio.Server, ControllerFake, int]:
    fake = ControllerFake(cluster)
    server, bound = await start(fake.handlers(), port)
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
