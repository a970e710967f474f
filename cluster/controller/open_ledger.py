"""The choice of the ledger's keeper: an SQLite file, or a Valkey or Redis server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cluster.controller.controller_ledger import LeasedLedger
from cluster.controller.sqlite_ledger import SqliteLedger
from contracts.config.ledger_place import NAME, check_ledger, on_server
from contracts.errors import ConfigError

PASSWORD_VARIABLE = "TWINPOOL_LEDGER_PASSWORD"
"""The server's password, where the URL has none: a configuration is read by more people than an environment."""


def open_ledger(place: str, name: str, replicas: int = 0, environment: Mapping[str, str] = os.environ) -> LeasedLedger:
    """Open the ledger of the cluster `name` at `place`, a path or a server's URL, with the password that `environment`
    has.

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
        from cluster.controller.redis_ledger import RedisLedger
    except ImportError:
        raise ConfigError("a ledger on a server needs the package redis: pip install 'twinpool[redis]'") from None
    return RedisLedger(place, name, password=environment.get(PASSWORD_VARIABLE, ""), replicas=replicas)
