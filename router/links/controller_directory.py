"""The controller over gRPC: its table of workers, watched; its dashboard; what this router asks and tells it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from msgspec.structs import replace

from twinpool.contracts.cluster_secret import cluster_secret
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import ConfigError, RequestError
from twinpool.contracts.json_logs import log
from twinpool.contracts.messages.calls import (
    CHANGE_POOLS,
    CHANGE_SETTINGS,
    DASHBOARD_PAST,
    FIND_RECORDS,
    LEASE_QUOTA,
    LIST_ROUTERS,
    REPORT_LATENCY,
    REPORT_RECORDS,
    REPORT_ROUTER,
    WATCH,
    WATCH_DASHBOARD,
    Call,
    Empty,
)
from twinpool.contracts.messages.cluster_view import ClusterView, ControlPlane, ServedWeights, WatchRequest
from twinpool.contracts.messages.leases import QuotaClaim, QuotaClaims, QuotaSlice
from twinpool.contracts.messages.pool_changes import (
    ChangedWorkers,
    OperatorChange,
    SettingsAnswer,
    SettingsChange,
)
from twinpool.contracts.messages.request_record import (
    FoundRecords,
    RecordAnswer,
    RecordQuery,
    RecordReport,
    RequestRecord,
)
from twinpool.contracts.messages.router_report import AutoscalerView, LatencyCounts, LatencyReport, RouterReport
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerView
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.contracts.wire.controller_turns import ControllerTurns, call_leader
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed
from twinpool.router.links.controller_port import WorkerClient
from twinpool.router.links.worker_links import LINK_TIMEOUT_S, GrpcWorkerClient

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
COMMAND_TIMEOUT_S = 20.0
"""Seconds for an operator's call: a controller that has ended is started again, or another leads, within seconds, and
the command is then carried out instead of refused."""
FIND_TIMEOUT_S = 4.0
"""Seconds for the controller to look for a request, at other routers where need be."""
LEASE_TIMEOUT_S = 1.0
"""Seconds for which a request waits for its tenant's slice at most; then the controller counts as away."""
DASHBOARD_TIMEOUT_S = 2.0
"""Seconds that a call about the dashboard waits for the controller."""


class ControllerDashboard:
    """Implements `router.links.controller_port.DashboardSource` over the connection to the controller."""

    def __init__(self, leader: Callable[[], CallChannel]) -> None:
        """`leader` returns the connection to the controller, and raises `ConnectionError` while it is away."""
        self._leader = leader

    async def frames(self) -> AsyncIterator[bytes]:
        async with aclosing(self._leader().subscribe(WATCH_DASHBOARD, Empty())) as frames:
            async for frame in frames:
                yield frame.json
        raise ConnectionError("the controller closed the stream")

    async def past(self) -> bytes:
        return (await self._leader().call(DASHBOARD_PAST, Empty(), DASHBOARD_TIMEOUT_S)).json

    async def routers(self) -> list[RouterReport]:
        return list((await self._leader().call(LIST_ROUTERS, Empty(), DASHBOARD_TIMEOUT_S)).routers)

    async def report(self, report: RouterReport) -> float:
        return (await self._leader().call(REPORT_ROUTER, report, DASHBOARD_TIMEOUT_S)).next_s


class ControllerDirectory:
    """The controller's table over its `Watch` stream, which is opened again whenever it breaks.

    While the controller is away the last table stands: a worker isn't gone because nobody reports it, and its own
    stream tells when it is.
    """

    RETRY_FIRST_S = 0.05
    MAX_RETRY_S = 1.0

    def __init__(
        self, target: str, link_timeout_s: float = LINK_TIMEOUT_S, certificate: CertificateFiles | None = None
    ) -> None:
        """`target`: where the controller is, ``host:port``, or all controllers with commas. `link_timeout_s`: seconds
        of silence after which a connection counts as cut (`transfer.link_timeout_s`). `certificate`: this node's, None
        where calls go without TLS."""
        self._controllers = ControllerTurns(target)
        self._told: ControlPlane | None = None
        self.adapters: tuple[AdapterRef, ...] = ()
        self.serving = ServedWeights()
        self._certificate = certificate
        self._link_timeout_s = link_timeout_s
        self._listeners: list[Callable[[tuple[WorkerView, ...]], None]] = []
        self._views: tuple[WorkerView, ...] | None = None
        self._task: asyncio.Task[None] | None = None
        self._answer: Callable[[int, str], None] | None = None
        self._watched: CallChannel | None = None
        """The connection to the controller, while its table is being watched."""

    @property
    def dashboard(self) -> ControllerDashboard:
        """The controller's dashboard, over the connection by which its table is watched."""
        return ControllerDashboard(self._leader)

    def watch(self, on_change: Callable[[tuple[WorkerView, ...]], None]) -> Callable[[], None]:
        self._listeners.append(on_change)
        if self._views is not None:
            on_change(self._views)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

        def unwatch() -> None:
            if on_change in self._listeners:
                self._listeners.remove(on_change)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

        return unwatch

    def port(self, record: WorkerRecord) -> WorkerClient:
        return GrpcWorkerClient(record, self._link_timeout_s, self._certificate)

    async def change_pools(self, change: OperatorChange) -> ChangedWorkers:
        return await self._operate(CHANGE_POOLS, change)

    async def change_settings(self, change: SettingsChange) -> SettingsAnswer:
        return await self._operate(CHANGE_SETTINGS, change)

    async def lease_quota(self, router: str, claims: Sequence[QuotaClaim]) -> list[QuotaSlice]:
        """Claim slices of tenants' limits for `router`; returns a slice for each claim, in order.

        Raises `ConnectionError` where the controller doesn't answer, at once where its table isn't being watched.
        """
        answer = await self._leader().call(LEASE_QUOTA, QuotaClaims(router, tuple(claims)), LEASE_TIMEOUT_S)
        return list(answer.slices)

    async def report_latency(self, router: str, counts: LatencyCounts) -> AutoscalerView:
        """Tell the autoscaler what `router` has counted since its start; returns what the autoscaler does. Raises as
        `lease_quota` does."""
        return await self._leader().call(REPORT_LATENCY, LatencyReport(router, counts), LEASE_TIMEOUT_S)

    async def report_records(
        self, router: str, records: Sequence[RequestRecord], answers: Sequence[tuple[int, Sequence[RequestRecord]]]
    ) -> None:
        """Tell the controller of `router`'s requests, and answer its questions. Raises as `lease_quota` does."""
        answered = tuple(RecordAnswer(number, tuple(found)) for number, found in answers)
        await self._leader().call(REPORT_RECORDS, RecordReport(router, tuple(records), answered), LEASE_TIMEOUT_S)

    async def find_records(self, request_id: str, recent: int = 0) -> FoundRecords:
        """What the controller and other routers know of a request; with an empty id the latest `recent` records. Raises
        as `lease_quota` does."""
        return await self._leader().call(FIND_RECORDS, RecordQuery(request_id, recent), FIND_TIMEOUT_S)

    def on_record_ask(self, answer: Callable[[int, str], None]) -> None:
        self._answer = answer

    def _leader(self) -> CallChannel:
        """The connection to the controller whose table is being watched. Raises `ConnectionError`."""
        if self._watched is None:
            raise ConnectionError("the controller is away")
        return self._watched

    def control_plane(self) -> ControlPlane | None:
        """The controllers as they were told last; None where none has told."""
        return self._told and replace(self._told, away=self._watched is None)

    def reachable(self) -> bool:
        """Return whether a controller tells of its workers now."""
        return self._watched is not None

    async def _operate(self, call: Call[RequestT, AnswerT], request: RequestT) -> AnswerT:
        """Make an operator's call of the controller, on a connection of its own. Raises `RequestError` where it is
        refused, `ConnectionError` where no controller answers."""
        timeout_s = COMMAND_TIMEOUT_S + 1.0
        try:
            return await call_leader(
                self._controllers,
                self._channel,
                lambda channel: channel.call(call, request, timeout_s, wait=True),
                COMMAND_TIMEOUT_S,
            )
        except CallFailed as error:
            if error.refused:
                raise RequestError(error.reason or "the controller refuses") from None
            raise
        except TimeoutError:
            raise ConnectionError(f"no controller of {self._controllers} answers") from None

    def _channel(self, endpoint: str) -> CallChannel:
        return CallChannel(endpoint, cluster_secret(), self._certificate, silence_s=self._link_timeout_s)

    def _tell(self, views: tuple[WorkerView, ...]) -> None:
        for listener in list(self._listeners):
            try:
                listener(views)
            except Exception:  # our own bug: the next table may mend it, and nobody else can
                log("view failed", level=logging.ERROR, trace=True)

    def _take(self, message: ClusterView) -> None:
        """Take in the whole table, or what has changed in it."""
        rows = {view.record.name: view for view in self._views or ()} if message.changes else {}
        rows.update({view.record.name: view for view in message.workers})
        for status in message.statuses:
            if (row := rows.get(status.name)) is not None:
                counters = row.status.counters if status.counters_left_out else status.counters
                fresh = replace(status, counters=counters, counters_left_out=False)
                rows[status.name] = replace(row, status=fresh)
        if message.control_plane is not None:
            self._told = message.control_plane if message.control_plane.leader else None
        if message.adapters is not None:
            self.adapters = message.adapters
        if message.served is not None:
            self.serving = message.served
        for ask in message.record_asks:
            if self._answer is not None:
                self._answer(ask.number, ask.request_id)
        if message.record_asks and message.changes and not (message.workers or message.statuses):
            return  # A question, and no news of workers.
        self._views = tuple(rows.values())
        self._tell(self._views)

    async def _follow(self) -> None:
        pause = self.RETRY_FIRST_S
        # With certificates each try has a channel of its own, with the files as they are then.
        patient = self._certificate is None and not self._controllers.several
        while True:
            target = self._controllers.current
            try:
                async with self._channel(target) as channel:
                    asked = WatchRequest(changes=True, records=self._answer is not None)
                    async with aclosing(channel.subscribe(WATCH, asked, wait=patient)) as views:
                        async for view in views:
                            pause, self._watched = self.RETRY_FIRST_S, channel
                            self._take(view)
                reason = "the controller closed the stream"
            except CallFailed as error:
                reason = str(error)
            except (ConfigError, ValueError) as error:
                reason = f"a certificate or an address that can't be used: {error}"
            finally:
                self._watched = None
            log("controller lost", target=target, reason=reason)
            self._controllers.next(target)
            await asyncio.sleep(pause)
            pause = min(pause * 2, self.MAX_RETRY_S)
