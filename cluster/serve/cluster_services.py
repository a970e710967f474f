"""The services of a cluster on the machine of `serve`: controllers, KV index and routers, started and kept alive.

Of a detached cluster they outlive this process, and the next one takes them over as they are. Those of another build
than its own, or with other settings, are replaced: controllers and routers one by one
(`cluster.serve.rolling_services`), the index by an end and a start, which nobody notices. Without the index routers go
by what they have sent, so a cluster goes on when it can't be kept.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.processes.run_folder import RunFiles
from twinpool.cluster.serve.detached_state import DetachedState
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.rolling_services import ControllerServices, LocalControllers
from twinpool.cluster.serve.router_services import Router, RouterCommand, RouterServices, RoutersPlan
from twinpool.cluster.serve.service import ROUTER, STOP_S, PartFailed, Service, ServiceContext
from twinpool.contracts.build_id import build_id
from twinpool.contracts.checkpoint.pushed_weights import remove_all
from twinpool.contracts.cluster_secret import SECRET_VARIABLE
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.setting_effects import routers_digest
from twinpool.contracts.messages.router_report import RoutedModel
from twinpool.contracts.python_command import module_command

KV_INDEX = tuple(module_command("twinpool.router.kv_index_process"))
LOOPBACK = "tcp://127.0.0.1:0"
ORDERED_STORES = ("x86_64", "AMD64")
"""Machines on which one process sees another's stores in their order, by which routers read the table while it is
written (`router.kv_indexer.holder_table`)."""


def index_wanted(config: Config) -> bool:
    """Whether a KV index is to run: something goes by it, and workers publish."""
    return _asked_for(config) and bool(config.cache.events.endpoint)


def _asked_for(config: Config) -> bool:
    ordered = platform.machine() in ORDERED_STORES
    return config.router.kv_index == "auto" and config.router.policy == "cache_aware" and ordered


def with_kv_events(config: Config, folder: Path) -> Config:
    """`config` with KV events published on this host's loopback, where an index is to follow them and none are
    published yet. All workers must be on this host.

    Events carry prompts' tokens, and any user of the machine may connect to its loopback: readers need a key, which is
    made in `folder` unless there is one. Nobody but this user can read it.
    """
    if not _asked_for(config) or config.cache.events.endpoint:
        return config
    events = dataclasses.replace(config.cache.events, endpoint=LOOPBACK, replay_endpoint=LOOPBACK)
    security = config.security
    if not security.curve_key:
        import zmq.auth  # Where there are keys alone.

        own = folder / "kv-events"
        secret = own / "curve.key_secret"
        if not secret.exists():
            own.mkdir(0o700, exist_ok=True)
            zmq.auth.create_certificates(own, "curve")
        security = dataclasses.replace(security, curve_key=str(secret))
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, events=events), security=security)


def index_arguments(controller: str, table: Path, settings: Path) -> list[str]:
    """The arguments of the index's process. `controller`: its ``host:port``; `table`: where routers find the table;
    `settings`: the configuration as JSON."""
    return ["--controller", controller, "--table", str(table), "--config-json", str(settings)]


class ClusterServices:
    """The controllers' and the routers' processes. Use it from the main thread only (`Service`)."""

    def __init__(
        self,
        prepared: ServePlan,
        folder: RunFiles,
        context: ServiceContext,
        *,
        address: str,
        secret: str,
        admin: Mapping[str, str],
        ledger: Mapping[str, str],
    ) -> None:
        """`address`: where workers reach the controllers. `secret`: the cluster's, in hex; `admin`: what the routers'
        environment has for operators; `ledger`: what the controllers' has for the ledger's server."""
        self._prepared, self._context = prepared, context
        self._state = context.state if isinstance(context.state, DetachedState) else None
        self._environment = dict(os.environ) | ({SECRET_VARIABLE: secret} if secret else {})
        self._admin, self._ledger_secret = admin, ledger
        self._settings = folder.logs / ".config.json"
        kept = self._state.ports if self._state is not None else ()
        self._local = LocalControllers.plan(
            prepared.config.cluster, address, kept, lambda port: free_port(address, port), folder.temporary
        )
        # The table's layout is a build's.
        self._table = folder.temporary / f"kv-index.{build_id()}"
        self.endpoint = self._local.endpoints
        """Where the controllers are reached, ``host:port``, several with commas."""
        self._controllers = ControllerServices(self._context, self._local, prepared.config, self._settings)
        self._routers = RouterServices(self._context, RoutersPlan.of(prepared), folder.temporary)

    def start(self) -> None:
        """Start all services, or take over those that run."""
        prepared = self._prepared
        self._context.stack.callback(remove_all, prepared.config.engine.weight_roots)  # After all that could need them.
        self._write_settings()
        environment = {**self._environment, **self._ledger_secret}
        if self._state is None or not self._state.begun:
            for line in self._local.check(environment, prepared.config.security):
                self._context.report(line)
        if self._state is not None:
            self._state.ports = self._local.ports
            self._state.save()
        self._controllers.start(environment)
        self._kv_index = self._index() if index_wanted(prepared.config) else None
        self._routers.start(RouterCommand(ROUTER, {**self._environment, **self._admin}, self._served()))

    @property
    def routed(self) -> RoutedModel:
        """The model as a router of another process is told of it."""
        table = str(self._table) if self._kv_index is not None else ""
        model, digest = str(self._prepared.spec.path), routers_digest(self._prepared.config)
        return RoutedModel(model, self.endpoint, str(self._settings), table, digest, build_id())

    def _served(self) -> tuple[str, ...]:
        """The arguments that tell a router of it."""
        routed = self.routed
        index = ("--kv-index", routed.kv_index) if routed.kv_index else ()
        return ("--model", routed.model, "--controller", routed.controllers, "--config-json", routed.settings, *index)

    @property
    def routers(self) -> list[Router]:
        return self._routers.services()

    def change(self, prepared: ServePlan) -> None:
        """Go by another plan: what reads other settings then is replaced, routers and controllers one by one."""
        self._prepared, self._context.config = prepared, prepared.config.cluster
        self._write_settings()
        self._routers.change(RoutersPlan.of(prepared))
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
        for service in (*self._controllers.services(), *self._routers.services()):
            if (how := service.ended()) is not None:
                raise PartFailed(f"the {service.name} ended ({how}){self._context.last_words(service.name)}")

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
            self._context.report(f"{failed}; from now on the routers go by what they have sent")
            self._kv_index = None

    def _index(self) -> Service:
        """Start the index, or take its process over; one of another build is ended first."""
        name, arguments = "kv-index", index_arguments(self.endpoint, self._table, self._settings)
        meanwhile = "the routers go by what they have sent"
        index = Service(self._context, name, KV_INDEX, arguments, self._environment, meanwhile=meanwhile)
        if self._state is not None and (old := self._state.running(name)) is not None:
            index.adopt(old)
            if old.build == build_id():
                return index
            index.stop(STOP_S)
            self._context.report(f"{name} is replaced")
        index.start()
        return index

    def _write_settings(self) -> None:
        self._settings.touch(mode=0o600)  # It may have the ledger's password.
        self._settings.write_text(json.dumps(self._local.settings(self._prepared.config).to_dict()))
