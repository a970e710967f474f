"""The memory plan of a rank's device: what its pools get, and what its steps take before them.

*Pools.* The plan says how many pages and slots each pool of a worker gets, for the pools that its model declares. They
grow with different things. A *full* pool holds a page for every run of positions, so its size is given in positions
(`cache.device_tokens`). A *window* pool holds, for each request that runs, the pages that its window reaches and the
pages that steps under way write, however long the request is. A *state* pool holds one slot for each request, and its
snapshots. So window and state pools are sized by the number of requests that may run at once (`cache.device_requests`),
with room on top for what the prefix tree keeps for later turns (`KEPT_WINDOWS`, `KEPT_STATES`). All pools are shares of
the same memory: where the default sizes don't fit, requests and positions shrink together.

A request is admitted only when all that it will ever hold at once is free; until then it waits. Decode is the
exception: it takes pages of the full pool as an answer grows, and retracts other requests when there are none. So a
plan of any size is free of deadlock, and a request that the pools can never hold is refused when it comes
(`PageSupply.max_positions`).

*Steps* keep and compute in memory besides weights and pools. They keep rows from one to the next
(`engine.runner.device_rows`): block tables of every pool of pages, and the tokens of requests with penalties. A row is
as long as the longest context, and there is one for each request that a step may have; rows and entries double as they
are needed. Requests beyond that, which take turns, have rows too: those come out of what `cache.device_share` leaves.

What a step computes in grows with its tokens and with the rows that it draws for. Logits are counted for the most that
a draw asks for (cuts, and log-probabilities). Activations are an estimate, by the widest product of the model; what
attention keeps of parts of results has a bound of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from twinpool.cache.manager.running_pages import SNAPSHOTS
from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.picture_spec import PICTURE_BYTES, tower_widths, vision_fields
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.ids import Role
from twinpool.engine.attention.kv_quantization import KV_DTYPES
from twinpool.engine.attention.triton_backend.attend_call import SCRATCH_BYTES
from twinpool.engine.layers.picture_encoder import AT_ONCE, KEPT_BYTES
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import unchecked_model
from twinpool.engine.runner.kernel_choice import dtype_for
from twinpool.engine.tensors.adapters import padded_numbers
from twinpool.engine.tensors.shard import WHOLE, Shard
from twinpool.engine.tensors.weight_loader import Weights
from twinpool.worker.step_commit import LAUNCHED

DEFAULT_CONTEXTS = 8
"""A full pool holds this many whole contexts unless memory is short."""
KEPT_WINDOWS = 2
"""Windows that a window pool has room for in the prefix tree, for each request that runs: one at the end of the prompt
and one at the end of the answer."""
KEPT_STATES = 2
"""Recurrent states that a state pool has room for in the prefix tree, for each request that runs."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of one pool of one worker, all its ranks together."""

    pool: str
    kind: PoolKind
    count: int
    """Pages or slots that can be leased."""
    nbytes: int
    """Bytes of the pool, the null page or slot included."""
    purpose: str
    """Text for the operator: how many positions or requests the pool is sized for."""

    @property
    def unit(self) -> str:
        return "slots" if self.kind is PoolKind.STATE else "pages"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of all pools of a worker."""

    pools: tuple[PoolPlan, ...]
    requests: int
    """Number of requests whose windows and states fit at once."""
    page_tokens: int

    @property
    def counts(self) -> dict[str, int]:
        """Pages and slots that can be leased, by pool."""
        return {plan.pool: plan.count for plan in self.pools}

    @property
    def nbytes(self) -> int:
        """Bytes of all pools, on all ranks together."""
        return sum(plan.nbytes for plan in self.pools)

    @property
    def positions(self) -> int:
        """Number of positions that the full pool holds."""
        return sum(plan.count for plan in self.pools if plan.kind is PoolKind.FULL) * self.page_tokens


def state_options(spec: ModelSpec, config: Config, role: Role) -> StateOptions:
    """The options by which a model declares its pools: dtype, page size, and the dtypes of index keys and of quantised
    keys and values."""
    return StateOptions(
        dtype_for(spec, config.engine),
        config.cache_for(role).page_tokens,
        index_float8=config.cache.index_dtype == "fp8",
        kv_codes=KV_DTYPES[config.cache.kv_dtype],
    )


def stride(config: Config, role: Role) -> int:
    """The most positions that launched steps of one request write beyond its committed length."""
    # A step with drafts is the only one that is launched.
    drafts = max(LAUNCHED, 1 + config.decode.drafts)
    if not config.computes_prompts(role):
        return drafts
    return max(drafts if role is Role.DECODE else 0, LAUNCHED * config.prefill.chunk_tokens)


def max_requests(config: Config, role: Role) -> int:
    """The most requests that a worker of `role` runs at once, by configuration."""
    return config.prefill.max_running if role is Role.PREFILL else config.decode.max_batch_tokens


def plan_memory(
    spec: PoolSetSpec, config: Config, role: Role, context: int, budget: int, *, fill: bool = False
) -> MemoryPlan | None:
    """The memory plan of a worker within `budget` bytes, for a model of `context` positions; None where not even the
    smallest pools fit. `spec` is the whole model's, `budget` is for all ranks together.

    Sizes that the configuration sets are taken as they are, whatever the budget; `budget` bounds only the others. With
    `fill` they take all of it, up to a whole context for each request that may run; else up to `DEFAULT_CONTEXTS`.
    """
    cache = config.cache_for(role)
    size = spec.page_tokens
    limit = max_requests(config, role)
    units = unit_bytes(spec, config.ranks_for(role), config.pp_for(role))

    def sized(pages: int, requests: int) -> MemoryPlan:
        return _sized(spec, units, stride(config, role), pages, min(requests, pages))

    def fits(pages: int, requests: int) -> bool:
        return sized(pages, requests).nbytes <= budget

    if cache.device_tokens:
        pages = cache.device_tokens // size
        requests = cache.device_requests or max(1, _largest(limit, lambda n: fits(pages, n)))
        return sized(pages, requests)
    most = max(1, (max(limit, DEFAULT_CONTEXTS) if fill else DEFAULT_CONTEXTS) * context // size)
    share = [max(1, most * n // limit) for n in range(limit + 1)]
    requests = cache.device_requests or max(1, _largest(limit, lambda n: fits(share[n], n)))
    pages = _largest(most, lambda n: fits(n, requests))
    return sized(pages, requests) if pages else None


def _largest(limit: int, good: Callable[[int], bool]) -> int:
    """The largest number of `1 .. limit` that is `good`, where every smaller one is too; 0 if none is."""
    return bisect_right(range(1, limit + 1), False, key=lambda n: not good(n))


def unit_bytes(spec: PoolSetSpec, ranks: int, stages: int = 1) -> dict[str, int]:
    """Bytes of one page or slot of each pool, of all ranks of a worker together, which are in `stages`; `spec` is the
    whole model's."""
    shards = [spec.shard(rank, ranks, stages) for rank in range(ranks)]
    return {pool: sum(shard.unit_bytes(pool) for shard in shards) for pool in spec.by_name}


@dataclass(frozen=True, slots=True)
class LargestStage:
    """Which parts of a worker's weights, and of its pools, the stage has that has most of them."""

    weights: float
    pools: float


def largest_stage(spec: ModelSpec, pool_set: PoolSetSpec, config: EngineConfig, stages: int) -> LargestStage:
    """The largest parts of `stages` stages; they needn't be of one stage. `pool_set` is the whole model's."""
    model, dtype = unchecked_model(spec, config), dtype_for(spec, config)

    def held(shard: Shard) -> int:
        weights = Weights.dry(spec, dtype, shard)
        model.build_dry(weights)
        return weights.nbytes

    weights = max(held(Shard(stage=stage, stages=stages)) for stage in range(stages)) / held(WHOLE)
    shares = [pool_set.staged(stage, stages) for stage in range(stages)]
    pools = max(share.unit_bytes(pool) / pool_set.unit_bytes(pool) for share in shares for pool in pool_set.by_name)
    return LargestStage(weights, pools)


def data_parallel_part(spec: ModelSpec, config: EngineConfig, dp: int) -> float:
    """Which part of the model's weights a worker has that shares its experts, one of `dp`."""
    if dp == 1:
        return 1.0
    model, dtype = unchecked_model(spec, config), dtype_for(spec, config)
    mine, whole = Weights.dry(spec, dtype, Shard(dp=dp)), Weights.dry(spec, dtype)
    for weights in (mine, whole):
        model.build_dry(weights)
    return mine.nbytes / whole.nbytes


def _sized(spec: PoolSetSpec, units: Mapping[str, int], steps: int, pages: int, requests: int) -> MemoryPlan:
    """The plan with `pages` pages in a full pool, for `requests` requests that write up to `steps` positions ahead."""
    plans = []
    for pool in spec.pools:
        if pool.kind is PoolKind.FULL:
            count, purpose = pages, f"{pages * spec.page_tokens:,} positions"
        elif pool.kind is PoolKind.WINDOW:
            kept = KEPT_WINDOWS * (spec.window_pages(pool.name) + 1)
            # A sequence never has more pages in a window pool than in the full pool.
            count = min(pages, requests * (spec.window_hold(pool.name, steps) + kept))
            purpose = f"{requests} requests, {KEPT_WINDOWS} kept each"
        else:
            count = requests * (1 + SNAPSHOTS + KEPT_STATES)
            purpose = f"{requests} requests, {SNAPSHOTS + KEPT_STATES} kept each"
        nbytes = (count + 1) * units[pool.name]
        plans.append(PoolPlan(pool.name, pool.kind, count, nbytes, purpose))
    return MemoryPlan(tuple(plans), requests, spec.page_tokens)


_COLOUR_BYTES = 3 * (8 + 4)
"""Of the numbers of a pixel while they are made."""
_INT32 = 4
_FIRST_ROWS, _FIRST_ENTRIES = 16, 64
"""What rows and entries are doubled from."""
_TABLE_TENSORS = 2
"""Of block tables: pages and epochs."""
_GATHERED_BYTES = 16
"""For each entry of the tables that a step reads: a page and an epoch, and for a window the column (int64)."""
_PENALTY_ELEMENTS = 1 << 23
"""Tokens and logits that penalties look at together, at most."""
_PENALTY_BYTES = 48
"""For each of them."""
_LOGIT_BYTES = {"cpu": 64, "cuda": 32}
"""For each logit of a row that is drawn for: in float32, and what draws and log-probabilities make of it. On a CPU
weights are float64, and sorted for a nucleus; on a GPU a kernel draws, and log-probabilities take the most."""
_GRAPH_ROW_BYTES = 32
"""Of a row of a step graph's inputs besides block tables: for each pool, and once more for all of them."""
_WIDTHS = 8
"""Activations of a token that live at once: so many times the hidden size and the widest product together."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on one rank's device."""

    block_tables: int
    histories: int
    """Tokens of requests with penalties, and what penalties compute in."""
    logits: int
    activations: int
    scratch: int
    """Of attention, for parts of results."""
    graphs: int
    """Of step graphs: their inputs, and what the largest of them computes in."""
    rows: int
    """Requests that a step has a row for."""
    adapters: int = 0
    """Of adapters, as many and as large as there may be, and of one that is being read."""
    pictures: int = 0
    """What a tower has computed that is kept, and what it computes the largest picture in."""

    @property
    def nbytes(self) -> int:
        computed = self.logits + self.activations + self.scratch + self.graphs
        return self.block_tables + self.histories + computed + self.adapters + self.pictures


def step_rows(config: Config, role: Role) -> int:
    """The most requests that one step of a worker of `role` has a row for."""
    if role is Role.PREFILL:
        return config.prefill.max_running
    return config.decode.max_batch_tokens + (config.prefill.max_running if config.computes_prompts(role) else 0)


def step_tokens(config: Config, role: Role) -> int:
    """The most tokens that one step of a worker of `role` computes: those of all that it shares its experts with, as
    all of them may go to experts of its own."""
    rows, chunk = config.decode.max_batch_tokens, config.prefill.chunk_tokens
    own = chunk if role is Role.PREFILL else rows + (chunk if config.computes_prompts(role) else 0)
    return own * config.dp_for(role)


def kept_bytes(rows: int, entries: int, tensors: int) -> int:
    """Bytes of device rows once they have room for `rows` of `entries`."""
    return _INT32 * tensors * _doubled(_FIRST_ROWS, rows) * _doubled(_FIRST_ENTRIES, entries)


def step_memory(spec: ModelSpec, pool_set: PoolSetSpec, config: Config, role: Role, on_cards: bool) -> StepMemory:
    """What steps of a worker of `role` keep and compute in, on each rank. `pool_set` is the whole model's."""
    rows, tokens, size = step_rows(config, role), step_tokens(config, role), pool_set.page_tokens
    positions, pages = spec.context, -(-spec.context // size)
    paged = sum(pool.kind is not PoolKind.STATE for pool in pool_set.pools)
    tables = paged * (_while_doubled(kept_bytes(rows, pages, _TABLE_TENSORS)) + _GATHERED_BYTES * rows * pages)
    histories = _while_doubled(kept_bytes(rows, positions, 1))
    at_once = min(rows * max(positions, spec.vocab_size), max(_PENALTY_ELEMENTS, positions, spec.vocab_size))
    itemsize = dtype_for(spec, config.engine).itemsize
    a_token = _WIDTHS * (spec.config.size("hidden_size") + widest_product(spec)) * itemsize
    scratch = SCRATCH_BYTES if on_cards else 0
    captures = on_cards and role is not Role.PREFILL and config.engine.graphs != "off"
    inputs = paged * (_INT32 * pages + _GRAPH_ROW_BYTES) + _GRAPH_ROW_BYTES
    decode = config.decode
    # A graph of steps with drafts has padding sequences besides its rows, and more tokens than such a step.
    drafted = min(decode.max_batch_tokens, decode.draft_requests) * max(2, 1 + decode.drafts) if decode.drafts else 0
    graphs = max(decode.max_batch_tokens, drafted) * (inputs + a_token) + scratch if captures else 0
    logit = _LOGIT_BYTES["cuda" if on_cards else "cpu"] + itemsize
    return StepMemory(
        tables,
        histories + _PENALTY_BYTES * at_once,
        rows * spec.vocab_size * logit,
        tokens * a_token,
        scratch,
        graphs,
        rows,
        adapter_bytes(spec, config),
        picture_bytes(spec, config, role),
    )


def adapter_bytes(spec: ModelSpec, config: Config) -> int:
    """Bytes of `adapters.max_loaded` adapters of the highest rank, on all layers that may have one; and of the file of
    one more, and its numbers in float32, while that is read. 0 where there can be none."""
    if not config.adapters.used:
        return 0
    weights = Weights.dry(spec, dtype_for(spec, config.engine))
    decoder = unchecked_model(spec, config.engine).build_dry(weights)
    each = sum(padded_numbers(layer, config.adapters.max_rank) for layer in decoder.adapted.values())
    return each * (config.adapters.max_loaded * weights.dtype.itemsize + 2 * torch.float32.itemsize)


def picture_bytes(spec: ModelSpec, config: Config, role: Role) -> int:
    """Bytes of the tower's results that are kept, and of as many of the largest pictures as may be begun: of their
    results, and of what these are computed in; 0 where a worker of `role` computes none."""
    seen = spec.pictures
    if seen is None or not config.computes_prompts(role) or config.no_images(seen.whole_positions):
        return 0
    _, vision = vision_fields(spec.path)
    pixels = min(seen.most_pixels(config.router.max_image_pixels), PICTURE_BYTES // 3)
    # A layer's stream before and behind it, normed rows, queries, keys, values, what they mix to, and inner units; of
    # another one that is begun the stream, queries, keys, values and what they mix to.
    hidden, inner = tower_widths(vision, seen.family)
    width = (8 + 5 * (AT_ONCE - 1)) * hidden + 4 * inner
    itemsize = dtype_for(spec, config.engine).itemsize
    shown = vision.peek("deepstack_visual_indexes") if seen.family == "qwen3_vl" else ()
    a_row = (1 + len(shown if isinstance(shown, list) else range(3))) * spec.config.size("hidden_size")
    a_patch = _COLOUR_BYTES * seen.patch**2 + width * itemsize
    return KEPT_BYTES + pixels // seen.patch**2 * a_patch + AT_ONCE * (pixels // seen.unit**2) * a_row * itemsize


def widest_product(spec: ModelSpec) -> int:
    """How many numbers the widest product of a layer gives for one token, all of its experts together."""
    config = spec.config.values
    chosen = next((n for key in ("num_experts_per_tok", "top_k_experts") if isinstance(n := config.get(key), int)), 1)
    widths = [0]
    for name, header in spec.headers.items():
        shape = header.shape
        if len(shape) < 2 or spec.vocab_size in shape:
            continue
        stacked = len(shape) > 2
        width = max(shape[1:3]) if stacked else shape[0]
        widths.append(width * (chosen if stacked or "experts." in name else 1))
    return max(widths)


def _while_doubled(nbytes: int) -> int:
    """While rows are doubled the old ones, half of them, are there as well."""
    return nbytes + nbytes // 2


def _doubled(size: int, least: int) -> int:
    while size < least:
        size *= 2
    return size
