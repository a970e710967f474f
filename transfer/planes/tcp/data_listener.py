"""The reader's end of the data connections of plane `zmq`: accepts them, and stores what comes.

Each connection has a thread, which waits for bytes and has the kernel copy them straight into granted pages, outside
the interpreter's lock: one copy, and none on the thread that steps the worker. A connection of somebody who doesn't
know this reader's secret gets no thread, and is closed soon.

Revoking is exact. Bytes are stored in slices of at most `SLICE_BYTES` that have arrived already, each under its
connection's lock, and after the room was looked at again; `revoke` marks the room and passes through all locks. When it
returns nothing of the room is being stored, and nothing will be. Pages of a device are stored by copies that run on it
(`transfer.planes.tcp.bounce_buffers`): each is begun under the lock, and `revoke` waits for it there. A write is taken
in once the last of them is over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinpool.contracts.errors import WireError
from twinpool.contracts.wire.socket_acceptor import listening
from twinpool.transfer.net.sealed_stream import (
    HELLO_BYTES,
    PIECE_BYTES,
    TAG_BYTES,
    OpenedBody,
    SealedStream,
    accept_hello,
    draw_secret,
)
from twinpool.transfer.planes.tcp.bounce_buffers import BounceBuffer, Load, Staging, settle
from twinpool.transfer.planes.tcp.zmq_link import COMING, HEAD_BYTES, LENGTHS, MAX_ROWS, TAKEN, patient

log = logging.getLogger("twinpool.transfer")
SLICE_BYTES = 4 << 20
"""Bytes that are stored at a time; `revoke` waits for as much at most."""
_MIN_BYTES = 1 << 20
"""Bytes that a thread waits for, where so many are due, before it looks again."""
_PATIENCE_S = 0.2
"""Seconds that it waits for so many."""
_STRANGERS = 64
"""Connections that have not said whose they are; more are closed, the oldest first."""
_MAX = 1024
"""Connections."""


@dataclass(frozen=True, slots=True)
class LandingPart:
    """Where one pool's part of a write goes."""

    nbytes: int
    rows: Sequence[memoryview] | None
    """The memory that the bytes go to as they come; None where they have to be unpacked."""
    store: Callable[[memoryview], None]
    """Stores the part from one piece of memory."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where the body of one write goes."""

    revoked: Callable[[], bool]
    """Whether nothing of it may be stored any more; looked at under the connection's lock."""
    parts: Sequence[LandingPart]
    taken: Callable[[], None]
    """To be called when all of it is stored."""
    loads: Sequence[Load] | None = None
    """What goes through bounce buffers instead of to `parts`; None: nothing."""


Lookup = Callable[[bytes, int], Landing | None]
"""Reads a write's head, given the bytes of its body too. None: it can't be used, and its body is dropped. Called on any
connection's thread."""


@dataclass(eq=False)
class _Stranger:
    connection: socket.socket
    until: float
    salt: bytes
    """Which it was sent."""
    said: bytes = b""
    met: bool = False
    """Whether it is a writer, and has a thread."""


class DataListener:
    """All data connections of one rank of a reader."""

    def __init__(
        self,
        host: str,
        max_bytes: int,
        timeout_s: float,
        lookup: Lookup,
        sealed: bool,
        staging: Staging | None = None,
    ) -> None:
        """`max_bytes`: of the body of a write; a connection that announces more is cut. `sealed`: whether what comes
        is sealed. `staging`: the bounce buffers of landings that have loads."""
        self.secret = draw_secret()
        """What a writer must know."""
        self._max_bytes, self._timeout_s, self._lookup, self._sealed = max_bytes, timeout_s, lookup, sealed
        self.staging = staging
        self._door = listening(host, backlog=128)
        self._door.setblocking(False)
        host, port = self._door.getsockname()[:2]
        self.endpoint = f"tcp://{host}:{port}"
        self._lock = threading.Lock()
        """Held to look at and change what follows."""
        self._connections: set[_Connection] = set()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Return when no slice is being stored that was begun before this call."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with connection.landing:
                settle(connection.buffers)

    def close(self) -> None:
        """End all connections. When this returns, nothing is stored any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        os.close(self._wake)

    def ended(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    # ------------------------------------------------------------ the thread that accepts

    def _accept(self) -> None:
        strangers: dict[int, _Stranger] = {}
        poller = select.poll()
        poller.register(self._door, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while not self._closed:
            late = min((s.until for s in strangers.values()), default=None)
            events = dict(poller.poll(None if late is None else max(0.0, late - time.monotonic()) * 1000 + 1))
            for fd, stranger in list(strangers.items()):
                over = time.monotonic() >= stranger.until or (fd in events and self._greeted(stranger))
                if over or len(strangers) > _STRANGERS:
                    poller.unregister(fd)
                    del strangers[fd]
                    if not stranger.met:
                        stranger.connection.close()
            if self._door.fileno() in events:
                with contextlib.suppress(OSError):  # It went away again, or there are too many open files.
                    connection, _ = self._door.accept()
                    connection.setblocking(False)
                    salt = draw_secret()
                    connection.send(salt)
                    until = time.monotonic() + self._timeout_s
                    strangers[connection.fileno()] = _Stranger(connection, until, salt)
                    poller.register(connection, select.POLLIN)
        for stranger in strangers.values():
            stranger.connection.close()
        self._door.close()

    def _greeted(self, stranger: _Stranger) -> bool:
        """Hear a stranger. Returns whether it is none any more: it is met, and has a thread, or there is nothing more
        to hear."""
        try:
            said = stranger.connection.recv(HELLO_BYTES - len(stranger.said))
        except BlockingIOError:
            return False
        except OSError:
            return True
        stranger.said += said
        if said and len(stranger.said) < HELLO_BYTES:
            return False
        key = accept_hello(self.secret, stranger.salt, stranger.said)
        if key is None:
            return True
        with self._lock:
            if len(self._connections) >= _MAX:
                return True
            connection = _Connection(self, stranger.connection, key if self._sealed else None)
            self._connections.add(connection)
        try:
            connection.start()
        except (OSError, RuntimeError) as error:  # It is gone again, or there can be no more threads.
            log.warning("a data connection can't be taken: %s", error)
            self.ended(connection)
            return True
        stranger.met = True
        return True

    @property
    def bounds(self) -> tuple[int, float]:
        return self._max_bytes, self._timeout_s

    def look_up(self, head: bytes, nbytes: int) -> Landing | None:
        return self._lookup(head, nbytes)


@dataclass(eq=False)
class _Reading:
    """What one connection reads into; kept, as memory that was used before is several times as fast as new memory."""

    head: bytearray = field(default_factory=lambda: bytearray(HEAD_BYTES + TAG_BYTES))
    pieces: bytearray = field(default_factory=lambda: bytearray(2 * (PIECE_BYTES + TAG_BYTES)))
    packed: bytearray = field(default_factory=bytearray)

    def room_for(self, nbytes: int) -> memoryview:
        if len(self.packed) < nbytes:
            self.packed = bytearray(nbytes)
        return memoryview(self.packed)[:nbytes]


class _Connection:
    """One writer's connection, and the thread that reads from it."""

    def __init__(self, listener: DataListener, connection: socket.socket, key: bytes | None) -> None:
        self._listener, self._socket = listener, connection
        self._max_bytes, self._timeout_s = listener.bounds
        self._stream = SealedStream(key) if key is not None else None
        self._reading = _Reading()
        self._poller, self._least = select.poll(), 1
        self._poller.register(connection, select.POLLIN)
        self.landing = threading.Lock()
        """Held while a slice is stored, or its copy to a device is begun."""
        self.buffers: Sequence[BounceBuffer] = ()
        """The bounce buffers that copies to pages may be under way from; changed under `landing`."""
        self._thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)

    def start(self) -> None:
        patient(self._socket, self._timeout_s)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    # ------------------------------------------------------------ on its thread

    def _run(self) -> None:
        try:
            while True:
                self._write()
        except (OSError, EOFError):
            pass  # Its writer knows by itself: no answer comes any more.
        except (WireError, RuntimeError) as error:  # The latter is a copy to a device that failed.
            log.warning("a data connection was cut: %.200s", error)
        finally:
            self._socket.close()
            self._listener.ended(self)

    def _write(self) -> None:
        """Take in one write. Raises `EOFError` where the writer has gone, and `WireError` for what can't be read on."""
        lengths = bytearray(LENGTHS.size)
        self._fill(memoryview(lengths), idle=True)
        head_bytes, nbytes = LENGTHS.unpack(lengths)
        if not (0 < head_bytes <= HEAD_BYTES and nbytes <= self._max_bytes):
            raise WireError(f"a write of {nbytes} bytes with a head of {head_bytes}")
        head = memoryview(self._reading.head)[: head_bytes + (TAG_BYTES if self._stream else 0)]
        self._fill(head)
        if self._stream is not None:
            opened = self._reading.room_for(head_bytes)
            head = self._stream.open(head, opened, bytes(lengths))
        landing = self._listener.look_up(bytes(head), nbytes)
        body = OpenedBody(self._stream, self._fill, self._reading.pieces, nbytes) if self._stream else None
        if landing is None:
            self._drop(nbytes, body)
        elif landing.loads is not None:
            self._bounce(landing, landing.loads, nbytes, body)
        elif body is not None:
            self._store(landing, nbytes, landing.parts, body)
        else:
            for part in landing.parts:
                if part.rows is not None:
                    self._land(landing, part.rows)
                else:
                    self._store(landing, part.nbytes, [part], None)
        if landing is not None:
            landing.taken()
        self._socket.sendall(TAKEN)

    def _land(self, landing: Landing, rows: Sequence[memoryview]) -> None:
        """Have the kernel store what comes in `rows`, slice by slice."""
        left, due = deque(rows), sum(len(row) for row in rows)
        while left:
            self._await(least=min(due, _MIN_BYTES))
            with self.landing:
                if landing.revoked():
                    break
                try:
                    got = self._socket.recvmsg_into(_slice(left), 0, socket.MSG_DONTWAIT)[0]
                except BlockingIOError:
                    continue
            if not got:
                raise EOFError
            due -= got
            while got:
                if got < len(left[0]):
                    left[0] = left[0][got:]
                    break
                got -= len(left.popleft())
        self._drop(due, None)

    def _bounce(self, landing: Landing, loads: Sequence[Load], nbytes: int, body: OpenedBody | None) -> None:
        """Take in `loads` one by one, of `nbytes` together, and have each copied to its pages while the next one comes.
        When this returns, all of them have been, or nothing more of the room will be."""
        assert self._listener.staging is not None
        buffers = self._listener.staging.buffers()
        try:
            for number, load in enumerate(loads):
                buffer = buffers[number % 2]
                buffer.over.wait()
                self._read(buffer.bytes[: load.nbytes], body)
                nbytes -= load.nbytes
                with self.landing:
                    if landing.revoked():
                        break
                    self.buffers = buffers
                    buffer.scatter(load)
        finally:
            settle(buffers)
        for buffer in buffers:
            buffer.over.wait()
        self._drop(nbytes, body)

    def _store(self, landing: Landing, nbytes: int, parts: Sequence[LandingPart], body: OpenedBody | None) -> None:
        """Take in `parts`, of `nbytes` together, and then store them from there."""
        packed = self._reading.room_for(nbytes)
        self._read(packed, body)
        with self.landing:
            if landing.revoked():
                return
            at = 0
            for part in parts:
                part.store(packed[at : at + part.nbytes])
                at += part.nbytes

    def _read(self, into: memoryview, body: OpenedBody | None) -> None:
        """Read as much of a write's body as `into` has."""
        if body is None:
            self._fill(into)
        else:
            body.read(into)

    def _drop(self, nbytes: int, body: OpenedBody | None) -> None:
        """Drop what comes of a write's body, of which `nbytes` weren't read yet."""
        if body is not None:
            body.drop()
            return
        scratch = self._reading.room_for(min(nbytes, SLICE_BYTES))
        while nbytes:
            got = min(nbytes, SLICE_BYTES)
            self._fill(scratch[:got])
            nbytes -= got

    def _fill(self, into: memoryview, idle: bool = False) -> None:
        """Read as much as `into` has. `idle`: whether the writer may take its time to begin."""
        at = 0
        while at < len(into):
            self._await(idle and not at, min(len(into) - at, _MIN_BYTES))
            try:
                got = self._socket.recv_into(into[at:], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if not got:
                raise EOFError
            at += got

    def _await(self, idle: bool = False, least: int = 1) -> None:
        """Wait until `least` bytes have come, or the connection has ended. Raises `TimeoutError` where a writer stops
        in mid-write for too long."""
        if least != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least
        if idle:
            self._poller.poll()
        elif not self._poller.poll(_PATIENCE_S * 1000):
            # It is slow, perhaps: the writer is told that something comes all the same.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._least = 1
            if not self._poller.poll(self._timeout_s * 1000):
                raise TimeoutError(f"nothing came for {self._timeout_s:g} s")
            self._socket.sendall(COMING)


def _slice(rows: deque[memoryview]) -> list[memoryview]:
    """Return the first rows, of `SLICE_BYTES` together at most."""
    out, size = list[memoryview](), 0
    for row in rows:
        if len(out) == MAX_ROWS or size >= SLICE_BYTES:
            break
        out.append(row[: SLICE_BYTES - size])
        size += len(out[-1])
    return out
