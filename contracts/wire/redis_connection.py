"""Connections to a Valkey or Redis server, as the storage of pages and the controller's ledger open them."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from contracts.errors import ConfigError


def open_redis(url: str, timeout_s: float, setting: str, password: str = "") -> redis.Redis:
    """A client of the server at `url` (`redis://`, `rediss://` or `unix://`), which need not be there yet.

    The server may be silent for `timeout_s`, and a connection may take as long. `password` is used where the URL has
    none. Raises `ConfigError`, which names `setting`, for a URL that can't be understood.
    """
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            protocol=2,
            # A connection that the server closed while idle is replaced once; nothing else is tried twice.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
    except ValueError as error:
        raise ConfigError(f"{setting} is not the address of a Redis server: {error}") from None
    if password:
        client.connection_pool.connection_kwargs.setdefault("password", password)
    return client
