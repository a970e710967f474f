"""Calls over gRPC, which carries messages as bytes of their own definitions (`contracts.messages.calls`).

A client has a `CallChannel`; a server has handlers, each for one method, which get a message and return one. Bytes are
decoded here and not by grpcio, which would log a traceback and answer with nothing: a request that can't be read is
refused as INVALID_ARGUMENT with the path of what is wrong, a call of another version of the calls as UNIMPLEMENTED with
what to do about it. What a handler refuses it raises as `CallRefused`.
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
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import TwinpoolError, WireError
from twinpool.contracts.message_types import Message
from twinpool.contracts.messages.calls import CALLS_VERSION, PREFIX, Call, Exchange, Method, Subscription
from twinpool.contracts.wire.grpc_channels import channel_options, open_channel
from twinpool.contracts.wire.message_codec import decode, encode

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
