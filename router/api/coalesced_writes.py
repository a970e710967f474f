"""Joins all writes to a socket within one turn of the event loop into one system call.

Uvicorn writes an answer's head and body apart, and the last event of a stream apart from its end. A write to a socket
wakes the client's process and is the most expensive thing that the router does for a request, so writes are joined.
What waits leaves in one callback for all sockets of the loop: a frame from a worker has tokens of many streams. More
than `JOINED_BYTES` of one socket leave at once, so that the server sees how much its client has yet to read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from twinpool.router.state.router_log import log

JOINED_BYTES = 256 * 1024
"""Bytes of one socket that wait to be joined."""


class JoinedWrites:
    """The transports with writes that leave before the loop waits again. One for each event loop."""

    def __init__(self) -> None:
        self._waiting: list[CoalescingTransport] = []

    def add(self, transport: CoalescingTransport, loop: asyncio.AbstractEventLoop) -> None:
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append(transport)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
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
            self._joined.add(self, self._loop)
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
