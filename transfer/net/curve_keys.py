"""Authentication of connections: CURVE on every socket that leaves the loopback interface.

All workers of a cluster derive one key pair from the cluster's secret. A CURVE client must know the server's public
key before it connects, and this key is never published, so only holders of the secret get through the handshake.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from twinpool.contracts.errors import LayoutMismatch
from twinpool.transfer.net.disconnects import DisconnectWatch, keep_alive


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The cluster's key pair, as Z85 text."""

    public: bytes
    secret: bytes

    @classmethod
    def from_secret(cls, secret: bytes) -> CurveKeys:
        """Derive the pair from at least 16 random bytes that all workers share."""
        if len(secret) < 16:
            raise ValueError("the cluster's secret needs at least 16 bytes")
        key = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"twinpool-curve").digest())
        return cls(zmq.curve_public(key), key)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` a CURVE server. To be called before its `bind`."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def call(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` a CURVE client. To be called before its `connect`."""
        socket.curve_serverkey = self.public
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


def dial(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve: CurveKeys | None, link_timeout_s: float
) -> tuple[zmq.Socket[bytes], DisconnectWatch]:
    """Open a PUSH socket to `endpoint`, and a watch on its connection. The socket never blocks its sender, and drops
    what is unsent when it is closed.

    Raises `LayoutMismatch` where `endpoint` is no ``tcp://HOST:PORT``.
    """
    socket = context.socket(zmq.PUSH)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.LINGER, 0)
    keep_alive(socket, link_timeout_s)
    if curve is not None:
        curve.call(socket)
    watch = DisconnectWatch(socket)
    try:
        if not endpoint.startswith("tcp://"):
            raise LayoutMismatch(f"a peer's endpoint must be tcp://HOST:PORT, got {endpoint!r:.80}")
        socket.connect(endpoint)
    except (zmq.ZMQError, LayoutMismatch) as error:
        watch.close()
        socket.close(linger=0)
        raise LayoutMismatch(f"no connection to {endpoint!r:.80}: {error}") from None
    return socket, watch


def bind(socket: zmq.Socket[bytes], host: str, curve: CurveKeys | None) -> str:
    """Bind to a free port of `host` and return the endpoint. Raises `ValueError` for a host off the loopback without
    keys."""
    if curve is not None:
        curve.serve(socket)
    elif not host.startswith("127.") and host != "localhost":
        raise ValueError(f"binding to {host} needs the cluster's secret: sockets off the loopback are authenticated")
    port = socket.bind_to_random_port(f"tcp://{host}")
    return f"tcp://{host}:{port}"
