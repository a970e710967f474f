"""A worker in a process of its own, commanded through a pipe: for tests that stop or kill one end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.fork_server import forked_processes
from tests.support.rank_followers import START_S, Warm
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Command, PeerRef
from twinpool.contracts.messages.worker_events import Event

SESSION = SessionId(1)


def _serve(pipe: Connection, plan: WorkerPlan, tokens: int) -> None:
    from tests.support.worker_pair import counts_for
    from twinpool.cluster.worker_process.worker_process import PlannedWorkers
    from twinpool.contracts import cpu_levels as processor

    processor.pin(plan.config.engine.numerics_class)  # before the counts compute
    worker = PlannedWorkers().build(replace(plan, counts=counts_for(plan.model, plan.config, plan.role, tokens)))
    pipe.send(worker.control)
    try:
        while True:
            while pipe.poll():
                worker.handle(SESSION, pipe.recv())
            for _, event in worker.step():
                pipe.send(event)
            worker.wait(0.005)
    except (EOFError, BrokenPipeError):
        worker.close()


def stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    status = Path(f"/proc/{pid}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "T"


@dataclass
class Child:
    name: WorkerName
    process: Any
    pipe: Connection
    control: str

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.name, Incarnation(1), self.control)

    def handle(self, command: Command) -> None:
        self.pipe.send(command)

    def events(self) -> list[Event]:
        """Those that have come."""
        found: list[Event] = []
        with contextlib.suppress(EOFError):
            while self.pipe.poll():
                found.append(self.pipe.recv())
        return found

    @property
    def stopped(self) -> bool:
        return stopped(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def worker_child(
    folder: Path, role: Role, name: str, sections: dict[str, Any], tokens: int, followers: Sequence[Warm] = (),
    theirs: dict[str, Any] | None = None, *, fresh: bool = False,
) -> Iterator[Child]:  # fmt: skip
    """`followers`: processes that become its other ranks, with the sections `theirs`; their end is the caller's.
    `fresh`: an interpreter of its own, which reads the environment as it is now."""
    from tests.support.worker_pair import counts_for
    from twinpool.contracts.config.load_config import config_from_dict

    context = multiprocessing.get_context("spawn") if fresh else forked_processes()
    config = config_from_dict(sections)
    logs = tempfile.TemporaryDirectory()
    plan = WorkerPlan(
        WorkerName(name), role, Incarnation(1), folder, config, {}, "127.0.0.1", "", Path(logs.name),
        meeting=secrets.token_hex(32),
    )  # fmt: skip
    for rank, warm in enumerate(followers, 1):
        counts = counts_for(folder, config, role, tokens)
        warm.pipe.send(replace(plan, rank=rank, config=config_from_dict(theirs or sections), counts=counts))
    ours, its = context.Pipe()
    process = context.Process(target=_serve, args=(its, plan, tokens), daemon=True)
    process.start()
    its.close()
    try:
        assert ours.poll(START_S), f"{name} did not start"
        yield Child(WorkerName(name), process, ours, ours.recv())
    finally:
        ours.close()
        if process.is_alive():
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # It may end meanwhile.
                os.kill(process.pid, signal.SIGCONT)
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join(60)
        logs.cleanup()
