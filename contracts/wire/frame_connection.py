"""A TCP connection that carries frames both ways: four bytes of length, big-endian, then so many bytes.

A frame without bytes is a sign of life: each end sends one when it has had nothing else to say, and takes a peer from
which nothing comes for gone. A peer that reads nothing of what waits for it is taken for gone too, whatever it says:
else its part of this process's memory would grow as long as it lives. gRPC does the same with a task and several system
calls a message, which was a sixth of a router's time (docs/decisions/0052-router-worker-protocol.md).

**A listening socket** (`FrameListener`) accepts them; with certificates only from nodes of the cluster. A connection is
a *stranger* from its first packet until `release`: strangers are few, the oldest is cut for a newer one, so that
whoever connects and says nothing takes neither descriptors nor anybody's place.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from twinpool.contracts.credentials.node_tls import NodeTls
from twinpool.contracts.wire.socket_acceptor import SocketAcceptor

HEAD_BYTES = 4
OPENING_BYTES = 4096
"""Bytes of the largest frame that a stranger may send: the first one, which says who it is."""
TICKS = 4
"""Signs of life within the time after which a silent peer counts as gone."""
TURN_FRAMES = 8
"""Frames that are taken in one turn of the loop, so that whoever else uses the loop gets a turn of it in between."""
UNREAD_BYTES = 1024 * 1024
"""Bytes that wait for the peer above which `flows` says no."""


class FrameConnection(asyncio.Protocol):
    """One end of a connection. Used on one event loop, on which `on_frame` and `on_end` are called too.

    `on_end` is called once, with the reason, when the connection has ended other than by `close` and `abort`. What
    `on_frame` raises ends it. Both are to be set before the loop has its next turn.
    """

    def __init__(self, silence_s: float) -> None:
        """`silence_s`: seconds after which a peer that says nothing counts as gone."""
        self.on_frame: Callable[[bytes], None] = _ignored
        self.on_end: Callable[[str], None] = _ignored
        self.on_flow: Callable[[], None] | None = None
        """Called when `flows` says yes again."""
        self.max_bytes = OPENING_BYTES
        """Bytes of the largest frame that is taken."""
        self.flows = False
        """Whether the peer reads what is sent, so that more of it may be."""
        self._tick_s = silence_s / TICKS
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done when the socket is closed, or will never be opened."""
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._quiet = 0
        """Ticks in a row in which nothing came."""
        self._said = False
        self._sent_bytes = self._taken_bytes = 0
        """All that was sent, and what of it had left this process at the last tick."""
        self._unread_ticks = 0
        """Ticks in a row in which something waited for the peer and it took nothing."""
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        """Whether nothing is read, as frames that have come are still to be taken."""
        self._over = False

    def send(self, frame: bytes) -> None:
        """Send a frame; one to a connection that has ended is lost."""
        if self._transport is not None and not self._over:
            self._said = True
            self._sent_bytes += HEAD_BYTES + len(frame)
            self._transport.write(len(frame).to_bytes(HEAD_BYTES, "big") + frame)

    @property
    def unread_bytes(self) -> int:
        """Bytes that were sent and still wait in this process."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close(self, within_s: float) -> None:
        """End the connection after what was sent, at the latest `within_s` from now. Idempotent."""
        if self._stop() and self._transport is not None:
            self._transport.close()
            self._timer = self._loop.call_later(within_s, self._transport.abort)

    def abort(self) -> None:
        """End the connection at once. Idempotent."""
        self._stop()
        if self._transport is not None:
            self._transport.abort()

    def _stop(self) -> bool:
        """Stop to listen; returns False where that was so already."""
        if self._over:
            return False
        self._over = True
        self._data.clear()
        if self._timer is not None:
            self._timer.cancel()
        return True

    def fail(self, reason: str) -> None:
        """End the connection at once, for a reason that `on_end` is told. Idempotent."""
        if self._stop():
            if self._transport is not None:
                self._transport.abort()
            self.on_end(reason)

    def unmade(self) -> None:
        """Take note that its socket won't be opened. Does nothing where it was."""
        if self._transport is None:
            self.fail("the connection couldn't be made")
            self._set_lost()

    def _tick(self) -> None:
        # Ticks are counted and not seconds: a loop that stood still itself has one tick of it, not a silent peer.
        self._quiet += 1
        if self._quiet > TICKS:
            self.fail("nothing came from the other end, not even a sign of life")
            return
        waiting = self.unread_bytes
        taken = self._sent_bytes - waiting
        self._unread_ticks = self._unread_ticks + 1 if waiting and taken <= self._taken_bytes else 0
        self._taken_bytes = taken
        if self._unread_ticks > TICKS:
            self.fail(f"the other end reads nothing, and {waiting} bytes wait for it")
            return
        if not self._said:
            self.send(b"")
        self._said = False
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        if self._over:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(UNREAD_BYTES)
        self.flows = True
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def data_received(self, data: bytes) -> None:
        self._quiet = 0
        if self._over:
            return
        self._data += data
        if not self._paused:
            self._take(TURN_FRAMES)

    def _go_on(self) -> None:
        """Take the next of the frames that have come."""
        if self._paused and not self._over:
            self._take(TURN_FRAMES)

    def _take(self, most: int | None) -> None:
        """Take `most` frames of what has come, None: all. While some are left nothing is read."""
        try:
            left = self._take_frames(most)
        except Exception as error:  # Whatever it is: frames behind one that was lost mean nothing.
            self.fail(f"a frame can't be taken: {error!r}")
            return
        if self._over or self._transport is None:
            return
        if left != self._paused:
            (self._transport.pause_reading if left else self._transport.resume_reading)()
        self._paused = left
        if left:
            self._loop.call_soon(self._go_on)

    def _take_frames(self, most: int | None) -> bool:
        """Returns whether there are more than `most`."""
        waiting, begin, taken = self._data, 0, 0
        while len(waiting) - begin >= HEAD_BYTES and not self._over:
            size = int.from_bytes(waiting[begin : begin + HEAD_BYTES], "big")
            if size > self.max_bytes:
                self.fail(f"a frame of {size} bytes came, and {self.max_bytes} are allowed")
                return False
            end = begin + HEAD_BYTES + size
            if len(waiting) < end:
                break
            if taken == most:
                del self._data[:begin]
                return True
            if size:
                self.on_frame(bytes(waiting[begin + HEAD_BYTES : end]))
                taken += 1
            begin = end
        del self._data[:begin]
        return False

    def pause_writing(self) -> None:
        self.flows = False

    def resume_writing(self) -> None:
        self.flows = True
        if self.on_flow is not None and not self._over:
            self.on_flow()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._paused and not self._over:  # What came before the end is heard before it.
            self._transport = None
            self._take(None)
        self._set_lost()
        if self._timer is not None:
            self._timer.cancel()
        if self._stop():
            self.on_end(str(exc) if exc is not None else "the other end closed the connection")

    def _set_lost(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


def _ignored(said: object) -> None:
    """Take what nobody hears."""


HANDSHAKE_S = 10.0
"""How long TLS may take."""
STRANGERS = 64


class FrameListener:
    """Accepts connections on `bound` until it is closed. Used on the event loop on which it was made."""

    def __init__(
        self, bound: socket.socket, take: Callable[[FrameConnection], None], silence_s: float, tls: NodeTls | None
    ) -> None:
        """`take` is called with each connection before anything of it is read; `silence_s`: as `FrameConnection`
        takes it. `tls`: this node's, None: without TLS."""
        self._bound, self._take, self._silence_s, self._tls = bound, take, silence_s, tls
        self._strangers: dict[FrameConnection, asyncio.Task[None]] = {}
        self._acceptor = SocketAcceptor(bound, self._begin)

    def release(self, connection: FrameConnection) -> None:
        """Count a connection as a stranger no more: it was admitted, or has ended. Idempotent."""
        self._strangers.pop(connection, None)

    async def close(self) -> None:
        """Accept nothing any more, and cut strangers; admitted connections go on. Idempotent."""
        self._acceptor.close()
        while self._strangers:
            self._cut_oldest("the listener is closed")
        await self._acceptor.wait_closed()
        self._bound.close()

    def _begin(self, accepted: socket.socket, peer: Any) -> None:
        connection = FrameConnection(self._silence_s)
        self._take(connection)
        opening = self._open(accepted, connection)
        self._strangers[connection] = self._acceptor.begin(accepted, opening, lambda _: connection.unmade())
        if len(self._strangers) > STRANGERS:
            self._cut_oldest("others came, and its first frame hadn't")

    def _cut_oldest(self, reason: str) -> None:
        connection, task = next(iter(self._strangers.items()))
        self.release(connection)
        task.cancel()
        connection.fail(reason)

    async def _open(self, accepted: socket.socket, connection: FrameConnection) -> None:
        context = self._tls.server() if self._tls is not None else None
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection, accepted, ssl=context, ssl_handshake_timeout=HANDSHAKE_S if context else None
        )
