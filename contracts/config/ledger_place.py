"""Where a cluster's table is kept: a file, or a Valkey or Redis server, as `cluster.ledger` names it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from contracts.errors import ConfigError

SERVERS = ("redis", "rediss", "unix")
"""Schemes of a server's address; whatever has no scheme is a path."""
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def on_server(ledger: str) -> bool:
    """Whether `ledger` names a server, not a file."""
    return "://" in ledger


def without_password(ledger: str) -> str:
    """The address of a server as it may be shown, or the path of a file."""
    return re.sub(r"(?<=://)[^/]*@", "", ledger)


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
    if parts.scheme not in SERVERS:
        raise ConfigError(f"{key} is {expected}; got {shown}")
    if parts.scheme == "unix":
        if not parts.path:
            raise ConfigError(f"{key}: {shown} names no socket: unix:///path/of/the/socket")
    elif not parts.hostname or port == 0:
        raise ConfigError(f"{key} is {expected}; {shown} names no host, or port 0")
    elif not re.fullmatch(r"/?\d*", parts.path):
        raise ConfigError(f"{key}: the path of {shown} is the number of its database, such as /0")


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
