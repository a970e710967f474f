"""The services of a cluster on the machine of `serve`: controllers, KV index and routers, started and kept alive.

Of a detached cluster they outlive this process, and the next one takes them over as they are. Those of another build
than its own it replaces: the controller and the index by an end and a start, which workers and routers don't notice, a
router by one that takes its port over (`router.api.port_handover`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from cluster.processes.process_ids import kill_process
from cluster.processes.run_folder import RunFiles
from cluster.serve.child_service import CONTROLLER, ROUTER, ChildService, ServiceFailed
from cluster.serve.detached_state import DetachedState, ServiceProcess
from cluster.serve.kept_service import KeptService, PartFailed
from cluster.serve.kv_index_process import KV_INDEX, index_arguments, index_wanted
from cluster.serve.local_controllers import LocalControllers
from cluster.serve.preflight import ServePlan, free_port
from cluster.serve.router_probe import RouterProbe
from contracts.build_id import build_id
from contracts.clock import Clock
from contracts.cluster_secret import SECRET_VARIABLE

POLL_S = 0.1
STOP_S = 1.5
"""Seconds that a service has to end in order."""
REPLACE_S = 90.0
"""Seconds in which a router that takes over the port of another one must serve."""


class ClusterServices:
    """The controllers' and the routers' processes. Use it from the main thread only (`ChildService`)."""

    def __init__(
        self,
        prepared: ServePlan,
        folder: RunFiles,
        clock: Clock,
        say: Callable[[str], None],
        words: Callable[[str], str],
        *,
        address: str,
        secret: str,
        admin: Mapping[str, str],
        ledger: Mapping[str, str],
        router_command: Sequence[str] = ROUTER,
        state: DetachedState | None = None,
    ) -> None:
        """`address`: where workers reach the controllers. `secret`: the cluster's, in hex; `admin`: what the routers'
        environment has for operators; `ledger`: what the controllers' has for the ledger's server. `state`: the
        detached cluster's; None where services end with this process. `say` and `words` as of `KeptService`."""
        self._prepared, self._folder, self._clock, self._say, self._words = prepared, folder, clock, say, words
        self._state, self._router_command = state, router_command
        self._environment = dict(os.environ) | ({SECRET_VARIABLE: secret} if secret else {})
        self._admin, self._ledger_secret = admin, ledger
        self._settings = folder.logs / ".config.json"
        kept = state.ports if state is not None else ()
        self._local = LocalControllers.plan(
            prepared.config.cluster, address, kept, lambda port: free_port(address, port), folder.temporary
        )
        self._build = build_id()
        # The table's layout is a build's.
        self._table = folder.temporary / f"kv-index.{self._build}"
        self.endpoint = self._local.endpoints
        """Where the controllers are reached, ``host:port``, several with commas."""
        self.routers: list[tuple[KeptService, RouterProbe]] = []
        self._leaving: dict[str, RouterProbe] = {}
        """Probes of the routers that others have replaced and that finish their answers, by their name in the state."""

    def start(self, stack: ExitStack) -> None:
        """Start all services, or take over those that run; they end with `stack`."""
        prepared = self._prepared
        self._settings.touch(mode=0o600)  # It may have the ledger's password.
        self._settings.write_text(json.dumps(self._local.settings(prepared.config).to_dict()))
        environment = {**self._environment, **self._ledger_secret}
        if self._state is None or not self._state.begun:
            for line in self._local.check(environment):
                self._say(line)
        if self._state is not None:
            self._state.ports = self._local.ports
            self._state.save()
        self._controllers = [
            self._kept(
                name,
                CONTROLLER,
                self._local.arguments(number, self._settings),
                environment,
                stack,
                self._local.meanwhile(number),
            )
            for number, name in enumerate(self._local.names)
        ]
        self._kv_index = self._index(stack) if index_wanted(prepared.config) else None
        self.routers = [self._router(number, stack) for number in range(prepared.options.routers)]

    def probe(self, stack: ExitStack) -> None:
        """Ask the routers from now on whether they live, until `stack` ends."""
        for _, probe in self.routers:
            stack.callback(probe.stop)
            probe.start()
        stack.callback(self._end_leaving)
        if self._state is not None:
            for name in self._state.leaving:
                self._leaving[name] = RouterProbe(self._live(name), self._clock)
                self._leaving[name].start()

    def check(self) -> None:
        """Raise `PartFailed` where a service has ended, which it may not while the cluster starts."""
        for kept in (*self._controllers, *(router for router, _ in self.routers)):
            if (how := kept.service.ended()) is not None:
                raise PartFailed(f"the {kept.service.name} ended ({how}){self._words(kept.service.name)}")

    def tend(self) -> None:
        """Kill routers that hang, and start again what has ended. Raises `PartFailed` where that happens too often."""
        for controller in self._controllers:
            if failed := controller.tend():
                raise PartFailed(failed)
        for router, probe in self.routers:
            self._tend_router(router, probe)
        self._tend_leaving()
        if self._kv_index is not None and (failed := self._kv_index.tend()):
            self._say(f"{failed}; from now on the routers go by what they have sent")
            self._kv_index = None

    def _tend_router(self, router: KeptService, probe: RouterProbe) -> None:
        was_down = router.down
        if not was_down and probe.silent_s >= self._prepared.config.router.stall_s:
            self._say(f"{router.service.name} hung: no answer for {probe.silent_s:.0f} s (router.stall_s)")
            router.service.kill()
        if failed := router.tend():
            raise PartFailed(failed)
        if was_down and not router.down:
            probe.started_again()

    def _tend_leaving(self) -> None:
        """Kill replaced routers that hang: their sockets listen still, so the kernel would give them connections."""
        if not self._leaving or self._state is None:
            return
        there = self._state.leaving
        for name, probe in list(self._leaving.items()):
            if name in there and probe.silent_s >= self._prepared.config.router.stall_s:
                self._say(f"{name}, which is replaced, hung: no answer for {probe.silent_s:.0f} s (router.stall_s)")
                kill_process(there[name].pid, there[name].started)
            if name not in there:
                probe.stop()
                del self._leaving[name]

    def _end_leaving(self) -> None:
        for probe in self._leaving.values():
            probe.stop()
        if self._state is not None:
            for process in self._state.leaving.values():
                kill_process(process.pid, process.started)

    def _index(self, stack: ExitStack) -> KeptService:
        arguments = index_arguments(self.endpoint, self._table, self._settings)
        meanwhile = "the routers go by what they have sent"
        return self._kept("kv-index", KV_INDEX, arguments, self._environment, stack, meanwhile)

    def _router(self, number: int, stack: ExitStack) -> tuple[KeptService, RouterProbe]:
        prepared, options = self._prepared, self._prepared.options
        several, security = options.routers > 1, prepared.config.security
        name = f"router-{number}" if several else "router"
        live = self._live(f"{name}.{self._build}")
        old = self._state.running(name) if self._state is not None else None
        replaces = old is not None and old.build != self._build
        if old is not None and replaces and not self._lives(f"{name}.{old.build}"):
            self._say(f"{name} hung: it is ended, not replaced in order")
            kill_process(old.pid, old.started)
            old, replaces = None, False
        arguments = [
            *("--model", str(prepared.spec.path), "--controller", self.endpoint),
            *("--host", options.host, "--port", str(prepared.port)),
            *("--name", name, "--config-json", str(self._settings), "--live-socket", str(live)),
            *("--handover-socket", str(self._handover(name, self._build))),
            *(("--take-over", str(self._handover(name, old.build))) if old is not None and replaces else ()),
            *(("--kv-index", str(self._table)) if self._kv_index is not None else ()),
            *(("--reuse-port", "--admin-port", str(security.admin_port + number)) if several else ()),
        ]
        environment = {**self._environment, **self._admin}
        kept = self._kept(name, self._router_command, arguments, environment, stack, hands_over=True)
        if old is not None and replaces:
            self._await_router(kept, old)
        return kept, RouterProbe(live, self._clock)

    def _live(self, name: str) -> Path:
        """Where a router is asked whether it lives, by its name and build."""
        return self._folder.temporary / f"{name}.live"

    def _lives(self, name: str) -> bool:
        return RouterProbe(self._live(name), self._clock).lives(self._prepared.config.router.stall_s)

    def _handover(self, name: str, build: str) -> Path:
        """Where a router hands its port over."""
        return self._folder.temporary / f"{name}.{build}.handover"

    def _await_router(self, kept: KeptService, old: ServiceProcess) -> None:
        """Wait until a router has taken the port of the `old` one over. Raises `PartFailed`; the old one goes on
        then."""
        name, deadline = kept.service.name, self._clock.now() + REPLACE_S
        try:
            while not kept.service.listening(POLL_S):
                if self._clock.now() > deadline:
                    raise PartFailed(f"the {name} of this build doesn't serve within {REPLACE_S:g} s")
        except (ServiceFailed, PartFailed) as error:
            kept.service.stop(0.0)
            assert self._state is not None
            self._state.started(name, old)
            raise PartFailed(f"{error}{self._words(name)}") from None
        assert self._state is not None
        self._state.leaves(name, old)
        self._say(f"{name} is replaced; the one before finishes its answers")

    def _kept(
        self,
        name: str,
        command: Sequence[str],
        arguments: list[str],
        environment: dict[str, str],
        stack: ExitStack,
        meanwhile: str = "",
        *,
        hands_over: bool = False,
    ) -> KeptService:
        """Start a service, or take its process over. One of another build is ended first, unless it `hands_over`: then
        it ends by itself once the new one serves."""
        state = self._state
        service = ChildService(name, command, arguments, self._folder.logs, environment, tied=state is None)
        stack.callback(service.stop, STOP_S)

        def started(pid: int, began: int) -> None:
            self._folder.owns(pid, began)
            if state is not None:
                state.started(name, ServiceProcess(pid, began, self._build))

        config = self._prepared.config.cluster
        kept = KeptService(service, config, self._clock, self._say, started, self._words, meanwhile)
        old = state.running(name) if state is not None else None
        if old is not None and old.build == self._build:
            service.adopt(old.pid, old.started)
            return kept
        if old is not None and not hands_over:
            service.adopt(old.pid, old.started)
            service.stop(STOP_S)
            self._say(f"{name} is replaced")
        kept.start()
        return kept
