"""The checks of certificates and keys before anything is served with them."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from twinpool.contracts.credentials.certificate_files import NODE_NAME, CertificateFiles
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
