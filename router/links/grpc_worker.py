"""The client of a worker between processes: `contracts.interfaces.discovery` by gRPC calls and a stream.

A client speaks to one incarnation of one worker. Every call carries that incarnation as metadata and the worker
refuses any other, so a restarted worker on the same address is never taken for its predecessor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from twinpool.contracts.cluster_secret import cluster_secret
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.messages.calls import (
    CHECK_WORKER,
    DRAIN_WORKER,
    UNDRAIN_WORKER,
    WORKER_STATUS,
    Call,
    Empty,
)
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord, WorkerStatus
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed
from twinpool.router.links.worker_links import WorkerStream, open_stream

INCARNATION_KEY = "twinpool-incarnation"
CONNECT_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 1.0
CHECK_TIMEOUT_S = 10.0
LINK_TIMEOUT_S = TransferConfig().link_timeout_s
AnswerT = TypeVar("AnswerT")


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
        self._link_timeout_s, self._certificate = link_timeout_s, certificate
        self._tls = NodeTls(certificate) if certificate is not None else None
        self._open()

    def _open(self) -> None:
        self._stamp = self._certificate.stamp() if self._certificate is not None else ()
        self._channel = CallChannel(
            self._record.endpoint,
            cluster_secret(),
            self._certificate,
            silence_s=self._link_timeout_s,
            metadata=((INCARNATION_KEY, str(self._record.incarnation)),),
        )

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
        return await self._ask(WORKER_STATUS, STATUS_TIMEOUT_S)

    async def check(self) -> CheckReport:
        return await self._ask(CHECK_WORKER, CHECK_TIMEOUT_S)

    async def drain(self) -> WorkerStatus:
        return await self._ask(DRAIN_WORKER, CONNECT_TIMEOUT_S)

    async def undrain(self) -> WorkerStatus:
        return await self._ask(UNDRAIN_WORKER, CONNECT_TIMEOUT_S)

    async def aclose(self) -> None:
        await self._channel.close()

    async def _ask(self, call: Call[Empty, AnswerT], timeout_s: float) -> AnswerT:
        """Make one call; raises `ConnectionError`, with the reason, when it fails or isn't answered in `timeout_s`."""
        try:
            return await self._channel.call(call, Empty(), timeout_s)
        except CallFailed as error:
            raise ConnectionError(f"{self._record.name}: {error}") from None
