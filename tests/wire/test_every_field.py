"""Every field of every message arrives: each type of each edge, sent over the edge's own sockets and compared whole.

The messages come from `tests/wire/instances.py`, the types from the unions and tables that production itself reads, so
a new message or a new field is tried without a word here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgpack
import pytest
import torch
from msgspec import structs

from tests.router.grpc_fakes import start
from tests.router.http_server import eventually
from tests.support.pool_sets import pool_sets
from tests.support.raw_writer import tcp_config
from tests.wire.instances import absent, all_of, empty, fields_of, full, is_record, one_truth_each, union
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cluster.controller.controller_service import ControllerService
from twinpool.cluster.controller.controller_table import RowChange
from twinpool.cluster.controller.quota_ledger import QuotaLedger
from twinpool.cluster.ranks import FollowerChannel, LeaderChannel
from twinpool.cluster.worker_process.grpc_service import WorkerService
from twinpool.cluster.worker_process.lease_keeper import LeaseHandlers, LeaseKeeper
from twinpool.cluster.worker_process.router_streams import RouterStreams
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig, FaultsConfig
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation, Role, RoomId, WorkerName
from twinpool.contracts.messages import rank_order_codec, rank_orders, router_commands, worker_events, worker_status
from twinpool.contracts.messages.cluster_view import ControlPlane, ServedWeights
from twinpool.contracts.messages.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    encode_batch,
)
from twinpool.contracts.messages.leases import LeaseGrant, QuotaAmounts, QuotaClaim, QuotaSlice
from twinpool.contracts.messages.pool_changes import OperatorChange, SetRole
from twinpool.contracts.messages.request_record import MAX_RECORD_BYTES, FoundRecords, RequestRecord
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerView
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.contracts.wire.message_codec import encode
from twinpool.router.links.controller_directory import ControllerDirectory
from twinpool.router.links.worker_links import GrpcWorkerClient
from twinpool.transfer.net.zmq_channel import Waiter, ZmqControlTransport
from twinpool.transfer.planes.data_plane import SLOT_BYTES, DataPlane
from twinpool.transfer.planes.direct.shm_plane import ShmPlane
from twinpool.transfer.planes.nixl.nixl_plane import NixlPlane
from twinpool.transfer.planes.tcp.zmq_plane import ZmqPlane
from twinpool.transfer.rooms import room_messages as t
from twinpool.transfer.rooms.room_messages import HandoverMetadata, copy_out, pack

COMMANDS = [message for cls in union(router_commands.Command) for message in all_of(cls)]
EVENTS = [message for cls in union(worker_events.Event) for message in all_of(cls)]
CONTROL = [message for cls in union(t.ControlMessage) for message in all_of(cls)]
NOTICES = [message for cls in union(t.Notice) for message in all_of(cls)]
ORDERS = [message for cls in union(rank_orders.Order) for message in all_of(cls)]
FOLLOWER_NOTICES = [message for cls in union(rank_orders.FollowerNotice) for message in all_of(cls)]
INCARNATION = Incarnation(7)


# ---------------------------------------------------------------- the instances themselves


def test_a_full_instance_has_no_default_and_no_value_twice() -> None:
    made = full(router_commands.Submit)
    seen: list[Any] = []

    def collect(value: Any) -> None:
        if is_record(type(value)):
            for name in fields_of(type(value)):
                collect(getattr(value, name))
        elif isinstance(value, tuple):
            for part in value:
                collect(part)
        elif not isinstance(value, bool):
            seen.append(value)

    collect(made)
    assert len(seen) == len(set(seen)) > 25
    assert made.migrating is True
    assert empty(router_commands.Submit).sampling.logprobs == 0
    assert absent(router_commands.Submit).peer is None
    assert [(x.started, x.withdrawn) for x in one_truth_each(worker_events.MigrationWanted)] == [
        (True, False),
        (False, True),
    ]


def test_a_field_of_an_unknown_type_fails_instead_of_being_left_out() -> None:
    @dataclasses.dataclass(frozen=True)
    class New:
        known: int
        new: complex = 0j

    New.__annotations__ |= {"known": int, "new": complex}
    with pytest.raises(TypeError, match="new: no rule"):
        full(New)


# ---------------------------------------------------------------- router and worker: gRPC and the stream


class Host:
    """A worker's host that keeps what comes, and says what it is told to say."""

    def __init__(self) -> None:
        self.commands: list[router_commands.Command] = []
        self.changed_weights = False
        self.deliver: Callable[[list[worker_events.Event]], None] | None = None
        self.ended: Callable[[StreamEnd], None] | None = None
        self.says: Any = None

    def open_session(self, deliver: Any, ended: Any) -> int:
        self.deliver, self.ended = deliver, ended
        return 1

    def close_session(self, session: int) -> None: ...

    def send(self, session: int, commands: Sequence[router_commands.Command]) -> None:
        self.commands += commands

    def _answer(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.says)
        return future

    status = check = drain = undrain = _answer


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[tuple[Host, GrpcWorkerClient]]:
    host = Host()
    service: Any = WorkerService(host, INCARNATION)  # type: ignore[arg-type]
    server, number = await start(service.handlers())
    streams = RouterStreams(host, INCARNATION)  # type: ignore[arg-type]
    record = structs.replace(
        full(WorkerRecord), incarnation=INCARNATION, endpoint=f"127.0.0.1:{number}",
        stream=f"127.0.0.1:{await streams.start('127.0.0.1')}",
    )  # fmt: skip
    port = GrpcWorkerClient(record)
    try:
        yield host, port
    finally:
        await port.aclose()
        await streams.stop(0)
        await server.stop(0)


@pytest.mark.asyncio
async def test_every_field_of_every_command_and_event_arrives_over_the_stream() -> None:
    heard: list[worker_events.Event] = []
    async with worker() as (host, port):
        host.says = structs.replace(full(worker_status.WorkerStatus), incarnation=INCARNATION)
        session = await port.connect(heard.extend, lambda end: None)
        session.send(COMMANDS)
        await eventually(lambda: len(host.commands) == len(COMMANDS))
        assert host.deliver is not None
        host.deliver(EVENTS)
        await eventually(lambda: len(heard) == len(EVENTS))
        session.close()
    for got, sent in zip([*host.commands, *heard], [*COMMANDS, *EVENTS], strict=True):
        assert got == sent


@pytest.mark.asyncio
@pytest.mark.parametrize("left", [False, True])
async def test_every_field_of_a_streams_end_arrives_after_what_was_said(left: bool) -> None:
    heard: list[worker_events.Event] = []
    ends: list[tuple[StreamEnd, int]] = []
    async with worker() as (host, port):
        session = await port.connect(heard.extend, lambda end: ends.append((end, len(heard))))
        assert host.deliver is not None
        assert host.ended is not None
        host.deliver(EVENTS)
        host.ended(StreamEnd("why it ends", left))
        await eventually(lambda: bool(ends))
        session.close()
    assert ends == [(StreamEnd("why it ends", left), len(EVENTS))]


@pytest.mark.asyncio
async def test_every_field_of_a_status_and_a_report_arrives_over_grpc() -> None:
    async with worker() as (host, port):
        for cls, calls in (
            (worker_status.WorkerStatus, (port.status, port.drain, port.undrain)),
            (worker_status.CheckReport, (port.check,)),
        ):
            for said in all_of(cls):
                host.says = said
                for call in calls:
                    assert await call() == said


# ---------------------------------------------------------------- worker, controller and router: gRPC


class Brain:
    """A controller that keeps what workers tell it, and grants and shows what it is told to."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.grants: list[LeaseGrant] = []
        self.rows: tuple[WorkerView, ...] = ()
        self.quotas = ""
        self.adapters = {"a": AdapterRef("a", "d" * 64, "/adapters/a")}
        self.served: ServedWeights = full(ServedWeights)
        self.service: Any = None
        self.version, self.shutting_down = 1, False
        self.listener: Callable[[], None] = lambda: None
        self.config = ClusterConfig()

    def on_note(self, listener: object) -> None:
        """Nothing is told to the operator here."""

    on_row = on_note

    def on_change(self, listener: Callable[[], None]) -> None:
        self.listener = listener

    def views(self) -> tuple[WorkerView, ...]:
        return self.rows

    def changes(self, since: int) -> list[RowChange]:
        """The first row as a whole, the numbers of the others."""
        return [RowChange(view, i == 0, True) for i, view in enumerate(self.rows)]

    def register(self, record: WorkerRecord) -> LeaseGrant:
        self.heard.append(record)
        return self.grants.pop(0)

    def renew(self, *said: Any) -> LeaseGrant:
        self.heard.append(said)
        return self.grants.pop(0) if self.grants else LeaseGrant(INCARNATION, 0.0, fenced=True)

    def leave(self, *said: Any, closed: bool) -> bool:
        self.heard.append((*said, closed))
        return closed

    def make(self, change: OperatorChange) -> tuple[tuple[WorkerName, ...], str]:
        self.heard.append(change)
        return (), ""

    @property
    def pools(self) -> Brain:
        return self

    table = weights = pools

    def told(self) -> ServedWeights:
        return self.served

    def changed(self) -> None:
        self.version += 1
        self.listener()

    def tick(self) -> list[Any]:
        return []


@contextlib.asynccontextmanager
async def controller() -> AsyncIterator[tuple[Brain, str]]:
    core = Brain()
    core.service = service = ControllerService(core)  # type: ignore[arg-type]
    server, number = await start(service.handlers())
    try:
        yield core, f"127.0.0.1:{number}"
    finally:
        await server.stop(0)


@pytest.mark.asyncio
async def test_every_field_of_a_workers_record_and_status_reaches_the_controller() -> None:
    record, status, lost, drains = (
        full(WorkerRecord),
        full(worker_status.WorkerStatus),
        asyncio.Event(),
        asyncio.Event(),
    )
    async with controller() as (core, target):
        first = (worker_status.EndedWorker(WorkerName("decode-1"), Incarnation(3), Incarnation(2)),)
        more = (*first, worker_status.EndedWorker(WorkerName("prefill-0"), Incarnation(1)))
        core.grants = [
            LeaseGrant(INCARNATION, 50.0, ended=first),
            LeaseGrant(INCARNATION, 60.0, drain=True, ended=first),
            LeaseGrant(INCARNATION, 60.0, ended=more),
        ]
        clock, ended = ManualClock(100.0), list[tuple[worker_status.EndedWorker, ...]]()
        keeper = LeaseKeeper(
            record,
            target,
            clock,
            0.001,
            lambda: status,
            LeaseHandlers(lambda reason: lost.set(), on_drain=drains.set, on_ended=ended.append),
        )
        await keeper.start(5.0)
        await asyncio.wait_for(lost.wait(), 60)
        assert await keeper.leave(closed=True), "a plan comes"
        assert drains.is_set(), "the second grant said so"
        assert ended == [first, more], "each once"
    assert core.heard[0] == record
    assert core.heard[1] == (record.name, record.incarnation, status)
    assert core.heard[-1] == (record.name, record.incarnation, True)


@pytest.mark.asyncio
async def test_a_grants_time_is_the_leases_and_a_fenced_one_ends_it() -> None:
    async with controller() as (core, target):
        core.grants = [LeaseGrant(INCARNATION, 50.0)]
        clock, lost = ManualClock(100.0), asyncio.Event()
        keeper = LeaseKeeper(
            full(WorkerRecord),
            target,
            clock,
            3600.0,
            lambda: full(worker_status.WorkerStatus),
            LeaseHandlers(lambda reason: lost.set(), on_drain=lambda: None),
        )
        await keeper.start(5.0)
        clock.advance(48.9)
        assert keeper.lease.held
        clock.advance(0.2)
        assert not keeper.lease.held
        await keeper.close()
        core.grants = [LeaseGrant(INCARNATION, 50.0, fenced=True)]
        with pytest.raises(Exception, match="no longer wanted"):
            await keeper.start(5.0)


@pytest.mark.asyncio
async def test_every_field_of_the_controllers_table_reaches_a_router() -> None:
    seen: list[tuple[WorkerView, ...]] = []
    async with controller() as (core, target):
        directory = ControllerDirectory(target)
        other = structs.replace(full(WorkerRecord), role=Role.DECODE, name=WorkerName("another"))
        for record in (full(WorkerRecord), other):
            status = structs.replace(full(worker_status.WorkerStatus), name=record.name, incarnation=record.incarnation)
            core.rows += (structs.replace(full(WorkerView), record=record, status=status),)
        stop = directory.watch(seen.append)
        await eventually(lambda: bool(seen))
        assert seen[-1] == core.rows
        assert directory.adapters == tuple(core.adapters.values())
        assert directory.serving == core.served
        numbers = structs.replace(core.rows[1].status, running=77, counters_left_out=False)
        core.rows = (
            structs.replace(core.rows[0], cordoned=False), structs.replace(core.rows[1], status=numbers)
        )  # fmt: skip
        core.version = 2
        core.listener()
        await eventually(lambda: len(seen) > 1)
        assert seen[-1] == core.rows, "what has changed came alone, and the rest stayed"
        assert directory.control_plane() is None
        core.service.tell("10.0.0.1:7", 3, ("10.0.0.2:7", "10.0.0.3:7"))
        await eventually(lambda: directory.control_plane() is not None)
        assert directory.control_plane() == ControlPlane("10.0.0.1:7", 3, ("10.0.0.2:7", "10.0.0.3:7"), away=False)
        await directory.change_pools(SetRole(record.name, Role.PREFILL, empty=True))
        assert core.heard == [SetRole(record.name, Role.PREFILL, empty=True)]
        stop()
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_every_field_of_a_claim_and_of_a_slice_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    claims, parts = all_of(QuotaClaim), [*all_of(QuotaSlice), *all_of(QuotaSlice)]
    heard: list[Any] = []

    def lease(ledger: QuotaLedger, router: str, claim: QuotaClaim) -> QuotaSlice:
        heard.append((router, claim))
        part: QuotaSlice = parts[len(heard) - 1]
        return part

    monkeypatch.setattr(QuotaLedger, "lease", lease)
    async with controller() as (_, target):
        directory = ControllerDirectory(target)
        with pytest.raises(ConnectionError, match="away"):
            await directory.lease_quota("router-7", claims)
        seen: list[Any] = []
        stop = directory.watch(seen.append)
        await eventually(lambda: bool(seen))
        assert await directory.lease_quota("router-7", claims) == parts[: len(claims)]
        with pytest.raises(ConnectionError, match="INVALID_ARGUMENT"):
            await directory.lease_quota("", claims)
        with pytest.raises(ConnectionError, match="INVALID_ARGUMENT"):
            await directory.lease_quota("router-7", [full(QuotaClaim, tenant="t" * 65)])
        with pytest.raises(ConnectionError, match="INVALID_ARGUMENT"):
            await directory.lease_quota("router-7", [full(QuotaClaim, used=QuotaAmounts(float("nan")))])
        stop()
        await asyncio.sleep(0)
    assert heard == [("router-7", claim) for claim in claims]
    with pytest.raises(ConnectionError, match="away"):
        await directory.lease_quota("router-7", claims)


@pytest.mark.asyncio
async def test_every_field_of_a_request_record_reaches_the_controller_and_who_looks_for_it() -> None:
    records: list[RequestRecord] = all_of(RequestRecord)
    whole = records[0]
    async with controller() as (core, target):
        telling, looking = ControllerDirectory(target), ControllerDirectory(target)
        with pytest.raises(ConnectionError, match="away"):
            await telling.report_records("router-7", records, ())
        asked: list[tuple[int, str]] = []
        telling.on_record_ask(lambda number, request_id: asked.append((number, request_id)))
        seen: list[Any] = []
        stops = [telling.watch(seen.append), looking.watch(seen.append)]
        await eventually(lambda: len(seen) == 2)
        for record in records:
            await telling.report_records("router-7", [record], ())
            assert (await looking.find_records("", recent=1)).records == (record,)
        assert core.service.records.recent(1) == [records[-1]]
        finding = asyncio.ensure_future(looking.find_records("another"))
        await eventually(lambda: bool(asked))
        assert asked[0][1] == "another"
        other = structs.replace(whole, request_id="another")
        await telling.report_records("router-7", (), [(asked[0][0], [other])])
        found = await finding
        assert found == FoundRecords((other,), found.kept_s, 1, 1)
        assert 0 < found.kept_s <= (await looking.find_records("", 1)).kept_s
        with pytest.raises(ConnectionError, match="INVALID_ARGUMENT"):
            await telling.report_records("router-7", [structs.replace(whole, total_s=float("nan"))], ())
        with pytest.raises(ConnectionError, match="INVALID_ARGUMENT"):
            await looking.find_records("x" * 300)
        room = MAX_RECORD_BYTES - len(encode(structs.replace(whole, message=""))) - 4  # Of a longer text's length.
        for chars in (room, room + 1):
            longest = structs.replace(whole, message="x" * chars)
            assert len(encode(longest)) == MAX_RECORD_BYTES + chars - room
            for report in (([longest], ()), ((), [(1, [longest])])):
                if chars == room:
                    await telling.report_records("router-7", *report)
                else:
                    with pytest.raises(ConnectionError, match=f"at most {MAX_RECORD_BYTES} bytes"):
                        await telling.report_records("router-7", *report)
        for stop in stops:
            stop()
        await asyncio.sleep(0)


# ---------------------------------------------------------------- prefill and decode: ZMQ


def test_every_field_of_every_control_message_arrives_over_zmq_both_ways() -> None:
    waiter = Waiter()
    transport = ZmqControlTransport("127.0.0.1", waiter, None)
    inbox = transport.listen()
    channel = transport.connect(inbox.endpoint, b"decode-0")
    there: list[tuple[bytes, bytes]] = []
    back: list[bytes] = []
    try:
        for message in CONTROL:
            channel.send(t.encode(message))

        def all_there() -> bool:
            there.extend(inbox.receive())
            return len(there) == len(CONTROL)

        until(waiter, all_there)
        assert {identity for identity, _ in there} == {b"decode-0"}
        for message in CONTROL:
            inbox.send(b"decode-0", t.encode(message))

        def hear() -> bool:
            while (data := channel.receive()) is not None:
                back.append(data)
            return len(back) == len(CONTROL)

        until(waiter, hear)
    finally:
        channel.close()
        inbox.close()
        waiter.close()
    for sent, (_, data), again in zip(CONTROL, there, back, strict=True):
        assert t.decode(data) == sent
        assert t.decode(again) == sent


def until(waiter: Waiter, is_so: Callable[[], object]) -> None:
    for _ in range(200):
        if is_so():
            return
        waiter.wait(0.1)
    raise AssertionError("it never came")


@contextlib.contextmanager
def planes(kind: str) -> Iterator[tuple[DataPlane, DataPlane]]:
    """A writer's and a reader's, of the same pools."""
    spec = pool_sets()["all"]
    made: list[Any] = []
    for reads in (False, True):
        slots = torch.zeros(2, SLOT_BYTES, dtype=torch.uint8)
        kinds: dict[str, Any] = {
            "zmq": partial(ZmqPlane, tcp_config(10.0)), "staged": partial(ZmqPlane, tcp_config(10.0, 4096)),
            "shm": ShmPlane, "nixl": NixlPlane,
        }  # fmt: skip
        plane = kinds[kind](FaultsConfig(), "127.0.0.1", None)
        layout = spec.even(9)
        pools = PoolSet(spec, layout)
        if kind == "shm":
            pools = PoolSet(spec, layout, plane.allocate("pages", pools.layout.nbytes))
            slots = plane.allocate("slots", slots.numel()).view(2, SLOT_BYTES)
        plane.register(pools, slots if reads else None)
        made.append(plane)
    try:
        yield made[0], made[1]
    finally:
        for plane in made:
            plane.close()


@pytest.mark.parametrize("kind", ["shm", "zmq", "nixl", "staged"])
def test_every_field_of_every_notice_arrives_over_all_planes(kind: str) -> None:
    with planes(kind) as (writer, reader):
        link = writer.connect(reader.describe())
        for notice in NOTICES:
            link.notify(RoomId("room"), t.encode_notice(notice))
        heard: list[bytes] = []
        for _ in range(200):
            heard += reader.poll()
            if len(heard) == len(NOTICES):
                break
            reader.waitable[0].poll(100)
        link.close()
    assert [t.decode_notice(data) for data in heard] == NOTICES


def test_every_field_of_the_metadata_slot_is_copied_out_as_it_was_packed() -> None:
    for sent in (full(HandoverMetadata), absent(HandoverMetadata), empty(HandoverMetadata)):
        slots = torch.zeros(2, SLOT_BYTES, dtype=torch.uint8)
        data = pack(sent)
        slots[1, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        assert copy_out(slots, 1, sent.room, sent.slot_epoch) == sent


# ---------------------------------------------------------------- the ranks of a worker: ZMQ


def test_every_field_of_every_order_answer_and_tiding_arrives_between_ranks() -> None:
    secret = "3c" * 32
    line = LeaderChannel(secret, 2, ManualClock(), 30.0)
    follower = FollowerChannel(secret, 1)
    try:
        line.meet(30.0)
        for order in ORDERS:
            line.send(order)
        got = [follower.next(10.0) for _ in ORDERS]
        assert [order for _, order in filter(None, got)] == ORDERS
        asked = line.ask(ORDERS[0])
        taken = follower.next(10.0)
        assert taken is not None
        follower.answer(taken[0], {"a": [1, 2.5, "x", b"y", None]})
        for tiding in FOLLOWER_NOTICES:
            follower.send(tiding)
        assert asked.wait() == [{"a": (1, 2.5, "x", b"y", None)}]
        heard = line.heard()
        while len(heard) < len(FOLLOWER_NOTICES):
            assert line.socket.poll(10_000), "it never came"
            heard += line.heard()
        assert heard == [(1, tiding) for tiding in FOLLOWER_NOTICES]
    finally:
        follower.close()
        line.close()


def test_what_an_order_is_made_of_arrives_by_its_names() -> None:
    """A plain tuple equals a `PageSpan` of the same values, and has no names."""
    assert [repr(rank_order_codec.decode(rank_order_codec.encode(order))) for order in ORDERS] == [
        repr(order) for order in ORDERS
    ]


def test_an_order_with_a_field_too_many_or_too_few_is_none() -> None:
    for order in ORDERS:
        whole = msgpack.unpackb(rank_order_codec.encode(order))
        for fields in ([*whole, None], whole[:-1]):
            with pytest.raises(WireError):
                rank_order_codec.decode(msgpack.packb(fields))


# ---------------------------------------------------------------- KV events: msgpack, for routers outside


def test_every_field_of_every_kv_event_survives_its_batch() -> None:
    for events in (
        [full(BlockStored, page_tokens=1)],
        [full(BlockRemoved)],
        [full(AllBlocksCleared)],
        [AllBlocksCleared()],
    ):
        batch = decode_batch(encode_batch(12.5, events, 3))
        assert (batch.ts, list(batch.events), batch.rank) == (12.5, events, 3)
