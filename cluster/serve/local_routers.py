"""The routers on the machine of `serve`: started or taken over, kept alive, and replaced where their settings change.

A router of another build, or with other settings, is replaced by one that takes its port over
(`router.api.port_handover`), one after the other: no connection is refused, and the one before finishes its answers. A
router's *mark* is its build and the digest of the settings that routers read; its sockets for that are named by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from twinpool.cluster.processes.process_ids import kill_process, same_process, terminate_process
from twinpool.cluster.processes.run_folder import RunFiles
from twinpool.cluster.serve.child_service import ChildService, ServiceFailed
from twinpool.cluster.serve.detached_state import DetachedState, ServiceProcess
from twinpool.cluster.serve.kept_service import KeptService, MakeService, PartFailed
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.router_probe import RouterProbe
from twinpool.cluster.serve.service_successor import POLL_S, ServiceSuccessor
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.setting_effects import routers_digest


@dataclass(frozen=True, slots=True)
class RouterCommand:
    """What the routers of a cluster are started with."""

    command: Sequence[str]
    environment: Mapping[str, str]
    controllers: str
    """The controllers' endpoints."""
    settings: Path
    """The file with the settings; whoever changes them writes it first."""
    kv_index: Path | None
    """The KV index's table."""


@dataclass(frozen=True, slots=True)
class ServingRouter:
    """A router that isn't replaced."""

    kept: KeptService
    probe: RouterProbe
    mark: str
    build: str


@dataclass(frozen=True, slots=True)
class _LeavingRouter:
    """A router that another one has replaced, and that finishes its answers."""

    process: ServiceProcess
    probe: RouterProbe
    service: ChildService | None
    """Its service where this process has started it or taken it over."""

    @property
    def there(self) -> bool:
        if self.service is not None:
            return self.service.ended() is None
        return same_process(self.process.pid, self.process.started)


class LocalRouters:
    """The routers' processes. Use it from the main thread only (`ChildService`)."""

    def __init__(
        self,
        prepared: ServePlan,
        folder: RunFiles,
        clock: Clock,
        say: Callable[[str], None],
        words: Callable[[str], str],
        make: MakeService,
        state: DetachedState | None,
    ) -> None:
        """`say` and `words` as of `KeptService`; `state` is the detached cluster's."""
        self._prepared, self._folder, self._clock, self._say, self._words = prepared, folder, clock, say, words
        self._make, self._state = make, state
        self._build = build_id()
        self._routers: list[ServingRouter] = []
        self._leaving: dict[str, _LeavingRouter] = {}
        """By name and mark."""
        self._successor: ServiceSuccessor[ServingRouter] | None = None
        self._trouble = ""
        """Why nothing is replaced until the next change; empty: nothing stands in the way."""
        self._probes = False
        """Whether routers are asked if they live."""

    def start(self, how: RouterCommand, stack: ExitStack) -> None:
        """Start all of them, or take over those that run; they end with `stack`. Raises `PartFailed` where one of
        another mark can't be replaced; it goes on then."""
        self._how, self._stack = how, stack
        stack.callback(self._end_leaving)
        if self._state is not None:
            for key, process in self._state.leaving.items():
                if key.startswith("router"):
                    self._leaving[key] = _LeavingRouter(process, self._probe(key), None)
        self._routers = [self._begin(number) for number in range(self._prepared.options.routers)]
        while self.behind()[0] and not self._trouble:
            self._replace_next(POLL_S)
        if self._trouble:
            raise PartFailed(self._trouble)

    def services(self) -> list[tuple[KeptService, RouterProbe]]:
        """Each router with the probe that asks it."""
        return [(router.kept, router.probe) for router in self._routers]

    def probe(self) -> None:
        """Ask the routers from now on whether they live, until the cluster ends."""
        self._probes = True
        for probe in [one.probe for one in self._routers] + [one.probe for one in self._leaving.values()]:
            self._ask(probe)

    def change(self, prepared: ServePlan) -> None:
        """Go by another plan: routers that read other settings then are replaced, one after the other."""
        self._prepared, self._trouble = prepared, ""

    def behind(self) -> tuple[int, str]:
        """How many routers have other settings than the plan's still, and what keeps them so, in words."""
        return len([router for router in self._routers if router.mark != self._mark]), self._trouble

    def drain(self) -> None:
        """Have all of them end once the answers that run have ended (`RouterServer`), those that are replaced too."""
        if self._successor is not None:  # It would take a port over, and accept what is new.
            self._successor.service.kill()
        for router in self._routers:
            router.kept.service.terminate()
        for one in self._leaving.values():
            if one.there:
                terminate_process(one.process.pid, one.process.started)

    def drained(self) -> bool:
        """Whether all of them have ended."""
        ended = all(router.kept.service.ended() is not None for router in self._routers)
        return ended and not any(one.there for one in self._leaving.values())

    def tend(self) -> None:
        """Kill routers that hang, start again what has ended, and go on replacing. Raises `PartFailed` where one ends
        too often."""
        stall_s = self._prepared.config.router.stall_s
        for router in self._routers:
            before = router.kept.service.process
            if not router.kept.down and router.probe.silent_s >= stall_s:
                self._say(
                    f"{router.kept.service.name} hung: no answer for {router.probe.silent_s:.0f} s (router.stall_s)"
                )
                router.kept.service.kill()
            if failed := router.kept.tend():
                raise PartFailed(failed)
            if router.kept.service.process != before:  # It may have been started again at once.
                router.probe.started_again()
        self._tend_leaving(stall_s)
        self._replace_next()

    # ------------------------------------------------------------ inside

    @property
    def _mark(self) -> str:
        return f"{self._build}.{routers_digest(self._prepared.config)}"

    def _ask(self, probe: RouterProbe) -> None:
        self._stack.callback(probe.stop)
        probe.start()

    def _probe(self, key: str) -> RouterProbe:
        return RouterProbe(self._live(key), self._clock)

    def _name(self, number: int) -> str:
        return f"router-{number}" if self._prepared.options.routers > 1 else "router"

    def _live(self, key: str) -> Path:
        """Where a router is asked whether it lives, by its name and mark."""
        return self._folder.temporary / f"{key}.live"

    def _handover(self, key: str) -> Path:
        """Where a router hands its port over."""
        return self._folder.temporary / f"{key}.handover"

    def _begin(self, number: int) -> ServingRouter:
        """Start a router, or take over the one that runs, whatever its mark; one that hangs is ended first."""
        name, state = self._name(number), self._state
        old = state.running(name) if state is not None else None
        if old is not None and state is not None:
            mark = state.marks.get(name, old.build)
            router = ServingRouter(self._made(number).kept, self._probe(f"{name}.{mark}"), mark, old.build)
            if mark == self._mark or router.probe.lives(self._prepared.config.router.stall_s):
                router.kept.service.adopt(old.pid, old.started)
                return router
            self._say(f"{name} hung: it is ended, not replaced in order")
            kill_process(old.pid, old.started)
        return self._started(self._made(number))

    def _started(self, router: ServingRouter) -> ServingRouter:
        if self._state is not None:
            self._state.marks[router.kept.service.name] = router.mark  # Saved with its start.
        router.kept.start()
        return router

    def _made(self, number: int, takes_over: str = "") -> ServingRouter:
        """A router of the plan that isn't started yet. `takes_over`: the mark of the one that it replaces."""
        prepared, how = self._prepared, self._how
        several, security = prepared.options.routers > 1, prepared.config.security
        name = self._name(number)
        key = f"{name}.{self._mark}"
        arguments = [
            *("--model", str(prepared.spec.path), "--controller", how.controllers),
            *("--host", prepared.options.host, "--port", str(prepared.port)),
            *("--name", name, "--config-json", str(how.settings), "--live-socket", str(self._live(key))),
            *("--handover-socket", str(self._handover(key)), "--kept"),
            *(("--take-over", str(self._handover(f"{name}.{takes_over}"))) if takes_over else ()),
            *(("--kv-index", str(how.kv_index)) if how.kv_index is not None else ()),
            *(("--reuse-port", "--admin-port", str(security.admin_port + number)) if several else ()),
        ]
        kept = self._make(name, how.command, arguments, how.environment, self._stack)
        return ServingRouter(kept, self._probe(key), self._mark, self._build)

    def _replace_next(self, wait_s: float = 0.0) -> None:
        """Begin to replace the next router that is due, or wait so long for the one that is on its way."""
        if self._successor is not None:
            return self._look_at(self._successor, wait_s)
        due = [number for number, one in enumerate(self._routers) if one.mark != self._mark and not one.kept.down]
        if not due or self._trouble:
            return None
        number, old = due[0], self._routers[due[0]]
        if self._state is not None:
            self._state.leaves(f"{self._name(number)}.{old.mark}", self._process(old))
        router = self._started(self._made(number, old.mark))
        self._successor = ServiceSuccessor(number, router, router.kept.service, self._clock)
        return None

    def _look_at(self, successor: ServiceSuccessor[ServingRouter], wait_s: float) -> None:
        name, old = self._name(successor.number), self._routers[successor.number]
        key = f"{name}.{old.mark}"
        try:
            if not successor.ready(wait_s):
                return
        except ServiceFailed as error:
            self._successor = None
            successor.service.stop(0.0)
            self._trouble = f"{error}{self._words(name)}; the one before goes on"
            self._say(self._trouble)
            if self._state is not None:
                self._state.stays(name, key, old.mark)
            return
        self._successor = None
        self._leaving[key] = _LeavingRouter(self._process(old), old.probe, old.kept.service)
        self._routers[successor.number] = successor.what
        if self._probes:
            self._ask(successor.what.probe)
        self._say(f"{name} is replaced; the one before finishes its answers")

    def _process(self, router: ServingRouter) -> ServiceProcess:
        return ServiceProcess(*router.kept.service.process, router.build)

    def _tend_leaving(self, stall_s: float) -> None:
        """Kill replaced routers that hang: their sockets listen still, so the kernel would give them connections."""
        for key, one in list(self._leaving.items()):
            if not one.there:
                one.probe.stop()
                del self._leaving[key]
            elif one.probe.silent_s >= stall_s:
                self._say(f"{key}, which is replaced, hung: no answer for {one.probe.silent_s:.0f} s (router.stall_s)")
                kill_process(one.process.pid, one.process.started)

    def _end_leaving(self) -> None:
        for one in self._leaving.values():
            one.probe.stop()
            if one.there:
                kill_process(one.process.pid, one.process.started)
