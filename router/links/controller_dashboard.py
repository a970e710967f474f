"""The controller's dashboard over gRPC: its frames, its past, and what this router reports to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from twinpool.contracts.cluster_secret import access_metadata, cluster_secret
from twinpool.contracts.errors import WireError
from twinpool.contracts.messages.router_report import RouterReport
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.wire.grpc_channels import reached
from twinpool.contracts.wire.router_report_protobuf import router_report_from_proto, router_report_to_proto

CALL_S = 2.0
"""Seconds that a call waits for the controller."""


class ControllerDashboard:
    """Implements `router.service.dashboard_source.DashboardSource` over the connection to the controller."""

    def __init__(self, stub: Callable[[], Any]) -> None:
        """`stub` returns the controller's client, None while the controller is away."""
        self._stub = stub

    async def frames(self) -> AsyncIterator[bytes]:
        stream = self._there().WatchDashboard(pb.Empty(), metadata=access_metadata(cluster_secret()))
        frames = aiter(stream)
        try:
            while (frame := await reached(anext(frames, None))) is not None:
                yield frame.json
            raise ConnectionError("the controller closed the stream")
        finally:
            stream.cancel()

    async def past(self) -> bytes:
        call = self._there().DashboardPast(pb.Empty(), timeout=CALL_S, metadata=access_metadata(cluster_secret()))
        answer: pb.DashboardFrame = await reached(call)
        return answer.json

    async def routers(self) -> list[RouterReport]:
        call = self._there().Routers(pb.Empty(), timeout=CALL_S, metadata=access_metadata(cluster_secret()))
        answer: pb.RouterReports = await reached(call)
        try:
            return [router_report_from_proto(one) for one in answer.routers]
        except WireError as error:
            raise ConnectionError(f"the controller's routers make no sense: {error}") from None

    async def report(self, report: RouterReport) -> float:
        call = self._there().ReportRouter(
            router_report_to_proto(report), timeout=CALL_S, metadata=access_metadata(cluster_secret())
        )
        answer: pb.RouterReportAnswer = await reached(call)
        return answer.next_s

    def _there(self) -> Any:
        stub = self._stub()
        if stub is None:
            raise ConnectionError("the controller is away")
        return stub
