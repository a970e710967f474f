"""`twinpool serve` over Ray: start the cluster, say when it is ready, keep it alive, and end it without leftovers.

The order matters. Bad settings are refused before anything starts (`cluster.serve.preflight`). The reaper starts before
any process that it may have to kill. The router starts before a Ray of our own, so that both start at the same time;
the workers come last and register with the controller, which the router watches. The end goes in reverse order, and the
reaper kills what didn't end by itself.
"""

from __future__ import annotations

import dataclasses
import http.client
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cluster.arena.local_agent import ArenaAgents, LocalArenaAgent, NoArenaAgents, wanted
from cluster.assembly.node_shares import MemoryShort, WorkerShare
from cluster.controller.controller import Controller
from cluster.controller.controller_actions import StartWorker
from cluster.controller.controller_service import ControllerServer
from cluster.controller.incarnation_ledger import FileLedger
from cluster.controller.supervisor import Supervisor
from cluster.processes.log_files import last_words
from cluster.processes.restart_policy import RestartHistory
from cluster.processes.run_folder import RunFolder
from cluster.ray_nodes.node_drains import NodeDrains, draining_ray_nodes
from cluster.serve.kv_index_process import KvIndexProcess, index_wanted, with_kv_events
from cluster.serve.preflight import ServePlan, on_device
from cluster.serve.router_probe import RouterProbe, connection_to
from cluster.serve.router_process import COMMAND, RouterProcess
from cluster.serve.security_check import open_ways
from cluster.serve.shutdown_signal import ShutdownSignal
from cluster.serve.terminal import Terminal, curl_line, take_over_output, urls_of
from cluster.worker_process.worker_plan import BuildWorker, WorkerPlan
from cluster.worker_process.worker_process import build_from_plan
from contracts.clock import Clock, SystemClock
from contracts.cluster_secret import SECRET_VARIABLE
from contracts.config.plane_choice import why, with_plane
from contracts.errors import TwinpoolError
from contracts.json_logs import log_to_stream

if TYPE_CHECKING:
    from cluster.ray_nodes.ray_cluster import OwnRay


log = logging.getLogger("twinpool.serve")

SECRETS = ("TWINPOOL_ADMIN_TOKEN", SECRET_VARIABLE)
POLL_S = 0.1
HEALTHY_S = 15.0
"""How long the router may take to reach the workers once all have registered."""


class PartFailed(TwinpoolError):
    """Raised when a part of the cluster did not come up, or is gone for good; the text names the part and why."""


class StartStopped(Exception):
    """Raised when the operator asks to end while the cluster is starting."""


class ServeCluster:
    """One run of `twinpool serve` over Ray, its own or one that it joins."""

    def __init__(
        self,
        prepared: ServePlan,
        folder: RunFolder,
        out: TextIO,
        *,
        build: BuildWorker = build_from_plan,
        router_command: tuple[str, ...] = COMMAND,
        clock: Clock | None = None,
        began: float | None = None,
    ) -> None:
        self._prepared = prepared
        self._folder = folder
        self._build = build
        self._router_command = router_command
        self._clock = clock or SystemClock()
        self._terminal = Terminal(self._clock, out, began)
        self._stopping = ShutdownSignal(prepared.config.cluster.stop_timeout_s)
        self._ray: OwnRay | None = None
        self._agents: ArenaAgents = NoArenaAgents()
        self._arena = ""
        self._kv_index: KvIndexProcess | None = None
        self._small: set[str] = set()
        """Nodes that are too small for a worker, by Ray id."""
        self._secrets = {name: value for name in SECRETS if (value := os.environ.pop(name, None))}

    def run(self) -> int:
        """Serve until asked to stop; returns the exit code. Raises `TwinpoolError` when the start fails."""
        self._stopping.install()
        with ExitStack() as stack:
            try:
                self._start(stack)
                self._keep_alive(stack)
            except StartStopped:
                self._terminal.line("stopped while starting")
            finally:
                self._stopping.promise()
            self._terminal.line("stopping")
            return 0

    # ------------------------------------------------------------ starting

    def _start(self, stack: ExitStack) -> None:
        prepared, options, folder = self._prepared, self._prepared.options, self._folder
        spec = prepared.spec
        self._terminal.step(
            "checkpoint",
            f"{spec.name}: {spec.architecture}, {spec.layers} layers, {spec.dtype}, context {spec.context}",
        )
        self._terminal.step("logs", str(folder.logs))
        if prepared.shares:
            self._terminal.nodes(prepared)
        url, operators = urls_of(prepared)
        security = prepared.config.security
        ledger = FileLedger(folder.temporary / "incarnations.json")
        core = Controller(self._clock, prepared.config.cluster, ledger)
        self._address = "127.0.0.1" if options.ray_address is None else self._join(stack)
        self._secret = self._cluster_secret()
        for line in open_ways(security, options.host, self._address):
            self._terminal.step("open", line)
        self._server = ControllerServer(core, self._address, self._secret, security.cluster)
        stack.callback(self._server.close)
        self._terminal.step("pages go by", why(self._prepared.config))
        self._router = self._start_router(stack)
        if options.ray_address is None:
            self._own_ray(stack)
        self._stopping.install()  # importing Ray takes SIGTERM over
        self._check_stop()
        self._start_agents(stack)
        self._start_workers(stack)
        self._await_ready()
        folder.publish(operators, options.model, security.tls_ca)
        self._stopping.ready()
        self._terminal.table(self._prepared, self._server.call(Controller.views))
        self._terminal.line(f"Twinpool is ready: {url}")
        if operators != url:
            self._terminal.line(f"operators' paths: {operators}")
        self._terminal.line(curl_line(url, spec.name, key=bool(security.keys_file), ca=security.tls_ca))
        if self._ray is not None and self._ray.dashboard:
            token = os.environ["RAY_AUTH_TOKEN_PATH"]
            self._terminal.line(f"Ray's dashboard: {self._ray.dashboard} (it asks for the token in {token})")

    def _join(self, stack: ExitStack) -> str:
        from cluster.ray_nodes.ray_cluster import authenticated, join_ray, leave_ray, missing_places
        from cluster.ray_nodes.worker_resources import resource_example

        options = self._prepared.options
        config = self._prepared.config
        places = {role: count * config.tp_for(role) for role, count in options.workers.items()}
        stack.callback(leave_ray)
        address = join_ray(options.ray_address or "auto")
        self._stopping.install()  # importing Ray takes SIGTERM over
        self._terminal.step("ray", f"joined from {address}")
        if not authenticated():
            self._terminal.step(
                "ray", "its authentication is off: whoever reaches it can run code there (RAY_AUTH_MODE)"
            )
        deadline = self._clock.now() + self._prepared.config.cluster.start_timeout_s
        said = ""
        while missing := missing_places(places):
            self._check_stop()
            if self._clock.now() > deadline:
                raise PartFailed(
                    f"Ray's nodes have {missing}: start nodes with --resources '{resource_example(places)}'"
                )
            if missing != said:
                self._terminal.step("ray", f"waiting for nodes: {missing}")
                said = missing
            self._stopping.wait(POLL_S)
        for reason in self._measure_nodes():
            raise PartFailed(reason)
        self._terminal.nodes(self._prepared)
        return address

    def _measure_nodes(self) -> list[str]:
        """Measure and divide nodes that have joined since the last call; returns a line for each that can't take a
        worker."""
        from cluster.ray_nodes.ray_cluster import measure_nodes

        prepared, refused = self._prepared, []
        nodes = measure_nodes({*prepared.shares, *self._small}, prepared.config.engine.device)
        if nodes:
            # The first nodes decide: numerics of a GPU and of a CPU are of two classes.
            config = with_plane(on_device(prepared.config, all(facts.cards for facts in nodes)), one_host=False)
            prepared = dataclasses.replace(prepared, config=config)
        for facts in nodes:
            try:
                share = prepared.divide(facts)
            except MemoryShort as error:
                self._small.add(facts.node_id)
                refused.append(f"node {facts.host} ({facts.node_id[:8]}) takes no worker: {error}")
            else:
                prepared = dataclasses.replace(prepared, shares={**prepared.shares, facts.node_id: share})
        self._prepared = prepared
        return refused

    def _own_ray(self, stack: ExitStack) -> None:
        from cluster.ray_nodes.ray_cluster import leave_ray, start_own_ray

        stack.callback(leave_ray)
        self._ray = start_own_ray(self._folder.temporary, self._prepared.options.dashboard)
        self._folder.owns_children()
        self._terminal.step("ray", "started on loopback")

    def _start_router(self, stack: ExitStack) -> RouterProcess:
        environment = os.environ | {k: v for k, v in self._secrets.items() if k == "TWINPOOL_ADMIN_TOKEN"}
        if self._secret:
            environment[SECRET_VARIABLE] = self._secret
        table = self._start_kv_index(stack, environment)
        router = RouterProcess(
            self._prepared,
            self._server.endpoint,
            self._folder.logs,
            environment,
            self._clock,
            self._router_command,
            table,
        )
        stack.callback(router.stop, 1.5)
        self._folder.owns(*router.start())
        return router

    def _start_kv_index(self, stack: ExitStack, environment: Mapping[str, str]) -> Path | None:
        """Start the KV index, where one is wanted; returns where its table is."""
        folder = self._folder
        if self._prepared.options.ray_address is None:
            config = with_kv_events(self._prepared.config, folder.temporary)
            self._prepared = dataclasses.replace(self._prepared, config=config)
        config = self._prepared.config
        if not index_wanted(config):
            return None
        self._kv_index = KvIndexProcess(
            config, self._server.endpoint, folder.temporary, folder.logs, environment, self._clock
        )
        stack.callback(self._kv_index.stop)
        folder.owns(*self._kv_index.start())
        return self._kv_index.table

    def _tend_kv_index(self) -> None:
        if self._kv_index is not None:
            lines, started = self._kv_index.poll()
            for line in lines:
                self._terminal.line(line)
            for mark in started:
                self._folder.owns(*mark)

    def _start_agents(self, stack: ExitStack) -> None:
        if not wanted(self._prepared.config):
            return
        self._arena = secrets.token_hex(32)
        if self._prepared.options.ray_address is not None:
            from cluster.ray_nodes.ray_arena_agents import RayArenaAgents

            self._agents = RayArenaAgents(self._arena, self._clock)
        else:
            agent = LocalArenaAgent(self._arena, self._folder.logs, self._prepared.config.cluster, self._clock)
            self._agents = agent
            self._folder.owns(*agent.start())
        stack.callback(self._agents.close)
        self._tend_agents()

    def _tend_agents(self) -> None:
        for line in self._agents.poll():
            log.warning(line)
            self._terminal.line(line)

    def _start_workers(self, stack: ExitStack) -> None:
        from cluster.ray_nodes.worker_actors import RayLauncher

        launcher = RayLauncher(self._build, self._agents, self._clock)
        stack.callback(launcher.close)
        # Before the workers are ended, so that routers learn why and nothing is restarted.
        stack.callback(lambda: self._server.call(Controller.shut_down))
        self._node_drains = NodeDrains(draining_ray_nodes)
        stack.callback(self._node_drains.close)
        self._supervisor = Supervisor(self._server, launcher, self._plan, self._terminal.line, self._clock)
        for name, role in self._prepared.workers:
            self._server.call(lambda core, name=name, role=role: core.add(name, role))  # type: ignore[misc]

    def _plan(self, start: StartWorker) -> WorkerPlan:
        by_node: dict[str, WorkerShare] = {}
        config, counts = self._prepared.config, {}
        if self._prepared.options.ray_address is None:
            sizes = self._prepared.here.sizes(start.role)
            config, counts = sizes.applied_to(config, start.role), dict(sizes.counts)
        else:
            for reason in self._measure_nodes():
                self._terminal.line(reason)
            by_node = {node_id: share.sizes(start.role) for node_id, share in self._prepared.shares.items()}
        prepared = self._prepared
        return WorkerPlan(
            name=start.name,
            role=start.role,
            incarnation=start.incarnation,
            model=prepared.spec.folder,
            config=config,
            counts=counts,
            host=self._address if prepared.options.ray_address is None else "",
            controller=self._server.endpoint,
            logs=self._folder.logs,
            arena=self._arena,
            secret=self._secret,
            by_node=by_node,
            cards=prepared.cards_of(start.name, start.role),
        )

    def _cluster_secret(self) -> str:
        """The secret with which processes authenticate each other, in hex; empty where all of them are on loopback and
        have no certificates."""
        if self._address.startswith("127.") and not self._prepared.config.security.cluster_ca:
            return ""
        given = self._secrets.get(SECRET_VARIABLE, "")
        try:
            bytes.fromhex(given)
        except ValueError:
            raise PartFailed(f"{SECRET_VARIABLE} must be hex; leave it out to have one made") from None
        return given or secrets.token_hex(32)

    def _await_ready(self) -> None:
        """Wait for the workers' first heartbeats, for the router's port, then for the router to serve."""
        deadline = self._clock.now() + self._prepared.config.cluster.start_timeout_s
        waiting = {name for name, _ in self._prepared.workers}
        while waiting:
            self._round(deadline, f"workers {', '.join(sorted(waiting))}")
            for view in self._server.call(Controller.views):
                if view.status.state == "ready" and view.status.pages_total and view.record.name in waiting:
                    waiting.discard(view.record.name)
                    self._terminal.step("worker", f"{view.record.name} on {view.record.node}")
        while not self._router.listening(POLL_S):
            self._round(deadline, "the router")
        self._terminal.step("router", "listening")
        deadline = self._clock.now() + HEALTHY_S
        while not _healthy(self._prepared):
            self._round(deadline, "the router to reach the workers")

    def _round(self, deadline: float, what: str) -> None:
        self._check_stop()
        self._tend_agents()
        self._supervisor.poll(POLL_S)
        for name, reason in self._server.call(Controller.never_ready):
            raise PartFailed(f"{name} could not start: {reason}{self._words(name)}")
        if (how := self._router.ended()) is not None:
            raise PartFailed(f"the router ended ({how}){self._words('router')}")
        if self._clock.now() > deadline:
            raise PartFailed(f"gave up waiting for {what}; see {self._folder.logs}")

    def _check_stop(self) -> None:
        if self._stopping.asked:
            raise StartStopped

    def _words(self, process: str) -> str:
        return _words(last_words(self._folder.logs / f"{process}.log"))

    # ------------------------------------------------------------ running

    def _keep_alive(self, stack: ExitStack) -> None:
        self._node_drains.start()
        options, allowed_s = self._prepared.options, self._prepared.config.router.stall_s
        https = bool(self._prepared.config.security.tls_cert)
        probe = RouterProbe(options.host, self._prepared.port, self._clock, https=https)
        stack.callback(probe.stop)
        probe.start()
        restarts, since, restart_at = RestartHistory(self._prepared.config.cluster), self._clock.now(), None
        while not self._stopping.asked:
            self._tend_agents()
            self._tend_kv_index()
            self._supervisor.poll(POLL_S)
            self._drain_nodes()
            if self._ray is not None and (lost := self._ray.lost()):
                raise PartFailed(f"Ray has died ({lost} is gone) and took the workers with it; start again")
            if restart_at is None:
                if probe.silent_s >= allowed_s:
                    self._terminal.line(f"router hung: no answer for {probe.silent_s:.0f} s (router.stall_s)")
                    self._router.kill()
                if (how := self._router.ended()) is None:
                    continue
                wait_s = restarts.died(self._clock.now(), since)
                if restarts.too_many:
                    raise PartFailed(f"the router died ({how}) too often{self._words('router')}")
                wait = f" in {wait_s:g} s" if wait_s else ""
                self._terminal.line(f"router died ({how}); restarting{wait}{self._words('router')}")
                restart_at = self._clock.now() + wait_s
            if self._clock.now() >= restart_at:
                self._folder.owns(*self._router.start())
                probe.started_again()
                since, restart_at = self._clock.now(), None

    def _drain_nodes(self) -> None:
        for node in self._node_drains.due(self._server.call(Controller.views)):
            told = self._server.call(lambda core, node=node: core.drain(node))  # type: ignore[misc]
            who = f"{', '.join(told)} {'drain' if len(told) > 1 else 'drains'}" if told else "it is cordoned"
            self._terminal.line(f"{who}: Ray takes its node {node[:8]} away")


def _words(lines: list[str]) -> str:
    return "".join(f"\n    {line}" for line in lines)


def _healthy(prepared: ServePlan) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(prepared.options.host, prepared.options.host)
    connection = connection_to(host, prepared.port, https=bool(prepared.config.security.tls_cert), timeout_s=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def serve(prepared: ServePlan, began: float | None = None) -> int:
    """Serve with this process's terminal; returns the exit code. Errors are shown, not raised.

    `began` is when the command began, by the system's clock.
    """
    folder = RunFolder()
    out = take_over_output(folder.logs / "serve.log")
    log_to_stream("serve")
    try:
        if prepared.config.transfer.plane == "local":
            from cluster.serve.serve_one_process import ServeOneProcess

            return ServeOneProcess(prepared, folder, out, began).run()
        return ServeCluster(prepared, folder, out, began=began).run()
    except TwinpoolError as error:
        out.write(f"error: {error}\n")
        return 1
    except Exception as error:
        log.exception("serve failed")
        out.write(f"error: {type(error).__name__}: {error}; see {folder.logs / 'serve.log'}\n")
        return 1
    finally:
        out.flush()
        folder.close()
