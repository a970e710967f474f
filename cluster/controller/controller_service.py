"""The controller's gRPC service: its calls for workers, operators and routers, and its stream with the supervisor.

The controller belongs to one event loop, and handlers run there. A watcher gets the whole table at once and again after
each change; changes that come faster than it reads are folded into one. The supervisor has one stream: what it reports
goes in, what the controller decides goes out, and when it breaks the next one begins with all processes that there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import grpc
from msgspec.structs import replace

from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import SUPERVISE, SupervisorOrders, SupervisorReport
from twinpool.cluster.controller.controller_streams import SettingsOrders, SupervisorLine, WatcherLine
from twinpool.cluster.controller.dashboard_feed import RecordBoard, TooManyAsks, TooManyWatch, dashboard_of
from twinpool.cluster.controller.leadership import LedgerLost
from twinpool.cluster.controller.quota_ledger import SAVE_S, QuotaLedger
from twinpool.cluster.dashboard.cluster_frames import EventKind
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.errors import ConfigError, WireError
from twinpool.contracts.messages.calls import (
    CHANGE_POOLS,
    CHANGE_SETTINGS,
    DASHBOARD_PAST,
    FIND_RECORDS,
    LEASE_QUOTA,
    LEAVE,
    LIST_ROUTERS,
    REGISTER,
    RENEW,
    REPORT_LATENCY,
    REPORT_RECORDS,
    REPORT_ROUTER,
    SHUT_DOWN,
    WATCH,
    WATCH_DASHBOARD,
    Empty,
)
from twinpool.contracts.messages.cluster_view import ClusterView, ControlPlane, RecordAsk, WatchRequest
from twinpool.contracts.messages.leases import Departure, DepartureAnswer, LeaseGrant, QuotaClaims, QuotaSlices, Renewal
from twinpool.contracts.messages.pool_changes import (
    AddWorkers,
    ChangedWorkers,
    OperatorChange,
    ScalePools,
    SetRole,
    SettingsAnswer,
    SettingsChange,
    UndrainWorkers,
)
from twinpool.contracts.messages.request_record import MAX_RECORD_BYTES, FoundRecords, RecordQuery, RecordReport
from twinpool.contracts.messages.router_report import (
    AutoscalerView,
    DashboardFrame,
    LatencyReport,
    RouterReport,
    RouterReportAnswer,
    RouterReportList,
    checked,
)
from twinpool.contracts.messages.worker_status import EndedWorker, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.contracts.wire.controller_turns import NOT_LEADING
from twinpool.contracts.wire.grpc_calls import CallRefused, Handler, handle_call, handle_exchange, handle_subscription
from twinpool.contracts.wire.message_codec import encode

log = logging.getLogger("twinpool.controller")

FOLD_S = 0.02
"""Seconds within which changes reach a watcher as one."""
FOLD_WORKER_S = 0.0005
"""Seconds that each worker of the table adds to `FOLD_S`."""
MAX_WATCHERS = 256
"""Routers that watch at once."""
MAX_CHANGES = 16
"""Messages that may wait for a watcher, before the whole table takes their place."""


class ControllerService:
    """The `Controller` service over one controller; every method runs on its loop."""

    def __init__(
        self, core: Controller, autoscaler: Autoscaler | None = None, leads: Callable[[], bool] = lambda: True
    ) -> None:
        """`leads`: whether this controller may grant and decide anything now (`cluster.controller.leadership`)."""
        self._core, self._autoscaler, self._leads = core, autoscaler, leads
        self._control_plane = ControlPlane("", 0, ())
        """Who leads, and who stands by, as routers are told."""
        self._clock = SystemClock()
        self._quotas, self._quotas_at = QuotaLedger(self._clock, core.table.quotas), 0.0
        self._watchers: set[WatcherLine] = set()
        self._publishing: asyncio.TimerHandle | None = None
        self._published = 0
        """The table's version up to which watchers have been told."""
        self._told: tuple[int, ClusterView] | None = None
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
        self._dashboard = dashboard_of(core, autoscaler, lambda: self._control_plane, self.records, self._clock)
        core.on_change(self._wake)

    def handlers(self) -> list[Handler]:
        return [
            handle_call(REGISTER, self.register),
            handle_call(RENEW, self.renew),
            handle_call(LEAVE, self.leave),
            handle_call(CHANGE_POOLS, self.change_pools),
            handle_call(CHANGE_SETTINGS, self.change_settings),
            handle_call(SHUT_DOWN, self.shut_down),
            handle_exchange(SUPERVISE, self.supervise),
            handle_subscription(WATCH, self.watch),
            handle_call(LEASE_QUOTA, self.lease_quota),
            handle_call(REPORT_LATENCY, self.report_latency),
            handle_call(REPORT_RECORDS, self.report_records),
            handle_call(FIND_RECORDS, self.find_records),
            handle_call(REPORT_ROUTER, self.report_router),
            handle_call(LIST_ROUTERS, self.routers),
            handle_subscription(WATCH_DASHBOARD, self.watch_dashboard),
            handle_call(DASHBOARD_PAST, self.dashboard_past),
        ]

    # ------------------------------------------------------------ workers

    async def register(self, record: WorkerRecord) -> LeaseGrant:
        return self._grant(self._core.register(record))

    async def renew(self, renewal: Renewal) -> LeaseGrant:
        try:
            return self.renewal(renewal)
        except WireError as error:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from None

    async def leave(self, departure: Departure) -> DepartureAnswer:
        goes_on = self._core.leave(departure.name, departure.incarnation, closed=departure.closed)
        self.tick()  # A process that waits for its plan gets it at once.
        return DepartureAnswer(goes_on, sleeps=goes_on and bool(self._core.table.served.asleep))

    # ------------------------------------------------------------ operators

    async def change_pools(self, change: OperatorChange) -> ChangedWorkers:
        """Make one operator's change; what the controller refuses is refused with its words."""
        try:
            workers, done = self._core.pools.make(change)
        except (ConfigError, ValueError) as error:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        start = frozenset(name for name in workers if self._core.table.rows[name].stays)
        self.tick()
        if done:
            self._note(done, holds=isinstance(change, AddWorkers | ScalePools | UndrainWorkers | SetRole))
        return ChangedWorkers(workers, start, frozenset(workers) - start, self._core.table.served.tried)

    def _note(self, done: str, *, holds: bool) -> None:
        """Have what an operator has done seen. `holds`: the autoscaler leaves the pools alone after it."""
        self._dashboard.frames.log.add(time.time(), EventKind.OPERATOR, done)
        if holds and self._autoscaler is not None:
            self._autoscaler.hold(done)

    async def change_settings(self, change: SettingsChange) -> SettingsAnswer:
        try:
            return await self._settings.change(change)
        except ConfigError as error:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None

    async def shut_down(self, request: Empty) -> Empty:
        self._core.shut_down()
        return Empty()

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
                self._supervisor.send(actions)

    @staticmethod
    def _tick_autoscaler(autoscaler: Autoscaler) -> None:
        try:
            autoscaler.tick()
        except (OSError, LedgerLost):
            raise
        except Exception:  # Our own bug; leases and restarts go on without it.
            log.exception("the autoscaler failed")

    async def supervise(self, reports: AsyncIterator[SupervisorReport]) -> AsyncGenerator[SupervisorOrders]:
        line = SupervisorLine()
        reading = asyncio.create_task(self._hear(reports, line))
        try:
            while orders := await line.next():
                yield SupervisorOrders(tuple(orders))
        finally:
            reading.cancel()
            if self._supervisor is line:
                self._supervisor = None
                self._settings.lost()
                self._core.detach()
        if not reading.cancelled() and line.ended:
            raise CallRefused(grpc.StatusCode.ABORTED, line.ended)

    async def _hear(self, reports: AsyncIterator[SupervisorReport], line: SupervisorLine) -> None:
        """Take in a supervisor's reports until its stream ends. Its first one makes it the one that is obeyed."""
        reason = "the supervisor has ended its stream"
        try:
            async for report in reports:
                if self._supervisor is not line:
                    if line.ended:
                        return
                    self._obey(report, line)
                if report.room is not None:
                    self._core.set_room(report.room)
                self._core.set_nodes(report.nodes or self._core.table.nodes.places)
                for ended in report.ended:
                    self._core.died(ended.name, ended.incarnation, ended.reason)
                for placed in report.placed:
                    self._core.placed(placed.name, placed.incarnation, placed.node, placed.others)
                self._settings.take(report.settings)
                self.tick()
        except (OSError, LedgerLost) as error:
            reason = str(error)
        except CallRefused as error:
            reason = f"a report that can't be read: {error}"
        line.end(reason)

    def _obey(self, report: SupervisorReport, line: SupervisorLine) -> None:
        if self._supervisor is not None:
            self._supervisor.end("another supervisor has come")
            self._settings.lost()
        self._supervisor = line
        self._settings.come(lambda change: line.send([change]))
        self._core.attach(report.running, report.ended)

    # ------------------------------------------------------------ routers

    async def lease_quota(self, claims: QuotaClaims) -> QuotaSlices:
        return QuotaSlices(tuple(self._quotas.lease(claims.router, claim) for claim in claims.claims))

    async def report_latency(self, report: LatencyReport) -> AutoscalerView:
        if self._autoscaler is None:
            return AutoscalerView()
        self._autoscaler.report(report.router, report.counts)
        return self._autoscaler.view()

    async def report_records(self, report: RecordReport) -> Empty:
        answered = [record for answer in report.answers for record in answer.records]
        if any(len(encode(record)) > MAX_RECORD_BYTES for record in (*report.records, *answered)):
            text = f"a request record has at most {MAX_RECORD_BYTES} bytes"
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, text)
        self.records.take(report.records, [(answer.number, answer.records) for answer in report.answers])
        return Empty()

    async def find_records(self, query: RecordQuery) -> FoundRecords:
        board = self.records
        if not query.request_id:
            return FoundRecords(tuple(board.recent(query.recent)), board.kept_s)
        try:
            found = await board.find(query.request_id, self._ask_routers)
        except TooManyAsks as error:
            raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        return FoundRecords(tuple(found.records), board.kept_s, found.asked, found.answered)

    def _ask_routers(self, number: int, request_id: str) -> int:
        """Ask all routers that answer for the records of a request; returns how many these are."""
        ask = RecordAsk(number, request_id)
        # One that doesn't read counts as one that has no records: questions for it would wait for ever.
        lines = [line for line in self._watchers if line.answers and len(line.changes) <= MAX_CHANGES]
        for line in lines:
            line.changes.append(ClusterView(self._published, changes=True, record_asks=(ask,)))
            line.more.set()
        return len(lines)

    async def report_router(self, report: RouterReport) -> RouterReportAnswer:
        try:
            return RouterReportAnswer(self._dashboard.report(checked(report)))
        except WireError as error:
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    async def routers(self, request: Empty) -> RouterReportList:
        return RouterReportList(tuple(self._dashboard.routers()))

    async def watch_dashboard(self, request: Empty) -> AsyncGenerator[DashboardFrame]:
        try:
            async with aclosing(self._dashboard.watch()) as frames:
                async for frame in frames:
                    yield DashboardFrame(frame)
        except TooManyWatch as error:
            raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None

    async def dashboard_past(self, request: Empty) -> DashboardFrame:
        return DashboardFrame(self._dashboard.past())

    async def watch(self, request: WatchRequest) -> AsyncGenerator[ClusterView]:
        if len(self._watchers) >= MAX_WATCHERS:
            raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} routers watch already")
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
        told = ControlPlane(leader, term, standbys)
        if told != self._control_plane:
            self._control_plane = told
            self._core.table.changed()

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

    def view(self) -> ClusterView:
        """The whole table as a message, built once for each version."""
        if self._told is not None and self._told[0] == self._core.version:
            return self._told[1]
        workers = tuple(self._core.views())
        version, self._rows = self._core.version, len(workers)
        view = ClusterView(
            version,
            workers,
            self._core.shutting_down,
            control_plane=self._control_plane,
            adapters=self._adapters,
            served=self._core.weights.told(),
        )
        self._told = version, view
        return view

    def changes(self, since: int) -> ClusterView:
        """What has changed in the table after version `since`, as a message."""
        changes = self._core.changes(since)
        return ClusterView(
            self._core.version,
            tuple(change.view for change in changes if change.whole),
            self._core.shutting_down,
            changes=True,
            statuses=tuple(_numbers(change.view, change.counters) for change in changes if not change.whole),
            control_plane=self._control_plane,
            adapters=self._adapters if self._core.table.adapters_at > since else None,
            served=self._core.weights.told(),
        )

    @property
    def _adapters(self) -> tuple[AdapterRef, ...]:
        return tuple(self._core.table.adapters.values())

    def renewal(self, renewal: Renewal) -> LeaseGrant:
        """Answer a renewal. Raises `WireError` where this controller doesn't lead: the stream ends with that, and the
        worker tries the next controller."""
        if not self._leads():
            raise WireError(NOT_LEADING)
        grant = self._core.renew(renewal.name, renewal.incarnation, renewal.status)
        return self._grant(grant, renewal.ended_mark)

    def _grant(self, grant: LeaseGrant, known: int = 0) -> LeaseGrant:
        """A grant with where renewals may go, how often they have counters, and the mark of its list of ended
        incarnations. The list is left out where the worker has it: where its mark is `known`."""
        if grant.ended != self._ended[0]:
            self._ended = grant.ended, _mark(grant.ended)
        mark = self._ended[1]
        ended = () if mark == known else grant.ended
        counters_s = self._dashboard.counters_s
        return replace(grant, ended=ended, ended_mark=mark, stream=self.stream, counters_s=counters_s)


def _numbers(view: WorkerView, counters: bool) -> WorkerStatus:
    status = view.status
    return status if counters else replace(status, counters={}, counters_left_out=True)


def _mark(ended: tuple[EndedWorker, ...]) -> int:
    """A number that names a list of ended incarnations, the same for every controller; 0 is none."""
    text = "\n".join(sorted(f"{one.name} {one.incarnation} {one.closed_from}" for one in ended))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") or 1
