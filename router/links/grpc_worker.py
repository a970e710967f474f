"""The client of a worker between processes: `contracts.interfaces.discovery` by gRPC calls and a stream.

A client speaks to one incarnation of one worker. Every call carries that incarnation as metadata and the worker
refuses any other, so a restarted worker on the same address is never taken for its predecessor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from twinpool.contracts.cluster_secret import access_metadata, cluster_secret
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.proto import worker_pb2_grpc as pb_grpc
from twinpool.contracts.wire.grpc_channels import channel_options, reached
from twinpool.contracts.wire.secure_grpc import open_channel
from twinpool.contracts.wire.worker_protobuf import report_from_proto, status_from_proto
from twinpool.router.links.worker_links import WorkerStream, open_stream

INCARNATION_KEY = "twinpool-incarnation"
CONNECT_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 1.0
CHECK_TIMEOUT_S = 10.0
LINK_TIMEOUT_S = TransferConfig().link_timeout_s


class GrpcWorkerClient:
    """The client of one incarnation of one worker, at ``record.endpoint``.

    Calls raise `ConnectionError` when they fail or aren't answered in time.
    """

    def __init__(
        self,
        record: WorkerRecord,
        link_timeout_s: float = LINK_TIMEOUT_S,
        certificate: CertificateFiles | None = None,
    ) -> None:
        """`certificate`: this node's, None where calls go without TLS. Raises `ConfigError` where it can't be read."""
        self._record = record
        self._metadata = ((INCARNATION_KEY, str(record.incarnation)), *access_metadata(cluster_secret()))
        self._link_timeout_s, self._certificate = link_timeout_s, certificate
        self._tls = NodeTls(certificate) if certificate is not None else None
        self._open()

    def _open(self) -> None:
        self._stamp = self._certificate.stamp() if self._certificate is not None else ()
        self._channel = open_channel(self._record.endpoint, channel_options(self._link_timeout_s), self._certificate)
        self._stub: Any = pb_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]

    async def connect(
        self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[StreamEnd], None]
    ) -> WorkerStream:
        if self._certificate is not None and self._stamp != self._certificate.stamp():
            before = self._channel  # It would go on with the certificate of its start.
            self._open()
            await before.close(CONNECT_TIMEOUT_S)  # After the calls that are under way.
        return await open_stream(
            self._record, self._link_timeout_s, self._tls, on_events, on_closed, timeout_s=CONNECT_TIMEOUT_S
        )

    async def status(self) -> WorkerStatus:
        return status_from_proto(await self._ask(self._stub.Status, STATUS_TIMEOUT_S))

    async def check(self) -> CheckReport:
        return report_from_proto(await self._ask(self._stub.Check, CHECK_TIMEOUT_S))

    async def drain(self) -> WorkerStatus:
        return status_from_proto(await self._ask(self._stub.Drain, CONNECT_TIMEOUT_S))

    async def undrain(self) -> WorkerStatus:
        return status_from_proto(await self._ask(self._stub.Undrain, CONNECT_TIMEOUT_S))

    async def aclose(self) -> None:
        await self._channel.close(None)

    async def _ask(self, method: Any, timeout_s: float) -> Any:
        """Make one call; raises `ConnectionError`, with the reason, when it fails or isn't answered in `timeout_s`."""
        try:
            return await reached(method(pb.Empty(), timeout=timeout_s, metadata=self._metadata))
        except (ConnectionError, grpc.aio.UsageError) as error:  # The latter of one that is closed already.
            raise ConnectionError(f"{self._record.name}: {error}") from None
