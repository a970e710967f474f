"""`twinpool serve` of several models: a cluster for each, and routers that serve all of them at one endpoint.

Each model's cluster is a process of its own (`cluster.serve.model_cluster`) with its controller, its Ray, its workers:
what happens to one of them, a change of weights, a drain, a sleep, the death of everything, is nothing to the others.
This process gives each its configuration, starts the routers once all serve, and starts again what dies. Its memory,
cores and cards are divided among them before the first of them starts.

A model that dies too often stays dead, and the others are served on: `/health` says so.

Detached (`launch_models`), this process is a supervisor that its keeper starts again: each model's process is then the
keeper of a detached cluster, and the next supervisor takes these keepers and the routers over (`ModelsState`).

What routers read of a model may change while they run: its cluster says so in its report, and the routers are replaced
one by one (`SharedRouters`). So it is when a detached run gets other models (`ModelsOrder`): one that is removed ends
once no router knows it that still answers, and one that is added is told to routers once it serves.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TextIO

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
from twinpool.cluster.serve.model_clusters import ModelClusters
from twinpool.cluster.serve.models_config import ModelsPlan
from twinpool.cluster.serve.router_services import RouterCommand, RouterServices, RoutersPlan
from twinpool.cluster.serve.security_check import open_ways
from twinpool.cluster.serve.serve_cluster import HEALTHY_S, POLL_S, ROUTER_END_S, SECRETS
from twinpool.cluster.serve.service import ROUTER, PartFailed, Service, ServiceContext, ServiceFailed
from twinpool.cluster.serve.shutdown_signal import END_S, ShutdownSignal, StartStopped, run_until_asked, signals_of
from twinpool.cluster.serve.terminal import Terminal, curl_line, in_terminal
from twinpool.contracts.build_id import build_id
from twinpool.contracts.checkpoint.pushed_weights import remove_all
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.cluster_secret import SECRET_VARIABLE
from twinpool.contracts.errors import TwinpoolError

START_S = 1800.0
"""Seconds in which all models must serve. Each has a deadline for each of its workers (`cluster.start_timeout_s`)."""
MODEL_END_S = END_S - 1.5
"""Seconds that the models' clusters have to end in order, once the routers have."""


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
        if state is not None:  # Models come and go.
            plan = dataclasses.replace(plan, configs=state.configs)
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
        stack.callback(self._remove_pushed_weights)  # After the routers, which hold them.
        environment = dict(os.environ) | self._secrets | self._cluster_secret()
        self._clusters = ModelClusters(plan, self._folder, self._context, state, environment)
        self._models = self._clusters.services
        self._clusters.start(begun=begun)
        if not begun:
            self._await_models()
        self._start_routers(environment)
        security = plan.lead.security
        self._publish()
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

    def _publish(self) -> None:
        """Have commands find the run."""
        plan = self._plan
        self._folder.publish(plan.operators, ", ".join(plan.configs), plan.lead.security.tls_ca, plan.options.file)

    def _remove_pushed_weights(self) -> None:
        for config in self._plan.configs.values():
            remove_all(config.engine.weight_roots)

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
        while not self._stopping.wait(POLL_S):
            self._clusters.tend()
            if self._clusters.change(settled=not (self._routers.stale()[0] or self._routers.leaving)):
                self._publish()
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
