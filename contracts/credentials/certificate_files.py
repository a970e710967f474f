"""Certificates and their keys as PEM files, and pairs of CURVE keys as files of ZeroMQ.

All nodes of a cluster have certificates of the cluster's own authority, each with the name `NODE_NAME` beside those of
its host. Callers within the cluster check this name and not the host's, so that nodes may come by any address.

Files of CURVE keys are as `zmq.auth.create_certificates` writes them.

What is served with is checked here before: that certificates and keys belong together and hold long enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from twinpool.contracts.errors import ConfigError


def check_files(files: CertificateFiles, now: datetime | None) -> None:
    """Check a certificate as `CertificateFiles.check` says. Raises `ConfigError`."""
    now = now or datetime.now(UTC)
    cert_name, key_name, ca_name = files.names
    chain = read_certificates(files.cert, cert_name)
    if _public_bytes(chain[0].public_key()) != _public_bytes(read_key(files.key, key_name).public_key()):
        raise ConfigError(f"{key_name} {files.key} is not the key of {cert_name} {files.cert}: give the two of a pair")
    for one in chain:
        _check_dates(one, f"{cert_name} {files.cert}", now)
    if files.ca is None:
        return
    authorities = read_certificates(files.ca, ca_name)
    issuer = _issuer(chain, authorities)
    if issuer is None:
        raise ConfigError(
            f"{cert_name} {files.cert} is not of the authority {ca_name} {files.ca}: make one with twinpool certs"
        )
    _check_dates(issuer, f"{ca_name} {files.ca}", now)
    if NODE_NAME not in dns_names(chain[0]):
        raise ConfigError(
            f"{cert_name} {files.cert} lacks the name {NODE_NAME}, which every node of a cluster has: make it with "
            "twinpool certs, or add the name"
        )


def read_certificates(path: Path, name: str) -> list[x509.Certificate]:
    """Read the certificates of a PEM file, at least one. Raises `ConfigError`; `name`: what the file is."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"can't read {name} {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{name} {path} is no certificate in PEM") from None


def read_key(path: Path, name: str) -> PrivateKeyTypes:
    """Read a private key from a PEM file. Raises `ConfigError`; `name`: what the file is."""
    try:
        return load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"can't read {name} {path}: {error.strerror}") from None
    except (ValueError, TypeError):
        raise ConfigError(f"{name} {path} is no private key in PEM without a passphrase") from None


def dns_names(certificate: x509.Certificate) -> list[str]:
    """Return the host names that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)


def _check_dates(certificate: x509.Certificate, what: str, now: datetime) -> None:
    if now > certificate.not_valid_after_utc:
        ended = certificate.not_valid_after_utc.isoformat(sep=" ", timespec="minutes")
        raise ConfigError(f"{what} has expired at {ended}: make a new one (twinpool certs renew)")
    if now < certificate.not_valid_before_utc:
        begins = certificate.not_valid_before_utc.isoformat(sep=" ", timespec="minutes")
        raise ConfigError(f"{what} isn't valid before {begins}: look at this machine's clock")


def _issuer(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> x509.Certificate | None:
    """Return the authority that a chain leads to, None where it leads to none of these."""
    for below, above in pairwise(chain):
        if not _issued(below, above):
            return None
    return next((ca for ca in authorities if ca == chain[-1] or _issued(chain[-1], ca)), None)


def _issued(below: x509.Certificate, above: x509.Certificate) -> bool:
    try:
        below.verify_directly_issued_by(above)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _public_bytes(key: object) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined, no-any-return]


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
        from twinpool.contracts.credentials.certificate_files import (
            check_files,  # The configuration is read without it.
        )

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
