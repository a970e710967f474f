"""The little of ASGI that the router needs: bounded bodies, JSON answers, streams, and word of a client that left.

No framework: requests are checked by `router.fields`, so a framework's validation, middleware and response objects
would only cost time. What is here is plain ASGI 3 and runs on any ASGI server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from contracts.errors import TwinpoolError
from router.failures import ClientGone, Failure

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Sender = Callable[[Message], Awaitable[None]]

REST_TIMEOUT_S = 5.0
REST_FACTOR = 4
"""Of a body that is too large this many times the limit is read and thrown away, so that the client can hear why."""

JSON_TYPE = (b"content-type", b"application/json")
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class BodyTooLarge(TwinpoolError):
    """Raised while reading a body that is above `router.max_body_bytes`."""


class Exchange:
    """One HTTP request and its answer."""

    __slots__ = ("_gone", "_receive", "_send", "body_done", "headers", "method", "path", "query", "scope", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Sender) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started = False
        self.body_done = False
        self._gone: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def client_host(self) -> str:
        client = self.scope.get("client")
        return client[0] if client else ""

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises `BodyTooLarge` as soon as it is known to be above `limit` bytes, `ClientGone`."""
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise BodyTooLarge(f"the body has {int(length)} bytes; the limit is {limit}")
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left while it was sending")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"the body is above the limit of {limit} bytes")
            parts.append(part)
            if not message.get("more_body", False):
                self.body_done = True
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def on_gone(self, call: Callable[[], None]) -> None:
        """Call back when the client closes its connection before the answer is complete."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            call()

        self._gone = asyncio.get_running_loop().create_task(watch())

    def release(self) -> None:
        if self._gone is not None:
            self._gone.cancel()

    async def answer(
        self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None, kind: bytes | None = None
    ) -> None:
        self.started = True
        head = [JSON_TYPE if kind is None else (b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": head + (headers or [])})
        await self._send({"type": "http.response.body", "body": body})

    async def begin_events(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS + headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def fail(self, failure: Failure, headers: list[tuple[bytes, bytes]]) -> None:
        """Answer with an error in OpenAI's shape."""
        if failure.retry_after_s is not None:
            headers = [*headers, (b"retry-after", b"%d" % failure.retry_after_s)]
        await self.answer(failure.status, failure.to_json(), headers)

    async def refuse_body(self, failure: Failure, headers: list[tuple[bytes, bytes]], limit: int) -> None:
        """Answer before the body has been read, then throw some of the rest away and close the connection."""
        body = failure.to_json()
        head = [JSON_TYPE, (b"content-length", b"%d" % len(body)), (b"connection", b"close"), *headers]
        self.started = True
        await self._send({"type": "http.response.start", "status": failure.status, "headers": head})
        await self._send({"type": "http.response.body", "body": body[:1], "more_body": True})
        try:
            async with asyncio.timeout(REST_TIMEOUT_S):
                thrown = 0
                while thrown < REST_FACTOR * limit:
                    message = await self._receive()
                    thrown += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        except TimeoutError:
            pass
        await self._send({"type": "http.response.body", "body": body[1:]})
