"""Limits on clients' connections: their number, the deadlines of requests, and which one is closed at the limit.

A connection takes a file descriptor, and a router without free descriptors can reach no worker and answers no probe. So
the limit on connections is below the process's limit on descriptors. Above it, the connection that has waited longest
without a request with whole headers is closed, whether it is idle or sends its headers byte by byte. When every
connection has a request under way, `RESERVE` more are accepted for the health and metrics endpoints (`OPEN_PATHS`); all
other paths answer 503 on these.

One sweep a second over all connections enforces the deadlines, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.router.api.asgi_exchange import AsgiReceive, AsgiScope, AsgiSend
from twinpool.router.api.coalesced_writes import CoalescingHttpProtocol, JoinedWrites
from twinpool.router.api.server_extensions import LeavingCalls, answer_http_1_0, offer_extensions
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.state.router_log import log

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

    def __init__(self, *arguments: Any, registry: ClientConnections, **options: Any) -> None:
        super().__init__(*arguments, **options)
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
        super().on_response_complete()
        self._leaving.answered()
        if not self.pipeline:
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
