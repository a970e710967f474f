"""Whom `twinpool demo --chaos` strikes: those that run requests, and nobody whom a pool can't spare."""

from __future__ import annotations

import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.router_stub import RouterStub, router_stub, row
from twinpool.cli.admin_client import AdminClient
from twinpool.cli.load.demo_command import LOOKS, DemoStrikes

HERE = socket.gethostname()


@pytest.fixture
def stub() -> Iterator[RouterStub]:
    with router_stub() as running:
        yield running


def table(*running: int, prefill: int = 2) -> list[dict[str, Any]]:
    """Decode workers that run so many requests each, and idle prefill workers."""
    decode = [row(f"decode-{i}", running=count, node=HERE, pid=100 + i) for i, count in enumerate(running)]
    return [row(f"prefill-{i}", node=HERE, pid=200 + i) for i in range(prefill)] + decode


class Scene:
    """Strikes against the stub, and whom they killed."""

    def __init__(self, stub: RouterStub, seed: int = 0) -> None:
        self.killed: list[tuple[int, int]] = []
        self.pauses: list[float] = []
        operator = AdminClient(stub.url)
        kill = lambda pid, number: self.killed.append((pid, number))  # noqa: E731
        self.strikes = DemoStrikes(operator, random.Random(seed), kill, self.pauses.append)


def test_a_worker_that_runs_nothing_is_not_struck_while_another_runs_something(stub: RouterStub) -> None:
    stub.tables = [table(0, 0, 1, 0)]
    for seed in range(12):
        scene = Scene(stub, seed)
        assert scene.strikes.strike() == "decode-2 was killed (SIGKILL) while it ran 1 requests"
        assert scene.killed == [(102, signal.SIGKILL)]
        assert scene.pauses == []


def test_who_runs_more_is_struck_more_often(stub: RouterStub) -> None:
    stub.tables = [table(1, 9)]
    struck = Counter(Scene(stub, seed).strikes.strike().partition(" ")[0] for seed in range(60))
    assert struck["decode-1"] > 3 * struck["decode-0"] > 0


def test_where_all_idle_they_are_looked_at_until_one_runs_something(stub: RouterStub) -> None:
    stub.tables = [table(0, 0), table(0, 0), table(0, 0), table(3, 0)]
    scene = Scene(stub)
    assert scene.strikes.strike() == "decode-0 was killed (SIGKILL) while it ran 3 requests"
    assert len(scene.pauses) == 3


def test_one_that_idles_is_struck_in_the_end_where_nobody_ever_runs_anything(stub: RouterStub) -> None:
    stub.tables = [table(0, 0)]
    scene = Scene(stub)
    assert scene.strikes.strike().endswith("while it ran 0 requests")
    assert len(scene.pauses) == LOOKS - 1


def test_the_last_worker_that_serves_is_left_alone_also_where_the_others_died_meanwhile(stub: RouterStub) -> None:
    stub.tables = [table(5)]
    assert Scene(stub).strikes.strike() == ""
    died = table(0, 7)
    died[2]["state"] = "dead"
    stub.tables = [table(0, 0), died]
    scene = Scene(stub)
    assert scene.strikes.strike() == ""
    assert scene.killed == []


def test_drains_and_changes_of_pools_prefer_those_that_run_something(stub: RouterStub) -> None:
    stub.tables = [table(0, 2, 0)]
    scene = Scene(stub, 5)
    for _ in range(6):
        scene.strikes.strike()
    orders = [path for method, path in stub.calls if method == "POST"]
    assert orders[:2] == ["/cluster/restart/decode-1", "/cluster/role/decode-1?role=prefill"]


def test_who_has_left_is_not_waited_for_and_who_is_to_come_back_is(stub: RouterStub) -> None:
    """A worker that left in order, when its pool became smaller, stays in the table."""
    stub.tables = [[*table(2, 2), row("decode-2", "left", node=HERE, pid=102)]]
    scene = Scene(stub)
    assert scene.strikes.strike().endswith("was killed (SIGKILL) while it ran 2 requests")
    for state in ("starting", "draining", "dead"):
        stub.tables = [[*table(2, 2), row("decode-2", state, node=HERE, pid=102)]]
        assert scene.strikes.strike() == "", state
    assert len(scene.killed) == scene.strikes.done == 1
