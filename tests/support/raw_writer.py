"""A reader of plane `zmq` or `staged`, and a writer that says what a test likes, byte by byte: bare sockets, nothing
of the production link."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import torch

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.sealed_stream import SALT_BYTES, draw_secret, writer_hello
from twinpool.transfer.net.zmq_sockets import CurveKeys
from twinpool.transfer.planes.data_plane import SLOT_BYTES, RoomTarget
from twinpool.transfer.planes.tcp.zmq_plane import ZmqPlane


class RawWriter:
    """One data connection to a reader."""

    def __init__(self, plane: ZmqPlane, secret: bytes | None = None) -> None:
        (part,) = plane.describe()["ranks"]
        host, _, port = part["pages"].removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 60)
        self.salt = self._exactly(SALT_BYTES)
        self.mine = draw_secret()
        self.socket.sendall(writer_hello(secret or part["secret"], self.salt, self.mine))

    def begin(self, head: bytes, nbytes: int) -> None:
        """Say the head of a write, whose body has `nbytes` bytes."""
        self.socket.sendall(struct.pack("!IQ", len(head), nbytes) + head)

    def write(self, head: Any, *parts: bytes) -> None:
        """Send a whole write, and wait until the reader has taken it in."""
        packed = head if isinstance(head, bytes) else msgpack.packb(head)
        self.begin(packed, sum(len(part) for part in parts))
        self.socket.sendall(b"".join(parts))
        assert self._exactly(1) == b"\1"

    @property
    def cut(self) -> bool:
        """Whether the reader closes the connection, waited for a while."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _exactly(self, count: int) -> bytes:
        out = b""
        while len(out) < count:
            said = self.socket.recv(count - len(out))
            if not said:
                raise EOFError
            out += said
        return out

    def close(self) -> None:
        self.socket.close()


def until(come: Callable[[], object], what: str) -> None:
    """Wait until something has come, for a minute at most."""
    end = time.monotonic() + 60
    while not come():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.001)


def tcp_config(link_timeout_s: float, bounce_bytes: int | None = None) -> TransferConfig:
    """Of plane `zmq`, or of `staged` with `bounce_bytes`."""
    if bounce_bytes is None:
        return TransferConfig("zmq", link_timeout_s=link_timeout_s)
    return TransferConfig("staged", link_timeout_s=link_timeout_s, bounce_bytes=bounce_bytes)


@contextmanager
def tcp_reader(
    target: RoomTarget, spec: PoolSetSpec, curve: CurveKeys | None = None, bounce_bytes: int | None = None
) -> Iterator[tuple[ZmqPlane, PoolSet]]:
    """A reader that has granted `target`, of plane `zmq`, or of `staged` with `bounce_bytes`."""
    plane = ZmqPlane(tcp_config(5.0, bounce_bytes), FaultsConfig(), "127.0.0.1", curve)
    pools = PoolSet(spec, spec.even(9))
    plane.register(pools, torch.zeros(2, SLOT_BYTES, dtype=torch.uint8))
    plane.permit(target)
    try:
        yield plane, pools
    finally:
        plane.close()


@contextmanager
def writing(plane: ZmqPlane) -> Iterator[RawWriter]:
    writer = RawWriter(plane)
    try:
        yield writer
    finally:
        writer.close()


def revoke_waits_for(go: threading.Event, plane: ZmqPlane, room: RoomId) -> None:
    """Revoke a room on a thread: that ends when `go` is set, and not before."""
    revoked = threading.Event()

    def revoke() -> None:
        plane.revoke(room)
        revoked.set()

    revoking = threading.Thread(target=revoke)
    revoking.start()
    assert not revoked.wait(0.05)
    go.set()
    revoking.join(60)
    assert revoked.is_set()
