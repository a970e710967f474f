"""The steps, cooldowns and windows of one pool, and of changes of roles, decision by decision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.cluster.autoscaling.load_window import MeasuredLoad, Outcomes, PoolState
from twinpool.cluster.autoscaling.pool_damping import (
    ChangeRole,
    GrowPool,
    PoolDamping,
    RoleBalance,
    ShrinkPool,
    SizingRules,
)
from twinpool.cluster.autoscaling.pool_need import PoolNeed
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig, PoolBounds
from twinpool.contracts.ids import PAIR, Role

CONFIG = AutoscalingConfig(
    enabled=True, prefill=PoolBounds(1, 20), decode=PoolBounds(1, 20), period_s=5.0, window_s=20.0,
    shrink_window_s=100.0, shrink_cooldown_s=40.0, grow_cooldown_s=15.0, grow_step=3, shrink_step=1,
    role_window_s=20.0, role_cooldown_s=60.0,
)  # fmt: skip
QUEUE = MeasuredLoad(
    prefill=3, decode=3, offered=6000.0, computed=3000.0, rate=1000.0, requests=0.0, backlog=90_000, pages=3000,
    used_pages=300, running=3, granted=0, generated=50.0, lacking=0.0, ungranted=0, lacked=False, put_off=0,
    first=Outcomes(), gaps=Outcomes(),
)  # fmt: skip
"""Prefill computes all the time, and twice as much comes."""
URGENT = PoolNeed(9.0, "a queue", load=1000.0, urgent=True)


class Pool:
    """One pool whose workers start and leave at once."""

    def __init__(self, ready: int, config: AutoscalingConfig = CONFIG, together: int = 1) -> None:
        self.damping, self.ready, self.now = PoolDamping(config, together, 20, together), ready, 0.0
        self.changes: list[tuple[float, int]] = []

    def run(self, need: PoolNeed, until_s: float) -> None:
        """Decide every 5 s until then, always with this need."""
        while self.now < until_s:
            pool = PoolState(Role.DECODE, ready=self.ready)
            self.damping.observe(self.now, need, pool)
            if count := self.damping.growth(self.now, need, pool):
                self.damping.grown(self.now, need, pool)
            elif count := -self.damping.shrinkage(self.now, pool):
                self.damping.shrunk(self.now)
            if count:
                self.changes.append((self.now, count))
                self.ready += count
            self.now += 5.0


class Waiting(Pool):
    """A pool whose starts find no place."""

    def __init__(self, ready: int) -> None:
        super().__init__(ready)
        self.unplaced = 0

    def run(self, need: PoolNeed, until_s: float) -> None:
        while self.now < until_s:
            pool = PoolState(Role.DECODE, ready=self.ready, unplaced=self.unplaced)
            self.damping.observe(self.now, need, pool)
            if count := self.damping.growth(self.now, need, pool):
                self.damping.grown(self.now, need, pool)
            elif count := -self.damping.not_wanted(self.now, pool):
                self.damping.withdrawn(self.now)
            if count:
                self.changes.append((self.now, count))
                self.unplaced += count
            self.now += 5.0


def test_starts_that_were_withdrawn_too_early_are_withdrawn_as_late_as_workers_leave() -> None:
    enough, urgent = PoolNeed(1.0, "few", load=10.0), URGENT._replace(workers=3.0)
    pool = Waiting(2)
    for until_s in range(30, 301, 60):
        pool.run(urgent, until_s)
        pool.run(enough, until_s + 30.0)
    assert pool.changes == [(5.0, 1), (50.0, -1), (65.0, 1)], "once it was missed it stays through lulls of 30 s"
    pool.run(enough, 500.0)
    assert pool.changes[3:] == [(370.0, -1)], "a shrinking's window after it was needed last"


def test_it_grows_by_steps_with_pauses_between_once_two_decisions_would_have_it() -> None:
    pool = Pool(2)
    pool.run(URGENT, 60.0)
    assert pool.changes == [(5.0, 3), (20.0, 3), (35.0, 1)]


def test_those_that_share_their_experts_are_as_many_as_are_needed_and_the_rest_of_their_group() -> None:
    pool = Pool(4, together=4)
    pool.run(URGENT, 60.0)
    assert pool.changes == [(5.0, 4), (20.0, 4)], "9 are needed, and a group is more than a step"
    pool.run(PoolNeed(3.7, "little"), 400.0)
    assert (pool.changes[2:], pool.ready) == ([(160.0, -4)], 8), "more than four, with a tolerance"


def test_what_is_not_urgent_is_needed_for_a_whole_window() -> None:
    pool = Pool(2)
    pool.run(URGENT._replace(workers=4.0, urgent=False), 60.0)
    assert pool.changes == [(20.0, 2)]
    wavering = Pool(2)
    for _ in range(10):
        wavering.run(URGENT._replace(workers=4.0, urgent=False), wavering.now + 15.0)
        wavering.run(URGENT._replace(workers=2.0, urgent=False), wavering.now + 5.0)
    assert wavering.changes == []


def test_it_shrinks_by_one_with_pauses_between_once_a_window_has_passed() -> None:
    pool = Pool(5)
    pool.run(PoolNeed(1.5, "little"), 250.0)
    assert pool.changes == [(100.0, -1), (140.0, -1), (180.0, -1)]
    assert pool.ready == 2


@pytest.mark.parametrize("flux", [{"starting": 1}, {"leaving": 1}, {"dead": 1}])
def test_nobody_leaves_while_somebody_comes_or_goes(flux: dict[str, int]) -> None:
    pool = Pool(5)
    pool.run(PoolNeed(1.5, "little"), 100.0)
    assert pool.damping.shrinkage(pool.now, PoolState(Role.DECODE, ready=5)) == 1
    assert pool.damping.shrinkage(pool.now, PoolState(Role.DECODE, ready=5, **flux)) == 0


def test_a_gap_in_what_was_observed_begins_the_window_anew() -> None:
    pool = Pool(5)
    pool.run(PoolNeed(1.5, "little"), 95.0)
    pool.now = 130.0
    pool.run(PoolNeed(1.5, "little"), 250.0)
    assert pool.changes[0] == (230.0, -1)


def test_a_gap_in_what_was_observed_begins_the_window_of_growth_anew_too() -> None:
    """What was needed before it, and a whole window ago, says nothing of the time in between."""
    pool, more = Pool(2), URGENT._replace(workers=4.0, urgent=False)
    pool.run(more, 15.0)
    pool.now = 100.0
    pool.run(more, 160.0)
    assert pool.changes == [(120.0, 2)]


def test_a_shrinking_that_is_regretted_doubles_the_window_and_is_not_repeated_at_its_load() -> None:
    pool = Pool(3)
    little = PoolNeed(1.5, "little", load=1000.0)
    pool.run(little, 105.0)
    assert pool.ready == 2
    pool.run(URGENT._replace(workers=3.0), 120.0)
    assert pool.ready == 3
    assert pool.damping.window_s == 200.0
    pool.run(little, 1000.0)
    assert pool.ready == 3, "at 1,000 tokens a second two were too few"
    pool.run(little._replace(load=500.0), 1195.0)
    assert pool.ready == 3, "200 s of less, now"
    pool.run(little._replace(load=500.0), 1300.0)
    assert pool.ready == 2


def test_after_long_enough_without_regret_both_the_window_and_the_size_are_forgiven() -> None:
    """24 windows after it, and a window of its own later: the load that two workers were too few for may have been
    another kind of load."""
    pool = Pool(3)
    little = PoolNeed(1.5, "little", load=1000.0)
    pool.run(little, 105.0)
    pool.run(URGENT._replace(workers=3.0), 120.0)
    regretted_at = pool.changes[-1][0]
    pool.run(little, regretted_at + 2400.0)
    assert pool.ready == 3
    pool.run(little, regretted_at + 2700.0)
    assert pool.damping.window_s == 100.0
    assert pool.ready == 2


def test_a_pool_that_goes_on_growing_regrets_its_shrinking_once() -> None:
    """What it grows through further on are sizes that were never shrunk to."""
    pool = Pool(3)
    little = PoolNeed(1.5, "little", load=1000.0)
    pool.run(little, 105.0)
    pool.run(URGENT, 145.0)
    assert pool.changes == [(100.0, -1), (110.0, 3), (125.0, 3), (140.0, 1)], "all within three windows of it"
    assert pool.damping.window_s == 200.0
    pool.run(little, 1000.0)
    assert pool.changes[4:] == [(at, -1) for at in (345.0, 385.0, 425.0, 465.0, 505.0, 545.0)]
    assert pool.ready == 3, "at 1,000 tokens a second only two were too few"


@pytest.mark.parametrize(("after_s", "window_s"), [(280.0, 200.0), (330.0, 100.0)])
def test_what_is_needed_long_after_a_shrinking_is_no_regret(after_s: float, window_s: float) -> None:
    """Three windows after it: the load is another one by then."""
    pool = Pool(3)
    pool.run(PoolNeed(1.5, "little", load=1000.0), 100.0 + after_s)
    assert pool.changes == [(100.0, -1)]
    pool.run(URGENT._replace(workers=3.0), 120.0 + after_s)
    assert pool.ready == 3
    assert pool.damping.window_s == window_s


def test_a_need_that_was_not_known_for_a_while_was_not_there_all_the_while() -> None:
    pool, more = Pool(2), URGENT._replace(workers=4.0, urgent=False)
    pool.run(more, 15.0)
    pool.run(PoolNeed(-1.0, "no worker serves"), 20.0)
    pool.run(more, 60.0)
    assert pool.changes == [(40.0, 2)]


def test_a_pool_has_all_that_it_is_to_have_and_not_those_that_leave() -> None:
    pool = PoolState(Role.DECODE, ready=1, starting=20, unplaced=300, dead=4000, leaving=50_000)
    assert pool.wanted == 4321


def test_a_pause_after_a_failure_counts_once_for_what_was_begun_before_it() -> None:
    damping = PoolDamping(CONFIG, 1, 20)
    assert [damping.failed(0.0), damping.failed(10.0), damping.failed(30.0)] == [30.0, 20.0, 60.0]
    damping.started()
    assert not damping.backs_off(31.0)
    assert [damping.failed(100.0), damping.failed(130.0)] == [30.0, 60.0], "failures before a success are over"


@pytest.mark.parametrize(("most", "grown"), [(6, []), (7, [1]), (8, [2]), (9, [3]), (10, [3, 1]), (14, [3, 3])])
def test_pools_that_grow_at_once_share_the_room_that_both_have_together(most: int, grown: list[int]) -> None:
    """The pool that is shorter of what it needs comes first; a step is three workers."""
    rules = SizingRules(replace(CONFIG, max_workers=most), 16)
    pools = {role: PoolState(role, ready=3) for role in PAIR}
    short = replace(QUEUE, used_pages=3000, running=300, granted=30, lacking=3000.0, ungranted=900, lacked=True)
    changes = [change for at in (0.0, 5.0) for change in rules.decide(at, pools, short)]
    assert rules.needs[Role.DECODE].workers > rules.needs[Role.PREFILL].workers > 6.0, "both need a step"
    assert [(change.role, change.count) for change in changes if isinstance(change, GrowPool)] == list(
        zip((Role.DECODE, Role.PREFILL), grown, strict=False)
    )


# ---------------------------------------------------------------- roles


def favoured(balance: RoleBalance, now: float, prefill: float, decode: float) -> Role | None:
    """The pool of three that is to get a worker of the other three."""
    pools = {role: PoolState(role, ready=3) for role in PAIR}
    needs = {Role.PREFILL: PoolNeed(prefill, ""), Role.DECODE: PoolNeed(decode, "")}
    return balance.short_pool(now, pools, needs, no_more=dict.fromkeys(PAIR, True))


def test_a_role_is_changed_when_a_whole_window_would_have_had_it_and_not_again_soon() -> None:
    balance = RoleBalance(CONFIG)
    found = [favoured(balance, at, 5.0, 1.0) for at in (0.0, 10.0)]
    assert found == [None, None]
    assert favoured(balance, 15.0, 1.0, 1.0) is None, "it was not needed here: the window begins anew"
    assert [favoured(balance, at, 5.0, 1.0) for at in (20.0, 35.0, 40.0)] == [None, None, Role.PREFILL]
    balance.changed(40.0)
    assert [favoured(balance, at, 5.0, 1.0) for at in (45.0, 70.0, 95.0)] == [None, None, None]
    assert favoured(balance, 100.0, 5.0, 1.0) is Role.PREFILL


@pytest.mark.parametrize(("prefill", "decode"), [(3.2, 1.0), (5.0, 4.8), (5.0, 3.1), (2.9, 0.5)])
def test_no_role_is_changed_for_little_or_for_nothing(prefill: float, decode: float) -> None:
    """Short by less than the tolerance; the other would be shorter, or nearly as short; not short."""
    balance = RoleBalance(CONFIG)
    assert [favoured(balance, at, prefill, decode) for at in (0.0, 30.0, 60.0)] == [None, None, None]


@pytest.mark.parametrize(
    ("max_prefill", "min_decode", "found"),
    [(4, 2, Role.PREFILL), (3, 2, None), (4, 3, None)],
)
def test_no_role_is_changed_beyond_a_bound(max_prefill: int, min_decode: int, found: Role | None) -> None:
    config = replace(CONFIG, prefill=PoolBounds(1, max_prefill), decode=PoolBounds(min_decode, 20))
    balance = RoleBalance(config)
    assert [favoured(balance, at, 6.0, 1.0) for at in (0.0, 30.0)] == [None, found]


def test_the_next_role_is_changed_a_cooldown_later() -> None:
    rules = SizingRules(replace(CONFIG, max_workers=6), 16)
    pools = {role: PoolState(role, ready=3) for role in PAIR}
    changes = [(at, change) for at in range(0, 100, 5) for change in rules.decide(float(at), pools, QUEUE)]
    assert [(at, type(change)) for at, change in changes] == [(at, ChangeRole) for at in (20, 80)]


@pytest.mark.parametrize(("fits", "changes"), [({Role.PREFILL: 0}, True), ({Role.PREFILL: 1, Role.DECODE: 0}, False)])
def test_a_worker_changes_its_role_where_no_node_has_room_for_another(fits: dict[Role, int], changes: bool) -> None:
    rules, pools = SizingRules(CONFIG, 16), {role: PoolState(role, ready=3) for role in PAIR}
    found = [change for at in range(0, 30, 5) for change in rules.decide(float(at), pools, QUEUE, fits=fits)]
    assert [(type(change), change.role) for change in found[:1]] == [
        (ChangeRole if changes else GrowPool, Role.PREFILL)
    ]


@pytest.mark.parametrize("failed", [False, True])
def test_no_worker_changes_to_a_role_whose_starts_fail(failed: bool) -> None:
    rules = SizingRules(replace(CONFIG, max_workers=6, backoff_s=100.0), 16)
    if failed:
        rules.pools[Role.PREFILL].failed(0.0)
    pools = {role: PoolState(role, ready=3) for role in PAIR}
    found = [change for at in range(0, 60, 5) for change in rules.decide(float(at), pools, QUEUE)]
    assert [type(change) for change in found[:1]] == ([] if failed else [ChangeRole])


def test_a_change_of_roles_is_a_change_of_both_pools() -> None:
    """The pool that gave a worker shrinks no sooner after it than the one that got it: its need has just changed."""
    rules = SizingRules(replace(CONFIG, max_workers=6), 16)
    pools = {role: PoolState(role, ready=3) for role in PAIR}
    found = [(at, type(change)) for at in range(0, 120, 5) for change in rules.decide(float(at), pools, QUEUE)]
    assert found == [(at, ChangeRole) for at in (20, 80)], "not within 40 s, though a shrinking's window is over at 100"
    assert [(type(change), change.role) for change in rules.decide(120.0, pools, QUEUE)] == [(ShrinkPool, Role.DECODE)]
