"""The supervisor: carries out the controller's orders, and tells the controller which processes have ended.

It decides nothing itself: deaths go in, starts and kills come out, and the operator reads one line about each. A death
is noticed in two ways, whichever is first: the launcher sees the process end, or the controller misses renewals. While
the controller is away nothing is started or killed; what ends meanwhile is told when it is back.

Its connection to the controller is one stream, opened again whenever it breaks, and calls (`ControllerClient`). Reports
and orders cross threads here: the stream lives on an event loop of its own, and the supervisor's thread takes orders
and hands in reports without waiting. While the controller is away reports are kept, and the first report of the next
stream has all processes that there are, so that nothing depends on what was under way when a stream broke. What starts
and ends processes is apart (`WorkerLauncher`): Ray reads its environment when it is imported, and that is set only once
the flags are known.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from twinpool.cluster.controller.controller_actions import (
    SUPERVISE,
    ControllerAction,
    EndedProcess,
    ForgetArenas,
    KillWorker,
    OperatorNote,
    PlacedProcess,
    StartFailed,
    StartWorker,
    SupervisorReport,
    WorkerKey,
)
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace
from twinpool.cluster.worker_process.grpc_service import AsyncioThread
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, Role, WorkerName
from twinpool.contracts.messages.calls import CHANGE_POOLS, SHUT_DOWN, WATCH, Empty
from twinpool.contracts.messages.cluster_view import ClusterView, WatchRequest
from twinpool.contracts.messages.pool_changes import (
    AddWorkers,
    DrainWorkers,
    LoadAdapter,
    OperatorChange,
    SettingsAnswer,
    SettingsChange,
)
from twinpool.contracts.messages.worker_status import WorkerView
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.contracts.wire.controller_turns import ControllerTurns, call_leader
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed

log = logging.getLogger("twinpool.supervisor")
T = TypeVar("T")

RETRY_S = 0.2
"""Seconds between two attempts to reach a controller that is away."""
CALL_S = 5.0
"""Seconds that one call waits for the controller, which may be starting."""
SHUT_DOWN_S = 1.0
"""Seconds that the news of the cluster's end waits for the controller: who ends must not wait for it longer."""
ENDS_KEPT = 1024
"""The latest ends of processes that are told again with each new stream: a stream may break with some under way."""


class WorkerLauncher(Protocol):
    """Starts and ends workers' processes for the supervisor. Used from one thread."""

    def start(
        self,
        plan: WorkerPlan,
        avoid: tuple[str, ...] = (),
        only: str = "",
        successor_of: Incarnation = NO_INCARNATION,
    ) -> None:
        """Start the process, or all ranks' processes, of a plan, on any node but those named by `avoid` (host names or
        Ray node ids), or on the one that `only` names. Doesn't wait.

        `successor_of`: an incarnation whose process waits to go on by this plan; one that can't is ended first.
        """

    def running(self) -> list[WorkerKey]:
        """The incarnations whose processes this launcher has started and has not seen end. Any thread."""

    def nodes(self) -> tuple[NodePlace, ...]:
        """The nodes that take workers."""

    def placed(self) -> list[PlacedProcess]:
        """Starts whose node has become known since the last call."""

    def kill(self, name: WorkerName, incarnation: Incarnation, pid: int, node: str) -> None: ...

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None:
        """Free the arenas that are kept for this worker's next incarnation; with `before`, only those that incarnations
        before that one left."""

    def ended(self, timeout_s: float) -> list[EndedProcess]:
        """Incarnations whose process has ended since the last call; waits up to `timeout_s` for the first."""

    def close(self) -> None:
        """End all processes. Idempotent."""


class ControllerLine(Protocol):
    """The supervisor's side of its stream to the controller."""

    def orders(self) -> list[ControllerAction]: ...

    def report(
        self,
        ended: Sequence[EndedProcess] = (),
        placed: Sequence[PlacedProcess] = (),
        nodes: Sequence[NodePlace] | None = None,
        settings: Sequence[SettingsAnswer] = (),
        room: ClusterRoom | None = None,
    ) -> None: ...


class Supervisor:
    """Connects one controller with one launcher. Used from one thread."""

    def __init__(
        self,
        controller: ControllerLine,
        launcher: WorkerLauncher,
        plan: Callable[[StartWorker], WorkerPlan],
        say: Callable[[str], None],
        change: Callable[[SettingsChange], SettingsAnswer],
        room: Callable[[], ClusterRoom | None] = lambda: None,
    ) -> None:
        """`plan` turns a granted start into the plan that its process gets, and raises `TwinpoolError` where there can
        be none; `say` shows a line to the operator; `change` changes the settings that plans are made by; `room`: what
        nodes have for workers, None where that is as it was."""
        self._controller = controller
        self._launcher = launcher
        self._plan = plan
        self._say = say
        self._change = change
        self._room = room
        self._nodes: tuple[NodePlace, ...] = ()
        self.failed: dict[WorkerName, str] = {}
        """Workers that have died and were never ready, each with the reason of its last death."""

    def poll(self, timeout_s: float) -> None:
        """Do one round: carry out all orders that have come, then wait up to `timeout_s` for a process to end."""
        nodes, placed = self._launcher.nodes(), self._launcher.placed()
        self._controller.report(placed=placed, nodes=nodes if nodes != self._nodes else None, room=self._room())
        self._nodes = nodes
        for order in self._controller.orders():
            match order:
                case StartWorker():
                    self._start(order)
                case KillWorker():
                    self._launcher.kill(order.name, order.incarnation, order.pid, order.node)
                case ForgetArenas():
                    self._launcher.forget(order.name, order.before)
                case StartFailed():
                    self.failed[order.name] = order.reason
                case OperatorNote():
                    log.warning(order.text)
                    self._say(order.text)
                case SettingsChange():
                    self._controller.report(settings=[self._change(order)])
        ended = self._launcher.ended(timeout_s)
        for one in ended:
            log.info("process ended", extra={"worker": one.name, "incarnation": one.incarnation, "reason": one.reason})
        self._controller.report(ended=ended)

    def _start(self, order: StartWorker) -> None:
        """Start a worker's process, or tell the controller why there is none."""
        log.info("starting", extra={"worker": order.name, "incarnation": order.incarnation})
        try:
            plan = self._plan(order)
        except TwinpoolError as error:
            self._controller.report(ended=[EndedProcess(order.name, order.incarnation, str(error))])
        else:
            self._launcher.start(plan, order.avoid, order.only, order.successor_of)


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

    def load_adapter(self, adapter: AdapterRef) -> None:
        """Have an adapter served, in place of one that an earlier run left under its name. Raises as
        `PoolOperations.load_adapter` does, and `ControllerAway`."""
        self._change(LoadAdapter(adapter, replace=True))

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
