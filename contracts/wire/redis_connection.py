"""Connections to a Valkey or Redis server, as the storage of pages and the controller's ledger open them.

**Where a server can't be reached** (`tls_trouble`) it is found out whether TLS is why, and on which side. The client's
own errors don't tell: a server without TLS is silent to one that begins it, and one that refuses a certificate may end
the connection before its reason is read. So the connection is tried again without a client, which sends no password.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from twinpool.contracts.errors import ConfigError

TLS = "rediss://"


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """By what a server lets its clients in, and by what they know it. Empty: not given."""

    password: str = field(default="", repr=False)
    """Of the user that the address names, or of the default one; used where the address has none."""
    password_file: str = ""
    """File of the password, read for each connection: a new password is taken up while the process runs."""
    ca: str = ""
    """PEM file of the authority of the server's certificate; empty: those that the system knows."""
    cert: str = ""
    """PEM file of the client's own certificate, for a server that wants one."""
    key: str = ""
    """PEM file of the key of `cert`."""


class FilePassword(CredentialProvider):
    """The password of a file, with the user of the address."""

    def __init__(self, path: str, user: str, setting: str) -> None:
        self._path, self._user, self._setting = Path(path), user, setting

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self.read()
        return (self._user, password) if self._user else (password,)

    def read(self) -> str:
        """The file's first line. Raises `ConfigError` where there is none."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"{self._setting}: can't read its password from {self._path}: {reason}") from None
        if not lines or not lines[0]:
            raise ConfigError(f"{self._setting}: {self._path} has no password in its first line")
        return lines[0]


def open_redis(url: str, timeout_s: float, setting: str, access: RedisAccess | None = None) -> redis.Redis:
    """A client of the server at `url` (`redis://`, `rediss://` or `unix://`), which need not be there yet.

    The server may be silent for `timeout_s`, and a connection may take as long. Over TLS the server's certificate is
    checked, and that it is for the host that `url` names. Raises `ConfigError`, which names `setting`, for a URL or
    files that can't be used.
    """
    access = access or RedisAccess()
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            protocol=2,
            # A connection that the server closed while idle is replaced once; nothing else is tried twice.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            **(_tls(access, setting) if url.startswith(TLS) else {}),
        )
    except ValueError as error:
        raise ConfigError(f"{setting} is not the address of a Redis server: {error}") from None
    given = client.connection_pool.connection_kwargs
    if access.password_file and not given.get("password"):
        provider = FilePassword(access.password_file, given.pop("username", None) or "", setting)
        provider.read()
        given.pop("password", None)
        given["credential_provider"] = provider
    elif access.password:
        given.setdefault("password", access.password)
    return client


def tls_context(access: RedisAccess, setting: str) -> ssl.SSLContext:
    """What a server is checked by, and what it checks. Raises `ConfigError` for files that can't be used."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if access.ca:
            context.load_verify_locations(access.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{setting}: {access.ca} is no file of certificates: {_first_words(error)}") from None
    try:
        if access.cert:
            context.load_cert_chain(access.cert, access.key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{setting}: {access.cert} and {access.key} are no certificate and its key: {_first_words(error)}"
        ) from None
    return context


def _tls(access: RedisAccess, setting: str) -> dict[str, object]:
    """What TLS connections are made with, which read the files anew. Raises `ConfigError` for files that can't be
    used."""
    tls_context(access, setting)
    files = {"ssl_ca_certs": access.ca, "ssl_certfile": access.cert, "ssl_keyfile": access.key}
    return {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        **{name: path for name, path in files.items() if path},
    }


def _first_words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


PORT = 6379
ALERT_S = 0.3
"""Seconds in which a server that refuses the client's certificate says so, once it has the client's last message."""
_PING = b"PING\r\n"


def tls_trouble(url: str, access: RedisAccess, timeout_s: float, setting: str) -> str:
    """Why TLS is why the server at `url` can't be used, in words that say what to do; empty where it isn't, or where
    nothing answers. Takes `timeout_s` twice at most."""
    if url.startswith("unix:"):
        return ""
    parts = urlsplit(url)
    place = (parts.hostname or "localhost", parts.port or PORT)
    if not url.startswith(TLS):
        anyone = ssl.create_default_context()
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE  # Only whether it speaks TLS is asked.
        if _speaks_plain(place, timeout_s) or not _speaks_tls(place, anyone, timeout_s):
            return ""
        return "it speaks TLS: write rediss:// instead of redis://, with security.ledger_ca"
    try:
        _shake_hands(place, tls_context(access, setting), timeout_s)
    except ssl.SSLCertVerificationError as error:
        return (
            f"its certificate is refused ({error.verify_message.rstrip('.')}): have security.ledger_ca name the file "
            f"of the authority that made it, and {setting} a host that it is for"
        )
    except ssl.SSLError as error:
        reason = (error.reason or "").upper()
        if "CERTIFICATE_REQUIRED" in reason or ("HANDSHAKE_FAILURE" in reason and not access.cert):
            return "it wants a client's certificate: set security.ledger_cert and security.ledger_key"
        if "ALERT" in reason and access.cert:
            what = reason.rpartition("ALERT_")[2].lower().replace("_", " ")
            return (
                f"it refuses the certificate of security.ledger_cert ({what}): have one made by an authority that the "
                "server knows (its tls-ca-cert-file)"
            )
        return _without_tls(place, timeout_s) or f"TLS with it fails ({error.reason or error})"
    except OSError:
        return _without_tls(place, timeout_s)
    return ""


def _without_tls(place: tuple[str, int], timeout_s: float) -> str:
    if not _speaks_plain(place, timeout_s):
        return ""
    return "it doesn't speak TLS there: name the port that does (its tls-port), or write redis:// instead of rediss://"


def _shake_hands(place: tuple[str, int], context: ssl.SSLContext, timeout_s: float) -> None:
    """Do the handshake of TLS, and wait a moment for what the server has against it. Raises `OSError`."""
    with socket.create_connection(place, timeout_s) as plain, context.wrap_socket(plain, server_hostname=place[0]) as s:
        s.settimeout(min(ALERT_S, timeout_s))
        try:
            s.recv(1)
        except TimeoutError:
            return


def _speaks_tls(place: tuple[str, int], context: ssl.SSLContext, timeout_s: float) -> bool:
    try:
        _shake_hands(place, context, timeout_s)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "").upper()  # It speaks it, and refuses who has no certificate.
    except OSError:
        return False
    return True


def _speaks_plain(place: tuple[str, int], timeout_s: float) -> bool:
    """Whether something answers as Redis does without TLS."""
    try:
        with socket.create_connection(place, timeout_s) as asked:
            asked.settimeout(timeout_s)
            asked.sendall(_PING)
            return asked.recv(1) in (b"+", b"-")
    except OSError:
        return False
