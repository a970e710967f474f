"""The KV index among the services of a cluster: whether there is one, and the events that it follows.

Without it routers go by what they have sent, so a cluster goes on when it can't be kept.
"""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.python_command import module_command

KV_INDEX = tuple(module_command("twinpool.router.index_main"))
LOOPBACK = "tcp://127.0.0.1:0"
ORDERED_STORES = ("x86_64", "AMD64")
"""Machines on which one process sees another's stores in their order, by which routers read the table while it is
written (`router.kv_indexer.holder_table`)."""


def index_wanted(config: Config) -> bool:
    """Whether a KV index is to run: something goes by it, and workers publish."""
    return _asked_for(config) and bool(config.cache.events.endpoint)


def _asked_for(config: Config) -> bool:
    ordered = platform.machine() in ORDERED_STORES
    return config.router.kv_index == "auto" and config.router.policy == "cache_aware" and ordered


def with_kv_events(config: Config, folder: Path) -> Config:
    """`config` with KV events published on this host's loopback, where an index is to follow them and none are
    published yet. All workers must be on this host.

    Events carry prompts' tokens, and any user of the machine may connect to its loopback: readers need a key, which is
    made in `folder` unless there is one. Nobody but this user can read it.
    """
    if not _asked_for(config) or config.cache.events.endpoint:
        return config
    events = dataclasses.replace(config.cache.events, endpoint=LOOPBACK, replay_endpoint=LOOPBACK)
    security = config.security
    if not security.curve_key:
        import zmq.auth  # Where there are keys alone.

        own = folder / "kv-events"
        secret = own / "curve.key_secret"
        if not secret.exists():
            own.mkdir(0o700, exist_ok=True)
            zmq.auth.create_certificates(own, "curve")
        security = dataclasses.replace(security, curve_key=str(secret))
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, events=events), security=security)


def index_arguments(controller: str, table: Path, settings: Path) -> list[str]:
    """The arguments of the index's process. `controller`: its ``host:port``; `table`: where routers find the table;
    `settings`: the configuration as JSON."""
    return ["--controller", controller, "--table", str(table), "--config-json", str(settings)]
