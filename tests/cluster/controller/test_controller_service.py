"""The controller's service by itself: which watcher is told what, what older routers get, and what holds the
autoscaler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.controller_service import MAX_CHANGES, ControllerService
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.cluster_view import ClusterView, WatchRequest
from twinpool.contracts.messages.leases import Renewal
from twinpool.contracts.messages.pool_changes import (
    AddWorkers,
    ChangedWorkers,
    CordonNode,
    DrainWorkers,
    LoadAdapter,
    OperatorChange,
    RestartWorker,
    ScalePools,
    SetRole,
    UncordonNode,
    UndrainWorkers,
    UnloadAdapter,
)
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus
from twinpool.contracts.sampling_params import AdapterRef
from twinpool.contracts.wire.controller_turns import NOT_LEADING
from twinpool.contracts.wire.grpc_calls import CallRefused

NAMES = [WorkerName(f"{role}-{number}") for role in ("decode", "prefill") for number in range(2)]
ONE = Incarnation(1)


class Site:
    """A controller with two workers in each pool, and its service, on the test's loop."""

    def __init__(self) -> None:
        self.clock, self.leads = ManualClock(100.0), True
        self.core = Controller(self.clock, Config().cluster, MemoryLedger())
        self.autoscaler = Autoscaler(self.core, self.clock, Config())
        for name in NAMES:
            self.core.pools.add(name, Role(name.partition("-")[0]))
        starts = [action for action in self.core.tick() if isinstance(action, StartWorker)]
        for start in starts:
            record = WorkerRecord(start.name, start.role, ONE, 7, "n", "e", "c", WorkerLimits(8, 8))
            assert not self.core.register(record).fenced
        self.service: Any = ControllerService(self.core, self.autoscaler, lambda: self.leads)

    def heartbeat(self, name: WorkerName, running: int) -> None:
        role = self.core.table.rows[name].role
        self.core.renew(name, ONE, WorkerStatus(name, role, "ready", 7, "n", ONE, running, 0, 8, 8))

    async def watch(self, **options: bool) -> AsyncGenerator[ClusterView]:
        """A watcher that has got its first table."""
        stream: AsyncGenerator[ClusterView] = self.service.watch(WatchRequest(**options))
        first = await anext(stream)
        assert [view.record.name for view in first.workers] == NAMES
        assert not first.changes
        return stream

    def ask_routers(self, number: int, request_id: str) -> int:
        """Have routers asked for a request; returns how many were."""
        asked: int = self.service._ask_routers(number, request_id)
        return asked

    def publish(self) -> None:
        """Have what has changed published now."""
        if self.service._publishing is not None:
            self.service._publishing.cancel()
        self.service._publish()


def on_loop(life: Callable[[Site], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(asyncio.ensure_future(life(Site())), 60)

    asyncio.run(whole())


def told(view: ClusterView) -> tuple[bool, list[str], dict[str, int]]:
    """Whether these are changes, the rows that came whole, and the numbers that came alone."""
    return view.changes, [one.record.name for one in view.workers], {s.name: s.running for s in view.statuses}


def test_watchers_get_what_has_changed_and_one_of_an_older_build_the_whole_table_each_time() -> None:
    async def life(site: Site) -> None:
        newer, older = await site.watch(changes=True), await site.watch()
        site.heartbeat(NAMES[1], running=5)
        site.publish()
        assert told(await anext(newer)) == (True, NAMES, {}), "all of it once, since nothing was published before"
        assert told(await anext(older))[:2] == (False, NAMES)
        site.heartbeat(NAMES[1], running=6)
        site.heartbeat(NAMES[2], running=7)
        site.core.pools.drain(NAMES[0])
        site.publish()
        assert told(await anext(newer)) == (True, [NAMES[0]], {NAMES[1]: 6, NAMES[2]: 7})
        whole = await anext(older)
        assert told(whole) == (False, NAMES, {})
        assert [one.status.running for one in whole.workers] == [0, 6, 7, 0]

    on_loop(life)


def test_watchers_are_told_of_adapters_when_they_change_and_when_the_last_one_goes() -> None:
    async def life(site: Site) -> None:
        one, told = AdapterRef("a", "digest", "/a"), list[tuple[AdapterRef, ...] | None]()
        watcher = await site.watch(changes=True)
        for change in (LoadAdapter(one), None, UnloadAdapter("a")):
            if change is not None:
                site.core.pools.make(change)
            site.heartbeat(NAMES[1], running=len(told) + 1)
            site.publish()
            told.append((await anext(watcher)).adapters)
        assert told == [(one,), None, ()]

    on_loop(life)


def test_a_watcher_that_does_not_read_gets_the_whole_table_in_place_of_what_it_missed() -> None:
    async def life(site: Site) -> None:
        slow, quick = await site.watch(changes=True), await site.watch(changes=True)
        site.heartbeat(NAMES[3], running=99)
        for number in range(MAX_CHANGES + 1):
            site.heartbeat(NAMES[number % 3], running=number + 1)
            site.publish()
            assert (await anext(quick)).changes
        site.heartbeat(NAMES[0], running=50)
        site.publish()
        first = await anext(slow)
        assert told(first)[:2] == (False, NAMES), "what it missed is in the table, whatever it was"
        assert [one.status.running for one in first.workers] == [16, 17, 15, 99]
        assert told(await anext(slow)) == (True, [], {NAMES[0]: 50}), "and then what has changed since"
        assert told(await anext(quick)) == (True, [], {NAMES[0]: 50})

    on_loop(life)


def test_a_request_is_looked_for_at_routers_that_answer_and_nobody_else_is_asked() -> None:
    async def life(site: Site) -> None:
        answers = await site.watch(changes=True, records=True)
        silent, older = await site.watch(changes=True), await site.watch(records=True)
        assert site.ask_routers(7, "r") == 1
        asked = await anext(answers)
        assert [(ask.number, ask.request_id) for ask in asked.record_asks] == [(7, "r")]
        assert told(asked) == (True, [], {})
        site.heartbeat(NAMES[0], running=1)
        site.publish()
        for stream in (silent, older, answers):
            view = await anext(stream)
            assert not view.record_asks
            assert view.workers
        await answers.aclose()
        assert site.ask_routers(8, "r") == 0, "who has gone is asked nothing"
        await site.watch(changes=True, records=True)
        asked_of = [site.ask_routers(number, "r") for number in range(9, MAX_CHANGES + 12)]
        assert asked_of == [1] * (MAX_CHANGES + 1) + [0] * 2, "who reads nothing answers nothing"

    on_loop(life)


DECODE_1, NODE = WorkerName("decode-1"), "n"
CHANGES: list[tuple[OperatorChange, bool]] = [
    (AddWorkers(Role.DECODE), True),
    (AddWorkers(Role.DECODE, by_operator=False), False),
    (ScalePools({Role.DECODE: 3}), True),
    (SetRole(DECODE_1, Role.PREFILL), True),
    (UndrainWorkers(DECODE_1), True),
    (DrainWorkers(DECODE_1), True),
    (DrainWorkers(NODE), False),
    (RestartWorker(DECODE_1), False),
    (CordonNode(NODE), False),
    (UncordonNode(NODE), False),
]


@pytest.mark.parametrize(("change", "holds"), CHANGES, ids=[type(change).__name__ for change, _ in CHANGES])
def test_what_an_operator_does_to_pools_holds_the_autoscaler_and_nothing_else_does(
    change: OperatorChange, holds: bool
) -> None:
    """A start that the supervisor asks for is no operator's, and what leaves with its node, or only to start again, may
    be made up for."""

    async def life(site: Site) -> None:
        await site.service.change_pools(change)
        assert bool(site.autoscaler.view().held_s) is holds

    on_loop(life)


def test_whoever_is_changed_is_told_apart_by_whether_it_starts_or_leaves() -> None:
    async def life(site: Site) -> None:
        scaled = await site.service.change_pools(ScalePools({Role.DECODE: 3, Role.PREFILL: 1}))
        assert (scaled.start, scaled.leave) == ({"decode-2"}, {"prefill-1"})
        assert sorted(scaled.names) == ["decode-2", "prefill-1"]
        assert await site.service.change_pools(RestartWorker(WorkerName("decode-0"))) == ChangedWorkers()

    on_loop(life)


def test_what_is_refused_is_refused_with_its_words_and_changes_and_holds_nothing() -> None:
    async def life(site: Site) -> None:
        before = site.core.version
        for change, words in (
            (DrainWorkers("nobody"), "no worker or node is named 'nobody'"),
            (UndrainWorkers("nobody"), "nobody"),
            (ScalePools({Role.DECODE: 0}), "each role needs a worker"),
            (AddWorkers(Role.DECODE, 0), "at least 1"),
            (SetRole(DECODE_1, Role.DECODE), "already"),
        ):
            with pytest.raises(CallRefused, match=words) as refused:
                await site.service.change_pools(change)
            assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert site.core.version == before
        assert site.autoscaler.view().held_s == 0.0

    on_loop(life)


def test_a_controller_that_does_not_lead_renews_nothing_and_lets_no_time_pass() -> None:
    async def life(site: Site) -> None:
        status = WorkerStatus(NAMES[0], Role.DECODE, "ready", 7, "n", ONE, 0, 0, 8, 8)
        renewal = Renewal(NAMES[0], ONE, status)
        before = site.core.table.rows[NAMES[0]].deadline
        site.clock.advance(1.0)
        site.leads = False
        with pytest.raises(WireError, match=NOT_LEADING):
            site.service.renewal(renewal)
        assert site.core.table.rows[NAMES[0]].deadline == before
        site.clock.advance(1e6)
        site.service.tick()
        assert site.core.deaths == 0
        site.leads = True
        assert not site.service.renewal(renewal).fenced, "nobody has ended its lease"
        site.service.tick()
        assert site.core.deaths == 3, "and those that did not renew are dead"

    on_loop(life)
