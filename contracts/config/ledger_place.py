"""Where a cluster's table is kept: a file, or a Valkey or Redis server, as `cluster.ledger` names it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import parse_qs, urlsplit

from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError

SERVERS = ("redis", "rediss", "unix")
"""Schemes of a server's address; whatever has no scheme is a path."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NO_SENTINEL = (
    "name an address that leads to the primary, and moves with it (a name in DNS, a virtual IP, a proxy), since "
    "controllers don't ask Sentinels"
)
ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def on_server(ledger: str) -> bool:
    """Whether `ledger` names a server, not a file."""
    return "://" in ledger


def without_password(ledger: str) -> str:
    """The address of a server as it may be shown, or the path of a file."""
    return re.sub(r"(?<=://).*@", "", ledger)


def check_ledger(ledger: str, key: str = "config key cluster.ledger") -> None:
    """Check where the table is to be kept. Raises `ConfigError`, which names no password."""
    if not on_server(ledger):
        return
    shown, expected = without_password(ledger), "a path, or a server such as redis://host:6379/0 (rediss:// for TLS)"
    try:
        parts = urlsplit(ledger)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{key} is {expected}; the port or host of {shown} can't be read") from None
    if "sentinel" in parts.scheme:
        raise ConfigError(f"{key} is {expected}; got {shown}: {NO_SENTINEL}")
    if parts.scheme not in SERVERS:
        raise ConfigError(f"{key} is {expected}; got {shown}")
    if set(parse_qs(parts.query, keep_blank_values=True)) - ({"db"} if parts.scheme == "unix" else set()):
        raise ConfigError(
            f"{key}: what follows the ? of the address isn't taken: a password belongs into the file of "
            "security.ledger_password_file, certificates are security.ledger_ca, ledger_cert and ledger_key"
        )
    if parts.scheme == "unix":
        if not parts.path:
            raise ConfigError(f"{key}: {shown} names no socket: unix:///path/of/the/socket")
    elif not parts.hostname or port == 0:
        raise ConfigError(f"{key} is {expected}; {shown} names no host, or port 0")
    elif not re.fullmatch(r"/?\d*", parts.path):
        raise ConfigError(f"{key}: the path of {shown} is the number of its database, such as /0")


def ledger_file_conflicts(ledger: str, security: SecurityConfig) -> Iterator[str]:
    """What `security` has for the ledger's server and is of no use there, with the keys' names."""
    for key in ("ledger_ca", "ledger_cert"):
        if getattr(security, key) and ledger.partition("://")[0].lower() != "rediss":
            yield (f"config key security.{key} is for a ledger over TLS: write cluster.ledger as rediss://HOST:PORT/0")
    if security.ledger_password_file and not on_server(ledger):
        yield "config key security.ledger_password_file needs cluster.ledger on a server"


def refuse_shown_password(assignments: Iterable[str]) -> None:
    """Refuse a ledger's password among `--set` assignments. Raises `ConfigError`, which doesn't show it."""
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        if key.strip() == "cluster.ledger" and has_password(value):
            raise ConfigError(
                "--set cluster.ledger has a password, and every user of this machine can read a command line: put it "
                "into the file of security.ledger_password_file or into TWINPOOL_LEDGER_PASSWORD"
            )


def has_password(ledger: str) -> bool:
    """Whether a server's address has a password."""
    user, at, _ = ledger.partition("://")[2].rpartition("@")
    return bool(at) and ":" in user


def check_ray_storage(url: str) -> None:
    """Check where a Ray of our own is to keep its tables. Raises `ConfigError`, which names no password."""
    if not url:
        return
    key = "config key cluster.ray_storage"
    check_ledger(url, key)
    if urlsplit(url).scheme not in ("redis", "rediss"):
        raise ConfigError(
            f"{key} is a server such as redis://host:6379 (rediss:// for TLS); got {without_password(url)}"
        )
    if urlsplit(url).path.strip("/0"):
        raise ConfigError(f"{key}: Ray takes database 0 alone; got {without_password(url)}")


def controller_endpoints(text: str, key: str = "config key cluster.controllers") -> tuple[str, ...]:
    """The endpoints of a list such as ``host:7000,host:7001``, in order. Raises `ConfigError` for another text."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for endpoint in found:
        match = ENDPOINT.fullmatch(endpoint)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ConfigError(f"{key} takes host:port, several with commas; got {endpoint!r:.80}")
    if len(set(found)) < len(found):
        raise ConfigError(f"{key} names a controller twice: {text!r:.160}")
    return found
