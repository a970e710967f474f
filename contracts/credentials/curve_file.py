"""A pair of CURVE keys in ZeroMQ's file format, as `zmq.auth.create_certificates` writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import zmq

from twinpool.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CurvePair:
    """A key pair, as Z85 text. Whoever knows the public key is admitted, so it is shown to readers alone."""

    public: bytes
    secret: bytes = field(repr=False)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` a CURVE server. To be called before its `bind`."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


def read_curve_pair(path: Path) -> CurvePair:
    """Read a file with both keys. Raises `ConfigError`."""
    public, secret = _read(path)
    if secret is None:
        raise ConfigError(f"{path} has no secret key: security.curve_key takes the file *.key_secret")
    return CurvePair(public, secret)


def read_curve_public(path: Path) -> bytes:
    """Read the public key, from either file of a pair. Raises `ConfigError`."""
    return _read(path)[0]


def call(socket: zmq.Socket[bytes], server_key: bytes) -> None:
    """Make `socket` a CURVE client of the server with this public key, under keys of its own. Before its `connect`."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = server_key


def _read(path: Path) -> tuple[bytes, bytes | None]:
    import zmq.auth  # Where there are keys alone.

    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the CURVE keys {path}: {error}; make them with twinpool certs new") from None
