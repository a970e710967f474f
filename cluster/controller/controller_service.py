"""The controller's gRPC service: Register, Renew, Leave for workers; Watch and operators' calls for routers; Supervise.

The controller belongs to one event loop, and handlers run there. A watcher gets the whole table at once and again after
each change; changes that come faster than it reads are folded into one. The supervisor has one stream: what it reports
goes in, what the controller decides goes out, and when it breaks the next one begins with all processes that there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import LeaseGrant
from twinpool.cluster.controller.dashboard_source import dashboard_of
from twinpool.cluster.controller.leadership import LedgerLost
from twinpool.cluster.controller.quota_ledger import SAVE_S, QuotaLedger
from twinpool.cluster.controller.record_board import ID_CHARS, MAX_RECENT, RecordBoard, TooManyAsks
from twinpool.cluster.controller.settings_orders import SettingsOrders
from twinpool.cluster.controller.stream_lines import SupervisorLine, WatcherLine
from twinpool.cluster.controller.supervisor_wire import (
    action_to_proto,
    ended_from_proto,
    node_from_proto,
    placed_from_proto,
    room_from_proto,
)
from twinpool.cluster.dashboard.cluster_frames import EventKind
from twinpool.cluster.dashboard.dashboard_feed import TooManyWatch
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.errors import ConfigError, WireError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.control_plane import ControlPlane
from twinpool.contracts.messages.quota import MAX_CLAIMS
from twinpool.contracts.messages.worker_status import EndedWorker, WorkerView
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.proto import worker_pb2_grpc as pb_grpc
from twinpool.contracts.wire.autoscaler_protobuf import autoscaler_to_proto, counts_from_proto
from twinpool.contracts.wire.controller_turns import NOT_LEADING
from twinpool.contracts.wire.quota_protobuf import claim_from_proto, slice_to_proto
from twinpool.contracts.wire.record_protobuf import record_from_proto, record_to_proto
from twinpool.contracts.wire.router_report_protobuf import router_report_from_proto, router_report_to_proto
from twinpool.contracts.wire.settings_protobuf import answer_from_proto, answer_to_proto, change_from_proto
from twinpool.contracts.wire.unknown_kinds import known
from twinpool.contracts.wire.worker_protobuf import record_from_proto as worker_from_proto
from twinpool.contracts.wire.worker_protobuf import record_to_proto as worker_to_proto
from twinpool.contracts.wire.worker_protobuf import status_from_proto, status_to_proto

log = logging.getLogger("twinpool.controller")

Context = grpc.aio.ServicerContext[Any, Any]
FOLD_S = 0.02
"""Seconds within which changes reach a watcher as one."""
FOLD_WORKER_S = 0.0005
"""Seconds that each worker of the table adds to `FOLD_S`."""
MAX_WATCHERS = 256
"""Routers that watch at once."""
NAME_CHARS = 253
"""The most characters of a worker's or a node's name in a request."""
MAX_CHANGES = 16
"""Messages that may wait for a watcher, before the whole table takes their place."""


class ControllerService(pb_grpc.ControllerServicer):
    """The `Controller` service over one controller; every method runs on its loop."""

    def __init__(
        self, core: Controller, autoscaler: Autoscaler | None = None, leads: Callable[[], bool] = lambda: True
    ) -> None:
        """`leads`: whether this controller may grant and decide anything now (`cluster.controller.leadership`)."""
        self._core, self._autoscaler, self._leads = core, autoscaler, leads
        self._control_plane = pb.ControlPlane()
        """Who leads, and who stands by, as routers are told."""
        self._clock = SystemClock()
        self._quotas, self._quotas_at = QuotaLedger(self._clock, core.table.quotas), 0.0
        self._watchers: set[WatcherLine] = set()
        self._publishing: asyncio.TimerHandle | None = None
        self._published = 0
        """The table's version up to which watchers have been told."""
        self._told: tuple[int, pb.ClusterView] | None = None
        """The latest table that was built, with its version: all watchers get the same message."""
        self._rows = 0
        self._ended: tuple[tuple[EndedWorker, ...], int] = ((), _mark(()))
        """The latest list of ended incarnations, with its mark."""
        self.stream = ""
        """Where workers may renew by frames, ``host:port``; empty: nowhere."""
        self._supervisor: SupervisorLine | None = None
        self._settings = SettingsOrders()
        self.records = RecordBoard()
        """What routers tell of requests."""
        self._dashboard = dashboard_of(core, autoscaler, self._plane, self.records, self._clock)
        core.on_change(self._wake)

    async def Register(self, request: pb.Registration, context: Context) -> pb.LeaseGrant:
        try:
            record = worker_from_proto(request)
        except (WireError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return self._grant(self._core.register(record))

    async def Renew(self, request: pb.Renewal, context: Context) -> pb.LeaseGrant:
        try:
            return self.renewal(request)
        except (WireError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError from error  # `abort` has raised.

    async def Leave(self, request: pb.Renewal, context: Context) -> pb.LeaveAnswer:
        name, incarnation = WorkerName(request.name), Incarnation(request.incarnation)
        goes_on = self._core.leave(name, incarnation, closed=request.closed)
        self.tick()  # A process that waits for its plan gets it at once.
        return pb.LeaveAnswer(goes_on=goes_on)

    # ------------------------------------------------------------ operators

    async def ChangeRole(self, request: pb.RoleChange, context: Context) -> pb.Empty:
        name = await _name(request.name, context)
        change = self._core.pools.change_role
        await self._operate(lambda: change(WorkerName(name), Role(request.role), empty=request.empty), context)
        self._done(f"an operator has {name} become a {request.role} worker", holds=True)
        return pb.Empty()

    async def Drain(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        names = await self._operate(lambda: self._core.pools.drain(name, map(Role, request.keep)), context)
        self._done(f"an operator drains {name}")
        return names

    async def Undrain(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        names = await self._operate(lambda: self._core.pools.undrain(name), context)
        self._done(f"an operator has undrained {name}", holds=True)
        return names

    async def Add(self, request: pb.PoolSize, context: Context) -> pb.WorkerNames:
        node = await _name(request.node, context)
        add = self._core.pools.add_some
        names = await self._operate(lambda: add(Role(request.role), request.count, node), context)
        if request.operator:
            self._done(f"an operator has added {', '.join(names.workers)}", holds=True)
        return names

    async def Scale(self, request: pb.PoolSizes, context: Context) -> pb.WorkerNames:
        def scale() -> tuple[WorkerName, ...]:
            sizes = {Role(pool.role): pool.count for pool in request.pools}
            return self._core.pools.scale(sizes, empty=request.empty)

        names = await self._operate(scale, context)
        sizes = ", ".join(f"{pool.role} to {pool.count}" for pool in request.pools)
        self._done(f"an operator has scaled {sizes}", holds=True)
        return names

    async def Restart(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        names = await self._operate(lambda: self._core.pools.restart(WorkerName(name)), context)
        self._done(f"an operator restarts {name}")
        return names

    async def Cordon(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        names = await self._operate(lambda: self._core.pools.cordon(name), context)
        self._done(f"an operator has cordoned {name}")
        return names

    async def Uncordon(self, request: pb.DrainTarget, context: Context) -> pb.WorkerNames:
        name = await _name(request.name, context)
        names = await self._operate(lambda: self._core.pools.uncordon(name), context)
        self._done(f"an operator has uncordoned {name}")
        return names

    async def ChangeSettings(self, request: pb.SettingsChange, context: Context) -> pb.SettingsAnswer:
        try:
            answer = await self._settings.change(change_from_proto(request))
        except ConfigError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return answer_to_proto(answer)

    async def ShutDown(self, request: pb.Empty, context: Context) -> pb.Empty:
        self._core.shut_down()
        return pb.Empty()

    def _done(self, what: str, *, holds: bool = False) -> None:
        """Have what an operator has done seen. `holds`: the autoscaler leaves the pools alone after it."""
        self._dashboard.frames.log.add(time.time(), EventKind.OPERATOR, what)
        if holds and self._autoscaler is not None:
            self._autoscaler.hold(what)

    async def _operate(self, change: Callable[[], tuple[WorkerName, ...] | None], context: Context) -> pb.WorkerNames:
        """Make one operator's change; what the controller refuses is refused with its words."""
        try:
            workers = change() or ()
        except (ConfigError, ValueError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        start = [name for name in workers if self._core.table.rows[name].stays]
        self.tick()
        return pb.WorkerNames(workers=workers, start=start, leave=[name for name in workers if name not in start])

    # ------------------------------------------------------------ the supervisor

    def tick(self) -> None:
        """Let the controller take the time, and send what it decides to its supervisor. A ledger that can't be written
        is told by `ControllerTable.failed`."""
        if not self._leads():
            return
        self._dashboard.tick()
        with contextlib.suppress(OSError, LedgerLost):
            if self._autoscaler is not None:
                self._tick_autoscaler(self._autoscaler)
            if self._quotas.changed and self._clock.now() >= self._quotas_at:
                self._quotas_at = self._clock.now() + SAVE_S
                self._core.table.save_quotas(self._quotas.kept())
            actions = self._core.tick()
            if self._supervisor is not None:
                self._supervisor.send([action_to_proto(action) for action in actions])

    @staticmethod
    def _tick_autoscaler(autoscaler: Autoscaler) -> None:
        try:
            autoscaler.tick()
        except (OSError, LedgerLost):
            raise
        except Exception:  # Our own bug; leases and restarts go on without it.
            log.exception("the autoscaler failed")

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
                self._settings.lost()
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
                if report.HasField("room"):
                    self._core.set_room(room_from_proto(report.room))
                self._core.set_nodes([node_from_proto(node) for node in report.nodes] or self._core.table.nodes.places)
                for ended in ended_from_proto(report.ended):
                    self._core.died(ended.name, ended.incarnation, ended.reason)
                for placed in placed_from_proto(report.placed):
                    self._core.placed(placed.name, placed.incarnation, placed.node)
                self._settings.take(answer_from_proto(answer) for answer in report.settings)
                self.tick()
        except (OSError, LedgerLost) as error:
            reason = str(error)
        except grpc.aio.BaseError as error:
            reason = f"the supervisor's stream broke: {error}"
        line.end(reason)

    def _take(self, report: pb.SupervisorReport, line: SupervisorLine) -> None:
        if self._supervisor is not None:
            self._supervisor.end("another supervisor has come")
            self._settings.lost()
        self._supervisor = line
        self._settings.come(lambda change: line.send([action_to_proto(change)]))
        running = [(WorkerName(one.name), Incarnation(one.incarnation)) for one in report.running]
        self._core.attach(running, ended_from_proto(report.ended))

    # ------------------------------------------------------------ routers

    async def LeaseQuota(self, request: pb.QuotaClaims, context: Context) -> pb.QuotaSlices:
        if not 0 < len(request.router) <= NAME_CHARS or len(request.claims) > MAX_CLAIMS:
            text = f"a router with a name, and at most {MAX_CLAIMS} claims"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            claims = [claim_from_proto(claim) for claim in request.claims]
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        slices = [self._quotas.lease(request.router, claim) for claim in claims]
        return pb.QuotaSlices(slices=map(slice_to_proto, slices))

    async def ReportLatency(self, request: pb.LatencyReport, context: Context) -> pb.AutoscalerView:
        if not 0 < len(request.router) <= NAME_CHARS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a report names its router")
        if self._autoscaler is None:
            return pb.AutoscalerView()
        self._autoscaler.report(request.router, counts_from_proto(request))
        return autoscaler_to_proto(self._autoscaler.view())

    async def ReportRecords(self, request: pb.RecordReport, context: Context) -> pb.Empty:
        answers = request.answers
        if max(len(request.records), len(answers), *(len(one.records) for one in answers), 0) > MAX_RECENT:
            text = f"a report has at most {MAX_RECENT} records, and so has each answer in it"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            records = known(record_from_proto, request.records)[0]
            found = [(one.number, known(record_from_proto, one.records)[0]) for one in answers]
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self.records.take(records, found)
        return pb.Empty()

    async def FindRecords(self, request: pb.RecordQuery, context: Context) -> pb.FoundRecords:
        board = self.records
        if not request.request_id:
            return pb.FoundRecords(records=map(record_to_proto, board.recent(request.recent)), kept_s=board.kept_s)
        if len(request.request_id) > ID_CHARS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"an id has at most {ID_CHARS} characters")
        try:
            found = await board.find(request.request_id, self._ask_routers)
        except TooManyAsks as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return pb.FoundRecords(
            records=map(record_to_proto, found.records),
            kept_s=board.kept_s,
            asked=found.asked,
            answered=found.answered,
        )

    def _ask_routers(self, number: int, request_id: str) -> int:
        """Ask all routers that answer for the records of a request; returns how many these are."""
        ask = pb.RecordAsk(number=number, request_id=request_id)
        # One that doesn't read counts as one that has no records: questions for it would wait for ever.
        lines = [line for line in self._watchers if line.answers and len(line.changes) <= MAX_CHANGES]
        for line in lines:
            line.changes.append(pb.ClusterView(version=self._published, changes=True, record_asks=[ask]))
            line.more.set()
        return len(lines)

    async def ReportRouter(self, request: pb.RouterReport, context: Context) -> pb.RouterReportAnswer:
        try:
            return pb.RouterReportAnswer(next_s=self._dashboard.report(router_report_from_proto(request)))
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError from error  # `abort` has raised.

    async def Routers(self, request: pb.Empty, context: Context) -> pb.RouterReports:
        return pb.RouterReports(routers=map(router_report_to_proto, self._dashboard.routers()))

    async def WatchDashboard(self, request: pb.Empty, context: Context) -> AsyncIterator[pb.DashboardFrame]:
        try:
            async for frame in self._dashboard.watch():
                yield pb.DashboardFrame(json=frame)
        except TooManyWatch as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def DashboardPast(self, request: pb.Empty, context: Context) -> pb.DashboardFrame:
        return pb.DashboardFrame(json=self._dashboard.past())

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.ClusterView]:
        if len(self._watchers) >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} routers watch already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        line = WatcherLine(request.changes, request.records and request.changes)
        self._watchers.add(line)
        try:
            yield self.view()
            while True:
                await line.more.wait()
                line.more.clear()
                changes, line.changes = line.changes, []
                for view in changes if line.takes_changes else [self.view()]:
                    yield view
        finally:
            self._watchers.discard(line)

    def tell(self, leader: str, term: int, standbys: tuple[str, ...]) -> None:
        """Have watchers told who leads the controllers and who stands by."""
        told = pb.ControlPlane(leader=leader, term=term, standbys=standbys)
        if told != self._control_plane:
            self._control_plane = told
            self._core.table.changed()

    def _plane(self) -> ControlPlane:
        told = self._control_plane
        return ControlPlane(told.leader, told.term, tuple(told.standbys))

    def _wake(self) -> None:
        """Have what has changed published soon, with whatever changes until then."""
        if self._publishing is None and self._watchers:
            # Heartbeats change the table all the time: large tables go less often.
            fold_s = FOLD_S + FOLD_WORKER_S * self._rows
            self._publishing = asyncio.get_running_loop().call_later(fold_s, self._publish)

    def _publish(self) -> None:
        """Give all watchers one message of what has changed since the last one. A watcher that doesn't read gets the
        whole table in the end."""
        self._publishing = None
        changes, self._published = self.changes(self._published), self._core.version
        for line in self._watchers:
            line.changes.append(changes)
            if len(line.changes) > MAX_CHANGES:
                line.changes = [self.view()]
            line.more.set()

    def view(self) -> pb.ClusterView:
        """The whole table as a message, built once for each version."""
        if self._told is not None and self._told[0] == self._core.version:
            return self._told[1]
        workers = [_view_message(view) for view in self._core.views()]
        version, self._rows = self._core.version, len(workers)
        view = pb.ClusterView(
            version=version,
            workers=workers,
            shutting_down=self._core.shutting_down,
            control_plane=self._control_plane,
        )
        self._told = version, view
        return view

    def changes(self, since: int) -> pb.ClusterView:
        """What has changed in the table after version `since`, as a message."""
        changes = self._core.changes(since)
        return pb.ClusterView(
            version=self._core.version,
            workers=[_view_message(change.view) for change in changes if change.whole],
            statuses=[_numbers_message(change.view, change.counters) for change in changes if not change.whole],
            changes=True,
            shutting_down=self._core.shutting_down,
            control_plane=self._control_plane,
        )

    def renewal(self, request: pb.Renewal) -> pb.LeaseGrant:
        """Answer a renewal. Raises `WireError` or `ValueError` for one that makes no sense, and where this controller
        doesn't lead: its stream ends with that, and the worker tries the next controller."""
        if not self._leads():
            raise WireError(NOT_LEADING)
        status = status_from_proto(request.status)
        if not (math.isfinite(status.stalled_s) and math.isfinite(status.longest_step_s)):
            raise ValueError("a status whose seconds are no numbers")
        grant = self._core.renew(WorkerName(request.name), Incarnation(request.incarnation), status)
        return self._grant(grant, request.ended_mark)

    def _grant(self, grant: LeaseGrant, known: int = 0) -> pb.LeaseGrant:
        """A grant as a message; `known`: the mark of the list of ended incarnations that the worker has."""
        if grant.ended != self._ended[0]:
            self._ended = grant.ended, _mark(grant.ended)
        return grant_message(grant, self._ended[1], known, self.stream, self._dashboard.counters_s)


def _view_message(view: WorkerView) -> pb.WorkerView:
    return pb.WorkerView(
        registration=worker_to_proto(view.record), status=status_to_proto(view.status), cordoned=view.cordoned
    )


def _numbers_message(view: WorkerView, counters: bool) -> pb.WorkerStatus:
    status = view.status
    return status_to_proto(status if counters else replace(status, counters={}, counters_left_out=True))


def _mark(ended: tuple[EndedWorker, ...]) -> int:
    """A number that names a list of ended incarnations, the same for every controller; 0 is none."""
    text = "\n".join(sorted(f"{one.name} {one.incarnation} {one.closed_from}" for one in ended))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") or 1


async def _name(name: str, context: Context) -> str:
    """The name of a worker or node of a request, which is refused where it is too long."""
    if len(name) > NAME_CHARS:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a name has at most {NAME_CHARS} characters")
    return name


def grant_message(
    grant: LeaseGrant, mark: int = 0, known: int = 0, stream: str = "", counters_s: float = 0.0
) -> pb.LeaseGrant:
    """A grant as a message. `mark` names its list of ended incarnations, which is left out where the worker has named
    it (`known`). `counters_s`: seconds between two heartbeats with counters, 0: as the worker has it."""
    ended = () if mark and mark == known else grant.ended
    return pb.LeaseGrant(
        incarnation=grant.incarnation,
        lease_s=grant.lease_s,
        fenced=grant.fenced,
        drain=grant.drain,
        ended=[
            pb.EndedWorker(name=one.name, incarnation=one.incarnation, closed_from=one.closed_from) for one in ended
        ],
        ended_mark=mark,
        stream=stream,
        renew_s=grant.renew_s,
        counters_s=counters_s,
    )
