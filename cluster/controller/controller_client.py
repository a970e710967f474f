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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from twinpool.cluster.controller.controller_actions import (
    SUPERVISE,
    ControllerAction,
    EndedProcess,
    PlacedProcess,
    SupervisorReport,
    WorkerKey,
)
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace
from twinpool.cluster.worker_process.asyncio_thread import AsyncioThread
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.calls import CHANGE_POOLS, SHUT_DOWN, WATCH, Empty
from twinpool.contracts.messages.cluster_view import ClusterView, WatchRequest
from twinpool.contracts.messages.pool_changes import AddWorkers, DrainWorkers, OperatorChange
from twinpool.contracts.messages.settings_change import SettingsAnswer
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.contracts.wire.controller_turns import ControllerTurns, call_leader
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed

T = TypeVar("T")
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
        self._secret = secret
        self._loop = AsyncioThread("controller-client")
        self._orders: queue.SimpleQueue[ControllerAction] = queue.SimpleQueue()
        """About as many as there are workers, for the controller orders a start or an end once in a stream."""
        self._running: Callable[[], Sequence[WorkerKey]] = list
        self._ends: deque[EndedProcess] = deque(maxlen=ENDS_KEPT)
        self._nodes: tuple[NodePlace, ...] = ()
        self._room: ClusterRoom | None = None
        self._reports: asyncio.Queue[SupervisorReport] | None = None
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
            report = SupervisorReport((), tuple(ended), tuple(placed), tuple(nodes or ()), tuple(settings), room)
            self._loop.loop.call_soon_threadsafe(self._report, report, nodes is not None)

    def _report(self, report: SupervisorReport, nodes_changed: bool) -> None:
        self._ends.extend(report.ended)
        self._room = report.room or self._room
        self._nodes = report.nodes if nodes_changed else self._nodes
        if self._reports is not None:
            self._reports.put_nowait(report)

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
                self._reports = asyncio.Queue()
                self._reports.put_nowait(self._first())
                async with aclosing(channel.exchange(SUPERVISE, self._sent(self._reports))) as received:
                    async for orders in received:
                        for order in orders.orders:
                            self._orders.put(order)
            return "the controller closed the stream"
        except (CallFailed, ConfigError) as error:
            return str(error)
        finally:
            self._reports = None

    def _first(self) -> SupervisorReport:
        return SupervisorReport(tuple(self._running()), tuple(self._ends), nodes=self._nodes, room=self._room)

    @staticmethod
    async def _sent(reports: asyncio.Queue[SupervisorReport]) -> AsyncIterator[SupervisorReport]:
        while True:
            yield await reports.get()

    # ------------------------------------------------------------ calls

    def views(self) -> tuple[WorkerView, ...]:
        """The controller's table as it is now. Raises `ControllerAway`."""

        async def first(channel: CallChannel) -> ClusterView:
            async with aclosing(channel.subscribe(WATCH, WatchRequest(), wait=True, timeout_s=CALL_S)) as views:
                return await anext(views)

        return self._call(first).workers

    def add(self, role: Role, count: int) -> tuple[WorkerName, ...]:
        """Add workers to a pool. Raises as `PoolOperations.add_some` does, and `ControllerAway`."""
        return self._change(AddWorkers(role, count, by_operator=False))

    def drain(self, target: str) -> tuple[WorkerName, ...]:
        """Drain a worker or a node. Raises as `PoolOperations.drain` does, and `ControllerAway`."""
        return self._change(DrainWorkers(target))

    def shut_down(self) -> None:
        """Have no worker started any more, and routers told that the cluster ends. Raises `ControllerAway`."""
        self._call(lambda channel: channel.call(SHUT_DOWN, Empty(), SHUT_DOWN_S, wait=True), SHUT_DOWN_S)

    def _change(self, change: OperatorChange) -> tuple[WorkerName, ...]:
        return self._call(lambda channel: channel.call(CHANGE_POOLS, change, CALL_S, wait=True)).names

    def _call(self, call: Callable[[CallChannel], Awaitable[T]], timeout_s: float | None = None) -> T:
        timeout_s = CALL_S if timeout_s is None else timeout_s
        try:
            return self._loop.run(call_leader(self._controllers, self._channel, call, timeout_s + 0.5), timeout_s + 1.0)
        except CallFailed as error:
            if error.refused:
                raise ConfigError(error.reason or "the controller refuses") from None
            raise ControllerAway(f"the controller at {self._controllers} doesn't answer: {error.reason}") from None
        except TimeoutError:
            raise ControllerAway(f"the controller at {self._controllers} doesn't answer in {timeout_s:g} s") from None

    def _channel(self, endpoint: str) -> CallChannel:
        return CallChannel(endpoint, self._secret, self._certificate, silence_s=self._silence_s)
