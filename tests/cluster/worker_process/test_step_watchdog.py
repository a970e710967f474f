"""A worker that hangs loses its lease; one that is only slow, waits for others or compiles does not."""

from __future__ import annotations

import threading

import pytest

from tests.cluster.fake_worker import FakeWorker, submit
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import KillWorker, StartWorker
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.worker_process.worker_thread import StepWatchdog, WorkerThread, allowed_s
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.transfer.net.fault_injection import hang_at

NAME = WorkerName("decode-0")
CONFIG = ClusterConfig(heartbeat_s=1.0, lease_s=10.0, start_timeout_s=120.0, stall_s=30.0)


def status(stalled_s: float, steps: int = 5, longest_s: float = 0.0) -> WorkerStatus:
    return WorkerStatus(
        NAME, Role.DECODE, "ready", 7, "n", Incarnation(1), 1, 0, 64, 60, steps,
        stalled_s=stalled_s, longest_step_s=longest_s,
    )  # fmt: skip


def cluster() -> Controller:
    core = Controller(ManualClock(), CONFIG, MemoryLedger())
    core.pools.add(NAME, Role.DECODE)
    core.tick()
    core.register(WorkerRecord(NAME, Role.DECODE, Incarnation(1), 7, "n", "", "", WorkerLimits(1, 1)))
    return core


def test_c4_a_worker_that_renews_but_makes_no_progress_is_fenced_killed_and_replaced() -> None:
    core = cluster()
    assert not core.renew(NAME, Incarnation(1), status(29.0)).fenced
    assert core.tick() == []
    assert core.renew(NAME, Incarnation(1), status(30.0)).fenced
    kill, report, start = core.tick()
    assert isinstance(kill, KillWorker)
    assert "hung" in report.text  # type: ignore[union-attr]
    assert start == StartWorker(NAME, Role.DECODE, Incarnation(2))
    assert core.renew(NAME, Incarnation(1), status(0.0)).fenced, "there is no way back"


def test_long_steps_and_the_first_step_are_allowed_their_time() -> None:
    assert allowed_s(status(0.0), CONFIG) == 30.0
    assert allowed_s(status(0.0, longest_s=20.0), CONFIG) == 80.0
    assert allowed_s(status(0.0, steps=0), CONFIG) == 120.0
    core = cluster()
    assert not core.renew(NAME, Incarnation(1), status(119.0, steps=0)).fenced
    assert not core.renew(NAME, Incarnation(1), status(79.0, longest_s=20.0)).fenced


def test_a_loop_that_waits_for_others_makes_progress_and_one_that_could_compute_does_not() -> None:
    clock = ManualClock()
    watchdog = StepWatchdog(clock)
    for _ in range(100):
        clock.advance(1.0)
        watchdog.turned(3, runnable=False, took_s=0.0)
    assert watchdog.stalled_s == 0.0
    for _ in range(100):
        clock.advance(1.0)
        watchdog.turned(3, runnable=True, took_s=0.0)
    assert watchdog.stalled_s == 100.0
    watchdog.turned(4, runnable=True, took_s=0.5)
    assert watchdog.stalled_s == 0.0


def test_the_longest_step_is_remembered_and_forgotten() -> None:
    clock = ManualClock()
    watchdog = StepWatchdog(clock)
    watchdog.turned(1, runnable=True, took_s=40.0)
    for runnable in (True, False) * 200:
        watchdog.turned(1, runnable=runnable, took_s=0.0)
    assert watchdog.on(status(0.0)).longest_step_s == 40.0, "rounds without a step forget none"
    for steps in range(2, 400):
        watchdog.turned(steps, runnable=True, took_s=0.1)
    assert watchdog.on(status(0.0)).longest_step_s == 0.0


def test_a_hung_step_shows_in_the_heartbeat_while_the_rest_of_the_status_stands_still() -> None:
    clock, inside, go_on = ManualClock(), threading.Event(), threading.Event()

    def hang(steps: int) -> None:
        if steps >= 2:
            inside.set()
            go_on.wait(60)

    host = WorkerThread(FakeWorker(), clock=clock, before_step=hang, idle_s=0.01)
    host.start()
    try:
        host.send(host.open_session(lambda events: None), [submit("a", 9)])
        assert inside.wait(60)
        clock.advance(45.0)
        beat = host.heartbeat()
        assert (beat.stalled_s, beat.steps, beat.running) == (45.0, 2, 1)
    finally:
        go_on.set()
        assert host.stop(10)


def test_a_rehearsed_hang_names_a_worker_and_a_step_of_its_first_start() -> None:
    assert hang_at("decode-0:20, prefill-1:3", WorkerName("prefill-1"), Incarnation(1)) == 3
    assert hang_at("decode-0:20", NAME, Incarnation(2)) is None
    assert hang_at("", NAME, Incarnation(1)) is None
    for wrong in ("decode-0", "decode-0:x", ":4", "decode-0:0"):
        with pytest.raises(ConfigError, match="WORKER:STEP"):
            hang_at(wrong, NAME, Incarnation(1))
