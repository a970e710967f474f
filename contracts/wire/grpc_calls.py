"""Calls over gRPC, its channels and servers: it carries messages as bytes of their own definitions
(`contracts.messages.calls`).

A client has a `CallChannel`; a server has handlers, each for one method, which get a message and return one. Bytes are
decoded here and not by grpcio, which would log a traceback and answer with nothing: a request that can't be read is
refused as INVALID_ARGUMENT with the path of what is wrong, a call of another version of the calls as UNIMPLEMENTED with
what to do about it. What a handler refuses it raises as `CallRefused`.

HTTP proxies of the environment are ignored, since they can't reach loopback or a cluster's hosts. A connection that was
cut is tried again within a second: gRPC's own back-off grows to two minutes, longer than any lease. The size of
messages is bounded on both sides: what is asked for is short, answers may have the whole table of workers.

Within a cluster that has certificates there is mutual TLS with each node's; without them calls are in the clear.
Servers read their certificate again when its files change; a channel has those of the moment at which it was opened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import grpc
import grpc.aio

from twinpool.contracts.cluster_secret import RpcMetadata, access_metadata
from twinpool.contracts.credentials.certificate_files import NODE_NAME, CertificateFiles
from twinpool.contracts.credentials.node_tls import RereadFiles
from twinpool.contracts.errors import ConfigError, TwinpoolError, WireError
from twinpool.contracts.message_types import Message
from twinpool.contracts.messages.calls import CALLS_VERSION, PREFIX, Call, Exchange, Method, Subscription
from twinpool.contracts.wire.message_codec import decode, encode

ChannelOptions = list[tuple[str, int]]

RECONNECT_FIRST_MS = 100
RECONNECT_MOST_MS = 1000
CONTROL_BYTES = 1024 * 1024
"""Bytes of the largest message to a server: a worker's registration, or a heartbeat with its counters."""
TABLE_BYTES = 64 * 1024 * 1024
"""Bytes of the largest answer: the controller's table, of which each worker takes a few kilobytes."""
CONCURRENT_CALLS = 4096
"""The most calls that one connection may have open at a server."""
METADATA_BYTES = 16 * 1024


def channel_options(silence_s: float | None = None) -> ChannelOptions:
    """Options of a channel to a process of this cluster.

    `silence_s`: seconds without a sign of life after which the peer counts as gone; None: the channel sends no pings.
    """
    options = [
        ("grpc.max_receive_message_length", TABLE_BYTES),
        ("grpc.max_send_message_length", CONTROL_BYTES),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
        # Also how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", RECONNECT_MOST_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MOST_MS),
        # Else a channel that is opened anew inherits the back-off of the one before.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return options if silence_s is None else [*options, *_pings(silence_s)]


def server_options(silence_s: float) -> ChannelOptions:
    """Options of a server. A client that is silent for `silence_s` seconds, pings included, counts as gone."""
    return [
        ("grpc.max_receive_message_length", CONTROL_BYTES),
        ("grpc.max_send_message_length", TABLE_BYTES),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.max_concurrent_streams", CONCURRENT_CALLS),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.max_ping_strikes", 0),
        *_pings(silence_s),
    ]


def _pings(silence_s: float) -> ChannelOptions:
    half_ms = max(1, int(500 * silence_s))
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        # gRPC waits for an answer for the longer of this (a minute by default) and the timeout above.
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


# ---------------------------------------------------------------- mutual TLS


def open_channel(target: str, options: ChannelOptions, files: CertificateFiles | None) -> grpc.aio.Channel:
    """Open a channel to a process of this cluster; with `files` only to one that proves to be a node of it.

    Raises `ConfigError` where the files can't be read.
    """
    if files is None:
        return grpc.aio.insecure_channel(target, options=options)
    ca, key, cert = _read(files)
    named: list[tuple[str, int | str]] = [*options, ("grpc.ssl_target_name_override", NODE_NAME)]
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=named)


def add_port(server: grpc.aio.Server, address: str, files: CertificateFiles | None) -> int:
    """Have `server` listen on ``host:port``; with `files` only clients with a certificate of the authority are served.

    Returns the port that was bound. Raises `RuntimeError` where the address can't be had, `ConfigError` where the files
    can't be read.
    """
    if files is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _server_credentials(files))


def _server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    configurations = RereadFiles(files, _configuration)
    first = given = configurations.latest()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each handshake; None: as before."""
        nonlocal given
        before, given = given, configurations.latest()
        return given if given is not before else None

    return grpc.dynamic_ssl_server_credentials(
        first,
        newer,  # type: ignore[arg-type]  # It may return None, which the stubs don't know.
        require_client_authentication=True,
    )


def _configuration(files: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    ca, key, cert = _read(files)
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def _read(files: CertificateFiles) -> tuple[bytes, bytes, bytes]:
    assert files.ca is not None
    try:
        return files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read the node's certificate: {error}") from None


log = logging.getLogger("twinpool.calls")

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
CLOSED = "the connection was closed"
_OTHER_VERSION = (
    f"this build speaks version {CALLS_VERSION} of the calls between the processes of a cluster, and the other side "
    "another one: replace it by one of this build"
)
# grpc.aio's own types are generic in ways its stubs and its runtime disagree on.
Context = grpc.aio.ServicerContext[Any, Any]


# ---------------------------------------------------------------- clients


class CallFailed(ConnectionError):
    """Raised where a call fails or isn't answered in time."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code, self.reason = code, reason

    @property
    def refused(self) -> bool:
        """Whether the other side has refused to do what it was asked for, and says why."""
        return self.code is grpc.StatusCode.FAILED_PRECONDITION


class CallChannel:
    """A channel to one process of the cluster. Used on one event loop; calls raise `CallFailed`."""

    def __init__(
        self,
        target: str,
        secret: str = "",
        certificate: CertificateFiles | None = None,
        *,
        silence_s: float | None = None,
        metadata: RpcMetadata = (),
    ) -> None:
        """`target`: ``host:port``. With a `secret` calls carry the cluster's token; `metadata` is what they carry
        beside it. `certificate`: this node's; with it only a node of the cluster is called, None: without TLS.
        `silence_s`: seconds without a sign of life after which the peer counts as gone; None: nobody looks. Raises
        `ConfigError` where the certificate can't be read."""
        self._channel = open_channel(target, channel_options(silence_s), certificate)
        self._metadata = (*metadata, *access_metadata(secret))

    async def call(
        self, method: Call[RequestT, AnswerT], request: RequestT, timeout_s: float, *, wait: bool = False
    ) -> AnswerT:
        """Make a call, which fails after `timeout_s`. `wait`: until there is a connection, instead of failing at
        once where there is none."""
        begin = self._channel.unary_unary(method.path, None, None)
        try:
            data = await begin(_encoded(request), timeout=timeout_s, wait_for_ready=wait, metadata=self._metadata)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
            _fail(error)
        return _answer(method, data)

    async def subscribe(
        self,
        method: Subscription[RequestT, AnswerT],
        request: RequestT,
        *,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[AnswerT]:
        """The answers to a request, until the other side ends them; closing the generator ends them, too."""
        call = self._channel.unary_stream(method.path, None, None)(
            _encoded(request), timeout=timeout_s, wait_for_ready=wait, metadata=self._metadata
        )
        async with aclosing(_answers(method, call)) as answers:
            async for answer in answers:
                yield answer

    async def exchange(
        self, method: Exchange[RequestT, AnswerT], requests: AsyncIterator[RequestT]
    ) -> AsyncGenerator[AnswerT]:
        """The answers to `requests`, which are sent as they come."""

        async def sent() -> AsyncIterator[bytes]:
            async for request in requests:
                try:
                    yield _encoded(request)
                except (TypeError, ValueError, OverflowError) as error:  # gRPC would drop the reason.
                    log.error("a request can't be encoded", extra={"method": method.path, "error": str(error)})
                    raise

        call = self._channel.stream_stream(method.path, None, None)(sent(), metadata=self._metadata)
        async with aclosing(_answers(method, call)) as answers:
            async for answer in answers:
                yield answer

    async def connected(self, timeout_s: float) -> bool:
        """Return whether there is a connection within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            return False
        return True

    async def close(self, grace_s: float | None = None) -> None:
        """End the channel, and calls that are under way after `grace_s`."""
        await self._channel.close(grace_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


async def _answers(method: Method[Any, AnswerT], call: Any) -> AsyncGenerator[AnswerT]:
    frames = aiter(call)
    try:
        while True:
            try:
                data = await anext(frames, None)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as error:
                _fail(error)
            if data is None:
                return
            yield _answer(method, data)
    finally:
        call.cancel()


def _answer(method: Method[Any, AnswerT], data: bytes) -> AnswerT:
    try:
        answer: AnswerT
        answer, left_out = decode(method.answer, data)
    except WireError as error:
        raise CallFailed(grpc.StatusCode.INTERNAL, f"an answer that can't be read: {error}") from None
    _note(method, left_out)
    return answer


def _fail(error: BaseException) -> NoReturn:
    """Raise what a call's failure means. Where the connection is closed under a call, grpc.aio cancels the call, which
    isn't a cancellation of the task that awaits it."""
    if isinstance(error, grpc.aio.AioRpcError):
        reason = error.details() or ""
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and reason == "Method not found!":  # Of version 1.
            reason = _OTHER_VERSION
        raise CallFailed(error.code(), reason) from None
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
        raise CallFailed(grpc.StatusCode.CANCELLED, CLOSED) from None
    raise CallFailed(grpc.StatusCode.CANCELLED, str(error)) from None


def _note(method: Method[Any, Any], left_out: int) -> None:
    if left_out:
        extra = {"method": method.path, "left_out": left_out}
        log.warning("entries of kinds that only a newer build knows were left out", extra=extra)


def _encoded(message: Any) -> bytes:
    assert isinstance(message, Message)
    return encode(message)


# ---------------------------------------------------------------- servers


class CallRefused(TwinpoolError):
    """Raised by a handler, or by what admits calls, to refuse a call with this code and these words."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class IncomingCall(NamedTuple):
    """A call, before anything of it is read."""

    path: str
    metadata: dict[str, str]


Admit = Callable[[IncomingCall], None]
"""Raises `CallRefused` for a call that isn't to be served."""
Handler = tuple[str, "grpc.RpcMethodHandler[Any, Any]"]


def handle_call(method: Call[RequestT, AnswerT], answer: Callable[[RequestT], Awaitable[AnswerT]]) -> Handler:
    """Have calls of a method answered by `answer`."""

    async def run(data: bytes, context: Context) -> bytes:
        try:
            return _encoded(await answer(_request(method, data)))
        except CallRefused as error:
            await context.abort(error.code, str(error))

    return method.path, grpc.unary_unary_rpc_method_handler(run)


def handle_subscription(
    method: Subscription[RequestT, AnswerT], answers: Callable[[RequestT], AsyncGenerator[AnswerT]]
) -> Handler:
    """Have requests of a method answered by what `answers` yields."""

    async def run(data: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            async with aclosing(answers(_request(method, data))) as found:
                async for answer in found:
                    yield _encoded(answer)
        except CallRefused as error:
            await context.abort(error.code, str(error))

    return method.path, grpc.unary_stream_rpc_method_handler(run)


def handle_exchange(
    method: Exchange[RequestT, AnswerT], answers: Callable[[AsyncIterator[RequestT]], AsyncGenerator[AnswerT]]
) -> Handler:
    """Have streams of requests answered by what `answers` yields. The requests raise `CallRefused` at one that can't
    be read, and `ConnectionError` where the stream breaks."""

    async def requests(received: AsyncIterator[bytes]) -> AsyncIterator[RequestT]:
        try:
            async for data in received:
                yield _request(method, data)
        except grpc.aio.BaseError as error:
            raise ConnectionError(str(error)) from None

    async def run(received: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        try:
            async with aclosing(answers(requests(received))) as found:
                async for answer in found:
                    yield _encoded(answer)
        except CallRefused as error:
            await context.abort(error.code, str(error))

    return method.path, grpc.stream_stream_rpc_method_handler(run)


def _request(method: Method[RequestT, Any], data: bytes) -> RequestT:
    try:
        request: RequestT
        request, left_out = decode(method.request, data)
    except WireError as error:
        raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
    _note(method, left_out)
    return request


class CallHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The handlers of one server, each asked for only once the call has been admitted."""

    def __init__(self, handlers: Iterable[Handler], admit: Iterable[Admit] = ()) -> None:
        self._handlers, self._admit = dict(handlers), tuple(admit)

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        given = ((key, value) for key, value in call.invocation_metadata or ())
        metadata = {key: value if isinstance(value, str) else value.decode(errors="replace") for key, value in given}
        try:
            for admit in self._admit:
                admit(IncomingCall(call.method, metadata))
        except CallRefused as error:
            return _refusal(error)
        found = self._handlers.get(call.method)
        if found is None and call.method.startswith(PREFIX):
            log.warning("a call that isn't known was refused", extra={"method": call.method})
            ours = call.method.startswith(f"{PREFIX}v{CALLS_VERSION}.")
            reason = f"this build has no call {call.method}: a newer one asks for it" if ours else _OTHER_VERSION
            return _refusal(CallRefused(grpc.StatusCode.UNIMPLEMENTED, reason))
        return found


def _refusal(error: CallRefused) -> Any:
    async def refuse(requests: Any, context: Context) -> None:
        await context.abort(error.code, str(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
