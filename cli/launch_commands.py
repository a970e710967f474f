"""The commands that need no cluster, start one or end it: `serve`, `up`, `doctor`, `controller`, `down`.

And a cluster of one's own for as long as another command needs it.

Beside a cluster: simulated ones (`sim`), loads and plans (`replay`, `plan`), the demonstration (`demo`) and `convert`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TextIO

from twinpool.cli.admin_client import AdminClient, ClusterNotFound, choose, to_stderr
from twinpool.cli.command_parser import FINE, REFUSED, Command, command, flag, print_line, print_table, switch
from twinpool.cli.operator.apply_command import apply_file
from twinpool.cluster.processes.process_ids import TIED
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.python_command import module_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twinpool.cluster.doctor.doctor_case import Finding
    from twinpool.cluster.serve.models_config import ModelsPlan
    from twinpool.cluster.serve.preflight import ServeOptions, ServePlan


def _served_names(names: Sequence[str]) -> list[str]:
    """Return `--served-model-name` as an assignment of `--set`, quoted because a name may look like a number."""
    return [f"router.served_model_name={json.dumps(','.join(names))}"] if names else []


def serve(args: argparse.Namespace) -> int:
    from twinpool.contracts.clock import SystemClock

    began, options = SystemClock().now(), _launch_options(args)
    if options.config is not None and (models := _models_of(args, options)) is not None:
        from twinpool.cluster.serve.serve_models import launch_models, serve_models

        return launch_models(models, sys.stdout, time.sleep) if args.detach else serve_models(models, began)
    prepared = _prepared(options)
    if args.detach:
        return _launch(prepared)
    from twinpool.cluster.serve import serve_cluster

    return serve_cluster.serve(prepared, began)


def _models_of(args: argparse.Namespace, options: ServeOptions) -> ModelsPlan | None:
    """What a launch of several models comes to; None where the file has one."""
    from twinpool.cluster.serve.models_config import plan_models

    models = plan_models(options)
    if models is not None and args.served_model_name:
        raise ConfigError("--served-model-name is for one model: with several, name them in the file")
    return models


def _prepared(options: ServeOptions) -> ServePlan:
    """What a launch comes to, with the configuration's file."""
    from twinpool.cluster.serve.preflight import prepare

    return prepare(options, say=lambda line: print(line, file=sys.stderr))


def _launch_options(args: argparse.Namespace) -> ServeOptions:
    """The flags of `serve` as they were given."""
    from dataclasses import fields

    from twinpool.cluster.serve.preflight import ServeOptions
    from twinpool.contracts.config.cluster_config import LaunchConfig
    from twinpool.contracts.config.ledger_place import refuse_shown_password
    from twinpool.contracts.ids import Role

    refuse_shown_password(args.set)
    sizes = {Role.PREFILL: args.prefill, Role.DECODE: args.decode, Role.COLOCATED: args.colocate}
    flags = {one.name: getattr(args, one.name) for one in fields(LaunchConfig)}
    given = {name: value for name, value in flags.items() if value is not None and value is not False}  # 0 is a port.
    return ServeOptions(
        prefill=1 if args.prefill is None else args.prefill,
        decode=1 if args.decode is None else args.decode,
        colocate=0 if args.colocate is None else args.colocate,
        config=args.config,
        assignments=(*args.set, *_served_names(args.served_model_name), *(["security.open=true"] if args.open else [])),
        unsized=frozenset(role for role, count in sizes.items() if count is None),
        unset=frozenset(one.name for one in fields(LaunchConfig)) - given.keys(),
        verbose=getattr(args, "verbose", False),  # `doctor` shows nothing of a start.
        **given,
    )


def doctor(args: argparse.Namespace) -> int:
    progress = None
    if not args.json:
        progress = CheckProgress(sys.stderr)
        print("looks at configuration and machine; loading torch takes most of the time", file=sys.stderr, flush=True)
    from twinpool.cluster.doctor.doctor_case import DoctorCase
    from twinpool.cluster.doctor.examine import examine, exit_code

    findings = examine(DoctorCase(_launch_options(args), compare_hosts=args.hosts), progress)
    if progress is not None:
        progress.close()
    code = exit_code(findings)
    if args.json:
        print(as_json(findings, code))
    else:
        print_table(shown(findings, everything=args.all))
    return code


def _launch(prepared: ServePlan) -> int:
    from twinpool.cluster.serve.detached_cluster import launch

    return launch(prepared, sys.stdout, time.sleep)


def up(args: argparse.Namespace) -> int:
    """Launch the file's cluster, or bring the one that was launched with this file to what it says now."""
    from twinpool.cluster.processes.run_folder import live_run_of

    run = live_run_of(args.config)
    if run is not None:
        print_line(f"{run.url} was launched with this file: its changes are applied")
        return apply_file(args, AdminClient.of_run(run, ""), run)
    if args.dry_run:
        from twinpool.cluster.serve.models_config import models_of
        from twinpool.contracts.config.load_config import load_config

        if not models_of(args.config):
            load_config(args.config)
        print_line(f"no cluster of {args.config} runs here: it would be launched")
        return FINE
    from twinpool.cluster.serve.models_config import plan_models
    from twinpool.cluster.serve.preflight import ServeOptions
    from twinpool.cluster.serve.serve_models import launch_models

    options = ServeOptions.of_file(args.config)
    if (models := plan_models(options)) is not None:
        return launch_models(models, sys.stdout, time.sleep)
    return _launch(_prepared(options))


def controller(args: argparse.Namespace) -> int:
    from twinpool.cluster.controller.controller_process import ControllerPlace, keep_controller
    from twinpool.cluster.serve.security_check import with_absolute_paths
    from twinpool.contracts.config.ledger_place import refuse_shown_password
    from twinpool.contracts.config.load_config import load_config

    refuse_shown_password(args.set)
    config = with_absolute_paths(load_config(args.config, args.set))
    if not config.cluster.ledger:
        raise ConfigError("a controller that serve doesn't start needs cluster.ledger, and a server there cluster.name")
    return keep_controller(config, ControllerPlace(args.address, args.port, standby=args.standby))


def down(args: argparse.Namespace) -> int:
    from twinpool.cluster.serve.detached_cluster import take_down

    chosen = choose(args.url, changes=True)
    if chosen.run is None:
        raise ClusterNotFound(f"no cluster whose router is at {chosen.url} is running on this machine")
    to_stderr(f"ends {chosen.line}")
    take_down(chosen.run, time.sleep)
    print_line(f"{chosen.run.url} is down")
    return FINE


# ------------------------------------------------------------ what doctor shows

WIDTH = 79
"""Characters of the line that is written over: a longer one would leave lines behind."""
SLOW_S = 1.0
"""Seconds from which on a check's time is said."""
_COLOURS = {"fine": "green", "warning": "yellow", "error": "red"}


def as_json(findings: Sequence[Finding], code: int) -> str:
    """All findings, those that are fine too, in one line of JSON."""
    found: list[dict[str, Any]] = [
        {
            "check": one.check, "severity": str(one.severity), "found": one.found, "advice": one.advice,
            "detail": one.detail,
        }
        for one in findings
    ]  # fmt: skip
    return json.dumps({"exit_code": code, "findings": found})


def shown(findings: Sequence[Finding], *, everything: bool) -> RenderableType:
    """A line for each finding with its advice and detail below; `everything`: those that are fine, too."""
    from rich.console import Group
    from rich.text import Text

    from twinpool.cluster.doctor.doctor_case import Severity

    lines = []
    for one in findings:
        if one.severity is Severity.FINE and not everything:
            continue
        line = Text.assemble(
            (f"{one.severity.upper():8}", _COLOURS[one.severity]), (f"{one.check}: ", "bold"), one.found
        )
        lines.append(line)
        if one.advice:
            lines.append(Text(f"        do: {one.advice}"))
        if one.detail:
            lines.append(Text(f"        why: {one.detail}", style="dim"))
    lines.append(Text(_ending(findings)))
    return Group(*lines)


class CheckProgress:
    """Says which checks are being made, on standard error: in a terminal in one line that is written over, else a line
    for each that was slow."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._live = out, out.isatty()
        self._under_way: list[str] = []
        self._made = 0

    def begins(self, check: str) -> None:
        self._under_way.append(check)
        self._show()

    def ended(self, check: str, seconds: float) -> None:
        self._under_way.remove(check)
        self._made += 1
        if seconds >= SLOW_S:
            self._clear()
            self._out.write(f"{check}: {seconds:.1f} s\n")
        self._show()

    def close(self) -> None:
        """Take the line away."""
        self._clear()
        self._out.flush()

    def _show(self) -> None:
        if self._live:
            self._clear()
            self._out.write(f"{self._made} checks made; now: {', '.join(self._under_way)}"[:WIDTH])
        self._out.flush()

    def _clear(self) -> None:
        if self._live:
            self._out.write("\r\x1b[K")


def _ending(findings: Sequence[Finding]) -> str:
    from twinpool.cluster.doctor.doctor_case import Severity

    checks = len({one.check for one in findings})
    errors, warnings = (sum(one.severity is kind for one in findings) for kind in (Severity.ERROR, Severity.WARNING))
    if not errors and not warnings:
        return f"{checks} checks: nothing to do"
    verdict = "it would not serve" if errors else "it would serve"
    return f"{checks} checks: {errors} errors, {warnings} warnings; {verdict}"


# ------------------------------------------------------------ a cluster of one's own

START_S = 300.0
STOP_S = 40.0
"""Longer than `serve` takes to end, answers that run included."""
LOOK_S = 0.2
_READY = re.compile(r"^Twinpool is ready: (\S+)", re.MULTILINE)
_SHOWN = 400


class ClusterFailed(TwinpoolError):
    """Raised when the cluster doesn't become ready; the text is the end of what it said."""


@contextmanager
def own_cluster(flags: Sequence[str]) -> Iterator[str]:
    """Run `twinpool serve` with `flags`, on a free port unless they name one, until the block ends; yields its URL.

    It dies with this process, and a Ctrl-C is this process's alone. Raises `ClusterFailed`.
    """
    command = [*TIED, *module_command("twinpool.cli.commands", "serve", "--port", "0", *flags)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield _url(process, said)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], said: IO[bytes]) -> str:
    """Wait for the line that says where it serves."""
    deadline = time.monotonic() + START_S
    while True:
        said.seek(0)
        text = said.read().decode(errors="replace")
        if ready := _READY.search(text):
            return ready[1]
        if process.poll() is not None or time.monotonic() > deadline:
            raise ClusterFailed(f"the cluster did not become ready: {' '.join(text.split())[-_SHOWN:]}")
        time.sleep(LOOK_S)


def sim(args: argparse.Namespace) -> int:
    from twinpool.sim.run import sim_command
    from twinpool.sim.run.sim_command import ClusterKind

    if args.requests is not None:
        return _sim_scale(args)
    for name in _SCALE_FLAGS:
        if getattr(args, name):
            raise ConfigError(f"--{name} is for sim --requests N")
    if args.colocate and args.conditional:
        raise ConfigError("--colocate and --conditional are two kinds of cluster: give one of them")
    kind = (
        ClusterKind.COLOCATED if args.colocate else ClusterKind.CONDITIONAL if args.conditional else ClusterKind.POOLS
    )
    good = sim_command.sim(args.seed, args.seeds, args.jobs, args.shrink, args.first, print_line, kind)
    return FINE if good else REFUSED


_SCALE_FLAGS = ("workers", "seconds", "policy", "trace", "replay")
"""Flags of `sim --requests`."""


def _sim_scale(args: argparse.Namespace) -> int:
    from twinpool.sim.scale.scale_command import ScaleOptions, simulate_scale

    for name in ("seeds", "colocate", "conditional", "shrink", "first"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is not for sim --requests, which draws no faults")
    given = {flag: getattr(args, flag) for flag in ("seed", *_SCALE_FLAGS) if getattr(args, flag) is not None}
    options = ScaleOptions(**{"workers": 8, "requests": args.requests} | given)
    return FINE if simulate_scale(options, print_line) else REFUSED


def replay(args: argparse.Namespace) -> int:
    from twinpool.cli.load import replay_command

    options = replay_command.ReplayOptions.of(args)
    return FINE if replay_command.replay(options, print_line, print_table) else REFUSED


def plan(args: argparse.Namespace) -> int:
    from twinpool.cli.load import plan_command

    if args.memory:
        return _plan_memory(args)
    if args.cards:
        raise ConfigError("--cards is for plan --memory")
    return FINE if plan_command.plan(plan_command.PlanOptions.of(args), print_line, print_table) else REFUSED


def _plan_memory(args: argparse.Namespace) -> int:
    from twinpool.cli.load.model_memory import read_cards, show_memory

    if args.trace is not None or args.measure or args.url:
        raise ConfigError("--memory counts weights and starts nothing: leave out --trace, --measure and --url")
    if not args.model:
        raise ConfigError("--memory needs --model: a folder, a GGUF file, or a config.json")
    cards = read_cards(args.cards) if args.cards else None
    return FINE if show_memory(args.model, cards, args.config, tuple(args.set), print_line, print_table) else REFUSED


def convert(args: argparse.Namespace) -> int:
    from twinpool.cluster.models import find_model
    from twinpool.contracts.checkpoint.model_spec import read_model_spec
    from twinpool.engine.tensors.convert_checkpoint import Conversion, check_target

    target = args.target.expanduser().absolute()
    check_target(target)  # Before anything is fetched.
    spec = read_model_spec(find_model(args.source, print_line).path)
    Conversion(spec, args.weights, args.group_size).write(target, print_line)
    print_line(f"written: twinpool serve --model {args.target}")
    return FINE


def demo(args: argparse.Namespace) -> int:
    from twinpool.cli.load import demo_command

    if args.minutes < 0:
        raise ConfigError(f"--minutes must not be less than 0, got {args.minutes:g}")
    return demo_command.demo(demo_command.DemoOptions(args.chaos, args.minutes, args.port, args.seed))


# ------------------------------------------------------------ gateways

MAX_PREVIEW_S = 60.0


def endpoint_picker(args: argparse.Namespace) -> int:
    """Run `endpoint-picker` until SIGTERM. Raises `ConfigError`."""
    from twinpool.contracts.json_logs import log_to_stream
    from twinpool.router.endpoint_picker.endpoint_picker import Endpoints, serve_picker

    if bool(args.cert) != bool(args.key):
        raise ConfigError("--cert and --key go together")
    if not 0 < args.preview_timeout <= MAX_PREVIEW_S:
        raise ConfigError(f"--preview-timeout is a number of seconds, up to {MAX_PREVIEW_S:g}")
    endpoints = Endpoints(args.endpoint, args.ca)
    log_to_stream("endpoint-picker")
    asyncio.run(
        serve_picker(
            (args.host, args.port),
            endpoints,
            args.preview_timeout,
            fail_open=not args.fail_close,
            cert=args.cert,
            key=args.key,
            metrics_port=args.metrics_port,
        )
    )
    return FINE


def picker_commands() -> tuple[Command, ...]:
    """The command."""
    return (
        command(
            "endpoint-picker",
            "choose endpoints for a gateway of Kubernetes (Gateway API Inference Extension)",
            endpoint_picker,
            flag(
                "--endpoint",
                "a router, or the name of a headless service of several; may be repeated",
                action="append",
                required=True,
                metavar="HOST:PORT",
            ),
            flag("--host", "address to listen on (0.0.0.0)", default="0.0.0.0"),
            flag("--port", "port to listen on (9002)", type=int, default=9002),
            flag("--metrics-port", "port of /metrics, for Prometheus (9090); 0: none", type=int, default=9090),
            flag("--cert", "file of the certificate to serve gRPC with", default="", metavar="FILE"),
            flag("--key", "file of its key", default="", metavar="FILE"),
            flag(
                "--ca",
                "file of the authority of the routers' certificates: they are asked by HTTPS",
                default="",
                metavar="FILE",
            ),
            flag(
                "--preview-timeout",
                "seconds for which routers' previews are waited for (1)",
                type=float,
                default=1.0,
                metavar="S",
            ),
            switch(
                "--fail-close", "refuse a request of which no router gives a preview, in place of sending it to one"
            ),
        ),
    )
