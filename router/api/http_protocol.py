"""One client's connection: uvicorn's HTTP protocol with joined writes, calls in place of coroutines, and deadlines.

**Writes of one turn of the event loop are one system call.** Uvicorn writes an answer's head and body apart, and the
last event of a stream apart from its end. A write to a socket wakes the client's process and is the most expensive
thing that the router does for a request, so writes are joined. What waits leaves in one callback for all sockets of the
loop: a frame from a worker has tokens of many streams. More than `JOINED_BYTES` of one socket leave at once, so that
the server sees how much its client has yet to read.

**Functions beside ASGI's coroutines** stand in the scope's extensions. `send` and `receive` are coroutines: each event
of a stream would have to wake the task that awaits it, which takes longer than making the event, and each request would
need a task of its own that waits for the client to leave. Servers without these extensions, and pieces that
`DIRECT_WRITE` doesn't take, are served through `send` and `receive`.

**Connections are limited** in number and time. A connection takes a file descriptor, and a router without free
descriptors can reach no worker and answers no probe. So the limit on connections is below the process's limit on
descriptors. Above it, the connection that has waited longest without a request with whole headers is closed, whether it
is idle or sends its headers byte by byte. When every connection has a request under way, `RESERVE` more are accepted
for the health and metrics endpoints (`OPEN_PATHS`); all other paths answer 503 on these.

One sweep a second over all connections enforces the deadlines, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.json_logs import log
from twinpool.router.api.http_exchange import DIRECT_WRITE, ON_GONE, AsgiMessage, AsgiReceive, AsgiScope, AsgiSend
from twinpool.router.openai.api_errors import ApiError

JOINED_BYTES = 256 * 1024
"""Bytes of one socket that wait to be joined."""


class JoinedWrites:
    """The transports with writes that leave before the loop waits again. One for each event loop."""

    def __init__(self) -> None:
        self.waiting: list[CoalescingTransport] = []
        """Whoever adds the first one has `flush` called at the end of the loop's turn."""

    def flush(self) -> None:
        """Write what waits."""
        waiting, self.waiting = self.waiting, []
        for transport in waiting:
            try:
                transport.flush()
            except Exception:  # One client's socket; the others' writes go on.
                log("write failed", level=logging.ERROR, trace=True)


class CoalescingTransport:
    """A transport whose writes leave together before the loop waits again; all else is the wrapped transport's."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, joined: JoinedWrites) -> None:
        self._transport = transport
        self._loop = loop
        self._joined = joined
        self._parts: list[bytes] = []
        self._waiting = 0
        """Bytes of the parts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            if not self._joined.waiting:
                self._loop.call_soon(self._joined.flush)
            self._joined.waiting.append(self)
        self._parts.append(data)
        self._waiting += len(data)
        if self._waiting >= JOINED_BYTES:
            self.flush()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Write what waits. Idempotent."""
        if self._parts:
            parts, self._parts, self._waiting = self._parts, [], 0
            if self._transport.is_closing():
                return  # It was cut meanwhile.
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))


class CoalescingHttpProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol on a `CoalescingTransport`."""

    joined: JoinedWrites
    """Set before the connection is made."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CoalescingTransport(transport, self.loop, self.joined))  # type: ignore[arg-type]


class LeavingCalls:
    """The calls to be made when the client of one connection leaves, by the request whose answer isn't complete."""

    def __init__(self) -> None:
        self._calls: dict[RequestResponseCycle, list[Callable[[], object]]] = {}

    def add(self, cycle: RequestResponseCycle, call: Callable[[], object]) -> None:
        """Have `call` called when the client leaves; at once where it has."""
        if cycle.disconnected:
            call()
        elif not cycle.response_complete:
            self._calls.setdefault(cycle, []).append(call)

    def answered(self) -> None:
        """Forget the requests whose answers are complete."""
        for cycle in [cycle for cycle in self._calls if cycle.response_complete]:
            del self._calls[cycle]

    def left(self) -> None:
        """Make the calls: the client has left. Idempotent."""
        gone, self._calls = self._calls, {}
        for calls in gone.values():
            for call in calls:
                call()


def offer_extensions(cycle: RequestResponseCycle, leaving: LeavingCalls) -> None:
    """Put the extensions into the scope of a request."""

    def write(piece: bytes) -> bool:
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    extensions: dict[str, Any] = {DIRECT_WRITE: write, ON_GONE: lambda call: leaving.add(cycle, call)}
    cast(AsgiScope, cycle.scope)["extensions"] = extensions


def answer_http_1_0(cycle: RequestResponseCycle, *, keeps: bool) -> None:
    """Have the answer to an HTTP/1.0 request be one that its client can read: never in chunks, which HTTP/1.0 doesn't
    have, and without ``100 Continue``.

    A body without ``content-length``, a stream's, ends with the connection. `keeps`: the client has asked for the
    connection to stay open (``Connection: keep-alive``); it does where the body has a length.
    """
    cycle.waiting_for_100_continue = False
    send = cycle.send
    until_close = False

    async def sized(message: AsgiMessage) -> None:
        nonlocal until_close
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            names = {name.lower() for name, _ in (*cycle.default_headers, *headers)}
            if b"content-length" not in names:
                until_close, cycle.chunked_encoding = True, False
            elif keeps and b"connection" not in names:
                cycle.keep_alive = True
                message = {**message, "headers": [*headers, (b"connection", b"keep-alive")]}
        elif until_close:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(cast(Any, message))

    cast(Any, cycle).send = sized


OPEN_PATHS = frozenset({"/live", "/health", "/ping", "/metrics"})
"""Paths that are answered on connections above the limit as well."""
RESERVE = 16
"""Connections accepted above the limit, for `OPEN_PATHS`."""
HEAD_BYTES = 64 * 1024
"""Limit on a request's line and headers; it is checked after each read, so that somewhat more may have come."""
CLOSE_S = 10.0
"""How long a closing connection may take to send its last bytes to the client."""
SWEEP_S = 1.0

ASGIApp = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]


def descriptor_limit() -> int:
    """Return this process's soft limit on open descriptors."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_descriptor_limit(most: int = 65_536) -> None:
    """Raise this process's soft limit on open descriptors to its hard limit, `most` at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit(config: RouterConfig, descriptors: int | None = None) -> int:
    """Return how many connections clients may have: `router.max_connections`, or fewer with few descriptors.

    `descriptors` None takes this process's limit. A quarter of it, and some more, is left for workers, the controller,
    reader processes, logs, and connections that are being accepted.
    """
    have = descriptor_limit() if descriptors is None else descriptors
    if have == resource.RLIM_INFINITY:
        return config.max_connections
    return max(1, min(config.max_connections, have * 3 // 4 - RESERVE - 32))


class CountedConnection(Protocol):
    """A client's connection as its limit sees it."""

    client: Any
    """The client's address."""

    def cut(self) -> None:
        """Close the connection at once."""

    def late(self, now: float, config: RouterConfig) -> str | None:
        """Close the connection if it has missed a deadline; returns the reason for the log, else None."""


class ClientConnections:
    """The connections of one router; used from its event loop only."""

    def __init__(self, config: RouterConfig, limit: int | None = None) -> None:
        self._config = config
        self.limit = connection_limit(config) if limit is None else limit
        self.all: set[CountedConnection] = set()
        self.waiting: OrderedDict[CountedConnection, None] = OrderedDict()
        """Connections without a request with whole headers; the one that has waited longest is first."""
        self.joined = JoinedWrites()
        self.accepted = self.closed_idle = self.closed_late = self.refused = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def full(self) -> bool:
        return len(self.all) > self.limit

    def opened(self, connection: CountedConnection) -> bool:
        """Count a new connection, and close another one, or this one, where there are too many.

        Returns whether it is within the limit; else it is only for `OPEN_PATHS`.
        """
        self.accepted += 1
        self.all.add(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_again)
        if self.full and self.waiting:
            oldest, _ = self.waiting.popitem(last=False)
            self.all.discard(oldest)  # Its place is free before `closed` is called for it.
            self.closed_idle += 1
            oldest.cut()
        self.waiting[connection] = None
        if len(self.all) > self.limit + RESERVE:
            self.refused += 1
            connection.cut()
        return not self.full

    @property
    def backlog(self) -> int:
        """The backlog of the listening socket: the loop may accept all of it at once, before it counts one."""
        return max(16, min(2048, self.limit // 4))

    def closed(self, connection: CountedConnection) -> None:
        """Forget a connection that has ended. Idempotent."""
        self.all.discard(connection)
        self.waiting.pop(connection, None)
        if not self.all and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def busy(self, connection: CountedConnection) -> None:
        """Note that the connection has received the whole headers of a request."""
        self.waiting.pop(connection, None)

    def idle(self, connection: CountedConnection) -> None:
        """Note that the connection's answer is complete and no further request waits on it."""
        if connection in self.all:
            self.waiting[connection] = None

    def metrics(self) -> Iterator[Metric]:
        have = GaugeMetricFamily("twinpool_http_connections", "Clients' connections", labels=["state"])
        have.add_metric(["busy"], len(self.all) - len(self.waiting))
        have.add_metric(["idle"], len(self.waiting))
        yield have
        text = "Connections closed: idle ones for others, late ones, those above every bound"
        closed = CounterMetricFamily("twinpool_http_connections_closed", text, labels=["reason"])
        closed.add_metric(["idle"], self.closed_idle)
        closed.add_metric(["late"], self.closed_late)
        closed.add_metric(["refused"], self.refused)
        yield closed

    def _sweep_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_again)
        self.sweep(asyncio.get_running_loop().time())

    def sweep(self, now: float) -> None:
        """Close every connection that has missed a deadline; `now` in seconds of the event loop's clock."""
        for connection in list(self.all):
            late = connection.late(now, self._config)
            if late:
                self.closed_late += 1
                log("connection closed", reason=late, client=connection.client)


class BoundedHttpProtocol(CoalescingHttpProtocol):
    """Uvicorn's HTTP protocol with the limit on connections and with deadlines for reading and writing."""

    registry: ClientConnections

    def __init__(
        self, *arguments: Any, registry: ClientConnections, app: ASGIApp | None = None, **options: Any
    ) -> None:
        """`app`: serves in place of the configuration's application."""
        super().__init__(*arguments, **options)
        if app is not None:
            self.app = app
        self.registry, self.joined = registry, registry.joined
        self._on_made: Callable[[], object] = lambda: None
        self._began: float | None = None
        """When the first byte of a request came, until its headers are whole."""
        self._body_began: float | None = None
        """When a request's headers were whole, until its body is."""
        self._body_bytes = 0
        self._head_bytes = 0
        self._stuck_since: float | None = None
        """Since when the write buffer has been full, as the client reads nothing."""
        self._closing_since: float | None = None
        self._leaving = LeavingCalls()

    def on_made(self, call: Callable[[], object]) -> None:
        """Have `call` called just before the connection is counted."""
        self._on_made = call

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._on_made()
        if not self.registry.opened(self):
            self.app = _only_open_paths(self.app)
            self.timeout_keep_alive = 1
        # Uvicorn sets this timer only after an answer; a client that connects and sends nothing has as long.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self.registry.closed(self)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._leaving.left()

    def cut(self) -> None:
        """Close the connection at once; an answer under way is lost."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._began is None and self._body_began is None:
            self._began = self.loop.time()
        self._head_bytes += len(data)
        super().data_received(data)
        if self._began is not None and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the request's line and headers have more than {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._began = None
        self._body_began, self._body_bytes = self.loop.time(), 0
        self.registry.busy(self)
        super().on_headers_complete()
        offer_extensions(self.cycle, self._leaving)
        if self.parser.get_http_version() == "1.0":
            answer_http_1_0(self.cycle, keeps=self.parser.should_keep_alive())

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_began, self._head_bytes = None, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        waits = bool(self.pipeline)  # The next request, which begins now.
        super().on_response_complete()
        self._leaving.answered()
        if not waits:
            self.registry.idle(self)

    def pause_writing(self) -> None:
        self._stuck_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck_since = None
        super().resume_writing()

    def late(self, now: float, config: RouterConfig) -> str | None:
        """Close the connection if it has missed a deadline; returns the reason for the log, else None.

        A late request is answered 408 where no answer has begun. `now` is in seconds of the event loop's clock.
        """
        if self.transport.is_closing():
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > CLOSE_S:
                self.cut()
                return "it took nothing of what it was sent last"
            return None
        if self._stuck_since is not None and now - self._stuck_since > config.write_timeout_s:
            self.cut()
            return f"it took nothing for {config.write_timeout_s:g} s"
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._began is not None and not answering and now - self._began > config.header_timeout_s:
            late = f"the request's headers took longer than {config.header_timeout_s:g} s"
        elif self._body_began is not None and self._body_is_late(now, config):
            late = f"the request's body comes too slowly: {self._body_bytes} bytes in {now - self._body_began:.0f} s"
        else:
            return None
        self._refuse(408, late)
        return late

    def _body_is_late(self, now: float, config: RouterConfig) -> bool:
        assert self._body_began is not None
        if self.flow.read_paused:  # The router doesn't read, so the client isn't to blame.
            return False
        return now - self._body_began > config.body_timeout_s + self._body_bytes / config.body_bytes_per_s

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error in the application's place, where no answer has begun, and close the connection."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = ApiError(status, message, "invalid_request_error", "too_slow" if status == 408 else None).to_json()
            head = b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._leaving.left()
        self.transport.close()


def _only_open_paths(app: ASGIApp) -> ASGIApp:
    """Return `app` restricted to `OPEN_PATHS`, for a connection above the limit; other paths answer 503."""

    async def limited(scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, send)
            return
        failure = ApiError(
            503,
            "the router has as many connections as it takes; try again later, or keep connections for several requests",
            "server_error",
            "too_many_connections",
        )
        body = failure.to_json()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"1"),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": failure.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return limited
