"""What a worker reports of itself, and that it takes every command."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.decode_parts import SESSION, DecodeParts
from tests.wire.test_every_field import COMMANDS
from tests.workers.test_any_state import hash_pair
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.damage import PREFIX, DamageSite
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.router_commands import Command
from twinpool.worker.worker_loop import WorkerReport, WorkerSetup


class Part:
    """A part that counts, has something to do, finds something wrong and holds allocations."""

    def __init__(self, counters: Mapping[str, float] = {}, due: float | None = None, allocations: int = 0) -> None:
        self.counters, self.next_deadline, self.allocations = counters, due, allocations

    def check(self) -> list[str]:
        return ["something"]


def report_of(parts: DecodeParts) -> WorkerReport:
    sender = SimpleNamespace(rooms=2, plane="shm", next_deadline=None, check=lambda: [])
    setup: Any = SimpleNamespace(
        name=WorkerName("decode-0"),
        incarnation=Incarnation(3),
        manager=parts.manager,
        sender=sender,
        adapters=None,
    )
    return WorkerReport(cast(WorkerSetup, setup), Role.DECODE, parts.requests, parts.fitness)


def test_a_status_counts_whoever_does_not_run_as_waiting() -> None:
    parts = DecodeParts()
    parts.ask("a")
    parts.ask("b")
    parts.fitness.nonfinite()
    report = report_of(parts)
    report.counted += (Part({"ours": 7.0, "mine": 1.0}), Part({"ours": 2.0}))
    status = report.status(running=1, steps=5)
    assert (status.running, status.waiting, status.steps, status.outgoing, status.incarnation) == (1, 1, 5, 2, 3)
    assert (status.pages_total, status.pages_free) == (31, 31), "the null page is nobody's"
    assert (status.counters["ours"], status.counters["mine"]) == (9.0, 1.0)
    assert status.counters[f"{PREFIX}{DamageSite.LOGITS}"] == 1
    assert status.counters.keys() >= parts.manager.stats().keys()
    assert (status.state, status.plane) == ("ready", "shm")
    parts.requests.draining = True
    assert report.status(running=1, steps=5).state == "draining"


def test_a_check_compares_allocations_with_those_that_the_manager_knows() -> None:
    parts = DecodeParts()
    (request,) = parts.run("a")
    report = report_of(parts)
    assert report.check([], rooms=0).violations == ()
    report.holding.append(Part(allocations=1))
    report.recounted.append(Part())
    found = report.check(["else"], rooms=3, slots=4)
    assert found.violations == ("else", "something", "1 allocations, requests hold 2")
    assert (found.rooms, found.slots, found.leases) == (3, 4, parts.manager.pools.allocators["full"].leases)
    parts.leave(request)


def test_a_worker_sleeps_until_the_first_of_its_parts_has_something_to_do() -> None:
    report, clock = report_of(DecodeParts()), ManualClock(100.0)
    assert report.next_due(clock) == 3600.0
    report.timed += (Part(due=104.0), Part(), Part(due=102.0))
    assert report.next_due(clock) == 2.0
    clock.advance(10.0)
    assert report.next_due(clock) == 0.0


@pytest.mark.parametrize("role", list(Role)[:2])
def test_a_worker_takes_every_command(role: Role) -> None:
    with hash_pair("full", dict.fromkeys(Role, 8)) as both:
        worker = both.prefill if role is Role.PREFILL else both.decode
        for command in cast(list[Command], COMMANDS):
            worker.handle(SESSION, command)
            worker.step()
        worker.drop_session(SESSION)
