"""Several controllers' processes with one ledger: the leader is killed, stopped, cut from its ledger; a worker, a
router and the supervisor go on with the next one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.free_ports import free_port
from tests.support.redis_servers import LedgerServer
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.supervisor import ControllerAway, ControllerClient
from twinpool.cluster.worker_process.grpc_service import AsyncioThread
from twinpool.cluster.worker_process.lease_keeper import LeaseHandlers, LeaseKeeper
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.router.links.controller_directory import ControllerDirectory

NAME, OTHER = WorkerName("decode-0"), WorkerName("decode-1")
LEASE_S, LEADER_S = 60.0, float(os.environ.get("TWINPOOL_LEADER_S", "5"))
SILENCE_S = 6.0
WAIT_S = 60.0


class Site:
    """Two controllers on ports of their own, and a worker, a router and a supervisor that know both."""

    def __init__(self, folder: Path, ledger: str) -> None:
        self.folder = folder
        cluster = {"ledger": ledger, "name": f"c{free_port()}", "leader_lease_s": LEADER_S, "lease_s": LEASE_S}
        (folder / "config.json").write_text(json.dumps({"cluster": cluster}))
        self.ports = [free_port(), free_port()]
        self.processes: list[subprocess.Popen[bytes] | None] = [None, None]
        self.everyone: list[subprocess.Popen[bytes]] = []
        self.lost: list[str] = []
        self.loop = AsyncioThread("site")
        self.client = ControllerClient(self.endpoints, SILENCE_S)
        self.starts: list[StartWorker] = []

    @property
    def endpoints(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int, *more: str) -> subprocess.Popen[bytes]:
        """Start a controller, and wait until it listens or stands by."""
        reading, writing = os.pipe()
        with (self.folder / f"log-{number}").open("ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "twinpool.cluster.controller.controller_process"),
                    *("--port", str(self.ports[number]), "--config-json", str(self.folder / "config.json")),
                    *("--ready-fd", str(writing), *more),
                ],
                stderr=log,
                pass_fds=[writing],
            )
        os.close(writing)
        self.everyone.append(process)
        self.processes[number] = process
        with os.fdopen(reading, "rb") as said:
            assert said.read() == b"ready\n", self.log(number)
        return process

    def log(self, number: int) -> str:
        return (self.folder / f"log-{number}").read_text()

    def until(self, ask: Callable[[], Any], what: str = "it") -> Any:
        """The first true answer."""
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.02)):
            self.starts += [order for order in self.client.orders() if isinstance(order, StartWorker)]
            if answer := ask():
                return answer
            pause.wait(0.02)
        raise AssertionError(f"{what} did not come: {self.log(0)}{self.log(1)}")

    def serve(self) -> None:
        """Have a worker with a lease that renews, and a router that watches."""
        self.client.supervise(lambda: [(start.name, start.incarnation) for start in self.starts])
        self.client.add(Role.DECODE, 1)
        self.until(lambda: self.starts)
        record = WorkerRecord(NAME, Role.DECODE, Incarnation(1), 77, "n", "e", "c", WorkerLimits(8, 8), stream="s")
        status = WorkerStatus(NAME, Role.DECODE, "ready", 77, "n", Incarnation(1), 1, 0, 64, 60)
        self.keeper = LeaseKeeper(
            record, self.endpoints, SystemClock(), 0.1, lambda: status, LeaseHandlers(self.lost.append)
        )
        self.loop.run(self.keeper.start(WAIT_S), WAIT_S)
        self.directory = ControllerDirectory(self.endpoints, SILENCE_S)

        async def watch() -> None:
            self.directory.watch(lambda views: None)

        self.loop.run(watch(), WAIT_S)

    def leads(self, number: int, term: int) -> bool:
        """Whether a router says so, and the leader has heard the worker since it leads."""
        plane = self.directory.control_plane()
        if plane is None or plane.away or (plane.leader, plane.term) != (f"127.0.0.1:{self.ports[number]}", term):
            return False
        try:
            return [view.status.pages_free for view in self.client.views() if view.record.name == NAME] == [60]
        except ControllerAway:
            return False

    def starts_another(self) -> StartWorker:
        """Have the leader start a worker: the supervisor is its own by now."""
        before = len(self.starts)
        self.client.add(Role.DECODE, 1)
        self.until(lambda: len(self.starts) > before, "the order")
        return self.starts[-1]

    def close(self) -> None:
        self.client.close()
        self.loop.stop()
        for process in self.everyone:
            process.kill()
            process.wait(WAIT_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LedgerServer]:
    (tmp_path / "server").mkdir()
    server = LedgerServer(tmp_path / "server", "--appendonly", "yes", "--appendfsync", "always").start()
    yield server
    server.close()


@pytest.fixture
def site(server: LedgerServer, tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, server.url)
    yield site
    site.close()


def test_kill_9_of_the_leader_is_survived_by_the_standby_and_then_the_other_way_round(site: Site) -> None:
    first = site.start(0)
    second = site.start(1, "--standby")
    site.serve()
    site.until(lambda: site.leads(0, 1), "the first leader")
    first.kill()
    first.wait(WAIT_S)
    began = time.monotonic()
    site.until(lambda: site.leads(1, 2), "the second leader")
    took_s = time.monotonic() - began
    print(f"a standby led, and had heard the worker, {took_s:.2f} s after kill -9 (leader_lease_s {LEADER_S:g})")
    assert site.starts_another().name == OTHER
    site.start(0)
    site.until(lambda: (plane := site.directory.control_plane()) and plane.standbys == (site.endpoints.split(",")[0],))
    assert second.poll() is None, "who comes back takes nothing over"
    second.send_signal(signal.SIGTERM)
    assert second.wait(WAIT_S) == 0
    began = time.monotonic()
    site.until(lambda: site.leads(0, 3), "the third leader")
    assert site.keeper.lease.held
    assert not site.lost
    assert {start.incarnation for start in site.starts} == {1}, "no worker was started anew"


def test_a_stopped_leader_that_goes_on_grants_nothing_and_ends(site: Site) -> None:
    first = site.start(0)
    site.start(1, "--standby")
    site.serve()
    site.until(lambda: site.leads(0, 1), "the first leader")
    first.send_signal(signal.SIGSTOP)
    site.until(lambda: site.leads(1, 2), "the second leader")
    first.send_signal(signal.SIGCONT)
    assert first.wait(WAIT_S) == 1
    assert "another controller keeps its table" in site.log(0)
    assert site.starts_another().name == OTHER
    assert {start.incarnation for start in site.starts} == {1}, "no worker was started anew"
    assert not site.lost


def test_a_ledger_server_that_goes_away_and_comes_back_costs_no_worker_its_lease(
    site: Site, server: LedgerServer
) -> None:
    site.start(0)
    site.serve()
    site.until(lambda: site.leads(0, 1), "the leader")
    server.kill()
    site.until(lambda: "grants nothing" in site.log(0), "the leader's end")
    site.until(lambda: "waits for its ledger" in site.log(0), "its waiting")
    with pytest.raises(ControllerAway):
        site.client.shut_down()
    server.start()
    site.until(lambda: site.leads(0, 2), "the leader again")
    assert not site.lost
    assert site.starts_another().name == OTHER


def test_the_table_of_a_cluster_that_ended_in_order_is_not_left_on_the_server(site: Site, server: LedgerServer) -> None:
    first = site.start(0)
    site.serve()
    assert server.client.keys("twinpool-ledger:*")
    site.client.shut_down()
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 0
    assert not server.client.keys("twinpool-ledger:*")


def test_who_took_over_what_an_ended_cluster_left_leaves_nothing_on_the_server(
    site: Site, server: LedgerServer
) -> None:
    first = site.start(0)
    site.start(1)
    site.serve()
    site.client.shut_down()
    first.send_signal(signal.SIGTERM)
    assert first.wait(WAIT_S) == 0
    site.until(lambda: "this controller leads" in site.log(1), "the next leader")
    site.everyone[1].send_signal(signal.SIGTERM)
    assert site.everyone[1].wait(WAIT_S) == 0
    assert not server.client.keys("twinpool-ledger:*")


def test_a_password_on_the_command_line_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "twinpool.cluster.controller.controller_process", "--port", str(free_port())]
    ended = subprocess.run(
        [*command, "--ledger", "redis://:geheim@127.0.0.1:1/0"],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "read by every user" in ended.stderr
    assert "geheim" not in ended.stderr
