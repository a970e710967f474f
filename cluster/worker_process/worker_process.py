"""The life of a worker's process (a worker's only or leading rank): build, serve, register, run, leave.

The process ends for one reason each time, its `ProcessOutcome`. It never outlives its lease, its parent or its engine
thread: a fenced or dead worker must not send another byte, so its process exits at once, without cleaning up.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from cluster.processes.log_files import log_to_file
from cluster.processes.process_ids import die_with_parent
from cluster.worker_process.asyncio_thread import AsyncioThread
from cluster.worker_process.hang_fault import HangFault, hang_at
from cluster.worker_process.lease_keeper import LeaseKeeper
from cluster.worker_process.sigterm_drain import TERMINATED
from cluster.worker_process.worker_plan import (
    BuildWorker,
    ProcessOutcome,
    WorkerPlan,
    arenas_of,
    node_name,
    write_exit,
)
from cluster.worker_process.worker_server import serve_worker
from cluster.worker_process.worker_thread import WorkerEnd, WorkerThread
from contracts import cpu_levels as processor
from contracts.build_id import build_id
from contracts.checkpoint.model_spec import read_model_spec
from contracts.clock import SystemClock
from contracts.cluster_secret import SECRET_VARIABLE
from contracts.errors import TwinpoolError
from contracts.interfaces.worker_interface import Worker
from contracts.messages.worker_status import WorkerRecord
from transfer.net.fault_injection import via_proxy

if TYPE_CHECKING:
    from cluster.ranks.rendezvous import RankGroup


log = logging.getLogger("twinpool.worker")

FLUSH_S = 2.0
"""Seconds that open streams may take to deliver their last frames when a worker leaves."""


class WorkerProcess:
    """The run of one incarnation of a worker in this process."""

    def __init__(self, plan: WorkerPlan, build: BuildWorker) -> None:
        self._plan = plan
        self._build = build
        self._ended = threading.Event()
        self._outcome = ProcessOutcome(WorkerEnd.STOPPED, "the process was stopped")

    def run(self) -> ProcessOutcome:
        """Serve until the worker leaves, is fenced or dies; returns how it ended. Raises what `build` raises, and
        `LeaseRefused`."""
        plan = self._plan
        log.info("building", extra={"worker": plan.name, "incarnation": plan.incarnation})
        if (certificate := plan.config.security.cluster) is not None:
            certificate.check()
        worker = self._build(plan)
        loop = AsyncioThread("service")
        clock = SystemClock()
        keeper: LeaseKeeper | None = None
        # Before registration no router or peer knows this worker, so there is nothing it could send without a lease.
        hang = HangFault(hang_at(plan.config.faults.hang, plan.name, plan.incarnation))
        host = WorkerThread(
            worker, may_send=lambda: keeper is None or keeper.lease.held, on_end=self._on_end, before_step=hang
        )
        link_timeout_s, proxy = plan.config.transfer.link_timeout_s, plan.config.faults.proxy
        certificate = plan.config.security.cluster
        server = serve_worker(loop, host, plan.incarnation, plan.host, plan.secret, link_timeout_s, certificate)
        record = WorkerRecord(
            name=plan.name,
            role=plan.role,
            incarnation=plan.incarnation,
            pid=os.getpid(),
            node=node_name(),
            endpoint=via_proxy(server.endpoint, "calls", plan.name, proxy),
            control=via_proxy(worker.control, "control", plan.name, proxy),
            fits=worker.fits,
            node_id=plan.node_id,
            fingerprint=worker.fingerprint,
            stream=via_proxy(server.stream, "serve", plan.name, proxy),
            settings=plan.settings,
            build=build_id(),
        )
        try:
            heartbeat_s = plan.config.cluster.heartbeat_s
            starting = LeaseKeeper(
                record,
                plan.controller,
                clock,
                heartbeat_s,
                host.heartbeat,
                self._on_lost,
                plan.secret,
                on_drain=host.drain,
                undrains=lambda: host.undrains,
                on_ended=lambda ended: host.call(lambda worker: worker.workers_ended(ended)),
                certificate=certificate,
            )
            loop.run(starting.start(plan.config.cluster.lease_s), plan.config.cluster.lease_s + 5.0)
            keeper = starting
            host.start()
            TERMINATED.on(host.drain)
            if not TERMINATED.listening:
                log.warning("SIGTERM will not drain this worker: nobody listens for it in this process")
            log.info(
                "ready",
                extra={
                    "worker": plan.name,
                    "endpoint": server.endpoint,
                    "stream": server.stream,
                    "control": worker.control,
                },
            )
            self._ended.wait()
            if self._outcome.end is WorkerEnd.LEFT:
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

    def _on_end(self, end: WorkerEnd, reason: str) -> None:
        if not self._ended.is_set():
            self._outcome = ProcessOutcome(end, reason)
            self._ended.set()

    def _on_lost(self, reason: str) -> None:
        """End as fenced, because the lease has ended. The engine thread sees that before its next step; this process
        ends either way."""
        self._on_end(WorkerEnd.FENCED, reason)


def build_from_plan(plan: WorkerPlan) -> Worker:
    """Build the worker of a plan, with its other ranks if it has several. Raises what `build_worker` raises."""
    from cluster.assembly.build_worker import build_worker

    processor.pin(plan.config.engine.numerics_class)  # before the ranks meet, which computes
    if plan.secret:
        os.environ[SECRET_VARIABLE] = plan.secret
    return build_worker(
        plan.role,
        plan.name,
        plan.incarnation,
        read_model_spec(plan.model),
        plan.rank_config,
        host=plan.host,
        counts=plan.counts,
        arenas=arenas_of(plan),
        group=_group(plan) if plan.config.tp_for(plan.role) > 1 else None,
    )


def _group(plan: WorkerPlan) -> RankGroup:
    """Meet the plan's other ranks as their leader. From then on this process exits at once when one of them dies.

    Raises `PeerDead` when a rank doesn't come.
    """
    from cluster.ranks.follower_channel import DeathWatch
    from cluster.ranks.rendezvous import lead

    cluster = plan.config.cluster
    group = lead(
        plan.meeting,
        plan.config.tp_for(plan.role),
        SystemClock(),
        plan.rank_config.engine,
        deadline_s=cluster.rank_timeout_s,
        start_s=cluster.start_timeout_s,
    )

    def end(reason: str) -> None:
        log.error("a rank is gone", extra={"worker": plan.name, "reason": reason})
        write_exit(plan, reason)
        logging.shutdown()
        os._exit(1)

    DeathWatch(group.watch(), end).start()
    return group


def run_worker(plan: WorkerPlan, build: BuildWorker) -> None:
    """Be the worker's process: log to its file, die with the parent, exit when the worker has ended (never returns)."""
    die_with_parent()
    log_to_file(plan.logs / f"{plan.name}.log", plan.name)
    code = 1
    try:
        outcome = WorkerProcess(plan, build).run()
        code = 0 if outcome.end in (WorkerEnd.LEFT, WorkerEnd.STOPPED) else 1
        write_exit(plan, outcome.reason)
    except (Exception, CancelledError) as error:
        log.exception("the worker could not start")
        write_exit(plan, str(error) if isinstance(error, TwinpoolError) else f"{type(error).__name__}: {error}")
    finally:
        logging.shutdown()
        # Threads of torch, gRPC and the transfer plane may still run: nothing after this point may send or hang.
        os._exit(code)
