"""A follower's steps: how far they have come, by the layers that they take from the gate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.pool_sets import pool_sets
from twinpool.cache.device.cpu_device import AsyncCpuDevice, CpuDevice
from twinpool.cache.device.device_port import DeviceStream
from twinpool.cache.pool import tp_ranks
from twinpool.cache.pool.pool_set import LoadGate, PoolSet
from twinpool.cache.pool.tp_ranks import FollowerSteps
from twinpool.contracts.messages.rank_orders import LayerCount, MarkStep

SPEC = pool_sets()["full+state"]
LAYERS = {pool.name: pool.layers for pool in SPEC.pools}


def order(step: int, *counts: dict[str, int]) -> MarkStep:
    return MarkStep(step, tuple(tuple(LayerCount(*count) for count in group.items()) for group in counts))


@pytest.fixture
def gates() -> dict[str, LoadGate]:
    return PoolSet(SPEC, SPEC.even(4)).gates


@pytest.fixture
def steps(gates: dict[str, LoadGate]) -> FollowerSteps:
    return FollowerSteps(CpuDevice(), gates)


def reached(steps: FollowerSteps, step: int, groups: int = 2) -> list[bool]:
    """Whether each mark of a step has been reached: what is written after it comes after a completion that is done."""
    marks = [steps.written(step, group) for group in range(groups)]
    assert all(mark is not None and mark is not steps.last for mark in marks), "marks of this step are known"
    return [mark.done for mark in marks if mark is not None]


def model(gates: dict[str, LoadGate], *taken: tuple[str, int], note: Callable[[], object]) -> Callable[[], None]:
    """A step that takes these layers, and calls `note` after each."""

    def run() -> None:
        passes = {pool: gate.enter(pool) for pool, gate in gates.items()}
        for pool, layer in taken:
            passes[pool].layer(layer)
            note()

    return run


def test_a7_a_step_is_through_with_a_layer_when_it_takes_the_next_one_of_its_pool(
    steps: FollowerSteps, gates: dict[str, LoadGate]
) -> None:
    seen: list[list[bool]] = []
    steps.expect(order(1, {"full": 1, "state": 0}, {"full": 2, "state": 1}, LAYERS))
    layers = ("full", 0), ("state", 0), ("full", 1), ("state", 1), ("full", 2)
    steps.run(model(gates, *layers, note=lambda: seen.append(reached(steps, 1, 3))))
    early, first, second = [False] * 3, [True, False, False], [True, True, False]
    assert seen == [early, early, first, first, second]
    assert reached(steps, 1, 3) == [True] * 3, "its last layers are through when it is over"


def test_marks_are_of_the_step_that_they_were_asked_for(steps: FollowerSteps, gates: dict[str, LoadGate]) -> None:
    steps.expect(order(1, {"full": 1, "state": 1}, LAYERS))
    steps.run(lambda: None)
    steps.expect(order(2, {"full": 1, "state": 1}, LAYERS))
    assert (reached(steps, 1), reached(steps, 2)) == ([True, True], [False, False])
    steps.run(lambda: None)
    steps.run(model(gates, ("full", 0), ("full", 1), note=lambda: None))
    assert reached(steps, 2) == [True, True]
    assert steps.written(3, 0) is None, "a step that nobody asked for marks of has none"


def test_what_comes_after_a_step_that_was_not_ordered_yet_is_not_known(steps: FollowerSteps) -> None:
    assert steps.written(1, 0) is None
    steps.expect(order(1, {"full": 1, "state": 1}, LAYERS))
    mark = steps.written(1, 0)
    assert mark is not None
    assert not mark.done
    assert steps.written(0, 0) is steps.last


def test_marks_of_few_steps_are_kept_and_what_comes_after_an_older_one_comes_after_all(
    steps: FollowerSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tp_ranks, "_KEPT", 2)
    for step in (1, 2, 3):
        steps.expect(order(step, {"full": 1, "state": 1}, LAYERS))
        steps.run(lambda: None)
    assert steps.written(1, 0) is steps.last
    assert reached(steps, 2) == reached(steps, 3) == [True, True]


def broken() -> None:
    raise RuntimeError("out of resources")


def test_a_step_that_fails_fails_its_marks_and_raises_its_error(steps: FollowerSteps) -> None:
    steps.expect(order(1, {"full": 1, "state": 1}, LAYERS))
    with pytest.raises(RuntimeError, match="out of resources"):
        steps.run(broken)
    mark = steps.written(1, 0)
    assert mark is not None
    with pytest.raises(RuntimeError, match="out of resources"):
        mark.wait()


def test_a_step_with_marks_runs_when_it_is_looked_at_so_that_sends_can_wait_for_it_first() -> None:
    steps = FollowerSteps(AsyncCpuDevice(beside=(DeviceStream.SEND,)), PoolSet(SPEC, SPEC.even(4)).gates)
    steps.expect(order(1, {"full": 1, "state": 1}, LAYERS))
    ran: list[str] = []
    steps.run(lambda: ran.append("step"))
    assert (ran, steps.beside) == ([], True)
    assert steps.apply(lambda: [*ran]) == ["step"], "what is ordered later comes later"
    steps.expect(order(2, {"full": 1, "state": 1}, LAYERS))
    steps.run(broken)
    with pytest.raises(RuntimeError, match="out of resources"):
        steps.look()
    steps.close()


def test_marks_that_no_step_will_reach_fail_when_the_worker_ends(steps: FollowerSteps) -> None:
    steps.expect(order(1, {"full": 1, "state": 1}, LAYERS))
    mark = steps.written(1, 1)
    steps.close()
    assert mark is not None
    with pytest.raises(RuntimeError, match="the worker has ended"):
        mark.wait()
