"""Messages of a newer build over real connections, as while a cluster is upgraded: what isn't known here is left out,
and no stream, no table and no other request ends for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cluster.fake_worker import FakeWorker as Engine
from tests.cluster.fake_worker import submit
from tests.raw_frames import RawStream
from tests.router.fake_worker import FakeCluster, FakeWorker
from tests.router.grpc_fakes import ControllerFake, WorkerFake, start, start_worker
from tests.router.http_server import eventually
from twinpool.cluster.worker_process.asyncio_thread import AsyncioThread
from twinpool.cluster.worker_process.worker_process import serve_worker
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.stream_end import StreamEnd
from twinpool.contracts.messages.worker_events import Audited, AuditEnd, Done, Event, MigrationPaused
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.proto import worker_pb2_grpc as pb_grpc
from twinpool.contracts.wire.command_protobuf import command_to_proto
from twinpool.contracts.wire.event_protobuf import event_from_proto, event_to_proto
from twinpool.router.links.controller_directory import ControllerDirectory
from twinpool.router.links.grpc_worker import GrpcWorkerClient

WAIT_S = 20.0
NEWER = bytes([0xFA, 0x3E, 0x01, 0x61])
"""Field 1007, one byte long: no message has it."""


def newer(kind: type[Any]) -> Any:
    message = kind()
    message.MergeFromString(NEWER)
    assert message.ByteSize() == len(NEWER)
    return message


def test_a_worker_leaves_out_a_command_that_it_does_not_know_and_carries_on() -> None:
    host = WorkerThread(Engine(incarnation=3), idle_s=0.02)
    host.start()
    loop = AsyncioThread("test-service")
    server = serve_worker(loop, host, 3, "127.0.0.1")

    async def talk() -> dict[str, bool]:
        ended = dict[str, bool]()
        stream = await RawStream.open(server.stream, 3)
        first, second = (command_to_proto(submit(name, 2)) for name in ("a", "b"))
        stream.write_frame([first, newer(pb.Command), second])
        while len(ended) < 2:
            events = map(event_from_proto, (await stream.read()).events)
            ended |= {e.request_id: e.error is None for e in events if isinstance(e, Done)}
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

    def greeting(self) -> pb.WorkerFrame:
        paused = event_to_proto(MigrationPaused(RequestId("a"), 1, 7))
        failed = event_to_proto(Done(RequestId("b"), 1, "error", error=ErrorKind.WORKER, message="why"))
        failed.done.error = "of a newer kind"
        audited = event_to_proto(Audited(RequestId("c"), 1, AuditEnd.COMPUTED))
        audited.audited.end = "in a newer way"
        progress = pb.Event(request_id="d", leg_report=pb.LegReport(role="of a newer kind"))
        events = [paused, newer(pb.Event), progress, failed, audited]
        return pb.WorkerFrame(incarnation=self.says, events=events)


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

    @staticmethod
    def _view(worker: FakeWorker) -> pb.WorkerView:
        view = ControllerFake._view(worker)
        if worker.name == "decode-0":
            view.registration.role = view.status.role = "of a newer kind"
        return view


@pytest.mark.asyncio
async def test_a_worker_of_an_unknown_role_hides_no_other_of_the_controllers_table() -> None:
    cluster = FakeCluster(prefill=1, decode=1)
    server, port = await start(pb_grpc.add_ControllerServicer_to_server, NewerController(cluster))
    directory, tables = ControllerDirectory(f"127.0.0.1:{port}"), list[tuple[WorkerView, ...]]()
    unwatch = directory.watch(tables.append)
    await eventually(lambda: bool(tables))
    assert [view.record.name for view in tables[0]] == ["prefill-0"]
    unwatch()
    await server.stop(0)
