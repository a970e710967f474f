"""Ray at the edge: placing workers' processes on nodes, and hearing of their death at once.

Ray starts a process where the role's custom resource is free and tells when it ends; nothing else goes through it.
Its own restarts are off, because only the controller may grant the next incarnation. The actor has two methods that
run side by side: `where` answers who it is, `run` is the worker's whole life.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.arena_process import Agents, NoAgents
from cluster.launcher import Ended
from cluster.procs import kill_process
from cluster.terminated import TERMINATED
from cluster.worker_process import BuildWorker, WorkerPlan, exit_file, node_name, process_mark, run_worker
from contracts.ids import Incarnation, Role, WorkerName

log = logging.getLogger("twinpool.actors")

RESOURCES = {Role.PREFILL: "twinpool_prefill", Role.DECODE: "twinpool_decode"}


class WorkerActor:
    """The process of one incarnation of one worker, of either role."""

    def __init__(self, plan: WorkerPlan, build: BuildWorker) -> None:
        self._plan = plan
        self._build = build
        TERMINATED.listen()

    def where(self) -> tuple[int, int, str]:
        """(pid, start time, node)."""
        return (*process_mark(), node_name())

    def run(self) -> None:
        """Serve until the end; the process exits with it."""
        plan = dataclasses.replace(self._plan, node_id=ray.get_runtime_context().get_node_id())
        if not plan.host:
            plan = dataclasses.replace(plan, host=ray.util.get_node_ip_address())
        if plan.rank:
            from cluster.follower import run_follower

            run_follower(plan)
        run_worker(plan, self._build)


@dataclass(slots=True)
class _Follower:
    rank: int
    handle: Any
    where: Any
    pid: tuple[int, int, str] | None = None


@dataclass(slots=True)
class _Running:
    plan: WorkerPlan
    handle: Any
    run: Any
    where: Any
    pid: tuple[int, int, str] | None = None
    followers: Mapping[Any, _Follower] = field(default_factory=dict)
    """The other ranks by the end of their run."""
    why: str = ""
    """Why it was ended from here."""
    group: Any = None
    """The placement group of a worker of several ranks."""


class RayLauncher:
    """A `Launcher` over a Ray cluster that this process has joined."""

    def __init__(self, build: BuildWorker, agents: Agents | None = None) -> None:
        self._build, self._agents = build, agents or NoAgents()
        # Once: Ray keeps what it has exported of each of these for ever, and workers are started again all the time.
        self._class = ray.remote(WorkerActor)
        self._running: dict[Any, _Running] = {}

    def start(self, plan: WorkerPlan) -> None:
        size = plan.config.tp_for(plan.role)
        group = None
        if size > 1:
            # All ranks on one node, which has a place for each, or none anywhere.
            group = placement_group([{RESOURCES[plan.role]: 1} for _ in range(size)], strategy="STRICT_PACK")
            plan = dataclasses.replace(plan, meeting=secrets.token_hex(32))
        leader, *followers = [self._actor(dataclasses.replace(plan, rank=rank), group) for rank in range(size)]
        runs = {
            handle.run.remote(): _Follower(rank, handle, handle.where.remote())
            for rank, handle in enumerate(followers, 1)
        }
        running = _Running(plan, leader, leader.run.remote(), leader.where.remote(), followers=runs, group=group)
        self._running[running.run] = running

    def _actor(self, plan: WorkerPlan, group: Any) -> Any:
        """The actor of one rank, not yet running."""
        placed = {}
        if group is not None:
            placed["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, plan.rank)
        actor = self._class.options(
            num_cpus=0,
            resources={RESOURCES[plan.role]: 1},
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=2,
            name=f"{plan.name}.{plan.incarnation}" + (f".rank{plan.rank}" if plan.rank else ""),
            **placed,
        )
        return actor.remote(plan, self._build)

    def kill(self, name: WorkerName, incarnation: Incarnation, pid: int, node: str) -> None:
        for running in list(self._running.values()):
            if (running.plan.name, running.plan.incarnation) == (name, incarnation):
                self._kill(running)

    def forget(self, name: WorkerName, before: Incarnation | None = None) -> None:
        self._agents.forget(name, before)

    def ended(self, timeout_s: float) -> list[Ended]:
        waiting = [*self._running, *(r.where for r in self._running.values() if r.pid is None)]
        for running in self._running.values():
            waiting += [run for run in running.followers if not running.why]
            waiting += [follower.where for follower in running.followers.values() if follower.pid is None]
        if not waiting:
            return []
        done, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s, fetch_local=False)
        if not done:
            return []
        out = []
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        for ref in done:
            if ref in self._running:
                running = self._running.pop(ref)
                _dismiss(running)
                out.append(Ended(running.plan.name, running.plan.incarnation, _reason(running, ref)))
            elif not self._lost_rank(ref):
                self._note_pid(ref)
        return out

    def _lost_rank(self, ref: Any) -> bool:
        """Whether a follower's run has ended. Its leader notices by itself, but for one that still waits for it."""
        for running in self._running.values():
            if ref in running.followers:
                rank, name = running.followers[ref].rank, running.plan.name
                running.why = f"rank {rank} has ended, see {running.plan.logs / name}.rank{rank}.log"
                self._kill(running)
                return True
        return False

    def _note_pid(self, ref: Any) -> None:
        for running in self._running.values():
            processes: list[_Running | _Follower] = [running, *running.followers.values()]
            for process in processes:
                if process.where == ref:
                    try:
                        process.pid = ray.get(ref)
                    except ray.exceptions.RayError as error:
                        # Its `run` ends with the same cause and is what gets reported.
                        log.info("%s has not told its pid: %s", running.plan.name, error)
                        process.pid = (0, 0, "")

    def _kill(self, running: _Running) -> None:
        _end(running)
        _dismiss(running)

    def close(self) -> None:
        for running in self._running.values():
            self._kill(running)
        self._running.clear()


def _end(process: _Running | _Follower) -> None:
    # Ray asks the process to end, which one that is stopped or stuck can't; so kill it here where we can.
    if process.pid is not None and process.pid[2] == node_name():
        kill_process(process.pid[0], process.pid[1])
    ray.kill(process.handle, no_restart=True)


def _dismiss(running: _Running) -> None:
    """End the other ranks, which end by themselves unless they are stuck, and give their places back. Idempotent."""
    for follower in running.followers.values():
        _end(follower)
    if running.group is not None:
        remove_placement_group(running.group)
        running.group = None


def _reason(running: _Running, ref: Any) -> str:
    """Why a process ended: its own words, else what Ray knows, else that somebody killed it."""
    plan = running.plan
    words = exit_file(plan.logs, plan.name, plan.incarnation)
    if running.why and not words.exists():
        return running.why
    if words.exists():
        text = words.read_text()
        words.unlink(missing_ok=True)
        return text
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)
    except ray.exceptions.ActorUnschedulableError:
        return f"no node has the resource {RESOURCES[plan.role]}"
    except ray.exceptions.RayError:
        node = running.pid[2] if running.pid is not None else ""
        if node not in ("", node_name()):
            return f"its process on {node} has ended, see {plan.logs / plan.name}.log there"
        crash = _crash_line(plan.logs / f"{plan.name}.log")
        return crash or "killed, signal 9"
    return "the process has ended"


def _crash_line(path: Path) -> str:
    """What faulthandler wrote at the end of the log, if it did."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    crashes = [line for line in lines if line.startswith("Fatal Python error")]
    return crashes[-1] if crashes else ""
