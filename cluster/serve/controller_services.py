"""The controllers' processes on the machine of `serve`.

A controller's successor loads everything before it ends the old process and takes its port and its ledger
(`cluster.controller.controller_process`): workers' leases run on while a process starts, and on a busy machine that may
take longer than they last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from twinpool.cluster.serve.child_service import CONTROLLER, STOP_S
from twinpool.cluster.serve.detached_state import DetachedState, ServiceProcess
from twinpool.cluster.serve.kept_service import MakeService, PartFailed
from twinpool.cluster.serve.local_controllers import LocalControllers
from twinpool.cluster.serve.rolling_services import RollingServices, ServiceReplica
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.setting_effects import controllers_digest


class ControllerServices(RollingServices[ServiceReplica]):
    """The controllers of one machine. Use it from the main thread only (`ChildService`)."""

    def __init__(
        self,
        local: LocalControllers,
        config: Config,
        settings: Path,
        clock: Clock,
        report: Callable[[str], None],
        last_words: Callable[[str], str],
        make: MakeService,
        state: DetachedState | None,
    ) -> None:
        """`settings`: the file with the configuration, which is written before `change`; the others as of
        `RollingServices`."""
        super().__init__(clock, report, last_words, state)
        self._local, self._config, self._settings, self._make = local, config, settings, make

    def start(self, environment: Mapping[str, str], stack: ExitStack) -> None:
        """Start all of them, or adopt those that run; they end with `stack`. Raises `PartFailed` where a stale one
        can't be replaced; it goes on then."""
        self._environment, self._stack = environment, stack
        self._start(len(self._local.names))

    def change(self, config: Config) -> None:
        """Go by another configuration; controllers that read settings that differ are replaced one by one."""
        self._config, self._obstacle = config, ""

    def tend(self) -> None:
        """Start again what has ended, and go on replacing. Raises `PartFailed` where one ends too often."""
        # The end of one that is being replaced is its successor's doing.
        replaced = self._successor.number if self._successor is not None else None
        for number, replica in enumerate(self._replicas):
            if number != replaced and (failed := replica.kept.tend()):
                raise PartFailed(failed)
        self._replace_next()

    # ------------------------------------------------------------ this kind

    @property
    def mark(self) -> str:
        return f"{self._build}.{controllers_digest(self._config)}"

    def _key(self, replica: ServiceReplica) -> str:
        return f"{replica.name}/{replica.mark}"

    def _begin(self, number: int) -> ServiceReplica:
        name, state = self._local.names[number], self._state
        if state is None:
            return self._launch(self._replica(number))
        # An old process that was to be replaced lives: its successor will end it, or has ended itself.
        before = self._replaced(name)
        if before and state.running(name) is None:
            key, _ = before.popitem()
            state.stays(name, key, key.removeprefix(f"{name}/"))
        replica = self._replica(number, before.values())
        if (old := state.running(name)) is None:
            return self._launch(replica)
        replica.kept.service.adopt(old.pid, old.started)
        return ServiceReplica(replica.kept, state.marks.get(name, old.build), old.build)

    def _make_successor(self, number: int, old: ServiceReplica) -> ServiceReplica:
        # Where a supervisor died meanwhile, the old process may not have ended the one before it.
        ended = self._replaced(old.name) | {self._key(old): old.process}
        return self._replica(number, ended.values())

    def _lost(self, old: ServiceReplica) -> bool:
        return old.kept.service.ended() is not None  # Its successor has ended it.

    def _retire(self, old: ServiceReplica, new: ServiceReplica) -> None:
        old.kept.service.stop(STOP_S)
        self._report(f"{old.name} is replaced")

    def _replaced(self, name: str) -> dict[str, ServiceProcess]:
        """The old processes of this place that still run, by key."""
        leaving = self._state.leaving if self._state is not None else {}
        return {key: process for key, process in leaving.items() if key.startswith(f"{name}/")}

    def _replica(self, number: int, replaces: Iterable[ServiceProcess] = ()) -> ServiceReplica:
        """A controller of the present configuration, not started yet, which ends `replaces` once it is loaded."""
        arguments = self._local.arguments(number, self._settings)
        if ended := [f"{process.pid}:{process.started}" for process in replaces]:
            arguments += ["--replaces", *ended]
        name, meanwhile = self._local.names[number], self._local.meanwhile(number)
        kept = self._make(name, CONTROLLER, arguments, self._environment, self._stack, meanwhile)
        return ServiceReplica(kept, self.mark, self._build)
