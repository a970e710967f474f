"""ZMQ sockets between workers: how cut connections are noticed, and who may connect at all.

TCP loses nothing of a connection that lives. When one is cut, what was under way may be lost, while ZMQ connects again
by itself and goes on with what comes after: a hole in the middle of a conversation. So sockets between workers send
heartbeats, which find a dead connection and a silent one within `transfer.link_timeout_s`, and the worker that sends on
a socket asks its `DisconnectWatch`. The rule is then the same everywhere: messages that do no harm when they arrive
twice are sent again (grants, aborts, confirmations, last words); pages and the notices of them are not, and their rooms
are given up.

Every socket that leaves the loopback interface is authenticated by CURVE. All workers of a cluster derive one key pair
from the cluster's secret. A CURVE client must know the server's public key before it connects, and this key is never
published, so only holders of the secret get through the handshake.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from twinpool.contracts.errors import LayoutMismatch


def keep_alive(socket: zmq.Socket[bytes], link_timeout_s: float) -> None:
    """Have a connection cut that is silent for `link_timeout_s` seconds; the connecting end then connects again.

    To be called before `bind` or `connect`.
    """
    whole_ms = max(3, int(1000 * link_timeout_s))
    socket.set(zmq.HEARTBEAT_IVL, whole_ms // 3)
    socket.set(zmq.HEARTBEAT_TIMEOUT, whole_ms)
    socket.set(zmq.HEARTBEAT_TTL, whole_ms)
    socket.set(zmq.HANDSHAKE_IVL, whole_ms)


_OPEN: set[DisconnectWatch] = set()
"""Watches that were not closed yet. A forgotten watch must not be collected: where its monitor goes before its socket,
the context's I/O thread waits for ever to tell of an event, and all connections of the process stand still."""


class DisconnectWatch:
    """Watches the connection of a socket that connects to one endpoint. For one thread; to be closed."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """To be made before the socket's `connect`."""
        _OPEN.add(self)
        self._socket = socket
        # The stubs of pyzmq give sync and async sockets one type here.
        self._monitor: Any = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._up = False
        self._cut = False
        self.opened = 0
        """Connections made, as of the last call of `cut` or `up`; those after the first came after a cut."""

    def cut(self) -> bool:
        """Return whether the connection was cut since the last call."""
        self._look()
        cut, self._cut = self._cut, False
        return cut

    @property
    def up(self) -> bool:
        """Whether there is a connection now, as far as is known."""
        self._look()
        return self._up

    @property
    def was_up(self) -> bool:
        """`up` as of the last call of `cut` or `up`: nothing new is looked at."""
        return self._up

    @property
    def monitor(self) -> zmq.Socket[bytes]:
        """Readable when there may be news."""
        found: zmq.Socket[bytes] = self._monitor
        return found

    def _look(self) -> None:
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._up = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._cut = self._cut or not self._up
            self.opened += self._up

    def close(self) -> None:
        """To be called before the socket's own `close`."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        _OPEN.discard(self)


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
