"""The controller's process: killed with `kill -9`, stopped, started twice; and what a worker's lease notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.free_ports import free_port
from twinpool.cluster.controller.controller_actions import ControllerAction, StartWorker
from twinpool.cluster.controller.supervisor import ControllerClient
from twinpool.cluster.processes.process_ids import start_time
from twinpool.cluster.worker_process.lease_keeper import LeaseHandlers, LeaseKeeper, longest_absence_s
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.calls import LEASE_QUOTA
from twinpool.contracts.messages.leases import QuotaClaims
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.contracts.wire.controller_turns import NOT_LEADING
from twinpool.contracts.wire.grpc_calls import CallChannel, CallFailed

NAME = WorkerName("decode-0")
WAIT_S = 60.0


class Process:
    """The controller's process, on one port and with one ledger for all of its lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.always: tuple[str, ...] = ()
        """Arguments of each start."""

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start the process and wait until it has said that it listens, or has ended."""
        process, reading = self.begin(*more)
        with os.fdopen(reading, "rb") as said:
            said.read()
        return process

    def begin(self, *more: str) -> tuple[subprocess.Popen[bytes], int]:
        """Start the process; returns the descriptor that tells when it listens."""
        reading, writing = os.pipe()
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "twinpool.cluster.controller.controller_process", "--port", str(self.port)),
                    *("--ledger", str(self.folder / "ledger"), "--ready-fd", str(writing)),
                    *self.always,
                    *more,
                ],
                stderr=log,
                pass_fds=[writing],
            )
        os.close(writing)
        self.processes.append(process)
        return process, reading

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(WAIT_S)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.close()


def started(client: ControllerClient) -> StartWorker:
    """The first start that is ordered."""

    async def wait() -> StartWorker:
        async with asyncio.timeout(WAIT_S):
            while True:
                orders: list[ControllerAction] = client.orders()
                for order in orders:
                    if isinstance(order, StartWorker):
                        return order
                await asyncio.sleep(0.01)

    return asyncio.run(wait())


def test_a_lease_outlives_kill_9_of_the_controller_again_and_again(controller: Process) -> None:
    settings = controller.folder / "settings"
    settings.write_text(json.dumps({"cluster": {"lease_s": WAIT_S}}))  # A busy machine starts it slowly.
    controller.always = ("--config-json", str(settings))
    process = controller.start()
    client = ControllerClient(controller.endpoint, 5.0)
    try:
        client.supervise(lambda: [(NAME, Incarnation(1))])
        client.add(Role.DECODE, 1)
        start = started(client)
        asyncio.run(_renew_through(controller, client, process, start.incarnation))
        (view,) = client.views()
        assert (view.status.state, view.record.incarnation, view.status.pages_free) == ("ready", 1, 60)
        assert not [order for order in client.orders() if isinstance(order, StartWorker)]
    finally:
        client.close()


async def _renew_through(
    controller: Process, client: ControllerClient, process: subprocess.Popen[bytes], incarnation: Incarnation
) -> None:
    """Hold a lease while the controller is killed and started again three times."""
    lost: list[str] = []
    record = WorkerRecord(NAME, Role.DECODE, incarnation, 77, "n", "e", "c", WorkerLimits(8, 8), stream="s")
    status = WorkerStatus(NAME, Role.DECODE, "ready", 77, "n", incarnation, 1, 0, 64, 60)
    keeper = LeaseKeeper(record, controller.endpoint, SystemClock(), 0.05, lambda: status, LeaseHandlers(lost.append))
    await keeper.start(WAIT_S)
    for _ in range(3):
        process.kill()
        process.wait(WAIT_S)
        failures = keeper.failures
        async with asyncio.timeout(WAIT_S):
            while keeper.failures == failures:
                await asyncio.sleep(0.01)
            process = await asyncio.to_thread(controller.start)
            while (await asyncio.to_thread(client.views))[0].status.pages_free != 60:
                await asyncio.sleep(0.01)  # The table that the ledger keeps has nothing of what heartbeats say.
        assert keeper.lease.held
    assert not lost
    await keeper.close()


def test_a_second_controller_on_the_same_port_is_refused(controller: Process) -> None:
    controller.start()
    assert controller.start().wait(WAIT_S) == 1
    assert "cannot bind" in (controller.folder / "log").read_text()


def test_one_whose_lease_ran_out_while_the_disk_was_busy_goes_on(controller: Process) -> None:
    """It grants nothing meanwhile, and nobody else has begun: workers need not end."""
    (controller.folder / "settings").write_text(json.dumps({"cluster": {"leader_lease_s": 1.0}}))
    process = controller.start("--config-json", str(controller.folder / "settings"))
    client = ControllerClient(controller.endpoint, 5.0)
    log = controller.folder / "log"
    try:
        client.add(Role.DECODE, 1)
        with closing(sqlite3.connect(controller.folder / "ledger-lease", isolation_level=None)) as disk:
            disk.execute("BEGIN IMMEDIATE")
            assert asyncio.run(_refused(controller.endpoint, 1.0)) == NOT_LEADING
        client.add(Role.DECODE, 1)
        assert [view.record.name for view in client.views()] == ["decode-0", "decode-1"]
        assert "its lease of the ledger has run out" in log.read_text()
        assert log.read_text().count("controller listens") == 1
        assert process.poll() is None
    finally:
        client.close()


async def _refused(endpoint: str, for_s: float) -> str:
    """Why a controller refuses calls; waits until it has done so for some time."""
    began = None
    async with asyncio.timeout(WAIT_S), CallChannel(endpoint) as channel:
        while True:
            try:
                await channel.call(LEASE_QUOTA, QuotaClaims("r", ()), WAIT_S)
                began = None
            except CallFailed as error:
                began = began or time.monotonic()
                if time.monotonic() - began > for_s:
                    return error.reason
            await asyncio.sleep(0.05)


def replaces(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    return "--replaces", f"{process.pid}:{start_time(process.pid)}"


def test_one_that_replaces_another_ends_it_when_it_has_loaded_all(controller: Process) -> None:
    """It reads its settings last: until then the one before grants leases."""
    old, settings = controller.start(), controller.folder / "settings"
    os.mkfifo(settings)
    client = ControllerClient(controller.endpoint, 5.0)
    try:
        client.supervise(lambda: [(NAME, Incarnation(1))])
        client.add(Role.DECODE, 1)
        start = started(client)
        new, listens = controller.begin("--config-json", str(settings), *replaces(old))
        with settings.open("w") as writing:  # The process has come to read them.
            assert [view.record.name for view in client.views()] == [NAME]
            assert old.poll() is None
            writing.write("{}")
        with os.fdopen(listens, "rb") as said:
            assert said.read() == b"ready\n"
        assert old.wait(WAIT_S) == 0
        assert new.poll() is None
        (view,) = client.views()
        assert (view.record.name, view.record.incarnation) == (NAME, start.incarnation)
    finally:
        client.close()


@pytest.mark.slow
def test_one_that_replaces_two_ends_both(controller: Process) -> None:
    """The second was to replace the first, and never came to it."""
    old, settings = controller.start(), controller.folder / "settings"
    os.mkfifo(settings)
    between, listens = controller.begin("--config-json", str(settings), *replaces(old))
    new = controller.start(*replaces(between), replaces(old)[1])
    assert new.poll() is None
    assert old.wait(WAIT_S) == 0
    assert between.wait(WAIT_S) != 1
    with os.fdopen(listens, "rb") as said:
        assert said.read() == b""


def test_one_that_does_not_end_in_order_is_killed(controller: Process) -> None:
    old = controller.start()
    old.send_signal(signal.SIGSTOP)
    new = controller.start(*replaces(old))
    assert new.poll() is None
    assert old.wait(WAIT_S) == -signal.SIGKILL


def test_one_that_cannot_start_leaves_the_other(controller: Process) -> None:
    old, settings = controller.start(), controller.folder / "settings"
    settings.write_text(json.dumps({"cluster": {"ledger": str(controller.folder)}}))
    process, listens = controller.begin("--config-json", str(settings), "--ledger", "", *replaces(old))
    with os.fdopen(listens, "rb") as said:
        assert said.read() == b""
    assert process.wait(WAIT_S) == 1
    assert "can't keep the controller's table" in (controller.folder / "log").read_text()
    assert old.poll() is None


def test_a_process_that_has_the_same_pid_by_now_is_left_alone(controller: Process) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        began = start_time(other.pid)
        assert began is not None
        assert controller.start("--replaces", f"{other.pid}:{began - 1}").poll() is None
        assert other.poll() is None
        other.kill()


def test_a_port_of_somebody_else_is_not_taken(controller: Process) -> None:
    ended = controller.start()
    began = replaces(ended)
    ended.kill()
    ended.wait(WAIT_S)
    with socket.create_server(("127.0.0.1", controller.port)):
        assert controller.start(*began).wait(WAIT_S) == 1
    assert "cannot bind" in (controller.folder / "log").read_text()


def test_sigterm_ends_it_in_order(controller: Process) -> None:
    process = controller.start()
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0


def test_the_longest_absence_is_less_than_what_a_lease_has_left_after_a_heartbeat() -> None:
    config = ClusterConfig(heartbeat_s=0.5, lease_s=10.0)
    assert longest_absence_s(config) == pytest.approx(10.0 - 1.0 - 2 * 0.5 - 1.0)
    assert longest_absence_s(ClusterConfig(heartbeat_s=1.0, lease_s=2.0)) == 0.0
