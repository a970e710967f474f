"""The writer's side of planes `zmq` and `staged`: pages go down data connections, slots and notices down a ZMQ socket.

A data connection (`DataConnection`) is a plain TCP socket with a thread of its own. On the wire, after the greeting of
`transfer.net.sealed_stream`:

    writer   length of the head (4 bytes), length of the body (8 bytes), the head (msgpack), the body: rows of pages
    reader   1 for each write that it has taken in, 0 now and then while a write comes slowly

Off the loopback the head and each piece of the body are sealed. A write is done when the reader has taken it in. Where
the connection is cut, or the reader takes nothing in for `transfer.link_timeout_s`, all writes that are under way on it
fail.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgpack
import torch
import zmq

from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.fault_injection import WriteFaults
from twinpool.transfer.net.sealed_stream import (
    SALT_BYTES,
    TAG_BYTES,
    SealedBody,
    SealedStream,
    connection_key,
    draw_secret,
    writer_hello,
)
from twinpool.transfer.net.zmq_sockets import DisconnectWatch
from twinpool.transfer.planes.data_plane import PageWrite, PostedWrite, RoomTarget, SentCounts, SlotWrite
from twinpool.transfer.planes.tcp.bounce_buffers import Staging, StreamPart
from twinpool.transfer.planes.tcp.page_stream import PoolStream, bytes_of

SLOT_FRAME, NOTICE_FRAME = b"S", b"N"


class PageWay(NamedTuple):
    """The way of pages to one rank of a reader."""

    door: DataDoor
    """Where its data connections are taken."""
    connections: int
    """How many of them writes are spread over."""
    frame_bytes: int
    """The most bytes of a pool in one write."""
    staging: Staging | None
    """The bounce buffers that pages go through; None: they are sent from where they lie."""


class ZmqLink:
    """The `WriteLink` of planes `zmq` and `staged`. A notice may overtake pages, so it says how many writes go before
    it. Writes may be posted on another thread than notices are sent on."""

    layered = True
    ranked = False

    def __init__(
        self,
        source: PoolSet,
        socket: zmq.Socket[bytes],
        watch: DisconnectWatch,
        pages: PageWay,
        streams: dict[str, PoolStream],
        ranks: tuple[int, int],
        faults: WriteFaults,
        wake: Callable[[], None],
    ) -> None:
        """`socket`, `watch`: of notices and metadata slots. `streams`: what is written to the reader's rank, by pool.
        `ranks`: this writer's rank, and how many its worker has (`rank_fan.packed_ranks`). `wake` is called when a
        write has ended."""
        self.frame_bytes: int | None = pages.frame_bytes
        self.sent = SentCounts()
        self._ranks, self._streams, self._door, self._wake = ranks, streams, pages.door, wake
        self._source, self._staging = source, pages.staging
        self._socket, self._watch, self._faults = socket, watch, faults
        self._connections: list[DataConnection | None] = [None] * pages.connections
        self._cut = False
        self._one = threading.RLock()
        """Held to use the socket and the connections."""

    def admit(self, target: RoomTarget) -> None: ...  # The reader itself looks up what it has granted.

    def order_parts(self, write: PageWrite | SlotWrite, after: Sequence[Completion]) -> Completion:
        return DONE

    def post(self, write: PageWrite | SlotWrite) -> Completion:
        target = write.target
        if isinstance(write, SlotWrite):
            with self._one:
                self._socket.send_multipart([SLOT_FRAME, msgpack.packb((target.room, target.ticket)), write.data])
            return DONE
        parts, runs = list[StreamPart](), list[tuple[str | int, ...]]()
        for pool, run in write.runs.items():
            if (stream := self._streams.get(pool)) is not None:
                layers = () if write.layers is None else (write.layers[pool].start, write.layers[pool].stop)
                part = stream.of_layers(range(*layers)) if layers else stream
                if part.mine:  # Else these layers are other ranks'.
                    parts.append((part, run.indices))
                    runs.append((pool, run.first, len(run), *layers))
        head = msgpack.packb((target.room, target.ticket, runs, *self._ranks, write.number))
        nbytes = sum(len(pages) * stream.page_bytes for stream, pages in parts)
        posted = PostedWrite(self._wake)
        body = partial(self._body, parts, nbytes) if self._staging is None else partial(self._bounced, parts)
        outgoing = OutgoingWrite(head, body, nbytes, posted)
        with self._one:
            try:
                while not self._connection().send(outgoing):
                    self._look()
            except OSError as error:  # Too many open files, say. Whoever posts knows failed writes by `RuntimeError`.
                raise RuntimeError(f"no connection for pages can be opened: {error}") from None
        return posted

    def _connection(self) -> DataConnection:
        """Return the connection with the fewest writes under way, opened if need be."""
        at = min(range(len(self._connections)), key=lambda n: len(self._connections[n] or ()))
        connection = self._connections[at]
        if connection is None:
            connection = self._connections[at] = DataConnection(self._door, self._faults.in_write, self.sent)
        return connection

    def _body(self, parts: Sequence[StreamPart], nbytes: int) -> Generator[Sequence[memoryview]]:
        """Yield the bytes of these pages in the order in which they travel, in two halves."""
        rows = self._rows(parts, nbytes)
        half = len(rows) // 2
        yield rows[:half]
        yield rows[half:]

    def _bounced(self, parts: Sequence[StreamPart]) -> Generator[Sequence[memoryview]]:
        """Yield the same bytes out of bounce buffers, the first load in two halves."""
        assert self._staging is not None
        with contextlib.closing(self._staging.gathered(parts)) as gathered:
            for number, (buffer, load) in enumerate(gathered):
                for piece in load.pieces:
                    if piece.first:
                        self._faults.after_seal(buffer.of(piece), 0)
                ready = buffer.bytes[: load.nbytes]
                half = 0 if number else len(ready) // 2
                if half:
                    yield [ready[:half]]
                yield [ready[half:]]

    def _rows(self, parts: Sequence[StreamPart], nbytes: int) -> Sequence[memoryview]:
        """Return the bytes of these pages in the order in which they travel; sealed ones in one piece."""
        region = bytes_of(self._source.region)
        out: list[memoryview] = []
        packed = torch.empty(nbytes if self._door.sealed else 0, dtype=torch.uint8)
        at = 0
        for stream, indices in parts:
            size = len(indices) * stream.page_bytes
            # What is damaged on purpose is a copy: the pages themselves stay right.
            rows = None if self._door.sealed or self._faults.corrupts else stream.rows(region, indices)
            if rows is not None:
                out += rows
                continue
            part = packed[at : at + size] if self._door.sealed else torch.empty(size, dtype=torch.uint8)
            stream.pack(self._source.region, indices, part)
            self._faults.after_seal(part, 0)
            at += size
            if not self._door.sealed:
                out.append(bytes_of(part))
        return [bytes_of(packed)] if self._door.sealed else out

    def notify(self, room: RoomId, data: bytes, writes: int = 0) -> None:
        with self._one:
            self._socket.send_multipart([NOTICE_FRAME, msgpack.packb((room, writes, self._ranks[1])), data])

    def cut(self) -> bool:
        with self._one:
            self._look()
            cut, self._cut = self._cut, False
        return self._watch.cut() or cut

    def _look(self) -> None:
        """Forget connections that were cut; the next write opens new ones."""
        for at, connection in enumerate(self._connections):
            if connection is not None and connection.failed:
                connection.close()
                self._connections[at], self._cut = None, True

    @property
    def up(self) -> bool:
        return self._watch.was_up

    def sever(self) -> None:
        with self._one:
            for at, connection in enumerate(self._connections):
                if connection is not None:
                    connection.close()
                    self._connections[at] = None

    def close(self) -> None:
        self.sever()
        self._watch.close()
        with self._one:
            self._socket.close(linger=0)


LENGTHS = struct.Struct("!IQ")
"""Bytes of a write's head, and of its body."""
HEAD_BYTES = 64 << 10
"""The longest head."""
TAKEN, COMING = b"\1", b"\0"
"""What the reader answers for each write, and what it says while one comes slowly."""
MAX_ROWS = 1024
"""Pieces of memory that one system call takes."""


@dataclass(frozen=True, slots=True)
class DataDoor:
    """Where one rank of a reader takes data connections, and how."""

    address: tuple[str, int]
    secret: bytes
    """What a writer must know."""
    sealed: bool
    """Whether what is sent is sealed."""
    timeout_s: float
    """How long the other end may be silent."""


@dataclass(eq=False)
class OutgoingWrite:
    """A write that waits to be sent, or for the reader's answer."""

    head: bytes
    body: Callable[[], Generator[Sequence[memoryview]]]
    """Makes the body, piece by piece as it is sent: each may lie in memory that the next one uses."""
    nbytes: int
    """Bytes of the body."""
    posted: PostedWrite
    at: float = field(default_factory=time.monotonic)
    """When it was posted."""


class DataConnection:
    """One connection to one reader. Opened with the first write; after it was cut, a new one takes its place."""

    def __init__(
        self,
        door: DataDoor,
        half_sent: Callable[[], None],
        counts: SentCounts,
    ) -> None:
        """`half_sent` is called in the middle of each write, after the first piece of its body."""
        self._door, self._timeout_s = door, door.timeout_s
        self._stream: SealedStream | None = None
        self._half_sent, self._counts = half_sent, counts
        self._waiting: deque[OutgoingWrite] = deque()
        self._unanswered: deque[OutgoingWrite] = deque()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        """Held to queue a write, and to end the connection: no write is queued on one that has ended."""
        self.failed = ""
        """Why it ended; empty while it hasn't."""
        self._thread = threading.Thread(target=self._run, name="kv-send", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """The number of writes that are under way on it."""
        return len(self._waiting) + len(self._unanswered)

    def send(self, write: OutgoingWrite) -> bool:
        """Queue a write; False, with nothing queued, where the connection has ended."""
        with self._lock:
            if self.failed:
                return False
            self._waiting.append(write)
            os.eventfd_write(self._wake, 1)
        return True

    def close(self, reason: str = "the link was closed") -> None:
        """End the connection. When this returns, no page is read any more."""
        self._end(reason)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _end(self, reason: str) -> None:
        with self._lock:
            self.failed = self.failed or reason
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        with contextlib.suppress(OSError):  # It may never have been connected.
            self._socket.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------ on its thread

    def _run(self) -> None:
        try:
            self._open()
            self._work()
        except (OSError, ConnectionError, RuntimeError) as error:  # The last is a copy from a device that failed.
            self._end(str(error) or type(error).__name__)
        finally:
            self._socket.close()
            failed = RuntimeError(f"the connection that pages take was cut: {self.failed or 'it ended'}")
            with self._lock:
                self.failed = self.failed or "it ended"
                left = [*self._unanswered, *self._waiting]
                self._unanswered.clear()
                self._waiting.clear()
            for write in left:
                write.posted.end(failed)

    def _open(self) -> None:
        self._socket.settimeout(self._timeout_s)
        self._socket.connect(self._door.address)
        patient(self._socket, self._timeout_s)
        self._counts.opened += 1
        salt = b""
        while len(salt) < SALT_BYTES:
            said = self._socket.recv(SALT_BYTES - len(salt))
            if not said:
                raise ConnectionError("the reader has closed it")
            salt += said
        mine = draw_secret()
        if self._door.sealed:
            self._stream = SealedStream(connection_key(self._door.secret, salt, mine))
        self._send([memoryview(writer_hello(self._door.secret, salt, mine))])

    def _work(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        heard = time.monotonic()
        while not self.failed:
            events = dict(poller.poll(self._timeout_s * 1000 / 4 if self._unanswered else None))
            if self._wake in events:
                os.eventfd_read(self._wake)
            if self._socket.fileno() in events:
                self._answers()
                heard = time.monotonic()
            while self._waiting and not self.failed:
                if not self._unanswered:
                    heard = time.monotonic()
                write = self._waiting[0]
                self._unanswered.append(write)
                self._waiting.popleft()
                self._write(write)
                heard = time.monotonic()
                self._answers(wait=False)
            if self._unanswered and time.monotonic() - heard > self._timeout_s:
                raise ConnectionError(f"the reader took nothing in for {self._timeout_s:g} s")

    def _answers(self, wait: bool = True) -> bool:
        """Take in answers. Raises `ConnectionError` where the reader has gone."""
        try:
            said = self._socket.recv(4096, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        taken = said.count(TAKEN)
        if not said or taken > len(self._unanswered):
            raise ConnectionError("the reader has closed it")
        now = time.monotonic()
        for _ in range(taken):
            write = self._unanswered.popleft()
            self._counts.writes += 1
            self._counts.nbytes += write.nbytes
            self._counts.waited_s += now - write.at
            write.posted.end()
        return True

    def _write(self, write: OutgoingWrite) -> None:
        start = time.monotonic()
        lengths = LENGTHS.pack(len(write.head), write.nbytes)
        head: memoryview = memoryview(write.head)
        if self._stream is not None:
            head = self._stream.seal(write.head, memoryview(bytearray(len(write.head) + TAG_BYTES)), lengths)
        sealing = SealedBody(self._stream, self._send, write.nbytes) if self._stream is not None else None
        ahead = [memoryview(lengths), head]
        with contextlib.closing(write.body()) as body:
            for number, rows in enumerate(body):
                if sealing is None:
                    self._send([*ahead, *rows])
                else:
                    self._send(ahead)
                    sealing.send(rows)
                ahead = []
                if not number:
                    self._half_sent()
        if ahead:  # There is nothing behind it.
            self._send(ahead)
        self._counts.busy_s += time.monotonic() - start

    def _send(self, rows: Sequence[memoryview]) -> None:
        """Send all of `rows`. Raises `OSError` where nothing leaves for the time-out."""
        left = deque(row for row in rows if len(row))
        while left:
            chunk = [left[n] for n in range(min(MAX_ROWS, len(left)))]
            sent = self._socket.sendmsg(chunk)
            while sent:
                if sent < len(left[0]):
                    left[0] = left[0][sent:]
                    break
                sent -= len(left.popleft())


def patient(connected: socket.socket, timeout_s: float) -> None:
    """Have calls of a connected socket wait in the kernel, `timeout_s` seconds at most, and have the kernel cut the
    connection when the other end's host is silent for that long."""
    connected.settimeout(None)
    whole, micro = divmod(int(timeout_s * 1e6), 1_000_000)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, micro))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, int(timeout_s))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * timeout_s)))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
