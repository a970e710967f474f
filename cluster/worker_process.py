"""The life of a worker's process, whoever started it: build, serve, register, run, leave.

The process ends in exactly one way each time, and says so with `Outcome`. It never outlives its lease, its parent or
its engine thread: a fenced or dead worker must not send another byte, so its process exits without ceremony.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.aio import LoopThread
from cluster.host import HostEnd, WorkerHost
from cluster.lease import LeaseKeeper
from cluster.logs import log_to_file
from cluster.nodes import Sizes
from cluster.procs import die_with_parent, start_time
from cluster.rehearsal import Hang, hang_at
from cluster.service import serve_worker
from cluster.terminated import TERMINATED
from contracts import processor
from contracts.access import SECRET_VARIABLE
from contracts.clock import SystemClock
from contracts.config import Config
from contracts.errors import ConfigError, TwinpoolError
from contracts.ids import Incarnation, Role, WorkerName
from contracts.model import read_model_spec
from contracts.ports import Worker, WorkerRecord
from transfer.detour import detour

if TYPE_CHECKING:
    from cluster.arena import Arenas
    from cluster.crew import Crew

log = logging.getLogger("twinpool.worker")

FLUSH_S = 2.0
"""How long open streams may take to hand over their last frames when a worker leaves."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """All that a worker's process needs to know; travels to it by value."""

    name: WorkerName
    role: Role
    incarnation: Incarnation
    model: Path
    config: Config
    counts: dict[str, int]
    """Pages and slots that each pool can lease."""
    host: str
    """Address its services bind to and are reached at; empty: its Ray node's."""
    controller: str
    """The controller's endpoint."""
    logs: Path
    rank: int = 0
    """Which of the worker's tensor-parallel ranks this process is; 0 is the leader."""
    meeting: str = field(default="", repr=False)
    """Hex: by which the ranks of this incarnation find and know each other; empty where there is one."""
    node_id: str = ""
    """The Ray node that it runs on."""
    arena: str = field(default="", repr=False)
    """Hex: the token of the agents that keep host memory; empty where there are none."""
    secret: str = field(default="", repr=False)
    """Hex; what workers authenticate each other with where they don't meet on loopback."""
    by_node: Mapping[str, Sizes] = field(default_factory=dict)
    """By Ray node id: what it gets there, which `counts` and `config` say where there is one node only."""

    def on(self, node_id: str) -> WorkerPlan:
        """The plan for the node that it has landed on. Raises `ConfigError` for one that it was not planned for."""
        plan = dataclasses.replace(self, node_id=node_id)
        if not self.by_node:
            return plan
        sizes = self.by_node.get(node_id)
        if sizes is None:
            raise ConfigError(f"node {node_id[:8]} was not measured before this start, which is tried again")
        config = sizes.applied_to(self.config, self.role)
        return dataclasses.replace(plan, config=config, counts=dict(sizes.counts), by_node={})


BuildWorker = Callable[[WorkerPlan], Worker]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a worker's process ended."""

    end: HostEnd
    reason: str


class WorkerProcess:
    """One incarnation of one worker in this process."""

    def __init__(self, plan: WorkerPlan, build: BuildWorker) -> None:
        self._plan = plan
        self._build = build
        self._ended = threading.Event()
        self._outcome = Outcome(HostEnd.STOPPED, "the process was stopped")

    def run(self) -> Outcome:
        """Serve until the worker leaves, is fenced or dies. Raises what `build` raises, and `LeaseRefused`."""
        plan = self._plan
        log.info("building", extra={"worker": plan.name, "incarnation": plan.incarnation})
        worker = self._build(plan)
        loop = LoopThread("service")
        clock = SystemClock()
        keeper: LeaseKeeper | None = None
        # Before registration nobody knows this worker, so there is nothing it could send.
        hang = Hang(hang_at(plan.config.faults.hang, plan.name, plan.incarnation))
        host = WorkerHost(
            worker, may_send=lambda: keeper is None or keeper.lease.held, on_end=self._on_end, before_step=hang
        )
        link_timeout_s, proxy = plan.config.transfer.link_timeout_s, plan.config.faults.proxy
        server, endpoint = serve_worker(loop, host, plan.incarnation, plan.host, plan.secret, link_timeout_s)
        record = WorkerRecord(
            plan.name, plan.role, plan.incarnation, os.getpid(), node_name(),
            detour(endpoint, "serve", plan.name, proxy), detour(worker.control, "control", plan.name, proxy),
            worker.fits, plan.node_id, worker.fingerprint,
        )  # fmt: skip
        try:
            heartbeat_s = plan.config.cluster.heartbeat_s
            starting = LeaseKeeper(
                record, plan.controller, clock, heartbeat_s, host.heartbeat, self._on_lost, plan.secret,
                on_drain=host.drain, undrains=lambda: host.undrains,
            )  # fmt: skip
            loop.run(starting.start(plan.config.cluster.lease_s), plan.config.cluster.lease_s + 5.0)
            keeper = starting
            host.start()
            TERMINATED.on(host.drain)
            if not TERMINATED.listening:
                log.warning("SIGTERM will not drain this worker: nobody listens for it in this process")
            log.info("ready", extra={"worker": plan.name, "endpoint": endpoint, "control": worker.control})
            self._ended.wait()
            if self._outcome.end is HostEnd.LEFT:
                server.stop(FLUSH_S)
                loop.run(keeper.leave(), FLUSH_S + 3.0)
            return self._outcome
        except BaseException:
            worker.close()
            raise
        finally:
            log.info("ended", extra={"worker": plan.name, "end": self._outcome.end, "reason": self._outcome.reason})
            host.stop(FLUSH_S)
            loop.stop()

    def _on_end(self, end: HostEnd, reason: str) -> None:
        if not self._ended.is_set():
            self._outcome = Outcome(end, reason)
            self._ended.set()

    def _on_lost(self, reason: str) -> None:
        """The lease has ended. The engine thread sees it before its next step; this process ends either way."""
        self._on_end(HostEnd.FENCED, reason)


def build_from_plan(plan: WorkerPlan) -> Worker:
    """Build the real worker. Raises `CheckpointError` or `ConfigError`."""
    from cluster.build import build_worker

    processor.pin(plan.config.engine.numerics_class)  # before the ranks meet, which computes
    if plan.secret:
        os.environ[SECRET_VARIABLE] = plan.secret
    return build_worker(
        plan.role,
        plan.name,
        plan.incarnation,
        read_model_spec(plan.model),
        plan.config,
        host=plan.host,
        counts=plan.counts,
        arenas=arenas_of(plan),
        crew=_crew(plan) if plan.config.tp_for(plan.role) > 1 else None,
    )


def arenas_of(plan: WorkerPlan) -> Arenas:
    """Where its ranks get memory that outlives them."""
    from cluster.arena import BorrowedArenas

    return BorrowedArenas(plan.arena, plan.name, plan.incarnation, SystemClock(), time.sleep)


def _crew(plan: WorkerPlan) -> Crew:
    """The plan's other ranks. When one of them dies, so does this process, at once and without another word."""
    from cluster.crew import lead
    from cluster.rank_line import DeathWatch

    cluster = plan.config.cluster
    crew = lead(
        plan.meeting, plan.config.tp_for(plan.role), SystemClock(),
        deadline_s=cluster.rank_timeout_s, start_s=cluster.start_timeout_s,
    )  # fmt: skip

    def end(reason: str) -> None:
        log.error("a rank is gone", extra={"worker": plan.name, "reason": reason})
        _write_exit(plan, reason)
        logging.shutdown()
        os._exit(1)

    DeathWatch(crew.watch(), end).start()
    return crew


def run_worker(plan: WorkerPlan, build: BuildWorker) -> None:
    """Be the worker's process: log to its file, die with the parent, and exit when it is over (never returns)."""
    die_with_parent()
    log_to_file(plan.logs / f"{plan.name}.log", plan.name)
    code = 1
    try:
        outcome = WorkerProcess(plan, build).run()
        code = 0 if outcome.end in (HostEnd.LEFT, HostEnd.STOPPED) else 1
        _write_exit(plan, outcome.reason)
    except (Exception, CancelledError) as error:
        log.exception("the worker could not start")
        _write_exit(plan, str(error) if isinstance(error, TwinpoolError) else f"{type(error).__name__}: {error}")
    finally:
        logging.shutdown()
        # Threads of torch, gRPC and the transfer plane may still run: nothing after this point may send or hang.
        os._exit(code)


def exit_file(logs: Path, name: WorkerName, incarnation: Incarnation) -> Path:
    """Where an incarnation writes why it ended; absent when it was killed."""
    return logs / f".{name}.{incarnation}.exit"


def _write_exit(plan: WorkerPlan, reason: str) -> None:
    """Whole or not at all: this process may be killed while it writes."""
    path = exit_file(plan.logs, plan.name, plan.incarnation)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(" ".join(reason.split()))
    unfinished.replace(path)


def node_name() -> str:
    """This machine, as operators know it."""
    return socket.gethostname()


def process_mark() -> tuple[int, int]:
    """This process's pid and start time."""
    return os.getpid(), start_time(os.getpid()) or 0
