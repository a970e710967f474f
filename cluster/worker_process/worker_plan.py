"""The plan with which a worker's process is started, the weights that it prepares to go on with, and the file in which
it leaves why it ended."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twinpool.cluster.assembly.node_shares import WorkerShare
from twinpool.cluster.models import path_on_this_node
from twinpool.cluster.processes.process_ids import start_time
from twinpool.cluster.worker_process.worker_thread import WorkerEnd
from twinpool.contracts import cpu_levels
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec, with_weights
from twinpool.contracts.checkpoint.safetensors_headers import files_mark
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName, dp_rank
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.worker_status import WorkerStatus
from twinpool.contracts.sampling_params import WeightsVersion

if TYPE_CHECKING:
    from twinpool.cluster.arena.arena_client import ArenaClient
    from twinpool.cluster.arena.shared_weights import SharedImages
    from twinpool.cluster.rank_links import LeaderPlace, NodeOfRank, RankSocket
    from twinpool.cluster.ranks import DataParallelRank, RankGroup


class NodeUnmeasured(ConfigError):
    """Raised where a worker was placed on a node that its plan has no share for: one that joined after it was made."""


log = logging.getLogger("twinpool.worker")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """All that a worker's process is told at its start; it travels to the process by value."""

    name: WorkerName
    role: Role
    incarnation: Incarnation
    model: Path
    config: Config
    counts: dict[str, int]
    """Pages and slots that each pool can lease."""
    host: str
    """Address that the worker's services bind to and are reached at; empty: its Ray node's."""
    controller: str
    """The controller's endpoint, ``host:port``."""
    logs: Path
    """The folder of the run's logs, on every node."""
    rank: int = 0
    """Which of the worker's tensor-parallel ranks this process is; 0 is the leader."""
    meeting: str = field(default="", repr=False)
    """The secret, in hex, by which the ranks of this incarnation find and authenticate each other; empty for one
    rank."""
    leader_at: str = ""
    """Where the leader of ranks on several hosts listens for the others; empty where all are on one."""
    sharing: str = field(default="", repr=False)
    """The same of the workers with which it shares its experts; empty where it has all."""
    together: str = ""
    """The name of the placement group of the workers with which it shares its experts; empty where it has all."""
    node_id: str = ""
    """The Ray node id of the node that the worker runs on."""
    arena: str = field(default="", repr=False)
    """The token of the arena agents, in hex; empty where there are none."""
    secret: str = field(default="", repr=False)
    """The cluster's secret, in hex, where workers don't meet on loopback; else empty."""
    by_node: Mapping[str, WorkerShare] = field(default_factory=dict)
    """The worker's share on each node, by Ray node id; empty where `counts` and `config` have the share already."""
    cards: tuple[int, ...] = ()
    """The GPU of each rank, as torch counts; empty where they run on the CPU, or have one of Ray's alone."""
    source: str = ""
    """The name by which a node that lacks `model` fetches it."""
    settings: str = ""
    """Digest of the settings that it is started with, which the worker registers with."""
    weights: WeightsVersion | None = None
    """The weights that it has in place of the checkpoint's; None: the checkpoint's."""

    @property
    def gpus_of_ray(self) -> int:
        """GPUs that each rank asks Ray for."""
        return int(self.config.engine.device == "cuda" and not self.cards)

    @property
    def rank_config(self) -> Config:
        """The configuration of this rank: with the GPU that it was dealt."""
        return on_card(self.config, self.cards[self.rank]) if self.cards else self.config

    def read_spec(self) -> ModelSpec:
        """Read the model, which is fetched first where this node lacks it, with its weights. Raises
        `CheckpointError`."""
        return self.spec_with(self.weights)

    def spec_with(self, weights: WeightsVersion | None) -> ModelSpec:
        """The model with these weights in place of the checkpoint's. Raises `CheckpointError`."""
        engine = self.config.engine
        model = path_on_this_node(self.model, self.source, log.info)
        spec = read_model_spec(model, engine.context, engine.draft_model)
        return with_weights(spec, weights, engine.weight_roots)

    def on(self, node_id: str) -> WorkerPlan:
        """The plan with the share of the node that the worker was placed on. Raises `NodeUnmeasured` for a node that
        `by_node` lacks."""
        plan = dataclasses.replace(self, node_id=node_id)
        if not self.by_node:
            return plan
        sizes = self.by_node.get(node_id)
        if sizes is None:
            raise NodeUnmeasured(f"node {node_id[:8]} was not measured before this start, which is tried again")
        config = sizes.applied_to(self.config, self.role)
        return dataclasses.replace(plan, config=config, counts=dict(sizes.counts), by_node={})


def on_card(config: Config, card: int) -> Config:
    """`config` for a rank that computes on this GPU."""
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, device=f"cuda:{card}"))


def _cannot_prepare(weights: WeightsVersion) -> str:
    raise ConfigError("its process takes no other weights than it was started with")


def _on_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="weights", daemon=True).start()


class WeightsPreparation:
    """Reads and checks the weights that a worker's cluster may change to, on a thread of its own beside the worker that
    serves. Methods may be called from any thread."""

    def __init__(
        self,
        prepare: Callable[[WeightsVersion], str] = _cannot_prepare,
        forget: Callable[[], None] = lambda: None,
        begin: Callable[[Callable[[], None]], None] = _on_a_thread,
    ) -> None:
        """`prepare` reads and checks weights, keeps them for the worker to come, and returns the digest of their files;
        what it raises is why these can't be had. `forget` frees what was prepared. `begin` has a function run beside
        the worker, and returns at once."""
        self._prepare, self._forget, self._begin = prepare, forget, begin
        self._lock = threading.Lock()
        self._wanted: WeightsVersion | None = None
        self._done: WeightsVersion | None = None
        """What was prepared last, or was to be."""
        self._busy = False
        self._found: tuple[int, str, str] = (0, "", "")
        """The number of the weights that were looked at, the digest of their files, and why they can't be had."""

    def order(self, weights: WeightsVersion | None) -> None:
        """Prepare these, in place of any others; None: none. Returns at once; does nothing where it is so already."""
        with self._lock:
            wanted = self._wanted
            if (weights and weights.number) == (wanted and wanted.number):
                return
            self._wanted = weights
            if not self._busy:
                self._busy = True
                self._begin(self._work)

    def on(self, status: WorkerStatus) -> WorkerStatus:
        """The status with what was prepared."""
        with self._lock:
            number, digest, why_not = self._found
            if self._wanted is None or self._wanted.number != number:
                return status
        return replace(status, prepared=number, prepared_digest=digest, unprepared=why_not[:1000])

    def _work(self) -> None:
        while True:
            with self._lock:
                wanted = self._wanted
                if wanted == self._done:
                    self._busy = False
                    return
            if wanted is None:
                found = 0, "", ""
                self._forget()
            else:
                found = self._look(wanted)
            with self._lock:
                self._found, self._done = found, wanted

    def _look(self, weights: WeightsVersion) -> tuple[int, str, str]:
        try:
            return weights.number, self._prepare(weights), ""
        except Exception as error:  # Whatever files raise, the next change finds this thread able to look.
            log.warning("weights can't be prepared", extra={"folder": weights.path, "reason": f"{error!s:.1000}"})
            return weights.number, "", f"{error!s:.1000}" or type(error).__name__


BuildWorker = Callable[[WorkerPlan], Worker]


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """The cause and the reason of the end of a worker's process."""

    end: WorkerEnd
    reason: str
    goes_on: bool = False
    """Whether its process waits for a plan by which it goes on as another worker."""
    sleeps: bool = False
    """Whether it waits until the cluster is woken."""


def arenas_of(plan: WorkerPlan) -> ArenaClient:
    """The source of memory that outlives the worker: the client of its node's arena agent."""
    from twinpool.cluster.arena.arena_client import ArenaClient

    token = plan.arena if plan.config.cache.arena == "auto" else ""
    return ArenaClient(token, plan.name, plan.incarnation, SystemClock(), time.sleep)


def images_of(plan: WorkerPlan) -> SharedImages:
    """The weights that the workers of this node share: the client of its arena agent. Another process that loads them
    may take half of the time that a start has."""
    from twinpool.cluster.arena.shared_weights import SharedImages

    return SharedImages(plan.arena, plan.config.cluster.start_timeout_s / 2, SystemClock(), time.sleep)


def rank_node(plan: WorkerPlan) -> NodeOfRank:
    """The node of a rank, and what the others must have as this one has it."""
    from twinpool.cluster.rank_links import NodeOfRank

    level = plan.config.engine.numerics_class
    counts = ", ".join(f"{pool} {count}" for pool, count in sorted(plan.counts.items()))
    sizes = f"{counts}; host tier {plan.config.cache_for(plan.role).host_bytes}"
    return NodeOfRank(plan.host, node_name(), plan.node_id, cpu_levels.described(level), sizes)


def rank_link_timeout_s(config: Config) -> float:
    """Seconds of silence after which the link between ranks on several hosts is cut: so few that a worker without one
    of them has ended when its lease would."""
    return min(config.transfer.link_timeout_s, config.cluster.lease_s / 2)


def leader_place(plan: WorkerPlan) -> LeaderPlace | None:
    """Where a follower finds a leader that may be on another host; None where all ranks are on this one."""
    from twinpool.cluster.rank_links import LeaderPlace

    if not plan.leader_at:
        return None
    return LeaderPlace(plan.leader_at, rank_node(plan), rank_link_timeout_s(plan.config))


def meet_ranks(plan: WorkerPlan, end: Callable[[str], None], place: RankSocket | None = None) -> RankGroup:
    """Meet the plan's other ranks as their leader; `end` is called when one of them dies. `place`: where those of other
    hosts come; None: all are on this one. Raises `PeerDead` when a rank doesn't come, and `ConfigError` for one on a
    node that is unlike this one."""
    from twinpool.cluster.rank_links import DeathWatch
    from twinpool.cluster.ranks import lead

    cluster = plan.config.cluster
    group = lead(
        plan.meeting,
        plan.config.ranks_for(plan.role),
        SystemClock(),
        plan.rank_config.engine,
        deadline_s=cluster.rank_timeout_s,
        start_s=cluster.start_timeout_s,
        over=(place, rank_node(plan)) if place is not None else None,
    )
    DeathWatch(group.watch(), end).start()
    return group


def meet_sharers(plan: WorkerPlan, end: Callable[[str], None] | None = None) -> DataParallelRank:
    """Meet the workers that this one shares its experts with: of these the ranks of this number. `end` is called when
    one of them dies; None: it isn't, as on a follower, whose worker ends by that of a leader. Raises `PeerDead` when
    one doesn't come."""
    from twinpool.cluster.rank_links import DeathWatch
    from twinpool.cluster.ranks import meet_data_parallel

    cluster, size = plan.config.cluster, plan.config.dp_for(plan.role)
    rank = meet_data_parallel(
        hashlib.blake2b(b"%d" % plan.rank, digest_size=32, key=bytes.fromhex(plan.sharing)).hexdigest(),
        dp_rank(plan.name, size)[1],
        size,
        SystemClock(),
        plan.rank_config.engine,
        deadline_s=cluster.rank_timeout_s,
        start_s=cluster.start_timeout_s,
    )
    if end is not None:
        DeathWatch(rank.watches, end).start()
    return rank


def check_unchanged(spec: ModelSpec, before: tuple[tuple[int, int, int], ...]) -> None:
    """Refuse files that were written while they were read: their digest is of other bytes than the model's. `before`:
    `files_mark` of then; empty: it isn't looked at."""
    if before and files_mark(spec.headers) != before:
        raise CheckpointError(f"{spec.weights and spec.weights.path} was written to while it was read: write it first")


def exit_file(logs: Path, name: WorkerName, incarnation: Incarnation) -> Path:
    """The file in which an incarnation leaves why it ended; absent when it was killed."""
    return logs / f".{name}.{incarnation}.exit"


def write_exit(plan: WorkerPlan, reason: str) -> None:
    """Write why this incarnation ended into its exit file, atomically: the process may be killed while it writes."""
    path = exit_file(plan.logs, plan.name, plan.incarnation)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(" ".join(reason.split()))
    unfinished.replace(path)


def node_name() -> str:
    """The host name of this machine."""
    return socket.gethostname()


def process_mark() -> tuple[int, int]:
    """This process's pid and start time (`process_ids.start_time`)."""
    return os.getpid(), start_time(os.getpid()) or 0
