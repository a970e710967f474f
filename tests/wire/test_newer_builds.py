"""Messages of a newer build over real connections, as while a cluster is upgraded: what isn't known here is left out,
and no stream, no table and no other request ends for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgpack
import msgspec
import pytest
from msgspec import structs

from tests.cluster.fake_worker import FakeWorker as Engine
from tests.cluster.fake_worker import submit
from tests.router.fake_worker import FakeCluster, FakeWorker
from tests.router.grpc_fakes import ControllerFake, WorkerFake, start, start_worker
from tests.router.http_server import eventually
from tests.support.raw_frames import RawStream
from twinpool.cluster.worker_process.grpc_service import AsyncioThread
from twinpool.cluster.worker_process.worker_process import serve_worker
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.message_types import Message
from twinpool.contracts.messages.cluster_view import ClusterView, WatchRequest
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Audited, AuditEnd, Done, Event, LegReport, MigrationPaused
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.router.links.controller_directory import ControllerDirectory
from twinpool.router.links.worker_links import GrpcWorkerClient

WAIT_S = 60.0


def raw(message: Message) -> list[Any]:
    """A message as it travels, before it is packed."""
    values: list[Any] = msgpack.unpackb(msgspec.msgpack.encode(message))
    return values


def with_more(message: Message) -> list[Any]:
    """A message with fields that only a newer build has."""
    return [*raw(message), {"a field": ["of a newer build"]}, b"\xff" * 9]


def test_a_worker_leaves_out_a_command_that_it_does_not_know_and_carries_on() -> None:
    host = WorkerThread(Engine(incarnation=3), idle_s=0.02)
    host.start()
    loop = AsyncioThread("test-service")
    server = serve_worker(loop, host, 3, "127.0.0.1")

    async def talk() -> dict[str, bool]:
        ended = dict[str, bool]()
        stream = await RawStream.open(server.stream, 3)
        stream.write_frame(submit("a", 2), ["of a newer build", {"a": [[]]}], with_more(submit("b", 2)))
        while len(ended) < 2:
            ended |= {e.request_id: e.error is None for e in (await stream.read()).events if isinstance(e, Done)}
        stream.abort()
        return ended

    try:
        assert asyncio.run(talk()) == {"a": True, "b": True}
    finally:
        assert host.stop(WAIT_S)
        server.stop(0.1)
        loop.stop()


class NewerWorker(WorkerFake):
    """Its router is sent what only a newer build knows, among what every build does."""

    def greeting(self) -> bytes:
        paused = with_more(MigrationPaused(RequestId("a"), 1, 7))
        failed = raw(Done(RequestId("b"), 1, "error", error=ErrorKind.DRAINING, message="why"))
        failed[failed.index(ErrorKind.DRAINING)] = "of a newer kind"
        audited = raw(Audited(RequestId("c"), 1, AuditEnd.COMPUTED))
        audited[audited.index(AuditEnd.COMPUTED)] = "in a newer way"
        progress = raw(LegReport(RequestId("d"), 1, Role.DECODE, self.worker.name))
        progress[progress.index(Role.DECODE)] = "of a newer kind"
        events = [paused, ["of a newer build"], progress, failed, audited]
        return msgspec.msgpack.encode([self.says, events, None, "of a newer build"])


@pytest.mark.asyncio
async def test_a_router_leaves_out_an_event_that_it_does_not_know_and_an_unknown_failure_is_the_workers() -> None:
    worker = FakeWorker("decode-0", Role.DECODE)
    server, _ = await start_worker(worker, NewerWorker(worker))
    link, heard, closed = GrpcWorkerClient(worker.record), list[Event](), list[StreamEnd]()

    def hear(events: Sequence[Event]) -> None:
        heard.extend(events)

    session = await link.connect(hear, closed.append)
    await eventually(lambda: bool(heard))
    assert heard == [
        MigrationPaused(RequestId("a"), 1, 7),
        Done(RequestId("b"), 1, "error", error=ErrorKind.WORKER, message="why"),
        Audited(RequestId("c"), 1, AuditEnd.REFUSED),
    ]
    assert ErrorKind.WORKER.retryable
    assert closed == []
    session.close()
    await link.aclose()
    await server.stop(0)


class NewerController(ControllerFake):
    """One of its workers has a role that only a newer build knows."""

    async def watch(self, request: WatchRequest) -> AsyncGenerator[ClusterView]:
        async for view in super().watch(request):
            role: Any = "of a newer kind"
            first, other = view.workers
            newer = WorkerView(structs.replace(other.record, role=role), structs.replace(other.status, role=role))
            yield structs.replace(view, workers=(newer, first))


@pytest.mark.asyncio
async def test_a_worker_of_an_unknown_role_hides_no_other_of_the_controllers_table() -> None:
    cluster = FakeCluster(prefill=1, decode=1)
    server, port = await start(NewerController(cluster).handlers())
    directory, tables = ControllerDirectory(f"127.0.0.1:{port}"), list[tuple[WorkerView, ...]]()
    unwatch = directory.watch(tables.append)
    await eventually(lambda: bool(tables))
    assert [view.record.name for view in tables[0]] == ["prefill-0"]
    unwatch()
    await server.stop(0)
