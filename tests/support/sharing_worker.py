"""A decode worker in a process of its own that shares its experts with one in this process."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.support.fork_server import forked_processes
from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.cluster.ranks import DataParallelRank, meet_data_parallel
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId, Worker
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.worker_events import Event

START_S = 120.0
LOOK_S = 0.05
"""Seconds between two looks for what this process says."""


def meet(meeting: str, rank: int, role: Role, config: Config) -> DataParallelRank:
    size, deadline_s = config.dp_for(role), 60.0
    return meet_data_parallel(meeting, rank, size, SystemClock(), config.engine, deadline_s=deadline_s, start_s=START_S)


def _live(pipe: Connection, meeting: str, folder: Path, role: Role, config: Config, counts: dict[str, int]) -> None:
    torch.set_num_threads(1)
    dp = meet(meeting, 1, role, config)
    name = WorkerName(f"{role}-1")
    worker: Worker = build_worker(
        role, name, Incarnation(1), read_model_spec(folder), config, host="127.0.0.1", counts=counts, dp=dp
    )
    pipe.send(worker.control)
    while not worker.drained:
        while pipe.poll():
            match pipe.recv():
                case "drain":
                    worker.drain()
                case session, command:
                    worker.handle(session, command)
        if events := worker.step():
            pipe.send([event for _, event in events])
        worker.wait(LOOK_S)
    status, report = worker.status(), worker.check()
    worker.close()
    pipe.send((status.counters, report.violations, status.pages_free == status.pages_total))
    dp.close()


@dataclass
class SharingWorker:
    """The other process, as this one sees it."""

    process: Any
    pipe: Connection
    dp: DataParallelRank
    """This process's place in the group."""
    control: str = ""
    events: list[Event] = field(default_factory=list)
    end: tuple[Mapping[str, float], tuple[str, ...], bool] | None = None
    """Its counters, what its recount found, and whether all its pages were free, once it has left."""

    def handle(self, session: SessionId, command: Command) -> None:
        self.pipe.send((session, command))

    def drain(self) -> None:
        self.pipe.send("drain")

    def hear(self) -> list[Event]:
        """The events that have come since the last call."""
        found: list[Event] = []
        while self.end is None and self.pipe.poll():
            said = self.pipe.recv()
            if isinstance(said, tuple):
                self.end = said
            else:
                found += said
        return found


@contextmanager
def sharing_worker(folder: Path, role: Role, config: Config, counts: Mapping[str, int]) -> Iterator[SharingWorker]:
    """Rank 1 of two; rank 0 is to be built here, after which `control` comes through the pipe."""
    ours, theirs = forked_processes().Pipe()
    meeting = secrets.token_hex(32)
    process = forked_processes().Process(
        target=_live, args=(theirs, meeting, folder, role, config, dict(counts)), daemon=True
    )
    process.start()
    theirs.close()
    dp = meet(meeting, 0, role, config)
    try:
        yield SharingWorker(process, ours, dp)
    finally:
        dp.close()
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join(30)
        ours.close()
