"""The controllers that `serve` starts on its machine: where they listen, and what they are started with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinpool.cluster.controller.open_ledger import open_ledger
from twinpool.cluster.worker_process.lease_keeper import longest_absence_s
from twinpool.contracts.config.cluster_config import ClusterConfig, Config
from twinpool.contracts.config.ledger_place import controller_endpoints, on_server, without_password
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import ConfigError

FIND_S = 1.0
"""Seconds that a takeover takes longer than the leader's lease: a standby's look, its start, and workers' next try."""


@dataclass(frozen=True)
class LocalControllers:
    """The controllers of one cluster."""

    config: ClusterConfig
    """Its name filled in."""
    address: str
    """Where workers reach this machine."""
    ports: tuple[int, ...]
    """Of the first controller, then of those that stand by."""
    file: Path
    """The ledger of a cluster that has no other."""

    @classmethod
    def plan(
        cls, config: ClusterConfig, address: str, kept: Sequence[int], free_port: Callable[[int], int], folder: Path
    ) -> LocalControllers:
        """The controllers of a run whose files are in `folder`. `kept`: their ports where they had some; `free_port`
        returns a port, a free one for 0. Raises `ConfigError` where a port can't be had."""
        named = dataclasses.replace(config, name=config.name or folder.name)
        ports = tuple(kept) or (
            free_port(config.controller_port),
            *(free_port(0) for _ in range(config.standby_controllers)),
        )
        return cls(named, address, ports, folder / "controller.sqlite")

    @property
    def ledger(self) -> str:
        return self.config.ledger or str(self.file)

    @property
    def endpoints(self) -> str:
        """Where the controllers are reached, those of other machines too, with commas."""
        here = [f"{self.address}:{port}" for port in self.ports]
        return ",".join([*here, *controller_endpoints(self.config.controllers)])

    @property
    def names(self) -> list[str]:
        """What the controllers of this machine are called, the first one first."""
        return ["controller", *(f"controller-standby-{number}" for number in range(1, len(self.ports)))]

    def arguments(self, number: int, settings: Path) -> list[str]:
        """What a controller of this machine is started with; `settings` has the whole configuration."""
        return [
            *("--address", self.address, "--port", str(self.ports[number])),
            *(() if self.config.ledger else ("--ledger", str(self.file))),
            *("--config-json", str(settings)),
            *(("--standby",) if number else ()),
        ]

    def settings(self, config: Config) -> Config:
        """The configuration that the services of this cluster get."""
        return dataclasses.replace(config, cluster=self.config)

    def meanwhile(self, number: int) -> str:
        """What goes on while a controller is away, in words."""
        if number:
            return ""
        if len(self.endpoints.split(",")) > 1:
            return f"where it led, another one takes over within {self.config.leader_lease_s + FIND_S:g} s"
        return f"the workers serve on without it for {longest_absence_s(self.config):g} s"

    def check(self, environment: Mapping[str, str], security: SecurityConfig) -> list[str]:
        """What the ledger may lose, in words. `environment` and `security`: the controllers'. Raises `ConfigError`
        where it can't be used, or reached: a cluster isn't begun without its ledger."""
        if not on_server(self.ledger):
            return []
        ledger = open_ledger(self.ledger, self.config.name, self.config.ledger_replicas, environment, security)
        try:
            return ledger.check()
        except OSError as error:
            raise ConfigError(
                f"cluster.ledger={without_password(self.ledger)}: {error}; is the server there?"
            ) from None
        finally:
            ledger.close()
