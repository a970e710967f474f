"""Nodes that join a Ray while a cluster runs there, and leave it again: who measures them, and what is left on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from twinpool.cluster.assembly.node_shares import WorkerShare
from twinpool.cluster.worker_process.worker_plan import NodeUnmeasured, WorkerPlan
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Incarnation, Role, WorkerName

PLAN = WorkerPlan(
    WorkerName("decode-2"), Role.DECODE, Incarnation(1), Path("m"), Config(), {}, "", "", Path("logs"),
    by_node={"old": WorkerShare(1, {}, 0)},
)  # fmt: skip


A, B, C = (letter * 56 for letter in "abc")
"""Ray's ids of nodes."""


class TaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@dataclass
class Ray:
    """In Ray's place: actors whose `run` ends as a real one does on the node `place`."""

    place: str = "new"
    nodes_alive: list[str] = field(default_factory=lambda: ["old"])
    runs: list[Any] = field(default_factory=list)
    """The shares with which each `run` was called."""
    begun: list[tuple[str, int]] = field(default_factory=list)
    """The name and incarnation of each worker that was told to run."""
    actors: list[tuple[WorkerPlan, Any]] = field(default_factory=list)
    """The plan of each rank, and how Ray was told to place it."""
    killed: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    """Nodes on which agents were started."""
    exceptions: ClassVar[Any] = SimpleNamespace(
        RayTaskError=TaskError, RayError=(TaskError, KeyError), ActorUnschedulableError=ZeroDivisionError
    )

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": n, "Alive": True, "Resources": {"twinpool_decode": 1}, "NodeManagerHostname": f"host-{n}"}
            for n in self.nodes_alive
        ]

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **o: SimpleNamespace(remote=lambda *a: self._actor(o, a)))

    def _actor(self, options: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
        if not isinstance(arguments[0], WorkerPlan):
            node = options["scheduling_strategy"].node_id
            self.started.append(node)
            return node
        plan: WorkerPlan = arguments[0]
        self.actors.append((plan, options.get("scheduling_strategy")))

        def run(by_node: Any = None, leader_at: str = "") -> str:
            self.runs.append(by_node)
            self.begun.append((plan.name, plan.incarnation))
            try:
                (plan if by_node is None else replace(plan, by_node=by_node)).on(self.place)
            except NodeUnmeasured as error:
                return self._answer(TaskError(error))
            return self._answer(None)

        where = (7, 8, f"host-{self.place}", self.place)
        return SimpleNamespace(
            run=SimpleNamespace(remote=run), where=SimpleNamespace(remote=lambda: self._answer(where))
        )

    def __post_init__(self) -> None:
        self._answers: list[Any] = []

    def _answer(self, what: Any) -> str:
        self._answers.append(what)
        return f"ref {len(self._answers) - 1}"

    def get(self, ref: str, timeout: float) -> Any:
        what = self._answers[int(ref.split()[1])]
        if isinstance(what, Exception):
            raise what
        return what

    def wait(self, refs: list[str], **options: Any) -> tuple[list[str], list[str]]:
        """A `run` that goes on has the answer None."""
        done = [ref for ref in refs if self._answers[int(ref.split()[1])] is not None]
        return done, [ref for ref in refs if ref not in done]

    def kill(self, actor: Any, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor if isinstance(actor, str) else "worker")


def launcher(monkeypatch: pytest.MonkeyPatch, ray: Ray, shares: dict[str, WorkerShare]) -> Any:
    from twinpool.cluster.ray_nodes import worker_actors

    monkeypatch.setattr(worker_actors, "ray", ray)
    asked: list[Role] = []

    def told(role: Role) -> dict[str, WorkerShare]:
        asked.append(role)
        return shares

    made = worker_actors.RayLauncher(shares=told)
    return SimpleNamespace(made=made, asked=asked)


@pytest.mark.slow
def test_a_worker_on_a_node_that_joined_after_its_plan_begins_once_the_node_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its start has not failed: an autoscaler that had asked for the node would take it back, and wait."""
    ray, shares = Ray(), {"old": WorkerShare(1, {}, 0), "new": WorkerShare(2, {}, 0)}
    it = launcher(monkeypatch, ray, shares)
    it.made.start(PLAN)
    assert it.made.ended(0.1) == []
    assert it.made.ended(0.1) == []
    assert (ray.runs, it.asked) == ([None, shares], [Role.DECODE])
    assert it.made.running() == [("decode-2", 1)]
    assert it.made.nodes_in_use() == {"new"}
    assert [place.node.node_id for place in it.made.placed()] == ["new"]


@pytest.mark.slow
def test_a_worker_on_a_node_that_can_not_be_measured_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray()
    it = launcher(monkeypatch, ray, {"old": WorkerShare(1, {}, 0)})
    it.made.start(PLAN)
    ended = [one for _ in range(4) for one in it.made.ended(0.1)]
    assert [(one.name, "was not measured" in one.reason) for one in ended] == [("decode-2", True)]
    assert len(ray.runs) == 2
    assert it.made.running() == []


@pytest.mark.slow
def test_a_start_that_was_given_up_is_none_of_those_that_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that share their experts begin once all of them are asked for."""
    from twinpool.cluster.ray_nodes import worker_actor

    ray = Ray(place="old")
    it = launcher(monkeypatch, ray, {}).made
    monkeypatch.setattr(worker_actor, "placement_group", lambda bundles, **_: f"{len(bundles)} places")
    plan = replace(PLAN, config=replace(Config(), decode=replace(Config().decode, dp=2)))
    it.start(plan)
    it.start(replace(plan, name=WorkerName("decode-1")))
    it.kill(plan.name, Incarnation(2), 0, "")
    assert it.running() == [("decode-2", 1), ("decode-1", 1)], "they are of two groups, and another start was given up"
    it.kill(plan.name, plan.incarnation, 0, "")
    assert it.running() == [("decode-1", 1)]
    it.start(replace(plan, incarnation=Incarnation(2)))
    assert ray.begun == []
    it.start(replace(plan, name=WorkerName("decode-3")))
    assert ray.begun == [("decode-2", 2), ("decode-3", 1)]
    assert it.running() == [("decode-1", 1), ("decode-2", 2), ("decode-3", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_that_share_their_experts_have_one_place_and_one_secret(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """In the order of their numbers, whichever is asked for first, and where each of them may be."""
    from twinpool.cluster.ray_nodes import worker_actor, worker_actors

    ray, asked, given_back = Ray(place=C, nodes_alive=[A, B, C]), list[tuple[Any, Any]](), list[str]()

    def places(bundles: Any, **options: Any) -> str:
        asked.append((bundles, options["bundle_label_selector"]))
        return f"places {len(asked)}"

    it = launcher(monkeypatch, ray, {}).made
    monkeypatch.setattr(worker_actor, "placement_group", places)
    monkeypatch.setattr(worker_actors, "remove_placement_group", given_back.append)
    config = replace(Config(), decode=replace(Config().decode, dp=2, tp=ranks), prefill=replace(Config().prefill, dp=2))
    plan = replace(PLAN, config=config, by_node={})
    last = replace(plan, name=WorkerName("decode-3"))
    it.start(replace(plan, name=WorkerName("prefill-2"), role=Role.PREFILL))
    it.start(last, avoid=(f"host-{A}",))
    assert (asked, ray.actors) == ([], []), "one of another pool is none of them"
    it.start(plan, avoid=(f"host-{B}",))
    ((bundles, selectors),) = asked
    assert bundles == [{"twinpool_decode": 1.0}] * 2 * ranks
    assert selectors == [{worker_actor.NODE_LABEL: f"!in({A},{B})"}] * 2 * ranks
    assert [(made.name, made.rank, at.placement_group, at.placement_group_bundle_index) for made, at in ray.actors] == [
        (name, rank, "places 1", ranks * number + rank)
        for number, name in enumerate(("decode-2", "decode-3"))
        for rank in range(ranks)
    ]
    told = {(made.sharing, made.together) for made, _ in ray.actors}
    ((secret, together),) = told
    assert (len(secret) > 16, together) == (True, "decode-2.1.ranks")
    assert len({made.meeting for made, _ in ray.actors}) == ranks, "ranks of a worker meet among themselves"
    it.kill(plan.name, plan.incarnation, 0, "")
    assert given_back == [], "the other one is still there"
    it.kill(last.name, last.incarnation, 0, "")
    assert given_back == ["places 1"]


@pytest.mark.slow
def test_a_node_keeps_its_agent_while_workers_are_there_and_a_while_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """To an autoscaler of Ray, a node with an agent is never idle."""
    from twinpool.cluster.ray_nodes import ray_arena_agents
    from twinpool.cluster.ray_nodes.ray_arena_agents import IDLE_S, LOOK_S, RayArenaAgents

    ray, clock, used = Ray(nodes_alive=[A, B]), ManualClock(), {A, B}
    monkeypatch.setattr(ray_arena_agents, "ray", ray)
    agents = RayArenaAgents("00", clock, lambda: used)

    def later(seconds: float) -> None:
        for _ in range(int(seconds / LOOK_S) + 1):
            clock.advance(LOOK_S)
            agents.poll()

    agents.poll()
    assert sorted(ray.started) == [A, B]
    used.discard(B)
    later(IDLE_S - 3 * LOOK_S)
    assert not ray.killed
    later(3 * LOOK_S)
    assert ray.killed == [B]
    later(IDLE_S)
    assert (ray.killed, len(ray.started)) == ([B], 2)
    used.add(B)
    later(LOOK_S)
    assert ray.started[2:] == [B]
    ray.nodes_alive.append(C)
    later(LOOK_S)
    assert ray.started[3:] == [C], "before a worker is placed there"
    ray.nodes_alive.remove(B)
    later(LOOK_S)
    ray.nodes_alive.append(B)
    later(LOOK_S)
    assert ray.started[4:] == [B]
