"""The inputs of step graphs: tensors that stay where they are, into which each replayed step is copied.

All graphs read the same tensors, each as many rows, positions and pages of them as its size says. Tokens behind those
of the step are padding: sequences at position 0 whose writes go to the null page (or slot) as zeros, as a stale row's
do, so that they touch nothing and nobody reads what comes of them. A graph with several positions a row has twice as
many sequences as rows: the step's rows may have fewer positions each, and padding fills up the rest, no sequence with
more positions than any row has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec, PoolSpec
from twinpool.cache.pool.pool_set import GateDoor
from twinpool.engine.attention.attention_backend import AttentionBackend
from twinpool.engine.attention.attention_plan import AttentionPlan, SlotPlan
from twinpool.engine.layers.decoder import ForwardContext
from twinpool.engine.tensors.row_exact_linear import Numerics


class GraphSize(NamedTuple):
    """The size of a graph: what a step may have at most to be replayed by it."""

    rows: int
    """Sequences of the step."""
    pages: int
    """Entries of a block table."""
    positions: int = 1
    """Positions of each row."""

    @property
    def tokens(self) -> int:
        """Tokens of the graph: those of the step, and padding."""
        return self.rows * self.positions

    @property
    def sequences(self) -> int:
        """Sequences of the graph: the step's rows, and padding."""
        return self.rows if self.positions == 1 else 2 * self.rows


class _PoolInputs(NamedTuple):
    """The inputs of one pool of pages."""

    tables_bp: Tensor
    slots_t: Tensor
    firsts_b: Tensor | None


class GraphInputs:
    """The inputs of all graphs of a model, which have these `sizes`."""

    def __init__(self, spec: PoolSetSpec, numerics: Numerics, sizes: Sequence[GraphSize], device: torch.device) -> None:
        self._numerics, self._page_tokens = numerics, spec.page_tokens
        tokens, sequences = max(size.tokens for size in sizes), max(size.sequences for size in sizes)
        self._paged = [pool for pool in spec.pools if pool.kind is not PoolKind.STATE]
        self._tokens_m = torch.zeros(numerics.padded(tokens), dtype=torch.int64, device=device)
        self._positions_m = torch.zeros_like(self._tokens_m)
        self._starts_b = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._counted_b = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        """The offsets of one position a sequence, which never change."""
        self._offsets_b = torch.zeros_like(self._counted_b)
        """The offsets of graphs with several positions a row."""
        self._muted_t = torch.ones(tokens, dtype=torch.bool, device=device)
        self._pools = {
            pool.name: _PoolInputs(
                torch.zeros(sequences, max(self.width(pool, size) for size in sizes), dtype=torch.int32, device=device),
                torch.zeros(tokens, dtype=torch.int64, device=device),
                torch.zeros(sequences, dtype=torch.int32, device=device) if pool.window_tokens else None,
            )
            for pool in self._paged
        }
        self._states = {
            pool.name: torch.zeros(sequences, 1, dtype=torch.int32, device=device)
            for pool in spec.pools
            if pool.kind is PoolKind.STATE
        }
        self._muted_b = torch.ones(sequences, dtype=torch.bool, device=device)

    def width(self, pool: PoolSpec, size: GraphSize) -> int:
        """How many entries of a block table of `pool` a graph of this size reads."""
        if not pool.window_tokens:
            return size.pages
        return min(size.pages, (pool.window_tokens + size.positions - 2) // self._page_tokens + 2)

    def fit(self, ctx: ForwardContext, size: GraphSize) -> bool:
        """Whether a graph of this size can replay the step of `ctx`."""
        return all(
            len(plan.starts_b) <= size.rows
            and plan.max_queries <= size.positions
            and plan.tables_bp.shape[1] <= self.width(pool, size)
            for pool, plan in zip(self._paged, ctx.plans.values(), strict=True)
        )

    def context(
        self, size: GraphSize, attention: AttentionBackend, doors: Mapping[str, GateDoor], longest: int
    ) -> tuple[Tensor, ForwardContext]:
        """The tokens [M] and the forward context that a graph of this size is captured with. `longest`: the positions
        of the longest context."""
        tokens, sequences, padded = size.tokens, size.sequences, self._numerics.padded(size.tokens)
        offsets_b = (self._counted_b if size.positions == 1 else self._offsets_b)[: sequences + 1]
        plans = {
            pool.name: AttentionPlan(
                starts_b=self._starts_b[:sequences],
                offsets_b=offsets_b,
                tables_bp=tables_bp[:sequences, : self.width(pool, size)],
                slots_t=slots_t[:tokens],
                page_tokens=self._page_tokens,
                max_queries=size.positions,
                firsts_b=None if firsts_b is None else firsts_b[:sequences],
                muted_t=self._muted_t[:tokens],
            )
            for pool, (tables_bp, slots_t, firsts_b) in zip(self._paged, self._pools.values(), strict=True)
        }
        slots = {
            name: SlotPlan(
                tables_bp=slots_b1[:sequences],
                starts=(0,) * sequences,
                counts=(size.positions,) * sequences,
                starts_b=self._starts_b[:sequences],
                offsets_b=offsets_b,
                muted_b=self._muted_b[:sequences],
            )
            for name, slots_b1 in self._states.items()
        }
        positions_m = self._positions_m[:padded]
        ctx = ForwardContext(self._numerics, attention, positions_m, longest, tokens, plans, slots, doors)
        return self._tokens_m[:padded], ctx

    def fill(self, size: GraphSize, tokens_m: Tensor, ctx: ForwardContext) -> None:
        """Copy a step that fits into the inputs of a graph of this size."""
        tokens, sequences = size.tokens, size.sequences
        _put(self._tokens_m, tokens_m[: ctx.count], tokens, 0)
        _put(self._positions_m, ctx.positions_m[: ctx.count], tokens, 0)
        plans = list(ctx.plans.values())
        rows = len(plans[0].starts_b)
        _put(self._starts_b, plans[0].starts_b, sequences, 0)
        if size.positions > 1:
            self._pad_offsets(size, plans[0].offsets_b, ctx.count)
        muted_t = plans[0].muted_t
        _put(self._muted_t, muted_t if muted_t is not None else self._muted_t.new_zeros(ctx.count), tokens, 1)
        for name, (tables_bp, slots_t, firsts_b) in self._pools.items():
            plan = ctx.plans[name]
            tables_bp[:rows, : plan.tables_bp.shape[1]].copy_(plan.tables_bp)
            tables_bp[rows:sequences, : self._padding_pages(size)].fill_(0)
            _put(slots_t, plan.slots_t, tokens, 0)
            if firsts_b is not None:
                assert plan.firsts_b is not None, "tables of windows begin somewhere"
                _put(firsts_b, plan.firsts_b, sequences, 0)
        for name, slots_b1 in self._states.items():
            mine = ctx.slots[name]
            _put(slots_b1, mine.tables_bp, sequences, 0)
            muted_b = mine.muted_b
            _put(self._muted_b, muted_b if muted_b is not None else self._muted_b.new_zeros(rows), sequences, 1)

    def _padding_pages(self, size: GraphSize) -> int:
        """Entries of a block table that a sequence of padding reads: those of its positions from 0 on."""
        return -(-size.positions // self._page_tokens)

    def _pad_offsets(self, size: GraphSize, offsets_b: Tensor, count: int) -> None:
        """Copy the offsets of a step of `count` tokens. The tokens behind it go to sequences of padding, as many to
        each as a row has positions, until none is left."""
        here = self._offsets_b[: size.sequences + 1]
        rows = len(offsets_b) - 1
        here[: rows + 1].copy_(offsets_b)
        padding = self._counted_b[1 : size.sequences - rows + 1] * size.positions + count
        here[rows + 1 :].copy_(padding.clamp_(max=size.tokens))

    def try_out(self, size: GraphSize, vocabulary: int) -> None:
        """Fill in a step of padding alone, with tokens that differ."""
        tokens_t = (torch.arange(size.tokens, device=self._tokens_m.device) * 7919 + 1) % vocabulary
        _put(self._tokens_m, tokens_t, size.tokens, 0)
        if size.positions > 1:
            self._pad_offsets(size, self._counted_b[:1], 0)
        slots = [pool.slots_t for pool in self._pools.values()]
        for numbers in (self._positions_m, *slots):
            numbers[: size.tokens].fill_(0)
        for numbers in (self._starts_b, *self._states.values()):
            numbers[: size.sequences].fill_(0)
        self._muted_t[: size.tokens].fill_(1)
        self._muted_b[: size.sequences].fill_(1)
        for tables_bp, _, firsts_b in self._pools.values():
            tables_bp[: size.sequences].fill_(0)
            if firsts_b is not None:
                firsts_b[: size.sequences].fill_(0)


def _put(into: Tensor, values: Tensor, rows: int, padding: int) -> None:
    """Copy values to the begin of `into`, and the padding behind them up to `rows`."""
    count = len(values)
    into[:count].copy_(values)
    if count < rows:
        into[count:rows].fill_(padding)
