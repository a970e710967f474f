"""Followers of a worker as processes of their own, kept warm; their leader is in this process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.support.fork_server import forked_processes
from twinpool.cluster.rank_links import RankSocket
from twinpool.cluster.ranks import RankGroup, lead
from twinpool.cluster.worker_process.follower_process import serve_rank
from twinpool.cluster.worker_process.worker_plan import WorkerPlan, rank_link_timeout_s, rank_node
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Incarnation, Role, WorkerName

START_S = 120.0


def _serve(pipe: Connection) -> None:
    """Be a follower of one worker after the other."""
    torch.set_num_threads(1)
    while (plan := pipe.recv()) is not None:
        try:
            pipe.send(serve_rank(plan, pipe.recv))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    # As in a real follower: threads of gloo may still wait for their deadlines.
    os._exit(0)


@dataclass
class Warm:
    """A process that waits to be a follower."""

    process: Any
    pipe: Connection

    def end(self) -> None:
        if self.process.is_alive():
            with suppress(BrokenPipeError):  # One that was killed may have lost its pipe, and not be gone yet.
                self.pipe.send(None)
            self.process.join(60)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(60)
        self.pipe.close()


@dataclass
class RankProcesses:
    """As many as are needed, made when they are."""

    idle: list[Warm] = field(default_factory=list)

    def take(self, count: int) -> list[Warm]:
        context = forked_processes()
        while len(self.idle) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.idle.append(Warm(process, ours))
        taken, self.idle = self.idle[:count], self.idle[count:]
        return taken

    def give(self, warm: Warm) -> str:
        """It is over; returns why, or raises `AssertionError` for one that doesn't end."""
        assert warm.pipe.poll(30), "a follower didn't end with its leader"
        reason: str = warm.pipe.recv()
        self.idle.append(warm)
        return reason

    def end(self) -> None:
        for warm in self.idle:
            warm.end()
        self.idle.clear()


@contextmanager
def rank_processes() -> Iterator[RankProcesses]:
    processes = RankProcesses()
    try:
        yield processes
    finally:
        processes.end()


@contextmanager
def group_of(
    processes: RankProcesses,
    folder: Path,
    role: Role,
    config: Config,
    counts: Mapping[str, int],
    hosts: Sequence[str] = (),
) -> Iterator[RankGroup | None]:
    """The other ranks of a worker that is built here; None where it has one. `hosts`: an address for each rank, by
    which they meet as over a network."""
    size = config.ranks_for(role)
    if size == 1:
        yield None
        return
    plan = WorkerPlan(
        WorkerName(f"{role}-0"), role, Incarnation(1), folder, config, dict(counts), "127.0.0.1", "", folder,
        meeting=secrets.token_hex(32),
    )  # fmt: skip
    taken = processes.take(size - 1)
    place = RankSocket(plan.meeting, hosts[0], rank_link_timeout_s(config)) if hosts else None
    for rank, warm in enumerate(taken, 1):
        there = replace(plan, host=hosts[rank], leader_at=place.endpoint) if place is not None else plan
        warm.pipe.send(replace(there, rank=rank))
    with ExitStack() as stack:
        for warm in taken:
            stack.callback(processes.give, warm)
        over = (place, rank_node(replace(plan, host=hosts[0]))) if place is not None else None
        group = lead(
            plan.meeting, size, SystemClock(), plan.rank_config.engine, deadline_s=60.0, start_s=START_S, over=over
        )
        stack.callback(group.close)
        yield group
