"""The controller's table as watchers get it: whoever takes in its changes has the table, and gets nothing twice."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import OperatorNote
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView

PLACE = NodePlace("a" * 12, "a")


class Scene:
    def __init__(self, workers: int = 3) -> None:
        self.clock = ManualClock()
        self.core = Controller(self.clock, ClusterConfig(), MemoryLedger())
        self.core.set_nodes([PLACE])
        self.names = self.core.pools.add_some(Role.DECODE, workers)
        self.numbers: dict[WorkerName, Incarnation] = {}

    def start(self, *names: WorkerName) -> None:
        self.core.tick()
        for name in names or self.names:
            number = self.core.table.rows[name].incarnation
            fits = WorkerLimits(8, 8)
            self.core.register(WorkerRecord(name, Role.DECODE, number, 7, "a", "", "", fits, PLACE.node_id))
            self.numbers[name] = number
            self.heartbeat(name)

    def heartbeat(
        self, name: WorkerName, *, state: str = "ready", running: int = 0, steps: float | None = None
    ) -> None:
        """`steps`: its one counter; None: it leaves its counters out."""
        number = self.numbers[name]
        status = WorkerStatus(name, Role.DECODE, state, 7, "a", number, running, 0, 1, 1)
        counters = {} if steps is None else {"steps": steps}
        self.core.renew(name, number, replace(status, counters=counters, counters_left_out=steps is None))


def test_a_change_of_numbers_is_told_of_the_worker_that_it_is_of_and_once() -> None:
    scene = Scene()
    scene.start()
    before = scene.core.table.version
    assert scene.core.changes(before) == []
    scene.heartbeat(scene.names[1], running=4)
    (change,) = scene.core.changes(before)
    assert (change.view.record.name, change.view.status.running) == (scene.names[1], 4)
    assert (change.whole, change.counters) == (False, False)
    assert scene.core.changes(scene.core.table.version) == []


@pytest.mark.parametrize("steps", [None, 3.0])
def test_counters_are_told_where_they_were_said(steps: float | None) -> None:
    scene = Scene()
    scene.start()
    before = scene.core.table.version
    scene.heartbeat(scene.names[0], running=1, steps=steps)
    (change,) = scene.core.changes(before)
    assert change.counters == (steps is not None)


def test_a_change_of_state_is_told_whole() -> None:
    scene = Scene()
    scene.start()
    before = scene.core.table.version
    scene.heartbeat(scene.names[2], state="draining")
    (change,) = scene.core.changes(before)
    assert (change.view.record.name, change.view.status.state, change.whole) == (scene.names[2], "draining", True)


@pytest.mark.parametrize("seed", range(10))
def test_who_takes_in_all_changes_has_the_table(seed: int) -> None:
    rng = random.Random(seed)
    scene, mine, since = Scene(4), dict[WorkerName, WorkerView](), 0
    scene.start()
    for _ in range(60):
        name = rng.choice(scene.names)
        match rng.randrange(5):
            case 0 if name in scene.numbers:
                scene.heartbeat(name, running=rng.randrange(9), steps=rng.choice((None, 1.0)))
            case 1:
                scene.core.pools.cordon("a")
            case 2:
                scene.core.pools.uncordon("a")
            case 3 if name in scene.numbers:
                scene.core.died(name, scene.numbers.pop(name), "killed")
            case _:
                scene.clock.advance(30.0)
                if name not in scene.numbers and "a" not in scene.core.table.nodes.names:
                    scene.start(name)
        if rng.random() < 0.5:
            continue
        for change in scene.core.changes(since):
            view = change.view
            old = mine.get(view.record.name)
            if not change.whole:  # Only numbers of the status: the rest is what was told before.
                assert old is not None
                view = WorkerView(old.record, view.status, old.cordoned)
            if not change.counters and old is not None:
                view = replace(view, status=replace(view.status, counters=old.status.counters))
            mine[view.record.name] = view
        since = scene.core.table.version
        there = {view.record.name: view for view in scene.core.views()}
        assert {name: (v.status.state, v.status.running, v.cordoned) for name, v in mine.items()} == {
            name: (v.status.state, v.status.running, v.cordoned) for name, v in there.items()
        }


def test_the_operator_is_told_why_a_start_is_made_anew() -> None:
    scene = Scene(1)
    scene.core.tick()
    scene.core.pools.restart(scene.names[0])
    notes = [action.text for action in scene.core.tick() if isinstance(action, OperatorNote)]
    assert f"{scene.names[0]} is started anew: an operator restarts it" in notes
