"""The controller's table of workers, watched over gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio

from twinpool.contracts.cluster_secret import access_metadata, cluster_secret
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import ConfigError, RequestError, WireError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.interfaces.discovery import WorkerClient
from twinpool.contracts.messages.autoscaler_messages import AutoscalerView, LatencyCounts
from twinpool.contracts.messages.control_plane import ControlPlane
from twinpool.contracts.messages.pool_changes import ChangedWorkers, PoolChange
from twinpool.contracts.messages.quota import QuotaClaim, QuotaSlice
from twinpool.contracts.messages.request_record import FoundRecords, RequestRecord
from twinpool.contracts.messages.settings_change import SettingsAnswer, SettingsChange
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerView
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.proto import worker_pb2_grpc as pb_grpc
from twinpool.contracts.wire.autoscaler_protobuf import autoscaler_from_proto, counts_to_proto
from twinpool.contracts.wire.controller_turns import ControllerTurns, call_leader
from twinpool.contracts.wire.grpc_channels import channel_options, reached
from twinpool.contracts.wire.pool_change_protobuf import call_for
from twinpool.contracts.wire.quota_protobuf import claim_to_proto, slice_from_proto
from twinpool.contracts.wire.record_protobuf import record_from_proto, record_to_proto
from twinpool.contracts.wire.secure_grpc import open_channel
from twinpool.contracts.wire.settings_protobuf import answer_from_proto, change_to_proto
from twinpool.contracts.wire.unknown_kinds import known
from twinpool.contracts.wire.worker_protobuf import status_from_proto, view_from_proto
from twinpool.router.links.controller_dashboard import ControllerDashboard
from twinpool.router.links.grpc_worker import LINK_TIMEOUT_S, GrpcWorkerClient
from twinpool.router.state.router_log import log

COMMAND_TIMEOUT_S = 20.0
"""Seconds for an operator's call: a controller that has ended is started again, or another leads, within seconds, and
the command is then carried out instead of refused."""
FIND_TIMEOUT_S = 4.0
"""Seconds for the controller to look for a request, at other routers where need be."""
LEASE_TIMEOUT_S = 1.0
"""Seconds for which a request waits for its tenant's slice at most; then the controller counts as away."""


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
        self._certificate = certificate
        self._link_timeout_s = link_timeout_s
        self._listeners: list[Callable[[tuple[WorkerView, ...]], None]] = []
        self._views: tuple[WorkerView, ...] | None = None
        self._task: asyncio.Task[None] | None = None
        self._answer: Callable[[int, str], None] | None = None
        self._stub: Any = None
        """The controller, while its table is being watched."""

    @property
    def dashboard(self) -> ControllerDashboard:
        """The controller's dashboard, over the connection by which its table is watched."""
        return ControllerDashboard(lambda: self._stub)

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

    async def change_role(self, name: WorkerName, role: Role, *, empty: bool = False) -> None:
        """Have the controller drain a worker and start it in another role.

        Raises `RequestError` where the controller refuses, `ConnectionError` where it doesn't answer.
        """
        change = pb.RoleChange(name=name, role=role, empty=empty)
        await self._ask(lambda stub, **options: stub.ChangeRole(change, **options))

    async def drain(self, target: str, keep: Iterable[Role] = ()) -> tuple[WorkerName, ...]:
        order = pb.DrainTarget(name=target, keep=keep)
        answer = await self._ask(lambda stub, **options: stub.Drain(order, **options))
        return tuple(WorkerName(name) for name in answer.workers)

    async def undrain(self, target: str) -> tuple[WorkerName, ...]:
        answer = await self._ask(lambda stub, **options: stub.Undrain(pb.DrainTarget(name=target), **options))
        return tuple(WorkerName(name) for name in answer.workers)

    async def change_pools(self, change: PoolChange) -> ChangedWorkers:
        answer = await self._ask(lambda stub, **options: call_for(stub, change, **options))
        names, start, leave = (map(WorkerName, told) for told in (answer.workers, answer.start, answer.leave))
        return ChangedWorkers(tuple(names), frozenset(start), frozenset(leave))

    async def change_settings(self, change: SettingsChange) -> SettingsAnswer:
        answer = await self._ask(lambda stub, **options: stub.ChangeSettings(change_to_proto(change), **options))
        try:
            return answer_from_proto(answer)
        except ValueError as error:
            raise ConnectionError(f"an answer that can't be read: {error}") from None

    async def lease_quota(self, router: str, claims: Sequence[QuotaClaim]) -> list[QuotaSlice]:
        """Claim slices of tenants' limits for `router`; returns a slice for each claim, in order.

        Raises `ConnectionError` where the controller doesn't answer, at once where its table isn't being watched.
        """
        if self._stub is None:
            raise ConnectionError("the controller is away")
        request = pb.QuotaClaims(router=router, claims=map(claim_to_proto, claims))
        metadata = access_metadata(cluster_secret())
        try:
            answer = await reached(self._stub.LeaseQuota(request, timeout=LEASE_TIMEOUT_S, metadata=metadata))
            return [slice_from_proto(part) for part in answer.slices]
        except WireError as error:
            raise ConnectionError(f"an answer that can't be read: {error}") from None

    async def report_latency(self, router: str, counts: LatencyCounts) -> AutoscalerView:
        """Tell the autoscaler what `router` has counted since its start; returns what the autoscaler does.

        Raises `ConnectionError` where the controller doesn't answer, at once where its table isn't being watched.
        """
        if self._stub is None:
            raise ConnectionError("the controller is away")
        metadata = access_metadata(cluster_secret())
        try:
            report = counts_to_proto(router, counts)
            call = self._stub.ReportLatency(report, timeout=LEASE_TIMEOUT_S, metadata=metadata)
            return autoscaler_from_proto(await reached(call))
        except ValueError as error:
            raise ConnectionError(f"an answer that can't be read: {error}") from None

    async def report_records(
        self, router: str, records: Sequence[RequestRecord], answers: Sequence[tuple[int, Sequence[RequestRecord]]]
    ) -> None:
        """Tell the controller of `router`'s requests, and answer its questions. Raises as `report_latency` does."""
        report = pb.RecordReport(
            router=router,
            records=map(record_to_proto, records),
            answers=[pb.RecordAnswer(number=number, records=map(record_to_proto, found)) for number, found in answers],
        )
        await self._tell_leader(lambda stub, **options: stub.ReportRecords(report, **options), LEASE_TIMEOUT_S)

    async def find_records(self, request_id: str, recent: int = 0) -> FoundRecords:
        """What the controller and other routers know of a request; with an empty id the latest `recent` records. Raises
        as `report_latency` does."""
        query = pb.RecordQuery(request_id=request_id, recent=recent)
        found = await self._tell_leader(lambda stub, **options: stub.FindRecords(query, **options), FIND_TIMEOUT_S)
        try:
            records = known(record_from_proto, found.records)[0]
        except WireError as error:
            raise ConnectionError(f"an answer that can't be read: {error}") from None
        return FoundRecords(records, found.kept_s, found.asked, found.answered)

    def on_record_ask(self, answer: Callable[[int, str], None]) -> None:
        self._answer = answer

    async def _tell_leader(self, call: Callable[..., Any], timeout_s: float) -> Any:
        """Make one call of the controller whose table is being watched. Raises `ConnectionError`."""
        if self._stub is None:
            raise ConnectionError("the controller is away")
        return await reached(call(self._stub, timeout=timeout_s, metadata=access_metadata(cluster_secret())))

    def control_plane(self) -> ControlPlane | None:
        """The controllers as they were told last; None where none has told."""
        return self._told and self._told._replace(away=self._stub is None)

    def reachable(self) -> bool:
        """Return whether a controller tells of its workers now."""
        return self._stub is not None

    async def _ask(self, call: Callable[..., Any]) -> Any:
        """Make one call of the controller, on a connection of its own. Raises as `change_role` does."""
        metadata = access_metadata(cluster_secret())

        async def ask(channel: grpc.aio.Channel) -> Any:
            stub: Any = pb_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
            return await call(stub, timeout=COMMAND_TIMEOUT_S + 1.0, wait_for_ready=True, metadata=metadata)

        try:
            return await call_leader(self._controllers, self._channel, ask, COMMAND_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise RequestError(error.details() or "the controller refuses") from None
            raise ConnectionError(f"{error.code().name}: {error.details()}") from None
        except TimeoutError:
            raise ConnectionError(f"no controller of {self._controllers} answers") from None

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        return open_channel(endpoint, channel_options(self._link_timeout_s), self._certificate)

    def _tell(self, views: tuple[WorkerView, ...]) -> None:
        for listener in list(self._listeners):
            try:
                listener(views)
            except Exception:  # our own bug: the next table may mend it, and nobody else can
                log("view failed", level=logging.ERROR, trace=True)

    def _take(self, message: pb.ClusterView) -> None:
        """Take in the whole table, or what has changed in it."""
        views, others = known(view_from_proto, message.workers)
        if others:
            log("unknown roles", left_out=others)
        rows = {view.record.name: view for view in self._views or ()} if message.changes else {}
        rows.update({view.record.name: view for view in views})
        for status in known(status_from_proto, message.statuses)[0]:
            if (row := rows.get(status.name)) is not None:
                counters = row.status.counters if status.counters_left_out else status.counters
                fresh = replace(status, counters=counters, counters_left_out=False)
                rows[status.name] = replace(row, status=fresh)
        if message.HasField("control_plane"):
            plane = message.control_plane
            self._told = ControlPlane(plane.leader, plane.term, tuple(plane.standbys)) if plane.leader else None
        for ask in message.record_asks:
            if self._answer is not None:
                self._answer(ask.number, ask.request_id)
        if message.record_asks and message.changes and not (message.workers or message.statuses):
            return  # A question, and no news of workers.
        self._views = tuple(rows.values())
        self._tell(self._views)

    async def _follow(self) -> None:
        pause = self.RETRY_FIRST_S
        metadata = access_metadata(cluster_secret())
        # With certificates each try has a channel of its own, with the files as they are then.
        patient = self._certificate is None and not self._controllers.several
        while True:
            target = self._controllers.current
            try:
                async with self._channel(target) as channel:
                    stub: Any = pb_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
                    async for view in stub.Watch(
                        pb.WatchRequest(changes=True, records=self._answer is not None),
                        wait_for_ready=patient,
                        metadata=metadata,
                    ):
                        pause, self._stub = self.RETRY_FIRST_S, stub
                        self._take(view)
                reason = "the controller closed the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except (ConfigError, ValueError) as error:
                reason = f"a view or a certificate that can't be read: {error}"
            finally:
                self._stub = None
            log("controller lost", target=target, reason=reason)
            self._controllers.next(target)
            await asyncio.sleep(pause)
            pause = min(pause * 2, self.MAX_RETRY_S)
