"""What the settings of a cluster's controllers need of each other."""

from __future__ import annotations

from contracts.config.cluster_config import ClusterConfig
from contracts.config.ledger_place import NAME, check_ledger, check_ray_storage, controller_endpoints, on_server
from contracts.errors import ConfigError

MOST_STANDBYS = 8
"""Standby controllers that `serve` may start: each looks for the leader several times a second."""


def check_controllers(config: ClusterConfig) -> None:
    """Check the settings of controllers and their ledger. Raises `ConfigError` with the keys' names."""
    check_ledger(config.ledger)
    check_ray_storage(config.ray_storage)
    if config.name and not NAME.fullmatch(config.name):
        raise ConfigError(
            f"config key cluster.name takes letters, digits, dots and dashes, 64 at most; got {config.name!r:.80}"
        )
    others = controller_endpoints(config.controllers)
    if others and not (on_server(config.ledger) and config.name):
        raise ConfigError(
            "config key cluster.controllers needs cluster.ledger on a server and cluster.name: by these the "
            "controllers of several machines know who leads"
        )
    if config.ledger_replicas and not on_server(config.ledger):
        raise ConfigError("config key cluster.ledger_replicas needs cluster.ledger on a server")
    if config.standby_controllers > MOST_STANDBYS:
        raise ConfigError(
            f"config key cluster.standby_controllers must be at most {MOST_STANDBYS}; got {config.standby_controllers}"
        )
    several = bool(others) or config.standby_controllers > 0
    if several and config.leader_lease_s > config.lease_s / 2:
        raise ConfigError(
            f"config key cluster.leader_lease_s={config.leader_lease_s:g} is more than half of cluster.lease_s="
            f"{config.lease_s:g}: workers would lose their leases before a standby takes over"
        )
