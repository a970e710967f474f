"""The `twinpool` command.

`serve` starts a cluster; the other commands find its router and talk HTTP to it, so they import neither torch nor
Ray nor gRPC and answer at once. Exit codes: 0 fine, 1 a violation or refusal, 2 usage, 3 no cluster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from contracts.errors import ConfigError, TwinpoolError

FINE, REFUSED, USAGE, NO_CLUSTER = 0, 1, 2, 3


@dataclass(frozen=True)
class Flag:
    """One flag or argument of one or more commands."""

    names: tuple[str, ...]
    commands: tuple[str, ...]
    help: str
    options: dict[str, Any] = field(default_factory=dict)


COMMANDS = {
    "serve": "start a cluster and serve a model",
    "status": "show the workers",
    "drain": "stop a worker's admission, wait until its work is done and it has left",
    "undrain": "have a draining worker admit again",
    "check": "recount every page, slot, lease and room, and name what is wrong",
    "sim": "run simulated clusters under a virtual clock, with faults, and check every answer",
}
_OTHERS = ("status", "drain", "undrain", "check")
FLAGS = (
    Flag(("--model",), ("serve",), "checkpoint folder, or demo", {"default": "demo", "metavar": "DIR"}),
    Flag(("--prefill",), ("serve",), "number of prefill workers", {"type": int, "default": 1, "metavar": "N"}),
    Flag(("--decode",), ("serve",), "number of decode workers", {"type": int, "default": 1, "metavar": "N"}),
    Flag(("--host",), ("serve",), "address that the router listens on", {"default": "127.0.0.1"}),
    Flag(("--port",), ("serve",), "port that the router listens on; 0 for any", {"type": int, "default": 8000}),
    Flag(("--config",), ("serve",), "YAML file with the configuration", {"type": Path, "metavar": "FILE"}),
    Flag(
        ("--set",),
        ("serve",),
        "set one configuration key; may be repeated",
        {"action": "append", "default": [], "metavar": "SECTION.KEY=VALUE"},
    ),
    Flag(("--ray-address",), ("serve",), "join this Ray cluster (auto: the one on this machine)", {"metavar": "ADDR"}),
    Flag(("--dashboard",), ("serve",), "start Ray's dashboard too", {"action": "store_true"}),
    Flag(("worker",), ("drain", "undrain"), "name of a worker, such as decode-1", {"metavar": "WORKER"}),
    Flag(("--force",), ("drain",), "drain even the last worker of its role", {"action": "store_true"}),
    Flag(("--timeout",), ("drain",), "seconds to wait for it to leave", {"type": float, "default": 600.0}),
    Flag(("--json",), ("status", "check"), "print JSON", {"action": "store_true"}),
    Flag(("--seed",), ("sim",), "replay one seed, with its log", {"type": int, "metavar": "N"}),
    Flag(("--seeds",), ("sim",), "run many, the first to the last", {"metavar": "A..B"}),
    Flag(("--jobs",), ("sim",), "processes that run seeds", {"type": int, "default": 1, "metavar": "N"}),
    Flag(("--first",), ("sim",), "of many, stop at the first that violates something", {"action": "store_true"}),
    Flag(("--shrink",), ("sim",), "make a failing seed smaller before it is shown", {"action": "store_true"}),
    Flag(("--url",), _OTHERS, "the router (default: TWINPOOL_URL, else the newest cluster on this machine)", {}),
)


def parser() -> argparse.ArgumentParser:
    """The command line, from the table."""
    top = argparse.ArgumentParser(
        prog="twinpool", description="Serve language models with prefill and decode on separate workers."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for flag in FLAGS:
            if name in flag.commands:
                command.add_argument(*flag.names, help=flag.help, **flag.options)
    return top


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    sys.exit(run(parser().parse_args(arguments)))


def run(args: argparse.Namespace) -> int:
    """Run one parsed command; returns its exit code."""
    from cluster.admin import NoCluster, Refused

    try:
        return _RUN[args.command](args)
    except ConfigError as error:
        code = USAGE
        text = str(error)
    except NoCluster as error:
        code, text = NO_CLUSTER, str(error)
    except (Refused, TwinpoolError) as error:
        code, text = REFUSED, str(error)
    except KeyboardInterrupt:
        return 130
    print(f"error: {text}", file=sys.stderr)
    return code


def _serve(args: argparse.Namespace) -> int:
    from cluster.preflight import ServeOptions, prepare
    from contracts.clock import SystemClock

    began = SystemClock().now()
    options = ServeOptions(
        model=args.model,
        prefill=args.prefill,
        decode=args.decode,
        host=args.host,
        port=args.port,
        config=args.config,
        assignments=tuple(args.set),
        ray_address=args.ray_address,
        dashboard=args.dashboard,
    )
    prepared = prepare(options)
    from cluster.serve import serve

    return serve(prepared, began)


def _status(args: argparse.Namespace) -> int:
    from cluster.admin import Operator, status_table

    workers = Operator.find(args.url).status()
    if args.json:
        print(json.dumps({"workers": workers}))
    else:
        _show(status_table(workers))
    return FINE


def _check(args: argparse.Namespace) -> int:
    from cluster.admin import Operator, check_table

    report = Operator.find(args.url).check()
    if args.json:
        print(json.dumps(report))
    else:
        _show(check_table(report))
        for worker in report["workers"]:
            for violation in worker["violations"]:
                print(f"{worker['name']}: {violation}")
        print("all accounted for" if report["ok"] else "violations found")
    return FINE if report["ok"] else REFUSED


def _drain(args: argparse.Namespace) -> int:
    from cluster.admin import Operator

    if args.timeout <= 0:
        raise ConfigError(f"--timeout must be above 0 seconds, got {args.timeout:g}")
    Operator.find(args.url).drain(args.worker, args.force, args.timeout, lambda line: print(line, flush=True))
    return FINE


def _undrain(args: argparse.Namespace) -> int:
    from cluster.admin import Operator

    Operator.find(args.url).undrain(args.worker)
    print(f"{args.worker} admits again")
    return FINE


def _sim(args: argparse.Namespace) -> int:
    from sim.command import sim

    good = sim(args.seed, args.seeds, args.jobs, args.shrink, args.first, lambda line: print(line, flush=True))
    return FINE if good else REFUSED


def _show(table: Any) -> None:
    from rich.console import Console

    # In a pipe nothing has to fit a screen, and nothing may be cut.
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)


_RUN = {"serve": _serve, "status": _status, "drain": _drain, "undrain": _undrain, "check": _check, "sim": _sim}

if __name__ == "__main__":
    main()
