"""`twinpool serve` of several models: a cluster for each, and routers that serve all of them at one endpoint.

Each model's cluster is a process of its own (`cluster.serve.model_cluster`) with its controller, its Ray, its workers:
what happens to one of them, a change of weights, a drain, a sleep, the death of everything, is nothing to the others.
This process gives each its configuration, starts the routers once all serve, and starts again what dies. Its memory,
cores and cards are divided among them before the first of them starts.

A model that dies too often stays dead, and the others are served on: `/health` says so.

Detached (`launch_models`), this process is a supervisor that its keeper starts again: each model's process is then the
keeper of a detached cluster, and the next supervisor takes these keepers and the routers over (`ModelsState`).

What routers read of a model may change while they run: its cluster says so in its report, and the routers are replaced
one by one (`SharedRouters`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
import yaml

from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.processes.run_folder import (
    KeptFolder,
    RunFiles,
    RunFolder,
    indented,
    last_words,
    new_folder,
    new_log_folder,
)
from twinpool.cluster.serve.detached_cluster import OUTPUT, given_secrets, keep
from twinpool.cluster.serve.detached_state import ModelsState
from twinpool.cluster.serve.models_config import models_of, places_of
from twinpool.cluster.serve.preflight import ServeOptions, check_flags, with_settings
from twinpool.cluster.serve.router_services import RouterCommand, RouterServices, RoutersPlan, SharedRouters
from twinpool.cluster.serve.security_check import check_security, open_ways, with_absolute_paths
from twinpool.cluster.serve.serve_cluster import HEALTHY_S, POLL_S, ROUTER_END_S, SECRETS
from twinpool.cluster.serve.service import ROUTER, PartFailed, Service, ServiceContext, ServiceFailed
from twinpool.cluster.serve.shutdown_signal import END_S, ShutdownSignal, StartStopped, run_until_asked, signals_of
from twinpool.cluster.serve.terminal import Terminal, curl_line, in_terminal, url_of
from twinpool.contracts.build_id import build_id
from twinpool.contracts.checkpoint.pushed_weights import remove_all
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.cluster_secret import SECRET_VARIABLE
from twinpool.contracts.config.cluster_config import Config, LaunchConfig
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.python_command import module_command
from twinpool.router.tracing.otlp_exporter import check_tracing

MODEL = tuple(module_command("twinpool.cluster.serve.model_cluster"))
START_S = 1800.0
"""Seconds in which all models must serve. Each has a deadline for each of its workers (`cluster.start_timeout_s`)."""
MODEL_END_S = END_S - 1.5
"""Seconds that the models' clusters have to end in order, once the routers have."""


@dataclass(frozen=True, slots=True)
class ModelsPlan:
    """What `serve` will start for several models: checked, as far as that goes without looking at checkpoints."""

    options: ServeOptions
    """Of the endpoint."""
    configs: Mapping[str, Config]
    """By model; the first one leads."""
    port: int

    @property
    def lead(self) -> Config:
        return next(iter(self.configs.values()))

    @property
    def url(self) -> str:
        """Where clients on this machine reach the routers."""
        return url_of(self.options.host, self.port, https=bool(self.lead.security.tls_cert))

    @property
    def operators(self) -> str:
        """Where operators on this machine do."""
        security = self.lead.security
        if not security.admin_port:
            return self.url
        return url_of(security.admin_host, security.admin_port, https=bool(security.tls_cert))


def plan_models(options: ServeOptions) -> ModelsPlan | None:
    """Read the configuration and check it; None where it isn't of several models. Raises `ConfigError`."""
    configs = {
        name: with_absolute_paths(config) for name, config in models_of(options.config, options.assignments).items()
    }
    if not configs:
        return None
    if "model" not in options.unset or len(options.unsized) < len(ServeOptions.of_file(Path()).unsized):
        raise ConfigError("--model, --prefill, --decode and --colocate are of one model: the file's `models` has them")
    lead = next(iter(configs.values()))
    endpoint = with_settings(dataclasses.replace(options, unsized=frozenset()), lead)
    check_flags(endpoint)
    check_security(lead.security, endpoint.host, endpoint.port, routers=endpoint.routers)
    check_tracing(lead.tracing)
    return ModelsPlan(endpoint, configs, free_port(endpoint.host, endpoint.port))


class ModelService(Service):
    """The process of one model's cluster, or its keeper: ready once the cluster has told what routers are to know."""

    shared: SharedRouters

    def listening(self, timeout_s: float) -> bool:
        if (how := self.ended()) is not None:
            raise ServiceFailed(f"{self.name} could not start ({how})")
        return self.shared.report.exists()


class ModelClusters:
    """The processes of the models' clusters, and what these tell the routers that all of them share."""

    def __init__(self, plan: ModelsPlan, folder: RunFiles, context: ServiceContext, state: ModelsState | None) -> None:
        self._plan, self._folder, self._context, self._state = plan, folder, context, state
        self.services: dict[str, ModelService] = {}
        """By model."""
        self.routed = folder.temporary / "models.json"
        """The file with what routers are started with."""
        self._told: dict[str, str] = {}
        """Of each model, the digest of the settings that the routers are to have of it."""
        self._confirmed: object = None
        """What was noted last of the routers' settings."""

    def start(self, environment: Mapping[str, str], *, begun: bool) -> None:
        """Start each model's process, or take it over where this run has `begun` already."""
        state, first_card, logs = self._state, 0, self._folder.logs
        free = self._free_bytes()
        for name, config in self._plan.configs.items():
            settings = logs / name / "settings.yaml"
            if not begun:
                settings.parent.mkdir()
                settings.touch(mode=0o600)  # It may have the ledger's password.
                settings.write_text(yaml.safe_dump(self._of_cluster(config).to_dict()))
            shared = SharedRouters(self._folder.temporary / f"{name}.routed")
            arguments = [
                *("--config", str(settings), "--report", str(shared.report)),
                *("--within", str(self._folder.temporary), "--logs", str(settings.parent)),
                *("--free-bytes", str(free), "--models", str(len(self._plan.configs))),
                *("--first-card", str(first_card)),
                *(("--kept", str(state.folders[name])) if state is not None else ()),
            ]
            if ":" not in config.engine.device and config.engine.device != "cpu":
                first_card += places_of(config)
            self.services[name] = self._service(name, config, arguments, environment)
            self.services[name].shared = shared

    def _service(
        self, name: str, config: Config, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> ModelService:
        state = self._state
        meanwhile = "the other models are served on" if state is None else "it serves on meanwhile"
        context = dataclasses.replace(self._context, config=config.cluster)
        service = ModelService(context, f"model-{name}", MODEL, arguments, environment, meanwhile=meanwhile)
        if state is not None and (old := state.running(service.name)) is not None:
            service.adopt(old)
        else:
            service.start()
        return service

    def _free_bytes(self) -> int:
        """This machine's memory for each model: what was free before the first one ran."""
        from twinpool.cluster.assembly.node_shares import free_bytes

        kept = self._state.free_bytes if self._state is not None else 0
        free = kept or free_bytes() // len(self._plan.configs)
        if self._state is not None:
            self._state.free_bytes = free
            self._state.save()
        return free

    def _of_cluster(self, config: Config) -> Config:
        """The configuration of a model's cluster: it listens for no client, and its controllers keep their port when it
        is started again."""
        launch = LaunchConfig(
            model=config.launch.model, port=0, ray_address=self._plan.options.ray_address or "", dashboard=False
        )
        cluster = config.cluster
        if not cluster.controller_port:
            cluster = dataclasses.replace(cluster, controller_port=free_port("127.0.0.1", 0))
        security = dataclasses.replace(config.security, admin_port=0)
        return dataclasses.replace(config, launch=launch, cluster=cluster, security=security)

    def news(self) -> bool:
        """Whether the routers are to have other settings of some model than they were told last."""
        return self._digests() != self._told

    def tell(self) -> str:
        """Write down for routers what the models say now; returns its digest."""
        self._told = self._digests()
        told = [service.shared.told() for service in self.services.values()]
        fresh = self.routed.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode([routed for routed in told if routed is not None]))
        fresh.replace(self.routed)
        return hashlib.blake2b(repr(sorted(self._told.items())).encode(), digest_size=4).hexdigest()

    def _digests(self) -> dict[str, str]:
        """Of each model, the digest of the settings that it says routers are to have. Of another build than this
        process's it counts only once a supervisor of that build begins: it comes to an upgrade last."""
        found = dict(self._told)
        for name, service in self.services.items():
            routed = service.shared.told()
            if routed is not None and (routed.build == build_id() or name not in found):
                found[name] = routed.digest
        return found

    def confirm(self, stale: tuple[int, str]) -> None:
        """Tell the clusters how many routers read settings of before, and why that stays so, where it has changed."""
        if self._confirmed == (self._told, stale):
            return
        for name, service in self.services.items():
            service.shared.confirm(self._told.get(name, ""), *stale)
        self._confirmed = (self._told, stale)


class ServeModels:
    """One run of `twinpool serve` with several models."""

    def __init__(
        self,
        plan: ModelsPlan,
        folder: RunFiles,
        out: TextIO,
        stopping: ShutdownSignal,
        began: float | None = None,
        state: ModelsState | None = None,
    ) -> None:
        """`state`: of a detached run, which goes on when this process is killed; one that has begun is taken over."""
        self._plan, self._folder, self._stopping, self._state = plan, folder, stopping, state
        self._clock = SystemClock()
        self._terminal = Terminal(self._clock, out, began, verbose=plan.options.verbose)
        self._secrets = {name: value for name in SECRETS if (value := os.environ.pop(name, None))}
        if state is not None:
            self._secrets = state.secrets

    def run(self) -> int:
        """Serve until asked to stop; returns the exit code."""
        return run_until_asked(self._serve, self._stopping, self._terminal, self._folder.logs, self._cause)

    def _serve(self, stack: ExitStack) -> None:
        self._start(stack)
        self._keep_alive()
        self._drain()

    @property
    def _begun(self) -> bool:
        """Whether this process takes over what runs."""
        return self._state is not None and self._state.begun

    def _cause(self, error: Exception, stack: ExitStack) -> Exception:
        """The error, with which what runs of a detached run goes on: the next such process takes it over."""
        if isinstance(error, TwinpoolError) and self._begun:
            stack.pop_all()
        return error

    # ------------------------------------------------------------ starting

    def _start(self, stack: ExitStack) -> None:
        plan, state, begun = self._plan, self._state, self._begun
        if not begun:
            self._show_plan()
        config, logs = plan.lead.cluster, self._folder.logs
        self._context = ServiceContext(
            logs, config, self._clock, self._terminal.line, self._words, self._folder.owns, state, stack
        )
        for one in plan.configs.values():
            stack.callback(remove_all, one.engine.weight_roots)  # After the routers, which hold them.
        environment = dict(os.environ) | self._secrets | self._cluster_secret()
        self._clusters = ModelClusters(plan, self._folder, self._context, state)
        self._models = self._clusters.services
        self._clusters.start(environment, begun=begun)
        if not begun:
            self._await_models()
        self._start_routers(environment)
        security = plan.lead.security
        self._folder.publish(plan.operators, ", ".join(plan.configs), security.tls_ca, plan.options.file)
        self._stopping.ready()
        if begun:
            assert state is not None
            state.taken_over()
            self._terminal.line(f"a supervisor of build {build_id()} has taken the models over, which went on")
            return
        ask = curl_line(plan.url, next(iter(plan.configs)), key=bool(security.keys_file), ca=security.tls_ca)
        operators = [f"operators' paths: {plan.operators}"] if plan.operators != plan.url else []
        self._terminal.ready(plan.url, [("models", ", ".join(plan.configs))], [*operators, ask])
        self._stopping.manager.ready(f"serves at {plan.url}")
        if state is not None:
            state.mark_ready()

    def _show_plan(self) -> None:
        plan = self._plan
        self._terminal.step("models", ", ".join(plan.configs))
        self._terminal.step("logs", str(self._folder.logs))
        for line in open_ways(plan.lead.security, plan.options.host, "127.0.0.1"):
            self._terminal.step("open", line)

    def _cluster_secret(self) -> dict[str, str]:
        """The secret with which all processes authenticate each other, as a variable; nothing where all of them are on
        loopback and have no certificates."""
        if self._plan.options.ray_address is None and not self._plan.lead.security.cluster_ca:
            return {}
        kept = self._state.secret if self._state is not None else ""
        secret = self._secrets.get(SECRET_VARIABLE) or kept or secrets.token_hex(32)
        if self._state is not None:
            self._state.secret = secret
            self._state.save()
        return {SECRET_VARIABLE: secret}

    def _await_models(self) -> None:
        deadline = self._clock.now() + START_S
        for name, service in self._models.items():
            while not self._listening(service):
                self._check_stop()
                if self._clock.now() > deadline:
                    raise PartFailed(f"gave up waiting for model {name}; see {self._folder.logs / name}")
                self._stopping.wait(POLL_S)
            self._terminal.step("model", f"{name} is served")

    def _listening(self, service: Service) -> bool:
        """Whether a model or a router is ready; waits a little. Raises `PartFailed` where one has ended."""
        for one in self._models.values():
            if (how := one.ended()) is not None:
                raise PartFailed(f"{one.name} could not start ({how}){self._words(one.name)}")
        try:
            return service.listening(POLL_S)
        except ServiceFailed as error:
            raise PartFailed(f"{error}{self._words(service.name)}") from None

    def _start_routers(self, environment: Mapping[str, str]) -> None:
        self._routers = RouterServices(self._context, self._routers_plan(), self._folder.temporary)
        self._routers.start(RouterCommand(ROUTER, environment, ("--models", str(self._clusters.routed))))
        if self._begun:
            return
        deadline = self._clock.now() + HEALTHY_S
        for router in self._routers.services():
            while not self._listening(router) or not router.probe.healthy():
                self._check_stop()
                if self._clock.now() > deadline:
                    raise PartFailed(f"the {router.name} did not reach the models; see {self._folder.logs}")
                self._stopping.wait(POLL_S)
            self._terminal.step(router.name, "listening")

    def _routers_plan(self) -> RoutersPlan:
        """The routers of what the models say now."""
        options, digest = self._plan.options, self._clusters.tell()
        return RoutersPlan(options.routers, options.host, self._plan.port, self._plan.lead, digest)

    def _check_stop(self) -> None:
        if self._stopping.asked:
            raise StartStopped

    def _words(self, process: str) -> str:
        """The last words of a service; of a model's cluster, which tells of its start as `serve` does, only errors."""
        logs, model = self._folder.logs, process.removeprefix("model-")
        lines = last_words(logs / f"{process}.log")
        if model in self._models:
            lines = [line for line in (*lines, *last_words(logs / model / OUTPUT)) if line.startswith("error")]
        return indented(lines)

    # ------------------------------------------------------------ running

    def _keep_alive(self) -> None:
        self._routers.probe()
        alive = dict(self._models)
        while not self._stopping.wait(POLL_S):
            for name, service in list(alive.items()):
                if failed := service.tend():
                    self._terminal.line(f"{failed}; model {name} stays away, the others are served on")
                    del alive[name]
            if not alive:
                raise PartFailed("no model is left that could be served")
            if self._clusters.news():
                self._routers.change(self._routers_plan())
            self._routers.tend()
            self._clusters.confirm(self._routers.stale())

    def _drain(self) -> None:
        """Have the routers refuse what is new, and give the answers that run their time; then end the clusters, all at
        once."""
        self._terminal.line(self._stopping.drain_line)
        until = self._clock.now() + self._stopping.answers_s + ROUTER_END_S
        self._routers.drain()
        while not self._routers.drained() and self._clock.now() < until:
            self._stopping.wait(POLL_S)
        for service in self._models.values():
            service.terminate()
        until = self._clock.now() + MODEL_END_S
        while any(one.ended() is None for one in self._models.values()) and self._clock.now() < until:
            self._stopping.wait(POLL_S)


def serve_models(plan: ModelsPlan, began: float | None = None) -> int:
    """Serve with this process's terminal; returns the exit code. Errors are shown, not raised. `began`: as of
    `serve_cluster.serve`."""

    def run(folder: RunFolder, out: TextIO, stopping: ShutdownSignal) -> int:
        return ServeModels(plan, folder, out, stopping, began).run()

    return in_terminal(plan.lead.cluster.stop_timeout_s, run)


def launch_models(plan: ModelsPlan, out: TextIO, wait: Callable[[float], object]) -> int:
    """Start a detached run of several models, and return the exit code once all serve, or one has failed (`keep`)."""
    folder = new_folder()
    folders = {name: new_folder(within=folder) for name in plan.configs}
    state = ModelsState(
        folder,
        new_log_folder(),
        options=plan.options,
        port=plan.port,
        configs=dict(plan.configs),
        folders=folders,
        secrets=given_secrets(),
    )
    return keep(state, plan.operators, out, wait, verbose=plan.options.verbose)


def supervise_models(state: ModelsState, out: TextIO) -> int:
    """Be the supervisor of a detached run of several models; returns the exit code."""
    plan = ModelsPlan(state.options, state.configs, state.port)
    stopping = signals_of(plan.lead.cluster.stop_timeout_s)
    stopping.show_on(out)
    kept = KeptFolder(state.folder, state.logs, os.getppid())
    return ServeModels(plan, kept, out, stopping, state=state).run()
