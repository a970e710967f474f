"""What a worker reports of itself, and that it takes every command."""

from __future__ import annotations

from typing import get_args

from tests.support.decode_parts import DecodeParts
from tests.workers.test_any_state import hash_pair
from twinpool.contracts.damage import PREFIX, DamageSite
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.kept_answers import Detach
from twinpool.contracts.messages.router_commands import Audit, Cancel, Command, Submit
from twinpool.worker.worker_loop import WorkerReport


def test_a_status_counts_whoever_does_not_run_as_waiting() -> None:
    parts = DecodeParts()
    parts.ask("a")
    parts.ask("b")
    parts.fitness.nonfinite()
    report = WorkerReport(
        WorkerName("decode-0"), Role.DECODE, Incarnation(3), parts.requests, parts.fitness, parts.manager, "shm"
    )
    status = report.status(running=1, steps=5, outgoing=2, counters={"ours": 7.0})
    assert (status.running, status.waiting, status.steps, status.outgoing, status.incarnation) == (1, 1, 5, 2, 3)
    assert (status.pages_total, status.pages_free) == (31, 31), "the null page is nobody's"
    assert (status.counters["ours"], status.counters[f"{PREFIX}{DamageSite.LOGITS}"]) == (7.0, 1)
    assert status.counters.keys() >= parts.manager.stats().keys()
    assert (status.state, status.plane) == ("ready", "shm")
    parts.requests.draining = True
    assert report.status(running=1, steps=5, outgoing=2, counters={}).state == "draining"


def test_a_check_compares_allocations_with_those_that_the_manager_knows() -> None:
    parts = DecodeParts()
    (request,) = parts.run("a")
    report = WorkerReport(
        WorkerName("decode-0"), Role.DECODE, Incarnation(1), parts.requests, parts.fitness, parts.manager, "shm"
    )
    assert report.check([], 1, rooms=0).violations == ()
    found = report.check(["something"], 2, rooms=3, slots=4)
    assert found.violations == ("something", "1 allocations, requests hold 2")
    assert (found.rooms, found.slots, found.leases) == (3, 4, parts.manager.pools.allocators["full"].leases)
    parts.leave(request)


def test_a_decode_worker_has_a_part_for_every_command() -> None:
    with hash_pair("full", dict.fromkeys(Role, 8)) as both:
        assert set(both.decode._commands) | {Submit, Cancel, Detach, Audit} == set(get_args(Command))
