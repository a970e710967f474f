"""The workers of one process, built one after the other by their plans.

A worker that changes its role ends like any other, and its process goes on as the next one. All that a role shapes
(scheduler, pools, host tier, sockets, registration) is torn down and made anew. What it doesn't shape stays: the loaded
model, and the meeting of the ranks with the group in which they compute.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from twinpool.cluster.processes.priority import run_low
from twinpool.cluster.worker_process.worker_plan import WorkerPlan, arenas_of, images_of, write_exit
from twinpool.contracts import cpu_levels as processor
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.cluster_secret import SECRET_VARIABLE
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.rank_orders import LeaveRole

if TYPE_CHECKING:
    from twinpool.cluster.arena.arena_client import ArenaClient
    from twinpool.cluster.ranks import RankGroup
    from twinpool.engine.runner.load_model import KeptModel


log = logging.getLogger("twinpool.worker")

NEXT_PLAN_S = 15.0
"""Seconds that a process waits for the plan by which it goes on. Then it ends, and its worker is started elsewhere."""


class NextPlan:
    """Hands a process the plan by which it goes on, from another thread."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._plan: WorkerPlan | None = None

    def give(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._given.set()

    def take(self, timeout_s: float = NEXT_PLAN_S) -> WorkerPlan | None:
        """The plan that was given since the last call, or None when none has come after `timeout_s`."""
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
        self._arenas: ArenaClient | None = None

    def build(self, plan: WorkerPlan) -> Worker:
        """Build the worker of a plan, with its other ranks if it has several; `release` has ended the one before.
        Raises what `build_worker` raises."""
        run_low(_import_packages)
        from twinpool.cluster.assembly.build_worker import build_worker
        from twinpool.engine.runner.load_model import KeptModel

        self._plan = plan
        processor.pin(plan.config.engine.numerics_class)  # before the ranks meet, which computes
        if plan.secret:
            os.environ[SECRET_VARIABLE] = plan.secret
        self._kept = self._kept or KeptModel(images_of(plan), run_low)
        if plan.config.tp_for(plan.role) > 1 and self._group is None:
            self._group = _meet(plan, self._end)
        self._arenas = arenas_of(plan)
        return build_worker(
            plan.role,
            plan.name,
            plan.incarnation,
            plan.read_spec(),
            plan.rank_config,
            host=plan.host,
            counts=plan.counts,
            arenas=self._arenas,
            group=self._group,
            kept=self._kept,
        )

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
        plan = self._plan
        assert plan is not None, "ranks meet for a plan"
        log.error("a rank is gone", extra={"worker": plan.name, "reason": reason})
        write_exit(plan, reason)
        logging.shutdown()
        os._exit(1)


def _import_packages() -> None:
    """Load what workers are made of, torch with it: seconds of processor time."""
    import twinpool.cluster.assembly.build_worker  # noqa: F401


def free_memory() -> None:
    """Give back the memory of a worker that nobody refers to any more."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _meet(plan: WorkerPlan, end: Callable[[str], None]) -> RankGroup:
    """Meet the plan's other ranks as their leader; `end` is called when one of them dies. Raises `PeerDead` when a rank
    doesn't come."""
    from twinpool.cluster.ranks import DeathWatch, lead

    cluster = plan.config.cluster
    group = lead(
        plan.meeting,
        plan.config.tp_for(plan.role),
        SystemClock(),
        plan.rank_config.engine,
        deadline_s=cluster.rank_timeout_s,
        start_s=cluster.start_timeout_s,
    )
    DeathWatch(group.watch(), end).start()
    return group
