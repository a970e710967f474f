"""Every client's connection: how many there may be, how long a request may take to come, and who goes first.

A connection is a descriptor, and a router that has none left can reach no worker and answers no probe. So there is a
bound below the process's own. Beyond it the connection goes that has waited longest without a whole request: idle ones
and those that send their headers byte by byte alike. Where all are at work, a few more are let in for the paths that
say how the router is (`OPEN_PATHS`); everything else hears 503 there.

Deadlines are kept by one sweep a second over all connections, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from contracts.config.router_config import RouterConfig
from router.api.asgi_exchange import AsgiReceive, AsgiScope, AsgiSend
from router.api.coalesced_writes import CoalescingHttpProtocol
from router.openai.api_errors import ApiError
from router.state.router_log import log

OPEN_PATHS = frozenset({"/live", "/health", "/ping", "/metrics"})
RESERVE = 16
"""Connections above the bound, for `OPEN_PATHS`."""
HEAD_BYTES = 64 * 1024
"""Of a request's line and headers; some more may have come with them."""
CLOSE_S = 10.0
"""How long a connection that is being closed may take to get rid of what it was sent."""
SWEEP_S = 1.0

ASGIApp = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]


def descriptor_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_descriptor_limit(most: int = 65_536) -> None:
    """Take what the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit(config: RouterConfig, descriptors: int | None = None) -> int:
    """Connections that there may be with so many descriptors (None: this process's): the rest is for workers, the
    controller, readers, logs, and what is being accepted."""
    have = descriptor_limit() if descriptors is None else descriptors
    if have == resource.RLIM_INFINITY:
        return config.max_connections
    return max(1, min(config.max_connections, have * 3 // 4 - RESERVE - 32))


class ClientConnections:
    """The connections of one router; used from its event loop."""

    def __init__(self, config: RouterConfig, limit: int | None = None) -> None:
        self._config = config
        self.limit = connection_limit(config) if limit is None else limit
        self.all: set[BoundedHttpProtocol] = set()
        self.waiting: OrderedDict[BoundedHttpProtocol, None] = OrderedDict()
        """Those without a whole request, by how long they have been so."""
        self.accepted = self.closed_idle = self.closed_late = self.refused = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def full(self) -> bool:
        return len(self.all) > self.limit

    def opened(self, connection: BoundedHttpProtocol) -> bool:
        """Count one more; returns whether it may be used for everything."""
        self.accepted += 1
        self.all.add(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_again)
        if self.full and self.waiting:
            oldest, _ = self.waiting.popitem(last=False)
            self.all.discard(oldest)  # its place is free before its end has been heard
            self.closed_idle += 1
            oldest.cut()
        self.waiting[connection] = None
        if len(self.all) > self.limit + RESERVE:
            self.refused += 1
            connection.cut()
        return not self.full

    @property
    def backlog(self) -> int:
        """Connections that the system may keep for us: all of them may be accepted at once, before one is counted."""
        return max(16, min(2048, self.limit // 4))

    def closed(self, connection: BoundedHttpProtocol) -> None:
        self.all.discard(connection)
        self.waiting.pop(connection, None)
        if not self.all and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def busy(self, connection: BoundedHttpProtocol) -> None:
        """Its request's headers are whole."""
        self.waiting.pop(connection, None)

    def idle(self, connection: BoundedHttpProtocol) -> None:
        """Its answer is complete."""
        if connection in self.all:
            self.waiting[connection] = None

    def metrics(self) -> Iterator[Metric]:
        have = GaugeMetricFamily("twinpool_http_connections", "Clients' connections", labels=["state"])
        have.add_metric(["open"], len(self.all))
        have.add_metric(["waiting"], len(self.waiting))
        yield have
        text = "Connections closed: idle ones for others, late ones, those above every bound"
        closed = CounterMetricFamily("twinpool_http_connections_closed", text, labels=["why"])
        closed.add_metric(["idle"], self.closed_idle)
        closed.add_metric(["late"], self.closed_late)
        closed.add_metric(["refused"], self.refused)
        yield closed

    def _sweep_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_again)
        self.sweep(asyncio.get_running_loop().time())

    def sweep(self, now: float) -> None:
        """Close what is late."""
        for connection in list(self.all):
            late = connection.late(now, self._config)
            if late:
                self.closed_late += 1
                log("connection closed", reason=late, client=connection.client)


class BoundedHttpProtocol(CoalescingHttpProtocol):
    """Uvicorn's protocol with a bound on connections and deadlines for what clients send and take."""

    registry: ClientConnections

    def __init__(self, *arguments: Any, registry: ClientConnections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.registry = registry
        self._began: float | None = None
        """When the first byte of the request came that isn't whole yet."""
        self._body_began: float | None = None
        self._body_bytes = 0
        self._head_bytes = 0
        self._stuck_since: float | None = None
        """Since when the client takes nothing."""
        self._closing_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.registry.opened(self):
            self.app = _only_open_paths(self.app)
            self.timeout_keep_alive = 1
        # Whoever connects and says nothing has as long as one that was answered.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self.registry.closed(self)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def cut(self) -> None:
        """Close at once, whatever is under way."""
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

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_began, self._head_bytes = None, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            self.registry.idle(self)

    def pause_writing(self) -> None:
        self._stuck_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck_since = None
        super().resume_writing()

    def late(self, now: float, config: RouterConfig) -> str | None:
        """Close the connection if it is late with something; returns with what."""
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
        if self.flow.read_paused:  # it is the router that doesn't read
            return False
        return now - self._body_began > config.body_timeout_s + self._body_bytes / config.body_bytes_per_s

    def _refuse(self, status: int, message: str) -> None:
        """Answer outside of the application, where it hasn't begun to, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = ApiError(status, message, "invalid_request_error", "too_slow" if status == 408 else None).to_json()
            head = b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _only_open_paths(app: ASGIApp) -> ASGIApp:
    """`app` for a connection above the bound."""

    async def limited(scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, send)
            return
        failure = ApiError(
            503, "the router has as many connections as it takes; try again later, or keep connections for several "
            "requests", "server_error", "too_many_connections",
        )  # fmt: skip
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
