"""The `twinpool` command: the table of its subcommands (`cli.command_line` has their flags).

`serve` and `up` start a cluster, `doctor` looks before they do, `controller` is one of its controllers, and `sim` runs
simulated clusters. The other commands ask a cluster's router. Each subcommand imports what it needs when it runs.
Exit codes: 0 fine, 1 a violation or refusal, 2 usage, 3 no cluster, 130 after a Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from cli import launch_commands, operator_commands, tool_commands
from cli.command_line import parser
from cli.command_output import NO_CLUSTER, REFUSED, USAGE
from contracts.errors import ConfigError, TwinpoolError


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


_RUN = {
    "serve": launch_commands.serve,
    "up": launch_commands.up,
    "doctor": launch_commands.doctor,
    "controller": launch_commands.controller,
    "down": launch_commands.down,
    "status": operator_commands.status,
    "explain": operator_commands.explain,
    "drain": operator_commands.drain,
    "undrain": operator_commands.undrain,
    "role": operator_commands.role,
    "add": operator_commands.change_pools,
    "scale": operator_commands.change_pools,
    "restart": operator_commands.change_pools,
    "apply": operator_commands.apply,
    "upgrade": operator_commands.upgrade,
    "cordon": operator_commands.change_pools,
    "uncordon": operator_commands.change_pools,
    "check": operator_commands.check,
    "keys": tool_commands.keys,
    "certs": tool_commands.certs,
    "replay": tool_commands.replay,
    "plan": tool_commands.plan,
    "demo": tool_commands.demo,
    "sim": tool_commands.sim,
}

if __name__ == "__main__":
    main()
