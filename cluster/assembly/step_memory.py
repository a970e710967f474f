"""The memory that steps keep and compute in on a rank's device, besides its weights and pools, by configuration.

Steps keep rows from one to the next (`engine.runner.device_rows`): block tables of every pool of pages, and the tokens
of requests with penalties. A row is as long as the longest context, and there is one for each request that a step may
have; rows and entries double as they are needed. Requests beyond that, which take turns, have rows too: those come out
of what `cache.device_share` leaves.

What a step computes in grows with its tokens and with the rows that it draws for. Logits are counted for the most that
a draw asks for (cuts, and log-probabilities). Activations are an estimate, by the widest product of the model; what
attention keeps of parts of results has a bound of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Role
from twinpool.engine.attention.triton_backend.softmax_parts import SCRATCH_BYTES
from twinpool.engine.tensors.weight_loader import dtype_for

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

    @property
    def nbytes(self) -> int:
        return self.block_tables + self.histories + self.logits + self.activations + self.scratch + self.graphs


def step_rows(config: Config, role: Role) -> int:
    """The most requests that one step of a worker of `role` has a row for."""
    if role is Role.PREFILL:
        return config.prefill.max_running
    return config.decode.max_batch_tokens + (config.prefill.max_running if config.computes_prompts(role) else 0)


def step_tokens(config: Config, role: Role) -> int:
    """The most tokens that one step of a worker of `role` computes."""
    rows, chunk = config.decode.max_batch_tokens, config.prefill.chunk_tokens
    if role is Role.PREFILL:
        return chunk
    return rows + (chunk if config.computes_prompts(role) else 0)


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
    )


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
