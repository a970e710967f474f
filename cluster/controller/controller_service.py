"""The controller's gRPC service: Register, Renew, Leave for workers; Watch and operators' calls for routers; Supervise.

The controller belongs to one event loop, and handlers run there. A watcher gets the whole table at once and again after
each change; changes that come faster than it reads are folded into one. The supervisor has one stream: what it reports
goes in, what the controller decides goes out, and when it breaks the next one begins with all processes that there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc.aio

from cluster.controller.controller import Controller
from cluster.controller.controller_actions import LeaseGrant
from cluster.controller.controller_ledger import LedgerLost
from cluster.controller.supervisor_wire import action_to_proto, ended_from_proto, node_from_proto, placed_from_proto
from contracts.errors import ConfigError, WireError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.proto import worker_pb2 as pb
from contracts.proto import worker_pb2_grpc as pb_grpc
from contracts.wire.worker_protobuf import record_from_proto, record_to_proto, status_from_proto, status_to_proto

Context = grpc.aio.ServicerContext[Any, Any]
FOLD_S = 0.02
"""Seconds within which changes reach a watcher as one."""
FOLD_WORKER_S = 0.0005
"""Seconds that each worker of the table adds to `FOLD_S`."""
MOST_WATCHERS = 256
"""Routers that watch at once."""
NAME_CHARS = 253
"""The most characters of a worker's or a node's name in a request."""
MOST_ORDERS = 64 * 1024
"""Orders that may wait for a supervisor that doesn't read, before its stream is ended."""


class SupervisorLine:
    """Orders on their way to one supervisor."""

    def __init__(self) -> None:
        self._orders: list[pb.SupervisorOrder] = []
        self._more = asyncio.Event()
        self.ended = ""
        """Why the line is over; empty while it is not."""

    def send(self, orders: Sequence[pb.SupervisorOrder]) -> None:
        self._orders += orders
        if len(self._orders) > MOST_ORDERS:
            self.end("the supervisor doesn't read its orders")
        elif orders:
            self._more.set()

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._more.set()

    async def next(self) -> list[pb.SupervisorOrder]:
        """The orders since the last call, once there are some; none when the line has ended."""
        await self._more.wait()
        self._more.clear()
        orders, self._orders = self._orders, []
        return [] if self.ended else orders


class ControllerService(pb_grpc.ControllerServicer):
    """The `Controller` service over one controller; every method runs on its loop."""

    def __init__(self, core: Controller) -> None:
        self._core = core
        self._watchers: set[asyncio.Event] = set()
        self._told: tuple[int, pb.ClusterView] | None = None
        """The latest table that was built, with its version: all watchers get the same message."""
        self._supervisor: SupervisorLine | None = None
        core.on_change(self._wake)

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def Register(self, request: pb.Registration, context: Context) -> pb.LeaseGrant:
        try:
            record = record_from_proto(request)
        except (WireError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return grant_message(self._core.register(record))

    async def Renew(self, request: pb.Renewal, context: Context) -> pb.LeaseGrant:
        name, incarnation = WorkerName(request.name), Incarnation(request.incarnation)
        try:
            status = status_from_proto(request.status)
        except (WireError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not (math.isfinite(status.stalled_s) and math.isfinite(status.longest_step_s)):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a status whose seconds are no numbers")
        return grant_message(self._core.renew(name, incarnation, status))

    async def Leave(self, request: pb.Renewal, context: Context) -> pb.Empty:
        self._core.leave(WorkerName(request.name), Incarnation(request.incarnation))
        return pb.Empty()

    # ------------------------------------------------------------ operators

    async def ChangeRole(self, request: pb.RoleChange, context: Context) -> pb.Empty:
        name = await _name(request.name, context)
        await self._operate(lambda: self._core.pools.change_role(WorkerName(name), Role(request.role)), context)
        return pb.Empty()

    async def Drain(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        return await self._operate(lambda: self._core.pools.drain(name), context)

    async def Undrain(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        return await self._operate(lambda: self._core.pools.undrain(name), context)

    async def Add(self, request: pb.PoolSize, context: Context) -> pb.WorkerNames:
        node = await _name(request.node, context)
        return await self._operate(lambda: self._core.pools.add_some(Role(request.role), request.count, node), context)

    async def Scale(self, request: pb.PoolSizes, context: Context) -> pb.WorkerNames:
        def scale() -> tuple[WorkerName, ...]:
            sizes = {Role(pool.role): pool.count for pool in request.pools}
            return self._core.pools.scale(sizes, empty=request.empty)

        return await self._operate(scale, context)

    async def Restart(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        return await self._operate(lambda: self._core.pools.restart(WorkerName(name)), context)

    async def Cordon(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        return await self._operate(lambda: self._core.pools.cordon(name), context)

    async def Uncordon(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        return await self._operate(lambda: self._core.pools.uncordon(name), context)

    async def ShutDown(self, request: pb.Empty, context: Context) -> pb.Empty:
        self._core.shut_down()
        return pb.Empty()

    async def _operate(self, change: Callable[[], tuple[WorkerName, ...] | None], context: Context) -> pb.WorkerNames:
        """Make one operator's change; what the controller refuses is refused with its words."""
        try:
            workers = change() or ()
        except (ConfigError, ValueError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        self.tick()
        return pb.WorkerNames(workers=workers)

    # ------------------------------------------------------------ the supervisor

    def tick(self) -> None:
        """Let the controller take the time, and send what it decides to its supervisor. A ledger that can't be written
        is told by `ControllerTable.failed`."""
        with contextlib.suppress(OSError, LedgerLost):
            actions = self._core.tick()
            if self._supervisor is not None:
                self._supervisor.send([action_to_proto(action) for action in actions])

    async def Supervise(
        self, request_iterator: AsyncIterator[pb.SupervisorReport], context: Context
    ) -> AsyncIterator[pb.SupervisorOrders]:
        line = SupervisorLine()
        reading = asyncio.create_task(self._hear(request_iterator, line))
        try:
            while orders := await line.next():
                yield pb.SupervisorOrders(orders=orders)
        finally:
            reading.cancel()
            if self._supervisor is line:
                self._supervisor = None
                self._core.detach()
        if not reading.cancelled() and line.ended:
            await context.abort(grpc.StatusCode.ABORTED, line.ended)

    async def _hear(self, reports: AsyncIterator[pb.SupervisorReport], line: SupervisorLine) -> None:
        """Take in a supervisor's reports until its stream ends. Its first one makes it the one that is obeyed."""
        reason = "the supervisor has ended its stream"
        try:
            async for report in reports:
                if self._supervisor is not line:
                    if line.ended:
                        return
                    self._take(report, line)
                self._core.set_nodes([node_from_proto(node) for node in report.nodes] or self._core.table.nodes.places)
                for ended in ended_from_proto(report.ended):
                    self._core.died(ended.name, ended.incarnation, ended.reason)
                for placed in placed_from_proto(report.placed):
                    self._core.placed(placed.name, placed.incarnation, placed.node)
                self.tick()
        except (OSError, LedgerLost) as error:
            reason = str(error)
        except grpc.aio.BaseError as error:
            reason = f"the supervisor's stream broke: {error}"
        line.end(reason)

    def _take(self, report: pb.SupervisorReport, line: SupervisorLine) -> None:
        if self._supervisor is not None:
            self._supervisor.end("another supervisor has come")
        self._supervisor = line
        running = [(WorkerName(one.name), Incarnation(one.incarnation)) for one in report.running]
        self._core.attach(running, ended_from_proto(report.ended))

    # ------------------------------------------------------------ routers

    async def Watch(self, request: pb.Empty, context: Context) -> AsyncIterator[pb.ClusterView]:
        if len(self._watchers) >= MOST_WATCHERS:
            text = f"{MOST_WATCHERS} routers watch already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        changed = asyncio.Event()
        with self._watching(changed):
            while True:
                changed.clear()
                view = self.view()
                yield view
                await changed.wait()
                # Heartbeats change the table all the time, and each message holds all of it: large ones go less often.
                await asyncio.sleep(FOLD_S + FOLD_WORKER_S * len(view.workers))

    @contextlib.contextmanager
    def _watching(self, changed: asyncio.Event) -> Iterator[None]:
        self._watchers.add(changed)
        try:
            yield
        finally:
            self._watchers.discard(changed)

    def view(self) -> pb.ClusterView:
        """The whole table as a message, built once for each version."""
        if self._told is not None and self._told[0] == self._core.version:
            return self._told[1]
        workers = [
            pb.WorkerView(
                registration=record_to_proto(view.record),
                status=status_to_proto(view.status),
                cordoned=view.cordoned,
            )
            for view in self._core.views()
        ]
        version = self._core.version
        view = pb.ClusterView(version=version, workers=workers, shutting_down=self._core.shutting_down)
        self._told = version, view
        return view


async def _name(name: str, context: Context) -> str:
    """The name of a worker or node of a request, which is refused where it is too long."""
    if len(name) > NAME_CHARS:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a name has at most {NAME_CHARS} characters")
    return name


def grant_message(grant: LeaseGrant) -> pb.LeaseGrant:
    return pb.LeaseGrant(
        incarnation=grant.incarnation,
        lease_s=grant.lease_s,
        fenced=grant.fenced,
        drain=grant.drain,
        ended=[pb.EndedWorker(name=ended.name, incarnation=ended.incarnation) for ended in grant.ended],
    )
