"""The writer's end of one data connection of plane `zmq`: pages go down a plain TCP socket, on a thread of their own.

On the wire, after the greeting of `transfer.net.connection_keys`:

    writer   length of the head (4 bytes), length of the body (8 bytes), the head (msgpack), the body: rows of pages
    reader   1 for each write that it has taken in, 0 now and then while a write comes slowly

Off the loopback the head and each piece of the body are sealed (`transfer.net.sealed_stream`). A write is done when the
reader has taken it in. Where the connection is cut, or the reader takes nothing in for `transfer.link_timeout_s`, all
writes that are under way on it fail.
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

from twinpool.transfer.net import connection_keys
from twinpool.transfer.net.sealed_stream import TAG_BYTES, SealedBody, SealedStream
from twinpool.transfer.planes.data_plane import SentCounts
from twinpool.transfer.planes.posted_write import PostedWrite

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
        while len(salt) < connection_keys.SALT_BYTES:
            said = self._socket.recv(connection_keys.SALT_BYTES - len(salt))
            if not said:
                raise ConnectionError("the reader has closed it")
            salt += said
        mine = connection_keys.draw()
        if self._door.sealed:
            self._stream = SealedStream(connection_keys.key(self._door.secret, salt, mine))
        self._send([memoryview(connection_keys.hello(self._door.secret, salt, mine))])

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
