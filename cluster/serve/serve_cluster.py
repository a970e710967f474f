"""`twinpool serve` over Ray: start the cluster, say when it is ready, keep it alive, and end it without leftovers.

The order matters. Bad settings are refused before anything starts (`cluster.serve.preflight`). The reaper starts before
any process that it may have to kill. The controller and the router start before a Ray of our own, so that all start at
the same time; the workers come last and register with the controller, which the router watches. The end goes in reverse
order, and the reaper kills what didn't end by itself.

This process decides nothing about workers: it is the controller's supervisor, and keeps router and controller alive.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cluster.arena.local_agent import ArenaAgents, LocalArenaAgent, NoArenaAgents, wanted
from cluster.assembly.node_shares import MemoryShort, WorkerShare, free_bytes
from cluster.controller.controller_actions import StartWorker
from cluster.controller.controller_client import ControllerAway, ControllerClient
from cluster.controller.supervisor import Supervisor
from cluster.processes.log_files import last_words
from cluster.processes.run_folder import RunFolder
from cluster.ray_nodes.node_drains import NodeDrains, draining_ray_nodes
from cluster.serve.child_service import CONTROLLER, ROUTER, ChildService
from cluster.serve.kept_service import KeptService
from cluster.serve.preflight import ServePlan, free_port, on_device
from cluster.serve.router_probe import RouterProbe
from cluster.serve.security_check import open_ways
from cluster.serve.shutdown_signal import ShutdownSignal
from cluster.serve.terminal import Terminal, curl_line, take_over_output, urls_of
from cluster.worker_process.lease_keeper import longest_absence_s
from cluster.worker_process.worker_plan import BuildWorker, WorkerPlan
from cluster.worker_process.worker_process import build_from_plan
from contracts.clock import Clock, SystemClock
from contracts.cluster_secret import SECRET_VARIABLE
from contracts.config.plane_choice import why, with_plane
from contracts.errors import ConfigError, TwinpoolError
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
        router_command: tuple[str, ...] = ROUTER,
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
        self._address = "127.0.0.1" if options.ray_address is None else self._join(stack)
        self._secret = self._cluster_secret()
        for line in open_ways(security, options.host, self._address):
            self._terminal.step("open", line)
        self._terminal.step("pages go by", why(self._prepared.config))
        if options.routers > 1 and not security.admin_port:
            self._terminal.step(
                "metrics", "are of whichever router answers: set security.admin_port to ask each at a port of its own"
            )
        self._start_services(stack)
        if options.ray_address is None:
            self._own_ray(stack)
        self._stopping.install()  # importing Ray takes SIGTERM over
        self._check_stop()
        self._start_agents(stack)
        self._start_workers(stack)
        self._await_ready()
        folder.publish(operators, options.model, security.tls_ca)
        self._stopping.ready()
        self._terminal.table(self._prepared, self._controller.views())
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

    def _start_services(self, stack: ExitStack) -> None:
        """Start the controller and the router, and connect to the controller."""
        prepared, options = self._prepared, self._prepared.options
        security, environment = prepared.config.security, dict(os.environ)
        if self._secret:
            environment[SECRET_VARIABLE] = self._secret
        settings = self._folder.logs / ".config.json"
        settings.write_text(json.dumps(prepared.config.to_dict()))
        port = free_port(self._address, prepared.config.cluster.controller_port)
        self._endpoint = f"{self._address}:{port}"
        ledger = self._folder.temporary / "controller.sqlite"
        self._controller_kept = self._kept(
            "controller",
            CONTROLLER,
            [
                *("--address", self._address, "--port", str(port), "--ledger", str(ledger)),
                *("--config-json", str(settings)),
            ],
            environment,
            stack,
            f"the workers serve on without it for {longest_absence_s(prepared.config.cluster):g} s",
        )
        silence_s = prepared.config.transfer.link_timeout_s
        self._controller = ControllerClient(self._endpoint, silence_s, self._secret, security.cluster)
        stack.callback(self._controller.close)
        self._routers = [self._start_router(number, settings, environment, stack) for number in range(options.routers)]

    def _start_router(
        self, number: int, settings: Path, environment: dict[str, str], stack: ExitStack
    ) -> tuple[KeptService, RouterProbe]:
        """Start one of the routers, with the probe that finds it hanging; the probe is started later."""
        prepared, options = self._prepared, self._prepared.options
        several, security = options.routers > 1, prepared.config.security
        name = f"router-{number}" if several else "router"
        live = self._folder.temporary / f"{name}.live"
        admin = {k: v for k, v in self._secrets.items() if k == "TWINPOOL_ADMIN_TOKEN"}
        kept = self._kept(
            name,
            self._router_command,
            [
                *("--model", str(prepared.spec.folder), "--controller", self._endpoint),
                *("--host", options.host, "--port", str(prepared.port)),
                *("--name", name, "--config-json", str(settings), "--live-socket", str(live)),
                *(("--reuse-port", "--admin-port", str(security.admin_port + number)) if several else ()),
            ],
            environment | admin,
            stack,
        )
        return kept, RouterProbe(live, self._clock)

    def _kept(
        self,
        name: str,
        command: Sequence[str],
        arguments: list[str],
        environment: dict[str, str],
        stack: ExitStack,
        meanwhile: str = "",
    ) -> KeptService:
        """Start a service, which is kept alive from then on and ends with `stack`."""
        service = ChildService(name, command, arguments, self._folder.logs, environment)
        stack.callback(service.stop, 1.5)
        kept = KeptService(
            service,
            self._prepared.config.cluster,
            self._clock,
            self._terminal.line,
            self._folder.owns,
            self._words,
            meanwhile,
        )
        kept.start()
        return kept

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
        stack.callback(self._announce_end)
        self._node_drains = NodeDrains(draining_ray_nodes)
        stack.callback(self._node_drains.close)
        self._supervisor = Supervisor(self._controller, launcher, self._plan, self._terminal.line)
        self._controller.supervise(launcher.running)
        for role, count in self._prepared.wanted.items():
            self._controller.add(role, count)

    def _announce_end(self) -> None:
        try:
            self._controller.shut_down()
        except (ControllerAway, ConfigError) as error:
            log.warning(str(error))

    def _plan(self, start: StartWorker) -> WorkerPlan:
        """The plan of a start. Raises `MemoryShort` where this machine has no room for it."""
        by_node: dict[str, WorkerShare] = {}
        config, counts = self._prepared.config, {}
        if self._prepared.options.ray_address is None:
            if start.incarnation == 1:
                self._prepared.check_room(start.name, start.role, free_bytes())
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
            controller=self._endpoint,
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
            for view in self._controller.views():
                if view.status.state == "ready" and view.status.pages_total and view.record.name in waiting:
                    waiting.discard(view.record.name)
                    self._terminal.step("worker", f"{view.record.name} on {view.record.node}")
        for router, _ in self._routers:
            while not router.service.listening(POLL_S):
                self._round(deadline, f"the {router.service.name}")
            self._terminal.step(router.service.name, "listening")
        deadline = self._clock.now() + HEALTHY_S
        for router, probe in self._routers:
            while not probe.healthy():
                self._round(deadline, f"the {router.service.name} to reach the workers")

    def _round(self, deadline: float, what: str) -> None:
        self._check_stop()
        self._tend_agents()
        self._supervisor.poll(POLL_S)
        for name, reason in self._supervisor.failed.items():
            raise PartFailed(f"{name} could not start: {reason}{self._words(name)}")
        for kept in (self._controller_kept, *(router for router, _ in self._routers)):
            if (how := kept.service.ended()) is not None:
                raise PartFailed(f"the {kept.service.name} ended ({how}){self._words(kept.service.name)}")
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
        for _, probe in self._routers:
            stack.callback(probe.stop)
            probe.start()
        while not self._stopping.asked:
            self._tend_agents()
            self._supervisor.poll(POLL_S)
            self._drain_nodes()
            if self._ray is not None and (lost := self._ray.lost()):
                raise PartFailed(f"Ray has died ({lost} is gone) and took the workers with it; start again")
            if failed := self._controller_kept.tend():
                raise PartFailed(failed)
            for router, probe in self._routers:
                self._tend_router(router, probe)

    def _tend_router(self, router: KeptService, probe: RouterProbe) -> None:
        """Kill a router that hangs, and start one again that has ended."""
        was_down = router.down
        if not was_down and probe.silent_s >= self._prepared.config.router.stall_s:
            name = router.service.name
            self._terminal.line(f"{name} hung: no answer for {probe.silent_s:.0f} s (router.stall_s)")
            router.service.kill()
        if failed := router.tend():
            raise PartFailed(failed)
        if was_down and not router.down:
            probe.started_again()

    def _drain_nodes(self) -> None:
        if not self._node_drains.changed:
            return
        try:
            for node in self._node_drains.due(self._controller.views()):
                told = self._controller.drain(node)
                who = f"{', '.join(told)} {'drain' if len(told) > 1 else 'drains'}" if told else "it is cordoned"
                self._terminal.line(f"{who}: Ray takes its node {node[:8]} away")
                self._node_drains.told(node)
        except (ControllerAway, ConfigError) as error:
            log.warning("a node that Ray takes away could not be drained yet: %s", error)


def _words(lines: list[str]) -> str:
    return "".join(f"\n    {line}" for line in lines)


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
