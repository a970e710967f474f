"""The controller's process, and its gRPC server with an event loop and a thread of its own.

``python -m twinpool.cluster.controller.controller_process --address HOST --port N --ledger PLACE``

It is kept by whoever started it: `twinpool serve`, or an init system (`twinpool controller`). When it is killed and
started again with the same port and ledger, workers, routers and the supervisor come back to it, and nothing else is
lost than the history of deaths. Of several controllers with one ledger one leads, and listens; the others stand by
(`cluster.controller.leadership`). It logs JSON lines to standard error. With ``--ready-fd`` it writes one line to that
descriptor once it listens, or stands by. With ``--replaces PID:STARTED ...`` it ends these controllers once it has
loaded all that it needs, and takes their port: nobody grants leases for some tenths of a second only.

Exit codes: 0 after SIGTERM or SIGINT, 1 when something failed or another controller has replaced it, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import uvloop

from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_service import ControllerService
from twinpool.cluster.controller.controller_streams import LeaseStreams
from twinpool.cluster.controller.leadership import Leadership, LeasedLedger
from twinpool.cluster.controller.open_ledger import open_ledger
from twinpool.cluster.processes.priority import LEASES, set_niceness
from twinpool.cluster.processes.process_ids import kill_process, same_process
from twinpool.cluster.worker_process.grpc_service import AsyncioThread, ServiceServer
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.cluster_secret import cluster_secret
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.ledger_place import on_server, without_password
from twinpool.contracts.config.load_config import read_config_json
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.json_logs import log_to_stream
from twinpool.contracts.signal_listener import ServiceManager, SignalListener
from twinpool.contracts.wire.controller_turns import NOT_LEADING
from twinpool.contracts.wire.grpc_calls import Admit, CallRefused, IncomingCall
from twinpool.contracts.wire.socket_acceptor import listening

T = TypeVar("T")
CALL_TIMEOUT_S = 10.0


def admit_while(leads: Callable[[], bool]) -> Admit:
    """Refuse all calls as UNAVAILABLE while this controller doesn't lead: callers then try the next one."""

    def admit(call: IncomingCall) -> None:
        if not leads():
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, NOT_LEADING)

    return admit


class ControllerServer:
    """The gRPC server of a controller, with its event loop and thread; `endpoint` is its ``host:port``."""

    def __init__(
        self,
        core: Controller,
        address: str = "127.0.0.1",
        secret: str = "",
        certificate: CertificateFiles | None = None,
        port: int = 0,
        autoscaler: Autoscaler | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """Serve on `port` of `address`, 0 for a free one; with a `secret`, calls must carry its token, and with this
        node's `certificate` come from nodes of the cluster. While it doesn't lead (`leads`) nobody is answered, and
        nothing is decided. Raises `OSError`."""
        self._core = core
        self._loop = AsyncioThread("controller", uvloop.new_event_loop)
        self._service = ControllerService(core, autoscaler, leads)
        self._server = ServiceServer(
            self._loop, f"{address}:{port}", secret, certificate=certificate, admit=[admit_while(leads)]
        )
        self._streams = LeaseStreams(self._service.renewal, secret, certificate)
        try:
            streams = self._loop.run(self._streams.start(address), CALL_TIMEOUT_S)
            self._service.stream = f"{address}:{streams}"
            port = self._server.start(self._service.handlers())
        except BaseException:
            self._loop.stop()
            raise
        self.endpoint = f"{address}:{port}"

    def call(self, run: Callable[[Controller], T]) -> T:
        """Run `run(core)` on the controller's loop and return its result. Any thread but the loop's.

        Raises what `run` raises, and `TimeoutError` after `CALL_TIMEOUT_S`.
        """

        async def on_loop() -> T:
            return run(self._core)

        return self._loop.run(on_loop(), CALL_TIMEOUT_S)

    def tick(self) -> str:
        """Let the controller take the time and its supervisor have its orders; returns why the controller must end,
        which is that its ledger has failed, else nothing. Any thread but the loop's."""

        async def on_loop() -> str:
            self._service.tick()
            return self._core.table.failed

        return self._loop.run(on_loop(), CALL_TIMEOUT_S)

    def tell(self, leader: str, term: int, standbys: tuple[str, ...]) -> None:
        """Have routers told who leads the controllers and who stands by. Any thread but the loop's."""

        async def on_loop() -> None:
            self._service.tell(leader, term, standbys)

        self._loop.run(on_loop(), CALL_TIMEOUT_S)

    def close(self) -> None:
        """End the server. Idempotent."""
        if self._loop.loop.is_closed():
            return
        self._server.stop(0.1)
        self._loop.run(self._streams.stop(), CALL_TIMEOUT_S)
        self._loop.stop()


log = logging.getLogger("twinpool.controller")

TICK_S = 0.1
STOP_S = 1.5
"""Seconds that a controller which is replaced has to end in order."""
PORT_S = 0.01
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


@dataclass(frozen=True)
class ControllerPlace:
    """Where a controller listens and keeps its table."""

    address: str
    port: int
    ledger: str = ""
    """A path or a server's URL; empty: `cluster.ledger`."""
    standby: bool = False
    """Whether it waits also where no controller has led yet."""
    ready_fd: int | None = None
    replaces: tuple[tuple[int, int], ...] = ()
    """Pid and start time of the controllers that have this place still, or are about to take it."""

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"


class ControllerProcess:
    """One controller, from its start to its end: it waits until it may lead, and serves while it leads."""

    def __init__(self, config: Config, place: ControllerPlace, ended: threading.Event) -> None:
        """`ended` is set to end it. Raises `ConfigError`, and `OSError` where the port can't be had: nobody's ledger is
        taken over by who can't serve."""
        if (certificate := config.security.cluster) is not None:
            certificate.check()
        self._config, self._place, self._ended = config, place, ended
        self._ready_fd = place.ready_fd
        self._manager, self._does = ServiceManager.adopt(), ""
        self._told: tuple[str, int, tuple[str, ...]] | None = None
        self._idle = ""
        """Why it grants nothing now."""
        self._clock = SystemClock()
        ledger = place.ledger or config.cluster.ledger
        if not ledger:
            raise ConfigError("a controller needs a ledger: set cluster.ledger, or give --ledger")
        if not place.replaces:
            _check_port(place.address, place.port)
        self._ledger: LeasedLedger = open_ledger(
            ledger, config.cluster.name, config.cluster.ledger_replicas, security=config.security
        )
        self._check_ledger()
        if place.replaces:
            _take_port(place.address, place.port, place.replaces)
        lease_s = config.cluster.leader_lease_s
        self._leadership = Leadership(
            self._ledger, self._clock, place.endpoint, os.uname().nodename, lease_s, first=not place.standby
        )

    def _check_ledger(self) -> None:
        """Refuse a ledger that will never do, by its certificates, its password or what it is; one that isn't there yet
        is waited for. Raises `ConfigError`."""
        try:
            self._ledger.check()
        except OSError as error:
            log.warning("%s; it is waited for", error)
        except ConfigError:
            self._ledger.close()
            raise

    def run(self) -> None:
        """Wait and lead in turn until told to end. Raises `TwinpoolError` where another controller has taken over, and
        `OSError` where the port can't be had any more."""
        try:
            while not self._ended.is_set():
                if self._leadership.take():
                    self._lead()
                else:
                    self._ready("stands by")
                    self._ended.wait(self._leadership.pause_s)
        finally:
            self._manager.stopping()
            self._ledger.close()

    def _lead(self) -> None:
        """Serve until told to end.

        When its lease of the ledger has run out this controller grants and decides nothing. It goes on where the lease
        is renewed soon, for then nobody else has begun: a disk may be busy for some seconds. Otherwise, and where
        something could not be written, it lets everybody know by its end, and begins anew with what the ledger holds.
        """
        self._told = None
        config, core = self._config, Controller(self._clock, self._config.cluster, self._ledger, supervised=False)
        autoscaler = Autoscaler(core, self._clock, config) if config.autoscaling.enabled else None
        place, certificate = self._place, config.security.cluster
        leads = lambda: self._leadership.held  # noqa: E731
        server = ControllerServer(
            core, place.address, cluster_secret(), certificate, place.port, autoscaler, leads=leads
        )
        try:
            log.info("controller listens", extra={"endpoint": server.endpoint, "workers": len(core.table.rows)})
            self._say_losses()
            self._ready("leads")
            ticks = ControllerTicks(core, server, self._clock)
            while not self._ended.wait(TICK_S):
                self._leadership.renew()
                if not self._leadership.held:
                    self._grants_nothing("its lease of the ledger has run out")
                    if self._leadership.lapsed_s > config.cluster.leader_lease_s:
                        return
                    continue
                if failed := ticks.tick():
                    self._leadership.renew(now=True)  # Where another controller has begun, this one ends.
                    self._grants_nothing(failed)
                    return
                self._idle = ""
                self._tell(server)
        finally:
            server.close()
        self._leave(core)

    def _grants_nothing(self, why: str) -> None:
        if why != self._idle:
            log.error("the controller grants nothing: %s", why)
        self._idle = why

    def _leave(self, core: Controller) -> None:
        """Give the ledger up, and with it the table of a cluster that has ended in order: that may have been by another
        leader, so that this one took an empty table over."""
        try:
            if core.shutting_down or not core.table.rows:
                self._ledger.forget()
        except OSError as error:
            log.warning("the table of the ended cluster is left behind: %s", error)
        self._leadership.resign()

    def _tell(self, server: ControllerServer) -> None:
        """Have routers told who leads and who stands by, where that has changed."""
        leader = self._leadership.leader
        if leader is not None:
            told = leader.endpoint, leader.term, self._leadership.standbys
            if told != self._told:
                server.tell(*told)
            self._told = told

    def _say_losses(self) -> None:
        try:
            for line in self._ledger.check():
                log.warning(line)
        except OSError as error:
            log.warning(str(error))

    def _ready(self, what: str) -> None:
        """Tell who keeps this process that it is ready, and whenever it does something else than before."""
        if what != self._does:
            self._does = what
            self._manager.ready(f"{what} at {self._place.endpoint}")
        fd, self._ready_fd = self._ready_fd, None
        if fd is not None:
            os.write(fd, b"ready\n")
            os.close(fd)


def _check_port(address: str, port: int) -> None:
    """Check that this process could listen. Raises `OSError`."""
    try:
        listening(address, port, backlog=1).close()
    except OSError as error:
        raise OSError(f"cannot bind {address}:{port}: {error.strerror or error}") from None


def _take_port(address: str, port: int, holders: Sequence[tuple[int, int]]) -> None:
    """End the processes that have the port, within `STOP_S` in order and by a kill from then on. Raises `OSError` where
    this one can't listen even so."""
    for pid, started in holders:
        if same_process(pid, started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    began, pause = time.monotonic(), threading.Event()
    while True:
        try:
            return _check_port(address, port)
        except OSError:
            waited_s = time.monotonic() - began
            if waited_s > STOP_S:
                for pid, started in holders:
                    kill_process(pid, started)
            if waited_s > 2 * STOP_S:
                raise
        pause.wait(PORT_S)


def _process(said: str) -> tuple[int, int]:
    """`PID:STARTED`, as `process_ids.start_time` says it."""
    pid, started = said.split(":")
    return int(pid), int(started)


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="twinpool.cluster.controller.controller_process")
    parser.add_argument("--address", default="127.0.0.1", help="address that workers and routers reach it at")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ledger", default="", help="where its table outlives it: a file; without, cluster.ledger")
    parser.add_argument("--standby", action="store_true", help="wait also while no controller has led yet")
    parser.add_argument("--config-json", type=Path, help="the whole configuration as JSON")
    parser.add_argument(
        "--replaces",
        type=_process,
        nargs="+",
        default=(),
        metavar="PID:STARTED",
        help="the controllers that are ended once this one has loaded",
    )
    parser.add_argument("--ready-fd", type=int, help="inherited descriptor that is told when the controller listens")
    return parser.parse_args(arguments)


def keep_controller(config: Config, place: ControllerPlace) -> int:
    """Be a controller until SIGTERM, SIGINT or a failure; returns the exit code. Errors are logged, not raised."""
    log_to_stream("controller")
    raised = set_niceness(LEASES)  # Its threads begin with it.
    log.info("its priority is raised" if raised else "its priority can't be raised: that takes CAP_SYS_NICE")
    ended = threading.Event()
    SignalListener((signal.SIGINT, signal.SIGTERM), lambda number: ended.set()).listen()
    try:
        ControllerProcess(config, place, ended).run()
    except (TwinpoolError, OSError) as error:
        log.error("the controller ends: %s", error)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    try:
        config = read_config_json(options.config_json)
        if on_server(options.ledger) and without_password(options.ledger) != options.ledger:
            raise ConfigError("--ledger is read by every user of the machine: set cluster.ledger in a file instead")
    except TwinpoolError as error:
        log_to_stream("controller")
        log.error("the controller ends: %s", error)
        return 1
    place = ControllerPlace(
        options.address, options.port, options.ledger, options.standby, options.ready_fd, tuple(options.replaces)
    )
    return keep_controller(config, place)


if __name__ == "__main__":
    sys.exit(main())
