"""A follower's process (rank 1 and up of a worker): it carries out its leader's orders and dies with the leader.

When the leader leaves its role, a follower closes all that it has for the worker, keeps its part of the model and the
group of the ranks, and goes on by the next plan.

A follower does nothing on its own account, except that it stores pages that arrive over TCP for rooms that the leader
has permitted. An order that can't be carried out ends the process; the leader's process sees that and ends too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from twinpool.cluster.assembly.build_parts import rebind
from twinpool.cluster.assembly.build_worker import RankParts, build_rank
from twinpool.cluster.processes.process_ids import die_with_parent
from twinpool.cluster.processes.run_folder import log_to_file
from twinpool.cluster.ranks import DataParallelRank, FollowerRank, follow
from twinpool.cluster.worker_process.worker_plan import (
    WorkerPlan,
    arenas_of,
    images_of,
    leader_place,
    meet_sharers,
)
from twinpool.cluster.worker_process.worker_process import free_memory, freeze_modules
from twinpool.contracts import cpu_levels as processor
from twinpool.contracts.cluster_secret import SECRET_VARIABLE
from twinpool.contracts.messages.rank_orders import (
    AwaitReady,
    BindArenas,
    CheckPages,
    CloseLink,
    CopyPages,
    DescribeMemory,
    DigestPages,
    EndRank,
    FetchPages,
    FindPages,
    LeaveRole,
    MarkStep,
    OpenLink,
    Order,
    PermitRoom,
    PostWrite,
    PutPages,
    RevokeRoom,
    RunStep,
    ServeExperts,
    SeverLink,
    SeverPeer,
    ZeroPages,
)
from twinpool.engine.runner.launched_step import serve_experts
from twinpool.engine.runner.load_model import KeptModel

log = logging.getLogger("twinpool.follower")

_LOOK_S = 0.1
"""Seconds between two rounds when nothing arrives: so late a cut connection is found. The leader's death ends the wait
at once."""


class FollowerLoop:
    """The loop of a follower: carries out orders until the leader sends `EndRank` or `LeaveRole`, or is dead."""

    def __init__(self, follower: FollowerRank, parts: RankParts) -> None:
        self._line, self._leader, self._parts = follower.line, follower.leader, parts
        self.leaves = 0
        """The number of the order to leave the role, which is to be answered when all parts are closed; 0: none."""
        for waitable in (self._line.socket, self._leader.fd):
            parts.waiter.add(waitable)

    def run(self) -> str:
        """Carry out orders until the worker ends; returns the reason, in words."""
        while True:
            self._parts.waiter.wait(_LOOK_S)
            # Orders come before the poll of links, because writes are stored only for rooms that an order permits.
            while (item := self._line.next(0.0)) is not None:
                sequence, order = item
                if isinstance(order, EndRank):
                    return order.reason
                if isinstance(order, LeaveRole):
                    self.leaves = sequence
                    return "the worker has left its role"
                if isinstance(order, FindPages | FetchPages | PutPages):
                    assert self._parts.storage is not None, "a leader without storage asks nothing of it"
                    self._parts.storage.carry_out(sequence, order)
                    continue
                if isinstance(order, PostWrite):
                    self._parts.links.post(sequence, order)
                    continue
                answer = self._obey(order)
                if sequence:
                    self._line.answer(sequence, answer)
            for sequence, answer in self._parts.storage.answers() if self._parts.storage is not None else ():
                self._line.answer(sequence, answer)
            # Only now, as orders may come before a step's marks that are given while it waits to be run.
            self._parts.steps.look()
            for sequence, done in self._parts.links.answers():
                self._line.answer(sequence, done)
            for notice in self._parts.links.poll():
                self._line.send(notice)
            if self._leader.dead:
                return f"the leader {self._leader.death}"

    def _obey(self, order: Order) -> Any:
        match order:
            case MarkStep():
                self._parts.steps.expect(order)
                return None
            case RunStep():
                self._parts.steps.run(partial(self._parts.engine.follow, order))
                return None
            case ServeExperts():
                self._parts.steps.run(partial(serve_experts, self._parts.engine))
                return None
            case ZeroPages() | CopyPages() | DigestPages() | CheckPages():
                return self._parts.steps.apply(partial(self._parts.state.carry_out, order))
            case DescribeMemory() | SeverPeer() | OpenLink() | CloseLink() | SeverLink() | PermitRoom() | RevokeRoom():
                return self._parts.links.carry_out(order)
            case BindArenas():
                return rebind(self._parts.arena, order)
            case AwaitReady():
                return self._parts.weights
            case _:
                raise AssertionError(f"{type(order).__name__} comes once, or not here")


def serve_rank(plan: WorkerPlan, next_plan: Callable[[], WorkerPlan | None] = lambda: None) -> str:
    """Be rank `plan.rank` until the worker ends; returns the reason. When it leaves its role, go on by `next_plan`,
    which waits for the plan; None: none has come. Raises what `follow` and `build_rank` raise."""
    if plan.secret:
        os.environ[SECRET_VARIABLE] = plan.secret
    config = plan.rank_config
    processor.pin(config.engine.numerics_class)  # before the ranks meet, which computes
    cluster = config.cluster
    follower = follow(
        plan.meeting,
        plan.rank,
        config.ranks_for(plan.role),
        config.engine,
        deadline_s=cluster.rank_timeout_s,
        start_s=cluster.start_timeout_s,
        over=leader_place(plan),
    )
    kept, dp = KeptModel(images_of(plan)), None
    try:
        dp = meet_sharers(plan) if config.dp_for(plan.role) > 1 else None
        while True:
            reason, leaves = _serve_role(plan, follower, kept, dp)
            if not leaves:
                return reason
            free_memory()
            follower.line.answer(leaves, True)
            following = next_plan()
            if following is None:
                return f"{reason}, and no plan has come by which this rank could go on"
            plan = following
    finally:
        if dp is not None:
            dp.close()
        follower.close()


def _serve_role(
    plan: WorkerPlan, follower: FollowerRank, kept: KeptModel, dp: DataParallelRank | None
) -> tuple[str, int]:
    """Be the rank in the plan's role; returns why that is over, and `FollowerLoop.leaves`. All its parts are closed
    then."""
    arenas = arenas_of(plan)
    parts = build_rank(
        plan.role,
        plan.read_spec(),
        plan.rank_config,
        host=plan.host,
        counts=plan.counts,
        ranks=follower.ranks,
        arenas=arenas,
        kept=kept,
        name=plan.name,
        dp=dp,
    )
    try:
        loop = FollowerLoop(follower, parts)
        reason = loop.run()
    finally:
        parts.close()
    if loop.leaves:
        arenas.give_up()
    return reason, loop.leaves


def run_follower(plan: WorkerPlan, next_plan: Callable[[], WorkerPlan | None]) -> None:
    """Be the rank's process: log to its file, die with the parent, exit when the worker ends (never returns)."""
    die_with_parent()
    log_to_file(plan.logs / f"{plan.name}.rank{plan.rank}.log", f"{plan.name}.rank{plan.rank}")
    code = 1
    freeze_modules()
    try:
        log.info("ended", extra={"reason": serve_rank(plan, next_plan)})
        code = 0
    except Exception:
        log.exception("a rank has ended")
    finally:
        logging.shutdown()
        # As in a leader's process: threads of torch may still run, and nothing after this may send or hang.
        os._exit(code)
