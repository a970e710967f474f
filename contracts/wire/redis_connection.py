"""Connections to a Valkey or Redis server, as the storage of pages and the controller's ledger open them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

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
