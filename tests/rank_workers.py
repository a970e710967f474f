"""Followers of a worker as processes of their own, whose leader is in this one (or in another)."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.crew import Crew, lead
from cluster.follower import run_follower
from cluster.worker_process import WorkerPlan
from contracts.clock import SystemClock
from contracts.config import Config
from contracts.ids import Incarnation, Role, WorkerName

START_S = 120.0


def rank_plan(
    folder: Path, role: Role, config: Config, counts: Mapping[str, int], logs: Path, rank: int = 0
) -> WorkerPlan:
    return WorkerPlan(
        WorkerName(f"{role}-0"), role, Incarnation(1), folder, config, counts, "127.0.0.1", "", logs, rank,
    )  # fmt: skip


@dataclass
class CrewProcesses:
    """A crew, and the processes of its followers."""

    crew: Crew
    followers: list[Any]


def start_followers(plan: WorkerPlan, size: int) -> list[Any]:
    """Processes of ranks 1 and up; `plan` has their meeting."""
    from dataclasses import replace

    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run_follower, args=(replace(plan, rank=rank),), daemon=True) for rank in range(1, size)
    ]
    for process in processes:
        process.start()
    return processes


@contextmanager
def crew_of(
    folder: Path, role: Role, config: Config, counts: Mapping[str, int], logs: Path
) -> Iterator[CrewProcesses | None]:
    """The other ranks of a worker that is built here; None where it has one."""
    from dataclasses import replace

    size = config.tp_for(role)
    if size == 1:
        yield None
        return
    plan = replace(rank_plan(folder, role, config, counts, logs), meeting=secrets.token_hex(32))
    processes = start_followers(plan, size)
    try:
        crew = lead(plan.meeting, size, SystemClock(), deadline_s=60.0, start_s=START_S)
        try:
            yield CrewProcesses(crew, processes)
        finally:
            crew.close()
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
