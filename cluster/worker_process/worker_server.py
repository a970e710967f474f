"""Everything by which routers reach a worker: its gRPC service for calls, and its streams for requests."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.cluster.worker_process.asyncio_thread import AsyncioThread
from twinpool.cluster.worker_process.grpc_service import LINK_TIMEOUT_S, ServiceServer, WorkerService
from twinpool.cluster.worker_process.router_streams import RouterStreams
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.proto import worker_pb2_grpc as pb_grpc

START_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerServer:
    """The servers of one worker, and their addresses."""

    loop: AsyncioThread
    calls: ServiceServer
    streams: RouterStreams
    endpoint: str
    """``host:port`` of the gRPC service."""
    stream: str
    """``host:port`` of the streams."""

    def stop(self, grace_s: float) -> None:
        """Let streams flush for `grace_s`, and calls end in as much, then end them. Idempotent."""
        self.loop.run(self.streams.stop(grace_s), grace_s + 2.0)
        self.calls.stop(grace_s)


def serve_worker(
    loop: AsyncioThread,
    host: WorkerThread,
    incarnation: int,
    address: str,
    secret: str = "",
    link_timeout_s: float = LINK_TIMEOUT_S,
    certificate: CertificateFiles | None = None,
) -> WorkerServer:
    """Serve the worker thread `host` on free ports of `address`.

    Raises `OSError` when it can't be bound, `ConfigError` when the certificate can't be used.
    """
    streams = RouterStreams(host, incarnation, secret, link_timeout_s, certificate)
    stream = f"{address}:{loop.run(streams.start(address), START_S)}"
    calls = ServiceServer(loop, f"{address}:0", secret, link_timeout_s, certificate=certificate)
    port = calls.start(pb_grpc.add_WorkerServicer_to_server, WorkerService(host, incarnation))
    return WorkerServer(loop, calls, streams, f"{address}:{port}", stream)
