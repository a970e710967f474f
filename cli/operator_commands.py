"""The subcommands for a cluster that runs: what it says of itself, drains, pools, roles, settings and builds.

They find a cluster's router and talk HTTP to it, so they import neither torch nor Ray nor gRPC and answer at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from twinpool.cli.command_output import FINE, REFUSED, console, print_line, print_table
from twinpool.contracts.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.cli.admin_client import AdminClient
    from twinpool.cli.chosen_cluster import ChosenCluster


def _operator(args: argparse.Namespace, *, changes: bool) -> AdminClient:
    """The client of the cluster that the flags name or that is there, which is said first. `changes`: whether the
    command changes something."""
    from twinpool.cli.chosen_cluster import client_for

    return client_for(args.url, args.ca, changes=changes)[0]


def status(args: argparse.Namespace) -> int:
    from twinpool.cli.chosen_cluster import client_for
    from twinpool.cli.status_view import numerics_lines

    said: list[str] = []  # The view has a line of its own for the cluster.
    operator, chosen = client_for(args.url, args.ca, changes=False, say=said.append)
    if args.json or chosen.several:
        print(chosen.line, file=sys.stderr, flush=True)
    if args.watch:
        return _watch(operator, chosen, args)
    status = operator.status()
    if args.json:
        print(json.dumps(status))
        return FINE
    print_table(_status_view(status, chosen, args))
    if args.verbose:
        for line in (*numerics_lines(status["workers"]), *chosen.start_report()):
            print_line(line)
    return FINE


def _status_view(status: dict[str, Any], chosen: ChosenCluster, args: argparse.Namespace) -> Any:
    from twinpool.cli.status_view import status_view

    return status_view(status, up_s=chosen.up_s, unfold=args.all)


def _watch(operator: AdminClient, chosen: ChosenCluster, args: argparse.Namespace) -> int:
    """Show the workers again and again until Ctrl-C, which ends in order; a router that is away is waited for."""
    from rich.live import Live

    from twinpool.cli.admin_client import WATCH_S, RouterAway

    out, as_json = console(), args.json
    with Live(console=out, auto_refresh=False) as live:
        while True:
            try:
                status = operator.status()
            except RouterAway as error:
                shown: Any = str(error)
            else:
                shown = json.dumps(status) if as_json else _status_view(status, chosen, args)
            if as_json or not sys.stdout.isatty():
                out.print(shown, soft_wrap=as_json)
            else:
                live.update(shown, refresh=True)
            operator.sleep(WATCH_S)


def check(args: argparse.Namespace) -> int:
    from twinpool.cli.status_view import check_line, check_table

    report = _operator(args, changes=False).check()
    if args.json:
        print(json.dumps(report))
    else:
        print_line(check_line(report))
        print_table(check_table(report))
        for worker in report["workers"]:
            for violation in worker["violations"]:
                print(f"{worker['name']}: {violation}")
    return FINE if report["ok"] else REFUSED


def explain(args: argparse.Namespace) -> int:
    from twinpool.cli.explain_command import explained, records_of

    records = records_of(_operator(args, changes=False), args.request)
    if args.json:
        print(json.dumps(records))
    else:
        print_table(explained(records))
    return FINE


def drain(args: argparse.Namespace) -> int:
    from twinpool.cli import drain_command as leaving

    _check_timeout(args.timeout)
    operator = _operator(args, changes=True)
    if args.no_wait:
        for name in leaving.order_drain(operator, args.worker, force=args.force):
            print_line(f"{name} drains")
        return FINE

    def run(show: Callable[[leaving.DrainReport], None]) -> leaving.DrainReport:
        options = {"force": args.force, "timeout_s": args.timeout, "show": show}
        return leaving.DrainCommand(operator, args.worker, **options).run()

    if args.json:
        report = run(lambda r: print_line(json.dumps(r.as_json())) if args.watch else None)
        print_line(json.dumps(report.as_json()))
    elif args.watch and sys.stdout.isatty():
        from rich.live import Live

        with Live(refresh_per_second=5) as live:
            report = run(lambda r: live.update(leaving.table(r)))
            live.update(leaving.table(report))
    else:
        report = run(leaving.ProgressLines(print_line).show)
    if not report.left:
        print(f"error: {report.why}", file=sys.stderr)
    elif not args.json:
        print_line(leaving.ending(report))
    return FINE if report.left else REFUSED


def undrain(args: argparse.Namespace) -> int:
    from twinpool.cli.pool_commands import follow, undrained

    _check_timeout(args.timeout)
    operator = _operator(args, changes=True)
    workers, refused = undrained(operator, args.worker)
    for line in (*(f"{one.name} {one.outcome}" for one in workers), *refused):
        print_line(line)
    if workers and not args.no_wait:
        print_line(f"done after {follow(operator, workers, args.timeout, print_line):.1f} s")
    return REFUSED if refused else FINE


def role(args: argparse.Namespace) -> int:
    from twinpool.cli.drain_command import change_role, order_role

    _check_timeout(args.timeout)
    operator = _operator(args, changes=True)
    if args.no_wait:
        order_role(operator, args.worker, args.role, force=args.force)
        print_line(f"{args.worker} drains and starts again as a {args.role} worker")
        return FINE
    report = change_role(operator, args.worker, args.role, force=args.force, timeout_s=args.timeout)
    print_line(f"{args.worker} serves as a {args.role} worker after {report.seconds:.1f} s")
    return FINE


def change_pools(args: argparse.Namespace) -> int:
    """Run `add`, `scale`, `restart`, `cordon` or `uncordon`."""
    from twinpool.cli import pool_commands as pools
    from twinpool.cli.drain_command import quoted

    operator = _operator(args, changes=True)
    if args.command in ("cordon", "uncordon"):
        for worker in pools.order(operator, f"{args.command}/{quoted(args.node)}"):
            print_line(f"{worker.name} {worker.outcome}")
        print_line(f"{args.node} is {args.command}ed")
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
        print_line(f"{worker.name} {worker.outcome}")
    if not workers:
        print_line("nothing to do: the pools have so many workers already")
    elif not args.no_wait:
        print_line(f"done after {pools.follow(operator, workers, args.timeout, print_line):.1f} s")
    return FINE


def apply(args: argparse.Namespace) -> int:
    return apply_file(args, _operator(args, changes=not args.dry_run))


def apply_file(args: argparse.Namespace, operator: AdminClient) -> int:
    from twinpool.cli.apply_command import ApplyCommand, read_settings

    _check_timeout(args.timeout)
    command = ApplyCommand(operator, read_settings(args.config), print_line, timeout_s=args.timeout, force=args.force)
    nothing = "the cluster has these settings, and all workers were started with them"
    return _carry_out(command, nothing, dry_run=args.dry_run)


def upgrade(args: argparse.Namespace) -> int:
    from twinpool.cli.admin_client import ClusterNotFound
    from twinpool.cli.chosen_cluster import client_for
    from twinpool.cli.upgrade_command import UpgradeCommand
    from twinpool.cluster.serve.supervisor_upgrade import check_build, interpreter_of

    _check_timeout(args.timeout)
    python = interpreter_of(args.python)
    operator, chosen = client_for(args.url, args.ca, changes=not args.dry_run)
    if chosen.run is None:
        raise ClusterNotFound(
            f"no cluster whose router is at {chosen.url} is running on this machine: upgrade it where it was started"
        )
    run = chosen.run
    build = check_build(python, run)
    command = UpgradeCommand(operator, run, build, print_line, timeout_s=args.timeout, force=args.force)
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
        print_line(line)
    if plan.nothing:
        print_line(f"nothing to do: {nothing}")
    elif not dry_run:
        try:
            print_line(f"done after {command.run(plan):.1f} s")
        except KeyboardInterrupt:
            print_line(f"stopped; {command.left()}")
            raise
    return FINE


def _check_timeout(timeout_s: float) -> None:
    if timeout_s <= 0:
        raise ConfigError(f"--timeout must be above 0 seconds, got {timeout_s:g}")
