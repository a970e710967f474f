"""The worker's gRPC service: one multiplexed stream for each router, one frame for each step with events.

The service runs on its own event loop, beside the engine thread. Events cross over by `call_soon_threadsafe` and wait
in an outbox for gRPC's flow control. The outbox is bounded by bytes: a router that reads slower than its worker writes
is cut off (and its requests are cancelled), so that it can't fill this process's memory.

Every call may carry `twinpool-incarnation` in its metadata; a call for another incarnation of this worker is refused
with both numbers, so that no client survives a restart. A stream that ends for any reason drops its session at the
worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import grpc.aio

from cluster.worker_process.asyncio_thread import AsyncioThread
from cluster.worker_process.worker_thread import WorkerClosed, WorkerThread
from contracts.cluster_secret import admits
from contracts.config.worker_config import TransferConfig
from contracts.credentials.certificate_files import CertificateFiles
from contracts.errors import TwinpoolError, WireError
from contracts.messages.worker_events import Event
from contracts.messages.worker_status import WorkerStatus
from contracts.proto import worker_pb2 as pb
from contracts.proto import worker_pb2_grpc as pb_grpc
from contracts.wire.command_protobuf import command_from_proto
from contracts.wire.event_protobuf import event_to_proto
from contracts.wire.grpc_channels import COMMANDS_BYTES, EVENTS_BYTES, server_options
from contracts.wire.secure_grpc import add_port
from contracts.wire.unknown_kinds import known
from contracts.wire.worker_protobuf import report_to_proto, status_to_proto

log = logging.getLogger("twinpool.service")

INCARNATION_KEY = "twinpool-incarnation"
OUTBOX_BYTES = 16 * 1024 * 1024
MOST_SESSIONS = 256
"""The most routers that a worker serves at once; another one is refused with RESOURCE_EXHAUSTED."""
CALL_TIMEOUT_S = 30.0
LINK_TIMEOUT_S = TransferConfig().link_timeout_s

# grpc.aio's own types are generic in ways its stubs and its runtime disagree on.
Context = grpc.aio.ServicerContext[Any, Any]


class _Outbox:
    """The queue of frames to one router. Used on the service's loop only."""

    def __init__(self, limit_bytes: int) -> None:
        self._frames: asyncio.Queue[pb.WorkerFrame | None] = asyncio.Queue()
        self._limit = limit_bytes
        self._bytes = 0
        self.reason = ""

    def put(self, frame: pb.WorkerFrame) -> None:
        waiting = self._bytes
        self._bytes += frame.ByteSize()
        # A single frame may be larger than the limit: long prompts have long scores.
        if waiting > self._limit and not self.reason:
            self.end(f"the router reads too slowly: {self._bytes} bytes wait for it")
        elif not self.reason:
            self._frames.put_nowait(frame)

    def end(self, reason: str) -> None:
        """End the stream after the queued frames; the first `reason` is what the router is told."""
        self.reason = self.reason or reason
        self._frames.put_nowait(None)

    async def frames(self) -> AsyncIterator[pb.WorkerFrame]:
        while (frame := await self._frames.get()) is not None:
            yield frame
            self._bytes -= frame.ByteSize()


class WorkerService(pb_grpc.WorkerServicer):
    """The gRPC service `Worker` over one worker thread."""

    def __init__(self, host: WorkerThread, incarnation: int, outbox_bytes: int = OUTBOX_BYTES) -> None:
        self._host = host
        self._incarnation = incarnation
        self._outbox_bytes = outbox_bytes
        self._sessions = 0

    async def Serve(self, frames: AsyncIterator[pb.RouterFrame], context: Context) -> AsyncIterator[pb.WorkerFrame]:
        await self._check_incarnation(context)
        loop = asyncio.get_running_loop()
        outbox = _Outbox(self._outbox_bytes)

        def put(events: list[Event]) -> None:
            try:
                outbox.put(self._frame(events))
            except (ValueError, TypeError) as error:  # A stream from which events are missing would hang its requests.
                log.exception("events can't be sent")
                outbox.end(f"an event can't be sent: {error}")

        def deliver(events: list[Event]) -> None:
            loop.call_soon_threadsafe(put, events)

        def ended(reason: str) -> None:
            loop.call_soon_threadsafe(outbox.end, reason)

        if self._sessions >= MOST_SESSIONS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_SESSIONS} routers are served already")
        try:
            session = self._host.open_session(deliver, ended)
        except WorkerClosed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        self._sessions += 1
        reader = asyncio.create_task(self._read(session, frames, outbox))
        try:
            await context.send_initial_metadata(())
            async for frame in outbox.frames():
                yield frame
        finally:
            reader.cancel()
            self._sessions -= 1
            self._host.close_session(session)
        await context.abort(grpc.StatusCode.UNAVAILABLE, outbox.reason)

    async def _read(self, session: Any, frames: AsyncIterator[pb.RouterFrame], outbox: _Outbox) -> None:
        try:
            async for frame in frames:
                commands, others = known(command_from_proto, frame.commands)
                if others:
                    log.warning("%d commands of kinds that this build doesn't know are left out", others)
                self._host.send(session, commands)
            outbox.end("the router closed its stream")
        except (WireError, ValueError) as error:
            log.warning("a router broke the protocol: %s", error)
            outbox.end(f"protocol error: {error}")
        except grpc.RpcError as error:
            outbox.end(f"the stream broke: {error}")
        except Exception as error:  # Bytes that are no frame come as gRPC's and protobuf's own errors, of many kinds.
            log.warning("a router's frame can't be read: %s", error)
            outbox.end(f"protocol error: a frame can't be read: {error}")

    def _frame(self, events: list[Event]) -> pb.WorkerFrame:
        return pb.WorkerFrame(incarnation=self._incarnation, events=[event_to_proto(event) for event in events])

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
        *,
        receive_bytes: int = COMMANDS_BYTES,
        send_bytes: int = EVENTS_BYTES,
        certificate: CertificateFiles | None = None,
    ) -> None:
        """`bind`: ``host:port``, port 0 for a free one. With a `secret`, calls must carry its token
        (`contracts.cluster_secret`). A client that is silent for `link_timeout_s` counts as gone. A message above
        `receive_bytes` ends its own call only. `certificate`: this node's; with it only nodes of the cluster are
        served, None: without TLS."""
        self._certificate = certificate
        self._receive_bytes, self._send_bytes = receive_bytes, send_bytes
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
        options = server_options(self._receive_bytes, self._send_bytes, self._link_timeout_s)
        server = grpc.aio.server(options=options, interceptors=doorkeepers)
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


def serve_worker(
    loop: AsyncioThread,
    host: WorkerThread,
    incarnation: int,
    address: str,
    secret: str = "",
    link_timeout_s: float = LINK_TIMEOUT_S,
    certificate: CertificateFiles | None = None,
) -> tuple[ServiceServer, str]:
    """Serve the worker thread `host` on a free port of `address`; returns the server and its endpoint ``host:port``."""
    server = ServiceServer(loop, f"{address}:0", secret, link_timeout_s, certificate=certificate)
    port = server.start(pb_grpc.add_WorkerServicer_to_server, WorkerService(host, incarnation))
    return server, f"{address}:{port}"
