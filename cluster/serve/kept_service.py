"""A child service that is kept alive: started again when it ends or hangs, unless it does so too often."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.cluster.serve.child_service import ChildService
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import TwinpoolError


class PartFailed(TwinpoolError):
    """Raised when a part of the cluster did not come up, or is gone for good; the text names the part and why."""


class KeptService:
    """One service and the rule by which it is started again (`cluster.processes.restart_policy`)."""

    def __init__(
        self,
        service: ChildService,
        config: ClusterConfig,
        clock: Clock,
        say: Callable[[str], None],
        started: Callable[[int, int], None],
        words: Callable[[str], str],
        meanwhile: str = "",
    ) -> None:
        """`say` shows a line to the operator; `started` is told the pid and start time of each new process; `words`
        returns the last words of a service's log, ready to be appended to a line. `meanwhile`: what goes on without the
        service, in words that are added to the news of its death."""
        self.service = service
        self._clock, self._say, self._started, self._words = clock, say, started, words
        self._meanwhile = meanwhile and f"; {meanwhile}"
        self._restarts, self._since = RestartHistory(config), clock.now()
        self._restart_at: float | None = None

    @property
    def down(self) -> bool:
        """Whether its process has ended and the next one hasn't been started."""
        return self._restart_at is not None

    def start(self) -> None:
        self._started(*self.service.start())
        self._since, self._restart_at = self._clock.now(), None

    def tend(self) -> str:
        """Start the service again where it has ended, once that is due; returns why it won't be started any more,
        empty otherwise."""
        name = self.service.name
        if self._restart_at is None:
            if (how := self.service.ended()) is None:
                return ""
            wait_s = self._restarts.died(self._clock.now(), self._since)
            if self._restarts.too_many:
                return f"the {name} died ({how}) too often{self._words(name)}"
            wait = f" in {wait_s:g} s" if wait_s else ""
            self._say(f"{name} died ({how}); restarting{wait}{self._meanwhile}{self._words(name)}")
            self._restart_at = self._clock.now() + wait_s
        if self._clock.now() >= self._restart_at:
            self.start()
        return ""


class MakeService(Protocol):
    """Makes a service that isn't started yet; it ends with `stack`."""

    def __call__(
        self,
        name: str,
        command: Sequence[str],
        arguments: list[str],
        environment: Mapping[str, str],
        stack: ExitStack,
        meanwhile: str = "",
    ) -> KeptService: ...
