"""The processes of one kind of service on the machine of `serve`: started or adopted, kept alive, and replaced.

A process of another build, or with other settings than the configuration's, is stale. Stale ones are replaced one by
one: the successor starts while the old process serves, and takes its place once it listens. Where the successor fails,
the old process stays, and nothing more is replaced until the configuration changes. A process's *mark* is its build and
the digest of the settings that its kind reads. In a detached cluster processes outlive this one, and
`DetachedState` says which run, and which are being replaced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinpool.cluster.serve.child_service import ServiceFailed
from twinpool.cluster.serve.detached_state import DetachedState, ServiceProcess
from twinpool.cluster.serve.kept_service import KeptService, PartFailed
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock

POLL_S = 0.1
REPLACE_S = 90.0
"""Seconds in which a successor must listen."""


@dataclass(frozen=True, slots=True)
class ServiceReplica:
    """One process of the kind, across its restarts."""

    kept: KeptService
    mark: str
    build: str

    @property
    def name(self) -> str:
        return self.kept.service.name

    @property
    def process(self) -> ServiceProcess:
        return ServiceProcess(*self.kept.service.process, self.build)


ReplicaT = TypeVar("ReplicaT", bound=ServiceReplica)


@dataclass(frozen=True, slots=True)
class _Successor(Generic[ReplicaT]):
    """A replica on its way to the place of replica `number`."""

    number: int
    replica: ReplicaT
    deadline: float

    def ready(self, wait_s: float, now: Callable[[], float]) -> bool:
        """Whether it listens; waits up to `wait_s`. Raises `ServiceFailed` where it has ended or is too late."""
        if self.replica.kept.service.listening(wait_s):
            return True
        if now() > self.deadline:
            raise ServiceFailed(f"the next {self.replica.name} isn't ready within {REPLACE_S:g} s")
        return False


class RollingServices(ABC, Generic[ReplicaT]):
    """See the module's prose. Use it from the main thread only (`ChildService`)."""

    def __init__(
        self,
        clock: Clock,
        report: Callable[[str], None],
        last_words: Callable[[str], str],
        state: DetachedState | None,
    ) -> None:
        """`report` and `last_words` as of `KeptService`; `state`: the detached cluster's, None where services end with
        this process."""
        self._clock, self._report, self._last_words, self._state = clock, report, last_words, state
        self._build = build_id()
        self._replicas: list[ReplicaT] = []
        self._successor: _Successor[ReplicaT] | None = None
        self._obstacle = ""
        """Why nothing is replaced until the next change; empty: nothing stands in the way."""

    # ------------------------------------------------------------ what a kind defines

    @property
    @abstractmethod
    def mark(self) -> str:
        """The mark that a process of the present configuration has."""

    @abstractmethod
    def _key(self, replica: ReplicaT) -> str:
        """The name and mark of a replica that is being replaced, for the cluster's state."""

    @abstractmethod
    def _begin(self, number: int) -> ReplicaT:
        """Start replica `number`, or adopt the process that runs, whatever its mark."""

    @abstractmethod
    def _make_successor(self, number: int, old: ReplicaT) -> ReplicaT:
        """A replica of the present configuration, not started yet, that takes the place of `old`."""

    @abstractmethod
    def _retire(self, old: ReplicaT, new: ReplicaT) -> None:
        """Do what remains once `new` listens in the place of `old`."""

    def _lost(self, old: ReplicaT) -> bool:
        """Whether the old process can't stay where its successor has failed."""
        return False

    # ------------------------------------------------------------ for the services of a cluster

    def services(self) -> list[KeptService]:
        return [replica.kept for replica in self._replicas]

    def stale(self) -> tuple[int, str]:
        """The number of stale processes, and the obstacle to replacing them, if any."""
        return sum(replica.mark != self.mark for replica in self._replicas), self._obstacle

    def _start(self, count: int) -> None:
        """Start or adopt all, and replace those that are stale. Raises `PartFailed` where one can't be replaced; it
        goes on then."""
        self._replicas = [self._begin(number) for number in range(count)]
        while self.stale()[0] and not self._obstacle:
            self._replace_next(POLL_S)
        if self._obstacle:
            raise PartFailed(self._obstacle)

    def _launch(self, replica: ReplicaT) -> ReplicaT:
        if self._state is not None:
            self._state.marks[replica.name] = replica.mark  # Saved with its start.
        replica.kept.start()
        return replica

    # ------------------------------------------------------------ replacing

    def _replace_next(self, wait_s: float = 0.0) -> None:
        """Begin to replace the next stale process, or wait up to `wait_s` for the successor that is on its way."""
        if self._successor is not None:
            return self._poll_successor(self._successor, wait_s)
        due = [n for n, replica in enumerate(self._replicas) if replica.mark != self.mark and not replica.kept.down]
        if not due or self._obstacle:
            return None
        number, old = due[0], self._replicas[due[0]]
        if self._state is not None:
            self._state.leaves(self._key(old), old.process)
        successor = self._launch(self._make_successor(number, old))
        self._successor = _Successor(number, successor, self._clock.now() + REPLACE_S)
        return None

    def _poll_successor(self, successor: _Successor[ReplicaT], wait_s: float) -> None:
        old, new = self._replicas[successor.number], successor.replica
        try:
            if not successor.ready(wait_s, self._clock.now):
                return
        except ServiceFailed as error:
            if not self._lost(old):
                self._keep(old, new, error)
                return
            new.kept.service.kill()  # It is started again like any that dies.
        self._successor = None
        self._replicas[successor.number] = new
        self._retire(old, new)

    def _keep(self, old: ReplicaT, new: ReplicaT, error: ServiceFailed) -> None:
        """Go on with a process whose successor has failed."""
        self._successor = None
        new.kept.service.stop(0.0)
        self._obstacle = f"{error}{self._last_words(old.name)}; the one before goes on"
        self._report(self._obstacle)
        if self._state is not None:
            self._state.stays(old.name, self._key(old), old.mark)
