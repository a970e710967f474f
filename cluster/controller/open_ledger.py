"""The choice of the ledger's keeper: an SQLite file, or a Valkey or Redis server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.cluster.controller.leadership import LeasedLedger
from twinpool.cluster.controller.sqlite_ledger import SqliteLedger
from twinpool.contracts.config.ledger_place import NAME, check_ledger, on_server
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.contracts.wire.redis_connection import RedisAccess

PASSWORD_VARIABLE = "TWINPOOL_LEDGER_PASSWORD"
"""The server's password, where the URL has none: a configuration is read by more people than an environment."""


def open_ledger(
    place: str,
    name: str,
    replicas: int = 0,
    environment: Mapping[str, str] = os.environ,
    security: SecurityConfig | None = None,
) -> LeasedLedger:
    """Open the ledger of the cluster `name` at `place`, a path or a server's URL, with the files that `security` names
    and the password that `environment` has, where there is no file of it.

    Raises `ConfigError` where it can't be used; a server need not be there yet.
    """
    check_ledger(place, "the ledger")
    if not on_server(place):
        return SqliteLedger(Path(place))
    if not NAME.fullmatch(name):
        raise ConfigError(
            "a ledger on a server needs the cluster's name, under which its table is kept: set cluster.name to "
            f"letters, digits, dots and dashes, 64 at most; got {name!r:.80}"
        )
    try:
        from twinpool.cluster.controller.redis_ledger import RedisLedger
    except ImportError:
        raise ConfigError("a ledger on a server needs the package redis: pip install 'twinpool[redis]'") from None
    return RedisLedger(place, name, access=ledger_access(security or SecurityConfig(), environment), replicas=replicas)


def ledger_access(security: SecurityConfig, environment: Mapping[str, str]) -> RedisAccess:
    """By what the ledger's server lets controllers in. Raises `ImportError` without the client's package."""
    from twinpool.contracts.wire.redis_connection import RedisAccess

    return RedisAccess(
        password=environment.get(PASSWORD_VARIABLE, ""),
        password_file=security.ledger_password_file,
        ca=security.ledger_ca,
        cert=security.ledger_cert,
        key=security.ledger_key,
    )
