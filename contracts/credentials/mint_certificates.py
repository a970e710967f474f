"""Certificates of a cluster's own authority: made here, for `twinpool certs` and for tests."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from twinpool.contracts.credentials.certificate_check import read_certificates, read_key
from twinpool.contracts.credentials.certificate_files import NODE_NAME
from twinpool.contracts.errors import ConfigError

_HOST = re.compile(r"(?=.{1,253}$)(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*")
_SKEW = timedelta(minutes=5)
"""By how much machines' clocks may differ."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def pem(self) -> tuple[bytes, bytes]:
        """Return its certificate and its key in PEM."""
        return self.certificate.public_bytes(Encoding.PEM), key_pem(self.key)


def new_authority(name: str, now: datetime, days: float) -> Authority:
    """Return a new authority, valid from `now` on for so many days."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    built = _begun(subject, subject, key, now, days)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    built = built.add_extension(usage, critical=True)
    built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Authority(built.sign(key, hashes.SHA256()), key)


def read_authority(cert: Path, key: Path) -> Authority:
    """Read an authority of two PEM files. Raises `ConfigError`."""
    found = read_key(key, "the authority's key")
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key} is no key of an authority that twinpool certs made")
    return Authority(read_certificates(cert, "the authority")[0], found)


def new_node(authority: Authority, hosts: Sequence[str], now: datetime, days: float) -> tuple[bytes, bytes]:
    """Return a node's certificate and key in PEM, for servers and clients, under `NODE_NAME` and these hosts' names and
    addresses. Raises `ConfigError` for what is neither."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "twinpool node")])
    names = x509.SubjectAlternativeName([x509.DNSName(NODE_NAME), *(_name(host) for host in dict.fromkeys(hosts))])
    built = _begun(subject, authority.certificate.subject, key, now, days)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    built = built.add_extension(names, critical=False)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    built = built.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    built = built.add_extension(by, critical=False)
    return built.sign(authority.key, hashes.SHA256()).public_bytes(Encoding.PEM), key_pem(key)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step; only its owner may read it."""
    handle, written = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # With mode 600.
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(written)
        raise


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: float
) -> x509.CertificateBuilder:
    built = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    built = built.serial_number(x509.random_serial_number())
    return built.not_valid_before(now - _SKEW).not_valid_after(now + timedelta(days=days))


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise ConfigError(f"{host!r} is neither a host's name nor an address")
    return x509.DNSName(host)
