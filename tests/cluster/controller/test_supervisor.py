"""What the supervisor carries between the controller and whoever starts processes."""

from __future__ import annotations

import types
from typing import Any

from cluster.controller.controller import Controller, NodePlace
from cluster.controller.incarnation_ledger import MemoryLedger
from cluster.controller.supervisor import Supervisor
from cluster.controller.worker_launcher import WorkerEnded, WorkerPlaced
from contracts.clock import ManualClock
from contracts.config.cluster_config import ClusterConfig
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus

NAME = WorkerName("decode-0")
A, B = NodePlace("a-0123456789", "a"), NodePlace("b-0123456789", "b")


class Hands:
    """A launcher that starts nothing and notes everything."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, tuple[str, ...]]] = []
        self.killed: list[tuple[str, int]] = []
        self.landed: list[WorkerPlaced] = []

    def start(self, plan: Any, avoid: tuple[str, ...] = ()) -> None:
        self.started.append((plan, avoid))

    def kill(self, name: WorkerName, incarnation: Incarnation, pid: int, node: str) -> None:
        self.killed.append((name, incarnation))

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None: ...

    def nodes(self) -> tuple[NodePlace, ...]:
        return A, B

    def placed(self) -> list[WorkerPlaced]:
        landed, self.landed = self.landed, []
        return landed

    def ended(self, timeout_s: float) -> list[WorkerEnded]:
        return []

    def close(self) -> None: ...


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.core = Controller(self.clock, ClusterConfig(lease_s=10.0), MemoryLedger())
        self.hands = Hands()
        server: Any = types.SimpleNamespace(call=lambda run: run(self.core))
        plan: Any = lambda start: start  # noqa: E731
        self.supervisor = Supervisor(server, self.hands, plan, lambda line: None, self.clock)
        self.core.add(NAME, Role.DECODE)

    def poll(self, after_s: float = 0.1) -> None:
        self.clock.advance(after_s)
        self.supervisor.poll(0.0)

    def up(self, incarnation: int, node: NodePlace) -> None:
        number = Incarnation(incarnation)
        self.core.register(
            WorkerRecord(NAME, Role.DECODE, number, 7, node.host, "", "", WorkerLimits(1, 1), node.node_id)
        )
        self.core.renew(NAME, number, WorkerStatus(NAME, Role.DECODE, "ready", 7, "", number, 0, 0, 1, 1))

    @property
    def state(self) -> str:
        return self.core.views()[0].status.state


def test_a_start_that_lands_on_a_node_that_was_cordoned_meanwhile_is_ended_and_placed_elsewhere() -> None:
    scene = Scene()
    scene.poll()
    assert [avoid for _, avoid in scene.hands.started] == [()]
    assert scene.core.drain("b") == ()
    scene.hands.landed = [WorkerPlaced(NAME, Incarnation(1), B)]
    scene.poll()
    assert scene.hands.killed == [(NAME, 1)]
    assert [avoid for _, avoid in scene.hands.started] == [(), ("b",)]
    scene.hands.landed = [WorkerPlaced(NAME, Incarnation(2), A)]
    scene.poll()
    scene.up(2, A)
    scene.poll()
    assert scene.state == "ready"
    assert len(scene.hands.started) == 2


def test_a_supervisor_that_stood_still_ends_no_lease_for_the_heartbeats_that_it_did_not_hear() -> None:
    scene = Scene()
    scene.poll()
    scene.up(1, A)
    scene.poll(60.0)
    assert scene.state == "ready", "its heartbeats may wait in the queue behind this"
    for _ in range(99):
        scene.poll()
    assert scene.state == "ready"
    for _ in range(30):
        scene.poll()
    assert scene.hands.killed == [(NAME, 1)], "one that says nothing is ended as ever"
