"""The autoscaler with its controller, against a queueing model that knows nothing of its rules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.support.autoscaling_loads import COSTS, model, poisson, scaling, sizes_at, told, turns
from tests.support.autoscaling_queue_model import AutoscalingModel, ModelAsk, ModelCosts, changes
from twinpool.cluster.controller.controller_actions import StartWorker
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace, NodeRoom, RoleRoom
from twinpool.contracts.ids import Role

BURST = poisson(1, (4.0, 150.0), (14.0, 150.0), (4.0, 500.0), prompt=800, answer=60)


@pytest.fixture(scope="module")
def burst() -> AutoscalingModel:
    run = model(scaling(), BURST)
    run.run(800.0)
    run.run()
    return run


def test_a_burst_is_met_within_a_few_periods(burst: AutoscalingModel) -> None:
    assert sizes_at(burst, 150.0)[0] <= 2
    assert sizes_at(burst, 150.0 + 6 * 5 + COSTS.start_s)[0] >= 3, "14 prompts a second keep 2.8 workers busy"
    assert sizes_at(burst, 300.0)[0] == 4
    assert len(burst.figures.ttft_s) == len(BURST)


def test_a_pool_shrinks_by_one_when_a_whole_window_needed_fewer(burst: AutoscalingModel) -> None:
    sizes = burst.figures.sizes
    shrunk = [at for (_, *before), (at, *after) in itertools.pairwise(sizes) if after[0] < before[0] and at > 160.0]
    assert shrunk[0] >= 300.0 + 100.0 - 20.0, "the window begins when the load has fallen, as measured"
    assert all(later - earlier >= 20.0 for earlier, later in itertools.pairwise(shrunk))
    assert all(before[0] - after[0] <= 1 for (_, *before), (_, *after) in itertools.pairwise(sizes))
    assert sizes_at(burst, 800.0)[0] <= 2


def test_whoever_leaves_does_so_by_drain_and_no_request_is_lost(burst: AutoscalingModel) -> None:
    view = burst.autoscaler.view() if burst.autoscaler is not None else None
    assert view is not None
    assert view.counters["shrunk"] >= 3
    rows = burst.core.table.rows.values()
    assert not [row.name for row in rows if row.restarts.deaths], "nobody was ended"
    assert {row.state for row in rows if not row.wanted} == {"left"}


def test_a_burst_makes_each_pool_turn_once(burst: AutoscalingModel) -> None:
    assert turns(burst, 0) <= 2
    assert turns(burst, 1) <= 2


@pytest.mark.parametrize("seed", [2, 3])
def test_under_steady_load_a_pool_finds_its_size_and_keeps_it(seed: int) -> None:
    run = model(scaling(), poisson(seed, (10.0, 700.0), prompt=800, answer=60), prefill=3)
    run.run(700.0)
    late = [size for size in run.figures.sizes if size[0] > 250.0]
    assert changes(late) <= 1
    assert run.figures.ttft_s
    assert sum(s <= 2.0 for s in run.figures.ttft_s) / len(run.figures.ttft_s) >= 0.95


def test_noisy_load_makes_no_pool_go_to_and_fro() -> None:
    phases = [(2.0, 15.0), (5.0, 15.0)] * 20
    run = model(scaling(), poisson(4, *phases))
    run.run(600.0)
    assert turns(run, 0) <= 1
    assert turns(run, 1) <= 1
    assert changes(run.figures.sizes) <= 6


def test_requests_that_wait_for_pages_for_less_than_two_decisions_grow_nothing() -> None:
    """Eight come together where six have room, every 20 s, just before workers tell their counters."""
    costs = ModelCosts(compute_per_s=4000.0, step_s=0.04, step_each_s=0.0, pages=18, start_s=10.0)
    asks = [ModelAsk(20.0 * group + 19.5, 8, 36) for group in range(12) for _ in range(8)]
    run = model(scaling(period_s=2), asks, prefill=1, decode=1, costs=costs)
    waited = 0
    while run.now < 250.0:
        run.step()
        waited = max(waited, *(len(worker.waiting) for worker in run.pool(Role.DECODE)))
    assert waited == 2
    assert run.size(Role.DECODE) == 1, told(run)


def test_bounds_hold_at_all_times() -> None:
    config = scaling(prefill={"min_workers": 2, "max_workers": 3}, decode={"min_workers": 2, "max_workers": 3})
    run = model(config, poisson(5, (20.0, 30.0), (0.1, 420.0)))
    run.run(450.0)
    assert {size for _, *sizes in run.figures.sizes for size in sizes} == {2, 3}
    assert sizes_at(run, 150.0)[0] == 3
    assert sizes_at(run, 450.0) == (2, 2)


def test_both_pools_together_have_no_more_than_is_allowed() -> None:
    run = model(scaling(max_workers=5), poisson(6, (20.0, 200.0)))
    run.run(200.0)
    assert max(prefill + decode for _, prefill, decode in run.figures.sizes) == 5


def test_a_pool_below_its_least_grows_without_any_load() -> None:
    run = model(scaling(prefill={"min_workers": 3, "max_workers": 6}), [])
    run.run(60.0)
    assert sizes_at(run, 60.0)[0] == 3


# ---------------------------------------------------------------- failures


def test_a_start_that_fails_ends_nothing_and_is_waited_off_longer_each_time() -> None:
    run = model(scaling(), poisson(7, (8.0, 330.0)))
    broken: list[tuple[float, StartWorker]] = []

    def breaks(start: StartWorker) -> bool:
        broken.append((run.now, start))
        return run.now < 200.0

    run.breaks = breaks
    run.run(200.0)
    prefill = sorted({at for at, start in broken if start.role is Role.PREFILL})
    assert 2 <= len(prefill) <= 8, "without a pause there would be one a few seconds"
    waits = [later - earlier for earlier, later in itertools.pairwise(prefill)]
    assert waits[-1] > 1.5 * waits[0]
    assert run.size(Role.PREFILL) == 2
    assert any("failed (it could not start)" in text for text in told(run))
    assert run.autoscaler is not None
    rests = "a start has failed, it does not grow yet"
    assert all(rests in pool.why for pool in run.autoscaler.view().pools)
    run.run(330.0)
    assert not any(rests in pool.why for pool in run.autoscaler.view().pools)
    assert run.size(Role.PREFILL) >= 4, "once starts succeed it grows"


def test_a_start_without_a_place_is_shown_and_blocks_nothing() -> None:
    """There is room for four workers: starts wait; the other pool still shrinks, and answers go on."""
    run = model(scaling(start_wait_s=600), poisson(8, (8.0, 200.0)), decode=2, places=4)
    waited: set[str] = set()
    while run.now < 180.0:
        run.step()
        waiting = [row for row in run.core.table.rows.values() if row.unplaced]
        assert all(row.waits for row in waiting if row.name in waited), "shown until it is over, begun anew or not"
        waited |= {row.name for row in waiting if row.waits}
    assert waited
    shown = {view.record.name: view.status.waits for view in run.core.views()}
    assert all("a node with a place" in shown[row.name] for row in waiting)
    before = len(run.figures.ttft_s)
    run.run(200.0)
    assert len(run.figures.ttft_s) > before
    assert not [row for row in run.core.table.rows.values() if row.restarts.deaths], "waiting is no death"


def test_a_start_without_a_place_is_given_up_in_time() -> None:
    run = model(scaling(start_wait_s=40, role_cooldown_s=900, role_window_s=900), poisson(8, (8.0, 200.0)), places=4)
    run.run(120.0)
    assert any("found no place within 40 s" in text for text in told(run))
    assert run.size(Role.PREFILL) == 2


def test_a_start_without_a_place_is_taken_back_when_it_is_not_needed_any_more() -> None:
    phases = ((8.0, 60.0), (0.5, 200.0))
    run = model(scaling(start_wait_s=600, role_window_s=900), poisson(9, *phases), places=4)
    run.run(60.0)
    assert [row for row in run.core.table.rows.values() if row.unplaced]
    run.run(200.0)
    assert not [row for row in run.core.table.rows.values() if row.unplaced and row.wanted]
    assert any("given up" in text for text in told(run))


def test_a_pool_is_not_grown_beyond_what_there_is_room_for_and_that_is_said_once() -> None:
    run = model(scaling(role_cooldown_s=900, role_window_s=900), poisson(8, (8.0, 200.0)))
    roles: dict[str, RoleRoom] = {Role.PREFILL: RoleRoom(10), Role.DECODE: RoleRoom(10)}
    run.core.set_room(ClusterRoom((NodeRoom(NodePlace("", "n"), 50, roles=roles),)))
    run.run(150.0)
    rows = [row for row in run.core.table.rows.values() if row.wanted]
    assert len(rows) == 5, "of five that fit"
    assert not [row for row in rows if row.waits]
    said = [text for text in told(run) if "would not fit" in text]
    assert len(said) <= 2, "once for each pool"
    assert any("prefill: it needs more" in text for text in said)
    assert run.autoscaler is not None
    assert "there is no room for more" in run.autoscaler.view().pools[0].why
    run.core.set_room(ClusterRoom((NodeRoom(NodePlace("", "n"), 100, roles=roles),)))
    run.run(200.0)
    assert run.size(Role.PREFILL) > 2, "a larger machine"


def test_workers_that_share_their_experts_come_and_go_by_whole_groups() -> None:
    config = scaling(prefill={"min_workers": 2, "max_workers": 6}, grow_step=1)
    run = model(replace(config, prefill=replace(config.prefill, dp=2)), BURST)
    roles: dict[str, RoleRoom] = {Role.PREFILL: RoleRoom(10, together=2), Role.DECODE: RoleRoom(10)}
    run.core.set_room(ClusterRoom((NodeRoom(NodePlace("", "n"), 200, roles=roles),)))
    run.run(800.0)
    assert [sizes_at(run, at)[0] for at in (140.0, 300.0, 800.0)] == [2, 6, 2]
    assert all(prefill % 2 == 0 for _, prefill, _ in run.figures.sizes)
    view = run.autoscaler.view() if run.autoscaler is not None else None
    assert view is not None
    assert view.counters["role_changes"] == 0


# ---------------------------------------------------------------- operators


def test_an_operator_who_scales_is_left_alone_and_then_gone_on_from() -> None:
    run = model(scaling(), poisson(10, (8.0, 400.0)))
    run.run(20.0)
    assert run.autoscaler is not None
    run.core.pools.scale({Role.PREFILL: 1})
    run.autoscaler.hold("an operator has scaled prefill to 1")
    run.run(20.0 + 119.0)
    assert sizes_at(run, 139.0)[0] == 1
    assert run.autoscaler.view().held_s > 0
    run.run(220.0)
    assert run.size(Role.PREFILL) >= 3, "held for 120 s, not for ever"


def test_a_start_that_an_operator_takes_back_and_orders_anew_is_the_operators() -> None:
    """It waits for its place for as long as it takes."""
    run = model(scaling(start_wait_s=40, role_cooldown_s=900, role_window_s=900), poisson(8, (8.0, 100.0)), places=4)
    while not [row for row in run.core.table.rows.values() if row.unplaced]:
        run.step()
    name = "prefill-2"
    assert run.autoscaler is not None
    assert name in run.core.pools.scale({Role.PREFILL: 2})
    run.autoscaler.hold("an operator has scaled")
    run.run(run.now + 1.0)
    assert run.core.pools.add_some(Role.PREFILL, 1) == (name,)
    run.run(run.now + 60.0)
    assert [row.name for row in run.core.table.rows.values() if row.unplaced and row.wanted] == [name]
    assert not any("found no place" in text for text in told(run))


def test_a_worker_that_an_operator_drains_is_not_replaced_while_the_hold_lasts() -> None:
    """A drain is told to the worker itself: the controller hears of it by heartbeat."""
    run = model(scaling(decode={"min_workers": 2, "max_workers": 6}), poisson(11, (1.0, 300.0)))
    run.run(20.0)
    next(iter(run.pool(Role.DECODE))).draining = True
    run.run(130.0)
    assert run.size(Role.DECODE) == 1
    assert any("decode-0 was drained" in text for text in told(run))
    run.run(200.0)
    assert run.size(Role.DECODE) == 2, "after the hold the pool gets its least again"


def test_drains_of_a_node_hold_nothing() -> None:
    run = model(scaling(decode={"min_workers": 2, "max_workers": 6}), poisson(12, (1.0, 60.0)))
    run.run(10.0)
    run.core.pools.drain("node")
    run.run(30.0)
    assert run.autoscaler is not None
    assert run.autoscaler.view().held_s == 0


# ---------------------------------------------------------------- the controller's death


def test_a_controller_that_was_started_again_shrinks_nothing_before_a_whole_window() -> None:
    run = model(scaling(), poisson(13, (0.5, 400.0)), prefill=4, decode=4)
    run.run(95.0)  # Five seconds more, and the first worker would leave.
    run.restart_controller()
    run.run(95.0 + 99.0)
    assert (run.size(Role.PREFILL), run.size(Role.DECODE)) == (4, 4)
    run.run(95.0 + 130.0)
    assert run.size(Role.PREFILL) < 4


def test_starts_under_way_are_gone_on_with_and_not_made_twice() -> None:
    run = model(scaling(), poisson(14, (8.0, 300.0)))
    while run.core.table.rows.get("prefill-2") is None:  # type: ignore[call-overload]
        run.step()
    wanted = [row.name for row in run.core.table.rows.values() if row.wanted]
    run.restart_controller()
    run.run(run.now + COSTS.start_s + 2)
    assert {row.name for row in run.core.table.rows.values() if row.wanted} == set(wanted)
    assert run.size(Role.PREFILL) >= 3


def test_a_hold_survives_the_controller() -> None:
    run = model(scaling(), poisson(15, (8.0, 200.0)))
    run.run(10.0)
    assert run.autoscaler is not None
    run.autoscaler.hold("an operator has scaled prefill to 2")
    run.restart_controller()
    run.run(110.0)
    assert run.size(Role.PREFILL) == 2


# ---------------------------------------------------------------- roles


def shifting() -> AutoscalingModel:
    """Six workers, no more: first prompts are long, then answers are."""
    long_prompts = poisson(16, (1.6, 300.0), prompt=8000, answer=40)
    long_answers = poisson(17, (0.01, 300.0), (3.0, 500.0), prompt=200, answer=1500)
    keys = {"max_workers": 6, "shrink_window_s": 2000}
    return model(scaling(**keys), [*long_prompts, *(a for a in long_answers if a.at_s > 300.0)], prefill=3, decode=3)


def test_where_there_can_not_be_more_workers_change_to_the_role_that_is_short() -> None:
    run = shifting()
    run.run(300.0)
    assert sizes_at(run, 299.0)[0] >= 4, "long prompts: more prefill"
    run.run(800.0)
    run.run()
    assert sizes_at(run, 799.0)[1] >= 4, "long answers: more decode"
    assert all(prefill + decode <= 6 for _, prefill, decode in run.figures.sizes)
    assert turns(run, 0) <= 1, "each change of the load turns the ratio once"
    roles = [text for text in told(run) if "changes from" in text]
    assert roles
    assert run.autoscaler is not None
    assert run.autoscaler.view().counters["role_changes"] == len(roles)


def test_a_ratio_that_fits_is_left_as_it_is() -> None:
    run = model(scaling(max_workers=4), poisson(18, (4.0, 500.0), prompt=800, answer=60))
    run.run(500.0)
    assert run.autoscaler is not None
    assert run.autoscaler.view().counters["role_changes"] == 0


def test_a_worker_whose_new_role_does_not_start_comes_back_in_its_old_one() -> None:
    run = shifting()
    run.breaks = lambda start: start.role is Role.PREFILL
    while run.now < 200.0 and not any("comes back for decode" in text for text in told(run)):
        run.step()
    assert run.size(Role.DECODE) == 2
    run.run(run.now + COSTS.start_s + 5.0)
    assert (run.size(Role.PREFILL), run.size(Role.DECODE)) == (3, 3)
