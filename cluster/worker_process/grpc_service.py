"""The worker's gRPC service, by which routers ask for its status and drain it; requests come by `router_streams`.

The service runs on its own event loop, beside the engine thread. Every call may carry `twinpool-incarnation` in its
metadata; a call for another incarnation of this worker is refused with both numbers, so that no client survives a
restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import grpc.aio

from twinpool.cluster.worker_process.asyncio_thread import AsyncioThread
from twinpool.cluster.worker_process.worker_thread import WorkerClosed, WorkerThread
from twinpool.contracts.cluster_secret import admits
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.messages.worker_status import WorkerStatus
from twinpool.contracts.proto import worker_pb2 as pb
from twinpool.contracts.proto import worker_pb2_grpc as pb_grpc
from twinpool.contracts.wire.grpc_channels import server_options
from twinpool.contracts.wire.secure_grpc import add_port
from twinpool.contracts.wire.worker_protobuf import report_to_proto, status_to_proto

log = logging.getLogger("twinpool.service")

INCARNATION_KEY = "twinpool-incarnation"
CALL_TIMEOUT_S = 30.0
LINK_TIMEOUT_S = TransferConfig().link_timeout_s

# grpc.aio's own types are generic in ways its stubs and its runtime disagree on.
Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(pb_grpc.WorkerServicer):
    """The gRPC service `Worker` over one worker thread."""

    def __init__(self, host: WorkerThread, incarnation: int) -> None:
        self._host = host
        self._incarnation = incarnation

    async def Status(self, request: pb.Empty, context: Context) -> pb.WorkerStatus:
        return status_to_proto(await self._call(context, self._host.status))

    async def Check(self, request: pb.Empty, context: Context) -> pb.CheckReport:
        return report_to_proto(await self._call(context, self._host.check))

    async def Drain(self, request: pb.Empty, context: Context) -> pb.WorkerStatus:
        status: WorkerStatus = await self._call(context, self._host.drain)
        return status_to_proto(status)

    async def Undrain(self, request: pb.Empty, context: Context) -> pb.WorkerStatus:
        status: WorkerStatus = await self._call(context, self._host.undrain)
        return status_to_proto(status)

    async def _call(self, context: Context, submit: Any) -> Any:
        await self._check_incarnation(context)
        future: Future[Any] = submit()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), CALL_TIMEOUT_S)
        except WorkerClosed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the worker did not answer in {CALL_TIMEOUT_S} s")
        except TwinpoolError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def _check_incarnation(self, context: Context) -> None:
        for key, value in context.invocation_metadata() or ():
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            if key == INCARNATION_KEY and text != str(self._incarnation):
                text = f"this is incarnation {self._incarnation}, the call is for incarnation {text}"
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)


class _TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the cluster's token as UNAUTHENTICATED."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_service(self, continuation: Any, call: Any) -> Any:
        if admits(self._secret, call.invocation_metadata or ()):
            return await continuation(call)
        log.warning("a call without the cluster's token was refused", extra={"method": call.method})
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(requests: Any, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this call lacks the cluster's token")


class ServiceServer:
    """A gRPC server with one servicer on a loop thread."""

    def __init__(
        self,
        loop: AsyncioThread,
        bind: str,
        secret: str = "",
        link_timeout_s: float = LINK_TIMEOUT_S,
        certificate: CertificateFiles | None = None,
        interceptors: Sequence[Any] = (),
    ) -> None:
        """`bind`: ``host:port``, port 0 for a free one. With a `secret`, calls must carry its token
        (`contracts.cluster_secret`). A client that is silent for `link_timeout_s` counts as gone. `certificate`: this
        node's; with it only nodes of the cluster are served, None: without TLS. `interceptors` are asked about each
        call that has passed."""
        self._certificate = certificate
        self._interceptors = interceptors
        self._link_timeout_s = link_timeout_s
        self._loop = loop
        self._bind = bind
        self._secret = secret
        self._server: grpc.aio.Server | None = None

    def start(self, add: Any, servicer: Any, timeout_s: float = 10.0) -> int:
        """Serve `servicer` (added by its generated `add_..._to_server`); returns the port that was bound.

        Raises `OSError` when the address can't be bound, `ConfigError` when the certificate can't be read.
        """
        return self._loop.run(self._start(add, servicer), timeout_s)

    async def _start(self, add: Any, servicer: Any) -> int:
        doorkeepers = [_TokenInterceptor(self._secret)] if self._secret else []
        options = server_options(self._link_timeout_s)
        server = grpc.aio.server(options=options, interceptors=[*doorkeepers, *self._interceptors])
        add(servicer, server)
        try:
            port = add_port(server, self._bind, self._certificate)
        except RuntimeError as error:
            raise OSError(f"cannot bind {self._bind}: {error}") from None
        await server.start()
        self._server = server
        return port

    def stop(self, grace_s: float) -> None:
        """Let open streams flush for `grace_s`, then end them. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            self._loop.run(_stop(server, grace_s), grace_s + 2.0)


async def _stop(server: grpc.aio.Server, grace_s: float) -> None:
    await server.stop(grace_s)
