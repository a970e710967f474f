"""Certificates and their keys as PEM files, and pairs of CURVE keys as files of ZeroMQ.

All nodes of a cluster have certificates of the cluster's own authority, each with the name `NODE_NAME` beside those of
its host. Callers within the cluster check this name and not the host's, so that nodes may come by any address.

Files of CURVE keys are as `zmq.auth.create_certificates` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.contracts.errors import ConfigError

if TYPE_CHECKING:
    import zmq

NODE_NAME = "node.twinpool.internal"
"""The name in the certificate of every node."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The files of one certificate. `names`: of their configuration keys, for messages."""

    cert: Path
    """The certificate, followed by those between it and its authority."""
    key: Path
    ca: Path | None = None
    """Certificates of the authorities whose peers are admitted; None where peers need none."""
    names: tuple[str, str, str] = ("the certificate", "its key", "its authority")

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Return what changes when one of the files does; raises `OSError` where one is missing."""
        found = [path.stat() for path in (self.cert, self.key, self.ca) if path is not None]
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)

    def check(self, now: datetime | None = None) -> None:
        """Check that the files are whole, belong together, and are valid `now` (None: at this moment).

        With an authority, the certificate must be one of its own, and a node's. Raises `ConfigError` that says what to
        do.
        """
        # The configuration is read where there is no `cryptography`.
        from twinpool.contracts.credentials.certificate_check import check_files

        check_files(self, now)


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
    import zmq

    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = server_key


def _read(path: Path) -> tuple[bytes, bytes | None]:
    import zmq.auth  # Where there are keys alone.

    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the CURVE keys {path}: {error}; make them with twinpool certs new") from None
