"""Calls over gRPC: every message of every call arrives whole, and what goes wrong is said by whom it is the fault of.

Servers and channels are real; what they serve is made from the table of calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgpack
import msgspec
import pytest

from tests.router.grpc_fakes import start
from tests.wire.call_messages import METHODS, messages_of, raw
from tests.wire.instances import full
from twinpool.cluster.controller.controller_actions import SUPERVISE, SupervisorOrders, SupervisorReport
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.calls import (
    CALLS_VERSION,
    FIND_RECORDS,
    REPORT_RECORDS,
    WATCH,
    WORKER_STATUS,
    Call,
    Empty,
    Exchange,
    Method,
    Subscription,
)
from twinpool.contracts.messages.cluster_view import ClusterView, WatchRequest
from twinpool.contracts.messages.request_record import RecordAnswer, RecordReport, RequestRecord
from twinpool.contracts.messages.worker_status import WorkerStatus, WorkerView
from twinpool.contracts.wire.grpc_calls import (
    CallChannel,
    CallFailed,
    CallRefused,
    Handler,
    handle_call,
    handle_exchange,
    handle_subscription,
)

pytestmark = pytest.mark.asyncio
WAIT_S = 60.0
STATUS: WorkerStatus = full(WorkerStatus)
UNREADABLE: bytes = msgpack.packb([1, "x"])


@asynccontextmanager
async def serving(*handlers: Handler) -> AsyncIterator[CallChannel]:
    """A channel to a server of these handlers."""
    server, port = await start(handlers)
    async with CallChannel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever comes over a connection is nobody's bug here."""
    with caplog.at_level(logging.WARNING):
        yield
    assert [record for record in caplog.records if record.exc_info] == []


# ---------------------------------------------------------------- every message


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.service}.{method.name}")
async def test_every_field_of_every_request_and_answer_arrives(method: Method[Any, Any]) -> None:
    requests, answers = messages_of(method.request), messages_of(method.answer)
    heard: list[Any] = []
    left = iter(answers * len(requests))

    async def answer(request: Any) -> Any:
        heard.append(request)
        return next(left)

    async def several(request: Any) -> AsyncGenerator[Any]:
        heard.append(request)
        for one in answers:
            yield one

    async def all_heard(received: AsyncIterator[Any]) -> AsyncGenerator[Any]:
        async for request in received:
            heard.append(request)
        for one in answers:
            yield one

    async def sent() -> AsyncIterator[Any]:
        for request in requests:
            yield request

    match method:
        case Call():
            async with serving(handle_call(method, answer)) as channel:
                got = [await channel.call(method, request, WAIT_S) for request in requests]
            assert got == (answers * len(requests))[: len(got)]
            assert {type(one) for one in got} == {type(one) for one in answers}
        case Subscription():
            async with serving(handle_subscription(method, several)) as channel:
                for request in requests:
                    assert [one async for one in channel.subscribe(method, request)] == answers
        case Exchange():
            async with serving(handle_exchange(method, all_heard)) as channel:
                assert [one async for one in channel.exchange(method, sent())] == answers
    assert heard == requests
    assert [type(one) for one in heard] == [type(one) for one in requests]


async def test_paths_are_all_different_and_name_the_version() -> None:
    paths = [method.path for method in METHODS]
    assert len(set(paths)) == len(paths) >= 20
    assert all(path.startswith(f"/twinpool.v{CALLS_VERSION}.") for path in paths)


# ---------------------------------------------------------------- builds of other versions


def bare(channel: CallChannel) -> Any:
    """The channel below, over which any bytes can be sent to any path."""
    return channel._channel


async def code_of(channel: CallChannel, path: str, data: bytes = b"") -> tuple[grpc.StatusCode, str]:
    """How a call of any path, with any bytes, is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await bare(channel).unary_unary(path, None, None)(data, timeout=WAIT_S)
    return refused.value.code(), str(refused.value.details())


async def status(request: Empty) -> WorkerStatus:
    return STATUS


async def test_a_client_of_an_older_build_is_told_what_to_do_and_so_is_one_of_an_older_server() -> None:
    async with serving(handle_call(WORKER_STATUS, status)) as channel:
        code, words = await code_of(channel, "/twinpool.v2.Worker/Newer")
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert words == "this build has no call /twinpool.v2.Worker/Newer: a newer one asks for it"
        for path in ("/twinpool.Worker/Status", "/twinpool.v3.Worker/Status"):
            code, words = await code_of(channel, path)
            assert code is grpc.StatusCode.UNIMPLEMENTED
            assert f"speaks version {CALLS_VERSION} of the calls" in words
            assert "replace it" in words
        assert (await code_of(channel, "/another.Service/Status"))[1] == "Method not found!"
    old = grpc.aio.server()
    port = old.add_insecure_port("127.0.0.1:0")
    await old.start()
    async with CallChannel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(CallFailed, match="replace it") as failed:
            await channel.call(WORKER_STATUS, Empty(), WAIT_S)
        assert failed.value.code is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(CallFailed, match="replace it"):
            await anext(channel.subscribe(WATCH, WatchRequest()))
    await old.stop(0)


def newer(record: RequestRecord, role: str) -> list[Any]:
    """A packed record of which one choice has another role."""
    values = raw(record)
    at = [field.name for field in msgspec.structs.fields(RequestRecord)].index("choices")
    values[at][0][2] = role
    return values


async def test_entries_of_kinds_that_only_a_newer_build_knows_are_left_out_and_the_others_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record, heard = full(RequestRecord), list[RecordReport]()

    async def take(report: RecordReport) -> Empty:
        heard.append(report)
        return Empty()

    unknown = newer(record, "conductor")
    report = ["r", [unknown, raw(record), unknown], [[7, [raw(record), unknown], "more"]], "more"]
    async with serving(handle_call(REPORT_RECORDS, take)) as channel:
        await bare(channel).unary_unary(REPORT_RECORDS.path, None, None)(msgpack.packb(report), timeout=WAIT_S)
    assert heard == [RecordReport("r", (record,), (RecordAnswer(7, (record,)),))]
    (said,) = [one for one in caplog.records if "newer build" in one.message]
    assert said.__dict__["left_out"] == 3


async def test_what_is_wrong_beside_an_unknown_kind_is_refused_with_its_path() -> None:
    record = full(RequestRecord)
    bad = raw(record)
    bad[0] = 5
    async with serving(handle_call(REPORT_RECORDS, lambda report: status(Empty()))) as channel:  # type: ignore[arg-type, return-value]
        for report, path in (
            (["r", [newer(record, "conductor"), bad]], r"$[1][1]: Expected `str`, got `int` - at `$[0]`"),
            (["r", [], [[7, [newer(record, "conductor"), bad]]]], r"$[2][0]: $[1][1]: Expected `str`, got `int`"),
            ([5, [newer(record, "conductor")]], r"Expected `str`, got `int` - at `$[0]`"),
        ):
            code, words = await code_of(channel, REPORT_RECORDS.path, msgpack.packb(report))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert path in words


# ---------------------------------------------------------------- failures


async def test_an_answer_that_cant_be_read_fails_its_call_with_the_path() -> None:
    async def junk(data: bytes, context: Any) -> bytes:
        return UNREADABLE

    async def junks(data: bytes, context: Any) -> AsyncIterator[bytes]:
        yield UNREADABLE

    async with serving(
        (FIND_RECORDS.path, grpc.unary_unary_rpc_method_handler(junk)),
        (WATCH.path, grpc.unary_stream_rpc_method_handler(junks)),
    ) as channel:
        with pytest.raises(CallFailed, match=r"INTERNAL: an answer that can't be read: .*\$\[0\]"):
            await channel.call(FIND_RECORDS, full(FIND_RECORDS.request), WAIT_S)
        with pytest.raises(CallFailed, match=r"INTERNAL: an answer that can't be read: .*\$\[1\]"):
            await anext(channel.subscribe(WATCH, WatchRequest()))


async def test_a_refusal_has_its_handlers_code_and_words_whichever_way_it_comes() -> None:
    def refuse() -> None:
        raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, "not now")

    async def call(request: Empty) -> WorkerStatus:
        refuse()
        return STATUS

    async def subscription(request: WatchRequest) -> AsyncGenerator[ClusterView]:
        yield ClusterView(1)
        refuse()

    async def exchange(reports: AsyncIterator[SupervisorReport]) -> AsyncGenerator[SupervisorOrders]:
        async for _ in reports:
            refuse()
        yield SupervisorOrders(())

    async def reports() -> AsyncIterator[SupervisorReport]:
        yield SupervisorReport()

    async with serving(
        handle_call(WORKER_STATUS, call),
        handle_subscription(WATCH, subscription),
        handle_exchange(SUPERVISE, exchange),
    ) as channel:
        with pytest.raises(CallFailed, match="not now") as failed:
            await channel.call(WORKER_STATUS, Empty(), WAIT_S)
        assert failed.value.refused
        views = channel.subscribe(WATCH, WatchRequest())
        assert await anext(views) == ClusterView(1)
        with pytest.raises(CallFailed, match="FAILED_PRECONDITION: not now"):
            await anext(views)
        with pytest.raises(CallFailed, match="FAILED_PRECONDITION: not now"):
            await anext(channel.exchange(SUPERVISE, reports()))


class Hanging:
    """A worker that answers nothing, and knows whether it is still asked."""

    def __init__(self) -> None:
        self.asked, self.over = asyncio.Event(), asyncio.Event()

    async def answer(self, request: Empty) -> WorkerStatus:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.over.set()
        return STATUS

    async def watch(self, request: WatchRequest) -> AsyncGenerator[ClusterView]:
        try:
            view = WorkerView(full(WorkerView).record, STATUS)
            yield ClusterView(1, (view,))
            await asyncio.Event().wait()
        finally:
            self.over.set()


async def test_a_call_that_the_end_of_its_connection_cancels_is_an_error_and_no_cancellation() -> None:
    """Else the end of the controller would cancel each request that waits for a tenant's slice."""
    worker = Hanging()
    async with serving(handle_call(WORKER_STATUS, worker.answer)) as channel:
        asking = asyncio.create_task(channel.call(WORKER_STATUS, Empty(), WAIT_S))
        await asyncio.wait_for(worker.asked.wait(), WAIT_S)
        await channel.close()
        with pytest.raises(CallFailed, match="closed"):
            await asking
        with pytest.raises(CallFailed):
            await channel.call(WORKER_STATUS, Empty(), WAIT_S)
        # Else the server would stop under a handler that grpc is about to cancel, which grpc calls an exception.
        await asyncio.wait_for(worker.over.wait(), WAIT_S)


async def test_a_task_that_is_cancelled_while_it_calls_is_cancelled_and_so_is_what_it_asked() -> None:
    worker = Hanging()
    async with serving(handle_call(WORKER_STATUS, worker.answer)) as channel:
        asking = asyncio.create_task(channel.call(WORKER_STATUS, Empty(), WAIT_S))
        await asyncio.wait_for(worker.asked.wait(), WAIT_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(worker.over.wait(), WAIT_S)


async def test_a_call_that_isnt_answered_in_time_fails() -> None:
    worker = Hanging()
    async with serving(handle_call(WORKER_STATUS, worker.answer)) as channel:
        with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
            await channel.call(WORKER_STATUS, Empty(), 0.05)


async def test_a_subscription_that_is_closed_ends_its_handler() -> None:
    worker = Hanging()
    async with serving(handle_subscription(WATCH, worker.watch)) as channel:
        views = channel.subscribe(WATCH, WatchRequest())
        (view,) = (await anext(views)).workers
        assert view.status == STATUS
        await views.aclose()
        await asyncio.wait_for(worker.over.wait(), WAIT_S)


async def test_a_report_that_cant_be_read_is_refused_where_the_handler_reads_it() -> None:
    seen: list[str] = []

    async def supervise(reports: AsyncIterator[SupervisorReport]) -> AsyncGenerator[SupervisorOrders]:
        try:
            async for report in reports:
                seen.append(report.running[0][0])
                yield SupervisorOrders(())
        except CallRefused as error:
            seen.append(str(error))

    async with serving(handle_exchange(SUPERVISE, supervise)) as channel:
        good = SupervisorReport(((WorkerName("decode-0"), Incarnation(1)),))
        stream: Any = bare(channel).stream_stream(SUPERVISE.path, None, None)(None, timeout=WAIT_S)
        await stream.write(msgpack.packb(raw(good)))
        await stream.write(msgpack.packb([[["decode-0", -1]]]))
        await stream.done_writing()
        while await stream.read():
            pass
    assert seen[0] == "decode-0"
    assert "$[0][0][1]" in seen[1]
