"""`twinpool serve` of several models: a cluster for each, and routers that serve all of them at one endpoint.

Each model's cluster is a process of its own (`cluster.serve.model_cluster`) with its controller, its Ray, its workers:
what happens to one of them, a change of weights, a drain, a sleep, the death of everything, is nothing to the others.
This process gives each its configuration, starts the routers once all serve, and starts again what dies. Its memory,
cores and cards are divided among them before the first of them starts.

A model that dies too often stays dead, and the others are served on: `/health` says so.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
import yaml

from twinpool.cluster.processes.free_port import free_port
from twinpool.cluster.processes.run_folder import RunFolder, indented, last_words
from twinpool.cluster.serve.models_config import models_of, places_of
from twinpool.cluster.serve.preflight import ServeOptions, check_flags, with_settings
from twinpool.cluster.serve.router_services import RouterCommand, RouterServices, RoutersPlan
from twinpool.cluster.serve.security_check import check_security, open_ways, with_absolute_paths
from twinpool.cluster.serve.serve_cluster import HEALTHY_S, POLL_S, ROUTER_END_S, SECRETS
from twinpool.cluster.serve.service import ROUTER, PartFailed, Service, ServiceContext, ServiceFailed
from twinpool.cluster.serve.shutdown_signal import END_S, ShutdownSignal, StartStopped, run_until_asked
from twinpool.cluster.serve.terminal import Terminal, curl_line, in_terminal, url_of
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.cluster_secret import SECRET_VARIABLE
from twinpool.contracts.config.cluster_config import Config, LaunchConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.router_report import RoutedModel
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


class ServeModels:
    """One run of `twinpool serve` with several models."""

    def __init__(
        self, plan: ModelsPlan, folder: RunFolder, out: TextIO, stopping: ShutdownSignal, began: float | None = None
    ) -> None:
        self._plan, self._folder, self._stopping = plan, folder, stopping
        self._clock = SystemClock()
        self._terminal = Terminal(self._clock, out, began, verbose=plan.options.verbose)
        self._secrets = {name: value for name in SECRETS if (value := os.environ.pop(name, None))}
        self._models: dict[str, Service] = {}

    def run(self) -> int:
        """Serve until asked to stop; returns the exit code."""
        return run_until_asked(self._serve, self._stopping, self._terminal, self._folder.logs)

    def _serve(self, stack: ExitStack) -> None:
        self._start(stack)
        self._keep_alive()
        self._drain()

    # ------------------------------------------------------------ starting

    def _start(self, stack: ExitStack) -> None:
        plan, options = self._plan, self._plan.options
        self._terminal.step("models", ", ".join(plan.configs))
        self._terminal.step("logs", str(self._folder.logs))
        for line in open_ways(plan.lead.security, options.host, "127.0.0.1"):
            self._terminal.step("open", line)
        config, logs = plan.lead.cluster, self._folder.logs
        self._context = ServiceContext(
            logs, config, self._clock, self._terminal.line, self._words, self._folder.owns, None, stack
        )
        environment = dict(os.environ) | self._secrets | self._cluster_secret()
        self._start_models(environment)
        self._await_models()
        self._start_routers(environment)
        security = plan.lead.security
        https = bool(security.tls_cert)
        url = url_of(options.host, plan.port, https=https)
        operators = url_of(security.admin_host, security.admin_port, https=https) if security.admin_port else url
        self._folder.publish(operators, ", ".join(plan.configs), security.tls_ca, options.file)
        self._stopping.ready()
        ask = curl_line(url, next(iter(plan.configs)), key=bool(security.keys_file), ca=security.tls_ca)
        shown = [*([f"operators' paths: {operators}"] if operators != url else []), ask]
        self._terminal.ready(url, [("models", ", ".join(plan.configs))], shown)
        self._stopping.manager.ready(f"serves at {url}")

    def _cluster_secret(self) -> dict[str, str]:
        """The secret with which all processes authenticate each other, as a variable; nothing where all of them are on
        loopback and have no certificates."""
        if self._plan.options.ray_address is None and not self._plan.lead.security.cluster_ca:
            return {}
        return {SECRET_VARIABLE: self._secrets.get(SECRET_VARIABLE) or secrets.token_hex(32)}

    def _start_models(self, environment: Mapping[str, str]) -> None:
        from twinpool.cluster.assembly.node_shares import free_bytes

        configs, first_card = self._plan.configs, 0
        free = free_bytes() // len(configs)
        for name, config in configs.items():
            folder = self._folder.logs / name
            folder.mkdir()
            settings = folder / "settings.yaml"
            settings.touch(mode=0o600)  # It may have the ledger's password.
            settings.write_text(yaml.safe_dump(self._of_cluster(config).to_dict()))
            arguments = [
                *("--config", str(settings), "--report", str(self._report(name))),
                *("--within", str(self._folder.temporary), "--logs", str(folder)),
                *("--free-bytes", str(free), "--models", str(len(configs)), "--first-card", str(first_card)),
            ]
            if ":" not in config.engine.device and config.engine.device != "cpu":
                first_card += places_of(config)
            meanwhile = "the other models are served on"
            context = dataclasses.replace(self._context, config=config.cluster)
            service = Service(context, f"model-{name}", MODEL, arguments, environment, meanwhile=meanwhile)
            service.start()
            self._models[name] = service

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

    def _report(self, name: str) -> Path:
        return self._folder.temporary / f"{name}.routed"

    def _await_models(self) -> None:
        deadline = self._clock.now() + START_S
        for name, service in self._models.items():
            while not self._listening(service):
                self._check_stop()
                if self._clock.now() > deadline:
                    raise PartFailed(f"gave up waiting for model {name}; see {self._folder.logs / name}")
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
        options, routed = self._plan.options, self._folder.temporary / "models.json"
        reports = [msgspec.json.decode(self._report(name).read_bytes(), type=RoutedModel) for name in self._models]
        routed.write_bytes(msgspec.json.encode(reports))
        plan = RoutersPlan(options.routers, options.host, self._plan.port, self._plan.lead)
        self._routers = RouterServices(self._context, plan, self._folder.temporary)
        self._routers.start(RouterCommand(ROUTER, environment, ("--models", str(routed))))
        deadline = self._clock.now() + HEALTHY_S
        for router in self._routers.services():
            while not self._listening(router) or not router.probe.healthy():
                self._check_stop()
                if self._clock.now() > deadline:
                    raise PartFailed(f"the {router.name} did not reach the models; see {self._folder.logs}")
                self._stopping.wait(POLL_S)
            self._terminal.step(router.name, "listening")

    def _check_stop(self) -> None:
        if self._stopping.asked:
            raise StartStopped

    def _words(self, process: str) -> str:
        """The last words of a service; of a model's cluster, which tells of its start as `serve` does, only errors."""
        lines = last_words(self._folder.logs / f"{process}.log")
        if process.removeprefix("model-") in self._models:
            lines = [line for line in lines if line.startswith("error")]
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
            self._routers.tend()

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
