"""Dividing a node's memory among the workers that are asked for, or refusing with sizes that would fit; and what the
nodes have for workers by that, as the supervisor tells the controller (`cluster.controller.node_room`): what `serve`
would refuse is what is refused later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinpool.cache.arena.arena import max_index_bytes
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cluster.assembly.memory_plan import (
    LargestStage,
    MemoryPlan,
    StepMemory,
    data_parallel_part,
    largest_stage,
    plan_memory,
    step_memory,
    unit_bytes,
)
from twinpool.cluster.assembly.node_shares import (
    CardParts,
    Dealt,
    MemoryShort,
    NodeFacts,
    NodeShare,
    WorkerShare,
    copies_beside,
    deal,
    min_part,
)
from twinpool.cluster.controller.node_room import ANY_NUMBER, ClusterRoom, NodePlace, NodeRoom, RoleRoom
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cache_config import CacheOverride
from twinpool.contracts.config.cluster_config import Config, section_of
from twinpool.contracts.config.plane_choice import NO_GPUS_OVER_HOSTS, on_gpus
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.engine.runner.kernel_choice import refused_state

MEMORY_SHARE = 0.25
"""The part of a worker's share of free memory that its pools may take where the configuration sets no sizes."""
WORKER_BYTES = 300 << 20
"""Bytes that each rank's process takes besides weights and pools: interpreter, torch, buffers."""
CUDA_WORKER_BYTES = 2 << 30
"""Bytes of host memory that a process takes whose weights and pools lie on a GPU, CUDA's libraries among them. Not
measured yet (docs/gpu.md)."""
LOOK_S = 2.0
"""Seconds between two looks at the memory that is free now."""
NEWS_BYTES = 64 << 20
"""Bytes by which free memory must have changed to be told again."""
MIN_STARTS = 2


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """The workers that are to be started on a node, and the memory that is free there."""

    config: Config
    pool_set: PoolSetSpec
    context: int
    weights: int
    """Bytes of one worker's weights, which those of a node may share."""
    workers: Mapping[Role, float]
    """Number of workers of each role that the node is to have; of ranks on several nodes so many workers' worth."""
    free: int
    """Bytes of the node's memory that are free."""
    steps: Mapping[Role, StepMemory]
    """What steps of a worker of each role take besides weights and pools, on each rank."""
    cards: CardParts | None = None
    """What the workers get of the node's cards, where their weights and pools lie; None: in its memory."""
    parts: Mapping[Role, float] = field(default_factory=dict)
    """Which part of the weights a worker has; all where a role isn't named."""

    def plans(self) -> dict[Role, MemoryPlan] | None:
        """The memory plan of a worker of each role; None where free memory, or that of its cards, is too little for the
        smallest pools.

        Raises `ConfigError` for a pool smaller than a page.
        """
        share = int((self.free - self._shared_weights) // (sum(self.workers.values()) or 1))
        plans = {}
        for role in self.workers:
            cache = self.config.cache_for(role)
            if 0 < cache.device_tokens < cache.page_tokens:
                raise ConfigError(
                    f"cache.device_tokens={cache.device_tokens} is less than one page "
                    f"(cache.page_tokens={cache.page_tokens})"
                )
            if self.cards is not None:
                budget = self.cards.budget(role)
            else:
                others = self._own_weights(role) + self._processes(role) + self._host(role)
                budget = min(int(share * MEMORY_SHARE), share - others)
            on_cards = self.cards is not None
            plan = plan_memory(self.pool_set, self.config, role, self.context, budget, fill=on_cards)
            if plan is None:
                return None
            plans[role] = plan
        return plans

    def need(self, plans: dict[Role, MemoryPlan]) -> int:
        """Bytes of the node's memory that all workers take together: pools, weights and what steps take unless they lie
        on cards, processes, and host tiers of a configured size."""
        each = {role: self._processes(role) for role in self.workers}
        if self.cards is None:
            each = {role: plans[role].nbytes + self._own_weights(role) + own for role, own in each.items()}
        return int(sum(count * each[role] for role, count in self.workers.items())) + self._hosts + self._shared_weights

    def _own_weights(self, role: Role) -> int:
        """Bytes of weights that each worker on the node's processors has to itself."""
        return 0 if shares_weights(self.config) else int(self.weights * self.parts.get(role, 1.0))

    @property
    def _shared_weights(self) -> int:
        """Bytes of weights that the workers of the node share: they have them once for each layout of ranks, since each
        divides them in its own way."""
        ways = {ways_of(self.config, role) for role, count in self.workers.items() if count}
        return self.weights * len(ways) if shares_weights(self.config) else 0

    def _processes(self, role: Role) -> int:
        """Bytes of the node's memory that the processes of a worker take, and its steps unless they are on cards."""
        each = WORKER_BYTES + self.steps[role].nbytes if self.cards is None else CUDA_WORKER_BYTES
        return self.config.ranks_for(role) * each

    def fits(self, plans: dict[Role, MemoryPlan]) -> bool:
        """Whether these plans fit into the node's memory, and onto its cards."""
        return self.need(plans) <= self.free and not (self.cards is not None and self.cards.short(plans))

    def host_tiers(self, plans: Mapping[Role, MemoryPlan]) -> tuple[int, dict[Role, int]]:
        """The budget of all host tiers together, and the host tier of a worker of each role, in bytes.

        The budget is `cluster.host_memory_share` of free memory, or `cluster.host_memory_bytes`, but never memory that
        weights and pools need. Each worker gets the same multiple of its device pools, `cluster.host_pools` at most.
        Where the configuration gives any worker a host tier of its own (`cache.host_bytes`), there is no budget.
        """
        own = {role: self.config.cache_for(role).host_bytes for role in self.workers}
        cluster = self.config.cluster
        wished = cluster.host_memory_bytes or int(cluster.host_memory_share * self.free)
        budget = 0 if any(own.values()) else max(0, min(wished, self.free - self.need(dict(plans))))
        if not budget:
            return 0, own
        counts = self.workers
        multiple = cluster.host_pools
        for _ in range(8):  # The index grows with the pages, nearly in proportion: this ends after two or three.
            each = {role: int(multiple * plans[role].nbytes) for role in self.workers}
            taken = sum(counts[role] * self._with_index(role, each[role]) for role in self.workers)
            if taken <= budget:
                break
            multiple *= 0.999 * budget / taken
        least = {role: 2 * self.config.ranks_for(role) * self._page_bytes(role) for role in self.workers}
        return budget, {
            role: each[role] if each[role] >= least[role] and taken <= budget else 0 for role in self.workers
        }

    def _page_bytes(self, role: Role) -> int:
        return sum(unit_bytes(self.pool_set, self.config.ranks_for(role), self.config.pp_for(role)).values())

    def _host(self, role: Role) -> int:
        """Bytes of the host tier that the configuration gives a worker of `role`, with the index of its arenas."""
        return self._with_index(role, self.config.cache_for(role).host_bytes)

    def _with_index(self, role: Role, nbytes: int) -> int:
        config, size = self.config, self.config.ranks_for(role)
        if not nbytes or config.cache.arena != "auto" or config.transfer.plane == "local":
            return nbytes
        ranks = [self.pool_set.shard(rank, size, config.pp_for(role)) for rank in range(size)]
        return nbytes + sum(max_index_bytes(spec, nbytes // size) for spec in ranks)

    @property
    def _hosts(self) -> int:
        return int(sum(count * self._host(role) for role, count in self.workers.items()))

    def refusal(self, plans: dict[Role, MemoryPlan] | None) -> str:
        """One line for the operator: why the workers don't fit, and which settings would."""
        workers = sum(self.workers.values())
        if self.cards is not None and (plans is None or self.cards.short(plans)):
            part = f"each rank has {_mib(self.cards.free)} of a GPU"
            none = f"{part}, too little for its part of {_mib(self.weights)} of weights, what steps take, and a page"
            short = none if plans is None else self.cards.short(plans)
            return f"{short}: {self._advice()}; or engine.device=cpu"
        if plans is None:
            said = f"{workers:g} workers need {self._weights_said}, and pools of at least a page"
        else:
            pools = " and ".join(_mib(plans[role].nbytes) for role in self.workers)
            said = f"{workers:g} workers need about {_mib(self.need(plans))} ({self._weights_said}"
            said += f", pools of {pools}, {_mib(self._hosts)} of host tiers)"
        return f"{said}; {_mib(self.free)} are free: {self._advice()}"

    @property
    def _weights_said(self) -> str:
        if self._shared_weights:
            return f"{_mib(self._shared_weights)} of weights that they share"
        return " and ".join(dict.fromkeys(_mib(self._own_weights(role)) for role in self.workers)) + " of weights each"

    def _advice(self) -> str:
        """The first setting that fits: smaller pools, then fewer workers, then either without host tiers."""
        fewer = replace(self, workers=dict.fromkeys(self.workers, 1))
        flags = " ".join(f"--{section_of(role)} 1" for role in self.workers)
        ways = {"": self, f"{flags} and ": fewer}
        if self._hosts:
            ways |= {
                "without cache.host_bytes, ": self._without_hosts(),
                f"without cache.host_bytes, {flags} and ": fewer._without_hosts(),
            }
        for how, demand in ways.items():
            plans = demand._left_open().plans()
            if plans is not None and demand._left_open().fits(plans):
                return f"{how}cache.device_tokens={min(plan.positions for plan in plans.values())} fits"
        return "this model needs more memory than that, or a smaller engine.dtype"

    def _left_open(self) -> MemoryDemand:
        """The same demand with the sizes of pools left to the plan."""
        return self._with_cache(device_tokens=0, device_requests=0)

    def _without_hosts(self) -> MemoryDemand:
        return self._with_cache(host_bytes=0)

    def _with_cache(self, **sizes: Any) -> MemoryDemand:
        """The same demand with these keys of the cache section set for both roles, overrides included."""

        def unset(override: CacheOverride) -> CacheOverride:
            return replace(override, **dict.fromkeys(sizes))

        config = self.config
        changed = replace(
            config,
            cache=replace(config.cache, **sizes),
            prefill=replace(config.prefill, cache=unset(config.prefill.cache)),
            decode=replace(config.decode, cache=unset(config.decode.cache)),
            colocate=replace(config.colocate, cache=unset(config.colocate.cache)),
        )
        return replace(self, config=changed)


def shares_weights(config: Config) -> bool:
    """Whether a node's memory is planned for workers that have their weights once."""
    return config.engine.share_weights == "on" and not on_gpus(config)


def named(workers: Mapping[Role, float]) -> list[tuple[WorkerName, Role]]:
    """The names of so many workers of each role."""
    return [(WorkerName(f"{role}-{i}"), role) for role, count in workers.items() for i in range(int(count))]


def card_parts(
    facts: NodeFacts,
    config: Config,
    weights: int,
    workers: Mapping[Role, float],
    steps: Mapping[Role, StepMemory],
    stages: Mapping[Role, LargestStage],
) -> tuple[Dealt, CardParts | None]:
    """The cards that a node's workers are dealt, and what they get of them; nothing where it has none that count.

    Under Ray, which deals cards out by itself, each rank has one of its own. Raises `ConfigError` where a worker has
    more ranks than there are cards.
    """
    if not facts.cards:
        return {}, None
    ranks = {role: config.ranks_for(role) for role in workers}
    shares = {role: config.cache_for(role).device_share for role in workers}
    taken = {role: steps[role].nbytes for role in workers}
    if facts.node_id:
        return {}, CardParts(min(card.free for card in facts.cards), ranks, shares, weights, taken, stages)
    dealt = deal([(name, ranks[role]) for name, role in named(workers)], facts.cards)
    return dealt, CardParts(min_part(dealt, facts.cards), ranks, shares, weights, taken, stages)


def divide(
    facts: NodeFacts, config: Config, pool_set: PoolSetSpec, spec: ModelSpec, weights: int, wanted: Mapping[Role, int]
) -> NodeShare:
    """Divide a node's cores and memory among the workers of each role that it has places for, of those `wanted`.

    `weights`: bytes of one worker's weights.

    Raises `MemoryShort` with the numbers that would fit, and `ConfigError` for a pool smaller than a page.
    """
    if not on_gpus(config):
        facts = replace(facts, cards=())  # Of several nodes only some have GPUs, so that none of them is used.
    if on_gpus(config) and any(config.over_hosts(role) for role in wanted):
        raise MemoryShort(NO_GPUS_OVER_HOSTS)
    workers: dict[Role, float] = {}
    largest = {role: _largest_rank(spec, pool_set, config, role) for role in wanted if config.over_hosts(role)}
    processes = 0
    for role, count in wanted.items():
        ranks = config.ranks_for(role)
        here = min(count * ranks, facts.places.get(role, 0))
        if config.over_hosts(role):
            workers[role] = here / ranks
        else:
            here -= here % ranks
            workers[role] = here // ranks
        processes += here
    if on_gpus(config) and not facts.cards:
        raise MemoryShort(facts.no_cards or "engine.device=cuda, and it has no GPU that torch sees, or no Triton")
    for card in facts.cards:
        refused = refused_state(pool_set, card.capability, triton=config.engine.attention != "torch")
        if refused:
            raise MemoryShort(f"cuda:{card.index} ({card.name}): {refused}")
    steps = {role: step_memory(spec, pool_set, config, role, bool(facts.cards)) for role in workers}
    counts = {role: config.pp_for(role) for role in workers if config.pp_for(role) > 1 and facts.cards}
    stages = {role: largest_stage(spec, pool_set, config.engine, count) for role, count in counts.items()}
    dealt, cards = card_parts(facts, config, weights, workers, steps, stages)
    parts = {role: data_parallel_part(spec, config.engine, config.dp_for(role)) for role in workers}
    worth = {role: count * largest.get(role, 1.0) for role, count in workers.items()}
    demand = MemoryDemand(config, pool_set, spec.context, weights, worth, facts.free, steps, cards, parts)
    plans = demand.plans()
    if plans is None or not demand.fits(plans):
        raise MemoryShort(demand.refusal(plans))
    most = config.cluster.workers_per_core * facts.cores
    if most and processes > most and not facts.node_id:  # Of a Ray that is joined some stay away from this node.
        raise MemoryShort(
            f"{sum(workers.values()):g} workers are {processes} processes, and {facts.cores} cores take {most} "
            f"(cluster.workers_per_core={config.cluster.workers_per_core})"
        )
    budget, host_bytes = demand.host_tiers(plans)
    threads = config.engine.threads or max(1, facts.cores // max(1, processes))
    on_cards = {role: cards.budget(role) for role in workers} if cards is not None else {}
    beside = copies_beside(config, facts.cores, threads * processes)
    return NodeShare(
        facts, workers, threads, weights, plans, budget, host_bytes, on_cards, steps, dealt, beside, parts, largest
    )


def _largest_rank(spec: ModelSpec, pool_set: PoolSetSpec, config: Config, role: Role) -> float:
    """How many times an equal part of a worker its largest rank has."""
    stages = config.pp_for(role)
    if stages == 1:
        return 1.0
    stage = largest_stage(spec, pool_set, config.engine, stages)
    return stages * max(stage.weights, stage.pools)


def common_sizes(shares: Mapping[str, NodeShare], role: Role) -> dict[str, WorkerShare]:
    """The share of a worker of `role` on each node, by Ray id, where its ranks may be on several: all have the pools of
    the node that has least for them."""
    sizes = {node: share.sizes(role) for node, share in shares.items()}
    able = [sizes[node] for node, share in shares.items() if share.workers[role]]
    if not able:
        return sizes
    counts = {pool: min(one.counts[pool] for one in able) for pool in able[0].counts}
    host_bytes, copies = min(one.host_bytes for one in able), all(one.copy_threads for one in able)
    return {
        node: replace(one, counts=counts, host_bytes=host_bytes, copy_threads=copies) for node, one in sizes.items()
    }


def max_bytes(share: NodeShare, config: Config, role: Role) -> int:
    """Bytes of a node's memory that a worker of `role` takes at most, its host tier filled; weights that it shares are
    left out."""
    if share.facts.cards:
        return config.ranks_for(role) * CUDA_WORKER_BYTES + share.host_bytes[role]
    steps = config.ranks_for(role) * (WORKER_BYTES + share.steps[role].nbytes)
    weights = 0 if shares_weights(config) else int(share.weights * share.parts.get(role, 1.0))
    return int((share.plans[role].nbytes + weights + steps + share.host_bytes[role]) * share.largest.get(role, 1.0))


def ways_of(config: Config, role: Role) -> tuple[int, int, int]:
    """By what workers of `role` divide their weights among ranks."""
    return config.tp_for(role), config.ep_for(role), config.pp_for(role)


def shared_weights(share: NodeShare, config: Config) -> int:
    """Bytes of weights that the workers of a node have once, for each layout of ranks."""
    ways = {ways_of(config, role) for role in share.workers}
    return share.weights * len(ways) if shares_weights(config) and not share.facts.cards else 0


class RoomReports:
    """Tells what has changed. Used from one thread."""

    def __init__(self, plan: Callable[[], ServePlan], free: Callable[[], int], clock: Clock) -> None:
        """`free`: bytes of this machine's memory that are free now; only asked where all workers run here."""
        self._plan, self._free, self._clock = plan, free, clock
        self._told: ServePlan | None = None
        self._free_told = 0
        self._look_at = clock.now()

    def changed(self) -> ClusterRoom | None:
        """What the nodes have, where that is news since the last call; else None."""
        plan, now = self._plan(), self._clock.now()
        if plan is self._told and now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        free = self._free() if "" in plan.shares else None
        if plan is self._told and (free is None or abs(free - self._free_told) < NEWS_BYTES):
            return None
        self._told, self._free_told = plan, free or 0
        return cluster_room(plan, free)


def cluster_room(plan: ServePlan, free: int | None = None) -> ClusterRoom:
    """What the nodes of `plan` have; `free`: bytes that are free on this machine now, None where that doesn't count."""
    joined = plan.options.ray_address is not None
    nodes = tuple(node_room(share, plan.config, free) for share in plan.shares.values())
    return ClusterRoom(nodes, grows=joined and plan.config.cluster.wait_for_nodes)


def node_room(share: NodeShare, config: Config, free: int | None = None) -> NodeRoom:
    """What a node has for workers by its division."""
    facts, cluster = share.facts, config.cluster
    roles: dict[str, RoleRoom] = {
        role: RoleRoom(
            max_bytes(share, config, role),
            config.ranks_for(role),
            int(planned),
            facts.places.get(role, 0) if facts.node_id else None,
            config.dp_for(role),
            config.over_hosts(role),
        )
        for role, planned in share.workers.items()
    }
    planned_bytes = int(sum(count * roles[role].nbytes for role, count in share.workers.items()))
    return NodeRoom(
        NodePlace(facts.node_id, facts.host),
        # The plan was found to fit, with some bytes of indices and roundings that are not counted here.
        max(facts.free - shared_weights(share, config), planned_bytes),
        cluster.workers_per_core * facts.cores or ANY_NUMBER,
        cluster.starts_at_once or max(MIN_STARTS, facts.cores // 2),
        roles,
        tuple(share.dealt) if share.dealt else None,
        free,
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
