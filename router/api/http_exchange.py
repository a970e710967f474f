"""One HTTP request and its answer over ASGI: bounded bodies, JSON answers, event streams, and calls at disconnects.

There is no web framework: `router.openai.request_fields` checks requests, so a framework's validation, middleware and
response objects would only cost time. The code is plain ASGI 3 and runs on any ASGI server.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from twinpool.contracts.compact_json import Pieces, joined
from twinpool.router.anthropic.messages_writer import error_body
from twinpool.router.openai.api_errors import ApiError, BodyTooLarge, ClientGone, NotJson
from twinpool.router.service.admission import FREE_BYTES, BodyBuffer

AsgiScope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]

REST_TIMEOUT_S = 5.0
REST_BYTES = 64 * 1024**2
"""How much of a refused body is read and thrown away at most, so that its client gets to read the error."""

DIRECT_WRITE = "twinpool.direct_write"
"""The ASGI extension that writes a piece of a body at once: a function of the piece, False where it must be sent."""
ON_GONE = "twinpool.on_gone"
"""The ASGI extension that has a function called when the client leaves before its answer is complete."""
JOINED_BYTES = 16 * 1024
JSON_KIND = b"application/json"
BYTES_KIND = b"application/octet-stream"
JSON_KINDS = frozenset({"", "application/json", "text/json", "text/plain", "application/x-www-form-urlencoded"})
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # A proxy such as nginx passes events on as they come.
)
PREFLIGHT_HEADERS = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-max-age", b"600"),
    (b"vary", b"access-control-request-headers"),
)
ALLOWED_HEADERS = b"authorization, content-type, x-api-key, anthropic-version, x-request-id"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MAX_NAMES = 2048
IGNORED_HEADER = b"x-twinpool-ignored"
"""The header of an answer that names the fields of its request which had no effect."""
WEIGHTS_HEADER = b"x-twinpool-weights-version"
"""The header of an answer that names the version of the weights that it was computed with."""
CLIENT_ID_CHARS = 64
_UNCLEAN = re.compile(r"[^A-Za-z0-9._:\-]")


class HttpExchange:
    """One HTTP request and its answer.

    It is answered once: by an `answer` method, `fail`, `refuse_body`, or `begin_events` and `write`. Call `release` at
    the end in any case.
    """

    __slots__ = (
        "_buffer",
        "_gone",
        "_held",
        "_on_gone",
        "_origin",
        "_receive",
        "_send",
        "_whole",
        "body_done",
        "client_id",
        "headers",
        "ignored",
        "method",
        "path",
        "query",
        "scope",
        "started",
        "tenant",
        "weights",
    )

    def __init__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._origin = b""
        """The page's origin that is allowed to read the answer; empty for none."""
        self.tenant = ""
        """Who asks, by the API key; empty where nobody needs one."""
        self.weights = ""
        """The version of the weights that the answer is of, which a header names; empty for none."""
        self.ignored: Sequence[str] = ()
        """The fields of the body that have no effect, which the answer names in a header."""
        self.started = False
        """Whether the answer's status has been sent."""
        self.body_done = False
        """Whether the whole body has been received."""
        given = _UNCLEAN.sub("", self.header(b"x-request-id"))[:CLIENT_ID_CHARS]
        self.client_id = given or secrets.token_hex(8)
        """The client's X-Request-Id, cleaned and shortened, or a minted one; every answer carries it."""
        self._gone: asyncio.Task[None] | None = None
        self._on_gone: list[Callable[[], object]] = []
        self._buffer: BodyBuffer | None = None
        self._held = 0
        self._whole = b""
        """The body, where it was read and put back."""

    def header(self, name: bytes) -> str:
        """Return the value of a header, empty where it is missing; `name` in lower case."""
        return self.headers.get(name, b"").decode("latin-1")

    def allow_origin(self, origins: frozenset[str]) -> None:
        """Let pages of these origins read the answer from a browser (CORS); ``*``: of every origin."""
        given = self.header(b"origin")
        if given and (given in origins or "*" in origins):
            self._origin = self.headers[b"origin"]

    @property
    def is_preflight(self) -> bool:
        """Whether a browser asks if a page may send a request, and it may."""
        return self.method == "OPTIONS" and bool(self._origin) and b"access-control-request-method" in self.headers

    async def answer_preflight(self) -> None:
        asked = self.headers.get(b"access-control-request-headers", b"")
        # Clients send headers of their own, OpenAI's x-stainless-*: nothing here depends on which a page may send.
        names = asked if len(asked) <= _MAX_NAMES and _HEADER_NAMES.fullmatch(asked) else ALLOWED_HEADERS
        await self._begin(204, [*PREFLIGHT_HEADERS, (b"access-control-allow-headers", names)])
        await self._send({"type": "http.response.body", "body": b""})

    def require_json(self) -> None:
        """Raise `NotJson` unless the body may be JSON by its content type and is not compressed. The type of curl's
        ``-d`` and none at all are let pass."""
        kind = self.header(b"content-type").partition(";")[0].strip().lower()
        if kind not in JSON_KINDS and not kind.endswith("+json"):
            raise NotJson
        encoding = self.header(b"content-encoding").strip().lower()
        if encoding not in ("", "identity"):
            raise NotJson("compressed bodies are not taken: send the body without Content-Encoding")

    @property
    def client_host(self) -> str:
        client = self.scope.get("client")
        return client[0] if client else ""

    async def body(self, limit: int, buffer: BodyBuffer) -> bytes:
        """Read the whole body; what of it is above `FREE_BYTES` is booked in `buffer` until `forget_body`.

        Raises `BodyTooLarge` as soon as the body is known to be above `limit` bytes, `BufferFull` when `buffer` has no
        room, and `ClientGone` when the client disconnects.
        """
        if self._whole:
            raw, self._whole = self._whole, b""
            if len(raw) > limit:
                raise BodyTooLarge(f"the body has {len(raw)} bytes; the limit is {limit}")
            return raw
        self._buffer = buffer
        parts: list[bytes] = []
        size = 0
        async for part in self.pieces(limit):
            size += len(part)
            if size - FREE_BYTES > self._held:
                buffer.take(size - FREE_BYTES - self._held)
                self._held = size - FREE_BYTES
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def put_back(self, raw: bytes) -> None:
        """Have the next `body` return what an earlier one has read: whose request it is, its body has said. It stays
        booked where it is."""
        self._whole = raw

    async def pieces(self, limit: int) -> AsyncIterator[bytes]:
        """Yield the body as it comes, for who keeps none of it. Raises `BodyTooLarge` and `ClientGone` as `body`."""
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise BodyTooLarge(f"the body has {length[:24].decode()} bytes; the limit is {limit}")
        size = 0
        while not self.body_done:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left while it was sending")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"the body is above the limit of {limit} bytes")
            self.body_done = not message.get("more_body", False)
            yield part

    def forget_body(self) -> None:
        """Give the body's bytes back to the `BodyBuffer`. Idempotent."""
        if self._buffer is not None:
            self._buffer.give_back(self._held)
            self._held = 0

    def on_gone(self, call: Callable[[], object]) -> None:
        """Have `call` called when the client disconnects before the answer is complete.

        Call it only once the body has been read: from then on the exchange itself receives the ASGI messages.
        """
        hook: Callable[[Callable[[], object]], None] | None = self.scope.get("extensions", {}).get(ON_GONE)
        if hook is not None:
            hook(call)
            return
        self._on_gone.append(call)
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        for call in self._on_gone:
            call()

    def release(self) -> None:
        """Give back the body's bytes and stop watching for a disconnect. Idempotent."""
        self.forget_body()
        if self._gone is not None:
            self._gone.cancel()

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        headers.append((b"x-request-id", self.client_id.encode()))
        if self.weights:
            headers.append((WEIGHTS_HEADER, self.weights.encode("ascii", "replace")))
        if self.ignored:
            headers.append((IGNORED_HEADER, ", ".join(self.ignored).encode("ascii")))
        if self._origin:
            headers += [(b"access-control-allow-origin", self._origin), (b"vary", b"origin")]
            headers.append(
                (b"access-control-expose-headers", b"x-request-id, " + IGNORED_HEADER + b", " + WEIGHTS_HEADER)
            )
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def answer(
        self, status: int, body: bytes, *, kind: bytes = JSON_KIND, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        await self._begin(status, [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def answer_parts(self, status: int, parts: Sequence[bytes | Pieces]) -> None:
        """Send a JSON answer in parts, which aren't joined above `JOINED_BYTES`: a large one may be shared with other
        answers."""
        size = sum(map(len, parts))
        if size <= JOINED_BYTES:
            return await self.answer(status, joined(parts))
        await self._begin(status, [(b"content-type", JSON_KIND), (b"content-length", b"%d" % size)])
        for part in parts:
            for piece in (part,) if isinstance(part, bytes) else part:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                if len(piece) >= JOINED_BYTES:  # Others needn't wait for all of it.
                    await asyncio.sleep(0)
        await self._send({"type": "http.response.body", "body": b""})

    async def answer_pieces(self, size: int, read: Callable[[], Awaitable[bytes]]) -> None:
        """Send `size` bytes that `read` gives one after the other; it is asked for the next once the last is sent."""
        await self._begin(200, [(b"content-type", BYTES_KIND), (b"content-length", b"%d" % size)])
        while size:
            part = (await read())[:size]
            if not part:
                raise ClientGone("the file has become shorter")  # The client sees that bytes are missing.
            size -= len(part)
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def answer_json(self, status: int, tree: object) -> None:
        await self.answer(status, json.dumps(tree).encode())

    async def begin_events(self) -> None:
        await self._begin(200, list(EVENT_HEADERS))

    @property
    def direct_write(self) -> Callable[[bytes], bool] | None:
        """What writes a piece of the body at once, where the server can; see `DIRECT_WRITE`."""
        found: Callable[[bytes], bool] | None = self.scope.get("extensions", {}).get(DIRECT_WRITE)
        return found

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def fail(self, failure: ApiError) -> None:
        """Answer with an error in the shape of the endpoint's API."""
        retry = failure.retry_after_s
        headers = [(b"retry-after", b"%d" % retry)] if retry is not None else []
        await self.answer(failure.status, self._error_body(failure), headers=headers)

    def _error_body(self, failure: ApiError) -> bytes:
        return error_body(failure) if self.path.startswith("/v1/messages") else failure.to_json()

    async def refuse_body(self, failure: ApiError) -> None:
        """Answer with an error before the body has been read, throw the rest away and close the connection.

        At most `REST_BYTES` are thrown away, for `REST_TIMEOUT_S`. The last byte of the answer is held back until then,
        because an ASGI server stops reading once an answer is complete.
        """
        body = self._error_body(failure)
        head = [(b"content-type", JSON_KIND), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        if failure.retry_after_s is not None:
            head.append((b"retry-after", b"%d" % failure.retry_after_s))
        await self._begin(failure.status, head)
        await self.write(body[:-1])
        try:
            async with asyncio.timeout(REST_TIMEOUT_S):
                thrown = 0
                while thrown < REST_BYTES:
                    message = await self._receive()
                    thrown += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        except TimeoutError:
            pass
        await self.write(body[-1:], more=False)
