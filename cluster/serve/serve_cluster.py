"""`twinpool serve` over Ray: start the cluster, say when it is ready, keep it alive, and end it without leftovers.

The order matters. Bad settings are refused before anything starts (`cluster.serve.preflight`). The reaper starts before
any process that it may have to kill. The controller and the router start before a Ray of our own, so that all start at
the same time; the workers come last and register with the controller, which the router watches. The end goes in reverse
order, and the reaper kills what didn't end by itself.

This process decides nothing about workers: it is the controller's supervisor, and keeps router and controller alive.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

import yaml

from twinpool.cluster.arena.local_agent import ArenaAgents, LocalArenaAgent, NoArenaAgents, wanted
from twinpool.cluster.assembly.node_shares import WorkerShare, free_bytes
from twinpool.cluster.controller.controller_actions import EndedProcess, StartWorker
from twinpool.cluster.controller.open_ledger import PASSWORD_VARIABLE
from twinpool.cluster.controller.supervisor import ControllerAway, ControllerClient, Supervisor
from twinpool.cluster.processes.process_ids import start_time
from twinpool.cluster.processes.run_folder import START_REPORT, RunFiles, RunFolder, indented, last_words
from twinpool.cluster.ray_nodes.ray_facts import NodeDrains, draining_ray_nodes
from twinpool.cluster.serve.changed_settings import SettingsChanger, digest_of
from twinpool.cluster.serve.cluster_services import ClusterServices, with_kv_events
from twinpool.cluster.serve.detached_state import DetachedState
from twinpool.cluster.serve.preflight import ServePlan, adapters_of
from twinpool.cluster.serve.router_services import SharedRouters
from twinpool.cluster.serve.security_check import open_ways
from twinpool.cluster.serve.service import PartFailed, ServiceContext
from twinpool.cluster.serve.shutdown_signal import ShutdownSignal, StartStopped, run_until_asked, signals_of
from twinpool.cluster.serve.terminal import Terminal, in_terminal, summary, urls_of, ways_in
from twinpool.cluster.worker_process.worker_plan import WorkerPlan, node_name
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.cluster_secret import SECRET_VARIABLE
from twinpool.contracts.config.plane_choice import why
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerView

if TYPE_CHECKING:
    from twinpool.cluster.ray_nodes.ray_cluster import OwnRay
    from twinpool.cluster.ray_nodes.worker_actors import RayLauncher
    from twinpool.cluster.serve.cluster_ray import JoinedNodes


log = logging.getLogger("twinpool.serve")

SECRETS = ("TWINPOOL_ADMIN_TOKEN", SECRET_VARIABLE, PASSWORD_VARIABLE)
POLL_S = 0.1
ROUTER_END_S = 2.5
"""How long a router may take to end once the answers that ran have ended, or were cut off."""
HEALTHY_S = 60.0
"""How long the router may take to reach the workers once all have registered."""


class ServeCluster:
    """One run of `twinpool serve` over Ray, its own or one that it joins."""

    def __init__(
        self,
        prepared: ServePlan,
        folder: RunFiles,
        out: TextIO,
        *,
        began: float | None = None,
        state: DetachedState | None = None,
        python: str = "",
        stopping: ShutdownSignal | None = None,
        shared: SharedRouters | None = None,
    ) -> None:
        """`state`: of a detached cluster, which goes on when this process is killed; one that has begun is taken
        over. `python`: the interpreter that its workers are started with (`ray_cluster.join_ray`). `stopping`: the
        signals that end it, where they are handled already. `shared`: the routers of several models, which another
        process keeps, and which are told of this one once it serves."""
        self._state, self._python, self._shared = state, python, shared
        self._prepared = prepared
        self._folder = folder
        self._clock: Clock = SystemClock()
        self._terminal = Terminal(
            self._clock, out, began, report=folder.logs / START_REPORT, verbose=prepared.options.verbose
        )
        self._stopping = stopping or signals_of(prepared.config.cluster.stop_timeout_s)
        self._stopping.show_on(out)
        self._service_check: Callable[[], None] = lambda: None
        """Raises `PartFailed` where a service that a start needs has ended."""
        self._ray: OwnRay | None = None
        self._launcher: RayLauncher | None = None
        self._agents: ArenaAgents = NoArenaAgents()
        self._arena = ""
        self._nodes: JoinedNodes | None = None
        self._secrets = {name: value for name in SECRETS if (value := os.environ.pop(name, None))}
        if state is not None:
            self._secrets = state.secrets

    def run(self) -> int:
        """Serve until asked to stop; returns the exit code."""
        self._stopping.install()
        return run_until_asked(self._serve, self._stopping, self._terminal, self._folder.logs, self._cause)

    def _serve(self, stack: ExitStack) -> None:
        self._start(stack)
        self._keep_alive()
        self._drain()

    def _cause(self, error: Exception, stack: ExitStack) -> Exception:
        """The end of a service, where that is behind an error of the start: who waits for it meets only its silence.
        What runs of a detached cluster goes on."""
        if isinstance(error, TwinpoolError) and self._state is not None and self._state.begun:
            stack.pop_all()  # The next such process takes over what runs.
        try:
            self._service_check()
        except PartFailed as cause:
            return cause
        return error

    # ------------------------------------------------------------ starting

    def _start(self, stack: ExitStack) -> None:
        prepared, options, folder = self._prepared, self._prepared.options, self._folder
        self._check_stop()
        begun = self._state is not None and self._state.begun
        if prepared.config.cluster.ray_storage and (self._state is None or options.ray_address is not None):
            raise ConfigError("cluster.ray_storage is for serve --detach with a Ray of its own: leave it out here")
        if not begun:
            self._show_plan()
        url, operators = urls_of(prepared)
        security = prepared.config.security
        self._address = "127.0.0.1" if options.ray_address is None else self._join(stack)
        self._secret = self._cluster_secret()
        if self._state is not None:
            self._state.secret = self._secret
            self._state.save()
        if not begun:
            self._show_ways()
        self._start_services(stack)
        if options.ray_address is None:
            self._own_ray(stack)
        self._service_check()
        self._stopping.install()  # importing Ray takes SIGTERM over
        self._check_stop()
        self._start_agents(stack)
        self._start_workers(stack)
        if begun:
            folder.publish(operators, options.model, security.tls_ca, options.file)
            self._stopping.ready()
            assert self._state is not None
            self._tell_routers()
            self._state.taken_over()
            self._terminal.line(f"a supervisor of build {build_id()} has taken the cluster over, which went on")
            return
        self._await_ready()
        folder.publish(operators, options.model, security.tls_ca, options.file)
        self._stopping.ready()
        self._service_check = lambda: None
        views = self._controller.views()
        self._terminal.table(self._prepared, views)
        ray = []
        if self._ray is not None and self._ray.dashboard:
            token = os.environ["RAY_AUTH_TOKEN_PATH"]
            ray.append(f"Ray's dashboard: {self._ray.dashboard} (it asks for the token in {token})")
        self._terminal.ready(url, summary(self._prepared, views), [*ways_in(self._prepared), *ray])
        self._stopping.manager.ready(f"serves at {url}")
        if self._state is not None:
            self._state.mark_ready()
        self._tell_routers()

    def _tell_routers(self) -> None:
        """Have routers of another process know what there is to know of this cluster now."""
        if self._shared is not None:
            self._shared.tell(self._services.routed)

    def _stale(self) -> tuple[int, str]:
        """As of `ClusterServices.stale`, with routers of another process."""
        stale, obstacle = self._services.stale()
        if self._shared is None:
            return stale, obstacle
        behind, other = self._shared.behind(self._services.routed.digest)
        return stale + behind, obstacle or other

    def _show_plan(self) -> None:
        spec = self._prepared.spec
        self._terminal.step(
            "checkpoint",
            f"{spec.name}: {spec.architecture}, {spec.layers} layers, {spec.dtype}, context {spec.context}",
        )
        self._terminal.step("logs", str(self._folder.logs))
        if self._prepared.shares:
            self._terminal.nodes(self._prepared)

    def _show_ways(self) -> None:
        """Show what is open to whom, and by what pages go."""
        options, security = self._prepared.options, self._prepared.config.security
        for line in open_ways(security, options.host, self._address):
            self._terminal.step("open", line)
        self._terminal.step("pages go by", why(self._prepared.config))
        if options.routers > 1 and not security.admin_port:
            self._terminal.step(
                "metrics", "are of whichever router answers: set security.admin_port to ask each at a port of its own"
            )

    def _join(self, stack: ExitStack) -> str:
        from twinpool.cluster.ray_nodes.ray_cluster import authenticated, join_ray, leave_ray, missing_places, ray_build
        from twinpool.cluster.ray_nodes.ray_facts import resource_example
        from twinpool.cluster.serve.cluster_ray import JoinedNodes

        options = self._prepared.options
        config = self._prepared.config
        places = {role: count * config.ranks_for(role) for role, count in options.workers.items()}
        stack.callback(leave_ray)
        address = join_ray(options.ray_address or "auto", self._folder.temporary.name, self._python)
        if self._state is not None:
            self._state.ray_build = ray_build()
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
        self._nodes = JoinedNodes()
        for reason in self._measure_nodes():
            raise PartFailed(reason)
        self._terminal.nodes(self._prepared)
        return address

    def _measure_nodes(self) -> list[str]:
        """Measure and divide nodes that have joined since the last call; returns a line for each that can't take a
        worker."""
        assert self._nodes is not None, "only of a Ray that was joined"
        self._prepared, refused = self._nodes.measure(self._prepared)
        return refused

    def _own_ray(self, stack: ExitStack) -> None:
        from twinpool.cluster.serve.cluster_ray import own_ray

        self._ray = own_ray(self._prepared, self._folder, self._state, self._address, self._python, stack)
        self._terminal.step("ray", "started on loopback" if self._state is None else "runs on loopback")

    def _start_services(self, stack: ExitStack) -> None:
        """Start the controller and the routers, or take them over, and connect to the controller."""
        state = self._state
        if self._prepared.options.ray_address is None:
            config = with_kv_events(self._prepared.config, self._folder.temporary)
            self._prepared = dataclasses.replace(self._prepared, config=config)
        if state is not None:
            state.prepared = self._prepared
            state.save()
        config = self._prepared.config
        folder = self._folder
        context = ServiceContext(
            folder.logs, config.cluster, self._clock, self._terminal.line, self._words, folder.owns, state, stack
        )
        self._services = ClusterServices(
            self._prepared,
            folder,
            context,
            address=self._address,
            secret=self._secret,
            admin={k: v for k, v in self._secrets.items() if k == "TWINPOOL_ADMIN_TOKEN"},
            ledger={k: v for k, v in self._secrets.items() if k == PASSWORD_VARIABLE},
        )
        self._services.start()
        if state is None or not state.begun:
            self._service_check = self._services.check
        silence_s, certificate = config.transfer.link_timeout_s, config.security.cluster
        self._controller = ControllerClient(self._services.endpoint, silence_s, self._secret, certificate)
        stack.callback(self._controller.close)

    def _start_agents(self, stack: ExitStack) -> None:
        if not wanted(self._prepared.config):
            return
        self._arena = self._state.arena if self._state is not None else ""
        self._arena = self._arena or secrets.token_hex(32)
        if self._state is not None:
            self._state.arena = self._arena
            self._state.save()
        if self._prepared.options.ray_address is not None or self._state is not None:
            from twinpool.cluster.ray_nodes.ray_arena_agents import RayArenaAgents

            detached = self._state is not None
            self._agents = RayArenaAgents(self._arena, self._clock, self._nodes_in_use, detached=detached)
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
        from twinpool.cluster.ray_nodes.worker_actors import RayLauncher
        from twinpool.cluster.serve.memory_fit import RoomReports

        joined = self._prepared.options.ray_address is not None
        launcher = self._launcher = RayLauncher(
            self._agents,
            self._clock,
            detached=self._state is not None,
            store_restarted_at=lambda: self._ray.store_restarted_at() if self._ray is not None else None,
            shares=self._shares if joined else None,
        )
        stack.callback(launcher.close)
        # Before the workers are ended, so that routers learn why and nothing is restarted.
        stack.callback(self._announce_end)
        self._node_drains = NodeDrains(draining_ray_nodes)
        stack.callback(self._node_drains.close)
        settings = SettingsChanger(
            lambda: self._prepared,
            self._keep_plan,
            self._running,
            free_bytes,
            stale=self._stale,
            arenas=bool(self._arena),
        )
        rooms = RoomReports(lambda: self._prepared, free_bytes, self._clock)
        self._supervisor = Supervisor(
            self._controller, launcher, self._plan, self._terminal.line, settings.change, rooms.changed
        )
        self._controller.report(room=rooms.changed())  # Goes with the first report, before anything is added.
        if self._state is not None and self._state.begun:
            launcher.adopt()
            self._controller.report(ended=list(gone_from_here(self._controller.views())))
        self._controller.supervise(launcher.running)
        if self._state is None or not self._state.begun:  # Else the controller's table has all of them.
            for adapter in adapters_of(self._prepared.config):
                self._controller.load_adapter(adapter)
            there = Counter(view.record.role for view in self._controller.views() if view.status.state != "left")
            for role, count in self._prepared.wanted.items():
                if count > there[role]:  # A table that outlived an earlier run has some.
                    self._controller.add(role, count - there[role])

    def _announce_end(self) -> None:
        """Tell the controller. The rest of the end must not wait for that."""
        try:
            self._controller.shut_down()
        except (ControllerAway, ConfigError) as error:
            log.warning(str(error))

    def _keep_plan(self, plan: ServePlan) -> None:
        """Go by another plan from now on, and keep it before any worker is started by it."""
        if self._state is not None:
            self._state.prepared = plan
            self._state.save()
        self._prepared = plan
        self._services.change(plan)
        if self._shared is not None and plan.options.config is not None:  # By which it is started after its end.
            plan.options.config.write_text(yaml.safe_dump(plan.given.to_dict()))
        self._tell_routers()
        self._terminal.line("the settings were changed: what starts from now on has the new ones")

    def _running(self) -> list[tuple[WorkerName, Role]]:
        """The workers that have a process, or should have one. Raises `ControllerAway`."""
        views = self._controller.views()
        return [(view.record.name, view.record.role) for view in views if view.status.state != "left"]

    def _plan(self, start: StartWorker) -> WorkerPlan:
        """The plan of a start. That there is room for it the controller has looked at."""
        by_node: dict[str, WorkerShare] = {}
        config, counts = self._prepared.config, {}
        if self._prepared.options.ray_address is None:
            sizes = self._prepared.here.sizes(start.role)
            config, counts = sizes.applied_to(config, start.role), dict(sizes.counts)
        else:
            by_node = self._shares(start.role)
        prepared = self._prepared
        return WorkerPlan(
            name=start.name,
            role=start.role,
            incarnation=start.incarnation,
            model=prepared.spec.path,
            source=prepared.source,
            config=config,
            counts=counts,
            host=self._address if prepared.options.ray_address is None else "",
            controller=self._services.endpoint,
            logs=self._folder.logs,
            arena=self._arena,
            secret=self._secret,
            by_node=by_node,
            cards=prepared.cards_of(start.name, start.role),
            settings=digest_of(prepared, start.role),
            weights=start.weights,
        )

    def _shares(self, role: Role) -> dict[str, WorkerShare]:
        """The share of a worker of `role` on each node, by Ray id; nodes that have just joined are measured."""
        for reason in self._measure_nodes():
            self._terminal.line(reason)
        shares = self._prepared.shares
        if self._prepared.config.over_hosts(role):
            from twinpool.cluster.serve.memory_fit import common_sizes

            return common_sizes(shares, role)
        return {node_id: share.sizes(role) for node_id, share in shares.items()}

    def _nodes_in_use(self) -> set[str]:
        """The nodes, by Ray id, on which processes of workers are."""
        return self._launcher.nodes_in_use() if self._launcher is not None else set()

    def _cluster_secret(self) -> str:
        """The secret with which processes authenticate each other, in hex; empty where all of them are on loopback and
        have no certificates."""
        if self._address.startswith("127.") and not self._prepared.config.security.cluster_ca:
            return ""
        given = self._secrets.get(SECRET_VARIABLE, "") or (self._state.secret if self._state is not None else "")
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
                    # Others may have waited for their turn to start.
                    deadline = self._clock.now() + self._prepared.config.cluster.start_timeout_s
                    self._terminal.step("worker", f"{view.record.name} on {view.record.node}")
        for router in self._services.routers:
            while not router.listening(POLL_S):
                self._round(deadline, f"the {router.name}")
            self._terminal.step(router.name, "listening")
        deadline = self._clock.now() + HEALTHY_S
        for router in self._services.routers:
            while not router.probe.healthy():
                self._round(deadline, f"the {router.name} to reach the workers")

    def _round(self, deadline: float, what: str) -> None:
        self._check_stop()
        self._tend_agents()
        self._supervisor.poll(POLL_S)
        for name, reason in self._supervisor.failed.items():
            raise PartFailed(f"{name} could not start: {reason}{self._words(name)}")
        self._services.check()
        if self._clock.now() > deadline:
            raise PartFailed(f"gave up waiting for {what}; see {self._folder.logs}")

    def _check_stop(self) -> None:
        if self._stopping.asked:
            raise StartStopped

    def _words(self, process: str) -> str:
        return indented(last_words(self._folder.logs / f"{process}.log"))

    # ------------------------------------------------------------ running

    def _keep_alive(self) -> None:
        self._node_drains.start()
        self._services.probe()
        while not self._stopping.asked:
            self._tend_agents()
            self._supervisor.poll(POLL_S)
            self._drain_nodes()
            for line in self._ray.news() if self._ray is not None else ():
                self._terminal.line(line)
            if self._ray is not None and (lost := self._ray.lost()):
                again = "" if self._state is not None else "; start again"
                raise PartFailed(f"Ray has died ({lost} is gone) and took the workers with it{again}")
            self._services.tend()

    def _drain(self) -> None:
        """Have routers refuse what is new, and give the answers that run their time; meanwhile workers are kept as
        ever, and what one of them can't finish goes on at another."""
        self._terminal.line(self._stopping.drain_line)
        until = self._clock.now() + self._stopping.answers_s + ROUTER_END_S
        self._services.drain()
        while not self._services.drained() and self._clock.now() < until:
            self._tend_agents()
            self._supervisor.poll(POLL_S)
            self._services.tend_controllers()

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


def gone_from_here(views: Iterable[WorkerView]) -> Iterator[EndedProcess]:
    """The workers with a lease on this machine whose process is gone: it ended while no supervisor was there."""
    for view in views:
        record, state = view.record, view.status.state
        if record.node == node_name() and state in ("ready", "draining") and start_time(record.pid) is None:
            yield EndedProcess(record.name, record.incarnation, "its process is gone")


def serve(prepared: ServePlan, began: float | None = None) -> int:
    """Serve with this process's terminal; returns the exit code. Errors are shown, not raised.

    `began` is when the command began, by the system's clock.
    """

    def run(folder: RunFolder, out: TextIO, stopping: ShutdownSignal) -> int:
        if prepared.config.transfer.plane == "local":
            from twinpool.cluster.serve.serve_one_process import ServeOneProcess

            return ServeOneProcess(prepared, folder, out, stopping, began).run()
        return ServeCluster(prepared, folder, out, began=began, stopping=stopping).run()

    return in_terminal(prepared.config.cluster.stop_timeout_s, run)
