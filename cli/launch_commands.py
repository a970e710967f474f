"""The subcommands that start a cluster or end it: `serve`, `up`, `doctor`, `controller`, `down`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinpool.cli.command_line import parser
from twinpool.cli.command_output import FINE, print_line, print_table
from twinpool.cli.operator_commands import apply_file
from twinpool.contracts.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.cluster.serve.preflight import ServeOptions, ServePlan


def _served_names(names: Sequence[str]) -> list[str]:
    """Return `--served-model-name` as an assignment of `--set`, quoted because a name may look like a number."""
    return [f"router.served_model_name={json.dumps(','.join(names))}"] if names else []


def serve(args: argparse.Namespace) -> int:
    from twinpool.contracts.clock import SystemClock

    began = SystemClock().now()
    prepared = _prepared(args)
    if args.detach:
        return _launch(prepared)
    from twinpool.cluster.serve import serve_cluster

    return serve_cluster.serve(prepared, began)


def _prepared(args: argparse.Namespace) -> ServePlan:
    """What the flags of `serve` come to, with the configuration's file."""
    from twinpool.cluster.serve.preflight import prepare

    return prepare(_launch_options(args), say=lambda line: print(line, file=sys.stderr))


def _launch_options(args: argparse.Namespace) -> ServeOptions:
    """The flags of `serve` as they were given."""
    from dataclasses import fields

    from twinpool.cluster.serve.preflight import ServeOptions
    from twinpool.contracts.config.launch_config import LaunchConfig
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
        from twinpool.cli.doctor_command import CheckProgress

        progress = CheckProgress(sys.stderr)
        print("looks at configuration and machine; loading torch takes most of the time", file=sys.stderr, flush=True)
    from twinpool.cli.doctor_command import as_json, shown
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
        from twinpool.cli.admin_client import AdminClient

        print_line(f"{run.url} was launched with this file: its changes are applied")
        return apply_file(args, AdminClient.of_run(run, ""))
    if args.dry_run:
        from twinpool.contracts.config.load_config import load_config

        load_config(args.config)
        print_line(f"no cluster of {args.config} runs here: it would be launched")
        return FINE
    line = ["serve", "--detach", "--config", str(args.config)]
    return _launch(_prepared(parser().parse_args(line)))


def controller(args: argparse.Namespace) -> int:
    from twinpool.cluster.controller.controller_process import ControllerPlace, keep_controller
    from twinpool.contracts.config.ledger_place import refuse_shown_password
    from twinpool.contracts.config.load_config import load_config

    refuse_shown_password(args.set)
    config = load_config(args.config, args.set)
    if not config.cluster.ledger:
        raise ConfigError("a controller that serve doesn't start needs cluster.ledger, and a server there cluster.name")
    return keep_controller(config, ControllerPlace(args.address, args.port, standby=args.standby))


def down(args: argparse.Namespace) -> int:
    from twinpool.cli.admin_client import ClusterNotFound
    from twinpool.cli.chosen_cluster import choose, to_stderr
    from twinpool.cluster.serve.detached_cluster import take_down

    chosen = choose(args.url, changes=True)
    if chosen.run is None:
        raise ClusterNotFound(f"no cluster whose router is at {chosen.url} is running on this machine")
    to_stderr(f"ends {chosen.line}")
    take_down(chosen.run, time.sleep)
    print_line(f"{chosen.run.url} is down")
    return FINE
