"""The supervisor's stream and calls over real connections: every field, breaks, and who is obeyed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import msgpack
import pytest
from msgspec import structs

from tests.support.free_ports import free_port
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import (
    SUPERVISE,
    ControllerAction,
    EndedProcess,
    KillWorker,
    OperatorNote,
    PlacedProcess,
    StartFailed,
    StartWorker,
    SupervisorOrders,
    SupervisorReport,
    WorkerKey,
)
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace, NodeRoom, RoleRoom
from twinpool.cluster.controller.supervisor import ControllerAway, ControllerClient
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.cluster_secret import access_metadata
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.wire.message_codec import decode, encode

T = TypeVar("T")
NAME, OTHER = WorkerName("decode-0"), WorkerName("prefill-3")
NODE = NodePlace("0123456789abcdef", "here")
SECRET = "ab" * 32
WAIT_S = 60.0
SILENCE_S = 5.0


class Site:
    """A controller that can be killed and started again on its port, and supervisors of it."""

    def __init__(self) -> None:
        self.clock, self.ledger = ManualClock(), MemoryLedger()
        self.port = free_port()
        self.clients: list[ControllerClient] = []
        self.start()

    def start(self) -> None:
        self.core = Controller(self.clock, ClusterConfig(), self.ledger, supervised=False)
        self.server = ControllerServer(self.core, secret=SECRET, port=self.port)

    def client(self, *running: WorkerKey, secret: str = SECRET) -> ControllerClient:
        client = ControllerClient(self.server.endpoint, SILENCE_S, secret)
        self.clients.append(client)
        client.supervise(lambda: running)
        return client

    def until(self, ask: Callable[[], T]) -> T:
        """The first true answer, with a tick of the controller before each question."""
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.02)):
            self.server.tick()
            if answer := ask():
                return answer
            pause.wait(0.02)
        raise AssertionError("it did not come")

    def orders(self, client: ControllerClient, kind: type[ControllerAction]) -> list[ControllerAction]:
        found: list[ControllerAction] = []

        def more() -> list[ControllerAction]:
            found.extend(order for order in client.orders() if isinstance(order, kind))
            return found

        return self.until(more)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def test_an_order_of_a_newer_controller_is_left_out_and_the_others_are_obeyed() -> None:
    start, note = StartWorker(NAME, Role.DECODE, Incarnation(1)), OperatorNote("text")
    conductor = [*msgpack.unpackb(encode(start))]
    conductor[2] = "conductor"
    orders = [msgpack.unpackb(encode(start)), ["newer", 1], conductor, msgpack.unpackb(encode(note))]
    assert decode(SupervisorOrders, msgpack.packb([orders])) == (SupervisorOrders((start, note)), 2)


def test_a_start_goes_out_and_what_becomes_of_it_comes_back(site: Site) -> None:
    client = site.client()
    client.report(nodes=[NODE])
    assert client.add(Role.DECODE, 1) == (NAME,)
    assert site.orders(client, StartWorker) == [StartWorker(NAME, Role.DECODE, Incarnation(1))]
    client.report(placed=[PlacedProcess(NAME, Incarnation(1), NODE)])
    site.until(lambda: site.core.table.rows[NAME].node == NODE)
    assert site.core.table.nodes.places == (NODE,)
    client.report(ended=[EndedProcess(NAME, Incarnation(1), "it fell")])
    assert site.orders(client, StartFailed) == [StartFailed(NAME, "it fell")]
    assert site.core.table.nodes.places == (NODE,), "a report that says nothing of nodes changes none"


def test_what_nodes_have_for_workers_is_told_with_the_first_report_and_binds_who_adds(site: Site) -> None:
    room = ClusterRoom((NodeRoom(NODE, 20, roles={Role.DECODE: RoleRoom(10)}, free=19),))
    client = ControllerClient(site.server.endpoint, SILENCE_S, SECRET)
    site.clients.append(client)
    client.report(room=room)
    client.supervise(list)
    site.until(lambda: site.core.table.room == room)
    client.report(nodes=[NODE])
    with pytest.raises(ConfigError, match="3 more decode workers would not fit, 1 would"):
        client.add(Role.DECODE, 3)
    assert client.add(Role.DECODE, 1) == (NAME,)
    client.report(room=structs.replace(room, grows=True))
    site.until(lambda: site.core.table.room.grows)


def test_a_supervisor_comes_back_to_a_controller_that_was_started_again(site: Site) -> None:
    running: list[WorkerKey] = []
    client = ControllerClient(site.server.endpoint, SILENCE_S, SECRET)
    site.clients.append(client)
    client.supervise(lambda: running)
    client.add(Role.DECODE, 2)
    site.orders(client, StartWorker)
    running += [(NAME, Incarnation(1)), (WorkerName("decode-1"), Incarnation(1))]
    site.server.close()
    client.report(ended=[EndedProcess(NAME, Incarnation(1), "while you were away")])
    site.start()
    orders = site.orders(client, StartWorker)
    assert orders == [StartWorker(NAME, Role.DECODE, Incarnation(2))], "decode-1 runs, and decode-0 has ended"
    assert site.core.table.rows[NAME].last_reason == "while you were away"


def test_the_next_controller_hears_what_there_is_also_where_the_latest_report_said_nothing_of_it(site: Site) -> None:
    room = ClusterRoom((NodeRoom(NODE, 20, roles={Role.DECODE: RoleRoom(10)}, free=19),))
    client = site.client()
    client.report(nodes=[NODE], room=room)
    client.report(ended=[EndedProcess(OTHER, Incarnation(1), "it fell")])
    site.until(lambda: site.core.table.room == room)
    site.server.close()
    site.start()
    site.until(lambda: site.core.table.room == room)
    assert site.core.table.nodes.places == (NODE,)


def test_an_end_that_was_on_its_way_when_the_stream_broke_is_told_again(site: Site) -> None:
    client = site.client()
    client.add(Role.DECODE, 1)
    site.orders(client, StartWorker)
    before = dict(site.ledger.rows)
    client.report(ended=[EndedProcess(NAME, Incarnation(1), "it fell")])
    site.orders(client, StartFailed)
    site.server.close()
    site.ledger.rows = before  # That controller died before it had taken the report in.
    site.start()
    assert site.orders(client, StartFailed) == [StartFailed(NAME, "it fell")]
    assert site.core.table.rows[NAME].last_reason == "it fell"


def test_the_latest_supervisor_is_obeyed_and_the_one_before_is_let_go(site: Site) -> None:
    first = site.client()
    first.add(Role.DECODE, 1)
    site.orders(first, StartWorker)
    second = site.client((NAME, Incarnation(1)), (OTHER, Incarnation(4)))
    assert site.orders(second, KillWorker) == [KillWorker(OTHER, Incarnation(4), 0, "")]


def test_the_end_of_the_one_before_costs_the_latest_supervisor_nothing(site: Site) -> None:
    """Its stream ends some time after another one has come: starts, and settings, go to that one all the same."""
    over = threading.Event()
    with grpc.insecure_channel(site.server.endpoint) as channel:
        open_stream: Any = channel.stream_stream(SUPERVISE.path)  # type: ignore[call-arg]

        def supervise() -> Any:
            return open_stream(reports(over), metadata=access_metadata(SECRET), timeout=WAIT_S)

        first = supervise()
        site.until(lambda: site.core.can_start)
        second = supervise()
        with pytest.raises(grpc.RpcError) as ended:
            next(first)
        assert "another supervisor has come" in str(ended.value)
        service = site.server._service
        supervisor = site.until(lambda: service._supervisor)
        assert site.core.can_start
        site.server.call(lambda core: core.pools.add_some(Role.DECODE, 1))
        site.server.tick()
        (order,) = decode(SupervisorOrders, next(second))[0].orders
        assert isinstance(order, StartWorker)
        assert order.name == NAME
        assert service._supervisor is supervisor
        assert service._settings._send is not None
        over.set()
        site.until(lambda: not site.core.can_start)


def reports(over: threading.Event) -> Iterator[bytes]:
    """Of a supervisor that has no process."""
    yield encode(SupervisorReport())
    over.wait(WAIT_S)


def test_a_caller_without_the_token_supervises_nothing(site: Site) -> None:
    stranger = site.client(secret="cd" * 32)
    with pytest.raises(ControllerAway, match="token"):
        stranger.views()
    mine = site.client()
    mine.add(Role.DECODE, 1)
    site.orders(mine, StartWorker)
    assert stranger.orders() == []


def test_calls_are_answered_or_refused_with_the_controllers_words(site: Site) -> None:
    client = ControllerClient(site.server.endpoint, SILENCE_S, SECRET)
    site.clients.append(client)
    client.add(Role.DECODE, 1)
    (view,) = client.views()
    assert (view.record.name, view.status.state) == (NAME, "dead")
    with pytest.raises(ConfigError, match="no worker or node is named 'nobody'"):
        client.drain("nobody")
    client.shut_down()
    assert site.core.shutting_down
