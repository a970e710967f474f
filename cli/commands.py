"""The `twinpool` command: the function of each subcommand (`cli.command_line` has their flags).

`serve` and `up` start a cluster, `doctor` looks before they do, `controller` is one of its controllers, and `sim` runs
simulated clusters. The other
commands find a cluster's router and talk HTTP to it, so they import neither torch nor Ray nor gRPC and answer at once.
Exit codes: 0 fine, 1 a violation or refusal, 2 usage, 3 no cluster, 130 after a Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from cli.command_line import parser
from contracts.errors import ConfigError, TwinpoolError

if TYPE_CHECKING:
    from cli.admin_client import AdminClient
    from cluster.serve.preflight import ServeOptions, ServePlan

FINE, REFUSED, USAGE, NO_CLUSTER = 0, 1, 2, 3


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    sys.exit(run(parser().parse_args(arguments)))


def run(args: argparse.Namespace) -> int:
    """Run one parsed command; returns its exit code."""
    from cli.admin_client import ClusterNotFound, CommandRefused

    try:
        return _RUN[args.command](args)
    except ConfigError as error:
        code = USAGE
        text = str(error)
    except ClusterNotFound as error:
        code, text = NO_CLUSTER, str(error)
    except (CommandRefused, TwinpoolError) as error:
        code, text = REFUSED, str(error)
    except KeyboardInterrupt:
        return 130
    print(f"error: {text}", file=sys.stderr)
    return code


def _served_names(names: Sequence[str]) -> list[str]:
    """Return `--served-model-name` as an assignment of `--set`, quoted because a name may look like a number."""
    return [f"router.served_model_name={json.dumps(','.join(names))}"] if names else []


def _serve(args: argparse.Namespace) -> int:
    from contracts.clock import SystemClock

    began = SystemClock().now()
    prepared = _prepared(args)
    if args.detach:
        return _launch(prepared)
    from cluster.serve.serve_cluster import serve

    return serve(prepared, began)


def _prepared(args: argparse.Namespace) -> ServePlan:
    """What the flags of `serve` come to, with the configuration's file."""
    from cluster.serve.preflight import prepare

    return prepare(_launch_options(args), say=lambda line: print(line, file=sys.stderr))


def _launch_options(args: argparse.Namespace) -> ServeOptions:
    """The flags of `serve` as they were given."""
    from dataclasses import fields

    from cluster.serve.preflight import ServeOptions
    from contracts.config.launch_config import LaunchConfig
    from contracts.config.ledger_place import refuse_shown_password
    from contracts.ids import Role

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
        **given,
    )


def _doctor(args: argparse.Namespace) -> int:
    from cli.doctor_command import as_json, shown
    from cluster.doctor.doctor_case import DoctorCase
    from cluster.doctor.examine import examine, exit_code

    if args.file is not None:
        if args.config is not None:
            raise ConfigError("FILE and --config are the same: give one of them")
        args.config = args.file
    findings = examine(DoctorCase(_launch_options(args), compare_hosts=args.hosts))
    code = exit_code(findings)
    if args.json:
        print(as_json(findings, code))
    else:
        _show(shown(findings, everything=args.all))
    return code


def _launch(prepared: ServePlan) -> int:
    from cluster.serve.detached_cluster import launch

    return launch(prepared, sys.stdout, time.sleep)


def _up(args: argparse.Namespace) -> int:
    """Launch the file's cluster, or bring the one that was launched with this file to what it says now."""
    from cluster.processes.run_file import live_run_of

    run = live_run_of(args.file)
    if run is not None:
        from cli.admin_client import AdminClient

        _line(f"{run.url} was launched with this file: its changes are applied")
        return _apply_file(args, AdminClient.of_run(run, ""))
    if args.dry_run:
        from contracts.config.load_config import load_config

        load_config(args.file)
        _line(f"no cluster of {args.file} runs here: it would be launched")
        return FINE
    line = ["serve", "--detach", "--config", str(args.file)]
    return _launch(_prepared(parser().parse_args(line)))


def _controller(args: argparse.Namespace) -> int:
    from cluster.controller.controller_process import ControllerPlace, keep_controller
    from contracts.config.ledger_place import refuse_shown_password
    from contracts.config.load_config import load_config

    refuse_shown_password(args.set)
    config = load_config(args.config, args.set)
    if not config.cluster.ledger:
        raise ConfigError("a controller that serve doesn't start needs cluster.ledger, and a server there cluster.name")
    return keep_controller(config, ControllerPlace(args.address, args.port, standby=args.standby))


def _down(args: argparse.Namespace) -> int:
    from cli.admin_client import ClusterNotFound
    from cluster.processes.run_file import newest_live_run
    from cluster.serve.detached_cluster import take_down

    run = newest_live_run(args.url)
    if run is None:
        what = f"whose router is at {args.url} " if args.url else ""
        raise ClusterNotFound(f"no cluster {what}is running on this machine")
    take_down(run, time.sleep)
    _line(f"{run.url} is down")
    return FINE


def _status(args: argparse.Namespace) -> int:
    from cli.admin_client import AdminClient, status_view

    operator = AdminClient.find(args.url, args.ca)
    if args.watch:
        return _watch(operator, as_json=args.json)
    status = operator.status()
    if args.json:
        print(json.dumps(status))
    else:
        _show(status_view(status))
    return FINE


def _watch(operator: AdminClient, *, as_json: bool) -> int:
    """Show the workers again and again until Ctrl-C, which ends in order; a router that is away is waited for."""
    from rich.console import Console
    from rich.live import Live

    from cli.admin_client import WATCH_S, RouterAway, status_view

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                status = operator.status()
            except RouterAway as error:
                shown: Any = str(error)
            else:
                shown = json.dumps(status) if as_json else status_view(status)
            if as_json or not sys.stdout.isatty():
                console.print(shown, soft_wrap=as_json)
            else:
                live.update(shown, refresh=True)
            operator.sleep(WATCH_S)


def _check(args: argparse.Namespace) -> int:
    from cli.admin_client import AdminClient, check_table

    report = AdminClient.find(args.url, args.ca).check()
    if args.json:
        print(json.dumps(report))
    else:
        _show(check_table(report))
        for worker in report["workers"]:
            for violation in worker["violations"]:
                print(f"{worker['name']}: {violation}")
        print("all accounted for" if report["ok"] else "violations found")
    return FINE if report["ok"] else REFUSED


def _explain(args: argparse.Namespace) -> int:
    from cli.admin_client import AdminClient
    from cli.explain_command import explained, records_of

    records = records_of(AdminClient.find(args.url, args.ca), args.request)
    if args.json:
        print(json.dumps(records))
    else:
        _show(explained(records))
    return FINE


def _drain(args: argparse.Namespace) -> int:
    from cli import drain_command as leaving
    from cli.admin_client import AdminClient

    _check_timeout(args.timeout)
    operator = AdminClient.find(args.url, args.ca)

    def drain(show: Callable[[leaving.DrainReport], None]) -> leaving.DrainReport:
        options = {"force": args.force, "timeout_s": args.timeout, "show": show}
        return leaving.DrainCommand(operator, args.worker, **options).run()

    if args.json:
        report = drain(lambda r: _line(json.dumps(r.as_json())) if args.watch else None)
        _line(json.dumps(report.as_json()))
    elif args.watch and sys.stdout.isatty():
        from rich.live import Live

        with Live(refresh_per_second=5) as live:
            report = drain(lambda r: live.update(leaving.table(r)))
            live.update(leaving.table(report))
    else:
        report = drain(leaving.ProgressLines(_line).show)
    if not report.left:
        print(f"error: {report.why}", file=sys.stderr)
    elif not args.json:
        _line(leaving.ending(report))
    return FINE if report.left else REFUSED


def _undrain(args: argparse.Namespace) -> int:
    from cli.admin_client import AdminClient

    rows = AdminClient.find(args.url, args.ca).undrain(args.worker)
    for row in rows:
        print(f"{row['name']} {row.get('outcome', 'admits again')}")
    return REFUSED if any(row["state"] == "unreachable" for row in rows) else FINE


def _role(args: argparse.Namespace) -> int:
    from cli.admin_client import AdminClient
    from cli.drain_command import change_role

    _check_timeout(args.timeout)
    operator = AdminClient.find(args.url, args.ca)
    report = change_role(operator, args.worker, args.role, force=args.force, timeout_s=args.timeout)
    _line(f"{args.worker} serves as a {args.role} worker after {report.seconds:.1f} s")
    return FINE


def _change_pools(args: argparse.Namespace) -> int:
    """Run `add`, `scale`, `restart`, `cordon` or `uncordon`."""
    from cli import pool_commands as pools
    from cli.admin_client import AdminClient
    from cli.drain_command import quoted

    operator = AdminClient.find(args.url, args.ca)
    if args.command in ("cordon", "uncordon"):
        for worker in pools.order(operator, f"{args.command}/{quoted(args.node)}"):
            _line(f"{worker.name} {worker.outcome}")
        _line(f"{args.node} is {args.command}ed")
        return FINE
    _check_timeout(args.timeout)
    force = "true" if args.command != "add" and args.force else ""
    match args.command:
        case "add":
            workers = pools.order(operator, "add", role=args.role, count=args.count, node=args.node)
        case "scale":
            sizes = {role: str(count) for role, count in pools.parse_sizes(args.sizes).items()}
            workers = pools.order(operator, "scale", **sizes, force=force)
        case _:
            workers = pools.order(operator, pools.restart_path(args.worker), force=force)
    for worker in workers:
        _line(f"{worker.name} {worker.outcome}")
    if not workers:
        _line("nothing to do: the pools have so many workers already")
    elif not args.no_wait:
        _line(f"done after {pools.follow(operator, workers, args.timeout, _line):.1f} s")
    return FINE


def _apply(args: argparse.Namespace) -> int:
    from cli.admin_client import AdminClient

    return _apply_file(args, AdminClient.find(args.url, args.ca))


def _apply_file(args: argparse.Namespace, operator: AdminClient) -> int:
    from cli.apply_command import ApplyCommand, read_settings

    _check_timeout(args.timeout)
    command = ApplyCommand(operator, read_settings(args.file), _line, timeout_s=args.timeout, force=args.force)
    nothing = "the cluster has these settings, and all workers were started with them"
    return _carry_out(command, nothing, dry_run=args.dry_run)


def _upgrade(args: argparse.Namespace) -> int:
    from cli.admin_client import AdminClient, ClusterNotFound
    from cli.upgrade_command import UpgradeCommand
    from cluster.processes.run_file import newest_live_run
    from cluster.serve.supervisor_upgrade import check_build, interpreter_of

    _check_timeout(args.timeout)
    python = interpreter_of(args.python)
    url = args.url or os.environ.get("TWINPOOL_URL", "")
    run = newest_live_run(url)
    if run is None:
        what = f"whose router is at {url} " if url else ""
        raise ClusterNotFound(f"no cluster {what}is running on this machine: upgrade it where it was started")
    build, operator = check_build(python, run), AdminClient.of_run(run, args.ca)
    command = UpgradeCommand(operator, run, build, _line, timeout_s=args.timeout, force=args.force)
    return _carry_out(command, f"all of the cluster is of build {build.build}", dry_run=args.dry_run)


class _Plan(Protocol):
    """What a command will do, as `plan` found it."""

    @property
    def nothing(self) -> bool: ...

    def lines(self) -> list[str]: ...


_P = TypeVar("_P", bound=_Plan)


class _PlannedCommand(Protocol[_P]):
    """A command that says what it will do before it does it."""

    def plan(self) -> _P: ...

    def run(self, plan: _P) -> float: ...

    def left(self) -> str: ...


def _carry_out(command: _PlannedCommand[_P], nothing: str, *, dry_run: bool) -> int:
    """Say what a command will do, and do it unless this is a dry run. `nothing`: why there may be nothing to do."""
    plan = command.plan()
    for line in plan.lines():
        _line(line)
    if plan.nothing:
        _line(f"nothing to do: {nothing}")
    elif not dry_run:
        try:
            _line(f"done after {command.run(plan):.1f} s")
        except KeyboardInterrupt:
            _line(f"stopped; {command.left()}")
            raise
    return FINE


def _check_timeout(timeout_s: float) -> None:
    if timeout_s <= 0:
        raise ConfigError(f"--timeout must be above 0 seconds, got {timeout_s:g}")


def _line(text: str) -> None:
    print(text, flush=True)


def _sim(args: argparse.Namespace) -> int:
    from sim.run.run_seeds import ClusterKind
    from sim.run.sim_command import sim

    def say(line: str) -> None:
        print(line, flush=True)

    if args.requests is not None:
        return _sim_scale(args, say)
    for flag in _SCALE_FLAGS:
        if getattr(args, flag):
            raise ConfigError(f"--{flag} is for sim --requests N")
    if args.colocate and args.conditional:
        raise ConfigError("--colocate and --conditional are two kinds of cluster: give one of them")
    kind = (
        ClusterKind.COLOCATED if args.colocate else ClusterKind.CONDITIONAL if args.conditional else ClusterKind.POOLS
    )
    good = sim(args.seed, args.seeds, args.jobs, args.shrink, args.first, say, kind)
    return FINE if good else REFUSED


def _replay(args: argparse.Namespace) -> int:
    from cli.replay.replay_command import ReplayOptions, replay

    return FINE if replay(ReplayOptions.of(args), _line, _show) else REFUSED


def _plan(args: argparse.Namespace) -> int:
    from cli.plan.plan_command import PlanOptions, plan

    return FINE if plan(PlanOptions.of(args), _line, _show) else REFUSED


_SCALE_FLAGS = ("workers", "seconds", "policy", "trace", "replay")
"""Flags of `sim --requests`."""


def _sim_scale(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    from sim.scale.scale_command import ScaleOptions, simulate_scale

    for flag in ("seeds", "colocate", "conditional", "shrink", "first"):
        if getattr(args, flag):
            raise ConfigError(f"--{flag} is not for sim --requests, which draws no faults")
    given = {flag: getattr(args, flag) for flag in ("seed", *_SCALE_FLAGS) if getattr(args, flag) is not None}
    options = ScaleOptions(**{"workers": 8, "requests": args.requests} | given)
    return FINE if simulate_scale(options, say) else REFUSED


def _keys(args: argparse.Namespace) -> int:
    from cli.keys_command import list_keys, new_key, revoke_key

    if args.action == "list":
        _show(list_keys(args.file))
        return FINE
    if not args.name:
        raise ConfigError(
            f"twinpool keys {args.action} needs {'a tenant' if args.action == 'new' else 'the id of a key'}"
        )
    if args.action == "new":
        print(new_key(args.file, args.name, args.expires))
    else:
        print(f"revoked {revoke_key(args.file, args.name)}")
    return FINE


def _certs(args: argparse.Namespace) -> int:
    from cli.certs_command import check_certificates, new_certificates, renew_certificate

    if args.action == "check":
        table, good = check_certificates(args.folder)
        _show(table)
        return FINE if good else REFUSED
    make = new_certificates if args.action == "new" else renew_certificate
    for line in make(args.folder, args.host, args.days):
        print(line)
    return FINE


def _demo(args: argparse.Namespace) -> int:
    from cli.demo.demo_command import DemoOptions, demo

    if args.minutes < 0:
        raise ConfigError(f"--minutes must not be less than 0, got {args.minutes:g}")
    return demo(DemoOptions(args.chaos, args.minutes, args.port, args.seed))


def _show(table: Any) -> None:
    from rich.console import Console

    # Output into a pipe has to fit no screen, and no cell may be cut.
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


_RUN = {
    "serve": _serve,
    "up": _up,
    "doctor": _doctor,
    "controller": _controller,
    "down": _down,
    "status": _status,
    "explain": _explain,
    "drain": _drain,
    "undrain": _undrain,
    "role": _role,
    "add": _change_pools,
    "scale": _change_pools,
    "restart": _change_pools,
    "apply": _apply,
    "upgrade": _upgrade,
    "cordon": _change_pools,
    "uncordon": _change_pools,
    "check": _check,
    "keys": _keys,
    "certs": _certs,
    "replay": _replay,
    "plan": _plan,
    "demo": _demo,
    "sim": _sim,
}

if __name__ == "__main__":
    main()
