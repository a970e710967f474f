"""Ray actors as the processes of workers, and the launcher that places them on nodes and learns of their death at once.

Ray starts a process where the role's custom resource is free and tells when it ends; nothing else goes through Ray.
Ray's own restarts are off, because only the controller may grant the next incarnation.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinpool.cluster.arena.local_agent import ArenaAgents, NoArenaAgents
from twinpool.cluster.assembly.node_shares import WorkerShare
from twinpool.cluster.controller.controller_actions import EndedProcess, PlacedProcess, WorkerKey
from twinpool.cluster.controller.node_room import NodePlace
from twinpool.cluster.processes.process_ids import kill_process
from twinpool.cluster.ray_nodes.ray_facts import RESOURCES, has_places
from twinpool.cluster.ray_nodes.worker_actor import (
    NODE_LABEL,
    ActorPlacement,
    AskedStart,
    FollowerActor,
    RunningWorker,
    StartedRank,
    WorkerActor,
    crash_line,
    free_places,
    kept_places,
    place_name,
    places_for_ranks,
    places_taken,
    ranks_name,
    take_places,
)
from twinpool.cluster.worker_process.worker_plan import NodeUnmeasured, WorkerPlan, exit_file, node_name
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, Role, WorkerName, dp_rank

log = logging.getLogger("twinpool.actors")

LOOK_S = 2.0
"""Seconds between two looks for nodes that have joined or gone."""
CALLS_AT_ONCE = 4
"""Calls that an actor serves at once: `run`, `outlast` of the latest two launchers, and a short one."""
_NAMED = re.compile(r"[a-z]+-\d+\.\d+(\.rank\d+)?")
"""Names of workers' actors: worker, incarnation, and the rank of all but the leader."""
PLACED_AGAIN_S = 15.0
"""Seconds that a control store which was started again has to place what it was asked for before."""
TOLD_S, LOOK_AGAIN_S = 2.0, 0.1
"""How long an actor may take to be told to run by a launcher that has ended, and how often it is looked at."""
GET_TIMEOUT_S = 10.0
"""How long fetching a result that is ready may take before it counts as lost."""


Shares = Callable[[Role], Mapping[str, WorkerShare]]
"""The share of a worker of a role on each node, by Ray id, once nodes that have just joined are measured."""


class RayLauncher:
    """The `WorkerLauncher` over a Ray cluster that this process has joined."""

    def __init__(
        self,
        agents: ArenaAgents | None = None,
        clock: Clock | None = None,
        *,
        detached: bool = False,
        store_restarted_at: Callable[[], float | None] = lambda: None,
        shares: Shares | None = None,
    ) -> None:
        """`detached`: whether workers outlive this process; the next one takes them over by `adopt`.
        `store_restarted_at`: when Ray's control store was started again last, by the same clock. `shares`: asked for a
        worker that Ray has placed on a node which joined after its plan was made; None: nodes don't join."""
        self._detached, self._store_restarted_at, self._shares = detached, store_restarted_at, shares
        self._agents, self._clock = agents or NoArenaAgents(), clock or SystemClock()
        self._nodes: tuple[NodePlace, ...] = ()
        self._look_at = self._clock.now()
        self._placed: list[PlacedProcess] = []
        # Once: Ray keeps the export of each remote class for ever, and workers are started again and again.
        self._class = ray.remote(WorkerActor)
        self._running: dict[Any, RunningWorker] = {}
        self._forming: dict[WorkerKey, AskedStart] = {}
        """Workers whose start waits for those of the workers that they share their experts with."""

    def nodes(self) -> tuple[NodePlace, ...]:
        if self._clock.now() >= self._look_at:
            self._look_at = self._clock.now() + LOOK_S
            try:
                alive = [node for node in ray.nodes() if node["Alive"] and has_places(node["Resources"])]
            except Exception as error:  # Ray's own, of many kinds; `OwnRay.lost` says when Ray itself is gone
                log.warning("Ray doesn't tell its nodes: %s", error)
            else:
                self._nodes = tuple(NodePlace(node["NodeID"], node["NodeManagerHostname"]) for node in alive)
        return self._nodes

    def placed(self) -> list[PlacedProcess]:
        placed, self._placed = self._placed, []
        return placed

    def running(self) -> list[WorkerKey]:
        return [*list(self._forming), *(one.started.key for one in list(self._running.values()))]

    def adopt(self) -> None:
        """Take over the workers that an earlier process of this kind has started and that still run. Those that don't
        answer are ended, as are ranks without their leader: nobody else would, and they hold memory and places."""
        names = [name for name in ray.util.list_named_actors() if _NAMED.fullmatch(name)]
        holders: dict[str, RunningWorker] = {}
        for name in sorted(names, key=lambda name: "rank" in name):
            try:
                handle = ray.get_actor(name)
            except (ValueError, ray.exceptions.RayError) as error:
                log.warning("%s is not taken over: %s", name, error)
                continue
            try:
                if (running := self._take_over(handle)) is not None:
                    holders |= {ranks_name(name): running, place_name(running.started.key): running}
                    holders |= {running.started.together: running} if running.started.together else {}
            except (ValueError, KeyError, AttributeError, ray.exceptions.RayError) as error:
                log.warning("%s is not taken over, and ends: %s", name, error)
                ray.kill(handle, no_restart=True)  # In seconds, also where its process is stopped.
        for name, group in kept_places(holders).items():
            if name == place_name(holders[name].started.key):
                holders[name].place = group
            else:
                holders[name].group = group
        for running in [one for one in self._running.values() if len(one.followers) < one.started.ranks - 1]:
            log.warning("%s is not taken over, and ends: it lacks ranks", running.started.name)
            self._kill(running)
            del self._running[running.run]

    def _take_over(self, handle: Any) -> RunningWorker | None:
        """Take over one rank; returns its worker where it is the leader. Raises Ray's errors, and `ValueError` for one
        that isn't told to run, or whose leader isn't taken over."""
        deadline = time.monotonic() + TOLD_S
        while not (started := StartedRank.from_tree(ray.get(handle.started.remote(), timeout=GET_TIMEOUT_S))).runs:
            if time.monotonic() > deadline:
                raise ValueError("its launcher ended before it had told it to run")
            threading.Event().wait(LOOK_AGAIN_S)
        if not started.rank:
            now = self._clock.now()
            running = RunningWorker(started, handle, handle.outlast.remote(), handle.where.remote(), now)
            self._running[running.run] = running
            return running
        leader = next((one for one in self._running.values() if one.started.key == started.key), None)
        if leader is None:
            raise ValueError("its leader isn't there")
        leader.followers[handle.outlast.remote()] = FollowerActor(started.rank, handle, handle.where.remote())
        return None

    def start(
        self,
        plan: WorkerPlan,
        avoid: tuple[str, ...] = (),
        only: str = "",
        successor_of: Incarnation = NO_INCARNATION,
    ) -> None:
        if successor_of and self._goes_on(plan, successor_of):
            return
        if plan.config.dp_for(plan.role) > 1:
            self._form(plan, avoid, only)
            return
        size = plan.config.ranks_for(plan.role)
        elsewhere = self._elsewhere(plan, avoid, only)
        group = None
        if size > 1:
            free = free_places(plan, self._allowed(plan, avoid, only)) if plan.config.over_hosts(plan.role) else None
            group = places_for_ranks(plan, size, elsewhere, kept=self._detached, free=free)
        self._begin(plan, group, elsewhere)

    def _begin(self, plan: WorkerPlan, group: Any, elsewhere: dict[str, str], first: int = 0) -> None:
        """Have a worker's ranks run, in the places of `group` from `first` on; the first worker gives them back."""
        size = plan.config.ranks_for(plan.role)
        if size > 1:
            plan = dataclasses.replace(plan, meeting=secrets.token_hex(32))
        ranks = [dataclasses.replace(plan, rank=rank) for rank in range(size)]
        leader, *followers = [self._actor(rank, group, elsewhere, first) for rank in ranks]
        # Ray gives the followers what the leader's call returns, once it has.
        meets = leader.meet.remote() if plan.config.over_hosts(plan.role) else ""
        runs = {
            handle.run.remote(leader_at=meets): FollowerActor(rank, handle, handle.where.remote(), meets=meets)
            for rank, handle in enumerate(followers, 1)
        }
        started, run, where = StartedRank.of(plan), leader.run.remote(), leader.where.remote()
        held = None if first else group
        self._running[run] = RunningWorker(
            started, leader, run, where, self._clock.now(), followers=runs, group=held, role=plan.role
        )

    def _form(self, plan: WorkerPlan, avoid: tuple[str, ...], only: str) -> None:
        """Start the workers that share their experts, on one node, once all of them are asked for."""
        size = plan.config.dp_for(plan.role)
        self._forming[plan.name, plan.incarnation] = AskedStart(plan, avoid, only)
        mine = plan.role, dp_rank(plan.name, size)[0]
        asked = [one for one in self._forming.values() if (one.plan.role, dp_rank(one.plan.name, size)[0]) == mine]
        if len(asked) < size:
            return
        asked.sort(key=lambda one: dp_rank(one.plan.name, size)[1])
        first, secret = asked[0], secrets.token_hex(32)
        elsewhere = self._elsewhere(first.plan, tuple(name for one in asked for name in one.avoid), first.only)
        ranks = first.plan.config.ranks_for(first.plan.role)
        group = places_for_ranks(first.plan, size * ranks, elsewhere, kept=self._detached)
        together = ranks_name(f"{first.plan.name}.{first.plan.incarnation}")
        for number, one in enumerate(asked):
            del self._forming[one.plan.name, one.plan.incarnation]
            sharing = dataclasses.replace(one.plan, sharing=secret, together=together)
            self._begin(sharing, group, {}, number * ranks)

    def nodes_in_use(self) -> set[str]:
        """The nodes, by Ray id, on which processes of workers run or start."""
        return {node.node_id for running in self._running.values() for node in running.nodes}

    def _goes_on(self, plan: WorkerPlan, before: Incarnation) -> bool:
        """Have the process of incarnation `before` go on by this plan; returns whether it does. One that can't is
        killed."""
        running = next((one for one in self._running.values() if one.started.key == (plan.name, before)), None)
        if running is None:
            return False
        started = StartedRank.of(plan)
        why = self._why_not(running, started)
        if not why and not self._take_places(running, started):
            why = f"its node has no free place with {' and '.join(started.resources)}"
        if why:
            log.info("a process can't go on", extra={"worker": plan.name, "reason": why})
            running.why = why
            self._kill(running)
            return False
        assert running.at is not None, "its place was found by its node"
        running.role = plan.role
        running.started = started._replace(held=running.started.held or running.started.resources)
        running.handle.go_on.remote(plan)
        for follower in running.followers.values():
            follower.handle.go_on.remote(dataclasses.replace(plan, rank=follower.rank))
        self._tell(running)
        return True

    def _tell(self, running: RunningWorker) -> None:
        """Tell the nodes of a worker's ranks, as far as they are known."""
        if running.at is not None:
            first, *others = running.nodes
            apart = tuple(others) if any(node != first for node in others) else ()
            self._placed.append(PlacedProcess(*running.started.key, first, apart))

    @staticmethod
    def _why_not(running: RunningWorker, started: StartedRank) -> str:
        """Why a process can't go on as another worker, in words; empty where it can."""
        if running.why:
            return running.why
        if not started.kept or running.started.kept != started.kept:
            return "what it would keep is not as the new plan has it: build, model, engine settings, ranks or address"
        return "" if running.at is not None and running.at.node_id else "its node isn't known"

    def _take_places(self, running: RunningWorker, started: StartedRank) -> bool:
        """Take the places of a worker's new role on its node, and give back those of its last change; returns whether
        they were free."""
        _leave_places(running)
        held = running.started.held or running.started.resources
        more = {name: count for name, count in started.resources.items() if name not in held}
        if more and not running.placed:
            return False
        if more:
            nodes = [node.node_id for node in running.nodes]
            running.place = take_places(started.key, more, nodes, kept=self._detached)
            return places_taken(running.place)
        return True

    def _elsewhere(self, plan: WorkerPlan, avoid: tuple[str, ...], only: str) -> dict[str, str]:
        """A Ray label selector that excludes the nodes of `avoid`, all but the one of `only`, and those that the plan
        has no share for; empty where there are none. Ray labels each node with its id."""
        allowed = self._allowed(plan, avoid, only)
        ids = [node.node_id for node in self.nodes() if node.node_id not in allowed]
        return {NODE_LABEL: f"!in({','.join(ids)})"} if ids else {}

    def _allowed(self, plan: WorkerPlan, avoid: tuple[str, ...], only: str) -> set[str]:
        """The nodes that the worker may be placed on, by Ray id."""
        return {
            node.node_id
            for node in self.nodes()
            if not any(node.named(name) for name in avoid)
            and (not only or node.named(only))
            and (not plan.by_node or node.node_id in plan.by_node)
        }

    def _actor(self, plan: WorkerPlan, group: Any, elsewhere: dict[str, str], first: int = 0) -> Any:
        """Create the actor of one rank; its `run` is not called yet. `first`: the number of the placement group's place
        that rank 0 has."""
        placed: dict[str, Any] = {"lifetime": "detached"} if self._detached else {}
        if group is not None:
            placed["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, first + plan.rank)
        elif elsewhere:
            placed["label_selector"] = elsewhere
        actor = self._class.options(
            num_cpus=0,
            num_gpus=plan.gpus_of_ray,
            resources={RESOURCES[plan.role]: 1},
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=CALLS_AT_ONCE,
            name=f"{plan.name}.{plan.incarnation}" + (f".rank{plan.rank}" if plan.rank else ""),
            **placed,
        )
        return actor.remote(plan)

    def kill(self, name: WorkerName, incarnation: Incarnation, pid: int, node: str) -> None:
        self._forming.pop((name, incarnation), None)
        for running in list(self._running.values()):
            if running.started.key == (name, incarnation):
                self._kill(running)

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None:
        self._agents.forget(name, before)

    def ended(self, timeout_s: float) -> list[EndedProcess]:
        waiting = [*self._running, *(r.where for r in self._running.values() if r.at is None)]
        for running in self._running.values():
            waiting += [run for run in running.followers if not running.why]
            waiting += [follower.where for follower in running.followers.values() if follower.at is None]
        if not waiting:
            return []
        out = self._lost_with_the_store()
        done, _ = ray.wait(waiting, num_returns=1, timeout=0 if out else timeout_s, fetch_local=False)
        if not done:
            return out
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        for ref in done:
            if self._run_again(ref):
                continue
            if ref in self._running:
                running = self._running.pop(ref)
                self._dismiss(running)
                out.append(EndedProcess(*running.started.key, _reason(running, ref)))
            elif not self._lost_rank(ref):
                self._note_pid(ref)
        return out

    def _lost_with_the_store(self) -> list[EndedProcess]:
        """End the starts that Ray's control store has forgotten: it may have died between taking one and writing it
        down, and no longer looks for a place then. Returns them as ended."""
        restarted_at = self._store_restarted_at()
        if restarted_at is None or self._clock.now() < restarted_at + PLACED_AGAIN_S:
            return []
        lost = [run for run, one in self._running.items() if one.asked_at < restarted_at and not one.placed]
        out = []
        for run in lost:
            running = self._running.pop(run)
            self._kill(running)
            out.append(EndedProcess(*running.started.key, "Ray's control store died before it had placed it"))
        return out

    def _run_again(self, ref: Any) -> bool:
        """Have a rank begin that Ray has placed on a node which was not measured when its plan was made, as that node
        has joined since; whether `ref` was the `run` of one, and the node can be measured.

        Each rank on such a node says so; the first that is heard has the node measured.
        """
        for running in list(self._running.values()):
            if (ref == running.run or ref in running.followers) and self._unmeasured(running, ref):
                assert self._shares is not None
                assert running.role is not None
                shares = self._shares(running.role)
                if ref in running.followers:
                    follower = running.followers.pop(ref)
                    again = follower.handle.run.remote(shares, follower.meets)
                    running.followers[again] = follower
                else:
                    del self._running[ref]
                    again = running.run = running.handle.run.remote(shares)
                    self._running[again] = running
                running.again.add(again)
                log.info("a node was measured for a worker", extra={"worker": running.started.name})
                return True
        return False

    def _unmeasured(self, running: RunningWorker, ref: Any) -> bool:
        """Whether a rank's `run` has ended because its node is not measured, and may be called again: once."""
        if self._shares is None or running.role is None or running.why or ref in running.again:
            return False
        try:
            ray.get(ref, timeout=GET_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            return isinstance(error.cause, NodeUnmeasured)
        except ray.exceptions.RayError:
            return False
        return False

    def _lost_rank(self, ref: Any) -> bool:
        """Whether `ref` is a follower's `run`; if so, kill the worker. A leader notices by itself, except while it
        still waits for the follower to join."""
        for running in self._running.values():
            if ref in running.followers:
                rank, name = running.followers[ref].rank, running.started.name
                running.why = f"rank {rank} has ended, see {running.started.logs / name}.rank{rank}.log"
                self._kill(running)
                return True
        return False

    def _note_pid(self, ref: Any) -> None:
        for running in self._running.values():
            processes: list[RunningWorker | FollowerActor] = [running, *running.followers.values()]
            for process in processes:
                if process.where == ref:
                    try:
                        process.at = ActorPlacement(*ray.get(ref, timeout=GET_TIMEOUT_S))
                    except ray.exceptions.RayError as error:
                        # Its `run` ends with the same cause and is what gets reported.
                        log.info("%s has not told its pid: %s", running.started.name, error)
                        process.at = ActorPlacement()
                        continue
                    if process is running or (running.at is not None and process.at.node_id != running.at.node_id):
                        self._tell(running)

    def _kill(self, running: RunningWorker) -> None:
        _end(running)
        self._dismiss(running)

    def _dismiss(self, running: RunningWorker) -> None:
        """Kill the other ranks, which end by themselves unless they are stuck, and give the places of all ranks back;
        those of workers that share their experts when the last one ends. Idempotent."""
        running.dismissed = True
        for follower in running.followers.values():
            _end(follower)
        name, running_group = running.started.together, running.group
        others = [one for one in self._running.values() if one.started.together == name and not one.dismissed]
        running.group = None
        if name and others:
            others[0].group = others[0].group or running_group
        elif running_group is not None:
            remove_placement_group(running_group)
        _leave_places(running)

    def close(self) -> None:
        for running in self._running.values():
            self._kill(running)
        self._running.clear()


def _end(process: RunningWorker | FollowerActor) -> None:
    # Ray asks the process to end, which a stopped or stuck process can't; so it is killed here if it is on this host.
    if process.at is not None and process.at.node == node_name():
        kill_process(process.at.pid, process.at.started)
    ray.kill(process.handle, no_restart=True)


def _leave_places(running: RunningWorker) -> None:
    if running.place is not None:
        remove_placement_group(running.place)
        running.place = None


def _reason(running: RunningWorker, ref: Any) -> str:
    """Why a worker's process ended, in words: from its exit file, else from `why`, Ray or the log, else "killed"."""
    started = running.started
    log_file = started.logs / f"{started.name}.log"
    words = exit_file(started.logs, *started.key)
    if running.why and not words.exists():
        return running.why
    if words.exists():
        text = words.read_text()
        words.unlink(missing_ok=True)
        return text
    try:
        ray.get(ref, timeout=GET_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)
    except ray.exceptions.ActorUnschedulableError:
        return f"no node has {' and '.join(started.resources)} free"
    except ray.exceptions.RayError:
        node = running.at.node if running.at is not None else ""
        if node not in ("", node_name()):
            return f"its process on {node} has ended, see {log_file} there"
        crash = crash_line(log_file)
        return crash or "killed, signal 9"
    return "the process has ended"
