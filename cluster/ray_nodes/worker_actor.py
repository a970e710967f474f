"""The Ray actor that is the process of a worker's rank, and what launchers know of it.

The actor has methods that run side by side: `where` returns its process and node, `run` is the whole life of the
workers that its process is, one after the other, and `go_on` gives it the plan of the next one.

Where such a process goes on in another role, Ray can't take back the place that its actor was started in. So it takes
a place of its new role besides, on its node, by a placement group without processes. It is found by its name by the
launchers that come after this one.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import re
import threading
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from twinpool.cluster.assembly.node_shares import WorkerShare
from twinpool.cluster.controller.controller_actions import WorkerKey
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.cluster.rank_links import RankSocket
from twinpool.cluster.ray_nodes.ray_facts import RESOURCES
from twinpool.cluster.worker_process.worker_plan import WorkerPlan, node_name, process_mark, rank_link_timeout_s
from twinpool.cluster.worker_process.worker_process import TERMINATED, NextPlan, PlannedWorkers, run_worker
from twinpool.contracts.build_id import build_id
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.python_command import COLLECT_AFTER

NODE_LABEL = "ray.io/node-id"
PLACE_WAIT_S = 5.0
"""Seconds in which Ray gives a place that is free on a node."""
_NAMED = re.compile(r"[a-z]+-\d+\.\d+\.(place|ranks)")


def place_name(worker: WorkerKey) -> str:
    """The name of the placement group with the places of an incarnation."""
    return f"{worker[0]}.{worker[1]}.place"


def ranks_name(actor: str) -> str:
    """The name of the placement group that a worker of several ranks was started in, by its leader's actor; or that
    workers were which share their experts, by that of the first."""
    return f"{actor}.ranks"


def take_places(worker: WorkerKey, resources: dict[str, float], nodes: Sequence[str], *, kept: bool) -> Any:
    """Ask for a place with `resources` on the node of each rank of a worker, by Ray id; returns their placement group.
    `kept`: beyond this process."""
    here = [{NODE_LABEL: node} for node in nodes]
    return placement_group(
        [resources] * len(here),
        strategy="PACK" if len(set(nodes)) > 1 else "STRICT_PACK",
        bundle_label_selector=here,
        name=place_name(worker),
        lifetime="detached" if kept else None,
    )


def places_for_ranks(
    plan: WorkerPlan, size: int, elsewhere: dict[str, str], *, kept: bool, free: Mapping[str, float] | None = None
) -> Any:
    """Ask for a place for each of `size` ranks, or none; returns their placement group. They are on one node; where the
    plan's may be on several, and no node is free for all, on as few as Ray finds. `elsewhere`: the label selector of
    the nodes. `kept`: beyond this process. `free`: how many ranks each node has places for now, by Ray id."""
    labels = {"bundle_label_selector": [elsewhere] * size} if elsewhere else {}
    named = ranks_name(f"{plan.name}.{plan.incarnation}")
    bundles = [rank_resources(plan) for _ in range(size)]
    lifetime = "detached" if kept else None

    def ask(strategy: str) -> Any:
        return placement_group(bundles, strategy=strategy, name=named, lifetime=lifetime, **labels)

    if not plan.config.over_hosts(plan.role):
        return ask("STRICT_PACK")
    if max((free or {}).values(), default=0) >= size:
        group = ask("STRICT_PACK")
        if places_taken(group):
            return group
        remove_placement_group(group)  # What was free is another's by now.
    return ask("PACK")


def free_places(plan: WorkerPlan, nodes: Container[str]) -> dict[str, float]:
    """How many ranks of a worker each of these nodes has places for now, by Ray id."""
    import ray._private.state

    needs = rank_resources(plan)
    return {
        node: min(there.get(name, 0.0) // count for name, count in needs.items())
        for node, there in ray._private.state.available_resources_per_node().items()
        if node in nodes
    }


def places_taken(group: Any) -> bool:
    """Whether places that were asked for were free."""
    return bool(group.wait(PLACE_WAIT_S))


def kept_places(workers: Container[str]) -> dict[str, Any]:
    """The placement groups that earlier launchers of this cluster have made for `workers` (`place_name`, `ranks_name`),
    by name. Those of workers that have ended are removed."""
    found = {}
    for row in ray.util.placement_group_table().values():
        if not _NAMED.fullmatch(row["name"]) or row["state"] == "REMOVED":
            continue
        try:
            group = ray.util.get_placement_group(row["name"])
        except ValueError:
            continue  # Of another cluster on this Ray.
        if row["name"] in workers:
            found[row["name"]] = group
        else:
            remove_placement_group(group)
    return found


def rank_resources(plan: WorkerPlan) -> dict[str, float]:
    """What Ray must have on a node for one rank of a worker."""
    return {RESOURCES[plan.role]: 1.0} | ({"GPU": 1.0} if plan.gpus_of_ray else {})


def kept_key(plan: WorkerPlan) -> str:
    """Digest of all that the process of a rank keeps when it goes on as another worker: of two plans with the same key
    one can follow the other in a process."""
    ranks = plan.config.ranks_for(plan.role), plan.config.pp_for(plan.role)
    keeps = [
        build_id(),
        str(plan.model),
        repr(plan.config.engine),
        *ranks,
        plan.host,
        list(plan.cards),
        plan.gpus_of_ray,
    ]
    return hashlib.blake2b(json.dumps(keeps).encode(), digest_size=16).hexdigest()


class ActorPlacement(NamedTuple):
    """The process and node of an actor; all fields are empty where the actor died before it told them."""

    pid: int = 0
    started: int = 0
    """The process's start time (`process_ids.start_time`)."""
    node: str = ""
    """The node's host name."""
    node_id: str = ""
    """The Ray node id."""


class StartedRank(NamedTuple):
    """What a launcher knows of a rank that was started. It is told to launchers of other builds, too, so it goes as
    values that any build reads (`to_tree`)."""

    name: WorkerName
    incarnation: Incarnation
    rank: int
    logs: Path
    resources: dict[str, float]
    """What its worker asks Ray for, on its node."""
    held: dict[str, float] | None = None
    """What its process has of Ray since it was started; None: `resources`."""
    kept: str = ""
    """Digest of what its process keeps when it goes on as another worker (`kept_key`); empty: it can't."""
    ranks: int = 1
    """How many ranks its worker has."""
    runs: bool = True
    """Whether it was told to run: a launcher that dies in between has made an actor that nobody tells."""
    together: str = ""
    """`WorkerPlan.together`."""

    @classmethod
    def of(cls, plan: WorkerPlan) -> StartedRank:
        ranks = plan.config.ranks_for(plan.role)
        resources, kept = rank_resources(plan), kept_key(plan)
        started = cls(plan.name, plan.incarnation, plan.rank, plan.logs, resources, kept=kept, ranks=ranks)
        return started._replace(together=plan.together)

    def to_tree(self) -> dict[str, Any]:
        return {**self._asdict(), "logs": str(self.logs)}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> StartedRank:
        known = {name: tree[name] for name in cls._fields if name in tree or name not in cls._field_defaults}
        return cls(**known | {"logs": Path(tree["logs"])})

    @property
    def key(self) -> WorkerKey:
        return self.name, self.incarnation


class AskedStart(NamedTuple):
    """A start that a launcher was asked for (`WorkerLauncher.start`)."""

    plan: WorkerPlan
    avoid: tuple[str, ...]
    only: str


@dataclass(slots=True)
class FollowerActor:
    """A launcher's view of a rank from 1 on."""

    rank: int
    handle: Any
    where: Any
    at: ActorPlacement | None = None
    meets: Any = ""
    """The Ray reference of where its leader listens, which may be on another node; empty: on its own."""


@dataclass(slots=True)
class RunningWorker:
    """A launcher's view of a worker that it has started or taken over."""

    started: StartedRank
    handle: Any
    run: Any
    where: Any
    asked_at: float
    """When Ray was asked for it, by the launcher's clock."""
    at: ActorPlacement | None = None
    followers: dict[Any, FollowerActor] = field(default_factory=dict)
    """The other ranks, by the Ray reference of their `run`."""
    why: str = ""
    """Why this launcher killed the worker; empty where it didn't."""
    group: Any = None
    """The placement group of a worker of several ranks; None for one rank."""
    place: Any = None
    """The placement group that holds its places in a role that it has changed to; None where it was started in it."""
    role: Role | None = None
    """Its role; None where another launcher has started it."""
    dismissed: bool = False
    """Whether its other ranks were killed and its places given back."""
    again: set[Any] = field(default_factory=set)
    """The Ray references of those `run`s that are their rank's second (`RayLauncher._run_again`)."""

    @property
    def nodes(self) -> list[NodePlace]:
        """The node of each rank that has told it, the leader's first."""
        told = [self.at, *(follower.at for follower in self.followers.values())]
        return [NodePlace(at.node_id, at.node) for at in told if at is not None]

    @property
    def placed(self) -> bool:
        """Whether all its ranks have told where they are."""
        return self.at is not None and all(follower.at is not None for follower in self.followers.values())


class WorkerActor:
    """The Ray actor of one rank of one incarnation of a worker, of either role."""

    def __init__(self, plan: WorkerPlan) -> None:
        gc.set_threshold(*COLLECT_AFTER)  # Before it imports torch.
        self._plan, self._held = plan, rank_resources(plan)
        self._workers = PlannedWorkers()
        self._next = NextPlan()
        self._meeting: RankSocket | None = None
        self._runs = False
        self._outlasted, self._lock = threading.Event(), threading.Lock()
        TERMINATED.listen()

    def where(self) -> ActorPlacement:
        """The actor's process and node."""
        return ActorPlacement(*process_mark(), node_name(), ray.get_runtime_context().get_node_id())

    def meet(self) -> str:
        """Listen for the worker's other ranks, which may be on other nodes; returns where."""
        host = self._plan.host or ray.util.get_node_ip_address()
        self._meeting = RankSocket(self._plan.meeting, host, rank_link_timeout_s(self._plan.config))
        return self._meeting.endpoint

    def started(self) -> dict[str, Any]:
        """What a launcher that takes the actor over must know (`StartedRank`)."""
        return StartedRank.of(self._plan)._replace(held=self._held, runs=self._runs).to_tree()

    def outlast(self) -> None:
        """Return when it is called again: a launcher that came after the one of `run` learns by this call's end that
        the process is gone, or that the next launcher has come. So however many come, one such call runs."""
        with self._lock:
            self._outlasted.set()
            self._outlasted = mine = threading.Event()
        mine.wait()

    def run(self, by_node: Mapping[str, WorkerShare] | None = None, leader_at: str = "") -> None:
        """Be the rank until the worker ends. Never returns: the process exits then.

        `by_node`: shares in place of the plan's. `leader_at`: `WorkerPlan.leader_at`. Raises `NodeUnmeasured` where
        this node has none; the actor goes on, and may be called again.
        """
        plan = self._here(self._plan if by_node is None else dataclasses.replace(self._plan, by_node=by_node))
        plan = dataclasses.replace(plan, leader_at=leader_at)
        self._runs = True
        if plan.rank:
            from twinpool.cluster.worker_process.follower_process import run_follower

            run_follower(plan, lambda: self._following(None))  # Its leader's end is its own.
        self._workers.meeting = self._meeting
        run_worker(plan, self._workers, self._following)

    def go_on(self, plan: WorkerPlan) -> None:
        """Have the process go on by this plan, when its worker has left for that."""
        self._plan = plan
        self._next.give(plan)

    def _following(self, timeout_s: float | None) -> WorkerPlan | None:
        plan = self._next.take(timeout_s)
        return self._here(plan) if plan is not None else None

    @staticmethod
    def _here(plan: WorkerPlan) -> WorkerPlan:
        """The plan with this node's share and address. Raises `NodeUnmeasured` for a node that was not measured."""
        plan = plan.on(ray.get_runtime_context().get_node_id())
        return plan if plan.host else dataclasses.replace(plan, host=ray.util.get_node_ip_address())


def crash_line(path: Path) -> str:
    """The last "Fatal Python error" line that faulthandler wrote to the end of the log; empty without one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    crashes = [line for line in lines if line.startswith("Fatal Python error")]
    return crashes[-1] if crashes else ""
