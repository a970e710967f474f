"""The life of a worker's process (a worker's only or leading rank): build, serve, register, run, leave.

A worker ends for one reason each time, its `ProcessOutcome`, and its process with it. It never outlives its lease, its
parent or its engine thread: a fenced or dead worker must not send another byte, so its process exits at once, without
cleaning up. The exception is a worker that was drained to change its role: it is closed, and when all that it had is
gone, its process goes on as the next incarnation, with the model that is loaded. Whatever fails on that way ends the
process, and the worker is started again like after any death.

At SIGTERM the worker drains, and leaves when its requests have ended or migrated (`SigtermDrain`). The process's main
thread is Ray's, and runs no Python while it waits; a handler would never be called.

The workers of a process are built one after the other, each by its plan (`PlannedWorkers`): all that a role shapes
(scheduler, pools, host tier, sockets, registration) is torn down and made anew. What it doesn't shape stays: the loaded
model, and the meeting of the ranks with the group in which they compute.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.cluster.processes.priority import LEASES, may_raise, run_low
from twinpool.cluster.processes.process_ids import die_with_parent
from twinpool.cluster.processes.run_folder import log_to_file
from twinpool.cluster.worker_process.grpc_service import LINK_TIMEOUT_S, AsyncioThread, ServiceServer, WorkerService
from twinpool.cluster.worker_process.lease_keeper import LeaseHandlers, LeaseKeeper, processor_use
from twinpool.cluster.worker_process.router_streams import RouterStreams
from twinpool.cluster.worker_process.worker_plan import (
    BuildWorker,
    ProcessOutcome,
    WeightsPreparation,
    WorkerPlan,
    arenas_of,
    check_unchanged,
    images_of,
    meet_ranks,
    meet_sharers,
    node_name,
    write_exit,
)
from twinpool.cluster.worker_process.worker_thread import WorkerEnd, WorkerThread
from twinpool.contracts import cpu_levels as processor
from twinpool.contracts.build_id import build_id
from twinpool.contracts.checkpoint.safetensors_headers import files_mark
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.cluster_secret import SECRET_VARIABLE
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.leases import LeaseGrant
from twinpool.contracts.messages.rank_orders import LeaveRole
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL
from twinpool.contracts.messages.worker_status import RankNode, WorkerRecord
from twinpool.contracts.sampling_params import WeightsVersion
from twinpool.contracts.signal_listener import SignalListener
from twinpool.transfer.net.fault_injection import HangFault, hang_at, via_proxy

if TYPE_CHECKING:
    from twinpool.cluster.arena.arena_client import ArenaClient
    from twinpool.cluster.rank_links import RankSocket
    from twinpool.cluster.ranks import DataParallelRank, RankGroup
    from twinpool.engine.runner.load_model import KeptModel

log = logging.getLogger("twinpool.worker")

NEXT_PLAN_S = 15.0
"""Seconds that a process waits for the plan by which it goes on. Then it ends, and its worker is started elsewhere. One
that sleeps waits for as long as it lives."""
FLUSH_S = 2.0
"""Seconds that open streams may take to deliver their last frames when a worker leaves."""
CLOSE_S = 10.0
"""Seconds that a worker which has left may take to close, to be followed by another in its process."""


class NextPlan:
    """Hands a process the plan by which it goes on, from another thread."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._plan: WorkerPlan | None = None

    def give(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._given.set()

    def take(self, timeout_s: float | None = NEXT_PLAN_S) -> WorkerPlan | None:
        """The plan that was given since the last call, or None when none has come after `timeout_s`; None: wait for
        it."""
        if not self._given.wait(timeout_s):
            return None
        self._given.clear()
        plan, self._plan = self._plan, None
        return plan


class PlannedWorkers:
    """Builds the workers of this process."""

    def __init__(self) -> None:
        self._plan: WorkerPlan | None = None
        self._kept: KeptModel | None = None
        self._group: RankGroup | None = None
        self._dp: DataParallelRank | None = None
        self._arenas: ArenaClient | None = None
        self.meeting: RankSocket | None = None
        """Where the other ranks come that may be on other nodes; None: all are on this one."""

    @property
    def rank_nodes(self) -> tuple[RankNode, ...]:
        """The nodes of the ranks from 1 on, where they may be on others than this one."""
        others = self._group.others if self._group is not None else ()
        return tuple(RankNode(one.name, one.node_id) for one in others)

    def build(self, plan: WorkerPlan) -> Worker:
        """Build the worker of a plan, with its other ranks if it has several; `release` has ended the one before.
        Raises what `build_worker` raises."""
        if self._plan is None:
            run_low(_import_packages)
        from twinpool.cluster.assembly.build_worker import build_worker
        from twinpool.engine.runner.load_model import KeptModel

        self._plan = plan
        processor.pin(plan.config.engine.numerics_class)  # before the ranks meet, which computes
        if plan.secret:
            os.environ[SECRET_VARIABLE] = plan.secret
        self._kept = self._kept or KeptModel(images_of(plan), run_low)
        spec = plan.read_spec()
        before = files_mark(spec.headers) if plan.weights is not None else ()
        if plan.config.ranks_for(plan.role) > 1 and self._group is None:
            self._group = meet_ranks(plan, self._end, self.meeting)
        if plan.config.dp_for(plan.role) > 1:
            self._dp = meet_sharers(plan, self._end)
        self._arenas = arenas_of(plan)
        worker = build_worker(
            plan.role,
            plan.name,
            plan.incarnation,
            spec,
            plan.rank_config,
            host=plan.host,
            counts=plan.counts,
            arenas=self._arenas,
            group=self._group,
            kept=self._kept,
            dp=self._dp,
        )
        check_unchanged(spec, before)
        return worker

    def prepare(self, weights: WeightsVersion) -> str:
        """Read and check weights beside the worker that serves, for the one to come; returns the digest of their files.
        Raises `CheckpointError`, and as loading a model does."""
        from twinpool.engine.models.registry import model_for
        from twinpool.engine.runner.load_model import check_finite

        plan, kept = self._plan, self._kept
        assert plan is not None
        assert kept is not None, "weights are prepared beside a worker that was built"
        spec = plan.spec_with(weights)
        before = files_mark(spec.headers)
        if weights.path:  # The checkpoint was served as it is.
            check_finite(spec)
        kept.prepare(model_for(spec, plan.config.engine))
        if self._dp is not None:  # The worker to come is another process, and reads them itself.
            kept.forget_prepared()
        check_unchanged(spec, before)
        return spec.weights.digest if spec.weights is not None else ""

    def forget_prepared(self) -> None:
        """Free what `prepare` keeps. Idempotent."""
        if self._kept is not None:
            self._kept.forget_prepared()

    def release(self) -> None:
        """Free what the last worker, which is closed, still has on its other ranks and in its node's arenas. When this
        returns, none of its ranks stores anything for it any more. Raises `PeerDead` for a rank that doesn't answer."""
        if self._group is not None:
            self._group.line.ask(LeaveRole()).wait()
            self._group.line.heard()  # What the ranks said of links that are no more.
        if self._arenas is not None:
            self._arenas.give_up()
            self._arenas = None

    def _end(self, reason: str) -> None:
        """End this process, as a rank is gone."""
        if self._dp is not None and self._dp.experts.over:
            return  # All have drained, and leave one after the other.
        plan = self._plan
        assert plan is not None, "ranks meet for a plan"
        log.error("a rank is gone", extra={"worker": plan.name, "reason": reason})
        write_exit(plan, reason)
        logging.shutdown()
        os._exit(1)


def _import_packages() -> None:
    """Load what workers are made of, torch with it: seconds of processor time."""
    import twinpool.cluster.assembly.build_worker  # noqa: F401

    freeze_modules()


def freeze_modules() -> None:
    """Have the garbage collector leave alone what was imported: a full collection would look through all modules,
    between two steps."""
    gc.collect()
    gc.freeze()


def free_memory() -> None:
    """Give back the memory of a worker that nobody refers to any more."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


class SigtermDrain:
    """Calls registered functions at SIGTERM, and at once if SIGTERM came before they were registered."""

    def __init__(self) -> None:
        self.listening = False
        self._asked = threading.Event()
        self._calls: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def listen(self) -> bool:
        """Take SIGTERM over. Call it on the main thread; on another nothing happens, and False is returned."""
        if threading.current_thread() is not threading.main_thread():
            return False
        SignalListener([signal.SIGTERM], lambda number: self.announce()).listen()
        self.listening = True
        return True

    def off(self, call: Callable[[], object]) -> None:
        """Call `call`, which was registered, no more."""
        with self._lock:
            self._calls.remove(call)

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has come."""
        return self._asked.is_set()

    def announce(self) -> None:
        """Call all registered functions, as at a SIGTERM."""
        self._asked.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call()

    def on(self, call: Callable[[], object]) -> None:
        """Register `call`, which is called at each SIGTERM on the signal thread, and now if one has come."""
        with self._lock:
            self._calls.append(call)
        if self._asked.is_set():
            call()


TERMINATED = SigtermDrain()
"""The drain on SIGTERM of this process."""


START_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerServer:
    """The servers of one worker, and their addresses."""

    loop: AsyncioThread
    calls: ServiceServer
    streams: RouterStreams
    endpoint: str
    """``host:port`` of the gRPC service."""
    stream: str
    """``host:port`` of the streams."""

    def stop(self, grace_s: float) -> None:
        """Let streams flush for `grace_s`, and calls end in as much, then end them. Idempotent."""
        self.loop.run(self.streams.stop(grace_s), grace_s + 2.0)
        self.calls.stop(grace_s)


def serve_worker(
    loop: AsyncioThread,
    host: WorkerThread,
    incarnation: int,
    address: str,
    secret: str = "",
    link_timeout_s: float = LINK_TIMEOUT_S,
    certificate: CertificateFiles | None = None,
) -> WorkerServer:
    """Serve the worker thread `host` on free ports of `address`.

    Raises `OSError` when it can't be bound, `ConfigError` when the certificate can't be used.
    """
    streams = RouterStreams(host, incarnation, secret, link_timeout_s, certificate)
    stream = f"{address}:{loop.run(streams.start(address), START_S)}"
    service = WorkerService(host, incarnation)
    calls = ServiceServer(loop, f"{address}:0", secret, link_timeout_s, certificate, [service.admit])
    port = calls.start(service.handlers())
    return WorkerServer(loop, calls, streams, f"{address}:{port}", stream)


class WorkerProcess:
    """The run of one incarnation of a worker in this process."""

    def __init__(
        self,
        plan: WorkerPlan,
        build: BuildWorker,
        loop: AsyncioThread | None = None,
        release: Callable[[], None] | None = None,
        preparation: WeightsPreparation | None = None,
        rank_nodes: Callable[[], tuple[RankNode, ...]] = tuple,
    ) -> None:
        """`loop`: serves the worker, and goes on after it; None: one of its own does. `release` frees what a closed
        worker has left elsewhere in this process; None: the process can't go on as another worker. `preparation`: of
        the weights that it may go on with; None: it takes no others. `rank_nodes`: those of the other ranks, once it
        is built."""
        self._plan, self._rank_nodes = plan, rank_nodes
        self._build = build
        self._loop, self._release = loop, release
        self._preparation = preparation or WeightsPreparation()
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
        loop = self._loop or AsyncioThread("service", niceness=LEASES)
        clock = SystemClock()
        keeper: LeaseKeeper | None = None
        # Before registration no router or peer knows this worker, so there is nothing it could send without a lease.
        hang = HangFault(hang_at(plan.config.faults.hang, plan.name, plan.incarnation))
        host = WorkerThread(
            worker, may_send=lambda: keeper is None or keeper.lease.held, on_end=self._on_end, before_step=hang
        )
        host.changed_weights = plan.weights is not None
        link_timeout_s = plan.config.transfer.link_timeout_s
        server = serve_worker(loop, host, plan.incarnation, plan.host, plan.secret, link_timeout_s, certificate)
        record = self._record(worker, server.endpoint, server.stream)
        try:
            heartbeat_s, use = plan.config.cluster.heartbeat_s, processor_use(plan.config.engine.device)
            starting = LeaseKeeper(
                record,
                plan.controller,
                clock,
                heartbeat_s,
                lambda: self._preparation.on(use.on(host.heartbeat())),
                LeaseHandlers(
                    self._on_lost,
                    on_drain=host.drain,
                    undrains=lambda: host.undrains,
                    on_ended=lambda ended: host.call(lambda worker: worker.workers_ended(ended)),
                    on_grant=lambda grant: self._take_orders(host, grant),
                ),
                plan.secret,
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
                    "raised": may_raise(),
                },
            )
            self._ended.wait()
            TERMINATED.off(host.drain)
            if self._outcome.end is WorkerEnd.LEFT:
                server.stop(FLUSH_S)
                closed = self._close(host)
                answer = loop.run(keeper.leave(closed=closed), FLUSH_S + 3.0)
                self._outcome = dataclasses.replace(self._outcome, goes_on=answer.goes_on, sleeps=answer.sleeps)
            return self._outcome
        except BaseException:
            worker.close()
            raise
        finally:
            log.info("ended", extra={"worker": plan.name, "end": self._outcome.end, "reason": self._outcome.reason})
            host.stop(FLUSH_S)
            if self._loop is None:
                loop.stop()

    def _record(self, worker: Worker, endpoint: str, stream: str) -> WorkerRecord:
        """What the worker registers with. `endpoint`: of its service for calls; `stream`: where routers connect."""
        plan = self._plan
        proxy = plan.config.faults.proxy
        return WorkerRecord(
            name=plan.name,
            role=plan.role,
            incarnation=plan.incarnation,
            pid=os.getpid(),
            node=node_name(),
            endpoint=via_proxy(endpoint, "calls", plan.name, proxy),
            control=via_proxy(worker.control, "control", plan.name, proxy),
            fits=worker.fits,
            node_id=plan.node_id,
            fingerprint=worker.fingerprint,
            stream=via_proxy(stream, "serve", plan.name, proxy),
            settings=plan.settings,
            build=build_id(),
            stream_protocol=STREAM_PROTOCOL,
            weights=plan.weights,
            rank_nodes=self._rank_nodes(),
        )

    def _take_orders(self, host: WorkerThread, grant: LeaseGrant) -> None:
        """Carry out what a grant asks for besides draining. Each comes with every grant for as long as it holds."""
        self._preparation.order(grant.prepare)
        host.pause.set(grant.paused)
        if grant.hurry:
            host.call(lambda worker: worker.end_requests("its worker leaves, and had waited for it for long enough"))

    def _close(self, host: WorkerThread) -> bool:
        """Close a worker that has left, as far as its process could go on as another one; returns whether it could."""
        if self._release is None or TERMINATED.asked or not host.stop(CLOSE_S) or not host.closed:
            return False
        try:
            self._release()
        except Exception:
            log.exception("this process can't go on as another worker")
            return False
        return True

    def _on_end(self, end: WorkerEnd, reason: str) -> None:
        if not self._ended.is_set():
            self._outcome = ProcessOutcome(end, reason)
            self._ended.set()

    def _on_lost(self, reason: str) -> None:
        """End as fenced, because the lease has ended. The engine thread sees that before its next step; this process
        ends either way."""
        self._on_end(WorkerEnd.FENCED, reason)


def run_worker(
    plan: WorkerPlan, workers: PlannedWorkers, next_plan: Callable[[float | None], WorkerPlan | None]
) -> None:
    """Be the worker's process: log to its file, die with the parent, exit when the worker has ended (never returns).

    A worker that has left to change its role or its weights, or to sleep, goes on by `next_plan`, which waits for the
    plan for so many seconds (None: until it comes); None: none has come.
    """
    die_with_parent()
    log_to_file(plan.logs / f"{plan.name}.log", plan.name)
    code = 1
    try:
        loop = AsyncioThread("service", niceness=LEASES)
        preparation = WeightsPreparation(
            lambda weights: run_low(lambda: workers.prepare(weights)), workers.forget_prepared
        )
        while True:
            alone = plan.config.dp_for(plan.role) == 1  # Who shares experts starts with the others, in a new process.
            release = workers.release if alone else None
            outcome = WorkerProcess(plan, workers.build, loop, release, preparation, lambda: workers.rank_nodes).run()
            code = 0 if outcome.end in (WorkerEnd.LEFT, WorkerEnd.STOPPED) else 1
            write_exit(plan, outcome.reason)
            if not outcome.goes_on:
                break
            free_memory()
            following = next_plan(None if outcome.sleeps else NEXT_PLAN_S)
            if following is None:
                log.warning("no plan has come by which this process could go on", extra={"worker": plan.name})
                break
            plan, code = following, 1
    except (Exception, CancelledError) as error:
        log.exception("the worker could not start")
        write_exit(plan, str(error) if isinstance(error, TwinpoolError) else f"{type(error).__name__}: {error}")
    finally:
        logging.shutdown()
        # Threads of torch, gRPC and the transfer plane may still run: nothing after this point may send or hang.
        os._exit(code)
