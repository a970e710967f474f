"""Services of one kind on the machine of `serve`, started or adopted, kept alive, and replaced; its controllers are
one such kind, its routers (`cluster.serve.router_services`) another.

A process of another build, or with other settings than the configuration's, is stale. Stale ones are replaced one by
one: the successor starts while the old process serves, and takes its place once it listens. Where the successor fails,
the old process stays, and nothing more is replaced until the configuration changes. A process's *mark* is its build and
the digest of the settings that its kind reads. In a detached cluster processes outlive this one, and
`DetachedState` says which run, and which are being replaced.

A controller's successor loads everything before it ends the old process and takes its port and its ledger
(`cluster.controller.controller_process`): workers' leases run on while a process starts, and on a busy machine that may
take longer than they last.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from twinpool.cluster.controller.open_ledger import open_ledger
from twinpool.cluster.serve.detached_state import ServiceProcess
from twinpool.cluster.serve.service import CONTROLLER, STOP_S, PartFailed, Service, ServiceContext, ServiceFailed
from twinpool.cluster.worker_process.lease_keeper import longest_absence_s
from twinpool.contracts.build_id import build_id
from twinpool.contracts.config.cluster_config import ClusterConfig, Config
from twinpool.contracts.config.ledger_place import controller_endpoints, on_server, without_password
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.config.setting_effects import controllers_digest
from twinpool.contracts.errors import ConfigError

POLL_S = 0.1
REPLACE_S = 90.0
"""Seconds in which a successor must listen."""


ServiceT = TypeVar("ServiceT", bound=Service)


@dataclass(frozen=True, slots=True)
class _Successor(Generic[ServiceT]):
    """A service on its way to the place of service `number`."""

    number: int
    service: ServiceT
    deadline: float

    def ready(self, wait_s: float, now: Callable[[], float]) -> bool:
        """Whether it listens; waits up to `wait_s`. Raises `ServiceFailed` where it has ended or is too late."""
        if self.service.listening(wait_s):
            return True
        if now() > self.deadline:
            raise ServiceFailed(f"the next {self.service.name} isn't ready within {REPLACE_S:g} s")
        return False


class RollingServices(ABC, Generic[ServiceT]):
    """See the module's prose. Use it from the main thread only (`Service`)."""

    def __init__(self, context: ServiceContext) -> None:
        self._context, self._state, self._report = context, context.state, context.report
        self._services: list[ServiceT] = []
        self._successor: _Successor[ServiceT] | None = None
        self._obstacle = ""
        """Why nothing is replaced until the next change; empty: nothing stands in the way."""

    # ------------------------------------------------------------ what a kind defines

    @property
    @abstractmethod
    def mark(self) -> str:
        """The mark that a process of the present configuration has."""

    @abstractmethod
    def _key(self, service: ServiceT) -> str:
        """The name and mark of a service that is being replaced, for the cluster's state."""

    @abstractmethod
    def _begin(self, number: int) -> ServiceT:
        """Start service `number`, or adopt the process that runs, whatever its mark."""

    @abstractmethod
    def _make_successor(self, number: int, old: ServiceT) -> ServiceT:
        """A service of the present configuration, not started yet, that takes the place of `old`."""

    @abstractmethod
    def _retire(self, old: ServiceT, new: ServiceT) -> None:
        """Do what remains once `new` listens in the place of `old`."""

    def _lost(self, old: ServiceT) -> bool:
        """Whether the old process can't stay where its successor has failed."""
        return False

    # ------------------------------------------------------------ for the services of a cluster

    def services(self) -> list[ServiceT]:
        return list(self._services)

    def stale(self) -> tuple[int, str]:
        """The number of stale processes, and the obstacle to replacing them, if any."""
        return sum(service.mark != self.mark for service in self._services), self._obstacle

    def _start(self, count: int) -> None:
        """Start or adopt all, and replace those that are stale. Raises `PartFailed` where one can't be replaced; it
        goes on then."""
        self._services = [self._begin(number) for number in range(count)]
        while self.stale()[0] and not self._obstacle:
            self._replace_next(POLL_S)
        if self._obstacle:
            raise PartFailed(self._obstacle)

    @staticmethod
    def _started(service: ServiceT) -> ServiceT:
        service.start()
        return service

    # ------------------------------------------------------------ replacing

    def _replace_next(self, wait_s: float = 0.0) -> None:
        """Begin to replace the next stale process, or wait up to `wait_s` for the successor that is on its way."""
        if self._successor is not None:
            return self._poll_successor(self._successor, wait_s)
        due = [n for n, service in enumerate(self._services) if service.mark != self.mark and not service.down]
        if not due or self._obstacle:
            return None
        number, old = due[0], self._services[due[0]]
        old.leave(self._key(old))
        successor = self._make_successor(number, old)
        successor.start()
        self._successor = _Successor(number, successor, self._context.clock.now() + REPLACE_S)
        return None

    def _poll_successor(self, successor: _Successor[ServiceT], wait_s: float) -> None:
        old, new = self._services[successor.number], successor.service
        try:
            if not successor.ready(wait_s, self._context.clock.now):
                return
        except ServiceFailed as error:
            if not self._lost(old):
                self._keep(old, new, error)
                return
            new.kill()  # It is started again like any that dies.
        self._successor = None
        self._services[successor.number] = new
        self._retire(old, new)

    def _keep(self, old: ServiceT, new: ServiceT, error: ServiceFailed) -> None:
        """Go on with a process whose successor has failed."""
        self._successor = None
        new.stop(0.0)
        self._obstacle = f"{error}{self._context.last_words(old.name)}; the one before goes on"
        self._report(self._obstacle)
        old.stay()


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


class ControllerServices(RollingServices[Service]):
    """The controllers of one machine. Use it from the main thread only (`Service`)."""

    def __init__(self, context: ServiceContext, local: LocalControllers, config: Config, settings: Path) -> None:
        """`settings`: the file with the configuration, which is written before `change`."""
        super().__init__(context)
        self._local, self._config, self._settings = local, config, settings

    def start(self, environment: Mapping[str, str]) -> None:
        """Start all of them, or adopt those that run. Raises `PartFailed` where a stale one can't be replaced; it goes
        on then."""
        self._environment = environment
        self._start(len(self._local.names))

    def change(self, config: Config) -> None:
        """Go by another configuration; controllers that read settings that differ are replaced one by one."""
        self._config, self._obstacle = config, ""

    def tend(self) -> None:
        """Start again what has ended, and go on replacing. Raises `PartFailed` where one ends too often."""
        # The end of one that is being replaced is its successor's doing.
        replaced = self._successor.number if self._successor is not None else None
        for number, service in enumerate(self._services):
            if number != replaced and (failed := service.tend()):
                raise PartFailed(failed)
        self._replace_next()

    # ------------------------------------------------------------ this kind

    @property
    def mark(self) -> str:
        return f"{build_id()}.{controllers_digest(self._config)}"

    def _key(self, service: Service) -> str:
        return f"{service.name}/{service.mark}"

    def _begin(self, number: int) -> Service:
        name, state = self._local.names[number], self._state
        if state is None:
            return self._started(self._controller(number))
        # An old process that was to be replaced lives: its successor will end it, or has ended itself.
        before = self._replaced(name)
        if before and state.running(name) is None:
            key, _ = before.popitem()
            state.stays(name, key, key.removeprefix(f"{name}/"))
        controller = self._controller(number, before.values())
        if (old := state.running(name)) is None:
            return self._started(controller)
        controller.adopt(old, state.marks.get(name, old.build))
        return controller

    def _make_successor(self, number: int, old: Service) -> Service:
        # Where a supervisor died meanwhile, the old process may not have ended the one before it.
        ended = self._replaced(old.name) | {self._key(old): old.process}
        return self._controller(number, ended.values())

    def _lost(self, old: Service) -> bool:
        return old.ended() is not None  # Its successor has ended it.

    def _retire(self, old: Service, new: Service) -> None:
        old.stop(STOP_S)
        self._report(f"{old.name} is replaced")

    def _replaced(self, name: str) -> dict[str, ServiceProcess]:
        """The old processes of this place that still run, by key."""
        leaving = self._state.leaving if self._state is not None else {}
        return {key: process for key, process in leaving.items() if key.startswith(f"{name}/")}

    def _controller(self, number: int, replaces: Iterable[ServiceProcess] = ()) -> Service:
        """A controller of the present configuration, not started yet, which ends `replaces` once it is loaded."""
        arguments = self._local.arguments(number, self._settings)
        if ended := [f"{process.pid}:{process.started}" for process in replaces]:
            arguments += ["--replaces", *ended]
        name, meanwhile = self._local.names[number], self._local.meanwhile(number)
        return Service(
            self._context, name, CONTROLLER, arguments, self._environment, mark=self.mark, meanwhile=meanwhile
        )
