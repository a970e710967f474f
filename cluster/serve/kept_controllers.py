"""The controllers' processes on the machine of `serve`: started or taken over, kept alive, and replaced.

A controller of another build, or with other settings, is replaced by one that has loaded everything before it ends the
other and takes its port and its ledger (`cluster.controller.controller_process`): workers' leases run on while a
process starts, and on a busy machine that may take longer than they last. A controller's *mark* is its build and the
digest of the settings that controllers read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from twinpool.cluster.serve.child_service import CONTROLLER, STOP_S, ServiceFailed
from twinpool.cluster.serve.detached_state import DetachedState, ServiceProcess
from twinpool.cluster.serve.kept_service import KeptService, MakeService, PartFailed
from twinpool.cluster.serve.local_controllers import LocalControllers
from twinpool.cluster.serve.service_successor import POLL_S, ServiceSuccessor
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.setting_effects import controllers_digest


@dataclass(frozen=True, slots=True)
class _Controller:
    kept: KeptService
    mark: str
    build: str

    @property
    def name(self) -> str:
        return self.kept.service.name

    @property
    def process(self) -> ServiceProcess:
        return ServiceProcess(*self.kept.service.process, self.build)


class KeptControllers:
    """The controllers of one machine. Use it from the main thread only (`ChildService`)."""

    def __init__(
        self,
        local: LocalControllers,
        config: Config,
        settings: Path,
        clock: Clock,
        say: Callable[[str], None],
        words: Callable[[str], str],
        make: MakeService,
        state: DetachedState | None,
    ) -> None:
        """`settings`: the file with the configuration; whoever changes that writes it first. `say` and `words` as of
        `KeptService`; `state` is the detached cluster's."""
        self._local, self._config, self._settings = local, config, settings
        self._clock, self._say, self._words = clock, say, words
        self._make, self._state = make, state
        self._build = build_id()
        self._controllers: list[_Controller] = []
        self._successor: ServiceSuccessor[_Controller] | None = None
        self._trouble = ""
        """Why nothing is replaced until the next change; empty: nothing stands in the way."""

    def start(self, environment: Mapping[str, str], stack: ExitStack) -> None:
        """Start all of them, or take over those that run; they end with `stack`. Raises `PartFailed` where one of
        another mark can't be replaced; it goes on then."""
        self._environment, self._stack = environment, stack
        self._controllers = [self._begin(number) for number in range(len(self._local.names))]
        while self.behind()[0] and not self._trouble:
            self._replace_next(POLL_S)
        if self._trouble:
            raise PartFailed(self._trouble)

    def services(self) -> list[KeptService]:
        return [one.kept for one in self._controllers]

    def change(self, config: Config) -> None:
        """Go by another configuration: controllers that read other settings then are replaced, one after the other."""
        self._config, self._trouble = config, ""

    def behind(self) -> tuple[int, str]:
        """How many controllers have another mark than the configuration's still, and what keeps them so, in words."""
        return len([one for one in self._controllers if one.mark != self._mark]), self._trouble

    def tend(self) -> None:
        """Start again what has ended, and go on replacing. Raises `PartFailed` where one ends too often."""
        for number, one in enumerate(self._controllers):
            # The end of one that is being replaced is its successor's doing.
            if (self._successor is None or self._successor.number != number) and (failed := one.kept.tend()):
                raise PartFailed(failed)
        self._replace_next()

    # ------------------------------------------------------------ inside

    @property
    def _mark(self) -> str:
        return f"{self._build}.{controllers_digest(self._config)}"

    def _begin(self, number: int) -> _Controller:
        """Start a controller, or take over the one that runs, whatever its mark."""
        name, state = self._local.names[number], self._state
        if state is None:
            return self._started(self._made(number))
        # One that was to be replaced lives: its successor will end it, or has ended itself.
        before = self._leaving(name)
        if before and state.running(name) is None:
            key, _ = before.popitem()
            state.stays(name, key, key.removeprefix(f"{name}/"))
        controller = self._made(number, before.values())
        if (old := state.running(name)) is None:
            return self._started(controller)
        controller.kept.service.adopt(old.pid, old.started)
        return _Controller(controller.kept, state.marks.get(name, old.build), old.build)

    def _started(self, controller: _Controller) -> _Controller:
        if self._state is not None:
            self._state.marks[controller.name] = controller.mark  # Saved with its start.
        controller.kept.start()
        return controller

    def _leaving(self, name: str) -> dict[str, ServiceProcess]:
        """Controllers of this place that others were to replace and that live."""
        leaving = self._state.leaving if self._state is not None else {}
        return {key: process for key, process in leaving.items() if key.startswith(f"{name}/")}

    def _made(self, number: int, replaces: Iterable[ServiceProcess] = ()) -> _Controller:
        """A controller of the configuration that isn't started yet."""
        arguments = self._local.arguments(number, self._settings)
        if ended := [f"{process.pid}:{process.started}" for process in replaces]:
            arguments += ["--replaces", *ended]
        name, meanwhile = self._local.names[number], self._local.meanwhile(number)
        kept = self._make(name, CONTROLLER, arguments, self._environment, self._stack, meanwhile)
        return _Controller(kept, self._mark, self._build)

    def _replace_next(self, wait_s: float = 0.0) -> None:
        """Begin to replace the next controller that is due, or wait so long for the one that is on its way."""
        if self._successor is not None:
            return self._look_at(self._successor, wait_s)
        due = [n for n, one in enumerate(self._controllers) if one.mark != self._mark and not one.kept.down]
        if not due or self._trouble:
            return None
        number, old = due[0], self._controllers[due[0]]
        if self._state is not None:
            self._state.leaves(_key(old), old.process)
        # Where a supervisor died meanwhile, the one before may not have ended the one before that.
        ended = self._leaving(old.name) | {_key(old): old.process}
        successor = self._started(self._made(number, ended.values()))
        self._successor = ServiceSuccessor(number, successor, successor.kept.service, self._clock)
        return None

    def _look_at(self, successor: ServiceSuccessor[_Controller], wait_s: float) -> None:
        old = self._controllers[successor.number]
        try:
            if not successor.ready(wait_s):
                return
        except ServiceFailed as error:
            if old.kept.service.ended() is None:
                self._stay(successor, old, error)
                return
            # It has ended the one before, and died or hangs: it is started again like any that dies.
            successor.service.kill()
        self._successor = None
        old.kept.service.stop(STOP_S)
        self._controllers[successor.number] = successor.what
        self._say(f"{old.name} is replaced")

    def _stay(self, successor: ServiceSuccessor[_Controller], old: _Controller, error: ServiceFailed) -> None:
        """Go on with the controller that was to be replaced."""
        self._successor = None
        successor.service.stop(0.0)
        self._trouble = f"{error}{self._words(old.name)}; the one before goes on"
        self._say(self._trouble)
        if self._state is not None:
            self._state.stays(old.name, _key(old), old.mark)


def _key(controller: _Controller) -> str:
    """What a controller that is replaced is called in the cluster's state."""
    return f"{controller.name}/{controller.mark}"
