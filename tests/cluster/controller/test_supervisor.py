"""What the supervisor carries between the controller and whoever starts processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinpool.cluster.assembly.node_shares import MemoryShort
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_actions import ControllerAction, EndedProcess, PlacedProcess, WorkerKey
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace
from twinpool.cluster.controller.supervisor import Supervisor
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, Role, WorkerName
from twinpool.contracts.messages.pool_changes import SettingsAnswer, SettingsChange
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus

NAME = WorkerName("decode-0")
A, B = NodePlace("a-0123456789", "a"), NodePlace("b-0123456789", "b")


class Hands:
    """A launcher that starts nothing and notes everything."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, tuple[str, ...]]] = []
        self.dead: list[EndedProcess] = []
        self.killed: list[tuple[str, int]] = []
        self.landed: list[PlacedProcess] = []

    def start(
        self, plan: Any, avoid: tuple[str, ...] = (), only: str = "", successor_of: Incarnation = NO_INCARNATION
    ) -> None:
        self.started.append((plan, avoid))

    def running(self) -> list[WorkerKey]:
        return []

    def kill(self, name: WorkerName, incarnation: Incarnation, pid: int, node: str) -> None:
        self.killed.append((name, incarnation))

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None: ...

    def nodes(self) -> tuple[NodePlace, ...]:
        return A, B

    def placed(self) -> list[PlacedProcess]:
        landed, self.landed = self.landed, []
        return landed

    def ended(self, timeout_s: float) -> list[EndedProcess]:
        dead, self.dead = self.dead, []
        return dead

    def close(self) -> None: ...


class Line:
    """The stream to a controller in this process."""

    def __init__(self, core: Controller) -> None:
        self._core = core
        self.nodes_told = 0
        self.answers: list[SettingsAnswer] = []

    def orders(self) -> list[ControllerAction]:
        return self._core.tick()

    def report(
        self,
        ended: Sequence[EndedProcess] = (),
        placed: Sequence[PlacedProcess] = (),
        nodes: Sequence[NodePlace] | None = None,
        settings: Sequence[SettingsAnswer] = (),
        room: ClusterRoom | None = None,
    ) -> None:
        self.answers += settings
        if nodes is not None:
            self.nodes_told += 1
            self._core.set_nodes(nodes)
        for dead in ended:
            self._core.died(dead.name, dead.incarnation, dead.reason)
        for at in placed:
            self._core.placed(at.name, at.incarnation, at.node)
        if room is not None:
            self._core.set_room(room)


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.core = Controller(self.clock, ClusterConfig(lease_s=10.0), MemoryLedger())
        self.hands = Hands()
        plan: Any = lambda start: start  # noqa: E731
        self.line, self.said, self.changes = Line(self.core), list[str](), list[SettingsChange]()
        self.supervisor = Supervisor(self.line, self.hands, plan, self.said.append, self.changer)
        self.core.pools.add(NAME, Role.DECODE)

    def changer(self, order: SettingsChange) -> SettingsAnswer:
        self.changes.append(order)
        return SettingsAnswer(order.number, refusal="no")

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
    assert scene.core.pools.drain("b") == ()
    scene.hands.landed = [PlacedProcess(NAME, Incarnation(1), B)]
    scene.poll()
    assert scene.hands.killed == [(NAME, 1)]
    assert [avoid for _, avoid in scene.hands.started] == [(), ("b",)]
    scene.hands.landed = [PlacedProcess(NAME, Incarnation(2), A)]
    scene.poll()
    scene.up(2, A)
    scene.poll()
    assert scene.state == "ready"
    assert len(scene.hands.started) == 2


def test_a_death_is_told_with_its_reason_and_a_start_that_failed_is_known() -> None:
    scene = Scene()
    scene.poll()
    scene.hands.dead = [EndedProcess(NAME, Incarnation(1), "no such folder")]
    scene.poll()
    scene.poll()
    assert scene.supervisor.failed == {NAME: "no such folder"}
    assert any("no such folder" in line for line in scene.said)
    assert [plan.incarnation for plan, _ in scene.hands.started] == [1, 2]


def test_nodes_are_told_when_they_change() -> None:
    scene = Scene()
    for _ in range(3):
        scene.poll()
    assert scene.line.nodes_told == 1


def test_a_change_of_settings_is_made_once_and_its_answer_told() -> None:
    scene = Scene()
    scene.poll()
    scene.core.table.act(SettingsChange("{}", dry_run=True, number=7))
    scene.poll()
    scene.poll()
    assert scene.changes == [SettingsChange("{}", dry_run=True, number=7)]
    assert scene.line.answers == [SettingsAnswer(7, refusal="no")]


def test_a_start_for_which_there_can_be_no_plan_is_told_as_its_end() -> None:
    scene = Scene()

    def no_room(start: object) -> Any:
        raise MemoryShort("no room")

    scene.supervisor = Supervisor(scene.line, scene.hands, no_room, scene.said.append, scene.changer)
    scene.poll()
    scene.poll(0.6)
    assert scene.hands.started == []
    assert scene.supervisor.failed == {NAME: "no room"}
    assert any("restarting" in line for line in scene.said)
