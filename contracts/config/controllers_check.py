"""What the settings of a cluster's controllers need of each other."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.config.ledger_place import (
    NAME,
    check_ledger,
    check_ray_storage,
    controller_endpoints,
    on_server,
)
from twinpool.contracts.errors import ConfigError

MAX_STANDBYS = 8
"""Standby controllers that `serve` may start: each looks for the leader several times a second."""


def controller_conflicts(config: ClusterConfig) -> Iterator[str]:
    """What is wrong with the settings of controllers and their ledger, with the keys' names."""
    for check, value in ((check_ledger, config.ledger), (check_ray_storage, config.ray_storage)):
        try:
            check(value)
        except ConfigError as error:
            yield str(error)
    if config.name and not NAME.fullmatch(config.name):
        yield (f"config key cluster.name takes letters, digits, dots and dashes, 64 at most; got {config.name!r:.80}")
    others: tuple[str, ...] = ()
    try:
        others = controller_endpoints(config.controllers)
    except ConfigError as error:
        yield str(error)
    if others and not (on_server(config.ledger) and config.name):
        yield (
            "config key cluster.controllers needs cluster.ledger on a server and cluster.name: by these the "
            "controllers of several machines know who leads"
        )
    if config.ledger_replicas and not on_server(config.ledger):
        yield "config key cluster.ledger_replicas needs cluster.ledger on a server"
    if config.standby_controllers > MAX_STANDBYS:
        yield (
            f"config key cluster.standby_controllers must be at most {MAX_STANDBYS}; got {config.standby_controllers}"
        )
    several = bool(others) or config.standby_controllers > 0
    if several and config.leader_lease_s > config.lease_s / 2:
        yield (
            f"config key cluster.leader_lease_s={config.leader_lease_s:g} is more than half of cluster.lease_s="
            f"{config.lease_s:g}: workers would lose their leases before a standby takes over"
        )
