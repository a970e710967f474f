"""The controller's process: ``python -m cluster.controller.controller_process --address HOST --port N --ledger FILE``.

It is kept by whoever started it: `twinpool serve`, or an init system. When it is killed and started again with the same
port and ledger, workers, routers and the supervisor come back to it, and nothing else is lost than the history of
deaths. It logs JSON lines to standard error. With ``--ready-fd`` it writes one line to that descriptor once it listens.
Exit codes: 0 after SIGTERM or SIGINT, 1 when something failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from cluster.controller.autoscaler import Autoscaler
from cluster.controller.controller import Controller
from cluster.controller.controller_ledger import SqliteLedger
from cluster.controller.controller_server import ControllerServer
from contracts.clock import Clock, SystemClock
from contracts.cluster_secret import cluster_secret
from contracts.config.load_config import read_config_json
from contracts.errors import TwinpoolError
from contracts.json_logs import log_to_stream

log = logging.getLogger("twinpool.controller")

TICK_S = 0.1
STANDSTILL_S = 2.0
"""Seconds between two ticks from which this process counts as having stood still (a suspended machine, a blocked disk):
meanwhile it heard no heartbeat."""


class ControllerTicks:
    """The passing of time for a controller, by the clock of its process."""

    def __init__(self, core: Controller, server: ControllerServer, clock: Clock) -> None:
        self._core, self._server, self._clock = core, server, clock
        self._last: float | None = None

    def tick(self) -> str:
        """Do one tick; returns why the controller must end, empty while it need not."""
        now = self._clock.now()
        before, self._last = self._last, now
        if before is not None and now - before > STANDSTILL_S:
            log.warning("the controller stood still", extra={"seconds": round(now - before, 1)})
            self._server.call(lambda core: core.stood_still(now - before))
        return self._server.tick()


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cluster.controller.controller_process")
    parser.add_argument("--address", default="127.0.0.1", help="address that workers and routers reach it at")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ledger", type=Path, required=True, help="file that its table outlives it in")
    parser.add_argument("--config-json", type=Path, help="the whole configuration as JSON")
    parser.add_argument("--ready-fd", type=int, help="inherited descriptor that is told when the controller listens")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, ended: threading.Event) -> None:
    """Serve until `ended` is set. Raises `TwinpoolError`, and `OSError` where the port can't be had."""
    config, clock = read_config_json(options.config_json), SystemClock()
    if (certificate := config.security.cluster) is not None:
        certificate.check()
    ledger = SqliteLedger(options.ledger)
    core = Controller(clock, config.cluster, ledger, supervised=False)
    autoscaler = Autoscaler(core, clock, config) if config.autoscaling.enabled else None
    server = ControllerServer(core, options.address, cluster_secret(), certificate, options.port, autoscaler)
    try:
        log.info("controller listens", extra={"endpoint": server.endpoint, "workers": len(core.table.rows)})
        if options.ready_fd is not None:
            os.write(options.ready_fd, b"ready\n")
            os.close(options.ready_fd)
        ticks = ControllerTicks(core, server, clock)
        while not ended.wait(TICK_S):
            if failed := ticks.tick():
                raise TwinpoolError(f"the controller ends: {failed}")
    finally:
        server.close()
        ledger.close()


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    log_to_stream("controller")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        run(options, ended)
    except (TwinpoolError, OSError) as error:
        log.error(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
