"""The `twinpool` command: runs one of the commands of `cli.command_line`, with its signals and its exit code.

`serve` and `up` start a cluster, `doctor` looks before they do, `controller` is one of its controllers, and `sim` runs
simulated clusters. The other commands ask a cluster's router. Each command imports what is heavy when it runs, and this
module itself nothing: a signal that comes meanwhile has to be handled first.
Exit codes: 0 fine, and whenever `serve`, `demo` or `controller` was asked to end; 1 a violation or refusal, 2 usage, 3
no cluster, 130 after a Ctrl-C that came before a command had done its work.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import NoReturn

SERVERS = ("serve", "demo", "controller")
"""Commands that run until they are asked to end; `serve --detach` isn't one."""
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code. Without `arguments` the process is this command's alone."""
    if arguments is not None:
        sys.exit(_parsed_and_run(arguments))
    if sys.argv[1:2] and sys.argv[1] in SERVERS and "--detach" not in sys.argv:
        _end_now(_served())
    signal.signal(signal.SIGINT, _interrupt)
    try:
        code = _parsed_and_run(sys.argv[1:])
    except KeyboardInterrupt:  # While it was imported.
        code = INTERRUPTED
    if code == INTERRUPTED:
        _end_now(code)
    sys.exit(code)


def _parsed_and_run(arguments: Sequence[str]) -> int:
    from twinpool.contracts.python_command import COLLECT_AFTER

    gc.set_threshold(*COLLECT_AFTER)
    from twinpool.cli.command_line import parser

    return run(parser().parse_args(arguments))


def _end_now(code: int) -> NoReturn:
    """End the process without unwinding the interpreter: a signal that comes while it does would have its own code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Its reader is gone: a Ctrl-C ends all commands of a pipe.
            continue
    os._exit(code)


def _interrupt(number: int, frame: object) -> None:
    """Have a command interrupted once: `timeout` and terminals send a signal twice, and the second one would interrupt
    what handles the first. One that comes a second later ends the process at once."""
    began = time.monotonic()

    def again(number: int, frame: object) -> None:
        if time.monotonic() - began >= 1:
            os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, again)
    raise KeyboardInterrupt


def _served() -> int:
    """Run a command that is asked to end by signals; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(0))  # There is nothing to remove yet.
    from twinpool.cluster.serve.shutdown_signal import ASKED, EarlyEnd, EndAsked

    try:
        EarlyEnd().install()
        return _parsed_and_run(sys.argv[1:])
    except EndAsked:
        print("stopped while starting")
        return ASKED


def run(args: argparse.Namespace) -> int:
    """Run one parsed command; returns its exit code."""
    from twinpool.cli.admin_client import ClusterNotFound, CommandRefused
    from twinpool.cli.command_line import COMMANDS
    from twinpool.cli.command_parser import NO_CLUSTER, REFUSED, USAGE
    from twinpool.contracts.errors import ConfigError, TwinpoolError

    try:
        return COMMANDS[args.command].run(args)
    except ConfigError as error:
        code = USAGE
        text = str(error)
    except ClusterNotFound as error:
        code, text = NO_CLUSTER, str(error)
    except (CommandRefused, TwinpoolError) as error:
        code, text = REFUSED, str(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"error: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
