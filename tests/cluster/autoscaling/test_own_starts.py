"""Starts and drains that the autoscaler has ordered, until they have succeeded, failed or were taken over."""

from __future__ import annotations

from dataclasses import replace as replace_fields

import pytest
from msgspec.structs import replace

from twinpool.cluster.autoscaling.pool_damping import CancelStarts, ChangeRole, GrowPool, ShrinkPool, SizingChange
from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import PLACE_S, Controller
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace, NodeRoom, RoleRoom
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus

PREFILL, DECODE = Role.PREFILL, Role.DECODE
NODE = NodePlace("a" * 12, "a")
WHY = "planted"


class Site:
    """A controller with two workers in each pool and its autoscaler, whose rules decide what the test says."""

    def __init__(self, ledger: MemoryLedger | None = None, together: int = 1) -> None:
        """`together`: so many decode workers share their experts."""
        config = Config()
        config = replace_fields(config, decode=replace_fields(config.decode, dp=together))
        self.clock, self.ledger, self.config = ManualClock(100.0), ledger or MemoryLedger(), config
        self.core = Controller(self.clock, self.config.cluster, self.ledger)
        self.core.set_nodes([NODE])
        if together > 1:
            roles: dict[str, RoleRoom] = {PREFILL: RoleRoom(1), DECODE: RoleRoom(1, together=together)}
            self.core.set_room(ClusterRoom((NodeRoom(NODE, 100, starts=100, roles=roles),)))
        if ledger is None:
            for role in (PREFILL, DECODE):
                self.core.pools.add_some(role, 2)
            for start in self.starts():
                self.register(start)
        self.autoscaler = Autoscaler(self.core, self.clock, self.config)
        self.autoscaler.tick()

    def starts(self) -> list[StartWorker]:
        return [action for action in self.core.tick() if isinstance(action, StartWorker)]

    def register(self, start: StartWorker) -> None:
        record = WorkerRecord(
            start.name, start.role, start.incarnation, 7, NODE.host, "e", "c", WorkerLimits(8, 8), NODE.node_id
        )
        assert not self.core.register(record).fenced

    def decides(self, change: SizingChange) -> None:
        self.autoscaler._apply(change, self.clock.now())

    def tick(self, seconds: float = 0.0) -> list[StartWorker]:
        """So much later all that serve renew, and both have had their tick."""
        self.clock.advance(seconds)
        for row in self.core.table.rows.values():
            if row.serves:
                state = "draining" if row.drains else row.state
                status = WorkerStatus(row.name, row.role, state, 7, "a", row.incarnation, 0, 0, 64, 64)
                self.core.renew(row.name, row.incarnation, status)
        begun = self.starts()
        self.autoscaler.tick()
        return [*begun, *self.starts()]

    def leave(self, name: str) -> None:
        row = self.core.table.rows[WorkerName(name)]
        self.core.leave(row.name, row.incarnation)

    def count(self, counter: str) -> int:
        return self.autoscaler.view().counters[counter]

    def roles(self) -> dict[str, str]:
        """Of all that are wanted."""
        return {row.name: str(row.becomes or row.role) for row in self.core.table.rows.values() if row.wanted}

    @property
    def backs_off(self) -> list[Role]:
        return [role for role, pool in self.autoscaler._rules.pools.items() if pool.backs_off(self.clock.now())]


BEFORE = {"prefill-0": PREFILL, "prefill-1": PREFILL, "decode-0": DECODE, "decode-1": DECODE}


def changing(site: Site) -> str:
    """A prefill worker that has left to come back as a decode worker, and begins to start."""
    site.decides(ChangeRole(DECODE, WHY))
    (name,) = (name for name, role in site.roles().items() if role == DECODE and name.startswith("prefill"))
    site.tick(1.0)
    site.leave(name)
    begun = site.tick(site.config.autoscaling.period_s)
    assert [(start.name, start.role) for start in begun] == [(name, DECODE)]
    return name


@pytest.mark.parametrize("deaths", [0, 2])
def test_a_start_is_judged_by_its_own_deaths_and_not_by_earlier_ones(deaths: int) -> None:
    site = Site()
    for name in ("prefill-0", "prefill-1"):
        for _ in range(deaths):
            row = site.core.table.rows[WorkerName(name)]
            site.clock.advance(20.0)
            site.core.died(row.name, row.incarnation, "signal 9")
            for start in site.starts():
                site.register(start)
    name = changing(site)
    site.tick(site.config.autoscaling.period_s)
    assert site.count("starts_failed") == 0
    assert site.roles()[name] == DECODE
    row = site.core.table.rows[WorkerName(name)]
    site.core.died(row.name, row.incarnation, "no memory")
    again = site.tick(site.config.autoscaling.period_s)[-1]
    assert (again.name, again.role) == (name, PREFILL), "it comes back in the role that it had"
    assert site.count("starts_failed") == 1
    assert site.backs_off == [DECODE], "and the pool that it was for does not grow for a while"
    site.register(again)
    site.tick(site.config.autoscaling.period_s)
    assert site.roles() == BEFORE


def test_a_start_that_succeeded_is_its_pools_and_is_not_taken_back_when_it_dies_later() -> None:
    site = Site()
    site.decides(GrowPool(DECODE, 1, WHY))
    (start,) = site.tick()
    site.register(start)
    site.tick(site.config.autoscaling.period_s)
    site.core.died(start.name, start.incarnation, "signal 9")
    (again,) = site.tick(site.config.autoscaling.period_s)
    assert (again.name, again.incarnation) == (start.name, 2)
    assert site.count("starts_failed") == 0
    assert site.backs_off == []


def test_a_start_without_a_place_has_its_time_from_when_it_left_and_others_go_on() -> None:
    """A worker that drains for its new role may take longer than that over what it has."""
    site, wait_s = Site(), Config().autoscaling.start_wait_s
    site.decides(ChangeRole(DECODE, WHY))
    (name,) = (name for name, role in site.roles().items() if role == DECODE and name.startswith("prefill"))
    for _ in range(4):
        site.tick(wait_s / 2)
    assert site.count("starts_given_up") == 0
    site.leave(name)
    site.tick(site.config.autoscaling.period_s)
    site.tick(wait_s - 2 * site.config.autoscaling.period_s)
    assert (site.count("starts_given_up"), site.roles()[name]) == (0, DECODE)
    site.tick(3 * site.config.autoscaling.period_s)
    assert site.count("starts_given_up") == 1
    site.tick(site.config.autoscaling.period_s)
    assert site.roles()[name] == PREFILL


def test_starts_that_an_operator_has_taken_over_are_no_longer_the_autoscalers_to_give_up() -> None:
    site = Site()
    site.decides(GrowPool(DECODE, 1, WHY))
    site.tick()
    site.autoscaler.hold("an operator")
    site.tick(Config().autoscaling.start_wait_s + PLACE_S)
    site.tick(site.config.autoscaling.period_s)
    assert site.count("starts_given_up") == site.count("starts_failed") == 0
    assert site.roles()["decode-2"] == DECODE
    site.decides(CancelStarts(DECODE, 1, WHY))
    assert site.roles()["decode-2"] == DECODE


def test_starts_that_are_no_longer_needed_are_those_of_the_pool_that_still_wait_the_highest_number_first() -> None:
    site = Site()
    site.decides(GrowPool(DECODE, 2, WHY))
    site.decides(GrowPool(PREFILL, 1, WHY))
    placed = next(start for start in site.tick() if start.name == "decode-2")
    site.core.placed(placed.name, placed.incarnation, NODE)
    site.tick(PLACE_S)
    site.decides(CancelStarts(DECODE, 2, WHY))
    assert site.roles() == {**BEFORE, "decode-2": DECODE, "prefill-2": PREFILL}
    assert (site.count("starts_given_up"), site.count("starts_failed")) == (1, 0)
    assert site.autoscaler.view().held_s == 0.0, "who is gone by its own order was drained by no operator"


def test_starts_of_those_that_share_their_experts_are_taken_back_and_fail_together() -> None:
    site, wait_s = Site(together=2), Config().autoscaling.start_wait_s
    site.decides(GrowPool(DECODE, 4, WHY))
    placed = next(start for start in site.tick() if start.name == "decode-3")
    site.core.placed(placed.name, placed.incarnation, NODE)
    site.tick(PLACE_S)
    site.decides(CancelStarts(DECODE, 4, WHY))
    assert site.roles() == {**BEFORE, "decode-2": DECODE, "decode-3": DECODE}, "decode-3 has a place"
    assert site.count("starts_given_up") == 2
    site.core.died(placed.name, placed.incarnation, "no memory")
    site.tick(site.config.autoscaling.period_s)
    assert (site.roles(), site.count("starts_failed"), site.backs_off) == (BEFORE, 1, [DECODE])
    assert site.tick(wait_s) == []


def test_one_that_served_already_leaves_with_those_whose_start_has_failed_that_share_its_experts() -> None:
    site = Site(together=2)
    site.decides(GrowPool(DECODE, 2, WHY))
    first, second = site.tick()
    site.register(first)
    site.tick(site.config.autoscaling.period_s)
    site.core.died(second.name, second.incarnation, "no memory")
    site.tick(site.config.autoscaling.period_s)
    assert site.core.table.rows[first.name].drains, "none of them serves alone"
    assert (site.count("starts_failed"), site.backs_off, site.autoscaler.view().held_s) == (1, [DECODE], 0.0)
    site.core.died(first.name, first.incarnation, "the other one is gone")
    assert site.tick(Config().autoscaling.start_wait_s) == []
    assert site.roles() == BEFORE, "nobody waits for who was given up"


def test_who_leaves_by_its_order_is_no_operators_drain_and_whoever_else_leaves_is() -> None:
    site = Site()
    site.decides(ShrinkPool(DECODE, 1, WHY))
    site.tick(1.0)
    site.leave("decode-1")
    site.tick(site.config.autoscaling.period_s)
    assert site.autoscaler.view().held_s == 0.0
    assert site.count("shrunk") == 1
    site.core.pools.drain("prefill-1")
    site.tick(1.0)
    assert site.autoscaler.view().held_s == site.config.autoscaling.hold_s
    assert site.count("holds") == 1
    site.leave("prefill-1")
    site.tick(site.config.autoscaling.period_s)
    assert site.count("holds") == 1, "once"


def test_the_next_controllers_autoscaler_knows_its_own_starts_drains_and_holds() -> None:
    site = Site()
    site.decides(GrowPool(DECODE, 1, WHY))
    site.decides(ShrinkPool(PREFILL, 1, WHY))
    site.tick(site.config.autoscaling.period_s)
    after = Site(site.ledger)
    assert {name: start.was for name, start in after.autoscaler._starts.items()} == {"decode-2": None}
    assert after.autoscaler._sent == {"prefill-1"}
    after.tick(1.0)
    after.leave("prefill-1")
    after.tick(1.0)
    assert after.autoscaler.view().held_s == 0.0, "it drained by the order of the one before"
    after.autoscaler.hold("an operator")
    assert Site(site.ledger).autoscaler.view().held_s == site.config.autoscaling.hold_s
    assert Site(site.ledger).autoscaler._starts == {}


def test_a_hold_that_is_over_is_over_for_the_next_controller_too() -> None:
    site = Site()
    site.autoscaler.hold("an operator")
    site.tick(site.config.autoscaling.hold_s)
    site.tick(site.config.autoscaling.period_s)
    assert Site(site.ledger).autoscaler.view().held_s == 0.0


@pytest.mark.parametrize("changed", ["scaled", "drained and restarted"])
def test_an_operators_change_is_one_hold_though_workers_leave_for_it(changed: str) -> None:
    """Whoever leaves by it has been seen with it, and is no further drain."""
    site = Site()
    if changed == "scaled":
        site.core.pools.scale({DECODE: 1})
    else:
        site.core.pools.drain("decode-1")
    site.autoscaler.hold(changed)
    for _ in range(3):
        site.tick(1.0)
    assert site.roles() == BEFORE
    assert site.count("holds") == 1
    assert site.autoscaler.view().held_s == site.config.autoscaling.hold_s - 3.0


def test_a_change_of_role_takes_back_a_start_of_its_own_pool_that_waits_and_none_of_the_other() -> None:
    site = Site()
    site.decides(GrowPool(DECODE, 1, WHY))
    site.decides(GrowPool(PREFILL, 1, WHY))
    site.tick()
    site.decides(ChangeRole(DECODE, WHY))
    roles = site.roles()
    assert sorted(roles.values()) == [DECODE] * 3 + [PREFILL] * 2
    assert (roles.get("decode-2"), roles["prefill-2"]) == (None, PREFILL)


def test_a_worker_that_restarts_is_its_pools_all_the_while() -> None:
    site = Site()
    site.core.pools.restart(WorkerName("decode-1"))
    for step in (lambda: None, lambda: site.tick(1.0), lambda: site.leave("decode-1"), lambda: site.tick(1.0)):
        step()
        assert [pool.wanted for pool in site.autoscaler.view().pools] == [2, 2]


def test_a_lack_of_room_is_said_once_and_again_after_there_was_some(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    site.tick(30.0)  # What is needed is known from then on.
    rules, roles = site.autoscaler._rules, dict.fromkeys((str(PREFILL), str(DECODE)), RoleRoom(10))

    def decide(now: float, pools: object, load: object, *, held: bool, fits: dict[Role, int]) -> list[SizingChange]:
        rules.unfit = {role: 1 for role in fits if role is PREFILL}
        return []

    monkeypatch.setattr(rules, "decide", decide)
    for workers, said in ((4, 1), (9, 1), (4, 2)):
        site.core.set_room(ClusterRoom((NodeRoom(NODE, 10 * workers, roles=roles),)))
        for _ in range(3):
            site.tick(30.0)
        told = [one.text for one in site.autoscaler.view().decisions if "prefill: it needs more" in one.text]
        assert len(told) == said


def test_who_has_the_least_to_do_changes_its_role() -> None:
    site = Site()
    for number, prompt_tokens in ((0, 500), (1, 400)):
        row = site.core.table.rows[WorkerName(f"prefill-{number}")]
        status = WorkerStatus(row.name, PREFILL, "ready", 7, "a", Incarnation(1), 9 - number, 0, 64, 64)
        site.core.renew(row.name, row.incarnation, replace(status, prompt_tokens=prompt_tokens))
    site.decides(ChangeRole(DECODE, WHY))
    assert site.roles() == {**BEFORE, "prefill-1": DECODE}


@pytest.mark.parametrize(
    ("counters", "why"),
    [
        ({"retractions": 2.0}, "4 requests were put off for want of pages"),
        ({"retracted": 1.0}, "2 requests were put off for want of pages"),
        ({}, "requests ask for 0% of its pages"),
    ],
)
def test_what_workers_tell_of_requests_that_were_put_off_is_their_pools_need(
    counters: dict[str, float], why: str
) -> None:
    site = Site()
    for told in ({}, counters):
        site.clock.advance(site.config.autoscaling.period_s)
        for row in site.core.table.rows.values():
            status = WorkerStatus(row.name, row.role, "ready", 7, "a", row.incarnation, 0, 0, 64, 64)
            mine = told if row.role is DECODE else {}
            site.core.renew(row.name, row.incarnation, replace(status, counters={"retractions": 0.0, **mine}))
        site.autoscaler.tick()
    found = {str(pool.role): pool.why for pool in site.autoscaler.view().pools}
    assert found[DECODE] == why
