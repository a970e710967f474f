"""How much of each kind of state a worker's pools hold, planned from the registry.

The pools of a model grow with different things. A *full* pool holds a page for every position, so its size is given in
positions (`cache.device_tokens`). A *window* pool holds, for each request that runs, the pages that its window reaches
and those that steps under way write, however long the request is; a *state* pool holds one slot for each, and
snapshots. So these two are sized by the number of requests that may run at once (`cache.device_requests`), and by as
much again of what the prefix tree keeps for later turns. All of them are shares of the same memory: where the default
sizes don't fit, requests and positions shrink together.

A request is admitted with all that it will ever hold at once, or it waits; on decode, which takes pages of the full
pool as an answer grows, others leave when there are none. So a plan of any size is free of deadlock, and a request that
no plan of this size can hold is refused when it comes (`KVCacheManager.max_positions`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cache.manager.kv_cache_manager import SNAPSHOTS
from cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from contracts.checkpoint.model_spec import ModelSpec
from contracts.config.cluster_config import Config
from contracts.ids import Role
from engine.models.model_base import StateOptions
from engine.tensors.weight_loader import dtype_for
from worker.step_overlap import LAUNCHED

DEFAULT_CONTEXTS = 8
"""A full pool holds this many whole contexts unless memory is short."""
KEPT_WINDOWS = 2
"""Windows in the prefix tree for each request that runs: at the ends of prompts and of answers."""
KEPT_STATES = 2
"""Recurrent states in the prefix tree for each request that runs."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool of one worker."""

    pool: str
    kind: PoolKind
    count: int
    """Pages or slots that can be leased."""
    nbytes: int
    """Of all of it, the null page or slot included."""
    purpose: str
    """What it is that large for, for people."""

    @property
    def unit(self) -> str:
        return "slots" if self.kind is PoolKind.STATE else "pages"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All pools of a worker."""

    pools: tuple[PoolPlan, ...]
    requests: int
    """Requests whose windows and states fit at once."""
    page_tokens: int

    @property
    def counts(self) -> dict[str, int]:
        """Pages and slots that can be leased, by pool."""
        return {plan.pool: plan.count for plan in self.pools}

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for plan in self.pools)

    @property
    def positions(self) -> int:
        """Positions that the full pool holds."""
        return sum(plan.count for plan in self.pools if plan.kind is PoolKind.FULL) * self.page_tokens


def state_options(spec: ModelSpec, config: Config, role: Role) -> StateOptions:
    """What is chosen about the state of a checkpoint's model."""
    cache = config.cache_for(role)
    return StateOptions(
        dtype_for(spec, config.engine), cache.page_tokens, index_float8=config.cache.index_dtype == "fp8"
    )


def stride(config: Config, role: Role) -> int:
    """Positions that the launched steps of one request write beyond what is committed."""
    return LAUNCHED * (config.prefill.chunk_tokens if role is Role.PREFILL else 1)


def most_requests(config: Config, role: Role) -> int:
    """Requests that a worker runs at once."""
    return config.prefill.max_running if role is Role.PREFILL else config.decode.max_batch_tokens


def plan_memory(spec: PoolSetSpec, config: Config, role: Role, context: int, budget: int) -> MemoryPlan | None:
    """The pools of a worker within `budget` bytes, for a model of `context` positions; None where not even the
    smallest fit.

    What the configuration says is taken as it is, whatever the budget: `budget` bounds what it leaves open.
    """
    cache = config.cache_for(role)
    size = spec.page_tokens
    limit = most_requests(config, role)
    units = unit_bytes(spec, config.tp_for(role))

    def sized(pages: int, requests: int) -> MemoryPlan:
        return _sized(spec, units, stride(config, role), pages, min(requests, pages))

    def fits(pages: int, requests: int) -> bool:
        return sized(pages, requests).nbytes <= budget

    if cache.device_tokens:
        pages = cache.device_tokens // size
        requests = cache.device_requests or max(1, _largest(limit, lambda n: fits(pages, n)))
        return sized(pages, requests)
    most = max(1, DEFAULT_CONTEXTS * context // size)
    share = [max(1, most * n // limit) for n in range(limit + 1)]
    requests = cache.device_requests or max(1, _largest(limit, lambda n: fits(share[n], n)))
    pages = _largest(most, lambda n: fits(n, requests))
    return sized(pages, requests) if pages else None


def _largest(limit: int, good: Callable[[int], bool]) -> int:
    """The largest of `1 .. limit` that is good, where all smaller ones are as well; 0 if none is."""
    return bisect_right(range(1, limit + 1), False, key=lambda n: not good(n))


def unit_bytes(spec: PoolSetSpec, ranks: int) -> dict[str, int]:
    """Bytes of one page or slot of each pool, of all ranks of a worker together; `spec` is the whole model's."""
    shards = [spec.shard(rank, ranks) for rank in range(ranks)]
    return {pool: sum(shard.unit_bytes(pool) for shard in shards) for pool in spec.by_name}


def _sized(spec: PoolSetSpec, units: Mapping[str, int], steps: int, pages: int, requests: int) -> MemoryPlan:
    plans = []
    for pool in spec.pools:
        if pool.kind is PoolKind.FULL:
            count, purpose = pages, f"{pages * spec.page_tokens:,} positions"
        elif pool.kind is PoolKind.WINDOW:
            kept = KEPT_WINDOWS * (spec.window_pages(pool.name) + 1)
            # Nothing has more window pages than pages.
            count = min(pages, requests * (spec.window_hold(pool.name, steps) + kept))
            purpose = f"{requests} requests, {KEPT_WINDOWS} kept each"
        else:
            count = requests * (1 + SNAPSHOTS + KEPT_STATES)
            purpose = f"{requests} requests, {SNAPSHOTS + KEPT_STATES} kept each"
        nbytes = (count + 1) * units[pool.name]
        plans.append(PoolPlan(pool.name, pool.kind, count, nbytes, purpose))
    return MemoryPlan(tuple(plans), requests, spec.page_tokens)
