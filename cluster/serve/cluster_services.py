"""The services of a cluster on the machine of `serve`: controllers, KV index and routers, started and kept alive.

Of a detached cluster they outlive this process, and the next one takes them over as they are. Those of another build
than its own, or with other settings, are replaced: controllers and routers one by one
(`cluster.serve.rolling_services`), the index by an end and a start, which nobody notices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.processes.run_folder import RunFiles
from twinpool.cluster.serve.child_service import ROUTER, STOP_S, ChildService
from twinpool.cluster.serve.controller_services import ControllerServices
from twinpool.cluster.serve.detached_state import DetachedState, ServiceProcess
from twinpool.cluster.serve.kept_service import KeptService, PartFailed
from twinpool.cluster.serve.kv_index_process import KV_INDEX, index_arguments, index_wanted
from twinpool.cluster.serve.local_controllers import LocalControllers
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.router_services import RouterCommand, RouterReplica, RouterServices
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.cluster_secret import SECRET_VARIABLE


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
        self._controllers = ControllerServices(
            self._local, prepared.config, self._settings, clock, say, words, self._service, state
        )
        self._routers = RouterServices(prepared, folder, clock, say, words, self._service, state)

    def start(self, stack: ExitStack) -> None:
        """Start all services, or take over those that run; they end with `stack`."""
        prepared = self._prepared
        self._write_settings()
        environment = {**self._environment, **self._ledger_secret}
        if self._state is None or not self._state.begun:
            for line in self._local.check(environment, prepared.config.security):
                self._say(line)
        if self._state is not None:
            self._state.ports = self._local.ports
            self._state.save()
        self._controllers.start(environment, stack)
        self._kv_index = self._index(stack) if index_wanted(prepared.config) else None
        routers = RouterCommand(
            self._router_command,
            {**self._environment, **self._admin},
            self.endpoint,
            self._settings,
            self._table if self._kv_index is not None else None,
        )
        self._routers.start(routers, stack)

    @property
    def routers(self) -> list[RouterReplica]:
        return self._routers.replicas()

    def change(self, prepared: ServePlan) -> None:
        """Go by another plan: what reads other settings then is replaced, routers and controllers one by one."""
        self._prepared = prepared
        self._write_settings()
        self._routers.change(prepared)
        self._controllers.change(prepared.config)

    def stale(self) -> tuple[int, str]:
        """The number of routers and controllers with other settings than the plan's, and the obstacle to replacing
        them, if any."""
        routers, obstacle = self._routers.stale()
        controllers, first = self._controllers.stale()
        return routers + controllers, first or obstacle

    def probe(self) -> None:
        """Ask the routers from now on whether they live."""
        self._routers.probe()

    def check(self) -> None:
        """Raise `PartFailed` where a service has ended, which it may not while the cluster starts."""
        for kept in (*self._controllers.services(), *self._routers.services()):
            if (how := kept.service.ended()) is not None:
                raise PartFailed(f"the {kept.service.name} ended ({how}){self._words(kept.service.name)}")

    def drain(self) -> None:
        """Have the routers end once the answers that run have ended: they aren't started again."""
        self._routers.drain()

    def drained(self) -> bool:
        """Whether all routers have ended."""
        return self._routers.drained()

    def tend_controllers(self) -> None:
        """Start controllers again that have ended. Raises `PartFailed` where that happens too often."""
        self._controllers.tend()

    def tend(self) -> None:
        """Kill routers that hang, and start again what has ended. Raises `PartFailed` where that happens too often."""
        self._controllers.tend()
        self._routers.tend()
        if self._kv_index is not None and (failed := self._kv_index.tend()):
            self._say(f"{failed}; from now on the routers go by what they have sent")
            self._kv_index = None

    def _index(self, stack: ExitStack) -> KeptService:
        arguments = index_arguments(self.endpoint, self._table, self._settings)
        meanwhile = "the routers go by what they have sent"
        return self._kept("kv-index", KV_INDEX, arguments, self._environment, stack, meanwhile)

    def _write_settings(self) -> None:
        self._settings.touch(mode=0o600)  # It may have the ledger's password.
        self._settings.write_text(json.dumps(self._local.settings(self._prepared.config).to_dict()))

    def _service(
        self,
        name: str,
        command: Sequence[str],
        arguments: list[str],
        environment: Mapping[str, str],
        stack: ExitStack,
        meanwhile: str = "",
    ) -> KeptService:
        """A service that isn't started yet; it ends with `stack`."""
        state = self._state
        service = ChildService(name, command, arguments, self._folder.logs, environment, tied=state is None)
        stack.callback(service.stop, STOP_S)

        def started(pid: int, began: int) -> None:
            self._folder.owns(pid, began)
            if state is not None:
                state.started(name, ServiceProcess(pid, began, self._build))

        config = self._prepared.config.cluster
        return KeptService(service, config, self._clock, self._say, started, self._words, meanwhile)

    def _kept(
        self,
        name: str,
        command: Sequence[str],
        arguments: list[str],
        environment: Mapping[str, str],
        stack: ExitStack,
        meanwhile: str = "",
    ) -> KeptService:
        """Start a service, or take its process over; one of another build is ended first."""
        kept = self._service(name, command, arguments, environment, stack, meanwhile)
        old = self._state.running(name) if self._state is not None else None
        if old is not None:
            kept.service.adopt(old.pid, old.started)
            if old.build == self._build:
                return kept
            kept.service.stop(STOP_S)
            self._say(f"{name} is replaced")
        kept.start()
        return kept
