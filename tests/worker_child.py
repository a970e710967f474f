"""A worker in a process of its own, commanded through a pipe: for tests that stop or kill one end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from contracts.ids import Incarnation, Role, WorkerName
from contracts.interfaces.worker_interface import SessionId
from contracts.messages.router_commands import Command, PeerRef
from contracts.messages.worker_events import Event

SESSION = SessionId(1)


def _serve(pipe: Connection, folder: Path, role: Role, name: str, sections: dict[str, Any], tokens: int) -> None:
    from cluster.assembly.build_worker import build_worker
    from contracts import cpu_levels as processor
    from contracts.checkpoint.model_spec import read_model_spec
    from contracts.config.load_config import config_from_dict
    from tests.pair import counts_for

    config, spec = config_from_dict(sections), read_model_spec(folder)
    processor.pin(config.engine.numerics_class)  # before the counts compute
    options: dict[str, Any] = {"host": "127.0.0.1", "counts": counts_for(folder, config, role, tokens)}
    worker = build_worker(role, WorkerName(name), Incarnation(1), spec, config, **options)
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
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def worker_child(folder: Path, role: Role, name: str, sections: dict[str, Any], tokens: int) -> Iterator[Child]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, folder, role, name, sections, tokens), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(60), f"{name} did not start"
        yield Child(WorkerName(name), process, ours, ours.recv())
    finally:
        ours.close()
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT)
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join(10)
