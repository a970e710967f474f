"""The routers' processes on the machine of `serve`.

A router's successor takes its port over (`router.api.listeners`), so no connection is refused, and the old process
ends once its answers have. The sockets for that, and for the probe whether a router lives, are named by router and
mark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from twinpool.cluster.processes.process_ids import kill_process, same_process, terminate_process
from twinpool.cluster.processes.run_folder import RunFiles
from twinpool.cluster.serve.child_service import ChildService
from twinpool.cluster.serve.detached_state import DetachedState, ServiceProcess
from twinpool.cluster.serve.kept_service import MakeService, PartFailed
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.rolling_services import RollingServices, ServiceReplica
from twinpool.cluster.serve.router_probe import RouterProbe
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
    """The file with the settings, which is written before `change`."""
    kv_index: Path | None
    """The KV index's table."""


@dataclass(frozen=True, slots=True)
class RouterReplica(ServiceReplica):
    """A router and the probe that asks it whether it lives."""

    probe: RouterProbe


@dataclass(frozen=True, slots=True)
class _LeavingRouter:
    """A router that was replaced, and that finishes its answers."""

    process: ServiceProcess
    probe: RouterProbe
    service: ChildService | None
    """Its service where this process has started or adopted it."""

    @property
    def running(self) -> bool:
        if self.service is not None:
            return self.service.ended() is None
        return same_process(self.process.pid, self.process.started)


class RouterServices(RollingServices[RouterReplica]):
    """The routers of one machine. Use it from the main thread only (`ChildService`)."""

    def __init__(
        self,
        prepared: ServePlan,
        folder: RunFiles,
        clock: Clock,
        report: Callable[[str], None],
        last_words: Callable[[str], str],
        make: MakeService,
        state: DetachedState | None,
    ) -> None:
        super().__init__(clock, report, last_words, state)
        self._prepared, self._folder, self._make = prepared, folder, make
        self._leaving: dict[str, _LeavingRouter] = {}
        """By name and mark."""
        self._probes = False
        """Whether routers are asked if they live."""

    def start(self, how: RouterCommand, stack: ExitStack) -> None:
        """Start all of them, or adopt those that run; they end with `stack`. Raises `PartFailed` where a stale one
        can't be replaced; it goes on then."""
        self._how, self._stack = how, stack
        stack.callback(self._end_leaving)
        if self._state is not None:
            for key, process in self._state.leaving.items():
                if key.startswith("router"):
                    self._leaving[key] = _LeavingRouter(process, self._probe(key), None)
        self._start(self._prepared.options.routers)

    def replicas(self) -> list[RouterReplica]:
        return list(self._replicas)

    def probe(self) -> None:
        """Ask the routers from now on whether they live, until the cluster ends."""
        self._probes = True
        for probe in [one.probe for one in self._replicas] + [one.probe for one in self._leaving.values()]:
            self._ask(probe)

    def change(self, prepared: ServePlan) -> None:
        """Go by another plan; routers that read settings that differ are replaced one by one."""
        self._prepared, self._obstacle = prepared, ""

    def drain(self) -> None:
        """Have all of them end once their running answers have (`RouterServer`), replaced ones too."""
        if self._successor is not None:  # It would take a port over, and accept new requests.
            self._successor.replica.kept.service.kill()
        for router in self._replicas:
            router.kept.service.terminate()
        for one in self._leaving.values():
            if one.running:
                terminate_process(one.process.pid, one.process.started)

    def drained(self) -> bool:
        """Whether all of them have ended."""
        ended = all(router.kept.service.ended() is not None for router in self._replicas)
        return ended and not any(one.running for one in self._leaving.values())

    def tend(self) -> None:
        """Kill routers that hang, start again what has ended, and go on replacing. Raises `PartFailed` where one ends
        too often."""
        stall_s = self._prepared.config.router.stall_s
        for router in self._replicas:
            before = router.kept.service.process
            if not router.kept.down and router.probe.silent_s >= stall_s:
                self._report(f"{router.name} hung: no answer for {router.probe.silent_s:.0f} s (router.stall_s)")
                router.kept.service.kill()
            if failed := router.kept.tend():
                raise PartFailed(failed)
            if router.kept.service.process != before:  # It may have been started again at once.
                router.probe.started_again()
        self._tend_leaving(stall_s)
        self._replace_next()

    # ------------------------------------------------------------ this kind

    @property
    def mark(self) -> str:
        return f"{self._build}.{routers_digest(self._prepared.config)}"

    def _key(self, replica: RouterReplica) -> str:
        return f"{replica.name}.{replica.mark}"

    def _begin(self, number: int) -> RouterReplica:
        """A router that hangs is killed, and a new one started."""
        name, state = self._name(number), self._state
        old = state.running(name) if state is not None else None
        if old is not None and state is not None:
            mark = state.marks.get(name, old.build)
            router = RouterReplica(self._replica(number).kept, mark, old.build, self._probe(f"{name}.{mark}"))
            if mark == self.mark or router.probe.lives(self._prepared.config.router.stall_s):
                router.kept.service.adopt(old.pid, old.started)
                return router
            self._report(f"{name} hung: it is ended, not replaced in order")
            kill_process(old.pid, old.started)
        return self._launch(self._replica(number))

    def _make_successor(self, number: int, old: RouterReplica) -> RouterReplica:
        return self._replica(number, takes_over=old.mark)

    def _retire(self, old: RouterReplica, new: RouterReplica) -> None:
        self._leaving[self._key(old)] = _LeavingRouter(old.process, old.probe, old.kept.service)
        if self._probes:
            self._ask(new.probe)
        self._report(f"{old.name} is replaced; the one before finishes its answers")

    def _replica(self, number: int, takes_over: str = "") -> RouterReplica:
        """A router of the plan, not started yet. `takes_over`: the mark of the one that it replaces."""
        prepared, how = self._prepared, self._how
        several, security = prepared.options.routers > 1, prepared.config.security
        name = self._name(number)
        key = f"{name}.{self.mark}"
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
        return RouterReplica(kept, self.mark, self._build, self._probe(key))

    # ------------------------------------------------------------ probes, and routers that leave

    def _ask(self, probe: RouterProbe) -> None:
        self._stack.callback(probe.stop)
        probe.start()

    def _probe(self, key: str) -> RouterProbe:
        return RouterProbe(self._live(key), self._clock)

    def _name(self, number: int) -> str:
        return f"router-{number}" if self._prepared.options.routers > 1 else "router"

    def _live(self, key: str) -> Path:
        """The socket on which a router is asked whether it lives, by name and mark."""
        return self._folder.temporary / f"{key}.live"

    def _handover(self, key: str) -> Path:
        """The socket on which a router hands its port over."""
        return self._folder.temporary / f"{key}.handover"

    def _tend_leaving(self, stall_s: float) -> None:
        """Kill replaced routers that hang: their sockets still listen, so the kernel would give them connections."""
        for key, one in list(self._leaving.items()):
            if not one.running:
                one.probe.stop()
                del self._leaving[key]
            elif one.probe.silent_s >= stall_s:
                self._report(
                    f"{key}, which is replaced, hung: no answer for {one.probe.silent_s:.0f} s (router.stall_s)"
                )
                kill_process(one.process.pid, one.process.started)

    def _end_leaving(self) -> None:
        for one in self._leaving.values():
            one.probe.stop()
            if one.running:
                kill_process(one.process.pid, one.process.started)
