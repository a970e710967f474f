"""The supervisor's connection to the controller: one stream that is opened again whenever it breaks, and calls.

Reports and orders cross threads here: the stream lives on an event loop of its own, and the supervisor's thread takes
orders and hands in reports without waiting. While the controller is away reports are kept, and the first report of the
next stream has all processes that there are, so that nothing depends on what was under way when a stream broke.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from twinpool.cluster.controller.controller_actions import ControllerAction, EndedProcess, PlacedProcess, WorkerKey
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace
from twinpool.cluster.controller.supervisor_wire import (
    action_from_proto,
    ended_to_proto,
    node_to_proto,
    placed_to_proto,
    room_to_proto,
)
from twinpool.cluster.worker_process.asyncio_thread import AsyncioThread
from twinpool.contracts.cluster_secret import access_metadata
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import ConfigError, TwinpoolError, WireError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.settings_change import SettingsAnswer
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.proto import worker_pb2_grpc as pb_grpc
from twinpool.contracts.wire.controller_turns import ControllerTurns, call_leader
from twinpool.contracts.wire.grpc_channels import channel_options
from twinpool.contracts.wire.secure_grpc import open_channel
from twinpool.contracts.wire.settings_protobuf import answer_to_proto
from twinpool.contracts.wire.worker_protobuf import view_from_proto

log = logging.getLogger("twinpool.supervisor")

RETRY_S = 0.2
"""Seconds between two attempts to reach a controller that is away."""
CALL_S = 5.0
"""Seconds that one call waits for the controller, which may be starting."""
SHUT_DOWN_S = 1.0
"""Seconds that the news of the cluster's end waits for the controller: who ends must not wait for it longer."""
ENDS_KEPT = 1024
"""The latest ends of processes that are told again with each new stream: a stream may break with some under way."""


class ControllerAway(TwinpoolError):
    """Raised when the controller doesn't answer a call in time."""


class ControllerClient:
    """One supervisor's connection. `orders` and the calls are for the supervisor's thread."""

    def __init__(
        self, endpoint: str, silence_s: float, secret: str = "", certificate: CertificateFiles | None = None
    ) -> None:
        """`endpoint`: of the controller, or of all of them with commas. `silence_s`: seconds without a sign of life
        after which a connection counts as cut. `certificate`: this node's, None where calls go without TLS."""
        self._controllers = ControllerTurns(endpoint)
        self._silence_s, self._certificate = silence_s, certificate
        self._metadata = access_metadata(secret)
        self._loop = AsyncioThread("controller-client")
        self._orders: queue.SimpleQueue[ControllerAction] = queue.SimpleQueue()
        """About as many as there are workers, for the controller orders a start or an end once in a stream."""
        self._running: Callable[[], Sequence[WorkerKey]] = list
        self._ends: deque[EndedProcess] = deque(maxlen=ENDS_KEPT)
        self._nodes: tuple[NodePlace, ...] = ()
        self._room: ClusterRoom | None = None
        self._reports: asyncio.Queue[pb.SupervisorReport] | None = None
        """The reports of the open stream; None while there is none. On the loop. Each is of a process that has started
        or ended, and they wait for `silence_s` at most: then the stream counts as cut, and is begun again with all
        there is."""

    def supervise(self, running: Callable[[], Sequence[WorkerKey]]) -> None:
        """Be the supervisor from now on. `running` returns all processes that there are; it is called on another
        thread, at the beginning of each stream."""
        self._running = running
        self._loop.start(self._follow())

    def close(self) -> None:
        self._loop.stop()

    # ------------------------------------------------------------ reports and orders

    def orders(self) -> list[ControllerAction]:
        """The controller's orders since the last call, in order."""
        found = []
        while not self._orders.empty():
            found.append(self._orders.get_nowait())
        return found

    def report(
        self,
        ended: Sequence[EndedProcess] = (),
        placed: Sequence[PlacedProcess] = (),
        nodes: Sequence[NodePlace] | None = None,
        settings: Sequence[SettingsAnswer] = (),
        room: ClusterRoom | None = None,
    ) -> None:
        """Tell the controller what has happened to processes, which nodes there are and what they have for workers
        where that has changed, and what has become of changes of settings: nobody waits for such an answer any more
        where its stream has broken."""
        if ended or placed or nodes is not None or settings or room is not None:
            told = tuple(ended), tuple(placed), nodes, tuple(settings), room
            self._loop.loop.call_soon_threadsafe(self._report, *told)

    def _report(
        self,
        ended: tuple[EndedProcess, ...],
        placed: tuple[PlacedProcess, ...],
        nodes: Sequence[NodePlace] | None,
        settings: tuple[SettingsAnswer, ...],
        room: ClusterRoom | None,
    ) -> None:
        self._ends.extend(ended)
        self._room = room or self._room
        self._nodes = self._nodes if nodes is None else tuple(nodes)
        if self._reports is not None:
            self._reports.put_nowait(
                pb.SupervisorReport(
                    ended=ended_to_proto(ended),
                    placed=placed_to_proto(placed),
                    nodes=[node_to_proto(node) for node in nodes or ()],
                    settings=[answer_to_proto(answer) for answer in settings],
                    room=room_to_proto(room) if room is not None else None,
                )
            )

    async def _follow(self) -> None:
        said = ""
        while True:
            endpoint = self._controllers.current
            reason = await self._stream(endpoint)
            if reason != said:
                log.warning("the controller is away", extra={"endpoint": endpoint, "reason": reason})
            said = reason
            self._controllers.next(endpoint)
            await asyncio.sleep(RETRY_S)

    async def _stream(self, endpoint: str) -> str:
        """Hold one stream until it breaks; returns why it did."""
        try:
            async with self._channel(endpoint) as channel:
                stub: Any = pb_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
                self._reports = asyncio.Queue()
                self._reports.put_nowait(self._first())
                async for orders in stub.Supervise(self._sent(self._reports), metadata=self._metadata):
                    for order in orders.orders:
                        self._take(order)
            return "the controller closed the stream"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except ConfigError as error:
            return str(error)
        finally:
            self._reports = None

    def _first(self) -> pb.SupervisorReport:
        running = [pb.Incarnation(name=name, incarnation=incarnation) for name, incarnation in self._running()]
        return pb.SupervisorReport(
            running=running,
            ended=ended_to_proto(self._ends),
            nodes=[node_to_proto(node) for node in self._nodes],
            room=room_to_proto(self._room) if self._room is not None else None,
        )

    @staticmethod
    async def _sent(reports: asyncio.Queue[pb.SupervisorReport]) -> AsyncIterator[pb.SupervisorReport]:
        while True:
            yield await reports.get()

    def _take(self, order: pb.SupervisorOrder) -> None:
        try:
            self._orders.put(action_from_proto(order))
        except WireError as error:
            log.error("an order was not carried out", extra={"reason": str(error)})

    # ------------------------------------------------------------ calls

    def views(self) -> tuple[WorkerView, ...]:
        """The controller's table as it is now. Raises `ControllerAway`."""

        async def first(stub: Any) -> pb.ClusterView:
            watch = stub.Watch(pb.WatchRequest(), metadata=self._metadata, wait_for_ready=True, timeout=CALL_S)
            try:
                view: pb.ClusterView = await watch.read()
                return view
            finally:
                watch.cancel()

        return tuple(view_from_proto(worker) for worker in self._call(first).workers)

    def add(self, role: Role, count: int) -> tuple[WorkerName, ...]:
        """Add workers to a pool. Raises as `PoolOperations.add_some` does, and `ControllerAway`."""
        return self._names(lambda stub: stub.Add(pb.PoolSize(role=role, count=count), **self._options()))

    def drain(self, target: str) -> tuple[WorkerName, ...]:
        """Drain a worker or a node. Raises as `PoolOperations.drain` does, and `ControllerAway`."""
        return self._names(lambda stub: stub.Drain(pb.DrainTarget(name=target), **self._options()))

    def shut_down(self) -> None:
        """Have no worker started any more, and routers told that the cluster ends. Raises `ControllerAway`."""
        self._call(lambda stub: stub.ShutDown(pb.Empty(), **self._options(SHUT_DOWN_S)), SHUT_DOWN_S)

    def _names(self, call: Callable[[Any], Any]) -> tuple[WorkerName, ...]:
        return tuple(WorkerName(name) for name in self._call(call).workers)

    def _options(self, timeout_s: float = CALL_S) -> dict[str, Any]:
        return {"metadata": self._metadata, "wait_for_ready": True, "timeout": timeout_s}

    def _call(self, call: Callable[[Any], Any], timeout_s: float | None = None) -> Any:
        timeout_s = CALL_S if timeout_s is None else timeout_s

        async def on_loop() -> Any:
            return await call_leader(
                self._controllers,
                self._channel,
                lambda channel: call(pb_grpc.ControllerStub(channel)),  # type: ignore[no-untyped-call]
                timeout_s + 0.5,
            )

        try:
            return self._loop.run(on_loop(), timeout_s + 1.0)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise ConfigError(error.details() or "the controller refuses") from None
            raise ControllerAway(f"the controller at {self._controllers} doesn't answer: {error.details()}") from None
        except TimeoutError:
            raise ControllerAway(f"the controller at {self._controllers} doesn't answer in {timeout_s:g} s") from None

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        return open_channel(endpoint, channel_options(self._silence_s), self._certificate)
